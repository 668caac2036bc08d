"""Residency: the prompts that are on the devices at once, within a budget of bytes."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from longstraw_jax.prefix import pages
from longstraw_jax.prefix.capture import page_room
from longstraw_jax.prefix.refresh import Resident, free
from longstraw_jax.types import Model, PrefixState

Residents = tuple[Resident, ...]  # the least recently used first, the one in use last


def prompt_bytes(model: Model, capacity: int, chunk: int) -> int:
    """Bytes of a device that the pages of one prompt of up to `capacity` tokens take, unfilled rows included."""
    return pages.prefix_bytes(model.config, page_room(model, capacity, chunk), model.devices) // model.devices


def most(model: Model, capacity: int, chunk: int, budget: int, *, least: int = 1) -> int:
    """How many prompts the budget holds. All have room for `capacity` tokens, so that they share programs.

    Args:
      budget: bytes of a device; 0 for one prompt, whatever it takes.
      least: prompts that are needed at once.

    Raises:
      ValueError: the budget is smaller than these.
    """
    if budget == 0:
        return 1
    one = prompt_bytes(model, capacity, chunk)
    if budget < least * one:
        raise ValueError(
            f"resident_bytes={budget}; accepted: 0 (one prompt), or at least {least * one}: {least} x {one} bytes of a "
            f"device for a prompt of up to {capacity} tokens"
        )
    return budget // one


def acquire(
    held: Residents,
    tokens: Int[np.ndarray, "S"],
    plain: bool,
    count: int,
    take: Callable[[Resident | None], Resident],
    *,
    in_use: PrefixState | None = None,
) -> Residents:
    """The prompts on the devices, with this one as the last and at most `count` in all.

    Where it is not among them the least recently used ones are freed before it is captured, so that their memory is
    what its pages are allocated from.

    Args:
      held: used up: do not use what is not returned.
      plain: the state that the base captures; else the one that base and adapters capture.
      count: at least 1, and 2 with `in_use`.
      take: what is held of the prompt, None for nothing -> its state, fresh enough (see refresh.refresh).
      in_use: the state that the step in flight reads: never freed.
    """
    mine = next((r for r in held if r.plain == plain and np.array_equal(r.tokens, tokens)), None)
    others = [r for r in held if r is not mine]
    for oldest in [r for r in others if r.prefix is not in_use]:
        if len(others) < count:
            break
        free(oldest)
        others.remove(oldest)
    return (*others, take(mine))


def used(held: Residents, resident: Resident) -> Residents:
    """The prompts with this one in the place of what was held of its pages, as the last."""
    return (*(r for r in held if r.prefix is not resident.prefix), resident)
