"""A prompt's pages on disk, so that a capture that stopped half-way goes on where it was.

Of each pool one file holds the pages in prompt order, all layers of a page together; it grows as the capture does.
progress.json is renamed into place after them: how many tokens count, what they are bound to, and of each file the
blocks written, as [first page, pages, sha256].
"""

import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.io.metrics import parse_strict_json
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.prefix import pages
from longstraw_jax.types import PAGE, Model, PrefixState

PROGRESS_FILE = "progress.json"
BLOCK = 1024  # pages on the host at a time


@functools.partial(jax.jit, static_argnames="axis")
def _take(pool, index, axis):
    return jnp.moveaxis(jnp.take(pool, index, axis=axis), axis, 0)


@functools.lru_cache(maxsize=16)
def _put(axis, out):
    """The program that writes pages into a pool, which stays where and as it was: the capture's program is the same."""

    def put(pool, index, values):
        places = (slice(None),) * axis + (index,)
        return pool.at[places].set(jnp.moveaxis(values, 0, axis), mode="drop")

    return jax.jit(put, donate_argnames="pool", out_shardings=out)


def _pools(state: PrefixState) -> dict[str, tuple[Any, int]]:
    """File name -> pool and its pages axis."""
    found = {f"latents.{s}.bin": (pool, 2) for s, pool in enumerate(state.latents)}
    return found | {f"index_keys.{s}.bin": (pool, 1) for s, pool in enumerate(state.index_keys)}


def _blocks(first: int, last: int, total: int, devices: int):
    """Pages first..last-1 a block at a time, with their places in the pools; as many places in every block."""
    for start in range(first, last, BLOCK):
        page = np.arange(start, start + BLOCK)
        place = (page % devices) * (total // devices) + page // devices
        yield start, min(BLOCK, last - start), np.where(page < last, place, total).astype(np.int32)


def check_store(model: Model) -> None:
    """Raises ValueError for pages that rest on the host, from where no program can pick single pages."""
    if model.prefix_store != "device":
        raise ValueError(f"prefix_store={model.prefix_store!r} with pages saved or resumed; accepted: 'device'")


def save(
    folder: str | os.PathLike, model: Model, state: PrefixState, bound: Mapping[str, Any], *, saved: int = 0
) -> int:
    """Writes what `state` holds beyond the first `saved` tokens of this folder.

    Args:
      folder: made if it is missing.
      bound: JSON values that a later `load` must name again: what the pages depend on.
      saved: what the call before (or the length of what `load`) returned; 0 for a folder to be written anew.

    Returns:
      Tokens on disk.

    Raises:
      OSError: progress.json still says what was there before, or is gone where `saved` is 0.
      ValueError: progress.json is not what `save` writes; pages on the host.
    """
    check_store(model)
    folder, tokens = pathlib.Path(folder), int(state.length)
    folder.mkdir(parents=True, exist_ok=True)
    known = {}
    if saved:
        known = _progress(folder)["blocks"]
    else:
        (folder / PROGRESS_FILE).unlink(missing_ok=True)  # before the pages that it speaks for
    written = {}
    for name, (pool, axis) in _pools(state).items():
        path, total = folder / name, pool.shape[axis]
        # A block that ends within a page is written again with the rest of it.
        blocks = [block for block in known.get(name, []) if (block[0] + block[1]) * PAGE <= saved]
        first = sum(blocks[-1][:2]) if blocks else 0
        with open(path, "r+b" if saved else "wb") as file:
            for start, count, place in _blocks(first, -(-tokens // PAGE), total, model.devices):
                block = np.asarray(_take(pool, np.minimum(place, total - 1), axis))[:count]
                data = block.tobytes()
                file.seek(start * block[0].nbytes)
                file.write(data)
                blocks.append([start, count, hashlib.sha256(data).hexdigest()])
            file.flush()
            os.fsync(file.fileno())
        written[name] = blocks
    progress = {"tokens": tokens, "bound": dict(bound), "blocks": written}
    write_whole(folder / PROGRESS_FILE, (json.dumps(progress) + "\n").encode())
    return tokens


def _progress(folder: pathlib.Path) -> dict[str, Any]:
    progress = parse_strict_json((folder / PROGRESS_FILE).read_bytes())
    keys = sorted(progress) if isinstance(progress, dict) else type(progress).__name__
    if keys != ["blocks", "bound", "tokens"]:
        raise ValueError(f"{folder / PROGRESS_FILE}: holds {keys}; accepted: blocks, bound, tokens")
    return progress


def load(folder: str | os.PathLike, model: Model, capacity: int, bound: Mapping[str, Any]) -> PrefixState | None:
    """The state that `save` left, with room for `capacity` tokens; None where there is none.

    Raises:
      ValueError: progress.json is not what `save` writes; another `bound`, more tokens than `capacity`, a file that is
        too short or that holds other bytes than were written; pages on the host.
    """
    check_store(model)
    folder = pathlib.Path(folder)
    if not (folder / PROGRESS_FILE).is_file():
        return None
    progress = _progress(folder)
    if progress["bound"] != json.loads(json.dumps(bound)):
        raise ValueError(f"{folder}: its pages are bound to {progress['bound']}; accepted: {dict(bound)}")
    tokens = progress["tokens"]
    if tokens > capacity:
        raise ValueError(f"{folder}: {tokens} tokens; accepted: at most the capacity of {capacity}")
    state = pages.allocate(model, capacity)
    filled = {}
    for name, (pool, axis) in _pools(state).items():
        total, shape = pool.shape[axis], np.delete(pool.shape, axis)
        with open(folder / name, "rb") as file:
            for first, size, digest in progress["blocks"][name]:
                ((_, count, place),) = _blocks(first, first + size, total, model.devices)
                values = np.zeros((BLOCK, *shape), pool.dtype)
                data = file.read(values[:count].nbytes)
                if len(data) != values[:count].nbytes:
                    raise ValueError(f"{folder / name}: ends in page {first + len(data) // values[0].nbytes}")
                values[:count] = np.frombuffer(data, pool.dtype).reshape(count, *shape)
                if (first + count) * PAGE > tokens:
                    values[count - 1, ..., tokens % PAGE :, :] = 0  # of a save that was cut off before its last rename
                if hashlib.sha256(values[:count].tobytes()).hexdigest() != digest:
                    raise ValueError(f"{folder / name}: pages {first} to {first + count - 1} are not those written")
                pool = _put(axis, pool.format)(pool, place, values)
        filled[name] = pool
    count = len(state.latents)
    return PrefixState(
        tuple(filled[f"latents.{s}.bin"] for s in range(count)),
        tuple(filled[f"index_keys.{s}.bin"] for s in range(count)),
        jax.device_put(jnp.int32(tokens), state.length.sharding),
        state.fingerprint,
    )
