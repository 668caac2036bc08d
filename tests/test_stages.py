"""Stages: batches in order, what a record says, time limits, and bad fields by name."""

import itertools

import numpy as np
import pytest

from longstraw_jax.pretrain import stages, step
from longstraw_jax.pretrain.stages import Stage

FIELDS = dict(name="short", tokens=64, rows=2, steps=10, seconds=0.0, selected=8, trained=("trunk", "indexer"))


def batch(i):
    zeros = np.zeros((2, 64), np.int32)
    return step.Batch(zeros + i, zeros, zeros, zeros, zeros.astype(np.float32), zeros > 0)


def run(stage, skipped=0.0, **options):
    """A stage whose step counts: the state, record, reports, and each batch's number with the share it came at."""
    seen, reports = [], []

    def advance(state, batch, share):
        seen.append((int(batch.ids[0, 0]), share))
        return state + 1, {"language": np.float32(1.0), "skipped": np.float32(skipped)}

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


@pytest.mark.parametrize(
    "field, value",
    [
        *(("tokens", 8), ("rows", 0), ("steps", 0), ("seconds", -1.0), ("selected", 64)),
        *(("trained", ()), ("trained", ("all",))),
    ],
)
def test_a_field_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=f"stages.short.{field}=.*; accepted"):
        Stage(**FIELDS | {field: value})
