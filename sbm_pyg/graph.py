"""The one record that crosses borders: which query attends to which key, per head and sequence.

In: compressed rows, an edge list, a dense mask or another library's adjacency.
Out: the same graph in every form that PyTorch Geometric, torch, scipy and networkx understand.
Not here: how a graph is chosen (``sampling``, ``patterns``) and what is computed over it (``ops``, ``attention``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import networkx as nx
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.typing import EdgeType, SparseTensor
from torch_geometric.utils import is_sparse, to_edge_index

from . import ops
from .ops import checks
from .ragged import check_present, check_tensor, offsets, readable, resolve_ptr, resolve_sides, stored_ptr

if TYPE_CHECKING:
    import scipy.sparse

__all__ = ["AttentionGraph", "check_graph", "edge_list", "the_one"]

_TOKENS = "A graph has tokens on both sides."

DataType = TypeVar("DataType", Data, HeteroData)


@dataclass(frozen=True, eq=False, repr=False)
class AttentionGraph:
    """A bipartite graph from key tokens to query tokens, for each head of each sequence, in compressed rows.

    Row ``h * N + i`` lists the keys that query ``i`` attends to in head ``h``, ascending and without repeats. Token
    numbers count through all sequences of the batch, as in PyTorch Geometric; an edge never leaves its sequence. A
    graph is valid or it does not exist: the constructor checks every value, in O(HN + E), and whoever is handed a graph
    may trust it. It keeps the tensors that it is given. Do not write into them. Memory is O(HN + E).

    Args:
        rowptr: Row offsets, ``[H*N+1]`` int64, rising from 0 to E.
        col: Key token of each edge, ``[E]`` int32 or int64, in ``0..M-1``, ascending within each row.
        num_queries: Number of query tokens N, at least 1.
        num_keys: Number of key tokens M, at least 1; ``H * N * M`` is below 2^63.
        heads: Number of heads H, at least 1.
        query_ptr: Offsets of the sequences in the queries, ``[B+1]`` int64. One sequence if None.
        key_ptr: Offsets of the sequences in the keys, ``[B+1]`` int64. If None, that of the queries (when N = M) or one
            sequence.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: Shapes, devices or offsets do not fit, an edge leaves its sequence, or the keys of a row are
            unsorted or repeated.

    Example:
        >>> graph = AttentionGraph.from_dense(torch.tensor([[1, 0], [1, 1]]))
        >>> graph
        AttentionGraph(1 sequence, 1 head, 2 queries, 2 keys, 3 edges, density 75.0%)
        >>> graph.edge_index.tolist()  # row 0: keys (sources), row 1: queries (targets)
        [[0, 0, 1], [0, 1, 1]]
    """

    rowptr: Tensor
    col: Tensor
    num_queries: int
    num_keys: int
    heads: int = 1
    query_ptr: Tensor = None  # type: ignore[assignment]  # always a tensor after __post_init__
    key_ptr: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for name in ("rowptr", "col", "query_ptr", "key_ptr"):
            check_tensor(getattr(self, name), name, optional=name.endswith("_ptr"))
        for name, way_out in (
            ("heads", "A graph without heads has no rows."),
            ("num_queries", _TOKENS),
            ("num_keys", _TOKENS),
        ):
            checks.integer(name, getattr(self, name), 1, way_out)
        if self.rowptr.dtype != torch.int64:
            raise TypeError(
                f"Expected 'rowptr' to be int64 (got {self.rowptr.dtype}). Offsets of large graphs overflow anything "
                "smaller."
            )
        if self.col.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"Expected 'col' to be int32 or int64 (got {self.col.dtype}). Convert it with `.long()`.")
        _check_pairs(self.heads, self.num_queries, self.num_keys)
        rows = self.heads * self.num_queries + 1
        if self.rowptr.shape != (rows,):
            raise ValueError(
                f"Expected 'rowptr' to be [H*N+1] = [{rows}] (got {list(self.rowptr.shape)}). It holds one row per "
                "head and query, heads outermost."
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
                f"Expected 'query_ptr' and 'key_ptr' to be [B+1] both (got {list(self.query_ptr.shape)} and "
                f"{list(self.key_ptr.shape)}). "
                "Sequence b of the queries attends to sequence b of the keys."
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
                    f"Expected 'key_ptr' where N != M (got N = {self.num_queries}, M = {self.num_keys} and no "
                    "'key_ptr'). Pass the offsets of the keys."
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
    ) -> AttentionGraph:
        """The private door: a graph whose rows are valid by the way they were made, without a look at them."""
        graph = object.__new__(cls)
        object.__setattr__(graph, "rowptr", rowptr)
        object.__setattr__(graph, "col", col)
        object.__setattr__(graph, "num_queries", num_queries)
        object.__setattr__(graph, "num_keys", num_keys)
        object.__setattr__(graph, "heads", heads)
        object.__setattr__(graph, "query_ptr", query_ptr)
        object.__setattr__(graph, "key_ptr", key_ptr)
        graph._fill_offsets()
        return graph

    def _with(self, rowptr: Tensor, col: Tensor, heads: int) -> AttentionGraph:
        """Other rows, valid ones, over the same tokens."""
        return self._trusted(rowptr, col, self.num_queries, self.num_keys, heads, self.query_ptr, self.key_ptr)

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
        """Where the graph lies."""
        return self.col.device

    @property
    def edge_row(self) -> Tensor:
        """Row ``h * N + i`` of each edge, ``[E]`` int64."""
        rows = torch.arange(self.rowptr.numel() - 1, device=self.device)
        return torch.repeat_interleave(rows, self.rowptr.diff(), output_size=self.num_edges)

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
    def density(self) -> Tensor:
        """Share of the pairs of each sequence that are edges, ``[B, H]`` float64."""
        pairs = self.query_ptr.diff() * self.key_ptr.diff()
        return self.edges_per_sequence.double() / pairs[:, None]

    def __repr__(self) -> str:
        def count(number: int, noun: str, plural: str = "") -> str:
            return f"{number:,} {noun if number == 1 else plural or noun + 's'}"

        pairs = self.heads * int((self.query_ptr.diff() * self.key_ptr.diff()).sum())
        parts = [
            count(self.num_sequences, "sequence"),
            count(self.heads, "head"),
            count(self.num_queries, "query", "queries"),
            count(self.num_keys, "key"),
            count(self.num_edges, "edge"),
        ]
        device = "" if self.device.type == "cpu" else f", device='{self.device}'"
        return f"AttentionGraph({', '.join(parts)}, density {100 * self.num_edges / max(pairs, 1):.1f}%{device})"

    def __eq__(self, other: object) -> bool:
        """True where the other graph has the same edges, heads and sequences (index dtypes and devices may differ)."""
        if not isinstance(other, AttentionGraph):
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

    def validate(self) -> AttentionGraph:
        """Check every value again, in O(HN + E), and return the graph.

        The constructor has done so. This is for a graph whose tensors somebody has written into since.

        Raises:
            ValueError: Offsets do not fit, an edge leaves its sequence, or the keys of a row are unsorted or repeated.
        """
        resolve_ptr(self.num_queries, self.query_ptr, name="query_ptr")
        if self.key_ptr is not self.query_ptr or self.num_keys != self.num_queries:
            resolve_ptr(self.num_keys, self.key_ptr, name="key_ptr")
        compiling = torch.compiler.is_compiling()
        if not (compiling or readable(self.col)):
            return self
        row = ops.invalid_row(self.rowptr, self.col, self.query_ptr, self.key_ptr, self.heads)
        rises = (self.rowptr[0] == 0) & (self.rowptr[-1] == self.num_edges)
        if compiling:  # no branch on values; the kernels must still see none that is out of range
            torch._assert_async(
                rises & (row < 0), "Expected 'rowptr' and 'col' to be the rows of a graph, see AttentionGraph."
            )
        elif not bool(rises & (row < 0)):
            self._explain(int(row))
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
                f"Expected 'rowptr' to rise from 0 to E = {self.num_edges} (got {first} to "
                f"{last}{f', and {start} to {end} in row {row}' if row >= 0 else ''}). "
                "Build it from row counts by `cumsum`."
            )
        keys = self.col[start:end]
        descents = (keys[1:] <= keys[:-1]).nonzero()
        if descents.numel():
            before, after = keys[int(descents[0]) :][:2].tolist()
            raise ValueError(
                f"Expected 'col' to hold the keys of each row ascending, without repeats (got {before} before {after} "
                f"in row {row}). "
                "`AttentionGraph.from_edge_index` sorts and removes repeats."
            )
        sequence = int(torch.searchsorted(self.query_ptr, row % self.num_queries, right=True)) - 1
        low, high = self.key_ptr[sequence : sequence + 2].tolist()
        raise ValueError(
            f"Expected 'col' to hold keys of the sequence of their query (got {int(keys[0])} to {int(keys[-1])} in row "
            f"{row}, whose sequence has keys "
            f"{low} to {high - 1}). Key numbers count through all sequences: add their 'key_ptr' offsets to numbers "
            "that start at 0 in each."
        )

    def same_offsets(self, query_ptr: Tensor, key_ptr: Tensor) -> bool:
        """Whether its sequences begin where these offsets say; where no values may be read, whether there are as many.

        Args:
            query_ptr: Offsets of the sequences in the queries, ``[B+1]`` int64.
            key_ptr: Offsets of the sequences in the keys, ``[B+1]`` int64.
        """
        check_tensor(query_ptr, "query_ptr", optional=False)
        check_tensor(key_ptr, "key_ptr", optional=False)
        return all(
            mine is ptr
            or (mine.shape == ptr.shape and (not (readable(mine) and readable(ptr)) or torch.equal(mine, ptr.to(mine))))
            for mine, ptr in ((self.query_ptr, query_ptr), (self.key_ptr, key_ptr))
        )

    @property
    def later(self) -> Tensor:
        """Which edges come from a later key than their query, ``[E]`` bool; places count within sequences."""
        key, query = self.edge_index
        if self.key_ptr is self.query_ptr:
            return key > query
        sequence = torch.searchsorted(self.query_ptr, query, right=True) - 1
        return key - self.key_ptr[sequence] > query - self.query_ptr[sequence]

    # ---------------------------------------------------------------- graphs from graphs

    def to(self, device: torch.device | str, non_blocking: bool = False) -> AttentionGraph:
        """The same graph on another device.

        Raises:
            TypeError: ``non_blocking`` is no bool.
            ValueError: There is no such device, or the graph has no values, being on the meta device.
        """
        device = checks.device(device)
        checks.flag("non_blocking", non_blocking, "It is that of `torch.Tensor.to`.")
        if device.type != "meta":
            check_present(self.col, "graph")
        rowptr, col, query_ptr, key_ptr = (
            x.to(device, non_blocking=non_blocking) for x in (self.rowptr, self.col, self.query_ptr, self.key_ptr)
        )
        key_ptr = query_ptr if self.key_ptr is self.query_ptr else key_ptr
        return self._trusted(rowptr, col, self.num_queries, self.num_keys, self.heads, query_ptr, key_ptr)

    def sequence(self, sequence: int) -> AttentionGraph:
        """The graph of one sequence, tokens counted from 0, all heads."""
        sequence = _index(sequence, self.num_sequences, "sequence")
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
        return self._trusted(offsets(counts), col, end - start, end_key - first_key, self.heads)

    def head(self, head: int) -> AttentionGraph:
        """The graph of one head, all sequences."""
        head = _index(head, self.heads, "head")
        rowptr = self.rowptr[head * self.num_queries : (head + 1) * self.num_queries + 1]
        col = self.col[int(rowptr[0]) : int(rowptr[-1])]
        return self._with(rowptr - rowptr[0], col, 1)

    def expand(self, heads: int) -> AttentionGraph:
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
    def concatenate(cls, graphs: Sequence[AttentionGraph]) -> AttentionGraph:
        """One ragged batch of the sequences of several graphs with the same heads.

        Args:
            graphs: At least one graph; B, N and M may differ, H may not.

        Raises:
            ValueError: The list is empty or heads differ.
        """
        if isinstance(graphs, AttentionGraph) or not isinstance(graphs, Sequence):
            raise TypeError(
                f"Expected 'graphs' to be a list of graphs (got {type(graphs).__name__}). Put it in brackets."
            )
        for graph in graphs:
            check_graph(graph, "graphs")
            check_present(graph.col, "graphs")
        if not graphs or len({graph.heads for graph in graphs}) != 1:
            raise ValueError(
                "Expected 'graphs' to be one or more graphs with the same heads (got "
                f"{[graph.heads for graph in graphs]}). Use `graph.expand(heads)`."
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
            offsets(degree), col, sum(graph.num_queries for graph in graphs), starts[-1], heads, query_ptr, key_ptr
        )

    def union(self, other: AttentionGraph) -> tuple[AttentionGraph, Tensor]:
        """The union of both graphs per head, and which of its edges the other graph holds.

        Both are sorted, so nothing is sorted again: cost O(E + E' log E) with E' the edges of ``other``.

        Args:
            other: A graph over the same tokens. Of both graphs, one may have a single head; it then counts in every
                head.

        Returns:
            The union, and a mask ``[E'']`` bool that is True on the edges of ``other``.

        Raises:
            ValueError: The graphs are not over the same tokens, heads and sequences.
        """
        check_graph(other, "other")
        if self.heads == 1:
            self = self.expand(other.heads)
        elif other.heads == 1:
            other = other.expand(self.heads)
        sizes = [(graph.num_queries, graph.num_keys, graph.heads, graph.device) for graph in (self, other)]
        if sizes[0] != sizes[1] or not self.same_offsets(other.query_ptr, other.key_ptr):
            raise ValueError(
                f"Expected 'other' over the same tokens, heads and sequences (got {other} for {self}). Build both with "
                "the same 'ptr'."
            )
        mine, theirs = self._edge_key(), other._edge_key()
        place = torch.searchsorted(mine, theirs)
        added = torch.cat([mine, mine.new_full((1,), -1)])[place] != theirs
        (new,) = added.nonzero(as_tuple=True)
        slot = place[new] + torch.arange(new.numel(), device=self.device)  # where each new edge lands
        is_new = torch.zeros(mine.numel() + new.numel(), dtype=torch.bool, device=self.device).index_fill_(
            0, slot, True
        )
        (old,) = is_new.logical_not().nonzero(as_tuple=True)  # where each edge of this graph lands
        torch._check(old.numel() == mine.numel())
        col = self.col.new_empty(is_new.numel(), dtype=torch.promote_types(self.col.dtype, other.col.dtype))
        col = col.index_copy(0, old, self.col.to(col.dtype)).index_copy(0, slot, other.col[new].to(col.dtype))
        from_other = is_new.index_fill(0, old[place[added.logical_not().nonzero()[:, 0]]], True)
        return self._with(self.rowptr + offsets(added)[other.rowptr], col, self.heads), from_other

    def select(self, mask: Tensor) -> AttentionGraph:
        """The graph of those edges where ``mask`` ``[E]`` bool is True. Cost O(HN + E).

        Raises:
            TypeError, ValueError: The mask is no tensor, not boolean, or not ``[E]``.
        """
        check_tensor(mask, "mask", optional=False)
        check_present(mask, "mask")
        if mask.dtype != torch.bool:
            raise TypeError(f"Expected 'mask' to be bool (got {mask.dtype}). Compare, as in `select(weight > 0)`.")
        if not torch.compiler.is_compiling() and mask.shape != self.col.shape:
            raise ValueError(
                f"Expected 'mask' to be [E] = [{self.num_edges}] (got {list(mask.shape)}). It says of each edge "
                "whether it stays."
            )
        return self._with(offsets(mask)[self.rowptr], self.col[mask], self.heads)

    def find(self, edge_index: Tensor, edge_head: Tensor | None = None) -> Tensor:
        """Where the graph stores each of the given edges, ``[E']`` int64 in ``0 .. E-1``. Cost O(E' log E).

        All of them must be edges of the graph.

        Args:
            edge_index: ``[2, E']`` integers, keys and queries, in any order.
            edge_head: Head of each edge, ``[E']`` integers; head 0 if None.

        Raises:
            TypeError: A tensor is not an integer tensor.
            ValueError: Shapes do not fit, or an edge is not in the graph.
        """
        key, query, head = _check_edges(edge_index, edge_head)
        wanted = (head * self.num_queries + query) * self.num_keys + key
        mine = self._edge_key()
        place = torch.searchsorted(mine, wanted)
        if readable(place) and wanted.numel():
            inside = (
                (query >= 0)
                & (query < self.num_queries)
                & (key >= 0)
                & (key < self.num_keys)
                & (head >= 0)
                & (head < self.heads)
            )
            if edge_head is not None and not bool(((head >= 0) & (head < self.heads)).all()):
                raise ValueError(
                    f"Expected 'edge_head' in 0..{self.heads - 1} (got {int(head.min())} to {int(head.max())}). Heads "
                    "count from 0."
                )
            found = (
                inside & (mine[place.clamp(max=mine.numel() - 1)] == wanted)
                if mine.numel()
                else torch.zeros_like(inside)
            )
            if not bool(found.all()):
                edge = int(found.logical_not().nonzero()[0])
                raise ValueError(
                    f"Expected 'edge_index' to hold edges of the graph (got key {int(key[edge])}, query "
                    f"{int(query[edge])}, head {int(head[edge])}, which is none). "
                    "Choose among `graph.edge_index` and `graph.edge_head`."
                )
        return place

    def __or__(self, other: AttentionGraph) -> AttentionGraph:
        return self.union(other)[0] if isinstance(other, AttentionGraph) else NotImplemented

    def _edge_key(self) -> Tensor:
        return self.edge_row * self.num_keys + self.col

    # ---------------------------------------------------------------- from other forms

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor | SparseTensor,
        num_queries: int | None = None,
        num_keys: int | None = None,
        *,
        size: tuple[int, int] | None = None,
        edge_head: Tensor | None = None,
        heads: int = 1,
        query_ptr: Tensor | None = None,
        key_ptr: Tensor | None = None,
    ) -> AttentionGraph:
        """Graph of any PyG adjacency; repeated edges count once. Cost O(HN + E log E).

        Args:
            edge_index: ``[2, E]`` (row 0 = key = source, row 1 = query = target), an ``EdgeIndex``, or a transposed
                sparse adjacency (``SparseTensor`` or torch sparse, ``[N, M]``, rows = queries), of which every stored
                entry is an edge.
            num_queries: N. If None, from the offsets or the adjacency's size, else from the last query.
            num_keys: M. If None, from the offsets or the adjacency's size, else N or the last key, whichever is larger.
            size: ``(M, N)``, sources and targets as PyG's ``size`` has them, in place of ``num_queries`` and
                ``num_keys``.
            edge_head: Head of each edge, ``[E]`` int64; all edges in head 0 if None.
            heads: Number of heads H.
            query_ptr: Offsets of the sequences in the queries, ``[B+1]``.
            key_ptr: Offsets of the sequences in the keys, ``[B+1]``.

        Raises:
            TypeError: A tensor is not an integer tensor, or a number is no int.
            ValueError: Shapes or ranges do not fit, an edge leaves its sequence, or the rows take more memory than
                there is.
        """
        if size is not None:
            if num_queries is not None or num_keys is not None:
                raise ValueError(
                    f"Expected 'size' or 'num_queries' and 'num_keys' (got size={size!r} and another). They say the "
                    "same."
                )
            if not isinstance(size, tuple | list) or len(size) != 2:
                raise TypeError(
                    f"Expected 'size' to be the pair (M, N) of keys and queries (got {size!r}). Sources come first, as "
                    "in PyG."
                )
            num_keys, num_queries = size
        for name, ptr in (("query_ptr", query_ptr), ("key_ptr", key_ptr)):
            check_tensor(ptr, name)
            if ptr is not None and (ptr.dim() != 1 or ptr.numel() < 2 or ptr.dtype not in (torch.int32, torch.int64)):
                raise ValueError(
                    f"Expected '{name}' to be [B+1] int64 (got {list(ptr.shape)} {ptr.dtype}). It holds the offsets of "
                    "the sequences."
                )
        query_ptr, key_ptr = (None if ptr is None else ptr.long() for ptr in (query_ptr, key_ptr))
        if num_queries is None and query_ptr is not None:
            num_queries = int(query_ptr[-1])
        if num_keys is None and key_ptr is not None:
            num_keys = int(key_ptr[-1])
        if is_sparse(edge_index) and edge_index.dim() == 2:
            num_queries, num_keys = num_queries or edge_index.size(0), num_keys or edge_index.size(1)
        elif isinstance(edge_index, EdgeIndex):
            num_keys, num_queries = num_keys or edge_index.sparse_size(0), num_queries or edge_index.sparse_size(1)
        key, query, head = _check_edges(edge_list(edge_index), edge_head)
        if query_ptr is not None or key_ptr is not None or num_queries is None or num_keys is None:
            check_present(key, "edge_index")
        num_edges = key.numel()
        if num_queries is None:
            num_queries = int(query.max()) + 1 if num_edges else 0
        if num_keys is None:
            num_keys = max(num_queries, int(key.max()) + 1 if num_edges else 0)
        heads = checks.integer("heads", heads, 1, "A graph without heads has no rows.")
        num_queries, num_keys = (
            checks.integer(f"num_{name}", size, 1, _TOKENS)
            for name, size in (("queries", num_queries), ("keys", num_keys))
        )
        for name, index, end in (
            ("edge_index[0]", key, num_keys),
            ("edge_index[1]", query, num_queries),
            ("edge_head", head, heads),
        ):
            if not readable(index):  # no branch on values; the kernels must still see none that is out of range
                torch._assert_async(
                    ((index >= 0) & (index < end)).all(),
                    f"Expected '{name}' to count from 0 to the tokens or heads there are.",
                )
            elif num_edges and (int(index.min()) < 0 or int(index.max()) >= end):
                raise ValueError(
                    f"Expected '{name}' in 0..{end - 1} (got {int(index.min())} to {int(index.max())}). Check the "
                    "numbers of queries, keys and heads."
                )
        _check_pairs(heads, num_queries, num_keys)
        way_out = "Rows cost memory even without edges: leave out the tokens that have none."
        name = "heads" if heads > num_queries else "num_queries"
        checks.memory(name, heads * num_queries, 16, key.device, way_out, "rows")
        unique = torch.unique((head * num_queries + query) * num_keys + key)
        rowptr = torch.searchsorted(unique, num_keys * torch.arange(heads * num_queries + 1, device=key.device))
        rows = (rowptr, unique % num_keys, num_queries, num_keys, heads, query_ptr, key_ptr)
        if readable(key) and (query_ptr is not None or key_ptr is not None):
            return cls(*rows)  # type: ignore[arg-type]
        return cls._trusted(*rows)

    @classmethod
    def from_data(
        cls, data: Data | HeteroData, edge_type: EdgeType | None = None, *, heads: int | None = None
    ) -> AttentionGraph:
        """Graph of the edges of PyG data: what :meth:`to_data`, :meth:`to_hetero_data` and :meth:`replace_edges` wrote,
        or any other.

        Sequences are those of ``ptr``, else of ``batch``, else all nodes are one. Repeated edges count once. Cost O(HN
        + E log E).

        Args:
            data: ``Data``, ``HeteroData`` or a ``Batch`` of either, with ``edge_index`` or, transposed, ``adj_t``. The
                head of each edge is its ``edge_type`` in ``Data`` and its ``edge_head`` in ``HeteroData``; without them
                all edges are in one head.
            edge_type: Which edges of ``HeteroData``; may be None where there is one type.
            heads: Number of heads H; one more than the last head of an edge if None.

        Raises:
            TypeError: It is no data object.
            ValueError: It has no edges or no number of nodes, the type of edges does not exist or is not told, or
                offsets do not fit.

        Example:
            >>> graph = AttentionGraph.from_dense(torch.tensor([[1, 0], [1, 1]]))
            >>> AttentionGraph.from_data(graph.to_data()) == graph
            True
        """
        if not isinstance(data, Data | HeteroData):
            raise TypeError(
                f"Expected 'data' to be Data or HeteroData (got {type(data).__name__}). `from_edge_index` takes edges."
            )
        store, source, target, head_name = _stores(data, edge_type)
        edges = store.get("edge_index")
        edges = store.get("adj_t") if edges is None else edges
        if edges is None:
            raise ValueError(
                "Expected 'data' to have edges (got neither 'edge_index' nor 'adj_t'). A transform, as `SBMGraph`, "
                "adds some."
            )
        sizes = (source.num_nodes, target.num_nodes)
        if None in sizes:
            raise ValueError("Expected 'data' to have nodes (got none). Set `x` or `num_nodes`.")
        head = store.get(head_name)
        if heads is None:
            heads = 1 if head is None or head.numel() == 0 else int(head.max()) + 1
        key_ptr, query_ptr = (stored_ptr(nodes, device=edges.device) for nodes in (source, target))
        return cls.from_edge_index(edges, size=sizes, edge_head=head, heads=heads, query_ptr=query_ptr, key_ptr=key_ptr)

    @classmethod
    def from_networkx(cls, graph: nx.Graph[Any], *, heads: int | None = None) -> AttentionGraph:
        """Graph of one sequence from networkx, where an edge runs from key to query; an undirected edge runs both ways.

        Tokens are the nodes, in their order unless they are the numbers ``0..n-1`` themselves. Where nodes have
        networkx's attribute ``bipartite``, those with 0 are keys and those with 1 are queries, each in their order, and
        an undirected edge runs from the key. What else nodes and edges carry is left behind. Cost O(HN + E log E).

        Args:
            graph: Any networkx graph. Edges with an attribute ``head`` belong to that head, others to head 0.
            heads: Number of heads H; one more than the last head of an edge if None.

        Raises:
            TypeError: It is no networkx graph.
            ValueError: It has no nodes, an edge of a bipartite graph does not run from key to query, or a head is out
                of range.

        Example:
            >>> AttentionGraph.from_networkx(nx.DiGraph([(0, 1), (1, 1)])).to_dense()[0].int().tolist()
            [[0, 0], [1, 1]]
        """
        if not isinstance(graph, nx.Graph):
            raise TypeError(
                f"Expected 'graph' to be a networkx graph (got {type(graph).__name__}). Make one by "
                "`nx.DiGraph(edges)`."
            )
        side: Mapping[Any, Any] = dict(graph.nodes(data="bipartite"))
        split = any(value is not None for value in side.values())
        if split and not {*side.values()} <= {0, 1}:
            raise ValueError(
                "Expected the attribute 'bipartite' of each node of 'graph' to be 0 or 1 (got "
                f"{_few({*side.values()})}). Keys have 0."
            )
        keys = [node for node in graph if not split or side[node] == 0]
        queries = [node for node in graph if side[node] == 1] if split else keys
        if not keys or not queries:
            raise ValueError(
                f"Expected 'graph' to have keys and queries (got {len(keys)} and {len(queries)}). Add nodes first."
            )
        if not split and {*keys} == {*range(len(keys))}:
            keys = queries = [*range(len(keys))]
        source, target = ({node: number for number, node in enumerate(nodes)} for nodes in (keys, queries))
        edges = [(s, t, 0 if head is None else head) for s, t, head in graph.edges(data="head")]
        if not graph.is_directed():
            edges = [(t, s, head) if split and side[s] == 1 else (s, t, head) for s, t, head in edges]
            edges += [] if split else [(t, s, head) for s, t, head in edges]
        wrong = [(s, t) for s, t, _ in edges if s not in source or t not in target]
        if wrong:
            raise ValueError(
                f"Expected each edge of 'graph' to run from a key to a query (got {_few(wrong)}). Reverse it, as "
                "`graph.reverse()` does."
            )
        if any(not isinstance(head, int) for _, _, head in edges):
            raise ValueError(
                "Expected the attribute 'head' of each edge of 'graph' to be an int (got another type). Number heads "
                "from 0."
            )
        edge_index = torch.tensor([(source[s], target[t]) for s, t, _ in edges], dtype=torch.int64).view(-1, 2).T
        edge_head = torch.tensor([head for *_, head in edges], dtype=torch.int64)
        if heads is None:
            heads = max((head for *_, head in edges), default=0) + 1
        return cls.from_edge_index(edge_index, size=(len(keys), len(queries)), edge_head=edge_head, heads=heads)

    @classmethod
    def over(
        cls,
        edge_index: AttentionGraph | Tensor | SparseTensor,
        num_queries: int,
        num_keys: int,
        heads: int = 1,
        *,
        edge_head: Tensor | None = None,
        ptr: Tensor | tuple[Tensor, Tensor] | None = None,
        batch: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> AttentionGraph:
        """Graph over given tokens, from whatever holds its edges: what a layer makes of its ``edge_index``.

        Args:
            edge_index: A graph with H heads or one, or any adjacency that :meth:`from_edge_index` takes. Its edges
                count in each head.
            num_queries: Number of queries N.
            num_keys: Number of keys M.
            heads: Number of heads H.
            edge_head: Head of each edge of an adjacency, ``[E]`` int64, if heads do not share them.
            ptr: Offsets of the sequences, ``[B+1]`` int64, or the pair (keys, queries). None: those of a graph, else
                one sequence.
            batch: The same as a sequence number per token, ``[N]``.

        Raises:
            TypeError, ValueError: The graph is over other tokens, sequences or heads, or as :meth:`from_edge_index`.
        """
        num_queries = checks.integer("num_queries", num_queries, 1, _TOKENS)
        num_keys = checks.integer("num_keys", num_keys, 1, _TOKENS)
        if not isinstance(edge_index, AttentionGraph):
            edges = edge_list(edge_index)
            query_ptr, key_ptr = resolve_sides(num_queries, num_keys, ptr, batch, edges.device)
            own = 1 if edge_head is None else heads
            graph = cls.from_edge_index(
                edges, num_queries, num_keys, edge_head=edge_head, heads=own, query_ptr=query_ptr, key_ptr=key_ptr
            )
            return graph.expand(heads)
        if (edge_index.num_queries, edge_index.num_keys) != (num_queries, num_keys):
            raise ValueError(
                f"Expected 'edge_index' over N = {num_queries} queries and M = {num_keys} keys (got {edge_index}). "
                "Build the graph with the `ptr` of these tokens."
            )
        told = ptr is not None or batch is not None
        if told and not edge_index.same_offsets(*resolve_sides(num_queries, num_keys, ptr, batch, edge_index.device)):
            raise ValueError(
                f"Expected 'edge_index' over the sequences of 'ptr' or 'batch' (got {edge_index}). Build the graph "
                "with the `ptr` "
                "of these tokens, or it may join what the offsets keep apart."
            )
        return edge_index.expand(heads)

    @classmethod
    def from_dense(cls, mask: Tensor) -> AttentionGraph:
        """Graph of a mask: an edge where it is not zero.

        Args:
            mask: ``[N, M]``, ``[H, N, M]`` or ``[B, H, N, M]``, any dtype, not empty.

        Raises:
            TypeError: The mask is no dense tensor.
            ValueError: The mask has another number of dimensions, or none of something.
        """
        check_tensor(mask, "mask", optional=False)
        check_present(mask, "mask")
        if mask.dim() not in (2, 3, 4) or mask.numel() == 0:
            raise ValueError(
                f"Expected 'mask' to be [N, M], [H, N, M] or [B, H, N, M] (got {list(mask.shape)}). Queries are rows, "
                "and there is at least one of each."
            )
        mask = (
            mask.reshape(-1 if mask.dim() == 4 else 1, mask.shape[-3] if mask.dim() > 2 else 1, *mask.shape[-2:]) != 0
        )
        batch, heads, num_queries, num_keys = mask.shape
        _, sequence, _, key = mask.transpose(0, 1).nonzero(as_tuple=True)
        degree = mask.sum(-1).transpose(0, 1).flatten()
        steps = torch.arange(batch + 1, device=mask.device)
        return cls._trusted(
            offsets(degree),
            sequence * num_keys + key,
            batch * num_queries,
            batch * num_keys,
            heads,
            steps * num_queries,
            steps * num_keys,
        )

    # ---------------------------------------------------------------- to other forms

    def to_dense(self, sequence: int | None = None) -> Tensor:
        """Mask of one sequence, ``[H, n, m]`` bool, rows = queries.

        Args:
            sequence: Which sequence; may be None where there is one.

        Raises:
            ValueError: The sequence does not exist or is not told, or the mask takes more memory than there is.
        """
        sequence = the_one(sequence, self.num_sequences, "sequence")
        pairs = int(self.query_ptr.diff()[sequence] * self.key_ptr.diff()[sequence])
        checks.memory(
            "sequence",
            self.heads * pairs,
            1,
            self.device,
            "Take one head by `graph.head(h)`, or keep the graph sparse.",
            "pairs",
        )
        one = self.sequence(sequence)
        mask = torch.zeros(one.heads * one.num_queries, one.num_keys, dtype=torch.bool, device=self.device)
        mask[one.edge_row, one.col.long()] = True
        return mask.view(one.heads, one.num_queries, one.num_keys)

    def to_edge_index(self, head: int | None = None) -> EdgeIndex:
        """PyG :class:`~torch_geometric.EdgeIndex` ``[2, E]`` of one head, sorted by query, or of all heads."""
        graph = self if head is None else self.head(head)
        order = "col" if graph.heads == 1 else None
        return EdgeIndex(graph.edge_index, sparse_size=(self.num_keys, self.num_queries), sort_order=order)

    def to_scipy(self, head: int | None = None, sequence: int | None = None) -> scipy.sparse.csr_array:
        """scipy compressed rows ``[N, M]`` bool of one head, of one sequence or of the whole batch.

        Args:
            head: Which head; may be None where there is one.
            sequence: Which sequence; None for the whole batch.

        Raises:
            ImportError: scipy is not installed.
            ValueError: The head or sequence does not exist, or the head is not told.
        """
        try:
            import scipy.sparse
        except ImportError:
            raise ImportError(
                "Expected 'scipy' to be installed (it is not). Install it with `pip install sbm_pyg[analysis]`."
            ) from None
        head = the_one(head, self.heads, "head")
        graph = self.head(head) if sequence is None else self.sequence(sequence).head(head)
        data = torch.ones(graph.num_edges, dtype=torch.bool).numpy()
        return scipy.sparse.csr_array(
            (data, graph.col.cpu().numpy(), graph.rowptr.cpu().numpy()), shape=(graph.num_queries, graph.num_keys)
        )

    def to_sparse_tensor(self, head: int | None = None, value: Tensor | None = None) -> SparseTensor:
        """torch-sparse ``SparseTensor`` of one head, transposed as PyG layers take it: ``[N, M]``, rows = queries.

        Args:
            head: Which head; may be None where there is one.
            value: What its entries hold: one number or vector for each edge of all heads, ``[E, ...]``, differentiable;
                nothing if None.

        Raises:
            ImportError: torch-sparse is not installed.
            ValueError: The head does not exist or is not told, or ``value`` is not ``[E, ...]``.
        """
        import torch_geometric.typing

        if not torch_geometric.typing.WITH_TORCH_SPARSE:
            raise ImportError(
                "Expected 'torch-sparse' to be installed. Install it with `pip install --no-build-isolation "
                "sbm_pyg[sparse]`, or use `to_edge_index()`."
            )
        head = the_one(head, self.heads, "head")
        graph = self.head(head)
        if value is not None:
            if value.dim() < 1 or value.size(0) != self.num_edges:
                raise ValueError(
                    f"Expected 'value' to be [{self.num_edges}, ...] (got {list(value.shape)}). It holds one entry for "
                    "each edge of all heads."
                )
            first = int(self.rowptr[head * self.num_queries])
            value = value[first : first + graph.num_edges]
        return SparseTensor(
            rowptr=graph.rowptr,
            col=graph.col.long(),
            value=value,
            sparse_sizes=(self.num_queries, self.num_keys),
            is_sorted=True,
            trust_data=True,
        )

    def to_data(self) -> Data:
        """PyG ``Data`` with ``edge_index``, ``edge_type`` (the head) and the sequences as ``batch`` and ``ptr``.

        Raises:
            ValueError: Queries and keys are not the same tokens: N and M, or the offsets of their sequences, differ.
        """
        if self.num_queries != self.num_keys or not self.same_offsets(self.key_ptr, self.query_ptr):
            other = " and sequences of other lengths" if self.num_queries == self.num_keys else ""
            raise ValueError(
                f"Expected 'graph' to have the same tokens as queries and keys (got N = {self.num_queries}, M = "
                f"{self.num_keys}{other}). Use `to_hetero_data()`."
            )
        lengths = self.query_ptr.diff()
        batch = torch.repeat_interleave(torch.arange(lengths.numel(), device=self.device), lengths)
        return Data(
            edge_index=self.edge_index,
            edge_type=self.edge_head,
            num_nodes=self.num_queries,
            batch=batch,
            ptr=self.query_ptr,
        )

    def replace_edges(self, data: DataType, edge_type: EdgeType | None = None) -> DataType:
        """Put the edges of this graph in place of those of a PyG data object over the same tokens; returns the object.

        Sets ``edge_index`` and, with several heads, the head of each edge: ``edge_type`` of ``Data``, ``edge_head`` of
        ``HeteroData``. What described the old edges goes. A ``Batch`` still separates into its graphs.

        Args:
            data: ``Data``, ``HeteroData`` or a ``Batch`` of either, changed in place.
            edge_type: Which edges of ``HeteroData``; None for ``Data``.
        """
        if not isinstance(data, Data | HeteroData):
            raise TypeError(
                f"Expected 'data' to be Data or HeteroData (got {type(data).__name__}). `to_data()` makes a new one."
            )
        if isinstance(data, Data) and edge_type is not None:
            raise ValueError(f"Expected no 'edge_type' with Data (got {edge_type!r}). Its edges are of one type.")
        if isinstance(data, HeteroData) and not (isinstance(edge_type, tuple) and len(edge_type) == 3):
            raise ValueError(
                f"Expected 'edge_type' to be (source, relation, target) (got {edge_type!r}). Say which edges are meant."
            )
        store: Any = data if edge_type is None else data[edge_type]
        target, source = (None, None) if edge_type is None else (edge_type[2], edge_type[0])
        for nodes, total, ptr in ((target, self.num_queries, self.query_ptr), (source, self.num_keys, self.key_ptr)):
            there: Any = data if nodes is None else data[nodes]
            if not any(name in there for name in ("num_nodes", "x", "pos", "batch", "ptr")):
                continue  # PyG would guess, from edges
            if there.num_nodes != total:
                raise ValueError(
                    f"Expected 'data' to have {total} nodes, as the graph has tokens (got {there.num_nodes}). Its "
                    "edges join nodes by number."
                )
            known = stored_ptr(there)
            if known is not None and not torch.equal(known.cpu(), ptr.cpu()):
                raise ValueError(
                    f"Expected 'data' to have the sequences of the graph (got 'ptr' {known.tolist()[:9]}). Build the "
                    "graph with its 'ptr'."
                )
        head = "edge_type" if edge_type is None else "edge_head"
        for name in {"edge_attr", "edge_weight", "edge_type", "edge_head", "adj", "adj_t"} & {*store.keys()}:
            del store[name]
        edges = {"edge_index": self.edge_index} | ({head: self.edge_head} if self.heads > 1 else {})
        if self.heads > 1 and self.num_sequences > 1:  # from (head, query, key) to (sequence, head, query, key)
            order = torch.bucketize(edges["edge_index"][1], self.query_ptr[1:], right=True).argsort(stable=True)
            edges = {name: value[..., order] for name, value in edges.items()}
        store.update(edges)
        if isinstance(data, Batch) and hasattr(
            data, "_slice_dict"
        ):  # `Batch.to_data_list` goes by it; shared with the batch that was copied
            ends = self.edges_per_sequence.sum(1).cumsum(0).cpu()
            slices = dict.fromkeys(edges, torch.cat([ends.new_zeros(1), ends]))
            start = torch.stack([self.key_ptr[:-1], self.query_ptr[:-1]], 1).cpu()[..., None]  # [B, 2, 1]
            shifts = {"edge_index": start if edge_type else start[:, 1, 0], head: torch.zeros_like(start[:, 1, 0])}
            for old, new in (("_slice_dict", slices), ("_inc_dict", {name: shifts[name] for name in edges})):
                known = getattr(data, old)
                merged = known | new if edge_type is None else known | {edge_type: known.get(edge_type, {}) | new}
                setattr(data, old, merged)
        return data

    def to_hetero_data(self) -> HeteroData:
        """PyG ``HeteroData``: nodes ``query`` and ``key``, edges ``(key, to, query)`` with their ``edge_head``."""
        data = HeteroData()
        for name, ptr, total in (("query", self.query_ptr, self.num_queries), ("key", self.key_ptr, self.num_keys)):
            data[name].num_nodes = total
            data[name].ptr = ptr
            data[name].batch = torch.repeat_interleave(torch.arange(ptr.numel() - 1, device=self.device), ptr.diff())
        data["key", "to", "query"].edge_index = self.edge_index
        data["key", "to", "query"].edge_head = self.edge_head
        return data

    def to_networkx(
        self, sequence: int | None = None, head: int | Literal["all"] | None = None, *, bipartite: bool | None = None
    ) -> nx.DiGraph[Any]:
        """networkx graph of one sequence; an edge runs from key to query, as messages do.

        Args:
            sequence: Which sequence; may be None where there is one.
            head: Which head; may be None where there is one. ``"all"`` gives a ``MultiDiGraph`` over all heads, the
                head as edge key and attribute ``head``.
            bipartite: False: nodes are tokens ``0..n-1`` (needs N = M). True: nodes are ``("key", j)`` and ``("query",
                i)`` with networkx's ``bipartite`` attribute 0 and 1. None: tokens where the sequence has as many
                queries as keys, else bipartite.

        Raises:
            ValueError: The sequence or head does not exist or is not told, or tokens were asked for where N != M.
        """
        check_present(self.col, "graph")
        checks.flag("bipartite", bipartite, "It says whether queries and keys are apart.", optional=True)
        graph = self.sequence(the_one(sequence, self.num_sequences, "sequence"))
        chosen = (
            graph
            if head == "all"
            else graph.head(the_one(head, self.heads, "head", ", or head='all' for a MultiDiGraph"))
        )
        square = graph.num_queries == graph.num_keys
        if bipartite is False and not square:
            raise ValueError(
                f"Expected 'bipartite' to be True where there are not as many queries as keys (got {bipartite}, "
                f"{graph.num_queries} and {graph.num_keys})."
            )
        split = not square if bipartite is None else bipartite
        result: nx.DiGraph[Any] = nx.MultiDiGraph() if head == "all" else nx.DiGraph()
        if split:
            result.add_nodes_from((("key", j) for j in range(graph.num_keys)), bipartite=0)
            result.add_nodes_from((("query", i) for i in range(graph.num_queries)), bipartite=1)
        else:
            result.add_nodes_from(range(graph.num_queries))
        keys, queries = chosen.edge_index.tolist()
        sources: Sequence[Any] = [("key", j) for j in keys] if split else keys
        targets: Sequence[Any] = [("query", i) for i in queries] if split else queries
        if head == "all":
            heads = chosen.edge_head.tolist()
            result.add_edges_from((s, t, h, {"head": h}) for s, t, h in zip(sources, targets, heads, strict=True))
        else:
            result.add_edges_from(zip(sources, targets, strict=True))
        return result


def check_graph(graph: object, name: str = "graph") -> None:
    """Raise TypeError unless it is an :class:`AttentionGraph`."""
    if not isinstance(graph, AttentionGraph):
        raise TypeError(
            f"Expected '{name}' to be an AttentionGraph (got {type(graph).__name__}). `AttentionGraph.from_edge_index` "
            "makes one."
        )


def edge_list(adjacency: Tensor | SparseTensor) -> Tensor:
    """Edges ``[2, E]`` of any PyG adjacency, in the order in which it stores them.

    Row 0 the key (source), row 1 the query (target).
    """
    if not isinstance(adjacency, Tensor | SparseTensor):
        raise TypeError(
            "Expected 'edge_index' to be a tensor [2, E], a sparse adjacency or an AttentionGraph (got "
            f"{type(adjacency).__name__}). Use "
            "torch.tensor(edges), or torch_geometric.utils.from_networkx."
        )
    if is_sparse(adjacency):
        if isinstance(adjacency, Tensor) and adjacency.layout == torch.sparse_coo:
            adjacency = adjacency.coalesce()  # `to_edge_index` would mark the caller's tensor as coalesced
        return to_edge_index(adjacency)[0].flip(0)  # rows of a transposed adjacency are targets
    return adjacency.as_tensor() if isinstance(adjacency, EdgeIndex) else adjacency


def _check_edges(edge_index: Tensor, edge_head: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Key, query and head of each edge, ``[E]`` int64 each; refuse what is no list of edges."""
    for name, value in (("edge_index", edge_index), ("edge_head", edge_head)):
        check_tensor(value, name, optional=name == "edge_head")
        if value is not None and (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool):
            raise TypeError(f"Expected '{name}' to be int64 (got {value.dtype}). Convert it with `.long()`.")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"Expected 'edge_index' to be [2, E] (got {list(edge_index.shape)}). Row 0 holds keys (sources), row 1 "
            "queries (targets)."
        )
    key, query = edge_index.long()
    if edge_head is None:
        return key, query, torch.zeros_like(key)
    checks.same_device("edge_index", edge_index, edge_head=edge_head)
    if edge_head.shape != key.shape:
        raise ValueError(
            f"Expected 'edge_head' to be [{key.numel()}] (got {list(edge_head.shape)}). It holds one head number per "
            "edge."
        )
    return key, query, edge_head.long()


def _check_pairs(heads: int, num_queries: int, num_keys: int) -> None:
    """Refuse sizes whose pairs int64 cannot number."""
    if not torch.compiler.is_compiling() and int(heads) * int(num_queries) * num_keys >= 2**63:
        raise ValueError(
            f"Expected 'heads', 'num_queries' and 'num_keys' of a product below 2**63 (got {heads} * {num_queries} * "
            f"{num_keys}). Pairs are numbered in int64."
        )


def _stores(data: Data | HeteroData, edge_type: EdgeType | None) -> tuple[Any, Any, Any, str]:
    """Where edges, keys and queries lie in a data object, and what the head of an edge is called there."""
    if isinstance(data, Data):
        if edge_type is not None:
            raise ValueError(f"Expected no 'edge_type' with Data (got {edge_type!r}). Its edges are of one type.")
        return data, data, data, "edge_type"
    types = data.edge_types
    if edge_type is None and len(types) == 1:
        (edge_type,) = types
    if edge_type is None or edge_type not in types:
        raise ValueError(
            f"Expected 'edge_type' to be one of {types} (got {edge_type!r}). Say which edges of the data are meant."
        )
    return data[edge_type], data[edge_type[0]], data[edge_type[2]], "edge_head"


def _index(value: int, end: int, name: str) -> int:
    checks.integer(name, value, -(2**63), "Count from 0.")
    if not -end <= value < end:
        raise ValueError(f"Expected '{name}' in 0..{end - 1} (got {value}). Count from 0.")
    return value % end


def the_one(value: int | None, end: int, name: str, other: str = "") -> int:
    """The number itself, counted from 0, or 0 for None where there is no choice.

    Raises:
        TypeError, ValueError: It is no int, there is no such thing, or there are several and None was told.
    """
    if value is None and end > 1:
        raise ValueError(f"Expected '{name}' where there are {end} of them (got None). Pass {name}=0, for one{other}.")
    return 0 if value is None else _index(value, end, name)


def _few(things: Any) -> str:
    return ", ".join(map(repr, [*things][:3]))
