"""Agreement of two gradients in figures, and what of them is within tolerance."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from longstraw_jax import lora
from longstraw_jax.evidence import flips
from longstraw_jax.types import Model, Params

Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What agreement means; None is not asked for.

    Attributes:
      relative_l2: of all gradients together.
      cosine: least, of all gradients together.
      largest_error: of any entry, in units of its tensor's largest entry.
      step: largest difference of any adapter after one optimizer step.
      step_relative_l2: of that step. Adam's first one divides every entry by its own size, so entries that are
        near round-off themselves weigh as much as all others: it is looser than the gradient's.
      flipped: share of a kind's choices that the two sides, each on its own, do not share.
      gap: widest distance of a flipped choice from the one it displaced, see flips.count; asked for where scores were
        kept (parity.SCORED_TOKENS).
    """

    relative_l2: float
    flipped: float
    gap: float
    cosine: float | None = None
    largest_error: float | None = None
    step: float | None = None
    step_relative_l2: float | None = None


# Gaps: in fp32 the widest measured is 2.3e-4, of a token that attends to one whose choice had flipped (1.7e-7 without).
# The half types' is reasoned, not measured: queries and keys are each rounded to bf16 (2^-8), as is every residual sum
# below them, and more choices flip; 16 such roundings are 2^-4, where a key taken at random lies several times as far.
TOLERANCES = {
    "float32": Tolerance(
        relative_l2=1e-5, flipped=1e-3, gap=1e-3, largest_error=1e-5, step=1e-6, step_relative_l2=1e-3
    ),
    "bfloat16": Tolerance(relative_l2=5e-3, flipped=5e-2, gap=2**-4, cosine=0.99999),
    "float16": Tolerance(relative_l2=5e-3, flipped=5e-2, gap=2**-4, cosine=0.99999),
}


def compare(found: Params, wanted: Params, targets: Mapping[str, str]) -> Figures:
    """How far a tree of gradients, or of steps, is from the wanted one; sums in fp64 on the host.

    Args:
      found, wanted: trees of one shape, like adapters.
      targets: tensor name -> adapter target, from `tensor_targets`.

    Returns:
      cosine, relative_l2, largest_error (in units of its tensor's largest entry), worst_tensor, largest_difference,
      norm_found, norm_wanted, elements, zero_only_found, zero_only_wanted, nonfinite (entries of both), and groups:
      target -> cosine and relative_l2. A ratio is None where nothing is wanted, all are where anything is not finite.

    Raises:
      ValueError: the trees are not of one shape.
    """
    pairs = {name: (a, b) for name, a, b in _named_pairs(found, wanted)}
    figures: Figures = {
        "elements": sum(b.size for _, b in pairs.values()),
        "nonfinite": sum(int((~np.isfinite(x)).sum()) for pair in pairs.values() for x in pair),
        "zero_only_found": sum(int(((a == 0) & (b != 0)).sum()) for a, b in pairs.values()),
        "zero_only_wanted": sum(int(((a != 0) & (b == 0)).sum()) for a, b in pairs.values()),
    }
    if figures["nonfinite"]:
        undefined = ("largest_error", "worst_tensor", "largest_difference")
        return figures | dict.fromkeys((*undefined, *_OVERALL)) | {"groups": {}}
    distances = {name: float(np.abs(a - b).max(initial=0.0)) for name, (a, b) in pairs.items()}
    errors = {name: distances[name] / max(float(np.abs(b).max(initial=0.0)), 1e-30) for name, (_, b) in pairs.items()}
    worst = max(errors, key=errors.__getitem__)
    members: dict[str, list[Any]] = {}
    for name, pair in pairs.items():
        members.setdefault(targets[name], []).append(pair)
    groups = {target: _overall(some) for target, some in sorted(members.items())}
    return (
        figures
        | {
            "largest_error": errors[worst],
            "worst_tensor": worst,
            "largest_difference": max(distances.values()),
        }
        | _overall(pairs.values())
        | {"groups": {target: {k: f[k] for k in ("cosine", "relative_l2")} for target, f in groups.items()}}
    )


_OVERALL = ("cosine", "relative_l2", "norm_found", "norm_wanted")


def _overall(pairs) -> Figures:
    """Figures of several tensors as one long vector."""
    dot = squared_found = squared_wanted = squared_apart = 0.0
    for a, b in pairs:
        dot += float((a * b).sum())
        squared_found += float((a * a).sum())
        squared_wanted += float((b * b).sum())
        squared_apart += float(((a - b) ** 2).sum())
    found, wanted = squared_found**0.5, squared_wanted**0.5
    cosine = dot / (found * wanted) if found and wanted else None
    relative = squared_apart**0.5 / wanted if wanted else None
    return dict(zip(_OVERALL, (cosine, relative, found, wanted), strict=True))


def _tensor_name(path) -> str:
    return ".".join(key.key for key in path)


def _named_pairs(found, wanted):
    a, b = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (found, wanted))
    shapes = [[(_tensor_name(path), np.shape(x)) for path, x in leaves] for leaves in (a, b)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"found is shaped {shapes[0]}; accepted: the wanted tree's {shapes[1]}")
    return [
        (_tensor_name(path), np.asarray(x, np.float64), np.asarray(y, np.float64))
        for (path, x), (_, y) in zip(a, b, strict=True)
    ]


def tensor_targets(model: Model) -> dict[str, str]:
    """Adapter tensor name -> the LoRA target it belongs to."""
    return {
        ".".join((*site.path, name)): site.target
        for site in lora.sites(model.config, model.lora)
        for name in ("a", "b")
    }


def choice_problems(flipped: Mapping[str, Mapping[int, Figures]], tolerance: Tolerance) -> list[str]:
    """Why the choices of a policy show no parity, one line a kind and figure; empty if they do."""
    problems = []
    for kind, layers in flipped.items():
        share, gap, invalid = flips.share(layers), flips.widest_gap(layers.values()), flips.invalid(layers)
        if not share <= tolerance.flipped:
            problems.append(f"{kind}: {share} of the choices are flipped; accepted: at most {tolerance.flipped:g}")
        if gap is not None and not gap <= tolerance.gap:
            problems.append(
                f"{kind}: the scores of a flipped choice and of the one it displaced are {gap} of the largest apart; "
                f"accepted: at most {tolerance.gap:g}"
            )
        if invalid:
            problems.append(f"{kind}: {invalid} choices are missing, doubled or out of reach; accepted: 0")
    return problems


def case_problems(case: str, figures: Figures, tolerance: Tolerance) -> list[str]:
    """Why a case of `measure_mode` shows no parity, one line each; empty if it does."""
    gradient, step, problems = figures["gradient"], figures["step"], []

    def check(what, value, bound, above=False):
        if bound is not None and (value is None or not (value >= bound if above else value <= bound)):
            problems.append(f"{what} is {value}; accepted: at {'least' if above else 'most'} {bound:g}")

    check("gradient NaN or infinite entries", gradient["nonfinite"], 0)
    check("gradient relative_l2", gradient["relative_l2"], tolerance.relative_l2)
    check("gradient cosine", gradient["cosine"], tolerance.cosine, above=True)
    check(f"gradient largest_error ({gradient['worst_tensor']})", gradient["largest_error"], tolerance.largest_error)
    check("step NaN or infinite entries", step["nonfinite"], 0)
    check("step largest_difference", step["largest_difference"], tolerance.step)
    check("step relative_l2", step["relative_l2"], tolerance.step_relative_l2)
    if not figures["step_taken"]:
        problems.append("the optimizer step was skipped; accepted: a step")
    for name in ("loss_found", "loss_wanted"):
        if not np.isfinite(figures[name]):
            problems.append(f"{name} is {figures[name]}; accepted: a finite number")
    fraction = figures["clipped_fraction"]
    if (fraction > 0) != (case == "clipping"):
        problems.append(f"clipped_fraction is {fraction:g}; accepted: {'above 0' if case == 'clipping' else '0'}")
    if "control" in figures:
        # A comparison that could not tell two gradients apart would show nothing by agreeing.
        check("control relative_l2", figures["control"]["relative_l2"], 10 * tolerance.relative_l2, above=True)
    return problems
