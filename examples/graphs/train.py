"""Trains one graph transformer for each graph, arm, learning rate and split."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch_geometric.data import Batch, Data
from torch_geometric.nn import (
    MLP,
    GCNConv,
    GINConv,
    GINEConv,
    GPSConv,
    ResGatedGraphConv,
    SAGEConv,
    global_mean_pool,
)  # fmt: skip
from torch_geometric.nn.models import GCN, SGFormer
from torch_geometric.typing import Adj
from torch_geometric.utils.smiles import e_map, x_map

from examples.common import attention
from examples.common.command import option
from examples.common.fit import file_name, fit, train_missing
from examples.common.runs import RunError, settings_of_all
from examples.common.tables import Row
from examples.graphs.data import Task
from examples.graphs.molecules import fingerprints
from sbm_pyg import (
    AttentionGraph,
    DensitySource,
    LearnedGraph,
    SBMHead,
    SBMSource,
    SparseGPSConv,
    Sparsifier,
    TransformerConv,
    analysis,
)  # fmt: skip

BOND_CHANNELS = 16
CONVS: dict[str, Callable[[int], nn.Module]] = {
    "sage": lambda channels: SAGEConv(channels, channels),
    "gcn": lambda channels: GCNConv(channels, channels),
    "gin": lambda channels: GINConv(two_layers(channels)),
    "gated": lambda channels: ResGatedGraphConv(channels, channels),
}
"""Message passing along the edges of the data, by name."""
BOND_CONVS: dict[str, Callable[[int], nn.Module]] = {
    "gin": lambda channels: GINEConv(two_layers(channels), edge_dim=BOND_CHANNELS),
    "gated": lambda channels: ResGatedGraphConv(channels, channels, edge_dim=BOND_CHANNELS),
    "transformer": lambda channels: TransformerConv(channels, channels // 4, heads=4, edge_dim=BOND_CHANNELS),
}
"""Message passing that reads the features of bonds."""
OF_PYG = {"full": "multihead", "performer": "performer"}
"""Attention of PyG, by arm."""
OF_GCN = ("gcn", "learned", "learned:frozen")
"""Graph convolutions over the edges of the data, and over those that a source adds to them."""
UNSAMPLED = ("none", *OF_PYG, "sgformer", *OF_GCN)  # arms without graphs of attention
DIRECTIONS = 64  # main directions of the features, which the source of "learned" reads


def two_layers(channels: int) -> nn.Module:
    return nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels))


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides the outcome of a run."""

    graph: str
    arm: str
    learning_rate: float
    split: int
    density: float = option(0.05, "share of the pairs", above=0, below=1)
    steps: int = option(300, above=0)
    channels: int = option(64, above=0)
    layers: int = option(2, above=0)
    heads: int = option(4, above=0)
    dropout: float = option(0.5, least=0, below=1)
    dense_part: float = option(0.5, "of the steps of sources, at first over all pairs", least=0, below=1)
    conv: str = option("sage", "layers of message passing", choices=(*CONVS, "transformer"))
    walk_length: int = option(0, "features of random walks to add to nodes", least=0)
    train_graphs: int = option(1000, "to generate", above=0)
    test_graphs: int = option(200, "to generate", above=0)
    batch_size: int = option(32, "graphs of a step, of generated ones and molecules", above=0)
    evaluations: int = option(30, above=0)
    weight_decay: float = option(0.0, "of AdamW", least=0)

    @property
    def identity(self) -> Row:
        """The cells that name the run in rows."""
        return {name: getattr(self, name) for name in ("graph", "arm", "learning_rate", "split")}


def make_node_attention(run: Run, nodes: float) -> Any:
    """Attention over random pairs, those of a source that learns, or of one that does not (``sbm:frozen``); ``nodes`` of a graph in the mean."""
    name, _, frozen = run.arm.partition(":")
    source_options: dict[str, Any] = {
        "random": {"num_keys_per_query": max(1, round(run.density * nodes))},
        "sbm": {"window": None},
    }
    shape = (run.channels, run.channels // run.heads, run.heads)
    return attention.make_attention(name, *shape, source_options.get(name, {}) | {"frozen": bool(frozen)})


def make_model(run: Run, task: Task) -> nn.Module:
    """A model from a batch to logits, of its nodes or of its molecules."""
    if task.of_molecules:
        return MoleculeModel(run, task)
    if run.arm in OF_GCN:
        return Gcn(run, task.train[0], task.classes)
    features = task.train[0].num_features
    if run.arm != "sgformer":
        return Model(run, features, task)
    return OfPyG(
        features, run.channels, task.classes, trans_num_layers=1, trans_num_heads=run.heads, trans_dropout=run.dropout,
        gnn_num_layers=run.layers, gnn_dropout=run.dropout,
    )  # fmt: skip


class Gcn(nn.Module):
    """The model of Kipf and Welling, over the edges of the data, and over those that a LearnedGraph adds to them ("learned")."""

    def __init__(self, run: Run, graph: Data, classes: int) -> None:
        super().__init__()
        self.gcn = GCN(graph.num_features, run.channels, run.layers, classes, run.dropout)
        self.edges = None
        if run.arm != "gcn":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                main = torch.svd_lowrank(graph.x, DIRECTIONS, niter=4)[0]  # orthonormal
            source = SBMSource(SBMHead(main.size(1), num_clusters=32), target_density=run.density)
            self.edges = LearnedGraph(source.requires_grad_(run.arm == "learned"))
            self.register_buffer("directions", main * graph.num_nodes**0.5, persistent=False)

    def forward(self, data: Any) -> Tensor:
        if self.edges is None:
            return self.gcn(data.x, data.edge_index)
        self.graph: AttentionGraph
        edge_index, weight, self.graph = self.edges(self.directions, keep=data.edge_index, return_graph=True)
        return self.gcn(data.x, edge_index, edge_weight=weight)


class OfPyG(SGFormer):
    def forward(self, data: Any) -> Tensor:
        return super().forward(data.x, edges_of(data), data.batch)


class Model(nn.Module):
    """Layers of message passing along the edges of the data, and of attention next to it."""

    def __init__(self, run: Run, features: int, task: Task) -> None:
        super().__init__()
        nodes = fmean(graph.num_nodes for graph in task.train)
        convs = CONVS | BOND_CONVS if task.of_molecules else CONVS
        self.embed = nn.Linear(features, run.channels) if features else nn.Identity()
        self.out: nn.Module = nn.Linear(run.channels, task.classes)
        self.layers = nn.ModuleList(self._layer(run, convs[run.conv](run.channels), nodes) for _ in range(run.layers))

    @staticmethod
    def _layer(run: Run, conv: Any, nodes: float) -> nn.Module:
        if run.arm in OF_PYG:
            return GPSConv(run.channels, conv, run.heads, run.dropout, attn_type=OF_PYG[run.arm])
        if run.arm == "none":
            return WithoutAttention(run.channels, conv, 1, run.dropout)
        return SparseGPSConv(run.channels, conv, make_node_attention(run, nodes), run.dropout)

    def forward(self, data: Any) -> Tensor:
        x = self.embed(data.x)
        for layer in self.layers:
            x = layer(x, edges_of(data), data.batch)
        return self.out(x)


class MoleculeModel(Model):
    """The same layers over atoms, which read the features of bonds; the mean over atoms goes through three layers."""

    def __init__(self, run: Run, task: Task) -> None:
        super().__init__(run, run.walk_length, task)
        self.atoms, self.bonds = Categories(x_map, run.channels), Categories(e_map, BOND_CHANNELS)
        self.reads_bonds = run.conv in BOND_CONVS
        self.out = MLP([run.channels] * 3 + [task.classes], norm=None)

    def forward(self, data: Any) -> Tensor:
        x = self.atoms(data.x)
        if "walks" in data:
            x = x + self.embed(data.walks)
        bonds = {"edge_attr": self.bonds(data.edge_attr)} if self.reads_bonds else {}
        for layer in self.layers:
            x = layer(x, data.edge_index, data.batch, **bonds)
        return self.out(global_mean_pool(x, data.batch, data.num_graphs))


class Categories(nn.Module):
    """The sum of one embedding for each feature ``[N, features]`` of categories, whose names PyG lists."""

    def __init__(self, names: dict[str, list[Any]], channels: int) -> None:
        sizes = torch.tensor([0, *(len(values) for values in names.values())])
        super().__init__()
        self.embedding = nn.EmbeddingBag(int(sizes.sum()), channels, mode="sum")
        self.first: Tensor
        self.register_buffer("first", sizes.cumsum(0)[:-1], persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(features + self.first)
        return embedded


class WithoutAttention(GPSConv):
    """The layer of PyG without its attention."""

    def forward(self, x: Tensor, edge_index: Adj, batch: Tensor, **edges: Tensor) -> Tensor:
        h = self.norm1(x + nn.functional.dropout(self.conv(x, edge_index, **edges), self.dropout, self.training))
        return self.norm3(h + self.mlp(h))


def score(metric: str, logits: Tensor, y: Tensor) -> float:
    """The score of a :class:`Task`, in percent."""
    if metric == "precision":
        return 100 * float(average_precision_score(y.numpy(), logits.numpy()))
    if metric == "area":
        return 100 * float(roc_auc_score(y.numpy(), logits.softmax(1)[:, 1].numpy()))
    if metric == "balanced":
        return 100 * float(balanced_accuracy_score(y.numpy(), logits.argmax(1).numpy()))
    return 100 * float((logits.argmax(1) == y).double().mean())


def class_weights(y: Tensor, classes: int) -> Tensor:
    """The part of the nodes in other classes, as in Dwivedi et al."""
    return 1 - torch.bincount(y, minlength=classes) / len(y)


def find_device(accelerator: str) -> torch.device:
    """The device of "cpu", "cuda" or "mps", or of the first accelerator there is ("auto").

    Raises:
        RunError: This machine has no such accelerator.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if accelerator not in ("auto", "cpu", device.type):
        words = f"Expected 'accelerator' to be one that this machine has (got {accelerator!r})."
        raise RunError(f"{words} Leave it out for {device.type!r}.")
    return torch.device("cpu") if accelerator == "cpu" else device


def train(run: Run, task: Task, folder: Path, device: torch.device) -> list[Row]:
    """Trains one model, or goes on from its checkpoint; returns a row for each evaluation, at the density of the run."""
    if run.arm == "fingerprint":
        return fit_fingerprints(run, task)
    torch.manual_seed(run.split)
    model = make_model(run, task).to(device)
    sparse = run.arm not in OF_GCN and any(isinstance(module, DensitySource) for module in model.modules())
    sparsifier = Sparsifier(model, run.density, total_steps=run.steps, dense_part=run.dense_part) if sparse else None
    per_epoch = -(-len(task.train) // run.batch_size)

    @lru_cache(maxsize=1)
    def batches(epoch: int) -> list[Any]:
        order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(2**32 * run.split + epoch))
        return _batches([task.train[n] for n in order.tolist()], run.batch_size, device)

    held_out = _batches(task.held_out, run.batch_size, device)

    def losses(step: int) -> Tensor:
        epoch, number = divmod(step, per_epoch)
        data = batches(epoch if per_epoch > 1 else 0)[number]
        mask = data.train_mask[:, run.split]
        logits, y = model(data)[mask], data.y[mask]
        if task.metric == "precision":
            return binary_cross_entropy_with_logits(logits, y)
        return cross_entropy(logits, y, class_weights(y, task.classes) if task.metric == "balanced" else None)

    def measure() -> list[Row]:
        logits, edges, pairs, alike = [], 0, 0, 0
        for data in held_out:
            recorded: Any = analysis.record_attention(model) if run.arm not in UNSAMPLED else nullcontext([])
            with recorded as calls:
                logits.append(model(data))
            graphs = [model.graph] if isinstance(model, Gcn) and model.edges else [call.graph for call in calls]
            for graph in graphs:
                edges += graph.num_edges
                pairs += graph.heads * int(data.ptr.diff().square().sum())
                if not task.of_molecules:
                    key, query = data.y[graph.edge_index]
                    alike += int((key == query).sum())
        scores, y = torch.cat(logits), torch.cat([data.y for data in held_out])
        row = dict(run.identity)
        for part in ("val", "test"):
            mask = torch.cat([data[f"{part}_mask"][:, run.split] for data in held_out])
            row[part] = score(task.metric, scores[mask].cpu(), y[mask].cpu())
        return [row | {"density": edges / max(1, pairs), "alike": alike / max(1, edges)}]

    path = folder / file_name(run.graph, run.arm, run.learning_rate, run.split)
    return fit(model, sparsifier, run, path, losses, measure)


def edges_of(data: Any) -> Adj:
    """What messages pass along: compressed rows, if the graph has them."""
    return data.adj_t if "adj_t" in data else data.edge_index


def _batches(graphs: list[Any], size: int, device: torch.device) -> list[Any]:
    return [Batch.from_data_list(graphs[begin : begin + size]).to(device) for begin in range(0, len(graphs), size)]


def fit_fingerprints(run: Run, task: Task) -> list[Row]:
    """A row for randomized trees on the counts of the neighborhoods of atoms, which know nothing of far ones."""
    began = time.perf_counter()
    held_out = [[graph for graph in task.held_out if graph[f"{part}_mask"][0, run.split]] for part in ("val", "test")]
    parts = (task.train, *held_out)
    labels = [torch.cat([graph.y for graph in graphs]) for graphs in parts]
    counts = [fingerprints([graph.smiles for graph in graphs]) for graphs in parts]
    trees = ExtraTreesClassifier(200, random_state=run.split, n_jobs=torch.get_num_threads()).fit(
        counts[0], labels[0].numpy()
    )
    row: Row = dict(run.identity) | {"density": 0.0, "alike": 0.0, "step": 1, "loss": 0.0}
    for part, x, y in zip(("val", "test"), counts[1:], labels[1:], strict=True):
        predicted = trees.predict_proba(x)  # of one label, or a list for many: [n, 2] each
        scores = np.stack([p[:, 1] for p in predicted], 1) if task.metric == "precision" else np.log(predicted)
        row[part] = score(task.metric, torch.from_numpy(scores), y)
    return [row | {"seconds": time.perf_counter() - began}]


def train_all(runs: list[Run], tasks: dict[str, Task], folder: Path, device: torch.device) -> None:
    """Trains the runs whose rows are missing in a folder."""
    settings = settings_of_all(runs, "graph", runs[0].identity)
    train_missing(folder, "graphs", settings, runs, lambda run: train(run, tasks[run.graph], folder, device))
