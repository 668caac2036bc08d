"""What a stale prompt costs and which captures it saves: drift by age, refresh policies side by side, `frozen` mode.

python experiments/make_tiny_checkpoint.py --out=runs/tiny
python experiments/refresh_policy.py --config.model.checkpoint=runs/tiny --tokens=65536 --out=runs/refresh

staleness: a prompt is captured, then the adapters train on it and the capture stays. After each of --after steps the
stale state stands beside a fresh capture by the same adapters: policy loss, mean negative log-likelihood and gradient
of the group sampled at the capture, and mean |difference of log-probability| over it and over a group sampled now.
`signal` is what a drift policy sees without a capture: the stale state's log-probabilities now against those then.

policies: config.steps steps from one start with the same keys, under every_step, every_n of --every and drift with
--bounds (schedule and probe are config.refresh.every and probe_tokens): captures, seconds in them, rewards, and at the
end the mean reward of fresh responses from a fresh capture, of the trained prompt and of another question.

frozen: --frozen_steps steps on one capture, whose pages are after them, bit for bit, what they were before.

Without data.paths there are two questions after Python's documentation and the reward of config.reward; with it the
first row trains and the second, if there is one, is the other question. Every row of the receipt is written as it is
done: the command goes on after the last one, also with further parts, seeds or policies. Positions beyond the
checkpoint's come by YaRN.
"""

import dataclasses
import json
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import prefix_gradient
import train_grpo
from absl import app, flags
from ml_collections import ConfigDict

from longstraw_jax import command, fingerprint, job_config, lora, replay, rollout, train
from longstraw_jax import config as config_lib
from longstraw_jax.evidence import figures, kernels, receipt, result_plots
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.phases import Clock
from longstraw_jax.prefix import freshness, refresh
from longstraw_jax.prefix.refresh import RefreshPolicy
from longstraw_jax.types import PrefixState

PARTS = ("staleness", "policies", "frozen")
QUESTIONS = (
    "How many digits does the documentation above hold? Answer with digits only.",
    "In which year was the documentation above written? Answer with digits only.",
)


@dataclasses.dataclass(frozen=True)
class Bench:
    """What the parts share: the job, the row that trains and the other one, their ids, and the base's fingerprint."""

    job: train_grpo.Job
    rows: list[dict[str, Any]]
    prompts: list[np.ndarray]
    words: np.ndarray


def start(bench: Bench, seed: int) -> train.TrainState:
    """Adapters and moments before the first step."""
    return train.init_state(bench.job.model, train.make_optimizer(bench.job.optimizer), seed)


def step(
    bench: Bench, policy: rollout.PolicyConfig, state: train.TrainState, held: refresh.Resident | None, seed: int
) -> tuple[train.TrainState, train.StepReport, refresh.Resident]:
    """One transaction on the trained prompt; its key is of the seed and the step alone."""
    job, key = bench.job, jax.random.fold_in(jax.random.key(seed), int(state.step))
    optimizer, reward = train.make_optimizer(job.optimizer), train_grpo.reward_call(job, bench.rows)
    args = (job.model, policy, optimizer, job.base, bench.words, state, bench.prompts[:1], reward, key)
    state, (report,), (held,) = train.transaction(*args, held=() if held is None else (held,))
    return state, report, held


def captured(bench: Bench, policy: rollout.PolicyConfig, adapters: Any, number: int = 0) -> refresh.Resident:
    """A fresh capture of a row's prompt."""
    job = bench.job
    return rollout.resident(job.model, policy, job.base, bench.words, adapters, bench.prompts[number], None)


def sampled(
    bench: Bench, policy: rollout.PolicyConfig, adapters: Any, held: refresh.Resident, key: jax.Array, number: int = 0
) -> tuple[rollout.Group, rollout.Rollout]:
    """A rewarded group from a resident prompt."""
    reward = train_grpo.reward_call(bench.job, bench.rows)
    return rollout.roll_out(bench.job.model, policy, bench.job.base, adapters, held, number, reward, key, Clock())


def logprobs(
    bench: Bench, policy: rollout.PolicyConfig, adapters: Any, prefix: PrefixState, group: rollout.Group
) -> np.ndarray:
    """Log-probabilities of a group's own tokens, one after the other, fp64."""
    batch = (group.inputs, group.targets, group.lengths, policy.temperature)
    logp, _ = replay.score(bench.job.model, bench.job.base, adapters, prefix, *batch)
    inside = np.arange(group.inputs.shape[1]) < group.lengths[:, None]
    return np.asarray(logp, np.float64)[inside]


def loss_and_gradient(
    bench: Bench, policy: rollout.PolicyConfig, adapters: Any, prefix: PrefixState, group: rollout.Group
) -> tuple[float, list[np.ndarray]]:
    """A group's loss and its gradient (sums over the group), on the host."""
    mesh = bench.job.model.mesh
    copies = lora.per_device(adapters, mesh)
    total, _ = train.add_group(bench.job.model, policy, bench.job.base, copies, prefix, group, None)
    gradient = [np.asarray(g) for g in jax.tree.leaves(lora.finalise(total.grads, mesh))]
    return float(total.loss.sum) / max(float(total.loss.count), 1.0), gradient


def staleness(bench: Bench, policy: rollout.PolicyConfig, seed: int, after: list[int]) -> Iterator[dict[str, Any]]:
    """A row for each number of steps that the one capture has outlived."""
    policy = dataclasses.replace(policy, mode="detached", refresh=RefreshPolicy("every_n", every=max(after) + 1))
    state, key = start(bench, seed), jax.random.fold_in(jax.random.key(seed), 2**31)
    held = captured(bench, policy, state.adapters)
    group, _ = sampled(bench, policy, state.adapters, held, jax.random.fold_in(key, 0))
    then = logprobs(bench, policy, state.adapters, held.prefix, group)
    twice = dataclasses.replace(policy, updates=2)  # for old log-probabilities, which clipping compares with
    args = (bench.job.model, twice, bench.job.base, bench.words, state.adapters, held, group)
    group, silent = rollout.scored(*args), 0
    for number in range(1, max(after) + 1):
        state, report, held = step(bench, policy, state, held, seed)
        silent += not report.rollouts[0].carries_signal
        if number not in after:
            continue
        fresh, adapters = captured(bench, policy, state.adapters), state.adapters
        now, _ = sampled(bench, policy, adapters, held, jax.random.fold_in(key, number))
        both = [loss_and_gradient(bench, policy, adapters, x.prefix, group) for x in (held, fresh)]
        stale, true = (logprobs(bench, policy, adapters, x.prefix, group) for x in (held, fresh))
        on_policy = [logprobs(bench, policy, adapters, x.prefix, now) for x in (held, fresh)]
        (stale_loss, stale_gradient), (fresh_loss, fresh_gradient) = both
        compared = prefix_gradient.figures(stale_gradient, fresh_gradient)
        yield {
            "seed": seed,
            "steps": number,
            "skipped_steps": int(state.skipped),
            "silent_steps": silent,  # of equal rewards, which move the adapters little or not at all
            "prefix_age": int(state.step) - held.captured_at,
            "loss_stale": stale_loss,
            "loss_fresh": fresh_loss,
            "nll_stale": -float(stale.mean()),
            "nll_fresh": -float(true.mean()),
            "nll_difference_percent": 100 * abs(float(stale.mean() / true.mean()) - 1),
            "mean_abs_logp_difference": float(np.abs(stale - true).mean()),
            "largest_abs_logp_difference": float(np.abs(stale - true).max()),
            "on_policy_mean_abs_logp_difference": float(np.abs(on_policy[0] - on_policy[1]).mean()),
            "signal": float(np.abs(stale - then).mean()),
            "gradient_cosine": compared["cosine"],
            "gradient_relative_l2": compared["relative_l2"],
            "sampler_gap": report.metrics["sampling/max_abs_log_ratio"],
        }


def final_score(
    bench: Bench, policy: rollout.PolicyConfig, adapters: Any, number: int, key: jax.Array, groups: int
) -> dict[str, Any]:
    """Mean reward of new responses to a row's prompt from a fresh capture, with its standard error."""
    held = captured(bench, policy, adapters, number)
    found = [sampled(bench, policy, adapters, held, jax.random.fold_in(key, g), number)[1] for g in range(groups)]
    rewards = [float(x) for rolled in found for x in rolled.rewards if np.isfinite(x)]
    error = figures.standard_error(rewards)
    return {"mean": figures.mean(rewards), "standard_error": error, "responses": len(rewards)}


def policies(every: list[int], bounds: list[float], chosen: RefreshPolicy) -> dict[str, RefreshPolicy]:
    """Name -> refresh policy; schedule and probe of drift are those of `chosen`."""
    found = {"every_step": RefreshPolicy("every_step")}
    found |= {f"every_n {n}": RefreshPolicy("every_n", every=n) for n in every}
    drift = dataclasses.replace(chosen, policy="drift")
    return found | {f"drift {bound:g}": dataclasses.replace(drift, bound=bound) for bound in bounds}


def trained(
    bench: Bench, policy: rollout.PolicyConfig, seed: int, steps: int, groups: int
) -> tuple[dict[str, Any], refresh.Resident]:
    """Steps under one policy, and what they cost and taught; and the prompt left resident."""
    state, held, reports, started = start(bench, seed), None, [], time.perf_counter()
    for _ in range(steps):
        state, report, held = step(bench, policy, state, held, seed)
        reports.append(report)
    seconds = time.perf_counter() - started
    key = jax.random.fold_in(jax.random.key(seed), 2**31)
    scores = [final_score(bench, policy, state.adapters, n, key, groups) for n in range(len(bench.rows))]
    drifts = [(number, r.drift) for number, r in enumerate(reports, start=1) if r.drift is not None]
    return {
        "seed": seed,
        "steps": steps,
        "captures": sum(r.captures for r in reports),
        "ages": [r.prefix_age for r in reports],
        "skipped_steps": int(state.skipped),
        "silent_steps": sum(not r.rollouts[0].carries_signal for r in reports),
        "seconds": seconds,
        "capture_seconds": sum(r.seconds["capture"] for r in reports),
        "rewards": [figures.mean([float(x) for x in r.rollouts[0].rewards if np.isfinite(x)]) for r in reports],
        "sampler_gaps": [r.metrics["sampling/max_abs_log_ratio"] for r in reports],
        "drift": [{"step": number, "signal": drift.signal, "truth": drift.truth} for number, drift in drifts],
        "score": scores[0],
        "other_score": scores[1] if len(scores) > 1 else None,
        "adapters": fingerprint.tree_fingerprint(state.adapters),
    }, held


def pages_fingerprint(held: refresh.Resident) -> str:
    """Of every bit of the resident pages."""
    return fingerprint.tree_fingerprint({"latents": held.prefix.latents, "index_keys": held.prefix.index_keys})


def frozen(bench: Bench, policy: rollout.PolicyConfig, seed: int, steps: int, groups: int) -> dict[str, Any]:
    """Steps of `frozen` mode on one capture, whose pages are after them what another capture's were before."""
    policy = dataclasses.replace(policy, mode="frozen", refresh=RefreshPolicy())
    before = pages_fingerprint(captured(bench, policy, None))
    row, held = trained(bench, policy, seed, steps, groups)
    return row | {"pages_before": before, "pages_after": pages_fingerprint(held)}


def prepare(config: ConfigDict, values: Any) -> Bench:
    """The job on its rows, loaded and checked. Raises ValueError for bad input."""
    with tempfile.TemporaryDirectory() as scratch:
        if tuple(config.data.paths) == ("",):
            made = [
                {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": "0"}, "id": number}
                for number, text in enumerate(QUESTIONS)
            ]
            path = pathlib.Path(scratch) / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in made))
            config.data.paths = (str(path),)
        if values.tokens:
            config.data.prompt_tokens = values.tokens
        native = config_lib.load_model_config(job_config.checkpoint_folder(config)).max_position_embeddings
        positions = values.tokens + config.grpo.max_new_tokens
        if positions > native and not config.model.yarn_positions:
            config.model.yarn_positions = positions
        job = train_grpo.load_job(config, pathlib.Path(values.out))
        rows = list(job.dataset.rows[:2])
        prompts = [job.build(row["prompt"]) for row in rows]
    return Bench(job, rows, prompts, freshness.policy_fingerprint(job.model, job.base_sha))


def numbers(name: str, given: list[str], kind: type, least: float) -> list[Any]:
    """A flag's numbers in order, each once. Raises ValueError."""
    try:
        found = sorted({kind(x) for x in given})
    except ValueError:
        found = []
    if not found or not all(least <= x < float("inf") for x in found):
        said = "whole numbers" if kind is int else "finite numbers"
        raise ValueError(f"--{name}={','.join(given)}; accepted: {said} of at least {least}, separated by commas")
    return found


def check(config: ConfigDict, values: Any) -> None:
    """Raises ValueError for flags out of range, and for fields that would add a prompt to the one that is measured."""
    for name, value in (
        ("capture.resident_bytes", config.capture.resident_bytes),
        ("grpo.max_resamples", config.grpo.max_resamples),
    ):
        if value:
            raise ValueError(f"{name}={value}; accepted: 0, as one prompt is measured")
    if not values.parts or set(values.parts) - set(PARTS):
        raise ValueError(f"--parts={','.join(values.parts)}; accepted: of {', '.join(PARTS)}")
    for name, least in (("tokens", 0), ("eval_groups", 1), ("frozen_steps", 1)):
        if getattr(values, name) < least:
            raise ValueError(f"--{name}={getattr(values, name)}; accepted: at least {least}")


def begun(path: pathlib.Path, setup: dict[str, Any]) -> dict[str, Any]:
    """The receipt so far, or a new one. Raises ValueError where the file's rows are of another set-up."""
    if not path.exists():
        return {"complete": False, "setup": setup, "code": []} | {part: [] for part in PARTS}
    found = json.loads(path.read_text())
    setup = json.loads(json.dumps(setup))
    if differ := [name for name in setup if found["setup"].get(name) != setup[name]]:
        raise ValueError(f"--out: {path} is of another {', '.join(differ)}; accepted: the same set-up, or a new folder")
    return found


def run(config: ConfigDict, values: Any) -> dict[str, Any]:
    """The receipt, written as each row is done. Raises ValueError or OSError for bad input."""
    check(config, values)
    seeds, after = numbers("seeds", values.seeds, int, 0), numbers("after", values.after, int, 1)
    every, bounds = numbers("every", values.every, int, 1), numbers("bounds", values.bounds, float, 0.0)
    config = config.copy_and_resolve_references()
    chosen = RefreshPolicy(**config.refresh)
    bench, out = prepare(config, values), pathlib.Path(values.out)
    job = bench.job
    by = receipt.made_by(job.model.devices)
    policy = dataclasses.replace(job.policy, updates=1, mode="detached", refresh=chosen)
    resolved = train_grpo.plain(config)
    del resolved["data"]["paths"]  # the prompts' own hashes say what they hold
    setup = {
        "config": resolved,
        "weights_fingerprint": job.base_sha,
        "prompts": [{"tokens": ids.size, "sha256": fingerprint.sha256_json(ids.tolist())} for ids in bench.prompts],
        "eval_groups": values.eval_groups,
        "device": by["device"],
        "kernels": kernels.implementations(job.model),
        "python": by["python"],
        "packages": by["packages"],
    }
    path = out / "refresh_policy.json"
    result, code = begun(path, setup), by["code"]

    def keep(part, row, **named):
        if code not in result["code"]:
            result["code"].append(code)  # each that gave a row
        result[part].append(named | row)
        write_whole(path, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
        print(f"{part}: {LINES[part](result[part][-1])}", flush=True)

    def missing(part, **named):
        return not any(all(row[name] == value for name, value in named.items()) for row in result[part])

    for seed in seeds if "staleness" in values.parts else []:
        left = [number for number in after if missing("staleness", seed=seed, steps=number)]
        for row in staleness(bench, policy, seed, left) if left else []:
            keep("staleness", row)
    if "policies" in values.parts:
        some = policies(every, bounds, chosen)
        left = [(seed, name) for seed in seeds for name in some if missing("policies", seed=seed, policy=name)]
        if left:  # compiles everything, so that no policy's seconds hold it
            compiling = dataclasses.replace(policy, refresh=RefreshPolicy("drift", bound=0.0))
            trained(bench, compiling, seeds[0], 2, 1)
        for seed, name in left:
            used = dataclasses.replace(policy, refresh=some[name])
            keep("policies", trained(bench, used, seed, config.steps, values.eval_groups)[0], policy=name)
    for seed in seeds if "frozen" in values.parts else []:
        if missing("frozen", seed=seed, steps=values.frozen_steps):
            keep("frozen", frozen(bench, policy, seed, values.frozen_steps, values.eval_groups))
    result["complete"] = all(result[part] for part in PARTS)
    write_whole(path, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    write_whole(out / "refresh_policy.txt", table(result).encode())
    if result["staleness"] or result["policies"]:
        write_whole(out / "refresh_policy.png", result_plots.refresh_policy(result))
    return result


def staleness_line(row: dict[str, Any]) -> str:
    """A row for the eye."""
    return (
        f"seed {row['seed']}  {row['steps']:>3} steps  loss {row['loss_stale']:+.4f} for {row['loss_fresh']:+.4f}, "
        f"NLL off by {row['nll_difference_percent']:.4g} %  "
        f"|difference of log-prob| {row['mean_abs_logp_difference']:.4g} "
        f"(on policy {row['on_policy_mean_abs_logp_difference']:.4g}, signal {row['signal']:.4g})  gradient cosine "
        + ("-" if row["gradient_cosine"] is None else f"{row['gradient_cosine']:.4f}")
    )


def trained_line(row: dict[str, Any]) -> str:
    """A row for the eye."""

    def told(score):
        error = "" if score["standard_error"] is None else f" ± {score['standard_error']:.4f}"
        return "-" if score["mean"] is None else f"{score['mean']:.4f}{error}"

    other = "" if row["other_score"] is None else f", other question {told(row['other_score'])}"
    return (
        f"seed {row['seed']}  {row.get('policy', 'frozen'):<12} {row['captures']:>3} captures in {row['steps']} steps, "
        f"{row['capture_seconds']:.1f} of {row['seconds']:.1f} s, oldest {max(row['ages'])}  "
        f"score {told(row['score'])}{other}"
    )


def frozen_line(row: dict[str, Any]) -> str:
    """A row for the eye."""
    same = "the same" if row["pages_after"] == row["pages_before"] else "OTHER"
    return f"{trained_line(row)}; {same} pages after as before"


LINES = {"staleness": staleness_line, "policies": trained_line, "frozen": frozen_line}


def table(result: dict[str, Any]) -> str:
    """Every row for the eye."""
    return "".join(f"{part}: {LINES[part](row)}\n" for part in PARTS for row in result[part])


def main(_: list[str]) -> None:
    values = flags.FLAGS
    try:
        train_grpo.set_devices(values.config)
        run(values.config, values)
    except (ValueError, OSError) as error:
        command.fail(error)
    print(f"receipt: {pathlib.Path(values.out) / 'refresh_policy.json'}")


if __name__ == "__main__":
    default = pathlib.Path(__file__).parent / "configs" / "refresh_policy.py"
    command.define_config(default, "The job; config.mesh.devices: of how many devices.")
    flags.DEFINE_integer("tokens", 65_536, "Prompt tokens, by data.prompt_tokens; 0: as the configuration says.")
    flags.DEFINE_list("seeds", ["0"], "Of adapters and sampling, each a run.")
    flags.DEFINE_list("parts", list(PARTS), "What to measure.")
    flags.DEFINE_list("after", ["1", "2", "4", "8"], "staleness: steps since the capture.")
    flags.DEFINE_list("every", ["2", "4", "8"], "policies: of every_n.")
    flags.DEFINE_list("bounds", ["0.3", "0.6"], "policies: of drift, nats a token.")
    flags.DEFINE_integer("eval_groups", 4, "Groups of responses of a final score.")
    flags.DEFINE_integer("frozen_steps", 64, "frozen: steps.")
    flags.DEFINE_string("out", "runs/refresh", "Folder of the receipt, the table and the plot.")
    app.run(main, flags_parser=command.parse_flags_alone)
