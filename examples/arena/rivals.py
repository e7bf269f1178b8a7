"""Methods from papers: DashAttention, HSA, SAS and the selection of NSA over blocks, SPARTAN over single keys, IndexShare over layers.

The first four score earlier blocks of keys for each query, and attend over the keys of few blocks. The block of the query is always chosen.
In DashAttention, HSA and SAS the weight of a block acts on the weights of its keys. So the loss trains the scores of the blocks that were
chosen, exactly, and those of others not at all. NSA does not learn. These are sources; SPARTAN and IndexShare are layers.

In: the tokens of a causal layer. Out: a choice. If it has probabilities, :class:`Prior` adds their ``log_on`` to the scores of its edges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch_geometric.utils import segment, softmax

from examples.common.hybrid import Scheduled
from sbm_pyg import AttentionConv, AttentionGraph, Choice, EdgeProbability, GraphSource, Tokens, ops
from sbm_pyg.graphs.blocks import block_means
from sbm_pyg.graphs.ragged import offsets
from sbm_pyg.sources.indexer import Indexer, IndexerSource
from sbm_pyg.sources.pairs import graph_of_ranges
from sbm_pyg.sources.patterns import full, window
from sbm_pyg.training.estimators import AttentionCall, Imitate, NoEstimator

SIZE = 2  # keys of a block
LEAST_PRIOR = 1e-3  # of a block that is chosen: the derivative of the logarithm has no bound
LEAST_BLOCKS = 1.25  # earlier blocks of a query of DashAttention, in the mean: a block that is alone learns nothing
RATE = 0.1  # of the scale of DashAttention and the penalty of SPARTAN, which take graphs to their density


class Prior(NoEstimator):
    """Adds the logarithm of the probabilities to the scores of the chosen edges, in training and evaluation.

    While attention is dense, only queries and keys learn.
    """

    softmax_only = True

    def bias(self, choice: Choice, training: bool, seed: int) -> Tensor | None:
        return None if choice.probability is None else choice.probability.log_on(choice.graph)


class EdgePrior(EdgeProbability):
    """Factors of the exponentials of scores, for the edges of one graph; ``log_prior`` are their logarithms, ``[E]``."""

    def __init__(self, graph: AttentionGraph, log_prior: Tensor) -> None:
        self.graph, self.log_prior = graph, log_prior

    def log_on(self, graph: AttentionGraph) -> Tensor:
        return self.log_prior[self.graph.find(graph.edge_index, graph.edge_head)]

    def on(self, graph: AttentionGraph) -> Tensor:
        return self.log_on(graph).exp()

    def expected_density(self) -> Tensor:
        """The density of the graph, whose factors are no probabilities."""
        return self.graph.density


class Blocks:
    """Blocks of keys of a causal layer, and the pairs of each query and an earlier block: their rows are those of a graph."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        ptr = offsets(-(-tokens.key_ptr.diff() // SIZE))
        self.count = int(ptr[-1])
        self.of_key = ptr[tokens.key_sequence] + tokens.key_position // SIZE  # [M]
        self.own_block = (tokens.query_position // SIZE).repeat(tokens.heads)  # number of earlier blocks, [H*N]
        rowptr, self.row = offsets(self.own_block), torch.repeat_interleave(self.own_block)
        self.position = torch.arange(len(self.row)) - rowptr[self.row]  # of the block in its sequence
        col = ptr[tokens.query_sequence].repeat(tokens.heads)[self.row] + self.position
        self.pairs = AttentionGraph(rowptr, col, tokens.num_queries, self.count, tokens.heads, tokens.query_ptr, ptr)

    def best(self, score: Tensor, density: float) -> Tensor:
        """Numbers of the pairs with the largest scores of each query, as many as a density has room for."""
        rowptr = self.pairs.rowptr
        few = max(1, round(room(self.tokens, density)))
        return torch.ops.sbm_pyg.segment_top_k(score.detach(), rowptr, torch.full_like(rowptr[1:], few))[1]

    def choose(self, pairs: Tensor) -> tuple[AttentionGraph, Tensor]:
        """The graph of the keys of pairs, by their numbers or a mask, and of those of the block of the query up to the query.

        Also returns for each edge the number of its pair or, in the block of the query, the number of all pairs plus its row.
        """
        tokens = self.tokens
        row = torch.cat([self.row[pairs], torch.arange(len(self.own_block))])
        start = tokens.key_ptr[tokens.query_sequence].repeat(tokens.heads)[row]
        first = start + SIZE * torch.cat([self.position[pairs], self.own_block])
        last = start + tokens.query_position.repeat(tokens.heads)[row]
        graph = graph_of_ranges(tokens, row, first, torch.minimum(first + SIZE, last + 1))
        row, block = graph.edge_row, tokens.key_position[graph.col] // SIZE
        return graph, torch.where(block == self.own_block[row], len(self.row) + row, self.pairs.rowptr[row] + block)


class Dash(GraphSource):
    """DashAttention: 1.5-entmax over the earlier blocks chooses blocks, and is the prior of the softmax over their keys.

    A block is the mean of its keys, weighted by their softmax with a learned query of the head. A weight of entmax is divided by the
    geometric mean of those of its query, since the block of the query has the prior 1. Scores have a factor that moves in training until
    graphs have their density, a share of the pairs beyond self-loops.

    Reference: Huang et al., "DashAttention: Differentiable and Adaptive Sparse Hierarchical Attention", 2605.18753, and its code, where
    the user sets the factor, and the logarithm of the prior is divided by a large number.
    """

    estimator = Prior()
    head_dims: ClassVar[dict[str, int]] = {"summary": 0}

    def __init__(self, channels: int, heads: int, density: float) -> None:
        super().__init__()
        self.density = density
        self.summary = nn.Parameter(torch.randn(heads, channels))
        self.log_factor: Tensor
        self.register_buffer("log_factor", torch.zeros(()))

    def forward(self, tokens: Tokens) -> Choice:
        blocks, scale = Blocks(tokens), tokens.query.size(2) ** -0.5
        weight = softmax((tokens.key @ self.summary[..., None]).squeeze(2).T * scale, blocks.of_key).T
        mean = tokens.key.new_zeros(tokens.heads, blocks.count, tokens.key.size(2)).index_add(
            1, blocks.of_key, weight[..., None] * tokens.key
        )
        score = ops.edge_dot(tokens.query, mean, blocks.pairs.rows)
        share = ops.segment_entmax(score * scale * self.log_factor.exp(), ptr=blocks.pairs.rowptr)
        is_kept = share > 0
        log_share = share.clamp(min=LEAST_PRIOR).log()
        none = score.new_zeros(len(blocks.own_block))
        count = none.index_add(0, blocks.row, is_kept.to(score)).clamp(min=1)
        log_mean = none.index_add(0, blocks.row, log_share * is_kept) / count
        graph, part = blocks.choose(is_kept)
        log_prior = torch.cat([log_share - log_mean[blocks.row], none])[part]
        if self.training and len(blocks.row):
            target = max(LEAST_BLOCKS, room(tokens, self.density))
            self.log_factor += RATE * (is_kept.sum() / (blocks.row.diff().count_nonzero() + 1) / target).log()
        return Choice(graph, EdgePrior(graph, log_prior), independent=False)


class HSA(GraphSource):
    """Hierarchical sparse attention: softmax within each chosen block, and softmax over their retrieval scores between them.

    Retrieval scores are the products of a projected query and the projected mean of the keys of a block; the block of the query has a
    learned score. A query takes the earlier blocks with the largest scores, as many as its density, a share of the pairs beyond
    self-loops, has room for.

    Reference: Hu et al., "Random Long-Context Access for Mamba via Hardware-aligned Hierarchical Sparse Attention", 2504.16795, where an
    encoder makes landmarks of blocks, and recent tokens are a window of their own.
    """

    estimator = Prior()
    head_dims: ClassVar[dict[str, int]] = {"query": 0, "key": 0, "own": 0}

    def __init__(self, channels: int, heads: int, density: float) -> None:
        super().__init__()
        self.density = density
        self.query, self.key = (nn.Parameter(torch.randn(heads, channels, channels) * channels**-0.5) for _ in range(2))
        self.own_score = nn.Parameter(torch.zeros(heads))

    def forward(self, tokens: Tokens) -> Choice:
        blocks, scale = Blocks(tokens), tokens.query.size(2) ** -0.5
        landmark = block_means(tokens.key, tokens.key_ptr, SIZE)[0] @ self.key
        score = ops.edge_dot(tokens.query @ self.query, landmark, blocks.pairs.rows) * scale
        pairs = blocks.best(score, self.density)
        graph, part = blocks.choose(pairs)
        # softmax over the chosen blocks and the block of the query, whose row follows all pairs
        row = torch.arange(len(blocks.own_block))
        own_score = self.own_score.repeat_interleave(tokens.num_queries)
        shares = score.new_zeros(len(score) + len(row))
        chosen = torch.cat([pairs, len(score) + row])
        block_shares = softmax(torch.cat([score[pairs], own_score]), torch.cat([blocks.row[pairs], row]))
        shares = shares.index_put((chosen,), block_shares)
        # softmax within each block
        dot = ops.edge_dot(tokens.query, tokens.key, graph.rows) * scale
        most = torch.full_like(shares, -torch.inf).scatter_reduce(0, part, dot.detach(), "amax")[part]
        total = torch.zeros_like(shares).index_add(0, part, (dot - most).exp())[part]
        log_prior = shares[part].clamp(min=1e-20).log() - most - total.log()
        return Choice(graph, EdgePrior(graph, log_prior), independent=False)


class NSA(GraphSource):
    """The selection of native sparse attention: the blocks that attention over pooled keys looks at most.

    Pooled keys are means of two neighbors. A query attends to those up to its position, and each key gets the attention of both pooled
    keys that it is in. A query takes the earlier blocks of two keys with the largest sums, as many as its density, a share of the pairs
    beyond self-loops, has room for.

    Reference: Yuan et al., "Native Sparse Attention", 2502.11089, equations 7 to 12, where pooled keys, made by a perceptron, are also a
    branch of attention by which they learn, the first block and two recent ones are always chosen, and recent tokens are a window of
    their own.
    """

    def __init__(self, density: float) -> None:
        super().__init__()
        self.density = density

    @torch.no_grad()
    def forward(self, tokens: Tokens) -> Choice:
        blocks, all_pairs = Blocks(tokens), full(None, is_causal=True, heads=tokens.heads, ptr=tokens.query_ptr)
        place = tokens.key_position
        pooled = torch.where(place[:, None] > 0, (tokens.key + tokens.key.roll(1, 1)) / 2, tokens.key)
        score = ops.edge_dot(tokens.query, pooled, all_pairs.rows) * tokens.query.size(2) ** -0.5
        row, last = all_pairs.edge_row, place[all_pairs.col]  # position of the second of the two keys
        attention = softmax(score, row)
        block_score = attention.new_zeros(len(blocks.row))
        for key in (last, last - 1):
            early = (key >= 0) & (key // 2 < blocks.own_block[row])
            block_score.index_add_(0, (blocks.pairs.rowptr[row] + key // 2)[early], attention[early])
        return Choice(blocks.choose(blocks.best(block_score, self.density))[0])


class SAS(GraphSource):
    """Simple attention sparsification: the logarithm of a softmax over all earlier blocks is added to the scores of the chosen ones.

    Scores of blocks are products of a projected query and of the projected maximum, minimum and mean of the keys of a block, both
    normalized by their root mean square. Queries and keys get no gradient from them. The block of the query has the gate 1. A query takes
    the earlier blocks with the largest scores, as many as its density, a share of the pairs beyond self-loops, has room for. In evaluation
    chosen blocks have no gates.

    Reference: Li et al., "SAS: Simple Attention Sparsification via End-to-End Optimization of Context Ranking", 2609.13141, and its code,
    where queries and keys are rotated by their positions, and all but the router is frozen.
    """

    estimator = Prior()
    head_dims: ClassVar[dict[str, int]] = {"query": 0, "key": 0}

    def __init__(self, channels: int, heads: int, density: float) -> None:
        super().__init__()
        self.density = density
        self.query, self.key = (
            nn.Parameter(torch.empty(heads, channels, channels)),
            nn.Parameter(torch.empty(heads, 3 * channels, channels)),
        )
        for weight in (*self.query.data, *self.key.data):
            nn.init.xavier_uniform_(weight)
        self.query_norm, self.key_norm = nn.RMSNorm(channels, 1e-6), nn.RMSNorm(channels, 1e-6)

    def forward(self, tokens: Tokens) -> Choice:
        blocks, key = Blocks(tokens), tokens.key.detach()
        at = blocks.of_key[:, None].expand_as(key)
        empty = key.new_zeros(tokens.heads, blocks.count, key.size(2))
        pooled = [empty.scatter_reduce(1, at, key, kind, include_self=False) for kind in ("amax", "amin", "mean")]
        summary = self.key_norm(torch.cat(pooled, 2) @ self.key)
        query = self.query_norm(tokens.query.detach() @ self.query)
        score = ops.edge_dot(query, summary, blocks.pairs.rows) * key.size(2) ** -0.5
        pairs = blocks.best(score, self.density)
        graph, part = blocks.choose(pairs)
        if not self.training:
            return Choice(graph)
        log_gate = softmax(score, blocks.row).clamp(min=torch.finfo(score.dtype).tiny).log()
        log_prior = torch.cat([log_gate, log_gate.new_zeros(len(blocks.own_block))])[part]
        return Choice(graph, EdgePrior(graph, log_prior), independent=False)


class Loops(GraphSource):
    """Self-loops alone, for a layer that chooses its other edges by itself."""

    density = 1.0

    def forward(self, tokens: Tokens) -> Choice:
        return Choice(window(None, 0, is_causal=True, ptr=tokens.query_ptr))


class Spartan(AttentionConv):
    """SPARTAN: a gate of 0 or 1 on the weight of each pair, whose logit is the score of the pair plus a number.

    In training, logistic noise is added to the logits, and gates have the gradient of their sigmoid (straight through). The softmax is over
    all pairs, and gates come after it: a row does not sum to 1. The loss has a penalty on the mean probability of a gate beyond self-loops,
    whose gates are 1. The factor of the penalty rises while graphs have more edges than their density, a share of the pairs beyond
    self-loops, and falls while they have fewer. It takes the time of all pairs.

    In the twin, gates have no gradient and the loss no penalty. The number moves in place of the factor, so that graphs are the largest
    scores of attention as it comes.

    Reference: Draye et al., "Sparse Attention Post-Training for Mechanistic Interpretability", 2512.05865, and its code. There the
    constraint is a bound on the loss, and the number of edges is minimized; here all methods have the same number of edges. The rate
    of the factor and the number at the start are ours; the code leaves both to its user.
    """

    def __init__(self, channels: int, width: int, heads: int, learns: bool = True) -> None:
        super().__init__(channels, width, heads, Scheduled(Loops()), estimator="none", is_causal=True)
        self.learns = learns
        self.shift: Tensor
        self.log_factor: Tensor
        self.register_buffer("shift", torch.tensor(1.0))  # gates of pairs without a score are open at the start
        self.register_buffer("log_factor", torch.zeros(()))

    def _attend_over_edges(self, call: AttentionCall, *_: Any) -> tuple[Tensor, Any, AttentionCall]:
        ptr = call.choice.graph.query_ptr
        pairs = full(None, is_causal=True, heads=self.heads, ptr=ptr)
        score = ops.edge_dot(call.query, call.key, pairs.rows) * self.scale
        is_loop, logit = pairs.lag == 0, score + self.shift
        if self.training:
            random = torch.Generator().manual_seed(call.seed % 2**63)
            logit = logit + torch.rand(len(score), generator=random).to(score).clamp(1e-6, 1 - 1e-6).logit()
        is_open = (logit > 0) | is_loop
        gate = is_open.to(score)
        if self.learns:
            gate = gate + torch.where(is_loop, 0, logit.sigmoid() - logit.detach().sigmoid())
        weight = softmax(score, pairs.edge_row) * gate
        out = segment(weight[:, None] * call.value[pairs.edge_head, pairs.col], pairs.rowptr)
        out = out.view(self.heads, -1, out.size(1))
        if self.training:
            assert isinstance(self.source, Scheduled)
            assert self.source.target_density is not None
            share = (score + self.shift)[~is_loop].sigmoid()
            surplus = float((score + self.shift > 0)[~is_loop].double().mean()) / self.source.target_density - 1
            if self.learns:
                self.log_factor += RATE * min(surplus, 1.0)
                out = self.auxiliary_losses.add(out, self.log_factor.exp() * share.mean(), "SPARTAN")
            else:
                self.shift -= RATE * min(surplus, 1.0)
        return out.transpose(0, 1), None, replace(call, choice=Choice(pairs.select(is_open)))


class SharedIndex(AttentionConv):
    """IndexShare, or IndexCache: the indexer of the first layer chooses the keys of all layers.

    It reads the queries and keys of the first layer, and learns to imitate the mean attention of all layers. The divergence from a mean has
    the gradient of the mean of the divergences, so each layer adds its part.

    Reference: GLM-5.2, in which one indexer serves four layers, and Bai et al., "IndexCache: Accelerating Sparse Attention via Cross-Layer
    Index Reuse", 2603.12201, which trains an indexer in this way. Other settings are those of ``dsa``.
    """

    def __init__(self, channels: int, width: int, heads: int, density: float, layers: int) -> None:
        source = IndexerSource(Indexer(width, heads, 4, 16), target_density=density, detach=True, window=0)
        super().__init__(channels, width, heads, source, estimator=Imitate(1 / layers), is_causal=True)
        self.first: list[SharedIndex] = []  # the layer that chooses; empty in that layer
        self.chosen: tuple[Tokens, Choice] | None = None

    def follow(self, first: SharedIndex) -> None:
        """Take the choices of another layer."""
        self.first, self.source = [first], first.source

    def _choose(self, tokens: Tokens, query: Tensor, key: Tensor) -> Choice:
        if self.first:
            assert self.first[0].chosen is not None
            return self.first[0].chosen[1]
        choice = super()._choose(tokens, query, key)
        self.chosen = tokens, choice
        return choice

    def _choose_graph(self, *arguments: Any) -> AttentionCall:
        call = super()._choose_graph(*arguments)
        if not self.first:
            return call
        assert self.first[0].chosen is not None
        return replace(
            call, tokens=self.first[0].chosen[0]
        )  # of which the indexer predicts the attention of this layer


def room(tokens: Tokens, density: float) -> float:
    """Earlier blocks of a query that a density has room for, in the mean, in addition to its own."""
    length = int(tokens.query_ptr.diff().max())
    return (density * (length - 1) / 2 - (SIZE - 1) / 2) / SIZE


RIVALS: dict[str, Callable[..., GraphSource]] = {"dash": Dash, "hsa": HSA, "nsa": NSA, "sas": SAS}
"""Sources by the name of their method."""
LAYERS = ("spartan", "index-share")
"""Methods that are layers."""
