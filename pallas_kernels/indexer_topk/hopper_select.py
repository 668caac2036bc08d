"""Exact selection from stored scores on Hopper: four Triton kernels that compare order keys and never sort."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.indexer_topk import reference
from pallas_kernels.indexer_topk.hopper_scores import GROUP

TILE = (128, GROUP)  # numbers a program holds at once, in order of position: ranks in a row stay within a warp
BLOCK = TILE[0] * TILE[1]
LOWEST = jnp.iinfo(jnp.int32).min  # below the order key of every score

# A row of at most DIRECT * k scores is searched as it is. A longer one is first cut down to its candidates: the k-th
# largest maximum of groups of scores bounds the k-th score from below, and only groups that reach it hold candidates.
# Groups of 2, 4, 8 scores give 2 k maxima and more; from COARSE * k scores on they are the GROUPs whose maxima come
# with the scores.
DIRECT, PAIRS, FOURS, COARSE = 2, 8, 16, 40
WIDE = GROUP.bit_length() - 1
MAX_K = BLOCK // DIRECT  # a row searched as it is fits one tile
CAPACITY = 16  # k candidates held; a row with more of them is searched in its groups, and nothing is dropped
PARTS = 8  # programs that gather one row's candidates


def select(
    scores: Float[Array, "T S"], peaks: Int[Array, "T G"], limit: Int[Array, "T"], k: int, *, interpret: bool = False
) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """The min(k, limit[t]) best of scores[t, :limit[t]]; ties go to the lowest position, NaN ranks first.

    Scores past a row's limit are never used, nor are peaks of groups past it. Exact for any scores.

    Args:
      scores: fp32, S a multiple of 64. peaks: order key of the largest score of each 32, G at least S / 32.
      limit: int32, 0 <= limit <= S. k: at most S and MAX_K.
    Returns:
      Scores and positions by ascending position; -inf and -1 in the slots past min(k, limit).
    """
    hits, hit_count, threshold = find_groups(scores, peaks, limit, k, interpret=interpret)
    candidates = gather_candidates(scores, limit, threshold, hits, hit_count, k, interpret=interpret)
    return cut(scores, limit, hits, hit_count, candidates, k, interpret=interpret)


def _call(kernel, out_shape, grid, args, *, interpret, warps=8):
    flat = [x.reshape(-1) for x in args]
    params = plt.CompilerParams(num_warps=warps, num_stages=1)
    return pl.pallas_call(kernel, out_shape=out_shape, grid=grid, interpret=interpret, compiler_params=params)(*flat)


def _numbers(count, dtype=jnp.int32):
    return jax.ShapeDtypeStruct((count,), dtype)


def find_groups(scores, peaks, limit, k, *, interpret):
    """Per row: the groups that hold its candidates, how many, and the lower bound that candidates reach."""
    rows, length = scores.shape
    grouped = min(length, COARSE * k)  # scores of the longest row that needs maxima of small groups
    fine = max(min(length // 2, FOURS * k // 4), grouped // 8)
    maxima = _call(
        lambda *refs: _group_maxima(*refs, k=k, length=length, fine=fine),
        _numbers(rows * fine),
        (rows, pl.cdiv(grouped, BLOCK)),
        (scores, limit),
        interpret=interpret,
    )
    groups = max(fine, length // GROUP)
    return _call(
        lambda *refs: _find_groups(*refs, k=k, length=length, fine=fine, coarse=peaks.shape[1], groups=groups),
        (_numbers(rows * groups + BLOCK), _numbers(rows), _numbers(rows)),
        (rows,),
        (scores, maxima, peaks, limit),
        interpret=interpret,
    )


def gather_candidates(scores, limit, threshold, hits, hit_count, k, *, interpret):
    """Ascending positions of the scores that reach a row's bound, in PARTS pieces, and the length of each."""
    rows, length = scores.shape
    groups = (hits.shape[0] - BLOCK) // rows
    return _call(
        lambda *refs: _gather_candidates(*refs, k=k, length=length, groups=groups),
        (_numbers(rows * CAPACITY * k + BLOCK), _numbers(rows * PARTS)),
        (rows, PARTS),
        (scores, limit, threshold, hits, hit_count),
        interpret=interpret,
    )


def cut(scores, limit, hits, hit_count, candidates, k, *, interpret):
    """The best min(k, limit) of each row's candidates."""
    rows, length = scores.shape
    groups = (hits.shape[0] - BLOCK) // rows
    best, ids = _call(
        lambda *refs: _cut(*refs, k=k, length=length, groups=groups),
        (_numbers(rows * k + BLOCK, jnp.float32), _numbers(rows * k + BLOCK)),
        (rows,),
        (scores, limit, hits, hit_count, *candidates),
        interpret=interpret,
    )
    return best[: rows * k].reshape(rows, k), ids[: rows * k].reshape(rows, k)


def _shift(limit, k):
    """log2 of the size of a row's groups."""
    small = jnp.where(limit > PAIRS * k, jnp.int32(2), jnp.int32(1))
    return jnp.where(limit > COARSE * k, jnp.int32(WIDE), jnp.where(limit > FOURS * k, jnp.int32(3), small))


def _lanes(i):
    """Numbers i * BLOCK, ... as a tile."""
    return i * BLOCK + lax.broadcasted_iota(jnp.int32, TILE, 0) * TILE[1] + lax.broadcasted_iota(jnp.int32, TILE, 1)


def _read(ref, index, valid):
    return plt.load(ref.at[index], mask=valid, other=0)


def _score_keys(ref, index, valid):
    return jnp.where(valid, reference.order_key(_read(ref, index, valid)), LOWEST)


def _write(ref, slot, keep, value):
    """ref[slot] = value where keep. The other lanes get a slot each past the end: two lanes must not share one."""
    plt.store(ref.at[jnp.where(keep, slot, ref.shape[0] - BLOCK + _lanes(0))], value, mask=keep)


def _count(keep):
    return keep.astype(jnp.int32).reshape(BLOCK).sum()


def _ranks(keep):
    """How many of a tile's lanes up to and including each one are kept."""
    within = jnp.cumsum(keep.astype(jnp.int32), axis=1)
    total = keep.astype(jnp.int32).sum(axis=1)
    return within + (jnp.cumsum(total) - total)[:, None]


def _group_maxima(scores, limit, maxima, *, k, length, fine):
    """Order keys of the largest score of each group of 2, 4 or 8, for rows that use them."""
    row, part = pl.program_id(0), pl.program_id(1)
    seen = limit[row]

    def take(shift):
        shape = (BLOCK >> shift, 1 << shift)
        group = part * shape[0] + lax.broadcasted_iota(jnp.int32, shape, 0)
        position = group * shape[1] + lax.broadcasted_iota(jnp.int32, shape, 1)
        # The mask is one of whole groups: with the row's limit in it the loads would be of single numbers.
        key = reference.order_key(_read(scores, row * length + position, group * shape[1] < length))
        best = jnp.where(position < seen, key, LOWEST).max(axis=1)
        group = part * shape[0] + jnp.arange(shape[0])
        plt.store(maxima.at[row * fine + group], best, mask=group * shape[1] < seen)

    for shift in (1, 2, 3):
        wanted = (seen > DIRECT * k) & (part * BLOCK < seen) & (_shift(seen, k) == shift)
        pl.when(wanted)(functools.partial(take, shift))


def _bracket(load, size, want, slack):
    """Keys low < high with: at least `want` of the valid keys reach low, fewer reach high; and both counts.

    Ends when at most want + slack keys reach low, or when low is the want-th key itself: then high = low + 1.
    """
    blocks = pl.cdiv(size, BLOCK)

    def extremes(i, carry):
        low, top, total = carry
        key, valid, _ = load(i)
        lowest = jnp.where(valid, key, jnp.iinfo(jnp.int32).max).reshape(BLOCK).min()
        return jnp.minimum(low, lowest), jnp.maximum(top, key.reshape(BLOCK).max()), total + _count(valid)

    start = jnp.int32(jnp.iinfo(jnp.int32).max), jnp.int32(LOWEST), jnp.int32(0)
    low, top, total = lax.fori_loop(0, blocks, extremes, start)

    def reach(bound):  # no invalid key does: the middle of two keys is above the lowest one
        return lax.fori_loop(0, blocks, lambda i, total: total + _count(load(i)[0] >= bound), jnp.int32(0))

    def halve(carry):
        low, high, reach_low, reach_high = carry
        middle = (low & high) + ((low ^ high) >> 1)  # no overflow
        found = reach(middle)
        enough = found >= want
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle),
            jnp.where(enough, found, reach_low),
            jnp.where(enough, reach_high, found),
        )

    def wide(carry):
        low, high, reach_low, _ = carry
        return (reach_low > want + slack) & (high != low + 1)

    return lax.while_loop(wide, halve, (low, top + 1, total, jnp.int32(0)))


def _find_groups(scores, maxima, peaks, limit, hits, hit_count, threshold, *, k, length, fine, coarse, groups):
    """A lower bound of the k-th score that few groups reach, and those groups in ascending order."""
    row = pl.program_id(0)
    seen = limit[row]
    shift = _shift(seen, k)
    size = jnp.where(seen > DIRECT * k, (seen + (1 << shift) - 1) >> shift, 0)
    # The last group's maximum may be of a key past the limit.
    lane = jnp.arange(GROUP)
    last = ((size - 1) << shift) + lane
    last_key = _score_keys(scores, row * length + last, (lane < (1 << shift)) & (last < seen) & (size > 0)).max()

    def load(i):
        group = _lanes(i)
        valid = group < size
        key = _read(maxima, row * fine + group, valid & (shift < WIDE))
        key = jnp.where(shift < WIDE, key, _read(peaks, row * coarse + group, valid & (shift == WIDE)))
        return jnp.where(valid, jnp.where(group == size - 1, last_key, key), LOWEST), valid, group

    # An approximate bound will do here, and takes a third of the passes.
    low, _, _, _ = _bracket(load, size, k, k // 16)

    def collect(i, taken):
        key, valid, group = load(i)
        keep = valid & (key >= low)
        _write(hits, row * groups + taken + _ranks(keep) - 1, keep, group)
        return taken + _count(keep)

    hit_count[row] = lax.fori_loop(0, pl.cdiv(size, BLOCK), collect, jnp.int32(0))
    threshold[row] = low


def _in_groups(hits, row, groups, shift, lane, valid):
    """Positions of the scores in a row's listed groups, one after another."""
    return (_read(hits, row * groups + (lane >> shift), valid) << shift) | (lane & ((1 << shift) - 1))


def _gather_candidates(scores, limit, threshold, hits, hit_count, positions, count, *, k, length, groups):
    row, part = pl.program_id(0), pl.program_id(1)
    seen, bound, capacity = limit[row], reference.key_score(threshold[row]), CAPACITY * k // PARTS
    shift = _shift(seen, k)
    share = pl.cdiv(hit_count[row], PARTS)
    first = part * share
    end = jnp.maximum(jnp.minimum(first + share, hit_count[row]), first)
    base = (row * PARTS + part) * capacity

    def append(position, score, valid, taken):
        keep = valid & (position < seen) & ~(score < bound)  # a NaN stays
        slot = taken + _ranks(keep) - 1
        _write(positions, base + slot, keep & (slot < capacity), position)
        return taken + _count(keep)

    def from_wide(i, taken):
        number = first + i * TILE[0] + jnp.arange(TILE[0])
        group = _read(hits, row * groups + number, number < end)
        position = group[:, None] * TILE[1] + lax.broadcasted_iota(jnp.int32, TILE, 1)
        valid = jnp.broadcast_to((number < end)[:, None], TILE)
        return append(position, _read(scores, row * length + position, valid), valid, taken)

    def from_groups(i, taken):
        lane = (first << shift) + _lanes(i)
        valid = lane < end << shift
        position = _in_groups(hits, row, groups, shift, lane, valid)
        return append(position, _read(scores, row * length + position, valid), valid, taken)

    @pl.when(shift == WIDE)
    def _():
        count[row * PARTS + part] = lax.fori_loop(0, pl.cdiv(end - first, TILE[0]), from_wide, jnp.int32(0))

    @pl.when(shift < WIDE)
    def _():
        steps = pl.cdiv((end - first) << shift, BLOCK)
        count[row * PARTS + part] = lax.fori_loop(0, steps, from_groups, jnp.int32(0))


def _cut(scores, limit, hits, hit_count, positions, count, best, ids, *, k, length, groups):
    row = pl.program_id(0)
    seen, capacity = limit[row], CAPACITY * k // PARTS
    shift, want, direct = _shift(seen, k), jnp.minimum(seen, k), seen <= DIRECT * k
    found, fits = jnp.int32(0), jnp.bool_(True)
    skips = []  # what to add to the number of a candidate from the end of each part on
    for part in range(PARTS):
        c = count[row * PARTS + part]
        found, fits = found + c, fits & (c <= capacity)
        skips.append((found, capacity - c))

    def scored(position, valid):
        return _score_keys(scores, row * length + position, valid), valid, position

    def listed(i):
        """The candidates, or the whole of a short row."""
        lane = _lanes(i)
        valid, at = lane < jnp.where(direct, seen, found), row * PARTS * capacity + lane
        for end, skip in skips[:-1]:
            at = at + jnp.where(lane >= end, skip, 0)
        return scored(jnp.where(direct, lane, _read(positions, at, valid & ~direct)), valid)

    def in_groups(i):
        """All of the groups that hold candidates."""
        lane = _lanes(i)
        valid = lane < hit_count[row] << shift
        position = _in_groups(hits, row, groups, shift, lane, valid)
        return scored(position, valid & (position < seen))

    def choose(load, size):
        low, high, reach_low, reach_high = _bracket(load, size, want, 0)
        exact = reach_low == want  # else low is the want-th key, and not all keys equal to it fit
        edge, ties = jnp.where(exact, low, high), want - jnp.where(exact, reach_low, reach_high)

        def collect(i, carry):
            taken, tied = carry
            key, valid, position = load(i)
            above, tie = valid & (key >= edge), valid & (key == low) & (low < edge)
            keep = above | (tie & (tied + _ranks(tie) <= ties))
            slot = row * k + taken + _ranks(keep) - 1
            _write(best, slot, keep, reference.key_score(key))
            _write(ids, slot, keep, position)
            return taken + _count(keep), tied + _count(tie)

        lax.fori_loop(0, pl.cdiv(size, BLOCK), collect, (jnp.int32(0), jnp.int32(0)))

    usual = direct | (fits & (found <= BLOCK))

    @pl.when(usual)
    def _():
        tile = listed(0)  # stays in registers
        choose(lambda i: tile, jnp.int32(BLOCK))

    pl.when(~usual & fits)(lambda: choose(listed, found))
    pl.when(~usual & ~fits)(lambda: choose(in_groups, hit_count[row] << shift))

    slot = _lanes(0)
    empty = (slot >= want) & (slot < k)
    _write(best, row * k + slot, empty, jnp.full(TILE, -jnp.inf, jnp.float32))
    _write(ids, row * k + slot, empty, jnp.full(TILE, -1, jnp.int32))
