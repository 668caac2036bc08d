"""Index scores on TPU by one kernel, eight pages a step; exact selection by XLA's sort, block by block of queries."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.indexer_topk import reference

PAGE = 64
PAGES = 8  # of a step, each its own operand, so that the page table may name any
QUERIES = 128  # of a program
WORKSPACE = 2**30  # bytes of stored scores; sorting them takes a few times as much


def _kernel(table, needed, q, w, *refs):
    pages, out = refs[:PAGES], refs[PAGES]

    @pl.when(pl.program_id(1) < needed[pl.program_id(0)])
    def _():
        keys = jnp.concatenate([page[0] for page in pages], axis=0)
        out[...] = jnp.zeros_like(out)

        def head(i, _):
            dots = lax.dot_general(q[i], keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            out[...] += jnp.maximum(dots, 0.0) * w[i]
            return 0

        lax.fori_loop(0, q.shape[0], head, 0)


def index_scores(
    q: Float[Array, "T I H"],
    w: Float[Array, "T I"],
    pages: Float[Array, "P 64 H"],
    table: Int[Array, "N"],
    limit: Int[Array, "T"],
    *,
    interpret: bool = False,
) -> Float[Array, "T S"]:
    """sum_i w[t, i] * relu(q[t, i] . k[s]) in fp32, the heads one after another; unwritten past the largest limit.

    Args:
      q, pages: bf16; T is a multiple of QUERIES and N of PAGES. w: fp32. table: page of each 64 positions.
    """
    (queries, heads, dim), count = q.shape, table.shape[0]
    needed = pl.cdiv(limit.reshape(-1, QUERIES).max(axis=1), PAGES * PAGE)

    def page(i):
        return pl.BlockSpec((1, PAGE, dim), lambda t, s, table, needed: (table[s * PAGES + i], 0, 0))

    return pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((queries, count * PAGE), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(queries // QUERIES, count // PAGES),
            in_specs=[
                pl.BlockSpec((heads, QUERIES, dim), lambda t, s, *_: (0, t, 0)),
                pl.BlockSpec((heads, QUERIES, 1), lambda t, s, *_: (0, t, 0)),
                *(page(i) for i in range(PAGES)),
            ],
            out_specs=pl.BlockSpec((QUERIES, PAGES * PAGE), lambda t, s, *_: (t, s)),
        ),
        interpret=interpret,
    )(table, needed, q.swapaxes(0, 1), w.T[..., None], *[pages] * PAGES)


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

    Args:
      q, pages: bf16. w: fp32. table: int32 page of each 64 positions, None for pages in order. limit: int32.
      k: at most the number of positions.
    """
    table = jnp.arange(pages.shape[0], dtype=jnp.int32) if table is None else table
    table = jnp.pad(table, (0, -table.shape[0] % PAGES))  # beyond every limit
    queries, positions = q.shape[0], table.shape[0] * PAGE
    rows = max(QUERIES, min(WORKSPACE // (4 * positions), queries + -queries % QUERIES) // QUERIES * QUERIES)

    def one(args):
        q, w, limit = args
        scores = index_scores(q, w, pages, table, limit, interpret=interpret)
        best, ids = reference.select(scores + 0.0, jnp.arange(positions) < limit[:, None], k)  # -0.0 and 0.0 tie
        place = jnp.where(ids < 0, positions, ids)
        _, best, ids = lax.sort((place, best, ids), num_keys=1)
        return best, ids

    pad = -queries % rows  # padding queries see no key
    split = [jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1)).reshape(-1, rows, *x.shape[1:]) for x in (q, w, limit)]
    best, ids = lax.map(one, tuple(split))
    return best.reshape(-1, k)[:queries], ids.reshape(-1, k)[:queries]
