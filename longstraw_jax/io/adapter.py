"""Adapters as Hugging Face PEFT reads them for transformers' GlmMoeDsaForCausalLM, and back.

A linear map keeps its name: `base_model.model.<module>.lora_A.weight` [r, in] and `.lora_B.weight` [out, r].

transformers holds all routed experts of a layer in two parameters, `mlp.experts.gate_up_proj` [E, 2 F, D] (gate
first) and `mlp.experts.down_proj` [E, D, F]; PEFT adapts those by `target_parameters` (`ParamWrapper`):
  * lora_A [E r, in] counts experts outside, ranks inside; lora_B [out, r E] counts ranks outside, experts inside;
  * the wrapper of down_proj is the outer one, `mlp.experts`; that of gate_up_proj is `mlp.experts.base_layer`;
  * gate and up become one pair of rank 2 r, A side by side and B block-diagonal, with alpha doubled as well, so
    that the scale stays alpha / r.

The dense and shared feed-forward matrices go by `target_parameters` too, as `mlp.gate_proj.weight`: for this model
type PEFT (0.21) takes any target module called gate_proj, up_proj or down_proj for the fused experts.
"""

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy
from absl import logging
from jax.sharding import Mesh, PartitionSpec

from longstraw_jax import sharding
from longstraw_jax.config import LORA_TARGETS, LoraConfig, ModelConfig
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.lora import Site, adapter_specs, check_adapters, sites
from longstraw_jax.types import Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# What would change the update's meaning, and the only value that this code reads.
_PLAIN = {"peft_type": "LORA", "use_rslora": False, "use_dora": False, "bias": "none", "fan_in_fan_out": False}


class AdapterError(ValueError):
    """An adapter folder that is not the one asked for; names every difference, found and expected."""


def _peft_targets(lora: LoraConfig) -> tuple[list[str], list[str], dict[str, tuple[int, float]]]:
    """Target modules, target parameters, and (rank, alpha) of each."""
    modules, parameters, sizes = [], [], {}
    for target, rank, alpha in lora.targets:
        if target == "routed":
            fused = {"mlp.experts.gate_up_proj": (2 * rank, 2 * alpha), "mlp.experts.down_proj": (rank, alpha)}
            parameters += fused
            sizes |= fused
        elif target in ("dense", "shared"):
            names = [f"{path}.weight" for path in LORA_TARGETS[target]]
            parameters += names
            sizes |= {name: (rank, alpha) for name in names}
        else:
            modules += LORA_TARGETS[target]
            sizes |= {name: (rank, alpha) for name in LORA_TARGETS[target]}
    return modules, parameters, sizes


def peft_config(lora: LoraConfig, *, base_model_name: str) -> dict[str, Any]:
    """The dict of adapter_config.json."""
    modules, parameters, sizes = _peft_targets(lora)
    _, rank, alpha = lora.targets[0]
    return _PLAIN | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": modules,
        "target_parameters": parameters,
        "rank_pattern": {name: rank for name, (rank, _) in sizes.items()},
        "alpha_pattern": {name: alpha for name, (_, alpha) in sizes.items()},
    }


def _places(config: ModelConfig, site: Site) -> Iterator[tuple[Any, str]]:
    """Index into the site's stacked pair, and the key prefix of its module, for every repetition."""
    if site.path == ("lm_head",):
        yield ..., _PREFIX + "lm_head"
        return
    _, s, j, module = site.path
    segment = config.segments()[int(s)]
    for index in range(segment.stack(int(j))):
        yield index, f"{_PREFIX}model.layers.{segment.layer_index(index, int(j))}.{module}"


def _expert_a(a: np.ndarray) -> np.ndarray:
    """[E, in, r] -> [E r, in]."""
    return a.transpose(0, 2, 1).reshape(-1, a.shape[1])


def _expert_b(b: np.ndarray) -> np.ndarray:
    """[E, r, out] -> [out, r E]."""
    return b.transpose(2, 1, 0).reshape(b.shape[2], -1)


def _fused_b(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Two [E, r, F] -> block-diagonal [E, 2 r, 2 F]."""
    zero = np.zeros_like(gate)
    return np.concatenate([np.concatenate([gate, zero], -1), np.concatenate([zero, up], -1)], -2)


def _routed_layers(config: ModelConfig, lora: LoraConfig) -> Iterator[tuple[dict[str, Site], int, str]]:
    """For every layer with adapted experts: its three sites, the repetition, and the key prefix of `mlp.experts`."""
    layers: dict[tuple[str, ...], dict[str, Site]] = {}
    for site in sites(config, lora):
        if site.routed:
            layers.setdefault(site.path[:-1], {})[site.path[-1].rsplit(".", 1)[-1]] = site
    for by_name in layers.values():
        for repetition, prefix in _places(config, by_name["down_proj"]):
            yield by_name, repetition, prefix.removesuffix(".down_proj")


def _pair(adapters: Params, site: Site) -> tuple[np.ndarray, np.ndarray]:
    node = adapters
    for key in site.path:
        node = node[key]
    return np.asarray(node["a"]), np.asarray(node["b"])


def _to_peft(config: ModelConfig, lora: LoraConfig, adapters: Params) -> dict[str, np.ndarray]:
    """Tensors by PEFT's names."""
    tensors: dict[str, np.ndarray] = {}
    for site in sites(config, lora):
        if not site.routed:
            a, b = _pair(adapters, site)
            for index, prefix in _places(config, site):
                tensors |= {f"{prefix}.lora_A.weight": a[index].T, f"{prefix}.lora_B.weight": b[index].T}
    for by_name, repetition, experts in _routed_layers(config, lora):
        pairs = {name: [x[repetition] for x in _pair(adapters, site)] for name, site in by_name.items()}
        (gate_a, gate_b), (up_a, up_b), (down_a, down_b) = (pairs[f"{name}_proj"] for name in ("gate", "up", "down"))
        tensors[f"{experts}.base_layer.lora_A.weight"] = _expert_a(np.concatenate([gate_a, up_a], -1))
        tensors[f"{experts}.base_layer.lora_B.weight"] = _expert_b(_fused_b(gate_b, up_b))
        tensors[f"{experts}.lora_A.weight"] = _expert_a(down_a)
        tensors[f"{experts}.lora_B.weight"] = _expert_b(down_b)
    return {name: np.ascontiguousarray(x) for name, x in tensors.items()}


def export_peft(
    directory: str | pathlib.Path, config: ModelConfig, lora: LoraConfig, adapters: Params, *, base_model_name: str
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors (fp32), each whole or not at all; nothing is merged.

    Args:
      directory: made if missing; other files in it are left alone.
      adapters: as `lora.adapter_shapes`; sharded ones are gathered on the host.
      base_model_name: name or path of the base model, for the reader.

    Raises:
      LoraError: the adapters are not those of (config, lora).
      OSError: a file could not be written; the previous one is still there.
    """
    check_adapters(adapters, config, lora)
    if any(target == "kv_b" for target, _, _ in lora.targets):
        logging.warning(
            "lora target 'kv_b': servers that absorb kv_b_proj into the attention skip its adapter "
            "(vllm-project/vllm issue 48974); compare log-probs with the server, or merge before serving"
        )
    directory = pathlib.Path(directory)
    tensors = _to_peft(config, lora, adapters)
    write_whole(directory / WEIGHTS, safetensors.numpy.save(tensors, metadata={"format": "pt"}))
    text = json.dumps(peft_config(lora, base_model_name=base_model_name), indent=2, sort_keys=True)
    write_whole(directory / CONFIG, (text + "\n").encode())


def _check_config(raw: Mapping[str, Any], lora: LoraConfig) -> None:
    """Refuses another method, other targets, or another rank or alpha, with both values."""
    wrong = [
        f"{field}: found {raw[field]!r}, expected {value!r}"
        for field, value in _PLAIN.items()
        if field in raw and raw[field] != value
    ]
    modules, parameters, sizes = _peft_targets(lora)
    for field, names in (("target_modules", modules), ("target_parameters", parameters)):
        if sorted(raw.get(field) or []) != sorted(names):
            wrong.append(f"{field}: found {sorted(raw.get(field) or [])}, expected {sorted(names)}")
    for name, expected in sizes.items():
        for what, pattern, default, value in zip(
            ("rank", "alpha"), ("rank_pattern", "alpha_pattern"), ("r", "lora_alpha"), expected, strict=True
        ):
            found = (raw.get(pattern) or {}).get(name, raw.get(default))
            if found != value:
                wrong.append(f"{what} of {name}: found {found}, expected {value}")
    if wrong:
        raise AdapterError(f"{CONFIG} does not match lora.targets={lora.targets}: " + "; ".join(wrong))


class _Reader:
    """Takes expected tensors out of an open file and remembers what is missing, misshapen or left over."""

    def __init__(self, file: Any):
        self.file, self.left, self.wrong = file, set(file.keys()), []

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self.left:
            self.wrong.append(f"{name}: missing, expected F32{list(shape)}")
            return np.zeros(shape, np.float32)
        self.left.remove(name)
        found = self.file.get_slice(name)
        if (found.get_dtype(), found.get_shape()) != ("F32", list(shape)):
            self.wrong.append(f"{name}: found {found.get_dtype()}{found.get_shape()}, expected F32{list(shape)}")
            return np.zeros(shape, np.float32)
        return self.file.get_tensor(name)

    def take_experts(self, prefix: str, e: int, d_in: int, rank: int, d_out: int) -> tuple[np.ndarray, np.ndarray]:
        """The inverse of `_expert_a` and `_expert_b`: [E, in, r] and [E, r, out]."""
        a = self.take(f"{prefix}.lora_A.weight", (e * rank, d_in))
        b = self.take(f"{prefix}.lora_B.weight", (d_out, rank * e))
        return a.reshape(e, rank, d_in).transpose(0, 2, 1), b.reshape(d_out, rank, e).transpose(2, 1, 0)


def _from_peft(reader: _Reader, config: ModelConfig, lora: LoraConfig) -> Params:
    adapters: Params = {}
    pairs: dict[tuple[str, ...], dict[str, np.ndarray]] = {}
    for site in sites(config, lora):
        node = adapters
        for key in site.path:
            node = node.setdefault(key, {})
        node |= {name: np.empty(shape, np.float32) for name, shape in site.shapes.items()}
        pairs[site.path] = node
        if not site.routed:
            for index, prefix in _places(config, site):
                node["a"][index] = reader.take(f"{prefix}.lora_A.weight", (site.rank, site.d_in)).T
                node["b"][index] = reader.take(f"{prefix}.lora_B.weight", (site.d_out, site.rank)).T
    for by_name, repetition, prefix in _routed_layers(config, lora):
        gate, up, down = (by_name[f"{name}_proj"] for name in ("gate", "up", "down"))
        e, r, f = gate.lead[-1], gate.rank, gate.d_out
        fused_a, fused_b = reader.take_experts(f"{prefix}.base_layer", e, gate.d_in, 2 * r, 2 * f)
        down_a, down_b = reader.take_experts(prefix, e, down.d_in, r, down.d_out)
        if fused_b[:, :r, f:].any() or fused_b[:, r:, :f].any():
            reader.wrong.append(f"{prefix}.base_layer.lora_B.weight: gate and up share ranks, expected block-diagonal")
        for site, a, b in (
            (gate, fused_a[..., :r], fused_b[:, :r, :f]),
            (up, fused_a[..., r:], fused_b[:, r:, f:]),
            (down, down_a, down_b),
        ):
            pairs[site.path]["a"][repetition], pairs[site.path]["b"][repetition] = a, b
    return adapters


def import_peft(
    directory: str | pathlib.Path, config: ModelConfig, lora: LoraConfig, *, mesh: Mesh | None = None
) -> Params:
    """Reads what `export_peft` wrote, bit for bit, and puts it where adapters lie.

    Raises:
      AdapterError: a missing file, another rank, alpha or target (both values named), missing, unexpected or misshapen
        tensors (all named).
      LoraError: a target matches nothing in this model.
    """
    directory = pathlib.Path(directory)
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise AdapterError(f"{directory / name} does not exist; a PEFT adapter folder holds {CONFIG} and {WEIGHTS}")
    try:
        raw = json.loads((directory / CONFIG).read_text())
        _check_config(raw, lora)
        with safetensors.safe_open(directory / WEIGHTS, "numpy") as file:
            reader = _Reader(file)
            adapters = _from_peft(reader, config, lora)
    except (json.JSONDecodeError, safetensors.SafetensorError) as error:
        raise AdapterError(f"{directory} holds a damaged adapter: {error}") from error
    wrong = reader.wrong + [f"{name}: unexpected" for name in sorted(reader.left)]
    if wrong:
        raise AdapterError(f"{directory / WEIGHTS} does not fit the model: " + "; ".join(wrong))
    return jax.tree.map(
        lambda spec, x: jax.device_put(x, sharding.named(mesh, spec)),
        adapter_specs(config, lora),
        adapters,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
