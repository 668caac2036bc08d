"""Signals: the first is noted and told, the second ends the process, and none is left caught."""

import os
import signal
import subprocess
import sys

import pytest

from longstraw_jax import interrupt


@pytest.mark.parametrize("number", interrupt.SIGNALS, ids=lambda s: s.name)
def test_a_signal_is_noted_until_the_block_ends(number, capfd):
    before = [signal.getsignal(s) for s in interrupt.SIGNALS]
    with interrupt.caught_signals() as signalled:
        interrupt.check(signalled)
        assert signalled() is None
        os.kill(os.getpid(), number)
        assert signalled() == number.name
        with pytest.raises(interrupt.Interrupted, match=f"^{number.name}$"):
            interrupt.check(signalled)
    assert [signal.getsignal(s) for s in interrupt.SIGNALS] == before
    assert capfd.readouterr().err.startswith(f"{number.name}: stops before the next phase")


def test_a_second_signal_ends_the_process_at_once():
    """But not one that comes with the first: a terminal and a launcher may both pass it on."""
    code = (
        "import os, signal, time\n"
        "from longstraw_jax import interrupt\n"
        "with interrupt.caught_signals():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(interrupt.ONE_REQUEST_S)\n"
        "    print('alive', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == interrupt.EXIT_CODE == 130 and done.stdout == "alive\n"
    assert "SIGINT again: ended at once; run the same command again to resume" in done.stderr
