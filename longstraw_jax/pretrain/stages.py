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
        )  # fmt: skip
        for field, value, good, accepted in checks:
            if not good:
                raise ValueError(f"stages.{self.name}.{field}={value!r}; accepted: {accepted}")


def made_ahead(make: Callable[[int], Batch], count: int) -> Iterator[Batch]:
    """make(0), make(1), ..., made by a thread while the caller works on earlier ones."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = collections.deque(pool.submit(make, i) for i in range(min(AHEAD, count)))
        for i in range(count):
            batch = waiting.popleft().result()
            if i + AHEAD < count:
                waiting.append(pool.submit(make, i + AHEAD))
            yield batch


def run(
    stage: Stage,
    state: State,
    make: Callable[[int], Batch],
    advance: Callable[[State, Batch, float], tuple[State, dict[str, Any]]],
    *,
    every: int,
    report: Callable[[dict[str, Any]], None],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[State, dict[str, Any]]:
    """Trains through a stage.

    Args:
      make: the batch of a step of this stage, counted from 0.
      advance: one optimizer step, from the state, a batch and the share of the stage that is done (0 to 1, to steps or
        to seconds, what is further); returns the state and scalars, `skipped` among them. See step.update.
      every: steps between reports, at which the host waits for the device.
      report: takes a record of scalars.
      clock: seconds.

    Returns:
      The state, and the stage's record: name, steps, tokens, seconds without and of compilation, tokens_per_second,
      skipped steps, sha256 of all ids trained on, and the last metrics.

    Raises:
      FloatingPointError: more than one step in a hundred had a gradient that was not finite.
    """
    started, compiling = clock(), 0.0
    digest, skipped, done, metrics = hashlib.sha256(), [], 0, {}
    for i, batch in enumerate(made_ahead(make, stage.steps)):
        share = max(i / stage.steps, (clock() - started) / stage.seconds if stage.seconds and i else 0.0)
        if share >= 1:
            break
        digest.update(np.ascontiguousarray(batch.ids))
        state, metrics = advance(state, batch, share)
        skipped.append(metrics["skipped"])
        done += 1
        if i == 0:
            jax.block_until_ready(metrics)
            compiling, started = clock() - started, clock()
        if done % every == 0 or done == stage.steps:
            numbers = {name: float(value) for name, value in metrics.items()}
            report({"stage": stage.name, "step": done, "seconds": clock() - started, "share": share} | numbers)
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
        "metrics": last,
    }
