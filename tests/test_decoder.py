"""The whole trunk: IndexShare, causality, gradients, and a traced program that does not grow with depth."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import tiny_config, tiny_ids, tiny_params

from longstraw_jax import forward, sharding
from longstraw_jax.config import model_config_from_hf
from longstraw_jax.model import decoder

GLM52 = json.loads((pathlib.Path(__file__).parents[1] / "experiments/configs/glm52.json").read_text())
CONFIG = tiny_config()
TOKENS = 17


@functools.partial(jax.jit, static_argnames=("model", "collect"))
def run(model, base, ids, collect=False):
    return forward.forward(model, base, None, ids, collect=collect)


@pytest.fixture(scope="module")
def tiny():
    """Model, weights, ids, and what the forward gives with its intermediates."""
    model, base, ids = decoder.make_model(CONFIG), tiny_params(CONFIG), tiny_ids(CONFIG, 2, TOKENS)
    return model, base, ids, run(model, base, ids, collect=True)


def leaves_by_name(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_f3_a_shared_layer_attends_to_its_source_layers_keys(tiny):
    """Layer 2 is full, 3 and 4 share from it; 4 is the last layer."""
    layers = tiny[3][1]
    chosen = [np.sort(np.asarray(layer["selection"]), axis=-1) for layer in layers]
    np.testing.assert_array_equal(chosen[3], chosen[2])
    np.testing.assert_array_equal(chosen[4], chosen[2])
    assert (chosen[1] != chosen[2]).any() and (chosen[0] != chosen[1]).any()
    assert [i for i, layer in enumerate(layers) if "index_scores" in layer] == [0, 1, 2]


def test_f3_the_selection_decides_what_a_shared_layer_outputs(tiny):
    """Only layer 2's indexer changes, and layer 3's attention with it; where all keys are visible nothing does."""
    model, base, ids, (_, before) = tiny
    key = base["segments"][1]["layers"][0]["self_attn"]["indexer"]["wk"]["weight"]
    changed = jax.tree.map(lambda x: -x if x is key else x, base)
    _, after = run(model, changed, ids, collect=True)
    moved = [np.abs(after[i]["attn_out"] - before[i]["attn_out"]).max(-1) for i in range(4)]
    assert (moved[0] == 0).all() and (moved[1] == 0).all()
    few = CONFIG.index_topk  # the first queries see no more keys than the selection holds
    assert (moved[2][:, few:] > 1e-3).mean() > 0.5 and (moved[3][:, few:] > 1e-3).mean() > 0.5
    assert moved[2][:, :few].max() < 1e-4


def test_f3_shared_layers_have_no_indexer_weights():
    shapes = decoder.param_shapes(CONFIG)["segments"]
    owners = {
        segment.layer_index(i, j): "indexer" in shapes[s]["layers"][j]["self_attn"]
        for s, segment in enumerate(CONFIG.segments())
        for j in range(len(segment.runs))
        for i in range(segment.stack(j))
    }
    assert owners == {0: True, 1: True, 2: True, 3: False, 4: False}


def test_f4_short_rows_hold_no_masked_key(tiny):
    for layer in tiny[3][1]:
        chosen = np.asarray(layer["selection"])
        seen = np.arange(TOKENS)[:, None]
        assert ((chosen >= -1) & (chosen <= seen)).all()
        np.testing.assert_array_equal(
            (chosen >= 0).sum(-1)[0], np.minimum(np.arange(TOKENS) + 1, CONFIG.index_topk)
        )


def test_later_tokens_change_nothing_before_them(tiny):
    model, base, ids, (before, _) = tiny
    changed = ids.at[:, 11].set((ids[:, 11] + 1) % CONFIG.vocab_size)
    after, _ = run(model, base, changed, collect=True)
    np.testing.assert_array_equal(after[:, :11], before[:, :11])
    assert (np.abs(after[:, 11:] - before[:, 11:]).max(-1) > 1e-4).all()


def test_rows_of_a_batch_do_not_see_each_other(tiny):
    model, base, ids, (before, _) = tiny
    changed = ids.at[1].set((ids[1] + 1) % CONFIG.vocab_size)
    after, _ = run(model, base, changed, collect=True)
    np.testing.assert_array_equal(after[0], before[0])


def test_gradient_is_finite_skips_the_indexer_and_ignores_recomputation():
    config = tiny_config(
        num_hidden_layers=2, indexer_types=["full", "shared"], mlp_layer_types=["dense", "sparse"]
    )
    model, base, ids = decoder.make_model(config), tiny_params(config), tiny_ids(config, 1, 11)

    def loss(base, model):
        hidden, _ = forward.forward(model, base, None, ids)
        return (forward.logits(model, base, None, hidden) ** 2).mean()

    grads = leaves_by_name(jax.jit(jax.grad(loss), static_argnums=1)(base, model))
    plain = dataclasses.replace(model, remat=False)
    for name, want in leaves_by_name(jax.jit(jax.grad(loss), static_argnums=1)(base, plain)).items():
        scale = np.abs(want).max()
        assert np.isfinite(want).all()
        np.testing.assert_allclose(grads[name], want, atol=1e-5 * scale + 1e-12, err_msg=name)
        without = "indexer" in name or "correction_bias" in name
        assert (scale == 0) == without, name


def test_bf16_weights_give_bf16_hidden_states_and_fp32_logits():
    config = tiny_config(
        dtype="bfloat16", num_hidden_layers=2, indexer_types=["full"] * 2, mlp_layer_types=["sparse"] * 2
    )
    model, base, ids = decoder.make_model(config), tiny_params(config), tiny_ids(config, 1, 9)
    hidden, _ = run(model, base, ids)
    logits = forward.logits(model, base, None, hidden)
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32) and np.isfinite(logits).all()


def test_init_matches_its_shapes_and_depends_on_the_seed():
    config = tiny_config(num_hidden_layers=1, indexer_types=["full"], mlp_layer_types=["dense"])
    base, other = (decoder.init_params(config, seed) for seed in (0, 1))
    shapes = decoder.param_shapes(config)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), base) == jax.tree.map(
        lambda s: (s.shape, s.dtype), shapes
    )
    embed = "['embed_tokens']['weight']"
    assert (leaves_by_name(base)[embed] != leaves_by_name(other)[embed]).any()
    assert np.std(leaves_by_name(base)[embed]) == pytest.approx(config.initializer_range, rel=0.1)


def test_bad_attention_and_mesh_are_refused_by_name():
    with pytest.raises(ValueError, match="attention='flash'.*'absorbed' or 'expanded'"):
        decoder.make_model(CONFIG, attention="flash")
    with pytest.raises(
        sharding.ShardingError, match=r"dimension '\w+'=\d+ is not divisible by the mesh of 8"
    ):
        decoder.make_model(CONFIG, mesh=sharding.make_mesh(8))
    with pytest.raises(sharding.ShardingError, match="mesh.devices=1000.*1 to"):
        sharding.make_mesh(1000)


def equations(jaxpr) -> int:
    """Equations of a jaxpr and of every jaxpr inside it."""
    inner = (v for eqn in jaxpr.eqns for v in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=_is_jaxpr))
    return len(jaxpr.eqns) + sum(equations(getattr(v, "jaxpr", v)) for v in inner if _is_jaxpr(v))


def _is_jaxpr(value) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@pytest.mark.parametrize("program", ["forward", "gradient"])
def test_traced_program_does_not_grow_with_depth(program):
    def size(layers):
        config = model_config_from_hf(GLM52 | {"num_hidden_layers": layers})
        model = decoder.make_model(config)

        def total(base, ids):
            return forward.forward(model, base, None, ids)[0].astype(jnp.float32).sum()

        traced = total if program == "forward" else jax.value_and_grad(total)
        ids = jax.ShapeDtypeStruct((1, 128), jnp.int32)
        return equations(jax.make_jaxpr(traced)(decoder.param_shapes(config), ids).jaxpr)

    small = size(14)
    assert small > 1000  # the count sees into scans
    assert size(78) <= 1.5 * small
