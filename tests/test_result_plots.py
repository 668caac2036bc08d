"""Plots of results: which numbers become which curve, that equal receipts give equal bytes, what is refused."""

import json

import numpy as np
import pytest
import tiny_jobs  # noqa: F401  (puts experiments/ on the path)

from longstraw_jax.evidence import result_plots

import results_plots  # isort: skip

GB = 10**9


def receipt(tokens, mode="detached", peak=80, groups=(2,), complete=True, experts=256):
    """As long_context.py writes it; seconds grow with the length, peaks with the group."""
    rows = [row("capture", tokens / 1e4, peak - 1, floor=tokens / 2e4)]
    for size in groups:
        rows += [row(f"group {size}: sample", 1.0, peak), row(f"group {size}: replay 0", 3.0, peak)]
        rows += [row(f"group {size}: replay 1", 2.0, peak + size / 100, floor=1.5)]
    flags = {"mode": mode, "tokens": tokens, "prefix_store": "device"}
    model = {"num_hidden_layers": 4, "n_routed_experts": experts}
    return {"flags": flags, "architecture": model, "complete": complete, "phases": rows}


def row(phase, seconds, peak, floor=None):
    return {"phase": phase, "seconds": seconds, "floor_seconds": floor, "peak_bytes": peak * GB}


PEER = {
    "slice": {"layers": 4, "experts": 64},
    "tried": [
        {"tokens": 8192, "fits": True, "peak_bytes": 45 * GB},
        {"tokens": 4096, "fits": True, "peak_bytes": 31 * GB},
        {"tokens": 32768, "fits": False},
    ],
    "shortest_refused": 32768,
}
RUNS = [
    receipt(2**21, peak=100, groups=(2, 8)),
    receipt(2**18),
    receipt(2**18, "exact"),
    receipt(2**20, complete=False),
]


def test_a_curve_is_a_mode_and_a_slice_and_complete_runs_alone():
    assert result_plots.peak_curves(RUNS) == {
        "detached, 4 layers, 256 experts": [(2**18, 80.02), (2**21, 100.08)],
        "exact, 4 layers, 256 experts": [(2**18, 80.02)],
    }
    assert len(result_plots.peak_curves([*RUNS, receipt(2**18, experts=64)])) == 3


def test_seconds_are_those_of_the_quickest_member_with_its_floor():
    curves = result_plots.phase_curves(RUNS)
    name = "detached, 4 layers, 256 experts"
    assert curves["replay", name][0] == (2**18, 2.0, 1.5)
    assert [point[0] for point in curves["capture", name]] == [2**18, 2**20, 2**21]
    assert {kind for kind, _ in curves} == {"capture", "sample", "replay"}


def test_groups_are_those_of_one_run():
    assert result_plots.group_curves(RUNS) == {
        "detached, 4 layers, 256 experts, 2,097,152 tokens": [(2, 100.02), (8, 100.08)]
    }
    with pytest.raises(ValueError, match="no receipt has several groups"):
        result_plots.group_plot(RUNS[1:])


def test_other_receipts_are_refused():
    with pytest.raises(ValueError, match="0 receipts; accepted: 1 or more"):
        result_plots.peak_plot([])
    with pytest.raises(ValueError, match=r"receipt 1 lacks \['phases'\]"):
        result_plots.seconds_plot([RUNS[0], {k: v for k, v in RUNS[1].items() if k != "phases"}])


def test_the_command_writes_the_same_plots_of_the_same_receipts(tmp_path):
    paths = [tmp_path / f"{number}.json" for number in range(len(RUNS))]
    for path, run in zip(paths, RUNS, strict=True):
        path.write_text(json.dumps(run))
    (tmp_path / "peer.json").write_text(json.dumps(PEER))
    images = []
    for out in (tmp_path / "a", tmp_path / "b"):
        written = results_plots.run([str(path) for path in paths], str(tmp_path / "peer.json"), out)
        assert [path.name for path in written] == ["peak.png", "seconds.png", "groups.png"]
        images.append([path.read_bytes() for path in written])
    assert images[0] == images[1] and all(np.unique(list(image)).size > 100 for image in images[0])
    without = results_plots.run([str(paths[1])], "", tmp_path / "c")
    assert [path.name for path in without] == ["peak.png", "seconds.png"]
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="broken.json is not JSON"):
        results_plots.run([str(tmp_path / "broken.json")], "", tmp_path / "d")
