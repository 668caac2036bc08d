"""Gradient parity: one real comparison on eight devices, its choices, its command."""

import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny_models
from absl import flags

from longstraw_jax import lora, rollout, sharding
from longstraw_jax.config import LORA_TARGETS, LoraConfig, model_config_from_hf
from longstraw_jax.evidence import comparison, parity
from longstraw_jax.model import choices, decoder

EXPERIMENTS = pathlib.Path(__file__).parents[1] / "experiments"

TOKENS = 150
# A dense full layer and a sparse shared one: every target, few programs.
CHANGES = dict(indexer_types=["full", "shared"], mlp_layer_types=["dense", "sparse"], num_hidden_layers=2)
WIDTHS = dict(  # multiples of eight devices
    vocab_size=64, num_attention_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, v_head_dim=8,
    index_head_dim=16, intermediate_size=32, moe_intermediate_size=16,
)  # fmt: skip
ARCHITECTURE = tiny_models.RAW | CHANGES | WIDTHS | dict(max_position_embeddings=192, initializer_range=0.2)
MODEL = decoder.make_model(
    model_config_from_hf(ARCHITECTURE), lora=LoraConfig(tuple((name, 2, 4.0) for name in sorted(LORA_TARGETS)))
)
CONFIG = f"""
import runpy


def get_config():
    config = runpy.run_path({str(EXPERIMENTS / "configs/parity_tiny.py")!r})["get_config"]()
    config.model.architecture = {ARCHITECTURE!r}
    config.mesh.devices = 8
    config.mesh.emulate = False  # the tests' own devices
    config.capture.chunk = 64
    config.grpo.max_new_tokens = 16
    for target in config.lora:
        config.lora[target].rank = 2
        config.lora[target].alpha = 4.0
    return config
"""


@pytest.fixture(scope="module")
def gradient_parity():
    """The experiment, imported as the command imports its neighbours."""
    sys.path.insert(0, str(EXPERIMENTS))
    try:
        import gradient_parity

        yield gradient_parity
    finally:
        sys.path.remove(str(EXPERIMENTS))


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "parity_test.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def command(gradient_parity, config_file):
    """Exit status of the command in this process, where its programs stay compiled."""

    def run(*arguments):
        values = flags.FlagValues()
        gradient_parity.define_flags(values)
        argv = ["gradient_parity", f"--config={config_file}", *arguments]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", argv)  # where config_flags looks for overrides
            rest = values(argv)
        return gradient_parity.command(values, rest[1:])

    return run


@pytest.fixture(scope="module")
def receipt(command, tmp_path_factory):
    path = tmp_path_factory.mktemp("out") / "parity.json"
    assert command(f"--tokens={TOKENS}", f"--out={path}") == 0
    return json.loads(path.read_text())


def test_flipped_keys_of_responses_are_within_their_reach(monkeypatch):
    """A response's tokens stand behind the prompt's: the first key instead of the nearest but K is a flip, no more."""
    config, prompt, longest = MODEL.config, np.arange(12, dtype=np.int32), 4
    top, tokens = config.index_topk, prompt.size + longest
    back = np.arange(tokens)[:, None] - np.arange(top)
    near = np.where(back < 0, -1, back).astype(np.int32)
    far = np.where((back > 0) & (np.arange(top) == top - 1), 0, near)
    routes = ((None, np.tile(np.arange(config.num_experts_per_tok, dtype=np.int32), (1, 1, tokens, 1))),)
    theirs, own = (choices.Choices((ids[None, None],), routes) for ids in (near, far))
    monkeypatch.setattr(parity, "full_choices", lambda *args: (own, None))
    targets, lengths = np.zeros((2, longest), np.int32), np.asarray([longest, 2])
    group = rollout.Group(targets, targets, lengths, *[None] * 5)
    _, flipped = parity._own_choices(parity.Side(MODEL, None, None), "exact", prompt, group, [theirs] * 2)
    (layer,) = flipped["selections"].values()
    seen = prompt.size - 1 + longest + 2  # the prompt once; its first tokens reach no further than K
    assert (layer["flipped"], layer["tokens"], layer["invalid"]) == (seen - top, seen - top, 0)


def test_masks_of_the_modes_end_before_the_boundary_token():
    masks = {mode: parity.mode_masks(mode, 3, 6) for mode in rollout.MODES}
    np.testing.assert_array_equal(masks["detached"]["detach"], [1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(masks["frozen"]["gate"], [0, 0, 1, 1, 1, 1])
    assert masks["detached"]["gate"].all() and masks["exact"]["gate"].all()
    assert not masks["frozen"]["detach"].any() and not masks["exact"]["detach"].any()


def test_adapters_are_seeded_and_nowhere_zero():
    first, again, other = (parity.seeded_adapters(MODEL, seed) for seed in (1, 1, 2))
    lora.check_adapters(first, MODEL.config, MODEL.lora)
    targets = comparison.tensor_targets(MODEL)
    assert comparison.compare(again, first, targets)["relative_l2"] == 0
    assert comparison.compare(other, first, targets)["relative_l2"] > 1
    zeros = jax.tree.map(np.zeros_like, first)
    trained = lora.count_parameters(MODEL.config, MODEL.lora)
    assert comparison.compare(first, zeros, targets)["zero_only_wanted"] == trained


def test_j2_replay_on_eight_devices_equals_whole_sequence_autodiff(receipt):
    """Gradients and one AdamW step, every mode, at ratio 1 and with clipped tokens."""
    assert receipt["passed"] and receipt["problems"] == [] and set(receipt["modes"]) == set(rollout.MODES)
    for cases in receipt["modes"].values():
        assert set(cases) == set(parity.CASES)
        for figures in cases.values():
            gradient = figures["gradient"]
            assert gradient["relative_l2"] < 1e-5 and gradient["cosine"] > 1 - 1e-9
            assert gradient["zero_only_found"] == gradient["zero_only_wanted"] == gradient["nonfinite"] == 0
            assert set(gradient["groups"]) == {name for name, _, _ in MODEL.lora.targets}
            assert all(group["cosine"] > 1 - 1e-9 for group in gradient["groups"].values())
            assert figures["step"]["relative_l2"] < 1e-3 and figures["step"]["norm_wanted"] > 0
            assert figures["loss_found"] == pytest.approx(figures["loss_wanted"], abs=1e-5)
            assert figures["free"]["relative_l2"] < 1e-5  # so few tokens that no choice is near a tie


def test_the_receipt_counts_every_choice_and_its_flips(receipt):
    """Of the prompt once and of every response: its full layer's keys and its sparse layer's experts."""
    prompt, responses = receipt["tokens"]["prompt"] - 1, receipt["tokens"]["responses"]
    seen = [np.arange(1, prompt + 1), *(prompt + 1 + np.arange(n) for n in responses)]
    keys = sum(int(np.minimum(x, ARCHITECTURE["index_topk"]).sum()) for x in seen)
    for flipped in receipt["flipped"].values():
        assert flipped["selections"]["0"]["choices"] == keys
        experts = ARCHITECTURE["num_experts_per_tok"] * (prompt + sum(responses))
        assert flipped["routes"]["1"]["choices"] == experts
        assert all(x["flipped"] == x["invalid"] == 0 for layers in flipped.values() for x in layers.values())
    assert receipt["tolerance"]["flipped"] == receipt["tolerance"]["gap"] == 1e-3


def test_the_stated_share_of_tokens_is_clipped(receipt):
    for cases in receipt["modes"].values():
        assert cases["ratio_1"]["clipped_fraction"] == 0
        assert abs(cases["clipping"]["clipped_fraction"] - parity.CLIPPED_SHARE) < 0.15
        assert cases["clipping"]["gradient"]["norm_wanted"] != cases["ratio_1"]["gradient"]["norm_wanted"]


def test_the_control_tells_the_modes_apart(receipt):
    """Dropping the prompt's own term is far above round-off."""
    for figures in (*receipt["modes"]["detached"].values(), *receipt["modes"]["exact"].values()):
        assert figures["control"]["relative_l2"] > 1e-2 and figures["control"]["cosine"] < 0.999
    assert all("control" not in figures for figures in receipt["modes"]["frozen"].values())


def test_the_receipt_says_what_ran(receipt):
    assert receipt["mesh"] == {"ctx": 8} and receipt["dtype"] == "float32"
    assert receipt["tokens"] == {"prompt": TOKENS, "responses": [16, 6, 11]}
    assert set(receipt["code"]) == {"commit", "dirty", "reason"} and len(receipt["weights_fingerprint"]) == 16
    assert {"jax", "optax"} <= set(receipt["packages"]) and receipt["seeds"]["adapters"] == 1
    assert receipt["tolerance"]["relative_l2"] == 1e-5 and receipt["config"]["optimizer"]["learning_rate"] == 1e-6


def test_over_tolerance_exits_1_and_says_what(command, capsys):
    """At a learning rate of 1 the step's absolute tolerance is out of reach."""
    assert command(f"--tokens={TOKENS}", "--modes=detached", "--config.optimizer.learning_rate=1.0") == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:3] == ["mode", "case", "compared"] and out[-1] == "FAIL"
    assert [line.split()[2] for line in out[1:9]] == ["gradient", "step", "free", "control"] * 2
    assert [line.split()[1] for line in out[9:11]] == ["selections:", "routes:"]
    assert any(line.startswith("detached ratio_1: step largest_difference is ") for line in out)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ([], "accepted: --config=FILE --tokens=N"),
        (["--tokens=9", "more"], "arguments ['more']"),
        (["--tokens=1"], "--tokens=1; accepted: at least 2"),
        (["--tokens=177"], "of 193 tokens exceeds max_position_embeddings=192"),
        (["--tokens=9", "--modes=whole"], "mode='whole'; accepted: 'frozen' or 'detached' or 'exact'"),
        (["--tokens=9", "--modes=frozen,frozen"], "--modes=frozen,frozen; accepted: each mode once"),
        (["--tokens=9", "--config.grpo.beta=0.1"], "grpo.beta=0.1; accepted: 0"),
        (["--tokens=9", "--config.mesh.devices=33"], "mesh.devices=33"),
        (["--tokens=9", "--config.mesh.devices=3"], "is not divisible by the mesh of 3 devices"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(command, capsys, arguments, named):
    assert command(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and named in err and err.count("\n") == 1


def test_the_command_itself_refuses_an_unknown_mode(config_file):
    done = subprocess.run(
        [sys.executable, EXPERIMENTS / "gradient_parity.py", f"--config={config_file}", "--tokens=9", "--modes=whole"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: mode='whole'")


def test_what_lies_on_its_device_is_not_copied():
    """A full-width base would not fit twice."""
    side = parity.Side(MODEL, decoder.init_params(MODEL.config, 0), parity.seeded_adapters(MODEL, 1))
    alone = parity.place(side, None)
    assert all(a is b for a, b in zip(jax.tree.leaves(side.base), jax.tree.leaves(alone.base), strict=True))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(alone.adapters))
    wide = parity.place(alone, sharding.make_mesh(8))
    jax.tree.map(np.testing.assert_array_equal, wide.base, side.base)
    assert len(wide.base["lm_head"]["weight"].sharding.device_set) == 8
