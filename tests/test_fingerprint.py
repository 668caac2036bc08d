"""Fingerprints see every bit, position, path and dtype, and no sharding."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longstraw_jax.fingerprint import device_fingerprint, sha256_file, sha256_json, tree_fingerprint

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint8", "int32", "int4", "bool"]


def _mesh(count: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), ("x",))


def _tree() -> dict:
    rng = np.random.default_rng(0)
    return {
        "a": jnp.asarray(rng.normal(size=(64, 32)), jnp.float32),
        "b": {"c": jnp.asarray(rng.normal(size=(32, 4, 8)), jnp.bfloat16), "step": jnp.int32(7)},
    }


def test_is_hex_and_repeatable():
    first = tree_fingerprint(_tree())
    assert first == tree_fingerprint(_tree())
    assert len(first) == 16 and int(first, 16)


@pytest.mark.parametrize("count", [8, 32])
@pytest.mark.parametrize("spec", [P("x"), P(None), P(None, "x")])
def test_sharding_changes_nothing(count, spec):
    tree = {"a": _tree()["a"], "n": jnp.arange(32 * 32, dtype=jnp.int8).reshape(32, 32)}
    sharded = jax.device_put(tree, NamedSharding(_mesh(count), spec))
    assert tree_fingerprint(sharded) == tree_fingerprint(tree)


def test_leaves_on_different_devices():
    tree = _tree()
    moved = {name: jax.device_put(tree[name], jax.devices()[i]) for name, i in (("a", 3), ("b", 5))}
    assert tree_fingerprint(moved) == tree_fingerprint(tree)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_is_seen(dtype):
    base = np.zeros((3, 4), jnp.dtype(dtype))
    seen = {tree_fingerprint({"w": base})}
    width = 1 if dtype == "bool" else 4 if dtype == "int4" else 8 * base.dtype.itemsize
    for bit in range(width):
        changed = base.copy()
        if dtype == "bool":
            changed[1, 2] = True
        elif dtype == "int4":
            changed[1, 2] = (1, 2, 4, -8)[bit]
        else:
            flat = changed.reshape(-1).view(f"uint{width}")
            flat[6] ^= np.array(1 << bit, flat.dtype)
        seen.add(tree_fingerprint({"w": changed}))
    assert len(seen) == width + 1


def test_nan_payload_and_signed_zero_are_seen():
    patterns = np.array([0, 0x80000000, 0x7FC00000, 0x7FC00001, 0x7FA00000, 0xFFC00000], np.uint32)
    prints = {tree_fingerprint({"w": p.reshape(1).view(np.float32)}) for p in patterns}
    assert len(prints) == len(patterns)


def test_swapped_elements_rows_and_leaves_are_seen():
    tree = _tree()
    base = tree_fingerprint(tree)
    a = tree["a"]
    elements = a.at[0, 0].set(a[5, 9]).at[5, 9].set(a[0, 0])
    rows = a.at[jnp.array([0, 1])].set(a[jnp.array([1, 0])])
    for changed in (elements, rows, a[::-1], a[:, ::-1]):
        assert tree_fingerprint({**tree, "a": changed}) != base
    pair = {"p": a, "q": a + 1}
    assert tree_fingerprint(pair) != tree_fingerprint({"p": a + 1, "q": a})


def test_equal_bits_of_another_dtype_shape_or_path_are_seen():
    bits = np.arange(1, 13, dtype=np.uint32)
    views = [
        {"w": bits},
        {"w": bits.view(np.int32)},
        {"w": bits.view(np.float32)},
        {"w": bits.reshape(3, 4)},
        {"w": bits.reshape(12, 1)},
        {"v": bits},
        {"w": bits, "empty": np.zeros((0,), np.float32)},
        {},
    ]
    assert len({tree_fingerprint(view) for view in views}) == len(views)


def test_square_transpose_is_seen():
    x = jnp.arange(64.0).reshape(8, 8)
    assert tree_fingerprint({"w": x}) != tree_fingerprint({"w": x.T})


def test_device_form_agrees_inside_jit():
    tree = _tree()
    words = jax.jit(device_fingerprint)(tree)
    assert words.dtype == jnp.uint32 and words.shape == (2,)
    assert "".join(f"{int(word):08x}" for word in words) == tree_fingerprint(tree)


@pytest.mark.parametrize("count", [1, 32])
def test_needs_no_memory_of_the_size_of_the_leaf(count):
    leaf = jax.device_put(jnp.zeros((1024, 1024), jnp.bfloat16), NamedSharding(_mesh(count), P("x")))
    memory = jax.jit(device_fingerprint).lower({"w": leaf}).compile().memory_analysis()
    assert memory.temp_size_in_bytes < leaf.nbytes / 32


def test_random_keys_are_taken():
    assert tree_fingerprint({"k": jax.random.key(0)}) != tree_fingerprint({"k": jax.random.key(1)})


def test_bad_leaves_are_named():
    with pytest.raises(ValueError, match=r"\['lr'\] is float; "):
        tree_fingerprint({"lr": 0.1})
    with pytest.raises(ValueError, match=r"\['w'\] is float64, which JAX would narrow to float32"):
        tree_fingerprint({"w": np.zeros(3)})


def test_j1_one_optimizer_step_changes_the_fingerprint():
    """A resident prompt captured before an update must be recognisable as stale after it."""
    adapters = {"A": jnp.ones((8, 2)), "B": jnp.zeros((2, 8))}
    optimizer = optax.adamw(1e-6)
    gradient = {"A": jnp.zeros((8, 2)), "B": jnp.full((2, 8), 1e-3)}
    updates, _ = optimizer.update(gradient, optimizer.init(adapters), adapters)
    assert tree_fingerprint(optax.apply_updates(adapters, updates)) != tree_fingerprint(adapters)


def test_sha256(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    assert sha256_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    reordered = json.loads('{"a": [1.50, "\\u00e9", null], "b": 1}')
    assert sha256_json({"b": 1, "a": [1.5, "é", None]}) == sha256_json(reordered)
    assert sha256_json({"a": 1}) != sha256_json({"a": 1.5})
    with pytest.raises(ValueError):
        sha256_json({"a": float("nan")})
