"""``AttentionGraph``: a graph of tokens, with conversions from and to other libraries.

In: an edge list, a dense mask, or a graph of another library. Out: the same graph for PyTorch Geometric, torch,
torch-sparse, SciPy and networkx. Not here: properties of a graph and operations on it (``rows``), graph sources
(``sources``), and attention over a graph (``ops``, ``attention``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import networkx as nx
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.typing import EdgeType, SparseTensor
from torch_geometric.utils import is_sparse, to_edge_index

from ..ops import checks, schemas, values
from ..ops.values import can_read, require_values
from .ragged import check_tensor, resolve_sides, stored_ptr, unmerged
from .rows import (
    CompressedRows,
    check_edges,
    check_ends,
    check_graph,
    check_sizes,
    index_type,
    masked_rows,
    resolve_index,
)

if TYPE_CHECKING:
    import scipy.sparse

__all__ = ["AttentionGraph", "check_graph", "edge_list", "resolve_index"]

DataType = TypeVar("DataType", Data, HeteroData)
Adjacency: TypeAlias = "AttentionGraph | Tensor | SparseTensor"


class AttentionGraph(CompressedRows):
    """A bipartite graph from key tokens to query tokens, for each head of each sequence, in compressed rows.

    Row ``h * N + i`` lists the keys that query ``i`` attends to in head ``h``, ascending and without repeats. Tokens
    are numbered through all sequences of the batch, as in PyTorch Geometric; an edge never leaves its sequence. The
    constructor checks every value at a cost of O(HN + E), so every graph is valid and other code does not check it
    again. The graph keeps the tensors that it is given; do not write into them. Memory is O(HN + E).

    Args:
        rowptr: Row offsets, ``[H*N+1]`` int64, non-decreasing from 0 to E.
        col: Key token of each edge, ``[E]`` int32 or int64, in ``0..M-1``, ascending within each row.
        num_queries: Number of query tokens N, at least 1.
        num_keys: Number of key tokens M, at least 1; ``H * N * M`` is below 2^63.
        heads: Number of heads H, at least 1.
        query_ptr: Offsets of the sequences in the queries, ``[B+1]`` int64. None: one sequence.
        key_ptr: Offsets of the sequences in the keys, ``[B+1]`` int64. None: those of the queries if N = M, else one
            sequence.
        is_causal: If True, the position of a key in its sequence is never later than the position of its query.
            Densities then count only such pairs.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: Shapes, devices or offsets do not fit; an edge leaves its sequence; the keys of a row are unsorted
            or repeated; or a causal graph has an edge from a later key.

    Example:
        >>> graph = AttentionGraph.from_dense(torch.tensor([[1, 0], [1, 1]]))
        >>> graph
        AttentionGraph(1 sequence, 1 head, 2 queries, 2 keys, 3 edges, density 75.0%)
        >>> graph.edge_index.tolist()  # row 0: keys (sources), row 1: queries (targets)
        [[0, 0, 1], [0, 1, 1]]
    """

    # ---------------------------------------------------------------- blocks: here, each token is a block

    @property
    def block_size(self) -> int:
        """Tokens per block; 1, except for a :class:`~sbm_pyg.BlockGraph`."""
        return 1

    @property
    def blocks(self) -> AttentionGraph:
        """The graph over blocks; this graph, if a block is a token."""
        return self

    def with_blocks(self, blocks: AttentionGraph) -> AttentionGraph:
        """Copy over the same tokens, with another graph over blocks."""
        return blocks

    def expand_tokens(self) -> AttentionGraph:
        """The graph of tokens; this graph, if a block is a token."""
        return self

    def spread(self, x: Tensor) -> Tensor:
        """Repeat values per edge of blocks, ``[E', ...]``, to values per edge of tokens, ``[E, ...]``."""
        return x

    def over_tokens(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Repeat values per block of queries, ``[H, n, ...]``, and of keys, ``[H, m, ...]``, to values per token."""
        return query, key

    # ---------------------------------------------------------------- kernels, for layers and estimators

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None, bias: Tensor | None, scale: float,
        gate_form: str, dropout: float, seed: int,
    ) -> Tensor:  # fmt: skip
        """Softmax attention over the edges, ``[H, N, C']``; ``gate`` and ``bias`` are per edge of tokens, ``[E]``."""
        more = (gate, bias, scale, gate_form, dropout, seed)
        return schemas.edge_attention(query, key, value, self.rowptr, self.col, *more)[0]

    def _attention_weight(self, query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """Attention weight of each edge of ``blocks``, ``[E']``, summed over the queries of a block."""
        more = (None, bias, scale, "score", 0.0, 0)
        total = schemas.edge_attention(query, key, key[..., :1], self.rowptr, self.col, *more)[1]
        total = total.clamp(min=torch.finfo(total.dtype).min).flatten()[self.edge_row]  # 0 if all scores are -inf
        return (self._logits(query, key, bias, scale) - total).exp()

    def _cross_entropy(self, query: Tensor, key: Tensor, log_p: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """Cross-entropy of each row of ``blocks``, ``[H, n]``, between attention weights and probabilities of edges."""
        more = (self.rowptr, self.col, bias, scale)
        return schemas.edge_cross_entropy(query.detach(), key.detach(), log_p, *more)[0]

    def _logits(self, query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """Score of each edge of tokens, its bias included, ``[E]``."""
        logit = schemas.edge_dot(query, key, self.rowptr, self.col) * scale
        return logit if bias is None else logit + bias

    @property
    def _layout(self) -> tuple[Tensor | None, Tensor | None, int | None, bool]:
        """Offsets of queries and keys, block size and causality if edges join blocks of tokens; else None and False."""
        return None, None, None, False

    def _bias_of_blocks(self, bias: Tensor | None) -> Tensor | None:
        """Convert score biases of the edges of tokens, ``[E]``, to the form that the ops over ``blocks`` take."""
        return bias

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
        """Graph of any PyG adjacency. Repeated edges count once. Cost O(HN + E log E).

        Args:
            edge_index: ``[2, E]`` (row 0 = key = source, row 1 = query = target), an ``EdgeIndex``, or a transposed
                sparse adjacency (``SparseTensor`` or torch sparse, ``[N, M]``, rows = queries). Every stored entry is
                an edge, zeros included.
            num_queries: N. None: from the offsets or the size of the adjacency, else from the last query.
            num_keys: M. None: from the offsets or the size of the adjacency, else the larger of N and the last key + 1.
            size: ``(M, N)``, sources and targets in PyG's order, instead of ``num_queries`` and ``num_keys``.
            edge_head: Head of each edge, ``[E]`` int64. None: all edges are in head 0.
            heads: Number of heads H.
            query_ptr: Offsets of the sequences in the queries, ``[B+1]`` int64.
            key_ptr: Offsets of the sequences in the keys, ``[B+1]`` int64.

        Raises:
            TypeError: A tensor is not an integer tensor, or a number is not an int.
            ValueError: Shapes or ranges do not fit, an edge leaves its sequence, or the rows do not fit into memory.
        """
        if size is not None:
            if num_queries is not None or num_keys is not None:
                raise ValueError(
                    f"Expected 'size' or 'num_queries' and 'num_keys' (got size={size!r} and one of them). Pass 'size' "
                    "alone."
                )
            if not isinstance(size, tuple | list) or len(size) != 2:
                raise TypeError(
                    f"Expected 'size' to be the pair (M, N) of keys and queries (got {size!r}). "
                    "Sources come first, as in PyG."
                )
            num_keys, num_queries = size
        for name, ptr in (("query_ptr", query_ptr), ("key_ptr", key_ptr)):
            check_tensor(ptr, name)
            if ptr is not None and (ptr.dim() != 1 or ptr.numel() < 1 or ptr.dtype not in (torch.int32, torch.int64)):
                raise ValueError(
                    f"Expected '{name}' to be [B+1] int64 (got {list(ptr.shape)} {ptr.dtype}). "
                    "It holds the offsets of the sequences."
                )
        query_ptr, key_ptr = (None if ptr is None else ptr.long() for ptr in (query_ptr, key_ptr))
        if num_queries is None and query_ptr is not None:
            num_queries = int(query_ptr[-1])
        if num_keys is None and key_ptr is not None:
            num_keys = int(key_ptr[-1])
        if is_sparse(edge_index) and edge_index.dim() >= 2:  # entries may be vectors, such as weights of all heads
            adjacency_size = edge_index.size(0), edge_index.size(1)
        else:
            adjacency_size = edge_index.sparse_size()[::-1] if isinstance(edge_index, EdgeIndex) else (None, None)
        num_queries, num_keys = (adjacency_size[at] if n is None else n for at, n in enumerate((num_queries, num_keys)))
        key, query, head = check_edges(edge_list(edge_index), edge_head)
        values.require_unbatched(edge_index=key, edge_head=head)
        if query_ptr is not None or key_ptr is not None or num_queries is None or num_keys is None:
            require_values(key, "edge_index")
        num_edges = key.numel()
        if num_queries is None:
            num_queries = int(query.max()) + 1 if num_edges else 0
        if num_keys is None:
            num_keys = max(num_queries, int(key.max()) + 1 if num_edges else 0)
        num_queries, num_keys, heads = check_sizes(num_queries, num_keys, heads)
        ends = {"edge_index[0]": (key, num_keys), "edge_index[1]": (query, num_queries), "edge_head": (head, heads)}
        check_ends(ends)
        way_out = "Each row takes memory, even without edges: leave out tokens without edges."
        name = "heads" if heads > num_queries else "num_queries"
        checks.memory(name, heads * num_queries, 16, key.device, way_out, "rows")
        unique = torch.unique(unmerged((head * num_queries + query) * num_keys + key))
        rowptr = torch.searchsorted(unique, num_keys * torch.arange(heads * num_queries + 1, device=key.device))
        rows = (rowptr, unique % num_keys, num_queries, num_keys, heads, query_ptr, key_ptr)
        if can_read(key) and (query_ptr is not None or key_ptr is not None):
            return cls(*rows)  # type: ignore[arg-type]
        return cls._trusted(*rows)

    @classmethod
    def from_data(
        cls, data: Data | HeteroData, edge_type: EdgeType | None = None, *, heads: int | None = None
    ) -> AttentionGraph:
        """Graph of the edges of a PyG data object, the inverse of :meth:`to_data` and :meth:`to_hetero_data`.

        Sequences are given by ``ptr``, else by ``batch``; without both, all nodes are one sequence. Repeated edges
        count once. Cost O(HN + E log E).

        Args:
            data: ``Data``, ``HeteroData`` or a ``Batch`` of either, with ``edge_index`` or the transposed adjacency
                ``adj_t``. The head of each edge is its ``edge_type`` in ``Data`` and its ``edge_head`` in
                ``HeteroData``; without these, all edges are in one head.
            edge_type: The edge type of ``HeteroData`` to take; may be None if there is only one.
            heads: Number of heads H. None: the largest head of an edge + 1.

        Raises:
            TypeError: ``data`` is not a PyG data object.
            ValueError: ``data`` has no edges or no number of nodes, the edge type is missing or does not exist, or
                offsets do not fit.

        Example:
            >>> graph = AttentionGraph.from_dense(torch.tensor([[1, 0], [1, 1]]))
            >>> AttentionGraph.from_data(graph.to_data()) == graph
            True
        """
        checks.kind("data", data, Data | HeteroData, "Data or HeteroData", "`from_edge_index` takes edges.")
        store, source, target, head_name = _stores(data, edge_type)
        edges = store.get("edge_index")
        edges = store.get("adj_t") if edges is None else edges
        way_out = "Add them, for example with the transform `SBMGraph`."
        checks.require(edges is not None, "data", "to have edges", "neither 'edge_index' nor 'adj_t'", way_out)
        sizes = (source.num_nodes, target.num_nodes)
        checks.require(None not in sizes, "data", "to have nodes", "no number of nodes", "Set `x` or `num_nodes`.")
        head = store.get(head_name)
        for name, value in (("edge_index", edges), (head_name, head)):
            checks.kind(name, value, Tensor | SparseTensor | None, "a tensor", "Convert it with `torch.as_tensor`.")
        if heads is None:
            heads = 1 if head is None or head.numel() == 0 else max(int(head.max()), 0) + 1
        key_ptr, query_ptr = (stored_ptr(nodes, device=edges.device) for nodes in (source, target))
        return cls.from_edge_index(edges, size=sizes, edge_head=head, heads=heads, query_ptr=query_ptr, key_ptr=key_ptr)

    @classmethod
    def from_networkx(cls, graph: nx.Graph[Any], *, heads: int | None = None) -> AttentionGraph:
        """Graph of one sequence from a networkx graph with edges from keys to queries. Cost O(HN + E log E).

        Nodes become tokens in the order of the graph; nodes named ``0..n-1`` keep their numbers. An undirected edge
        becomes two edges, one in each direction. If nodes have networkx's attribute ``bipartite``, nodes with 0 are
        keys and nodes with 1 are queries, each in the order of the graph, and an undirected edge becomes one edge from
        key to query. Other attributes are ignored.

        Args:
            graph: Any networkx graph. The attribute ``head`` of an edge is its head; edges without it are in head 0.
            heads: Number of heads H. None: the largest head of an edge + 1.

        Raises:
            TypeError: ``graph`` is not a networkx graph.
            ValueError: ``graph`` has no nodes, an edge of a bipartite graph does not run from a key to a query, or a
                head is out of range.

        Example:
            >>> AttentionGraph.from_networkx(nx.DiGraph([(0, 1), (1, 1)])).to_dense()[0].int().tolist()
            [[0, 0], [1, 1]]
        """
        checks.kind("graph", graph, nx.Graph, "a networkx graph", "Build one with `nx.DiGraph(edges)`.")
        side: Mapping[Any, Any] = dict(graph.nodes(data="bipartite"))
        split = any(value is not None for value in side.values())
        strange = [value for value in side.values() if split and value not in (0, 1)]
        if strange:
            raise ValueError(
                "Expected the attribute 'bipartite' of each node of 'graph' to be 0 or 1 "
                f"(got {_first_three(strange)}). Keys have 0, queries 1."
            )
        keys = [node for node in graph if not split or side[node] == 0]
        queries = [node for node in graph if side[node] == 1] if split else keys
        what, way_out = "to have keys and queries", "Add nodes."
        checks.require(keys and queries, "graph", what, f"{len(keys)} and {len(queries)}", way_out)
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
                f"Expected each edge of 'graph' to run from a key to a query (got {_first_three(wrong)}). "
                "Reverse such edges with `graph.reverse()`."
            )
        odd = [head for *_, head in edges if not isinstance(head, Integral) or int(head).bit_length() > 31]
        if odd:
            raise ValueError(
                "Expected the attribute 'head' of each edge of 'graph' to be an int "
                f"(got {_first_three(odd)}). Number heads from 0."
            )
        edge_index = torch.tensor([(source[s], target[t]) for s, t, _ in edges], dtype=torch.int64).view(-1, 2).T
        edge_head = torch.tensor([head for *_, head in edges], dtype=torch.int64)
        if heads is None:
            heads = int(max([0, *(head for *_, head in edges)])) + 1
        return cls.from_edge_index(edge_index, size=(len(keys), len(queries)), edge_head=edge_head, heads=heads)

    @classmethod
    def over(
        cls,
        edge_index: Adjacency,
        num_queries: int,
        num_keys: int,
        heads: int = 1,
        *,
        edge_head: Tensor | None = None,
        ptr: Tensor | tuple[Tensor, Tensor] | None = None,
        batch: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> AttentionGraph:
        """Graph with H heads over the given tokens, from a graph or an adjacency. Layers call it on ``edge_index``.

        Args:
            edge_index: A graph with H heads or with one, or any adjacency that :meth:`from_edge_index` takes. The edges
                of a graph with one head, or of an adjacency without ``edge_head``, are repeated for all heads.
            num_queries: Number of queries N.
            num_keys: Number of keys M.
            heads: Number of heads H.
            edge_head: Head of each edge of an adjacency, ``[E]`` int64. None: all heads share the edges.
            ptr: Offsets of the sequences, ``[B+1]`` int64, or the pair (keys, queries). None: those of a graph, else
                one sequence.
            batch: Instead of ``ptr``, the sequence of each token, ``[N]`` int64, or the pair (keys, queries).

        Raises:
            TypeError, ValueError: The graph has other tokens, sequences or heads; or as :meth:`from_edge_index`.
        """
        num_queries, num_keys, _ = check_sizes(num_queries, num_keys)
        if not isinstance(edge_index, AttentionGraph):
            edges = edge_list(edge_index)
            if is_sparse(edge_index) and (edge_index.size(0), edge_index.size(1)) != (num_queries, num_keys):
                raise ValueError(
                    f"Expected 'edge_index' over N = {num_queries} queries and M = {num_keys} keys (got a sparse "
                    f"adjacency [{edge_index.size(0)}, {edge_index.size(1)}]). Its rows are queries."
                )
            query_ptr, key_ptr = resolve_sides(num_queries, num_keys, ptr, batch, edges.device)
            options: dict[str, Any] = {"edge_head": edge_head, "heads": 1 if edge_head is None else heads}
            graph = cls.from_edge_index(edges, num_queries, num_keys, query_ptr=query_ptr, key_ptr=key_ptr, **options)
            return graph.expand(heads)
        if (edge_index.num_queries, edge_index.num_keys) != (num_queries, num_keys):
            raise ValueError(
                f"Expected 'edge_index' over N = {num_queries} queries and M = {num_keys} keys (got {edge_index}). "
                "Build the graph with the `ptr` of these tokens."
            )
        has_sequences = ptr is not None or batch is not None
        sides = resolve_sides(num_queries, num_keys, ptr, batch, edge_index.device) if has_sequences else ()
        what, way_out = "over the sequences of 'ptr' or 'batch'", "Build the graph with the `ptr` of these tokens."
        if sides:
            checks.require(edge_index.same_offsets(*sides), "edge_index", what, edge_index, way_out)
        return edge_index.expand(heads)

    @classmethod
    def from_dense(cls, mask: Tensor) -> AttentionGraph:
        """Graph of a dense mask, with an edge for each non-zero entry. Cost O(B H N M).

        Args:
            mask: ``[N, M]``, ``[H, N, M]`` or ``[B, H, N, M]``, any dtype, not empty.

        Raises:
            TypeError: The mask is not a dense tensor.
            ValueError: The mask is empty, or does not have two to four dimensions.
        """
        check_tensor(mask, "mask", optional=False)
        require_values(mask, "mask")
        what, way_out = "to be [N, M], [H, N, M] or [B, H, N, M]", "Rows are queries; no dimension may be empty."
        checks.require(mask.dim() in (2, 3, 4) and mask.numel() != 0, "mask", what, mask.shape, way_out)
        *before, num_queries, num_keys = mask.shape
        batch, heads = before[0] if len(before) == 2 else 1, before[-1] if before else 1
        flat = mask.reshape(batch, heads, num_queries, num_keys)
        position = torch.arange(num_keys, device=mask.device)

        def rows(number: Tensor) -> tuple[Tensor, Tensor]:
            row, query = number // num_queries, number % num_queries
            head, sequence = row // batch, row % batch
            return flat[sequence, head, query] != 0, sequence[:, None] * num_keys + position

        count, numbers = batch * heads * num_queries, position.new_empty(0, dtype=index_type(batch * num_keys))
        way_out = "Convert some sequences or heads at a time."
        rowptr, col = masked_rows(rows, count, mask.numel(), "mask", way_out, numbers)
        steps = torch.arange(batch + 1, device=mask.device)
        sides = (batch * num_queries, batch * num_keys, heads, steps * num_queries, steps * num_keys)
        return cls._trusted(rowptr, col, *sides)

    # ---------------------------------------------------------------- to other forms

    def to_dense(self, sequence: int | None = None) -> Tensor:
        """Mask of one sequence, ``[H, n, m]`` bool, rows = queries.

        Args:
            sequence: The sequence; may be None if there is only one.

        Raises:
            ValueError: The sequence does not exist, or is None and there are several; the mask does not fit into
                memory; or the graph is on the meta device.
        """
        require_values(self.col, "graph")
        sequence = resolve_index(sequence, self.num_sequences, "sequence")
        pairs = int(self.query_ptr.diff()[sequence] * self.key_ptr.diff()[sequence])
        way_out = "Take one head by `graph.head(h)`, or keep the graph sparse."
        checks.memory("sequence", self.heads * pairs, 1, self.device, way_out, "pairs")
        one = self.sequence(sequence)
        mask = torch.zeros(one.heads * one.num_queries, one.num_keys, dtype=torch.bool, device=self.device)
        mask[one.edge_row, one.col.long()] = True
        return mask.view(one.heads, one.num_queries, one.num_keys)

    def to_edge_index(self, head: int | None = None) -> EdgeIndex:
        """PyG :class:`~torch_geometric.EdgeIndex` ``[2, E]`` of one head, or of all heads if None.

        The edges of one head are sorted by query.
        """
        graph = self if head is None else self.head(head)
        order = "col" if graph.heads == 1 else None
        return EdgeIndex(graph.edge_index, sparse_size=(self.num_keys, self.num_queries), sort_order=order)

    def to_scipy(self, head: int | None = None, sequence: int | None = None) -> scipy.sparse.csr_array:
        """SciPy array in compressed rows, ``[N, M]`` bool, of one head in one sequence or in the whole batch, a copy.

        Args:
            head: The head; may be None if there is only one.
            sequence: The sequence. None: the whole batch.

        Raises:
            ImportError: SciPy is not installed.
            ValueError: The head or sequence does not exist, or the head is None and there are several.

        Example:
            >>> array = AttentionGraph.from_dense(torch.tensor([[1, 0], [1, 1]])).to_scipy()
            >>> query, key = map(torch.from_numpy, array.nonzero())  # and back
            >>> AttentionGraph.from_edge_index(torch.stack([key, query]), *array.shape)
            AttentionGraph(1 sequence, 1 head, 2 queries, 2 keys, 3 edges, density 75.0%)
        """
        sparse = checks.imported("scipy.sparse", "analysis")
        head = resolve_index(head, self.heads, "head")
        graph = self.head(head) if sequence is None else self.sequence(sequence).head(head)
        data = torch.ones(graph.num_edges, dtype=torch.bool).numpy()
        parts = (data, graph.col.cpu().numpy(), graph.rowptr.cpu().numpy())
        # a copy, because SciPy changes its arrays in place
        return sparse.csr_array(parts, shape=(graph.num_queries, graph.num_keys), copy=True)

    def to_sparse_tensor(self, head: int | None = None, value: Tensor | None = None) -> SparseTensor:
        """torch-sparse ``SparseTensor`` of one head, transposed for PyG layers: ``[N, M]``, rows = queries.

        Args:
            head: The head; may be None if there is only one.
            value: Values of the edges of all heads, ``[E, ...]``, differentiable. None: the tensor has no values.

        Raises:
            ImportError: torch-sparse is not installed.
            ValueError: The head does not exist, or is None and there are several; or ``value`` is not ``[E, ...]``.
        """
        import torch_geometric.typing

        if not torch_geometric.typing.WITH_TORCH_SPARSE:
            raise ImportError(
                "Expected 'torch-sparse' to be installed. "
                f"Run {checks.install('sparse', '--no-build-isolation ')}, or use `to_edge_index()`."
            )
        head = resolve_index(head, self.heads, "head")
        graph = self.head(head)
        if value is not None:
            what, way_out = f"to be [{self.num_edges}, ...]", "It holds one entry per edge of all heads."
            checks.require(value.dim() >= 1 and value.size(0) == self.num_edges, "value", what, value.shape, way_out)
            first = int(self.rowptr[head * self.num_queries])
            value = value[first : first + graph.num_edges]
        options = {"sparse_sizes": (self.num_queries, self.num_keys), "is_sorted": True, "trust_data": True}
        return SparseTensor(rowptr=graph.rowptr, col=graph.col.long(), value=value, **options)

    def to_data(self) -> Data:
        """PyG ``Data`` with ``edge_index``, ``edge_type`` (the head), ``batch`` and ``ptr`` (the sequences).

        Raises:
            ValueError: Queries and keys differ in their number or in the offsets of their sequences.
        """
        if self.num_queries != self.num_keys or not self.same_offsets(self.key_ptr, self.query_ptr):
            other = " and sequences of other lengths" if self.num_queries == self.num_keys else ""
            raise ValueError(
                "Expected 'graph' to have the same tokens as queries and keys "
                f"(got N = {self.num_queries}, M = {self.num_keys}{other}). Use `to_hetero_data()`."
            )
        batch = torch.repeat_interleave(self.query_ptr.diff())
        edges = {"edge_index": self.edge_index, "edge_type": self.edge_head}
        return Data(**edges, num_nodes=self.num_queries, batch=batch, ptr=self.query_ptr)

    def replace_edges(self, data: DataType, edge_type: EdgeType | None = None) -> DataType:
        """Replace the edges of a PyG data object over the same tokens with those of this graph, and return the object.

        The method sets ``edge_index`` and, with several heads, the head of each edge: ``edge_type`` of ``Data``,
        ``edge_head`` of ``HeteroData``. It removes attributes that PyG counts as attributes of edges (in ``Data``,
        names with "edge"), but not ``edge_label`` and ``edge_label_index``, which are targets. A ``Batch`` can still be
        separated into its graphs.

        Args:
            data: ``Data``, ``HeteroData`` or a ``Batch`` of either, changed in place.
            edge_type: The edge type of ``HeteroData``; None for ``Data``.

        Raises:
            TypeError: ``data`` is not a PyG data object.
            ValueError: ``data`` has other nodes or sequences than the graph, or the edge type does not fit.
        """
        checks.kind("data", data, Data | HeteroData, "Data or HeteroData", "`to_data()` makes a new one.")
        if isinstance(data, Data) and edge_type is not None:
            raise ValueError(f"Expected no 'edge_type' with Data (got {edge_type!r}). Data has one edge type.")
        is_valid = not isinstance(data, HeteroData) or (isinstance(edge_type, tuple) and len(edge_type) == 3)
        what, way_out = "to be (source, relation, target)", "Name the edges."
        checks.require(is_valid, "edge_type", what, repr(edge_type), way_out)
        store: Any = data if edge_type is None else data[edge_type]
        target, source = (None, None) if edge_type is None else (edge_type[2], edge_type[0])
        for nodes, total, ptr in ((target, self.num_queries, self.query_ptr), (source, self.num_keys, self.key_ptr)):
            node_store: Any = data if nodes is None else data[nodes]
            if not any(name in node_store for name in ("num_nodes", "x", "pos", "batch", "ptr")):
                continue  # PyG would infer the number of nodes from the edges
            what = f"to have {total} nodes, one per token of the graph"
            way_out = "Build the graph over the nodes of 'data'."
            checks.require(node_store.num_nodes == total, "data", what, node_store.num_nodes, way_out)
            data_ptr = stored_ptr(node_store)
            if data_ptr is not None and not torch.equal(data_ptr.cpu(), ptr.cpu()):
                raise ValueError(
                    f"Expected 'data' to have the sequences of the graph (got 'ptr' {data_ptr.tolist()[:9]}). "
                    "Build the graph with its 'ptr'."
                )
        head = "edge_type" if edge_type is None else "edge_head"
        removed = [name for name in store.to_dict() if _is_of_edges(store, name)]
        for name in removed:
            del store[name]
        edges = {"edge_index": self.edge_index} | ({head: self.edge_head} if self.heads > 1 else {})
        if self.heads > 1 and self.num_sequences > 1:  # from (head, query, key) to (sequence, head, query, key)
            order = torch.bucketize(edges["edge_index"][1], self.query_ptr[1:], right=True).argsort(stable=True)
            edges = {name: value[..., order] for name, value in edges.items()}
        store.update(edges)
        # `Batch.to_data_list` reads these; a copy of a batch shares them, so they are replaced, not changed
        if isinstance(data, Batch) and hasattr(data, "_slice_dict"):
            ends = self.edges_per_sequence.sum(1).cumsum(0).cpu()
            slices = dict.fromkeys(edges, torch.cat([ends.new_zeros(1), ends]))
            start = torch.stack([self.key_ptr[:-1], self.query_ptr[:-1]], 1).cpu()[..., None]  # [B, 2, 1]
            shifts = {"edge_index": start if edge_type else start[:, 1, 0], head: torch.zeros_like(start[:, 1, 0])}
            for old, new in (("_slice_dict", slices), ("_inc_dict", {name: shifts[name] for name in edges})):
                by_type = getattr(data, old)
                entries = by_type if edge_type is None else by_type.get(edge_type, {})
                entries = {name: value for name, value in entries.items() if name not in removed} | new
                setattr(data, old, entries if edge_type is None else by_type | {edge_type: entries})
        return data

    def to_hetero_data(self) -> HeteroData:
        """PyG ``HeteroData`` with nodes ``query`` and ``key``, and edges ``(key, to, query)`` with ``edge_head``."""
        data = HeteroData()
        for name, ptr, total in (("query", self.query_ptr, self.num_queries), ("key", self.key_ptr, self.num_keys)):
            data[name].num_nodes = total
            data[name].ptr = ptr
            data[name].batch = torch.repeat_interleave(ptr.diff())
        data["key", "to", "query"].edge_index = self.edge_index
        data["key", "to", "query"].edge_head = self.edge_head
        return data

    def to_networkx(
        self, sequence: int | None = None, head: int | Literal["all"] | None = None, *, bipartite: bool | None = None
    ) -> nx.DiGraph[Any]:
        """networkx graph of one sequence. Edges run from key to query, the direction of messages.

        Args:
            sequence: The sequence; may be None if there is only one.
            head: The head; may be None if there is only one. ``"all"`` returns a ``MultiDiGraph`` over all heads; the
                head is the edge key and the attribute ``head``.
            bipartite: False: nodes are the tokens ``0..n-1``, which requires as many queries as keys. True: nodes are
                ``("key", j)`` and ``("query", i)``, with networkx's attribute ``bipartite`` 0 and 1. None: False if the
                sequence has as many queries as keys, else True.

        Raises:
            ValueError: The sequence or head does not exist, or is None and there are several; or ``bipartite`` is False
                and the numbers of queries and keys differ.
        """
        require_values(self.col, "graph")
        checks.flag("bipartite", bipartite, "If True, queries and keys are separate nodes.", optional=True)
        graph = self.sequence(resolve_index(sequence, self.num_sequences, "sequence"))
        chosen = graph
        if head != "all":
            chosen = graph.head(resolve_index(head, self.heads, "head", ", or head='all' for a MultiDiGraph"))
        square = graph.num_queries == graph.num_keys
        is_valid = bipartite is not False or square
        what, way_out = "to be True or None if queries and keys differ in number", "Leave it out."
        checks.require(is_valid, "bipartite", what, f"{bipartite}, {graph.num_queries} and {graph.num_keys}", way_out)
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


def edge_list(adjacency: Tensor | SparseTensor) -> Tensor:
    """Edges ``[2, E]`` of any PyG adjacency, in its order: row 0 the keys (sources), row 1 the queries (targets)."""
    what = "a tensor [2, E], a sparse adjacency or an AttentionGraph"
    way_out = "Use torch.tensor(edges), or torch_geometric.utils.from_networkx."
    checks.kind("edge_index", adjacency, Tensor | SparseTensor, what, way_out)
    layout = adjacency.layout if isinstance(adjacency, Tensor) else None
    is_valid = layout not in (torch.sparse_bsr, torch.sparse_bsc)
    what, way_out = "to store single entries", "Convert it with `to_sparse_csr`."
    checks.require(is_valid, "edge_index", what, layout, way_out, TypeError)
    if is_sparse(adjacency):
        if isinstance(adjacency, Tensor) and adjacency.dim() - adjacency.dense_dim() != 2:
            raise ValueError(
                f"Expected 'edge_index' to be a sparse adjacency [N, M] (got {list(adjacency.shape)}). Convert each "
                "matrix of a batch, and join the graphs by `AttentionGraph.concatenate`."
            )
        if isinstance(adjacency, Tensor) and layout == torch.sparse_coo:
            adjacency = adjacency.coalesce()  # else `to_edge_index` marks the caller's tensor as coalesced
        return to_edge_index(adjacency)[0].flip(0)  # rows of a transposed adjacency are targets
    return adjacency.as_tensor() if isinstance(adjacency, EdgeIndex) else adjacency


def _stores(data: Data | HeteroData, edge_type: EdgeType | None) -> tuple[Any, Any, Any, str]:
    """Stores of the edges, keys and queries of a data object, and the name of its attribute for heads of edges."""
    if isinstance(data, Data):
        if edge_type is not None:
            raise ValueError(f"Expected no 'edge_type' with Data (got {edge_type!r}). Data has one edge type.")
        return data, data, data, "edge_type"
    types = data.edge_types
    if edge_type is None and len(types) == 1:
        (edge_type,) = types
    if edge_type is None or edge_type not in types:
        raise ValueError(f"Expected 'edge_type' to be one of {types} (got {edge_type!r}). Name the edges to convert.")
    return data[edge_type], data[edge_type[0]], data[edge_type[2]], "edge_head"


def _is_of_edges(store: Any, name: str) -> bool:
    """True for an attribute of edges of ``Data``, or of an edge type of ``HeteroData``, other than the edge index."""
    if name == "edge_index" or name.startswith("edge_label"):
        return False
    is_standard = name in ("edge_attr", "edge_weight", "edge_type", "edge_head", "e_id", "adj", "adj_t")
    # other attributes of `Data` may have as many entries as there are edges by chance
    return is_standard or (("edge" in name or not isinstance(store, Data)) and bool(store.is_edge_attr(name)))


def _first_three(things: Any) -> str:
    return ", ".join(map(repr, [*things][:3]))
