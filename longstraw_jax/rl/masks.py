"""Which response tokens enter the loss: decided by lengths, never by token values after sampling."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


def finish(
    tokens: Int[np.ndarray, "N T"], eos_ids: int | Sequence[int], max_len: int
) -> tuple[Int[np.ndarray, "N"], Bool[np.ndarray, "N"]]:
    """Where each sampled response ends, on the host.

    The first end-of-sequence token of any kind belongs to the response and nothing after it does, so an
    eos that doubles as the padding token is still trained. This is the only place that looks at token
    values; everything later goes by the lengths returned here.

    Args:
        tokens: int [N, T], sampled ids; whatever follows the eos is ignored.
        eos_ids: one id or several (GLM ends a turn with any of its role tokens); none means that every
            response runs to the end of its budget.
        max_len: response budget in tokens; ids past it are ignored.

    Returns:
        lengths int32 [N] with the eos counted, truncated bool [N]: no eos within `max_len`.

    Raises:
        ValueError: tokens are not a two-dimensional integer array, or max_len is below one.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens: shape {tokens.shape} {tokens.dtype}; accepted: an integer array [N, T]")
    if max_len < 1:
        raise ValueError(f"max_len: {max_len}; accepted: at least 1 token")
    tokens = tokens[:, :max_len]
    is_eos = np.isin(tokens, np.atleast_1d(np.asarray(eos_ids, dtype=np.int64)))
    ended = is_eos.any(axis=1)
    # argmax of a row without an eos is 0, hence the `where`; a zero-width array has no argmax at all
    first = is_eos.argmax(axis=1) if tokens.shape[1] else np.zeros(len(tokens), np.int64)
    lengths = np.where(ended, first + 1, tokens.shape[1]).astype(np.int32)
    return lengths, ~ended


def response_mask(lengths: Int[Array, "N"], max_len: int) -> Bool[Array, "N T"]:
    """Tokens that belong to a response, from its length alone.

    Args:
        lengths: int [N]; 0 gives an empty row, anything from `max_len` on a full one.
        max_len: static buffer width T.

    Returns:
        bool [N, T].
    """
    return jnp.arange(max_len) < jnp.asarray(lengths)[:, None]


def without_rows(mask: Bool[Array, "N T"], dropped: Bool[Array, "N"]) -> Bool[Array, "N T"]:
    """Takes whole responses out of the loss (truncated ones, groups that carry no signal).

    Args:
        mask: bool [N, T].
        dropped: bool [N], True where the response is left out of loss and count alike.

    Returns:
        bool [N, T].
    """
    return mask & ~jnp.asarray(dropped)[:, None]
