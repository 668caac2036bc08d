"""Whole packed sequences through the trunk with dense attention under a mask: what all weights are trained through.

The same mathematics as forward.forward (tests compare the two): the selection is a mask over all keys and every
expert runs on every token, weighed by 0 where it was not chosen. That costs T / K and E / K times the multiplications,
but of a small model at a few thousand tokens they are plain matrix products, where gathers and ragged groups are not.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from longstraw_jax import parallel
from longstraw_jax.config import ModelConfig
from longstraw_jax.model import rope
from longstraw_jax.model.block import Block
from longstraw_jax.pretrain import indexer_loss, router_balance
from longstraw_jax.types import Model, Params
from pallas_kernels.indexer_topk import reference as indexer_topk

CONTROLS = ("indexer", "recent", "random")  # choices of keys that `Options.measure` compares with the best


class Options(NamedTuple):
    """Static choices of a pass.

    Attributes:
      keys: what a query selects; None for dense attention, the selection of all keys.
      index: run the indexers, which dense attention needs for their loss alone.
      measure: also compare what the indexers choose with what the attention over all keys would.
    """

    keys: int | None
    index: bool
    measure: bool = False


class See(NamedTuple):
    """What every layer shares: rotary tables, visible keys, tokens that count, the weight of each one's divergence."""

    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]
    visible: Bool[Array, "B T T"]
    real: Bool[Array, "B T"]
    weights: Float[Array, "B T"]


class Chosen(NamedTuple):
    """What a full layer hands to the shared layers it serves: the mask of keys and its indexer's log-distribution."""

    mask: Bool[Array, "B T T"]
    log_index: Float[Array, "B T T"] | None


def run(
    model: Model,
    base: Params,
    ids: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    options: Options,
    weights: Float[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], dict[int, dict[str, Any]]]:
    """Final hidden states of packed rows on one device, and sums over tokens of each layer.

    Args:
      model: `model.remat` recomputes each layer in the backward pass, keeping its input and selection.
      base: weights in the dtypes of decoder.param_shapes.
      segments: the document a token belongs to, -1 for padding. Documents do not see one another.
      positions: rotary positions, rising from 0 in each document, with or without gaps.
      weights: of each query in the divergence; None for 1, and 0 for padding.

    Returns:
      After the final norm; and by layer a dict of fp32 sums: weighed `divergence` of the layer's attention from its
      indexer (with options.index), `load` [E] of a sparse layer, and with options.measure `share` (sums of
      `captured_share` over queries with more than options.keys visible keys, one of each of CONTROLS) and `queries`,
      their number.
    """
    config = model.config
    cos, sin = rope.cos_sin(positions, config.rope_parameters, config.qk_rope_head_dim)
    real = segments >= 0
    weights = real.astype(jnp.float32) if weights is None else weights
    see = See(cos, sin, indexer_loss.visible_keys(segments), real, weights)
    decoder = nnx.merge(model.graphdef, base)
    x = parallel.embed(ids, decoder.embed_tokens.weight[...], None)
    found = {}
    for group, segment in zip(decoder.segments, config.segments(), strict=True):
        split = [nnx.split(block) for block in group.layers]

        def layer(x, chosen, state, j, split=split):
            return _layer(nnx.merge(split[j][0], state), x, chosen, see, options)

        if model.remat:
            policy = jax.checkpoint_policies.save_only_these_names("selection")
            layer = jax.checkpoint(layer, policy=policy, static_argnums=3)

        def one_group(x, states, segment=segment, layer=layer):
            sums = []
            for j, kind in enumerate(segment.runs):
                if kind.indexer == "full":
                    x, chosen, own = layer(x, None, jax.tree.map(lambda v: v[0], states[j]), j)
                    sums.append(jax.tree.map(lambda v: v[None], own))
                else:

                    def next_layer(x, one, j=j, chosen=chosen):
                        x, _, own = layer(x, chosen, one, j)
                        return x, own

                    x, own = jax.lax.scan(next_layer, x, states[j])
                    sums.append(own)
            return x, sums

        def by_group(tree, repeat=segment.repeat):
            return jax.tree.map(lambda v: v.reshape(repeat, v.shape[0] // repeat, *v.shape[1:]), tree)

        x, sums = jax.lax.scan(one_group, x, by_group([state for _, state in split]))
        for j, stacked in enumerate(jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), sums)):
            for i in range(segment.stack(j)):
                found[segment.layer_index(i, j)] = jax.tree.map(lambda v, i=i: v[i], stacked)
    return decoder.norm(x), dict(sorted(found.items()))


def _layer(block: Block, x, chosen: Chosen | None, see: See, options: Options):
    """The layer's output, the selection it used and its sums."""
    config, attn, sums = block.config, block.self_attn, {}
    h = block.input_layernorm(x)
    qr, q_nope, q_pe, latent = attn.project(h, see.cos, see.sin, {})
    k, v = attn.expand(latent, {})
    q = jnp.concatenate([q_nope, q_pe], axis=-1)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32) * config.softmax_scale
    if chosen is None:
        chosen = _choose(attn, h, qr, see, options)
    weights = indexer_loss.masked_softmax(scores, chosen.mask[:, None])
    values = jnp.einsum("bnts,bsnv->btnv", weights.astype(v.dtype), v)
    if options.index:
        divergence = indexer_loss.divergence(weights.mean(1), chosen.log_index)
        sums["divergence"] = jnp.where(see.weights > 0, see.weights * divergence, 0.0).sum()
    if options.measure:
        whole = indexer_loss.masked_softmax(scores, see.visible[:, None]).mean(1)
        sums |= _measure(whole, chosen.mask, see, options.keys)
    x = x + attn.output(values, {})
    h = block.post_attention_layernorm(x)
    if block.kinds[1] == "dense":
        return x + block.mlp(h, {}, "mlp."), chosen, sums
    y, sums["load"] = _experts(block, h.reshape(-1, h.shape[-1]), see.real.reshape(-1), config)
    y = y.reshape(h.shape)
    if config.n_shared_experts:
        y = y + block.mlp.shared_experts(h, {}, "mlp.shared_experts.")
    return x + y, chosen, sums


def _choose(attn, h, qr, see: See, options: Options) -> Chosen:
    """A full layer's selection. The indexer's inputs are constants: its loss trains its own weights alone."""
    if not options.index:
        return Chosen(see.visible, None)
    scores = jax.vmap(indexer_topk.index_scores)(*attn.indexer(*jax.lax.stop_gradient((h, qr)), see.cos, see.sin))
    mask = see.visible
    if options.keys is not None:
        mask = checkpoint_name(indexer_loss.selected_keys(scores, see.visible, options.keys), "selection")
    return Chosen(mask, indexer_loss.masked_log_softmax(scores, mask))


def _experts(block: Block, flat, real, config: ModelConfig):
    """sum_k weights * expert(x) with every expert on every token, and the experts' load."""
    ids, weights, _ = block.mlp.gate(flat)
    spread = (jax.nn.one_hot(ids, config.n_routed_experts) * weights[..., None]).sum(1)  # [N, E], 0 where not chosen
    gate, up, down = (getattr(block.mlp.experts, name)[...] for name in ("gate_proj", "up_proj", "down_proj"))
    inner = jax.nn.silu(jnp.einsum("nd,edf->nef", flat, gate)) * jnp.einsum("nd,edf->nef", flat, up)
    weighed = (inner.astype(jnp.float32) * spread[..., None]).astype(flat.dtype)
    return jnp.einsum("nef,efd->nd", weighed, down), router_balance.expert_load(ids, real, config.n_routed_experts)


def _measure(attention, mask, see: See, keys: int) -> dict[str, Array]:
    """How much of the best possible attention mass each choice of `keys` keys holds."""
    best = indexer_loss.selected_keys(attention, see.visible, keys)
    place = jnp.broadcast_to(jnp.arange(mask.shape[-1], dtype=jnp.float32), mask.shape)
    recent = indexer_loss.selected_keys(place, see.visible, keys)
    # Any fixed draw serves: it knows nothing of the text.
    drawn = indexer_loss.selected_keys(jax.random.uniform(jax.random.key(0), mask.shape), see.visible, keys)
    asked = see.real & (see.visible.sum(-1) > keys)
    shares = [indexer_loss.captured_share(attention, choice, best) for choice in (mask, recent, drawn)]
    return {"share": jnp.stack([jnp.where(asked, s, 0.0).sum() for s in shares]), "queries": asked.sum()}
