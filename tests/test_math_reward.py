"""The mathematics reward: right, wrong, unreadable and endless answers."""

import threading
import time

import pytest

from longstraw_jax.rl.math_reward import boxed_math, final_answer, grade

ENDLESS = r"\boxed{9^{9^{9^{9}}}}"


@pytest.mark.parametrize(
    "answer, text, score",
    [
        ("34", r"So it is \boxed{34}.", 1.0),
        ("34", "Thus\nAnswer: $34$.", 1.0),
        ("34", "**Answer:** 34", 1.0),
        ("34", r"\boxed{12} no, \boxed{34}", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        (r"so \boxed{x+1}", r"\boxed{1+x}", 1.0),
        ("the value is $7$", r"\boxed{7}", 1.0),
        (r"\{1,2\}", r"\boxed{\{2, 1\}}", 1.0),
        ("34", r"\boxed{34} no, \boxed{12}", 0.0),
        ("34", r"\boxed{\frac{}{", 0.0),
        ("34", r"\boxed{34", 0.0),  # cut off inside the box
        ("34", "it is 34", 0.0),  # no final answer given
        ("34", r"\boxed{}", 0.0),
        ("34", "", 0.0),
        ("34", r"\boxed{(1, 2)}", 0.0),
        ("???", r"\boxed{34}", None),
        ("", r"\boxed{34}", None),
        (r"\frac{", r"\boxed{34}", None),
    ],
)
def test_grade(answer, text, score):
    assert grade(answer, text) == score


def test_final_answer_is_the_last_one_and_keeps_inner_braces():
    assert final_answer(r"\boxed{\frac{1}{\sqrt{2}}} done") == r"\frac{1}{\sqrt{2}}"
    assert final_answer("Answer: 3\nmore\nanswer : 4. ") == "4"
    assert final_answer("Answer: \\boxed{5}") == "5"
    assert final_answer(r"\boxed{\$20}") == "20"
    assert final_answer("no") is None


def test_a9_endless_answers_are_killed_and_others_scored_from_a_thread():
    reward, metrics, got = boxed_math(timeout_s=2.0, workers=1), {}, []
    completions = [ENDLESS, r"\boxed{8}", [{"role": "assistant", "content": r"\boxed{9}"}], r"\boxed{1}"]
    gold = [{"ground_truth": g} for g in ("8", "8", "8", "???")]

    def call():
        got.append(
            reward([""] * 4, completions, [[]] * 4, log_metric=metrics.__setitem__, reward_model=gold)
        )

    thread = threading.Thread(target=call)
    began = time.monotonic()
    thread.start()
    thread.join()
    assert got == [[None, 1.0, 0.0, None]] and metrics == {"boxed_math/killed": 1.0}
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("column", ["ground_truth", "solution", "answer"])
def test_answer_columns(column):
    reward = boxed_math(workers=1)
    assert reward(["", ""], [r"\boxed{8}"] * 2, [[], []], **{column: [8, None]}) == [1.0, None]


def test_bad_options_and_columns_are_refused():
    with pytest.raises(ValueError, match="timeout_s: 0; accepted"):
        boxed_math(timeout_s=0)
    with pytest.raises(ValueError, match="workers: 0; accepted"):
        boxed_math(workers=0)
    with pytest.raises(ValueError, match=r"columns: \['text'\]; accepted: one of reward_model, ground_truth"):
        boxed_math()([""], ["1"], [[]], text=["1"])
