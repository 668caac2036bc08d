"""Gradients of sparse latent attention on TPU: rows come by DMA, and their gradient is added row by row in HBM.

Programs run one after another, and one query's ids are distinct: a row that several queries selected is added to in
their order, so the sums are the same in every run.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.sparse_mla.tpu import KEYS, LANES


def _dot(a, b, contract):
    """Sums in fp32 over the given axes."""
    return lax.dot_general(a, b, ((contract[:1], contract[1:]), ((), ())), preferred_element_type=jnp.float32)


def _copy_rows(ids, block, far, near, semaphore, action, back=False):
    """Starts or awaits the copies of one block's selected rows, tiles [rows, tiles, LANES] on both sides."""

    def one(i, _):
        row = ids[0, block * KEYS + i]

        @pl.when(row >= 0)
        def _():
            source, target = far.at[row], near.at[i]
            copy = pltpu.make_async_copy(*((target, source) if back else (source, target)), semaphore)
            copy.start() if action == "start" else copy.wait()

    lax.fori_loop(0, KEYS, one, None)


def _kernel(*refs, scale, collect):
    ids, seen, q, dout, lse, shift, rows = refs[:7]
    if collect:  # the accumulator comes in and goes out through one buffer
        _, dq, sums, buffer, arrived, pages, page_arrived = refs[7:]
    else:
        dq, buffer, arrived = refs[7:]
    blocks, tiles = ids.shape[1] // KEYS, buffer.shape[2]
    dq[...] = jnp.zeros_like(dq)
    # lse is -inf where nothing is selected.
    level = jnp.where(lse[...] > -jnp.inf, lse[...], 0.0)

    def send(block):
        slot = lax.rem(block, 2)
        buffer[slot] = jnp.zeros(buffer.shape[1:], buffer.dtype)  # what no row is read into
        _copy_rows(ids, block, rows, buffer.at[slot], arrived.at[slot], "start")

    send(jnp.int32(0))

    def step(block, _):
        pl.when(block + 1 < blocks)(lambda: send(block + 1))
        slot = lax.rem(block, 2)
        _copy_rows(ids, block, rows, buffer.at[slot], arrived.at[slot], "wait")
        kv = jnp.concatenate([buffer[slot, :, tile] for tile in range(tiles)], axis=1)
        mine = seen[:, pl.ds(pl.multiple_of(block * KEYS, KEYS), KEYS)] >= 0
        weights = jnp.where(mine, jnp.exp(_dot(q[...], kv, (1, 1)) * scale - level), 0.0)
        dlogits = weights * (_dot(dout[...], kv, (1, 1)) - shift[...]) * scale
        dlogits = jnp.where(mine, dlogits, 0.0).astype(kv.dtype)
        dq[...] += _dot(dlogits, kv, (1, 0))
        if collect:
            _copy_rows(ids, block, sums, pages, page_arrived, "start")
            drows = _dot(dlogits, q[...], (0, 0)) + _dot(weights.astype(kv.dtype), dout[...], (0, 0))
            _copy_rows(ids, block, sums, pages, page_arrived, "wait")
            for tile in range(tiles):
                pages[:, tile] += drows[:, tile * LANES : (tile + 1) * LANES]
            _copy_rows(ids, block, sums, pages, page_arrived, "start", back=True)
            _copy_rows(ids, block, sums, pages, page_arrived, "wait", back=True)

    lax.fori_loop(0, blocks, step, None)


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
    """As `reference.sparse_mla_backward`, always deterministic; the weights are rounded to the rows' type.

    The rows and the accumulator are padded to whole tiles of 128 numbers first, once a call.
    """
    (t, n, width), collect = q.shape, accumulator is not None
    tiles = pl.cdiv(width, LANES)

    def widen(x):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, tiles * LANES - x.shape[-1])])

    def per_query(*shape, **options):
        return pl.BlockSpec((None, *shape), lambda t: (t, 0, 0), **options)

    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % KEYS)), constant_values=-1)[:, None]
    k, wide, in_hbm = ids.shape[2], per_query(n, tiles * LANES), pl.BlockSpec(memory_space=pl.ANY)
    args = [ids, ids, widen(q), widen(dout.astype(q.dtype)), lse[..., None], shift[..., None]]
    args.append(widen(rows).reshape(-1, tiles, LANES))
    in_specs = [per_query(1, k, memory_space=pltpu.SMEM), per_query(1, k), wide, wide]
    in_specs += [per_query(n, 1), per_query(n, 1), in_hbm]
    out_shape, out_specs = [jax.ShapeDtypeStruct((t, n, tiles * LANES), jnp.float32)], [wide]
    scratch = [pltpu.VMEM((2, KEYS, tiles, LANES), rows.dtype), pltpu.SemaphoreType.DMA((2,))]
    if collect:
        args.append(widen(accumulator).reshape(-1, tiles, LANES))
        in_specs.append(in_hbm)
        out_shape.append(jax.ShapeDtypeStruct(args[-1].shape, jnp.float32))
        out_specs.append(in_hbm)
        scratch += [pltpu.VMEM((KEYS, tiles, LANES), jnp.float32), pltpu.SemaphoreType.DMA]
    dq, *sums = pl.pallas_call(
        functools.partial(_kernel, scale=scale, collect=collect),
        grid=(t,),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch,
        input_output_aliases={len(args) - 1: 1} if collect else {},
        interpret=interpret,
        name="sparse_mla_backward",
    )(*args)
    return dq[..., :width], sums[0].reshape(-1, tiles * LANES)[:, :width] if collect else None
