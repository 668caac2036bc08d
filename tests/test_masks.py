"""Masks: full windows, empty rows."""

import jax
import numpy as np

from longstraw_jax import replay
from longstraw_jax.rl.masks import response_mask, without_rows


def test_b2_an_eos_that_is_also_the_padding_keeps_its_place():
    _, targets, lengths = replay.member_inputs(7, [[5, 0], [5, 6, 0], [5]], 4)
    assert (targets[0] == targets[2]).all()  # only the lengths tell them apart
    expected = [[True, True, False, False], [True, True, True, False], [True, False, False, False]]
    assert np.asarray(response_mask(lengths, 4)).tolist() == expected


def test_b7_length_zero_and_dropped_rows_are_empty():
    mask = response_mask(np.array([0, 3, 3]), 3)
    assert np.asarray(without_rows(mask, np.array([False, True, False]))).sum(axis=1).tolist() == [0, 0, 3]


def test_a_longer_length_does_not_read_past_the_buffer():
    assert np.asarray(response_mask(np.array([9, 4]), 4)).all()


def test_mask_is_traceable_with_a_static_width():
    mask = jax.jit(response_mask, static_argnums=1)(np.array([1, 2]), 2)
    assert np.asarray(mask).tolist() == [[True, False], [True, True]]
