"""Rewards: TRL's signature, weights, None, and functions that misbehave."""

import asyncio
import os
import re
import threading
import time

import numpy as np
import pytest

from longstraw_jax.rl.rewards import RewardError, group_metrics, in_process, load, score

TEXTS = ["12ab", "", "1234", "é½7x"]


def scored(functions, weights=None, texts=TEXTS, timeout_s=20.0, **columns):
    size = len(texts)
    return score(functions, weights, ["q"] * size, texts, [[1]] * size, columns, timeout_s)


# Reward functions that a config would name as 'module:function'.
def lengths(prompts, completions, completion_ids, **columns):
    return [len(text) for text in completions]


def process_id(prompts, completions, completion_ids, log_metric, **columns):
    log_metric("pid", os.getpid())
    return [0.0] * len(completions)


def hangs(prompts, completions, completion_ids, **columns):
    return [9 ** 9**9] * len(completions)


def raises(prompts, completions, completion_ids, **columns):
    raise KeyError("gold")


def too_few(prompts, completions, completion_ids, **columns):
    return [1.0]


def leaves(prompts, completions, completion_ids, **columns):
    os._exit(1)


async def waits(prompts, completions, completion_ids, label, **columns):
    await asyncio.sleep(0.01)
    return [float(text == wanted) for text, wanted in zip(completions, label, strict=True)]


def named(function):
    return f"{__name__}:{function.__name__}"


def test_built_in_digit_share_and_exact_match():
    rewards, by_function, events = scored(
        [load("digit_share"), load("exact_match")], answer=["12ab", "x", None, " é½7x\n"]
    )
    np.testing.assert_allclose(by_function["digit_share"], [0.5, 0.0, 1.0, 0.25])
    np.testing.assert_array_equal(by_function["exact_match"], [1.0, 0.0, np.nan, 1.0])
    np.testing.assert_allclose(rewards, [1.5, 0.0, 1.0, 1.25])
    assert rewards.dtype == np.float32
    assert events == [{"event": "reward_unscorable", "function": "exact_match", "rows": [2]}]


def test_message_lists_are_read_as_text():
    messages = [[{"role": "assistant", "content": "12"}, {"role": "tool", "content": "999"}]]
    assert scored([load("digit_share")], texts=messages)[0].tolist() == [1.0]
    assert scored([load("exact_match")], texts=messages, solution=["12"])[0].tolist() == [1.0]


def test_a9_boxed_math_from_a_thread_counts_what_it_killed():
    function, got = load("boxed_math", answer_timeout_s=2.0), []
    texts = [r"\boxed{4}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{5}"]
    gold = [{"ground_truth": "4"}] * 3

    def call():  # the limit of a call does not cut short what is bounded answer by answer
        got.append(scored([function], texts=texts, timeout_s=0.5, reward_model=gold))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    rewards, _, events = got[0]
    np.testing.assert_array_equal(rewards, [1.0, np.nan, 0.0])
    killed = {"event": "reward_metric", "function": "boxed_math", "name": "boxed_math/killed", "value": 1.0}
    assert events == [killed, {"event": "reward_unscorable", "function": "boxed_math", "rows": [1]}]


def test_weights_and_none_combine_as_in_trl():
    def partial(prompts, completions, completion_ids, **columns):
        return [1.0, None, float("nan"), 0.0]

    def constant(prompts, completions, completion_ids, **columns):
        return np.array([1, 1, np.nan, 1])

    rewards, _, events = scored([partial, constant], [2.0, -0.5])
    np.testing.assert_array_equal(rewards, [1.5, -0.5, np.nan, -0.5])
    assert [event["rows"] for event in events] == [[1, 2], [2]]


def test_module_functions_run_elsewhere_async_and_with_columns():
    rewards, _, events = scored([load(named(lengths)), load(named(waits)), load(named(process_id))], label=TEXTS)
    assert rewards.tolist() == [5.0, 1.0, 5.0, 5.0]
    assert events[0]["name"] == "pid" and events[0]["value"] != os.getpid()


def test_plain_and_async_callables_run_here():
    def extra(prompts, completions, completion_ids, log_extra, **columns):
        log_extra("seen", completions)
        return [True] * len(completions)

    rewards, _, events = scored([waits, extra], label=TEXTS)
    assert rewards.tolist() == [2.0] * 4
    assert events == [{"event": "reward_extra", "function": "extra", "column": "seen", "values": TEXTS}]


def test_a_signature_without_catch_all_gets_no_hooks():
    def strict(prompts, completions, completion_ids):
        return [1.0] * len(completions)

    assert scored([strict])[0].tolist() == [1.0] * 4


def test_a9_a_hang_is_killed_in_a_process_and_the_next_call_works():
    function, began = load(named(hangs)), time.monotonic()
    for _ in range(2):
        with pytest.raises(RewardError, match=f"'{named(hangs)}' was killed: no result within 0.5 s"):
            scored([function], timeout_s=0.5)
    assert time.monotonic() - began < 30


def test_a9_a_hang_in_a_thread_is_given_up():
    release = threading.Event()

    def stuck(prompts, completions, completion_ids, **columns):
        release.wait()
        return []

    with pytest.raises(RewardError, match=r"'stuck' was given up: no result within 0\.2 s"):
        scored([stuck], timeout_s=0.2)
    release.set()


def test_a9_an_exception_is_never_a_zero():
    for function in (load(named(raises)), in_process(raises)):
        with pytest.raises(RewardError, match=r"raises' failed, KeyError: 'gold'"):
            scored([function])
    with pytest.raises(RewardError, match="leaves' failed, exit: its process ended with code 1"):
        scored([load(named(leaves))])
    with pytest.raises(RewardError, match="'boxed_math' failed, ValueError: columns: .*accepted: one of"):
        scored([load("boxed_math")])

    def gives_up(prompts, completions, completion_ids, **columns):
        raise SystemExit(0)

    with pytest.raises(RewardError, match="'gives_up' failed, SystemExit"):
        scored([gives_up])


@pytest.mark.parametrize(
    "result, message",
    [
        ([1.0], "returned 1 rewards; expected 4"),
        ([1.0] * 5, "returned 5 rewards; expected 4"),
        (1.0, "returned float; expected a list of 4"),
        (None, "returned NoneType; expected a list of 4"),
        ([1.0, "1", 0, 0], "returned '1' for row 1; expected a finite number or None"),
        ([1.0, 0, [2], 0], "returned [2] for row 2"),
        ([1.0, 0, 0, float("inf")], "returned inf for row 3"),
    ],
)
def test_a9_wrong_results_are_refused(result, message):
    def wrong(prompts, completions, completion_ids, **columns):
        return result

    with pytest.raises(RewardError, match=re.escape(f"reward function 'wrong' {message}")):
        scored([wrong])


def test_wrong_length_in_a_process_names_the_function():
    with pytest.raises(RewardError, match=f"^reward function '{named(too_few)}' returned 1 rewards; expected 4$"):
        scored([load(named(too_few))])


@pytest.mark.parametrize("name", ["digits", "no_such_module:f", "os:no_such_name", "os:sep", "os:", ":f"])
def test_unknown_functions_are_refused_with_the_list(name):
    with pytest.raises(ValueError, match="accepted: digit_share, exact_match, boxed_math or 'module:function'"):
        load(name)


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"reward weights: \[1.0, 2.0\]; accepted: 1 finite"):
        scored([lengths], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"reward functions: \['lengths', 'lengths'\]; accepted: .*once"):
        scored([lengths, lengths])
    with pytest.raises(ValueError, match="label: 3 values; accepted: 4"):
        scored([lengths], label=[1, 2, 3])
    with pytest.raises(ValueError, match=r"columns: \['prompts'\]; accepted: names other than"):
        scored([lengths], prompts=TEXTS)
    with pytest.raises(ValueError, match="timeout_s: 0; accepted: seconds above 0"):
        scored([lengths], timeout_s=0)


def test_each_functions_own_figures_leave_unscored_rows_out():
    table = {"f": np.array([1.0, np.nan, 0.0], np.float32), "g": np.full(3, np.nan, np.float32)}
    events = {(e["function"], e["name"]): e["value"] for e in group_metrics(table | {"h": table["f"][:1]})}
    assert events == {("f", "mean"): 0.5, ("f", "std"): pytest.approx(0.5**0.5), ("h", "mean"): 1.0}
