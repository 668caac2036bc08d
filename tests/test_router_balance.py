"""Load balance by the sign of the load: what counts, which way a bias moves, and that it evens out a skewed router."""

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.pretrain import router_balance


def test_load_counts_real_tokens():
    ids = jnp.array([[0, 2], [2, 3], [1, 2]])
    load = router_balance.expert_load(ids, jnp.array([True, True, False]), 5)
    np.testing.assert_array_equal(load, [1, 0, 2, 1, 0])


def test_bias_moves_against_the_load():
    bias, load = jnp.array([[0.1, 0.2, 0.3]]), jnp.array([[9.0, 3.0, 6.0]])
    np.testing.assert_allclose(router_balance.moved_bias(bias, load, 0.01), [[0.09, 0.21, 0.3]], rtol=1e-6)
    assert float(router_balance.worst_excess(load)) == 0.5


def test_a_skewed_router_evens_out():
    """Fixed scores that favour two of eight experts: the bias alone brings the excess below a fifth."""
    scores = jax.nn.sigmoid(jax.random.normal(jax.random.key(0), (512, 8)) + jnp.array([3.0, 2.0, 0, 0, 0, 0, 0, -1.0]))

    @jax.jit
    def step(bias):
        _, ids = jax.lax.top_k(scores + bias, 2)
        load = router_balance.expert_load(ids, jnp.ones(512, bool), 8)
        return router_balance.moved_bias(bias, load, 0.01), router_balance.worst_excess(load)

    bias = jnp.zeros(8)
    bias, first = step(bias)
    for _ in range(100):
        bias, last = step(bias)
    assert float(first) > 1.5 and float(last) < 0.2
