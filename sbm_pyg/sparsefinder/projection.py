"""Sparsefinder's projections, which bring queries close to the keys that an alpha-entmax head uses, and its source.

In: queries, keys and ground-truth graphs of a trained model (``ground_truth``). Out: a projection to few dimensions,
centroids, and a :class:`SparsefinderSource`. Not here: the rules that predict graphs (``predictors``), rules that need
no training (``selectors``), and attention.

Reference: Treviso, Gois, Fernandes, Fonseca, Martins: "Predicting Attention Sparsity in Transformers", 2022.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from ..graphs.blocks import block_means
from ..graphs.graph import AttentionGraph, check_graph
from ..graphs.ragged import Tokens, draw_seed
from ..ops import checks
from ..ops.segments import allowed_keys
from ..sources import patterns
from ..sources.interface import Choice, GraphSource, check_finite
from ..sources.pairs import check_vectors
from ..sources.selectors import SelectorSource

__all__ = ["Projection", "Sample", "SparsefinderSource", "fit_centroids", "fit_projection", "projection_loss"]

Sample = tuple[Tensor, Tensor, AttentionGraph]
"""Queries ``[H, N, C]``, keys ``[H, M, C]``, and the graph that attention over them has."""


class Projection(nn.Module):
    """Projects the queries and keys of each head to few dimensions.

    Args:
        channels: Channels of a head C.
        heads: Number of heads H.
        dim: Dimensions r.
        hidden: Width of a hidden layer with a ReLU. None: the projection is linear.
        shared: Queries and keys have the same projection.

    Raises:
        TypeError, ValueError: A size is not an int or below 1.

    Shapes:
        - queries ``[H, N, C]`` and keys ``[H, M, C]``; output ``[H, N, r]`` and ``[H, M, r]``.
    """

    head_dims: ClassVar[dict[str, int]] = {"weights": 1, "biases": 1}

    def __init__(
        self, channels: int, heads: int = 1, dim: int = 4, *, hidden: int | None = None, shared: bool = False
    ) -> None:
        super().__init__()
        for name, size in (("channels", channels), ("heads", heads), ("dim", dim), ("hidden", hidden)):
            if not (name == "hidden" and size is None):
                checks.integer(name, size, 1, "It is a size of the projection.")
        checks.flag("shared", shared, "It says whether queries and keys have the same projection.")
        widths = [channels, dim] if hidden is None else [channels, hidden, dim]
        self.heads, self.shared = heads, shared
        sets = 1 if shared else 2
        shapes = [(sets, heads, *pair) for pair in itertools.pairwise(widths)]
        sizes = {"channels": channels, "heads": heads, "dim": dim, "hidden": hidden or 0}
        checks.parameters(sizes, sum(map(math.prod, shapes)))
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)
        self.biases = nn.ParameterList(nn.Parameter(torch.empty(*shape[:2], 1, shape[3])) for shape in shapes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the parameters as :class:`torch.nn.Linear` does."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            bound = weight.size(2) ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Project queries and keys."""
        check_vectors(query, key, self.heads, self.weights[0].size(2))
        return self._side(query, 0), self._side(key, 0 if self.shared else 1)

    def _side(self, x: Tensor, side: int) -> Tensor:
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias[side].to(x.dtype), relu(x) if layer else x, weight[side].to(x.dtype))
        return x

    def extra_repr(self) -> str:
        widths = [self.weights[0].size(2), *(weight.size(3) for weight in self.weights)]
        return f"{' -> '.join(map(str, widths))}, heads={self.heads}, shared={self.shared}"


def projection_loss(
    query: Tensor,
    key: Tensor,
    graph: AttentionGraph,
    *,
    margin: float = 1.0,
    per: str = "query",
    seed: int | None = None,
) -> Tensor:
    r"""Hinge loss that brings the keys of a query closer than random keys, a scalar.

    For each edge of a query, one key of its sequence is drawn uniformly, with replacement. With squared distances
    :math:`d^+` of edges and :math:`d^-` of drawn keys, ``per="query"`` is the mean over queries with edges of
    :math:`[m + \sum d^+ - \sum d^-]_+`, the formula of the paper. ``per="pair"`` is the mean over edges of
    :math:`[m + d^+ - d^-]_+`, another reading of the paper.

    Args:
        query: Projected queries, ``[H, N, r]``.
        key: Projected keys, ``[H, M, r]``.
        graph: The edges that attention uses, in H heads or in one.
        margin: The margin m.
        per: ``"query"`` or ``"pair"``.
        seed: Seed of the drawn keys. None: torch's default generator.

    Raises:
        TypeError, ValueError: An argument has the wrong type, shape or range, or the graph is over other tokens.
    """
    check_graph(graph)
    checks.tensors(query=query, key=key)
    checks.floating(query=query, key=key)
    checks.shape("query", query, (None, None, None), "[H, N, r]", "Heads come first.")
    graph = graph.expand(query.size(0))
    checks.shape("query", query, (graph.heads, graph.num_queries, None), "[H, N, r]", "It is over the graph's tokens.")
    sizes = (graph.heads, graph.num_keys, query.size(2))
    checks.shape("key", key, sizes, "[H, M, r]", "It is over the graph's tokens.")
    checks.same_device("query", query, key=key, graph=graph.col)
    if key.dtype != query.dtype:
        raise TypeError(f"Expected 'key' to be {query.dtype}, as 'query' is (got {key.dtype}). Convert it.")
    checks.number("margin", margin, "[0, inf)", "It is how much farther other keys should be.")
    checks.one_of("per", per, ("query", "pair"))
    random = torch.Generator().manual_seed(draw_seed(seed) % 2**63)
    row, target = graph.edge_row, graph.edge_index[1]
    sequence = torch.searchsorted(graph.query_ptr, target, right=True) - 1
    share = torch.rand(graph.num_edges, generator=random).to(query.device)
    count = allowed_keys(graph.query_ptr, graph.key_ptr, graph.num_queries, graph.is_causal)[target]
    drawn = graph.key_ptr[sequence] + torch.minimum((share * count).long(), count - 1)
    first = key.size(1) * graph.edge_head
    x, z = query.flatten(0, 1), key.flatten(0, 1)
    near, far = ((x[row] - z[first + col]).square().sum(1) for col in (graph.col.long(), drawn))
    if per == "pair":
        return relu(margin + near - far).sum() / max(1, graph.num_edges)
    total = x.new_zeros(x.size(0)).index_add(0, row, near - far)
    has = torch.zeros(x.size(0), dtype=torch.bool, device=row.device).index_fill_(0, row, True)
    return relu(margin + total[has]).sum() / has.sum().clamp(min=1)


def fit_projection(
    projection: Projection,
    samples: Sequence[Sample],
    *,
    epochs: int = 5,
    learning_rate: float = 1e-3,
    margin: float = 1.0,
    per: str = "query",
    seed: int = 0,
    progress: bool = True,
) -> list[float]:
    """Fit a projection to samples of a trained model, with Adam, one step per sample, and gradients clipped at 1.

    Args:
        projection: The projection to fit, in place.
        samples: A sequence of triples: queries, keys and ground-truth graph of each batch of sequences. Samples get no
            gradients.
        epochs: Passes over the samples, each in a new random order.
        learning_rate: Learning rate of Adam.
        margin, per: As in :func:`projection_loss`.
        seed: Seed of the order and of the drawn keys.
        progress: Show a progress bar.

    Returns:
        The mean loss of each pass.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range, or there are no samples.
    """
    from ..progress import tqdm

    checks.kind("projection", projection, Projection, "a Projection", "Make one.")
    checks.kind("samples", samples, Sequence, "a sequence", "Each pass goes over all of them: make a list.")
    checks.require(samples, "samples", "to be at least one", "none", "Each is a triple of query, key and graph.")
    checks.integer("epochs", epochs, 1, "It is the number of passes.")
    checks.number("learning_rate", learning_rate, "(0, inf)", "It is the rate of Adam.")
    has_gradients = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in projection.parameters())
    what, way_out = "to have gradients", "Fit it outside of `torch.no_grad()` and `torch.inference_mode()`."
    checks.require(has_gradients, "projection", what, "none: its parameters are frozen, or gradients are off", way_out)
    seed = checks.seed(seed)
    random = torch.Generator().manual_seed(seed % 2**63)
    optimizer = torch.optim.Adam(projection.parameters(), learning_rate)
    means = []
    with tqdm(total=epochs * len(samples), desc="projection", unit="step", disable=not progress) as bar:
        for epoch in range(epochs):
            losses = []
            for at in torch.randperm(len(samples), generator=random).tolist():
                *vectors, graph = _check_sample(samples[at], at, 3)
                # samples may carry gradients of another model, or be tensors of inference mode
                query, key = (x.detach().clone() if isinstance(x, Tensor) else x for x in vectors)
                drawn = (seed + epoch * len(samples) + at) % 2**63
                x, z = projection(query, key)
                loss = projection_loss(x, z, graph, margin=margin, per=per, seed=drawn)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(projection.parameters(), 1.0)
                optimizer.step()
                losses.append(float(loss.detach()))
                bar.update()
            means.append(sum(losses) / len(losses))
            bar.set_postfix_str(f"loss {means[-1]:.3f}")
    return means


@torch.no_grad()
def fit_centroids(
    projection: Projection,
    samples: Iterable[tuple[Any, ...]],
    num_clusters: int,
    *,
    block_size: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Fit centroids to the projected queries and keys of each head, with k-means of scikit-learn.

    Args:
        projection: A fitted projection.
        samples: As in :func:`fit_projection`; graphs are needed only with ``block_size``.
        num_clusters: Centroids K.
        block_size: Fit centroids to the means of blocks of this many tokens, as
            :func:`~sbm_pyg.sparsefinder.predictors.block_bigbird` needs them. None: fit them to tokens.
        seed: Seed of k-means, which runs once, from a k-means++ start.

    Returns:
        Centroids, ``[H, K, r]``.

    Raises:
        ImportError: scikit-learn is not installed.
        TypeError, ValueError: An argument has the wrong type or range, or there are fewer tokens than centroids.
    """
    cluster = checks.imported("sklearn.cluster", "examples")
    checks.kind("projection", projection, nn.Module, "a module such as Projection", "Make one.")
    num_clusters = checks.integer("num_clusters", num_clusters, 1, "It is the number of centroids of a head.")
    if block_size is not None:
        block_size = checks.integer("block_size", block_size, 1, "It is the number of tokens of a block.")
    parts = [torch.cat(_points(projection, sample, at, block_size), 1) for at, sample in enumerate(samples)]
    checks.require(parts, "samples", "to be at least one", "none", "Each is a pair of query and key.")
    points = torch.cat(parts, 1)
    what, way_out = f"to be at most {points.size(1)}, the points of all samples", "Give more samples."
    checks.require(points.size(1) >= num_clusters, "num_clusters", what, num_clusters, way_out)
    start = checks.seed(seed) % 2**32
    numbers = points.cpu().to(torch.promote_types(points.dtype, torch.float32))  # numpy has no bfloat16
    fitted = [cluster.KMeans(num_clusters, n_init=1, random_state=start).fit(head.numpy()) for head in numbers]
    return torch.stack([torch.from_numpy(kmeans.cluster_centers_) for kmeans in fitted]).to(points)


def _check_sample(sample: Any, at: int, least: int) -> Sequence[Any]:
    """Query, key and, if there is one, graph of a sample."""
    if isinstance(sample, tuple | list) and least <= len(sample) <= 3:
        return sample
    got = f"{len(sample)} parts" if isinstance(sample, tuple | list) else type(sample).__name__
    raise TypeError(
        f"Expected 'samples[{at}]' to be query, key and graph (got {got}). `ground_truth_graph` makes the graph."
    )


def _points(projection: Projection, sample: tuple[Any, ...], at: int, block_size: int | None) -> list[Tensor]:
    """Projected queries and keys, or the means of their blocks."""
    query, key, *graphs = _check_sample(sample, at, 2)
    points = projection(query, key)
    if block_size is None:
        return [*points]
    checks.require(graphs, "samples", "with graphs for 'block_size'", "pairs", "Graphs say where sequences end.")
    (graph,) = graphs
    check_graph(graph, f"graph of samples[{at}]")
    fits = (graph.num_queries, graph.num_keys) == (query.size(1), key.size(1))
    what, way_out = f"with a graph over {query.size(1)} queries and {key.size(1)} keys", "It is that of its tokens."
    checks.require(fits, f"samples[{at}]", what, graph, way_out)
    ptrs = (graph.query_ptr, graph.key_ptr)
    return [block_means(x, ptr, block_size)[0] for x, ptr in zip(points, ptrs, strict=True)]


class SparsefinderSource(GraphSource):
    """Predicts edges with a projection and a rule, and adds a window and global tokens.

    The task loss does not train the projection: fit it first with :func:`fit_projection`.

    Args:
        projection: A projection with the heads of the layer.
        rule: A function of :mod:`~sbm_pyg.sparsefinder.predictors`, or a similar function.
        window: Each token also attends to tokens at this distance or less, where queries and keys are the same tokens.
            None: no window.
        num_global: Number of first tokens of a sequence that attend to all tokens and that all tokens attend to, where
            queries and keys are the same tokens.
        **options: Options of the rule, e.g. ``threshold=1.0``. Copies of tensors, such as centroids, become buffers.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range, or the rule does not take an option.

    Example:
        >>> from sbm_pyg.sparsefinder.predictors import bucketing
        >>> source = SparsefinderSource(Projection(8, heads=2), bucketing, window=1, num_buckets=4)
        >>> source(Tokens(torch.randn(2, 10, 8), query_ptr=torch.tensor([0, 4, 10]))).graph.heads
        2
    """

    def __init__(
        self,
        projection: Projection,
        rule: Callable[..., AttentionGraph],
        *,
        window: int | None = None,
        num_global: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        way_out = "It takes queries and keys to few dimensions."
        checks.kind("projection", projection, nn.Module, "a module such as Projection", way_out)
        self.num_global = checks.integer("num_global", num_global, 0, "It is a number of tokens.")
        self.projection = projection
        self.rule = SelectorSource(rule, window=window, **options)

    def forward(self, tokens: Tokens) -> Choice:
        projected = self.projection(tokens.query, tokens.key)
        check_finite("projection", tokens, *projected)
        graph = self.rule(tokens.with_vectors(*projected)).graph
        if self.num_global and not tokens.bipartite:
            wide = patterns.global_tokens(None, self.num_global, is_causal=tokens.is_causal, ptr=tokens.query_ptr)
            graph = graph | wide
        return Choice(graph)

    def extra_repr(self) -> str:
        return f"{self.rule.extra_repr()}, num_global={self.num_global}"
