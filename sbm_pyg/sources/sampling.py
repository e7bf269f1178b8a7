"""Sampling graphs from stochastic block models: a function, a PyG transform and a source.

In: an :class:`~sbm_pyg.SBM`, PyG data that carry one, or queries and keys. Out: an :class:`~sbm_pyg.AttentionGraph`.
Not here: the sampling algorithms (``ops``) and gradients (``estimators``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from .. import ops
from ..graphs.blocks import BlockGraph, BlockPool, pool_blocks
from ..graphs.graph import AttentionGraph
from ..graphs.ragged import (
    Tokens,
    count_pairs,
    count_positions,
    draw_seed,
    resolve_ptr,
    resolve_sequence_ids,
    stored_ptr,
    trust_offsets,
)
from ..ops import checks, cpu, values
from ..ops.reference.density import MIN_MEAN_PROBABILITY
from ..ops.tiles import cut_blocks
from ..ops.values import can_read
from . import patterns
from .candidates import CandidateProbability, Candidates
from .dense import sample_rows
from .following import FollowingSource
from .interface import Choice, graph_without_edges
from .last_rows import LastRows, RowRule
from .learned import LearnedSource, factor_for_density
from .linear_sbm import LinearSBMHead
from .sbm import SBM, SBMHead, check_model, product_bound

if TYPE_CHECKING:
    from ..ops.cpu.memberships import KeyMemberships

__all__ = ["SBMGraph", "SBMSource", "sample_edges"]

MEMBERSHIPS_AT_ONCE = 1024
"""Keys of each sequence whose memberships are computed at once, where there is a cache without any."""
MOMENTUM = 0.1  # of the running mean of probabilities
MOST_LAG = 2.0  # factor by which the running mean may exceed the mean of the last batch
MIN_START_DENSITY, MAX_START_DENSITY = 5 * MIN_MEAN_PROBABILITY, 0.25
"""Smallest and largest part of the keys in each community at a start."""
FACTORS = ("query_membership", "key_membership", "block_matrix")
SAFE_IN_FLOAT32 = 2.0**60
"""If products of memberships may exceed this, float32 may underflow; the model is then rescaled in float64."""


def sample_edges(
    sbm: SBM,
    *,
    method: str = "bernoulli",
    exploration: float = 0.0,
    budget: float | None = None,
    clamp: bool = False,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    sequence_ids: Tensor | None = None,
    row_group: int = 1,
) -> AttentionGraph:
    r"""Sample a graph from a stochastic block model, exactly.

    With :math:`p_{ij} = Y_i S Z_j^\top`, all pairs are independent and an edge has probability

    * ``"bernoulli"``: :math:`\min(1, p_{ij} + \delta)`, the probabilities of the model;
    * ``"fastrg"``: :math:`1 - e^{-(p_{ij} + \delta)}`, as in the paper's Algorithm 1 with repeated edges counted once.
      It never exceeds 0.632 for :math:`p \le 1`, so it cannot produce full attention.

    Each query uses the cheapest of three methods: keys at geometric gaps, drawn with an upper bound of its
    probabilities and thinned to the exact ones; Poisson proposals by block and key, if that bound is loose; or one
    Bernoulli draw per key, if the row is dense anyway. Cost O((N + M) K + E (K + log M)) for rows of small
    probabilities; a row with a likely key, as most rows of trained models have, costs O(M K). ``row_group`` skips keys
    in these rows too. Memory O((N + M) K + E).
    Probabilities are resolved to :math:`2^{-32}`.

    Random words come from a counter-based generator (Philox4x32-10) keyed by seed, sequence, head and query. So the
    edges of a sequence depend neither on the number of threads nor on the other sequences of the batch.

    Memberships may be of any size as long as probabilities stay below :math:`2^{60}`. Values outside the safe range of
    float32 are rescaled by powers of two in float64, which does not change :math:`p_{ij}`. If the expected edges do not
    fit into the available memory, the function raises an error before sampling.

    Args:
        sbm: The model.
        method: ``"bernoulli"`` or ``"fastrg"``.
        exploration: :math:`\delta` in [0, 1], added to every probability. The paper uses 0.01 in training, which keeps
            the density above 0.01.
        budget: Largest expected number of keys per query and head, without exploration; see :meth:`SBM.limit`. None: no
            limit.
        clamp: Cut probabilities above 1 at 1. By default they are an error (``"bernoulli"`` only).
        seed: Integer of 64 bits that fixes the edges.
        generator: Generator to draw a seed from if ``seed`` is None. None: torch's default generator.
        sequence_ids: Number of each sequence, ``[B]`` int64 in ``0 .. 2**32-1``. None: its position in the batch. The
            random words depend on this number: with its number in the data set, a sequence gets the same edges in any
            batch. A model of heads f, f + 1, ... of a larger model draws the edges of the larger model with
            ``sequence_ids + (f << 32)``, where f is below ``2**24``.
        row_group: Number of consecutive queries of a sequence that share their draws in each head; 1, the default,
            draws all pairs independently. Above 1 each row keeps its exact distribution, but rows of one group depend
            on each other, so the graph is not a sample of the model: for layers, not for statistics. Rows whose largest
            probability is high then take a fraction of the time (``"bernoulli"`` only; docs/concepts.md).

    Returns:
        A graph over the tokens of the model, on its device; ``col`` is int32.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, a membership is negative or not finite, a probability exceeds 1, or
            memory does not hold the expected edges.

    Example:
        >>> sbm = SBM(torch.full((1, 1000, 1), 0.1), torch.ones(1, 1000, 1), torch.ones(1, 1, 1))
        >>> sample_edges(sbm, seed=0)
        AttentionGraph(1 sequence, 1 head, 1,000 queries, 1,000 keys, 1...,... edges, density 10.0%)

    Reference: Rohe et al., "A note on quickly sampling a sparse matrix with low rank expectation", JMLR 2018 (fastRG);
    the thinning that makes it exact is derived in docs/concepts.md.
    """
    if method not in ops.METHODS:
        raise ValueError(
            f"Expected 'method' to be one of {ops.METHODS} (got {method!r}). "
            "Use 'bernoulli' unless you compare with Algorithm 1."
        )
    check_model(sbm)
    checks.number("exploration", exploration, "[0, 1]", "The paper has 0.01 in training and 0 in evaluation.")
    checks.flag("clamp", clamp, "It says whether to cut probabilities at 1.")
    row_group = checks.row_group(row_group, method)
    sequence_ids = resolve_sequence_ids(sequence_ids, sbm.num_sequences, sbm.query_ptr.device)
    seed = draw_seed(seed, generator)
    checks.not_captured(sbm.query_ptr.device)
    if not torch.compiler.is_compiling() and 0 in (sbm.num_queries, sbm.num_keys):
        return graph_without_edges(sbm)
    with torch.no_grad():
        bound = product_bound(sbm)
        scaled = sbm if bound <= SAFE_IN_FLOAT32 else _widen(sbm, bound)
        scaled = scaled if budget is None else scaled.limit(budget)
        _check_memory(scaled, method, exploration)
        rate, key = (scaled.rate, scaled.key_membership) if bound <= SAFE_IN_FLOAT32 else _rescale(scaled)
        key = _shift_keys_by_one(key, sbm.key_ptr) if sbm.is_strict else key
        law = (seed, method, exploration, clamp, sbm.is_causal, row_group)
        rowptr, col = ops.schemas.sample_sbm(rate, key, sbm.query_ptr, sbm.key_ptr, sequence_ids, *law)
    sizes = (sbm.num_queries, sbm.num_keys, sbm.heads, sbm.query_ptr, sbm.key_ptr)
    graph = AttentionGraph._trusted(rowptr, col, *sizes, sbm.is_causal)
    if not sbm.is_strict:
        return graph
    first = count_positions(sbm.key_ptr, sbm.num_keys) == 0
    graph = graph.select(~first[graph.col.long()])  # only exploration draws them
    return graph._with(graph.rowptr, graph.col - 1, graph.heads)


def _shift_keys_by_one(key: Tensor, ptr: Tensor) -> Tensor:
    """Move each key one position later in its sequence, so that causal sampling excludes the key of the query itself.

    The first position of a sequence holds zeros.
    """
    return key.roll(1, 1).masked_fill((count_positions(ptr, key.size(1)) == 0)[:, None], 0)


def _pooled(tokens: Tokens, block_size: int, pool: torch.nn.Module | None = None) -> Tokens:
    """Pool blocks of queries and of keys into tokens with one vector each."""
    totals, ptrs = (tokens.num_queries, tokens.num_keys), (tokens.query_ptr, tokens.key_ptr)
    query_cut, key_cut = cut_blocks(totals, ptrs, block_size)
    query = pool_blocks(tokens.query, query_cut, pool, before=tokens.is_causal)
    key = pool_blocks(tokens.key, key_cut, pool)
    query_ptr, key_ptr = (trust_offsets(cut.ptr, cut.count) for cut in (query_cut, key_cut))
    return Tokens(query, key, query_ptr, key_ptr, tokens.bipartite, tokens.is_causal)


class SBMSource(LearnedSource, FollowingSource):
    """Predicts a stochastic block model from queries and keys, and samples the graph of each head from it.

    Args:
        head: Module from tokens to an SBM, such as :class:`~sbm_pyg.SBMHead`.
        method: Distribution of the graph, ``"bernoulli"`` or ``"fastrg"``; see :func:`sample_edges`.
        exploration: Added to every probability, in training only, in [0, 1]. None: the square of the target density
            (times ``candidates``), or 0 without one.
        budget: Largest expected number of sampled keys per query and head; None for no limit.
        target_density: Density that the pairs of each attention head compete for, in (0, 1]. 1 is dense attention;
            below it, probabilities are divided by their mean and multiplied by the target. The mean is a running mean
            over batches, so that rows do not depend on each other; its gradient is that of the mean of the row's own
            sequence. So parts of a batch get the graphs and gradients of the whole batch; see
            :func:`~sbm_pyg.sync_statistics` for several processes. Before the first update, each query is divided by
            its own mean, as in :meth:`SBM.with_density`. Probabilities are cut at 1, so graphs may have fewer edges.
            None: probabilities are those of the head.
        window: Each token always attends to tokens at this distance or less, in addition to its sampled keys. 0: each
            token attends to itself, so that no query is without a key. None: no edge is forced, as in the paper. If
            queries and keys are different tokens, as in cross attention, a window forces nothing.
        num_sinks: Number of first tokens of its sequence that each token also attends to, under the same condition.
        block_size: Tokens of a block, see :class:`~sbm_pyg.BlockGraph`. Above 1, the head gets one query and one key
            for each block, and edges join blocks: all tokens of a block attend to the same keys. Probabilities,
            exploration and target density are those of pairs of blocks; ``budget``, ``window`` and ``num_sinks`` count
            tokens, and the latter two are widened to whole blocks. In a causal model, the keys of a query block depend
            only on tokens up to its first one, and each block always attends to itself.
        pool: How the tokens of a block become one vector: ``"mean"``; ``"learned"``, a weighted mean with learned
            weights; or a module such as :class:`~sbm_pyg.BlockPool`.
        detach: Stop gradients from the model to queries and keys, which are then trained only through attention.
        candidates: Number of edges drawn per kept edge, at least 1. Of its drawn keys, each query keeps the keys with
            the largest dot products, one in ``candidates`` and at least one. With a target density, ``candidates``
            times as many edges are drawn, at most all pairs, and a query with few drawn keys keeps its part of the
            density. So the block model proposes keys, and the scores of attention choose among them. Above 1,
            probabilities are those of drawn edges, and estimators take gradients from the kept edges, as if no other
            key replaced a missing key. Not for blocks of tokens.
        row_group: Number of consecutive queries, or blocks of them, that share their draws; see :func:`sample_edges`.
            Each row keeps its distribution, and gradients of a loss that is a sum over queries stay exact. 1: all pairs
            are independent, as in the paper.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range.

    Example:
        >>> from sbm_pyg import SBMHead
        >>> source = SBMSource(SBMHead(8, heads=2, num_clusters=4), window=1)
        >>> choice = source(Tokens(torch.randn(2, 10, 8)))
        >>> choice.probability, int(choice.forced.sum())
        (SBM(1 sequence, 2 heads, 10 queries, 10 keys, 4 blocks), 56)
    """

    state_name = "running_mean"
    head_dims: ClassVar[dict[str, int]] = {"running_mean": 0, "seen": 1}
    has_head_budgets = True

    def __init__(
        self,
        head: torch.nn.Module,
        *,
        method: str = "bernoulli",
        exploration: float | None = None,
        budget: float | None = None,
        target_density: float | None = None,
        window: int | None = 0,
        num_sinks: int = 0,
        block_size: int = 1,
        pool: torch.nn.Module | str = "mean",
        detach: bool = False,
        candidates: float = 1.0,
        row_group: int = 1,
    ) -> None:
        super().__init__()
        checks.kind("head", head, torch.nn.Module, "a module such as SBMHead", "It makes an SBM.")
        checks.one_of("method", method, ops.METHODS)
        if exploration is not None:
            checks.number("exploration", exploration, "[0, 1]", "It is added to every probability in training.")
        _check_budget(budget)
        if pool == "learned":
            pool = BlockPool(head.channels, head.heads)  # type: ignore[arg-type]
        if pool != "mean" and not isinstance(pool, torch.nn.Module):
            raise ValueError(f"Expected 'pool' to be 'mean', 'learned' or a module (got {pool!r}). See `BlockPool`.")
        self.block_size = checks.integer("block_size", block_size, 1, "It is a number of tokens.")
        checks.flag("detach", detach, "It says whether the model sends no gradient to queries and keys.")
        self.detach = detach
        checks.number("candidates", candidates, "[1, inf)", "It is a number of drawn edges for each one that is kept.")
        way_out = "Scores are those of tokens: leave out one of the two."
        got = f"{candidates} with block_size={block_size}"
        checks.require(1 in (candidates, block_size), "candidates", "to be 1 with blocks of tokens", got, way_out)
        self.candidates = candidates
        self.row_group = checks.row_group(row_group, method)
        self.pool = pool if isinstance(pool, torch.nn.Module) else None
        self.head, self.method, self.exploration, self.budget = head, method, exploration, budget
        self.window, self.num_sinks = patterns.check_window(window), patterns.check_sinks(num_sinks)
        self.running_mean: Tensor
        self.target_density = target_density

    def _prepare(self) -> None:
        """Add the buffers of the running mean when a target density is set for the first time."""
        if self.target_density is not None and "running_mean" not in self._buffers:
            device = next((parameter.device for parameter in self.parameters()), None)
            heads = getattr(self.head, "heads", 1)
            self.register_buffer("running_mean", torch.zeros(heads, device=device))  # 0: no batch yet
            self._follow_by(torch.zeros(2, heads, device=device))  # expected edges, and pairs

    def reset_parameters(self) -> None:
        """Reset the parameters of the head and the running mean."""
        super().reset_parameters()
        if "running_mean" in self._buffers:
            for buffer in (self.running_mean, self.seen, self.last_seed):
                buffer.zero_()

    def start_from(self, query: Tensor, key: Tensor, *, scale: float, seed: int = 0) -> None:
        """Initialize the head from a trained layer if it has ``start_from``, as :class:`.LinearSBMHead` does."""
        start: Any = getattr(self.head, "start_from", None)
        if start is not None and self.block_size == 1:
            density = (self.target_density or MAX_START_DENSITY) * self._drawn
            density = min(max(density, MIN_START_DENSITY), MAX_START_DENSITY)
            start(query, key, scale=scale, density=density, seed=seed)

    @torch.no_grad()
    def settle(self, batches: Iterable[Tokens]) -> None:
        """Set the running mean so that graphs of these tokens reach the target density after p is cut at 1.

        The running mean is then below the mean probability, to which training moves it back. The cost is that of
        computing the probabilities of some rows of all pairs.
        """
        if self.target_density is None:
            return
        parts = []
        for tokens in batches:
            graph = sample_rows(tokens, 1.0, self.block_size).blocks
            parts.append((self._predict(tokens).on(graph).double(), graph.edge_head))
        p, head = (torch.cat(part) for part in zip(*parts, strict=True))
        density = self._drawn_densities
        assert density is not None
        density = density[:, 0].to(p) if isinstance(density, Tensor) else density
        factor = factor_for_density(p, head, self.running_mean.numel(), density)
        self.running_mean.copy_((density / factor).clamp(min=MIN_MEAN_PROBABILITY))
        self.seen.zero_()

    def predict(self, tokens: Tokens) -> SBM:
        """The block model of the tokens, or of their blocks, as the head predicts it.

        At a target density of 1 the prediction also updates the running mean.
        """
        sbm = self._predict(tokens)
        if self.target_density == 1 and self._counts:
            with torch.no_grad():
                self._note(self._scale_to_target_density(sbm, 1.0, tokens.seed)[1])
        return sbm

    def _predict(self, tokens: Tokens) -> SBM:
        if self.block_size == 1:
            sbm = self.head(tokens)
            sbm = sbm._of_all_tokens() if tokens.at_end else sbm
            return sbm.causal() if tokens.is_causal else sbm
        same = not tokens.bipartite and tokens.key_ptr.shape == tokens.query_ptr.shape
        if tokens.is_causal and (not same or getattr(self.head, "tied", False)):
            raise ValueError(
                "Expected the same tokens as queries and keys, and a head that is not tied, with 'is_causal' and "
                f"'block_size' above 1 (got block_size={self.block_size}). The queries of earlier tokens choose for a "
                "block; use block_size=1."
            )
        sbm = self.head(_pooled(tokens, self.block_size, self.pool))
        return sbm.strict() if tokens.is_causal else sbm

    def choose(self, tokens: Tokens) -> Choice:
        """Scale the model to the target density, sample its graph, and note its statistics."""
        values.require_unbatched(query=tokens.query, key=tokens.key)
        sbm, saw, density = self._predict(tokens), None, self._drawn_densities
        if density is not None:
            sbm, saw = self._scale_to_target_density(sbm, density, tokens.seed)
        choice = self._draw(sbm, tokens)
        if (
            saw is not None and self._counts and not tokens.at_end
        ):  # last, so that a failed call does not change the running mean
            self._note(saw)
        if self.block_size == 1:
            return choice
        ptrs, sizes = (tokens.query_ptr, tokens.key_ptr), (tokens.num_queries, tokens.num_keys)
        return choice._with(graph=BlockGraph._trusted_blocks(choice.graph, self.block_size, *ptrs, *sizes))

    @property
    def _drawn(self) -> float:
        """Number of edges to draw for each edge that is kept, limited by the number of pairs."""
        density = self.target_density
        return self.candidates if density is None else min(self.candidates, 1 / density)

    @property
    def _drawn_densities(self) -> float | Tensor | None:
        """Density of the drawn graphs before each query keeps its best edges, as :attr:`_densities`."""
        if self.target_density is None:
            return None
        densities = self._densities(self.running_mean.device)
        if isinstance(densities, Tensor):
            return (densities * self.candidates).clamp(max=1)
        return None if densities is None else densities * self._drawn

    def _draw(self, sbm: SBM, tokens: Tokens) -> Choice:
        """Sample the graph of a scaled model, keep the best edges of each query, and add forced edges."""
        drawn = self._drawn
        sbm = sbm if self.budget is None else sbm.limit(self.budget * drawn / self.block_size)
        exploration = self._exploration
        # probabilities exceed 1 only by a target density, or by rounding in low precision
        how: dict[str, Any] = {"method": self.method, "seed": tokens.seed, "sequence_ids": tokens.sequence_ids}
        graph = sample_edges(sbm, exploration=exploration, clamp=True, row_group=self.row_group, **how)
        if tokens.at_end:  # the model is over all tokens
            choice = Choice(graph._last_rows(tokens.query_ptr))
        else:
            choice = Choice(graph, sbm, exploration=exploration)
        if self.candidates > 1:
            choice = self._keep_best(choice, tokens, tokens.allowed_keys if tokens.at_end else sbm._allowed_keys())
        size = 0 if sbm.is_strict and self.window is None else self.window
        near, first = (None if count is None else -(-count // self.block_size) for count in (size, self.num_sinks))
        return patterns.with_forced(choice, near, first or 0, tokens)

    @torch.no_grad()
    def _draw_last_rows(
        self, query: Tensor, key: Tensor, last: LastRows, kept: KeyMemberships | None, seed: int
    ) -> tuple[Tensor, Tensor, KeyMemberships] | None:
        shares_draws = self.method == "bernoulli" and self.row_group > 1 and self.block_size == 1
        by_token = type(self.head) in (SBMHead, LinearSBMHead) and not getattr(self.head, "tied", False)
        if not shares_draws or not by_token or self.training or self.budget is not None or self.target_density == 1:
            return None
        if not cpu.INSTALLED or query.device.type != "cpu" or last.places is None:
            return None
        density, factor = self._drawn_densities, None
        if density is not None:
            state = (self.target_density, self.running_mean._version, id(self.running_mean), id(self.head_budgets))
            factor = None if kept is None or kept.factor is None or kept.factor[0] != state else kept.factor
            if factor is None:
                mean = self.running_mean.clamp(min=MIN_MEAN_PROBABILITY)
                has_mean = None if float(self.running_mean.min()) > 0 else self.running_mean[:, None] > 0
                factor = (state, torch.as_tensor(density).to(mean) / mean[:, None], has_mean)

        # Compute the memberships of new tokens, and of keys that are not kept.
        batch, heads, length, _ = query.shape
        queries = query.transpose(0, 1).flatten(1, 2)  # [H, B*L, C]
        query_ptr = torch.tensor([0, queries.size(1)])
        for start in range(0 if kept is None else kept.count, last.keys, MEMBERSHIPS_AT_ONCE):
            new = key[:, :, start : min(start + MEMBERSHIPS_AT_ONCE, last.keys)]
            new = new[:, :, None].expand(-1, -1, heads // key.size(1), -1, -1).flatten(1, 2)
            new = new.transpose(0, 1).flatten(1, 2)  # [H, B*n, C]
            key_ptr = query_ptr if new.size(1) == queries.size(1) else torch.tensor([0, new.size(1)])
            sbm = self.head(Tokens._trusted(queries, new, query_ptr, key_ptr, True, False, seed, None))
            if kept is None:
                from ..ops.cpu.memberships import KeyMemberships  # which needs numba

                kept = KeyMemberships(batch, heads, sbm.num_clusters)
            kept.append(sbm.key_membership)
        assert kept is not None  # there are new keys
        rate = sbm.rate.unflatten(1, (batch, length)).transpose(0, 1)  # [B, H, L, K]
        if factor is not None and density is not None:
            kept.factor, (_, scale, has_mean) = factor, factor  # [H, 1]
            if has_mean is not None:  # other queries are scaled by themselves
                degree = (rate.float() * kept.sums(*last.places)).sum(3)  # [B, H, L]
                allowed = last.by_head(last.allowed, heads).float()
                alone = (density * allowed).clamp(min=1)
                alone = alone / degree.maximum(MIN_MEAN_PROBABILITY * allowed.clamp(min=1))
                scale = torch.where(has_mean, scale, alone)
            rate = (rate * scale[..., None]).to(rate.dtype)

        forced = (self.window, self.num_sinks) if self.candidates == 1 else (None, 0)
        rowptr, col = kept.draw(rate, *last.places, seed, self.row_group, *forced)
        if self.candidates > 1:
            rows, keys = query.reshape(key.size(0) * key.size(1), -1, query.size(3)), key.flatten(0, 1)
            score = ops.schemas.edge_dot(rows, keys, rowptr, col)
            count = self._number_kept(rowptr.diff().view(batch, heads, length), last.by_head(last.allowed, heads))
            rowptr, edge = ops.schemas.segment_top_k(score, rowptr, count.flatten())
            col = col[edge]
            if self.window is not None or self.num_sinks:
                near = last.choose(RowRule(None, None, None, self.window, self.num_sinks), heads)
                rowptr, col = ops.schemas.union_rows(rowptr, col, *near, last.keys)[:2]
        return rowptr, col, kept

    def _keep_best(self, choice: Choice, tokens: Tokens, allowed: Tensor) -> Choice:
        """Keep the drawn edges of each query with the largest dot products, one in ``candidates``.

        Args:
            allowed: Number of pairs of each query that might have been drawn, ``[N]``.
        """
        graph = choice.graph
        with torch.no_grad():
            score = ops.schemas.edge_dot(tokens.query, tokens.key, graph.rowptr, graph.col)
        count = self._number_kept(graph.degree, allowed)
        rowptr, edge = ops.schemas.segment_top_k(score, graph.rowptr, count.flatten())
        return choice._with(graph=graph._with(rowptr, graph.col[edge], graph.heads))

    def _number_kept(self, degree: Tensor, allowed: Tensor) -> Tensor:
        """Number of edges that queries keep, given the numbers of drawn edges ``[..., H, N]`` and of allowed pairs."""
        densities = self._densities(degree.device)
        drawn = (1 / densities).clamp(max=self.candidates) if isinstance(densities, Tensor) else self._drawn
        count = degree.to(checks.widest(degree.device)) / drawn
        count = count if densities is None else count.maximum(densities * allowed)
        return count.round().clamp(min=1).long()

    def _select_among(self, probability: CandidateProbability, candidates: Candidates, tokens: Tokens) -> Choice:
        choice = super()._select_among(probability, candidates, tokens)
        return self._keep_best(choice, tokens, candidates.graph.degree[0]) if self._drawn > 1 else choice

    def _scale_to_target_density(self, sbm: SBM, density: float | Tensor, seed: int) -> tuple[SBM, Tensor]:
        """Scale the model so that, by the running mean of each head, its mean probability is ``density``.

        Also returns the numbers of expected edges before scaling and of pairs, for each head, ``[2, H]``, without
        sequences that are not finite.
        """
        if self.running_mean.numel() != sbm.heads:
            raise ValueError(
                f"Expected 'head' with an attribute `heads` that counts those of its models, {sbm.heads} "
                f"(got {self.running_mean.numel()}). With a target density, each has a running mean."
            )
        running = self._state_for(seed)
        return sbm._scale_to_density(density, running if self.training else running.clone())  # which may move later

    def _moved(self, state: Tensor, seen: Tensor, counts: Tensor) -> Tensor:
        """The running mean after one step towards the mean of a batch; the first step sets it to that mean.

        A limit relative to the batch keeps a source from losing its edges if its probabilities fall fast.
        """
        mean = (seen[0] / seen[1]).clamp(min=MIN_MEAN_PROBABILITY).to(state.dtype)  # NaN without pairs
        moved = torch.where(state > 0, state.lerp(mean, MOMENTUM), mean).minimum(mean * MOST_LAG)
        return torch.where((seen[1] > 0).logical_and_(counts), moved, state)

    def extra_repr(self) -> str:
        parts = {"method": self.method, "exploration": self.exploration, "budget": self.budget}
        parts |= {"target_density": self.target_density, "window": self.window}
        parts |= {"num_sinks": self.num_sinks} if self.num_sinks else {}
        parts |= {"block_size": self.block_size} if self.block_size > 1 else {}
        parts |= {"detach": True} if self.detach else {}
        parts |= {"candidates": self.candidates} if self.candidates > 1 else {}
        parts |= {"row_group": self.row_group} if self.row_group > 1 else {}
        return ", ".join(f"{name}={value!r}" for name, value in parts.items())


def _widen(sbm: SBM, bound: float) -> SBM:
    """The model in float64."""
    if bound > 2.0**900:
        sizes = {name: float(getattr(sbm, name).max()) for name in FACTORS}
        name = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"Expected '{name}' of a size whose products float64 holds (got {sizes[name]:.4g}). "
            "Scale memberships and block matrix towards 1."
        )
    return replace(sbm, **{name: getattr(sbm, name).double() for name in FACTORS})


def _rescale(sbm: SBM) -> tuple[Tensor, Tensor]:
    """Scale rates and memberships of a float64 model into the range of the kernels, without changing their products.

    For each head, sequence and block, memberships are divided by the power of two that brings the largest key
    membership into [1/2, 1), and rates are multiplied by it.
    """
    keys, queries = (
        torch.repeat_interleave(ptr.diff(), output_size=count)
        for ptr, count in ((sbm.key_ptr, sbm.num_keys), (sbm.query_ptr, sbm.num_queries))
    )
    top = sbm.key_membership.new_zeros(sbm.heads, sbm.num_sequences, sbm.num_clusters)
    top = top.scatter_reduce(1, keys[None, :, None].expand_as(sbm.key_membership), sbm.key_membership, "amax")
    power = torch.where(top > 0, top / top.frexp().mantissa, 1)
    rate = sbm.rate * power[:, queries]
    most = float(rate.max())
    if most > SAFE_IN_FLOAT32:
        raise ValueError(
            f"Expected 'sbm' with probabilities below 2**60, even where they are cut at 1 (got up to {most:.4g}). "
            "Scale its block matrix."
        )
    return rate, sbm.key_membership / power[:, keys]


def _check_memory(sbm: SBM, method: str, exploration: float) -> None:
    """Raise ValueError if memory does not hold the expected edges. Reads values only if all pairs would not fit."""
    device = sbm.query_membership.device
    bytes_each = 9  # 4-byte indices in chunks and joined
    all_pairs = sbm.heads * sbm.num_queries * sbm.num_keys
    if checks.fits(all_pairs, bytes_each, device) or not can_read(sbm.query_membership):
        return
    pairs = sbm.heads * int(count_pairs(sbm.query_ptr, sbm.key_ptr, sbm.is_causal).sum())
    if checks.fits(pairs, bytes_each, device):
        return
    keys = sbm._allowed_keys().clamp(min=1)
    degree = sbm.expected_degree().to(checks.widest(device)) + exploration * keys
    # The mean of 1 - exp(-p) over the keys of a row is at most that of the mean p.
    degree = -keys * torch.expm1(-degree / keys) if method == "fastrg" else torch.minimum(degree, keys)
    expected = float(degree.sum())
    way_out = "Pass `budget=`, or take fewer heads or shorter sequences."
    checks.memory("sbm", min(int(expected + 6 * math.sqrt(expected)), pairs), bytes_each, device, way_out)


def _check_budget(budget: float | None) -> None:
    if budget is not None:
        checks.number("budget", budget, "(0, inf]", "It is an expected number of keys per query and head.")


def _offsets(target: Any, source: Any, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Offsets of the sequences of two stores; the same tensor twice if both stores are the same."""
    ptr, stored = resolve_ptr(queries, stored_ptr(target)), stored_ptr(source)
    same = keys == queries and (stored is None or torch.equal(ptr, stored))
    return ptr, ptr if same else resolve_ptr(keys, stored)


@functional_transform("sbm_graph")
class SBMGraph(BaseTransform):
    """Samples ``edge_index`` from the stochastic block model that a PyG data object carries.

    Its functional name is ``sbm_graph``. Nodes carry ``query_membership`` and ``key_membership``, ``[N, H, K]`` or
    ``[N, K]``, and the data object carries ``block_matrix``, ``[H, K, K]`` or ``[K, K]``. In ``HeteroData`` the targets
    of ``edge_type`` are the queries and its sources the keys. :meth:`AttentionGraph.replace_edges` writes the edges. To
    sample from features, use ``SourceGraph(SBMSource(head))``.

    Args:
        edge_type: ``(source, relation, target)`` to fill in ``HeteroData``.
        is_causal: No query attends to a later key.
        block_size: Tokens of a block, see :class:`~sbm_pyg.BlockGraph`. Above 1, memberships are averaged over blocks,
            edges join all tokens of two blocks, and each block of a causal graph attends to itself.
        method, exploration, budget, clamp, seed: As :func:`sample_edges`. With a seed, equal data get equal edges;
            without one, each call draws a seed from torch's default generator.

    Raises:
        TypeError: An argument, or an attribute of the data object, has the wrong type.
        ValueError: The data object is a ``Batch``, or lacks an attribute or a kind of nodes, or shapes do not fit each
            other or the nodes.

    Example:
        >>> ones = torch.ones(5, 1)
        >>> data = Data(query_membership=ones, key_membership=ones, block_matrix=ones[:1])
        >>> SBMGraph(seed=0)(data).num_edges
        25
    """

    def __init__(
        self,
        *,
        edge_type: tuple[str, str, str] = ("key", "to", "query"),
        method: str = "bernoulli",
        exploration: float = 0.0,
        budget: float | None = None,
        clamp: bool = False,
        is_causal: bool = False,
        block_size: int = 1,
        seed: int | None = None,
    ) -> None:
        three = isinstance(edge_type, tuple | list) and len(edge_type) == 3
        is_valid = three and all(isinstance(name, str) for name in edge_type)
        what, way_out = "to be (source, relation, target), three names", "Leave it out for Data."
        checks.require(is_valid, "edge_type", what, repr(edge_type), way_out, TypeError)
        checks.flag("is_causal", is_causal, "It says whether later keys are left out.")
        _check_budget(budget)
        self.is_causal = is_causal
        self.block_size = checks.integer("block_size", block_size, 1, "It is a number of tokens.")
        self.edge_type = cast(tuple[str, str, str], tuple(edge_type))
        self.method, self.exploration, self.budget, self.clamp, self.seed = method, exploration, budget, clamp, seed

    def forward(self, data: Data | HeteroData) -> Data | HeteroData:
        checks.kind("data", data, Data | HeteroData, "Data or HeteroData", "Edges of an SBM come from `sample_edges`.")
        hetero = isinstance(data, HeteroData)
        if hetero and not {self.edge_type[0], self.edge_type[2]} <= {*data.node_types}:
            raise ValueError(
                f"Expected 'edge_type' to begin and end with a kind of nodes of the data, of {data.node_types} (got "
                f"{self.edge_type}). Pass `edge_type=(source, relation, target)`."
            )
        what = "to be single graphs"
        way_out = "Apply SBMGraph before batching, as a `pre_transform` or `transform` of the dataset."
        checks.require(not isinstance(data, Batch), "data", what, "a Batch, whose block matrices are stacked", way_out)
        target, source = (data[self.edge_type[2]], data[self.edge_type[0]]) if hetero else (data, data)
        query = _read(target, "query_membership", "[N, K] or [N, H, K]").transpose(0, 1)
        key = _read(source, "key_membership", "[N, K] or [N, H, K]").transpose(0, 1)
        block = _read(data, "block_matrix", "[K, K] or [H, K, K]", rows=False)
        sbm = SBM(query, key, block, *_offsets(target, source, query.size(1), key.size(1)))
        ptrs = sbm.query_ptr, sbm.key_ptr
        if self.block_size > 1:
            tokens = _pooled(Tokens(query, key, *ptrs, is_causal=self.is_causal), self.block_size)
            sbm = SBM(tokens.query, tokens.key, block, tokens.query_ptr, tokens.key_ptr)
        sbm = (sbm.strict() if self.block_size > 1 else sbm.causal()) if self.is_causal else sbm
        budget = None if self.budget is None else self.budget / self.block_size
        how: dict[str, Any] = {"method": self.method, "exploration": self.exploration, "clamp": self.clamp}
        graph = sample_edges(sbm, budget=budget, seed=self.seed, **how)
        if self.block_size > 1:
            if sbm.is_strict:
                graph |= patterns.window(None, 0, is_causal=True, ptr=sbm.query_ptr)
            graph = BlockGraph._trusted_blocks(graph, self.block_size, *ptrs, query.size(1), key.size(1))
        return graph.replace_edges(data, self.edge_type if hetero else None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(method={self.method!r}, exploration={self.exploration}, budget={self.budget})"


def _read(store: Any, name: str, shape: str, rows: bool = True) -> Tensor:
    """Read an attribute of a store, with a row for each node if ``rows``, and give it a dimension for heads."""
    value: Any = getattr(store, name, None)
    way_out = "Add it, or sample from features `x` by `SourceGraph(SBMSource(head))`."
    checks.require(value is not None, "data", f"to carry '{name}'", "none", way_out)
    checks.tensors(**{name: value})
    checks.floating(**{name: value})
    checks.require(value.dim() in (2, 3), name, f"to be {shape}", value.shape, "Nodes come first.")
    has_nodes = rows and any(key in store for key in ("num_nodes", "x", "pos", "batch"))  # else PyG guesses, from edges
    if has_nodes and value.size(0) != store.num_nodes:
        raise ValueError(
            f"Expected '{name}' to have a row for each of the {store.num_nodes} nodes (got {list(value.shape)}). "
            "Its edges join nodes by number."
        )
    result: Tensor = value.unsqueeze(1 if rows else 0) if value.dim() == 2 else value
    return result
