"""The golden-folder check: it passes what is right, catches what is not, and says which key."""

import importlib.util
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from tiny_models import RAW, tiny_config, tiny_ids, tiny_params

from longstraw_jax.config import RopeParameters
from longstraw_jax.evidence import golden
from longstraw_jax.model import decoder

ROOT = pathlib.Path(__file__).parents[1]
REFERENCE = ROOT.parent / "shared/hf_reference"
SPEC = importlib.util.spec_from_file_location("check_reference", ROOT / "experiments/check_reference.py")
check_reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_reference)

# Other sizes than the stored cases: two groups of routers, two shared experts, an odd length, a batch of two.
CHANGES = dict(
    num_hidden_layers=2,
    indexer_types=["full", "shared"],
    mlp_layer_types=["dense", "sparse"],
    n_group=4,
    topk_group=2,
    n_shared_experts=2,
    latent_norm_eps=None,
    rms_norm_eps=1e-4,
)
TOKENS, DECODED = 21, 4


def write_case(folder, raw, expected, tensors=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    arrays = {key: np.ascontiguousarray(x) for key, x in expected.items()}
    safetensors.numpy.save_file(arrays, folder / "expected.safetensors")
    if tensors is not None:
        arrays = {key: np.ascontiguousarray(x) for key, x in tensors.items()}
        safetensors.numpy.save_file(arrays, folder / "model.safetensors")


@pytest.fixture(scope="module")
def case():
    """Config dict, checkpoint tensors and expected values, from the expanded form without pages."""
    config, hf = tiny_config(**CHANGES), tiny_config(**CHANGES | {"latent_norm_eps": 1e-6})
    base, ids = tiny_params(config), np.asarray(tiny_ids(config, 2, TOKENS))
    model = decoder.make_model(hf, attention="expanded")
    expected = golden.model_values(model, base, ids) | {"input_ids": ids}
    official = golden.model_values(decoder.make_model(config, attention="expanded"), base, ids)
    expected["official_eps.logits"] = official["logits"]
    expected["labels"] = np.where(np.arange(TOKENS) >= TOKENS - 16, ids, -100)
    expected |= golden.gradient_values(model, base, ids, None, expected["labels"])
    expected["prefill.logits"] = expected["logits"][:, :-DECODED]
    expected["decode.logits"] = expected["logits"][:, -DECODED:]
    raw = RAW | {k: v for k, v in CHANGES.items() if k != "latent_norm_eps"}
    return raw, golden.checkpoint_tensors(config, base), expected


@pytest.fixture
def absorbed_only(monkeypatch):
    monkeypatch.setattr(check_reference, "FORMS", ("absorbed",))


def failures(rows):
    return {check.key for row in rows for check in row.checks if not check.passed}


def test_a_folder_of_other_sizes_passes(case, tmp_path, absorbed_only):
    raw, tensors, expected = case
    write_case(tmp_path / "good", raw, expected, tensors)
    rows, remarks = check_reference.check_case(tmp_path / "good")
    assert [(row.form, row.passed) for row in rows] == [("absorbed", True)] and remarks == []
    seen = {check.key for check in rows[0].checks}
    assert seen == set(expected) - {"input_ids", "labels"}


def test_every_wrong_key_is_caught_by_name(case, tmp_path, absorbed_only):
    raw, tensors, expected = case
    wrong = {key: np.array(x) for key, x in expected.items()}
    wrong["logits"][1, 3, 5] += 5e-4
    wrong["hidden.2"][0, 0, 0] = np.nan
    wrong["attn_out.1"][0, 7, 0] += 3e-3
    wrong["final_norm"] = wrong["final_norm"][:, :-1]
    wrong["topk_indices.1"][0, -1, 0] = (set(range(TOKENS)) - set(wrong["topk_indices.1"][0, -1])).pop()
    wrong["index_scores.0"][0, 3, 4] = 0.0
    wrong["router_weights.1"][0, 0, 0] += 1e-3
    wrong["router_experts.1"][1, 2, 0] = 7 if wrong["router_experts.1"][1, 2, 0] != 7 else 6
    wrong["grad.model.layers.1.mlp.experts.3.up_proj.weight"] *= 1.001
    wrong["loss"] += 1e-4
    wrong["grad_norm"] *= 1.001
    wrong["official_eps.logits"] = expected["logits"]
    wrong["decode.logits"][0, -1, 0] += 1e-3
    wrong["prefill.logits"][1, 0, 0] += 1e-3
    changed = {key for key in wrong if not np.array_equal(wrong[key], expected[key])}
    write_case(tmp_path / "wrong", raw, wrong, tensors)
    rows, _ = check_reference.check_case(tmp_path / "wrong")
    assert failures(rows) == changed and not any(row.passed for row in rows)


def test_mtp_is_noted_and_unknown_keys_are_named(case, tmp_path):
    raw, tensors, expected = case
    some = {"input_ids": expected["input_ids"], "logits": expected["logits"]}
    mtp = {"mtp.logits": expected["logits"], "topk_indices.2": expected["topk_indices.0"]}
    informational = {"exact_angle.logits": expected["logits"] + 1}
    write_case(tmp_path / "c", raw, some | mtp | informational | {"speed.of_light": np.ones(1)}, tensors)
    rows, remarks = check_reference.check_case(tmp_path / "c")
    assert [(row.form, row.passed) for row in rows] == [("absorbed", True), ("expanded", True), ("mtp", True)]
    assert "not yet run: MTP is not implemented" in check_reference.table_line(rows[-1])
    assert "c: not compared: speed.of_light" in remarks
    assert any("exact_angle" in remark and "informational" in remark for remark in remarks)


def test_comparison_is_strict():
    compare = check_reference.compare
    assert compare("logits", np.zeros(3), np.full(3, np.nan)).passed is False
    assert compare("logits", np.full(3, np.nan), np.zeros(3)).passed is False
    assert compare("logits", np.zeros((1, 3)), np.zeros(3)).reason == "shape (1, 3), expected (3,)"
    assert compare("topk_indices.0", np.asarray([[3, 1, -1]]), np.asarray([[1, 3]])).passed
    assert compare("topk_indices.0", np.asarray([[3, 1, 0]]), np.asarray([[1, 3]])).error == 1
    masked = np.asarray([0.5, -np.inf])
    assert compare("index_scores.0", masked, masked).passed
    assert not compare("index_scores.0", np.asarray([0.5, 0.0]), masked).passed
    assert compare("grad.x.weight", np.asarray([1000.05, 0]), np.asarray([1000.0, 0])).passed
    assert not compare("grad.x.weight", np.asarray([1e-6, 0]), np.asarray([1.1e-6, 0])).passed


def rotary_folder(folder, changed=0.0):
    """Tables of a configuration that is no model: its rotary dim exceeds the indexer's."""
    raw = {"qk_rope_head_dim": 64, "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"}}
    positions = np.asarray([0, 5, 1048575], np.int32)
    values = golden.rotary_values(RopeParameters(8e6), 64, jnp.asarray(positions))
    expected = {f"default_1m.{key}": np.asarray(x) for key, x in values.items()} | {"positions": positions}
    expected["default_1m.cos"] = expected["default_1m.cos"] + np.float32(changed)
    write_case(folder, raw, expected)


def main(*arguments):
    """Exit status of the command, in this process."""
    with pytest.raises(SystemExit) as stop:
        check_reference.main(check_reference._parse(["check_reference", *arguments]))
    return stop.value.code


def test_exit_status_and_table(tmp_path, capsys):
    rotary_folder(tmp_path / "right")
    assert main(f"--dir={tmp_path}") == 0
    assert main(f"--dir={tmp_path / 'right'}") == 0
    rotary_folder(tmp_path / "wrong", changed=1e-5)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/expected.safetensors").write_bytes(b"not a file of tensors")
    (tmp_path / "notes").mkdir()
    capsys.readouterr()
    assert main(f"--dir={tmp_path}") == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[1:4]] == ["broken", "right", "wrong"]
    assert [line.split()[-1] for line in out[1:4]] == ["FAIL", "pass", "FAIL"]
    assert any(line.startswith("wrong rotary: default_1m.cos (rotary)") for line in out)
    assert any(line.startswith("broken -: ") for line in out)


def test_a_case_with_nothing_to_compare_fails(tmp_path):
    write_case(tmp_path / "empty", RAW, {"something": np.ones(2)})
    assert main(f"--dir={tmp_path}") == 1


@pytest.mark.parametrize(
    "arguments, named",
    [
        ([], "--dir is missing"),
        (["--dir=/no/such/folder"], "--dir=/no/such/folder holds no case"),
        (["--dir=X", "extra"], "'extra'"),
        (["--folder=X"], "folder"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments, named, capsys):
    assert main(*(["--dir="] if not arguments else []), *arguments) == 2
    err = capsys.readouterr().err
    assert named in err and "accepted: " in err and err.count("\n") == 1


@pytest.mark.skipif(not REFERENCE.is_dir(), reason=f"{REFERENCE} is not there")
@pytest.mark.parametrize("name", sorted(f.name for f in REFERENCE.glob("*/")) if REFERENCE.is_dir() else [])
def test_port_equals_transformers(name, absorbed_only):
    """Every stored case, in the form that training runs; the command checks both."""
    rows, _ = check_reference.check_case(REFERENCE / name)
    assert rows and failures(rows) == set() and all(row.passed for row in rows)
