"""Members' texts on disk: a file a step, replaced when the step is done again."""

from types import SimpleNamespace

import numpy as np
import pytest

from longstraw_jax.io import samples

MEMBER = {"row_id": "a", "member": 0, "text": "1\n2\u2028\x00", "reward": None, "tokens": 3, "truncated": True}


def test_members_come_back_and_a_step_done_again_replaces_its_own(tmp_path):
    assert samples.sampled_steps(tmp_path) == []
    for step in (1, 12, 100):
        samples.write_samples(tmp_path, step, [MEMBER, MEMBER | {"member": 1, "reward": 0.5, "row_id": 7}])
    assert samples.sampled_steps(tmp_path) == [1, 12, 100]
    assert samples.read_samples(tmp_path, 12) == [MEMBER, MEMBER | {"member": 1, "reward": 0.5, "row_id": 7}]
    samples.write_samples(tmp_path, 12, [MEMBER])
    assert samples.read_samples(tmp_path, 12) == [MEMBER]


def test_members_of_rollouts_keep_their_rows_and_unscorable_rewards_are_none():
    first = SimpleNamespace(
        responses=[[1, 2], [3]], rewards=np.float32([0.5, np.nan]), truncated=np.array([True, False])
    )
    second = SimpleNamespace(responses=[[4]], rewards=np.float32([1.0]), truncated=np.array([False]))
    found = list(samples.members([first, second], ["a", 9], lambda ids: "".join(map(str, ids))))
    assert [(m["row_id"], m["member"], m["text"], m["reward"]) for m in found] == [
        ("a", 0, "12", 0.5), ("a", 1, "3", None), (9, 0, "4", 1.0),
    ]  # fmt: skip
    assert [(m["tokens"], m["truncated"]) for m in found] == [(2, True), (1, False), (1, False)]


@pytest.mark.parametrize("line", ["{}", "[]", '{"row_id": 1', '{"text": NaN}'])
def test_a_damaged_line_is_named(tmp_path, line):
    samples.write_samples(tmp_path, 1, [MEMBER])
    path = tmp_path / "samples/000001.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="000001.jsonl line 2: "):
        samples.read_samples(tmp_path, 1)
