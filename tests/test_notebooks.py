"""The notebooks are the pages of the tutorial with the outputs of a run, and run again."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from examples.notebooks.__main__ import PAGES, check, execute, notebook, path_of, pictures, printed

ROOT = PAGES[0].parents[2]


def test_the_notebooks_are_written_from_the_pages() -> None:
    assert [path_of(page).name for page in PAGES] == sorted(
        path.name for path in path_of(PAGES[0]).parent.glob("*.ipynb")
    )
    for page in PAGES:
        stored = nbformat.read(path_of(page), as_version=4)
        check(stored)
        shown = [(cell, picture) for cell in stored.cells for picture in pictures(cell)]
        assert shown, f"{page.name} has no figure"
        for cell, picture in shown:
            assert (page.parent / cell.metadata.figure).read_bytes() == picture
            assert len(picture) < 60_000
        for cell in stored.cells:
            if "..." in cell.metadata.get("text", ""):
                assert printed(cell) != cell.metadata.text, "the output of the page, not of a run"
            if cell.cell_type == "code":
                assert cell.execution_count
                cell.outputs, cell.execution_count = [], None
        assert stored == notebook(page.read_text()), f"{page.name} has changed: run `python -m examples.notebooks`"


def test_links_lead_to_files_and_cells_hold_the_code_of_the_page() -> None:
    made = notebook(
        "# A page\n\nSee {func}`f <m.f>` and [b](2_model.md), [c](../guides/save.md#save-a-graph), [d](https://e.org).\n\n"
        "```python\nprint(1)\n\n\nprint(2)\n```\n\n```text\n1\n...\n```\n\n```bash\npython a.py\n```\n\n"
        "![A figure](../figures/a.png)\n\nEnd.\n"
    )
    first, begin, code, program, last = made.cells
    assert first.source == (
        "# A page\n\nSee `f` and [b](2_model.ipynb), [c](../../docs/guides/save.md#save-a-graph), [d](https://e.org)."
    )
    assert 'os.chdir("../..")' in begin.source
    assert (code.source, code.metadata) == ("print(1)\n\n\nprint(2)", {"text": "1\n...\n"})
    assert (program.source, program.metadata) == ("%%bash\npython a.py", {"figure": "../figures/a.png"})
    assert last.source == "End."
    assert len({cell.id for cell in made.cells}) == 5


def test_outputs_and_figures_that_the_page_does_not_have_are_refused() -> None:
    stored = nbformat.read(path_of(PAGES[0]), as_version=4)
    for change, message in (
        (lambda cell: cell.metadata.update(text="torch.Size([1])\n"), "to print 'torch.Size"),
        (lambda cell: cell.outputs.clear(), "to print"),
        (lambda cell: cell.metadata.update(figure="a.png"), "to show a figure"),
    ):
        wrong = copy.deepcopy(stored)
        change(next(cell for cell in wrong.cells if printed(cell)))
        with pytest.raises(ValueError, match=message):
            check(wrong)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Jupyter
@pytest.mark.parametrize("count", [1, pytest.param(len(PAGES), marks=pytest.mark.long)])
def test_the_notebooks_run(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one folder, for each goes on with what the one before has left. Their code also runs in ``test_docs``."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for page in PAGES[:count]:
        execute(notebook(page.read_text()), tmp_path)
    with pytest.raises(ValueError, match="to print '1"):
        execute(notebook("```python\nprint(2)\n```\n\n```text\n1\n```\n"), tmp_path)
    for wrong in ("```python\n1 / 0\n```\n", "```bash\nfalse\n```\n"):
        with pytest.raises(CellExecutionError, match=r"ZeroDivisionError|CalledProcessError"):
            execute(notebook(wrong), tmp_path)
