"""A tiny checkpoint, rows and configuration of the main job; equal shapes, so that all tests share its programs."""

import functools
import json
import pathlib
import runpy
import sys
import tempfile

from ml_collections import ConfigDict

EXPERIMENTS = pathlib.Path(__file__).parents[1] / "experiments"
sys.path.append(str(EXPERIMENTS))

import make_tiny_checkpoint  # noqa: E402
import train_grpo  # noqa: E402

# One IndexShare group: a full dense layer and a shared MoE layer. Every sharded dimension divides 32 devices.
RAW = make_tiny_checkpoint.CONFIG | {
    "num_hidden_layers": 2,
    "index_topk_pattern": "FS",
    "mlp_layer_types": ["dense", "sparse"],
    "index_topk": 16,
    "max_position_embeddings": 256,
}
_FOLDER = tempfile.TemporaryDirectory(prefix="tiny_jobs_")


def defaults(name: str = "grpo") -> ConfigDict:
    """A fresh copy of a configuration in experiments/configs."""
    return runpy.run_path(str(EXPERIMENTS / "configs" / f"{name}.py"))["get_config"]()


@functools.cache
def checkpoint() -> pathlib.Path:
    folder = pathlib.Path(_FOLDER.name) / "checkpoint"
    make_tiny_checkpoint.write(folder, RAW, 0)
    return folder


def write_rows(path: pathlib.Path, **columns) -> pathlib.Path:
    """Three rows whose prompts differ in length."""
    rows = [
        {
            "prompt": [{"role": "user", "content": "Digits, please" + "." * (40 + 9 * index)}],
            "reward_model": {"ground_truth": "1"},
            "extra_info": {"index": index},
            **columns,
        }
        for index in range(3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@functools.cache
def rows() -> pathlib.Path:
    return write_rows(pathlib.Path(_FOLDER.name) / "rows.jsonl")


def config(**changes) -> ConfigDict:
    """The tiny job; changes by dotted name, as in config(**{"grpo.beta": 0.1})."""
    made = defaults()
    made.update_from_flattened_dict(
        {
            "steps": 2,
            "model.checkpoint": str(checkpoint()),
            "data.paths": (str(rows()),),
            "grpo.group": 4,
            "grpo.max_new_tokens": 8,
            "capture.chunk": 64,
            "reward.functions": ("digit_share",),
            "optimizer.learning_rate": 1e-2,
            "optimizer.weight_decay": 0.1,
            "checkpoint.every": 1,
        }
        | {f"lora.{name}.rank": 2 for name in made.lora}
        | changes
    )
    return made


def job(**changes) -> train_grpo.Job:
    return train_grpo.load_job(config(**changes), pathlib.Path("runs"))


def write_config(path: pathlib.Path, made: ConfigDict) -> pathlib.Path:
    """A configuration as a file for --config."""
    path.with_suffix(".json").write_text(made.to_json())
    path.write_text(
        "import json, pathlib\n"
        "from ml_collections import ConfigDict\n\n\n"
        "def get_config():\n"
        "    text = pathlib.Path(__file__).with_suffix('.json').read_text()\n"
        "    return ConfigDict(json.loads(text, object_hook=lambda d: {\n"
        "        k: tuple(v) if isinstance(v, list) else v for k, v in d.items()\n"
        "    }))\n"
    )
    return path


def leaves(made: ConfigDict, name: str = "") -> dict[str, object]:
    """Dotted name -> value of every field."""
    found: dict[str, object] = {}
    for key, value in made.items():
        found |= leaves(value, f"{name}{key}.") if isinstance(value, ConfigDict) else {name + key: value}
    return found
