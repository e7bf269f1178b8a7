"""What the entmax heads of a model use, and how well a graph foretells it.

In: a model that is trained, or its queries and keys. Out: the edges that have a weight, and numbers that compare. Not
here: graphs that foretell (``predictors``), and projections for them (``sparsefinder``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import AttentionConv
from ..estimators import edge_logits
from ..graph import AttentionGraph, check_graph
from ..normalizers import normalize
from ..ops import checks, segment_entmax
from ..ops.values import require_values
from ..ragged import Tokens
from ..sources.pairs import Part, detached, graph_of_rows, product, streamed
from .projection import Sample

__all__ = ["Match", "compare", "gold_graph", "group_entropy", "record"]


@torch.no_grad()
def gold_graph(tokens: Tokens, *, alpha: float = 1.5, scale: float | None = None) -> AttentionGraph:
    r"""The edges that alpha-entmax attention has: pairs whose weight is not zero. Rows a part at a time.

    Args:
        tokens: Queries and keys.
        alpha: Of the entmax, greater than 1, at most 4.
        scale: Factor of the scores; :math:`C^{-1/2}` if None.

    Raises:
        TypeError, ValueError: An argument has the wrong type, shape or range.

    Example:
        >>> x = torch.tensor([[[3.0], [0.0], [-3.0]]])
        >>> gold_graph(Tokens(x)).to_dense()[0].int().tolist()
        [[1, 0, 0], [1, 1, 1], [0, 0, 1]]
    """
    tokens = detached(tokens)
    checks.number("alpha", alpha, "(1, 4]", "Softmax has all edges.")
    if scale is not None:
        checks.number("scale", scale, "(-inf, inf)", "It is a factor of the scores.")
    factor = tokens.query.size(2) ** -0.5 if scale is None else scale

    def used(scores: Tensor, possible: Tensor, part: Part) -> Tensor:
        width = scores.size(-1)
        ends = width * torch.arange(scores.numel() // width + 1, device=scores.device)
        return segment_entmax(scores.flatten(), ptr=ends, alpha=alpha).view_as(scores) > 0

    def score(query: Tensor, key: Tensor) -> Tensor:  # before others are minus infinity, whatever the sign is
        return factor * product(query, key)

    return graph_of_rows(tokens, *streamed(tokens, used, score))


@contextmanager
def record(model: nn.Module, layers: Collection[str] | None = None) -> Iterator[dict[str, list[Sample]]]:
    """Keeps what the entmax layers of a model attend to while it runs: samples for a projection.

    Every call of a layer adds its queries ``[H, N, C]``, its keys ``[H, M, C]``, and the edges of the graph it attended
    over whose weight is not zero, with the offsets of the sequences and ``is_causal``. So the graph is the gold one of
    all pairs where the layer attends over all of them, as with ``PatternSource(patterns.full)``; among others see
    :func:`gold_graph`. Biases of the scores and edges that a call leaves out count as in the layer. Nothing carries a
    gradient. Cost O(E C) for E edges that the layer attends over; only those with a weight are kept.

    A layer is listened to through its ``score_bias``, which it asks for every graph, so it is found wherever it stands:
    in :class:`~sbm_pyg.SequenceEncoder`, in :class:`~sbm_pyg.SBMMultiheadAttention`, or in a model of yours. On leaving
    the context, the layers are as they were.

    Args:
        model: Has :class:`~sbm_pyg.AttentionConv` layers, and is in evaluation.
        layers: Names of those to listen to, as ``model.named_modules()`` has them. None: all.

    Returns:
        A context that gives a dictionary from each name to its samples, one for each call, in their order. Each is what
        :func:`~sbm_pyg.sparsefinder.fit_projection` takes.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: A layer is in training, or its normaliser gives all edges a weight; or there is no such layer.

    Example:
        >>> from sbm_pyg import patterns
        >>> conv = AttentionConv(8, 4, 2, patterns.PatternSource(patterns.full), normalizer="entmax15")
        >>> with record(conv.eval()) as samples:
        ...     out = conv(9 * torch.randn(10, 8), ptr=torch.tensor([0, 4, 10]))
        >>> query, key, graph = samples[""][0]
        >>> query.shape, graph.num_edges < 2 * (4 * 4 + 6 * 6)
        (torch.Size([2, 10, 4]), True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected 'model' to be a module (got {type(model).__name__}). It has attention layers.")
    known = {name: module for name, module in model.named_modules() if isinstance(module, AttentionConv)}
    if not known:
        raise ValueError(
            f"Expected 'model' to have AttentionConv layers (got {type(model).__name__}, which has none). Full "
            "attention is one over `PatternSource(patterns.full)`."
        )
    if isinstance(layers, str):
        raise TypeError(f"Expected 'layers' to be a collection of names (got {layers!r}). Write `[{layers!r}]`.")
    unknown = [name for name in layers or () if name not in known]
    if unknown:
        raise ValueError(f"Expected 'layers' among {[*known]} (got {unknown}). They are names of AttentionConv layers.")
    chosen = known if layers is None else {name: known[name] for name in layers}
    for name, conv in chosen.items():
        if conv.normalizer == "softmax":
            raise ValueError(
                f"Expected 'model' with sparse normalisers (got softmax in layer {name!r}). It gives all edges a "
                "weight; build the layer with normalizer='entmax15', or leave it out of 'layers'."
            )
        if conv.training:
            raise ValueError(
                f"Expected 'model' to be in evaluation (got layer {name!r} in training). Call `model.eval()` first."
            )
    found: dict[str, list[Sample]] = {name: [] for name in chosen}
    before = {name: conv.score_bias for name, conv in chosen.items()}
    try:
        for name, conv in chosen.items():
            listener = _Listener(conv, found[name])
            # a module stands where a module was, so that parameters keep their order
            conv.score_bias = listener if isinstance(conv.score_bias, nn.Module) else listener.forward
        yield found
    finally:
        for name, conv in chosen.items():
            conv.score_bias = before[name]


class _Listener(nn.Module):
    """Stands in for the score bias of a layer, and notes what the layer attends to."""

    def __init__(self, conv: AttentionConv, found: list[Sample]) -> None:
        super().__init__()
        self.inner, self.found = conv.score_bias, found
        self.scale, self.normalizer = conv.scale, conv.normalizer

    def forward(self, query: Tensor, key: Tensor, graph: AttentionGraph) -> Any:
        """What the layer would add, after a note."""
        bias = None if self.inner is None else self.inner(query, key, graph)
        with torch.no_grad():
            scores = edge_logits(query, key, graph, bias, self.scale)
            weight = normalize(self.normalizer, scores[:, None], ptr=graph.rowptr)[:, 0]
            self.found.append((query.detach(), key.detach(), graph.select(weight > 0)))
        return bias


@dataclass(frozen=True)
class Match:
    """How well a graph foretells another, for each head ``[H]``."""

    recall: Tensor
    """Share of the gold edges that are in the graph; 1 where there are none."""
    precision: Tensor
    """Share of the graph's edges that are gold; 1 where there are none."""
    sparsity: Tensor
    """Share of the pairs that are not in the graph."""
    exact: Tensor
    """Share of the queries all of whose gold edges are in the graph, so that their output is the same."""


def compare(gold: AttentionGraph, graph: AttentionGraph) -> Match:
    """Compare a graph with the one that attention uses. Cost O(E log E).

    Args:
        gold: What attention uses, as :func:`gold_graph` finds it.
        graph: What was foretold, over the same tokens and heads.

    Raises:
        TypeError, ValueError: An argument is no graph, or they are over other tokens.

    Example:
        >>> from sbm_pyg import patterns
        >>> gold = patterns.self_loops(4)
        >>> match = compare(gold, patterns.window(4, 1))
        >>> [round(float(x), 3) for x in (match.recall, match.precision, match.sparsity, match.exact)]
        [1.0, 0.4, 0.375, 1.0]
    """
    check_graph(gold, "gold")
    check_graph(graph)
    same = (gold.heads, gold.num_queries, gold.num_keys) == (graph.heads, graph.num_queries, graph.num_keys)
    if not (same and gold.same_offsets(graph.query_ptr, graph.key_ptr)):
        raise ValueError(f"Expected 'graph' over the tokens and heads of 'gold' (got {graph} for {gold}).")
    require_values(gold.col, "gold")
    checks.same_device("gold", gold.col, graph=graph.col)
    hit, wide = graph.contains(gold.edge_index, gold.edge_head), checks.widest(gold.device)
    edges, found, hits = (
        torch.bincount(head, minlength=gold.heads).to(wide)
        for head in (gold.edge_head, graph.edge_head, gold.edge_head[hit])
    )
    missed = torch.zeros_like(gold.degree.flatten()).index_add_(0, gold.edge_row, (~hit).long()).view(gold.heads, -1)
    pairs = float(graph.pairs_per_sequence.sum())
    exact = (missed == 0).to(wide).mean(1)
    recall, precision = (torch.where(all_ > 0, hits / all_.clamp(min=1), 1.0) for all_ in (edges, found))
    return Match(recall, precision, 1 - found / pairs, exact)


@torch.no_grad()
def group_entropy(group: Tensor, num_groups: int, graph: AttentionGraph | None = None) -> Tensor:
    r"""How evenly tokens, or the keys of a query, are spread over buckets or clusters: 0 in one group, 1 in all alike.

    With shares :math:`s_g` of K groups it is :math:`-\sum_g s_g \log s_g / \log K`, and 0 where K is 1. Without a graph
    the shares are those of all tokens: near 1, groups are balanced, so that the graph of :func:`clustering
    <sbm_pyg.sparsefinder.predictors.clustering>` has few edges. With a graph they are those of the keys of each query,
    and the mean over queries with edges is taken: near 0, what a query uses is in one group, so that one is enough to
    find it. Cost O(E log E), or O(H M).

    Args:
        group: The group of each key, ``[H, M]`` int64 in ``0 .. K-1``; or ``[H, M, m]``, each column by itself, as
            :func:`~sbm_pyg.sparsefinder.predictors.buckets` and :func:`~sbm_pyg.sparsefinder.predictors.clusters` have
            it.
        num_groups: Groups K, at least 1.
        graph: Edges whose keys are looked at, such as those of :func:`gold_graph`, in H heads.

    Returns:
        ``[H]``, or ``[H, m]``, float64 in [0, 1]; 0 for a head without edges.

    Raises:
        TypeError, ValueError: An argument has the wrong type, shape or range, or the graph is over other keys.

    Example:
        >>> from sbm_pyg import patterns
        >>> group = torch.tensor([[0, 0, 1, 1]])
        >>> round(float(group_entropy(group, 2)), 3), float(group_entropy(group, 2, patterns.self_loops(4)))
        (1.0, 0.0)
    """
    checks.tensors(group=group)
    if group.dtype != torch.int64 or group.dim() not in (2, 3) or 0 in group.shape:
        raise ValueError(
            f"Expected 'group' to be [H, M] or [H, M, m] int64 (got {list(group.shape)} {group.dtype}). It numbers the "
            "group of each key."
        )
    count = checks.integer("num_groups", num_groups, 1, "It is the number of groups.")
    low, high = (int(bound) for bound in torch.aminmax(group))
    if low < 0 or high >= count:
        raise ValueError(f"Expected 'group' in 0..{count - 1} (got {low} to {high}). Raise 'num_groups'.")
    if group.dim() == 3:
        return torch.stack([group_entropy(column, count, graph) for column in group.unbind(2)], 1)
    heads, keys = group.shape
    if graph is None:
        row, chosen = torch.arange(heads, device=group.device).repeat_interleave(keys), group.flatten()
        rows = heads
    else:
        check_graph(graph)
        if (graph.heads, graph.num_keys) != (heads, keys):
            raise ValueError(f"Expected 'graph' of {heads} heads and {keys} keys, as 'group' (got {graph}).")
        checks.same_device("group", group, graph=graph.rowptr)
        row, chosen, rows = graph.edge_row, group[graph.edge_head, graph.col.long()], heads * graph.num_queries
    if rows * count >= 2**63:
        raise ValueError(f"Expected 'num_groups' so that int64 numbers all rows and groups (got {count}). Take fewer.")
    cell, times = (row * count + chosen).unique(return_counts=True)
    of = cell // count
    total = torch.bincount(row, minlength=rows)
    share = times.to(checks.widest(times.device)) / total[of]
    each = share.new_zeros(rows).index_add_(0, of, -share * share.log()).view(heads, -1)
    has = (total > 0).view(heads, -1)
    return each.sum(1) / (has.sum(1).clamp(min=1) * (math.log(count) if count > 1 else 1.0))
