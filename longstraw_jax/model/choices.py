"""The discrete choices of tokens: what full layers select and where sparse layers route, recorded and held.

A choice that round-off or another policy would decide differently makes log-probabilities and gradients jump. Held
choices are taken as they are; what they weigh is always computed anew (rollout routing replay, arXiv:2510.11370, and
the same for the selection of sparse attention).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from longstraw_jax import sharding
from longstraw_jax.config import ModelConfig

KINDS = ("selections", "routes")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choices:
    """Choices of B rows of T tokens, stacked like the scanned layers; None for a kind that is not there.

    Attributes:
      selections: per segment int32 [repeat, B, T, K]: the positions that each group's full layer selects, -1 for none.
      routes: per segment a tuple over runs of int32 [layers, B, T, experts a token], None for dense runs; -1 routes
        nowhere.
    """

    selections: tuple[Int[Array, "R B T K"], ...] | None = None
    routes: tuple[tuple[Int[Array, "L B T k"] | None, ...], ...] | None = None


NONE = Choices()


def specs(split: str = "tokens") -> P:
    """PartitionSpec of every array of Choices: tokens or rows over the mesh."""
    return P(None, None, sharding.AXIS) if split == "tokens" else P(None, sharding.AXIS)


def of_layers(extras: list[list[dict[str, Array]]], record: Sequence[str]) -> Choices:
    """What a pass of the trunk that was asked for `record` handed back, see Decoder.collecting."""
    return Choices(
        selections=tuple(runs[0]["chosen_keys"] for runs in extras) if "selections" in record else None,
        routes=tuple(tuple(run.get("chosen_experts") for run in runs) for runs in extras)
        if "routes" in record
        else None,
    )


def empty(config: ModelConfig, rows: int, tokens: int, record: Sequence[str]) -> Choices:
    """Choices of nothing, -1, of the kinds in `record`."""

    def nothing(layers, width):
        return jnp.full((layers, rows, tokens, width), -1, jnp.int32)

    segments = config.segments()
    return Choices(
        selections=tuple(nothing(s.repeat, config.index_topk) for s in segments) if "selections" in record else None,
        routes=tuple(
            tuple(
                nothing(s.stack(j), config.num_experts_per_tok) if run.mlp == "sparse" else None
                for j, run in enumerate(s.runs)
            )
            for s in segments
        )
        if "routes" in record
        else None,
    )


def write(room: Choices, member: Int[Array, "B"], step: Int[Array, "*B"], new: Choices) -> Choices:
    """The choices of one token each of B members, `new`, at their token `step` of `room`.

    Where fewer keys were there, -1 follows; what is of a member or a token that `room` does not have is dropped.
    """

    def put(rows, row):
        return rows.at[:, member, step, : row.shape[-1]].set(row[:, :, 0], mode="drop")

    return jax.tree.map(put, room, new)


def check_record(record: Sequence[str]) -> None:
    """Raises ValueError for anything but kinds of choices."""
    for kind in record:
        if kind not in KINDS:
            raise ValueError(f"record={tuple(record)}; accepted: {' and '.join(map(repr, KINDS))}")


def joined(parts: Sequence[Choices], counts: Sequence[int], width: int) -> Choices:
    """The choices of consecutive pieces as those of one sequence, on the host.

    Args:
      parts: of pieces in order, each padded after its first `counts` tokens.
      width: keys a selection is padded to with -1.
    """

    def join(*arrays):
        return np.concatenate([np.asarray(x)[:, :, :n] for x, n in zip(arrays, counts, strict=True)], axis=2)

    return jax.tree.map(join, *(widened(part, width) for part in parts))


def rows(choices: Choices, start: int, stop: int) -> Choices:
    """Those of tokens start .. stop - 1."""
    return jax.tree.map(lambda ids: ids[:, :, start:stop], choices)


def widened(choices: Choices, width: int) -> Choices:
    """On the host, with -1 behind the selections of passes that had fewer keys than `width`."""
    if choices.selections is None:
        return choices
    wide = tuple(
        np.pad(np.asarray(ids), ((0, 0),) * 3 + ((0, width - ids.shape[-1]),), constant_values=-1)
        for ids in choices.selections
    )
    return dataclasses.replace(choices, selections=wide)


def of_members(recorded: Choices, lengths: Int[np.ndarray, "G"], padded: int) -> Choices:
    """Choices recorded while sampling a group as replay takes them: [G, layers, 1, padded, ..] on the host.

    Raises:
      ValueError: a member whose recorded rows are not as many as its input tokens, by number.
    """

    def rows_of(ids, complete):
        ids = np.moveaxis(np.asarray(ids), 1, 0)[:, :, None]
        rows = complete(ids >= 0, axis=-1).all((1, 2))  # [G, T]
        for member, (row, wanted) in enumerate(zip(rows, lengths, strict=True)):
            found = int(row.sum())
            if found != wanted or not row[:wanted].all():
                raise ValueError(
                    f"member {member} has recorded choices of {found} tokens; accepted: {int(wanted)}, one for each "
                    "of its input tokens from the boundary token on"
                )
        room = ((0, 0),) * 3 + ((0, max(0, padded - ids.shape[3])), (0, 0))
        return np.pad(ids, room, constant_values=-1)[:, :, :, :padded]

    # Every token sees at least itself; it takes all of its experts.
    return Choices(
        jax.tree.map(lambda ids: rows_of(ids, np.any), recorded.selections),
        jax.tree.map(lambda ids: rows_of(ids, np.all), recorded.routes),
    )


def by_layer(config: ModelConfig, choices: Choices, kind: str) -> dict[int, Int[Array, "B T k"]]:
    """Layer index -> its choices of one kind."""
    found: dict[int, Any] = {}
    for s, segment in enumerate(config.segments()):
        runs = [choices.selections[s]] if kind == "selections" else choices.routes[s]
        for j, stacked in enumerate(runs):
            if stacked is not None:
                found |= {segment.layer_index(i, j): stacked[i] for i in range(stacked.shape[0])}
    return dict(sorted(found.items()))
