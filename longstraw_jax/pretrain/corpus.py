"""Text that ships with every CPython, as token ids: the documentation's topics and the standard library's sources."""

import pathlib
import platform
import sysconfig
import zlib
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from longstraw_jax import fingerprint
from longstraw_jax.io import payload
from longstraw_jax.io.payload import Source
from longstraw_jax.io.tokenizer import Tokenizer

HELD_OUT = 16  # one text in so many is never trained on
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}


class Text(NamedTuple):
    """Texts one after another.

    Attributes:
      ids: int16 [N].
      lines: int64, where a line starts in `ids`.
    """

    ids: Int[np.ndarray, "N"]
    lines: Int[np.ndarray, "M"]


def python_texts() -> Source:
    """The documentation's topics and the standard library's sources; another Python version has other text."""
    topics = payload.python_topics()
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    names, texts = [], []
    for file in sorted(folder.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(file.relative_to(folder).parts):
            try:
                texts.append(file.read_text("utf-8"))
            except UnicodeDecodeError:  # a source may declare another encoding
                continue
            names.append(str(file.relative_to(folder)))
    digest = fingerprint.sha256_json([topics.sha256, *map(list, zip(names, texts, strict=True))])
    return Source(f"documentation and standard library of Python {platform.python_version()}", digest,
                  [*topics.texts, *texts])  # fmt: skip


def read(source: Source, tokenizer: Tokenizer) -> tuple[Text, Text]:
    """The ids to train on and those held out, split by a hash of each text, which does not depend on the others.

    Raises:
      ValueError: the tokenizer's ids do not fit int16, or there is no text on one side.
    """
    if tokenizer.vocab_size > np.iinfo(np.int16).max:
        raise ValueError(f"tokenizer of {tokenizer.vocab_size} ids; accepted: at most {np.iinfo(np.int16).max}")
    sides: tuple[list[str], list[str]] = ([], [])
    for text in source.texts:
        text = text if isinstance(text, str) else text.read_text("utf-8")
        sides[zlib.crc32(text.encode("utf-8")) % HELD_OUT == 0].append(text if text.endswith("\n") else text + "\n")
    if not all(sides):
        raise ValueError(f"{source.name}: {len(source.texts)} texts; accepted: enough for both sides of a split")
    return tuple(_text([tokenizer.encode(text) for text in side], tokenizer) for side in sides)


def _text(texts: list[list[int]], tokenizer: Tokenizer) -> Text:
    ids = np.concatenate([np.asarray(ids, np.int16) for ids in texts])
    newline = tokenizer.encode("\n")[-1]
    return Text(ids, np.concatenate([[0], np.flatnonzero(ids == newline)[:-1] + 1]))


def excerpt(text: Text, length: int, rng: np.random.Generator) -> Int[np.ndarray, "length"]:
    """`length` ids from the start of a line on.

    Raises:
      ValueError: the text is shorter.
    """
    last = np.searchsorted(text.lines, text.ids.size - length, side="right")
    if last == 0:
        raise ValueError(f"an excerpt of {length} ids; accepted: at most {text.ids.size}")
    start = text.lines[rng.integers(last)]
    return text.ids[start : start + length]
