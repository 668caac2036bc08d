"""One forward pass over whole sequences, nothing resident: for reference comparisons and gradient baselines."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from longstraw_jax import parallel
from longstraw_jax.model import choices, rope
from longstraw_jax.model.block import Pass
from longstraw_jax.model.choices import Choices
from longstraw_jax.types import Model, Params


def forward(
    model: Model,
    base: Params,
    adapters: Params | None,
    ids: Int[Array, "B T"],
    *,
    positions: Int[Array, "B T"] | None = None,
    gate: Bool[Array, "B T"] | None = None,
    detach: Bool[Array, "B T"] | None = None,
    collect: bool = False,
    held: Choices = choices.NONE,
) -> tuple[Float[Array, "B T D"], list[dict[str, Array]]]:
    """Final hidden states of whole sequences, on one device.

    Args:
      positions: rotary positions, 0..T-1 by default; causality follows the order of tokens.
      gate: tokens whose queries see the adapters (all by default).
      detach: tokens whose latents carry no gradient.
      collect: also return every layer's intermediates.
      held: choices to take, those of a kind that is None are made here.

    Returns:
      After the final norm; and, when collect, one dict a layer: hidden (after the layer), attn_out, selection (-1 for
      none), index_scores of full layers, router_logits, router_ids and router_weights of sparse ones [B * T, ..].
    """
    options = dict(positions=positions, gate=gate, detach=detach, collect=collect, held=held)
    return forward_and_choices(model, base, adapters, ids, record=(), **options)[:2]


def forward_and_choices(
    model: Model,
    base: Params,
    adapters: Params | None,
    ids: Int[Array, "B T"],
    *,
    record: tuple[str, ...],
    positions: Int[Array, "B T"] | None = None,
    gate: Bool[Array, "B T"] | None = None,
    detach: Bool[Array, "B T"] | None = None,
    collect: bool = False,
    held: Choices = choices.NONE,
) -> tuple[Float[Array, "B T D"], list[dict[str, Array]], Choices]:
    """`forward` that also returns the tokens' choices of the kinds in `record`."""
    index = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    config = model.config
    cos, sin = rope.cos_sin(index if positions is None else positions, config.rope_parameters, config.qk_rope_head_dim)
    run = Pass(
        axis=None,
        cos=cos,
        sin=sin,
        query_index=index,
        length=jnp.int32(0),
        attention=model.attention,
        kernels=model.kernels,
        gate=gate,
        detach=detach,
        collect=collect,
        record=record,
    )
    decoder = nnx.merge(model.graphdef, base)
    options = dict(adapters=adapters, lora=model.lora, remat=model.remat and not collect, held=held)
    hidden, _, extras = decoder(ids, run, **options)
    return hidden, _by_layer(model, extras) if collect else [], choices.of_layers(extras, record)


def _by_layer(model: Model, extras: list[Any]) -> list[dict[str, Array]]:
    layers = {}
    for segment, runs in zip(model.config.segments(), extras, strict=True):
        for j, stacked in enumerate(runs):
            for i in range(segment.stack(j)):
                layers[segment.layer_index(i, j)] = jax.tree.map(lambda x, i=i: x[i], stacked)
    return [layers[i] for i in sorted(layers)]


def logits(model: Model, base: Params, adapters: Params | None, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """fp32 logits of every position: small inputs only."""
    pair = nnx.merge(model.graphdef, base).head_pair(adapters, model.lora)
    flat = parallel.logits(hidden.reshape(-1, hidden.shape[-1]), base["lm_head"]["weight"], pair, None)
    return flat.reshape(*hidden.shape[:-1], -1)


def logprobs(
    model: Model,
    base: Params,
    adapters: Params | None,
    ids: Int[Array, "T"],
    temperature: float | Float[Array, ""] = 1.0,
    **options: Any,
) -> tuple[Float[Array, "T-1"], Float[Array, "T-1"]]:
    """Log-probability of ids[1:] and the entropies they were drawn at; options as in `forward`."""
    hidden, _ = forward(model, base, adapters, ids[None], **options)
    pair = nnx.merge(model.graphdef, base).head_pair(adapters, model.lora)
    args = (hidden[0, :-1], ids[1:], base["lm_head"]["weight"], pair, temperature, None)
    return parallel.token_logprobs(*args, implementation=model.kernels)
