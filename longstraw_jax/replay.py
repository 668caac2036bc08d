"""Replay and score: one response against the resident prompt, with or without autograd."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from longstraw_jax import lora, parallel, sharding
from longstraw_jax.model import choices, decoder, rope
from longstraw_jax.model.block import Pass
from longstraw_jax.model.choices import Choices
from longstraw_jax.prefix import pages
from longstraw_jax.types import Model, Params, PrefixState


def pad_length(tokens: int, devices: int) -> int:
    """Static length of a replay of up to `tokens` response tokens: every device takes the same share."""
    return -(-max(tokens, 1) // devices) * devices


def member_inputs(
    boundary: int, responses: Sequence[Sequence[int]], padded: int
) -> tuple[Int[np.ndarray, "G T"], Int[np.ndarray, "G T"], Int[np.ndarray, "G"]]:
    """Inputs [boundary, r0 .. r(n-2)], targets [r0 .. r(n-1)] and lengths of a group's responses, zero-padded.

    Raises:
      ValueError: a response longer than `padded`.
    """
    inputs, targets = (np.zeros((len(responses), padded), np.int32) for _ in range(2))
    for g, response in enumerate(responses):
        if len(response) > padded:
            raise ValueError(f"response {g} has {len(response)} tokens; accepted: at most {padded}")
        targets[g, : len(response)] = response
        inputs[g, 0] = boundary
        inputs[g, 1 : len(response)] = response[:-1]
    return inputs, targets, np.asarray([len(r) for r in responses], np.int32)


def member_logprobs(
    model: Model,
    base: Params,
    adapters: Params | None,
    prefix: PrefixState,
    inputs: Int[Array, "T"],
    targets: Int[Array, "T"],
    length: Int[Array, ""],
    temperature: float | Float[Array, ""] = 1.0,
    *,
    per_device: bool = False,
    held: Choices = choices.NONE,
) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
    """Log-probability of each response token and the entropy it was drawn at, given the resident prompt.

    Differentiable in `adapters` (take the gradient of this, never inside it); the prompt's pages are constants, so
    this is the response-only gradient of the `frozen` and `detached` modes. Queries and candidates travel
    (*merge-candidates*), the response is split over the mesh.

    Args:
      adapters: None for the reference policy (adapters off).
      inputs, targets, length: one row of `member_inputs`; T is a multiple of the mesh size.
      per_device: `adapters` come from lora.per_device, so that their gradients stay per device.
      held: choices [layers, 1, T, ..] to take, those of a kind that is None are made here. Held selections may name
        the prompt's tokens and the inputs' own positions.

    Returns:
      fp32 [T]; entries at and past `length` are meaningless and must be masked.
    """
    member = (inputs, targets, length, temperature)
    return _replay(model, base, adapters, prefix, None, *member, per_device, held, ())[:2]


def member_logprobs_collecting(
    model: Model,
    base: Params,
    adapters: Params,
    prefix: PrefixState,
    page_grads: tuple[Float[Array, "R J pages 64 W"], ...],
    inputs: Int[Array, "T"],
    targets: Int[Array, "T"],
    length: Int[Array, ""],
    temperature: float | Float[Array, ""] = 1.0,
    *,
    held: Choices = choices.NONE,
) -> tuple[Float[Array, "T"], Float[Array, "T"], tuple[Float[Array, "R J pages 64 W"], ...]]:
    """`member_logprobs` whose backward pass also adds the gradient of the prompt's latents to gradient pages.

    Args:
      adapters: from lora.per_device.
      page_grads: gradient pages, see exact_gradient.py.

    Returns:
      Log-probabilities, entropies and `page_grads` as they are. Pull back with the gradient pages so far as the third
      cotangent: what comes back for `page_grads` are they plus this member's.
    """
    member = (inputs, targets, length, temperature)
    return _replay(model, base, adapters, prefix, page_grads, *member, True, held, ())[:3]


def _replay(model, base, adapters, prefix, sinks, inputs, targets, length, temperature, per_device, held, record):
    config = model.config
    sharding.check_divides("replay length", inputs.shape[0], model.devices)

    def body(axis, base, adapters, prefix, sinks, inputs, targets, length, temperature, held):
        adapters = lora.local(adapters) if per_device else adapters
        index = parallel.axis_index(axis) * inputs.shape[0] + jnp.arange(inputs.shape[0], dtype=jnp.int32)
        cos, sin = rope.cos_sin((prefix.length + index)[None], config.rope_parameters, config.qk_rope_head_dim)
        run = Pass(
            axis=axis,
            cos=cos,
            sin=sin,
            query_index=jnp.where(index < length, index, -1)[None],
            length=prefix.length,
            strategy="merge_candidates",
            attention=model.attention,
            expert_load=model.expert_load,
            prefix_store=model.prefix_store,
            kernels=model.kernels,
            record=record,
        )
        trunk = nnx.merge(model.graphdef, base)
        hidden, _, extras, sinks = trunk.collecting(
            inputs[None],
            run,
            sinks=sinks,
            pages=tuple(zip(prefix.latents, prefix.index_keys, strict=True)),
            adapters=adapters,
            lora=model.lora,
            remat=model.remat,
            held=held,
        )
        head, pair = trunk.lm_head.weight[...], trunk.head_pair(adapters, model.lora)
        args = (hidden[0], targets, head, pair, temperature, axis)
        return *parallel.token_logprobs(*args, implementation=model.kernels), sinks, choices.of_layers(extras, record)

    token = P(sharding.AXIS)
    specs = (
        decoder.param_specs(config),
        lora.per_device_specs(config, model.lora) if per_device else lora.stored_specs(model, adapters),
        pages.prefix_specs(config),
        pages.prefix_specs(config).latents if sinks is not None else None,
        token,
        token,
        P(),
        P(),
        choices.specs(),
    )
    args = (base, adapters, prefix, sinks, inputs, targets, length, jnp.float32(temperature), held)
    return parallel.mapped(body, model.mesh, specs, (token, token, specs[3], choices.specs()))(*args)


@functools.partial(jax.jit, static_argnames=("model",))
def score(
    model: Model,
    base: Params,
    adapters: Params | None,
    prefix: PrefixState,
    inputs: Int[Array, "G T"],
    targets: Int[Array, "G T"],
    lengths: Int[Array, "G"],
    temperature: float | Float[Array, ""] = 1.0,
    held: Choices = choices.NONE,
) -> tuple[Float[Array, "G T"], Float[Array, "G T"]]:
    """Log-probabilities and entropies of a group, without autograd, one member at a time.

    Args:
      held: choices [G, layers, 1, T, ..] to take, as in `member_logprobs`.
    """
    return _score(model, base, adapters, prefix, (inputs, targets, lengths), temperature, held, ())[:2]


@functools.partial(jax.jit, static_argnames=("model", "record"))
def score_and_choices(
    model: Model,
    base: Params,
    adapters: Params | None,
    prefix: PrefixState,
    inputs: Int[Array, "G T"],
    targets: Int[Array, "G T"],
    lengths: Int[Array, "G"],
    temperature: float | Float[Array, ""] = 1.0,
    *,
    record: tuple[str, ...],
) -> tuple[Float[Array, "G T"], Float[Array, "G T"], Choices]:
    """`score` that also returns the inputs' choices [G, layers, 1, T, ..] of the kinds in `record`, -1 for padding."""
    return _score(model, base, adapters, prefix, (inputs, targets, lengths), temperature, choices.NONE, record)


def _score(model, base, adapters, prefix, members, temperature, held, record):
    def one(member):
        *row, held = member
        logp, entropy, _, chosen = _replay(model, base, adapters, prefix, None, *row, temperature, False, held, record)
        return logp, entropy, chosen

    whole = sharding.named(model.mesh, P())  # every host reads all of it
    scored = jax.lax.map(one, (*members, held))
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), scored)
