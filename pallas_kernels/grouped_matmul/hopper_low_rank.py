"""Grouped product with a low-rank update and its gradients, on Hopper: fp32 factors as sums of bf16 parts."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.bf16_parts import parts
from pallas_kernels.grouped_matmul.hopper import STEP, grouped_matmul
from pallas_kernels.grouped_matmul.hopper_transposed import transposed_grouped_matmul

RANK_ALIGN = 8  # rows of a swizzled tile, so that a factor's parts can be stored alone


def _pack(pieces, axis):
    """Pieces side by side, each padded to whole rows of a tile, together to whole steps of the product."""
    axis %= pieces[0].ndim

    def padded(value, multiple):
        pad = [(0, 0)] * value.ndim
        pad[axis] = (0, -value.shape[axis] % multiple)
        return jnp.pad(value, pad)

    return padded(jnp.concatenate([padded(piece, RANK_ALIGN) for piece in pieces], axis), STEP)


def _pair(value, axis):
    """[high, low]: a factor of a product with bf16."""
    return _pack(parts(value), axis)


def _left(value, axis=-1):
    """[high, low, high], which times `_right` is the product of two fp32 factors up to 2^-16."""
    high, low = parts(value)
    return _pack([high, low, high], axis)


def _right(value, axis):
    """[high, high, low]."""
    high, low = parts(value)
    return _pack([high, high, low], axis)


def _sum_parts(value, rank, axis):
    """The first two parts of a packed axis added up."""
    padded = rank + -rank % RANK_ALIGN
    first = lax.slice_in_dim(value, 0, rank, axis=axis)
    return first + lax.slice_in_dim(value, padded, padded + rank, axis=axis)


def _open(low, gate, scale):
    """The update's coordinates, scaled; 0 where the gate is shut."""
    return scale * low if gate is None else jnp.where(gate[:, None], scale * low, 0.0)


def forward(
    x: Float[Array, "M D"],
    w: Float[Array, "S D F"],
    a: Float[Array, "E D r"],
    b: Float[Array, "E r F"],
    group_sizes: Int[Array, "E"],
    gate: Bool[Array, "M"] | None,
    first: Int[Array, ""] | None,
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[Float[Array, "M F"], Float[Array, "M L"]]:
    """x w[first + e] + scale (x a[e]) b[e], and the packed scaled x a[e] for the backward pass.

    The update is one more step of the product's sum, rounded to bf16 together with it. x a[e] costs a pass over x.
    """
    low = grouped_matmul(x, _pair(a, 2), group_sizes, out_dtype=jnp.float32, interpret=interpret)
    low = _left(_open(_sum_parts(low, a.shape[2], 1), gate, scale))
    return grouped_matmul(x, w, group_sizes, low, _right(b, 1), first=first, interpret=interpret), low


def backward(
    x: Float[Array, "M D"],
    w: Float[Array, "S D F"],
    a: Float[Array, "E D r"],
    b: Float[Array, "E r F"],
    group_sizes: Int[Array, "E"],
    gate: Bool[Array, "M"] | None,
    first: Int[Array, ""] | None,
    low: Float[Array, "M L"],
    dy: Float[Array, "M F"],
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[Float[Array, "M D"], Float[Array, "E D r"], Float[Array, "E r F"]]:
    """Gradients of x (bf16), a and b (fp32); `low` is what `forward` gave."""
    rank = a.shape[2]
    options = dict(interpret=interpret)
    dlow = grouped_matmul(dy, _pair(b, 1), group_sizes, transposed=True, out_dtype=jnp.float32, **options)
    dlow = _left(_open(_sum_parts(dlow, rank, 1), gate, scale))
    dx = grouped_matmul(dy, w, group_sizes, dlow, _right(a, 2), first=first, transposed=True, **options)
    kept = 2 * (rank + -rank % RANK_ALIGN)
    da = transposed_grouped_matmul(dlow, x, group_sizes, kept=kept, **options)
    db = transposed_grouped_matmul(low, dy, group_sizes, kept=kept, **options)
    return dx, _sum_parts(da, rank, 1).swapaxes(1, 2), _sum_parts(db, rank, 1)
