"""Rows gathered into wgmma-ready shared memory and sums added to single rows, which Pallas has no operations for.

Inline PTX through Mosaic GPU. `cp.async` of 16 bytes a thread gathers rows into the 128-byte swizzle that wgmma reads,
and writes zeros where nothing is selected; vectors of fp32 atomic adds scatter a wgmma accumulator's rows.
"""

import jax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, memref
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 64  # columns of a swizzled tile, 128 bytes of bf16
TRANSFORMS = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
THREADS = 128  # of a warpgroup, what a Pallas thread is
ROW_THREADS = 8  # copy one row's 128 bytes of a tile


def load(ref: jax.Array, layout: plgpu.Layout) -> jax.Array:
    """The whole of ref in registers."""
    index = ((),) if jax.__version_info__ < (0, 11) else ()  # once required, now deprecated
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def _constants():
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    return i32, i64, lambda x: utils.c(x, i32)


def _ptx(text, constraints, *args):
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(args), text, constraints, has_side_effects=True)


def _shared_address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def _device_address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def gather_rows(rows: jax.Array, ids: jax.Array, parts: list[jax.Array]) -> None:
    """Starts copying rows[ids] into shared memory, by one warpgroup; `wait_rows` waits for it.

    Args:
      rows: [S, W] bf16 in device memory. Offsets are 64-bit.
      ids: [keys] int32 in shared memory, keys a multiple of 16; -1 reads nothing and gives zeros.
      parts: [keys, columns] each, bf16 in shared memory with `TRANSFORMS`; their columns make up W.
    """
    keys, widths = ids.shape[0], [part.shape[1] for part in parts]
    row_bytes = 2 * sum(widths)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *(plgpu.RefType(TRANSFORMS) for _ in parts)))
    def copy(ctx, rows, ids, *parts):
        del ctx
        i32, i64, c = _constants()
        thread = arith.remui(utils.thread_idx(), c(THREADS))
        lane, group = arith.remui(thread, c(ROW_THREADS)), arith.divui(thread, c(ROW_THREADS))
        in_tile = arith.remui(group, c(8))  # the row's place in its tile: groups advance by whole tiles
        swizzled = arith.addi(arith.muli(in_tile, c(128)), arith.muli(arith.xori(lane, in_tile), c(16)))
        source, targets = _device_address(rows), [_shared_address(part) for part in parts]
        for first in range(0, keys, THREADS // ROW_THREADS):
            key = arith.addi(group, c(first))
            row = memref.load(ids, [arith.index_castui(ir.IndexType.get(), key)])
            some = arith.cmpi(arith.CmpIPredicate.sge, row, c(0))
            size = arith.select(some, c(16), c(0))
            row = arith.select(some, row, c(0))
            offset = arith.muli(arith.extui(i64, row), utils.c(row_bytes, i64))
            address = arith.addi(source, arith.addi(offset, arith.extui(i64, arith.muli(lane, c(16)))))
            tile_row, column = arith.divui(key, c(8)), 0
            for target, width in zip(targets, widths, strict=True):
                base = arith.addi(target, arith.addi(arith.muli(tile_row, c(width * 16)), swizzled))
                for tile in range(width // TILE):
                    places = f"[$0 + {1024 * tile}], [$1 + {2 * (column + tile * TILE)}]"
                    _ptx(f"cp.async.cg.shared.global.L2::128B {places}, 16, $2;", "r,l,r", base, address, size)
                column += width
        _ptx("cp.async.commit_group;", "")

    copy(rows, ids, *parts)


def wait_rows() -> None:
    """Waits for this warpgroup's gathers and shows them to wgmma."""

    @plgpu.inline_mgpu()
    def wait(ctx):
        del ctx
        _ptx("cp.async.wait_group 0;", "")

    wait()
    plgpu.commit_smem()


def _write_rows(target, ids, x, column, instruction):
    """x [64, columns] in wgmma's registers to rows of target, from `column` on; row ids[i], or without ids row i.

    Lane l holds the columns 2 (l % 4) and the next of every 8, in the row l / 4 and in the 8th after it. Neighbours
    swap, so that the even lane has four columns of the upper row and the odd one four of the lower row.
    """
    row_bytes, columns = 4 * target.shape[1], x.shape[1]
    refs = (target,) if ids is None else (target, ids)

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType() for _ in refs), plgpu.Layout.WGMMA))
    def write(ctx, target, *rest):
        del ctx
        *ids, x = rest
        i32, i64, c = _constants()
        thread = arith.remui(utils.thread_idx(), c(THREADS))
        lane, warp = arith.remui(thread, c(32)), arith.divui(thread, c(32))
        odd = arith.remui(lane, c(2))
        is_odd = arith.cmpi(arith.CmpIPredicate.eq, odd, c(1))
        row = arith.addi(arith.muli(warp, c(16)), arith.addi(arith.divui(lane, c(4)), arith.muli(odd, c(8))))
        if ids:
            row = memref.load(ids[0], [arith.index_castui(ir.IndexType.get(), row)])
        first = arith.muli(arith.divui(arith.remui(lane, c(4)), c(2)), c(16))
        offset = arith.addi(arith.muli(arith.extsi(i64, row), utils.c(row_bytes, i64)), arith.extui(i64, first))
        address = arith.addi(_device_address(target), offset)
        for tile, (upper, lower) in enumerate(x.registers.reshape(columns // 8, 2)):
            upper, lower = ([llvm.extractelement(v, c(i)) for i in (0, 1)] for v in (upper, lower))
            given = [arith.select(is_odd, u, v) for u, v in zip(upper, lower, strict=True)]
            kept = [arith.select(is_odd, v, u) for u, v in zip(upper, lower, strict=True)]
            taken = [utils.shfl_bfly(v, 1) for v in given]
            low = [arith.select(is_odd, t, k) for t, k in zip(taken, kept, strict=True)]
            high = [arith.select(is_odd, k, t) for t, k in zip(taken, kept, strict=True)]
            place = f"[$1 + {4 * column + 32 * tile}]"
            _ptx(
                f"{{ .reg .pred p; setp.ge.s32 p, $0, 0; @p {instruction} {place}, {{$2, $3, $4, $5}}; }}",
                "r,l,f,f,f,f",
                row,
                address,
                *low,
                *high,
            )

    write(*refs, x)


def add_to_rows(target: jax.Array, ids: jax.Array, x: jax.Array, column: int) -> None:
    """target[ids, column:] += x by atomic adds of 16 bytes, by one warpgroup.

    Args:
      target: [S, W] fp32 in device memory. Offsets are 64-bit.
      ids: [64] int32 in shared memory; -1 adds nothing.
      x: [64, columns] fp32 in registers, laid out as wgmma leaves it.
    """
    _write_rows(target, ids, x, column, "red.relaxed.gpu.global.add.v4.f32")


def store_rows(target: jax.Array, x: jax.Array, column: int) -> None:
    """target[:, column:] = x, likewise; target is [64, W] fp32 in device memory."""
    _write_rows(target, None, x, column, "st.global.v4.f32")
