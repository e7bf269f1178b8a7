"""The device-aware ops: each is declared once, with one signature for all devices.

``torch.ops.sbm_pyg.*`` are the contracts. The functions here check their arguments, call them, and hold the docstrings.
The PyTorch dispatcher chooses the kernel: numba on the CPU, Triton on CUDA devices (:mod:`sbm_pyg.ops.cuda`), and plain
torch (:mod:`sbm_pyg.ops.reference`) on other devices and for ops without a kernel.

Graphs come as compressed rows over heads, :class:`Rows`. Symbols: N queries, M keys, E edges, H heads, C channels per
head, K blocks, B sequences. Ops are deterministic: random words come from a counter and the integer ``seed``. Outputs
are freshly allocated. Kernels may take subnormal numbers as zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks, schemas, values
from .reference import edges as reference_edges
from .reference.segments import Rows, allowed_keys

__all__ = [
    "Rows", "block_attention", "block_effect", "block_expectation", "block_weight", "edge_attention",
    "edge_cross_entropy", "edge_dot", "edge_effect", "edge_entmax", "edge_gate", "index_score", "index_top_k",
    "invalid_row", "local_expectation", "reach_dot", "sample_queries", "sample_sbm", "sample_systematic",
    "segment_entmax", "segment_top_k", "union_rows",
]  # fmt: skip

METHODS = ("bernoulli", "fastrg")
"""Names of the distributions of a sampled graph."""

_WEIGHT = "It is a factor of the gradient, 1 for all queries."
_CAUSAL = "It says whether queries attend to earlier keys, and their own, alone."


def _check_model(rate: Tensor | None, member: Tensor | None, chance: Tensor | None, query: Tensor, key: Tensor) -> None:
    heads, num_queries, num_keys = *query.shape[:2], key.size(1)
    checks.shape("rate", rate, (heads, num_queries, None), "[H, N, K]", "It has the heads and tokens of 'query'.")
    num_blocks = None if rate is None else rate.size(-1)
    checks.shape("member", member, (heads, num_keys, num_blocks), "[H, M, K]", "It has the blocks of 'rate'.")
    checks.shape("chance", chance, (num_queries,), "[N]", "It holds one probability per query.")
    checks.same_device("query", query, rate=rate, member=member, chance=chance)
    checks.floating(rate=rate, member=member, chance=chance)


def _check_scores(scale: float, exploration: float = 0.0) -> None:
    checks.number("scale", scale, "(-inf, inf)", "It is a factor of the scores, usually C ** -0.5.")
    checks.number("exploration", exploration, "[0, 1]", "It is what was added to each probability.")


def _check_rows_tuple(rows: Any, name: str = "rows") -> None:
    checks.check_tuple(name, rows, "rowptr, col and a bias or None, as `ops.Rows`", 3)


def _without_bias(rows: Rows) -> tuple[Tensor, Tensor]:
    """Offsets and keys of rows for an op that takes no bias; raise ValueError if there is one."""
    _check_rows_tuple(rows)
    if rows[2] is not None:
        raise ValueError(
            f"Expected 'rows' without a bias (got {type(rows[2]).__name__}). This op adds none: pass "
            "`rows._replace(bias=None)`."
        )
    return rows[0], rows[1]


def edge_dot(query: Tensor, key: Tensor, rows: Rows) -> Tensor:
    """Dot product of the two ends of each edge: ``out[e] = <query[h, i], key[h, j]>``.

    Cost O(E K) in time, O(E) in memory. Differentiable in ``query`` and ``key``.

    Args:
        query: One vector per head and query, ``[H, N, K]``.
        key: One vector per head and key, ``[H, M, K]``.
        rows: The edges, without a bias. As in all ops, only shapes are checked: :class:`sbm_pyg.AttentionGraph` checks
            values.

    Returns:
        ``[E]`` in the dtype of ``query``.

    Raises:
        NotImplementedError: A tensor carries a forward-mode tangent, as under :func:`torch.func.jvp`; so do the other
            ops.
        TypeError, ValueError: Shapes or types do not fit.
    """
    rowptr, col = _without_bias(rows)
    checks.edge_rows(rowptr, col, query, key=key)
    return schemas.edge_dot(query, key, rowptr, col)


def reach_dot(
    query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, is_causal: bool = False, is_strict: bool = False
) -> Tensor:
    r"""Dot product of each query with the sum of the keys that it may attend to.

    It is the sum of :func:`edge_dot` over all pairs that are allowed. For a block model it is the expected number of
    edges of each row. Cost O((N + M) K). Differentiable in ``query`` and ``key``.

    Args:
        query: One vector per head and query, ``[H, N, K]``.
        key: One vector per head and key, ``[H, M, K]``.
        query_ptr: Offsets of the sequences in the queries, ``[B+1]`` int64.
        key_ptr: Offsets of the sequences in the keys, ``[B+1]`` int64.
        is_causal: Leave out keys at later positions than the query's.
        is_strict: With ``is_causal``, the key at the query's own position too.

    Returns:
        ``[H, N]``, in float32 or better.

    Raises:
        TypeError, ValueError: Shapes or types do not fit, or ``is_strict`` comes without ``is_causal``.
    """
    checks.tensors(query=query, key=key)
    checks.shape("query", query, (None, None, None), "[H, N, K]", "Heads come first.")
    checks.shape("key", key, (query.size(0), None, query.size(2)), "[H, M, K]", "It has heads and blocks of 'query'.")
    checks.floating(query=query, key=key)
    _check_ptr(query_ptr, key_ptr, query.size(1), key.size(1))
    checks.same_device("query", query, key=key, query_ptr=query_ptr, key_ptr=key_ptr)
    checks.flag("is_causal", is_causal, _CAUSAL)
    checks.flag("is_strict", is_strict, "It says whether the key at the position of the query is left out.")
    if is_strict and not is_causal:
        raise ValueError("Expected 'is_strict' with 'is_causal' (got it alone). Pass is_causal=True.")
    return schemas.reach_dot(query, key, query_ptr, key_ptr, is_causal, is_strict)


def index_score(query: Tensor, weight: Tensor, key: Tensor, rows: Rows) -> Tensor:
    """Score of each edge, ``[E]``, by a lightning indexer, as in :func:`index_top_k`.

    Cost O(E S D) in time, O(E) in memory. Differentiable in ``query``, ``weight`` and ``key``.

    Args:
        query: Small queries of S heads, ``[H, N, S, D]``.
        weight: Weights of the small heads, ``[H, N, S]``.
        key: Small keys, ``[H, M, D]``.
        rows: The edges, without a bias.

    Returns:
        ``[E]`` in the dtype of ``query``.

    Raises:
        TypeError, ValueError: Shapes or types do not fit.
    """
    rowptr, col = _without_bias(rows)
    checks.tensors(weight=weight)
    _check_small(query, weight, key)
    checks.edge_rows(rowptr, col, query[:, :, 0], key=key)
    return schemas.index_score(query, weight, key, rowptr, col)


def edge_cross_entropy(query: Tensor, key: Tensor, log_p: Tensor, rows: Rows, scale: float = 1.0) -> Tensor:
    r"""Cross-entropy of each query between its attention weights and probabilities of its edges.

    With the attention weights :math:`P_{ij}` over the edges as constants, it is

    .. math:: - \sum_j P_{ij} \log \frac{p_{ij}}{\sum_{j'} p_{ij'}} .

    Edges of probability 0 add nothing, and neither do queries without edges. Cost O(E C) in time and O(E) in memory;
    the gradient costs O(E).

    Args:
        query: ``[H, N, C]``; it gets no gradient.
        key: ``[H, M, C]``; it gets no gradient.
        log_p: Logarithms of the probabilities, up to a number that is the same in a row, ``[E]``. Differentiable.
        rows: The edges, and a bias of their scores or None.
        scale: Factor of the scores.

    Returns:
        ``[H, N]``, in float32 or better.

    Raises:
        TypeError, ValueError: Shapes or types do not fit.
    """
    _check_rows_tuple(rows)
    rowptr, col, bias = rows
    checks.tensors(log_p=log_p)
    checks.edge_rows(rowptr, col, query, key=key, log_p=log_p, bias=bias)
    _check_scores(scale)
    return schemas.edge_cross_entropy(query, key, log_p, rowptr, col, bias, scale)[0]


def _check_small(query: Tensor, weight: Tensor | None, key: Tensor) -> None:
    """Check what small heads score with."""
    checks.tensors(query=query, key=key)
    checks.floating(query=query, weight=weight, key=key)
    checks.shape("query", query, (None, None, None, None), "[H, N, S, D]", "Heads come first.")
    heads, queries, small, channels = query.shape
    checks.shape("weight", weight, (heads, queries, small), "[H, N, S]", "It weighs the small heads.")
    checks.shape("key", key, (heads, None, channels), "[H, M, D]", "It has the channels of a small head.")
    if small < 1:
        raise ValueError(f"Expected 'query' of at least one small head (got {list(query.shape)}). They score.")
    checks.same_device("query", query, weight=weight, key=key)
    values.require_unbatched(query=query, weight=weight, key=key)


def index_top_k(
    query: Tensor, weight: Tensor | None, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, count: Tensor,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""The keys of the largest scores of each query, by the scores of a lightning indexer.

    .. math:: I_{ij} = \sum_{s=1}^{S} w_{is} \, \mathrm{ReLU}(\langle q_{is}, k_j \rangle)

    Without weights the scores are dot products, :math:`I_{ij} = \sum_s \langle q_{is}, k_j \rangle`. The lower key wins
    a tie, and a score that is NaN counts as infinity, so that NaN shows. No array of all pairs is stored. Cost
    O(H N M S D), and no gradient. Scores that are equal up to rounding may rank differently on another kind of device.

    Args:
        query: Small queries of S heads, ``[H, N, S, D]``.
        weight: Weights of the small heads, ``[H, N, S]``; None: dot products.
        key: Small keys, ``[H, M, D]``.
        query_ptr: Offsets of the sequences in the queries, ``[B+1]`` int64.
        key_ptr: Offsets of the sequences in the keys, ``[B+1]`` int64.
        count: Keys of each query, ``[N]`` int64, at least 1. A query with fewer keys takes all of them.
        is_causal: Leave out keys at later positions than the query's.

    Returns:
        ``rowptr`` [H*N+1] int64 and ``col`` [E] int32, sorted by (head, query, key). Beyond the CPU, ``col`` is int64
        where M does not fit.

    Raises:
        TypeError, ValueError: Shapes or types do not fit, a count is below 1, or memory does not hold the edges.

    Reference: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025, equations 1 and 2.
    """
    if weight is not None:
        checks.tensors(weight=weight)
    _check_small(query, weight, key)
    checks.tensors(count=count)
    heads, queries = query.shape[:2]
    _check_ptr(query_ptr, key_ptr, queries, key.size(1))
    checks.shape("count", count, (queries,), "[N]", "It is the number of keys of each query.")
    if count.dtype != torch.int64:
        raise TypeError(f"Expected 'count' to be int64 (got {count.dtype}). It counts keys.")
    checks.same_device("query", query, query_ptr=query_ptr, key_ptr=key_ptr, count=count)
    checks.flag("is_causal", is_causal, _CAUSAL)
    if values.can_read(count):
        if int(count.min()) < 1:
            raise ValueError(f"Expected 'count' to be at least 1 (got {int(count.min())}). Each query has a key.")
        edges = heads * int(torch.minimum(count, allowed_keys(query_ptr, key_ptr, queries, is_causal)).sum())
        checks.memory("count", edges, 8, query.device, "Choose fewer keys, or fewer sequences at once.")
    return schemas.index_top_k(query, weight, key, query_ptr, key_ptr, count, is_causal)


def edge_gate(rate: Tensor, member: Tensor, rows: Rows) -> Tensor:
    """Straight-through gate of each edge: ones, with the gradient of the edge probabilities.

    It is ``1 + (p - p.detach())`` with ``p = edge_dot(rate, member, ...)``. Cost O(E) forward, O(E K) backward.

    Args:
        rate: ``Y S``, ``[H, N, K]``.
        member: ``Z``, ``[H, M, K]``.
        rows: The edges, without a bias.

    Returns:
        Ones, ``[E]``.
    """
    rowptr, col = _without_bias(rows)
    checks.edge_rows(rowptr, col, rate, key=member, ends=("rate", "member"))
    return schemas.EdgeGate.apply(rate, member, rowptr, col)


def edge_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Rows,
    gate: Tensor | None = None,
    scale: float = 1.0,
    gate_form: str = "score",
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    r"""Softmax attention over the edges of each query.

    With :math:`s_e = \text{scale} \cdot \langle q_i, k_j \rangle`, gate :math:`a_e` and bias :math:`b_e` (1 and 0 if
    None), the weight is :math:`\exp(a_e s_e + b_e)` for ``gate_form="score"`` and :math:`a_e \exp(s_e + b_e)` for
    ``"weight"``; weights are normalised over each row and sum the values. There is no padding, so nothing is masked
    after the softmax. Cost O(E C); memory O(E + HNC).

    Args:
        query: ``[H, N, C]``.
        key: ``[H, M, C]``.
        value: ``[H, M, C']``.
        rows: The edges and their bias.
        gate: ``[E]``, positive for ``"weight"``. Straight-through estimators pass their gradient through it.
        scale: Factor of the scores, usually ``C ** -0.5``.
        gate_form: ``"score"`` or ``"weight"``: which of the two forms the gate takes.
        dropout: Probability in [0, 1) that a normalised weight is dropped; the others grow by ``1 / (1 - dropout)``.
            Which ones follows from the seed, the head and the numbers of query and key, and from no other edge.
        seed: Seed of the dropout, 64 bits.

    Returns:
        The output ``[H, N, C']`` (zeros for a query without edge_rows) and the log of each row's sum of weights, ``[H,
        N]``, float32 or better, ``-inf`` for a query without edges, without gradient.
    """
    rowptr, col, bias = _check_attention(query, key, value, rows, gate, scale, gate_form, dropout)
    more = (gate, bias, scale, gate_form, dropout, checks.seed(seed))
    return schemas.edge_attention(query, key, value, rowptr, col, *more)


def _check_attention(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, gate: Tensor | None, scale: float, gate_form: str,
    dropout: float,
) -> Rows:  # fmt: skip
    _check_rows_tuple(rows)
    rowptr, col, bias = rows
    checks.tensors(value=value)
    checks.edge_rows(rowptr, col, query, key=key, value=value, gate=gate, bias=bias)
    checks.one_of("gate_form", gate_form, ("score", "weight"))
    checks.number("dropout", dropout, "[0, 1)", "It is the probability that a weight is dropped.")
    _check_scores(scale)
    return rows


def edge_entmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Rows,
    gate: Tensor | None = None,
    scale: float = 1.0,
    gate_form: str = "score",
    dropout: float = 0.0,
    seed: int = 0,
    alpha: float | Tensor = 1.5,
) -> Tensor:
    r"""Attention over the edges of each query with alpha-entmax in place of softmax.

    Logits are those of :func:`edge_attention`, weights those of :func:`segment_entmax`. Most weights are 0. Edges with
    a positive weight, the support, are found first, without a gradient. The rest of the forward pass, and the whole
    backward pass, goes over the support alone. Cost O(E C + E' C') forward and O(E' (C + C')) backward, with E' the
    edges of the support.

    Args:
        query, key, value, rows, gate, scale, gate_form, dropout, seed: As :func:`edge_attention`.
        alpha: In (1, 4]: a number, or a tensor ``[]`` or ``[H]``, which gets its gradient.

    Returns:
        ``[H, N, C']``; zeros for a query without edges.

    Raises:
        TypeError, ValueError: Shapes or types do not fit, or an argument is out of range.

    Example:
        >>> query = key = value = torch.eye(2)[None]  # one head, two tokens
        >>> rows = Rows(torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1]))
        >>> edge_entmax(query, key, value, rows, scale=0.5, alpha=2.0)
        tensor([[[0.7500, 0.2500],
                 [0.2500, 0.7500]]])
    """
    rowptr, col, bias = _check_attention(query, key, value, rows, gate, scale, gate_form, dropout)
    seed, (heads, num_queries) = checks.seed(seed), query.shape[:2]
    alphas = _alphas(("query", query), alpha, (heads,), "[H]", "It is a scalar, or has one for each head.")
    alphas = alphas.repeat_interleave(num_queries)

    with torch.no_grad():
        score = schemas.edge_dot(query, key, rowptr, col)
        logit = reference_edges.apply_gate_and_bias(scale * score, gate, bias, gate_form)
        rowptr, index = schemas.entmax_support(logit, rowptr, alphas)
        score, col = score[index], col[index]
    gate, bias = (x if x is None else x[index] for x in (gate, bias))
    score = score + (schemas.EdgeGate.apply(query, key, rowptr, col) - 1)  # the same values, with their gradient
    logit = reference_edges.apply_gate_and_bias(scale * score, gate, bias, gate_form)
    weight = schemas.segment_entmax(logit[None], rowptr, alphas[None])[0]
    if dropout > 0:
        kept = reference_edges.dropout_mask(rowptr, col, heads, key.size(1), dropout, seed)
        weight = weight * kept.to(weight.dtype) / (1 - dropout)
    return schemas.EdgeSum.apply(weight, value, rowptr, col)


def edge_effect(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Rows,
    probes: Rows,
    scale: float = 1.0,
    rate: Tensor | None = None,
    member: Tensor | None = None,
    chance: Tensor | None = None,
    exploration: float = 0.0,
) -> tuple[Tensor, Tensor]:
    r"""The effect of each edge, and of each probe, on the loss.

    It is the difference between the loss with the edge and without it, given the other edges of the row. With
    :math:`w_{ij} = \exp(\text{scale} \cdot \langle q_i, k_j \rangle + b_{ij})`, gains :math:`g_{ij} = (\partial L /
    \partial o_i) \cdot v_j` and sums over the edges of row i other than j itself,

    .. math::
        \Delta_{ij} = \frac{w_{ij}}{w_{ij} + \sum w_{il}} \Big( g_{ij} - \frac{\sum w_{il} g_{il}}{\sum w_{il}} \Big) ,

    where the last fraction is 0 if there is no other edge. This is the loss with the edge less the loss without it:
    exactly so for a loss that is linear in the output, to first order for any other. No sum is ever subtracted from one
    that it dominates.

    With ``rate``, ``member`` and ``chance``, each effect is multiplied by its weight in an estimate of :math:`\partial
    L / \partial p`. There the graph was sampled with :math:`p_{ij} = \langle \text{rate}_i, \text{member}_j \rangle +
    \delta`, and probes were drawn with probability :math:`\eta_i`. With :math:`p` cut at 1/2 and :math:`d = \max(p +
    \eta - p \eta, 2 p)`, the weight is :math:`1 / d` for an edge and :math:`(d - p) / (d \, (1 - p) \, \eta)` for a
    probe. It is :math:`1 / p` where :math:`\eta = 0`, and 0 where :math:`p > 1`.
    :func:`sbm_pyg.gradients.attach_local_expectation` says why. Cost O((E + E') (C + K)).

    Args:
        grad_out: Gradient of the loss to the attention's output, ``[H, N, C']``.
        query: ``[H, N, C]``.
        key: ``[H, M, C]``.
        value: ``[H, M, C']``.
        rows: The edges of the graph and their bias.
        probes: Pairs to try, E' of them, ascending within rows and without repeats, and their bias.
        scale: Factor of the scores.
        rate: ``Y S``, ``[H, N, K]``, or None.
        member: ``Z``, ``[H, M, K]``, or None.
        chance: Probability :math:`\eta` with which each key of a query is a probe, ``[N]``, or None.
        exploration: :math:`\delta`, what was added to each probability.

    Returns:
        ``[E]`` and ``[E']`` in the dtype of ``query``; 0 for a probe that is an edge already.
    """
    _check_rows_tuple(rows)
    _check_rows_tuple(probes, "probes")
    checks.tensors(value=value, grad_out=grad_out)
    checks.edge_rows(*rows[:2], query, key=key, value=value, bias=rows[2])
    checks.edge_rows(*probes[:2], query, key=key, prefix="probe_", probe_bias=probes[2])
    checks.floating(grad_out=grad_out)
    _check_scores(scale, exploration)
    checks.shape("grad_out", grad_out, (*query.shape[:2], value.size(2)), "[H, N, C']", "It has the output's shape.")
    if len({x is None for x in (rate, member, chance)}) > 1:
        raise ValueError("Expected 'rate', 'member' and 'chance' together (got some of them). Give all three, or none.")
    _check_model(rate, member, chance, query, key)
    return schemas.edge_effect(grad_out, query, key, value, *rows, *probes, scale, rate, member, chance, exploration)


def local_expectation(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Rows,
    probes: Rows,
    chance: Tensor,
    forced: Tensor | None = None,
    scale: float = 1.0,
    exploration: float = 0.0,
    *,
    factors: tuple[Tensor, Tensor] | None = None,
    prob: tuple[Tensor, Tensor] | None = None,
    weight: float = 1.0,
) -> Tensor:
    """The local expectation gradient: the output of attention unchanged, with a gradient to edge probabilities.

    In the backward pass, the probability of each edge and of each probe receives its :func:`edge_effect`, multiplied by
    its weight. Forward costs nothing. Backward costs O((E + E') (C + K)), without the K where probabilities are given.

    Args:
        out: Output of :func:`edge_attention` over the graph, ``[H, N, C']``.
        query, key, value: Those of the attention; they get no gradient from here.
        rows: The edges of the graph and their bias.
        probes: The pairs that are tried and their bias. A probe that is an edge counts once, as an edge.
        chance: Probability with which each key of a query is a probe, ``[N]``.
        forced: Edges that do not depend on p, ``[E]`` bool, or None; they send no gradient.
        scale: Factor of the scores.
        exploration: What was added to each probability when the graph was sampled.
        factors: ``rate`` ``[H, N, K]`` and ``member`` ``[H, M, K]``, whose dot products are the probabilities.
        prob: Instead of them, the probabilities of edges ``[E]`` and of probes ``[E']``.
        weight: Factor of the gradient.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: Shapes or types do not fit, or neither or both of ``factors`` and ``prob`` came.
    """
    _check_rows_tuple(rows)
    _check_rows_tuple(probes, "probes")
    if (factors is None) == (prob is None):
        raise ValueError(
            f"Expected one of 'factors' and 'prob' (got {'neither' if prob is None else 'both'}). Pass one pair."
        )
    for name, pair in (("factors", factors), ("prob", prob)):
        if pair is not None:
            checks.check_tuple(name, pair, "two tensors", 2)
    rate, member = factors or (None, None)
    edge_prob, probe_prob = prob or (None, None)
    checks.tensors(out=out, value=value, chance=chance)
    if factors is not None:
        checks.tensors(rate=rate, member=member)
    if prob is not None:
        checks.tensors(prob=edge_prob, probe_prob=probe_prob)
    checks.edge_rows(*rows[:2], query, key=key, value=value, bias=rows[2], prob=edge_prob)
    checks.edge_rows(*probes[:2], query, key=key, prefix="probe_", probe_bias=probes[2], probe_prob=probe_prob)
    checks.forced(forced, rows[1])
    checks.floating(out=out)
    _check_scores(scale, exploration)
    checks.number("weight", weight, "(-inf, inf)", _WEIGHT)
    checks.shape("out", out, (*query.shape[:2], value.size(2)), "[H, N, C']", "It is the output of the attention.")
    _check_model(rate, member, chance, query, key)
    probabilities = (rate, member, edge_prob, probe_prob)
    constants = (
        x if x is None or not x.is_floating_point() else x.detach()
        for x in (query, key, value, *rows, *probes, chance, forced)
    )
    tokens = (None, None, None, False)  # no blocks
    return schemas.Expectation.apply(out, *probabilities, *constants, *tokens, scale, exploration, weight)


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Rows,
    ptrs: tuple[Tensor, Tensor],
    block_size: int,
    is_causal: bool = False,
    scale: float = 1.0,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    r"""Softmax attention of blocks of queries over blocks of keys: :func:`edge_attention` where edges come in blocks.

    Each sequence is cut into blocks of ``block_size`` tokens from its beginning; its last block may be shorter. Cost
    O(E block_size^2 C), on the CPU with a block size rounded up to a multiple of 16; memory O(HNC).

    Args:
        query, key, value: ``[H, N, C]``, ``[H, M, C]``, ``[H, M, C']``, as in :func:`edge_attention`.
        rows: Offsets of the rows, one for each head and query block, ``[H*n+1]``; the key block of each edge,
            ascending in each row; and a bias ``[E, block_size, block_size]``. Blocks count through all sequences, and
            an edge stays in its sequence. As in all ops, values are not checked: :class:`sbm_pyg.BlockGraph` is valid.
        ptrs: Offsets of the sequences in the queries and in the keys, ``[B+1]`` int64 each.
        block_size: Tokens of a block, at least 1.
        is_causal: No token attends to a later one. No edge may lead to a later block; a block meets itself in part.
        scale: Factor of the scores.
        dropout, seed: As :func:`edge_attention`, which drops the same pairs.

    Returns:
        The output ``[H, N, C']`` (zeros for a query without edge_rows), and the log of each row's sum of weights, ``[H,
        N]``, float32 or better, ``-inf`` for a query without edges, without gradient.

    Raises:
        TypeError, ValueError: Shapes or types do not fit, or an argument is out of range.
    """
    checks.tensors(value=value)
    layout = _check_blocks(query, key, value, rows, None, ptrs, block_size, is_causal, scale)
    checks.number("dropout", dropout, "[0, 1)", "It is the probability that a weight is dropped.")
    more = (is_causal, rows[2], scale, dropout, checks.seed(seed))
    return schemas.block_attention(query, key, value, *rows[:2], *layout, *more)


def _check_blocks(
    query: Tensor, key: Tensor, value: Tensor | None, rows: Rows, probes: Rows | None, ptrs: tuple[Tensor, Tensor],
    block_size: int, is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, int]:  # fmt: skip
    """Refuse what does not fit together; return the offsets of both sides and the block size."""
    _check_rows_tuple(rows)
    if probes is not None:
        _check_rows_tuple(probes, "probes")
    layout: Any = (query, key, ptrs, block_size, is_causal, scale)
    found = checks.block_rows(*rows[:2], *layout, value=value, bias=rows[2])
    if probes is not None:
        checks.block_rows(*probes[:2], *layout, prefix="probe_", probe_bias=probes[2])
    return found


def block_effect(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Rows,
    probes: Rows,
    ptrs: tuple[Tensor, Tensor],
    block_size: int,
    is_causal: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    r"""The effect of each edge of blocks, and of each probe, on the loss: :func:`edge_effect`, summed over its queries.

    For one query a block of keys J is one edge, with weight :math:`W_{iJ} = \sum_{j \in J} w_{ij}` and as gain the mean
    of its gains by their weights. So the effect of the pair of blocks (I, J) is

    .. math::
        \Delta_{IJ} = \sum_{i \in I} \frac{W_{iJ}}{W_{iJ} + \sum W_{iL}} \Big( G_{iJ} - \frac{\sum W_{iL} G_{iL}}
        {\sum W_{iL}} \Big) ,

    with sums over the other blocks L of the row. Cost that of :func:`block_attention` over both.

    Args:
        grad_out: Gradient of the loss to the attention's output, ``[H, N, C']``.
        query, key, value: Of the attention.
        rows: The edges of blocks and their bias.
        probes: Pairs of blocks to try and their bias.
        ptrs, block_size, is_causal, scale: As :func:`block_attention`.

    Returns:
        ``[E]`` and ``[E']``; 0 for a probe that is an edge already.

    Raises:
        TypeError, ValueError: Shapes or types do not fit, or an argument is out of range.
    """
    checks.tensors(value=value, grad_out=grad_out)
    layout = _check_blocks(query, key, value, rows, probes, ptrs, block_size, is_causal, scale)
    checks.floating(grad_out=grad_out)
    checks.shape("grad_out", grad_out, (*query.shape[:2], value.size(2)), "[H, N, C']", "It has the output's shape.")
    return schemas.block_effect(grad_out, query, key, value, *rows, *probes, *layout, is_causal, scale)


def block_weight(
    query: Tensor,
    key: Tensor,
    rows: Rows,
    ptrs: tuple[Tensor, Tensor],
    block_size: int,
    is_causal: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """Weights of :func:`block_attention`, summed over the tokens of each edge of blocks, ``[E]``, without gradient.

    Those of a query block sum to the number of its tokens. Arguments are as there.

    Raises:
        TypeError, ValueError: Shapes or types do not fit, or an argument is out of range.
    """
    layout = _check_blocks(query, key, None, rows, None, ptrs, block_size, is_causal, scale)
    return schemas.block_weight(query, key, *rows, *layout, is_causal, scale)


def block_expectation(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Rows,
    probes: Rows,
    chance: Tensor,
    ptrs: tuple[Tensor, Tensor],
    block_size: int,
    forced: Tensor | None = None,
    is_causal: bool = False,
    scale: float = 1.0,
    exploration: float = 0.0,
    *,
    prob: tuple[Tensor, Tensor],
    weight: float = 1.0,
) -> Tensor:
    """:func:`local_expectation` for edges of blocks: the probability of a block receives its :func:`block_effect`.

    Args:
        out: Output of :func:`block_attention` over the graph, ``[H, N, C']``.
        query, key, value: Those of the attention; they get no gradient from here.
        rows, probes: As :func:`block_effect`.
        chance: Probability with which each key block of a query block is a probe, ``[n]``.
        ptrs, block_size, is_causal, scale: As :func:`block_attention`.
        forced: Edges that do not depend on p, ``[E]`` bool, or None; they send no gradient.
        exploration: What was added to each probability when the graph was sampled.
        prob: Probabilities of the edges ``[E]`` and of the probes ``[E']``.
        weight: Factor of the gradient.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: Shapes or types do not fit, or an argument is out of range.
    """
    checks.check_tuple("prob", prob, "two tensors", 2)
    checks.tensors(out=out, value=value, chance=chance, prob=prob[0], probe_prob=prob[1])
    layout = _check_blocks(query, key, value, rows, probes, ptrs, block_size, is_causal, scale)
    checks.forced(forced, rows[1])
    _check_scores(scale, exploration)
    checks.number("weight", weight, "(-inf, inf)", _WEIGHT)
    checks.floating(out=out, chance=chance, prob=prob[0], probe_prob=prob[1])
    checks.shape("out", out, (*query.shape[:2], value.size(2)), "[H, N, C']", "It is the output of the attention.")
    checks.shape("prob", prob[0], rows[1].shape, "[E]", "It has the probability of each edge.")
    checks.shape("probe_prob", prob[1], probes[1].shape, "[E']", "It has the probability of each probe.")
    num_blocks = (rows[0].size(0) - 1) // query.size(0)
    checks.shape("chance", chance, (num_blocks,), "[n]", "It holds one probability per query block.")
    checks.same_device("query", query, out=out, chance=chance, prob=prob[0], probe_prob=prob[1])
    constants = (x if x is None else x.detach() for x in (query, key, value, *rows, *probes))
    more = (chance, forced, *layout, is_causal, scale, exploration, weight)
    return schemas.Expectation.apply(out, None, None, *prob, *constants, *more)


def segment_entmax(
    src: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    num_nodes: int | None = None,
    alpha: float | Tensor = 1.5,
) -> Tensor:
    r"""alpha-entmax over segments, with the signature of :func:`torch_geometric.utils.softmax`.

    Each segment becomes :math:`p_e = [(\alpha - 1) x_e - \tau]_+^{1/(\alpha-1)}` with :math:`\tau` such that it sums to
    1: sparse for :math:`\alpha > 1`, softmax as :math:`\alpha \to 1`, sparsemax at 2. Cost O(E), and a few steps of
    root finding over the values that may have a share.

    Args:
        src: Values, ``[E]``, or ``[E, ...]`` with columns apart.
        index: Segment of each value, ``[E]`` int64, in any order.
        ptr: Offsets of consecutive segments, ``[S+1]`` int64, from 0 to E; used instead of ``index``.
        num_nodes: Number of segments with ``index``; the largest index plus one if None.
        alpha: Greater than 1, at most 4. A tensor gets its gradient, which is exact. Its shape broadcasts to ``[S,
            ...]``: a scalar, one for each column, or one for each segment (``[S]``, or ``[S, 1]`` with columns).

    Returns:
        Like ``src``, each non-empty segment non-negative with sum 1; zeros, as their gradients are, where all of its
        values are ``-inf``.

    Raises:
        TypeError: ``src`` is not floating point, or segments are not given by integers.
        ValueError: ``alpha`` or a segment is out of range, or neither or both of ``index`` and ``ptr`` came.

    Example:
        >>> segment_entmax(torch.tensor([0.0, 2.0, 0.0, 0.1]), ptr=torch.tensor([0, 2, 4]), alpha=2.0)
        tensor([0.0000, 1.0000, 0.4500, 0.5500])

    Reference: Peters, Niculae and Martins, "Sparse Sequence-to-Sequence Models", ACL 2019. There the root is found by
    sorting or bisection on dense rows; here by bracketed Newton steps on sums over segments. The gradient for alpha is
    that of Correia, Niculae and Martins, "Adaptively Sparse Transformers", EMNLP 2019, proposition 1.
    """
    checks.tensors(src=src)
    checks.floating(src=src)
    if not isinstance(alpha, Tensor):
        checks.number("alpha", alpha, "(1, 4]", "Use softmax for alpha = 1.")
    segments = 0 if num_nodes is None else checks.integer("num_nodes", num_nodes, 0, "It is the number of segments.")
    if (index is None) == (ptr is None):
        raise ValueError(
            f"Expected one of 'index' and 'ptr' (got {'neither' if ptr is None else 'both'}). "
            "Pass `ptr` where segments are consecutive."
        )
    if src.dim() < 1:
        raise ValueError(f"Expected 'src' to be [E, ...] (got {list(src.shape)}). Its first axis runs over the values.")
    checks.shape("ptr", ptr, (None,), "[S+1]", "It holds the offsets of consecutive segments.")
    checks.shape("index", index, src.shape[:1], "[E]", "It holds the segment of each value.")
    checks.same_device("src", src, index=index, ptr=ptr)
    for name, x in (("index", index), ("ptr", ptr)):
        if x is not None and x.dtype not in checks.INTEGERS:
            raise TypeError(f"Expected '{name}' to be int64 (got {x.dtype}). Convert it with `.long()`.")
    if ptr is not None:
        if ptr.size(0) < 1:
            raise ValueError("Expected 'ptr' to be [S+1] (got [0]). It holds the offsets of the segments.")
        return _entmax_columns(src, ptr, alpha)
    assert index is not None
    if index.numel() and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in torch.aminmax(index))
        if low < 0:
            raise ValueError(f"Expected 'index' to be 0 or more (got {low}). It holds the segment of each value.")
        segments = max(segments, high + 1)
    checks.memory("index", segments, 100, src.device, "Number the segments from 0 without gaps.", "segments")
    order = torch.argsort(index, stable=True)
    counts = torch.bincount(index, minlength=segments)
    sorted_out = _entmax_columns(src[order], torch.cat([counts.new_zeros(1), counts.cumsum(0)]), alpha)
    return torch.empty_like(sorted_out).index_copy(0, order, sorted_out)


def segment_top_k(src: Tensor, ptr: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The largest values of consecutive segments. The earlier value wins a tie, and NaN counts as infinity.

    Cost O(E) on the CPU, two sorts on other devices, and no gradient.

    Args:
        src: Values, ``[E]`` floating point.
        ptr: Offsets of the segments, ``[S+1]`` int64, from 0 to E.
        count: Values of each segment, ``[S]`` int64, 0 or more. A segment with fewer values takes all of them.

    Returns:
        Offsets of the segments in what is chosen, ``[S+1]`` int64, and the numbers of the chosen values, ascending.

    Raises:
        TypeError, ValueError: Shapes or types do not fit, or a count is negative.

    Example:
        >>> segment_top_k(torch.tensor([3.0, 1.0, 2.0, 5.0]), torch.tensor([0, 3, 4]), torch.tensor([2, 1]))
        (tensor([0, 2, 3]), tensor([0, 2, 3]))
    """
    checks.tensors(src=src, ptr=ptr, count=count)
    checks.floating(src=src)
    checks.shape("src", src, (None,), "[E]", "It holds the values of all segments.")
    checks.shape("count", count, (None,), "[S]", "It is the number of values of each segment.")
    checks.shape("ptr", ptr, (count.size(0) + 1,), "[S+1]", "It holds the offsets of the segments.")
    checks.same_device("src", src, ptr=ptr, count=count)
    for name, x in (("ptr", ptr), ("count", count)):
        if x.dtype != torch.int64:
            raise TypeError(f"Expected '{name}' to be int64 (got {x.dtype}). Convert it with `.long()`.")
    values.require_unbatched(src=src, ptr=ptr, count=count)
    if values.can_read(count) and count.numel() and int(count.min()) < 0:
        raise ValueError(f"Expected 'count' to be 0 or more (got {int(count.min())}). It counts values.")
    return schemas.segment_top_k(src, ptr, count)


def _alphas(
    like: tuple[str, Tensor], alpha: float | Tensor, shape: tuple[int, ...], symbols: str, way_out: str
) -> Tensor:
    """Alpha in a shape, and in its range."""
    if not isinstance(alpha, Tensor):
        checks.number("alpha", alpha, "(1, 4]", "Use softmax for alpha = 1.")
        return torch.full((), alpha, dtype=checks.widest(like[1].device), device=like[1].device).expand(shape)
    checks.tensors(alpha=alpha)
    checks.floating(alpha=alpha)
    checks.same_device(*like, alpha=alpha)
    try:
        alphas = alpha.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"Expected 'alpha' of a shape that broadcasts to {symbols} = {list(shape)} (got {list(alpha.shape)}). "
            f"{way_out}"
        ) from None
    if alpha.numel() and not torch.compiler.is_compiling():
        for bound in torch.aminmax(alpha.detach()):
            checks.number("alpha", float(bound), "(1, 4]", "Use softmax for alpha = 1.")
    return alphas


def _entmax_columns(src: Tensor, ptr: Tensor, alpha: float | Tensor) -> Tensor:
    """Column by column, each segment of it with its own alpha."""
    way_out = "It is a scalar, or has one for each column of 'src', or one for each segment."
    alphas = _alphas(("src", src), alpha, (ptr.size(0) - 1, *src.shape[1:]), "[S, ...]", way_out)
    columns = src.flatten(1).T if src.dim() > 1 else src[None]
    alphas = alphas.flatten(1).T if src.dim() > 1 else alphas[None]
    out = schemas.segment_entmax(columns.contiguous(), ptr, alphas.contiguous())
    return out.T.reshape(src.shape) if src.dim() > 1 else out[0]


def _check_ptr(query_ptr: Tensor, key_ptr: Tensor, queries: int, keys: int | None) -> None:
    """Refuse offsets that do not describe these numbers of tokens; None: the number is unknown."""
    checks.tensors(query_ptr=query_ptr, key_ptr=key_ptr)
    checks.shape("query_ptr", query_ptr, (None,), "[B+1]", "It holds the offsets of the sequences.")
    for name, ptr in (("query_ptr", query_ptr), ("key_ptr", key_ptr)):
        if ptr.dtype != torch.int64:
            raise TypeError(f"Expected '{name}' to be int64 (got {ptr.dtype}). Convert it with `.long()`.")
    if not torch.compiler.is_compiling() and query_ptr.size(0) < 2:
        raise ValueError(
            f"Expected 'query_ptr' to be [B+1] with B >= 1 (got {[*query_ptr.shape]}). "
            "It holds the offsets of the sequences."
        )
    checks.shape("key_ptr", key_ptr, query_ptr.shape, "[B+1]", "It has the sequences of 'query_ptr'.")
    checks.spans("query_ptr", query_ptr, queries, "queries")
    if keys is not None:
        checks.spans("key_ptr", key_ptr, keys, "keys")


def _check_sequences(
    like: tuple[str, Tensor], sizes: tuple[int, int | None], query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor
) -> None:
    _check_ptr(query_ptr, key_ptr, *sizes)
    checks.tensors(sequence_ids=sequence_ids)
    checks.shape("sequence_ids", sequence_ids, (query_ptr.size(0) - 1,), "[B]", "It holds one number per sequence.")
    if sequence_ids.dtype != torch.int64:
        raise TypeError(f"Expected 'sequence_ids' to be int64 (got {sequence_ids.dtype}). Convert it with `.long()`.")
    checks.same_device(*like, query_ptr=query_ptr, key_ptr=key_ptr, sequence_ids=sequence_ids)


def sample_sbm(
    rate: Tensor,
    member: Tensor,
    query_ptr: Tensor,
    key_ptr: Tensor,
    sequence_ids: Tensor,
    seed: int,
    method: str = "bernoulli",
    exploration: float = 0.0,
    clamp: bool = False,
    is_causal: bool = False,
    row_group: int = 1,
) -> tuple[Tensor, Tensor]:
    r"""Sample the edges of a low-rank random graph in each head of each sequence.

    With :math:`p_{ij} = \langle q_i, z_j \rangle + \delta`: ``"bernoulli"`` puts an edge with probability
    :math:`\min(1, p_{ij})`, ``"fastrg"`` with :math:`1 - e^{-p_{ij}}`, all pairs independent. Each row is drawn by the
    cheapest of three ways: thinned geometric gaps, Poisson proposals (both O(expected edges)), or one Bernoulli draw
    per key. Random words are Philox4x32-10 at counter (number, position, sequence number, head). So the edges of a
    sequence depend on its own memberships, its number and ``seed`` alone: not on threads, on the device or on the rest
    of the batch.

    Args:
        rate: Rates of the queries ``Y S``, ``[H, N, K]``, finite, non-negative, below :math:`2^{50}`.
        member: Memberships of the keys ``Z``, ``[H, M, K]``, finite, non-negative, below :math:`2^{50}`. Kernels may
            work in float32, where numbers below its normal range count as 0. :func:`sbm_pyg.sample_edges` rescales
            memberships for which this would matter.
        query_ptr: Offsets of the sequences in the queries, ``[B+1]`` int64.
        key_ptr: Offsets of the sequences in the keys, ``[B+1]`` int64.
        sequence_ids: Number of each sequence in its random words, ``[B]`` int64 in ``0 .. 2**32-1``. Its upper 32 bits,
            below ``2**24``, are the number of head 0 in them.
        seed: 64-bit seed.
        method: ``"bernoulli"`` or ``"fastrg"``.
        exploration: Added to every probability, in [0, 1].
        clamp: Cut probabilities above 1; otherwise they are an error.
        is_causal: Leave out the keys whose position in their sequence is later than that of the query. No row depends
            on them or on their number, and they cost nothing.
        row_group: Number of consecutive queries of a sequence, by position, that share their draws in each head. An
            edge exists where the uniform number of its group and key is below its probability. So each row keeps its
            law, and rows of one group depend on each other: kernels visit their keys once for all of them, and skip
            blocks of keys that no row can reach. 1: all pairs are independent. ``"bernoulli"`` only.

    Returns:
        ``rowptr`` [H*N+1] int64 and ``col`` [E] int32, sorted by (head, query, key). Beyond the CPU, ``col`` is int64
        where M does not fit.

    Raises:
        ValueError: Rates or memberships are NaN or infinite, a probability without exploration exceeds 1
            (``"bernoulli"`` without ``clamp``), or the CPU is to number more than 2^31 keys.
    """
    checks.tensors(rate=rate, member=member)
    checks.shape("rate", rate, (None, None, None), "[H, N, K]", "Heads come first.")
    checks.shape("member", member, (len(rate), None, rate.size(2)), "[H, M, K]", "It has heads and blocks of 'rate'.")
    checks.floating(rate=rate, member=member)
    _check_sequences(("rate", rate), (rate.size(1), member.size(1)), query_ptr, key_ptr, sequence_ids)
    checks.same_device("rate", rate, member=member)
    checks.one_of("method", method, METHODS)
    checks.number("exploration", exploration, "[0, 1]", "It is added to every probability.")
    checks.flag("clamp", clamp, "It says whether probabilities above 1 are cut.")
    checks.flag("is_causal", is_causal, _CAUSAL)
    row_group = checks.row_group(row_group, method)
    values.require_unbatched(rate=rate, member=member)
    checks.not_captured(rate.device)
    more = (checks.seed(seed), method, exploration, clamp, is_causal, row_group)
    return schemas.sample_sbm(rate, member, query_ptr, key_ptr, sequence_ids, *more)


def sample_queries(query_ptr: Tensor, sequence_ids: Tensor, num_queries: int, part: float, seed: int) -> Tensor:
    """A random part of the queries, each independently with the same probability.

    What is drawn for a sequence depends on its number and the seed alone: it is the same in every batch, and for all
    heads. Cost O(N).

    Args:
        query_ptr: Offsets of the sequences in the queries, ``[B+1]`` int64.
        sequence_ids: Number of each sequence, ``[B]`` int64; its lower 32 bits count.
        num_queries: Number of queries N.
        part: Probability of a query, in [0, 1].
        seed: 64-bit seed.

    Returns:
        True for the queries that are drawn, ``[N]`` bool.
    """
    num_queries = checks.integer("num_queries", num_queries, 0, "It is the number of queries.")
    checks.number("part", part, "[0, 1]", "It is the probability of a query.")
    _check_sequences(("query_ptr", query_ptr), (num_queries, None), query_ptr, query_ptr, sequence_ids)
    checks.memory("num_queries", num_queries, 32, query_ptr.device, "Take shorter sequences.", "queries")
    return schemas.sample_queries(query_ptr, sequence_ids, num_queries, float(part), checks.seed(seed))


def sample_systematic(
    chance: Tensor,
    query_ptr: Tensor,
    key_ptr: Tensor,
    sequence_ids: Tensor,
    heads: int,
    seed: int,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Each query takes keys of its sequence at equal distances from a random start.

    Every key has the same probability, at little cost. With :math:`\eta_i` this probability and one random :math:`u`
    per row, uniform in [0, 1), the keys are :math:`\lfloor (t + u) / \eta_i \rfloor` for t = 0, 1, ... Their number
    differs by less than one from :math:`\eta_i m`, with m the keys of the sequence. Rows are independent; keys of a row
    are not. Random words are as in :func:`sample_sbm`. Cost O(N + E).

    Args:
        chance: :math:`\eta` of each query, ``[N]``, in [0, 1]; what is outside is cut, and NaN counts as 0.
        query_ptr: Offsets of the sequences in the queries, ``[B+1]`` int64.
        key_ptr: Offsets of the sequences in the keys, ``[B+1]`` int64.
        sequence_ids: Number of each sequence in its random words, ``[B]`` int64 in ``0 .. 2**32-1``. Its upper 32 bits,
            below ``2**24``, are the number of head 0 in them.
        heads: Number of heads H.
        seed: 64-bit seed.
        is_causal: Leave out later keys, as :func:`sample_sbm`; m is the number of the others.

    Returns:
        ``rowptr`` [H*N+1] int64 and ``col`` [E] int32, sorted by (head, query, key), without repeats.

    Raises:
        ValueError: There are more than 2^31 keys.

    Reference: Madow and Madow, "On the Theory of Systematic Sampling, I", Annals of Mathematical Statistics 1944.
    """
    checks.tensors(chance=chance)
    checks.shape("chance", chance, (None,), "[N]", "It holds one probability per query.")
    checks.floating(chance=chance)
    _check_sequences(("chance", chance), (chance.size(0), None), query_ptr, key_ptr, sequence_ids)
    heads = checks.integer("heads", heads, 1, "It is the number of heads.")
    checks.memory("heads", heads * chance.size(0), 32, chance.device, "Take fewer heads, or shorter sequences.", "rows")
    checks.flag("is_causal", is_causal, _CAUSAL)
    values.require_unbatched(chance=chance)
    checks.not_captured(chance.device)
    return schemas.sample_systematic(chance, query_ptr, key_ptr, sequence_ids, heads, checks.seed(seed), is_causal)


def union_rows(
    rowptr: Tensor, col: Tensor, other_rowptr: Tensor, other_col: Tensor, num_keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The union of the edges of two graphs over the same rows and keys.

    Both have ascending keys in each row, without repeats, as :func:`invalid_row` checks; so has the union. Cost
    O(S + E + E' log E) with S rows.

    Args:
        rowptr: Row offsets, ``[S+1]`` int64.
        col: Key of each edge, ``[E]`` int32 or int64.
        other_rowptr: Row offsets of the other graph, ``[S+1]`` int64.
        other_col: Its keys, ``[E']`` int32 or int64.
        num_keys: Number of keys M; all keys are in ``0 .. M-1``.

    Returns:
        ``rowptr`` [S+1] int64 and ``col`` [E''] of the union, and a mask ``[E'']`` bool of the edges of the other.

    Raises:
        TypeError, ValueError: An argument has the wrong type or shape.

    Example:
        >>> ptr, other_ptr = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 2])
        >>> union_rows(ptr, torch.tensor([0, 2, 1]), other_ptr, torch.tensor([1, 1]), 3)
        (tensor([0, 3, 4]), tensor([0, 1, 2, 1]), tensor([False,  True, False,  True]))
    """
    graphs = {"rowptr": rowptr, "col": col, "other_rowptr": other_rowptr, "other_col": other_col}
    checks.tensors(**graphs)
    checks.shape("rowptr", rowptr, (None,), "[S+1]", "It holds the offsets of the rows.")
    checks.shape("other_rowptr", other_rowptr, rowptr.shape, "[S+1]", "Both graphs have the same rows.")
    num_keys = checks.integer("num_keys", num_keys, 0, "It is the number of keys.")
    for name, x in graphs.items():
        dtypes = (torch.int64,) if name.endswith("ptr") else checks.INTEGERS
        if x.dtype not in dtypes:
            raise TypeError(f"Expected '{name}' to be one of {dtypes} (got {x.dtype}). Convert it with `.long()`.")
    for name in ("col", "other_col"):
        checks.shape(name, graphs[name], (None,), "[E]", "It holds the key of each edge.")
    checks.same_device("col", col, rowptr=rowptr, other_rowptr=other_rowptr, other_col=other_col)
    values.require_unbatched(**graphs)
    checks.spans("rowptr", rowptr, col.size(0), "edges in 'col'")
    checks.spans("other_rowptr", other_rowptr, other_col.size(0), "edges in 'other_col'")
    return schemas.union_rows(rowptr, col, other_rowptr, other_col, num_keys)


def invalid_row(rowptr: Tensor, col: Tensor, query_ptr: Tensor, key_ptr: Tensor, heads: int) -> Tensor:
    """The first row whose keys are not ascending, repeat, or leave the sequence of their query.

    The constructor of :class:`sbm_pyg.AttentionGraph` calls it. Cost O(HN + E).

    Args:
        rowptr: Row offsets, ``[H*N+1]`` int64.
        col: Key of each edge, ``[E]`` int32 or int64.
        query_ptr: Offsets of the sequences in the queries, ``[B+1]`` int64, rising from 0 to N.
        key_ptr: Offsets of the sequences in the keys, ``[B+1]`` int64.
        heads: Number of heads H.

    Returns:
        Its number ``h * N + i``, ``[]`` int64, or -1 where every row is valid. A row whose offsets decrease or leave
        ``0 .. E`` is invalid. The caller checks that the first offset is 0 and the last E.
    """
    checks.tensors(rowptr=rowptr, col=col)
    checks.shape("rowptr", rowptr, (None,), "[H*N+1]", "It holds one row per head and query, heads outermost.")
    checks.shape("col", col, (None,), "[E]", "It holds the key of each edge.")
    heads = checks.integer("heads", heads, 1, "It is the number of heads.")
    if not torch.compiler.is_compiling() and rowptr.size(0) % heads != 1 % heads:
        raise ValueError(
            f"Expected 'rowptr' to be [H*N+1] with H = {heads} (got {[*rowptr.shape]}). It holds one row per head and "
            "query, heads outermost."
        )
    _check_ptr(query_ptr, key_ptr, (rowptr.size(0) - 1) // heads, None)
    if rowptr.dtype != torch.int64 or col.dtype not in checks.INTEGERS:
        raise TypeError(
            "Expected 'rowptr' to be int64 and 'col' int32 or int64 "
            f"(got {rowptr.dtype} and {col.dtype}). Convert them."
        )
    checks.same_device("col", col, rowptr=rowptr, query_ptr=query_ptr, key_ptr=key_ptr)
    return schemas.invalid_row(rowptr, col, query_ptr, key_ptr, heads)
