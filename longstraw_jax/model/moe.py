"""Feed-forward modules: the gated MLP, the sigmoid router and the routed experts."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from longstraw_jax.config import ModelConfig
from longstraw_jax.model.linear import Linear, Pair, matmul32, parameter


class MLP(nnx.Module):
    """(silu(h Wgate) * (h Wup)) Wdown; dense layers and the shared expert."""

    def __init__(self, d_model, d_ff, *, stack, dtype, std):
        opts = dict(stack=stack, dtype=dtype, std=std)
        self.gate_proj = Linear(d_model, d_ff, **opts)
        self.up_proj = Linear(d_model, d_ff, **opts)
        self.down_proj = Linear(d_ff, d_model, **opts)

    def __call__(self, h: Float[Array, "*lead D"], pairs: dict[str, Pair], prefix: str) -> Float[Array, "*lead D"]:
        gate = self.gate_proj(h, pairs.get(prefix + "gate_proj"))
        up = self.up_proj(h, pairs.get(prefix + "up_proj"))
        return self.down_proj(jax.nn.silu(gate) * up, pairs.get(prefix + "down_proj"))


class Router(nnx.Module):
    """GlmMoeDsaTopkRouter: sigmoid scores in fp32; a correction bias selects, the unbiased scores weigh."""

    def __init__(self, config: ModelConfig, *, stack):
        self.config = config
        d, e = config.hidden_size, config.n_routed_experts
        opts = dict(stack=stack, dtype=jnp.float32)  # fp32 whatever the model's dtype
        self.weight = parameter((d, e), axes=("fsdp", None), init=config.initializer_range, **opts)
        self.e_score_correction_bias = parameter((e,), axes=(None,), init="zeros", **opts)

    def __call__(
        self, h: Float[Array, "N D"], held: Int[Array, "N K"] | None = None
    ) -> tuple[Int[Array, "N K"], Float[Array, "N K"], Float[Array, "N E"]]:
        """Expert ids, their fp32 weights and the router's logits.

        Args:
          held: ids to take instead of the best; their weights are those of this router's scores. -1 takes none.
        """
        c = self.config
        logits = matmul32(h, self.weight[...])
        scores = jax.nn.sigmoid(logits)
        ids = self._best(scores) if held is None else held
        weights = jnp.take_along_axis(scores, ids if held is None else jnp.maximum(ids, 0), axis=-1)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        return ids, weights * c.routed_scaling_factor, logits

    def _best(self, scores):
        c = self.config
        biased = jax.lax.stop_gradient(scores + self.e_score_correction_bias[...])
        if c.n_group > 1:
            grouped = biased.reshape(-1, c.n_group, c.n_routed_experts // c.n_group)
            best_two, _ = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))
            _, groups = jax.lax.top_k(best_two.sum(-1), c.topk_group)
            kept = jax.nn.one_hot(groups, c.n_group, dtype=bool).any(axis=1)
            biased = jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(biased.shape)
        return jax.lax.top_k(biased, c.num_experts_per_tok)[1]


class Experts(nnx.Module):
    """Weights of the routed experts, [E, in, out]; applied by expert_dispatch.routed_experts."""

    def __init__(self, config: ModelConfig, *, stack, dtype):
        e, d, f = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        opts = dict(stack=stack, axes=("expert", None, None), dtype=dtype, init=config.initializer_range)
        self.gate_proj = parameter((e, d, f), **opts)
        self.up_proj = parameter((e, d, f), **opts)
        self.down_proj = parameter((e, f, d), **opts)


class MoE(nnx.Module):
    """Router, routed experts and the ungated shared expert of width moe_intermediate_size * n_shared_experts."""

    def __init__(self, config: ModelConfig, *, stack, dtype):
        self.gate = Router(config, stack=stack)
        self.experts = Experts(config, stack=stack, dtype=dtype)
        if config.n_shared_experts:
            width = config.moe_intermediate_size * config.n_shared_experts
            std = config.initializer_range
            self.shared_experts = MLP(config.hidden_size, width, stack=stack, dtype=dtype, std=std)
