"""Held-out curves by mode: figures by hand, what cannot be compared, modes that are told apart and that are not."""

import math

import numpy as np
import pytest

from longstraw_jax.evidence import learning, result_plots

T_3 = 4.302652729749464  # Student's t, 2 degrees of freedom, both tails of 5 %


def run(mode, seed, seconds, *rights):
    """Evaluated every 10 steps."""
    points = [{"step": 10 * i, "seconds": seconds * i, "right": list(right)} for i, right in enumerate(rights)]
    return {"mode": mode, "seed": seed, "weights_fingerprint": "a", "points": points}


def test_the_step_that_compiles_counts_as_the_others():
    steps = [{"seconds": {"step": s}} for s in (100.0, 2.0, 4.0, 3.0)]
    assert learning.training_seconds(steps) == [3.0, 5.0, 9.0, 12.0]
    with pytest.raises(ValueError, match="1 steps; accepted: at least 2"):
        learning.training_seconds(steps[:1])


def test_both_intervals_by_hand():
    told = learning.both_intervals([np.float64([1, 0, 0, 0]), np.float64([1, 1, 0, 0]), np.float64([1, 1, 1, 0])])
    assert told["mean"] == 0.5  # of the runs 0.25, 0.5, 0.75; of the prompts 1, 2/3, 1/3, 0
    assert told["over_seeds"]["high"] - 0.5 == pytest.approx(T_3 * 0.25 / math.sqrt(3))
    deviation = math.sqrt((2 * 0.5**2 + 2 * (1 / 6) ** 2) / 3)
    assert 0.5 - told["over_prompts"]["low"] == pytest.approx(3.182446305284263 * deviation / 2)


def test_a_single_seed_has_no_interval_over_seeds_and_tells_nothing_apart():
    runs = [run("frozen", 0, 1.0, [0] * 6, [0] * 6), run("exact", 0, 1.0, [0] * 6, [1] * 6)]
    found = learning.summary(runs, 0.2)
    pair = found["equal_steps"]["pairs"]["frozen - exact"]
    assert pair["mean"] == -1 and pair["over_seeds"]["low"] is None and not pair["apart"]
    assert "prompts" in "\n".join(learning.table(found))


@pytest.fixture(scope="module")
def three_seeds():
    """`exact` learns four of six prompts, each seed others; `frozen` one; `exact` takes twice the time."""
    runs = []
    for seed in range(3):
        before = [0] * 6
        learnt = [int((i + seed) % 6 > 1) for i in range(6)]
        runs.append(run("frozen", seed, 1.0, before, before, [1 - x and int(i == seed) for i, x in enumerate(before)]))
        runs.append(run("exact", seed, 2.0, before, before, learnt))
    return runs


def test_the_summary_compares_at_equal_steps_and_at_equal_seconds(three_seeds):
    assert learning.problems(three_seeds) == []
    found = learning.summary(three_seeds, 0.5)
    exact, frozen = found["modes"]["exact"], found["modes"]["frozen"]
    assert exact["rise"]["mean"] == pytest.approx(4 / 6) and exact["reached"] and not frozen["reached"]
    assert exact["seconds_a_step"] == 0.2 and [point["step"] for point in exact["curve"]] == [0, 10, 20]
    assert exact["curve"][-1]["samples"] == 18 and exact["curve"][-1]["prompts"] == 6
    steps = found["equal_steps"]["pairs"]["frozen - exact"]
    assert steps["mean"] == pytest.approx(1 / 6 - 4 / 6) and steps["apart"] and steps["seeds"] == [0, 1, 2]
    seconds = found["equal_seconds"]
    # When `frozen` has taken 20 steps `exact` has taken 10 and learnt nothing yet.
    assert seconds["seconds"] == 2.0 and seconds["modes"]["exact"]["mean"] == 0
    assert seconds["pairs"]["frozen - exact"]["mean"] == pytest.approx(1 / 6)
    assert not seconds["pairs"]["frozen - exact"]["apart"]  # each seed gained one prompt: the prompts do not tell
    text = "\n".join(learning.table(found))
    assert "goal of +0.50 reached" in text and "not told apart" in text and "2 s of training" in text
    assert result_plots.learning_curves({"summary": found})[:4] == b"\x89PNG"


def test_scores_between_two_evaluations_are_linear_in_the_runs_own_seconds():
    one = run("exact", 0, 4.0, [0, 1], [1, 1])
    assert learning.at_seconds(one, 1.0).tolist() == [0.25, 1.0]
    assert learning.at_seconds(one, 9.0).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "other, said",
    [
        (run("exact", 1, 1.0, [0, 0]), "seed 1: evaluated at steps .0.; accepted: those of the other runs"),
        (run("exact", 1, 1.0, [0], [1]), "seed 1: .1. held-out prompts; accepted"),
        (run("exact", 1, 1.0, [0, 0], [1, 0]) | {"weights_fingerprint": "b"}, "base weights .*; accepted: one base"),
    ],
)
def test_runs_that_cannot_be_compared_are_named(other, said):
    with pytest.raises(AssertionError, match=said):
        assert learning.problems([run("exact", 0, 1.0, [0, 0], [1, 0]), other]) == []


def test_no_runs_are_a_problem():
    assert learning.problems([]) == ["0 finished runs; accepted: at least 1"]
