"""Pages on disk: a capture that stopped goes on to the same state."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from longstraw_jax.io import prefix_pages
from longstraw_jax.prefix import capture, pages
from longstraw_jax.types import PAGE

BOUND = {"prompt": "p0", "weights": "w0"}
TOKENS = tiny.TOKENS[: tiny.S - 1]


def run(devices, state, stop, *, start=0):
    """Captures chunks from token `start` on until `stop` tokens are resident."""
    model = tiny.model(devices)
    for at, count, ids in capture.chunk_ids(model, TOKENS, tiny.CHUNK):
        if start <= at < stop:
            state = capture.capture_chunk(
                model, tiny.base(devices), tiny.adapters(devices), state, ids, np.int32(count)
            )
    return state


def empty(devices):
    return pages.allocate(tiny.model(devices), tiny.CAPACITY)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_resumed_capture_ends_where_a_straight_one_does(tmp_path, devices):
    model, middle = tiny.model(devices), 2 * tiny.CHUNK
    straight = jax.tree.map(np.asarray, run(devices, empty(devices), TOKENS.size))
    first = run(devices, empty(devices), tiny.CHUNK)
    saved = prefix_pages.save(tmp_path, model, first, BOUND)
    assert saved == tiny.CHUNK
    second = run(devices, first, middle, start=tiny.CHUNK)
    assert prefix_pages.save(tmp_path, model, second, BOUND, saved=saved) == middle
    again = prefix_pages.load(tmp_path, model, tiny.CAPACITY, BOUND)
    assert int(again.length) == middle
    ended = run(devices, again, TOKENS.size, start=middle)
    jax.tree.map(np.testing.assert_array_equal, ended, straight)


def test_what_does_not_fit_is_refused(tmp_path):
    model = tiny.model(1)
    assert prefix_pages.load(tmp_path, model, tiny.CAPACITY, BOUND) is None
    prefix_pages.save(tmp_path, model, run(1, empty(1), TOKENS.size), BOUND)
    with pytest.raises(ValueError, match="its pages are bound to .*'p0'.*; accepted: .*'p1'"):
        prefix_pages.load(tmp_path, model, tiny.CAPACITY, {**BOUND, "prompt": "p1"})
    with pytest.raises(ValueError, match=f"{TOKENS.size} tokens; accepted: at most the capacity of {TOKENS.size - 1}"):
        prefix_pages.load(tmp_path, model, TOKENS.size - 1, BOUND)
    path = tmp_path / "latents.0.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="latents.0.bin: ends in page"):
        prefix_pages.load(tmp_path, model, tiny.CAPACITY, BOUND)


def test_progress_counts_only_what_was_named_last(tmp_path):
    """Pages of a save that was cut off before its last rename are overwritten by the next."""
    model = tiny.model(1)
    state = run(1, empty(1), tiny.CHUNK)
    saved = prefix_pages.save(tmp_path, model, state, BOUND)
    before = (tmp_path / prefix_pages.PROGRESS_FILE).read_bytes()
    state = run(1, state, TOKENS.size, start=tiny.CHUNK)
    prefix_pages.save(tmp_path, model, state, BOUND, saved=saved)
    (tmp_path / prefix_pages.PROGRESS_FILE).write_bytes(before)
    again = prefix_pages.load(tmp_path, model, tiny.CAPACITY, BOUND)
    assert int(again.length) == json.loads(before)["tokens"] == tiny.CHUNK
    ended = run(1, again, TOKENS.size, start=tiny.CHUNK)
    jax.tree.map(np.testing.assert_array_equal, ended.latents, state.latents)


def test_pages_that_are_not_those_written_are_refused(tmp_path):
    model = tiny.model(1)
    prefix_pages.save(tmp_path, model, run(1, empty(1), TOKENS.size), BOUND)
    path = tmp_path / "index_keys.1.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="index_keys.1.bin: pages 0 to 2 are not those written"):
        prefix_pages.load(tmp_path, model, tiny.CAPACITY, BOUND)
    path.unlink()
    (tmp_path / prefix_pages.PROGRESS_FILE).write_text('{"tokens": 64}')
    with pytest.raises(ValueError, match=r"progress.json: holds \['tokens'\]; accepted: blocks, bound, tokens"):
        prefix_pages.load(tmp_path, model, tiny.CAPACITY, BOUND)


def test_nothing_vouches_for_pages_that_are_being_written_anew(tmp_path):
    model = tiny.model(1)
    state = run(1, empty(1), tiny.CHUNK)
    prefix_pages.save(tmp_path, model, state, BOUND)
    (tmp_path / "index_keys.0.bin").unlink()
    (tmp_path / "index_keys.0.bin").mkdir()  # as a full disk, the second save stops half-way
    with pytest.raises(OSError):
        prefix_pages.save(tmp_path, model, state, BOUND)
    assert prefix_pages.load(tmp_path, model, tiny.CAPACITY, BOUND) is None


def test_a_page_is_filled_by_two_saves_and_counts_as_far_as_was_named(tmp_path):
    model, end = tiny.model(1), TOKENS.size
    whole = run(1, empty(1), end)
    part = dataclasses.replace(whole, length=jnp.int32(end - 5))
    hidden = tuple(x.at[:, :, 2, end - 5 - 2 * PAGE :].set(0) for x in part.latents)
    keys = tuple(x.at[:, 2, end - 5 - 2 * PAGE :].set(0) for x in part.index_keys)
    part = dataclasses.replace(part, latents=hidden, index_keys=keys)
    saved = prefix_pages.save(tmp_path, model, part, BOUND)
    before = (tmp_path / prefix_pages.PROGRESS_FILE).read_bytes()
    assert prefix_pages.save(tmp_path, model, whole, BOUND, saved=saved) == end
    jax.tree.map(np.testing.assert_array_equal, prefix_pages.load(tmp_path, model, tiny.CAPACITY, BOUND), whole)
    (tmp_path / prefix_pages.PROGRESS_FILE).write_bytes(before)
    jax.tree.map(np.testing.assert_array_equal, prefix_pages.load(tmp_path, model, tiny.CAPACITY, BOUND), part)


def test_pages_on_the_host_are_refused(tmp_path):
    model = dataclasses.replace(tiny.model(1), prefix_store="host")
    said = "prefix_store='host' with pages saved or resumed; accepted: 'device'"
    with pytest.raises(ValueError, match=said):
        prefix_pages.save(tmp_path, model, empty(1), BOUND)
    with pytest.raises(ValueError, match=said):
        prefix_pages.load(tmp_path, model, tiny.CAPACITY, BOUND)
