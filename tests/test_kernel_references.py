"""The kernels' specifications against plain numpy, with the rows, ties and NaNs that kernels get wrong.

Under jit: one program a shape instead of one for each of its operations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chunked_logprob import reference as chunked_logprob
from pallas_kernels.grouped_matmul import reference as grouped_matmul
from pallas_kernels.indexer_topk import reference as indexer_topk
from pallas_kernels.sparse_mla import reference as sparse_mla

index_scores = jax.jit(indexer_topk.index_scores)
select = jax.jit(indexer_topk.select, static_argnums=2)
merge = jax.jit(indexer_topk.merge, static_argnums=2)
sparse = jax.jit(sparse_mla.sparse_mla, static_argnames=("scale", "value_dim"))
merge_partial = jax.jit(sparse_mla.merge_partial)
matmul = jax.jit(grouped_matmul.grouped_matmul)


def gradients(function, argnums=(0, 1), **options):
    return jax.jit(jax.grad(function, argnums=argnums, **options))


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Index scores and selection.


def test_f2_heads_with_a_negative_product_add_nothing():
    q, w, k = normal(0, 6, 3, 8), normal(1, 6, 3), normal(2, 9, 8)
    products = np.einsum("tih,sh->tis", q, k)
    want = (w[..., None] * np.maximum(products, 0)).sum(1)
    np.testing.assert_allclose(index_scores(q, w, k), want, atol=1e-5)
    assert np.abs(want - (w[..., None] * products).sum(1)).max() > 1  # without relu it is another score


def test_index_scores_are_fp32_for_bf16_inputs():
    q, w, k = (jnp.asarray(x, jnp.bfloat16) for x in (normal(0, 4, 2, 8), normal(1, 4, 2), normal(2, 5, 8)))
    scores = index_scores(q, w, k)
    assert scores.dtype == jnp.float32
    exact = index_scores(*(x.astype(jnp.float32) for x in (q, w, k)))
    np.testing.assert_allclose(scores, exact, rtol=1e-6, atol=1e-6)


def test_signed_zeros_tie_and_ties_go_to_the_lowest_position():
    zeros = index_scores(-np.ones((1, 1, 2)), -np.ones((1, 1)), np.ones((4, 2)))
    assert not np.signbit(np.asarray(zeros)).any()
    scores = np.asarray([[0.0, 1.0, 0.0, 1.0, 1.0, 0.0]], np.float32)
    _, ids = select(scores, np.ones_like(scores, bool), 4)
    np.testing.assert_array_equal(ids, [[1, 3, 4, 0]])


def test_f4_fewer_valid_keys_than_k_give_no_masked_key():
    scores = np.asarray([[0.1, 9.0, 0.3, 9.0, 9.0]], np.float32)
    valid = np.asarray([[True, False, True, False, False]])
    best, ids = select(scores, valid, 4)
    np.testing.assert_array_equal(ids, [[2, 0, -1, -1]])
    np.testing.assert_array_equal(best, np.asarray([[0.3, 0.1, -np.inf, -np.inf]], np.float32))
    _, causal = select(normal(0, 5, 5), np.tril(np.ones((5, 5), bool)), 3)
    assert [set(row) for row in np.asarray(causal[:3])] == [{0, -1}, {0, 1, -1}, {0, 1, 2}]


def test_selection_is_the_exact_top_k():
    scores = normal(3, 40, 200)
    valid = np.random.default_rng(4).random((40, 200)) < 0.7
    _, ids = select(scores, valid, 17)
    want = np.argsort(-np.where(valid, scores, -np.inf), axis=-1, kind="stable")[:, :17]
    np.testing.assert_array_equal(ids, want)


@pytest.mark.parametrize("parts", [2, 5])
def test_merging_local_selections_equals_one_selection(parts):
    """With many ties, fewer valid keys than k in some parts, and none at all in one row."""
    rng = np.random.default_rng(5)
    scores = rng.integers(0, 4, (12, 50)).astype(np.float32)
    valid = rng.random((12, 50)) < 0.3
    valid[3] = False
    want = select(scores, valid, 6)
    owner = np.arange(50) % parts
    candidates = []
    for part in range(parts):
        where = np.flatnonzero(owner == part)
        best, ids = select(scores[:, where], valid[:, where], 6)
        candidates.append((best, np.where(ids < 0, -1, where[np.asarray(ids)])))
    merged = merge(*(np.concatenate(x, axis=-1) for x in zip(*candidates, strict=True)), 6)
    np.testing.assert_array_equal(merged[0], want[0])
    np.testing.assert_array_equal(merged[1], want[1])


def test_f6_a_nan_score_stays_visible():
    scores = np.asarray([[1.0, np.nan, 2.0]], np.float32)
    best, ids = select(scores, np.ones_like(scores, bool), 2)
    assert np.isnan(best[0, 0]) and ids[0, 0] == 1
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        index_scores(np.full((1, 1, 2), np.nan, np.float32), np.ones((1, 1)), np.ones((3, 2)))


def test_f6_a_masked_nan_is_never_selected():
    scores = np.asarray([[1.0, np.nan, 2.0]], np.float32)
    best, ids = select(scores, np.asarray([[True, False, True]]), 3)
    np.testing.assert_array_equal(ids, [[2, 0, -1]])
    assert not np.isnan(best).any()


# Sparse latent attention.


def attention(q, rows, ids, scale, value_dim):
    """fp64, a query at a time."""
    q, rows = q.astype(np.float64), rows.astype(np.float64)
    out, lse = np.zeros((*q.shape[:2], value_dim)), np.full(q.shape[:2], -np.inf)
    for t, chosen in enumerate(ids):
        kv = rows[chosen[chosen >= 0]]
        if len(kv):
            logits = scale * q[t] @ kv.T
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            lse[t] = logits.max(-1) + np.log(weights.sum(-1))
            out[t] = weights @ kv[:, :value_dim] / weights.sum(-1, keepdims=True)
    return out, lse


def some_ids(seed, queries, keys, k):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(keys)[:k] for _ in range(queries)])
    return np.where(rng.random(ids.shape) < 0.3, -1, ids)


@pytest.mark.parametrize("queries", [1, 64, 65, 150])
def test_sparse_attention_equals_numpy(queries):
    """One block, a full block, and several with a padded last."""
    q, rows, ids = normal(0, queries, 2, 7), normal(1, 40, 7), some_ids(2, queries, 40, 9)
    out, lse = sparse(q, rows, ids, scale=0.4, value_dim=5)
    want = attention(q, rows, ids, 0.4, 5)
    np.testing.assert_allclose(out, want[0], atol=2e-6)
    np.testing.assert_allclose(lse, want[1], atol=2e-6)
    assert out.dtype == lse.dtype == jnp.float32


def test_f4_no_key_never_reads_the_last_row():
    q, rows = normal(0, 3, 2, 6), normal(1, 8, 6)
    ids = np.asarray([[0, -1, -1], [3, 5, -1], [-1, -1, -1]])
    want = sparse(q, rows, ids, scale=1.0, value_dim=4)
    rows[-1] = 1e30
    found = sparse(q, rows, ids, scale=1.0, value_dim=4)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("queries", [4, 70])
def test_f7_a_query_without_keys_gives_zero_and_no_gradient(queries):
    q, rows, ids = normal(0, queries, 2, 6), normal(1, 8, 6), some_ids(2, queries, 8, 3)
    ids[1] = -1

    def loss(q, rows):
        out, lse = sparse(q, rows, ids, scale=1.0, value_dim=4)
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()

    out, lse = sparse(q, rows, ids, scale=1.0, value_dim=4)
    assert (out[1] == 0).all() and np.isneginf(lse[1]).all()
    dq, drows = gradients(loss)(q, rows)
    assert np.isfinite(dq).all() and np.isfinite(drows).all() and (dq[1] == 0).all() and (dq[0] != 0).any()


def test_sparse_attention_gradient_equals_dense_softmax():
    q, rows, ids = normal(0, 5, 2, 6), normal(1, 9, 6), some_ids(2, 5, 9, 4)
    ids[:, 0] = np.arange(5)
    mask = np.zeros((5, 9), bool)
    for t, chosen in enumerate(ids):
        mask[t, chosen[chosen >= 0]] = True
    unique = np.stack([np.concatenate([np.flatnonzero(m), np.full(9 - m.sum(), -1)]) for m in mask])

    def dense(q, rows):
        logits = jnp.where(mask[:, None], jnp.einsum("tnw,sw->tns", q, rows) * 0.5, -jnp.inf)
        return (jnp.einsum("tns,sr->tnr", jax.nn.softmax(logits), rows[:, :4]) ** 2).sum()

    def selected(q, rows):
        return (sparse(q, rows, unique, scale=0.5, value_dim=4)[0] ** 2).sum()

    found, want = (gradients(f)(q, rows) for f in (selected, dense))
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_partial_attention_merges_to_the_whole():
    q, rows, ids = normal(0, 6, 2, 5), normal(1, 20, 5), some_ids(2, 6, 20, 8)
    ids[4] = -1
    ids[2] = np.where(ids[2] % 3 == 0, ids[2], -1)  # all of its keys in one part
    parts = [sparse(q, rows, np.where(ids % 3 == part, ids, -1), scale=0.7, value_dim=3) for part in range(3)]
    whole = sparse(q, rows, ids, scale=0.7, value_dim=3)
    merged = merge_partial(*(jnp.stack(x) for x in zip(*parts, strict=True)))
    for x, y in zip(merged, whole, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)


def test_f7_merging_empty_parts_gives_zero_and_no_gradient():
    out, lse = jnp.ones((2, 1, 3)), jnp.asarray([[-jnp.inf], [0.5]])

    def total(out, lse):
        merged, _ = merge_partial(jnp.stack([out, 2 * out]), jnp.stack([lse, jnp.full_like(lse, -jnp.inf)]))
        return merged.sum(), merged

    (d_out, d_lse), merged = gradients(total, has_aux=True)(out, lse)
    np.testing.assert_array_equal(merged, [[[0, 0, 0]], [[1, 1, 1]]])
    assert np.isfinite(d_out).all() and np.isfinite(d_lse).all() and (d_out[0] == 0).all()


# Grouped matrix product.


def test_grouped_matmul_equals_a_loop_with_empty_groups():
    x, w, sizes = normal(0, 11, 4), normal(1, 5, 4, 3), np.asarray([3, 0, 5, 1, 0])
    want = np.zeros((11, 3))
    for e, (stop, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        want[stop - size : stop] = x[stop - size : stop] @ w[e]
    np.testing.assert_allclose(matmul(x, w, sizes), want, atol=1e-5)


def test_rows_past_the_last_group_leak_nothing():
    x, w, sizes = normal(0, 6, 4), normal(1, 2, 4, 3), np.asarray([1, 2])
    x[3:] = np.nan

    def loss(x, w):
        return (matmul(x, w, sizes) ** 2).sum()

    assert (np.asarray(matmul(x, w, sizes))[3:] == 0).all()
    dx, dw = gradients(loss)(x, w)
    assert np.isfinite(dx).all() and np.isfinite(dw).all() and (dx[3:] == 0).all() and (dx[:3] != 0).any()


# Softmax statistics of the vocabulary.


@pytest.mark.parametrize("tokens", [3, 64, 100])
def test_statistics_of_vocabulary_slices_give_logprob_and_entropy(tokens):
    hidden, head = normal(0, tokens, 6), normal(1, 6, 30)
    targets = np.random.default_rng(2).integers(0, 30, tokens)

    @jax.jit
    def statistics(head, start):
        return chunked_logprob.softmax_statistics(lambda h: h @ head, hidden, targets, start)

    slices = [statistics(head[:, s : s + 10], jnp.int32(s)) for s in (0, 10, 20)]
    top = np.max([s[0] for s in slices], axis=0)
    total = sum(np.exp(s[0] - top) * s[1] for s in slices)
    weighted = sum(np.exp(s[0] - top) * s[2] for s in slices)
    lse = top + np.log(total)
    logprobs = np.asarray(jax.nn.log_softmax(hidden @ head))
    np.testing.assert_allclose(
        sum(s[3] for s in slices) - lse, logprobs[np.arange(tokens), targets], atol=1e-5
    )
    np.testing.assert_allclose(lse - weighted / total, -(np.exp(logprobs) * logprobs).sum(-1), atol=1e-5)


def test_statistics_have_the_gradient_of_log_softmax():
    hidden, head, targets = normal(0, 70, 6), normal(1, 6, 12), np.arange(70) % 12

    def blocked(head):
        top, total, _, picked = chunked_logprob.softmax_statistics(
            lambda h: h @ head, hidden, targets, jnp.int32(0)
        )
        return (picked - top - jnp.log(total)).sum()

    def plain(head):
        return jnp.take_along_axis(jax.nn.log_softmax(hidden @ head), targets[:, None], axis=-1).sum()

    np.testing.assert_allclose(gradients(blocked, 0)(head), gradients(plain, 0)(head), atol=1e-4)
