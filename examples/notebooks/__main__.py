"""The tutorial as notebooks: ``python -m examples.notebooks`` writes them next to this file (``pip install -e ".[test]"``).

In: the pages in docs/tutorial. Out: a notebook for each page, with a cell for each block of code, and the outputs and pictures of a
run; the pictures of the pages in docs/figures. It is an error if a cell prints anything but what its page promises, where `...` stands
for what differs from run to run. It takes some minutes.
"""

import base64
import doctest
import posixpath
import re
import sys
import tempfile
from pathlib import Path

import nbformat.v4
from nbformat import NotebookNode

from examples.common.command import Command
from examples.common.runs import write, write_text

HERE = Path(__file__).resolve().parent
PAGES = sorted((HERE.parents[1] / "docs" / "tutorial").glob("[0-9]*.md"))
CODE = re.compile(
    r"^```(?P<language>python|bash)\n(?P<code>.*?)\n```$"
    r"(?:\s+^```text\n(?P<text>.*?)^```$)?(?:\s+^!\[[^]]*\]\((?P<figure>[^)]+)\)$)?",
    re.MULTILINE | re.DOTALL,
)
BEGIN = """import os

%matplotlib inline
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
    """The notebook of a page before it runs; the metadata of a cell hold what the page promises: its ``text`` and its ``figure``."""
    cells, end = [], 0
    for code in CODE.finditer(page):
        cells.append(nbformat.v4.new_markdown_cell(prose(page[end : code.start()])))
        if not end:
            cells.append(nbformat.v4.new_code_cell(BEGIN))
        source = f"%%bash\n{code['code']}" if code["language"] == "bash" else code["code"]
        promised = {name: code[name] for name in ("text", "figure") if code[name]}
        cells.append(nbformat.v4.new_code_cell(source, metadata=promised))
        end = code.end()
    cells.append(nbformat.v4.new_markdown_cell(prose(page[end:])))
    cells = [cell for cell in cells if cell["source"]]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
    nbformat.validate(made)
    return made


def printed(cell: NotebookNode) -> str:
    return "".join(output["text"] for output in cell.get("outputs", []) if output.get("name") == "stdout")


def pictures(cell: NotebookNode) -> list[bytes]:
    """The figures that a cell shows, as files in PNG."""
    data = (output.get("data", {}).get("image/png") for output in cell.get("outputs", []))
    return [base64.b64decode(picture) for picture in data if picture]


def check(made: NotebookNode) -> None:
    """Raises a ``ValueError`` unless the cells of a notebook that ran show what its page promises."""
    for cell in made.cells:
        text, flags = printed(cell), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if not doctest.OutputChecker().check_output(cell.metadata.get("text", text), text, flags):
            raise ValueError(f"Expected a cell to print {cell.metadata.text!r} (got {text!r}). Correct its page.")
        if (count := len(pictures(cell))) != ("figure" in cell.metadata):
            raise ValueError(
                f"Expected {cell.source!r} to show a figure if its page has one (got {count}). Correct it."
            )


def execute(made: NotebookNode, folder: Path) -> None:
    """Runs all cells in a folder, keeps what they print and show, and compares it with the page."""
    from nbclient import NotebookClient

    NotebookClient(made, timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    for cell in made.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":  # in one piece, without progress and warnings, which depend on the machine
            text, shown = printed(cell), [output for output in cell.outputs if output.output_type != "stream"]
            cell.outputs = [*([nbformat.v4.new_output("stream", text=text)] if text else []), *shown]
    made.metadata.language_info = {"name": "python"}  # without the version
    check(made)


def path_of(page: Path) -> Path:
    return HERE / f"{page.stem}.ipynb"


def main() -> None:
    Command("python -m examples.notebooks", __doc__).read(None)
    with tempfile.TemporaryDirectory() as folder:  # of all: a page goes on with what the one before has left
        (Path(folder) / "examples").symlink_to(HERE.parent)
        for page in PAGES:
            made = notebook(page.read_text())
            execute(made, Path(folder))
            for cell in made.cells:
                for picture in pictures(cell):
                    write(page.parent / cell.metadata.figure, picture)
            write_text(path_of(page), nbformat.writes(made) + "\n")
            print(f"wrote {path_of(page)}", file=sys.stderr)


if __name__ == "__main__":
    main()
