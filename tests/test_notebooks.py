"""The notebooks are the pages of the tutorial, and run."""

from __future__ import annotations

import doctest
import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from examples.notebooks.__main__ import PAGES, notebook, path_of

ROOT = PAGES[0].parents[2]


def printed(cell: NotebookNode) -> str:
    return "".join(output["text"] for output in cell.get("outputs", []) if output.get("name") == "stdout")


def execute(made: NotebookNode, folder: Path) -> None:
    """Run all cells in a folder, and compare what they print with the outputs that the notebook came with."""
    promised = [printed(cell) for cell in made.cells]
    NotebookClient(made, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for cell, text in zip(made.cells, promised, strict=True):
        if text:
            assert doctest.OutputChecker().check_output(text, printed(cell), flags), printed(cell)


def test_the_notebooks_are_written_from_the_pages() -> None:
    assert [path_of(page).name for page in PAGES] == sorted(
        path.name for path in path_of(PAGES[0]).parent.glob("*.ipynb")
    )
    for page in PAGES:
        text = nbformat.writes(notebook(page.read_text())) + "\n"
        assert path_of(page).read_text() == text, f"{page.name} has changed: run `python -m examples.notebooks`"
        assert len(text) < 20_000


def test_links_lead_to_files_and_cells_hold_the_code_of_the_page() -> None:
    made = notebook(
        "# A page\n\nSee {func}`f <m.f>` and [b](2_model.md), [c](../guides/save.md#save-a-graph), [d](https://e.org).\n\n"
        "```python\nprint(1)\n\n\nprint(2)\n```\n\n```text\n1\n...\n```\n\n```bash\npython a.py\n```\nEnd.\n"
    )
    first, begin, code, program, last = made.cells
    assert first.source == (
        "# A page\n\nSee `f` and [b](2_model.ipynb), [c](../../docs/guides/save.md#save-a-graph), [d](https://e.org)."
    )
    assert 'os.chdir("../..")' in begin.source
    assert (code.source, printed(code)) == ("print(1)\n\n\nprint(2)", "1\n...\n")
    assert (program.source, printed(program), last.source) == ("%%bash\npython a.py", "", "End.")
    assert len({cell.id for cell in made.cells}) == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Jupyter
def test_the_notebooks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one folder, for each goes on with what the one before has left."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for page in PAGES:
        execute(notebook(page.read_text()), tmp_path)
    with pytest.raises(AssertionError):
        execute(notebook("```python\nprint(2)\n```\n\n```text\n1\n```\n"), tmp_path)
    for wrong in ("```python\n1 / 0\n```\n", "```bash\nfalse\n```\n"):
        with pytest.raises(CellExecutionError, match=r"ZeroDivisionError|CalledProcessError"):
            execute(notebook(wrong), tmp_path)
