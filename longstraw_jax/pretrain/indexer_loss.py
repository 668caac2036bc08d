"""What the indexer of a full layer learns from, as dense masks: its distribution, the attention's, their divergence.

Shapes: B rows, T queries, S keys. DeepSeek-V3.2 (the report's section on DSA) trains the indexer towards the layer's
attention; IndexShare (arXiv:2603.12201) towards the mean attention of all layers that its selection serves.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.indexer_topk.reference import order_key


def visible_keys(segments: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Keys that a query may attend to: of its own document, up to itself. Padding (-1) sees padding, never text."""
    index = jnp.arange(segments.shape[1])
    return (segments[:, :, None] == segments[:, None, :]) & (index[:, None] >= index)


def selected_keys(scores: Float[Array, "*lead S"], visible: Bool[Array, "*lead S"], k: int) -> Bool[Array, "*lead S"]:
    """The min(k, visible) visible keys of largest score as a mask, ties to the lowest position.

    The same keys as indexer_topk.reference.select gives as ids. The k-th largest is found a bit at a time: 32 passes
    over the scores, where a sort of long rows takes many more on a GPU.
    """
    if k >= scores.shape[-1]:
        return visible
    lowest = jnp.iinfo(jnp.int32).min  # below every score's key
    keys = jnp.where(visible, order_key(jax.lax.stop_gradient(scores)), lowest)

    def raise_by_bit(i, least):
        higher = least + jnp.left_shift(jnp.int32(1), 31 - i)  # the first one wraps to 0
        enough = (keys >= higher).sum(-1, keepdims=True) >= k
        return jnp.where(enough, higher, least)

    least = jax.lax.fori_loop(0, 32, raise_by_bit, jnp.full((*keys.shape[:-1], 1), lowest, jnp.int32))
    above = keys > least
    level = visible & (keys == least)
    return above | (level & (jnp.cumsum(level, axis=-1) <= k - above.sum(-1, keepdims=True)))


def masked_softmax(scores: Float[Array, "*lead S"], mask: Bool[Array, "*lead S"]) -> Float[Array, "*lead S"]:
    """fp32 softmax over the keys of the mask, 0 elsewhere; every row must hold one."""
    # The lowest number and not a second mask behind: a third less memory traffic with its gradient.
    return jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1)


def masked_log_softmax(scores: Float[Array, "*lead S"], mask: Bool[Array, "*lead S"]) -> Float[Array, "*lead S"]:
    """fp32 log of `masked_softmax`, 0 outside the mask."""
    return jnp.where(mask, jax.nn.log_softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1), 0.0)


def divergence(attention: Float[Array, "*lead S"], log_index: Float[Array, "*lead S"]) -> Float[Array, "*lead"]:
    """KL(attention || index) of each query in fp32, both over the same keys: all, or the selected ones.

    Over all keys this is the warm-up's loss, over the selected ones the sparse stage's. Attention over the selected
    keys alone is the whole attention renormalised on them, as a softmax is.

    Args:
      attention: mean over heads of the layer's attention, a constant here: the model does not follow the indexer.
      log_index: `masked_log_softmax` of the index scores.
    """
    target = jax.lax.stop_gradient(attention)
    held = target > 0
    return jnp.where(held, target * (jnp.log(jnp.where(held, target, 1.0)) - log_index), 0.0).sum(-1)


def captured_share(
    attention: Float[Array, "*lead S"], chosen: Bool[Array, "*lead S"], best: Bool[Array, "*lead S"]
) -> Float[Array, "*lead"]:
    """Attention on the chosen keys in units of what the best choice of as many keys holds."""
    return jnp.where(chosen, attention, 0.0).sum(-1) / jnp.where(best, attention, 0.0).sum(-1)
