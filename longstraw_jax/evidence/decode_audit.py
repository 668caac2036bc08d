"""Audit of decoded responses: stopped or cut off, degenerate, an echo of the prompt, broken characters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

REPEATS = 3  # a loop has gone round at least this often
LEAST_LOOP = 8  # tokens that a loop covers at least, so that "1111" is an answer
LEAST_ECHO = 16  # tokens copied at least, so that an answer is no echo
REPLACEMENT = "\ufffd"
FLAGS = ("stopped", "hit_cap", "degenerate", "echo", "replacement", "empty")


def audit(prompt: Int[np.ndarray, "S"], response: Sequence[int], *, ending: int, text: str) -> dict[str, bool]:
    """What is odd about one response; the flags do not exclude one another, but for the first two.

    Args:
      prompt: token ids.
      response: token ids, the eos or stop sequence included.
      ending: how many of them ended it, see `stopping.ending`; 0 where it was cut off.
      text: as decoded without special tokens.

    Returns:
      FLAGS by name: stopped; hit_cap (no end within the budget); degenerate (`is_degenerate`); echo (`is_echo`);
      replacement (the text has U+FFFD: bytes that are no UTF-8); empty (no text but space).
    """
    said = list(response[: len(response) - ending])
    return {
        "stopped": ending > 0,
        "hit_cap": ending == 0,
        "degenerate": is_degenerate(said),
        "echo": is_echo(prompt, said),
        "replacement": REPLACEMENT in text,
        "empty": not text.strip(),
    }


def is_degenerate(ids: Sequence[int]) -> bool:
    """Whether the response ends in a loop: a period of tokens, gone round REPEATS times or more, that covers at least
    half of the response and LEAST_LOOP tokens.
    """
    tokens = np.asarray(ids, np.int64)
    for period in range(1, tokens.size // REPEATS + 1):
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        covered = tokens.size - (differs[-1] + 1 if differs.size else 0)
        if covered >= max(REPEATS * period, LEAST_LOOP) and 2 * covered >= tokens.size:
            return True
    return False


def is_echo(prompt: Int[np.ndarray, "S"], ids: Sequence[int]) -> bool:
    """Whether half of the response or more, and LEAST_ECHO tokens, is one passage of the prompt."""
    tokens = np.asarray(ids, "<i4")
    length = max(LEAST_ECHO, -(-tokens.size // 2))
    text = np.asarray(prompt, "<i4").tobytes()
    return any(_holds(text, tokens[start : start + length].tobytes()) for start in range(tokens.size - length + 1))


def _holds(text: bytes, passage: bytes) -> bool:
    """Whether the ids of `passage` follow one another in `text`, at a whole id."""
    at = text.find(passage)
    while at % 4 and at >= 0:
        at = text.find(passage, at + 1)
    return at >= 0


def shares(audits: Sequence[dict[str, bool]]) -> dict[str, Any]:
    """Number of responses, and the count and share of each flag; shares are None of none."""
    total = len(audits)
    counts = {flag: sum(bool(found[flag]) for found in audits) for flag in FLAGS}
    return {
        "responses": total,
        "counts": counts,
        "shares": {flag: count / total if total else None for flag, count in counts.items()},
    }
