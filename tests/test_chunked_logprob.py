"""Chunked log-probabilities: against log_softmax in fp64, in slices, in blocks, with the head's update."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.chunked_logprob import api, blocked, reference

T, D, V, R = 21, 24, 60, 4
HIGHEST = jax.lax.Precision.HIGHEST


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 8 tokens, so that 21 make three, the last partly empty."""
    monkeypatch.setattr(blocked, "LOGITS", 4 * V * 8)


def inputs(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    hidden, head, a, b = (rng.standard_normal(s).astype(np.float32) for s in ((T, D), (D, V), (D, R), (R, V)))
    targets = rng.integers(0, V, T)
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), jnp.asarray(0.3 * a), jnp.asarray(0.3 * b), targets


def dense(hidden, head, a, b, targets, scale, temperature):
    """log-probability and entropy from all logits."""
    hidden, head = hidden.astype(jnp.float32), head.astype(jnp.float32)
    product = functools.partial(jnp.matmul, precision=HIGHEST)
    logits = (product(hidden, head) + scale * product(product(hidden, a), b)) / temperature
    logp = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(logp, targets[:, None], 1)[:, 0], -(jnp.exp(logp) * logp).sum(-1)


def chunked(hidden, head, a, b, targets, scale, temperature, **options):
    return api.token_logprobs(hidden, head, targets, a=a, b=b, scale=scale, temperature=temperature, **options)


def loss(run, hidden, head, a, b, targets):
    logp, entropy = run(hidden, head, a, b, targets, 0.5, 0.7)
    weight = jnp.linspace(-1.0, 1.0, T)
    return (weight * logp).sum() + (weight[::-1] ** 2 * entropy).sum()


def gradients(run, argnums):
    return jax.jit(jax.grad(functools.partial(loss, run), argnums))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_values_and_gradients_equal_log_softmax(implementation, small_blocks):
    hidden, head, a, b, targets = inputs()
    run = functools.partial(chunked, implementation=implementation)
    found, wanted = (jax.jit(lambda *x, f=f: f(*x, targets, 0.5, 0.7))(hidden, head, a, b) for f in (run, dense))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    got = gradients(run, (0, 1, 2, 3))(hidden, head, a, b, targets)
    want = gradients(dense, (0, 1, 2, 3))(hidden, head, a, b, targets)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_bf16_inputs_keep_the_update_fp32(small_blocks):
    hidden, head, a, b, targets = inputs(jnp.bfloat16)
    (logp, entropy), want = (
        jax.jit(lambda *x, f=f: f(*x, targets, 0.5, 0.7))(hidden, head, a, b) for f in (chunked, dense)
    )
    np.testing.assert_allclose(logp, want[0], atol=2e-4)  # a bf16 update would be off by some 1e-2
    np.testing.assert_allclose(entropy, want[1], atol=2e-4)
    got = gradients(chunked, (0, 2, 3))(hidden, head, a, b, targets)
    want = gradients(dense, (0, 2, 3))(hidden, head, a, b, targets)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        error = np.linalg.norm(np.asarray(x - y, np.float64)) / np.linalg.norm(np.asarray(y, np.float64))
        assert error < 1e-2


def test_without_an_update_and_of_one_token():
    hidden, head, a, b, targets = inputs()

    def with_gradient(run):
        def total(hidden):
            logp = run(hidden)[0]
            return logp.sum(), logp

        return jax.jit(jax.value_and_grad(total, has_aux=True))(hidden)

    (_, none), grad = with_gradient(lambda h: api.token_logprobs(h, head, targets))
    (_, want), want_grad = with_gradient(lambda h: dense(h, head, a, b, targets, 0.0, 1.0))
    np.testing.assert_allclose(none, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grad, want_grad, atol=1e-5)
    one = api.token_logprobs(hidden[:1], head, targets[:1])
    np.testing.assert_allclose(one[0], none[:1], rtol=1e-6)


def test_slices_of_the_vocabulary_equal_the_reference_and_keep_foreign_targets_out(small_blocks):
    hidden, head, a, b, targets = inputs()
    for first in (0, 20, 40):
        part = slice(first, first + 20)
        got = api.softmax_statistics(hidden, head[:, part], targets, first, a=a, b=b[:, part], scale=0.5)
        want = reference.softmax_statistics(
            lambda h, part=part: h @ head[:, part] + 0.5 * (h @ a) @ b[:, part], hidden, targets, jnp.int32(first)
        )
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
        assert (np.asarray(got[3])[(targets < first) | (targets >= first + 20)] == 0).all()


def test_under_shard_map_scan_remat_and_vmap(small_blocks):
    """Tokens sharded over 32 devices; a batch; a recomputed step of a scan."""
    hidden, head, a, b, targets = inputs()
    hidden, targets = jnp.tile(hidden, (32, 1)), jnp.tile(targets, 32)

    def step(hidden, targets):
        return api.token_logprobs(hidden, head, targets, a=a, b=b)[0]

    def scanned(hidden, targets):
        return jax.lax.scan(jax.checkpoint(lambda c, x: (c, step(*x))), None, (hidden[None], targets[None]))[1][0]

    mesh = jax.make_mesh((32,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(scanned, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    batched = lambda h, t: jax.vmap(step)(h.reshape(32, T, D), t.reshape(32, T)).reshape(-1)  # noqa: E731
    got, want = (jax.jit(jax.grad(lambda h, run=run: run(h, targets).sum()))(hidden) for run in (mapped, batched))
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(np.asarray(got)).max() > 0


def test_temporaries_do_not_grow_with_the_vocabulary_or_the_tokens(monkeypatch):
    for tokens in (1, 64, 4096, 100_000):
        for columns in (4840, 154_880, 1_000_000):
            rows = blocked.block_rows(tokens, columns)
            assert 1 <= rows <= tokens and 4 * rows * columns <= blocked.LOGITS

    monkeypatch.setattr(blocked, "LOGITS", 2**20)
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 16), (16, 16384))]
    step = jax.jit(jax.grad(lambda h, w, t: api.token_logprobs(h, w, t)[0].sum()))
    compiled = step.lower(*shapes, jax.ShapeDtypeStruct((512,), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * 2**20  # 512 x 16384 fp32 logits are 32 MiB


def test_temperature_is_a_constant_and_a_constant_head_costs_nothing(small_blocks):
    hidden, head, a, b, targets = inputs()
    assert jax.grad(lambda t: chunked(hidden, head, a, b, targets, 0.5, t)[0].sum())(0.7) == 0

    def sums(*differentiated):
        """Arrays of the head's shape that the gradient adds up, inside scan and remat too."""

        def total(hidden, head):
            step = jax.checkpoint(lambda c, _: (c + chunked(hidden, head, a, b, targets, 0.5, 0.7)[0].sum(), None))
            return jax.lax.scan(step, 0.0, None, length=2)[0]

        text = str(jax.make_jaxpr(jax.grad(total, differentiated))(hidden, head))
        return text.count(f"f32[{D},{V}] = add")

    assert sums(0) == 0 and sums(0, 1) > 0


def test_errors_name_the_argument_the_value_and_what_is_accepted():
    hidden, head, a, b, targets = inputs()
    with pytest.raises(ValueError, match=r"head is float32 \(20, 60\); accepted: float32 \[24, columns\]"):
        api.softmax_statistics(hidden, head[:20], targets)
    with pytest.raises(ValueError, match=r"targets are int\d+ \(5,\); accepted: integers \(21,\)"):
        api.softmax_statistics(hidden, head, targets[:5])
    with pytest.raises(ValueError, match="a is given alone"):
        api.softmax_statistics(hidden, head, targets, a=a)
    with pytest.raises(ValueError, match=r"b is float32 \(4, 59\); accepted: float32 \(4, 60\)"):
        api.softmax_statistics(hidden, head, targets, a=a, b=b[:, 1:])
    with pytest.raises(ValueError, match="implementation='hopper'; accepted: auto, xla, reference"):
        api.softmax_statistics(hidden, head, targets, implementation="hopper")
