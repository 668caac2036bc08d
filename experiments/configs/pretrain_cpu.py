"""A much smaller reader, of one needle in 256 tokens, for one core of a CPU and some ten minutes of it."""

import importlib.util
import pathlib

from ml_collections import ConfigDict

_SPEC = importlib.util.spec_from_file_location("pretrain_tiny", pathlib.Path(__file__).with_name("pretrain_tiny.py"))
_TINY = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_TINY)


def get_config() -> ConfigDict:
    """Only what differs from pretrain_tiny.py: no time limits, so that the same seed gives the same model."""
    config = _TINY.get_config()
    config.model.update(
        dtype="float32",  # bf16 is emulated there
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_head_dim=32,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=32,
        index_topk_pattern="FFS",
        mlp_layer_types=["dense", "sparse", "sparse"],
        intermediate_size=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_theta": 1000, "rope_type": "default"},
        max_position_embeddings=256,
        initializer_range=0.08,
    )
    config.remat = False
    config.mix.update(text=0.05, copies=0.5, kinds=("needle",), digits=3, distractors=2, turns=3)
    config.order = ("short", "warmup", "sparse")
    for name, steps in (("short", 700), ("warmup", 80), ("sparse", 200)):
        config.stages[name].update(tokens=256, rows=16, steps=steps, seconds=0.0)
    config.stages.sparse.keys = 32
    config.optimizer.update(learning_rate=1e-2, bias_rate=3e-3)
    config.evaluation.update(tokens=(256,), questions=128, batch_tokens=8192)
    config.report_every = 25
    return config
