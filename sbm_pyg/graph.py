"""The one record that crosses borders: a graph of tokens, and every form in which others know it.

In: an edge list, a dense mask or another library's adjacency.
Out: the same graph in every form that PyTorch Geometric, torch, scipy and networkx understand.
Not here: what the graph is and can be asked (``rows``), how it is chosen (``sampling``, ``patterns``) and what is
computed over it (``ops``, ``attention``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import networkx as nx
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.typing import EdgeType, SparseTensor
from torch_geometric.utils import is_sparse, to_edge_index

from . import ops
from .ops import checks, values
from .ops.values import can_read, require_values
from .ragged import check_tensor, resolve_sides, stored_ptr, unmerged
from .rows import CompressedRows, check_edges, check_graph, check_sizes, index_type, masked_rows, the_one

if TYPE_CHECKING:
    import scipy.sparse

__all__ = ["AttentionGraph", "check_graph", "edge_list", "the_one"]

DataType = TypeVar("DataType", Data, HeteroData)


class AttentionGraph(CompressedRows):
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
        is_causal: No key of an edge has a later place in its sequence than the query. Densities then count the pairs
            that this allows.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: Shapes, devices or offsets do not fit, an edge leaves its sequence, the keys of a row are unsorted
            or repeated, or a causal graph has an edge from a later key.

    Example:
        >>> graph = AttentionGraph.from_dense(torch.tensor([[1, 0], [1, 1]]))
        >>> graph
        AttentionGraph(1 sequence, 1 head, 2 queries, 2 keys, 3 edges, density 75.0%)
        >>> graph.edge_index.tolist()  # row 0: keys (sources), row 1: queries (targets)
        [[0, 0, 1], [0, 1, 1]]
    """

    # ---------------------------------------------------------------- its blocks

    @property
    def grain(self) -> int:
        """Tokens of a block: 1, except of a :class:`~sbm_pyg.BlockGraph`."""
        return 1

    @property
    def blocks(self) -> AttentionGraph:
        """The graph over blocks: the graph itself where a block is a token."""
        return self

    def with_blocks(self, blocks: AttentionGraph) -> AttentionGraph:
        """The graph over the same tokens whose blocks are joined by another graph."""
        return blocks

    def expand_tokens(self) -> AttentionGraph:
        """The graph of the tokens: the graph itself where a block is a token."""
        return self

    def spread(self, x: Tensor) -> Tensor:
        """Numbers of the edges of blocks ``[E', ...]``, repeated for the edges of their tokens, ``[E, ...]``."""
        return x

    def over_tokens(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the blocks of queries ``[H, n, ...]`` and of keys ``[H, m, ...]``, repeated for their tokens."""
        return query, key

    # ---------------------------------------------------------------- its kernels, for layers and estimators

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gate: Tensor | None = None,
        bias: Tensor | None = None,
        scale: float = 1.0,
        gate_form: str = "score",
        dropout: float = 0.0,
        seed: int = 0,
    ) -> Tensor:
        """Softmax attention over the edges, ``[H, N, C']``; ``gate`` and ``bias`` are those of tokens, ``[E]``."""
        rows = self.rows._replace(bias=bias)
        return ops.edge_attention(query, key, value, rows, gate, scale, gate_form, dropout, seed)[0]

    def _attention_weight(self, query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """Weight of each edge of ``blocks``, ``[E']``, summed over the queries of a block."""
        total = ops.edge_attention(query, key, key[..., :1], self.rows._replace(bias=bias), scale=scale)[1]
        total = total.clamp(min=torch.finfo(total.dtype).min).flatten()[self.edge_row]  # a row without weight gives 0
        logit = ops.edge_dot(query, key, self.rows) * scale
        return ((logit if bias is None else logit + bias) - total).exp()

    def _local_expectation(
        self,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        probes: AttentionGraph,
        biases: tuple[Tensor | None, Tensor | None],
        chance: Tensor,
        forced: Tensor | None,
        scale: float,
        exploration: float,
        *,
        factors: tuple[Tensor, Tensor] | None,
        prob: Callable[[], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """``out``, whose backward pass reaches the probabilities: factors, or those of edges and probes."""
        edges, probed = (graph.rows._replace(bias=bias) for graph, bias in zip((self, probes), biases, strict=True))
        both = None if factors is not None else prob()
        return ops.local_expectation(
            out, query, key, value, edges, probed, chance, forced, scale, exploration, factors=factors, prob=both
        )

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
                sparse adjacency (``SparseTensor`` or torch sparse, ``[N, M]``, rows = queries). Every entry that it
                stores is an edge.
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
                    "Expected 'size' or 'num_queries' and 'num_keys' "
                    f"(got size={size!r} and another). They say the same."
                )
            if not isinstance(size, tuple | list) or len(size) != 2:
                raise TypeError(
                    f"Expected 'size' to be the pair (M, N) of keys and queries (got {size!r}). "
                    "Sources come first, as in PyG."
                )
            num_keys, num_queries = size
        for name, ptr in (("query_ptr", query_ptr), ("key_ptr", key_ptr)):
            check_tensor(ptr, name)
            if ptr is not None and (ptr.dim() != 1 or ptr.numel() < 2 or ptr.dtype not in (torch.int32, torch.int64)):
                raise ValueError(
                    f"Expected '{name}' to be [B+1] int64 (got {list(ptr.shape)} {ptr.dtype}). "
                    "It holds the offsets of the sequences."
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
        for name, index, end in (
            ("edge_index[0]", key, num_keys),
            ("edge_index[1]", query, num_queries),
            ("edge_head", head, heads),
        ):
            if not can_read(index):  # no branch on values; the kernels must still see none that is out of range
                torch._assert_async(
                    ((index >= 0) & (index < end)).all(),
                    f"Expected '{name}' to count from 0 to the tokens or heads there are.",
                )
            elif num_edges and (int(index.min()) < 0 or int(index.max()) >= end):
                raise ValueError(
                    f"Expected '{name}' in 0..{end - 1} (got {int(index.min())} to {int(index.max())}). "
                    "Check the numbers of queries, keys and heads."
                )
        way_out = "Rows cost memory even without edges: leave out the tokens that have none."
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
        """Graph of the edges of PyG data.

        It reads what :meth:`to_data`, :meth:`to_hetero_data` and :meth:`replace_edges` write, and any other data.
        Sequences are those of ``ptr``, else of ``batch``; else all nodes are one sequence. Repeated edges count once.
        Cost O(HN + E log E).

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
                "Expected 'data' to have edges (got neither 'edge_index' nor 'adj_t'). "
                "A transform, as `SBMGraph`, adds some."
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
        """Graph of one sequence from networkx, whose edges run from key to query.

        An undirected edge runs both ways. Tokens are the nodes, in their order, unless they are the numbers ``0..n-1``
        themselves. Where nodes have networkx's attribute ``bipartite``, those with 0 are keys and those with 1 are
        queries, each in their order; an undirected edge then runs from the key. Other attributes are left behind. Cost
        O(HN + E log E).

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
                f"Expected 'graph' to be a networkx graph (got {type(graph).__name__}). "
                "Make one by `nx.DiGraph(edges)`."
            )
        side: Mapping[Any, Any] = dict(graph.nodes(data="bipartite"))
        split = any(value is not None for value in side.values())
        if split and not {*side.values()} <= {0, 1}:
            raise ValueError(
                "Expected the attribute 'bipartite' of each node of 'graph' to be 0 or 1 "
                f"(got {_few({*side.values()})}). Keys have 0."
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
                f"Expected each edge of 'graph' to run from a key to a query (got {_few(wrong)}). "
                "Reverse it, as `graph.reverse()` does."
            )
        if any(not isinstance(head, int) for _, _, head in edges):
            raise ValueError(
                "Expected the attribute 'head' of each edge of 'graph' to be an int "
                "(got another type). Number heads from 0."
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
        """Graph over given tokens, from whatever holds its edges.

        A layer calls it on its ``edge_index``.

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
        num_queries, num_keys, _ = check_sizes(num_queries, num_keys)
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
                f"Expected 'edge_index' over the sequences of 'ptr' or 'batch' (got {edge_index}). "
                "Build the graph with the `ptr` of these tokens, or it may join what the offsets keep apart."
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
        require_values(mask, "mask")
        if mask.dim() not in (2, 3, 4) or mask.numel() == 0:
            raise ValueError(
                f"Expected 'mask' to be [N, M], [H, N, M] or [B, H, N, M] (got {list(mask.shape)}). "
                "Queries are rows, and there is at least one of each."
            )
        *before, num_queries, num_keys = mask.shape
        batch, heads = before[0] if len(before) == 2 else 1, before[-1] if before else 1
        flat = mask.reshape(batch, heads, num_queries, num_keys)

        place = torch.arange(num_keys, device=mask.device)

        def rows(number: Tensor) -> tuple[Tensor, Tensor]:
            row, query = number // num_queries, number % num_queries
            head, sequence = row // batch, row % batch
            return flat[sequence, head, query] != 0, sequence[:, None] * num_keys + place

        count, numbers = batch * heads * num_queries, place.new_empty(0, dtype=index_type(batch * num_keys))
        way_out = "Make graphs of some sequences or heads."
        rowptr, col = masked_rows(rows, count, mask.numel(), "mask", way_out, numbers)
        steps = torch.arange(batch + 1, device=mask.device)
        sides = (batch * num_queries, batch * num_keys, heads, steps * num_queries, steps * num_keys)
        return cls._trusted(rowptr, col, *sides)

    # ---------------------------------------------------------------- to other forms

    def to_dense(self, sequence: int | None = None) -> Tensor:
        """Mask of one sequence, ``[H, n, m]`` bool, rows = queries.

        Args:
            sequence: Which sequence; may be None where there is one.

        Raises:
            ValueError: The sequence does not exist or is not told, the mask takes more memory than there is, or the
                graph is on the meta device and has no values.
        """
        require_values(self.col, "graph")
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
                f"Expected 'scipy' to be installed (it is not). Run {checks.install('analysis')}."
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
                "Expected 'torch-sparse' to be installed. "
                f"Run {checks.install('sparse', '--no-build-isolation ')}, or use `to_edge_index()`."
            )
        head = the_one(head, self.heads, "head")
        graph = self.head(head)
        if value is not None:
            if value.dim() < 1 or value.size(0) != self.num_edges:
                raise ValueError(
                    f"Expected 'value' to be [{self.num_edges}, ...] (got {list(value.shape)}). "
                    "It holds one entry for each edge of all heads."
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
                "Expected 'graph' to have the same tokens as queries and keys "
                f"(got N = {self.num_queries}, M = {self.num_keys}{other}). Use `to_hetero_data()`."
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
        """Replace the edges of a PyG data object over the same tokens by those of this graph.

        Sets ``edge_index`` and, with several heads, the head of each edge: ``edge_type`` of ``Data``, ``edge_head`` of
        ``HeteroData``. Attributes that described the old edges are removed. A ``Batch`` still separates into its
        graphs. Returns the object.

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
                    f"Expected 'data' to have {total} nodes, as the graph has tokens (got {there.num_nodes}). "
                    "Its edges join nodes by number."
                )
            known = stored_ptr(there)
            if known is not None and not torch.equal(known.cpu(), ptr.cpu()):
                raise ValueError(
                    f"Expected 'data' to have the sequences of the graph (got 'ptr' {known.tolist()[:9]}). "
                    "Build the graph with its 'ptr'."
                )
        head = "edge_type" if edge_type is None else "edge_head"
        for name in {"edge_attr", "edge_weight", "edge_type", "edge_head", "adj", "adj_t"} & {*store.keys()}:
            del store[name]
        edges = {"edge_index": self.edge_index} | ({head: self.edge_head} if self.heads > 1 else {})
        if self.heads > 1 and self.num_sequences > 1:  # from (head, query, key) to (sequence, head, query, key)
            order = torch.bucketize(edges["edge_index"][1], self.query_ptr[1:], right=True).argsort(stable=True)
            edges = {name: value[..., order] for name, value in edges.items()}
        store.update(edges)
        # `Batch.to_data_list` goes by it; it is shared with the batch that was copied
        if isinstance(data, Batch) and hasattr(data, "_slice_dict"):
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
        require_values(self.col, "graph")
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


def edge_list(adjacency: Tensor | SparseTensor) -> Tensor:
    """Edges ``[2, E]`` of any PyG adjacency, in the order in which it stores them.

    Row 0 holds the keys (sources), row 1 the queries (targets).
    """
    if not isinstance(adjacency, Tensor | SparseTensor):
        raise TypeError(
            "Expected 'edge_index' to be a tensor [2, E], a sparse adjacency or an AttentionGraph "
            f"(got {type(adjacency).__name__}). Use torch.tensor(edges), or torch_geometric.utils.from_networkx."
        )
    if is_sparse(adjacency):
        if isinstance(adjacency, Tensor) and adjacency.layout == torch.sparse_coo:
            adjacency = adjacency.coalesce()  # `to_edge_index` would mark the caller's tensor as coalesced
        return to_edge_index(adjacency)[0].flip(0)  # rows of a transposed adjacency are targets
    return adjacency.as_tensor() if isinstance(adjacency, EdgeIndex) else adjacency


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


def _few(things: Any) -> str:
    return ", ".join(map(repr, [*things][:3]))
