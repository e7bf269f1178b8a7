"""The command of mutation testing: where it makes faults, and its verdicts on a library of two functions."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason='install it by `pip install -e ".[mutation]"`')

import mutation
from mutation import choices, in_order, main, run_by

from examples.common.tables import read

SOURCE = '''"""A library of 2 + 2 functions."""

__all__ = ["checked" + "", "unchecked"]


def checked(number: int | float) -> int | float:
    if not number > 0:
        raise ValueError(f"Expected 'number' to be positive (got {number + 0}).")
    return (
        number + 2
    )


def unchecked(number):
    return 1 - number
'''
TESTS = """
import pytest
import sbm_pyg

@pytest.mark.parametrize("number", [1, 2])
def test_checked(number):
    assert sbm_pyg.checked(number) == number + 2
    with pytest.raises(ValueError, match="positive"):
        sbm_pyg.checked(0)

def test_unchecked():
    sbm_pyg.unchecked(1)
"""


def test_faults_are_made_where_a_test_can_find_them() -> None:
    assert sorted(choices(SOURCE)) == [7, 10, 15]


def test_a_line_has_the_tests_of_its_statement_and_an_import_those_of_the_file() -> None:
    traced = {3: [""], 6: [""], 7: ["a", "b"], 8: ["a"], 10: ["b"], 14: [""], 15: ["c"]}
    assert [run_by(SOURCE, line, traced) for line in (8, 9, 10)] == [{"a"}, {"b"}, {"b"}]
    assert run_by(SOURCE, 6, traced) == {"", "a", "b", "c"}
    assert run_by(SOURCE, 6, traced, ["d"]) == {"", "a", "b", "c", "d"}
    assert run_by(SOURCE, 8, traced, ["d"]) == {"a"}


def test_tests_of_the_module_come_first_then_the_quickest() -> None:
    seconds = {"test_a.py::x": 50.0, "tests/test_blocks.py::x": 5.0, "test_a.py::y": 1.0, "tests/test_ops.py::x": 4.0}
    order = in_order({*seconds}, "sbm_pyg/ops/cpu/blocks.py", seconds)
    assert order == ["tests/test_ops.py::x", "tests/test_blocks.py::x", "test_a.py::y", "test_a.py::x"]
    assert in_order({*seconds}, "sbm_pyg/ops/cpu/blocks.py", seconds | {"test_a.py::x": 51.0}) == order[:-1]
    seconds["tests/test_signatures.py::x"] = 3.0
    assert in_order({*seconds}, "sbm_pyg/ops/cpu/blocks.py", seconds)[0] == "tests/test_signatures.py::x"


@pytest.mark.slow
def test_a_mutant_is_killed_by_a_test_of_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call tests the mutants that are left; the library stays as it is."""
    library = tmp_path / "library"
    for file, text in (
        ("sbm_pyg/__init__.py", SOURCE), ("tests/test_tiny.py", TESTS), ("pyproject.toml", "[tool.pytest.ini_options]"),
    ):  # fmt: skip
        (library / file).parent.mkdir(parents=True, exist_ok=True)
        (library / file).write_text(text)
    monkeypatch.setattr(mutation, "ROOT", library)
    for mutants in ("1", "3"):
        main(["--mutants", mutants, "--output", str(tmp_path / "runs")])
    verdicts = {row["line"]: (row["verdict"], row["by"]) for row in read(tmp_path / "runs" / "mutants.csv")}
    assert {line: verdict for line, (verdict, _) in verdicts.items()} == {7: "killed", 10: "killed", 15: "survived"}
    assert verdicts[10][1].startswith("tests/test_tiny.py::test_checked[")
    assert (library / "sbm_pyg" / "__init__.py").read_text() == SOURCE
