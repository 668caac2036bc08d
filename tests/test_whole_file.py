"""A file is replaced whole or not at all."""

import os
import resource
import stat

import pytest

from longstraw_jax.io.whole_file import open_whole, write_whole


def test_writes_makes_the_folder_and_replaces(tmp_path):
    path = tmp_path / "new" / "f"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two" and os.listdir(path.parent) == ["f"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_full_disk_leaves_the_old_file_and_nothing_beside(tmp_path):
    path = tmp_path / "f"
    write_whole(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError):
            write_whole(path, b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]


def test_a_stream_that_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "x"
    with open_whole(path) as file:
        file.write(b"on")
        assert not path.exists()
        file.write(b"e")
    assert path.read_bytes() == b"one"
    with pytest.raises(RuntimeError), open_whole(path) as file:
        file.write(b"half")
        raise RuntimeError("no more text")
    assert path.read_bytes() == b"one" and [p.name for p in tmp_path.iterdir()] == ["x"]
