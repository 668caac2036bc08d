"""The transaction: a rollout, replay of each member, one reduction over the mesh, one optimizer step."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key, UInt

from longstraw_jax import exact_gradient, fingerprint, lora, replay, rollout, sharding
from longstraw_jax.phases import Clock
from longstraw_jax.prefix import refresh, residency
from longstraw_jax.rl import objectives
from longstraw_jax.rollout import Group, PolicyConfig, RewardCall, Rollout
from longstraw_jax.types import Model, Params, PrefixState


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW on the adapters, gradients clipped by their global norm; only B matrices decay."""

    learning_rate: float = 1e-4
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self):
        for field in ("learning_rate", "eps", "max_grad_norm"):
            if not 0 < getattr(self, field) < math.inf:
                raise ValueError(f"optimizer.{field}={getattr(self, field)}; accepted: above 0, finite")
        for field in ("b1", "b2"):
            if not 0 <= getattr(self, field) < 1:
                raise ValueError(f"optimizer.{field}={getattr(self, field)}; accepted: 0 to below 1")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optimizer.weight_decay={self.weight_decay}; accepted: 0 or more, finite")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What an optimizer step changes. `skipped` counts steps left out."""

    adapters: Params
    opt_state: optax.OptState
    step: Int[Array, ""]
    skipped: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Total:
    """Sums over the members replayed so far; gradients are per device (lora.per_device)."""

    grads: Params
    loss: objectives.LossSum
    metrics: objectives.Metrics


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What one optimizer step did, on the host.

    Attributes:
      dropped: groups without signal whose place other prompts took; told by the first step after a rollout alone.
      prefix_age: optimizer steps since the oldest prompt's capture.
      captures: of the policy's prompts, without those of the reference.
      drift: the largest of the stale prompts taken, see refresh.Drift; None where none was measured.
    """

    rollouts: list[Rollout]
    dropped: list[Rollout]
    loss_sum: float
    loss_count: float
    grad_norm: float
    nonfinite: int
    skip_reason: str | None
    metrics: dict[str, float]
    seconds: dict[str, float]
    prefix_age: int
    adapter_fingerprint: str
    captures: int
    drift: refresh.Drift | None


@functools.cache
def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """See OptimizerConfig. One object a configuration, because compiled steps are told apart by it."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            config.learning_rate,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=lora.weight_decay_mask,
        ),
    )


def state_shardings(model: Model, optimizer: optax.GradientTransformation) -> TrainState:
    """Where each array of the state lies."""
    specs = lora.adapter_specs(model.config, model.lora)
    shapes = lora.adapter_shapes(model.config, model.lora)
    opt_state = optax.tree_map_params(
        optimizer,
        lambda _, spec: spec,
        jax.eval_shape(optimizer.init, shapes),
        specs,
        transform_non_params=lambda _: PartitionSpec(),
    )
    whole = PartitionSpec()
    return jax.tree.map(
        lambda spec: sharding.named(model.mesh, spec),
        TrainState(specs, opt_state, whole, whole),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def init_state(model: Model, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """New adapters (a zero update), fresh moments, step 0; each array where it stays."""
    return fresh_state(model, optimizer, lora.init_adapters(model.config, model.lora, seed, mesh=model.mesh))


@functools.partial(jax.jit, static_argnames=("model", "optimizer"))
def fresh_state(model: Model, optimizer: optax.GradientTransformation, adapters: Params) -> TrainState:
    """The state before the first step."""
    state = TrainState(adapters, optimizer.init(adapters), jnp.int32(0), jnp.int32(0))
    return jax.tree.map(jax.lax.with_sharding_constraint, state, state_shardings(model, optimizer))


@functools.partial(jax.jit, static_argnames=("model", "objective", "max_len"), donate_argnames="page_grads")
def member_gradient(
    model: Model,
    objective: objectives.GRPOConfig,
    max_len: int,
    base: Params,
    adapters: Params,
    prefix: PrefixState,
    member: Group,
    temperature: Float[Array, ""] | float,
    page_grads: exact_gradient.PageGrads | None = None,
) -> tuple[Total, exact_gradient.PageGrads | None]:
    """Replays one member: its gradients, loss and metrics, and the gradient pages with its own added (donated).

    Args:
      adapters: from lora.per_device.
      member: one row of a Group.
    """

    def loss_of(adapters, sinks):
        row, held = (member.inputs, member.targets, member.lengths, temperature), member.choices
        if sinks is None:
            logp, entropy = replay.member_logprobs(model, base, adapters, prefix, *row, per_device=True, held=held)
        else:
            args = (model, base, adapters, prefix, sinks, *row)
            logp, entropy, sinks = replay.member_logprobs_collecting(*args, held=held)
        loss, metrics = objectives.member_loss(
            logp,
            entropy,
            old_logp=member.old_logp,
            advantage=member.advantages,
            mask=member.mask,
            config=objective,
            ref_logp=member.ref_logp,
            sampler_logp=member.sampler_logp,
            max_len=max_len,
        )
        return (loss.sum, sinks), (loss, metrics)

    (value, _), pull, (loss, metrics) = jax.vjp(loss_of, adapters, page_grads, has_aux=True)
    grads, page_grads = pull((jnp.ones_like(value), page_grads))
    return Total(grads, loss, metrics), page_grads


@functools.partial(jax.jit, donate_argnums=0)
def add_totals(total: Total, one: Total) -> Total:
    """Their sum; `total` is donated."""
    return Total(
        jax.tree.map(jnp.add, total.grads, one.grads),
        objectives.merge(total.loss, one.loss),
        objectives.merge(total.metrics, one.metrics),
    )


def add_group(
    model: Model,
    config: PolicyConfig,
    base: Params,
    adapters: Params,
    prefix: PrefixState,
    group: Group,
    total: Total | None,
    page_grads: exact_gradient.PageGrads | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> tuple[Total, exact_gradient.PageGrads | None]:
    """Replays every member in turn and adds its gradients, loss and metrics; one member's graph is alive at a time.

    Args:
      adapters: from lora.per_device.
      total: what came before, None for nothing. It is donated.
      page_grads: for `exact`, gradient pages to which every member adds. They are donated.
      progress: called with the number of members done after each, once the devices are through with it.
    """
    for g in range(group.inputs.shape[0]):
        member = jax.tree.map(lambda x, g=g: x[g], group)
        args = (base, adapters, prefix, member, config.temperature, page_grads)
        one, page_grads = member_gradient(model, config.objective, config.max_new_tokens, *args)
        total = one if total is None else add_totals(total, one)
        if progress is not None:
            jax.block_until_ready(total)
            progress(g + 1)
    return total, page_grads


def add_prompt(
    model: Model,
    config: PolicyConfig,
    base: Params,
    adapters: Params,
    resident: refresh.Resident,
    page_grads: exact_gradient.PageGrads,
    total: Total,
    *,
    progress: Callable[[int], None] | None = None,
) -> Total:
    """Adds the prompt's own term, for `exact`: one reverse pass for all members of `page_grads`.

    Args:
      adapters: from lora.per_device.
      page_grads, total: from add_group. They are donated.
      progress: see `exact_gradient.exact_prefix_vjp`.
    """
    grads = exact_gradient.exact_prefix_vjp(
        model,
        base,
        adapters,
        resident.prefix,
        resident.tokens[:-1],
        page_grads,
        total.grads,
        chunk=config.chunk,
        held=resident.choices,
        progress=progress,
    )
    return dataclasses.replace(total, grads=grads)


@functools.partial(jax.jit, static_argnames=("model", "optimizer"))
def apply_update(
    model: Model, optimizer: optax.GradientTransformation, state: TrainState, total: Total
) -> tuple[TrainState, dict[str, Array]]:
    """Finalises the gradients over the mesh, divides by the global count and takes one optimizer step.

    A non-finite gradient or loss, or a batch with nothing to train on, leaves adapters and moments as they are and
    counts in `skipped`.

    Returns:
      The state, and grad_norm (before clipping), nonfinite (entries), finite, taken.
    """
    count = total.loss.count
    grads = lora.finalise(total.grads, model.mesh)
    grads = jax.tree.map(lambda g: g / jnp.where(count > 0, count, 1.0), grads)
    nonfinite = sum(jnp.sum(~jnp.isfinite(g), dtype=jnp.float32) for g in jax.tree.leaves(grads))
    finite = (nonfinite == 0) & jnp.isfinite(total.loss.sum)
    take = finite & (count > 0)
    norm = optax.tree.norm(grads)
    # One NaN would reach every moment through the global norm, so the update sees zeros and is then discarded.
    safe = jax.tree.map(lambda g: jnp.where(take, g, 0.0), grads)
    updates, opt_state = optimizer.update(safe, state.opt_state, state.adapters)
    new = TrainState(
        optax.apply_updates(state.adapters, updates),
        opt_state,
        state.step + 1,
        state.skipped + (~take).astype(jnp.int32),
    )
    old = dataclasses.replace(state, step=new.step, skipped=new.skipped)
    kept = jax.tree.map(lambda n, o: jnp.where(take, n, o), new, old)
    # The same placement every step, so that nothing compiles twice.
    kept = jax.tree.map(jax.lax.with_sharding_constraint, kept, state_shardings(model, optimizer))
    return kept, {"grad_norm": norm, "nonfinite": nonfinite, "finite": finite, "taken": take}


def transaction(
    model: Model,
    config: PolicyConfig,
    optimizer: optax.GradientTransformation,
    base: Params,
    base_fingerprint: UInt[Array, "2"],
    state: TrainState,
    prompts: Sequence[np.ndarray],
    reward: RewardCall,
    key: Key[Array, ""],
    *,
    spare: Callable[[int], np.ndarray] | None = None,
    held: residency.Residents = (),
    progress: Callable[[int], None] | None = None,
    between: Callable[[], None] | None = None,
) -> tuple[TrainState, list[StepReport], residency.Residents]:
    """One rollout of a group a prompt and `config.updates` optimizer steps on it.

    Prompts are taken one after the other, so that one prompt (or as many as config.resident_bytes holds) and one
    member's graph are on the devices at a time, whatever their number. (With a KL term outside `frozen` mode the
    reference's own capture of the prompt joins one prompt while the group is scored, and is one of several.) Their
    gradients add up to one step.

    With config.max_resamples a group whose rewards are all equal is dropped before it is scored, and a further prompt
    takes its place, at most so many times a rollout; after that groups without signal stay as they come.

    Args:
      prompts: token ids [S] of each prompt, the boundary token included.
      reward: (prompt number, responses) -> rewards [G] fp32 with NaN for unscorable, and events to log.
      key: of this transaction.
      spare: the further prompt of a number from len(prompts) on, each asked for once and in order; needed with
        config.max_resamples.
      held: the prompts left on the devices by the transaction before; used up, see residency.py.
      progress: called within the long phases: after each chunk of a capture (the reference's too) and of the reverse
        pass with the tokens done, after each replayed member with the members done.
      between: called before each phase. What this or `progress` raises ends the transaction, and `state` is as it was:
        but for `held` nothing that was given is used up.

    Returns:
      The state, one report an optimizer step, and the prompts left on the devices, the last one used last.
    """
    if config.max_resamples and spare is None:
        raise ValueError(f"spare=None with max_resamples={config.max_resamples}; accepted: a source of further prompts")
    groups: list[Group] = []
    rollouts: list[Rollout] = []
    dropped: list[Rollout] = []
    reports: list[StepReport] = []

    def capture(tokens):
        with clock.phase("capture"):
            args = (model, config, base, base_fingerprint, state.adapters, tokens, held)
            found = rollout.residents(*args, step=int(state.step), progress=progress)
        captured.append(all(found[-1].prefix is not before.prefix for before in held))
        drifts.append(found[-1].drift)
        return found

    def roll_out(number):
        draw = jax.random.fold_in(key, number)
        return rollout.roll_out(model, config, base, state.adapters, held[-1], number, reward, draw, clock)

    for update in range(config.updates):
        clock, age, total, captured, drifts = Clock(between), 0, None, [], []
        for slot, tokens in enumerate(prompts):
            held = capture(rollouts[slot].prompt if update else tokens)
            if update == 0:
                group, rolled = roll_out(slot)
                while not rolled.carries_signal and len(dropped) < config.max_resamples:
                    dropped.append(rolled)
                    number = len(prompts) + len(dropped) - 1
                    held = capture(spare(number))
                    group, rolled = roll_out(number)
                with clock.phase("score"):
                    args, now = (model, config, base, state.adapters, held[-1], rolled.responses), int(state.step)
                    held = residency.used(held, rollout.probed(*args, step=now))
                    args = (model, config, base, base_fingerprint, held)
                    held, reference = rollout.with_reference(*args, step=now, progress=progress)
                    args = (model, config, base, base_fingerprint, state.adapters, held[-1], group)
                    groups.append(rollout.scored(*args, reference=reference, progress=progress))
                rollouts.append(rolled)
            taken = held[-1]
            age = max(age, int(state.step) - taken.captured_at)
            with clock.phase("replay"):
                adapters = lora.per_device(state.adapters, model.mesh)
                page_grads = exact_gradient.zero_page_grads(model, taken.prefix) if config.mode == "exact" else None
                total, page_grads = add_group(
                    model, config, base, adapters, taken.prefix, groups[slot], total, page_grads, progress=progress
                )
                jax.block_until_ready(total)
            if config.mode == "exact":
                with clock.phase("reverse"):
                    total = add_prompt(
                        model, config, base, adapters, taken, page_grads, total, progress=progress
                    )
                    jax.block_until_ready(total)
            del adapters, page_grads  # not beside the next prompt's capture
        with clock.phase("finalise"):
            state, info = apply_update(model, optimizer, state, total)
            info = jax.tree.map(np.asarray, jax.block_until_ready(info))
        told = (sum(captured), refresh.largest(drifts))
        reports.append(_report(rollouts, [] if update else dropped, total, info, clock, age, state, *told))
    return state, reports, held


def _report(rollouts, dropped, total, info, clock, age, state, captures, drift):
    reason = None
    if not info["taken"]:
        reason = "nothing to train on" if info["finite"] else "non-finite gradient or loss"
    return StepReport(
        rollouts,
        dropped,
        float(total.loss.sum),
        float(total.loss.count),
        float(info["grad_norm"]),
        int(info["nonfinite"]),
        reason,
        {k: float(v) for k, v in objectives.metric_values(total.metrics).items()},
        clock.seconds,
        age,
        fingerprint.tree_fingerprint(state.adapters),
        captures,
        drift,
    )
