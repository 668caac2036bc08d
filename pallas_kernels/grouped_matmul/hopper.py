"""Grouped matrix product on Hopper: one persistent Mosaic GPU kernel, tiles that begin where their group begins."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

ROWS = 64  # rows of one wgmma: those of a consumer
CONSUMERS = 2
TILE = ROWS * CONSUMERS  # rows of a tile
STEP = 64  # depth of one pipeline stage: 128 bytes of bf16
ALIGN = 8  # rows of a swizzled tile: where copies into shared memory may begin
SMEM = 196608  # bytes of pipeline stages, which leaves room for the results
PROGRAMS = 132  # multiprocessors of an H100 or H200; any other number only balances worse


def tile_table(group_sizes: Int[Array, "E"], rows: int) -> tuple[Array, Array, Array, Array, Array]:
    """Which rows each tile covers: every group is cut into tiles of its own, and so is what follows the last.

    Returns:
      int32 [2] tiles of the groups and of the rows past them; and for each tile [cdiv(rows, TILE) + E + 1]: its group,
      its first row, and its group's first row and the row after the group's last. Entries past both counts mean
      nothing.
    """
    groups = group_sizes.shape[0]
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
    ends = jnp.append(ends, rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    first = starts // ALIGN * ALIGN
    last = jnp.cumsum(jnp.where(ends > starts, pl.cdiv(ends - first, TILE), 0))
    # Beginning up to ALIGN - 1 rows early costs a group at most one tile more.
    tile = jnp.arange(pl.cdiv(rows, TILE) + groups + 1, dtype=jnp.int32)
    group = jnp.minimum((tile[:, None] >= last).sum(1, dtype=jnp.int32), groups)
    first = first[group] + TILE * (tile - jnp.where(group > 0, last[group - 1], 0))
    counts = jnp.stack([last[-2], last[-1] - last[-2]])
    return counts, group, first, starts[group], ends[group]


def column_tile(columns: int) -> int:
    """Columns of a tile: the widest of 256, 128, 64 that divides them."""
    return next(width for width in (256, 128, 64) if columns % width == 0)


def transforms(dtype) -> tuple:
    """Shared-memory layout of a tile whose rows are 128 bytes."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def _store(value, tile_smem, rows_smem, out, first, column, begin, end):
    """Writes rows begin to end of value [64, c] (c: 128 bytes) to out, by one copy or by powers of two."""
    columns = pl.ds(column, value.shape[1])
    count = end - begin
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(count == ROWS)
    def _():
        tile_smem[...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile_smem, out.at[pl.ds(first, ROWS), columns])

    @pl.when((count > 0) & (count < ROWS))
    def _():
        rows_smem[...] = value  # unswizzled, so that a copy can begin at any row
        plgpu.commit_smem()
        row, size = begin, ROWS // 2
        while size:

            @pl.when(count & size != 0)
            def _(row=row, size=size):
                plgpu.copy_smem_to_gmem(rows_smem.at[pl.ds(row, size)], out.at[pl.ds(first + row, size), columns])

            row, size = row + (count & size), size // 2


# Lowered once for all calls of a program.
@functools.partial(jax.jit, static_argnames=("transposed", "out_dtype", "interpret"))
def grouped_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "S K N"] | Float[Array, "S N K"],
    group_sizes: Int[Array, "E"],
    low: Float[Array, "M L"] | None = None,
    b: Float[Array, "E L N"] | Float[Array, "E N L"] | None = None,
    *,
    first: Int[Array, ""] | None = None,
    transposed: bool = False,
    out_dtype: jnp.dtype = jnp.bfloat16,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """x[rows of e] w[e] + low[rows of e] b[e], summed in fp32; rows past the groups are 0.

    The low-rank term is further steps of the same sum, so it costs L / K of the product.

    Args:
      x, w, low, b: bf16; K and L are multiples of 64.
      first: group e's matrix is w[first + e]; None for 0. b has no others.
      transposed: w and b hold [S, N, K] and [E, N, L].
    """
    (rows, depth), columns = x.shape, w.shape[1 if transposed else 2]
    width = column_tile(columns)
    across = columns // width
    steps = (depth + (0 if low is None else low.shape[1])) // STEP
    stages = min(8, SMEM // (STEP * (TILE + width) * x.dtype.itemsize))
    piece = 128 // jnp.dtype(out_dtype).itemsize
    if interpret or rows % ALIGN or rows < TILE:
        # The card reads rows past the end as 0.
        pad = ((0, TILE if interpret else max(-rows % ALIGN, TILE - rows)), (0, 0))
        x, low = jnp.pad(x, pad), None if low is None else jnp.pad(low, pad)
    block = (width, STEP) if transposed else (STEP, width)

    def kernel(counts_gmem, group_gmem, first_gmem, begin_gmem, end_gmem, matrix_gmem, x_gmem, w_gmem, *rest):
        low_gmem, b_gmem, out_gmem = rest if low is not None else (None, None, *rest)

        def body(x_smem, w_smem, tile_smem, rows_smem, full, free):
            program, wg = lax.axis_index("program"), lax.axis_index("wg")
            products = counts_gmem[0] * across
            mine = jnp.maximum(products - program + PROGRAMS - 1, 0) // PROGRAMS

            def place(i):
                """Tile and first column of my i-th product: the columns of one tile run next to each other."""
                index = program + i * PROGRAMS
                return index // across, pl.multiple_of(lax.rem(index, across) * width, width)

            def write(value, tile, column):
                first = pl.multiple_of(first_gmem[tile] + wg * ROWS, ALIGN)
                begin, end = (jnp.clip(row - first, 0, ROWS) for row in (begin_gmem[tile], end_gmem[tile]))
                for c in range(0, width, piece):
                    part = value[:, c : c + piece]
                    _store(part, tile_smem.at[wg], rows_smem.at[wg], out_gmem, first, column + c, begin, end)

            @pl.when(wg < CONSUMERS)
            def consume():
                plgpu.set_max_registers(232, action="increase")

                @pl.loop(0, mine)
                def _(i):
                    tile, column = place(i)

                    def product(acc):
                        @pl.loop(0, steps)
                        def _(k):
                            step = i * steps + k
                            slot = lax.rem(step, stages)
                            plgpu.barrier_wait(full.at[slot])
                            w_tile = w_smem.at[slot]
                            plgpu.wgmma(
                                acc, x_smem.at[slot, pl.ds(wg * ROWS, ROWS)], w_tile.T if transposed else w_tile
                            )
                            plgpu.wgmma_wait(1)

                            @pl.when(k > 0)
                            def _():
                                plgpu.barrier_arrive(free.at[lax.rem(step - 1, stages)])

                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(free.at[lax.rem(i * steps + steps - 1, stages)])
                        return acc[...]

                    acc = pl.run_scoped(product, plgpu.ACC((ROWS, width), jnp.float32))
                    write(acc.astype(out_dtype), tile, column)

                spare = counts_gmem[1] * across

                @pl.loop(0, jnp.maximum(spare - program + PROGRAMS - 1, 0) // PROGRAMS)
                def _(i):
                    tile, column = place(i)
                    zero = plgpu.layout_cast(jnp.zeros((ROWS, width), out_dtype), plgpu.Layout.WGMMA)
                    write(zero, counts_gmem[0] + tile, column)

                plgpu.wait_smem_to_gmem(0)

            @pl.when(wg == CONSUMERS)
            def produce():
                plgpu.set_max_registers(40, action="decrease")

                def load(step, first, k, matrix, column, left, right):
                    slot = lax.rem(step, stages)

                    @pl.when(step >= stages)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                    inner, outer = pl.ds(k * STEP, STEP), pl.ds(column, width)
                    plgpu.copy_gmem_to_smem(left.at[pl.ds(first, TILE), inner], x_smem.at[slot], full.at[slot])
                    source = right.at[(matrix, outer, inner) if transposed else (matrix, inner, outer)]
                    plgpu.copy_gmem_to_smem(source, w_smem.at[slot], full.at[slot])

                @pl.loop(0, mine)
                def _(i):
                    tile, column = place(i)
                    first, matrix = pl.multiple_of(first_gmem[tile], ALIGN), matrix_gmem[tile]

                    @pl.loop(0, depth // STEP)
                    def _(k):
                        load(i * steps + k, first, k, matrix, column, x_gmem, w_gmem)

                    for k in range(steps - depth // STEP):
                        load(i * steps + depth // STEP + k, first, k, group_gmem[tile], column, low_gmem, b_gmem)

                @pl.loop(jnp.maximum(mine * steps - stages, 0), mine * steps)
                def _(step):  # every arrival is seen before the barriers go
                    plgpu.barrier_wait(free.at[lax.rem(step, stages)])

        pl.run_scoped(
            body,
            plgpu.SMEM((stages, TILE, STEP), x.dtype, transforms=transforms(x.dtype)),
            plgpu.SMEM((stages, *block), w.dtype, transforms=transforms(w.dtype)),
            plgpu.SMEM((CONSUMERS, ROWS, piece), out_dtype, transforms=transforms(out_dtype)),
            plgpu.SMEM((CONSUMERS, ROWS, piece), out_dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            collective_axes="wg",
        )

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((x.shape[0], columns), out_dtype),
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        **({"interpret": plgpu.InterpretGPUParams()} if interpret else {}),
    )
    extra = () if low is None else (low, b)
    table = tile_table(group_sizes, rows)
    matrix = table[1] if first is None else table[1] + first.astype(jnp.int32)
    return call(*table, matrix, x, w, *extra)[:rows]
