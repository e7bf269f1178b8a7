"""Trains one graph transformer for each graph, arm, learning rate and split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Batch
from torch_geometric.nn import GCNConv, GINConv, GPSConv, ResGatedGraphConv, SAGEConv
from torch_geometric.nn.models import SGFormer
from torch_geometric.typing import Adj

from examples.common import attention
from examples.common.command import option
from examples.common.fit import file_name, fit, train_missing
from examples.common.runs import RunError, settings_of_all
from examples.common.tables import Row
from examples.graphs.data import Task
from sbm_pyg import DensitySource, SparseGPSConv, Sparsifier, analysis

CONVS: dict[str, Callable[[int], nn.Module]] = {
    "sage": lambda channels: SAGEConv(channels, channels),
    "gcn": lambda channels: GCNConv(channels, channels),
    "gin": lambda channels: GINConv(
        nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels))
    ),
    "gated": lambda channels: ResGatedGraphConv(channels, channels),
}
"""Message passing along the edges of the data, by name."""
OF_PYG = {"full": "multihead", "performer": "performer"}
"""Attention of PyG, by arm."""
UNSAMPLED = ("none", *OF_PYG, "sgformer")  # arms without graphs of attention


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
    conv: str = option("sage", "layers of message passing", choices=tuple(CONVS))
    walk_length: int = option(0, "features of random walks to add to nodes", least=0)
    train_graphs: int = option(1000, "to generate", above=0)
    test_graphs: int = option(200, "to generate", above=0)
    batch_size: int = option(32, "graphs of a step, of generated ones", above=0)
    weight_decay: float = 0.0
    evaluations: int = 30

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
    """A model from features, edges and the graph of each node to logits."""
    features = task.train[0].num_features
    if run.arm != "sgformer":
        return Model(run, features, task)
    return SGFormer(
        features, run.channels, task.classes, trans_num_layers=1, trans_num_heads=run.heads, trans_dropout=run.dropout,
        gnn_num_layers=run.layers, gnn_dropout=run.dropout,
    )  # fmt: skip


class Model(nn.Module):
    """Layers of message passing along the edges of the data, and of attention next to it."""

    def __init__(self, run: Run, features: int, task: Task) -> None:
        super().__init__()
        nodes = fmean(len(graph.y) for graph in task.train)
        self.embed, self.out = nn.Linear(features, run.channels), nn.Linear(run.channels, task.classes)
        self.layers = nn.ModuleList(self._layer(run, nodes) for _ in range(run.layers))

    @staticmethod
    def _layer(run: Run, nodes: float) -> nn.Module:
        conv = CONVS[run.conv](run.channels)
        if run.arm in OF_PYG:
            return GPSConv(run.channels, conv, run.heads, run.dropout, attn_type=OF_PYG[run.arm])
        if run.arm == "none":
            return WithoutAttention(run.channels, conv, 1, run.dropout)
        return SparseGPSConv(run.channels, conv, make_node_attention(run, nodes), run.dropout)

    def forward(self, x: Tensor, edge_index: Adj, batch: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, edge_index, batch)
        return self.out(x)


class WithoutAttention(GPSConv):
    """The layer of PyG without its attention."""

    def forward(self, x: Tensor, edge_index: Adj, batch: Tensor) -> Tensor:
        h = self.norm1(x + nn.functional.dropout(self.conv(x, edge_index), self.dropout, self.training))
        return self.norm3(h + self.mlp(h))


def score(metric: str, logits: Tensor, y: Tensor) -> float:
    """Area under the ROC curve, accuracy, or the mean of the accuracies of classes ("balanced"), in percent."""
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
    torch.manual_seed(run.split)
    model = make_model(run, task).to(device)
    sparse = any(isinstance(module, DensitySource) for module in model.modules())
    sparsifier = Sparsifier(model, run.density, total_steps=run.steps, dense_part=run.dense_part) if sparse else None
    per_epoch = -(-len(task.train) // run.batch_size)

    @lru_cache(maxsize=1)
    def batches(epoch: int) -> list[Any]:
        order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(2**32 * run.split + epoch))
        return _batches([task.train[n] for n in order.tolist()], run.batch_size, device)

    held_out = _batches(task.held_out, run.batch_size, device)

    def forward(data: Any) -> Tensor:
        return model(data.x, edges_of(data), data.batch)

    def losses(step: int) -> Tensor:
        epoch, number = divmod(step, per_epoch)
        data = batches(epoch if per_epoch > 1 else 0)[number]
        mask = data.train_mask[:, run.split]
        logits, y = forward(data)[mask], data.y[mask]
        return cross_entropy(logits, y, class_weights(y, task.classes) if task.metric == "balanced" else None)

    def measure() -> list[Row]:
        logits, densities, alike = [], [], []
        for data in held_out:
            recorded: Any = analysis.record_attention(model) if run.arm not in UNSAMPLED else nullcontext([])
            with recorded as calls:
                logits.append(forward(data))
            for call in calls:
                key, query = data.y[call.graph.edge_index]
                alike.append(float((key == query).double().mean()))
                densities.append(float(call.graph.density.mean()))
        scores, y = torch.cat(logits), torch.cat([data.y for data in held_out])
        row = dict(run.identity)
        for part in ("val", "test"):
            mask = torch.cat([data[f"{part}_mask"][:, run.split] for data in held_out])
            row[part] = score(task.metric, scores[mask].cpu(), y[mask].cpu())
        return [row | {"density": fmean(densities or [0.0]), "alike": fmean(alike or [0.0])}]

    path = folder / file_name(run.graph, run.arm, run.learning_rate, run.split)
    return fit(model, sparsifier, run, path, losses, measure)


def edges_of(data: Any) -> Adj:
    """What messages pass along: compressed rows, if the graph has them."""
    return data.adj_t if "adj_t" in data else data.edge_index


def _batches(graphs: list[Any], size: int, device: torch.device) -> list[Any]:
    return [Batch.from_data_list(graphs[begin : begin + size]).to(device) for begin in range(0, len(graphs), size)]


def train_all(runs: list[Run], tasks: dict[str, Task], folder: Path, device: torch.device) -> None:
    """Trains the runs whose rows are missing in a folder."""
    settings = settings_of_all(runs, "graph", runs[0].identity)
    train_missing(folder, "graphs", settings, runs, lambda run: train(run, tasks[run.graph], folder, device))
