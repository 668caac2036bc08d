"""Exact index top-k on Hopper: blocks of queries are scored into a bounded workspace and selected from it."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.indexer_topk import hopper_scores, hopper_select, reference
from pallas_kernels.indexer_topk.hopper_scores import PAGE

WORKSPACE = 2**30  # bytes of stored scores; lists of candidates add at most half as much
ROWS = 1024  # queries of one block at most: 8 rows a multiprocessor hide the latency of selection
PROGRAMS = 132 * 6  # score programs that keep the card busy to the end


def pages_per_program(pages: int, blocks: int) -> int:
    """Pages that one score program takes: 128, or as few as give every multiprocessor several programs."""
    unit = hopper_scores.CONSUMERS * hopper_scores.TILE
    return min(pl.cdiv(pages * blocks, PROGRAMS * unit) * unit, 128)


# Lowered once for all calls of a program.
@functools.partial(jax.jit, static_argnames=("k", "interpret"))
def index_topk(
    q: Float[Array, "T I H"],
    w: Float[Array, "T I"],
    pages: Float[Array, "P 64 H"],
    table: Int[Array, "N"] | None,
    limit: Int[Array, "T"],
    k: int,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """Scores and positions of each query's min(k, limit) best keys, by ascending position; -inf and -1 after.

    The work of a block of queries follows its largest limit, not the number of pages.

    Args:
      q, pages: bf16. w: fp32. table: int32 page of each 64 positions, None for pages in order. limit: int32.
      k: at most the number of positions and `hopper_select.MAX_K`.
      interpret: select on the host, from the reference's scores: jax 0.10 has no interpreter of the score kernel, and
        that of jax 0.11 runs neither under remat nor on several devices.
    """
    queries, heads, _ = q.shape
    count = pages.shape[0] if table is None else table.shape[0]
    block = hopper_scores.queries_per_block(queries, heads)
    most = max(block, min(ROWS, WORKSPACE // (4 * PAGE * count)) // block * block)
    batches = pl.cdiv(queries, most)
    rows = pl.cdiv(pl.cdiv(queries, batches), block) * block
    chunk = pages_per_program(count, rows // block)

    def one(args):
        q, w, limit = args
        needed = pl.cdiv(limit.reshape(-1, block).max(axis=1), PAGE)
        if interpret:
            keys = (pages if table is None else pages[table]).reshape(-1, pages.shape[-1])
            scores = reference.index_scores(q, w, keys)
            peaks = reference.order_key(scores).reshape(rows, -1, hopper_scores.GROUP).max(axis=-1)
        else:
            scores, peaks = hopper_scores.index_scores(q, w, pages, table, needed, chunk=chunk)
        return hopper_select.select(scores, peaks, limit, k, interpret=interpret)

    pad = batches * rows - queries  # padding queries see no key
    q, w, limit = (jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1)) for x in (q, w, limit))
    if batches == 1:
        best, ids = one((q, w, limit))
    else:
        split = jax.tree.map(lambda x: x.reshape(batches, rows, *x.shape[1:]), (q, w, limit))
        best, ids = jax.tree.map(lambda x: x.reshape(batches * rows, k), lax.map(one, split))
    return best[:queries], ids[:queries]
