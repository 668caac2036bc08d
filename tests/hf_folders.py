"""Checkpoint folders for tests, written from the published layout and not with the code under test."""

import json
import math
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

REFERENCE = Path(__file__).parents[2] / "shared" / "hf_reference"
NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(np.int64): "I64",
}

# Five layers: 0 and 1 alike (scanned together), then a dense full layer and two sparse ones sharing from it.
RAW = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 288,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 16,
    "indexer_types": ["full", "full", "full", "shared", "shared"],
    "mlp_layer_types": ["dense", "dense", "dense", "sparse", "sparse"],
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "dtype": "float32",
}


def shapes(raw: dict) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, from the table of the released checkpoint."""
    d, heads = raw["hidden_size"], raw["num_attention_heads"]
    q, kv, rope = raw["q_lora_rank"], raw["kv_lora_rank"], raw["qk_rope_head_dim"]
    nope, value, index = raw["qk_nope_head_dim"], raw["v_head_dim"], raw["index_head_dim"]

    def mlp(prefix, width):
        return {
            f"{prefix}.gate_proj.weight": (width, d),
            f"{prefix}.up_proj.weight": (width, d),
            f"{prefix}.down_proj.weight": (d, width),
        }

    found = {"model.embed_tokens.weight": (raw["vocab_size"], d)}
    for i, (indexer, kind) in enumerate(zip(raw["indexer_types"], raw["mlp_layer_types"], strict=True)):
        layer = {
            "input_layernorm.weight": (d,),
            "post_attention_layernorm.weight": (d,),
            "self_attn.q_a_proj.weight": (q, d),
            "self_attn.q_a_layernorm.weight": (q,),
            "self_attn.q_b_proj.weight": (heads * (nope + rope), q),
            "self_attn.kv_a_proj_with_mqa.weight": (kv + rope, d),
            "self_attn.kv_a_layernorm.weight": (kv,),
            "self_attn.kv_b_proj.weight": (heads * (nope + value), kv),
            "self_attn.o_proj.weight": (d, heads * value),
        }
        if indexer == "full":
            layer |= {
                "self_attn.indexer.wq_b.weight": (raw["index_n_heads"] * index, q),
                "self_attn.indexer.wk.weight": (index, d),
                "self_attn.indexer.weights_proj.weight": (raw["index_n_heads"], d),
                "self_attn.indexer.k_norm.weight": (index,),
                "self_attn.indexer.k_norm.bias": (index,),
            }
        if kind == "dense":
            layer |= mlp("mlp", raw["intermediate_size"])
        else:
            layer |= {
                "mlp.gate.weight": (raw["n_routed_experts"], d),
                "mlp.gate.e_score_correction_bias": (raw["n_routed_experts"],),
            }
            layer |= mlp("mlp.shared_experts", raw["moe_intermediate_size"] * raw["n_shared_experts"])
            for e in range(raw["n_routed_experts"]):
                layer |= mlp(f"mlp.experts.{e}", raw["moe_intermediate_size"])
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (d,), "lm_head.weight": (raw["vocab_size"], d)}


def random_tensors(raw: dict, dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor in `dtype`, the correction bias in fp32."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, np.float32).astype(
            np.float32 if name.endswith("e_score_correction_bias") else dtype
        )
        for name, shape in shapes(raw).items()
    }


def write_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """One safetensors file."""
    header, at = {}, 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [at, at + value.nbytes],
        }
        at += value.nbytes
    text = json.dumps(header).encode()
    data = b"".join(value.tobytes() for value in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_folder(
    folder: Path, raw: dict, tensors: dict[str, np.ndarray], *, files: int = 1, index: bool = True
) -> Path:
    """A checkpoint folder of one or several files; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    names, weight_map = list(tensors), {}
    share = math.ceil(len(names) / files)
    for number in range(files):
        file = "model.safetensors" if files == 1 else f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {name: tensors[name] for name in names[number * share : (number + 1) * share]}
        write_file(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    if index and files > 1:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder
