"""Gradient parity: replay against the captured prompt beside autodiff over the whole sequence, in figures.

Both sides go through the real objective, once at ratio 1 and once with tokens that the clip silences, and through one
optimizer step. A control says how far apart the modes' gradients truly are, so that agreement means something.

Gradients jump where a discrete choice (a selected key, a chosen expert) changes. With thousands of prompt tokens,
round-off between chunked capture and one pass decides such a choice the other way for some token. So the baseline runs
twice, on its own choices and held to those of capture and replay: parity is agreement in the second comparison, and
bounds on the share of choices in which the first differs and on how far from a tie those are. Capture's choices are
what the second is held to, so that the bounds alone tell a wrong choice from round-off.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from longstraw_jax import exact_gradient, forward, lora, replay, rollout, sharding, train
from longstraw_jax.config import ModelConfig
from longstraw_jax.evidence import comparison, flips
from longstraw_jax.evidence.comparison import Figures
from longstraw_jax.model import choices, decoder
from longstraw_jax.model.choices import Choices
from longstraw_jax.prefix import capture, refresh
from longstraw_jax.rl import advantages, masks, objectives
from longstraw_jax.types import Model, Params, PrefixState

CASES = ("ratio_1", "clipping")
REWARDS = (1.0, 0.0, 0.25)  # of the group: advantages of both signs, none of them zero
B_STD = 0.02  # of the adapters' B: away from zero, where A has no gradient
CLIPPED_SHARE = 0.4  # tokens moved past a clip bound in the "clipping" case
SCORED_TOKENS = 4096  # longest sequence whose index scores [T, T] are kept, for the gaps of flipped choices
CLIPPED_BY, INSIDE_BY = 0.5, 0.1  # nats past the default bounds (0.18 to 0.25), and well within them


@dataclasses.dataclass(frozen=True)
class Side:
    """A policy on its devices: the mesh under test, or the single device of the baseline."""

    model: Model
    base: Params
    adapters: Params


def seeded_adapters(model: Model, seed: int) -> Params:
    """Adapters away from their zero start, A drawn as always and B normal; on the host."""
    rng = np.random.default_rng(seed)

    def moved(path, x):
        b = path[-1].key == "b"
        return (B_STD * rng.standard_normal(x.shape)).astype(np.float32) if b else np.asarray(x)

    return jax.tree_util.tree_map_with_path(moved, lora.init_adapters(model.config, model.lora, seed))


def place(side: Side, mesh: jax.sharding.Mesh | None) -> Side:
    """The same policy, bit for bit, on another mesh; what lies there already is not copied."""
    config = side.model.config
    model = decoder.make_model(config, mesh=mesh, lora=side.model.lora)

    def put(x, spec):
        target = sharding.named(mesh, spec)
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(target, x.ndim):
            return x
        return jax.device_put(np.asarray(x), target)  # by the host: resharding on devices compiles a program a shape

    return Side(
        model,
        jax.tree.map(put, side.base, decoder.param_specs(config)),
        jax.tree.map(put, side.adapters, lora.adapter_specs(config, model.lora)),
    )


def make_groups(
    side: Side,
    config: rollout.PolicyConfig,
    prefix: PrefixState,
    boundary: int,
    responses: Sequence[Sequence[int]],
    seed: int,
) -> tuple[dict[str, rollout.Group], Choices]:
    """The group of ragged responses as replay takes it, in both CASES, and replay's choices [G, layers, 1, T, ..].

    "ratio_1": the behaviour policy is the policy. "clipping": its log-probabilities are moved, so that about
    CLIPPED_SHARE of the tokens lie past the bound that is active for their advantage and the others stay inside.
    """
    padded = replay.pad_length(config.max_new_tokens, side.model.devices)
    inputs, targets, lengths = replay.member_inputs(boundary, responses, padded)
    mask = np.asarray(masks.response_mask(jnp.asarray(lengths), padded))
    rewards = jnp.asarray(REWARDS[: len(responses)], jnp.float32)
    advantage = np.asarray(
        advantages.group_advantages(
            rewards,
            jnp.zeros(rewards.shape, jnp.int32),
            num_groups=1,
            scale=config.objective.advantage_scale,
            baseline=config.objective.baseline,
        )
    )
    args = (side.model, side.base, side.adapters, prefix, inputs, targets, lengths, config.temperature)
    logp, _, chosen = jax.device_get(replay.score_and_choices(*args, record=choices.KINDS))
    logp = np.where(mask, logp, 0.0).astype(np.float32)
    rng = np.random.default_rng(seed)
    clipped = rng.random(logp.shape) < CLIPPED_SHARE
    past = -np.sign(advantage)[:, None] * CLIPPED_BY  # a gain is clipped above the ratio 1, a loss below
    moved = logp + np.where(clipped, past, rng.uniform(-INSIDE_BY, INSIDE_BY, logp.shape)).astype(np.float32)
    groups = {
        case: rollout.Group(inputs, targets, lengths, mask, advantage, old, old, None)
        for case, old in zip(CASES, (logp, np.where(mask, moved, 0.0)), strict=True)
    }
    return groups, chosen


def replay_gradient(
    side: Side, config: rollout.PolicyConfig, resident: refresh.Resident, group: rollout.Group
) -> tuple[Params, train.Total]:
    """The objective's gradient by replaying each member against the captured prompt, and the sums it comes from.

    With config.mode "exact" the prompt's own term is in it.

    Returns:
      Gradients of the mean loss, fp32 on the host, and what train.apply_update takes.
    """
    mesh = side.model.mesh
    copies = lora.per_device(side.adapters, mesh)
    exact = config.mode == "exact"
    page_grads = exact_gradient.zero_page_grads(side.model, resident.prefix) if exact else None
    args = (side.model, config, side.base, copies)
    total, page_grads = train.add_group(*args, resident.prefix, group, None, page_grads)
    if exact:
        total = train.add_prompt(*args, resident, page_grads, total)
    grads, count = jax.device_get((lora.finalise(total.grads, mesh), total.loss.count))
    return _divided(grads, count), total


@functools.partial(jax.jit, static_argnames=("model", "config"))
def _full_member(model, config, base, adapters, ids, member, gate, detach, held):
    response = member.mask.shape[0]

    def loss_of(adapters):
        logp, entropy = forward.logprobs(
            model, base, adapters, ids, config.temperature, gate=gate[None], detach=detach[None], held=held
        )
        loss, _ = objectives.member_loss(
            logp[-response:],
            entropy[-response:],
            old_logp=member.old_logp,
            advantage=member.advantages,
            mask=member.mask,
            config=config.objective,
            sampler_logp=member.sampler_logp,
            max_len=config.max_new_tokens,
        )
        return loss.sum, loss

    return jax.grad(loss_of, has_aux=True)(adapters)


def full_gradient(
    side: Side,
    config: rollout.PolicyConfig,
    prompt: Int[np.ndarray, "S"],
    group: rollout.Group,
    *,
    gate: Bool[np.ndarray, "S+T"],
    detach: Bool[np.ndarray, "S+T"],
    held: Sequence[Choices] | None = None,
) -> tuple[Params, Float[Array, ""]]:
    """The objective's gradient by autodiff over each whole sequence, prompt and response, on one device.

    Args:
      prompt: with its boundary token.
      gate: tokens that see the adapters.
      detach: tokens whose latents carry no gradient.
      held: each member's choices [layers, 1, S + T, ..] to take, None to choose.

    Returns:
      Gradients of the mean loss, fp32 on the host, and that loss.
    """
    total, loss = None, objectives.LossSum(jnp.float32(0), jnp.float32(0))
    for g in range(group.inputs.shape[0]):
        member = jax.tree.map(lambda x, g=g: x[g], group)
        args = (sequence(prompt, member), member, gate, detach, choices.NONE if held is None else held[g])
        grads, one = _full_member(side.model, config, side.base, side.adapters, *args)
        grads = jax.device_get(grads)
        total = grads if total is None else jax.tree.map(np.add, total, grads)
        loss = objectives.merge(loss, one)
    return _divided(total, np.asarray(loss.count)), objectives.mean(loss)


def sequence(prompt: Int[np.ndarray, "S"], member: rollout.Group) -> Int[np.ndarray, "S+T"]:
    """Prompt and response of one member."""
    return np.concatenate([prompt, member.targets]).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("model", "collect"))
def _choose(model, base, adapters, ids, gate, collect):
    options = dict(record=choices.KINDS, gate=gate[None], collect=collect)
    return forward.forward_and_choices(model, base, adapters, ids[None], **options)[1:]


def full_choices(
    side: Side, ids: Int[np.ndarray, "S+T"], gate: Bool[np.ndarray, "S+T"]
) -> tuple[Choices, dict[str, flips.Scores] | None]:
    """What one pass over the whole sequence chooses, on the host, and the scores it ranks up to SCORED_TOKENS."""
    config, collect = side.model.config, ids.size <= SCORED_TOKENS
    layers, chosen = jax.device_get(_choose(side.model, side.base, side.adapters, ids, gate, collect))
    return choices.widened(chosen, config.index_topk), flips.scores_of(config, side.base, layers) if collect else None


def replayed_choices(config: ModelConfig, prompt: Choices, member: Choices) -> Choices:
    """Choices of capture [.., S - 1, ..] and of one member's replay [.., T, ..] as those of the whole sequence.

    The last token's, which no log-probability is read from, are -1.
    """
    last = jax.tree.map(lambda ids: np.full_like(ids[:, :, :1], -1), prompt)
    parts = [prompt, member, last]
    counts = [jax.tree.leaves(part)[0].shape[2] for part in parts]
    return choices.joined(parts, counts, config.index_topk)


def _divided(tree, count):
    return jax.tree.map(lambda x: x / count, tree)


@functools.partial(jax.jit, static_argnames="optimizer")
def _first_step(optimizer, adapters, grads):
    """Adapters after the optimizer's step from fresh moments."""
    updates, _ = optimizer.update(grads, optimizer.init(adapters), adapters)
    return optax.apply_updates(adapters, updates)


def mode_masks(mode: str, prompt_tokens: int, tokens: int) -> dict[str, Bool[np.ndarray, "tokens"]]:
    """`gate` and `detach` of the full-sequence pass that a mode equals; "exact" drops nothing."""
    resident = np.arange(tokens) < prompt_tokens - 1  # the boundary token's own path is differentiated
    return {
        "gate": ~resident if mode == "frozen" else np.ones(tokens, bool),
        "detach": resident if mode == "detached" else np.zeros(tokens, bool),
    }


@dataclasses.dataclass(frozen=True)
class Replayed:
    """A policy's captured prompt and its group in every case, what either side chooses, and the baselines so far.

    Attributes:
      held: each member's choices [layers, 1, S + T, ..] of capture and replay.
      own: the baseline's, on its own.
      flipped: where they differ, see flips.count: of the prompt once and of every response.
      baseline: (mode, case, whether held) -> gradients and loss of the whole sequences.
    """

    resident: refresh.Resident
    groups: dict[str, rollout.Group]
    held: list[Choices]
    own: list[Choices]
    flipped: dict[str, dict[int, Figures]]
    baseline: Callable[[str, str, bool], tuple[Params, Float[Array, ""]]]


def replay_policy(
    mode: str,
    wide: Side,
    single: Side,
    config: rollout.PolicyConfig,
    prompt: Int[np.ndarray, "S"],
    responses: Sequence[Sequence[int]],
    seed: int,
) -> Replayed:
    """The policy of a mode on `wide` ("detached" and "exact" train the same one), and its baseline on `single`.

    Args:
      wide, single: the same policy on the mesh and on one device.
      config: its `mode` is not read.

    Raises:
      ConfigError: the prompt is longer than the model's positions.
    """
    rollout.check_mode(mode)
    architecture, kept = wide.model.config, []
    prefix = capture.capture(
        wide.model,
        wide.base,
        None if mode == "frozen" else wide.adapters,
        prompt[:-1],
        chunk=config.chunk,
        fingerprint=jnp.zeros((2,), jnp.uint32),  # nobody else sees this prefix
        record=choices.KINDS,
        keep=lambda chosen: kept.append(jax.device_get(chosen)),
    )
    groups, replayed = make_groups(wide, config, prefix, int(prompt[-1]), responses, seed)
    counts = [n for _, n, _ in capture.chunk_ids(wide.model, prompt[:-1], config.chunk)]
    captured = choices.joined(kept, counts, architecture.index_topk)
    held = [
        replayed_choices(architecture, captured, jax.tree.map(lambda x, g=g: x[g], replayed))
        for g in range(len(responses))
    ]
    own, flipped = _own_choices(single, mode, prompt, groups[CASES[0]], held)

    @functools.cache
    def baseline(mode, case, is_held):
        group = groups[case]
        masked = mode_masks(mode, prompt.size, prompt.size + group.inputs.shape[1])
        return full_gradient(single, config, prompt, group, **masked, held=held if is_held else own)

    return Replayed(refresh.Resident(prompt, prefix, captured_at=0), groups, held, own, flipped, baseline)


def measure_mode(
    mode: str,
    replayed: Replayed,
    wide: Side,
    single: Side,
    config: rollout.PolicyConfig,
    optimizer: optax.GradientTransformation,
    seed: int,
) -> dict[str, Figures]:
    """Replay on `wide` beside the whole-sequence gradient on `single`, per case.

    Args:
      mode: one of rollout.MODES, whose policy `replayed` is.
      optimizer: of the one step from fresh moments.

    Returns:
      case -> gradient and step with the baseline held to capture's and replay's choices (see `compare`; the step's are
      differences of adapters), free: the gradient with the baseline on its own choices, loss_found, loss_wanted (held),
      clipped_fraction, step_taken and, unless "frozen", control: the detached baseline beside the true full gradient.
    """
    config = dataclasses.replace(config, mode=mode)
    model, targets = wide.model, comparison.tensor_targets(wide.model)
    state = dataclasses.replace(train.init_state(model, optimizer, seed), adapters=wide.adapters)
    results = {}
    for case, group in replayed.groups.items():
        found, total = replay_gradient(wide, config, replayed.resident, group)
        after, info = train.apply_update(model, optimizer, state, total)
        wanted, loss = replayed.baseline(mode, case, True)
        # Adapters after the step, less what both started from.
        before, *stepped = jax.device_get(
            (single.adapters, after.adapters, _first_step(optimizer, single.adapters, wanted))
        )
        moved = [jax.tree.map(np.subtract, new, before) for new in stepped]
        metrics = objectives.metric_values(total.metrics)
        results[case] = {
            "gradient": comparison.compare(found, wanted, targets),
            "step": comparison.compare(*moved, targets),
            "free": comparison.compare(found, replayed.baseline(mode, case, False)[0], targets),
            "loss_found": float(objectives.mean(total.loss)),
            "loss_wanted": float(loss),
            "clipped_fraction": float(metrics["clip_ratio/region_mean"]),
            "step_taken": bool(info["taken"]),
        }
        if mode != "frozen":
            sides = (replayed.baseline(name, case, True)[0] for name in ("detached", "exact"))
            results[case]["control"] = comparison.compare(*sides, targets)
    return results


def _own_choices(single, mode, prompt, group, held):
    """The baseline's own choices of every member, and how `held` differ."""
    model, resident = single.model.config, prompt.size - 1
    own, flipped = [], None
    for g, theirs in enumerate(held):
        ids = sequence(prompt, jax.tree.map(lambda x, g=g: x[g], group))
        chosen, scores = full_choices(single, ids, mode_masks(mode, prompt.size, ids.size)["gate"])
        own.append(chosen)
        first = resident if g else 0  # the prompt is every member's
        parts = [choices.rows(x, first, resident + int(group.lengths[g])) for x in (theirs, chosen)]
        if scores is not None:
            scores = {kind: {i: x[first:] for i, x in layers.items()} for kind, layers in scores.items()}
        flipped = flips.add(flipped, flips.count(model, *parts, scores, start=first))
    return own, flipped
