"""Sparse latent attention and its gradients as Pallas Triton kernels, for any width: what interpret mode runs.

The Mosaic GPU kernels' arithmetic without what no CPU can run. On a GPU the forward pass runs too, as a measure; the
backward pass is for interpret mode alone. One program is one query and one block of heads, and walks the query's keys a
block at a time. The latent columns come in power-of-two parts, since Triton's blocks are powers of two: the values in
two halves, then the rotated key.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.sparse_mla import reference

HEAD_BLOCK, KEY_BLOCK = 64, 64  # rows of a wgmma, and fewer heads are padded; the fastest measured
LOG2E = math.log2(math.e)


def parts(width: int, value_dim: int) -> list[tuple[int, int]] | None:
    """(first column, columns) of the two value halves and of the rotated key, or None where no such blocks fit."""
    sizes = [value_dim // 2, value_dim - value_dim // 2, width - value_dim]
    if any(size < 16 or size & (size - 1) for size in sizes):
        return None
    return [(0, sizes[0]), (sizes[0], sizes[1]), (value_dim, sizes[2])]


def _load_rows(rows_ref, ids, part):
    """[keys, columns] of the selected rows; an id of -1 reads nothing and gives 0."""
    valid = (ids >= 0)[:, None]
    columns = part[0] + jnp.arange(part[1])
    return plt.load(rows_ref.at[jnp.where(ids >= 0, ids, 0)[:, None], columns[None, :]], mask=valid, other=0.0)


def _forward_kernel(q_ref, rows_ref, ids_ref, out_ref, lse_ref, *, scale, columns, key_block):
    q = [q_ref[:, pl.ds(*part)] for part in columns]
    heads = q[0].shape[0]

    def step(i, carry):
        top, total, accs = carry
        ids = ids_ref[pl.ds(i * key_block, key_block)]
        kv = [_load_rows(rows_ref, ids, part) for part in columns]
        logits = sum(plt.dot(a, b, trans_b=True) for a, b in zip(q, kv, strict=True)) * (scale * LOG2E)
        logits = jnp.where((ids >= 0)[None, :], logits, -jnp.inf)
        new_top = jnp.maximum(top, logits.max(1))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # nothing selected so far
        weights, decay = jnp.exp2(logits - base[:, None]), jnp.exp2(top - base)
        total = total * decay + weights.sum(1)
        low = weights.astype(kv[0].dtype)
        accs = tuple(a * decay[:, None] + plt.dot(low, v) for a, v in zip(accs, kv[:2], strict=True))
        return new_top, total, accs

    start = (
        jnp.full((heads,), -jnp.inf, jnp.float32),
        jnp.zeros((heads,), jnp.float32),
        tuple(jnp.zeros((heads, size), jnp.float32) for _, size in columns[:2]),
    )
    top, total, accs = jax.lax.fori_loop(0, ids_ref.shape[0] // key_block, step, start)
    some = total > 0
    divisor = jnp.where(some, total, 1.0)
    for (first, size), acc in zip(columns[:2], accs, strict=True):
        out_ref[:, pl.ds(first, size)] = acc / divisor[:, None]
    lse_ref[:] = jnp.where(some, top / LOG2E + jnp.log(divisor), -jnp.inf)


def _backward_kernel(
    q_ref, rows_ref, ids_ref, lse_ref, dout_ref, shift_ref, dq_ref, *drows_ref, scale, columns, key_block
):
    q = [q_ref[:, pl.ds(*part)] for part in columns]
    dout = [dout_ref[:, pl.ds(*part)] for part in columns[:2]]
    lse, shift = lse_ref[:], shift_ref[:]
    lse = jnp.where(lse == -jnp.inf, 0.0, lse)[:, None] * LOG2E  # nothing selected: no weight is used

    def step(i, dq):
        ids = ids_ref[pl.ds(i * key_block, key_block)]
        kv = [_load_rows(rows_ref, ids, part) for part in columns]
        logits = sum(plt.dot(a, b, trans_b=True) for a, b in zip(q, kv, strict=True)) * (scale * LOG2E)
        seen = (ids >= 0)[None, :]
        weights = jnp.where(seen, jnp.exp2(logits - lse), 0.0)
        dweights = sum(plt.dot(a, b, trans_b=True) for a, b in zip(dout, kv[:2], strict=True))
        dlogits = jnp.where(seen, weights * (dweights - shift[:, None]) * scale, 0.0).astype(kv[0].dtype)
        low = weights.astype(kv[0].dtype)
        for ref in drows_ref:
            for part, (first, size) in enumerate(columns):
                drows = plt.dot(dlogits, q[part], trans_a=True)
                if part < 2:
                    drows += plt.dot(low, dout[part], trans_a=True)
                ref[pl.ds(i * key_block, key_block), pl.ds(first, size)] = drows
        return tuple(a + plt.dot(dlogits, k) for a, k in zip(dq, kv, strict=True))

    start = tuple(jnp.zeros((q[0].shape[0], size), jnp.float32) for _, size in columns)
    dq = jax.lax.fori_loop(0, ids_ref.shape[0] // key_block, step, start)
    for (first, size), x in zip(columns, dq, strict=True):
        dq_ref[:, pl.ds(first, size)] = x


def _padded(x, axis, multiple, fill=0):
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, pad, constant_values=fill)


def _per_head_block(*shape):
    """A query's block of heads."""
    return pl.BlockSpec((None, HEAD_BLOCK, *shape), lambda t, h: (t, h, *(0 for _ in shape)))


def _per_query(k):
    return pl.BlockSpec((None, k), lambda t, h: (t, 0))


def _whole(x):
    return pl.BlockSpec(x.shape, lambda t, h: (0, 0))


def forward(
    q: Float[Array, "T N W"],
    rows: Float[Array, "S W"],
    ids: Int[Array, "T K"],
    *,
    scale: float,
    value_dim: int,
    interpret: bool,
) -> tuple[Float[Array, "T N R"], Float[Array, "T N"]]:
    """As `reference.sparse_mla`; products in the rows' dtype, sums in fp32."""
    t, n, width = q.shape
    q, ids = _padded(q, 1, HEAD_BLOCK), _padded(ids, 1, KEY_BLOCK, -1)
    kernel = functools.partial(_forward_kernel, scale=scale, columns=parts(width, value_dim), key_block=KEY_BLOCK)
    out, lse = pl.pallas_call(
        kernel,
        grid=(t, q.shape[1] // HEAD_BLOCK),
        in_specs=[_per_head_block(width), _whole(rows), _per_query(ids.shape[1])],
        out_specs=[_per_head_block(value_dim), _per_head_block()],
        out_shape=[
            jax.ShapeDtypeStruct((t, q.shape[1], value_dim), jnp.float32),
            jax.ShapeDtypeStruct((t, q.shape[1]), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=2),  # the fastest of those measured
        interpret=interpret,
        name="sparse_mla_forward",
    )(q, rows, ids)
    return out[:, :n], lse[:, :n]


def backward(
    q: Float[Array, "T N W"],
    rows: Float[Array, "S W"],
    ids: Int[Array, "T K"],
    lse: Float[Array, "T N"],
    dout: Float[Array, "T N R"],
    shift: Float[Array, "T N"],
    accumulator: Float[Array, "S W"] | None,
    *,
    scale: float,
) -> tuple[Float[Array, "T N W"], Float[Array, "S W"] | None]:
    """As `reference.sparse_mla_backward`, in interpret mode, always deterministic.

    The kernel writes what each selected row gets, a block of queries at a time, and `reference.add_rows` adds it up.
    """
    t, n, width = q.shape
    value_dim = dout.shape[-1]
    q, lse, dout, shift = (_padded(x, 1, HEAD_BLOCK) for x in (q, lse, dout.astype(q.dtype), shift))
    ids = _padded(ids, 1, KEY_BLOCK, -1)
    heads, k = q.shape[1], ids.shape[1]
    kernel = functools.partial(_backward_kernel, scale=scale, columns=parts(width, value_dim), key_block=KEY_BLOCK)

    def block(accumulator, args):
        t, head_blocks = args[0].shape[0], heads // HEAD_BLOCK
        shapes, out_specs = [jax.ShapeDtypeStruct((t, heads, width), jnp.float32)], [_per_head_block(width)]
        if accumulator is not None:
            shapes.append(jax.ShapeDtypeStruct((t, head_blocks, k, width), jnp.float32))
            out_specs.append(pl.BlockSpec((None, None, k, width), lambda t, h: (t, h, 0, 0)))
        in_specs = [_per_head_block(width), _whole(rows), _per_query(k), _per_head_block()]
        dq, *drows = pl.pallas_call(
            kernel,
            grid=(t, head_blocks),
            in_specs=[*in_specs, _per_head_block(value_dim), _per_head_block()],
            out_specs=out_specs,
            out_shape=shapes,
            interpret=True,
            name="sparse_mla_backward",
        )(args[0], rows, *args[1:])
        if accumulator is not None:
            accumulator = reference.add_rows(accumulator, args[1], drows[0].sum(1), deterministic=True)
        return accumulator, dq

    blocks = [reference.query_blocks(q), reference.query_blocks(ids, -1)]
    blocks += [reference.query_blocks(x) for x in (lse, dout, shift)]
    accumulator, dq = jax.lax.scan(block, accumulator, blocks)
    return dq.reshape(-1, heads, width)[:t, :n], accumulator
