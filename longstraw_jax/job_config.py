"""The parts of the main job, each made and checked from its configuration (experiments/configs/grpo.py)."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from longstraw_jax import config as config_lib
from longstraw_jax import rollout, stopping, train
from longstraw_jax.io import data, payload, prompt, tokenizer
from longstraw_jax.prefix.refresh import RefreshPolicy
from longstraw_jax.rl import columns, objectives, rewards

# What experiments/configs/grpo.py holds, by type; a tuple of one type stands for any number of values.
_TYPES: dict[str, Any] = {
    "seed": int,
    "steps": int,
    "model": {"checkpoint": str, "latent_norm_eps": float, "kernels": str, "yarn_positions": int},
    "mesh": {"devices": int, "emulate": bool},
    "data": {"paths": (str,), "rows_per_step": int, "document": str, "prompt_tokens": int, "prompt_file": str},
    "grpo": {
        **dict.fromkeys(("mode", "importance_level", "kl_estimator", "aggregation", "advantage_scale"), str),
        **dict.fromkeys(("baseline", "mis_level"), str),
        **dict.fromkeys(("group", "slots", "max_new_tokens", "updates", "max_resamples"), int),
        **{"stop_without_signal": int, "stop": (str,)},
        **dict.fromkeys(("temperature", "top_p", "clip_low", "clip_high", "beta", "entropy_coef"), float),
        **dict.fromkeys(("tis_cap", "mis_cap"), float),
        **dict.fromkeys(("mask_truncated", "zero_variance_kl", "router_replay", "selection_replay"), bool),
    },
    "capture": {"chunk": int, "keep_selection": bool, "resident_bytes": int},
    "refresh": {"policy": str, "every": int, "bound": float, "probe_tokens": int},
    "reward": {
        **{"functions": (str,), "weights": (float,), "timeout_s": float, "answer_timeout_s": float},
        **{"overlong_cache": int, "overlong_penalty": float},
    },
    "lora": {target: {"rank": int, "alpha": float} for target in config_lib.LORA_TARGETS},
    "optimizer": {field.name: float for field in dataclasses.fields(train.OptimizerConfig)},
    "checkpoint": {"every": int, "keep": int},
}
MOST_SECONDS = 1_000_000  # a wait of the operating system takes no time limit much longer
_ACCEPTED = {int: "an integer", float: "a finite number", str: "a string", bool: "True or False"}


def type_problems(config: ConfigDict) -> list[str]:
    """Fields that are missing, unknown or of another type, so that no part below meets them.

    model.architecture, the parity check's alone, may be there.
    """
    return _type_problems(config, _TYPES, "")


def _type_problems(config: ConfigDict, types: dict[str, Any], section: str) -> list[str]:
    known = {*types, "architecture"} if section == "model." else types.keys()
    problems = [
        f"{section}{name}={config[name]!r}; accepted: only the fields {', '.join(types)} beside it"
        for name in sorted(set(config) - set(known))
    ]
    for name, wanted in types.items():
        field = section + name
        if name not in config:
            problems.append(f"{field} is missing; accepted: every field of experiments/configs/grpo.py")
        elif not isinstance(wanted, dict):
            value, kind = config[name], wanted[0] if isinstance(wanted, tuple) else wanted
            several = isinstance(wanted, tuple)
            if (
                several
                and not isinstance(value, (tuple, list))
                or not all(_is_a(kind, item) for item in (value if several else [value]))
            ):
                accepted = f"a tuple, each {_ACCEPTED[kind]}" if several else _ACCEPTED[kind]
                problems.append(f"{field}={value!r}; accepted: {accepted}")
        elif isinstance(config[name], ConfigDict):
            problems += _type_problems(config[name], wanted, f"{field}.")
        else:
            problems.append(f"{field}={config[name]!r}; accepted: a section of the fields {', '.join(wanted)}")
    return problems


def _is_a(kind: type, value: Any) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def value_problems(config: ConfigDict) -> list[str]:
    """Wrong types, or else values out of range that no part below would name."""
    if problems := type_problems(config):
        return problems
    if config.steps < 1 or config.grpo.updates < 1 or config.steps % config.grpo.updates:
        problems.append(f"steps={config.steps}; accepted: a positive multiple of grpo.updates={config.grpo.updates}")
    for field, value, low in (
        ("data.rows_per_step", config.data.rows_per_step, 1),
        ("data.prompt_tokens", config.data.prompt_tokens, 0),
        ("checkpoint.every", config.checkpoint.every, 1),
        ("checkpoint.keep", config.checkpoint.keep, 1),
        ("model.latent_norm_eps", config.model.latent_norm_eps, 0),
        ("grpo.stop_without_signal", config.grpo.stop_without_signal, 0),
        ("reward.overlong_penalty", config.reward.overlong_penalty, 0),
    ):
        if not value >= low:
            problems.append(f"{field}={value}; accepted: at least {low}")
    if not 0 <= config.seed < 2**32:
        problems.append(f"seed={config.seed}; accepted: 0 to {2**32 - 1}")
    if config.data.document not in ("none", "python"):
        problems.append(f"data.document={config.data.document!r}; accepted: 'none' or 'python'")
    if config.data.document == "python" and not config.data.prompt_tokens:
        problems.append("data.prompt_tokens=0; accepted with data.document='python': the exact prompt length")
    if config.data.prompt_file and (config.data.document != "none" or config.data.prompt_tokens):
        problems.append(
            f"data.prompt_file={config.data.prompt_file!r} with data.document={config.data.document!r} and "
            f"data.prompt_tokens={config.data.prompt_tokens}; accepted: 'none' and 0, the file holds the whole prompt"
        )
    names, weights = tuple(config.reward.functions), tuple(config.reward.weights)
    if not names or len(set(names)) != len(names):
        problems.append(f"reward.functions={names}; accepted: at least one, each once")
    elif len(weights) != len(names):
        problems.append(f"reward.weights={weights}; accepted: {len(names)} finite numbers, one a function")
    if not 0 <= config.reward.overlong_cache <= config.grpo.max_new_tokens:
        problems.append(
            f"reward.overlong_cache={config.reward.overlong_cache}; accepted: 0 to "
            f"grpo.max_new_tokens={config.grpo.max_new_tokens}"
        )
    for field in ("timeout_s", "answer_timeout_s"):
        if not 0 < config.reward[field] <= MOST_SECONDS:
            problems.append(f"reward.{field}={config.reward[field]}; accepted: seconds above 0, at most {MOST_SECONDS}")
    return problems


def checkpoint_folder(config: ConfigDict) -> pathlib.Path:
    """The base checkpoint's folder. Raises ValueError where none is named."""
    if not config.model.checkpoint:
        raise ValueError("model.checkpoint=''; accepted: a Hugging Face checkpoint directory")
    return pathlib.Path(config.model.checkpoint)


def architecture(config: ConfigDict) -> config_lib.ModelConfig:
    """The checkpoint's configuration with this job's choices. Raises ConfigError, or ValueError without a folder."""
    folder = checkpoint_folder(config)
    found = config_lib.load_model_config(folder, latent_norm_eps=config.model.latent_norm_eps or None)
    return config_lib.extend_positions(found, config.model.yarn_positions) if config.model.yarn_positions else found


def lora_config(config: ConfigDict) -> config_lib.LoraConfig:
    """Targets of rank above 0. Raises ConfigError."""
    chosen = ((name, c.rank, float(c.alpha)) for name, c in sorted(config.lora.items()) if c.rank)
    return config_lib.LoraConfig(tuple(chosen))


def objective_config(config: ConfigDict) -> objectives.GRPOConfig:
    """The loss part of config.grpo; tis_cap and mis_cap 0 mean none. Raises ValueError."""
    names = {field.name for field in dataclasses.fields(objectives.GRPOConfig)}
    chosen = {name: value for name, value in config.grpo.items() if name in names}
    return objectives.GRPOConfig(**chosen | {cap: chosen[cap] or None for cap in ("tis_cap", "mis_cap")})


def stop_sequences(config: ConfigDict, tokens: tokenizer.Tokenizer) -> stopping.StopSequences | None:
    """config.grpo.stop as the tokenizer writes it. Raises ValueError."""
    try:
        return stopping.stop_sequences(config.grpo.stop, tokens.encode, tokens.decode, config.grpo.max_new_tokens)
    except ValueError as error:
        raise ValueError(f"grpo.{error}") from error


def policy_config(
    config: ConfigDict, eos_ids: tuple[int, ...], capacity: int, stop: stopping.StopSequences | None = None
) -> rollout.PolicyConfig:
    """What a transaction does, for prompts of at most `capacity` tokens. Raises ValueError."""
    shared = ("mode", "group", "slots", "max_new_tokens", "temperature", "top_p", "updates", "max_resamples")
    shared += ("router_replay", "selection_replay")
    try:
        return rollout.PolicyConfig(
            eos_ids=eos_ids,
            stop=stop,
            capacity=capacity,
            chunk=config.capture.chunk,
            keep_selection=config.capture.keep_selection,
            resident_bytes=config.capture.resident_bytes,
            refresh=RefreshPolicy(**config.refresh),
            objective=objective_config(config),
            **{name: config.grpo[name] for name in shared},
        )
    except ValueError as error:  # the parts know a field's name, not its section
        if str(error).startswith("refresh."):
            raise
        section = "capture" if str(error).startswith(tuple(config.capture)) else "grpo"
        raise ValueError(f"{section}.{error}") from error


def load_tokenizer(folder: pathlib.Path, vocab_size: int) -> tokenizer.Tokenizer:
    """The checkpoint's tokenizer. Raises TokenizerError, or ValueError where the model has fewer ids."""
    tokens = tokenizer.load_tokenizer(folder)
    if tokens.vocab_size > vocab_size:
        raise ValueError(f"{folder}: tokenizer of {tokens.vocab_size} ids; accepted: at most vocab_size={vocab_size}")
    return tokens


def read_dataset(config: ConfigDict) -> data.Dataset:
    """The configured rows; each has an answer if a built-in reward compares with one. Raises DataError."""
    paths = list(config.data.paths)
    if not all(paths):
        raise data.DataError(f"data.paths={tuple(paths)}; accepted: JSONL or parquet files")
    try:
        dataset = data.read_rows(paths)
    except data.DataError as error:
        raise data.DataError(f"data.paths: {error}") from error
    if {"exact_match", "boxed_math"} & set(config.reward.functions):
        names = [name for name in columns.ANSWER_COLUMNS if any(name in row["columns"] for row in dataset.rows)]
        if any(all(row["columns"].get(name) is None for name in names) for row in dataset.rows):
            data.read_rows(paths, required=names[-1:] or ["ground_truth"])  # names file and row
    return dataset


def prompt_builder(
    config: ConfigDict, tokens: tokenizer.Tokenizer, template: prompt.ChatTemplate, dataset: data.Dataset
) -> Callable[[Any], np.ndarray]:
    """A row's prompt -> token ids [S]; with data.prompt_file, that file's ids for the dataset's one row.

    Raises:
      PromptError: the file is of another tokenizer or question, damaged, or the dataset has several rows; or Python's
        documentation is too short.
    """
    if config.data.prompt_file:
        if len(dataset.rows) != 1:
            raise prompt.PromptError(f"data.prompt_file with {len(dataset.rows)} dataset rows; accepted: the one of it")
        ids = payload.read(config.data.prompt_file, tokens, dataset.rows[0]["prompt"])
        return lambda _: ids
    target, document = config.data.prompt_tokens or None, None
    if config.data.document == "python":
        document = prompt.python_documentation_text(target)  # a token is at least a byte
    return functools.partial(
        prompt.build_prompt, tokenizer=tokens, template=template, document=document, target_tokens=target
    )


def longest_prompt(config: ConfigDict, dataset: data.Dataset, build: Callable[[Any], np.ndarray]) -> tuple[int, Any]:
    """Tokens of the longest prompt and its row's id. Raises PromptError that names the row, so that no run meets it."""
    longest = 0, None
    for row in dataset.rows:
        try:
            size = build(row["prompt"]).size
            if not size:
                raise prompt.PromptError("the prompt has 0 tokens; accepted: at least 1, see the chat template")
            longest = max(longest, (size, row["id"]), key=lambda found: found[0])
        except prompt.PromptError as error:
            where = f"dataset row of id {row['id']!r}, data.prompt_tokens={config.data.prompt_tokens}"
            raise prompt.PromptError(f"{where}: {error}") from error
    return longest


def reward_functions(config: ConfigDict) -> list[rewards.RewardFunction]:
    """The named functions, ready to be called. Raises ValueError."""
    limit = config.reward.answer_timeout_s
    return [rewards.load(name, answer_timeout_s=limit) for name in config.reward.functions]
