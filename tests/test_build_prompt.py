"""The payload command: three files, under 500 MB of memory, and the main job takes them."""

import json
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest
import tiny_jobs
import train_grpo

from longstraw_jax import fingerprint
from longstraw_jax.evidence import verify

import build_prompt  # isort: skip

# Runs the command and prints the peak memory of its process; getrusage would start at the parent's size.
MEASURED = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    from longstraw_jax.evidence import memory
    print(memory._process_peak())
"""


def build(out, *arguments):
    command = [sys.executable, "-c", MEASURED, str(tiny_jobs.EXPERIMENTS / "build_prompt.py"), f"--out={out}"]
    given = [f"--checkpoint={tiny_jobs.checkpoint()}", "--question=Digits?", *arguments]
    return subprocess.run([*command, *given], capture_output=True, text=True)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A prompt of the other tests' length, so that the main job shares their programs."""
    out = tmp_path_factory.mktemp("short")
    done = build(out, "--tokens=77", "--depth=0.5", "--answer=7")
    assert done.returncode == 0, done.stderr
    return out


def test_two_million_tokens_take_less_than_500_mb(tmp_path):
    done = build(tmp_path, "--tokens=2097152", "--depth=0.5")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 500_000_000
    ids, record = np.load(tmp_path / "prompt.npy", mmap_mode="r"), json.loads((tmp_path / "prompt.json").read_text())
    assert ids.shape == (2_097_152,) and record["sha256"] == fingerprint.sha256_file(tmp_path / "prompt.npy")
    start, stop = record["question_at"]
    assert bytes(ids[start:stop].astype(np.uint8)).decode() == "\n\nDigits?\n\n"
    assert abs(start / ids.size - 0.5) < 1e-4


def test_the_main_job_takes_the_prompt_and_its_receipt_binds_it(short, tmp_path):
    changes = {"data.paths": (str(short / "rows.jsonl"),), "data.prompt_file": str(short / "prompt.npy"), "steps": 1}
    receipt = train_grpo.run(tiny_jobs.config(**changes), tmp_path / "run")
    assert {"path": str(short / "prompt.npy"), "sha256": fingerprint.sha256_file(short / "prompt.npy")} in receipt[
        "dataset"
    ]["files"]
    assert json.loads((tmp_path / "run/steps.jsonl").read_text())["prompt_tokens"] == [77]
    assert verify.main([str(tmp_path / "run")]) == 0


def test_the_row_holds_question_and_answer(short):
    row = json.loads((short / "rows.jsonl").read_text())
    assert row["prompt"] == [{"role": "user", "content": "Digits?"}]
    assert row["reward_model"] == {"ground_truth": "7"} and row["extra_info"] == {"index": 0}


def test_a_prompt_file_is_of_one_row_and_leaves_no_room_for_a_document(short):
    changes = {"data.prompt_file": str(short / "prompt.npy")}
    with pytest.raises(ValueError, match="data.prompt_file with 3 dataset rows; accepted: the one"):
        train_grpo.load_job(tiny_jobs.config(**changes), pathlib.Path("runs"))
    with pytest.raises(ValueError, match="accepted: 'none' and 0, the file holds the whole prompt"):
        train_grpo.load_job(tiny_jobs.config(**changes | {"data.prompt_tokens": 200}), pathlib.Path("runs"))


def test_a_flag_of_another_type_is_one_line_and_exit_code_2(tmp_path):
    done = build(tmp_path / "out", "--tokens=many")
    assert done.returncode == 2 and "many" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "given, said",
    [
        ({"tokens": None}, "accepted: --tokens=N --checkpoint=DIR --question=TEXT"),
        ({"tokens": 2}, "tokens=2; accepted: at least the "),
        ({"text": "gone"}, "text='gone'; accepted: a folder with"),
        ({"checkpoint": "gone"}, "gone: no tokenizer"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(given, said, tmp_path, monkeypatch, capsys):
    values = {
        "tokens": 99, "checkpoint": str(tiny_jobs.checkpoint()), "question": "Digits?", "answer": None, "depth": 1.0,
        "text": "python", "seed": 0, "out": str(tmp_path / "out"),
    }  # fmt: skip
    monkeypatch.setattr(build_prompt, "flags", types.SimpleNamespace(FLAGS=types.SimpleNamespace(**values | given)))
    with pytest.raises(SystemExit) as stop:
        build_prompt.main(["build_prompt"])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and said in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()
