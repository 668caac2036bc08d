"""Specification of sparse latent attention and of merging its partial results, in jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

QUERY_BLOCK = 64  # queries whose rows are gathered at once


def _attend(q, rows, ids, scale, value_dim):
    valid = ids >= 0
    kv = rows[jnp.where(valid, ids, 0)]  # [T, K, W]
    logits = jnp.einsum("tnw,tkw->tnk", q, kv, preferred_element_type=jnp.float32) * scale
    logits = jnp.where(valid[:, None, :], logits, -jnp.inf)
    some = valid.any(-1)[:, None]
    top = jax.lax.stop_gradient(jnp.where(some, logits.max(-1), 0.0))
    weights = jnp.where(valid[:, None, :], jnp.exp(logits - top[..., None]), 0.0)
    total = jnp.where(some, weights.sum(-1), 1.0)
    values = kv[..., :value_dim]
    out = jnp.einsum("tnk,tkr->tnr", weights / total[..., None], values, preferred_element_type=jnp.float32)
    return out, jnp.where(some, top + jnp.log(total), -jnp.inf)


def sparse_mla(
    q: Float[Array, "T N W"], rows: Float[Array, "S W"], ids: Int[Array, "T K"], *, scale: float, value_dim: int
) -> tuple[Float[Array, "T N R"], Float[Array, "T N"]]:
    """softmax(scale * q . rows[ids]) rows[ids, :value_dim], softmax and sums in fp32.

    Args:
      q: absorbed queries.
      rows: latents; the first value_dim numbers are also the values.
      ids: selected rows, -1 for none.

    Returns:
      fp32 output and log-sum-exp; a query with nothing selected gives 0 and -inf, and no gradient. Of many queries
      a block at a time is gathered, and gathered again in the backward pass.
    """
    t = q.shape[0]
    if t <= QUERY_BLOCK:
        return _attend(q, rows, ids, scale, value_dim)
    pad = -t % QUERY_BLOCK
    q = jnp.pad(q, ((0, pad), (0, 0), (0, 0))).reshape(-1, QUERY_BLOCK, *q.shape[1:])
    ids = jnp.pad(ids, ((0, pad), (0, 0)), constant_values=-1).reshape(-1, QUERY_BLOCK, ids.shape[1])
    block = jax.checkpoint(lambda args: _attend(args[0], rows, args[1], scale, value_dim))
    out, lse = jax.lax.map(block, (q, ids))
    return out.reshape(-1, *out.shape[2:])[:t], lse.reshape(-1, lse.shape[-1])[:t]


def merge_partial(
    outs: Float[Array, "M T N R"], lses: Float[Array, "M T N"]
) -> tuple[Float[Array, "T N R"], Float[Array, "T N"]]:
    """Combines attention over M disjoint sets of rows by log-sum-exp; all parts empty gives 0 and -inf."""
    used = lses > -jnp.inf
    top = jax.lax.stop_gradient(lses.max(0))
    some = top > -jnp.inf
    top = jnp.where(some, top, 0.0)
    weights = jnp.where(used, jnp.exp(jnp.where(used, lses, 0.0) - top), 0.0)
    total = jnp.where(some, weights.sum(0), 1.0)
    out = jnp.einsum("mtn,mtnr->tnr", weights / total, outs)
    return out, jnp.where(some, top + jnp.log(total), -jnp.inf)
