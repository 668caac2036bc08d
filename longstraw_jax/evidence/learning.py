"""Held-out accuracy of several runs by prefix-gradient mode: at equal steps, at equal seconds, modes told apart.

Two things make a figure uncertain and each has its own 95 % interval, because they answer different questions. *Over
seeds*: Student's t of the runs' own means, what other trainings would give on these prompts. *Over prompts*: each
prompt's mean over the runs is one draw, what these runs would give on other prompts. Modes are told apart where both
intervals of their paired difference leave 0 out.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from longstraw_jax.evidence.figures import mean
from longstraw_jax.evidence.intervals import mean_interval, score_interval

# mode, seed, weights_fingerprint; points from step 0 on: step, seconds of training so far, right (0 or 1 a prompt).
Run = Mapping[str, Any]


def training_seconds(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of training up to and including each step, from a run's step records.

    The first step, which compiles, counts as the median of the others. Evaluation is in no step.

    Raises:
      ValueError: fewer than two steps.
    """
    if len(steps) < 2:
        raise ValueError(f"{len(steps)} steps; accepted: at least 2, as the first one compiles")
    seconds = [step["seconds"]["step"] for step in steps]
    return list(itertools.accumulate([statistics.median(seconds[1:]), *seconds[1:]]))


def problems(runs: Sequence[Run]) -> list[str]:
    """Why runs cannot be compared, a line each; empty if they can."""
    if not runs:
        return ["0 finished runs; accepted: at least 1"]
    found, first = [], runs[0]
    if len(weights := {run["weights_fingerprint"] for run in runs}) > 1:
        found.append(f"runs from base weights {sorted(weights)}; accepted: one base for all")
    for run in runs:
        where = f"run {run['mode']}, seed {run['seed']}"
        steps = [point["step"] for point in run["points"]]
        if steps != [point["step"] for point in first["points"]] or steps[:1] != [0] or len(steps) < 2:
            found.append(f"{where}: evaluated at steps {steps}; accepted: those of the other runs, from 0 on")
        sizes = {len(point["right"]) for point in run["points"]}
        if sizes != {len(first["points"][0]["right"])}:
            found.append(f"{where}: {sorted(sizes)} held-out prompts; accepted: those of the other runs")
    return found


def at_seconds(run: Run, seconds: float) -> Float[np.ndarray, "prompts"]:
    """Each prompt's score when a run had trained so long: linear between the two evaluations around it."""
    points = run["points"]
    times = [point["seconds"] for point in points]
    right = np.asarray([point["right"] for point in points], np.float64)
    return np.asarray([np.interp(seconds, times, column) for column in right.T])


def contrast(scores: Mapping[str, Mapping[int, Float[np.ndarray, "prompts"]]]) -> dict[str, Any]:
    """Accuracy by mode and the paired difference of every two modes.

    Args:
      scores: mode -> seed -> score of each prompt.

    Returns:
      modes: mode -> mean, and over_seeds and over_prompts, its two intervals. pairs: "a - b" -> the same of the
      difference over the seeds that both have, and apart.
    """
    result: dict[str, Any] = {"modes": {}, "pairs": {}}
    for mode, by_seed in scores.items():
        result["modes"][mode] = both_intervals(list(by_seed.values()))
    for a, b in itertools.combinations(scores, 2):
        seeds = sorted(scores[a].keys() & scores[b].keys())
        if seeds:
            told = both_intervals([scores[a][seed] - scores[b][seed] for seed in seeds])
            ends = [(told[over]["low"], told[over]["high"]) for over in ("over_seeds", "over_prompts")]
            apart = all(low is not None and (low > 0 or high < 0) for low, high in ends)
            result["pairs"][f"{a} - {b}"] = told | {"seeds": seeds, "apart": apart}
    return result


def both_intervals(runs: Sequence[Float[np.ndarray, "prompts"]]) -> dict[str, Any]:
    """mean of all, over_seeds and over_prompts; a row a run."""
    scores = np.stack(runs)
    return {
        "mean": mean(scores.ravel().tolist()),
        "over_seeds": mean_interval(scores.mean(1).tolist()),
        "over_prompts": mean_interval(scores.mean(0).tolist()),
    }


def summary(runs: Sequence[Run], goal: float) -> dict[str, Any]:
    """Every figure of comparable runs.

    Args:
      runs: without `problems`.
      goal: rise in accuracy that was aimed at.

    Returns:
      modes: mode -> seeds, prompts, rise (both_intervals), reached (mean rise at least the goal), seconds a step, and
      curve: step, seconds (mean over seeds), mean and its interval over prompts and seeds together (score_interval)
      at each evaluation. equal_steps and equal_seconds: `contrast` after the last step, and at the number of
      `seconds` when the quickest mode had taken it.
    """
    modes = list(dict.fromkeys(run["mode"] for run in runs))
    by_mode = {mode: {run["seed"]: run for run in runs if run["mode"] == mode} for mode in modes}
    result: dict[str, Any] = {"goal": goal, "modes": {}}
    for mode, seeds in by_mode.items():
        points = list(zip(*(run["points"] for run in seeds.values()), strict=True))
        curve = [
            {"step": same[0]["step"], "seconds": mean([p["seconds"] for p in same])}
            | score_interval(list(zip(*(p["right"] for p in same), strict=True)))
            for same in points
        ]
        ends = [[np.asarray(run["points"][i]["right"], float) for run in seeds.values()] for i in (0, -1)]
        rise = both_intervals([after - before for before, after in zip(*ends, strict=True)])
        result["modes"][mode] = {
            "seeds": sorted(seeds),
            "prompts": len(ends[0][0]),
            "before": both_intervals(ends[0]),
            "after": both_intervals(ends[1]),
            "rise": rise,
            "reached": rise["mean"] >= goal,
            "seconds_a_step": curve[-1]["seconds"] / curve[-1]["step"],
            "curve": curve,
        }
    last = {m: {s: np.asarray(r["points"][-1]["right"], float) for s, r in v.items()} for m, v in by_mode.items()}
    budget = min(told["curve"][-1]["seconds"] for told in result["modes"].values())
    then = {m: {s: at_seconds(r, budget) for s, r in v.items()} for m, v in by_mode.items()}
    result["equal_steps"] = {"steps": runs[0]["points"][-1]["step"]} | contrast(last)
    result["equal_seconds"] = {"seconds": budget} | contrast(then)
    return result


def table(found: Mapping[str, Any]) -> list[str]:
    """A summary in lines."""

    def ends(told):
        shown = {"seeds": told["over_seeds"], "prompts": told["over_prompts"]}
        parts = [
            f"{name} {x['low']:+.3f} to {x['high']:+.3f}" if x["low"] is not None else f"{name} none"
            for name, x in shown.items()
        ]
        return f"{told['mean']:+.3f}  [{'; '.join(parts)}]"

    lines = ["95 % intervals over seeds; over prompts"]
    for mode, told in found["modes"].items():
        lines.append(
            f"{mode:<9} seeds {','.join(map(str, told['seeds']))}, {told['prompts']} prompts, "
            f"{told['seconds_a_step']:.2f} s a step, goal of {found['goal']:+.2f} "
            f"{'reached' if told['reached'] else 'missed'}"
        )
        lines += [f"  {name:<7} {ends(told[name])}" for name in ("before", "after", "rise")]
    for name in ("equal_steps", "equal_seconds"):
        part = found[name]
        unit = f"{part['steps']} steps" if name == "equal_steps" else f"{part['seconds']:.0f} s of training"
        lines.append(f"after {unit}:")
        lines += [f"  {mode:<20} {ends(told)}" for mode, told in part["modes"].items()]
        lines += [
            f"  {pair:<20} {ends(told)}  {'apart' if told['apart'] else 'not told apart'}"
            for pair, told in part["pairs"].items()
        ]
    return lines
