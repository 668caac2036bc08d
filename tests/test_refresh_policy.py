"""The refresh experiment on the tiny job: what its rows must agree on, that it goes on where it stopped, bad input."""

import json
import types

import numpy as np
import pytest
import tiny_jobs  # puts experiments/ on the path

from longstraw_jax import train
from longstraw_jax.evidence import receipt
from longstraw_jax.prefix.refresh import RefreshPolicy

import refresh_policy  # isort: skip


def job(**changes):
    return tiny_jobs.config(**{"reward.functions": ("tiny_rewards:mean_byte",)} | changes)


def flags(out, **changes):
    values = dict(
        tokens=0, seeds=["0"], parts=list(refresh_policy.PARTS), after=["2", "1"], every=["2"], bounds=["0", "1e3"],
        eval_groups=1, frozen_steps=2, out=str(out),
    )  # fmt: skip
    return types.SimpleNamespace(**values | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole experiment: its folder and receipt."""
    out = tmp_path_factory.mktemp("refresh")
    return out, refresh_policy.run(job(), flags(out))


def test_every_row_is_in_the_receipt_and_in_the_table(finished):
    out, result = finished
    assert json.loads((out / "refresh_policy.json").read_text()) == result
    assert result["complete"] and len(result["code"]) == 1
    assert [row["steps"] for row in result["staleness"]] == [1, 2]
    assert [row["policy"] for row in result["policies"]] == ["every_step", "every_n 2", "drift 0", "drift 1000"]
    assert len((out / "refresh_policy.txt").read_text().splitlines()) == 2 + 4 + 1
    assert (out / "refresh_policy.png").stat().st_size > 10_000
    assert result["setup"].items() >= {k: v for k, v in receipt.made_by(1).items() if k != "code"}.items()
    assert "paths" not in result["setup"]["config"]["data"] and len(result["setup"]["prompts"]) == 2


def test_a_stale_state_is_off_and_sampler_and_trainer_agree_on_it(finished):
    for row in finished[1]["staleness"]:
        assert row["prefix_age"] == row["steps"] and row["skipped_steps"] == 0
        assert row["mean_abs_logp_difference"] > 1e-3 and row["gradient_cosine"] < 0.999
        assert row["largest_abs_logp_difference"] >= row["mean_abs_logp_difference"]
        assert row["sampler_gap"] < 1e-5 and row["loss_stale"] != row["loss_fresh"]


def test_policies_differ_in_their_captures_alone(finished):
    """A bound of nothing trains the bits of every_step; a bound that is never met those of every_n."""
    rows = {row["policy"]: row for row in finished[1]["policies"]}
    assert {name: (row["captures"], row["ages"]) for name, row in rows.items()} == {
        "every_step": (2, [0, 0]), "every_n 2": (1, [0, 1]), "drift 0": (2, [0, 0]), "drift 1000": (1, [0, 1])
    }  # fmt: skip
    assert rows["drift 0"]["adapters"] == rows["every_step"]["adapters"] != rows["every_n 2"]["adapters"]
    assert rows["drift 1000"]["adapters"] == rows["every_n 2"]["adapters"]
    (measured,) = rows["drift 0"]["drift"]
    assert measured["step"] == 2 and measured["signal"] > 1e-3 < measured["truth"]
    assert rows["drift 1000"]["drift"][0]["truth"] is None and rows["every_n 2"]["drift"] == []
    assert all(row["score"]["responses"] == row["other_score"]["responses"] == 4 for row in rows.values())


def test_frozen_trains_on_one_capture_whose_bits_stay(finished):
    (row,) = finished[1]["frozen"]
    assert row["captures"] == 1 and row["ages"] == [0, 1] and max(row["sampler_gaps"]) < 1e-5
    assert row["pages_before"] == row["pages_after"]


def test_the_same_command_goes_on_and_another_set_up_is_refused(finished, monkeypatch):
    out, result = finished
    receipt = json.loads((out / "refresh_policy.json").read_text())
    taken = []
    real = train.transaction
    monkeypatch.setattr(train, "transaction", lambda *args, **more: taken.append(1) or real(*args, **more))
    assert refresh_policy.run(job(), flags(out)) == receipt and not taken
    with pytest.raises(ValueError, match="is of another config; accepted: the same set-up, or a new folder"):
        refresh_policy.run(job(**{"grpo.temperature": 0.7}), flags(out))
    shorter = receipt | {"frozen": []}
    (out / "refresh_policy.json").write_text(json.dumps(shorter))
    again = refresh_policy.run(job(), flags(out))
    assert len(taken) == 2 and again["policies"] == result["policies"]
    assert again["frozen"][0]["adapters"] == result["frozen"][0]["adapters"]


def test_without_rows_two_questions_stand_after_the_documentation(tmp_path):
    config = tiny_jobs.config(**{"data.paths": ("",), "data.document": "python"})
    bench = refresh_policy.prepare(config, flags(tmp_path, tokens=300))
    assert [ids.size for ids in bench.prompts] == [300, 300] and not np.array_equal(*bench.prompts)
    assert config.model.yarn_positions == bench.job.model.config.max_position_embeddings == 300 + 8
    assert list(tmp_path.iterdir()) == []


def test_the_policies_compared():
    found = refresh_policy.policies([2], [0.1], RefreshPolicy(every=5, probe_tokens=7))
    assert found == {
        "every_step": RefreshPolicy(), "every_n 2": RefreshPolicy("every_n", every=2),
        "drift 0.1": RefreshPolicy("drift", every=5, bound=0.1, probe_tokens=7),
    }  # fmt: skip


@pytest.mark.parametrize("field", ["capture.resident_bytes", "grpo.max_resamples"])
def test_a_job_of_several_prompts_is_refused_by_name(tmp_path, field):
    with pytest.raises(ValueError, match=f"^{field}=7; accepted: 0, as one prompt is measured$"):
        refresh_policy.run(job(**{field: 7}), flags(tmp_path))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"after": ["0"]}, "--after=0; accepted: whole numbers of at least 1, separated by commas"),
        ({"every": ["x"]}, "--every=x; accepted: whole numbers of at least 1"),
        ({"bounds": ["-1"]}, "--bounds=-1; accepted: finite numbers of at least 0.0"),
        ({"bounds": ["nan"]}, "--bounds=nan; accepted: finite numbers"),
        ({"seeds": []}, "--seeds=; accepted: whole numbers of at least 0"),
        ({"parts": ["all"]}, "--parts=all; accepted: of staleness, policies, frozen"),
        ({"eval_groups": 0}, "--eval_groups=0; accepted: at least 1"),
    ],
)
def test_bad_flags_are_refused_by_name(tmp_path, changes, said):
    with pytest.raises(ValueError) as error:
        refresh_policy.run(job(), flags(tmp_path, **changes))
    assert said in str(error.value) and list(tmp_path.iterdir()) == []
