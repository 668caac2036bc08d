"""Random weights by matrix: the same on any mesh, of the asked spread, with no temporary that grows with depth."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from longstraw_jax import sharding
from longstraw_jax.model import draw

KEY = jax.random.key(3)
normal = functools.partial(draw.normal, dtype=jnp.dtype("float32"), std=0.5)


@pytest.mark.parametrize(
    "shape, spec",
    [
        ((2, 8, 16, 32), P(None, sharding.AXIS, None, None)),
        ((3, 16, 32), P(None, sharding.AXIS, None)),
    ],
)
def test_every_mesh_draws_the_same(shape, spec):
    alone = normal(KEY, shape=shape, mesh=None, spec=spec)
    wide = normal(KEY, shape=shape, mesh=sharding.make_mesh(4), spec=spec)
    np.testing.assert_array_equal(alone, wide)
    assert wide.addressable_shards[0].data.size == wide.size // 4
    np.testing.assert_allclose(np.std(alone), 0.5, rtol=0.1)


def test_no_two_matrices_are_alike():
    drawn = np.asarray(normal(KEY, shape=(2, 3, 8, 8), mesh=None, spec=P(None, None, None, None))).reshape(6, -1)
    assert np.unique(drawn.round(6)).size == drawn.size


def test_temporaries_are_those_of_one_matrix():
    def temporaries(layers):
        options = dict(shape=(layers, 8, 64, 64), mesh=None, spec=P(None, sharding.AXIS, None, None))
        return normal.func.lower(KEY, **normal.keywords, **options).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(16) < temporaries(2) + 64 * 64 * 4
