"""The demo's parts: its model, its row, what it may delete and when it fails."""

import importlib

import pytest
import tiny_jobs

from longstraw_jax import sharding
from longstraw_jax.config import model_config_from_hf
from longstraw_jax.io import data
from longstraw_jax.model import decoder

demo = importlib.import_module("demo")  # from the folder that tiny_jobs puts on the path


def test_the_model_has_every_kind_of_layer_and_fits_32_devices():
    config = model_config_from_hf(tiny_jobs.make_tiny_checkpoint.CONFIG)
    kinds = set(zip(config.indexer_types, config.mlp_layer_types, strict=True))
    assert config.num_hidden_layers >= 8
    assert {"full", "shared"} == {indexer for indexer, _ in kinds} and {"dense", "sparse"} == {mlp for _, mlp in kinds}
    assert (
        config.index_topk * 100 < tiny_jobs.defaults("demo").data.prompt_tokens <= config.max_position_embeddings - 32
    )
    decoder.make_model(config, mesh=sharding.make_mesh(32))


def test_the_demo_is_what_it_says():
    config = tiny_jobs.defaults("demo")
    assert config.mesh.devices == 32 and config.mesh.emulate and config.data.document == "python"
    assert config.data.prompt_tokens >= 16_384 and config.grpo.group == 8 and config.steps >= 20
    assert tiny_jobs.leaves(config).keys() == tiny_jobs.leaves(tiny_jobs.defaults()).keys()


def test_its_row_is_a_dataset(tmp_path):
    demo.write_rows(tmp_path / "rows.jsonl")
    (row,) = data.read_rows(tmp_path / "rows.jsonl", required=("ground_truth",)).rows
    assert row["id"] == "demo-0" and row["prompt"][0]["content"] == demo.QUESTION


def test_a_configuration_that_is_refused_leaves_the_earlier_demo(tmp_path):
    folder = tmp_path / "demo"
    for made in (folder, tmp_path / "demo_inputs"):
        demo.make_anew(made)
        (made / "old").touch()
    config = tiny_jobs.defaults("demo")
    config.mesh.devices, config.mesh.emulate, config.grpo.group = 1, False, 1
    config.data.document, config.data.prompt_tokens = "none", 0
    with pytest.raises(ValueError, match=r"^grpo.group=1; accepted: an integer of at least 2"):
        demo.run(config, folder)
    assert (folder / "old").exists() and (tmp_path / "demo_inputs" / "old").exists()
    (tmp_path / "demo_inputs" / demo.MARK).unlink()
    with pytest.raises(ValueError, match="demo_inputs holds something else"):
        demo.run(config, folder)
    assert (folder / "old").exists()


def test_only_the_folder_of_a_demo_is_removed(tmp_path):
    folder = tmp_path / "runs" / "demo"
    demo.make_anew(folder)
    (folder / "config.json").touch()
    (folder / "old").touch()
    demo.make_anew(folder)
    assert [path.name for path in folder.iterdir()] == [demo.MARK]
    (folder / demo.MARK).rename(folder / "config.json")  # as a run folder or a checkpoint has one
    with pytest.raises(ValueError, match="demo holds something else; accepted: a new folder or that of a demo"):
        demo.make_anew(folder)
    assert (folder / "config.json").exists()


@pytest.mark.parametrize("rise, rose", [(3.1, True), (3.0, False), (-9.0, False), (None, False)])
def test_the_demo_fails_unless_the_reward_rose(rise, rose):
    values = {
        "phase_seconds": {"capture": {"median": 1.0, "total": 2.0, "count": 2}},
        "peak_bytes": 2**30,
        "rise_in_standard_errors": rise,
        "first_mean": 0.1,
        "last_mean": 0.2,
    }
    receipt = {"figures": {name: {"value": value} for name, value in values.items()}, "memory_source": "here"}
    lines, found = demo.verdict(receipt)
    assert found is rose and any("rise" in line for line in lines)
