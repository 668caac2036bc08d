"""Reading config.json: every key is honoured or refused by name."""

import dataclasses
import json
import pathlib

import pytest
from tiny_models import RAW

from longstraw_jax import config as config_lib
from longstraw_jax.config import ConfigError, model_config_from_hf

GLM52 = json.loads((pathlib.Path(__file__).parents[1] / "experiments/configs/glm52.json").read_text())


def full_layers(config):
    return [i for i, kind in enumerate(config.indexer_types) if kind == "full"]


def test_released_values():
    config = model_config_from_hf(GLM52)
    assert full_layers(config) == [0, 1, 2, *range(6, 75, 4)] and len(full_layers(config)) == 21
    assert config.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 75
    assert (config.qk_head_dim, config.latent_dim, config.softmax_scale) == (256, 576, 1 / 16)
    assert (config.rms_norm_eps, config.rope_parameters.rope_theta) == (1e-5, 8e6)
    assert (config.eos_token_id, config.pad_token_id) == ((154820, 154827, 154829), 154820)
    assert (config.dtype, config.num_nextn_predict_layers) == ("bfloat16", 1)


def test_layers_fall_into_three_scanned_runs():
    segments = model_config_from_hf(GLM52).segments()
    assert [(s.first_layer, s.repeat, s.group_layers) for s in segments] == [(0, 2, 1), (2, 1, 4), (6, 18, 4)]
    assert segments[1].runs == (("full", "dense", 1), ("shared", "sparse", 3)) and segments[2].runs[0] == (
        "full",
        "sparse",
        1,
    )
    order = sorted(
        s.layer_index(i, j) for s in segments for j in range(len(s.runs)) for i in range(s.stack(j))
    )
    assert order == list(range(78))


def test_head_dim_means_nothing():
    assert model_config_from_hf(GLM52 | {"head_dim": 7}) == model_config_from_hf(GLM52)


@pytest.mark.parametrize(
    "keys, full",
    [
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6]),
        ({"index_topk_freq": 4}, [0, 1, 5]),  # absent offset: 2
        ({}, list(range(8))),  # absent freq: 1
        ({"index_topk_pattern": "FSSFFSSS", "index_topk_freq": 4}, [0, 3, 4]),
        ({"indexer_types": ["full"] + ["shared"] * 7, "index_topk_pattern": "F" * 8}, [0]),
    ],
)
def test_f3_who_owns_an_indexer(keys, full):
    raw = {k: v for k, v in RAW.items() if k not in ("indexer_types", "mlp_layer_types")}
    config = model_config_from_hf(raw | {"num_hidden_layers": 8} | keys)
    assert full_layers(config) == full


@pytest.mark.parametrize(
    "keys", [{"indexer_types": ["shared"] + ["full"] * 4}, {"index_topk_pattern": "SFFFF"}]
)
def test_f3_a_shared_first_layer_is_refused(keys):
    raw = {k: v for k, v in RAW.items() if k != "indexer_types"}
    with pytest.raises(ConfigError, match=r"indexer_types\[0\]='shared'.*full layer below"):
        model_config_from_hf(raw | keys)


@pytest.mark.parametrize(
    "keys, dense",
    [
        ({"first_k_dense_replace": 2}, [0, 1]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [0, 1, 3]),
        ({"mlp_layer_types": ["dense"] * 4 + ["sparse"], "first_k_dense_replace": 1}, [0, 1, 2, 3]),
    ],
)
def test_dense_layers(keys, dense):
    raw = {k: v for k, v in RAW.items() if k != "mlp_layer_types"}
    config = model_config_from_hf(raw | keys)
    assert [i for i, kind in enumerate(config.mlp_layer_types) if kind == "dense"] == dense


@pytest.mark.parametrize(
    "key, value",
    [
        ("model_type", "deepseek_v3"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("attention_dropout", 0.1),
        ("rope_interleave", False),
        ("indexer_rope_interleave", False),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("moe_router_dtype", "bfloat16"),
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", True),
        ("rope_scaling", {"type": "yarn", "factor": 2}),
        ("num_key_value_heads", 1),
        ("qk_head_dim", 192),
        ("dtype", "float8_e4m3fn"),
        ("indexer_types", ["full"] * 4),
        ("indexer_types", ["full", "none", "full", "full", "full"]),
        ("mlp_layer_types", ["dense"] * 6),
        ("n_group", 3),
        ("topk_group", 2),
        ("num_experts_per_tok", 9),
        ("qk_rope_head_dim", 7),
        ("index_topk", 0),
        ("vocab_size", 0),
    ],
)
def test_unsupported_values_are_refused_by_name(key, value):
    changed = RAW | {key: value} | ({"qk_nope_head_dim": 7} if key == "qk_rope_head_dim" else {})
    with pytest.raises(ConfigError) as error:
        model_config_from_hf(changed)
    text = str(error.value)
    assert key in text and repr(value)[:12] in text and "accepted" in text and "\n" not in text


@pytest.mark.parametrize("key, value", [("index_topk_freq", 0), ("index_topk_pattern", "FSX")])
def test_unsupported_schedules_are_refused_by_name(key, value):
    raw = {k: v for k, v in RAW.items() if k != "indexer_types"}
    with pytest.raises(ConfigError, match=f"{key}={value!r}.*accepted"):
        model_config_from_hf(raw | {key: value})


@pytest.mark.parametrize(
    "rope, named",
    [
        ({"rope_type": "default"}, "rope_theta"),
        ({"rope_theta": 0, "rope_type": "default"}, "rope_theta"),
        ({"rope_theta": 1e4, "rope_type": "llama3"}, "rope_type"),
        ({"rope_theta": 1e4, "rope_type": "yarn", "factor": 2}, "original_max_position_embeddings"),
        ({"rope_theta": 1e4, "rope_type": "yarn", "factor": 0.5}, "factor"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_rope_parameters_are_refused_by_name(rope, named):
    with pytest.raises(ConfigError, match=named):
        model_config_from_hf(RAW | {"rope_parameters": rope})


def test_missing_keys_are_listed_together():
    raw = {k: v for k, v in RAW.items() if k not in ("hidden_size", "n_group", "rope_parameters")}
    raw["rope_theta"] = 1e6  # at the top level it is not read
    with pytest.raises(ConfigError, match=r"lacks \['hidden_size', 'n_group', 'rope_parameters'\]"):
        model_config_from_hf(raw)


def test_softmax_scale_grows_only_with_mscale_all_dim():
    yarn = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    plain = model_config_from_hf(RAW).softmax_scale
    assert plain == 14**-0.5
    assert model_config_from_hf(RAW | {"rope_parameters": yarn}).softmax_scale == plain
    assert model_config_from_hf(RAW | {"rope_parameters": yarn | {"mscale": 1.0}}).softmax_scale == plain
    grown = model_config_from_hf(RAW | {"rope_parameters": yarn | {"mscale_all_dim": 0.5}}).softmax_scale
    assert grown == pytest.approx(plain * (0.05 * 1.3862943611198906 + 1) ** 2)


def test_one_or_several_eos_ids():
    assert model_config_from_hf(RAW | {"eos_token_id": 7}).eos_token_id == (7,)
    assert model_config_from_hf(RAW | {"eos_token_id": [7, 8]}).eos_token_id == (7, 8)
    assert model_config_from_hf(RAW | {"eos_token_id": None}).eos_token_id == ()


def test_load_names_the_file(tmp_path):
    with pytest.raises(ConfigError, match="config.json does not exist"):
        config_lib.load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json is not JSON"):
        config_lib.load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=f"{tmp_path}/config.json holds a JSON list; accepted: an object"):
        config_lib.load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    loaded = config_lib.load_model_config(tmp_path, latent_norm_eps=1e-6)
    assert loaded == dataclasses.replace(model_config_from_hf(RAW), latent_norm_eps=1e-6)


def test_configuration_is_hashable():
    """Jitted steps take it as a static argument."""
    assert hash(model_config_from_hf(GLM52)) == hash(model_config_from_hf(dict(GLM52)))
