"""Text to train on: what Python ships, its split, and excerpts."""

import numpy as np
import pytest

from longstraw_jax.io.payload import Source
from longstraw_jax.pretrain import corpus

TEXTS = [f"text {i}\n" * 3 + f"the end of {i}" for i in range(64)]


def test_texts_are_split_whole_and_alone(byte_tokenizer):
    """A text's side does not depend on the others; every token is on one side."""
    training, held_out = corpus.read(Source("s", "0", TEXTS), byte_tokenizer)
    joined = [byte_tokenizer.decode(side.ids) for side in (training, held_out)]
    assert sum(map(len, joined)) == sum(len(text) + 1 for text in TEXTS) and len(joined[1]) > 0
    for text in TEXTS:
        assert [text + "\n" in side for side in joined].count(True) == 1
    fewer = corpus.read(Source("s", "0", TEXTS[:40]), byte_tokenizer)
    assert byte_tokenizer.decode(fewer[1].ids) == joined[1][: fewer[1].ids.size]


def test_excerpts_begin_a_line(byte_tokenizer):
    training, _ = corpus.read(Source("s", "0", TEXTS), byte_tokenizer)
    rng = np.random.default_rng(0)
    for length in (1, 4, 50, training.ids.size):
        found = byte_tokenizer.decode(corpus.excerpt(training, length, rng))
        assert len(found) == length and found[:4] in ("text"[:length], "the "[:length])
    with pytest.raises(ValueError, match=f"accepted: at most {training.ids.size}"):
        corpus.excerpt(training, training.ids.size + 1, rng)


def test_python_ships_enough_text(byte_tokenizer):
    source = corpus.python_texts()
    assert sum(map(len, source.texts)) > 5_000_000 and len(source.sha256) == 64
    with pytest.raises(ValueError, match="enough for both sides"):
        corpus.read(Source("one", "0", TEXTS[:1]), byte_tokenizer)
