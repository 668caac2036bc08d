"""Sparse latent attention on TPU: each selected row is copied by itself, two buffers deep, by one program a query.

A row of bf16 cannot be copied alone (rows lie in pairs), so the latents travel as 32-bit words: word i holds number i
in its low half and number i + half in its high half, half being a multiple of 128 lanes. Right rather than fast: the
packing is a pass over the latents that resident state in this layout would not need.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

LANES = 128
KEYS = 128  # rows of a buffer
HEADS = 16  # rows of a bf16 tile: heads are padded to whole ones


def _half(width: int) -> int:
    """Words of a row."""
    return pl.cdiv(pl.cdiv(width, 2), LANES) * LANES


def _widen(x, half):
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 2 * half - x.shape[-1])])


def _pack(rows, half):
    """uint32 [S, half]."""
    words = lax.bitcast_convert_type(_widen(rows, half), jnp.uint16).astype(jnp.uint32)
    return words[:, :half] | (words[:, half:] << 16)


def _unpack(words):
    """bf16 [K, 2 half]; a bf16 number is the upper half of its fp32."""
    low = lax.bitcast_convert_type(words << 16, jnp.float32)
    high = lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.concatenate([low, high], axis=1).astype(jnp.bfloat16)


def _dot(a, b, contract):
    """Sums in fp32 over the given axes."""
    return lax.dot_general(a, b, ((contract[:1], contract[1:]), ((), ())), preferred_element_type=jnp.float32)


def _copies(ids, block, source, target, semaphore, action, back=False):
    """Starts or awaits the copies of one block's selected rows; what is not selected is never read."""

    def one(j, _):
        row = ids[0, 0, block * KEYS + j]

        @pl.when(row >= 0)
        def _():
            far, near = source.at[pl.ds(row, 1)], target.at[pl.ds(j, 1)]
            copy = pltpu.make_async_copy(*((near, far) if back else (far, near)), semaphore)
            copy.start() if action == "start" else copy.wait()

        return 0

    lax.fori_loop(0, KEYS, one, 0)


def _each_block(ids, blocks, rows, buffer, semaphore, body):
    """Calls body(block, its rows in bf16) in order, the next block's copies under way."""

    def start(block):
        slot = lax.rem(block, 2)
        buffer[slot] = jnp.zeros(buffer.shape[1:], buffer.dtype)  # no row is read from where none is selected
        _copies(ids, block, rows, buffer.at[slot], semaphore.at[slot], "start")

    start(jnp.int32(0))

    def step(block, _):
        @pl.when(block + 1 < blocks)
        def _():
            start(block + 1)

        slot = lax.rem(block, 2)
        _copies(ids, block, rows, buffer.at[slot], semaphore.at[slot], "wait")
        body(block, _unpack(buffer[slot]))
        return 0

    lax.fori_loop(0, blocks, step, 0)


def _seen(ids_lanes, block):
    return ids_lanes[0, :, pl.ds(pl.multiple_of(block * KEYS, KEYS), KEYS)] >= 0  # [1, KEYS]


def _forward_kernel(ids, ids_lanes, q, rows, out, lse, buffer, semaphore, total, top, acc, *, blocks, scale):
    total[...], acc[...] = jnp.zeros_like(total), jnp.zeros_like(acc)
    top[...] = jnp.full_like(top, -jnp.inf)

    def body(block, kv):
        logits = jnp.where(_seen(ids_lanes, block), _dot(q[0], kv, (1, 1)) * scale, -jnp.inf)
        best = jnp.maximum(top[:, :1], logits.max(axis=1, keepdims=True))
        shift = jnp.where(best > -jnp.inf, best, 0.0)
        weights = jnp.exp(logits - shift)
        keep = jnp.exp(top[:, :1] - shift)
        acc[...] = acc[...] * keep + _dot(weights.astype(kv.dtype), kv, (1, 0))
        total[...] = total[...] * keep + weights.sum(axis=1, keepdims=True)
        top[...] = jnp.broadcast_to(best, top.shape)

    _each_block(ids, blocks, rows, buffer, semaphore, body)
    some = total[...] > 0
    safe = jnp.where(some, total[...], 1.0)
    out[0] = acc[...] / safe[:, :1]
    lse[0] = jnp.where(some, top[...] + jnp.log(safe), -jnp.inf)


def _backward_kernel(*refs, blocks, scale, collect):
    ids, ids_lanes, q, dout, lse, shift, rows = refs[:7]
    if collect:  # the accumulator comes in and goes out through one buffer
        _, dq, sums, buffer, semaphore, pages, page_semaphore = refs[7:]
    else:
        dq, buffer, semaphore = refs[7:]
    dq[...] = jnp.zeros_like(dq)

    def body(block, kv):
        seen = _seen(ids_lanes, block)
        # lse is -inf where nothing is selected.
        level = jnp.where(lse[0][:, :1] > -jnp.inf, lse[0][:, :1], 0.0)
        weights = jnp.where(seen, jnp.exp(_dot(q[0], kv, (1, 1)) * scale - level), 0.0)
        dlogits = weights * (_dot(dout[0], kv, (1, 1)) - shift[0][:, :1]) * scale
        dlogits = jnp.where(seen, dlogits, 0.0).astype(kv.dtype)
        dq[0] += _dot(dlogits, kv, (1, 0))
        if collect:
            drows = _dot(dlogits, q[0], (0, 0)) + _dot(weights.astype(kv.dtype), dout[0], (0, 0))
            _copies(ids, block, sums, pages, page_semaphore, "start")
            _copies(ids, block, sums, pages, page_semaphore, "wait")
            pages[...] += drows
            # Programs run one after another, so a row that several queries selected is added to in their order.
            _copies(ids, block, sums, pages, page_semaphore, "start", back=True)
            _copies(ids, block, sums, pages, page_semaphore, "wait", back=True)

    _each_block(ids, blocks, rows, buffer, semaphore, body)


def _inputs(q, ids, half):
    """Queries by whole tiles of heads, ids by whole buffers."""
    q = jnp.pad(_widen(q, half), ((0, 0), (0, -q.shape[1] % HEADS), (0, 0)))
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % KEYS)), constant_values=-1)
    return q, ids[:, None]


def _spec(*shape, **options):
    return pl.BlockSpec((1, *shape), lambda t: (t, 0, 0), **options)


def forward(
    q: Float[Array, "T N W"],
    rows: Float[Array, "S W"],
    ids: Int[Array, "T K"],
    *,
    scale: float,
    value_dim: int,
    interpret: bool = False,
) -> tuple[Float[Array, "T N R"], Float[Array, "T N"]]:
    """`reference.sparse_mla` for bf16 inputs; the weights are rounded to bf16 before they meet the values."""
    (t, heads, _), half = q.shape, _half(q.shape[2])
    q, ids = _inputs(q, ids, half)
    n, k = q.shape[1], ids.shape[2]
    out, lse = pl.pallas_call(
        functools.partial(_forward_kernel, blocks=k // KEYS, scale=scale),
        out_shape=(
            jax.ShapeDtypeStruct((t, n, 2 * half), jnp.float32),
            jax.ShapeDtypeStruct((t, n, LANES), jnp.float32),
        ),
        grid=(t,),
        in_specs=[
            _spec(1, k, memory_space=pltpu.SMEM),
            _spec(1, k),
            _spec(n, 2 * half),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=(_spec(n, 2 * half), _spec(n, LANES)),
        scratch_shapes=[
            pltpu.VMEM((2, KEYS, half), jnp.uint32),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.VMEM((n, LANES), jnp.float32),
            pltpu.VMEM((n, LANES), jnp.float32),
            pltpu.VMEM((n, 2 * half), jnp.float32),
        ],
        interpret=interpret,
    )(ids, ids, q, _pack(rows, half))
    return out[:, :heads, :value_dim], lse[:, :heads, 0]


def backward(
    q: Float[Array, "T N W"],
    rows: Float[Array, "S W"],
    ids: Int[Array, "T K"],
    lse: Float[Array, "T N"],
    dout: Float[Array, "T N R"],
    shift: Float[Array, "T N"],
    accumulator: Float[Array, "S W"] | None,
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[Float[Array, "T N W"], Float[Array, "S W"] | None]:
    """`reference.sparse_mla_backward` for bf16 inputs, in the order of the queries; None collects nothing."""
    (t, heads, width), half, collect = q.shape, _half(q.shape[2]), accumulator is not None
    q, ids = _inputs(q, ids, half)
    n, k = q.shape[1], ids.shape[2]
    dout = jnp.pad(_widen(dout, half), ((0, 0), (0, n - heads), (0, 0))).astype(q.dtype)
    # Padded heads: lse of -inf, so that no weight of theirs can overflow, and nothing to subtract.
    lse, shift = (
        jnp.broadcast_to(jnp.pad(x, ((0, 0), (0, n - heads)), constant_values=fill)[..., None], (t, n, LANES))
        for x, fill in ((lse, -jnp.inf), (shift, 0.0))
    )
    args = [ids, ids, q, dout, lse, shift, _pack(rows, half)]
    in_specs = [_spec(1, k, memory_space=pltpu.SMEM), _spec(1, k), _spec(n, 2 * half), _spec(n, 2 * half)]
    in_specs += [_spec(n, LANES), _spec(n, LANES), pl.BlockSpec(memory_space=pl.ANY)]
    out_shape, out_specs = [jax.ShapeDtypeStruct(q.shape, jnp.float32)], [_spec(n, 2 * half)]
    scratch = [pltpu.VMEM((2, KEYS, half), jnp.uint32), pltpu.SemaphoreType.DMA((2,))]
    if collect:
        args.append(_widen(accumulator, half))
        in_specs.append(pl.BlockSpec(memory_space=pl.ANY))
        out_shape.append(jax.ShapeDtypeStruct(args[-1].shape, jnp.float32))
        out_specs.append(pl.BlockSpec(memory_space=pl.ANY))
        scratch += [pltpu.VMEM((KEYS, 2 * half), jnp.float32), pltpu.SemaphoreType.DMA]
    dq, *sums = pl.pallas_call(
        functools.partial(_backward_kernel, blocks=k // KEYS, scale=scale, collect=collect),
        out_shape=out_shape,
        grid=(t,),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=scratch,
        input_output_aliases={len(args) - 1: 1} if collect else {},
        interpret=interpret,
    )(*args)
    return dq[:, :heads, :width], sums[0][:, :width] if collect else None
