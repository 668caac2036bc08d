"""The refresh policy: the prompt on the devices is kept while its weights are the policy's, else captured again."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array, Int, UInt

from longstraw_jax.model.choices import Choices
from longstraw_jax.prefix import freshness
from longstraw_jax.prefix.capture import capture
from longstraw_jax.types import Model, Params, PrefixState


@dataclasses.dataclass(frozen=True)
class Resident:
    """The prompt that is on the devices now, and the optimizer step it was captured at.

    choices: on the host, of each chunk of the capture; None where none were kept.
    """

    tokens: np.ndarray
    prefix: PrefixState
    captured_at: int
    choices: list[Choices] | None = None


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
) -> Resident:
    """The resident state of a prompt: the one held if it is of this prompt and of these weights, else a new one.

    Args:
      base_fingerprint: of `base`, taken once.
      adapters: None for a prompt that the base policy captures (`frozen` mode): it stays valid for ever.
      tokens: the whole prompt, the boundary token included.
      held: what the devices hold. Its pages are freed, and its choices emptied, before a new prompt's are filled, so
        that one prompt is resident at a time, on the host too; do not use it afterwards.
      chunk, capacity, progress: as in `capture`.
      step: optimizer steps so far, kept with a new capture.
      record: kinds of choices of each chunk to keep on the host.

    Raises:
      ConfigError, ValueError: as `capture`.
    """
    expected = freshness.weights_fingerprint(base_fingerprint, adapters)
    if held is not None:
        if _is_current(held, tokens, expected) and (held.choices is not None or not record):
            return held
        for pool in jax.tree.leaves((held.prefix.latents, held.prefix.index_keys)):
            pool.delete()
        if held.choices is not None:
            held.choices.clear()
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
    return Resident(tokens, jax.block_until_ready(prefix), step, kept)


def _is_current(held: Resident, tokens: np.ndarray, expected: UInt[Array, "2"]) -> bool:
    if not np.array_equal(held.tokens, tokens):
        return False
    try:
        freshness.check_fresh(held.prefix, expected)
    except freshness.StalePrefixError:
        return False
    return True
