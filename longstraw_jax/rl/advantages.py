"""Group-relative advantages: a response against the other responses of its own prompt."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

SCALES = ("std", "none")
BASELINES = ("mean", "leave_one_out")


def check_group_size(group_size: int) -> None:
    """Refuses a group that cannot have a baseline, on the host.

    Raises:
        ValueError: fewer than two responses a prompt: the only reward is its own mean and every advantage 0.
    """
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 2:
        raise ValueError(
            f"group={group_size!r}; accepted: an integer of at least 2 "
            "(a response is judged against the others of its group)"
        )


def group_advantages(
    rewards: Float[Array, "N"],
    group_ids: Int[Array, "N"],
    *,
    num_groups: int,
    scale: Literal["std", "none"] = "std",
    baseline: Literal["mean", "leave_one_out"] = "mean",
) -> Float[Array, "N"]:
    """Advantage of every response within its group.

    Groups are told by id, so rows may come in any order and be sharded anywhere. Equal rewards give exactly
    0.0 (told by max - min: the fp32 mean of equal numbers is not always that number); with `scale="std"`
    no advantage exceeds sqrt(G) in size. Unscorable rows take no part in the baseline and get 0.0.

    GRPO (arXiv 2402.03300) is std + mean; Dr. GRPO (arXiv 2503.20783) none + mean; RLOO (arXiv 2402.14740)
    none + leave_one_out. The deviation has n - 1 in its denominator, as in TRL.

    Args:
        rewards: [N], taken as fp32; NaN or infinite where the response could not be scored.
        group_ids: int [N] in [0, num_groups); a row with any other id counts as unscorable.
        num_groups: static number of groups.
        scale: divide by the group's standard deviation, or not.
        baseline: mean of the group, or of the other members only.

    Returns:
        fp32 [N].

    Raises:
        ValueError: unknown scale or baseline.
    """
    if scale not in SCALES:
        raise ValueError(f"advantage_scale: {scale!r}; accepted: {', '.join(SCALES)}")
    if baseline not in BASELINES:
        raise ValueError(f"baseline: {baseline!r}; accepted: {', '.join(BASELINES)}")
    rewards = rewards.astype(jnp.float32)
    member = _membership(rewards, group_ids, num_groups)
    lowest, spread = _group_range(rewards, member)
    signal = spread > 0

    def group_sum(values):
        return _to_rows(jnp.sum(jnp.where(member, values[:, None], 0.0), axis=0), member)

    # Rewards are mapped to [0, 1] within their group first: neither a large common offset nor a tiny spread
    # can then cancel or underflow in the squares.
    unit = jnp.where(signal, rewards - lowest, 0.0) / jnp.where(signal, spread, 1.0)
    size = jnp.maximum(group_sum(jnp.ones_like(rewards)), 2.0)  # a spread needs two members
    centred = unit - group_sum(unit) / size
    deviation = jnp.sqrt(group_sum(centred**2) / (size - 1.0))
    if baseline == "leave_one_out":
        centred = centred * size / (size - 1.0)  # r - mean of the others
    advantage = centred / jnp.where(signal, deviation, 1.0) if scale == "std" else centred * spread
    return jnp.where(signal, advantage, 0.0)


def carries_signal(
    rewards: Float[Array, "N"], group_ids: Int[Array, "N"], *, num_groups: int
) -> Bool[Array, "N"]:
    """Rows whose reward says something: scorable, in a group whose rewards are not all equal.

    A member that sits exactly on its group's mean has advantage 0 and still carries signal, which is why
    this cannot be read off the advantages.

    Args:
        rewards: [N], NaN or infinite where unscorable.
        group_ids: int [N] in [0, num_groups).
        num_groups: static number of groups.

    Returns:
        bool [N].
    """
    rewards = rewards.astype(jnp.float32)
    _, spread = _group_range(rewards, _membership(rewards, group_ids, num_groups))
    return spread > 0


def _membership(rewards, group_ids, num_groups):
    """bool [N, num_groups], the scorable rows of each group.

    A table instead of segment sums and gathers: it is a few kilobytes, and it shards by rows under
    automatic and explicit mesh axes alike.
    """
    return jnp.isfinite(rewards)[:, None] & (group_ids[:, None] == jnp.arange(num_groups))


def _to_rows(per_group, member):
    """[num_groups] to [N]; 0 for a row that is in no group."""
    return jnp.sum(jnp.where(member, per_group, 0.0), axis=1)


def _group_range(rewards, member):
    """(lowest reward, max - min) of each row's group, both [N]; 0 for a row that is in no group."""
    highest = jnp.max(jnp.where(member, rewards[:, None], -jnp.inf), axis=0)
    lowest = jnp.min(jnp.where(member, rewards[:, None], jnp.inf), axis=0)
    return _to_rows(lowest, member), _to_rows(highest - lowest, member)
