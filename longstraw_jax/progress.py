"""How far a run is, beside its state: the place in the order of rows, and what is counted from step to step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from longstraw_jax.io import data
from longstraw_jax.train import StepReport


@dataclasses.dataclass(frozen=True)
class Progress:
    """Counted up to the last step and kept in the checkpoint, so that a resumed run goes on from it.

    Attributes:
      rows: places taken of the endless order of rows.
      silent_steps: steps in a row, up to the last one, without a signal in any group.
      signals: steps that had one.
      num_tokens: prompt and response tokens of all rollouts, a prompt once for its group.
    """

    rows: int = 0
    silent_steps: int = 0
    signals: int = 0
    num_tokens: int = 0

    def after(self, report: StepReport, rows: int) -> "Progress":
        """After a step that took so many further rows, 0 for a step on an earlier rollout."""
        signal = any(r.carries_signal for r in report.rollouts)
        rolled_out = [*report.rollouts, *report.dropped] if rows else []
        return Progress(
            self.rows + rows,
            0 if signal else self.silent_steps + 1,
            self.signals + signal,
            self.num_tokens + sum(r.tokens for r in rolled_out),
        )


class Rows:
    """The rows of one rollout, taken in order from a place of the endless order of rows.

    Args:
      build: a row's prompt -> token ids.
      start: the first place.
    """

    def __init__(self, dataset: data.Dataset, build: Callable[[Any], np.ndarray], *, seed: int, start: int):
        self.taken: list[dict[str, Any]] = []
        self._rows, self._build, self._seed, self._start = dataset.rows, build, seed, start

    def prompt(self, number: int) -> np.ndarray:
        """Takes the next row, which has this number within the rollout, and builds its prompt."""
        place = self._start + number
        self.taken.append(self._rows[data.row_order(len(self._rows), self._seed, place, 1)[0]])
        return self._build(self.taken[number]["prompt"])
