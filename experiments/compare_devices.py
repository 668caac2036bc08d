"""One transaction on one device and on several: the same selections, gradients and step, and how much faster.

python experiments/compare_devices.py --devices=2 --tokens=65536 --layers=2 --out=devices.json

The prompt lies by pages over the devices, the experts by number, collectives go through the backend's library (NCCL
on GPUs). Both sides have the same random weights at the checkpoint's scale, adapters away from zero, the prompt and
the group that the one device sampled; replay is held to the choices that the one device made for the responses,
because gradients jump where round-off decides a choice the other way. What each side chooses itself is counted, of
the prompt and of the responses. Every phase runs twice and the second time counts; capture and score hand their
choices back on the devices, what is compared is fetched outside of the clock.
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

from longstraw_jax import command, exact_gradient, fingerprint, lora, replay, rollout, sharding, train
from longstraw_jax import config as config_lib
from longstraw_jax.evidence import comparison, flips, kernels, memory, parity, receipt
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.model import choices, decoder
from longstraw_jax.prefix import capture, refresh
from longstraw_jax.types import Model, Params

ADAPTER_SEED, PROMPT_SEED = 1, 2  # added to --seed, which draws the weights
# Fixed before the first run on two GPUs. bf16: partial outputs of attention, experts and vocabulary are rounded before
# they meet, 2^-8 each, over two layers and their backward pass. A flipped choice moves what is behind it in fp32 too.
# Adam's first step divides every entry by its own size, so that in bf16 it says nothing.
TOLERANCES = {
    "float32": comparison.Tolerance(relative_l2=1e-4, flipped=1e-3, gap=0.0, cosine=0.99999, step_relative_l2=1e-2),
    "bfloat16": comparison.Tolerance(relative_l2=2**-5, flipped=5e-2, gap=0.0, cosine=0.9995),
}
LOGP = {"float32": 1e-3, "bfloat16": 0.05}  # nats a token


@dataclasses.dataclass(frozen=True)
class Side:
    """What a transaction on some devices made and took; arrays on the host.

    Attributes:
      captured: its own choices for the prompt's tokens [layers, 1, S - 1, ..].
      chosen: its own choices for each member's tokens [layers, 1, T, ..].
      group: what it replayed.
      logp: [G, T] under the policy, each side choosing for itself.
      sampled: ids [G, T] that it samples itself with the one key.
      grads, stepped: of the mean loss, fp32; how far one optimizer step moves the adapters.
      seconds: phase -> of its second run.
    """

    weights_fingerprint: str
    captured: choices.Choices
    chosen: list[choices.Choices]
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
    adapters = jax.tree.map(
        lambda x, spec: jax.device_put(x, sharding.named(model.mesh, spec)),
        parity.seeded_adapters(model, seed + ADAPTER_SEED),
        lora.adapter_specs(model.config, model.lora),
    )
    state = train.fresh_state(model, optimizer, adapters)
    words = fingerprint.tree_fingerprint(base)
    kept: list[choices.Choices] = []

    def capture_prompt():
        kept.clear()
        return capture.capture(
            model, base, None if policy.mode == "frozen" else adapters, prompt[:-1], chunk=policy.chunk,
            fingerprint=jnp.zeros((2,), jnp.uint32), record=choices.KINDS, keep=kept.append,
        )  # fmt: skip

    prefix = second("capture", capture_prompt)
    counts = [n for _, n, _ in capture.chunk_ids(model, prompt[:-1], policy.chunk)]
    captured = choices.joined(jax.device_get(kept), counts, model.config.index_topk)
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
    copies, exact = lora.per_device(adapters, model.mesh), policy.mode == "exact"

    def replayed():
        page_grads = exact_gradient.zero_page_grads(model, prefix) if exact else None
        total, page_grads = train.add_group(model, policy, base, copies, prefix, group, None, page_grads)
        return train.add_prompt(model, policy, base, copies, resident, page_grads, total) if exact else total

    total = second("replay and reverse pass" if exact else "replay", replayed)
    after, info = second("finalise and step", lambda: train.apply_update(model, optimizer, state, total))
    if not bool(info["taken"]):
        raise FloatingPointError(f"the step was skipped: {int(info['nonfinite'])} non-finite gradients")
    sums, count = jax.device_get((lora.finalise(total.grads, model.mesh), total.loss.count))
    return Side(
        weights_fingerprint=words,
        captured=captured,
        chosen=[jax.tree.map(lambda x, g=g: x[g], chosen) for g in range(policy.group)],
        group=group,
        logp=logp,
        sampled=np.asarray(samples.tokens),
        grads=jax.tree.map(lambda x: x / count, sums),
        stepped=jax.tree.map(np.subtract, *jax.device_get((after.adapters, adapters))),
        seconds=seconds,
    )


def flipped_choices(config: config_lib.ModelConfig, found: Side, wanted: Side) -> dict[str, Any]:
    """Choices that the sides do not share, by kind and layer: of the prompt, and of the members together."""
    prompt = flips.count(config, found.captured, wanted.captured)
    start, responses = jax.tree.leaves(wanted.captured)[0].shape[2], None
    for pair in zip(found.chosen, wanted.chosen, wanted.group.lengths, strict=True):
        *both, length = pair
        responses = flips.add(responses, flips.count(config, *(choices.rows(x, 0, length) for x in both), start=start))
    return {"prompt": prompt, "responses": responses}


def problems_of(figures: dict[str, Any], tolerance: comparison.Tolerance, logp: float) -> list[str]:
    """Why the two sides do not agree, a line each."""
    problems = [] if figures["weights_alike"] else ["the weights differ; accepted: the same bits"]
    for part, flipped in figures["flipped"].items():
        problems += [f"{part}: {line}" for line in comparison.choice_problems(flipped, tolerance)]
    for what in ("gradient", "step"):
        if count := figures[what]["nonfinite"]:
            problems.append(f"{what}: {count} entries are not finite; accepted: 0")
    for name, value, bound, good in (
        ("gradient relative_l2", figures["gradient"]["relative_l2"], tolerance.relative_l2, float.__le__),
        ("gradient cosine", figures["gradient"]["cosine"], tolerance.cosine, float.__ge__),
        ("step relative_l2", figures["step"]["relative_l2"], tolerance.step_relative_l2, float.__le__),
        ("largest difference of a log-probability", figures["largest_logp_difference"], logp, float.__le__),
    ):
        if bound is not None and (value is None or not good(value, float(bound))):
            most = "least" if good is float.__ge__ else "most"
            problems.append(f"{name} is {value}; accepted: at {most} {bound:g}")
    return problems


def run(values: Any) -> dict[str, Any]:
    """The receipt of one comparison. Raises ValueError for bad input, ShardingError for a mesh that does not fit."""
    if not 2 <= values.devices <= jax.device_count():
        raise ValueError(f"--devices={values.devices}; accepted: 2 to the {jax.device_count()} that are there")
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
    targets, mask = comparison.tensor_targets(single), wanted.group.mask
    figures = {
        "weights_alike": found.weights_fingerprint == wanted.weights_fingerprint,
        "flipped": flipped_choices(architecture, found, wanted),
        "gradient": comparison.compare(found.grads, wanted.grads, targets),
        "step": comparison.compare(found.stepped, wanted.stepped, targets),
        "largest_logp_difference": float(np.abs(found.logp - wanted.logp)[mask].max()),
        "sampled_alike": float((found.sampled == wanted.sampled).mean()),
    }
    problems = problems_of(figures, tolerance, LOGP[architecture.dtype])
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
        "tolerance": vars(tolerance) | {"logp": LOGP[architecture.dtype]},
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
    for part, kinds in result["flipped"].items():
        for kind, layers in kinds.items():
            counts = ", ".join(f"layer {i}: {x['flipped']} of {x['choices']}" for i, x in layers.items())
            lines.append(f"{kind} of the {part} that differ: {counts}")
    gradient, step = result["gradient"], result["step"]
    lines += [f"gradient {name}: {gradient[name]}" for name in ("cosine", "relative_l2")]
    lines.append(f"step relative_l2: {step['relative_l2']}")
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
    except (ValueError, OSError) as error:
        command.fail(error)
    except FloatingPointError as error:
        sys.exit(f"error: {error}")
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        text = " ".join(str(error).split())[:200]
        command.fail(f"out of memory: {text}; accepted: fewer --layers, --experts or --tokens, or a smaller --chunk")
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
