"""Signals: the first is noted and told, the second ends the process, and none is left caught."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from longstraw_jax import interrupt


@pytest.mark.parametrize("number", interrupt.SIGNALS, ids=lambda s: s.name)
def test_a_signal_is_noted_until_the_block_ends(number, capfd):
    """Handlers, the wakeup descriptor and the number of threads are what they were."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    outer = signal.set_wakeup_fd(write_end)
    before = [signal.getsignal(s) for s in interrupt.SIGNALS], threading.active_count()
    try:
        with interrupt.caught_signals() as signalled:
            interrupt.check(signalled)
            assert signalled() is None
            os.kill(os.getpid(), number)
            until = time.monotonic() + 20
            while signalled() is None and time.monotonic() < until:
                time.sleep(1e-3)
            assert signalled() == number.name
            with pytest.raises(interrupt.Interrupted, match=f"^{number.name}$"):
                interrupt.check(signalled)
        assert ([signal.getsignal(s) for s in interrupt.SIGNALS], threading.active_count()) == before
    finally:
        assert signal.set_wakeup_fd(outer) == write_end
        os.close(read_end)
        os.close(write_end)
    assert capfd.readouterr().err.startswith(f"{number.name}: stops after the chunk, member or phase under way")


def test_signals_count_while_the_main_thread_is_in_a_c_call():
    """As where XLA compiles: it does not come back to bytecode, where Python runs handlers. Here it waits for itself.

    The first is told at once. One that comes with it, here in either order, is no second: a terminal and a launcher may
    both pass it on.
    """
    code = (
        "import ctypes\n"
        "from longstraw_jax import interrupt\n"
        "libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)\n"
        "libc.pthread_mutex_init(mutex, None)\n"
        "with interrupt.caught_signals():\n"
        "    print('ready', flush=True)\n"
        "    libc.pthread_mutex_lock(mutex)\n"
        "    libc.pthread_mutex_lock(mutex)\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        limit = threading.Timer(50, process.kill)
        limit.start()
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline().startswith(("SIGINT: stops after ", "SIGTERM: stops after "))
        time.sleep(interrupt.ONE_REQUEST_S)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        limit.cancel()
    assert process.returncode == interrupt.EXIT_CODE == 130
    assert said == "SIGTERM again: ended at once; run the same command again to resume from the last checkpoint\n"
