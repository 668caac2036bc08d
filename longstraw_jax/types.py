"""The pytrees and static records that cross module borders."""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Int, UInt

from longstraw_jax import config as config_lib

PAGE = 64  # tokens a page

Params = dict[str, Any]  # nested dict of arrays


@dataclasses.dataclass(frozen=True)
class Model:
    """Everything static about a model: hashable, so that jitted steps take it as a static argument.

    Attributes:
      config: the architecture.
      graphdef: structure of the NNX decoder; `nnx.merge(graphdef, base)` gives it back.
      mesh: a mesh with the one axis "ctx", or None for one device.
      lora: adapter targets, None for a model that never has adapters.
      attention: "absorbed" (latents as keys and values) or "expanded" (per-head keys and values; an oracle).
      remat: recompute each layer in the backward pass, keeping only its input.
      expert_load: rows of a pass of the experts' all-to-all in units of the mean load, see expert_dispatch.expert_room.
      prefix_store: where a prompt's pages rest: "device", or "host" (pinned memory, a layer staged at a time).
      kernels: of the operations in pallas_kernels: "auto" (the device's where they serve) or "reference".
    """

    config: config_lib.ModelConfig
    graphdef: nnx.GraphDef
    mesh: jax.sharding.Mesh | None = None
    lora: config_lib.LoraConfig | None = None
    attention: str = "absorbed"
    remat: bool = True
    expert_load: float = 2.0
    prefix_store: str = "device"
    kernels: str = "auto"

    @property
    def devices(self) -> int:
        return self.mesh.size if self.mesh is not None else 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefixState:
    """Everything resident for one prompt; never written after capture.

    Page p of the prompt lives on device p % n as its p // n-th page, so the pages axis below is device-major:
    global row d * (pages / n) + p // n. Row r of page p is prompt token 64 p + r.

    Attributes:
      latents: per segment [repeat, layers of a group, pages, 64, latent_dim]: the normed KV latent, then the
        rotated key.
      index_keys: per segment [repeat, pages, 64, index_head_dim], of each group's full layer.
      length: resident tokens, S - 1 for a prompt of S tokens (the last one is the boundary token).
      fingerprint: of the weights that captured it.
    """

    latents: tuple[Array, ...]
    index_keys: tuple[Array, ...]
    length: Int[Array, ""]
    fingerprint: UInt[Array, "2"]
