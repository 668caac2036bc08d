"""Hugging Face checkpoints: every layout and dtype read, sharded, written back bit for bit; faults named."""

import json
import os
import resource
import struct
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hf_folders import RAW, REFERENCE, random_tensors, write_file, write_folder
from safetensors.numpy import load_file

from longstraw_jax import sharding
from longstraw_jax.config import ConfigError, load_model_config
from longstraw_jax.io import hf_checkpoint
from longstraw_jax.io.hf_checkpoint import CheckpointError
from longstraw_jax.model import decoder

CASES = sorted(p.parent.name for p in REFERENCE.glob("*/model.safetensors")) or ["absent"]
BF16 = ml_dtypes.bfloat16
GATE = "model.layers.3.mlp.gate.weight"
BIAS = "model.layers.4.mlp.gate.e_score_correction_bias"


def _folder_tensors(folder: Path) -> dict[str, np.ndarray]:
    """What the safetensors package reads from a folder."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def _assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert found[name].tobytes() == value.tobytes(), name


def _assert_trees_equal(a, b) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, path
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


def _error(folder: Path, **kwargs) -> str:
    with pytest.raises(CheckpointError) as caught:
        hf_checkpoint.load(folder, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_reference_checkpoints_round_trip(case, tmp_path):
    if not (REFERENCE / case).is_dir():
        pytest.skip(f"no reference checkpoints at {REFERENCE}")
    raw = json.loads((REFERENCE / case / "config.json").read_text())
    config, base = hf_checkpoint.load(REFERENCE / case)
    assert config == load_model_config(REFERENCE / case)
    hf_checkpoint.save(tmp_path / "out", raw, base)
    expected = load_file(REFERENCE / case / "model.safetensors")
    mtp = hf_checkpoint.mtp_tensors(REFERENCE / case)
    assert bool(mtp) == (case == "h_mtp")
    _assert_same_bits(_folder_tensors(tmp_path / "out"), {k: v for k, v in expected.items() if k not in mtp})
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == (
        raw | ({"num_nextn_predict_layers": 0} if mtp else {})
    )


def test_each_tensor_lands_where_the_model_reads_it(tmp_path):
    tensors = random_tensors(RAW)
    _, base = hf_checkpoint.load(write_folder(tmp_path, RAW, tensors))
    layers = [base["segments"][s]["layers"] for s in (0, 1)]
    second, dense, moe = layers[0][0], layers[1][0], layers[1][1]
    shared = moe["mlp"]["shared_experts"]
    for found, name in (
        (base["embed_tokens"]["weight"], "model.embed_tokens.weight"),
        (base["norm"]["weight"], "model.norm.weight"),
        (base["lm_head"]["weight"].T, "lm_head.weight"),
        (second["self_attn"]["q_a_proj"]["weight"][1].T, "model.layers.1.self_attn.q_a_proj.weight"),
        (second["self_attn"]["indexer"]["k_norm"]["bias"][0], "model.layers.0.self_attn.indexer.k_norm.bias"),
        (dense["mlp"]["down_proj"]["weight"][0].T, "model.layers.2.mlp.down_proj.weight"),
        (moe["mlp"]["gate"]["weight"][1].T, "model.layers.4.mlp.gate.weight"),
        (moe["mlp"]["gate"]["e_score_correction_bias"][1], BIAS),
        (moe["mlp"]["experts"]["up_proj"][1, 7].T, "model.layers.4.mlp.experts.7.up_proj.weight"),
        (shared["up_proj"]["weight"][1].T, "model.layers.4.mlp.shared_experts.up_proj.weight"),
    ):
        np.testing.assert_array_equal(np.asarray(found), tensors[name], err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_32_devices_hold_what_one_holds_and_write_the_same_bits(dtype, tmp_path):
    raw = RAW | {"dtype": dtype}
    tensors = random_tensors(raw, np.dtype(dtype))
    folder = write_folder(tmp_path / "in", raw, tensors, files=3)
    mesh = sharding.make_mesh(32)
    config, base = hf_checkpoint.load(folder, mesh=mesh)
    _assert_trees_equal(base, hf_checkpoint.load(folder)[1])
    specs = decoder.param_specs(config)
    specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
    for (path, value), spec in zip(jax.tree_util.tree_leaves_with_path(base), specs, strict=True):
        assert value.sharding.is_equivalent_to(sharding.named(mesh, spec), value.ndim), path
    hf_checkpoint.save(tmp_path / "out", raw, base, max_shard_bytes=200_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    _assert_same_bits(_folder_tensors(tmp_path / "out"), tensors)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file), name


def test_every_finite_bf16_pattern_survives(tmp_path):
    raw = RAW | {"dtype": "bfloat16", "vocab_size": 1024}
    tensors = random_tensors(raw, BF16)
    patterns = np.arange(2**16, dtype=np.uint16).view(BF16)
    with np.errstate(invalid="ignore"):
        finite = np.where(np.isfinite(patterns), patterns, BF16(0)).reshape(1024, 64)
    tensors |= {"model.embed_tokens.weight": finite, "lm_head.weight": finite, GATE: finite[:32]}
    for e in range(32):  # the experts take another way through the code than the rest
        tensors[f"model.layers.3.mlp.experts.{e}.gate_proj.weight"] = finite[32 * e : 32 * e + 32]
    _, base = hf_checkpoint.load(write_folder(tmp_path / "in", raw, tensors))
    hf_checkpoint.save(tmp_path / "out", raw, base)
    _assert_same_bits(_folder_tensors(tmp_path / "out"), tensors)


def test_e1_correction_bias_is_fp32_through_load_cast_and_save(tmp_path):
    raw = RAW | {"dtype": "bfloat16"}
    tensors = random_tensors(raw, BF16)
    # The released biases are this close together; bf16 leaves nine values of them.
    tensors[BIAS] = np.random.default_rng(1).uniform(6.817, 7.063, 32).astype(np.float32)
    for kwargs in ({}, {"dtype": "float16"}):
        config, base = hf_checkpoint.load(write_folder(tmp_path / "in", raw, tensors), **kwargs)
        bias = base["segments"][1]["layers"][1]["mlp"]["gate"]["e_score_correction_bias"]
        assert bias.dtype == np.float32 and np.asarray(bias[1]).tobytes() == tensors[BIAS].tobytes()
        hf_checkpoint.save(tmp_path / "out", raw | {"dtype": config.dtype}, base)
        assert _folder_tensors(tmp_path / "out")[BIAS].tobytes() == tensors[BIAS].tobytes()


def test_f3_a_shared_layer_has_no_indexer_tensors(tmp_path):
    tensors = random_tensors(RAW)
    name = "model.layers.3.self_attn.indexer.wk.weight"
    _, base = hf_checkpoint.load(write_folder(tmp_path / "a", RAW, tensors))
    assert "indexer" not in base["segments"][1]["layers"][1]["self_attn"]
    hf_checkpoint.save(tmp_path / "out", RAW, base)
    assert name not in _folder_tensors(tmp_path / "out")
    message = _error(write_folder(tmp_path / "b", RAW, tensors | {name: np.zeros((16, 64), np.float32)}))
    assert f"unexpected tensors (1): {name}" in message


@pytest.mark.parametrize(("devices", "block"), [(1, (128, 128)), (32, (128, 128)), (1, (32, 48))])
def test_fp8_blocks_that_do_not_divide_the_shapes(devices, block, tmp_path):
    raw = RAW | {"dtype": "bfloat16", "hidden_size": 160, "intermediate_size": 192, "q_lora_rank": 160}
    if block != (128, 128):
        raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    rng = np.random.default_rng(2)
    tensors = random_tensors(raw, BF16)
    expected = dict(tensors)
    for name, value in expected.items():
        if value.ndim == 2 and "proj.weight" in name and "weights_proj" not in name:
            fp8 = (value.astype(np.float32) * 100).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
            scale = rng.uniform(0.001, 0.02, [-(-n // b) for n, b in zip(value.shape, block, strict=True)])
            tensors |= {name: fp8, name + "_scale_inv": scale.astype(np.float32)}
            per_element = np.kron(scale.astype(np.float32), np.ones(block, np.float32))
            rows, columns = value.shape
            expected[name] = (fp8.astype(np.float32) * per_element[:rows, :columns]).astype(BF16)
    folder = write_folder(tmp_path / "in", raw, tensors, files=2)
    _, base = hf_checkpoint.load(folder, mesh=sharding.make_mesh(devices))
    hf_checkpoint.save(tmp_path / "out", raw, base)
    _assert_same_bits(_folder_tensors(tmp_path / "out"), expected)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_dtype_and_config_overrides(tmp_path):
    tensors = random_tensors(RAW, np.float16)
    folder = write_folder(tmp_path, RAW | {"dtype": "float16"}, tensors, files=2, index=False)
    config, half = hf_checkpoint.load(folder)
    assert config.dtype == "float16" and half["norm"]["weight"].dtype == np.float16
    config, full = hf_checkpoint.load(folder, dtype="float32")
    assert config.dtype == "float32"
    router = full["segments"][1]["layers"][1]["mlp"]["gate"]["weight"]
    np.testing.assert_array_equal(np.asarray(router[0].T), tensors[GATE].astype(np.float32))
    np.testing.assert_array_equal(np.asarray(full["norm"]["weight"]), tensors["model.norm.weight"])
    given, base = hf_checkpoint.load(folder, config)
    assert given == config
    _assert_trees_equal(base, full)
    with pytest.raises(ConfigError, match="dtype='int8'"):
        hf_checkpoint.load(folder, dtype="int8")


def test_mtp_layers_and_rotary_tables_are_set_aside(tmp_path):
    tensors = random_tensors(RAW)
    norm = np.ones(64, np.float32)
    extra = {
        "model.layers.5.eh_proj.weight": np.ones((64, 128), np.float32),
        "model.layers.5.enorm.weight": norm,
        "model.layers.0.self_attn.rotary_emb.inv_freq": norm[:4],
    }
    # The configuration says 0 MTP layers, as derived ones often do: eh_proj tells.
    folder = write_folder(tmp_path / "a", RAW, tensors | extra)
    hf_checkpoint.load(folder)
    assert hf_checkpoint.mtp_tensors(folder) == tuple(name for name in extra if "layers.5" in name)
    announced = RAW | {"num_nextn_predict_layers": 1}
    folder = write_folder(tmp_path / "b", announced, tensors | {"model.layers.5.enorm.weight": norm})
    hf_checkpoint.load(folder)
    # A sixth trunk layer under a configuration of five is a mistake.
    folder = write_folder(tmp_path / "c", RAW, tensors | {"model.layers.5.input_layernorm.weight": norm})
    assert "unexpected tensors (1): model.layers.5.input_layernorm.weight" in _error(folder)


def test_all_header_problems_come_in_one_error(tmp_path):
    tensors = random_tensors(RAW)
    del tensors["model.norm.weight"]
    for e in range(30):
        del tensors[f"model.layers.3.mlp.experts.{e}.up_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((64, 96), np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((96, 64), np.int64)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((96, 64), ml_dtypes.float8_e4m3fn)
    tensors["model.layers.4.mlp.experts.0.up_proj.weight"] = np.zeros((32, 64), BF16)
    tensors["model.surprise.weight"] = np.zeros(3, np.float32)
    tensors["lm_head.weight"][0, 0] = np.nan  # would need the data: not reached
    message = _error(write_folder(tmp_path, RAW, tensors))
    for part in (
        "missing tensors (32): ",
        "model.norm.weight",
        "model.layers.2.mlp.up_proj.weight_scale_inv",
        ", and 12 more;",
        "unexpected tensors (1): model.surprise.weight",
        "model.layers.0.mlp.up_proj.weight (expected [96, 64], found [64, 96])",
        "model.layers.1.mlp.up_proj.weight (I64; accepted: F32, F16, BF16, F8_E4M3)",
        "4.mlp.experts.0.up_proj.weight and other experts (['BF16', 'F32']; accepted: one dtype)",
    ):
        assert part in message
    assert "NaN" not in message


def test_tensors_that_are_not_finite_are_all_named(tmp_path):
    tensors = random_tensors(RAW)
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 4] = np.nan
    tensors["model.layers.4.mlp.experts.9.down_proj.weight"][1, 2] = -np.inf
    tensors["model.layers.4.mlp.experts.10.down_proj.weight"][1, 2] = 70_000.0  # infinite in float16 only
    folder = write_folder(tmp_path, RAW, tensors)
    names = ("model.layers.4.mlp.experts.9.down_proj.weight", "model.layers.1.self_attn.o_proj.weight")
    for dtype, count in (("float32", 2), ("float16", 3)):
        message = _error(folder, dtype=dtype)
        assert f"NaN or infinity in the target dtype ({count}): " in message
        assert all(name in message for name in names)


def test_damaged_files_are_named(tmp_path):
    tensors = random_tensors(RAW)
    folder = write_folder(tmp_path / "a", RAW, tensors, files=4)
    parts = sorted(folder.glob("*.safetensors"))
    os.truncate(parts[0], parts[0].stat().st_size - 1)
    parts[1].unlink()
    parts[2].write_bytes(struct.pack("<Q", 5) + b"{oops")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    last = [name for name, file in index["weight_map"].items() if file == parts[3].name]
    index["weight_map"][last[0]] = parts[0].name  # unusable: nothing can be said about it
    index["weight_map"]["model.ghost.weight"] = parts[3].name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = _error(folder)
    for part in (
        f"unreadable files (2): {parts[0].name} (truncated: ",
        f"{parts[2].name} (header is not valid",
        f"files that the index names but that do not exist (1): {parts[1].name}",
        f"not in the file the index names (1): model.ghost.weight (index: {parts[3].name}, found: no file)",
    ):
        assert part in message
    assert "missing tensors" not in message  # the files that cannot be read may hold them

    both = write_folder(tmp_path / "b", RAW, tensors, files=2, index=False)
    write_file(both / "model-extra.safetensors", {"model.norm.weight": tensors["model.norm.weight"]})
    twice = "model.norm.weight (in model-00002-of-00002.safetensors and model-extra.safetensors)"
    assert f"tensors found more than once (1): {twice}" in _error(both)

    (both / "model.safetensors.index.json").write_text("[]")
    assert "unreadable files (1): model.safetensors.index.json" in _error(both)
    for file in both.glob("*.safetensors*"):
        file.unlink()
    assert "none is there; accepted: *.safetensors" in _error(both)


def test_what_is_not_a_checkpoint_of_this_model_is_refused_before_its_files(tmp_path):
    write_folder(tmp_path, RAW | {"model_type": "llama"}, {})
    with pytest.raises(ConfigError, match="model_type='llama'.*glm_moe_dsa"):
        hf_checkpoint.load(tmp_path)
    write_folder(tmp_path, RAW | {"quantization_config": {"weight_block_size": [0, 128]}}, {})
    with pytest.raises(ConfigError, match=r"weight_block_size=\[0, 128\]"):
        hf_checkpoint.load(tmp_path)
    write_folder(tmp_path, RAW | {"quantization_config": {"weight_block_size": 128}}, {})
    with pytest.raises(ConfigError, match="weight_block_size=128 is not supported"):
        hf_checkpoint.load(tmp_path)
    write_folder(tmp_path, RAW | {"quantization_config": ["fp8"]}, {})
    with pytest.raises(ConfigError, match=r"quantization_config=\['fp8'\] is not supported; accepted: an object"):
        hf_checkpoint.load(tmp_path)
    write_folder(tmp_path, RAW | {"n_routed_experts": 24}, {})
    with pytest.raises(sharding.ShardingError, match="mlp.experts.*'expert'=24"):
        hf_checkpoint.load(tmp_path, mesh=sharding.make_mesh(32))


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts reads by Linux's /proc/self/io")
@pytest.mark.parametrize("devices", [1, 32])
def test_each_byte_is_read_once_and_one_layer_of_experts_is_held(devices, tmp_path):
    # Six layers of wide experts: 3.1 MB each, nearly all of the checkpoint.
    layers = {"num_hidden_layers": 6, "indexer_types": ["full"] * 6, "mlp_layer_types": ["sparse"] * 6}
    raw = RAW | layers | {"moe_intermediate_size": 128}
    folder = write_folder(tmp_path, raw, random_tensors(raw), files=3)
    total = sum(file.stat().st_size for file in folder.iterdir())
    mesh = sharding.make_mesh(devices)
    hf_checkpoint.load(folder, mesh=mesh)  # compiles
    before = _bytes_read()
    hf_checkpoint.load(folder, mesh=mesh)
    # config.json is read by two functions.
    assert total <= _bytes_read() - before < total + 20_000
    tracemalloc.start()
    try:
        hf_checkpoint.load(folder, mesh=mesh)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * 32 * 128 * 64 * 4 + 1_500_000


def test_a_failed_save_leaves_the_previous_folder(tmp_path):
    folder = write_folder(tmp_path / "model", RAW, random_tensors(RAW))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    _, base = hf_checkpoint.load(write_folder(tmp_path / "other", RAW, random_tensors(RAW, seed=1)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))  # a write past it fails, as on a full disk
    try:
        with pytest.raises(OSError):
            hf_checkpoint.save(folder, RAW, base)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "other"]

    extra = tmp_path / "tokenizer.json"
    extra.write_text("{}")
    hf_checkpoint.save(folder, RAW, base, extra_files=[extra])
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    _assert_trees_equal(hf_checkpoint.load(folder)[1], base)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "other", "tokenizer.json"]


def test_save_refuses_what_it_should_not_write(tmp_path):
    _, base = hf_checkpoint.load(write_folder(tmp_path / "in", RAW, random_tensors(RAW)))
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("years of work")
    base["more"] = base.pop("norm")["weight"]
    base["lm_head"]["weight"] = base["lm_head"]["weight"].astype(BF16)
    with pytest.raises(CheckpointError) as caught:
        extra = [tmp_path / "absent.json", tmp_path / "in" / "config.json"]
        hf_checkpoint.save(notes, RAW, base, extra_files=extra)
    for part in (
        "missing tensors (1): ['norm']['weight']",
        "unexpected tensors (1): ['more']",
        "['lm_head']['weight'] (expected float32[64, 288], found bfloat16[64, 288])",
        "absent.json does not exist",
        "config.json has the name of a file that is written",
        "notes holds something else than a checkpoint and is not replaced",
    ):
        assert part in str(caught.value)
    assert [file.name for file in notes.iterdir()] == ["thesis.txt"]
