"""Signals that end a run: the first asks it to stop where it can be resumed, the second ends it at once."""

import contextlib
import os
import signal
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

    Yields:
      What tells the name of the first signal that came, None before one has.
    """
    caught: list[tuple[str, float]] = []

    def handle(number, frame):
        del frame
        name, now = signal.Signals(number).name, time.monotonic()
        # Not through sys.stderr: the signal may have come while it was writing.
        if caught and now - caught[0][1] < ONE_REQUEST_S:
            return
        if caught:
            os.write(2, f"{name} again: ended at once; {launch.RESUME}\n".encode())
            os._exit(EXIT_CODE)
        caught.append((name, now))
        os.write(2, f"{name}: stops before the next phase of this step, then saves; again to end at once\n".encode())

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield lambda: caught[0][0] if caught else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check(signalled: Callable[[], str | None]) -> None:
    """Raises Interrupted on every process of the run if a signal has come to one; all must call it alike."""
    if names := [name for name in launch.exchange(signalled()) if name]:
        raise Interrupted(names[0])
