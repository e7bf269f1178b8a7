"""The benchmark of edge features: its gate, and that each arm is measured."""

from pathlib import Path

import pytest

from examples.benchmarks import edge_features
from examples.common.tables import read

pytestmark = [pytest.mark.examples, pytest.mark.usefixtures("one_thread")]


def test_molecules_have_the_sizes_that_they_should() -> None:
    edge_index, batch = edge_features.molecules()
    assert batch.bincount().tolist() == [26] * 128
    assert edge_index.size(1) == 128 * 55
    assert bool((batch[edge_index[0]] == batch[edge_index[1]]).all())


def test_each_arm_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edge_features.main(["--edges", "200", "--rounds", "1", "--csv", str(tmp_path / "rows.csv")])
    rows = read(tmp_path / "rows.csv")
    assert [(row["suite"], row["arm"]) for row in rows] == [
        (suite, arm) for suite in ("layer, 200 edges", "molecules", "model") for arm in ("PyG", "sbm_pyg")
    ]
    assert all(float(row["seconds"]) > 0 for row in rows)
    sizes = [float(row["MiB"]) for row in rows]
    assert sizes[1] < sizes[0]
    assert "times sbm_pyg" in capsys.readouterr().out
