"""The benchmark's figures at tiny sizes, its table and its errors."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture
def bench(monkeypatch):
    """Imports a module as the script does."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return lambda name: importlib.import_module(f"bench.{name}")


def test_grouped_matmul_rows_hold_the_figures_of_their_times(bench):
    module = bench("grouped_matmul")
    rows = module.bench(600.0, 4.0, rows=64, features=(32, 16), cases=(("empty groups", 6),), repeats=1)
    assert [row["op"] for row in rows] == [
        "grouped_matmul", "grouped_matmul, dx", "with update of rank 8", "with update of rank 8, dx da db",
    ]  # fmt: skip
    first = rows[0]
    assert first["backend"] == "blocks" and first["xla_seconds"] > 0
    used = first["tflops"] * 1e12 * first["seconds"] / (2 * 32 * 16)
    assert 0 < used < 64 and used == pytest.approx(round(used))  # a tenth of the rows is in no group
    assert first["fraction_of_matmul"] == pytest.approx(first["tflops"] / 600)
    assert rows[2]["update_share"] == pytest.approx(rows[2]["seconds"] / first["seconds"] - 1)


@pytest.mark.parametrize("kind", ["uneven", "one group", "empty groups"])
def test_group_sizes_are_of_their_kind(bench, kind):
    sizes = bench("grouped_matmul").group_sizes(kind, 64, 4096)
    assert sizes.dtype == "int32" and (sizes >= 0).all()
    assert sizes.sum() == 4096 if kind != "empty groups" else 3500 < sizes.sum() < 3700
    assert (sizes == 0).sum() >= {"uneven": 0, "one group": 63, "empty groups": 22}[kind]


def test_chunked_logprob_rows_compare_with_the_products_contained(bench):
    rows = bench("chunked_logprob").bench(600.0, 4.0, features=16, shapes=((8, 64),), repeats=1)
    assert len(rows) == 4 and all(row["over_matmuls"] > 0 for row in rows)
    forward, backward = rows[:2]
    flops = 2 * 8 * 16 * 64
    assert forward["tflops"] == pytest.approx(flops / forward["seconds"] / 1e12)
    assert backward["tflops"] == pytest.approx(2 * flops / backward["seconds"] / 1e12)


def test_an_absent_peer_is_a_row_that_says_why(bench, monkeypatch):
    peers = bench("peers")
    monkeypatch.setattr(peers, "_ragged_dot_mgpu", lambda: 1e-3)  # the card's own; it would not run here
    monkeypatch.setattr(peers, "_jax_inputs", lambda: ())
    rows = {(row["op"], row["backend"]): row for row in peers.bench(600.0, 4.0, flashmla="/nowhere/flashmla.so")}
    assert "error" in rows["sparse_mla, random ids", "FlashMLA"]
    assert rows["index_scores", "DeepGEMM, fp8"]["error"].startswith("ModuleNotFoundError")
    present = rows["grouped_matmul", "jax ragged_dot_mgpu"]
    assert present["tflops"] == pytest.approx(2 * 65_536 * 6144 * 2048 / 1e-3 / 1e12)


def test_table_has_a_line_a_row_and_leaves_unknown_figures_empty(bench):
    rows = [
        dict(op="a", shape="1 x 2", backend="hopper", seconds=0.0015, tflops=512.4, tbps=2.0, fraction_of_matmul=0.75,
             fraction_of_floor=0.7, xla_seconds=0.1, update_share=0.123),
        dict(op="b", shape="3", backend="peer", error="ImportError: absent"),
    ]  # fmt: skip
    lines = bench("table").table_lines(rows, 4.0)
    assert len(lines) == 4
    assert lines[2] == "| a | 1 x 2 | hopper | 1.500 | 512 | 2.00 | 75% | 50% | 70% | 100.0 | update +12.3% |"
    assert lines[3] == "| b | 3 | peer |  |  |  |  |  |  |  | ImportError: absent |"


def test_bad_usage_is_one_line_and_exit_code_2():
    command = [sys.executable, str(EXPERIMENTS / "bench_kernels.py"), "--ops=gemm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: --ops: ['gemm']; accepted: indexer_topk") and done.stderr.count("\n") == 1
