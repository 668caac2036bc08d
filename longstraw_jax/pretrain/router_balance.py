"""Load balance of the routed experts without an auxiliary loss: the correction bias moves by the sign of the load.

DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): after each step an expert that got more than the mean is made less
attractive by a fixed step, one that got less more attractive. The bias selects and never weighs, and has no gradient.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def expert_load(ids: Int[Array, "N K"], counted: Bool[Array, "N"], experts: int) -> Float[Array, "E"]:
    """How often each expert was chosen by the counted tokens."""
    return (jax.nn.one_hot(ids, experts) * counted[:, None, None]).sum((0, 1))


def moved_bias(bias: Float[Array, "*L E"], load: Float[Array, "*L E"], rate: float) -> Float[Array, "*L E"]:
    """The fp32 correction bias after one step of size `rate`."""
    return bias + rate * jnp.sign(load.mean(-1, keepdims=True) - load)


def worst_excess(load: Float[Array, "*L E"]) -> Float[Array, ""]:
    """Largest load of an expert over the mean, less 1, over all layers: 0 is even (MaxVio)."""
    return (load.max(-1) / jnp.maximum(load.mean(-1), 1.0)).max() - 1.0
