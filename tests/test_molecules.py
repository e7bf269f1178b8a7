"""Tests of molecules in ``examples.graphs``: tables as published, graphs, splits, models with features of bonds, and fingerprints."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch
from torch_geometric.utils import from_smiles

from examples.common.tables import read
from examples.graphs import __main__ as program
from examples.graphs import data, molecules, train

pytestmark = pytest.mark.usefixtures("one_thread")

# three with the scaffold of benzene, one of which is repeated, seven without rings, and one that rdkit does not accept
SMILES = [
    "c1ccccc1", "Cc1ccccc1", "CCO", "c1ccccc1", "Oc1ccccc1", "F[Al-3](F)(F)(F)(F)F",
    *(f"{'C' * n}N" for n in range(1, 7)),
]  # fmt: skip
PEPTIDES = ["NCC(=O)O", "CC(N)C(=O)O", "NCC(=O)NCC(=O)O", "OCC(N)C(=O)O", "SCC(N)C(=O)O", "CC(C)C(N)C(=O)O"]


def write_hiv(folder: Path, active: str = "HIV_active") -> Path:
    path = folder / "HIV.csv.gz"
    lines = [f"smiles,activity,{active}", *(f"{text},CI,{number % 2}" for number, text in enumerate(SMILES))]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def write_peptides(folder: Path, labels: str = "[{}, {}, 0]", **split: Any) -> Path:
    path = folder / "peptide_multi_class_dataset.csv.gz"
    rows = [f'{n},{text},"{labels.format(n % 2, 1 - n % 2)}"' for n, text in enumerate(PEPTIDES)]
    path.write_bytes(gzip.compress("\n".join([",smiles,labels", *rows]).encode()))
    np.savez(
        folder / "splits.npz", **{"train": np.array([0, 3]), "val": np.array([1, 4]), "test": np.array([2, 5])} | split
    )
    return path


def test_molecules_that_are_repeated_count_once_and_frequent_scaffolds_are_trained_on(tmp_path: Path) -> None:
    write_hiv(tmp_path)
    smiles, labels, parts = molecules.read_hiv(tmp_path)
    assert smiles == [text for n, text in enumerate(SMILES) if n != 3]
    assert torch.cat(labels).tolist() == [n % 2 for n in range(len(SMILES)) if n != 3]
    by_smiles = dict(zip(smiles, parts, strict=True))
    # of 11 molecules: seven without rings fill the training part of 8.8 to all but one
    assert {by_smiles[text] for text in SMILES if "c" not in text and "Al" not in text} == {0}
    assert {by_smiles[text] for text in SMILES if "c" in text} == {2}
    assert by_smiles["F[Al-3](F)(F)(F)(F)F"] == 0


def test_graphs_are_those_of_pyg(tmp_path: Path) -> None:
    write_peptides(tmp_path)
    made = molecules.Molecules("peptides_func", tmp_path, tmp_path / "cache")
    assert [int(graph.part) for graph in made] == [0, 1, 2, 0, 1, 2]
    for graph, text in zip(made, PEPTIDES, strict=True):
        expected = from_smiles(text)
        assert graph.smiles == text
        for name in ("x", "edge_index", "edge_attr"):
            assert torch.equal(graph[name], expected[name])
    assert made[3].y.tolist() == [[1, 0, 0]]
    (tmp_path / "peptide_multi_class_dataset.csv.gz").write_bytes(b"")  # graphs are made once
    assert len(molecules.Molecules("peptides_func", tmp_path, tmp_path / "cache")) == 6


def test_molecules_with_unusual_valences_have_graphs() -> None:
    assert molecules.molecule("F[Al-3](F)(F)(F)(F)F").GetNumAtoms() == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "splits.npz").unlink(), r"folder that holds peptide_multi.* and splits\.npz"),
        (lambda folder: write_peptides(folder).write_bytes(b"a,b"), "be a table compressed by gzip"),
        (
            lambda folder: write_peptides(folder).write_bytes(gzip.compress(b"smiles,y\nC,1")),
            "have the columns smiles, labels",
        ),
        (lambda folder: write_peptides(folder, "[{}"), "hold lists of ten labels"),
        (lambda folder: write_peptides(folder, test=np.array([2])), r"put each of 6 molecules .* \(got 1 in none\)"),
        (lambda folder: write_peptides(folder, test=np.array([2, 9])), "hold lists of ten labels, and a split"),
    ],
)
def test_damaged_tables_are_named(change: Any, message: str, tmp_path: Path) -> None:
    write_peptides(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        molecules.Molecules("peptides_func", tmp_path, tmp_path / "cache")


@pytest.mark.needs_data
def test_the_published_tables_have_the_published_sizes(sample: Any) -> None:
    smiles, labels, parts = molecules.read_hiv(sample("molhiv"))
    assert torch.tensor(parts).bincount().tolist() == [32_901, 4_113, 4_113]  # of OGB
    assert len(smiles) == len(labels) == 41_127
    smiles, labels, parts = molecules.read_peptides(sample("peptides_func"))
    assert torch.tensor(parts).bincount().tolist() == [10_873, 2_331, 2_331]
    assert labels[0].shape == (1, 10)


@pytest.mark.parametrize("conv", [*train.CONVS, "transformer"])
def test_models_read_atoms_and_those_with_features_of_bonds_read_them(conv: str, tmp_path: Path) -> None:
    write_peptides(tmp_path)
    task = data.make_task("peptides_func", tmp_path, 0, 0, 3, tmp_path)
    assert (len(task.train), len(task.held_out), task.classes, task.metric) == (2, 4, 3, "precision")
    torch.manual_seed(1)  # some initial weights hardly read an input
    model = train.make_model(
        train.Run("peptides_func", "none", 1e-3, 0, channels=32, conv=conv, walk_length=3), task
    ).eval()
    batch: Any = Batch.from_data_list(task.held_out)
    expected = model(batch)
    assert expected.shape == (4, 3)
    alone: Any = Batch.from_data_list(task.held_out[1:2])
    torch.testing.assert_close(model(alone), expected[1:2])
    for name in ("x", "edge_attr", "walks"):
        changed = batch.clone()
        changed[name] = torch.zeros_like(batch[name])
        differs = not torch.allclose(model(changed), expected)
        assert differs == (name != "edge_attr" or conv in train.BOND_CONVS)


def test_the_program_trains_on_molecules_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "peptides_func").mkdir()
    write_peptides(tmp_path / "peptides_func", "[{}, {}]")
    words = ["--data", str(tmp_path), "--graphs", "peptides_func", "--splits", "0", "--steps", "4", "--channels", "8"]
    words += [
        "--heads", "2", "--density", "0.4", "--conv", "transformer", "--evaluations", "2", "--output",
        str(tmp_path / "runs"),
    ]  # fmt: skip
    program.main(words)
    rows = read(tmp_path / "runs" / "rows.csv")
    arms = {arm for arm in program.ARMS if program.fits(arm, "peptides_func")}
    assert {row["arm"] for row in rows} == arms
    assert all(0 <= row["test"] <= 100 and row["alike"] == 0 for row in rows)
    assert all(row["density"] > 0 for row in rows if row["arm"] == "random")
    saved = (tmp_path / "runs" / "rows.csv").read_text()
    program.main(words)
    assert (tmp_path / "runs" / "rows.csv").read_text() == saved
    assert "| `fingerprint` | 1 |" in capsys.readouterr().out


def test_precision_is_the_mean_over_labels() -> None:
    logits, y = torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 2.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    assert train.score("precision", logits, y) == pytest.approx(100 * (1 + 1 / 3) / 2)
