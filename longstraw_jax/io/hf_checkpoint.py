"""Hugging Face checkpoint folders, read straight into sharded base weights and written back the same way.

Experts, nearly all of the bytes, are converted on the devices, a layer at a time. The rest is converted on
the host, which spares a compiled program for every shape.
"""

import dataclasses
import functools
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float

from longstraw_jax import launch, sharding
from longstraw_jax.config import ConfigError, ModelConfig, load_model_config, model_config_from_hf
from longstraw_jax.io import tensor_files
from longstraw_jax.io.hf_layout import Parameter, layer_of, parameters
from longstraw_jax.io.tensor_files import CheckpointError, Entry, Problems
from longstraw_jax.model import decoder
from longstraw_jax.types import Params

_FILE_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_SCALE = "_scale_inv"  # after the name of an FP8 weight; multiplied, in spite of its name

MISSING = "missing tensors"
UNEXPECTED = "unexpected tensors"
SHAPES = "wrong shapes"
KINDS = "unsupported dtypes"
NOT_FINITE = "tensors that hold NaN or infinity in the target dtype"


def load(
    directory: str | os.PathLike,
    config: ModelConfig | None = None,
    mesh: Mesh | None = None,
    *,
    dtype: str | None = None,
) -> tuple[ModelConfig, Params]:
    """Reads a checkpoint folder into base weights that lie where the model wants them.

    Reads F32, F16, BF16 and block-scaled F8_E4M3 (DeepSeek-V3's format: w = w_fp8 * scale of its block). Every
    process reads what its own devices hold, once. The host holds one parameter at a time, and of the experts one
    projection of one layer.
    Router weight, correction bias and the indexer's weights_proj become fp32, all else the configuration's
    dtype. MTP layers are set aside.

    Args:
      directory: config.json and safetensors files.
      config: used in place of the folder's config.json.
      mesh: where the weights go; None for the first device.
      dtype: "bfloat16", "float16" or "float32" in place of the configuration's.

    Returns:
      The configuration (with `dtype`) and the base weights, shaped as `decoder.param_shapes` says.

    Raises:
      ConfigError: the folder's configuration is not supported.
      ShardingError: the mesh does not divide a dimension.
      CheckpointError: all that is wrong with the files. Only NaN and infinity need the data to be found.
    """
    directory = Path(directory)
    config = load_model_config(directory) if config is None else config
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    decoder.make_model(config, mesh=mesh)  # refuses a mesh that does not fit
    entries, block, tree = check(directory, config), _block_size(directory), parameters(config)
    not_finite: list[str] = []

    def one(parameter: Parameter) -> Array:
        make = _experts if parameter.experts else _whole
        value, bad = make(parameter, entries, mesh, block)
        not_finite.extend(bad)
        return value

    base = jax.tree.map(one, tree)
    found = itertools.chain(*launch.exchange(not_finite))  # each process has seen its own part alone
    tensor_files.refuse(directory, {NOT_FINITE: list(dict.fromkeys(found))})
    return config, base


def check(directory: str | os.PathLike, config: ModelConfig) -> dict[str, Entry]:
    """Compares the files' headers with what the configuration needs, and their sizes with the headers; no tensor data.

    Returns:
      Tensor name -> where it lies, MTP layers included.

    Raises:
      CheckpointError: all that is wrong with the files. ConfigError: the block size of FP8.
    """
    directory = Path(directory)
    entries, problems = tensor_files.scan(directory)
    problems |= _compare(jax.tree.leaves(parameters(config)), entries, config, _block_size(directory))
    if problems[tensor_files.UNREADABLE] or problems[tensor_files.ABSENT]:
        problems[MISSING] = []  # such a file may hold them
    tensor_files.refuse(directory, problems)
    return entries


def mtp_tensors(directory: str | os.PathLike) -> tuple[str, ...]:
    """Names of the MTP layers' tensors, which `load` sets aside. Raises ConfigError and CheckpointError."""
    directory = Path(directory)
    config = load_model_config(directory)
    entries, problems = tensor_files.scan(directory)
    tensor_files.refuse(directory, problems)
    layers = _mtp_layers(entries, config)
    return tuple(sorted(name for name in entries if layer_of(name) in layers))


def save(
    directory: str | os.PathLike,
    raw_config: Mapping[str, Any],
    base: Params,
    *,
    max_shard_bytes: int = 5_000_000_000,
    extra_files: Sequence[str | os.PathLike] = (),
) -> None:
    """Writes base weights as a checkpoint folder: config.json, safetensors, an index if there are several.

    Tensors are in the configuration's dtype, e_score_correction_bias always in F32, as in the released files:
    `load` and `save` give the same bits back. The folder is written beside its place and renamed there.
    A process killed between the two renames leaves the previous folder whole, as .NAME.*.previous.

    Args:
      directory: a new or empty folder, or a checkpoint that is replaced.
      raw_config: the dict for config.json, written as it is, but for two keys that the weights would belie:
        `quantization_config` is left out and a `num_nextn_predict_layers` becomes 0.
      base: as `load` returns it; its dtypes must be those of `raw_config`.
      max_shard_bytes: most bytes in one file.
      extra_files: copied into the folder under their own names (tokenizer, chat template).

    Raises:
      ConfigError: `raw_config` is not supported.
      CheckpointError: `base` does not fit it, `directory` holds something else, an extra file is not there.
      OSError: the disk is full, say; the previous folder is as it was.
    """
    directory, extra_files = Path(directory).absolute(), [Path(file) for file in extra_files]
    raw = {key: value for key, value in raw_config.items() if key != "quantization_config"}
    if raw.get("num_nextn_predict_layers"):
        raw["num_nextn_predict_layers"] = 0
    config = model_config_from_hf(raw)
    tree = parameters(config)
    _refuse_save(directory, tree, base, extra_files)
    tensors = {}
    for parameter in jax.tree.leaves(tree):
        for names in parameter.names:
            for name in names:
                exact = name.endswith("e_score_correction_bias")
                tensors[name] = ("F32" if exact else _FILE_DTYPES[config.dtype], parameter.file_shape)
    last = {"model.embed_tokens.weight": -1}  # norm and head come after the layers

    def place(name: str) -> tuple[int, str]:
        layer = layer_of(name)
        return (last.get(name, config.num_hidden_layers) if layer is None else layer), name

    tensors = {name: tensors[name] for name in sorted(tensors, key=place)}
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        for file in extra_files:
            shutil.copyfile(file, beside / file.name)
        (beside / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        with tensor_files.shard_writer(beside, tensors, max_shard_bytes=max_shard_bytes) as write:
            for parameter, stack in zip(jax.tree.leaves(tree), jax.tree.leaves(base), strict=True):
                for names, values in _rows(parameter, stack):
                    for name, value in zip(names, values, strict=True):
                        # NumPy's rounding keeps subnormals; a device may flush them.
                        write(name, value.astype(tensor_files.DTYPES[tensors[name][0]]))
        beside.chmod(0o755)  # mkdtemp's 0700 would hide the folder from its readers
        _swap(beside, directory)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _block_size(directory: Path) -> tuple[int, int]:
    """Rows and columns of an FP8 block."""
    file = directory / "config.json"
    raw = json.loads(file.read_text()) if file.is_file() else {}
    if not isinstance(quantization := raw.get("quantization_config") or {}, dict):
        raise ConfigError(f"quantization_config={quantization!r} is not supported; accepted: an object")
    block = quantization.get("weight_block_size") or (128, 128)
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise ConfigError(
            f"quantization_config.weight_block_size={block!r} is not supported; accepted: 2 positive integers"
        )
    return tuple(block)


def _mtp_layers(names: Iterable[str], config: ModelConfig) -> set[int]:
    """Layers past the trunk that are MTP layers: announced by the configuration, or known by their eh_proj.

    Any other layer past the trunk means a wrong num_hidden_layers, and must not pass unseen.
    """
    trunk = config.num_hidden_layers
    announced = set(range(trunk, trunk + config.num_nextn_predict_layers))
    known = {layer_of(name) for name in names if name.endswith(".eh_proj.weight")}
    return announced | {layer for layer in known if layer is not None and layer >= trunk}


def _compare(
    tree: list[Parameter], entries: Mapping[str, Entry], config: ModelConfig, block: tuple[int, int]
) -> Problems:
    """What the headers lack, hold too much of, or hold in the wrong form."""
    problems: Problems = {MISSING: [], UNEXPECTED: [], SHAPES: [], KINDS: []}
    expected: set[str] = set()

    def check(name: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> Entry | None:
        expected.add(name)
        entry = entries.get(name)
        if entry is None:
            problems[MISSING].append(name)
            return None
        if entry.shape != shape:
            problems[SHAPES].append(f"{name} (expected {list(shape)}, found {list(entry.shape)})")
        if entry.dtype not in dtypes:
            problems[KINDS].append(f"{name} ({entry.dtype}; accepted: {', '.join(dtypes)})")
        return entry

    plain = [dtype for dtype in tensor_files.DTYPES if not dtype.startswith("F8")]
    for parameter in tree:
        shape = parameter.file_shape
        for names in parameter.names:
            # FP8 is block-scaled, and a block needs two axes.
            dtypes = [*tensor_files.DTYPES] if len(shape) == 2 else plain
            found = [check(name, shape, dtypes) for name in names]
            kinds = {entry.dtype for entry in found if entry is not None}
            if len(kinds) > 1:
                problems[KINDS].append(f"{names[0]} and other experts ({sorted(kinds)}; accepted: one dtype)")
            if kinds == {"F8_E4M3"} and len(shape) == 2:
                for name in names:
                    check(name + _SCALE, (-(-shape[0] // block[0]), -(-shape[1] // block[1])), ("F32",))
    mtp = _mtp_layers(entries, config)
    for name in entries.keys() - expected:
        # Old exports also saved the rotary table, which the configuration determines.
        if layer_of(name) not in mtp and not name.endswith("rotary_emb.inv_freq"):
            problems[UNEXPECTED].append(name)
    problems[UNEXPECTED].sort()
    return problems


def _whole(
    parameter: Parameter, entries: Mapping[str, Entry], mesh: Mesh | None, block: tuple[int, int]
) -> tuple[Array, list[str]]:
    """A parameter that holds no experts, put together on the host; also its tensors that are not finite."""
    target = sharding.named(mesh, parameter.spec)
    start, stop = _own_box(target, parameter.shape)
    host, bad = np.empty(stop - start, parameter.dtype), []
    own = [slice(*bounds) for bounds in zip(start[parameter.stacked :], stop[parameter.stacked :], strict=True)]
    in_file = own[::-1] if parameter.transposed else own
    for row, (name,) in zip(host if parameter.stacked else host[None], parameter.names, strict=True):
        stored = tensor_files.read_box(entries[name], in_file)[None]
        scales = None
        if name + _SCALE in entries:
            scales = _per_number(np, tensor_files.read_stack([entries[name + _SCALE]]), block)[:, *in_file]
        with np.errstate(over="ignore", invalid="ignore"):  # found and named below
            value = _convert(np, stored, scales, parameter.dtype, parameter.transposed)[0]
            if not np.isfinite(value).all():
                bad.append(name)
        row[...] = value

    def part(at):
        corner = [s.indices(n)[0] for s, n in zip(at, parameter.shape, strict=True)]
        size = target.shard_shape(parameter.shape)
        return host[tuple(slice(c - b, c - b + n) for c, b, n in zip(corner, start, size, strict=True))]

    return jax.make_array_from_callback(parameter.shape, target, part), bad


def _own_box(target: jax.sharding.Sharding, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """First and last corner of the smallest box that holds the shards of this process's devices."""
    shards = target.addressable_devices_indices_map(shape).values()
    bounds = np.array([[at.indices(n)[:2] for at, n in zip(shard, shape, strict=True)] for shard in shards])
    return bounds[:, :, 0].min(0), bounds[:, :, 1].max(0)


def _experts(
    parameter: Parameter, entries: Mapping[str, Entry], mesh: Mesh | None, block: tuple[int, int]
) -> tuple[Array, list[str]]:
    """A parameter of experts, filled a layer at a time; also its tensors that are not finite."""
    stack = jnp.zeros(parameter.shape, parameter.dtype, device=sharding.named(mesh, parameter.spec))
    target = sharding.named(mesh, PartitionSpec(*tuple(parameter.spec)[1:]))
    everywhere = sharding.named(mesh, PartitionSpec())
    bad = []

    def put(found: list[Entry]) -> Array:
        shape = (len(found), *found[0].shape)
        return jax.make_array_from_callback(shape, target, lambda at: tensor_files.read_stack(found[at[0]]))

    for row, names in enumerate(parameter.names):
        weights = put([entries[name] for name in names])
        scaled = names[0] + _SCALE in entries
        scales = put([entries[name + _SCALE] for name in names]) if scaled else None
        stack, finite = _fill(stack, weights, scales, row, block, everywhere)
        # np.asarray waits for the devices: the host runs no further ahead than one layer.
        bad.extend(name for name, good in zip(names, np.asarray(finite), strict=True) if not good)
    return stack, bad


def _convert(
    numpy: ModuleType,
    weights: Float[Array, "E out in"],
    scales: Float[Array, "E out in"] | None,
    dtype: np.dtype,
    transposed: bool,
) -> Float[Array, "E ..."]:
    """Tensors as read, to what the base holds. `numpy` is NumPy, or jax.numpy inside a trace."""
    if scales is not None:
        weights = weights.astype(numpy.float32) * scales
    if transposed:
        weights = numpy.swapaxes(weights, -1, -2)
    return weights.astype(dtype)


def _per_number(
    numpy: ModuleType, scales: Float[Array, "E row_blocks column_blocks"], block: tuple[int, int]
) -> Float[Array, "E rows columns"]:
    """Scales of FP8 blocks, one a number; the last blocks may reach past the tensor."""
    for axis in (0, 1):
        scales = numpy.repeat(scales, block[axis], axis=axis - 2)
    return scales


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(4, 5))
def _fill(
    stack: Float[Array, "R E in out"],
    weights: Float[Array, "E out in"],
    scales: Float[Array, "E row_blocks column_blocks"] | None,
    row: int,
    block: tuple[int, int],
    everywhere: jax.sharding.Sharding,
) -> tuple[Float[Array, "R E in out"], Bool[Array, "E"]]:
    """Writes one layer's experts in place; also which of them are finite, on every device."""
    if scales is not None:
        scales = _per_number(jnp, scales, block)[:, : weights.shape[1], : weights.shape[2]]
    value = _convert(jnp, weights, scales, stack.dtype, True)
    finite = jax.lax.with_sharding_constraint(jnp.isfinite(value).all(axis=(1, 2)), everywhere)
    return jax.lax.dynamic_update_index_in_dim(stack, value, row, axis=0), finite


def _rows(parameter: Parameter, value: Array) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Per row of a parameter, the names of its tensors and their values [names, *file_shape] on the host."""
    if parameter.experts:
        for row, names in enumerate(parameter.names):
            yield names, np.asarray(_layer_of_experts(value, row))
    else:
        host = np.asarray(value)
        for row, names in zip(host if parameter.stacked else host[None], parameter.names, strict=True):
            yield names, (row.T if parameter.transposed else row)[None]


@jax.jit
def _layer_of_experts(stack: Float[Array, "R E in out"], row: int) -> Float[Array, "E out in"]:
    return jnp.swapaxes(jax.lax.dynamic_index_in_dim(stack, row, keepdims=False), -1, -2)


def _refuse_save(directory: Path, tree: Params, base: Params, extra_files: Sequence[Path]) -> None:
    """Raises CheckpointError with everything that stands against writing `base` to `directory`."""
    problems: Problems = {MISSING: [], UNEXPECTED: [], "wrong shapes or dtypes": [], "files": []}
    wanted, held = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(part)}
        for part in (tree, base)
    )
    problems[MISSING] = sorted(wanted.keys() - held.keys())
    problems[UNEXPECTED] = sorted(held.keys() - wanted.keys())
    for path in wanted.keys() & held.keys():
        a, b = ((x.shape, np.dtype(x.dtype)) for x in (wanted[path], held[path]))
        if a != b:
            problems["wrong shapes or dtypes"].append(
                f"{path} (expected {a[1]}{list(a[0])}, found {b[1]}{list(b[0])})"
            )
    for file in extra_files:
        if not file.is_file():
            problems["files"].append(f"{file} does not exist")
        if file.name == "config.json" or file.suffix == ".safetensors" or file.name == tensor_files.INDEX:
            problems["files"].append(f"{file} has the name of a file that is written")
    taken = directory.is_dir() and any(directory.iterdir()) and not (directory / "config.json").is_file()
    if taken or (directory.exists() and not directory.is_dir()):
        problems["files"].append(f"{directory} holds something else than a checkpoint and is not replaced")
    tensor_files.refuse(directory, problems)


def _swap(beside: Path, directory: Path) -> None:
    """Puts a finished folder in its place; what was there goes last."""
    previous = beside.with_name(beside.name + ".previous")
    replaced = directory.exists()
    if replaced:
        directory.rename(previous)
    try:
        beside.rename(directory)
    except BaseException:
        if replaced:
            previous.rename(directory)
        raise
    descriptor = os.open(directory.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the renames have to survive a power cut before the previous folder goes
    finally:
        os.close(descriptor)
    if replaced:
        shutil.rmtree(previous, ignore_errors=True)


__all__ = ["CheckpointError", "check", "load", "mtp_tensors", "save"]
