"""Sampling: decode a group from the one resident prompt, some members at a time, each with its own private tail."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key

from longstraw_jax import lora, parallel, sharding
from longstraw_jax.model import choices, decoder, rope
from longstraw_jax.model.block import Pass
from longstraw_jax.model.choices import Choices
from longstraw_jax.prefix import pages
from longstraw_jax.types import Model, Params, PrefixState


class Samples(NamedTuple):
    """A group of responses.

    Attributes:
      tokens: [G, T] int32, 0 past a response's end.
      logprobs: [G, T] fp32, of each token under the whole distribution at the sampling temperature (before top-p).
      lengths: [G] int32, the eos included.
      truncated: [G] bool, no eos and no stop sequence within the budget.
      choices: [layers, G, T, ..] of each response's inputs (the boundary token, then the response's own without its
        last), -1 past their end; of the kinds that were asked for.
      steps: int32, decode steps that the group took.
    """

    tokens: Int[Array, "G T"]
    logprobs: Float[Array, "G T"]
    lengths: Int[Array, "G"]
    truncated: Bool[Array, "G"]
    choices: Choices = choices.NONE
    steps: Int[Array, ""] | int = 0


class Slots(NamedTuple):
    """What a device decodes now: a member a row.

    Attributes:
      member: [B] int32, which of the device's own members; past the last one in a row that has none left.
      at: int32 tail row of each member's token: [B], or a scalar where all begin together and none follows.
      ids: [B] int32, that token.
      live: [B] bool, rows whose member still decodes.
      begun: int32, members of the device that have begun.
    """

    member: Int[Array, "B"]
    at: Int[Array, "*B"]
    ids: Int[Array, "B"]
    live: Bool[Array, "B"]
    begun: Int[Array, ""]


def slots_of(group: int, devices: int, slots: int) -> tuple[int, int]:
    """Members of each device, and how many of them it decodes at a time.

    Members are dealt in order, device d has those from d x members on, whatever the slots.

    Args:
      slots: rows over all devices that decode at once; 0 for the whole group.
    """
    members = -(-group // devices)
    return members, min(members, -(-(slots or group) // devices))


def empty_tails(model: Model, rows: int, tokens: int) -> tuple[list[tuple[Array, Array | None]], ...]:
    """Zeroed private tails of `rows` members: per segment, per run (latents [L, rows, tokens, W], index keys)."""
    config, dtype = model.config, jnp.dtype(model.config.dtype)

    def tail(layers, indexer):
        latents = jnp.zeros((layers, rows, tokens, config.latent_dim), dtype)
        keys = jnp.zeros((layers, rows, tokens, config.index_head_dim), dtype)
        return latents, keys if indexer == "full" else None

    return tuple([tail(s.stack(j), run.indexer) for j, run in enumerate(s.runs)] for s in config.segments())


def decode_step(
    model: Model,
    base: Params,
    adapters: Params | None,
    prefix: PrefixState,
    tails: tuple[Any, ...],
    ids: Int[Array, "B"],
    step: Int[Array, "*B"],
    live: Bool[Array, "B"],
    axis: str | None,
    record: tuple[str, ...] = (),
) -> tuple[Float[Array, "B V"], tuple[Any, ...], Choices]:
    """Logits after one token of each member on this device, the extended tails, and the tokens' choices.

    Args:
      ids: each member's token at tail row `step`, which is one for all or each member's own.
      live: members that still decode; the others select nothing and route nowhere.
      record: kinds of choices to return.
    """
    config = model.config
    position = jnp.broadcast_to(jnp.reshape(prefix.length + step, (-1, 1)), (ids.shape[0], 1))
    cos, sin = rope.cos_sin(position, config.rope_parameters, config.qk_rope_head_dim)
    run = Pass(
        axis=axis,
        cos=cos,
        sin=sin,
        query_index=jnp.where(live, step, -1)[:, None],
        length=prefix.length,
        strategy="merge_candidates",
        split="rows",
        attention=model.attention,
        expert_load=model.expert_load,
        prefix_store=model.prefix_store,
        kernels=model.kernels,
        offset=step,
        keep="cache",
        record=record,
    )
    trunk = nnx.merge(model.graphdef, base)
    hidden, tails, extras = trunk(
        ids[:, None],
        run,
        pages=tuple(zip(prefix.latents, prefix.index_keys, strict=True)),
        caches=tails,
        adapters=adapters,
        lora=model.lora,
    )
    pair = trunk.head_pair(adapters, model.lora)
    logits = parallel.logits(hidden[:, 0], trunk.lm_head.weight[...], pair, axis)
    return logits, tails, choices.of_layers(extras, record)


def draw(
    keys: Key[Array, "B"], logits: Float[Array, "B V"], temperature: Float[Array, ""], top_p: float
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """One token a row, and its log-probability under softmax(logits / temperature) over the whole vocabulary.

    Temperature 0 is greedy, with the log-probability at temperature 1. top_p keeps the smallest set of most likely
    tokens whose probability reaches it, and never fewer than one.
    """
    greedy = temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    allowed = logprobs
    if top_p < 1:
        order = jnp.argsort(-logprobs, axis=-1)
        ranked = jnp.exp(jnp.take_along_axis(logprobs, order, axis=-1))
        before = jnp.cumsum(ranked, axis=-1) - ranked
        kept = jnp.zeros_like(logprobs, bool).at[jnp.arange(order.shape[0])[:, None], order].set(before < top_p)
        allowed = jnp.where(kept, logprobs, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, allowed)
    token = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn).astype(jnp.int32)
    return token, jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]


def advance(now: Slots, token: Int[Array, "B"], ended: Bool[Array, "B"], boundary: Array, members: Array) -> Slots:
    """The rows at their next token; one whose member ended begins the device's next one, if any is left.

    Args:
      boundary: the prompt's last token, with which a member begins.
      members: int32, how many the device has.
    """
    if now.at.ndim == 0:
        return now._replace(at=now.at + 1, ids=token, live=now.live & ~ended)
    following = now.begun + jnp.cumsum(ended, dtype=jnp.int32) - 1
    return Slots(
        member=jnp.where(ended, following, now.member),
        at=jnp.where(ended, 0, now.at + 1),
        ids=jnp.where(ended, boundary, token),
        live=jnp.where(ended, following < members, now.live),
        begun=now.begun + ended.sum(dtype=jnp.int32),
    )


def ends_with(
    tokens: Int[Array, "M T"], member: Int[Array, "B"], at: Int[Array, "*B"], ids: tuple[int, ...]
) -> Bool[Array, "B"]:
    """Which members' tokens up to `at` end with `ids`; of members out of bounds none."""
    index = jnp.reshape(at, (-1, 1)) + jnp.arange(1 - len(ids), 1)
    index = jnp.where(index < 0, tokens.shape[1], index)
    last = tokens.at[member[:, None], index].get(mode="fill", fill_value=-1)
    return (last == jnp.asarray(ids, jnp.int32)).all(-1)


@functools.partial(
    jax.jit, static_argnames=("model", "group", "max_new_tokens", "top_p", "eos_ids", "record", "slots", "stop_ids")
)
def draw_group(
    model: Model,
    base: Params,
    adapters: Params | None,
    prefix: PrefixState,
    boundary: Int[Array, ""],
    key: Key[Array, ""],
    temperature: Float[Array, ""],
    *,
    group: int,
    max_new_tokens: int,
    top_p: float,
    eos_ids: tuple[int, ...],
    record: tuple[str, ...] = (),
    slots: int = 0,
    stop_ids: tuple[tuple[int, ...], ...] = (),
) -> Samples:
    """The program of `sample`, which checks its arguments."""
    config = model.config
    most, rows = slots_of(group, model.devices, slots)

    def body(axis, base, adapters, prefix, boundary, key, temperature):
        first = parallel.axis_index(axis) * most
        members = jnp.clip(group - first, 0, most)

        def unfinished(carry):
            return parallel.any_device(carry[0].live.any(), axis)

        def decode(carry):
            now, tails, tokens, logprobs, lengths, stopped, chosen, steps = carry
            args = (prefix, tails, now.ids, now.at, now.live, axis, record)
            logits, tails, new = decode_step(model, base, adapters, *args)
            step_keys = jax.vmap(lambda m, at: jax.random.fold_in(jax.random.fold_in(key, first + m), at))(
                now.member, jnp.broadcast_to(now.at, (rows,))
            )
            token, logprob = draw(step_keys, logits, temperature, top_p)
            place = jnp.where(now.live, now.member, most)  # out of bounds: dropped
            tokens = tokens.at[place, now.at].set(token, mode="drop")
            logprobs = logprobs.at[place, now.at].set(logprob, mode="drop")
            lengths = lengths.at[place].add(1, mode="drop")
            stop = jnp.zeros(token.shape, bool)
            if eos_ids:  # compared with no ids, the GPU compiler of jaxlib 0.11.2 ends the process on a mesh
                stop = jnp.isin(token, jnp.asarray(eos_ids, jnp.int32))
            for ids in stop_ids:
                stop |= ends_with(tokens, place, now.at, ids)
            stopped = stopped.at[place].set(stop, mode="drop")
            chosen = choices.write(chosen, place, now.at, new)
            ended = now.live & (stop | (now.at + 1 >= max_new_tokens))
            now = advance(now, token, ended, boundary, members)
            return now, tails, tokens, logprobs, lengths, stopped, chosen, steps + 1

        member = jnp.arange(rows, dtype=jnp.int32)
        start = (
            Slots(
                member,
                jnp.int32(0) if rows == most else jnp.zeros((rows,), jnp.int32),
                jnp.full((rows,), boundary, jnp.int32),
                member < members,
                jnp.int32(rows),
            ),
            empty_tails(model, rows, max_new_tokens),
            jnp.zeros((most, max_new_tokens), jnp.int32),
            jnp.zeros((most, max_new_tokens), jnp.float32),
            jnp.zeros((most,), jnp.int32),
            jnp.zeros((most,), bool),
            choices.empty(config, most, max_new_tokens, record),
            jnp.int32(0),
        )
        _, _, tokens, logprobs, lengths, stopped, chosen, steps = jax.lax.while_loop(unfinished, decode, start)
        return Samples(tokens, logprobs, lengths, ~stopped, chosen, steps)

    specs = (decoder.param_specs(config), lora.stored_specs(model, adapters), pages.prefix_specs(config), P(), P(), P())
    member = P(sharding.AXIS)
    out = Samples(member, member, member, member, choices.specs("rows"), P())
    mapped = parallel.mapped(body, model.mesh, specs, out)
    whole = sharding.named(model.mesh, P())  # every host reads all of it
    drawn = mapped(base, adapters, prefix, boundary, key, temperature)
    group_only = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x[:group], whole), drawn[:4])
    chosen = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x[:, :group], whole), drawn.choices)
    return Samples(*group_only, chosen, drawn.steps)


def sample(
    model: Model,
    base: Params,
    adapters: Params | None,
    prefix: PrefixState,
    boundary: int,
    key: Key[Array, ""],
    *,
    group: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    eos_ids: tuple[int, ...],
    record: tuple[str, ...] = (),
    slots: int = 0,
    stop_ids: tuple[tuple[int, ...], ...] = (),
) -> Samples:
    """Draws `group` responses; a member's tokens depend on (key, member, prompt) alone, not on mesh, slots or others.

    Args:
      boundary: the prompt's last token.
      max_new_tokens: token budget of each response.
      slots: rows that decode at once, rounded up to as many on each device; where a member ends, its row takes the
        device's next one (continuous batching). 0: the whole group at once, whose tails need the most memory.
      stop_ids: sequences of token ids that end a response as an eos does, see stopping.py.
      record: kinds of choices to return with the responses: selections are 4 x index_topk bytes a token and full
        layer on every device, routes 4 x num_experts_per_tok a token and sparse layer.

    Raises:
      ValueError: a value out of range, by name.
      ConfigError: prompt and budget exceed max_position_embeddings.
    """
    choices.check_record(record)
    if group < 1:
        raise ValueError(f"group={group}; accepted: at least 1")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}; accepted: at least 1")
    if slots < 0:
        raise ValueError(f"slots={slots}; accepted: 0 (the whole group) or more")
    if not all(0 < len(ids) <= max_new_tokens for ids in stop_ids):
        raise ValueError(f"stop_ids={stop_ids}; accepted: sequences of 1 to max_new_tokens={max_new_tokens} token ids")
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature}; accepted: 0 (greedy) or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}; accepted: above 0, at most 1")
    if not 0 <= boundary < model.config.vocab_size:
        raise ValueError(f"boundary={boundary}; accepted: a token id from 0 to {model.config.vocab_size - 1}")
    model.config.check_length(int(prefix.length) + 1 + max_new_tokens)
    return draw_group(
        model,
        base,
        adapters,
        prefix,
        jnp.int32(boundary),
        key,
        jnp.float32(temperature),
        group=group,
        max_new_tokens=max_new_tokens,
        top_p=float(top_p),
        eos_ids=tuple(eos_ids),
        record=tuple(record),
        slots=0 if slots >= group else slots,
        stop_ids=tuple(map(tuple, stop_ids)),
    )
