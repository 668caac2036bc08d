"""Model and adapter configuration: frozen dataclasses with Hugging Face's field names, checked on the host."""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

LAYER_KINDS = ("full", "shared")
MLP_KINDS = ("dense", "sparse")
DTYPES = ("bfloat16", "float16", "float32")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "max_position_embeddings",
)


class ConfigError(ValueError):
    """A configuration value that this code does not support; names the field, the value and what is accepted."""


def _refuse(field: str, value: Any, accepted: str) -> None:
    raise ConfigError(f"{field}={value!r} is not supported; accepted: {accepted}")


@dataclasses.dataclass(frozen=True)
class RopeParameters:
    """`rope_parameters` of config.json, as transformers' `modeling_rope_utils` reads them."""

    rope_theta: float
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self):
        if self.rope_type not in ("default", "yarn"):
            _refuse("rope_parameters.rope_type", self.rope_type, "'default' or 'yarn'")
        if not self.rope_theta > 0:
            _refuse("rope_parameters.rope_theta", self.rope_theta, "a positive number")
        if self.rope_type == "yarn":
            if not self.factor >= 1:
                _refuse("rope_parameters.factor", self.factor, "a number of at least 1")
            if not self.original_max_position_embeddings:
                _refuse(
                    "rope_parameters.original_max_position_embeddings",
                    self.original_max_position_embeddings,
                    "the native context length, needed with rope_type 'yarn'",
                )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "RopeParameters":
        """Reads the nested dict; an unknown key is refused because it would change the angles unseen."""
        if not isinstance(raw, Mapping):
            _refuse("rope_parameters", raw, "a dict that holds rope_theta")
        raw = dict(raw)
        old = raw.pop("type", None)  # transformers' former name of rope_type
        if old is not None and raw.setdefault("rope_type", old) != old:
            _refuse("rope_parameters.type", old, f"the same as rope_type={raw['rope_type']!r}")
        known = {f.name for f in dataclasses.fields(cls)}
        if "rope_theta" not in raw:
            _refuse("rope_parameters", raw, "a dict that holds rope_theta (it is nested, not at the top level)")
        for key in raw:
            if key not in known:
                _refuse(f"rope_parameters.{key}", raw[key], f"only the keys {sorted(known)}")
        return cls(**raw)


class Run(NamedTuple):
    """Consecutive alike layers of a group: indexer kind, mlp kind, how many. A full layer is a run of its own."""

    indexer: str
    mlp: str
    count: int


@dataclasses.dataclass(frozen=True)
class Segment:
    """`repeat` IndexShare groups of one shape, scanned together.

    Parameters of a run are stacked over all its layers in the segment, group after group.

    Attributes:
      first_layer: checkpoint index of the first layer.
      repeat: number of groups.
      runs: the layers of one group; the first run is its full layer.
    """

    first_layer: int
    repeat: int
    runs: tuple[Run, ...]

    @property
    def group_layers(self) -> int:
        """Layers of one group."""
        return sum(run.count for run in self.runs)

    def offset(self, run: int) -> int:
        """Position in its group of the run's first layer."""
        return sum(r.count for r in self.runs[:run])

    def stack(self, run: int) -> int:
        """Length of the run's layer axis."""
        return self.repeat * self.runs[run].count

    def layer_index(self, index: int, run: int) -> int:
        """Checkpoint index of the layer at `index` of the run's layer axis."""
        group, position = divmod(index, self.runs[run].count)
        return self.first_layer + group * self.group_layers + self.offset(run) + position


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """GLM-5.2's trunk (`GlmMoeDsaForCausalLM`), fields named as in config.json.

    `latent_norm_eps` is ours: eps of the two latent norms, `rms_norm_eps` when None (transformers hard-wires 1e-6).
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_parameters: RopeParameters
    max_position_embeddings: int
    num_nextn_predict_layers: int = 0
    initializer_range: float = 0.02
    dtype: str = "bfloat16"
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    latent_norm_eps: float | None = None

    def __post_init__(self):
        for field in _SIZES:
            value = getattr(self, field)
            if not isinstance(value, int) or value < (0 if field == "n_shared_experts" else 1):
                _refuse(field, value, "a positive integer")
        if not self.rms_norm_eps > 0:
            _refuse("rms_norm_eps", self.rms_norm_eps, "a positive number")
        n = self.num_hidden_layers
        for field, kinds in (("indexer_types", LAYER_KINDS), ("mlp_layer_types", MLP_KINDS)):
            value = getattr(self, field)
            if len(value) != n or any(k not in kinds for k in value):
                _refuse(field, list(value), f"num_hidden_layers={n} entries, each one of {kinds}")
        if self.indexer_types[0] != "full":
            _refuse("indexer_types[0]", self.indexer_types[0], "'full': a shared layer needs a full layer below it")
        if self.dtype not in DTYPES:
            _refuse("dtype", self.dtype, str(DTYPES))
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.index_head_dim:
            _refuse("qk_rope_head_dim", self.qk_rope_head_dim, f"even, at most index_head_dim={self.index_head_dim}")
        if "sparse" in self.mlp_layer_types:
            if self.n_routed_experts % self.n_group:
                _refuse("n_group", self.n_group, f"a divisor of n_routed_experts={self.n_routed_experts}")
            if not 1 <= self.topk_group <= self.n_group:
                _refuse("topk_group", self.topk_group, f"1 to n_group={self.n_group}")
            reachable = self.topk_group * (self.n_routed_experts // self.n_group)
            if not 1 <= self.num_experts_per_tok <= reachable:
                _refuse(
                    "num_experts_per_tok", self.num_experts_per_tok, f"1 to {reachable} (experts in topk_group groups)"
                )

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Numbers a token keeps per layer: normed KV latent, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim^-0.5; grows only when YaRN sets a non-zero mscale_all_dim."""
        scale, rope = self.qk_head_dim**-0.5, self.rope_parameters
        if rope.rope_type == "yarn" and rope.mscale_all_dim and rope.factor > 1:
            scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
        return scale

    def segments(self) -> tuple[Segment, ...]:
        """Layers as runs of alike IndexShare groups, each a full layer and the shared layers it serves."""
        kinds = tuple(zip(self.indexer_types, self.mlp_layer_types, strict=True))
        starts = [i for i, (indexer, _) in enumerate(kinds) if indexer == "full"] + [len(kinds)]
        found: list[Segment] = []
        for start, stop in zip(starts, starts[1:], strict=False):
            shared = [Run(*kind, len(list(same))) for kind, same in itertools.groupby(kinds[start + 1 : stop])]
            group = (Run(*kinds[start], 1), *shared)
            if found and found[-1].runs == group:
                found[-1] = dataclasses.replace(found[-1], repeat=found[-1].repeat + 1)
            else:
                found.append(Segment(start, 1, group))
        return tuple(found)

    def check_length(self, tokens: int, what: str = "prompt plus response") -> None:
        """Raises ConfigError if `tokens` positions do not fit the position range.

        Rotary angles past the trained range are silent nonsense, so the longer range is an explicit choice.
        """
        if tokens > self.max_position_embeddings:
            raise ConfigError(
                f"{what} of {tokens} tokens exceeds max_position_embeddings={self.max_position_embeddings}; shorten "
                f"it, or opt in to a YaRN range of at least {tokens} with --config.model.yarn_positions={tokens} "
                "(longstraw_jax.config.extend_positions)"
            )


# Keys whose only supported value is what GLM-5.2 has; anything else changes the mathematics.
_FIXED = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "rope_interleave": (True,),
    "indexer_rope_interleave": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_router_dtype": ("float32", "fp32"),
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False,),
    "index_share_for_mtp_iteration": (True, False),
    "rope_scaling": (None,),
}


def _indexer_types(raw: Mapping[str, Any], n: int) -> tuple[str, ...]:
    """An explicit list beats a pattern, a pattern beats freq and offset (transformers' defaults: 1 and 2)."""
    if raw.get("indexer_types") is not None:
        return tuple(raw["indexer_types"])
    pattern = raw.get("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != n or set(pattern) - set("FS"):
            _refuse("index_topk_pattern", pattern, f"a string of {n} letters F or S")
        return tuple("full" if letter == "F" else "shared" for letter in pattern)
    freq, offset = raw.get("index_topk_freq", 1), raw.get("index_skip_topk_offset", 2)
    if not isinstance(freq, int) or freq < 1:
        _refuse("index_topk_freq", freq, "a positive integer")
    return tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(n))


def _mlp_layer_types(raw: Mapping[str, Any], n: int) -> tuple[str, ...]:
    if raw.get("mlp_layer_types") is not None:
        return tuple(raw["mlp_layer_types"])
    first, freq = raw.get("first_k_dense_replace", 0), raw.get("moe_layer_freq", 1)
    if not isinstance(freq, int) or freq < 1:
        _refuse("moe_layer_freq", freq, "a positive integer")
    return tuple("sparse" if i >= first and i % freq == 0 else "dense" for i in range(n))


def model_config_from_hf(raw: Mapping[str, Any], *, latent_norm_eps: float | None = None) -> ModelConfig:
    """Builds the configuration from the dict of a Hugging Face config.json.

    Args:
      raw: the parsed file. `head_dim` is ignored: in released files it repeats qk_nope_head_dim.
      latent_norm_eps: overrides the eps of the two latent norms.

    Raises:
      ConfigError: another architecture, a missing key or a value that is not supported, by name.
    """
    if raw.get("model_type") != "glm_moe_dsa":
        _refuse("model_type", raw.get("model_type"), "'glm_moe_dsa' (GlmMoeDsaForCausalLM)")
    for field, accepted in _FIXED.items():
        if field in raw and raw[field] not in accepted:
            _refuse(field, raw[field], " or ".join(map(repr, accepted)))
    needed = [f.name for f in dataclasses.fields(ModelConfig) if f.default is dataclasses.MISSING]
    derived = {"indexer_types", "mlp_layer_types", "rope_parameters"}
    missing = [k for k in needed if k not in raw and k not in derived]
    if "rope_parameters" not in raw:
        missing.append("rope_parameters")
    if missing:
        raise ConfigError(f"config.json lacks {sorted(missing)}; all of them are needed for glm_moe_dsa")
    values = {k: raw[k] for k in needed if k not in derived}
    n = values["num_hidden_layers"]
    heads = values["num_attention_heads"]
    if raw.get("num_key_value_heads", heads) != heads:
        _refuse("num_key_value_heads", raw["num_key_value_heads"], f"num_attention_heads={heads} (latent attention)")
    qk = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    if raw.get("qk_head_dim", qk) != qk:
        _refuse("qk_head_dim", raw["qk_head_dim"], f"qk_nope_head_dim + qk_rope_head_dim = {qk}")
    eos = raw.get("eos_token_id", ())
    return ModelConfig(
        **values,
        indexer_types=_indexer_types(raw, n),
        mlp_layer_types=_mlp_layer_types(raw, n),
        rope_parameters=RopeParameters.from_hf(raw["rope_parameters"]),
        num_nextn_predict_layers=raw.get("num_nextn_predict_layers") or 0,
        initializer_range=raw.get("initializer_range", 0.02),
        dtype=raw.get("dtype", raw.get("torch_dtype", "bfloat16")),
        eos_token_id=tuple(eos) if isinstance(eos, (list, tuple)) else (() if eos is None else (eos,)),
        pad_token_id=raw.get("pad_token_id"),
        latent_norm_eps=latent_norm_eps if latent_norm_eps is not None else raw.get("latent_norm_eps"),
    )


def load_model_config(directory: str | pathlib.Path, **overrides: Any) -> ModelConfig:
    """Reads DIRECTORY/config.json; see `model_config_from_hf`."""
    path = pathlib.Path(directory) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; a Hugging Face checkpoint directory holds a config.json")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:  # of JSON or of UTF-8
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a JSON {type(raw).__name__}; accepted: an object")
    return model_config_from_hf(raw, **overrides)


def extend_positions(config: ModelConfig, positions: int) -> ModelConfig:
    """The same model with a YaRN range of `positions`: an opt-in, it changes short inputs slightly as well.

    The factor is the exact quotient of the two ranges, as transformers checks it.
    """
    rope = config.rope_parameters
    if positions <= config.max_position_embeddings:
        _refuse("yarn_positions", positions, f"more than max_position_embeddings={config.max_position_embeddings}")
    native = rope.original_max_position_embeddings or config.max_position_embeddings
    rope = dataclasses.replace(
        rope, rope_type="yarn", factor=positions / native, original_max_position_embeddings=native
    )
    return dataclasses.replace(config, rope_parameters=rope, max_position_embeddings=positions)


LORA_TARGETS = {
    "q_a": ("self_attn.q_a_proj",),
    "q_b": ("self_attn.q_b_proj",),
    "kv_a": ("self_attn.kv_a_proj_with_mqa",),
    "kv_b": ("self_attn.kv_b_proj",),
    "o": ("self_attn.o_proj",),
    "dense": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "shared": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    "routed": ("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"),
    "lm_head": ("lm_head",),
}


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: target name -> (rank, alpha); the update is (alpha / rank) x A B.

    Attributes:
      targets: sorted (name, rank, alpha) triples; names are the keys of LORA_TARGETS. Indexer, router, norms and
        embeddings are never targets.
    """

    targets: tuple[tuple[str, int, float], ...]

    def __post_init__(self):
        if not self.targets:
            _refuse("lora.targets", self.targets, f"at least one of {sorted(LORA_TARGETS)}")
        names = [name for name, _, _ in self.targets]
        for name, rank, alpha in self.targets:
            if name not in LORA_TARGETS:
                _refuse("lora.targets", name, f"{sorted(LORA_TARGETS)}")
            if not (isinstance(rank, int) and rank >= 1):
                _refuse(f"lora.{name}.rank", rank, "a positive integer")
            if not 0 < alpha < math.inf:
                _refuse(f"lora.{name}.alpha", alpha, "a positive number")
        if len(set(names)) != len(names):
            _refuse("lora.targets", names, "each target once")

    def scales(self) -> dict[str, float]:
        """Module path (relative to its layer) -> alpha / rank."""
        return {path: alpha / rank for name, rank, alpha in self.targets for path in LORA_TARGETS[name]}
