"""Meshes of chips that need not be there: known topologies, their memory, compile-only devices."""

import os
from importlib import resources
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from longstraw_jax import sharding

GIB = 2**30


class TopologyError(ValueError):
    """A topology that is unknown or cannot be compiled for here; says what is accepted or what to install."""


class Topology(NamedTuple):
    """A mesh to compile for.

    Attributes:
      name: as given, "platform:shape" or "tpu:chip:shape".
      platform: "tpu", "cuda" or "cpu".
      shape: the compiler's name of the topology; the number of devices for "cpu".
      devices: how many.
      memory: bytes of a device that a program can have, as the compiler or the driver counts them; None for the
        CPU, whose emulated devices share the machine's.
    """

    name: str
    platform: str
    shape: str
    devices: int
    memory: int | None


# The memory of a TPU is what its compiler says is available, that of an H200 what its driver reports.
_V5P, _V6E, _V5E, _H200 = (int(gib * GIB) for gib in (95.74, 31.25, 15.75, 139.8))
KNOWN = {
    topology.name: topology
    for topology in (
        Topology("tpu:v5p:4x4x2", "tpu", "v5p:4x4x2", 32, _V5P),
        Topology("tpu:v6e:4x8", "tpu", "v6e:4x8", 32, _V6E),
        Topology("tpu:v5e:4x8", "tpu", "v5e:4x8", 32, _V5E),
        Topology("cuda:4x8x1", "cuda", "4x8x1", 32, _H200),
        Topology("cuda:1x1x2", "cuda", "1x1x2", 2, _H200),  # of one host
        Topology("cpu:32", "cpu", "32", 32, None),
    )
}
# What the TPU compiler would otherwise ask a machine with TPUs; nothing is run, so that several may compile at once.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_TPU_ACCELERATOR = {"v5p": "v5p-64", "v6e": "v6e-32", "v5e": "v5litepod-32"}


def parse(name: str) -> Topology:
    """The topology of that name.

    Raises:
      TopologyError: it is not known; lists those that are.
    """
    if name not in KNOWN:
        raise TopologyError(f"topology={name!r} is not known; accepted: {', '.join(KNOWN)}")
    return KNOWN[name]


def prepare(topology: Topology) -> None:
    """Settings that must be made before JAX touches a device."""
    if topology.platform == "tpu":
        for key, value in _TPU_ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", _TPU_ACCELERATOR[topology.shape.partition(":")[0]])
    jax.config.update("jax_platforms", "cpu")  # small constants are made there, and nothing else is looked for
    if topology.platform == "cpu" and jax.config.jax_num_cpu_devices != topology.devices:
        jax.config.update("jax_num_cpu_devices", topology.devices)


def make_mesh(topology: Topology) -> Mesh:
    """The one-axis mesh over the topology's devices, present or not. Call `prepare` first.

    Raises:
      TopologyError: no compiler for it here: libtpu or the CUDA plugin is missing, or too few CPU devices.
    """
    if topology.platform == "cpu":
        return sharding.make_mesh(topology.devices)
    if topology.platform == "tpu":
        try:
            import libtpu  # noqa: F401
        except ImportError as error:
            raise TopologyError(
                f"topology={topology.name!r} needs the libtpu package; accepted: pip install 'longstraw_jax[tpu]' first"
            ) from error
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology.shape)
    else:
        try:
            # With the card's description the GPU plugin needs no card; without the option it takes one device.
            card = resources.files(__package__).joinpath("h200.txtpb").read_text()
            described = topologies.get_topology_desc(platform="cuda", topology=topology.shape, target_config=card)
        except NotImplementedError as error:
            raise TopologyError(
                f"topology={topology.name!r} needs JAX's CUDA plugin; accepted: pip install 'longstraw_jax[cuda]' first"
            ) from error
    if len(described.devices) != topology.devices:
        raise TopologyError(
            f"topology={topology.name!r} has {len(described.devices)} devices for this compiler; accepted: "
            f"{topology.devices}"
        )
    return Mesh(np.asarray(described.devices), (sharding.AXIS,))
