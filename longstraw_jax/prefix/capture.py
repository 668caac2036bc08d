"""Capture: the prompt once, in chunks, without autograd; only pages stay."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, UInt

from longstraw_jax import lora, parallel, sharding
from longstraw_jax.model import decoder, rope
from longstraw_jax.model.block import Pass
from longstraw_jax.prefix import pages
from longstraw_jax.types import Model, Params, PrefixState


def _by_group(runs: list[Array], repeat: int) -> Float[Array, "R J kept W"]:
    """The kept rows of a segment's runs [L, kept, W] in the order of the layers within a group."""
    return jnp.concatenate([x.reshape(repeat, -1, *x.shape[1:]) for x in runs], axis=1)


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("state",))
def capture_chunk(
    model: Model,
    base: Params,
    adapters: Params | None,
    state: PrefixState,
    ids: Int[Array, "C"],
    count: Int[Array, ""],
) -> PrefixState:
    """Appends the first `count` of `ids` to the resident prompt. The state is donated.

    Queries stay on their device, each layer's keys and latents are gathered for use (*gather-keys*).
    """
    config = model.config

    def body(axis, base, adapters, state, ids, count):
        chunk = ids.shape[0] * parallel.axis_size(axis)
        index = parallel.axis_index(axis) * ids.shape[0] + jnp.arange(ids.shape[0], dtype=jnp.int32)
        capacity = state.latents[0].shape[2] * state.latents[0].shape[3]
        kept, rows = pages.chunk_rows(state.length, count, chunk, capacity, axis)
        cos, sin = rope.cos_sin((state.length + index)[None], config.rope_parameters, config.qk_rope_head_dim)
        run = Pass(
            axis=axis,
            cos=cos,
            sin=sin,
            query_index=jnp.where(index < count, index, -1)[None],
            length=state.length,
            strategy="gather_keys",
            attention=model.attention,
            keep="rows",
            keep_rows=kept,
        )
        trunk = nnx.merge(model.graphdef, base)
        _, new, _ = trunk(
            ids[None],
            run,
            pages=tuple(zip(state.latents, state.index_keys, strict=True)),
            adapters=adapters,
            lora=model.lora,
        )
        latents = tuple(
            pages.write(pool, rows, _by_group([latents for latents, _ in runs], pool.shape[0]))
            for pool, runs in zip(state.latents, new, strict=True)
        )
        keys = tuple(pages.write(pool, rows, runs[0][1]) for pool, runs in zip(state.index_keys, new, strict=True))
        return PrefixState(latents, keys, state.length + count, state.fingerprint)

    specs = pages.prefix_specs(config)
    in_specs = (decoder.param_specs(config), lora.stored_specs(model, adapters), specs, P(sharding.AXIS), P())
    return parallel.mapped(body, model.mesh, in_specs, specs)(base, adapters, state, ids, count)


def capture(
    model: Model,
    base: Params,
    adapters: Params | None,
    tokens: np.ndarray,
    *,
    chunk: int,
    fingerprint: UInt[Array, "2"],
    capacity: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> PrefixState:
    """The resident state of a prompt's first tokens.

    Args:
      adapters: None for the base policy and for the `frozen` mode, whose adapters act from the boundary token on.
      tokens: [S - 1] ids, the prompt without its last token (which every sample, score and replay runs itself).
      chunk: tokens a step, any length of at least 1.
      fingerprint: of (base, adapters), see freshness.py; kept with the state.
      capacity: tokens to make room for, by default those given; equal capacities share compiled programs.
      progress: called with the number of tokens captured after each chunk.

    Raises:
      ConfigError: more tokens than max_position_embeddings - 1.
      ValueError: chunk, capacity or a token id out of range.
    """
    tokens = np.asarray(tokens, np.int32)
    config = model.config
    config.check_length(tokens.size + 1, "prompt")
    if chunk < 1:
        raise ValueError(f"chunk={chunk}; accepted: at least 1")
    capacity = tokens.size if capacity is None else capacity
    if capacity < tokens.size:
        raise ValueError(f"capacity={capacity}; accepted: at least the {tokens.size} tokens to capture")
    check_ids(tokens, config.vocab_size)
    state = pages.allocate(model, capacity)
    padded = -(-chunk // model.devices) * model.devices
    for start in range(0, tokens.size, chunk):
        piece = tokens[start : start + chunk]
        ids = np.zeros((padded,), np.int32)
        ids[: piece.size] = piece
        state = capture_chunk(model, base, adapters, state, ids, np.int32(piece.size))
        if progress is not None:
            progress(start + piece.size)
    # Last, because a chunk donates the state it extends and the caller keeps the fingerprint.
    return dataclasses.replace(state, fingerprint=fingerprint)


def check_ids(tokens: np.ndarray, vocab_size: int) -> None:
    """Raises ValueError for ids outside the vocabulary: a gather would clamp them unseen."""
    bad = (tokens < 0) | (tokens >= vocab_size)
    if bad.any():
        at = int(np.argmax(bad.reshape(-1)))
        raise ValueError(f"token id {int(tokens.reshape(-1)[at])} at index {at}; accepted: 0 to {vocab_size - 1}")
