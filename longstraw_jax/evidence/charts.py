"""Charts as HTML fragments with inline SVG: curves, stacked bars, heat strips. Colours and sizes are report.css's.

Lines are drawn in a square of 100 x 100 that the page stretches; the text beside them is HTML and keeps its size.
"""

import html
import math
from collections.abc import Mapping, Sequence

SIDE = 100.0
MOST_DOTS = 80  # points that are marked one by one
SERIES = 6  # colours that report.css has

Values = Sequence[float | None]


def number(value: float | None, unit: str = "") -> str:
    """A number for the eye; "none" of None."""
    if value is None:
        return "none"
    if unit == "B":
        return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"
    if value == int(value) and abs(value) < 1e6:
        text = f"{int(value)}"
    elif abs(value) >= 1e5 or abs(value) < 1e-3:
        text = f"{value:.2e}"
    else:
        text = f"{value:.4g}"
    return f"{text} {unit}".rstrip()


def curves(
    title: str,
    steps: Sequence[int],
    series: Mapping[str, Values],
    *,
    unit: str = "",
    band: tuple[Values, Values] | None = None,
    floor: float | None = None,
    marked: Sequence[int] = (),
) -> str:
    """Curves over the optimizer steps; a None is a gap.

    Args:
      series: name -> a value a step; at most SERIES of them.
      unit: of the values, "B" for bytes.
      band: lower and upper edge around the first curve.
      floor: a value that the axis shows at least.
      marked: numbers of steps that were skipped.
    """
    drawn = {name: values for name, values in series.items() if any(v is not None for v in values)}
    known = [v for values in (*drawn.values(), *(band or ())) for v in values if v is not None]
    if not known:
        return ""
    low, high = _range([*known, *([] if floor is None else [floor])])
    parts = []
    if band is not None:
        parts.append(_band(band, low, high))
    for place, (name, values) in enumerate(drawn.items()):
        parts.append(_curve(f"s{place}", name, steps, values, low, high, unit))
    for step in marked:
        x = _x(list(steps).index(step), len(steps))
        parts.append(f'<path class="skip" d="M{x:.2f} 0V{SIDE:g}"><title>step {step}: skipped</title></path>')
    legend = _legend(list(drawn)) if len(drawn) > 1 else ""
    return _figure(title, legend, "".join(parts), _marks(low, high, unit), steps)


def stacked_bars(
    title: str, steps: Sequence[int], parts: Mapping[str, Sequence[float]], *, unit: str, top: float
) -> str:
    """A bar a step, its parts on top of one another; bars above `top` are cut off there.

    Args:
      parts: name -> a height a step, 0 or more; at most SERIES of them.
    """
    width = SIDE / max(len(steps), 1)
    drawn, bottom = [], [0.0] * len(steps)
    for place, (name, heights) in enumerate(parts.items()):
        for i, height in enumerate(heights):
            low, high = min(bottom[i], top), min(bottom[i] + height, top)
            bottom[i] += height
            if high > low:
                label = html.escape(f"step {steps[i]}, {name}: {number(height, unit)}")
                drawn.append(
                    f'<rect class="f{place}" x="{i * width + 0.1 * width:.3f}" y="{SIDE - SIDE * high / top:.3f}" '
                    f'width="{0.8 * width:.3f}" height="{SIDE * (high - low) / top:.3f}"><title>{label}</title></rect>'
                )
    return _figure(title, _legend(list(parts)), "".join(drawn), [number(v, unit) for v in (top, top / 2, 0)], steps)


def heat_strips(title: str, rows: Mapping[str, Sequence[float]], ends: tuple[str, str]) -> str:
    """A strip a row, darker where a cell has more; every row by its own largest cell.

    Args:
      rows: label -> cells, 0 or more.
      ends: what stands under the first and the last cell.
    """
    strips = []
    for label, cells in rows.items():
        most, width = max(cells, default=0) or 1.0, SIDE / max(len(cells), 1)
        rects = "".join(
            f'<rect class="heat" x="{i * width:.3f}" width="{width:.3f}" y="0" height="{SIDE:g}" '
            f'fill-opacity="{cell / most:.3f}"><title>{html.escape(label)}, part {i + 1} of {len(cells)}: '
            f"{number(cell)}</title></rect>"
            for i, cell in enumerate(cells)
            if cell
        )
        strips.append(
            f'<span class="label">{html.escape(label)}</span>'
            f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img">{rects}</svg>'
        )
    axis = f'<span></span><div class="x"><span>{html.escape(ends[0])}</span><span>{html.escape(ends[1])}</span></div>'
    return (
        f'<figure class="strips"><figcaption>{html.escape(title)}</figcaption>'
        f'<div class="rows">{"".join(strips)}{axis}</div></figure>'
    )


def _range(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1.0) * 0.1, high + (abs(high) or 1.0) * 0.1
    return low, high


def _marks(low: float, high: float, unit: str) -> list[str]:
    """The axis from its top; round-off beside the range is 0."""
    values = (high, (low + high) / 2, low)
    return [number(0 if abs(value) < 1e-9 * (high - low) else value, unit) for value in values]


def _x(place: int, count: int) -> float:
    return SIDE * (place + 0.5) / count


def _y(value: float, low: float, high: float) -> float:
    return SIDE - SIDE * (value - low) / (high - low)


def _runs(values: Values) -> list[list[int]]:
    """Places of values without a gap between them."""
    runs: list[list[int]] = [[]]
    for place, value in enumerate(values):
        if value is None or not math.isfinite(value):
            runs.append([])
        else:
            runs[-1].append(place)
    return [run for run in runs if run]


def _curve(css: str, name: str, steps: Sequence[int], values: Values, low: float, high: float, unit: str) -> str:
    points = {place: (_x(place, len(values)), _y(values[place], low, high)) for run in _runs(values) for place in run}
    path = "".join("M" + "L".join(f"{points[p][0]:.2f} {points[p][1]:.2f}" for p in run) for run in _runs(values))
    drawn = f'<path class="line {css}" d="{path}"/>'
    if len(values) > MOST_DOTS:
        return drawn
    for place, (x, y) in points.items():
        label = html.escape(f"step {steps[place]}, {name}: {number(values[place], unit)}")
        drawn += f'<path class="dot {css}" d="M{x:.2f} {y:.2f}h0"><title>{label}</title></path>'
    return drawn


def _band(edges: tuple[Values, Values], low: float, high: float) -> str:
    count = len(edges[0])
    drawn = ""
    for run in _runs(edges[0]):
        there = [f"{_x(p, count):.2f} {_y(edges[1][p], low, high):.2f}" for p in run]
        back = [f"{_x(p, count):.2f} {_y(edges[0][p], low, high):.2f}" for p in reversed(run)]
        drawn += f'<path class="band" d="M{"L".join(there + back)}Z"/>'
    return drawn


def _legend(names: list[str]) -> str:
    return "".join(f'<span class="key k{i}">{html.escape(name)}</span>' for i, name in enumerate(names))


def _figure(title: str, legend: str, inner: str, marks: list[str], steps: Sequence[int]) -> str:
    grid = "".join(f'<path class="grid" d="M0 {y}H100"/>' for y in (0, 50, 100))
    axis = "".join(f"<span>{html.escape(mark)}</span>" for mark in marks)
    first, last = (f"step {steps[0]}", f"step {steps[-1]}") if len(steps) > 1 else (f"step {steps[0]}", "")
    return (
        f'<figure class="chart"><figcaption>{html.escape(title)}{legend}</figcaption><div class="plot">'
        f'<div class="y">{axis}</div><svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(title, quote=True)}">{grid}{inner}</svg>'
        f'<span></span><div class="x"><span>{first}</span><span>{last}</span></div></div></figure>'
    )
