"""The demo: writes a row whose answer stands in its prompt, runs the main job on the reader, checks that reward rose.

python experiments/demo.py --workdir=runs/demo
"""

import argparse
import pathlib
import shutil
import sys
import tempfile
import time
from typing import Any

import build_tasks
import train_grpo
from absl import app, flags
from ml_collections import ConfigDict

from longstraw_jax.command import define_config, fail, parse_flags

MARK = ".longstraw_demo"  # a folder without it is never removed
RISE = 3.0  # standard errors that the last five steps' mean reward must lie above the first five's
# A number told of early in the prompt among eight times the look-alikes of pretraining: the reader gets some of its
# digits and seldom all, so that there is something to build on and much to gain. That is so of this seed's row: others
# begin lower or higher.
TASK = {
    "kinds": ["needle"],
    "positions": ["early"],
    "distractors": 128,
    "digits": 4,
    "seeds": 1,
    "first_seed": 3,
    "native_window": 0,
    "text": "python",
}


def write_rows(path: pathlib.Path, checkpoint: str, tokens: int) -> None:
    """One row of that task, whose prompt has so many tokens."""
    parameters = TASK | {"checkpoint": checkpoint, "tokens": [str(tokens)]}
    build_tasks.write_rows(path, build_tasks.retrieval_rows(argparse.Namespace(**parameters)), parameters)


def check_ours(folder: pathlib.Path) -> None:
    """Raises ValueError where the folder holds what no earlier demo made, known by a file that only the demo writes."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / MARK).is_file())):
        raise ValueError(f"workdir: {folder} holds something else; accepted: a new folder or that of a demo")


def make_anew(folder: pathlib.Path) -> None:
    """Empties the folder of an earlier demo, or makes it. Raises ValueError where it is not ours to remove."""
    check_ours(folder)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()


def write_inputs(config: ConfigDict, folder: pathlib.Path) -> None:
    """Writes the row and points the configuration to it."""
    config.data.paths = (str(folder / "rows.jsonl"),)
    write_rows(folder / "rows.jsonl", config.model.checkpoint, config.data.prompt_tokens)


def run(config: ConfigDict, folder: pathlib.Path) -> dict[str, Any]:
    """The whole demo but its verdict; returns the receipt. The row goes to FOLDER_inputs.

    Raises:
      ValueError: what stands in the way; an earlier demo is then as it was.
    """
    inputs = folder.with_name(folder.name + "_inputs")
    check_ours(folder)
    check_ours(inputs)
    train_grpo.set_devices(config)
    with tempfile.TemporaryDirectory() as trial:
        write_inputs(config, pathlib.Path(trial))
        train_grpo.check(config, folder)
    make_anew(folder)
    make_anew(inputs)
    write_inputs(config, inputs)
    return train_grpo.run(config, folder)


def verdict(receipt: dict[str, Any]) -> tuple[list[str], bool]:
    """What the receipt says, as lines, and whether the reward rose enough."""
    figures = {name: figure["value"] for name, figure in receipt["figures"].items()}
    lines = ["phase       seconds (median of a step, total)"]
    for phase, seconds in figures["phase_seconds"].items():
        lines.append(f"  {phase:<9} {seconds['median']:8.2f} {seconds['total']:8.1f}")
    lines.append(f"peak memory {figures['peak_bytes'] / 2**30:.2f} GiB ({receipt['memory_source']})")
    rise = figures["rise_in_standard_errors"]
    if rise is None:
        return [*lines, "rise not measured: fewer than 10 steps, or rewards that are all alike"], False
    first, last = figures["first_mean"], figures["last_mean"]
    lines.append(f"mean reward of the first 5 steps {first:.4f}, of the last 5 {last:.4f}")
    lines.append(f"rise {rise:.1f} standard errors (must exceed {RISE})")
    return lines, rise > RISE


def main(argv: list[str]) -> None:
    started, values = time.perf_counter(), flags.FLAGS
    config, folder = values.config, pathlib.Path(values.workdir)
    try:
        if len(argv) > 1:
            raise ValueError(f"arguments {argv[1:]}; accepted: --workdir=DIR and --config.field=value")
        receipt = run(config, folder)
    except (ValueError, OSError) as error:
        fail(error)
    lines, rose = verdict(receipt)
    seconds = time.perf_counter() - started
    print("", *lines, sep="\n")
    print(f"prompt of {config.data.prompt_tokens} tokens on {config.mesh.devices} devices, {seconds:.0f} s in all")
    print(f"receipt {folder / 'receipt.json'}, plots {folder / 'plots'}")
    sys.exit(0 if rose else 1)


if __name__ == "__main__":
    default = pathlib.Path(__file__).parent / "configs" / "demo.py"
    define_config(default, "Configuration of the demo.")
    flags.DEFINE_string("workdir", "runs/demo", "Run folder; it is made anew.")
    app.run(main, flags_parser=parse_flags)
