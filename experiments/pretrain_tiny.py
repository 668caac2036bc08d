"""Trains a small GLM-5.2-shaped model from scratch, with its indexers, until it answers from what it has read.

python experiments/pretrain_tiny.py --workdir=runs/reader                     # one H200, 10 minutes
python experiments/pretrain_tiny.py --workdir=runs/small --config=experiments/configs/pretrain_cpu.py   # one core

python experiments/pretrain_tiny.py --evaluate=experiments/reader --workdir=runs/scores                  # no training

Writes checkpoint/ (Hugging Face layout), steps.jsonl and receipt.json; --evaluate writes evaluation.json.
Exit status: 0 goals reached, 1 not, 2 bad usage.
"""

import dataclasses
import json
import math
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags
from ml_collections import ConfigDict

from longstraw_jax import config as config_lib
from longstraw_jax import fingerprint, forward
from longstraw_jax.command import define_config, fail, parse_flags
from longstraw_jax.evidence import kernels, memory, receipt
from longstraw_jax.io import hf_checkpoint
from longstraw_jax.io import prompt as prompt_lib
from longstraw_jax.io import tokenizer as tokenizer_lib
from longstraw_jax.io.run_lock import LOCK_FILE, run_lock
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.model import decoder
from longstraw_jax.pretrain import corpus, dense_pass, measure, packed_rows, stages
from longstraw_jax.pretrain import step as step_lib
from longstraw_jax.types import Model, Params

HERE = pathlib.Path(__file__).parent
SPARSE_ROWS = 4  # run sparsely, which keeps each query's selected rows
EVALUATION = 1 << 20  # a stage number that no stage has: rows of the evaluation


class Job(NamedTuple):
    """A configuration's parts, checked."""

    model: Model  # that recomputes nothing
    optimizer: Any
    stages: tuple[stages.Stage, ...]
    mixes: tuple[packed_rows.Mix, ...]  # of each stage; the last one's tasks are evaluated


def load_job(config: ConfigDict) -> Job:
    """Raises ValueError for what a field cannot be."""
    architecture = config_lib.model_config_from_hf(config.model.to_dict())
    if not config.order or not set(config.order) <= set(config.stages):
        raise ValueError(f"order={config.order}; accepted: one or more of {', '.join(config.stages)}")
    every, mixes = [], []
    for name in config.order:
        fields = config.stages[name].to_dict()
        shares = {share: fields.pop(share) for share in ("text", "pairs", "recall", "around", "stretched")}
        every.append(stages.Stage(name, **fields))
        mixes.append(packed_rows.Mix(**config.mix.to_dict() | shares))
    lengths = tuple(config.evaluation.tokens)
    longest = max((*lengths, *(stage.tokens for stage in every)))
    architecture.check_length(longest, "a row")
    if config.mix.positions > architecture.max_position_embeddings:
        raise ValueError(f"mix.positions={config.mix.positions}; accepted: at most model.max_position_embeddings="
                         f"{architecture.max_position_embeddings}")  # fmt: skip
    if not lengths or lengths[-1] != longest:
        raise ValueError(f"evaluation.tokens={lengths}; accepted: lengths that end with the longest row's, {longest}")
    if architecture.index_topk >= longest:
        raise ValueError(f"model.index_topk={architecture.index_topk}; accepted: less than a row's {longest} tokens")
    optimizer = step_lib.make_optimizer(config.optimizer.kind, weight_decay=config.optimizer.weight_decay)
    model = decoder.make_model(architecture, remat=False, kernels="reference")
    return Job(model, optimizer, tuple(every), tuple(mixes))


def rates_of(config: ConfigDict, every: tuple[stages.Stage, ...], number: int, share: float) -> dict[str, np.float32]:
    """Learning rates when `share` of a stage is done; a part's schedule runs over the stages that train it."""
    timed = all(stage.seconds for stage in every)
    planned = [stage.seconds if timed else stage.steps * stage.rows * stage.tokens for stage in every]
    settings, found = config.optimizer, {}
    for part, peak, warmup in (
        (step_lib.TRUNK, settings.learning_rate, settings.warmup),
        (step_lib.INDEXER, settings.indexer_rate, 0.0),
    ):
        sizes = [size if part in stage.trained else 0 for size, stage in zip(planned, every, strict=True)]
        progress = (sum(sizes[:number]) + share * sizes[number]) / max(1, sum(sizes))
        options = dict(peak=peak, warmup=warmup, decay=settings.decay, final=settings.final)
        found[part] = np.float32(step_lib.learning_rate(progress, **options))
    return found


def time_left(every: tuple[stages.Stage, ...], number: int, spent: float) -> stages.Stage:
    """Stage `number` with its part of the seconds that are left: what is mastered early gives its time to the later."""
    planned = sum(stage.seconds for stage in every)
    to_come = sum(stage.seconds for stage in every[number:])
    seconds = every[number].seconds * max(0.0, planned - spent) / to_come if to_come else 0.0
    return dataclasses.replace(every[number], seconds=seconds)


def evaluate(config: ConfigDict, job: Job, base: Params, held_out: corpus.Text, frame, tokens) -> dict[str, Any]:
    """Held-out loss, answers by kind and length, selection quality: all with the selection that is served.

    `stretched`: answers of the longest rows where gaps stretch their positions to mix.positions.
    """
    model, keys, wanted, mix = job.model, job.model.config.index_topk, config.evaluation, job.mixes[-1]
    longest = wanted.tokens[-1]
    loss = {}

    def answers(length, positions=0):
        count, rates = max(1, wanted.batch_tokens // length), {}
        for kind in mix.kinds:
            found = []
            for part in range(math.ceil(wanted.questions / count)):
                seed = (config.seed, EVALUATION, length, part)
                batch = packed_rows.question_batch(held_out, frame, tokens, mix, kind, count, length, seed, positions)
                found.append(measure.retrieval(model, base, batch, keys))
            rates[kind] = {name: float(np.mean([f[name] for f in found])) for name in ("exact", "bound", "tokens")}
            rates[kind]["rows"] = sum(f["rows"] for f in found)
        return rates

    for length in wanted.tokens:
        seed = (config.seed, EVALUATION, length)
        count = max(1, wanted.batch_tokens // length)
        batch = packed_rows.text_batch(held_out, count, length, seed)
        loss[str(length)] = measure.held_out_loss(model, base, batch, keys)
    count = max(1, wanted.batch_tokens // longest)
    seed = (config.seed, EVALUATION, longest, 0)
    mixed = packed_rows.training_batch(held_out, frame, tokens, mix, count, longest, seed)
    return {
        "keys": keys,
        "held_out_loss": loss,
        "retrieval": {str(length): answers(length) for length in wanted.tokens},
        "stretched": {"positions": mix.positions, "retrieval": answers(longest, mix.positions)},
        "selection": measure.selection_quality(model, base, mixed, keys),
    }


def served_alike(job: Job, base: Params, batch: step_lib.Batch) -> dict[str, Any]:
    """How often a checkpoint that was read back predicts in forward.forward what the dense pass here predicts."""
    ids = batch.ids[:SPARSE_ROWS]
    hidden, _ = jax.jit(forward.forward, static_argnums=0)(job.model, base, None, ids)
    sparse = np.asarray(forward.logits(job.model, base, None, hidden)).argmax(-1)
    options = dense_pass.Options(job.model.config.index_topk, index=True)
    dense = np.asarray(measure.judged(job.model, base, batch, options)[1])
    return {"tokens": int(ids.size), "same_likeliest": float((sparse == dense[:SPARSE_ROWS]).mean())}


def measured(config: ConfigDict, job: Job, directory: pathlib.Path, held_out, frame, tokens) -> dict[str, Any]:
    """Bytes, fingerprint and every score of a written checkpoint as it is read back: routers too are bf16 there.

    Raises:
      ValueError: it is of another architecture than config.model.
    """
    started = time.perf_counter()
    found, base = hf_checkpoint.load(directory)
    if (found := dataclasses.replace(found, eos_token_id=job.model.config.eos_token_id)) != job.model.config:
        wrong = [field for field in vars(found) if getattr(found, field) != getattr(job.model.config, field)]
        raise ValueError(f"{directory}: {', '.join(wrong)} differ from config.model; accepted: a checkpoint of it")
    scores = evaluate(config, job, base, held_out, frame, tokens)
    mix, length = job.mixes[-1], config.evaluation.tokens[0]
    count = max(1, config.evaluation.batch_tokens // length)
    asked = packed_rows.question_batch(held_out, frame, tokens, mix, mix.kinds[0], count, length, (config.seed,))
    size = sum(file.stat().st_size for file in directory.iterdir())
    return {
        "checkpoint": {"bytes": size, "weights_fingerprint": fingerprint.tree_fingerprint(base)},
        **scores,
        "served": served_alike(job, base, asked),
        "evaluation_seconds": time.perf_counter() - started,
    }


def judge(config: ConfigDict, directory: pathlib.Path, workdir: pathlib.Path) -> dict[str, Any]:
    """The receipt of a checkpoint's scores, without training, in evaluation.json. Raises ValueError for bad input."""
    job, tokens = load_job(config), tokenizer_lib.load_tokenizer(directory)
    frame = packed_rows.frame_of(prompt_lib.load_chat_template(directory), tokens)
    source = corpus.python_texts()
    training, held_out = corpus.read(source, tokens)
    path = workdir / "evaluation.json"
    with run_lock(workdir):
        if path.exists():
            raise ValueError(f"--workdir={workdir} holds an evaluation; accepted: another folder, or {path} removed")
        found = measured(config, job, directory, held_out, frame, tokens)
        result = {"claim": "quality", "problems": problems_of(config, found), "directory": str(directory)}
        result |= facts(config, job, source, training, held_out) | found
        write_whole(path, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    return result


def facts(
    config: ConfigDict, job: Job, source: corpus.Source, training: corpus.Text, held_out: corpus.Text
) -> dict[str, Any]:
    """What binds a receipt: code, machine, configuration, text."""
    plain = json.loads(config.to_json())
    return receipt.made_by() | {
        "config": plain,
        "config_sha256": fingerprint.sha256_json(plain),
        "kernels": kernels.implementations(job.model),
        "data": {
            "text": source.name,
            "sha256": source.sha256,
            "training_tokens": int(training.ids.size),
            "held_out_tokens": int(held_out.ids.size),
        },
        "seed": config.seed,
    }


def problems_of(config: ConfigDict, found: dict[str, Any]) -> list[str]:
    """Goals that were missed, a line each."""
    goals, selection = config.goals, found["selection"]
    exact = {kind: rate["exact"] for kind, rate in found["retrieval"][str(config.evaluation.tokens[-1])].items()}
    checks = (
        ("selection", selection["indexer"], goals.selection),
        ("selection over random", selection["indexer"] - selection["random"], goals.over_random),
        ("needle", exact.get("needle", 0.0), goals.needle),
    )
    return [f"{name} is {value:.3f}; the goal is {goal}" for name, value, goal in checks if value < goal]


def run(config: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """The receipt of one run. Raises ValueError for bad input."""
    begun = time.perf_counter()
    job = load_job(config)
    with run_lock(workdir):
        if any(path.name != LOCK_FILE for path in workdir.iterdir()):
            raise ValueError(f"--workdir={workdir} holds something; accepted: a new or empty folder")
        texts = workdir / "tokenizer"
        tokens = tokenizer_lib.save_byte_tokenizer(texts)
        (texts / "chat_template.jinja").write_text(prompt_lib.tiny_chat_template())
        frame = packed_rows.frame_of(prompt_lib.load_chat_template(texts), tokens)
        source = corpus.python_texts()
        training, held_out = corpus.read(source, tokens)
        state = step_lib.init_state(job.model, job.optimizer, config.seed)
        parameters = sum(x.size for x in jax.tree.leaves(state.params))
        print(f"{parameters:,} parameters, {training.ids.size:,} tokens of text, {held_out.ids.size:,} held out")
        done, level, programs = [], 0, step_lib.update._cache_size()
        with open(workdir / "steps.jsonl", "w") as log:

            def report(record):
                log.write(json.dumps(record) + "\n")
                log.flush()
                print(line(record), flush=True)

            for number, (stage, mix) in enumerate(zip(job.stages, job.mixes, strict=True)):
                model = dataclasses.replace(job.model, remat=stage.remat)
                static = step_lib.Stage(stage.selected or None, stage.trained, config.optimizer.bias_rate)

                def make(i, level, number=number, stage=stage, mix=mix):
                    seed, mix = (config.seed, number, i), dataclasses.replace(mix, around=level)
                    return packed_rows.training_batch(training, frame, tokens, mix, stage.rows, stage.tokens, seed)

                def advance(state, batch, share, number=number, model=model, static=static):
                    rates = rates_of(config, job.stages, number, share)
                    return step_lib.update(model, job.optimizer, static, state, batch, rates)

                state, record = stages.run(
                    time_left(job.stages, number, sum(earlier["seconds"] for earlier in done)),
                    *(state, make, advance),
                    every=config.report_every,
                    report=report,
                    level=min(level, mix.around),
                    hardest=mix.around,
                )
                level = record["level"]
                done.append(record)
                print(f"{stage.name}: {record['steps']} steps, {record['tokens_per_second']:,.0f} tokens/s, "
                      f"{record['compile_seconds']:.0f} s to compile, level {level} of {mix.around}"
                      f"{', mastered' if record['mastered'] else ''}", flush=True)  # fmt: skip
        base = step_lib.served(job.model, state.params)
        raw = config.model.to_dict() | {"eos_token_id": list(tokens.eos_ids)}
        hf_checkpoint.save(workdir / "checkpoint", raw, base, extra_files=sorted(texts.iterdir()))
        found = measured(config, job, workdir / "checkpoint", held_out, frame, tokens)
        result = {
            "claim": "learning",
            "problems": problems_of(config, found),
            **facts(config, job, source, training, held_out),
            "parameters": parameters,
            "stages": done,
            "programs": step_lib.update._cache_size() - programs,
            **found,
            "seconds": time.perf_counter() - begun,
            "peak_bytes": memory.peak_bytes()[0],
        }  # fmt: skip
        write_whole(workdir / "receipt.json", (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    return result


def line(record: dict[str, Any]) -> str:
    """A report for the eye."""
    numbers = {name: value for name, value in record.items() if name not in ("stage", "step")}
    return f"{record['stage']:<8} {record['step']:>6} " + "  ".join(f"{name} {v:.3f}" for name, v in numbers.items())


def table(found: dict[str, Any]) -> list[str]:
    """What was measured, in lines."""
    kinds = list(next(iter(found["retrieval"].values())))
    lines = ["tokens   loss   " + "  ".join(f"{kind:>8}" for kind in kinds) + "   (share of answers right)"]
    for length, loss in found["held_out_loss"].items():
        scores = "  ".join(f"{found['retrieval'][length][kind]['exact']:8.3f}" for kind in kinds)
        lines.append(f"{length:>6}  {loss:5.3f}   {scores}")
    stretched = found["stretched"]
    scores = "  ".join(f"{stretched['retrieval'][kind]['exact']:8.3f}" for kind in kinds)
    lines.append(f"{length:>6}          {scores}   (over {stretched['positions']:,} positions)")
    selection = found["selection"]
    lines.append(f"attention on {found['keys']} selected keys, of the best possible ({selection['queries']} queries):")
    for name, shares in [("all", selection), *selection["layers"].items()]:
        lines.append(f"  layer {name:>3}: " + ", ".join(f"{c} {shares[c]:.3f}" for c in dense_pass.CONTROLS))
    served = found["served"]
    lines.append(f"read back and run sparsely: {served['same_likeliest']:.3%} of {served['tokens']} tokens alike")
    return lines


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    workdir = pathlib.Path(values.workdir)
    try:
        if len(argv) > 1:
            raise ValueError(f"arguments {argv[1:]}; accepted: --config=FILE, --workdir=DIR and --config.field=value")
        if values.evaluate:
            result = judge(values.config, pathlib.Path(values.evaluate), workdir)
        else:
            result = run(values.config, workdir)
    except (ValueError, OSError) as error:
        fail(error)
    except FloatingPointError as error:
        sys.exit(f"error: {error}")
    print("\n".join([*table(result), *result["problems"], "FAIL" if result["problems"] else "pass"]))
    where, seconds = values.evaluate or workdir / "checkpoint", result.get("seconds", result["evaluation_seconds"])
    print(f"{where}: {result['checkpoint']['bytes']:,} bytes; {seconds:.0f} s in all")
    sys.exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    define_config(HERE / "configs" / "pretrain_tiny.py", "Configuration of the run.")
    flags.DEFINE_string("workdir", "runs/pretrain", "Run folder, new or empty; for --evaluate without evaluation.json.")
    flags.DEFINE_string("evaluate", "", "Trains nothing: a checkpoint folder to measure, into evaluation.json.")
    app.run(main, flags_parser=parse_flags)
