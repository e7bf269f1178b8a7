"""When sparse attention is a universal approximator: the three conditions of Yun et al. (2020) as code.

Both lemmas of Cho et al. (2022) are here too. In: the patterns of the layers, as graphs or as stochastic block models.
Out: for each condition, yes with evidence, no with evidence, or unknown with the time that was spent. Not here: the
search for Hamiltonian paths (``hamiltonian``).

A pattern lists for each query the keys it attends to; information runs from key to query. The derivations are in
docs/analysis.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from numbers import Real
from operator import or_
from reprlib import repr as short
from typing import Any

import numpy as np
import torch

from ..graph import AttentionGraph
from ..ops import checks
from ..ops.cpu import threads
from ..ops.reference.segments import EDGES_PER_CHUNK
from ..ragged import draw_seed, offsets
from ..rows import index_type
from ..sources import patterns as fixed
from ..sources.sbm import SBM, check_model
from .hamiltonian import HamiltonianPath, hamiltonian_path, one_sequence, scipy_sparse, seconds, some, stopwatch
from .walks import spread

__all__ = [
    "Lemma1", "Lemma2", "Universality", "expected_graph", "lemma1", "lemma2", "log10_cycles", "path_probability",
    "spread_steps", "universality",
]  # fmt: skip

PATIENCE = 3600  # seconds that an experiment may take
Array = np.ndarray[Any, Any]
Pattern = AttentionGraph | SBM


@dataclass(frozen=True)
class Universality:
    """Answer of :func:`universality`; ``print`` shows it as a page.

    As a truth value it is ``holds``. Where that is not known, it raises an error.

    Args:
        num_tokens: Number of tokens n.
        edges: Number of edges of each pattern, ``[P]``.
        source: What was checked, in words.
        missing_self_loops: For each pattern, the tokens that do not attend to themselves (condition 1).
        hamiltonian: Path through the union, certificate of absence, or time spent (condition 2).
        s: Least number of steps after which every token has heard of every other (condition 3): ``math.inf`` if that
            never comes to pass, None if the time was too short.
        strongly_connected: Whether the union has a walk from every token to every other. Given condition 1, the same as
            a finite s.
        unreached: Two tokens a, b such that nothing of a ever reaches b, where the union is not strongly connected;
            else None.
        seconds: Time spent, without that of compiling kernels.
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
        """The path, or None."""
        return self.hamiltonian.path

    @property
    def hamiltonian_status(self) -> str:
        """``"FOUND"``, ``"ABSENT"`` or ``"UNKNOWN"``."""
        return self.hamiltonian.status

    @property
    def holds(self) -> bool | None:
        """True if all three conditions hold, False if one fails, None if neither is known."""
        answers = [not any(self.missing_self_loops), {"FOUND": True, "ABSENT": False}.get(self.hamiltonian_status)]
        answers.append(None if self.s is None else self.s < math.inf)
        return False if False in answers else None if None in answers else True

    def __bool__(self) -> bool:
        if self.holds is None:
            raise ValueError(
                "Expected 'holds' to be True or False for a yes or no (got None). Read `.holds`, or raise `time_limit`."
            )
        return self.holds

    def __str__(self) -> str:
        verdict = {True: "HOLDS", False: "FAILS", None: "UNDECIDED"}[self.holds]
        pairs = self.num_tokens**2
        shares = ", ".join(f"{100 * count / pairs:.3g} %" for count in self.edges[:8]) + (
            ", ..." if len(self.edges) > 8 else ""
        )
        if any(self.missing_self_loops):
            lacking = [
                f"pattern {number}: {some(tokens)}"
                for number, tokens in enumerate(self.missing_self_loops, 1)
                if tokens
            ]
            loops = "no; missing at tokens of " + "; of ".join(lacking[:4]) + ("; ..." if len(lacking) > 4 else "")
        else:
            loops = "yes"
        if self.unreached is not None:
            reach = f"never (s is infinite); nothing of token {self.unreached[0]} reaches token {self.unreached[1]}"
        elif self.s == math.inf:
            reach = "never (s is infinite); what tokens know repeats without being complete"
        else:
            reach = (
                "not known within the time limit"
                if self.s is None
                else f"yes, after s = {self.s} step{'s' * (self.s > 1)}"
            )
        return (
            f"Universality of {len(self.edges)} pattern{'s' * (len(self.edges) > 1)} over {self.num_tokens:,} tokens: "
            f"{verdict}\n"
            f"  checked                                {self.source}; densities {shares}\n"
            f"  1. every token attends to itself       {loops}\n"
            f"  2. Hamiltonian path in the union       {self.hamiltonian}\n"
            f"  3. every token hears of every other    {reach}\n"
            f"     union strongly connected            {'yes' if self.strongly_connected else 'no'}\n"
            f"  {self.seconds:.2f} s; conditions of Yun et al. 2020, Assumption 1"
        )


def universality(
    patterns: Pattern | Sequence[Pattern],
    *,
    threshold: float = 0.5,
    self_loops: bool = False,
    time_limit: float = 10.0,
    seed: int = 0,
) -> Universality:
    """Check the conditions under which a transformer with these patterns approximates every function.

    They are those of Yun et al. (2020). First, every token attends to itself in every pattern. Second, the union of the
    patterns has a Hamiltonian path. Third, with the patterns applied in turn, over and over, every token has heard of
    every other after a finite number s of steps. Whether a *sampled* mask meets them depends on luck and on its
    density: with O(n) edges it hardly ever has a Hamiltonian path. So say what was checked: samples or expectations.

    Args:
        patterns: One pattern or a list in the order of the layers. An :class:`AttentionGraph` counts as the union over
            its heads (``[graph.head(h) for h in ...]`` checks heads one by one); an :class:`SBM` as the pairs more
            probable than ``threshold``.
        threshold: In [0, 1), for models only.
        self_loops: Add them to every pattern first, as the paper's proof does.
        time_limit: Seconds for condition 2 and for condition 3, each.
        seed: Of the search for a path.

    Returns:
        The report. N = 4096 takes seconds; memory O(E + N^2 / 4) bytes, O(N M K) time for a model.

    Raises:
        ImportError: scipy is not installed.
        TypeError, ValueError: No pattern, patterns of several sequences or of different tokens, more tokens than fit in
            memory, or a number out of range.

    Example:
        >>> report = universality([fixed.window(6, 1)])
        >>> report.holds, report.s, report.hamiltonian_path
        (True, 5, (0, 1, 2, 3, 4, 5))

    Reference: Yun et al., "O(n) connections are expressive enough", NeurIPS 2020, Assumption 1.
    """
    with stopwatch() as taken:
        return _universality(patterns, threshold, self_loops, time_limit, seed, taken)


def _universality(
    patterns: Pattern | Sequence[Pattern],
    threshold: float,
    self_loops: bool,
    time_limit: float,
    seed: int,
    taken: Callable[[], float],
) -> Universality:
    given = [patterns] if isinstance(patterns, AttentionGraph | SBM) else _listed(patterns)
    time_limit, seed = seconds(time_limit), draw_seed(seed)
    checks.number("threshold", threshold, "[0, 1)", "An edge counts where its probability is above it.")
    graphs = [_one_head(expected_graph(each, threshold) if isinstance(each, SBM) else each) for each in given]
    n = _common_size(graphs)
    models = sum(isinstance(each, SBM) for each in given)
    source = f"expected edges, p > {threshold:g}" if models == len(given) else "given graphs"
    if 0 < models < len(given):
        source = f"given graphs and expected edges, p > {threshold:g}"
    if self_loops:
        graphs = [graph | fixed.self_loops(n) for graph in graphs]
        source += ", with self-loops added"
    lacking = tuple(_without_loop(graph) for graph in graphs)
    union = reduce(or_, graphs)
    pair = _unreached(union)
    s = math.inf if pair else _steps(graphs, not any(lacking), time_limit)
    return Universality(
        num_tokens=n,
        edges=tuple(graph.num_edges for graph in graphs),
        source=source,
        missing_self_loops=lacking,
        hamiltonian=hamiltonian_path(union, time_limit=time_limit, seed=seed),
        s=s,
        strongly_connected=pair is None,
        unreached=pair,
        seconds=taken(),
    )


def spread_steps(patterns: Sequence[AttentionGraph], *, time_limit: float = 10.0) -> int | float | None:
    r"""The s of condition 3: the least number of steps after which every token has heard of every other.

    With boolean matrices, :math:`S^1 = A^1`, :math:`S^t = A^{((t-1) \bmod p) + 1} S^{t-1}`, and s is the least t with
    :math:`S^t` all ones. Where all patterns have all self-loops, s is finite if and only if their union is strongly
    connected, and then :math:`s \le p(n-1) + 1`. Rows are bit sets: O(E n / 64) a step at worst, but only rows that
    changed are read again and full ones are left alone.

    Args:
        patterns: In the order in which they are applied, as in :func:`universality`.
        time_limit: Seconds, positive; those in which the first call compiles kernels do not count.

    Returns:
        s; ``math.inf`` if there is none; None if the time was too short.

    Raises:
        TypeError, ValueError: As :func:`universality`.

    Example:
        >>> blocks, to, fro = lemma2(16, 4).graphs
        >>> spread_steps([blocks, to, fro]), spread_steps([blocks, fro, to])
        (5, 3)
    """
    graphs, time_limit = [_one_head(graph) for graph in _listed(patterns)], seconds(time_limit)
    _common_size(graphs)
    if _unreached(reduce(or_, graphs)) is not None:
        return math.inf
    return _steps(graphs, not any(_without_loop(graph) for graph in graphs), time_limit)


def expected_graph(sbm: SBM, threshold: float = 0.5) -> AttentionGraph:
    """The pairs whose edge is more probable than ``threshold``. Cost O(N M K) per head, memory O(E) beyond the model.

    Args:
        sbm: Any model.
        threshold: In [0, 1).

    Raises:
        TypeError: It is no model.
        ValueError: The threshold is out of range, or memory does not hold the edges.

    Example:
        >>> expected_graph(lemma2(16, 4).sbms[0])
        AttentionGraph(1 sequence, 1 head, 16 queries, 16 keys, 64 edges, density 25.0%)
    """
    check_model(sbm)
    if not isinstance(threshold, Real) or not 0 <= threshold < 1:
        raise ValueError(
            f"Expected 'threshold' in [0, 1) (got {threshold}). An edge counts where its probability is above it."
        )
    width, device = index_type(sbm.num_keys), sbm.query_ptr.device

    def likely() -> Iterator[tuple[torch.Tensor, int]]:
        """Masks of some queries each, and the first key of their sequence."""
        for head in range(sbm.heads):
            ends = zip(pairwise(sbm.query_ptr.tolist()), pairwise(sbm.key_ptr.tolist()), strict=True)
            for (first, end), (first_key, end_key) in ends:
                keys, place = sbm.key_membership[head, first_key:end_key], 0
                for rows in sbm.rate[head, first:end].split(max(EDGES_PER_CHUNK // max(len(keys), 1), 1)):
                    mask = rows @ keys.T > threshold
                    yield mask.tril_(place) if sbm.is_causal else mask, first_key
                    place += len(rows)

    with torch.no_grad():
        degree, begin = torch.empty(sbm.heads * sbm.num_queries, dtype=torch.int64, device=device), 0
        for mask, _ in likely():
            degree[begin : begin + len(mask)] = mask.sum(1)
            begin += len(mask)
        rowptr, begin = offsets(degree), 0
        total, way_out = int(rowptr[-1]), "Raise 'threshold', or take shorter sequences."
        checks.memory("sbm", total, width.itemsize, device, way_out)
        col = torch.empty(total, dtype=width, device=device)
        for mask, first_key in likely():
            found = mask.nonzero()[:, 1].add_(first_key)
            col[begin : begin + found.numel()] = found
            begin += found.numel()
    sides = (sbm.num_queries, sbm.num_keys, sbm.heads, sbm.query_ptr, sbm.key_ptr)
    return AttentionGraph._trusted(rowptr, col, *sides, sbm.is_causal)


def _listed(patterns: Any) -> list[Any]:
    if not isinstance(patterns, Iterable) or isinstance(patterns, str | torch.Tensor):
        raise TypeError(
            f"Expected 'patterns' to be a list of graphs (got {type(patterns).__name__}). Pass [graph] for one."
        )
    return list(patterns)


def _one_head(graph: AttentionGraph) -> AttentionGraph:
    graph = one_sequence(graph, "patterns")
    return reduce(or_, (graph.head(head) for head in range(graph.heads)))


def _common_size(graphs: list[AttentionGraph]) -> int:
    sizes = {graph.num_queries for graph in graphs}
    if len(sizes) != 1:
        raise ValueError(
            f"Expected 'patterns' over the same tokens (got {sorted(sizes)} tokens). "
            "Pass one or more patterns of one sequence."
        )
    return sizes.pop()


def _without_loop(graph: AttentionGraph) -> tuple[int, ...]:
    key, query = graph.edge_index
    absent = torch.ones(graph.num_queries, dtype=torch.bool)
    absent[query[key == query]] = False
    return tuple(absent.nonzero()[:, 0].tolist())


def _unreached(union: AttentionGraph) -> tuple[int, int] | None:
    """Two tokens without a walk from the first to the second, or None if there are none."""
    count, labels = scipy_sparse().csgraph.connected_components(union.to_scipy(), connection="strong")
    if count == 1:
        return None
    key, query = (labels[side] for side in union.edge_index.numpy())
    closed = np.ones(count, bool)
    closed[key[key != query]] = False  # components that some edge leaves
    last = int(closed.argmax())
    return int((labels == last).argmax()), int((labels != last).argmax())


def _steps(graphs: list[AttentionGraph], keeps: bool, time_limit: float) -> int | float | None:
    """:func:`spread_steps` for a union that is strongly connected.

    ``keeps``: all tokens attend to themselves in all patterns.
    """
    n = graphs[0].num_queries
    words = -(-n // 64)
    way_out = "Check shorter sequences; `hamiltonian_path` needs memory for the edges alone."
    checks.memory("patterns", 2 * n * words, 8, torch.device("cpu"), way_out, "words of tokens that are known")
    with stopwatch() as searched:
        return _spread(graphs, keeps, n, words, searched, time_limit)


def _spread(
    graphs: list[AttentionGraph], keeps: bool, n: int, words: int, searched: Callable[[], float], time_limit: float
) -> int | float | None:
    period = len(graphs)
    rows = [(graph.rowptr.numpy(), graph.col.numpy()) for graph in graphs]
    # threads wait for each other: not for a millisecond's work
    shares = [min(max(graph.num_edges * words >> 20, 1), 64) for graph in graphs]
    pieces = [[*pairwise(np.linspace(0, n, share + 1).astype(int).tolist())] for share in shares]
    target = np.full(words, 2**64 - 1, np.uint64)
    if n % 64:
        target[-1] = 2 ** (n % 64) - 1
    old, new = np.zeros((n, words), np.uint64), np.empty((n, words), np.uint64)
    key, query = graphs[0].edge_index.numpy()
    np.bitwise_or.at(old, (query, key // 64), np.uint64(1) << (key % 64).astype(np.uint64))
    stamp, next_stamp, full = np.ones(n, np.int64), np.ones(n, np.int64), (old == target).all(1)
    step, seen = 1, set()
    while not full.all():
        if searched() > time_limit:
            return None
        if not keeps and step % period == 0:  # sets may shrink: all is said once a state comes again
            state = hashlib.blake2b(old.tobytes()).digest()
            if state in seen:
                return math.inf
            seen.add(state)
        pattern = step % period
        step += 1
        since = max(step - 1 - period, 0)  # this pattern last read what rows knew at that step
        threads.run(
            spread,
            [
                (*piece, *rows[pattern], old, new, stamp, next_stamp, since, step, full, target, keeps)
                for piece in pieces[pattern]
            ],
        )
        old, new, stamp, next_stamp = new, old, next_stamp, stamp
    return step


# ------------------------------------------------------------------------------------------------------------- Lemma 2


@dataclass(frozen=True)
class Lemma2:
    """The construction of Lemma 2, made by :func:`lemma2`.

    Args:
        num_tokens: Number of tokens n.
        num_blocks: Number of blocks, and of relay tokens, K.
        sbms: The models of the three patterns: blocks, relay keys, relay queries; all probabilities are 0 or 1.
        graphs: The three patterns with self-loops.
        path: A Hamiltonian path of their union.
    """

    num_tokens: int
    num_blocks: int
    sbms: tuple[SBM, SBM, SBM]
    graphs: tuple[AttentionGraph, AttentionGraph, AttentionGraph]
    path: tuple[int, ...]

    def s(self, order: Sequence[int] = (1, 2, 3)) -> int | float | None:
        """The s of condition 3 for the patterns in this order, numbered from 1 as in the paper.

        Raises:
            ValueError: The order is not a permutation of 1, 2, 3.
        """
        if (
            not isinstance(order, Sequence)
            or not all(isinstance(each, int) for each in order)
            or sorted(order) != [1, 2, 3]
        ):
            raise ValueError(
                f"Expected 'order' to be a permutation of 1, 2, 3 (got {short(order)}). The paper has (1, 2, 3)."
            )
        return spread_steps([self.graphs[number - 1] for number in order])


def lemma2(n: int, num_blocks: int) -> Lemma2:
    r"""Lemma 2 of Cho et al. (2022) as code: three block models whose patterns meet the conditions.

    The patterns have O(nK + n^2/K) edges. With r the position of a token from 0, and K blocks: (1) :math:`Y = Z =
    \text{onehot}(\lfloor rK/n \rfloor)`, S = I: tokens attend to their block; (2) Y = 1, Z = [r >= n - K], S = 1: all
    attend to the last K tokens, the relays; (3) the transpose of (2): relays attend to all. Self-loops are added to
    each.

    The path takes O(n). It visits the tokens of a block that are no relays, then a relay, then the next block, and so
    on; the remaining relays come in the end. A relay hears everybody (3) and is heard by everybody (2). One relay is
    needed between two blocks, and there are K.

    In the order (1, 2, 3), s = 5 as soon as two blocks hold no relay; (1, 3, 2) gives 3. See docs/analysis.md.

    Args:
        n: Number of tokens, at least 1.
        num_blocks: Number of blocks K in 1 .. n.

    Returns:
        Models, graphs and path.

    Raises:
        TypeError, ValueError: A number is no integer, is out of range, or asks for more memory than there is.

    Example:
        >>> lemma = lemma2(6, 2)
        >>> lemma.path  # blocks 0, 1, 2 and 3, 4, 5; relays 4 and 5
        (0, 1, 2, 4, 3, 5)
        >>> lemma.s((1, 2, 3)), lemma.s((1, 3, 2))
        (4, 3)

    Where the paper is off: its floor formula with tokens counted from 1 makes K + 1 blocks, and s is not 3 in the order
    (1, 2, 3) of the text. The memberships are set directly, for eq. 5 cannot express S = I (a softmax over all entries
    sums to 1).
    """
    n = checks.integer("n", n, 1, "It is the number of tokens.")
    num_blocks = checks.integer("num_blocks", num_blocks, 1, "Each block needs a token.")
    if num_blocks > n:
        raise ValueError(
            f"Expected 'num_blocks' in 1..n = 1..{short(n)} (got {short(num_blocks)}). Each block needs a token."
        )
    edges = n * n // num_blocks + 2 * n * (num_blocks + 1)
    needed = 12 * n * num_blocks + 4 * num_blocks**2 + 16 * edges
    way_out = "Fewest edges come with about the square root of n / 2 blocks."
    checks.memory("n", needed, 1, torch.device("cpu"), way_out, "bytes of models and graphs")
    place = torch.arange(n)
    block = torch.nn.functional.one_hot(place * num_blocks // n, num_blocks).float()[None]
    relay = (place >= n - num_blocks).float()[None, :, None]
    ones, link = torch.ones(1, n, 1), torch.ones(1, 1, 1)
    sbms = (SBM(block, block, torch.eye(num_blocks)[None]), SBM(ones, relay, link), SBM(relay, ones, link))
    loops = fixed.self_loops(n)
    graphs = (
        fixed.block_diagonal(n, num_blocks),
        fixed.relay_keys(n, num_blocks) | loops,
        fixed.relay_queries(n, num_blocks) | loops,
    )
    path: list[int] = []
    relays = iter(range(n - num_blocks, n))
    for number in range(num_blocks):
        first, end = (-(-side * n // num_blocks) for side in (number, number + 1))
        members = range(first, min(end, n - num_blocks))
        path += [next(relays), *members] if path and members else members
    return Lemma2(n, num_blocks, sbms, graphs, (*path, *relays))


# ------------------------------------------------------------------------------------------------------------- Lemma 1
@dataclass(frozen=True)
class Lemma1:
    """Answer of :func:`lemma1`, one entry for each probability.

    Args:
        n: Number of tokens.
        samples: Graphs drawn for each probability.
        probabilities: Edge probabilities p, ``[P]``.
        found: Graphs with a Hamiltonian path, ``[P]``.
        absent: Graphs without, ``[P]``.
    """

    n: int
    samples: int
    probabilities: Array
    found: Array
    absent: Array

    @property
    def log10_cycles(self) -> Array:
        """Expected number of Hamiltonian cycles, as its decimal logarithm, ``[P]``: the quantity of the lemma."""
        return log10_cycles(self.n, self.probabilities)

    @property
    def share(self) -> Array:
        """Share of the graphs with a path, ``[P]``, of those that were decided."""
        return self.found / np.maximum(self.found + self.absent, 1)

    @property
    def interval(self) -> tuple[Array, Array]:
        """95 % interval of the probability of a path (Wilson, 1927), each ``[P]``."""
        count = np.maximum(self.found + self.absent, 1)
        widening = 1.959964**2 / count
        centre, half = (
            self.share + widening / 2,
            1.959964 * np.sqrt(self.share * (1 - self.share) / count + widening / (4 * count)),
        )
        return (centre - half) / (1 + widening), (centre + half) / (1 + widening)

    @property
    def limit(self) -> Array:
        """Probability of a path for large n, ``[P]``, see :func:`path_probability`."""
        return path_probability(self.n, self.probabilities)

    @property
    def lemma(self) -> float:
        """The probability that the proof of the lemma chooses, :math:`e n^{1/n} / n`."""
        return math.e * self.n ** (1 / self.n) / self.n

    def __str__(self) -> str:
        lines = [f"{self.n:,} tokens, {self.samples:,} graphs for each p; the lemma has p = {self.lemma:.4g}", ""]
        lines.append("       p   edges per token   expected cycles   P(path)   95 % interval       limit")
        for row in zip(self.probabilities, self.log10_cycles, self.share, *self.interval, self.limit, strict=True):
            p, cycles, share, low, high, limit = row
            lines.append(
                f"{p:8.4f} {p * (self.n - 1):17.2f} {_power(cycles):>17} {share:9.3f}   {low:.3f} "
                f"to {high:.3f} {limit:11.3f}"
            )
        unknown = self.samples * len(self.found) - int(self.found.sum() + self.absent.sum())
        return "\n".join(lines + ([f"{unknown:,} graphs undecided"] if unknown else []))


def _power(logarithm: float) -> str:
    return f"10^{logarithm:.1f}" if abs(logarithm) > 3 else f"{10**logarithm:.3g}"


def log10_cycles(n: int, p: float | Array) -> Any:
    r"""Decimal logarithm of the expected number of Hamiltonian cycles in G(n, p), :math:`p^n (n-1)!`.

    >>> float(log10_cycles(3, 1.0).round(4))  # two cycles
    0.301
    """
    n, p = _law(n, p)
    with np.errstate(divide="ignore"):  # none without edges
        return (n * np.log(p) + math.lgamma(n)) / math.log(10)


def path_probability(n: int, p: float | Array) -> Any:
    r"""Probability that a directed graph G(n, p) has a Hamiltonian path, in the limit of large n.

    A path needs at most one token that no edge enters and at most one that no edge leaves; in the limit this is enough,
    and both numbers are Poisson with mean :math:`\lambda = n (1-p)^{n-1}`: :math:`((1 + \lambda) e^{-\lambda})^2`. The
    directed form of the theorem of Komlós and Szemerédi (1983), as hitting time for cycles by Frieze (1988).
    """
    n, p = _law(n, p)
    rate = n * (1 - p) ** (n - 1)
    return ((1 + rate) * np.exp(-rate)) ** 2


def _law(n: int, p: float | Array) -> tuple[int, Array]:
    """Number of tokens and edge probabilities of G(n, p).

    Raises:
        TypeError, ValueError: They are none.
    """
    n = checks.integer("n", n, 1, "It is the number of tokens.")
    try:
        chances = np.asarray(p, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        chances = np.array(math.nan)
    if n >= 2**53 or not bool(((chances >= 0) & (chances <= 1)).all()):
        raise ValueError(
            f"Expected 'p' in [0, 1] and 'n' below 2**53 (got {short(p)} and {short(n)}). "
            "They are those of a graph G(n, p)."
        )
    return n, chances


def lemma1(
    n: int = 64,
    probabilities: Sequence[float] | Array | None = None,
    *,
    samples: int = 200,
    seed: int = 0,
    time_limit: float = 1.0,
) -> Lemma1:
    """Lemma 1 of Cho et al. as an experiment: Hamiltonian cycles that one expects, and paths that one finds.

    Both are of random graphs G(n, p). The lemma shows that some p of order 1/n makes the expected number of cycles at
    least 1. The expectation is carried by rare graphs with very many cycles: at that p almost no graph has even a path.
    Cost O(n^2) a graph plus :func:`hamiltonian_path`.

    Args:
        n: Number of tokens, at least 3.
        probabilities: Edge probabilities in (0, 1], ``[P]``. If None, twelve from half the lemma's to ``(ln n + 4) /
            n``.
        samples: Graphs for each probability, at least 1.
        seed: Fixes the graphs.
        time_limit: Seconds for each graph.

    Raises:
        ImportError: scipy is not installed.
        TypeError, ValueError: A number is none, is out of range, or asks for more than the memory there is or an hour.

    Example:
        >>> result = lemma1(12, [0.05, 0.9], samples=5)
        >>> result.found.tolist(), result.absent.tolist()
        ([0, 5], [5, 0])
    """
    n = checks.integer("n", n, 3, "The default is 64.")
    samples = checks.integer("samples", samples, 1, "The default is 200.")
    time_limit, seed = seconds(time_limit), draw_seed(seed)
    checks.memory("n", n, 100, torch.device("cpu"), "Take fewer tokens.", "tokens")
    low, high = 0.5 * math.e * n ** (1 / n) / n, min((math.log(n) + 4) / n, 1.0)
    try:
        chosen = np.linspace(low, high, 12) if probabilities is None else np.asarray(probabilities, dtype=np.float64)
    except (TypeError, ValueError):
        chosen = np.empty(0)
    if chosen.ndim != 1 or len(chosen) == 0 or not bool(((chosen > 0) & (chosen <= 1)).all()):
        raise ValueError(
            f"Expected 'probabilities' to be a list of numbers in (0, 1] (got {short(probabilities)}). "
            "Leave it out for a range."
        )
    edges = int(min(float(chosen.max()) * n, n)) * n  # of a graph and the search in it
    checks.memory("n", edges, 40, torch.device("cpu"), "Take fewer tokens, or lower probabilities.")
    each = 3e-4 + 2.5e-8 * n * n  # seconds for a graph, at least
    if samples * len(chosen) * each > PATIENCE:
        raise ValueError(
            f"Expected 'samples' to be at most {int(PATIENCE / len(chosen) / each):,} "
            f"for {len(chosen)} probabilities of graphs of {n:,} tokens (got {short(samples)}: more than an hour). "
            "Take fewer, or call it several times with seeds of their own."
        )
    random = np.random.default_rng(seed % 2**64)
    answers = {
        "FOUND": np.zeros(len(chosen), np.int64),
        "ABSENT": np.zeros(len(chosen), np.int64),
        "UNKNOWN": np.zeros(len(chosen), np.int64),
    }
    for place, p in enumerate(chosen):
        for _ in range(samples):
            graph = _random_graph(n, p, random)
            answers[hamiltonian_path(graph, time_limit=time_limit, seed=seed).status][place] += 1
    return Lemma1(n, samples, chosen, answers["FOUND"], answers["ABSENT"])


def _random_graph(n: int, p: float, random: np.random.Generator) -> AttentionGraph:
    """G(n, p) with self-loops, some rows at a time."""
    step = max(EDGES_PER_CHUNK // n, 1)
    degree, col = [], []
    for begin in range(0, n, step):
        mask = random.random((min(step, n - begin), n)) < p
        degree.append(mask.sum(1))
        col.append(mask.nonzero()[1].astype(np.int32))
    rowptr, keys = (torch.from_numpy(np.concatenate(each)) for each in (degree, col))
    return AttentionGraph._trusted(offsets(rowptr), keys, n, n)
