"""Gradients of sparse latent attention on Hopper: Mosaic GPU, rows gathered by cp.async, gradients added atomically.

One program is one query and 64 heads; it walks the query's keys in blocks of 64. All scores are formed keys by heads,
so that log-sum-exps belong to columns and weights are what the rows' gradient multiplies from the left. Of the two
warpgroups the first forms the weights, the second the gradient of the scores. Then each adds to its half of dq, the
next block's rows are sent for, and each forms the gradient of its half of the rows' columns, 64 at a time, which leaves
by atomic adds.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.sparse_mla import hopper_copies as copies
from pallas_kernels.sparse_mla import reference

HEADS, KEYS = 64, 64  # of a program; of a block
HALF, ROPE = 256, 64  # columns of half the values; of the rotated key
PIECE = 64  # columns of the rows' gradient formed at once
ID_SLOTS = 4  # blocks whose ids are at hand
LOG2E = math.log2(math.e)
ROW, COLUMN, WGMMA = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA


def _product(pairs, columns=HEADS):
    """The sum of a @ b over pairs, 64 rows."""

    def body(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((KEYS, columns), jnp.float32))


def _plus_product(acc, a, b):
    def body(ref):
        plgpu.wgmma(ref, a, b)

    return pl.run_state(body)(plgpu.ACC.init(acc))


def _per_key(x):
    return jax.lax.broadcast_in_dim(x, (KEYS, HEADS), [0])


def _per_head(x):
    return jax.lax.broadcast_in_dim(x, (KEYS, HEADS), [1])


def _transposed(ref):
    return ref.transpose((1, 0))


def _kernel(*refs, scale, rows_gradient):
    q_ref, rows_ref, ids_ref, lse_ref, dout_ref, shift_ref, *refs = refs
    # Sums to add to come before the results, as an input that is written; what is added in order is a result.
    total_ref = refs.pop(0) if rows_gradient == "atomic" else None
    dq_ref = refs.pop(0)
    drows_ref = refs.pop(0) if rows_gradient == "in_order" else None
    q, dout, k, weights, dscores, ids, per_head, *barriers = refs
    lse, shift = per_head.at[0], per_head.at[1]
    loaded, ids_loaded, gathered, weighed, derived, spent = barriers
    group, program = jax.lax.axis_index("wg"), jax.lax.axis_index("program")
    head_blocks = q_ref.shape[1] // HEADS
    query, heads = program // head_blocks, pl.ds((program % head_blocks) * HEADS, HEADS)
    blocks = ids_ref.shape[1]

    def send_ids(block):
        slot = block % ID_SLOTS
        plgpu.copy_gmem_to_smem(ids_ref.at[query, block], ids.at[slot], ids_loaded.at[slot])

    def gather(block, side):
        """Each warpgroup sends for half of the block's rows."""
        slot, half = block % ID_SLOTS, pl.ds(side * KEYS // 2, KEYS // 2)
        plgpu.barrier_wait(ids_loaded.at[slot])
        parts = [(part.at[half], first) for part, first in zip(k, (0, HALF, 2 * HALF), strict=True)]
        copies.gather_rows(rows_ref, ids.at[slot, half], parts)

    def weigh(block):
        logits = _product([(a, _transposed(b)) for a, b in zip(k, q, strict=True)])
        mask = jnp.where(copies.load(ids.at[block % ID_SLOTS], ROW) >= 0, 0.0, -jnp.inf)
        logits = logits * (scale * LOG2E) - _per_head(copies.load(lse, COLUMN))
        weights[...] = jnp.exp2(logits + _per_key(mask)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.barrier_arrive(weighed)

    def derive():
        dweights = _product([(a, _transposed(b)) for a, b in zip(k[:2], dout, strict=True)])
        dweights = (dweights - _per_head(copies.load(shift, COLUMN))) * scale
        plgpu.barrier_wait(weighed)
        dscores[...] = (copies.load(weights, WGMMA).astype(jnp.float32) * dweights).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.barrier_arrive(derived)

    def rows_pieces(block, side):
        """What this warpgroup's half of the columns, and the second one's rotated key, get from this query."""

        def write(x, column):
            if rows_gradient == "atomic":
                copies.add_to_rows(total_ref, ids.at[block % ID_SLOTS], x, column)
            else:
                copies.store_rows(drows_ref.at[program, block], x, column)

        for first in range(0, HALF, PIECE):
            piece = pl.ds(first, PIECE)
            x = _product([(weights, dout[side].at[:, piece]), (dscores, q[side].at[:, piece])], PIECE)
            write(x, side * HALF + first)
        if side == 1:
            write(_product([(dscores, q[2])], ROPE), 2 * HALF)

    def step(side, block, dq):
        copies.wait_rows()
        plgpu.barrier_arrive(gathered)
        plgpu.barrier_wait(gathered)  # both warpgroups are done with the block before
        if side == 0:
            pl.when(block + 2 < blocks)(lambda: send_ids(block + 2))
            weigh(block)
        else:
            derive()
        plgpu.barrier_wait(derived)
        dq = tuple(
            _plus_product(acc, _transposed(dscores), part)
            for acc, part in zip(dq, (k[0], k[2]) if side == 0 else (k[1],), strict=True)
        )
        plgpu.barrier_arrive(spent)
        plgpu.barrier_wait(spent)
        pl.when(block + 1 < blocks)(lambda: gather(block + 1, side))
        if rows_gradient:
            rows_pieces(block, side)
        return dq

    @pl.when(group == 0)
    def _():
        for block in range(min(2, blocks)):
            send_ids(block)
        arrivals = [loaded.at[i] for i in range(7)]
        plgpu.copy_gmem_to_smem(lse_ref.at[query, heads], lse, arrivals[0])
        plgpu.copy_gmem_to_smem(shift_ref.at[query, heads], shift, arrivals[1])
        for (source, first), part, barrier in zip(
            ((q_ref, 0), (q_ref, HALF), (q_ref, 2 * HALF), (dout_ref, 0), (dout_ref, HALF)),
            (*q, *dout),
            arrivals[2:],
            strict=True,
        ):
            plgpu.copy_gmem_to_smem(source.at[query, heads, pl.ds(first, part.shape[1])], part, barrier)

    for side in (0, 1):

        @pl.when(group == side)
        def _(side=side):
            gather(0, side)
            for i in range(7):
                plgpu.barrier_wait(loaded.at[i])
            columns = ((0, HALF), (2 * HALF, ROPE)) if side == 0 else ((HALF, HALF),)
            start = tuple(plgpu.layout_cast(jnp.zeros((HEADS, n), jnp.float32), WGMMA) for _, n in columns)
            dq = jax.lax.fori_loop(0, blocks, functools.partial(step, side), start)
            for (first, n), x in zip(columns, dq, strict=True):
                dq_ref[query, heads, pl.ds(first, n)] = x.astype(jnp.bfloat16)


def _call(q, rows, ids, lse, dout, shift, total, rows_gradient, scale):
    """The kernel on padded operands: dq, and with rows_gradient "in_order" what each row gets from each program."""

    def tile(*shape):
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=copies.TRANSFORMS)

    scratch = [
        [tile(HEADS, HALF), tile(HEADS, HALF), tile(HEADS, ROPE)],
        [tile(HEADS, HALF), tile(HEADS, HALF)],
        [tile(KEYS, HALF), tile(KEYS, HALF), tile(KEYS, ROPE)],
        tile(KEYS, HEADS),
        tile(KEYS, HEADS),
        plgpu.SMEM((ID_SLOTS, KEYS), jnp.int32),
        plgpu.SMEM((2, HEADS), jnp.float32),  # lse and shift
        plgpu.Barrier(num_barriers=7),  # q, dout and what belongs to heads have arrived
        plgpu.Barrier(num_barriers=ID_SLOTS),
        plgpu.Barrier(num_arrivals=2),  # the block's rows have arrived
        plgpu.Barrier(),  # its weights are written
        plgpu.Barrier(),  # its scores' gradient is written
        plgpu.Barrier(num_arrivals=2),  # its rows are done with
    ]
    programs = q.shape[0] * q.shape[1] // HEADS
    results = [jax.ShapeDtypeStruct(q.shape, jnp.bfloat16)]
    if rows_gradient == "in_order":
        results.append(jax.ShapeDtypeStruct((programs, *ids.shape[1:], q.shape[2]), jnp.float32))
    kernel = plgpu.kernel(
        functools.partial(_kernel, scale=scale, rows_gradient=rows_gradient),
        out_type=results,
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )
    totals = [] if total is None else [total]
    return kernel(q, rows, ids, lse, dout, shift, *totals)


# Lowered once for all calls of a program.
@functools.partial(jax.jit, static_argnames=("scale", "deterministic"))
def backward(
    q: Float[Array, "T N 576"],
    rows: Float[Array, "S 576"],
    ids: Int[Array, "T K"],
    lse: Float[Array, "T N"],
    dout: Float[Array, "T N 512"],
    shift: Float[Array, "T N"],
    accumulator: Float[Array, "S 576"] | None,
    *,
    scale: float,
    deterministic: bool,
) -> tuple[Float[Array, "T N 576"], Float[Array, "S 576"] | None]:
    """As `reference.sparse_mla_backward` for bf16 and value_dim 512; dq is bf16.

    Atomic adds go straight into the accumulator, whose buffer the result takes over. Deterministic, the kernel writes
    what each selected row gets, a block of queries at a time, and `reference.add_rows` adds it up in order.
    """
    t, n, width = q.shape
    some = lse > -jnp.inf
    dout = jnp.where(some[..., None], dout, 0).astype(jnp.bfloat16)
    lse = jnp.where(some, lse, 0) * LOG2E
    pad = ((0, 0), (0, -n % HEADS))
    q, dout = jnp.pad(q, (*pad, (0, 0))), jnp.pad(dout, (*pad, (0, 0)))
    lse, shift = jnp.pad(lse, pad), jnp.pad(shift, pad)
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % KEYS)), constant_values=-1).reshape(t, -1, KEYS)
    if accumulator is None:
        return _call(q, rows, ids, lse, dout, shift, None, None, scale)[0][:, :n], None
    if not deterministic:
        total = jax.new_ref(accumulator)
        (dq,) = _call(q, rows, ids, lse, dout, shift, total, "atomic", scale)
        return dq[:, :n], jax.freeze(total)

    def block(accumulator, args):
        q, ids, lse, dout, shift = args
        dq, drows = _call(q, rows, ids, lse, dout, shift, None, "in_order", scale)
        drows = drows.reshape(q.shape[0], -1, ids.shape[1] * KEYS, width).sum(1)  # over blocks of heads
        return reference.add_rows(accumulator, ids.reshape(q.shape[0], -1), drows, deterministic=True), dq

    blocks = (reference.query_blocks(q), reference.query_blocks(ids, -1))
    blocks += tuple(reference.query_blocks(x) for x in (lse, dout, shift))
    accumulator, dq = jax.lax.scan(block, accumulator, blocks)
    return dq.reshape(-1, *q.shape[1:])[:t, :n], accumulator
