"""The transaction: sums over members, what a step leaves untouched, which prompt state it uses."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_jobs
from tiny_transactions import (
    NO_SIGNAL_OUT,
    PLAIN,
    TRUNCATED_OUT,
    G,
    T,
    fresh_state,
    job,
    moments,
    optimizer,
    policy,
    prefix,
    prompt,
    same_bits,
    trained_state,
    transact,
)

from longstraw_jax import fingerprint, lora, replay, rollout, train
from longstraw_jax.model import choices
from longstraw_jax.rl.objectives import GRPOConfig


def group(lengths=(T, 3, 5, 1), advantages=(1.3, -0.2, -1.4, 0.3), seed=0):
    """Responses of several lengths, with a behaviour policy far enough away for clipping to act."""
    rng = np.random.default_rng(seed)
    responses = [rng.integers(0, 256, n).tolist() for n in lengths]
    inputs, targets, lengths = replay.member_inputs(int(prompt()[-1]), responses, T)
    batch = (inputs, targets, lengths, 1.0)
    now, _ = replay.score(job().model, job().base, trained_state().adapters, prefix(), *batch)
    reference, _ = replay.score(job().model, job().base, None, prefix(False), *batch)
    old = np.asarray(now) + 0.3 * rng.standard_normal(now.shape).astype(np.float32)
    mask = np.arange(T) < lengths[:, None]
    values = (inputs, targets, lengths, mask, np.asarray(advantages, np.float32), old, old)
    return rollout.Group(*values, ref_logp=np.asarray(reference))


def rows(whole, order):
    return jax.tree.map(lambda x: x[np.asarray(order)], whole)


def total_of(parts, objective, state=None):
    """Replays groups one after the other into one total."""
    if objective.beta == 0:
        parts = [dataclasses.replace(part, ref_logp=None) for part in parts]
    used = lora.per_device((state or trained_state()).adapters, None)
    total = None
    for part in parts:
        config = policy(objective=objective)
        total, _ = train.add_group(job().model, config, job().base, used, prefix(), part, total)
    return total


def apply(total, state=None):
    return train.apply_update(job().model, optimizer(), state or trained_state(), total)


def distance(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.abs(x - y).max()) for x, y in pairs)


@pytest.mark.parametrize("objective", [PLAIN, NO_SIGNAL_OUT, TRUNCATED_OUT], ids=lambda o: o.aggregation)
def test_d1_the_step_is_the_same_for_any_order_and_any_grouping_of_members(objective):
    whole = group()
    want = total_of([whole], objective)
    assert float(want.loss.count) == {"token_mean": 17, "sequence_mean": 4, "fixed_length": 32}[objective.aggregation]
    stepped, info = apply(want)
    assert info["taken"] and float(want.metrics.sums["clip_ratio/high_mean"].sum) > 0
    for parts in ([[3, 1, 0, 2]], [[0, 1], [2, 3]], [[2], [0], [3], [1]]):
        found = total_of([rows(whole, part) for part in parts], objective)
        assert float(found.loss.count) == float(want.loss.count)
        np.testing.assert_allclose(float(found.loss.sum), float(want.loss.sum), rtol=1e-6, atol=1e-6)
        largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want.grads))
        assert distance(found.grads, want.grads) < 1e-6 * largest
        again, _ = apply(found)
        assert distance(again.opt_state, stepped.opt_state) < 1e-6


def test_d1_the_token_mean_is_over_all_tokens_and_not_a_mean_of_means():
    """Two members of 8 and 1 tokens: the long one has 8 / 9 of the weight."""
    pair = rows(group(), [0, 3])
    alone = [total_of([rows(pair, [i])], PLAIN) for i in range(2)]
    both = total_of([pair], PLAIN)
    sums = [float(one.loss.sum) for one in alone]
    assert float(both.loss.sum / both.loss.count) == pytest.approx(sum(sums) / 9, rel=1e-5)
    assert abs(sum(sums) / 9 - (sums[0] / 8 + sums[1]) / 2) > 1e-3


def test_d2_an_empty_member_adds_nothing_to_sum_or_count():
    whole = group()
    nothing = dataclasses.replace(rows(whole, [1]), mask=np.zeros((1, T), bool))
    want, found = total_of([whole], PLAIN), total_of([nothing, whole, nothing], PLAIN)
    assert same_bits(found.grads, want.grads) and same_bits(found.loss, want.loss)


def test_one_member_is_alive_at_a_time():
    """One program serves every group size, and a larger group leaves no more on the device."""

    def live():
        return sum(x.nbytes for x in jax.live_arrays())

    whole, sizes = group(), []
    total_of([rows(whole, [0])], PLAIN)
    programs = train.member_gradient._cache_size()
    for order in ([0, 1], [0, 1, 2, 3], [0, 1, 2, 3] * 4):
        before = live()
        total = jax.block_until_ready(total_of([rows(whole, order)], PLAIN))
        sizes.append(live() - before)
        del total
    assert len(set(sizes)) == 1 and sizes[0] > 0
    assert train.member_gradient._cache_size() == programs


@pytest.mark.parametrize("nothing", ["masked", "of length 0"])
def test_b7_nothing_to_train_on_skips_the_step_and_its_weight_decay(nothing):
    whole = group() if nothing == "masked" else group(lengths=(0, 0, 0, 0))
    whole = dataclasses.replace(whole, mask=np.zeros((G, T), bool))
    total = total_of([whole], PLAIN)
    assert float(total.loss.sum) == 0 and all(not g.any() for g in jax.tree.leaves(total.grads))
    state, info = apply(total)
    assert job().optimizer.weight_decay > 0 and not info["taken"] and info["finite"]
    assert same_bits(moments(state), moments(trained_state()))
    assert int(state.skipped) == int(trained_state().skipped) + 1 and int(state.step) == int(trained_state().step) + 1


def test_b7_truncation_masking_of_every_response_is_skipped_and_said():
    state, reports, _ = transact(trained_state(), objective=TRUNCATED_OUT, eos_ids=())
    (report,) = reports
    assert report.skip_reason == "nothing to train on" and report.loss_count == 0 and report.loss_sum == 0
    assert all(truncated for truncated in report.rollouts[0].truncated)
    assert all(np.isfinite(value) for value in report.metrics.values())
    assert same_bits(moments(state), moments(trained_state())) and int(state.skipped) == 1


def test_d4_a_non_finite_gradient_skips_the_step_and_the_next_one_is_as_if_nothing_happened():
    good = total_of([group()], PLAIN)
    leaves, structure = jax.tree.flatten(good.grads)
    leaves[3] = leaves[3].at[(0,) * leaves[3].ndim].set(jnp.nan)
    bad = dataclasses.replace(good, grads=jax.tree.unflatten(structure, leaves))
    state, info = apply(bad)
    assert int(info["nonfinite"]) == 1 and not info["finite"] and not info["taken"]
    assert same_bits(moments(state), moments(trained_state())) and int(state.skipped) == 1
    after, info = apply(good, state)
    assert info["taken"] and int(after.skipped) == 1
    assert same_bits(moments(after), moments(apply(good)[0]))


def test_d4_a_loss_that_is_not_finite_is_skipped_too():
    total = total_of([group(advantages=(1, -1, np.nan, 0))], PLAIN)
    state, info = apply(total)
    assert not info["taken"] and same_bits(moments(state), moments(trained_state()))


def test_d4_a_reward_of_nan_is_no_gradient_but_an_unscorable_response():
    def half_scored(number, responses):
        return np.asarray([0.0, np.nan, 1.0, np.nan], np.float32), []

    _, (report,), _ = transact(trained_state(), reward=half_scored)
    assert report.skip_reason is None and report.rollouts[0].advantages[[1, 3]].tolist() == [0, 0]


def test_e7_g1_g3_every_target_moves_and_the_base_does_not():
    """The router's correction bias is the base's too: no balancing update of it in RL."""
    before = fingerprint.tree_fingerprint(job().base)
    leaves = jax.tree_util.tree_flatten_with_path(job().base)[0]
    assert any("e_score_correction_bias" in jax.tree_util.keystr(path) for path, _ in leaves)
    state, start = trained_state(), fresh_state()
    moved = {}
    for site in lora.sites(job().model.config, job().model.lora):
        new, old = state.adapters, start.adapters
        for key in site.path:
            new, old = new[key], old[key]
        b, rank = np.asarray(new["b"]), site.rank
        assert not np.asarray(old["b"]).any()
        if site.routed:  # of experts, those that a response visited
            visited = b.reshape(-1, rank * b.shape[-1]).any(-1)
            assert visited.sum() >= job().model.config.num_experts_per_tok, site.path
        else:
            assert b.any(), site.path
        moved[site.target] = True
    assert set(moved) == set(tiny_jobs.config().lora)
    assert fingerprint.tree_fingerprint(job().base) == before == job().base_sha


def test_c3_the_first_update_is_on_policy():
    """Trainer against itself, and against the sampler, whose decode is another program."""
    _, (report,), _ = transact(trained_state())
    assert report.metrics["max_abs_log_ratio"] < 1e-5
    assert report.metrics["sampling/max_abs_log_ratio"] < 1e-5
    assert report.metrics["ratio/mean"] == pytest.approx(1, abs=1e-5)


def test_c1_c3_also_at_another_temperature():
    _, (report,), _ = transact(trained_state(), temperature=0.6)
    assert report.metrics["sampling/max_abs_log_ratio"] < 1e-5 and report.metrics["max_abs_log_ratio"] < 1e-5


@pytest.mark.parametrize("mode", ["detached", "frozen", "exact"])
def test_j1_a_second_update_has_a_ratio_and_the_prompt_state_of_its_own_weights(mode):
    start = trained_state()
    state, (first, second), held = transact(start, updates=2, mode=mode)
    assert first.metrics["max_abs_log_ratio"] < 1e-5 < 1e-3 < second.metrics["max_abs_log_ratio"]
    assert int(state.step) == int(start.step) + 2
    assert second.adapter_fingerprint == fingerprint.tree_fingerprint(state.adapters) != first.adapter_fingerprint
    assert first.prefix_age == 0 and second.prefix_age == (1 if mode == "frozen" else 0)
    assert held.captured_at == int(start.step) + (0 if mode == "frozen" else 1)
    assert ("reverse" in second.seconds) == (mode == "exact")
    assert "capture" in second.seconds and "sample" not in second.seconds


def other_choices(held):
    """Neighbours of the experts, and the prompt's first keys instead of those selected."""

    def first_keys(ids):
        return np.where(ids < 0, ids, np.arange(ids.shape[-1], dtype=ids.dtype))

    def neighbours(ids):
        return np.where(ids < 0, ids, ids ^ 1)

    return choices.Choices(jax.tree.map(first_keys, held.selections), jax.tree.map(neighbours, held.routes))


def test_e4_choices_of_the_rollout_are_held_in_every_update(monkeypatch):
    """With the policy's own choices the first update is what it is without; then with others in their place.

    What a policy would not choose tells holding from choosing again: old scores that leave the free ones, and a replay
    that follows them at ratio 1, in the next update too.
    """
    start, options = trained_state(), dict(updates=2, mode="exact", router_replay=True, selection_replay=True)
    _, (free, _), _ = transact(start, updates=2, mode="exact")
    _, (first, second), _ = transact(start, **options)
    assert first.metrics["max_abs_log_ratio"] < 1e-5 < 1e-3 < second.metrics["max_abs_log_ratio"]
    assert first.loss_sum == pytest.approx(free.loss_sum, abs=1e-4)
    assert first.grad_norm == pytest.approx(free.grad_norm, rel=1e-4)

    real, own, groups, states = (rollout.scored, train.apply_update), [], [], []

    def scored_otherwise(*args, **told):
        *rest, group = args
        own.append(group.choices)
        others = dataclasses.replace(group, choices=other_choices(group.choices))
        groups.append(real[0](*rest, others, **told))
        return groups[-1]

    def updated(*args):
        states.append(real[1](*args))
        return states[-1]

    monkeypatch.setattr(rollout, "scored", scored_otherwise)
    monkeypatch.setattr(train, "apply_update", updated)
    _, reports, held = transact(start, **options)
    (group,), (after, _) = groups, states[0]
    assert group.choices.selections[0].shape == (G, 1, 1, T, job().model.config.index_topk)
    assert reports[0].metrics["max_abs_log_ratio"] < 1e-5 < 1e-2 < reports[0].metrics["sampling/max_abs_log_ratio"]
    assert np.abs(np.where(group.mask, group.old_logp - group.sampler_logp, 0.0)).max() > 1e-2
    assert abs(reports[0].grad_norm / first.grad_norm - 1) > 1e-2

    def widest(kept):
        """Largest distance from the old scores in the second update: the prompt held last is its own."""
        batch = (group.inputs, group.targets, group.lengths, 1.0)
        logp, _ = replay.score(job().model, job().base, after.adapters, held.prefix, *batch, kept)
        return np.abs(np.where(group.mask, np.asarray(logp) - group.old_logp, 0.0)).max()

    found = reports[1].metrics["max_abs_log_ratio"]
    assert found == pytest.approx(widest(group.choices), abs=1e-5)
    for kind in choices.KINDS:  # of either kind the policy's own would show
        assert abs(found - widest(dataclasses.replace(group.choices, **{kind: getattr(own[0], kind)}))) > 1e-3


def test_j1_a_held_prompt_of_other_adapters_is_freed_and_never_used():
    other, _, stale = transact(fresh_state(seed=5))
    want, (report,), _ = transact(trained_state())
    found, (again,), held = transact(trained_state(), held=stale)
    assert held is not stale and stale.prefix.latents[0].is_deleted() and not held.prefix.latents[0].is_deleted()
    assert again.adapter_fingerprint == report.adapter_fingerprint and same_bits(found, want)


def test_j1_a_frozen_prompt_is_kept_and_another_prompt_takes_its_place():
    state, _, first = transact(fresh_state(), mode="frozen")
    state, (report,), second = transact(state, mode="frozen", held=first)
    assert second is first and report.prefix_age == 1
    _, (report,), third = transact(state, mode="frozen", held=second, prompts=[prompt(1)])
    assert third is not second and report.prefix_age == 0 and second.prefix.latents[0].is_deleted()


def test_a_skipped_step_leaves_the_held_prompt_valid():
    """The weights are the same, so a detached prompt is not captured again; its age says so."""
    state, _, held = transact(trained_state(), objective=TRUNCATED_OUT, eos_ids=())
    _, (report,), kept = transact(state, held=held)
    assert kept is held and report.prefix_age == 1


def test_exact_is_another_step_and_kept_selections_are_not():
    """Kept selections lie on the host, one tuple a chunk; pages without them are captured again when they are asked."""
    _, (detached,), plain = transact(trained_state())
    _, (exact,), held = transact(trained_state(), mode="exact", held=plain)
    assert held is plain and held.choices is None and "reverse" in exact.seconds
    _, (kept,), held = transact(trained_state(), mode="exact", held=held, keep_selection=True)
    assert held is not plain and len(held.choices) == -(-(prompt().size - 1) // job().policy.chunk)
    assert all(isinstance(ids, np.ndarray) and ids.dtype == np.int32 for ids in jax.tree.leaves(held.choices))
    assert abs(exact.grad_norm - detached.grad_norm) > 1e-3 * detached.grad_norm
    assert kept.grad_norm == pytest.approx(exact.grad_norm, rel=1e-5)


def test_a2_a_group_without_signal_that_stays_is_pulled_to_the_reference():
    total = total_of([group(advantages=(0, 0, 0, 0))], NO_SIGNAL_OUT)
    assert float(total.loss.count) == G and any(g.any() for g in jax.tree.leaves(total.grads))


@pytest.mark.parametrize(
    "mode, objective, calls",
    [
        # None as a phase begins; 67 tokens in chunks of 64, in captures and in the reverse pass; four members.
        ("exact", PLAIN, [None, 64, 67, None, None, None, None, 1, 2, 3, 4, None, 3, 67, None]),
        ("detached", NO_SIGNAL_OUT, [None, 64, 67, None, None, None, 64, 67, None, 1, 2, 3, 4, None]),
    ],
    ids=["exact", "with a reference"],
)
def test_what_is_raised_within_a_step_leaves_the_state_as_it_was(mode, objective, calls):
    """At every phase, chunk and member: the same step taken afterwards has the same bits."""
    start, seen = trained_state(), []
    before = fingerprint.tree_fingerprint(start)

    def take(stop=None):
        seen.clear()

        def step(done=None):
            seen.append(done)
            if len(seen) == stop:
                raise InterruptedError

        options = {"prompts": [prompt(1)], "mode": mode, "objective": objective}
        return transact(start, between=step, progress=step, **options)[0]

    want = take()
    assert seen == calls
    for stop in range(1, len(calls) + 1):
        with pytest.raises(InterruptedError):
            take(stop)
        assert fingerprint.tree_fingerprint(start) == before
    assert same_bits(take(), want)


def test_the_entropy_bonus_moves_adapters_towards_entropy():
    """Its gradient is that of the entropy, by central differences along itself; advantages are 0.

    The step is small, because the selection and the routing of a larger one are others.
    """
    whole = group(advantages=(0, 0, 0, 0))
    total = total_of([whole], GRPOConfig(entropy_coef=0.5))
    slope = lora.finalise(total.grads, None)
    adapters, step = trained_state().adapters, 1e-4
    length = float(jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(slope))))

    def entropy(sign):
        moved = jax.tree.map(lambda a, g: a + sign * step / length * g, adapters, slope)
        batch = (whole.inputs, whole.targets, whole.lengths, 1.0)
        _, found = replay.score(job().model, job().base, moved, prefix(), *batch)
        return float(np.where(whole.mask, np.asarray(found, np.float64), 0.0).sum())

    measured = (entropy(1) - entropy(-1)) / (2 * step)
    assert measured < -1e-3 and measured == pytest.approx(-length / 0.5, rel=2e-3)


def test_a_transaction_is_a_function_of_its_key():
    first, second = transact(trained_state()), transact(trained_state())
    assert same_bits(first[0], second[0])
    assert transact(trained_state(), seed=1)[1][0].rollouts[0].responses != first[1][0].rollouts[0].responses


@pytest.mark.parametrize("field", ["learning_rate", "b1", "b2", "eps", "weight_decay", "max_grad_norm"])
def test_an_optimizer_out_of_range_is_refused_by_name(field):
    with pytest.raises(ValueError, match=rf"optimizer\.{field}=-0.5; accepted: "):
        train.OptimizerConfig(**{field: -0.5})
    for value in (math.inf, math.nan):
        with pytest.raises(ValueError, match=rf"optimizer\.{field}={value}; accepted: "):
            train.OptimizerConfig(**{field: value})
