"""The whole transaction on a Hopper GPU: the device's kernels beside plain jnp on the same card.

JAX_PLATFORMS=cuda python -m pytest tests/test_gpu_transaction.py -m gpu
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import config, lora, replay, rollout, sampling, train
from longstraw_jax.evidence import kernels
from longstraw_jax.model import decoder
from longstraw_jax.prefix import capture
from longstraw_jax.rl import advantages

pytestmark = pytest.mark.gpu

GLM52 = pathlib.Path(__file__).parents[1] / "experiments" / "configs" / "glm52.json"
PROMPT, CHUNK, T, GROUP = 6000, 1024, 64, 2  # the last chunk is ragged, the prompt thrice index_topk
# Fixed before the first run. bf16 keeps 8 bits: two orders of one sum part by about 2**-8 of an activation, and a key
# or an expert near the cut may change places; neither may move a gradient's direction.
SELECTED = 0.99  # share of the selected keys that both select
COSINE, RELATIVE_L2 = 0.999, 0.05
LOGP = 0.05  # nats


@functools.cache
def architecture(dtype="bfloat16"):
    """GLM-5.2's attention and indexer at full width; a narrow trunk and few experts."""
    raw = json.loads(GLM52.read_text()) | {
        "hidden_size": 1024,
        "q_lora_rank": 512,
        "moe_intermediate_size": 512,
        "n_routed_experts": 16,
        "num_hidden_layers": 4,
        "index_topk_pattern": "FSSS",
        "mlp_layer_types": ["sparse"] * 4,
        "vocab_size": 4096,
        "num_nextn_predict_layers": 0,
        "dtype": dtype,
    }
    return config.model_config_from_hf(raw)


@functools.cache
def policy(dtype="bfloat16"):
    """Weights, adapters away from zero, and a prompt."""
    targets = ("q_a", "q_b", "kv_a", "kv_b", "o", "shared", "routed", "lm_head")
    model = decoder.make_model(
        architecture(dtype), lora=config.LoraConfig(tuple((name, 8, 16.0) for name in sorted(targets)))
    )
    rng = np.random.default_rng(0)

    def moved(path, x):
        return jnp.asarray(0.02 * rng.standard_normal(x.shape), jnp.float32) if path[-1].key == "b" else x

    adapters = jax.tree_util.tree_map_with_path(moved, lora.init_adapters(model.config, model.lora, 0))
    prompt = rng.integers(0, model.config.vocab_size, PROMPT).astype(np.int32)
    return model.lora, decoder.init_params(architecture(dtype), 0), adapters, prompt


def model(name, dtype="bfloat16"):
    return decoder.make_model(architecture(dtype), lora=policy(dtype)[0], kernels=name)


@functools.cache
def captured(name, dtype="bfloat16"):
    """The prefix state, and what the full layer selects for every token [S - 1, K], sorted."""
    _, base, adapters, prompt = policy(dtype)
    kept = []
    state = capture.capture(
        model(name, dtype), base, adapters, prompt[:-1], chunk=CHUNK, fingerprint=jnp.zeros((2,), jnp.uint32),
        record=("selections",), keep=lambda chosen: kept.append(np.asarray(chosen.selections[0][0, 0])),
    )  # fmt: skip
    return state, np.sort(np.concatenate(kept)[: PROMPT - 1], axis=-1)


@functools.cache
def group():
    """Sampled by the kernels, with advantages of both signs."""
    _, base, adapters, prompt = policy()
    state = captured("auto")[0]
    args = (model("auto"), base, adapters, state, int(prompt[-1]), jax.random.key(0))
    samples = sampling.sample(*args, group=GROUP, max_new_tokens=T, eos_ids=())
    inputs, targets, lengths = replay.member_inputs(int(prompt[-1]), np.asarray(samples.tokens).tolist(), T)
    gains = advantages.group_advantages(jnp.asarray([1.0, 0.0]), jnp.zeros(GROUP, jnp.int32), num_groups=1)
    mask = np.ones((GROUP, T), bool)
    return rollout.Group(inputs, targets, lengths, mask, np.asarray(gains), None, np.asarray(samples.logprobs), None)


def gradient(name):
    """Of both members, as one fp64 vector."""
    _, base, adapters, _ = policy()
    settings = rollout.PolicyConfig(eos_ids=(), capacity=PROMPT, group=GROUP, max_new_tokens=T, chunk=CHUNK)
    total, _ = train.add_group(
        model(name), settings, base, lora.per_device(adapters, None), captured("auto")[0], group(), None
    )
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(total.grads)])


def test_the_kernels_serve():
    found = kernels.implementations(model("auto"))
    assert [found[name] for name in ("indexer_topk", "sparse_mla", "grouped_matmul")] == ["hopper"] * 3
    assert set(kernels.implementations(model("reference")).values()) == {"reference"}


def test_capture_selects_and_keeps_the_same():
    (state, chosen), (wanted, expected) = captured("auto"), captured("reference")
    assert ((chosen >= 0).sum(-1) == np.minimum(np.arange(1, PROMPT), architecture().index_topk)).all()
    common = sum(np.intersect1d(a[a >= 0], b[b >= 0]).size for a, b in zip(chosen, expected, strict=True))
    assert common / (expected >= 0).sum() >= SELECTED
    for layer in range(4):
        a, b = (np.asarray(x.latents[0][0, layer], np.float32) for x in (state, wanted))
        assert np.linalg.norm(a - b) <= RELATIVE_L2 * np.linalg.norm(b), layer


def test_selections_are_identical_in_fp32():
    """No kernel rounds what it is given: fp32 is the reference's, whatever is asked for."""
    assert "hopper" not in kernels.implementations(model("auto", "float32")).values()
    np.testing.assert_array_equal(captured("auto", "float32")[1], captured("reference", "float32")[1])


def test_scores_agree_with_sampling_and_with_the_reference():
    _, base, adapters, _ = policy()
    rows = group()
    found = {
        name: np.asarray(
            replay.score(
                model(name), base, adapters, captured("auto")[0], rows.inputs, rows.targets, rows.lengths
            )[0]
        )
        for name in ("auto", "reference")
    }
    np.testing.assert_allclose(found["auto"], found["reference"], atol=LOGP)
    np.testing.assert_allclose(found["auto"], rows.sampler_logp, atol=LOGP)


def test_gradients_agree():
    found, wanted = gradient("auto"), gradient("reference")
    assert np.isfinite(found).all() and np.linalg.norm(wanted) > 0
    assert found @ wanted >= COSINE * np.linalg.norm(found) * np.linalg.norm(wanted)
    assert np.linalg.norm(found - wanted) <= RELATIVE_L2 * np.linalg.norm(wanted)
