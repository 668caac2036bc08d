"""Sparse latent attention on Hopper: Mosaic GPU, rows gathered by cp.async straight into what wgmma reads.

One program is one query and 64 heads. Two warpgroups take the query's keys in blocks of 64, one the even blocks, the
other the odd ones: each gathers its block, forms its scores and weights, and hands the weights over in the place of the
block's rotated keys, which are spent by then. Both warpgroups then meet the block's values, each with one half of the
columns, so that the 64 x 512 fp32 accumulator fits in registers. While one block is worked on the other's rows arrive.
Rows from the L2 cache arrive early enough for both blocks' scores to be formed side by side; waiting for rows from
further away before the first block is done with would only delay the next ones.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.sparse_mla import hopper_copies as copies

HEADS, KEYS = 64, 64  # of a program; of a block
HALF, ROPE = 256, 64  # columns of half the values; of the rotated key
CACHE = 40 << 20  # bytes of rows that the L2 cache keeps
LOG2E = math.log2(math.e)
ROW, COLUMN, WGMMA = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA


def _over_keys(x):
    return jax.lax.broadcast_in_dim(x, (HEADS, KEYS), [0])


def _scaled(acc, decay):
    return acc * jax.lax.broadcast_in_dim(decay, acc.shape, [0])


def _plus_product(acc, weights, values):
    def body(ref):
        plgpu.wgmma(ref, weights, values)

    return pl.run_state(body)(plgpu.ACC.init(acc))


def _finite(top):
    """A running maximum to subtract; nothing selected so far is -inf."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def _scores(q, k, ids, scale):
    """One block's scores [heads, keys], in units of log 2."""

    def products(acc):
        for a, b in zip(q, k, strict=True):
            plgpu.wgmma(acc, a, b.transpose((1, 0)))
        return acc[...]

    logits = pl.run_scoped(products, plgpu.ACC((HEADS, KEYS), jnp.float32)) * (scale * LOG2E)
    mask = jnp.where(copies.load(ids, COLUMN) >= 0, 0.0, -jnp.inf)
    return logits + jax.lax.broadcast_in_dim(mask, logits.shape, [1])


def _kernel(q_ref, rows_ref, ids_ref, out_ref, lse_ref, *scratch, scale, early):
    q, k, ids, per_head, loaded, weighed, spent, summed = scratch
    group, program = jax.lax.axis_index("wg"), jax.lax.axis_index("program")
    head_blocks = q_ref.shape[1] // HEADS
    query, heads = program // head_blocks, pl.ds((program % head_blocks) * HEADS, HEADS)
    pairs = ids_ref.shape[1]

    def block_ids(pair, side):
        return ids.at[pair, pl.ds(side * KEYS, KEYS)]

    def gather(pair, side):
        parts = [(part.at[side], first) for part, first in zip(k, (0, HALF, 2 * HALF), strict=True)]
        copies.gather_rows(rows_ref, block_ids(pair, side), parts)

    def start():
        top = plgpu.layout_cast(jnp.full((HEADS,), -jnp.inf, jnp.float32), ROW)
        total = plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), ROW)
        acc = plgpu.layout_cast(jnp.zeros((HEADS, HALF), jnp.float32), WGMMA)
        return acc, top, total

    def scores(pair, side):
        copies.wait_rows()
        return _scores(q, [part.at[side] for part in k], block_ids(pair, side), scale)

    def own_block(logits, side, acc, top, total):
        """Weighs this warpgroup's block, hands the weights over and adds its half of the values."""
        new_top = jnp.maximum(top, logits.max(axis=1))
        weights = jnp.exp2(logits - _over_keys(_finite(new_top)))
        low = weights.astype(jnp.bfloat16)
        k[2][side] = low
        per_head[side] = new_top
        plgpu.commit_smem()
        plgpu.barrier_arrive(weighed.at[side])
        decay = jnp.exp2(top - _finite(new_top))
        total = total * decay + weights.sum(axis=1)
        acc = _plus_product(_scaled(acc, decay), low, k[side].at[side])
        return acc, new_top, total

    def other_block(side, acc, top, total):
        """Adds this warpgroup's half of the values of the block that the other one weighed."""
        plgpu.barrier_wait(weighed.at[side])
        new_top = copies.load(per_head.at[side], ROW)
        decay = jnp.exp2(top - _finite(new_top))
        acc = _plus_product(_scaled(acc, decay), k[2].at[side], k[1 - side].at[side])
        plgpu.barrier_arrive(spent.at[side])
        return acc, new_top, total * decay

    def refill(pair, side):
        plgpu.barrier_wait(spent.at[side])
        pl.when(pair + 1 < pairs)(lambda: gather(pair + 1, side))

    def finish(side, acc, top, total):
        per_head[2 + side] = total
        plgpu.barrier_arrive(summed)
        plgpu.barrier_wait(summed)
        total += copies.load(per_head.at[3 - side], ROW)
        some = total > 0
        divisor = jnp.where(some, total, 1.0)
        out_ref[query, heads, pl.ds(side * HALF, HALF)] = acc / jax.lax.broadcast_in_dim(divisor, acc.shape, [0])
        if side == 0:
            lse_ref[query, heads] = jnp.where(some, top / LOG2E + jnp.log(divisor), -jnp.inf)

    @pl.when(group == 0)
    def _():
        plgpu.copy_gmem_to_smem(ids_ref.at[query], ids, loaded.at[0])
        for i, first in enumerate((0, HALF, 2 * HALF)):
            plgpu.copy_gmem_to_smem(q_ref.at[query, heads, pl.ds(first, q[i].shape[1])], q[i], loaded.at[i + 1])

    plgpu.barrier_wait(loaded.at[0])
    for side in (0, 1):

        @pl.when(group == side)
        def _(side=side):
            gather(0, side)
            for i in range(3):
                plgpu.barrier_wait(loaded.at[i + 1])

            def pair_step(pair, carry):
                if side == 0:
                    carry = own_block(scores(pair, 0), 0, *carry)
                    refill(pair, 0)
                    return other_block(1, *carry)
                logits = scores(pair, 1) if early else None
                carry = other_block(0, *carry)
                carry = own_block(logits if early else scores(pair, 1), 1, *carry)
                refill(pair, 1)
                return carry

            finish(side, *jax.lax.fori_loop(0, pairs, pair_step, start()))


# Lowered once for all calls of a program.
@functools.partial(jax.jit, static_argnames=("scale",))
def forward(
    q: Float[Array, "T N 576"],
    rows: Float[Array, "S 576"],
    ids: Int[Array, "T K"],
    *,
    scale: float,
) -> tuple[Float[Array, "T N 512"], Float[Array, "T N"]]:
    """As `reference.sparse_mla` for bf16, value_dim 512."""
    t, n, width = q.shape
    q = jnp.pad(q, ((0, 0), (0, -n % HEADS), (0, 0)))
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % (2 * KEYS))), constant_values=-1)
    ids = ids.reshape(t, -1, 2 * KEYS)

    def tile(*shape):
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=copies.TRANSFORMS)

    scratch = [
        [tile(HEADS, HALF), tile(HEADS, HALF), tile(HEADS, ROPE)],
        [tile(2, KEYS, HALF), tile(2, KEYS, HALF), tile(2, KEYS, ROPE)],
        plgpu.SMEM(ids.shape[1:], jnp.int32),
        plgpu.SMEM((4, HEADS), jnp.float32),  # running maxima and sums of the two warpgroups
        plgpu.Barrier(num_barriers=4),  # ids and q have arrived
        plgpu.Barrier(num_barriers=2),  # a block's weights are written
        plgpu.Barrier(num_barriers=2),  # a block is done with
        plgpu.Barrier(num_arrivals=2),
    ]
    out, lse = plgpu.kernel(
        functools.partial(_kernel, scale=scale, early=rows.size * 2 <= CACHE),
        out_type=[
            jax.ShapeDtypeStruct((t, q.shape[1], 2 * HALF), jnp.float32),
            jax.ShapeDtypeStruct((t, q.shape[1]), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(t * q.shape[1] // HEADS,),
        grid_names=("program",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )(q, rows, ids)
    return out[:, :n], lse[:, :n]
