"""Dataset rows: both schemas, ids and duplicates, errors that name the row, and the order by step."""

import hashlib
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from longstraw_jax.io import data


def dapo_row(index, text="What is 1+1?", truth="2"):
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": text}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index, "split": "train"},
    }


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("write, name", [(write_parquet, "rows.parquet"), (write_jsonl, "rows.jsonl")])
def test_dapo_rows_alike_from_both_formats(tmp_path, write, name):
    path = write(tmp_path / name, [dapo_row(f"uuid-{i}", f"What is {i}+1?", str(i + 1)) for i in range(3)])
    dataset = data.read_rows(path)
    assert [row["id"] for row in dataset.rows] == ["uuid-0", "uuid-1", "uuid-2"]
    assert dataset.rows[1]["prompt"] == [{"role": "user", "content": "What is 1+1?"}]
    assert dataset.rows[1]["columns"]["ground_truth"] == "2"
    assert dataset.rows[1]["columns"]["data_source"] == "math_dapo"
    assert "prompt" not in dataset.rows[1]["columns"]
    assert dataset.files == {str(path): hashlib.sha256(path.read_bytes()).hexdigest()}
    assert (dataset.read, dataset.duplicates_dropped, dataset.repeated_content) == (3, 0, 0)


def test_plain_rows_keep_columns_and_number_themselves_over_files(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "one", "answer": 1}, {"prompt": "two"}])
    second = write_parquet(tmp_path / "b.parquet", [{"prompt": "three", "answer": 3, "tags": ["x"]}])
    dataset = data.read_rows([first, second])
    assert [row["id"] for row in dataset.rows] == [0, 1, 2]
    assert [row["prompt"] for row in dataset.rows] == ["one", "two", "three"]
    assert dataset.rows[2]["columns"] == {"answer": 3, "tags": ["x"]}
    assert list(data.read_rows([second, first]).files.items()) == list(dataset.files.items())[::-1]


def test_own_column_wins_over_reward_model(tmp_path):
    row = dapo_row(7) | {"ground_truth": "own"}
    assert (
        data.read_rows(write_jsonl(tmp_path / "a.jsonl", [row])).rows[0]["columns"]["ground_truth"] == "own"
    )


def test_blank_lines_are_skipped_but_counted_as_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "one"}\n\n{"answer": 1}\n')
    with pytest.raises(data.DataError, match="line 4: field prompt is missing"):
        data.read_rows(path)


def test_i3_each_row_a_hundred_times(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(data, "PARQUET_BATCH_ROWS", 7)  # copies fall in other batches
    rows = [dapo_row(f"uuid-{i}", f"question {i}") for i in range(5)]
    dataset = data.read_rows(write_parquet(tmp_path / "rows.parquet", rows * 100))
    assert [row["id"] for row in dataset.rows] == [f"uuid-{i}" for i in range(5)]
    assert (dataset.read, dataset.duplicates_dropped, dataset.repeated_content) == (500, 495, 0)
    assert not warnings(caplog)


def test_i3_repeated_content_under_other_ids_is_kept_and_warned_of(tmp_path, caplog):
    rows = [dapo_row("a"), dapo_row("b"), dapo_row("c", "another"), dapo_row("d")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    dataset = data.read_rows(path)
    assert (len(dataset.rows), dataset.duplicates_dropped, dataset.repeated_content) == (4, 0, 2)
    assert warnings(caplog) == [f"{path}: 2 of 4 rows repeat a prompt under another id"]


def test_i3_repeated_content_is_seen_without_ids(tmp_path, caplog):
    string_and_message = [{"prompt": "same"}, {"prompt": [{"role": "user", "content": "same"}]}]
    dataset = data.read_rows(write_jsonl(tmp_path / "rows.jsonl", string_and_message))
    assert (len(dataset.rows), dataset.repeated_content, len(warnings(caplog))) == (2, 1, 1)


def test_i3_same_id_with_another_prompt_is_dropped_and_warned_of(tmp_path, caplog):
    path = write_jsonl(tmp_path / "rows.jsonl", [dapo_row(1, "first"), dapo_row(1, "second")])
    dataset = data.read_rows(path)
    assert [row["prompt"][0]["content"] for row in dataset.rows] == ["first"]
    assert dataset.duplicates_dropped == 1
    assert "1 of 1 rows dropped for an id seen before held another prompt" in warnings(caplog)[0]


def test_i3_plain_id_column_deduplicates(tmp_path):
    rows = [{"prompt": "a", "id": "x"}, {"prompt": "a", "id": "x"}, {"prompt": "b", "id": "y"}]
    dataset = data.read_rows(write_parquet(tmp_path / "rows.parquet", rows))
    assert [row["id"] for row in dataset.rows] == ["x", "y"]


def test_every_row_gives_an_id_or_none_does(tmp_path):
    given, bare = dapo_row(70), {"prompt": "no id, and no row number that meets another's id"}
    for rows, said in (([given, bare], "gives no id"), ([bare, given], "gives an id")):
        path = write_jsonl(tmp_path / "rows.jsonl", rows)
        with pytest.raises(data.DataError, match=f"line 2: {said}, unlike the rows before; expected extra_info.index"):
            data.read_rows(path)


BAD_ROWS = {
    "no prompt": ({"question": "q"}, "field prompt is missing; expected a string or a list.*found: question"),
    "number": ({"prompt": 5}, r"field prompt is 5 \(int\)"),
    "empty string": ({"prompt": ""}, "field prompt is '' .*not empty"),
    "empty list": ({"prompt": []}, r"field prompt is \[\] .*not empty"),
    "bare message": ({"prompt": ["q"]}, r"field prompt\[0\] is 'q' \(str\); expected"),
    "no role": ({"prompt": [{"content": "q"}]}, r"field prompt\[0\].role is missing; expected a string"),
    "content parts": (
        {"prompt": [{"role": "user", "content": ["q"]}]},
        r"content is \['q'\] \(list\)",
    ),
    "half emoji": ({"prompt": "\ud83d"}, "field prompt is not valid Unicode"),
    "reward_model": ({"prompt": "q", "reward_model": "2"}, "field reward_model is '2' .*'ground_truth'"),
    "no truth": ({"prompt": "q", "reward_model": {"style": "x"}}, "reward_model.ground_truth is missing"),
    "truth type": (
        {"prompt": "q", "reward_model": {"ground_truth": 2}},
        r"ground_truth is 2 \(int\); expected",
    ),
    "extra_info": ({"prompt": "q", "extra_info": [1]}, r"field extra_info is \[1\] .*'index'"),
    "index type": (
        {"prompt": "q", "extra_info": {"index": 1.5}},
        r"index is 1.5 \(float\); .*integer",
    ),
    "id type": ({"prompt": "q", "id": True}, r"field id is True \(bool\)"),
    "reward name": (
        {"prompt": "q", "completions": []},
        "column 'completions' is a name that the reward",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_row_names_file_line_and_field(tmp_path, case):
    row, message = BAD_ROWS[case]
    path = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "good"}, row])
    with pytest.raises(data.DataError, match=f"bad.jsonl, line 2: .*{message}"):
        data.read_rows(path)


def test_parquet_rows_are_named_from_zero(tmp_path):
    path = write_parquet(tmp_path / "bad.parquet", [dapo_row("a"), dapo_row("b") | {"prompt": None}])
    with pytest.raises(data.DataError, match="bad.parquet, row 1: field prompt is missing"):
        data.read_rows(path)


def test_required_columns(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [dapo_row("a"), {"prompt": "q", "answer": 1}])
    with pytest.raises(data.DataError, match="line 2: field ground_truth or reward_model.ground_truth is"):
        data.read_rows(path, required=("ground_truth",))
    with pytest.raises(data.DataError, match="line 1: field answer is missing; fields found: data_source"):
        data.read_rows(path, required=("answer",))


def test_bad_files(tmp_path):
    with pytest.raises(data.DataError, match="no dataset file given"):
        data.read_rows([])
    with pytest.raises(data.DataError, match="absent.jsonl: no such file"):
        data.read_rows(tmp_path / "absent.jsonl")
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(data.DataError, match="folder.parquet: not a file"):
        data.read_rows(tmp_path / "folder.parquet")
    (tmp_path / "rows.csv").write_text("prompt\n")
    with pytest.raises(data.DataError, match=r"suffix '.csv' is not read; accepted: .parquet, .jsonl"):
        data.read_rows(str(tmp_path / "rows.csv"))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(data.DataError, match="empty.jsonl: the file is empty"):
        data.read_rows(tmp_path / "empty.jsonl")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(data.DataError, match="blank.jsonl: holds no rows"):
        data.read_rows(tmp_path / "blank.jsonl")
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": pyarrow.array([], "string")}), tmp_path / "none.parquet"
    )
    with pytest.raises(data.DataError, match="none.parquet: holds no rows"):
        data.read_rows(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(data.DataError, match="bad.parquet: not readable as parquet"):
        data.read_rows(tmp_path / "bad.parquet")


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"prompt": "cut', r"line 2: not JSON \(Invalid control character at, column 16\)"),
        (b'{"prompt": "\xff"}', "line 2: not JSON .*can't decode byte 0xff"),
        (b'["prompt"]', r"line 2: \['prompt'\] \(list\); expected a JSON object"),
    ],
)
def test_broken_line_is_named(tmp_path, line, message):
    (tmp_path / "bad.jsonl").write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    with pytest.raises(data.DataError, match=f"bad.jsonl, {message}"):
        data.read_rows(tmp_path / "bad.jsonl")


@pytest.mark.parametrize("size, rows_per_step", [(10, 5), (10, 3), (1, 1), (3, 7)])
def test_i1_every_row_once_an_epoch_at_any_step_size(size, rows_per_step):
    steps = 2 * size  # whole epochs, also where a step crosses the end of one
    order = np.concatenate([data.row_order(size, 5, step, rows_per_step) for step in range(steps)])
    epochs = order.reshape(-1, size)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(size), (len(epochs), 1)))
    if size == 10:
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_i1_resumed_steps_are_the_straight_run():
    straight = [data.row_order(97, 3, step, 4) for step in range(10)]
    resumed = [data.row_order(97, 3, step, 4) for step in (9, 8, 7, 6, 5)]  # no state: any order of calls
    np.testing.assert_array_equal(straight[5:], resumed[::-1])
    assert not np.array_equal(straight[0], data.row_order(97, 4, 0, 4))


def test_i1_order_is_pinned():
    """A checkpoint made under one NumPy must go on alike under another."""
    assert data.row_order(8, 0, 0, 8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert data.row_order(8, 0, 0, 8).dtype == np.int64


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 0, 0, 1), "dataset_size is 0; accepted: 1 <="),
        ((5, -1, 0, 1), "seed is -1; accepted: 0 <="),
        ((5, 0, -1, 1), "step is -1; accepted: 0 <="),
        ((5, 0, 0, 0), "rows_per_step is 0; accepted: 1 <="),
    ],
)
def test_row_order_bounds(arguments, message):
    with pytest.raises(ValueError, match=message):
        data.row_order(*arguments)
