"""A step on all weights: whose gradient trains what, against the sparse pass; frozen parts; biases; learning rates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import tiny_config, tiny_ids, tiny_params

from longstraw_jax import forward
from longstraw_jax.model import decoder
from longstraw_jax.pretrain import dense_pass, step
from longstraw_jax.pretrain.step import BIAS, INDEXER, TRUNK

CONFIG = tiny_config(num_hidden_layers=2, indexer_types=["full", "shared"], mlp_layer_types=["sparse"] * 2)
MODEL = decoder.make_model(CONFIG)
ROWS, TOKENS, KEYS = 2, 16, CONFIG.index_topk
PLAIN = decoder.make_model(CONFIG, remat=False)
OPTIMIZER = step.make_optimizer("adamw")
RATES = {TRUNK: np.float32(0.1), INDEXER: np.float32(0.1)}
BOTH = step.Stage(KEYS, (TRUNK, INDEXER), 0.5)


def leaves(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.fixture(scope="module")
def params():
    return tiny_params(CONFIG)


@pytest.fixture(scope="module")
def batch():
    ids = np.asarray(tiny_ids(CONFIG, ROWS, TOKENS))
    weights = np.ones(ids.shape, np.float32)
    weights[:, -1] = 0
    weights[:, 5:9] = 3.0
    places = np.broadcast_to(np.arange(TOKENS), ids.shape)
    return step.Batch(ids, np.zeros_like(ids), places, np.roll(ids, -1, 1), weights, weights > 1)


def updated(params, batch, stage):
    moments = {name: OPTIMIZER.init(step.part(params, name)) for name in step.TRAINED}
    state = step.State(jax.tree.map(jnp.array, params), moments)  # update takes the buffers
    return step.update(PLAIN, OPTIMIZER, stage, state, batch, RATES)


@pytest.fixture(scope="module")
def after(params, batch):
    return updated(params, batch, BOTH)


def moved(params, after):
    """Names of the leaves that differ, by part."""
    before, found = leaves(params), {name: [] for name in (TRUNK, INDEXER, BIAS)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(after):
        name = jax.tree_util.keystr(path)
        if (np.asarray(leaf) != np.asarray(before[name])).any():
            found[step.part_of(path)].append(name)
    return found


def test_parts_are_all_of_the_weights(params):
    parts = [step.part(params, name) for name in (TRUNK, INDEXER, BIAS)]
    again = step.joined(*parts)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True))
    assert {name.split("'")[-4] for name in leaves(parts[1])} == {"wq_b", "wk", "weights_proj", "k_norm"}
    assert len(jax.tree.leaves(parts[2])) == 2 and "e_score_correction_bias" in list(leaves(parts[2]))[0]


def test_the_language_loss_and_its_gradient_are_the_sparse_pass_s(params, batch):
    """By every weight, against autodiff through forward.forward; both leave indexer and biases without a gradient."""

    def sparse(base):
        hidden, _ = forward.forward(MODEL, base, None, batch.ids)
        logprobs = jax.nn.log_softmax(forward.logits(MODEL, base, None, hidden))
        picked = jnp.take_along_axis(logprobs, batch.targets[..., None], axis=-1)[..., 0]
        return -(batch.weights * picked).sum() / batch.weights.sum()

    def dense(base):
        sums, _ = step.losses(MODEL, base, batch, dense_pass.Options(KEYS, index=True))
        return sums["language"][0] / sums["language"][1]

    (wanted, wanted_grads), (found, grads) = (jax.jit(jax.value_and_grad(f))(params) for f in (sparse, dense))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    grads = leaves(grads)
    for name, want in leaves(wanted_grads).items():
        scale = np.abs(want).max()
        assert (scale == 0) == ("indexer" in name or "correction_bias" in name), name
        np.testing.assert_allclose(grads[name], want, atol=2e-5 * scale, err_msg=name)


def test_first_tokens_are_where_answers_begin():
    answers = np.array([[1, 1, 0, 1, 0, 0], [0, 1, 1, 1, 0, 1]], bool)
    np.testing.assert_array_equal(step.first_tokens(answers), [[1, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 1]])


def test_queries_weigh_in_the_divergence_as_their_predictions_do(params, batch, after):
    """Its mean is over batch.weights; that of the queries behind an answer differs from that of all alike."""
    weighed = float(after[1]["divergence"])
    _, layers = jax.jit(step.losses, static_argnums=(0, 3))(PLAIN, params, batch, dense_pass.Options(KEYS, index=True))
    total = sum(float(layer["divergence"]) for layer in layers.values())
    np.testing.assert_allclose(weighed, total / (batch.weights.sum() * len(layers)), rtol=1e-5)
    assert float(after[1]["bound"]) in (0.0, 0.5, 1.0)  # one answer a row


def test_a_second_step_compiles_nothing(batch):
    state, before = step.init_state(PLAIN, OPTIMIZER, 0), step.update._cache_size()
    for _ in range(2):
        state, _ = step.update(PLAIN, OPTIMIZER, BOTH, state, batch, RATES)
    assert step.update._cache_size() == before + 1


def test_both_parts_and_the_biases_move(params, after):
    state, metrics = after
    found = moved(params, state.params)
    assert len(found[INDEXER]) == len(leaves(step.part(params, INDEXER)))
    assert len(found[TRUNK]) == len(leaves(step.part(params, TRUNK)))
    assert len(found[BIAS]) == 2 and float(metrics["skipped"]) == 0
    for name, bias in leaves(step.part(state.params, BIAS)).items():
        steps = np.asarray(bias) - np.asarray(leaves(params)[name])
        assert np.isin(np.round(steps, 5), [-0.5, 0.0, 0.5]).all()
    assert float(metrics["language"]) > 0 and float(metrics["divergence"]) > 0


def test_warm_up_trains_the_indexers_alone(params, batch):
    """Nothing else moves, and repeated on one batch it brings the divergence from dense attention down."""
    warm_up = step.Stage(None, (INDEXER,), 0.5)
    state, first = updated(params, batch, warm_up)
    found = moved(params, state.params)
    assert found[TRUNK] == found[BIAS] == [] and found[INDEXER]
    for _ in range(20):
        state, last = step.update(PLAIN, OPTIMIZER, warm_up, state, batch, {name: r / 4 for name, r in RATES.items()})
    assert float(last["divergence"]) < 0.5 * float(first["divergence"])
    assert float(last["language"]) == float(first["language"])


def test_a_gradient_that_is_not_finite_changes_nothing(params, batch):
    broken = batch._replace(weights=np.full_like(batch.weights, np.inf))
    state, metrics = updated(params, broken, BOTH)
    assert float(metrics["skipped"]) == 1
    assert moved(params, state.params) == {TRUNK: [], INDEXER: [], BIAS: []}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.moments))


def test_bf16_runs_in_served_weights(params):
    model = decoder.make_model(tiny_config(**{"dtype": "bfloat16"} | {
        "num_hidden_layers": 2, "indexer_types": ["full", "shared"], "mlp_layer_types": ["sparse"] * 2}))  # fmt: skip
    served = leaves(step.served(model, params))
    fp32 = {name for name, x in served.items() if x.dtype == jnp.float32}
    assert {name.split("'")[-2] for name in fp32} == {"e_score_correction_bias", "weight"}
    assert all("gate'" in name or "weights_proj" in name for name in fp32)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_matrices_alone_decay(params, kind):
    """With no gradient an update is the decay; embedding and head have none under muon."""
    optimizer = step.make_optimizer(kind, weight_decay=0.1)
    block = params["segments"][0]["layers"][0]
    kept = {name: block[name] for name in ("input_layernorm",)} | {"mlp": {"experts": block["mlp"]["experts"]}}
    few = {"embed_tokens": params["embed_tokens"], "norm": params["norm"], "segments": {0: {"layers": {0: kept}}}}
    zero = jax.tree.map(jnp.zeros_like, few)
    updates, _ = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(zero, few)
    for name, update in leaves(updates).items():
        matrix = "norm" not in name and (kind == "adamw" or name.startswith("['segments']"))
        np.testing.assert_allclose(update, (-0.1 if matrix else 0.0) * leaves(few)[name], atol=1e-6, err_msg=name)


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ValueError, match="optimizer.kind='sgd'; accepted: 'adamw' or 'muon'"):
        step.make_optimizer("sgd")


def test_learning_rate_rises_stays_and_falls():
    rate = [step.learning_rate(p, peak=2.0, warmup=0.1, decay=0.4, final=0.1) for p in (0, 0.05, 0.1, 0.5, 0.6, 0.8, 1)]
    np.testing.assert_allclose(rate, [0, 1, 2, 2, 2, 1.1, 0.2])
    assert step.learning_rate(1.0, peak=3.0, warmup=0.0, decay=0.0, final=0.0) == 3.0
