"""Routed experts over the mesh: rows travel to the devices that hold their experts, in passes of bounded memory."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from longstraw_jax import parallel
from pallas_kernels.grouped_matmul.api import adapted_grouped_matmul, grouped_matmul

EXPERT_ROWS = 8192  # rows that a device may receive whatever the routing, before passes are bounded


def expert_room(tokens: int, chosen: int, local_experts: int, devices: int, load: float) -> tuple[int, int]:
    """Rows that a device can send another in one pass of `routed_experts`, and the passes that the worst case takes.

    Args:
      tokens: of each device.
      chosen: experts a token.
      load: rows a pass holds, in units of the mean over all (sender, receiver) pairs. A pass of few rows holds the
        worst case instead: every choice of every token on one device.
    """
    most = tokens * min(chosen, local_experts)
    if devices * most <= EXPERT_ROWS:
        return most, 1
    room = min(most, math.ceil(load * tokens * chosen / devices))
    return room, -(-most // room)


def _expert_rows(rows, expert, experts, layer, pairs, gate, implementation):
    """Each row through its expert of this device; expert numbers past the last give 0."""
    layers, count = experts["gate_proj"].shape[:2]
    sizes = jnp.bincount(expert, length=count + 1)[:count]
    options = dict(first=None if layers == 1 else layer * count, implementation=implementation)

    def apply(name, rows):
        w = experts[name].reshape(layers * count, *experts[name].shape[2:])
        if name not in pairs:
            return grouped_matmul(rows, w, sizes, **options)
        a, b, scale = pairs[name]
        return adapted_grouped_matmul(rows, w, a, b, sizes, scale=scale, gate=gate, **options)

    return apply("down_proj", jax.nn.silu(apply("gate_proj", rows)) * apply("up_proj", rows))


def routed_experts(
    x: Float[Array, "T D"],
    ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    experts: dict[str, Float[Array, "L e in out"]],
    layer: Int[Array, ""],
    pairs: dict[str, tuple[Array, Array, float]],
    gate: Bool[Array, "T"] | None,
    axis: str | None,
    *,
    load: float = 2.0,
    implementation: str = "auto",
) -> Float[Array, "T D"]:
    """sum_k weights * expert(x), dropless at any imbalance.

    Rows travel to the devices that hold their experts and back (all-to-all), in passes of bounded memory: one pass
    unless some device sends another more than `load` times the mean, then as many as it takes. Imbalance costs time,
    not memory. A token's sum has a fixed order that other tokens cannot change.

    Args:
      ids: a token's chosen experts, no expert twice; E or more routes nowhere (padding).
      experts: this device's gate_proj, up_proj [L, e, D, F] and down_proj [L, e, F, D] of several layers, whose stack
        is read in place.
      layer: whose experts are applied, 0 to L - 1.
      pairs: low-rank updates by the same names, a [e, in, r], b [e, r, out], scale. A weight that has one is constant.
      gate: switches the updates per token.
      load: see `expert_room`.
      implementation: see pallas_kernels.grouped_matmul.api.
    """
    (t, k), n, local_experts = ids.shape, parallel.axis_size(axis), experts["gate_proj"].shape[1]
    room, passes = expert_room(t, k, local_experts, n, load)
    choice = jnp.minimum(ids.reshape(-1), n * local_experts)
    # Choices in the order of their experts, hence of the devices that hold these.
    order = jnp.argsort(choice, stable=True).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(t * k, dtype=jnp.int32), unique_indices=True)
    counts = jnp.bincount(choice, length=n * local_experts + 1)[:-1].reshape(n, local_experts).astype(jnp.int32)
    sent = counts.sum(1)
    first = jnp.cumsum(sent) - sent
    received = jnp.cumsum(parallel.exchange(counts, axis, 0, 0), axis=1)  # sent in the order of my experts

    def one_pass(number, y):
        """Adds pass `number` to y [T K, D], the experts' outputs by choice."""
        place = number * room + jnp.arange(room, dtype=jnp.int32)
        token = order[jnp.where(place < sent[:, None], first[:, None] + place, 0)] // k  # [devices, room]
        rows = parallel.exchange(x[token], axis, 0, 0).reshape(n * room, -1)
        expert = (place[:, None] >= received[:, None, :]).sum(-1).reshape(-1)  # e for no row
        row_gate = None if gate is None else parallel.exchange(gate[token], axis, 0, 0).reshape(-1)
        if axis is None:  # one sender: in order already
            out = _expert_rows(rows, expert, experts, layer, pairs, row_gate, implementation)
        else:
            by_expert = jnp.argsort(expert, stable=True)
            row_gate = None if gate is None else row_gate[by_expert]
            out = _expert_rows(rows[by_expert], expert[by_expert], experts, layer, pairs, row_gate, implementation)
            back = jnp.zeros_like(by_expert).at[by_expert].set(jnp.arange(n * room), unique_indices=True)
            out = out[back]
        out = parallel.exchange(out.reshape(n, room, -1), axis, 0, 0).reshape(n * room, -1)
        device = jnp.minimum(choice // local_experts, n - 1)
        slot = rank - first[device] - number * room
        mine = (choice < n * local_experts) & (slot >= 0) & (slot < room)
        return jnp.where(mine[:, None], out[jnp.where(mine, device * room + slot, 0)], y)

    y = jnp.zeros((t * k, x.shape[1]), x.dtype)
    if passes == 1:
        y = one_pass(jnp.int32(0), y)
    else:
        needed = parallel.largest(-(-sent.max() // room), axis)

        def next_pass(y, number):
            return jax.lax.cond(number < needed, one_pass, lambda _, y: y, number, y), None

        # Recomputed in the backward pass, so that no pass keeps its buffers.
        y, _ = jax.lax.scan(jax.checkpoint(next_pass), y, jnp.arange(passes, dtype=jnp.int32))
    return (y.reshape(t, k, -1).astype(jnp.float32) * weights[..., None]).sum(1).astype(x.dtype)
