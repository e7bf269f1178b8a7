"""The code on the pages runs, and prints what the pages say it prints."""

from __future__ import annotations

import doctest
import inspect
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

import sbm_pyg

ROOT = Path(sbm_pyg.__file__).parent.parent
DOCS = ROOT / "docs"
GUIDES = sorted(path.name for path in (DOCS / "guides").glob("*.md"))
TUTORIAL = sorted(path.name for path in (DOCS / "tutorial").glob("[0-9]*.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Lightning's and matplotlib's own remarks; those of our code are errors on every other page
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def blocks(text: str) -> Iterator[tuple[str, str, str | None]]:
    """Language and code of each block, and the output that a block of text right after it promises."""
    found = [*FENCE.finditer(text)]
    for block, after in zip_longest(found, found[1:]):
        if block[1] in ("python", "bash"):
            promised = after is not None and after[1] == "text" and not text[block.end() : after.start()].strip()
            yield block[1], block[2], after[2] if after is not None and promised else None


def run_bash(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python examples/NAME.py ...`` and ``python -m examples.NAME ...``, in this process; a page shows nothing else."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "python", line
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [*sys.path])
            if words[1] == "-m":
                assert words[2].startswith("examples."), line
                patch.setattr(sys, "argv", words[2:])
                runpy.run_module(words[2], run_name="__main__", alter_sys=True)
            else:
                script = Path(words[1])
                assert (ROOT / script).is_file(), line
                assert script.parent == Path("examples"), line
                patch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
                patch.setattr(sys, "argv", words[1:])
                runpy.run_path(str(ROOT / script), run_name="__main__")


def run_page(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run all blocks of a page in one namespace; returns how many outputs were compared."""
    names: dict[str, Any] = {"__name__": "__main__"}
    compared = 0
    torch.manual_seed(0)
    for number, (language, code, promised) in enumerate(blocks(path.read_text())):
        capsys.readouterr()
        if language == "bash":
            run_bash(code, monkeypatch)
        else:
            exec(compile(code, f"{path.name}, block {number}", "exec"), names)
        if promised is not None:
            printed = capsys.readouterr().out
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert doctest.OutputChecker().check_output(promised, printed, flags), (
                f"{path.name}, block {number} printed\n{printed}"
            )
            compared += 1
    return compared


def test_the_pages_are_found() -> None:
    assert TUTORIAL == ["1_layer.md", "2_model.md", "3_trainer.md", "4_analysis.md"]
    assert len(GUIDES) > 7


def test_the_runner_notices_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n\n```text\n1\n```\n")
    assert run_page(page, capsys, monkeypatch) == 1
    for wrong in (
        "```python\nprint(2)\n```\n\n```text\n1\n```\n", "```python\n1 / 0\n```\n",
        "```bash\npython examples/none.py\n```\n", "```bash\nrm x\n```\n",
    ):  # fmt: skip
        page.write_text(wrong)
        with pytest.raises((AssertionError, ZeroDivisionError)):
            run_page(page, capsys, monkeypatch)


@pytest.mark.slow
def test_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All four steps in one folder, for each goes on with what the one before has left."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # paths on the pages begin at the root of a clone
    monkeypatch.chdir(tmp_path)
    for name in TUTORIAL:
        assert run_page(DOCS / "tutorial" / name, capsys, monkeypatch) >= 2, name


@pytest.mark.parametrize("name", GUIDES)
def test_guide(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "guides" / name).read_text()
    if name == "torch_sparse.md":
        pytest.importorskip("torch_sparse", reason="torch-sparse is not installed")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    run_page(DOCS / "guides" / name, capsys, monkeypatch)
    if name != "index.md":
        assert any(language == "python" for language, _, _ in blocks(text)), name


@pytest.mark.parametrize("name", ["README.md", "docs/analysis.md"])
def test_other_pages(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    code = [code for language, code, _ in blocks((ROOT / name).read_text()) if language == "python"]
    assert code
    for number, part in enumerate(code):
        exec(compile(part, f"{name}, block {number}", "exec"), names)
    if name == "README.md":
        assert len(code) == 2
        assert (names["graph"].degree > 0).all(), "a query has no key"
        assert names["sparsifier"].is_sparse


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = set()
    for page in DOCS.rglob("*.md"):
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            listed |= {
                (page.parent / line).with_suffix(".md").resolve()
                for line in tree.splitlines()
                if line and not line.startswith(":")
            }
    pages = {page.resolve() for page in DOCS.rglob("*.md") if "_build" not in page.parts}
    assert pages - listed == {(DOCS / "index.md").resolve()}
    assert listed <= pages


def test_links_between_pages_lead_to_files() -> None:
    """Sphinx takes no folders, and GitHub shows a link to nothing without a word."""
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "examples").glob("*.md"),
        *(page for page in DOCS.rglob("*.md") if "_build" not in page.parts),
    ]
    link = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
    links = [(page, target) for page in pages for target in link.findall(FENCE.sub("", page.read_text()))]
    assert len(links) > 20
    broken = [f"{page.relative_to(ROOT)}: {target}" for page, target in links if not (page.parent / target).is_file()]
    assert not broken


THEME = "<style>html { overflow-x: hidden } .content { overflow-x: auto }</style>"  # as that of the docs
TOO_WIDE = "<p style='width: 3000px'>a wide box</p>"


@pytest.mark.parametrize(
    ("article", "faults"),
    [(TOO_WIDE, ["pixels too wide", "past the edge: P a wide box"]),
     ("<p style='white-space: nowrap'>" + "word " * 500, ["pixels too wide"]),
     (f"<div style='overflow-x: auto'>{TOO_WIDE}</div>", [])],
)  # fmt: skip
def test_pages_past_the_edge_are_found_where_the_theme_hides_it(
    article: str, faults: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("PyQt6.QtWebEngineWidgets", reason="needs PyQt6-WebEngine")
    page = f"<!doctype html>{THEME}<div class=content><article><h1>A page</h1>{article}</article></div>"
    (tmp_path / "a.html").write_text(page)
    command = [sys.executable, str(ROOT / ".ci" / "pages.py"), str(tmp_path), str(tmp_path / "pictures")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == bool(faults), done.stderr
    for width in ("desktop", "phone"):
        found = [line for line in done.stdout.splitlines() if line.startswith(f"a, {width}: ")]
        assert len(found) == len(faults)
        assert all(fault in line for fault, line in zip(faults, found, strict=True))


def test_every_public_name_is_on_an_api_page() -> None:
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    for name in sbm_pyg.__all__:
        thing = getattr(sbm_pyg, name)
        kind, full = "auto(class|function)", f"sbm_pyg.{name}"
        if inspect.ismodule(thing):
            kind, full = "automodule", thing.__name__
        assert re.search(rf"^\.\. {kind}:: {re.escape(full)}$", pages, re.MULTILINE), name


def test_citation_and_changelog_have_the_version() -> None:
    assert f"version: {sbm_pyg.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version = {{{sbm_pyg.__version__}}}" in (DOCS / "citation.md").read_text()
    assert f"## {sbm_pyg.__version__}" in (DOCS / "changelog.md").read_text()
