"""The step log: steps.jsonl, one JSON object an optimizer step, and the same scalars in TensorBoard.

steps.jsonl is the record that receipts are derived from. Steps count from 1 without a gap. A line is written
whole and is on disk when `write` returns, so write a step's line BEFORE saving its checkpoint: then a run
killed at any moment has every line that a resume needs, and `truncate_steps` drops those of steps that will
be redone. Fields of a line: see `longstraw_jax.evidence.figures`. JSON has no NaN: a value that is not finite
becomes null.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorboardX

from longstraw_jax.io.whole_file import write_whole

STEPS_FILE = "steps.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class MetricWriter:
    """Appends step records to a run folder. Open it on process 0 only; use it as a context manager.

    Args:
      workdir: the run folder; made if it is missing.
      last_step: the step that the run resumes from (0: from the start). Later lines are dropped from the log.

    Raises:
      ValueError: the log does not hold every step up to `last_step`.
    """

    def __init__(self, workdir: str | os.PathLike, *, last_step: int = 0):
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        truncate_steps(workdir / STEPS_FILE, last_step)
        self._last_step = last_step
        self._file = open(workdir / STEPS_FILE, "ab", buffering=0)
        # purge_step hides what an earlier, killed run showed of the steps that are run again.
        self._tensorboard = tensorboardX.SummaryWriter(
            str(workdir / TENSORBOARD_FOLDER), purge_step=last_step + 1 if last_step else None
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes one step: a line of steps.jsonl, then its scalars to TensorBoard.

        Args:
          record: the step's fields; NumPy and JAX scalars and small arrays are taken as numbers and lists.

        Raises:
          ValueError: `step` is not the one after the last one written.
          TypeError: a value is not JSON.
          OSError: the line could not be written whole; the log is as it was before.
        """
        expected = self._last_step + 1
        if record.get("step") != expected:
            raise ValueError(f"step = {record.get('step')!r}; the log's next step is {expected}")
        plain = _plain(record)
        line = json.dumps(plain, allow_nan=False, ensure_ascii=False).encode("utf-8") + b"\n"
        size = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError(f"{STEPS_FILE}: the line of step {expected} was cut short; is the disk full?")
            os.fsync(self._file.fileno())
        except OSError:
            os.ftruncate(self._file.fileno(), size)
            raise
        self._last_step = expected
        for tag, value in step_scalars(plain).items():
            self._tensorboard.add_scalar(tag, value, expected)
        self._tensorboard.flush()

    def close(self) -> None:
        """Closes both files."""
        self._file.close()
        self._tensorboard.close()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def read_steps(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads a whole step log.

    Returns:
      The records in order; step i is at index i - 1.

    Raises:
      ValueError: a line is not one JSON object, holds NaN or a repeated key, is out of order or is cut short.
      OSError: the file cannot be read.
    """
    records = []
    for number, line in enumerate(_lines(Path(path).read_bytes()), start=1):
        records.append(_parse(line, number, path))
    return records


def truncate_steps(path: str | os.PathLike, last_step: int) -> int:
    """Cuts a step log back to the step that a run resumes from.

    Args:
      path: steps.jsonl; may be missing when `last_step` is 0.
      last_step: the last step to keep, from 0.

    Returns:
      How many lines were dropped; a line that a kill cut short counts as one.

    Raises:
      ValueError: the log does not hold steps 1 to `last_step` whole, so it belongs to another checkpoint.
    """
    path = Path(path)
    lines = _lines(path.read_bytes()) if path.exists() else []
    if len(lines) < last_step:
        raise ValueError(f"{path} holds {len(lines)} steps; the checkpoint is at step {last_step}")
    kept = lines[:last_step]
    for number, line in enumerate(kept, start=1):
        _parse(line, number, path)
    if len(kept) < len(lines):
        write_whole(path, b"".join(kept))
    return len(lines) - len(kept)


def step_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite scalars of a plain step record by TensorBoard tag.

    Entries of `metrics` keep their names, which are TRL's where it has one, phases become `seconds/<phase>`, and
    `reward_mean` becomes `reward`. A colon, which a tag may not hold, becomes an underscore.
    """
    flat = {**record, **record.get("metrics", {})}
    flat |= {f"seconds/{phase}": value for phase, value in record.get("seconds", {}).items()}
    flat["reward"] = flat.pop("reward_mean", None)
    del flat["step"]  # the axis, not a curve
    return {tag.replace(":", "_"): float(value) for tag, value in flat.items() if isinstance(value, (bool, int, float))}


def _lines(data: bytes) -> list[bytes]:
    """Splits at newlines only, which every line keeps; a cut last line lacks its own."""
    return re.findall(rb"[^\n]*\n|[^\n]+\Z", data)


def _parse(line: bytes, number: int, path: str | os.PathLike) -> dict[str, Any]:
    """One record, or a ValueError that names the line."""
    try:
        if not line.endswith(b"\n"):
            raise ValueError("the line is cut short")
        record = parse_strict_json(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} line {number}: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path} line {number}: not a JSON object")
    if type(record.get("step")) is not int or record["step"] != number:
        raise ValueError(f"{path} line {number}: step = {record.get('step')!r}; expected {number}")
    return record


def parse_strict_json(data: bytes) -> Any:
    """Parses UTF-8 JSON, refusing what readers disagree about: NaN, infinities, repeated keys, half characters.

    Raises:
      ValueError: the data is not such JSON.
    """
    value = json.loads(
        data.decode("utf-8"),
        parse_constant=_finite,
        parse_float=_finite,
        object_pairs_hook=_unique_keys,
    )
    json.dumps(value, ensure_ascii=False).encode("utf-8")  # an escaped lone surrogate cannot be written again
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key is repeated")
    return record


def _plain(value: Any) -> Any:
    """JSON values from NumPy and JAX ones; floats that are not finite become None."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "dtype"):
        return _plain(np.asarray(value).tolist())
    raise TypeError(f"{type(value).__name__} is not a JSON value: {value!r}")
