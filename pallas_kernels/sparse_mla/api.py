"""Sparse latent attention with its gradients, on the backend that the machine has.

Shapes: T queries, N heads, W latent width, R value width (the first R of W), K selected rows a query, S rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels.sparse_mla import (
    hopper_backward,
    hopper_forward,
    hopper_triton,
    reference,
    tpu,
    tpu_backward,
)

IMPLEMENTATIONS = ("auto", "hopper", "tpu", "interpret", "reference")
PAGE = 64  # rows of a page
MOST_SELECTED = 2304  # ids that fit in shared memory beside the Hopper kernels' tiles

merge_partial = reference.merge_partial


def _device_kind() -> str:
    """What the program is compiled for; the abstract mesh speaks for absent devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def _hopper_problem(q, rows, value_dim, selected) -> str | None:
    """Why the Hopper kernels cannot serve, or None."""
    if not any(name in _device_kind() for name in ("H100", "H200", "H800", "H20", "GH200")):
        return f"the device is {_device_kind()!r}; accepted: an NVIDIA Hopper GPU"
    if jax.__version_info__ < (0, 11):
        return f"JAX is {jax.__version__}; accepted: 0.11 or newer"  # older ones lose references inside custom_vmap
    if q.dtype != jnp.bfloat16 or rows.dtype != jnp.bfloat16:
        return f"q is {q.dtype} and rows are {rows.dtype}; accepted: bfloat16"
    if (q.shape[-1], value_dim) != (576, 512):
        return f"width={q.shape[-1]} with value_dim={value_dim}; accepted: 576 with 512"
    if selected > MOST_SELECTED:
        return f"ids select {selected} rows a query; accepted: up to {MOST_SELECTED}"
    return None


def _tpu_problem(q, rows, value_dim) -> str | None:
    if "TPU" not in _device_kind():
        return f"the device is {_device_kind()!r}; accepted: a TPU"
    if q.dtype != rows.dtype or q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q is {q.dtype} and rows are {rows.dtype}; accepted: both bfloat16 or both float32"
    return f"value_dim={value_dim}; accepted: a multiple of {tpu.LANES}" if value_dim % tpu.LANES else None


def _interpret_problem(q, value_dim) -> str | None:
    if hopper_triton.parts(q.shape[-1], value_dim) is None:
        return (
            f"width={q.shape[-1]} with value_dim={value_dim}; accepted: value_dim / 2 and width - value_dim powers of"
            " two, 16 or more"
        )
    return None


def backend(
    q: Float[Array, "T N W"],
    rows: Float[Array, "S W"],
    ids: Int[Array, "T K"],
    value_dim: int,
    implementation: str = "auto",
) -> str:
    """The backend that serves these arrays: "hopper", "tpu", "interpret" or "reference".

    Raises:
      ValueError: the named one is unknown or cannot serve; "auto" always finds one.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}")
    problems = {
        "hopper": lambda: _hopper_problem(q, rows, value_dim, ids.shape[1]),
        "tpu": lambda: _tpu_problem(q, rows, value_dim),
        "interpret": lambda: _interpret_problem(q, value_dim),
        "reference": lambda: None,
    }
    if implementation == "auto":
        return next(name for name in ("hopper", "tpu", "reference") if problems[name]() is None)
    problem = problems[implementation]()
    if problem:
        raise ValueError(f"implementation={implementation!r}: {problem}")
    return implementation


def _check(q, rows, ids, value_dim, page_table) -> None:
    """Shapes and types, on the host."""
    if q.ndim != 3:
        raise ValueError(f"q has shape {q.shape}; accepted: [queries, heads, width]")
    if rows.ndim not in (2, 3) or rows.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"rows have shape {rows.shape}; accepted: [rows, {q.shape[-1]}] or [pages, {PAGE}, {q.shape[-1]}]"
        )
    if rows.ndim == 3 and rows.shape[1] != PAGE:
        raise ValueError(f"rows have {rows.shape[1]} rows a page; accepted: {PAGE}")
    if ids.shape[:-1] != q.shape[:1] or ids.dtype != jnp.int32:
        raise ValueError(f"ids are {ids.dtype} {ids.shape}; accepted: int32 [{q.shape[0]}, selected]")
    if not 0 < value_dim <= q.shape[-1]:
        raise ValueError(f"value_dim={value_dim}; accepted: 1 to {q.shape[-1]}, the width")
    if page_table is not None and (rows.ndim != 3 or page_table.ndim != 1 or page_table.dtype != jnp.int32):
        raise ValueError(
            f"page_table is {page_table.dtype} {page_table.shape} with rows {rows.shape}; accepted: int32 [pages of the"
            f" sequence] with rows [pages, {PAGE}, width]"
        )


def _physical(ids, page_table):
    """Where the rows lie; ids of positions beyond the table select nothing."""
    if page_table is None:
        return ids
    inside = (ids >= 0) & (ids < page_table.shape[0] * PAGE)
    ids = jnp.where(inside, ids, 0)
    return jnp.where(inside, page_table[ids // PAGE] * PAGE + ids % PAGE, -1)


def _raise_outside(first, last, count):
    if first < -1 or last >= count:
        raise ValueError(f"ids go from {first} to {last}; accepted: -1 to {count - 1}")


def _checked(ids, count):
    """With JAX's own checks switched on, ids are checked on the device."""
    if jax.config.jax_enable_checks:
        jax.debug.callback(functools.partial(_raise_outside, count=count), ids.min(), ids.max())
    return ids


def _flat(x, in_batched, axis_size):
    """Two leading axes as one, an argument without the batch's axis repeated."""
    x = x if in_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
    return x.reshape(-1, *x.shape[2:])


def _batched_rows(rows, ids, rows_batched, ids_batched, axis_size):
    """A batch as one call: its rows end to end, its ids shifted to their own rows."""
    ids = ids if ids_batched else jnp.broadcast_to(ids, (axis_size, *ids.shape))
    if rows_batched:
        first = jnp.arange(axis_size, dtype=ids.dtype)[:, None, None] * rows.shape[1]
        rows, ids = rows.reshape(-1, rows.shape[-1]), jnp.where(ids < 0, -1, ids + first)
    return rows, ids.reshape(-1, ids.shape[-1])


def _forward(name, scale, value_dim):
    """The backend's forward pass; under vmap a batch becomes more queries over more rows."""

    @jax.custom_batching.custom_vmap
    def call(q, rows, ids):
        if name == "hopper":
            return hopper_forward.forward(q, rows, ids, scale=scale)
        if name == "tpu":
            return tpu.forward(q, rows, ids, scale=scale, value_dim=value_dim)
        if name == "interpret":
            return hopper_triton.forward(q, rows, ids, scale=scale, value_dim=value_dim, interpret=True)
        return reference.sparse_mla(q, rows, ids, scale=scale, value_dim=value_dim)

    @call.def_vmap
    def batched(axis_size, in_batched, q, rows, ids):
        rows, ids = _batched_rows(rows, ids, in_batched[1], in_batched[2], axis_size)
        out = call(_flat(q, in_batched[0], axis_size), rows, ids)
        return tuple(x.reshape(axis_size, -1, *x.shape[1:]) for x in out), (True, True)

    return call


def _backward(name, scale, deterministic):
    """The backend's backward pass, batched likewise; an accumulator of None wants no gradient of the rows."""

    @jax.custom_batching.custom_vmap
    def call(q, rows, ids, lse, dout, shift, accumulator):
        args = (q, rows, ids, lse, dout, shift, accumulator)
        if name == "hopper":
            return hopper_backward.backward(*args, scale=scale, deterministic=deterministic)
        if name == "interpret":
            return hopper_triton.backward(*args, scale=scale)
        if name == "tpu":
            return tpu_backward.backward(*args, scale=scale)
        return reference.sparse_mla_backward(*args, scale=scale, deterministic=deterministic)

    @call.def_vmap
    def batched(axis_size, in_batched, q, rows, ids, lse, dout, shift, accumulator):
        args = [q, rows, ids, lse, dout, shift]
        if accumulator is not None:  # a sum of its own for each of the batch
            args[1] = args[1] if in_batched[1] else jnp.broadcast_to(rows, (axis_size, *rows.shape))
            accumulator = _flat(accumulator, in_batched[6], axis_size)
        args[1], args[2] = _batched_rows(args[1], ids, args[1].ndim == 3, in_batched[2], axis_size)
        for i in (0, 3, 4, 5):
            args[i] = _flat(args[i], in_batched[i], axis_size)
        dq, accumulator = call(*args, accumulator)
        dq = dq.reshape(axis_size, -1, *dq.shape[1:])
        if accumulator is None:
            return (dq, None), (True, None)
        return (dq, accumulator.reshape(axis_size, -1, accumulator.shape[-1])), (True, True)

    return call


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6, 7))
def _attention(q, rows, ids, name, scale, value_dim, rows_gradient, deterministic):
    return _forward(name, scale, value_dim)(q, rows, ids)


def _attention_fwd(q, rows, ids, name, scale, value_dim, rows_gradient, deterministic):
    out, lse = _forward(name, scale, value_dim)(q, rows, ids)
    # Named here, inside the rule, so that a remat policy that saves them does not run the kernel twice.
    out, lse = checkpoint_name(out, "sparse_mla_out"), checkpoint_name(lse, "sparse_mla_lse")
    return (out, lse), (q, rows, ids, out, lse)


def _attention_bwd(name, scale, value_dim, rows_gradient, deterministic, saved, cotangents):
    q, rows, ids, out, lse = saved
    dout, dlse = cotangents
    accumulator = jnp.zeros(rows.shape, jnp.float32) if rows_gradient else None
    shift = reference.softmax_shift(out, lse, dout, dlse)
    dq, drows = _backward(name, scale, deterministic)(q, rows, ids, lse, dout, shift, accumulator)
    return dq.astype(q.dtype), drows.astype(rows.dtype) if rows_gradient else None, None


_attention.defvjp(_attention_fwd, _attention_bwd)


def sparse_mla(
    q: Float[Array, "T N W"],
    rows: Float[Array, "S W"] | Float[Array, "P 64 W"],
    ids: Int[Array, "T K"],
    *,
    scale: float,
    value_dim: int,
    page_table: Int[Array, "L"] | None = None,
    implementation: str = "auto",
    rows_gradient: bool = True,
    deterministic: bool = False,
) -> tuple[Float[Array, "T N R"], Float[Array, "T N"]]:
    """softmax(scale * q . rows[ids]) rows[ids, :value_dim] and its log-sum-exp.

    Differentiable in q and rows, through both results. The output is fp32 for every input type: partial results over
    disjoint rows merge by log-sum-exp (`merge_partial`), and the only rounding comes after. On Hopper bf16 products
    are summed in fp32, and the weights are rounded to bf16 before they meet the values.

    Args:
      q: absorbed queries.
      rows: latents, or pages of 64 of them; the first value_dim numbers are also the values.
      ids: int32, the selected rows of each query, each at most once; -1 for none, which reads nothing.
      scale: what q . row is multiplied with.
      value_dim: R.
      page_table: int32; ids are positions of a sequence whose page i is rows[page_table[i]].
      implementation: "auto" (the device's kernels where they fit, else "reference"), "hopper", "tpu", "interpret"
        or "reference".
      rows_gradient: False treats the rows as constants: the backward pass does none of their gradient's work.
      deterministic: the rows' gradient is summed in the order of the queries, not by atomic adds, and so is the same in
        every run; slower.

    Returns:
      fp32 output [T, N, R] and natural log-sum-exp [T, N]; a query with nothing selected gives 0 and -inf, and no
      gradient.

    Raises:
      ValueError: shapes or types do not fit, or the named implementation cannot serve them. Ids beyond the rows are the
        caller's to avoid; under `jax_enable_checks` they are found on the device.
    """
    _check(q, rows, ids, value_dim, page_table)
    rows = rows.reshape(-1, rows.shape[-1])
    ids = _checked(_physical(ids, page_table), rows.shape[0])
    if not rows_gradient:
        rows = jax.lax.stop_gradient(rows)
    name = backend(q, rows, ids, value_dim, implementation)
    return _attention(q, rows, ids, name, scale, value_dim, rows_gradient, deterministic)


def sparse_mla_backward(
    q: Float[Array, "T N W"],
    rows: Float[Array, "S W"] | Float[Array, "P 64 W"],
    ids: Int[Array, "T K"],
    out: Float[Array, "T N R"],
    lse: Float[Array, "T N"],
    dout: Float[Array, "T N R"],
    dlse: Float[Array, "T N"],
    accumulator: Float[Array, "S W"] | Float[Array, "P 64 W"] | None,
    *,
    scale: float,
    page_table: Int[Array, "L"] | None = None,
    implementation: str = "auto",
    deterministic: bool = False,
) -> tuple[Float[Array, "T N W"], Any]:
    """The backward pass by hand, adding the rows' gradient to gradient pages that live on.

    Args:
      q, rows, ids, scale, page_table, implementation, deterministic: as in `sparse_mla`.
      out, lse: what it gave.
      dout, dlse: their cotangents.
      accumulator: fp32 sums, shaped like rows, whose buffer the result takes over (donate it under jit, or it is
        copied first); None does none of that work.

    Returns:
      dq in q's type, and the accumulator with the rows' gradient added.

    Raises:
      ValueError: as `sparse_mla`; or an accumulator that is not fp32 or not of the rows' shape.
    """
    value_dim = out.shape[-1]
    _check(q, rows, ids, value_dim, page_table)
    if accumulator is not None and (accumulator.dtype != jnp.float32 or accumulator.shape != rows.shape):
        raise ValueError(f"accumulator is {accumulator.dtype} {accumulator.shape}; accepted: float32 {rows.shape}")
    width, shape = rows.shape[-1], rows.shape
    rows = rows.reshape(-1, width)
    name = backend(q, rows, ids, value_dim, implementation)
    shift = reference.softmax_shift(out, lse, dout, dlse)
    total = None if accumulator is None else accumulator.reshape(-1, width)
    call = _backward(name, scale, deterministic)
    ids = _checked(_physical(ids, page_table), rows.shape[0])
    dq, total = call(q, rows, ids, lse, dout, shift, total)
    return dq.astype(q.dtype), None if total is None else total.reshape(shape)
