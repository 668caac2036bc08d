"""Gradient parity: figures that see every kind of difference, and one real comparison on eight devices."""

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
from longstraw_jax.evidence import parity
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


def trees():
    """Two small trees of two targets, alike."""
    make = lambda: {  # noqa: E731
        "segments": {"0": {"q": {"a": np.asarray([3.0, -4.0]), "b": np.asarray([[1.0], [2.0]])}}},
        "lm_head": {"a": np.asarray([0.0, 12.0])},
    }
    return make(), make()


TARGETS = {"segments.0.q.a": "q_a", "segments.0.q.b": "q_a", "lm_head.a": "lm_head"}


def test_equal_trees_show_no_difference():
    figures = parity.compare(*trees(), TARGETS)
    assert figures["cosine"] == pytest.approx(1) and figures["relative_l2"] == 0
    assert figures["largest_error"] == figures["largest_difference"] == 0
    assert figures["norm_found"] == figures["norm_wanted"] == pytest.approx(174**0.5)
    assert (figures["elements"], figures["zero_only_found"], figures["zero_only_wanted"]) == (6, 0, 0)
    assert set(figures["groups"]) == {"q_a", "lm_head"}


def test_a_difference_shows_overall_in_its_tensor_and_in_its_group_only():
    found, wanted = trees()
    found["segments"]["0"]["q"]["b"][1, 0] = 2.5
    figures = parity.compare(found, wanted, TARGETS)
    assert figures["largest_difference"] == 0.5 and figures["largest_error"] == 0.25
    assert figures["worst_tensor"] == "segments.0.q.b"
    assert figures["relative_l2"] == pytest.approx(0.5 / 174**0.5)
    dot = 174 + 2 * 0.5
    assert figures["cosine"] == pytest.approx(dot / (174 * (174 + 2.25)) ** 0.5)
    assert figures["groups"]["lm_head"] == {"cosine": pytest.approx(1), "relative_l2": 0}
    assert figures["groups"]["q_a"]["relative_l2"] == pytest.approx(0.5 / 30**0.5)


def test_zeros_on_one_side_are_counted_by_side():
    found, wanted = trees()
    found["lm_head"]["a"][:] = [1e-30, 0.0]
    found["segments"]["0"]["q"]["a"][0] = 0.0
    figures = parity.compare(found, wanted, TARGETS)
    assert (figures["zero_only_found"], figures["zero_only_wanted"]) == (2, 1)


def test_an_all_zero_tensor_that_should_be_zero_is_no_error_and_one_that_should_not_is():
    found, wanted = trees()
    wanted["lm_head"]["a"][:] = 0
    assert parity.compare(found, wanted, TARGETS)["largest_error"] > 1e20
    found["lm_head"]["a"][:] = 0
    figures = parity.compare(found, wanted, TARGETS)
    assert figures["largest_error"] == 0 and figures["groups"]["lm_head"]["cosine"] is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_b7_a_single_nan_fails(bad, side):
    pair = trees()
    pair[side]["lm_head"]["a"][0] = bad
    figures = parity.compare(*pair, TARGETS)
    assert figures["nonfinite"] == 1 and figures["cosine"] is None
    json.dumps(figures, allow_nan=False)
    case = good_case() | {"gradient": figures}
    problems = parity.case_problems("ratio_1", case, parity.TOLERANCES["float32"])
    assert "gradient NaN or infinite entries is 1; accepted: at most 0" in problems


def test_trees_of_other_shapes_are_refused():
    found, wanted = trees()
    found["lm_head"]["a"] = np.zeros(3)
    with pytest.raises(ValueError, match=r"found is shaped .*\(3,\).*accepted: the wanted tree's"):
        parity.compare(found, wanted, TARGETS)


def good_case():
    same = parity.compare(*trees(), TARGETS)
    return {
        "gradient": same,
        "step": same,
        "loss_found": 0.5,
        "loss_wanted": 0.5,
        "clipped_fraction": 0.0,
        "step_taken": True,
        "control": same | {"relative_l2": 0.5},
    }


@pytest.mark.parametrize(
    "part, change, problem",
    [
        ("gradient", {"relative_l2": 1.1e-5}, "gradient relative_l2 is 1.1e-05; accepted: at most 1e-05"),
        ("gradient", {"relative_l2": None}, "gradient relative_l2 is None"),
        ("gradient", {"largest_error": 1.1e-5}, "gradient largest_error (lm_head.a) is 1.1e-05"),
        ("step", {"largest_difference": 1.1e-6}, "step largest_difference is 1.1e-06"),
        ("step", {"relative_l2": 2e-3}, "step relative_l2 is 0.002"),
        ("step", {"nonfinite": 2}, "step NaN or infinite entries is 2"),
        ("control", {"relative_l2": 1e-6}, "control relative_l2 is 1e-06; accepted: at least 0.0001"),
        ("step_taken", False, "the optimizer step was skipped"),
        ("loss_wanted", float("nan"), "loss_wanted is nan"),
        ("clipped_fraction", 0.1, "clipped_fraction is 0.1; accepted: 0"),
    ],
)
def test_every_figure_over_tolerance_is_a_problem_of_its_own(part, change, problem):
    tolerance, case = parity.TOLERANCES["float32"], good_case()
    assert parity.case_problems("ratio_1", case, tolerance) == []
    case[part] = case[part] | change if isinstance(change, dict) else change
    (line,) = parity.case_problems("ratio_1", case, tolerance)
    assert line.startswith(problem)


def test_bfloat16_is_held_to_cosine_and_relative_l2():
    case = good_case()
    case["gradient"] = case["gradient"] | {"cosine": 0.99998, "relative_l2": 6e-3, "largest_error": 1.0}
    problems = parity.case_problems("ratio_1", case, parity.TOLERANCES["bfloat16"])
    assert [line.split()[1] for line in problems] == ["relative_l2", "cosine"]


def test_clipping_without_a_clipped_token_is_a_problem():
    assert "accepted: above 0" in parity.case_problems("clipping", good_case(), parity.TOLERANCES["float32"])[0]


CHOSEN = dict(choices=2000, flipped=0, tokens=1, first=1, invalid=0, widest_gap=None)  # of a layer


def test_more_flipped_choices_than_the_bound_are_a_problem_of_their_kind():
    layer = CHOSEN | {"flipped": 1}
    flipped = {"selections": {0: layer, 2: layer}, "routes": {2: layer | {"flipped": 3}}}
    (line,) = parity.choice_problems(flipped, parity.TOLERANCES["float32"])
    assert line == "routes: 0.0015 of the choices are flipped; accepted: at most 0.001"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_wrong_choice_far_from_a_tie_is_a_problem_however_small_its_share(dtype):
    tolerance = parity.TOLERANCES[dtype]
    near, far = (CHOSEN | {"widest_gap": gap} for gap in (tolerance.gap, 1.1 * tolerance.gap))
    assert parity.choice_problems({"selections": {0: CHOSEN, 2: near}}, tolerance) == []
    (line,) = parity.choice_problems({"selections": {0: far, 2: near}}, tolerance)
    said = "selections: the scores of a flipped choice and of the one it displaced are"
    assert line.startswith(f"{said} {1.1 * tolerance.gap} of the largest apart; accepted: at most ")


def test_a_choice_that_no_tie_explains_is_a_problem_with_and_without_scores():
    (line,) = parity.choice_problems({"routes": {2: CHOSEN | {"invalid": 1}}}, parity.TOLERANCES["float32"])
    assert line == "routes: 1 choices are missing, doubled or out of reach; accepted: 0"


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
    targets = parity.tensor_targets(MODEL)
    assert parity.compare(again, first, targets)["relative_l2"] == 0
    assert parity.compare(other, first, targets)["relative_l2"] > 1
    zeros = jax.tree.map(np.zeros_like, first)
    assert parity.compare(first, zeros, targets)["zero_only_wanted"] == lora.count_parameters(MODEL.config, MODEL.lora)


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
