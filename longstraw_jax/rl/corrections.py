"""Importance ratios between the policy that sampled and the policy that is trained: weights, masks, by sequence."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

LEVELS = ("token", "sequence")


def truncated_importance(
    trainer_logp: Float[Array, "*rows T"],
    sampler_logp: Float[Array, "*rows T"],
    cap: float,
    mask: Bool[Array, "*rows T"],
) -> Float[Array, "*rows T"]:
    """min(exp(trainer - sampler), cap) a token: truncated importance sampling.

    Corrects for a sampler whose numerics differ from the trainer's; the cap bounds the variance
    (Ionides 2008; for RL with a separate sampler, as TRL and verl use it).

    Args:
        trainer_logp: [*rows, T], log-probabilities in nats of the behaviour policy as the trainer computes
            them (the old policy, not the one being differentiated).
        sampler_logp: [*rows, T], the log-probabilities that the sampler recorded, at the same temperature.
        cap: largest weight.
        mask: bool [*rows, T]; values elsewhere may be anything, NaN included.

    Returns:
        fp32 [*rows, T], constant under differentiation; exactly 1 outside the mask.
    """
    difference = jnp.where(mask, trainer_logp, 0.0) - jnp.where(mask, sampler_logp, 0.0)
    weights = jnp.minimum(jnp.exp(difference.astype(jnp.float32)), cap)
    return jax.lax.stop_gradient(jnp.where(mask, weights, 1.0))


def within_ratio(
    trainer_logp: Float[Array, "*rows T"],
    sampler_logp: Float[Array, "*rows T"],
    cap: float,
    level: Literal["token", "sequence"],
    mask: Bool[Array, "*rows T"],
) -> Bool[Array, "*rows T"]:
    """Which tokens' sampler-to-trainer ratio lies in [1 / cap, cap]: masked importance sampling.

    Where the trainer calls a token far more or far less likely than the sampler did, no weight repairs it, so it is
    left out (by token as IcePop, Ling Team, "Every Step Evolves", arXiv 2510.18855; by token or by sequence in TRL,
    where they are token_mask and sequence_mask, and in verl's rollout_rs).

    Args:
        trainer_logp, sampler_logp, mask: as in `truncated_importance`.
        cap: above 1.
        level: 'token', each by its own ratio; 'sequence', whole rows by the product of their masked tokens' ratios.

    Returns:
        bool [*rows, T]; True outside the mask. A NaN is within, so that it is seen in the loss.
    """
    difference = jnp.where(mask, trainer_logp, 0.0) - jnp.where(mask, sampler_logp, 0.0)
    difference = difference.astype(jnp.float32)
    if level == "sequence":
        difference = jnp.broadcast_to(jnp.sum(difference, axis=-1, keepdims=True), mask.shape)
    return ~(jnp.abs(difference) > jnp.log(jnp.float32(cap)))


def sequence_log_ratio(
    logp: Float[Array, "*rows T"], old_logp: Float[Array, "*rows T"], mask: Bool[Array, "*rows T"]
) -> Float[Array, "*rows T"]:
    """log of the length-normalised ratio of each row, on all its tokens: GSPO-token (arXiv 2507.18071, section 4.3).

    The value is mean_t(logp - old_logp) over the masked tokens. The gradient is each token's own, as that of
    sg[s] pi_t / sg[pi_t]: with one advantage a row the sum over its tokens is GSPO's gradient, and with an advantage a
    token each keeps its own.

    Args:
        logp, old_logp: fp32 [*rows, T], finite outside the mask.
        mask: bool [*rows, T].

    Returns:
        fp32 [*rows, T].
    """
    tokens = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.float32), 1.0)
    mean = jnp.sum(jnp.where(mask, logp - old_logp, 0.0), axis=-1, keepdims=True) / tokens
    return jax.lax.stop_gradient(mean) + logp - jax.lax.stop_gradient(logp)
