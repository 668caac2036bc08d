"""Flipped choices: how many selected keys and chosen experts two passes of one policy do not share, and how near a tie.

Round-off of another order of sums decides a choice at a cut that lies between two almost equal scores the other way.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from longstraw_jax.config import ModelConfig
from longstraw_jax.model import choices
from longstraw_jax.model.choices import Choices
from longstraw_jax.types import Params

Scores = Mapping[int, Float[Array, "T N"]]  # layer -> what it ranked


def scores_of(config: ModelConfig, base: Params, layers: list[dict[str, Any]]) -> dict[str, Scores]:
    """Kind -> layer -> the scores [T, keys or experts] that a collected pass of one sequence ranked, on the host."""
    biases = {
        segment.layer_index(i, j): base["segments"][s]["layers"][j]["mlp"]["gate"]["e_score_correction_bias"][i]
        for s, segment in enumerate(config.segments())
        for j, run in enumerate(segment.runs)
        if run.mlp == "sparse"
        for i in range(segment.stack(j))
    }
    return {
        "selections": {i: np.asarray(x["index_scores"][0]) for i, x in enumerate(layers) if "index_scores" in x},
        "routes": {i: np.asarray(jax.nn.sigmoid(layers[i]["router_logits"]) + bias) for i, bias in biases.items()},
    }


def count(
    config: ModelConfig,
    found: Choices,
    wanted: Choices,
    scores: Mapping[str, Scores] | None = None,
    *,
    start: int = 0,
) -> dict[str, dict[int, dict[str, Any]]]:
    """Choices of one sequence that `found` made and `wanted` did not.

    Args:
      found, wanted: [layers, 1, T, ..] on the host.
      scores: `scores_of` the wanted pass, None for no gaps.
      start: position of the first of the T tokens.

    Returns:
      kind -> layer -> choices, flipped (both of them ids), tokens (that have a flipped one), first (those of them that
      have none in a lower layer, whose difference would reach this one), invalid (ids, by which one side alone has too
      few or too many, or that are doubled, out of reach or of no finite score: no tie makes those) and widest_gap: the
      largest distance of a first flipped choice from the one it displaced, in units of the token's largest score,
      finite; None where there is none.
    """
    mine, theirs = ({kind: choices.by_layer(config, x, kind) for kind in choices.KINDS} for x in (found, wanted))
    counted: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in choices.KINDS}
    changed = np.zeros(jax.tree.leaves(wanted)[0].shape[2], bool)
    # A token sees the keys up to its own, and every expert.
    reach = {
        "selections": start + 1 + np.arange(changed.size),
        "routes": np.full(changed.size, config.n_routed_experts),
    }
    for layer in range(config.num_hidden_layers):
        for kind in choices.KINDS:  # a layer selects before it routes
            if layer in mine[kind]:
                pair = (np.asarray(x[kind][layer])[0] for x in (mine, theirs))
                ranked = None if scores is None else scores[kind][layer]
                counted[kind][layer], changed = _count_layer(*pair, reach[kind], ranked, changed)
    return counted


def _count_layer(found, wanted, reach, scores, changed):
    flipped, invalid, gaps = 0, 0, []
    rows = np.flatnonzero((np.sort(found, -1) != np.sort(wanted, -1)).any(-1))
    first = rows[~changed[rows]]
    for row in rows:
        new = np.setdiff1d(found[row], [*wanted[row], -1])
        old = np.setdiff1d(wanted[row], [*found[row], -1])
        flipped += new.size
        few, many = sorted(int((ids != -1).sum()) for ids in (found[row], wanted[row]))
        sound = np.unique(found[row][(found[row] >= 0) & (found[row] < reach[row])])
        invalid += many - min(sound.size, few)
        new = new[(new >= 0) & (new < reach[row])]
        if scores is not None and not changed[row] and new.size and old.size:
            ranked = scores[row]
            size = np.abs(ranked[np.isfinite(ranked)]).max(initial=1e-30)
            gap = float((ranked[old].max() - ranked[new].min()) / size)
            if np.isfinite(gap):
                gaps.append(gap)
            else:
                invalid += 1
    changed = changed.copy()
    changed[rows] = True
    numbers = {"choices": int((found >= 0).sum()), "flipped": flipped, "tokens": rows.size, "first": first.size}
    return numbers | {"invalid": invalid, "widest_gap": max(gaps, default=None)}, changed


def add(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """Counts of two sequences together."""
    if one is None:
        return other

    def both(a, b):
        return {k: a[k] + b[k] for k in a if k != "widest_gap"} | {"widest_gap": widest_gap([a, b])}

    return {kind: {layer: both(one[kind][layer], other[kind][layer]) for layer in other[kind]} for kind in other}


def widest_gap(counts: Iterable[Mapping[str, Any]]) -> float | None:
    """Of several layers or sequences; None where there is none."""
    return max((x["widest_gap"] for x in counts if x["widest_gap"] is not None), default=None)


def share(layers: Mapping[int, Mapping[str, Any]]) -> float:
    """Of all choices of a kind, the flipped ones."""
    return sum(x["flipped"] for x in layers.values()) / max(1, sum(x["choices"] for x in layers.values()))


def invalid(layers: Mapping[int, Mapping[str, Any]]) -> int:
    """Choices of a kind that no tie explains."""
    return sum(x["invalid"] for x in layers.values())
