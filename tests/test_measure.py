"""What is measured of a trained model: answers right as a whole, and the selection beside the best one."""

import numpy as np
import pytest
from tiny_models import tiny_config, tiny_ids, tiny_params

from longstraw_jax.model import decoder
from longstraw_jax.pretrain import dense_pass, measure, step

CONFIG = tiny_config(num_hidden_layers=2, indexer_types=["full", "shared"], mlp_layer_types=["sparse"] * 2)
MODEL = decoder.make_model(CONFIG)
ROWS, TOKENS, KEYS, ANSWER = 3, 16, CONFIG.index_topk, 4


@pytest.fixture(scope="module")
def base():
    return tiny_params(CONFIG)


def batch_of(ids):
    """Rows whose last ANSWER tokens are the answer."""
    places = np.broadcast_to(np.arange(TOKENS), ids.shape)
    answers = (places >= TOKENS - ANSWER - 1) & (places < TOKENS - 1)
    weights = (places < TOKENS - 1).astype(np.float32)
    return step.Batch(ids, np.zeros_like(ids), places, np.roll(ids, -1, 1), weights, answers)


def likeliest(base, ids):
    return np.asarray(measure.judged(MODEL, base, batch_of(ids), dense_pass.Options(KEYS, index=True))[1])


def test_an_answer_is_right_when_greedy_decoding_gives_it(base):
    """Decoded a token at a time; one row's answer is that, the others' differ in their first or last token."""
    ids = np.array(tiny_ids(CONFIG, ROWS, TOKENS))
    for place in range(TOKENS - ANSWER, TOKENS):
        ids[:, place] = likeliest(base, ids)[:, place - 1]
    ids[1, TOKENS - ANSWER] = (ids[1, TOKENS - ANSWER] + 1) % CONFIG.vocab_size
    ids[2, -1] = (ids[2, -1] + 1) % CONFIG.vocab_size
    batch = batch_of(ids)
    np.testing.assert_array_equal(measure.answers_right(likeliest(base, ids), batch), [True, False, False])
    found = measure.retrieval(MODEL, base, batch, KEYS)
    assert found["rows"] == 3 and found["exact"] == pytest.approx(1 / 3)
    assert 1 / 3 + 1 / 4 <= found["tokens"] <= 11 / 12
    assert found["bound"] == pytest.approx(2 / 3)


def test_shares_are_of_the_best_selection(base):
    batch = batch_of(np.array(tiny_ids(CONFIG, ROWS, TOKENS)))
    found = measure.selection_quality(MODEL, base, batch, KEYS)
    assert found["queries"] == ROWS * (TOKENS - KEYS) and list(found["layers"]) == ["0", "1"]
    for control in dense_pass.CONTROLS:
        shares = [layer[control] for layer in found["layers"].values()]
        assert all(0 < share < 1 for share in shares) and found[control] == pytest.approx(np.mean(shares))
    with pytest.raises(ValueError, match="accepted: fewer than the 16 tokens"):
        measure.selection_quality(MODEL, base, batch, TOKENS)


def test_held_out_loss_is_a_mean_over_predictions(base):
    batch = batch_of(np.array(tiny_ids(CONFIG, ROWS, TOKENS)))
    nll = np.asarray(measure.judged(MODEL, base, batch, dense_pass.Options(KEYS, index=True))[0])
    assert measure.held_out_loss(MODEL, base, batch, KEYS) == pytest.approx(nll[:, :-1].mean(), rel=1e-6)
