"""A reader of 4.8M parameters and 4,096 tokens, for one H200: 6 minutes of training, the rest of 10 to compile."""

from ml_collections import ConfigDict

# F | F S S | F S S: full and shared, dense and sparse layers; every sharded dimension divides 32 devices.
MODEL = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 288,
    "hidden_size": 192,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 48,
    "v_head_dim": 32,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 512,  # an eighth of the longest rows
    "index_topk_pattern": "FFSSFSS",
    "mlp_layer_types": ["dense"] + ["sparse"] * 6,
    "intermediate_size": 512,
    "moe_intermediate_size": 32,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
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
    "rope_parameters": {"rope_theta": 10_000, "rope_type": "default"},
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "initializer_range": 0.05,
    "dtype": "bfloat16",
}


def get_config() -> ConfigDict:
    """Every field. A stage ends after its steps, or its seconds (0: no limit) if they are sooner over."""
    both = ("trunk", "indexer")
    return ConfigDict(
        {
            "seed": 0,
            "model": MODEL,
            "remat": True,  # recompute each layer in the backward pass
            "mix": {
                "kinds": ("needle", "needles", "chain", "sum"),
                "digits": 4,
                "distractors": 16,
                "turns": 4,  # questions of a document
                "answer_weight": 8.0,
            },
            "order": ("drill", "short", "medium", "long", "warmup", "sparse"),  # of the stages
            "stages": {
                # Copying first: without it a small model does not find what an answer has to do with the text.
                "drill": _stage(
                    256, 256, steps=800, seconds=20.0, selected=0, trained=("trunk",), text=0.0, copies=1.0
                ),
                # selected 0: dense attention. Warm-up: the indexers alone learn from it, the rest stands still.
                "short": _stage(512, 128, steps=8000, seconds=110.0, selected=0, trained=("trunk",)),
                "medium": _stage(1024, 64, steps=3000, seconds=50.0, selected=0, trained=("trunk",)),
                "long": _stage(4096, 16, steps=600, seconds=40.0, selected=0, trained=("trunk",)),
                "warmup": _stage(4096, 16, steps=500, seconds=40.0, selected=0, trained=("indexer",)),
                "sparse": _stage(4096, 16, steps=1000, seconds=100.0, selected=512, trained=both),
            },
            "optimizer": {
                "kind": "muon",
                "learning_rate": 4e-3,  # of the trunk, over the stages that train it
                "indexer_rate": 5e-3,
                "warmup": 0.02,  # shares of the run
                "decay": 0.3,
                "final": 0.05,
                "weight_decay": 0.01,
                "bias_rate": 1e-3,  # of the routers' correction biases, as DeepSeek-V3's
            },
            "evaluation": {
                "tokens": (512, 1024, 4096),
                "questions": 128,  # of each kind at each length
                "batch_tokens": 65_536,
            },
            "goals": {"selection": 0.9, "over_random": 0.2, "needle": 0.5},
            "report_every": 50,
        }
    )


def _stage(tokens: int, rows: int, *, text: float = 0.3, copies: float = 0.1, **fields) -> dict:
    """text, copies: shares of documents that are plain text and drills in copying; the others are tasks."""
    return {"tokens": tokens, "rows": rows, "text": text, "copies": copies} | fields
