"""Whether GRPO raises a held-out score, by prefix-gradient mode: accuracy before, between and after, over seeds.

python experiments/learning_curves.py --config.job.model.checkpoint=experiments/reader --out=runs/learning
python experiments/learning_curves.py ... --modes=exact --seeds=1     # one run; the others in other sittings
python experiments/learning_curves.py ... --modes=                    # no run: what is there, aggregated

Every (mode, seed) is a run of the main job (train_grpo.py) in OUT/MODE_SEED, with its receipt, and resumes or is left
alone as that does. Its checkpoints are then judged on held-out prompts: a greedy answer each, captured and decoded as
in training, right if it is the expected one (exact_match). Training rows differ by seed and are the same for all modes;
held-out prompts are the same for all runs, and no training row has the task of one.

The task is chosen before any training, by this rule: the base model answers `held_out.rows` further prompts of each of
`task.kinds`; among the kinds of which it gets a share from `task.low` to `task.high` right, so that there is signal and
room, the one nearest to the middle of that range is taken; without such a kind nothing is trained. OUT/choice.json
keeps the shares. --config.task.kind=KIND states a kind instead, and the receipt says so.

Several processes may make runs in one folder: the first chooses the task and judges the base model. Seconds are those
of training steps alone, by the wall: they compare modes only where every run had the machine to itself. Writes
OUT/learning_curves.json, .txt and .png after each run. Exit status 2 on bad input.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import build_tasks
import eval_positions
import train_grpo
from absl import app, flags
from ml_collections import ConfigDict

from longstraw_jax import fingerprint, interrupt, job_config, rollout, train
from longstraw_jax.command import define_config, fail, parse_flags_alone
from longstraw_jax.evidence import learning, position_eval, receipt, result_plots
from longstraw_jax.io import checkpoint, metrics
from longstraw_jax.io.run_lock import run_lock
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.tasks import retrieval
from longstraw_jax.types import Params

HERE = pathlib.Path(__file__).parent
# First seeds of the tasks' rows, far enough apart that no two sets share one; a run's training rows follow by its seed.
HELD_OUT, CHOICE, TRAINING, APART = 0, 1 << 20, 2 << 20, 1 << 20
MOST_SEED = 1000
BASE, BEFORE = pathlib.Path("answers", "base"), "before.jsonl"  # what the base model answered


def check(config: ConfigDict, modes: Sequence[str], seeds: Sequence[int]) -> None:
    """Raises ValueError for what a field cannot be."""
    for mode in modes:
        rollout.check_mode(mode)
    if bad := [mode for mode in modes if not config.learning_rates[mode] >= 0]:
        raise ValueError(f"learning_rates.{bad[0]}={config.learning_rates[bad[0]]}; accepted: 0 or above")
    if bad := [seed for seed in seeds if not 0 <= seed < MOST_SEED]:
        raise ValueError(f"--seeds={bad[0]}; accepted: 0 to {MOST_SEED - 1}")
    job, task, wanted = config.job, config.task, config.held_out
    places = len(task.positions)
    if not places or not 0 < wanted.rows < APART or wanted.rows % places:
        raise ValueError(f"held_out.rows={wanted.rows}; accepted: a positive multiple of the {places} task.positions")
    if not 0 < wanted.every <= job.steps or job.steps % wanted.every or job.steps < 2:
        raise ValueError(f"held_out.every={wanted.every}; accepted: a divisor of job.steps={job.steps}, at least 2")
    if not 0 <= task.low < task.high <= 1:
        raise ValueError(f"task.low={task.low}, task.high={task.high}; accepted: 0 <= low < high <= 1")
    if not task.kind and not task.kinds:
        raise ValueError("task.kinds=(); accepted: at least one, or task.kind")
    if not -1 <= wanted.goal <= 1:
        raise ValueError(f"held_out.goal={wanted.goal}; accepted: a rise in accuracy, -1 to 1")
    try:
        for kind in [task.kind] if task.kind else task.kinds:
            retrieval.make(kind, 0, distractors=task.distractors, digits=task.digits)
        for position in task.positions:
            build_tasks.position_of(position)
    except ValueError as error:
        raise ValueError(f"task.{error}") from error


def check_job(config: ConfigDict, modes: Sequence[str]) -> None:
    """Raises ValueError for what the job cannot be in one of the modes, before rows, choice or answers are written."""
    if problems := job_config.value_problems(config.job):
        raise ValueError("; ".join(problems))
    tokens, response = config.task.tokens, config.job.grpo.max_new_tokens
    job_config.architecture(config.job).check_length(tokens + response, "task.tokens plus grpo.max_new_tokens")
    for mode in modes:
        job_config.policy_config(job_of(config, pathlib.Path("rows.jsonl"), mode, 0), (0,), tokens)


def write_rows(config: ConfigDict, path: pathlib.Path, kind: str, rows: int, first_seed: int) -> pathlib.Path:
    """At least `rows` rows of one kind, as many at each position, no two of one task; what is there stays as it is.

    Raises:
      ValueError: what is there was written with other parameters.
    """
    task, each = config.task, -(-rows // len(config.task.positions))
    shared = dict(
        checkpoint=config.job.model.checkpoint, tokens=[str(task.tokens)], kinds=[kind], seeds=each,
        distractors=task.distractors, digits=task.digits, native_window=0, text="python",
    )  # fmt: skip
    parameters = shared | {"positions": list(task.positions), "first_seed": first_seed}
    record = path.with_suffix(".json")
    if not (path.is_file() and record.is_file()):
        made = []
        for number, position in enumerate(task.positions):
            given = shared | {"positions": [position], "first_seed": first_seed + number * each}
            made += build_tasks.retrieval_rows(argparse.Namespace(**given))
        for index, row in enumerate(made):
            row["extra_info"]["index"] = index
        build_tasks.write_rows(path, made, parameters)
    found = json.loads(record.read_text())
    if found["parameters"] != parameters or found["sha256"] != fingerprint.sha256_file(path):
        raise ValueError(f"{path} holds other rows than {parameters}; accepted: another --out, or that file removed")
    return path


def job_of(config: ConfigDict, rows: pathlib.Path, mode: str, seed: int) -> ConfigDict:
    """The main job's configuration of one run; every evaluated step keeps its checkpoint."""
    job = config.job.copy_and_resolve_references()  # ConfigDict(job) would share its sections
    job.seed, job.grpo.mode, job.data.paths = seed, mode, (str(rows),)
    job.optimizer.learning_rate = config.learning_rates[mode] or job.optimizer.learning_rate
    job.checkpoint.every, job.checkpoint.keep = config.held_out.every, job.steps // config.held_out.every
    return job


def judging_job(config: ConfigDict, rows: pathlib.Path, mode: str) -> train_grpo.Job:
    """The job of a mode on held-out rows, scored by what is measured alone."""
    made = job_of(config, rows, mode, 0)
    made.reward.functions, made.reward.weights, made.reward.overlong_cache = ("exact_match",), (1.0,), 0
    return train_grpo.load_job(made, rows.parent)


def new_state(job: train_grpo.Job) -> train.TrainState:
    """As training starts: adapters that change nothing, so that the base answers by the programs of all others."""
    return train.init_state(job.model, train.make_optimizer(job.optimizer), 0)


def trained_adapters(job: train_grpo.Job, run: pathlib.Path, step: int) -> Params:
    """Adapters of a run after a step."""
    expected = {"base": job.base_sha, "mode": job.policy.mode}
    return checkpoint.restore(run / "checkpoints", new_state(job), step=step, expected=expected)[0].adapters


def judge(job: train_grpo.Job, adapters: Params, out: pathlib.Path, between: Callable[[], None]) -> list[int]:
    """1 for each prompt that is answered right, greedily, else 0; `out` keeps the answers as they come."""
    decode = argparse.Namespace(samples=1, temperature=0.0, top_p=1.0, seed=0)
    # Rows by their bytes, not their place: the folder may move to another machine.
    policy = [job.base_sha, fingerprint.tree_fingerprint(adapters), job.policy.mode]
    what = [list(job.dataset.files.values()), *policy, vars(decode)]
    done = position_eval.resume(out, fingerprint.sha256_json([*what, job.policy.max_new_tokens, *job.config.grpo.stop]))

    def progress(result):
        position_eval.keep(out, result)
        between()

    spent = {"capture": 0.0, "sample": 0.0}
    results = position_eval.evaluate(
        job.dataset.rows,
        job.build,
        eval_positions.decoder_of(job, adapters, decode, spent, eval_positions.Attended(0, 0)),
        job.text,
        eval_positions.scorer_of(job),
        done=done,
        progress=progress,
    )
    right = rights_of(results)
    print(f"{out}: {sum(right)} of {len(right)} right, {sum(spent.values()):.0f} s", flush=True)
    return right


def rights_of(results: Sequence[dict[str, Any]]) -> list[int]:
    """1 or 0 for each prompt's one answer."""
    return [int(result["samples"][0]["scores"]["exact_match"]) for result in results]


def chosen_kind(config: ConfigDict, out: pathlib.Path, between: Callable[[], None]) -> dict[str, Any]:
    """The kind by the rule above, and what it was chosen from; kept in choice.json.

    Raises:
      ValueError: no kind is in the range, or the folder's choice was made from other fields.
    """
    task = config.task
    asked = {name: task[name] for name in ("kinds", "tokens", "positions", "distractors", "digits", "low", "high")}
    asked = json.loads(json.dumps(asked)) | {"checkpoint": config.job.model.checkpoint, "stated": task.kind}
    path = out / "choice.json"
    if path.is_file():
        found = json.loads(path.read_text())
        if found["asked"] != asked:
            raise ValueError(f"{path} was made for {found['asked']}, given {asked}; accepted: another --out")
        return found
    shares: dict[str, float] = {}
    for kind in () if task.kind else task.kinds:
        rows = write_rows(config, out / "rows" / f"choice_{kind}.jsonl", kind, config.held_out.rows, CHOICE)
        job = judging_job(config, rows, "detached")
        right = judge(job, new_state(job).adapters, out / BASE / f"choice_{kind}.jsonl", between)
        shares[kind] = sum(right) / len(right)
    fit = {kind: share for kind, share in shares.items() if task.low <= share <= task.high}
    if not task.kind and not fit:
        raise ValueError(
            f"the base model answers {shares} of the kinds right; accepted: one from task.low={task.low} to "
            f"task.high={task.high}, other task fields, or a stated task.kind"
        )
    middle = (task.low + task.high) / 2
    kind = task.kind or min(fit, key=lambda name: abs(fit[name] - middle))
    found = {"kind": kind, "shares": shares, "asked": asked}
    write_whole(path, (json.dumps(found, indent=1) + "\n").encode())
    return found


def prepare(config: ConfigDict, out: pathlib.Path, between: Callable[[], None]) -> tuple[dict[str, Any], pathlib.Path]:
    """The task's choice and the held-out rows, which the base has answered then.

    Raises:
      ValueError: see `chosen_kind` and `write_rows`.
    """
    with run_lock(out / BASE, wait=True):  # whoever comes first does it for all
        choice = chosen_kind(config, out, between)
        rows = write_rows(config, out / "rows" / "held_out.jsonl", choice["kind"], config.held_out.rows, HELD_OUT)
        job = judging_job(config, rows, "detached")  # before a step all modes are the base model
        judge(job, new_state(job).adapters, out / BASE / BEFORE, between)
    return choice, rows


def train_and_judge(
    config: ConfigDict,
    out: pathlib.Path,
    kind: str,
    held_out: pathlib.Path,
    mode: str,
    seed: int,
    signalled: Callable[[], str | None],
) -> None:
    """Makes what is missing of one run: its training and the answers of every evaluated step."""
    needed = config.job.steps * config.job.data.rows_per_step
    training = write_rows(config, out / "rows" / f"train_{seed}.jsonl", kind, needed, TRAINING + seed * APART)
    run = out / f"{mode}_{seed}"
    train_grpo.run(job_of(config, training, mode, seed), run, signalled)
    job = judging_job(config, held_out, mode)
    with run_lock(answers_of(out, mode, seed, 0).parent):
        for step in evaluated_steps(config):
            answers = answers_of(out, mode, seed, step)
            judge(job, trained_adapters(job, run, step), answers, lambda: interrupt.check(signalled))


def evaluated_steps(config: ConfigDict) -> range:
    """Steps after which held-out prompts are answered; `before` is apart."""
    return range(config.held_out.every, config.job.steps + 1, config.held_out.every)


def answers_of(out: pathlib.Path, mode: str, seed: int, step: int) -> pathlib.Path:
    """Where the answers of a run after a step lie."""
    return out / "answers" / f"{mode}_{seed}" / f"{step}.jsonl"


def read_right(path: pathlib.Path, rows: int) -> list[int] | None:
    """1 or 0 for each prompt of a finished evaluation, else None."""
    if not path.is_file():
        return None
    results = [metrics.parse_strict_json(line) for line in position_eval.whole_lines(path)[1:]]
    right = rights_of(results)
    return right if len(right) == rows else None


def finished_runs(config: ConfigDict, out: pathlib.Path) -> list[dict[str, Any]]:
    """Every finished and judged run in the folder, by mode and seed."""
    found, rows = [], config.held_out.rows
    before = read_right(out / BASE / BEFORE, rows)
    for mode in rollout.MODES:
        for path in sorted(out.glob(f"{mode}_*/receipt.json"), key=lambda path: int(path.parent.name.split("_")[1])):
            seed, made = int(path.parent.name.split("_")[1]), json.loads(path.read_text())
            answers = [read_right(answers_of(out, mode, seed, step), rows) for step in evaluated_steps(config)]
            if before is None or None in answers or made["status"] != "finished":
                continue
            seconds = [0.0, *learning.training_seconds(metrics.read_steps(path.parent / metrics.STEPS_FILE))]
            steps = [0, *evaluated_steps(config)]
            found.append(
                {
                    "mode": mode,
                    "seed": seed,
                    "receipt_sha256": fingerprint.sha256_file(path),
                    "weights_fingerprint": made["weights_fingerprint"],
                    "points": [
                        {"step": step, "seconds": seconds[step], "right": right}
                        for step, right in zip(steps, [before, *answers], strict=True)
                    ],
                }
            )
    return found


def aggregate(config: ConfigDict, out: pathlib.Path, choice: dict[str, Any]) -> dict[str, Any]:
    """Writes receipt, table and plot of the finished runs; returns the receipt. Raises ValueError if there are none."""
    runs = finished_runs(config, out)
    if wrong := learning.problems(runs):
        raise ValueError(f"{out}: {wrong[0]}")
    plain = json.loads(config.to_json())
    result = {
        "claim": "learning",
        **receipt.made_by(config.job.mesh.devices),
        "config": plain,
        "config_sha256": fingerprint.sha256_json(plain),
        "choice": choice,
        "held_out": {"decode": "greedy", "score": "exact_match",
                     "sha256": fingerprint.sha256_file(out / "rows" / "held_out.jsonl")},
        "runs": runs,
        "summary": learning.summary(runs, config.held_out.goal),
    }  # fmt: skip
    text = "\n".join(learning.table(result["summary"])) + "\n"
    write_whole(out / "learning_curves.json", (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    write_whole(out / "learning_curves.txt", text.encode())
    write_whole(out / "learning_curves.png", result_plots.learning_curves(result))
    return result


def run(
    config: ConfigDict,
    out: pathlib.Path,
    modes: Sequence[str],
    seeds: Sequence[int],
    signalled: Callable[[], str | None] = lambda: None,
) -> dict[str, Any]:
    """Makes the runs that are missing and aggregates all that are there; returns the receipt.

    Raises:
      ValueError, OSError: bad input.
      Interrupted: a signal came; the same call goes on from where this one was.
    """
    check(config, modes, seeds)
    check_job(config, modes)
    choice, held_out = prepare(config, out, lambda: interrupt.check(signalled))
    result = None
    for seed in seeds:
        for mode in modes:
            train_and_judge(config, out, choice["kind"], held_out, mode, seed, signalled)
            result = aggregate(config, out, choice)
    return result or aggregate(config, out, choice)


def seeds_of(given: Sequence[str]) -> list[int]:
    """Raises ValueError for anything but whole numbers."""
    if not all(text.strip().isdecimal() for text in given):
        raise ValueError(f"--seeds={','.join(given)}; accepted: whole numbers, as 0,1,2")
    return [int(text) for text in given]


def main(_: list[str]) -> None:
    values = flags.FLAGS
    out = pathlib.Path(values.out)
    try:
        train_grpo.set_devices(values.config.job)
        with interrupt.caught_signals() as signalled:
            result = run(values.config, out, values.modes, seeds_of(values.seeds), signalled)
    except interrupt.Interrupted as signal:
        print(f"interrupted by {signal}; the same command goes on", file=sys.stderr)
        sys.exit(interrupt.EXIT_CODE)
    except (ValueError, OSError) as error:
        fail(error)
    print("\n".join(learning.table(result["summary"])))
    print(f"receipt: {out / 'learning_curves.json'}")


if __name__ == "__main__":
    define_config(HERE / "configs" / "learn_tiny.py", "Job, task and evaluation.")
    flags.DEFINE_list("modes", list(rollout.MODES), "Prefix-gradient modes to run; none: aggregate what is there.")
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds to run.")
    flags.DEFINE_string("out", "runs/learning", "Folder of the runs, the receipt, the table and the plot.")
    app.run(main, flags_parser=parse_flags_alone)
