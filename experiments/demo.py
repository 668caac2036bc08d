"""The demo: makes a tiny checkpoint and a dataset row, runs the main job on them and checks that the reward rose.

python experiments/demo.py --workdir=runs/demo
"""

import json
import pathlib
import shutil
import sys
import time

import make_tiny_checkpoint
import train_grpo
from absl import app, flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
    "config", str(pathlib.Path(__file__).parent / "configs" / "demo.py"), "Configuration of the demo."
)
_WORKDIR = flags.DEFINE_string("workdir", "runs/demo", "Run folder; it is made anew.")

RISE = 3.0  # standard errors that the last five steps' mean reward must lie above the first five's
QUESTION = "How many digits does the documentation above hold? Answer with digits only."


def write_rows(path: pathlib.Path) -> None:
    """One row in the DAPO-Math schema."""
    row = {
        "data_source": "demo",
        "prompt": [{"role": "user", "content": QUESTION}],
        "reward_model": {"style": "rule", "ground_truth": "0"},
        "extra_info": {"index": "demo-0", "split": "train"},
    }
    path.write_text(json.dumps(row) + "\n")


def main(argv: list[str]) -> None:
    del argv
    started = time.perf_counter()
    folder, config = pathlib.Path(_WORKDIR.value), _CONFIG.value
    inputs = folder.with_name(folder.name + "_inputs")
    for path in (folder, inputs):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    config.model.checkpoint, config.data.paths = str(inputs / "checkpoint"), (str(inputs / "rows.jsonl"),)
    train_grpo.set_devices(config)
    make_tiny_checkpoint.write(inputs / "checkpoint", make_tiny_checkpoint.CONFIG, config.seed)
    write_rows(inputs / "rows.jsonl")
    receipt = train_grpo.run(config, folder)

    figures = {name: figure["value"] for name, figure in receipt["figures"].items()}
    rise = figures["rise_in_standard_errors"]
    print("\nphase       seconds (median of a step, total)")
    for phase, seconds in figures["phase_seconds"].items():
        print(f"  {phase:<9} {seconds['median']:8.2f} {seconds['total']:8.1f}")
    print(f"peak memory {figures['peak_bytes'] / 2**30:.2f} GiB ({receipt['memory_source']})")
    seconds = time.perf_counter() - started
    print(f"prompt of {config.data.prompt_tokens} tokens on {config.mesh.devices} devices, {seconds:.0f} s in all")
    print(f"mean reward of the first 5 steps {figures['first_mean']:.4f}, of the last 5 {figures['last_mean']:.4f}")
    print(f"rise {rise:.1f} standard errors (must exceed {RISE})")
    print(f"receipt {folder / 'receipt.json'}, plots {folder / 'plots'}")
    sys.exit(0 if rise is not None and rise > RISE else 1)


if __name__ == "__main__":
    app.run(main)
