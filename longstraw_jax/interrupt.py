"""Signals that end a run: the first asks it to stop where it can be resumed, the second ends it at once."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from longstraw_jax import launch

EXIT_CODE = 130  # as a shell says of a program that Ctrl-C has ended
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A signal asked the run to stop; its name."""


@contextlib.contextmanager
def caught_signals() -> Iterator[Callable[[], str | None]]:
    """While the block runs, SIGINT and SIGTERM are noted instead of ending the process; a second one ends it.

    Yields:
      What tells the name of the first signal that came, None before one has.
    """
    caught: list[str] = []

    def handle(number, frame):
        del frame
        name = signal.Signals(number).name
        # Not through sys.stderr: the signal may have come while it was writing.
        if caught:
            os.write(2, f"{name} again: ended at once; {launch.RESUME}\n".encode())
            os._exit(EXIT_CODE)
        caught.append(name)
        os.write(2, f"{name}: stops before the next phase of this step, then saves; again to end at once\n".encode())

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield lambda: caught[0] if caught else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check(signalled: Callable[[], str | None]) -> None:
    """Raises Interrupted on every process of the run if a signal has come to one; all must call it alike."""
    if names := [name for name in launch.exchange(signalled()) if name]:
        raise Interrupted(names[0])
