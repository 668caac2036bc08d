"""Specification of the chunked softmax statistics over a slice of the vocabulary."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

TOKEN_BLOCK = 64  # tokens whose logits exist at once


def softmax_statistics(
    logits_of: Callable[[Array], Array], hidden: Float[Array, "T D"], targets: Int[Array, "T"], first: Int[Array, ""]
) -> tuple[Float[Array, "T"], Float[Array, "T"], Float[Array, "T"], Float[Array, "T"]]:
    """Per token, over the vocabulary slice that starts at `first`, in fp32:

    the largest logit m (no gradient), sum exp(l - m), sum exp(l - m) l, and the target's logit (0 where the target
    lies in another slice). A block's logits are recomputed in the backward pass, so memory does not grow with T * V.

    Args:
      logits_of: maps [t, D] hidden states to [t, v] fp32 logits of this slice.
    """

    @jax.checkpoint
    def block(args):
        hidden, targets = args
        logits = logits_of(hidden)
        top = jax.lax.stop_gradient(logits.max(-1))
        weights = jnp.exp(logits - top[:, None])
        local = targets - first
        mine = (local >= 0) & (local < logits.shape[-1])
        picked = jnp.take_along_axis(logits, jnp.where(mine, local, 0)[:, None], axis=-1)[:, 0]
        return top, weights.sum(-1), (weights * logits).sum(-1), jnp.where(mine, picked, 0.0)

    t = hidden.shape[0]
    if t <= TOKEN_BLOCK:
        return block((hidden, targets))
    pad = -t % TOKEN_BLOCK
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, TOKEN_BLOCK, hidden.shape[1])
    targets = jnp.pad(targets, (0, pad)).reshape(-1, TOKEN_BLOCK)
    return tuple(x.reshape(-1)[:t] for x in jax.lax.map(block, (hidden, targets)))
