"""Sparse latent attention under JAX's transformations, its choice of backend, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, PartitionSpec

from pallas_kernels.sparse_mla import api

WIDTH, VALUE_DIM, SCALE = 48, 32, 0.2
NEW_JAX = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernels need JAX 0.11")


def arrays(*lead, queries=3, heads=2, rows=20, k=9):
    rng = np.random.default_rng()
    q = rng.standard_normal((*lead, queries, heads, WIDTH)).astype(np.float32)
    kv = rng.standard_normal((*lead, rows, WIDTH)).astype(np.float32)
    ids = rng.permuted(np.broadcast_to(np.arange(rows, dtype=np.int32), (*lead, queries, rows)), axis=-1)[..., :k]
    ids[..., 0, 4:] = -1
    return jnp.asarray(q), jnp.asarray(kv), jnp.asarray(ids)


def loss(q, rows, ids, implementation="interpret", **options):
    out, lse = api.sparse_mla(q, rows, ids, scale=SCALE, value_dim=VALUE_DIM, implementation=implementation, **options)
    return jnp.sin(out).sum() + jnp.cos(lse).sum()


def gradients(fun, *args):
    return jax.jit(jax.value_and_grad(fun, (0, 1)))(*args)


def assert_same(got, want):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("backend, shared", [("interpret", "nothing"), ("interpret", "rows"), ("reference", "ids")])
def test_vmap_equals_a_loop(backend, shared):
    q, rows, ids = arrays(3)
    axes = (0, None if shared == "rows" else 0, None if shared == "ids" else 0)
    rows, ids = (x if axis == 0 else x[0] for x, axis in zip((rows, ids), axes[1:], strict=True))

    def looped(q, rows, ids):
        one = [[x if axis is None else x[i] for x, axis in zip((q, rows, ids), axes, strict=True)] for i in range(3)]
        return sum(loss(*args, "reference") for args in one)

    def batched(q, rows, ids):
        return jax.vmap(lambda *args: loss(*args, backend), in_axes=axes)(q, rows, ids).sum()

    assert_same(gradients(batched, q, rows, ids), gradients(looped, q, rows, ids))


def test_scan_over_remat_equals_plain():
    q, rows, ids = arrays(2)

    def stacked(q, rows, ids):
        layer = jax.checkpoint(lambda total, x: (total + loss(*x), None))
        return jax.lax.scan(layer, 0.0, (q, rows, ids))[0]

    plain = gradients(
        lambda q, rows, ids: sum(loss(q[i], rows[i], ids[i], "reference") for i in range(2)), q, rows, ids
    )
    assert_same(gradients(stacked, q, rows, ids), plain)


def calls(jaxpr):
    """Kernels in a jaxpr, however deep."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = (getattr(x, "jaxpr", x) for x in jax.tree.leaves(tuple(eqn.params.values())))
        total += 1 if eqn.primitive.name == "pallas_call" else sum(calls(x) for x in inner if hasattr(x, "eqns"))
    return total


def test_saved_results_spare_the_second_forward_pass():
    q, rows, ids = arrays()

    def kernels(policy):
        fun = jax.checkpoint(lambda q, rows: loss(q, rows, ids), policy=policy)
        return calls(jax.make_jaxpr(jax.grad(fun, (0, 1)))(q, rows).jaxpr)

    saved = jax.checkpoint_policies.save_only_these_names("sparse_mla_out", "sparse_mla_lse")
    assert kernels(None) == 3 and kernels(saved) == 2


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_shard_map_over_queries_equals_one_device(backend):
    q, rows, ids = arrays(queries=32)
    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    spec = PartitionSpec("x")

    def sharded(q, rows, ids):
        body = jax.shard_map(
            lambda q, rows, ids: loss(q, rows, ids, backend)[None],
            mesh=mesh,
            in_specs=(spec, PartitionSpec(), spec),
            out_specs=spec,
            check_vma=False,
        )
        return body(q, rows, ids).sum()

    assert_same(
        gradients(sharded, q, rows, ids), gradients(functools.partial(loss, implementation="reference"), q, rows, ids)
    )


def test_detached_rows_cost_no_array_of_their_size():
    q, rows, ids = arrays(rows=53)
    rows = rows.astype(jnp.bfloat16)

    def text(**options):
        fun = jax.grad(lambda q, rows: loss(q, rows, ids, "reference", **options), (0, 1) if not options else 0)
        return jax.jit(fun).lower(q, rows).as_text()

    sums = f"tensor<53x{WIDTH}xf32>"
    assert sums in text() and sums not in text(rows_gradient=False)


# The choice of backend.


def absent_h200():
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def full_width(queries=8, heads=64, rows=4096, k=2048):
    shape = jax.ShapeDtypeStruct
    q, kv = shape((queries, heads, 576), jnp.bfloat16), shape((rows, 576), jnp.bfloat16)
    return q, kv, shape((queries, k), jnp.int32)


def lowered(fun, *args):
    with absent_h200():
        return jax.jit(fun).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def full_loss(q, rows, ids, **options):
    out, lse = api.sparse_mla(q, rows, ids, scale=SCALE, value_dim=512, **options)
    return out.sum() + lse.sum()


@NEW_JAX
def test_auto_takes_the_hopper_kernels_where_they_fit():
    with absent_h200():
        assert api.backend(*full_width(), 512, "auto") == "hopper"
        assert api.backend(*full_width(heads=8, k=2304), 512, "auto") == "hopper"
        q, rows, ids = full_width()
        for other in (
            (jax.ShapeDtypeStruct(q.shape, jnp.float32), rows, ids, 512),
            (q, rows, ids, 448),
            (*full_width(k=2400), 512),
        ):
            assert api.backend(*other, "auto") == "reference"
            with pytest.raises(ValueError, match="implementation='hopper': .*accepted: "):
                api.backend(*other, "hopper")
    assert api.backend(*full_width(), 512, "auto") == "reference"


@NEW_JAX
@pytest.mark.parametrize("options", [{}, {"deterministic": True}])
def test_hopper_kernels_lower_with_their_gradient_under_scan_and_remat(options):
    def layers(q, rows, ids):
        step = jax.checkpoint(
            lambda total, _: (total + full_loss(q, rows, ids, implementation="hopper", **options), None)
        )
        return jax.lax.scan(step, 0.0, length=2)[0]

    text = lowered(jax.grad(layers, (0, 1)), *full_width(k=2304))
    assert text.count("custom_call @mosaic_gpu") >= 2  # forward, also again, and backward


@NEW_JAX
def test_hopper_adds_to_gradient_pages_without_a_copy():
    def backward(q, rows, ids, out, lse, pages):
        return api.sparse_mla_backward(q, rows, ids, out, lse, out, lse, pages, scale=SCALE, implementation="hopper")

    q, rows, ids = full_width(k=64)
    results = [jax.ShapeDtypeStruct((8, 64, *rest), jnp.float32) for rest in ((512,), ())]
    text = lowered(backward, q, rows, ids, *results, jax.ShapeDtypeStruct(rows.shape, jnp.float32))
    assert "output_operand_alias" in text


# Refusals.


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(implementation="cuda"), "implementation='cuda'; accepted: auto, hopper, tpu"),
        (dict(implementation="hopper"), "implementation='hopper': .*accepted: "),
        (dict(implementation="tpu"), "implementation='tpu': the device is 'cpu'; accepted: a TPU"),
        (dict(q=jnp.zeros((3, WIDTH))), r"q has shape \(3, 48\); accepted"),
        (dict(rows=jnp.zeros((20, 40))), r"rows have shape \(20, 40\); accepted: \[rows, 48\]"),
        (dict(rows=jnp.zeros((2, 32, WIDTH))), "rows have 32 rows a page; accepted: 64"),
        (dict(ids=jnp.zeros((2, 9), jnp.int32)), r"ids are int32 \(2, 9\); accepted: int32 \[3, selected\]"),
        (dict(ids=jnp.zeros((3, 9), jnp.int16)), r"ids are int16"),
        (dict(value_dim=49), "value_dim=49; accepted: 1 to 48"),
        (dict(page_table=jnp.zeros((2,), jnp.int32)), "page_table is int32"),
        (dict(implementation="interpret", value_dim=30), "width=48 with value_dim=30; accepted: "),
    ],
)
def test_bad_input_is_refused_by_name_on_the_host(change, message):
    q, rows, ids = arrays()
    call = dict(q=q, rows=rows, ids=ids, scale=SCALE, value_dim=VALUE_DIM) | change
    with pytest.raises(ValueError, match=message):
        api.sparse_mla(**call)


def test_gradient_pages_of_another_type_or_shape_are_refused():
    q, rows, ids = arrays()
    out, lse = api.sparse_mla(q, rows, ids, scale=SCALE, value_dim=VALUE_DIM)
    for pages in (rows.astype(jnp.bfloat16), rows[1:]):
        with pytest.raises(ValueError, match=r"accumulator is .*; accepted: float32 \(20, 48\)"):
            api.sparse_mla_backward(q, rows, ids, out, lse, out, lse, pages, scale=SCALE)


def test_ids_beyond_the_rows_are_found_on_the_device_in_debug_mode():
    q, rows, ids = arrays()
    attend = functools.partial(api.sparse_mla, scale=SCALE, value_dim=VALUE_DIM)
    jax.block_until_ready(jax.jit(attend)(q, rows, ids.at[1, 1].set(20)))
    with jax.enable_checks(True):
        attend = jax.jit(functools.partial(attend))
        jax.block_until_ready(attend(q, rows, ids))
        with pytest.raises(Exception, match="ids go from -1 to 20; accepted: -1 to 19"):
            attend(q, rows, ids.at[1, 1].set(20))
            jax.effects_barrier()
