"""The histogram of attended prompt positions and its file."""

import hf_folders
import numpy as np
import pytest

from longstraw_jax import config as config_lib
from longstraw_jax.evidence import attended


def test_every_prompt_token_falls_in_its_part_and_the_rest_in_none():
    ids = np.array([[[0, 3, 9, -1], [9, 10, 4, 5]]], np.int32)
    assert attended.position_histogram(ids, 10, 5).tolist() == [1, 1, 2, 0, 2]
    assert attended.position_histogram(ids, 10, 10).tolist() == [1, 0, 0, 1, 1, 1, 0, 0, 0, 2]
    assert attended.position_histogram(np.array([6]), 7, 3).tolist() == [0, 0, 1]


def test_long_prompts_do_not_overflow():
    assert attended.position_histogram(np.array([2**22 - 1], np.int32), 2**22, 2048)[-1] == 1


def test_layers_follow_one_another_over_the_segments():
    first = np.array([[[[0, 9]]]], np.int32)  # one layer, one row, one token, two keys
    second = np.array([[[[4, -1]]], [[[5, 5]]]], np.int32)
    assert attended.layer_histograms((first, second), 10, 2).tolist() == [[1, 1], [1, 0], [0, 2]]
    raw = hf_folders.RAW | {"indexer_types": ["full"] * 3 + ["shared"] * 2}
    assert attended.full_layers(config_lib.model_config_from_hf(raw)) == [0, 1, 2]


@pytest.mark.parametrize("bins", [0, 11])
def test_parts_are_at_least_a_token(bins):
    with pytest.raises(ValueError, match=f"bins={bins} with prompt_tokens=10; accepted: 1 to 10"):
        attended.position_histogram(np.array([1]), 10, bins)


def test_the_file_comes_back_and_a_damaged_one_is_named(tmp_path):
    assert attended.read_positions(tmp_path) is None
    attended.write_positions(tmp_path, np.arange(6).reshape(2, 3), [0, 4], prompt_tokens=90, queries=7)
    found = attended.read_positions(tmp_path)
    assert found["counts"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["layers"].tolist() == [0, 4]
    assert (int(found["prompt_tokens"]), int(found["queries"])) == (90, 7)
    with pytest.raises(ValueError, match=r"counts of shape \(2, 3\) for 1 layers"):
        attended.write_positions(tmp_path, np.zeros((2, 3)), [0], prompt_tokens=90, queries=7)
    for damage in (b"", b"PK", (tmp_path / "positions.npz").read_bytes()[:-40]):
        (tmp_path / "positions.npz").write_bytes(damage)
        with pytest.raises(ValueError, match="positions.npz: .*; accepted: what write_positions wrote"):
            attended.read_positions(tmp_path)
