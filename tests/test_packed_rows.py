"""Rows to train on: exact lengths, whose tokens are answers, what a token predicts, and the same bytes for a seed."""

import dataclasses
import re

import numpy as np
import pytest

from longstraw_jax.io import prompt
from longstraw_jax.io.payload import Source
from longstraw_jax.pretrain import corpus, packed_rows
from longstraw_jax.tasks import retrieval

MIX = packed_rows.Mix(
    text=0.3, pairs=0.2, recall=0.1, around=20, kinds=retrieval.KINDS, digits=3, distractors=4, lines=5, turns=3,
    answer_weight=5.0, stretched=0.0, positions=9000,
)  # fmt: skip


@pytest.fixture(scope="module")
def text(byte_tokenizer):
    return corpus.read(Source("s", "0", [f"line {i} of some text\n" * 40 for i in range(40)]), byte_tokenizer)[0]


@pytest.fixture(scope="module")
def frame(byte_tokenizer):
    return packed_rows.frame_of(prompt.ChatTemplate(prompt.tiny_chat_template()), byte_tokenizer)


def test_a_document_is_the_chat_that_a_prompt_would_be(byte_tokenizer, text, frame):
    """Up to the first answer it is what the template writes; the evidence stands in it in its order."""
    task = retrieval.make("chain", 5, distractors=3, digits=3)
    made = packed_rows.document(
        task, packed_rows.turns_of(task, 3), text, frame, byte_tokenizer, 700, 5.0, np.random.default_rng(0)
    )
    written = byte_tokenizer.decode(made.ids)
    assert made.ids.size == 700 and written.endswith(f"<|assistant|>{task.answer}<|user|>")
    content = written.removeprefix("[gMASK]<sop><|user|>\n").partition("<|assistant|>")[0]
    message = [{"role": "user", "content": content}]
    assert written.startswith(prompt.render_chat(message, prompt.ChatTemplate(prompt.tiny_chat_template())))
    document, _, question = content.rpartition("\n\n")
    assert question == task.question
    places = [document.index(line + "\n" if line != document[-len(line) :] else line) for line in task.evidence]
    assert places == sorted(places)
    assert all(f"\n{line}" in "\n" + document for line in task.distractors)
    assert byte_tokenizer.decode(made.ids[made.answer]) == f"{task.answer}<|user|>"


def test_further_turns_ask_for_look_alikes(byte_tokenizer, text, frame):
    task = retrieval.make("needle", 7, distractors=4, digits=3)
    turns = packed_rows.turns_of(task, 3)
    assert turns[0] == (task.question, task.answer) and len(turns) == 3
    for (question, answer), line in zip(turns[1:], task.distractors, strict=False):
        name = line.removeprefix("The pass key of ").split(" is ")[0]
        assert question.endswith(f" {name}?") and line.endswith(f" is {answer}.") and answer.isdigit()
    made = packed_rows.document(task, turns, text, frame, byte_tokenizer, 800, 5.0, np.random.default_rng(0))
    assert byte_tokenizer.decode(made.ids[made.answer]) == "".join(f"{answer}<|user|>" for _, answer in turns)


def test_a_task_longer_than_its_room_is_none(byte_tokenizer, text, frame):
    task = retrieval.make("needle", 7, distractors=0, digits=3)
    rng = np.random.default_rng(0)
    tries = (
        packed_rows.document(task, packed_rows.turns_of(task, 1), text, frame, byte_tokenizer, n, 5.0, rng)
        for n in range(400)
    )
    shortest = next(made for made in tries if made is not None)
    written = byte_tokenizer.decode(shortest.ids)
    assert written == f"[gMASK]<sop><|user|>\n{task.evidence[0]}\n\n{task.question}<|assistant|>{task.answer}<|user|>"


def test_rows_are_full_and_predict_their_own_documents(byte_tokenizer, text, frame):
    batch = packed_rows.training_batch(text, frame, byte_tokenizer, MIX, 6, 500, (0, 1, 2))
    assert batch.ids.shape == (6, 500) and (batch.segments >= 0).all()
    assert batch.segments.max() > 0 and batch.answers.any()
    for b in range(6):
        for number in range(batch.segments[b].max() + 1):
            here = np.flatnonzero(batch.segments[b] == number)
            np.testing.assert_array_equal(batch.positions[b, here], np.arange(here.size))
            np.testing.assert_array_equal(batch.targets[b, here[:-1]], batch.ids[b, here[1:]])
            assert batch.weights[b, here[-1]] == 0
            # All others weigh, but for what pairs say for the first time.
            silent = np.flatnonzero(batch.weights[b, here[:-1]] == 0)
            assert (silent == np.arange(silent.size)).all()
    np.testing.assert_array_equal(batch.weights[batch.answers], MIX.answer_weight)
    assert set(batch.weights[~batch.answers]) == {0.0, 1.0}
    answers = byte_tokenizer.decode(batch.targets[batch.answers], skip_special=True)
    assert answers.replace(" ", "").isdigit()


def test_recall_asks_only_for_what_was_said(byte_tokenizer, frame):
    """What weighs as an answer is what the lines say of the names before it, in every form."""
    said = r"The pass key of (\w+ \w+) is (that of )?([\w ]+)\.\n"
    turn = re.compile(said + r"|of ([\w ,]+)\?<\|assistant\|>([\d ]+<\|user\|>)")
    forms = set()
    for seed in range(40):
        made = packed_rows.recall(byte_tokenizer, frame, MIX, 900, np.random.default_rng(seed))
        written, told, follows = byte_tokenizer.decode(made.ids), {}, ""
        for name, link, key, asked, answer in turn.findall(written):
            if asked:
                names = re.split(r", | and ", asked)
                assert answer == " ".join(retrieval.followed(told, one) for one in names) + "<|user|>"
                follows += answer
                forms.add((len(names), any(told[one].startswith("that of ") for one in names)))
            elif name in told:
                assert told[name] == link + key
                follows += key
                forms.add(link)
            else:
                told[name] = link + key
        assert 2 <= len(told) <= MIX.lines
        weighed = byte_tokenizer.decode(made.ids[made.answer])
        assert weighed.startswith(follows) and len(weighed) - len(follows) < 20 < len(follows)  # the last turn is cut
        np.testing.assert_array_equal(made.weight, np.where(made.answer, MIX.answer_weight, 1.0))
        assert all(field.size == 900 for field in made)
    assert forms == {"", "that of ", (1, False), (1, True), (3, False), (3, True)}


def test_gaps_stand_between_lines(byte_tokenizer, text, frame):
    """Positions rise by one within a line, reach what they are to reach, and leave the rest as it was."""
    newline = byte_tokenizer.encode("\n")[-1]
    for seed in range(8):
        rng = np.random.default_rng(seed)
        whole = packed_rows.recall(byte_tokenizer, frame, MIX, 400, rng)
        made = packed_rows.stretched(whole, newline, 9000, rng)
        steps = np.diff(made.places)
        assert made.places[0] == 0 and made.places[-1] == 8999 and (steps >= 1).all() and steps.max() > 1
        assert (made.ids[:-1][steps > 1] == newline).all()
        assert (made.ids == whole.ids).all()
    line = packed_rows.Document(*(field[:3] for field in whole))
    assert packed_rows.stretched(line, newline, 9000, rng) is line
    assert packed_rows.stretched(whole, newline, 300, rng) is whole


def test_a_share_of_the_documents_is_stretched(byte_tokenizer, text, frame):
    mix = packed_rows.Mix(**vars(MIX) | {"stretched": 1.0, "pairs": 0.0, "recall": 0.0})
    batch = packed_rows.training_batch(text, frame, byte_tokenizer, mix, 8, 500, (3,))
    assert 1000 < batch.positions.max() < 9000
    asked = packed_rows.question_batch(text, frame, byte_tokenizer, mix, "needle", 2, 600, (1,), 9000)
    assert (asked.positions[:, -1] == 8999).all()


def test_a_seed_gives_its_batch(byte_tokenizer, text, frame):
    first, again, other = (
        packed_rows.training_batch(text, frame, byte_tokenizer, MIX, 2, 300, (0, 0, seed)).ids for seed in (4, 4, 5)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize("kind", retrieval.KINDS)
def test_a_question_row_ends_with_its_one_answer(byte_tokenizer, text, frame, kind):
    batch = packed_rows.question_batch(text, frame, byte_tokenizer, MIX, kind, 3, 600, (1,))
    for b in range(3):
        written = byte_tokenizer.decode(batch.ids[b])
        answer = byte_tokenizer.decode(batch.targets[b][batch.answers[b]])
        assert written.endswith("<|assistant|>" + answer) and written.count("<|assistant|>") == 1
    with pytest.raises(ValueError, match="accepted: more tokens"):
        packed_rows.question_batch(text, frame, byte_tokenizer, MIX, kind, 1, 100, (1,))


@pytest.mark.parametrize(
    "field, value",
    [
        *(("text", 1.5), ("pairs", 0.8), ("recall", 0.6), ("kinds", ("haystack",)), ("digits", 1), ("turns", 0)),
        *(("around", -1), ("answer_weight", 0.0), ("lines", 1), ("stretched", 1.1), ("positions", 8)),
    ],
)
def test_a_mix_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=f"mix.{field}=.*accepted"):
        packed_rows.Mix(**vars(MIX) | {field: value})


def test_a_template_that_ends_no_answer_is_refused(byte_tokenizer):
    with pytest.raises(prompt.PromptError, match="after an eos"):
        packed_rows.frame_of(
            prompt.ChatTemplate("{% for m in messages %}{{ m.content }}. {% endfor %}"), byte_tokenizer
        )


def test_pairs_are_said_again(byte_tokenizer):
    """Each line has a value that was said of its key before, whatever stands around them, or has no weight."""
    around = set()
    for seed in range(8):
        made = packed_rows.pairs(byte_tokenizer, MIX, 400, np.random.default_rng(seed))
        written = byte_tokenizer.decode(made.ids)
        lines = written.split("\n")[:-1]
        count = next(n for n in range(2, 6) if made.weight[sum(len(line) + 1 for line in lines[:n])])
        said = sum(len(line) + 1 for line in lines[:count])
        assert count <= MIX.lines and (made.weight[:said] == 0).all() and not made.answer[:said].any()
        values = [line[len(line.rstrip("0123456789")) :] for line in lines]
        assert set(values) == set(values[:count]) and made.ids.size == 400
        around |= {len(line) for line in lines}
        digits = np.array([character.isdigit() for character in written])
        np.testing.assert_array_equal(made.answer[said:], digits[said:])
        np.testing.assert_array_equal(made.weight[said:], np.where(digits[said:], MIX.answer_weight, 1.0))
    assert min(around) < 12 and max(around) > 25


def test_keys_of_pairs_grow_with_the_letters_around_them(byte_tokenizer):
    """Without letters around, a key is one letter that has one value; a task's names come at NAMES_FROM."""
    longest = {}
    for around in (0, 2, packed_rows.NAMES_FROM):
        mix, longest[around] = dataclasses.replace(MIX, around=around, lines=12), 0
        for seed in range(12):
            ids = packed_rows.pairs(byte_tokenizer, mix, 400, np.random.default_rng(seed)).ids
            lines = byte_tokenizer.decode(ids).split("\n")[:-1]
            longest[around] = max(longest[around], *(len(line.rstrip("0123456789")) for line in lines))
            if not around:
                assert len(dict.fromkeys(lines)) == len({line[0] for line in lines})
    assert longest[0] == 1 and longest[2] <= 2 + 3 + 2 and longest[packed_rows.NAMES_FROM] > 12
