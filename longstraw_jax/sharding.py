"""The mesh, where each logical axis lies on it, and what a mesh must divide."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "ctx"  # context, experts, vocabulary and resting weights all share the one axis

RULES = {"fsdp": AXIS, "expert": AXIS, "vocab": AXIS, None: None}


class ShardingError(ValueError):
    """A mesh that does not divide what it must; names the dimension, its size and the mesh size."""


def make_mesh(devices: int) -> Mesh | None:
    """A one-axis mesh over the first `devices` devices; None for a single one.

    Raises:
      ShardingError: fewer devices than asked for.
    """
    if devices < 1 or devices > jax.device_count():
        raise ShardingError(f"mesh.devices={devices} is not available; accepted: 1 to {jax.device_count()}")
    return Mesh(np.asarray(jax.devices()[:devices]), (AXIS,)) if devices > 1 else None


def spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """PartitionSpec of a parameter from its logical axes."""
    return PartitionSpec(*(RULES[name] for name in axes))


def check_divides(what: str, size: int, devices: int) -> None:
    if size % devices:
        raise ShardingError(
            f"{what}={size} is not divisible by the mesh of {devices} devices; accepted: a multiple of {devices}"
        )


def named(mesh: Mesh | None, pspec: PartitionSpec, *, memory_kind: str | None = None) -> jax.sharding.Sharding:
    """Sharding on the mesh, or the first device without one; in the devices' default memory unless one is named."""
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory_kind)
    return NamedSharding(mesh, pspec, memory_kind=memory_kind)
