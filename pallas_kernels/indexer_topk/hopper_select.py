"""Exact selection from stored scores on Hopper: four Triton kernels, one program a row, no sort."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.indexer_topk import reference

BLOCK = 4096  # numbers a program holds at once
GROUPED = 8192  # scores whose group maxima one program takes
LOWEST = jnp.iinfo(jnp.int32).min  # below the order key of every score

# A row of at most DIRECT * k scores is searched as it is. A longer one is first cut down to its candidates: with
# groups of 8 scores, from COARSE * k scores on of 64, the k-th largest group maximum bounds the k-th score from below.
DIRECT, COARSE = 8, 128
CAPACITY = 16  # k candidates held; a row with more of them is searched as it is, and nothing is dropped


def select(
    scores: Float[Array, "T S"], limit: Int[Array, "T"], k: int, *, interpret: bool = False
) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """The min(k, limit[t]) best of scores[t, :limit[t]]; ties go to the lowest position, NaN ranks first.

    Scores past a row's limit are never read. Exact for any scores: rounding enters nowhere, values are compared by
    `reference.order_key`.

    Args:
      scores: fp32, S a multiple of 64. limit: int32, 0 <= limit <= S. k: at most S.
    Returns:
      Scores and positions by ascending position; -inf and -1 in the slots past min(k, limit).
    """
    rows, length = scores.shape
    groups = max(pl.cdiv(min(length, COARSE * k), 8), pl.cdiv(length, 64))
    flat = scores.reshape(-1)
    number = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    rowwise = dict(grid=(rows,), interpret=interpret, compiler_params=plt.CompilerParams(num_warps=8, num_stages=1))
    capacity = CAPACITY * k
    if length > DIRECT * k:
        maxima = pl.pallas_call(
            lambda *refs: _group_maxima(*refs, k=k, length=length, groups=groups),
            out_shape=number(rows * groups),
            grid=(rows, pl.cdiv(length, GROUPED)),
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        )(flat, limit)
        threshold, hits, hit_count = pl.pallas_call(
            lambda *refs: _find_groups(*refs, k=k, groups=groups),
            out_shape=(number(rows), number(rows * groups + BLOCK), number(rows)),
            **rowwise,
        )(maxima, limit)
        keys, positions, count = pl.pallas_call(
            lambda *refs: _gather_candidates(*refs, k=k, length=length, groups=groups),
            out_shape=(number(rows * capacity + BLOCK), number(rows * capacity + BLOCK), number(rows)),
            **rowwise,
        )(flat, limit, threshold, hits, hit_count)
    else:
        keys = positions = jnp.zeros(1, jnp.int32)
        count = jnp.full(rows, capacity + 1, jnp.int32)
    best, ids = pl.pallas_call(
        lambda *refs: _cut(*refs, k=k, length=length),
        out_shape=(jax.ShapeDtypeStruct((rows * k + BLOCK,), jnp.float32), number(rows * k + BLOCK)),
        **rowwise,
    )(flat, limit, keys, positions, count)
    return best[: rows * k].reshape(rows, k), ids[: rows * k].reshape(rows, k)


def _shift(limit, k):
    """log2 of the group size of a row."""
    return jnp.where(limit > COARSE * k, jnp.int32(6), jnp.int32(3))


def _read(ref, index, valid):
    """ref[index] where valid; lanes that are not read nothing."""
    return plt.load(ref.at[index], mask=valid, other=0)


def _score_keys(ref, index, valid):
    return jnp.where(valid, reference.order_key(_read(ref, index, valid)), LOWEST)


def _write(ref, slot, keep, value):
    """ref[slot] = value where keep. The other lanes get a slot each past the end: two lanes must not share one."""
    spare = ref.shape[0] - BLOCK + jnp.arange(BLOCK)
    plt.store(ref.at[jnp.where(keep, slot, spare)], value, mask=keep)


def _group_maxima(scores, limit, maxima, *, k, length, groups):
    """Order keys of the largest score of each group of 8 or 64."""
    row, part = pl.program_id(0), pl.program_id(1)
    seen = limit[row]

    def take(shift):
        shape = (GROUPED >> shift, 1 << shift)
        offset = part * GROUPED + lax.broadcasted_iota(jnp.int32, shape, 0) * shape[1]
        position = offset + lax.broadcasted_iota(jnp.int32, shape, 1)
        best = _score_keys(scores, row * length + position, position < seen).max(axis=1)
        group = part * shape[0] + jnp.arange(shape[0])
        plt.store(maxima.at[row * groups + group], best, mask=(group << shift) < seen)

    wanted = (seen > DIRECT * k) & (part * GROUPED < seen)
    pl.when(wanted & (_shift(seen, k) == 3))(lambda: take(3))
    pl.when(wanted & (_shift(seen, k) == 6))(lambda: take(6))


def _bracket(load, size, want, slack):
    """Keys low < high with: at least `want` of `size` keys reach low, fewer reach high; and both counts.

    Ends when at most want + slack keys reach low, or when low is the want-th key itself: then high = low + 1.
    """
    blocks = pl.cdiv(size, BLOCK)

    def extremes(i, carry):
        key, valid, _ = load(i)
        low = jnp.where(valid, key, jnp.iinfo(jnp.int32).max).min()
        return jnp.minimum(carry[0], low), jnp.maximum(carry[1], key.max())

    low, top = lax.fori_loop(0, blocks, extremes, (jnp.int32(jnp.iinfo(jnp.int32).max), jnp.int32(LOWEST)))

    def reach(key):
        def add(i, total):
            found, valid, _ = load(i)
            return total + (valid & (found >= key)).astype(jnp.int32).sum()

        return lax.fori_loop(0, blocks, add, jnp.int32(0))

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

    return lax.while_loop(wide, halve, (low, top + 1, size, jnp.int32(0)))


def _find_groups(maxima, limit, threshold, hits, hit_count, *, k, groups):
    """A lower bound of the k-th score that few groups reach, and those groups in ascending order."""
    row = pl.program_id(0)
    seen = limit[row]
    shift = _shift(seen, k)
    size = jnp.where(seen > DIRECT * k, (seen + (1 << shift) - 1) >> shift, 0)

    def load(i):
        group = i * BLOCK + jnp.arange(BLOCK)
        valid = group < size
        return jnp.where(valid, _read(maxima, row * groups + group, valid), LOWEST), valid, group

    # An approximate bound will do here, and takes a third of the passes.
    low, _, _, _ = _bracket(load, size, k, k // 16)

    def collect(i, taken):
        key, valid, group = load(i)
        keep = valid & (key >= low)
        ranks = jnp.cumsum(keep.astype(jnp.int32))
        _write(hits, row * groups + taken + ranks - 1, keep, group)
        return taken + keep.astype(jnp.int32).sum()

    threshold[row] = low
    hit_count[row] = lax.fori_loop(0, pl.cdiv(size, BLOCK), collect, jnp.int32(0))


def _gather_candidates(scores, limit, threshold, hits, hit_count, keys, positions, count, *, k, length, groups):
    """Keys and positions of all scores that reach the threshold, in ascending order, and how many there are."""
    row = pl.program_id(0)
    seen, low, capacity = limit[row], threshold[row], CAPACITY * k
    shift = _shift(seen, k)
    size = hit_count[row] << shift

    def collect(i, taken):
        lane = i * BLOCK + jnp.arange(BLOCK)
        valid = lane < size
        group = _read(hits, row * groups + (lane >> shift), valid)
        position = (group << shift) | (lane & ((1 << shift) - 1))
        valid = valid & (position < seen)
        key = _score_keys(scores, row * length + position, valid)
        keep = valid & (key >= low)
        slot = taken + jnp.cumsum(keep.astype(jnp.int32)) - 1
        fits = keep & (slot < capacity)
        _write(keys, row * capacity + slot, fits, key)
        _write(positions, row * capacity + slot, fits, position)
        return taken + keep.astype(jnp.int32).sum()

    found = lax.fori_loop(0, pl.cdiv(size, BLOCK), collect, jnp.int32(0))
    count[row] = jnp.where(seen > DIRECT * k, found, capacity + 1)


def _cut(scores, limit, keys, positions, count, best, ids, *, k, length):
    """The best min(k, limit) of a row's candidates, or of the whole row where it has no list of them."""
    row = pl.program_id(0)
    seen, found, capacity = limit[row], count[row], CAPACITY * k
    want = jnp.minimum(seen, k)

    def from_row(i):
        position = i * BLOCK + jnp.arange(BLOCK)
        valid = position < seen
        return _score_keys(scores, row * length + position, valid), valid, position

    def from_candidates(i):
        slot = i * BLOCK + jnp.arange(BLOCK)
        valid = slot < found
        at = row * capacity + slot
        return jnp.where(valid, _read(keys, at, valid), LOWEST), valid, _read(positions, at, valid)

    def cut(load, size):
        low, high, reach_low, reach_high = _bracket(load, size, want, 0)
        exact = reach_low == want  # else low is the want-th key, and not all keys equal to it fit
        edge, ties = jnp.where(exact, low, high), want - jnp.where(exact, reach_low, reach_high)

        def collect(i, carry):
            taken, tied = carry
            key, valid, position = load(i)
            above, tie = valid & (key >= edge), valid & (key == low) & (low < edge)
            tie_rank = tied + jnp.cumsum(tie.astype(jnp.int32))
            keep = above | (tie & (tie_rank <= ties))
            slot = row * k + taken + jnp.cumsum(keep.astype(jnp.int32)) - 1
            _write(best, slot, keep, reference.key_score(key))
            _write(ids, slot, keep, position)
            return taken + keep.astype(jnp.int32).sum(), tied + tie.astype(jnp.int32).sum()

        lax.fori_loop(0, pl.cdiv(size, BLOCK), collect, (jnp.int32(0), jnp.int32(0)))

    pl.when(found > capacity)(lambda: cut(from_row, seen))
    pl.when(found <= capacity)(lambda: cut(from_candidates, found))

    @pl.loop(0, pl.cdiv(k, BLOCK))
    def _(i):
        slot = i * BLOCK + jnp.arange(BLOCK)
        empty = (slot >= want) & (slot < k)
        _write(best, row * k + slot, empty, jnp.full(BLOCK, -jnp.inf, jnp.float32))
        _write(ids, row * k + slot, empty, jnp.full(BLOCK, -1, jnp.int32))
