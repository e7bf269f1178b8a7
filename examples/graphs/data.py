"""Tasks of node classification.

In: archives of Platonov et al., "A critical look at the evaluation of GNNs under heterophily" (ICLR 2023),
https://github.com/yandex-research/heterophilous-graphs, folder ``data``, each with one graph; or :mod:`examples.graphs.generated`.
Out: :class:`Task`. Not here: mini-batches.
"""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.transforms import AddRandomWalkPE, Compose, ToSparseTensor
from torch_geometric.utils import to_undirected

from examples.common.runs import RunError
from examples.graphs.generated import KINDS, generate

RANKED = ("minesweeper", "tolokers")  # two classes, judged by the area under the ROC curve; the others by accuracy
PARTS = ("node_features", "node_labels", "edges", "train_masks", "val_masks", "test_masks")
SPLITS = 10
UNREADABLE = (EOFError, MemoryError, OSError, RuntimeError, TypeError, ValueError, zipfile.BadZipFile, zlib.error)
"""Errors of numpy and zipfile about damaged archives."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Graphs whose nodes have features ``x``, labels ``y`` and masks ``[N, splits]``; single ones may have ``adj_t``."""

    train: list[Data]
    held_out: list[Data]
    classes: int
    metric: str
    """"accuracy", "area" under the ROC curve, or "balanced": the mean of the accuracies of classes."""


def make_task(name: str, folder: Path | None, train_graphs: int, test_graphs: int, walk_length: int) -> Task:
    """A task by the name of its graph.

    Args:
        folder: Of the archives.
        train_graphs, test_graphs: Numbers of generated graphs in the training part, and in each of the other two.
        walk_length: Number of features that tell how likely a random walk of 1, 2, ... steps is back at its first node.
    """
    add = Compose([AddRandomWalkPE(walk_length, attr_name=None)] if walk_length else [])
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
        train = held_out = [add_rows(add(load(folder, name)))]
        metric = "area" if name in RANKED else "accuracy"
    return Task(train, held_out, 1 + max(int(graph.y.max()) for graph in train), metric)


def add_rows(graph: Data) -> Data:
    """Add compressed rows ``adj_t``, along which messages take a fifth of the time on a CPU, if layers compute the same.

    They do not with self-loops, to which PyG's normalization adds others in rows, nor with repeated edges, which are one
    entry.
    """
    if graph.has_self_loops() or not graph.is_coalesced():
        return graph
    with torch.sparse.check_sparse_tensor_invariants():
        return ToSparseTensor(remove_edge_index=False, layout=torch.sparse_csr)(graph)


def load(folder: Path, name: str) -> Data:
    """A graph, with edges in both directions, and masks ``[N, splits]``."""
    path = folder / f"{name}.npz"
    if not path.is_file():
        way_out = "Download it from https://github.com/yandex-research/heterophilous-graphs."
        raise RunError(f"Expected 'data' to be a folder that holds {path.name} (got {folder}). {way_out}")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            missing = [part for part in PARTS if part not in archive.files]
            if missing:
                words = f"Expected '{path}' to have {', '.join(PARTS)} (got no {missing[0]})."
                raise RunError(f"{words} Download it again.")
            arrays = {part: torch.from_numpy(archive[part]) for part in PARTS}
    except UNREADABLE as error:
        raise RunError(f"Expected '{path}' to be an archive of numpy (got {error}). Download it again.") from error
    shapes = [[*arrays[part].shape] for part in PARTS]
    nodes, edges = shapes[1], arrays["edges"]  # of labels, [N]
    valid = len(nodes) == 1 and len(shapes[0]) == 2 and shapes[0][:1] == nodes and shapes[3:] == [[SPLITS, *nodes]] * 3
    if not (valid and edges.dim() == 2 and edges.size(1) == 2 and bool(((edges >= 0) & (edges < nodes[0])).all())):
        words = f"Expected '{path}' to hold features [N, F], labels [N], edges [E, 2] between N nodes and masks [{SPLITS}, N]"
        raise RunError(f"{words} (got {dict(zip(PARTS, shapes, strict=True))}). Download it again.")
    data = Data(x=arrays["node_features"].float(), y=arrays["node_labels"].long())
    data.edge_index = to_undirected(arrays["edges"].long().T, num_nodes=data.num_nodes)
    for part in ("train", "val", "test"):
        data[f"{part}_mask"] = arrays[f"{part}_masks"].bool().T
    return data
