"""Trains one graph transformer for each graph, arm, learning rate and split."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.nn import GPSConv, SAGEConv

from examples.common.fit import file_name, fit, train_missing
from examples.common.hybrid import freeze
from examples.common.runs import settings_of_all
from examples.common.tables import Row
from examples.graphs.data import RANKED
from sbm_pyg import AttentionConv, DensitySource, SBMAttentionConv, SparseGPSConv, Sparsifier, analysis
from sbm_pyg.sources import indexer, patterns


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides the outcome of a run."""

    graph: str
    arm: str
    learning_rate: float
    split: int
    density: float
    steps: int
    channels: int
    layers: int
    heads: int
    dropout: float
    dense_part: float
    weight_decay: float = 0.0
    evaluations: int = 30

    @property
    def known(self) -> Row:
        """The cells that name the run in rows."""
        return {name: getattr(self, name) for name in ("graph", "arm", "learning_rate", "split")}


def make_attention(run: Run, nodes: int) -> AttentionConv:
    """Attention over all pairs, random ones, those of a source that learns, or of one that does not (``sbm:frozen``)."""
    shape = (run.channels, run.channels // run.heads, run.heads)
    name, _, frozen = run.arm.partition(":")
    if name == "full":
        return AttentionConv(*shape, patterns.PatternSource(patterns.full))
    if name == "random":
        options = {"num_keys_per_query": max(1, round(run.density * nodes)), "heads": run.heads}
        return AttentionConv(*shape, patterns.PatternSource(patterns.random, **options))
    if name == "sbm":
        conv: AttentionConv = SBMAttentionConv(*shape)
    else:
        scorer = indexer.Indexer(shape[1], run.heads)
        conv = AttentionConv(*shape, indexer.IndexerSource(scorer))
    return freeze(conv) if frozen else conv


class Model(nn.Module):
    """Layers of message passing along the edges of the data, and of attention next to it."""

    def __init__(self, run: Run, data: Data, classes: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(data.num_features, run.channels), nn.Linear(run.channels, classes)
        self.layers = nn.ModuleList(self._layer(run, data.num_nodes) for _ in range(run.layers))

    @staticmethod
    def _layer(run: Run, nodes: int) -> nn.Module:
        conv = SAGEConv(run.channels, run.channels)
        if run.arm == "performer":
            return GPSConv(run.channels, conv, run.heads, run.dropout, attn_type="performer")
        if run.arm == "none":
            return WithoutAttention(run.channels, conv, 1, run.dropout)
        return SparseGPSConv(run.channels, conv, make_attention(run, nodes), run.dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return self.out(x)


class WithoutAttention(GPSConv):
    """The layer of PyG without its attention."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.norm1(x + nn.functional.dropout(self.conv(x, edge_index), self.dropout, self.training))
        return self.norm3(h + self.mlp(h))


def score(name: str, logits: Tensor, y: Tensor) -> float:
    """Area under the ROC curve, or accuracy, in percent."""
    if name in RANKED:
        return 100 * float(roc_auc_score(y.numpy(), logits.softmax(1)[:, 1].numpy()))
    return 100 * float((logits.argmax(1) == y).double().mean())


def train(run: Run, data: Data, folder: Path) -> list[Row]:
    """Trains one model, or goes on from its checkpoint; returns a row for each evaluation, at the density of the run."""
    torch.manual_seed(run.split)
    train_mask, val_mask, test_mask = (data[f"{part}_mask"][:, run.split] for part in ("train", "val", "test"))
    model = Model(run, data, int(data.y.max()) + 1)
    sparse = any(isinstance(module, DensitySource) for module in model.modules())
    sparsifier = Sparsifier(model, run.density, total_steps=run.steps, dense_part=run.dense_part) if sparse else None

    def losses(step: int) -> Tensor:
        return cross_entropy(model(data.x, data.edge_index)[train_mask], data.y[train_mask])

    def measure() -> list[Row]:
        attends = run.arm not in ("none", "full", "performer")
        recorded: Any = analysis.record_attention(model) if attends else nullcontext([])
        with recorded as calls:
            logits = model(data.x, data.edge_index)
        graphs = [call.graph for call in calls]
        pairs = (data.y[graph.edge_index] for graph in graphs)
        alike = [float((key == query).double().mean()) for key, query in pairs]
        found = {"val": score(run.graph, logits[val_mask], data.y[val_mask])}
        found["test"] = score(run.graph, logits[test_mask], data.y[test_mask])
        density = sum(float(graph.density.mean()) for graph in graphs) / max(len(graphs), 1)
        return [run.known | found | {"density": density, "alike": sum(alike) / max(len(alike), 1)}]

    path = folder / file_name(run.graph, run.arm, run.learning_rate, run.split)
    return fit(model, sparsifier, run, path, losses, measure)


def train_all(runs: list[Run], graphs: dict[str, Data], folder: Path) -> None:
    """Trains the runs whose rows are missing in a folder."""
    settings = settings_of_all(runs, "graph", runs[0].known)
    train_missing(folder, "graphs", settings, runs, lambda run: train(run, graphs[run.graph], folder))
