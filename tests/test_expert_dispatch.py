"""Experts over the mesh and their gradients against the dense form; passes of bounded memory at any imbalance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jax.sharding import PartitionSpec as P
from jaxtyping import jaxtyped

from longstraw_jax import expert_dispatch, parallel, sharding


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Experts: 64 tokens, two experts each, of 32 with a low-rank pair on every matrix.
TOKENS, EXPERTS, D, F, R = 64, 32, 6, 5, 2
EXPERT_SHAPES = {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}


def routings():
    rng = np.random.default_rng(0)
    spread = np.stack([rng.permutation(EXPERTS)[:2] for _ in range(TOKENS)])
    padded = spread.copy()
    padded[1::2] = EXPERTS
    return {
        "spread": spread,
        "one expert": np.full((TOKENS, 2), (5, EXPERTS)),
        "last device": np.full((TOKENS, 2), (EXPERTS - 1, EXPERTS - 2)),
        "few devices": np.where(spread % 3 == 0, 3, 17) + np.asarray([0, 1]),
        "padding": padded,
        "nothing": np.full((TOKENS, 2), EXPERTS),
    }


def expert_arguments():
    experts = {name: normal(1, EXPERTS, *shape) for name, shape in EXPERT_SHAPES.items()}
    pairs = {
        name: (normal(2, EXPERTS, i, R), normal(3, EXPERTS, R, o)) for name, (i, o) in EXPERT_SHAPES.items()
    }
    return normal(0, TOKENS, D), np.abs(normal(4, TOKENS, 2)), experts, pairs


@functools.cache
def _experts(devices, load=2.0):
    def body(axis, x, ids, weights, experts, pairs, gate):
        scaled = {name: (*ab, 0.5) for name, ab in pairs.items()}
        stack = {name: w[None] for name, w in experts.items()}
        return expert_dispatch.routed_experts(x, ids, weights, stack, jnp.int32(0), scaled, gate, axis, load=load)

    run = jax.jit(parallel.mapped(body, sharding.make_mesh(devices), P(sharding.AXIS), P(sharding.AXIS)))

    def loss(x, weights, experts, pairs, ids, gate):
        y = run(x, ids, weights, experts, pairs, gate)
        return _weighed(y), y

    return jax.jit(jax.value_and_grad(loss, (0, 1, 3), has_aux=True))  # the experts' own weights are constants


def _weighed(y):
    return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum()


@jax.jit
def _dense_gradients(x, weights, experts, pairs, ids, gate):
    def loss(x, weights, pairs):
        y = _dense_experts(x, weights, experts, pairs, ids, gate)
        return _weighed(y), y

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, weights, pairs)


def _dense_experts(x, weights, experts, pairs, ids, gate):
    """Every token through every expert, then the chosen ones weighed."""

    def apply(name, v):
        a, b = pairs[name]
        low = 0.5 * jnp.einsum("eti,eir,ero->eto", v, a, b)
        return jnp.einsum("eti,eio->eto", v, experts[name]) + jnp.where(gate[None, :, None], low, 0.0)

    every = jnp.broadcast_to(x, (EXPERTS, *x.shape))
    y = apply("down_proj", jax.nn.silu(apply("gate_proj", every)) * apply("up_proj", every))
    chosen = jax.nn.one_hot(ids, EXPERTS)  # an id past the last expert gives a row of zeros
    return jnp.einsum("etd,tke,tk->td", y, chosen, weights)


@pytest.mark.parametrize("devices", [1, 32])
@pytest.mark.parametrize("routing", list(routings()))
def test_e5_experts_and_their_gradients_equal_the_dense_form(routing, devices):
    ids = routings()[routing].astype(np.int32)
    x, weights, experts, pairs = expert_arguments()
    gate = np.arange(TOKENS) % 5 > 0
    (_, found), grads = _experts(devices)(x, weights, experts, pairs, ids, gate)
    (_, want), wanted_grads = _dense_gradients(x, weights, experts, pairs, ids, gate)
    np.testing.assert_allclose(found, want, atol=1e-5 * max(1.0, np.abs(want).max()))
    for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5 * max(1.0, np.abs(wanted).max()))
    nowhere = (ids == EXPERTS).all(-1)
    assert (np.asarray(found)[nowhere] == 0).all() and (np.asarray(grads[0])[nowhere] == 0).all()


# Passes: so many tokens a device that a pass is bounded, of 32 experts of which a device holds one or four.
MANY = 2304


@pytest.mark.parametrize("load", [1.0, 1.7, 2.0, 31.0, 32.0])
def test_the_passes_hold_the_worst_case_whether_or_not_it_divides(load):
    worst = 301  # every token of a device on one expert of another
    room, passes = expert_dispatch.expert_room(worst, 2, 1, 32, load)
    assert (passes - 1) * room < worst <= passes * room


@pytest.mark.parametrize(
    "devices, routing, load", [(32, "spread", 1.0), (32, "one expert", 2.0), (8, "last device", 1.0)]
)
def test_e5_any_imbalance_takes_passes_and_drops_nothing(devices, routing, load):
    """Values and all gradients, where devices send each other more than a pass holds."""
    per_device = MANY // devices * 4
    room, passes = expert_dispatch.expert_room(per_device, 2, EXPERTS // devices, devices, load)
    assert passes > 1 and passes * room >= per_device * min(2, EXPERTS // devices)
    assert room * devices == load * per_device * 2
    ids = np.resize(routings()[routing], (4 * MANY, 2)).astype(np.int32)
    rng = np.random.default_rng(5)
    x, weights = normal(0, 4 * MANY, D), np.abs(normal(4, 4 * MANY, 2))
    _, _, experts, pairs = expert_arguments()
    gate = rng.random(4 * MANY) < 0.8
    (_, found), grads = _experts(devices, load)(x, weights, experts, pairs, ids, gate)
    (_, want), wanted_grads = _dense_gradients(x, weights, experts, pairs, ids, gate)
    np.testing.assert_allclose(found, want, atol=1e-5 * max(1.0, np.abs(want).max()))
    for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5 * max(1.0, np.abs(wanted).max()))


def test_e5_a_token_is_bit_equal_whatever_the_others_route():
    """One pass or many, alone on its expert or among all: no other token changes a token's sum."""
    x, _, experts, pairs = expert_arguments()
    x, weights = np.resize(x, (4 * MANY, D)), np.full((4 * MANY, 2), 0.7, np.float32)
    gate = np.ones(4 * MANY, bool)
    results = []
    for name in ("spread", "one expert", "last device"):
        ids = np.resize(routings()[name], (4 * MANY, 2)).astype(np.int32)
        ids[::64] = (5, 31)
        results.append(np.asarray(_experts(32, 2.0)(x, weights, experts, pairs, ids, gate)[0][1])[::64])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_e5_imbalance_costs_passes_and_no_memory():
    """Temporary bytes of the backward pass follow the load that a pass holds, not the worst case."""

    def temporary(load):
        shapes = jax.eval_shape(lambda *a: a, *_many_arguments())
        return _experts(32, load).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    one, two, worst = (temporary(load) for load in (1.0, 2.0, 32.0))
    assert one < two < 0.3 * worst


def _many_arguments():
    _, _, experts, pairs = expert_arguments()
    rows = 4 * MANY
    return (
        np.zeros((rows, D), np.float32), np.zeros((rows, 2), np.float32), experts, pairs,
        np.zeros((rows, 2), np.int32), np.zeros(rows, bool),
    )  # fmt: skip


def test_annotations_hold_at_run_time():
    """Shapes and dtypes of the signature, checked by beartype on a small traced call."""
    checked = jaxtyped(typechecker=beartype)(expert_dispatch.routed_experts)
    x, weights, experts, _ = jax.tree.map(jnp.asarray, expert_arguments())
    stack, ids = {name: w[None] for name, w in experts.items()}, jnp.zeros((TOKENS, 2), jnp.int32)
    jax.eval_shape(lambda: checked(x, ids, weights, stack, jnp.int32(0), {}, None, None))
    with pytest.raises(Exception, match="weights"):
        checked(x, ids, weights[:, :1], stack, jnp.int32(0), {}, None, None)
