"""The plan's formulas against published figures and against compiled programs; what it says of memory."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny_models import tiny_config

from longstraw_jax import config as config_lib
from longstraw_jax import parallel, sharding, train
from longstraw_jax.config import ConfigError
from longstraw_jax.evidence import hlo_report, plan, plan_costs, plan_needs, plan_programs, topology
from longstraw_jax.evidence.traced_flops import traced_flops
from longstraw_jax.model import decoder
from longstraw_jax.prefix import pages
from pallas_kernels.indexer_topk import reference as indexer_topk

GLM52 = pathlib.Path(__file__).parents[1] / "experiments" / "configs" / "glm52.json"
MILLION = 1 << 20


def glm52() -> config_lib.ModelConfig:
    return config_lib.model_config_from_hf(json.loads(GLM52.read_text()))


def test_flops_of_glm52_are_those_of_its_architecture():
    """80.6 G of linear maps with the head, 22.2 G of attention, 182.5 G of index scores at 1,048,576 keys."""
    config = glm52()
    linear = plan_costs.linear_flops(config) + plan_costs.head_flops(config)
    assert linear == 2 * (40_298_947_584 - 78 * (2 * 6144 + 2048 + 512) - 21 * 2 * 128 - 6144 - 75 * 256)
    assert plan_costs.attention_flops(config, MILLION) == 78 * 2 * 64 * 2048 * (576 + 512)
    assert plan_costs.index_flops(config, MILLION) == 21 * MILLION * 8288
    assert plan_costs.attention_flops(config, 100) == 78 * 2 * 64 * 100 * (576 + 512)


def test_flops_of_a_traced_program():
    """Scans by their length, conditionals once, grouped products apart, gradients too."""
    x, w, sizes = jnp.zeros((8, 4)), jnp.zeros((3, 4, 5)), jnp.zeros(3, jnp.int32)

    def scanned(x):
        def turn(carry, _):
            carry = carry @ jnp.ones((4, 4))
            return jax.lax.cond(carry.sum() > 0, lambda c: (c @ c.T) @ c, lambda c: c, carry), None

        return jax.lax.scan(turn, x, length=7)[0]

    # The conditional products once for all turns.
    assert traced_flops(jax.make_jaxpr(scanned)(x).jaxpr) == (7 * 2 * 8 * 4 * 4 + 2 * (2 * 8 * 8 * 4), 0)
    grouped = lambda x, w: jax.lax.ragged_dot(x, w, sizes).sum()  # noqa: E731
    assert traced_flops(jax.make_jaxpr(grouped)(x, w).jaxpr) == (0, 2 * 8 * 4 * 5)
    assert traced_flops(jax.make_jaxpr(jax.grad(grouped, (0, 1)))(x, w).jaxpr) == (0, 3 * 2 * 8 * 4 * 5)


def test_bytes_between_devices_of_a_compiled_program():
    """Every collective, in a loop and out of it, by what a device receives of it."""
    mesh = sharding.make_mesh(8)

    def body(axis, x):
        def turn(carry, _):
            every = parallel.gather(carry, axis, 0)  # 8 x [4, 16]
            return parallel.scatter_sum(every * 2, axis, 0), None

        x, _ = jax.lax.scan(turn, x, length=5)
        return parallel.exchange(jnp.concatenate([x, x]), axis, 0, 0), parallel.largest(x.astype(jnp.int32).max(), axis)

    run = jax.jit(parallel.mapped(body, mesh, P(sharding.AXIS), (P(sharding.AXIS), P())))
    text = run.lower(jax.ShapeDtypeStruct((32, 16), jnp.float32)).compile().as_text()
    share = 4 * 16 * 4
    found = hlo_report.collective_bytes(text, 8)
    assert found["all-gather"] == 5 * 7 * share and found["reduce-scatter"] == 5 * 7 * share
    assert found["all-to-all"] == 2 * share * 7 / 8 and found["all-reduce"] == 2 * 4 * 7 / 8
    assert hlo_report.largest_arrays(text, 1)[0][0] >= 8 * share


LOOP = """
HloModule m

%body (p: (s32[], f32[16,8])) -> (s32[], f32[16,8]) {
  %p = (s32[]{:T(128)}, f32[16,8]{1,0}) parameter(0)
  %x = f32[16,8]{1,0} get-tuple-element(%p), index=1
  %g = f32[128,8]{1,0} all-gather(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %c = f32[16,8]{1,0} conditional(%i, %x, %x), branch_computations={%yes, %no}
}

%yes (q: f32[16,8]) -> f32[16,8] {
  %q = f32[16,8]{1,0} parameter(0)
  %a = f32[16,8]{1,0} all-to-all(%q), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

%no (r: f32[16,8]) -> f32[16,8] {
  %r = f32[16,8]{1,0} parameter(0)
}

%until (s: (s32[], f32[16,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %i.1 = s32[] get-tuple-element(%s), index=0
  ROOT %lt = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (t: f32[16,8]) -> f32[16,8] {
  %t = f32[16,8]{1,0} parameter(0)
  %w = (s32[], f32[16,8]) while(%tuple), condition=%until, body=%body
}
"""


def test_loops_that_a_compiler_does_not_annotate_count_by_their_condition():
    """As libtpu writes them; what is conditional in the loop counts once."""
    share = 16 * 8 * 4
    assert hlo_report.collective_bytes(LOOP, 8) == {"all-gather": 5 * 7 * share, "all-to-all": share * 7 / 8}
    both = LOOP.replace("  ROOT %lt", "  ROOT %both = pred[] and(%lt, %some)\n  %lt")  # ends earlier if data say so
    assert hlo_report.collective_bytes(both, 8)["all-gather"] == 7 * share


def test_tokens_must_fill_pages_and_stay_in_the_window():
    config = glm52()
    with pytest.raises(ConfigError, match="tokens=2097000 .* the nearest are 2095104 or 2097152"):
        plan.check_tokens(config, 2_097_000, 512, 32)
    with pytest.raises(ConfigError, match="tokens=5 .* the nearest are 2048"):
        plan.check_tokens(config, 5, 512, 32)
    with pytest.raises(ConfigError, match="2097152 .*512 exceed .*=1048576; .*--yarn_positions=2097664"):
        plan.check_tokens(config, 2_097_152, 512, 32)
    plan.check_tokens(config_lib.extend_positions(config, 2_097_664), 2_097_152, 512, 32)


def test_unknown_topologies_are_refused_with_those_known():
    with pytest.raises(topology.TopologyError, match="'tpu:v5p:8x8' .*tpu:v5p:4x4x2, tpu:v6e:4x8, .*cpu:32"):
        topology.parse("tpu:v5p:8x8")


# The reduced size: dimensions far enough apart that an array shows in its bytes what it is.
REDUCED = tiny_config(
    vocab_size=8192,
    hidden_size=64,
    num_attention_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=12,
    v_head_dim=16,
    index_head_dim=16,
    index_topk=8,
    num_hidden_layers=4,  # two shared layers: a last one that is not scanned would be dead code in a capture
    indexer_types=["full", "full", "shared", "shared"],
    mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    intermediate_size=64,
    moe_intermediate_size=32,
    n_routed_experts=32,
    rope_parameters={"rope_theta": 8e6, "rope_type": "default"},
    max_position_embeddings=65536,
)
SIZES = plan_programs.Sizes(tokens=16384, chunk=8192, response=512, groups=(2, 8))
LORA = config_lib.LoraConfig(tuple((name, 2, 4.0) for name in ("kv_b", "lm_head", "routed")))
OPTIMIZER = train.make_optimizer(train.OptimizerConfig())


@functools.cache
def reduced(**options):
    return decoder.make_model(REDUCED, mesh=sharding.make_mesh(32), lora=LORA, **options)


@functools.cache
def report(name: str):
    return plan.run_plan(reduced(), OPTIMIZER, SIZES, 10**9, only=(name,))[name]


def test_bytes_by_kind_are_the_shares_of_a_device():
    model = reduced()
    have = plan_programs.resident(model, OPTIMIZER, SIZES.tokens, "detached")
    held = {name: plan.shard_bytes(tree)["device"] for name, tree in have.kinds(*KINDS).items()}
    resident = held["latent pages"] + held["index keys"]
    assert resident == pages.prefix_bytes(REDUCED, SIZES.tokens, 32) // 32
    assert "gradient pages" not in held and held["optimizer"] == 2 * held["adapters"] + 3 * 4
    assert held["adapter copies"] == held["gradients"] == held["adapters"]
    exact = plan_programs.resident(model, OPTIMIZER, SIZES.tokens, "exact").kinds("gradient pages")
    assert plan.shard_bytes(exact)["device"] == held["latent pages"]  # both fp32 here
    hosted = plan_programs.resident(reduced(prefix_store="host"), OPTIMIZER, SIZES.tokens, "detached").prefix
    assert plan.shard_bytes(hosted) == {"device": 12, "host": resident}


KINDS = ("adapters", "adapter copies", "optimizer", "latent pages", "index keys", "gradients", "gradient pages")


def test_a_report_adds_up_and_refuses_what_does_not_fit():
    found = report("capture")
    known = [size for size in found["bytes"].values() if size is not None]
    assert found["device_total"] == sum(known) and found["fits"] and found["over_bytes"] == 0
    small = plan.run_plan(reduced(), OPTIMIZER, SIZES, found["device_total"] - 7, only=("capture",))["capture"]
    assert not small["fits"] and small["over_bytes"] == 7
    tiny = plan.run_plan(reduced(), OPTIMIZER, SIZES, 1000, only=("capture",))["capture"]
    resident = sum(size for size in tiny["bytes"].values() if size is not None)
    assert tiny["refused"] == f"not compiled: what is resident alone is over by {resident - 1000} bytes"
    assert tiny["over_bytes"] == resident - 1000 and tiny["bytes"]["temporaries"] is None and not tiny["fits"]


@pytest.mark.parametrize("name", ["capture", "replay"])
def test_formulas_of_bytes_received_agree_with_the_compiled_program(name):
    found = report(name)["received_bytes"]
    formula, compiled = sum(found["formula"].values()), sum(found["compiler"].values())
    np.testing.assert_allclose(compiled, formula, rtol=0.05)


@pytest.mark.parametrize("name", ["capture", "replay"])
def test_no_array_is_larger_than_a_block_of_scores_or_one_gathered_layer(name):
    """Capture: a layer's latents of the whole prompt or a block of scores, nothing as large. Replay: less."""
    latents = (SIZES.tokens + SIZES.chunk) * REDUCED.latent_dim * 4
    scores = indexer_topk.QUERIES * (indexer_topk.KEYS + REDUCED.index_topk) * 4
    bound = {"capture": max(latents, scores), "replay": latents // 2}[name]
    size, shape, operation = report(name)["largest_arrays"][0]
    assert size <= bound, f"{shape} of {operation}: {size} bytes, {bound} are allowed"
    assert bound < SIZES.response * REDUCED.vocab_size * 4 / 2  # no [T, V]
    assert bound < SIZES.chunk // 32 * SIZES.tokens * 4 / 2  # no device's [C, S]


def test_a_group_of_8_costs_what_a_group_of_2_does():
    """The replay's program does not know the group; a device decodes one member either way, with its own tail."""
    small, large = (report(f"sample {group}") for group in SIZES.groups)
    few, many = (found["bytes"]["temporaries"] for found in (small, large))
    assert abs(few - many) < 0.02 * few


def test_what_it_needs_falls_with_the_base_in_fp8_and_pages_on_hosts():
    model = reduced()
    have = plan_programs.resident(model, OPTIMIZER, SIZES.tokens, "detached")
    rows = plan_needs.needs(model, have, SIZES.tokens, 10**12)
    assert [(row["base"], row["pages"]) for row in rows] == [
        ("bf16", "device"), ("bf16", "host"), ("fp8", "device"), ("fp8", "host")
    ]  # fmt: skip
    assert all(row["devices"] == 32 and row["bytes"] == row["bytes_on_mesh"] for row in rows)
    pages_bytes = pages.prefix_bytes(REDUCED, SIZES.tokens, 32) // 32
    assert rows[0]["bytes"] - rows[1]["bytes"] == rows[2]["bytes"] - rows[3]["bytes"] == pages_bytes
    assert [row["devices"] for row in plan_needs.needs(model, have, SIZES.tokens, 1000)] == [None] * 4


def test_glm52_needs_more_than_32_small_chips():
    """46.5 GB of bf16 base: v6e (31 GiB) takes more chips or FP8 with pages on hosts, never a crash."""
    config = config_lib.extend_positions(glm52(), 2_097_664)
    targets = tuple((name, 8, 16.0) for name in sorted(config_lib.LORA_TARGETS))
    model = decoder.make_model(config, mesh=sharding.make_mesh(32), lora=config_lib.LoraConfig(targets))
    have = plan_programs.resident(model, OPTIMIZER, 2_097_152, "detached")
    assert 46.4e9 < plan.shard_bytes(have.base)["device"] < 46.6e9
    assert plan.shard_bytes((have.prefix.latents, have.prefix.index_keys))["device"] == 2_097_152 * 95_232 // 32
    fewest = {
        chip: [row["devices"] for row in plan_needs.needs(model, have, 2_097_152, topology.KNOWN[chip].memory)]
        for chip in ("tpu:v5p:4x4x2", "tpu:v6e:4x8", "tpu:v5e:4x8")
    }
    assert fewest["tpu:v5p:4x4x2"] == [32] * 4
    assert all(x is None or x > 32 for x in fewest["tpu:v6e:4x8"][:2])
    assert all(x is None or x > 32 for x in fewest["tpu:v5e:4x8"])


def test_the_chunk_follows_the_memory_left():
    memories = (None, 10**6, 10**8, 10**10)
    chunks = [plan.choose_chunk(reduced(), OPTIMIZER, SIZES.tokens, "detached", memory) for memory in memories]
    assert chunks[:2] == [2048, 2048] and chunks == sorted(chunks) and chunks[-1] == 16384
    with pytest.raises(ValueError, match="chunk=100; accepted: a multiple of 32, at most 16384"):
        plan.check_chunk(reduced(), 100, SIZES.tokens)
    with pytest.raises(ValueError, match="chunk=4064; accepted: a multiple of 2048"):
        plan.check_chunk(reduced(prefix_store="host"), 4064, SIZES.tokens)
