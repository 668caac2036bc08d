"""A step's line of the log, from what the step reports; names of metrics are those of TRL where it has one."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from longstraw_jax.rollout import PolicyConfig, Rollout
from longstraw_jax.train import StepReport


def step_record(
    report: StepReport,
    policy: PolicyConfig,
    step: int,
    row_ids: Sequence[int | str],
    *,
    seconds: float,
    peak_bytes: int,
    extra: dict[str, float],
) -> dict[str, Any]:
    """A line of steps.jsonl, as evidence/figures.py defines it.

    Args:
      step: from 1.
      row_ids: of the rollout's prompts by their number, those of dropped groups included.
      seconds: of the whole step.
      extra: metrics of the run so far (learning_rate, num_tokens, ...).
    """
    rollouts = report.rollouts
    rewards = np.concatenate([r.rewards for r in rollouts])
    scored = rewards[np.isfinite(rewards)]
    truncated = [bool(t) for r in rollouts for t in r.truncated]
    measured = report.metrics | sampler_gap(report) | rollout_metrics(rollouts) | resampling(report, policy)
    measured |= prefix_drift(report)
    return {
        "step": step,
        "row_ids": [row_ids[r.number] for r in rollouts],
        "resampled_row_ids": [row_ids[r.number] for r in report.dropped],
        "resampled_rewards": reward_list(report.dropped),
        "prompt_tokens": [int(r.prompt.size) for r in rollouts],
        "mode": policy.mode,
        "group_size": policy.group,
        "rewards": reward_list(rollouts),
        "advantages": [float(x) for r in rollouts for x in r.advantages],
        "response_lengths": [len(ids) for r in rollouts for ids in r.responses],
        "truncated": truncated,
        "reward_mean": float(scored.astype(np.float64).mean()) if scored.size else None,
        "loss": report.loss_sum / report.loss_count if report.loss_count else 0.0,
        "loss_sum": report.loss_sum,
        "loss_count": report.loss_count,
        "grad_norm": report.grad_norm,
        "skipped": report.skip_reason is not None,
        "skip_reason": report.skip_reason,
        "nonfinite_count": report.nonfinite,
        "metrics": measured | extra,
        "seconds": report.seconds | {"step": seconds},
        "peak_bytes": peak_bytes,
        "prefix_age": report.prefix_age,
        "captures": report.captures,
        "refresh_policy": policy.refresh.policy,
        "adapter_fingerprint": report.adapter_fingerprint,
    }


def reward_list(rollouts: Sequence[Rollout]) -> list[float | None]:
    """A member each, the members of one prompt together; None where unscorable."""
    return [float(x) if np.isfinite(x) else None for r in rollouts for x in r.rewards]


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Figures of rewards and responses; one that nothing was there for is absent.

    reward_std is the mean over the groups of their own deviation (n - 1 in its denominator), frac_reward_zero_std the
    share of groups without a signal. What reward functions log is averaged over the groups.
    """
    found: dict[str, float] = {}
    rewards = [r.rewards[np.isfinite(r.rewards)] for r in rollouts]
    if scored := [x for group in rewards for x in group]:
        found["reward"] = float(np.mean(scored))
    if deviations := [np.std(group, ddof=1) for group in rewards if group.size > 1]:
        found["reward_std"] = float(np.mean(deviations))
    found["frac_reward_zero_std"] = float(np.mean([not r.carries_signal for r in rollouts]))
    found["reward/unscorable"] = float(sum(r.rewards.size for r in rollouts) - len(scored))
    lengths = np.array([len(ids) for r in rollouts for ids in r.responses])
    ended = ~np.concatenate([r.truncated for r in rollouts])
    found["completions/clipped_ratio"] = float(np.mean(~ended))
    for name, chosen in (("length", lengths), ("terminated_length", lengths[ended])):
        if chosen.size:
            for kind in ("mean", "min", "max"):
                found[f"completions/{kind}_{name}"] = float(getattr(chosen, kind)())
    logged: dict[str, list[float]] = {}
    for event in (event for r in rollouts for event in r.events):
        logged.setdefault(f"rewards/{event['function']}/{event['name']}", []).append(event["value"])
    return found | {name: float(np.mean(values)) for name, values in logged.items()}


def sampler_gap(report: StepReport) -> dict[str, float]:
    """The largest gap between sampler and trainer in nats, by TRL's name."""
    return {"sampling/sampling_logp_difference/max": report.metrics["sampling/max_abs_log_ratio"]}


def prefix_drift(report: StepReport) -> dict[str, float]:
    """Of a stale prompt, where the refresh policy measured it, see refresh.Drift; nats a token."""
    found = {} if report.drift is None else {"signal": report.drift.signal, "truth": report.drift.truth}
    return {f"prefix_drift/{name}": value for name, value in found.items() if value is not None}


def resampling(report: StepReport, policy: PolicyConfig) -> dict[str, float]:
    """With dynamic sampling: groups dropped, and those without a signal that stayed as the bound was reached."""
    if not policy.max_resamples:
        return {}
    silent = sum(not r.carries_signal for r in report.rollouts)
    return {"dynamic_sampling/resampled": float(len(report.dropped)), "dynamic_sampling/without_signal": float(silent)}
