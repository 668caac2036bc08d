"""Retrieval tasks as text: lines of evidence, look-alike lines that distract, a question, a short answer of digits.

The kinds follow the aims of RULER (arXiv:2404.06654); wording and distractors are this project's. Every name owns one
line, all values differ, and the answer is the value of no distractor. A question ends with the names that it asks for:
what the answer hangs on stands next to it, which a small model needs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

KINDS = ("needle", "needles", "chain", "sum")
LINES = 3  # of evidence, in the kinds that have several
MOST_DISTRACTORS = 500
LINK = "that of "  # before the name whose key is meant
ALONE = "Answer with the number alone. "  # before a question for one number

_FIRST = (
    "amber", "brisk", "cedar", "dusky", "early", "faint", "green", "hazel", "ivory", "jolly", "keen", "lunar", "misty",
    "noble", "olive", "pale", "quiet", "rusty", "solar", "tawny", "upper", "vivid", "windy", "young", "azure", "broad",
    "crisp", "dense", "eager", "frosty", "gentle", "humble",
)  # fmt: skip
_SECOND = (
    "anchor", "badger", "candle", "dragon", "ember", "falcon", "garden", "heron", "island", "jacket", "kettle",
    "lantern", "marble", "needle", "orchid", "pepper", "quarry", "raven", "saddle", "timber", "urchin", "valley",
    "walnut", "yarrow", "zephyr", "bridge", "copper", "desert", "engine", "forest", "glacier", "harbor",
)  # fmt: skip


class Task(NamedTuple):
    """A question about lines that are to stand in a longer text.

    Attributes:
      kind: one of KINDS.
      evidence: the lines that the answer follows from, in the order in which they are to stand.
      distractors: lines of the same form about other names.
      question: what the user asks.
      answer: digits, with single spaces between several numbers.
    """

    kind: str
    evidence: tuple[str, ...]
    distractors: tuple[str, ...]
    question: str
    answer: str


def line(name: str, key: int | str) -> str:
    """What the text says of a name."""
    return f"The pass key of {name} is {key}."


def question_of(names: Sequence[str]) -> tuple[str, str]:
    """How the answer is wanted, and what asks for the keys of one name or of several: together a task's question."""
    if len(names) == 1:
        return ALONE, f"What is the pass key of {names[0]}?"
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    return "Answer with the numbers alone, in this order. ", f"What are the pass keys of {listed}?"


def followed(told: Mapping[str, str], name: str) -> str:
    """The number that the lines, as keys by name, give for a name in the end."""
    while (key := told[name]).startswith(LINK):
        name = key.removeprefix(LINK)
    return key


def name_and_key(line: str) -> tuple[str, str]:
    """A line taken apart again."""
    name, _, key = line.removeprefix("The pass key of ").removesuffix(".").partition(" is ")
    return name, key


def make(kind: str, seed: int, *, distractors: int = 8, digits: int = 4) -> Task:
    """A task; the same arguments give the same text on every machine.

    Kinds: `needle` (one line), `needles` (three names asked for together), `chain` (a name whose key is that of
    another, and so on to the third, which has a number), `sum` (one line and an addition).

    Args:
      kind: one of KINDS.
      seed: 0 <= seed < 2**64.
      distractors: look-alike lines, half of them with a name that shares a word with an asked one.
      digits: of every number, the first of which is not 0.

    Raises:
      ValueError: an argument out of range.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}; accepted: {', '.join(KINDS)}")
    for name, value, low, high in (
        ("seed", seed, 0, 2**64 - 1),
        ("distractors", distractors, 0, MOST_DISTRACTORS),
        ("digits", digits, 1, 12),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name}={value}; accepted: {low} to {high}")
    if distractors > (most := 9 * 10 ** (digits - 1) - LINES):
        raise ValueError(f"distractors={distractors} with digits={digits}; accepted: at most {most}, as values differ")
    draw = _draws(seed, KINDS.index(kind))
    asked = 1 if kind in ("needle", "sum") else LINES
    names = _names(draw, asked, distractors)
    values = _values(draw, asked + distractors, digits)
    told = {name: line(name, value) for name, value in zip(names, values, strict=True)}
    answer, question = str(values[0]), "".join(question_of(names[: LINES if kind == "needles" else 1]))
    if kind == "needles":
        answer = " ".join(map(str, values[:LINES]))
    if kind == "chain":
        answer = str(values[asked - 1])
        links = list(zip(names[: asked - 1], names[1:asked], strict=True))
        others = names[asked:]
        links += list(zip(others[0::2], others[1::2], strict=False))  # each to a name that has a number
        told |= {name: line(name, LINK + other) for name, other in links}
    if kind == "sum":
        addend = next(a for a in iter(lambda: 10 + draw(90), None) if values[0] + a not in values)
        answer = str(values[0] + addend)
        question = f"{ALONE}What is {addend} plus the pass key of {names[0]}?"
    lines = list(told.values())
    evidence = [lines[i] for i in _shuffled(draw, asked)]
    return Task(kind, tuple(evidence), tuple(lines[asked:]), question, answer)


def _draws(seed: int, stream: int) -> Callable[[int], int]:
    """draw(n): the next whole number below n."""
    # NumPy keeps raw bit streams alike over versions, but not what Generator makes of them (NEP 19).
    source = np.random.Philox(key=np.array([seed, stream], np.uint64))
    return lambda n: int(source.random_raw()) % n


def _names(draw: Callable[[int], int], asked: int, others: int) -> list[str]:
    """`asked` names without a common word, then `others`, every second of which shares a word with one of them."""
    first, second = _shuffled(draw, len(_FIRST)), _shuffled(draw, len(_SECOND))
    names = [f"{_FIRST[first[i]]} {_SECOND[second[i]]}" for i in range(asked)]
    taken = set(names)
    while len(names) < asked + others:
        a, b = _FIRST[draw(len(_FIRST))], _SECOND[draw(len(_SECOND))]
        alike = names[draw(asked)].split()
        name = f"{a} {b}"
        # The look-alikes of a few names run out; then any name will do.
        for near in (f"{alike[0]} {b}", f"{a} {alike[1]}") if len(names) % 2 else ():
            name = near if near not in taken else name
        if name not in taken:
            taken.add(name)
            names.append(name)
    return names


def _values(draw: Callable[[int], int], count: int, digits: int) -> list[int]:
    """Different numbers of so many digits."""
    low = 10 ** (digits - 1)
    values: dict[int, None] = {}
    while len(values) < count:
        values[low + draw(9 * low)] = None
    return list(values)


def _shuffled(draw: Callable[[int], int], count: int) -> list[int]:
    """0..count-1 in a drawn order (Fisher and Yates)."""
    order = list(range(count))
    for i in range(count - 1, 0, -1):
        j = draw(i + 1)
        order[i], order[j] = order[j], order[i]
    return order
