"""The indexer and its selection against a numpy one, far more keys than the selection holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import filled, tiny_config

from longstraw_jax.model import rope
from longstraw_jax.model.indexer import Indexer
from pallas_kernels.indexer_topk import reference as indexer_topk

TOKENS, K = 40, 5
CONFIG = tiny_config(index_topk=K)


def build(config=CONFIG, dtype=jnp.float32):
    module = filled(Indexer(config, stack=None, dtype=dtype))
    bias = 0.5 * jax.random.normal(jax.random.key(1), module.k_norm.bias[...].shape)
    module.k_norm.bias[...] = bias.astype(dtype)
    return module


def inputs(dtype=jnp.float32):
    h, qr = (jax.random.normal(jax.random.key(i), (1, TOKENS, n)).astype(dtype) for i, n in ((2, 32), (3, 20)))
    return h, qr, *rope.cos_sin(jnp.arange(TOKENS)[None], CONFIG.rope_parameters, CONFIG.qk_rope_head_dim)


def turn_pairs(x, at):
    """Interleaved pairs as complex numbers, written back in place: the order is free as long as q and k share it."""
    p = CONFIG.qk_rope_head_dim
    pairs = x[..., 0:p:2] + 1j * x[..., 1:p:2]
    pairs = pairs * np.exp(1j * at * 10000.0 ** (-np.arange(0, p, 2) / p))
    return np.concatenate([np.stack([pairs.real, pairs.imag], -1).reshape(*x.shape[:-1], p), x[..., p:]], -1)


def turn_halves(x, at):
    p = CONFIG.qk_rope_head_dim
    pairs = x[..., : p // 2] + 1j * x[..., p // 2 : p]
    pairs = pairs * np.exp(1j * at * 10000.0 ** (-np.arange(0, p, 2) / p))
    return np.concatenate([pairs.real, pairs.imag, x[..., p:]], -1)


def turn_last(x, at):
    p = CONFIG.qk_rope_head_dim
    return turn_pairs(x[..., ::-1], at)[..., ::-1] if p < x.shape[-1] else x


def numpy_selection(module, h, qr, turn=turn_pairs, relu=True):
    """Sets of keys, fp64: one query at a time, from the formulas."""
    h, qr = np.asarray(h[0], np.float64), np.asarray(qr[0], np.float64)
    heads, dim = CONFIG.index_n_heads, CONFIG.index_head_dim
    at = np.arange(TOKENS)[:, None]
    q = (qr @ np.asarray(module.wq_b.weight[...], np.float64)).reshape(TOKENS, heads, dim)
    k = h @ np.asarray(module.wk.weight[...], np.float64)
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
    k = k * np.asarray(module.k_norm.weight[...]) + np.asarray(module.k_norm.bias[...])
    w = h @ np.asarray(module.weights_proj.weight[...], np.float64) * heads**-0.5
    products = np.einsum("tih,sh->tis", turn(q, at[:, None]), turn(k, at)) * dim**-0.5
    scores = (w[..., None] * (np.maximum(products, 0) if relu else products)).sum(1)
    return [set(np.argsort(-scores[t, : t + 1], kind="stable")[:K]) for t in range(TOKENS)]


def selection(module, h, qr, cos, sin):
    @jax.jit
    def run(h, qr):
        q, w, k = module(h, qr, cos, sin)
        causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
        return indexer_topk.select(indexer_topk.index_scores(q[0], w[0], k[0]), causal, K)

    _, ids = run(h, qr)
    return [set(row[row >= 0].tolist()) for row in np.asarray(ids)]


def differing(a, b):
    return sum(x != y for x, y in zip(a, b, strict=True))


def test_selection_equals_numpy():
    module, given = build(), inputs()
    assert selection(module, *given) == numpy_selection(module, *given[:2])


@pytest.mark.parametrize("turn", [turn_halves, turn_last])
def test_f1_another_rotary_convention_selects_other_keys(turn):
    """So that the comparison above would see it; with k as large as the prompt it could not."""
    module, given = build(), inputs()
    assert differing(selection(module, *given), numpy_selection(module, *given[:2], turn=turn)) > TOKENS // 2


def test_f2_without_relu_other_keys_are_selected():
    module, given = build(), inputs()
    assert differing(selection(module, *given), numpy_selection(module, *given[:2], relu=False)) > TOKENS // 2


def test_f4_every_query_sees_itself_first_and_never_the_future():
    chosen = selection(build(), *inputs())
    assert chosen[0] == {0}
    assert all(max(ids) <= t and len(ids) == min(K, t + 1) for t, ids in enumerate(chosen))


def test_weights_are_fp32_in_a_bf16_model():
    """Rounding them before the scale flips near-tied selections."""
    module = build(dtype=jnp.bfloat16)
    assert module.weights_proj.weight[...].dtype == jnp.float32 and module.wk.weight[...].dtype == jnp.bfloat16
    h, qr, cos, sin = inputs(jnp.bfloat16)
    q, w, k = module(h, qr, cos, sin)
    assert (q.dtype, w.dtype, k.dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    exact = np.asarray(h[0], np.float64) @ np.asarray(module.weights_proj.weight[...], np.float64)
    np.testing.assert_allclose(w[0], exact * (4 * 12) ** -0.5, rtol=1e-4, atol=1e-5)


def test_f6_scores_are_finite_for_extreme_inputs():
    """Products of the largest activations stay in fp32's range, and a zero key divides by no zero norm."""
    module, (h, qr, cos, sin) = build(), inputs()
    h = h.at[:, 5].set(0.0).at[:, 6].multiply(1e4)
    q, w, k = module(h, qr * 1e4, cos, sin)
    assert np.isfinite(indexer_topk.index_scores(q[0], w[0], k[0])).all()
