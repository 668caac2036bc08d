"""Grades mathematical answers with math-verify in processes that can be killed."""

import logging
import math
import queue
import re
from concurrent.futures import ThreadPoolExecutor

import math_verify

from longstraw_jax.rl import columns as reward_columns
from longstraw_jax.rl import worker

# A tower of powers fills memory faster than the clock runs out; the child is refused the memory instead.
MEMORY_BYTES = 4 << 30

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
ANSWER_LINE = re.compile(r"^[ \t*#]*answer[ \t*]*:[ \t*]*(\S.*?)[ \t*.]*$", re.IGNORECASE | re.MULTILINE)


def boxed_math(timeout_s: float = 5.0, workers: int = 2):
    """A reward function with TRL's signature: 1.0 for a right final answer, 0.0 for a wrong or missing one.

    The answer expected comes from the columns of `columns.expected_answers`. A row is None (unscorable) if
    it has no answer that math-verify can read, or if grading it fails or overruns; failures and kills are
    reported through `log_metric`. The function may be called from any thread.

    Args:
        timeout_s: seconds for one answer, after which its process is killed.
        workers: answers graded at once, each in a process of its own.

    Returns:
        f(prompts, completions, completion_ids, *, log_metric=None, **columns) -> list of float or None.

    Raises:
        ValueError: timeout_s or workers is not positive.
    """
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"timeout_s: {timeout_s!r}; accepted: seconds above 0")
    if workers < 1:
        raise ValueError(f"workers: {workers!r}; accepted: at least 1")
    idle = queue.SimpleQueue()
    for _ in range(workers):
        idle.put(worker.Worker(memory_bytes=MEMORY_BYTES))

    def graded(answer, text):
        """(score, what went wrong) of one row."""
        if answer is None:
            return None, None
        child = idle.get()
        try:
            return child.call("longstraw_jax.rl.math_reward:grade", answer, text, timeout_s=timeout_s), None
        except worker.WorkerTimeout:
            return None, "killed"
        except worker.WorkerError:
            return None, "failed"
        finally:
            idle.put(child)

    def boxed_math(prompts, completions, completion_ids, *, log_metric=None, **columns):
        del prompts, completion_ids
        answers = reward_columns.expected_answers(columns, len(completions))
        texts = [reward_columns.completion_text(completion) for completion in completions]
        with ThreadPoolExecutor(workers) as threads:
            rows = list(threads.map(graded, answers, texts))
        for problem in ("killed", "failed"):
            count = sum(kind == problem for _, kind in rows)
            if count and log_metric is not None:
                log_metric(f"boxed_math/{problem}", float(count))
        return [score for score, _ in rows]

    return boxed_math


def grade(answer: str, text: str) -> float | None:
    """Whether the text's final answer equals the expected one; unbounded in time, so run it in a worker.

    Returns:
        1.0 or 0.0; None if the expected answer is not mathematics that can be read.
    """
    # Its own limits use signal.alarm, which the worker makes needless; it warns about their absence.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    boxed = final_answer(answer)
    expected = _parse(answer if boxed is None and "$" in answer else _box(boxed or answer))
    if not expected:
        return None
    given = final_answer(text)
    if given is None:
        return 0.0
    try:
        return float(
            math_verify.verify(expected, _parse(_box(given)), timeout_seconds=None, raise_on_error=True)
        )
    except MemoryError:
        raise  # the grader's failure, not the answer's
    except Exception:
        return 0.0  # math-verify's own rule: what cannot be compared is not equal


def final_answer(text: str) -> str | None:
    r"""The last \boxed{...} or `Answer: ...` line of a text, without its wrapping; None if it has neither."""
    found = [(match.start(1), _bare(match.group(1))) for match in ANSWER_LINE.finditer(text)]
    for match in BOX.finditer(text):
        depth = 1
        for end in range(match.end(), len(text)):
            escaped = text[end - 1] == "\\"
            depth += (text[end] == "{" and not escaped) - (text[end] == "}" and not escaped)
            if depth == 0:
                found.append((match.end(), _bare(text[match.end() : end])))
                break
    return max(found)[1] if found else None


def _bare(answer):
    """Without dollar signs, be they delimiters or currency."""
    return answer.replace("\\$", "").strip("$ ")


def _box(answer):
    return f"\\boxed{{{answer}}}"


def _parse(text):
    return math_verify.parse(text, fallback_mode="no_fallback", parsing_timeout=None)
