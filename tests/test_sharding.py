"""Meshes, logical axes, and what a mesh must divide, by name."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from longstraw_jax import replay, sharding
from longstraw_jax.model import decoder


def test_a_mesh_has_one_axis_and_a_single_device_needs_none():
    assert sharding.make_mesh(1) is None
    mesh = sharding.make_mesh(8)
    assert mesh.axis_names == (sharding.AXIS,) and list(mesh.devices) == jax.devices()[:8]


@pytest.mark.parametrize("devices", [0, -1, 33])
def test_a_mesh_of_devices_that_are_not_there_is_refused(devices):
    with pytest.raises(sharding.ShardingError, match=f"mesh.devices={devices} .*accepted: 1 to 32"):
        sharding.make_mesh(devices)


def test_logical_axes_lie_on_the_mesh():
    assert sharding.spec((None, "expert", None)) == P(None, sharding.AXIS, None)
    assert sharding.spec(("fsdp",)) == sharding.spec(("vocab",)) == P(sharding.AXIS)
    assert sharding.named(None, P()).device_set == {jax.devices()[0]}
    x = jax.device_put(np.zeros((16, 3)), sharding.named(sharding.make_mesh(8), P(sharding.AXIS)))
    assert {shard.data.shape for shard in x.addressable_shards} == {(2, 3)}


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"hidden_size": 48}, "'fsdp'=48"),
        ({"n_routed_experts": 48}, "'expert'=48"),
        ({"vocab_size": 300}, "'vocab'=300"),
    ],
)
def test_a_dimension_that_the_mesh_does_not_divide_is_named(changes, named):
    config = dataclasses.replace(tiny.CONFIG, **changes)
    with pytest.raises(sharding.ShardingError, match=rf"{named} .*mesh of 32 devices.*a multiple of 32"):
        decoder.make_model(config, mesh=sharding.make_mesh(32))
    decoder.make_model(config)  # one device divides everything


def test_a_replay_length_that_the_mesh_does_not_divide_is_named():
    ids = np.zeros((30,), np.int32)
    args = (tiny.model(8), tiny.base(8), None, None, ids, ids, np.int32(30))
    with pytest.raises(sharding.ShardingError, match="replay length=30 .*mesh of 8 devices.*a multiple of 8"):
        replay.member_logprobs(*args)


def test_base_weights_rest_in_equal_shares():
    """Every matrix is cut over the mesh; norms, biases and the like are small and whole."""
    for path, x in jax.tree_util.tree_flatten_with_path(tiny.base(32))[0]:
        share = x.addressable_shards[0].data.size
        assert share * 32 == x.size or x.size <= 3 * tiny.CONFIG.vocab_size, jax.tree_util.keystr(path)
