"""fp32 factors as sums of bf16 parts, for products with fp32's accuracy at bf16's speed (Ootomo and Yokota, 2022)."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def parts(value: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Two bf16 arrays, large part first, whose sum is the fp32 value up to 2^-17 of it."""
    # As reduce_precision: XLA may leave out a conversion to bf16 and back.
    high = lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)
    return high.astype(jnp.bfloat16), (value - high).astype(jnp.bfloat16)
