"""The full-width slice: which layers and experts, what it refuses, its adapters."""

import json

import pytest
import tiny_jobs  # puts experiments/ on the path

import model_slice  # isort: skip

GLM52 = json.loads((tiny_jobs.EXPERIMENTS / "configs" / "glm52.json").read_text())


def test_a_slice_is_a_group_of_sparse_layers():
    raw = model_slice.sliced(GLM52, 4, 0)
    assert raw["index_topk_pattern"] == "FSSS" and raw["mlp_layer_types"] == ["sparse"] * 4
    assert raw["n_routed_experts"] == 256 and raw["hidden_size"] == GLM52["hidden_size"]
    whole = model_slice.sliced(GLM52, 78, 8)
    assert whole["index_topk_pattern"].count("F") == 21 and whole["mlp_layer_types"].count("dense") == 3
    assert whole["n_routed_experts"] == 8


@pytest.mark.parametrize(
    "layers, experts, said",
    [
        (0, 0, "--layers=0; accepted: 1 to 72, or all 78"),
        (73, 0, "--layers=73; accepted: 1 to 72, or all 78"),
        (4, 7, r"--experts=7; accepted: 0 \(all\), or 8 to 256"),
        (4, 257, "--experts=257"),
    ],
)
def test_a_slice_that_is_not_there_is_refused(layers, experts, said):
    with pytest.raises(ValueError, match=said):
        model_slice.sliced(GLM52, layers, experts)


def test_an_architecture_without_such_a_layer_is_refused():
    raw = GLM52 | {"mlp_layer_types": ["dense"] * 78}
    said = r"--architecture: the kinds of its layers are .*; accepted: \('full', 'sparse'\) among them, or --layers=78"
    with pytest.raises(ValueError, match=said):
        model_slice.sliced(raw, 4, 0)
    assert model_slice.sliced(raw, 78, 0)["mlp_layer_types"] == ["dense"] * 78


def test_positions_past_the_native_range_are_yarn_s():
    raw = model_slice.load(model_slice.ARCHITECTURE, 4, 8)
    assert model_slice.model_config(raw, 1_048_576).rope_parameters.rope_type == "default"
    longer = model_slice.model_config(raw, 2_097_216)
    assert longer.rope_parameters.rope_type == "yarn" and longer.max_position_embeddings == 2_097_216


def test_adapters_are_on_every_target_of_the_slice():
    def scales(layers):
        config = model_slice.model_config(model_slice.load(model_slice.ARCHITECTURE, layers, 8), 64)
        return model_slice.adapters(config, 4).scales()

    assert "mlp.gate_proj" in scales(78) and "mlp.gate_proj" not in scales(4)
    assert {"self_attn.kv_b_proj", "mlp.experts.down_proj", "lm_head"} <= scales(4).keys()
    assert set(scales(4).values()) == {2.0}
