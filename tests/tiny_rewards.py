"""Reward functions for tests of the main job, run by name in a process of their own."""

import pathlib
import time


def mean_byte(prompts, completions, completion_ids, **columns):
    """Hardly ever equal within a group."""
    return [sum(ids) / (288 * len(ids)) for ids in completion_ids]


def fails_once(prompts, completions, completion_ids, folder, **columns):
    """As mean_byte, but raises at the call whose number stands in folder/fail_at, which it removes."""
    calls, fail_at = pathlib.Path(folder[0]) / "calls", pathlib.Path(folder[0]) / "fail_at"
    number = calls.stat().st_size + 1 if calls.exists() else 1
    with calls.open("a") as file:
        file.write(".")
    if fail_at.exists() and int(fail_at.read_text()) == number:
        fail_at.unlink()
        raise RuntimeError("the judge\nis out")
    return mean_byte(prompts, completions, completion_ids)


def hangs(prompts, completions, completion_ids, **columns):
    time.sleep(60)


def too_few(prompts, completions, completion_ids, **columns):
    return [0.0]


def equal(prompts, completions, completion_ids, **columns):
    return [0.5] * len(completions)


def nothing(prompts, completions, completion_ids, **columns):
    return [float("nan")] * len(completions)


def second_row_alone(prompts, completions, completion_ids, extra_info, **columns):
    """As mean_byte for the row of index 1; equal for the others."""
    return mean_byte(prompts, completions, completion_ids) if extra_info[0]["index"] == 1 else [0.0] * len(completions)
