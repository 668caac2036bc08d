"""Reads the text and the expected answer out of TRL-style reward arguments."""

from collections.abc import Mapping, Sequence

ANSWER_COLUMNS = ("reward_model", "ground_truth", "solution", "answer")


def completion_text(completion: str | Sequence[Mapping]) -> str:
    """What the model wrote: the completion itself, or the assistant's turns of a message list, joined."""
    if isinstance(completion, str):
        return completion
    return "\n".join(turn["content"] or "" for turn in completion if turn.get("role") == "assistant")


def expected_answers(columns: Mapping[str, Sequence], rows: int) -> list[str | None]:
    """The ground truth of every row, from the first of its columns that holds one.

    Args:
        columns: dataset columns by name: `reward_model` (a dict a row with `ground_truth`, the DAPO-Math
            schema), `ground_truth`, `solution` or `answer`, looked for in this order.
        rows: number of completions.

    Returns:
        one string a row, None where the row has no answer.

    Raises:
        ValueError: none of the columns is there, or a `reward_model` entry is not a dict.
    """
    present = [name for name in ANSWER_COLUMNS if columns.get(name) is not None]
    if not present:
        raise ValueError(f"columns: {sorted(columns)}; accepted: one of {', '.join(ANSWER_COLUMNS)}")
    answers: list[str | None] = [None] * rows
    for name in present:
        values = list(columns[name])
        if len(values) != rows:
            raise ValueError(f"column {name}: {len(values)} values; accepted: {rows}, one a completion")
        for row, value in enumerate(values):
            if name == "reward_model" and value is not None:
                if not isinstance(value, Mapping):
                    raise ValueError(f"column reward_model, row {row}: {value!r}; accepted: a dict with ground_truth")
                value = value.get("ground_truth")
            if answers[row] is None and value is not None:
                answers[row] = str(value)
    return answers
