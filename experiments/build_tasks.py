"""Writes dataset rows of tasks with verifiable answers: retrieval from prompts of an exact length, or reasoning.

python experiments/build_tasks.py --checkpoint=DIR --tokens=65536 --kinds=needle,chain --positions=early,0.5,late \
    --seeds=8 --out=runs/tasks/rows.jsonl
python experiments/build_tasks.py --reasoning=basic_arithmetic:64,gcd:64 --out=runs/reasoning/rows.jsonl

Writes the rows, which train_grpo.py takes with --config.data.paths, and beside them a JSON file with the parameters
and the rows' SHA-256. Prompts have exactly --tokens tokens with the checkpoint's tokenizer and chat template. Exit
status 2 on bad input.
"""

import hashlib
import json
import pathlib
from typing import Any

from absl import app, flags

from longstraw_jax.command import fail, parse_flags
from longstraw_jax.io import payload, prompt, tokenizer
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.tasks import retrieval
from longstraw_jax.tasks import rows as rows_lib

PARAMETERS = (
    "tokens", "kinds", "positions", "distractors", "digits", "seeds", "first_seed", "native_window", "text",
    "reasoning",
)  # fmt: skip


def reader_of(checkpoint: str, window: int) -> rows_lib.Reader:
    """Tokenizer, template and native window of a checkpoint folder; `window` above 0 replaces the last."""
    if window < 0:
        raise ValueError(f"native_window={window}; accepted: 0 (the checkpoint's own) or more")
    tokens, template = tokenizer.load_tokenizer(checkpoint), prompt.load_chat_template(checkpoint)
    return rows_lib.Reader(tokens, template, window or rows_lib.native_window(checkpoint))


def source_of(text: str) -> payload.Source:
    """Where the text of the prompts comes from."""
    return payload.python_topics() if text == "python" else payload.text_folder(text)


def position_of(text: str) -> str | float:
    """A position by name, or a depth."""
    if text in rows_lib.POSITIONS:
        return text
    try:
        depth = float(text)
    except ValueError:
        depth = -1.0
    if not 0 <= depth <= 1:
        raise ValueError(f"positions={text!r}; accepted: {', '.join(rows_lib.POSITIONS)}, or a depth from 0 to 1")
    return depth


def retrieval_rows(values: flags.FlagValues) -> list[dict[str, Any]]:
    """A row for each length, kind, position and seed, in this order."""
    if values.seeds < 1:
        raise ValueError(f"seeds={values.seeds}; accepted: at least 1")
    lengths = [int(n) if n.isdecimal() else 0 for n in values.tokens]
    if min(lengths) < 1:
        raise ValueError(f"tokens={','.join(values.tokens)}; accepted: positive integers, as 4096,65536")
    reader, source, made = reader_of(values.checkpoint, values.native_window), source_of(values.text), []
    for tokens in lengths:
        for kind in values.kinds:
            for position in map(position_of, values.positions):
                for seed in range(values.first_seed, values.first_seed + values.seeds):
                    task = retrieval.make(kind, seed, distractors=values.distractors, digits=values.digits)
                    made.append(
                        rows_lib.make(
                            task, reader, source, tokens=tokens, position=position, seed=seed, index=len(made)
                        )
                    )
    return made


def reasoning_rows(values: flags.FlagValues) -> list[dict[str, Any]]:
    """The rows of every named task, one task after the other."""
    from longstraw_jax.tasks.reasoning import rows  # an extra, and seconds to import

    made: list[dict[str, Any]] = []
    for entry in values.reasoning:
        name, _, size = entry.partition(":")
        if not size.isdecimal():
            raise ValueError(f"reasoning={entry!r}; accepted: name:size, as basic_arithmetic:64")
        made += rows(name, size=int(size), seed=values.first_seed, first_index=len(made))
    return made


def write_rows(path: pathlib.Path, rows: list[dict[str, Any]], parameters: dict[str, Any]) -> dict[str, Any]:
    """Writes the JSON beside the rows, which it returns, and then the rows, so that there are none without it."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")
    record = {"rows": len(rows), "sha256": hashlib.sha256(text).hexdigest(), "parameters": parameters}
    write_whole(path.with_suffix(".json"), (json.dumps(record, indent=2) + "\n").encode("utf-8"))
    write_whole(path, text)
    return record


def build(values: flags.FlagValues) -> dict[str, Any]:
    """Writes the files of parsed flags; returns what the JSON file holds.

    Raises:
      ValueError, OSError: bad input.
      ImportError: reasoning-gym is asked for and absent.
    """
    out = pathlib.Path(values.out)
    if out.suffix != ".jsonl":
        raise ValueError(f"out={values.out!r}; accepted: a file name that ends in .jsonl")
    made = reasoning_rows(values) if values.reasoning else retrieval_rows(values)
    if not made:
        raise ValueError(
            f"kinds={values.kinds}, positions={values.positions} make no rows; accepted: at least 1 of each"
        )
    return write_rows(out, made, {name: getattr(values, name) for name in PARAMETERS})


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    if len(argv) > 1 or not (values.reasoning or (values.tokens and values.checkpoint)):
        fail(f"arguments {argv[1:]}; accepted: --checkpoint=DIR --tokens=N, or --reasoning=NAME:SIZE, and --out=FILE")
    try:
        record = build(values)
    except (ValueError, OSError, ImportError) as error:
        fail(error)
    print(f"{record['rows']} rows, sha256 {record['sha256']}")
    print(f"train_grpo.py --config.data.paths='(\"{values.out}\",)'")


def define_row_flags(seeds: int, when: str = "") -> None:
    """The flags of `retrieval_rows`, but the checkpoint.

    Args:
      seeds: the default.
      when: what they are for, before each one's own words.
    """
    flags.DEFINE_list("tokens", [], f"{when}Exact tokens of the prompts; several lengths may be named.")
    flags.DEFINE_list("kinds", list(retrieval.KINDS), f"{when}Of {', '.join(retrieval.KINDS)}.")
    flags.DEFINE_list(
        "positions", ["early", "middle", "late"], f"{when}Early, middle, late, beyond, or depths, 0 to 1."
    )
    flags.DEFINE_integer("distractors", 8, f"{when}Look-alike lines in each prompt.")
    flags.DEFINE_integer("digits", 4, f"{when}Digits of each number.")
    flags.DEFINE_integer("seeds", seeds, f"{when}Rows for each length, kind and position.")
    flags.DEFINE_integer("first_seed", 0, f"{when}The first seed; the others follow.")
    flags.DEFINE_integer("native_window", 0, f"{when}Positions that `beyond` begins after; 0: those of config.json.")
    flags.DEFINE_string("text", "python", f"{when}'python' for Python's documentation, or a folder of text files.")


if __name__ == "__main__":
    define_row_flags(seeds=1)
    flags.DEFINE_string("checkpoint", None, "Hugging Face folder with the tokenizer, chat template and config.json.")
    flags.DEFINE_list("reasoning", [], "Instead: tasks of reasoning-gym as name:size.")
    flags.DEFINE_string("out", "runs/tasks/rows.jsonl", "File of the rows; the JSON beside it has their SHA-256.")
    app.run(main, flags_parser=parse_flags)
