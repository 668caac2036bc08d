"""A reader of 4.8M parameters, for one H200: 6 minutes of training on rows of up to 4,096 tokens, 10 in all."""

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
    "rope_parameters": {"rope_theta": 100_000, "rope_type": "default"},
    "max_position_embeddings": 65_536,  # met as gaps in the positions of shorter rows
    "num_nextn_predict_layers": 0,
    "initializer_range": 0.05,
    "dtype": "bfloat16",
}


def get_config() -> ConfigDict:
    """Every field. A stage ends after its steps, its seconds (0: no limit) or once mastered, whichever is first.

    What a stage leaves of its seconds goes to the later ones in proportion to theirs.
    Stages of one shape, selection and trained parts are one program, which compiles once.
    """
    both = ("trunk", "indexer")
    return ConfigDict(
        {
            "seed": 0,
            "model": MODEL,
            "mix": {
                "kinds": ("needle", "needles", "chain", "sum"),
                "digits": 4,
                "distractors": 16,
                "lines": 8,  # of recall
                "turns": 4,  # questions of a document
                "answer_weight": 8.0,
                "positions": 65_536,
            },
            "order": ("drill", "recall", "short", "medium", "warmup", "narrow", "sparse"),  # of the stages
            "stages": {
                # Copying by a key, over more and more letters as it is mastered, then which number is whose in
                # sentences, then in text: each is what the next is learned with. Many small steps in one program.
                "drill": _stage(512, 32, 8000, 60.0, text=0.0, pairs=0.8, recall=0.2, stretched=0.0, mastered=0.8),
                "recall": _stage(512, 32, 12_000, 55.0, text=0.1, pairs=0.2, recall=0.6, mastered=0.9),
                "short": _stage(512, 32, 6000, 25.0, recall=0.25),
                "medium": _stage(1024, 32, 6000, 45.0),
                # The indexers alone learn from dense attention, the rest stands still.
                "warmup": _stage(1024, 32, 3000, 25.0, trained=("indexer",)),
                # An eighth of the keys. Short rows first: their steps are quick, and what reads must move to where
                # an indexer can follow it.
                "narrow": _stage(1024, 32, 3000, 45.0, selected=128, trained=both),
                "sparse": _stage(4096, 8, 3000, 75.0, selected=512, trained=both, remat=True),
            },
            "optimizer": {
                "kind": "muon",
                "learning_rate": 1.5e-3,  # of the trunk, over the stages that train it
                "indexer_rate": 5e-3,
                "warmup": 0.02,  # shares of the run
                "decay": 0.3,
                "final": 0.05,
                "weight_decay": 0.01,
                "bias_rate": 1e-2,  # of the routers' correction biases; DeepSeek-V3's 1e-3 is for long runs
            },
            "evaluation": {
                "tokens": (1024, 4096),
                "questions": 128,  # of each kind at each length
                "batch_tokens": 65_536,
            },
            "goals": {"selection": 0.9, "over_random": 0.2, "needle": 0.5},
            "report_every": 25,  # also when a level may rise
        }
    )


def _stage(tokens: int, rows: int, steps: int, seconds: float, **fields) -> dict:
    """selected: 0 for dense attention. text, pairs, recall: shares of documents; the others are tasks.

    mastered: share of answers' first tokens right at which the letters around pairs grow, from 0 or where the stage
      before ended, and after the most, `around`, the stage ends; 0 for the most throughout.
    """
    usual = dict(selected=0, trained=("trunk",), mastered=0.0, remat=False)
    usual |= dict(text=0.2, pairs=0.05, recall=0.15, around=20, stretched=0.3)
    return dict(tokens=tokens, rows=rows, steps=steps, seconds=seconds) | usual | fields
