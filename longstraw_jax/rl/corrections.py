"""Importance weights between the policy that sampled and the policy that is trained."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


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
