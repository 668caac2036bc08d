"""Packed rows to train on: text, drawn pairs of key and value, recall, and retrieval tasks whose answers weigh more.

A batch is a function of its seed, on the host in NumPy. Every row is full: no padding.
"""

import dataclasses
from collections.abc import Sequence
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

LETTERS, DIGITS = "abcdefghijklmnopqrstuvwxyz ", "0123456789"  # of drawn pairs
NAMES_FROM = 4  # letters around pairs
TOKENS_OF_A_LINE = 64  # of a recall document at least, so that there is room to come back to it
ROUNDING = 1e-9  # of shares that add up to 1
_FIRST, _SECOND = "\ue000first\ue001", "\ue000second\ue001"  # stand for messages while the template renders


Part = tuple[Sequence[int], bool]  # ids, and whether they are an answer


class Frame(NamedTuple):
    """What a chat template writes around messages: before the first, up to the answer, from an answer to the next."""

    head: tuple[int, ...]
    ask: tuple[int, ...]
    again: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Mix:
    """What rows are made of.

    Attributes:
      text, pairs, recall: shares of documents that are plain text, drawn pairs said over and over (`pairs`), and lines
        of a task said and asked for over and over (`recall`); the others are tasks.
      around: most letters before the key of a pair, and between it and its value; the fewer, the shorter the keys.
      kinds: kinds of retrieval.KINDS, drawn alike.
      digits: of the tasks' numbers.
      distractors: most look-alike lines of a task.
      lines: most lines of a `recall` document, and pairs of a document of these.
      turns: most questions of a `needle` document; those after the first ask for look-alikes.
      answer_weight: of an answer's tokens in the loss, where others have 1.
      stretched: share of documents whose positions have gaps (`stretched`).
      positions: most of a stretched document, whose number is drawn evenly in its logarithm.
    """

    text: float
    pairs: float
    recall: float
    around: int
    kinds: tuple[str, ...]
    digits: int
    distractors: int
    lines: int
    turns: int
    answer_weight: float
    stretched: float
    positions: int

    def __post_init__(self):
        checks = (
            ("text", self.text, 0 <= self.text <= 1, "0 to 1"),
            ("pairs", self.pairs, 0 <= self.pairs <= 1 - self.text, f"0 to 1 - mix.text = {1 - self.text:g}"),
            ("recall", self.recall, 0 <= self.recall <= 1 - self.text - self.pairs + ROUNDING,
             f"0 to 1 - mix.text - mix.pairs = {1 - self.text - self.pairs:g}"),
            ("around", self.around, 0 <= self.around <= 64, "0 to 64"),
            ("kinds", self.kinds, bool(self.kinds) and set(self.kinds) <= set(retrieval.KINDS),
             f"one or more of {', '.join(retrieval.KINDS)}"),
            ("digits", self.digits, 2 <= self.digits <= 12, "2 to 12"),
            ("distractors", self.distractors, 0 <= self.distractors <= 64, "0 to 64"),
            ("lines", self.lines, 2 <= self.lines <= 64, "2 to 64"),
            ("turns", self.turns, self.turns >= 1, "1 or more"),
            ("answer_weight", self.answer_weight, self.answer_weight > 0, "a positive number"),
            ("stretched", self.stretched, 0 <= self.stretched <= 1, "0 to 1"),
            ("positions", self.positions, self.positions >= 64, "64 or more"),
        )  # fmt: skip
        for name, value, good, accepted in checks:
            if not good:
                raise ValueError(f"mix.{name}={value!r}; accepted: {accepted}")


class Document(NamedTuple):
    """ids int32 [T]; answer: tokens of an answer, the eos behind it included; weight fp32: of each in the loss.

    places: rotary positions, int32, from 0 on.
    """

    ids: Int[np.ndarray, "T"]
    answer: Bool[np.ndarray, "T"]
    weight: Float[np.ndarray, "T"]
    places: Int[np.ndarray, "T"]


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
        for line in task.distractors[: most - 1]:
            name, key = retrieval.name_and_key(line)
            turns.append(("".join(retrieval.question_of([name])), key))
    return turns


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
    spoken: list[Part] = []
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
    return _document([*((part, False) for part in parts), *spoken], answer_weight)


def _document(parts: list[Part], answer_weight: float) -> Document:
    ids = np.concatenate([np.asarray(ids, np.int32) for ids, _ in parts])
    answer = np.repeat([is_answer for _, is_answer in parts], [len(ids) for ids, _ in parts])
    weight = np.where(answer, answer_weight, 1.0).astype(np.float32)
    return Document(ids, answer, weight, np.arange(ids.size, dtype=np.int32))


def most_distractors(mix: Mix, room: int) -> int:
    """Look-alike lines that a task in so many tokens can have."""
    return max(0, min(mix.distractors, room // 80))


def pairs(tokenizer: Tokenizer, mix: Mix, length: int, rng: np.random.Generator) -> Document:
    """Lines of a key and a drawn value, within letters that are the same in each, said over and over.

    The letters before the key and between it and its value are 0 to mix.around, few more often than many: a slope from
    copying what followed the last letter to reading the number of a name in a sentence, which small models do not find
    on `recall` alone. Keys are 1 to 1 + mix.around drawn letters, at most 8; from NAMES_FROM on, in half of the
    documents, a task's names. Half have two such forms, drawn for each line, as a name is once told of and once asked
    for. Values weigh as answers; lines that no earlier one tells have no weight.
    """
    letters, digits, newline = (np.asarray(tokenizer.encode(text), np.int32) for text in (LETTERS, DIGITS, "\n"))
    count, forms = int(rng.integers(2, mix.lines + 1)), int(rng.integers(1, 3))
    around = [rng.choice(letters, int((mix.around + 1) * rng.random() ** 3)) for _ in range(2 * forms)]
    if mix.around < NAMES_FROM or rng.random() < 0.5:
        drawn_keys = [rng.choice(letters, rng.integers(1, min(8, 1 + mix.around) + 1)) for _ in range(count)]
        keys = list({key.tobytes(): key for key in drawn_keys}.values())  # a key has one value
        count = len(keys)
    else:
        lines, _ = _lines("needles" if rng.random() < 0.5 else "needle", count, mix, rng)
        keys = [np.asarray(tokenizer.encode(retrieval.name_and_key(line)[0]), np.int32) for line in lines]
    drawn = [(key, rng.choice(digits, rng.integers(1, mix.digits + 1))) for key in keys]
    parts: list[Part] = []
    said = first = size = 0
    while size < length:
        key, value = drawn[said if said < count else rng.integers(count)]
        form = 2 * int(rng.integers(forms))
        parts += [(around[form], False), (key, False), (around[form + 1], False), (value, said >= count),
                  (newline, False)]  # fmt: skip
        said += 1
        size = size + sum(len(ids) for ids, _ in parts[-5:])
        first = size if said <= count else first
    whole = _document(parts, mix.answer_weight)
    whole.weight[:first] = 0.0
    return Document(*(field[:length] for field in whole))


def _lines(kind: str, count: int, mix: Mix, rng: np.random.Generator) -> tuple[list[str], dict[str, str]]:
    """So many lines of a task, and their keys by name."""
    others = max(0, count - (1 if kind == "needle" else retrieval.LINES))
    task = retrieval.make(kind, int(rng.integers(2**63)), distractors=others, digits=mix.digits)
    lines = [*task.evidence, *task.distractors][:count]
    return lines, dict(retrieval.name_and_key(line) for line in lines)


def recall(tokenizer: Tokenizer, frame: Frame, mix: Mix, length: int, rng: np.random.Generator) -> Document:
    """Lines of a task without a word between, then over and over one of them, said again or asked for.

    Which number belongs to which name is all that there is to learn: one token in 15 tells it, where in a task among
    text one in hundreds does. In half of the documents no two of the first three names share a word, which is easier,
    in the others half of them do. Where mix.kinds has them, a quarter of the documents have the lines of a `chain` and
    a quarter of the questions ask for several names. What follows from a line before weighs as an answer. Half of the
    turns ask, in the chat's form. The last turn is cut at `length`.
    """
    most, encode = max(2, min(mix.lines, length // TOKENS_OF_A_LINE)), tokenizer.encode
    kind, least = ("needles", 2) if rng.random() < 0.5 else ("needle", 2)
    if "chain" in mix.kinds and most >= retrieval.LINES and rng.random() < 0.25:
        kind, least = "chain", retrieval.LINES
    count = int(rng.integers(least, most + 1))
    lines, told = _lines(kind, count, mix, rng)
    parts: list[Part] = [(frame.head, False)]
    parts += [(encode(lines[i] + "\n"), False) for i in rng.permutation(count)]
    size = sum(len(ids) for ids, _ in parts)
    while size < length:
        number = int(rng.integers(count))
        if rng.random() < 0.5:
            several = "needles" in mix.kinds and count >= retrieval.LINES and rng.random() < 0.25
            chosen = rng.permutation(count)[: retrieval.LINES] if several else [number]
            names = [list(told)[i] for i in chosen]
            lead, asked = retrieval.question_of(names)
            question = lead + asked if rng.random() < 0.5 else asked
            answer = " ".join(retrieval.followed(told, name) for name in names)
            turn = [([*encode(question), *frame.ask], False), ([*encode(answer), frame.again[0]], True),
                    (frame.again[1:], False)]  # fmt: skip
        else:
            key = list(told.values())[number].removeprefix(retrieval.LINK)
            before, _, after = lines[number].rpartition(key)
            turn = [(encode(before), False), (encode(key), True), (encode(after + "\n"), False)]
        parts += turn
        size += sum(len(ids) for ids, _ in turn)
    whole = _document(parts, mix.answer_weight)
    return Document(*(field[:length] for field in whole))


def stretched(document: Document, newline: int, positions: int, rng: np.random.Generator) -> Document:
    """The document with gaps in its positions before drawn lines, never inside one, so that it takes `positions`.

    A short row then shows the distances of a long one, as randomised positional encodings do (Ruoss et al.,
    arXiv:2305.16843), while what stands together stays together. The number of gaps is drawn evenly in its logarithm.
    A document of one line, or of as many tokens, stays as it is.
    """
    size = document.ids.size
    starts = np.flatnonzero(document.ids[:-1] == newline) + 1
    if not starts.size or positions <= size:
        return document
    starts = rng.permutation(starts)[: int(round(starts.size ** rng.random()))]
    gaps, added = np.zeros(size, np.int64), positions - size
    gaps[starts] = np.diff(np.sort(rng.integers(0, added + 1, starts.size - 1)), prepend=0, append=added)
    return document._replace(places=(document.places + np.cumsum(gaps)).astype(np.int32))


def _plain(ids: Int[np.ndarray, "T"]) -> Document:
    return _document([(ids, False)], 1.0)


def row(
    text: Text, frame: Frame, tokenizer: Tokenizer, mix: Mix, length: int, rng: np.random.Generator
) -> list[Document]:
    """Documents of `length` tokens together; half of them take all the room that is left."""
    documents, room, newline = [], length, tokenizer.encode("\n")[-1]
    while room:
        size = room if rng.random() < 0.5 else int(rng.integers(min(room, 64), room + 1))
        made, share = None, rng.random()
        if share < mix.pairs:
            made = pairs(tokenizer, mix, size, rng)
        elif share < mix.pairs + mix.recall:
            short = size < 2 * TOKENS_OF_A_LINE
            made = pairs(tokenizer, mix, size, rng) if short else recall(tokenizer, frame, mix, size, rng)
        elif share < 1 - mix.text:
            distractors = int(rng.integers(most_distractors(mix, size) + 1))
            kind = str(rng.choice(mix.kinds))
            task = retrieval.make(kind, int(rng.integers(2**63)), distractors=distractors, digits=mix.digits)
            turns = turns_of(task, int(rng.integers(1, mix.turns + 1)))
            made = document(task, turns, text, frame, tokenizer, size, mix.answer_weight, rng)
        if made is None:
            made = _plain(excerpt(text, size, rng))
        if rng.random() < mix.stretched:
            made = stretched(made, newline, int(size * (mix.positions / size) ** rng.random()), rng)
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
        positions=rows_of(lambda _, d: d.places, np.int32),
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
    text: Text, frame: Frame, tokenizer: Tokenizer, mix: Mix, kind: str, rows: int, length: int, seed: tuple[int, ...],
    positions: int = 0,
) -> Batch:  # fmt: skip
    """A task of one kind with all the look-alikes it may have and one question a row, whose last tokens are the answer.

    Args:
      positions: of `stretched` rows; 0 for rows without gaps.

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
        made.append([stretched(one, tokenizer.encode("\n")[-1], positions, rng) if positions else one])
    return packed(made)


def text_batch(text: Text, rows: int, length: int, seed: tuple[int, ...]) -> Batch:
    """Rows of one excerpt each."""
    rng = np.random.default_rng(seed)
    return packed([[_plain(excerpt(text, length, rng))] for _ in range(rows)])
