"""Scores by position of the evidence: retrieval tasks early, middle, late and beyond the native window, and a control.

python experiments/eval_positions.py --config=experiments/configs/grpo.py --config.model.checkpoint=DIR \
    --tokens=2097152 --config.model.yarn_positions=2097664 --config.grpo.max_new_tokens=64 \
    --positions=early,middle,late,beyond --seeds=8 --prompts=runs/positions/prompts.jsonl --out=runs/positions/base.json
python experiments/eval_positions.py ... --prompts=runs/positions/prompts.jsonl --adapter=runs/mine/adapter \
    --out=runs/positions/adapter.json

The prompts are written once, with their hashes, and taken as they are from then on, so that checkpoints and adapters
are compared on the same ones. --control_tokens adds the same tasks in prompts that lie in the native window whole.
Capture and decode are those of training. Writes a receipt (see longstraw_jax/evidence/position_eval.py) and its table.
An evaluation that was stopped goes on after its last prompt. Exit status 2 on bad input.
"""

import argparse
import datetime
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import build_tasks
import jax
import numpy as np
import train_grpo
from absl import app, flags
from ml_collections import ConfigDict, config_flags

from longstraw_jax import fingerprint, rollout, sampling, stopping, train
from longstraw_jax.command import fail, parse_flags
from longstraw_jax.evidence import attended, position_eval, receipt
from longstraw_jax.io import adapter, checkpoint, data
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.prefix import capture, freshness
from longstraw_jax.rl import rewards
from longstraw_jax.tasks import rows as rows_lib
from longstraw_jax.types import Params

SCORES = ("longstraw_jax.tasks.rewards:final_match", "longstraw_jax.tasks.rewards:leading_share")
PARAMETERS = (
    "tokens", "control_tokens", "kinds", "positions", "distractors", "digits", "seeds", "first_seed", "native_window",
    "text",
)  # fmt: skip


def freeze_prompts(path: pathlib.Path, checkpoint_dir: str, values: Any) -> None:
    """Writes the prompts and, beside them, their SHA-256 and parameters. Raises ValueError or OSError."""
    if path.suffix != ".jsonl":
        raise ValueError(f"prompts={str(path)!r}; accepted: a file name that ends in .jsonl")
    given = {name: getattr(values, name) for name in PARAMETERS}

    def make(tokens: list[str], positions: list[str]) -> list[dict[str, Any]]:
        changed = given | {"checkpoint": checkpoint_dir, "tokens": tokens, "positions": positions}
        return build_tasks.retrieval_rows(argparse.Namespace(**changed))

    made = make(values.tokens, values.positions)
    if values.control_tokens:
        window = values.native_window or rows_lib.native_window(checkpoint_dir)
        if not 0 < values.control_tokens <= window:
            raise ValueError(
                f"control_tokens={values.control_tokens}; accepted: 0 (no control), or at most the native {window}"
            )
        for number, row in enumerate(make([str(values.control_tokens)], ["middle"]), start=len(made)):
            row["extra_info"] |= {"index": number, "control": True}
            made.append(row)
    if not made:
        raise ValueError(
            f"kinds={values.kinds}, positions={values.positions} make no rows; accepted: at least 1 of each"
        )
    build_tasks.write_rows(path, made, given)


def read_record(path: pathlib.Path) -> dict[str, Any]:
    """The record beside frozen prompts. Raises ValueError for a file that is none."""
    try:
        record = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    kinds = {"sha256": str, "parameters": dict}
    if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"{path} is no record of prompts; accepted: an object with sha256 and parameters")
    return record


def check_prompts(path: pathlib.Path, dataset: data.Dataset, build: Callable[[Any], np.ndarray], values: Any) -> None:
    """Raises ValueError where the file or a prompt's ids are not those that were frozen, or not those asked for."""
    beside = path.with_suffix(".json")
    asked = PARAMETERS if values.tokens else ("control_tokens",) if values.control_tokens else ()
    if beside.is_file():
        record, found = read_record(beside), dataset.files[str(path)]
        if record["sha256"] != found:
            raise ValueError(f"prompts={str(path)!r}: sha256 is {found}; accepted: {record['sha256']}, of {beside}")
        # Rows of build_tasks.py have parameters that are no flags here, and no control.
        was = {"control_tokens": 0} | record["parameters"]
        for name in [name for name in asked if name in was]:
            if getattr(values, name) != was[name]:
                raise ValueError(f"{name}={getattr(values, name)}; accepted: {was[name]} of {path}, or another file")
    elif asked:
        raise ValueError(
            f"{asked[0]}={getattr(values, asked[0])} with {path}, whose record {beside.name} is not there; accepted: "
            "no --tokens and --control_tokens, to take its rows as they are"
        )
    for row in dataset.rows:
        wanted = (row["columns"].get("extra_info") or {}).get("prompt_sha256")
        if wanted is not None and (found := rows_lib.ids_sha256(build(row["prompt"]))) != wanted:
            raise ValueError(
                f"prompts={str(path)!r}, row {row['id']}: the ids have sha256 {found[:16]}; accepted: {wanted[:16]} "
                "(the file was written for another tokenizer or chat template)"
            )


def check_decode(values: Any) -> None:
    """Raises ValueError for a decode that makes no sense."""
    if values.samples < 1 or (values.temperature == 0 and values.samples != 1):
        accepted = "1, as greedy responses are all alike" if values.temperature == 0 else "at least 1"
        raise ValueError(f"samples={values.samples} with temperature={values.temperature}; accepted: {accepted}")
    if values.attended_bins < 0:
        raise ValueError(f"attended_bins={values.attended_bins}; accepted: 0 (none) or more")
    if not values.scores:
        raise ValueError("scores is empty; accepted: names of reward functions, see rl/rewards.py")


def load_adapters(job: train_grpo.Job, folder: str | None) -> Params | None:
    """A PEFT adapter's, or those of a run's latest checkpoint; None for the base alone. Raises ValueError."""
    if folder is None:
        return None
    path = pathlib.Path(folder)
    if (path / adapter.CONFIG).is_file():
        return adapter.import_peft(path, job.model.config, job.model.lora, mesh=job.model.mesh)
    if not (path / "checkpoints").is_dir():
        raise ValueError(f"adapter={folder!r}; accepted: a folder with {adapter.CONFIG}, or a run's with checkpoints/")
    like = train.init_state(job.model, train.make_optimizer(job.optimizer), 0)
    return checkpoint.restore(path / "checkpoints", like, expected={"base": job.base_sha})[0].adapters


class Attended:
    """Histograms of the prompt positions that responses selected, summed over the longest prompts."""

    def __init__(self, bins: int, tokens: int):
        self.bins, self.tokens, self.counts, self.queries = bins, tokens, 0, 0

    def add(self, samples: sampling.Samples, tokens: int) -> None:
        """Counts one prompt's group, if the prompt is of the longest."""
        if self.bins and tokens == self.tokens:
            self.counts = self.counts + attended.layer_histograms(samples.choices.selections, tokens, self.bins)
            self.queries += int(np.asarray(samples.lengths).sum())

    def write(self, folder: pathlib.Path, job: train_grpo.Job) -> None:
        """Writes positions.npz, if anything was counted."""
        if self.queries:
            layers = np.asarray(attended.full_layers(job.model.config))
            attended.write_positions(folder, self.counts, layers, prompt_tokens=self.tokens, queries=self.queries)


def decoder_of(
    job: train_grpo.Job, adapters: Params | None, values: Any, spent: dict[str, float], selected: Attended
) -> position_eval.Decode:
    """What decodes a prompt's responses from its captured state, as training's rollout does."""
    words = freshness.policy_fingerprint(job.model, job.base_sha)
    # In `frozen` mode the adapter acts from the boundary token on.
    used = None if job.policy.mode == "frozen" else adapters
    words = np.asarray(freshness.weights_fingerprint(words, used))

    def decode(ids: np.ndarray, number: int) -> tuple[list[list[int]], list[int]]:
        started = time.perf_counter()
        prefix = capture.capture(
            job.model, job.base, used, ids[:-1],
            chunk=job.policy.chunk, fingerprint=words, capacity=job.policy.capacity,
        )  # fmt: skip
        jax.block_until_ready(prefix)
        captured = time.perf_counter()
        samples = sampling.sample(
            job.model, job.base, adapters, prefix, int(ids[-1]),
            jax.random.fold_in(jax.random.key(values.seed), number),
            group=values.samples, max_new_tokens=job.policy.max_new_tokens, temperature=values.temperature,
            top_p=values.top_p, eos_ids=job.policy.eos_ids, record=("selections",) if selected.bins else (),
            slots=job.policy.slots, stop_ids=job.policy.stop.ids if job.policy.stop else (),
        )  # fmt: skip
        samples = stopping.cut(jax.tree.map(np.asarray, samples), job.policy.stop)
        selected.add(samples, ids.size)
        spent["capture"] += captured - started
        spent["sample"] += time.perf_counter() - captured
        responses, stop = rollout.responses_of(samples), job.policy.stop
        ended = zip(responses, samples.truncated, strict=True)
        return responses, [0 if cut_off else stopping.ending(ids, stop) for ids, cut_off in ended]

    return decode


def scorer_of(job: train_grpo.Job) -> position_eval.Score:
    """Every configured function's own score."""

    def score(row, responses, texts):
        count = len(responses)
        columns = {name: [value] * count for name, value in row["columns"].items()}
        prompts = [row["prompt"]] * count
        timeout_s = job.config.reward.timeout_s
        _, scores, _ = rewards.score(job.reward_functions, None, prompts, texts, responses, columns, timeout_s)
        return {name: [float(v) if np.isfinite(v) else None for v in values] for name, values in scores.items()}

    return score


def run(config: ConfigDict, values: Any) -> dict[str, Any]:
    """Evaluates and writes the receipt. Raises ValueError or OSError for bad input."""
    check_decode(values)
    out, prompts = pathlib.Path(values.out), pathlib.Path(values.prompts)
    if out.suffix != ".json":
        raise ValueError(f"out={values.out!r}; accepted: a file name that ends in .json")
    partial, record = out.with_suffix(".partial.jsonl"), prompts.with_suffix(".json")
    for written, theirs in ((out, record), (partial, prompts)):
        if written.resolve() == theirs.resolve():
            raise ValueError(f"out={values.out!r}; accepted: another name, as {str(theirs)!r} is the prompts'")
    if not prompts.exists():
        if not values.tokens:
            raise ValueError(f"prompts={values.prompts!r} does not exist; accepted: a file, or --tokens=N to write it")
        freeze_prompts(prompts, config.model.checkpoint, values)
    config = config.copy_and_resolve_references()  # ConfigDict(config) would share its sections
    config.data.paths, config.reward.functions = (str(prompts),), tuple(values.scores)
    config.reward.weights = (1.0,) * len(values.scores)
    # Every row must have an answer, whatever the scores compare with: the receipt shows it.
    data.read_rows(prompts, required=("ground_truth",))
    job = train_grpo.load_job(config, out.parent)
    check_prompts(prompts, job.dataset, job.build, values)
    adapters = load_adapters(job, values.adapter)
    spent = {"capture": 0.0, "sample": 0.0}
    selected = Attended(values.attended_bins, job.policy.capacity)
    started = time.perf_counter()
    resolved = train_grpo.plain(config)
    adapter_words = None if adapters is None else fingerprint.tree_fingerprint(adapters)
    decode = {
        "samples": values.samples,
        "temperature": values.temperature,
        "top_p": values.top_p,
        "max_new_tokens": job.policy.max_new_tokens,
        "seed": values.seed,
        "mode": job.policy.mode,
    }
    done = position_eval.resume(
        partial, fingerprint.sha256_json([job.dataset.files, job.base_sha, adapter_words, decode, resolved])
    )

    def progress(result):
        position_eval.keep(partial, result)
        print(line(result), flush=True)

    results = position_eval.evaluate(
        job.dataset.rows,
        job.build,
        decoder_of(job, adapters, values, spent, selected),
        job.text,
        scorer_of(job),
        done=done,
        progress=progress,
    )
    rope = job.model.config.rope_parameters
    by = receipt.made_by(job.model.devices)
    made = position_eval.write_receipt(
        out,
        results,
        created=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        code=by["code"],
        python=by["python"],
        packages=by["packages"],
        devices=by["device"],
        config={"sha256": fingerprint.sha256_json(resolved), "resolved": resolved},
        checkpoint={"path": config.model.checkpoint, "weights_fingerprint": job.base_sha},
        adapter=None if adapters is None else {"path": values.adapter, "fingerprint": adapter_words},
        tokenizer_sha256=job.tokenizer.sha256,
        window={
            "native": rope.original_max_position_embeddings or job.model.config.max_position_embeddings,
            "positions": job.model.config.max_position_embeddings,
        },
        prompts={"path": str(prompts), "sha256": job.dataset.files[str(prompts)], "rows": len(results)},
        decode=decode,
        seconds=spent | {"evaluation": time.perf_counter() - started},
    )
    partial.unlink()
    selected.write(out.parent, job)
    write_whole(out.with_suffix(".txt"), position_eval.format_table(made).encode("utf-8"))
    return made


def line(result: dict[str, Any]) -> str:
    """A prompt's result for the eye."""
    said = ", ".join(repr(sample["text"][:24]) for sample in result["samples"][:3])
    where = f"{result['task']:<8} {result['position']:<14} {result['tokens']:>9} tokens"
    return f"{where}  wanted {result['answer']!r}: {said}"


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    if len(argv) > 1 or values.config is None:
        fail(f"arguments {argv[1:]}; accepted: --config=FILE, --config.field=value and the flags of --help")
    try:
        train_grpo.set_devices(values.config)
        made = run(values.config, values)
    except (ValueError, OSError) as error:
        fail(error)
    sys.stdout.write(position_eval.format_table(made))
    print(f"receipt: {values.out}")


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "The main job's configuration, see experiments/configs/grpo.py.")
    flags.DEFINE_string("prompts", "runs/positions/prompts.jsonl", "Frozen prompts; written if the file is not there.")
    flags.DEFINE_string("out", "runs/positions/positions.json", "The receipt; the table goes beside it as .txt.")
    flags.DEFINE_string("adapter", None, "A PEFT adapter's folder, or a run's with checkpoints; none: the base alone.")
    flags.DEFINE_list("scores", list(SCORES), "Reward functions between 0 and 1.")
    flags.DEFINE_integer("samples", 1, "Responses a prompt.")
    flags.DEFINE_float("temperature", 0.0, "0: greedy.")
    flags.DEFINE_float("top_p", 1.0, "Of sampling.")
    flags.DEFINE_integer("seed", 0, "Of sampling.")
    flags.DEFINE_integer(
        "attended_bins", 0, "Parts of the longest prompts to count attention in: positions.npz; 0: none."
    )
    flags.DEFINE_integer("control_tokens", 0, "New prompts. Tokens of the control in the native window; 0: none.")
    build_tasks.define_row_flags(seeds=8, when="New prompts. ")
    flags.adopt_module_key_flags(build_tasks)  # so that --help tells them
    app.run(main, flags_parser=parse_flags)
