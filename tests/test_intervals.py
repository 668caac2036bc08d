"""95 % intervals: published values, limits, and coverage by simulation."""

import numpy as np
import pytest

from longstraw_jax.evidence import intervals


@pytest.mark.parametrize(
    "successes, trials, low, high",
    [  # Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_has_the_published_values(successes, trials, low, high):
    assert intervals.wilson(successes / trials, trials) == pytest.approx((low, high), abs=5e-5)


def test_one_binary_sample_a_prompt_is_wilsons():
    found = intervals.score_interval([[1.0]] * 81 + [[0.0]] * 182)
    assert (found["low"], found["high"]) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert (found["method"], found["prompts"], found["samples"]) == ("wilson", 263, 263)


def test_copies_of_a_sample_add_nothing():
    """Eight samples a prompt that all agree know as much as one, less what the estimated variance costs."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 2, 30).astype(float)
    one = intervals.score_interval([[p] for p in prompts])
    eight = intervals.score_interval([[p] * 8 for p in prompts])
    assert eight["method"] == "clustered" and eight["samples"] == 240
    assert one["high"] - one["low"] < eight["high"] - eight["low"] < 1.1 * (one["high"] - one["low"])


def test_nothing_right_is_no_proof_of_nothing():
    found = intervals.score_interval([[0.0] * 4] * 5)
    assert found["low"] == 0 and found["high"] == pytest.approx(intervals.wilson(0.0, 5)[1])
    assert intervals.score_interval([[1.0, 1.0]])["low"] == pytest.approx(intervals.wilson(1.0, 1)[0])
    assert intervals.score_interval([[], []])["mean"] is None


def test_clustered_intervals_cover_the_truth():
    """2,000 evaluations of 12 prompts x 4 samples, prompts differing as Beta(2, 3) does; coverage 95 % within 3 %."""
    rng = np.random.default_rng(1)
    hits = 0
    for rates in rng.beta(2, 3, (2000, 12)):
        found = intervals.score_interval((rng.random((12, 4)) < rates[:, None]).astype(float).tolist())
        hits += found["low"] <= 0.4 <= found["high"]
    assert 0.92 <= hits / 2000 <= 0.98


@pytest.mark.parametrize("share, trials", [(1.1, 3), (0.5, 0), (float("nan"), 3)])
def test_bad_arguments_are_refused(share, trials):
    with pytest.raises(ValueError, match="accepted: a share from 0 to 1"):
        intervals.wilson(share, trials)


def test_a_score_outside_of_0_to_1_is_refused():
    with pytest.raises(ValueError, match="score 1.5; accepted: 0 to 1"):
        intervals.score_interval([[1.5]])
