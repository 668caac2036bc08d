"""Derived figures against numbers worked out by hand or by NumPy."""

import math

import numpy as np
import pytest
from run_folders import make_step, make_steps

from longstraw_jax.evidence.figures import derive, derived_claims, step_problems


def _value(figures: dict, name: str):
    return figures[name]["value"]


def test_rise_against_numpy():
    steps = make_steps()
    figures = derive(steps)
    first = np.array([r for step in steps[:5] for r in step["rewards"]])
    last = np.array([r for step in steps[-5:] for r in step["rewards"]])
    error = math.sqrt(first.var(ddof=1) / first.size + last.var(ddof=1) / last.size)
    np.testing.assert_allclose(_value(figures, "first_mean"), first.mean(), rtol=1e-14)
    np.testing.assert_allclose(_value(figures, "last_mean"), last.mean(), rtol=1e-14)
    np.testing.assert_allclose(_value(figures, "first_standard_error"), first.std(ddof=1) / math.sqrt(20))
    np.testing.assert_allclose(_value(figures, "last_standard_error"), last.std(ddof=1) / math.sqrt(20))
    np.testing.assert_allclose(_value(figures, "rise_standard_error"), error)
    np.testing.assert_allclose(_value(figures, "rise_in_standard_errors"), (last.mean() - first.mean()) / error)


def test_window_is_a_parameter():
    steps = [make_step(i, [float(i), float(i) + 1.0]) for i in (1, 2, 3, 4)]
    figures = derive(steps, window=1)
    assert figures["rise"] == {"rule": "rise", "arguments": {"window": 1}, "value": 3.0}
    assert _value(figures, "rise_standard_error") == math.sqrt(0.5)  # s**2 / n = 0.25 at either end
    assert _value(derive(steps, window=2), "rise") == 2.0
    with pytest.raises(ValueError, match="window = 0"):
        derive(steps, window=0)


def test_overlapping_ends_give_no_rise():
    figures = derive(make_steps(9))
    for name in ("first_mean", "last_mean", "rise", "rise_standard_error", "rise_in_standard_errors"):
        assert _value(figures, name) is None
    assert _value(derive(make_steps(10)), "rise_in_standard_errors") > 0


def test_a5_unscorable_rewards_are_left_out_and_counted():
    steps = [make_step(1, [1.0, None, 0.0, 0.0]), make_step(2, [None] * 4)]
    figures = derive(steps, window=1)
    assert _value(figures, "unscorable_rewards") == 5
    assert _value(figures, "first_mean") == 1 / 3
    assert _value(figures, "reward_mean") == [1 / 3, None]
    assert _value(figures, "last_mean") is None and _value(figures, "rise") is None
    assert step_problems(steps, "detached") == []


def test_the_rise_counts_what_dynamic_sampling_dropped():
    """Groups of half-right answers stay at either end; all that were dropped failed first and are right last."""

    def run(**dropped):
        ends = [[0.0, None], [1.0, 1.0]]
        steps = [make_step(i, [0.0, 1.0], resampled_row_ids=["x"]) for i in (1, 2)]
        return [step | {name: ends[i] for name in dropped} for i, step in enumerate(steps)]

    steps = run(resampled_rewards=True)
    figures = derive(steps, window=1)
    assert step_problems(steps, "detached") == []
    assert _value(figures, "first_mean") == 1 / 3 and _value(figures, "last_mean") == 3 / 4
    spread = [np.var(x, ddof=1) / len(x) for x in ([0, 1, 0], [0, 1, 1, 1])]
    np.testing.assert_allclose(_value(figures, "rise_standard_error"), math.sqrt(sum(spread)))
    assert _value(figures, "reward_mean") == [0.5, 0.5] and _value(figures, "unscorable_rewards") == 0
    # A log that does not say what was dropped has no rise, and no contradiction.
    steps = run()
    assert _value(derive(steps, window=1), "rise") is None and step_problems(steps, "detached") == []


def test_the_rise_counts_a_rollout_once_however_many_updates_it_serves():
    steps = [make_step(i, [float(i), float(i) + 1.0]) for i in (1, 1, 3, 3)]
    for again in steps[1::2]:
        del again["seconds"]["sample"]
    figures = derive(steps, window=2)
    assert _value(figures, "rise") == 2.0
    assert _value(figures, "rise_standard_error") == math.sqrt(0.5)  # of 2 and 2 members, not of 4 and 4


def test_d4_skipped_steps_are_counted():
    bad = make_step(2, [0.0, 1.0], skipped=True, skip_reason="nan", nonfinite_count=3, grad_norm=None)
    figures = derive([make_step(1, [0.0, 1.0]), bad])
    assert _value(figures, "skipped_steps") == 1 and _value(figures, "nonfinite_values") == 3
    assert _value(figures, "grad_norm") == [1.5, None]


def test_j1_age_of_a_stale_prefix_is_reported():
    assert _value(derive([make_step(1, [0.0, 1.0], prefix_age=7), make_step(2, [0.0, 1.0])]), "largest_prefix_age") == 7


def test_totals_columns_and_phases():
    steps = [make_step(i, [0.0, 1.0]) for i in (1, 2, 3)]
    del steps[2]["seconds"]["capture"]
    steps[1]["metrics"] |= {"max_abs_log_ratio": 0.5, "sampling/max_abs_log_ratio": 0.25}
    figures = derive(steps)
    assert _value(figures, "steps") == 3
    assert _value(figures, "prompt_tokens") == 300
    assert _value(figures, "response_tokens") == 3 * (10 + 11)
    assert _value(figures, "total_tokens") == 363
    assert _value(figures, "truncated_responses") == 3
    assert _value(figures, "row_ids") == [["row-1"], ["row-2"], ["row-3"]]
    assert _value(figures, "phase_seconds")["capture"] == {"median": 1.0, "total": 2.0, "count": 2}
    assert _value(figures, "phase_seconds")["replay"] == {"median": 2.0, "total": 6.0, "count": 3}
    assert _value(figures, "peak_bytes") == 1003
    assert _value(figures, "largest_log_ratio") == 0.5
    assert _value(figures, "largest_sampling_log_ratio") == 0.25
    assert _value(figures, "adapter_fingerprint") == f"{3:016x}"


def test_no_steps_is_refused():
    with pytest.raises(ValueError, match="0 records"):
        derive([])


def test_claims_follow_from_the_figures():
    def status(steps):
        return {row["claim"]: row["status"] for row in derived_claims(derive(steps))}

    assert status(make_steps()) == {"capacity": "shown", "learning": "shown"}
    assert status(make_steps()[::-1]) == {"capacity": "shown", "learning": "not shown"}
    assert status(make_steps(4)) == {"capacity": "shown", "learning": "not measured"}
    # No spread at all: the rise has no standard error to be measured in.
    assert status([make_step(i, [1.0, 1.0]) for i in range(1, 11)])["learning"] == "not measured"
    assert status([make_step(1, [0.0], skipped=True, skip_reason="nan")])["capacity"] == "not shown"


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({"rewards": [1.0]}, "rewards has 1 entries; expected 2"),
        ({"prompt_tokens": [1, 2]}, "prompt_tokens has 2 entries; expected 1"),
        ({"truncated": []}, "truncated has 0 entries"),
        (
            {"resampled_row_ids": ["x"], "resampled_rewards": [1.0]},
            "resampled_rewards has 1 entries; expected 2",
        ),
        ({"resampled_rewards": [1.0, 1.0]}, "resampled_rewards has 2 entries; expected 0"),
        ({"mode": "frozen"}, "mode = 'frozen'; the receipt says 'detached'"),
        ({"skipped": True}, "skipped = True, skip_reason = None"),
        ({"skip_reason": "nan"}, "skipped = False"),
        ({"reward_mean": 0.6}, "reward_mean = 0.6; its rewards give 0.5"),
        ({"reward_mean": None}, "reward_mean = None"),
    ],
)
def test_contradictions_are_named(fields, problem):
    (found, *_) = step_problems([{**make_step(1, [0.0, 1.0]), **fields}], "detached")
    assert found.startswith("step 1: ") and problem in found


def test_float32_mean_is_no_contradiction():
    steps = make_steps()
    for step in steps:
        step["reward_mean"] = float(np.mean(np.array(step["rewards"], np.float32)))
    assert step_problems(steps, "detached") == []
