"""Candidates are given pairs among which a source chooses: their random words and their probabilities.

In: tokens, a graph of pairs, and probabilities of all pairs. Out: drawn graphs, and the probabilities of the pairs. Not
here: what a source does with them (:meth:`~sbm_pyg.LearnedSource.choose_among`), and the layer that passes them
(``layers.learned_graph``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..graphs.graph import AttentionGraph
from ..graphs.ragged import Tokens, resolve_sequence_ids
from ..ops import checks
from ..ops.random_words import PAIR, philox, split_ids
from ..ops.segments import segments, upcast
from .interface import EdgeProbability, min_probability

__all__ = ["CandidateProbability", "Candidates"]


class Candidates:
    """Pairs that may be edges, with random words that depend on seed, sequence and positions of each pair.

    Args:
        graph: The pairs, in one head.
        tokens: The tokens that they join.
    """

    def __init__(self, graph: AttentionGraph, tokens: Tokens) -> None:
        self.graph = graph
        key, query = graph.edge_index
        ids, first_head = split_ids(resolve_sequence_ids(tokens.sequence_ids, graph.num_sequences, graph.device))
        sequence = tokens.query_sequence[query]
        positions = tokens.key_position[key], tokens.query_position[query]
        self.words = philox(*positions, ids[sequence], first_head[sequence] | PAIR, tokens.seed)

    def draw(self, p: Tensor, word: int = 0) -> AttentionGraph:
        """Draw each pair with its probability ``[E]``: edges by word 0, and probes by word 1. NaN counts as 1."""
        threshold = p.to(checks.widest(p.device)).nan_to_num(1.0).clamp(0, 1) * 2.0**32
        return self.graph.select(self.words[word] < threshold.long())


class CandidateProbability(EdgeProbability):
    """Probabilities of candidates, scaled to a target density among them; other pairs have probability 0.

    Args:
        probability: Probabilities of all pairs.
        candidates: The candidates.
        density: Mean probability over the candidates of each sequence. None keeps ``probability`` unscaled.
        budget: Largest expected number of keys of a query; gradients treat the factor as a constant. None: no limit.
    """

    def __init__(
        self,
        probability: EdgeProbability,
        candidates: AttentionGraph,
        density: float | None,
        budget: float | None = None,
    ) -> None:
        self.probability, self.candidates = probability, candidates
        self.factor: Tensor | None = None
        """Factor of the probabilities of each query, ``[N]``."""
        p = probability.on(candidates)
        if density is not None:
            factor = density / self._mean(p).clamp(min=min_probability(p))  # [B]
            self.factor = factor.repeat_interleave(candidates.query_ptr.diff(), output_size=candidates.num_queries)
        if budget is not None:
            degree = segments(upcast(self._scale(p, candidates)).detach(), candidates.rowptr)  # [N]
            limit = (budget / degree).clamp(max=1)
            self.factor = limit if self.factor is None else self.factor * limit
        self.on_candidates = self._scale(p, candidates)

    def on(self, graph: AttentionGraph) -> Tensor:
        """Probability of each edge of a graph, ``[E]``."""
        p = self._scale(self.probability.on(graph), graph)
        return p * self.candidates.contains(graph.edge_index, graph.edge_head)

    def expected_density(self) -> Tensor:
        """Mean probability over the candidates of each sequence, ``[B, 1]``."""
        return self._mean(self.on_candidates)[:, None]

    def _scale(self, p: Tensor, graph: AttentionGraph) -> Tensor:
        return p if self.factor is None else p * self.factor.to(p.dtype)[graph.edge_row]

    def _mean(self, p: Tensor) -> Tensor:
        """Mean over the candidates of each sequence of one value per candidate, ``[B]``."""
        count = self.candidates.edges_per_sequence[:, 0]
        sequence = torch.repeat_interleave(count, output_size=self.candidates.num_edges)
        return upcast(p).new_zeros(count.numel()).index_add(0, sequence, upcast(p)) / count.clamp(min=1)
