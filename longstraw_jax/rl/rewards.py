"""Calls reward functions with TRL's signature and turns what they return into one reward a response.

A reward function is f(prompts, completions, completion_ids, **columns) -> list of float or None, plain or
async; None means that it cannot score the row. It may also take `log_metric(name, value)` and
`log_extra(column, values)`, as in TRL. What goes wrong is an error with the function's name, never a 0.
"""

import asyncio
import dataclasses
import functools
import inspect
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from longstraw_jax.rl import columns as reward_columns
from longstraw_jax.rl import math_reward, worker


class RewardError(ValueError):
    """A reward function raised, overran, or returned something other than one number a completion."""


@dataclasses.dataclass(frozen=True)
class RewardFunction:
    """A reward function with its name and its way of being bounded.

    Fields:
        name: what errors, events and metrics call it.
        run: (rows by argument name, timeout_s) -> (list of float or None, events).
    """

    name: str
    run: Callable[[Mapping[str, list], float], tuple[list[float | None], list[dict]]]


def load(name: str, *, answer_timeout_s: float = 5.0) -> RewardFunction:
    """The reward function that a config names.

    Built-in: 'digit_share', 'exact_match', 'boxed_math'. Anything else is 'module:function' and runs in a
    process of its own, so that it can be killed; it is imported there, never here.

    Args:
        name: the config's entry.
        answer_timeout_s: seconds that 'boxed_math' gives one answer.

    Raises:
        ValueError: no such function; names the built-in ones.
    """
    built_in = {"digit_share": digit_share, "exact_match": exact_match}
    if name in built_in:
        return in_process(built_in[name])
    if name == "boxed_math":
        # every answer is bounded by itself: a limit on the whole call would punish large groups
        graded = math_reward.boxed_math(answer_timeout_s)
        return RewardFunction(name, lambda rows, timeout_s: _run_here(graded, name, rows))
    accepted = f"accepted: {', '.join([*built_in, 'boxed_math'])} or 'module:function'"
    if ":" not in name:
        raise ValueError(f"reward.functions: {name!r}; {accepted}")
    child = worker.Worker()
    try:
        child.call("longstraw_jax.rl.rewards:check_name", name, timeout_s=worker.START_LIMIT_S)
    except (worker.WorkerError, worker.WorkerTimeout) as error:
        child.close()
        raise ValueError(f"reward.functions: {error}; {accepted}") from error
    return RewardFunction(name, functools.partial(_run_in_child, child, name))


def in_process(function: Callable) -> RewardFunction:
    """A callable that cannot be named from another process (a closure, a notebook's function).

    It runs in a thread. When it overruns the caller gets the error on time, but a thread cannot be killed:
    what it computes goes on until the program ends.
    """
    name = getattr(function, "__name__", type(function).__name__)
    return RewardFunction(name, functools.partial(_run_in_thread, function, name))


def score(
    functions: Sequence[RewardFunction | Callable],
    weights: Sequence[float] | None,
    prompts: Sequence,
    completions: Sequence,
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence],
    timeout_s: float,
) -> tuple[Float[np.ndarray, "N"], dict[str, Float[np.ndarray, "N"]], list[dict]]:
    """Rewards of N completions.

    The reward of a row is the weighted sum over the functions that could score it, as in TRL; a row that
    none could score is NaN.

    Args:
        functions: from `load`, or plain callables (then see `in_process`).
        weights: one a function; None for all 1.
        prompts, completions: N strings or message lists.
        completion_ids: N lists of token ids.
        columns: further dataset columns by name, N values each.
        timeout_s: seconds that one call of one function may take.

    Returns:
        rewards fp32 [N] with NaN for None; the same for each function by name, unweighted; events: dicts
        with `event` one of 'reward_unscorable' (function, rows), 'reward_metric' (function, name, value),
        'reward_extra' (function, column, values).

    Raises:
        RewardError: a function raised, overran (it is then killed), or returned a wrong length or value.
        ValueError: weights, columns or timeout_s do not fit.
    """
    size = len(completions)
    rows = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    taken = rows.keys() & columns.keys()
    if taken:
        raise ValueError(f"columns: {sorted(taken)}; accepted: names other than {', '.join(rows)}")
    rows = {name: list(values) for name, values in {**rows, **columns}.items()}
    for name, values in rows.items():
        if len(values) != size:
            raise ValueError(f"{name}: {len(values)} values; accepted: {size}, one a completion")
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"timeout_s: {timeout_s!r}; accepted: seconds above 0")
    functions = [f if isinstance(f, RewardFunction) else in_process(f) for f in functions]
    names = [function.name for function in functions]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"reward functions: {names}; accepted: at least one, each name once")
    weights = [1.0] * len(names) if weights is None else list(weights)
    if len(weights) != len(names) or not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"reward weights: {weights}; accepted: {len(names)} finite numbers, one a function")

    by_function, events = {}, []
    for function in functions:
        values, logged = function.run(rows, timeout_s)
        by_function[function.name] = np.array([np.nan if v is None else v for v in values], np.float32)
        events += logged
        unscorable = [row for row, value in enumerate(values) if value is None]
        if unscorable:
            events.append({"event": "reward_unscorable", "function": function.name, "rows": unscorable})
    table = np.stack(list(by_function.values()))
    weighted = np.nansum(table * np.asarray(weights, np.float32)[:, None], axis=0, dtype=np.float32)
    return np.where(np.isnan(table).all(axis=0), np.float32(np.nan), weighted), by_function, events


def group_metrics(by_function: Mapping[str, Float[np.ndarray, "N"]]) -> list[dict]:
    """Mean and deviation (n - 1 in its denominator) of each function's scored rows, as 'reward_metric' events.

    What no row is there for is left out.
    """
    found = []
    for name, values in by_function.items():
        scored = values[np.isfinite(values)].astype(np.float64)
        figures = {"mean": scored.mean()} if scored.size else {}
        figures |= {"std": scored.std(ddof=1)} if scored.size > 1 else {}
        told = {"event": "reward_metric", "function": name}
        found += [told | {"name": figure, "value": float(value)} for figure, value in figures.items()]
    return found


def digit_share(prompts, completions, completion_ids, **columns) -> list[float]:
    """Share of the characters that are digits 0-9; 0.0 for an empty text. A random model can climb it."""
    del prompts, completion_ids, columns
    texts = [reward_columns.completion_text(completion) for completion in completions]
    return [sum(c in "0123456789" for c in text) / max(len(text), 1) for text in texts]


def exact_match(prompts, completions, completion_ids, **columns) -> list[float | None]:
    """1.0 where the text is the expected answer up to surrounding space; None without one."""
    del prompts, completion_ids
    answers = reward_columns.expected_answers(columns, len(completions))
    texts = [reward_columns.completion_text(completion).strip() for completion in completions]
    return [None if a is None else float(t == a.strip()) for a, t in zip(answers, texts, strict=True)]


def invoke(function: Callable, name: str, rows: Mapping[str, list]) -> tuple[list[float | None], list[dict]]:
    """Calls one reward function here and now, unbounded; see `score` for the results.

    Raises:
        RewardError: it did not return one finite number or None for every completion.
        Exception: whatever the function raises.
    """
    events = []
    hooks = {
        "log_metric": lambda metric, value: events.append(
            {"event": "reward_metric", "function": name, "name": metric, "value": float(value)}
        ),
        "log_extra": lambda column, values: events.append(
            {"event": "reward_extra", "function": name, "column": column, "values": list(values)}
        ),
    }
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    result = function(**rows, **{k: v for k, v in hooks.items() if takes_any or k in parameters})
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    return _checked(result, name, len(rows["completions"])), events


def invoke_by_name(name: str, rows: Mapping[str, list]) -> tuple[list[float | None], list[dict]]:
    """`invoke` for 'module:function', in a worker."""
    return invoke(worker.resolve(name), name, rows)


def check_name(name: str) -> None:
    """Raises ValueError unless 'module:function' can be imported, in a worker."""
    worker.resolve(name)


async def _awaited(result):
    return await result


def _checked(result, name, size):
    """The function's result as a list of float or None."""
    try:
        values = list(result)
    except TypeError:
        raise RewardError(
            f"reward function {name!r} returned {type(result).__name__}; expected a list of {size}"
        ) from None
    if len(values) != size:
        raise RewardError(f"reward function {name!r} returned {len(values)} rewards; expected {size}")
    checked = []
    for row, value in enumerate(values):
        try:
            number = None if value is None or isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            number = math.inf
        if isinstance(value, str) or (number is not None and math.isinf(number)):
            raise RewardError(
                f"reward function {name!r} returned {value!r} for row {row}; expected a finite number or None"
            )
        checked.append(None if number is None or math.isnan(number) else number)  # NaN is None, as in TRL
    return checked


def _run_in_child(child, name, rows, timeout_s):
    try:
        return child.call("longstraw_jax.rl.rewards:invoke_by_name", name, rows, timeout_s=timeout_s)
    except worker.WorkerTimeout as error:
        raise RewardError(f"reward function {name!r} was killed: {error}") from error
    except worker.WorkerError as error:
        if error.kind == RewardError.__name__:
            raise RewardError(str(error)) from error
        place = f" ({error.where})" if error.where else ""
        raise RewardError(f"reward function {name!r} failed, {error.kind}: {error}{place}") from error


def _run_here(function, name, rows):
    try:
        return invoke(function, name, rows)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:  # nor may a function's sys.exit end the run in silence
        raise RewardError(f"reward function {name!r} failed, {type(error).__name__}: {error}") from error


def _run_in_thread(function, name, rows, timeout_s):
    outcome = queue.SimpleQueue()

    def call():
        try:
            outcome.put((_run_here(function, name, rows), None))
        except RewardError as error:
            outcome.put((None, error))

    threading.Thread(target=call, name=f"reward {name}", daemon=True).start()
    try:
        value, error = outcome.get(timeout=timeout_s)
    except queue.Empty:
        raise RewardError(f"reward function {name!r} was given up: no result within {timeout_s:g} s") from None
    if error is not None:
        raise error
    return value
