"""Dataset rows from parquet or JSONL: validated, deduplicated, hashed, and their order by step."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow
import pyarrow.parquet
from absl import logging
from jaxtyping import Int64

from longstraw_jax import fingerprint

# The published DAPO-Math-17k file repeats its 17k prompts about 100 times; batches keep copies out of memory.
PARQUET_BATCH_ROWS = 2048

# Names that the reward call itself passes (TRL's signature); a column of that name would be passed twice.
REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")

StrPath = str | os.PathLike[str]


class DataError(ValueError):
    """A dataset file or row that cannot be used; the message names file, row and field."""


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Rows ready for training.

    Attributes:
      rows: dicts with `id` (int or str, unique), `prompt` (a string or a list of {role, content} messages, as
        in the file) and `columns` (every other column by name, for the reward functions; `ground_truth` is
        taken out of `reward_model` when the row has no such column of its own).
      files: path as given -> hex SHA-256, in reading order, which is the order of the rows.
      read: rows read, duplicates included.
      duplicates_dropped: rows dropped because an earlier row has their id.
      repeated_content: rows kept although an earlier row under another id has the same messages.
    """

    rows: tuple[dict, ...]
    files: dict[str, str]
    read: int
    duplicates_dropped: int
    repeated_content: int


def read_rows(paths: StrPath | Sequence[StrPath], *, required: Sequence[str] = ()) -> Dataset:
    """Reads prompt-only rows (TRL) or DAPO-Math rows (verl) from .parquet and .jsonl files.

    A row needs `prompt`. Its id is `extra_info.index`, else a column `id`, else its number among all rows
    read, from 0; every row gives one, or none does. A row whose id was seen before is dropped and counted,
    whatever it holds; warnings tell when such a row held another prompt, and when a prompt repeats under other
    ids.

    Args:
      paths: one file or several, read in this order.
      required: names that every row's `columns` must hold, for example `("ground_truth",)` for a reward that
        compares with it.

    Raises:
      DataError: no file, an absent, empty or unreadable file, another suffix, or a row with a missing or
        mistyped field, or an id on some rows alone. JSONL rows are named by line from 1, parquet rows by number from 0.
    """
    files = _existing_files(paths)
    digests = {str(file): fingerprint.sha256_file(file) for file in files}
    rows: list[dict] = []
    seen: dict[int | str, str] = {}  # id -> prompt digest
    first_given: bool | None = None  # whether the first row gives an id
    prompts: set[str] = set()
    read = duplicates = conflicts = repeats = 0
    for file in files:
        before = read
        for where, raw in _READERS[file.suffix](file):
            row = _checked_row(raw, read, f"{file}, {where}", required)
            read += 1
            digest, given = _prompt_digest(row["prompt"]), _own_id(raw) is not None
            first_given = given if first_given is None else first_given
            if given != first_given:
                raise DataError(
                    f"{file}, {where}: {'gives an' if given else 'gives no'} id, unlike the rows before;"
                    " expected extra_info.index (or id) on every row or on none"
                )
            if row["id"] in seen:
                duplicates += 1
                conflicts += digest != seen[row["id"]]
                continue
            seen[row["id"]] = digest
            repeats += digest in prompts
            prompts.add(digest)
            rows.append(row)
        if read == before:
            raise DataError(f"{file}: holds no rows; expected at least one")
    names = ", ".join(map(str, files))
    if conflicts:
        message = "%s: %d of %d rows dropped for an id seen before held another prompt; ids must be unique"
        logging.warning(message, names, conflicts, duplicates)
    if repeats:
        logging.warning("%s: %d of %d rows repeat a prompt under another id", names, repeats, len(rows))
    return Dataset(tuple(rows), digests, read, duplicates, repeats)


def row_order(dataset_size: int, seed: int, step: int, rows_per_step: int) -> Int64[np.ndarray, "rows_per_step"]:
    """Row indices of one step: epochs without replacement, each with its own shuffle.

    A pure function, so a resumed run needs the step alone to see the rows it would have seen. Step s takes
    rows_per_step places of the endless sequence of epochs from s * rows_per_step on. No row is left out where
    an epoch ends within a step, so such a step can hold one row twice.

    Args:
      dataset_size: number of rows N, at least 1.
      seed: 0 <= seed < 2**64.
      step: counted from 0.
      rows_per_step: at least 1.

    Returns:
      int64 [rows_per_step], each in [0, N).

    Raises:
      ValueError: an argument outside its range.
    """
    for name, value, low, high in (
        ("dataset_size", dataset_size, 1, 2**63),
        ("seed", seed, 0, 2**64),
        ("step", step, 0, 2**63),
        ("rows_per_step", rows_per_step, 1, 2**31),
    ):
        if not low <= value < high:
            raise ValueError(f"{name} is {value}; accepted: {low} <= {name} < {high}")
    places = np.arange(rows_per_step, dtype=np.int64) + step * rows_per_step
    epochs, within = np.divmod(places, dataset_size)
    order = np.empty(rows_per_step, np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        order[here] = _epoch_order(dataset_size, seed, int(epoch))[within[here]]
    return order


def as_messages(prompt: str | Sequence[Mapping]) -> list[dict]:
    """A row's prompt as chat messages; a string is one user message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def _epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    # NumPy keeps raw bit streams alike over versions, but not Generator.permutation (NEP 19).
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(size)
    return np.argsort(words, kind="stable")


def _as_list(paths: StrPath | Sequence[StrPath]) -> list[StrPath]:
    return [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)


def _existing_files(paths: StrPath | Sequence[StrPath]) -> list[pathlib.Path]:
    files = [pathlib.Path(path) for path in _as_list(paths)]
    if not files:
        raise DataError("no dataset file given; expected one or more .parquet or .jsonl files")
    for file in files:
        if file.suffix not in _READERS:
            raise DataError(f"{file}: suffix {file.suffix!r} is not read; accepted: {', '.join(_READERS)}")
        if not file.is_file():
            raise DataError(f"{file}: no such file" if not file.exists() else f"{file}: not a file")
        if file.stat().st_size == 0:
            raise DataError(f"{file}: the file is empty; expected at least one row")
    return files


def _jsonl_rows(file: pathlib.Path) -> Iterator[tuple[str, dict]]:
    with open(file, "rb") as handle:  # as bytes: only \n ends a line, and a bad byte has a line number
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except ValueError as error:
                # The decoder's own message counts lines from this line's start.
                reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                raise DataError(f"{file}, line {number}: not JSON ({reason}); expected an object") from error
            if not isinstance(row, dict):
                raise DataError(f"{file}, line {number}: {_shown(row)}; expected a JSON object")
            yield f"line {number}", row


def _parquet_rows(file: pathlib.Path) -> Iterator[tuple[str, dict]]:
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for row in batch.to_pylist():
                    yield f"row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not readable as parquet ({error})") from error


_READERS = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows}


def _checked_row(raw: dict, number: int, place: str, required: Sequence[str]) -> dict:
    """The row as `Dataset.rows` holds it, or a DataError that starts with `place`."""
    _check_prompt(raw, place)
    for name in REWARD_ARGUMENTS:
        if name in raw:
            raise DataError(f"{place}: column {name!r} is a name that the reward call uses; rename it")
    columns = {name: value for name, value in raw.items() if name != "prompt"}
    if raw.get("reward_model") is not None:
        truth = _inner(raw, "reward_model", "ground_truth", place)
        if not isinstance(truth, str):
            raise DataError(f"{place}: field reward_model.ground_truth is {_shown(truth)}; expected a string")
        columns.setdefault("ground_truth", truth)
    for name in required:
        if columns.get(name) is None:
            also = " or reward_model.ground_truth" if name == "ground_truth" else ""
            raise DataError(f"{place}: field {name}{also} is missing; fields found: {', '.join(raw)}")
    if raw.get("extra_info") is not None:
        _inner(raw, "extra_info", "index", place)
    row_id = _own_id(raw)
    if row_id is not None and (isinstance(row_id, bool) or not isinstance(row_id, (int, str))):
        name = "id" if row_id is raw.get("id") else "extra_info.index"
        raise DataError(f"{place}: field {name} is {_shown(row_id)}; expected an integer or a string")
    return {"id": number if row_id is None else row_id, "prompt": raw["prompt"], "columns": columns}


def _check_prompt(raw: dict, place: str) -> None:
    prompt = raw.get("prompt")
    accepted = "expected a string or a list of {role, content} messages"
    if prompt is None:
        raise DataError(f"{place}: field prompt is missing; {accepted}; fields found: {', '.join(raw)}")
    if not isinstance(prompt, (str, list)) or not prompt:
        raise DataError(f"{place}: field prompt is {_shown(prompt)}; {accepted}, not empty")
    if isinstance(prompt, str):
        _check_text(prompt, "prompt", place)
        return
    for index, message in enumerate(prompt):
        if not isinstance(message, dict):
            raise DataError(f"{place}: field prompt[{index}] is {_shown(message)}; {accepted}")
        for key in ("role", "content"):
            _check_text(message.get(key), f"prompt[{index}].{key}", place)


def _check_text(value: object, name: str, place: str) -> None:
    if not isinstance(value, str):
        raise DataError(f"{place}: field {name} is {_shown(value)}; expected a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # half an emoji, written \ud83d in JSON
        raise DataError(f"{place}: field {name} is not valid Unicode ({error.reason})") from error


def _inner(raw: dict, outer: str, inner: str, place: str) -> object:
    if not isinstance(raw[outer], dict):
        raise DataError(f"{place}: field {outer} is {_shown(raw[outer])}; expected an object with {inner!r}")
    return raw[outer].get(inner)


def _own_id(raw: dict) -> object:
    info = raw.get("extra_info")
    index = info.get("index") if isinstance(info, dict) else None
    return raw.get("id") if index is None else index


def _prompt_digest(prompt: str | list[dict]) -> str:
    return fingerprint.sha256_json([(message["role"], message["content"]) for message in as_messages(prompt)])


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
