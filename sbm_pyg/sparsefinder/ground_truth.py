"""Ground-truth graphs of alpha-entmax heads, and recall and precision of predicted graphs.

In: a trained model, or its queries and keys. Out: the edges with a non-zero weight, and measures of predicted graphs.
Not here: rules that predict graphs (``predictors``), and their projections (``projection``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..graphs.graph import AttentionGraph, check_graph
from ..graphs.ragged import Tokens
from ..layers.attention import AttentionConv
from ..layers.normalizers import normalize
from ..ops import checks, segment_entmax
from ..ops.tiles import PairTile
from ..ops.values import require_values
from ..sources.pairs import detached, dot_product, graph_of_rows, select_pairs
from .projection import Sample

__all__ = ["Match", "compare", "ground_truth_graph", "group_entropy", "record"]


@torch.no_grad()
def ground_truth_graph(tokens: Tokens, *, alpha: float = 1.5, scale: float | None = None) -> AttentionGraph:
    r"""The edges of alpha-entmax attention: the pairs whose weight is not zero. Computed tile by tile.

    Args:
        tokens: Queries and keys.
        alpha: The alpha of entmax, greater than 1, at most 4.
        scale: Factor of the scores. None: :math:`C^{-1/2}`.

    Raises:
        TypeError, ValueError: An argument has the wrong type, shape or range.

    Example:
        >>> x = torch.tensor([[[3.0], [0.0], [-3.0]]])
        >>> ground_truth_graph(Tokens(x)).to_dense()[0].int().tolist()
        [[1, 0, 0], [1, 1, 1], [0, 0, 1]]
    """
    tokens = detached(tokens)
    checks.number("alpha", alpha, "(1, 4]", "Softmax gives all edges a weight.")
    if scale is not None:
        checks.number("scale", scale, "(-inf, inf)", "It is a factor of the scores.")
    factor = tokens.query.size(2) ** -0.5 if scale is None else scale

    def used(scores: Tensor, possible: Tensor, tile: PairTile) -> Tensor:
        width = scores.size(-1)
        ends = width * torch.arange(scores.numel() // width + 1, device=scores.device)
        return segment_entmax(scores.flatten(), ptr=ends, alpha=alpha).view_as(scores) > 0

    def score(query: Tensor, key: Tensor) -> Tensor:  # scaled before masked scores are minus infinity
        return factor * dot_product(query, key)

    return graph_of_rows(tokens, *select_pairs(tokens, used, score))


@contextmanager
def record(model: nn.Module, layers: Collection[str] | None = None) -> Iterator[dict[str, list[Sample]]]:
    """Record the queries, keys and ground-truth graphs of a running model: samples to fit a projection to.

    Every call of a layer adds its queries ``[H, N, C]``, its keys ``[H, M, C]``, and the edges of non-zero weight of
    the graph that it attended over, with the offsets of the sequences and ``is_causal``. If the layer attends over all
    pairs, as with ``PatternSource(patterns.full)``, the sample is the ground truth of all pairs; otherwise use
    :func:`ground_truth_graph`. Score biases, and edges that a call leaves out, are treated as in the layer. Samples
    carry no gradients. Cost O(E C) for the E edges that the layer attends over; only edges with a weight are kept.

    The context replaces the ``score_bias`` of each layer, so it works in any model: in
    :class:`~sbm_pyg.SequenceEncoder`, in :class:`~sbm_pyg.SBMMultiheadAttention`, or in your own. It restores the
    layers on exit.

    Args:
        model: A module with :class:`~sbm_pyg.AttentionConv` layers, in evaluation mode.
        layers: Names of the layers to record, as in ``model.named_modules()``. None: all.

    Returns:
        A context manager that returns a dictionary from each name to its samples, one for each call, in order. Each is
        a sample for :func:`~sbm_pyg.sparsefinder.fit_projection`.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: A layer is in training mode or has an ``edge_dim``, or its normalizer gives no weight of 0; or there
            is no such layer.

    Example:
        >>> from sbm_pyg import patterns
        >>> conv = AttentionConv(8, 4, 2, patterns.PatternSource(patterns.full), normalizer="entmax15")
        >>> with record(conv.eval()) as samples:
        ...     out = conv(9 * torch.randn(10, 8), ptr=torch.tensor([0, 4, 10]))
        >>> query, key, graph = samples[""][0]
        >>> query.shape, graph.num_edges < 2 * (4 * 4 + 6 * 6)
        (torch.Size([2, 10, 4]), True)
    """
    checks.kind("model", model, nn.Module, "a module", "It has attention layers.")
    convs = {name: module for name, module in model.named_modules() if isinstance(module, AttentionConv)}
    way_out = "Full attention is one over `PatternSource(patterns.full)`."
    checks.require(convs, "model", "to have AttentionConv layers", f"{type(model).__name__}, which has none", way_out)
    if isinstance(layers, str):
        raise TypeError(f"Expected 'layers' to be a collection of names (got {layers!r}). Write `[{layers!r}]`.")
    unknown = [name for name in layers or () if name not in convs]
    checks.require(not unknown, "layers", f"among {[*convs]}", unknown, "They are names of AttentionConv layers.")
    chosen = convs if layers is None else {name: convs[name] for name in layers}
    for name, conv in chosen.items():
        if conv.normalizer == "softmax":
            raise ValueError(
                f"Expected 'model' with sparse normalizers (got softmax in layer {name!r}). It gives all edges a "
                "weight; build the layer with normalizer='entmax15', or leave it out of 'layers'."
            )
        what = "without edge features"
        way_out = "Its weights do not follow from queries and keys; leave it out of 'layers'."
        checks.require(conv.lin_edge is None, "model", what, f"an 'edge_dim' in layer {name!r}", way_out)
        if conv.training:
            raise ValueError(f"Expected 'model' to be in evaluation (got layer {name!r} in training). Call `eval()`.")
    samples: dict[str, list[Sample]] = {name: [] for name in chosen}
    before = {name: conv.score_bias for name, conv in chosen.items()}
    try:
        for name, conv in chosen.items():
            listener = _Listener(conv, samples[name])
            # a module replaces a module, so that parameters keep their order
            conv.score_bias = listener if isinstance(conv.score_bias, nn.Module) else listener.forward
        yield samples
    finally:
        for name, conv in chosen.items():
            conv.score_bias = before[name]


class _Listener(nn.Module):
    """Replaces the score bias of a layer, and records the edges of non-zero weight."""

    def __init__(self, conv: AttentionConv, samples: list[Sample]) -> None:
        super().__init__()
        self.inner, self.samples = conv.score_bias, samples
        self.scale, self.normalizer = conv.scale, conv.normalizer

    def forward(self, query: Tensor, key: Tensor, graph: AttentionGraph) -> Any:
        """Record a sample, and return the original score bias."""
        bias = None if self.inner is None else self.inner(query, key, graph)
        with torch.no_grad():
            scores = graph._logits(query, key, bias, self.scale)
            weight = normalize(self.normalizer, scores[:, None], ptr=graph.rowptr)[:, 0]
            self.samples.append((query.detach(), key.detach(), graph.select(weight > 0)))
        return bias


@dataclass(frozen=True)
class Match:
    """Recall, precision and other measures of a predicted graph, ``[H]`` each."""

    recall: Tensor
    """Share of the ground-truth edges that are in the graph; 1 if the ground truth has no edges."""
    precision: Tensor
    """Share of the edges of the graph that are in the ground truth; 1 if the graph has no edges."""
    sparsity: Tensor
    """Share of the pairs that are not in the graph."""
    exact: Tensor
    """Share of the queries whose ground-truth edges are all in the graph, so that their output is exact."""


def compare(ground_truth: AttentionGraph, graph: AttentionGraph) -> Match:
    """Compare a predicted graph with the ground truth. Cost O(E log E).

    Args:
        ground_truth: The edges that attention uses, from :func:`ground_truth_graph`.
        graph: The predicted graph, over the same tokens and heads.

    Raises:
        TypeError, ValueError: An argument is not a graph, or the graphs are over different tokens.

    Example:
        >>> from sbm_pyg import patterns
        >>> ground_truth = patterns.self_loops(4)
        >>> match = compare(ground_truth, patterns.window(4, 1))
        >>> [round(float(x), 3) for x in (match.recall, match.precision, match.sparsity, match.exact)]
        [1.0, 0.4, 0.375, 1.0]
    """
    check_graph(ground_truth, "ground_truth")
    check_graph(graph)
    sizes = {(g.heads, g.num_queries, g.num_keys) for g in (graph, ground_truth)}
    if not (len(sizes) == 1 and ground_truth.same_offsets(graph.query_ptr, graph.key_ptr)):
        raise ValueError(
            f"Expected 'graph' over the tokens and heads of 'ground_truth' (got {graph} for {ground_truth})."
        )
    require_values(ground_truth.col, "ground_truth")
    checks.same_device("ground_truth", ground_truth.col, graph=graph.col)
    hit, wide = graph.contains(ground_truth.edge_index, ground_truth.edge_head), checks.widest(ground_truth.device)
    edges, predicted, hits = (
        torch.bincount(head, minlength=ground_truth.heads).to(wide)
        for head in (ground_truth.edge_head, graph.edge_head, ground_truth.edge_head[hit])
    )
    rows = ground_truth.heads * ground_truth.num_queries
    missed = torch.bincount(ground_truth.edge_row[~hit], minlength=rows).view(ground_truth.heads, -1)
    pairs = float(graph.pairs_per_sequence.sum())
    exact = (missed == 0).to(wide).mean(1)
    recall, precision = (torch.where(all_ > 0, hits / all_.clamp(min=1), 1.0) for all_ in (edges, predicted))
    return Match(recall, precision, 1 - predicted / pairs, exact)


@torch.no_grad()
def group_entropy(group: Tensor, num_groups: int, graph: AttentionGraph | None = None) -> Tensor:
    r"""Entropy of tokens, or of the keys of a query, over buckets or clusters: 0 for one group, 1 for equal groups.

    With shares :math:`s_g` of K groups the entropy is :math:`-\sum_g s_g \log s_g / \log K`, and 0 if K is 1. Without a
    graph the shares are computed over all tokens: near 1, groups are balanced, so that the graph of :func:`clustering
    <sbm_pyg.sparsefinder.predictors.clustering>` has few edges. With a graph the result is the mean over queries with
    edges of the entropy of their keys: near 0, the keys of a query are in one group, so that one group is enough to
    find them. Cost O(E log E), or O(H M).

    Args:
        group: The group of each key, ``[H, M]`` int64 in ``0 .. K-1``; or ``[H, M, m]``, with one result per
            column, as :func:`~sbm_pyg.sparsefinder.predictors.buckets` and
            :func:`~sbm_pyg.sparsefinder.predictors.clusters` return it.
        num_groups: Groups K, at least 1.
        graph: A graph with H heads, such as that of :func:`ground_truth_graph`. None: all tokens count.

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
    is_valid = group.dtype == torch.int64 and group.dim() in (2, 3) and (0 not in group.shape)
    what, way_out = "to be [H, M] or [H, M, m] int64", "It numbers the group of each key."
    checks.require(is_valid, "group", what, f"{list(group.shape)} {group.dtype}", way_out)
    count = checks.integer("num_groups", num_groups, 1, "It is the number of groups.")
    low, high = (int(bound) for bound in torch.aminmax(group))
    checks.require(low >= 0 and high < count, "group", f"in 0..{count - 1}", f"{low} to {high}", "Raise 'num_groups'.")
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
    entropy = share.new_zeros(rows).index_add_(0, of, -share * share.log()).view(heads, -1)
    has = (total > 0).view(heads, -1)
    return entropy.sum(1) / (has.sum(1).clamp(min=1) * (math.log(count) if count > 1 else 1.0))
