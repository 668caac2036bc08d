"""The demo: the reader, 16,384 tokens of Python's documentation with a question about them, 32 emulated devices."""

import pathlib
import runpy

from ml_collections import ConfigDict

_HERE = pathlib.Path(__file__).resolve().parent
_GRPO = runpy.run_path(str(_HERE / "grpo.py"))


def get_config() -> ConfigDict:
    """Only what differs from grpo.py; demo.py fills in the row it makes."""
    config = _GRPO["get_config"]()
    config.steps = 20
    config.model.checkpoint = str(_HERE.parent / "reader")
    config.mesh.devices = 32
    config.mesh.emulate = True
    config.data.prompt_tokens = 16_384  # exactly, of the row as it is written
    config.grpo.mode = "frozen"  # one capture serves every step
    config.grpo.group = 8
    config.grpo.max_new_tokens = 6  # four digits, the eos and one to spare
    config.capture.chunk = 2048
    # Half as much for the answer's first characters, so that near misses differ.
    config.reward.functions = ("exact_match", "longstraw_jax.tasks.rewards:leading_share")
    config.reward.weights = (1.0, 0.5)
    for target in config.lora:  # attention and head are enough here
        config.lora[target].rank = 0 if target in ("dense", "shared", "routed") else 4
        config.lora[target].alpha = 8.0
    config.optimizer.learning_rate = 1e-3
    config.checkpoint.every = 10
    return config
