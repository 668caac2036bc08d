"""The transaction beside Hugging Face transformers + PEFT: one checkpoint, one prompt, one group on both sides.

python experiments/compare_peer.py ours --dir=DIR --experts=64 --lengths=4096,8192,16384,32768
python experiments/peers/hf_full_sequence.py --dir=DIR
python experiments/compare_peer.py table --dir=DIR

`ours` writes a full-width slice with random weights as a checkpoint folder, adapters away from zero in PEFT's layout,
and seeded random tokens; then it runs our side on them. The peer reads the same files in a process of its own. `table`
prints both: seconds a step, peak bytes, the longest prompt, and how far log-probabilities and gradients agree at the
first length. Sampling is on neither side. The peer's gradient is that of the whole sequence, so ours is compared in
`exact` mode. Fewer experts than GLM-5.2's 256 leave a token's work as it is and give the peer more memory: the table
says what all of them would take.
"""

import functools
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import model_slice
import numpy as np
import safetensors.numpy
from absl import app, flags

from longstraw_jax import command, exact_gradient, lora, replay, rollout, train
from longstraw_jax import config as config_lib
from longstraw_jax.evidence import comparison, kernels, memory, parity, receipt
from longstraw_jax.io import adapter, hf_checkpoint
from longstraw_jax.io.whole_file import open_whole, write_whole
from longstraw_jax.model import decoder
from longstraw_jax.prefix import capture, refresh
from longstraw_jax.rl import advantages

LATENT_EPS = 1e-6  # transformers builds the two latent norms with it whatever rms_norm_eps says
MODES = ("detached", "exact")
OURS, PEER, SLICE, ROWS = "ours.json", "peer.json", "slice.json", "rows.npz"


def positive(name: str, given: list[str]) -> list[int]:
    """Raises ValueError for anything but positive integers."""
    if not given or not all(x.strip().isdecimal() and int(x) > 0 for x in given):
        raise ValueError(f"--{name}={','.join(given)}; accepted: positive integers, as 2,8")
    return [int(x) for x in given]


def _write_json(path: pathlib.Path, value: Any) -> None:
    write_whole(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def prepare(values: Any, folder: pathlib.Path) -> None:
    """Writes checkpoint, adapters and rows unless they are there. Raises ValueError for bad input."""
    lengths, groups = positive("lengths", values.lengths), positive("groups", values.groups)
    raw = model_slice.load(values.architecture, values.layers, values.experts)
    raw |= {"latent_norm_eps": LATENT_EPS, "dtype": values.dtype}
    config = config_lib.model_config_from_hf(raw)
    config.check_length(max(lengths) + values.response)
    asked = {
        "lengths": sorted(lengths), "groups": sorted(groups), "response": values.response, "layers": values.layers,
        "experts": config.n_routed_experts, "dtype": values.dtype, "rank": values.rank, "seed": values.seed,
        "weights": "random, normal of initializer_range; adapters and tokens random too",
        "all_experts": json.loads(pathlib.Path(values.architecture).read_text())["n_routed_experts"],
        "expert_bytes": 3 * config.hidden_size * config.moe_intermediate_size * config.mlp_layer_types.count("sparse")
        * jnp.dtype(config.dtype).itemsize,
    }  # fmt: skip
    if (folder / SLICE).exists():
        found = json.loads((folder / SLICE).read_text())
        if found != asked:
            raise ValueError(f"--dir={folder} holds {found}; accepted: an empty folder, or the same flags")
        return
    folder.mkdir(parents=True, exist_ok=True)
    model = decoder.make_model(config, lora=model_slice.adapters(config, values.rank))
    hf_checkpoint.save(folder / "checkpoint", raw, decoder.init_params(config, values.seed))
    seeded = parity.seeded_adapters(model, values.seed + 1)
    adapter.export_peft(folder / "adapter", config, model.lora, seeded, base_model_name="../checkpoint")
    rng = np.random.default_rng(values.seed + 2)
    rows = {
        "prompt": rng.integers(0, config.vocab_size, max(lengths), np.int32),
        "responses": rng.integers(0, config.vocab_size, (max(groups), values.response), np.int32),
    }
    for size in groups:
        rewards, one = jnp.asarray(rng.random(size), jnp.float32), jnp.zeros(size, jnp.int32)
        rows[f"advantages_{size}"] = np.asarray(advantages.group_advantages(rewards, one, num_groups=1))
    with open_whole(folder / ROWS) as file:
        np.savez(file, **rows)
    _write_json(folder / SLICE, asked)  # last: with it the folder is whole


def group_of(rows: Any, prompt: np.ndarray, size: int) -> rollout.Group:
    """The prepared responses as replay takes them, at ratio 1."""
    responses = rows["responses"][:size]
    inputs, targets, lengths = replay.member_inputs(int(prompt[-1]), responses.tolist(), responses.shape[1])
    mask = np.ones(inputs.shape, bool)
    nothing = np.zeros(inputs.shape, np.float32)
    return rollout.Group(inputs, targets, lengths, mask, rows[f"advantages_{size}"], None, nothing, None)


def policy_of(facts: dict[str, Any], mode: str, size: int, chunk: int) -> rollout.PolicyConfig:
    return rollout.PolicyConfig(
        eos_ids=(), capacity=max(facts["lengths"]), mode=mode, group=size, max_new_tokens=facts["response"], chunk=chunk
    )


def run_ours(values: Any) -> dict[str, Any]:
    """Our side: seconds of every step, then log-probabilities and the exact gradient of the first length."""
    folder = pathlib.Path(values.dir)
    prepare(values, folder)
    facts, rows = json.loads((folder / SLICE).read_text()), np.load(folder / ROWS)
    config, base = hf_checkpoint.load(folder / "checkpoint")
    model = decoder.make_model(config, lora=model_slice.adapters(config, facts["rank"]), kernels=values.kernels)
    adapters = adapter.import_peft(folder / "adapter", config, model.lora)
    optimizer = train.make_optimizer(train.OptimizerConfig())
    state = train.fresh_state(model, optimizer, adapters)
    first, smallest = facts["lengths"][0], facts["groups"][0]

    def captured(tokens, chunk):
        prompt, room = rows["prompt"][:tokens], max(facts["lengths"])
        words = jnp.zeros((2,), jnp.uint32)  # nobody else sees this prefix
        args = (model, base, adapters, prompt[:-1])
        prefix = capture.capture(*args, chunk=chunk, capacity=room, fingerprint=words)
        return refresh.Resident(prompt, prefix, captured_at=0)

    def step(tokens, size, mode):
        policy = policy_of(facts, mode, size, values.chunk)
        resident = captured(tokens, values.chunk)
        copies, exact = lora.per_device(adapters, None), mode == "exact"
        page_grads = exact_gradient.zero_page_grads(model, resident.prefix) if exact else None
        group = group_of(rows, resident.tokens, size)
        total, page_grads = train.add_group(model, policy, base, copies, resident.prefix, group, None, page_grads)
        if exact:
            total = train.add_prompt(model, policy, base, copies, resident, page_grads, total)
        return jax.block_until_ready(train.apply_update(model, optimizer, state, total)[0])

    steps = []
    for mode in MODES:
        started = time.perf_counter()
        step(first, smallest, mode)
        print(f"{mode}: compiled and ran once in {time.perf_counter() - started:.1f} s", flush=True)
        for tokens in facts["lengths"]:
            for size in facts["groups"]:
                started = time.perf_counter()
                step(tokens, size, mode)
                row = {"mode": mode, "tokens": tokens, "group": size, "seconds": time.perf_counter() - started}
                steps.append(row | {"peak_bytes": memory.peak_bytes()[0]})
                print(json.dumps(steps[-1]), flush=True)
    resident = captured(first, values.chunk)
    group = group_of(rows, resident.tokens, smallest)
    logp, _ = replay.score(model, base, adapters, resident.prefix, group.inputs, group.targets, group.lengths)
    policy = policy_of(facts, "exact", smallest, values.chunk)
    grads, _ = parity.replay_gradient(parity.Side(model, base, adapters), policy, resident, group)
    export = functools.partial(adapter.export_peft, config=config, lora=model.lora, base_model_name="../checkpoint")
    export(folder / "ours_gradient", adapters=grads)
    # 1 where an adapter file holds one of our numbers: gate and up share a matrix there, with zeros between.
    export(folder / "ours_places", adapters=jax.tree.map(np.ones_like, grads))
    result = {
        "claim": "capacity",
        **receipt.made_by(),
        "slice": facts,
        "kernels": kernels.implementations(model),
        "chunk": values.chunk,
        "memory_source": memory.peak_bytes()[1],
        "logprobs": np.asarray(logp, np.float64).tolist(),
        "steps": steps,
    }
    _write_json(folder / OURS, result)
    return result


def _module(name: str) -> str:
    """Path of a PEFT tensor's module in its layer: self_attn.q_a_proj."""
    path = name.removesuffix(".weight").rpartition(".")[0]
    before, layers, after = path.partition(".layers.")
    return after.partition(".")[2] if layers else before.rpartition(".")[2]


def agreement(folder: pathlib.Path) -> dict[str, Any]:
    """How far the peer's log-probabilities and gradients are from ours, over the numbers that both train.

    Raises:
      ValueError: the peer lacks a gradient that we have.
    """
    peer = np.load(folder / "peer.npz")
    ours, places = (
        safetensors.numpy.load_file(folder / name / adapter.WEIGHTS) for name in ("ours_gradient", "ours_places")
    )
    if missing := sorted(ours.keys() - set(peer.files)):
        raise ValueError(f"peer.npz lacks {missing}; accepted: a gradient for every adapter tensor")
    theirs = {name: peer[name] * places[name] for name in ours}
    kinds = {name: _module(name) for name in ours}
    logp = np.asarray(json.loads((folder / OURS).read_text())["logprobs"])
    apart = np.abs(logp - peer["logprobs"])
    found = comparison.compare(ours, theirs, kinds)
    return {
        "logprobs": {"largest_difference": float(apart.max()), "mean_difference": float(apart.mean())},
        "gradient": found,
    }


def table(folder: pathlib.Path) -> tuple[dict[str, Any], list[str]]:
    """Both sides and their agreement, as a receipt and as lines. Raises OSError and ValueError for missing parts."""
    ours, peer = (json.loads((folder / name).read_text()) for name in (OURS, PEER))
    if ours["slice"] != peer["slice"]:
        raise ValueError(f"{OURS} is of {ours['slice']}, {PEER} of {peer['slice']}; accepted: one slice")
    facts, found = ours["slice"], agreement(folder)
    extra = facts["expert_bytes"] * (facts["all_experts"] - facts["experts"])
    lines = [f"{'prompt':>8} {'group':>5}   {'side':<16} {'s a step':>9} {'peak GB':>8}"]
    rows = ours["steps"] + peer["steps"]
    for row in sorted(rows, key=lambda row: (row["tokens"], row["group"], row.get("mode", ""))):
        side = f"ours, {row['mode']}" if "mode" in row else "transformers"
        numbers = "  out of memory"
        if "seconds" in row:
            numbers = f"{row['seconds']:9.2f} {row['peak_bytes'] / 1e9:8.2f}"
        lines.append(f"{row['tokens']:>8} {row['group']:>5}   {side:<16} {numbers}")
    refused = peer["shortest_refused"]
    lines.append(
        f"transformers: the longest prompt that fits is {peer['longest_tokens']} tokens"
        + (f", {refused} do not" if refused else " (none that was tried did not)")
    )
    lines.append(
        f"its weights: {peer['weight_bytes'] / 1e9:.1f} GB; all {facts['all_experts']} experts would take "
        f"{extra / 1e9:.1f} GB more"
    )
    apart, gradient = found["logprobs"], found["gradient"]
    lines.append(
        f"log-probabilities at {facts['lengths'][0]} tokens: {apart['largest_difference']:.2e} apart at most, "
        f"{apart['mean_difference']:.2e} on average"
    )
    lines.append(f"gradients there: cosine {gradient['cosine']:.9f}, relative L2 {gradient['relative_l2']:.2e}")
    for kind, figures in gradient["groups"].items():
        lines.append(f"  {kind:<40} cosine {figures['cosine']:.9f}, relative L2 {figures['relative_l2']:.2e}")
    return {"claim": "capacity", "ours": ours, "peer": peer, "agreement": found, "left_out_bytes": extra}, lines


def main(argv: list[str]) -> None:
    values, parts = flags.FLAGS, {"ours", "table"}
    try:
        if len(argv) != 2 or argv[1] not in parts or not values.dir:
            raise ValueError(f"arguments {argv[1:]}; accepted: one of {sorted(parts)}, and --dir=DIR")
        if argv[1] == "ours":
            run_ours(values)
        else:
            result, lines = table(pathlib.Path(values.dir))
            _write_json(pathlib.Path(values.dir) / "comparison.json", result)
            print("\n".join(lines))
    except (ValueError, OSError) as error:
        command.fail(error)


if __name__ == "__main__":
    flags.DEFINE_string("dir", None, "Folder that both sides share.")
    flags.DEFINE_list("lengths", ["4096", "8192", "16384", "32768"], "Prompt lengths, the boundary token included.")
    flags.DEFINE_list("groups", ["2", "8"], "Group sizes.")
    flags.DEFINE_integer("response", 64, "Tokens of each response.", lower_bound=1)
    flags.DEFINE_integer("layers", 4, "Layers: a slice from the first all-sparse group on, or all.")
    flags.DEFINE_integer("experts", 64, "Routed experts a layer; 0: all.")
    flags.DEFINE_integer("rank", 8, "Rank of every adapter.", lower_bound=1)
    flags.DEFINE_integer("chunk", 4096, "Tokens of a capture step of ours.", lower_bound=1)
    flags.DEFINE_enum("dtype", "bfloat16", config_lib.DTYPES, "Of the weights.")
    flags.DEFINE_enum("kernels", "auto", ("auto", "reference"), "Implementation of our operations.")
    flags.DEFINE_integer("seed", 0, "Seed of weights; adapters and tokens take the next two.", lower_bound=0)
    flags.DEFINE_string("architecture", str(model_slice.ARCHITECTURE), "A Hugging Face config.json.")
    app.run(main, flags_parser=command.parse_flags)
