"""Plots of measured receipts: peak bytes, seconds and floors, group sizes, and the prompt's part of the gradient.

Equal receipts give equal bytes: no date, no user style.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Receipt = Mapping[str, Any]
GB = 1e9
PHASES = ("capture", "sample", "score", "replay", "reverse pass")
_OF_GROUP = re.compile(r"group (\d+): (.*?)(?: \d+)?$")  # "group 8: replay 3" -> 8, "replay"


def check(receipts: Sequence[Receipt]) -> None:
    """Raises ValueError unless all are receipts of experiments/long_context.py, at least one of them."""
    if not receipts:
        raise ValueError("0 receipts; accepted: 1 or more")
    for number, receipt in enumerate(receipts):
        if missing := sorted({"flags", "phases", "architecture", "complete"} - receipt.keys()):
            raise ValueError(f"receipt {number} lacks {missing}; accepted: a receipt.json of long_context.py")


def series_name(receipt: Receipt) -> str:
    """What receipts of one curve share."""
    flags, model = receipt["flags"], receipt["architecture"]
    name = f"{flags['mode']}, {model['num_hidden_layers']} layers, {model['n_routed_experts']} experts"
    return name + (", pages on the host" if flags["prefix_store"] == "host" else "")


def phase_rows(receipt: Receipt) -> list[tuple[int | None, str, Mapping[str, Any]]]:
    """Every phase as (group size or None, kind of phase, row)."""
    found = []
    for row in receipt["phases"]:
        match = _OF_GROUP.match(row["phase"])
        found.append((int(match[1]), match[2], row) if match else (None, row["phase"], row))
    return found


def peak_curves(receipts: Sequence[Receipt]) -> dict[str, list[tuple[int, float]]]:
    """Curve -> (prompt tokens, peak GB of the whole run), complete runs alone."""
    curves: dict[str, dict[int, float]] = {}
    for receipt in receipts:
        if receipt["complete"]:
            peak = max(row["peak_bytes"] for row in receipt["phases"]) / GB
            points = curves.setdefault(series_name(receipt), {})
            tokens = receipt["flags"]["tokens"]
            points[tokens] = max(peak, points.get(tokens, 0.0))
    return {name: sorted(points.items()) for name, points in curves.items()}


def phase_curves(receipts: Sequence[Receipt]) -> dict[tuple[str, str], list[tuple[int, float, float | None]]]:
    """(phase, curve) -> (prompt tokens, seconds, floor or None); of members and groups the quickest, which compiled
    nothing."""
    curves: dict[tuple[str, str], dict[int, tuple[float, float | None]]] = {}
    for receipt in receipts:
        for _, kind, row in phase_rows(receipt):
            if kind in PHASES:
                points = curves.setdefault((kind, series_name(receipt)), {})
                tokens = receipt["flags"]["tokens"]
                new = (row["seconds"], row["floor_seconds"])
                points[tokens] = min(new, points.get(tokens, new), key=lambda pair: pair[0])
    return {key: [(tokens, *pair) for tokens, pair in sorted(points.items())] for key, points in curves.items()}


def group_curves(receipts: Sequence[Receipt]) -> dict[str, list[tuple[int, float]]]:
    """Curve of a run with several groups -> (group size, peak GB up to the end of that group)."""
    curves = {}
    for receipt in receipts:
        peaks: dict[int, float] = {}
        for size, _, row in phase_rows(receipt):
            if size is not None:
                peaks[size] = max(peaks.get(size, 0.0), row["peak_bytes"] / GB)
        if len(peaks) > 1:
            curves[f"{series_name(receipt)}, {receipt['flags']['tokens']:,} tokens"] = sorted(peaks.items())
    return curves


def peak_plot(receipts: Sequence[Receipt], peer: Receipt | None = None) -> bytes:
    """Peak bytes against prompt length, a curve a mode, and the peer's up to where it is out of memory. A PNG."""
    check(receipts)

    def draw(axes: Axes) -> None:
        for name, points in peak_curves(receipts).items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
        if peer is not None:
            tried = sorted((row["tokens"], row["peak_bytes"] / GB) for row in peer["tried"] if row["fits"])
            label = f"transformers + PEFT, {peer['slice']['layers']} layers, {peer['slice']['experts']} experts"
            if tried:
                axes.plot(*zip(*tried, strict=True), marker="s", markersize=4, color="black", label=label)
            if peer["shortest_refused"]:
                last = tried[-1][1] if tried else 0.0
                axes.plot([peer["shortest_refused"]], [last], "x", color="black", label="out of memory")
        _length_axis(axes)
        axes.set(title="Peak memory of a group's step", ylabel="GB")

    return _png([draw])


def seconds_plot(receipts: Sequence[Receipt]) -> bytes:
    """Seconds of each phase against prompt length, dotted the floor that products and link set. A PNG."""
    check(receipts)
    curves = phase_curves(receipts)

    def panel(phase: str) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            for (kind, name), points in curves.items():
                if kind != phase:
                    continue
                (mark,) = axes.plot(
                    [p[0] for p in points], [p[1] for p in points], marker="o", markersize=4, label=name
                )
                floors = [(p[0], p[2]) for p in points if p[2]]
                if floors:
                    axes.plot(*zip(*floors, strict=True), ":", marker=".", color=mark.get_color())
            _length_axis(axes)
            axes.set_yscale("log")
            each = " of one member" if phase == "replay" else ""
            axes.set(title=f"{phase}{each} (dotted: floor)", ylabel="seconds")

        return draw

    return _png([panel(phase) for phase in PHASES if any(kind == phase for kind, _ in curves)])


def group_plot(receipts: Sequence[Receipt]) -> bytes:
    """Peak bytes against group size, a curve a run with several groups. A PNG.

    Raises:
      ValueError: no run has several groups.
    """
    check(receipts)
    curves = group_curves(receipts)
    if not curves:
        raise ValueError("no receipt has several groups; accepted: one of long_context.py --group=2,8")

    def draw(axes: Axes) -> None:
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
        axes.set_ylim(bottom=0.0)
        axes.set(title="Peak memory by group size", xlabel="members of the group", ylabel="GB")

    return _png([draw])


def prefix_gradient(result: Receipt) -> bytes:
    """Cosine of `detached` and `exact`, and the prompt's own term, against prompt length. A PNG.

    Args:
      result: of experiments/prefix_gradient.py.
    """
    lengths = [row["tokens"] for row in result["lengths"]]
    names = list(result["lengths"][0]["targets"])

    def panel(figure: str, title: str) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            def curve(values, **style):
                pairs = [(n, value) for n, value in zip(lengths, values, strict=True) if value is not None]
                if pairs:
                    axes.plot(*zip(*pairs, strict=True), marker="o", markersize=4, **style)

            curve([row["all"][figure] for row in result["lengths"]], color="black", linewidth=2, label="all targets")
            for name in names:
                curve([row["targets"][name][figure] for row in result["lengths"]], label=name)
            _length_axis(axes)
            axes.set_title(title)

        return draw

    first = panel("cosine", f"Cosine of the detached and the exact gradient (weights {result['weights']})")
    return _png([first, panel("relative_l2", "Norm of the prompt's own term by that of the whole gradient")])


def refresh_policy(result: Receipt) -> bytes:
    """Drift by steps since the capture, rewards by step, and final scores by captures made. A PNG.

    Args:
      result: of experiments/refresh_policy.py; a part without rows has no panel.

    Raises:
      ValueError: there are no rows.
    """

    def staleness(axes: Axes) -> None:
        rows = sorted(result["staleness"], key=lambda row: row["steps"])
        curves = {
            "mean_abs_logp_difference": ("stale and fresh capture, group of the capture", "-"),
            "on_policy_mean_abs_logp_difference": ("stale and fresh capture, group sampled then", "--"),
            "signal": ("now and at the capture, stale state", ":"),
        }
        for colour, seed in enumerate(sorted({row["seed"] for row in rows})):
            for name, (label, style) in curves.items():
                points = [(row["steps"], row[name]) for row in rows if row["seed"] == seed]
                axes.plot(
                    *zip(*points, strict=True), style, marker="o", markersize=4, color=f"C{colour}",
                    label=f"{label}, seed {seed}",
                )  # fmt: skip
        axes.set(
            title="What a capture is off by", xlabel="optimizer steps since the capture",
            ylabel="mean |difference of log-prob| (nats)",
        )  # fmt: skip

    names = dict.fromkeys(row["policy"] for row in result["policies"])

    def rewards(axes: Axes) -> None:
        for colour, name in enumerate(names):
            curves = [row["rewards"] for row in result["policies"] if row["policy"] == name]
            scored = [[r for r in step if r is not None] for step in zip(*curves, strict=False)]
            points = [(number, sum(step) / len(step)) for number, step in enumerate(scored, start=1) if step]
            if points:
                axes.plot(*zip(*points, strict=True), color=f"C{colour % 10}", label=name)
        axes.set(title="Reward in training, mean over seeds", xlabel="optimizer step", ylabel="mean reward")

    def scores(axes: Axes) -> None:
        for colour, name in enumerate(names):
            rows = [row for row in result["policies"] if row["policy"] == name and row["score"]["mean"] is not None]
            axes.errorbar(
                [row["captures"] for row in rows], [row["score"]["mean"] for row in rows],
                yerr=[row["score"]["standard_error"] or 0.0 for row in rows],
                fmt="o", color=f"C{colour % 10}", capsize=3, label=name,
            )  # fmt: skip
        axes.set(
            title="Final score of fresh responses (± 1 standard error), a point a seed", xlabel="captures in the run",
            ylabel="mean reward",
        )  # fmt: skip

    parts = (("staleness", staleness), ("policies", rewards), ("policies", scores))
    panels = [panel for part, panel in parts if result[part]]
    if not panels:
        raise ValueError("staleness and policies have 0 rows; accepted: a row of either")
    return _png(panels)


def learning_curves(result: Receipt) -> bytes:
    """Held-out accuracy against steps and against seconds of training, a curve and its 95 % band a mode. A PNG.

    Args:
      result: of experiments/learning_curves.py.
    """
    modes = result["summary"]["modes"]

    def panel(figure: str, label: str) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            for mode, told in modes.items():
                at = [point[figure] for point in told["curve"]]
                low, high = ([point[end] for point in told["curve"]] for end in ("low", "high"))
                seeds = len(told["seeds"])
                (line,) = axes.plot(
                    at, [point["mean"] for point in told["curve"]], marker="o", markersize=4,
                    label=f"{mode}, {seeds} seed{'s' if seeds > 1 else ''}",
                )  # fmt: skip
                axes.fill_between(at, low, high, alpha=0.15, linewidth=0, color=line.get_color())
            axes.set_ylim(0.0, 1.0)
            axes.set(title=f"Held-out accuracy against {label} (band: 95 %)", xlabel=label, ylabel="share right")

        return draw

    return _png([panel("step", "optimizer steps"), panel("seconds", "seconds of training")])


def _length_axis(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("prompt tokens")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 2**20:g}M" if x >= 2**20 else f"{x / 2**10:g}K")


def _png(panels: Sequence[Callable[[Axes], None]]) -> bytes:
    """Draws panels one above the other."""
    with matplotlib.rc_context(matplotlib.rcParamsDefault):
        figure = Figure(figsize=(8, 0.6 + 3.4 * len(panels)), dpi=120, layout="constrained")
        for axes, draw in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
            draw(axes)
            axes.grid(alpha=0.3)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize="x-small")
        image = io.BytesIO()
        FigureCanvasAgg(figure).print_png(image, metadata={"Software": None})
    return image.getvalue()
