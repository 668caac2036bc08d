"""What the device does at best, through XLA: the rates that floors are reckoned by."""

import jax
import jax.numpy as jnp
from bench.indexer_topk import seconds_of


def rates(side: int = 8192, numbers: int = 2**31, repeats: int = 5) -> tuple[float, float]:
    """TFLOP/s of a square bf16 product of random numbers, and TB/s (read + written) of a copy."""
    a, b = (jax.random.normal(k, (side, side), jnp.bfloat16) for k in jax.random.split(jax.random.key(0)))
    seconds = seconds_of(jax.jit(jnp.matmul), a, b, repeats=repeats)
    source = jax.random.bits(jax.random.key(1), (numbers,), jnp.uint16)
    copy = seconds_of(jax.jit(jnp.invert), source, repeats=repeats, calls=1)
    return 2 * side**3 / seconds / 1e12, 2 * source.nbytes / copy / 1e12
