"""Times sparse latent attention, forward and backward, over random, local and skewed selections."""

import time

import jax
import jax.numpy as jnp

from pallas_kernels.sparse_mla import api, hopper_triton

HEADS, WIDTH, VALUE_DIM, SELECTED = 64, 576, 512, 2048  # GLM-5.2
SCALE = 256**-0.5
SHAPES = ((1056, 1_048_576), (1056, 16_384), (8, 1_048_576))  # queries, rows; 1056 is 8 a multiprocessor of an H200
KINDS = ("random", "local", "skewed")
XLA_QUERIES = 64  # a call of XLA's path, whose time is scaled to the row's queries


def bench(
    matmul_tflops: float,
    copy_tbps: float,
    *,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    kinds: tuple[str, ...] = KINDS,
    selected: int = SELECTED,
    repeats: int = 5,
) -> list[dict]:
    """One row an op, shape and kind of selection.

    The ops: the forward pass, also by the Triton kernel; the backward pass; without the rows' gradient (detached); and
    once a shape with deterministic sums.

    Args:
      matmul_tflops, copy_tbps: the same run's bf16 matmul rate and copy rate (bytes read + written), for the fractions.
      shapes: (queries, rows).
      kinds: "random" ids anywhere; "local" in a window that moves 8 rows a query; "skewed" mostly low ones.
      selected: ids a query.
    Returns:
      Rows with op, shape, ids, backend, seconds (median of `repeats`), tflops (2 * heads * selected a query times
      width + value_dim, backward 3 * width + 2 * value_dim, detached 2 * width + value_dim), tbps (rows gathered),
      fraction_of_matmul, fraction_of_floor (the larger of arithmetic at matmul_tflops and, at copy_tbps, the rows
      gathered and their gradient added in fp32), xla_seconds (gather + einsum, and its gradient).
    """
    results = []
    for queries, count in shapes:
        for kind in kinds:
            q, rows, ids = _inputs(queries, count, kind, selected)
            results += _measure(q, rows, ids, kind, matmul_tflops, copy_tbps, repeats, kind == kinds[0])
    return results


def _measure(q, rows, ids, kind, matmul_tflops, copy_tbps, repeats, once_a_shape):
    queries, selected = ids.shape
    name = api.backend(q, rows, ids, VALUE_DIM)
    gathered = 2.0 * WIDTH * selected * queries
    results = []

    def row(op, seconds, columns, moved, xla, by=name):
        flops = 2.0 * HEADS * selected * queries * columns
        tflops, floor = flops / seconds / 1e12, max(flops / matmul_tflops, moved / copy_tbps) / 1e12
        results.append(
            dict(
                op=op, shape=f"{queries} x {rows.shape[0]}", ids=kind, backend=by, seconds=seconds, tflops=tflops,
                tbps=gathered / seconds / 1e12, fraction_of_matmul=tflops / matmul_tflops,
                fraction_of_floor=floor / seconds, xla_seconds=xla,
            )  # fmt: skip
        )

    xla, xla_gradient = _xla_seconds(q, rows, ids, repeats)
    seconds = seconds_of(_forward, q, rows, ids, repeats=repeats)
    row("sparse_mla", seconds, WIDTH + VALUE_DIM, gathered, xla)
    if name == "hopper" and once_a_shape:
        seconds = seconds_of(_triton, q, rows, ids, repeats=repeats)
        row("sparse_mla", seconds, WIDTH + VALUE_DIM, gathered, xla, "triton")
    out, lse = _forward(q, rows, ids)
    given = [q, rows, ids, out, lse, jax.random.normal(jax.random.key(0), out.shape, q.dtype), jnp.ones_like(lse)]
    seconds = seconds_of(_detached, *given, repeats=repeats)
    row("sparse_mla backward, detached", seconds, 2 * WIDTH + VALUE_DIM, gathered, xla_gradient)
    columns, moved = 3 * WIDTH + 2 * VALUE_DIM, 5 * gathered  # the fp32 sums are read and written
    row("sparse_mla backward", _adding_seconds(_backward, given, repeats), columns, moved, xla_gradient)
    if once_a_shape:
        seconds = _adding_seconds(_deterministic, given, min(repeats, 3))
        row("sparse_mla backward, deterministic", seconds, columns, moved, xla_gradient)
    return results


def _inputs(queries, count, kind, selected):
    parts = jax.random.split(jax.random.key(time.time_ns() % 2**31), 3)
    q = jax.random.normal(parts[0], (queries, HEADS, WIDTH), jnp.bfloat16)
    rows = jax.random.normal(parts[1], (count, WIDTH), jnp.bfloat16)
    # One id from each of as many equal stretches: distinct, as a selection's are.
    first, stretch = jnp.arange(selected, dtype=jnp.int32), count // selected
    if kind == "local":
        places = (jnp.arange(queries, dtype=jnp.int32)[:, None] * 8 + first * 2) % (count - 1)
        return q, rows, places + jax.random.randint(parts[2], places.shape, 0, 2, jnp.int32)
    places = first * stretch + jax.random.randint(parts[2], (queries, selected), 0, stretch, jnp.int32)
    if kind == "skewed":  # half of them in the first sixteenth of the rows
        spread = (count - selected) * (places / count) ** 4
        places = spread.astype(jnp.int32) + first
    return q, rows, jax.random.permutation(parts[2], places, axis=1, independent=True)


@jax.jit
def _forward(q, rows, ids):
    return api.sparse_mla(q, rows, ids, scale=SCALE, value_dim=VALUE_DIM)


@jax.jit
def _triton(q, rows, ids):
    return hopper_triton.forward(q, rows, ids, scale=SCALE, value_dim=VALUE_DIM, interpret=False)


@jax.jit
def _detached(*given):
    return api.sparse_mla_backward(*given, None, scale=SCALE)[0]


def _adding(deterministic):
    def backward(total, *given):
        return api.sparse_mla_backward(*given, total, scale=SCALE, deterministic=deterministic)

    return jax.jit(backward, donate_argnums=0)


_backward, _deterministic = _adding(False), _adding(True)


def _adding_seconds(fn, given, repeats):
    """Median seconds of a backward pass into gradient pages that live on."""
    total, times = jnp.zeros(given[1].shape, jnp.float32), []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        _, total = jax.block_until_ready(fn(total, *given))
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def seconds_of(fn, *args, repeats: int, calls: int = 4) -> float:
    """Median seconds a call, after warm-up, of `calls` calls sent together: the host's part overlaps."""
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([fn(*args) for _ in range(calls)])
        times.append((time.perf_counter() - start) / calls)
    return sorted(times)[repeats // 2]


def _dense(q, kv):
    """One query block over its gathered rows [queries, selected, width], in their dtype."""
    weights = jax.nn.softmax(jnp.einsum("tnw,tkw->tnk", q, kv, preferred_element_type=jnp.float32) * SCALE)
    return jnp.einsum("tnk,tkr->tnr", weights.astype(q.dtype), kv[..., :VALUE_DIM])


def _dense_gradient(total, q, rows, ids):
    dq, dkv = jax.grad(lambda q, kv: _dense(q, kv).astype(jnp.float32).sum(), (0, 1))(q, rows[ids])
    return dq, total.at[ids].add(dkv.astype(jnp.float32))


def _xla_seconds(q, rows, ids, repeats):
    """Gather and einsum, and their gradient added to fp32 sums, a few queries a call."""
    few = min(len(q), XLA_QUERIES)
    given = q[:few], rows, ids[:few]
    forward = seconds_of(jax.jit(lambda q, rows, ids: _dense(q, rows[ids])), *given, repeats=repeats, calls=1)
    gradient = _adding_seconds(jax.jit(_dense_gradient, donate_argnums=0), given, repeats)
    return forward * len(q) / few, gradient * len(q) / few
