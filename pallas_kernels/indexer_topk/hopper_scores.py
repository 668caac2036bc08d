"""Index scores on Hopper: one Mosaic GPU kernel, keys as rows of wgmma, queries x heads as its columns."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

PAGE = 64  # keys a page: the rows of one wgmma
COLUMNS = 256  # queries x heads of one wgmma
STAGES = 4  # pages in flight for each of the two consumers
CONSUMERS = 2


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
) -> Float[Array, "T S"]:
    """sum_i w[t, i] * relu(q[t, i] . k[s]) in fp32, for the first needed[t // block] pages of each query.

    T is a multiple of `queries_per_block(T, I)`. Scores of later pages are left unwritten. A program scores `chunk`
    pages for one block of queries; blocks of one chunk run next to each other, so that its keys come from L2.
    Each score is one 128-long wgmma product a head, then one sum over the heads: the same for every (query, key)
    wherever it lies in a tile.

    Args:
      q, pages: bf16. w: fp32. table: int32 page of each 64 positions, None for pages in order.
    """
    queries, heads, dim = q.shape
    block = queries_per_block(queries, heads)
    columns, count = block * heads, pages.shape[0] if table is None else table.shape[0]
    tile = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def kernel(q_gmem, w_gmem, pages_gmem, needed_gmem, *rest):
        table_gmem, out_gmem = rest if table is not None else (None, *rest)

        def body(q_smem, w_smem, k_smem, out_smem, q_full, w_full, k_full, k_free):
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

                @pl.loop(0, (steps + 1 - wg) // CONSUMERS)
                def _(i):
                    slot = wg * STAGES + lax.rem(i, STAGES)
                    plgpu.barrier_wait(k_full.at[slot])

                    def products(acc):
                        plgpu.wgmma(acc, k_smem.at[slot], q_smem.T)
                        return acc[...]

                    dots = pl.run_scoped(products, plgpu.ACC((PAGE, columns), jnp.float32))
                    plgpu.barrier_arrive(k_free.at[slot])
                    staged = out_smem.at[wg * 2 + lax.rem(i, 2)]
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    for u in range(block):
                        positive = jnp.maximum(dots[:, u * heads : (u + 1) * heads], 0.0)
                        weighted = positive * lax.broadcast_in_dim(weights[u], positive.shape, [1])
                        staged[u] = weighted.sum(axis=1) + 0.0  # -0.0 and 0.0 tie
                    plgpu.commit_smem()
                    page = first + CONSUMERS * i + wg
                    plgpu.copy_smem_to_gmem(
                        staged, out_gmem.at[pl.ds(query_block * block, block), pl.ds(page * PAGE, PAGE)]
                    )

                plgpu.wait_smem_to_gmem(0)

            @pl.when((wg == CONSUMERS) & (steps > 0))
            def produce():
                plgpu.set_max_registers(40, action="decrease")
                plgpu.copy_gmem_to_smem(w_gmem.at[pl.ds(query_block * block, block)], w_smem, w_full)
                plgpu.copy_gmem_to_smem(q_gmem.at[pl.ds(query_block * columns, columns)], q_smem, q_full)

                @pl.loop(0, steps)
                def _(step):
                    i = step // CONSUMERS
                    slot = lax.rem(step, CONSUMERS) * STAGES + lax.rem(i, STAGES)

                    @pl.when(i >= STAGES)
                    def _():
                        plgpu.barrier_wait(k_free.at[slot])

                    page = first + step if table_gmem is None else table_gmem[first + step]
                    plgpu.copy_gmem_to_smem(pages_gmem.at[page], k_smem.at[slot], k_full.at[slot])

        pl.run_scoped(
            body,
            plgpu.SMEM((columns, dim), q.dtype, transforms=tile),
            plgpu.SMEM((block, heads), jnp.float32),
            plgpu.SMEM((CONSUMERS * STAGES, PAGE, dim), pages.dtype, transforms=tile),
            plgpu.SMEM((CONSUMERS * 2, block, PAGE), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=CONSUMERS * STAGES),
            plgpu.Barrier(num_barriers=CONSUMERS * STAGES),
            collective_axes="wg",
        )

    options = {"interpret": plgpu.InterpretGPUParams()} if interpret else {}
    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((queries, count * PAGE), jnp.float32),
        grid=(pl.cdiv(count, chunk), queries // block),
        grid_names=("chunk", "queries"),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        **options,
    )
    tables = () if table is None else (table,)
    return call(q.reshape(queries * heads, dim), w, pages, needed, *tables)
