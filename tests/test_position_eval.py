"""The evaluation's counting, with a decode that is known, and its receipt."""

import json
import re

import numpy as np
import pytest

from longstraw_jax.evidence import position_eval
from longstraw_jax.rl import rewards as rewards_lib
from longstraw_jax.tasks import rewards

EOS = 0
SHA = "0" * 64
BOUND = {
    "created": "2026-01-01T00:00:00Z",
    "code": {"commit": "unknown", "dirty": None, "reason": "test"},
    "python": "3.11",
    "packages": {"jax": "0"},
    "devices": {"platform": "cpu", "kind": "cpu", "count": 1},
    "config": {"sha256": SHA, "resolved": {}},
    "checkpoint": {"path": "there", "weights_fingerprint": "f"},
    "adapter": None,
    "tokenizer_sha256": SHA,
    "window": {"native": 100, "positions": 200},
    "prompts": {"path": "rows.jsonl", "sha256": SHA, "rows": 9},
    "decode": {"samples": 2, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8, "seed": 0, "mode": "detached"},
    "seconds": {"capture": 1.0},
}


def row(index, task, position, answer, tokens, **info):
    extra = {"task": task, "position": position, "evidence_at": [[3, 9]], "index": index, **info}
    prompt = [{"role": "user", "content": "q" * tokens}]
    return {"id": index, "prompt": prompt, "columns": {"ground_truth": answer, "extra_info": extra}}


ROWS = [
    row(0, "needle", "early", "12", 60),
    row(1, "needle", "early", "34", 60),
    row(2, "needle", "beyond", "56", 60),
    row(3, "chain", "beyond", "78", 60),
    row(4, "needle", "middle", "90", 30, control=True),
]
# What each row's two members say; a text without its eos was cut off.
SAID = {
    0: ["12$", "12$"],
    1: ["34$", "39$"],
    2: ["00$", "99999999"],
    3: ["7$", "q" * 20 + "$"],
    4: ["90$", "\ufffd$"],
}


@pytest.fixture(scope="module")
def results():
    def build(prompt):
        return np.frombuffer(prompt[0]["content"].encode("utf-32-le"), "<i4")

    def decode(ids, number):
        assert ids.size == (60 if number < 4 else 30)
        texts = SAID[number]
        return [[EOS if c == "$" else ord(c) for c in text] for text in texts], [int(t.endswith("$")) for t in texts]

    def score(row, responses, texts):
        columns = {name: [value] * 2 for name, value in row["columns"].items()}
        functions = [rewards.final_match, rewards.leading_share]
        _, found, _ = rewards_lib.score(functions, None, [row["prompt"]] * 2, texts, responses, columns, 10.0)
        return {name: values.tolist() for name, values in found.items()}

    return position_eval.evaluate(ROWS, build, decode, lambda ids: "".join(chr(i) for i in ids if i != EOS), score)


def line(results, score, task, position):
    found = [
        r for r in position_eval.table(results) if (r["score"], r["task"], r["position"]) == (score, task, position)
    ]
    assert len(found) == 1
    return found[0]


def test_scores_are_counted_by_task_and_position(results):
    early = line(results, "final_match", "needle", "early")
    assert (early["mean"], early["prompts"], early["samples"]) == (0.75, 2, 4) and early["low"] < 0.75 < early["high"]
    assert line(results, "leading_share", "needle", "early")["mean"] == 0.875
    assert line(results, "final_match", "needle", "beyond")["mean"] == 0
    assert line(results, "leading_share", "chain", "beyond")["mean"] == 0.25
    control = line(results, "final_match", "needle", position_eval.CONTROL)
    assert control["mean"] == 0.5 and control["tokens"] == 30
    pooled = line(results, "leading_share", "all", "beyond")
    assert (pooled["mean"], pooled["prompts"], pooled["samples"]) == (0.125, 2, 4)


def test_the_audit_counts_every_response(results):
    found = position_eval.audit_table(results)
    assert found["responses"] == 10
    assert found["counts"] == {
        "stopped": 9, "hit_cap": 1, "degenerate": 2, "echo": 1, "replacement": 1, "empty": 0,
    }  # fmt: skip


def test_a_receipt_is_derived_again_from_its_rows(results, tmp_path, capsys):
    path = tmp_path / "positions.json"
    receipt = position_eval.write_receipt(path, results, **BOUND)
    assert json.loads(path.read_text()) == receipt and receipt["claim"] == "quality"
    assert position_eval.main([str(path)]) == 0
    assert re.search(r"final_match +needle +early +60 +0.750 ", position_eval.format_table(receipt))
    receipt["table"][0]["mean"] = 0.99
    path.write_text(json.dumps(receipt))
    assert position_eval.main([str(path)]) == 1
    assert "MISMATCH  table: recorded" in capsys.readouterr().out
    path.write_text("{}")
    assert position_eval.main([str(path)]) == 1 and "required property" in capsys.readouterr().out
    assert position_eval.main([str(tmp_path / "gone")]) == 2


def test_a_receipt_that_breaks_its_schema_is_not_written(results, tmp_path):
    with pytest.raises(ValueError, match="receipt.adapter: 3 is not of type"):
        position_eval.write_receipt(tmp_path / "positions.json", results, **BOUND | {"adapter": 3})
    assert not list(tmp_path.iterdir())


def test_a_score_outside_of_0_to_1_ends_it_at_once():
    with pytest.raises(ValueError, match="score s is -1.0 for row 0; accepted: scores from 0 to 1"):
        position_eval.evaluate(
            ROWS, lambda prompt: np.arange(9), lambda *_: ([[EOS]], [1]), lambda ids: "", lambda *_: {"s": [-1.0]}
        )


def test_a_stopped_evaluation_goes_on_after_its_last_result(results, tmp_path):
    path = tmp_path / "partial.jsonl"
    assert position_eval.resume(path, SHA) == []
    for result in results[:2]:
        position_eval.keep(path, result)
    with open(path, "ab") as file:
        file.write(b'{"id": 2, "ta')  # killed while it wrote
    done = position_eval.resume(path, SHA)
    assert done == json.loads(json.dumps(results[:2]))
    position_eval.keep(path, results[2])
    assert len(position_eval.resume(path, SHA)) == 3
    decoded = []

    def decode(ids, number):
        decoded.append(number)
        return [[EOS]], [1]

    rest = position_eval.evaluate(
        ROWS, lambda prompt: np.arange(9), decode, lambda ids: "", lambda *_: {"s": [0.0]}, done=done
    )
    assert decoded == [2, 3, 4] and [r["id"] for r in rest] == [0, 1, 2, 3, 4] and rest[:2] == done
    with pytest.raises(ValueError, match="is of another evaluation; accepted: another out"):
        position_eval.resume(path, "1" * 64)
    path.write_bytes(path.read_bytes() + b"{\n")
    with pytest.raises(ValueError, match="partial.jsonl: .*; accepted: what an evaluation left"):
        position_eval.resume(path, SHA)


def test_what_cannot_be_scored_is_left_out_and_counted():
    sample = {"text": "", "tokens": 0, "audit": {}, "scores": {"s": None}}
    here = {"task": "a", "position": "early", "tokens": 9}
    lines = position_eval.table([here | {"samples": [sample, sample | {"scores": {"s": 1.0}}]}])
    assert [(x["mean"], x["samples"], x["unscored"]) for x in lines] == [(1.0, 1, 1)]
    alone = position_eval.table([here | {"samples": [sample]}])[0]
    assert alone["mean"] is None and alone["unscored"] == 1
