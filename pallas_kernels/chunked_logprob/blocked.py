"""Softmax statistics by blocks of tokens, recomputed in the backward pass: three plain products a block, through XLA.

T tokens, D features, v columns of the head (a slice of the vocabulary), r rank.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from pallas_kernels.bf16_parts import parts

LOGITS = 2**29  # bytes of fp32 logits that exist at once, whatever T and v
ROWS = 4096  # tokens of a block at most


def block_rows(tokens: int, columns: int) -> int:
    """Tokens of a block: a power of two within the budget, then as even as the number of blocks allows."""
    most = max(1, min(ROWS, LOGITS // (4 * columns)))
    most = 1 << (most.bit_length() - 1)
    if tokens <= most:
        return tokens
    rows = math.ceil(tokens / math.ceil(tokens / most))
    return min(most, rows + -rows % 8)


def _matmul(x, y):
    """fp32 sums; fp32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(x, y, precision=precision, preferred_element_type=jnp.float32)


def _factor(value, order, dtype, axis):
    """A fp32 factor of a product in `dtype`: for bf16 its large (0) and small (1) parts, in this order."""
    if dtype == jnp.float32:
        return value
    pieces = parts(value)
    return jnp.concatenate([pieces[i] for i in order], axis)


def _sum_parts(value, rank, axis):
    """What products with the parts (0, 1) of a factor add up to."""
    return sum(jnp.split(value, value.shape[axis] // rank, axis))


# A product of two such factors: (large, small, large) times (large, large, small), off by 2^-16.
_pair = functools.partial(_factor, order=(0, 1))
_left = functools.partial(_factor, order=(0, 1, 0))
_right = functools.partial(_factor, order=(0, 0, 1))


def _low(hidden, a, scale):
    """The update's coordinates, scaled."""
    return scale * _sum_parts(_matmul(hidden, _pair(a, dtype=hidden.dtype, axis=1)), a.shape[1], 1)


def _logits(hidden, head, pair, scale, temperature):
    logits = _matmul(hidden, head)
    if pair is not None:
        left = _left(_low(hidden, pair[0], scale), dtype=hidden.dtype, axis=1)
        logits = logits + _matmul(left, _right(pair[1], dtype=hidden.dtype, axis=0))
    return logits / temperature


def _statistics(logits, targets, first):
    top = logits.max(-1)
    weights = jnp.exp(logits - top[:, None])
    local = targets - first
    mine = (local >= 0) & (local < logits.shape[-1])
    picked = jnp.take_along_axis(logits, jnp.where(mine, local, 0)[:, None], axis=-1)[:, 0]
    return top, weights.sum(-1), (weights * logits).sum(-1), jnp.where(mine, picked, 0.0)


def _by_blocks(step: Callable, carry, rows: int, *arrays: Array):
    """Scans step(carry, block's arrays) over blocks of the leading axis; what it returns a token, in their order."""
    tokens = arrays[0].shape[0]
    if rows == tokens:
        return step(carry, arrays)
    blocks = [
        jnp.pad(x, ((0, -tokens % rows),) + ((0, 0),) * (x.ndim - 1)).reshape(-1, rows, *x.shape[1:]) for x in arrays
    ]
    carry, out = lax.scan(step, carry, tuple(blocks))
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def softmax_statistics(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D v"],
    pair: tuple[Float[Array, "D r"], Float[Array, "r v"]] | None,
    targets: Int[Array, "T"],
    first: Int[Array, ""],
    temperature: Float[Array, ""],
    scale: float,
) -> tuple[Float[Array, "T"], Float[Array, "T"], Float[Array, "T"], Float[Array, "T"]]:
    """What `reference.softmax_statistics` gives, for logits (hidden head + scale (hidden a) b) / temperature.

    Differentiable in hidden, head, a and b. The cotangent of a bf16 block's logits is rounded to bf16 for the products.
    """

    def step(_, block):
        hidden, targets = block
        return None, _statistics(_logits(hidden, head, pair, scale, temperature), targets, first)

    return _by_blocks(step, None, block_rows(hidden.shape[0], head.shape[1]), hidden, targets)[1]


def _forward(*primals):
    """The rule's inputs say which of them are differentiated: a constant head gets no gradient's work."""
    *wrapped, scale = primals
    hidden, head, pair, targets, first, temperature = jax.tree.map(lambda x: x.value, wrapped, is_leaf=_is_primal)
    out = softmax_statistics(hidden, head, pair, targets, first, temperature, scale)
    # Named here, inside the rule, so that a remat policy that saves them does not run the products twice.
    out = tuple(checkpoint_name(x, "softmax_statistics") for x in out)
    d_head = jnp.zeros(head.shape, jnp.float32) if wrapped[1].perturbed else None
    sums = jax.tree.map(jnp.zeros_like, pair), d_head
    return out, (hidden, head, pair, targets, first, temperature, out[0], sums)


def _is_primal(x):
    return hasattr(x, "perturbed")


def _backward(scale, saved, cotangents):
    hidden, head, pair, targets, first, temperature, top, sums = saved
    dtype = hidden.dtype
    cotangents = [jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents[1:]]

    def step(sums, block):
        hidden, targets, top, d_total, d_weighted, d_picked = block
        logits = _logits(hidden, head, pair, scale, temperature)
        mine = jnp.arange(head.shape[1]) == (targets - first)[:, None]
        d = jnp.exp(logits - top[:, None]) * (d_total[:, None] + d_weighted[:, None] * (1 + logits))
        d = ((d + jnp.where(mine, d_picked[:, None], 0.0)) / temperature).astype(dtype)
        d_hidden, (d_pair, d_head) = _matmul(d, head.T), sums
        if d_head is not None:
            d_head += _matmul(hidden.T, d)
        if pair is not None:
            a, b = pair
            rank = a.shape[1]
            d_low = scale * _sum_parts(_matmul(d, _pair(b, dtype=dtype, axis=0).T), rank, 1)
            d_hidden += _matmul(_left(d_low, dtype=dtype, axis=1), _right(a, dtype=dtype, axis=1).T)
            low = _pair(_low(hidden, a, scale), dtype=dtype, axis=1)
            d_a = _sum_parts(_matmul(hidden.T, _pair(d_low, dtype=dtype, axis=1)), rank, 1)
            d_pair = d_pair[0] + d_a, d_pair[1] + _sum_parts(_matmul(low.T, d), rank, 0)
        return (d_pair, d_head), d_hidden.astype(dtype)

    # A block's padding has cotangents of 0, but its logits must stay finite too: top of padding is 0, logits are 0.
    rows = block_rows(hidden.shape[0], head.shape[1])
    (d_pair, d_head), d_hidden = _by_blocks(step, sums, rows, hidden, targets, top, *cotangents)
    d_head = None if d_head is None else d_head.astype(head.dtype)
    return d_hidden, d_head, d_pair, None, None, None


softmax_statistics.defvjp(_forward, _backward, symbolic_zeros=True)
