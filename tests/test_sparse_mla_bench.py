"""The measurement of sparse latent attention: its rows' figures and its selections."""

import numpy as np
import pytest

from experiments.bench import sparse_mla


def test_rows_say_what_was_measured_and_their_figures_agree():
    rows = sparse_mla.bench(600.0, 4.0, shapes=((2, 256),), selected=16, repeats=1)
    assert [row["ids"] for row in rows] == ["random"] * 4 + ["local"] * 3 + ["skewed"] * 3
    forward = rows[0]
    assert forward["op"] == "sparse_mla" and forward["backend"] == "reference" and forward["xla_seconds"] > 0
    tflops = 2 * 64 * 16 * (576 + 512) * 2 / forward["seconds"] / 1e12
    assert forward["tflops"] == pytest.approx(tflops)
    assert forward["fraction_of_matmul"] == pytest.approx(tflops / 600)
    assert forward["tbps"] == pytest.approx(2 * 576 * 16 * 2 / forward["seconds"] / 1e12)


@pytest.mark.parametrize("kind", sparse_mla.KINDS)
def test_selections_are_distinct_rows_that_exist(kind):
    ids = np.asarray(sparse_mla._inputs(5, 4096, kind, 64)[2])
    assert ids.min() >= 0 and ids.max() < 4096
    assert all(len(set(row)) == 64 for row in ids)
    low = (ids < 256).mean()
    assert low > 0.4 if kind == "skewed" else low < 0.3 or kind == "local"
