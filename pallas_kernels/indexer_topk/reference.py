"""Specification of index scores and exact top-k selection, in jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

QUERIES, KEYS = 64, 16384  # scored at once by index_topk


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


def order_key(scores: Float[Array, "*lead"]) -> Int[Array, "*lead"]:
    """int32 keys in the order of fp32 scores: any NaN above +inf, -0.0 equal to 0.0, all above the lowest int32."""
    one_nan = jnp.where(scores != scores, jnp.nan, jnp.where(scores == 0, 0.0, scores))
    bits = jax.lax.bitcast_convert_type(one_nan, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def key_score(keys: Int[Array, "*lead"]) -> Float[Array, "*lead"]:
    """The fp32 score of an `order_key`."""
    return jax.lax.bitcast_convert_type(keys ^ ((keys >> 31) & 0x7FFFFFFF), jnp.float32)


def select(
    scores: Float[Array, "T S"], valid: Bool[Array, "T S"], k: int
) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """The min(k, valid keys) best keys of each row, exactly; ties go to the lowest position.

    Returns:
      Scores and positions [T, min(k, S)], best first; where a row has fewer valid keys, -inf and -1.
    """
    # A masked key ranks below a valid -inf, and a NaN of either sign first. In fp32, because XLA sorts integers whole:
    # 60 times slower on a CPU. So an infinite score ties with the largest finite one.
    most = jnp.finfo(jnp.float32).max
    keys = jnp.where(scores != scores, jnp.inf, jnp.clip(scores, -most, most))
    _, ids = jax.lax.top_k(jnp.where(valid, keys, -jnp.inf), min(k, scores.shape[-1]))
    chosen = jnp.take_along_axis(valid, ids, axis=-1)
    best = jnp.take_along_axis(scores, ids, axis=-1)
    return jnp.where(chosen, best, -jnp.inf), jnp.where(chosen, ids, -1)


def merge(scores: Float[Array, "T M"], ids: Int[Array, "T M"], k: int) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """The k best of candidates with global positions (-1: none), best first; the same order as `select`."""
    # ~key descends where key ascends; an absent candidate comes after a present -inf.
    rank = jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ~order_key(scores))
    _, _, scores, ids = jax.lax.sort((rank, ids, scores, ids), num_keys=2)
    k = min(k, scores.shape[-1])
    return scores[:, :k], ids[:, :k]


def index_topk(
    q: Float[Array, "T I H"], w: Float[Array, "T I"], keys: Float[Array, "S H"], limit: Int[Array, "T"], k: int
) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """Scores and positions of the min(k, limit[t]) best of keys[:limit[t]], by ascending position; -inf and -1 after.

    The same as `select` on all scores at once, in blocks of queries and of keys: the best so far are merged with each
    block of keys up to the largest limit of the queries.
    """
    queries, length = q.shape[0], keys.shape[0]
    k = min(k, length)
    rows, columns = min(QUERIES, queries), min(KEYS, length)
    keys = jnp.pad(keys, ((0, -length % columns), (0, 0)))

    def one(args):
        q, w, limit = args

        def add(i, best):
            block = jax.lax.dynamic_slice_in_dim(keys, i * columns, columns)
            position = i * columns + jnp.arange(columns, dtype=jnp.int32)
            ids = jnp.where(position < limit[:, None], position, -1)
            # Earlier keys stand first, so that equal scores keep the order of position.
            scores = jnp.concatenate([best[0], index_scores(q, w, block)], axis=1)
            ids = jnp.concatenate([best[1], ids], axis=1)
            scores, chosen = select(scores, ids >= 0, k)
            return scores, jnp.where(chosen < 0, -1, jnp.take_along_axis(ids, chosen, axis=1))

        none = jnp.full((rows, k), -jnp.inf, jnp.float32), jnp.full((rows, k), -1, jnp.int32)
        scores, ids = jax.lax.fori_loop(0, (limit.max() + columns - 1) // columns, add, none)
        _, scores, ids = jax.lax.sort((jnp.where(ids < 0, length, ids), scores, ids), num_keys=1)
        return scores, ids

    pad = -queries % rows  # padding queries see no key
    q, w, limit = (jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1)) for x in (q, w, limit))
    blocks = jax.lax.map(one, jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), (q, w, limit)))
    return jax.tree.map(lambda x: x.reshape(-1, k)[:queries], blocks)
