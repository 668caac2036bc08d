"""RMSNorm and LayerNorm with statistics in fp32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from longstraw_jax.model.linear import parameter


class RMSNorm(nnx.Module):
    """g * x / rms(x): normed in fp32, cast to x's dtype, then scaled (GlmMoeDsaRMSNorm)."""

    def __init__(self, dim, eps, *, stack, dtype):
        self.eps = eps
        self.weight = parameter((dim,), stack=stack, axes=(None,), dtype=dtype, init="ones")

    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return self.weight[...] * normed.astype(x.dtype)


class LayerNorm(nnx.Module):
    """LayerNorm with bias in fp32; the indexer's key norm (eps 1e-6 in every implementation)."""

    def __init__(self, dim, eps, *, stack, dtype):
        self.eps = eps
        self.weight = parameter((dim,), stack=stack, axes=(None,), dtype=dtype, init="ones")
        self.bias = parameter((dim,), stack=stack, axes=(None,), dtype=dtype, init="zeros")

    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(x32, axis=-1, keepdims=True)
        var = jnp.mean(jnp.square(x32 - mean), axis=-1, keepdims=True)
        normed = (x32 - mean) * jax.lax.rsqrt(var + self.eps)
        return (normed * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)
