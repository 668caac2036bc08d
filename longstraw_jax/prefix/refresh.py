"""The refresh policy: the prompt on the devices is kept while it is fresh enough, else captured again."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from longstraw_jax import launch
from longstraw_jax.model.choices import Choices
from longstraw_jax.prefix import freshness
from longstraw_jax.prefix.capture import capture
from longstraw_jax.types import Model, Params, PrefixState

POLICIES = ("every_step", "every_n", "drift")


@dataclasses.dataclass(frozen=True)
class RefreshPolicy:
    """How stale a prompt may be that is taken again after the weights have changed; static.

    Attributes:
      policy: one of POLICIES. "every_step": not at all. "every_n": below `every` steps old. "drift": that, and its
        probe has moved by at most `bound` since the capture.
      every: optimizer steps, at least 1.
      bound: mean |change of log-probability| over the probe, nats a token.
      probe_tokens: the probe is so many first tokens of a response.
    """

    policy: str = "every_step"
    every: int = 8
    bound: float = 0.05
    probe_tokens: int = 32

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise ValueError(f"refresh.policy={self.policy!r}; accepted: {' or '.join(map(repr, POLICIES))}")
        for field in ("every", "probe_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"refresh.{field}={getattr(self, field)}; accepted: at least 1")
        if not 0 <= self.bound < math.inf:
            raise ValueError(f"refresh.bound={self.bound}; accepted: 0 or more nats a token, finite")

    def allows(self, age: int, drift: "Drift | None") -> bool:
        """Whether a stale prompt is used once more.

        Args:
          age: optimizer steps since its capture.
          drift: its signal; None where nothing was measured, which `drift` does not allow.
        """
        if self.policy == "every_step" or age >= self.every:
            return False
        return self.policy == "every_n" or (drift is not None and drift.signal <= self.bound)


@dataclasses.dataclass(frozen=True)
class Probe:
    """First tokens of a response [n] int32, and their log-probabilities at the capture [n] fp32; on the host."""

    tokens: Int[np.ndarray, "n"]
    logp: Float[np.ndarray, "n"]


@dataclasses.dataclass(frozen=True)
class Drift:
    """How far a stale prompt's probe has moved: means of |differences of log-probability|, nats a token.

    Attributes:
      signal: now against the capture, both from the resident state. Costs one short score, and holds what the adapters
        change at the response's own tokens too.
      truth: from the stale state against the capture that took its place, by the same adapters: what staleness alone
        does. None where the prompt was not captured again.
    """

    signal: float
    truth: float | None = None


@dataclasses.dataclass(frozen=True)
class Resident:
    """A prompt that is on the devices now, and the optimizer step it was captured at.

    Attributes:
      choices: on the host, of each chunk of the capture; None where none were kept.
      probe: what its drift is measured by, None without.
      drift: as it was last taken; None where none was measured then.
      plain: the base captured it, without adapters.
    """

    tokens: np.ndarray
    prefix: PrefixState
    captured_at: int
    choices: list[Choices] | None = None
    probe: Probe | None = None
    drift: Drift | None = None
    plain: bool = False


ProbeScore = Callable[[PrefixState, Int[np.ndarray, "n"]], Float[np.ndarray, "n"]]


def refresh(
    model: Model,
    base: Params,
    base_fingerprint: UInt[Array, "2"],
    adapters: Params | None,
    tokens: Int[np.ndarray, "S"],
    held: Resident | None,
    *,
    chunk: int,
    capacity: int,
    step: int,
    progress: Callable[[int], None] | None = None,
    record: tuple[str, ...] = (),
    policy: RefreshPolicy = RefreshPolicy(),
    score: ProbeScore | None = None,
) -> Resident:
    """The resident state of a prompt: the one held if it is of this prompt and fresh enough, else a new one.

    Fresh is what these weights captured; how stale a state may be beside that, `policy` says.

    Args:
      base_fingerprint: of `base`, taken once.
      adapters: None for a prompt that the base policy captures (`frozen` mode): it stays valid for ever.
      tokens: the whole prompt, the boundary token included.
      held: what the devices hold in its place. Its pages are freed, and its choices emptied, before the new ones are
        filled, on the host too; do not use it afterwards.
      chunk, capacity, progress: as in `capture`.
      step: optimizer steps so far, kept with a new capture.
      record: kinds of choices of each chunk to keep on the host.
      score: log-probabilities of a probe's tokens from a state, under these adapters; for a `held` that has a probe.

    Raises:
      ConfigError, ValueError: as `capture`.
    """
    expected, probe, stale, drift = freshness.weights_fingerprint(base_fingerprint, adapters), None, None, None
    if held is not None:
        if np.array_equal(held.tokens, tokens) and (held.choices is not None or not record):
            if _is_fresh(held.prefix, expected):
                return held if held.drift is None else dataclasses.replace(held, drift=None)
            if held.probe is not None and score is not None:
                probe, stale = held.probe, score(held.prefix, held.probe.tokens)
                drift = Drift(_distance(stale, probe.logp))
            if policy.allows(step - held.captured_at, drift):
                return dataclasses.replace(held, drift=drift)
        free(held)
    kept: list[Choices] | None = [] if record else None
    prefix = capture(
        model,
        base,
        adapters,
        tokens[:-1],
        chunk=chunk,
        fingerprint=expected,
        capacity=capacity,
        progress=progress,
        record=record,
        keep=None if kept is None else lambda chosen: kept.append(jax.device_get(chosen)),
    )
    found = Resident(tokens, jax.block_until_ready(prefix), step, kept, plain=adapters is None)
    if drift is None:
        return found
    fresh = score(prefix, probe.tokens)
    drift = dataclasses.replace(drift, truth=_distance(stale, fresh))
    return dataclasses.replace(found, probe=dataclasses.replace(probe, logp=fresh), drift=drift)


def free(held: Resident) -> None:
    """Gives its pages back and empties its choices; do not use it afterwards."""
    for pool in jax.tree.leaves((held.prefix.latents, held.prefix.index_keys)):
        pool.delete()
    if held.choices is not None:
        held.choices.clear()


def largest(drifts: Sequence[Drift | None]) -> Drift | None:
    """The largest signal and the largest truth of those that were measured."""
    signals = [drift.signal for drift in drifts if drift is not None]
    truths = [drift.truth for drift in drifts if drift is not None and drift.truth is not None]
    return Drift(max(signals), max(truths, default=None)) if signals else None


def _distance(one: Float[np.ndarray, "n"], other: Float[np.ndarray, "n"]) -> float:
    # Process 0's: all processes must keep or capture alike.
    return launch.on_first(lambda: float(np.abs(one.astype(np.float64) - other).mean()))


def _is_fresh(prefix: PrefixState, expected: UInt[Array, "2"]) -> bool:
    try:
        freshness.check_fresh(prefix, expected)
    except freshness.StalePrefixError:
        return False
    return True
