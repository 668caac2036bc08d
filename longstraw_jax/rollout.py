"""The rollout: capture a prompt, sample its group, reward it, and score it for replay."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from longstraw_jax import replay, sampling, stopping
from longstraw_jax.model import choices
from longstraw_jax.model.choices import Choices
from longstraw_jax.phases import Clock
from longstraw_jax.prefix import refresh, residency
from longstraw_jax.prefix.refresh import RefreshPolicy
from longstraw_jax.rl import advantages as advantages_lib
from longstraw_jax.rl import masks, objectives
from longstraw_jax.types import Model, Params, PrefixState

MODES = ("frozen", "detached", "exact")
LEAST_TEMPERATURE = 1e-3  # logits over less leave fp32

RewardCall = Callable[[int, list[list[int]]], tuple[np.ndarray, list[Any]]]


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """What a transaction does; static.

    Attributes:
      mode: prefix-gradient mode, one of MODES (README).
      group: responses a prompt.
      slots: responses that decode at once, see `sampling.sample`; 0 for the whole group.
      max_new_tokens: response budget in tokens.
      stop: strings that end a response beside eos_ids.
      temperature, top_p, eos_ids: of sampling; log-probabilities everywhere are at this temperature.
      chunk: tokens a capture step.
      capacity: prompt tokens the pages have room for; prompts of any length up to it share compiled programs.
      keep_selection: `exact` only: what the capture selects is kept on the host (4 x index_topk bytes a token and
        full layer) and not selected again in the reverse pass.
      router_replay, selection_replay: the experts that the responses' tokens were routed to (R3, arXiv:2510.11370), and
        the keys that they selected, are recorded while sampling and held in replay and in the old policy's scores.
      updates: optimizer steps a rollout (TRL's num_iterations); ratios leave 1 from the second on.
      max_resamples: prompts that a rollout may take in the place of those whose rewards are all equal: DAPO's dynamic
        sampling (arXiv 2503.14476, section 3.2) with a bound, as verl's filter_groups and max_num_gen_batches.
      resident_bytes: of a device's memory, for the pages of prompts that stay resident; 0 for one prompt. In `exact`
        mode none is used by two steps.
      refresh: how stale a resident prompt may be; `detached` alone may use a stale one.
      objective: the loss.
    """

    eos_ids: tuple[int, ...]
    capacity: int
    mode: str = "detached"
    group: int = 8
    slots: int = 0
    stop: stopping.StopSequences | None = None
    max_new_tokens: int = 32
    temperature: float = 1.0
    top_p: float = 1.0
    chunk: int = 2048
    keep_selection: bool = False
    router_replay: bool = False
    selection_replay: bool = False
    updates: int = 1
    max_resamples: int = 0
    resident_bytes: int = 0
    refresh: RefreshPolicy = RefreshPolicy()
    objective: objectives.GRPOConfig = objectives.GRPOConfig()

    def __post_init__(self):
        check_mode(self.mode)
        advantages_lib.check_group_size(self.group)
        for field in ("max_new_tokens", "chunk", "updates", "capacity"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}; accepted: at least 1")
        for field in ("slots", "max_resamples", "resident_bytes"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field}={getattr(self, field)}; accepted: at least 0")
        if self.resident_bytes and self.mode == "exact":
            raise ValueError(
                f"resident_bytes={self.resident_bytes} with mode='exact', which captures at every step; accepted: 0"
            )
        if self.keep_selection and self.mode != "exact":
            raise ValueError(f"keep_selection=True with mode={self.mode!r}; accepted: with mode='exact'")
        if self.refresh.policy != "every_step" and self.mode != "detached":
            why = {"exact": "whose gradient is of a fresh prompt", "frozen": "whose prompt is never stale"}[self.mode]
            said = f"refresh.policy={self.refresh.policy!r} with mode={self.mode!r}, {why}"
            raise ValueError(f"{said}; accepted: 'every_step'")
        if not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature}; accepted: at least {LEAST_TEMPERATURE}, finite (greedy responses "
                "would all be alike)"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}; accepted: above 0, at most 1")

    @property
    def recorded(self) -> tuple[str, ...]:
        """Kinds of choices that are recorded while sampling, see model/choices.py."""
        asked = {"selections": self.selection_replay, "routes": self.router_replay}
        return tuple(kind for kind in choices.KINDS if asked[kind])

    @property
    def own_reference(self) -> bool:
        """Whether the reference policy has a prompt state of its own: a frozen prompt is the base's already."""
        return self.objective.beta > 0 and self.mode != "frozen"


def check_mode(mode: str) -> None:
    """Raises ValueError for anything but a supported prefix-gradient mode."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}; accepted: {' or '.join(map(repr, MODES))}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Group:
    """One prompt's responses, ready for replay: small host arrays, [G, T] (T padded to the mesh) and [G].

    old_logp is None where only one step follows the rollout: the replay's own values are the old ones then. ref_logp
    is None without a KL term. choices, [G, layers, 1, T, ..], are those that replay is held to.
    """

    inputs: Int[Array, "G T"]
    targets: Int[Array, "G T"]
    lengths: Int[Array, "G"]
    mask: Bool[Array, "G T"]
    advantages: Float[Array, "G"]
    old_logp: Float[Array, "G T"] | None
    sampler_logp: Float[Array, "G T"]
    ref_logp: Float[Array, "G T"] | None
    choices: Choices = choices.NONE


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A prompt's sampled group on the host: what the step log records.

    Attributes:
      number: of the prompt within its transaction, as the reward call was given it.
      carries_signal: whether the scorable rewards differ; otherwise every advantage is 0.
    """

    number: int
    prompt: np.ndarray
    responses: list[list[int]]
    rewards: np.ndarray
    advantages: np.ndarray
    truncated: np.ndarray
    events: list[Any]
    carries_signal: bool

    @property
    def tokens(self) -> int:
        """Prompt and response tokens; the prompt counts once for its whole group."""
        return self.prompt.size + sum(map(len, self.responses))


def resident(
    model: Model,
    config: PolicyConfig,
    base: Params,
    base_fingerprint: UInt[Array, "2"],
    adapters: Params | None,
    tokens: Int[np.ndarray, "S"],
    held: refresh.Resident | None,
    *,
    step: int = 0,
    progress: Callable[[int], None] | None = None,
) -> refresh.Resident:
    """The policy's resident state of a prompt, see `refresh.refresh`; a frozen prompt is the base policy's."""

    def score(prefix, probe):
        return probe_logprobs(model, config, base, adapters, prefix, int(tokens[-1]), probe)

    return refresh.refresh(
        model,
        base,
        base_fingerprint,
        None if config.mode == "frozen" else adapters,
        tokens,
        held,
        chunk=config.chunk,
        capacity=config.capacity,
        step=step,
        progress=progress,
        record=("selections",) if config.keep_selection else (),
        policy=config.refresh,
        score=score,
    )


def most_residents(model: Model, config: PolicyConfig) -> int:
    """Prompts that stay resident at once. Raises ValueError where config.resident_bytes is too small for the least."""
    least = 2 if config.own_reference else 1
    return residency.most(model, config.capacity, config.chunk, config.resident_bytes, least=least)


def residents(
    model: Model,
    config: PolicyConfig,
    base: Params,
    base_fingerprint: UInt[Array, "2"],
    adapters: Params | None,
    tokens: Int[np.ndarray, "S"],
    held: residency.Residents,
    *,
    step: int = 0,
    progress: Callable[[int], None] | None = None,
    in_use: PrefixState | None = None,
) -> residency.Residents:
    """The prompts on the devices, within config.resident_bytes, with the policy's state of this one as the last.

    Args:
      held, in_use: as in `residency.acquire`.
    """

    def take(mine):
        args = (model, config, base, base_fingerprint, adapters, tokens, mine)
        return resident(*args, step=step, progress=progress)

    plain, count = config.mode == "frozen", most_residents(model, config)
    return residency.acquire(held, tokens, plain, count, take, in_use=in_use)


def reference_config(config: PolicyConfig) -> PolicyConfig:
    """Of the reference's prompt: the base policy all through, which captures without adapters and chooses itself."""
    return dataclasses.replace(config, mode="frozen", keep_selection=False, refresh=RefreshPolicy())


def with_reference(
    model: Model,
    config: PolicyConfig,
    base: Params,
    base_fingerprint: UInt[Array, "2"],
    held: residency.Residents,
    *,
    step: int,
    progress: Callable[[int], None] | None = None,
) -> tuple[residency.Residents, PrefixState | None]:
    """The prompts on the devices, and the reference's state of the last one's prompt if it is to stay resident.

    The base never changes, so that it serves every group of the prompt. Without config.resident_bytes it does not
    stay, and `scored` captures it for the group.
    """
    if not (config.own_reference and config.resident_bytes):
        return held, None
    policys = held[-1]
    args = (model, reference_config(config), base, base_fingerprint, None, policys.tokens, held)
    held = residents(*args, step=step, progress=progress, in_use=policys.prefix)
    return residency.used(held, policys), held[-1].prefix


def probe_logprobs(
    model: Model,
    config: PolicyConfig,
    base: Params,
    adapters: Params | None,
    prefix: PrefixState,
    boundary: int,
    tokens: Int[np.ndarray, "n"],
) -> Float[np.ndarray, "n"]:
    """Log-probabilities of a probe's tokens, at most config.refresh.probe_tokens, after the resident prompt; fp32."""
    padded = replay.pad_length(min(config.refresh.probe_tokens, config.max_new_tokens), model.devices)
    batch = replay.member_inputs(boundary, [tokens.tolist()], padded)
    logp, _ = replay.score(model, base, adapters, prefix, *batch, config.temperature)
    return np.asarray(logp)[0, : tokens.size]


def probed(
    model: Model,
    config: PolicyConfig,
    base: Params,
    adapters: Params,
    held: refresh.Resident,
    responses: list[list[int]],
    *,
    step: int,
) -> refresh.Resident:
    """The resident prompt with a probe, if the refresh policy reads one and the prompt was captured at this step.

    Args:
      adapters: those that captured it.
      responses: sampled from it; the probe is the beginning of the longest.
    """
    if config.refresh.policy != "drift" or held.captured_at != step:
        return held
    tokens = np.asarray(max(responses, key=len)[: config.refresh.probe_tokens], np.int32)
    logp = probe_logprobs(model, config, base, adapters, held.prefix, int(held.tokens[-1]), tokens)
    return dataclasses.replace(held, probe=refresh.Probe(tokens, logp))


def sample(
    model: Model, config: PolicyConfig, base: Params, adapters: Params, held: refresh.Resident, key: Key[Array, ""]
) -> sampling.Samples:
    """A group of responses to the resident prompt, on the host."""
    samples = sampling.sample(
        model,
        base,
        adapters,
        held.prefix,
        int(held.tokens[-1]),
        key,
        group=config.group,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        eos_ids=config.eos_ids,
        record=config.recorded,
        slots=config.slots,
        stop_ids=config.stop.ids if config.stop else (),
    )
    return stopping.cut(jax.tree.map(np.asarray, samples), config.stop)


def responses_of(samples: sampling.Samples) -> list[list[int]]:
    """Token ids of each response, its eos or stop sequence included."""
    return [row[:n].tolist() for row, n in zip(samples.tokens, samples.lengths, strict=True)]


def unscored_group(
    model: Model, config: PolicyConfig, boundary: int, samples: sampling.Samples, rewards: Float[np.ndarray, "G"]
) -> tuple[Group, bool]:
    """The group with its advantages and masks, and whether its rewards carry a signal.

    Args:
      boundary: the prompt's last token.
      samples: on the host.
      rewards: fp32, NaN where unscorable.

    Raises:
      ValueError: choices were recorded for more or fewer tokens than a member's inputs.
    """
    objective, padded = config.objective, replay.pad_length(config.max_new_tokens, model.devices)
    inputs, targets, lengths = replay.member_inputs(boundary, responses_of(samples), padded)
    rewards, ids = jnp.asarray(rewards, jnp.float32), jnp.zeros((config.group,), jnp.int32)
    advantages = advantages_lib.group_advantages(
        rewards, ids, num_groups=1, scale=objective.advantage_scale, baseline=objective.baseline
    )
    signal = advantages_lib.carries_signal(rewards, ids, num_groups=1)
    mask = objectives.loss_mask(
        masks.response_mask(jnp.asarray(lengths), padded), truncated=samples.truncated, signal=signal, config=objective
    )
    sampler_logp = np.zeros(inputs.shape, np.float32)
    sampler_logp[:, : config.max_new_tokens] = samples.logprobs
    held = choices.of_members(samples.choices, lengths, padded)
    group = Group(inputs, targets, lengths, mask, advantages, None, sampler_logp, None, held)
    return jax.tree.map(np.asarray, group), bool(signal.any())


def roll_out(
    model: Model,
    config: PolicyConfig,
    base: Params,
    adapters: Params,
    held: refresh.Resident,
    number: int,
    reward: RewardCall,
    key: Key[Array, ""],
    clock: Clock,
) -> tuple[Group, Rollout]:
    """Samples and rewards the group of the resident prompt; the group is not scored yet.

    Args:
      number: of the prompt within its transaction.
    """
    with clock.phase("sample"):
        samples = sample(model, config, base, adapters, held, key)
    with clock.phase("reward"):
        responses = responses_of(samples)
        rewards, events = reward(number, responses)
    group, signal = unscored_group(model, config, int(held.tokens[-1]), samples, rewards)
    told = (rewards, np.asarray(group.advantages), samples.truncated, list(events), signal)
    return group, Rollout(number, held.tokens, responses, *told)


def scored(
    model: Model,
    config: PolicyConfig,
    base: Params,
    base_fingerprint: UInt[Array, "2"],
    adapters: Params,
    held: refresh.Resident,
    group: Group,
    *,
    reference: PrefixState | None = None,
    progress: Callable[[int], None] | None = None,
) -> Group:
    """The group with the old and the reference log-probabilities that its objective reads.

    Args:
      reference: from `with_reference`; where there is none the reference's prompt is captured for this group.
      progress: of the reference's capture, see `capture.capture`; a group is scored in one program.
    """
    batch = (group.inputs, group.targets, group.lengths, config.temperature)
    old_logp = ref_logp = None
    if config.updates > 1:
        old_logp, _ = replay.score(model, base, adapters, held.prefix, *batch, group.choices)
    if config.objective.beta > 0:
        if reference is None and config.own_reference:
            args = (model, reference_config(config), base, base_fingerprint, None, held.tokens, None)
            reference = resident(*args, progress=progress).prefix
        ref_logp, _ = replay.score(model, base, None, held.prefix if reference is None else reference, *batch)
    return jax.tree.map(np.asarray, dataclasses.replace(group, old_logp=old_logp, ref_logp=ref_logp))
