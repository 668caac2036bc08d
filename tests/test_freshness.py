"""A prefix state knows which weights captured it."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from longstraw_jax import config, fingerprint
from longstraw_jax.prefix import freshness


def moved(tree):
    """The tree with one number of one leaf changed in its last place."""
    leaves, structure = jax.tree.flatten(tree)
    flat = np.asarray(leaves[0]).copy()
    flat.reshape(-1)[0] = np.nextafter(flat.reshape(-1)[0], np.float32(np.inf))
    return jax.tree.unflatten(structure, [jax.device_put(flat, leaves[0].sharding), *leaves[1:]])


@pytest.fixture(scope="module")
def base_print():
    return fingerprint.device_fingerprint(tiny.base(1)["embed_tokens"])


def hexadecimal(words):
    return "".join(f"{int(word):08x}" for word in np.asarray(words))


def test_j1_a_prefix_of_other_adapters_is_refused_and_both_are_named(base_print):
    before = freshness.weights_fingerprint(base_print, tiny.adapters(1))
    after = freshness.weights_fingerprint(base_print, moved(tiny.adapters(1)))
    state = tiny.captured(1, fingerprint=before)
    freshness.check_fresh(state, before)
    with pytest.raises(freshness.StalePrefixError) as error:
        freshness.check_fresh(state, after)
    assert hexadecimal(before) in str(error.value) and hexadecimal(after) in str(error.value)
    assert "capture the prompt again" in str(error.value) and "'frozen'" in str(error.value)
    freshness.check_fresh(tiny.captured(1, fingerprint=after), after)


def test_j1_a_frozen_prefix_outlives_every_step(base_print):
    """It is captured without adapters, so that its fingerprint is the base's alone."""
    state = tiny.captured(1, frozen=True, fingerprint=freshness.weights_fingerprint(base_print, None))
    freshness.check_fresh(state, freshness.weights_fingerprint(base_print, None))
    with pytest.raises(freshness.StalePrefixError):
        freshness.check_fresh(state, freshness.weights_fingerprint(base_print, tiny.adapters(1)))


def test_j1_another_base_is_noticed(base_print):
    other = fingerprint.device_fingerprint(moved(tiny.base(1)["embed_tokens"]))
    for used in (None, tiny.adapters(1)):
        state = tiny.captured(1, fingerprint=freshness.weights_fingerprint(base_print, used))
        with pytest.raises(freshness.StalePrefixError):
            freshness.check_fresh(state, freshness.weights_fingerprint(other, used))


def test_the_captures_fingerprint_survives_its_donated_chunks(base_print):
    """Capturing twice with one fingerprint array must not find it deleted."""
    for _ in range(2):
        state = tiny.captured(1, fingerprint=base_print)
    np.testing.assert_array_equal(state.fingerprint, base_print)


def test_j1_another_reading_of_the_same_weights_is_another_policy():
    """Rotary scaling and adapter scales change the state that the same arrays give."""
    model, base = tiny.model(1), "0123456789abcdef"
    words = freshness.policy_fingerprint(model, base)
    np.testing.assert_array_equal(words, freshness.policy_fingerprint(tiny.model(8), base))
    longer = config.extend_positions(model.config, 2 * model.config.max_position_embeddings)
    targets = tuple((name, rank, 2 * alpha) for name, rank, alpha in model.lora.targets)
    for other in (
        freshness.policy_fingerprint(model, base[::-1]),
        freshness.policy_fingerprint(dataclasses.replace(model, config=longer), base),
        freshness.policy_fingerprint(dataclasses.replace(model, lora=config.LoraConfig(targets)), base),
    ):
        assert not np.array_equal(words, other)
