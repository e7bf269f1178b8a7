"""The program that asks which graphs predict attention best: its model, its sources, and that it can be stopped anywhere."""

import dataclasses
from pathlib import Path

import pytest
import torch

from examples.common.tables import read
from examples.sparsefinder import __main__ as program
from examples.sparsefinder import model, report, sources, sweep
from sbm_pyg import Choice, Tokens
from sbm_pyg.sources.patterns import PatternSource, full
from sbm_pyg.sparsefinder.ground_truth import record

pytestmark = [pytest.mark.examples, pytest.mark.usefixtures("one_thread")]

RUN = model.Run(0, 30, 16, 4, 2, 16, 2, 2, 1e-3)


def make_texts(path: Path) -> Path:
    (path / "text").write_text("The cat saw a <unk> dog . A dog, it seems, saw the cat ; who saw whom ? " * 30)
    return path / "text"


def test_kinds_of_sources_are_of_the_table() -> None:
    assert {*sources.LEARNED, *sources.ORACLES, *sources.ALONE} <= {*sources.GRIDS}


def test_texts_become_sequences_and_hidden_words(tmp_path: Path) -> None:
    texts = model.read_texts([make_texts(tmp_path)], [tmp_path / "text"], 10, 8)
    assert texts.vocabulary[:3] == ["<unk>", "<hidden>", "saw"]
    assert len(texts.vocabulary) == 10
    assert texts.test.shape[1] == 8
    assert torch.equal(model.cut(texts.train, 8), texts.test)
    words = [texts.vocabulary[at] for at in texts.train.tolist()]
    assert words[:7] == ["the", "cat", "saw", "a", "<unk>", "dog", words[6]]
    seen, hidden = model.hide(texts.test, 0.3, 0)
    assert bool((seen[hidden] == model.HIDDEN).all())
    assert not bool((texts.test[hidden] == model.UNKNOWN).any())
    assert torch.equal(seen[~hidden], texts.test[~hidden])
    with pytest.raises(ValueError, match="Expected 'train' of at least 9999 words"):
        model.read_texts([tmp_path / "text"], [tmp_path / "text"], 10, 9999)


def test_a_step_in_which_no_word_is_hidden_teaches_nothing(tmp_path: Path) -> None:
    texts = model.read_texts([make_texts(tmp_path)], [tmp_path / "text"], 30, 16)
    run = dataclasses.replace(RUN, hidden=1e-9, weight_decay=0.0)
    before = model.make_model(run).state_dict()
    after = model.train(run, texts, tmp_path / "model.pt").state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_dense_attention_is_that_over_all_pairs() -> None:
    made = model.make_model(RUN).eval()
    tokens = torch.randint(2, 30, (3, 16), generator=torch.Generator().manual_seed(0))
    hidden = torch.ones_like(tokens, dtype=torch.bool)
    dense = model.predict(made, tokens, hidden)
    model.set_sources(made, [PatternSource(full)] * 2)
    torch.testing.assert_close(model.predict(made, tokens, hidden), dense, rtol=1e-4, atol=1e-4)


def test_every_other_head_begins_at_a_neighbor() -> None:
    made = model.make_model(dataclasses.replace(RUN, channels=64, length=64)).eval()
    model.set_sources(made, [PatternSource(full)] * 2)
    tokens = torch.randint(2, 30, (1, 64), generator=torch.Generator().manual_seed(0))
    with record(made) as found:
        model.predict(made, tokens, tokens > 0)
    offsets = iter((-1, 1, -2, 2))
    for samples in found.values():
        query, key, _ = samples[0]
        best = (query @ key.mT).argmax(2)  # [H, N]
        for head in range(0, len(best), 2):
            offset = next(offsets)
            inside = torch.arange(2, 62)
            assert float((best[head, inside] == inside + offset).double().mean()) > 0.9


@pytest.fixture(scope="module")
def learned() -> sources.Learned:
    made = model.make_model(RUN).eval()
    tokens = torch.randint(2, 30, (6, 16), generator=torch.Generator().manual_seed(0))
    (samples, _) = sweep.extract(made, tokens, 0.2, 2, 0, "")
    return sources.learn(samples, 2, 1, 0, "")


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("name", sources.GRIDS)
def test_every_source_makes_graphs_and_has_its_window(name: str, window: int, learned: sources.Learned) -> None:
    query, key = torch.randn(2, 2, 192, 8, generator=torch.Generator().manual_seed(0))
    ptr = torch.tensor([0, 64, 192])
    knobs = sources.GRIDS[name]
    sizes = []
    for knob in (knobs[0], knobs[-1]):
        choice = sources.make(name, knob, window, learned)(Tokens(query, key, ptr, bipartite=False))
        assert isinstance(choice, Choice)
        graph = choice.graph.validate()
        near = torch.arange(60).repeat(2, 1) + torch.tensor([[1], [0]])
        if window and name not in sources.ALONE:
            assert bool(graph.contains(near).all())
        sizes.append(graph.num_edges / graph.heads)
    assert sizes[0] != sizes[1]
    assert torch.equal(
        sources.make(name, knobs[0], window, learned)(Tokens(query, key, ptr, bipartite=False)).graph.col,
        sources.make(name, knobs[0], window, learned)(Tokens(query, key, ptr, bipartite=False)).graph.col,
    )


def test_frontiers() -> None:
    points = [(0.5, 0.9), (0.9, 0.2), (0.8, 0.1), (0.7, 0.5), (0.5, 0.8)]
    assert report.frontier(points) == [(0.9, 0.2), (0.7, 0.5), (0.5, 0.9)]
    assert report.best(points, 0.6) == 0.5
    assert report.best(points, 0.95) != report.best(points, 0.95)  # NaN


@pytest.mark.slow
def test_a_run_is_measured_once_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(make_texts(tmp_path))
    words = ["--train", text, "--test", text, "--words", "30", "--length", "16", "--steps", "4", "--batch-size", "2"]
    words += ["--channels", "16", "--heads", "2", "--fit-sequences", "8", "--test-sequences", "4", "--epochs", "1"]
    words += ["--every", "9", "--windows", "3", "--output", str(tmp_path / "out")]
    program.main([*words, "--sources", "window", "clusters"])
    saved = (tmp_path / "out" / "rows.csv").read_text()
    rows = read(tmp_path / "out" / "rows.csv")
    assert len(rows) == 2 * 2 * (1 + 2 + 2)
    assert all(0 <= row[name] <= 1 for row in rows for name in ("recall", "sparsity", "exact", "accuracy"))
    assert [row["source"] for row in rows if row["entropy"] == row["entropy"]] == ["clusters"] * 8
    program.main([*words, "--sources", "window", "clusters", "bigbird"])
    assert (tmp_path / "out" / "rows.csv").read_text().startswith(saved)
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"pareto.png", "heads.png", "maps-0.png"}
    capsys.readouterr()
    program.main(["--report", "--output", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "## Recall of the ground-truth edges, %" in said
    assert "| bigbird |" in said
    with pytest.raises(SystemExit):
        program.main([*words, "--dim", "2"])
    assert "Expected 'dim' to be 4 as in" in capsys.readouterr().err
