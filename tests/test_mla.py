"""Latent attention: absorbed and expanded form, what the latent holds, the eps of its norms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import filled, tiny_config, tiny_ids, tiny_params

from longstraw_jax import forward
from longstraw_jax.model import decoder, rope
from longstraw_jax.model.block import Block
from longstraw_jax.model.linear import Pair
from longstraw_jax.model.mla import MLA
from longstraw_jax.model.norms import LayerNorm, RMSNorm

CONFIG = tiny_config()
TOKENS = 7


def build(config=CONFIG):
    return filled(MLA(config, "shared", stack=None, dtype=jnp.float32))


def projected(module, pairs):
    h = jax.random.normal(jax.random.key(1), (1, TOKENS, CONFIG.hidden_size))
    tables = rope.cos_sin(jnp.arange(TOKENS)[None], CONFIG.rope_parameters, CONFIG.qk_rope_head_dim)
    return jax.jit(lambda h: module.project(h, *tables, pairs))(h)


def kv_b_pair(gate=None):
    a, b = (jax.random.normal(jax.random.key(i), shape) for i, shape in ((2, (12, 2)), (3, (2, 3 * 16))))
    return {"self_attn.kv_b_proj": Pair(a, b, 0.7, gate)}


def softmax_values(scores, values):
    masked = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool))[:, None], scores, -jnp.inf)
    return jnp.einsum("tns,s...->tn...", jax.nn.softmax(masked, axis=-1), values)


@pytest.mark.parametrize("pairs", [{}, kv_b_pair()], ids=["base", "adapted"])
def test_absorbed_equals_expanded(pairs):
    """Value and nope widths differ, so a mixed-up split of kv_b shows."""
    module = build()
    _, q_nope, q_pe, latent = projected(module, pairs)

    @jax.jit
    def forms(q_nope, q_pe, latent):
        k, v = module.expand(latent, pairs)
        expanded = jnp.einsum("tnh,snh->tns", jnp.concatenate([q_nope, q_pe], -1)[0], k[0])
        absorbed = jnp.einsum("tnw,sw->tns", module.absorb(q_nope, q_pe, pairs)[0], latent[0])
        weights = softmax_values(expanded, jnp.eye(TOKENS))
        want = jnp.einsum("tns,snv->tnv", weights, v[0])
        attended = jnp.einsum("tns,sr->tnr", weights, latent[0, :, :12])
        return (absorbed, expanded), (module.unabsorb(attended[None], pairs)[0], want)

    for found, want in forms(q_nope, q_pe, latent):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


def test_gated_tokens_see_no_update():
    gate = jnp.arange(TOKENS)[None] >= 3
    module, pairs = build(), kv_b_pair(gate)
    _, q_nope, q_pe, latent = projected(module, {})
    attended = jnp.broadcast_to(latent[:, :, None, :12], (1, TOKENS, 3, 12))
    for gated, base, full in (
        (
            module.absorb(q_nope, q_pe, pairs),
            module.absorb(q_nope, q_pe, {}),
            module.absorb(q_nope, q_pe, kv_b_pair()),
        ),
        (
            module.unabsorb(attended, pairs),
            module.unabsorb(attended, {}),
            module.unabsorb(attended, kv_b_pair()),
        ),
    ):
        np.testing.assert_array_equal(gated[:, :3], base[:, :3])
        np.testing.assert_array_equal(gated[:, 3:], full[:, 3:])
        assert (base[:, 3:] != full[:, 3:]).any()
    with pytest.raises(ValueError, match="attention='absorbed'"):
        module.expand(latent, pairs)


def test_latent_is_the_normed_kv_then_the_rotated_key():
    module = build()
    h = jax.random.normal(jax.random.key(1), (1, TOKENS, CONFIG.hidden_size))
    qr, _, _, latent = projected(module, {})
    c = np.asarray(h @ module.kv_a_proj_with_mqa.weight[...], np.float64)
    norm = c[..., :12] / np.sqrt((c[..., :12] ** 2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(latent[..., :12], norm, atol=1e-5)
    np.testing.assert_allclose(latent[:, 0, 12:], np.concatenate([c[:, 0, 12::2], c[:, 0, 13::2]], -1), atol=1e-5)
    np.testing.assert_allclose(jnp.mean(qr**2, -1), 1, atol=1e-3)  # the query latent is normed: it feeds the indexer


def test_latent_norms_take_rms_norm_eps_unless_overridden():
    def eps(config):
        module = build(config)
        return module.q_a_layernorm.eps, module.kv_a_layernorm.eps

    assert eps(CONFIG) == (1e-5, 1e-5)
    assert eps(dataclasses.replace(CONFIG, latent_norm_eps=1e-6)) == (1e-6, 1e-6)
    changed = dataclasses.replace(CONFIG, latent_norm_eps=1e-6)
    block = filled(Block(changed, ("shared", "dense"), stack=None, dtype=jnp.float32))
    assert block.input_layernorm.eps == block.post_attention_layernorm.eps == 1e-5


def test_norms_have_fp32_statistics():
    x = jnp.asarray([[3e2, 3e2, 1e-3, 0]], jnp.bfloat16) + jnp.zeros((2, 4), jnp.bfloat16)
    for kind in (RMSNorm, LayerNorm):
        module = filled(kind(4, 1e-5, stack=None, dtype=jnp.bfloat16))
        exact = filled(kind(4, 1e-5, stack=None, dtype=jnp.float32))(x.astype(jnp.float32))
        assert module(x).dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(module(x)), np.asarray(exact.astype(jnp.bfloat16)))
    assert np.isfinite(filled(RMSNorm(4, 1e-5, stack=None, dtype=jnp.float32))(jnp.zeros((1, 4)))).all()


def test_both_forms_give_one_model():
    config = tiny_config(num_hidden_layers=2, indexer_types=["full", "shared"], mlp_layer_types=["dense"] * 2)
    base, ids = tiny_params(config), tiny_ids(config, 2, 19)
    hidden = []
    for form in ("absorbed", "expanded"):
        model = decoder.make_model(config, attention=form)
        hidden.append(jax.jit(lambda base, model=model: forward.forward(model, base, None, ids)[0])(base))
    np.testing.assert_allclose(*hidden, atol=2e-4)
