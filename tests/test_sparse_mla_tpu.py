"""Sparse latent attention's TPU kernel: numbers in interpret mode, lowering, and compilation for absent chips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.sparse_mla import api, reference, tpu


@pytest.mark.parametrize("heads, k", [(3, 140)])
def test_equals_the_reference_in_interpret_mode(heads, k):
    rng = np.random.default_rng()
    q, rows = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, heads, 160), (300, 160)))
    ids = np.stack([rng.permutation(300)[:k] for _ in range(3)]).astype(np.int32)
    ids[1, 3:], ids[2], ids[ids == 7] = -1, -1, -1
    rows[7] = np.nan  # selected by nobody
    args = [jnp.asarray(x) for x in (q, rows, ids)]
    got = jax.jit(lambda *args: tpu.forward(*args, scale=0.1, value_dim=128, interpret=True))(*args)
    for x, y in zip(got, reference.sparse_mla(*args, scale=0.1, value_dim=128), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    assert np.all(np.asarray(got[1])[2] == -np.inf)


def full_width():
    shape = jax.ShapeDtypeStruct
    return shape((8, 64, 576), jnp.bfloat16), shape((4096, 576), jnp.bfloat16), shape((8, 2048), jnp.int32)


def loss(q, rows, ids):
    out, lse = api.sparse_mla(q, rows, ids, scale=0.1, value_dim=512)
    return out.sum() + lse.sum()


def absent_tpu():
    device = AbstractDevice(device_kind="TPU v5p", num_cores=None, platform="tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def test_auto_takes_the_kernel_on_a_tpu_and_it_lowers_with_a_gradient():
    with absent_tpu():
        assert api.backend(*full_width(), 512) == "tpu"
        assert api.backend(*full_width(), 500) == "reference"
        traced = jax.jit(jax.grad(loss, (0, 1))).trace(*full_width())
        assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_compiles_for_absent_chips(topology):
    topologies = pytest.importorskip("jax.experimental.topologies")
    try:
        devices = topologies.get_topology_desc(topology, "tpu").devices
    except Exception as error:  # without libtpu there is no compiler to ask
        pytest.skip(f"no topology {topology}: {error}")
    mesh = jax.sharding.Mesh(np.asarray(devices[:1]), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in full_width()]

    def body(*args):
        return tpu.forward(*args, scale=0.1, value_dim=512)

    specs = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    assert jax.jit(mapped).lower(*shapes).compile().memory_analysis().output_size_in_bytes > 0
