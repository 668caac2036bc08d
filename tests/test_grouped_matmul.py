"""Grouped products: every backend against fp64 loops, with the group sizes and NaNs that kernels get wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.grouped_matmul import api, blocks, hopper, hopper_transposed, tpu

SIZES = {
    "uneven": [5, 130, 3, 52],
    "empty": [0, 70, 0, 0],
    "one group": [0, 0, 200, 0],
    "none": [0, 0, 0, 0],
    "rows of a tile": [64, 128, 8, 0],
}
ROWS, D, F = 200, 128, 128


@pytest.fixture
def interpret(monkeypatch):
    """GPU kernels on the host, with few programs."""
    if jax.__version_info__ < (0, 11):
        pytest.skip("JAX 0.11 or newer interprets GPU kernels")
    for module in (hopper, hopper_transposed):
        monkeypatch.setattr(module, "PROGRAMS", 2)


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def f64(x):
    return np.asarray(x, np.float64)


def want_product(x, w, sizes):
    out, first = np.zeros((len(x), w.shape[2])), 0
    for e, size in enumerate(sizes):
        out[first : first + size] = f64(x[first : first + size]) @ f64(w[e])
        first += size
    return out


def want_outer(x, y, sizes):
    out, first = np.zeros((len(sizes), x.shape[1], y.shape[1])), 0
    for e, size in enumerate(sizes):
        out[e] = f64(x[first : first + size]).T @ f64(y[first : first + size])
        first += size
    return out


def poisoned(x, sizes):
    return x.at[sum(sizes) :].set(jnp.nan)


def close(got, want, tolerance=1e-2):
    """Relative to the largest; bf16 rounds by 2^-9."""
    assert np.abs(f64(got) - want).max() <= tolerance * max(np.abs(want).max(), 1e-30)


@functools.partial(jax.jit, static_argnames="implementation")
def _product_and_gradients(x, w, dy, sizes, implementation):
    y, pull = jax.vjp(lambda x, w: api.grouped_matmul(x, w, sizes, implementation=implementation), x, w)
    return y, *pull(dy)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("implementation", ["reference", "blocks"])
def test_plain_product_and_gradients(implementation, name, dtype):
    sizes = SIZES[name]
    x, w = poisoned(normal(0, ROWS, D, dtype=dtype), sizes), normal(1, 4, D, F, dtype=dtype)
    dy = normal(2, ROWS, F, dtype=dtype)
    y, dx, dw = _product_and_gradients(x, w, dy, jnp.asarray(sizes), implementation)
    assert y.dtype == dtype and (f64(y)[sum(sizes) :] == 0).all()
    close(y, want_product(x, w, sizes))
    close(dx, want_product(dy, w.swapaxes(1, 2), sizes))
    close(dw, want_outer(x, dy, sizes))


@pytest.mark.parametrize("sizes", [[3, 0, 70, 1], [0, 0, 90, 0], [900, 0, 0, 5]])
def test_blocks_at_other_shapes(sizes):
    """Rows that no block divides, every row in one group, sizes over the rows that there are."""
    for rows in (1, 77, 1000):
        x, w = normal(3, rows, 24, dtype=jnp.float32), normal(4, 4, 24, 40, dtype=jnp.float32)
        within = np.diff(np.minimum(np.cumsum([0, *sizes]), rows))
        found = api.grouped_matmul(x, w, jnp.asarray(sizes), implementation="blocks")
        close(found, want_product(x, w, within), 1e-6)


def test_a_block_is_near_the_mean_group():
    rows = {1: 8, 32: 8, 512: 16, 600: 32, 16384: 128, 10**6: 128}
    assert {rows: blocks.block_rows(rows, 32) for rows in rows} == rows


def test_on_a_cpu_the_blocks_serve():
    assert api.backend(normal(0, 4, D), normal(1, 2, D, F)) == "blocks"


def test_hopper_kernel_and_its_gradients_in_interpret_mode(interpret):
    x, w, dy = normal(0, ROWS, D), normal(1, 4, D, F), normal(2, ROWS, F)

    @jax.jit
    def run(x, w, dy, sizes):
        y, pull = jax.vjp(lambda x, w: api.grouped_matmul(x, w, sizes, implementation="interpret"), x, w)
        return y, *pull(dy)

    for sizes in SIZES.values():
        y, dx, dw = run(poisoned(x, sizes), w, poisoned(dy, sizes), jnp.asarray(sizes))
        assert y.dtype == dx.dtype == dw.dtype == jnp.bfloat16
        for rows in (y, dx):
            assert (f64(rows)[sum(sizes) :] == 0).all()
        close(y, want_product(x, w, sizes))
        close(dx, want_product(dy, w.swapaxes(1, 2), sizes))
        close(dw, want_outer(x, dy, sizes))


def test_rows_not_a_multiple_of_anything_and_a_single_row(interpret):
    for rows, sizes in ((77, [3, 0, 70, 1]), (1, [0, 1, 0, 0])):
        x, w = normal(3, rows, D), normal(4, 4, D, F)
        run = jax.jit(functools.partial(api.grouped_matmul, implementation="interpret"))
        close(run(x, w, jnp.asarray(sizes)), want_product(x, w, sizes))


def adapted_case(dtype):
    sizes = [5, 60, 0, 30]
    x, w, dy = normal(0, 100, D, dtype=dtype), normal(1, 4, D, F, dtype=dtype), normal(2, 100, F, dtype=dtype)
    a, b = (0.3 * normal(3 + i, 4, *shape, dtype=jnp.float32) for i, shape in enumerate(((D, 8), (8, F))))
    gate = np.random.default_rng(5).random(100) < 0.7
    # The update alone, which w would hide: the base is the same in both.
    low = 0.5 * want_product(x, a, sizes) * gate[:, None]
    dlow = 0.5 * want_product(dy, b.swapaxes(1, 2), sizes) * gate[:, None]
    want = (
        want_product(x, w, sizes) + want_product(low, b, sizes),
        want_product(dy, w.swapaxes(1, 2), sizes) + want_product(dlow, a.swapaxes(1, 2), sizes),
        want_outer(x, dlow, sizes),
        want_outer(low, dy, sizes),
    )
    return (x, w, a, b, jnp.asarray(sizes), jnp.asarray(gate), dy), want


def adapted(implementation, x, w, a, b, sizes, gate, dy, first=None):
    options = dict(scale=0.5, gate=gate, first=first, implementation=implementation)

    def run(x, a, b):
        return api.adapted_grouped_matmul(x, w, a, b, sizes, **options)

    y, pull = jax.vjp(run, x, a, b)
    return y, *pull(dy)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", ["reference", "blocks"])
def test_plain_update(implementation, dtype):
    args, want = adapted_case(dtype)
    found = jax.jit(functools.partial(adapted, implementation))(*args)
    for got, right in zip(found, want, strict=True):
        close(got, right, 1e-2 if dtype == jnp.bfloat16 else 1e-5)


def test_hopper_update_in_interpret_mode_keeps_the_factors_fp32(interpret):
    args, want = adapted_case(jnp.bfloat16)
    y, dx, da, db = jax.jit(functools.partial(adapted, "interpret"))(*args)
    assert da.dtype == db.dtype == jnp.float32
    close(y, want[0])
    close(dx, want[1])
    close(da, want[2], 1e-4)  # bf16 factors would be off by 2^-9
    close(db, want[3], 1e-4)


def product(implementation, x, w, sizes, dy, first=None):
    y, pull = jax.vjp(lambda x, w: api.grouped_matmul(x, w, sizes, first=first, implementation=implementation), x, w)
    return y, *pull(dy)


@pytest.mark.parametrize(
    "implementation", ["reference", "blocks", "interpret", pytest.param("hopper", marks=pytest.mark.gpu)]
)
def test_a_stack_of_layers_gives_the_bits_of_the_layer_alone(implementation, request):
    if implementation == "interpret":
        request.getfixturevalue("interpret")
    (x, w, a, b, sizes, gate, dy), _ = adapted_case(jnp.bfloat16)
    other = normal(7, 3, D, F)
    stack = jnp.concatenate([other, w, other])
    run = jax.jit(functools.partial(adapted, implementation))
    for got, want in zip(
        run(x, stack, a, b, sizes, gate, dy, jnp.int32(3)), run(x, w, a, b, sizes, gate, dy), strict=True
    ):
        np.testing.assert_array_equal(f64(got), f64(want))
    plain = jax.jit(functools.partial(product, implementation))
    y, dx, dw = (f64(value) for value in plain(x, stack, sizes, dy, jnp.int32(3)))
    assert not dw[:3].any() and not dw[3 + len(w) :].any()
    for got, want in zip((y, dx, dw[3 : 3 + len(w)]), plain(x, w, sizes, dy), strict=True):
        np.testing.assert_array_equal(got, f64(want))


def test_weights_gradient_false_makes_none():
    x, w, sizes = normal(0, 20, D), normal(1, 2, D, F), jnp.asarray([12, 5])

    def loss(x, w, weights_gradient):
        y = api.grouped_matmul(x, w, sizes, weights_gradient=weights_gradient)
        return (y.astype(jnp.float32) ** 2).sum()

    dx, dw = jax.grad(loss, (0, 1))(x, w, True)
    same, none = jax.grad(loss, (0, 1))(x, w, False)
    assert np.abs(f64(dw)).max() > 0 and np.abs(f64(none)).max() == 0
    np.testing.assert_array_equal(f64(dx), f64(same))


@pytest.mark.parametrize("implementation", ["reference", "blocks"])
def test_under_shard_map_scan_remat_and_vmap(implementation):
    """Each of 32 devices has its own groups; a scan over layers with recomputation; a batch."""
    mesh = jax.make_mesh((32,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w = normal(0, 64, D, dtype=jnp.float32), normal(1, 32, D, D, dtype=jnp.float32) / D**0.5
    sizes = jnp.ones((32,), jnp.int32)
    product = functools.partial(api.grouped_matmul, implementation=implementation)

    def layers(x, w, sizes):
        step = jax.checkpoint(lambda x, _: (product(x, w, sizes), None))
        return jax.lax.scan(step, x, None, length=2)[0]

    mapped = jax.shard_map(layers, mesh=mesh, in_specs=(P("x"), P("x"), P("x")), out_specs=P("x"), check_vma=False)
    loss = lambda run: jax.jit(jax.value_and_grad(lambda x: (run(x, w, sizes) ** 2).sum()))  # noqa: E731
    batched = jax.vmap(layers)
    got = loss(mapped)(x)
    flat = lambda x, w, s: batched(x.reshape(32, 2, D), w[:, None], s[:, None])  # noqa: E731
    want = loss(flat)(x)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-5)
    assert float(got[0]) > 0


def test_gradient_of_the_matrices_on_tpu_in_interpret_mode():
    sizes = [5, 130, 0, 52]
    x, y = poisoned(normal(0, ROWS, D, dtype=jnp.float32), sizes), normal(1, ROWS, F, dtype=jnp.float32)
    out = tpu.transposed_grouped_matmul(x, y, jnp.asarray(sizes), interpret=True)
    close(out, want_outer(x, y, sizes), 1e-5)


def test_errors_name_the_argument_the_value_and_what_is_accepted():
    x, w, sizes = normal(0, 4, D), normal(1, 2, D, F), jnp.asarray([2, 1])
    with pytest.raises(ValueError, match=r"w is bfloat16 \(2, 128, 128\); accepted: bfloat16 \[groups, 64"):
        api.grouped_matmul(x[:, :64], w, sizes)
    with pytest.raises(ValueError, match="group_sizes are float32"):
        api.grouped_matmul(x, w, sizes.astype(jnp.float32))
    with pytest.raises(ValueError, match="first"):
        api.grouped_matmul(x, w, sizes, first=jnp.float32(0))
    with pytest.raises(ValueError, match="implementation='cuda'; accepted: auto, hopper"):
        api.grouped_matmul(x, w, sizes, implementation="cuda")
    with pytest.raises(ValueError, match="implementation='hopper': the device is 'cpu'; accepted: an NVIDIA Hopper"):
        api.grouped_matmul(x, w, sizes, implementation="hopper")
    with pytest.raises(ValueError, match="implementation='tpu': the device is 'cpu'; accepted: a TPU"):
        api.grouped_matmul(x, w, sizes, implementation="tpu")
    a, b = normal(2, 2, D, 8, dtype=jnp.float32), normal(3, 2, 8, F)
    with pytest.raises(ValueError, match=r"b is bfloat16 \(2, 8, 128\); accepted: float32"):
        api.adapted_grouped_matmul(x, w, a, b, sizes, scale=1.0)
    with pytest.raises(ValueError, match="gate is int32"):
        api.adapted_grouped_matmul(x, w, a, a.swapaxes(1, 2), sizes, scale=1.0, gate=jnp.ones(4, jnp.int32))


def test_hopper_kernels_lower_for_the_card():
    mesh = jax.sharding.AbstractMesh(
        (), (), abstract_device=jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    )
    shapes = ((1000, 256), (5, 256, 512), (5, 256, 8), (5, 8, 512), (5,), (1000,))
    types = (jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32, jnp.int32, jnp.bool_)
    x, w, a, b, sizes, gate = (jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, types, strict=True))
    with jax.sharding.use_abstract_mesh(mesh):

        def loss(x, a, b, w, sizes, gate):
            assert api.backend(x, w, 8) == "hopper"
            y = api.adapted_grouped_matmul(x, w, a, b, sizes, scale=1.0, gate=gate)
            return y.astype(jnp.float32).sum()

        step = jax.jit(jax.grad(loss, (0, 1, 2)))
        text = step.trace(x, a, b, w, sizes, gate).lower(lowering_platforms=("cuda",)).as_text()
        outer = jax.jit(functools.partial(hopper_transposed.transposed_grouped_matmul, out_dtype=jnp.bfloat16))
        outer.trace(x, x, sizes).lower(lowering_platforms=("cuda",))
    assert text.count("mosaic_gpu") >= 6
