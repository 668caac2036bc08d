"""A full-width slice of GLM-5.2 through the whole transaction on the hardware at hand.

python experiments/long_context.py --tokens=2097152 --layers=4 --group=2 --workdir=runs/long

Random weights at the checkpoint's scale and a seeded random prompt of exactly --tokens tokens: a claim of capacity and
speed, not of learning. Prints a row a phase and writes receipt.json. With --save_every a capture that was stopped goes
on with --resume.
"""

import dataclasses
import importlib.metadata
import json
import pathlib
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tqdm import tqdm

from longstraw_jax import command, exact_gradient, lora, replay, rollout, train
from longstraw_jax import config as config_lib
from longstraw_jax.evidence import kernels, memory, plan_costs, receipt
from longstraw_jax.io import prefix_pages
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.model import decoder
from longstraw_jax.prefix import capture, freshness, pages, refresh
from longstraw_jax.types import Model, Params, PrefixState

HERE = pathlib.Path(__file__).parent
PACKAGES = ("longstraw_jax", "jax", "jaxlib", "flax", "optax")
TARGETS = ("q_a", "q_b", "kv_a", "kv_b", "o", "shared", "routed", "lm_head")
MATMUL = 8192  # of the matrix product that the rates are told beside


def sliced(raw: dict[str, Any], layers: int, experts: int) -> dict[str, Any]:
    """`layers` layers of a Hugging Face configuration from its first full, sparse layer on, or all of them.

    In GLM-5.2 that is layer 6, where the groups of full, shared, shared, shared layers begin.

    Args:
      experts: routed experts a layer, 0 for the configuration's own.

    Raises:
      ValueError: more layers or experts than there are; no such layer to begin with.
    """
    whole, total = config_lib.model_config_from_hf(raw), raw["num_hidden_layers"]
    kinds = list(zip(whole.indexer_types, whole.mlp_layer_types, strict=True))
    if layers != total and ("full", "sparse") not in kinds:
        raise ValueError(
            f"--architecture: the kinds of its layers are {sorted(set(kinds))}; accepted: ('full', 'sparse') among "
            f"them, or --layers={total} (all)"
        )
    first = 0 if layers == total else kinds.index(("full", "sparse"))
    if not 1 <= layers <= total - first:
        raise ValueError(f"--layers={layers}; accepted: 1 to {total - first}, or all {total}")
    if not 0 <= experts <= raw["n_routed_experts"] or 0 < experts < raw["num_experts_per_tok"]:
        raise ValueError(
            f"--experts={experts}; accepted: 0 (all), or {raw['num_experts_per_tok']} to {raw['n_routed_experts']}"
        )
    letters = "".join("F" if kind == "full" else "S" for kind in whole.indexer_types[first : first + layers])
    return raw | {
        "num_hidden_layers": layers,
        "index_topk_pattern": letters,
        "mlp_layer_types": list(whole.mlp_layer_types[first : first + layers]),
        "n_routed_experts": experts or raw["n_routed_experts"],
        "num_nextn_predict_layers": 0,
    }


def group_sizes(given: list[str]) -> list[int]:
    """Raises ValueError for anything but positive integers."""
    if not given or not all(size.strip().isdecimal() and int(size) > 0 for size in given):
        raise ValueError(f"--group={','.join(given)}; accepted: positive integers, as 2,8")
    return [int(size) for size in given]


class Phases:
    """Seconds, peak bytes and FLOP/s of what ran, in order; prints each as it ends."""

    def __init__(self, matmul_rate: float | None):
        self.rows: list[dict[str, Any]] = []
        self.matmul_rate = matmul_rate

    def run(self, name: str, action: Callable[[], Any], *, tokens: int = 0, flops: float = 0) -> Any:
        """Runs and times `action`, its results included."""
        started = time.perf_counter()
        result = jax.block_until_ready(action())
        self.add(name, time.perf_counter() - started, tokens=tokens, flops=flops)
        return result

    def add(self, name: str, seconds: float, *, tokens: int, flops: float) -> None:
        floor = flops / self.matmul_rate if self.matmul_rate else None
        row = {"phase": name, "seconds": seconds, "floor_seconds": floor, "peak_bytes": memory.peak_bytes()[0]}
        row |= {"tokens": tokens, "flops": flops}
        self.rows.append(row)
        print(line(row), flush=True)


def line(row: dict[str, Any]) -> str:
    """A phase for the eye."""
    rate = f"{row['flops'] / row['seconds'] / 1e12:8.1f} TFLOP/s" if row["flops"] else ""
    speed = f"{row['tokens'] / row['seconds']:10.0f} tokens/s" if row["tokens"] else ""
    return f"{row['phase']:<24} {row['seconds']:9.2f} s  peak {row['peak_bytes'] / 1e9:7.2f} GB  {speed} {rate}"


def matmul_rate() -> float:
    """FLOP/s of one large bf16 matrix product here."""
    x = jax.random.normal(jax.random.key(0), (MATMUL, MATMUL), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(x))
    started = time.perf_counter()
    jax.block_until_ready([product(x) for _ in range(10)])
    return 10 * 2 * MATMUL**3 / (time.perf_counter() - started)


def bound_to(model: Model, values: Any) -> dict[str, Any]:
    """What a prompt's pages depend on: weights and adapters are drawn from the seed, as the prompt is."""
    policy = freshness.policy_fingerprint(model, f"seed {values.seed}")
    return {name: getattr(values, name) for name in ("tokens", "seed", "mode", "chunk")} | {
        "policy": "".join(f"{word:08x}" for word in policy),
        "kernels": kernels.implementations(model),
    }


def capture_flops(config: config_lib.ModelConfig, adapters: config_lib.LoraConfig, first: int, last: int) -> int:
    """Of the prompt's tokens first..last-1, each of which sees itself and those before it."""
    keys = np.arange(first + 1, last + 1)
    return (
        plan_costs.forward_flops(config, adapters, keys.size, 0)
        + plan_costs.attention_flops(config, 1) * int(np.minimum(keys, config.index_topk).sum())
        + plan_costs.index_flops(config, 1) * int(keys.sum())
    )


def capture_prompt(
    model: Model,
    base: Params,
    adapters: Params | None,
    tokens: np.ndarray,
    folder: pathlib.Path,
    values: Any,
    phases: Phases,
) -> tuple[PrefixState, int]:
    """The resident prompt, and how many of its tokens came from disk.

    Raises:
      ValueError: other pages on disk, a prompt or a chunk out of range.
    """
    room, bound, state = capture.room(model, tokens, values.chunk), bound_to(model, values), None
    if values.resume:
        state = phases.run("load pages", lambda: prefix_pages.load(folder, model, room, bound))
    start = 0 if state is None else int(state.length)
    state = pages.allocate(model, room) if state is None else state
    saved, saving, started = start, 0.0, time.perf_counter()
    with tqdm(total=tokens.size, initial=start, desc="capture", unit="token", unit_scale=True, file=sys.stderr) as bar:
        for number, (at, count, ids) in enumerate(capture.chunk_ids(model, tokens, values.chunk)):
            if at < start:
                continue
            state = capture.capture_chunk(model, base, adapters, state, ids, np.int32(count))
            jax.block_until_ready(state.length)
            bar.update(count)
            if values.save_every and (number + 1) % values.save_every == 0:
                before = time.perf_counter()
                saved = prefix_pages.save(folder, model, state, bound, saved=saved)
                saving += time.perf_counter() - before
    seconds = time.perf_counter() - started - saving
    flops = capture_flops(model.config, model.lora, start, tokens.size)
    phases.add("capture", seconds, tokens=tokens.size - start, flops=flops)
    if values.save_every:
        phases.add("save pages", saving, tokens=0, flops=0)
    return state, start


def run_group(
    model: Model,
    policy: rollout.PolicyConfig,
    optimizer: Any,
    base: Params,
    state: train.TrainState,
    resident: refresh.Resident,
    phases: Phases,
    seed: int,
) -> train.TrainState:
    """Sample, score, replay each member, the prompt's own term in "exact" mode, finalise and step."""
    config, keys, size, name = model.config, resident.tokens.size, policy.group, f"group {policy.group}: "
    budget = policy.max_new_tokens
    response = plan_costs.forward_flops(config, model.lora, budget, keys) + budget * plan_costs.head_flops(config)
    prefix = resident.prefix
    samples = phases.run(
        name + "sample",
        lambda: rollout.sample(model, policy, base, state.adapters, resident, jax.random.key(seed)),
        tokens=size * budget, flops=size * response,
    )  # fmt: skip
    rewards = (samples.tokens < config.vocab_size // 2).mean(1, dtype=np.float32)  # any function of the tokens serves
    rewards += 1e-3 * np.arange(size, dtype=np.float32)  # never a group without a signal
    group, _ = rollout.unscored_group(model, policy, int(resident.tokens[-1]), samples, rewards)
    old, _ = phases.run(
        name + "score",
        lambda: replay.score(model, base, state.adapters, prefix, group.inputs, group.targets, group.lengths),
        tokens=size * budget, flops=size * response,
    )  # fmt: skip
    group = dataclasses.replace(group, old_logp=np.asarray(old))
    copies, total = lora.per_device(state.adapters, model.mesh), None
    exact = policy.mode == "exact"
    page_grads = exact_gradient.zero_page_grads(model, prefix) if exact else None
    gradient = plan_costs.gradient_flops(config, model.lora, budget, keys)
    for g in range(size):
        member = jax.tree.map(lambda x, g=g: x[g : g + 1], group)
        total, page_grads = phases.run(
            f"{name}replay {g}",
            lambda member=member, total=total, page_grads=page_grads: train.add_group(
                model, policy, base, copies, prefix, member, total, page_grads
            ),
            tokens=budget, flops=gradient,
        )  # fmt: skip
    if exact:
        flops = plan_costs.gradient_flops(config, model.lora, keys, keys // 2, head=False)
        total = phases.run(
            name + "reverse pass",
            lambda: train.add_prompt(model, policy, base, copies, resident, page_grads, total),
            tokens=keys, flops=flops,
        )  # fmt: skip
    after, info = phases.run(name + "finalise and step", lambda: train.apply_update(model, optimizer, state, total))
    if not bool(info["taken"]):
        raise FloatingPointError(f"{name}the step was skipped: {int(info['nonfinite'])} non-finite gradients")
    return after


def run(values: Any) -> dict[str, Any]:
    """The receipt of one run. Raises ValueError for bad input."""
    groups = group_sizes(values.group)
    raw = sliced(json.loads(pathlib.Path(values.architecture).read_text()), values.layers, values.experts)
    architecture = config_lib.model_config_from_hf(raw)
    if values.tokens + values.response > architecture.max_position_embeddings:
        architecture = config_lib.extend_positions(architecture, values.tokens + values.response)
    targets = TARGETS + (("dense",) if "dense" in architecture.mlp_layer_types else ())
    adapters = config_lib.LoraConfig(tuple((name, values.rank, 2.0 * values.rank) for name in sorted(targets)))
    options = dict(lora=adapters, kernels=values.kernels, prefix_store=values.prefix_store)
    model = decoder.make_model(architecture, **options)
    if values.save_every or values.resume:
        prefix_pages.check_store(model)
    policies = [
        rollout.PolicyConfig(
            eos_ids=(), capacity=values.tokens, mode=values.mode, group=group, max_new_tokens=values.response,
            chunk=values.chunk,
        )
        for group in groups
    ]  # fmt: skip
    prompt = np.random.default_rng(values.seed).integers(0, architecture.vocab_size, values.tokens).astype(np.int32)
    optimizer = train.make_optimizer(train.OptimizerConfig())
    phases = Phases(matmul_rate() if jax.default_backend() != "cpu" else None)
    base = phases.run("weights", lambda: decoder.init_params(architecture, values.seed))
    state = phases.run("adapters", lambda: train.init_state(model, optimizer, values.seed))
    workdir = pathlib.Path(values.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    used = None if values.mode == "frozen" else state.adapters
    prefix, restored = capture_prompt(model, base, used, prompt[:-1], workdir / "pages", values, phases)
    resident = refresh.Resident(prompt, prefix, captured_at=0)
    for policy in policies:
        # The same state for each: groups are compared, not trained one after the other.
        run_group(model, policy, optimizer, base, state, resident, phases, values.seed)
    device = jax.devices()[0]
    result = {
        "claim": "capacity",
        "code": receipt.describe_code(pathlib.Path(train.__file__).resolve().parent),
        "flags": {name: getattr(values, name) for name in FLAGS},
        "architecture": raw,
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "device": {"platform": device.platform, "kind": device.device_kind, "count": 1},
        "kernels": kernels.implementations(model),
        "matmul_flops_per_second": phases.matmul_rate,
        "memory_source": memory.peak_bytes()[1],
        "resident_bytes": pages.prefix_bytes(architecture, values.tokens - 1, 1),
        "restored_tokens": restored,
        "phases": phases.rows,
    }
    write_whole(workdir / "receipt.json", (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    return result


FLAGS = (
    "tokens", "layers", "experts", "group", "response", "chunk", "mode", "rank", "kernels", "prefix_store", "seed",
    "save_every", "resume",
)  # fmt: skip


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    try:
        if len(argv) > 1:
            raise ValueError(f"arguments {argv[1:]}; accepted: flags, see --help")
        run(values)
    except (ValueError, OSError) as error:
        command.fail(error)
    print(f"receipt: {pathlib.Path(values.workdir) / 'receipt.json'}")


if __name__ == "__main__":
    flags.DEFINE_integer("tokens", 2_097_152, "Tokens of the prompt, the boundary token included.", lower_bound=2)
    flags.DEFINE_integer("layers", 4, "Layers: a slice from the first all-sparse group on, or all.")
    flags.DEFINE_integer("experts", 0, "Routed experts a layer; 0: all.")
    flags.DEFINE_list("group", ["2"], "Group sizes, one after the other over one captured prompt.")
    flags.DEFINE_integer("response", 64, "Tokens of each response.", lower_bound=1)
    flags.DEFINE_integer("chunk", 8192, "Tokens a capture step.", lower_bound=1)
    flags.DEFINE_enum("mode", "detached", rollout.MODES, "Prefix-gradient mode.")
    flags.DEFINE_integer("rank", 8, "Rank of every adapter.", lower_bound=1)
    flags.DEFINE_enum("kernels", "auto", ("auto", "reference"), "Implementation of the operations.")
    flags.DEFINE_enum("prefix_store", "device", ("device", "host"), "Where the prompt's pages rest.")
    flags.DEFINE_integer("seed", 0, "Seed of weights, adapters, prompt and sampling.", lower_bound=0)
    flags.DEFINE_integer("save_every", 0, "Chunks between saves of the half-captured prompt; 0: none.", lower_bound=0)
    flags.DEFINE_boolean("resume", False, "Go on from the pages saved in --workdir.")
    flags.DEFINE_string("architecture", str(HERE / "configs" / "glm52.json"), "A Hugging Face config.json.")
    flags.DEFINE_string("workdir", "runs/long_context", "Folder of the receipt and of saved pages.")
    app.run(main, flags_parser=command.parse_flags)
