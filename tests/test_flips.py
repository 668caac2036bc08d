"""Flipped choices: counted by layer as sets, with the gap of those that no lower layer explains."""

import dataclasses
import json

import numpy as np
import pytest
import tiny

from longstraw_jax.evidence import flips
from longstraw_jax.model.choices import Choices, by_layer

# Two groups of a full layer and a shared sparse one: layers 0 and 2 select, 1 and 3 route.
CONFIG = dataclasses.replace(
    tiny.CONFIG,
    num_hidden_layers=4,
    indexer_types=("full", "shared") * 2,
    mlp_layer_types=("dense", "sparse") * 2,
)
SELECTED = np.asarray([[0, -1, -1], [1, 0, -1], [2, 0, 1], [3, 1, 0]], np.int32)  # four tokens
ROUTED = np.asarray([[0, 1], [2, 3], [0, 3], [5, 6]], np.int32)


def made(selected=(SELECTED, SELECTED), routed=(ROUTED, ROUTED)):
    return Choices((np.stack(selected)[:, None],), ((None, np.stack(routed)[:, None]),))


def changed(rows, at, value):
    new = rows.copy()
    new[at] = value
    return new


def test_choices_are_found_by_their_layer():
    other = ROUTED + 1
    np.testing.assert_array_equal(by_layer(CONFIG, made(routed=(ROUTED, other)), "routes")[3][0], other)
    assert list(by_layer(CONFIG, made(), "selections")) == [0, 2] and list(by_layer(CONFIG, made(), "routes")) == [1, 3]


def test_another_order_is_no_flip():
    counted = flips.count(CONFIG, made(), made((SELECTED[:, ::-1],) * 2, (ROUTED[:, ::-1],) * 2))
    assert [x["flipped"] for layers in counted.values() for x in layers.values()] == [0] * 4
    assert counted["selections"][0] == dict(choices=9, flipped=0, tokens=0, first=0, invalid=0, widest_gap=None)
    assert counted["routes"][3]["choices"] == 8 and flips.share(counted["routes"]) == 0


def test_flips_are_counted_in_their_layer_and_what_follows_one_is_not_first():
    """Token 3 swaps a key in layer 0, two experts in layer 3; token 1 an expert in layer 3."""
    routed = changed(changed(ROUTED, 3, [8, 9]), (1, 0), 7)
    found = made((changed(SELECTED, (3, 1), 2), SELECTED), (ROUTED, routed))
    scores = {
        "selections": dict.fromkeys((0, 2), np.asarray([[-np.inf] * 4] * 3 + [[0.5, 1.0, 0.75, 4.0]], np.float32)),
        "routes": dict.fromkeys((1, 3), np.tile(np.linspace(1.0, 0.0, 11, dtype=np.float32), (4, 1))),
    }
    counted = flips.count(CONFIG, found, made(), scores)
    assert counted["selections"][0] == dict(choices=9, flipped=1, tokens=1, first=1, invalid=0, widest_gap=0.25 / 4)
    assert counted["selections"][2]["flipped"] == counted["routes"][1]["flipped"] == 0
    last = counted["routes"][3]
    assert (last["choices"], last["flipped"], last["tokens"], last["first"]) == (8, 3, 2, 1)
    assert last["widest_gap"] == pytest.approx(0.5)  # expert 2, score 0.8, by expert 7, score 0.3
    assert flips.share(counted["routes"]) == 3 / 16


def test_counts_of_two_sequences_add_up():
    found = made((changed(SELECTED, (3, 1), 2), SELECTED))
    once = flips.count(CONFIG, found, made())
    both = flips.add(flips.add(None, once), once)
    assert both["selections"][0] == dict(choices=18, flipped=2, tokens=2, first=2, invalid=0, widest_gap=None)
    assert flips.share(both["selections"]) == 1 / 18


SCORES = np.asarray([[1.0] * 7] * 3 + [[0.9, 0.8, 0.1, 0.3, -np.inf, 1.0, -np.inf]])  # token 3 ranks its 6 keys


@pytest.mark.parametrize(
    "wrong, invalid",
    [
        ((6, 0), 1),  # a key behind the token
        ((-1, 0), 1),  # none, where a key is to be had
        ((1, 1), 1),  # one twice
        ((-5, 99), 2),  # no positions
    ],
)
@pytest.mark.parametrize("scored", [True, False])
def test_a_choice_that_no_tie_explains_is_counted_apart_and_every_figure_is_finite(wrong, invalid, scored):
    """Token 3, at position 5 of its sequence, takes `wrong` for its last two keys."""
    found, wanted = (made((changed(SELECTED, 3, (5, *last)), SELECTED)) for last in (wrong, (1, 0)))
    scores = {"selections": dict.fromkeys((0, 2), SCORES), "routes": {1: None, 3: None}}
    counted = flips.count(CONFIG, found, wanted, scores if scored else None, start=2)
    json.dumps(counted, allow_nan=False)
    layers = counted["selections"]
    assert layers[0]["invalid"] == flips.invalid(layers) == invalid and layers[2]["invalid"] == 0
    assert flips.invalid(flips.add(counted, counted)["selections"]) == 2 * invalid


@pytest.mark.parametrize("key, gap, invalid", [(2, 0.8, 0), (4, None, 1)])
def test_a_key_that_scores_far_less_has_a_wide_gap_and_one_without_a_score_none(key, gap, invalid):
    found, wanted = (made((changed(SELECTED, 3, (5, 1, last)), SELECTED)) for last in (key, 0))
    scores = {"selections": dict.fromkeys((0, 2), SCORES), "routes": {1: None, 3: None}}
    layers = flips.count(CONFIG, found, wanted, scores, start=2)["selections"]
    assert flips.widest_gap(layers.values()) == (gap and pytest.approx(gap)) and flips.invalid(layers) == invalid
