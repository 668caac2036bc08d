"""Paged pools: their size, where a token lies, and writing chunks that start and end anywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from longstraw_jax import parallel, sharding
from longstraw_jax.prefix import pages
from longstraw_jax.types import PAGE


@pytest.mark.parametrize(
    "tokens, devices, count",
    [
        (0, 1, 1),
        (1, 1, 1),
        (64, 1, 1),
        (65, 1, 2),
        (149, 1, 3),
        (0, 32, 32),
        (64 * 32, 32, 32),
        (64 * 32 + 1, 32, 64),
    ],
)
def test_pages_are_whole_on_every_device(tokens, devices, count):
    assert pages.page_count(tokens, devices) == count


@pytest.mark.parametrize("devices", tiny.MESHES)
def test_prefix_bytes_are_what_lies_on_the_devices(devices):
    state = pages.allocate(tiny.model(devices), 300)
    pools = [*state.latents, *state.index_keys]
    assert sum(x.nbytes for x in pools) == pages.prefix_bytes(tiny.CONFIG, 300, devices)
    for pool in pools:
        assert all(shard.data.nbytes * devices == pool.nbytes for shard in pool.addressable_shards)
    assert int(state.length) == 0


def prompt_order(pool: np.ndarray, devices: int) -> np.ndarray:
    """[.., pages, 64, W] device-major -> [.., tokens, W]: page p is the (p // n)-th page of device p % n."""
    per_device = pool.shape[-3] // devices
    page = np.arange(pool.shape[-3])
    return pool[..., (page % devices) * per_device + page // devices, :, :].reshape(
        *pool.shape[:-3], -1, pool.shape[-1]
    )


@pytest.mark.parametrize("devices", [1, 32])
@pytest.mark.parametrize("chunk", [1, 64, 150])
def test_chunks_land_in_their_rows_and_nowhere_else(chunk, devices):
    """Starts and counts at odd places, on page borders, and across the round of all devices."""
    count = pages.page_count(5000, devices)
    tokens = count * PAGE
    specs = (P(None, sharding.AXIS), P(), P(), P())

    def body(axis, pool, values, start, count):
        capacity = pool.shape[1] * PAGE
        index, rows = pages.chunk_rows(start, count, chunk, capacity, axis)
        return pages.write(pool, rows, values[:, index])

    run = jax.jit(parallel.mapped(body, sharding.make_mesh(devices), specs, specs[0]))
    before = np.random.default_rng(0).standard_normal((2, count, PAGE, 3)).astype(np.float32)
    values = 100 + np.arange(2 * chunk * 3, dtype=np.float32).reshape(2, chunk, 3)
    starts = {0, 1, 63, 64, 65, 31 * 64 + 17, 32 * 64 - 1, 32 * 64, tokens - chunk}
    for start in sorted(starts):
        for real in sorted({0, 1, chunk // 2, chunk}):
            want = prompt_order(before, devices).copy()
            want[:, start : start + real] = values[:, :real]
            found = run(before, values, jnp.int32(start), jnp.int32(real))
            np.testing.assert_array_equal(prompt_order(np.asarray(found), devices), want)


def test_rows_are_read_where_they_were_written_and_nothing_elsewhere():
    pool = np.random.default_rng(0).standard_normal((2, 3, PAGE, 5)).astype(np.float32)
    rows = np.asarray([130, 0, 3 * PAGE, 64])  # the third is out of bounds
    found = np.asarray(pages.read(jnp.asarray(pool), jnp.asarray(rows)))
    np.testing.assert_array_equal(found[:, [0, 1, 3]], pool.reshape(2, -1, 5)[:, rows[[0, 1, 3]]])
    assert not found[:, 2].any()


def test_scattered_rows_are_summed_on_the_device_that_owns_them():
    """What flat_pages gathers, transposed: <gather(x), y> = <x, scatter(y)> with another y on every device."""
    devices, count = 8, 16
    rng = np.random.default_rng(0)
    pool = rng.integers(-9, 9, (count, PAGE, 3)).astype(np.float32)
    rows = rng.integers(-9, 9, (devices, count * PAGE, 3)).astype(np.float32)

    def body(axis, rows):
        return parallel.scatter_pages(rows[0], axis)

    specs = (P(sharding.AXIS),)
    found = jax.jit(parallel.mapped(body, sharding.make_mesh(devices), specs, specs[0]))(rows)
    np.testing.assert_array_equal(prompt_order(np.asarray(found), devices), rows.sum(0))
    assert (np.asarray(found) * pool).sum() == (rows.sum(0) * prompt_order(pool, devices)).sum()


@pytest.mark.parametrize("devices", [1, 32])
def test_gathered_pages_are_in_prompt_order(devices):
    count = 2 * devices
    pool = np.random.default_rng(0).standard_normal((count, PAGE, 3)).astype(np.float32)

    def body(axis, pool):
        return parallel.flat_pages(pool, axis)

    run = jax.jit(parallel.mapped(body, sharding.make_mesh(devices), (P(sharding.AXIS),), P()))
    np.testing.assert_array_equal(run(pool), prompt_order(pool, devices))
