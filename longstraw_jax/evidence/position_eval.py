"""Scores of an evaluation by position of the evidence, its decode audit, and the receipt that holds both.

`python -m longstraw_jax.evidence.position_eval FILE` derives a receipt's figures again from its rows. Exit code 0 if
all agree, 1 if not, 2 on bad usage. The layout is published as positions.schema.json (JSON Schema 2020-12).
"""

import importlib.resources
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from jaxtyping import Int

from longstraw_jax.evidence import decode_audit
from longstraw_jax.evidence.intervals import score_interval
from longstraw_jax.fingerprint import sha256_json
from longstraw_jax.io.metrics import parse_strict_json
from longstraw_jax.io.whole_file import write_whole

SCHEMA_VERSION = 1
CONTROL = "native control"  # the position of prompts that lie in the native window whole
NO_POSITION = "none"

# Ids of a prompt -> its responses' ids, and how many of them ended each: 0 where it was cut off.
Decode = Callable[[Int[np.ndarray, "S"], int], tuple[list[list[int]], list[int]]]
# (row, responses, texts) -> scores by function name, None where a function cannot score.
Score = Callable[[Mapping[str, Any], list[list[int]], list[str]], dict[str, list[float | None]]]


def evaluate(
    rows: Sequence[Mapping[str, Any]],
    build: Callable[[Any], Int[np.ndarray, "S"]],
    decode: Decode,
    to_text: Callable[[list[int]], str],
    score: Score,
    *,
    done: Sequence[dict[str, Any]] = (),
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Decodes, scores and audits every row, one after the other.

    Args:
      rows: of `data.Dataset`.
      build: a row's prompt -> token ids.
      decode: (ids, number of the row) -> responses, and how many tokens ended each, 0 where it was cut off.
      to_text: ids -> text without special tokens.
      done: results of the first rows, from `resume`; these are not decoded again.
      progress: called with each new result.

    Returns:
      A result a row, as positions.schema.json defines it.

    Raises:
      ValueError: a score outside 0 to 1.
    """
    results = list(done)
    for number, row in enumerate(rows[len(results) :], start=len(results)):
        ids = build(row["prompt"])
        responses, endings = decode(ids, number)
        texts = [to_text(response) for response in responses]
        scores = score(row, responses, texts)
        for name, values in scores.items():
            if bad := [value for value in values if value is not None and not 0 <= value <= 1]:
                raise ValueError(f"score {name} is {bad[0]} for row {row['id']}; accepted: scores from 0 to 1")
        info = row["columns"].get("extra_info") or {}
        result = {
            "id": row["id"],
            "task": str(info.get("task", NO_POSITION)),
            "position": CONTROL if info.get("control") else str(info.get("position", NO_POSITION)),
            "tokens": int(ids.size),
            "evidence_at": info.get("evidence_at"),
            "answer": str(row["columns"]["ground_truth"]),
            "samples": [
                {
                    "text": text,
                    "tokens": len(response),
                    "scores": {name: values[member] for name, values in scores.items()},
                    "audit": decode_audit.audit(ids, response, ending=ending, text=text),
                }
                for member, (response, text, ending) in enumerate(zip(responses, texts, endings, strict=True))
            ],
        }
        results.append(result)
        if progress is not None:
            progress(result)
    return results


def resume(path: str | os.PathLike, bound: str) -> list[dict[str, Any]]:
    """Results that a stopped evaluation left in a file, which is begun where there is none.

    Args:
      bound: hash of what decides the results; the first line of the file.

    Raises:
      ValueError: the file is of another evaluation, or not of this format.
    """
    path, first = Path(path), json.dumps({"bound": bound}).encode() + b"\n"
    if not path.is_file():
        write_whole(path, first)
        return []
    whole = whole_lines(path)
    if whole[:1] != [first]:
        raise ValueError(f"{path} is of another evaluation; accepted: another out, or that file removed")
    try:
        results = [parse_strict_json(entry) for entry in whole[1:]]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}; accepted: what an evaluation left, or that file removed") from error
    write_whole(path, b"".join(whole))
    return results


def whole_lines(path: Path) -> list[bytes]:
    """Lines of the file of `resume`, its first and the results'; a last one that a kill cut is left out."""
    return [entry for entry in path.read_bytes().splitlines(keepends=True) if entry.endswith(b"\n")]


def keep(path: str | os.PathLike, result: Mapping[str, Any]) -> None:
    """Adds a result to the file of `resume`; it is on disk when this returns."""
    with open(path, "ab") as file:
        file.write(json.dumps(result, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def table(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean score and 95 % interval for each score, task, position and length, and over all tasks (task "all").

    Samples that a function could not score count in `unscored` and nowhere else.
    """
    keys = list(dict.fromkeys((r["task"], r["position"], r["tokens"]) for r in results))
    if len({task for task, _, _ in keys}) > 1:
        keys += list(dict.fromkeys(("all", r["position"], r["tokens"]) for r in results))
    lines = []
    for name in dict.fromkeys(name for r in results for sample in r["samples"] for name in sample["scores"]):
        for task, position, tokens in keys:
            here = [
                [sample["scores"][name] for sample in r["samples"]]
                for r in results
                if task in (r["task"], "all") and (r["position"], r["tokens"]) == (position, tokens)
            ]
            scored = [[value for value in values if value is not None] for values in here]
            unscored = sum(map(len, here)) - sum(map(len, scored))
            where = {"score": name, "task": task, "position": position, "tokens": tokens}
            lines.append(where | score_interval(scored) | {"unscored": unscored})
    return lines


def audit_table(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The decode audit over all responses."""
    return decode_audit.shares([sample["audit"] for r in results for sample in r["samples"]])


def write_receipt(path: str | os.PathLike, results: Sequence[Mapping[str, Any]], **bound: Any) -> dict[str, Any]:
    """Writes the receipt of an evaluation and returns it.

    Args:
      bound: what the figures are bound to: every other field of positions.schema.json.

    Raises:
      ValueError: it breaks the schema; nothing is written.
    """
    receipt = {
        "schema_version": SCHEMA_VERSION,
        "claim": "quality",
        **bound,
        "rows": list(results),
        "table": table(results),
        "audit": audit_table(results),
    }
    receipt = json.loads(json.dumps(receipt, allow_nan=False))
    receipt["receipt_sha256"] = sha256_json(receipt)
    if problems := receipt_problems(receipt):
        raise ValueError(f"{path}: {problems[0]}")
    write_whole(path, (json.dumps(receipt, indent=1, ensure_ascii=False) + "\n").encode("utf-8"))
    return receipt


def receipt_problems(receipt: Any) -> list[str]:
    """What is wrong with a receipt, one line a problem: schema, hash, figures that its rows do not give."""
    text = importlib.resources.files(__package__).joinpath("positions.schema.json").read_text("utf-8")
    found = [
        f"{'.'.join(['receipt', *map(str, error.absolute_path)])}: {error.message[:300]}"
        for error in jsonschema.Draft202012Validator(json.loads(text)).iter_errors(receipt)
    ]
    if found:
        return found
    body = {key: value for key, value in receipt.items() if key != "receipt_sha256"}
    for name, value in (
        ("receipt_sha256", sha256_json(body)),
        ("table", table(receipt["rows"])),
        ("audit", audit_table(receipt["rows"])),
    ):
        if sha256_json(receipt[name]) != sha256_json(value):
            found.append(f"{name}: recorded {str(receipt[name])[:80]}, recomputed {str(value)[:80]}")
    return found


def format_table(receipt: Mapping[str, Any]) -> str:
    """The receipt's figures for the eye."""
    heads = ("score", "task", "position", "tokens", "mean", "95 % interval", "prompts", "samples")
    lines = [heads]
    for row in receipt["table"]:
        known = row["mean"] is not None
        lines.append(
            (
                row["score"].rpartition(":")[2], row["task"], row["position"], str(row["tokens"]),
                f"{row['mean']:.3f}" if known else "none",
                f"{row['low']:.3f} to {row['high']:.3f}" if known else "",
                str(row["prompts"]), str(row["samples"]),
            )
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)
    audit = receipt["audit"]
    counted = ", ".join(f"{name} {audit['counts'][name]}" for name in decode_audit.FLAGS)
    return f"{text}\n{audit['responses']} responses: {counted}\n"


def main(arguments: Sequence[str]) -> int:
    """The command of this module; returns its exit code."""
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        print(f"position_eval: arguments = {list(arguments)}; accepted: a receipt's file", file=sys.stderr)
        return 2
    try:
        problems = receipt_problems(parse_strict_json(Path(arguments[0]).read_bytes()))
    except (ValueError, RecursionError) as error:
        problems = [str(error)]
    for problem in problems:
        print(f"MISMATCH  {problem}")
    print(f"{len(problems)} mismatched")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
