"""Receipts hold what they must, follow their published schema and are written whole."""

import json
import os
import subprocess
from pathlib import Path

import jax
import jsonschema
import pytest
from run_folders import CONFIG, copy_run, make_run, make_step, make_steps, receipt_parts

from longstraw_jax.evidence.receipt import (
    CONFIG_FILE,
    RECEIPT_FILE,
    artifact_path,
    bind_config,
    describe_code,
    receipt_schema_problems,
    step_schema_problems,
    write_receipt,
)
from longstraw_jax.fingerprint import sha256_file, sha256_json
from longstraw_jax.io.metrics import STEPS_FILE

SCHEMA = Path(__file__).parents[1] / "longstraw_jax/evidence/receipt.schema.json"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def run(finished, tmp_path):
    return copy_run(finished, tmp_path)


def _receipt(run_dir: Path) -> dict:
    return json.loads((run_dir / RECEIPT_FILE).read_text())


def test_holds_what_binds_the_run(run):
    run_dir, dataset = run
    receipt = _receipt(run_dir)
    assert receipt["config"] == {"sha256": sha256_json(CONFIG), "resolved": CONFIG}
    assert receipt["devices"] == {"platform": "cpu", "kind": "cpu", "count": 32, "processes": 1}
    assert receipt["packages"]["jax"] == jax.__version__
    assert receipt["dataset"]["files"] == [{"path": str(dataset), "sha256": sha256_file(dataset)}]
    assert receipt["memory_source"] == "peak resident set of the process"
    listed = {row["path"]: row for row in receipt["artifacts"]}
    assert listed[STEPS_FILE]["sha256"] == sha256_file(run_dir / STEPS_FILE)
    assert listed[CONFIG_FILE]["bytes"] == (run_dir / CONFIG_FILE).stat().st_size
    assert [row["claim"] for row in receipt["claims"]] == ["capacity", "gradient", "learning", "quality"]
    assert [row["status"] for row in receipt["claims"]] == ["shown", "shown", "shown", "not measured"]


def test_schema_is_valid_and_followed(run):
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(_receipt(run[0]), schema)


def test_schema_allows_no_unknown_or_missing_field(run):
    receipt = _receipt(run[0])
    assert receipt_schema_problems({**receipt, "extra": 1})
    assert receipt_schema_problems({**receipt, "figures": {**receipt["figures"], "extra": 1}})
    for field in receipt:
        assert receipt_schema_problems({key: value for key, value in receipt.items() if key != field}), field
    for name in receipt["figures"]:
        figures = {key: value for key, value in receipt["figures"].items() if key != name}
        assert receipt_schema_problems({**receipt, "figures": figures}), name


def test_step_schema_allows_no_unknown_or_missing_field():
    step = make_step(1, [0.0, None])
    assert step_schema_problems([step]) == []
    assert "step 1" in step_schema_problems([{**step, "extra": 1}])[0]
    for field in step:
        assert step_schema_problems([{key: value for key, value in step.items() if key != field}]), field
    assert "step 2.loss_count: -1" in step_schema_problems([step, {**step, "loss_count": -1}])[0]


def test_nothing_stays_beside_the_receipt(finished):
    assert not [name for name in os.listdir(finished[0]) if name.startswith(".")]


def test_dataset_in_the_run_folder_is_recorded_relative_to_it(run):
    run_dir, dataset = run
    inside = run_dir / "rows.jsonl"
    inside.write_bytes(dataset.read_bytes())
    receipt = write_receipt(run_dir, **receipt_parts(run_dir, inside))
    assert receipt["dataset"]["files"][0]["path"] == "rows.jsonl"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"artifacts": {"absent.bin": "adapter"}}, "'absent.bin' is missing"),
        ({"artifacts": {"../rows.jsonl": "adapter"}}, "outside the run folder"),
        ({"artifacts": {"adapter": "adapter"}}, "not a regular file"),
        ({"artifacts": {"parity.json": "picture"}}, "'picture' is not one of"),
        ({"config": {**CONFIG, "seed": 4}}, "config.seed = 3 there, 4 given"),
        ({"prefix_gradient_mode": "frozen"}, "mode = 'detached'; the receipt says 'frozen'"),
        ({"weights_fingerprint": "xyz"}, "receipt.weights_fingerprint"),
        ({"mesh_shape": {}}, "receipt.mesh"),
        ({"claims": [{"claim": "learning", "status": "shown", "evidence": []}]}, "claim = 'learning'; accepted"),
        ({"claims": [{"claim": "quality", "status": "shown", "evidence": []}]}, "shown without evidence"),
        ({"claims": [{"claim": "quality", "status": "shown", "evidence": ["figures/x"]}]}, "'figures/x' is not in"),
        ({"window": 0}, "window = 0"),
    ],
)
def test_refuses_and_leaves_the_old_receipt(run, change, message):
    run_dir, dataset = run
    before = (run_dir / RECEIPT_FILE).read_bytes()
    with pytest.raises(ValueError, match=message):
        write_receipt(run_dir, **{**receipt_parts(run_dir, dataset), **change})
    assert (run_dir / RECEIPT_FILE).read_bytes() == before


def test_refuses_a_broken_step_record(run):
    run_dir, dataset = run
    steps = make_steps(2)
    del steps[1]["loss_count"]
    (run_dir / STEPS_FILE).write_text("".join(json.dumps(step) + "\n" for step in steps))
    with pytest.raises(ValueError, match="step 2: 'loss_count' is a required property"):
        write_receipt(run_dir, **receipt_parts(run_dir, dataset))


def test_bind_config_takes_the_same_and_names_the_difference(tmp_path):
    digest = bind_config(tmp_path / "new", CONFIG)
    assert bind_config(tmp_path / "new", {**CONFIG, "targets": ("q_a", "o")}) == digest == sha256_json(CONFIG)
    other = {**CONFIG, "grpo": {**CONFIG["grpo"], "clip_high": 0.2}}
    with pytest.raises(ValueError, match=r"config\.grpo\.clip_high = 0\.28 there, 0\.2 given"):
        bind_config(tmp_path / "new", other)
    with pytest.raises(ValueError, match=r"config\.beta = absent there, 0\.1 given"):
        bind_config(tmp_path / "new", {**CONFIG, "beta": 0.1})


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_code_of_a_clean_a_dirty_and_no_checkout(tmp_path, monkeypatch):
    package = tmp_path / "repository" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    _git(tmp_path / "repository", "init", "-q")
    _git(tmp_path / "repository", "add", ".")
    _git(tmp_path / "repository", "commit", "-q", "-m", "one")
    commit = _git(package, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert describe_code(package) == {"commit": commit, "dirty": False, "reason": None}
    (tmp_path / "repository" / "new.py").write_text("x")
    assert describe_code(package)["dirty"] is True
    plain = tmp_path / "plain"
    plain.mkdir()
    found = describe_code(plain)
    assert found["commit"] == "unknown" and found["dirty"] is None and "not a git repository" in found["reason"]
    # Installed inside a checkout that does not track it.
    inner = tmp_path / "repository" / "venv"
    inner.mkdir()
    (inner / "__init__.py").write_text("")
    assert describe_code(inner)["commit"] == "unknown"
    monkeypatch.setenv("PATH", str(plain))
    assert "git" in describe_code(package)["reason"]


def test_artifact_path_refuses_links_on_the_way(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "f").write_text("x")
    (tmp_path / "link").symlink_to("real")
    assert artifact_path(tmp_path, "real/f") == tmp_path / "real" / "f"
    for relative, message in [
        ("link/f", "symbolic link 'link'"),
        ("real/../real/f", "outside"),
        ("/etc/passwd", "outside"),
        ("", "outside"),
    ]:
        with pytest.raises(ValueError, match=message):
            artifact_path(tmp_path, relative)
