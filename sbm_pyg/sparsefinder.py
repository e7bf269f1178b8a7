"""Sparsefinder: which keys an alpha-entmax head will use, told before a score is computed.

In: queries and keys of a model that is trained. Out: a projection to few dimensions in which keys that a query uses are
near, graphs of what is near, and how well these foretell the attention. Not here: rules that need no training
(``selectors``), and attention.

Reference: Treviso, Gois, Fernandes, Fonseca, Martins: "Predicting Attention Sparsity in Transformers", 2022.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from . import patterns
from .choice import Choice, GraphSource
from .graph import AttentionGraph, check_graph
from .ops import checks, segment_entmax
from .ops.reference import reach
from .pairs import Part, Ptr, Sides, largest, ranges, streamed
from .ragged import draw_seed
from .selectors import SelectorSource

__all__ = [
    "Match", "Projection", "SparsefinderSource", "bucketing", "clustering", "compare", "distance", "fit_centroids",
    "fit_projection", "gold_graph", "projection_loss",
]  # fmt: skip

EXACT = "donot_use_mm_for_euclid_dist"
Sample = tuple[Tensor, Tensor, AttentionGraph]
"""Queries ``[H, N, C]``, keys ``[H, M, C]``, and the graph that attention over them has."""


# ------------------------------------------------------------------------------------------------------------- learning


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

    def used(scores: Tensor, possible: Tensor, part: Part) -> Tensor:
        width = scores.size(-1)
        ends = width * torch.arange(scores.numel() // width + 1, device=scores.device)
        return segment_entmax((factor * scores).flatten(), ptr=ends, alpha=alpha).view_as(scores) > 0

    return sides.graph(*streamed(sides, sides.key, sides.key_ptr, sides.reach, used))


class Projection(nn.Module):
    """Takes queries and keys of each head to few dimensions.

    Args:
        channels: Channels of a head C.
        heads: Number of heads H.
        dim: Dimensions r.
        hidden: Width of a hidden layer with a ReLU; None: the projection is linear.
        shared: Queries and keys have the same projection.

    Raises:
        TypeError, ValueError: A size is no int or below 1.

    Shapes:
        - queries ``[H, N, C]`` and keys ``[H, M, C]``; output ``[H, N, r]`` and ``[H, M, r]``.
    """

    def __init__(
        self, channels: int, heads: int = 1, dim: int = 4, *, hidden: int | None = None, shared: bool = False
    ) -> None:
        super().__init__()
        for name, size in (("channels", channels), ("heads", heads), ("dim", dim), ("hidden", hidden)):
            if not (name == "hidden" and size is None):
                checks.integer(name, size, 1, "It is a size of the projection.")
        checks.flag("shared", shared, "It says whether queries and keys have the same projection.")
        width = channels + dim if hidden is None else hidden
        count = 2 * heads * max(channels, dim) * width
        checks.memory("heads", count, 4, torch.get_default_device(), "Build a smaller projection.", "parameters")
        widths = [channels, dim] if hidden is None else [channels, hidden, dim]
        self.heads, self.shared = heads, shared
        sides = 1 if shared else 2
        shapes = [(sides, heads, *pair) for pair in itertools.pairwise(widths)]
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)
        self.biases = nn.ParameterList(nn.Parameter(torch.empty(*shape[:2], 1, shape[3])) for shape in shapes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as those of :class:`torch.nn.Linear`."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            bound = weight.size(2) ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Project both sides."""
        checks.tensors(query=query, key=key)
        checks.floating(query=query, key=key)
        wanted = (self.heads, None, self.weights[0].size(2))
        for name, x in (("query", query), ("key", key)):
            checks.shape(name, x, wanted, "[H, N, C]", "They are those of the heads that it was made for.")
        return self._side(query, 0), self._side(key, 0 if self.shared else 1)

    def _side(self, x: Tensor, side: int) -> Tensor:
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias[side].to(x.dtype), relu(x) if layer else x, weight[side].to(x.dtype))
        return x

    def extra_repr(self) -> str:
        """Its sizes."""
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
    r"""How far keys that are used are, next to keys drawn at random: a hinge, a scalar.

    For each query with edges as many keys of its sequence are drawn as it has edges, uniformly and with repeats. With
    squared distances :math:`d^+` to the former and :math:`d^-` to the latter, ``per="query"`` has the mean over queries
    of :math:`[m + \sum d^+ - \sum d^-]_+`, and ``per="pair"`` the mean over edges of :math:`[m + d^+ - d^-]_+`, each
    edge beside one of the keys that were drawn. Both readings are of the paper; the first is its formula.

    Args:
        query: Projected queries, ``[H, N, r]``.
        key: Projected keys, ``[H, M, r]``.
        graph: The edges that attention uses, in H heads or in one.
        margin: The m above.
        per: ``"query"`` or ``"pair"``.
        seed: Of what is drawn; from torch's default generator if None.

    Raises:
        TypeError, ValueError: An argument has the wrong type, shape or range, or the graph is over other tokens.
    """
    check_graph(graph)
    checks.tensors(query=query, key=key)
    graph = graph.expand(query.size(0))
    checks.shape("query", query, (graph.heads, graph.num_queries, None), "[H, N, r]", "It is over the graph's tokens.")
    wanted = (graph.heads, graph.num_keys, query.size(2))
    checks.shape("key", key, wanted, "[H, M, r]", "It is over the graph's tokens.")
    checks.number("margin", margin, "[0, inf)", "It is how much farther other keys should be.")
    checks.one_of("per", per, ("query", "pair"))
    random = torch.Generator().manual_seed(draw_seed(seed) % 2**63)
    row, target = graph.edge_row, graph.edge_index[1]
    sequence = torch.searchsorted(graph.query_ptr, target, right=True) - 1
    share = torch.rand(graph.num_edges, generator=random).to(query.device)
    count = reach(graph.query_ptr, graph.key_ptr, graph.num_queries, graph.is_causal)[target]
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
    """Fit a projection to samples of a model that is trained: Adam, a step per sample, gradients clipped at 1.

    Args:
        projection: What is fitted.
        samples: Queries, keys and gold graph of each batch of sequences.
        epochs: Passes over the samples, in an order drawn anew.
        learning_rate: Of Adam.
        margin, per: As :func:`projection_loss`.
        seed: Of the order and of the keys that are drawn.
        progress: Show a progress bar.

    Returns:
        The mean loss of each pass.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range, or there are no samples.
    """
    from tqdm.auto import tqdm

    if not isinstance(projection, Projection):
        raise TypeError(f"Expected 'projection' to be a Projection (got {type(projection).__name__}). Make one.")
    if not samples:
        raise ValueError("Expected 'samples' to be at least one (got none). Each is a triple of query, key and graph.")
    checks.integer("epochs", epochs, 1, "It is the number of passes.")
    checks.number("learning_rate", learning_rate, "(0, inf)", "It is the rate of Adam.")
    seed = checks.seed(seed)
    random = torch.Generator().manual_seed(seed % 2**63)
    optimizer = torch.optim.Adam(projection.parameters(), learning_rate)
    means = []
    with tqdm(total=epochs * len(samples), desc="projection", unit="step", disable=not progress) as bar:
        for epoch in range(epochs):
            losses = []
            for at in torch.randperm(len(samples), generator=random).tolist():
                query, key, graph = samples[at]
                drawn = seed + (epoch * len(samples) + at)
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
    projection: Projection, samples: Iterable[tuple[Any, ...]], num_clusters: int, *, seed: int = 0
) -> Tensor:
    """Centroids of the projected queries and keys of each head, by k-means of scikit-learn.

    Args:
        projection: A projection that is fitted.
        samples: As :func:`fit_projection`; graphs are not needed.
        num_clusters: Centroids K.
        seed: Of k-means, which starts once from k-means++.

    Returns:
        Centroids, ``[H, K, r]``.

    Raises:
        ImportError: scikit-learn is not installed.
        TypeError, ValueError: An argument has the wrong type or range, or there are fewer tokens than centroids.
    """
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise ImportError("Expected scikit-learn to be installed. `pip install scikit-learn`.") from error
    num_clusters = checks.integer("num_clusters", num_clusters, 1, "It is the number of centroids of a head.")
    points = torch.cat([torch.cat(projection(query, key), 1) for query, key, *_ in samples], 1)
    if points.size(1) < num_clusters:
        raise ValueError(
            f"Expected 'num_clusters' to be at most {points.size(1)}, the tokens of all samples (got {num_clusters}). "
            "Give more samples."
        )
    start = checks.seed(seed) % 2**32
    fitted = [KMeans(num_clusters, n_init=1, random_state=start).fit(head.cpu().numpy()) for head in points]
    return torch.stack([torch.from_numpy(each.cluster_centers_) for each in fitted]).to(points)


# ----------------------------------------------------------------------------------------------------------- predicting


@torch.no_grad()
def distance(
    query: Tensor, key: Tensor, threshold: float, cap: int | None = None, *, ptr: Ptr = None, is_causal: bool = False
) -> AttentionGraph:
    r"""Each query attends to the keys at a distance of at most a threshold.

    An edge where :math:`\|q'_i - k'_j\| \le t`. Cost O(H N M r) time, rows a part at a time.

    Args:
        query: Projected queries, ``[H, N, r]``.
        key: Projected keys, ``[H, M, r]``.
        threshold: The t above, at least 0.
        cap: Most keys of a query, the nearest, equal ones by the lower key. None: no limit.
        ptr, is_causal: As :func:`gold_graph`.

    Raises:
        TypeError, ValueError: An argument has the wrong type, shape or range, or memory does not hold the edges.

    Example:
        >>> x = torch.tensor([[[0.0], [1.0], [3.0]]])
        >>> distance(x, x, 1.5).to_dense()[0].int().tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    sides = Sides.of(query, key, ptr, is_causal)
    checks.number("threshold", threshold, "[0, inf]", "It is a distance.")
    if cap is not None:
        cap = min(checks.integer("cap", cap, 1, "It is the largest number of keys of a query."), sides.num_keys)

    def near(scores: Tensor, possible: Tensor, part: Part) -> Tensor:
        inside = possible & (scores >= -threshold)
        return inside if cap is None else largest(cap)(scores.masked_fill_(~inside, -torch.inf), inside, part)

    def score(query: Tensor, key: Tensor) -> Tensor:
        return -torch.cdist(query, key, compute_mode=EXACT)

    return sides.graph(*streamed(sides, sides.key, sides.key_ptr, sides.reach, near, score))


@torch.no_grad()
def bucketing(
    query: Tensor, key: Tensor, num_buckets: int, *, ptr: Ptr = None, is_causal: bool = False
) -> AttentionGraph:
    r"""Each query attends to the keys that share a bucket with it in any dimension.

    In each dimension the queries of a sequence are ranked, and so are its keys; rank :math:`\rho` of n is in bucket
    :math:`\lfloor \rho \beta / n \rfloor`. Buckets have equal sizes, so there are at most :math:`r \lceil n/\beta
    \rceil \lceil m / \beta \rceil \beta` edges of a head and sequence, whatever the tokens hold. Cost O(H r (N + M) log
    (N + M) + E), E before repeats are taken out.

    Args:
        query: Projected queries, ``[H, N, r]``.
        key: Projected keys, ``[H, M, r]``.
        num_buckets: Buckets :math:`\beta` of a dimension; the square root of n gives O(n^1.5) edges.
        ptr: As :func:`gold_graph`.
        is_causal: Refused: ranks depend on later tokens.

    Raises:
        TypeError, ValueError: As :func:`distance`; or ``is_causal``.

    Example:
        >>> x = torch.tensor([[[0.1], [5.0], [0.3], [7.0]]])
        >>> bucketing(x, x, 2).to_dense()[0].int().tolist()
        [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
    """
    sides = Sides.of(query, key, ptr, is_causal)
    buckets = checks.integer("num_buckets", num_buckets, 1, "It is the number of buckets of a dimension.")
    if is_causal:
        raise ValueError(
            "Expected no 'is_causal' with buckets (got True). Ranks depend on later tokens; take 'distance' or "
            "'clustering'."
        )
    found = []
    every = torch.arange(sides.heads * sides.num_queries, device=query.device)
    for dim in range(query.size(2)):
        mine = _bucket(sides.query[..., dim], sides.query_ptr, sides.query_sequence, buckets)
        theirs = _bucket(sides.key[..., dim], sides.key_ptr, sides.key_sequence, buckets)
        order, low, _, _, high = sides.grouped(mine, theirs, buckets)
        row, at = ranges(every, low, high)
        found.append((row, order[at]))
    row, col = (torch.cat(parts) for parts in zip(*found, strict=True))
    return sides.graph(row, col)


def _bucket(x: Tensor, ptr: Tensor, sequence: Tensor, buckets: int) -> Tensor:
    """The bucket of each token, ``[H, N]``, by its rank in its sequence."""
    order = x.argsort(dim=1, stable=True)
    order = order.gather(1, sequence[order].argsort(dim=1, stable=True))
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(x.size(1), device=x.device).expand_as(order))
    return (rank - ptr[sequence]) * buckets // ptr.diff()[sequence]


@torch.no_grad()
def clustering(
    query: Tensor,
    key: Tensor,
    centroids: Tensor,
    top: int = 1,
    cap: int | None = None,
    *,
    ptr: Ptr = None,
    is_causal: bool = False,
) -> AttentionGraph:
    """Each query attends to the keys that share a cluster with it.

    A token is in the m clusters of its nearest centroids. Cost O(H (N + M)(K r + m log (N + M)) + E), E before repeats
    are taken out; without a cap nothing bounds it.

    Args:
        query: Projected queries, ``[H, N, r]``.
        key: Projected keys, ``[H, M, r]``.
        centroids: Of :func:`fit_centroids`, ``[H, K, r]``, or ``[1, K, r]`` for all heads.
        top: Clusters m of a token, at most K.
        cap: Most keys of a sequence in a cluster, the nearest to its centroid, equal ones by the lower key. None: no
            limit.
        ptr: As :func:`gold_graph`.
        is_causal: As :func:`gold_graph`; refused with a cap, whose ranks depend on later tokens.

    Raises:
        TypeError, ValueError: As :func:`distance`; or ``is_causal`` with a cap.
    """
    sides = Sides.of(query, key, ptr, is_causal)
    checks.tensors(centroids=centroids)
    checks.shape("centroids", centroids, (None, None, query.size(2)), "[H, K, r]", "They are as wide as the queries.")
    checks.floating(centroids=centroids)
    checks.same_device("query", query, centroids=centroids)
    clusters = centroids.size(1)
    if centroids.size(0) not in (1, sides.heads):
        raise ValueError(
            f"Expected 'centroids' to be [{sides.heads}, K, r] or [1, K, r] (got {list(centroids.shape)}). "
            "Each head has its own, or all share them."
        )
    top = checks.integer("top", top, 1, "It is the number of clusters of a token.")
    if top > clusters:
        raise ValueError(f"Expected 'top' to be at most {clusters}, the number of centroids (got {top}). Lower it.")
    if cap is not None:
        cap = min(checks.integer("cap", cap, 1, "It is the largest number of keys of a cluster."), sides.num_keys)
        if is_causal:
            raise ValueError("Expected no 'cap' with 'is_causal' (got both). Its ranks depend on later tokens.")
    centroids = centroids.to(query.dtype).expand(sides.heads, -1, -1)
    mine, theirs = (_nearest(x, centroids, top) for x in (sides.query, sides.key))
    group = theirs[0] if cap is None else _capped(*theirs, sides, clusters, cap)
    order, low, _, after, high = sides.grouped(mine[0], group, clusters + 1)
    every = torch.arange(sides.heads * sides.num_queries, device=query.device).repeat_interleave(top)
    row, at = ranges(every, low, after if is_causal else high)
    return sides.graph(row, order[at])


def _nearest(x: Tensor, centroids: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The clusters of each token, ``[H, N, m]``, and its distances to their centroids."""
    far, cluster = torch.cdist(x, centroids, compute_mode=EXACT).sort(dim=2, stable=True)
    return cluster[..., :top], far[..., :top]


def _capped(cluster: Tensor, far: Tensor, sides: Sides, clusters: int, cap: int) -> Tensor:
    """The clusters of each key, ``[H, M, m]``; ``clusters``, which no query is in, beyond the nearest ``cap``."""
    head = torch.arange(sides.heads, device=far.device)[:, None, None]
    group = ((head * (sides.key_ptr.numel() - 1) + sides.key_sequence[:, None]) * clusters + cluster).flatten()
    order = far.flatten().argsort(stable=True)
    order = order[group[order].argsort(stable=True)]
    of = group[order]
    rank = torch.arange(of.numel(), device=far.device) - torch.searchsorted(of, of)
    return torch.where(torch.empty_like(rank).scatter_(0, order, rank).view_as(cluster) < cap, cluster, clusters)


class SparsefinderSource(GraphSource):
    """Chooses what a projection and a rule foretell, with a window and global tokens beside it.

    Neither learns from the loss of the task: fit the projection first (:func:`fit_projection`).

    Args:
        projection: Of the heads of the layer.
        predictor: :func:`distance`, :func:`bucketing` or :func:`clustering`, or a rule like them.
        window: Each token also attends to tokens at this distance or less. None: no window.
        num_global: The first tokens of a sequence also attend to all of it, and all of it to them.
        **options: Of the predictor, e.g. ``threshold=1.0``. Tensors, such as centroids, become buffers.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range, or the predictor does not take an option.

    Example:
        >>> source = SparsefinderSource(Projection(8, heads=2), bucketing, window=1, num_buckets=4)
        >>> tokens, ptr = torch.randn(2, 10, 8), torch.tensor([0, 4, 10])
        >>> source(tokens, tokens, ptr, ptr, seed=0).graph.heads
        2
    """

    def __init__(
        self,
        projection: Projection,
        predictor: Callable[..., AttentionGraph],
        *,
        window: int | None = None,
        num_global: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(projection, nn.Module):
            raise TypeError(
                f"Expected 'projection' to be a module such as Projection (got {type(projection).__name__}). "
                "It takes queries and keys to few dimensions."
            )
        self.num_global = checks.integer("num_global", num_global, 0, "It is a number of tokens.")
        self.projection = projection
        self.rule = SelectorSource(predictor, window=window, **options)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        query_ptr: Tensor,
        key_ptr: Tensor,
        *,
        bipartite: bool = False,
        is_causal: bool = False,
        seed: int,
        sequence_ids: Tensor | None = None,
    ) -> Choice:
        """As :meth:`GraphSource.forward`."""
        if bipartite and self.num_global:
            raise ValueError(
                "Expected the same tokens as queries and keys with 'num_global' (got a pair). Leave it out."
            )
        sides = (*self.projection(query, key), query_ptr, key_ptr)
        graph = self.rule(*sides, bipartite=bipartite, is_causal=is_causal, seed=seed, sequence_ids=sequence_ids).graph
        if self.num_global:
            graph = graph | patterns.global_tokens(None, self.num_global, is_causal=is_causal, ptr=query_ptr)
        return Choice(graph)

    def extra_repr(self) -> str:
        """The rule and its options."""
        return f"{self.rule.extra_repr()}, num_global={self.num_global}"


# ------------------------------------------------------------------------------------------------------------ measuring


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
