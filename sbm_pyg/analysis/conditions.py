"""Conditions under which sparse attention is a universal approximator (Yun et al., 2020), and the two lemmas of Cho et
al. (2022), as code.

In: the patterns of the layers, as graphs or as stochastic block models. Out: for each condition, yes with evidence, no
with evidence, or unknown with the time spent. Not here: the search for Hamiltonian paths (``hamiltonian``).

A pattern lists for each query the keys that it attends to; information flows from key to query. The derivations are in
docs/analysis.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from numbers import Real
from operator import or_
from reprlib import repr as short
from typing import Any

import numpy as np
import torch

from ..graphs.graph import AttentionGraph
from ..graphs.ragged import draw_seed, offsets
from ..graphs.rows import index_type
from ..ops import checks
from ..ops.cpu import threads
from ..ops.segments import EDGES_PER_CHUNK
from ..sources import patterns as fixed
from ..sources.sbm import SBM, check_model
from .hamiltonian import (
    HamiltonianPath,
    check_time_limit,
    first_few,
    hamiltonian_path,
    one_sequence,
    scipy_sparse,
    stopwatch,
)
from .walks import spread_step

__all__ = ["Lemma2", "Universality", "expected_graph", "lemma2", "spread_steps", "universality"]

Pattern = AttentionGraph | SBM


@dataclass(frozen=True)
class Universality:
    """Result of :func:`universality`; ``print`` shows it as a page.

    As a bool it is :attr:`holds`; if that is unknown, ``bool`` raises an error.

    Args:
        num_tokens: Number of tokens n.
        edges: Number of edges of each pattern, ``[P]``.
        source: Description of the patterns.
        missing_self_loops: For each pattern, the tokens that do not attend to themselves (condition 1).
        hamiltonian: A path through the union, a certificate that no path exists, or the time spent (condition 2).
        s: The least number of steps after which every token has received information from all tokens (condition 3);
            ``math.inf`` if no number suffices, None if the time limit was reached first.
        strongly_connected: The union has a walk from each token to each token. Given condition 1, this is equivalent to
            a finite s.
        unreached: Two tokens a, b such that no information of a ever reaches b, if the union is not strongly connected;
            else None.
        seconds: Time spent, without the compilation of kernels.
    """

    num_tokens: int
    edges: tuple[int, ...]
    source: str
    missing_self_loops: tuple[tuple[int, ...], ...]
    hamiltonian: HamiltonianPath
    s: int | float | None
    strongly_connected: bool
    unreached: tuple[int, int] | None
    seconds: float

    @property
    def hamiltonian_path(self) -> tuple[int, ...] | None:
        """The Hamiltonian path, or None if no path was found."""
        return self.hamiltonian.path

    @property
    def hamiltonian_status(self) -> str:
        """``"FOUND"``, ``"ABSENT"`` or ``"UNKNOWN"``."""
        return self.hamiltonian.status

    @property
    def holds(self) -> bool | None:
        """True if all three conditions hold, False if one fails, else None."""
        answers = [not any(self.missing_self_loops), {"FOUND": True, "ABSENT": False}.get(self.hamiltonian_status)]
        answers.append(None if self.s is None else self.s < math.inf)
        return False if False in answers else None if None in answers else True

    def __bool__(self) -> bool:
        way_out = "Read `.holds`, or raise `time_limit`."
        checks.require(self.holds is not None, "holds", "to be True or False for a yes or no", "None", way_out)
        return bool(self.holds)

    def __str__(self) -> str:
        verdict = {True: "HOLDS", False: "FAILS", None: "UNDECIDED"}[self.holds]
        densities = [f"{100 * count / self.num_tokens**2:.3g} %" for count in self.edges]
        densities[8:] = ["..."] * (len(densities) > 8)
        loops = "yes"
        if any(self.missing_self_loops):
            lacking = [
                f"pattern {n}: {first_few(tokens)}" for n, tokens in enumerate(self.missing_self_loops, 1) if tokens
            ]
            loops = "no; missing at tokens of " + "; of ".join(lacking[:4]) + ("; ..." if len(lacking) > 4 else "")
        if self.unreached is not None:
            reach = f"never (s is infinite); nothing of token {self.unreached[0]} reaches token {self.unreached[1]}"
        elif self.s == math.inf:
            reach = "never (s is infinite); the spread of information repeats without reaching all tokens"
        elif self.s is None:
            reach = "not known within the time limit"
        else:
            reach = f"yes, after s = {self.s} step{'s' * (self.s > 1)}"
        rows = {
            "checked": f"{self.source}; densities {', '.join(densities)}",
            "1. every token attends to itself": loops,
            "2. Hamiltonian path in the union": self.hamiltonian,
            "3. every token receives information from every other token": reach,
            "   union strongly connected": "yes" if self.strongly_connected else "no",
        }
        patterns = f"{len(self.edges)} pattern{'s' * (len(self.edges) > 1)}"
        lines = [f"Universality of {patterns} over {self.num_tokens:,} tokens: {verdict}"]
        lines += [f"  {name:<58}  {value}" for name, value in rows.items()]
        return "\n".join([*lines, f"  {self.seconds:.2f} s; conditions of Yun et al. 2020, Assumption 1"])


def universality(
    patterns: Pattern | Sequence[Pattern],
    *,
    threshold: float = 0.5,
    self_loops: bool = False,
    time_limit: float = 10.0,
    seed: int = 0,
) -> Universality:
    """Check the conditions under which transformers with these patterns are universal approximators.

    The conditions of Yun et al. (2020) are: every token attends to itself in every pattern; the union of the patterns
    has a Hamiltonian path; and if the patterns are applied in turn, every token receives information from all tokens
    after a finite number s of steps. Whether a *sampled* mask satisfies them depends on chance and on its density: with
    O(n) edges it hardly ever has a Hamiltonian path. So choose whether to check samples or expectations.

    Args:
        patterns: One pattern, or a list in the order of the layers. An :class:`AttentionGraph` counts as the union of
            its heads (``[graph.head(h) for h in ...]`` checks heads separately); an :class:`SBM` as its pairs of a
            probability above ``threshold``.
        threshold: Smallest probability, in [0, 1), above which a pair of a model counts as an edge.
        self_loops: Add self-loops to every pattern first, as the paper's proof does.
        time_limit: Seconds for condition 2 and for condition 3, each.
        seed: Seed of the search for a path.

    Returns:
        The report. N = 4096 takes seconds; memory O(E + N^2 / 4) bytes, O(N M K) time for a model.

    Raises:
        ImportError: scipy is not installed.
        TypeError, ValueError: There is no pattern, patterns are of several sequences or different tokens, memory does
            not hold the sets of tokens, or a number is out of range.

    Example:
        >>> report = universality([fixed.window(6, 1)])
        >>> report.holds, report.s, report.hamiltonian_path
        (True, 5, (0, 1, 2, 3, 4, 5))

    Reference: Yun et al., "O(n) connections are expressive enough", NeurIPS 2020, Assumption 1.
    """
    pattern_list = [patterns] if isinstance(patterns, AttentionGraph | SBM) else _listed(patterns)
    time_limit, seed = check_time_limit(time_limit), draw_seed(seed)
    checks.number("threshold", threshold, "[0, 1)", "An edge counts if its probability is above it.")
    with stopwatch() as elapsed:
        graphs = [
            _one_head(expected_graph(pattern, threshold) if isinstance(pattern, SBM) else pattern)
            for pattern in pattern_list
        ]
        n = _common_size(graphs)
        kinds = sorted({isinstance(pattern, SBM) for pattern in pattern_list})
        source = " and ".join(f"expected edges, p > {threshold:g}" if model else "given graphs" for model in kinds)
        if self_loops:
            graphs = [graph | fixed.self_loops(n) for graph in graphs]
            source += ", with self-loops added"
        lacking = tuple(_without_loop(graph) for graph in graphs)
        union = reduce(or_, graphs)
        pair = _unreached(union)
        s = math.inf if pair else _count_steps(graphs, not any(lacking), time_limit)
        return Universality(
            num_tokens=n,
            edges=tuple(graph.num_edges for graph in graphs),
            source=source,
            missing_self_loops=lacking,
            hamiltonian=hamiltonian_path(union, time_limit=time_limit, seed=seed),
            s=s,
            strongly_connected=pair is None,
            unreached=pair,
            seconds=elapsed(),
        )


def spread_steps(patterns: Sequence[AttentionGraph], *, time_limit: float = 10.0) -> int | float | None:
    r"""Compute the s of condition 3: the least number of steps that bring information from all tokens to each token.

    With boolean matrices, :math:`S^1 = A^1`, :math:`S^t = A^{((t-1) \bmod p) + 1} S^{t-1}`, and s is the least t with
    :math:`S^t` all ones. If all patterns have all self-loops, s is finite if and only if their union is strongly
    connected, and then :math:`s \le p(n-1) + 1`. Rows are bit sets. A step costs at most O(E n / 64); only rows that
    changed are read again, and full rows are skipped.

    Args:
        patterns: Patterns in the order of their application, as in :func:`universality`.
        time_limit: Seconds, positive, without the compilation of kernels in the first call.

    Returns:
        s; ``math.inf`` if no s exists; None if the time limit was reached first.

    Raises:
        TypeError, ValueError: As :func:`universality`.

    Example:
        >>> blocks, to, fro = lemma2(16, 4).graphs
        >>> spread_steps([blocks, to, fro]), spread_steps([blocks, fro, to])
        (5, 3)
    """
    graphs, time_limit = [_one_head(graph) for graph in _listed(patterns)], check_time_limit(time_limit)
    _common_size(graphs)
    if _unreached(reduce(or_, graphs)) is not None:
        return math.inf
    return _count_steps(graphs, not any(_without_loop(graph) for graph in graphs), time_limit)


def expected_graph(sbm: SBM, threshold: float = 0.5) -> AttentionGraph:
    """The pairs with a probability above ``threshold``. Cost O(N M K) per head, and O(E) memory beyond the model.

    Args:
        sbm: Any model.
        threshold: In [0, 1).

    Raises:
        TypeError: ``sbm`` is not a model.
        ValueError: The threshold is out of range, or memory does not hold the edges.

    Example:
        >>> expected_graph(lemma2(16, 4).sbms[0])
        AttentionGraph(1 sequence, 1 head, 16 queries, 16 keys, 64 edges, density 25.0%)
    """
    check_model(sbm)
    way_out = "An edge counts if its probability is above it."
    checks.require(isinstance(threshold, Real) and 0 <= threshold < 1, "threshold", "in [0, 1)", threshold, way_out)
    index, device = index_type(sbm.num_keys), sbm.query_ptr.device

    def likely() -> Iterator[tuple[torch.Tensor, int]]:
        """Masks of successive chunks of queries, and the first key of their sequence."""
        for head in range(sbm.heads):
            ends = zip(pairwise(sbm.query_ptr.tolist()), pairwise(sbm.key_ptr.tolist()), strict=True)
            for (first, end), (first_key, end_key) in ends:
                keys, position = sbm.key_membership[head, first_key:end_key], 0
                for rows in sbm.rate[head, first:end].split(max(EDGES_PER_CHUNK // max(len(keys), 1), 1)):
                    mask = rows @ keys.T > threshold
                    yield mask.tril_(position - sbm.is_strict) if sbm.is_causal else mask, first_key
                    position += len(rows)

    with torch.no_grad():
        degree, begin = torch.empty(sbm.heads * sbm.num_queries, dtype=torch.int64, device=device), 0
        for mask, _ in likely():
            degree[begin : begin + len(mask)] = mask.sum(1)
            begin += len(mask)
        rowptr, begin = offsets(degree), 0
        total, way_out = int(rowptr[-1]), "Raise 'threshold', or take shorter sequences."
        checks.memory("sbm", total, index.itemsize, device, way_out)
        col = torch.empty(total, dtype=index, device=device)
        for mask, first_key in likely():
            columns = mask.nonzero()[:, 1].add_(first_key)
            col[begin : begin + columns.numel()] = columns
            begin += columns.numel()
    sizes = (sbm.num_queries, sbm.num_keys, sbm.heads, sbm.query_ptr, sbm.key_ptr)
    return AttentionGraph._trusted(rowptr, col, *sizes, sbm.is_causal)


def _listed(patterns: Any) -> list[Any]:
    is_list = isinstance(patterns, Iterable) and not isinstance(patterns, str | torch.Tensor)
    way_out = "Pass [graph] for one."
    checks.require(is_list, "patterns", "to be a list of graphs", type(patterns).__name__, way_out, TypeError)
    return list(patterns)


def _one_head(graph: AttentionGraph) -> AttentionGraph:
    graph = one_sequence(graph, "patterns")
    return reduce(or_, (graph.head(head) for head in range(graph.heads)))


def _common_size(graphs: list[AttentionGraph]) -> int:
    sizes = {graph.num_queries for graph in graphs}
    way_out = "Pass one or more patterns of one sequence."
    checks.require(len(sizes) == 1, "patterns", "over the same tokens", f"{sorted(sizes)} tokens", way_out)
    return sizes.pop()


def _without_loop(graph: AttentionGraph) -> tuple[int, ...]:
    key, query = graph.edge_index
    absent = torch.ones(graph.num_queries, dtype=torch.bool)
    absent[query[key == query]] = False
    return tuple(absent.nonzero()[:, 0].tolist())


def _unreached(union: AttentionGraph) -> tuple[int, int] | None:
    """Find two tokens without a walk from the first to the second; None if there are no such tokens."""
    count, labels = scipy_sparse().csgraph.connected_components(union.to_scipy(), connection="strong")
    if count == 1:
        return None
    key, query = (labels[side] for side in union.edge_index.numpy())
    closed = np.ones(count, bool)
    closed[key[key != query]] = False  # components with an edge to another one
    last = int(closed.argmax())
    return int((labels == last).argmax()), int((labels != last).argmax())


def _count_steps(graphs: list[AttentionGraph], keeps: bool, time_limit: float) -> int | float | None:
    """:func:`spread_steps` for a strongly connected union. ``keeps``: all patterns have all self-loops."""
    n, period = graphs[0].num_queries, len(graphs)
    words = -(-n // 64)
    way_out = "Check shorter sequences; `hamiltonian_path` needs memory for the edges alone."
    checks.memory("patterns", 2 * n * words, 8, torch.device("cpu"), way_out, "words of sets of tokens")
    rows = [(graph.rowptr.numpy(), graph.col.numpy()) for graph in graphs]
    # a chunk of rows for each thread, if it takes about a millisecond or more
    chunks = [min(max(graph.num_edges * words >> 20, 1), 64) for graph in graphs]
    ranges = [[*pairwise(np.linspace(0, n, count + 1).astype(int).tolist())] for count in chunks]
    target = np.full(words, 2**64 - 1, np.uint64)
    if n % 64:
        target[-1] = 2 ** (n % 64) - 1
    old, new = np.zeros((n, words), np.uint64), np.empty((n, words), np.uint64)
    key, query = graphs[0].edge_index.numpy()
    np.bitwise_or.at(old, (query, key // 64), np.uint64(1) << (key % 64).astype(np.uint64))
    stamp, next_stamp, full = np.ones(n, np.int64), np.ones(n, np.int64), (old == target).all(1)
    step, seen = 1, set()
    with stopwatch() as elapsed:
        while not full.all():
            if elapsed() > time_limit:
                return None
            if not keeps and step % period == 0:  # sets may shrink; a repeated state shows that s is infinite
                state = hashlib.blake2b(old.tobytes()).digest()
                if state in seen:
                    return math.inf
                seen.add(state)
            pattern = step % period
            step += 1
            since = max(step - 1 - period, 0)  # the step at which this pattern was applied last
            common = (*rows[pattern], old, new, stamp, next_stamp, since, step, full, target, keeps)
            threads.run(spread_step, [(*bounds, *common) for bounds in ranges[pattern]])
            old, new, stamp, next_stamp = new, old, next_stamp, stamp
        return step


# ------------------------------------------------------------------------------------------------------------- Lemma 2


@dataclass(frozen=True)
class Lemma2:
    """The construction of Lemma 2; :func:`lemma2` returns it.

    Args:
        num_tokens: Number of tokens n.
        num_clusters: Number of communities, and of relay tokens, K.
        sbms: The models of the three patterns: communities, relay keys, relay queries; all probabilities are 0 or 1.
        graphs: The three patterns with self-loops.
        path: A Hamiltonian path of their union.
    """

    num_tokens: int
    num_clusters: int
    sbms: tuple[SBM, SBM, SBM]
    graphs: tuple[AttentionGraph, AttentionGraph, AttentionGraph]
    path: tuple[int, ...]

    def s(self, order: Sequence[int] = (1, 2, 3)) -> int | float | None:
        """Least number of steps of condition 3, for the patterns in ``order``, numbered from 1 as in the paper.

        Raises:
            ValueError: The order is not a permutation of 1, 2, 3.
        """
        whole = isinstance(order, Sequence) and all(isinstance(number, int) for number in order)
        if not whole or sorted(order) != [1, 2, 3]:
            raise ValueError(
                f"Expected 'order' to be a permutation of 1, 2, 3 (got {short(order)}). The paper has (1, 2, 3)."
            )
        return spread_steps([self.graphs[number - 1] for number in order])


def lemma2(n: int, num_clusters: int) -> Lemma2:
    r"""Lemma 2 of Cho et al. (2022): three block models whose patterns satisfy the conditions.

    The patterns have O(nK + n^2/K) edges. With r the position of a token from 0, and K communities: (1) :math:`Y = Z =
    \text{onehot}(\lfloor rK/n \rfloor)`, S = I: tokens attend to their community; (2) Y = 1, Z = [r >= n - K], S = 1:
    all tokens attend to the last K tokens, the relays; (3) the transpose of (2): relays attend to all tokens.
    Self-loops are added to each.

    The path is built in O(n): it visits the tokens of a community that are not relays, then a relay, then the next
    community, and so on; the remaining relays come last. A relay attends to every token (3), and every token attends to
    it (2). The path needs one relay between two communities, and there are K relays.

    In the order (1, 2, 3), s = 5 if at least two communities hold no relay; (1, 3, 2) gives 3. See docs/analysis.md.

    Args:
        n: Number of tokens, at least 1.
        num_clusters: Number of communities K in 1 .. n.

    Returns:
        Models, graphs and path.

    Raises:
        TypeError, ValueError: A number is not an integer or out of range, or memory does not hold the graphs.

    Example:
        >>> lemma = lemma2(6, 2)
        >>> lemma.path  # communities 0, 1, 2 and 3, 4, 5; relays 4 and 5
        (0, 1, 2, 4, 3, 5)
        >>> lemma.s((1, 2, 3)), lemma.s((1, 3, 2))
        (4, 3)

    Errata of the paper: its floor formula with tokens counted from 1 makes K + 1 communities, and s is not 3 in the
    order (1, 2, 3) of the text. The memberships are set directly, because eq. 5 cannot express S = I (a softmax over
    all entries sums to 1).
    """
    n = checks.integer("n", n, 1, "It is the number of tokens.")
    num_clusters = checks.integer("num_clusters", num_clusters, 1, "Each community needs a token.")
    if num_clusters > n:
        raise ValueError(
            f"Expected 'num_clusters' in 1..n = 1..{short(n)} (got {short(num_clusters)}). A community needs a token."
        )
    edges = n * n // num_clusters + 2 * n * (num_clusters + 1)
    needed = 12 * n * num_clusters + 4 * num_clusters**2 + 16 * edges
    way_out = "About the square root of n / 2 communities give the fewest edges."
    checks.memory("n", needed, 1, torch.device("cpu"), way_out, "bytes of models and graphs")
    position = torch.arange(n)
    block = torch.nn.functional.one_hot(position * num_clusters // n, num_clusters).float()[None]
    relay = (position >= n - num_clusters).float()[None, :, None]
    ones, link = torch.ones(1, n, 1), torch.ones(1, 1, 1)
    sbms = (SBM(block, block, torch.eye(num_clusters)[None]), SBM(ones, relay, link), SBM(relay, ones, link))
    loops = fixed.self_loops(n)
    graphs = (
        fixed.block_diagonal(n, num_clusters),
        fixed.relay_keys(n, num_clusters) | loops,
        fixed.relay_queries(n, num_clusters) | loops,
    )
    path: list[int] = []
    relays = iter(range(n - num_clusters, n))
    for number in range(num_clusters):
        first, end = (-(-side * n // num_clusters) for side in (number, number + 1))
        members = range(first, min(end, n - num_clusters))
        path += [next(relays), *members] if path and members else members
    return Lemma2(n, num_clusters, sbms, graphs, (*path, *relays))
