"""Procedural reasoning tasks of the package reasoning-gym (extra `tasks`): rows, and its verifier as a reward.

A row says which task of which size and seed it is, and the verifier makes the entry again from that: entries hold
Python objects that JSON does not. Follows reasoning_gym 0.1.25 (arXiv:2505.24760).
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
except ImportError as error:
    hint = "pip install 'longstraw_jax[tasks]', which builds pycosat with a C compiler"
    raise ImportError(f"reasoning-gym cannot be imported ({error}); {hint}") from error

from longstraw_jax.rl.columns import completion_text
from longstraw_jax.tasks.rewards import THINK_END


class ReasoningError(ValueError):
    """A task, size, seed or setting that reasoning-gym does not take, or a row of another version of it."""


def rows(
    name: str, *, size: int, seed: int, first_index: int = 0, settings: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Rows of the DAPO-Math schema, `size` of one task.

    Args:
      name: of a task in reasoning_gym, for example "basic_arithmetic".
      seed: of the task's own generator; item i is drawn from seed + i.
      first_index: extra_info.index of the first row.
      settings: the task's own parameters, JSON values.

    Returns:
      A list of rows; reward_model.ground_truth is the package's own answer, of which there may be others:
      `verifier` knows.

    Raises:
      ReasoningError: see there.
    """
    if size < 1:
        raise ReasoningError(f"size={size}; accepted: at least 1")
    text = json.dumps(dict(settings or {}), sort_keys=True)
    entries = _dataset(name, size, seed, text)
    made = []
    for number in range(size):
        entry = entries[number]
        if not isinstance(entry["answer"], str):
            raise ReasoningError(f"reasoning task {name!r} gives no answer text; accepted: tasks that do")
        made.append(
            {
                "prompt": [{"role": "user", "content": entry["question"]}],
                "reward_model": {"ground_truth": entry["answer"]},
                "extra_info": {
                    "index": first_index + number,
                    "task": name,
                    "size": size,
                    "seed": seed,
                    "item": number,
                    "settings": text,
                },
            }
        )
    return made


def verifier(
    prompts, completions, completion_ids, *, extra_info: Sequence[Mapping[str, Any]], **columns
) -> list[float | None]:
    """The task's own score of each completion, 0.0 to 1.0; None for rows that are not of a reasoning task.

    Raises:
      ReasoningError: another version of the package makes another question from the row's parameters.
    """
    del completion_ids, columns
    scores = []
    for prompt, completion, info in zip(prompts, completions, extra_info, strict=True):
        if info is None or info.get("item") is None:
            scores.append(None)
            continue
        entries = _dataset(info["task"], info["size"], info["seed"], info["settings"])
        entry = entries[info["item"]]
        asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        if entry["question"] != asked:
            raise ReasoningError(
                f"row {info['index']}: asks {asked[:60]!r}, and item {info['item']} of {info['task']} with seed "
                f"{info['seed']} {entry['question'][:60]!r}; accepted: rows built by the same version of reasoning-gym"
            )
        answer = completion_text(completion).rpartition(THINK_END)[2].strip()
        scores.append(float(entries.score_answer(answer=answer, entry=entry)))
    return scores


@functools.lru_cache(maxsize=64)
def _dataset(name: str, size: int, seed: int, settings: str):
    """The package's dataset; entries are made when they are asked for."""
    if name not in DATASETS:
        near = sorted(known for known in DATASETS if name[:4] in known) or sorted(DATASETS)
        raise ReasoningError(f"reasoning task {name!r}; accepted: {', '.join(near[:20])}, ...")
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **json.loads(settings))
    except (AssertionError, TypeError, ValueError) as error:
        raise ReasoningError(f"reasoning task {name!r} with settings {settings}: {error}") from error
