"""Capture: the prompt once, in chunks, without autograd; only pages stay."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, UInt

from longstraw_jax import lora, parallel, sharding
from longstraw_jax.model import choices, decoder, rope
from longstraw_jax.model.block import Pass
from longstraw_jax.model.choices import Choices
from longstraw_jax.prefix import pages
from longstraw_jax.types import Model, Params, PrefixState


def _by_group(runs: list[Array], repeat: int) -> Float[Array, "R J kept W"]:
    """The kept rows of a segment's runs [L, kept, W] in the order of the layers within a group."""
    return jnp.concatenate([x.reshape(repeat, -1, *x.shape[1:]) for x in runs], axis=1)


def run_chunk(
    model: Model,
    axis: str | None,
    base: Params,
    adapters: Params | None,
    prefix: PrefixState,
    ids: Int[Array, "C"],
    count: Int[Array, ""],
    *,
    sinks: tuple[Array, ...] | None = None,
    held: Choices = choices.NONE,
    record: tuple[str, ...] = (),
) -> tuple[Int[Array, "kept"], Any, Any, Choices, Any]:
    """The chunk that follows `prefix.length` tokens, on one device's share; for use inside a mapped body.

    Queries stay on their device, each layer's keys and latents are gathered for use (*gather-keys*).

    Args:
      count: real tokens among `ids`.
      sinks, held: as in Decoder.collecting; with sinks, layers are recomputed in the backward pass.
      record: kinds of choices to hand back.

    Returns:
      Pool rows of what this device keeps (out of bounds for what it does not); per segment its latents
      [R, J, kept, W]; its index keys [R, kept, H], or None where selections are held; the chunk's choices; the sinks.
    """
    config = model.config
    chunk = ids.shape[0] * parallel.axis_size(axis)
    index = parallel.axis_index(axis) * ids.shape[0] + jnp.arange(ids.shape[0], dtype=jnp.int32)
    capacity = prefix.latents[0].shape[2] * prefix.latents[0].shape[3]
    aligned = model.prefix_store == "host"  # `capture` refuses other chunks
    kept, rows = pages.chunk_rows(prefix.length, count, chunk, capacity, axis, aligned=aligned)
    cos, sin = rope.cos_sin((prefix.length + index)[None], config.rope_parameters, config.qk_rope_head_dim)
    run = Pass(
        axis=axis,
        cos=cos,
        sin=sin,
        query_index=jnp.where(index < count, index, -1)[None],
        length=prefix.length,
        strategy="gather_keys",
        attention=model.attention,
        expert_load=model.expert_load,
        prefix_store=model.prefix_store,
        kernels=model.kernels,
        keep="rows",
        keep_rows=kept,
        record=record,
    )
    _, new, extras, sinks = nnx.merge(model.graphdef, base).collecting(
        ids[None],
        run,
        sinks=sinks,
        held=held,
        pages=tuple(zip(prefix.latents, prefix.index_keys, strict=True)),
        adapters=adapters,
        lora=model.lora,
        remat=model.remat and sinks is not None,
    )
    latents = tuple(
        _by_group([latents for latents, _ in runs], pool.shape[0])
        for pool, runs in zip(prefix.latents, new, strict=True)
    )
    return rows, latents, tuple(runs[0][1] for runs in new), choices.of_layers(extras, record), sinks


def _append(model, base, adapters, state, ids, count, record):
    """The state with the chunk appended, and its choices of the kinds in `record`."""

    def body(axis, base, adapters, state, ids, count):
        rows, latents, keys, chosen, _ = run_chunk(model, axis, base, adapters, state, ids, count, record=record)

        def write(pool, new):
            if model.prefix_store == "host":
                return pages.write_host(pool, state.length, rows, new, axis)
            return pages.write(pool, rows, new)

        latents = tuple(write(pool, new) for pool, new in zip(state.latents, latents, strict=True))
        keys = tuple(write(pool, new) for pool, new in zip(state.index_keys, keys, strict=True))
        return PrefixState(latents, keys, state.length + count, state.fingerprint), chosen

    specs = pages.prefix_specs(model.config)
    in_specs = (decoder.param_specs(model.config), lora.stored_specs(model, adapters), specs, P(sharding.AXIS), P())
    out_specs = (specs, choices.specs())
    return parallel.mapped(body, model.mesh, in_specs, out_specs)(base, adapters, state, ids, count)


@functools.lru_cache(maxsize=16)
def chunk_program(model: Model, record: tuple[str, ...] = ()) -> Callable[..., Any]:
    """The program of `capture_chunk`, or of `capture_chunk_and_choices` where a kind is recorded; the state is donated.

    One a model, because what a program returns is laid out as its model's devices want it.
    """

    def append(base, adapters, state, ids, count):
        state, chosen = _append(model, base, adapters, state, ids, count, record)
        return (state, chosen) if record else state

    formats = pages.prefix_formats(model)
    return jax.jit(append, donate_argnames="state", out_shardings=(formats, None) if record else formats)


def capture_chunk(
    model: Model,
    base: Params,
    adapters: Params | None,
    state: PrefixState,
    ids: Int[Array, "C"],
    count: Int[Array, ""],
) -> PrefixState:
    """Appends the first `count` of `ids` to the resident prompt. The state is donated."""
    return chunk_program(model)(base, adapters, state, ids, count)


def capture_chunk_and_choices(
    model: Model,
    base: Params,
    adapters: Params | None,
    state: PrefixState,
    ids: Int[Array, "C"],
    count: Int[Array, ""],
    *,
    record: tuple[str, ...],
) -> tuple[PrefixState, Choices]:
    """`capture_chunk` that also returns its tokens' choices [layers, 1, C, ..] of the kinds in `record` (some)."""
    return chunk_program(model, record)(base, adapters, state, ids, count)


def chunk_ids(model: Model, tokens: Int[np.ndarray, "S"], chunk: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Start, number of tokens and ids [C] of each chunk, zero-padded to what the mesh divides."""
    padded = -(-chunk // model.devices) * model.devices
    for start in range(0, tokens.size, chunk):
        piece = tokens[start : start + chunk]
        ids = np.zeros((padded,), np.int32)
        ids[: piece.size] = piece
        yield start, piece.size, ids


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
    record: tuple[str, ...] = (),
    keep: Callable[[Choices], None] | None = None,
) -> PrefixState:
    """The resident state of a prompt's first tokens.

    Args:
      adapters: None for the base policy and for the `frozen` mode, whose adapters act from the boundary token on.
      tokens: [S - 1] ids, the prompt without its last token (which every sample, score and replay runs itself).
      chunk: tokens a step, any length of at least 1; with prefix_store "host" a multiple of a page a device.
      fingerprint: of (base, adapters), see freshness.py; kept with the state.
      capacity: tokens to make room for, by default those given; equal capacities share compiled programs.
      progress: called with the number of tokens captured after each chunk, once the devices are through with it.
      record: kinds of choices that `keep` is called with after each chunk: selections are 4 x index_topk bytes a
        token and full layer, routes 4 x num_experts_per_tok a token and sparse layer.

    Raises:
      ConfigError: more tokens than max_position_embeddings - 1.
      ValueError: chunk, capacity, a token id or a kind out of range; `record` without `keep`, or the other way round.
    """
    choices.check_record(record)
    if bool(record) != (keep is not None):
        said = f"record={tuple(record)} with keep={keep}"
        raise ValueError(f"{said}; accepted: kinds and what is called with their choices, or neither")
    tokens = np.asarray(tokens, np.int32)
    state = pages.allocate(model, room(model, tokens, chunk, capacity))
    for start, count, ids in chunk_ids(model, tokens, chunk):
        args = (model, base, adapters, state, ids, np.int32(count))
        if record:
            state, chosen = capture_chunk_and_choices(*args, record=record)
            keep(chosen)
        else:
            state = capture_chunk(*args)
        if progress is not None:
            jax.block_until_ready(state)
            progress(start + count)
    # Last, because a chunk donates the state it extends and the caller keeps the fingerprint.
    return dataclasses.replace(state, fingerprint=fingerprint)


def room(model: Model, tokens: Int[np.ndarray, "S-1"], chunk: int, capacity: int | None = None) -> int:
    """Tokens to allocate pages for, so that every chunk of a capture can be written.

    Args:
      tokens, chunk, capacity: as in `capture`.

    Raises:
      ConfigError, ValueError: as in `capture`.
    """
    model.config.check_length(tokens.size + 1, "prompt")
    check_chunk(model, chunk)
    capacity = tokens.size if capacity is None else capacity
    if capacity < tokens.size:
        raise ValueError(f"capacity={capacity}; accepted: at least the {tokens.size} tokens to capture")
    check_ids(tokens, model.config.vocab_size)
    return page_room(model, capacity, chunk)


def page_room(model: Model, capacity: int, chunk: int) -> int:
    """Tokens to allocate pages for, where prompts of up to `capacity` tokens are captured in such chunks."""
    # On the host chunks are written whole, and one that the pool ends in would be moved to fit.
    return -(-capacity // chunk) * chunk if model.prefix_store == "host" else capacity


def check_chunk(model: Model, chunk: int) -> None:
    """Raises ValueError for a number of tokens a step that the pages cannot take."""
    if chunk < 1:
        raise ValueError(f"chunk={chunk}; accepted: at least 1")
    row = pages.PAGE * model.devices
    if model.prefix_store == "host" and chunk % row:
        raise ValueError(f"chunk={chunk} with prefix_store='host'; accepted: a multiple of {row} (a page a device)")


def check_ids(tokens: np.ndarray, vocab_size: int) -> None:
    """Raises ValueError for ids outside the vocabulary: a gather would clamp them unseen."""
    bad = (tokens < 0) | (tokens >= vocab_size)
    if bad.any():
        at = int(np.argmax(bad.reshape(-1)))
        raise ValueError(f"token id {int(tokens.reshape(-1)[at])} at index {at}; accepted: 0 to {vocab_size - 1}")
