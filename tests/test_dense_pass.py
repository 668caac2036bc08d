"""The dense pass against the sparse one: outputs, selections, router choices; packing, recomputation, measures."""

import functools

import jax
import numpy as np
import pytest
from tiny_models import tiny_config, tiny_ids, tiny_params

from longstraw_jax import forward
from longstraw_jax.model import decoder
from longstraw_jax.pretrain import dense_pass
from longstraw_jax.pretrain.dense_pass import Options

CONFIG = tiny_config(num_hidden_layers=3, indexer_types=["full", "shared", "shared"], mlp_layer_types=["sparse"] * 3)
ROWS, TOKENS, KEYS = 2, 24, CONFIG.index_topk
MODEL = decoder.make_model(CONFIG, remat=False)
IDS = tiny_ids(CONFIG, ROWS, TOKENS)
ONE = np.zeros((ROWS, TOKENS), np.int32)
PLACES = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), (ROWS, TOKENS))
SPARSE = Options(KEYS, index=True, measure=True)
EVEN = np.ones((ROWS, TOKENS), np.float32)


@functools.partial(jax.jit, static_argnames=("model", "options"))
def compiled(model, base, ids, segments, positions, options, weights):
    return dense_pass.run(model, base, ids, segments, positions, options, weights)


def run(*arguments, weights=EVEN):
    return compiled(*arguments, weights)


@pytest.fixture(scope="module")
def base():
    return tiny_params(CONFIG)


@pytest.fixture(scope="module")
def sparse(base):
    return run(MODEL, base, IDS, ONE, PLACES, SPARSE)


@pytest.fixture(scope="module")
def served(base):
    """The product's pass with a selection of KEYS keys."""
    return jax.jit(forward.forward, static_argnames=("model", "collect"))(MODEL, base, None, IDS, collect=True)


def test_the_masked_pass_is_the_sparse_pass(sparse, served):
    hidden, layers = sparse
    np.testing.assert_allclose(hidden, served[0], atol=2e-5)
    for layer, reference in zip(layers.values(), served[1], strict=True):
        wanted = np.bincount(np.asarray(reference["router_ids"]).reshape(-1), minlength=CONFIG.n_routed_experts)
        np.testing.assert_array_equal(layer["load"], wanted)


def test_documents_of_a_row_do_not_see_one_another(base, sparse):
    """The first halves of both rows packed into one give what each gives alone; so does one with padding behind."""
    half, ids = TOKENS // 2, np.asarray(IDS)
    packed = np.stack([np.append(ids[0, :half], ids[1, :half]), np.append(ids[1, :half], ids[0, :half])])
    segments = np.repeat([[0, 1], [4, -1]], half, axis=1).astype(np.int32)
    positions = np.tile(np.arange(half, dtype=np.int32), (2, 2))
    hidden, layers = run(MODEL, base, packed, segments, positions, SPARSE)
    np.testing.assert_allclose(hidden[0, :half], sparse[0][0, :half], atol=2e-5)
    np.testing.assert_allclose(hidden[0, half:], sparse[0][1, :half], atol=2e-5)
    np.testing.assert_allclose(hidden[1, :half], sparse[0][1, :half], atol=2e-5)
    for layer in layers.values():  # padding counts nowhere
        assert float(layer["load"].sum()) == 3 * half * CONFIG.num_experts_per_tok
        assert float(layer["queries"]) == 3 * (half - KEYS)


def test_measures_against_numpy(sparse, served, base):
    """The shares of the first layer, whose attention over all keys numpy forms from its projections."""
    first = jax.tree.map(lambda v: v[0], base["segments"][0]["layers"][0])
    attention = _attention(first, base["embed_tokens"]["weight"][IDS])
    share = np.zeros(2)
    for b in range(ROWS):
        for t in range(KEYS, TOKENS):
            row = attention[b, t, : t + 1]
            best = np.sort(row)[-KEYS:].sum()
            share += row[served[1][0]["selection"][b, t]].sum() / best, row[-KEYS:].sum() / best
    np.testing.assert_allclose(sparse[1][0]["share"][:2], share, rtol=1e-4)
    assert float(sparse[1][0]["queries"]) == ROWS * (TOKENS - KEYS)


def test_the_divergence_is_a_weighed_sum_over_queries(base, sparse):
    """Of the queries that weigh alone; none of the first ones, which see but one key, differs from its indexer."""
    late = PLACES >= TOKENS // 2
    parts = [
        run(MODEL, base, IDS, ONE, PLACES, SPARSE, weights=weights)[1]
        for weights in (np.where(late, 3.0, 0.0).astype(np.float32), np.where(late, 0.0, 1.0).astype(np.float32))
    ]
    for i, layer in sparse[1].items():
        late, early = (float(part[i]["divergence"]) for part in parts)
        assert late > 0 and early > 0
        np.testing.assert_allclose(late / 3 + early, layer["divergence"], rtol=1e-5)


def test_gaps_in_positions_turn_keys_alone(base, sparse):
    """An offset of all positions changes nothing, a gap does; who sees whom hangs on the order of the tokens."""
    gap = PLACES + np.where(PLACES >= TOKENS // 2, 1000, 0).astype(np.int32)
    offset, after = (run(MODEL, base, IDS, ONE, p, SPARSE)[0] for p in (PLACES + np.int32(1000), gap))
    np.testing.assert_allclose(offset, sparse[0], atol=2e-3)
    np.testing.assert_allclose(after[:, : TOKENS // 2], sparse[0][:, : TOKENS // 2], atol=2e-5)
    assert np.abs(np.asarray(after - sparse[0]))[:, TOKENS // 2 :].max() > 1e-2


def _attention(layer, x):
    """[B, T, T] causal attention of a layer, a mean over heads, in fp64."""
    weight = lambda *path: np.asarray(functools.reduce(lambda tree, key: tree[key], path, layer)["weight"], np.float64)  # noqa: E731
    norm = lambda x, g: x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.rms_norm_eps) * g  # noqa: E731
    angles = PLACES[0][:, None] * np.power(1e4, -np.arange(0, CONFIG.qk_rope_head_dim, 2) / CONFIG.qk_rope_head_dim)

    def rotated(x):  # [.., T, P]
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], -1)

    attn, heads, rank = "self_attn", CONFIG.num_attention_heads, CONFIG.kv_lora_rank
    h = norm(np.asarray(x, np.float64), weight("input_layernorm"))
    q = norm(h @ weight(attn, "q_a_proj"), weight(attn, "q_a_layernorm")) @ weight(attn, "q_b_proj")
    q = np.moveaxis(q.reshape(*h.shape[:2], heads, -1), 2, 1)
    latent = h @ weight(attn, "kv_a_proj_with_mqa")
    k = norm(latent[..., :rank], weight(attn, "kv_a_layernorm")) @ weight(attn, "kv_b_proj")
    k = np.moveaxis(k.reshape(*h.shape[:2], heads, -1)[..., : CONFIG.qk_nope_head_dim], 2, 1)
    q_nope, q_pe = np.split(q, [CONFIG.qk_nope_head_dim], -1)
    k_pe = rotated(latent[..., rank:])[:, None]
    scores = (q_nope @ k.swapaxes(-1, -2) + rotated(q_pe) @ k_pe.swapaxes(-1, -2)) * CONFIG.softmax_scale
    weights = np.where(np.tril(np.ones((TOKENS, TOKENS), bool)), np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return (weights / weights.sum(-1, keepdims=True)).mean(1)
