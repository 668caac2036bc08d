"""Compiles every program of a transaction for chips that need not be there and says what fits each of them.

python experiments/compile_plan.py --config=glm52 --tokens=2097152 --topology=tpu:v5p:4x4x2 --out=runs/plan

Writes plan.json and plan.png to --out after each program, and keeps from an earlier run there what the same code
compiled of the same plan. Exit status: 0 all programs compiled and fit, 1 something does not fit, 2 bad input.
"""

import importlib.metadata
import json
import pathlib
import platform
import sys
from collections.abc import Callable
from typing import Any

import jax
import make_tiny_checkpoint
from absl import app, flags

from longstraw_jax import config as config_lib
from longstraw_jax import fingerprint, rollout, train
from longstraw_jax.evidence import kernels, plan, plan_needs, plan_programs, plan_report, receipt, topology
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.model import decoder

HERE = pathlib.Path(__file__).parent
PACKAGES = ("longstraw_jax", "jax", "jaxlib", "libtpu", "flax", "optax")
# Configurations by name: GLM-5.2 with the position range of the 2M window (an opt-in, YaRN), and the tiny random one.
GLM52_POSITIONS = 2_097_152 + 512
NAMES = ("glm52", "tiny")


def load_config(name: str, positions: int | None) -> config_lib.ModelConfig:
    """A named configuration, or that of a Hugging Face config.json.

    Args:
      positions: YaRN range to opt in to, 0 for the configuration's own, None for a named configuration's default.

    Raises:
      ConfigError: neither a name nor a file; or what the file holds.
    """
    if name == "tiny":
        raw = make_tiny_checkpoint.CONFIG
    else:
        path = HERE / "configs" / "glm52.json" if name == "glm52" else pathlib.Path(name)
        if not path.is_file():
            raise config_lib.ConfigError(f"config={name!r} is no file; accepted: {', '.join(NAMES)} or a config.json")
        raw = json.loads(path.read_text())
    config = config_lib.model_config_from_hf(raw)
    if positions is None:
        positions = GLM52_POSITIONS if name == "glm52" else 0
    return config_lib.extend_positions(config, positions) if positions else config


def parse_groups(text: str) -> tuple[int, ...]:
    """Group sizes "2,8". Raises ValueError for anything else."""
    try:
        groups = tuple(int(part) for part in text.split(","))
    except ValueError:
        groups = ()
    if not groups or min(groups) < 1:
        raise ValueError(f"groups={text!r}; accepted: positive integers, as 2,8")
    return groups


def run(values: flags.FlagValues, done: Callable[[str, dict[str, Any]], None]) -> dict[str, Any]:
    """Compiles and returns the receipt. Raises ValueError for bad input, before anything compiles.

    Args:
      done: called with a program's name and the receipt so far.
    """
    chips = topology.parse(values.topology)
    if values.response < 1:
        raise ValueError(f"response={values.response}; accepted: at least 1")
    if values.rank < 1:
        raise ValueError(f"rank={values.rank}; accepted: at least 1")
    if chips.platform == "cuda" and values.prefix_store == "host":
        raise ValueError(
            f"prefix_store='host' with topology={chips.name!r}, whose compiler knows no host memory without a card; "
            "accepted: 'device'"
        )
    rollout.check_mode(values.mode)
    config = load_config(values.config, values.yarn_positions)
    plan.check_tokens(config, values.tokens, values.response, chips.devices)
    topology.prepare(chips)
    model = decoder.make_model(
        config,
        mesh=topology.make_mesh(chips),
        lora=config_lib.LoraConfig(
            tuple((name, values.rank, 2.0 * values.rank) for name in sorted(config_lib.LORA_TARGETS))
        ),
        expert_load=values.imbalance,
        prefix_store=values.prefix_store,
        # The kernels of other chips are chosen by the machine that compiles.
        kernels="auto" if chips.platform == "cuda" else "reference",
    )
    with jax.sharding.use_abstract_mesh(model.mesh.abstract_mesh):
        served = kernels.implementations(model)
    optimizer = train.make_optimizer(train.OptimizerConfig())
    chunk = values.chunk or plan.choose_chunk(model, optimizer, values.tokens, values.mode, chips.memory)
    plan.check_chunk(model, chunk, values.tokens)
    sizes = plan_programs.Sizes(values.tokens, chunk, values.response, parse_groups(values.groups), values.mode)
    known = list(plan_programs.programs(model, optimizer, sizes))
    only = tuple(values.programs.split(",")) if values.programs else None
    if only is not None and (unknown := set(only) - set(known)):
        raise ValueError(f"programs={sorted(unknown)} are not known; accepted: {known}")
    have = plan_programs.resident(model, optimizer, sizes.tokens, sizes.mode)
    bound = {
        "claim": "capacity by the compiler: nothing was executed",
        "code": receipt.describe_code(pathlib.Path(plan.__file__).parents[1]),
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "config": values.config,
        "config_sha256": fingerprint.sha256_json(plan_report.plain(config)),
        "positions": config.max_position_embeddings,
        "topology": chips._asdict(),
        "kernels": served,
        "sizes": plan_report.plain(sizes) | {"rank": values.rank},
        "prefix_store": values.prefix_store,
        "imbalance": values.imbalance,
        "needs": None if chips.memory is None else plan_needs.needs(model, have, sizes.tokens, chips.memory),
    }
    reports = _kept(values.out, bound)

    def receipt_so_far():
        ordered = {name: reports[name] for name in known if name in reports}
        return bound | {"programs": ordered, "peak": plan_report.peak(ordered)}

    def progress(name, report):
        reports[name] = report
        done(name, receipt_so_far())

    plan.run_plan(model, optimizer, sizes, chips.memory, only=only, progress=progress)
    return receipt_so_far()


def _kept(out: str | None, bound: dict[str, Any]) -> dict[str, Any]:
    """Reports in --out of the same plan, by the same code."""
    path = pathlib.Path(out or "") / "plan.json"
    if not out or not path.is_file():
        return {}
    found = json.loads(path.read_text())
    same = all(found.get(name) == json.loads(json.dumps(value)) for name, value in bound.items())
    return dict(found["programs"]) if same and not bound["code"]["dirty"] else {}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def command(values: flags.FlagValues, arguments: list[str]) -> int:
    """Runs the command of parsed flags; its exit status."""
    try:
        if arguments or values.tokens is None or values.topology is None:
            raise ValueError(f"arguments {arguments}; accepted: --config=NAME --tokens=N --topology=NAME --out=DIR")
        result = run(values, lambda name, result: _write(values.out, name, result))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(plan_report.table(result)))
    return 1 if any(report["fits"] is False for report in result["programs"].values()) else 0


def _write(out: str | None, name: str, result: dict[str, Any]) -> None:
    """Says that a program is done, and writes the receipt and the picture so far."""
    print(plan_report.line(name, result["programs"][name]), flush=True)
    if out:
        receipt_text = json.dumps(result, indent=1, allow_nan=False) + "\n"
        write_whole(pathlib.Path(out) / "plan.json", receipt_text.encode())
        write_whole(pathlib.Path(out) / "plan.png", plan_report.picture(result))


def define_flags(values: flags.FlagValues) -> None:
    options = dict(flag_values=values)
    flags.DEFINE_string("config", "glm52", f"{' or '.join(NAMES)}, or a Hugging Face config.json.", **options)
    flags.DEFINE_integer("tokens", None, "Tokens of the prompt.", **options)
    flags.DEFINE_string("topology", None, f"One of {', '.join(topology.KNOWN)}.", **options)
    flags.DEFINE_string("mode", "detached", "Prefix-gradient mode; exact adds the reverse pass.", **options)
    flags.DEFINE_integer("response", 512, "Tokens of a response.", **options)
    flags.DEFINE_string("groups", "2,8", "Group sizes to sample.", **options)
    flags.DEFINE_integer("chunk", 0, "Tokens of a capture step; 0: what the memory left allows.", **options)
    flags.DEFINE_integer("rank", 8, "Rank of the adapters, which are on every target.", **options)
    flags.DEFINE_float("imbalance", 2.0, "Expert rows of a pass in units of the mean load.", **options)
    flags.DEFINE_enum("prefix_store", "device", ["device", "host"], "Where the prompt's pages rest.", **options)
    flags.DEFINE_integer(
        "yarn_positions", None, "YaRN position range to opt in to; 0: the configuration's own.", **options
    )
    flags.DEFINE_string("programs", None, "Compile these only, as capture,replay.", **options)
    flags.DEFINE_string("out", None, "Folder for plan.json and plan.png.", **options)


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(lambda argv: sys.exit(command(flags.FLAGS, argv[1:])), flags_parser=_parse)
