"""The evaluation by position, end to end on the tiny checkpoint beyond its native window, and what it refuses."""

import argparse
import json

import jax
import pytest
import tiny_jobs

from longstraw_jax import fingerprint, lora
from longstraw_jax.evidence import attended, position_eval
from longstraw_jax.io import adapter, data, prompt

import build_tasks  # isort: skip
import eval_positions  # isort: skip

CHANGES = {"model.yarn_positions": 512}
FLAGS = {
    "prompts": None, "out": None, "adapter": None, "scores": ["exact_match", "digit_share"], "samples": 1,
    "temperature": 0.0, "top_p": 1.0, "seed": 0, "tokens": ["400"], "control_tokens": 230, "kinds": ["needle"],
    "positions": ["early", "beyond"], "distractors": 0, "digits": 4, "seeds": 1, "first_seed": 0, "native_window": 0,
    "text": "python", "attended_bins": 0,
}  # fmt: skip


def values(folder, name="base", **changes):
    given = {"prompts": str(folder / "prompts.jsonl"), "out": str(folder / f"{name}.json")}
    return argparse.Namespace(**FLAGS | given | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("positions")


@pytest.fixture(scope="module")
def base(folder):
    config = tiny_jobs.config(**CHANGES)
    before = config.to_json()
    made = eval_positions.run(config, values(folder, attended_bins=20))
    assert config.to_json() == before  # the caller's
    return made


@pytest.fixture(scope="module")
def adapted(base, folder):
    """An adapter that moves every logit, on the prompts that the base wrote; captured without it, as the base was."""
    changes = CHANGES | {"grpo.mode": "frozen"}
    job = tiny_jobs.job(**changes)
    adapters = lora.init_adapters(job.model.config, job.model.lora, 0, mesh=job.model.mesh)
    adapters = jax.tree.map(lambda x: x + 0.3, adapters)
    adapter.export_peft(folder / "adapter", job.model.config, job.model.lora, adapters, base_model_name="tiny")
    frozen = (folder / "prompts.jsonl").read_bytes()
    made = eval_positions.run(tiny_jobs.config(**changes), values(folder, "adapted", adapter=str(folder / "adapter")))
    assert (folder / "prompts.jsonl").read_bytes() == frozen
    return made, fingerprint.tree_fingerprint(adapters)


def test_the_receipt_tells_every_prompt_by_position(base, folder):
    assert position_eval.main([str(folder / "base.json")]) == 0
    assert [row["position"] for row in base["rows"]] == ["early", "beyond", position_eval.CONTROL]
    assert [row["tokens"] for row in base["rows"]] == [400, 400, 230]
    assert base["rows"][1]["evidence_at"][0][0] >= 256 > base["rows"][0]["evidence_at"][0][1]
    assert base["window"] == {"native": 256, "positions": 512} and base["adapter"] is None
    assert base["prompts"]["sha256"] == fingerprint.sha256_file(folder / "prompts.jsonl")
    assert base["audit"]["responses"] == 3 and len(base["table"]) == 6
    assert "native control" in (folder / "base.txt").read_text()
    assert not list(folder.glob("*.partial.jsonl"))


def test_the_positions_that_answers_attended_to_are_counted(base, folder):
    found = attended.read_positions(folder)
    tokens = [sample["tokens"] for row in base["rows"][:2] for sample in row["samples"]]
    assert found["layers"].tolist() == [0] and int(found["prompt_tokens"]) == 400
    assert int(found["queries"]) == sum(tokens) and found["counts"].shape == (1, 20)
    # Each of a response's tokens selects 16 keys, of which at most its own and those before it are no prompt tokens.
    assert sum(n * (16 - n) for n in tokens) <= found["counts"].sum() <= 16 * sum(tokens)


def test_an_adapter_is_compared_on_the_same_prompts(base, adapted):
    made, words = adapted
    assert made["adapter"]["fingerprint"] == words
    assert made["prompts"] == base["prompts"] and (made["decode"]["mode"], base["decode"]["mode"]) == (
        "frozen",
        "detached",
    )
    said = [[sample["text"] for row in receipt["rows"] for sample in row["samples"]] for receipt in (base, made)]
    assert said[0] != said[1]
    assert made["checkpoint"] == base["checkpoint"] and made["rows"][0]["answer"] == base["rows"][0]["answer"]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"seeds": 2}, "seeds=2; accepted: 1 of .*, or another file"),
        ({"samples": 2}, "samples=2 with temperature=0.0; accepted: 1, as greedy"),
        ({"samples": 0, "temperature": 1.0}, "samples=0 .*; accepted: at least 1"),
        ({"adapter": "gone"}, "adapter='gone'; accepted: a folder with adapter_config.json"),
        ({"out": "positions.txt"}, "out='positions.txt'; accepted: a file name that ends in .json"),
        ({"prompts": "gone.jsonl", "tokens": []}, "prompts='gone.jsonl' does not exist; accepted"),
        ({"prompts": "new.jsonl", "control_tokens": 300}, "control_tokens=300; accepted: .* at most the native 256"),
        ({"scores": []}, "scores is empty"),
        ({"attended_bins": -1}, "attended_bins=-1; accepted: 0 .none. or more"),
    ],
)
def test_what_makes_no_sense_is_refused(base, folder, changes, said):
    with pytest.raises(ValueError, match=said):
        eval_positions.run(tiny_jobs.config(**CHANGES), values(folder, "refused", **changes))
    assert not (folder / "refused.json").exists()


def edited(folder, tmp_path, change):
    """Flags that take the frozen prompts with every row changed, without the record of their hash."""
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    for row in rows:
        change(row)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return values(tmp_path, prompts=str(path), tokens=[], control_tokens=0)


def test_a_file_without_answers_is_named_with_its_line(base, folder, tmp_path):
    def forget(row):
        if row["extra_info"]["index"]:
            del row["reward_model"]["ground_truth"]

    given = edited(folder, tmp_path, forget)
    with pytest.raises(ValueError, match="prompts.jsonl, line 2: field reward_model.ground_truth is missing"):
        eval_positions.run(tiny_jobs.config(**CHANGES), given)


def test_a_prompt_that_changed_is_refused(base, folder, tmp_path):
    given = edited(folder, tmp_path, lambda row: row["prompt"][0].update(content=row["prompt"][0]["content"] + "."))
    with pytest.raises(ValueError, match="row 0: the ids have sha256 .*another tokenizer or chat template"):
        eval_positions.run(tiny_jobs.config(**CHANGES), given)
    (tmp_path / "prompts.json").write_text((folder / "prompts.json").read_text())
    with pytest.raises(ValueError, match="sha256 is .*; accepted: .*, of .*prompts.json"):
        eval_positions.run(tiny_jobs.config(**CHANGES), given)


@pytest.mark.parametrize("prompts, theirs", [("q.jsonl", "q.json"), ("q.partial.jsonl", "q.partial.jsonl")])
def test_nothing_is_written_over_the_prompts_or_their_record(tmp_path, prompts, theirs):
    with pytest.raises(ValueError, match=f"out='.*q.json'; accepted: another name, as '.*{theirs}' is the prompts'"):
        eval_positions.run(tiny_jobs.config(**CHANGES), values(tmp_path, "q", prompts=str(tmp_path / prompts)))
    assert not list(tmp_path.iterdir())


def test_prompts_that_would_be_none_are_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"positions=\[\] make no rows; accepted: at least 1"):
        eval_positions.run(tiny_jobs.config(**CHANGES), values(tmp_path, positions=[], control_tokens=0))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Rows of build_tasks.py, read, and what makes their ids."""
    path, source = tmp_path_factory.mktemp("built") / "rows.jsonl", str(tiny_jobs.checkpoint())
    given = FLAGS | {"checkpoint": source, "tokens": ["230"], "positions": ["early"], "reasoning": []}
    build_tasks.build(argparse.Namespace(**given | {"out": str(path)}))
    reader = build_tasks.reader_of(source, 0)
    return path, data.read_rows(path), lambda messages: prompt.build_prompt(messages, reader.tokenizer, reader.template)


def test_rows_of_build_tasks_are_taken_and_their_parameters_compared(built, tmp_path):
    path, dataset, build = built
    given = {"tokens": ["230"], "positions": ["early"], "control_tokens": 0}
    eval_positions.check_prompts(path, dataset, build, values(tmp_path, **given))
    with pytest.raises(ValueError, match="digits=5; accepted: 4 of .*rows.jsonl, or another file"):
        eval_positions.check_prompts(path, dataset, build, values(tmp_path, **given, digits=5))


def test_what_rows_do_not_hold_is_not_asked_of_them(built, tmp_path):
    path, dataset, build = built
    for tokens in (["230"], []):
        given = values(tmp_path, tokens=tokens, positions=["early"], control_tokens=200)
        with pytest.raises(ValueError, match="control_tokens=200; accepted: 0 of .*rows.jsonl, or another file"):
            eval_positions.check_prompts(path, dataset, build, given)
        with pytest.raises(ValueError, match="tokens=.* with .*other.jsonl, whose record other.json is not there"):
            eval_positions.check_prompts(path.with_name("other.jsonl"), dataset, build, given)


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"sha256": "a"}', '{"sha256": "a", "parameters": []}', "{"])
def test_a_record_of_another_layout_is_named(built, tmp_path, text):
    _, dataset, build = built
    (tmp_path / "prompts.json").write_text(text)
    with pytest.raises(ValueError, match="prompts.json(: | is no record of prompts; accepted: an object with sha256)"):
        eval_positions.check_prompts(tmp_path / "prompts.jsonl", dataset, build, values(tmp_path))
