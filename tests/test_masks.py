"""Masks: any eos, eos as padding, full windows, empty rows."""

import jax
import numpy as np
import pytest

from longstraw_jax.rl.masks import finish, response_mask, without_rows

EOS = (90, 91, 92)


def test_b1_any_eos_ends_a_response_and_is_part_of_it():
    tokens = np.array([[5, 90, 7, 91], [91, 90, 90, 8], [5, 6, 92, 6], [5, 6, 7, 8]])
    lengths, truncated = finish(tokens, EOS, max_len=4)
    assert lengths.tolist() == [2, 1, 3, 4] and truncated.tolist() == [False, False, False, True]
    mask = np.asarray(response_mask(lengths, 4))
    assert mask.sum(axis=1).tolist() == [2, 1, 3, 4]
    assert mask[0].tolist() == [True, True, False, False]


def test_b2_eos_that_is_also_the_padding_keeps_its_place():
    lengths, truncated = finish(np.array([[5, 6, 7, 2], [5, 2, 2, 2]]), 2, max_len=4)
    assert np.asarray(response_mask(lengths, 4)).tolist() == [[True] * 4, [True, True, False, False]]
    assert not truncated.any()


def test_b7_length_zero_and_dropped_rows_are_empty():
    mask = response_mask(np.array([0, 3, 3]), 3)
    assert np.asarray(without_rows(mask, np.array([False, True, False]))).sum(axis=1).tolist() == [0, 0, 3]


def test_b8_eos_in_the_last_slot_is_not_truncation():
    lengths, truncated = finish(np.array([[1, 2, 3, 4], [1, 2, 3, 90]]), EOS, max_len=4)
    assert lengths.tolist() == [4, 4] and truncated.tolist() == [True, False]
    assert np.asarray(response_mask(lengths, 4)).all()
    # an eos past the budget does not count, and a longer length does not read past the buffer
    lengths, truncated = finish(np.array([[1, 2, 3, 4, 90]]), EOS, max_len=4)
    assert lengths.tolist() == [4] and truncated.tolist() == [True]
    assert response_mask(np.array([9]), 4).shape == (1, 4)


def test_no_eos_ids_means_every_response_uses_its_budget():
    lengths, truncated = finish(np.array([[1, 2, 0]]), (), max_len=3)
    assert lengths.tolist() == [3] and truncated.tolist() == [True]
    lengths, truncated = finish(np.zeros((2, 0), np.int32), EOS, max_len=3)
    assert lengths.tolist() == [0, 0] and truncated.all()


def test_mask_is_traceable_with_a_static_width():
    mask = jax.jit(response_mask, static_argnums=1)(np.array([1, 2]), 2)
    assert np.asarray(mask).tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("tokens", [np.zeros(3, int), np.zeros((1, 3))])
def test_tokens_that_are_not_ids_are_refused(tokens):
    with pytest.raises(ValueError, match="tokens: shape"):
        finish(tokens, EOS, max_len=3)
    with pytest.raises(ValueError, match="max_len: 0; accepted"):
        finish(np.zeros((1, 3), int), EOS, max_len=0)
