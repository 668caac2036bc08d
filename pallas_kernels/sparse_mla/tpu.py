"""Sparse latent attention's forward pass on TPU: a query's rows come by DMA, one each, 128 ahead of the arithmetic.

One program is one query. A row alone can only be copied in whole 128-lane tiles, so the rows are padded and laid out as
[S, W / 128, 128] first, once a call.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

KEYS = LANES = 128  # of a block; of a tile


def _kernel(ids_ref, seen_ref, q_ref, rows_ref, out_ref, lse_ref, buffer, arrived, *, scale):
    heads, value_tiles = q_ref.shape[0], out_ref.shape[1] // LANES
    blocks = ids_ref.shape[1] // KEYS

    def each_row(block, do, otherwise):
        def one(i, _):
            row, slot = ids_ref[0, block * KEYS + i], block % 2
            copy = pltpu.make_async_copy(rows_ref.at[jnp.maximum(row, 0)], buffer.at[slot, i], arrived.at[slot])
            pl.when(row >= 0)(lambda: do(copy))
            pl.when(row < 0)(lambda: otherwise(slot, i))

        jax.lax.fori_loop(0, KEYS, one, None)

    def clear(slot, i):
        buffer[slot, i] = jnp.zeros(buffer.shape[2:], buffer.dtype)

    def send(block):
        each_row(block, lambda copy: copy.start(), clear)

    def step(block, carry):
        top, total, accs = carry
        pl.when(block + 1 < blocks)(lambda: send(block + 1))
        each_row(block, lambda copy: copy.wait(), lambda slot, i: None)
        kv = [buffer[block % 2, :, tile] for tile in range(buffer.shape[2])]
        logits = jnp.zeros((heads, KEYS), jnp.float32)
        for tile, k in enumerate(kv):
            part = q_ref[:, tile * LANES : (tile + 1) * LANES]
            logits += jax.lax.dot_general(part, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        seen = seen_ref[:, pl.ds(block * KEYS, KEYS)] >= 0
        logits = jnp.where(seen, logits * scale, -jnp.inf)
        new_top = jnp.maximum(top, logits.max(1, keepdims=True))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # nothing selected so far
        weights, decay = jnp.exp(logits - base), jnp.exp(top - base)
        low = weights.astype(buffer.dtype)
        accs = tuple(
            acc * decay + jnp.dot(low, v, preferred_element_type=jnp.float32)
            for acc, v in zip(accs, kv[:value_tiles], strict=True)
        )
        return new_top, total * decay + weights.sum(1, keepdims=True), accs

    send(0)
    start = jnp.full((heads, 1), -jnp.inf), jnp.zeros((heads, 1))
    accs = tuple(jnp.zeros((heads, LANES), jnp.float32) for _ in range(value_tiles))
    top, total, accs = jax.lax.fori_loop(0, blocks, step, (*start, accs))
    some = total > 0
    divisor = jnp.where(some, total, 1.0)
    for tile, acc in enumerate(accs):
        out_ref[:, tile * LANES : (tile + 1) * LANES] = acc / divisor
    lse_ref[...] = jnp.where(some, top + jnp.log(divisor), -jnp.inf)


def forward(
    q: Float[Array, "T N W"],
    rows: Float[Array, "S W"],
    ids: Int[Array, "T K"],
    *,
    scale: float,
    value_dim: int,
    interpret: bool = False,
) -> tuple[Float[Array, "T N R"], Float[Array, "T N"]]:
    """As `reference.sparse_mla`; value_dim a multiple of 128."""
    t, n, width = q.shape
    tiles = -(-width // LANES)
    q, rows = (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, tiles * LANES - width)]) for x in (q, rows))
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % KEYS)), constant_values=-1)[:, None]

    def per_query(*shape, **options):
        return pl.BlockSpec((None, *shape), lambda t: (t, 0, 0), **options)

    out, lse = pl.pallas_call(
        functools.partial(_kernel, scale=scale),
        grid=(t,),
        in_specs=[
            per_query(1, ids.shape[2], memory_space=pltpu.SMEM),
            per_query(1, ids.shape[2]),
            per_query(n, tiles * LANES),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=[per_query(n, value_dim), per_query(n, 1)],
        out_shape=[
            jax.ShapeDtypeStruct((t, n, value_dim), jnp.float32),
            jax.ShapeDtypeStruct((t, n, 1), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((2, KEYS, tiles, LANES), rows.dtype), pltpu.SemaphoreType.DMA((2,))],
        interpret=interpret,
        name="sparse_mla_forward",
    )(ids, ids, q, rows.reshape(-1, tiles, LANES))
    return out, lse[..., 0]
