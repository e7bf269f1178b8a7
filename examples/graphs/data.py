"""Tasks of classification: of nodes, or of whole molecules.

In: archives of Platonov et al., "A critical look at the evaluation of GNNs under heterophily" (ICLR 2023),
https://github.com/yandex-research/heterophilous-graphs, folder ``data``, each with one graph; :mod:`examples.graphs.generated`; or
:mod:`examples.graphs.molecules`. Out: :class:`Task`. Not here: mini-batches.
"""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.transforms import AddRandomWalkPE, Compose, NormalizeFeatures, ToSparseTensor
from torch_geometric.utils import to_undirected

from examples.common.runs import RunError
from examples.graphs.generated import KINDS, generate
from examples.graphs.molecules import FILES, PARTS, Molecules

CITATIONS = ("cora", "citeseer")  # of Planetoid, which has one split; the numbers of splits are seeds of the model
RANKED = ("minesweeper", "tolokers")  # two classes, judged by the area under the ROC curve; the others by accuracy
ARRAYS = ("node_features", "node_labels", "edges", "train_masks", "val_masks", "test_masks")
SPLITS = 10
UNREADABLE = (EOFError, MemoryError, OSError, RuntimeError, TypeError, ValueError, zipfile.BadZipFile, zlib.error)
"""Errors of numpy and zipfile about damaged archives."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Graphs whose nodes have features ``x``, labels ``y`` and masks ``[N, splits]``; single ones may have ``adj_t``.

    Molecules have features of categories ``x`` and ``edge_attr``, random walks ``walks``, one row of ``y``, and masks ``[1, splits]``.
    """

    train: list[Data]
    held_out: list[Data]
    classes: int
    metric: str
    """"accuracy", "area" under the ROC curve, "balanced": the mean of the accuracies of classes, or "precision": that of average precisions."""
    of_molecules: bool = False


def make_task(
    name: str,
    folder: Path | None,
    train_graphs: int,
    test_graphs: int,
    walk_length: int,
    cache: Path = Path("molecules"),
) -> Task:
    """A task by the name of its graph.

    Args:
        folder: Of the archives.
        cache: Folder for the graphs of molecules, which are made once.
        train_graphs, test_graphs: Numbers of generated graphs in the training part, and in each of the other two.
        walk_length: Number of features that tell how likely a random walk of 1, 2, ... steps is back at its first node.
    """
    attribute = "walks" if name in FILES else None
    add = Compose([AddRandomWalkPE(walk_length, attr_name=attribute)] if walk_length else [])
    if name in FILES:
        assert folder is not None
        return make_molecule_task(Molecules(name, folder, cache, add))
    if name in KINDS:
        numbers = {"train": train_graphs, "val": test_graphs, "test": test_graphs}
        parts = {part: [*map(add, generate(name, count, seed))] for seed, (part, count) in enumerate(numbers.items())}
        for part, graphs in parts.items():
            for graph in graphs:
                for mask in parts:
                    graph[f"{mask}_mask"] = torch.full((graph.num_nodes, SPLITS), mask == part)
        train, held_out = parts["train"], parts["val"] + parts["test"]
        metric = "balanced"
    else:
        assert folder is not None
        graph = load_citations(folder, name) if name in CITATIONS else load(folder, name)
        train = held_out = [add_rows(add(graph))]
        metric = "area" if name in RANKED else "accuracy"
    return Task(train, held_out, 1 + max(int(graph.y.max()) for graph in train), metric)


def make_molecule_task(molecules: Molecules) -> Task:
    """Molecules to train on, and those of both other parts."""
    parts: dict[int, list[Data]] = {number: [] for number in range(len(PARTS))}
    masks = torch.eye(len(PARTS), dtype=torch.bool)[:, :, None, None].expand(
        -1, -1, 1, SPLITS
    )  # [part, mask, 1, splits]
    for graph in molecules:
        part = int(graph.part)
        for name, mask in zip(PARTS, masks[part], strict=True):
            graph[f"{name}_mask"] = mask
        parts[part].append(graph)
    is_many = parts[0][0].y.is_floating_point()
    classes, metric = (parts[0][0].y.size(1), "precision") if is_many else (2, "area")
    return Task(parts[0], parts[1] + parts[2], classes, metric, of_molecules=True)


def add_rows(graph: Data) -> Data:
    """Add compressed rows ``adj_t``, along which messages take a fifth of the time on a CPU, if layers compute the same.

    They do not with self-loops, to which PyG's normalization adds others in rows, nor with repeated edges, which are one
    entry.
    """
    if graph.has_self_loops() or not graph.is_coalesced():
        return graph
    with torch.sparse.check_sparse_tensor_invariants():
        return ToSparseTensor(remove_edge_index=False, layout=torch.sparse_csr)(graph)


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Arrays of an archive of numpy.

    Raises:
        RunError: The archive is damaged, or lacks an array.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            missing = [name for name in names if name not in archive.files]
            if missing:
                words = f"Expected '{path}' to have {', '.join(names)} (got no {missing[0]})."
                raise RunError(f"{words} Download it again.")
            return {name: torch.from_numpy(archive[name]) for name in names}
    except UNREADABLE as error:
        raise RunError(f"Expected '{path}' to be an archive of numpy (got {error}). Download it again.") from error


def load_citations(folder: Path, name: str) -> Data:
    """A graph of Planetoid, with features whose sum is 1, and its one split as all splits.

    It is read from ``NAME.npz``, which holds compressed rows of features, labels, edges and the numbers of the nodes of each part, or else
    from the files that PyG downloads.
    """
    path = folder / f"{name}.npz"
    if not path.is_file():
        graph: Any = Planetoid(str(folder), name.capitalize())[0]
    else:
        features = ("feature_indptr", "feature_indices", "feature_values", "num_features")
        arrays = read_arrays(path, (*features, "node_labels", "edges", *PARTS))
        nodes, size = len(arrays["node_labels"]), int(arrays["num_features"])
        rowptr, col, value = (arrays[f"feature_{part}"] for part in ("indptr", "indices", "values"))
        x = (
            torch.sparse_csr_tensor(rowptr, col.to(rowptr.dtype), value, size=(nodes, size), check_invariants=True)
            .to_dense()
            .float()
        )
        graph = Data(x, to_undirected(arrays["edges"].long().T, num_nodes=nodes), y=arrays["node_labels"].long())
        for part in PARTS:
            graph[f"{part}_mask"] = torch.zeros(nodes, dtype=torch.bool).index_fill(0, arrays[part].long(), True)
    for part in PARTS:
        graph[f"{part}_mask"] = graph[f"{part}_mask"][:, None].expand(-1, SPLITS)
    return NormalizeFeatures()(graph)


def load(folder: Path, name: str) -> Data:
    """A graph, with edges in both directions, and masks ``[N, splits]``."""
    path = folder / f"{name}.npz"
    if not path.is_file():
        way_out = "Download it from https://github.com/yandex-research/heterophilous-graphs."
        raise RunError(f"Expected 'data' to be a folder that holds {path.name} (got {folder}). {way_out}")
    arrays = read_arrays(path, ARRAYS)
    shapes = [[*arrays[part].shape] for part in ARRAYS]
    nodes, edges = shapes[1], arrays["edges"]  # of labels, [N]
    valid = len(nodes) == 1 and len(shapes[0]) == 2 and shapes[0][:1] == nodes and shapes[3:] == [[SPLITS, *nodes]] * 3
    if not (valid and edges.dim() == 2 and edges.size(1) == 2 and bool(((edges >= 0) & (edges < nodes[0])).all())):
        words = f"Expected '{path}' to hold features [N, F], labels [N], edges [E, 2] between N nodes and masks [{SPLITS}, N]"
        raise RunError(f"{words} (got {dict(zip(ARRAYS, shapes, strict=True))}). Download it again.")
    data = Data(x=arrays["node_features"].float(), y=arrays["node_labels"].long())
    data.edge_index = to_undirected(arrays["edges"].long().T, num_nodes=data.num_nodes)
    for part in ("train", "val", "test"):
        data[f"{part}_mask"] = arrays[f"{part}_masks"].bool().T
    return data
