"""A graph in compressed rows: the keys of each query, per head and sequence.

In: row offsets and keys, or another graph. Out: properties, subgraphs and unions. Not here: conversions (``graph``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from .. import ops
from ..ops import checks
from ..ops.segments import EDGES_PER_CHUNK, edge_row, runs
from ..ops.values import can_read, require_values
from .ragged import check_tensor, count_pairs, offsets, resolve_ptr, unmerged

__all__ = [
    "CompressedRows", "check_edges", "check_ends", "check_graph", "check_sizes", "index_type", "masked_rows",
    "resolve_index",
]  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class CompressedRows:
    """Base class of :class:`~sbm_pyg.AttentionGraph`, which adds conversions and documents the arguments."""

    rowptr: Tensor  # [H*N+1]
    col: Tensor  # [E]
    num_queries: int
    num_keys: int
    heads: int = 1
    query_ptr: Tensor = None  # type: ignore[assignment]  # [B+1], always a tensor after __post_init__
    key_ptr: Tensor = None  # type: ignore[assignment]  # [B+1]
    is_causal: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("rowptr", "col", "query_ptr", "key_ptr"):
            check_tensor(getattr(self, name), name, optional=name.endswith("_ptr"))
        check_sizes(self.num_queries, self.num_keys, self.heads)
        checks.flag("is_causal", self.is_causal, "If True, no query attends to a later key.")
        way_out = "Offsets of large graphs overflow int32: convert it with `.long()`."
        checks.require(self.rowptr.dtype == torch.int64, "rowptr", "to be int64", self.rowptr.dtype, way_out, TypeError)
        if self.col.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"Expected 'col' to be int32 or int64 (got {self.col.dtype}). Call `.long()`.")
        rows = self.heads * self.num_queries + 1
        if self.rowptr.shape != (rows,):
            raise ValueError(
                f"Expected 'rowptr' to be [H*N+1] = [{rows}] (got {list(self.rowptr.shape)}). "
                "It holds one row per head and query, heads outermost."
            )
        checks.require(self.col.dim() == 1, "col", "to be [E]", self.col.shape, "It holds the key of each edge.")
        self._fill_offsets()
        for name in ("query_ptr", "key_ptr"):
            if getattr(self, name).dtype != torch.int64:
                raise TypeError(f"Expected '{name}' to be int64 (got {getattr(self, name).dtype}). Call `.long()`.")
        if self.query_ptr.shape != self.key_ptr.shape or self.query_ptr.dim() != 1 or self.query_ptr.numel() < 1:
            raise ValueError(
                f"Expected 'query_ptr' and 'key_ptr' to be [B+1] both (got {list(self.query_ptr.shape)} "
                f"and {list(self.key_ptr.shape)}). Sequence b of the queries attends to sequence b of the keys."
            )
        for name in ("rowptr", "query_ptr", "key_ptr"):
            if getattr(self, name).device != self.device:
                raise ValueError(
                    f"Expected '{name}' on the device of 'col' (got {getattr(self, name).device} and {self.device}). "
                    "Move the graph as a whole with `.to(device)`."
                )
        self.validate()

    def _fill_offsets(self) -> None:
        """Replace offsets that are None by those of one sequence."""
        if self.query_ptr is None:
            object.__setattr__(self, "query_ptr", resolve_ptr(self.num_queries, device=self.device))
        if self.key_ptr is None:
            if self.num_keys != self.num_queries and self.query_ptr.numel() > 2:
                raise ValueError(
                    f"Expected 'key_ptr' for several sequences with N = {self.num_queries} queries and "
                    f"M = {self.num_keys} keys (got None). Pass the offsets of the keys."
                )
            same = self.num_keys == self.num_queries
            key_ptr = self.query_ptr if same else resolve_ptr(self.num_keys, device=self.device)
            object.__setattr__(self, "key_ptr", key_ptr)

    @classmethod
    def _trusted(
        cls,
        rowptr: Tensor,
        col: Tensor,
        num_queries: int,
        num_keys: int,
        heads: int = 1,
        query_ptr: Tensor | None = None,
        key_ptr: Tensor | None = None,
        is_causal: bool = False,
    ) -> Self:
        """Make a graph without checks, from rows that are valid by construction."""
        graph = object.__new__(cls)
        names = ("rowptr", "col", "num_queries", "num_keys", "heads", "query_ptr", "key_ptr", "is_causal")
        values = (rowptr, col, num_queries, num_keys, heads, query_ptr, key_ptr, is_causal)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(graph, name, value)
        graph._fill_offsets()
        return graph

    def _with(self, rowptr: Tensor, col: Tensor, heads: int, is_causal: bool | None = None) -> Self:
        """Copy over the same tokens, with other rows that are valid by construction."""
        sides = (self.num_queries, self.num_keys, heads, self.query_ptr, self.key_ptr)
        return self._trusted(rowptr, col, *sides, self.is_causal if is_causal is None else is_causal)

    # ---------------------------------------------------------------- properties

    @property
    def num_edges(self) -> int:
        """Number of edges E, over all heads and sequences."""
        return self.col.numel()

    @property
    def num_sequences(self) -> int:
        """Number of sequences B."""
        return self.query_ptr.numel() - 1

    @property
    def device(self) -> torch.device:
        """Device of the graph."""
        return self.col.device

    @property
    def rows(self) -> ops.Rows:
        """The edges in the form that ops take, without a bias; ``rows._replace(bias=...)`` adds a bias."""
        return ops.Rows(self.rowptr, self.col)

    @property
    def edge_row(self) -> Tensor:
        """Row ``h * N + i`` of each edge, ``[E]`` int64."""
        return edge_row(self.rowptr, self.num_edges)

    @property
    def edge_index(self) -> Tensor:
        """Edges in PyG's form, ``[2, E]`` int64. Row 0 holds the keys (sources), row 1 the queries (targets)."""
        return torch.stack([self.col.long(), self.edge_row % self.num_queries])

    @property
    def edge_head(self) -> Tensor:
        """Head of each edge, ``[E]`` int64; an edge type for PyG's relational layers."""
        return self.edge_row // self.num_queries

    @property
    def degree(self) -> Tensor:
        """Number of keys that each query attends to, ``[H, N]`` int64."""
        return self.rowptr.diff().view(self.heads, self.num_queries)

    @property
    def edges_per_sequence(self) -> Tensor:
        """Number of edges in each sequence and head, ``[B, H]`` int64."""
        starts = self.query_ptr[:, None] + self.num_queries * torch.arange(self.heads, device=self.device)  # [B+1, H]
        return self.rowptr[starts].diff(dim=0)

    @property
    def pairs_per_sequence(self) -> Tensor:
        """Number of pairs of a query and a key that may be edges in each head of a sequence, ``[B]`` int64."""
        return count_pairs(self.query_ptr, self.key_ptr, self.is_causal)

    @property
    def density(self) -> Tensor:
        """Fraction of pairs that are edges, ``[B, H]`` float64, or float32 on devices without float64.

        The density is 0 in a sequence without pairs.
        """
        pairs = self.pairs_per_sequence.clamp(min=1)
        return self.edges_per_sequence.to(checks.widest(self.device)) / pairs[:, None]

    def __repr__(self) -> str:
        def count(number: int, noun: str, plural: str = "") -> str:
            return f"{number:,} {noun if number == 1 else plural or noun + 's'}"

        parts = [count(self.num_sequences, "sequence"), count(self.heads, "head")]
        parts += [count(self.num_queries, "query", "queries"), count(self.num_keys, "key")]
        parts += [count(self.num_edges, "edge")]
        if not self.query_ptr.is_meta:
            pairs = self.heads * int(self.pairs_per_sequence.sum())
            percent = 100 * self.num_edges / max(pairs, 1)
            parts.append(f"density {percent:{'.2g' if 0 < percent < 1 else '.1f'}}%")
        causal = ", causal" if self.is_causal else ""
        device = "" if self.device.type == "cpu" else f", device='{self.device}'"
        return f"AttentionGraph({', '.join(parts)}{causal}{device})"

    def __eq__(self, other: object) -> bool:
        """True if both graphs have the same edges, heads and sequences; index dtypes and devices may differ."""
        if not isinstance(other, CompressedRows):
            return NotImplemented
        if hash(self) != hash(other):
            return False
        parts, other_parts = ((g.query_ptr, g.key_ptr, g.rowptr, g.col.long()) for g in (self, other))
        return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(parts, other_parts, strict=True))

    def __hash__(self) -> int:
        return hash((self.heads, self.num_queries, self.num_keys, self.num_edges))

    def validate(self) -> Self:
        """Check every value and return the graph. Cost O(HN + E).

        The constructor calls this method. Call it again after writing into a tensor of the graph.

        Raises:
            ValueError: Offsets do not fit; an edge leaves its sequence; the keys of a row are unsorted or repeated; or
                a causal graph has an edge from a later key.
        """
        resolve_ptr(self.num_queries, self.query_ptr, name="query_ptr")
        if self.key_ptr is not self.query_ptr or self.num_keys != self.num_queries:
            resolve_ptr(self.num_keys, self.key_ptr, name="key_ptr")
        compiling = torch.compiler.is_compiling()
        if not (compiling or can_read(self.col)):
            return self
        row = ops.schemas.invalid_row(self.rowptr, self.col, self.query_ptr, self.key_ptr, self.heads)
        rises = (self.rowptr[0] == 0) & (self.rowptr[-1] == self.num_edges)
        early = torch.ones_like(rises)
        if self.is_causal and (compiling or bool(rises & (row < 0))):
            early = ~self.later.any()
        if compiling:  # no branch on values, but kernels must never see one that is out of range
            valid = rises & (row < 0) & early
            torch._assert_async(valid, "Expected 'rowptr' and 'col' to be valid rows. See AttentionGraph.")
        elif not bool(rises & (row < 0)):
            self._explain(int(row))
        elif not bool(early):
            key, query = self.edge_index[:, self.later.nonzero()[0, 0]].tolist()
            raise ValueError(
                f"Expected 'col' to hold no key later than its query with is_causal=True (got key {key} of query "
                f"{query}). Remove such edges with `graph.causal()`."
            )
        return self

    def _explain(self, row: int) -> None:
        """Raise a ValueError that describes the error in an invalid row, or in the first and last offsets."""
        first, last = int(self.rowptr[0]), int(self.rowptr[-1])
        start, end = self.rowptr[row : row + 2].tolist() if row >= 0 else (0, 0)
        if first != 0 or last != self.num_edges or not 0 <= start <= end <= last:
            raise ValueError(
                f"Expected 'rowptr' to rise from 0 to E = {self.num_edges} "
                f"(got {first} to {last}{f', and {start} to {end} in row {row}' if row >= 0 else ''}). "
                "Build it with `cumsum` over the numbers of keys."
            )
        keys = self.col[start:end]
        descents = (keys[1:] <= keys[:-1]).nonzero()
        if descents.numel():
            before, after = keys[int(descents[0]) :][:2].tolist()
            raise ValueError(
                f"Expected 'col' to hold the keys of each row ascending, without repeats (got {before} before {after} "
                f"in row {row}). `AttentionGraph.from_edge_index` sorts and removes repeats."
            )
        sequence = int(torch.searchsorted(self.query_ptr, row % self.num_queries, right=True)) - 1
        low, high = self.key_ptr[sequence : sequence + 2].tolist()
        key = int(keys[(keys < low) | (keys >= high)][0])
        raise ValueError(
            "Expected 'col' to hold keys of the sequence of their query "
            f"(got key {key} of query {row % self.num_queries}, whose sequence has keys {low} to {high - 1}). "
            "Pass the offsets of the batch that the edges are from. Keys are numbered through all its sequences: add "
            "'key_ptr' to numbers that start at 0 in each."
        )

    def same_offsets(self, query_ptr: Tensor, key_ptr: Tensor) -> bool:
        """True if the sequences of the graph have these offsets.

        If values cannot be read, for example in compiled code, only the number of sequences is compared.

        Args:
            query_ptr: Offsets of the sequences in the queries, ``[B+1]`` int64.
            key_ptr: Offsets of the sequences in the keys, ``[B+1]`` int64.
        """
        check_tensor(query_ptr, "query_ptr", optional=False)
        check_tensor(key_ptr, "key_ptr", optional=False)
        return all(
            own_ptr is ptr
            or (
                own_ptr.shape == ptr.shape
                and (not (can_read(own_ptr) and can_read(ptr)) or torch.equal(own_ptr, ptr.to(own_ptr)))
            )
            for own_ptr, ptr in ((self.query_ptr, query_ptr), (self.key_ptr, key_ptr))
        )

    @property
    def lag(self) -> Tensor:
        """Position of the query in its sequence minus that of the key, for each edge, ``[E]`` int64."""
        key, query = self.edge_index
        if self.key_ptr is self.query_ptr:
            return query - key
        sequence = torch.searchsorted(self.query_ptr, query, right=True) - 1
        return (query - self.query_ptr[sequence]) - (key - self.key_ptr[sequence])

    @property
    def key_position(self) -> Tensor:
        """Position of the key of each edge in its sequence, from 0, ``[E]`` int64."""
        return self.col.long() - self.key_ptr[torch.searchsorted(self.key_ptr, self.col.long(), right=True) - 1]

    @property
    def later(self) -> Tensor:
        """True for edges from a later key, ``[E]`` bool."""
        return self.lag < 0

    # ---------------------------------------------------------------- graphs from graphs

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same graph on another device. Arguments are those of :meth:`torch.Tensor.to`.

        Raises:
            TypeError: ``non_blocking`` is not a bool.
            ValueError: The device does not exist, or the graph is on the meta device.
        """
        device = checks.device(device)
        checks.flag("non_blocking", non_blocking, "See `torch.Tensor.to`.")
        if device.type != "meta":
            require_values(self.col, "graph")
        rowptr, col, query_ptr, key_ptr = (
            x.to(device, non_blocking=non_blocking) for x in (self.rowptr, self.col, self.query_ptr, self.key_ptr)
        )
        key_ptr = query_ptr if self.key_ptr is self.query_ptr else key_ptr
        sides = (self.num_queries, self.num_keys, self.heads, query_ptr, key_ptr)
        return self._trusted(rowptr, col, *sides, self.is_causal)

    def sequence(self, sequence: int) -> Self:
        """The graph of one sequence, all heads. Tokens are numbered from 0."""
        require_values(self.col, "graph")
        sequence = _check_index(sequence, self.num_sequences, "sequence")
        start, end = (int(x) for x in self.query_ptr[sequence : sequence + 2])
        first_key, end_key = (int(x) for x in self.key_ptr[sequence : sequence + 2])
        head_start = self.num_queries * torch.arange(self.heads, device=self.device)
        counts = self.degree[:, start:end].flatten()
        edges = torch.stack([self.rowptr[head_start + start], self.rowptr[head_start + end]], 1).tolist()
        col = torch.cat([self.col[first:last] for first, last in edges]) - first_key
        sides = (end - start, end_key - first_key, self.heads)
        return self._trusted(offsets(counts), col, *sides, is_causal=self.is_causal)

    def head(self, head: int) -> Self:
        """The graph of one head, all sequences."""
        require_values(self.col, "graph")
        head = _check_index(head, self.heads, "head")
        rowptr = self.rowptr[head * self.num_queries : (head + 1) * self.num_queries + 1]
        col = self.col[int(rowptr[0]) : int(rowptr[-1])]
        return self._with(rowptr - rowptr[0], col, 1)

    def expand(self, heads: int) -> Self:
        """Repeat a graph of one head for ``heads`` heads; a graph that has ``heads`` heads is returned unchanged."""
        checks.integer("heads", heads, 1, "It is the number of heads.")
        if self.heads == heads:
            return self
        if self.heads != 1:
            what = "1 head" if heads == 1 else f"1 or {heads} heads"
            raise ValueError(f"Expected 'graph' to have {what} (got {self.heads}). Try `graph.head(h)`.")
        way_out = "Take fewer heads, or pass the graph of one head to the layer."
        checks.memory("heads", heads * self.num_edges, self.col.element_size(), self.device, way_out, "edges")
        checks.memory("heads", heads * self.num_queries, 8, self.device, way_out, "rows")
        starts = self.num_edges * torch.arange(heads, device=self.device)[:, None]
        rowptr = torch.cat([self.rowptr[:1], (self.rowptr[1:] + starts).flatten()])
        return self._with(rowptr, self.col.repeat(heads), heads)

    @classmethod
    def concatenate(cls, graphs: Sequence[Self]) -> Self:
        """One graph over the sequences of several graphs, as one ragged batch.

        Args:
            graphs: At least one graph. B, N and M may differ; H may not.

        Raises:
            TypeError: ``graphs`` is not a list of graphs.
            ValueError: The list is empty, or numbers of heads or devices differ.
        """
        if isinstance(graphs, CompressedRows) or not isinstance(graphs, Sequence):
            raise TypeError(f"Expected 'graphs' to be a list of graphs (got {type(graphs).__name__}). Pass [graph].")
        for graph in graphs:
            check_graph(graph, "graphs")
            require_values(graph.col, "graphs")
        if not graphs or len({graph.heads for graph in graphs}) != 1:
            raise ValueError(
                "Expected 'graphs' to be one or more graphs with the same heads "
                f"(got {[graph.heads for graph in graphs]}). Use `graph.expand(heads)`."
            )
        heads, devices = graphs[0].heads, {graph.device for graph in graphs}
        if len(devices) != 1:
            raise ValueError(f"Expected 'graphs' on one device (got {sorted(map(str, devices))}). Move them with `to`.")
        starts = torch.tensor([0] + [graph.num_keys for graph in graphs]).cumsum(0).tolist()
        per_head = [[graph.head(head) for graph in graphs] for head in range(heads)]
        degree = torch.cat([graph.degree for graph in graphs], dim=1).flatten()
        pieces = (pair for row in per_head for pair in zip(row, starts, strict=False))
        col = torch.cat([graph.col.to(index_type(starts[-1])) + offset for graph, offset in pieces])
        query_ptr = offsets(torch.cat([graph.query_ptr.diff() for graph in graphs]))
        key_ptr = offsets(torch.cat([graph.key_ptr.diff() for graph in graphs]))
        return cls._trusted(
            offsets(degree), col, sum(graph.num_queries for graph in graphs), starts[-1], heads, query_ptr, key_ptr,
            all(graph.is_causal for graph in graphs),
        )  # fmt: skip

    def union(self, other: Self) -> tuple[Self, Tensor]:
        """The union of both graphs per head, and a mask of the edges of the other graph.

        Cost O(HN + E + E' log E) for E' edges of ``other``; both graphs are sorted already.

        Args:
            other: A graph over the same tokens. If one of the graphs has one head, its edges are repeated for all heads
                of the other.

        Returns:
            The union, and a mask ``[E'']`` bool, True for edges of ``other``.

        Raises:
            TypeError: ``other`` is not a graph.
            ValueError: The graphs differ in tokens, heads or sequences, or the union does not fit into memory.
        """
        check_graph(other, "other")
        require_values(self.col, "graph")
        require_values(other.col, "other")
        if self.heads == 1:
            self = self.expand(other.heads)
        elif other.heads == 1:
            other = other.expand(self.heads)
        sizes = [(graph.num_queries, graph.num_keys, graph.heads, graph.device) for graph in (self, other)]
        if sizes[0] != sizes[1] or not self.same_offsets(other.query_ptr, other.key_ptr):
            raise ValueError(
                f"Expected 'other' over the same tokens, heads and sequences (got {other} for {self}). "
                "Build both with the same 'ptr'."
            )
        self._check_union(other.num_edges)
        rowptr, col, from_other = ops.schemas.union_rows(self.rowptr, self.col, other.rowptr, other.col, self.num_keys)
        return self._with(rowptr, col, self.heads, self.is_causal and other.is_causal), from_other

    def _check_union(self, edges: int) -> None:
        """Raise ValueError if memory does not hold a union with so many edges."""
        way_out = "Take graphs with fewer heads or shorter sequences."
        per_edge = 10 if self.device.type == "cpu" else 36  # the result and its mask; in plain torch also numbers
        checks.memory("other", self.num_edges + edges, per_edge, self.device, way_out)

    def select(self, mask: Tensor) -> Self:
        """The graph with only the edges for which a mask, ``[E]`` bool, is True. Cost O(HN + E).

        Raises:
            TypeError, ValueError: The mask is not a tensor ``[E]`` bool.
        """
        check_tensor(mask, "mask", optional=False)
        require_values(mask, "mask")
        if mask.dtype != torch.bool:
            raise TypeError(f"Expected 'mask' to be bool (got {mask.dtype}). Pass a comparison such as `weight > 0`.")
        checks.shape("mask", mask, self.col.shape, "[E]", "It is True for the edges to keep.")
        return self._with(offsets(mask)[self.rowptr], self.col[unmerged(mask)], self.heads)

    def _select_queries(self, is_kept: Tensor) -> tuple[Self, Tensor]:
        """The graph with the rows of the queries for which a mask, ``[N]`` bool, is True; others are empty.

        Also the numbers of its edges in this graph, ``[E']`` int64. Cost O(HN + E').
        """
        rowptr, col, edge = ops.schemas.select_rows(self.rowptr, self.col, is_kept)
        return self._with(rowptr, col, self.heads), edge

    def _last_rows(self, query_ptr: Tensor) -> Self:
        """The graph of the last queries of each sequence, whose offsets are ``[B+1]``. Cost O(HB + E')."""
        count, total = query_ptr.diff(), int(query_ptr[-1])
        head = torch.arange(self.heads, device=self.device)[:, None] * self.num_queries
        row = (head + runs(self.query_ptr[1:] - count, count, total)).flatten()
        degree = self.rowptr[row + 1] - self.rowptr[row]
        col = self.col[runs(self.rowptr[row], degree)]
        return self._trusted(offsets(degree), col, total, self.num_keys, self.heads, query_ptr, self.key_ptr)

    def _with_loops(self) -> tuple[Self, Tensor]:
        """The union with the edge from each token to itself, in a graph whose queries are its keys.

        Also returns a mask of the self-loops, ``[E']`` bool. Cost O(HN + E).
        """
        self._check_union(self.heads * self.num_queries)
        rowptr, col, is_loop = ops.schemas.add_loops(self.rowptr, self.col, self.num_keys)
        return self._with(rowptr, col, self.heads), is_loop

    def causal(self) -> Self:
        """The causal graph that remains without edges from later keys. Cost O(HN + E)."""
        if self.is_causal:
            return self
        graph = self.select(~self.later)
        return graph._with(graph.rowptr, graph.col, graph.heads, is_causal=True)

    def contains(self, edge_index: Tensor, edge_head: Tensor | None = None) -> Tensor:
        """True for each pair that is an edge, ``[E']`` bool. Cost O(E' log E).

        Args:
            edge_index: Pairs in any order, ``[2, E']`` integers: row 0 keys, row 1 queries.
            edge_head: Head of each pair, ``[E']`` integers. None: head 0.

        Raises:
            TypeError: A tensor is not an integer tensor.
            ValueError: Shapes do not fit.

        Example:
            >>> from sbm_pyg import patterns
            >>> patterns.window(5, 1).contains(torch.tensor([[0, 0], [1, 2]]))
            tensor([ True, False])
        """
        return self._search(*check_edges(edge_index, edge_head))[1]

    def find(self, edge_index: Tensor, edge_head: Tensor | None = None) -> Tensor:
        """Index of each given edge among the edges of the graph, ``[E']`` int64 in ``0 .. E-1``. Cost O(E' log E).

        Args:
            edge_index: Edges of the graph in any order, ``[2, E']`` integers: row 0 keys, row 1 queries.
            edge_head: Head of each edge, ``[E']`` integers. None: head 0.

        Raises:
            TypeError: A tensor is not an integer tensor.
            ValueError: Shapes do not fit, or a pair is not an edge of the graph; check with :meth:`contains`.
        """
        key, query, head = check_edges(edge_index, edge_head)
        position, is_edge = self._search(key, query, head)
        if can_read(position) and not bool(is_edge.all()):
            if edge_head is not None and not bool(((head >= 0) & (head < self.heads)).all()):
                raise ValueError(
                    f"Expected 'edge_head' in 0..{self.heads - 1} "
                    f"(got {int(head.min())} to {int(head.max())}). Heads count from 0."
                )
            edge = int(is_edge.logical_not().nonzero()[0])
            raise ValueError(
                "Expected 'edge_index' to hold edges of the graph "
                f"(got key {int(key[edge])}, query {int(query[edge])}, head {int(head[edge])}, which is not an edge). "
                "Check pairs with `graph.contains`."
            )
        return position

    def _search(self, key: Tensor, query: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """Position of each pair among the sorted edges, and whether it is an edge, ``[E']`` each."""
        checks.same_device("graph", self.col, edge_index=key, edge_head=head)
        edge_numbers = self._numbered()
        pair_numbers = (head * self.num_queries + query) * self.num_keys + key
        position = torch.searchsorted(edge_numbers, pair_numbers)
        inside = (query >= 0) & (query < self.num_queries) & (key >= 0) & (key < self.num_keys)
        inside &= (head >= 0) & (head < self.heads)
        return position, inside & (torch.cat([edge_numbers, edge_numbers.new_full((1,), -1)])[position] == pair_numbers)

    def _numbered(self) -> Tensor:
        """Number of each edge among all pairs, ``[E]`` int64, ascending."""
        return self.edge_row.mul_(self.num_keys).add_(self.col)

    def __or__(self, other: Self) -> Self:
        return self.union(other)[0] if isinstance(other, CompressedRows) else NotImplemented


def index_type(num_keys: int) -> torch.dtype:
    """The smallest dtype of key numbers: int32 or int64."""
    small = not torch.compiler.is_compiling() and num_keys < 2**31  # the number may be unknown in compiled code
    return torch.int32 if small else torch.int64


def masked_rows(
    rows: Callable[[Tensor], tuple[Tensor, Tensor]], count: int, pairs: int, name: str, way_out: str, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """Compressed rows of a mask.

    A large mask is computed in chunks of rows, once to count edges and once to store them.

    Args:
        rows: Function from numbers of rows, ``[r]``, to their mask, ``[r, m]`` bool, and the keys of all pairs,
            ``[r, m]`` or broadcast to it.
        count: Number of rows.
        pairs: Number of pairs in the mask.
        name, way_out: For the error if the edges do not fit into memory; see :func:`.checks.memory`.
        numbers: An empty tensor with the dtype and device of the keys.

    Returns:
        Offsets, ``[count+1]`` int64, and keys, ``[E]``.
    """
    all_rows = torch.arange(count, device=numbers.device)
    if torch.compiler.is_compiling() or pairs <= EDGES_PER_CHUNK:
        mask, keys = rows(all_rows)
        return offsets(mask.sum(1)), keys.to(numbers.dtype).expand_as(mask)[unmerged(mask)]
    chunks = all_rows.split(max(EDGES_PER_CHUNK * count // pairs, 1))
    rowptr = offsets(torch.cat([rows(chunk)[0].sum(1) for chunk in chunks]))
    total = int(rowptr[-1])
    checks.memory(name, total, numbers.element_size(), numbers.device, way_out)
    col, begin = numbers.new_empty(total), 0
    for chunk in chunks:
        mask, keys = rows(chunk)
        columns = keys.to(col.dtype).expand_as(mask)[mask]
        col[begin : begin + columns.numel()] = columns
        begin += columns.numel()
    return rowptr, col


def check_graph(graph: object, name: str = "graph") -> None:
    """Raise TypeError unless ``graph`` is an :class:`~sbm_pyg.AttentionGraph`."""
    checks.kind(name, graph, CompressedRows, "an AttentionGraph", "Build one with `AttentionGraph.from_edge_index`.")


def check_sizes(num_queries: int, num_keys: int, heads: int = 1) -> tuple[int, int, int]:
    """Check that each size is at least 1 and that int64 can number all pairs, and return the sizes."""
    heads = checks.integer("heads", heads, 1, "It is the number of heads.")
    num_queries = checks.integer("num_queries", num_queries, 0, "It is the number of queries.")
    num_keys = checks.integer("num_keys", num_keys, 0, "It is the number of keys.")
    if not torch.compiler.is_compiling() and heads * num_queries * num_keys >= 2**63:
        raise ValueError(
            "Expected 'heads', 'num_queries' and 'num_keys' with a product below 2**63 "
            f"(got {heads} * {num_queries} * {num_keys}). Take fewer: pairs are numbered in int64."
        )
    return num_queries, num_keys, heads


def check_edges(edge_index: Tensor, edge_head: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Check a list of edges, and return the key, query and head of each edge, ``[E]`` int64 each."""
    for name, value in (("edge_index", edge_index), ("edge_head", edge_head)):
        check_tensor(value, name, optional=name == "edge_head")
        if value is not None and (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool):
            raise TypeError(f"Expected '{name}' to be int64 (got {value.dtype}). Call `.long()`.")
    what, way_out = "to be [2, E]", "Row 0 holds keys (sources), row 1 queries (targets)."
    checks.require(edge_index.dim() == 2 and edge_index.size(0) == 2, "edge_index", what, edge_index.shape, way_out)
    key, query = edge_index.long()
    if edge_head is None:
        return key, query, torch.zeros_like(key)
    checks.same_device("edge_index", edge_index, edge_head=edge_head)
    if edge_head.shape != key.shape:
        raise ValueError(
            f"Expected 'edge_head' to be [{key.numel()}] (got {list(edge_head.shape)}). It has one per edge."
        )
    return key, query, edge_head.long()


def check_ends(ends: Mapping[str, tuple[Tensor, int]]) -> None:
    """Check that indices are at least 0 and below an end, by their names, since kernels do not check indices."""
    for name, (index, end) in ends.items():
        if not can_read(index):  # no branch on values
            below = f"Expected '{name}' to be at least 0 and below the number of tokens or heads."
            torch._assert_async(((index >= 0) & (index < end)).all(), below)
        elif index.numel() and (int(index.min()) < 0 or int(index.max()) >= end):
            raise ValueError(
                f"Expected '{name}' in 0..{end - 1} (got {int(index.min())} to {int(index.max())}). "
                "Check the numbers of queries, keys and heads."
            )


def resolve_index(value: int | None, end: int, name: str, other: str = "") -> int:
    """The index ``value`` in ``0 .. end-1``; negative values count from the end. None is 0 if ``end`` is 1.

    Raises:
        TypeError, ValueError: The value is not an int or is out of range, or it is None and ``end`` is above 1.
    """
    if value is None and end > 1:
        raise ValueError(f"Expected '{name}' in 0..{end - 1} (got None). Pass {name}=0, for example{other}.")
    return 0 if value is None else _check_index(value, end, name)


def _check_index(value: int, end: int, name: str) -> int:
    checks.integer(name, value, -(2**63), "Count from 0.")
    if not -end <= value < end:
        raise ValueError(f"Expected '{name}' in 0..{end - 1} (got {value}). Count from 0.")
    return value % end
