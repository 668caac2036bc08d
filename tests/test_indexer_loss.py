"""The indexer's loss: selection as a mask, divergence over all and over selected keys, and what its gradient is."""

import jax
import jax.numpy as jnp
import numpy as np

from longstraw_jax.pretrain import indexer_loss
from pallas_kernels.indexer_topk import reference

T, K = 12, 4


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


CAUSAL = np.tril(np.ones((T, T), bool))


def test_the_mask_holds_the_keys_that_the_specification_selects():
    """With few values there are ties at every cut; signed zeros tie; rows that see fewer keys take them all."""
    kinds = np.stack([draw(0, T, T), np.round(draw(1, T, T)), np.zeros((T, T)), -np.abs(np.round(draw(2, T, T)))])
    scores = np.where(kinds == 0, 0.0, kinds).astype(np.float32)  # as index_scores gives them
    visible = np.broadcast_to(CAUSAL, scores.shape)
    mask = np.asarray(indexer_loss.selected_keys(scores, visible, K))
    _, ids = reference.select(scores.reshape(-1, T), visible.reshape(-1, T), K)
    wanted = (np.asarray(ids)[..., None] == np.arange(T)).any(1).reshape(mask.shape)
    np.testing.assert_array_equal(mask, wanted)
    np.testing.assert_array_equal(mask.sum(-1), np.broadcast_to(np.minimum(np.arange(T) + 1, K), mask.shape[:-1]))
    signed = np.where(scores == 0, np.where(np.arange(T) % 2, -0.0, 0.0), scores).astype(np.float32)
    np.testing.assert_array_equal(indexer_loss.selected_keys(signed, visible, K), mask)


def test_enough_keys_select_all():
    np.testing.assert_array_equal(indexer_loss.selected_keys(draw(0, T, T), CAUSAL, T), CAUSAL)
    np.testing.assert_array_equal(indexer_loss.selected_keys(draw(0, T, T), CAUSAL, T - 1)[:-1], CAUSAL[:-1])


def test_keys_are_of_the_same_document():
    seen = np.asarray(indexer_loss.visible_keys(jnp.array([[0, 0, 1, 1, -1, -1]]))[0])
    wanted = np.zeros((6, 6), bool)
    for start in (0, 2, 4):
        wanted[start, start] = wanted[start + 1, start] = wanted[start + 1, start + 1] = True
    np.testing.assert_array_equal(seen, wanted)


def test_the_sparse_loss_is_the_dense_one_on_the_selected_keys():
    """A softmax over some keys is the softmax over all renormalised on them; over all keys the losses are one."""
    attention, index = draw(3, T, T), draw(4, T, T)
    mask = indexer_loss.selected_keys(index, CAUSAL, K)
    sparse = indexer_loss.divergence(
        indexer_loss.masked_softmax(attention, mask), indexer_loss.masked_log_softmax(index, mask)
    )
    p, q = (np.where(CAUSAL, np.exp(x.astype(np.float64)), 0) for x in (attention, index))
    p, q = (np.where(mask, x, 0) / np.where(mask, x, 0).sum(-1, keepdims=True) for x in (p, q))
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.where(p > 0, p * np.log(p / q), 0).sum(-1)
    np.testing.assert_allclose(sparse, wanted, atol=1e-6)
    assert sparse[0] == 0 and (sparse[K:] > 0).all()


def test_gradient_is_the_difference_to_the_mean_of_the_served_layers():
    """Of the mean divergence of three layers by the scores: index - mean attention, and nothing by the attention."""
    layers = [indexer_loss.masked_softmax(draw(seed, T, T), CAUSAL) for seed in range(3)]

    def loss(index, layers):
        log_index = indexer_loss.masked_log_softmax(index, CAUSAL)
        return sum(indexer_loss.divergence(layer, log_index).sum() for layer in layers) / len(layers)

    by_index, by_layers = jax.grad(loss, argnums=(0, 1))(jnp.asarray(draw(9, T, T)), layers)
    wanted = indexer_loss.masked_softmax(draw(9, T, T), CAUSAL) - sum(layers) / len(layers)
    np.testing.assert_allclose(by_index, wanted, atol=1e-6)
    assert all((np.asarray(x) == 0).all() for x in by_layers)


def test_captured_share_is_one_for_the_best_choice():
    attention = indexer_loss.masked_softmax(draw(5, T, T), CAUSAL)
    best = indexer_loss.selected_keys(attention, CAUSAL, K)
    other = indexer_loss.selected_keys(draw(6, T, T), CAUSAL, K)
    np.testing.assert_allclose(indexer_loss.captured_share(attention, best, best), 1.0)
    shares = np.asarray(indexer_loss.captured_share(attention, other, best))
    assert (shares <= 1).all() and (shares[K:] < 1).any()
