"""Sampling from the resident prompt: seeds, meshes, ends, budgets, what is drawn and its log-probs."""

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from beartype import beartype
from jaxtyping import jaxtyped

from longstraw_jax import sampling
from longstraw_jax.config import ConfigError
from longstraw_jax.model import choices

BUDGET = 12
EOS = tuple(range(24))  # of 288: a response ends now early, now late, now not at all
GROUPS = {1: 4, 8: 3, 32: 3}  # a mesh of 8 or 32 pads its group to a row a device


def sample(devices, seed, *, state=None, boundary=tiny.BOUNDARY, **options):
    options = {"group": GROUPS[devices], "max_new_tokens": BUDGET, "eos_ids": EOS} | options
    state = tiny.prefix(devices) if state is None else state
    weights = tiny.model(devices), tiny.base(devices), tiny.adapters(devices)
    drawn = sampling.sample(*weights, state, boundary, jax.random.key(seed), **options)
    return jax.tree.map(np.asarray, drawn)


# A group, rows that decode at once (9 are 2 a device of 3 members), what is recorded.
SLOTS = {1: (4, 2, ()), 8: (20, 9, choices.KINDS)}


def responses(drawn):
    return [row[:n].tolist() for row, n in zip(drawn.tokens, drawn.lengths, strict=True)]


@functools.cache
def many():
    """A hundred responses on one device."""
    draws = [sample(1, seed) for seed in range(25)]
    return sampling.Samples(*(np.concatenate(field) for field in list(zip(*draws, strict=True))[:4]))


def test_a_seed_gives_the_same_group_again_and_another_seed_another():
    first, again, other = sample(1, 3), sample(1, 3), sample(1, 4)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert (first.tokens != other.tokens).any()
    assert len({tuple(row) for row in responses(many())}) > 90  # members differ from each other


@pytest.mark.parametrize("devices", [8, 32])
def test_members_are_the_same_on_every_mesh_and_in_every_group(devices):
    """Three members on a padded mesh are the first three of a group of four on one device."""
    for seed in range(3):
        found, want = sample(devices, seed), sample(1, seed)
        for name in ("tokens", "lengths", "truncated"):
            np.testing.assert_array_equal(getattr(found, name), getattr(want, name)[:3], err_msg=name)
        np.testing.assert_allclose(found.logprobs, want.logprobs[:3], atol=1e-5)


def finish(lengths, rows):
    """Steps that responses of these lengths take on so many rows, a row that is free taking the next one."""
    free = [0] * rows
    for length in lengths:
        heapq.heapreplace(free, free[0] + int(length))
    return max(free)


@pytest.mark.parametrize("devices", SLOTS)
def test_members_are_the_same_whatever_decodes_at_once_and_a_free_row_takes_the_next_member(devices):
    group, slots, record = SLOTS[devices]
    whole = sample(devices, 2, group=group, record=record)
    found = sample(devices, 2, group=group, record=record, slots=slots)
    for name in ("tokens", "lengths", "truncated", "choices"):
        jax.tree.map(np.testing.assert_array_equal, getattr(found, name), getattr(whole, name))
    np.testing.assert_allclose(found.logprobs, whole.logprobs, atol=1e-5)
    members, rows = -(-group // devices), -(-slots // devices)
    shares = [whole.lengths[first : first + members] for first in range(0, group, members)]
    assert whole.steps == whole.lengths.max()
    assert found.steps == max(finish(share, rows) for share in shares)
    batches = [[share[at : at + rows] for share in shares] for at in range(0, members, rows)]
    assert found.steps < sum(max(max(part, default=0) for part in batch) for batch in batches)


def test_b1_any_eos_ends_a_response_and_belongs_to_it():
    drawn = many()
    ends = set()
    for tokens, logprobs, length, truncated in zip(*drawn[:4], strict=True):
        assert not np.isin(tokens[: length - 1], EOS).any()
        assert truncated == (tokens[length - 1] not in EOS) and (length == BUDGET or not truncated)
        assert (
            (tokens[length:] == 0).all() and (logprobs[length:] == 0).all() and (logprobs[:length] < 0).all()
        )
        ends |= set() if truncated else {int(tokens[length - 1])}
    assert len(ends) > 5 and 0 < drawn.truncated.sum() < len(drawn.truncated)


def test_a_stop_sequence_ends_a_response_as_an_eos_does():
    """Of ids that a member says: each response is what it is without them, up to where they first end it."""
    free = sample(1, 2)
    middle, pair = free.tokens[1, 4], free.tokens[2, 2:4]
    stop_ids = ((int(middle),), tuple(pair.tolist()), (287,) * BUDGET)
    found = sample(1, 2, stop_ids=stop_ids, slots=2)
    for member, ids in enumerate(responses(free)):
        ends = [n for n in range(1, len(ids) + 1) if any(tuple(ids[:n][-len(s) :]) == s for s in stop_ids)]
        kept = min(ends, default=len(ids))
        assert found.lengths[member] == kept and found.truncated[member] == (free.truncated[member] and not ends)
        np.testing.assert_array_equal(found.tokens[member, :kept], ids[:kept])
        assert (found.tokens[member, kept:] == 0).all()
    assert found.lengths[1] == 5 < free.lengths[1] and found.lengths[2] == 4 < free.lengths[2]


def test_b8_a_full_budget_has_its_last_log_prob_with_and_without_eos():
    drawn = many()
    full = drawn.lengths == BUDGET
    assert set(drawn.truncated[full]) == {True, False}  # no eos at all, and an eos in the last slot
    assert (drawn.logprobs[full, -1] < 0).all()


@pytest.mark.parametrize("devices", tiny.MESHES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_c1_c3_log_probs_are_those_of_replay(devices, temperature):
    """The same policy scored by the other path: the ratio on the first step is 1."""
    drawn = sample(devices, 5, temperature=temperature)
    scored, _ = tiny.score(devices, tiny.prefix(devices), responses(drawn), temperature=temperature)
    np.testing.assert_allclose(scored[:, :BUDGET], drawn.logprobs, atol=1e-5)
    assert (scored[:, BUDGET:] == 0).all()


def test_temperature_zero_is_greedy_with_log_probs_at_temperature_one():
    drawn = sample(1, 0, temperature=0.0)
    assert (drawn.tokens == drawn.tokens[0]).all()
    jax.tree.map(np.testing.assert_array_equal, drawn, sample(1, 1, temperature=0.0))
    scored, _ = tiny.score(1, tiny.prefix(1), responses(drawn))
    np.testing.assert_allclose(scored[:, :BUDGET], drawn.logprobs, atol=1e-5)
    almost = sample(1, 0, temperature=1e-4)
    np.testing.assert_array_equal(almost.tokens, drawn.tokens)


def test_top_p_reaches_every_step():
    """So small that one token is kept: greedy, with log-probs of the whole distribution."""
    drawn = sample(1, 0, top_p=1e-6)
    greedy = sample(1, 0, temperature=0.0)
    np.testing.assert_array_equal(drawn.tokens, greedy.tokens)
    np.testing.assert_allclose(drawn.logprobs, greedy.logprobs, atol=1e-6)


def test_b8_h2_prompt_and_budget_fill_the_position_range_and_no_more():
    resident = tiny.CONFIG.max_position_embeddings - BUDGET - 1
    boundary = int(tiny.TOKENS[resident])
    state = tiny.captured(1, tiny.TOKENS[:resident])
    drawn = sample(1, 1, state=state, boundary=boundary)
    assert (drawn.lengths == BUDGET).any()
    scored, _ = tiny.score(1, state, responses(drawn), boundary=boundary)
    np.testing.assert_allclose(scored[:, :BUDGET], drawn.logprobs, atol=1e-5)
    longer = tiny.captured(1, tiny.TOKENS[: resident + 1])
    with pytest.raises(ConfigError, match="193 tokens exceeds max_position_embeddings=192"):
        sample(1, 1, state=longer)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"group": 0}, "group=0; accepted: at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0; accepted: at least 1"),
        ({"stop_ids": ((),)}, r"stop_ids=\(\(\),\); accepted: sequences of 1 to max_new_tokens=12"),
        ({"slots": -1}, "slots=-1; accepted: 0"),
        ({"temperature": -0.1}, "temperature=-0.1; accepted: 0"),
        ({"temperature": float("nan")}, "temperature=nan; accepted: 0"),
        ({"top_p": 0.0}, "top_p=0.0; accepted: above 0, at most 1"),
        ({"top_p": 1.1}, "top_p=1.1; accepted: above 0, at most 1"),
        ({"boundary": 288}, "boundary=288; accepted: a token id from 0 to 287"),
        ({"max_new_tokens": 43}, "193 tokens exceeds max_position_embeddings=192"),
    ],
)
def test_bad_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        sample(1, 0, **options)


def test_a_members_tokens_never_reach_the_others():
    """Forced tokens: every logit of the other members stays bit-equal, step after step."""
    model, state = tiny.model(1), tiny.prefix(1)

    @jax.jit
    def step(tails, ids, at):
        live = jnp.ones((4,), bool)
        weights = model, tiny.base(1), tiny.adapters(1)
        return sampling.decode_step(*weights, state, tails, ids, at, live, None)

    def run(forced):
        tails, logits = sampling.empty_tails(model, 4, BUDGET), []
        for at in range(4):
            out, tails, _ = step(tails, forced[:, at], jnp.int32(at))
            logits.append(np.asarray(out))
        return np.stack(logits, 1)

    forced = np.random.default_rng(0).integers(0, tiny.CONFIG.vocab_size, (4, 4)).astype(np.int32)
    changed = forced.copy()
    changed[2] = forced[2, ::-1]
    before, after = run(forced), run(changed)
    np.testing.assert_array_equal(after[[0, 1, 3]], before[[0, 1, 3]])
    assert (after[2] != before[2]).any(-1).all()


def numpy_kept(logits, temperature, top_p):
    """The smallest set of most likely tokens whose probability reaches top_p."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    return set(order[before < top_p].tolist())


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.01])
def test_draws_keep_the_right_set_and_the_whole_distributions_log_probs(temperature, top_p):
    rng = np.random.default_rng(0)
    tied = np.repeat([2.0, 0.0], [3, 17])  # of equals, the lower ids are kept
    logits = np.stack([2 * rng.standard_normal(20), np.linspace(0, 3, 20), tied]).astype(np.float32)
    draws = 3000
    keys = jax.random.split(jax.random.key(1), draws)
    for row in logits:
        tiled = jnp.broadcast_to(row, (draws, 20))
        tokens, logprobs = jax.jit(sampling.draw, static_argnums=3)(
            keys, tiled, jnp.float32(temperature), top_p
        )
        kept = numpy_kept(row, temperature, top_p)
        assert set(np.asarray(tokens).tolist()) <= kept
        want = np.asarray(jax.nn.log_softmax(row / temperature))
        np.testing.assert_allclose(logprobs, want[tokens], atol=1e-5)
        p = np.asarray([np.exp(want[i]) if i in kept else 0.0 for i in range(20)])
        p /= p.sum()
        frequencies = np.bincount(tokens, minlength=20) / draws
        assert (np.abs(frequencies - p) < 5 * np.sqrt(p * (1 - p) / draws) + 1e-9).all()


def test_annotations_hold_at_run_time():
    """Shapes and dtypes of the signatures, checked while tracing."""
    checked = jaxtyped(typechecker=beartype)(sampling.decode_step)
    weights = tiny.model(1), tiny.base(1), tiny.adapters(1), tiny.prefix(1)
    tails = sampling.empty_tails(tiny.model(1), 4, BUDGET)

    def call(tails, ids, live):
        return checked(*weights, tails, ids, jnp.int32(0), live, None)

    logits, extended, _ = jax.eval_shape(call, tails, jnp.zeros((4,), jnp.int32), jnp.ones((4,), bool))
    assert logits.shape == (4, tiny.CONFIG.vocab_size)
    assert jax.tree.map(jnp.shape, extended) == jax.tree.map(jnp.shape, tails)
    draw = jaxtyped(typechecker=beartype)(sampling.draw)
    keys = jax.random.split(jax.random.key(0), 2)
    jax.eval_shape(lambda k, x: draw(k, x, jnp.float32(1), 0.9), keys, jnp.zeros((2, 5)))
