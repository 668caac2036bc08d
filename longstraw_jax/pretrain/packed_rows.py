"""Packed rows to train on: excerpts of text, drills in copying, and retrieval tasks whose answers weigh more.

A batch is a function of its seed, on the host in NumPy. Every row is full: no padding.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from longstraw_jax.io import prompt as prompt_lib
from longstraw_jax.io.prompt import DOCUMENT_SEPARATOR, ChatTemplate, PromptError
from longstraw_jax.io.tokenizer import Tokenizer
from longstraw_jax.pretrain.corpus import Text, excerpt
from longstraw_jax.pretrain.step import Batch
from longstraw_jax.tasks import retrieval
from longstraw_jax.tasks.retrieval import Task

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 "  # of drills
SHORTEST_PERIOD = 4
_FIRST, _SECOND = "\ue000first\ue001", "\ue000second\ue001"  # stand for messages while the template renders


class Frame(NamedTuple):
    """What a chat template writes around messages: before the first, up to the answer, from an answer to the next."""

    head: tuple[int, ...]
    ask: tuple[int, ...]
    again: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Mix:
    """What rows are made of.

    Attributes:
      text, copies: shares of documents that are plain text, and drawn characters said over and over; the others are
        tasks.
      kinds: kinds of retrieval.KINDS, drawn alike.
      digits: of the tasks' numbers.
      distractors: most look-alike lines of a task.
      turns: most questions of a `needle` document; those after the first ask for look-alikes.
      answer_weight: of an answer's tokens in the loss, where others have 1.
    """

    text: float
    copies: float
    kinds: tuple[str, ...]
    digits: int
    distractors: int
    turns: int
    answer_weight: float

    def __post_init__(self):
        checks = (
            ("text", self.text, 0 <= self.text <= 1, "0 to 1"),
            ("copies", self.copies, 0 <= self.copies <= 1 - self.text, f"0 to 1 - mix.text = {1 - self.text:g}"),
            ("kinds", self.kinds, bool(self.kinds) and set(self.kinds) <= set(retrieval.KINDS),
             f"one or more of {', '.join(retrieval.KINDS)}"),
            ("digits", self.digits, 2 <= self.digits <= 12, "2 to 12"),
            ("distractors", self.distractors, 0 <= self.distractors <= 64, "0 to 64"),
            ("turns", self.turns, self.turns >= 1, "1 or more"),
            ("answer_weight", self.answer_weight, self.answer_weight > 0, "a positive number"),
        )  # fmt: skip
        for name, value, good, accepted in checks:
            if not good:
                raise ValueError(f"mix.{name}={value!r}; accepted: {accepted}")


class Document(NamedTuple):
    """ids int32 [T]; answer: tokens of an answer, the eos behind it included; weight fp32: of each in the loss."""

    ids: Int[np.ndarray, "T"]
    answer: Bool[np.ndarray, "T"]
    weight: Float[np.ndarray, "T"]


def frame_of(template: ChatTemplate, tokenizer: Tokenizer) -> Frame:
    """Raises PromptError for a template that drops, repeats or reorders messages, or ends no answer with an eos."""
    messages = [{"role": "user", "content": text} for text in (_FIRST, _SECOND)]
    rendered = prompt_lib.render_chat(messages, template)
    head, _, rest = rendered.partition(_FIRST)
    again, _, ask = rest.partition(_SECOND)
    frame = Frame(*(tuple(tokenizer.encode(text)) for text in (head, ask, again)))
    if rendered != head + _FIRST + again + _SECOND + ask or not frame.again or frame.again[0] not in tokenizer.eos_ids:
        raise PromptError(f"{template.source}: accepted: one that writes each message once, after an eos token")
    return frame


def turns_of(task: Task, most: int) -> list[tuple[str, str]]:
    """The task's question and answer, and for a `needle` the same question of up to most - 1 look-alike lines."""
    turns = [(task.question, task.answer)]
    if task.kind == "needle":
        asked, _ = _name_and_key(task.evidence[0])
        for line in task.distractors[: most - 1]:
            name, key = _name_and_key(line)
            turns.append((task.question.replace(asked, name), key))
    return turns


def _name_and_key(line: str) -> tuple[str, str]:
    name, _, key = line.removeprefix("The pass key of ").removesuffix(".").partition(" is ")
    return name, key


def document(
    task: Task, turns: list[tuple[str, str]], text: Text, frame: Frame, tokenizer: Tokenizer, length: int,
    answer_weight: float,
    rng: np.random.Generator,
) -> Document | None:  # fmt: skip
    """A task in chat form in exactly `length` tokens: its lines between excerpts, the question, the answer, and on.

    The evidence keeps its order; where the lines stand is drawn. None if the task alone is longer.
    """
    lines = list(task.distractors)
    rng.shuffle(lines)
    for place, line in zip(np.sort(rng.integers(0, len(lines) + 1, len(task.evidence)))[::-1], task.evidence[::-1],
                           strict=True):  # fmt: skip
        lines.insert(place, line)
    told = [tokenizer.encode(line + "\n") for line in lines]
    spoken: list[tuple[list[int], bool]] = []
    for number, (question, answer) in enumerate(turns):
        lead = tokenizer.encode(DOCUMENT_SEPARATOR[1:] + question) if number == 0 else tokenizer.encode(question)
        spoken.append(([*lead, *frame.ask], False))
        spoken.append(([*tokenizer.encode(answer), frame.again[0]], True))
        if number + 1 < len(turns):
            spoken.append(([*frame.again[1:]], False))
    room = length - len(frame.head) - sum(map(len, told)) - sum(len(ids) for ids, _ in spoken)
    if room < 0:
        return None
    bounds = np.concatenate([[0], np.sort(rng.integers(0, room + 1, len(told))), [room]])
    newline = told[0][-1]
    parts = [np.asarray(frame.head)]
    for gap, line in zip(np.diff(bounds), [*told, []], strict=True):
        if gap:  # an excerpt that ends a line
            parts += [excerpt(text, gap - 1, rng), [newline]]
        parts.append(line)
    body = np.concatenate([np.asarray(part, np.int32) for part in parts])
    ids = np.concatenate([body, *(np.asarray(ids, np.int32) for ids, _ in spoken)])
    answer = np.concatenate([np.zeros(body.size, bool), *(np.full(len(ids), is_answer) for ids, is_answer in spoken)])
    return Document(ids, answer, np.where(answer, answer_weight, 1.0).astype(np.float32))


def most_distractors(mix: Mix, room: int) -> int:
    """Look-alike lines that a task in so many tokens can have."""
    return max(0, min(mix.distractors, room // 80))


def drill(tokenizer: Tokenizer, length: int, rng: np.random.Generator) -> Document:
    """Drawn characters said over and over: what was seen tells what follows, which is most of what retrieval needs.

    Half of the periods are shorter than the geometric mean of the shortest and the longest. The first one, which
    nothing tells, has no weight.
    """
    ids = np.asarray(tokenizer.encode(ALPHABET), np.int32)
    shortest, longest = SHORTEST_PERIOD, max(length // 2, SHORTEST_PERIOD)
    period = int(round(shortest * (longest / shortest) ** rng.random()))
    said = np.resize(rng.choice(ids, period), length)
    return Document(said, np.zeros(length, bool), (np.arange(length) >= period).astype(np.float32))


def _plain(ids: Int[np.ndarray, "T"]) -> Document:
    return Document(ids.astype(np.int32), np.zeros(ids.size, bool), np.ones(ids.size, np.float32))


def row(
    text: Text, frame: Frame, tokenizer: Tokenizer, mix: Mix, length: int, rng: np.random.Generator
) -> list[Document]:
    """Documents of `length` tokens together; half of them take all the room that is left."""
    documents, room = [], length
    while room:
        size = room if rng.random() < 0.5 else int(rng.integers(min(room, 64), room + 1))
        made, share = None, rng.random()
        if share < mix.copies:
            made = drill(tokenizer, size, rng)
        elif share < 1 - mix.text:
            distractors = int(rng.integers(most_distractors(mix, size) + 1))
            kind = str(rng.choice(mix.kinds))
            task = retrieval.make(kind, int(rng.integers(2**63)), distractors=distractors, digits=mix.digits)
            turns = turns_of(task, int(rng.integers(1, mix.turns + 1)))
            made = document(task, turns, text, frame, tokenizer, size, mix.answer_weight, rng)
        if made is None:
            made = _plain(excerpt(text, size, rng))
        documents.append(made)
        room -= size
    return documents


def packed(rows: list[list[Document]]) -> Batch:
    """Rows of documents of one length together as a batch; a document's last token predicts nothing."""

    def rows_of(one, dtype):
        return np.stack(
            [np.concatenate([one(i, d) for i, d in enumerate(documents)]) for documents in rows], dtype=dtype
        )

    answers = rows_of(lambda _, d: np.append(d.answer[1:], False), bool)
    return Batch(
        ids=rows_of(lambda _, d: d.ids, np.int32),
        segments=rows_of(lambda i, d: np.full(d.ids.size, i), np.int32),
        positions=rows_of(lambda _, d: np.arange(d.ids.size), np.int32),
        targets=rows_of(lambda _, d: np.append(d.ids[1:], d.ids[-1]), np.int32),
        weights=rows_of(lambda _, d: np.append(d.weight[1:], 0.0), np.float32),
        answers=answers,
    )


def training_batch(
    text: Text, frame: Frame, tokenizer: Tokenizer, mix: Mix, rows: int, length: int, seed: tuple[int, ...]
) -> Batch:
    """The batch of a seed, as (run, stage, step)."""
    rng = np.random.default_rng(seed)
    return packed([row(text, frame, tokenizer, mix, length, rng) for _ in range(rows)])


def question_batch(
    text: Text, frame: Frame, tokenizer: Tokenizer, mix: Mix, kind: str, rows: int, length: int, seed: tuple[int, ...]
) -> Batch:
    """A task of one kind with all the look-alikes it may have and one question a row, whose last tokens are the answer.

    Raises:
      ValueError: the tasks do not fit the length.
    """
    rng, made = np.random.default_rng(seed), []
    for _ in range(rows):
        seed_of_task, distractors = int(rng.integers(2**63)), most_distractors(mix, length)
        task = retrieval.make(kind, seed_of_task, distractors=distractors, digits=mix.digits)
        one = document(task, turns_of(task, 1), text, frame, tokenizer, length, mix.answer_weight, rng)
        if one is None:
            raise ValueError(f"a {kind!r} task in {length} tokens; accepted: more tokens")
        made.append([one])
    return packed(made)


def text_batch(text: Text, rows: int, length: int, seed: tuple[int, ...]) -> Batch:
    """Rows of one excerpt each."""
    rng = np.random.default_rng(seed)
    return packed([[_plain(excerpt(text, length, rng))] for _ in range(rows)])
