"""A prompt of an exact number of tokens as a file: real text in a seeded order, the question at a stated depth.

prompt.npy holds the ids, int32 [S]; prompt.json beside it says what they are and carries their SHA-256.
"""

import hashlib
import json
import os
import pathlib
import platform
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from longstraw_jax import fingerprint
from longstraw_jax.io import prompt as prompt_lib
from longstraw_jax.io.data import as_messages
from longstraw_jax.io.prompt import DOCUMENT_SEPARATOR, ChatTemplate, PromptError
from longstraw_jax.io.tokenizer import Tokenizer
from longstraw_jax.io.whole_file import open_whole, write_whole

IDS_FILE = "prompt.npy"
TEXT_SUFFIXES = (".txt", ".md", ".rst")
PIECE = 1 << 16  # characters tokenized at once
# Where the text before and after the question goes while the template renders; private-use characters.
_SLOTS = ("\ue000before\ue001", "\ue000after\ue001")

StrPath = str | os.PathLike[str]


class Source(NamedTuple):
    """Texts to fill a prompt with.

    Attributes:
      name: for the record.
      sha256: of all names and texts.
      texts: a topic's text, or a file to read.
    """

    name: str
    sha256: str
    texts: Sequence[str | pathlib.Path]


def python_topics() -> Source:
    """Python's language reference, as every CPython ships it; another Python version has another text."""
    from pydoc_data.topics import topics  # half a megabyte that only this reads

    names = sorted(topics)
    digest = fingerprint.sha256_json([[name, topics[name]] for name in names])
    return Source(f"documentation topics of Python {platform.python_version()}", digest, [topics[n] for n in names])


def text_folder(folder: StrPath) -> Source:
    """Every text file below a folder, in the order of their names. Raises PromptError where there is none."""
    folder = pathlib.Path(folder)
    files = sorted(path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES and path.stat().st_size)
    if not files:
        raise PromptError(f"text={str(folder)!r}; accepted: a folder with {', '.join(TEXT_SUFFIXES)} files in it")
    named = [[str(file.relative_to(folder)), fingerprint.sha256_file(file)] for file in files]
    return Source(str(folder), fingerprint.sha256_json(named), files)


def write(
    folder: StrPath,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    source: Source,
    question: str,
    *,
    tokens: int,
    depth: float,
    seed: int,
) -> dict[str, Any]:
    """Writes prompt.npy and prompt.json, a piece of text in memory at a time.

    The user's message is text, the question between blank lines, and text again. Every part is tokenized apart, so
    that no token spans their borders and the length is exact. Texts follow in a seeded order, all of them before any
    comes again (then in another order). Special tokens written in a text become their ids, as in Hugging Face.

    Args:
      folder: made if absent; files of these two names are replaced.
      tokens: length S of the prompt, up to where the assistant is to speak.
      depth: share of the text that comes before the question, 0 to 1.
      seed: 0 <= seed < 2**64.

    Returns:
      What prompt.json holds.

    Raises:
      PromptError: depth out of range, fewer tokens than chat and question need, a template that drops or repeats the
        message, or a file that is not UTF-8.
    """
    if not 0 <= depth <= 1:
        raise PromptError(f"depth={depth}; accepted: 0 (before all text) to 1 (after it)")
    if not 0 <= seed < 2**64:
        raise PromptError(f"seed={seed}; accepted: 0 to {2**64 - 1}")
    head, middle, tail = (tokenizer.encode(part) for part in _around(question, template))
    room = tokens - len(head) - len(middle) - len(tail)
    if room < 0:
        raise PromptError(f"tokens={tokens}; accepted: at least the {tokens - room} of chat and question")
    first = round(depth * room)
    passes = [0]
    text = pieces(source, seed, passes)
    parts = (
        [head],
        _exactly(first, text, tokenizer),
        [middle],
        _exactly(room - first, text, tokenizer),
        [tail],
    )
    path, digest = pathlib.Path(folder) / IDS_FILE, hashlib.sha256()
    with open_whole(path) as file:
        np.lib.format.write_array_header_1_0(
            _Hashed(file, digest), {"descr": "<i4", "fortran_order": False, "shape": (tokens,)}
        )
        for part in parts:
            for ids in part:
                _Hashed(file, digest).write(np.asarray(ids, "<i4").tobytes())
    start = len(head) + first
    record = {
        "tokens": tokens,
        "sha256": digest.hexdigest(),
        "question": question,
        "question_at": [start, start + len(middle)],
        "depth": depth,
        "seed": seed,
        "text": {"source": source.name, "sha256": source.sha256, "passes": passes[0]},
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
        "chat_template_sha256": fingerprint.sha256_json(template.text),
    }
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    write_whole(path.with_suffix(".json"), text.encode("utf-8"))
    return record


def read(path: StrPath, tokenizer: Tokenizer, question: str | Sequence[dict[str, str]]) -> Int32[np.ndarray, "S"]:
    """The ids of a prompt file, which must be of this tokenizer and this row's question.

    Raises:
      PromptError: the file or its record is missing, has changed, or is of another tokenizer or question.
    """
    path = pathlib.Path(path)
    try:
        record = json.loads(path.with_suffix(".json").read_text("utf-8"))
        found = fingerprint.sha256_file(path)
        checks = (
            ("sha256", found, record["sha256"]),
            ("tokenizer sha256", tokenizer.sha256, record["tokenizer"]["sha256"]),
            ("question", as_messages(question)[-1]["content"], record["question"]),
        )
        ids = np.load(path, allow_pickle=False) if found == record["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PromptError(f"data.prompt_file={str(path)!r}: {error}; accepted: what build_prompt.py wrote") from error
    for what, here, there in checks:
        if here != there:
            raise PromptError(f"data.prompt_file={str(path)!r}: {what} is {here!r}; accepted: its record's {there!r}")
    return ids


class _Hashed:
    """A file whose bytes also go into a digest."""

    def __init__(self, file, digest):
        self._file, self._digest = file, digest

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)


def _around(question: str, template: ChatTemplate) -> tuple[str, str, str]:
    """The rendered chat before the text, from the text's first half to its second, and after it."""
    before, after = _SLOTS
    content = before + DOCUMENT_SEPARATOR + question + DOCUMENT_SEPARATOR + after
    rendered = prompt_lib.render_chat([{"role": "user", "content": content}], template)
    if any(rendered.count(slot) != 1 for slot in _SLOTS):
        raise PromptError(f"{template.source}: drops or repeats the user's message; accepted: written once")
    head, _, rest = rendered.partition(before)
    middle, _, tail = rest.partition(after)
    return head, middle, tail


def pieces(source: Source, seed: int, passes: list[int]) -> Iterator[str]:
    """Endless text, a piece at a time; counts in `passes` how often the texts were begun."""
    while True:
        # NumPy keeps raw bit streams alike over versions, but not Generator.permutation (NEP 19).
        words = np.random.Philox(key=np.array([seed, passes[0]], np.uint64)).random_raw(len(source.texts))
        passes[0] += 1
        for index in np.argsort(words, kind="stable"):
            yield from _text_pieces(source.texts[index])


def _text_pieces(text: str | pathlib.Path) -> Iterator[str]:
    """Pieces of one text, each but the last ending at a line's end where it has one."""
    if isinstance(text, str):
        for start in range(0, len(text), PIECE):
            yield text[start : start + PIECE]
        return
    try:
        with open(text, encoding="utf-8") as file:
            while lines := file.readlines(PIECE):
                joined = "".join(lines)
                for start in range(0, len(joined), PIECE):
                    yield joined[start : start + PIECE]
    except UnicodeDecodeError as error:
        raise PromptError(f"{text}: not UTF-8 ({error}); accepted: UTF-8 text") from error


def _exactly(count: int, pieces: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """`count` ids of the text, a piece's at a time; the last piece is cut at a whole character."""
    while count:
        ids = tokenizer.encode(next(pieces))
        if len(ids) > count:
            ids = prompt_lib.cut(ids, count, tokenizer)
        count -= len(ids)
        yield ids
