"""The finding's figures: by hand on small numbers, and beside autodiff over whole sequences."""

import json
import types

import numpy as np
import pytest
import tiny_jobs  # puts experiments/ on the path

from longstraw_jax import config as config_lib
from longstraw_jax import rollout
from longstraw_jax.evidence import parity
from longstraw_jax.model import decoder

import model_slice  # isort: skip
import prefix_gradient  # isort: skip


def test_figures_of_two_vectors():
    found = prefix_gradient.figures([np.float32([3.0]), np.float32([0.0])], [np.float32([3.0]), np.float32([4.0])])
    assert found["cosine"] == pytest.approx(0.6) and found["relative_l2"] == pytest.approx(0.8)
    assert found["prompt_share"] == pytest.approx(16 / 25)
    assert (found["norm_detached"], found["norm_exact"]) == (3.0, 5.0)
    nothing = prefix_gradient.figures([np.zeros(2)], [np.zeros(2)])
    assert nothing["cosine"] is None and nothing["relative_l2"] is None and nothing["prompt_share"] is None


@pytest.mark.parametrize("given", [["x"], ["1"], [], ["4", ""]])
def test_lengths_are_integers_above_one(given):
    with pytest.raises(ValueError, match=f"--tokens={','.join(given)}; accepted: integers above 1"):
        prefix_gradient.lengths_of(given)


def test_a_prompt_file_that_is_too_short_is_refused(tmp_path):
    np.save(tmp_path / "prompt.npy", np.arange(5))
    assert prefix_gradient.read_prompt(tmp_path / "prompt.npy", 3).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"holds int64\[5\]; accepted: \[6\] ids or more"):
        prefix_gradient.read_prompt(tmp_path / "prompt.npy", 6)


def test_the_figures_are_those_of_autodiff_over_the_whole_sequence(tmp_path):
    """fp32: gradients agree within 1e-5 of their norm, so figures agree within 1e-4."""
    architecture = tmp_path / "config.json"
    architecture.write_text(json.dumps(tiny_jobs.RAW | {"mlp_layer_types": ["sparse", "sparse"]}))
    values = types.SimpleNamespace(
        tokens=["100", "200"], checkpoint="", prompt_file="", layers=2, experts=0, group=2, response=4, chunk=64,
        rank=2, b_std=0.02, dtype="float32", kernels="auto", seed=0, architecture=str(architecture), out=str(tmp_path),
    )  # fmt: skip
    result = prefix_gradient.run(values)
    assert result["complete"] and [row["tokens"] for row in result["lengths"]] == [100, 200]
    assert json.loads((tmp_path / "prefix_gradient.json").read_text()) == json.loads(json.dumps(result))
    assert (tmp_path / "prefix_gradient.png").stat().st_size > 10_000

    config = config_lib.model_config_from_hf(model_slice.load(architecture, 2, 0))
    model = decoder.make_model(config, lora=model_slice.adapters(config, 2))
    side = parity.Side(model, decoder.init_params(config, 0), prefix_gradient.moved(model, 1, 0.02))
    prompt = np.random.default_rng(2).integers(0, config.vocab_size, 200, np.int32)
    group = prefix_gradient.group_of(config, int(prompt[-1]), 2, 4, 3)
    policy = rollout.PolicyConfig(eos_ids=(), capacity=200, group=2, max_new_tokens=4, chunk=64)
    both = [
        parity.full_gradient(side, policy, prompt, group, **parity.mode_masks(mode, 200, 204))[0]
        for mode in ("detached", "exact")
    ]
    wanted, found = prefix_gradient.compare(model, *both), result["lengths"][1]
    assert found["targets"].keys() == set(model_slice.TARGETS) and found["layers"].keys() == {"0", "1"}
    assert 0.1 < found["all"]["relative_l2"] and found["targets"]["lm_head"]["relative_l2"] < 1e-4
    for part in ("targets", "layers"):
        for name, figures in wanted[part].items():
            assert found[part][name] == pytest.approx(figures, rel=1e-4, abs=1e-4), (part, name)
    assert found["all"] == pytest.approx(wanted["all"], rel=1e-4, abs=1e-4)
