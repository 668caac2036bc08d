"""Rows gathered into wgmma-ready shared memory and sums added to single rows, which Pallas has no operations for.

Inline PTX through Mosaic GPU. `cp.async` of 16 bytes a thread gathers rows into the 128-byte swizzle that wgmma reads,
and writes zeros where nothing is selected. A wgmma accumulator's rows leave by fp32 atomic adds or by stores.
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
SLOTS, PITCH = (
    3,
    144,
)  # pieces on their way to rows at once; bytes from one row's 128 to the next, against bank conflicts


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


def gather_rows(rows: jax.Array, ids: jax.Array, parts: list[tuple[jax.Array, int]]) -> None:
    """Starts copying columns of rows[ids] into shared memory, by one warpgroup.

    Args:
      rows: [S, W] bf16 in device memory. Offsets are 64-bit.
      ids: [keys] int32 in shared memory, keys a multiple of 16; -1 reads nothing and gives zeros.
      parts: [keys, columns] each, bf16 in shared memory with `TRANSFORMS`, and the first of its columns.
    """
    keys, row_bytes = ids.shape[0], 2 * rows.shape[1]
    widths, columns = [part.shape[1] for part, _ in parts], [column for _, column in parts]

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
            tile_row = arith.divui(key, c(8))
            for target, width, column in zip(targets, widths, columns, strict=True):
                base = arith.addi(target, arith.addi(arith.muli(tile_row, c(width * 16)), swizzled))
                for tile in range(width // TILE):
                    places = f"[$0 + {1024 * tile}], [$1 + {2 * (column + tile * TILE)}]"
                    _ptx(f"cp.async.cg.shared.global.L2::128B {places}, 16, $2;", "r,l,r", base, address, size)

    copy(rows, ids, *(part for part, _ in parts))


def wait_rows() -> None:
    """Waits for this warpgroup's gathers and shows them to wgmma."""

    @plgpu.inline_mgpu()
    def wait(ctx):
        del ctx
        _ptx("cp.async.wait_all;", "")

    wait()
    plgpu.commit_smem()


def _each_pair(x):
    """(row, column, value) of the two neighbouring columns in each register of x [64, columns], as wgmma leaves them.

    Lane l of warp w holds the columns 2 (l % 4) and the next of every 8, in row 16 w + l / 4 and 8 rows on. The row is
    relative to the thread's first one, the column to its first one.
    """
    for tile, halves in enumerate(x.registers.reshape(-1, 2)):
        for row, pair in zip((0, 8), halves, strict=True):
            yield row, 8 * tile, [llvm.extractelement(pair, _constants()[2](i)) for i in (0, 1)]


def _first_row_and_column():
    """What `_each_pair` is relative to."""
    _, _, c = _constants()
    thread = arith.remui(utils.thread_idx(), c(THREADS))
    lane, warp = arith.remui(thread, c(32)), arith.divui(thread, c(32))
    row = arith.addi(arith.muli(warp, c(16)), arith.divui(lane, c(4)))
    return row, arith.muli(arith.remui(lane, c(4)), c(2))


def add_to_rows(target: jax.Array, ids: jax.Array, x: jax.Array, column: int) -> None:
    """target[ids, column:] += x by atomic adds of 16 bytes, by one warpgroup.

    Neighbouring lanes swap a pair, so that the even one has four columns of the upper row and the odd one four of the
    lower row.

    Args:
      target: [S, W] fp32 in device memory. Offsets are 64-bit.
      ids: [64] int32 in shared memory; -1 adds nothing.
      x: [64, columns] fp32 in registers, laid out as wgmma leaves it.
    """
    row_bytes = 4 * target.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WGMMA))
    def add(ctx, target, ids, x):
        del ctx
        i32, i64, c = _constants()
        row, first_column = _first_row_and_column()
        odd = arith.remui(utils.thread_idx(), c(2))
        is_odd = arith.cmpi(arith.CmpIPredicate.eq, odd, c(1))
        row = memref.load(ids, [arith.index_castui(ir.IndexType.get(), arith.addi(row, arith.muli(odd, c(8))))])
        first = arith.muli(arith.subi(first_column, arith.muli(odd, c(2))), c(4))
        offset = arith.addi(arith.muli(arith.extsi(i64, row), utils.c(row_bytes, i64)), arith.extui(i64, first))
        address = arith.addi(_device_address(target), offset)
        pairs = list(_each_pair(x))
        for (_, column_in, upper), (_, _, lower) in zip(pairs[::2], pairs[1::2], strict=True):
            given = [arith.select(is_odd, u, v) for u, v in zip(upper, lower, strict=True)]
            kept = [arith.select(is_odd, v, u) for u, v in zip(upper, lower, strict=True)]
            taken = [utils.shfl_bfly(v, 1) for v in given]
            low = [arith.select(is_odd, t, k) for t, k in zip(taken, kept, strict=True)]
            high = [arith.select(is_odd, k, t) for t, k in zip(taken, kept, strict=True)]
            _ptx(
                "{ .reg .pred p; setp.ge.s32 p, $0, 0; @p red.relaxed.gpu.global.add.v4.f32 "
                f"[$1 + {4 * (column + column_in)}], {{$2, $3, $4, $5}}; }}",
                "r,l,f,f,f,f",
                row,
                address,
                *low,
                *high,
            )

    add(target, ids, x)


def store_rows(target: jax.Array, x: jax.Array, column: int) -> None:
    """target[:, column:] = x; target is [64, W] fp32 in device memory, x as in `add_to_rows`."""
    row_bytes = 4 * target.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(ctx, target, x):
        del ctx
        i32, i64, c = _constants()
        row, first_column = _first_row_and_column()
        offset = arith.addi(arith.muli(row, c(row_bytes)), arith.muli(first_column, c(4)))
        address = arith.addi(_device_address(target), arith.extui(i64, offset))
        for row, column_in, pair in _each_pair(x):
            at = row_bytes * row + 4 * (column + column_in)
            _ptx(f"st.global.v2.f32 [$0 + {at}], {{$1, $2}};", "l,f,f", address, *pair)

    store(target, x)
