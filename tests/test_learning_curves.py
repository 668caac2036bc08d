"""Held-out curves on the tiny checkpoint: a run, resumed and aggregated; the task's rule; what is refused."""

import concurrent.futures
import json
import shutil
import types

import numpy as np
import pytest
import tiny_jobs  # puts experiments/ on the path
from ml_collections import ConfigDict

from longstraw_jax import fingerprint
from longstraw_jax.io import data
from longstraw_jax.io.run_lock import run_lock

import learning_curves  # isort: skip


def config(**changes) -> ConfigDict:
    made = tiny_jobs.defaults("learn_tiny")
    made.job = tiny_jobs.config(**{"grpo.entropy_coef": 0.1})  # so that groups of equal rewards move the adapters too
    made.task.update(kinds=("needle",), tokens=230, positions=("early", "late"), distractors=0, low=0.0, high=1.0)
    made.held_out.update(rows=2, every=1)
    made.update_from_flattened_dict(changes)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("learning")


@pytest.fixture(scope="module")
def made(folder):
    return learning_curves.run(config(), folder, ["detached"], [3])


def test_a_run_is_judged_before_between_and_after(made, folder):
    assert made["claim"] == "learning" and made["choice"]["kind"] == "needle" and made["choice"]["shares"]
    (run,) = made["runs"]
    assert (run["mode"], run["seed"]) == ("detached", 3) and [p["step"] for p in run["points"]] == [0, 1, 2]
    assert all(len(point["right"]) == 2 for point in run["points"])
    steps = [json.loads(line)["seconds"]["step"] for line in (folder / "detached_3" / "steps.jsonl").open()]
    assert [point["seconds"] for point in run["points"]] == [0.0, steps[1], 2 * steps[1]]
    assert run["receipt_sha256"] == fingerprint.sha256_file(folder / "detached_3" / "receipt.json")
    assert json.loads((folder / "learning_curves.json").read_text()) == json.loads(json.dumps(made))
    assert "detached" in (folder / "learning_curves.txt").read_text()
    assert (folder / "learning_curves.png").stat().st_size > 10_000


def test_rows_are_of_exact_length_and_no_set_shares_a_task(made, folder):
    sets = {path.stem: data.read_rows(path).rows for path in (folder / "rows").glob("*.jsonl")}
    assert sets.keys() == {"choice_needle", "held_out", "train_3"}
    every = [row for rows in sets.values() for row in rows]
    assert all(row["columns"]["extra_info"]["tokens"] == 230 for row in every)
    asked = [row["prompt"][0]["content"].rpartition("\n")[2] for row in every]
    assert len(set(asked)) == len(asked) == 6
    for rows in sets.values():
        assert [row["columns"]["extra_info"]["position"] for row in rows] == ["early", "late"]


def test_what_is_there_is_not_made_again(made, folder, monkeypatch):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.suffix in (".jsonl", ".safetensors")}
    monkeypatch.setattr(learning_curves.eval_positions, "decoder_of", lambda *_: pytest.fail)
    assert learning_curves.run(config(), folder, ["detached"], [3])["summary"] == made["summary"]
    assert len(before) > 6 and {path: path.read_bytes() for path in before} == before


def test_a_second_process_waits_until_the_base_is_judged(made, folder):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with run_lock(folder / learning_curves.BASE):
            second = pool.submit(learning_curves.prepare, config(), folder, lambda: None)
            with pytest.raises(concurrent.futures.TimeoutError):
                second.result(timeout=0.5)
        assert second.result()[0]["kind"] == made["choice"]["kind"]


def test_the_base_s_answers_go_on_in_another_folder(made, folder, tmp_path):
    for name in ("rows", learning_curves.BASE, "choice.json"):
        source = folder / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    before = tmp_path / learning_curves.BASE / learning_curves.BEFORE
    whole = before.read_bytes()
    before.write_bytes(whole[:-20])  # cut within its last line
    assert learning_curves.read_right(before, config().held_out.rows) is None
    answered = []
    learning_curves.prepare(config(), tmp_path, lambda: answered.append(1))
    assert len(answered) == 1 and before.read_bytes() == whole


def test_an_evaluation_that_was_stopped_is_no_run(made, folder, tmp_path):
    answers = learning_curves.answers_of(folder, "detached", 3, 2)
    whole = answers.read_bytes()
    try:
        answers.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
        assert learning_curves.finished_runs(config(), folder) == []
        with pytest.raises(ValueError, match="0 finished runs; accepted: at least 1"):
            learning_curves.run(config(), folder, [], [])
    finally:
        answers.write_bytes(whole)


def test_the_answers_are_those_of_the_step(made, folder):
    """Each step's answers are bound to its own adapters: those of another are refused."""
    job = learning_curves.judging_job(config(), folder / "rows" / "held_out.jsonl", "detached")
    first, second = (learning_curves.trained_adapters(job, folder / "detached_3", step) for step in (1, 2))
    assert fingerprint.tree_fingerprint(first) != fingerprint.tree_fingerprint(second)
    with pytest.raises(ValueError, match="is of another evaluation"):
        learning_curves.judge(job, first, learning_curves.answers_of(folder, "detached", 3, 2), lambda: None)


@pytest.mark.parametrize(
    "shares, kind",
    [({"needle": 0.9, "needles": 0.2, "chain": 0.4, "sum": 0.1}, "chain"), ({"needle": 0.15, "sum": 0.7}, "needle")],
)
def test_the_task_is_the_one_with_signal_and_room(shares, kind, tmp_path, monkeypatch):
    found = iter(shares.values())
    monkeypatch.setattr(learning_curves, "write_rows", lambda *_: tmp_path / "rows.jsonl")
    monkeypatch.setattr(learning_curves, "judging_job", lambda *_: None)
    monkeypatch.setattr(learning_curves, "new_state", lambda _: types.SimpleNamespace(adapters=None))

    def judge(*_):
        return (np.arange(100) < round(100 * next(found))).astype(int).tolist()

    monkeypatch.setattr(learning_curves, "judge", judge)
    given = config(**{"task.kinds": tuple(shares), "task.low": 0.15, "task.high": 0.6})
    choice = learning_curves.chosen_kind(given, tmp_path, lambda: None)
    assert choice["kind"] == kind and choice["shares"] == shares
    assert learning_curves.chosen_kind(given, tmp_path, lambda: None) == choice
    with pytest.raises(ValueError, match="choice.json was made for .*; accepted: another --out"):
        learning_curves.chosen_kind(config(**{"task.kinds": ("sum",)}), tmp_path, lambda: None)
    (tmp_path / "choice.json").unlink()
    found = iter([0.9])
    given = config(**{"task.kinds": ("needle",), "task.low": 0.15, "task.high": 0.6})
    with pytest.raises(ValueError, match=r"answers {'needle': 0.9} of the kinds right; accepted: one from task.low"):
        learning_curves.chosen_kind(given, tmp_path, lambda: None)


@pytest.mark.parametrize(
    "changes, modes, seeds, said",
    [
        ({}, ["half"], [0], "mode='half'; accepted: 'frozen'"),
        ({}, ["exact"], [1000], "--seeds=1000; accepted: 0 to 999"),
        ({"held_out.rows": 3}, [], [], "held_out.rows=3; accepted: a positive multiple of the 2"),
        ({"held_out.every": 3}, [], [], "held_out.every=3; accepted: a divisor of job.steps=2"),
        ({"task.low": 1.0}, [], [], "task.low=1.0, task.high=1.0; accepted: 0 <= low < high"),
        ({"task.kinds": ()}, [], [], r"task.kinds=\(\); accepted"),
        ({"task.kind": "haystack"}, [], [], "task.kind='haystack'; accepted: needle, "),
        ({"task.kinds": ("needle", "hay")}, [], [], "task.kind='hay'; accepted: needle, "),
        ({"task.digits": 0}, [], [], "task.digits=0; accepted: "),
        ({"task.positions": ("early", "1.5")}, [], [], "task.positions='1.5'; accepted: early, .* a depth from 0 to 1"),
        ({"task.tokens": 5000, "task.kind": "needle"}, [], [], "task.tokens plus grpo.max_new_tokens of 5008 tokens"),
        ({"held_out.goal": float("nan")}, [], [], "held_out.goal=nan; accepted: a rise in accuracy"),
        ({"job.grpo.slots": -1}, ["frozen"], [0], "grpo.slots=-1; accepted: at least 0"),
        ({"job.refresh.policy": "drift"}, ["detached", "exact"], [0], "refresh.policy='drift' with mode='exact'"),
        ({"learning_rates.exact": -1.0}, ["exact"], [0], "learning_rates.exact=-1.0; accepted: 0 or above"),
        ({"job.checkpoint.every": 0}, [], [], "checkpoint.every=0; accepted: at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, modes, seeds, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        learning_curves.run(config(**changes), tmp_path, modes, seeds)
    assert not list(tmp_path.iterdir())


def test_a_mode_s_own_learning_rate_goes_before_the_job_s(tmp_path):
    made = config(**{"learning_rates.exact": 0.5})
    rates = [learning_curves.job_of(made, tmp_path, mode, 0).optimizer.learning_rate for mode in ("exact", "frozen")]
    assert rates == [0.5, made.job.optimizer.learning_rate] and rates[0] != rates[1]


def test_other_rows_under_the_same_name_are_refused(made, folder):
    with pytest.raises(ValueError, match="held_out.jsonl holds other rows than .*; accepted: another --out"):
        learning_curves.write_rows(config(), folder / "rows" / "held_out.jsonl", "chain", 2, 0)


def test_the_default_is_what_it_says():
    made = tiny_jobs.defaults("learn_tiny")
    assert tiny_jobs.leaves(made.job).keys() == tiny_jobs.leaves(tiny_jobs.defaults()).keys()
    assert made.job.steps == 100 and made.job.mesh.devices == 8 and made.job.grpo.group == 16
    assert made.task.tokens + made.job.grpo.max_new_tokens == 4096
    learning_curves.check(made, ["frozen", "detached", "exact"], [0, 1, 2])
    small = tiny_jobs.defaults("learn_cpu")
    assert small.task.tokens + small.job.grpo.max_new_tokens == 192  # the small reader's positions
    learning_curves.check(small, ["frozen", "detached", "exact"], [0, 1, 2])
