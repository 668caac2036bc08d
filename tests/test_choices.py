"""Choices recorded while sampling and held in replay: whose they are, what they weigh, on one device and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_exact_gradient import layers
from test_replay import scans
from tiny_models import tiny_params

from longstraw_jax import forward, lora, replay, sampling, sharding
from longstraw_jax.config import LoraConfig
from longstraw_jax.model import choices, decoder
from longstraw_jax.model.choices import Choices
from longstraw_jax.prefix.capture import capture

CONFIG = layers(*["FM", "SM", "SM"] * 2)  # two groups with two shared layers: choices stacked in every way, few bodies
LORA = LoraConfig(tuple((name, 2, 4.0) for name in ("kv_a", "routed")))
MODEL = decoder.make_model(CONFIG, lora=LORA, remat=False)  # test_train.py holds choices where layers are recomputed
S, T, G = 70, 32, 3
PROMPT, BOUNDARY = tiny.TOKENS[: S - 1], int(tiny.TOKENS[S - 1])
EOS = tuple(range(24))
WEIGHTS = np.cos(np.arange(T)).astype(np.float32)


@functools.cache
def adapters():
    rng = np.random.default_rng(1)
    shapes = lora.adapter_shapes(CONFIG, LORA)
    return jax.tree.map(lambda x: (0.1 * rng.standard_normal(x.shape)).astype(np.float32), shapes)


@functools.cache
def base():
    return jax.tree.map(np.asarray, tiny_params(CONFIG))


@functools.cache
def other_base():
    """The same weights with other routers and indexers: another kind of policy chooses."""
    rng = np.random.default_rng(5)

    def moved(path, x):
        name = jax.tree_util.keystr(path)
        return x + 0.1 * rng.standard_normal(x.shape, np.float32) if "gate']['w" in name or "indexer" in name else x

    return jax.tree_util.tree_map_with_path(moved, base())


@functools.cache
def sampled(devices):
    """On a mesh: the model, both weights, their states of the prompt, the other's choices of it, and a group of one."""
    mesh = sharding.make_mesh(devices)
    model = decoder.make_model(CONFIG, mesh=mesh, lora=LORA, remat=False)

    def put(tree, specs):
        return jax.tree.map(lambda x, spec: jax.device_put(x, sharding.named(mesh, spec)), tree, specs)

    weights = [put(w, decoder.param_specs(CONFIG)) for w in (base(), other_base())]
    used = put(adapters(), lora.adapter_specs(CONFIG, LORA))
    chosen = ([], [])
    states = [
        capture(
            model, own, used, PROMPT, chunk=64, fingerprint=tiny.FINGERPRINT, record=choices.KINDS, keep=kept.append
        )
        for own, kept in zip(weights, chosen, strict=True)
    ]
    args = (model, weights[0], used, states[0], BOUNDARY, jax.random.key(3))
    drawn = sampling.sample(*args, group=G, max_new_tokens=T, eos_ids=EOS, record=choices.KINDS)
    return model, weights, used, states, chosen[1], jax.tree.map(np.asarray, drawn)


@functools.cache
def group():
    """The group of one device as replay takes it, and its choices."""
    drawn = sampled(1)[-1]
    responses = [row[:n].tolist() for row, n in zip(drawn.tokens, drawn.lengths, strict=True)]
    return replay.member_inputs(BOUNDARY, responses, T), choices.of_members(drawn.choices, drawn.lengths, T)


def member(g=0):
    (inputs, targets, lengths), held = group()
    return (inputs[g], targets[g], lengths[g]), jax.tree.map(lambda x: x[g], held)


@functools.partial(jax.jit, static_argnames="model")
def replayed(model, base, adapters, state, row, held):
    """Log-probabilities of a response, and the gradient of their weighted sum."""

    def loss(adapters):
        logp, _ = replay.member_logprobs(model, base, adapters, state, *row, per_device=True, held=held)
        inside = jnp.arange(T) < row[2]
        return jnp.where(inside, WEIGHTS * logp, 0.0).sum(), jnp.where(inside, logp, 0.0)

    return jax.grad(loss, has_aux=True)(adapters)


def replay_on(devices, held, *, other=False):
    model, weights, used, states, *_ = sampled(devices)
    copies = lora.per_device(used, model.mesh)
    grads, logp = replayed(model, weights[other], copies, states[other], member()[0], held)
    return np.asarray(logp), jax.device_get(lora.finalise(grads, model.mesh))


@jax.jit
def freely(base, ids):
    hidden, _, chosen = forward.forward_and_choices(MODEL, base, adapters(), ids[None], record=choices.KINDS)
    return hidden, chosen


@functools.cache
def in_full(other=False, g=0):
    """Final hidden states of one pass over prompt and response, and what it chooses, [layers, 1, S + T, ..]."""
    ids = np.concatenate([PROMPT, [BOUNDARY], member(g)[0][1]]).astype(np.int32)
    hidden, chosen = jax.device_get(freely((base(), other_base())[other], ids))
    return hidden, choices.widened(chosen, CONFIG.index_topk)


@jax.jit
def full_gradient(base, ids, held):
    detach = (np.arange(S + T) < S - 1)[None]

    def loss(used):
        logp, _ = forward.logprobs(MODEL, base, used, ids, detach=detach, held=held)
        return jnp.where(jnp.arange(T) < member()[0][2], WEIGHTS * logp[-T:], 0.0).sum()

    return jax.grad(loss)(adapters())


def sets(config, chosen, kind):
    return [np.sort(np.asarray(ids)[0], -1) for ids in choices.by_layer(config, chosen, kind).values()]


@pytest.mark.parametrize("devices", tiny.MESHES)
def test_recorded_choices_are_those_of_the_responses_inputs(devices):
    """On every mesh those of one pass over the whole sequence: the boundary token's first, none past the end."""
    drawn = sampled(devices)[-1]
    np.testing.assert_array_equal(drawn.tokens, sampled(1)[-1].tokens)
    assert len(set(drawn.lengths.tolist())) > 1 and drawn.lengths.min() < T  # some ended before the others
    held = choices.of_members(drawn.choices, drawn.lengths, T)
    for g, length in enumerate(drawn.lengths):
        mine = jax.tree.map(lambda x, g=g: x[g], held)
        for kind, count in (("selections", 2), ("routes", 6)):
            found, wanted = (sets(CONFIG, x, kind) for x in (mine, in_full(g=g)[1]))
            assert len(found) == len(wanted) == count
            for layer, (a, b) in enumerate(zip(found, wanted, strict=True)):
                np.testing.assert_array_equal(a[:length], b[S - 1 : S - 1 + length], err_msg=f"{kind} {layer}")
                assert (a[length:] == -1).all()


@pytest.mark.parametrize("devices", [1, 32])
def test_the_same_weights_held_to_their_own_choices_are_the_sampler(devices):
    logp, _ = replay_on(devices, member()[1])
    np.testing.assert_allclose(logp, sampled(1)[-1].logprobs[0], atol=1e-5)


@pytest.mark.parametrize("devices", [1, 32])
def test_e4_another_router_and_indexer_hold_the_recorded_choices(devices):
    """The gradient is that of one pass held to the same choices; those that the other policy makes give another."""
    mine, theirs = member()[1], choices.rows(in_full(other=True)[1], S - 1, S - 1 + T)
    _, grads = replay_on(devices, mine, other=True)
    ids = np.concatenate([PROMPT, [BOUNDARY], member()[0][1]]).astype(np.int32)
    captured = choices.joined(sampled(1)[4], [64, S - 65], CONFIG.index_topk)
    nothing = choices.rows(jax.tree.map(lambda ids: np.full_like(ids, -1), mine), 0, 1)
    held = choices.joined([captured, mine, nothing], [S - 1, T, 1], CONFIG.index_topk)
    wanted = jax.device_get(full_gradient(other_base(), ids, held))
    assert tiny.difference(grads, wanted) < 1e-5
    if devices == 1:
        assert tiny.difference(replay_on(1, theirs, other=True)[1], wanted) > 1e-2


@jax.jit
def held_to(base, ids, held):
    return forward.forward(MODEL, base, adapters(), ids[None], held=held)[0]


@pytest.mark.parametrize("kind", choices.KINDS)
def test_one_kind_is_held_alone(kind):
    """What is not held is chosen: held to this policy's own nothing moves, held to another's it does."""
    ids = np.concatenate([PROMPT, [BOUNDARY], member()[0][1]]).astype(np.int32)
    own, other = (
        held_to(base(), ids, Choices(**{kind: getattr(in_full(policy)[1], kind)})) for policy in (False, True)
    )
    np.testing.assert_allclose(own, in_full()[0], atol=1e-5)
    assert np.abs(own - other).max() > 1e-2


def test_with_nothing_asked_no_choice_leaves_a_layer():
    """Programs hand on what they did before choices could be recorded: none of a layer's choices."""
    model, (base, _), used, (state, _), *_ = sampled(1)
    copies, row = lora.per_device(used, None), member()[0]

    def loss(copies, base, state, held):
        return replay.member_logprobs(model, base, copies, state, *row, per_device=True, held=held)[0].sum()

    def scored(copies, base, state):
        return replay.score_and_choices.__wrapped__(
            model, base, copies, state, *(x[None] for x in row), record=choices.KINDS
        )

    k, few = CONFIG.index_topk, CONFIG.num_experts_per_tok
    stacked = {(2, 1, T, k), (2, 1, 1, T, few), (2, 2, 1, T, few)}
    shapes = lambda f, *args: {  # noqa: E731
        v.aval.shape
        for scan in scans(jax.make_jaxpr(f)(*args).jaxpr)
        for v in (*scan.outvars, *scan.invars)
        if v.aval.dtype == jnp.int32
    }
    free = shapes(lambda *args: loss(*args, choices.NONE), copies, base, state)
    assert not free & stacked
    assert shapes(scored, used, base, state) & stacked
    assert shapes(lambda *args: loss(*args, member()[1]), copies, base, state) & stacked


def test_members_without_a_row_a_token_are_named():
    drawn, of = sampled(1)[-1], sampled(1)[-1].lengths
    with pytest.raises(ValueError, match=f"member 1 .* of {of[1]} tokens; accepted: {of[1] + 1}, one"):
        choices.of_members(drawn.choices, of + np.asarray([0, 1, 0]), T)
    hole = jax.tree.map(lambda ids: ids.copy(), drawn.choices)
    hole.routes[0][1][3, 2, 0, 1] = -1
    with pytest.raises(ValueError, match=f"member 2 .* of {of[2] - 1} tokens; accepted: {of[2]}, one"):
        choices.of_members(hole, drawn.lengths, T)
    shorter = choices.of_members(drawn.choices, drawn.lengths, T + 8)
    assert all(ids.shape[:1] + ids.shape[2:4] == (G, 1, T + 8) for ids in jax.tree.leaves(shorter))


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match=r"record=\('keys',\); accepted: 'selections' and 'routes'"):
        choices.check_record(("keys",))
