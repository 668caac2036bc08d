"""Writes a tiny random IndexShare model in Hugging Face layout, with a byte-level tokenizer and a chat template.

python experiments/make_tiny_checkpoint.py --out=DIR
"""

import pathlib
import tempfile
from typing import Any

import jax
from absl import app, flags

from longstraw_jax import config as config_lib
from longstraw_jax.io import hf_checkpoint, prompt, tokenizer
from longstraw_jax.model import decoder

# 8 layers, F F | F S S | F S S: full and shared, dense and MoE; every sharded dimension divides 32 devices.
CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 288,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 64,
    "index_topk_pattern": "FFFSSFSS",
    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 32,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_router_dtype": "float32",
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
    "max_position_embeddings": 65_536,
    "num_nextn_predict_layers": 0,
    "initializer_range": 0.1,
    "dtype": "float32",
}


def write(out: pathlib.Path, raw: dict[str, Any], seed: int) -> None:
    """Writes the checkpoint folder of a Hugging Face configuration whole or not at all."""
    config = config_lib.model_config_from_hf(raw)
    base = decoder.init_params(config, seed)
    with tempfile.TemporaryDirectory() as scratch:
        texts = pathlib.Path(scratch)
        tokens = tokenizer.save_byte_tokenizer(texts)
        (texts / "chat_template.jinja").write_text(prompt.tiny_chat_template())
        raw = raw | {"eos_token_id": list(tokens.eos_ids)}
        hf_checkpoint.save(out, raw, base, extra_files=sorted(texts.iterdir()))
    print(f"{out}: {sum(x.size for x in jax.tree.leaves(base)):,} parameters")


def main(argv: list[str]) -> None:
    del argv
    write(pathlib.Path(flags.FLAGS.out), CONFIG, flags.FLAGS.seed)


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "Folder to write.", required=True)
    flags.DEFINE_integer("seed", 0, "Seed of the weights.")
    app.run(main)
