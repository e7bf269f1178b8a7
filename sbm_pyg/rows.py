"""A graph in compressed rows: which query attends to which key, per head and sequence.

In: row offsets and keys, or another graph. Out: its numbers, its parts, and its union with another. Not here: any other
form of a graph (``graph``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from . import ops
from .ops import checks
from .ops.reference.segments import EDGES_PER_CHUNK, edge_row
from .ops.values import can_read, require_values
from .ragged import check_tensor, count_pairs, offsets, resolve_ptr, unmerged

__all__ = ["CompressedRows", "check_edges", "check_graph", "check_sizes", "index_type", "masked_rows", "the_one"]


@dataclass(frozen=True, eq=False, repr=False)
class CompressedRows:
    """A graph in compressed rows: all of :class:`~sbm_pyg.AttentionGraph` but its conversions.

    Make an :class:`~sbm_pyg.AttentionGraph`, never this. The arguments are explained there.
    """

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
        checks.flag("is_causal", self.is_causal, "It says whether no query may attend to a later key.")
        if self.rowptr.dtype != torch.int64:
            raise TypeError(
                f"Expected 'rowptr' to be int64 (got {self.rowptr.dtype}). "
                "Offsets of large graphs overflow anything smaller."
            )
        if self.col.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"Expected 'col' to be int32 or int64 (got {self.col.dtype}). Convert it with `.long()`.")
        rows = self.heads * self.num_queries + 1
        if self.rowptr.shape != (rows,):
            raise ValueError(
                f"Expected 'rowptr' to be [H*N+1] = [{rows}] (got {list(self.rowptr.shape)}). "
                "It holds one row per head and query, heads outermost."
            )
        if self.col.dim() != 1:
            raise ValueError(
                f"Expected 'col' to be [E] (got {list(self.col.shape)}). It holds the key token of each edge."
            )
        self._fill_offsets()
        for name in ("query_ptr", "key_ptr"):
            if getattr(self, name).dtype != torch.int64:
                raise TypeError(
                    f"Expected '{name}' to be int64 (got {getattr(self, name).dtype}). Convert it with `.long()`."
                )
        if self.query_ptr.shape != self.key_ptr.shape or self.query_ptr.dim() != 1 or self.query_ptr.numel() < 2:
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
        """Put the offsets of one sequence where none were given."""
        if self.query_ptr is None:
            object.__setattr__(self, "query_ptr", resolve_ptr(self.num_queries, device=self.device))
        if self.key_ptr is None:
            if self.num_keys != self.num_queries and self.query_ptr.numel() > 2:
                raise ValueError(
                    "Expected 'key_ptr' where N != M "
                    f"(got N = {self.num_queries}, M = {self.num_keys} and no 'key_ptr'). Pass the offsets of the keys."
                )
            same = self.num_keys == self.num_queries
            object.__setattr__(
                self, "key_ptr", self.query_ptr if same else resolve_ptr(self.num_keys, device=self.device)
            )

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
        """Make a graph without checks, from rows that are valid by the way they were made."""
        graph = object.__new__(cls)
        object.__setattr__(graph, "rowptr", rowptr)
        object.__setattr__(graph, "col", col)
        object.__setattr__(graph, "num_queries", num_queries)
        object.__setattr__(graph, "num_keys", num_keys)
        object.__setattr__(graph, "heads", heads)
        object.__setattr__(graph, "query_ptr", query_ptr)
        object.__setattr__(graph, "key_ptr", key_ptr)
        object.__setattr__(graph, "is_causal", is_causal)
        graph._fill_offsets()
        return graph

    def _with(self, rowptr: Tensor, col: Tensor, heads: int, is_causal: bool | None = None) -> Self:
        """The graph of other rows, which are valid, over the same tokens."""
        sides = (self.num_queries, self.num_keys, heads, self.query_ptr, self.key_ptr)
        return self._trusted(rowptr, col, *sides, self.is_causal if is_causal is None else is_causal)

    # ---------------------------------------------------------------- what is in it

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
        """The edges as the ops take them, without a bias; ``rows._replace(bias=...)`` adds one."""
        return ops.Rows(self.rowptr, self.col)

    @property
    def edge_row(self) -> Tensor:
        """Row ``h * N + i`` of each edge, ``[E]`` int64."""
        return edge_row(self.rowptr, self.num_edges)

    @property
    def edge_index(self) -> Tensor:
        """Edges as PyG writes them, ``[2, E]`` int64: row 0 the key (source), row 1 the query (target)."""
        return torch.stack([self.col.long(), self.edge_row % self.num_queries])

    @property
    def edge_head(self) -> Tensor:
        """Head of each edge, ``[E]`` int64, an edge type in the sense of PyG's relational layers."""
        return self.edge_row // self.num_queries

    @property
    def degree(self) -> Tensor:
        """Number of keys each query attends to, ``[H, N]`` int64."""
        return self.rowptr.diff().view(self.heads, self.num_queries)

    @property
    def edges_per_sequence(self) -> Tensor:
        """Number of edges, ``[B, H]`` int64."""
        starts = self.query_ptr[:, None] + self.num_queries * torch.arange(self.heads, device=self.device)  # [B+1, H]
        return self.rowptr[starts].diff(dim=0)

    @property
    def pairs_per_sequence(self) -> Tensor:
        """Number of pairs of a query and a key that may be edges, ``[B]`` int64, in each head."""
        return count_pairs(self.query_ptr, self.key_ptr, self.is_causal)

    @property
    def density(self) -> Tensor:
        """Share of the pairs of each sequence that are edges, ``[B, H]`` float64, or float32 on devices without it."""
        return self.edges_per_sequence.to(checks.widest(self.device)) / self.pairs_per_sequence[:, None]

    def __repr__(self) -> str:
        def count(number: int, noun: str, plural: str = "") -> str:
            return f"{number:,} {noun if number == 1 else plural or noun + 's'}"

        parts = [
            count(self.num_sequences, "sequence"),
            count(self.heads, "head"),
            count(self.num_queries, "query", "queries"),
            count(self.num_keys, "key"),
            count(self.num_edges, "edge"),
        ]
        if not self.query_ptr.is_meta:
            pairs = self.heads * int(self.pairs_per_sequence.sum())
            parts.append(f"density {100 * self.num_edges / max(pairs, 1):.1f}%")
        causal = ", causal" if self.is_causal else ""
        device = "" if self.device.type == "cpu" else f", device='{self.device}'"
        return f"AttentionGraph({', '.join(parts)}{causal}{device})"

    def __eq__(self, other: object) -> bool:
        """True where the other graph has the same edges, heads and sequences (index dtypes and devices may differ)."""
        if not isinstance(other, CompressedRows):
            return NotImplemented
        if (self.heads, self.num_queries, self.num_keys, self.num_edges) != (
            other.heads,
            other.num_queries,
            other.num_keys,
            other.num_edges,
        ):
            return False
        mine, theirs = (
            (self.query_ptr, self.key_ptr, self.rowptr, self.col.long()),
            (other.query_ptr, other.key_ptr, other.rowptr, other.col.long()),
        )
        return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(mine, theirs, strict=True))

    def __hash__(self) -> int:
        return hash((self.heads, self.num_queries, self.num_keys, self.num_edges))

    def validate(self) -> Self:
        """Check every value again, in O(HN + E), and return the graph.

        The constructor has done so. Call it where tensors of the graph were written into since.

        Raises:
            ValueError: Offsets do not fit, an edge leaves its sequence, the keys of a row are unsorted or repeated, or
                a causal graph has an edge from a later key.
        """
        resolve_ptr(self.num_queries, self.query_ptr, name="query_ptr")
        if self.key_ptr is not self.query_ptr or self.num_keys != self.num_queries:
            resolve_ptr(self.num_keys, self.key_ptr, name="key_ptr")
        compiling = torch.compiler.is_compiling()
        if not (compiling or can_read(self.col)):
            return self
        row = ops.invalid_row(self.rowptr, self.col, self.query_ptr, self.key_ptr, self.heads)
        rises = (self.rowptr[0] == 0) & (self.rowptr[-1] == self.num_edges)
        early = torch.ones_like(rises)
        if self.is_causal and (compiling or bool(rises & (row < 0))):
            early = ~self.later.any()
        if compiling:  # no branch on values; the kernels must still see none that is out of range
            torch._assert_async(
                rises & (row < 0) & early, "Expected 'rowptr' and 'col' to be the rows of a graph, see AttentionGraph."
            )
        elif not bool(rises & (row < 0)):
            self._explain(int(row))
        elif not bool(early):
            key, query = self.edge_index[:, self.later.nonzero()[0, 0]].tolist()
            raise ValueError(
                f"Expected 'col' to hold no key later than its query, as 'is_causal' says (got key {key} of query "
                f"{query}). `graph.causal()` leaves such edges out."
            )
        return self

    def _explain(self, row: int) -> None:
        """Say what is wrong with a row, or with the ends of all."""
        first, last, (start, end) = (
            int(self.rowptr[0]),
            int(self.rowptr[-1]),
            self.rowptr[row : row + 2].tolist() if row >= 0 else (0, 0),
        )
        if first != 0 or last != self.num_edges or not 0 <= start <= end <= last:
            raise ValueError(
                f"Expected 'rowptr' to rise from 0 to E = {self.num_edges} "
                f"(got {first} to {last}{f', and {start} to {end} in row {row}' if row >= 0 else ''}). "
                "Build it from row counts by `cumsum`."
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
        raise ValueError(
            "Expected 'col' to hold keys of the sequence of their query "
            f"(got {int(keys[0])} to {int(keys[-1])} in row {row}, whose sequence has keys {low} to {high - 1}). "
            "Key numbers count through all sequences: add their 'key_ptr' offsets to numbers that start at 0 in each."
        )

    def same_offsets(self, query_ptr: Tensor, key_ptr: Tensor) -> bool:
        """Whether the sequences of the graph have these offsets.

        Where values may not be read, as in compiled code, only their number is compared.

        Args:
            query_ptr: Offsets of the sequences in the queries, ``[B+1]`` int64.
            key_ptr: Offsets of the sequences in the keys, ``[B+1]`` int64.
        """
        check_tensor(query_ptr, "query_ptr", optional=False)
        check_tensor(key_ptr, "key_ptr", optional=False)
        return all(
            mine is ptr
            or (mine.shape == ptr.shape and (not (can_read(mine) and can_read(ptr)) or torch.equal(mine, ptr.to(mine))))
            for mine, ptr in ((self.query_ptr, query_ptr), (self.key_ptr, key_ptr))
        )

    @property
    def later(self) -> Tensor:
        """Which edges have a key later than their query, ``[E]`` bool; places count within the sequence."""
        key, query = self.edge_index
        if self.key_ptr is self.query_ptr:
            return key > query
        sequence = torch.searchsorted(self.query_ptr, query, right=True) - 1
        return key - self.key_ptr[sequence] > query - self.query_ptr[sequence]

    # ---------------------------------------------------------------- graphs from graphs

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same graph on another device.

        Raises:
            TypeError: ``non_blocking`` is no bool.
            ValueError: There is no such device, or the graph is on the meta device and has no values.
        """
        device = checks.device(device)
        checks.flag("non_blocking", non_blocking, "It is that of `torch.Tensor.to`.")
        if device.type != "meta":
            require_values(self.col, "graph")
        rowptr, col, query_ptr, key_ptr = (
            x.to(device, non_blocking=non_blocking) for x in (self.rowptr, self.col, self.query_ptr, self.key_ptr)
        )
        key_ptr = query_ptr if self.key_ptr is self.query_ptr else key_ptr
        sides = (self.num_queries, self.num_keys, self.heads, query_ptr, key_ptr)
        return self._trusted(rowptr, col, *sides, self.is_causal)

    def sequence(self, sequence: int) -> Self:
        """The graph of one sequence, tokens counted from 0, all heads."""
        require_values(self.col, "graph")
        sequence = _counted(sequence, self.num_sequences, "sequence")
        start, end = (int(x) for x in self.query_ptr[sequence : sequence + 2])
        first_key, end_key = (int(x) for x in self.key_ptr[sequence : sequence + 2])
        head_start = self.num_queries * torch.arange(self.heads, device=self.device)
        counts = self.degree[:, start:end].flatten()
        edges = [
            slice(a, b)
            for a, b in zip(
                self.rowptr[head_start + start].tolist(), self.rowptr[head_start + end].tolist(), strict=True
            )
        ]
        col = torch.cat([self.col[edge] for edge in edges]) - first_key
        sides = (end - start, end_key - first_key, self.heads)
        return self._trusted(offsets(counts), col, *sides, is_causal=self.is_causal)

    def head(self, head: int) -> Self:
        """The graph of one head, all sequences."""
        require_values(self.col, "graph")
        head = _counted(head, self.heads, "head")
        rowptr = self.rowptr[head * self.num_queries : (head + 1) * self.num_queries + 1]
        col = self.col[int(rowptr[0]) : int(rowptr[-1])]
        return self._with(rowptr - rowptr[0], col, 1)

    def expand(self, heads: int) -> Self:
        """A graph of one head, repeated for ``heads`` heads."""
        checks.integer("heads", heads, 1, "A graph without heads has no rows.")
        if self.heads == heads:
            return self
        if self.heads != 1:
            raise ValueError(
                f"Expected 'graph' to have 1 or {heads} heads (got {self.heads}). Take one with `graph.head(h)` first."
            )
        way_out = "Ask for fewer heads, or attend over the graph of one head, which serves all."
        checks.memory("heads", heads * self.num_edges, self.col.element_size(), self.device, way_out, "edges")
        checks.memory("heads", heads * self.num_queries, 8, self.device, way_out, "rows")
        starts = self.num_edges * torch.arange(heads, device=self.device)[:, None]
        rowptr = torch.cat([self.rowptr[:1], (self.rowptr[1:] + starts).flatten()])
        return self._with(rowptr, self.col.repeat(heads), heads)

    @classmethod
    def concatenate(cls, graphs: Sequence[Self]) -> Self:
        """One ragged batch of the sequences of several graphs with the same heads.

        Args:
            graphs: At least one graph; B, N and M may differ, H may not.

        Raises:
            ValueError: The list is empty or heads differ.
        """
        if isinstance(graphs, CompressedRows) or not isinstance(graphs, Sequence):
            raise TypeError(
                f"Expected 'graphs' to be a list of graphs (got {type(graphs).__name__}). Put it in brackets."
            )
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
            raise ValueError(
                f"Expected 'graphs' on one device (got {sorted(map(str, devices))}). Move them with `graph.to(device)`."
            )
        starts = torch.tensor([0] + [graph.num_keys for graph in graphs]).cumsum(0).tolist()
        per_head = [[graph.head(head) for graph in graphs] for head in range(heads)]
        degree = torch.cat([graph.degree for graph in graphs], dim=1).flatten()
        col = torch.cat(
            [graph.col.long() + offset for row in per_head for graph, offset in zip(row, starts, strict=False)]
        )
        query_ptr = offsets(torch.cat([graph.query_ptr.diff() for graph in graphs]))
        key_ptr = offsets(torch.cat([graph.key_ptr.diff() for graph in graphs]))
        return cls._trusted(
            offsets(degree), col, sum(graph.num_queries for graph in graphs), starts[-1], heads, query_ptr, key_ptr,
            all(graph.is_causal for graph in graphs),
        )  # fmt: skip

    def union(self, other: Self) -> tuple[Self, Tensor]:
        """The union of both graphs per head, and which of its edges the other graph holds.

        Both are sorted, so nothing is sorted again: cost O(E + E' log E) with E' the edges of ``other``.

        Args:
            other: A graph over the same tokens. Where one of both graphs has a single head, its edges count in every
                head.

        Returns:
            The union, and a mask ``[E'']`` bool that is True on the edges of ``other``.

        Raises:
            ValueError: The graphs are not over the same tokens, heads and sequences, or memory does not hold the union.
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
        way_out = "Unite graphs of fewer heads or shorter sequences."
        checks.memory("other", self.num_edges + other.num_edges, 36, self.device, way_out)  # numbers, masks, the result
        mine, theirs = self._numbered(), other._numbered()
        place = torch.searchsorted(mine, theirs)
        added = torch.cat([mine, mine.new_full((1,), -1)])[place] != theirs
        before = offsets(added)
        slot = place + before[:-1]  # where each edge of the other graph lands
        (new,) = unmerged(added).nonzero(as_tuple=True)
        size, landed = mine.numel() + new.numel(), slot[new]
        from_other, is_new = (
            torch.zeros(size, dtype=torch.bool, device=self.device).index_fill_(0, x, True) for x in (slot, landed)
        )
        col = self.col.new_empty(size, dtype=torch.promote_types(self.col.dtype, other.col.dtype))
        col = col.masked_scatter(~is_new, self.col.to(col.dtype)).index_copy(0, landed, other.col[new].to(col.dtype))
        is_causal = self.is_causal and other.is_causal
        return self._with(self.rowptr + before[other.rowptr], col, self.heads, is_causal), from_other

    def select(self, mask: Tensor) -> Self:
        """The graph of those edges where ``mask`` ``[E]`` bool is True. Cost O(HN + E).

        Raises:
            TypeError, ValueError: The mask is no tensor, not boolean, or not ``[E]``.
        """
        check_tensor(mask, "mask", optional=False)
        require_values(mask, "mask")
        if mask.dtype != torch.bool:
            raise TypeError(f"Expected 'mask' to be bool (got {mask.dtype}). Compare, as in `select(weight > 0)`.")
        if not torch.compiler.is_compiling() and mask.shape != self.col.shape:
            raise ValueError(
                f"Expected 'mask' to be [E] = [{self.num_edges}] (got {list(mask.shape)}). "
                "It says of each edge whether it stays."
            )
        return self._with(offsets(mask)[self.rowptr], self.col[unmerged(mask)], self.heads)

    def causal(self) -> Self:
        """The graph without the edges from later keys; its densities count the pairs that are left. Cost O(HN + E)."""
        if self.is_causal:
            return self
        graph = self.select(~self.later)
        return graph._with(graph.rowptr, graph.col, graph.heads, is_causal=True)

    def contains(self, edge_index: Tensor, edge_head: Tensor | None = None) -> Tensor:
        """Says of each pair whether it is an edge, ``[E']`` bool. Cost O(E' log E).

        Args:
            edge_index: ``[2, E']`` integers, keys and queries, in any order.
            edge_head: Head of each pair, ``[E']`` integers; head 0 if None.

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
        """Where the graph stores each of the given edges, ``[E']`` int64 in ``0 .. E-1``. Cost O(E' log E).

        All of them must be edges of the graph; :meth:`contains` says which are.

        Args:
            edge_index: ``[2, E']`` integers, keys and queries, in any order.
            edge_head: Head of each edge, ``[E']`` integers; head 0 if None.

        Raises:
            TypeError: A tensor is not an integer tensor.
            ValueError: Shapes do not fit, or an edge is not in the graph.
        """
        key, query, head = check_edges(edge_index, edge_head)
        place, found = self._search(key, query, head)
        if can_read(place) and not bool(found.all()):
            if edge_head is not None and not bool(((head >= 0) & (head < self.heads)).all()):
                raise ValueError(
                    f"Expected 'edge_head' in 0..{self.heads - 1} "
                    f"(got {int(head.min())} to {int(head.max())}). Heads count from 0."
                )
            edge = int(found.logical_not().nonzero()[0])
            raise ValueError(
                "Expected 'edge_index' to hold edges of the graph "
                f"(got key {int(key[edge])}, query {int(query[edge])}, head {int(head[edge])}, which is none). "
                "Choose among `graph.edge_index` and `graph.edge_head`."
            )
        return place

    def _search(self, key: Tensor, query: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """Where each pair is stored, or would be; and whether it is, ``[E']`` each."""
        checks.same_device("graph", self.col, edge_index=key, edge_head=head)
        mine = self._numbered()
        wanted = (head * self.num_queries + query) * self.num_keys + key
        place = torch.searchsorted(mine, wanted)
        inside = (query >= 0) & (query < self.num_queries) & (key >= 0) & (key < self.num_keys)
        inside &= (head >= 0) & (head < self.heads)
        if mine.numel() == 0:
            return place, torch.zeros_like(inside)
        return place, inside & (mine[place.clamp(max=mine.numel() - 1)] == wanted)

    def _numbered(self) -> Tensor:
        """Number of each edge among all pairs, ``[E]``, ascending."""
        return self.edge_row.mul_(self.num_keys).add_(self.col)

    def __or__(self, other: Self) -> Self:
        return self.union(other)[0] if isinstance(other, CompressedRows) else NotImplemented


def index_type(num_keys: int) -> torch.dtype:
    """The smaller integer that numbers so many keys."""
    small = not torch.compiler.is_compiling() and num_keys < 2**31  # compiled code may not know the number
    return torch.int32 if small else torch.int64


def masked_rows(
    rows: Callable[[Tensor], tuple[Tensor, Tensor]], count: int, pairs: int, name: str, way_out: str, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """Compressed rows of a mask. Where it is large, some rows are made at a time, once to count and once to keep them.

    Args:
        rows: From numbers of rows ``[r]`` to their mask ``[r, m]`` bool, and to the keys of all its pairs, ``[r, m]``.
        count: How many rows there are.
        pairs: Of how many pairs the mask is.
        name, way_out: Of what asks for the edges; see :func:`.checks.memory`.
        numbers: Empty, of the type of the keys, where the graph is.

    Returns:
        Offsets ``[count+1]``, and keys ``[E]``.
    """
    every = torch.arange(count, device=numbers.device)
    if torch.compiler.is_compiling() or pairs <= EDGES_PER_CHUNK:
        mask, keys = rows(every)
        return offsets(mask.sum(1)), keys.to(numbers.dtype).expand_as(mask)[unmerged(mask)]
    some = every.split(max(EDGES_PER_CHUNK * count // pairs, 1))
    rowptr = offsets(torch.cat([rows(part)[0].sum(1) for part in some]))
    total = int(rowptr[-1])
    checks.memory(name, total, numbers.element_size(), numbers.device, way_out)
    col, begin = numbers.new_empty(total), 0
    for part in some:
        mask, keys = rows(part)
        found = keys.to(col.dtype).expand_as(mask)[mask]
        col[begin : begin + found.numel()] = found
        begin += found.numel()
    return rowptr, col


def check_graph(graph: object, name: str = "graph") -> None:
    """Raise TypeError unless it is an :class:`~sbm_pyg.AttentionGraph`."""
    if not isinstance(graph, CompressedRows):
        raise TypeError(
            f"Expected '{name}' to be an AttentionGraph (got {type(graph).__name__}). "
            "`AttentionGraph.from_edge_index` makes one."
        )


def check_sizes(num_queries: int, num_keys: int, heads: int = 1) -> tuple[int, int, int]:
    """Return the three sizes; refuse those below 1, and those whose pairs int64 cannot number."""
    tokens = "A graph has tokens on both sides."
    heads = checks.integer("heads", heads, 1, "A graph without heads has no rows.")
    num_queries = checks.integer("num_queries", num_queries, 1, tokens)
    num_keys = checks.integer("num_keys", num_keys, 1, tokens)
    if not torch.compiler.is_compiling() and heads * num_queries * num_keys >= 2**63:
        raise ValueError(
            "Expected 'heads', 'num_queries' and 'num_keys' of a product below 2**63 "
            f"(got {heads} * {num_queries} * {num_keys}). Pairs are numbered in int64."
        )
    return num_queries, num_keys, heads


def check_edges(edge_index: Tensor, edge_head: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Key, query and head of each edge, ``[E]`` int64 each; refuse what is no list of edges."""
    for name, value in (("edge_index", edge_index), ("edge_head", edge_head)):
        check_tensor(value, name, optional=name == "edge_head")
        if value is not None and (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool):
            raise TypeError(f"Expected '{name}' to be int64 (got {value.dtype}). Convert it with `.long()`.")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"Expected 'edge_index' to be [2, E] (got {list(edge_index.shape)}). "
            "Row 0 holds keys (sources), row 1 queries (targets)."
        )
    key, query = edge_index.long()
    if edge_head is None:
        return key, query, torch.zeros_like(key)
    checks.same_device("edge_index", edge_index, edge_head=edge_head)
    if edge_head.shape != key.shape:
        raise ValueError(
            f"Expected 'edge_head' to be [{key.numel()}] (got {list(edge_head.shape)}). "
            "It holds one head number per edge."
        )
    return key, query, edge_head.long()


def the_one(value: int | None, end: int, name: str, other: str = "") -> int:
    """Return the number that is meant: ``value``, or 0 for None where there is only one thing.

    Numbers count from 0, and negative ones from the end.

    Raises:
        TypeError, ValueError: The value is no int or out of range, or it is None where there are several things.
    """
    if value is None and end > 1:
        raise ValueError(f"Expected '{name}' where there are {end} of them (got None). Pass {name}=0, for one{other}.")
    return 0 if value is None else _counted(value, end, name)


def _counted(value: int, end: int, name: str) -> int:
    checks.integer(name, value, -(2**63), "Count from 0.")
    if not -end <= value < end:
        raise ValueError(f"Expected '{name}' in 0..{end - 1} (got {value}). Count from 0.")
    return value % end
