"""Figures derived from the step log, by pure functions that both write and verify receipts.

A step record (a line of steps.jsonl; `$defs/step` of receipt.schema.json says the same strictly) holds:

    step                optimizer step, from 1
    row_ids             dataset row id of each prompt
    resampled_row_ids   (optional) of prompts that others replaced, as all their rewards were equal
    resampled_rewards   (optional) of their members, as `rewards`: the rise counts them, nothing else does
    prompt_tokens       tokens of each prompt
    mode, group_size    prefix-gradient mode; members a prompt
    rewards             a member each, the members of one prompt together; null where unscorable
    advantages, response_lengths (tokens), truncated (no end within the budget)    a member each
    reward_mean         mean of the scored rewards; null if there is none
    loss, loss_sum, loss_count    loss = loss_sum / loss_count; the count is of what the reduction averages
    grad_norm           global norm before clipping; null when not finite
    skipped, skip_reason          whether the optimizer step was left out, and why (null if it was not)
    nonfinite_count     NaN and infinite gradient entries
    metrics             name -> number: kl, entropy, clip_ratio/low_mean, high_mean, region_mean, ratio/mean, ratio/max,
                        sampling/importance_sampling_ratio/mean, max_abs_log_ratio (against the log-probs of
                        the first update, so 0 where there is one), sampling/max_abs_log_ratio (trainer
                        against sampler), frac_reward_zero_std, completions/clipped_ratio and others: see
                        longstraw_jax.evidence.step_record
    seconds             phase -> seconds: capture, sample, reward, score, replay, reverse, finalise; step is the whole
    peak_bytes          peak memory so far (see longstraw_jax.evidence.memory)
    prefix_age          optimizer steps since the prompt's capture
    captures            (optional) of the policy's prompts in this step
    refresh_policy      (optional) "every_step", "every_n" or "drift"; of the last, the metrics prefix_drift/signal and
                        prefix_drift/truth (longstraw_jax.prefix.refresh.Drift) where a stale prompt was taken
    adapter_fingerprint of the adapters after the step

Sums are `math.fsum`, correctly rounded whatever the machine, so a figure is verified by equality and not within
a tolerance.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WINDOW = 5  # steps at either end that the rise in reward compares
LEARNING_STANDARD_ERRORS = 3.0

Step = Mapping[str, Any]


def derive(steps: Sequence[Step], *, window: int = WINDOW) -> dict[str, dict[str, Any]]:
    """Every figure of a receipt.

    Args:
      steps: the records in order.
      window: steps at either end of the run that the rise in reward compares.

    Returns:
      figure name -> {"rule": name of a function of this file, "arguments": its keyword arguments, "value":
      what it returns}.

    Raises:
      ValueError: there are no steps, or `window` is below 1.
    """
    if not steps:
        raise ValueError("steps has 0 records; accepted: 1 or more")
    if window < 1:
        raise ValueError(f"window = {window}; accepted: 1 or more steps")
    first, last = {"window": window, "end": "first"}, {"window": window, "end": "last"}
    rules: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "steps": (step_count, {}),
        "skipped_steps": (total, {"field": "skipped"}),
        "nonfinite_values": (total, {"field": "nonfinite_count"}),
        "unscorable_rewards": (null_count, {"field": "rewards"}),
        "truncated_responses": (total_of_lists, {"field": "truncated"}),
        "prompt_tokens": (total_of_lists, {"field": "prompt_tokens"}),
        "response_tokens": (total_of_lists, {"field": "response_lengths"}),
        "total_tokens": (total_tokens, {}),
        "row_ids": (column, {"field": "row_ids"}),
        "reward_mean": (reward_means, {}),
        "loss": (column, {"field": "loss"}),
        "grad_norm": (column, {"field": "grad_norm"}),
        "adapter_fingerprint": (last_value, {"field": "adapter_fingerprint"}),
        "phase_seconds": (phase_seconds, {}),
        "peak_bytes": (largest, {"field": "peak_bytes"}),
        "largest_prefix_age": (largest, {"field": "prefix_age"}),
        "largest_log_ratio": (largest_metric, {"metric": "max_abs_log_ratio"}),
        "largest_sampling_log_ratio": (largest_metric, {"metric": "sampling/max_abs_log_ratio"}),
        "first_mean": (reward_mean_of, first),
        "last_mean": (reward_mean_of, last),
        "first_standard_error": (standard_error_of, first),
        "last_standard_error": (standard_error_of, last),
        "rise": (rise, {"window": window}),
        "rise_standard_error": (rise_standard_error, {"window": window}),
        "rise_in_standard_errors": (rise_in_standard_errors, {"window": window}),
    }
    return {
        name: {"rule": rule.__name__, "arguments": arguments, "value": rule(steps, **arguments)}
        for name, (rule, arguments) in rules.items()
    }


def step_count(steps: Sequence[Step]) -> int:
    """Steps logged, skipped ones included."""
    return len(steps)


def total(steps: Sequence[Step], *, field: str) -> int:
    """Sum of an integer or yes/no field over the steps."""
    return sum(int(step[field]) for step in steps)


def total_of_lists(steps: Sequence[Step], *, field: str) -> int:
    """Sum of a field's list entries over the steps."""
    return sum(int(entry) for step in steps for entry in step[field])


def null_count(steps: Sequence[Step], *, field: str) -> int:
    """Null entries of a field's lists."""
    return sum(entry is None for step in steps for entry in step[field])


def total_tokens(steps: Sequence[Step]) -> int:
    """Prompt and response tokens; a prompt counts once for its whole group."""
    return total_of_lists(steps, field="prompt_tokens") + total_of_lists(steps, field="response_lengths")


def column(steps: Sequence[Step], *, field: str) -> list[Any]:
    """A field's value at each step."""
    return [step[field] for step in steps]


def last_value(steps: Sequence[Step], *, field: str) -> Any:
    """A field's value at the last step."""
    return steps[-1][field]


def largest(steps: Sequence[Step], *, field: str) -> int:
    """A field's largest value."""
    return max(step[field] for step in steps)


def largest_metric(steps: Sequence[Step], *, metric: str) -> float | None:
    """A metric's largest value; null if no step has it."""
    return max((v for step in steps if (v := step["metrics"].get(metric)) is not None), default=None)


def phase_seconds(steps: Sequence[Step]) -> dict[str, dict[str, float]]:
    """Median and total seconds of each phase, and how many steps had it."""
    phases: dict[str, list[float]] = {}
    for step in steps:
        for phase, seconds in step["seconds"].items():
            phases.setdefault(phase, []).append(seconds)
    return {
        phase: {"median": statistics.median(values), "total": math.fsum(values), "count": len(values)}
        for phase, values in sorted(phases.items())
    }


def reward_means(steps: Sequence[Step]) -> list[float | None]:
    """Mean of the scored rewards of each step; null where there is none."""
    return [mean(scored_rewards([step])) for step in steps]


def reward_mean_of(steps: Sequence[Step], *, window: int, end: str) -> float | None:
    """Mean of the scored rewards of all members sampled in the first or last `window` steps.

    Those of groups that dynamic sampling dropped are among them: a policy that fails fewer prompts altogether, or
    more, would not show in the groups that stay. Null if the run has fewer than `2 * window` steps (the ends would
    overlap) or the log does not hold what dropped groups were rewarded, as all that follows from it.
    """
    return mean(_end_rewards(steps, window, end))


def standard_error_of(steps: Sequence[Step], *, window: int, end: str) -> float | None:
    """Standard error of that mean, see `standard_error`; null below 2 scored rewards."""
    return standard_error(_end_rewards(steps, window, end))


def rise(steps: Sequence[Step], *, window: int) -> float | None:
    """Mean reward of the last `window` steps minus that of the first."""
    first, last = (reward_mean_of(steps, window=window, end=end) for end in ("first", "last"))
    return None if first is None or last is None else last - first


def rise_standard_error(steps: Sequence[Step], *, window: int) -> float | None:
    """Standard error of the rise, sqrt(s1**2 / n1 + s2**2 / n2), over the scored rewards of both ends.

    Welch's form: the ends need not have the same spread. Members count as independent draws, which those of
    one prompt are given the policy.
    """
    first, last = (standard_error_of(steps, window=window, end=end) for end in ("first", "last"))
    return None if first is None or last is None else math.sqrt(first * first + last * last)


def rise_in_standard_errors(steps: Sequence[Step], *, window: int) -> float | None:
    """The rise over its standard error; null if either is, or if no reward varies."""
    height, error = rise(steps, window=window), rise_standard_error(steps, window=window)
    return None if height is None or not error else height / error


def scored_rewards(steps: Sequence[Step]) -> list[float]:
    """All member rewards that are not null."""
    return [reward for step in steps for reward in step["rewards"] if reward is not None]


def mean(values: Sequence[float]) -> float | None:
    """Their mean; None of none."""
    return math.fsum(values) / len(values) if values else None


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of their mean, s / sqrt(n) with n - 1 in the denominator of s**2; None below 2 values."""
    if len(values) < 2:
        return None
    centre = mean(values)
    variance = math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


def derived_claims(figures: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The two claims that the step log alone decides.

    Args:
      figures: what `derive` returns.

    Returns:
      *capacity*: shown if a step was taken and not skipped. *learning*: shown if the reward rose by at least
      LEARNING_STANDARD_ERRORS; not measured if that figure is null.
    """
    taken = figures["steps"]["value"] - figures["skipped_steps"]["value"]
    height = figures["rise_in_standard_errors"]["value"]
    if height is None:
        learning = "not measured"
    else:
        learning = "shown" if height >= LEARNING_STANDARD_ERRORS else "not shown"
    return [
        {
            "claim": "capacity",
            "status": "shown" if taken else "not shown",
            "evidence": [f"figures/{name}" for name in ("steps", "skipped_steps", "total_tokens", "peak_bytes")],
        },
        {"claim": "learning", "status": learning, "evidence": ["figures/rise_in_standard_errors"]},
    ]


def step_problems(steps: Sequence[Step], mode: str) -> list[str]:
    """What contradicts itself within schema-valid step records.

    Args:
      steps: the records in order.
      mode: the run's prefix-gradient mode.

    Returns:
      One line a problem, naming step, field, value and what was expected; empty if there is none.
    """
    problems = []
    for step in steps:
        where = f"step {step['step']}"
        prompts = len(step["row_ids"])
        members = prompts * step["group_size"]
        lengths = {"prompt_tokens": prompts}
        lengths |= dict.fromkeys(("rewards", "advantages", "response_lengths", "truncated"), members)
        if "resampled_rewards" in step:
            lengths["resampled_rewards"] = len(step.get("resampled_row_ids", [])) * step["group_size"]
        for field, expected in lengths.items():
            if len(step[field]) != expected:
                problems.append(f"{where}: {field} has {len(step[field])} entries; expected {expected}")
        if step["mode"] != mode:
            problems.append(f"{where}: mode = {step['mode']!r}; the receipt says {mode!r}")
        if step["skipped"] != (step["skip_reason"] is not None):
            problems.append(f"{where}: skipped = {step['skipped']}, skip_reason = {step['skip_reason']!r}")
        recorded, found = step["reward_mean"], mean(scored_rewards([step]))
        if recorded is None or found is None:
            agree = recorded is found
        else:
            agree = math.isclose(recorded, found, rel_tol=1e-5, abs_tol=1e-5)  # float32 when it was recorded
        if not agree:
            problems.append(f"{where}: reward_mean = {recorded}; its rewards give {found}")
    return problems


def _end_rewards(steps: Sequence[Step], window: int, end: str) -> list[float]:
    """Scored rewards that were sampled in the first or last steps; none where `reward_mean_of` is null."""
    if len(steps) < 2 * window:
        return []
    # A step that did not sample is a further update on a rollout whose rewards are an earlier step's already.
    sampled = [s for s in (steps[:window] if end == "first" else steps[-window:]) if "sample" in s["seconds"]]
    if any(step.get("resampled_row_ids") and "resampled_rewards" not in step for step in sampled):
        return []
    dropped = [reward for step in sampled for reward in step.get("resampled_rewards", []) if reward is not None]
    return scored_rewards(sampled) + dropped
