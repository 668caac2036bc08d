"""Interleaved rotary embedding, default and YaRN; angles are one fp32 product, as transformers forms them."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from longstraw_jax.config import RopeParameters


def attention_factor(rope: RopeParameters) -> float:
    """Factor on cos and sin (1 for default rotary), after transformers' `_compute_yarn_parameters`."""
    if rope.rope_type == "default":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def term(mscale):
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return term(rope.mscale) / term(rope.mscale_all_dim)
    return term(1.0)


def inverse_frequencies(rope: RopeParameters, dim: int) -> np.ndarray:
    """fp32 [dim / 2] frequencies of the pairs; YaRN keeps the fast, divides the slow by the factor, blends between."""
    # fp32 at every step as in torch, but the power rounded from fp64: an fp32 pow is off by an ulp in one pair of five,
    # which turns the fast pairs by a tenth of a radian at two million tokens.
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = np.power(np.float64(np.float32(rope.rope_theta)), exponent.astype(np.float64)).astype(np.float32)
    base = np.float32(1.0) / powers
    if rope.rope_type == "default":
        return base

    def correction(rotations):
        return (
            dim
            * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(rope.rope_theta))
        )

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = 1 - ramp
    slow = np.float32(1.0) / (np.float32(rope.factor) * powers)
    return (slow * (1 - keep) + base * keep).astype(np.float32)


def cos_sin(
    positions: Int[Array, "*lead"], rope: RopeParameters, dim: int
) -> tuple[Float[Array, "*lead half"], Float[Array, "*lead half"]]:
    """fp32 cos and sin of every pair at integer positions, YaRN's attention factor included. No table, no clamping."""
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(inverse_frequencies(rope, dim))
    factor = attention_factor(rope)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "*lead dim"], cos: Float[Array, "*lead_or_1 half"], sin: Float[Array, "*lead_or_1 half"]
) -> Float[Array, "*lead dim"]:
    """Rotates the pairs (x[2k], x[2k+1]) in fp32; the halves come out de-interleaved, as in transformers' cache."""
    x32 = x.astype(jnp.float32)
    even, odd = x32[..., 0::2], x32[..., 1::2]
    return jnp.concatenate([even * cos - odd * sin, odd * cos + even * sin], axis=-1).astype(x.dtype)
