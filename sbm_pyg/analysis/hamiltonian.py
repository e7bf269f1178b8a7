"""Hamiltonian paths of attention graphs: condition 2 of the universality proof, and the measure of Lemma 1.

In: an :class:`~sbm_pyg.AttentionGraph` of one sequence whose queries and keys are the same tokens. Out: a path,
checked edge by edge, or a certificate of its absence, or the time spent without an answer. Not here: the other two
conditions (``conditions``).

The problem is NP-complete. The search tries cheap methods first: four kinds of certificates of absence, each in O(E) or
O(E sqrt(n)); then a construction by assignment, patching and rotation, which succeeds on most graphs that have a path;
then an exact search by OR-tools.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np

from ..graphs.graph import AttentionGraph, check_graph
from ..graphs.ragged import draw_seed
from ..ops import checks
from ..ops.cpu.threads import compilation
from ..ops.values import require_values
from .walks import Array, breadth_first, match, merge_cycles, parts_without, rotate, topological_order

__all__ = ["Certificate", "HamiltonianPath", "hamiltonian_path", "is_hamiltonian_path"]

Status = Literal["FOUND", "ABSENT", "UNKNOWN"]


@dataclass(frozen=True)
class Certificate:
    """A proof that a graph has no Hamiltonian path, which can be checked independently of the search.

    ================  =================================================================================================
    ``kind``          meaning of ``tokens`` and ``others``
    ================  =================================================================================================
    ``sources``       ``tokens``: two tokens without incoming edges; a path has one first token
    ``sinks``         ``tokens``: two tokens without outgoing edges; a path has one last token
    ``incomparable``  ``tokens``: two tokens a, b without a walk from a to b or from b to a
    ``predecessors``  ``tokens``: tokens that only ``others`` have edges to, at least two fewer; all but one token need
                      a predecessor of their own
    ``separator``     ``tokens``: one token whose removal leaves three or more parts; ``others`` has a member of each; a
                      path without one token has two parts
    ``search``        both are empty: OR-tools found no path in an exhaustive search
    ================  =================================================================================================

    Self-loops never count. For ``predecessors`` and ``separator``, edges that skip a strongly connected component do
    not count either: if a path exists, the components form a chain, and the path visits them in that order.
    """

    kind: Literal["sources", "sinks", "incomparable", "predecessors", "separator", "search"]
    tokens: tuple[int, ...] = ()
    others: tuple[int, ...] = ()

    def __str__(self) -> str:
        tokens, others = first_few(self.tokens), first_few(self.others)
        return {
            "sources": f"no edge enters tokens {tokens}",
            "sinks": f"no edge leaves tokens {tokens}",
            "incomparable": (
                f"no walk leads from token {self.tokens[0]} to {self.tokens[-1]} or back" if self.tokens else ""
            ),
            "predecessors": (
                f"the {len(self.tokens)} tokens {tokens} can follow only "
                f"the {len(self.others)} tokens {others or 'of an empty set'}"
            ),
            "separator": (
                f"without token {tokens} the rest falls into {len(self.others)} parts (around tokens {others})"
            ),
            "search": "an exhaustive search by OR-tools found none",
        }[self.kind]


@dataclass(frozen=True)
class HamiltonianPath:
    """Result of :func:`hamiltonian_path`.

    Its truth value is True if a path was found, False if no path exists, and an error if that is unknown.

    Args:
        status: ``"FOUND"``, ``"ABSENT"`` or ``"UNKNOWN"``.
        path: All tokens, each attended to by the next, if found; else None.
        certificate: A proof that there is no path, if absent; else None.
        method: The method that gave the answer.
        seconds: Time spent, without the compilation of kernels.
    """

    status: Status
    path: tuple[int, ...] | None
    certificate: Certificate | None
    method: str
    seconds: float

    def __bool__(self) -> bool:
        what, way_out = "to be 'FOUND' or 'ABSENT' for a yes or no", "Read `.status`, or raise `time_limit`."
        checks.require(self.status != "UNKNOWN", "status", what, "'UNKNOWN'", way_out)
        return self.status == "FOUND"

    def __str__(self) -> str:
        if self.path is not None:
            return f"FOUND ({self.method}; {self.seconds:.2f} s): {first_few(self.path)}"
        if self.certificate is not None:
            return f"ABSENT ({self.seconds:.2f} s): {self.certificate}"
        return f"UNKNOWN ({self.seconds:.1f} s): {self.method}"


def hamiltonian_path(graph: AttentionGraph, *, time_limit: float = 10.0, seed: int = 0) -> HamiltonianPath:
    """Find a path along the edges that visits each token once, or a proof that no such path exists.

    Edges run from key to query. The search tries the order of the tokens, certificates of absence
    (:class:`Certificate`), a construction, and an exact search by OR-tools (a circuit constraint). In the construction,
    a dummy token, joined to all, closes the path to a cycle; an assignment with random weights covers all tokens by
    cycles; cycles merge if two arcs can be exchanged (Karp, 1979); rotations of a path absorb the others (Angluin and
    Valiant, 1979). Certificates cost O(E sqrt(N)), the construction O(N) per rotation after an assignment; N = 4096 at
    5 % density takes 0.15 s.

    Args:
        graph: One sequence with N = M; several heads count as the union of their edges.
        time_limit: Seconds after which the answer is ``"UNKNOWN"``, positive. Certificates are always tried, and an
            assignment or rotation is never interrupted; the first can take seconds at N = 50,000. The import of
            OR-tools and the compilation of kernels in the first call do not count.
        seed: Seed of the search.

    Returns:
        The answer. Every path is checked edge by edge.

    Raises:
        ImportError: scipy is not installed.
        TypeError, ValueError: The graph has several sequences or N != M, the time limit is not positive, or the seed is
            not an integer.

    Example:
        >>> import torch
        >>> graph = AttentionGraph.from_edge_index(torch.tensor([[0, 2, 1], [2, 1, 3]]))
        >>> hamiltonian_path(graph).path
        (0, 2, 1, 3)
        >>> print(hamiltonian_path(AttentionGraph.from_dense(torch.eye(3))).certificate)
        no edge enters tokens 0, 1

    Without OR-tools (``[analysis]`` extra) the exact search is skipped, and graphs that reach it are ``"UNKNOWN"``.
    """
    time_limit, seed = check_time_limit(time_limit), draw_seed(seed)
    with stopwatch() as elapsed:
        tokens, into = _arcs(graph)
        n = graph.num_queries
        status, method, path, certificate = _find_path(n, tokens, into, seed, time_limit, elapsed)
        listed = None if path is None else tuple(path.tolist())
        if listed is not None and not _visits_all(n, tokens, into, listed):
            raise AssertionError(f"The path by {method} is invalid. Please report this graph: it is a bug of sbm_pyg.")
        return HamiltonianPath(status, listed, certificate, method, elapsed())


def _find_path(
    n: int, tokens: Array, into: Array, seed: int, time_limit: float, elapsed: Callable[[], float]
) -> tuple[Status, str, Array | None, Certificate | None]:
    """Status, method, path and certificate."""
    for order in (np.arange(n), np.arange(n)[::-1]):
        if _visits_all(n, tokens, into, order):
            return "FOUND", "order of the tokens", order, None
    certificate = _degrees(n, tokens, into)
    if certificate is not None:
        return "ABSENT", "degrees", None, certificate
    ranks, certificate = _chain(n, tokens, into)
    if certificate is not None:
        return "ABSENT", "components", None, certificate
    if int(ranks.max()) == n - 1:  # no cycles: the chain is the path
        return "FOUND", "components", ranks.argsort(), None
    is_usable = ranks[into] - ranks[tokens] <= 1
    tokens, into = tokens[is_usable], into[is_usable]
    certificate = _matching(n, tokens, into) or _separator(n, tokens, into)
    if certificate is not None:
        return "ABSENT", "matching" if certificate.kind == "predecessors" else "cut token", None, certificate
    path = _construct(n, tokens, into, ranks, seed, elapsed, 0.4 * time_limit)
    if path is not None:
        return "FOUND", "assignment, patching and rotation", path, None
    return _search(n, tokens, into, ranks, seed, time_limit - elapsed())


def is_hamiltonian_path(graph: AttentionGraph, path: Sequence[int]) -> bool:
    """True if the path contains each token once, and each token attends to the token before it; O(E + N log E).

    Args:
        graph: As in :func:`hamiltonian_path`.
        path: Token numbers.

    Raises:
        TypeError, ValueError: As :func:`hamiltonian_path`, or the path does not consist of integers.

    Example:
        >>> import torch
        >>> is_hamiltonian_path(AttentionGraph.from_dense(torch.ones(3, 3).tril()), [0, 1, 2])
        True
    """
    tokens, into = _arcs(graph)
    try:
        steps = np.asarray(path)
        got = "" if steps.size == 0 or steps.dtype.kind in "iu" else str(steps.dtype)
    except ValueError:
        got = "lists of different lengths"
    checks.require(not got, "path", "to be integers", got, "Pass the numbers of the tokens.", TypeError)
    return _visits_all(graph.num_queries, tokens, into, steps)


def _visits_all(n: int, tokens: Array, into: Array, path: Sequence[int] | Array) -> bool:
    steps = np.asarray(path, dtype=np.int64)
    if steps.shape != (n,) or not np.array_equal(np.sort(steps), np.arange(n)):
        return False
    path_arcs, arcs = steps[1:] * n + steps[:-1], into.astype(np.int64) * n + tokens  # ascending, as rows are
    at = np.searchsorted(arcs, path_arcs)
    return bool((at < len(arcs)).all() and (n == 1 or (arcs[np.minimum(at, len(arcs) - 1)] == path_arcs).all()))


def check_time_limit(time_limit: float) -> float:
    """Check a time limit in seconds; return it, at most 10^9."""
    if not isinstance(time_limit, Real) or not time_limit > 0:
        raise ValueError(
            f"Expected 'time_limit' to be a positive number of seconds (got {time_limit!r}). The default is 10."
        )
    return float(min(time_limit, 10**9))


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds since the start, without the compilation of kernels."""
    start = time.perf_counter()
    with compilation() as compiling:
        yield lambda: time.perf_counter() - start - compiling()


def first_few(tokens: Sequence[int], count: int = 8) -> str:
    """The first numbers of a list as text, and the length of a longer list."""
    text = ", ".join(str(token) for token in tokens[:count])
    return text if len(tokens) <= count else f"{text}, ... ({len(tokens):,} in all)"


# ------------------------------------------------------------------------------------------------------- arcs and rows


def one_sequence(graph: AttentionGraph, name: str = "graph") -> AttentionGraph:
    """Check that a graph is one sequence with the same tokens as queries and keys; return it on the CPU."""
    check_graph(graph, name)
    require_values(graph.col, name)
    way_out = "Take one with `graph.sequence(b)`."
    checks.require(graph.num_sequences == 1, name, "to be one sequence", graph.num_sequences, way_out)
    what, got = "to have the same tokens as queries and keys", f"N = {graph.num_queries}, M = {graph.num_keys}"
    checks.require(graph.num_queries == graph.num_keys, name, what, got, "Paths need one set of tokens.")
    return graph.to("cpu")


def _arcs(graph: AttentionGraph) -> tuple[Array, Array]:
    """Tail and head of each arc between different tokens, for all attention heads, sorted by (head, tail), int32."""
    graph = one_sequence(graph)
    tokens, into = (side.numpy() for side in graph.edge_index)
    if graph.heads > 1:
        arcs = np.unique(into * graph.num_keys + tokens)
        tokens, into = arcs % graph.num_keys, arcs // graph.num_keys
    keep = tokens != into
    return tokens[keep].astype(np.int32), into[keep].astype(np.int32)


def scipy_sparse() -> Any:
    """Import ``scipy.sparse`` with its graph algorithms, ``csgraph``."""
    checks.imported("scipy.sparse.csgraph", "analysis")
    return checks.imported("scipy.sparse", "analysis")


def _matrix(n: int, row: Array, column: Array) -> Any:
    """The arcs in scipy's compressed rows, ``[n, n]`` float64; columns ascend in each row, like the arcs."""
    return scipy_sparse().coo_array((np.ones(len(row)), (row, column)), shape=(n, n)).tocsr()


# -------------------------------------------------------------------------------------------------------- certificates


def _degrees(n: int, tokens: Array, into: Array) -> Certificate | None:
    for kind, side in (("sources", into), ("sinks", tokens)):
        lonely = np.flatnonzero(np.bincount(side, minlength=n) == 0)
        if len(lonely) > 1:
            return Certificate(kind, tuple(lonely[:2].tolist()))  # type: ignore[arg-type]
    return None


def _chain(n: int, tokens: Array, into: Array) -> tuple[Array, Certificate | None]:
    """Rank of each token's strong component, ``[n]``, in a chain; and a certificate if there is no chain."""
    out = _matrix(n, tokens, into)
    count, labels = scipy_sparse().csgraph.connected_components(out, connection="strong")
    if count == 1:
        return np.zeros(n, np.int64), None
    members = np.argsort(labels, kind="stable")
    first = np.concatenate([[0], np.bincount(labels, minlength=count).cumsum()])
    order = np.empty(count, np.int64)
    topological_order(out.indptr, out.indices, labels, members, first, order)
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count)
    ranks = rank[labels]
    linked = np.zeros(count - 1, bool)
    linked[ranks[tokens[ranks[into] - ranks[tokens] == 1]]] = True
    if linked.all():
        return ranks, None
    gap = int(linked.argmin())  # neighbors in a topological order need an arc of their own
    pair = (int(members[first[order[gap]]]), int(members[first[order[gap + 1]]]))
    return ranks, Certificate("incomparable", pair)


def _matching(n: int, tokens: Array, into: Array) -> Certificate | None:
    """Find, by a matching, tokens with too few predecessors: a path needs distinct predecessors of n - 1 tokens."""
    rows = _matrix(n, into, tokens)
    mate, follower = np.empty((2, n), np.int32)  # the predecessor of each token, and its successor
    match(rows.indptr, rows.indices, mate, follower)  # scipy's takes exponential time on shuffled grids
    alone = np.flatnonzero(mate < 0)
    if len(alone) < 2:
        return None
    depth = np.empty(n, np.int64)
    # from a token to the tokens that are matched to its predecessors
    breadth_first(rows.indptr, follower[rows.indices], alone[:2], depth)
    short = np.flatnonzero(depth >= 0)
    held = np.unique(tokens[np.isin(into, short)])
    return Certificate("predecessors", tuple(short.tolist()), tuple(held.tolist()))


def _separator(n: int, tokens: Array, into: Array) -> Certificate | None:
    rows = _matrix(n, into, tokens)
    both = rows + rows.T
    parts = np.zeros(n, np.int64)
    parts_without(both.indptr, both.indices, parts)
    token = int(parts.argmax())
    if parts[token] < 3:
        return None
    others = np.delete(np.arange(n), token)
    _, labels = scipy_sparse().csgraph.connected_components(both[others][:, others], directed=False)
    return Certificate("separator", (token,), tuple(others[np.unique(labels, return_index=True)[1]].tolist()))


# -------------------------------------------------------------------------------------------------------- construction


def _closed(n: int, tokens: Array, into: Array, ranks: Array) -> tuple[Array, Array]:
    """Add the arcs of a dummy token n, which joins the possible ends of a path to its possible starts."""
    begin, end = np.flatnonzero(ranks == 0), np.flatnonzero(ranks == ranks.max())
    tails = np.concatenate([tokens, end, np.full(len(begin), n)])
    heads = np.concatenate([into, np.full(len(end), n), begin])
    return tails.astype(np.int32), heads.astype(np.int32)


def _open(n: int, follow: Array) -> Array:
    """Cut a cycle through all tokens at the dummy token."""
    path, token = np.empty(n, np.int64), n
    for position in range(n):
        token = path[position] = follow[token]
    return path


def _assignment(weights: Any) -> Array | None:
    """The column of each row in the full matching of minimum weight, ``[n]`` int64, or None."""
    first, n = weights.indptr[:-1], weights.shape[0]
    mate, back = np.empty((2, n), np.int32)
    match(weights.indptr, weights.indices, mate, back)
    if (mate < 0).any():
        return None
    # scipy starts from the first free column of each row, which can take exponential time to repair
    order, matched = np.arange(weights.nnz), weights.indices == np.repeat(mate, np.diff(weights.indptr))
    order[first], order[matched] = order[matched], first
    arcs = weights.data[order], weights.indices[order], weights.indptr
    _, follow = scipy_sparse().csgraph.min_weight_full_bipartite_matching(scipy_sparse().csr_array(arcs, weights.shape))
    return follow.astype(np.int64)


def _construct(
    n: int, tokens: Array, into: Array, ranks: Array, seed: int, elapsed: Callable[[], float], limit: float
) -> Array | None:
    """A path by cycle covers, or None. The first attempts use a sample of the arcs of a dense graph, to save time."""
    random = np.random.default_rng(seed % 2**64)
    tails, heads = _closed(n, tokens, into, ranks)
    nodes = n + 1
    out, inward = _matrix(nodes, tails, heads), _matrix(nodes, heads, tails)
    forward, backward = (out.indptr, out.indices), (inward.indptr, inward.indices)
    for attempt in range(24 if n > 16 else 4):
        if attempt and elapsed() > limit:
            return None
        thin = 32 * nodes / len(tails) if attempt < 2 else 1.0
        chosen = np.flatnonzero(random.random(len(tails)) < thin) if thin < 1 else slice(None)
        sample = _matrix(nodes, tails[chosen], heads[chosen])
        sample.data[:] = 1 + random.random(sample.nnz)
        follow = _assignment(sample)
        if follow is None:  # these arcs have no cycle cover
            if thin >= 1:
                return None
            continue
        if merge_cycles(*forward, follow) == 1:
            return _open(n, follow)
        for _ in range(4):
            word = int(random.integers(1, 2**62))
            if rotate(*forward, *backward, follow, word, 500 + nodes):
                return _open(n, follow)
            back = np.empty_like(follow)  # the reversed cycles
            back[follow] = np.arange(nodes)
            if rotate(*backward, *forward, back, word, 500 + nodes):
                follow[back] = np.arange(nodes)
                return _open(n, follow)
            if elapsed() > limit:
                return None
    return None


# -------------------------------------------------------------------------------------------------------- exact search


def _search(
    n: int, tokens: Array, into: Array, ranks: Array, seed: int, limit: float
) -> tuple[Status, str, Array | None, Certificate | None]:
    """Search exhaustively for a circuit through all tokens and the dummy token."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        how = checks.install("analysis")
        return "UNKNOWN", f"the construction failed, and an exact search needs OR-tools: {how}", None, None
    start = time.perf_counter()  # after the import, which can take longer than a search
    tails, heads = _closed(n, tokens, into, ranks)
    if 1e-5 * len(tails) > limit:  # setting up the search would take all the time
        method = f"the construction failed, and {len(tails):,} arcs are too many to search in the remaining time"
        return "UNKNOWN", method, None, None
    model = cp_model.CpModel()
    used = [model.new_bool_var("") for _ in range(len(tails))]
    model.add_circuit(list(zip(tails.tolist(), heads.tolist(), used, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(limit - (time.perf_counter() - start), 0.01)
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return "ABSENT", "OR-tools", None, Certificate("search")
    if status not in (cp_model.FEASIBLE, cp_model.OPTIMAL):
        return "UNKNOWN", "neither the construction nor OR-tools finished", None, None
    chosen = np.array([solver.boolean_value(variable) for variable in used])
    follow = np.empty(n + 1, np.int64)
    follow[tails[chosen]] = heads[chosen]
    return "FOUND", "OR-tools", _open(n, follow), None
