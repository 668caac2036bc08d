"""Held-out curves of the small reader at 4,096 positions: 100 steps on 8 emulated devices.

On one GPU at 65,536 positions (the reader met them as gaps in rows of 4,096 tokens):
  --config.job.mesh.devices=1 --config.job.mesh.emulate=False --config.task.tokens=65520 \
  --config.job.capture.chunk=8192 --config.held_out.rows=96 --config.held_out.every=10
"""

import pathlib
import runpy

from ml_collections import ConfigDict

_GRPO = runpy.run_path(str(pathlib.Path(__file__).with_name("grpo.py")))


def get_config() -> ConfigDict:
    """`job` is the main job's; learning_curves.py sets its mode, seed, rows and checkpoints."""
    job = _GRPO["get_config"]()
    job.steps = 100
    job.mesh.devices, job.mesh.emulate = 8, True
    job.data.rows_per_step = 4
    job.grpo.group = 16
    # At 1.0 the reader is soon so sure that all members of most groups answer alike: no signal.
    job.grpo.temperature = 1.5
    job.grpo.max_new_tokens = 16  # three numbers of four digits, the spaces and the eos
    # What is measured, and half as much for the answer's first digits, so that near misses differ.
    job.reward.functions = ("exact_match", "longstraw_jax.tasks.rewards:leading_share")
    job.reward.weights = (1.0, 0.5)
    job.lora.routed.rank = 0
    job.optimizer.learning_rate = 1e-3
    return ConfigDict(
        {
            "job": job,
            # By mode, as a step moves more where it moves the prompt's own state too; 0: job.optimizer.learning_rate.
            "learning_rates": {"frozen": 0.0, "detached": 0.0, "exact": 0.0},
            "task": {
                "kind": "",  # "": chosen by the rule of learning_curves.py among `kinds`
                "kinds": ("needles",),  # the reader gets needle always right, chain and sum hardly ever
                "tokens": 4080,  # with the answer's 16 they fill the reader's positions
                "positions": ("early", "middle", "late"),
                "distractors": 64,  # four times as in pretraining: among 16 or 32 it gets over 0.7 right
                "digits": 4,
                "low": 0.15,
                "high": 0.6,
            },
            # Prompts, as many at each position; one costs a capture at each evaluation.
            "held_out": {"rows": 48, "every": 50, "goal": 0.2},
        }
    )
