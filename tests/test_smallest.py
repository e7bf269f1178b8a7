"""The smallest sizes that the library takes: one channel, head, community, key, block or token, and no query or segment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GraphConv

from sbm_pyg import (
    AttentionConv,
    AttentionGraph,
    DCMMBias,
    FullAttention,
    MaskedLM,
    PairClassifier,
    Rotary,
    SBMAttentionConv,
    SBMHead,
    SBMMultiheadAttention,
    SequenceClassifier,
    SequenceEncoder,
    SparseGPSConv,
    Sparsifier,
    TokenClassifier,
    Tokens,
    analysis,
    mask_tokens,
    ops,
    patterns,
)
from sbm_pyg.layers.named import make_attention
from sbm_pyg.sources import selectors
from sbm_pyg.sources.indexer import Indexer, IndexerSource, KeyScorer
from sbm_pyg.sparsefinder import Projection, SparsefinderSource, fit_centroids, predictors

TINY: dict[str, Any] = {"channels": 1, "num_layers": 1, "heads": 1, "max_length": 1, "ffn_channels": 1}
PTR = torch.arange(4)  # three sequences of one token
X = torch.tensor([[0.5], [-1.0], [2.0]])
WORDS = torch.zeros(3, dtype=torch.int64)


def tokens(heads: int = 1) -> Tokens:
    x = X.expand(heads, -1, -1)
    return Tokens(x, x, torch.tensor([0, 3]), torch.tensor([0, 3]))


def encoder(**options: Any) -> SequenceEncoder:
    return SequenceEncoder(**({"num_tokens": 1} | TINY | options), attention_options={"num_clusters": 1})


LAYERS: dict[str, Callable[[], Tensor]] = {
    "SBMAttentionConv": lambda: SBMAttentionConv(1, 1, 1, num_clusters=1)(X),
    "AttentionConv with an edge feature": lambda: AttentionConv(1, 1, edge_dim=1)(
        X, torch.tensor([[0, 1, 2], [0, 1, 2]]), edge_attr=torch.ones(3, 1)
    ),
    "FullAttention": lambda: FullAttention(1, 1, 1)(X, ptr=PTR),
    "DCMMBias": lambda: DCMMBias(1, 1, num_clusters=1)(X[None], X[None], patterns.full(3))[:3, None],
    "SparseGPSConv": lambda: SparseGPSConv(1, GraphConv(1, 1), AttentionConv(1, 1, source=selectors.TopKSource(1)))(
        X, torch.tensor([[0, 1], [1, 2]])
    ),
    "SBMMultiheadAttention": lambda: SBMMultiheadAttention(1, 1, kdim=1, vdim=1, num_clusters=1)(X, X, X)[0],
    "Rotary": lambda: Rotary()(X.repeat(1, 2)[None], torch.arange(3))[0, :, :1],
    "SequenceEncoder": lambda: encoder()(WORDS, PTR),
    "SequenceEncoder of vectors": lambda: encoder(num_tokens=None, in_channels=1)(X, PTR),
    "SequenceClassifier": lambda: SequenceClassifier(encoder(), 1, pool_length=1)(WORDS, PTR),
    "PairClassifier": lambda: PairClassifier(encoder(), 1)((WORDS, WORDS), (PTR, PTR)),
    "TokenClassifier": lambda: TokenClassifier(encoder(), 1)(WORDS, PTR),
    "MaskedLM": lambda: MaskedLM(encoder())(WORDS, PTR),
    "block_top_k": lambda: make_attention("block_top_k", 1, 1, 1, k=1, block_size=1)(X),
    "lsh": lambda: make_attention("lsh", 1, 1, 1, num_buckets=2, chunk_size=1, rounds=1)(X),
    "routing": lambda: make_attention("routing", 1, 1, 1, num_clusters=1, size=1)(X),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_one_channel(name: str) -> None:
    torch.manual_seed(0)
    out = LAYERS[name]()
    assert out.shape == (3, 1)
    assert bool(out.isfinite().all())


RULES: dict[str, tuple[Callable[[], AttentionGraph], int]] = {  # and the number of edges among three tokens
    "top_k": (lambda: selectors.top_k(tokens(), 1), 3),
    "TopKSource": (lambda: selectors.TopKSource(1)(tokens()).graph, 3),
    "block_top_k": (lambda: selectors.block_top_k(tokens(), 1, 1), 3),
    "RoutingSource": (lambda: selectors.RoutingSource(1, num_clusters=1)(tokens()).graph, 9),
    "routing": (lambda: selectors.routing(tokens(), torch.ones(1, 1, 1), size=1), 1),
    "Indexer": (lambda: IndexerSource(Indexer(1, index_heads=1, index_channels=1), k=1)(tokens()).graph, 3),
    "KeyScorer": (lambda: IndexerSource(KeyScorer(1, hidden=1), k=1)(tokens()).graph, 3),
    "distance": (lambda: predictors.distance(tokens(), 9.0, cap=1), 3),
    "bucketing": (lambda: predictors.bucketing(tokens(), 1), 9),
    "clustering": (lambda: predictors.clustering(tokens(), torch.zeros(1, 1, 1)), 9),
    "clustering with a cap": (lambda: predictors.clustering(tokens(), torch.zeros(1, 1, 1), cap=1), 3),
    "Projection": (
        lambda: SparsefinderSource(Projection(1, dim=1, hidden=1), predictors.bucketing, num_buckets=1)(tokens()).graph,
        9,
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_one_key(name: str) -> None:
    torch.manual_seed(0)
    make, edges = RULES[name]
    assert make().num_edges == edges


def test_a_block_model_of_one_channel() -> None:
    sbm = SBMHead(1, 1, 1)(tokens())
    assert sbm.edge_prob_dense()[0].shape == (3, 3)


def test_buckets_and_centroids_of_one() -> None:
    assert predictors.buckets(X[None], 1).tolist() == [[[0], [0], [0]]]
    sample = (X[None], X[None], patterns.full(3))
    centroids = fit_centroids(Projection(1, dim=1), [sample], 1, block_size=1)
    assert centroids.shape == (1, 1, 1)


def test_one_step_of_training() -> None:
    sparsifier = Sparsifier(SBMAttentionConv(2, 2, num_clusters=1), 0.5, total_steps=1)
    assert sparsifier.step(1.0) == 0.5
    again = Sparsifier(SBMAttentionConv(2, 2, num_clusters=1), 0.5, total_steps=1, dense_part=0)
    again.load_state_dict(Sparsifier(SBMAttentionConv(2, 2, num_clusters=1), 0.5, 1, dense_part=0).state_dict())
    assert again.is_sparse


def test_a_vocabulary_of_one_word() -> None:
    shown, targets = mask_tokens(torch.zeros(50, dtype=torch.int64), mask_token=0, num_tokens=1, seed=0)
    assert not shown.any()
    assert targets.any()


def test_no_query_and_no_segment() -> None:
    none = torch.zeros(2, dtype=torch.int64)
    assert ops.schemas.sample_queries(none, none[:1], 0, 0.5, 1).shape == (0,)
    assert ops.segment_entmax(torch.empty(0), index=none[:0], num_nodes=0).shape == (0,)


def test_analysis_of_one_token() -> None:
    assert analysis.lemma2(1, 1).path == (0,)
