"""The runner of the GPU measurements: its steps, what it refuses, and that its commands' flags exist."""

import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "experiments" / "launch" / "h200_results.sh"
# In place of Python: notes its arguments and leaves the files that a step hands on.
RECORDER = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> "{log}"
[[ $* != *long_4m* ]]  # a step that fails
"""


def steps() -> list[str]:
    listed = subprocess.run([SCRIPT, "--list"], check=True, capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Command lines of all steps, and the summary."""
    folder = tmp_path_factory.mktemp("runner")
    log, python = folder / "log", folder / "python"
    python.write_text(RECORDER.format(log=log))
    python.chmod(0o755)
    scratch = folder / "scratch" / "longstraw_peer"
    scratch.mkdir(parents=True)
    (scratch / "peer.json").write_text("{}")
    environment = os.environ | {"PYTHON": str(python), "SCRATCH": str(scratch.parent)}
    subprocess.run([SCRIPT, folder / "out", *steps()], check=True, env=environment, capture_output=True)
    rows = [line.split("\t") for line in (folder / "out" / "summary.tsv").read_text().splitlines()]
    return log.read_text().splitlines(), rows


def test_every_step_runs_and_is_summed_up(recorded):
    lines, rows = recorded
    assert [row[0] for row in rows] == steps()
    # Nothing leaves a receipt here, so that there is nothing to plot.
    assert "long_4m" in {row[0] for row in rows if row[1] != "0"} <= {"long_4m", "plots"}
    assert any("long_2m" in line for line in lines)


def test_without_names_the_steps_for_one_gpu_run(tmp_path):
    idle = tmp_path / "python"
    idle.write_text("#!/usr/bin/env bash\n")
    idle.chmod(0o755)
    environment = os.environ | {"PYTHON": str(idle), "SCRATCH": str(tmp_path)}
    subprocess.run([SCRIPT, tmp_path / "out"], check=True, env=environment, capture_output=True)
    ran = [line.split("\t")[0] for line in (tmp_path / "out" / "summary.tsv").read_text().splitlines()]
    assert ran == [name for name in steps() if not name.startswith("devices_")] != steps()


def test_modes_and_lengths_are_those_of_the_step_s_name(recorded):
    (line,) = [line for line in recorded[0] if "exact_1m" in line]
    assert "--mode=exact" in line and "--tokens=1048576" in line


def test_flags_of_the_commands_exist(recorded):
    for line in recorded[0]:
        program, *arguments = line.split()
        if program == "-m":
            assert all((ROOT / word).is_file() for word in arguments if word.startswith("tests/"))
            continue
        source = (ROOT / program).read_text()
        for flag in re.findall(r"--([a-z_]+)", " ".join(arguments)):
            if flag != "config":
                assert re.search(rf'"(--)?{flag}"', source), f"{program} has no --{flag}"


def test_an_unknown_step_is_refused(tmp_path):
    done = subprocess.run([SCRIPT, tmp_path / "out", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: step 'nonsense' is not known; accepted: tests ")
    assert not (tmp_path / "out").exists()
