"""What a trained model can do: held-out loss, answers right as a whole, and how good its indexers' selection is."""

import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from longstraw_jax.pretrain import dense_pass
from longstraw_jax.pretrain.step import Batch, first_tokens, predictions
from longstraw_jax.types import Model, Params


@functools.partial(jax.jit, static_argnames=("model", "options"))
def judged(
    model: Model, base: Params, batch: Batch, options: dense_pass.Options
) -> tuple[Float[Array, "B T"], Int[Array, "B T"], dict[int, dict[str, Any]]]:
    """`step.predictions` from served weights: the targets' negative log-likelihood, the likeliest tokens, the sums."""
    return predictions(model, base, batch, options)


def answers_right(likeliest: Int[np.ndarray, "B T"], batch: Batch) -> Bool[np.ndarray, "B"]:
    """Rows whose every answer token is the likeliest one: exactly those that greedy decoding answers right.

    Up to its first wrong token greedy decoding has written the answer itself, so it sees what this pass saw.
    """
    return np.where(batch.answers, likeliest == batch.targets, True).all(1)


def held_out_loss(model: Model, base: Params, batch: Batch, keys: int) -> float:
    """Mean negative log-likelihood a token, in nats, with a selection of `keys` keys."""
    nll, _, _ = judged(model, base, batch, dense_pass.Options(keys, index=True))
    return float(np.asarray(nll)[batch.weights > 0].mean())


def retrieval(model: Model, base: Params, batch: Batch, keys: int) -> dict[str, float]:
    """Share of rows answered right as a whole, of answers' first tokens and of all their tokens right; rows."""
    likeliest = np.asarray(judged(model, base, batch, dense_pass.Options(keys, index=True))[1])
    exact = answers_right(likeliest, batch)
    return {
        "exact": float(exact.mean()),
        "bound": float((likeliest == batch.targets)[np.asarray(first_tokens(batch.answers))].mean()),
        "tokens": float((likeliest == batch.targets)[batch.answers].mean()),
        "rows": int(exact.size),
    }


def selection_quality(model: Model, base: Params, batch: Batch, keys: int) -> dict[str, Any]:
    """Attention mass on selected keys in units of the best possible selection's, for each of dense_pass.CONTROLS.

    The attention is each layer's own over all keys, a mean over heads, in a pass that attends to the selected ones;
    the best selection is that layer's own too, so a shared layer is held to keys that it did not choose. Means over
    queries that see more than `keys` keys.

    Returns:
      `queries`, their number; by control the mean over layers, and `layers`, a dict by layer of the same.

    Raises:
      ValueError: no query sees that many keys.
    """
    _, _, layers = judged(model, base, batch, dense_pass.Options(keys, index=True, measure=True))
    queries = int(next(iter(layers.values()))["queries"])
    if queries == 0:
        raise ValueError(f"keys={keys}; accepted: fewer than the {batch.ids.shape[1]} tokens of a row")
    shares = {i: np.asarray(layer["share"], np.float64) / queries for i, layer in layers.items()}
    named = {i: dict(zip(dense_pass.CONTROLS, map(float, share), strict=True)) for i, share in shares.items()}
    mean = np.mean(list(shares.values()), axis=0)
    return {
        "queries": queries,
        **dict(zip(dense_pass.CONTROLS, map(float, mean), strict=True)),
        "layers": {str(i): share for i, share in named.items()},
    }
