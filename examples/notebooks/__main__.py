"""The tutorial as notebooks: ``python -m examples.notebooks`` writes them next to this file (``pip install nbformat``).

In: the pages in docs/tutorial. Out: a notebook for each page, with a cell for each block of code. The outputs are those that the page
promises, so that the files stay small and change with the page alone; `...` stands for what differs from run to run.
"""

import posixpath
import re
import sys
from pathlib import Path

import nbformat.v4
from nbformat import NotebookNode

from examples.common.command import Command

HERE = Path(__file__).resolve().parent
PAGES = sorted((HERE.parents[1] / "docs" / "tutorial").glob("[0-9]*.md"))
CODE = re.compile(r"^```(python|bash)\n(.*?)\n```$(?:\s+^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
BEGIN = """import os

if not os.path.isdir("examples"):  # programs and files have paths from the root of the clone
    os.chdir("../..")"""


def link(match: re.Match[str]) -> str:
    """A link to a page, seen from the notebooks."""
    target = match[1]
    if re.match(r"\d", target):
        return f"]({target.replace('.md', '.ipynb')})"
    return f"]({posixpath.normpath(f'../../docs/tutorial/{target}')})"


def prose(text: str) -> str:
    """Markdown without the roles of Sphinx."""
    text = re.sub(r"\{\w+\}`([^`<]+?) <[^`]+`", r"`\1`", text)
    return re.sub(r"\]\((?!https?:)([^)]+)\)", link, text).strip()


def notebook(page: str) -> NotebookNode:
    """The notebook of a page."""
    cells, end = [], 0
    for code in CODE.finditer(page):
        cells.append(nbformat.v4.new_markdown_cell(prose(page[end : code.start()])))
        if not end:
            cells.append(nbformat.v4.new_code_cell(BEGIN))
        source = f"%%bash\n{code[2]}" if code[1] == "bash" else code[2]
        outputs = [nbformat.v4.new_output("stream", text=code[3])] if code[3] else []
        cells.append(nbformat.v4.new_code_cell(source, outputs=outputs))
        end = code.end()
    cells.append(nbformat.v4.new_markdown_cell(prose(page[end:])))
    cells = [cell for cell in cells if cell["source"]]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
    nbformat.validate(made)
    return made


def path_of(page: Path) -> Path:
    return HERE / f"{page.stem}.ipynb"


if __name__ == "__main__":
    Command("python -m examples.notebooks", __doc__).read(None)
    for page in PAGES:
        nbformat.write(notebook(page.read_text()), path_of(page))
        print(f"wrote {path_of(page)}", file=sys.stderr)
