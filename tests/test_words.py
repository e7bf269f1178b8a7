"""The words of the field: none that has been retired comes back, and the glossary names what there is."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

import sbm_pyg

ROOT = Path(sbm_pyg.__file__).parents[1]
RETIRED = {  # word, as a regular expression, and what to write instead
    r"foret(?:ell|old)\w*": "predict",
    r"\w*chooser\w*": "graph source, or rule",
    r"grains?": "block size",
    r"gold(?:_graph)?": "ground truth",
    r"whoever|whomever|everybody|nobody|somebody|someone": "the passive, or the thing that acts",
    r"who": "that, or which: our subjects are no persons",
    r"learnt": "learned",
    r"nevertheless": "still, or nothing",
    r"by the way (?:they|it|that)": "by construction",
    r"(?<!there )(?:is|are) none": "is not an X, or there is no X",
    r"at hand": "available",
    r"what (?:it|they) has|what there is": "name the thing",
    r"(?:pages?|rows?|tests?|docstrings?|layers?|tables?) (?:says?|tells?|knows?)\b(?! nothing)": "name what is written, or done",
    r"beside": "next to, or in addition to",
    r"told": "given, or known",
}
SEARCHED = sorted(
    path
    for pattern in ("sbm_pyg/**/*.py", "examples/**/*.py", "docs/**/*.md", "examples/*.md", "*.md")
    for path in ROOT.glob(pattern)
    if "_build" not in path.parts
)
DOCUMENTED = sorted(path for path in (ROOT / "sbm_pyg").glob("**/*.py") if "ops" not in path.parts)
WORDS = re.compile(rf"(?<![\w-])(?:{'|'.join(RETIRED)})(?![\w-])", re.IGNORECASE)


def retired(text: str) -> list[str]:
    """Retired words of a text, each with its line."""
    return [
        f"{number}: {match[0]}"
        for number, line in enumerate(text.splitlines(), 1)
        for match in WORDS.finditer(line.replace("None", ""))  # of Python
    ]


@pytest.mark.parametrize("path", SEARCHED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_retired_word_comes_back(path: Path) -> None:
    assert not retired(path.read_text())


def test_the_search_finds_retired_words() -> None:
    assert retired("a\nedges foretold by whoever chose a grain of 4") == ["2: foretold", "2: whoever", "2: grain"]
    assert not retired("golden retrievers ingrained in a besides-the-point whole")
    assert len(SEARCHED) > 100


@pytest.mark.parametrize("path", DOCUMENTED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_attribute_has_a_colon_where_sphinx_reads_a_type(path: Path) -> None:
    """Napoleon takes what stands before a colon in the first line of an attribute or property as its type."""
    lines: dict[str, str] = {}
    classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    for cls in classes:
        for node, after in pairwise([*cls.body, ast.Pass()]):
            if isinstance(node, ast.FunctionDef) and any("property" in ast.unparse(x) for x in node.decorator_list):
                lines[f"{cls.name}.{node.name}"] = ast.get_docstring(node) or ""
            elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                lines[f"{cls.name}.{ast.unparse(node)}"] = str(ast.literal_eval(after.value))
    lines = {name: text.partition("\n")[0] for name, text in lines.items()}
    wrong = {name: line for name, line in lines.items() if ":" in re.sub(r"(:\w+)?(:\w+:)?`[^`]*`", "", line)}
    assert not {name: line for name, line in wrong.items() if not re.search(r"(^|\.)_", name)}


def test_the_glossary_names_what_there_is() -> None:
    """Each entry is one line; code names in it exist."""
    page = (ROOT / "docs" / "concepts.md").read_text()
    section = page.split("\n## Glossary\n", 1)[1].split("\n## ", 1)[0]
    rows = [
        line
        for line in section.splitlines()
        if line.startswith("| ") and not line.startswith(("| word", "| term", "|-"))
    ]
    assert len(rows) >= 25
