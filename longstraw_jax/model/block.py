"""One decoder layer, and what a forward pass carries through all of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from longstraw_jax import expert_dispatch, parallel
from longstraw_jax.config import ModelConfig
from longstraw_jax.model.linear import Pair
from longstraw_jax.model.mla import MLA
from longstraw_jax.model.moe import MLP, MoE
from longstraw_jax.model.norms import RMSNorm
from pallas_kernels.indexer_topk import reference as indexer_topk


@dataclasses.dataclass(frozen=True)
class Pass:
    """One forward pass over one device's share of the queries [B, T]; lives inside a trace.

    The keys a query sees are the prompt's pages (shared by all rows) and its row's own tail, which holds the queries
    themselves. Tail row j is key `length + j`.

    Attributes:
      axis: mesh axis, None on one device.
      cos, sin: rotary tables of the queries, [B, T, P / 2] fp32.
      query_index: tail row of each query, -1 for padding.
      length: resident prompt tokens.
      strategy: "gather_keys" or "merge_candidates", see parallel.select.
      split: what the mesh splits: "tokens" (one sequence over all devices) or "rows" (whole sequences).
      attention: "absorbed" or "expanded".
      expert_load, prefix_store, kernels: as in types.Model.
      offset: decode only: tail row of each sequence's query in the layer's tail cache; a scalar where all are alike.
      keep: what a layer hands back: "nothing"; "cache" (its extended tail); "rows" (the tail rows in keep_rows).
      keep_rows: tail rows this device keeps, for "rows".
      detach: [B, tail] tail rows whose latents carry no gradient (their own path is not differentiated).
      gate: [B, T] queries that see the adapters, None for all.
      collect: hand back every intermediate a reference comparison wants.
      record: kinds of choices to hand back, see choices.py.
    """

    axis: str | None
    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]
    query_index: Int[Array, "B T"]
    length: Int[Array, ""]
    strategy: str = "gather_keys"
    split: str = "tokens"
    attention: str = "absorbed"
    expert_load: float = 2.0
    prefix_store: str = "device"
    kernels: str = "auto"
    offset: Int[Array, ""] | Int[Array, "B"] | None = None
    keep: str = "nothing"
    keep_rows: Int[Array, "kept"] | None = None
    detach: Bool[Array, "B tail"] | None = None
    gate: Bool[Array, "B T"] | None = None
    collect: bool = False
    record: tuple[str, ...] = ()

    def tail(self, new: Float[Array, "B T W"], cache: Float[Array, "B tail W"] | None) -> Float[Array, "B tail W"]:
        """The whole tail on this device, the queries' own rows included."""
        if cache is not None and self.offset.ndim:
            return cache.at[jnp.arange(cache.shape[0]), self.offset].set(new[:, 0].astype(cache.dtype))
        if cache is not None:
            return jax.lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), self.offset, axis=1)
        return parallel.gather(new, self.axis, 1) if self.split == "tokens" else new

    def kept(self, tail: Float[Array, "B tail W"]) -> Array | None:
        if self.keep == "cache":
            return tail
        if self.keep == "rows":
            return tail[0, self.keep_rows]
        return None


def pairs_of(adapters: dict[str, Any], scales: dict[str, float], gate: Array | None) -> dict[str, Pair]:
    """The layer's low-rank updates by module path."""
    return {path: Pair(ab["a"], ab["b"], scales[path], gate) for path, ab in adapters.items()}


class Block(nnx.Module):
    """x + attention(rms(x)), then x + mlp(rms(x)) (GlmMoeDsaDecoderLayer)."""

    def __init__(self, config: ModelConfig, kinds: tuple[str, str], *, stack, dtype):
        self.config, self.kinds = config, kinds
        opts = dict(stack=stack, dtype=dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **opts)
        self.self_attn = MLA(config, kinds[0], **opts)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **opts)
        if kinds[1] == "dense":
            self.mlp = MLP(config.hidden_size, config.intermediate_size, std=config.initializer_range, **opts)
        else:
            self.mlp = MoE(config, **opts)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        selection: Int[Array, "B T K"] | None,
        pages: tuple[Array | None, Array | None, Array | None],
        caches: tuple[Array | None, Array | None],
        run: Pass,
        pairs: dict[str, Pair],
        layer: Int[Array, ""],
        sink: tuple[Array, Array] | None = None,
        route: Int[Array, "B T k"] | None = None,
    ) -> tuple[Array, Array, Array | None, tuple[Array | None, Array | None], dict[str, Array]]:
        """Runs the layer.

        Args:
          selection: ids from the full layer below; a full layer makes its own where none are given.
          pages: this device's (latents, index keys) of the prompt, None for no prompt or a shared layer's keys; and the
            layer's number where the latents are those of several, as in parallel.attend.
          caches: tails (latents, index keys) of a decode, else None.
          layer: number of this layer in the stacks of experts, which alone keep their layer axis.
          sink: (sink, place) as in parallel.attend_collecting, None where pages are constants.
          route: experts to take, -1 for none; a sparse layer chooses where none are given.

        Returns:
          The residual stream, the selection, the sink, the kept (latents, index keys) and, if asked for,
          intermediates and choices.
        """
        extras: dict[str, Array] = {}
        collected = None
        h = self.input_layernorm(x)
        qr, q_nope, q_pe, latent = self.self_attn.project(h, run.cos, run.sin, pairs)
        tail = run.tail(latent, caches[0])
        if run.detach is not None:
            tail = jnp.where(run.detach[..., None], jax.lax.stop_gradient(tail), tail)
        key_tail = None
        if self.kinds[0] == "full" and selection is None:
            q, w, k = self.self_attn.indexer(*jax.lax.stop_gradient((h, qr)), run.cos, run.sin)
            q, w, k = jax.lax.stop_gradient((q, w, k))
            key_tail = run.tail(k, caches[1])
            selection = parallel.select(
                q, w, pages[1], key_tail, run.length, run.query_index, self.config.index_topk,
                strategy=run.strategy, axis=run.axis, implementation=run.kernels,
            )  # fmt: skip
            # Kept for the backward pass and for the shared layers: scoring the whole prompt twice is what costs.
            selection = checkpoint_name(selection, "selection")
            if run.collect:
                scores = jax.vmap(indexer_topk.index_scores)(q, w, key_tail)
                causal = jnp.arange(key_tail.shape[1]) <= run.query_index[..., None]
                extras["index_scores"] = jnp.where(causal, scores, -jnp.inf)
        if self.kinds[0] == "full" and "selections" in run.record:
            extras["chosen_keys"] = selection
        if run.attention == "expanded":
            values = self._expanded(q_nope, q_pe, pages[0], tail, selection, run, pairs)
        else:
            q = self.self_attn.absorb(q_nope, q_pe, pairs)
            opts = dict(
                scale=self.config.softmax_scale, value_dim=self.config.kv_lora_rank,
                strategy=run.strategy, axis=run.axis, implementation=run.kernels,
            )  # fmt: skip
            if sink is None:
                out = parallel.attend(q, pages[0], tail, selection, run.length, layer=pages[2], **opts)
            else:
                out, collected = parallel.attend_collecting(
                    q, pages[0], *sink, tail, selection, run.length, **opts
                )
            values = self.self_attn.unabsorb(out, pairs)
        attn_out = self.self_attn.output(values, pairs)
        x = x + attn_out
        x = x + self._feed_forward(self.post_attention_layernorm(x), layer, route, run, pairs, extras)
        if run.collect:
            extras |= {"attn_out": attn_out, "selection": selection, "hidden": x}
        kept = (run.kept(tail), run.kept(key_tail) if key_tail is not None else None)
        return x, selection, collected, kept, extras

    def _feed_forward(self, h, layer, route, run, pairs, extras):
        if self.kinds[1] == "dense":
            return self.mlp(h, pairs, "mlp.")
        flat = h.reshape(-1, h.shape[-1])
        held = None if route is None else route.reshape(-1, route.shape[-1])
        ids, weights, router_logits = self.mlp.gate(flat, held)
        if run.collect:
            extras |= {"router_logits": router_logits, "router_ids": ids, "router_weights": weights}
        # Padding routes nowhere.
        routed = (run.query_index >= 0).reshape(-1)[:, None]
        if "routes" in run.record:
            extras["chosen_experts"] = jnp.where(routed, ids, -1).reshape(*h.shape[:-1], -1)
        if route is not None:
            routed &= ids >= 0
        ids = jnp.where(routed, ids, self.config.n_routed_experts)
        names = ("gate_proj", "up_proj", "down_proj")
        y = expert_dispatch.routed_experts(
            flat, ids, weights, {name: getattr(self.mlp.experts, name)[...] for name in names}, layer,
            {name: pairs[f"mlp.experts.{name}"][:3] for name in names if f"mlp.experts.{name}" in pairs},
            None if run.gate is None else run.gate.reshape(-1), run.axis, load=run.expert_load,
            implementation=run.kernels,
        )  # fmt: skip
        y = y.reshape(h.shape)
        if self.config.n_shared_experts:
            y = y + self.mlp.shared_experts(h, pairs, "mlp.shared_experts.")
        return y

    def _expanded(self, q_nope, q_pe, pages, tail, selection, run, pairs):
        """Dense attention over expanded keys and values under the selection's mask; one device, small lengths."""
        if run.axis is not None:
            raise ValueError("attention='expanded' runs on one device; use attention='absorbed' on a mesh")
        rows, tail_index = tail, jnp.arange(tail.shape[1])
        columns = run.length + tail_index
        if pages is not None:
            prompt = parallel.flat_pages(pages, None)
            rows = jnp.concatenate([jnp.broadcast_to(prompt, (tail.shape[0], *prompt.shape)), tail], axis=1)
            in_prompt = jnp.where(jnp.arange(prompt.shape[0]) < run.length, jnp.arange(prompt.shape[0]), -2)
            columns = jnp.concatenate([in_prompt, columns])
        k, v = self.self_attn.expand(rows, pairs)
        q = jnp.concatenate([q_nope, q_pe], axis=-1)
        scores = jnp.einsum("btnh,bsnh->btns", q, k, preferred_element_type=jnp.float32) * self.config.softmax_scale
        mask = (selection[..., None] == columns).any(axis=2)[:, :, None, :]
        some = mask.any(-1, keepdims=True)
        top = jax.lax.stop_gradient(jnp.where(some, jnp.where(mask, scores, -jnp.inf).max(-1, keepdims=True), 0.0))
        weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0.0)), 0.0)
        weights = weights / jnp.where(some, weights.sum(-1, keepdims=True), 1.0)
        return jnp.einsum("btns,bsnv->btnv", weights.astype(v.dtype), v)
