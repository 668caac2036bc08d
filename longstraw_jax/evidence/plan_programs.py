"""Every program of the transaction on shapes alone: what it takes, what lies beside it, what it costs."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from longstraw_jax import exact_gradient, lora, replay, rollout, sampling, sharding, train
from longstraw_jax.evidence import plan_costs
from longstraw_jax.model import choices, decoder
from longstraw_jax.prefix import capture, pages
from longstraw_jax.rl import objectives
from longstraw_jax.types import PAGE, Model, Params, PrefixState

Kinds = dict[str, Any]  # kind of bytes -> tree of ShapeDtypeStructs with shardings


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a transaction.

    Attributes:
      tokens: of the prompt, the boundary token included; the pages have room for all of them.
      chunk: tokens of a capture step.
      response: tokens of a response.
      groups: group sizes to sample.
      mode: prefix-gradient mode; "exact" adds gradient pages and the reverse pass.
    """

    tokens: int
    chunk: int
    response: int
    groups: tuple[int, ...]
    mode: str = "detached"


class Program(NamedTuple):
    """One program.

    Attributes:
      trace: traces it; nothing is allocated.
      arguments: all of its arguments but small ones.
      beside: what is alive meanwhile and no argument.
      flops: operations of one device by formula.
      expert_flops: those of routed experts among them.
      received: bytes that one device receives, by what travels, by formula.
    """

    trace: Callable[[], jax.stages.Traced]
    arguments: Kinds
    beside: Kinds
    flops: float
    expert_flops: float
    received: dict[str, float]


class Resident(NamedTuple):
    """What the transaction keeps on the devices, as shapes with shardings."""

    base: Params
    state: train.TrainState
    copies: Params
    prefix: PrefixState
    total: train.Total
    page_grads: exact_gradient.PageGrads | None

    def kinds(self, *names: str) -> Kinds:
        """The named kinds of what there is."""
        every = {
            "base weights": self.base,
            "adapters": self.state.adapters,
            "adapter copies": self.copies,
            "optimizer": (self.state.opt_state, self.state.step, self.state.skipped),
            "latent pages": self.prefix.latents,
            "index keys": self.prefix.index_keys,
            "gradients": self.total.grads,
            "gradient pages": self.page_grads,
        }
        return {name: every[name] for name in names if every[name] is not None}


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _on_mesh(shapes: Any, specs: Any, mesh: jax.sharding.Mesh) -> Any:
    where = jax.tree.map(
        lambda spec: sharding.named(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return _placed(shapes, where)


def resident(model: Model, optimizer: optax.GradientTransformation, tokens: int, mode: str) -> Resident:
    """Shapes and shardings of weights, adapters and their copies, optimizer state, pages and gradients."""
    config, mesh = model.config, model.mesh
    adapters = lora.adapter_shapes(config, model.lora)
    copies = _on_mesh(
        jax.eval_shape(lambda a: lora.per_device(a, mesh), adapters), lora.per_device_specs(config, model.lora), mesh
    )
    row, one = jax.ShapeDtypeStruct((1,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    loss, metrics = jax.eval_shape(
        lambda x, advantage: objectives.member_loss(
            x, x, old_logp=None, advantage=advantage, mask=x > 0, config=objectives.GRPOConfig(), ref_logp=None,
            sampler_logp=x, max_len=1,
        ),
        row, one,
    )  # fmt: skip
    prefix = pages.prefix_shapes(model, tokens)
    page_grads = None
    if mode == "exact":
        page_grads = jax.eval_shape(lambda p: exact_gradient.zero_page_grads(model, p), prefix)
        page_grads = _on_mesh(page_grads, pages.prefix_specs(config).latents, mesh)
    return Resident(
        base=_on_mesh(decoder.param_shapes(config), decoder.param_specs(config), mesh),
        state=_placed(
            jax.eval_shape(lambda a: train.fresh_state(model, optimizer, a), adapters),
            train.state_shardings(model, optimizer),
        ),
        copies=copies,
        prefix=prefix,
        total=train.Total(copies, loss, metrics),
        page_grads=page_grads,
    )


def _member(tokens: int) -> rollout.Group:
    """One row of a group of padded responses, of a rollout that one optimizer step follows."""
    ids, row = (jax.ShapeDtypeStruct((tokens,), dtype) for dtype in (jnp.int32, jnp.float32))
    mask = jax.ShapeDtypeStruct((tokens,), jnp.bool_)
    length, advantage = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.int32, jnp.float32))
    return rollout.Group(ids, ids, length, mask, advantage, None, row, None)


def programs(model: Model, optimizer: optax.GradientTransformation, sizes: Sizes) -> dict[str, Program]:
    """The transaction's programs by name, in the order in which they run.

    Two steps work on one member: "replay" on a response of sizes.response tokens, "score" on all of the largest
    group, one after the other. A "sample" program's costs are those of one decoded token of every member.
    """
    config, n, load = model.config, model.devices, model.expert_load
    have = resident(model, optimizer, sizes.tokens, sizes.mode)
    capacity = pages.page_count(sizes.tokens, n) * PAGE
    number, word = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    acting = (model, have.base, have.state.adapters, have.prefix)
    reading = have.kinds("base weights", "adapters", "latent pages", "index keys")

    experts = plan_costs.expert_flops(config)

    def forward(tokens, keys, head):
        each = head * plan_costs.head_flops(config)
        return plan_costs.forward_flops(config, model.lora, tokens, keys) + tokens * each

    ids = jax.ShapeDtypeStruct((sizes.chunk,), jnp.int32)
    found = {
        "capture": Program(
            lambda: capture.chunk_program(model).trace(*acting[1:], ids, word),
            reading,
            have.kinds("optimizer"),
            forward(sizes.chunk, capacity + sizes.chunk, 0) / n,
            sizes.chunk * experts / n,
            plan_costs.capture_bytes(config, sizes.chunk, capacity, n, load),
        )
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    for group in sizes.groups:
        rows = -(-group // n) * n  # a device without a member runs along
        options = dict(group=group, max_new_tokens=sizes.response, top_p=1.0, eos_ids=config.eos_token_id)
        found[f"sample {group}"] = Program(
            lambda options=options: sampling.draw_group.trace(*acting, word, key, number, **options),
            reading,
            have.kinds("optimizer"),
            forward(rows, capacity, 1) / n,
            rows * experts / n,
            plan_costs.response_bytes(config, rows, 0, n, load),
        )
    group, response = max(sizes.groups), replay.pad_length(sizes.response, n)
    batch = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((group, response), (group, response), (group,))]
    received = plan_costs.response_bytes(config, response, response, n, load)
    found["score"] = Program(
        lambda: replay.score.trace(*acting, *batch, number),
        reading,
        have.kinds("optimizer"),
        group * forward(response, capacity + response, 1) / n,
        group * response * experts / n,
        {what: group * size for what, size in received.items()},
    )
    found["replay"] = Program(
        lambda: train.member_gradient.trace(
            model, objectives.GRPOConfig(), sizes.response, have.base, have.copies, have.prefix, _member(response),
            number, have.page_grads,
        ),
        have.kinds("base weights", "adapter copies", "latent pages", "index keys", "gradient pages"),
        have.kinds("adapters", "optimizer", "gradients"),
        plan_costs.gradient_flops(config, model.lora, response, capacity + response) / n,
        3 * response * experts / n,
        plan_costs.response_bytes(config, response, response, n, load, gradient=True),
    )  # fmt: skip
    if sizes.mode == "exact":
        found["reverse"] = Program(
            lambda: exact_gradient.reverse_chunk.trace(
                model, have.base, have.copies, have.prefix, ids, word, word, choices.NONE, have.page_grads,
                have.total.grads,
            ),
            have.kinds("base weights", "adapter copies", "latent pages", "index keys", "gradient pages", "gradients"),
            have.kinds("adapters", "optimizer"),
            plan_costs.gradient_flops(config, model.lora, sizes.chunk, capacity + sizes.chunk, head=False) / n,
            3 * sizes.chunk * experts / n,
            plan_costs.reverse_bytes(config, sizes.chunk, capacity, n, load),
        )
    found["add"] = Program(
        lambda: train.add_totals.trace(have.total, have.total),
        have.kinds("gradients") | {"member's gradients": have.total.grads},
        have.kinds("base weights", "adapters", "adapter copies", "optimizer")
        | have.kinds("latent pages", "index keys", "gradient pages"),
        0.0,
        0.0,
        {},
    )
    found["step"] = Program(
        lambda: train.apply_update.trace(model, optimizer, have.state, have.total),
        have.kinds("adapters", "optimizer", "gradients"),
        have.kinds("base weights", "adapter copies", "latent pages", "index keys"),
        0.0,
        0.0,
        plan_costs.finalise_bytes(model),
    )
    return found
