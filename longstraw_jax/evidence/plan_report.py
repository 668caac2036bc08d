"""A plan for people: its table, its peak and its stacked bars."""

import dataclasses
import io
import json
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Report = Mapping[str, Any]

# Kinds of bytes in the order of the bars, with what the table and the picture call them together.
COLUMNS = {
    "base": ("base weights",),
    "adapters": ("adapters", "adapter copies"),
    "optimizer": ("optimizer",),
    "latents": ("latent pages",),
    "keys": ("index keys",),
    "gradients": ("gradients", "member's gradients", "gradient pages"),
    "outputs": ("outputs",),
    "temporaries": ("temporaries",),
    "other": ("code", "layout padding"),
}
COLOURS = ("#33415c", "#5c9ead", "#8ecae6", "#e09f3e", "#f2cc8f", "#9e2a2b", "#b5838d", "#6a994e", "#adb5bd")
GB = 1e9


def plain(value: Any) -> Any:
    """A frozen dataclass as JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(value)))


def columns(report: Report) -> dict[str, float | None]:
    """A device's GB by column; None where the compiler refused to say."""
    found: dict[str, float | None] = {}
    for column, kinds in COLUMNS.items():
        sizes = [report["bytes"][kind] for kind in kinds if kind in report["bytes"]]
        found[column] = None if sizes and all(size is None for size in sizes) else sum(s or 0 for s in sizes) / GB
    return found


def peak(reports: Mapping[str, Report]) -> dict[str, Any]:
    """The program that takes most of a device, with what is resident meanwhile, and what the host holds.

    `complete` is False where a program was refused: its temporaries are not in the sum.
    """
    name = max(reports, key=lambda name: reports[name]["device_total"])
    return {
        "program": name,
        "device_bytes": reports[name]["device_total"],
        "host_bytes": max(sum(report["host_bytes"].values()) for report in reports.values()),
        "complete": all(report["refused"] is None for report in reports.values()),
    }


def _verdict(report: Report) -> str:
    if report["fits"] is None:
        return "no limit known"
    if report["fits"]:
        return "fits"
    if report["over_bytes"]:
        return f"over by {report['over_bytes'] / GB:.1f} GB" + (" at least" if report["refused"] else "")
    return "refused"


def line(name: str, report: Report) -> str:
    """What is known when a program is done."""
    seconds = report["seconds"]
    return (
        f"{name}: traced in {seconds['trace']:.1f} s, compiled in {seconds['compile']:.1f} s "
        f"({seconds['compile_cpu']:.1f} s of a core), "
        f"{report['device_total'] / GB:.1f} GB a device, {_verdict(report)}"
    )


def table(result: Mapping[str, Any]) -> list[str]:
    """GB a device by kind, FLOPs and bytes received by formula and as the compiler says; then the verdict."""
    reports, memory = result["programs"], result["topology"]["memory"]
    head = f"{'GB a device':<10}" + "".join(f"{column:>12}" for column in COLUMNS) + f"{'total':>9}  verdict"
    lines = [head]
    for name, report in reports.items():
        numbers = ["-" if size is None else f"{size:.2f}" for size in columns(report).values()]
        total = f"{report['device_total'] / GB:9.1f}"
        lines.append(f"{name:<10}" + "".join(f"{x:>12}" for x in numbers) + f"{total}  {_verdict(report)}")
    heads = ("TFLOP", "in experts", "traced", "grouped", "compiler", "GB received", "compiler")
    lines += ["", f"{'a device':<10}" + "".join(f"{head:>12}" for head in heads)]
    for name, report in reports.items():
        flops, received = report["flops"], report["received_bytes"]
        counts = ("formula", "formula_routed_experts", "traced_dense", "traced_grouped", "compiler")
        figures = [_scaled(flops[count], 1e12) for count in counts]
        figures.append(f"{sum(received['formula'].values()) / GB:.2f}")
        figures.append("-" if received["compiler"] is None else f"{sum(received['compiler'].values()) / GB:.2f}")
        lines.append(f"{name:<10}" + "".join(f"{figure:>12}" for figure in figures))
    lines.append("TFLOP: useful work by formula, and what of it is in routed experts. Traced: the program's products,")
    lines.append("masked slots too, but one turn of a loop that depends on data (a capture's index scores); grouped:")
    lines.append("at most, every row of every pass; neither sees into Pallas kernels. The compiler counts a body")
    lines.append("of a loop once.")
    top = result["peak"]
    limit = "" if memory is None else f" of {memory / GB:.1f} GB"
    lines += ["", f"peak: {top['program']}, {top['device_bytes'] / GB:.1f} GB{limit}"]
    if top["host_bytes"]:
        lines.append(f"pinned host memory a device: {top['host_bytes'] / GB:.2f} GB, which its own memory is spared")
    for refused in (f"{name}: {report['refused']}" for name, report in reports.items() if report["refused"]):
        lines.append(refused)
    if memory is not None and any(report["fits"] is False for report in reports.values()):
        lines += needs_lines(result["needs"], result["topology"]["devices"])
    return lines


def _scaled(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.3f}"


def needs_lines(needs: list[Mapping[str, Any]], devices: int) -> list[str]:
    """What would fit, by formula."""
    lines = ["what it would need, by formula:"]
    for row in needs:
        chips = "no mesh that divides the experts" if row["devices"] is None else f"{row['devices']} such chips"
        lines.append(
            f"  base in {row['base']}, pages on the {row['pages']}: {row['bytes_on_mesh'] / GB:.1f} GB a device on "
            f"{devices}; fits on {chips}" + ("" if row["devices"] is None else f" ({row['bytes'] / GB:.1f} GB)")
        )
    return lines


def picture(result: Mapping[str, Any]) -> bytes:
    """A stacked bar a program beside the chip's memory, as a PNG; the same plan gives the same bytes."""
    reports, chip = result["programs"], result["topology"]
    with matplotlib.rc_context(matplotlib.rcParamsDefault):
        figure = Figure(figsize=(9, 1.4 + 0.5 * len(reports)), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        left = [0.0] * len(reports)
        sizes = [columns(report) for report in reports.values()]
        for column, colour in zip(COLUMNS, COLOURS, strict=True):
            widths = [size[column] or 0.0 for size in sizes]
            axes.barh(list(reports), widths, left=left, color=colour, label=column, height=0.7)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for row, (total, report) in enumerate(zip(left, reports.values(), strict=True)):
            note = f" {total:.1f}" + (" + temporaries: refused" if report["refused"] else "")
            axes.text(total, row, note, va="center", fontsize=8)
        if chip["memory"] is not None:
            limit = chip["memory"] / GB
            axes.axvline(limit, color="black", linestyle="--", linewidth=1)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            middle, words = (len(reports) - 1) / 2, f"{limit:.1f} GB"
            axes.text(limit, middle, words, ha="center", va="center", rotation=90, fontsize=8, bbox=box)
            left.append(limit)
        axes.set_xlim(0, 1.12 * max(left))
        axes.invert_yaxis()
        axes.set_xlabel("GB a device")
        axes.set_title(
            f"{result['config']}, {result['sizes']['tokens']:,} tokens on {chip['name']} "
            f"(pages on the {result['prefix_store']}, chunk {result['sizes']['chunk']:,})",
            fontsize=10,
        )
        axes.legend(ncols=1, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
