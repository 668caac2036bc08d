"""What is counted from step to step, and the rows of a rollout by their place."""

import numpy as np

from longstraw_jax.io import data
from longstraw_jax.progress import Progress, Rows
from longstraw_jax.rollout import Rollout
from longstraw_jax.train import StepReport


def rolled(number, signal, tokens):
    told = (np.zeros(2), np.zeros(2), np.zeros(2, bool), [], signal)
    return Rollout(number, np.zeros(5), [[1] * tokens, [1]], *told)


def report(rollouts, dropped=()):
    return StepReport(rollouts, list(dropped), 0.0, 1.0, 0.0, 0, None, {}, {}, 0, "0" * 16, 1, None)


def test_steps_without_signal_are_counted_in_a_row_and_rollouts_once():
    loud = report([rolled(0, False, 3), rolled(1, True, 4)])
    silent = report([rolled(2, False, 6)], [rolled(0, False, 2)])
    first = Progress().after(silent, 3)
    assert first == Progress(rows=3, silent_steps=1, signals=0, num_tokens=(5 + 7) + (5 + 3))
    second = first.after(silent, 0)  # a further step on the same rollout
    assert second == Progress(rows=3, silent_steps=2, signals=0, num_tokens=first.num_tokens)
    assert second.after(loud, 2) == Progress(5, 0, 1, first.num_tokens + (5 + 4) + (5 + 5))


def test_rows_go_on_from_their_place():
    made = tuple({"id": n, "prompt": str(n), "columns": {}} for n in range(5))
    dataset = data.Dataset(made, {}, 5, 0, 0)
    rows = Rows(dataset, lambda prompt: np.full(2, int(prompt)), seed=3, start=4)
    prompts = [int(rows.prompt(number)[0]) for number in range(7)]
    want = data.row_order(5, 3, 0, 11)[4:].tolist()
    assert prompts == want == [row["id"] for row in rows.taken]
