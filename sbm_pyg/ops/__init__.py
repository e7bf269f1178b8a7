"""The device-aware ops: each is declared once, with one signature for all devices.

``torch.ops.sbm_pyg.*`` are the contracts. The functions here are for users: they check their arguments and call the op.
The library calls :mod:`sbm_pyg.ops.schemas` instead, by arguments that are valid by construction, and checks what users
pass to its layers and records. The PyTorch dispatcher chooses the kernel: numba on the CPU, Triton on CUDA devices
(:mod:`sbm_pyg.ops.cuda`), and plain torch (:mod:`sbm_pyg.ops.reference`, which says what each op computes) on other
devices and for ops without a kernel.

Graphs come as compressed rows over heads, :class:`Rows`. Symbols: N queries, M keys, E edges, H heads, C channels per
head, K blocks, B sequences. Ops are deterministic: random words come from a counter and the integer ``seed``. Outputs
are freshly allocated. Kernels may take subnormal numbers as zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks, schemas
from .segments import Rows

__all__ = ["Rows", "block_attention", "edge_attention", "edge_dot", "sample_sbm", "segment_entmax"]

METHODS = ("bernoulli", "fastrg")
"""Names of the distributions of a sampled graph."""


def _check_rows_tuple(rows: Any) -> None:
    checks.check_tuple("rows", rows, "rowptr, col and a bias or None, as `ops.Rows`", 3)


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
    _check_rows_tuple(rows)
    rowptr, col, bias = rows
    way_out = "This op adds none: pass `rows._replace(bias=None)`."
    checks.require(bias is None, "rows", "without a bias", type(bias).__name__, way_out)
    checks.edge_rows(rowptr, col, query, key=key)
    return schemas.edge_dot(query, key, rowptr, col)


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
    ``"weight"``; weights are normalized over each row and sum the values. There is no padding, so nothing is masked
    after the softmax. Cost O(E C); memory O(E + HNC).

    Args:
        query: ``[H, N, C]``.
        key: ``[H, M, C]``.
        value: ``[H, M, C']``.
        rows: The edges and their bias.
        gate: ``[E]``, positive for ``"weight"``. Straight-through estimators pass their gradient through it.
        scale: Factor of the scores, usually ``C ** -0.5``.
        gate_form: ``"score"`` or ``"weight"``: which of the two forms the gate takes.
        dropout: Probability in [0, 1) that a normalized weight is dropped; the others grow by ``1 / (1 - dropout)``.
            Which ones follows from the seed, the head and the numbers of query and key, and from no other edge.
        seed: Seed of the dropout, 64 bits.

    Returns:
        The output ``[H, N, C']`` (zeros for a query without edges) and the log of each row's sum of weights, ``[H,
        N]``, float32 or better, ``-inf`` for a query without edges, without gradient.
    """
    _check_rows_tuple(rows)
    rowptr, col, bias = rows
    checks.tensors(value=value)
    checks.edge_rows(rowptr, col, query, key=key, value=value, gate=gate, bias=bias)
    checks.one_of("gate_form", gate_form, ("score", "weight"))
    _check_weights(scale, dropout)
    more = (gate, bias, scale, gate_form, dropout, checks.seed(seed))
    return schemas.edge_attention(query, key, value, rowptr, col, *more)


def _check_weights(scale: float, dropout: float) -> None:
    checks.number("scale", scale, "(-inf, inf)", "It is a factor of the scores, usually C ** -0.5.")
    checks.number("dropout", dropout, "[0, 1)", "It is the probability that a weight is dropped.")


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
        The output ``[H, N, C']`` (zeros for a query without edges), and the log of each row's sum of weights, ``[H,
        N]``, float32 or better, ``-inf`` for a query without edges, without gradient.

    Raises:
        TypeError, ValueError: Shapes or types do not fit, or an argument is out of range.
    """
    _check_rows_tuple(rows)
    checks.tensors(value=value)
    block_size = checks.block_rows(rows, query, key, value, ptrs, block_size)
    checks.flag("is_causal", is_causal, "It says whether no token meets a later one.")
    _check_weights(scale, dropout)
    more = (is_causal, rows[2], scale, dropout, checks.seed(seed))
    return schemas.block_attention(query, key, value, *rows[:2], *ptrs, block_size, *more)


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
    checks.require(src.dim() >= 1, "src", "to be [E, ...]", src.shape, "Its first axis runs over the values.")
    checks.shape("ptr", ptr, (None,), "[S+1]", "It holds the offsets of consecutive segments.")
    checks.shape("index", index, src.shape[:1], "[E]", "It holds the segment of each value.")
    checks.same_device("src", src, index=index, ptr=ptr)
    for name, x in (("index", index), ("ptr", ptr)):
        is_integer, got = x is None or x.dtype in checks.INTEGERS, None if x is None else x.dtype
        checks.require(is_integer, name, "to be int64", got, "Convert it with `.long()`.", TypeError)
    if ptr is not None:
        checks.require(ptr.size(0) > 0, "ptr", "to be [S+1]", ptr.shape, "It holds the offsets of the segments.")
        return _entmax_columns(src, ptr, alpha)
    assert index is not None
    if index.numel() and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in torch.aminmax(index))
        checks.require(low >= 0, "index", "to be 0 or more", low, "It holds the segment of each value.")
        segments = max(segments, high + 1)
    checks.memory("index", segments, 100, src.device, "Number the segments from 0 without gaps.", "segments")
    order = torch.argsort(index, stable=True)
    counts = torch.bincount(index, minlength=segments)
    sorted_out = _entmax_columns(src[order], torch.cat([counts.new_zeros(1), counts.cumsum(0)]), alpha)
    return torch.empty_like(sorted_out).index_copy(0, order, sorted_out)


def _alphas(src: Tensor, alpha: float | Tensor, shape: tuple[int, ...]) -> Tensor:
    """Check alpha, and broadcast it to a shape."""
    if not isinstance(alpha, Tensor):
        return torch.full((), alpha, dtype=checks.widest(src.device), device=src.device).expand(shape)
    checks.tensors(alpha=alpha)
    checks.floating(alpha=alpha)
    checks.same_device("src", src, alpha=alpha)
    try:
        alphas = alpha.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"Expected 'alpha' of a shape that broadcasts to [S, ...] = {list(shape)} (got {list(alpha.shape)}). "
            "It is a scalar, or has one for each column of 'src', or one for each segment."
        ) from None
    if alpha.numel() and not torch.compiler.is_compiling():
        for bound in torch.aminmax(alpha.detach()):
            checks.number("alpha", float(bound), "(1, 4]", "Use softmax for alpha = 1.")
    return alphas


def _entmax_columns(src: Tensor, ptr: Tensor, alpha: float | Tensor) -> Tensor:
    """Apply entmax to each column, with one alpha per segment."""
    alphas = _alphas(src, alpha, (ptr.size(0) - 1, *src.shape[1:]))
    columns = src.flatten(1).T if src.dim() > 1 else src[None]
    alphas = alphas.flatten(1).T if src.dim() > 1 else alphas[None]
    out = schemas.segment_entmax(columns.contiguous(), ptr, alphas.contiguous())
    return out.T.reshape(src.shape) if src.dim() > 1 else out[0]


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
    _check_sequences(rate.size(1), member.size(1), query_ptr, key_ptr, sequence_ids)
    more = {"query_ptr": query_ptr, "key_ptr": key_ptr, "sequence_ids": sequence_ids}
    checks.same_device("rate", rate, member=member, **more)
    checks.one_of("method", method, METHODS)
    checks.number("exploration", exploration, "[0, 1]", "It is added to every probability.")
    checks.flag("clamp", clamp, "It says whether probabilities above 1 are cut.")
    checks.flag("is_causal", is_causal, "It says whether queries attend to earlier keys, and their own, alone.")
    row_group = checks.row_group(row_group, method)
    checks.not_captured(rate.device)
    law = (checks.seed(seed), method, exploration, clamp, is_causal, row_group)
    return schemas.sample_sbm(rate, member, query_ptr, key_ptr, sequence_ids, *law)


def _check_sequences(queries: int, keys: int, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor) -> None:
    """Raise an error unless offsets and sequence numbers describe the given numbers of tokens."""
    checks.tensors(query_ptr=query_ptr, key_ptr=key_ptr, sequence_ids=sequence_ids)
    checks.shape("query_ptr", query_ptr, (None,), "[B+1]", "It holds the offsets of the sequences.")
    for name, x in (("query_ptr", query_ptr), ("key_ptr", key_ptr), ("sequence_ids", sequence_ids)):
        checks.require(x.dtype == torch.int64, name, "to be int64", x.dtype, "Convert it with `.long()`.", TypeError)
    has_sequences = torch.compiler.is_compiling() or query_ptr.size(0) > 1
    way_out = "It holds the offsets of the sequences."
    checks.require(has_sequences, "query_ptr", "to be [B+1] with B >= 1", query_ptr.shape, way_out)
    checks.shape("key_ptr", key_ptr, query_ptr.shape, "[B+1]", "It has the sequences of 'query_ptr'.")
    checks.shape("sequence_ids", sequence_ids, (query_ptr.size(0) - 1,), "[B]", "It holds one number per sequence.")
    checks.spans("query_ptr", query_ptr, queries, "queries")
    checks.spans("key_ptr", key_ptr, keys, "keys")
