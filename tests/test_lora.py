"""Adapters: what they attach to, where they lie, what they change, and their gradients over devices."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from longstraw_jax import expert_dispatch, forward, lora, parallel, sharding
from longstraw_jax.config import LORA_TARGETS, ConfigError, LoraConfig, ModelConfig, RopeParameters
from longstraw_jax.model import decoder
from longstraw_jax.model.linear import Pair, low_rank

CONFIG = ModelConfig(
    vocab_size=48,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
    index_n_heads=4,
    index_head_dim=8,
    index_topk=6,
    indexer_types=("full", "shared") * 2,
    mlp_layer_types=("dense", "sparse") * 2,
    intermediate_size=16,
    moe_intermediate_size=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    rms_norm_eps=1e-6,
    rope_parameters=RopeParameters(rope_theta=10000.0),
    max_position_embeddings=128,
    initializer_range=0.2,
    dtype="float32",
)
EVERY = LoraConfig(tuple((name, 2, 4.0) for name in sorted(LORA_TARGETS)))
IDS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, 10)).astype(np.int32)


def random_adapters(config, lora_config, scale=0.2):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(scale * rng.standard_normal(x.shape), x.dtype), lora.adapter_shapes(config, lora_config)
    )


def random_base(config):
    rng = np.random.default_rng(1)

    def draw(path, x):
        is_norm = any("norm" in str(key) for key in path)
        return jnp.ones(x.shape, x.dtype) if is_norm else jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(draw, decoder.param_shapes(config))


@pytest.fixture(scope="module")
def base():
    return random_base(CONFIG)


@functools.partial(jax.jit, static_argnames="model")
def logits(model, base, adapters, gate=None):
    hidden, _ = forward.forward(model, base, adapters, IDS, gate=gate)
    return forward.logits(model, base, adapters, hidden)


def paths(tree):
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def test_init_matches_the_shapes_and_starts_at_the_base_policy():
    adapters = lora.init_adapters(CONFIG, EVERY, 3)
    shapes = lora.adapter_shapes(CONFIG, EVERY)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), adapters) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    assert adapters["segments"]["0"]["0"]["mlp.gate_proj"]["a"].shape == (2, 32, 2)
    assert adapters["segments"]["0"]["1"]["mlp.experts.down_proj"]["b"].shape == (2, 8, 2, 32)
    assert "mlp.gate_proj" not in adapters["segments"]["0"]["1"], "only what exists is there"
    for name, x in paths(jax.tree.map(np.asarray, adapters)).items():
        assert x.dtype == np.float32
        if name.endswith("['b']"):
            assert not x.any()
        else:
            bound = 1 / math.sqrt(x.shape[-2])
            assert 0.5 * bound < np.abs(x).max() <= bound, name


def test_init_depends_on_the_seed_alone():
    mesh = sharding.make_mesh(8)
    one, many = lora.init_adapters(CONFIG, EVERY, 3), lora.init_adapters(CONFIG, EVERY, 3, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, one, many)
    for name in ("a", "b"):
        routed = many["segments"]["0"]["1"]["mlp.experts.up_proj"][name]
        assert routed.addressable_shards[0].data.shape[:2] == (2, 1)
        assert many["lm_head"][name].sharding.is_fully_replicated
    alone = lora.init_adapters(CONFIG, LoraConfig((("lm_head", 2, 4.0),)), 3)
    np.testing.assert_array_equal(alone["lm_head"]["a"], one["lm_head"]["a"])
    assert (lora.init_adapters(CONFIG, EVERY, 4)["lm_head"]["a"] != one["lm_head"]["a"]).any()


def test_init_refuses_a_mesh_that_does_not_divide_the_experts():
    with pytest.raises(sharding.ShardingError, match="n_routed_experts=8 .* 32 devices"):
        lora.init_adapters(CONFIG, EVERY, 0, mesh=sharding.make_mesh(32))


@pytest.mark.parametrize(
    "target, change",
    [
        ("routed", {"mlp_layer_types": ("dense",) * 4}),
        ("shared", {"n_shared_experts": 0}),
        ("dense", {"mlp_layer_types": ("sparse",) * 4}),
    ],
)
def test_g1_a_target_that_matches_nothing_is_refused(target, change):
    config = dataclasses.replace(CONFIG, **change)
    with pytest.raises(lora.LoraError, match=f"'{target}' matches no module.*accepted: ") as error:
        lora.init_adapters(config, LoraConfig((("q_a", 2, 4.0), (target, 2, 4.0))), 0)
    assert f"'{target}'" not in str(error.value).split("accepted:")[1]
    assert "'lm_head'" in str(error.value).split("accepted:")[1]


@pytest.mark.parametrize("name", ["indexer", "wq_b", "gate", "router", "input_layernorm", "norm", "embed_tokens"])
def test_indexer_router_norms_and_embedding_are_never_targets(name):
    with pytest.raises(ConfigError, match=f"lora.targets='{name}'"):
        LoraConfig(((name, 2, 4.0),))
    adapted = {key for site in lora.sites(CONFIG, EVERY) for key in site.weight_path}
    assert adapted.isdisjoint({"indexer", "gate", "embed_tokens", "norm", "input_layernorm", "q_a_layernorm"})


def test_g1_one_step_moves_b_of_every_target_that_received_tokens(base):
    model = decoder.make_model(CONFIG, lora=EVERY)
    before = jax.tree.map(np.array, base)

    def loss(adapters):
        hidden, layers = forward.forward(model, base, adapters, IDS, collect=True)
        return jnp.sin(forward.logits(model, base, adapters, hidden)).sum(), layers

    adapters = lora.init_adapters(CONFIG, EVERY, 0)
    grads, layers = jax.jit(jax.grad(loss, has_aux=True))(adapters)
    stepped = jax.tree.map(lambda x, g: np.asarray(x) - 0.1 * np.asarray(g), adapters, grads)
    seen = set()
    for site in lora.sites(CONFIG, EVERY):
        node = stepped
        for key in site.path:
            node = node[key]
        moved = (node["b"] != 0).any(axis=(-2, -1))
        if site.routed:
            ids = [layers[layer]["router_ids"] for layer in (1, 3)]
            reached = np.stack([np.isin(np.arange(8), chosen) for chosen in ids])
            assert reached.any() and not reached.all(), "the case has experts with and without tokens"
            np.testing.assert_array_equal(moved, reached, err_msg=str(site.path))
        else:
            assert moved.all(), site.path
        seen.add(site.target)
    assert seen == set(LORA_TARGETS)
    jax.tree.map(np.testing.assert_array_equal, before, base)


def test_g2_absorbed_and_expanded_agree_with_kv_b_adapted():
    targets = LoraConfig((("kv_b", 2, 4.0),))
    dense = dataclasses.replace(CONFIG, mlp_layer_types=("dense",) * 4)  # compiles faster; attention is the matter
    base, adapters = random_base(dense), random_adapters(dense, targets)

    def run(attention):
        model = decoder.make_model(dense, lora=targets, attention=attention, remat=False)

        def loss(adapters):
            out = logits(model, base, adapters)
            return jnp.sin(out).mean(), out

        return jax.jit(jax.grad(loss, has_aux=True))(adapters)

    (grads, absorbed), (want_grads, expanded) = run("absorbed"), run("expanded")
    np.testing.assert_allclose(absorbed, expanded, atol=2e-5)
    top = max(float(np.abs(x).max()) for x in jax.tree.leaves(want_grads))
    assert top > 0
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5 * top), grads, want_grads)


def test_gate_switches_the_update_per_token(base):
    model, adapters = decoder.make_model(CONFIG, lora=EVERY), random_adapters(CONFIG, EVERY)
    adapters["lm_head"] = jax.tree.map(jnp.zeros_like, adapters["lm_head"])  # the head has no gate
    off, on = np.asarray(logits(model, base, None)), np.asarray(logits(model, base, adapters))
    assert (np.abs(on - off).max(-1) > 1e-3).all()

    def gated(gate):
        return np.asarray(logits(model, base, adapters, gate))

    np.testing.assert_allclose(gated(np.zeros(IDS.shape, bool)), off, atol=1e-5)
    np.testing.assert_allclose(gated(np.ones(IDS.shape, bool)), on, atol=1e-5)
    from_6 = gated(np.arange(IDS.shape[1])[None] >= 6)
    np.testing.assert_allclose(from_6[:, :6], off[:, :6], atol=1e-5)
    assert (np.abs(from_6 - off)[:, 6:].max(-1) > 1e-3).all()
    assert (np.abs(from_6 - on)[:, 6:].max(-1) > 1e-3).all(), "tokens before the gate keep their base latents"


def test_gate_on_kv_b_is_refused_by_the_expanded_form(base):
    targets = LoraConfig((("kv_b", 2, 4.0),))
    model = decoder.make_model(CONFIG, lora=targets, attention="expanded")
    with pytest.raises(ValueError, match="attention='expanded' cannot gate kv_b"):
        logits(model, base, random_adapters(CONFIG, targets), jnp.ones(IDS.shape, bool))


def test_per_device_gradients_meet_in_finalise():
    """A shared map and routed experts on 8 devices: no all-reduce while members accumulate, one in finalise."""
    targets = LoraConfig((("q_a", 2, 4.0), ("routed", 2, 4.0)))
    mesh, names = sharding.make_mesh(8), ("gate_proj", "up_proj", "down_proj")
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((16, 32)), jnp.float32)
    ids = jnp.asarray([rng.permutation(8)[:2] for _ in range(16)], jnp.int32)
    routes = jnp.asarray(rng.random((16, 2)), jnp.float32)
    shapes = {"gate_proj": (8, 32, 8), "up_proj": (8, 32, 8), "down_proj": (8, 8, 32)}
    experts = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}

    def body(axis, adapters, x, ids, routes, experts):
        layer = lora.local(adapters)["segments"]["0"]["1"]
        q_a = layer["self_attn.q_a_proj"]
        h = jnp.tanh(low_rank(x, Pair(q_a["a"][0], q_a["b"][0], 2.0)))
        pairs = {n: tuple(layer[f"mlp.experts.{n}"][ab][0] for ab in "ab") + (2.0,) for n in names}
        x, stack = x + jnp.pad(h, ((0, 0), (0, 16))), {n: w[None] for n, w in experts.items()}
        y = expert_dispatch.routed_experts(x, ids, routes, stack, jnp.int32(0), pairs, None, axis)
        return jnp.square(y).sum(-1)

    specs = (lora.per_device_specs(CONFIG, targets), *[PartitionSpec(sharding.AXIS)] * 4)

    def gradient(mesh):
        mapped = parallel.mapped(body, mesh, specs, PartitionSpec(sharding.AXIS))
        # Per-device sums, not their total: the loss would be an all-reduce of its own.
        return jax.jit(lambda *args: jax.vjp(lambda a: mapped(a, *args[1:]), args[0])[1](jnp.ones(16))[0])

    adapters = random_adapters(CONFIG, targets)
    single = lora.per_device(adapters, None)
    want = lora.finalise(gradient(None)(single, x, ids, routes, experts), None)
    copies = lora.per_device(adapters, mesh)
    program = gradient(mesh).lower(copies, x, ids, routes, experts).compile()
    grads = program(copies, x, ids, routes, experts)
    finalise = lora.finalise.lower(grads, mesh).compile()
    done = finalise(grads)

    shared = grads["segments"]["0"]["1"]["self_attn.q_a_proj"]["a"]
    assert shared.shape == (8, 2, 32, 2) and shared.addressable_shards[0].data.shape == (1, 2, 32, 2)
    assert "all-reduce" not in program.as_text()
    assert "all-reduce" in finalise.as_text()
    top = max(float(np.abs(x).max()) for x in jax.tree.leaves(want))
    assert jax.tree.structure(done) == jax.tree.structure(adapters)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5 * top), done, want)
    for name, leaf in paths(done).items():
        assert leaf.sharding.is_fully_replicated != ("mlp.experts" in name)
    for leaf in jax.tree.leaves(done["segments"]["0"]["1"]):
        assert np.abs(leaf).max() > 0


@pytest.mark.parametrize("devices", [1, 8])
def test_per_device_then_local_is_the_identity(devices):
    mesh, targets = sharding.make_mesh(devices), LoraConfig((("lm_head", 2, 4.0), ("routed", 2, 4.0)))
    adapters = random_adapters(CONFIG, targets)
    specs, stored = lora.per_device_specs(CONFIG, targets), lora.adapter_specs(CONFIG, targets)
    back = parallel.mapped(lambda axis, a: lora.local(a), mesh, (specs,), stored)(lora.per_device(adapters, mesh))
    jax.tree.map(np.testing.assert_array_equal, adapters, back)


def test_stored_specs_follow_the_model():
    model = decoder.make_model(CONFIG, lora=EVERY)
    assert lora.stored_specs(model, None) is None
    assert lora.stored_specs(model, random_adapters(CONFIG, EVERY)) == lora.adapter_specs(CONFIG, EVERY)
    with pytest.raises(lora.LoraError, match="model.lora is None"):
        lora.stored_specs(decoder.make_model(CONFIG), random_adapters(CONFIG, EVERY))


def test_g1_the_table_lists_every_trainable_leaf():
    rows, adapters = lora.trainable_table(CONFIG, EVERY), lora.adapter_shapes(CONFIG, EVERY)
    leaves = {
        ".".join(key.key for key in path): list(x.shape)
        for path, x in jax.tree_util.tree_flatten_with_path(adapters)[0]
    }
    assert {row["name"]: row["shape"] for row in rows} == leaves
    assert {row["target"] for row in rows} == set(LORA_TARGETS)
    assert lora.count_parameters(CONFIG, EVERY) == sum(x.size for x in jax.tree.leaves(adapters))
    text = lora.format_table(rows).splitlines()
    assert len(text) == len(rows) + 1
    assert text[-1].split() == ["total", f"{lora.count_parameters(CONFIG, EVERY):,}"]


def test_weight_decay_acts_on_b_alone():
    adapters = random_adapters(CONFIG, LoraConfig((("o", 2, 4.0), ("lm_head", 2, 4.0))))
    optimizer = optax.adamw(0.1, weight_decay=0.5, mask=lora.weight_decay_mask)
    zeros = jax.tree.map(jnp.zeros_like, adapters)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(adapters), adapters)
    pulled = paths(updates)
    for name, x in paths(adapters).items():
        np.testing.assert_allclose(pulled[name], -0.05 * x if name.endswith("['b']") else 0.0 * x, rtol=1e-5)


def test_g3_merged_weights_give_the_adapted_logits(base):
    model, adapters = decoder.make_model(CONFIG, lora=EVERY), random_adapters(CONFIG, EVERY)
    before = jax.tree.map(np.array, base)
    merged, report = lora.merge(base, adapters, CONFIG, EVERY)
    np.testing.assert_allclose(logits(model, merged, None), logits(model, base, adapters), atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, before, base)
    assert len(report) == len(lora.sites(CONFIG, EVERY))
    assert all(row["max_change"] > 0.01 and row["max_lost"] < 1e-6 for row in report), "fp32 loses next to nothing"


def test_g3_merge_reports_what_bf16_loses():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    targets = LoraConfig((("o", 2, 4.0), ("routed", 2, 4.0)))
    base = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), decoder.param_shapes(config))
    small = jax.tree.map(lambda x: jnp.full(x.shape, 0.02, x.dtype), lora.adapter_shapes(config, targets))
    merged, report = lora.merge(base, small, config, targets)
    # scale 2 x rank 2 x 0.02^2 = 0.0016 is under half of bf16's step of 2^-7 above 1: the update is gone.
    jax.tree.map(np.testing.assert_array_equal, merged, base)
    for row in report:
        assert row["dtype"] == "bfloat16"
        np.testing.assert_allclose([row["max_change"], row["max_lost"]], 0.0016, rtol=1e-3)


def test_g3_merge_on_a_mesh_keeps_values_and_places(base):
    mesh, targets = sharding.make_mesh(8), LoraConfig((("lm_head", 2, 4.0), ("o", 2, 4.0), ("routed", 2, 4.0)))
    adapters, specs = random_adapters(CONFIG, targets), decoder.param_specs(CONFIG)
    is_spec = dict(is_leaf=lambda x: isinstance(x, PartitionSpec))
    spread = jax.tree.map(lambda spec, x: jax.device_put(x, sharding.named(mesh, spec)), specs, base, **is_spec)
    own_specs = lora.adapter_specs(CONFIG, targets)
    own = jax.tree.map(lambda spec, x: jax.device_put(x, sharding.named(mesh, spec)), own_specs, adapters, **is_spec)
    merged, _ = lora.merge(spread, own, CONFIG, targets)
    want, _ = lora.merge(base, adapters, CONFIG, targets)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), merged, want)
    moved = jax.tree.map(lambda x, y: not x.sharding.is_equivalent_to(y.sharding, x.ndim), merged, spread)
    assert not any(jax.tree.leaves(moved))


def test_adapters_must_be_fp32_and_complete():
    adapters = random_adapters(CONFIG, EVERY)
    lora.check_adapters(adapters, CONFIG, EVERY)
    adapters["lm_head"]["a"] = adapters["lm_head"]["a"].astype(jnp.bfloat16)
    del adapters["segments"]["0"]["0"]["self_attn.o_proj"]
    with pytest.raises(lora.LoraError) as error:
        lora.check_adapters(adapters, CONFIG, EVERY)
    assert "lm_head.a: found bfloat16[32, 2], expected float32[32, 2]" in str(error.value)
    assert "segments.0.0.self_attn.o_proj.b: found nothing, expected float32[2, 2, 32]" in str(error.value)
