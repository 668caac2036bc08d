"""Prompts of an exact length on disk: deterministic, the question where it was asked for, bound to their tokenizer."""

import pathlib

import numpy as np
import pytest

from longstraw_jax.io import payload
from longstraw_jax.io import prompt as pr

TINY = pr.ChatTemplate(pr.tiny_chat_template(), "tiny_chat_template.jinja")
QUESTION = "How many 数?"
TOKENS = 20_000


@pytest.fixture
def texts(tmp_path):
    """A folder of three texts with characters of one to four bytes."""
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    for name, text in (("a.txt", "aé数🙂 one\n" * 50), ("b.md", "two\n" * 70), ("below/c.rst", "数" * 90)):
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "d.bin").write_bytes(b"\xff")
    return folder


def write(folder, tokenizer, source=None, **changes):
    chosen = {"tokens": TOKENS, "depth": 0.25, "seed": 0} | changes
    return payload.write(folder, tokenizer, TINY, source or payload.python_topics(), QUESTION, **chosen)


def ids(folder):
    return np.load(folder / payload.IDS_FILE)


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_length_is_exact_and_the_question_stands_at_its_depth(tokenizer, depth, tmp_path):
    record = write(tmp_path, tokenizer, depth=depth)
    found, (start, stop) = ids(tmp_path), record["question_at"]
    assert found.dtype == np.int32 and found.shape == (TOKENS,)
    asked = tokenizer.decode(found[start:stop])
    assert asked == f"\n\n{QUESTION}\n\n"
    head, _, tail = pr.render_chat([{"role": "user", "content": "\ue000"}], TINY).partition("\ue000")
    room = TOKENS - len(tokenizer.encode(head)) - len(tokenizer.encode(tail)) - (stop - start)
    assert start - len(tokenizer.encode(head)) == round(depth * room)
    text = tokenizer.decode(found)
    assert text.startswith(head) and text.endswith(tail) and "\ufffd" not in text


def test_the_same_request_gives_the_same_bytes_and_another_seed_does_not(tokenizer, tmp_path):
    first = write(tmp_path / "a", tokenizer)
    assert write(tmp_path / "b", tokenizer) == first
    assert (tmp_path / "a/prompt.npy").read_bytes() == (tmp_path / "b/prompt.npy").read_bytes()
    assert write(tmp_path / "c", tokenizer, seed=1)["sha256"] != first["sha256"]


def test_texts_of_a_folder_all_come_once_before_any_comes_again(byte_tokenizer, texts, tmp_path):
    source = payload.text_folder(texts)
    assert [path.name for path in source.texts] == ["a.txt", "b.md", "c.rst"]
    size = sum(len(path.read_bytes()) for path in source.texts)
    around = len(byte_tokenizer.encode(pr.render_chat([{"role": "user", "content": f"\n\n{QUESTION}\n\n"}], TINY)))
    once = write(tmp_path / "once", byte_tokenizer, source, tokens=size + around, depth=1.0)
    assert once["text"]["passes"] == 1
    text = byte_tokenizer.decode(ids(tmp_path / "once"))
    assert all(path.read_text("utf-8") in text for path in source.texts)
    assert write(tmp_path / "more", byte_tokenizer, source, tokens=size + around + 1)["text"]["passes"] == 2
    (texts / "a.txt").write_text("changed")
    assert payload.text_folder(texts).sha256 != source.sha256


def test_large_files_are_read_a_piece_at_a_time(byte_tokenizer, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("x" * (3 * payload.PIECE + 5) + "\nend")
    pieces = list(payload._text_pieces(tmp_path / "texts/a.txt"))
    assert max(map(len, pieces)) <= payload.PIECE
    assert "".join(pieces) == (tmp_path / "texts/a.txt").read_text()


def test_what_was_written_is_read_and_anything_else_refused(byte_tokenizer, bpe_tokenizer, tmp_path):
    write(tmp_path, byte_tokenizer)
    path = tmp_path / payload.IDS_FILE
    np.testing.assert_array_equal(payload.read(path, byte_tokenizer, QUESTION), ids(tmp_path))
    for tokenizer, question, said in (
        (bpe_tokenizer, QUESTION, "tokenizer sha256 is"),
        (byte_tokenizer, [{"role": "user", "content": "Why?"}], "question is 'Why"),
    ):
        with pytest.raises(pr.PromptError, match=said):
            payload.read(path, tokenizer, question)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(pr.PromptError, match="sha256 is"):
        payload.read(path, byte_tokenizer, QUESTION)
    with pytest.raises(pr.PromptError, match="accepted: what build_prompt.py wrote"):
        payload.read(tmp_path / "gone.npy", byte_tokenizer, QUESTION)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"tokens": 5}, "tokens=5; accepted: at least the 2"),
        ({"depth": 1.5}, "depth=1.5; accepted: 0"),
        ({"seed": -1}, "seed=-1; accepted: 0 to"),
    ],
)
def test_requests_that_cannot_be_met_are_refused_and_nothing_is_written(byte_tokenizer, changes, said, tmp_path):
    with pytest.raises(pr.PromptError) as error:
        write(tmp_path / "out", byte_tokenizer, **changes)
    assert said in str(error.value) and not (tmp_path / "out").exists()


def test_texts_that_are_none_are_refused(byte_tokenizer, tmp_path):
    with pytest.raises(pr.PromptError, match="accepted: a folder with .txt, .md, .rst files"):
        payload.text_folder(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(pr.PromptError, match="a.txt: not UTF-8"):
        write(tmp_path / "out", byte_tokenizer, payload.text_folder(tmp_path))
    assert not (tmp_path / "out" / payload.IDS_FILE).exists()


def test_a_template_that_repeats_the_message_is_refused(byte_tokenizer, tmp_path):
    twice = pr.ChatTemplate("{{ messages[0].content }}{{ messages[0].content }}", "twice.jinja")
    with pytest.raises(pr.PromptError, match="twice.jinja: drops or repeats"):
        payload.write(
            pathlib.Path(tmp_path), byte_tokenizer, twice, payload.python_topics(), QUESTION, tokens=9, depth=1, seed=0
        )
