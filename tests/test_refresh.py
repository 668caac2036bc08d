"""The refresh policies: which captures they save, that a stale step is consistent, and what drift measures."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
import tiny_jobs
import train_grpo
from tiny_transactions import base_words, byte_means, fresh_state, job, prompt, trained_state

from longstraw_jax import fingerprint, replay, rollout, train
from longstraw_jax.evidence import verify
from longstraw_jax.io import metrics
from longstraw_jax.prefix import freshness, refresh, residency
from longstraw_jax.prefix.capture import capture
from longstraw_jax.prefix.refresh import Drift, RefreshPolicy
from longstraw_jax.rl import rewards


def run(transactions, policy, *, kept=None, prompts=1, **changes):
    """Transactions one after the other from the start, each with the prompts that the one before left.

    kept: is given the state before each transaction.
    """
    optimizer = train.make_optimizer(job().optimizer)
    state, held, reports = train.init_state(job().model, optimizer, 0), (), []
    config = dataclasses.replace(job().policy, refresh=policy, **changes)
    for seed in range(transactions):
        if kept is not None:
            kept.append(state)
        asked = [prompt(row) for row in range(prompts)]
        args = (job().model, config, optimizer, job().base, base_words(), state, asked, byte_means)
        state, more, held = train.transaction(*args, jax.random.key(seed), held=held)
        reports += more
    return state, reports, held[-1]


@functools.cache
def drifted():
    """Three steps that keep the first capture and a fourth that is due, with the states before them."""
    kept = []
    _, reports, held = run(4, RefreshPolicy("drift", every=3, bound=1e3, probe_tokens=5), kept=kept)
    return kept, reports, held


def fresh_logprobs(captured_by, scored_by, tokens):
    """Of a probe's tokens, from a capture of its own."""
    words = freshness.weights_fingerprint(base_words(), captured_by)
    policy = job().policy
    prefix = capture(
        job().model, job().base, captured_by, prompt()[:-1], chunk=policy.chunk, fingerprint=words,
        capacity=policy.capacity,
    )  # fmt: skip
    batch = replay.member_inputs(int(prompt()[-1]), [tokens.tolist()], 5)
    return np.asarray(replay.score(job().model, job().base, scored_by, prefix, *batch)[0])[0, : tokens.size]


@pytest.mark.parametrize(
    "policy, ages, drift, allowed",
    [
        (RefreshPolicy(), (1,), None, False),
        (RefreshPolicy("every_n", every=3), (1, 2), None, True),
        (RefreshPolicy("every_n", every=3), (3, 4), None, False),
        (RefreshPolicy("every_n", every=1), (1,), None, False),
        (RefreshPolicy("drift", every=3, bound=0.1), (1, 2), Drift(0.1), True),
        (RefreshPolicy("drift", every=3, bound=0.1), (1, 2), Drift(0.1001), False),
        (RefreshPolicy("drift", every=3, bound=0.1), (1, 2), Drift(math.nan), False),
        (RefreshPolicy("drift", every=3, bound=0.1), (1, 2), None, False),
        (RefreshPolicy("drift", every=3, bound=0.1), (3,), Drift(0.0), False),
    ],
)
def test_what_a_policy_allows(policy, ages, drift, allowed):
    assert all(policy.allows(age, drift) is allowed for age in ages)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"policy": "never"}, "refresh.policy='never'; accepted: 'every_step' or 'every_n' or 'drift'"),
        ({"every": 0}, "refresh.every=0; accepted: at least 1"),
        ({"probe_tokens": 0}, "refresh.probe_tokens=0; accepted: at least 1"),
        ({"bound": -0.1}, "refresh.bound=-0.1; accepted: 0 or more nats a token, finite"),
        ({"bound": math.nan}, "refresh.bound=nan; accepted: 0 or more"),
        ({"bound": math.inf}, "refresh.bound=inf; accepted: 0 or more"),
    ],
)
def test_a_policy_out_of_range_is_refused_by_name(changes, said):
    with pytest.raises(ValueError) as error:
        RefreshPolicy(**changes)
    assert said in str(error.value)


@pytest.mark.parametrize("mode, why", [("exact", "gradient is of a fresh prompt"), ("frozen", "is never stale")])
def test_only_detached_uses_a_stale_prompt(mode, why):
    with pytest.raises(ValueError, match=rf"policy='drift' with mode='{mode}', .*{why}; accepted: 'every_step'"):
        rollout.PolicyConfig((1,), 8, mode=mode, refresh=RefreshPolicy("drift"))


def test_the_largest_drift_is_of_those_measured():
    assert refresh.largest([None, None]) is None
    assert refresh.largest([None, Drift(0.1), Drift(0.05, 0.2)]) == Drift(0.1, 0.2)


def test_every_n_saves_captures_and_its_stale_steps_are_consistent():
    """Sampler and trainer read one stale state, so that they agree as on a fresh one; the step is another's."""
    _, every_step, _ = run(3, RefreshPolicy())
    _, every_two, held = run(3, RefreshPolicy("every_n", every=2))
    assert [(r.prefix_age, r.captures) for r in every_step] == [(0, 1)] * 3
    assert [(r.prefix_age, r.captures) for r in every_two] == [(0, 1), (1, 0), (0, 1)]
    assert held.captured_at == 2 and all(r.drift is None for r in every_step + every_two)
    for report in every_two:
        assert report.metrics["sampling/max_abs_log_ratio"] < 1e-5 and report.metrics["max_abs_log_ratio"] < 1e-5
    prints = [[r.adapter_fingerprint for r in reports] for reports in (every_step, every_two)]
    assert prints[0][0] == prints[1][0] and prints[0][1] != prints[1][1]


def test_further_updates_of_a_rollout_use_the_stale_prompt_too():
    _, (first, second), held = run(1, RefreshPolicy("every_n", every=2), updates=2)
    assert (first.captures, second.captures, second.prefix_age, held.captured_at) == (1, 0, 1, 0)
    assert first.metrics["max_abs_log_ratio"] < 1e-5 < 1e-3 < second.metrics["max_abs_log_ratio"]


def test_drift_keeps_within_its_bound_and_captures_on_schedule():
    _, reports, held = drifted()
    assert [(r.prefix_age, r.captures) for r in reports] == [(0, 1), (1, 0), (2, 0), (0, 1)]
    assert reports[0].drift is None and reports[1].drift.truth is reports[2].drift.truth is None
    assert all(report.drift.signal > 1e-3 for report in reports[1:]) and reports[3].drift.truth > 1e-3
    assert held.captured_at == 3 and held.probe.tokens.size == 5


def test_signal_and_truth_are_those_of_captures_of_their_own():
    states, reports, _ = drifted()
    tokens = np.asarray(max(reports[0].rollouts[0].responses, key=len)[:5], np.int32)
    first, last = states[0].adapters, states[3].adapters
    then, stale, now = (fresh_logprobs(*by, tokens) for by in ((first, first), (first, last), (last, last)))
    assert reports[3].drift.signal == pytest.approx(np.abs(stale - then).mean(), abs=1e-5)
    assert reports[3].drift.truth == pytest.approx(np.abs(stale - now).mean(), abs=1e-5)


def test_drift_beyond_its_bound_captures_at_once_and_a_bound_of_nothing_is_every_step():
    """Bit for bit: a probe leaves no trace in what is trained."""
    state, reports, held = run(2, RefreshPolicy("drift", every=9, bound=0.0))
    assert [(r.prefix_age, r.captures) for r in reports] == [(0, 1), (0, 1)] and reports[1].drift.truth > 1e-3
    assert held.drift == reports[1].drift and held.prefix.latents[0].is_deleted() is False
    plain, _, _ = run(2, RefreshPolicy())
    assert fingerprint.tree_fingerprint(state.adapters) == fingerprint.tree_fingerprint(plain.adapters)


def test_each_resident_prompt_has_a_probe_and_the_step_tells_the_largest_drift():
    """Two prompts stay within the budget, both stale in the second step; in the third both are due."""
    policy = RefreshPolicy("drift", every=2, bound=1e3, probe_tokens=5)
    one = residency.prompt_bytes(job().model, job().policy.capacity, job().policy.chunk)
    _, (first, second, third), held = run(3, policy, prompts=2, resident_bytes=2 * one)
    assert [(r.prefix_age, r.captures) for r in (first, second, third)] == [(0, 2), (1, 0), (0, 2)]
    assert first.drift is None and second.drift.signal > 1e-3 and second.drift.truth is None
    assert third.drift.truth >= held.drift.truth > 1e-3 and second.metrics["sampling/max_abs_log_ratio"] < 1e-5


def test_a_probe_is_carried_through_a_capture_between_updates():
    """No response is sampled then: the earlier probe's tokens are scored again, from the new capture."""
    _, (_, second), held = run(1, RefreshPolicy("drift", every=1, probe_tokens=5), updates=2)
    assert second.captures == 1 and second.prefix_age == 0 and second.drift.truth > 1e-3 and held.captured_at == 1
    found = refresh.Drift(second.drift.signal, second.drift.truth)
    assert held.drift == found and held.probe.tokens.size == held.probe.logp.size == 5


def test_a_resumed_run_captures_again_and_the_log_tells_policy_captures_and_drift(tmp_path, capsys):
    """Nothing stale survives a restart: the third step, which a failing reward dropped, is on a new capture."""
    rows = tiny_jobs.write_rows(tmp_path / "rows.jsonl", folder=str(tmp_path))
    rows.write_text(rows.read_text().splitlines()[0] + "\n")  # the same prompt at every step
    (tmp_path / "fail_at").write_text("3")
    changes = {
        "steps": 4, "data.paths": (str(rows),), "reward.functions": ("tiny_rewards:fails_once",),
        "refresh.policy": "drift", "refresh.bound": 1e3,
    }  # fmt: skip
    config, folder = tiny_jobs.config(**changes), tmp_path / "run"
    with pytest.raises(rewards.RewardError):
        train_grpo.run(config, folder)
    train_grpo.run(config, folder)
    steps = metrics.read_steps(folder / "steps.jsonl")
    assert [(step["prefix_age"], step["captures"]) for step in steps] == [(0, 1), (1, 0)] * 2
    assert {step["refresh_policy"] for step in steps} == {"drift"}
    assert [step["metrics"].get("prefix_drift/signal", 0) > 1e-3 for step in steps] == [False, True] * 2
    assert verify.main([str(folder)]) == 0 and "prefix 1 steps old, drift 0." in capsys.readouterr().out


def test_refresh_keeps_pages_only_for_the_same_prompt_and_weights():
    adapters, words = trained_state().adapters, base_words()
    options = {"chunk": job().policy.chunk, "capacity": job().policy.capacity}

    def ask(adapters, tokens, held, step, **more):
        return refresh.refresh(job().model, job().base, words, adapters, tokens, held, step=step, **options, **more)

    held = ask(adapters, prompt(), None, 4, record=("selections",))
    assert held.captured_at == 4 and ask(adapters, prompt(), held, 7) is held and held.choices
    new = ask(fresh_state().adapters, prompt(), held, 7)
    assert new.captured_at == 7 and held.prefix.index_keys[0].is_deleted()
    assert held.choices == [] and new.choices is None  # nor are two prompts' selections on the host
