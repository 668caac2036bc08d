"""Prompts that stay resident together: the budget, which one makes way, the same bits from fewer captures."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_jobs
from tiny_transactions import NO_SIGNAL_OUT, base_words, byte_means, job, prompt

from longstraw_jax import rollout, train
from longstraw_jax.evidence import prerequisites
from longstraw_jax.prefix import pages, refresh, residency
from longstraw_jax.types import PrefixState


def resident(number, *, plain=False):
    """A prompt of one token with pages of its own."""
    pools = tuple((jnp.full((1,), number),) for _ in range(2))
    return refresh.Resident(np.asarray([number]), PrefixState(*pools, jnp.int32(0), jnp.zeros(2)), 0, plain=plain)


def freed(held):
    return held.prefix.latents[0].is_deleted()


def numbers(held):
    return [int(one.tokens[0]) for one in held]


def acquire(held, number, count, *, plain=False, in_use=None):
    """With what was free when the prompt was captured: None where it was held."""
    seen = []

    def take(mine):
        seen.append(None if mine is not None else [freed(one) for one in held])
        return mine or resident(number, plain=plain)

    return residency.acquire(held, np.asarray([number]), plain, count, take, in_use=in_use), *seen


def test_the_least_recently_used_prompt_makes_way_before_the_capture():
    held = (resident(1), resident(2), resident(3))
    again, captured = acquire(held, 1, 3)
    assert numbers(again) == [2, 3, 1] and again[-1] is held[0] and captured is None
    after, captured = acquire(again, 4, 3)
    assert numbers(after) == [3, 1, 4] and captured == [True, False, False]
    assert [freed(one) for one in again] == [True, False, False]
    room, captured = acquire(after, 5, 4)
    assert numbers(room) == [3, 1, 4, 5] and captured == [False] * 3
    fewer, captured = acquire(room, 6, 1)
    assert numbers(fewer) == [6] and captured == [True] * 4


def test_the_prompt_in_use_is_never_freed_and_the_bases_state_is_another():
    held = (resident(1), resident(2))
    found, captured = acquire(held, 1, 2, plain=True, in_use=held[0].prefix)
    assert numbers(found) == [1, 1] and captured == [False, True] and [one.plain for one in found] == [False, True]
    assert residency.used(found, found[0]) == (found[1], found[0])
    renamed = dataclasses.replace(found[0], drift=refresh.Drift(0.5))
    assert residency.used(found, renamed) == (found[1], renamed)


@pytest.mark.parametrize("devices", tiny.MESHES)
def test_a_prompts_bytes_are_those_of_its_pages(devices):
    state, one = pages.allocate(tiny.model(devices), 700), residency.prompt_bytes(tiny.model(devices), 700, 64)
    pools = jax.tree.leaves((state.latents, state.index_keys))
    assert one == sum(pool.addressable_shards[0].data.nbytes for pool in pools)
    for budget, count in ((0, 1), (one, 1), (2 * one - 1, 1), (5 * one + 1, 5)):
        assert residency.most(tiny.model(devices), 700, 64, budget) == count


def test_a_budget_too_small_is_told_with_its_numbers():
    one = residency.prompt_bytes(tiny.model(1), 700, 64)
    wanted = rf"resident_bytes={2 * one - 1}; accepted: 0 \(one prompt\), or at least {2 * one}: 2 x {one} bytes"
    with pytest.raises(ValueError, match=wanted):
        residency.most(tiny.model(1), 700, 64, 2 * one - 1, least=2)


def test_resident_bytes_out_of_range_are_refused_by_name():
    with pytest.raises(ValueError, match="resident_bytes=-1; accepted: at least 0"):
        rollout.PolicyConfig((1,), 8, resident_bytes=-1)
    with pytest.raises(ValueError, match="resident_bytes=9 with mode='exact', .*; accepted: 0"):
        rollout.PolicyConfig((1,), 8, mode="exact", resident_bytes=9)


def findings(tmp_path, **changes):
    _, rows = prerequisites.examine(tiny_jobs.config(**changes), tmp_path)
    return {row.check: row for row in rows}


def test_the_checks_before_a_run_count_the_prompts(tmp_path):
    one = residency.prompt_bytes(job().model, job().policy.capacity, job().policy.chunk)
    found = findings(tmp_path, **{"capture.resident_bytes": 3 * one})
    assert found["resident prompts"].detail == "at most 3"
    need = prerequisites.memory_need(job().model, job().optimizer, policy(3), job().policy.capacity)
    assert {kinds["other prompts"] for kinds in need.values()} == {2 * one} and "reference" not in need
    small = findings(tmp_path, **{"capture.resident_bytes": one, "grpo.beta": 0.1})
    assert small["resident prompts"].status == prerequisites.BLOCKER
    assert small["resident prompts"].detail.startswith(f"capture.resident_bytes={one}; accepted: 0 (one prompt), or ")
    assert small["memory"].status == prerequisites.NOT_CHECKED


def policy(prompts, **changes):
    """That holds so many prompts; 0 is the default, one."""
    one = residency.prompt_bytes(job().model, job().policy.capacity, job().policy.chunk)
    return dataclasses.replace(job().policy, resident_bytes=prompts * one, **changes)


def run(config, rows_of_steps):
    """Transactions on rows of the dataset: the state, reports, and the prompts resident after each."""
    optimizer = train.make_optimizer(job().optimizer)
    state, held, reports, kept = train.init_state(job().model, optimizer, 0), (), [], []
    for seed, rows in enumerate(rows_of_steps):
        args = (job().model, config, optimizer, job().base, base_words(), state, [prompt(row) for row in rows])
        state, more, held = train.transaction(*args, byte_means, jax.random.key(seed), held=held)
        reports += more
        kept.append(held)
    return state, reports, kept


def test_a_frozen_epoch_over_prompts_that_fit_needs_no_capture_and_is_the_same_bits():
    rows = [(0, 1), (2, 0), (1, 2)]
    one, reports, _ = run(policy(0, mode="frozen"), rows)
    all_three, fewer, kept = run(policy(3, mode="frozen"), rows)
    assert [r.captures for r in reports] == [2, 2, 2] and [r.captures for r in fewer] == [2, 1, 0]
    assert [r.prefix_age for r in fewer] == [0, 1, 2]
    assert [r.adapter_fingerprint for r in fewer] == [r.adapter_fingerprint for r in reports]
    assert [len(held) for held in kept] == [2, 3, 3] and not any(freed(one) for one in kept[-1])
    two, some, kept = run(policy(2, mode="frozen"), rows)
    assert [r.captures for r in some] == [2, 2, 2]  # 2 makes way for 0, whose turn was longest ago, and so on
    assert max(len(held) for held in kept) == 2 and all(freed(one) for one in kept[0])
    for state in (all_three, two):
        jax.tree.map(np.testing.assert_array_equal, state.adapters, one.adapters)


def test_the_weights_decide_whether_a_detached_prompt_is_captured_again(monkeypatch):
    """The policy's own is, after each step; the reference's is the base's, and serves the prompt's next group too."""
    counted, capture = [], refresh.capture

    def counting(*args, **options):
        counted.append(args[2])
        return capture(*args, **options)

    monkeypatch.setattr(refresh, "capture", counting)
    want, _, _ = run(policy(0, objective=NO_SIGNAL_OUT), [(0,), (0,)])
    assert len(counted) == 4
    counted.clear()
    found, reports, (_, kept) = run(policy(2, objective=NO_SIGNAL_OUT), [(0,), (0,)])
    assert [adapters is None for adapters in counted] == [False, True, False]
    assert [r.captures for r in reports] == [1, 1] and [one.plain for one in kept] == [True, False]
    jax.tree.map(np.testing.assert_array_equal, found.adapters, want.adapters)
