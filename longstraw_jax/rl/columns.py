"""Reads the text and the expected answer out of TRL-style reward arguments."""

from collections.abc import Mapping, Sequence

ANSWER_COLUMNS = ("reward_model", "ground_truth", "solution", "answer")


def completion_text(completion: str | Sequence[Mapping]) -> str:
    """What the model wrote: the completion itself, or the assistant's turns of a message list, joined."""
    if isinstance(completion, str):
        return completion
    return "\n".join(turn["content"] or "" for turn in completion if turn.get("role") == "assistant")


def expected_answers(columns: Mapping[str, Sequence], rows: int) -> list[str | None]:
    """The ground truth of every row, from the first column that is there.

    Args:
        columns: dataset columns by name: `reward_model` (a dict a row with `ground_truth`, the DAPO-Math
            schema), `ground_truth`, `solution` or `answer`, looked for in this order.
        rows: number of completions.

    Returns:
        one string a row, None where the row has no answer.

    Raises:
        ValueError: none of the columns is there, or a `reward_model` entry is not a dict.
    """
    name = next((name for name in ANSWER_COLUMNS if columns.get(name) is not None), None)
    if name is None:
        raise ValueError(f"columns: {sorted(columns)}; accepted: one of {', '.join(ANSWER_COLUMNS)}")
    values = list(columns[name])
    if len(values) != rows:
        raise ValueError(f"column {name}: {len(values)} values; accepted: {rows}, one a completion")
    if name == "reward_model":
        for row, value in enumerate(values):
            if value is not None and not isinstance(value, Mapping):
                raise ValueError(f"column reward_model, row {row}: {value!r}; accepted: a dict with ground_truth")
        values = [value and value.get("ground_truth") for value in values]
    return [None if value is None else str(value) for value in values]
