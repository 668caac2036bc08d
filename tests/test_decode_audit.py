"""The decode audit on responses made by hand."""

import numpy as np
import pytest

from longstraw_jax.evidence import decode_audit

PROMPT = np.arange(1000, dtype=np.int32) % 251 + 3


@pytest.mark.parametrize(
    "ids, degenerate",
    [
        ([5] * 8, True),
        ([5] * 7, False),  # "1111111" may be an answer
        ([1, 2, 3] * 3, True),
        ([1, 2, 3, 1, 2, 3, 1, 2], False),  # twice and a half
        ([9, 8, 7, 6, 5, 4, *[1, 2] * 5], True),
        ([*range(100, 120), *[1, 2] * 5], False),  # less than half
        ([*[1, 2] * 5, 7], False),  # left the loop
        (list(range(64)), False),
        ([], False),
    ],
)
def test_a_loop_at_the_end_is_degenerate(ids, degenerate):
    assert decode_audit.is_degenerate(ids) is degenerate


@pytest.mark.parametrize(
    "ids, echo",
    [
        (PROMPT[100:116].tolist(), True),
        (PROMPT[100:115].tolist(), False),  # too short
        ([1, 2, *PROMPT[980:1000].tolist()], True),
        ([*range(1000, 1030), *PROMPT[100:120].tolist()], False),  # less than half
        (PROMPT[100:116].tolist()[::-1], False),
        ([], False),
    ],
)
def test_a_passage_of_the_prompt_is_an_echo(ids, echo):
    assert decode_audit.is_echo(PROMPT, ids) is echo


def test_bytes_that_match_between_ids_are_no_echo():
    shifted = np.frombuffer(b"\x00" + b"\x01\x00\x00\x00" * 20 + b"\x00" * 3, "<i4")
    assert not decode_audit.is_echo(shifted, [1] * 16) and decode_audit.is_echo(np.ones(16, np.int32), [1] * 16)


def test_flags_and_shares_count():
    stopped = decode_audit.audit(PROMPT, [9, 2], ending=1, text="9")
    cut = decode_audit.audit(PROMPT, [5] * 8, ending=0, text="\ufffd" * 8)
    silent = decode_audit.audit(PROMPT, [2], ending=1, text=" ")
    assert [name for name, on in stopped.items() if on] == ["stopped"]
    assert [name for name, on in cut.items() if on] == ["hit_cap", "degenerate", "replacement"]
    assert [name for name, on in silent.items() if on] == ["stopped", "empty"]
    found = decode_audit.shares([stopped, cut, silent, stopped])
    assert found["responses"] == 4 and found["counts"]["stopped"] == 3 and found["shares"]["degenerate"] == 0.25
    assert decode_audit.shares([])["shares"]["echo"] is None


@pytest.mark.parametrize("ending", [[2], [7, 8, 9]])
def test_what_ended_a_response_is_not_part_of_a_loop(ending):
    assert decode_audit.audit(PROMPT, [5] * 8 + ending, ending=len(ending), text="x")["degenerate"]
