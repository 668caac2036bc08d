"""A full-width slice of GLM-5.2 through the whole transaction on the hardware at hand.

python experiments/long_context.py --tokens=2097152 --layers=4 --group=2 --workdir=runs/long

Random weights at the checkpoint's scale and a seeded random prompt of exactly --tokens tokens: a claim of capacity and
speed, not of learning. What cannot fit by the plan's formula is refused before anything is allocated. Prints a row a
phase: its seconds without compilation, the floor that matrix products (and, for pages on the host, the link) set, and
the peak so far. receipt.json grows with every phase and says "complete" at the end alone. With --save_every a capture
that was stopped goes on with --resume.
"""

import dataclasses
import json
import os
import pathlib
import sys
import time
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # the default of 0.75 leaves a quarter of a GPU unused

import jax
import model_slice
import numpy as np
import timed_phases
from absl import app, flags
from tqdm import tqdm

from longstraw_jax import command, exact_gradient, lora, replay, rollout, train
from longstraw_jax import config as config_lib
from longstraw_jax.evidence import kernels, memory, plan_costs, prerequisites, receipt
from longstraw_jax.io import prefix_pages
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.model import decoder
from longstraw_jax.prefix import capture, freshness, pages, refresh
from longstraw_jax.types import Model, Params, PrefixState


def group_sizes(given: list[str]) -> list[int]:
    """Raises ValueError for anything but positive integers."""
    if not given or not all(size.strip().isdecimal() and int(size) > 0 for size in given):
        raise ValueError(f"--group={','.join(given)}; accepted: positive integers, as 2,8")
    return [int(size) for size in given]


def check_plan(model: Model, policies: list[rollout.PolicyConfig], tokens: int, go_on: bool) -> dict[str, Any]:
    """What the fullest phase holds by the plan's formula, and the device's memory.

    Args:
      go_on: only say so where the formula, which rounds up, is over the memory.

    Raises:
      ValueError: it does not fit.
    """
    policy = max(policies, key=lambda policy: policy.group)
    phases = prerequisites.memory_need(model, train.OptimizerConfig(), policy, tokens)
    available, source = prerequisites.device_memory(None)
    name, kinds = max(phases.items(), key=lambda item: sum(item[1].values()))
    total = sum(kinds.values())
    listed = ", ".join(f"{kind} {size / 1e9:.2f}" for kind, size in kinds.items() if size)
    text = f"plan: {total / 1e9:.2f} GB by formula in {name!r} ({listed})"
    if available is not None and total > available:
        limits = f"{available / 1e9:.2f} GB ({source})"
        if not go_on:
            raise ValueError(
                f"{text}; accepted: {limits}, by a smaller --chunk, --experts, --tokens or --layers, or by "
                "--prefix_store=host; --over_plan tries all the same"
            )
        text += f", over the {limits}; tried all the same"
    print(text, flush=True)
    return {"phase": name, "bytes": kinds, "total": total, "memory": available, "memory_source": source}


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
    phases: timed_phases.Phases,
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
    saved, saving, done, started = start, 0.0, 0, time.perf_counter()

    def flops(first, last):
        return capture_flops(model.config, model.lora, first, last)

    # In FLOPs, because a later chunk has more keys to score: tokens would promise too early an end.
    whole = flops(0, tokens.size)
    with phases.named("capture"), work_bar("capture", whole, flops(0, start)) as bar:
        for number, (at, count, ids) in enumerate(capture.chunk_ids(model, tokens, values.chunk)):
            if at < start:
                continue
            state = capture.capture_chunk(model, base, adapters, state, ids, np.int32(count))
            jax.block_until_ready(state.length)
            done += 1
            bar.update(flops(at, at + count))
            bar.set_postfix_str(f"{at + count:,} tokens")
            if values.save_every and (number + 1) % values.save_every == 0:
                before = time.perf_counter()
                saved = prefix_pages.save(folder, model, state, bound, saved=saved)
                saving += time.perf_counter() - before
        phases.add(
            "capture", time.perf_counter() - started - saving, tokens=tokens.size - start,
            flops=flops(start, tokens.size), link_bytes=done * staged_bytes(model, tokens.size),
        )  # fmt: skip
    if values.save_every:
        with phases.named("save pages"):
            phases.add("save pages", saving)
    return state, start


def work_bar(name: str, total: float, initial: float = 0, unit: str = "FLOP") -> tqdm:
    """Progress and the time left."""
    return tqdm(total=total, initial=initial, desc=name, unit=unit, unit_scale=True, file=sys.stderr)


def staged_bytes(model: Model, tokens: int) -> int:
    """Of pages that a pass over all layers copies from the host: every layer's whole pool, however full."""
    return pages.prefix_bytes(model.config, tokens, model.devices) if model.prefix_store == "host" else 0


def run_group(
    model: Model,
    policy: rollout.PolicyConfig,
    optimizer: Any,
    base: Params,
    state: train.TrainState,
    resident: refresh.Resident,
    phases: timed_phases.Phases,
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
        with work_bar("reverse pass", keys - 1, unit="token") as bar:
            grads = phases.run(
                name + "reverse pass",
                lambda: exact_gradient.exact_prefix_vjp(
                    model, base, copies, prefix, resident.tokens[:-1], page_grads, total.grads, chunk=policy.chunk,
                    progress=lambda done: bar.update(done - bar.n),
                ),
                tokens=keys, flops=flops, link_bytes=2 * -(-keys // policy.chunk) * staged_bytes(model, keys),
            )  # fmt: skip
        total = dataclasses.replace(total, grads=grads)
    after, info = phases.run(name + "finalise and step", lambda: train.apply_update(model, optimizer, state, total))
    if not bool(info["taken"]):
        raise FloatingPointError(f"{name}the step was skipped: {int(info['nonfinite'])} non-finite gradients")
    return after


def run(values: Any) -> dict[str, Any]:
    """The receipt of one run, written as its phases end.

    Raises:
      ValueError: bad input. MemoryError: the device is full; both before the receipt says complete.
    """
    groups = group_sizes(values.group)
    raw = model_slice.load(values.architecture, values.layers, values.experts)
    architecture = model_slice.model_config(raw, values.tokens + values.response)
    options = dict(kernels=values.kernels, prefix_store=values.prefix_store)
    model = decoder.make_model(architecture, lora=model_slice.adapters(architecture, values.rank), **options)
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
    capture.room(model, prompt[:-1], values.chunk)  # refuses a chunk that the pages cannot take
    plan = check_plan(model, policies, values.tokens, values.over_plan)
    optimizer = train.make_optimizer(train.OptimizerConfig())
    workdir = pathlib.Path(values.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    accelerator = jax.default_backend() != "cpu"
    rate = timed_phases.matmul_rate() if accelerator else None
    link = timed_phases.link_rate() if accelerator and values.prefix_store == "host" else None
    result = {
        "claim": "capacity",
        "complete": False,
        "stopped": None,
        **receipt.made_by(),
        "flags": {name: getattr(values, name) for name in FLAGS},
        "architecture": raw,
        "kernels": kernels.implementations(model),
        "matmul_flops_per_second": rate,
        "link_bytes_per_second": link,
        "memory_source": memory.peak_bytes()[1],
        "plan": plan,
        "resident_bytes": pages.prefix_bytes(architecture, values.tokens - 1, 1),
        "restored_tokens": 0,
        "phases": [],
    }

    def write(**changes):
        result.update(changes)
        write_whole(workdir / "receipt.json", (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())

    phases = timed_phases.Phases(rate, link, lambda rows: write(phases=rows))
    try:
        base = phases.run("weights", lambda: decoder.init_params(architecture, values.seed))
        state = phases.run("adapters", lambda: train.init_state(model, optimizer, values.seed))
        used = None if values.mode == "frozen" else state.adapters
        prefix, restored = capture_prompt(model, base, used, prompt[:-1], workdir / "pages", values, phases)
        write(restored_tokens=restored)
        resident = refresh.Resident(prompt, prefix, captured_at=0)
        for policy in policies:
            # The same state for each: groups are compared, not trained one after the other.
            run_group(model, policy, optimizer, base, state, resident, phases, values.seed)
    except BaseException as error:
        write(stopped={"phase": phases.current, "error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        raise
    write(complete=True)
    return result


FLAGS = (
    "tokens", "layers", "experts", "group", "response", "chunk", "mode", "rank", "kernels", "prefix_store", "seed",
    "save_every", "resume", "over_plan",
)  # fmt: skip


def main(_: list[str]) -> None:
    values = flags.FLAGS
    try:
        run(values)
    except (ValueError, OSError, MemoryError) as error:
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
    flags.DEFINE_boolean("over_plan", False, "Try what the plan's formula, which rounds up, finds too large.")
    flags.DEFINE_string("architecture", str(model_slice.ARCHITECTURE), "A Hugging Face config.json.")
    flags.DEFINE_string("workdir", "runs/long_context", "Folder of the receipt and of saved pages.")
    app.run(main, flags_parser=command.parse_flags_alone)
