"""Fixed graphs of tokens: full, window, global, random, BigBird, and the three patterns of the universality proof.

In: a number of tokens ``n``, or the offsets ``ptr`` of a ragged batch; then every sequence gets the pattern of its own
length. Out: an :class:`~sbm_pyg.AttentionGraph` whose queries and keys are the same tokens, and a source with this
graph. Not here: graphs that depend on the values of the tokens (``sampling``, ``selectors``, ``sparsefinder``), and the
transform of PyG ``Data`` (:class:`~sbm_pyg.SourceGraph`).

Patterns combine by union: ``window(n, 3) | global_tokens(n, 1)``. In all but :func:`random` and :func:`bigbird` a query
attends to consecutive keys: they cost O(N + E) time and memory, E the edges of all heads, and sort nothing. No pattern
makes an ``n x n`` array, unless its graph has about that many edges. In every formula r is the position of a token in
its sequence, counted from 0, and n the length of that sequence.

References: Beltagy, Peters, Cohan: Longformer, 2020. Zaheer et al.: Big Bird, 2020. Cho et al.: Transformers meet
Stochastic Block Models, 2022.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..graphs.graph import AttentionGraph, check_graph
from ..graphs.ragged import Tokens, check_tensor, draw_seed, resolve_ptr, resolve_sequence_ids
from ..graphs.rows import index_type
from ..ops import checks, values
from ..ops.random_words import RANDOM_KEY, philox, split_ids
from ..ops.segments import runs
from ..ops.values import can_read, require_values
from .dense import DenseChoice
from .interface import Choice, GraphSource
from .last_rows import RowRule

__all__ = [
    "PatternSource", "bigbird", "block_diagonal", "full", "global_tokens", "random", "relay_keys", "relay_queries",
    "self_loops", "window",
]  # fmt: skip

Device = torch.device | str | None
Ptr = Tensor | None


def full(
    n: int | None, *, is_causal: bool = False, heads: int = 1, ptr: Ptr = None, query_ptr: Ptr = None,
    device: Device = None,
) -> AttentionGraph:  # fmt: skip
    """Every token attends to every token of its sequence.

    Args:
        n: Number of tokens N. With ``ptr`` it may be None; otherwise it must equal the last offset.
        is_causal: No token attends to a later one. Edges to later tokens are not made, and cost nothing.
        heads: Number of heads H; all have the same edges.
        ptr: Offsets of the sequences, ``[B+1]`` int64. None: one sequence of n tokens.
        query_ptr: Offsets of the queries, ``[B+1]`` int64, if they are the last tokens of each sequence, as with a
            cache: the graph has their rows alone, and costs what they cost. None: all tokens are queries.
        device: Device of the graph. None: that of ``ptr``, or the default device.

    Returns:
        A graph with :math:`H \\sum_b n_b^2` edges, or :math:`H \\sum_b n_b (n_b + 1) / 2` where ``is_causal``.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range, ``ptr`` does not describe n tokens, or memory
            does not hold the edges. All functions here count the edges before they make them.

    Example:
        >>> full(3)
        AttentionGraph(1 sequence, 1 head, 3 queries, 3 keys, 9 edges, density 100.0%)
    """
    positions = _Positions.of(n, is_causal, heads, ptr, device, query_ptr)
    return positions.consecutive(positions.start, positions.end)


def window(
    n: int | None, size: int, *, num_sinks: int = 0, is_causal: bool = False, heads: int = 1, ptr: Ptr = None,
    query_ptr: Ptr = None, device: Device = None,
) -> AttentionGraph:  # fmt: skip
    """Each token attends to itself, to the tokens at most ``size`` positions away, and to the first ``num_sinks``.

    A pair is an edge if :math:`|r_i - r_j| \\le size` or :math:`r_j < num\\_sinks`. Tokens near an end have fewer keys.
    Longformer (section 3.1) and BigBird give the window as w = ``2 * size``. ``window(n, n, is_causal=True)`` is the
    usual causal mask, and ``window(n, size, num_sinks=4, is_causal=True)`` the pattern of StreamingLLM.

    Args:
        size: Largest distance, at least 0; a query has up to ``2 * size + 1`` keys. A sequence of at most
            ``size + 1`` tokens gets its full graph.
        num_sinks: Number of first tokens of each sequence that all of its tokens attend to, at least 0.
        n, is_causal, heads, ptr, query_ptr, device: As in :func:`full`.

    Returns:
        A graph with at most ``H * N * (2 * size + 1 + num_sinks)`` edges.

    Example:
        >>> window(4, 1).to_dense()[0].int().tolist()
        [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]

    Reference: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024.
    """
    size = checks.integer("size", size, 0, "It is a distance in tokens; 0 gives self-loops.")
    num_sinks = check_sinks(num_sinks)
    positions = _Positions.of(n, is_causal, heads, ptr, device, query_ptr)
    if size == num_sinks == 0:  # one edge per token: no synchronization with the device
        token = positions.start + positions.position
        return positions.graph(torch.ones_like(token), token, 1).expand(heads)
    return positions.near(size, num_sinks)


def global_tokens(
    n: int | None, num_global: int, *, is_causal: bool = False, heads: int = 1, ptr: Ptr = None, query_ptr: Ptr = None,
    device: Device = None,
) -> AttentionGraph:  # fmt: skip
    """The first ``num_global`` tokens of a sequence attend to all of it, and all of it attends to them.

    A pair is an edge if :math:`r_i < num\\_global` or :math:`r_j < num\\_global`. Other tokens do not attend to
    themselves. Longformer (section 3.1, with a second projection for these edges) and BigBird (section 2) use it.

    Args:
        num_global: Number of global tokens, at least 0. A sequence with no more tokens gets its full graph.
        n, is_causal, heads, ptr, query_ptr, device: As in :func:`full`.

    Returns:
        A graph with at most ``2 * H * N * num_global`` edges.

    Example:
        >>> global_tokens(4, 1).to_dense()[0].int().tolist()
        [[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    """
    num_global = checks.integer("num_global", num_global, 0, "It is the number of global tokens of each sequence.")
    positions = _Positions.of(n, is_causal, heads, ptr, device, query_ptr)
    keys = positions.length.where(positions.position < num_global, positions.length.clamp(max=num_global))
    return positions.consecutive(positions.start, positions.start + keys)


def random(
    n: int | None,
    num_keys_per_query: int,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    sequence_ids: Tensor | None = None,
    is_causal: bool = False,
    heads: int = 1,
    ptr: Ptr = None,
    query_ptr: Ptr = None,
    device: Device = None,
) -> AttentionGraph:
    """Each token attends to ``num_keys_per_query`` distinct tokens of its sequence, uniformly at random.

    BigBird (section 2) uses it. All :math:`\\binom{n}{k}` sets of keys are equally likely, and may contain the query.
    Queries and heads draw independently. Keys are drawn with replacement; repeated keys of a query are drawn again. If
    k > n/2, the keys to leave out are drawn instead, so each draw is new with a probability of at least 1/2. Expected
    cost: O(E log E) time and O(E) memory. Probabilities have a resolution of :math:`2^{-32}`. The random words are
    those of :func:`~sbm_pyg.sample_edges`: the keys of a sequence do not depend on the other sequences of the batch.

    Args:
        num_keys_per_query: Number of keys k of each query, at least 0. A sequence with fewer tokens gets its full
            graph.
        seed: Integer of 64 bits that fixes the keys.
        generator: Generator to draw a seed from if ``seed`` is None. None: torch's default generator.
        sequence_ids: Number of each sequence, ``[B]``; see :func:`~sbm_pyg.sample_edges`.
        heads: Number of heads H; each draws its own keys.
        n, ptr, query_ptr, device: As in :func:`full`.

    Returns:
        A graph with exactly :math:`H \\sum_b n_b \\min(k, n_b)` edges.

    Example:
        >>> random(6, 2, seed=0).degree
        tensor([[2, 2, 2, 2, 2, 2]])
    """
    num_keys_per_query = checks.integer("num_keys_per_query", num_keys_per_query, 0, "Each query draws them.")
    positions = _Positions.of(n, is_causal, heads, ptr, device, query_ptr)
    size = (positions.position + 1 if is_causal else positions.length).repeat(heads)  # [H*N]
    degree = size.clamp(max=num_keys_per_query)
    listed = torch.where(2 * degree > size, size, degree)  # `_draw_distinct` lists all keys to leave some out
    positions.count(listed, 1, bytes_each=72)
    position = _draw_distinct(degree, size, _Draws(positions, sequence_ids, draw_seed(seed, generator)))
    first = torch.repeat_interleave(positions.start.repeat(heads), degree, output_size=position.numel())
    return positions.graph(degree, first + position, heads)


def bigbird(
    n: int | None,
    size: int,
    num_global: int,
    num_random: int,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    sequence_ids: Tensor | None = None,
    is_causal: bool = False,
    heads: int = 1,
    ptr: Ptr = None,
    query_ptr: Ptr = None,
    device: Device = None,
) -> AttentionGraph:
    """The union of a window, global tokens and random keys, over single tokens.

    The graph is ``window(n, size) | global_tokens(n, num_global) | random(n, num_random)``, so a random key may also be
    in the window or global. This is the definition of BigBird's section 2 (internal transformer construction); the code
    of BigBird works on blocks of tokens, and draws random blocks outside the window and the global blocks. Cost: that
    of :func:`random`, plus O(E log E).

    Args:
        size: Largest distance in the window, at least 0.
        num_global: Number of global tokens, the first of each sequence, at least 0.
        num_random: Number of random keys of each query, at least 0.
        seed, generator, sequence_ids: As in :func:`random`.
        heads: Number of heads H. They share the window and the global tokens; each draws its own random keys.
        n, ptr, query_ptr, device: As in :func:`full`.

    Returns:
        A graph with at most ``H * N * (2 * size + 1 + 2 * num_global + num_random)`` edges.

    Example:
        >>> bigbird(512, size=3, num_global=2, num_random=3, seed=0, heads=2).degree[:, :2].tolist()  # global tokens
        [[512, 512], [512, 512]]
    """
    checks.integer("num_random", num_random, 0, "It is the number of random keys that each query draws.")
    sides: Any = {"is_causal": is_causal, "ptr": ptr, "query_ptr": query_ptr, "device": device}
    near, wide = window(n, size, **sides), global_tokens(n, num_global, **sides)
    heads = checks.integer("heads", heads, 1, "A graph without heads has no rows.")
    edges = heads * (near.num_edges + wide.num_edges)
    checks.memory("heads", edges, 64, near.device, "Take fewer global tokens, fewer heads or shorter sequences.")
    fixed = near | wide
    of_draws: Any = {"seed": seed, "generator": generator, "sequence_ids": sequence_ids}
    drawn = random(n, num_random, heads=heads, **of_draws, **sides)
    return fixed.expand(heads) | drawn


def block_diagonal(
    n: int | None, num_blocks: int, *, is_causal: bool = False, heads: int = 1, ptr: Ptr = None, query_ptr: Ptr = None,
    device: Device = None,
) -> AttentionGraph:  # fmt: skip
    """Each token attends to all tokens of its block: pattern 1 of Lemma 2 (Cho et al.).

    A pair is an edge if :math:`\\lfloor r_i K/n \\rfloor = \\lfloor r_j K/n \\rfloor`: K blocks of consecutive tokens,
    whose sizes differ by at most 1. The SBM of this graph is Y = Z = onehot of the block, S = I. (Lemma 2 of Cho et al.
    counts tokens from 1, which makes K + 1 blocks.)

    Args:
        num_blocks: Number of blocks K, at least 1. In a sequence of at most K tokens each token is a block.
        n, is_causal, heads, ptr, query_ptr, device: As in :func:`full`.

    Returns:
        A graph with about :math:`H \\sum_b n_b^2 / K` edges.

    Example:
        >>> block_diagonal(5, 2).to_dense()[0].int().tolist()
        [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1]]
    """
    num_blocks = checks.integer("num_blocks", num_blocks, 1, "One block is the full graph.")
    positions = _Positions.of(n, is_causal, heads, ptr, device, query_ptr)
    length = positions.length
    # More than n blocks change nothing; the clamp keeps r * K and the ceilings below within int64.
    blocks = length.clamp(max=num_blocks)
    block = positions.position * blocks // length
    first = (block * length + blocks - 1) // blocks  # the least r of the block: ceil(block * n / K)
    end = ((block + 1) * length + blocks - 1) // blocks
    return positions.consecutive(positions.start + first, positions.start + end)


def relay_keys(
    n: int | None, num_relays: int, *, is_causal: bool = False, heads: int = 1, ptr: Ptr = None, query_ptr: Ptr = None,
    device: Device = None,
) -> AttentionGraph:  # fmt: skip
    """Every token attends to the last ``num_relays`` tokens of its sequence: pattern 2 of Lemma 2 (Cho et al.).

    A pair is an edge if :math:`r_j \\ge n - K`. The SBM of this graph is Y = 1, Z = the relays, S = 1. The proof adds
    self-loops, as in ``relay_keys(n, num_relays) | self_loops(n)``; this function does not.

    Args:
        num_relays: Number of relays K, at least 1. A sequence with no more tokens gets its full graph.
        n, is_causal, heads, ptr, query_ptr, device: As in :func:`full`.

    Returns:
        A graph with at most ``H * N * num_relays`` edges.

    Example:
        >>> relay_keys(3, 1).to_dense()[0].int().tolist()
        [[0, 0, 1], [0, 0, 1], [0, 0, 1]]
    """
    num_relays = checks.integer("num_relays", num_relays, 1, "It is the number of relays of each sequence.")
    positions = _Positions.of(n, is_causal, heads, ptr, device, query_ptr)
    return positions.consecutive(positions.end - positions.length.clamp(max=num_relays), positions.end)


def relay_queries(
    n: int | None, num_relays: int, *, is_causal: bool = False, heads: int = 1, ptr: Ptr = None, query_ptr: Ptr = None,
    device: Device = None,
) -> AttentionGraph:  # fmt: skip
    """The last ``num_relays`` tokens of a sequence attend to all of it: pattern 3 of Lemma 2 (Cho et al.).

    Other tokens have no keys. A pair is an edge if :math:`r_i \\ge n - K`, the transpose of :func:`relay_keys`. The
    proof adds self-loops, as in ``relay_queries(n, num_relays) | self_loops(n)``; this function does not.

    Args:
        num_relays: Number of relays K, at least 1. A sequence with no more tokens gets its full graph.
        n, is_causal, heads, ptr, query_ptr, device: As in :func:`full`.

    Returns:
        A graph with at most ``H * N * num_relays`` edges.

    Example:
        >>> relay_queries(3, 1).to_dense()[0].int().tolist()
        [[0, 0, 0], [0, 0, 0], [1, 1, 1]]
    """
    num_relays = checks.integer("num_relays", num_relays, 1, "It is the number of relays of each sequence.")
    positions = _Positions.of(n, is_causal, heads, ptr, device, query_ptr)
    is_relay = positions.length - positions.position <= num_relays
    return positions.consecutive(positions.start, torch.where(is_relay, positions.end, positions.start))


def self_loops(
    n: int | None, *, is_causal: bool = False, heads: int = 1, ptr: Ptr = None, query_ptr: Ptr = None,
    device: Device = None,
) -> AttentionGraph:  # fmt: skip
    """Each token attends only to itself.

    Args:
        n, is_causal, heads, ptr, query_ptr, device: As in :func:`full`.

    Returns:
        A graph with ``H * N`` edges.

    Example:
        >>> self_loops(3).edge_index.tolist()
        [[0, 1, 2], [0, 1, 2]]
    """
    return window(n, 0, is_causal=is_causal, heads=heads, ptr=ptr, query_ptr=query_ptr, device=device)


# --------------------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True)
class _Positions:
    """The position of each query, the ends of its sequence, and the options of the pattern."""

    is_causal: bool
    heads: int
    num_keys: int
    ptr: Tensor  # [B+1]
    query_ptr: Tensor  # [B+1]
    start: Tensor  # [N], the first token of its sequence
    end: Tensor  # [N], one past the last
    position: Tensor  # [N], r in the formulas

    @classmethod
    def of(
        cls, n: int | None, is_causal: bool, heads: int, ptr: Tensor | None, device: Device,
        query_ptr: Tensor | None = None,
    ) -> _Positions:  # fmt: skip
        checks.flag("is_causal", is_causal, "It says whether edges to later tokens are left out.")
        heads = checks.integer("heads", heads, 1, "A graph without heads has no rows.")
        check_tensor(ptr, "ptr")
        if n is not None:
            n = checks.integer("n", n, 0, "It is the number of tokens.")
            is_readable = ptr is not None and values.can_read_without_sync(ptr) and can_read(ptr)
            if is_readable and ptr is not None and ptr.dim() == 1 and ptr.numel() and ptr[-1] != n:
                raise ValueError(f"Expected 'n' to be the last entry of 'ptr', {int(ptr[-1])} (got {n}). Pass None.")
        elif ptr is None:
            raise ValueError("Expected 'n' or 'ptr' (got neither). Pass the number of tokens or their offsets.")
        else:
            n = int(ptr.flatten()[-1]) if ptr.numel() and ptr.dtype in checks.INTEGERS and not ptr.is_meta else 0
            if n < 0:
                raise ValueError(
                    f"Expected 'ptr' to run from 0 to the number of tokens (got an end of {n}). "
                    "Pass offsets of all sequences."
                )
        device = None if device is None else checks.device(device)
        position = (torch.get_default_device() if ptr is None else ptr.device) if device is None else device
        checks.memory("n" if ptr is None else "ptr", n, 80, position, "Take shorter sequences.", "tokens")
        checks.memory("heads", heads * n, 24, position, "Take fewer heads.", "rows")
        ptr, rows = resolve_ptr(n, ptr, device=device), n
        if query_ptr is None:
            query_ptr = ptr
        else:
            check_tensor(query_ptr, "query_ptr", optional=False)
            rows = int(query_ptr[-1])
            query_ptr = resolve_ptr(rows, query_ptr, name="query_ptr", device=ptr.device)
        count = query_ptr.diff()
        start, end = (torch.repeat_interleave(ends, count, output_size=rows) for ends in (ptr[:-1], ptr[1:]))
        places = torch.arange(rows, device=ptr.device) - start
        if query_ptr is not ptr:  # the last query is the last token
            places += end - torch.repeat_interleave(query_ptr[1:], count, output_size=rows)
        return cls(is_causal, heads, n, ptr, query_ptr, start, end, places)

    @property
    def length(self) -> Tensor:
        return self.end - self.start  # [N]

    def count(self, degree: Tensor, copies: int, bytes_each: int) -> int | None:
        """The number of edges, or None in compiled code. Raises ValueError if memory does not hold them."""
        if torch.compiler.is_compiling():
            return None
        require_values(self.ptr, "ptr")
        high, low = torch.stack([degree >> 16, degree & 0xFFFF]).sum(1).tolist()  # int64 may not hold their sum
        total = (high << 16) + low
        alone = checks.fits(copies * total // self.heads, bytes_each, self.ptr.device)
        checks.memory(
            "heads" if self.heads > 1 and alone else "n", copies * total, bytes_each, self.ptr.device,
            "Take a sparser pattern, fewer heads or shorter sequences.",
        )  # fmt: skip
        return total

    def graph(self, degree: Tensor, col: Tensor, heads: int) -> AttentionGraph:
        rowptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        sizes = (self.position.numel(), self.num_keys, heads, self.query_ptr, self.ptr)
        is_causal = self.is_causal and self.query_ptr is self.ptr
        return AttentionGraph._trusted(rowptr, col.to(index_type(self.num_keys)), *sizes, is_causal)

    def consecutive(self, first: Tensor, end: Tensor) -> AttentionGraph:
        """The graph in which token i attends to tokens ``first[i]..end[i]-1``, in every head."""
        if self.is_causal:
            end = torch.minimum(end, self.start + self.position + 1)
        degree = (end - first).clamp(min=0)
        return self.graph(degree, self._keys(first, degree, degree), 1).expand(self.heads)

    def near(self, size: int | None, num_sinks: int) -> AttentionGraph:
        """The graph in which each token attends to a window, unless its size is None, and to the first tokens."""
        token = self.start + self.position
        last = torch.minimum(token + 1, self.end) if self.is_causal else self.end
        sinks = torch.minimum(self.length.clamp(max=num_sinks), last - self.start)
        if size is None:
            return self.consecutive(self.start, self.start + sinks)
        half_width = self.length.clamp(max=size)
        end = torch.minimum(token + half_width + 1, last)
        first = torch.maximum(token - half_width, self.start + sinks)
        if not num_sinks:
            return self.consecutive(first, end)
        counts = torch.stack([sinks, (end - first).clamp(min=0)], 1)  # [N, 2]
        degree = counts.sum(1)
        col = self._keys(torch.stack([self.start, first], 1).flatten(), counts.flatten(), degree)
        return self.graph(degree, col, 1).expand(self.heads)

    def _keys(self, first: Tensor, count: Tensor, degree: Tensor) -> Tensor:
        """The keys of all edges, for rows that attend to ranges of consecutive keys with the given degrees."""
        width = index_type(self.num_keys)
        total = self.count(degree, self.heads, bytes_each=width.itemsize if self.heads == 1 else 2 * width.itemsize)
        return runs(first, count, total, width)


class _Draws:
    """Random words for rows ``h * N + i``: functions of seed, sequence number, head and position of the token."""

    def __init__(self, positions: _Positions, sequence_ids: Tensor | None, seed: int) -> None:
        sequence_ids = resolve_sequence_ids(sequence_ids, positions.ptr.numel() - 1, positions.ptr.device)
        rows = positions.position.numel()
        sequence_ids = sequence_ids.repeat_interleave(positions.query_ptr.diff(), output_size=rows)
        sequence_ids, first_head = (x.repeat(positions.heads) for x in split_ids(sequence_ids))  # [H*N]
        head = torch.arange(positions.heads, device=sequence_ids.device).repeat_interleave(rows)
        self.row = torch.arange(head.numel(), device=sequence_ids.device)
        self.position, self.head = positions.position.repeat(positions.heads), head + first_head | RANDOM_KEY
        self.sequence_ids = sequence_ids
        self.used, self.seed = torch.zeros_like(self.row), seed

    def __call__(self, count: Tensor) -> tuple[Tensor, Tensor]:
        """The row of each word, and the word: the next ``count[row]`` of each row, of 32 bits, ``[sum(count)]``."""
        blocks = (count + 3) // 4  # of four words
        row = torch.repeat_interleave(self.row, blocks)
        block = runs(self.used, blocks)
        words = torch.stack(philox(block, self.position[row], self.sequence_ids[row], self.head[row], self.seed), dim=1)
        is_drawn = 4 * (block - self.used[row])[:, None] + torch.arange(4, device=row.device) < count[row][:, None]
        self.used = self.used + blocks
        return row[:, None].expand(-1, 4)[is_drawn], words[is_drawn]


def _draw_distinct(count: Tensor, size: Tensor, draws: _Draws) -> Tensor:
    """Draw a uniform set of ``count[i]`` integers in ``0..size[i]-1`` for each row i, ascending, ``[sum(count)]``."""
    if not count.numel():
        return count
    stride, rows = int(size.max()), draws.row
    leave = 2 * count > size  # rows that draw the numbers to leave out
    number_to_draw = torch.where(leave, size - count, count)
    # `drawn` holds the new cells of each round, ascending; the cell of a number is row * stride + number
    missing, drawn = number_to_draw, [number_to_draw[:0]]
    while bool(missing.any()):
        row, word = draws(missing)
        cells = (row * stride + (word * size[row] >> 32)).unique()
        for before in drawn[1:]:
            cells = cells[before[torch.searchsorted(before, cells).clamp(max=before.numel() - 1)] != cells]
        if cells.numel():
            drawn.append(cells)
            missing = missing - torch.bincount(cells // stride, minlength=rows.numel())
    cells = torch.cat(drawn).sort().values
    if bool(leave.any()):  # add all numbers of these rows, and drop those that then appear twice
        cells, times = torch.cat([cells, runs(rows[leave] * stride, size[leave])]).unique(return_counts=True)
        cells = cells[times == 1]
    return cells % stride


# -------------------------------------------------------------------------------------------------------------- source


class BoundRule:
    """A function that makes graphs, with options that are passed in every call.

    Args:
        rule: The function. A call passes it one argument and the options.
        options: Further arguments of the function.
        given: Names of arguments that each call also passes, if the rule takes such arguments.

    Raises:
        TypeError: ``rule`` is not callable, does not have an option, or has another argument without a default.
    """

    def __init__(
        self, rule: Callable[..., AttentionGraph], options: Mapping[str, Any], supplied: Collection[str] = ()
    ) -> None:
        checks.kind("rule", rule, Callable, "callable", "It makes a graph.")
        parameters = inspect.signature(rule).parameters
        general = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        unknown = [option for option in options if option not in parameters and not general]
        if unknown:
            raise TypeError(f"Expected options of 'rule' (got {unknown}). It takes {[*parameters]}.")
        for p in [*parameters.values()][1:]:
            is_required = p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            is_valid = not is_required or p.name in {*options, *supplied}
            what, way_out = "among the options of 'rule'", f"Give `{p.name}=...`."
            checks.require(is_valid, p.name, what, [*options], way_out, TypeError)
        self.rule, self.options = rule, dict(options)
        self.supplied = [name for name in supplied if name in parameters and name not in options]

    def default(self, name: str, missing: Any) -> Any:
        """The value of an option in each call; ``missing`` if the rule does not have it."""
        parameters = inspect.signature(self.rule).parameters
        return self.options.get(name, parameters[name].default if name in parameters else missing)

    def __call__(self, tokens: Tokens | None, **more: Any) -> AttentionGraph:
        """Make the graph."""
        graph = self.rule(tokens, **self.options, **more)
        check_graph(graph)
        return graph

    def __repr__(self) -> str:
        name = getattr(self.rule, "__name__", type(self.rule).__name__)
        return ", ".join([name, *(f"{key}={value!r}" for key, value in self.options.items())])


class PatternSource(GraphSource):
    """Makes a fixed pattern over the offsets of each batch. It does not read the queries and keys.

    With :func:`full` the layer attends densely, and edges are stored only if the graph is used.

    Args:
        rule: A function of this module, or one of your own, ``rule(None, ptr=ptr, **options) -> AttentionGraph``. Each
            call also passes ``seed``, ``sequence_ids`` and ``is_causal`` of the tokens, if the rule has arguments of
            these names, and ``query_ptr`` where the queries are the last tokens. A rule without the argument
            ``query_ptr`` makes the rows of all tokens, of which the last rows are kept.
        **options: Further arguments of the rule, e.g. ``size=64``.

    Raises:
        TypeError: ``rule`` is not callable, does not have an option, or has another argument without a default.

    Example:
        >>> source = PatternSource(window, size=1)
        >>> source(Tokens(torch.randn(2, 10, 8), query_ptr=torch.tensor([0, 4, 10]))).graph
        AttentionGraph(2 sequences, 1 head, 10 queries, 10 keys, 26 edges, density 50.0%)
    """

    reads_vectors = False
    _GIVEN = ("ptr", "query_ptr", "seed", "sequence_ids", "is_causal")
    for_all_heads = False
    """True in a copy for some heads of a layer if all heads share one graph, which is drawn as that of head 0."""

    def __init__(self, rule: Callable[..., AttentionGraph], **options: Any) -> None:
        super().__init__()
        self.rule = BoundRule(rule, options, self._GIVEN)

    def forward(self, tokens: Tokens) -> Choice:
        """As :meth:`GraphSource.forward`; queries and keys must be the same tokens."""
        if not tokens.are_same:
            raise ValueError(
                "Expected 'rule' over tokens that are queries and keys (got a pair, as in cross attention). Pass a "
                "graph, or replace the attention of the encoder alone, `replace_attention(model.encoder, ...)`."
            )
        if self.rule.rule is full and not self.rule.options and not tokens.at_end:
            return DenseChoice(tokens)
        arguments = {name: getattr(tokens, "key_ptr" if name == "ptr" else name) for name in self.rule.supplied}
        makes_rows = "query_ptr" in arguments
        if makes_rows and not tokens.at_end:
            arguments["query_ptr"] = None
        if self.for_all_heads and arguments.get("sequence_ids") is not None:
            arguments["sequence_ids"] = split_ids(arguments["sequence_ids"])[0]
        graph = self.rule(None, **arguments)
        if tokens.at_end and not makes_rows:
            graph = (graph.causal() if tokens.is_causal else graph).expand_tokens()._last_rows(tokens.query_ptr)
        return Choice(tokens._drop_later(graph))

    def _row_rule(self, query: Tensor, key: Tensor) -> RowRule | None:
        if self.rule.rule is not window:
            return None
        return RowRule(None, None, None, self.rule.options["size"], self.rule.default("num_sinks", 0))

    def take_heads(self, count: int, total: int) -> None:
        """Make graphs of ``count`` of ``total`` heads; see :class:`~sbm_pyg.HeadParallel`."""
        self.for_all_heads = self.rule.default("heads", 1) == 1
        if not self.for_all_heads:
            self.rule = BoundRule(self.rule.rule, self.rule.options | {"heads": count}, PatternSource._GIVEN)

    def extra_repr(self) -> str:
        return repr(self.rule)


def check_window(window: int | None) -> int | None:
    """Check the size of the window that a source adds to its graphs."""
    return None if window is None else checks.integer("window", window, 0, "It is a distance in tokens; None for none.")


def check_sinks(num_sinks: int) -> int:
    """Check the number of first tokens that a source adds to the keys of all queries."""
    return checks.integer("num_sinks", num_sinks, 0, "It is a number of first tokens; 0 for none.")


def with_forced(choice: Choice, size: int | None, num_sinks: int, tokens: Tokens) -> Choice:
    """Add a window and the first tokens to the choice in each head, regardless of the probabilities.

    Nothing is added if queries and keys are different tokens.
    """
    if (size is None and not num_sinks) or not tokens.are_same:
        return choice
    if size == 0 and not num_sinks and not tokens.at_end:
        return choice._force_loops()
    graph = choice.graph  # its number of tokens is known even where offsets cannot be read, as in compiled code
    rows = graph.query_ptr if tokens.at_end else None
    positions = _Positions.of(graph.num_keys, tokens.is_causal, 1, graph.key_ptr, None, rows)
    return choice.force(positions.near(size, num_sinks))
