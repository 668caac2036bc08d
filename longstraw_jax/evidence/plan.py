"""Ahead-of-time capacity: compiles every program of the transaction for a mesh and adds up each device's bytes."""

import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

from longstraw_jax import expert_dispatch
from longstraw_jax.config import ConfigError, ModelConfig
from longstraw_jax.evidence import hlo_report, plan_costs
from longstraw_jax.evidence.memory import peak_bytes
from longstraw_jax.evidence.plan_programs import Kinds, Program, Sizes, programs, resident
from longstraw_jax.evidence.traced_flops import traced_flops
from longstraw_jax.prefix import pages
from longstraw_jax.types import PAGE, Model
from pallas_kernels.indexer_topk import reference as indexer_topk

HOST = "host"  # memory kind of what rests in pinned host memory
_RESOURCES = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory")


def check_tokens(config: ModelConfig, tokens: int, response: int, devices: int) -> None:
    """Raises ConfigError unless the pages are whole on every device and all positions are in the window."""
    row = PAGE * devices
    if tokens < row or tokens % row:
        below, above = max(tokens // row, 1) * row, (tokens // row + 1) * row
        nearest = " or ".join(str(x) for x in sorted({below, above}))
        raise ConfigError(
            f"tokens={tokens} does not fill whole pages of {PAGE} tokens on {devices} devices; accepted: a multiple of "
            f"{row}, the nearest are {nearest}"
        )
    if tokens + response > config.max_position_embeddings:
        raise ConfigError(
            f"tokens={tokens} and a response of {response} exceed max_position_embeddings="
            f"{config.max_position_embeddings}; accepted: fewer, or an opt-in to YaRN, "
            f"--yarn_positions={tokens + response}"
        )


def check_chunk(model: Model, chunk: int, tokens: int) -> None:
    """Raises ValueError unless all devices take the same share of a chunk, in whole pages where these rest on hosts."""
    row = model.devices * (PAGE if model.prefix_store == "host" else 1)
    if not 1 <= chunk <= tokens or chunk % row:
        raise ValueError(f"chunk={chunk}; accepted: a multiple of {row}, at most {tokens}")


def shard_bytes(tree: Any) -> dict[str, int]:
    """Bytes of a device's shares of a tree of ShapeDtypeStructs: in its own memory and in the host's."""
    found = {"device": 0, HOST: 0}
    for x in jax.tree.leaves(tree):
        kind = HOST if x.sharding.memory_kind == "pinned_host" else "device"
        found[kind] += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return found


def capture_estimate(
    config: ModelConfig, chunk: int, capacity: int, devices: int, load: float, *, experts_in_place: bool = False
) -> int:
    """Bytes of a capture chunk's temporaries, by formula: to choose a chunk before anything is compiled.

    A layer's keys and latents with the chunk's own behind (on several devices gathered, and once more while pages are
    put in order), its weights, its experts' weights, a block's scores with what sorting them takes, one pass of expert
    rows, and a token's activations.

    Args:
      experts_in_place: a kernel reads the experts out of their stack, without a copy.
    """
    c, item, tokens = config, 2 if config.dtype != "float32" else 4, chunk // devices
    d, f, heads = c.hidden_size, c.moe_intermediate_size, c.num_attention_heads
    copies = 2 if devices > 1 else 1
    gathered = copies * (capacity + chunk) * (c.latent_dim + c.index_head_dim) * item
    layer = sum(plan_costs.gathered_weight_bytes(c).values()) // c.num_hidden_layers
    experts = 0 if experts_in_place else 2 * 3 * d * f * c.n_routed_experts // devices * item
    scores = indexer_topk.QUERIES * (indexer_topk.KEYS + c.index_topk) * 4 * 4
    room, _ = expert_dispatch.expert_room(tokens, c.num_experts_per_tok, c.n_routed_experts // devices, devices, load)
    rows = devices * room * (5 * d * item + 2 * d * 4 + 3 * f * item)
    rows += tokens * c.num_experts_per_tok * d * (2 * item + 4)
    activations = tokens * heads * (2 * c.latent_dim * item + c.kv_lora_rank * (3 * 4 + item) + c.v_head_dim * item)
    activations += tokens * (8 * d * item + c.q_lora_rank * 4 + 4 * c.index_topk * 4)
    return gathered + copies * layer + experts + scores + rows + activations


def choose_chunk(
    model: Model, optimizer: optax.GradientTransformation, tokens: int, mode: str, memory: int | None
) -> int:
    """The largest chunk, a power of two times a page a device, whose capture takes a third of the free memory.

    The rest covers what the formula leaves out. Larger chunks gather every layer's pages less often. The smallest where
    nothing is free or no memory is given.
    """
    row = PAGE * model.devices
    have = resident(model, optimizer, tokens, mode)
    held = sum(shard_bytes(part)["device"] for part in (have.base, have.state, have.prefix, have.page_grads))
    capacity = pages.page_count(tokens, model.devices) * PAGE
    fitting = row
    for power in range(1, 12):
        chunk = row << power
        if memory is None or chunk > tokens:
            break
        if capture_estimate(model.config, chunk, capacity, model.devices, model.expert_load) < (memory - held) / 3:
            fitting = chunk
    return fitting


def _kind_bytes(kinds: Kinds) -> dict[str, dict[str, int]]:
    return {name: shard_bytes(tree) for name, tree in kinds.items()}


def compile_program(program: Program, devices: int, memory: int | None) -> dict[str, Any]:
    """Compiles one program and reports it; a refusal for memory is a result too.

    What cannot fit before any temporaries is not compiled.

    Returns:
      JSON values: "bytes" of a device by kind ("temporaries" None where the compiler refused), "host_bytes",
      "device_total", "fits" and "over_bytes" against `memory`, "refused" (the compiler's words or None), "flops" and
      "received_bytes" by formula, as traced and as the compiler says, "seconds" (of the wall, and of all cores) and
      "compiler_memory_bytes", the process's peak so far.

    Raises:
      jax.errors.JaxRuntimeError: the compiler failed for another reason than memory.
    """
    arguments, beside = _kind_bytes(program.arguments), _kind_bytes(program.beside)
    held = {name: found["device"] for name, found in (arguments | beside).items()}
    hosted = {name: found[HOST] for name, found in (arguments | beside).items() if found[HOST]}
    start = time.perf_counter()
    traced = program.trace()
    ready, ready_cpu = time.perf_counter(), time.process_time()
    report: dict[str, Any] = {
        "flops": {"formula": program.flops, "formula_routed_experts": program.expert_flops, "compiler": None}
        | {f"traced_{kind}": count for kind, count in traced_flops(traced.jaxpr.jaxpr)._asdict().items()},
        "received_bytes": {"formula": program.received, "compiler": None},
        "refused": None,
        "largest_arrays": [],
    }
    made = {"outputs": None, "temporaries": None, "code": None, "layout padding": None}
    compiled = None
    if memory is not None and sum(held.values()) > memory:
        report["refused"] = f"not compiled: what is resident alone is over by {sum(held.values()) - memory} bytes"
    else:
        try:
            compiled = traced.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            if not _RESOURCES.search(str(error)):
                raise
            report["refused"] = str(error).splitlines()[0]
    if compiled is not None:
        stats = compiled.memory_analysis()
        logical = sum(found["device"] for found in arguments.values())
        made = {
            "outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
            "code": stats.generated_code_size_in_bytes,
            "layout padding": max(0, stats.argument_size_in_bytes - logical),
        }
        costs = compiled.cost_analysis() or {}
        text = compiled.as_text()
        report["flops"]["compiler"] = costs.get("flops")
        report["received_bytes"]["compiler"] = hlo_report.collective_bytes(text, devices)
        report["largest_arrays"] = [list(row) for row in hlo_report.largest_arrays(text)]
    done, done_cpu = time.perf_counter(), time.process_time()
    total = sum(held.values()) + sum(x or 0 for x in made.values())
    over = None if memory is None else max(0, total - memory)
    return report | {
        "bytes": held | made,
        "host_bytes": hosted,
        "device_total": total,
        "over_bytes": over,
        "fits": None if memory is None else report["refused"] is None and over == 0,
        "seconds": {"trace": ready - start, "compile": done - ready, "compile_cpu": done_cpu - ready_cpu},
        "compiler_memory_bytes": peak_bytes()[0],
    }


def run_plan(
    model: Model,
    optimizer: optax.GradientTransformation,
    sizes: Sizes,
    memory: int | None,
    *,
    only: tuple[str, ...] | None = None,
    progress: Callable[[str, dict[str, Any]], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Compiles the transaction's programs one after the other; see `compile_program`.

    Args:
      memory: of a device, None for no limit.
      only: names of the programs to compile, None for all.
      progress: called with the name and the report of each.
    """
    reports = {}
    for name, program in programs(model, optimizer, sizes).items():
        if only is not None and name not in only:
            continue
        reports[name] = compile_program(program, model.devices, memory)
        if progress is not None:
            progress(name, reports[name])
    return reports
