"""Sums over each group's rows of outer products, on Hopper: the gradient of a group's matrix."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.hopper import ALIGN, CONSUMERS, PROGRAMS, ROWS, STEP, transforms

SMEM = 196608  # bytes of pipeline stages


# Lowered once for all calls of a program.
@functools.partial(jax.jit, static_argnames=("kept", "out_dtype", "interpret"))
def transposed_grouped_matmul(
    x: Float[Array, "M P"],
    y: Float[Array, "M Q"],
    group_sizes: Int[Array, "E"],
    *,
    kept: int | None = None,
    out_dtype: jnp.dtype = jnp.float32,
    interpret: bool = False,
) -> Float[Array, "E P Q"]:
    """x[rows of e]^T y[rows of e], summed in fp32 in the order of the rows; an empty group gives 0.

    Args:
      x, y: bf16; P is a multiple of 64, Q of 128.
      kept: only the first so many of P are written; a multiple of 8, at most 128.
    """
    rows, height = x.shape
    columns, groups = y.shape[1], group_sizes.shape[0]
    tall = 2 * ROWS if height % (2 * ROWS) == 0 and (kept is None or kept > ROWS) else ROWS
    down = height // tall if kept is None else pl.cdiv(kept, tall)
    # Few rows of P mean little work on each element of y: narrow tiles, so that every multiprocessor reads.
    wide = 128 if kept is None and columns % (CONSUMERS * 128) == 0 else 64
    across = columns // (CONSUMERS * wide)
    stages = min(8, SMEM // (STEP * (tall + CONSUMERS * wide) * x.dtype.itemsize))
    piece = 128 // jnp.dtype(out_dtype).itemsize
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    if interpret or rows % ALIGN or rows < STEP:
        # The card reads rows past the end as 0.
        pad = ((0, STEP if interpret else max(-rows % ALIGN, STEP - rows)), (0, 0))
        x, y = jnp.pad(x, pad), jnp.pad(y, pad)

    def kernel(starts_gmem, ends_gmem, x_gmem, y_gmem, out_gmem):
        def body(x_smem, y_smem, out_smem, full, free, masked):
            program, wg = lax.axis_index("program"), lax.axis_index("wg")
            mine = (groups * down * across - program + PROGRAMS - 1) // PROGRAMS

            def place(i):
                """Group of my i-th tile, its first row and column, where its group's rows begin and how many steps."""
                index = program + i * PROGRAMS
                group = index // (down * across)
                part = lax.rem(index, down * across)
                begin, end = starts_gmem[group], ends_gmem[group]
                first = pl.multiple_of(begin // ALIGN * ALIGN, ALIGN)
                steps = jnp.where(end > begin, (end - first + STEP - 1) // STEP, 0)
                column = pl.multiple_of(lax.rem(part, across) * (CONSUMERS * wide), CONSUMERS * wide)
                return group, pl.multiple_of(part // across * tall, tall), column, first, begin, end, steps

            def mask(ref, first, begin, end):
                """Zeroes the rows of other groups; a multiply would let their NaNs through."""
                value = plgpu.load(ref, (), layout=plgpu.Layout.WGMMA, optimized=False)
                row = first + plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=plgpu.Layout.WGMMA)
                ref[...] = jnp.where((row >= begin) & (row < end), value, jnp.zeros_like(value))

            @pl.when(wg < CONSUMERS)
            def consume():
                plgpu.set_max_registers(232, action="increase")

                def tile(i, done):
                    group, row, column, first, begin, end, steps = place(i)

                    def product(acc):
                        @pl.loop(0, steps)
                        def _(k):
                            slot = lax.rem(done + k, stages)
                            plgpu.barrier_wait(full.at[slot])
                            here = first + k * STEP

                            @pl.when((here < begin) | (here + STEP > end))
                            def _():
                                @pl.when(wg == 0)
                                def _():
                                    for part in range(0, tall, ROWS):
                                        mask(x_smem.at[slot, :, pl.ds(part, ROWS)], here, begin, end)

                                mask(y_smem.at[slot, wg], here, begin, end)
                                plgpu.commit_smem()
                                plgpu.barrier_arrive(masked)
                                plgpu.barrier_wait(masked)

                            plgpu.wgmma(acc, x_smem.at[slot].T, y_smem.at[slot, wg])
                            plgpu.wgmma_wait(1)

                            @pl.when(k > 0)
                            def _():
                                plgpu.barrier_arrive(free.at[lax.rem(done + k - 1, stages)])

                        plgpu.wgmma_wait(0)

                        @pl.when(steps > 0)
                        def _():
                            plgpu.barrier_arrive(free.at[lax.rem(done + steps - 1, stages)])

                        return acc[...]

                    acc = pl.run_scoped(product, plgpu.ACC((tall, wide), jnp.float32)).astype(out_dtype)
                    for part in range(0, tall, ROWS):
                        height_here = ROWS if kept is None else min(ROWS, kept - part)
                        for c in range(0, wide, piece):
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                            out_smem[wg] = acc[part : part + ROWS, c : c + piece]
                            plgpu.commit_smem()
                            plgpu.copy_smem_to_gmem(
                                out_smem.at[wg, pl.ds(0, height_here)],
                                out_gmem.at[
                                    group,
                                    pl.ds(row + part, height_here),
                                    pl.ds(column + wg * wide + c, piece),
                                ],
                            )
                    return done + steps

                lax.fori_loop(0, mine, tile, jnp.int32(0))
                plgpu.wait_smem_to_gmem(0)

            @pl.when(wg == CONSUMERS)
            def produce():
                plgpu.set_max_registers(40, action="decrease")

                def tile(i, done):
                    _, row, column, first, _, _, steps = place(i)

                    @pl.loop(0, steps)
                    def _(k):
                        slot = lax.rem(done + k, stages)

                        @pl.when(done + k >= stages)
                        def _():
                            plgpu.barrier_wait(free.at[slot])

                        here = pl.ds(pl.multiple_of(first + k * STEP, ALIGN), STEP)
                        plgpu.copy_gmem_to_smem(x_gmem.at[here, pl.ds(row, tall)], x_smem.at[slot], full.at[slot])
                        for c in range(CONSUMERS):
                            source = y_gmem.at[here, pl.ds(column + c * wide, wide)]
                            plgpu.copy_gmem_to_smem(source, y_smem.at[slot, c], full.at[slot])

                    return done + steps

                done = lax.fori_loop(0, mine, tile, jnp.int32(0))

                @pl.loop(jnp.maximum(done - stages, 0), done)
                def _(step):  # every arrival is seen before the barriers go
                    plgpu.barrier_wait(free.at[lax.rem(step, stages)])

        pl.run_scoped(
            body,
            plgpu.SMEM((stages, STEP, tall), x.dtype, transforms=transforms(x.dtype)),
            plgpu.SMEM((stages, CONSUMERS, STEP, wide), y.dtype, transforms=transforms(y.dtype)),
            plgpu.SMEM((CONSUMERS, ROWS, piece), out_dtype, transforms=transforms(out_dtype)),
            plgpu.Barrier(num_arrivals=1 + CONSUMERS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS),
            collective_axes="wg",
        )

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((groups, height if kept is None else kept, columns), out_dtype),
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        **({"interpret": plgpu.InterpretGPUParams()} if interpret else {}),
    )
    return call(starts, ends, x, y)
