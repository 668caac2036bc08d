"""The Markdown table of benchmark rows."""

COLUMNS = ("op", "shape", "backend", "ms", "TFLOP/s", "TB/s", "of matmul", "of copy", "of floor", "XLA ms", "notes")
NOTES = {  # what an op's rows may say beyond the columns, and how
    "selection_share": "selection {:+.1%}",
    "update_share": "update {:+.1%}",
    "over_matmuls": "{:.2f} x its plain matmuls",
    "error": "{}",
}


def table_lines(rows: list[dict], copy_tbps: float) -> list[str]:
    """A Markdown table of an op's rows."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for row in rows:
        tbps = row.get("tbps")
        cells = (
            row["op"],
            row["shape"] + (f", {row['ids']} ids" if "ids" in row else ""),
            row["backend"],
            _number(row.get("seconds"), "{:.3f}", 1e3),
            _number(row.get("tflops"), "{:.0f}"),
            _number(tbps, "{:.2f}"),
            _number(row.get("fraction_of_matmul"), "{:.0%}"),
            _number(tbps and tbps / copy_tbps, "{:.0%}"),
            _number(row.get("fraction_of_floor"), "{:.0%}"),
            _number(row.get("xla_seconds"), "{:.1f}", 1e3),
            ", ".join(form.format(row[key]) for key, form in NOTES.items() if row.get(key) is not None),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _number(value, form, factor=1):
    return "" if value is None else form.format(value * factor)
