"""A step's record: TRL's names, means over groups, what is absent where there is nothing, dropped groups apart."""

import numpy as np
import pytest

from longstraw_jax.evidence.receipt import step_schema_problems
from longstraw_jax.evidence.step_record import rollout_metrics, step_record
from longstraw_jax.prefix.refresh import Drift
from longstraw_jax.rollout import PolicyConfig, Rollout
from longstraw_jax.train import StepReport

POLICY = PolicyConfig(eos_ids=(1,), capacity=64, group=4, max_new_tokens=8, max_resamples=3)


def rolled(number, rewards, lengths, events=()):
    rewards = np.asarray(rewards, np.float32)
    scored = rewards[np.isfinite(rewards)]
    signal = bool(scored.size and np.ptp(scored) > 0)
    truncated = np.asarray(lengths) == 8
    responses = [[5] * n for n in lengths]
    return Rollout(number, np.zeros(10 + number), responses, rewards, np.zeros(4), truncated, list(events), signal)


def logged(function, name, value):
    return {"event": "reward_metric", "function": function, "name": name, "value": value}


FIRST = rolled(0, [1, 0, 0, 1], [8, 3, 4, 1], [logged("f", "mean", 0.5), logged("f", "odd", 3.0)])
SECOND = rolled(3, [0.5, np.nan, 0.5, 0.5], [8, 8, 2, 2], [logged("f", "mean", 0.1)])
SILENT = [rolled(number, [0.0] * 4, [1] * 4) for number in (1, 2)]


def test_figures_of_rewards_and_responses():
    found = rollout_metrics([FIRST, SECOND])
    assert found["reward"] == pytest.approx(3.5 / 7) and found["reward/unscorable"] == 1
    assert found["reward_std"] == pytest.approx(np.std([1, 0, 0, 1], ddof=1) / 2)
    assert found["frac_reward_zero_std"] == 0.5
    lengths = np.array([8, 3, 4, 1, 8, 8, 2, 2])
    for kind in ("mean", "min", "max"):
        assert found[f"completions/{kind}_length"] == getattr(np, kind)(lengths)
        assert found[f"completions/{kind}_terminated_length"] == getattr(np, kind)(lengths[lengths < 8])
    assert found["completions/clipped_ratio"] == 3 / 8
    assert found["rewards/f/mean"] == pytest.approx(0.3) and found["rewards/f/odd"] == 3.0


def test_what_nothing_is_there_for_is_absent():
    found = rollout_metrics([rolled(0, [np.nan] * 4, [8] * 4)])
    assert not {"reward", "reward_std", "completions/mean_terminated_length"} & found.keys()
    assert found["reward/unscorable"] == 4 and found["frac_reward_zero_std"] == 1


def test_a_record_names_the_rows_that_trained_and_those_that_were_replaced():
    measured, prefix = {"sampling/max_abs_log_ratio": 0.25}, (0, "0" * 16, 2, Drift(0.02))
    report = StepReport([FIRST, SECOND], SILENT, 3.0, 12.0, 0.5, 0, None, measured, {"replay": 1.0}, *prefix)
    extra = {"learning_rate": 1e-5, "num_tokens": 7.0}
    record = step_record(report, POLICY, 4, ["a", "b", "c", "d"], seconds=2.0, peak_bytes=9, extra=extra)
    assert step_schema_problems([record]) == []
    assert record["row_ids"] == ["a", "d"] and record["resampled_row_ids"] == ["b", "c"]
    assert record["resampled_rewards"] == [0.0] * 8 and record["reward_mean"] == 0.5
    assert record["prompt_tokens"] == [10, 13] and record["rewards"][4:] == [0.5, None, 0.5, 0.5]
    assert record["loss"] == 0.25 and not record["skipped"] and record["seconds"] == {"replay": 1.0, "step": 2.0}
    assert record["captures"] == 2 and record["refresh_policy"] == "every_step"
    metrics = record["metrics"]
    assert metrics["prefix_drift/signal"] == 0.02 and "prefix_drift/truth" not in metrics
    assert extra.items() <= metrics.items() and metrics["sampling/sampling_logp_difference/max"] == 0.25
    assert metrics["dynamic_sampling/resampled"] == 2 and metrics["dynamic_sampling/without_signal"] == 1


def test_the_mean_is_that_of_the_rewards_as_they_are_written():
    """Large rewards that cancel: a mean in fp32 would differ from what a reader of the log finds."""
    wide, measured = rolled(0, [-298.0, -607.7, -896.4, 1803.0], [1] * 4), {"sampling/max_abs_log_ratio": 0.25}
    report = StepReport([wide], [], 3.0, 12.0, 0.5, 0, None, measured, {"replay": 1.0}, 0, "0" * 16, 2, None)
    record = step_record(report, POLICY, 1, ["a"], seconds=2.0, peak_bytes=9, extra={})
    assert record["reward_mean"] == pytest.approx(np.mean(record["rewards"]), abs=1e-9)
