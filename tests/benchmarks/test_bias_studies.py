"""The two studies of biases and noise: their gates, and that they measure what they say."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.benchmarks import biases
from examples.common import tasks
from examples.common.runs import write_checkpoint
from examples.common.tables import read
from examples.recall import spread, train

pytestmark = [pytest.mark.examples, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints of a dense and of a sampled model, untrained."""
    small = dataclasses.replace(tasks.TASKS["mqar-small"], train={(20, 3): 60}, test={(20, 3): 4})
    monkeypatch.setitem(tasks.TASKS, "mqar-small", small)
    for method in ("dcmm:num_clusters=3", "sbm:num_clusters=4,estimator=local"):
        run = train.Run("mqar-small", method, 0.2, 0, 10, 4, 1e-3, channels=8)
        model, schedule = train.make_model(run)
        state = {"run": dataclasses.asdict(run), "model": model.state_dict()}
        state |= {"schedule": {**schedule.state_dict(), "share": 0.2}} if schedule else {}
        write_checkpoint(tmp_path / run.file, state)
    return tmp_path


def test_only_sampled_graphs_make_noise(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spread.main([str(folder), "--draws", "4", "--csv", str(folder / "spread.csv")])
    rows = read(folder / "spread.csv")
    assert len(rows) == 8
    for row in rows:
        assert row["total"] > 0
        assert (row["graphs"] > 1e-3 * row["total"]) == row["run"].startswith("sbm")
        assert row["ms"] > 0
    assert "| dcmm:num_clusters=3 | start | rest | 1 | 0.0 % |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        spread.main([str(folder / "nothing")])


def test_models_have_less_noise_with_more_probes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(folder), "--probes", "--draws", "16", "--csv", str(folder / "trained.csv")]
    spread.main(words)
    rows = read(folder / "trained.csv")
    assert [(row["when"], row["probes"]) for row in rows] == [(w, n) for w in ("start", "end") for n in (1, 4, 16, 64)]
    for row in rows:
        assert 0 < row["graphs"] < 2 * row["total"]
    for first in (0, 4):  # a query has 20 keys at most
        assert rows[first]["graphs"] > 1.5 * rows[first + 3]["graphs"]
    assert "| sbm:num_clusters=4,estimator=local 20 % | start | 1 |" in capsys.readouterr().out
    spread.main(words)
    assert read(folder / "trained.csv") == rows
    with pytest.raises(SystemExit):
        spread.main([str(folder / "nothing"), "--probes", "--csv", str(folder / "other.csv")])
    assert "Expected 'folders' with checkpoints" in capsys.readouterr().err


def test_edges_and_dense_arrays_agree_or_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    biases.gate(0.1)
    whole = biases.dense

    def plain(conv: Any, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return whole(conv, 1.01 * x, mask)

    monkeypatch.setattr(biases, "dense", plain)
    with pytest.raises(SystemExit, match="disagree"):
        biases.gate(0.1)


@pytest.mark.parametrize("name", biases.NAMES)
def test_a_turn_has_seconds_and_edges(name: str) -> None:
    found = biases.turn(name, 600, 0.05)
    assert found["seconds"] > 0
    assert found["edges"] == (360_000 if name == "dense dcmm" else pytest.approx(18_000, rel=0.1))
    assert found["MiB"] >= 0 or math.isnan(found["MiB"])
