"""Times index scores and exact selection: prefill and decode shapes, and a whole causal prompt from spread samples."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.indexer_topk import api, hopper, hopper_scores

HEADS, DIM, K = 32, 128, 2048  # GLM-5.2
SHAPES = (  # queries, keys
    *((1024, keys) for keys in (16_384, 65_536, 262_144)), (256, 2_097_152),
    *((queries, keys) for keys in (262_144, 2_097_152) for queries in (1, 8, 64)),
)
WHOLE = 2_097_152  # tokens of the prompt whose time is extrapolated
SAMPLE, SAMPLES = 512, 41  # queries a sample, samples: 1 % of the prompt
XLA_QUERIES = 64  # of XLA's path, whose time is scaled to the row's queries


def bench(
    matmul_tflops: float,
    copy_tbps: float,
    *,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    whole: int = WHOLE,
    sample: int = SAMPLE,
    k: int = K,
    repeats: int = 5,
) -> list[dict]:
    """One row for the scores and one for the whole op at each shape, then one for a causal prompt of `whole` tokens.

    Args:
      matmul_tflops, copy_tbps: the same run's bf16 matmul rate and copy rate (bytes read + written), for the fractions.
      shapes: (queries, keys); every query sees all keys.
    Returns:
      Rows with op, shape, backend, seconds (median of `repeats`), tflops (2 * heads * dim a pair),
      fraction_of_matmul, fraction_of_floor (the larger of arithmetic at matmul_tflops and keys read once at copy_tbps),
      xla_seconds (einsum + lax.top_k), and for the whole op selection_share: its time over the scores' time, less 1.
    """
    rows = []
    for queries, keys in shapes:
        q, w, pages = _inputs(queries, keys)
        limit = jnp.full(queries, keys, jnp.int32)
        xla = _xla_seconds(q, w, pages, k, repeats)
        flops, moved = 2.0 * HEADS * DIM * queries * keys, 2.0 * DIM * keys + 2.0 * HEADS * DIM * queries

        def row(op, seconds, backend, queries=queries, keys=keys, flops=flops, moved=moved, xla=xla):
            floor = max(flops / matmul_tflops, moved / copy_tbps) / 1e12
            tflops = flops / seconds / 1e12
            return dict(
                op=op, shape=f"{queries} x {keys}", backend=backend, seconds=seconds, tflops=tflops,
                fraction_of_matmul=tflops / matmul_tflops, fraction_of_floor=floor / seconds, xla_seconds=xla,
            )

        backend = api.backend(q, pages, k)
        scores = None
        if backend == "hopper":
            scores = seconds_of(_scores, q, w, pages, repeats=repeats)
            rows.append(row("index_scores", scores, backend))
        seconds = seconds_of(_whole(k), q, w, pages, limit, repeats=repeats)
        rows.append(row("index_topk", seconds, backend) | ({"selection_share": seconds / scores - 1} if scores else {}))
    return [*rows, _prompt(matmul_tflops, whole, min(sample, whole), k, repeats)]


def seconds_of(fn: Callable, *args, repeats: int, calls: int = 4) -> float:
    """Median seconds a call, after warm-up, of `calls` calls sent together: the host's part overlaps."""
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        results = [fn(*args) for _ in range(calls)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / calls)
    return sorted(times)[repeats // 2]


def _inputs(queries, keys):
    parts = jax.random.split(jax.random.key(time.time_ns() % 2**31), 3)
    q = jax.random.normal(parts[0], (queries, HEADS, DIM), jnp.bfloat16)
    return q, jax.random.normal(parts[1], (queries, HEADS)), jax.random.normal(parts[2], (keys // 64, 64, DIM), q.dtype)


@jax.jit
def _scores(q, w, pages):
    """As `hopper.index_topk` calls them: padded to its blocks of queries, everything needed."""
    block, count = hopper_scores.queries_per_block(*q.shape[:2]), pages.shape[0]
    pad = -q.shape[0] % block
    q, w = jnp.pad(q, ((0, pad), (0, 0), (0, 0))), jnp.pad(w, ((0, pad), (0, 0)))
    needed = jnp.full(q.shape[0] // block, count, jnp.int32)
    chunk = hopper.pages_per_program(count, len(needed))
    return hopper_scores.index_scores(q, w, pages, None, needed, chunk=chunk)


def _whole(k):
    return jax.jit(lambda q, w, pages, limit: api.index_topk(q, w, pages, limit, k))


def _xla_seconds(q, w, pages, k, repeats):
    def dense(q, w, pages):
        scores = jnp.einsum("tih,sh->tis", q, pages, preferred_element_type=jnp.float32)
        return jax.lax.top_k(jnp.einsum("tis,ti->ts", jax.nn.relu(scores), w), min(k, pages.shape[0]))

    few = min(len(q), XLA_QUERIES if pages.shape[0] < 2**14 else 8)  # bounds its [queries, heads, keys] array
    seconds = seconds_of(jax.jit(dense), q[:few], w[:few], pages.reshape(-1, DIM), repeats=repeats, calls=1)
    return seconds * len(q) / few


def _prompt(matmul_tflops, tokens, sample, k, repeats):
    """Causal prompt: samples at even distances, the middle one of each stretch standing for it."""
    q, w, pages = _inputs(sample, tokens)
    run, total = _whole(k), 0.0
    for i in range(SAMPLES):
        start = int((i + 0.5) * tokens / SAMPLES) - sample // 2
        limit = jnp.clip(start + 1 + jnp.arange(sample, dtype=jnp.int32), 0, tokens)
        total += seconds_of(run, q, w, pages, limit, repeats=repeats, calls=1) / SAMPLES
    seconds, flops = total * tokens / sample, HEADS * DIM * float(tokens) ** 2
    tflops = flops / seconds / 1e12
    return dict(
        op="index_topk, causal prompt", shape=f"{tokens} x {tokens}", backend=api.backend(q, pages, k), seconds=seconds,
        tflops=tflops, fraction_of_matmul=tflops / matmul_tflops, fraction_of_floor=tflops / matmul_tflops,
        xla_seconds=None, sampled_queries=SAMPLES * sample,
    )
