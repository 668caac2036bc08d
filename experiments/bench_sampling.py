"""Decode speed of groups from one resident prompt, beside what reading the step's bytes once would take.

python experiments/bench_sampling.py --tokens=65536,1048576 --groups=1,8,64 --out=runs/sampling.json

A full-width slice of GLM-5.2 as long_context.py builds it (--layers, --experts; random weights) decodes --response
tokens a member. The resident prompt is random numbers of the shape that a capture leaves: a step's time depends on
their values by the selection alone, which they scatter over the whole prompt, the dearest case to read.

The floor of a step counts, at the rate of a copy measured in the same run: every weight once (of the routed experts
those that a step's rows choose), the index keys once a full layer for all rows together, the selected latents and the
tail of each row; not the activations. Beside it stands the floor that matrix products set.

--end_chance=0.02 ends a member at each token by that chance, so that members are ragged; --slots=0,8 decodes each group
at once and 8 members at a time, a free row taking the next member. The table then tells the decode steps beside those
of one batch after another.

Prints a row as it is measured; the receipt grows with each. Exit status: 0 all were measured, 1 some did not fit the
device (the others are there), 2 bad usage.
"""

import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # the default of 0.75 leaves a quarter of a GPU unused

import jax
import jax.numpy as jnp
import model_slice
import numpy as np
from absl import app, flags
from bench.rates import rates
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from longstraw_jax import command, lora, sampling
from longstraw_jax.config import LoraConfig, ModelConfig
from longstraw_jax.evidence import kernels, memory, plan_costs, prerequisites, receipt
from longstraw_jax.io.whole_file import write_whole
from longstraw_jax.model import choices, decoder, draw
from longstraw_jax.prefix import pages
from longstraw_jax.types import Model, Params, PrefixState

EXHAUSTED = ("RESOURCE_EXHAUSTED", "Out of memory")
PROMPT = "random numbers of a captured prompt's shape, mean 0, deviation 1; not captured"
ON_CPU = {"side": 256, "numbers": 2**22, "repeats": 2}  # of the rates
COLUMNS = (
    ("tokens", "{tokens}"), ("group", "{group}"), ("slots", "{slots}"), ("steps", "{steps}"),
    ("batches' steps", "{batch_steps}"), ("ms a step", "{step_ms:.3f}"), ("tokens/s", "{tokens_per_second:.1f}"),
    ("GB read", "{floor_gb:.3f}"), ("floor ms", "{floor_ms:.3f}"), ("of floor", "{of_floor:.1%}"),
    ("products' floor ms", "{product_ms:.3f}"),
)  # fmt: skip


def integers(flag: str, given: list[str], least: int) -> list[int]:
    """Raises ValueError for anything but integers of at least `least`."""
    if not given or not all(text.strip().isdecimal() and int(text) >= least for text in given):
        raise ValueError(f"--{flag}={','.join(given)}; accepted: integers of at least {least}, as 8,64")
    return [int(text) for text in given]


def random_prefix(model: Model, tokens: int, seed: int) -> PrefixState:
    """A resident state of `tokens` that no prompt left, see PROMPT."""
    shapes = pages.prefix_shapes(model, tokens)

    def pool(number, shape):
        key = jax.random.fold_in(jax.random.key(seed), number)
        *layers, count, rows, width = shape.shape
        flat = (int(np.prod(layers)), count * rows, width)
        drawn = draw.normal(key, shape=flat, dtype=shape.dtype, std=1.0, mesh=None, spec=P())
        return drawn.reshape(shape.shape)

    latents = tuple(pool(2 * s, x) for s, x in enumerate(shapes.latents))
    keys = tuple(pool(2 * s + 1, x) for s, x in enumerate(shapes.index_keys))
    return PrefixState(latents, keys, jnp.int32(tokens), jnp.zeros((2,), jnp.uint32))


def bytes_of(tree: Params) -> dict[str, int]:
    """Bytes of weights that a decode step reads: those of the routed experts, and the others without the embedding."""
    found = {"routed": 0, "rest": 0}
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        if "embed_tokens" not in names:
            found["routed" if "experts" in names else "rest"] += x.size * x.dtype.itemsize
    return found


def share_of_experts(config: ModelConfig, routes: choices.Choices, rows: float) -> float:
    """Of a layer's experts, the share that a step of `rows` tokens reads: expected, with the run's own routing."""
    shares = []
    for ids in choices.by_layer(config, routes, "routes").values():
        taken = ids[(ids >= 0).all(-1)]
        chance = np.bincount(taken.reshape(-1), minlength=config.n_routed_experts) / max(len(taken), 1)
        shares.append(float(np.mean(1 - (1 - np.minimum(chance, 1.0)) ** rows)))
    return statistics.fmean(shares) if shares else 0.0


def step_bytes(
    config: ModelConfig, adapters: LoraConfig, tokens: int, rows: float, tail: float, experts: float
) -> dict[str, float]:
    """Bytes that a decode step reads at least, by kind.

    Args:
      tokens: resident.
      rows: members that decode, on average.
      tail: tokens of a member's own so far, on average.
      experts: share of the routed experts that the rows choose.
    """
    layers, item = plan_costs.layers(config), jnp.dtype(config.dtype).itemsize
    base, low_rank = (bytes_of(x) for x in (decoder.param_shapes(config), lora.adapter_shapes(config, adapters)))
    own = layers.every * config.latent_dim + layers.full * config.index_head_dim
    return {
        "weights": float(base["rest"]),
        "routed experts": experts * base["routed"],
        "adapters": low_rank["rest"] + experts * low_rank["routed"],
        "index keys": float(layers.full * tokens * config.index_head_dim * item),
        "selected latents": rows * layers.every * min(config.index_topk, tokens) * config.latent_dim * item,
        "tails": rows * tail * own * item,
    }


def batch_steps(lengths: Int[np.ndarray, "G"], slots: int) -> int:
    """Decode steps of one batch of `slots` members after another, each as long as its longest."""
    return int(sum(lengths[first : first + slots].max() for first in range(0, len(lengths), slots)))


def measured(
    model: Model,
    base: Params,
    adapters: Params,
    prefix: PrefixState,
    group: int,
    slots: int,
    values: Any,
    matmul_tflops: float,
    copy_tbps: float,
) -> dict[str, Any]:
    """A row: the group decoded once unwatched, then --repeats times."""
    config, tokens = model.config, int(prefix.length)
    ends = tuple(range(round(values.end_chance * config.vocab_size)))  # random weights: about evenly likely

    args = (base, adapters, prefix, jnp.int32(0), jax.random.key(values.seed), jnp.float32(1.0))
    started = time.perf_counter()
    program = sampling.draw_group.lower(
        model, *args, group=group, max_new_tokens=values.response, top_p=1.0, eos_ids=ends, record=("routes",),
        slots=slots,
    ).compile()  # fmt: skip
    compiling, analysis = time.perf_counter() - started, program.memory_analysis()

    def decode():
        started = time.perf_counter()
        drawn = jax.block_until_ready(program(*args))
        return time.perf_counter() - started, drawn

    _, drawn = decode()
    seconds = [decode()[0] for _ in range(values.repeats)]
    lengths, steps, median = np.asarray(drawn.lengths), int(drawn.steps), statistics.median(seconds)
    rows = float(lengths.sum() / steps)
    tail = float((lengths * (lengths + 1.0) / 2).sum() / lengths.sum())
    routes = jax.tree.map(np.asarray, drawn.choices)
    experts = share_of_experts(config, routes, rows)
    read = step_bytes(config, model.lora, tokens, rows, tail, experts)
    flops = rows * (plan_costs.forward_flops(config, model.lora, 1, tokens) + plan_costs.head_flops(config))
    floor = sum(read.values()) / (copy_tbps * 1e12)
    return {
        "tokens": tokens + 1,
        "group": group,
        "slots": slots or group,
        "steps": steps,
        "batch_steps": batch_steps(lengths, slots or group),
        "lengths": lengths.tolist(),
        "compile_seconds": compiling,
        "seconds": seconds,
        "step_ms": 1e3 * median / steps,
        "tokens_per_second": float(lengths.sum()) / median,
        "rows_a_step": rows,
        "share_of_experts": experts,
        "step_bytes": read,
        "floor_gb": sum(read.values()) / 1e9,
        "floor_ms": 1e3 * floor,
        "of_floor": floor * steps / median,
        "step_flops": flops,
        "product_ms": 1e3 * flops / (matmul_tflops * 1e12),
        "temporary_bytes": None if analysis is None else int(analysis.temp_size_in_bytes),
        "peak_bytes": memory.peak_bytes()[0],
    }


def table_lines(rows: list[dict[str, Any]]) -> list[str]:
    """A Markdown table of the rows; one that failed says why."""
    lines = ["| " + " | ".join(name for name, _ in COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for row in rows:
        shown = COLUMNS[:3] if "error" in row else COLUMNS
        cells = [form.format(**row) for _, form in shown] + [row[name] for name in ("error",) if name in row]
        lines.append("| " + " | ".join(cells + [""] * (len(COLUMNS) - len(cells))) + " |")
    return lines


def check_memory(model: Model, tokens: int, rows: int, response: int) -> None:
    """Raises ValueError where weights, pages, tails and logits are more than the device's memory."""
    config = model.config
    sizes = {
        "weights": decoder.param_shapes(config),
        "adapters": lora.adapter_shapes(config, model.lora),
        "tails": jax.eval_shape(lambda: sampling.empty_tails(model, rows, response)),
    }
    need = {name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for name, tree in sizes.items()}
    need["pages"] = pages.prefix_bytes(config, tokens, 1)
    need["logits"] = prerequisites.LOGIT_ROWS * rows * config.vocab_size * 4
    available, source = prerequisites.device_memory(None)
    if available is not None and sum(need.values()) > available:
        listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in need.items())
        raise ValueError(
            f"{sum(need.values()) / 1e9:.2f} GB ({listed}); accepted: {available / 1e9:.2f} GB ({source}), by a "
            "smaller --experts, --layers, --tokens or --groups, or by --slots"
        )


def run(values: Any) -> dict[str, Any]:
    """The receipt, written as its rows are measured. Raises ValueError or OSError for bad input."""
    tokens, groups = integers("tokens", values.tokens, 2), integers("groups", values.groups, 1)
    slots = integers("slots", values.slots, 0)
    if not 0 <= values.end_chance < 1:
        raise ValueError(f"--end_chance={values.end_chance}; accepted: 0 to below 1")
    out = pathlib.Path(values.out)
    if out.suffix != ".json":
        raise ValueError(f"--out={values.out}; accepted: a file name that ends in .json")
    raw = model_slice.load(values.architecture, values.layers, values.experts)
    config = model_slice.model_config(raw, max(tokens) + values.response)
    model = decoder.make_model(config, lora=model_slice.adapters(config, values.rank), kernels=values.kernels)
    most = max(sampling.slots_of(group, 1, few)[1] for group in groups for few in slots)
    check_memory(model, max(tokens), most, values.response)
    device = jax.devices()[0]
    matmul_tflops, copy_tbps = rates(**ON_CPU) if device.platform == "cpu" else rates()
    print(f"{device.device_kind}: bf16 matmul {matmul_tflops:.0f} TFLOP/s, copy {copy_tbps:.2f} TB/s", flush=True)
    result = {
        "complete": False,
        "prompt": PROMPT,
        **receipt.made_by(),
        "flags": {name: getattr(values, name) for name in FLAGS},
        "architecture": raw,
        "kernels": kernels.implementations(model),
        "matmul_tflops": matmul_tflops,
        "copy_tbps": copy_tbps,
        "rows": [],
    }
    base = decoder.init_params(config, values.seed)
    adapters = lora.init_adapters(config, model.lora, values.seed)
    print("\n".join(table_lines([])), flush=True)
    for length in tokens:
        prefix = jax.block_until_ready(random_prefix(model, length - 1, values.seed))
        for group, few in dict.fromkeys((g, 0 if s >= g else s) for g in groups for s in slots):
            try:
                row = measured(model, base, adapters, prefix, group, few, values, matmul_tflops, copy_tbps)
            except jax.errors.JaxRuntimeError as error:  # one that does not fit must not cost the others
                text = " ".join(str(error).split())
                if not any(word in text for word in EXHAUSTED):
                    raise
                row = {"tokens": length, "group": group, "slots": few or group, "error": text[:200]}
            result["rows"].append(row)
            print(table_lines([row])[2], flush=True)
            write_whole(out, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
        for pool in jax.tree.leaves(prefix):
            pool.delete()  # before the next prompt's
    result["complete"] = not any("error" in row for row in result["rows"])
    write_whole(out, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    return result


FLAGS = (
    "tokens", "groups", "slots", "end_chance", "response", "repeats", "layers", "experts", "rank", "kernels", "seed",
)  # fmt: skip


def main(_: list[str]) -> None:
    values = flags.FLAGS
    try:
        result = run(values)
    except (ValueError, OSError) as error:
        command.fail(error)
    print(f"receipt: {values.out}")
    sys.exit(0 if result["complete"] else 1)


if __name__ == "__main__":
    flags.DEFINE_list("tokens", ["65536", "1048576"], "Prompt lengths, the boundary token included.")
    flags.DEFINE_list("groups", ["1", "8", "64"], "Group sizes.")
    flags.DEFINE_list("slots", ["0"], "Members that decode at once; 0: the whole group.")
    flags.DEFINE_float("end_chance", 0.0, "Share of the vocabulary that ends a member; 0: all take --response tokens.")
    flags.DEFINE_integer("response", 64, "Most tokens of a member.", lower_bound=1)
    flags.DEFINE_integer("repeats", 3, "Timed decodes; the median counts.", lower_bound=1)
    flags.DEFINE_integer("layers", 4, "Layers: a slice from the first all-sparse group on, or all.")
    flags.DEFINE_integer("experts", 0, "Routed experts a layer; 0: all.")
    flags.DEFINE_integer("rank", 8, "Rank of every adapter.", lower_bound=1)
    flags.DEFINE_enum("kernels", "auto", ("auto", "reference"), "Implementation of the operations.")
    flags.DEFINE_integer("seed", 0, "Seed of weights, adapters, prompt and sampling.", lower_bound=0)
    flags.DEFINE_string("architecture", str(model_slice.ARCHITECTURE), "A Hugging Face config.json.")
    flags.DEFINE_string("out", "runs/sampling.json", "The receipt.")
    app.run(main, flags_parser=command.parse_flags_alone)
