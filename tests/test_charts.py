"""Charts: where points lie, gaps, bars and strips, and that no text passes unescaped."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from longstraw_jax.evidence import charts


def drawn(fragment):
    return ElementTree.fromstring(fragment)


def paths(fragment, css):
    return [p.get("d") for p in drawn(fragment).iter("path") if css in (p.get("class") or "").split()]


def test_points_lie_where_their_values_say():
    fragment = charts.curves("t", [1, 2, 3, 4], {"a": [0.0, 1.0, None, 4.0]})
    points = [tuple(map(float, re.findall(r"[\d.]+", d)[:2])) for d in paths(fragment, "dot")]
    assert points == [(12.5, 100.0), (37.5, 75.0), (87.5, 0.0)]
    assert paths(fragment, "line") == ["M12.50 100.00L37.50 75.00M87.50 0.00"]
    labels = [span.text for span in drawn(fragment).find(".//div[@class='y']")]
    assert labels == ["4", "2", "0"]


def test_a_long_run_has_a_line_and_no_dots():
    fragment = charts.curves("t", range(1, 501), {"a": list(range(500))})
    assert len(paths(fragment, "line")) == 1 and not paths(fragment, "dot")


def test_what_has_no_value_is_not_drawn_and_a_constant_has_an_axis():
    assert charts.curves("t", [1, 2], {"a": [None, None]}) == ""
    labels = [span.text for span in drawn(charts.curves("t", [1], {"a": [0.0]})).find(".//div[@class='y']")]
    assert labels == ["0.1", "0", "-0.1"]


def test_band_and_skipped_steps_are_marked():
    fragment = charts.curves("t", [5, 6], {"a": [1.0, 1.0]}, band=([0.0, None], [2.0, None]), marked=[6])
    assert paths(fragment, "band") == ["M25.00 0.00L25.00 100.00Z"]
    assert paths(fragment, "skip") == ["M75.00 0V100"]


def test_bars_stand_on_one_another_and_are_cut_at_the_top():
    fragment = charts.stacked_bars("t", [1, 2], {"a": [1.0, 8.0], "b": [2.0, 9.0]}, unit="s", top=4.0)
    bars = [(r.get("class"), float(r.get("y")), float(r.get("height"))) for r in drawn(fragment).iter("rect")]
    assert bars == [("f0", 75.0, 25.0), ("f0", 0.0, 100.0), ("f1", 25.0, 50.0)]


def test_a_strip_is_darkest_where_it_has_most():
    fragment = charts.heat_strips("t", {"x": [0, 1, 4], "y": [0, 0, 0]}, ("from", "to"))
    assert [r.get("fill-opacity") for r in drawn(fragment).iter("rect")] == ["0.250", "1.000"]


@pytest.mark.parametrize("text", ["<script>x</script>", '"><b>', "&amp;"])
def test_names_are_escaped(text):
    for fragment in (
        charts.curves(text, [1], {text: [1.0], "b": [2.0]}),
        charts.stacked_bars(text, [1], {text: [1.0]}, unit="s", top=1.0),
        charts.heat_strips(text, {text: [1]}, (text, text)),
    ):
        assert {e.tag for e in drawn(fragment).iter()} <= {
            "figure", "figcaption", "span", "div", "svg", "path", "rect", "title",
        }  # fmt: skip
        assert any(text in (e.text or "") for e in drawn(fragment).iter())


@pytest.mark.parametrize(
    "value, unit, text",
    [(None, "", "none"), (3.0, "", "3"), (0.12345, "", "0.1235"), (2.5e9, "B", "2.50 GB"), (1e-5, "s", "1.00e-05 s")],
)
def test_numbers_for_the_eye(value, unit, text):
    assert charts.number(value, unit) == text
