"""Rows of retrieval tasks: exact lengths under two tokenizers, evidence where it was asked for."""

import json

import numpy as np
import pytest

from longstraw_jax.io import data, payload, prompt
from longstraw_jax.io.prompt import PromptError
from longstraw_jax.tasks import retrieval, rows

TEMPLATE = prompt.ChatTemplate(prompt.tiny_chat_template())
SOURCE = payload.python_topics()
WINDOW = 700


def make(reader, kind="needle", tokens=1400, position="middle", seed=0, distractors=4, index=0):
    task = retrieval.make(kind, seed, distractors=distractors)
    row = rows.make(task, reader, SOURCE, tokens=tokens, position=position, seed=seed, index=index)
    return task, row


@pytest.fixture
def reader(tokenizer):
    return rows.Reader(tokenizer, TEMPLATE, WINDOW)


@pytest.mark.parametrize("kind", ("needle", "chain"))
@pytest.mark.parametrize("position", (*rows.POSITIONS, 0.0, 0.5, 1.0))
def test_length_and_place_are_exact(reader, kind, position):
    for seed in (0, 1):
        task, row = make(reader, kind, position=position, seed=seed)
        ids = reader.ids(row["prompt"])
        info = row["extra_info"]
        assert ids.size == info["tokens"] == 1400 and info["prompt_sha256"] == rows.ids_sha256(ids)
        for line, (start, stop) in zip(task.evidence, info["evidence_at"], strict=True):
            assert reader.tokenizer.decode(ids[start:stop]).strip() == line
        text = reader.tokenizer.decode(ids)
        assert all(text.count(f"\n{line}\n") == 1 for line in (*task.evidence, *task.distractors))
        assert text.count(task.question) == 1
        starts = [start for start, _ in info["evidence_at"]]
        if position == "beyond":
            assert min(starts) >= WINDOW
        elif isinstance(position, str):
            low, high = rows.BANDS[position]
            # Lines stand between whole words, and after other lines that have a length of their own.
            assert low * WINDOW - 30 <= min(starts) and max(starts) <= high * WINDOW + 120


def test_every_length_can_be_met(byte_tokenizer, bpe_tokenizer):
    for tokenizer in (byte_tokenizer, bpe_tokenizer):
        reader = rows.Reader(tokenizer, TEMPLATE, WINDOW)
        for tokens in range(500, 508):
            _, row = make(reader, tokens=tokens, seed=tokens, distractors=0)
            assert reader.ids(row["prompt"]).size == tokens


def test_long_prompts_are_filled_by_lines_and_the_answers_come_through_the_dataset(byte_tokenizer, tmp_path):
    reader = rows.Reader(byte_tokenizer, TEMPLATE, 16_384)
    made = [make(reader, "needles", rows.WORDS_BELOW, "beyond", seed, 100, index=seed) for seed in (0, 1)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for _, row in made))
    dataset = data.read_rows(path, required=("ground_truth",))
    assert [row["columns"]["ground_truth"] for row in dataset.rows] == [task.answer for task, _ in made]
    for row in dataset.rows:
        ids = prompt.build_prompt(row["prompt"], byte_tokenizer, TEMPLATE, target_tokens=rows.WORDS_BELOW)
        assert rows.ids_sha256(ids) == row["columns"]["extra_info"]["prompt_sha256"]
        assert min(start for start, _ in row["columns"]["extra_info"]["evidence_at"]) >= 16_384


def test_the_same_arguments_give_the_same_row_and_another_seed_another_text(byte_tokenizer):
    reader = rows.Reader(byte_tokenizer, TEMPLATE, WINDOW)
    assert make(reader)[1] == make(reader)[1]
    texts = [make(reader, seed=seed)[1]["prompt"][0]["content"] for seed in (0, 1)]
    assert texts[0][:50] != texts[1][:50]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"tokens": 100}, r"tokens=100; accepted: at least \d+, of chat, question"),
        ({"position": "nowhere"}, "position='nowhere'; accepted: early, middle, late, beyond, or a depth from 0 to 1"),
        ({"position": 1.5}, "position=1.5; accepted"),
        ({"position": "beyond", "tokens": 690}, "'beyond' with tokens=690; accepted: more than the native 700"),
        ({"position": "beyond", "tokens": 701}, "begins within the native 700; accepted: more"),
    ],
)
def test_what_cannot_be_built_is_named(byte_tokenizer, changes, said):
    with pytest.raises(PromptError, match=said):
        make(rows.Reader(byte_tokenizer, TEMPLATE, WINDOW), **changes)


def test_bands_lie_in_the_native_window_or_after_it():
    assert rows.band("late", 2000, 1000) == (850, 950) == rows.band("late", 1000, 2000)
    assert rows.band("beyond", 2000, 1000) == (1250, 1750)
    np.testing.assert_allclose(rows.band(0.02, 1000, 10), (0, 100))
    np.testing.assert_allclose(rows.band(1.0, 1000, 10), (900, 1000))
