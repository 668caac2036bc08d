"""A prompt's pages on disk, so that a capture that stopped half-way goes on where it was.

Of each pool one file holds the pages in prompt order, all layers of a page together; it grows as the capture does.
progress.json is renamed into place after them and says how many tokens count.
"""

import functools
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


@functools.partial(jax.jit, static_argnames=("axis", "out"), donate_argnames="pool")
def _put(pool, index, values, axis, out):
    places = (slice(None),) * axis + (index,)
    pool = pool.at[places].set(jnp.moveaxis(values, 0, axis), mode="drop")
    return jax.lax.with_sharding_constraint(pool, out)  # where it was, so that the capture's program is the same


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


def save(
    folder: str | os.PathLike, model: Model, state: PrefixState, bound: Mapping[str, Any], *, saved: int = 0
) -> int:
    """Writes what `state` holds beyond the first `saved` tokens of this folder.

    Args:
      folder: made if it is missing.
      bound: JSON values that a later `load` must name again: what the pages depend on.
      saved: what the call before returned, 0 for the first.

    Returns:
      Tokens on disk.

    Raises:
      OSError: progress.json still says what was there before.
    """
    folder, tokens = pathlib.Path(folder), int(state.length)
    folder.mkdir(parents=True, exist_ok=True)
    for name, (pool, axis) in _pools(state).items():
        path, total = folder / name, pool.shape[axis]
        with open(path, "r+b" if saved else "wb") as file:
            for start, count, place in _blocks(saved // PAGE, -(-tokens // PAGE), total, model.devices):
                block = np.asarray(_take(pool, np.minimum(place, total - 1), axis))[:count]
                file.seek(start * block[0].nbytes)
                file.write(block.tobytes())
            file.flush()
            os.fsync(file.fileno())
    write_whole(folder / PROGRESS_FILE, (json.dumps({"tokens": tokens, "bound": dict(bound)}) + "\n").encode())
    return tokens


def load(folder: str | os.PathLike, model: Model, capacity: int, bound: Mapping[str, Any]) -> PrefixState | None:
    """The state that `save` left, with room for `capacity` tokens; None where there is none.

    Raises:
      ValueError: another `bound`, more tokens than `capacity`, or a file that is too short.
    """
    folder = pathlib.Path(folder)
    if not (folder / PROGRESS_FILE).is_file():
        return None
    progress = parse_strict_json((folder / PROGRESS_FILE).read_bytes())
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
            for start, count, place in _blocks(0, -(-tokens // PAGE), total, model.devices):
                values = np.zeros((BLOCK, *shape), pool.dtype)
                size = count * values[0].nbytes
                data = file.read(size)
                if len(data) != size:
                    raise ValueError(f"{folder / name}: ends in page {start + len(data) // values[0].nbytes}")
                values[:count] = np.frombuffer(data, pool.dtype).reshape(count, *shape)
                pool = _put(pool, place, values, axis, pool.sharding)
        filled[name] = pool
    count = len(state.latents)
    return PrefixState(
        tuple(filled[f"latents.{s}.bin"] for s in range(count)),
        tuple(filled[f"index_keys.{s}.bin"] for s in range(count)),
        jax.device_put(jnp.int32(tokens), state.length.sharding),
        state.fingerprint,
    )
