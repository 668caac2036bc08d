"""Rows of reasoning-gym and its verifier as a reward function; needs the extra `tasks`."""

import json

import pytest

from longstraw_jax.io import data
from longstraw_jax.rl import rewards as rewards_lib

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (extra `tasks`)")

from longstraw_jax.tasks import reasoning  # noqa: E402


def test_the_packages_own_answers_score_1_through_the_dataset_and_the_worker(tmp_path):
    made = reasoning.rows("basic_arithmetic", size=3, seed=5)
    made += reasoning.rows("gcd", size=2, seed=5, first_index=3, settings={"min_numbers": 3, "max_numbers": 3})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    dataset = data.read_rows(path, required=("ground_truth",))
    answers = [row["columns"]["ground_truth"] for row in dataset.rows]
    columns = {"extra_info": [row["columns"]["extra_info"] for row in dataset.rows]}
    function = rewards_lib.load("longstraw_jax.tasks.reasoning:verifier")
    for texts, right in ((answers, [1.0] * 5), (["<think>0</think>" + answers[0], *["x"] * 4], [1.0, 0, 0, 0, 0])):
        values, _, _ = rewards_lib.score(
            [function], None, [row["prompt"] for row in dataset.rows], texts, [[]] * 5, columns, 60.0
        )
        assert values.tolist()[0] == right[0] and (values >= right).all() and values[1:].sum() <= sum(right[1:]) + 0.2


def test_rows_are_the_same_again_and_another_seed_gives_others():
    first, again, other = (reasoning.rows("gcd", size=4, seed=seed) for seed in (1, 1, 2))
    assert first == again and first != other


def test_a_row_of_another_version_is_refused_and_one_of_another_kind_unscorable():
    row = reasoning.rows("gcd", size=1, seed=1)[0]
    call = {"completions": ["1"], "completion_ids": [[]], "extra_info": [row["extra_info"]]}
    with pytest.raises(reasoning.ReasoningError, match="row 0: asks 'Another'.*built by the same version"):
        reasoning.verifier([[{"role": "user", "content": "Another"}]], **call)
    assert reasoning.verifier(["?"], **call | {"extra_info": [{"index": 0}]}) == [None]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"name": "basic_arithmetics"}, "'basic_arithmetics'; accepted: .*basic_arithmetic"),
        ({"size": 0}, "size=0; accepted: at least 1"),
        ({"settings": {"min_terms": -3}}, "basic_arithmetic.*min_terms"),
        ({"settings": {"unknown": 1}}, "basic_arithmetic.*unknown"),
    ],
)
def test_bad_arguments_are_named(arguments, said):
    with pytest.raises(reasoning.ReasoningError, match=said):
        reasoning.rows(**{"name": "basic_arithmetic", "size": 2, "seed": 0} | arguments)
