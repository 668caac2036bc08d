"""The objective: its gradient, its masks, its normalisation, and every field of its config."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax.rl import objectives
from longstraw_jax.rl.advantages import carries_signal, group_advantages
from longstraw_jax.rl.objectives import AGGREGATIONS, GRPOConfig, LossSum, loss_mask, mean, member_loss

N, T = 8, 12
LENGTHS = np.array([12, 1, 7, 3, 12, 5, 0, 9])
PLAIN = GRPOConfig()
FULL = GRPOConfig(beta=0.04, tis_cap=1.5)  # every term of the objective


def batch(seed=0):
    """Random rows whose ratios reach past both clip bounds."""
    rng = np.random.default_rng(seed)
    logp = -rng.uniform(0.1, 4.0, (N, T))
    rows = {name: logp + 0.4 * rng.normal(size=(N, T)) for name in ("old_logp", "ref_logp", "sampler_logp")}
    rows |= {"logp": logp, "entropy": rng.uniform(size=(N, T)), "advantage": rng.normal(size=N)}
    rows = {name: value.astype(np.float32) for name, value in rows.items()}
    return {**rows, "mask": np.arange(T) < LENGTHS[:, None]}


@functools.partial(jax.jit, static_argnames="config")
def loss_and_grad(rows, config):
    """((LossSum, Metrics), d sum / d logp) of some rows at once."""

    def total(logp):
        out = member_loss(**{**rows, "logp": logp}, config=config, max_len=T)
        return out[0].sum, out

    (_, out), grad = jax.value_and_grad(total, has_aux=True)(rows["logp"])
    return out, grad


def pick(rows, index):
    return {name: value[index] for name, value in rows.items()}


def single(logp, *, old=None, advantage=1.0, config=PLAIN, **more):
    """(loss, gradient) of one token."""
    value, grad = _single(logp, logp if old is None else old, advantage, more, config)
    return float(value), float(grad)


@functools.partial(jax.jit, static_argnames="config")
def _single(logp, old, advantage, more, config):
    def loss(x):
        row = {name: value[None] for name, value in {"logp": x, "entropy": x, "old_logp": old, **more}.items()}
        return mean(member_loss(**row, advantage=advantage, mask=jnp.ones(1, bool), config=config, max_len=1)[0])

    old, more = jax.tree.map(jnp.float32, (old, more))
    return jax.value_and_grad(loss)(jnp.float32(logp))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_matches_a_loop_over_tokens(aggregation):
    config = dataclasses.replace(FULL, aggregation=aggregation)
    rows = batch()
    (loss, metrics), _ = loss_and_grad(rows, config)
    per_row, ratios, low, high, kls = [], [], 0, 0, []
    for n, length in enumerate(LENGTHS):
        terms = []
        for t in range(length):
            logp, old, ref, sampler = (rows[k][n, t] for k in ("logp", "old_logp", "ref_logp", "sampler_logp"))
            ratio, a = np.exp(logp - old), rows["advantage"][n]
            bound = min(max(ratio, 0.8), 1.28)
            kl = np.exp(ref - logp) - (ref - logp) - 1
            weight = min(np.exp(old - sampler), 1.5)
            terms.append(-min(ratio * a, bound * a) * weight + 0.04 * kl)
            ratios.append(ratio)
            kls.append(kl)
            low, high = low + (a < 0 and ratio < 0.8), high + (a > 0 and ratio > 1.28)
        per_row.append(terms)
    sums, tokens, filled = [sum(r) for r in per_row], sum(LENGTHS), [r for r in per_row if r]
    expected = {
        "token_mean": sum(sums) / tokens,
        "sequence_mean": np.mean([np.mean(r) for r in filled]),
        "fixed_length": sum(sums) / (T * len(filled)),
    }[aggregation]
    np.testing.assert_allclose(mean(loss), expected, rtol=1e-5)
    values = objectives.metric_values(metrics)
    assert low > 0 and high > 0
    np.testing.assert_allclose(values["clip_ratio/low_mean"], low / tokens, rtol=1e-6)
    np.testing.assert_allclose(values["clip_ratio/high_mean"], high / tokens, rtol=1e-6)
    np.testing.assert_allclose(values["ratio/mean"], np.mean(ratios), rtol=1e-5)
    np.testing.assert_allclose(values["ratio/max"], np.max(ratios), rtol=1e-5)
    np.testing.assert_allclose(values["max_abs_log_ratio"], np.abs(np.log(ratios)).max(), rtol=1e-5)
    np.testing.assert_allclose(values["kl"], np.mean(kls), rtol=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_d1_micro_batches_and_their_order_change_nothing(aggregation):
    config = dataclasses.replace(FULL, aggregation=aggregation)
    rows = batch()
    (whole, metrics), grad = loss_and_grad(rows, config)
    for size, order in itertools.product((1, 4), (np.arange(N), np.arange(N)[::-1])):
        parts = [order[i : i + size] for i in range(0, N, size)]
        done = [loss_and_grad(pick(rows, part), config) for part in parts]
        total, merged = functools.reduce(objectives.merge, [out for out, _ in done])
        np.testing.assert_allclose(mean(total), mean(whole), rtol=1e-6)
        part_grad = np.zeros((N, T), np.float32)
        for part, (_, g) in zip(parts, done, strict=True):
            part_grad[part] = g
        np.testing.assert_allclose(part_grad / total.count, grad / whole.count, rtol=1e-6, atol=1e-8)
        for name, value in objectives.metric_values(merged).items():
            np.testing.assert_allclose(value, objectives.metric_values(metrics)[name], rtol=1e-5, atol=1e-7)


def test_d1_global_mean_not_mean_of_means():
    # 100 tokens of loss 1 and 10 of loss 3: 1.18 over tokens, 2.0 over responses
    def share(length, loss, aggregation):
        config = GRPOConfig(aggregation=aggregation)
        logp, mask = jnp.full(100, -1.0), jnp.arange(100) < length
        rows = {"old_logp": logp, "advantage": -loss, "mask": mask}
        return member_loss(logp, logp, **rows, config=config, max_len=100)[0]

    by_mode = {m: mean(objectives.merge(share(100, 1.0, m), share(10, 3.0, m))) for m in AGGREGATIONS}
    np.testing.assert_allclose(by_mode["token_mean"], 130 / 110, rtol=1e-6)
    np.testing.assert_allclose(by_mode["sequence_mean"], 2.0, rtol=1e-6)
    np.testing.assert_allclose(by_mode["fixed_length"], 130 / 200, rtol=1e-6)


def test_vmapped_members_add_up_to_the_batch():
    rows = batch()
    mapped = jax.jit(jax.vmap(lambda row: member_loss(**row, config=FULL, max_len=T)[0]))(rows)
    (whole, _), _ = loss_and_grad(rows, FULL)
    np.testing.assert_allclose(mapped.sum.sum(), whole.sum, rtol=1e-5)
    assert mapped.count.sum() == whole.count == LENGTHS.sum()


def test_sharded_rows_give_the_same_gradient():
    rows = {name: np.concatenate([value] * 4) for name, value in batch().items()}
    mesh = jax.make_mesh((32,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("context"))
    (here, _), grad = loss_and_grad(rows, FULL)
    (there, _), sharded = loss_and_grad(jax.device_put(rows, by_row), FULL)
    np.testing.assert_allclose(mean(there), mean(here), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(sharded), np.asarray(grad), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_b4_d3_masked_positions_do_not_matter(aggregation, garbage):
    config = dataclasses.replace(FULL, aggregation=aggregation)
    rows = batch()
    rows["mask"] = rows["mask"] & (np.arange(T) % 5 != 2)  # observation tokens inside a response
    (clean, clean_metrics), clean_grad = loss_and_grad(rows, config)
    for name in ("logp", "old_logp", "ref_logp", "sampler_logp", "entropy"):
        rows[name] = np.where(rows["mask"], rows[name], np.float32(garbage))
    (loss, metrics), grad = loss_and_grad(rows, config)
    assert loss.sum == clean.sum and loss.count == clean.count
    np.testing.assert_array_equal(grad, clean_grad)
    assert (np.asarray(grad)[~rows["mask"]] == 0).all() and np.abs(grad).max() > 0
    jax.tree.map(np.testing.assert_array_equal, metrics, clean_metrics)
    if aggregation == "token_mean":
        assert loss.count == rows["mask"].sum()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_b7_d2_everything_masked_is_exactly_nothing(aggregation):
    config = dataclasses.replace(FULL, aggregation=aggregation)
    rows = batch()
    rows["mask"] = np.zeros((N, T), bool)
    rows["logp"] = np.full((N, T), np.nan, np.float32)
    (loss, metrics), grad = loss_and_grad(rows, config)
    assert loss.sum == 0 and loss.count == 0 and mean(loss) == 0
    np.testing.assert_array_equal(grad, 0.0)
    assert all(np.isfinite(value) for value in objectives.metric_values(metrics).values())
    (some, _), _ = loss_and_grad(batch(), config)
    merged = objectives.merge(some, loss)
    assert merged.sum == some.sum and merged.count == some.count


def test_b7_a_response_of_no_tokens():
    empty = jnp.zeros(0)
    loss, metrics = member_loss(
        empty, empty, old_logp=empty, advantage=1.0, mask=jnp.zeros(0, bool), config=PLAIN, max_len=4
    )
    assert loss.sum == 0 and loss.count == 0 and metrics.maxima["ratio/max"] == 0


def test_clip_bounds_stop_the_gradient_on_their_own_side():
    def grad(ratio, advantage, **bounds):
        return single(-1.0, old=-1.0 - np.log(ratio), advantage=advantage, config=GRPOConfig(**bounds))[1]

    assert grad(1.27, 1.0) < 0 and grad(1.29, 1.0) == 0  # above 1 + clip_high
    assert grad(0.81, -1.0) > 0 and grad(0.79, -1.0) == 0  # below 1 - clip_low
    assert grad(1.5, -1.0) > 0 and grad(0.5, 1.0) < 0  # moving back is never clipped
    assert grad(1.29, 1.0, clip_high=0.3) < 0
    assert grad(0.79, -1.0, clip_low=0.3) > 0


def test_c3_on_policy_ratio_is_one_and_the_gradient_is_minus_advantage():
    assert single(-1.3, advantage=0.7) == pytest.approx((-0.7, -0.7))
    rows = batch()
    rows["old_logp"] = rows["logp"]
    (_, metrics), _ = loss_and_grad(rows, PLAIN)
    assert metrics.maxima["max_abs_log_ratio"] == 0 and metrics.maxima["ratio/max"] == 1
    rows["old_logp"] = rows["logp"] + np.float32(3e-4) * (np.arange(T) == 0)
    (_, metrics), _ = loss_and_grad(rows, PLAIN)
    np.testing.assert_allclose(metrics.maxima["max_abs_log_ratio"], 3e-4, rtol=1e-2)


@pytest.mark.parametrize("config", [PLAIN, FULL])
def test_c3_without_old_logprobs_the_policys_own_serve(config):
    rows = batch()
    rows["old_logp"] = rows["logp"]
    given = loss_and_grad(rows, config)
    alone = loss_and_grad({**rows, "old_logp": None}, config)
    jax.tree.map(np.testing.assert_array_equal, alone, given)
    assert np.abs(alone[1]).max() > 0


def test_c1_a_sampler_at_another_temperature_is_seen():
    logits = 2 * np.random.default_rng(3).normal(size=(N, T, 30)).astype(np.float32)
    rows = batch()
    rows["old_logp"] = rows["logp"] = np.asarray(jax.nn.log_softmax(logits / 0.6)[..., 4])
    seen = {}
    for temperature in (0.6, 1.0):
        rows["sampler_logp"] = np.asarray(jax.nn.log_softmax(logits / temperature)[..., 4])
        (_, metrics), _ = loss_and_grad(rows, PLAIN)
        seen[temperature] = metrics.maxima["sampling/max_abs_log_ratio"]
    assert seen[0.6] == 0.0 and seen[1.0] > 0.1


@pytest.mark.parametrize("estimator", objectives.KL_ESTIMATORS)
def test_c4_kl_pulls_towards_the_reference(estimator):
    config = GRPOConfig(beta=0.5, kl_estimator=estimator)
    loss = functools.partial(single, advantage=0.0, config=config, ref_logp=-2.0)
    assert loss(-2.0) == (0.0, 0.0)
    assert loss(-1.5)[1] > 0 > loss(-2.5)[1]  # descending the gradient moves towards -2 from both sides
    assert loss(-1.0)[0] > loss(-1.5)[0] > 0
    assert loss(-1.5)[1] != single(-1.5, advantage=0.0, config=config, ref_logp=-1.0)[1]
    assert loss(-1.5)[1] == pytest.approx(0.5 * (0.5 if estimator == "k2" else 1 - np.exp(-0.5)), rel=1e-5)


def test_c4_k1_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="kl_estimator='k1'; accepted: k3, k2 .*does not depend on the ref"):
        GRPOConfig(kl_estimator="k1")


def test_c5_terms_without_their_inputs_are_refused():
    rows = batch()
    rows.pop("ref_logp")
    with pytest.raises(ValueError, match="ref_logp=None; accepted: .*beta is 0.04"):
        member_loss(**rows, config=GRPOConfig(beta=0.04), max_len=T)
    rows.pop("sampler_logp")
    for field in ("tis_cap", "mis_cap"):
        with pytest.raises(ValueError, match=f"sampler_logp=None; accepted: .*{field} is 2.0"):
            member_loss(**rows, config=GRPOConfig(**{field: 2.0}), max_len=T)


def test_the_reference_is_only_measured_at_beta_zero():
    rows = batch()
    (_, metrics), grad = loss_and_grad(rows, PLAIN)
    rows["ref_logp"] = rows["ref_logp"] + 1.0
    (_, moved), moved_grad = loss_and_grad(rows, PLAIN)
    assert metrics.sums["kl"].sum != moved.sums["kl"].sum
    np.testing.assert_array_equal(grad, moved_grad)


def test_importance_weights_scale_the_policy_term_up_to_the_cap():
    plain, capped = single(-1.0)[1], GRPOConfig(tis_cap=1.5)
    assert single(-1.0, config=capped, sampler_logp=-1.0 - np.log(1.2))[1] == pytest.approx(1.2 * plain)
    assert single(-1.0, config=capped, sampler_logp=-9.0)[1] == pytest.approx(1.5 * plain)
    (_, metrics), _ = loss_and_grad(batch(), FULL)
    values = objectives.metric_values(metrics)
    assert 0 < values["sampling/capped_fraction"] < 1 and values["sampling/importance_sampling_ratio/mean"] <= 1.5


def test_gspo_clips_whole_sequences_by_their_mean_ratio():
    """arXiv 2507.18071: equation 5 and its clip; the gradient (equation 10) weighs a row's tokens alike."""
    config = GRPOConfig(importance_level="sequence", aggregation="sequence_mean", clip_low=0.02, clip_high=0.02)
    rows = batch()
    (loss, metrics), grad = loss_and_grad(rows, config)
    want, slopes, clipped = [], np.zeros((N, T)), 0
    for n, length in enumerate(LENGTHS):
        if not length:
            continue
        ratio = np.exp(np.mean((rows["logp"] - rows["old_logp"])[n, :length], dtype=np.float64))
        a = rows["advantage"][n]
        want.append(-min(ratio * a, min(max(ratio, 0.98), 1.02) * a))
        out = (a > 0 and ratio > 1.02) or (a < 0 and ratio < 0.98)
        slopes[n, :length] = 0 if out else -ratio * a / length
        clipped += length * out
    np.testing.assert_allclose(mean(loss), np.mean(want), rtol=1e-5)
    np.testing.assert_allclose(grad, slopes, rtol=1e-4, atol=1e-6)
    values = objectives.metric_values(metrics)
    assert 0 < clipped < LENGTHS.sum() and values["clip_ratio/region_mean"] == pytest.approx(clipped / LENGTHS.sum())
    (_, token), _ = loss_and_grad(rows, PLAIN)
    assert values["max_abs_log_ratio"] == objectives.metric_values(token)["max_abs_log_ratio"]  # the policy's drift


def test_gspo_keeps_an_advantage_a_token():
    rows = batch()
    rows["advantage"] = np.random.default_rng(5).normal(size=(N, T)).astype(np.float32)
    _, grad = loss_and_grad(rows, GRPOConfig(importance_level="sequence", clip_low=1.0, clip_high=1e3))
    length = np.maximum(LENGTHS, 1)[:, None]
    log_ratio = np.where(rows["mask"], rows["logp"] - rows["old_logp"], 0).sum(-1, keepdims=True) / length
    np.testing.assert_allclose(
        grad, np.where(rows["mask"], -np.exp(log_ratio) * rows["advantage"], 0), rtol=1e-4, atol=1e-6
    )


def test_the_entropy_bonus_has_the_entropys_gradient():
    @functools.partial(jax.jit, static_argnames="config")
    def by_entropy(rows, config):
        return jax.grad(lambda h: member_loss(**{**rows, "entropy": h}, config=config, max_len=T)[0].sum)(
            rows["entropy"]
        )

    rows = batch()
    assert not by_entropy(rows, PLAIN).any()
    slope = by_entropy(rows, GRPOConfig(entropy_coef=0.25))
    np.testing.assert_array_equal(slope, np.where(rows["mask"], -0.25, 0.0))
    (plain, _), grad = loss_and_grad(rows, PLAIN)
    (bonus, _), same = loss_and_grad(rows, GRPOConfig(entropy_coef=0.25))
    np.testing.assert_allclose(plain.sum - bonus.sum, 0.25 * rows["entropy"][rows["mask"]].sum(), rtol=1e-4)
    np.testing.assert_array_equal(grad, same)  # it does not pass through the tokens' own log-probabilities


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_importance_sampling_is_a_smaller_mask(level, aggregation):
    """Sum, count and gradient are those of the loss whose mask leaves the same tokens out."""
    rows, config = batch(), GRPOConfig(beta=0.04, aggregation=aggregation)
    gap = np.where(rows["mask"], rows["old_logp"] - rows["sampler_logp"], 0.0)
    gap = gap if level == "token" else np.broadcast_to(gap.sum(-1, keepdims=True), gap.shape)
    kept = rows["mask"] & (np.abs(gap) <= np.log(1.5))
    assert 0 < kept.sum() < rows["mask"].sum()
    (want, _), slope = loss_and_grad({**rows, "mask": kept}, config)
    (found, metrics), grad = loss_and_grad(rows, dataclasses.replace(config, mis_cap=1.5, mis_level=level))
    np.testing.assert_allclose(found.sum, want.sum, rtol=1e-6)
    assert found.count == want.count
    np.testing.assert_allclose(grad, slope, rtol=1e-6)
    share = 1 - kept.sum() / rows["mask"].sum()
    assert objectives.metric_values(metrics)["sampling/masked_fraction"] == pytest.approx(share)
    rows["logp"] = np.where(np.arange(N * T).reshape(N, T) == 0, np.nan, rows["logp"])
    (seen, _), _ = loss_and_grad({**rows, "old_logp": None}, dataclasses.replace(config, mis_cap=1.5, mis_level=level))
    assert np.isnan(seen.sum)  # a NaN is no ratio out of bounds


def test_fields_of_what_is_off_change_nothing():
    def program(config):
        return str(jax.make_jaxpr(lambda rows: member_loss(**rows, config=config, max_len=T))(batch()))

    assert program(GRPOConfig(mis_level="sequence")) == program(PLAIN)
    for field, value in (("mis_cap", 2.0), ("entropy_coef", 0.1), ("importance_level", "sequence")):
        assert program(GRPOConfig(**{field: value})) != program(PLAIN)


def test_dr_grpo_and_rloo_by_their_formulas():
    """On-policy gradients: -(r - mean) / (G L) (arXiv 2503.20783); -(r - mean of the others) / G, a sequence's sum of
    log-probabilities as one action (arXiv 2402.14740)."""
    rows, rewards = batch(), np.asarray([1, 0, 0, 1, 0.5, 0, 0, 1], np.float32)
    rows["old_logp"], rows["mask"] = rows["logp"], np.ones((N, T), bool)
    others = (rewards.sum() - rewards) / (N - 1)
    for baseline, centred in (("mean", rewards - rewards.mean()), ("leave_one_out", rewards - others)):
        config = GRPOConfig(aggregation="fixed_length", advantage_scale="none", baseline=baseline)
        rows["advantage"] = np.asarray(
            group_advantages(
                jnp.asarray(rewards), jnp.zeros(N, jnp.int32), num_groups=1, scale="none", baseline=config.baseline
            )
        )
        (loss, _), grad = loss_and_grad(rows, config)
        np.testing.assert_allclose(grad / loss.count, np.repeat(-centred[:, None] / (N * T), T, axis=1), atol=1e-7)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [30.0, 500.0, -30.0, -500.0])
def test_an_absurd_ratio_stays_finite(gap, advantage):
    config = GRPOConfig(beta=0.1)
    value, grad = single(-1.0, old=-1.0 - gap, advantage=advantage, config=config, ref_logp=-1.0 - gap)
    assert np.isfinite(value) and np.isfinite(grad)
    value, grad = single(-1.0, old=-1.0, advantage=advantage, config=config, ref_logp=-1.0 + gap)
    assert np.isfinite(value) and np.isfinite(grad)


def test_a_nan_in_a_trained_token_is_not_hidden():
    rows = batch()
    rows["logp"] = np.where(np.arange(N * T).reshape(N, T) == 0, np.nan, rows["logp"])
    (loss, metrics), _ = loss_and_grad(rows, PLAIN)
    assert np.isnan(loss.sum) and np.isnan(metrics.maxima["max_abs_log_ratio"])


def test_a2_equal_reward_groups_with_and_without_kl():
    rows = batch()
    rewards, ids = jnp.array([1.0, 0, 0, 1, 0.3, 0.3, 0.3, 0.3]), jnp.repeat(jnp.arange(2), 4)
    rows["advantage"] = np.asarray(group_advantages(rewards, ids, num_groups=2))
    signal = carries_signal(rewards, ids, num_groups=2)
    truncated = jnp.zeros(N, bool)
    seen = {}
    for kept in (True, False):
        config = GRPOConfig(beta=0.04, zero_variance_kl=kept)
        mask = loss_mask(rows["mask"], truncated=truncated, signal=signal, config=config)
        (loss, _), grad = loss_and_grad({**rows, "mask": np.asarray(mask)}, config)
        seen[kept] = loss.count, np.abs(np.asarray(grad)[4:]).max(), np.asarray(grad)[:4]
    assert seen[True][0] == LENGTHS.sum() and seen[False][0] == LENGTHS[:4].sum()
    assert seen[True][1] > 0 and seen[False][1] == 0
    np.testing.assert_array_equal(seen[True][2], seen[False][2])  # sums; the counts differ


def test_b7_masking_truncated_responses():
    mask, truncated, signal = batch()["mask"], LENGTHS == T, np.ones(N, bool)
    off = loss_mask(mask, truncated=truncated, signal=signal, config=GRPOConfig())
    on = loss_mask(mask, truncated=truncated, signal=signal, config=GRPOConfig(mask_truncated=True))
    np.testing.assert_array_equal(off, mask)
    np.testing.assert_array_equal(on.sum(axis=1), np.where(truncated, 0, LENGTHS))


@pytest.mark.parametrize(
    "field, value, accepted",
    [
        ("clip_low", 1.5, "[0, 1]"), ("clip_low", True, "[0, 1]"), ("clip_high", -0.1, "at least 0"),
        ("clip_high", float("nan"), "at least 0"), ("beta", -1, "at least 0"), ("beta", None, "at least 0"),
        ("kl_estimator", "k4", "k3, k2"), ("aggregation", "mean", "token_mean, sequence_mean, fixed_length"),
        ("advantage_scale", "batch", "std, none"), ("baseline", "rloo", "mean, leave_one_out"),
        ("tis_cap", 0.0, "or a number above 0"), ("tis_cap", "2", "or a number above 0"),
        ("mask_truncated", 1, "True, False"), ("zero_variance_kl", "no", "True, False"),
        ("importance_level", "word", "token, sequence"), ("entropy_coef", -0.1, "at least 0"),
        ("mis_cap", 1.0, "or a number above 1"), ("mis_level", "group", "token, sequence"),
    ],
)
def test_bad_fields_are_refused_by_name(field, value, accepted):
    with pytest.raises(ValueError) as error:
        GRPOConfig(**{field: value})
    assert str(error.value).startswith(f"{field}={value!r}; accepted: ") and accepted in str(error.value)


@pytest.mark.parametrize("field, value", [("advantage_scale", "none"), ("baseline", "leave_one_out")])
def test_a7_advantage_fields_reach_the_advantages(field, value):
    config = dataclasses.replace(PLAIN, **{field: value})
    rewards, ids = jnp.array([1.0, 0, 0, 0]), jnp.zeros(4, jnp.int32)
    got, default = (
        group_advantages(rewards, ids, num_groups=1, scale=c.advantage_scale, baseline=c.baseline)
        for c in (config, PLAIN)
    )
    assert not np.allclose(got, default)


def test_loss_sum_is_a_pytree():
    total = objectives.merge(LossSum(jnp.float32(1), jnp.float32(2)), LossSum(jnp.float32(3), jnp.float32(2)))
    assert mean(total) == 1.0 and len(jax.tree.leaves(total)) == 2
