"""Stop sequences: what they are as tokens, where a response is cut, and what of it agrees after the cut."""

import numpy as np
import pytest

from longstraw_jax import stopping
from longstraw_jax.model.choices import Choices
from longstraw_jax.sampling import Samples

WORDS = (" the", "\n", "\n\n", "So", ".", "é", " 7")


def samples_of(responses, budget):
    """Responses as sampled on the host, with log-probabilities and choices that tell tokens apart."""
    shape = (len(responses), budget)
    lengths = np.asarray([len(ids) for ids in responses], np.int32)
    inside = np.arange(budget) < lengths[:, None]
    tokens = np.zeros(shape, np.int32)
    for row, ids in zip(tokens, responses, strict=True):
        row[: len(ids)] = ids
    number = np.where(inside, np.arange(1, budget + 1, dtype=np.float32), 0.0)
    chosen = np.where(inside, np.arange(budget), -1)[None, ..., None].astype(np.int32)  # [layers, G, T, K]
    return Samples(tokens, -number, lengths, lengths == budget, Choices(selections=(chosen,)))


def test_a_response_ends_with_the_first_token_whose_text_holds_a_stop_string(tokenizer):
    """Against every prefix tried in turn; a BPE token may hold more than the string."""
    stop = stopping.stop_sequences(("\n\n", " the"), tokenizer.encode, tokenizer.decode, 64)
    rng = np.random.default_rng(0)
    responses = [tokenizer.encode("".join(rng.choice(WORDS, 8))) for _ in range(20)]
    budget = max(map(len, responses))
    before = samples_of(responses, budget)
    after = stopping.cut(before, stop)
    cuts = 0
    for member, ids in enumerate(responses):
        ends = [n for n in range(len(ids) + 1) if any(text in tokenizer.decode(ids[:n]) for text in stop.texts)]
        kept = min(ends, default=len(ids))
        cuts += kept < len(ids)
        assert after.lengths[member] == kept
        assert after.truncated[member] == (not ends and len(ids) == budget)
        np.testing.assert_array_equal(after.tokens[member], ids[:kept] + [0] * (budget - kept))
        np.testing.assert_array_equal(after.logprobs[member, :kept], before.logprobs[member, :kept])
        assert (after.logprobs[member, kept:] == 0).all() and after.logprobs.dtype == np.float32
        (chosen,) = after.choices.selections
        np.testing.assert_array_equal(chosen[0, member, :, 0] >= 0, np.arange(budget) < kept)
    assert 3 < cuts < 20
    assert stopping.cut(before, None) is before


def test_a_stop_string_that_a_token_swallows_is_seen_in_the_text(bpe_tokenizer):
    """The sequence of ids alone would go on: the merged token is none of them."""
    (merged,) = (n for n in [bpe_tokenizer.encode("  ")] if len(n) == 1)
    stop = stopping.stop_sequences((" ",), bpe_tokenizer.encode, bpe_tokenizer.decode, 4)
    assert stop.ids != (tuple(merged),)
    after = stopping.cut(samples_of([[*merged, 65, 66, 67]], 4), stop)
    assert after.lengths.tolist() == [1] and not after.truncated[0]


@pytest.mark.parametrize(
    "text, stop, count",
    [("ab</a>", ("x", "</a>"), 4), ("ab\n\n", ("\n", "\n\n"), 2), ("é7", ("7",), 1), ("ab", ("x",), 1), ("ab", (), 1)],
)
def test_the_tokens_that_ended_a_response_are_those_of_its_stop_string_or_the_eos(byte_tokenizer, text, stop, count):
    stop = stopping.stop_sequences(stop, byte_tokenizer.encode, byte_tokenizer.decode, 8)
    assert stopping.ending(byte_tokenizer.encode(text), stop) == count


def test_a_token_that_begins_a_stop_string_is_of_the_ending(bpe_tokenizer):
    stop = stopping.stop_sequences((" 7",), bpe_tokenizer.encode, bpe_tokenizer.decode, 4)
    merged = bpe_tokenizer.encode("  ")  # one token
    assert stopping.ending([65, *merged, *bpe_tokenizer.encode("7")], stop) == 2


@pytest.mark.parametrize(
    "texts, message",
    [
        (("ok", ""), r"stop=\('ok', ''\); accepted: strings of at least one character"),
        (("a" * 65,), "is 65 tokens; accepted: at most max_new_tokens=64"),
        (("\ud800",), r"stop='\\ud800'; accepted: what the tokenizer gives back, not '\?'"),
    ],
)
def test_strings_that_could_never_stop_are_refused(texts, message):
    def encode(text):
        return list(text.encode("utf-8", "replace"))

    with pytest.raises(ValueError, match=message):
        stopping.stop_sequences(texts, encode, lambda ids: bytes(ids).decode(), 64)
    assert stopping.stop_sequences((), None, None, 64) is None
