"""The doctor's command: a row a check, blockers last, and exit codes."""

import subprocess
import sys
import types

import pytest
import tiny_jobs

from longstraw_jax.evidence import doctor, prerequisites
from longstraw_jax.evidence.prerequisites import BLOCKER, OK


def test_the_report_counts_and_ends_with_the_blockers(capsys):
    rows = [prerequisites.Finding("a", BLOCKER, "no\nroom"), prerequisites.Finding("b", OK, "well")]
    assert doctor.report(rows) == 1 and doctor.report(rows[1:]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["ok           b  well", "BLOCKER      a  no room", "2 checks, 1 blockers, 0 not checked"]


def test_the_command_judges_chips_that_are_not_here(tmp_path):
    config = tiny_jobs.write_config(tmp_path / "config.py", tiny_jobs.config(**{"mesh.devices": 32}))
    command = [sys.executable, "-m", "longstraw_jax.evidence.doctor", f"--config={config}"]

    def call(*arguments):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=tmp_path)
        return done.returncode, done.stdout

    code, out = call("--topology=tpu:v5p:4x4x2")
    assert code == 0 and "0 blockers" in out and "which need not be here" in out
    code, out = call("--topology=tpu:v5p:4x4x2", "--config.grpo.max_new_tokens=200", "--config.optimizer.eps=0")
    assert code == 1 and "2 blockers" in out and "max_position_embeddings=256" in out and "optimizer.eps=0" in out
    # Importing the configuration may leave its byte code.
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"config.json", "config.py"}


@pytest.mark.parametrize(
    "arguments, given, said",
    [
        ([], {"topology": "tpu:v9"}, "topology='tpu:v9' is not known; accepted: "),
        (["more"], {}, "arguments ['more']; accepted: --config=FILE --topology=NAME"),
        ([], {"config": None}, "arguments []; accepted: --config=FILE"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments, given, said, monkeypatch, capsys):
    values = {"config": tiny_jobs.config(), "topology": None, "workdir": "runs", "hash_weights": False} | given
    monkeypatch.setattr(doctor, "flags", types.SimpleNamespace(FLAGS=types.SimpleNamespace(**values)))
    with pytest.raises(SystemExit) as stop:
        doctor.main(["doctor", *arguments])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.startswith("error: " + said) and err.count("\n") == 1
