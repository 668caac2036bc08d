"""The clipped group-relative objective of one response, as a sum and a count.

A batch is the element-wise sum of its members (`merge`), divided once by the global count. Then neither the
number of micro-batches, nor their order, nor the way responses lie over devices changes the gradient.

GRPO: arXiv 2402.03300. Separate clip bounds and token-level mean: DAPO, arXiv 2503.14476. Fixed-length
normalisation: Dr. GRPO, arXiv 2503.20783. Ratios of whole sequences: GSPO, arXiv 2507.18071. KL estimators:
J. Schulman, "Approximating KL divergence" (2020).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from longstraw_jax.rl import advantages, corrections, masks

KL_ESTIMATORS = ("k3", "k2")
AGGREGATIONS = ("token_mean", "sequence_mean", "fixed_length")

# exp() of a larger difference of log-probabilities would overflow, and 0 * inf in its gradient is NaN (the
# same bound as verl's). Past it the token keeps a finite loss and has no gradient.
MAX_LOG_RATIO = 20.0


@dataclasses.dataclass(frozen=True)
class GRPOConfig:
    """What the objective is made of; static and hashable.

    In brackets the names of TRL's GRPOConfig, or of verl's configuration.

    Fields:
        clip_low, clip_high: the ratio may move the objective within [1 - clip_low, 1 + clip_high] (epsilon,
            epsilon_high).
        importance_level: 'token', the ratio of each token; 'sequence', that of the whole response, normalised by its
            length (GSPO), with bounds of its own size: 3e-4 and 4e-4 in the paper (importance_sampling_level).
        beta: weight of the KL to the reference policy; 0 needs no reference log-probabilities.
        kl_estimator: 'k3', exp(d) - d - 1, or 'k2', d^2 / 2, with d = ref - logp.
        entropy_coef: weight of the entropy bonus: its mean, as the loss's, is taken off the loss (verl: entropy_coeff).
        aggregation: 'token_mean', every token of the batch counts the same; 'sequence_mean', every response
            does; 'fixed_length', every non-empty response counts as `max_len` tokens (loss_type 'dapo', 'grpo',
            'dr_grpo').
        advantage_scale, baseline: see `advantages.group_advantages`.
        tis_cap: cap of the sampler-to-trainer importance weights; None leaves them out
            (vllm_importance_sampling_mode 'token_truncate').
        mis_cap: tokens or responses whose sampler-to-trainer ratio lies outside of [1 / mis_cap, mis_cap] leave the
            loss, sum and count; None keeps all. In TRL ('token_mask', 'sequence_mask') they stay in the count.
        mis_level: 'token' or 'sequence', see `corrections.within_ratio`.
        mask_truncated: responses without an eos leave the loss, sum and count (mask_truncated_completions).
        zero_variance_kl: rows without signal (equal rewards in the group, or unscorable) stay in the KL and entropy
            terms and in the count, as in TRL. False takes them out of all. Their policy term is 0 either way.

    Raises:
        ValueError: on construction, naming the field, the value and what is accepted.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    importance_level: str = "token"
    beta: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    aggregation: str = "token_mean"
    advantage_scale: str = "std"
    baseline: str = "mean"
    tis_cap: float | None = None
    mis_cap: float | None = None
    mis_level: str = "token"
    mask_truncated: bool = False
    zero_variance_kl: bool = True

    def __post_init__(self):
        _check_number("clip_low", self.clip_low, "a number in [0, 1]", lambda x: 0 <= x <= 1)
        _check_number("clip_high", self.clip_high, "a number of at least 0", lambda x: x >= 0)
        _check_number("beta", self.beta, "a number of at least 0", lambda x: x >= 0)
        _check_number("entropy_coef", self.entropy_coef, "a number of at least 0", lambda x: x >= 0)
        if self.tis_cap is not None:
            _check_number("tis_cap", self.tis_cap, "None (a configuration's 0) or a number above 0", lambda x: x > 0)
        if self.mis_cap is not None:
            _check_number("mis_cap", self.mis_cap, "None (a configuration's 0) or a number above 1", lambda x: x > 1)
        if self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator='k1'; accepted: k3, k2 (as a loss term the gradient of k1, logp - ref, does "
                "not depend on the reference, so it cannot pull towards it)"
            )
        _check_choice("importance_level", self.importance_level, corrections.LEVELS)
        _check_choice("mis_level", self.mis_level, corrections.LEVELS)
        _check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        _check_choice("aggregation", self.aggregation, AGGREGATIONS)
        _check_choice("advantage_scale", self.advantage_scale, advantages.SCALES)
        _check_choice("baseline", self.baseline, advantages.BASELINES)
        for field in ("mask_truncated", "zero_variance_kl"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field}={getattr(self, field)!r}; accepted: True, False")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSum:
    """A quantity under way to its mean: fp32 `sum` over `count` items."""

    sum: Float[Array, ""]
    count: Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metrics:
    """Figures that merge across members: `sums` by addition, `maxima` by maximum (none is below 0, so zeros
    are where an accumulation may start)."""

    sums: dict[str, LossSum]
    maxima: dict[str, Float[Array, ""]]


def loss_mask(
    mask: Bool[Array, "N T"],
    *,
    truncated: Bool[Array, "N"],
    signal: Bool[Array, "N"],
    config: GRPOConfig,
) -> Bool[Array, "N T"]:
    """The response mask less the responses that `config` leaves out of the loss.

    Args:
        mask: bool [N, T] from `masks.response_mask`.
        truncated: bool [N], responses without an eos within their budget, as the sampler says.
        signal: bool [N] from `advantages.carries_signal`.
        config: reads mask_truncated and zero_variance_kl.

    Returns:
        bool [N, T].
    """
    if config.mask_truncated:
        mask = masks.without_rows(mask, truncated)
    if not config.zero_variance_kl:
        mask = masks.without_rows(mask, ~jnp.asarray(signal))
    return mask


def member_loss(
    logp: Float[Array, "*rows T"],
    entropy: Float[Array, "*rows T"],
    *,
    old_logp: Float[Array, "*rows T"] | None,
    advantage: Float[Array, "..."],
    mask: Bool[Array, "*rows T"],
    config: GRPOConfig,
    ref_logp: Float[Array, "*rows T"] | None = None,
    sampler_logp: Float[Array, "*rows T"] | None = None,
    max_len: int,
) -> tuple[LossSum, Metrics]:
    """One member's share of the loss: what it adds to the sum, and to the count that divides it.

    Per token: -min(r A, clip(r) A), weighted by the importance correction if there is one, plus beta KL, less
    entropy_coef times the entropy.
    Where the mask is False every input may be anything, NaN included, and gets a gradient of exactly zero.
    An empty mask adds 0 to the sum and 0 to the count.

    Args:
        logp: [*rows, T], nats, of the policy under differentiation. With rows (N responses at once) the
            result is the total over the rows.
        entropy: [*rows, T], nats, of the policy under differentiation; only measured when entropy_coef is 0.
        old_logp: [*rows, T], the behaviour policy's, from the trainer's own scoring pass. None: the policy under
            differentiation has not moved since, so that its own values serve, and every ratio is 1.
        advantage: one a response ([*rows]) or one a token ([*rows, T]).
        mask: bool [*rows, T], the tokens that are trained.
        config: the objective.
        ref_logp: [*rows, T], of the reference policy; needed when beta > 0, only measured when beta is 0.
        sampler_logp: [*rows, T], as the sampler recorded them; needed with tis_cap or mis_cap, else only measured.
        max_len: static response budget in tokens, the divisor of 'fixed_length'.

    Returns:
        (LossSum, Metrics), scalars in fp32. The loss of a batch is `mean` of the merged LossSum.

    Raises:
        ValueError: beta > 0 without ref_logp, or tis_cap or mis_cap without sampler_logp.
    """
    if config.beta > 0 and ref_logp is None:
        raise ValueError(f"ref_logp=None; accepted: the reference's log-probabilities, as beta is {config.beta}")
    for name, cap in (("tis_cap", config.tis_cap), ("mis_cap", config.mis_cap)):
        if cap is not None and sampler_logp is None:
            raise ValueError(f"sampler_logp=None; accepted: the sampler's log-probabilities, as {name} is {cap}")
    stop = jax.lax.stop_gradient
    logp, entropy, old_logp, ref_logp, sampler_logp = (
        _fill(x, mask) for x in (logp, entropy, old_logp, ref_logp, sampler_logp)
    )
    old_logp = stop(logp if old_logp is None else old_logp)
    advantage = jnp.asarray(advantage, jnp.float32)
    if advantage.ndim < logp.ndim:
        advantage = advantage[..., None]
    advantage = stop(_fill(jnp.broadcast_to(advantage, logp.shape), mask))

    log_ratio = own_ratio = logp - old_logp
    if config.importance_level == "sequence":
        log_ratio = corrections.sequence_log_ratio(logp, old_logp, mask)
    ratio = jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO))
    clipped = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    token_loss = -jnp.minimum(ratio * advantage, clipped * advantage)
    moved = ratio_metrics(stop(log_ratio), advantage=advantage, mask=mask, config=config)
    sums, maxima = {**moved.sums, "entropy": _masked_sum(stop(entropy), mask)}, {**moved.maxima}
    maxima["max_abs_log_ratio"] = jnp.max(jnp.where(mask, jnp.abs(stop(own_ratio)), 0.0), initial=0.0)
    trained = mask
    if sampler_logp is not None:
        gap = jnp.where(mask, jnp.abs(old_logp - stop(sampler_logp)), 0.0)
        maxima["sampling/max_abs_log_ratio"] = jnp.max(gap, initial=0.0)
        sums["sampling/sampling_logp_difference/mean"] = _masked_sum(gap, mask)
    if config.tis_cap is not None:
        weights = corrections.truncated_importance(old_logp, sampler_logp, config.tis_cap, mask)
        token_loss = token_loss * weights
        sums["sampling/importance_sampling_ratio/mean"] = _masked_sum(weights, mask)
        sums["sampling/capped_fraction"] = _masked_sum(weights >= config.tis_cap, mask)
    if config.mis_cap is not None:
        within = corrections.within_ratio(old_logp, stop(sampler_logp), config.mis_cap, config.mis_level, mask)
        sums["sampling/masked_fraction"] = _masked_sum(~within, mask)
        trained = mask & within
    if config.entropy_coef > 0:
        token_loss = token_loss - config.entropy_coef * entropy
    if ref_logp is not None:
        kl = _kl(logp, stop(ref_logp), config.kl_estimator)
        sums["kl"] = _masked_sum(stop(kl), mask)
        if config.beta > 0:
            token_loss = token_loss + config.beta * kl
    return _aggregate(token_loss, trained, config.aggregation, max_len), Metrics(sums, maxima)


def ratio_metrics(
    log_ratio: Float[Array, "*rows T"],
    *,
    advantage: Float[Array, "*rows T"],
    mask: Bool[Array, "*rows T"],
    config: GRPOConfig,
) -> Metrics:
    """How far the policy has moved from the behaviour policy, over the masked tokens.

    Args:
        log_ratio: fp32 [*rows, T], of each token or of its sequence.
        advantage: fp32 [*rows, T]; its sign tells which bound is active.
        mask: bool [*rows, T].
        config: reads clip_low and clip_high.

    Returns:
        sums 'ratio/mean', 'clip_ratio/low_mean', 'clip_ratio/high_mean', 'clip_ratio/region_mean' (shares of tokens
        whose gradient the clip removes, below, above and in all), maximum 'ratio/max'.
    """
    ratio = jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO))
    low = (ratio < 1.0 - config.clip_low) & (advantage < 0)
    high = (ratio > 1.0 + config.clip_high) & (advantage > 0)
    return Metrics(
        sums={
            "ratio/mean": _masked_sum(ratio, mask),
            "clip_ratio/low_mean": _masked_sum(low, mask),
            "clip_ratio/high_mean": _masked_sum(high, mask),
            "clip_ratio/region_mean": _masked_sum(low | high, mask),
        },
        maxima={"ratio/max": jnp.max(jnp.where(mask, ratio, 0.0), initial=0.0)},
    )


def merge(a, b):
    """Joins two results of `member_loss`: (LossSum, Metrics) pairs, or either part alone."""
    if isinstance(a, Metrics):
        return Metrics(merge(a.sums, b.sums), jax.tree.map(jnp.maximum, a.maxima, b.maxima))
    if isinstance(a, tuple):
        return tuple(merge(x, y) for x, y in zip(a, b, strict=True))
    return jax.tree.map(jnp.add, a, b)


def mean(total: LossSum) -> Float[Array, ""]:
    """sum / count, and 0 where nothing was counted."""
    return jnp.where(total.count > 0, total.sum, 0.0) / jnp.maximum(total.count, 1.0)


def metric_values(metrics: Metrics) -> dict[str, Float[Array, ""]]:
    """The merged figures as scalars; a mean over nothing reads 0."""
    return {**{name: mean(value) for name, value in metrics.sums.items()}, **metrics.maxima}


def _fill(values, mask):
    """fp32 with 0 outside the mask: first half of the double where that keeps NaN out of the gradient."""
    return None if values is None else jnp.where(mask, values.astype(jnp.float32), 0.0)


def _masked_sum(values, mask):
    return LossSum(
        jnp.sum(jnp.where(mask, values.astype(jnp.float32), 0.0)), jnp.sum(mask, dtype=jnp.float32)
    )


def _kl(logp, ref_logp, estimator):
    """Estimate of KL(policy || reference) a token; both have zero gradient at equality."""
    difference = ref_logp - logp
    if estimator == "k2":
        return 0.5 * difference**2
    difference = jnp.minimum(difference, MAX_LOG_RATIO)
    return jnp.expm1(difference) - difference


def _aggregate(token_loss, mask, aggregation, max_len):
    """Sum and count of the rows; a row with an empty mask adds to neither."""
    row_sum = jnp.sum(jnp.where(mask, token_loss, 0.0), axis=-1)
    tokens = jnp.sum(mask, axis=-1, dtype=jnp.float32)
    if aggregation == "token_mean":
        return LossSum(jnp.sum(row_sum), jnp.sum(tokens))
    rows = jnp.sum(tokens > 0, dtype=jnp.float32)
    if aggregation == "sequence_mean":
        return LossSum(jnp.sum(row_sum / jnp.maximum(tokens, 1.0)), rows)
    return LossSum(jnp.sum(row_sum), rows * max_len)


def _check_choice(field, value, accepted):
    if value not in accepted:
        raise ValueError(f"{field}={value!r}; accepted: {', '.join(accepted)}")


def _check_number(field, value, accepted, holds):
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not holds(value):
        raise ValueError(f"{field}={value!r}; accepted: {accepted}")
