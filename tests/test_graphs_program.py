"""Tests of ``examples.graphs``: reading archives, generated graphs, training and resuming, scores and tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn.models import SGFormer
from torch_geometric.utils import is_undirected

from examples.common.runs import RunError
from examples.common.tables import read
from examples.graphs import __main__ as program
from examples.graphs import data, generated, report, train

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),  # as PyG, which loses this in pytest
]

CPU = torch.device("cpu")


def write(folder: Path, name: str = "chameleon_filtered", **parts: Any) -> Path:
    """An archive as the published ones, of 40 nodes in two classes that their features tell."""
    random = np.random.default_rng(0)
    label = np.arange(40) % 2
    masks = random.permuted(np.tile(np.arange(40) % 3, (10, 1)), axis=1)
    found = {
        "node_features": np.stack([label, 1 - label, random.random(40)], 1), "node_labels": label,
        "edges": np.unique(np.sort(random.integers(0, 40, (80, 2)), 1), axis=0),
        **{f"{part}_masks": masks == number for number, part in enumerate(("train", "val", "test"))}, **parts,
    }  # fmt: skip
    path = folder / f"{name}.npz"
    np.savez(path, **{key: value for key, value in found.items() if value is not None})
    return path


def test_graphs_have_edges_in_both_directions_and_a_mask_for_each_split(tmp_path: Path) -> None:
    write(tmp_path)
    graph = data.load(tmp_path, "chameleon_filtered")
    assert graph.is_undirected()
    assert graph.train_mask.shape == graph.val_mask.shape == graph.test_mask.shape == (40, 10)
    assert bool((graph.train_mask.int() + graph.val_mask.int() + graph.test_mask.int() == 1).all())


@pytest.mark.needs_data
@pytest.mark.parametrize(("name", "nodes", "classes"), [("chameleon_filtered", 890, 5), ("minesweeper", 10_000, 2)])
def test_published_archives_are_read(name: str, nodes: int, classes: int, sample: Any) -> None:
    graph = data.load(sample("heterophilous", f"{name}.npz"), name)
    assert graph.num_nodes == nodes
    assert int(graph.y.max()) + 1 == classes
    assert graph.test_mask.shape == (nodes, 10)


def test_damaged_archives_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"folder that holds squirrel_filtered\.npz"):
        data.load(tmp_path, "squirrel_filtered")
    path = write(tmp_path, val_masks=None)
    with pytest.raises(RunError, match="got no val_masks"):
        data.load(tmp_path, "chameleon_filtered")
    content = write(tmp_path).read_bytes()
    entry = content.index(b"PK\1\2")  # of the directory: version, flags, and method of compression
    for damaged in (content[:300], *(content[: entry + at] + b"\x63" + content[entry + at + 1 :] for at in (6, 8, 10))):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match="to be an archive of numpy"):
            data.load(tmp_path, "chameleon_filtered")
    write(tmp_path, node_labels=np.array([{}] * 40, dtype=object))  # would be unpickled
    with pytest.raises(RunError, match="to be an archive of numpy"):
        data.load(tmp_path, "chameleon_filtered")
    path.write_bytes(b"")
    with pytest.raises(RunError, match="to be an archive of numpy"):
        data.load(tmp_path, "chameleon_filtered")


@pytest.mark.parametrize(
    "parts",
    [
        {"node_labels": np.zeros(39, dtype=int)}, {"node_features": np.zeros(40)},
        {"edges": np.zeros((5, 1), dtype=int)}, {"edges": np.full((5, 2), 40)},
        {"val_masks": np.zeros((3, 40), dtype=bool)},
    ],
)  # fmt: skip
def test_arrays_that_are_of_no_graph_are_refused(parts: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, **parts)
    with pytest.raises(RunError, match=r"chameleon_filtered\.npz' to hold features \[N, F\].*Download it again"):
        data.load(tmp_path, "chameleon_filtered")


def rate(graphs: list[Any], chosen: Any) -> float:
    """Part of the pairs of nodes ``i``, ``j`` with ``chosen(graph, i, j)`` that have an edge."""
    edges = pairs = 0.0
    for graph in graphs:
        i, j = torch.cartesian_prod(torch.arange(graph.num_nodes), torch.arange(graph.num_nodes)).T
        pairs += float((chosen(graph, i, j) & (i != j)).sum())
        edges += float(chosen(graph, *graph.edge_index).sum())
    return edges / pairs


def test_cluster_is_as_published() -> None:
    graphs = generated.generate("cluster", 60, seed=3)
    for graph in graphs:
        assert graph.is_undirected()
        assert not graph.has_self_loops()
        sizes = graph.y.bincount(minlength=6)
        assert 5 <= int(sizes.min()) <= int(sizes.max()) < 35
        word = graph.x.argmax(1)
        assert sorted(word[word > 0].tolist()) == [1, 2, 3, 4, 5, 6]  # one node of each community
        assert torch.equal(word[word > 0] - 1, graph.y[word > 0])
    assert rate(graphs, lambda graph, i, j: graph.y[i] == graph.y[j]) == pytest.approx(0.55, abs=0.01)
    assert rate(graphs, lambda graph, i, j: graph.y[i] != graph.y[j]) == pytest.approx(0.25, abs=0.005)


def test_pattern_is_as_published() -> None:
    graphs = generated.generate("pattern", 120, seed=1)
    others = generated.generate("pattern", 120, seed=2)
    for graph, other in zip(graphs, others, strict=True):
        assert graph.is_undirected()
        assert not graph.has_self_loops()
        assert 5 <= int(graph.y.sum()) < 35
        assert 30 <= graph.num_nodes < 205
        # the same pattern, whose nodes have another order, among other nodes
        assert torch.equal(graph.x[graph.y == 1].sum(0), other.x[other.y == 1].sum(0))
        inside, other_inside = (each.y[each.edge_index].sum(0) == 2 for each in (graph, other))
        assert inside.sum() == other_inside.sum()
    assert graphs[0].num_nodes != others[0].num_nodes
    assert torch.equal(
        graphs[0].x[graphs[0].y == 1].sum(0), graphs[100].x[graphs[100].y == 1].sum(0)
    )  # of 100 patterns
    assert rate(graphs, lambda graph, i, j: graph.y[i] != graph.y[j]) == pytest.approx(0.5, abs=0.01)
    # five communities: a pair has a chance of 0.5 in one of them, else of 0.35
    assert 0.37 < rate(graphs, lambda graph, i, j: graph.y[i] + graph.y[j] == 0) < 0.40


def test_generated_graphs_depend_on_their_seed_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = (generated.generate("cluster", 2, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first[1].edge_index, again[1].edge_index)
    assert first[1].num_nodes != other[1].num_nodes or not torch.equal(first[1].y, other[1].y)


def test_parts_of_a_generated_task_are_disjoint_and_walks_are_added() -> None:
    task = data.make_task("cluster", None, train_graphs=3, test_graphs=2, walk_length=2)
    assert (len(task.train), len(task.held_out), task.classes, task.metric) == (3, 4, 6, "balanced")
    assert all(
        bool(graph.train_mask.all()) and not bool((graph.val_mask | graph.test_mask).any()) for graph in task.train
    )
    assert [bool(graph.val_mask.all()) for graph in task.held_out] == [True, True, False, False]
    assert [bool(graph.test_mask.all()) for graph in task.held_out] == [False, False, True, True]
    graph = task.held_out[0]
    degree = graph.edge_index[0].bincount(minlength=graph.num_nodes).float()
    back = torch.zeros_like(degree).index_add_(0, graph.edge_index[0], 1 / degree[graph.edge_index[1]]) / degree
    assert torch.equal(graph.x[:, 7], torch.zeros_like(degree))  # no walk of one step is back
    torch.testing.assert_close(graph.x[:, 8], back)


def test_mini_batches_of_generated_graphs_train_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = data.make_task("cluster", None, train_graphs=5, test_graphs=2, walk_length=0)
    run = train.Run(
        "cluster", "sbm", 3e-3, split=1, density=0.2, steps=6, channels=8, layers=1, heads=2, dropout=0.1, dense_part=0.5,
        conv="gin", batch_size=2, evaluations=3,
    )  # fmt: skip
    whole = train.train(run, task, tmp_path, CPU)
    assert [row["step"] for row in whole] == [2, 4, 6]
    assert all(0.1 < row["density"] < 0.4 for row in whole)
    fit: Any = train.fit
    seen: list[int] = []

    def stopped(*given: Any, **options: Any) -> Any:
        """Ends after five of six steps, one after the last evaluation."""
        losses = given[4]

        def at(step: int) -> Any:
            seen.append(step)
            if len(seen) == 6:
                raise KeyboardInterrupt
            return losses(step)

        return fit(*given[:4], at, *given[5:], **options)

    monkeypatch.setattr(train, "fit", stopped)
    with pytest.raises(KeyboardInterrupt):
        train.train(run, task, tmp_path / "again", CPU)
    rows = train.train(run, task, tmp_path / "again", CPU)
    assert seen == [0, 1, 2, 3, 4, 5, 4, 5]  # from the evaluation after four steps
    same = ("step", "loss", "val", "test", "density")
    assert [[row[name] for name in same] for row in rows] == [[row[name] for name in same] for row in whole]


NODE = np.arange(39)
EDGES = np.concatenate([np.stack([NODE, NODE + 1], 1), np.stack([NODE[:20], NODE[:20] + 7], 1)])
KINDS_OF_EDGES = {
    "simple": EDGES,
    "self-loops": np.concatenate([EDGES, [[0, 0], [7, 7]]]),
    "repeated": np.concatenate([EDGES, EDGES[:9], EDGES[:3, ::-1]]),
    "repeated self-loops": np.concatenate([EDGES, [[0, 0], [0, 0]]]),
}


@pytest.mark.parametrize("edges", KINDS_OF_EDGES)
@pytest.mark.parametrize("conv", [*train.CONVS, "sgformer"])
def test_compressed_rows_pass_the_messages_of_edges(conv: str, edges: str, tmp_path: Path) -> None:
    write(tmp_path, edges=KINDS_OF_EDGES[edges])
    graph = data.make_task("chameleon_filtered", tmp_path, 0, 0, 0).train[0]
    assert ("adj_t" in graph) == (edges in ("simple", "repeated"))  # an edge of the archive counts once
    batch = (torch.zeros(40, dtype=torch.int64),) if conv == "sgformer" else ()
    layer = SGFormer(3, 4, 2).eval() if conv == "sgformer" else train.CONVS[conv](3)
    found, expected = (layer(graph.x, given, *batch) for given in (train.edges_of(graph), graph.edge_index))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("extra", [[[0, 1], [1, 2]], [[3], [3]]])
def test_graphs_with_repeated_edges_or_self_loops_get_no_rows(extra: list[list[int]]) -> None:
    edge_index = torch.cat([torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.tensor(extra)], 1)
    assert "adj_t" not in data.add_rows(Data(edge_index=edge_index, num_nodes=4))


def test_the_program_trains_on_accelerators_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there: dict[str, Any] = {"found": None}
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: there["found"])
    words = ["--graphs", "pattern", "--accelerator", "cuda", "--output", str(tmp_path / "new")]
    words += ["--train-graphs", "1", "--test-graphs", "1"]
    with pytest.raises(SystemExit):
        program.main(words)
    expected = "Expected 'accelerator' to be one that this machine has (got 'cuda'). Leave it out for 'cpu'."
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert train.find_device("auto") == train.find_device("cpu") == CPU
    there["found"] = torch.device("cuda")
    assert train.find_device("auto") == train.find_device("cuda") == torch.device("cuda")
    assert train.find_device("cpu") == CPU


def test_the_program_generates_graphs_without_archives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--graphs", "pattern", "cluster", "--conv", "gated", "--splits", "0", "--steps", "2", "--channels", "8"]
    words += ["--train-graphs", "4", "--test-graphs", "2", "--heads", "2", "--batch-size", "2"]
    words += ["--output", str(tmp_path)]
    program.main([*words, "--arms", "none", "sgformer", "performer", "random"])
    shown = capsys.readouterr().out
    assert shown.index("## pattern") < shown.index("## cluster")
    assert shown.count("| `sgformer` | 1 |") == 2
    with pytest.raises(SystemExit):
        program.main([*words, "--arms", "full", "--train-graphs", "5"])
    assert "Expected 'train-graphs of pattern' to be 4 as in" in capsys.readouterr().err


def test_the_program_trains_every_arm_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    words = ["--data", str(tmp_path), "--graphs", "chameleon_filtered", "--splits", "0", "1", "--steps", "4"]
    words += ["--channels", "8", "--heads", "2", "--density", "0.2", "--output", str(tmp_path / "runs")]
    program.main([*words, "--arms", "none", "--splits", "1"])  # other runs are added later
    capsys.readouterr()
    program.main(words)
    with pytest.raises(SystemExit):
        program.main([*words, "--density", "0.3"])
    captured = capsys.readouterr()
    shown = captured.out
    assert "Expected 'density of chameleon_filtered' to be 0.2 as in" in captured.err
    rows = read(tmp_path / "runs" / "rows.csv")
    arms = [arm for arm in program.ARMS if program.fits(arm, "chameleon_filtered")]
    assert {(row["arm"], row["split"]) for row in rows} == {(arm, split) for arm in arms for split in (0, 1)}
    assert all(0 <= row["test"] <= 100 for row in rows)
    sampled = [row["density"] for row in rows if row["arm"] in ("random", "sbm", "indexer") and row["step"] == 4]
    assert min(sampled) > 0.05
    assert max(sampled) < 0.5
    assert all(f"| `{arm}` | 2 |" in shown for arm in arms)
    saved = (tmp_path / "runs" / "rows.csv").read_text()
    program.main(words)
    assert (tmp_path / "runs" / "rows.csv").read_text() == saved
    program.main(["--report", "--output", str(tmp_path / "runs")])
    assert capsys.readouterr().out.count("| `sbm` | 2 |") == 2


def write_citations(folder: Path) -> None:
    """A graph as `write` makes them, in the form of Planetoid."""
    random = np.random.default_rng(0)
    label = np.arange(40) % 2
    np.savez(
        folder / "cora.npz", feature_indptr=np.arange(0, 81, 2), feature_indices=np.stack([label, label + 70], 1).flatten(),
        feature_values=np.ones(80), num_features=72, node_labels=label, edges=np.unique(random.integers(0, 40, (60, 2)), axis=0),
        train=np.arange(10), val=np.arange(10, 20), test=np.arange(20, 40),
    )  # fmt: skip


def test_learned_edges_are_added_to_those_of_citations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_citations(tmp_path)
    graph = data.make_task("cora", tmp_path, 0, 0, 0).train[0]
    assert is_undirected(graph.edge_index)
    torch.testing.assert_close(graph.x.sum(1), torch.ones(40))
    assert graph.x[1].nonzero().flatten().tolist() == [1, 71]
    assert [int(graph[f"{part}_mask"][:, 7].sum()) for part in ("train", "val", "test")] == [10, 10, 20]
    words = [
        "--data", str(tmp_path), "--graphs", "cora", "--splits", "0", "--steps", "4", "--channels", "8", "--heads", "2",
    ]  # fmt: skip
    words += ["--density", "0.2", "--evaluations", "2", "--output", str(tmp_path / "runs")]
    program.main([*words, "--arms", *train.OF_GCN, "none"])
    rows = {row["arm"]: row for row in read(tmp_path / "runs" / "rows.csv")}
    assert rows["gcn"]["density"] == rows["none"]["density"] == 0
    assert rows["learned"]["density"] > rows["learned:frozen"]["density"] / 2 > 0.1  # given edges count
    assert "| `learned` | 1 |" in capsys.readouterr().out
    (tmp_path / "cora.npz").write_bytes((tmp_path / "cora.npz").read_bytes()[:300])
    with pytest.raises(RunError, match=r"cora\.npz' to be an archive of numpy"):
        data.load_citations(tmp_path, "cora")


@pytest.mark.needs_data
@pytest.mark.parametrize(("name", "nodes", "edges"), [("cora", 2_708, 10_556), ("citeseer", 3_327, 9_104)])
def test_published_citations_are_read(name: str, nodes: int, edges: int, sample: Any) -> None:
    graph = data.load_citations(sample("planetoid", f"{name}.npz"), name)
    assert (graph.num_nodes, graph.num_edges) == (nodes, edges)
    assert (int(graph.val_mask[:, 0].sum()), int(graph.test_mask[:, 9].sum())) == (500, 1000)


def test_scores_are_accuracy_and_the_area_under_the_curve() -> None:
    logits, y = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 1, 1])
    assert train.score("accuracy", logits, y) == pytest.approx(200 / 3)
    assert train.score("balanced", logits, y) == pytest.approx(75.0)  # one of one, one of two
    assert train.score("area", logits, y) == pytest.approx(50.0)  # one of two pairs is in order
    assert train.class_weights(torch.tensor([0, 1, 1, 1]), 3).tolist() == [0.75, 0.25, 1.0]


def test_a_table_takes_the_best_validation_and_the_best_rate() -> None:
    known = {"graph": "g", "density": 0.1, "alike": 0.5, "seconds": 1.0}
    rows = [
        {**known, "arm": arm, "learning_rate": rate, "split": split, "step": step, "val": val, "test": test}
        for arm, rate, split, step, val, test in (
            ("random", 0.1, 0, 1, 50.0, 40.0),
            ("random", 0.1, 0, 2, 60.0, 41.0),
            ("random", 0.1, 1, 2, 60.0, 43.0),
            ("sbm", 0.1, 0, 2, 10.0, 99.0),
            ("sbm", 0.1, 1, 2, 10.0, 99.0),
            ("sbm", 0.2, 0, 2, 70.0, 51.0),
            ("sbm", 0.2, 1, 2, 70.0, 55.0),
            ("sbm", 0.3, 0, 2, 90.0, 100.0),  # one split alone
        )
    ]
    found = report.chosen(rows)
    assert [row["test"] for row in found["random"].values()] == [41.0, 43.0]
    assert [row["test"] for row in found["sbm"].values()] == [51.0, 55.0]
    assert report.difference(found["sbm"], found["random"]).startswith("+11.00 ±")
    assert report.difference(found["random"], found["random"]) == ""
    assert report.difference({0: {"test": 51.0}}, found["random"]) == "+10.00 (one split)"
