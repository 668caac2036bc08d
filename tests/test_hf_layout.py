"""Checkpoint names and shapes: the counts of the released files, to the parameter and to the tensor."""

import math

import jax
from hf_folders import RAW, shapes

from longstraw_jax.config import model_config_from_hf
from longstraw_jax.io import hf_layout

RELEASED = {
    "vocab_size": 154880,
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "indexer_types": None,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
}


def _tensors(raw: dict) -> dict[str, tuple[int, ...]]:
    tree = jax.tree.leaves(hf_layout.parameters(model_config_from_hf(raw)))
    pairs = [(name, p.file_shape) for p in tree for names in p.names for name in names]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_names_and_shapes_are_those_of_the_published_table():
    assert _tensors(RAW) == shapes(RAW)
    two_shared = RAW | {"n_shared_experts": 2}
    assert _tensors(two_shared) == shapes(two_shared)


def test_released_size():
    tensors = _tensors(RAW | RELEASED)
    # The trunk of the public inventory of the FP8 files: all but layer 78, and without the scales.
    assert sum(math.prod(shape) for shape in tensors.values()) == 743_377_019_904
    plain = ("embed_tokens", "lm_head", "norm", "weights_proj", "gate.")
    scaled = [name for name, shape in tensors.items() if not any(part in name for part in plain)]
    layer_78 = 2 + 7 + 5 + 2 + 3 + 3 * 256 + 4
    layer_78_scales = 5 + 2 + 3 + 3 * 256
    assert len(scaled) + layer_78_scales == 59_044
    assert len(tensors) + len(scaled) + layer_78 + layer_78_scales == 118_629


def test_layer_of():
    assert hf_layout.layer_of("model.layers.12.mlp.gate.weight") == 12
    for name in ("model.norm.weight", "model.layers.x.weight", "model.layers", "other.layers.1.weight"):
        assert hf_layout.layer_of(name) is None
