"""Which tensors of a Hugging Face checkpoint make up each base parameter.

Names and shapes are those of GlmMoeDsaForCausalLM. Files hold linear maps as [out, in] and one tensor an
expert; the base holds [in, out], experts stacked, and layers stacked over a segment's repetitions.
"""

import dataclasses

import jax
import numpy as np
from jax.sharding import PartitionSpec

from longstraw_jax.config import ModelConfig
from longstraw_jax.model import decoder
from longstraw_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One base parameter and the tensors that make it up.

    Attributes:
      shape, dtype, spec: as in the base, layer axis and expert axis included.
      names: per row of the layer axis (one row outside the layers) its tensors' names: one, or one an expert.
      stacked: it has a layer axis.
      transposed: files hold [out, in].
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    spec: PartitionSpec
    names: tuple[tuple[str, ...], ...]
    stacked: bool
    transposed: bool

    @property
    def experts(self) -> bool:
        return len(self.shape) == 4

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of one tensor in the files."""
        own = self.shape[self.stacked + self.experts :]
        return own[::-1] if self.transposed else own


def parameters(config: ModelConfig) -> Params:
    """The base as a nested dict of `Parameter`."""
    segments = config.segments()

    def one(path, leaf, spec):
        keys = [key.key for key in path]
        stacked = keys[0] == "segments"
        if not stacked:
            name = "lm_head.weight" if keys[0] == "lm_head" else "model." + ".".join(keys)
            names = ((name,),)
        else:
            segment, run, module = segments[keys[1]], keys[3], keys[4:]
            layers = [segment.layer_index(index, run) for index in range(segment.stack(run))]
            prefixes = [f"model.layers.{layer}.{'.'.join(module[:-1])}." for layer in layers]
            if "experts" in module:
                count = range(leaf.shape[1])
                names = tuple(tuple(f"{p}{e}.{module[-1]}.weight" for e in count) for p in prefixes)
            else:
                names = tuple((prefix + module[-1],) for prefix in prefixes)
        transposed = len(leaf.shape) - stacked >= 2 and keys[0] != "embed_tokens"
        return Parameter(leaf.shape, np.dtype(leaf.dtype), spec, names, stacked, transposed)

    shapes, specs = decoder.param_shapes(config), decoder.param_specs(config)
    return jax.tree_util.tree_map_with_path(one, shapes, specs)


def layer_of(name: str) -> int | None:
    """Layer index of a tensor name; None outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and parts[2:] and parts[2].isdigit() else None
