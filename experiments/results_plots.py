"""Plots receipts of long_context.py and of the peer: peak bytes, seconds a phase with floors, group sizes.

python experiments/results_plots.py --receipts=runs/a/receipt.json,runs/b/receipt.json --peer=runs/peer/peer.json \
    --out=runs/plots
"""

import json
import pathlib
from typing import Any

from absl import app, flags

from longstraw_jax import command
from longstraw_jax.evidence import result_plots
from longstraw_jax.io.whole_file import write_whole


def run(receipts: list[str], peer: str, out: pathlib.Path) -> list[pathlib.Path]:
    """Writes peak.png, seconds.png and, where a run has several groups, groups.png; their paths.

    Raises:
      ValueError: a file that is no such receipt. OSError: one that is not there.
    """
    found = [_read(path) for path in receipts]
    plots = {
        "peak": result_plots.peak_plot(found, _read(peer) if peer else None),
        "seconds": result_plots.seconds_plot(found),
    }
    if result_plots.group_curves(found):
        plots["groups"] = result_plots.group_plot(found)
    paths = []
    for name, image in plots.items():
        paths.append(out / f"{name}.png")
        write_whole(paths[-1], image)
    return paths


def _read(path: str) -> dict[str, Any]:
    try:
        return json.loads(pathlib.Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); accepted: a receipt") from error


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    try:
        if len(argv) > 1:
            raise ValueError(f"arguments {argv[1:]}; accepted: --receipts=FILE,FILE --peer=FILE --out=DIR")
        paths = run(values.receipts, values.peer, pathlib.Path(values.out))
    except (ValueError, OSError) as error:
        command.fail(error)
    print("\n".join(map(str, paths)))


if __name__ == "__main__":
    flags.DEFINE_list("receipts", [], "receipt.json files of long_context.py.")
    flags.DEFINE_string("peer", "", "peer.json of peers/hf_full_sequence.py.")
    flags.DEFINE_string("out", "runs/plots", "Folder of the plots.")
    app.run(main, flags_parser=command.parse_flags)
