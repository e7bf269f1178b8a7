"""The growth of sources: each is measured, and one whose graph depends on its parts is refused."""

from pathlib import Path

import pytest
import torch

from examples.benchmarks import sources
from examples.common.tables import read
from sbm_pyg import AttentionGraph, Tokens
from sbm_pyg.ops import tiles
from sbm_pyg.sources import patterns

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_source_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources.main(["--tokens", "64", "128", "256", "--csv", str(tmp_path / "rows.csv")])
    rows = read(tmp_path / "rows.csv")
    assert [(row["source"], row["tokens"]) for row in rows] == [(n, t) for n in sources.LAWS for t in (64, 128, 256)]
    assert all(row["seconds"] > 0 and 0 < row["edges"] <= 80 for row in rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(sources.LAWS)
    assert lines[2].startswith("| sbm | ")


def test_a_source_that_depends_on_its_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(tokens: Tokens) -> AttentionGraph:
        return patterns.window(tokens.num_queries, 1 + (tiles.SCORES_PER_TILE["cpu"] < 2**20))

    monkeypatch.setattr(sources, "sources", lambda n: {"lsh": wrong})
    with pytest.raises(SystemExit, match="lsh: other graphs with fewer rows at a time"):
        sources.gate("lsh")
    assert tiles.SCORES_PER_TILE["cpu"] > 2**20
    assert torch.is_grad_enabled()
