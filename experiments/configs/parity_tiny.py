"""Gradient parity of a tiny random model, that of make_tiny_checkpoint.py, on 32 emulated devices."""

import pathlib
import runpy

from ml_collections import ConfigDict

_HERE = pathlib.Path(__file__).parent


def get_config() -> ConfigDict:
    """grpo.py's fields; with no model.checkpoint, model.architecture (config.json's keys) gets random weights."""
    config = runpy.run_path(str(_HERE / "grpo.py"))["get_config"]()
    config.model.architecture = ConfigDict(runpy.run_path(str(_HERE.parent / "make_tiny_checkpoint.py"))["CONFIG"])
    # With that model's 4 heads one key in 16 scores exactly 0 after the relu; GLM-5.2 has 32 heads.
    config.model.architecture.index_n_heads = 16
    config.mesh.devices = 32
    config.mesh.emulate = True
    config.grpo.max_new_tokens = 32
    config.capture.chunk = 256
    config.optimizer.learning_rate = 1e-6  # of GLM-5.2's RL in slime; the step's tolerance is in its units
    for target in config.lora:
        config.lora[target].rank = 4
        config.lora[target].alpha = 8.0
    return config
