"""The capacity run: what it refuses, what it says, and one whole run at a tiny size, resumed from its saved pages."""

import dataclasses
import json
import pathlib
import types

import jax
import numpy as np
import pytest
import tiny
import tiny_jobs  # puts experiments/ on the path

from longstraw_jax import config as config_lib
from longstraw_jax.evidence import plan_costs
from longstraw_jax.model import decoder

import long_context  # isort: skip

GLM52 = json.loads((tiny_jobs.EXPERIMENTS / "configs" / "glm52.json").read_text())


@pytest.mark.parametrize("given", [["x"], ["2", "0"], ["2", ""], []])
def test_group_sizes_are_positive_integers(given):
    with pytest.raises(ValueError, match=f"--group={','.join(given)}; accepted: positive integers, as 2,8"):
        long_context.group_sizes(given)


def test_flops_of_a_capture_are_those_of_the_tokens_it_runs():
    config = config_lib.model_config_from_hf(GLM52)
    lora = config_lib.LoraConfig((("q_a", 2, 4.0),))
    whole, parts = (
        [long_context.capture_flops(config, lora, *ends) for ends in pairs]
        for pairs in ([(0, 5000)], [(0, 3000), (3000, 5000)])
    )
    assert whole[0] == sum(parts)
    assert parts[1] == sum(plan_costs.forward_flops(config, lora, 1, keys) for keys in range(3001, 5001))


def values(workdir: pathlib.Path, **changes) -> types.SimpleNamespace:
    architecture = workdir / "config.json"
    workdir.mkdir(exist_ok=True)
    architecture.write_text(json.dumps(tiny_jobs.RAW | {"mlp_layer_types": ["sparse", "sparse"]}))
    given = dict(
        tokens=200, layers=2, experts=0, group=["2"], response=4, chunk=64, mode="exact", rank=2, kernels="auto",
        prefix_store="device", seed=0, save_every=2, resume=False, over_plan=False,
        architecture=str(architecture), workdir=str(workdir),
    )  # fmt: skip
    return types.SimpleNamespace(**given | changes)


def captures(run, monkeypatch):
    """Pages and phases of each of `run`'s runs when its capture is done; the rest of a run is left out."""
    seen = []

    def stop(*args):
        seen.append((jax.tree.map(np.asarray, args[5].prefix), args[6].rows))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(long_context, "run_group", stop)
        for given in run:
            with pytest.raises(KeyboardInterrupt):
                long_context.run(given)
    return seen


def test_a_run_times_every_phase_and_goes_on_from_its_pages(tmp_path, monkeypatch):
    first = long_context.run(values(tmp_path / "run"))
    names = [row["phase"] for row in first["phases"]]
    group = [
        f"group 2: {phase}"
        for phase in ("sample", "score", "replay 0", "replay 1", "reverse pass", "finalise and step")
    ]
    assert names == ["weights", "adapters", "capture", "save pages", *group]
    assert all(row["seconds"] + row["compile_seconds"] > 0 and row["peak_bytes"] > 0 for row in first["phases"])
    # A phase that does little but compile may have no seconds left of its own.
    assert all(min(row["seconds"], row["compile_seconds"]) >= 0 for row in first["phases"])
    assert all(row["floor_seconds"] is None for row in first["phases"])
    assert first["phases"][2]["seconds"] > 0
    assert first["restored_tokens"] == 0 and first["phases"][2]["tokens"] == 199
    assert first["complete"] and first["stopped"] is None and first["plan"]["total"] < first["plan"]["memory"]
    written = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert written == json.loads(json.dumps(first))

    progress = json.loads((tmp_path / "run" / "pages" / "progress.json").read_text())
    assert progress["tokens"] == 199
    (tmp_path / "run" / "pages" / "progress.json").write_text(json.dumps(halved(progress)))
    runs = [values(tmp_path / "run", resume=resume, save_every=0) for resume in (False, True)]
    (straight, _), (resumed, rows) = captures(runs, monkeypatch)
    jax.tree.map(np.testing.assert_array_equal, straight, resumed)
    assert [row["phase"] for row in rows] == ["weights", "adapters", "load pages", "capture"]
    stopped = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert not stopped["complete"] and stopped["stopped"] == {"phase": "capture", "error": "KeyboardInterrupt: "}
    assert [row["phase"] for row in stopped["phases"]] == ["weights", "adapters", "load pages", "capture"]
    assert rows[3]["tokens"] == 71 and 0 < rows[3]["flops"] < first["phases"][2]["flops"] / 2


def halved(progress):
    """The progress.json of the first save, after two chunks."""
    return progress | {"tokens": 128, "blocks": {name: blocks[:1] for name, blocks in progress["blocks"].items()}}


def test_pages_on_the_host_are_those_on_the_device(tmp_path, monkeypatch):
    """On one device; the chunk does not divide the prompt, whose pages a whole last chunk would run past."""
    runs = [values(tmp_path / store, prefix_store=store, chunk=192, save_every=0) for store in ("device", "host")]
    (device, _), (host, _) = captures(runs, monkeypatch)
    for a, b in zip((*device.latents, *device.index_keys), (*host.latents, *host.index_keys), strict=True):
        np.testing.assert_allclose(b[..., : a.shape[-3], :, :], a, atol=1e-5)
    assert host.latents[0].shape[2] == 6


def test_a_chunk_that_host_pages_cannot_take_is_refused(tmp_path):
    with pytest.raises(ValueError, match="chunk=100 with prefix_store='host'; accepted: a multiple of 64"):
        long_context.run(values(tmp_path / "run", prefix_store="host", chunk=100, save_every=0))
    with pytest.raises(ValueError, match="prefix_store='host' with pages saved or resumed; accepted: 'device'"):
        long_context.run(values(tmp_path / "run", prefix_store="host"))


def test_what_cannot_fit_is_refused_before_anything_is_allocated(tmp_path):
    large = values(tmp_path / "run", tokens=2_097_152, layers=4, chunk=8192, save_every=0)
    large.architecture = str(tiny_jobs.EXPERIMENTS / "configs" / "glm52.json")
    with pytest.raises(ValueError, match=r"plan: \d+.* GB by formula in 'reverse' \(base weights 82.78, .*--over_plan"):
        long_context.run(large)
    assert not (tmp_path / "run" / "receipt.json").exists()


def test_pages_are_bound_to_the_model_and_its_kernels():
    def bound(config=tiny.CONFIG, lora=tiny.LORA, **changes):
        given = types.SimpleNamespace(**dict(tokens=200, seed=0, mode="exact", chunk=64) | changes)
        return long_context.bound_to(decoder.make_model(config, lora=lora), given)

    assert bound() == bound() and bound()["kernels"]["grouped_matmul"]
    longer = config_lib.extend_positions(tiny.CONFIG, 4096)
    others = [bound(longer), bound(lora=config_lib.LoraConfig((("q_a", 2, 4.0),))), bound(seed=1), bound(chunk=128)]
    others.append(bound(dataclasses.replace(tiny.CONFIG, rms_norm_eps=1e-3)))
    assert all(other != bound() for other in others)
    assert len({json.dumps(other) for other in others}) == len(others)


def test_pages_of_another_prompt_are_refused(tmp_path):
    folder = tmp_path / "run" / "pages"
    folder.mkdir(parents=True)
    (folder / "progress.json").write_text(json.dumps({"tokens": 128, "bound": {"seed": 1}, "blocks": {}}))
    with pytest.raises(ValueError, match="its pages are bound to {'seed': 1}; accepted: "):
        long_context.run(values(tmp_path / "run", resume=True))
