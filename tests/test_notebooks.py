"""Every notebook runs from its first cell to its last, and is stored with its outputs."""

import pathlib
import resource

import nbclient
import nbformat
import pytest

MOST_SECONDS = 60  # of processor time, which is the same on a machine that has other work
NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def kernel_seconds() -> float:
    """Processor seconds of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    """In a kernel of its own, whose devices the first cell sets; its cells assert what they claim."""
    before = kernel_seconds()
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    assert 0 < kernel_seconds() - before < MOST_SECONDS
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) >= 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_whole_small_and_clean(path):
    assert path.stat().st_size < 1_000_000
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    text = "".join(o.get("text", "") for cell in cells for o in cell.outputs)
    assert all(o.output_type != "error" and o.get("name") != "stderr" for cell in cells for o in cell.outputs)
    assert "Warning" not in text and "/home" not in text and str(pathlib.Path(__file__).parents[1]) not in text


def test_there_are_notebooks():
    assert NOTEBOOKS
