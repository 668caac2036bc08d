"""The refresh experiment: documentation and a question, short responses, adapters on attention and head."""

import pathlib
import runpy

from ml_collections import ConfigDict

_GRPO = runpy.run_path(str(pathlib.Path(__file__).with_name("grpo.py")))


def get_config() -> ConfigDict:
    """Only what differs from grpo.py; refresh_policy.py sets the mode, the refresh policy and the prompt's length."""
    config = _GRPO["get_config"]()
    config.steps = 48  # of each policy
    config.data.document = "python"
    config.grpo.max_new_tokens = 32
    config.capture.chunk = 2048
    config.reward.functions = ("digit_share",)
    for target in config.lora:
        config.lora[target].rank = 0 if target in ("dense", "shared", "routed") else 4
        config.lora[target].alpha = 8.0
    config.optimizer.learning_rate = 1e-2
    return config
