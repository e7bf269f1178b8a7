"""The size of the code base, which may only fall: lines, options, refusals and vague names.

python -m tests.test_size     prints the measures of now, to move a mark

A commit that must raise a mark does so in MARKS, and says why.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import sbm_pyg

PACKAGE = Path(sbm_pyg.__file__).parent
ROOT = PACKAGE.parent
MARKS = {
    "lines of sbm_pyg": 32_440,
    "lines of sbm_pyg/ops": 12_580,
    "lines of examples": 13_530,
    "lines of tests": 36_570,
    "rooms of sbm_pyg": 11,
    "arrows between rooms": 32,
    "public names": 320,
    "options of SBMAttentionConv": 14,
    "refusing lines of sbm_pyg, %": 5.5,
    "vague local names of sbm_pyg, %": 0.1,
    "vague local names of examples, %": 0.1,
}  # fmt: skip
SLACK = 0.02  # how far a measure may lie below its mark before the mark has to follow
VAGUE = {
    "all_of", "asked", "each", "every", "found", "given", "kept", "known", "mine", "own", "rest", "right", "some", "theirs",
    "there", "wanted", "whose",
}  # fmt: skip
"""Local names that say nothing of what they hold."""


@cache
def trees(folder: str) -> tuple[ast.Module, ...]:
    return tuple(ast.parse(path.read_text()) for path in sorted((ROOT / folder).rglob("*.py")))


def lines(folder: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))


def nodes(folder: str) -> Iterator[ast.AST]:
    for tree in trees(folder):
        yield from ast.walk(tree)


def refusing_lines(folder: str) -> int:
    """Lines of statements that raise, of their conditions, and of calls of :mod:`sbm_pyg.ops.checks` for their errors."""
    total = 0
    for node in nodes(folder):
        if isinstance(node, ast.Raise):
            total += (node.end_lineno or node.lineno) - node.lineno + 1
        elif isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise):
            total += node.body[0].lineno - node.lineno
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            if called.startswith("checks.") or called.startswith("check_") or called in ("require", "refuse"):
                total += (node.end_lineno or node.lineno) - node.lineno + 1
    return total


def vague_share(folder: str) -> float:
    """Share of vague names among names that functions assign or take."""
    names = [node.id for node in nodes(folder) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names += [node.arg for node in nodes(folder) if isinstance(node, ast.arg)]
    return sum(name in VAGUE for name in names) / len(names)


def rooms_and_arrows() -> tuple[int, int]:
    """Folders and files of the top level, and pairs of them of which one imports the other."""
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py") and path.stem.isalpha()}
    arrows = set()
    for path in PACKAGE.rglob("*.py"):
        folder = path.relative_to(PACKAGE).parent.parts
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = (*folder[: len(folder) - node.level + 1], *(node.module or "").split("."))
                targets = {(*filter(None, base), name.name)[0] for name in node.names}
                arrows |= {(folder[0] if folder else path.stem, target) for target in targets}
    return len(rooms), sum(source != target and {source, target} <= rooms for source, target in arrows)


def public_names() -> int:
    return sum(line.startswith("sbm_pyg") for line in (ROOT / "tests" / "signatures.txt").read_text().splitlines())


@cache
def measures() -> dict[str, float]:
    sizes: dict[str, float] = {}
    for folder in ("sbm_pyg", "sbm_pyg/ops", "examples", "tests"):
        sizes[f"lines of {folder}"] = lines(folder)
    sizes["rooms of sbm_pyg"], sizes["arrows between rooms"] = rooms_and_arrows()
    sizes["public names"] = public_names()
    sizes["options of SBMAttentionConv"] = len(inspect.signature(sbm_pyg.SBMAttentionConv).parameters)
    sizes["refusing lines of sbm_pyg, %"] = 100 * refusing_lines("sbm_pyg") / lines("sbm_pyg")
    for folder in ("sbm_pyg", "examples"):
        sizes[f"vague local names of {folder}, %"] = 100 * vague_share(folder)
    return sizes


@pytest.mark.parametrize("name", MARKS)
def test_a_measure_does_not_exceed_its_mark_and_marks_follow(name: str) -> None:
    measure, mark = measures()[name], MARKS[name]
    assert measure <= mark, f"{name}: {measure:,.1f}. Delete something, or raise the mark and write why in the commit."
    assert measure >= mark * (1 - SLACK) - 1, f"{name}: {measure:,.1f}. Lower the mark to it."


if __name__ == "__main__":
    for name, measure in measures().items():
        print(f"{name:40} {measure:10,.1f}   mark {MARKS[name]:,}")
