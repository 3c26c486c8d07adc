"""Notebooks run from top to bottom in a kernel of their own, are kept without outputs, and have a link on the page."""

from pathlib import Path

import nbclient
import nbformat
import pytest

from support.time_limits import limit_s

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_there_is_a_notebook_for_each_of_three_methods() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["fused_optimizer", "memory_budget", "pipeline"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_is_linked(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[]] * len(code)
    assert {cell.execution_count for cell in code} == {None}
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    assert f"](../examples/notebooks/{path.name})" in page


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    """What each asserts of its results holds, and it prints its reports."""
    notebook = read(path)
    nbclient.NotebookClient(
        notebook, timeout=int(limit_s(120)), resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = [output.text for cell in notebook.cells for output in cell.get("outputs", []) if output.get("text")]
    assert printed, "it has printed nothing"
