"""A run folder has one writer."""

import subprocess
import sys

import pytest

from longstraw_jax.io.run_lock import run_lock

HOLD = """
import sys
from longstraw_jax.io.run_lock import run_lock
with run_lock(sys.argv[1]):
    print("held", flush=True)
    input()
"""


def test_a_second_run_is_refused_until_the_first_is_gone_however_it_ended(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="run is in use by another run"), run_lock(folder):
            pass
        first.kill()
    with run_lock(folder):
        pass
    with run_lock(folder):
        pass
