"""The decode benchmark: what a step has to read, what it refuses, and one whole run at a tiny size."""

import json
import types

import numpy as np
import pytest
import tiny_jobs  # puts experiments/ on the path

from longstraw_jax.config import LoraConfig, model_config_from_hf
from longstraw_jax.model.choices import Choices

import bench_sampling  # isort: skip
import model_slice  # isort: skip


def values(folder, **changes):
    architecture = folder / "config.json"
    architecture.write_text(json.dumps(tiny_jobs.RAW | {"mlp_layer_types": ["sparse", "sparse"]}))
    given = dict(
        tokens=["200"], groups=["6"], slots=["0", "2"], end_chance=0.1, response=8, repeats=2, layers=2, experts=0,
        rank=2, kernels="auto", seed=1, architecture=str(architecture), out=str(folder / "sampling.json"),
    )  # fmt: skip
    return types.SimpleNamespace(**given | changes)


def test_a_step_of_the_real_widths_reads_what_counting_by_hand_says():
    """Four layers of GLM-5.2, the first one full; bytes in bf16, adapters of rank 1 on q_a and the experts in fp32."""
    config = model_slice.model_config(model_slice.load(model_slice.ARCHITECTURE, 4, 0), 1 << 20)
    adapters = LoraConfig((("q_a", 1, 2.0), ("routed", 1, 2.0)))
    read = bench_sampling.step_bytes(config, adapters, 1 << 20, rows=8, tail=10.5, experts=0.25)
    assert read["index keys"] == (1 << 20) * 128 * 2
    assert read["selected latents"] == 8 * 4 * 2048 * 576 * 2
    assert read["tails"] == 8 * 10.5 * (4 * 576 + 128) * 2
    assert read["routed experts"] == 4 * 64 * 3 * 6144 * 2048 * 2
    assert read["adapters"] == 4 * 4 * (6144 + 2048) + 4 * 64 * 3 * 4 * (6144 + 2048)
    attention = 6144 * (2048 + 576) + 2048 * 64 * 256 + 512 * 64 * (192 + 256) + 64 * 256 * 6144
    shared, head = 3 * 6144 * 2048, 6144 * config.vocab_size
    in_bf16 = 4 * (attention + shared) + 2048 * 32 * 128 + 6144 * 128 + head
    router = 4 * 6144 * 256 * 4
    assert in_bf16 * 2 + router < read["weights"] < 1.001 * (in_bf16 * 2 + router) + 4 * 6144 * 32  # norms, biases


def test_the_share_of_experts_is_that_of_the_routes():
    config = model_config_from_hf(tiny_jobs.RAW | {"mlp_layer_types": ["sparse", "sparse"]})
    k, experts = config.num_experts_per_tok, config.n_routed_experts
    one = np.broadcast_to(np.arange(k, dtype=np.int32), (1, 3, 5, k)).copy()  # every token the same experts
    one[:, :, 4:] = -1
    assert bench_sampling.share_of_experts(config, Choices(routes=((one, one),)), 100.0) == k / experts
    even = (np.arange(3 * experts, dtype=np.int32) % experts).reshape(1, 3, -1, 1).repeat(k, -1)
    found = bench_sampling.share_of_experts(config, Choices(routes=((even, even),)), 1.0)
    assert found == pytest.approx(k / experts)


def test_one_batch_after_another_is_as_long_as_its_longest_members():
    assert bench_sampling.batch_steps(np.asarray([3, 9, 2, 2, 5]), 2) == 9 + 2 + 5


def test_a_run_measures_every_group_and_its_slots(tmp_path):
    result = bench_sampling.run(values(tmp_path))
    whole, few = result["rows"]
    assert json.loads((tmp_path / "sampling.json").read_text()) == json.loads(json.dumps(result)) and result["complete"]
    assert (whole["slots"], few["slots"]) == (6, 2) and whole["lengths"] == few["lengths"]
    assert whole["steps"] == whole["batch_steps"] == max(whole["lengths"]) and few["steps"] < few["batch_steps"]
    for row in result["rows"]:
        assert len(row["seconds"]) == 2 and row["rows_a_step"] == pytest.approx(sum(row["lengths"]) / row["steps"])
        assert row["of_floor"] == pytest.approx(row["floor_ms"] / row["step_ms"])
        read = sum(row["step_bytes"].values())
        assert row["floor_ms"] == pytest.approx(read / result["copy_tbps"] * 1e-9)
        assert 0 < row["share_of_experts"] <= 1 and row["product_ms"] > 0
    lines = bench_sampling.table_lines([whole, {"tokens": 1, "group": 2, "slots": 3, "error": "full"}])
    assert lines[3].startswith("| 1 | 2 | 3 | full |") and len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": ["1"]}, "--tokens=1; accepted: integers of at least 2"),
        ({"groups": ["0"]}, "--groups=0; accepted: integers of at least 1"),
        ({"slots": ["x"]}, "--slots=x; accepted: integers of at least 0"),
        ({"end_chance": 1.0}, "--end_chance=1.0; accepted: 0 to below 1"),
        ({"out": "table.txt"}, "--out=table.txt; accepted: a file name that ends in .json"),
        ({"groups": ["1000000000"]}, r" GB \(weights .*; accepted: .* by a smaller --experts"),
    ],
)
def test_bad_input_is_named_before_anything_is_drawn(tmp_path, changes, message, monkeypatch):
    monkeypatch.setattr(bench_sampling.decoder, "init_params", None)
    with pytest.raises(ValueError, match=message):
        bench_sampling.run(values(tmp_path, **changes))
    assert not (tmp_path / "sampling.json").exists()
