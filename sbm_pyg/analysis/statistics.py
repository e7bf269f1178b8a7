"""Statistics of attention graphs in linear time, communities of tokens, and networkx graphs.

In: an :class:`~sbm_pyg.AttentionGraph`, sampled or given. Out: numbers per sequence and head, or a networkx graph. Not
here: paths (``hamiltonian``), the conditions of universality (``conditions``), and pictures (``plots``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import pairwise
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..graphs.graph import AttentionGraph, check_graph, resolve_index
from ..ops import checks
from ..sources.sbm import SBM, check_model
from .hamiltonian import scipy_sparse
from .walks import Array, breadth_first, compare_rows

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["GraphStatistics", "communities_of", "graph_statistics", "to_networkx"]

Communities = SBM | Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class GraphStatistics:
    """Statistics of each sequence and head; :func:`graph_statistics` returns them, ``print`` shows them as a table.

    The statistics describe the directed graph from keys to queries. Its nodes are tokens, or queries and keys as
    separate nodes if queries and keys differ. All but the degrees are ``[B, H]``, float64 or int64, and NaN if
    undefined.

    Args:
        density: Fraction of the pairs that are edges.
        in_degree: Number of keys of each query, ``[H, N]``.
        out_degree: Number of queries of each key, ``[H, M]``.
        empty_queries: Fraction of the queries without edges, whose attention output is zero.
        unread_keys: Fraction of the keys that no query attends to.
        self_loops: Fraction of the tokens that attend to themselves; 0 if queries and keys are separate nodes.
        reciprocity: Fraction of the edges that also exist in the opposite direction. As in networkx, self-loops count
            as edges but not as reciprocated edges.
        weak_components: Number of weakly connected components.
        strong_components: Number of strongly connected components.
        largest_strong: Fraction of the nodes in the largest strongly connected component.
        diameter_least: Lower bound of the diameter, from six searches; infinite unless strongly connected.
        diameter_most: Upper bound, from the same searches; at most twice the diameter.
        spectral_gap: Second smallest eigenvalue of the normalized Laplacian of the undirected graph, in [0, 2], to
            about seven digits: 0 if the graph is disconnected, about 1 if one step mixes all. NaN if not computed.
        modularity: Excess of edges within communities over the number that the degrees explain (Leicht and Newman,
            2008), in [-1, 1). NaN without communities.
    """

    density: Tensor
    in_degree: Tensor
    out_degree: Tensor
    empty_queries: Tensor
    unread_keys: Tensor
    self_loops: Tensor
    reciprocity: Tensor
    weak_components: Tensor
    strong_components: Tensor
    largest_strong: Tensor
    diameter_least: Tensor
    diameter_most: Tensor
    spectral_gap: Tensor
    modularity: Tensor

    def rows(self) -> list[dict[str, float]]:
        """One dict for each sequence and head, with the numbers of both and the statistics of shape ``[B, H]``."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if not field.name.endswith("_degree")}
        sequences, heads = self.density.shape
        return [
            {"sequence": sequence, "head": head} | {name: value[sequence, head].item() for name, value in named.items()}
            for sequence in range(sequences)
            for head in range(heads)
        ]

    def __str__(self) -> str:
        rows = self.rows()
        names = [name for name in rows[0] if not all(math.isnan(row[name]) for row in rows)]
        cells = [[f"{row[name]:.4g}" for row in rows[:12]] for name in names]
        width = max(len(cell) for column in cells for cell in column)
        lines = [
            f"{name.replace('_', ' '):<18}" + "".join(f"{cell:>{width + 2}}" for cell in column)
            for name, column in zip(names, cells, strict=True)
        ]
        return "\n".join(lines + ([f"... and {len(rows) - 12:,} more"] if len(rows) > 12 else []))


def graph_statistics(
    graph: AttentionGraph,
    *,
    communities: Communities | None = None,
    bipartite: bool | None = None,
    spectral_gap: bool = True,
) -> GraphStatistics:
    """Degrees, components, distances and structure of every sequence and head.

    The statistics are computed from the compressed rows, for all sequences and heads at once, in O(HN + E). The
    spectral gap costs dozens to hundreds of products with the matrix for each sequence and head, or, if breadth-first
    layers are narrow, a factorisation in O(N) times their squared width. Values equal those of networkx
    (``tests/test_analysis.py``) in a fraction of its time (docs/analysis.md).

    Args:
        graph: Any graph.
        communities: Communities for the modularity: an :class:`SBM` over the same tokens, or blocks of tokens
            (:func:`communities_of`); or the numbers of communities of the tokens ``[H, N]`` int64, or a pair of such
            tensors for queries ``[H, N]`` and keys ``[H, M]``.
        bipartite: Queries and keys are separate nodes. None: only if a sequence has different numbers of them.
        spectral_gap: Compute the spectral gap.

    Returns:
        The statistics, on the CPU.

    Raises:
        ImportError: scipy is not installed.
        TypeError: ``graph`` is not a graph, or communities are not integers.
        ValueError: Communities do not fit the graph, or ``bipartite=False`` and N != M.

    Example:
        >>> graph = AttentionGraph.from_dense(torch.tensor([[1, 1, 0], [1, 0, 0], [0, 1, 1]]))
        >>> print(graph_statistics(graph, spectral_gap=False))
        sequence                0
        head                    0
        density            0.5556
        empty queries           0
        unread keys             0
        self loops         0.6667
        reciprocity           0.4
        weak components         1
        strong components       2
        largest strong     0.6667
        diameter least        inf
        diameter most         inf
    """
    check_graph(graph)
    checks.flag("bipartite", bipartite, "With True, queries and keys are separate nodes.", optional=True)
    checks.flag("spectral_gap", spectral_gap, "With False, it is not computed.")
    labels = None if communities is None else _labels(graph, communities)
    graph = graph.to("cpu")
    heads, sequences, num_queries, num_keys = graph.heads, graph.num_sequences, graph.num_queries, graph.num_keys
    square = torch.equal(graph.query_ptr, graph.key_ptr)
    what, way_out = "to be True if sequences have different numbers of queries and keys", "Pass bipartite=True."
    checks.require(bipartite is not False or square, "bipartite", what, f"N = {num_queries}, M = {num_keys}", way_out)
    split = not square if bipartite is None else bipartite

    group, key_group = (_row_groups(ptr, heads) for ptr in (graph.query_ptr, graph.key_ptr))  # b * H + h of each row
    node_group = np.concatenate([group, key_group]) if split else group
    cells, count = sequences * heads, len(node_group)
    rows = _block_diagonal(graph, count, heads * num_queries if split else 0)
    columns = rows.T.tocsr()
    in_degree, read = graph.degree, np.diff(columns.indptr)[-heads * num_keys :].astype(np.int64)
    out_degree = torch.from_numpy(read).view(heads, num_keys)

    def total(groups: Array, weights: Array | Tensor | None = None) -> Array:
        return np.bincount(groups, weights if weights is None else np.asarray(weights).ravel(), minlength=cells)

    queries, keys, nodes, edges = total(group), total(key_group), total(node_group), total(group, in_degree)
    of_queries, of_keys = (np.zeros(len(x), np.int64) for x in (group, key_group)) if labels is None else labels
    self_edges, returned, within = np.zeros((3, count), np.int64)
    padding = np.zeros(count - len(group), np.int64)  # if nodes are queries, then keys
    compare_rows(
        rows.indptr, rows.indices, columns.indptr, columns.indices, np.concatenate([of_queries, padding]),
        np.concatenate([np.zeros(count - len(key_group), np.int64), of_keys]), self_edges, returned, within,
    )  # fmt: skip
    depth = np.empty(count, np.int64)
    roots = _busiest(rows, columns, node_group, cells)
    # columns lead from keys to queries, as edges do
    reached = breadth_first(columns.indptr, columns.indices, roots, depth)
    one_component = reached == count and breadth_first(rows.indptr, rows.indices, roots, depth) == count
    one_each = (np.ones(cells, np.int64), nodes)
    kinds = ("weak", "strong")
    weak, strong = (one_each if one_component else _components(rows, node_group, cells, kind) for kind in kinds)
    least, most = _diameter(rows, columns, node_group, roots, strong[0] == 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        modularity = np.full(cells, math.nan)
        if labels is not None:
            expected = _degree_products(labels, (group, key_group), (in_degree, out_degree), cells)
            modularity = total(node_group, within) / edges - expected / edges**2
        values = {
            "empty_queries": total(group[in_degree.flatten().numpy() == 0]) / queries,
            "unread_keys": total(key_group[out_degree.flatten().numpy() == 0]) / keys,
            "self_loops": total(node_group, self_edges) / nodes,
            "reciprocity": total(node_group, returned) / edges,
            "weak_components": weak[0],
            "strong_components": strong[0],
            "largest_strong": strong[1] / nodes,
            "diameter_least": least,
            "diameter_most": most,
            "spectral_gap": _spectral_gaps(graph, split, weak[0]) if spectral_gap else np.full(cells, math.nan),
            "modularity": modularity,
        }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()}
    shaped = {name: tensor.view(sequences, heads) for name, tensor in tensors.items()}
    return GraphStatistics(density=graph.density, in_degree=in_degree, out_degree=out_degree, **shaped)


def communities_of(sbm: SBM) -> tuple[Tensor, Tensor]:
    """The community with the largest membership of each query, ``[H, N]``, and of each key, ``[H, M]``.

    Raises:
        TypeError: ``sbm`` is not a model.
    """
    check_model(sbm)
    return sbm.query_membership.argmax(-1), sbm.key_membership.argmax(-1)


def to_networkx(
    graph: AttentionGraph,
    sequence: int | None = None,
    head: int | Literal["all"] | None = None,
    *,
    view: str = "tokens",
    sbm: SBM | None = None,
) -> nx.DiGraph[Any]:
    """networkx graph of one sequence, with the probabilities and communities of a model. Edges run from key to query.

    Args:
        graph: Any graph.
        sequence: Number of the sequence; may be None if there is only one.
        head: Number of the head; may be None if there is only one. ``"all"`` returns a ``MultiDiGraph`` in which the
            head is the edge key and the attribute ``head``.
        view: ``"tokens"``: nodes are tokens (needs N = M). ``"bipartite"``: nodes are ``("key", j)`` and ``("query",
            i)``, with networkx's attribute ``bipartite`` 0 and 1.
        sbm: Model over the same tokens, or blocks of tokens, and heads. Edges then get the attribute ``probability``,
            and nodes, with a single head, ``community`` (the community of the query if nodes are tokens).

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The sequence, head or view does not exist or is ambiguous, the model is over other tokens, or nodes
            are tokens and N != M.

    Example:
        >>> to_networkx(AttentionGraph.from_dense(torch.ones(2, 3)), view="bipartite").edges[("key", 2), ("query", 0)]
        {}
    """
    check_graph(graph)
    if sbm is not None:
        check_model(sbm)
    way_out = "Pass head='all' for all heads at once."
    checks.require(view in ("tokens", "bipartite"), "view", "to be 'tokens' or 'bipartite'", repr(view), way_out)
    result = graph.to_networkx(sequence, head, bipartite=view == "bipartite")
    if sbm is None:
        return result
    sequence = resolve_index(sequence, graph.num_sequences, "sequence")
    all_heads = head == "all"
    head = None if all_heads else resolve_index(head, graph.heads, "head")  # type: ignore[arg-type]
    one, query = graph.sequence(sequence), graph.edge_index[1]
    probabilities = graph.spread(sbm.on(graph.blocks).detach().clamp(max=1))  # more with a target density
    first, first_key = int(graph.query_ptr[sequence]), int(graph.key_ptr[sequence])
    inside = (query >= first) & (query < first + one.num_queries)
    for source, target, number, p in zip(
        *one.edge_index.tolist(), one.edge_head.tolist(), probabilities[inside].tolist(), strict=True
    ):
        if all_heads or number == head:
            ends = (("key", source), ("query", target)) if view == "bipartite" else (source, target)
            result.edges[(*ends, number) if all_heads else ends]["probability"] = p
    if head is not None:
        queries, keys = (labels[head].tolist() for labels in graph.over_tokens(*communities_of(sbm)))
        for node in result:
            kind, number = node if view == "bipartite" else ("query", node)
            result.nodes[node]["community"] = queries[first + number] if kind == "query" else keys[first_key + number]
    return result


# --------------------------------------------------------------------------------------------------------------- parts


def _labels(graph: AttentionGraph, communities: Communities) -> tuple[Array, Array]:
    """Communities of the queries ``[H*N]`` and of the keys ``[H*M]``."""
    if isinstance(communities, SBM):
        communities.check(graph.blocks)
        pair = graph.over_tokens(*communities_of(communities))
    else:
        pair = communities if isinstance(communities, tuple) else (communities, communities)
    tensors = len(pair) == 2 and all(isinstance(labels, Tensor) for labels in pair)
    if not tensors or any(labels.is_floating_point() or labels.is_complex() for labels in pair):
        raise TypeError(
            f"Expected 'communities' to be an SBM, a tensor of integers or a pair of those (got {short(communities)}). "
            "They are numbers of communities."
        )
    for name, labels, size in zip(("queries", "keys"), pair, (graph.num_queries, graph.num_keys), strict=True):
        what = f"of the {name} to be [{graph.heads}, {size}]"
        way_out = "They number the community of each token in each head."
        checks.require(labels.shape == (graph.heads, size), "communities", what, labels.shape, way_out)
    query, key = (labels.cpu().flatten().numpy() for labels in pair)
    return query, key


def _row_groups(ptr: Tensor, heads: int) -> Array:
    """Number ``b * H + h`` of the sequence and head of each row ``h * N + i``, ``[H*N]``."""
    batch = torch.repeat_interleave(ptr.diff())
    return (batch * heads + torch.arange(heads)[:, None]).flatten().numpy()


def _block_diagonal(graph: AttentionGraph, count: int, shift: int) -> Any:
    """All heads as one block-diagonal matrix ``[count, count]`` in scipy's compressed rows; keys start at ``shift``."""
    size = np.int32 if max(count, graph.num_edges) < 2**31 else np.int64
    index: Array = graph.col.numpy().astype(size)
    ends = graph.rowptr[torch.arange(graph.heads + 1, device=graph.device) * graph.num_queries].tolist()
    for head, (first, end) in enumerate(pairwise(ends)):
        index[first:end] = index[first:end] + (shift + head * graph.num_keys)
    ptr = np.full(count + 1, graph.num_edges, size)
    ptr[: graph.rowptr.numel()] = graph.rowptr.numpy()
    return scipy_sparse().csr_array((np.ones(len(index), np.int8), index, ptr), shape=(count, count))


def _components(rows: Any, group: Array, cells: int, kind: str) -> tuple[Array, Array]:
    """Number of components and size of the largest, each ``[B*H]``."""
    _, labels = scipy_sparse().csgraph.connected_components(rows, connection=kind)
    first = np.unique(labels, return_index=True)[1]
    largest = np.zeros(cells, np.int64)
    np.maximum.at(largest, group[first], np.bincount(labels))
    return np.bincount(group[first], minlength=cells), largest


def _busiest(rows: Any, columns: Any, group: Array, cells: int) -> Array:
    """The node of largest degree in each group, ``[B*H]``."""
    order = np.lexsort((np.diff(rows.indptr) + np.diff(columns.indptr), group))
    return order[np.searchsorted(group[order], np.arange(cells), side="right") - 1]


def _diameter(rows: Any, columns: Any, group: Array, roots: Array, strong: Array) -> tuple[Array, Array]:
    """Bounds of the diameter, each ``[B*H]``, by searches from distant nodes and from a node halfway between them."""
    cells, index, depth = len(roots), np.arange(len(group)), np.empty(len(group), np.int64)

    def sweep(matrix: Any, roots: Array, fraction: float = 1.0) -> tuple[Array, Array]:
        """Largest distance in each group, and a node at the given fraction of this distance."""
        breadth_first(matrix.indptr, matrix.indices, roots, depth)
        last, nodes = np.zeros(cells, np.int64), np.zeros(cells, np.int64)
        np.maximum.at(last, group, depth)
        at = index[depth == np.rint(fraction * last).astype(np.int64)[group]]
        nodes[group[at]] = at
        return last, nodes

    out, farthest = sweep(columns, roots)
    back, farthest_back = sweep(rows, roots)
    far_back, _ = sweep(rows, farthest)
    far, middle = sweep(columns, farthest_back, 0.5)
    out_of_middle, into_middle = sweep(columns, middle)[0], sweep(rows, middle)[0]
    least = np.maximum.reduce([out, back, far, far_back, out_of_middle, into_middle])
    most = np.minimum(out + back, out_of_middle + into_middle)
    return np.where(strong, least, math.inf), np.where(strong, most, math.inf)


def _spectral_gaps(graph: AttentionGraph, split: bool, parts: Array) -> Array:
    """Spectral gaps, ``[B*H]``; ``parts`` counts the components."""
    gaps: list[float] = []
    for sequence in range(graph.num_sequences):
        one = graph.sequence(sequence)
        for head in range(graph.heads):
            if parts[len(gaps)] > 1:
                gaps.append(0.0)
                continue
            rows = one.to_scipy(head)
            back = rows.T.tocsr()
            joined = scipy_sparse().block_array([[None, rows], [back, None]], format="csr") if split else rows + back
            gaps.append(_gap(joined))
    return np.array(gaps)


def _gap(both: Any) -> float:
    """Second smallest eigenvalue of I - D^-1/2 W D^-1/2 of a connected graph, from the second largest of W scaled."""
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

    count = both.shape[0]
    if count == 1:
        return math.nan
    degree = np.diff(both.indptr)
    scale = 1 / np.sqrt(degree)
    index, ptr = both.indices.astype(np.int32), both.indptr.astype(np.int32)
    both = scipy_sparse().csr_array((np.repeat(scale, degree) * scale[index], index, ptr), shape=both.shape)
    if count <= 256:
        return float(np.linalg.eigvalsh(np.eye(count) - both.toarray())[1])
    depth, start = np.empty(count, np.int64), np.random.default_rng(0).standard_normal(count)
    breadth_first(ptr, index, np.zeros(1, np.int64), depth)
    width = np.bincount(depth)  # nodes at each distance from the first
    # A factorisation costs the cube of each layer's width. Each of two attempts by iterations needs about one product
    # with the matrix and with 40 vectors per layer.
    if (width**3.0).sum() > 2 * len(width) * (both.nnz + 40 * count):
        first = np.sqrt(degree / degree.sum())  # the eigenvector of the largest eigenvalue, 1, is moved to -2
        operator = LinearOperator(
            (count, count), matvec=lambda x: both @ x - first * (3 * (first @ x)), dtype=np.float64
        )
        options = {"k": 1, "which": "LA", "v0": start, "maxiter": 40, "ncv": 40, "return_eigenvectors": False}
        try:
            # the error of an eigenvalue is about the square of the tolerance
            gap = 1 - float(eigsh(operator, tol=1e-4, **options)[0])
            return gap if gap > 0.05 else 1 - float(eigsh(operator, tol=1e-9, **options)[0])
        except ArpackError:
            pass  # eigenvalues crowd at 1: a factorisation costs less than separating them by iterations
    near = 1 + len(width) ** -2.0  # 1 plus about the gap of a path of that length
    return 1 - float(eigsh(both, k=2, sigma=near, which="LM", v0=start, return_eigenvectors=False).min())


def _degree_products(
    labels: tuple[Array, Array], groups: tuple[Array, Array], degrees: tuple[Tensor, Tensor], cells: int
) -> Array:
    """Sum over communities of the degrees of their queries times the degrees of their keys, ``[B*H]``."""
    named = np.stack([np.concatenate(groups), np.concatenate(labels)])
    communities, index = np.unique(named, axis=1, return_inverse=True)
    degree = [counts.flatten().numpy() for counts in degrees]
    halves = np.split(index.ravel(), [len(degree[0])])
    queries, keys = (np.bincount(*pair, minlength=communities.shape[1]) for pair in zip(halves, degree, strict=True))
    return np.bincount(communities[0], queries * keys, minlength=cells)
