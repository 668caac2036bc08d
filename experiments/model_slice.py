"""A full-width slice of GLM-5.2: some of its layers and experts, every width as released, adapters on every target."""

import json
import pathlib
from typing import Any

from longstraw_jax import config as config_lib

ARCHITECTURE = pathlib.Path(__file__).parent / "configs" / "glm52.json"
TARGETS = ("q_a", "q_b", "kv_a", "kv_b", "o", "shared", "routed", "lm_head")


def sliced(raw: dict[str, Any], layers: int, experts: int) -> dict[str, Any]:
    """`layers` layers of a Hugging Face configuration from its first full, sparse layer on, or all of them.

    In GLM-5.2 that is layer 6, where the groups of full, shared, shared, shared layers begin.

    Args:
      experts: routed experts a layer, 0 for the configuration's own.

    Raises:
      ValueError: more layers or experts than there are; no such layer to begin with.
    """
    whole, total = config_lib.model_config_from_hf(raw), raw["num_hidden_layers"]
    kinds = list(zip(whole.indexer_types, whole.mlp_layer_types, strict=True))
    if layers != total and ("full", "sparse") not in kinds:
        raise ValueError(
            f"--architecture: the kinds of its layers are {sorted(set(kinds))}; accepted: ('full', 'sparse') among "
            f"them, or --layers={total} (all)"
        )
    first = 0 if layers == total else kinds.index(("full", "sparse"))
    if not 1 <= layers <= total - first:
        raise ValueError(f"--layers={layers}; accepted: 1 to {total - first}, or all {total}")
    if not 0 <= experts <= raw["n_routed_experts"] or 0 < experts < raw["num_experts_per_tok"]:
        raise ValueError(
            f"--experts={experts}; accepted: 0 (all), or {raw['num_experts_per_tok']} to {raw['n_routed_experts']}"
        )
    letters = "".join("F" if kind == "full" else "S" for kind in whole.indexer_types[first : first + layers])
    return raw | {
        "num_hidden_layers": layers,
        "index_topk_pattern": letters,
        "mlp_layer_types": list(whole.mlp_layer_types[first : first + layers]),
        "n_routed_experts": experts or raw["n_routed_experts"],
        "num_nextn_predict_layers": 0,
    }


def load(path: str | pathlib.Path, layers: int, experts: int) -> dict[str, Any]:
    """`sliced` of a config.json. Raises ValueError."""
    try:
        raw = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--architecture={path}: {error}; accepted: a Hugging Face config.json") from error
    return sliced(raw, layers, experts)


def model_config(raw: dict[str, Any], positions: int) -> config_lib.ModelConfig:
    """The configuration with room for `positions`, by YaRN where the native range is too short."""
    config = config_lib.model_config_from_hf(raw)
    return config_lib.extend_positions(config, positions) if positions > config.max_position_embeddings else config


def adapters(config: config_lib.ModelConfig, rank: int) -> config_lib.LoraConfig:
    """Adapters of one rank on every target that the slice has, alpha twice the rank."""
    targets = TARGETS + (("dense",) if "dense" in config.mlp_layer_types else ())
    return config_lib.LoraConfig(tuple((name, rank, 2.0 * rank) for name in sorted(targets)))
