"""The capacity run: its slice of layers, and one whole run at a tiny size, resumed from its saved pages."""

import json
import pathlib
import types

import jax
import pytest
import tiny_jobs  # puts experiments/ on the path

import long_context  # isort: skip

GLM52 = json.loads((tiny_jobs.EXPERIMENTS / "configs" / "glm52.json").read_text())


def test_a_slice_is_a_group_of_sparse_layers():
    raw = long_context.sliced(GLM52, 4, 0)
    assert raw["index_topk_pattern"] == "FSSS" and raw["mlp_layer_types"] == ["sparse"] * 4
    assert raw["n_routed_experts"] == 256 and raw["hidden_size"] == GLM52["hidden_size"]
    whole = long_context.sliced(GLM52, 78, 8)
    assert whole["index_topk_pattern"].count("F") == 21 and whole["mlp_layer_types"].count("dense") == 3
    assert whole["n_routed_experts"] == 8


@pytest.mark.parametrize(
    "layers, experts, said",
    [
        (0, 0, "--layers=0; accepted: 1 to 72, or all 78"),
        (73, 0, "--layers=73; accepted: 1 to 72, or all 78"),
        (4, 7, r"--experts=7; accepted: 0 \(all\), or 8 to 256"),
        (4, 257, "--experts=257"),
    ],
)
def test_a_slice_that_is_not_there_is_refused(layers, experts, said):
    with pytest.raises(ValueError, match=said):
        long_context.sliced(GLM52, layers, experts)


def values(workdir: pathlib.Path, **changes) -> types.SimpleNamespace:
    architecture = workdir / "config.json"
    workdir.mkdir(exist_ok=True)
    architecture.write_text(json.dumps(tiny_jobs.RAW | {"mlp_layer_types": ["sparse", "sparse"]}))
    given = dict(
        tokens=200, layers=2, experts=0, group=["2"], response=4, chunk=64, mode="exact", rank=2, kernels="auto",
        prefix_store="device", seed=0, save_every=2, resume=False, architecture=str(architecture), workdir=str(workdir),
    )  # fmt: skip
    return types.SimpleNamespace(**given | changes)


def test_a_run_times_every_phase_and_goes_on_from_its_pages(tmp_path):
    first = long_context.run(values(tmp_path / "run"))
    names = [row["phase"] for row in first["phases"]]
    assert names == ["weights", "adapters", "capture"] + [
        f"group 2: {phase}"
        for phase in ("sample", "score", "replay 0", "replay 1", "reverse pass", "finalise and step")
    ]
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in first["phases"])
    assert first["restored_tokens"] == 0 and first["phases"][2]["tokens"] == 199
    written = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert written == json.loads(json.dumps(first))

    seen = []
    original = long_context.run_group

    def stop(*args):
        seen.append(jax.tree.map(lambda x: x.copy(), args[5].prefix))
        raise KeyboardInterrupt

    long_context.run_group = stop
    try:
        for resume in (False, True):
            with pytest.raises(KeyboardInterrupt):
                long_context.run(values(tmp_path / "run", resume=resume, save_every=0))
    finally:
        long_context.run_group = original
    straight, resumed = seen
    jax.tree.map(lambda a, b: (a == b).all() or pytest.fail("pages differ"), straight, resumed)


def test_pages_of_another_prompt_are_refused(tmp_path):
    folder = tmp_path / "run" / "pages"
    folder.mkdir(parents=True)
    (folder / "progress.json").write_text(json.dumps({"tokens": 128, "bound": {"seed": 1}}))
    with pytest.raises(ValueError, match="its pages are bound to {'seed': 1}; accepted: "):
        long_context.run(values(tmp_path / "run", resume=True))
