"""Gradient parity of a full-width slice of GLM-5.2 on one GPU: four layers, random weights at the checkpoint's scale.

    python experiments/gradient_parity.py --config=experiments/configs/parity_slice.py --tokens=32768 --modes=exact

In bf16, with 64 of 256 experts: the weights take 25 GB, which both sides share. The whole-sequence baseline
recomputes each layer; by formula its fullest layer holds about 0.9 MB a token (absorbed queries and outputs in fp32 and
their gradients 0.4, eight experts' rows 0.5): 28 GB at 32,768 tokens, 57 GB at 65,536. All 256 experts (83 GB) would
fit beside the first and not beside the second of these on 139 GiB. In fp32 everything doubles and the operations are
their jnp specifications, slow ones; with 16 experts the weights take 20 GB:

    ... --tokens=8192 --config.model.architecture.dtype=float32 --config.model.architecture.n_routed_experts=16
"""

import pathlib
import runpy

from ml_collections import ConfigDict

_HERE = pathlib.Path(__file__).parent


def get_config() -> ConfigDict:
    """grpo.py's fields, with the slice as model.architecture (config.json's keys)."""
    config = runpy.run_path(str(_HERE / "grpo.py"))["get_config"]()
    slices = runpy.run_path(str(_HERE.parent / "model_slice.py"))
    config.model.architecture = ConfigDict(slices["load"](slices["ARCHITECTURE"], 4, 64))
    config.mesh.devices = 1
    config.grpo.max_new_tokens = 64
    config.capture.chunk = 4096
    config.optimizer.learning_rate = 1e-6  # as parity_tiny.py: the step's tolerance is in its units
    config.lora.dense.rank = 0  # the slice has no dense layer
    return config
