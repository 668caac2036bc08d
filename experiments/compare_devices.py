"""One transaction on one device and on several: the same selections, gradients and step, and how much faster.

python experiments/compare_devices.py --devices=2 --tokens=65536 --layers=2 --out=devices.json

The prompt lies by pages over the devices, the experts by number, collectives go through the backend's library (NCCL on
GPUs). Both sides have the same random weights at the checkpoint's scale, adapters away from zero, the prompt and the
group that the one device sampled; replay is held to the choices that the one device made for the responses, because
gradients jump where round-off decides a choice the other way. Every phase runs twice and the second time counts.
Exit status: 0 within tolerance, 1 not, 2 bad usage.
"""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import model_slice
import numpy as np
from absl import app, flags

from longstraw_jax import command, fingerprint, lora, replay, rollout, sharding, train
from longstraw_jax.evidence import comparison, flips, kernels, memory, parity, receipt
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.model import choices, decoder
from longstraw_jax.prefix import capture, refresh
from longstraw_jax.types import Model, Params

ADAPTER_SEED, PROMPT_SEED = 1, 2  # added to --seed, which draws the weights
# Fixed before the first run on two GPUs. bf16: partial outputs of attention, experts and vocabulary are rounded before
# they meet, 2^-8 each, over two layers and their backward pass. Deeper layers' choices follow from what round-off
# upstream made of their inputs, so only a share is bounded there, and a flipped one moves latents in fp32 too.
TOLERANCES = {
    "float32": comparison.Tolerance(relative_l2=1e-4, flipped=1e-3, gap=1e-3, cosine=0.99999),
    "bfloat16": comparison.Tolerance(relative_l2=2**-5, flipped=5e-2, gap=2**-4, cosine=0.9995),
}


@dataclasses.dataclass(frozen=True)
class Side:
    """What a transaction on some devices made and took; arrays on the host.

    Attributes:
      selected: the choices of the prompt's tokens [layers, 1, S - 1, ..].
      group: what it replayed.
      logp: [G, T] under the policy.
      sampled: ids [G, T] that it samples itself with the one key.
      grads, stepped: of the mean loss, fp32; how far one optimizer step moves the adapters.
      seconds: phase -> of its second run.
    """

    weights_fingerprint: str
    selected: choices.Choices
    group: rollout.Group
    logp: np.ndarray
    sampled: np.ndarray
    grads: Params
    stepped: Params
    seconds: dict[str, float]


def transact(
    model: Model,
    policy: rollout.PolicyConfig,
    optimizer: Any,
    prompt: np.ndarray,
    seed: int,
    group: rollout.Group | None,
) -> Side:
    """Capture, sample, score, replay, finalise and step on the model's mesh.

    Args:
      group: to replay; None for the one sampled here, with its own log-probabilities and choices.
    """
    seconds: dict[str, float] = {}

    def second(name: str, action: Callable[[], Any]) -> Any:
        jax.block_until_ready(action())
        started = time.perf_counter()
        result = jax.block_until_ready(action())
        seconds[name] = time.perf_counter() - started
        print(f"{model.devices} device(s): {name:<20} {seconds[name]:9.3f} s", flush=True)
        return result

    base = decoder.init_params(model.config, seed, mesh=model.mesh)
    specs = lora.adapter_specs(model.config, model.lora)
    adapters = jax.tree.map(
        lambda x, spec: jax.device_put(x, sharding.named(model.mesh, spec)),
        parity.seeded_adapters(model, seed + ADAPTER_SEED), specs,
    )  # fmt: skip
    state = train.fresh_state(model, optimizer, adapters)
    words = fingerprint.tree_fingerprint(base)
    kept: list[choices.Choices] = []

    def captured():
        kept.clear()
        return capture.capture(
            model, base, None if policy.mode == "frozen" else adapters, prompt[:-1], chunk=policy.chunk,
            fingerprint=jnp.zeros((2,), jnp.uint32), record=choices.KINDS, keep=kept.append,
        )  # fmt: skip

    prefix = second("capture", captured)
    counts = [n for _, n, _ in capture.chunk_ids(model, prompt[:-1], policy.chunk)]
    selected = choices.joined(jax.device_get(kept), counts, model.config.index_topk)
    kept.clear()
    resident = refresh.Resident(prompt, prefix, captured_at=0)
    samples = second("sample", lambda: rollout.sample(model, policy, base, adapters, resident, jax.random.key(seed)))
    rewards = np.linspace(0, 1, policy.group, dtype=np.float32)  # advantages of both signs, no reward twice
    own, _ = rollout.unscored_group(model, policy, int(prompt[-1]), samples, rewards)
    scored = own if group is None else group
    rows = (scored.inputs, scored.targets, scored.lengths, policy.temperature)
    score = second(
        "score", lambda: replay.score_and_choices(model, base, adapters, prefix, *rows, record=choices.KINDS)
    )
    logp, chosen = jax.device_get((score[0], score[2]))
    if group is None:
        group = dataclasses.replace(own, old_logp=np.where(own.mask, logp, 0).astype(np.float32), choices=chosen)
    mode = "replay and reverse pass" if policy.mode == "exact" else "replay"
    side = parity.Side(model, base, adapters)
    grads, total = second(mode, lambda: parity.replay_gradient(side, policy, resident, group))
    after, info = second("finalise and step", lambda: train.apply_update(model, optimizer, state, total))
    if not bool(info["taken"]):
        raise FloatingPointError(f"the step was skipped: {int(info['nonfinite'])} non-finite gradients")
    stepped = jax.tree.map(np.subtract, *jax.device_get((after.adapters, adapters)))
    return Side(words, selected, group, logp, np.asarray(samples.tokens), grads, stepped, seconds)


def problems_of(flipped: dict[str, Any], figures: dict[str, Any], tolerance: comparison.Tolerance) -> list[str]:
    """Why the two sides do not agree, a line each."""
    first = min(flipped["selections"])
    count = flipped["selections"][first]
    problems = []
    if not figures["weights_alike"]:
        problems.append("the weights differ; accepted: the same bits")
    if count["flipped"] or count["invalid"]:
        problems.append(
            f"layer {first}: {count['flipped']} of {count['choices']} selected keys differ; accepted: 0, as its input "
            "is the same"
        )
    return problems + comparison.choice_problems(flipped, tolerance) + gradient_problems(figures, tolerance)


def gradient_problems(figures: dict[str, Any], tolerance: comparison.Tolerance) -> list[str]:
    """What of the gradient is out of tolerance, a line each."""
    gradient, problems = figures["gradient"], []
    if gradient["nonfinite"]:
        problems.append(f"gradient: {gradient['nonfinite']} entries are not finite; accepted: 0")
        return problems
    apart, cosine = gradient["relative_l2"], gradient["cosine"]
    if apart is None or not apart <= tolerance.relative_l2:
        problems.append(f"gradient relative_l2 is {apart}; accepted: at most {tolerance.relative_l2:g}")
    if cosine is None or not cosine >= tolerance.cosine:
        problems.append(f"gradient cosine is {cosine}; accepted: at least {tolerance.cosine:g}")
    return problems


def run(values: Any) -> dict[str, Any]:
    """The receipt of one comparison. Raises ValueError for bad input, ShardingError for a mesh that does not fit."""
    if values.devices < 2:
        raise ValueError(f"--devices={values.devices}; accepted: at least 2")
    if values.response % values.devices:
        raise ValueError(f"--response={values.response}; accepted: a multiple of --devices={values.devices}")
    if values.group < 2:
        raise ValueError(f"--group={values.group}; accepted: at least 2, as equal rewards have no gradient")
    raw = model_slice.load(values.architecture, values.layers, values.experts)
    architecture = model_slice.model_config(raw, values.tokens + values.response)
    if architecture.dtype not in TOLERANCES:
        raise ValueError(f"--architecture: dtype={architecture.dtype}; accepted: {' or '.join(TOLERANCES)}")
    adapters = model_slice.adapters(architecture, values.rank)
    options = dict(lora=adapters, kernels=values.kernels)
    wide = decoder.make_model(architecture, mesh=sharding.make_mesh(values.devices), **options)
    single = decoder.make_model(architecture, **options)
    policy = rollout.PolicyConfig(
        eos_ids=(), capacity=values.tokens, mode=values.mode, group=values.group, max_new_tokens=values.response,
        chunk=values.chunk,
    )  # fmt: skip
    rng = np.random.default_rng(values.seed + PROMPT_SEED)
    prompt = rng.integers(0, architecture.vocab_size, values.tokens).astype(np.int32)
    for model in (single, wide):
        capture.room(model, prompt[:-1], values.chunk)
    optimizer, tolerance = train.make_optimizer(train.OptimizerConfig()), TOLERANCES[architecture.dtype]
    precision = "highest" if architecture.dtype == "float32" else None  # fp32 means fp32 products
    with jax.default_matmul_precision(precision):
        wanted = transact(single, policy, optimizer, prompt, values.seed, None)
        found = transact(wide, policy, optimizer, prompt, values.seed, wanted.group)
    flipped = flips.count(architecture, found.selected, wanted.selected)
    targets, mask = comparison.tensor_targets(single), wanted.group.mask
    figures = {
        "weights_alike": found.weights_fingerprint == wanted.weights_fingerprint,
        "gradient": comparison.compare(found.grads, wanted.grads, targets),
        "step": comparison.compare(found.stepped, wanted.stepped, targets),
        "largest_logp_difference": float(np.abs(found.logp - wanted.logp)[mask].max()),
        "sampled_alike": float((found.sampled == wanted.sampled).mean()),
    }
    problems = problems_of(flipped, figures, tolerance)
    seconds = {"1": wanted.seconds, str(values.devices): found.seconds}
    totals = {devices: sum(phases.values()) for devices, phases in seconds.items()}
    return {
        "claim": "gradient",
        "passed": not problems,
        "problems": problems,
        **receipt.made_by(values.devices),
        "flags": {name: getattr(values, name) for name in FLAGS},
        "architecture": raw,
        "kernels": kernels.implementations(wide),
        "weights_fingerprint": wanted.weights_fingerprint,
        "tolerance": vars(tolerance),
        "flipped": flipped,
        **figures,
        "seconds": seconds,
        "seconds_in_all": totals,
        "speedup": {name: wanted.seconds[name] / found.seconds[name] for name in found.seconds}
        | {"all": totals["1"] / totals[str(values.devices)]},
        "peak_bytes": memory.peak_bytes()[0],
    }


def table(result: dict[str, Any]) -> list[str]:
    """What was measured, in lines."""
    one, many = result["seconds"].values()
    lines = [f"{'phase':<24} {'1 device':>10} {result['flags']['devices']:>4} devices   ratio"]
    lines += [f"{name:<24} {one[name]:9.3f} s {many[name]:10.3f} s {one[name] / many[name]:7.2f}" for name in one]
    lines.append(f"{'all':<24} {sum(one.values()):9.3f} s {sum(many.values()):10.3f} s {result['speedup']['all']:7.2f}")
    for kind, layers in result["flipped"].items():
        counts = ", ".join(f"layer {i}: {x['flipped']} of {x['choices']}" for i, x in layers.items())
        lines.append(f"{kind} that differ: {counts}")
    gradient, step = result["gradient"], result["step"]
    lines.append(
        f"gradient: cosine {gradient['cosine']:.9f}, relative L2 {gradient['relative_l2']:.2e}; "
        f"step: relative L2 {step['relative_l2']:.2e}"
    )
    lines.append(
        f"log-probabilities within {result['largest_logp_difference']:.1e}; "
        f"{result['sampled_alike']:.1%} of the tokens that each samples itself alike"
    )
    return lines


FLAGS = (
    "devices", "tokens", "layers", "experts", "group", "response", "chunk", "mode", "rank", "kernels", "seed",
)  # fmt: skip


def main(_: list[str]) -> None:
    values = flags.FLAGS
    try:
        result = run(values)
        if values.out:
            out = pathlib.Path(values.out)
            out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(out, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    except (ValueError, OSError, FloatingPointError) as error:
        command.fail(error)
    print("\n".join([*table(result), *result["problems"], "pass" if result["passed"] else "FAIL"]))
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    flags.DEFINE_integer("devices", 2, "Devices of the mesh beside one of them.")
    flags.DEFINE_integer("tokens", 65_536, "Tokens of the prompt, the boundary token included.", lower_bound=2)
    flags.DEFINE_integer("layers", 2, "Layers: a slice from the first all-sparse group on, or all.")
    flags.DEFINE_integer("experts", 0, "Routed experts a layer; 0: all.")
    flags.DEFINE_integer("group", 2, "Responses.")
    flags.DEFINE_integer("response", 64, "Tokens of each response.", lower_bound=1)
    flags.DEFINE_integer("chunk", 8192, "Tokens a capture step.", lower_bound=1)
    flags.DEFINE_enum("mode", "detached", rollout.MODES, "Prefix-gradient mode.")
    flags.DEFINE_integer("rank", 8, "Rank of every adapter.", lower_bound=1)
    flags.DEFINE_enum("kernels", "auto", ("auto", "reference"), "Implementation of the operations.")
    flags.DEFINE_integer("seed", 0, "Seed of weights, adapters, prompt and sampling.", lower_bound=0)
    flags.DEFINE_string("architecture", str(model_slice.ARCHITECTURE), "A Hugging Face config.json.")
    flags.DEFINE_string("out", "", "Receipt file.")
    app.run(main, flags_parser=command.parse_flags_alone)
