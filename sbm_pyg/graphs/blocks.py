"""Graphs whose edges join blocks of tokens, and block pooling: one vector per block.

In: a graph over blocks and the block size; or tokens. Out: the same graph, expanded to tokens on demand; or block
vectors. Not here: attention over blocks (``ops``) and the sources that choose blocks (``sources``).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..ops import checks, schemas
from ..ops.segments import runs, segment_log_softmax, segments
from ..ops.tiles import Cut, cut_blocks
from ..ops.values import require_values
from .graph import AttentionGraph
from .ragged import check_tensor, count_positions, offsets, resolve_ptr
from .rows import check_edges, check_graph

__all__ = ["BlockGraph", "BlockPool", "block_means", "block_tokens", "pool_blocks"]

_TOKENS_PER_BLOCK = "It is the number of tokens per block."


class BlockGraph(AttentionGraph):
    """A graph in which blocks of queries attend to blocks of keys.

    Each sequence is cut into blocks of ``block_size`` tokens from its beginning; its last block may be shorter. If a
    block of queries attends to a block of keys, each of its tokens attends to every token of the key block. In a causal
    graph a token attends only to tokens that are not later: in its own block, to itself and earlier tokens.

    A BlockGraph is an :class:`AttentionGraph` of tokens: densities, degrees, conversions, plots and analysis count
    tokens. The edges of tokens (``rowptr``, ``col``) are computed at first use, at a cost of O(E block_size^2) for E
    edges of blocks. Attention, ``degree``, ``density``, ``contains`` and unions with graphs of the same block size work
    without these edges. ``blocks`` is the graph over blocks.

    Args:
        blocks: The graph over blocks. Its queries and keys are the blocks of all sequences.
        block_size: Tokens per block, at least 1.
        query_ptr: Offsets of the sequences in the query tokens, ``[B+1]`` int64. None: all blocks are full.
        key_ptr: Offsets of the sequences in the key tokens, ``[B+1]`` int64. None: the offsets of the queries if both
            sides have the same blocks, else all blocks are full.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The number of blocks of a sequence does not match its number of tokens, or offsets do not fit.

    Example:
        >>> blocks = AttentionGraph.from_dense(torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]]))
        >>> graph = BlockGraph(blocks, 4, query_ptr=torch.tensor([0, 10]))  # blocks of 4, 4 and 2 tokens
        >>> graph
        BlockGraph(1 sequence, 1 head, 10 queries, 10 keys, 44 edges, density 44.0%, block size 4)
        >>> graph.to_dense()[0, 9].int().tolist()
        [1, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    """

    _blocks: AttentionGraph
    _block_size: int

    def __init__(
        self, blocks: AttentionGraph, block_size: int, *, query_ptr: Tensor | None = None, key_ptr: Tensor | None = None
    ) -> None:
        check_graph(blocks, "blocks")
        if isinstance(blocks, BlockGraph):
            raise TypeError("Expected 'blocks' to be a graph over blocks (got a BlockGraph). Pass its `.blocks`.")
        block_size = checks.integer("block_size", block_size, 1, _TOKENS_PER_BLOCK)
        same = blocks.num_queries == blocks.num_keys and blocks.same_offsets(blocks.key_ptr, blocks.query_ptr)
        check_tensor(query_ptr, "query_ptr")
        check_tensor(key_ptr, "key_ptr")
        key_ptr = query_ptr if key_ptr is None and same else key_ptr
        ptrs = []
        for name, ptr, block_ptr in (("query_ptr", query_ptr, blocks.query_ptr), ("key_ptr", key_ptr, blocks.key_ptr)):
            ptr = block_ptr * block_size if ptr is None else ptr
            require_values(ptr, name)
            end = int(ptr[-1]) if ptr.dim() == 1 and ptr.numel() else 0
            ptr = resolve_ptr(end, ptr, name=name, device=blocks.device)
            counts = Cut(ptr, int(ptr[-1]), block_size).ptr.diff()
            if counts.shape != block_ptr.diff().shape or not torch.equal(counts, block_ptr.diff()):
                raise ValueError(
                    f"Expected '{name}' of sequences with {block_ptr.diff().tolist()[:9]} blocks of {block_size} "
                    f"tokens (got {counts.tolist()[:9]}). Each token of 'blocks' is one block."
                )
            ptrs.append(ptr)
        query_ptr, key_ptr = ptrs[0], ptrs[0] if same and torch.equal(*ptrs) else ptrs[1]
        graph = self._trusted_blocks(blocks, block_size, query_ptr, key_ptr, int(query_ptr[-1]), int(key_ptr[-1]))
        for name, value in vars(graph).items():
            object.__setattr__(self, name, value)

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def blocks(self) -> AttentionGraph:
        return self._blocks

    @classmethod
    def _trusted_blocks(
        cls, blocks: AttentionGraph, size: int, query_ptr: Tensor, key_ptr: Tensor, num_queries: int, num_keys: int
    ) -> BlockGraph:
        """Make a graph without checks, from blocks that fit the tokens by construction."""
        graph: BlockGraph = object.__new__(cls)
        fields: dict[str, Any] = {"_blocks": blocks, "_block_size": size, "query_ptr": query_ptr, "key_ptr": key_ptr}
        fields |= {"num_queries": num_queries, "num_keys": num_keys}
        for name, value in (fields | {"heads": blocks.heads, "is_causal": blocks.is_causal}).items():
            object.__setattr__(graph, name, value)
        return graph

    def _replace(self, blocks: AttentionGraph, ptrs: Iterable[Tensor], sizes: Iterable[int]) -> BlockGraph:
        """Copy with other blocks, offsets and sizes. Offsets that both sides share stay one tensor."""
        query_ptr, key_ptr = ptrs
        key_ptr = query_ptr if self.key_ptr is self.query_ptr else key_ptr
        return self._trusted_blocks(blocks, self.block_size, query_ptr, key_ptr, *sizes)

    @classmethod
    def _trusted(cls, *arguments: Any, **options: Any) -> Any:
        """Make an :class:`AttentionGraph`, since rows of tokens do not describe blocks."""
        return AttentionGraph._trusted(*arguments, **options)

    def with_blocks(self, blocks: AttentionGraph) -> BlockGraph:
        return self._replace(blocks, (self.query_ptr, self.key_ptr), (self.num_queries, self.num_keys))

    # ---------------------------------------------------------------- as a graph of tokens

    @cached_property
    def cuts(self) -> tuple[Cut, Cut]:
        """The blocks of the queries and of the keys."""
        counts = (self.blocks.num_queries, self.blocks.num_keys)
        return cut_blocks((self.num_queries, self.num_keys), (self.query_ptr, self.key_ptr), self.block_size, counts)

    @property
    def _diagonal(self) -> Tensor:
        """True for edges that join a block to itself in a causal graph, ``[E]`` bool; False in other graphs."""
        query, key = self.cuts
        if not self.is_causal:
            return torch.zeros_like(self.blocks.col, dtype=torch.bool)
        return query.position[self.blocks.edge_row % query.count] == key.position[self.blocks.col.long()]

    @cached_property
    def degree(self) -> Tensor:
        query, key = self.cuts
        blocks, diagonal = self.blocks, self._diagonal
        row, col = blocks.edge_row, blocks.col.long()
        count = torch.zeros(2, blocks.rowptr.numel() - 1, dtype=torch.int64, device=self.device)
        for part, which in enumerate((~diagonal, diagonal)):
            count[part].index_add_(0, row[which], key.length[col[which]])
        block = torch.repeat_interleave(query.length, output_size=self.num_queries)
        place = torch.arange(1, self.num_queries + 1, device=self.device) - query.first[block]
        others, on_diagonal = count.view(2, self.heads, -1)[..., block]  # [H, N] each
        return others + torch.minimum(on_diagonal, place)

    @cached_property
    def rowptr(self) -> Tensor:
        return offsets(self.degree.flatten())

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        """Key of each edge of tokens, and the edge of blocks that contains it, ``[E]`` each."""
        require_values(self.blocks.col, "graph")
        query, key = self.cuts
        total, device = self.num_edges, self.device
        checks.memory("graph", total, 40, device, "Take fewer heads or sequences; attention needs no edges of tokens.")
        block = torch.repeat_interleave(query.length, output_size=self.num_queries)
        row = (torch.arange(self.heads, device=device)[:, None] * query.count + block).flatten()  # [H*N], of blocks
        degree = self.blocks.rowptr.diff()[row]
        count = int(degree.sum())
        edge = runs(self.blocks.rowptr[row], degree, count)
        col = self.blocks.col.long()[edge]
        size = key.length[col]
        if self.is_causal:
            position = count_positions(self.query_ptr, self.num_queries).repeat(self.heads)  # [H*N]
            position = position.repeat_interleave(degree, output_size=count)
            size = torch.minimum(size, position - self.block_size * key.position[col] + 1)
        keys = runs(key.first[col], size, total, self.blocks.col.dtype)
        return keys, edge.repeat_interleave(size, output_size=total)

    @property
    def col(self) -> Tensor:
        return self._rows[0]

    @property
    def num_edges(self) -> int:
        return int(self.rowptr[-1])

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def expand_tokens(self) -> AttentionGraph:
        sizes = (self.num_queries, self.num_keys, self.heads, self.query_ptr, self.key_ptr)
        return AttentionGraph._trusted(self.rowptr, self.col, *sizes, self.is_causal)

    def spread(self, x: Tensor) -> Tensor:
        return x[self._rows[1]]

    def over_tokens(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        query, key = (
            x.repeat_interleave(cut.length, 1, output_size=cut.total)
            for x, cut in zip((query, key), self.cuts, strict=True)
        )
        return query, key

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None, bias: Tensor | None, scale: float,
        gate_form: str, dropout: float, seed: int,
    ) -> Tensor:  # fmt: skip
        if gate is not None:  # a gate is a number per edge of tokens, which no kernel over blocks takes
            return super()._attend(query, key, value, gate, bias, scale, gate_form, dropout, seed)
        more = (self._bias_of_blocks(bias), scale, dropout, seed)
        return schemas.block_attention(query, key, value, *self.blocks.rows[:2], *self._layout, *more)[0]

    def _attention_weight(self, query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        rows = self.blocks.rows._replace(bias=self._bias_of_blocks(bias))
        return schemas.block_weight(query, key, *rows, *self._layout, scale)

    def _cross_entropy(self, query: Tensor, key: Tensor, log_p: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        rowptr, impossible = self.blocks.rowptr, log_p == -torch.inf
        with torch.no_grad():
            weight = self._attention_weight(query, key, bias, scale).masked_fill(impossible, 0)
        log_q = segment_log_softmax(log_p, rowptr).masked_fill(impossible, 0)
        return -segments(weight * log_q, rowptr).view(self.heads, -1)

    @property
    def _layout(self) -> tuple[Tensor, Tensor, int, bool]:
        return self.query_ptr, self.key_ptr, self.block_size, self.is_causal

    def _bias_of_blocks(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else self.edge_bias_to_blocks(bias)

    def edge_bias_to_blocks(self, bias: Tensor) -> Tensor:
        """Rearrange a bias per edge of tokens, ``[E]``, to the form that the ops over blocks take.

        Returns:
            ``[E', block_size, block_size]`` for the edges of blocks E'; 0 for a pair of tokens that is not an edge.
        """
        col, edge = self._rows
        query, key = self.cuts
        row = self.edge_row % self.num_queries
        inner = (query.slot[row] % self.block_size) * self.block_size + key.slot[col.long()] % self.block_size
        block_bias = bias.new_zeros(self.blocks.num_edges * self.block_size**2)
        block_bias = block_bias.index_put((edge * self.block_size**2 + inner,), bias)
        return block_bias.view(-1, self.block_size, self.block_size)

    def __repr__(self) -> str:
        return super().__repr__().replace("AttentionGraph(", "BlockGraph(")[:-1] + f", block size {self.block_size})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockGraph) and other.block_size == self.block_size and self._same_tokens(other):
            return self.blocks == other.blocks
        return super().__eq__(other)

    __hash__ = AttentionGraph.__hash__

    def _same_tokens(self, other: AttentionGraph) -> bool:
        sizes = ((graph.num_queries, graph.num_keys, graph.device.type) for graph in (self, other))
        return len({*sizes}) == 1 and self.same_offsets(other.query_ptr, other.key_ptr)

    def validate(self) -> BlockGraph:
        self.blocks.validate()
        return self

    # ---------------------------------------------------------------- graphs from graphs

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BlockGraph:
        blocks = self.blocks.to(device, non_blocking)
        ptrs = (x.to(blocks.device, non_blocking=non_blocking) for x in (self.query_ptr, self.key_ptr))
        return self._replace(blocks, ptrs, (self.num_queries, self.num_keys))

    def sequence(self, sequence: int) -> BlockGraph:
        blocks = self.blocks.sequence(sequence)
        which = sequence % self.num_sequences
        ptrs = [ptr[which : which + 2] - ptr[which] for ptr in (self.query_ptr, self.key_ptr)]
        return self._replace(blocks, ptrs, (int(ptr[-1]) for ptr in ptrs))

    def head(self, head: int) -> BlockGraph:
        return self.with_blocks(self.blocks.head(head))

    def expand(self, heads: int) -> BlockGraph:
        return self if heads == self.heads else self.with_blocks(self.blocks.expand(heads))

    def causal(self) -> BlockGraph:
        return self if self.is_causal else self.with_blocks(self.blocks.causal())

    def union(self, other: AttentionGraph) -> tuple[AttentionGraph, Tensor]:  # type: ignore[override]
        """As :meth:`AttentionGraph.union`.

        The union of two graphs of the same block size, both causal or neither, is a graph of blocks, and its mask
        ``[E'']`` counts edges of blocks.
        """
        same = isinstance(other, BlockGraph) and other.block_size == self.block_size
        if same and other.is_causal == self.is_causal and self._same_tokens(other):
            blocks, from_other = self.blocks.union(other.blocks)
            return self.with_blocks(blocks), from_other
        return self.expand_tokens().union(other.expand_tokens())

    def contains(self, edge_index: Tensor, edge_head: Tensor | None = None) -> Tensor:
        key, query, head = check_edges(edge_index, edge_head)
        inside = (query >= 0) & (query < self.num_queries) & (key >= 0) & (key < self.num_keys)
        query_cut, key_cut = self.cuts
        i, j = query.clamp(0, self.num_queries - 1), key.clamp(0, self.num_keys - 1)
        pair = torch.stack([key_cut.slot[j], query_cut.slot[i]]) // self.block_size
        is_edge = inside & self.blocks.contains(pair, head)
        if self.is_causal:
            query_position, key_position = (
                cut.position[slot // self.block_size] * self.block_size + slot % self.block_size
                for cut, slot in ((query_cut, query_cut.slot[i]), (key_cut, key_cut.slot[j]))
            )
            is_edge &= key_position <= query_position
        return is_edge

    def to_block_mask(self) -> BlockMask:
        """The graph as a mask of FlexAttention, PyTorch's kernel for block-sparse attention.

        The mask has H heads and a batch of one, which joins all sequences; pairs across sequences are masked. Call
        ``flex_attention(query[None], key[None], value[None], block_mask=mask)``. On a GPU, ``block_size`` must be a
        multiple of 128, or of 64 with ``kernel_options={"BLOCK_M": 64, "BLOCK_N": 64}``, and backward ``"BLOCK_M1"``,
        ``"BLOCK_N1"``, ``"BLOCK_M2"`` and ``"BLOCK_N2"`` of 64 or less.

        Raises:
            ValueError: A block is shorter than ``block_size``. FlexAttention cuts the whole batch into equal blocks.

        Example:
            >>> blocks = AttentionGraph.from_dense(torch.eye(4).tril())
            >>> BlockGraph(blocks, 128).to_block_mask().sparsity()
            75.0
        """
        query_cut, key_cut = self.cuts
        what = f"to have sequences of a multiple of {self.block_size} tokens"
        way_out = "FlexAttention needs equal blocks: pad the sequences, or attend over the graph itself."
        checks.require(query_cut.whole and key_cut.whole, "graph", what, "a shorter block", way_out)
        blocks, diagonal = self.blocks, self._diagonal
        shape, parts = (1, self.heads, query_cut.count), []
        for mask in (diagonal, ~diagonal):
            graph = blocks.select(mask)
            index = torch.zeros(*shape, key_cut.count, dtype=torch.int32, device=self.device)
            row, number = graph.edge_row, torch.arange(graph.num_edges, device=self.device)
            index.view(-1, key_cut.count)[row, number - graph.rowptr[row]] = graph.col.int()
            parts += [graph.degree.int().view(shape), index]
        joined = torch.zeros(self.heads * query_cut.count, key_cut.count, dtype=torch.bool, device=self.device)
        joined = joined.index_put((blocks.edge_row, blocks.col.long()), joined.new_ones(())).view(*shape[1:], -1)
        starts = [(cut.tokens[cut.sequence]).repeat_interleave(self.block_size) for cut in (query_cut, key_cut)]

        def is_edge(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            in_block = joined[head, query // self.block_size, key // self.block_size]
            return in_block & (key - starts[1][key] <= query - starts[0][query]) if self.is_causal else in_block

        count, index, full_count, full_index = parts
        options: dict[str, Any] = {"BLOCK_SIZE": self.block_size, "mask_mod": is_edge}
        return BlockMask.from_kv_blocks(count, index, full_count, full_index, **options)


# ------------------------------------------------------------------ pooling


def pool_blocks(x: Tensor, cut: Cut, pool: torch.nn.Module | None = None, *, before: bool = False) -> Tensor:
    """One vector per block, ``[H, n, C]``: the mean of its tokens, or the output of a module.

    Memory is O(H n block_size C), because shorter blocks are padded.

    Args:
        x: Tokens, ``[H, N, C]``.
        cut: Their blocks.
        pool: A module such as :class:`BlockPool`, called with the two results of :func:`block_tokens`. None: the mean.
        before: As :func:`block_tokens`.
    """
    tokens, is_real = block_tokens(x, cut, before=before)
    return tokens.sum(2) / is_real.sum(1).to(tokens.dtype)[:, None] if pool is None else pool(tokens, is_real)


def block_means(x: Tensor, ptr: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean of each block in float32 or better, for rules that read block means. Memory is O(H N C) for any block size.

    :func:`pool_blocks` adds the tokens of a block in another order, so the last bit of the means may differ.

    Args:
        x: Tokens, ``[H, N, C]``.
        ptr: Offsets of the sequences, ``[B+1]`` int64.
        size: Tokens per block. The last block of a sequence may be shorter.

    Returns:
        The means ``[H, n, C]``; offsets of the sequences in the blocks, ``[B+1]`` int64; and the block of each token,
        ``[N]`` int64.
    """
    cut = Cut(ptr, x.size(1), size)
    block = torch.repeat_interleave(cut.length, output_size=cut.total)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    total = x.new_zeros(x.size(0), cut.count, x.size(2)).index_add_(1, block, x)
    return total / cut.length[:, None], cut.ptr, block


def block_tokens(x: Tensor, cut: Cut, *, before: bool = False) -> tuple[Tensor, Tensor]:
    """The tokens from which the vector of each block is computed.

    Args:
        x: Tokens, ``[H, N, C]``.
        cut: Their blocks.
        before: If True, take the ``block_size`` tokens that end with the first token of the block: all queries of the
            block may attend to them in a causal model. If False, take the tokens of the block.

    Returns:
        The tokens of each block, ``[H, n, block_size, C]``, padded with zeros; and a mask, ``[n, block_size]`` bool,
        that is False on padding.
    """
    block_size, start = cut.block_size, cut.tokens[cut.sequence]
    numbers = x.size(0) * cut.count * block_size * x.size(2)
    checks.memory("block_size", numbers, x.element_size(), x.device, "Take smaller blocks.", "numbers")
    token = (cut.first - (block_size - 1 if before else 0))[:, None] + torch.arange(block_size, device=x.device)
    is_real = (token >= start[:, None]) & (token < (cut.first + cut.length)[:, None])
    if not before and cut.whole:
        return x.view(x.size(0), cut.count, block_size, x.size(2)), is_real
    return x[:, token.clamp(0, x.size(1) - 1)].masked_fill(~is_real[..., None], 0), is_real


class BlockPool(torch.nn.Module):
    r"""One vector per block: a weighted mean of its tokens, with learned weights.

    The weights are the softmax of :math:`\langle w_h, x \rangle` over the tokens of a block. There is one parameter
    vector :math:`w_h` per head. It starts at 0, so all weights start equal. Cost O(N C).

    Args:
        channels: Channels per head C.
        heads: Number of heads H.

    Raises:
        TypeError, ValueError: A size is not a positive integer.

    Shapes:
        - tokens of blocks ``[H, n, block_size, C]`` and a mask ``[n, block_size]`` bool, False on padding;
        - output ``[H, n, C]``.
    """

    head_dims: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(self, channels: int, heads: int = 1) -> None:
        super().__init__()
        self.channels = checks.integer("channels", channels, 1, "It is the number of channels per head.")
        self.heads = checks.integer("heads", heads, 1, "Each head has its own weights.")
        checks.parameters({"channels": self.channels, "heads": self.heads}, self.heads * self.channels)
        self.weight = torch.nn.Parameter(torch.zeros(self.heads, self.channels))

    def reset_parameters(self) -> None:
        """Set the parameters to 0, so that all weights are equal."""
        torch.nn.init.zeros_(self.weight)

    def forward(self, tokens: Tensor, is_real: Tensor) -> Tensor:
        """Pool the tokens of each block; see the class."""
        checks.tensors(tokens=tokens, is_real=is_real)
        sizes = (self.heads, None, None, self.channels)
        checks.shape("tokens", tokens, sizes, "[H, n, block_size, C]", "It has the heads and channels of the pool.")
        checks.floating(tokens=tokens)
        checks.shape("is_real", is_real, tokens.shape[1:3], "[n, block_size]", "It is False on padding.")
        if is_real.dtype != torch.bool:
            raise TypeError(f"Expected 'is_real' to be bool (got {is_real.dtype}). It is False on padding.")
        checks.same_device("tokens", tokens, is_real=is_real, weight=self.weight)
        score = torch.einsum("hngc,hc->hng", tokens, self.weight.to(tokens.dtype)).masked_fill(~is_real, -torch.inf)
        return torch.einsum("hng,hngc->hnc", score.softmax(-1), tokens)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, heads={self.heads}"
