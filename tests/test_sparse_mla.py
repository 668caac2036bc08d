"""Sparse latent attention and its gradients: every backend against fp64 numpy on the same cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_mla import api

SCALE = 0.15
SMALL, FULL = (48, 32), (576, 512)  # width and value_dim: of the CPU's backends, and what the Hopper kernels serve
BACKENDS = ["reference", "interpret", pytest.param("hopper", marks=pytest.mark.gpu)]


def distinct_ids(rng, queries, rows, k):
    return np.stack([rng.permutation(rows)[:k] for _ in range(queries)]).astype(np.int32)


def inputs(backend, queries=4, heads=8, rows=90, k=40, seed=None):
    """q, rows, ids as numpy; fresh random numbers in every run, rounded to what the backend takes."""
    rng = np.random.default_rng(seed)
    width, _ = FULL if backend == "hopper" else SMALL
    q, kv = rng.standard_normal((queries, heads, width)), rng.standard_normal((rows, width))
    if backend == "hopper":
        q, kv = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in (q, kv))
    return q, kv, distinct_ids(rng, queries, rows, k)


def run(backend, q, rows, ids, dout, dlse, **options):
    """Output, log-sum-exp, dq, drows."""
    dtype, value_dim = (jnp.bfloat16, FULL[1]) if backend == "hopper" else (jnp.float32, SMALL[1])
    options = dict(scale=SCALE, value_dim=value_dim, implementation=backend) | options

    @jax.jit
    def attend(q, rows, ids, dout, dlse):
        results, pull = jax.vjp(lambda q, rows: api.sparse_mla(q, rows, ids, **options), q, rows)
        return *results, *pull((dout, dlse))

    args = jnp.asarray(q, dtype), jnp.asarray(rows, dtype), jnp.asarray(ids)
    got = attend(*args, jnp.asarray(dout, jnp.float32), jnp.asarray(dlse, jnp.float32))
    return [np.asarray(x, np.float64) for x in got]


def expected(q, rows, ids, dout, dlse):
    """The same by numpy in fp64, a query at a time."""
    value_dim = dout.shape[-1]
    out, lse = np.zeros(dout.shape), np.full(dlse.shape, -np.inf)
    dq, drows = np.zeros(q.shape), np.zeros(rows.shape)
    for t, row in enumerate(ids):
        chosen = row[row >= 0]
        if not len(chosen):
            continue
        kv = rows[chosen]
        logits = SCALE * q[t] @ kv.T
        top = logits.max(-1, keepdims=True)
        weights = np.exp(logits - top)
        lse[t] = top[:, 0] + np.log(weights.sum(-1))
        weights /= weights.sum(-1, keepdims=True)
        out[t] = weights @ kv[:, :value_dim]
        dweights = dout[t] @ kv[:, :value_dim].T
        dlogits = SCALE * weights * (dweights - (out[t] * dout[t]).sum(-1, keepdims=True) + dlse[t][:, None])
        dq[t] = dlogits @ kv
        np.add.at(drows, chosen, dlogits.T @ q[t])
        np.add.at(drows[:, :value_dim], chosen, weights.T @ dout[t])
    return out, lse, dq, drows


def dq_of_rounded_factors(q, rows, ids, dout, dlse):
    """dq of `expected` with weights and score gradients rounded to bf16, as the tensor cores take them; no id is -1."""

    def rounded(x):
        return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)

    dq = np.zeros(q.shape)
    for t, kv in enumerate(rows[ids]):
        values, logits = kv[:, : dout.shape[-1]], SCALE * q[t] @ kv.T
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        delta = (rounded(weights) @ values * dout[t]).sum(-1, keepdims=True)
        dq[t] = rounded(SCALE * weights * (dout[t] @ values.T - delta + dlse[t][:, None])) @ kv
    return dq


def cotangents(q, value_dim, seed=None):
    rng = np.random.default_rng(seed)
    dout = rng.standard_normal((*q.shape[:2], value_dim))
    return np.asarray(jnp.asarray(dout, jnp.bfloat16), np.float64), rng.standard_normal(q.shape[:2])


def assert_close(backend, got, want):
    for x, y in zip(got, want, strict=True):
        assert np.array_equal(np.isfinite(x), np.isfinite(y))
        x, y = (np.where(np.isfinite(v), v, 0) for v in (x, y))
        assert np.linalg.norm(x - y) <= (8e-3 if backend == "hopper" else 2e-5) * np.linalg.norm(y) + 1e-6


def compare(backend, q, rows, ids):
    dout, dlse = cotangents(q, FULL[1] if backend == "hopper" else SMALL[1])
    got = run(backend, q, rows, ids, dout, dlse)
    assert_close(backend, got, expected(q, rows, ids, dout, dlse))
    return got


@pytest.mark.parametrize("backend", BACKENDS)
def test_f4_fewer_valid_ids_than_k_and_none_at_all(backend):
    q, rows, ids = inputs(backend)
    ids[0, 3:], ids[1, ::2], ids[2] = -1, -1, -1
    out, lse, dq, _ = compare(backend, q, rows, ids)
    assert not out[2].any() and np.all(lse[2] == -np.inf) and not dq[2].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries, heads, k", [(1, 64, 5), (2, 128, 70), (67, 8, 65)])
def test_head_counts_and_sizes_that_are_no_multiple_of_a_tile(backend, queries, heads, k):
    compare(backend, *inputs(backend, queries, heads, 80, k))


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_and_strongly_correlated_scores(backend):
    q, rows, ids = inputs(backend, k=90)
    rows[:] = rows[:1]
    out, lse, _, _ = compare(backend, q, rows, ids)
    np.testing.assert_allclose(lse, SCALE * q @ rows[0] + np.log(90), atol=1e-2)
    q, rows, ids = inputs(backend)
    rows += 8 * rows[:1]  # close to each other, and large
    rows = np.asarray(jnp.asarray(rows, jnp.bfloat16), np.float64)
    dout, dlse = cotangents(q, FULL[1] if backend == "hopper" else SMALL[1])
    got, want = run(backend, q, rows, ids, dout, dlse), expected(q, rows, ids, dout, dlse)
    if backend == "hopper":
        # What the rows share cancels in dq, and the rounding of its factors to bf16 does not: a kernel that feeds the
        # tensor cores may lose as much as the formula that rounds nothing else.
        plain = dq_of_rounded_factors(q, rows, ids, dout, dlse)
        assert np.linalg.norm(got[2] - want[2]) <= np.linalg.norm(plain - want[2])
        got[2] = want[2]
    assert_close(backend, got, want)
    out, lse, *_ = got
    assert np.isfinite(out).all() and np.abs(lse).max() > 8


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_nobody_selected_are_never_read(backend):
    """NaN in row 0 and in others: an id of -1 must not even multiply them by zero."""
    q, rows, ids = inputs(backend)
    unused = rows.shape[0] - 10
    ids[ids >= unused] = -1
    ids[ids == 0] = -1
    ids[3] = -1
    dout, dlse = cotangents(q, FULL[1] if backend == "hopper" else SMALL[1])
    dout[3], dlse[3] = np.nan, np.inf  # what a caller's own masking may send to an empty query
    want = expected(q, rows, ids, dout, dlse)
    rows[0], rows[unused:] = np.nan, np.nan
    assert_close(backend, run(backend, q, rows, ids, dout, dlse), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_detached_rows_get_nothing_and_dq_stays(backend):
    q, rows, ids = inputs(backend)
    dout, dlse = cotangents(q, FULL[1] if backend == "hopper" else SMALL[1])
    whole, detached = (run(backend, q, rows, ids, dout, dlse, rows_gradient=flag) for flag in (True, False))
    assert whole[3].any() and not detached[3].any()
    np.testing.assert_allclose(detached[2], whole[2], rtol=1e-2 if backend == "hopper" else 1e-6, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_deterministic_sums_are_the_same_bits_again(backend):
    q, rows, ids = inputs(backend, 70, 8, 60, 50)
    dout, dlse = cotangents(q, FULL[1] if backend == "hopper" else SMALL[1])
    first, second = (run(backend, q, rows, ids, dout, dlse, deterministic=True) for _ in range(2))
    np.testing.assert_array_equal(first[3], second[3])
    assert_close(backend, first, expected(q, rows, ids, dout, dlse))


@pytest.mark.parametrize("backend", BACKENDS)
def test_partial_results_merge_by_log_sum_exp_with_their_gradient(backend):
    """Three parts, one of them empty; the log-sum-exp's own cotangent is what makes dq and drows right."""
    q, rows, ids = inputs(backend)
    value_dim = FULL[1] if backend == "hopper" else SMALL[1]
    dtype = jnp.bfloat16 if backend == "hopper" else jnp.float32
    dout, dlse = cotangents(q, value_dim)
    parts = [np.where(ids < 30, ids, -1), np.where(ids >= 30, ids, -1), np.full_like(ids, -1)]

    def merged(q, rows):
        attend = [
            api.sparse_mla(q, rows, jnp.asarray(p), scale=SCALE, value_dim=value_dim, implementation=backend)
            for p in parts
        ]
        return api.merge_partial(*(jnp.stack(x) for x in zip(*attend, strict=True)))

    @jax.jit
    def with_gradient(q, rows, dout, dlse):
        results, pull = jax.vjp(merged, q, rows)
        return *results, *pull((dout, dlse))

    args = jnp.asarray(q, dtype), jnp.asarray(rows, dtype)
    got = with_gradient(*args, jnp.asarray(dout, jnp.float32), jnp.asarray(dlse, jnp.float32))
    assert_close(backend, [np.asarray(x, np.float64) for x in got], expected(q, rows, ids, dout, dlse))


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_out_of_order_with_a_partly_filled_last_page(backend):
    q, rows, ids = inputs(backend, rows=150, k=60)
    dout, dlse = cotangents(q, FULL[1] if backend == "hopper" else SMALL[1])
    want = expected(q, rows, ids, dout, dlse)
    table = np.asarray([4, 0, 3], np.int32)
    pages = np.full((6, 64, rows.shape[1]), np.nan)
    for i, page in enumerate(table):
        part = rows[64 * i : 64 * (i + 1)]
        pages[page, : len(part)] = part
    got = run(backend, q, pages, ids, dout, dlse, page_table=jnp.asarray(table))
    drows = np.concatenate([got[3][page] for page in table])
    assert_close(backend, (*got[:3], drows[:150]), want)
    assert not drows[150:].any() and not got[3][[1, 2, 5]].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_explicit_backward_adds_into_pages_in_place(backend):
    q, rows, ids = inputs(backend, rows=128)
    value_dim, dtype = (FULL[1], jnp.bfloat16) if backend == "hopper" else (SMALL[1], jnp.float32)
    dout, dlse = cotangents(q, value_dim)
    out, lse, dq, drows = expected(q, rows, ids, dout, dlse)
    before = np.random.default_rng().standard_normal(rows.shape)

    def add(pages):
        args = [jnp.asarray(x, jnp.float32) for x in (out, lse, dout, dlse)]
        kv = jnp.asarray(rows, dtype).reshape(2, 64, -1)
        ids_ = jnp.asarray(ids)
        return api.sparse_mla_backward(
            jnp.asarray(q, dtype), kv, ids_, *args, pages, scale=SCALE, implementation=backend
        )

    pages = jnp.asarray(before, jnp.float32).reshape(2, 64, -1)
    compiled = jax.jit(add, donate_argnums=0).lower(pages).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= pages.nbytes
    got, pages = compiled(pages)
    after = np.asarray(pages, np.float64).reshape(rows.shape) - before
    assert_close(backend, (np.asarray(got, np.float64), after), (dq, drows))


@pytest.mark.gpu
def test_rows_beyond_32_bit_offsets():
    """4.6 million rows: 2.6e9 numbers, whose places no 32-bit offset holds."""
    count, rng = 4_600_000, np.random.default_rng()
    q, rows, ids = inputs("hopper", rows=1024, k=256)
    places = np.sort(rng.permutation(2048)[:1024]) + count - 2048
    far = jnp.zeros((count, FULL[0]), jnp.bfloat16).at[places].set(jnp.asarray(rows, jnp.bfloat16))
    dout, dlse = cotangents(q, FULL[1])
    out, lse, dq, drows = run("hopper", q, far, places.astype(np.int32)[ids], dout, dlse)
    assert_close("hopper", (out, lse, dq, drows[places]), expected(q, rows, ids, dout, dlse))
