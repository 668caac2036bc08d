"""The comparison with transformers + PEFT: what its table counts, and both sides on one tiny model."""

import json
import subprocess
import sys
import types

import numpy as np
import pytest
import safetensors.numpy
import tiny_jobs  # puts experiments/ on the path

from longstraw_jax.io import adapter

import compare_peer  # isort: skip

PEER = tiny_jobs.EXPERIMENTS / "peers" / "hf_full_sequence.py"
LAYER = "base_model.model.model.layers.0."
FACTS = {"lengths": [96, 160], "expert_bytes": 10, "all_experts": 256, "experts": 64}


def folder_of(path, ours, peer, places=None):
    """The files that both sides leave."""
    for name, tensors in (("ours_gradient", ours), ("ours_places", places or {k: v * 0 + 1 for k, v in ours.items()})):
        (path / name).mkdir(parents=True)
        safetensors.numpy.save_file(tensors, path / name / adapter.WEIGHTS)
    np.savez(path / "peer.npz", logprobs=np.float32([[-1.5, -2.0]]), **peer)
    steps = [{"tokens": 96, "group": 2, "seconds": 2.0, "peak_bytes": 3e9}, {"tokens": 160, "group": 2, "fits": False}]
    one = {"slice": FACTS, "steps": [steps[0] | {"mode": "exact"}], "logprobs": [[-1.0, -2.0]]}
    two = {"slice": FACTS, "steps": steps, "longest_tokens": 96, "shortest_refused": 160, "weight_bytes": 1}
    (path / "ours.json").write_text(json.dumps(one))
    (path / "peer.json").write_text(json.dumps(two))
    return path


def test_the_table_tells_both_sides_and_their_agreement(tmp_path):
    a, b = LAYER + "self_attn.q_a_proj.lora_A.weight", "base_model.model.lm_head.lora_B.weight"
    ours = {a: np.float32([[3, 4]]), b: np.float32([[1, 0]])}
    result, lines = compare_peer.table(folder_of(tmp_path, ours, {a: np.float32([[4, 3]]), b: ours[b]}))
    found = result["agreement"]
    assert found["logprobs"] == {"largest_difference": 0.5, "mean_difference": 0.25}
    assert found["gradient"]["groups"]["self_attn.q_a_proj"]["cosine"] == pytest.approx(24 / 25)
    assert found["gradient"]["groups"]["lm_head"] == {"cosine": 1.0, "relative_l2": 0.0}
    assert result["left_out_bytes"] == 1920
    text = "\n".join(lines)
    assert "     160     2   transformers       out of memory" in text
    assert "longest prompt that fits is 96 tokens, 160 do not" in text


def test_numbers_that_we_do_not_train_are_not_compared(tmp_path):
    name = LAYER + "mlp.experts.base_layer.lora_B.weight"
    args = {name: np.float32([[2, 0]])}, {name: np.float32([[2, 9]])}, {name: np.float32([[1, 0]])}
    assert compare_peer.agreement(folder_of(tmp_path, *args))["gradient"]["relative_l2"] == 0


def test_a_gradient_that_the_peer_lacks_is_an_error(tmp_path):
    name = LAYER + "self_attn.o_proj.lora_A.weight"
    with pytest.raises(ValueError, match="peer.npz lacks .*o_proj"):
        compare_peer.agreement(folder_of(tmp_path, {name: np.float32([[2]])}, {}))


@pytest.mark.hf
def test_the_peer_s_gradient_of_the_whole_sequence_is_our_exact_one(tmp_path):
    """fp32; the tolerances are those of gradient parity and of the reference's logits."""
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    raw = tiny_jobs.RAW | {"mlp_layer_types": ["sparse"] * 2, "index_n_heads": 16, "n_routed_experts": 8}
    raw |= {"pad_token_id": 0, "eos_token_id": [1]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    values = types.SimpleNamespace(
        dir=str(tmp_path / "run"), lengths=["96", "160"], groups=["2"], response=8, layers=2, experts=0, rank=2,
        chunk=64, dtype="float32", kernels="auto", seed=0, architecture=str(tmp_path / "config.json"),
    )  # fmt: skip
    compare_peer.run_ours(values)
    asked = [sys.executable, PEER, f"--dir={values.dir}", "--ceiling=200", "--resolution=32"]
    subprocess.run(asked, check=True, timeout=600)
    result, _ = compare_peer.table(tmp_path / "run")
    assert result["peer"]["complete"] and result["peer"]["longest_tokens"] == 200
    assert result["agreement"]["logprobs"]["largest_difference"] <= 1e-5
    assert result["agreement"]["gradient"]["relative_l2"] <= 1e-5
    assert result["agreement"]["gradient"]["zero_only_wanted"] == 0


@pytest.mark.hf
@pytest.mark.parametrize("fitting, found", [(10_000, (32, None)), (21, (21, 22)), (16, (16, 17)), (7, (0, 8))])
def test_the_longest_prompt_is_found_by_halves(monkeypatch, fitting, found):
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(PEER.parent)
    import hf_full_sequence

    assert hf_full_sequence.longest(lambda length: length <= fitting, [8, 16, 32], 1) == found
