"""Signals that end a run: the first asks it to stop where it can be resumed, the second ends it at once."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from longstraw_jax import launch

EXIT_CODE = 130  # as a shell says of a program that Ctrl-C has ended
SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE_REQUEST_S = 2.0  # a terminal and a launcher may both pass on the same Ctrl-C


class Interrupted(Exception):
    """A signal asked the run to stop; its name."""


@contextlib.contextmanager
def caught_signals() -> Iterator[Callable[[], str | None]]:
    """While the block runs, SIGINT and SIGTERM are noted instead of ending the process; one that comes later ends it.

    A thread takes them as they come. Python's handlers would wait until the main thread is back from a C call, which
    takes minutes where XLA compiles, and two signals meanwhile would be one. The thread needs the GIL all the same: a C
    call that keeps it delays this.

    Yields:
      What tells the name of the first signal that came, None before one has.

    Raises:
      ValueError: not the main thread.
    """
    caught: list[str] = []
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)  # set_wakeup_fd takes no other
    outer = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    listener = threading.Thread(target=_listen, args=(read_end, caught), name="signals", daemon=True)
    listener.start()
    # They do nothing, but only signals with a handler in Python are written to the pipe.
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        yield lambda: caught[0] if caught else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(outer)
        os.close(write_end)
        listener.join()
        os.close(read_end)


def _listen(read_end: int, caught: list[str]) -> None:
    """Notes the first signal that comes through the pipe and ends the process at a later one, until the pipe closes."""
    first = 0.0
    while arrived := os.read(read_end, 1):
        number, now = arrived[0], time.monotonic()
        if number not in SIGNALS:  # another handler's
            continue
        name = signal.Signals(number).name
        if not caught:
            caught.append(name)
            first = now
            _tell(f"{name}: stops after the chunk, member or phase under way, then saves; again to end at once")
        elif now - first >= ONE_REQUEST_S:
            _tell(f"{name} again: ended at once; {launch.RESUME}")
            os._exit(EXIT_CODE)


def _tell(message: str) -> None:
    """A line on stderr; not through sys.stderr, whose lock another thread may hold for long."""
    with contextlib.suppress(OSError):  # the terminal may be gone, and the process must end all the same
        os.write(2, f"{message}\n".encode())


def check(signalled: Callable[[], str | None]) -> None:
    """Raises Interrupted on every process of the run if a signal has come to one; all must call it alike."""
    if names := [name for name in launch.exchange(signalled()) if name]:
        raise Interrupted(names[0])
