"""The rollout: the reference's own prompt, groups whose rewards are equal, each prompt's baseline, bad policies."""

import math

import numpy as np
import pytest
from tiny_transactions import (
    NO_SIGNAL_OUT,
    G,
    T,
    byte_means,
    fresh_state,
    job,
    moments,
    prefix,
    prompt,
    same_bits,
    steps,
    trained_state,
    transact,
)

from longstraw_jax import replay, rollout


@pytest.mark.parametrize("mode", ["detached", "frozen"])
def test_c5_c6_the_reference_is_the_base_with_a_prompt_of_its_own(mode):
    """KL is 0 at the first step, then what an adapter-off pass over an adapter-off prompt says."""
    _, (first,), _ = transact(fresh_state(), objective=NO_SIGNAL_OUT, mode=mode)
    assert first.metrics["kl"] == 0
    _, (report,), held = transact(trained_state(), objective=NO_SIGNAL_OUT, mode=mode)
    inputs, targets, lengths = replay.member_inputs(int(prompt()[-1]), report.rollouts[0].responses, T)
    batch = (inputs, targets, lengths, 1.0)
    # The held prompt is one step behind the new adapters: it is the policy's that sampled.
    now, _ = replay.score(job().model, job().base, trained_state().adapters, held.prefix, *batch)
    reference, _ = replay.score(job().model, job().base, None, prefix(False), *batch)
    gap = np.asarray(reference - now)[np.arange(T) < lengths[:, None]]
    assert report.metrics["kl"] == pytest.approx(np.mean(np.expm1(gap) - gap), rel=1e-3)
    assert report.metrics["kl"] > 1e-4


def test_c5_without_beta_there_is_no_reference():
    _, (report,), _ = transact(trained_state())
    assert "kl" not in report.metrics


def test_c5_the_reference_outlives_training():
    """Not the adapters of the step before: KL grows away from the base."""
    _, reports, _ = steps(fresh_state(), 3, objective=NO_SIGNAL_OUT)
    kl = [report.metrics["kl"] for report in reports]
    assert kl[0] == 0 and 0 < kl[1] < kl[2]


def test_a2_a_group_without_signal_can_be_left_out_of_the_kl_term_and_the_count():
    """A mixed group and one of equal rewards, whose advantages are exactly 0."""

    def mixed_then_equal(number, responses):
        return np.asarray([1, 0, 0, 1] if number == 0 else [0.35] * G, np.float32), []

    def run(prompts):
        return transact(trained_state(), reward=mixed_then_equal, objective=NO_SIGNAL_OUT, prompts=prompts)

    (alone, (first,), _), (both, (second,), _) = run([prompt()]), run([prompt(), prompt(1)])
    assert second.rollouts[1].advantages.tolist() == [0.0] * G
    assert second.loss_count == first.loss_count and same_bits(moments(both), moments(alone))


def test_a2_a_group_without_signal_has_no_policy_gradient():
    _, (report,), _ = transact(trained_state(), reward=lambda number, responses: (np.full(G, 0.1, np.float32), []))
    assert report.loss_sum == 0 and report.grad_norm == 0 and report.loss_count > 0 and report.skip_reason is None


def silent_at(numbers):
    """byte_means, but equal rewards for the prompts of these numbers."""
    return lambda n, responses: (np.full(G, 0.35, np.float32), []) if n in numbers else byte_means(n, responses)


def test_a2_dynamic_sampling_replaces_groups_of_equal_rewards():
    """The groups that train are those of the prompts that took their places, with keys of their own."""
    further = [prompt(2), prompt(0), prompt(1)]
    asked = []

    def spare(number):
        asked.append(number)
        return further[number - 2]

    options = {"prompts": [prompt(0), prompt(1)], "reward": silent_at({0, 2, 3}), "spare": spare}
    state, (report,), held = transact(trained_state(), max_resamples=5, **options)
    assert [r.number for r in report.dropped] == [0, 2, 3] and [r.number for r in report.rollouts] == [4, 1]
    assert asked == [2, 3, 4] and np.array_equal(held.tokens, prompt(1))
    _, (every,), _ = transact(trained_state(), prompts=[prompt(0), prompt(1), *further])
    for rolled in report.rollouts + report.dropped:
        assert rolled.responses == every.rollouts[rolled.number].responses
        assert np.array_equal(rolled.prompt, every.rollouts[rolled.number].prompt)
    assert report.loss_count == sum(len(ids) for r in report.rollouts for ids in r.responses)
    with pytest.raises(ValueError, match="spare=None with max_resamples=5; accepted: a source of further prompts"):
        transact(trained_state(), max_resamples=5)


def test_a2_dynamic_sampling_ends_at_its_bound_and_goes_on_with_what_it_has():
    reward = silent_at(range(9))
    _, (first, second), _ = transact(
        trained_state(), updates=2, max_resamples=2, reward=reward, spare=lambda number: prompt(number % 3)
    )
    assert [r.number for r in first.dropped] == [0, 1] and [r.number for r in first.rollouts] == [2]
    assert not first.rollouts[0].carries_signal and first.grad_norm == 0 and first.skip_reason is None
    assert second.dropped == [] and second.rollouts == first.rollouts


def test_a2_dynamic_sampling_without_need_changes_no_bit():
    want, (report,), _ = transact(trained_state())
    found, (again,), _ = transact(trained_state(), max_resamples=2, spare=prompt)
    assert same_bits(found, want) and again.dropped == [] and again.metrics == report.metrics


def test_a3_each_prompt_has_a_baseline_of_its_own():
    rewards = np.asarray([[1, 1, 1, 0], [0, 0, 0, 1]], np.float32)

    def run(order):
        asked = [prompt(row) for row in order]
        return transact(trained_state(), prompts=asked, reward=lambda n, _: (rewards[order[n]], []))[1][0].rollouts

    for order in ([0, 1], [1, 0]):
        for row, rolled in zip(order, run(order), strict=True):
            centred = rewards[row] - rewards[row].mean()
            np.testing.assert_allclose(rolled.advantages, centred / rewards[row].std(ddof=1), rtol=1e-5)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"mode": "thawed"}, "mode='thawed'; accepted: 'frozen' or 'detached' or 'exact'"),
        ({"keep_selection": True}, "keep_selection=True with mode='detached'; accepted: with mode='exact'"),
        ({"group": 1}, "1; accepted: an integer of at least 2"),
        ({"max_new_tokens": 0}, "max_new_tokens=0; accepted: at least 1"),
        ({"chunk": 0}, "chunk=0; accepted: at least 1"),
        ({"updates": 0}, "updates=0; accepted: at least 1"),
        ({"max_resamples": -1}, "max_resamples=-1; accepted: at least 0"),
        ({"temperature": 0.0}, "temperature=0.0; accepted: at least 0.001, finite"),
        ({"temperature": 1e-40}, "temperature=1e-40; accepted: at least 0.001"),
        ({"temperature": math.inf}, "temperature=inf; accepted: at least 0.001, finite"),
        ({"temperature": math.nan}, "temperature=nan; accepted: at least 0.001, finite"),
        ({"top_p": 0.0}, "top_p=0.0; accepted: above 0, at most 1"),
    ],
)
def test_a_policy_out_of_range_is_refused_by_name(changes, said):
    with pytest.raises(ValueError) as error:
        rollout.PolicyConfig(**{"eos_ids": (1,), "capacity": 8} | changes)
    assert said in str(error.value)
