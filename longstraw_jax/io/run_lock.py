"""One writer at a time in a run folder."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

LOCK_FILE = ".lock"


@contextlib.contextmanager
def run_lock(workdir: str | os.PathLike, *, wait: bool = False) -> Iterator[None]:
    """Holds the run folder until the block ends; the system lets go of it if the process dies.

    Args:
      workdir: the run folder; made if it is missing.
      wait: until whoever holds it is done, instead of refusing.

    Raises:
      ValueError: another process holds it, unless `wait`.
    """
    path = Path(workdir) / LOCK_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"workdir: {workdir} is in use by another run; accepted: a folder of its own") from error
        yield
