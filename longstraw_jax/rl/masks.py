"""Which response tokens enter the loss: decided by lengths, never by token values after sampling."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


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
