"""Every collective: gathers of weights and tokens, global selection, context-sharded attention, vocabulary.

Functions run on one device's share. `axis` names the mesh axis, None means one device; they return then what the
whole mesh would. Each public step maps its whole body over the mesh once (`mapped`) and gradients are taken outside
of it: inside the body they would come out multiplied by the axis size.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from longstraw_jax import sharding
from longstraw_jax.types import PAGE
from pallas_kernels.chunked_logprob.api import softmax_statistics
from pallas_kernels.indexer_topk import reference as indexer_topk
from pallas_kernels.indexer_topk.api import index_topk
from pallas_kernels.sparse_mla.api import merge_partial, sparse_mla, sparse_mla_backward


def mapped(body: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`body(axis, *args)` on every device's share of args, or directly on one device."""
    if mesh is None:
        return lambda *args: body(None, *args)
    # check_vma=False: kernels in interpret mode cannot declare how their outputs vary over the mesh.
    return jax.shard_map(
        lambda *args: body(sharding.AXIS, *args), mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def axis_size(axis: str | None) -> int:
    return 1 if axis is None else jax.lax.axis_size(axis)


def axis_index(axis: str | None) -> Int[Array, ""]:
    return jnp.int32(0) if axis is None else jax.lax.axis_index(axis)


def gather(x: Array, axis: str | None, dim: int) -> Array:
    """All devices' shares of `x`, joined along `dim`. Its gradient is summed and shared out again."""
    return x if axis is None else jax.lax.all_gather(x, axis, axis=dim, tiled=True)


def scatter_sum(x: Array, axis: str | None, dim: int) -> Array:
    """Sum over devices, each keeping its share along `dim`."""
    return x if axis is None else jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def exchange(x: Array, axis: str | None, split: int, join: int) -> Array:
    """All-to-all: share out along `split`, join along `join`."""
    return x if axis is None else jax.lax.all_to_all(x, axis, split, join, tiled=True)


def gather_together(shards: list[Array], dims: list[int], axis: str) -> list[Array]:
    """`gather` of several arrays of one dtype, each along its own dimension, as one message."""
    fronts = [jnp.moveaxis(x, d, 0) for x, d in zip(shards, dims, strict=True)]
    every = jax.lax.all_gather(jnp.concatenate([x.reshape(-1) for x in fronts]), axis)  # [devices, numbers]
    whole, start = [], 0
    for x, d in zip(fronts, dims, strict=True):
        rows = every[:, start : start + x.size].reshape(-1, *x.shape[1:])
        whole.append(jnp.moveaxis(rows, 0, d))
        start += x.size
    return whole


def any_device(flag: Bool[Array, ""], axis: str | None) -> Bool[Array, ""]:
    return largest(flag.astype(jnp.int32), axis) > 0


def largest(x: Int[Array, ""], axis: str | None) -> Int[Array, ""]:
    """The largest over devices."""
    return x if axis is None else jax.lax.pmax(x, axis)


def embed(ids: Int[Array, "B T"], table: Float[Array, "V d"], axis: str | None) -> Float[Array, "B T D"]:
    """Embedding rows; the table is sharded over D: every device looks up its columns for all tokens, then exchanges."""
    columns = table[gather(ids.reshape(-1), axis, 0)]
    return exchange(columns, axis, 0, 1).reshape(*ids.shape, -1)


def flat_pages(pages: Array, axis: str | None) -> Array:
    """*gather-keys*: one layer's pages [pages, 64, W] of all devices as rows in prompt order, a transient copy."""
    if axis is None:
        return pages.reshape(-1, pages.shape[-1])
    every = jax.lax.all_gather(pages, axis, axis=1, tiled=False)  # [local pages, devices, 64, W]
    return every.reshape(-1, pages.shape[-1])


def scatter_pages(rows: Float[Array, "S W"], axis: str) -> Float[Array, "pages 64 W"]:
    """Transpose of `flat_pages`: all devices' rows in prompt order summed, each device keeping its own pages."""
    every = rows.reshape(-1, axis_size(axis), PAGE, rows.shape[-1])
    return jax.lax.psum_scatter(every, axis, scatter_dimension=1, tiled=False)


def local_rows(ids: Int[Array, "*lead"], length: Int[Array, ""], axis: str | None) -> Int[Array, "*lead"]:
    """Row of this device's pages that holds a prompt token, -1 where another device owns it or it is not prompt."""
    page, row = ids // PAGE, ids % PAGE
    owned = (ids >= 0) & (ids < length) & (page % axis_size(axis) == axis_index(axis))
    return jnp.where(owned, (page // axis_size(axis)) * PAGE + row, -1)


def with_tail(rows: Float[Array, "S W"], tail: Float[Array, "T W"], length: Int[Array, ""]) -> Float[Array, "S+T W"]:
    """The prompt's rows with a chunk's own behind token `length - 1`: row i is then token i. A transient copy."""
    room = jnp.concatenate([rows, jnp.zeros(tail.shape, rows.dtype)])
    return jax.lax.dynamic_update_slice_in_dim(room, tail.astype(rows.dtype), length, axis=0)


def local_length(length: Int[Array, ""], axis: str | None) -> Int[Array, ""]:
    """How many of a prompt's `length` tokens lie on this device: the first rows of its pages."""
    n, me = axis_size(axis), axis_index(axis)
    whole, rest = length // PAGE, length % PAGE
    return (whole - me + n - 1) // n * PAGE + jnp.where(whole % n == me, rest, 0)


def _packed(scores, ids):
    """Scores and ids as one message: a score travels as its bits, which no backend rounds or flushes as an integer."""
    return jnp.stack([jax.lax.bitcast_convert_type(scores, jnp.int32), ids])


def _unpacked(message):
    return jax.lax.bitcast_convert_type(message[0], jnp.float32), message[1]


def select(
    q: Float[Array, "B T I H"],
    w: Float[Array, "B T I"],
    pages: Float[Array, "pages 64 H"] | None,
    tail: Float[Array, "B tail H"],
    length: Int[Array, ""],
    query_index: Int[Array, "B T"],
    k: int,
    *,
    strategy: str,
    axis: str | None,
    implementation: str = "auto",
) -> Int[Array, "B T K"]:
    """The min(k, visible) keys of largest index score for each query, over the prompt and the sequence's own tail.

    Ids below `length` are prompt tokens, `length + j` is tail row j, -1 is none. Both strategies give the ids one
    device gives; ties go to the lowest id.

    Args:
      pages: this device's index keys of the prompt, None for no prompt.
      tail: the sequences' own keys, whole on this device.
      query_index: tail row of each query, -1 for padding (which selects nothing).
      strategy: "gather_keys" (many queries of one sequence: keys travel) or "merge_candidates" (few: queries and
        candidates travel).
      implementation: see pallas_kernels.indexer_topk.api.
    """
    b, t = query_index.shape
    best = functools.partial(index_topk, implementation=implementation)
    if pages is not None and strategy == "gather_keys":
        _check_rows(b)
        keys = with_tail(flat_pages(pages, axis), tail[0], length)
        limit = jnp.where(query_index[0] >= 0, length + query_index[0] + 1, 0)
        return best(q[0], w[0], keys, limit, k)[1][None]
    if pages is None:
        return jax.vmap(lambda *row: best(*row, k)[1])(q, w, tail, query_index + 1)

    # Tails are short: all rows' at once, where kernels would take them one after the other.
    tail_scores = jax.vmap(indexer_topk.index_scores)(q, w, tail)
    visible = jnp.arange(tail.shape[1]) <= query_index[..., None]
    tail_scores, tail_ids = indexer_topk.select(*(x.reshape(b * t, -1) for x in (tail_scores, visible)), k)
    # One message there (fp32, which rounds nothing) and one back.
    message = jnp.concatenate([q.astype(jnp.float32), w[..., None].astype(jnp.float32)], axis=-1)
    message = gather(message.reshape(b * t, *message.shape[2:]), axis, 0)
    keys, own = pages.reshape(-1, pages.shape[-1]), local_length(length, axis)
    limit = jnp.full(message.shape[:1], own, jnp.int32)
    scores, rows, _ = best(message[..., :-1].astype(q.dtype), message[..., -1], keys, limit, k)
    ids = jnp.where(rows < 0, -1, (rows // PAGE * axis_size(axis) + axis_index(axis)) * PAGE + rows % PAGE)
    # [B T, devices * K]: my queries, all candidates.
    scores, ids = _unpacked(exchange(_packed(scores, ids), axis, 1, 2))
    ids = jnp.where((query_index >= 0).reshape(-1, 1), ids, -1)
    scores = jnp.where(ids < 0, -jnp.inf, scores)
    tail_ids = jnp.where(tail_ids < 0, -1, length + tail_ids)
    scores, ids = (jnp.concatenate(x, axis=-1) for x in ((scores, tail_scores), (ids, tail_ids)))
    return indexer_topk.merge(scores, ids, k)[1].reshape(b, t, -1)


def _check_rows(rows):
    if rows != 1:
        raise ValueError(f"{rows} sequences with strategy='gather_keys'; accepted: 1, as each has a tail of its own")


def attend(
    q: Float[Array, "B T N W"],
    pages: Float[Array, "*layers pages 64 W"] | None,
    tail: Float[Array, "B tail W"],
    ids: Int[Array, "B T K"],
    length: Int[Array, ""],
    *,
    layer: Int[Array, ""] | None = None,
    scale: float,
    value_dim: int,
    strategy: str,
    axis: str | None,
    implementation: str = "auto",
) -> Float[Array, "B T N R"]:
    """Sparse latent attention over selected prompt rows and tail rows; arguments as in `select`.

    *merge-candidates*: each device attends to the selected rows it owns, partial results merge by log-sum-exp. The
    pages are constants to autodiff (`attend_collecting` gives their gradient).

    Args:
      layer: for merge-candidates, which layer's pages these are of those of several, read where they lie: for a
        kernel, a layer that a scan slices out of its pool would be copied. None for one layer's pages.
    """
    opts = dict(scale=scale, value_dim=value_dim, implementation=implementation)
    if pages is not None:
        pages = jax.lax.stop_gradient(pages)
        if strategy == "gather_keys":
            _check_rows(q.shape[0])
            rows = with_tail(flat_pages(pages, axis), tail[0], length)
            return sparse_mla(q[0], rows, ids[0], **opts)[0][None].astype(q.dtype)

    def read(q, ids):
        rows = pages.reshape(-1, *pages.shape[-2:])
        if layer is not None:
            ids = jnp.where(ids < 0, -1, ids + layer * (pages.shape[-3] * PAGE))
        return *sparse_mla(q, rows, ids, rows_gradient=False, **opts), None

    return _attend(read if pages is not None else None, q, tail, ids, length, axis, opts)[0]


def attend_collecting(
    q: Float[Array, "B T N W"],
    pages: Float[Array, "pages 64 W"],
    sink: Float[Array, "R J pages 64 W"],
    place: Int[Array, "2"],
    tail: Float[Array, "B tail W"],
    ids: Int[Array, "B T K"],
    length: Int[Array, ""],
    *,
    scale: float,
    value_dim: int,
    strategy: str,
    axis: str | None,
    implementation: str = "auto",
) -> tuple[Float[Array, "B T N R"], Float[Array, "R J pages 64 W"]]:
    """`attend` that also collects the pages' gradient.

    The pages are constants to autodiff. Their gradient is added, in fp32 whatever their dtype, to the cotangent of
    `sink` at sink[place]: handed through all layers as a carry, one buffer collects everything in place, where
    differentiating the pages would make a second one of the whole prompt's size.

    Args:
      sink: fp32, returned as it is; its values are never read.
      place: which layer's pages these are in it.
    """
    opts = dict(scale=scale, value_dim=value_dim, implementation=implementation)
    if strategy == "gather_keys":
        _check_rows(q.shape[0])
        chunk = _chunk_collecting(axis, opts)
        out, sink = chunk(q[0], pages, sink, place, tail[0], ids[0], length)
        return out[None].astype(q.dtype), sink
    return _attend(
        lambda q, ids: _pages_collecting(opts)(q, pages, sink, place, ids), q, tail, ids, length, axis, opts
    )


def _backward_options(opts):
    return {name: opts[name] for name in ("scale", "implementation")}


def _pages_collecting(opts):
    """sparse_mla over this device's pages as `attend_collecting` needs it."""

    def found(q, pages, sink, place, ids):
        return *sparse_mla(q, pages, ids, **opts), sink

    def forward(q, pages, sink, place, ids):
        # Not by way of `collecting`: as one opaque call it would make every layer keep the sink for recomputation.
        out, lse, sink = found(q, pages, sink, place, ids)
        return (out, lse, sink), (q, pages, place, ids, out, lse)

    def backward(kept, cotangents):
        q, pages, place, ids, out, lse = kept
        d_out, d_lse, collected = cotangents
        layer = collected[place[0], place[1]]
        d_q, layer = sparse_mla_backward(q, pages, ids, out, lse, d_out, d_lse, layer, **_backward_options(opts))
        return d_q, None, collected.at[place[0], place[1]].set(layer), None, None

    collecting = jax.custom_vjp(found)
    collecting.defvjp(forward, backward)
    return collecting


def _chunk_collecting(axis, opts):
    """A chunk's attention over `with_tail(flat_pages(pages, axis), tail, length)` likewise."""

    def found(q, pages, sink, place, tail, ids, length):
        out, lse = sparse_mla(q, with_tail(flat_pages(pages, axis), tail, length), ids, **opts)
        return (out, sink), lse

    def forward(q, pages, sink, place, tail, ids, length):
        (out, sink), lse = found(q, pages, sink, place, tail, ids, length)
        return (out, sink), (q, pages, place, tail, ids, length, out, lse)

    def backward(kept, cotangents):
        q, pages, place, tail, ids, length, out, lse = kept
        d_out, collected = cotangents
        layer = collected[place[0], place[1]]
        rows = with_tail(flat_pages(pages, axis), tail, length)
        # The chunk's own rows get a sum of their own; what the gradient pages hold for them was this chunk's seed.
        prompt_rows = rows.shape[0] - tail.shape[0]
        start = layer.reshape(prompt_rows, -1) if axis is None else jnp.zeros((prompt_rows, rows.shape[1]), jnp.float32)
        start = with_tail(start, jnp.zeros(tail.shape, jnp.float32), length)
        args = (q, rows, ids, out, lse, d_out, jnp.zeros_like(lse), start)
        d_q, total = sparse_mla_backward(*args, **_backward_options(opts))
        d_tail = jax.lax.dynamic_slice_in_dim(total, length, tail.shape[0], axis=0)
        earlier = jnp.where(jnp.arange(prompt_rows)[:, None] < length, total[:prompt_rows], 0.0)
        layer = earlier.reshape(layer.shape) if axis is None else layer + scatter_pages(earlier, axis)
        return d_q, None, collected.at[place[0], place[1]].set(layer), None, d_tail.astype(tail.dtype), None, None

    collecting = jax.custom_vjp(lambda *args: found(*args)[0])
    collecting.defvjp(forward, backward)
    return collecting


def _attend(read, q, tail, ids, length, axis, opts):
    """Attention over the tail and, unless None, over what `read` finds in this device's pages: out, sink."""
    b, t, heads, width = q.shape
    tail_ids = jnp.where(ids >= length, ids - length, -1)
    own = jax.vmap(lambda q, rows, ids: sparse_mla(q, rows, ids, **opts))(q, tail, tail_ids)
    own = tuple(x.reshape(b * t, *x.shape[2:]) for x in own)
    if read is None:
        return own[0].reshape(b, t, heads, -1).astype(q.dtype), None
    q_flat, ids_flat = q.reshape(b * t, heads, width), ids.reshape(b * t, -1)
    rows = local_rows(gather(ids_flat, axis, 0), length, axis)
    out, lse, sink = read(gather(q_flat, axis, 0), rows)
    # My queries' partial results from every device, [devices, B T, ..]; the log-sum-exp is the last column.
    partial = exchange(jnp.concatenate([out, lse[..., None]], axis=-1)[None], axis, 1, 0)
    out, lse = partial[..., :-1], partial[..., -1]
    out, _ = merge_partial(jnp.concatenate([out, own[0][None]]), jnp.concatenate([lse, own[1][None]]))
    return out.reshape(b, t, heads, -1).astype(q.dtype), sink


def _own_pair(pair, head, axis):
    """The head's low-rank update for this device's slice of the vocabulary: a, b, scale."""
    if pair is None:
        return None, None, 1.0
    width = head.shape[1]
    return pair.a, jax.lax.dynamic_slice_in_dim(pair.b, axis_index(axis) * width, width, axis=1), pair.scale


def token_logprobs(
    hidden: Float[Array, "T D"],
    targets: Int[Array, "T"],
    head: Float[Array, "D v"],
    pair: Any | None,
    temperature: float | Float[Array, ""],
    axis: str | None,
    *,
    implementation: str = "auto",
) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
    """fp32 log-probability of each target and entropy, under softmax(logits / temperature) over the whole vocabulary.

    Logits are sharded over the vocabulary and made a block of tokens at a time: never [T, V] anywhere.
    """
    a, b, scale = _own_pair(pair, head, axis)
    top, total, weighted, picked = softmax_statistics(
        gather(hidden, axis, 0), head, gather(targets, axis, 0), axis_index(axis) * head.shape[1],
        a=a, b=b, scale=scale, temperature=temperature, implementation=implementation,
    )  # fmt: skip
    if axis is not None:
        highest = jax.lax.pmax(jax.lax.stop_gradient(top), axis)
        rescale = jnp.exp(top - highest)
        sums = jnp.stack([total * rescale, weighted * rescale, picked], axis=-1)
        total, weighted, picked = jnp.moveaxis(scatter_sum(sums, axis, 0), -1, 0)
        top = jax.lax.dynamic_slice_in_dim(highest, axis_index(axis) * hidden.shape[0], hidden.shape[0])
    lse = top + jnp.log(total)
    return picked - lse, lse - weighted / total


def logits(
    hidden: Float[Array, "T D"], head: Float[Array, "D v"], pair: Any | None, axis: str | None
) -> Float[Array, "T V"]:
    """Whole rows of fp32 logits of this device's tokens; for sampling, where T is one token a member."""
    hidden, (a, b, scale) = gather(hidden, axis, 0), _own_pair(pair, head, axis)
    mine = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
    if a is not None:
        highest = jax.lax.Precision.HIGHEST
        low = jnp.matmul(hidden.astype(jnp.float32), a, precision=highest)
        mine = mine + scale * jnp.matmul(low, b, precision=highest)
    return exchange(mine, axis, 0, 1)
