"""The router and the routed experts against numpy, at any imbalance, on one device and on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from tiny_models import filled, tiny_config

from longstraw_jax import expert_dispatch, parallel, sharding
from longstraw_jax.model import decoder
from longstraw_jax.model.moe import MoE, Router

CONFIG = tiny_config()


def router(config, bias=None, weight=None):
    module = filled(Router(config, stack=None))
    if bias is not None:
        module.e_score_correction_bias[...] = jnp.asarray(bias, jnp.float32)
    if weight is not None:
        module.weight[...] = jnp.asarray(weight, jnp.float32)
    return module


def route(module, h):
    return jax.jit(lambda h: module(h))(h)


def numpy_route(h, weight, bias, config):
    """Chosen experts as sets and weight per expert [N, E], fp64."""
    scores = 1 / (1 + np.exp(-(np.asarray(h, np.float64) @ np.asarray(weight, np.float64))))
    weights, chosen = np.zeros_like(scores), []
    size = config.n_routed_experts // config.n_group
    for n, s in enumerate(scores):
        biased = s + np.asarray(bias, np.float64)
        groups = biased.reshape(config.n_group, size)
        best = np.argsort(-np.sort(groups, axis=-1)[:, -2:].sum(-1))[: config.topk_group]
        allowed = [e for g in best for e in range(g * size, (g + 1) * size)]
        ids = sorted(allowed, key=lambda e: -biased[e])[: config.num_experts_per_tok]
        total = s[ids].sum() if config.norm_topk_prob else 1.0
        weights[n, ids] = s[ids] / total * config.routed_scaling_factor
        chosen.append(set(ids))
    return chosen, weights


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
        {"n_group": 2, "topk_group": 1, "norm_topk_prob": False},
        {"n_group": 8, "topk_group": 3},  # groups of one expert
    ],
)
def test_routing_equals_numpy(changes):
    """With biases of both signs, so that a masked group at 0 instead of -inf would win."""
    config = tiny_config(**changes)
    bias = np.random.default_rng(0).normal(-0.8, 0.5, 8)
    module, h = router(config, bias), jax.random.normal(jax.random.key(1), (50, 32))
    ids, weights, logits = route(module, h)
    chosen, want = numpy_route(h, module.weight[...], bias, config)
    assert [set(row) for row in np.asarray(ids)] == chosen
    dense = np.zeros((50, 8))
    np.put_along_axis(dense, np.asarray(ids), np.asarray(weights), axis=-1)
    np.testing.assert_allclose(dense, want, atol=1e-5)
    np.testing.assert_allclose(logits, np.asarray(h) @ np.asarray(module.weight[...]), atol=1e-4)


def test_e1_correction_bias_is_fp32_whatever_the_models_dtype():
    shapes = decoder.param_shapes(tiny_config(dtype="bfloat16"))
    gate = shapes["segments"][1]["layers"][1]["mlp"]["gate"]
    assert gate["e_score_correction_bias"].dtype == gate["weight"].dtype == jnp.float32
    assert shapes["segments"][1]["layers"][1]["mlp"]["experts"]["gate_proj"].dtype == jnp.bfloat16


def test_e1_close_biases_select_as_in_fp64():
    """Spread over 6.817 to 7.063 as in released weights: bf16 leaves nine values of 256."""
    config = tiny_config(n_routed_experts=256, num_experts_per_tok=8, hidden_size=16)
    rng = np.random.default_rng(0)
    bias, weight = rng.uniform(6.817, 7.063, 256).astype(np.float32), 0.05 * rng.standard_normal((16, 256))
    h = jnp.asarray(rng.standard_normal((64, 16)), jnp.bfloat16)
    module = router(config, bias, weight)
    ids = np.asarray(route(module, h)[0])
    chosen, _ = numpy_route(np.asarray(h, np.float64), module.weight[...], bias, config)
    assert [set(row) for row in ids] == chosen
    rounded, _ = numpy_route(np.asarray(h, np.float64), weight, bias.astype(jnp.bfloat16), config)
    assert sum(a != b for a, b in zip(chosen, rounded, strict=True)) > 16


def test_e2_scores_are_fp32_for_bf16_hidden_states():
    """Logits 2^-12 apart near 4: equal in bf16."""
    weight = np.zeros((32, 8))
    weight[0] = 4 + np.arange(8) * 2.0**-12
    module = router(CONFIG, weight=weight)
    ids, weights, logits = route(module, jnp.zeros((1, 32), jnp.bfloat16).at[0, 0].set(1))
    assert set(np.asarray(ids[0])) == {6, 7} and weights.dtype == logits.dtype == jnp.float32
    np.testing.assert_allclose(weights.sum(), 2.5, rtol=1e-6)


def test_e2_weights_come_from_scores_without_bias():
    bias = np.asarray([5.0, 5.0, 0, 0, 0, 0, 0, 0])
    ids, weights, logits = route(router(CONFIG, bias), jax.random.normal(jax.random.key(2), (9, 32)))
    assert (np.sort(ids, -1) == [0, 1]).all()
    scores = np.take_along_axis(1 / (1 + np.exp(-np.asarray(logits))), np.asarray(ids), -1)
    np.testing.assert_allclose(weights, 2.5 * scores / scores.sum(-1, keepdims=True), rtol=1e-5)


def test_gradient_reaches_the_gate_through_chosen_experts_only():
    graphdef, params = nnx.split(router(CONFIG, np.linspace(-1, 1, 8)))
    h = jax.random.normal(jax.random.key(3), (4, 32))

    def loss(params):
        ids, weights, _ = nnx.merge(graphdef, params)(h)
        return (weights**2).sum(), ids

    grads, ids = jax.jit(jax.grad(loss, has_aux=True))(params)
    ids = np.asarray(ids)
    assert (np.asarray(grads.e_score_correction_bias[...]) == 0).all()
    moved = np.flatnonzero(np.abs(np.asarray(grads.weight[...])).max(0))
    assert set(moved) == set(ids.reshape(-1).tolist()) != set(range(8))


def test_e4_held_experts_weigh_by_the_scores_at_hand():
    """Weights of experts that are not the best, and their gradient, come from the live scores of these experts."""
    graphdef, params = nnx.split(router(CONFIG, np.linspace(-1, 1, 8)))
    h = jax.random.normal(jax.random.key(4), (5, 32))
    held = jnp.asarray([[0, 1], [1, 0], [2, 5], [0, 3], [-1, -1]])

    def weigh(params, h):
        ids, weights, _ = nnx.merge(graphdef, params)(h, held)
        return (weights[:4] ** 2).sum(), (ids, weights)

    (_, (ids, weights)), grads = jax.jit(jax.value_and_grad(weigh, argnums=(0, 1), has_aux=True))(params, h)
    scores = 1 / (1 + np.exp(-np.asarray(h, np.float64) @ np.asarray(params.weight[...], np.float64)))
    own = np.take_along_axis(scores[:4], np.asarray(held[:4]), -1)
    np.testing.assert_array_equal(ids, held)
    np.testing.assert_allclose(weights[:4], 2.5 * own / own.sum(-1, keepdims=True), rtol=1e-5)
    assert np.isfinite(weights).all()
    assert set(np.flatnonzero(np.abs(grads[0].weight[...]).max(0))) == {0, 1, 2, 3, 5}
    assert (np.abs(grads[1][:4]).max(-1) > 0).all()


def dense_experts(x, ids, weights, experts):
    """fp64, every token through each of its experts."""
    x, experts = np.asarray(x, np.float64), {k: np.asarray(v, np.float64) for k, v in experts.items()}
    out = np.zeros_like(x)
    for t in range(len(x)):
        for e, g in zip(ids[t], weights[t], strict=True):
            if e < len(experts["gate_proj"]):
                gate = x[t] @ experts["gate_proj"][e]
                h = gate / (1 + np.exp(-gate)) * (x[t] @ experts["up_proj"][e])
                out[t] += g * (h @ experts["down_proj"][e])
    return out


def routings(tokens, experts):
    rng = np.random.default_rng(0)
    spread = np.stack([rng.permutation(experts)[:2] for _ in range(tokens)])
    padded = spread.copy()
    padded[::3] = experts
    return {
        "spread": spread,
        "one expert": np.broadcast_to([5, 2], (tokens, 2)),
        "last device": np.broadcast_to([experts - 1, experts - 2], (tokens, 2)),
        "padding": padded,
        "nothing": np.full((tokens, 2), experts),
    }


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("routing", ["spread", "one expert", "last device", "padding", "nothing"])
def test_e5_no_token_is_dropped_at_any_imbalance(routing, devices):
    rng = np.random.default_rng(1)
    tokens, experts, d, f = 24, 16, 6, 5
    x, weights = rng.standard_normal((tokens, d)), rng.random((tokens, 2))
    matrices = {
        "gate_proj": rng.standard_normal((experts, d, f)),
        "up_proj": rng.standard_normal((experts, d, f)),
        "down_proj": rng.standard_normal((experts, f, d)),
    }
    ids = routings(tokens, experts)[routing]
    x, weights, matrices = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (x, weights, matrices))

    def body(axis, x, ids, weights, matrices):
        stack = jax.tree.map(lambda w: jnp.stack([w + 1, w]), matrices)  # another layer's lie before
        return expert_dispatch.routed_experts(x, ids, weights, stack, jnp.int32(1), {}, None, axis)

    run = jax.jit(parallel.mapped(body, sharding.make_mesh(devices), P(sharding.AXIS), P(sharding.AXIS)))
    want = dense_experts(x, ids, np.asarray(weights), matrices)
    np.testing.assert_allclose(run(x, jnp.asarray(ids), weights, matrices), want, atol=2e-4)


def test_shared_experts_are_one_wide_ungated_mlp():
    two = filled(MoE(dataclasses.replace(CONFIG, n_shared_experts=2), stack=None, dtype=jnp.float32))
    assert two.shared_experts.gate_proj.weight[...].shape == (32, 2 * CONFIG.moe_intermediate_size)
    none = filled(MoE(dataclasses.replace(CONFIG, n_shared_experts=0), stack=None, dtype=jnp.float32))
    assert not hasattr(none, "shared_experts")
