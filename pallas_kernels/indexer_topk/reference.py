"""Specification of index scores and exact top-k selection, in jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def index_scores(q: Float[Array, "T I H"], w: Float[Array, "T I"], k: Float[Array, "S H"]) -> Float[Array, "T S"]:
    """sum_i w[t, i] * relu(q[t, i] . k[s]) in fp32 (DeepSeek-V3.2's lightning indexer; w holds both scales).

    Heads are added one after another, so no [T, I, S] array exists and the order of the sum is fixed.
    """
    highest = jax.lax.Precision.HIGHEST  # fp32 keys are not rounded; products of bf16 are exact either way

    def add_head(total, head):
        q_head, w_head = head
        dots = jnp.matmul(q_head.astype(k.dtype), k.T, precision=highest, preferred_element_type=jnp.float32)
        return total + w_head[:, None] * jax.nn.relu(dots), None

    start = jnp.zeros((q.shape[0], k.shape[0]), jnp.float32)
    total, _ = jax.lax.scan(add_head, start, (jnp.moveaxis(q, 1, 0), jnp.moveaxis(w.astype(jnp.float32), 1, 0)))
    return jnp.where(total == 0, 0.0, total)  # -0.0 and 0.0 tie


def select(
    scores: Float[Array, "T S"], valid: Bool[Array, "T S"], k: int
) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """The min(k, valid keys) best keys of each row, exactly; ties go to the lowest position.

    Returns:
      Scores and positions [T, min(k, S)], best first; where a row has fewer valid keys, -inf and -1.
    """
    best, ids = jax.lax.top_k(jnp.where(valid, scores, -jnp.inf), min(k, scores.shape[-1]))
    # A masked key never passes for a selected one; a NaN ranks first and stays visible.
    chosen = jnp.take_along_axis(valid, ids, axis=-1)
    return jnp.where(chosen, best, -jnp.inf), jnp.where(chosen, ids, -1)


def merge(scores: Float[Array, "T M"], ids: Int[Array, "T M"], k: int) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """The k best of candidates with global positions (-1: none); the same rule for ties as `select`."""
    position = jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ids)
    negated, _, ids = jax.lax.sort((-scores, position, ids), num_keys=2)
    k = min(k, scores.shape[-1])
    return -negated[:, :k], ids[:, :k]
