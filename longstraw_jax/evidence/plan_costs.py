"""FLOPs and bytes between devices of the transaction's programs, from the model's formulas.

Counted by hand from the architecture, so that a compiler's figures have something to stand beside: a multiply-add is
two operations; norms, rotary angles, softmax and sorting are left out. Bytes are those that one device receives.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp

from longstraw_jax import expert_dispatch
from longstraw_jax import lora as lora_lib
from longstraw_jax.config import LoraConfig, ModelConfig
from longstraw_jax.types import Model

FP32, INT32 = 4, 4


class Layers(NamedTuple):
    """How many layers have what."""

    every: int
    full: int
    dense: int
    sparse: int


def layers(config: ModelConfig) -> Layers:
    return Layers(
        config.num_hidden_layers,
        config.indexer_types.count("full"),
        config.mlp_layer_types.count("dense"),
        config.mlp_layer_types.count("sparse"),
    )


def _attention_weights(config: ModelConfig) -> int:
    """Numbers of one layer's latent attention; absorbed, kv_b is applied to queries and outputs, as often."""
    c, heads = config, config.num_attention_heads
    return (
        c.hidden_size * (c.q_lora_rank + c.latent_dim)
        + c.q_lora_rank * heads * c.qk_head_dim
        + c.kv_lora_rank * heads * (c.qk_nope_head_dim + c.v_head_dim)
        + heads * c.v_head_dim * c.hidden_size
    )


def _indexer_weights(config: ModelConfig) -> int:
    c = config
    return c.q_lora_rank * c.index_n_heads * c.index_head_dim + c.hidden_size * (c.index_head_dim + c.index_n_heads)


def _mlp_weights(config: ModelConfig, width: int) -> int:
    return 3 * config.hidden_size * width


def linear_flops(config: ModelConfig, *, indexer: bool = True) -> int:
    """Of one token through every linear map of the trunk (the embedding and the head apart)."""
    c, n = config, layers(config)
    moe = c.hidden_size * c.n_routed_experts
    moe += (c.num_experts_per_tok + c.n_shared_experts) * _mlp_weights(c, c.moe_intermediate_size)
    numbers = n.every * _attention_weights(c) + n.dense * _mlp_weights(c, c.intermediate_size) + n.sparse * moe
    return 2 * (numbers + (n.full * _indexer_weights(c) if indexer else 0))


def expert_flops(config: ModelConfig) -> int:
    """Of one token through its routed experts: a part of `linear_flops`."""
    c = config
    return 2 * layers(c).sparse * c.num_experts_per_tok * _mlp_weights(c, c.moe_intermediate_size)


def adapter_flops(config: ModelConfig, lora: LoraConfig) -> int:
    """Of one token through the low-rank updates of the trunk, one direction."""
    c, n, heads = config, layers(config), config.num_attention_heads
    f, k = c.moe_intermediate_size, c.num_experts_per_tok
    sums = {
        "q_a": n.every * (c.hidden_size + c.q_lora_rank),
        "q_b": n.every * (c.q_lora_rank + heads * c.qk_head_dim),
        "kv_a": n.every * (c.hidden_size + c.latent_dim),
        # Absorbed: every head's query and output pass the rank-r A.
        "kv_b": n.every * heads * (c.qk_nope_head_dim + c.v_head_dim + 2 * c.kv_lora_rank),
        "o": n.every * (heads * c.v_head_dim + c.hidden_size),
        "dense": n.dense * 3 * (c.hidden_size + c.intermediate_size),
        "shared": n.sparse * 3 * (c.hidden_size + f * c.n_shared_experts),
        "routed": n.sparse * 3 * k * (c.hidden_size + f),
    }
    return sum(2 * rank * sums.get(name, 0) for name, rank, _ in lora.targets)


def attention_flops(config: ModelConfig, keys: int) -> int:
    """Of one token's sparse attention in every layer: scores against latents and the sum of their values."""
    c = config
    return 2 * layers(c).every * c.num_attention_heads * min(c.index_topk, keys) * (c.latent_dim + c.kv_lora_rank)


def index_flops(config: ModelConfig, keys: int) -> int:
    """Of one token's index scores in every full layer: dot products, relu, weight and sum over heads."""
    c = config
    return layers(c).full * keys * c.index_n_heads * (2 * c.index_head_dim + 3)


def head_flops(config: ModelConfig) -> int:
    return 2 * config.hidden_size * config.vocab_size


def forward_flops(config: ModelConfig, lora: LoraConfig, tokens: int, keys: int) -> int:
    """Of `tokens` that each see `keys` keys, without the head."""
    linear = linear_flops(config) + adapter_flops(config, lora)
    return tokens * (linear + attention_flops(config, keys) + index_flops(config, keys))


def gradient_flops(config: ModelConfig, lora: LoraConfig, tokens: int, keys: int, *, head: bool = True) -> int:
    """Of a replay, or without the head of a chunk's reverse pass: forward, every layer recomputed with its selection
    kept, and the backward pass.

    Backward: activations' gradients through the frozen weights (as much as forward), both gradients of the
    adapters, and of attention the gradients of queries, of weights and of the response's own latents (2.5 x).
    """
    linear, low = linear_flops(config, indexer=False), adapter_flops(config, lora)
    attention = attention_flops(config, keys)
    again = linear + low + attention
    backward = linear + 2 * low + 2.5 * attention
    # The head: forward, recomputed, and the gradient of hidden states.
    last = 3 * head_flops(config) if head else 0
    return math.ceil(forward_flops(config, lora, tokens, keys) + tokens * (again + backward + last))


def gathered_weight_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of resting weights that a device gathers in one pass over the layers: all but experts, and fp32 apart."""
    c, n, item = config, layers(config), jnp.dtype(config.dtype).itemsize
    shared = n.sparse * _mlp_weights(c, c.moe_intermediate_size * c.n_shared_experts)
    head_weights = n.full * c.hidden_size * c.index_n_heads + n.sparse * c.hidden_size * c.n_routed_experts
    rest = n.every * _attention_weights(c) + n.full * _indexer_weights(c) - n.full * c.hidden_size * c.index_n_heads
    rest += n.dense * _mlp_weights(c, c.intermediate_size) + shared
    return {"weights": rest * item, "router and head weights": head_weights * FP32}


def expert_bytes(config: ModelConfig, tokens: int, devices: int, load: float) -> int:
    """Bytes that a device receives in one pass of every sparse layer's all-to-all, there and back."""
    c = config
    room, _ = expert_dispatch.expert_room(
        tokens // devices, c.num_experts_per_tok, c.n_routed_experts // devices, devices, load
    )
    return layers(c).sparse * 2 * devices * room * c.hidden_size * jnp.dtype(c.dtype).itemsize


def capture_bytes(config: ModelConfig, chunk: int, capacity: int, devices: int, load: float) -> dict[str, float]:
    """Bytes that one device receives in a capture chunk (*gather-keys*), by what travels."""
    c, n, item = config, layers(config), jnp.dtype(config.dtype).itemsize
    whole = gathered_weight_bytes(c) | {
        "latents": n.every * (capacity + chunk) * c.latent_dim * item,
        "index keys": n.full * (capacity + chunk) * c.index_head_dim * item,
        "experts": expert_bytes(c, chunk, devices, load),
        "embedding": chunk * INT32 + chunk // devices * c.hidden_size * item,
    }
    return {name: size * (devices - 1) / devices for name, size in whole.items()}


def reverse_bytes(config: ModelConfig, chunk: int, capacity: int, devices: int, load: float) -> dict[str, float]:
    """Bytes that one device receives in a chunk's reverse pass: the capture's, again, and page gradients in fp32."""
    c, n, item = config, layers(config), jnp.dtype(config.dtype).itemsize
    passes = {"weights": 2, "router and head weights": 2, "latents": 2, "index keys": 1, "experts": 3, "embedding": 1}
    forward = capture_bytes(config, chunk, capacity, devices, load)
    back = n.every * (capacity * FP32 + chunk * item) * c.latent_dim
    return {what: passes[what] * size for what, size in forward.items()} | {
        "gradients of latents": back * (devices - 1) / devices
    }


def finalise_bytes(model: Model) -> dict[str, float]:
    """Bytes that one device receives in the one reduction of the gradients that all devices share."""
    shared = [site for site in lora_lib.sites(model.config, model.lora) if not site.routed]
    numbers = sum(math.prod(shape) for site in shared for shape in site.shapes.values())
    return {"gradients": 2 * numbers * FP32 * (model.devices - 1) / model.devices}


def response_bytes(
    config: ModelConfig, queries: int, tail: int, devices: int, load: float, *, gradient: bool = False
) -> dict[str, float]:
    """Bytes that one device receives while `queries` pass all layers (*merge-candidates*), by what travels.

    Args:
      queries: over all devices: a response's tokens, or a token of each member of a decode.
      tail: response tokens whose latents and keys are gathered in each layer; 0 in a decode, whose members lie
        whole on a device.
      gradient: also the recomputation (selection kept) and the way back of every activation's message.
    """
    c, n, item = config, layers(config), jnp.dtype(config.dtype).itemsize
    latents = n.every * tail * c.latent_dim * item
    selection = n.full * queries * (c.index_n_heads * (c.index_head_dim + 1) * FP32 + 2 * c.index_topk * FP32)
    selection += n.full * tail * c.index_head_dim * item
    heads = n.every * queries * c.num_attention_heads
    attention = heads * (c.latent_dim * item + (c.kv_lora_rank + 1) * FP32) + n.every * queries * c.index_topk * INT32
    experts = expert_bytes(c, queries, devices, load)
    passes = 3 if gradient else 1
    whole = {name: size * (2 if gradient else 1) for name, size in gathered_weight_bytes(c).items()} | {
        "tail latents": latents * passes,
        "selection": selection,
        "attention": attention * passes,
        "experts": experts * passes,
        "head": queries * c.hidden_size * item * passes,
    }
    return {name: size * (devices - 1) / devices for name, size in whole.items()}
