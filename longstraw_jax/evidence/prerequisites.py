"""What a run needs, checked from its configuration before a weight is read: everything that is missing, at once.

The main job starts with these checks and the doctor prints them.
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict
from packaging.requirements import Requirement

from longstraw_jax import config as config_lib
from longstraw_jax import fingerprint, job_config, launch, lora, replay, rollout, sampling, sharding, train
from longstraw_jax.evidence import kernels, plan, plan_programs
from longstraw_jax.evidence.topology import Topology
from longstraw_jax.io import data, hf_checkpoint, prompt, tokenizer
from longstraw_jax.model import choices, decoder
from longstraw_jax.prefix import pages, residency
from longstraw_jax.rl import rewards
from longstraw_jax.types import PAGE, Model

OK, BLOCKER, NOT_CHECKED = "ok", "BLOCKER", "not checked"
CHECKSUMS = "SHA256SUMS"  # as sha256sum writes it
DISTRIBUTION = "longstraw_jax"
LOGIT_ROWS = 3  # of a vocabulary, that a sampled member has at once: logits, scaled ones, log-probabilities


class Finding(NamedTuple):
    """One check: its name, OK, BLOCKER or NOT_CHECKED, and what was found."""

    check: str
    status: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Parts:
    """What the checks made on their way; None where a blocker stood before it."""

    model: Model | None
    policy: rollout.PolicyConfig | None
    optimizer: train.OptimizerConfig | None
    dataset: data.Dataset | None
    tokenizer: tokenizer.Tokenizer | None
    build: Callable[[Any], np.ndarray] | None
    reward_functions: list[rewards.RewardFunction] | None


class _Findings:
    """Runs checks one after the other; one that lacks what it needs is not run."""

    def __init__(self):
        self.rows: list[Finding] = []

    def attempt(self, check: str, action: Callable[..., Any], *needs: Any, tell: Callable[[Any], str] = str) -> Any:
        """action(*needs), whose failure is a blocker; None where it failed or a need is None."""
        if any(need is None for need in needs):
            self.rows.append(Finding(check, NOT_CHECKED, "needs what a blocker stands before"))
            return None
        try:
            value = action(*needs)
        except (ValueError, OSError) as error:
            self.rows.append(Finding(check, BLOCKER, str(error)))
            return None
        except Exception as error:  # nobody foresaw it: the other checks still have their say
            self.rows.append(Finding(check, BLOCKER, f"{check}: {type(error).__name__}: {error}"))
            return None
        self.rows.append(Finding(check, OK, tell(value)))
        return value


def examine(
    config: ConfigDict, workdir: pathlib.Path, *, chips: Topology | None = None, hash_weights: bool = False
) -> tuple[Parts, list[Finding]]:
    """Every check of a run; reads headers, small files and the dataset, and allocates nothing on a device.

    Args:
      config: the main job's.
      workdir: where the run would write; need not exist.
      chips: what the run is for, as many emulated devices standing for them; None for the devices that are here.
      hash_weights: also compare the weights with the checksums beside them, which reads them all.

    Returns:
      What the checks made, and a row a check. Nothing stands in the way if no row is a BLOCKER.
    """
    found = _Findings()
    try:
        importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        found.rows.append(Finding("versions", NOT_CHECKED, "this checkout is not installed: pip install -e ."))
    else:
        found.attempt("versions", _check_versions)
    for number, problem in enumerate(problems := job_config.value_problems(config)):
        found.rows.append(Finding(f"values {number + 1}", BLOCKER, problem))
    if not problems:
        found.rows.append(Finding("values", OK, "in range"))
    if job_config.type_problems(config):  # nothing below could read it
        return Parts(*[None] * len(dataclasses.fields(Parts))), found.rows
    devices = found.attempt("devices", lambda: _check_devices(config, chips))
    architecture = found.attempt("architecture", lambda: job_config.architecture(config), tell=_architecture_line)
    adapters = found.attempt("adapters", lambda: job_config.lora_config(config), tell=lambda x: ", ".join(x.scales()))
    optimizer = found.attempt("optimizer", lambda: train.OptimizerConfig(**config.optimizer))
    model = found.attempt(
        "mesh", lambda *needs: _model(config, *needs), architecture, adapters, devices, tell=_mesh_line
    )
    folder = job_config.checkpoint_folder(config) if architecture else None
    found.attempt("checkpoint files", hf_checkpoint.check, folder, architecture, tell=_files_line)
    found.attempt("checkpoint hashes", lambda at, _: _check_hashes(at, hash_weights), folder, architecture)
    tokens = found.attempt(
        "tokenizer", lambda at, a: job_config.load_tokenizer(at, a.vocab_size), folder, architecture,
        tell=_tokenizer_line,
    )  # fmt: skip
    template = found.attempt("chat template", prompt.load_chat_template, folder, tell=lambda x: x.source)
    dataset = found.attempt("dataset", lambda: job_config.read_dataset(config), tell=lambda x: f"{len(x.rows)} rows")
    # Problems of the values would only be told a second time, in other words.
    sound = None if problems else True
    build = found.attempt(
        "prompts", lambda *needs: job_config.prompt_builder(config, *needs[:3]), tokens, template, dataset, sound,
        tell=lambda _: "can be built",
    )  # fmt: skip
    longest_row = found.attempt(
        "prompt lengths", lambda rows, make: job_config.longest_prompt(config, rows, make), dataset, build,
        tell=lambda x: f"at most {x[0]} tokens",
    )  # fmt: skip
    longest = longest_row[0] if longest_row else None
    found.attempt("position window", lambda a, row: _check_window(config, a, *row), architecture, longest_row)
    stop = None
    if config.grpo.stop:
        stop = found.attempt(
            "stop sequences", lambda words: job_config.stop_sequences(config, words), tokens,
            tell=lambda x: f"{', '.join(map(repr, x.texts))}: {', '.join(map(str, x.ids))}",
        )  # fmt: skip
    eos = tokens.eos_ids if tokens else (0,)  # a policy's own ranges do not depend on them
    policy = found.attempt(
        "policy", lambda: job_config.policy_config(config, eos, longest or 1, stop),
        tell=lambda x: f"{x.mode}, group {x.group}",
    )  # fmt: skip
    functions: list[rewards.RewardFunction] | None = []
    if launch.is_first():  # the others are given its rewards
        functions = found.attempt(
            "rewards", lambda _: job_config.reward_functions(config), sound, tell=lambda x: ", ".join(f.name for f in x)
        )
    resident = found.attempt("resident prompts", _resident_prompts, model, policy, tell=lambda x: f"at most {x}")
    found.attempt(
        "memory", lambda *needs: _check_memory(*needs[:4], chips), model, optimizer, policy, longest, resident
    )
    there = found.attempt("workdir", lambda: _check_workdir(workdir))
    found.attempt("disk", lambda m, at: _check_disk(config, m, at), model, there)
    return Parts(model, policy, optimizer, dataset, tokens, build, functions), found.rows


def blockers(findings: list[Finding]) -> list[str]:
    """What stands in the way."""
    return [row.detail for row in findings if row.status == BLOCKER]


def _check_versions() -> str:
    """Raises ValueError for a package outside of what setup.py asks for."""
    wrong, told = [], [f"Python {platform.python_version()}"]
    for text in importlib.metadata.requires(DISTRIBUTION) or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name}={version or 'not installed'}; accepted: {requirement.specifier}")
        if requirement.name in ("jax", "flax", "orbax-checkpoint"):
            told.append(f"{requirement.name} {version}")
    if wrong:
        raise ValueError("; ".join(wrong))
    return ", ".join(told)


def _check_devices(config: ConfigDict, chips: Topology | None) -> str:
    """Raises ValueError where the mesh has not as many devices as the run asks for."""
    wanted, there = config.mesh.devices, jax.device_count()
    if chips is not None and wanted != chips.devices:
        raise ValueError(f"mesh.devices={wanted} for topology {chips.name}; accepted: {chips.devices}")
    if not 1 <= wanted <= there:
        raise sharding.ShardingError(f"mesh.devices={wanted} is not available; accepted: 1 to {there}")
    if jax.process_count() > 1:
        if wanted != there:
            raise ValueError(f"mesh.devices={wanted} in {jax.process_count()} processes; accepted: all {there} devices")
        if config.capture.keep_selection:
            raise ValueError(
                f"capture.keep_selection=True in {jax.process_count()} processes; accepted: False, as a host holds "
                "the selections of its own devices alone"
            )
    if chips is not None:
        return f"{wanted} of {chips.name}, which need not be here"
    return f"{wanted} of {there} {jax.devices()[0].device_kind}, {jax.process_count()} processes"


def _architecture_line(config: config_lib.ModelConfig) -> str:
    return f"{config.num_hidden_layers} layers, {config.n_routed_experts} experts, {config.dtype}"


def _model(config: ConfigDict, architecture: config_lib.ModelConfig, adapters: config_lib.LoraConfig, _: str) -> Model:
    """The model on its mesh. Raises ShardingError, LoraError or ValueError."""
    lora.sites(architecture, adapters)
    mesh = sharding.make_mesh(config.mesh.devices)
    return decoder.make_model(architecture, mesh=mesh, lora=adapters, kernels=config.model.kernels)


def _mesh_line(model: Model) -> str:
    trained = lora.count_parameters(model.config, model.lora)
    return f"{model.devices} devices divide every dimension; {trained:,} numbers train"


def _files_line(entries: dict[str, Any]) -> str:
    size = sum(entry.end - entry.begin for entry in entries.values())
    return f"{len(entries)} tensors in {len({e.file for e in entries.values()})} files, {size / 1e9:.1f} GB, all whole"


def _tokenizer_line(tokens: tokenizer.Tokenizer) -> str:
    return f"{tokens.name}, {tokens.vocab_size} ids, ends at {list(tokens.eos_ids)}, sha256 {tokens.sha256[:16]}"


def _check_hashes(folder: pathlib.Path, weights: bool) -> str:
    """Compares the folder's files with its SHA256SUMS. Raises ValueError for what differs or is missing."""
    sums = folder / CHECKSUMS
    if not sums.is_file():
        return f"no {CHECKSUMS} in the folder to compare with"
    wrong, checked, left = [], 0, 0
    for number, line in enumerate(sums.read_text("utf-8", "replace").splitlines(), start=1):
        digest, _, name = line.partition(" ")
        file = folder / name.lstrip(" *")
        if len(digest) != 64 or not name.strip():
            wrong.append(f"{sums}, line {number}: accepted: a SHA-256 and a file name")
        elif not file.is_file():
            wrong.append(f"{file} of {CHECKSUMS} does not exist")
        elif file.suffix == ".safetensors" and not weights:
            left += 1
        else:
            checked += 1
            if (found := fingerprint.sha256_file(file)) != digest.lower():
                wrong.append(f"{file}: sha256 is {found}; accepted: {digest}, of {CHECKSUMS}")
    if wrong:
        raise ValueError("; ".join(wrong))
    return f"{checked} files as in {CHECKSUMS}" + (f"; {left} weight files not read (--hash_weights)" if left else "")


def _check_window(config: ConfigDict, architecture: config_lib.ModelConfig, longest: int, row: Any) -> str:
    """Raises ConfigError where the longest prompt, of this row, and its response leave the position range."""
    tokens = longest + config.grpo.max_new_tokens
    try:
        architecture.check_length(tokens)
    except config_lib.ConfigError as error:
        where = f"dataset row of id {row!r}, grpo.max_new_tokens={config.grpo.max_new_tokens}"
        raise config_lib.ConfigError(f"{where}: {error}") from error
    rope = architecture.rope_parameters
    native = rope.original_max_position_embeddings or architecture.max_position_embeddings
    text = f"{tokens} of {architecture.max_position_embeddings} positions"
    return text if tokens <= native else f"{text}: {tokens - native} beyond the native {native}, by YaRN"


def device_memory(chips: Topology | None) -> tuple[int | None, str]:
    """Bytes that a device's programs can have and who says so; None where that is unknown."""
    if chips is not None and chips.memory is not None:
        return chips.memory, chips.name
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    if chips is None and all(limits):
        return min(limits), "the device"
    if jax.default_backend() != "cpu":
        return None, "the device does not tell its memory"
    here = len(jax.local_devices())
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // here, f"this machine's, shared by {here} devices"


def memory_need(
    model: Model, optimizer: train.OptimizerConfig, policy: rollout.PolicyConfig, tokens: int
) -> dict[str, dict[str, int]]:
    """Bytes of a device by kind in each phase, from shapes and shardings; temporaries by the plan's formula.

    Of the sampler's temporaries the members' tails and logits are counted, of replay's the gradients; and with recorded
    choices those of a device's own members and the whole group's, which every device holds as sampling ends, the
    group's again while the old policy is scored, and a member's in replay. "other prompts" are those that stay
    resident beside the one in use. "reference" is the capture of the reference's own prompt within scoring, beside the
    policy's one.
    """
    devices, config = model.devices, model.config
    chunk = -(-min(policy.chunk, tokens) // devices) * devices
    sizes = plan_programs.Sizes(tokens, chunk, policy.max_new_tokens, (policy.group,), policy.mode)
    members, rows = sampling.slots_of(policy.group, devices, policy.slots)

    def size(make):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(make)))

    def recorded(members, length):
        return size(lambda: choices.empty(config, members, length, policy.recorded))

    capacity = pages.page_count(tokens, devices) * PAGE
    in_place = kernels.implementations(model).get("grouped_matmul") == "hopper"
    estimate = plan.capture_estimate(config, chunk, capacity, devices, model.expert_load, experts_in_place=in_place)
    walk = {"a chunk": estimate}
    sampler = {
        "tails": size(lambda: sampling.empty_tails(model, rows, policy.max_new_tokens)),
        "logits": LOGIT_ROWS * rows * config.vocab_size * np.dtype(np.float32).itemsize,
    }
    temporaries = {"capture": walk, "reverse": walk, f"sample {policy.group}": sampler, "score": {}, "replay": {}}
    if policy.recorded:
        padded = replay.pad_length(policy.max_new_tokens, devices)
        sampler["recorded choices"] = recorded(members + policy.group, policy.max_new_tokens)
        temporaries["replay"]["recorded choices"] = recorded(1, padded)
        if policy.updates > 1:
            temporaries["score"]["recorded choices"] = recorded(policy.group, padded)
    others = rollout.most_residents(model, policy) - 1
    need = {}
    for name, program in plan_programs.programs(model, train.make_optimizer(optimizer), sizes).items():
        kinds = program.arguments | program.beside
        held = {kind: plan.shard_bytes(tree)["device"] for kind, tree in kinds.items()}
        need[name] = held | temporaries.get(name, {})
        if others:
            need[name]["other prompts"] = others * residency.prompt_bytes(model, policy.capacity, policy.chunk)
        elif name == "capture" and policy.own_reference:
            need["reference"] = need[name] | {"reference pages": held["latent pages"] + held["index keys"]}
    return need


def _resident_prompts(model: Model, policy: rollout.PolicyConfig) -> int:
    """How many there may be. Raises ValueError where their budget is too small for one step."""
    try:
        return rollout.most_residents(model, policy)
    except ValueError as error:
        raise ValueError(f"capture.{error}") from error


def _check_memory(
    model: Model, optimizer: train.OptimizerConfig, policy: rollout.PolicyConfig, tokens: int, chips: Topology | None
) -> str:
    """Raises ValueError where a device's memory is smaller than what the run holds by formula."""
    phases, (memory, source) = memory_need(model, optimizer, policy, tokens), device_memory(chips)
    phase, need = max(phases.items(), key=lambda item: sum(item[1].values()))
    total = sum(need.values())
    listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in need.items())
    text = f"{total / 1e9:.2f} GB a device by formula, in phase {phase!r} ({listed})"
    if memory is not None and total > memory:
        raise ValueError(
            f"{text}; accepted: {memory / 1e9:.2f} GB ({source}), by more devices, a smaller capture.chunk, "
            "capture.resident_bytes, grpo.group or grpo.slots, or shorter prompts"
        )
    return f"{text}, {source}: " + ("unknown" if memory is None else f"{memory / 1e9:.2f} GB")


def _check_workdir(workdir: pathlib.Path) -> pathlib.Path:
    """The folder that is there, or the nearest one above. Raises ValueError where a file stands in its place."""
    there = workdir.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"workdir={workdir}: {there} is a file; accepted: a folder, or a new place for one")
    return there


def _check_disk(config: ConfigDict, model: Model, there: pathlib.Path) -> str:
    """Raises ValueError where the run folder's disk has no room for the checkpoints and the adapter."""
    # fp32 adapters and two moments a checkpoint, one more while the oldest still stands; the adapter beside its place.
    numbers = lora.count_parameters(model.config, model.lora)
    need = (config.checkpoint.keep + 1) * 3 * 4 * numbers + 2 * 2 * 4 * numbers
    free = shutil.disk_usage(there).free
    if free < need:
        raise ValueError(f"workdir: {free} bytes free at {there}; accepted: {need} for checkpoints and adapter")
    return f"{free / 1e9:.1f} GB free at {there}, {need / 1e9:.2f} needed"
