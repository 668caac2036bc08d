"""The comparison of devices: a whole one on two emulated devices, what it refuses, and that it can fail."""

import copy
import dataclasses
import json
import types

import jax
import numpy as np
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
    for part in ("prompt", "responses"):
        for layers in result["flipped"][part].values():
            assert sum(layer["choices"] for layer in layers.values()) > 0
    # fp32 round-off in another order of sums, not the same program twice
    assert 0 < result["gradient"]["relative_l2"] < 1e-5
    assert result["gradient"]["norm_wanted"] > 0
    assert result["gradient"]["zero_only_found"] == result["gradient"]["zero_only_wanted"] == 0
    assert result["sampled_alike"] > 0.5
    assert set(result["seconds"]["1"]) == set(result["seconds"]["2"]) == set(result["speedup"]) - {"all"}


def test_receipt_is_json_and_the_table_names_every_phase(result):
    assert json.loads(json.dumps(result, allow_nan=False))["flags"]["devices"] == 2
    text = "\n".join(compare_devices.table(result))
    for phase in (*result["seconds"]["1"], "selections of the prompt", "routes of the responses", "cosine"):
        assert phase in text


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda r: next(iter(r["flipped"]["responses"]["selections"].values())).update(flipped=500), "responses: sel"),
        (lambda r: next(iter(r["flipped"]["prompt"]["routes"].values())).update(flipped=500), "prompt: routes"),
        (lambda r: r.update(weights_alike=False), "weights differ"),
        (lambda r: r["gradient"].update(relative_l2=1e-3), "relative_l2 is 0.001; accepted: at most 0.0001"),
        (lambda r: r["gradient"].update(cosine=None), "cosine is None; accepted: at least 0.99999"),
        (lambda r: r["gradient"].update(nonfinite=2), "gradient: 2 entries are not finite"),
        (lambda r: r["step"].update(relative_l2=0.5), "step relative_l2 is 0.5"),
        (lambda r: r.update(largest_logp_difference=0.1), "log-probability is 0.1; accepted: at most 0.001"),
    ],
)
def test_disagreement_is_a_problem(result, change, said):
    changed = copy.deepcopy(result)
    change(changed)
    tolerance, logp = compare_devices.TOLERANCES["float32"], compare_devices.LOGP["float32"]
    (problem,) = compare_devices.problems_of(changed, tolerance, logp)
    assert said in problem


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
    assert any("prompt: selections" in line for line in failed["problems"])
    assert any("relative_l2" in line for line in failed["problems"])


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"devices": 1}, "--devices=1; accepted: 2 to the 32 that are there"),
        ({"group": 1}, "--group=1; accepted: at least 2"),
        ({"response": 3}, "--response=3; accepted: a multiple of --devices=2"),
        ({"layers": 99}, "--layers=2 .all."),
        ({"devices": 64, "response": 64}, "--devices=64; accepted: 2 to the 32"),
    ],
)
def test_bad_input_is_refused_by_name(values, changes, said):
    given = types.SimpleNamespace(**vars(values) | changes)
    with pytest.raises(ValueError, match=said):
        compare_devices.run(given)




def test_a_wrong_merge_of_candidates_is_seen(values, monkeypatch):
    """Replay is held to the one device's choices, so that the scores alone tell what the mesh selects by itself."""
    transact = compare_devices.transact

    def other(*args):
        side = transact(*args)
        if args[-1] is None:
            return side
        shifted = jax.tree.map(lambda ids: np.where(ids > 0, ids - 1, ids), side.chosen)
        return dataclasses.replace(side, chosen=shifted)

    monkeypatch.setattr(compare_devices, "transact", other)
    failed = compare_devices.run(values)
    assert {line.split(":")[0] for line in failed["problems"]} == {"responses"}
