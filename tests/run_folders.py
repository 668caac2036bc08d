"""Step records and finished run folders for the tests of evidence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from longstraw_jax.evidence.plots import write_plots
from longstraw_jax.evidence.receipt import RECEIPT_FILE, bind_config, write_receipt
from longstraw_jax.fingerprint import sha256_file, sha256_json, tree_fingerprint
from longstraw_jax.io.metrics import STEPS_FILE, MetricWriter, read_steps

CONFIG = {"seed": 3, "grpo": {"clip_high": 0.28, "group_size": 4}, "targets": ["q_a", "o"]}
ADAPTER = "adapter/adapter_model.safetensors"


def make_step(step: int, rewards, **fields) -> dict:
    """A consistent step record of one prompt."""
    scored = [reward for reward in rewards if reward is not None]
    record = {
        "step": step,
        "row_ids": [f"row-{step}"],
        "prompt_tokens": [100],
        "mode": "detached",
        "group_size": len(rewards),
        "rewards": list(rewards),
        "advantages": [0.0] * len(rewards),
        "response_lengths": [10 + i for i in range(len(rewards))],
        "truncated": [i == 0 for i in range(len(rewards))],
        "reward_mean": sum(scored) / len(scored) if scored else None,
        "loss": 0.25,
        "loss_sum": 2.5,
        "loss_count": 10,
        "grad_norm": 1.5,
        "skipped": False,
        "skip_reason": None,
        "nonfinite_count": 0,
        "metrics": {"kl": 0.01 * step, "ratio/mean": 1.0, "ratio/max": 1.1, "clip_ratio/low_mean": 0.0},
        "seconds": {"capture": 1.0, "sample": 2.0, "replay": float(step), "step": 4.0 + step},
        "peak_bytes": 1000 + step,
        "prefix_age": step % 2,
        "adapter_fingerprint": f"{step:016x}",
    }
    return {**record, **fields}


def make_steps(count: int = 12, seed: int = 0) -> list[dict]:
    """A run whose reward rises."""
    rng = np.random.default_rng(seed)
    return [make_step(i, [float(x) for x in rng.normal(0.1 * i, 0.2, size=4)]) for i in range(1, count + 1)]


def receipt_parts(run_dir: Path, dataset: Path) -> dict[str, Any]:
    """Arguments of `write_receipt` for a folder made by `make_run`."""
    return {
        "config": CONFIG,
        "mesh_shape": {"context": 32},
        "kernels": {"sparse_attention": "reference"},
        "weights_fingerprint": tree_fingerprint({"w": np.arange(6, dtype=np.float32)}),
        "dataset_files": {dataset: sha256_file(dataset)},
        "dataset_counts": {"rows": 2, "duplicates_dropped": 0},
        "seeds": {"sampling": 3},
        "prefix_gradient_mode": "detached",
        "artifacts": {
            ADAPTER: "adapter",
            "adapter/adapter_config.json": "adapter",
            "parity.json": "report",
            "plots/reward.png": "plot",
        },
        "claims": [{"claim": "gradient", "status": "shown", "evidence": ["artifacts/parity.json"]}],
    }


def make_run(folder: Path) -> tuple[Path, Path]:
    """A finished run of 12 steps written by the library's own writers: (run folder, dataset file beside it)."""
    run_dir, dataset = folder / "run", folder / "rows.jsonl"
    dataset.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    bind_config(run_dir, CONFIG)
    with MetricWriter(run_dir) as writer:
        for record in make_steps():
            writer.write(record)
    (run_dir / "adapter").mkdir()
    save_file({"lora_A": np.ones((2, 8), np.float32)}, run_dir / ADAPTER)
    (run_dir / "adapter/adapter_config.json").write_text(json.dumps({"r": 2}))
    (run_dir / "parity.json").write_text(json.dumps({"cosine": 1.0}))
    write_plots(run_dir, read_steps(run_dir / STEPS_FILE))
    write_receipt(run_dir, **receipt_parts(run_dir, dataset))
    return run_dir, dataset


def copy_run(run: tuple[Path, Path], folder: Path) -> tuple[Path, Path]:
    """A copy of what `make_run` returned, to be broken; its receipt names the copied dataset."""
    run_dir, dataset = folder / "run", folder / "rows.jsonl"
    shutil.copytree(run[0], run_dir)
    shutil.copyfile(run[1], dataset)
    edit_receipt(run_dir, lambda receipt: receipt["dataset"]["files"][0].update(path=str(dataset)))
    return run_dir, dataset


def edit_receipt(run_dir: Path, change: Callable[[dict], Any]) -> None:
    """Edits the receipt in place and signs it again, as somebody who wants to pass would."""
    receipt = json.loads((run_dir / RECEIPT_FILE).read_text())
    change(receipt)
    del receipt["receipt_sha256"]
    receipt["receipt_sha256"] = sha256_json(receipt)
    (run_dir / RECEIPT_FILE).write_text(json.dumps(receipt))
