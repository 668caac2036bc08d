"""95 % intervals by pure functions: of scores from 0 to 1 (Wilson's, clustered by prompt) and of a mean (Student's)."""

import math
from collections.abc import Sequence
from typing import Any

from scipy import special

from longstraw_jax.evidence.figures import mean

LEVEL = 0.95
Z = float(special.ndtri(0.5 + LEVEL / 2))


def wilson(share: float, trials: float) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927).

    Args:
      share: mean of the trials, 0 to 1.
      trials: how many, above 0; an effective number need not be whole.

    Raises:
      ValueError: an argument out of range.
    """
    if not 0 <= share <= 1 or not trials > 0:
        raise ValueError(f"share={share}, trials={trials}; accepted: a share from 0 to 1 of more than 0 trials")
    centre = share + Z * Z / (2 * trials)
    spread = Z * math.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials * trials))
    scale = 1 + Z * Z / trials
    # At the ends the bound is the share itself, which rounding must not pass.
    low = 0.0 if share == 0 else max((centre - spread) / scale, 0.0)
    high = 1.0 if share == 1 else min((centre + spread) / scale, 1.0)
    return low, high


def score_interval(clusters: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Mean score and its interval over the samples of several prompts.

    One sample of 0 or 1 a prompt: Wilson's interval. Otherwise samples of one prompt are no independent draws: Wilson's
    interval with an effective number of trials, p (1 - p) over the variance of the mean between prompts, times
    (z / t)^2 because that variance is estimated (Korn and Graubard 1998, who use the exact interval). It is at most the
    number of samples, and the number of prompts where no prompt differs from another. Scores between 0 and 1 vary less
    than binary ones, so that their interval is wide rather than narrow.

    Args:
      clusters: the samples' scores, 0 to 1, a prompt each; prompts without any are left out.

    Returns:
      mean, low, high (None without a sample), prompts, samples, method ("wilson", "clustered" or "none").

    Raises:
      ValueError: a score outside 0 to 1.
    """
    clusters = [list(cluster) for cluster in clusters if cluster]
    scores = [score for cluster in clusters for score in cluster]
    if bad := [score for score in scores if not 0 <= score <= 1]:
        raise ValueError(f"score {bad[0]}; accepted: 0 to 1")
    counts = {"prompts": len(clusters), "samples": len(scores)}
    if not scores:
        return {"mean": None, "low": None, "high": None, **counts, "method": "none"}
    share = min(max(mean(scores), 0.0), 1.0)
    if len(scores) == len(clusters) and all(score in (0, 1) for score in scores):
        low, high = wilson(share, len(scores))
        return {"mean": share, "low": low, "high": high, **counts, "method": "wilson"}
    low, high = wilson(share, _effective(clusters, share))
    return {"mean": share, "low": low, "high": high, **counts, "method": "clustered"}


def mean_interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean of independent draws of any size and Student's t interval (Student 1908).

    Returns:
      mean, low, high (None for fewer than two draws), count.

    Raises:
      ValueError: no values.
    """
    if not values:
        raise ValueError("0 values; accepted: at least 1")
    centre, count = mean(values), len(values)
    if count < 2:
        return {"mean": centre, "low": None, "high": None, "count": count}
    variance = math.fsum((value - centre) ** 2 for value in values) / (count - 1)
    spread = float(special.stdtrit(count - 1, 0.5 + LEVEL / 2)) * math.sqrt(variance / count)
    return {"mean": centre, "low": centre - spread, "high": centre + spread, "count": count}


def _effective(clusters: list[list[float]], share: float) -> float:
    """The number of independent trials that the samples are worth."""
    prompts, samples = len(clusters), sum(map(len, clusters))
    if prompts < 2:
        return 1.0
    # Linearised variance of a ratio of totals: prompts may have different numbers of samples.
    residues = [math.fsum(score - share for score in cluster) for cluster in clusters]
    variance = prompts / (prompts - 1) * math.fsum(r * r for r in residues) / samples**2
    if variance <= 1e-18 or share in (0.0, 1.0):
        return float(prompts)
    t = float(special.stdtrit(prompts - 1, 0.5 + LEVEL / 2))
    return min(share * (1 - share) / variance * (Z / t) ** 2, float(samples))
