"""What a transaction would need to fit a chip's memory: base weights in FP8, pages on the host, more chips."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from longstraw_jax.evidence.plan import capture_estimate
from longstraw_jax.evidence.plan_programs import Resident
from longstraw_jax.prefix import pages
from longstraw_jax.types import PAGE, Model

# Copies of the adapters' size that the transaction holds while it replays: the adapters and their copies per device,
# two moments, the sum of gradients and one member's.
ADAPTER_SIZES = 6


def _bytes(tree: Any, devices: int, *, fp8: bool = False) -> int:
    """Of a device's share on a mesh of `devices`: sharded arrays divide, the others do not."""
    total = 0
    for x in jax.tree.leaves(tree):
        item = 1 if fp8 and x.dtype == jnp.bfloat16 else x.dtype.itemsize
        shared = any(name is not None for name in x.sharding.spec)
        total += math.ceil(math.prod(x.shape) * item / (devices if shared else 1))
    return total


def needs(model: Model, have: Resident, tokens: int, memory: int) -> list[dict[str, Any]]:
    """The fewest chips of a memory that hold the transaction, for each way to hold weights and pages.

    By formula, with the smallest capture chunk's temporaries; a mesh doubles until it no longer divides the experts.

    Returns:
      A row per combination of base ("bf16" or "fp8", as stored) and pages ("device" or "host"): "devices" (None where
      even the largest mesh is too small), "bytes" of a device there, and "bytes_on_mesh" of a device of the given one.
    """
    config, rows = model.config, []
    for fp8, host in itertools.product((False, True), (False, True)):

        def device_bytes(devices, fp8=fp8, host=host):
            capacity = pages.page_count(tokens, devices) * PAGE
            held = _bytes(have.base, devices, fp8=fp8) + ADAPTER_SIZES * _bytes(have.state.adapters, devices)
            held += _bytes(have.page_grads, devices)
            if not host:
                held += _bytes((have.prefix.latents, have.prefix.index_keys), devices)
            return held + capture_estimate(config, PAGE * devices, capacity, devices, model.expert_load)

        devices = model.devices
        while device_bytes(devices) > memory and config.n_routed_experts % (2 * devices) == 0:
            devices *= 2
        rows.append(
            {
                "base": "fp8" if fp8 else "bf16",
                "pages": "host" if host else "device",
                "devices": devices if device_bytes(devices) <= memory else None,
                "bytes": device_bytes(devices),
                "bytes_on_mesh": device_bytes(model.devices),
            }
        )
    return rows
