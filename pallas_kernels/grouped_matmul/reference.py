"""Specification of the grouped matrix product and of its low-rank update."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def grouped_matmul(
    x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Int[Array, "E"]
) -> Float[Array, "M F"]:
    """Rows of group e (consecutive, group_sizes[e] of them) times w[e]; later rows give 0 and no gradient."""
    inside = jnp.arange(x.shape[0])[:, None] < group_sizes.sum()
    # Backends leave the rows past the last group unwritten, in the gradient too.
    x = jnp.where(inside, x, 0)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # never tf32 or bf16
    return jnp.where(inside, jax.lax.ragged_dot(x, w, group_sizes.astype(jnp.int32), precision=precision), 0)


def matrices(w: Float[Array, "S D F"], group_sizes: Int[Array, "E"], first: Int[Array, ""] | None) -> Array:
    """w[first : first + E]; all of w for None."""
    return w if first is None else jax.lax.dynamic_slice_in_dim(w, first, group_sizes.shape[0])


def adapted_grouped_matmul(
    x: Float[Array, "M D"],
    w: Float[Array, "E D F"],
    a: Float[Array, "E D r"],
    b: Float[Array, "E r F"],
    group_sizes: Int[Array, "E"],
    gate: Bool[Array, "M"] | None,
    scale: float,
    product: Callable[..., Array] = grouped_matmul,
) -> Float[Array, "M F"]:
    """x w[e] + scale (x a[e]) b[e], the second term in fp32 and only where the gate is open."""
    low = product(x.astype(jnp.float32), a, group_sizes)
    delta = scale * product(low, b, group_sizes)
    if gate is not None:
        delta = jnp.where(gate[:, None], delta, 0.0)
    return (product(x, w, group_sizes).astype(jnp.float32) + delta).astype(x.dtype)
