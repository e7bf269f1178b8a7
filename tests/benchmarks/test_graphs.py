"""The benchmark of global attention: its gate, and that each arm is measured."""

import math
from pathlib import Path

import pytest

from examples.benchmarks import graphs
from examples.common.tables import read

pytestmark = [pytest.mark.examples, pytest.mark.usefixtures("one_thread")]


def test_the_layers_of_pyg_and_ours_agree() -> None:
    graphs.gate()


@pytest.mark.parametrize("suite", [*graphs.ARMS])
def test_each_arm_is_measured(suite: str) -> None:
    given = graphs.parse(["--nodes", "200", "--largest", "120", "--graphs", "3"])
    sizes = {suite: graphs.sizes_of(given, suite)}
    assert sizes[suite] == ([200] if suite == "one" else [100, 110, 120])
    for name in graphs.ARMS[suite]:
        found = graphs.turn(name, suite, sizes)
        assert found["seconds"] > 0
        assert math.isnan(found["edges"]) or 8 < found["edges"] < 24


@pytest.mark.slow
@pytest.mark.long
def test_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two arms, each measured in a process of its own."""
    monkeypatch.setitem(graphs.ARMS, "one", graphs.ARMS["one"][:1] + graphs.ARMS["one"][-1:])
    graphs.main(["--suites", "one", "--nodes", "200", "--csv", str(tmp_path / "graphs.csv")])
    assert [row["arm"] for row in read(tmp_path / "graphs.csv")] == [*graphs.ARMS["one"]]
    assert "one: 1 graphs, 200 nodes" in capsys.readouterr().out
