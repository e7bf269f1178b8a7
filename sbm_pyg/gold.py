"""What the entmax heads of a model use, and how well a graph foretells it.

In: queries and keys of a model that is trained, and graphs. Out: the edges with a weight, and numbers that compare. Not
here: graphs that foretell (``predictors``), and projections for them (``sparsefinder``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .graph import AttentionGraph, check_graph
from .ops import checks, segment_entmax
from .pairs import Ptr, Sides, streamed

__all__ = ["Match", "compare", "gold_graph"]


@torch.no_grad()
def gold_graph(
    query: Tensor,
    key: Tensor,
    *,
    alpha: float = 1.5,
    scale: float | None = None,
    ptr: Ptr = None,
    is_causal: bool = False,
) -> AttentionGraph:
    r"""The edges that alpha-entmax attention has: pairs whose weight is not zero. Rows a part at a time.

    Args:
        query: Queries, ``[H, N, C]``.
        key: Keys, ``[H, M, C]``.
        alpha: Of the entmax, greater than 1, at most 4.
        scale: Factor of the scores; :math:`C^{-1/2}` if None.
        ptr: Offsets of the sequences, ``[B+1]`` int64, or the pair (keys, queries). None: one sequence.
        is_causal: No query attends to a later key.

    Raises:
        TypeError, ValueError: An argument has the wrong type, shape or range.

    Example:
        >>> x = torch.tensor([[[3.0], [0.0], [-3.0]]])
        >>> gold_graph(x, x).to_dense()[0].int().tolist()
        [[1, 0, 0], [1, 1, 1], [0, 0, 1]]
    """
    sides = Sides.of(query, key, ptr, is_causal)
    checks.number("alpha", alpha, "(1, 4]", "Softmax has all edges.")
    if scale is not None:
        checks.number("scale", scale, "(-inf, inf)", "It is a factor of the scores.")
    factor = query.size(2) ** -0.5 if scale is None else scale

    def used(scores: Tensor, possible: Tensor, token: Tensor) -> Tensor:
        width = scores.size(-1)
        ends = width * torch.arange(scores.numel() // width + 1, device=scores.device)
        return segment_entmax((factor * scores).flatten(), ptr=ends, alpha=alpha).view_as(scores) > 0

    return sides.graph(*streamed(sides, sides.key, sides.key_ptr, sides.reach, used))


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
    hit = graph.contains(gold.edge_index, gold.edge_head)
    edges, found, hits = (
        torch.bincount(head, minlength=gold.heads).double()
        for head in (gold.edge_head, graph.edge_head, gold.edge_head[hit])
    )
    missed = torch.zeros_like(gold.degree.flatten()).index_add_(0, gold.edge_row, (~hit).long()).view(gold.heads, -1)
    pairs = float(graph.pairs_per_sequence.sum())
    exact = (missed == 0).double().mean(1)
    recall, precision = (torch.where(all_ > 0, hits / all_.clamp(min=1), 1.0) for all_ in (edges, found))
    return Match(recall, precision, 1 - found / pairs, exact)
