"""Specification of sparse latent attention, of its gradients and of merging its partial results, in jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

QUERY_BLOCK = 64  # queries whose rows are gathered at once


def _einsum(spec, a, b):
    """fp32 sums of exact products; plain fp32 products would become tf32 on a GPU."""
    return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _gather(rows, ids):
    """Selected rows [T, K, W] and whether each is one; what is not selected reads as 0, whatever row 0 holds."""
    valid = ids >= 0
    return jnp.where(valid[..., None], rows[jnp.where(valid, ids, 0)], 0), valid


def _attend(q, rows, ids, scale, value_dim):
    kv, valid = _gather(rows, ids)
    logits = _einsum("tnw,tkw->tnk", q, kv) * scale
    logits = jnp.where(valid[:, None, :], logits, -jnp.inf)
    some = valid.any(-1)[:, None]
    top = jax.lax.stop_gradient(jnp.where(some, logits.max(-1), 0.0))
    weights = jnp.where(valid[:, None, :], jnp.exp(logits - top[..., None]), 0.0)
    total = jnp.where(some, weights.sum(-1), 1.0)
    out = _einsum("tnk,tkr->tnr", weights / total[..., None], kv[..., :value_dim])
    return out, jnp.where(some, top + jnp.log(total), -jnp.inf)


def query_blocks(x: Array, fill: int = 0) -> Array:
    """[T, ..] as [blocks, QUERY_BLOCK, ..], or one block where that holds all of T."""
    if x.shape[0] <= QUERY_BLOCK:
        return x[None]
    pad = [(0, -x.shape[0] % QUERY_BLOCK)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, pad, constant_values=fill).reshape(-1, QUERY_BLOCK, *x.shape[1:])


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
    block = jax.checkpoint(lambda args: _attend(args[0], rows, args[1], scale, value_dim))
    out, lse = jax.lax.map(block, (query_blocks(q), query_blocks(ids, -1)))
    return out.reshape(-1, *out.shape[2:])[:t], lse.reshape(-1, lse.shape[-1])[:t]


def softmax_shift(
    out: Float[Array, "T N R"], lse: Float[Array, "T N"], dout: Float[Array, "T N R"], dlse: Float[Array, "T N"]
) -> Float[Array, "T N"]:
    """What the softmax's gradient subtracts from dout . v: sum(out * dout) - dlse; 0 where nothing is selected."""
    shift = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1) - dlse
    return jnp.where(lse > -jnp.inf, shift, 0.0)


def _row_gradients(q, kv, valid, lse, dout, shift, scale):
    """dq [t, N, W] and what each selected row gets from each query [t, K, W]."""
    values = kv[..., : dout.shape[-1]]
    seen = valid[:, None, :]
    # lse is -inf where nothing is selected.
    weights = jnp.where(seen, jnp.exp(_einsum("tnw,tkw->tnk", q, kv) * scale - jnp.where(seen, lse[..., None], 0)), 0)
    dlogits = weights * (_einsum("tnr,tkr->tnk", dout, values) - shift[..., None]) * scale
    dlogits = jnp.where(seen, dlogits, 0.0)
    dq = _einsum("tnk,tkw->tnw", dlogits, kv)
    drows = _einsum("tnk,tnw->tkw", dlogits, q)
    return dq, drows.at[..., : dout.shape[-1]].add(_einsum("tnk,tnr->tkr", weights, dout))


def add_rows(
    accumulator: Float[Array, "S W"], ids: Int[Array, "T K"], drows: Float[Array, "T K W"], deterministic: bool
) -> Float[Array, "S W"]:
    """accumulator[ids] += drows; an id of -1 adds nothing. Deterministic: a query at a time, in order.

    The ids of one query differ from each other, so that adding one query's rows needs no atomics.
    """
    targets = jnp.where(ids < 0, accumulator.shape[0], ids)
    if not deterministic:
        return accumulator.at[targets].add(drows, mode="drop")

    def add(total, query):
        targets, drows = query
        return total.at[targets].add(drows, mode="drop", unique_indices=True), None

    return jax.lax.scan(add, accumulator, (targets, drows))[0]


def sparse_mla_backward(
    q: Float[Array, "T N W"],
    rows: Float[Array, "S W"],
    ids: Int[Array, "T K"],
    lse: Float[Array, "T N"],
    dout: Float[Array, "T N R"],
    shift: Float[Array, "T N"],
    accumulator: Float[Array, "S W"] | None,
    *,
    scale: float,
    deterministic: bool,
) -> tuple[Float[Array, "T N W"], Float[Array, "S W"] | None]:
    """Gradients of `sparse_mla`, a block of queries at a time.

    Args:
      lse: what the forward pass gave.
      dout: cotangent of the output.
      shift: `softmax_shift`, fp32.
      accumulator: fp32 sums that the rows' gradient is added to; None does none of that work.

    Returns:
      fp32 dq, and the accumulator.
    """
    t = q.shape[0]

    def block(accumulator, args):
        q, ids, lse, dout, shift = args
        kv, valid = _gather(rows, ids)
        dq, drows = _row_gradients(q, kv, valid, lse, dout, shift, scale)
        if accumulator is not None:
            accumulator = add_rows(accumulator, ids, drows, deterministic)
        return accumulator, dq

    blocks = (query_blocks(q), query_blocks(ids, -1), query_blocks(lse), query_blocks(dout), query_blocks(shift))
    accumulator, dq = jax.lax.scan(block, accumulator, blocks)
    return dq.reshape(-1, *q.shape[1:])[:t], accumulator


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
