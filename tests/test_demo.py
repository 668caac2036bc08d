"""The demo's parts: its model, its row, what it may delete and when it fails."""

import importlib
import pathlib

import pytest
import tiny_jobs

from longstraw_jax import sharding
from longstraw_jax.config import load_model_config
from longstraw_jax.io import data
from longstraw_jax.model import decoder

demo = importlib.import_module("demo")  # from the folder that tiny_jobs puts on the path


def test_the_reader_has_every_kind_of_layer_and_fits_32_devices():
    job = tiny_jobs.defaults("demo")
    config = load_model_config(job.model.checkpoint)
    kinds = set(zip(config.indexer_types, config.mlp_layer_types, strict=True))
    assert {"full", "shared"} == {indexer for indexer, _ in kinds} and {"dense", "sparse"} == {mlp for _, mlp in kinds}
    # Most of the prompt is left out by every selection, and all of its positions were trained.
    assert config.index_topk * 32 <= job.data.prompt_tokens <= config.max_position_embeddings - job.grpo.max_new_tokens
    decoder.make_model(config, mesh=sharding.make_mesh(32))


def test_the_demo_is_what_it_says():
    config = tiny_jobs.defaults("demo")
    assert config.mesh.devices == 32 and config.mesh.emulate and config.grpo.mode == "frozen"
    assert config.data.prompt_tokens >= 16_384 and config.grpo.group == 8 and config.steps >= 20
    assert pathlib.Path(config.model.checkpoint) == tiny_jobs.EXPERIMENTS / "reader"
    assert tiny_jobs.leaves(config).keys() == tiny_jobs.leaves(tiny_jobs.defaults()).keys()


def test_its_row_asks_for_what_stands_in_the_prompt(tmp_path):
    config = tiny_jobs.defaults("demo")
    demo.write_inputs(config, tmp_path)
    (row,) = data.read_rows(config.data.paths[0], required=("ground_truth",)).rows
    reader = demo.build_tasks.reader_of(config.model.checkpoint, 0)
    ids = reader.ids(row["prompt"])
    assert ids.size == config.data.prompt_tokens
    text, answer = reader.tokenizer.decode(ids.tolist()), row["columns"]["ground_truth"]
    assert all(text.count(f" is {number}.") == 1 for number in answer.split())
    assert len(reader.tokenizer.encode(answer)) < config.grpo.max_new_tokens  # and the eos


def test_a_configuration_that_is_refused_leaves_the_earlier_demo(tmp_path):
    folder = tmp_path / "demo"
    for made in (folder, tmp_path / "demo_inputs"):
        demo.make_anew(made)
        (made / "old").touch()
    config = tiny_jobs.defaults("demo")
    config.mesh.devices, config.mesh.emulate, config.grpo.group = 1, False, 1
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
