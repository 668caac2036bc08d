"""Plots are real PNGs, the same bytes for the same records, and drawn for runs with gaps."""

import matplotlib
import matplotlib.image
import pytest
from run_folders import make_step, make_steps

from longstraw_jax.evidence.plots import write_plots


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    return folder, write_plots(folder, make_steps())


def test_writes_the_four_plots(drawn):
    folder, paths = drawn
    assert paths == [f"plots/{name}.png" for name in ("reward", "kl", "ratio", "seconds")]
    for path in paths:
        pixels = matplotlib.image.imread(folder / path)
        assert pixels.shape[0] > 300 and pixels.shape[1] > 600 and pixels.std() > 0.05


def test_bytes_depend_on_the_records_and_not_on_the_users_style(drawn, tmp_path):
    folder, paths = drawn
    steps = make_steps()
    steps[3]["metrics"]["kl"] = 0.5
    with matplotlib.rc_context({"lines.linewidth": 9.0}):
        write_plots(tmp_path, steps)
    for path in paths:
        same = (folder / path).read_bytes() == (tmp_path / path).read_bytes()
        assert same == (path != "plots/kl.png")


def test_run_without_kl_has_no_kl_plot_and_gaps_are_drawn(tmp_path):
    steps = [
        make_step(1, [1.0, 0.0], metrics={}, seconds={"step": 1.0}),
        make_step(2, [None, None], metrics={"kl": None}, skipped=True, skip_reason="nothing to train on"),
        make_step(3, [1.0], metrics={}),
    ]
    assert write_plots(tmp_path, steps) == [f"plots/{name}.png" for name in ("reward", "ratio", "seconds")]


def test_one_slow_step_does_not_flatten_the_others(tmp_path):
    """With the axis cut off, the bars of the other steps keep their height whatever the slow one took."""
    heights = []
    for slow in (1e3, 1e6):
        steps = make_steps()
        steps[0]["seconds"] = {"capture": slow, "step": slow}
        folder = tmp_path / str(slow)
        write_plots(folder, steps)
        pixels = matplotlib.image.imread(folder / "plots/seconds.png")[..., :3]
        orange = (abs(pixels - [1.0, 0.498, 0.055]) < 0.02).all(-1)  # the second phase
        heights.append(orange[:, pixels.shape[1] // 2 :].any(1).sum())
    assert heights[0] == heights[1] > 20


def test_no_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="0 records"):
        write_plots(tmp_path, [])
    assert not list(tmp_path.iterdir())
