"""Stages of a training run: a context length, what is selected and what is trained, for so many steps or seconds."""

import collections
import concurrent.futures
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from longstraw_jax.pretrain import step as step_lib
from longstraw_jax.pretrain.step import Batch, State

AHEAD = 4  # batches made while the device works


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a run on rows of one length.

    Attributes:
      name: for the record.
      tokens, rows: of a batch.
      steps: at most.
      seconds: after which the stage ends all the same, compilation not counted; 0 for no limit.
      selected: keys of a query; 0 for all, dense attention.
      trained: parts of step.TRAINED.
      mastered: share of `bound` at which the level of the batches rises, and the stage ends after the hardest; 0 for
        the hardest from the start to the end.
      remat: recompute each layer in the backward pass: a third more arithmetic, where all layers' scores, 4 bytes a
        head and pair of tokens each, do not fit.
    """

    name: str
    tokens: int
    rows: int
    steps: int
    seconds: float
    selected: int
    trained: tuple[str, ...]
    mastered: float = 0.0
    remat: bool = False

    def __post_init__(self):
        checks = (
            ("tokens", self.tokens, self.tokens >= 64, "64 or more"),
            ("rows", self.rows, self.rows >= 1, "1 or more"),
            ("steps", self.steps, self.steps >= 1, "1 or more"),
            ("seconds", self.seconds, self.seconds >= 0, "0 (no limit) or more"),
            ("selected", self.selected, 0 <= self.selected < self.tokens, f"0 (all) to {self.tokens - 1}"),
            ("trained", self.trained, bool(self.trained) and set(self.trained) <= set(step_lib.TRAINED),
             f"one or both of {', '.join(step_lib.TRAINED)}"),
            ("mastered", self.mastered, 0 <= self.mastered <= 1, "0 (no levels) to 1"),
        )  # fmt: skip
        for field, value, good, accepted in checks:
            if not good:
                raise ValueError(f"stages.{self.name}.{field}={value!r}; accepted: {accepted}")


def made_ahead(make: Callable[[int, int], Batch], count: int, level: Callable[[], int]) -> Iterator[tuple[int, Batch]]:
    """make(0, level), make(1, level), ..., with their levels, made by a thread while the caller works on earlier ones.

    A batch has the level of the moment it is asked for, AHEAD steps before it is used, however long it takes to make.
    """

    def asked(i):
        now = level()
        return now, pool.submit(make, i, now)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = collections.deque(asked(i) for i in range(min(AHEAD, count)))
        for i in range(count):
            made_at, batch = waiting.popleft()
            batch = batch.result()
            if i + AHEAD < count:
                waiting.append(asked(i + AHEAD))
            yield made_at, batch


def harder(level: int, hardest: int) -> int:
    """The next level, a half higher: 0, 1, 2, 4, 7, 11, 17, ..."""
    return min(hardest, level + 1 + level // 2)


def run(
    stage: Stage,
    state: State,
    make: Callable[[int, int], Batch],
    advance: Callable[[State, Batch, float], tuple[State, dict[str, Any]]],
    *,
    every: int,
    report: Callable[[dict[str, Any]], None],
    level: int = 0,
    hardest: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[State, dict[str, Any]]:
    """Trains through a stage.

    Its level rises where the mean of `bound`, over the steps since the last report that were of this level, reaches
    stage.mastered: what is hard from the start is never learned, and seeds differ in when they are ready for more.

    Args:
      make: the batch of a step of this stage, counted from 0, at a level.
      advance: one optimizer step, from the state, a batch and the share of the stage that is done (0 to 1, to steps or
        to seconds, what is further); returns the state and scalars: `skipped`, and `bound` where the stage has levels.
        See step.update.
      every: steps between reports, at which the host waits for the device and the level may rise.
      report: takes a record of scalars; `mastery` is the mean that is held against stage.mastered.
      level: to begin at, as the stage before ended; a stage without levels begins at the hardest.
      hardest: level after which nothing is harder.
      clock: seconds.

    Returns:
      The state, and the stage's record: name, steps, tokens, seconds without and of compilation, tokens_per_second,
      skipped steps, sha256 of all ids trained on, the level at the end, when each level was reached, whether the
      hardest was mastered, and the last metrics.

    Raises:
      ValueError: a level that is not 0 to the hardest.
      FloatingPointError: more than one step in a hundred had a gradient that was not finite.
    """
    if not 0 <= level <= hardest:
        raise ValueError(f"stages.{stage.name}: level={level}; accepted: 0 to the hardest, {hardest}")
    level = level if stage.mastered else hardest
    levels, heard, mastered = [{"level": level, "step": 0, "seconds": 0.0}], [], False
    started, compiling = clock(), 0.0
    digest, skipped, done, metrics = hashlib.sha256(), [], 0, {}
    for i, (made_at, batch) in enumerate(made_ahead(make, stage.steps, lambda: levels[-1]["level"])):
        share = max(i / stage.steps, (clock() - started) / stage.seconds if stage.seconds and i else 0.0)
        if share >= 1:
            break
        digest.update(np.ascontiguousarray(batch.ids))
        state, metrics = advance(state, batch, share)
        skipped.append(metrics["skipped"])
        if stage.mastered and made_at == level:
            heard.append(metrics["bound"])
        done += 1
        if i == 0:
            jax.block_until_ready(metrics)
            compiling, started = clock() - started, clock()
        if done % every == 0 or done == stage.steps:
            numbers = {name: float(value) for name, value in metrics.items()}
            mastery = sum(map(float, heard)) / len(heard) if heard else 0.0
            seconds, heard = clock() - started, []
            where = {"stage": stage.name, "step": done, "seconds": seconds, "share": share, "level": level}
            report(where | {"mastery": mastery} | numbers)
            risen = stage.mastered and mastery >= stage.mastered
            if risen and level == hardest:
                mastered = True
                break
            if risen:
                level = harder(level, hardest)
                levels.append({"level": level, "step": done, "seconds": seconds})
    last = {name: float(value) for name, value in metrics.items()}
    seconds, missed = clock() - started, int(sum(map(float, skipped)))
    if missed > done // 100:
        raise FloatingPointError(f"stage {stage.name}: {missed} of {done} gradients were not finite")
    tokens = done * stage.rows * stage.tokens
    return state, {
        "name": stage.name,
        "steps": done,
        "tokens": tokens,
        "seconds": seconds,
        "compile_seconds": compiling,
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "skipped": missed,
        "ids_sha256": digest.hexdigest(),
        "level": level,
        "levels": levels,
        "mastered": mastered,
        "metrics": last,
    }
