"""Soft overlong punishment: the three pieces of DAPO's formula, and what is refused."""

import numpy as np
import pytest

from longstraw_jax.rl.shaping import overlong_penalty


def test_the_penalty_is_dapos_three_pieces():
    lengths = np.array([0, 12, 13, 14, 16])
    np.testing.assert_allclose(overlong_penalty(lengths, max_len=16, cache=4), [0, 0, -0.25, -0.5, -1])
    np.testing.assert_allclose(overlong_penalty(lengths, max_len=16, cache=4, factor=3.0), [0, 0, -0.75, -1.5, -3])
    np.testing.assert_allclose(overlong_penalty(lengths, max_len=16, cache=16), -lengths / 16)


def test_no_cache_is_no_penalty():
    assert not overlong_penalty(np.array([0, 15, 16]), max_len=16, cache=0).any()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"cache": 17}, "overlong_cache=17; accepted: 0 to the response budget of 16 tokens"),
        ({"cache": -1}, "overlong_cache=-1"),
        ({"cache": 4, "factor": -1.0}, "overlong_penalty=-1.0; accepted: a number of at least 0"),
    ],
)
def test_values_out_of_range_are_refused_by_name(options, said):
    with pytest.raises(ValueError) as error:
        overlong_penalty(np.array([1]), max_len=16, **options)
    assert said in str(error.value)
