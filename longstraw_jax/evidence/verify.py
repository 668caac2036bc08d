"""Verifies a receipt: `python -m longstraw_jax.evidence.verify RUN_DIR`.

Checks receipt.json against its published schema, recomputes every hash, and derives every figure again from
steps.jsonl. Prints a row a check: ok, MISMATCH or not checked. Exit code 0 if nothing mismatches, 1 if anything
does, 2 on bad usage.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longstraw_jax.evidence.figures import derive, derived_claims, step_problems
from longstraw_jax.evidence.receipt import (
    CONFIG_FILE,
    RECEIPT_FILE,
    artifact_path,
    evidence_problems,
    receipt_schema_problems,
    step_schema_problems,
)
from longstraw_jax.fingerprint import sha256_file, sha256_json
from longstraw_jax.io.metrics import STEPS_FILE, parse_strict_json, read_steps

OK, MISMATCH, NOT_CHECKED = "ok", "MISMATCH", "not checked"
_REQUIRED = ((STEPS_FILE, "steps"), (CONFIG_FILE, "config"))


class Row(NamedTuple):
    """One check: its name, OK, MISMATCH or NOT_CHECKED, and what was found."""

    check: str
    status: str
    detail: str


def verify(run_dir: str | os.PathLike) -> list[Row]:
    """Runs every check on a run folder; reads it and changes nothing.

    Args:
      run_dir: a folder that holds receipt.json.

    Returns:
      The rows. The receipt holds if none is MISMATCH. A receipt or step log that breaks its schema ends the
      checks that would have to read it.
    """
    return list(_checks(Path(run_dir)))


def main(arguments: Sequence[str]) -> int:
    """Prints the rows of one run folder and returns the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        return _usage(f"arguments = {list(arguments)}; accepted: RUN_DIR")
    run_dir = Path(arguments[0])
    if not os.path.lexists(run_dir / RECEIPT_FILE):
        return _usage(f"RUN_DIR = {str(run_dir)!r} holds no {RECEIPT_FILE}; accepted: a run's folder")
    rows = verify(run_dir)
    width = max(len(row.check) for row in rows)
    for row in rows:
        print(f"{row.status:<11}  {row.check:<{width}}  {row.detail}")
    wrong = sum(row.status == MISMATCH for row in rows)
    skipped = sum(row.status == NOT_CHECKED for row in rows)
    print(f"{len(rows)} checks, {wrong} mismatched, {skipped} not checked")
    return 1 if wrong else 0


def _usage(message: str) -> int:
    print(f"verify: {message}", file=sys.stderr)
    return 2


def _row(check: str, problems: Sequence[str], detail: str) -> Row:
    """OK with a detail, or MISMATCH with the first problem and how many follow."""
    if not problems:
        return Row(check, OK, detail)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Row(check, MISMATCH, problems[0] + more)


def _checks(run_dir: Path) -> Iterator[Row]:
    links = _links(run_dir)
    yield _row("no symbolic links", [f"{link!r} is one" for link in links], "every file is the folder's own")
    if RECEIPT_FILE in links:
        return
    try:
        receipt = parse_strict_json((run_dir / RECEIPT_FILE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        yield Row(RECEIPT_FILE, MISMATCH, f"not readable as JSON: {error}")
        return
    problems = receipt_schema_problems(receipt)
    yield _row("receipt schema", problems, "follows receipt.schema.json")
    if problems:
        return
    body = {key: value for key, value in receipt.items() if key != "receipt_sha256"}
    yield _equal("receipt sha256", receipt["receipt_sha256"], sha256_json(body))
    yield from _config_checks(run_dir, receipt)
    yield from _artifact_checks(run_dir, receipt)
    for file in receipt["dataset"]["files"]:
        yield _dataset_check(run_dir, file)
    yield Row("weights fingerprint", NOT_CHECKED, f"{receipt['weights_fingerprint']}: needs the base checkpoint")
    yield from _step_checks(run_dir, receipt)


def _links(run_dir: Path) -> list[str]:
    """Paths of the symbolic links below a folder; none is followed."""
    found = []
    for folder, folders, files in os.walk(run_dir):
        paths = (Path(folder) / name for name in (*folders, *files))
        found += [path.relative_to(run_dir).as_posix() for path in paths if path.is_symlink()]
    return sorted(found)


def _equal(check: str, recorded: Any, recomputed: Any) -> Row:
    """Whether a recorded value is the recomputed one, as JSON: 1, 1.0 and true are three values."""
    if sha256_json(recorded) == sha256_json(recomputed):
        return Row(check, OK, _short(recorded))
    return Row(check, MISMATCH, f"recorded {_short(recorded)}, recomputed {_short(recomputed)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _config_checks(run_dir: Path, receipt: Mapping[str, Any]) -> Iterator[Row]:
    config = receipt["config"]
    yield _equal("config sha256", config["sha256"], sha256_json(config["resolved"]))
    try:
        found = parse_strict_json(artifact_path(run_dir, CONFIG_FILE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        yield Row(f"{CONFIG_FILE} content", MISMATCH, str(error))
    else:
        yield _equal(f"{CONFIG_FILE} content", config["resolved"], found)


def _artifact_checks(run_dir: Path, receipt: Mapping[str, Any]) -> Iterator[Row]:
    listed = [(row["path"], row["kind"]) for row in receipt["artifacts"]]
    problems = [f"{path!r} is not listed as {kind}" for path, kind in _REQUIRED if (path, kind) not in listed]
    problems += [f"{path!r} is listed {n} times" for path, n in Counter(p for p, _ in listed).items() if n > 1]
    yield _row("artifact list", problems, f"{len(listed)} files")
    for row in receipt["artifacts"]:
        check = f"artifact {row['path']}"
        try:
            path = artifact_path(run_dir, row["path"])
            found = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        except (OSError, ValueError) as error:
            yield Row(check, MISMATCH, str(error))
        else:
            yield _equal(check, {"bytes": row["bytes"], "sha256": row["sha256"]}, found)


def _dataset_check(run_dir: Path, file: Mapping[str, Any]) -> Row:
    """A path inside the run folder must be there; one outside may be on another machine."""
    check, path = f"dataset {file['path']}", Path(file["path"])
    try:
        if not path.is_absolute():
            path = artifact_path(run_dir, file["path"])
        elif not path.exists():
            return Row(check, NOT_CHECKED, "not present: not checked")
        return _equal(check, file["sha256"], sha256_file(path))
    except (OSError, ValueError) as error:
        return Row(check, MISMATCH, str(error))


def _step_checks(run_dir: Path, receipt: Mapping[str, Any]) -> Iterator[Row]:
    """The step log's own contract, then every figure and claim derived from it."""
    try:
        steps = read_steps(artifact_path(run_dir, STEPS_FILE))
        problems = step_schema_problems(steps)
    except (OSError, ValueError) as error:
        steps, problems = [], [str(error)]
    if not steps and not problems:
        problems = [f"{STEPS_FILE} is empty"]
    yield _row("step schema", problems, f"{len(steps)} steps")
    if problems:
        return
    recorded = receipt["figures"]
    try:
        window = recorded["rise_in_standard_errors"]["arguments"]["window"]
        figures = derive(steps, window=window)
        problems = step_problems(steps, receipt["prefix_gradient_mode"])
        sha256_json(figures)  # finite
    except (ArithmeticError, ValueError) as error:
        yield Row("figures", MISMATCH, f"cannot be derived: {error}")
        return
    yield _row("step consistency", problems, "lengths, modes, skips and reward means agree")
    for name, figure in figures.items():
        row = _equal(f"figure {name}", recorded[name], figure)
        yield row if row.status == MISMATCH else row._replace(detail=_short(figure["value"]))
    yield from _claim_checks(receipt, figures)


def _claim_checks(receipt: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterator[Row]:
    """Derives the claims that the step log decides; the others must at least name evidence of the receipt."""
    derived = {row["claim"]: row for row in derived_claims(figures)}
    for row in receipt["claims"]:
        if row["claim"] in derived and row != derived[row["claim"]]:
            yield _equal(f"claim {row['claim']}", row, derived[row["claim"]])
        else:
            yield Row(f"claim {row['claim']}", OK, f"{row['status']}: {', '.join(row['evidence']) or 'no evidence'}")
    yield _row("claim evidence", evidence_problems(receipt), "all of it is in the receipt")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
