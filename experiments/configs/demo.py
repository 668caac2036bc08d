"""The demo: a tiny random model, 16,384 tokens of Python's documentation and a question, 32 emulated devices."""

import pathlib
import runpy

from ml_collections import ConfigDict

_GRPO = runpy.run_path(str(pathlib.Path(__file__).with_name("grpo.py")))


def get_config() -> ConfigDict:
    """Only what differs from grpo.py; demo.py fills in the checkpoint and the rows it makes."""
    config = _GRPO["get_config"]()
    config.steps = 20
    config.mesh.devices = 32
    config.mesh.emulate = True
    config.data.document = "python"
    config.data.prompt_tokens = 16_384
    config.grpo.mode = "frozen"  # one capture serves every step
    config.grpo.group = 8
    config.grpo.max_new_tokens = 16
    config.capture.chunk = 2048
    config.reward.functions = ("digit_share",)
    for target in config.lora:  # attention and head: a fourth less time in replay than with the experts' adapters
        config.lora[target].rank = 0 if target in ("dense", "shared", "routed") else 4
        config.lora[target].alpha = 8.0
    config.optimizer.learning_rate = 3e-2
    config.checkpoint.every = 10
    return config
