"""Stages: batches in order, what a record says, time limits, levels that follow `bound`, and bad fields by name."""

import itertools

import numpy as np
import pytest

from longstraw_jax.pretrain import stages, step
from longstraw_jax.pretrain.stages import Stage

FIELDS = dict(name="short", tokens=64, rows=2, steps=10, seconds=0.0, selected=8, trained=("trunk", "indexer"))


def batch(i, level):
    zeros = np.zeros((2, 64), np.int32)
    return step.Batch(zeros + i, zeros, zeros + level, zeros, zeros.astype(np.float32), zeros > 0)


def run(stage, skipped=0.0, bound=lambda step, level: 0.0, **options):
    """A stage whose step counts: the state, record, reports, and each batch's number with the share it came at.

    bound: of a step, counted from 0, on a batch of a level.
    """
    seen, reports = [], []

    def advance(state, batch, share):
        seen.append((int(batch.ids[0, 0]), share))
        made_at = int(batch.positions[0, 0])
        right = np.float32(bound(state, made_at))
        return state + 1, {"language": np.float32(1.0), "skipped": np.float32(skipped), "bound": right}

    state, record = stages.run(stage, 0, batch, advance, every=4, report=reports.append, **options)
    return state, record, reports, seen


def test_batches_come_in_order_and_the_record_counts_them():
    state, record, reports, seen = run(Stage(**FIELDS))
    assert [number for number, _ in seen] == list(range(10)) and state == 10
    np.testing.assert_allclose([share for _, share in seen], np.arange(10) / 10)
    assert (record["steps"], record["tokens"], record["skipped"]) == (10, 10 * 128, 0)
    assert [r["step"] for r in reports] == [4, 8, 10] and reports[-1]["language"] == 1.0
    assert run(Stage(**FIELDS))[1]["ids_sha256"] == record["ids_sha256"]
    assert run(Stage(**FIELDS | {"steps": 9}))[1]["ids_sha256"] != record["ids_sha256"]


def test_time_ends_a_stage_and_drives_its_share():
    clock = itertools.count()  # a second a look
    _, record, _, seen = run(Stage(**FIELDS | {"steps": 1000, "seconds": 20.0}), clock=lambda: float(next(clock)))
    shares = [share for _, share in seen]
    assert 5 < record["steps"] < 20 and shares == sorted(shares) and 0.8 < shares[-1] < 1


def test_gradients_that_are_not_finite_end_the_run():
    with pytest.raises(FloatingPointError, match="stage short: 10 of 10 gradients"):
        run(Stage(**FIELDS), skipped=1.0)


LEVELS = FIELDS | {"steps": 100, "mastered": 0.8}


def reached(record):
    return [(one["level"], one["step"]) for one in record["levels"]]


def test_levels_rise_as_they_are_mastered_and_the_hardest_ends_the_stage():
    _, record, reports, seen = run(Stage(**LEVELS), bound=lambda step, level: 0.9, hardest=3)
    # Steps of batches that were made ahead at the level before are no evidence: after a rise two looks pass.
    assert reached(record) == [(0, 0), (1, 4), (2, 12), (3, 20)]
    assert (record["level"], record["mastered"], record["steps"], len(seen)) == (3, True, 28, 28)
    assert [r["level"] for r in reports] == [0, 1, 1, 2, 2, 3, 3] and reports[-1]["share"] < 0.3
    np.testing.assert_allclose([r["mastery"] for r in reports], [0.9, 0, 0.9, 0, 0.9, 0, 0.9], rtol=1e-6)
    assert run(Stage(**LEVELS), bound=lambda step, level: 0.9, hardest=3)[1]["ids_sha256"] == record["ids_sha256"]


def test_a_level_stays_until_the_mean_of_its_steps_is_high_enough():
    """Level 0 is right in half of the steps until step 40; the harder one never is, so the stage runs to its end."""
    right = lambda step, level: 0.0 if level else 1.0 if step % 2 or step >= 40 else 0.5  # noqa: E731
    _, record, reports, _ = run(Stage(**LEVELS), bound=right, hardest=3)
    assert reached(record) == [(0, 0), (1, 44)] and reports[-1]["level"] == 1
    assert (record["level"], record["mastered"], record["steps"]) == (1, False, 100)


def test_a_stage_begins_where_the_last_one_ended_and_without_levels_at_the_hardest():
    _, record, _, _ = run(Stage(**LEVELS), bound=lambda step, level: 0.9 * (level >= 2), level=2, hardest=3)
    assert reached(record) == [(2, 0), (3, 4)] and record["mastered"]
    made = []
    _, record, _, _ = run(Stage(**FIELDS), bound=lambda step, level: made.append(level) or 1.0, level=2, hardest=3)
    assert reached(record) == [(3, 0)] and record["steps"] == 10 and set(made) == {3} and not record["mastered"]
    with pytest.raises(ValueError, match="stages.short: level=4; accepted: 0 to the hardest, 3"):
        run(Stage(**LEVELS), level=4, hardest=3)


def test_levels_grow_by_half():
    found = [0]
    while found[-1] < 20:
        found.append(stages.harder(found[-1], 20))
    assert found == [0, 1, 2, 4, 7, 11, 17, 20]


@pytest.mark.parametrize(
    "field, value",
    [
        *(("tokens", 8), ("rows", 0), ("steps", 0), ("seconds", -1.0), ("selected", 64)),
        *(("trained", ()), ("trained", ("all",)), ("mastered", 1.5)),
    ],
)
def test_a_field_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=f"stages.short.{field}=.*; accepted"):
        Stage(**FIELDS | {field: value})
