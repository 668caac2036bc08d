"""The command: a tiny model compiled for 32 emulated devices, bad input in one line, and a full-size chunk (aot)."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import matplotlib.image
import pytest
from absl import flags
from jax.experimental import topologies

EXPERIMENTS = pathlib.Path(__file__).parents[1] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

import compile_plan  # noqa: E402

TINY = ("--config=tiny", "--topology=cpu:32", "--tokens=16384", "--response=64")


def run(*arguments: str) -> int:
    values = flags.FlagValues()
    compile_plan.define_flags(values)
    return compile_plan.command(values, values(["compile_plan.py", *arguments])[1:])


def test_a_tiny_model_compiles_for_32_devices(tmp_path, capsys):
    """Table, receipt and picture; pages on the host are off the device, whose bytes fall by as much."""
    out = {store: tmp_path / store for store in ("device", "host")}
    for store, folder in out.items():
        assert run(*TINY, "--programs=capture,add", f"--prefix_store={store}", f"--out={folder}") == 0
    printed = capsys.readouterr().out
    assert "capture" in printed and "peak: " in printed and "pinned host memory" in printed
    device, host = (json.loads((folder / "plan.json").read_text()) for folder in out.values())
    assert matplotlib.image.imread(out["host"] / "plan.png").std() > 0.05
    pages = {kind: device["programs"]["capture"]["bytes"][kind] for kind in ("latent pages", "index keys")}
    assert host["programs"]["capture"]["host_bytes"] == pages and all(pages.values())
    assert [host["programs"]["capture"]["bytes"][kind] for kind in pages] == [0, 0]
    assert device["programs"]["capture"]["host_bytes"] == {} and host["peak"]["host_bytes"] == sum(pages.values())
    operations = ("indexer_topk", "sparse_mla", "grouped_matmul", "chunked_logprob")
    assert device["kernels"] == dict.fromkeys(operations, "reference")
    assert device["sizes"]["chunk"] == 2048 and device["needs"] is None and device["peak"]["complete"]


SMALL = "--topology=cpu:32 --tokens=2048 --config=tiny"
BAD = {
    "--topology=tpu:v5p:2x2 --tokens=2097152": "topology='tpu:v5p:2x2' is not known; accepted: tpu:v5p:4x4x2, tpu:v6e",
    "--topology=cpu:32 --tokens=16000 --config=tiny": "tokens=16000 .* nearest are 14336 or 16384",
    "--topology=cpu:32 --tokens=2097152 --yarn_positions=0": "tokens=2097152 .*--yarn_positions=2097664",
    "--topology=cpu:32 --tokens=4194304": "tokens=4194304 .*--yarn_positions=4194816",
    "--topology=cpu:32 --tokens=2048 --config=none.json": "config='none.json' is no file; accepted: glm52, tiny",
    f"{SMALL} --chunk=33": "chunk=33; accepted: a multiple of 32, at most 2048",
    f"{SMALL} --topology=cuda:1x1x2 --prefix_store=host": "prefix_store='host' .*'cuda:1x1x2'.*accepted: 'device'",
    f"{SMALL} --groups=2,x": "groups='2,x'; accepted: positive integers",
    f"{SMALL} --rank=0": "rank=0; accepted: at least 1",
    f"{SMALL} --response=0": "response=0; accepted: at least 1",
    f"{SMALL} --imbalance=0.5": "expert_load=0.5; accepted: 1",
    f"{SMALL} --mode=all": "mode='all'; accepted: 'frozen'",
    f"{SMALL} --programs=nap": "'nap'.* are not known; accepted: .*'capture'",
    "--tokens=2048": "accepted: --config=NAME --tokens=N --topology=NAME",
    f"{SMALL} more": "arguments .'more'.; accepted: --config=NAME",
}


@pytest.mark.parametrize("arguments", list(BAD))
def test_bad_input_is_one_line_and_exit_status_2(arguments, capsys, tmp_path):
    assert run(*arguments.split(), f"--out={tmp_path / 'plan'}") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: ")
    assert re.search(BAD[arguments], error), error
    assert not (tmp_path / "plan").exists()


@pytest.mark.skipif(sys.modules.get("libtpu") is not None, reason="libtpu is loaded")
def test_without_libtpu_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)  # as if it were not installed
    assert run("--topology=tpu:v5p:4x4x2", "--tokens=2097152") == 2
    assert "accepted: pip install 'longstraw_jax[tpu]'" in capsys.readouterr().err


def test_without_the_cuda_plugin_the_extra_is_named(capsys, monkeypatch):
    def absent(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", absent)
    assert run("--topology=cuda:4x8x1", "--tokens=2097152") == 2
    assert "accepted: pip install 'longstraw_jax[cuda]'" in capsys.readouterr().err


def compiled_for(topology: str, programs: str, folder: pathlib.Path, *flags: str) -> dict:
    """The programs' reports, by a process of its own, whose compiler sees no flags of this one."""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, EXPERIMENTS / "compile_plan.py", f"--topology={topology}", *flags]
    command += [f"--programs={programs}", f"--out={folder}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "plan.json").read_text())["programs"]


@pytest.mark.aot
def test_a_full_size_capture_chunk_compiles_for_32_tpus(tmp_path):
    """GLM-5.2 at 2,097,152 tokens; the pools that the chunk returns are those it was given."""
    found = compiled_for("tpu:v5p:4x4x2", "capture", tmp_path, "--config=glm52", "--tokens=2097152")["capture"]
    assert found["fits"] and 46e9 < found["bytes"]["base weights"] < 47e9 and found["bytes"]["outputs"] < 1e6
    # Five minutes of two cores, however busy these are with something else.
    assert found["seconds"]["compile_cpu"] < 600 and found["compiler_memory_bytes"] < 16e9


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the cuda extra")
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernels need JAX 0.11")
def test_a_full_size_chunk_and_decode_compile_for_32_gpus(tmp_path):
    """Through the Hopper kernels, on a machine without a GPU; no layer's experts or latents are copied for them."""
    found = compiled_for("cuda:4x8x1", "capture,sample 2", tmp_path, "--config=glm52", "--tokens=2097152")
    assert set(json.loads((tmp_path / "plan.json").read_text())["kernels"].values()) == {"hopper", "xla"}
    assert all(report["fits"] and report["seconds"]["compile_cpu"] < 600 for report in found.values())
    # Of a device, one layer's three expert matrices are 0.6 GB and its latents 0.08; a copied group is four of each.
    assert found["sample 2"]["bytes"]["temporaries"] < 1.6e9


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the cuda extra")
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10's plugin needs a GPU")
def test_a_transaction_without_an_eos_compiles_for_two_gpus(tmp_path):
    """The tiny model ends no response; comparing tokens with no ids once ended the GPU compiler on a mesh."""
    tiny = [flag for flag in TINY if not flag.startswith("--topology")]
    found = compiled_for("cuda:1x1x2", "capture,sample 2,score,replay", tmp_path, *tiny)
    assert list(found) == ["capture", "sample 2", "score", "replay"] and all(row["fits"] for row in found.values())


@pytest.mark.aot
def test_pages_in_host_memory_compile_for_32_tpus(tmp_path):
    """A chunk, whose pages are written there, and scores, which stage a layer at a time inside of nested loops."""
    tiny = [flag for flag in TINY if not flag.startswith("--topology")]
    done = compiled_for("tpu:v5p:4x4x2", "capture,score", tmp_path, *tiny, "--prefix_store=host")
    assert list(done) == ["capture", "score"] and all(found["fits"] and found["host_bytes"] for found in done.values())
