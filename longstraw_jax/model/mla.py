"""Multi-head latent attention: projections, the absorbed and the expanded form."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from longstraw_jax.config import ModelConfig
from longstraw_jax.model import rope
from longstraw_jax.model.indexer import Indexer
from longstraw_jax.model.linear import Linear, Pair, low_rank
from longstraw_jax.model.norms import RMSNorm


class MLA(nnx.Module):
    """GlmMoeDsaAttention without the attention itself, which runs over pages and devices (parallel.py).

    The latent of a token is [kv_a_layernorm(ckv), rope(k_pe)], what the cache keeps.
    """

    def __init__(self, config: ModelConfig, kind: str, *, stack, dtype):
        self.config = config
        c, opts = config, dict(stack=stack, dtype=dtype)
        std = config.initializer_range
        eps = c.rms_norm_eps if c.latent_norm_eps is None else c.latent_norm_eps
        heads = c.num_attention_heads
        self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank, std=std, **opts)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, eps, **opts)
        self.q_b_proj = Linear(c.q_lora_rank, heads * c.qk_head_dim, std=std, **opts)
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.latent_dim, std=std, **opts)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, eps, **opts)
        self.kv_b_proj = Linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim), std=std, **opts)
        self.o_proj = Linear(heads * c.v_head_dim, c.hidden_size, std=std, **opts)
        if kind == "full":
            self.indexer = Indexer(config, **opts)

    def project(
        self, h: Float[Array, "B T D"], cos: Array, sin: Array, pairs: dict[str, Pair]
    ) -> tuple[Float[Array, "B T Q"], Float[Array, "B T N H"], Float[Array, "B T N P"], Float[Array, "B T W"]]:
        """The normed query latent, q_nope, rotated q_pe, and the token's latent."""
        c = self.config
        qr = self.q_a_layernorm(self.q_a_proj(h, pairs.get("self_attn.q_a_proj")))
        q = self.q_b_proj(qr, pairs.get("self_attn.q_b_proj"))
        q = q.reshape(*q.shape[:-1], c.num_attention_heads, c.qk_head_dim)
        q_nope, q_pe = jnp.split(q, [c.qk_nope_head_dim], axis=-1)
        kv = self.kv_a_proj_with_mqa(h, pairs.get("self_attn.kv_a_proj_with_mqa"))
        ckv, k_pe = jnp.split(kv, [c.kv_lora_rank], axis=-1)
        latent = jnp.concatenate([self.kv_a_layernorm(ckv), rope.rotate(k_pe, cos, sin)], axis=-1)
        return qr, q_nope, rope.rotate(q_pe, cos[..., None, :], sin[..., None, :]), latent

    def _split_kv_b(self, matrix: Array) -> tuple[Array, Array]:
        """[.., heads * (dn + dv)] -> per head the key part [.., N, dn] and the value part [.., N, dv]."""
        c = self.config
        per_head = matrix.reshape(*matrix.shape[:-1], c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim)
        return jnp.split(per_head, [c.qk_nope_head_dim], axis=-1)

    def absorb(
        self, q_nope: Float[Array, "B T N H"], q_pe: Float[Array, "B T N P"], pairs: dict[str, Pair]
    ) -> Float[Array, "B T N W"]:
        """Queries against latents: [q_nope Wk, q_pe]. The update of kv_b stays low-rank, never materialised."""
        wk, _ = self._split_kv_b(self.kv_b_proj.weight[...])
        q = jnp.einsum("btnh,rnh->btnr", q_nope, wk)
        if (pair := pairs.get("self_attn.kv_b_proj")) is not None:
            bk, _ = self._split_kv_b(pair.b)
            delta = pair.scale * (jnp.einsum("btnh,rnh->btnr", q_nope.astype(jnp.float32), bk) @ pair.a.T)
            if pair.gate is not None:
                delta = jnp.where(pair.gate[..., None, None], delta, 0.0)
            q = (q.astype(jnp.float32) + delta).astype(q.dtype)
        return jnp.concatenate([q, q_pe], axis=-1)

    def unabsorb(self, o: Float[Array, "B T N R"], pairs: dict[str, Pair]) -> Float[Array, "B T N V"]:
        """Per-head values from attended latents: o Wv."""
        _, wv = self._split_kv_b(self.kv_b_proj.weight[...])
        v = jnp.einsum("btnr,rnv->btnv", o, wv)
        if (pair := pairs.get("self_attn.kv_b_proj")) is not None:
            _, bv = self._split_kv_b(pair.b)
            delta = pair.scale * jnp.einsum("btnr,rnv->btnv", o.astype(jnp.float32) @ pair.a, bv)
            if pair.gate is not None:
                delta = jnp.where(pair.gate[..., None, None], delta, 0.0)
            v = (v.astype(jnp.float32) + delta).astype(v.dtype)
        return v

    def expand(
        self, latents: Float[Array, "*lead W"], pairs: dict[str, Pair]
    ) -> tuple[Float[Array, "*lead N K"], Float[Array, "*lead N V"]]:
        """Per-head keys (nope and rope parts) and values of latents: the expanded form."""
        c = self.config
        ckv, k_pe = jnp.split(latents, [c.kv_lora_rank], axis=-1)
        kv = ckv @ self.kv_b_proj.weight[...]
        if (pair := pairs.get("self_attn.kv_b_proj")) is not None:
            if pair.gate is not None:
                raise ValueError("attention='expanded' cannot gate kv_b per query; use attention='absorbed'")
            kv = (kv.astype(jnp.float32) + low_rank(ckv, pair)).astype(kv.dtype)
        k_nope, v = self._split_kv_b(kv)
        k_pe = jnp.broadcast_to(k_pe[..., None, :], (*k_nope.shape[:-1], k_pe.shape[-1]))
        return jnp.concatenate([k_nope, k_pe], axis=-1), v

    def output(self, values: Float[Array, "B T N V"], pairs: dict[str, Pair]) -> Float[Array, "B T D"]:
        return self.o_proj(values.reshape(*values.shape[:-2], -1), pairs.get("self_attn.o_proj"))
