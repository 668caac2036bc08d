"""Writes a file beside its place and renames it there: a reader sees the old file or the whole new one."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def write_whole(path: str | os.PathLike, data: bytes) -> None:
    """Replaces `path` by `data`, or leaves it as it was.

    Args:
      path: the file; its folder is made if it is missing.
      data: all of its bytes.

    Raises:
      OSError: the bytes could not be written (a full disk, say); `path` is untouched, nothing is left over.
    """
    with open_whole(path) as file:
        file.write(data)


@contextlib.contextmanager
def open_whole(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file to write to that replaces `path` when the block ends, or leaves it as it was if the block raises."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)  # mkstemp's 0600 would hide a shared run folder from its readers
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself has to survive a power cut
    finally:
        os.close(folder)
