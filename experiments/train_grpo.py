"""The main job: GRPO on long prompts from a Hugging Face checkpoint and dataset rows.

python experiments/train_grpo.py --config=experiments/configs/grpo.py --workdir=runs/mine \
    --config.model.checkpoint=DIR --config.data.paths='("rows.jsonl",)'

Run again with the same folder to resume; another configuration is refused.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags
from tqdm import tqdm

from longstraw_jax import fingerprint, job_config, launch, lora, rollout, sharding, train
from longstraw_jax.command import fail, parse_flags
from longstraw_jax.evidence import kernels, memory, plots, prerequisites, receipt
from longstraw_jax.io import adapter, checkpoint, data, hf_checkpoint, metrics
from longstraw_jax.io.run_lock import run_lock
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.prefix import freshness
from longstraw_jax.rl import rewards
from longstraw_jax.types import Params

TRAINABLE_FILE = "trainable.json"  # which arrays train, their shapes and targets


@dataclasses.dataclass(frozen=True)
class Job(prerequisites.Parts):
    """Everything a run needs, loaded and checked before anything compiles."""

    config: ConfigDict
    base: Params
    base_sha: str


def set_devices(config: ConfigDict, processes: int = 1) -> None:
    """Splits the CPU into this process's share of the devices, if asked to; must precede JAX's first device query.

    Raises:
      ValueError: a field of the configuration is of another type; there are no devices, or the processes cannot
        share them.
    """
    if problems := job_config.type_problems(config):
        raise ValueError("; ".join(problems))
    devices = config.mesh.devices
    if devices < 1 or devices % processes:
        several = f", a multiple of the {processes} processes" if processes > 1 else ""
        raise ValueError(f"mesh.devices={devices}; accepted: at least 1{several}")
    if config.mesh.emulate:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices // processes)


def check(config: ConfigDict, workdir: pathlib.Path) -> prerequisites.Parts:
    """What a run needs, but its weights; writes nothing. Raises ValueError with all that stands in the way."""
    parts, findings = prerequisites.examine(config, workdir)
    every = list(dict.fromkeys(itertools.chain(*launch.exchange(prerequisites.blockers(findings)))))
    if every:
        raise ValueError(every[0] if len(every) == 1 else f"{len(every)} blockers: {'; '.join(every)}")
    return parts


def load_job(config: ConfigDict, workdir: pathlib.Path) -> Job:
    """Checks everything that a run needs, then reads the weights. Raises ValueError."""
    parts = check(config, workdir)
    _, base = hf_checkpoint.load(config.model.checkpoint, parts.model.config, parts.model.mesh)
    return Job(**vars(parts), config=config, base=base, base_sha=fingerprint.tree_fingerprint(base))


def reward_call(job: Job, rows: list[dict[str, Any]]) -> rollout.RewardCall:
    """Scores the responses of each of the step's prompts with the configured functions, once for all processes."""

    def score(number, responses):
        row, count = rows[number], len(responses)
        values, _, events = rewards.score(
            job.reward_functions,
            list(job.config.reward.weights),
            [row["prompt"]] * count,
            [job.tokenizer.decode(ids, skip_special=True) for ids in responses],
            responses,
            {name: [value] * count for name, value in row["columns"].items()},
            job.config.reward.timeout_s,
        )
        return values.tolist(), [event for event in events if event["event"] == "reward_metric"]  # what is logged

    def call(number, responses):
        values, events = launch.on_first(lambda: score(number, responses))
        return np.asarray(values, np.float32), events

    return call


def step_record(
    job: Job, step: int, rows: list[dict[str, Any]], report: train.StepReport, seconds: float
) -> dict[str, Any]:
    """A line of steps.jsonl, as evidence/figures.py defines it."""
    rollouts = report.rollouts
    every = np.concatenate([r.rewards for r in rollouts])
    scored = every[np.isfinite(every)]
    truncated = [bool(t) for r in rollouts for t in r.truncated]
    spread = [
        float(np.nanmax(r.rewards) - np.nanmin(r.rewards)) if np.isfinite(r.rewards).any() else 0.0 for r in rollouts
    ]
    extra = {
        "frac_reward_zero_std": float(np.mean([s == 0 for s in spread])),
        "completions/clipped_ratio": float(np.mean(truncated)),
        "reward/unscorable": float(every.size - scored.size),
    }
    logged: dict[str, list[float]] = {}  # what reward functions gave to log_metric
    for event in (event for r in rollouts for event in r.events):
        logged.setdefault(f"rewards/{event['function']}/{event['name']}", []).append(event["value"])
    extra |= {name: float(np.mean(values)) for name, values in logged.items()}
    return {
        "step": step,
        "row_ids": [row["id"] for row in rows],
        "prompt_tokens": [int(r.prompt.size) for r in rollouts],
        "mode": job.policy.mode,
        "group_size": job.policy.group,
        "rewards": [float(x) if np.isfinite(x) else None for x in every],
        "advantages": [float(x) for r in rollouts for x in r.advantages],
        "response_lengths": [len(ids) for r in rollouts for ids in r.responses],
        "truncated": truncated,
        "reward_mean": float(scored.mean()) if scored.size else None,
        "loss": report.loss_sum / report.loss_count if report.loss_count else 0.0,
        "loss_sum": report.loss_sum,
        "loss_count": report.loss_count,
        "grad_norm": report.grad_norm,
        "skipped": report.skip_reason is not None,
        "skip_reason": report.skip_reason,
        "nonfinite_count": report.nonfinite,
        "metrics": report.metrics | extra,
        "seconds": report.seconds | {"step": seconds},
        "peak_bytes": max(launch.exchange(memory.peak_bytes()[0])),
        "prefix_age": report.prefix_age,
        "adapter_fingerprint": report.adapter_fingerprint,
    }


def plain(config: ConfigDict) -> dict[str, Any]:
    """The configuration as JSON values."""
    return json.loads(config.to_json())


def run(config: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains, or resumes, the run in `workdir` and returns its receipt. Raises ValueError for bad input."""
    if (workdir / receipt.CONFIG_FILE).exists():
        receipt.bind_config(workdir, plain(config))  # another configuration's folder: said before weights are read
    job = load_job(config, workdir)
    with contextlib.ExitStack() as opened:
        _open_on_first(opened, lambda: run_lock(workdir))
        return _train(job, workdir)


def _open_on_first(opened: contextlib.ExitStack, make: Callable[[], Any]) -> Any:
    """Opens on process 0 what it alone may hold, until `opened` closes; what it gives there, None elsewhere."""
    found = []
    launch.on_first(lambda: found.append(opened.enter_context(make())))
    return found[0] if found else None


def _train(job: Job, workdir: pathlib.Path) -> dict[str, Any]:
    config = job.config
    sha = launch.on_first(lambda: receipt.bind_config(workdir, plain(config)))
    optimizer = train.make_optimizer(job.optimizer)
    state = train.init_state(job.model, optimizer, config.seed)
    bound = {
        "config": sha,
        "data.paths": job.dataset.files,
        "base": job.base_sha,
        # Tokenizer, template and document decide what a row's prompt is.
        "prompts": fingerprint.sha256_json([job.tokenizer.sha256, job.build(job.dataset.rows[0]["prompt"]).tolist()]),
        "mode": job.policy.mode,
        "lora": {name: {"rank": r, "alpha": a} for name, r, a in job.model.lora.targets},
    }
    folder = workdir / "checkpoints"
    launch.check_same("what the run is bound to", bound)
    if checkpoint.latest_step(folder) is not None:
        state, _ = checkpoint.restore(folder, state, expected=bound)
        logging.info("resumed after step %d", int(state.step))
        if int(state.step) == config.steps and (workdir / "receipt.json").is_file():
            return json.loads((workdir / "receipt.json").read_text())  # what it says of the code that ran stays true
    table, first = lora.trainable_table(job.model.config, job.model.lora), launch.is_first()
    launch.on_first(lambda: write_whole(workdir / TRAINABLE_FILE, (json.dumps(table, indent=1) + "\n").encode()))
    if first:
        print(lora.format_table(table))
    base_words = freshness.policy_fingerprint(job.model, job.base_sha)
    held, done = None, int(state.step)
    silent = not (first and sys.stderr.isatty())
    with (
        contextlib.ExitStack() as opened,
        tqdm(total=config.steps, initial=done, desc="steps", unit="step", disable=silent) as bar,
    ):
        writer = _open_on_first(opened, lambda: metrics.MetricWriter(workdir, last_step=done))
        while done < config.steps:
            number = done // job.policy.updates
            order = data.row_order(len(job.dataset.rows), config.seed, number, config.data.rows_per_step)
            rows = [job.dataset.rows[i] for i in order]
            started = time.perf_counter()
            state, reports, held = train.transaction(
                job.model,
                job.policy,
                optimizer,
                job.base,
                base_words,
                state,
                [job.build(row["prompt"]) for row in rows],
                reward_call(job, rows),
                jax.random.fold_in(jax.random.key(config.seed), number),
                held=held,
            )
            seconds = (time.perf_counter() - started) / len(reports)
            for step, report in enumerate(reports, start=done + 1):
                record = step_record(job, step, rows, report, seconds)
                launch.on_first(lambda record=record: writer.write(record))
                bar.set_postfix(reward=record["reward_mean"], loss=record["loss"])
                bar.update()
                if first:
                    print(step_line(record), flush=True)
            before, done = done, done + len(reports)
            if done == config.steps or done // config.checkpoint.every > before // config.checkpoint.every:
                checkpoint.save(folder, done, state, bound, keep=config.checkpoint.keep)
    adapters = jax.tree.map(launch.to_host, state.adapters)
    return launch.on_first(lambda: finish(job, workdir, adapters))


def step_line(record: dict[str, Any]) -> str:
    """A step for the eye."""
    reward = "none" if record["reward_mean"] is None else f"{record['reward_mean']:.4f}"
    return (
        f"step {record['step']:>4}  reward {reward}  loss {record['loss']:+.4f}  grad {record['grad_norm']:.3f}  "
        f"{record['seconds']['step']:.1f} s" + (f"  skipped: {record['skip_reason']}" if record["skipped"] else "")
    )


def finish(job: Job, workdir: pathlib.Path, adapters: Params) -> dict[str, Any]:
    """Adapter, plots and receipt of a finished run; for one process, which has the adapters on its host."""
    steps = metrics.read_steps(workdir / metrics.STEPS_FILE)
    adapter.export_peft(
        workdir / "adapter", job.model.config, job.model.lora, adapters,
        base_model_name=job.config.model.checkpoint,
    )  # fmt: skip
    artifacts = {path: "plot" for path in plots.write_plots(workdir, steps)}
    artifacts |= {f"adapter/{path.name}": "adapter" for path in sorted((workdir / "adapter").iterdir())}
    artifacts[TRAINABLE_FILE] = "report"
    dataset, prompt_file = job.dataset, {}
    if path := job.config.data.prompt_file:
        prompt_file = {path: fingerprint.sha256_file(path)}
    return receipt.write_receipt(
        workdir,
        config=plain(job.config),
        mesh_shape={sharding.AXIS: job.model.devices},
        kernels=kernels.implementations(job.model),
        weights_fingerprint=job.base_sha,
        dataset_files=dataset.files | prompt_file,
        dataset_counts={
            "read": dataset.read,
            "rows": len(dataset.rows),
            "duplicates_dropped": dataset.duplicates_dropped,
            "repeated_content": dataset.repeated_content,
        },
        seeds={"run": job.config.seed},
        prefix_gradient_mode=job.policy.mode,
        artifacts=artifacts,
    )


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    if len(argv) > 1 or values.config is None or values.workdir is None:
        fail(f"arguments {argv[1:]}; accepted: --config=FILE --workdir=DIR and --config.field=value")
    try:
        cluster = launch.find_cluster(
            os.environ,
            coordinator=values.coordinator,
            processes=values.num_processes,
            process=values.process_id,
        )
        set_devices(values.config, cluster.processes if cluster else 1)
        launch.join(cluster)
        with launch.ends_with_the_others(cluster):
            run(values.config, pathlib.Path(values.workdir))
    except (ValueError, OSError) as error:
        fail(error)
    if launch.is_first():
        print(f"receipt: {pathlib.Path(values.workdir) / 'receipt.json'}")


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "Configuration file, see experiments/configs/grpo.py.")
    flags.DEFINE_string("workdir", None, "Run folder: receipt.json, steps.jsonl, checkpoints, plots, adapter.")
    flags.DEFINE_string("coordinator", None, "Many processes: host:port of process 0. Slurm and GKE are found without.")
    flags.DEFINE_integer("num_processes", None, "Many processes: how many.")
    flags.DEFINE_integer("process_id", None, "Many processes: this one's number, from 0.")
    app.run(main, flags_parser=parse_flags)
