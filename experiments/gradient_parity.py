"""Compares replay's gradients with autodiff over the whole sequence, and one optimizer step of either.

python experiments/gradient_parity.py --config=experiments/configs/parity_tiny.py --tokens=2048 \
    --modes=frozen,detached,exact --out=parity.json

The baseline runs on its own choices ("free") and held to those of capture and replay: the second is what passes or
fails, with bounds on the share of choices that differ and on how far from a tie they are.

The policy is the config's checkpoint or, without one, random weights for model.architecture; its adapters are random.
Exit status: 0 all within tolerance, 1 not, 2 bad usage.
"""

import json
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
import train_grpo
from absl import app, flags
from ml_collections import ConfigDict, config_flags

from longstraw_jax import config as config_lib
from longstraw_jax import fingerprint, job_config, lora, rollout, sharding, train
from longstraw_jax.command import parse_flags
from longstraw_jax.evidence import comparison, flips, parity, receipt
from longstraw_jax.io import hf_checkpoint
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.model import decoder

ADAPTER_SEED, PROMPT_SEED, GROUP_SEED = 1, 2, 3  # added to config.seed, which draws random base weights


def response_lengths(longest: int) -> list[int]:
    """A ragged group: the whole budget, a third and two thirds of it."""
    return [longest, -(-longest // 3), -(-2 * longest // 3)]


def parse_modes(text: str) -> list[str]:
    """Raises ValueError for anything but supported modes, each once."""
    modes = text.split(",")
    for mode in modes:
        rollout.check_mode(mode)
    if len(set(modes)) != len(modes):
        raise ValueError(f"--modes={text}; accepted: each mode once")
    return modes


def load_architecture(config: ConfigDict) -> config_lib.ModelConfig:
    """Of the checkpoint, or of model.architecture. Raises ValueError if both are missing."""
    eps = config.model.latent_norm_eps or None
    if config.model.checkpoint:
        found = config_lib.load_model_config(pathlib.Path(config.model.checkpoint), latent_norm_eps=eps)
    elif "architecture" in config.model:
        found = config_lib.model_config_from_hf(config.model.architecture.to_dict(), latent_norm_eps=eps)
    else:
        raise ValueError("model.checkpoint=''; accepted: a Hugging Face directory, or model.architecture in the config")
    return config_lib.extend_positions(found, config.model.yarn_positions) if config.model.yarn_positions else found


def load_sides(
    config: ConfigDict, architecture: config_lib.ModelConfig, adapters: config_lib.LoraConfig
) -> tuple[parity.Side, parity.Side]:
    """The policy on the configured mesh and on one device. Raises ShardingError for a mesh that does not fit."""
    mesh = sharding.make_mesh(config.mesh.devices)
    decoder.make_model(architecture, mesh=mesh, lora=adapters)  # refuses the mesh before anything is loaded
    model = decoder.make_model(architecture, lora=adapters)
    if config.model.checkpoint:
        _, base = hf_checkpoint.load(pathlib.Path(config.model.checkpoint), architecture)
    else:
        base = decoder.init_params(architecture, config.seed)
    seeded = parity.seeded_adapters(model, config.seed + ADAPTER_SEED)
    single = parity.place(parity.Side(model, base, seeded), None)
    return (single if mesh is None else parity.place(single, mesh)), single


def run(config: ConfigDict, tokens: int, modes: list[str]) -> dict[str, Any]:
    """The receipt of one comparison. Raises ValueError for bad input."""
    if tokens < 2:
        raise ValueError(f"--tokens={tokens}; accepted: at least 2, one resident and the boundary token")
    if config.grpo.beta > 0:
        raise ValueError(f"grpo.beta={config.grpo.beta}; accepted: 0, as no reference is replayed here")
    train_grpo.set_devices(config)
    architecture = load_architecture(config)
    lengths = response_lengths(config.grpo.max_new_tokens)
    architecture.check_length(tokens + max(lengths))
    policy = rollout.PolicyConfig(
        eos_ids=(),
        capacity=tokens,
        group=len(lengths),
        max_new_tokens=config.grpo.max_new_tokens,
        temperature=config.grpo.temperature,
        chunk=config.capture.chunk,
        objective=job_config.objective_config(config),
    )
    optimizer = train.make_optimizer(train.OptimizerConfig(**config.optimizer))
    adapters = job_config.lora_config(config)
    lora.sites(architecture, adapters)
    wide, single = load_sides(config, architecture, adapters)
    rng = np.random.default_rng(config.seed + PROMPT_SEED)
    prompt, *responses = (rng.integers(0, architecture.vocab_size, n, np.int32) for n in (tokens, *lengths))
    tolerance = comparison.TOLERANCES[architecture.dtype]
    measured, flipped, problems, seconds, policies = {}, {}, [], {}, {}
    for mode in modes:
        started = time.perf_counter()
        acts = "frozen" if mode == "frozen" else "everywhere"
        with jax.default_matmul_precision("highest"):  # fp32 means fp32 products, on accelerators too
            if acts not in policies:
                args = (mode, wide, single, policy, prompt, responses, config.seed + GROUP_SEED)
                policies[acts] = parity.replay_policy(*args)
            args = (policies[acts], wide, single, policy, optimizer, config.seed + GROUP_SEED)
            measured[mode] = parity.measure_mode(mode, *args)
        flipped[mode] = policies[acts].flipped
        seconds[mode] = round(time.perf_counter() - started, 2)
        problems += [f"{mode} {line}" for line in comparison.choice_problems(flipped[mode], tolerance)]
        for case, figures in measured[mode].items():
            problems += [f"{mode} {case}: {line}" for line in comparison.case_problems(case, figures, tolerance)]
    return {
        "claim": "gradient",
        "passed": not problems,
        "problems": problems,
        **receipt.made_by(config.mesh.devices),
        "config": train_grpo.plain(config),
        "config_sha256": fingerprint.sha256_json(train_grpo.plain(config)),
        "weights_fingerprint": fingerprint.tree_fingerprint(single.base),
        "mesh": {sharding.AXIS: config.mesh.devices},
        "dtype": architecture.dtype,
        "tokens": {"prompt": tokens, "responses": lengths},
        "seeds": {
            "weights": config.seed,
            "adapters": config.seed + ADAPTER_SEED,
            "prompt": config.seed + PROMPT_SEED,
            "group": config.seed + GROUP_SEED,
        },
        "tolerance": vars(tolerance),
        "modes": measured,
        "flipped": flipped,
        "seconds": seconds,
    }


LINE = "{:9} {:9} {:9} {:>15} {:>9} {:>9} {:>9} {:>11} {:>8}"
COLUMNS = ("mode", "case", "compared", "cosine", "rel. L2", "largest", "abs.", "zero sides", "clipped")


def table(measured: dict[str, Any]) -> list[str]:
    """A line a comparison: gradient, adapters' step, free gradient and control of each mode and case."""
    lines = [LINE.format(*COLUMNS)]
    for mode, cases in measured.items():
        for case, figures in cases.items():
            for what in ("gradient", "step", "free", "control"):
                if what in figures:
                    lines.append(_table_line(mode, case, what, figures[what], figures["clipped_fraction"]))
    return lines


def _table_line(mode, case, what, f, clipped):
    numbers = [
        "-" if f[key] is None else format(f[key], style)
        for key, style in (
            ("cosine", ".12f"),
            ("relative_l2", ".2e"),
            ("largest_error", ".2e"),
            ("largest_difference", ".2e"),
        )
    ]
    sides = f"{f['zero_only_found']}/{f['zero_only_wanted']}"
    return LINE.format(mode, case, what, *numbers, sides, f"{clipped:.1%}" if what == "gradient" else "")


def flip_table(flipped: dict[str, Any]) -> list[str]:
    """A line a kind of choice of each mode: how many the baseline, on its own, made otherwise."""
    lines = []
    for mode, kinds in flipped.items():
        for kind, layers in kinds.items():
            number, of = (sum(x[field] for x in layers.values()) for field in ("flipped", "choices"))
            each = ", ".join(f"{i}: {x['flipped']}" for i, x in layers.items() if x["flipped"])
            widest = flips.widest_gap(layers.values())
            gap = "" if widest is None else f"; scores of a token's first at most {widest:.1e} of the largest apart"
            lines.append(f"{mode:9} {kind}: {number} of {of} flipped; by layer {each or 'none'}{gap}")
    return lines


def command(values: flags.FlagValues, arguments: list[str]) -> int:
    """Runs the command of parsed flags; its exit status."""
    try:
        if arguments or values.config is None or values.tokens is None:
            raise ValueError(
                f"arguments {arguments}; accepted: --config=FILE --tokens=N --modes=MODES --out=FILE.json and "
                "--config.field=value"
            )
        result = run(values.config, values.tokens, parse_modes(values.modes))
        if values.out:
            write_whole(values.out, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines = [*table(result["modes"]), *flip_table(result["flipped"]), *result["problems"]]
    print("\n".join([*lines, "pass" if result["passed"] else "FAIL"]))
    return 0 if result["passed"] else 1


def define_flags(values: flags.FlagValues) -> None:
    config_flags.DEFINE_config_file(
        "config", None, "Configuration file, see experiments/configs/parity_tiny.py.", flag_values=values
    )
    flags.DEFINE_integer("tokens", None, "Tokens of the prompt.", flag_values=values)
    flags.DEFINE_string("modes", ",".join(rollout.MODES), "Prefix-gradient modes to compare.", flag_values=values)
    flags.DEFINE_string("out", None, "File for the JSON receipt.", flag_values=values)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(lambda argv: sys.exit(command(flags.FLAGS, argv[1:])), flags_parser=parse_flags)
