"""Graphs of molecules, with features of atoms and bonds: Peptides-func of the Long Range Graph Benchmark, and HIV of OGB.

In: tables of SMILES as published. Out: graphs of PyG, made by rdkit once and kept in a folder, and fingerprints. Not here: models.
"""

from __future__ import annotations

import ast
import csv
import gzip
import zipfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.utils.smiles import from_rdmol

from examples.common.releases import malformed
from examples.common.runs import RunError
from sbm_pyg.progress import tqdm

FILES = {"peptides_func": ("peptide_multi_class_dataset.csv.gz", "splits.npz"), "molhiv": ("HIV.csv.gz",)}
"""Files of a task, in a folder of its name or in the one given."""
ORIGINS = {
    "peptides_func": "The table is that of https://github.com/vijaydwivedi75/lrgb; splits.npz holds its split: train, val, test.",
    "molhiv": "It is HIV.csv of https://github.com/deepchem/deepchem, compressed by gzip.",
}
PARTS = ("train", "val", "test")


class Molecules(InMemoryDataset):
    """Graphs with features of OGB, nine of an atom and three of a bond, and labels ``y``; ``part`` is 0, 1 or 2: train, val or test.

    Labels of Peptides-func are ``[1, 10]`` float, those of HIV ``[1]`` int64. HIV is split by scaffolds as in OGB, from the most frequent
    ones to the rarest; molecules that the table repeats count once, which leaves the 41,127 of OGB.
    """

    def __init__(self, name: str, folder: Path, root: Path, transform: Callable[[Data], Data] | None = None) -> None:
        self.name, self.folder = name, find_files(name, folder)
        super().__init__(str(root / name), transform, log=False)
        self.load(self.processed_paths[0])

    @property
    def processed_file_names(self) -> str:
        return "molecules.pt"

    def process(self) -> None:
        smiles, labels, parts = READERS[self.name](self.folder)
        rows = zip(smiles, labels, parts, strict=True)
        graphs = []
        for text, y, part in tqdm(rows, desc=f"make graphs of {self.name}", unit="molecule", total=len(smiles)):
            graph = from_rdmol(molecule(text))
            graphs.append(Data(graph.x, graph.edge_index, graph.edge_attr, y=y, smiles=text, part=part))
        self.save(graphs, self.processed_paths[0])


def find_files(name: str, folder: Path) -> Path:
    """The folder that holds the files of a task.

    Raises:
        RunError: rdkit is missing, or the files are.
    """
    try:
        from rdkit.rdBase import DisableLog
    except ImportError:
        words = "Expected rdkit, which reads molecules, to be installed (got none)."
        raise RunError(f"{words} Run `pip install rdkit`.") from None
    DisableLog("rdApp.*")  # a line for each molecule with an unusual valence
    for place in (folder / name, folder):
        if all((place / file).is_file() for file in FILES[name]):
            return place
    raise RunError(
        f"Expected 'data' to be a folder that holds {' and '.join(FILES[name])} (got {folder}). {ORIGINS[name]}"
    )


def read_table(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """Columns of a compressed table."""
    try:
        with gzip.open(path, "rt", newline="") as file:
            rows = [*csv.DictReader(file)]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise malformed(path, None, "be a table compressed by gzip", error) from None
    if not rows or any(name not in rows[0] for name in columns):
        raise malformed(path, None, f"have the columns {', '.join(columns)}", [*rows[0]] if rows else "no rows")
    return [[row[name] for row in rows] for name in columns]


def molecule(smiles: str) -> Any:
    """A molecule of rdkit; unusual valences are left as they are."""
    from rdkit import Chem

    if (usual := Chem.MolFromSmiles(smiles)) is not None:
        return usual
    unusual = Chem.MolFromSmiles(smiles, sanitize=False)
    unusual.UpdatePropertyCache(strict=False)
    Chem.FastFindRings(unusual)
    return unusual


def read_peptides(folder: Path) -> tuple[list[str], list[torch.Tensor], list[int]]:
    """SMILES, labels and parts of Peptides-func."""
    path = folder / FILES["peptides_func"][0]
    smiles, lists = read_table(path, ("smiles", "labels"))
    try:
        labels = torch.tensor([ast.literal_eval(words) for words in lists], dtype=torch.float32)
        with np.load(folder / "splits.npz", allow_pickle=False) as split:
            part = torch.full((len(smiles),), -1)
            for number, name in enumerate(PARTS):
                part[torch.from_numpy(split[name].astype(np.int64))] = number
    except (ValueError, SyntaxError, KeyError, IndexError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise malformed(folder, None, "hold lists of ten labels, and a split into train, val and test", error) from None
    if labels.dim() != 2 or bool((part < 0).any()):
        raise malformed(
            folder, None, f"put each of {len(smiles)} molecules into a part", f"{int((part < 0).sum())} in none"
        )
    return smiles, [*labels.split(1)], part.tolist()


def read_hiv(folder: Path) -> tuple[list[str], list[torch.Tensor], list[int]]:
    """SMILES, labels and parts of HIV: scaffolds with most molecules first, as in MoleculeNet's split, which OGB takes."""
    path = folder / FILES["molhiv"][0]
    smiles, active = read_table(path, ("smiles", "HIV_active"))
    if not {*active} <= {"0", "1"}:
        raise malformed(path, None, "have 0 or 1 in the column HIV_active", sorted({*active})[:3])
    from rdkit.Chem import MolFromSmiles
    from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    first = sorted(
        {text: number for number, text in reversed([*enumerate(smiles)])}.values()
    )  # places of each molecule
    smiles, active = [smiles[number] for number in first], [active[number] for number in first]
    groups = defaultdict(list)
    for number, text in enumerate(tqdm(smiles, desc="find scaffolds", unit="molecule")):
        sanitized = MolFromSmiles(text)  # None: rdkit finds no scaffold of a molecule with an unusual valence
        scaffold = MurckoScaffoldSmiles(mol=sanitized, includeChirality=False) if sanitized else text
        groups[scaffold].append(number)
    part, ends = [2] * len(smiles), (0.8 * len(smiles), 0.9 * len(smiles))
    sizes = [0, 0]
    for numbers in sorted(groups.values(), key=lambda numbers: (len(numbers), numbers[0]), reverse=True):
        if sizes[0] + len(numbers) <= ends[0]:
            place = 0
        elif sum(sizes) + len(numbers) <= ends[1]:
            place = 1
        else:
            continue
        sizes[place] += len(numbers)
        for number in numbers:
            part[number] = place
    return smiles, [torch.tensor([int(word)]) for word in active], part


READERS = {"peptides_func": read_peptides, "molhiv": read_hiv}


def fingerprints(smiles: Sequence[str], size: int = 2048) -> np.ndarray:
    """Counts of the neighborhoods of atoms with a radius of up to two bonds (ECFP4), ``[n, size]``, hashed to ``size`` numbers."""
    from rdkit.Chem.rdFingerprintGenerator import GetMorganGenerator

    count = GetMorganGenerator(radius=2, fpSize=size).GetCountFingerprintAsNumPy
    return np.stack([count(molecule(text)) for text in tqdm(smiles, desc="count neighborhoods", unit="molecule")])
