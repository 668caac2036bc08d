"""Times the grouped product of one expert layer, its gradients and its low-rank update, at uneven group sizes."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from bench.indexer_topk import seconds_of

from pallas_kernels.grouped_matmul import api, hopper_transposed, reference

D, F, RANK = 6144, 2048, 8  # GLM-5.2's experts
XLA_SHARE = 16  # XLA expands rows by the number of groups: it gets so small a share, its time is scaled
CASES = (("uneven", 64), ("one group", 64), ("empty groups", 64), ("uneven", 256))


def group_sizes(kind: str, groups: int, rows: int) -> np.ndarray:
    """int32 sizes: Dirichlet (2) shares of the rows; a third of the groups empty and a tenth of the rows left over; or
    everything in one group."""
    rng = np.random.default_rng(time.time_ns())
    if kind == "one group":
        return np.where(np.arange(groups) == groups // 2, rows, 0).astype(np.int32)
    shares = rng.dirichlet(np.full(groups, 2.0))
    if kind == "empty groups":
        shares[::3] = 0
        return np.floor(0.9 * rows * shares / shares.sum()).astype(np.int32)
    sizes = np.floor(rows * shares).astype(np.int32)
    sizes[0] += rows - sizes.sum()
    return sizes


def bench(
    matmul_tflops: float,
    copy_tbps: float,
    *,
    rows: int = 65_536,
    features: tuple[int, int] = (D, F),
    cases: tuple[tuple[str, int], ...] = CASES,
    repeats: int = 5,
) -> list[dict]:
    """Rows for the product, dx and dw, and for the product with a rank-8 update and its backward pass, each case.

    Args:
      matmul_tflops, copy_tbps: the same run's bf16 matmul rate and copy rate (bytes read + written).
    Returns:
      Rows with op, shape, backend, seconds (median of `repeats`), tflops, tbps, fraction_of_matmul, fraction_of_floor
      (the larger of arithmetic and of every operand moved once), xla_seconds (lax.ragged_dot; of the first case's
      product only), and for the update update_share: its time over the product's (both passes), less 1.
    """
    table = []
    for kind, groups in cases:
        d, f = features
        x, w, dy, a, b = _inputs(rows, groups, d, f)
        sizes = jnp.asarray(group_sizes(kind, groups, rows))
        used, backend = int(sizes.sum()), api.backend(x, w, RANK)
        flops, moved = 2.0 * used * d * f, 2.0 * (used * (d + f) + int((sizes > 0).sum()) * d * f)

        def row(op, seconds, xla=None, backend=backend, flops=flops, moved=moved, kind=kind, groups=groups, **more):
            tflops = flops / seconds / 1e12
            return dict(
                op=op, shape=f"{rows} x {features[0]} x {features[1]}, {groups} groups, {kind}", backend=backend,
                seconds=seconds, tflops=tflops, tbps=moved / seconds / 1e12, fraction_of_matmul=tflops / matmul_tflops,
                fraction_of_floor=max(flops / matmul_tflops, moved / copy_tbps) / 1e12 / seconds, xla_seconds=xla,
                **more,
            )  # fmt: skip

        xla = None if table else _xla_seconds(x, w, group_sizes(kind, groups, rows // XLA_SHARE))
        forward = seconds_of(_forward, x, w, sizes, repeats=repeats)
        backward = seconds_of(_dx, x, w, sizes, dy, repeats=repeats)
        table += [row("grouped_matmul", forward, xla), row("grouped_matmul, dx", backward)]
        if backend == "hopper":
            table.append(row("grouped_matmul, dw", seconds_of(_dw, x, dy, sizes, repeats=repeats)))
        adapted = seconds_of(_adapted, x, w, a, b, sizes, repeats=repeats)
        table.append(row(f"with update of rank {RANK}", adapted, update_share=adapted / forward - 1))
        pulled = seconds_of(_pull, _adapted_vjp(x, w, a, b, sizes), dy, repeats=repeats)
        table.append(row(f"with update of rank {RANK}, dx da db", pulled, update_share=pulled / backward - 1))
    return table


def _inputs(rows, groups, d, f):
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 5)
    shapes = ((rows, d), (groups, d, f), (rows, f), (groups, d, RANK), (groups, RANK, f))
    types = (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32)
    return [jax.random.normal(k, s, t) for k, s, t in zip(keys, shapes, types, strict=True)]


def _xla_seconds(x, w, sizes):
    few = x[: len(x) // XLA_SHARE]
    return XLA_SHARE * seconds_of(jax.jit(reference.grouped_matmul), few, w, jnp.asarray(sizes), repeats=3, calls=1)


@jax.jit
def _forward(x, w, sizes):
    return api.grouped_matmul(x, w, sizes, weights_gradient=False)


@jax.jit
def _dx(x, w, sizes, dy):
    return jax.vjp(lambda x: api.grouped_matmul(x, w, sizes, weights_gradient=False), x)[1](dy)


_dw = jax.jit(functools.partial(hopper_transposed.transposed_grouped_matmul, out_dtype=jnp.bfloat16))


@jax.jit
def _adapted(x, w, a, b, sizes):
    return api.adapted_grouped_matmul(x, w, a, b, sizes, scale=2.0)


@jax.jit
def _adapted_vjp(x, w, a, b, sizes):
    return jax.vjp(lambda x, a, b: api.adapted_grouped_matmul(x, w, a, b, sizes, scale=2.0), x, a, b)[1]


_pull = jax.jit(lambda pull, dy: pull(dy))
