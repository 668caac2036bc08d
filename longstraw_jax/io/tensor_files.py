"""Safetensors files of one folder: headers checked before any data, tensors read and written by byte range.

The format is read here and not by the safetensors package because its NumPy side knows no FP8, and because it
stops at a file's first fault. The rules are the package's: an 8-byte length, a JSON header, then the tensors
back to back without holes.
"""

import contextlib
import dataclasses
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_LFS_START = b"version "  # the file that stands in for one that Git LFS has not fetched
_LARGEST_HEADER = 100_000_000  # the package's own limit
_SHOWN = 20  # names of one kind in a message

Problems = dict[str, list[str]]  # kind of problem -> what it concerns

UNREADABLE = "unreadable files"
ABSENT = "files that the index names but that do not exist"
MISPLACED = "tensors that are not in the file the index names"
REPEATED = "tensors found more than once"


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be read or written; lists every problem found, by kind."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one tensor lies: file, safetensors dtype name, shape, and its bytes [begin, end) in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def refuse(folder: Path, problems: Problems) -> None:
    """Raises CheckpointError if there is any problem: all kinds, each with its count and its first names."""
    parts = []
    for kind, found in problems.items():
        if found:
            more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            parts.append(f"{kind} ({len(found)}): {', '.join(found[:_SHOWN])}{more}")
    if parts:
        raise CheckpointError(f"{folder}: " + "; ".join(parts))


def scan(folder: Path) -> tuple[dict[str, Entry], Problems]:
    """Reads the headers of a checkpoint's files; no tensor data.

    The index decides which files belong to the checkpoint; without one, model.safetensors alone; without that
    every *.safetensors of the folder.

    Returns:
      Tensor name -> entry, and the problems found (of the kinds named at the top of this file).
    """
    problems: Problems = {UNREADABLE: [], ABSENT: [], MISPLACED: [], REPEATED: []}
    weight_map: dict[str, str] = {}
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text())["weight_map"])
            files = sorted({folder / file for file in weight_map.values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems[UNREADABLE].append(f"{INDEX} (no JSON object with a weight_map: {error!r})")
            return {}, problems
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            problems[UNREADABLE].append("none is there; accepted: *.safetensors")
    entries: dict[str, Entry] = {}
    unusable = set()
    for file in files:
        if not file.is_file():
            problems[ABSENT].append(file.name)
            unusable.add(file.name)
            continue
        try:
            found = read_header(file)
        except (OSError, ValueError) as error:
            problems[UNREADABLE].append(f"{file.name} ({error})")
            unusable.add(file.name)
            continue
        for name, entry in found.items():
            if name in entries:
                problems[REPEATED].append(f"{name} (in {entries[name].file.name} and {file.name})")
            entries[name] = entry
    for name, file in weight_map.items():
        where = entries[name].file.name if name in entries else "no file"
        if where != file and file not in unusable:
            problems[MISPLACED].append(f"{name} (index: {file}, found: {where})")
    return entries, problems


def read_header(file: Path) -> dict[str, Entry]:
    """The entries of one file.

    Raises:
      ValueError: the file is truncated or is no safetensors file; says how.
      OSError: it cannot be opened.
    """
    size = file.stat().st_size
    with open(file, "rb") as handle:
        start = handle.read(8)
        if start == _LFS_START:
            raise ValueError("a Git LFS pointer, not the file itself; accepted: after git lfs pull")
        if len(start) < 8:
            raise ValueError(f"truncated: {size} bytes, at least 8 expected")
        length = struct.unpack("<Q", start)[0]
        if length > _LARGEST_HEADER:
            raise ValueError(f"not a safetensors file: header of {length} bytes")
        if 8 + length > size:
            raise ValueError(f"truncated: header of {length} bytes in a file of {size}")
        try:
            header = json.loads(handle.read(length), object_pairs_hook=_without_repeats)
            header.pop("__metadata__", None)
            entries = {
                name: Entry(
                    file,
                    str(fields["dtype"]),
                    tuple(int(n) for n in fields["shape"]),
                    *(8 + length + int(offset) for offset in fields["data_offsets"]),
                )
                for name, fields in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"header is not valid: {error!r}") from error
    at = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at or entry.end < at:
            raise ValueError(f"header is not valid: {name} starts at byte {entry.begin}, {at} expected")
        if entry.dtype in DTYPES:
            expected = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
            if entry.end - at != expected or min(entry.shape, default=0) < 0:
                raise ValueError(
                    f"header is not valid: {name} {entry.dtype}{list(entry.shape)} "
                    f"spans {entry.end - at} bytes, {expected} expected"
                )
        at = entry.end
    if at != size:
        raise ValueError(f"{'truncated' if size < at else 'too long'}: {size} bytes, {at} expected")
    return entries


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """JSON keeps the last of two equal keys, silently."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"repeated key {next(name for name in names if names.count(name) > 1)}")
    return result


def read_stack(entries: Sequence[Entry]) -> Float[np.ndarray, "N ..."]:
    """Reads tensors of one dtype and shape into a new array [len(entries), *shape].

    Raises:
      OSError: a file ended early (it changed after its header was read).
    """
    first = entries[0]
    out = np.empty((len(entries), *first.shape), DTYPES[first.dtype])
    rows = out.reshape(-1).view(np.uint8).reshape(len(entries), first.end - first.begin)
    for row, entry in zip(rows, entries, strict=True):
        with open(entry.file, "rb", buffering=0) as handle:
            _read_into(memoryview(row), handle.fileno(), entry, 0)
    return out


def read_box(entry: Entry, box: Sequence[slice]) -> Float[np.ndarray, "..."]:
    """Reads a box of one tensor, a slice of step 1 an axis; no byte outside of it.

    Raises:
      OSError: the file ended early (it changed after its header was read).
    """
    bounds = [at.indices(size)[:2] for at, size in zip(box, entry.shape, strict=True)]
    shape = [stop - start for start, stop in bounds]
    out = np.empty(shape, DTYPES[entry.dtype])
    split = len(shape)  # axes from here on are taken whole, so that one run of bytes spans them and the axis before
    while split and shape[split - 1] == entry.shape[split - 1]:
        split -= 1
    lead = max(split - 1, 0)
    run = math.prod(shape[lead:]) * out.itemsize
    strides = [math.prod(entry.shape[axis + 1 :]) * out.itemsize for axis in range(len(shape))]
    corner = sum(start * stride for (start, _), stride in zip(bounds, strides, strict=True))
    view = memoryview(out.reshape(-1).view(np.uint8))
    with open(entry.file, "rb", buffering=0) as handle:
        for number, index in enumerate(np.ndindex(*shape[:lead])):
            offset = corner + sum(i * stride for i, stride in zip(index, strides, strict=False))
            _read_into(view[number * run : (number + 1) * run], handle.fileno(), entry, offset)
    return out


def _read_into(view: memoryview, descriptor: int, entry: Entry, offset: int) -> None:
    """Fills `view` from byte `offset` of a tensor on."""
    done, start = 0, entry.begin + offset
    while done < len(view):  # one call reads at most 2 GiB
        count = os.preadv(descriptor, [view[done:]], start + done)
        if count == 0:
            raise OSError(f"{entry.file} ended at byte {start + done}, {entry.end} expected")
        done += count


@contextlib.contextmanager
def shard_writer(
    folder: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], *, max_shard_bytes: int
) -> Iterator[Callable[[str, np.ndarray], None]]:
    """Lays out model.safetensors, or shards and their index, and yields `write(name, array)` to fill them.

    Every header is known before the data, so tensors may be written in any order and none is kept. On leaving
    the files are synced to disk.

    Args:
      folder: an existing folder.
      tensors: name -> (safetensors dtype name, shape), in the order in which they fill the shards.
      max_shard_bytes: most data bytes in a shard; a larger tensor has a shard of its own.
    """
    sizes = {name: math.prod(shape) * DTYPES[dtype].itemsize for name, (dtype, shape) in tensors.items()}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    places: dict[str, tuple[Path, int]] = {}
    files = []
    for number, names in enumerate(shards, start=1):
        part = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        files.append(folder / f"model{part}.safetensors")
        # Wide dtypes first, as the safetensors package does: every tensor then lies aligned to its item size.
        names = sorted(names, key=lambda name: (-DTYPES[tensors[name][0]].itemsize, name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
        at = 0
        for name in names:
            dtype, shape = tensors[name]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + sizes[name]]}
            at += sizes[name]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        files[-1].write_bytes(struct.pack("<Q", len(text)) + text)
        for name in names:
            places[name] = (files[-1], 8 + len(text) + header[name]["data_offsets"][0])
    if len(shards) > 1:
        weight_map = {name: places[name][0].name for name in tensors}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        files.append(folder / INDEX)
        files[-1].write_text(json.dumps(index, indent=2) + "\n")

    def write(name: str, array: np.ndarray) -> None:
        file, offset = places[name]
        with open(file, "r+b") as handle:
            handle.seek(offset)
            handle.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    yield write
    for file in files:
        with open(file, "r+b") as handle:
            os.fsync(handle.fileno())
