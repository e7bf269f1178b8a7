"""The tables of expectations and of faults name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "expectations.md"
FAULTS = TESTS.parent / "docs" / "reliability.md"
HOUSES = ["PyTorch Geometric", "DGL", "torch", "x-transformers", "xformers", "flash-linear-attention", "Hugging Face"]


def rows(page: Path = PAGE) -> list[tuple[str, list[str]]]:
    """Heading and cells of every row that is not the head of a table, up to the draws of mutants."""
    found, house = [], ""
    for line in page.read_text().partition("## Mutation testing")[0].splitlines():
        if line.startswith("## "):
            house = line[3:]
        elif line.startswith("|") and not re.match(r"\|(-+\|)+$|\| (expectation|fault or input) \|", line):
            found.append((house, [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]))
    return found


@pytest.mark.parametrize("page", [PAGE, FAULTS], ids=lambda page: page.stem)
def test_every_row_names_a_test_that_exists(page: Path) -> None:
    functions = {
        path.name: {*re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
        for path in TESTS.rglob("test_*.py")
    }
    assert len(rows(page)) > 30
    for _, cells in rows(page):
        assert len(cells) == 3, cells
        named = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", cells[2])
        assert named is not None, cells
    for file, name in re.findall(r"`(test_\w+\.py)::(test_\w+)`", page.read_text()):  # those outside of the tables too
        assert name in functions.get(file, set()), f"{file}::{name} does not exist"


def test_every_house_has_rows() -> None:
    assert [*dict.fromkeys(house for house, _ in rows())] == HOUSES
    assert min(sum(other == house for other, _ in rows()) for house in HOUSES) >= 3
    assert len({cells[0] for _, cells in rows()}) == len(rows())
