"""Capture at any prompt length, chunk and capacity, on any mesh, against one pass with nothing resident."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from jax.sharding import PartitionSpec as P
from test_pages import prompt_order

from longstraw_jax import lora, parallel, replay, sharding
from longstraw_jax.config import ConfigError
from longstraw_jax.model import decoder, rope
from longstraw_jax.model.block import Pass
from longstraw_jax.prefix import pages
from longstraw_jax.prefix.capture import capture, capture_chunk

# Resident tokens: none (a prompt of one token), fewer than index_topk, less than a chunk, a whole page and
# chunk, one token more, and a partly filled last page. All leave room in the pools.
LENGTHS = (0, 1, 5, 40, 64, 65, 149)


def rows_of(state, devices):
    """Latents and index keys of the resident tokens in prompt order."""
    pools = [*state.latents, *state.index_keys]
    return [prompt_order(np.asarray(pool), devices)[..., : int(state.length), :] for pool in pools]


def assert_same_rows(found, wanted, tolerance=2e-5):
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance)


@functools.cache
def resident_selections(devices: int, strategy: str):
    """Program: what every layer selects for T tokens behind a resident prompt, [layers, T, K]."""
    model = tiny.model(devices)

    def body(axis, base, adapters, state, ids):
        index = parallel.axis_index(axis) * ids.shape[0] + jnp.arange(ids.shape[0], dtype=jnp.int32)
        rotary = model.config.rope_parameters, model.config.qk_rope_head_dim
        cos, sin = rope.cos_sin((state.length + index)[None], *rotary)
        run = Pass(axis, cos, sin, index[None], state.length, strategy=strategy, collect=True)
        resident = tuple(zip(state.latents, state.index_keys, strict=True))
        trunk = nnx.merge(model.graphdef, base)
        _, _, extras = trunk(ids[None], run, pages=resident, adapters=adapters, lora=model.lora)
        return jnp.concatenate([layers["selection"][:, 0] for runs in extras for layers in runs])

    specs = (
        decoder.param_specs(tiny.CONFIG),
        lora.adapter_specs(tiny.CONFIG, tiny.LORA),
        pages.prefix_specs(tiny.CONFIG),
        P(sharding.AXIS),
    )
    return jax.jit(parallel.mapped(body, model.mesh, specs, P(None, sharding.AXIS)))


@functools.cache
def resident(devices: int, length: int):
    return tiny.captured(devices, tiny.TOKENS[:length])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "devices, strategy", [(1, "gather_keys"), (32, "gather_keys"), (32, "merge_candidates")]
)
def test_f3_selections_equal_one_full_pass(devices, strategy, length):
    """Every layer, shared ones included, and both ways to select over a mesh."""
    ids = tiny.TOKENS[length : length + tiny.T]
    program = resident_selections(devices, strategy)
    found = np.asarray(program(tiny.base(devices), tiny.adapters(devices), resident(devices, length), ids))
    layers = tiny.full()[1]
    assert len(found) == len(layers) == tiny.CONFIG.num_hidden_layers
    for layer, (mine, whole) in enumerate(zip(found, layers, strict=True)):
        want = whole["selection"][0, length : length + tiny.T]
        np.testing.assert_array_equal(np.sort(mine, -1), np.sort(want, -1), err_msg=f"layer {layer}")
    np.testing.assert_array_equal(np.sort(found[3:], -1), np.sort(found[[2, 2]], -1))
    counts = np.minimum(np.arange(length + 1, length + tiny.T + 1), tiny.CONFIG.index_topk)
    assert ((found >= 0).sum(-1) == counts).all()


@pytest.mark.parametrize("devices", [1, 32])
@pytest.mark.parametrize("length", LENGTHS)
def test_log_probs_equal_one_full_pass(devices, length):
    response = tiny.TOKENS[length + 1 : length + 1 + tiny.T].tolist()
    logprobs, _ = tiny.score(
        devices, resident(devices, length), [response], boundary=int(tiny.TOKENS[length])
    )
    want = tiny.full_logprobs()[length : length + len(response)]
    np.testing.assert_allclose(logprobs[0, : len(response)], want, atol=1e-5)


@pytest.mark.parametrize("devices", [8, 32])
def test_a_mesh_holds_the_rows_of_one_device(devices):
    assert_same_rows(rows_of(tiny.prefix(devices), devices), rows_of(tiny.prefix(1), 1))


def test_the_chunk_and_the_room_change_nothing():
    """A chunk that is no multiple of the page, into pools without spare pages."""
    seen = []
    state = tiny.captured(1, chunk=37, capacity=None, progress=seen.append)
    assert seen == [37, 74, 111, 148, 149]
    assert state.latents[0].shape[2] == 3 and tiny.prefix(1).latents[0].shape[2] == 4
    assert_same_rows(rows_of(state, 1), rows_of(tiny.prefix(1), 1))


@pytest.mark.parametrize("chunk", [33, 37, 50])
def test_a_mesh_takes_chunks_that_it_does_not_divide(chunk):
    """Padded to 64, one program: chunks start at odd rows of pages on changing devices."""
    state = tiny.captured(32, chunk=chunk)
    assert_same_rows(rows_of(state, 32), rows_of(tiny.prefix(1), 1))


@pytest.mark.parametrize("devices", [1, 32])
def test_padding_of_a_chunk_has_no_influence(devices):
    model, base, adapters = tiny.model(devices), tiny.base(devices), tiny.adapters(devices)

    def padded_with(value):
        state = pages.allocate(model, tiny.CAPACITY)
        for start, count in ((0, 64), (64, 29)):
            ids = np.full((64,), value, np.int32)
            ids[:count] = tiny.TOKENS[start : start + count]
            state = capture_chunk(model, base, adapters, state, ids, np.int32(count))
        return state

    zeros, poisoned = padded_with(0), padded_with(tiny.CONFIG.vocab_size - 1)
    assert int(zeros.length) == 93
    for x, y in zip(jax.tree.leaves(zeros), jax.tree.leaves(poisoned), strict=True):
        np.testing.assert_array_equal(x, y)
    empty = np.concatenate([prompt_order(np.asarray(x), devices)[0, 0, 93:] for x in zeros.latents])
    assert (empty == 0).all()


def test_capture_needs_no_adapters():
    """Without adapters the pages are another policy's: those of the base."""
    assert_same_rows(rows_of(tiny.prefix(32, frozen=True), 32), rows_of(tiny.prefix(1, frozen=True), 1))
    gaps = [
        np.abs(x - y).max()
        for x, y in zip(rows_of(tiny.prefix(1, frozen=True), 1), rows_of(tiny.prefix(1), 1), strict=True)
    ]
    assert min(gaps) > 1e-3


def test_h2_a_prompt_past_the_position_range_is_refused():
    most = tiny.CONFIG.max_position_embeddings
    with pytest.raises(ConfigError, match=rf"prompt of {most + 1} tokens .*={most}; .*YaRN.*yarn_positions"):
        tiny.captured(1, np.zeros((most,), np.int32))


@pytest.mark.parametrize(
    "tokens, options, message",
    [
        ([1, 2], {"chunk": 0}, "chunk=0; accepted: at least 1"),
        ([1, 2, 3], {"capacity": 2}, "capacity=2; accepted: at least the 3 tokens"),
        ([1, -1], {}, "token id -1 at index 1; accepted: 0 to 287"),
        ([288, 1], {}, "token id 288 at index 0; accepted: 0 to 287"),
        ([1, 2], {"record": ("routes",)}, r"record=\('routes',\) with keep=None; accepted: kinds and what"),
        ([1, 2], {"keep": print}, r"record=\(\) with keep=<built-in function print>; accepted: .* or neither"),
    ],
)
def test_bad_input_is_named(tokens, options, message):
    options = {"chunk": 64, "fingerprint": tiny.FINGERPRINT} | options
    with pytest.raises(ValueError, match=message):
        capture(tiny.model(1), None, None, np.asarray(tokens), **options)  # before any weight is touched


def test_pages_in_host_memory_hold_the_same_rows_and_serve_the_same_log_probs(devices=8):
    """Chunks of a page a device, the last one partly filled; every step stages pages from pinned memory."""
    model = dataclasses.replace(tiny.model(devices), prefix_store="host")
    state = capture(
        model, tiny.base(devices), tiny.adapters(devices), tiny.TOKENS[: tiny.S - 1], chunk=64 * devices,
        fingerprint=tiny.FINGERPRINT,
    )  # fmt: skip
    pools = jax.tree.leaves((state.latents, state.index_keys))
    assert {pool.sharding.memory_kind for pool in pools} == {"pinned_host"}
    assert_same_rows(rows_of(state, devices), rows_of(tiny.prefix(devices), devices))
    member = tiny.members([tiny.RESPONSE])
    args = (tiny.base(devices), tiny.adapters(devices))
    found, _ = replay.score(model, *args, state, *member)
    want, _ = replay.score(tiny.model(devices), *args, tiny.prefix(devices), *member)
    np.testing.assert_allclose(found[0], want[0], atol=1e-5)


def test_host_pages_need_whole_pages_a_chunk():
    model = dataclasses.replace(tiny.model(8), prefix_store="host")
    with pytest.raises(ValueError, match="chunk=500 with prefix_store='host'; accepted: a multiple of 512"):
        capture(model, None, None, tiny.TOKENS[:20], chunk=500, fingerprint=tiny.FINGERPRINT)
