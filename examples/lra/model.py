"""The models of a task, one for labels and one for hidden tokens: their attention by settings, logits, and the price of edges."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from examples.common.attention import layer_options
from examples.common.command import require
from examples.lra.baselines import BASELINES
from examples.lra.data.batches import Batch
from examples.lra.data.tasks import Task
from examples.lra.settings import Settings
from sbm_pyg import MaskedLM, PairClassifier, Rotary, SequenceClassifier, SequenceEncoder, mask_tokens

MASK = 0
"""Number of a hidden token: that of padding, which no sequence has."""
GRID_BASE = 100.0
"""Base of the angles of rotary positions on a grid, whose rows are few."""


def grid_positions(side: int, channels: int) -> Tensor:
    """Position embeddings of a square image [side * side, channels], pixels row by row: sines and cosines of row and of column.

    Wavelengths go geometrically from 4 to almost 80 pixels. The mean square is 1, as that of random embeddings. Vaswani et al. 2017,
    section 3.5, for both axes as in He et al., "Masked Autoencoders Are Scalable Vision Learners", CVPR 2022; here they are trained.
    """
    words = "'channels' to be a multiple of 4 for positions on a grid"
    require(channels % 4 == 0, words, channels, "Take random positions.")
    waves = 20.0 ** (-torch.arange(channels // 4) / (channels // 4))
    angles = torch.arange(side)[:, None] * waves * (math.pi / 2)
    axis = math.sqrt(2) * torch.cat([angles.sin(), angles.cos()], dim=1)  # [side, channels / 2]
    rows, columns = axis[:, None].expand(-1, side, -1), axis[None].expand(side, -1, -1)
    return torch.cat([rows, columns], dim=2).flatten(0, 1)


def smooth_values(count: int, channels: int) -> Tensor:
    """Embeddings of values on a scale [count, channels], like values alike: sines and cosines of at most one period, of mean square 1."""
    require(channels % 2 == 0, "'channels' to be even for smooth values", channels, "Take random values.")
    rates = torch.arange(1, channels // 2 + 1) / (channels // 2)
    angles = 2 * math.pi * torch.linspace(0, 1, count)[:, None] * rates
    return math.sqrt(2) * torch.cat([angles.sin(), angles.cos()], dim=1)


OF_INDEXERS = ("estimator", "target_density")
OPTIONS = {
    "sbm": ("num_clusters", "estimator", "probes", "exploration", "block_size", "row_group", "cluster_init", "parameterization",
            "temperature", "initial_density", "tied", "degree_corrected", "target_density"),
    "indexer": OF_INDEXERS, "key_selection": OF_INDEXERS, "dcmm": ("num_clusters",),
}  # fmt: skip
"""Settings that are options of an attention."""


def attention_of(settings: Settings) -> tuple[Any, dict[str, Any] | None]:
    """The attention of an encoder, and its options."""
    kind = settings.attention
    if kind in BASELINES:
        return partial(BASELINES[kind], settings), None
    values: dict[str, Any] = {name: getattr(settings, name) for name in OPTIONS.get(kind, ())}
    if kind == "sbm":
        values["window"] = None
        if settings.target_density and not settings.exploration:  # the square of the target density
            del values["exploration"]
    elif kind in ("indexer", "key_selection"):
        by_rank = settings.estimator in ("imitate", "none")  # the others are for edges that are drawn
        values["select"] = "top_k" if by_rank else "bernoulli"
    elif kind == "top_k" and not settings.target_density:
        values["k"] = 16
    elif kind == "window":
        values["size"] = settings.window
    return kind, {"dropout": settings.attention_dropout, **layer_options(values)}


def make_encoder(task: Task, settings: Settings) -> SequenceEncoder:
    """Returns the encoder of a task with its initial weights."""
    attention, options = attention_of(settings)
    if settings.positions == "rotary-grid":
        options = {**(options or {}), "rotary": Rotary(GRID_BASE, grid_width=task.side)}
    names = ("channels", "heads", "head_channels", "ffn_channels", "max_length", "dropout")
    sizes = {name: getattr(settings, name) for name in names} | {"num_layers": settings.layers}
    encoding = "rotary" if settings.positions.startswith("rotary") else "learned"
    encoder = SequenceEncoder(
        task.num_tokens, **sizes, attention=attention, attention_options=options, position_encoding=encoding
    )
    with torch.no_grad():
        if settings.values == "smooth":
            encoder.token.weight[1:] = smooth_values(task.num_tokens - 1, settings.channels)
        if settings.positions == "grid":
            grid = grid_positions(task.side, settings.channels)[: settings.max_length]
            encoder.position.weight[: len(grid)] = grid
    return encoder


class TaskModel(nn.Module):
    """What the trainer trains: ``model``, of ``arity`` sequences per example, which :meth:`classify` calls."""

    arity = 1
    model: SequenceClassifier | PairClassifier | MaskedLM

    def __init__(self, task: Task, settings: Settings) -> None:
        super().__init__()
        self.task, self.settings = task, settings

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def classify(self, batch: Batch, seed: int) -> tuple[Tensor, Any]:
        """Returns the logits of each label [*, classes] and the trace, graphs being sampled from one random stream per sequence."""
        places = {"positions": batch.positions, "sequence_ids": batch.examples}
        return self.model(batch.tokens, batch.ptr, **places, **self.of_batch(batch), seed=seed, return_trace=True)

    def of_batch(self, batch: Batch) -> dict[str, Any]:
        """Further arguments of the model."""
        return {}

    def average(self, batch: Batch, graphs: int) -> tuple[Tensor, Any]:
        """Logarithms of probabilities [*, classes], averaged over so many sampled graphs, and the trace of the first graphs."""
        logits, trace = self.classify(batch, seed=self.settings.seed)
        if graphs == 1:
            return logits, trace
        more = [self.classify(batch, seed=self.settings.seed + graph)[0] for graph in range(1, graphs)]
        return torch.stack([logits, *more]).float().log_softmax(-1).logsumexp(0) - math.log(graphs), trace

    def price(self, trace: Any) -> Tensor | float:
        """What the loss adds for the expected density, if edges have a price."""
        weight = self.settings.density_weight
        return weight * trace.density_loss(self.settings.density_floor) if weight else 0.0


class Classifier(TaskModel):
    """A classifier of sequences, or of pairs of them, for a task."""

    def __init__(self, task: Task, settings: Settings) -> None:
        super().__init__(task, settings)
        self.arity = task.arity
        pooled = settings.max_length if settings.compat == "nystromformer" else None
        kind = SequenceClassifier if task.arity == 1 else PairClassifier
        self.model = kind(make_encoder(task, settings), task.num_classes, pool_length=pooled)


class Reconstructor(TaskModel):
    """A model that predicts the hidden tokens of sequences, for a task; batches come from :func:`hide`."""

    def __init__(self, task: Task, settings: Settings) -> None:
        super().__init__(task, settings)
        self.model = MaskedLM(make_encoder(task, settings))

    def of_batch(self, batch: Batch) -> dict[str, Any]:
        return {"target_mask": batch.tokens == MASK}


def hide(batch: Batch, ratio: float, seed: int) -> Batch:
    """Hides tokens of a batch: each with probability ``ratio``, independently, and at least one of each sequence.

    With a seed, an example has the same hidden tokens in any batch. The sequences of pairs follow one another, as examples 2 n and 2 n + 1.

    Returns:
        The batch with :data:`MASK` for hidden tokens; its labels are the M tokens that were hidden, ``[M]``.
    """
    tokens, ptr, examples, positions = batch.tokens, batch.ptr, batch.examples, batch.positions
    if isinstance(tokens, tuple):
        tokens, ptr = torch.cat(tokens), torch.cat([ptr[0], ptr[0][-1] + ptr[1][1:]])
        examples = torch.cat([2 * examples, 2 * examples + 1])
        positions = None if positions is None else torch.cat(positions)
    law: dict[str, Any] = {"probability": ratio, "masked": 1.0, "random": 0.0}
    hidden, is_hidden = mask_tokens(tokens, MASK, 1, **law, ptr=ptr, sequence_ids=examples, seed=seed)
    return Batch(hidden, ptr, tokens[is_hidden], examples, positions)
