"""The main job: GRPO on long prompts from a Hugging Face checkpoint and dataset rows.

python experiments/train_grpo.py --config=experiments/configs/grpo.py --workdir=runs/mine \
    --config.model.checkpoint=DIR --config.data.paths='("rows.jsonl",)'

Run again with the same folder to resume; another configuration is refused.
"""

import dataclasses
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags
from tqdm import tqdm

from longstraw_jax import config as config_lib
from longstraw_jax import fingerprint, lora, sharding, train
from longstraw_jax.evidence import memory, plots, receipt
from longstraw_jax.io import adapter, checkpoint, data, hf_checkpoint, metrics, prompt, tokenizer
from longstraw_jax.io.run_lock import run_lock
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.model import decoder
from longstraw_jax.prefix import freshness
from longstraw_jax.rl import columns, objectives, rewards
from longstraw_jax.types import Model, Params

# Which code ran each operation, as receipts record it.
KERNELS = {op: "reference" for op in ("indexer_topk", "sparse_mla", "grouped_matmul", "chunked_logprob")}


TRAINABLE_FILE = "trainable.json"  # which arrays train, their shapes and targets


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything a run needs, loaded and checked before anything compiles."""

    config: ConfigDict
    model: Model
    policy: train.PolicyConfig
    optimizer: train.OptimizerConfig
    base: Params
    base_sha: str
    dataset: data.Dataset
    tokenizer: tokenizer.Tokenizer
    build: Callable[[Any], np.ndarray]  # a row's prompt -> token ids
    reward_functions: list[rewards.RewardFunction]


def lora_config(config: ConfigDict) -> config_lib.LoraConfig:
    """Targets of rank above 0."""
    chosen = ((name, c.rank, float(c.alpha)) for name, c in sorted(config.lora.items()) if c.rank)
    return config_lib.LoraConfig(tuple(chosen))


def objective_config(config: ConfigDict) -> objectives.GRPOConfig:
    """The loss part of config.grpo; tis_cap 0 means none."""
    names = {field.name for field in dataclasses.fields(objectives.GRPOConfig)}
    chosen = {name: value for name, value in config.grpo.items() if name in names}
    return objectives.GRPOConfig(**chosen | {"tis_cap": chosen["tis_cap"] or None})


def set_devices(config: ConfigDict) -> None:
    """Splits the CPU into devices if asked to; must come before JAX's first device query."""
    if config.mesh.emulate:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.mesh.devices)


def check_values(config: ConfigDict) -> None:
    """Ranges that nothing checks before the first step needs them. Raises ValueError."""
    if config.steps < 1 or config.grpo.updates < 1 or config.steps % config.grpo.updates:
        raise ValueError(f"steps={config.steps}; accepted: a positive multiple of grpo.updates={config.grpo.updates}")
    for field, value, low in (
        ("data.rows_per_step", config.data.rows_per_step, 1),
        ("data.prompt_tokens", config.data.prompt_tokens, 0),
        ("checkpoint.every", config.checkpoint.every, 1),
        ("checkpoint.keep", config.checkpoint.keep, 1),
        ("model.latent_norm_eps", config.model.latent_norm_eps, 0),
        ("mesh.devices", config.mesh.devices, 1),
    ):
        if not value >= low:
            raise ValueError(f"{field}={value}; accepted: at least {low}")
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"seed={config.seed}; accepted: 0 to {2**32 - 1}")
    if config.data.document not in ("none", "python"):
        raise ValueError(f"data.document={config.data.document!r}; accepted: 'none' or 'python'")
    if config.data.document == "python" and not config.data.prompt_tokens:
        raise ValueError("data.prompt_tokens=0; accepted with data.document='python': the exact prompt length")
    if not config.model.checkpoint:
        raise ValueError("model.checkpoint=''; accepted: a Hugging Face checkpoint directory")
    names, weights = tuple(config.reward.functions), tuple(config.reward.weights)
    if not names or len(set(names)) != len(names):
        raise ValueError(f"reward.functions={names}; accepted: at least one, each once")
    if len(weights) != len(names) or not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"reward.weights={weights}; accepted: {len(names)} finite numbers, one a function")
    for field in ("timeout_s", "answer_timeout_s"):
        if not 0 < config.reward[field] < math.inf:
            raise ValueError(f"reward.{field}={config.reward[field]}; accepted: seconds above 0")


def read_dataset(config: ConfigDict) -> data.Dataset:
    """The configured rows; each has an answer if a built-in reward compares with one. Raises DataError."""
    paths = list(config.data.paths)
    dataset = data.read_rows(paths)
    if {"exact_match", "boxed_math"} & set(config.reward.functions):
        names = [name for name in columns.ANSWER_COLUMNS if any(name in row["columns"] for row in dataset.rows)]
        if any(all(row["columns"].get(name) is None for name in names) for row in dataset.rows):
            data.read_rows(paths, required=names[-1:] or ["ground_truth"])  # names file and row
    return dataset


def prompt_builder(
    config: ConfigDict, tokens: tokenizer.Tokenizer, template: prompt.ChatTemplate
) -> Callable[[Any], np.ndarray]:
    """A row's prompt -> token ids [S]."""
    target, document = config.data.prompt_tokens or None, None
    if config.data.document == "python":
        document = prompt.python_documentation_text(target)  # a token is at least a byte
    return functools.partial(
        prompt.build_prompt, tokenizer=tokens, template=template, document=document, target_tokens=target
    )


def longest_prompt(config: ConfigDict, dataset: data.Dataset, build: Callable[[Any], np.ndarray]) -> int:
    """Tokens of the longest prompt. Raises PromptError that names the row, so that no run meets it midway."""
    longest = 0
    for row in dataset.rows:
        try:
            longest = max(longest, build(row["prompt"]).size)
        except prompt.PromptError as error:
            where = f"dataset row of id {row['id']!r}, data.prompt_tokens={config.data.prompt_tokens}"
            raise prompt.PromptError(f"{where}: {error}") from error
    return longest


def load_job(config: ConfigDict) -> Job:
    """Loads and checks the configuration's parts, cheapest first. Raises ValueError for bad input."""
    check_values(config)
    set_devices(config)
    mesh = sharding.make_mesh(config.mesh.devices)
    optimizer, adapters = train.OptimizerConfig(**config.optimizer), lora_config(config)
    folder = pathlib.Path(config.model.checkpoint)
    architecture = config_lib.load_model_config(folder, latent_norm_eps=config.model.latent_norm_eps or None)
    if config.model.yarn_positions:
        architecture = config_lib.extend_positions(architecture, config.model.yarn_positions)
    model = decoder.make_model(architecture, mesh=mesh, lora=adapters)
    lora.sites(architecture, adapters)
    tokens = tokenizer.load_tokenizer(folder)
    if tokens.vocab_size > architecture.vocab_size:
        raise ValueError(
            f"{folder}: tokenizer of {tokens.vocab_size} ids; accepted: at most vocab_size={architecture.vocab_size}"
        )
    dataset, build = read_dataset(config), prompt_builder(config, tokens, prompt.load_chat_template(folder))
    longest = longest_prompt(config, dataset, build)
    architecture.check_length(longest + config.grpo.max_new_tokens)
    shared = ("mode", "group", "max_new_tokens", "temperature", "top_p", "updates")
    policy = train.PolicyConfig(
        eos_ids=tokens.eos_ids,
        capacity=longest,
        chunk=config.capture.chunk,
        keep_selection=config.capture.keep_selection,
        objective=objective_config(config),
        **{name: config.grpo[name] for name in shared},
    )
    functions = [
        rewards.load(name, answer_timeout_s=config.reward.answer_timeout_s) for name in config.reward.functions
    ]
    _, base = hf_checkpoint.load(folder, architecture, mesh)
    return Job(
        config, model, policy, optimizer, base, fingerprint.tree_fingerprint(base), dataset, tokens, build, functions
    )


def reward_call(job: Job, rows: list[dict[str, Any]]) -> train.RewardCall:
    """Scores the responses of each of the step's prompts with the configured functions."""

    def call(number, responses):
        row, count = rows[number], len(responses)
        return rewards.score(
            job.reward_functions,
            list(job.config.reward.weights),
            [row["prompt"]] * count,
            [job.tokenizer.decode(ids, skip_special=True) for ids in responses],
            responses,
            {name: [value] * count for name, value in row["columns"].items()},
            job.config.reward.timeout_s,
        )[::2]

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
    for event in (event for r in rollouts for event in r.events if event["event"] == "reward_metric"):
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
        "peak_bytes": memory.peak_bytes()[0],
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
    job = load_job(config)
    with run_lock(workdir):
        return _train(job, workdir)


def _train(job: Job, workdir: pathlib.Path) -> dict[str, Any]:
    config = job.config
    sha = receipt.bind_config(workdir, plain(config))
    optimizer = train.make_optimizer(job.optimizer)
    state = train.init_state(job.model, optimizer, config.seed)
    bound = {
        "config": sha,
        "dataset": fingerprint.sha256_json(list(job.dataset.files.values())),
        "base": job.base_sha,
        # Tokenizer, template and document decide what a row's prompt is.
        "prompts": fingerprint.sha256_json([job.tokenizer.sha256, job.build(job.dataset.rows[0]["prompt"]).tolist()]),
        "mode": job.policy.mode,
        "lora": {name: {"rank": r, "alpha": a} for name, r, a in job.model.lora.targets},
    }
    folder = workdir / "checkpoints"
    if checkpoint.latest_step(folder) is not None:
        state, _ = checkpoint.restore(folder, state, expected=bound)
        logging.info("resumed after step %d", int(state.step))
        if int(state.step) == config.steps and (workdir / "receipt.json").is_file():
            return json.loads((workdir / "receipt.json").read_text())  # what it says of the code that ran stays true
    table = lora.trainable_table(job.model.config, job.model.lora)
    write_whole(workdir / TRAINABLE_FILE, (json.dumps(table, indent=1) + "\n").encode())
    print(lora.format_table(table))
    base_words = freshness.policy_fingerprint(job.model, job.base_sha)
    held, done = None, int(state.step)
    with (
        metrics.MetricWriter(workdir, last_step=done) as writer,
        tqdm(total=config.steps, initial=done, desc="steps", unit="step", disable=not sys.stderr.isatty()) as bar,
    ):
        while done < config.steps:
            rollout = done // job.policy.updates
            order = data.row_order(len(job.dataset.rows), config.seed, rollout, config.data.rows_per_step)
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
                jax.random.fold_in(jax.random.key(config.seed), rollout),
                held=held,
            )
            seconds = (time.perf_counter() - started) / len(reports)
            for number, report in enumerate(reports, start=done + 1):
                record = step_record(job, number, rows, report, seconds)
                writer.write(record)
                bar.set_postfix(reward=record["reward_mean"], loss=record["loss"])
                bar.update()
                print(step_line(record), flush=True)
            before, done = done, done + len(reports)
            if done == config.steps or done // config.checkpoint.every > before // config.checkpoint.every:
                checkpoint.save(folder, done, state, bound, keep=config.checkpoint.keep)
    return finish(job, workdir, state)


def step_line(record: dict[str, Any]) -> str:
    """A step for the eye."""
    reward = "none" if record["reward_mean"] is None else f"{record['reward_mean']:.4f}"
    return (
        f"step {record['step']:>4}  reward {reward}  loss {record['loss']:+.4f}  grad {record['grad_norm']:.3f}  "
        f"{record['seconds']['step']:.1f} s" + (f"  skipped: {record['skip_reason']}" if record["skipped"] else "")
    )


def finish(job: Job, workdir: pathlib.Path, state: train.TrainState) -> dict[str, Any]:
    """Adapter, plots and receipt of a finished run."""
    steps = metrics.read_steps(workdir / metrics.STEPS_FILE)
    adapter.export_peft(
        workdir / "adapter", job.model.config, job.model.lora, state.adapters,
        base_model_name=job.config.model.checkpoint,
    )  # fmt: skip
    artifacts = {path: "plot" for path in plots.write_plots(workdir, steps)}
    artifacts |= {f"adapter/{path.name}": "adapter" for path in sorted((workdir / "adapter").iterdir())}
    artifacts[TRAINABLE_FILE] = "report"
    dataset = job.dataset
    return receipt.write_receipt(
        workdir,
        config=plain(job.config),
        mesh_shape={sharding.AXIS: job.model.devices},
        kernels=KERNELS,
        weights_fingerprint=job.base_sha,
        dataset_files=dataset.files,
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


def fail(error: Exception | str) -> NoReturn:
    """Ends a run on bad input: one line and exit code 2."""
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    sys.exit(2)


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    if len(argv) > 1 or values.config is None or values.workdir is None:
        fail(f"arguments {argv[1:]}; accepted: --config=FILE --workdir=DIR and --config.field=value")
    try:
        run(values.config, pathlib.Path(values.workdir))
    except (ValueError, OSError) as error:
        fail(error)
    print(f"receipt: {pathlib.Path(values.workdir) / 'receipt.json'}")


def parse_flags(argv: list[str]) -> list[str]:
    """absl's parsing with the exit code of bad input: an unknown field or a value of the wrong type."""
    try:
        return flags.FLAGS(argv)
    except (AttributeError, KeyError) as error:  # holds the one name that the configuration lacks
        name = str(error).strip("'\"")
        given = [a.partition("=")[0] for a in argv if f".{name}" in a.partition("=")[0]]
        fail(f"{', '.join(given) or '--config'}: no field {name!r}; accepted: those of the --config file")
    except (flags.Error, TypeError, ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "Configuration file, see experiments/configs/grpo.py.")
    flags.DEFINE_string("workdir", None, "Run folder: receipt.json, steps.jsonl, checkpoints, plots, adapter.")
    app.run(main, flags_parser=parse_flags)
