"""One optimizer step on all weights: language-model loss for the trunk, divergence for the indexers, a sign for biases.

The three share no gradient. The indexers' inputs and targets are constants, selection has no derivative, and the
routers' correction biases move by load alone.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int
from optax import contrib

from longstraw_jax import parallel
from longstraw_jax.model import decoder
from longstraw_jax.pretrain import dense_pass, router_balance
from longstraw_jax.types import Model, Params

TRUNK, INDEXER, BIAS = "trunk", "indexer", "bias"
TRAINED = (TRUNK, INDEXER)  # by an optimizer
_OUTSIDE_LAYERS = ("embed_tokens", "lm_head")


class Batch(NamedTuple):
    """Packed rows; arrays [B, T].

    Attributes:
      ids, segments, positions: as in dense_pass.run.
      targets: the token to predict at each place.
      weights: fp32, of each prediction in the loss and of its query in the indexers'; 0 at a document's last token.
      answers: predictions that belong to an answer, for the metrics.
    """

    ids: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    weights: Float[Array, "B T"]
    answers: Bool[Array, "B T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Weights in fp32 (used in the model's dtypes) and the optimizer state of each part of TRAINED."""

    params: Params
    moments: dict[str, Any]


class Stage(NamedTuple):
    """Static choices of a step.

    Attributes:
      keys: keys that a query selects; None for dense attention.
      trained: parts of TRAINED that move. (INDEXER,) alone is the indexer's warm-up.
      bias_rate: step of the routers' correction biases where the trunk is trained.
    """

    keys: int | None
    trained: tuple[str, ...]
    bias_rate: float


def part_of(path: tuple[Any, ...]) -> str:
    """Which part trains the parameter at this path of the base weights."""
    names = [str(getattr(key, "key", key)) for key in path]
    if "e_score_correction_bias" in names:
        return BIAS
    return INDEXER if "indexer" in names else TRUNK


def part(tree: Params, name: str) -> Params:
    """The tree with None in place of what belongs to other parts; None holds no leaf."""
    return jax.tree_util.tree_map_with_path(lambda path, x: x if part_of(path) == name else None, tree)


def joined(*trees: Params) -> Params:
    """Parts of one tree put together again."""
    return jax.tree.map(lambda *xs: next((x for x in xs if x is not None), None), *trees, is_leaf=lambda x: x is None)


def make_optimizer(
    kind: str, *, b1: float = 0.9, b2: float = 0.95, weight_decay: float = 0.1, max_grad_norm: float = 1.0
) -> optax.GradientTransformation:
    """Updates in units of the learning rate, which `update` is given each step; weights decay only as matrices.

    Args:
      kind: "adamw", or "muon": orthogonalised momentum (optax.contrib) for the matrices inside layers, each expert
        its own, and adamw for embedding, head and vectors.

    Raises:
      ValueError: an unknown kind.
    """
    adam = functools.partial(optax.adamw, 1.0, b1=b1, b2=b2, weight_decay=weight_decay, mask=_matrices)
    if kind == "adamw":
        return optax.chain(optax.clip_by_global_norm(max_grad_norm), adam())
    if kind == "muon":
        # consistent_rms gives the updates adam's size, so that one learning rate serves both.
        muon = contrib.muon(
            1.0, adam_b1=b1, adam_b2=b2, weight_decay=weight_decay, weight_decay_mask=_matrices,
            consistent_rms=0.2, muon_weight_dimension_numbers=_dimensions,
        )  # fmt: skip
        return optax.chain(optax.clip_by_global_norm(max_grad_norm), muon)
    raise ValueError(f"optimizer.kind={kind!r}; accepted: 'adamw' or 'muon'")


def _is_matrix(path, x) -> bool:
    stacked = getattr(path[0], "key", path[0]) not in (*_OUTSIDE_LAYERS, "norm")
    return x.ndim - stacked >= 2


def _matrices(params: Params) -> Params:
    return jax.tree_util.tree_map_with_path(_is_matrix, params)


def _dimensions(params: Params) -> Params:
    """Layers and experts are batches of matrices [in, out]."""

    def one(path, x):
        outside = getattr(path[0], "key", path[0]) in _OUTSIDE_LAYERS
        hidden = _is_matrix(path, x) and not outside
        return contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if hidden else None

    return jax.tree_util.tree_map_with_path(one, params)


def init_state(model: Model, optimizer: optax.GradientTransformation, seed: int) -> State:
    """Random weights as the configuration draws them, in fp32, and fresh moments."""
    drawn = decoder.init_params(dataclasses.replace(model.config, dtype="float32"), seed)
    state = State(drawn, {name: optimizer.init(part(drawn, name)) for name in TRAINED})
    return jax.device_put(state, jax.devices()[0])  # as a step returns it, or the second step compiles again


def served(model: Model, params: Params) -> Params:
    """The weights in the dtypes that the model runs and a checkpoint holds."""
    return jax.tree.map(lambda x, like: x.astype(like.dtype), params, decoder.param_shapes(model.config))


def predictions(
    model: Model, base: Params, batch: Batch, options: dense_pass.Options
) -> tuple[Float[Array, "B T"], Int[Array, "B T"], dict[int, dict[str, Any]]]:
    """fp32 negative log-likelihood of each target, the likeliest token, and the sums of each layer (dense_pass.run)."""
    hidden, layers = dense_pass.run(model, base, batch.ids, batch.segments, batch.positions, options, batch.weights)
    flat = hidden.reshape(-1, hidden.shape[-1])
    logits = parallel.logits(flat, base["lm_head"]["weight"], None, None).reshape(*batch.ids.shape, -1)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], axis=-1)[..., 0]
    return -picked, logits.argmax(-1), layers


def first_tokens(answers: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """The first prediction of each answer."""
    return answers & ~jnp.pad(answers, ((0, 0), (1, 0)))[:, :-1]


def losses(
    model: Model, params: Params, batch: Batch, options: dense_pass.Options
) -> tuple[dict[str, tuple[Array, Array]], dict[int, dict[str, Any]]]:
    """Losses as (sum, count), and the sums of each layer.

    `language`: negative log-likelihood weighed by batch.weights. `answers`: of answers alone, `right`: how many of
    these are the likeliest token, and `bound`: the same of each answer's first token, which only the name that is
    asked for can tell. `divergence`: of all layers from their indexers, a mean over layers and over queries, which
    weigh as their predictions do: those that look up an answer are few.
    """
    nll, likeliest, layers = predictions(model, served(model, params), batch, options)
    answers = batch.answers.sum()
    first = first_tokens(batch.answers)
    sums = {
        "language": (jnp.where(batch.weights > 0, batch.weights * nll, 0.0).sum(), batch.weights.sum()),
        "answers": (jnp.where(batch.answers, nll, 0.0).sum(), answers),
        "right": ((batch.answers & (likeliest == batch.targets)).sum(), answers),
        "bound": ((first & (likeliest == batch.targets)).sum(), first.sum()),
    }
    if options.index:
        total = sum(layer["divergence"] for layer in layers.values())
        sums["divergence"] = (total, batch.weights.sum() * len(layers))
    return sums, layers


@functools.partial(jax.jit, static_argnames=("model", "optimizer", "stage"), donate_argnames="state")
def update(
    model: Model,
    optimizer: optax.GradientTransformation,
    stage: Stage,
    state: State,
    batch: Batch,
    learning_rates: dict[str, Float[Array, ""]],
) -> tuple[State, dict[str, Array]]:
    """One step. A gradient that is not finite leaves the state as it was and is counted.

    Args:
      state: donated.
      learning_rates: by part of TRAINED.

    Returns:
      The state; and fp32 scalars: means of `losses`, `gradient_norm` of what is trained, `worst_excess` of the experts'
      load, and `skipped`, 1 for a step not taken.
    """
    options = dense_pass.Options(stage.keys, index=INDEXER in stage.trained or stage.keys is not None)

    def loss(params):
        sums, layers = losses(model, params, batch, options)
        means = {name: total / jnp.maximum(count, 1) for name, (total, count) in sums.items()}
        wanted = [means[name] for part, name in ((TRUNK, "language"), (INDEXER, "divergence")) if part in stage.trained]
        return sum(wanted), (means, layers)

    grads, (means, layers) = jax.grad(loss, has_aux=True)(state.params)
    grads = {name: part(grads, name) for name in stage.trained}
    norm = optax.tree.norm(grads)
    taken = jnp.isfinite(norm)
    parts, moments = {name: part(state.params, name) for name in (*TRAINED, BIAS)}, dict(state.moments)
    for name, grad in grads.items():
        updates, moments[name] = optimizer.update(grad, state.moments[name], parts[name])
        parts[name] = jax.tree.map(lambda p, u, name=name: p + learning_rates[name] * u, parts[name], updates)
    loads = {i: layer["load"] for i, layer in layers.items() if "load" in layer}
    if TRUNK in stage.trained:
        parts[BIAS] = _moved_biases(model, parts[BIAS], loads, stage.bias_rate)
    after = State(joined(*parts.values()), moments)
    after = jax.tree.map(lambda new, old: jnp.where(taken, new, old), after, state)
    metrics = means | {"gradient_norm": norm, "skipped": ~taken}
    if loads:
        metrics["worst_excess"] = router_balance.worst_excess(jnp.stack(list(loads.values())))
    return after, jax.tree.map(lambda x: x.astype(jnp.float32), metrics)


def _moved_biases(model: Model, biases: Params, loads: dict[int, Array], rate: float) -> Params:
    """Every sparse layer's bias after its load; rows of a parameter are layers of its run."""
    segments = model.config.segments()

    def one(path, bias):
        segment, run = segments[path[1].key], path[3].key
        rows = [loads[segment.layer_index(i, run)] for i in range(bias.shape[0])]
        return router_balance.moved_bias(bias, jnp.stack(rows), rate)

    return jax.tree_util.tree_map_with_path(one, biases)


def learning_rate(progress: float, *, peak: float, warmup: float, decay: float, final: float) -> float:
    """Warm-up, constant, then down: linear from `peak` to `final` x peak over the last part (WSD).

    Args:
      progress: of the whole run, 0 to 1.
      warmup, decay: shares of the run.
    """
    rise = min(1.0, progress / warmup) if warmup else 1.0
    fall = np.clip((1.0 - progress) / decay, 0.0, 1.0) if decay else 1.0
    return float(peak * rise * (final + (1.0 - final) * fall))
