"""Small models for tests, random enough that every term of the formulas shows in the output."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from longstraw_jax.config import ModelConfig, model_config_from_hf
from longstraw_jax.model import decoder
from longstraw_jax.types import Params

RAW = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "index_n_heads": 4,
    "index_head_dim": 12,
    "index_topk": 5,
    "indexer_types": ["full", "full", "full", "shared", "shared"],
    "mlp_layer_types": ["dense", "dense", "dense", "sparse", "sparse"],
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000, "rope_type": "default"},
    "max_position_embeddings": 4096,
    "dtype": "float32",
    "initializer_range": 0.3,
}


def tiny_config(**changes) -> ModelConfig:
    return model_config_from_hf(RAW | changes)


def tiny_params(config: ModelConfig, seed: int = 0) -> Params:
    """Random weights, norms and biases off their neutral values; made on the host, which compiles nothing."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        value = rng.standard_normal(leaf.shape)
        if "norm" in str(path[-2]) and path[-1].key == "weight":
            value = 1 + 0.3 * value
        else:
            value = config.initializer_range * value
        return jnp.asarray(value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, decoder.param_shapes(config))


def filled(module: nnx.Module, seed: int = 0) -> nnx.Module:
    """The module with the parameters it declares drawn at random as they say."""
    rng = np.random.default_rng(seed)
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        init = variable.get_metadata("init")
        constant = {"ones": 1.0, "zeros": 0.0}.get(init)
        value = init * rng.standard_normal(variable.shape) if constant is None else np.full(variable.shape, constant)
        variable.set_value(jnp.asarray(value, variable.dtype))
    return module


def tiny_ids(config: ModelConfig, rows: int, tokens: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (rows, tokens), 0, config.vocab_size)
