"""A run folder is broken at each place that a receipt covers; verification says which and exits 1."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import ADAPTER, copy_run, edit_receipt, make_run, make_step, receipt_parts

from longstraw_jax.evidence.receipt import CONFIG_FILE, RECEIPT_FILE, write_receipt
from longstraw_jax.evidence.verify import MISMATCH, NOT_CHECKED, main, verify
from longstraw_jax.fingerprint import sha256_file
from longstraw_jax.io.metrics import STEPS_FILE


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def run(finished, tmp_path):
    return copy_run(finished, tmp_path)


def _mismatches(run_dir: Path) -> set[str]:
    return {row.check for row in verify(run_dir) if row.status == MISMATCH}


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _relist(run_dir: Path) -> None:
    """Brings every artifact hash in the receipt up to date, so that only deeper checks can object."""

    def change(receipt):
        for row in receipt["artifacts"]:
            path = run_dir / row["path"]
            row |= {"sha256": sha256_file(path), "bytes": path.stat().st_size}

    edit_receipt(run_dir, change)


def test_an_untouched_run_holds(finished):
    assert not _mismatches(finished[0])


def test_a_moved_run_holds(run, tmp_path, capsys):
    run_dir, _ = run
    moved = tmp_path / "elsewhere"
    os.rename(run_dir, moved)
    assert main([str(moved)]) == 0
    printed = capsys.readouterr().out
    assert MISMATCH not in printed and "0 mismatched" in printed
    assert {row.check for row in verify(moved) if row.status == NOT_CHECKED} == {"weights fingerprint"}


@pytest.mark.parametrize(
    "name, check",
    [
        (STEPS_FILE, f"artifact {STEPS_FILE}"),
        (CONFIG_FILE, f"artifact {CONFIG_FILE}"),
        (ADAPTER, f"artifact {ADAPTER}"),
        ("adapter/adapter_config.json", "artifact adapter/adapter_config.json"),
        ("plots/reward.png", "artifact plots/reward.png"),
        ("parity.json", "artifact parity.json"),
    ],
)
def test_one_changed_bit_of_a_file_is_caught(run, name, check):
    run_dir, _ = run
    _flip(run_dir / name, -1)
    assert check in _mismatches(run_dir)
    assert main([str(run_dir)]) == 1
    _flip(run_dir / name, -1)
    assert main([str(run_dir)]) == 0


@pytest.mark.parametrize("name", [STEPS_FILE, CONFIG_FILE, ADAPTER])
def test_a_changed_byte_is_caught_wherever_it_is(run, name):
    run_dir, _ = run
    size = (run_dir / name).stat().st_size
    for at in range(0, size, size // 8):
        _flip(run_dir / name, at)
        assert f"artifact {name}" in _mismatches(run_dir), at
        _flip(run_dir / name, at)


def test_a_changed_dataset_is_caught_and_an_absent_one_is_said(run, capsys):
    run_dir, dataset = run
    _flip(dataset, 3)
    assert _mismatches(run_dir) == {f"dataset {dataset}"} and main([str(run_dir)]) == 1
    dataset.unlink()
    capsys.readouterr()
    assert main([str(run_dir)]) == 0
    assert "not present: not checked" in capsys.readouterr().out


def test_each_of_several_dataset_files_is_checked(run):
    run_dir, dataset = run
    second = dataset.with_name("more.jsonl")
    second.write_text('{"prompt": "c"}\n')
    files = {path: sha256_file(path) for path in (dataset, second)}
    write_receipt(run_dir, **receipt_parts(run_dir, dataset) | {"dataset_files": files})
    assert not _mismatches(run_dir)
    _flip(second, 3)
    assert _mismatches(run_dir) == {f"dataset {second}"}


def test_a_dataset_of_the_run_folder_must_be_there(run):
    run_dir, dataset = run
    inside = run_dir / "rows.jsonl"
    inside.write_bytes(dataset.read_bytes())
    write_receipt(run_dir, **receipt_parts(run_dir, inside))
    assert not _mismatches(run_dir)
    inside.unlink()
    assert _mismatches(run_dir) == {"dataset rows.jsonl"}


@pytest.mark.parametrize("edit", ["extra", "missing_last", "missing_middle", "swapped", "cut", "blank", "empty"])
def test_extra_missing_and_moved_step_lines_are_caught(run, edit):
    run_dir, _ = run
    path = run_dir / STEPS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    changed = {
        "extra": [*lines, json.dumps(make_step(13, [0.0] * 4)).encode() + b"\n"],
        "missing_last": lines[:-1],
        "missing_middle": [*lines[:5], *lines[6:]],
        "swapped": [lines[1], lines[0], *lines[2:]],
        "cut": [*lines[:-1], lines[-1][:-1]],
        "blank": [*lines, b"\n"],
        "empty": [],
    }[edit]
    path.write_bytes(b"".join(changed))
    assert f"artifact {STEPS_FILE}" in _mismatches(run_dir)
    _relist(run_dir)  # even with a matching hash in the receipt
    assert _mismatches(run_dir) and main([str(run_dir)]) == 1


FIGURES = [
    "steps",
    "skipped_steps",
    "nonfinite_values",
    "unscorable_rewards",
    "truncated_responses",
    "prompt_tokens",
    "response_tokens",
    "total_tokens",
    "peak_bytes",
    "largest_prefix_age",
    "largest_log_ratio",
    "largest_sampling_log_ratio",
    "first_mean",
    "last_mean",
    "first_standard_error",
    "last_standard_error",
    "rise",
    "rise_standard_error",
    "rise_in_standard_errors",
]


def test_an_edited_figure_is_caught_though_signed_again(run):
    run_dir, _ = run
    untouched = (run_dir / RECEIPT_FILE).read_bytes()
    for name in FIGURES:

        def change(receipt, name=name):
            figure = receipt["figures"][name]
            figure["value"] = 1.0 if figure["value"] is None else figure["value"] + 1

        edit_receipt(run_dir, change)
        assert _mismatches(run_dir) == {f"figure {name}"}
        (run_dir / RECEIPT_FILE).write_bytes(untouched)


def test_edited_columns_are_caught(run):
    run_dir, _ = run

    def change(receipt):
        receipt["figures"]["row_ids"]["value"][0] = ["other"]
        receipt["figures"]["loss"]["value"][2] = 0.0
        receipt["figures"]["phase_seconds"]["value"]["replay"]["median"] = 0.1
        receipt["figures"]["adapter_fingerprint"]["value"] = "0" * 16

    edit_receipt(run_dir, change)
    expected = {f"figure {name}" for name in ("row_ids", "loss", "phase_seconds", "adapter_fingerprint")}
    assert _mismatches(run_dir) == expected


def test_an_edited_rule_or_claim_is_caught(run):
    run_dir, _ = run
    edit_receipt(run_dir, lambda receipt: receipt["figures"]["rise"].update(rule="column"))
    assert _mismatches(run_dir) == {"receipt schema"}
    edit_receipt(run_dir, lambda receipt: receipt["figures"]["rise"].update(rule="rise"))
    edit_receipt(run_dir, lambda receipt: receipt["claims"][2].update(status="not shown"))
    assert _mismatches(run_dir) == {"claim learning"}
    edit_receipt(run_dir, lambda receipt: receipt["claims"][2].update(status="shown"))
    edit_receipt(run_dir, lambda receipt: receipt["claims"][3].update(status="shown"))
    assert _mismatches(run_dir) == {"claim evidence"}


def test_an_edit_that_is_not_signed_again_is_caught(run):
    run_dir, _ = run
    text = (run_dir / RECEIPT_FILE).read_text()
    (run_dir / RECEIPT_FILE).write_text(text.replace('"sampling": 3', '"sampling": 4'))
    assert _mismatches(run_dir) == {"receipt sha256"}


def test_an_edited_config_is_caught_though_signed_again(run):
    run_dir, _ = run
    path = run_dir / CONFIG_FILE
    path.write_text(path.read_text().replace("0.28", "0.29"))
    _relist(run_dir)
    assert _mismatches(run_dir) == {f"{CONFIG_FILE} content"}
    edit_receipt(run_dir, lambda receipt: receipt["config"]["resolved"]["grpo"].update(clip_high=0.29))
    assert _mismatches(run_dir) == {"config sha256"}


def test_an_unlisted_step_log_is_caught(run):
    run_dir, _ = run
    edit_receipt(run_dir, lambda receipt: receipt["artifacts"].pop(0))
    assert _mismatches(run_dir) == {"artifact list"}
    edit_receipt(run_dir, lambda receipt: receipt["artifacts"].append(receipt["artifacts"][0]))
    assert "artifact list" in _mismatches(run_dir)


def test_links_are_refused(run):
    run_dir, _ = run
    real = run_dir.parent / "real.safetensors"
    os.rename(run_dir / ADAPTER, real)
    (run_dir / ADAPTER).symlink_to(real)
    assert _mismatches(run_dir) == {"no symbolic links", f"artifact {ADAPTER}"}
    os.rename(real, run_dir / ADAPTER)
    assert not _mismatches(run_dir)
    (run_dir / "unlisted").symlink_to(run_dir.parent, target_is_directory=True)
    assert _mismatches(run_dir) == {"no symbolic links"}
    os.unlink(run_dir / "unlisted")
    os.rename(run_dir / RECEIPT_FILE, run_dir.parent / RECEIPT_FILE)
    (run_dir / RECEIPT_FILE).symlink_to(run_dir.parent / RECEIPT_FILE)
    assert main([str(run_dir)]) == 1


@pytest.mark.parametrize("path", ["../rows.jsonl", "/etc/hostname", "adapter/../../rows.jsonl", "adapter"])
def test_paths_that_escape_are_refused(run, path):
    run_dir, dataset = run

    def change(receipt):
        digest = {"sha256": sha256_file(dataset), "bytes": dataset.stat().st_size}
        receipt["artifacts"].append({"path": path, "kind": "report", **digest})

    edit_receipt(run_dir, change)
    assert _mismatches(run_dir) == {f"artifact {path}"}
    edit_receipt(run_dir, lambda receipt: receipt["artifacts"].pop())
    if not path.startswith("/"):
        edit_receipt(run_dir, lambda receipt: receipt["dataset"]["files"][0].update(path=path))
        assert _mismatches(run_dir) == {f"dataset {path}"}


def test_a_missing_artifact_is_caught(run):
    run_dir, _ = run
    (run_dir / ADAPTER).unlink()
    assert _mismatches(run_dir) == {f"artifact {ADAPTER}"}


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b"[" * 100_000, b'{"a": 1, "a": 1}', b'"\\ud800"']
)
def test_a_broken_receipt_exits_1(run, data):
    run_dir, _ = run
    (run_dir / RECEIPT_FILE).write_bytes(data)
    assert main([str(run_dir)]) == 1


def test_numbers_too_large_to_sum_are_a_mismatch(run):
    run_dir, _ = run
    text = (run_dir / STEPS_FILE).read_text()
    (run_dir / STEPS_FILE).write_text(text.replace('"capture": 1.0', '"capture": 1e308'))
    assert "figures" in _mismatches(run_dir)


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--help"], ["/nonexistent"], ["{tmp}"]])
def test_bad_usage_exits_2_in_one_line(tmp_path, capsys, arguments):
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "accepted: " in captured.err


def test_command_line(run):
    run_dir, _ = run
    command = [sys.executable, "-m", "longstraw_jax.evidence.verify", str(run_dir)]
    whole = subprocess.run(command, capture_output=True, text=True)
    assert whole.returncode == 0 and whole.stderr == ""
    _flip(run_dir / STEPS_FILE, 40)
    broken = subprocess.run(command, capture_output=True, text=True)
    assert broken.returncode == 1 and f"MISMATCH     artifact {STEPS_FILE}" in broken.stdout
