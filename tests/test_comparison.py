"""Agreement in figures: they see every kind of difference, and each that is over its tolerance is told."""

import json

import numpy as np
import pytest

from longstraw_jax.evidence import comparison


def trees():
    """Two small trees of two targets, alike."""
    make = lambda: {  # noqa: E731
        "segments": {"0": {"q": {"a": np.asarray([3.0, -4.0]), "b": np.asarray([[1.0], [2.0]])}}},
        "lm_head": {"a": np.asarray([0.0, 12.0])},
    }
    return make(), make()


TARGETS = {"segments.0.q.a": "q_a", "segments.0.q.b": "q_a", "lm_head.a": "lm_head"}


def test_equal_trees_show_no_difference():
    figures = comparison.compare(*trees(), TARGETS)
    assert figures["cosine"] == pytest.approx(1) and figures["relative_l2"] == 0
    assert figures["largest_error"] == figures["largest_difference"] == 0
    assert figures["norm_found"] == figures["norm_wanted"] == pytest.approx(174**0.5)
    assert (figures["elements"], figures["zero_only_found"], figures["zero_only_wanted"]) == (6, 0, 0)
    assert set(figures["groups"]) == {"q_a", "lm_head"}


def test_a_difference_shows_overall_in_its_tensor_and_in_its_group_only():
    found, wanted = trees()
    found["segments"]["0"]["q"]["b"][1, 0] = 2.5
    figures = comparison.compare(found, wanted, TARGETS)
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
    figures = comparison.compare(found, wanted, TARGETS)
    assert (figures["zero_only_found"], figures["zero_only_wanted"]) == (2, 1)


def test_an_all_zero_tensor_that_should_be_zero_is_no_error_and_one_that_should_not_is():
    found, wanted = trees()
    wanted["lm_head"]["a"][:] = 0
    assert comparison.compare(found, wanted, TARGETS)["largest_error"] > 1e20
    found["lm_head"]["a"][:] = 0
    figures = comparison.compare(found, wanted, TARGETS)
    assert figures["largest_error"] == 0 and figures["groups"]["lm_head"]["cosine"] is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_b7_a_single_nan_fails(bad, side):
    pair = trees()
    pair[side]["lm_head"]["a"][0] = bad
    figures = comparison.compare(*pair, TARGETS)
    assert figures["nonfinite"] == 1 and figures["cosine"] is None
    json.dumps(figures, allow_nan=False)
    case = good_case() | {"gradient": figures}
    problems = comparison.case_problems("ratio_1", case, comparison.TOLERANCES["float32"])
    assert "gradient NaN or infinite entries is 1; accepted: at most 0" in problems


def test_trees_of_other_shapes_are_refused():
    found, wanted = trees()
    found["lm_head"]["a"] = np.zeros(3)
    with pytest.raises(ValueError, match=r"found is shaped .*\(3,\).*accepted: the wanted tree's"):
        comparison.compare(found, wanted, TARGETS)


def good_case():
    same = comparison.compare(*trees(), TARGETS)
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
    tolerance, case = comparison.TOLERANCES["float32"], good_case()
    assert comparison.case_problems("ratio_1", case, tolerance) == []
    case[part] = case[part] | change if isinstance(change, dict) else change
    (line,) = comparison.case_problems("ratio_1", case, tolerance)
    assert line.startswith(problem)


def test_bfloat16_is_held_to_cosine_and_relative_l2():
    case = good_case()
    case["gradient"] = case["gradient"] | {"cosine": 0.99998, "relative_l2": 6e-3, "largest_error": 1.0}
    problems = comparison.case_problems("ratio_1", case, comparison.TOLERANCES["bfloat16"])
    assert [line.split()[1] for line in problems] == ["relative_l2", "cosine"]


def test_clipping_without_a_clipped_token_is_a_problem():
    assert "accepted: above 0" in comparison.case_problems("clipping", good_case(), comparison.TOLERANCES["float32"])[0]


CHOSEN = dict(choices=2000, flipped=0, tokens=1, first=1, invalid=0, widest_gap=None)  # of a layer


def test_more_flipped_choices_than_the_bound_are_a_problem_of_their_kind():
    layer = CHOSEN | {"flipped": 1}
    flipped = {"selections": {0: layer, 2: layer}, "routes": {2: layer | {"flipped": 3}}}
    (line,) = comparison.choice_problems(flipped, comparison.TOLERANCES["float32"])
    assert line == "routes: 0.0015 of the choices are flipped; accepted: at most 0.001"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_wrong_choice_far_from_a_tie_is_a_problem_however_small_its_share(dtype):
    tolerance = comparison.TOLERANCES[dtype]
    near, far = (CHOSEN | {"widest_gap": gap} for gap in (tolerance.gap, 1.1 * tolerance.gap))
    assert comparison.choice_problems({"selections": {0: CHOSEN, 2: near}}, tolerance) == []
    (line,) = comparison.choice_problems({"selections": {0: far, 2: near}}, tolerance)
    said = "selections: the scores of a flipped choice and of the one it displaced are"
    assert line.startswith(f"{said} {1.1 * tolerance.gap} of the largest apart; accepted: at most ")


def test_a_choice_that_no_tie_explains_is_a_problem_with_and_without_scores():
    (line,) = comparison.choice_problems({"routes": {2: CHOSEN | {"invalid": 1}}}, comparison.TOLERANCES["float32"])
    assert line == "routes: 1 choices are missing, doubled or out of reach; accepted: 0"
