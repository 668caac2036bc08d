"""Times chunked log-probabilities and their backward pass beside the plain matrix products that they contain."""

import time

import jax
import jax.numpy as jnp
from bench.indexer_topk import seconds_of

from pallas_kernels.chunked_logprob import api

D, V, RANK = 6144, 154_880, 8  # GLM-5.2
SHAPES = ((4096, V), (512, V), (64, V), (2048, V // 32))  # tokens, columns; the last is one of 32 devices


def bench(
    matmul_tflops: float,
    copy_tbps: float,
    *,
    features: int = D,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    repeats: int = 5,
) -> list[dict]:
    """Rows for the log-probabilities and for their gradient, without and with a rank-8 update of the head.

    Args:
      matmul_tflops, copy_tbps: the same run's bf16 matmul rate and copy rate (bytes read + written).
    Returns:
      Rows with op, shape, backend, seconds (median of `repeats`), tflops, tbps, fraction_of_matmul, fraction_of_floor,
      xla_seconds (log_softmax of all logits), and over_matmuls: seconds over those of the plain products contained
      (logits; backward: logits again and the hidden states' gradient), measured in the same run.
    """
    table = []
    for tokens, columns in shapes:
        hidden, head, a, b, targets = _inputs(tokens, features, columns)
        plain = seconds_of(_logits, hidden, head, repeats=repeats)
        logits = _logits(hidden, head)
        plain_back = plain + seconds_of(_pull, logits, head, repeats=repeats)
        del logits
        flops, moved = 2.0 * tokens * features * columns, 2.0 * features * (tokens + columns)

        def row(op, seconds, passes, plain, xla=None, flops=flops, moved=moved, tokens=tokens, columns=columns):
            tflops = passes * flops / seconds / 1e12
            floor = passes * max(flops / matmul_tflops, moved / copy_tbps) / 1e12
            return dict(
                op=op, shape=f"{tokens} x {features} x {columns}", backend=api.backend(), seconds=seconds,
                tflops=tflops, tbps=passes * moved / seconds / 1e12, fraction_of_matmul=tflops / matmul_tflops,
                fraction_of_floor=floor / seconds, xla_seconds=xla, over_matmuls=seconds / plain,
            )  # fmt: skip

        for update, pair in (("", None), (f", update of rank {RANK}", (a, b))):
            args = (hidden, head, targets, pair)
            forward = seconds_of(_chunked, *args, repeats=repeats)
            dense = None if pair else seconds_of(_dense, hidden, head, targets, repeats=repeats)
            cotangents, pull = _chunked_vjp(*args)
            backward = seconds_of(_pull_chunked, pull, cotangents, repeats=repeats)
            table.append(row("chunked_logprob" + update, forward, 1, plain, dense))
            table.append(row("chunked_logprob, backward" + update, backward, 2, plain_back))
    return table


def _inputs(tokens, features, columns):
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 5)
    hidden = jax.random.normal(keys[0], (tokens, features), jnp.bfloat16)
    head = jax.random.normal(keys[1], (features, columns), jnp.bfloat16) / features**0.5
    a = jax.random.normal(keys[2], (features, RANK)) / features**0.5
    b = jax.random.normal(keys[3], (RANK, columns))
    return hidden, head.astype(jnp.bfloat16), a, b, jax.random.randint(keys[4], (tokens,), 0, columns)


_logits = jax.jit(jnp.matmul)
_pull = jax.jit(lambda d, head: jnp.matmul(d, head.T))


@jax.jit
def _chunked(hidden, head, targets, pair):
    a, b = pair or (None, None)
    return api.token_logprobs(hidden, head, targets, a=a, b=b, scale=2.0, temperature=0.9)


@jax.jit
def _chunked_vjp(hidden, head, targets, pair):
    return jax.vjp(lambda hidden, pair: _chunked(hidden, head, targets, pair), hidden, pair)


_pull_chunked = jax.jit(lambda pull, cotangents: pull(cotangents))


@jax.jit
def _dense(hidden, head, targets):
    logp = jax.nn.log_softmax(jnp.matmul(hidden, head, preferred_element_type=jnp.float32) / 0.9)
    return jnp.take_along_axis(logp, targets[:, None], 1)[:, 0], -(jnp.exp(logp) * logp).sum(-1)
