"""Training checkpoints: save, find and restore them, and refuse those of another run.

Orbax (v1 API) writes `<directory>/<step>`: arrays of any sharding, committed by one rename, after which the
oldest folders go. A process killed at any moment leaves the previous checkpoint, the new one, or both, and at
most a `*.orbax-checkpoint-tmp` folder that readers ignore and the next save removes.

Added here is what a bit-for-bit resume needs and Orbax does not do: a record of the run (which configuration,
data, base weights, adapters) that is compared on restore, shapes and dtypes that must agree instead of being
cast, and a fingerprint of the state, because array files carry no checksum.
"""

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from longstraw_jax import fingerprint, launch

# Orbax cuts a replicated array in a slice a device, each cut by a program of its own, to be compiled. Smaller ones stay
# whole and are written by one device.
_SPLIT_BYTES = 1 << 20


class CheckpointError(ValueError):
    """A checkpoint request that cannot be met; names the folder or field, the value and what is accepted."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint of another run or another state; names every field that differs, with both values."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint that cannot be read or whose bits have changed; names it and the one before it."""


class CheckpointSaveError(OSError):
    """A checkpoint that could not be written; names its folder, the cause and the one that still stands."""


def save(
    directory: str | os.PathLike, step: int, state: Any, metadata: Mapping[str, Any], *, keep: int = 2
) -> None:
    """Writes `<directory>/<step>` and returns once it is committed, then drops all but the newest `keep`.

    Args:
      directory: holds the run's checkpoints; made if it is missing.
      step: optimizer steps done; larger than every step that the directory holds.
      state: pytree of JAX arrays with any shardings: floats, integers, booleans, random keys.
      metadata: JSON object that says which run this is, for `restore(expected=...)`. Nested objects are
        compared entry by entry, so {"lora": {"q_a": {"rank": 8}}} is reported as lora.q_a.rank.
      keep: checkpoints to keep, this one included; at least 1.

    Raises:
      CheckpointError: keep or step is out of range; nothing is written.
      ValueError, TypeError: a leaf that is not an array, metadata that is not JSON; nothing is written.
      CheckpointSaveError: the write failed (a full disk, say); earlier checkpoints are as they were.
    """
    directory = Path(directory).absolute()
    if keep < 1:
        raise CheckpointError(f"keep={keep}; accepted: at least 1")
    previous = latest_step(directory)
    if previous is not None and step <= previous:
        raise CheckpointError(f"step={step}: {directory} already holds step {previous}; accepted: a later step")
    record = _record(state, metadata)
    policy = ocp.training.preservation_policies.LatestN(keep)
    saving = ocp.options.ArrayOptions.Saving(min_slice_bytes_for_replica_parallel=_SPLIT_BYTES)
    try:
        with (
            _quiet(),
            ocp.Context(array_options=ocp.options.ArrayOptions(saving=saving)),
            ocp.training.Checkpointer(
                directory, preservation_policy=policy, cleanup_tmp_directories=True
            ) as checkpointer,
        ):
            checkpointer.save(step, state, force=True, custom_metadata=record)
    except Exception as error:  # tensorstore reports a full disk as ValueError, the file system as OSError
        standing = "there is no earlier checkpoint" if previous is None else f"step {previous} still stands"
        raise CheckpointSaveError(
            f"checkpoint {directory / str(step)} could not be written: {_root_cause(error)}; {standing}"
        ) from error


def latest_step(directory: str | os.PathLike) -> int | None:
    """The newest committed step in `directory`; None if it holds none or does not exist.

    Raises:
      LaunchError: the processes of the run do not see the same.
    """
    found = max(_steps(Path(directory).absolute()), default=None)
    # All have looked before any goes on and makes the folder: Orbax waits for every process where it exists.
    launch.check_same(f"the latest checkpoint in {directory}, which all processes share", found)
    return found


def restore(
    directory: str | os.PathLike, like: Any, *, step: int | None = None, expected: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Reads a checkpoint, bit for bit, onto the shardings of `like`; only reads.

    A damaged newest checkpoint is an error and not a silent step back: the run's log already holds the steps
    that an older one would repeat.

    Args:
      directory: as given to `save`.
      like: pytree of jax.Array or jax.ShapeDtypeStruct with shardings: the structure, shapes, dtypes and
        places of the result. The mesh may differ from the one that saved.
      step: which one; the newest by default.
      expected: entries that the saved metadata must have, compared as JSON; metadata may hold more.

    Returns:
      (state, metadata) as they were given to `save`.

    Raises:
      CheckpointError: no checkpoint, or not this step; lists those that exist.
      CheckpointMismatchError: metadata differs from `expected`, or leaves, shapes or dtypes from `like`.
      CheckpointCorruptError: files are missing, unreadable or changed.
    """
    target = _target(like)
    directory = Path(directory).absolute()
    steps = _steps(directory)
    if not steps:
        raise CheckpointError(f"{directory} holds no checkpoint; accepted: a folder that a run has saved to")
    step = max(steps) if step is None else step
    if step not in steps:
        raise CheckpointError(f"step={step} is not in {directory}; accepted: {sorted(steps)}")
    folder = directory / str(step)
    earlier = max((other for other in steps if other < step), default=None)

    def corrupt(what: str) -> CheckpointCorruptError:
        # Away, not gone: what could not be read here may be whole, and read on a larger machine.
        advice = "no earlier one exists" if earlier is None else f"move it away to resume from step {earlier}"
        return CheckpointCorruptError(f"checkpoint {folder} {what}; {advice}")

    with _quiet():
        try:
            content = dict(ocp.metadata(folder).custom_metadata or {})
        except Exception as error:  # whatever the parsers of half a file raise
            raise corrupt(f"cannot be read: {_root_cause(error)}") from error
        if content.pop("sha256", None) != fingerprint.sha256_json(content):
            raise corrupt("is damaged: its record of the run is missing or has changed")
        expected = json.loads(json.dumps(dict(expected)))  # tuples become the lists that were read back
        saved = {name: content["metadata"][name] for name in expected if name in content["metadata"]}
        _check_same(f"checkpoint {folder} is of another run", saved, expected)
        _check_same(f"checkpoint {folder} holds another state", content["leaves"], _leaf_types(target))
        try:
            state = ocp.load(folder, target)
        except Exception as error:
            raise corrupt(f"cannot be read: {_root_cause(error)}") from error
    found = fingerprint.tree_fingerprint(state)
    if found != content["fingerprint"]:
        raise corrupt(f"is damaged: its arrays have fingerprint {found}, saved was {content['fingerprint']}")
    return state, content["metadata"]


def _steps(directory: Path) -> list[int]:
    if not directory.is_dir():  # Orbax would make it
        return []
    with _quiet(), ocp.training.Checkpointer(directory) as checkpointer:
        return [checkpoint.step for checkpoint in checkpointer.checkpoints]


def _record(state: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What is saved beside the arrays, with its own hash."""
    words = fingerprint.tree_fingerprint(state)  # first, because it refuses leaves that are not arrays
    content = {"metadata": dict(metadata), "leaves": _leaf_types(state), "fingerprint": words}
    return {**content, "sha256": fingerprint.sha256_json(content)}


def _leaf_types(tree: Any) -> dict[str, str]:
    """Path of every leaf -> dtype and shape, as "float32[8, 4]"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _check_same(what: str, found: Any, expected: Any) -> None:
    """Raises CheckpointMismatchError with the dotted name and both values of every entry that differs."""
    found, expected = _flat("", found), _flat("", expected)
    differing = [
        f"{name}: checkpoint has {found.get(name, 'nothing')}, this run has {expected.get(name, 'nothing')}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name, "nothing") != expected.get(name, "nothing")
    ]
    if differing:
        raise CheckpointMismatchError(f"{what}: " + "; ".join(differing))


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Nested JSON objects as one, keyed by dotted names."""
    if not isinstance(value, dict) or (name and not value):
        return {name: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(f"{name}.{key}" if name else key, inner)
    return flat


def _target(like: Any) -> Any:
    """`like` as the ShapeDtypeStructs that Orbax loads into."""

    def described(path, leaf):
        if getattr(leaf, "sharding", None) is None:  # Orbax would look for the devices that saved it
            name = jax.tree_util.keystr(path)
            raise CheckpointError(
                f"like{name} is {type(leaf).__name__} without a sharding; "
                "accepted: jax.Array or jax.ShapeDtypeStruct with a sharding"
            )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree_util.tree_map_with_path(described, like)


def _root_cause(error: BaseException) -> str:
    """The first line of the error that began the chain, which Orbax wraps in errors about its handlers."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).split(" [tensorstore_spec", 1)[0].split("\n", 1)[0]
    return f"{type(error).__name__}: {text[:500]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax from logging each failure's tracebacks: it raises the failure as well."""

    def foreign(record: logging.LogRecord) -> bool:
        return "/orbax/" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(foreign)
    try:
        yield
    finally:
        logger.removeFilter(foreign)
