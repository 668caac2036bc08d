"""Index scores on Hopper: one Mosaic GPU kernel, keys as rows of wgmma, queries x heads as its columns."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.indexer_topk import reference

PAGE = 64  # keys a page: the rows of one wgmma
COLUMNS = 256  # queries x heads of one wgmma
STAGES = 3  # pages in flight for each of the two consumers
CONSUMERS = 2
GROUP = 32  # keys of which the largest score is returned too
TILE = 8  # pages whose maxima a consumer takes at once: with 8 queries, the 64 rows of a wgmma layout


def queries_per_block(queries: int, heads: int) -> int:
    """Queries whose heads fill one wgmma: a power of two, at most 8, no more than there are."""
    block = min(8, COLUMNS // heads)
    while block > 1 and block // 2 >= queries:
        block //= 2
    return block


def index_scores(
    q: Float[Array, "T I H"],
    w: Float[Array, "T I"],
    pages: Float[Array, "P 64 H"],
    table: Int[Array, "N"] | None,
    needed: Int[Array, "blocks"],
    *,
    chunk: int,
    interpret: bool = False,
) -> tuple[Float[Array, "T S"], Int[Array, "T G"]]:
    """sum_i w[t, i] * relu(q[t, i] . k[s]) in fp32, for the first needed[t // block] pages of each query.

    T is a multiple of `queries_per_block(T, I)`, `chunk` of 16. A program scores `chunk` pages for one block of
    queries; blocks of one chunk run next to each other, so that its keys come from L2. Each score is one wgmma product
    a head, then one sum over the heads: the same for every (query, key) wherever it lies in a tile.

    Args:
      q, pages: bf16. w: fp32. table: int32 page of each 64 positions, None for pages in order.
    Returns:
      Scores, and `reference.order_key` of the largest one of each GROUP. Both are unwritten past the needed pages.
    """
    queries, heads, dim = q.shape
    block = queries_per_block(queries, heads)
    columns, count = block * heads, pages.shape[0] if table is None else table.shape[0]
    tile = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def kernel(q_gmem, w_gmem, pages_gmem, needed_gmem, *rest):
        table_gmem, out_gmem, peaks_gmem = rest if table is not None else (None, *rest)

        def body(q_smem, w_smem, k_smem, out_smem, peak_smem, q_full, w_full, k_full, k_free):
            query_block, wg = lax.axis_index("queries"), lax.axis_index("wg")
            first = lax.axis_index("chunk") * chunk
            steps = jnp.clip(needed_gmem[query_block] - first, 0, chunk)  # pages of this program

            @pl.when((wg < CONSUMERS) & (steps > 0))
            def consume():
                plgpu.set_max_registers(232, action="increase")
                plgpu.barrier_wait(w_full)
                weights = [
                    plgpu.load(w_smem.at[u], (), layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                    for u in range(block)
                ]
                plgpu.barrier_wait(q_full)

                mine = (steps + 1 - wg) // CONSUMERS

                @pl.loop(0, mine)
                def _(i):
                    slot = wg * STAGES + lax.rem(i, STAGES)
                    plgpu.barrier_wait(k_full.at[slot])

                    def products(acc):
                        plgpu.wgmma(acc, k_smem.at[slot], q_smem.T)
                        return acc[...]

                    dots = pl.run_scoped(products, plgpu.ACC((PAGE, columns), jnp.float32))
                    plgpu.barrier_arrive(k_free.at[slot])
                    row = lax.rem(i, TILE) * block
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    for u in range(block):
                        positive = jnp.maximum(dots[:, u * heads : (u + 1) * heads], 0.0)
                        weighted = positive * lax.broadcast_in_dim(weights[u], positive.shape, [1])
                        out_smem[wg, row + u] = weighted.sum(axis=1) + 0.0  # -0.0 and 0.0 tie
                    plgpu.commit_smem()
                    page = first + CONSUMERS * i + wg
                    plgpu.copy_smem_to_gmem(
                        out_smem.at[wg, pl.ds(row, block)],
                        out_gmem.at[pl.ds(query_block * block, block), pl.ds(page * PAGE, PAGE)],
                    )

                    @pl.when((lax.rem(i, TILE) == TILE - 1) | (i == mine - 1))
                    def _():  # rows of pages not reached hold anything; nobody reads their maxima
                        tile_scores = plgpu.load(out_smem.at[wg], (), layout=plgpu.Layout.WGMMA, optimized=False)
                        order = reference.order_key(tile_scores)
                        for part in range(PAGE // GROUP):
                            peak_smem[wg, part] = order[:, part * GROUP : (part + 1) * GROUP].max(axis=1)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(
                            peak_smem.at[wg], peaks_gmem.at[query_block, lax.axis_index("chunk"), wg, i // TILE]
                        )

                plgpu.wait_smem_to_gmem(0)

            @pl.when((wg == CONSUMERS) & (steps > 0))
            def produce():
                plgpu.set_max_registers(40, action="decrease")
                plgpu.copy_gmem_to_smem(w_gmem.at[pl.ds(query_block * block, block)], w_smem, w_full)
                plgpu.copy_gmem_to_smem(q_gmem.at[pl.ds(query_block * columns, columns)], q_smem, q_full)

                def slot_of(step):
                    return lax.rem(step, CONSUMERS) * STAGES + lax.rem(step // CONSUMERS, STAGES)

                @pl.loop(0, steps)
                def _(step):
                    slot = slot_of(step)

                    @pl.when(step >= CONSUMERS * STAGES)
                    def _():
                        plgpu.barrier_wait(k_free.at[slot])

                    page = first + step if table_gmem is None else table_gmem[first + step]
                    plgpu.copy_gmem_to_smem(pages_gmem.at[page], k_smem.at[slot], k_full.at[slot])

                @pl.loop(jnp.maximum(steps - CONSUMERS * STAGES, 0), steps)
                def _(step):  # every arrival is seen before the barriers go
                    plgpu.barrier_wait(k_free.at[slot_of(step)])

        pl.run_scoped(
            body,
            plgpu.SMEM((columns, dim), q.dtype, transforms=tile),
            plgpu.SMEM((block, heads), jnp.float32),
            plgpu.SMEM((CONSUMERS * STAGES, PAGE, dim), pages.dtype, transforms=tile),
            plgpu.SMEM((CONSUMERS, PAGE, PAGE), jnp.float32),
            plgpu.SMEM((CONSUMERS, PAGE // GROUP, PAGE), jnp.int32),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=CONSUMERS * STAGES),
            plgpu.Barrier(num_barriers=CONSUMERS * STAGES),
            collective_axes="wg",
        )

    options = {"interpret": plgpu.InterpretGPUParams()} if interpret else {}
    chunks, tiles = pl.cdiv(count, chunk), chunk // (CONSUMERS * TILE)
    call = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((queries, count * PAGE), jnp.float32),
            jax.ShapeDtypeStruct((queries // block, chunks, CONSUMERS, tiles, PAGE // GROUP, PAGE), jnp.int32),
        ),
        grid=(chunks, queries // block),
        grid_names=("chunk", "queries"),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        **options,
    )
    tables = () if table is None else (table,)
    scores, peaks = call(q.reshape(queries * heads, dim), w, pages, needed, *tables)
    peaks = peaks[..., : TILE * block].reshape(-1, chunks, CONSUMERS, tiles, PAGE // GROUP, TILE, block)
    return scores, peaks.transpose(0, 6, 1, 3, 5, 2, 4).reshape(queries, chunks * chunk * (PAGE // GROUP))
