"""The exact mode: the whole gradient, the prompt's own term included, whatever the group, the chunk and the mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_models

from longstraw_jax import exact_gradient, lora, parallel, replay, rollout, sharding, train
from longstraw_jax.config import ModelConfig
from longstraw_jax.evidence import parity
from longstraw_jax.model import choices, decoder
from longstraw_jax.prefix import capture, pages, refresh
from longstraw_jax.rl import objectives


def layers(*kinds: str) -> ModelConfig:
    """Of two letters each: F or S for full or shared, D or M for dense or sparse."""
    return dataclasses.replace(
        tiny.CONFIG,
        num_hidden_layers=len(kinds),
        indexer_types=tuple({"F": "full", "S": "shared"}[kind[0]] for kind in kinds),
        mlp_layer_types=tuple({"D": "dense", "M": "sparse"}[kind[1]] for kind in kinds),
    )


# On one device two segments, on the mesh one of two groups with two shared layers each: few bodies to compile.
CONFIGS = {1: layers("FD", "FD", "SM"), 32: layers("FD", "SM", "SM", "FD", "SM", "SM")}
S, T = 129, 32  # 128 resident tokens: two chunks of 64
CHUNK = 64
PROMPT = tiny.TOKENS[:S]
LENGTHS = {1: (T,), 2: (29, 5), 5: (T, 1, 17, 30, 8)}
ADVANTAGES = np.asarray([1.0, -0.7, 0.4, -1.3, 0.8], np.float32)
# Ratios are far from 1, as the old policy is uniform; bounds so wide that the loss is smooth.
POLICY = rollout.PolicyConfig(
    eos_ids=(),
    capacity=256,
    mode="exact",
    max_new_tokens=T,
    chunk=CHUNK,
    objective=objectives.GRPOConfig(clip_low=0.99, clip_high=50.0),
)


@functools.cache
def side(devices: int) -> parity.Side:
    """The model of CONFIGS on its mesh, B of every target away from zero."""
    return parity.place(baseline(devices), sharding.make_mesh(devices)) if devices > 1 else baseline(1)


@functools.cache
def baseline(devices: int) -> parity.Side:
    """The same policy on one device."""
    config = CONFIGS[devices]
    rng = np.random.default_rng(1)
    shapes = lora.adapter_shapes(config, tiny.LORA)
    values = jax.tree.map(lambda x: (0.1 * rng.standard_normal(x.shape)).astype(np.float32), shapes)
    model = decoder.make_model(config, lora=tiny.LORA)
    return parity.place(parity.Side(model, tiny_models.tiny_params(config), values), None)


def group(size: int, advantages=ADVANTAGES) -> rollout.Group:
    """Ragged responses under an old policy that is uniform."""
    rng = np.random.default_rng(size)
    responses = [rng.integers(0, tiny.CONFIG.vocab_size, n).tolist() for n in LENGTHS[size]]
    inputs, targets, lengths = replay.member_inputs(int(PROMPT[-1]), responses, T)
    mask = np.arange(T) < lengths[:, None]
    uniform = np.full(mask.shape, -np.log(tiny.CONFIG.vocab_size), np.float32)
    return rollout.Group(inputs, targets, lengths, mask, advantages[:size], uniform, uniform, None)


def resident(where: parity.Side, *, chunk: int = CHUNK, record: tuple[str, ...] = ()) -> refresh.Resident:
    kept = []
    prefix = capture.capture(
        where.model,
        where.base,
        where.adapters,
        PROMPT[:-1],
        chunk=chunk,
        fingerprint=tiny.FINGERPRINT,
        capacity=POLICY.capacity,
        record=record,
        keep=kept.append if record else None,
    )
    return refresh.Resident(PROMPT, prefix, 0, kept if record else None)


def exact(where: parity.Side, members: rollout.Group, **options):
    """Gradients of the mean loss with the prompt's term, and that loss."""
    policy = dataclasses.replace(POLICY, chunk=options.get("chunk", CHUNK))
    grads, total = parity.replay_gradient(where, policy, resident(where, **options), members)
    return grads, float(objectives.mean(total.loss))


@functools.cache
def whole(devices: int, size: int, mode: str = "exact"):
    """Plain autodiff over each whole sequence of the model of CONFIGS, on one device."""
    masks = parity.mode_masks(mode, S, S + T)
    return parity.full_gradient(baseline(devices), POLICY, PROMPT, group(size), **masks)


@pytest.mark.parametrize("devices, size", [(1, 1), (1, 2), (1, 5), (32, 2), (32, 5)])
def test_exact_is_the_gradient_of_the_whole_sequence(devices, size):
    """Every adapter tensor to round-off of its largest entry."""
    grads, loss = exact(side(devices), group(size))
    wanted, wanted_loss = whole(devices, size)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    assert tiny.difference(grads, wanted) < 1e-5


def test_what_detached_drops_is_far_above_round_off():
    assert tiny.difference(whole(1, 2, "detached")[0], whole(1, 2)[0]) > 1e-1


def test_the_chunk_changes_nothing():
    """One that does not divide the prompt, and starts in the middle of a page; the mesh pads it to the one program."""
    assert tiny.difference(exact(side(32), group(2), chunk=50)[0], whole(32, 2)[0]) < 1e-5


def test_kept_choices_are_what_the_reverse_pass_chooses_again():
    again, _ = exact(side(1), group(2))
    kept, _ = exact(side(1), group(2), record=choices.KINDS)
    assert tiny.difference(kept, again) < 1e-6


def test_kept_choices_are_all_that_decide():
    """Selections of another kind (every query keeps only its first key) are followed, not overruled."""
    where = side(1)
    state = resident(where, record=choices.KINDS)
    first = lambda ids: np.where(np.arange(ids.shape[-1]) < 1, ids, -1)  # noqa: E731
    other = [dataclasses.replace(chunk, selections=jax.tree.map(first, chunk.selections)) for chunk in state.choices]
    found, _ = parity.replay_gradient(where, POLICY, state, group(2))
    moved, _ = parity.replay_gradient(where, POLICY, dataclasses.replace(state, choices=other), group(2))
    assert tiny.difference(moved, found) > 1e-3


def test_gradient_equals_finite_differences():
    """Of the loss with the prompt captured anew, at the largest entry of tensors of several kinds of target."""
    where, members = side(1), group(2)
    grads, _ = exact(where, members)
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_flatten_with_path(grads)[0]}
    for part in ("kv_a_proj_with_mqa']['b", "q_b_proj']['a", "experts.up_proj']['b", "lm_head']['a"):
        name = next(key for key in leaves if part in key)
        at = np.unravel_index(np.abs(leaves[name]).argmax(), leaves[name].shape)

        def loss(step, name=name, at=at):
            moved = jax.tree_util.tree_map_with_path(
                lambda path, x: x.at[at].add(step) if jax.tree_util.keystr(path) == name else x, where.adapters
            )
            return exact(dataclasses.replace(where, adapters=moved), members)[1]

        step = 3e-4  # so short that no selection and no route changes
        slope = (loss(step) - loss(-step)) / (2 * step)
        np.testing.assert_allclose(slope, leaves[name][at], rtol=2e-2, err_msg=name)


def test_one_program_serves_all_chunks_and_a_group_without_a_gradient_needs_none():
    where = side(1)
    exact(where, group(2))
    programs = exact_gradient.reverse_chunk._cache_size()
    state, copies = resident(where), lora.per_device(where.adapters, None)
    done = []

    def reverse(members):
        page_grads = exact_gradient.zero_page_grads(where.model, state.prefix)
        args = (where.model, POLICY, where.base, copies, state.prefix, members, None, page_grads)
        total, page_grads = train.add_group(*args)
        assert all(pool.dtype == jnp.float32 for pool in page_grads)
        return exact_gradient.exact_prefix_vjp(
            where.model, where.base, copies, state.prefix, PROMPT[:-1], page_grads, total.grads,
            chunk=CHUNK, progress=done.append,
        )  # fmt: skip

    reverse(group(2))
    assert done == [64, 128]
    nothing = reverse(group(2, np.zeros(5, np.float32)))
    assert done == [64, 128] and not any(np.asarray(g).any() for g in jax.tree.leaves(nothing))
    assert exact_gradient.reverse_chunk._cache_size() == programs


def test_memory_is_pages_gradient_pages_and_one_chunk():
    """Of the program, for two lengths: no second copy of the gradient pages, and what comes in goes out in place."""
    config = layers(*["FD"] * 8)
    targets = tuple(target for target in tiny.LORA.targets if target[0] not in ("routed", "shared"))
    model = decoder.make_model(config, lora=dataclasses.replace(tiny.LORA, targets=targets))
    copies = jax.eval_shape(lambda x: lora.per_device(x, None), lora.adapter_shapes(config, model.lora))
    scalar, ids = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((CHUNK,), jnp.int32)
    chosen = choices.Choices((jax.ShapeDtypeStruct((8, 1, CHUNK, config.index_topk), jnp.int32),))

    def program(tokens):
        prefix = jax.eval_shape(lambda: pages.allocate(model, tokens))
        page_grads = jax.eval_shape(lambda x: exact_gradient.zero_page_grads(model, x), prefix)
        args = (model, decoder.param_shapes(config), copies, prefix, ids, scalar, scalar, chosen, page_grads, copies)
        memory = exact_gradient.reverse_chunk.lower(*args).compile().memory_analysis()
        return memory, sum(x.size * 4 for x in jax.tree.leaves(page_grads))

    (short, few), (long, many) = program(4096), program(16384)
    # A layer's rows and their gradient are transient: 2 of 8 layers.
    assert long.temp_size_in_bytes - short.temp_size_in_bytes < 0.3 * (many - few)
    assert long.alias_size_in_bytes >= many


def test_gradient_pages_sum_in_fp32_whatever_the_pages_are():
    """Each of 2,048 queries gives 1 to the one key that all select; a bf16 sum would stop growing at 256."""
    queries, width = 2048, 8
    q, tail = jnp.ones((1, queries, 1, width), jnp.bfloat16), jnp.zeros((1, queries, width), jnp.bfloat16)
    pool, ids = jnp.ones((1, pages.PAGE, width), jnp.bfloat16), jnp.zeros((1, queries, 1), jnp.int32)

    def attended(sink):
        return parallel.attend_collecting(
            q, pool, sink, jnp.asarray([0, 0]), tail, ids, jnp.int32(1),
            scale=1.0, value_dim=width, strategy="gather_keys", axis=None,
        )  # fmt: skip

    before = jnp.full((1, 1, 1, pages.PAGE, width), 3.0)
    (out, _), pull = jax.vjp(attended, before)
    (after,) = pull((jnp.ones_like(out), before))
    assert out.dtype == jnp.bfloat16 and after.dtype == jnp.float32
    np.testing.assert_array_equal(after[0, 0, 0, 0], np.full(width, 2048 + 3.0))


def test_bad_input_is_named():
    where = side(1)
    state, copies = resident(where), lora.per_device(where.adapters, None)
    page_grads = tuple(jnp.ones_like(x) for x in exact_gradient.zero_page_grads(where.model, state.prefix))
    args = (where.model, where.base, copies, state.prefix)
    with pytest.raises(ValueError, match="129 tokens; accepted: the 128 that the prefix state holds"):
        exact_gradient.exact_prefix_vjp(*args, PROMPT, page_grads, copies, chunk=CHUNK)
    with pytest.raises(ValueError, match="choices of 1 chunks; accepted: 2, of chunk=64 tokens"):
        exact_gradient.exact_prefix_vjp(*args, PROMPT[:-1], page_grads, copies, chunk=CHUNK, held=[choices.NONE])
    expanded = decoder.make_model(CONFIGS[1], lora=tiny.LORA, attention="expanded")
    with pytest.raises(ValueError, match="attention='expanded' collects no page gradients; accepted: 'absorbed'"):
        exact_gradient.zero_page_grads(expanded, state.prefix)
