"""Stacked parameters, the linear map and its low-rank update."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class Pair(NamedTuple):
    """A low-rank update of one linear map, as the layer applies it.

    a [.., in, r] and b [.., r, out] in fp32; scale is alpha / r; gate [B, T] switches it per token (None: always on).
    """

    a: Array
    b: Array
    scale: float
    gate: Array | None = None


def parameter(
    shape: tuple[int, ...], *, stack: int | None, axes: tuple[str | None, ...], dtype: jnp.dtype, init: float | str
) -> nnx.Param:
    """Declares a parameter, with a leading layer axis when `stack` is given. Zeros: decoder.init_params draws values.

    Args:
      axes: per dimension a logical axis ("fsdp": sharded at rest, gathered for use; "expert", "vocab": stays
        sharded; None: whole), mapped to the mesh in sharding.py.
      init: standard deviation of a normal draw, or "ones" / "zeros".
    """
    full = shape if stack is None else (stack, *shape)
    axes = axes if stack is None else (None, *axes)
    return nnx.Param(jnp.zeros(full, dtype), axes=axes, init=init)


def matmul32(x: Float[Array, "*lead d_in"], w: Float[Array, "d_in d_out"]) -> Float[Array, "*lead d_out"]:
    """x W in true fp32: accelerators would otherwise round fp32 inputs to fewer bits."""
    return jnp.matmul(x.astype(jnp.float32), w, precision=jax.lax.Precision.HIGHEST)


def low_rank(x: Float[Array, "*lead d_in"], pair: Pair) -> Float[Array, "*lead d_out"]:
    """scale * x A B in fp32, gated per token."""
    delta = pair.scale * matmul32(matmul32(x, pair.a), pair.b)
    if pair.gate is not None:
        delta = jnp.where(pair.gate[..., None], delta, 0.0)
    return delta


class Linear(nnx.Module):
    """y = x W (+ low-rank update), no bias. W is [in, out], the transpose of the checkpoint's."""

    def __init__(self, d_in, d_out, *, stack, dtype, std, axes=("fsdp", None)):
        self.weight = parameter((d_in, d_out), stack=stack, axes=axes, dtype=dtype, init=std)

    def __call__(self, x: Float[Array, "*lead d_in"], pair: Pair | None = None) -> Float[Array, "*lead d_out"]:
        y = x @ self.weight[...]
        if pair is not None:
            y = (y.astype(jnp.float32) + low_rank(x, pair)).astype(y.dtype)
        return y
