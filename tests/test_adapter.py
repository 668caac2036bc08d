"""PEFT export and import: round trip, refusals, and Hugging Face's own logits."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from longstraw_jax import forward, lora, sharding
from longstraw_jax.config import LoraConfig, model_config_from_hf
from longstraw_jax.io import adapter
from longstraw_jax.model import decoder

TINY = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 10,
    "v_head_dim": 8,
    "index_n_heads": 8,  # few heads would leave ties at score 0, which transformers breaks otherwise
    "index_head_dim": 8,
    "index_topk": 8,
    "indexer_types": ["full", "full", "full", "shared"],
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "max_position_embeddings": 128,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": [1],
    "dtype": "float32",
}
CONFIG = model_config_from_hf(TINY)
# Ranks and alphas all differ, so that a mixed-up pattern shows.
EVERY = LoraConfig(
    (
        ("dense", 2, 6.0),
        ("kv_a", 3, 5.0),
        ("kv_b", 4, 2.0),
        ("lm_head", 5, 8.0),
        ("o", 2, 1.0),
        ("q_a", 1, 3.0),
        ("q_b", 3, 4.0),
        ("routed", 2, 7.0),
        ("shared", 4, 9.0),
    )
)


def random_adapters(config, lora_config, scale=0.2, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jax.numpy.asarray(scale * rng.standard_normal(x.shape), x.dtype),
        lora.adapter_shapes(config, lora_config),
    )


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    adapters = random_adapters(CONFIG, EVERY)
    adapter.export_peft(folder, CONFIG, EVERY, adapters, base_model_name="tiny")
    return folder, adapters


def copy(folder, to):
    for name in (adapter.CONFIG, adapter.WEIGHTS):
        (to / name).write_bytes((folder / name).read_bytes())
    return to


def test_round_trip_is_bit_identical(exported):
    folder, adapters = exported
    assert_same(adapter.import_peft(folder, CONFIG, EVERY), adapters)
    assert sorted(path.name for path in folder.iterdir()) == [adapter.CONFIG, adapter.WEIGHTS]


def test_round_trip_over_a_mesh(exported, tmp_path):
    folder, adapters = exported
    mesh = sharding.make_mesh(8)
    read = adapter.import_peft(folder, CONFIG, EVERY, mesh=mesh)
    routed = read["segments"]["1"]["1"]["mlp.experts.gate_proj"]["a"]
    assert routed.addressable_shards[0].data.shape[1] == 1, "experts lie on their own device"
    assert read["lm_head"]["a"].sharding.is_fully_replicated
    adapter.export_peft(tmp_path, CONFIG, EVERY, read, base_model_name="tiny")
    assert (tmp_path / adapter.WEIGHTS).read_bytes() == (folder / adapter.WEIGHTS).read_bytes()


def test_layout_of_fused_experts(exported):
    """The delta of PEFT's ParamWrapper ("o r e, e r i -> e o i") is that of the separate gate, up and down pairs."""
    folder, adapters = exported
    tensors = safetensors.numpy.load_file(folder / adapter.WEIGHTS)
    written = json.loads((folder / adapter.CONFIG).read_text())
    prefix, e = "base_model.model.model.layers.2.mlp.experts", CONFIG.n_routed_experts

    def peft_delta(prefix, name):
        a, b = (tensors[f"{prefix}.lora_{x}.weight"] for x in "AB")
        a, b = a.reshape(e, -1, a.shape[-1]), b.reshape(b.shape[0], -1, e)
        assert a.shape[1] == written["rank_pattern"][name]
        return np.einsum("ore,eri->eoi", b, a) * written["alpha_pattern"][name] / written["rank_pattern"][name]

    layer = adapters["segments"]["1"]["0"]

    def own_delta(name):
        a, b = (np.asarray(layer[f"mlp.experts.{name}"][x][0]) for x in "ab")
        return np.einsum("eir,ero->eoi", a, b) * EVERY.scales()[f"mlp.experts.{name}"]

    gate_up = np.concatenate([own_delta("gate_proj"), own_delta("up_proj")], axis=1)
    np.testing.assert_allclose(peft_delta(f"{prefix}.base_layer", "mlp.experts.gate_up_proj"), gate_up, atol=1e-6)
    np.testing.assert_allclose(peft_delta(prefix, "mlp.experts.down_proj"), own_delta("down_proj"), atol=1e-6)


@pytest.mark.parametrize("change", ["rank", "alpha"])
def test_g5_other_rank_or_alpha_is_refused_with_both_values(exported, change):
    targets = {name: (rank, alpha) for name, rank, alpha in EVERY.targets}
    targets["q_b"] = (6, 4.0) if change == "rank" else (3, 12.0)
    other = LoraConfig(tuple((name, *size) for name, size in targets.items()))
    expected = "found 3, expected 6" if change == "rank" else r"found 4\.0, expected 12\.0"
    with pytest.raises(adapter.AdapterError, match=rf"{change} of self_attn\.q_b_proj: {expected}"):
        adapter.import_peft(exported[0], CONFIG, other)


def test_g5_other_targets_are_refused(exported):
    fewer = LoraConfig(tuple(t for t in EVERY.targets if t[0] not in ("q_a", "shared")))
    with pytest.raises(adapter.AdapterError, match="target_modules: found .*q_a_proj.*target_parameters: found"):
        adapter.import_peft(exported[0], CONFIG, fewer)


def test_g5_other_scaling_rule_is_refused(exported, tmp_path):
    folder = copy(exported[0], tmp_path)
    raw = json.loads((folder / adapter.CONFIG).read_text())
    (folder / adapter.CONFIG).write_text(json.dumps(raw | {"use_rslora": True}))
    with pytest.raises(adapter.AdapterError, match="use_rslora: found True, expected False"):
        adapter.import_peft(folder, CONFIG, EVERY)


def test_every_wrong_tensor_is_listed(exported, tmp_path):
    folder = copy(exported[0], tmp_path)
    tensors = safetensors.numpy.load_file(folder / adapter.WEIGHTS)
    head = "base_model.model.lm_head.lora_A.weight"
    gone = "base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"
    shared_ranks = "base_model.model.model.layers.3.mlp.experts.base_layer.lora_B.weight"
    tensors["base_model.model.model.layers.9.self_attn.o_proj.lora_B.weight"] = tensors.pop(gone)
    tensors[head] = tensors[head].astype(np.float16)
    tensors[shared_ranks] = np.ones_like(tensors[shared_ranks])
    safetensors.numpy.save_file(tensors, folder / adapter.WEIGHTS)
    with pytest.raises(adapter.AdapterError) as error:
        adapter.import_peft(folder, CONFIG, EVERY)
    for part in (
        f"{gone}: missing, expected F32[32, 2]",
        f"{head}: found F16[5, 32], expected F32[5, 32]",
        f"{shared_ranks}: gate and up share ranks",
        "layers.9.self_attn.o_proj.lora_B.weight: unexpected",
    ):
        assert part in str(error.value)


def test_damaged_and_absent_files_are_refused(exported, tmp_path):
    with pytest.raises(adapter.AdapterError, match="does not exist"):
        adapter.import_peft(tmp_path, CONFIG, EVERY)
    folder = copy(exported[0], tmp_path)
    whole = (folder / adapter.WEIGHTS).read_bytes()
    (folder / adapter.WEIGHTS).write_bytes(whole[:-8])
    with pytest.raises(adapter.AdapterError, match="damaged"):
        adapter.import_peft(folder, CONFIG, EVERY)


def test_export_refuses_adapters_of_another_model(tmp_path):
    wider = dataclasses.replace(CONFIG, intermediate_size=40)
    with pytest.raises(lora.LoraError, match=r"mlp\.gate_proj\.b: found float32\[2, 2, 40\], expected .*24"):
        adapter.export_peft(tmp_path, CONFIG, EVERY, random_adapters(wider, EVERY), base_model_name="tiny")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target, warned", [("kv_b", True), ("q_b", False)])
def test_g2_export_warns_of_kv_b(tmp_path, caplog, target, warned):
    targets = LoraConfig(((target, 2, 4.0),))
    with caplog.at_level("WARNING"):
        adapter.export_peft(tmp_path, CONFIG, targets, random_adapters(CONFIG, targets), base_model_name="tiny")
    assert ("kv_b_proj" in caplog.text) == warned


def base_from_torch(model):
    """Base weights from the torch model's own parameters, where experts are fused."""
    state = {name: x.detach().numpy() for name, x in model.state_dict().items()}
    fused = CONFIG.moe_intermediate_size

    def one(layer, module):
        prefix = f"model.layers.{layer}.{module}"
        if module.startswith("mlp.experts."):
            kind = module.rsplit(".", 1)[-1]
            if kind == "down_proj":
                return state[prefix].transpose(0, 2, 1)
            gate_up = state[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
            part = gate_up[:, :fused] if kind == "gate_proj" else gate_up[:, fused:]
            return part.transpose(0, 2, 1)
        x = state[prefix]
        return x.T if x.ndim == 2 else x

    def leaf(path, shape):
        keys = [key.key for key in path]
        if keys[0] == "segments":
            segment, module = CONFIG.segments()[keys[1]], ".".join(keys[4:])
            layers = [segment.layer_index(i, keys[3]) for i in range(segment.stack(keys[3]))]
            return np.stack([one(layer, module) for layer in layers])
        x = state[{"embed_tokens": "model.embed_tokens", "norm": "model.norm"}.get(keys[0], keys[0]) + ".weight"]
        return x.T if keys[0] == "lm_head" else x

    return jax.tree_util.tree_map_with_path(leaf, decoder.param_shapes(CONFIG))


@functools.partial(jax.jit, static_argnums=0)
def our_logits(targets, base, adapters, ids):
    model = decoder.make_model(CONFIG, lora=targets)
    hidden, _ = forward.forward(model, base, adapters, ids)
    return forward.logits(model, base, adapters, hidden)


# Module-only, parameter-only and mixed adapters go different ways through PEFT.
MODULES, PARAMETERS = LoraConfig((("q_b", 3, 4.0),)), LoraConfig((("routed", 2, 7.0),))


@pytest.mark.hf
@pytest.mark.parametrize("targets", [EVERY, MODULES, PARAMETERS], ids=["every", "q_b", "routed"])
def test_peft_reproduces_our_logits(tmp_path, targets):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    hf_config = transformers.AutoConfig.for_model(**TINY)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").eval()
    ids = np.random.default_rng(1).integers(2, CONFIG.vocab_size, (2, 20)).astype(np.int32)

    def hf_logits(model):
        with torch.no_grad():
            return model(torch.from_numpy(ids).long(), use_cache=False).logits.numpy()

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
    base, adapters = base_from_torch(model), random_adapters(CONFIG, targets)
    plain = hf_logits(model)
    adapter.export_peft(tmp_path, CONFIG, targets, adapters, base_model_name="tiny")
    adapted = hf_logits(peft.PeftModel.from_pretrained(model, str(tmp_path)))
    np.testing.assert_allclose(our_logits(None, base, None, ids), plain, atol=1e-4)
    assert np.abs(adapted - plain).max() > 1e-2, "PEFT applied the adapter"
    np.testing.assert_allclose(our_logits(targets, base, adapters, ids), adapted, atol=1e-4)
