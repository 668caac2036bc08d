"""Advantages: exact zeros, ids instead of positions, unscorable rewards, the bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax.rl.advantages import carries_signal, check_group_size, group_advantages

FORMS = [(scale, baseline) for scale in ("std", "none") for baseline in ("mean", "leave_one_out")]


def advantages(rewards, ids=None, num_groups=None, **options):
    rewards = np.asarray([np.nan if r is None else r for r in rewards], np.float32)
    ids = np.zeros(len(rewards), np.int32) if ids is None else np.asarray(ids, np.int32)
    num_groups = int(ids.max()) + 1 if num_groups is None else num_groups
    rewards, ids = jnp.asarray(rewards), jnp.asarray(ids)
    return np.asarray(group_advantages(rewards, ids, num_groups=num_groups, **options))


def expected(rewards, scale, baseline):
    """The textbook formula in float64, one group, all scorable."""
    r = np.asarray(rewards, np.float64)
    n = len(r)
    centre = np.full(n, r.mean()) if baseline == "mean" else (r.sum() - r) / (n - 1)
    return (r - centre) / (r.std(ddof=1) if scale == "std" else 1.0)


@pytest.mark.parametrize("scale, baseline", FORMS)
@pytest.mark.parametrize("rewards", [[1, 0, 0, 0], [0.35] * 7 + [0.0], [3.5, -2.0, 0.25, 1e3]])
def test_matches_the_formula(rewards, scale, baseline):
    got = advantages(rewards, scale=scale, baseline=baseline)
    np.testing.assert_allclose(got, expected(rewards, scale, baseline), rtol=2e-6)


@pytest.mark.parametrize("scale, baseline", FORMS)
@pytest.mark.parametrize("value, size", [(0.35, 8), (0.1, 16), (0.0, 8), (1e30, 3), (-7.3, 5)])
def test_a1_equal_rewards_give_exactly_zero(value, size, scale, baseline):
    assert (advantages([value] * size, scale=scale, baseline=baseline) == 0.0).all()


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("offset, step", [(0.35, 1.0), (1e4, 1e-3), (0.0, 1e-30), (0.0, 1e30)])
def test_a1_no_advantage_exceeds_the_root_of_the_group_size(offset, step, baseline):
    got = advantages([offset] * 7 + [offset + step], baseline=baseline)
    assert np.isfinite(got).all() and np.abs(got).max() <= np.sqrt(8) * (1 + 1e-6)
    assert got[7] > 1.0 > 0.0 > got[0]


def test_a3_follows_group_ids_under_any_permutation():
    rewards, ids = np.array([1, 1, 1, 0, 0, 0, 0, 1.0]), np.array([0] * 4 + [1] * 4)
    base = advantages(rewards, ids)
    np.testing.assert_allclose(base[:4], expected(rewards[:4], "std", "mean"), rtol=1e-6)
    np.testing.assert_allclose(base[4:], expected(rewards[4:], "std", "mean"), rtol=1e-6)
    order = np.random.default_rng(0).permutation(8)
    np.testing.assert_allclose(advantages(rewards[order], ids[order]), base[order], rtol=1e-6)


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a3_groups_split_over_32_devices(axis_type):
    rng = np.random.default_rng(1)
    ids = np.repeat(np.arange(20), 8)[rng.permutation(160)].astype(np.int32)  # 5 rows on each device
    rewards = rng.integers(0, 3, 160).astype(np.float32)
    rewards[rng.permutation(160)[:9]] = np.nan
    mesh = jax.make_mesh((32,), ("context",), axis_types=(axis_type,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("context"))
    call = jax.jit(lambda r, i: group_advantages(r, i, num_groups=20))
    spread_out = call(jax.device_put(rewards, rows), jax.device_put(ids, rows))
    np.testing.assert_allclose(np.asarray(spread_out), advantages(rewards, ids), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scale, baseline", FORMS)
def test_a5_unscorable_rows_leave_the_baseline(scale, baseline):
    got = advantages([1, None, 0, 0], scale=scale, baseline=baseline)
    assert got[1] == 0.0
    np.testing.assert_allclose(got[[0, 2, 3]], expected([1, 0, 0], scale, baseline), rtol=1e-6)


@pytest.mark.parametrize("scale, baseline", FORMS)
@pytest.mark.parametrize("rewards", [[None] * 4, [None, None, 2.0, None], [np.inf, None, 1.0, 1.0]])
def test_a5_nothing_to_compare_gives_zero(rewards, scale, baseline):
    assert (advantages(rewards, scale=scale, baseline=baseline) == 0.0).all()


def test_rows_outside_the_groups_change_nothing():
    got = advantages([1, 0, 5, 9], [0, 0, -1, 7], num_groups=1)
    np.testing.assert_allclose(got, [*expected([1, 0], "std", "mean"), 0, 0], rtol=1e-6)


def test_a2_signal_is_not_the_same_as_a_nonzero_advantage():
    rewards = jnp.array([0.0, 0.5, 1.0, 0.2, 0.2, jnp.nan])
    ids = jnp.array([0, 0, 0, 1, 1, 0])
    assert carries_signal(rewards, ids, num_groups=2).tolist() == [True, True, True, False, False, False]
    assert group_advantages(rewards, ids, num_groups=2)[1] == 0.0


@pytest.mark.parametrize("size", [1, 0, -3, 2.0, True, None])
def test_a_group_of_one_is_refused(size):
    with pytest.raises(ValueError, match=r"group=.*accepted: an integer of at least 2"):
        check_group_size(size)
    check_group_size(2)


def test_unknown_forms_are_refused_by_name():
    with pytest.raises(ValueError, match="advantage_scale: 'batch'; accepted: std, none"):
        advantages([1, 0], scale="batch")
    with pytest.raises(ValueError, match="baseline: 'critic'; accepted: mean, leave_one_out"):
        advantages([1, 0], baseline="critic")
