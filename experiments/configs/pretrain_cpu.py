"""A much smaller reader, of a needle and a look-alike in 192 tokens, for ten minutes of one CPU core."""

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
        num_hidden_layers=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_head_dim=32,
        v_head_dim=16,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=24,
        index_topk_pattern="FFFS",
        mlp_layer_types=["dense"] + ["sparse"] * 3,
        intermediate_size=96,
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_theta": 10_000, "rope_type": "default"},
        max_position_embeddings=4096,
        initializer_range=0.08,
    )
    config.mix.update(kinds=("needle",), digits=3, distractors=1, lines=6, turns=2, positions=4096)
    config.order = ("drill", "recall", "short", "warmup", "sparse")
    for name, steps, shares in (
        ("drill", 2000, dict(pairs=0.8, recall=0.2)),
        ("recall", 800, dict(pairs=0.3, recall=0.7, stretched=0.0)),
        ("short", 500, dict(pairs=0.1, recall=0.4, stretched=0.1)),
        ("warmup", 100, dict(pairs=0.1, recall=0.4, stretched=0.1)),
        ("sparse", 300, dict(pairs=0.1, recall=0.4, stretched=0.1)),
    ):
        config.stages[name].update(tokens=192, rows=8, steps=steps, seconds=0.0, remat=False, text=0.0, **shares)
    config.stages.sparse.selected = 24
    config.optimizer.update(learning_rate=3e-3, bias_rate=3e-3)
    config.evaluation.update(tokens=(192,), questions=128, batch_tokens=6144)
    config.report_every = 25
    config.goals.needle = 0.25  # a number at random is right once in 900 times
    return config
