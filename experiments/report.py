"""Writes one self-contained HTML page of a run: curves, phases, memory, samples, claims.

python experiments/report.py RUN_DIR [--out=FILE]

Reads the run folder (finished or not) and changes nothing in it, but for RUN_DIR/report.html where --out is not given.
Exit status 2 on bad input.
"""

import pathlib

from absl import app, flags

from longstraw_jax.command import fail, parse_flags
from longstraw_jax.evidence import report
from longstraw_jax.io.whole_file import write_whole

PAGE_FILE = "report.html"


def write(folder: pathlib.Path, out: pathlib.Path) -> int:
    """Writes the page; returns its bytes. Raises ValueError or OSError for a folder that has none."""
    data = report.page(folder).encode("utf-8")
    write_whole(out, data)
    return len(data)


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        fail(f"arguments {argv[1:]}; accepted: RUN_DIR, and --out=FILE")
    folder = pathlib.Path(argv[1])
    out = pathlib.Path(flags.FLAGS.out or folder / PAGE_FILE)
    try:
        size = write(folder, out)
    except (ValueError, OSError) as error:
        fail(error)
    print(f"{out}: {size:,} bytes")


if __name__ == "__main__":
    flags.DEFINE_string("out", None, f"The page; RUN_DIR/{PAGE_FILE} where it is not given.")
    app.run(main, flags_parser=parse_flags)
