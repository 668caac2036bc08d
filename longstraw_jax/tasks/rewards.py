"""Rewards of tasks with short answers, with TRL's signature; named in a configuration as module:function.

Both read what follows the last `</think>`, the whole text where there is none.
"""

from longstraw_jax.rl import columns as reward_columns

THINK_END = "</think>"


def leading_share(prompts, completions, completion_ids, **columns) -> list[float | None]:
    """Share of the answer's characters that the text begins with, 0.0 to 1.0; None without an answer.

    What follows them costs nothing: 'exact_match' beside it teaches to stop.
    """
    del prompts, completion_ids
    return [
        None if answer is None else _common(text, answer) / max(len(answer), 1)
        for text, answer in _pairs(completions, columns)
    ]


def final_match(prompts, completions, completion_ids, **columns) -> list[float | None]:
    """1.0 where the text is the answer up to surrounding space; None without an answer."""
    del prompts, completion_ids
    return [None if answer is None else float(text == answer) for text, answer in _pairs(completions, columns)]


def _pairs(completions, columns) -> list[tuple[str, str | None]]:
    answers = reward_columns.expected_answers(columns, len(completions))
    texts = [reward_columns.completion_text(c).rpartition(THINK_END)[2].strip() for c in completions]
    return [(t, None if a is None else a.strip()) for t, a in zip(texts, answers, strict=True)]


def _common(text: str, answer: str) -> int:
    """Characters that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(text, answer, strict=False)) if a != b), min(len(text), len(answer)))
