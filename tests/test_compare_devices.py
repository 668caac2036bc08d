"""The comparison of devices: a whole one on two emulated devices, what it refuses, and that it can fail."""

import copy
import json
import types

import pytest
import tiny_jobs  # puts experiments/ on the path

import compare_devices  # isort: skip


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    architecture = tmp_path_factory.mktemp("architecture") / "config.json"
    architecture.write_text(json.dumps(tiny_jobs.RAW))
    return types.SimpleNamespace(
        devices=2, tokens=200, layers=tiny_jobs.RAW["num_hidden_layers"], experts=0, group=2, response=4, chunk=64,
        mode="exact", rank=2, kernels="auto", seed=0, architecture=str(architecture), out="",
    )  # fmt: skip


@pytest.fixture(scope="module")
def result(values):
    return compare_devices.run(values)


def test_two_devices_do_what_one_does(result):
    assert result["passed"], result["problems"]
    assert result["weights_alike"]
    assert {phase["flipped"] for phase in result["flipped"]["selections"].values()} == {0}
    # fp32 round-off in another order of sums, not the same program twice
    assert 0 < result["gradient"]["relative_l2"] < 1e-5
    assert result["gradient"]["norm_wanted"] > 0
    assert result["gradient"]["zero_only_found"] == result["gradient"]["zero_only_wanted"] == 0
    assert result["sampled_alike"] == 1
    assert set(result["seconds"]["1"]) == set(result["seconds"]["2"]) == set(result["speedup"]) - {"all"}


def test_receipt_is_json_and_the_table_names_every_phase(result):
    assert json.loads(json.dumps(result, allow_nan=False))["flags"]["devices"] == 2
    text = "\n".join(compare_devices.table(result))
    for phase in (*result["seconds"]["1"], "selections that differ", "routes that differ", "cosine"):
        assert phase in text


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda r: r["flipped"]["selections"][min(r["flipped"]["selections"])].update(flipped=1), "1 of"),
        (lambda r: r.update(weights_alike=False), "weights differ"),
        (lambda r: r["gradient"].update(relative_l2=1e-3), "relative_l2 is 0.001; accepted: at most 0.0001"),
        (lambda r: r["gradient"].update(cosine=None), "cosine is None"),
        (lambda r: r["gradient"].update(nonfinite=2), "2 entries are not finite"),
    ],
)
def test_disagreement_is_a_problem(result, change, said):
    changed = copy.deepcopy(result)
    change(changed)
    problems = compare_devices.problems_of(changed["flipped"], changed, compare_devices.TOLERANCES["float32"])
    assert len(problems) == 1
    assert said in problems[0]


def test_another_prompt_is_told_apart(values, monkeypatch):
    """Nothing of the one side leaks into the other: a side with other tokens fails."""
    transact, calls = compare_devices.transact, []

    def other(model, policy, optimizer, prompt, seed, group):
        calls.append(model.devices)
        prompt = prompt if group is None else (prompt + 1) % model.config.vocab_size
        return transact(model, policy, optimizer, prompt, seed, group)

    monkeypatch.setattr(compare_devices, "transact", other)
    failed = compare_devices.run(values)
    assert calls == [1, 2]
    assert not failed["passed"]
    assert any("selected keys differ" in line for line in failed["problems"])
    assert any("relative_l2" in line for line in failed["problems"])


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"devices": 1}, "--devices=1; accepted: at least 2"),
        ({"group": 1}, "--group=1; accepted: at least 2"),
        ({"response": 3}, "--response=3; accepted: a multiple of --devices=2"),
        ({"layers": 99}, "--layers=2 .all."),
        ({"devices": 64, "response": 64}, "64"),
    ],
)
def test_bad_input_is_refused_by_name(values, changes, said):
    given = types.SimpleNamespace(**vars(values) | changes)
    with pytest.raises(ValueError, match=said):
        compare_devices.run(given)


