"""Rewards of tasks, alone and through the main job's worker process."""

import pytest

from longstraw_jax.rl import rewards as rewards_lib
from longstraw_jax.tasks import rewards

COLUMNS = {"reward_model": [{"ground_truth": "4821"}] * 7}
TEXTS = ["4821", " 48 21", "", "x4821", "4821 and more", "<think>9</think>\n4829", "<think>4821</think>77"]


def test_the_share_of_leading_characters_can_be_climbed():
    found = rewards.leading_share(["?"] * 7, TEXTS, [[]] * 7, **COLUMNS)
    assert found == [1.0, 0.5, 0.0, 0.0, 1.0, 0.75, 0.0]


def test_a_final_match_is_of_the_whole_answer():
    assert rewards.final_match(["?"] * 7, TEXTS, [[]] * 7, **COLUMNS) == [1.0, 0, 0, 0, 0, 0, 0]
    texts = [[{"role": "assistant", "content": "<think>1</think> 4821 "}]]
    assert rewards.final_match(["?"], texts, [[]], ground_truth=["4821"]) == [1.0]


def test_a_row_without_an_answer_is_unscorable():
    for function in (rewards.leading_share, rewards.final_match):
        assert function(["?"] * 2, ["1", "1"], [[]] * 2, ground_truth=[None, "1"]) == [None, 1.0]


def test_the_configuration_can_name_it():
    function = rewards_lib.load("longstraw_jax.tasks.rewards:leading_share")
    values, by_name, _ = rewards_lib.score([function], None, ["?"] * 7, TEXTS, [[]] * 7, COLUMNS, 30.0)
    assert values.tolist() == pytest.approx([1.0, 0.5, 0.0, 0.0, 1.0, 0.75, 0.0])
