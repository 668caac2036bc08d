"""Plots of a run from its step records: reward, KL, ratio and clipping, seconds a phase.

The PNGs carry no date and no user style, so that the same records give the same bytes.
"""

import io
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from longstraw_jax.evidence.figures import reward_means, scored_rewards, standard_error
from longstraw_jax.io.whole_file import write_whole

PLOT_FOLDER = "plots"
_PHASES = ("capture", "sample", "reward", "score", "replay", "finalise")

Step = Mapping[str, Any]


def write_plots(workdir: str | os.PathLike, steps: Sequence[Step]) -> list[str]:
    """Draws a run.

    Args:
      workdir: the run folder; the plots go to its `plots/`.
      steps: the records in order (see `longstraw_jax.evidence.figures`).

    Returns:
      Paths relative to `workdir`: reward.png, ratio.png, seconds.png, and kl.png if any step has a KL (a run with
      beta 0 has no reference to measure it against).

    Raises:
      ValueError: there are no steps.
    """
    if not steps:
        raise ValueError("steps has 0 records; accepted: 1 or more")
    plots: dict[str, tuple[Callable[..., None], int]] = {"reward": (_draw_reward, 1)}
    if any(step["metrics"].get("kl") is not None for step in steps):
        plots["kl"] = (_draw_kl, 1)
    plots |= {"ratio": (_draw_ratio, 2), "seconds": (_draw_seconds, 1)}
    paths = []
    for name, (draw, panels) in plots.items():
        path = f"{PLOT_FOLDER}/{name}.png"
        write_whole(Path(workdir) / path, _png(draw, panels, steps))
        paths.append(path)
    return paths


def _png(draw: Callable[..., None], panels: int, steps: Sequence[Step]) -> bytes:
    """Draws on panels one above the other and returns the PNG."""
    with matplotlib.rc_context(matplotlib.rcParamsDefault):
        figure = Figure(figsize=(7, 1.2 + 2.8 * panels), dpi=120, layout="constrained")
        axes = figure.subplots(panels, sharex=True, squeeze=False)[:, 0]
        draw(*axes, steps)
        for panel in axes:
            panel.grid(alpha=0.3)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.margins(x=0.02)
        axes[-1].set_xlabel("optimizer step")
        image = io.BytesIO()
        # Matplotlib's version is the only metadata it adds to a PNG; without it, equal pixels are equal bytes.
        FigureCanvasAgg(figure).print_png(image, metadata={"Software": None})
    return image.getvalue()


def _draw_reward(axes: Axes, steps: Sequence[Step]) -> None:
    """Mean and its standard error over the scored members of each step."""
    numbers = _numbers(steps)
    means = [math.nan if value is None else value for value in reward_means(steps)]
    errors = [standard_error(scored_rewards([step])) or 0.0 for step in steps]
    low = [mean - error for mean, error in zip(means, errors, strict=True)]
    high = [mean + error for mean, error in zip(means, errors, strict=True)]
    axes.fill_between(numbers, low, high, alpha=0.25, linewidth=0, label="± 1 standard error over members")
    axes.plot(numbers, means, marker="o", markersize=3, label="mean of the scored members")
    skipped = [(n, m) for n, m, step in zip(numbers, means, steps, strict=True) if step["skipped"]]
    if skipped:
        axes.plot(*zip(*skipped, strict=True), "x", color="black", label="optimizer step skipped")
    axes.set(title="Reward", ylabel="reward (no unit)")
    axes.legend(fontsize="small")


def _draw_kl(axes: Axes, steps: Sequence[Step]) -> None:
    axes.plot(_numbers(steps), _metric(steps, "kl"), marker="o", markersize=3)
    axes.set(title="KL divergence from the reference policy", ylabel="KL (nats a token)")


def _draw_ratio(upper: Axes, lower: Axes, steps: Sequence[Step]) -> None:
    """Policy ratios above, shares of clipped tokens below."""
    curves = {
        "ratio/mean": (upper, "new / old policy, mean"),
        "ratio/max": (upper, "new / old policy, largest"),
        "sampling/importance_sampling_ratio/mean": (upper, "trainer / sampler, mean"),
        "clip_ratio/low_mean": (lower, "below 1 - clip_low"),
        "clip_ratio/high_mean": (lower, "above 1 + clip_high"),
    }
    for name, (axes, label) in curves.items():
        values = _metric(steps, name)
        if not all(map(math.isnan, values)):
            axes.plot(_numbers(steps), values, marker="o", markersize=3, label=label)
    upper.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    upper.set(title="Probability ratios and clipping", ylabel="ratio (no unit)")
    lower.set(ylabel="share of clipped tokens")
    lower.set_ylim(bottom=0.0)
    for axes in (upper, lower):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")


def _draw_seconds(axes: Axes, steps: Sequence[Step]) -> None:
    """Stacked phases; what no phase accounts for is their distance to the whole step's line."""
    bottom = [0.0] * len(steps)
    for phase in _PHASES:
        heights = [step["seconds"].get(phase, 0.0) for step in steps]
        if any(heights):
            axes.bar(_numbers(steps), heights, bottom=bottom, label=phase)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    whole = [step["seconds"]["step"] for step in steps]
    axes.plot(_numbers(steps), whole, color="black", marker="_", linestyle="none", label="whole step")
    median = statistics.median(whole)
    if max(whole) > 10 * median:
        # One step that compiles would flatten all the others.
        axes.set_ylim(0, 3 * median)
        axes.set_title(f"Seconds a phase (cut off; the slowest step took {max(whole):.1f} s)")
    else:
        axes.set_title("Seconds a phase")
    axes.set_ylabel("seconds")
    axes.legend(fontsize="small", ncols=4)


def _numbers(steps: Sequence[Step]) -> list[int]:
    return [step["step"] for step in steps]


def _metric(steps: Sequence[Step], name: str) -> list[float]:
    """A metric's values, NaN (a gap in the curve) where a step lacks it."""
    return [math.nan if (value := step["metrics"].get(name)) is None else value for step in steps]
