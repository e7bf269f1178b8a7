"""Sources of graphs for the layers of a trained model: fixed patterns, rules that look at tokens, and those that learn from its attention."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sklearn.cluster import KMeans
from torch import Tensor, nn
from torch.nn.functional import normalize

from sbm_pyg import AttentionGraph, Choice, GraphSource, SBMHead, SBMSource, Tokens, patterns, selectors
from sbm_pyg.progress import tqdm
from sbm_pyg.sources.patterns import PatternSource
from sbm_pyg.sources.selectors import SelectorSource
from sbm_pyg.sparsefinder import Projection, Sample, SparsefinderSource, fit_centroids, fit_projection
from sbm_pyg.sparsefinder.predictors import block_bigbird, bucketing, clustering, distance

BLOCK, CENTROIDS = 4, 4  # tokens of a block, and centroids that bring blocks together
SBM_BLOCKS = 16
COUNTS = tuple(range(2, 21, 2))
WINDOWS = (1, *range(3, 28, 2))
GRIDS: dict[str, tuple[float, ...]] = {  # source: its knob, as the slides of Sparsefinder have it
    "window": WINDOWS,
    "distance": tuple(number / 2 for number in range(1, 11)),
    **dict.fromkeys(("buckets", "clusters"), COUNTS),
    **dict.fromkeys(("blocks-v1", "blocks-v2", "random-blocks"), COUNTS[:5]),
    **dict.fromkeys(("bigbird", "longformer", "stride", "lsh", "routing", "sbm", "top-k"), COUNTS),
}
LEARNED = ("distance", "buckets", "clusters", "blocks-v1", "blocks-v2", "routing", "sbm")
ORACLES = ("top-k",)  # they look at every score, and so save nothing
ALONE = ("window", "blocks-v1", "blocks-v2", "random-blocks")  # their window is a knob, or one of blocks


@dataclasses.dataclass
class Learned:
    """What was learned of the attention of a layer."""

    projection: Projection
    centroids: dict[int, Tensor]  # by how many, of tokens
    block_centroids: Tensor
    route_centroids: dict[int, Tensor]  # by how many, of queries and keys that are scaled to length 1
    sbm: SBMHead

    def state(self) -> dict[str, Any]:
        parts = {"projection": self.projection.state_dict(), "sbm": self.sbm.state_dict()}
        return parts | {name: getattr(self, name) for name in ("centroids", "block_centroids", "route_centroids")}


def make_learned(channels: int, heads: int, dim: int) -> tuple[Projection, SBMHead]:
    options: dict[str, Any] = {"parameterization": "overlapping", "cluster_init": "orthogonal"}
    return Projection(channels, heads, dim), SBMHead(channels, heads, SBM_BLOCKS, **options)


def learn(samples: Sequence[Sample], dim: int, epochs: int, seed: int, name: str) -> Learned:
    """Fits all sources that learn to samples of a layer."""
    torch.manual_seed(seed)
    heads, _, channels = samples[0][0].shape
    projection, sbm = make_learned(channels, heads, dim)
    fit_projection(projection, samples, epochs=epochs, learning_rate=5e-3, seed=seed)
    fit_sbm(sbm, samples, epochs, seed)
    centroids, routes = {}, {}
    both = torch.cat([normalize(torch.cat(sample[:2], 1), dim=2) for sample in samples], 1)
    for count in tqdm(COUNTS, desc=f"clusters of {name}"):
        centroids[count] = fit_centroids(projection, samples, count, seed=seed)
        centers = [KMeans(count, n_init=1, random_state=seed).fit(head.numpy()).cluster_centers_ for head in both]
        routes[count] = torch.stack([torch.from_numpy(head_centers) for head_centers in centers]).to(both)
    of_blocks = fit_centroids(projection, samples, CENTROIDS, block_size=BLOCK, seed=seed)
    return Learned(projection, centroids, of_blocks, routes, sbm)


def fit_sbm(head: SBMHead, samples: Sequence[Sample], epochs: int, seed: int) -> None:
    """Fits a block model to true graphs by the likelihood of their edges, as if their numbers followed Poisson's law: linear time."""
    optimizer = torch.optim.Adam(head.parameters(), 5e-3)
    random = torch.Generator().manual_seed(seed)
    for _ in tqdm(range(epochs), desc="block model", unit="epoch"):
        for at in torch.randperm(len(samples), generator=random).tolist():
            query, key, graph = samples[at]
            sbm = head(Tokens(query, key, graph.query_ptr, graph.key_ptr))
            loss = sbm.expected_edges().sum() - sbm.on(graph).clamp(min=1e-6).log().sum()
            optimizer.zero_grad()
            (loss / query.shape[:2].numel()).backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()


class Union(GraphSource):
    """The graph of a source, and a window."""

    def __init__(self, source: GraphSource, size: int) -> None:
        super().__init__()
        self.source, self.size = source, size

    def forward(self, tokens: Tokens) -> Choice:
        return Choice(self.source(tokens).graph | patterns.window(None, self.size, ptr=tokens.query_ptr))


class RandomBlocks(GraphSource):
    """As blocks-v2, over noise in place of projections: BigBird in blocks."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, tokens: Tokens) -> Choice:
        random = torch.Generator().manual_seed(tokens.seed)
        heads, count = tokens.heads, tokens.num_queries
        near, far, centroids = (torch.randn(heads, size, 4, generator=random) for size in (count, count, CENTROIDS))
        return Choice(block_bigbird(tokens.with_vectors(near, far), centroids, self.k, BLOCK, block_window=1))


def strided(n: None, stride: int, *, ptr: Tensor) -> AttentionGraph:
    """Each token attends to those at a multiple of the stride, as the fixed pattern of Sparse Transformers; looks at all pairs."""
    graph = patterns.full(n, ptr=ptr)
    return graph.select((graph.edge_index[1] - graph.edge_index[0]) % stride == 0)


def reach(window: int) -> int | None:
    """Tokens to each side of a window of so many; None for no window."""
    return (window - 1) // 2 if window else None


def make(name: str, knob: float, window: int, layer: Learned) -> GraphSource:
    """The source of a layer: one of ``GRIDS`` with its knob, and a window of an odd number of tokens, or none if 0."""
    count, size, heads = int(knob), reach(window), layer.projection.heads
    centroids = layer.centroids.get(count)
    makers: dict[str, Callable[[], GraphSource]] = {
        "window": lambda: PatternSource(patterns.window, size=reach(count)),
        "distance": lambda: SparsefinderSource(layer.projection, distance, window=size, threshold=knob),
        "buckets": lambda: SparsefinderSource(layer.projection, bucketing, window=size, num_buckets=count),
        "clusters": lambda: SparsefinderSource(layer.projection, clustering, window=size, centroids=centroids),
        "random-blocks": lambda: RandomBlocks(count),
        "bigbird": lambda: PatternSource(patterns.bigbird, size=size or 0, num_global=2, num_random=count, heads=heads),
        "longformer": lambda: PatternSource(patterns.global_tokens, num_global=count),
        "stride": lambda: PatternSource(strided, stride=count),
        "lsh": lambda: SelectorSource(selectors.lsh, window=size, num_buckets=count, chunk_size=32),
        "routing": lambda: SelectorSource(selectors.routing, window=size, centroids=layer.route_centroids[count]),
        "sbm": lambda: SBMSource(layer.sbm, target_density=1 / count, window=size),
        "top-k": lambda: SelectorSource(selectors.top_k, window=size, k=count),
    }
    if name.startswith("blocks"):
        options: dict[str, Any] = {"k": count, "block_size": BLOCK, "block_window": 1}
        options["centroids"] = layer.block_centroids
        by = {"blocks-v1": "nearest", "blocks-v2": "shared"}[name]
        return SparsefinderSource(layer.projection, block_bigbird, by=by, **options)
    source = makers[name]().eval()
    return Union(source, size) if name in ("longformer", "stride") and size is not None else source
