"""Peers that choose a graph of some 32 edges a query, for one head of 64 channels; the remark of each is the law of its time.

Each must make the same graph when it looks at few rows at a time. No source makes an array of N x N.
"""

import math
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch

from examples.benchmarks.kernels import Case, Peer, Work
from examples.common.gate import Rejected
from sbm_pyg import AttentionGraph, GraphSource, SBMHead, SBMSource, Tokens, selectors, sparsefinder
from sbm_pyg.ops import tiles
from sbm_pyg.sources.indexer import Indexer, IndexerSource
from sbm_pyg.sparsefinder import predictors

LAWS = {  # exponent of N in the time of each
    "sbm": 1, "lsh": 1, "bucketing": 1, "routing": 1.5, "clustering": 1.5, "block_top_k": 2, "distance": 2, "top_k": 2,
    "indexer": 2, "indexer_top_k": 2,
}  # fmt: skip
EDGES, CHANNELS, DIM = 32, 64, 4
Graph = Callable[[Tokens], AttentionGraph]


def sources(n: int) -> dict[str, Graph]:
    """Each source with its options for N queries and keys, ``[1, N, 64]``."""
    torch.manual_seed(0)
    density, groups = EDGES / n, max(2, n // EDGES)
    projection, centroids = sparsefinder.Projection(CHANNELS, dim=DIM), torch.randn(1, math.isqrt(n), CHANNELS)

    def small(rule: Callable[..., AttentionGraph], **options: object) -> Graph:
        return lambda tokens: rule(tokens.with_vectors(*projection(tokens.query, tokens.key)), **options)

    def of(source: GraphSource) -> Graph:
        source.eval()
        return lambda tokens: source(tokens).graph

    return {
        "sbm": of(SBMSource(SBMHead(CHANNELS, num_clusters=64), target_density=density, window=None)),
        "lsh": partial(selectors.lsh, num_buckets=64, chunk_size=EDGES // 2),
        "bucketing": small(predictors.bucketing, num_buckets=groups * DIM),
        "routing": partial(selectors.routing, centroids=centroids, size=EDGES),
        "clustering": small(predictors.clustering, centroids=centroids[..., :DIM] / 2, cap=EDGES),
        "block_top_k": partial(selectors.block_top_k, k=2, block_size=EDGES // 2),
        "distance": small(predictors.distance, threshold=1.5, cap=EDGES),
        "top_k": partial(selectors.top_k, k=EDGES),
        "indexer": of(IndexerSource(Indexer(CHANNELS), select="bernoulli", target_density=density)),
        "indexer_top_k": of(IndexerSource(Indexer(CHANNELS), k=EDGES)),
    }


def _tokens(n: int) -> Tokens:
    query, key = torch.randn(2, 1, n, CHANNELS, generator=torch.Generator().manual_seed(n)).unbind(0)
    return Tokens(query, key, bipartite=False)


def _source(case: Case, name: str) -> Work:
    graph, tokens = sources(case.tokens)[name], _tokens(case.tokens)

    @torch.no_grad()
    def choose() -> int:
        return graph(tokens).num_edges

    @torch.no_grad()
    def check() -> float:
        with patch.dict(tiles.SCORES_PER_TILE, cpu=2**10):
            parts = sources(256)[name](_tokens(256))
        if parts != sources(256)[name](_tokens(256)):
            raise Rejected("it makes other graphs with fewer rows at a time")
        return 0.0

    return Work(check, {"choose": choose})


SOURCES = {name: Peer(name, partial(_source, name=name), f"expected: N^{law:g}") for name, law in LAWS.items()}
