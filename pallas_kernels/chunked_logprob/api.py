"""Log-probabilities of given tokens and entropies from hidden states and the head, never with all logits at once.

Shapes: T tokens, D features, v columns of the head (a slice of the vocabulary), r rank.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.chunked_logprob import blocked, reference

IMPLEMENTATIONS = ("auto", "xla", "reference")


def backend(implementation: str = "auto") -> str:
    """The backend that runs: "xla" (blocks of tokens, on every device) or "reference".

    Raises:
      ValueError: the name is unknown.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}; accepted: {', '.join(IMPLEMENTATIONS)}")
    return "xla" if implementation == "auto" else implementation


def _check(hidden, head, targets, a, b) -> None:
    """Shapes and types, on the host."""
    if hidden.ndim != 2 or hidden.dtype not in (jnp.bfloat16, jnp.float32) or 0 in hidden.shape:
        raise ValueError(f"hidden is {hidden.dtype} {hidden.shape}; accepted: bfloat16 or float32 [tokens, features]")
    if head.ndim != 2 or head.shape[0] != hidden.shape[1] or head.dtype != hidden.dtype or head.shape[1] == 0:
        raise ValueError(f"head is {head.dtype} {head.shape}; accepted: {hidden.dtype} [{hidden.shape[1]}, columns]")
    if targets.shape != hidden.shape[:1] or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets are {targets.dtype} {targets.shape}; accepted: integers {hidden.shape[:1]}")
    if (a is None) != (b is None):
        raise ValueError(f"a is {'absent' if a is None else 'given'} alone; accepted: both of a and b, or neither")
    if a is not None:
        rank = a.shape[-1]
        for name, value, shape in (("a", a, (head.shape[0], rank)), ("b", b, (rank, head.shape[1]))):
            if value.shape != shape or value.dtype != jnp.float32:
                raise ValueError(f"{name} is {value.dtype} {value.shape}; accepted: float32 {shape}")


def softmax_statistics(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D v"],
    targets: Int[Array, "T"],
    first: int | Int[Array, ""] = 0,
    *,
    a: Float[Array, "D r"] | None = None,
    b: Float[Array, "r v"] | None = None,
    scale: float = 1.0,
    temperature: float | Float[Array, ""] = 1.0,
    implementation: str = "auto",
) -> tuple[Float[Array, "T"], Float[Array, "T"], Float[Array, "T"], Float[Array, "T"]]:
    """Per token, over logits l = (hidden head + scale (hidden a) b) / temperature of this slice of the vocabulary.

    Returns fp32: the largest logit m (no gradient), sum exp(l - m), sum exp(l - m) l, and the target's logit (0 where
    the target lies in another slice). Slices combine by rescaling the sums to a common m.

    Differentiable in hidden, a, b and head, where a head that is not differentiated costs nothing and one that is a sum
    of its shape in fp32; temperature is a constant. Sums are fp32, and fp32 inputs are not
    rounded anywhere. With bf16 inputs the cotangent of the logits is rounded to bf16, and the fp32 factors' products
    are off by at most 2^-16 of each term. Temporaries stay below 1 GiB, whatever T and v. Works under jit, scan,
    remat, vmap and shard_map.

    Args:
      hidden, head: of one type, bf16 or fp32. a, b: fp32, the head's low-rank update.
      targets: integers; `first` is the token of the slice's first column.
      implementation: "auto", "xla" or "reference".

    Raises:
      ValueError: shapes or types do not fit, or an unknown implementation.
    """
    _check(hidden, head, targets, a, b)
    temperature = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    first = jnp.asarray(first, jnp.int32)
    if backend(implementation) == "xla":
        pair = None if a is None else (a, b)
        return blocked.softmax_statistics(hidden, head, pair, targets, first, temperature, float(scale))

    def logits_of(hidden):
        logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
        if a is not None:
            highest = jax.lax.Precision.HIGHEST
            low = jnp.matmul(hidden.astype(jnp.float32), a, precision=highest)
            logits = logits + scale * jnp.matmul(low, b, precision=highest)
        return logits / temperature

    return reference.softmax_statistics(logits_of, hidden, targets, first)


def token_logprobs(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "T"],
    **options,
) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
    """fp32 log-probability of each target and entropy, where one device holds the whole head.

    Args:
      options: of `softmax_statistics`.
    """
    top, total, weighted, picked = softmax_statistics(hidden, head, targets, **options)
    lse = top + jnp.log(total)
    return picked - lse, lse - weighted / total
