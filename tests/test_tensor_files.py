"""Safetensors files: headers that lie are refused, and the package reads what is written."""

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from hf_folders import NAMES, write_file
from safetensors.numpy import load_file

from longstraw_jax.io import tensor_files

ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": ONE}, "too long: "),
        ({"a": ONE | {"data_offsets": [0, 12]}}, "spans 12 bytes, 4 expected"),
        ({"a": ONE | {"data_offsets": [4, 8]}}, "a starts at byte"),
        ({"a": ONE, "b": ONE}, "b starts at byte"),
        ({"a": ONE | {"dtype": "I64", "data_offsets": [0, 16]}}, "truncated: "),
        ({"a": {"dtype": "F32", "shape": [1]}}, "KeyError('data_offsets')"),
        ({"a": 1}, "header is not valid: TypeError"),
        ('{"a": 1, "a": 2}', "repeated key a"),
        ("{oops", "header is not valid: JSONDecodeError"),
    ],
)
def test_headers_that_lie_are_refused(header, said, tmp_path):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(ValueError) as caught:
        tensor_files.read_header(file)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"abc", "truncated: 3 bytes"),
        (struct.pack("<Q", 100) + b"{}", "truncated: header of 100"),
        (b"\xff" * 16, "not a safetensors file"),
    ],
)
def test_files_that_hold_no_header_are_refused(data, said, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=said):
        tensor_files.read_header(tmp_path / "model.safetensors")


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path):
    file = tmp_path / "model.safetensors"
    write_file(file, {"a": np.zeros(9, np.float32)})
    entry = tensor_files.read_header(file)["a"]
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(OSError, match="ended at byte"):
        tensor_files.read_stack([entry])


def test_the_package_reads_what_is_written_in_any_order(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal(3).astype(ml_dtypes.bfloat16),  # an odd count: the next float is not aligned
        "b": rng.standard_normal((2, 2)).astype(np.float32),
        "wide": rng.standard_normal((8, 8)).astype(np.float32),
        "c": np.float32(3.0).reshape(()),
    }
    layout = {name: (NAMES[value.dtype], value.shape) for name, value in tensors.items()}
    with tensor_files.shard_writer(tmp_path, layout, max_shard_bytes=64) as write:
        for name in reversed(tensors):
            write(name, tensors[name])
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    found = {name: value for file in files for name, value in load_file(tmp_path / file).items()}
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype and np.array_equal(found[name], value), name
    entries, problems = tensor_files.scan(tmp_path)
    assert not any(problems.values())
    for name, entry in entries.items():
        assert entry.begin % tensors[name].dtype.itemsize == 0, name
        assert np.array_equal(tensor_files.read_stack([entry])[0], tensors[name]), name
    index = json.loads((tmp_path / tensor_files.INDEX).read_text())
    assert index["weight_map"]["wide"] == files[1] and index["metadata"]["total_size"] == 6 + 16 + 256 + 4


@pytest.mark.parametrize(
    "box",
    [
        (slice(0, 3), slice(0, 4), slice(0, 5)),
        (slice(1, 3), slice(0, 4), slice(0, 5)),
        (slice(None), slice(1, 3), slice(None)),
        (slice(0, 2), slice(1, 2), slice(2, 4)),
        (slice(2, 3), slice(3, 4), slice(4, 5)),
        (slice(0, 3), slice(0, 4), slice(1, 5)),
    ],
)
def test_a_box_of_a_tensor_is_read_and_no_byte_beside_it(box, tmp_path, monkeypatch):
    values = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    write_file(tmp_path / "model.safetensors", {"before": np.ones(3, np.float32), "x": values})
    read, preadv = [], os.preadv

    def counted(descriptor, buffers, offset):
        read.append(sum(map(len, buffers)))
        return preadv(descriptor, buffers, offset)

    entry = tensor_files.read_header(tmp_path / "model.safetensors")["x"]
    monkeypatch.setattr(os, "preadv", counted)
    found = tensor_files.read_box(entry, box)
    np.testing.assert_array_equal(found, values[box])
    assert sum(read) == found.nbytes


def test_a_file_that_shrank_after_its_header_was_read_is_an_error(tmp_path):
    file = tmp_path / "model.safetensors"
    write_file(file, {"x": np.zeros((4, 4), np.float32)})
    entry = tensor_files.read_header(file)["x"]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(OSError, match="ended at byte"):
        tensor_files.read_box(entry, (slice(0, 4), slice(2, 4)))


def test_a_git_lfs_pointer_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ValueError, match="a Git LFS pointer, not the file itself"):
        tensor_files.read_header(tmp_path / "model.safetensors")
