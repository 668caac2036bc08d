"""Truncated importance weights: cap, constancy under differentiation, masked garbage."""

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.rl.corrections import truncated_importance

MASK = jnp.array([True, True, True, False])


def test_weights_are_ratios_up_to_the_cap():
    trainer = jnp.array([-1.0, -1.0, -1.0, -1.0])
    sampler = jnp.array([-1.0, -0.5, -200.0, jnp.nan])
    weights = truncated_importance(trainer, sampler, 2.0, MASK)
    np.testing.assert_allclose(weights, [1.0, np.exp(-0.5), 2.0, 1.0], rtol=1e-6)


def test_weights_are_constants():
    def weighted(logp):
        return jnp.sum(truncated_importance(logp, jnp.full(4, -1.5), 5.0, MASK) * logp)

    logp = jnp.array([-1.0, -1.2, -1.4, -3.0])
    np.testing.assert_array_equal(
        jax.grad(weighted)(logp), truncated_importance(logp, jnp.full(4, -1.5), 5.0, MASK)
    )


def test_c1_temperature_belongs_under_the_softmax():
    logits = jax.random.normal(jax.random.key(0), (4, 50)) * 3
    sampler = jax.nn.log_softmax(logits / 0.6)[:, 7]
    mask = jnp.ones(4, bool)
    same = truncated_importance(jax.nn.log_softmax(logits / 0.6)[:, 7], sampler, 2.0, mask)
    np.testing.assert_array_equal(same, 1.0)
    divided_after = truncated_importance(jax.nn.log_softmax(logits)[:, 7] / 0.6, sampler, 1e9, mask)
    assert np.abs(np.log(divided_after)).min() > 0.1
