"""Graphs whose edges join blocks of tokens, and what stands for a block where somebody chooses among them.

In: a graph over blocks, and how many tokens a block has. Out: the same graph, of tokens to whoever looks at tokens. Not
here: attention over blocks (``ops``), and who chooses them (``sampling``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from . import ops
from .graph import AttentionGraph
from .ops import checks
from .ops.reference.blocks import Cut, cut_blocks
from .ops.values import require_values
from .ragged import check_tensor, offsets, resolve_ptr
from .rows import check_edges, check_graph

__all__ = ["BlockGraph", "BlockPool", "block_mean", "block_tokens"]

_GRAIN = "It is a number of tokens."


class BlockGraph(AttentionGraph):
    """A graph in which blocks of queries attend to blocks of keys.

    Each sequence is cut into blocks of ``grain`` tokens from its beginning; its last block may be shorter. Where a
    block of queries attends to a block of keys, every token of the one attends to every token of the other. In a causal
    graph it attends to those that are not later, which cuts the pairs of a block with itself.

    It is an :class:`AttentionGraph` of the tokens: densities, degrees, conversions, plots and analysis count tokens.
    What needs the edges of tokens makes them when it first asks (``rowptr``, ``col``): O(E grain^2) for E edges of
    blocks. Attention does not, and neither do ``degree``, ``density``, ``contains`` and unions of two graphs of one
    grain. ``blocks`` is the graph over blocks.

    Args:
        blocks: The graph over blocks: its queries and keys are the blocks of all sequences.
        grain: Tokens of a block, at least 1.
        query_ptr: Offsets of the sequences in the query tokens, ``[B+1]`` int64. None: all blocks are whole.
        key_ptr: Offsets of the sequences in the key tokens. None: those of the queries if both sides have the same
            blocks, else all blocks are whole.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A sequence has another number of blocks than its tokens make, or offsets do not fit.

    Example:
        >>> blocks = AttentionGraph.from_dense(torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]]))
        >>> graph = BlockGraph(blocks, 4, query_ptr=torch.tensor([0, 10]))  # blocks of 4, 4 and 2 tokens
        >>> graph
        BlockGraph(1 sequence, 1 head, 10 queries, 10 keys, 44 edges, density 44.0%, grain 4)
        >>> graph.to_dense()[0, 9].int().tolist()
        [1, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    """

    _blocks: AttentionGraph
    _grain: int

    def __init__(
        self, blocks: AttentionGraph, grain: int, *, query_ptr: Tensor | None = None, key_ptr: Tensor | None = None
    ) -> None:
        check_graph(blocks, "blocks")
        if isinstance(blocks, BlockGraph):
            raise TypeError("Expected 'blocks' to be a graph over blocks (got one over tokens). Pass its `.blocks`.")
        grain = checks.integer("grain", grain, 1, _GRAIN)
        same = blocks.num_queries == blocks.num_keys and blocks.same_offsets(blocks.key_ptr, blocks.query_ptr)
        check_tensor(query_ptr, "query_ptr")
        check_tensor(key_ptr, "key_ptr")
        key_ptr = query_ptr if key_ptr is None and same else key_ptr
        found = []
        for name, ptr, theirs in (("query_ptr", query_ptr, blocks.query_ptr), ("key_ptr", key_ptr, blocks.key_ptr)):
            ptr = theirs * grain if ptr is None else ptr
            require_values(ptr, name)
            end = int(ptr[-1]) if ptr.dim() == 1 and ptr.numel() else 0
            ptr = resolve_ptr(end, ptr, name=name, device=blocks.device)
            counts = Cut(ptr, int(ptr[-1]), grain).ptr.diff()
            if counts.shape != theirs.diff().shape or not torch.equal(counts, theirs.diff()):
                raise ValueError(
                    f"Expected '{name}' of sequences with {theirs.diff().tolist()[:9]} blocks of {grain} tokens "
                    f"(got {counts.tolist()[:9]}). 'blocks' has a token for each block."
                )
            found.append(ptr)
        query_ptr, key_ptr = found[0], found[0] if same and torch.equal(*found) else found[1]
        self._fill(blocks, grain, query_ptr, key_ptr, int(query_ptr[-1]), int(key_ptr[-1]))

    def _fill(
        self, blocks: AttentionGraph, grain: int, query_ptr: Tensor, key_ptr: Tensor, num_queries: int, num_keys: int
    ) -> BlockGraph:
        known: dict[str, Any] = {"_blocks": blocks, "_grain": grain, "query_ptr": query_ptr, "key_ptr": key_ptr}
        known |= {"num_queries": num_queries, "num_keys": num_keys}
        for name, value in (known | {"heads": blocks.heads, "is_causal": blocks.is_causal}).items():
            object.__setattr__(self, name, value)
        return self

    @property
    def grain(self) -> int:
        return self._grain

    @property
    def blocks(self) -> AttentionGraph:
        return self._blocks

    @classmethod
    def _over(cls, *arguments: Any) -> BlockGraph:
        """Of blocks that fit the tokens by the way they were made; arguments as of :meth:`_fill`."""
        graph: BlockGraph = object.__new__(cls)
        return graph._fill(*arguments)

    @classmethod
    def _trusted(cls, *arguments: Any, **options: Any) -> Any:
        """Rows of tokens are those of a graph of tokens."""
        return AttentionGraph._trusted(*arguments, **options)

    def with_blocks(self, blocks: AttentionGraph) -> BlockGraph:
        return self._over(blocks, self.grain, self.query_ptr, self.key_ptr, self.num_queries, self.num_keys)

    # ---------------------------------------------------------------- as a graph of tokens

    @cached_property
    def cuts(self) -> tuple[Cut, Cut]:
        """How queries and keys are cut into blocks."""
        counts = (self.blocks.num_queries, self.blocks.num_keys)
        return cut_blocks((self.num_queries, self.num_keys), (self.query_ptr, self.key_ptr), self.grain, counts)

    @property
    def _own(self) -> Tensor:
        """Which edges of blocks a causal graph cuts, since they join a block to itself, ``[E]`` bool."""
        query, key = self.cuts
        if not self.is_causal:
            return torch.zeros_like(self.blocks.col, dtype=torch.bool)
        return query.position[self.blocks.edge_row % query.count] == key.position[self.blocks.col.long()]

    @cached_property
    def degree(self) -> Tensor:
        query, key = self.cuts
        blocks, own = self.blocks, self._own
        row, col = blocks.edge_row, blocks.col.long()
        count = torch.zeros(2, blocks.rowptr.numel() - 1, dtype=torch.int64, device=self.device)
        for part, which in enumerate((~own, own)):
            count[part].index_add_(0, row[which], key.length[col[which]])
        slot = torch.arange(1, self.grain + 1, device=self.device)
        each = count[0, :, None] + torch.minimum(count[1, :, None], slot)  # [H*n, grain]
        return query.join(each[..., None], self.heads)[..., 0]

    @cached_property
    def rowptr(self) -> Tensor:
        return offsets(self.degree.flatten())

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        """Key token of each edge of tokens, and the edge of blocks that it belongs to."""
        require_values(self.blocks.col, "graph")
        query, key = self.cuts
        total, device = self.num_edges, self.device
        checks.memory(
            "graph", total, 40, device, "Look at fewer heads or sequences; attention needs no edges of tokens."
        )
        slot = torch.arange(self.num_queries, device=device).repeat(self.heads)  # token of each row of tokens
        block = torch.repeat_interleave(query.length, output_size=self.num_queries)
        row = (torch.arange(self.heads, device=device)[:, None] * query.count + block).flatten()  # its row of blocks
        degree = self.blocks.rowptr.diff()[row]
        count = int(degree.sum())
        token = torch.repeat_interleave(degree, output_size=count)
        edge = torch.arange(count, device=device) + (self.blocks.rowptr[row] - degree.cumsum(0) + degree)[token]
        col = self.blocks.col.long()[edge]
        size = key.length[col]
        if self.is_causal:
            place = slot - self.query_ptr[query.sequence[row % query.count]]
            size = torch.minimum(size, place[token] - self.grain * key.position[col] + 1)
        each = torch.repeat_interleave(size, output_size=total)
        first = (key.first[col] - size.cumsum(0) + size)[each]
        return (first + torch.arange(total, device=device)).to(self.blocks.col.dtype), edge[each]

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
        if gate is not None:  # of each edge of tokens, which no kernel over blocks takes
            return super()._attend(query, key, value, gate, bias, scale, gate_form, dropout, seed)
        rows = self.blocks.rows._replace(bias=self._tiled(bias))
        return ops.block_attention(query, key, value, rows, *self._layout, scale, dropout, seed)[0]

    def _attention_weight(self, query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        rows = self.blocks.rows._replace(bias=self._tiled(bias))
        return ops.block_weight(query, key, rows, *self._layout, scale)

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
        assert isinstance(probes, BlockGraph)
        edges, probed = (
            graph.blocks.rows._replace(bias=graph._tiled(bias))
            for graph, bias in zip((self, probes), biases, strict=True)
        )
        ptrs = (self.query_ptr, self.key_ptr)
        return ops.block_expectation(
            out, query, key, value, edges, probed, chance, ptrs, self.grain, forced, self.is_causal, scale,
            exploration, prob=prob(),
        )  # fmt: skip

    @property
    def _layout(self) -> tuple[tuple[Tensor, Tensor], int, bool]:
        """Arguments of ops over blocks after the rows."""
        return (self.query_ptr, self.key_ptr), self.grain, self.is_causal

    def _tiled(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else self.tiles(bias)

    def tiles(self, x: Tensor) -> Tensor:
        """Numbers of the edges of tokens ``[E]``, as the ops over blocks take them.

        Returns:
            ``[E', grain, grain]`` for the edges of blocks E'; zeros where no tokens meet.
        """
        col, edge = self._rows
        query, key = self.cuts
        row = self.edge_row % self.num_queries
        inner = (query.slot[row] % self.grain) * self.grain + key.slot[col.long()] % self.grain
        found = x.new_zeros(self.blocks.num_edges * self.grain**2)
        return found.index_put((edge * self.grain**2 + inner,), x).view(-1, self.grain, self.grain)

    def __repr__(self) -> str:
        return super().__repr__().replace("AttentionGraph(", "BlockGraph(")[:-1] + f", grain {self.grain})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockGraph) and other.grain == self.grain and self._like(other):
            return self.blocks == other.blocks
        return super().__eq__(other)

    __hash__ = AttentionGraph.__hash__

    def _like(self, other: AttentionGraph) -> bool:
        sizes = ((graph.num_queries, graph.num_keys, graph.device.type) for graph in (self, other))
        return len({*sizes}) == 1 and self.same_offsets(other.query_ptr, other.key_ptr)

    def validate(self) -> BlockGraph:
        self.blocks.validate()
        return self

    # ---------------------------------------------------------------- graphs from graphs

    def _at(self, blocks: AttentionGraph, ptrs: Iterable[Tensor], sizes: Iterable[int]) -> BlockGraph:
        """The graph elsewhere; sides that have one tensor of offsets keep one."""
        query_ptr, key_ptr = ptrs
        key_ptr = query_ptr if self.key_ptr is self.query_ptr else key_ptr
        return self._over(blocks, self.grain, query_ptr, key_ptr, *sizes)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BlockGraph:
        blocks = self.blocks.to(device, non_blocking)
        ptrs = (x.to(blocks.device, non_blocking=non_blocking) for x in (self.query_ptr, self.key_ptr))
        return self._at(blocks, ptrs, (self.num_queries, self.num_keys))

    def sequence(self, sequence: int) -> BlockGraph:
        blocks = self.blocks.sequence(sequence)
        which = sequence % self.num_sequences
        ptrs = [ptr[which : which + 2] - ptr[which] for ptr in (self.query_ptr, self.key_ptr)]
        return self._at(blocks, ptrs, (int(ptr[-1]) for ptr in ptrs))

    def head(self, head: int) -> BlockGraph:
        return self.with_blocks(self.blocks.head(head))

    def expand(self, heads: int) -> BlockGraph:
        return self if heads == self.heads else self.with_blocks(self.blocks.expand(heads))

    def causal(self) -> BlockGraph:
        return self if self.is_causal else self.with_blocks(self.blocks.causal())

    def union(self, other: AttentionGraph) -> tuple[AttentionGraph, Tensor]:  # type: ignore[override]
        """As :meth:`AttentionGraph.union`.

        With a graph of the same grain, both causal or none, it is one of blocks, and so is the mask.
        """
        like = isinstance(other, BlockGraph) and (other.grain, other.is_causal) == (self.grain, self.is_causal)
        if like and self._like(other):
            blocks, from_other = self.blocks.union(other.blocks)
            return self.with_blocks(blocks), from_other
        return self.expand_tokens().union(other.expand_tokens() if isinstance(other, BlockGraph) else other)

    def contains(self, edge_index: Tensor, edge_head: Tensor | None = None) -> Tensor:
        key, query, head = check_edges(edge_index, edge_head)
        inside = (query >= 0) & (query < self.num_queries) & (key >= 0) & (key < self.num_keys)
        mine, theirs = self.cuts
        i, j = query.clamp(0, self.num_queries - 1), key.clamp(0, self.num_keys - 1)
        pair = torch.stack([theirs.slot[j], mine.slot[i]]) // self.grain
        found = inside & self.blocks.contains(pair, head)
        if self.is_causal:
            place, other = (
                cut.position[slot // self.grain] * self.grain + slot % self.grain
                for cut, slot in ((mine, mine.slot[i]), (theirs, theirs.slot[j]))
            )
            found &= other <= place
        return found

    def to_block_mask(self) -> BlockMask:
        """The graph as FlexAttention takes it, for kernels of torch's own.

        Heads are heads, and all sequences of the batch are one, of which other pairs are left out. Call
        ``flex_attention(query[None], key[None], value[None], block_mask=mask)``.

        Raises:
            ValueError: A block is shorter than ``grain``: FlexAttention cuts the whole batch into equal blocks.

        Example:
            >>> blocks = AttentionGraph.from_dense(torch.eye(4).tril())
            >>> BlockGraph(blocks, 128).to_block_mask().sparsity()
            75.0
        """
        mine, theirs = self.cuts
        if not (mine.whole and theirs.whole):
            raise ValueError(
                f"Expected sequences of a multiple of {self.grain} tokens (got a shorter block). FlexAttention cuts "
                "the whole batch into equal blocks: pad the sequences, or attend over the graph itself."
            )
        blocks, partly = self.blocks, self._own
        shape, found = (1, self.heads, mine.count), []
        for kept in (partly, ~partly):
            graph = blocks.select(kept)
            index = torch.zeros(*shape, theirs.count, dtype=torch.int32, device=self.device)
            row, number = graph.edge_row, torch.arange(graph.num_edges, device=self.device)
            index.view(-1, theirs.count)[row, number - graph.rowptr[row]] = graph.col.int()
            found += [graph.degree.int().view(shape), index]
        joined = torch.zeros(self.heads * mine.count, theirs.count, dtype=torch.bool, device=self.device)
        joined = joined.index_put((blocks.edge_row, blocks.col.long()), joined.new_ones(())).view(*shape[1:], -1)
        starts = [(cut.tokens[cut.sequence]).repeat_interleave(self.grain) for cut in (mine, theirs)]

        def meets(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            found = joined[head, query // self.grain, key // self.grain]
            return found & (key - starts[1][key] <= query - starts[0][query]) if self.is_causal else found

        some, places, whole, whole_places = found
        return BlockMask.from_kv_blocks(some, places, whole, whole_places, BLOCK_SIZE=self.grain, mask_mod=meets)


# ------------------------------------------------------------------ what stands for a block


def block_tokens(x: Tensor, cut: Cut, *, before: bool = False) -> tuple[Tensor, Tensor]:
    """Tokens that a block is chosen by.

    Args:
        x: Tokens, ``[H, N, C]``.
        cut: How they are cut into blocks.
        before: Take the ``grain`` tokens that end with the first token of the block, which every query of the block may
            see in a causal model; else those of the block.

    Returns:
        The tokens of each block ``[H, n, grain, C]``, zeros where there is none; and which there are, ``[n, grain]``
        bool.
    """
    grain, start = cut.block_size, cut.tokens[cut.sequence]
    numbers = x.size(0) * cut.count * grain * x.size(2)
    checks.memory("grain", numbers, x.element_size(), x.device, "Take smaller blocks.", "numbers")
    token = (cut.first - (grain - 1 if before else 0))[:, None] + torch.arange(grain, device=x.device)
    there = (token >= start[:, None]) & (token < (cut.first + cut.length)[:, None])
    if not before and cut.whole:
        return x.view(x.size(0), cut.count, grain, x.size(2)), there
    return x[:, token.clamp(0, x.size(1) - 1)].masked_fill(~there[..., None], 0), there


class BlockPool(torch.nn.Module):
    r"""One vector for each block: a mean of its tokens, whose weights may learn.

    Weights are the softmax of :math:`\langle w_h, x \rangle` over the tokens of a block, with a vector :math:`w_h` for
    each head. They start equal. Cost O(N C).

    Args:
        channels: Channels per head C.
        heads: Number of heads H.

    Raises:
        TypeError, ValueError: A size is no positive integer.

    Shapes:
        - tokens of blocks ``[H, n, grain, C]`` and which there are ``[n, grain]``; returns ``[H, n, C]``.
    """

    def __init__(self, channels: int, heads: int = 1) -> None:
        super().__init__()
        self.channels = checks.integer("channels", channels, 1, "They are channels of one head.")
        self.heads = checks.integer("heads", heads, 1, "Each head has weights of its own.")
        size, device = self.heads * self.channels, torch.get_default_device()
        checks.memory("channels", size, 4, device, "Take fewer of them.", "parameters")
        self.weight = torch.nn.Parameter(torch.zeros(self.heads, self.channels))

    def reset_parameters(self) -> None:
        """Make weights equal."""
        torch.nn.init.zeros_(self.weight)

    def forward(self, tokens: Tensor, there: Tensor) -> Tensor:
        """See the class."""
        checks.tensors(tokens=tokens, there=there)
        wanted = (self.heads, None, None, self.channels)
        checks.shape("tokens", tokens, wanted, "[H, n, grain, C]", "They are those of the heads it was made for.")
        checks.floating(tokens=tokens)
        checks.shape("there", there, tokens.shape[1:3], "[n, grain]", "It says which tokens there are.")
        if there.dtype != torch.bool:
            raise TypeError(f"Expected 'there' to be bool (got {there.dtype}). It says which tokens there are.")
        checks.same_device("tokens", tokens, there=there, weight=self.weight)
        score = torch.einsum("hngc,hc->hng", tokens, self.weight.to(tokens.dtype)).masked_fill(~there, -torch.inf)
        return torch.einsum("hng,hngc->hnc", score.softmax(-1), tokens)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, heads={self.heads}"


def block_mean(tokens: Tensor, there: Tensor) -> Tensor:
    """The mean of the tokens of each block, ``[H, n, C]``."""
    return tokens.sum(2) / there.sum(1).to(tokens.dtype)[:, None]
