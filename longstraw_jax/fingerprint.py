"""Fingerprints: of array trees, computed where the arrays live, and of files and JSON values.

An array tree's fingerprint is two 32-bit words. Each element's bits are mixed (the finaliser of MurmurHash3)
with a hash of its position and of its leaf's path, dtype and shape, and the results are added modulo 2**32. A
sum has no order, so no sharding, device count or reduction order changes it; the mixing is a bijection of the
bits, so one flipped bit always does. It finds accidents, not forgers: files that are published carry SHA-256.
"""

import hashlib
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

_WORDS = 2
_ODD = (0x9E3779B1, 0x85EBCA77)  # multipliers that make the two words independent; odd, so invertible
_BLOCK_BYTES = 1 << 20


def tree_fingerprint(tree: Any) -> str:
    """Fingerprint of a pytree of arrays as 16 hexadecimal digits.

    One small program runs for each leaf shape, on the devices that hold the leaf; only two words come to the
    host. Depends on bits, positions, paths, dtypes and shapes, and not on how the leaves are sharded.

    Args:
      tree: pytree of JAX or NumPy arrays: floats and integers of any width, booleans, random keys.

    Returns:
      16 hexadecimal digits.

    Raises:
      ValueError: a leaf is not an array, or has a 64-bit dtype that this JAX would narrow. Names the leaf.
    """
    total = np.zeros(_WORDS, np.uint32)
    for leaf, seeds in _seeded_leaves(tree):
        # Waits for each: the processes of a run could otherwise wait for one another in different leaves.
        total += np.asarray(_leaf_program(leaf, seeds))
    return "".join(f"{int(word):08x}" for word in total)


def device_fingerprint(tree: Any) -> UInt32[Array, "2"]:
    """The words of `tree_fingerprint` as an array, for use inside `jit`.

    Args:
      tree: pytree of arrays or tracers; all must be usable in one program.

    Returns:
      uint32[2]; `tree_fingerprint` is its two words written in hexadecimal.

    Raises:
      ValueError: as `tree_fingerprint`, while tracing.
    """
    total = jnp.zeros(_WORDS, jnp.uint32)
    for leaf, seeds in _seeded_leaves(tree):
        total += _leaf_program(leaf, seeds)  # leaves of one shape are traced and lowered once
    return total


def sha256_file(path: str | os.PathLike) -> str:
    """SHA-256 of a file's bytes as 64 hexadecimal digits; reads 1 MiB at a time. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form: sorted keys, no spaces, UTF-8, shortest floats.

    Raises:
      ValueError: the value holds NaN or infinity, which JSON cannot carry.
      TypeError: the value holds something that is not JSON.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _seeded_leaves(tree: Any) -> list[tuple[Any, np.ndarray]]:
    """Each leaf with the uint32[2] seeds of its path, dtype and shape."""
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise ValueError(f"leaf {name or '(root)'} is {type(leaf).__name__}; accepted: arrays")
        narrowed = jax.eval_shape(lambda x: x, leaf).dtype
        if narrowed != leaf.dtype:
            raise ValueError(
                f"leaf {name or '(root)'} is {leaf.dtype}, which JAX would narrow to {narrowed}; "
                f"pass {narrowed} or enable jax_enable_x64"
            )
        label = f"{name}|{leaf.dtype}|{tuple(leaf.shape)}"
        digest = hashlib.sha256(label.encode("utf-8")).digest()
        leaves.append((leaf, np.frombuffer(digest[: 4 * _WORDS], "<u4").astype(np.uint32)))
    return leaves


def _leaf_words(leaf: Array, seeds: UInt32[Array, "2"]) -> UInt32[Array, "2"]:
    """Sums the mixed elements of one leaf for both words."""
    bits = _bits(leaf)
    seeds = jnp.asarray(seeds, jnp.uint32)
    mixed = []
    for word in range(_WORDS):
        odd = jnp.uint32(_ODD[word])
        # One short hash vector an axis, added by broadcasting: an axis length, never an element count, has to
        # fit 32 bits, and a sharded leaf needs no global index array.
        position = seeds[word]
        for axis, size in enumerate(bits.shape):
            axis_seed = _mix(seeds[word] + jnp.uint32(axis + 1) * odd)
            steps = _mix(jnp.arange(size, dtype=jnp.uint32) * odd ^ axis_seed)
            position = position + steps.reshape((size,) + (1,) * (bits.ndim - 1 - axis))
        mixed.append(_mix(bits * odd + position))
    # Both words in one reduction: the leaf is read once, and XLA's CPU backend, which splits a single-array
    # sum in two passes, keeps no temporary of the leaf's size.
    zeros = (jnp.uint32(0),) * _WORDS
    sums = jax.lax.reduce(tuple(mixed), zeros, lambda x, y: tuple(map(jnp.add, x, y)), range(bits.ndim))
    # The outer mix keeps a permutation of whole leaves from cancelling in the sum over leaves.
    return _mix(jnp.stack(sums) ^ seeds)


_leaf_program = jax.jit(_leaf_words)


def _bits(leaf: Array) -> UInt32[Array, "..."]:
    """The leaf's bit patterns as uint32; 64-bit and complex leaves gain a trailing axis of 2."""
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    width = jnp.finfo(leaf.dtype).bits if floating else jnp.iinfo(leaf.dtype).bits
    if width == 64:
        return jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    return jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{width}")).astype(jnp.uint32)


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """MurmurHash3's 32-bit finaliser: a bijection in which every input bit reaches every output bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
