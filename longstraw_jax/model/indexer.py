"""The DSA indexer of a full layer: queries, head weights and the shared key that score every earlier token."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from longstraw_jax.config import ModelConfig
from longstraw_jax.model import rope
from longstraw_jax.model.linear import Linear, matmul32
from longstraw_jax.model.norms import LayerNorm


class Indexer(nnx.Module):
    """GlmMoeDsaIndexer: interleaved rotary on the first rope dims, the positive scale folded into the queries' weights.

    Its inputs carry no gradient: selection is not differentiable and the indexer is frozen in RL.
    """

    def __init__(self, config: ModelConfig, *, stack, dtype):
        self.config = config
        opts = dict(stack=stack, std=config.initializer_range)
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, heads * dim, dtype=dtype, **opts)
        self.wk = Linear(config.hidden_size, dim, dtype=dtype, **opts)
        # fp32 whatever the model's dtype: rounding it flips near-tied selections.
        self.weights_proj = Linear(config.hidden_size, heads, dtype=jnp.float32, **opts)
        self.k_norm = LayerNorm(dim, 1e-6, stack=stack, dtype=dtype)

    def __call__(
        self, h: Float[Array, "B T D"], qr: Float[Array, "B T Q"], cos: Array, sin: Array
    ) -> tuple[Float[Array, "B T I H"], Float[Array, "B T I"], Float[Array, "B T H"]]:
        """Queries, fp32 weights (both scales folded in) and keys, from the normed input and the NORMED query latent."""
        c = self.config
        heads, dim, p = c.index_n_heads, c.index_head_dim, c.qk_rope_head_dim
        q = self.wq_b(qr).reshape(*qr.shape[:-1], heads, dim)
        k = self.k_norm(self.wk(h))
        q = jnp.concatenate([rope.rotate(q[..., :p], cos[..., None, :], sin[..., None, :]), q[..., p:]], axis=-1)
        k = jnp.concatenate([rope.rotate(k[..., :p], cos, sin), k[..., p:]], axis=-1)
        w = matmul32(h, self.weights_proj.weight[...]) * (heads**-0.5 * dim**-0.5)
        return q, w, k
