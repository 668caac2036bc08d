"""Members' texts on disk: a file a step, replaced when the step is done again."""

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


@pytest.mark.parametrize("line", ["{}", "[]", '{"row_id": 1', '{"text": NaN}'])
def test_a_damaged_line_is_named(tmp_path, line):
    samples.write_samples(tmp_path, 1, [MEMBER])
    path = tmp_path / "samples/000001.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="000001.jsonl line 2: "):
        samples.read_samples(tmp_path, 1)
