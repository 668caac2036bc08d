"""Replay against the resident prompt: where a token is read, what padding does, and whose gradient it is."""

import jax
import numpy as np
import pytest
import tiny
from beartype import beartype
from jaxtyping import jaxtyped

from longstraw_jax import lora, replay

S, T = tiny.S, tiny.T
WEIGHTS = np.cos(np.arange(T)).astype(np.float32)  # advantages of both signs
LENGTH = 29  # of the response that is differentiated: padding follows it
PROMPT = np.arange(S + T) < S - 1  # what the prefix state holds
IN_FULL = np.concatenate([np.zeros(S - 1), WEIGHTS * (np.arange(T) < LENGTH)]).astype(np.float32)


def group():
    """Four responses of several lengths to the one prompt."""
    rng = np.random.default_rng(7)
    return [rng.integers(0, tiny.CONFIG.vocab_size, n).tolist() for n in (T, 1, 17, 30)]


def row(responses, index=0):
    return [x[index] for x in tiny.members(responses)]


def member():
    return row([tiny.RESPONSE[:LENGTH]])


def test_pad_length_gives_every_device_the_same_share():
    assert [replay.pad_length(n, 32) for n in (0, 1, 32, 33)] == [32, 32, 32, 64]
    assert replay.pad_length(7, 1) == 7


def test_member_inputs_start_at_the_boundary_token():
    inputs, targets, lengths = replay.member_inputs(9, [[4, 5, 6], [], [7]], 4)
    np.testing.assert_array_equal(inputs, [[9, 4, 5, 0], [9, 0, 0, 0], [9, 0, 0, 0]])
    np.testing.assert_array_equal(targets, [[4, 5, 6, 0], [0, 0, 0, 0], [7, 0, 0, 0]])
    np.testing.assert_array_equal(lengths, [3, 0, 1])
    with pytest.raises(ValueError, match="response 1 has 5 tokens; accepted: at most 4"):
        replay.member_inputs(9, [[1], [1] * 5], 4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_b3_c1_log_probs_and_entropies_equal_one_full_pass(temperature):
    """From response token 0, read at the prompt's last position, to the last; temperature divides logits."""
    logprobs, entropies = tiny.score(1, tiny.prefix(1), [tiny.RESPONSE], temperature=temperature)
    want = tiny.full_logprobs(temperature)[S - 1 :]
    np.testing.assert_allclose(logprobs[0], want, atol=1e-5)
    whole = np.asarray(jax.nn.log_softmax(tiny.full()[0][S - 1 : -1] / temperature))
    np.testing.assert_allclose(entropies[0], -(np.exp(whole) * whole).sum(-1), atol=1e-5)


def test_b3_a_token_moves_its_own_entry_and_later_ones():
    """Entry 0 moves by its target alone: its input is the boundary token."""
    before, entropy_before = tiny.score(1, tiny.prefix(1), [tiny.RESPONSE])
    for at in (0, 5, T - 1):
        changed = list(tiny.RESPONSE)
        changed[at] = (changed[at] + 1) % tiny.CONFIG.vocab_size
        after, entropy_after = tiny.score(1, tiny.prefix(1), [changed])
        np.testing.assert_array_equal(after[0, :at], before[0, :at])
        np.testing.assert_array_equal(entropy_after[0, : at + 1], entropy_before[0, : at + 1])
        assert after[0, at] != before[0, at]
        assert at == T - 1 or (after[0, at + 1 :] != before[0, at + 1 :]).any()


@pytest.mark.parametrize("devices", [1, 32])
def test_members_cannot_see_each_other(devices):
    """Log-probs are bit-equal whatever the other members hold, and wherever in the group a member stands."""
    state, responses = tiny.prefix(devices), group()
    before, _ = tiny.score(devices, state, responses)
    changed = [responses[0], tiny.RESPONSE, responses[2][::-1], responses[3]]
    after, _ = tiny.score(devices, state, changed)
    np.testing.assert_array_equal(after[[0, 3]], before[[0, 3]])
    assert (after[2, :17] != before[2, :17]).any()
    np.testing.assert_array_equal(tiny.score(devices, state, responses[::-1])[0][::-1], before)


@pytest.mark.parametrize("devices", [8, 32])
def test_log_probs_on_a_mesh_equal_one_device(devices):
    for found, want in zip(
        tiny.score(devices, tiny.prefix(devices), group()),
        tiny.score(1, tiny.prefix(1), group()),
        strict=True,
    ):
        np.testing.assert_allclose(found, want, atol=1e-5)


@pytest.mark.parametrize("devices", tiny.MESHES)
def test_detached_is_the_full_gradient_at_a_fixed_prompt_state(devices):
    """Plain autodiff over the whole sequence with stop_gradient on the prompt's latents."""
    value, grads = tiny.replay_grad(devices, tiny.adapters(devices), tiny.prefix(devices), member(), WEIGHTS)
    want, want_grads, _ = tiny.full_grad(tiny.TOKENS, IN_FULL, detach=PROMPT)
    np.testing.assert_allclose(value, want, atol=1e-4)
    assert tiny.difference(grads, want_grads) < 1e-5


@pytest.mark.parametrize("devices", tiny.MESHES)
def test_frozen_is_the_full_gradient_of_the_frozen_prefix_policy(devices):
    """Adapters act from the boundary token on; nothing is detached in the plain autodiff."""
    state = tiny.prefix(devices, frozen=True)
    value, grads = tiny.replay_grad(devices, tiny.adapters(devices), state, member(), WEIGHTS)
    want, want_grads, _ = tiny.full_grad(tiny.TOKENS, IN_FULL, gate=~PROMPT)
    np.testing.assert_allclose(value, want, atol=1e-4)
    assert tiny.difference(grads, want_grads) < 1e-5


def test_the_modes_are_different_policies_and_gradients():
    _, detached, _ = tiny.full_grad(tiny.TOKENS, IN_FULL, detach=PROMPT)
    _, exact, _ = tiny.full_grad(tiny.TOKENS, IN_FULL)
    _, frozen, _ = tiny.full_grad(tiny.TOKENS, IN_FULL, gate=~PROMPT)
    assert tiny.difference(detached, exact) > 1e-2 and tiny.difference(frozen, exact) > 1e-2


@pytest.mark.parametrize("devices", tiny.MESHES)
def test_every_adapter_gets_a_gradient(devices):
    """Every tensor of every target; of routed experts, those that the response visits."""
    _, grads = tiny.replay_grad(devices, tiny.adapters(devices), tiny.prefix(devices), member(), WEIGHTS)
    for path, grad in jax.tree_util.tree_flatten_with_path(grads)[0]:
        name, layers = jax.tree_util.keystr(path), grad.reshape(grad.shape[0], -1)
        assert np.isfinite(grad).all(), name
        assert (np.abs(layers).max(-1) > 0).all() or "lm_head" in name and grad.any(), name


@pytest.mark.parametrize("devices", [1, 32])
def test_padding_has_no_influence_on_value_or_gradient(devices):
    """Bit-equal under other padding tokens, targets and weights."""
    inputs, targets, length = member()
    clean = tiny.replay_grad(devices, tiny.adapters(devices), tiny.prefix(devices), member(), WEIGHTS)
    inputs, targets, weights = inputs.copy(), targets.copy(), WEIGHTS.copy()
    inputs[LENGTH:], targets[LENGTH:], weights[LENGTH:] = 287, 200, 1e9
    poisoned = tiny.replay_grad(
        devices, tiny.adapters(devices), tiny.prefix(devices), (inputs, targets, length), weights
    )
    assert clean[0] == poisoned[0]
    jax.tree.map(np.testing.assert_array_equal, clean[1], poisoned[1])


def test_j2_a_shared_capture_equals_four_full_passes():
    """Each member's log-probs and the summed gradient; what detaching leaves out is far above round-off."""
    advantages = np.asarray([1.0, -0.5, 0.25, -2.0], np.float32)
    logprobs, _ = tiny.score(1, tiny.prefix(1), group())
    shared = detached = exact = None
    add = lambda total, grads: grads if total is None else jax.tree.map(np.add, total, grads)  # noqa: E731
    for g, (response, advantage) in enumerate(zip(group(), advantages, strict=True)):
        n = len(response)
        mine = row(group(), g)
        shared = add(shared, tiny.replay_grad(1, tiny.adapters(1), tiny.prefix(1), mine, np.full(T, advantage))[1])
        ids = np.concatenate([tiny.TOKENS[:S], response, np.zeros(T - n)]).astype(np.int32)
        weights = np.where((np.arange(S + T - 1) >= S - 1) & (np.arange(S + T - 1) < S - 1 + n), advantage, 0.0)
        weights = weights.astype(np.float32)
        _, grads, whole = tiny.full_grad(ids, weights, detach=PROMPT)
        np.testing.assert_allclose(logprobs[g, :n], whole[S - 1 : S - 1 + n], atol=1e-5)
        detached = add(detached, grads)
        exact = add(exact, tiny.full_grad(ids, weights)[1])
    assert tiny.difference(shared, detached) < 1e-5
    assert tiny.difference(shared, exact) > 1e-2


def test_gradient_equals_finite_differences():
    """Of the loss against a fixed prefix state, at the largest entry of a tensor of every kind of target."""
    used, state = tiny.adapters(1), tiny.prefix(1)
    _, grads = tiny.replay_grad(1, used, state, member(), WEIGHTS)
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_flatten_with_path(grads)[0]}
    for name in ("q_b_proj']['a", "kv_b_proj']['b", "o_proj']['a", "experts.up_proj']['b", "lm_head']['a"):
        full_name = next(key for key in leaves if name in key)
        at = np.unravel_index(np.abs(leaves[full_name]).argmax(), leaves[full_name].shape)

        def moved(step, full_name=full_name, at=at):
            return jax.tree_util.tree_map_with_path(
                lambda path, x: x.at[at].add(step) if jax.tree_util.keystr(path) == full_name else x, used
            )

        step = 3e-4  # so short that no selection and no route changes
        ends = [tiny.replay_grad(1, moved(s), state, member(), WEIGHTS)[0] for s in (step, -step)]
        slope = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(slope, leaves[full_name][at], rtol=2e-2, err_msg=full_name)


@pytest.mark.parametrize("devices", [1, 32])
def test_annotations_hold_at_run_time(devices):
    """Shapes and dtypes of the signatures, checked while tracing."""
    checked = jaxtyped(typechecker=beartype)(replay.score.__wrapped__)
    state = tiny.prefix(devices)
    shapes = jax.eval_shape(
        lambda *args: checked(tiny.model(devices), *args),
        *(tiny.base(devices), tiny.adapters(devices), state, *tiny.members([[1, 2]])),
    )
    assert [x.shape for x in shapes] == [(4, T), (4, T)]


def test_the_backward_pass_keeps_no_copies_of_weights_or_pages():
    # A scan that hands its weights or pages on as residuals would hold them twice, whatever the group.
    # (The residual stream, which it carries, has the shape of one small weight.)
    model, state = tiny.model(1), tiny.prefix(1)
    adapters = lora.per_device(tiny.adapters(1), None)

    def loss(adapters, base, state):
        return replay.member_logprobs(model, base, adapters, state, *member(), per_device=True)[0].sum()

    closed = jax.make_jaxpr(jax.grad(loss))(adapters, tiny.base(1), state)
    resident = {x.shape for x in jax.tree.leaves((tiny.base(1)["segments"], state.latents, state.index_keys))}
    resident = {shape for shape in resident if np.prod(shape) > 1000} - {(1, T, tiny.CONFIG.hidden_size)}
    handed_on = {v.aval.shape for scan in scans(closed.jaxpr) for v in scan.outvars}
    assert len(resident) > 20 and handed_on and not resident & handed_on


def scans(jaxpr):
    """Every scan of a program, those inside others too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from scans(inner)
