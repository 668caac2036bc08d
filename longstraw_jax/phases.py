"""Phases of an optimizer step: the seconds of each, and a place to stop before it begins."""

import contextlib
import time
from collections.abc import Callable, Iterator


class Clock:
    """Seconds by phase; a phase waits for its own results before it ends, so that it pays for what it started.

    Args:
      before: called as a phase begins; what it raises leaves the step undone.
    """

    def __init__(self, before: Callable[[], None] | None = None):
        self.seconds: dict[str, float] = {}
        self._before = before

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block and adds to the phase's seconds."""
        if self._before is not None:
            self._before()
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
