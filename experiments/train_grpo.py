"""The main job: GRPO on long prompts from a Hugging Face checkpoint and dataset rows.

python experiments/train_grpo.py --config=experiments/configs/grpo.py --workdir=runs/mine \
    --config.model.checkpoint=DIR --config.data.paths='("rows.jsonl",)'

Run again with the same folder to resume; another configuration is refused. Ctrl-C or SIGTERM drops the step in flight,
saves and ends with exit code 130.
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
import jaxlib.version
import numpy as np
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags
from tqdm import tqdm

from longstraw_jax import fingerprint, interrupt, job_config, launch, lora, rollout, sharding, train
from longstraw_jax.command import fail, parse_flags
from longstraw_jax.evidence import kernels, memory, plots, prerequisites, receipt
from longstraw_jax.evidence.step_record import step_record
from longstraw_jax.io import adapter, checkpoint, hf_checkpoint, metrics, samples
from longstraw_jax.io.run_lock import run_lock
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.prefix import freshness
from longstraw_jax.progress import Progress, Rows
from longstraw_jax.rl import rewards, shaping
from longstraw_jax.types import Params

TRAINABLE_FILE = "trainable.json"  # which arrays train, their shapes and targets
# XLA:CPU may run the collectives within a loop beside the operation listed next. If that is a collective too, emulated
# devices meet at the wrong one: they wait for ever or abort. That depends on the order in which a version lists
# operations: breadth first, jaxlib 0.11.2 aborts in a replay of 32 devices; depth first, 0.10.2 in a capture.
IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


@dataclasses.dataclass(frozen=True)
class Job(prerequisites.Parts):
    """Everything a run needs, loaded and checked before anything compiles."""

    config: ConfigDict
    base: Params
    base_sha: str

    def text(self, ids: list[int]) -> str:
        """What a response says."""
        return self.tokenizer.decode(ids, skip_special=True)


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
        given = os.environ.get("XLA_FLAGS", "")
        if jaxlib.version.__version_info__ >= (0, 11) and IN_ORDER.partition("=")[0] not in given:
            os.environ["XLA_FLAGS"] = f"{given} {IN_ORDER}".strip()
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

    settings = job.config.reward

    def score(number, responses):
        row, count = rows[number], len(responses)
        values, by_function, events = rewards.score(
            job.reward_functions,
            list(settings.weights),
            [row["prompt"]] * count,
            [job.text(ids) for ids in responses],
            responses,
            {name: [value] * count for name, value in row["columns"].items()},
            settings.timeout_s,
        )
        events = [event for event in events if event["event"] == "reward_metric"]  # what is logged
        if settings.overlong_cache:
            lengths = np.asarray([len(ids) for ids in responses])
            by_function["overlong"] = shaping.overlong_penalty(
                lengths,
                max_len=job.policy.max_new_tokens,
                cache=settings.overlong_cache,
                factor=settings.overlong_penalty,
            )
            values = values + by_function["overlong"]
        return values.tolist(), events + rewards.group_metrics(by_function)

    def call(number, responses):
        try:
            values, events = launch.on_first(lambda: score(number, responses))
        except launch.LaunchError as error:  # process 0's, told to the others
            raise rewards.RewardError(str(error)) from error
        return np.asarray(values, np.float32), events

    return call


def plain(config: ConfigDict) -> dict[str, Any]:
    """The configuration as JSON values."""
    return json.loads(config.to_json())


def run(
    config: ConfigDict, workdir: pathlib.Path, signalled: Callable[[], str | None] = lambda: None
) -> dict[str, Any]:
    """Trains, or resumes, the run in `workdir` and returns its receipt.

    Args:
      signalled: from interrupt.caught_signals.

    Raises:
      ValueError: bad input.
      NoSignalError: config.grpo.stop_without_signal; checkpoint and receipt are written.
      RewardError: a reward function failed; checkpoint and receipt are written, but before the first step.
      Interrupted: a signal came; likewise.
    """
    if (workdir / receipt.CONFIG_FILE).exists():
        receipt.bind_config(workdir, plain(config))  # another configuration's folder: said before weights are read
    job = load_job(config, workdir)
    with contextlib.ExitStack() as opened:
        _open_on_first(opened, lambda: run_lock(workdir))
        return _train(job, workdir, signalled)


class NoSignalError(ValueError):
    """As many steps in a row as config.grpo.stop_without_signal had groups of equal rewards alone."""


def _open_on_first(opened: contextlib.ExitStack, make: Callable[[], Any]) -> Any:
    """Opens on process 0 what it alone may hold, until `opened` closes; what it gives there, None elsewhere."""
    found = []
    launch.on_first(lambda: found.append(opened.enter_context(make())))
    return found[0] if found else None


def _train(job: Job, workdir: pathlib.Path, signalled: Callable[[], str | None]) -> dict[str, Any]:
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
    progress = Progress()
    if checkpoint.latest_step(folder) is not None:
        state, saved = checkpoint.restore(folder, state, expected=bound)
        progress = Progress(**saved["progress"])
        logging.info("resumed after step %d", int(state.step))
        if int(state.step) == config.steps and (workdir / "receipt.json").is_file():
            return json.loads((workdir / "receipt.json").read_text())  # what it says of the code that ran stays true
        launch.on_first(lambda: (workdir / "receipt.json").unlink(missing_ok=True))  # of a run that ended early
    table, first = lora.trainable_table(job.model.config, job.model.lora), launch.is_first()
    launch.on_first(lambda: write_whole(workdir / TRAINABLE_FILE, (json.dumps(table, indent=1) + "\n").encode()))
    if first:
        print(lora.format_table(table))

    def save(state, progress):
        metadata = bound | {"progress": dataclasses.asdict(progress)}
        checkpoint.save(folder, int(state.step), state, metadata, keep=config.checkpoint.keep)

    state, progress, ended = _steps(job, workdir, optimizer, state, progress, save, signalled)
    done = int(state.step)
    if not done:
        raise ended  # with nothing to keep
    if checkpoint.latest_step(folder) != done:
        save(state, progress)
    if first and not progress.signals:
        logging.warning(
            "none of %d steps had a signal: in each of the %d groups sampled the rewards are equal or unscorable, so "
            "that they have taught the policy nothing", done, progress.rows,
        )  # fmt: skip
    adapters = jax.tree.map(launch.to_host, state.adapters)
    by_signal = isinstance(ended, interrupt.Interrupted)
    status = "finished" if ended is None else "interrupted" if by_signal else "stopped"
    written = launch.on_first(lambda: finish(job, workdir, adapters, status))
    if ended is not None:
        raise ended
    return written


def _steps(job, workdir, optimizer, state, progress, save, signalled):
    """Takes and logs the steps that are left: the state, how far it is, and what ended the run before its last step."""
    config, done, held, first = job.config, int(state.step), (), launch.is_first()
    base_words = freshness.policy_fingerprint(job.model, job.base_sha)
    silent = not (first and sys.stderr.isatty())

    def between(*_):
        interrupt.check(signalled)

    with (
        contextlib.ExitStack() as opened,
        tqdm(total=config.steps, initial=done, desc="steps", unit="step", disable=silent) as bar,
    ):
        writer = _open_on_first(opened, lambda: metrics.MetricWriter(workdir, last_step=done))
        while done < config.steps:
            rows = Rows(job.dataset, job.build, seed=config.seed, start=progress.rows)
            started = time.perf_counter()
            try:
                state, reports, held = train.transaction(
                    job.model,
                    job.policy,
                    optimizer,
                    job.base,
                    base_words,
                    state,
                    [rows.prompt(number) for number in range(config.data.rows_per_step)],
                    reward_call(job, rows.taken),
                    jax.random.fold_in(jax.random.key(config.seed), done // job.policy.updates),
                    spare=rows.prompt,
                    held=held,
                    progress=between,
                    between=between,
                )
            except (interrupt.Interrupted, rewards.RewardError) as ended:  # the step in flight is dropped
                return state, progress, ended
            seconds = (time.perf_counter() - started) / len(reports)
            for step, report in enumerate(reports, start=done + 1):
                progress = progress.after(report, len(rows.taken) if step == done + 1 else 0)
                record = step_record(
                    report,
                    job.policy,
                    step,
                    [row["id"] for row in rows.taken],
                    seconds=seconds,
                    peak_bytes=max(launch.exchange(memory.peak_bytes()[0])),
                    extra={
                        "learning_rate": job.optimizer.learning_rate,
                        "num_tokens": float(progress.num_tokens),
                        "epoch": progress.rows / len(job.dataset.rows),
                    },
                )
                launch.on_first(lambda record=record: writer.write(record))
                if step == done + 1:  # later updates have the same rollout
                    said = samples.members(report.rollouts, record["row_ids"], job.text)
                    launch.on_first(lambda step=step, said=said: samples.write_samples(workdir, step, said))
                bar.set_postfix(reward=record["reward_mean"], loss=record["loss"])
                bar.update()
                if first:
                    print(step_line(record), flush=True)
            before, done = done, done + len(reports)
            if done == config.steps or done // config.checkpoint.every > before // config.checkpoint.every:
                save(state, progress)
            if 0 < config.grpo.stop_without_signal <= progress.silent_steps and done < config.steps:
                told = (
                    f"{progress.silent_steps} steps in a row without a signal, up to step {done}: in every group the "
                    f"rewards are equal or unscorable; accepted: fewer than grpo.stop_without_signal="
                    f"{config.grpo.stop_without_signal}. Checkpoint and receipt are written"
                )
                return state, progress, NoSignalError(told)
    return state, progress, None


def step_line(record: dict[str, Any]) -> str:
    """A step for the eye."""
    reward = "none" if record["reward_mean"] is None else f"{record['reward_mean']:.4f}"
    resampled, left = len(record["resampled_row_ids"]), record["metrics"].get("dynamic_sampling/without_signal")
    stale, drift = "", record["metrics"].get("prefix_drift/signal")
    if record["refresh_policy"] != "every_step":
        stale = f"  prefix {record['prefix_age']} steps old" + ("" if drift is None else f", drift {drift:.4f}")
    told = f"  {resampled} resampled" + (f", {left:.0f} still without signal" if left else "") if resampled else ""
    return (
        f"step {record['step']:>4}  reward {reward}  loss {record['loss']:+.4f}  grad {record['grad_norm']:.3f}  "
        f"{record['seconds']['step']:.1f} s"
        + told
        + stale
        + ("  no signal" if record["metrics"]["frac_reward_zero_std"] == 1 else "")
        + (f"  skipped: {record['skip_reason']}" if record["skipped"] else "")
    )


def finish(job: Job, workdir: pathlib.Path, adapters: Params, status: str) -> dict[str, Any]:
    """Adapter, plots and receipt of a run that ended; for one process, which has the adapters on its host."""
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
        status=status,
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
        with launch.ends_with_the_others(cluster), interrupt.caught_signals() as signalled:
            run(values.config, pathlib.Path(values.workdir), signalled)
    except interrupt.Interrupted as signal:
        launch.say(f"interrupted by {signal}; {launch.RESUME}")
        sys.exit(interrupt.EXIT_CODE)
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
