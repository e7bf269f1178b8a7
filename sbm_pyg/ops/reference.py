"""Every op in plain torch: slow, short, and the meaning that each backend is tested against.

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`; any device, any floating dtype.
Not here: checks of what comes in (the public border does that) and speed.

Shapes: N queries, M keys, E edges, H heads, C channels, K blocks, B sequences; row ``r = h * N + i``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# ------------------------------------------------------------------ counter-based random words

_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

# What a random word is for; the purpose is part of its counter, so no two uses ever share a word.
COIN_BYTE, COIN_REST, COUNT, PROPOSAL, DROPOUT, GAP, SYSTEMATIC, RANDOM_KEY = range(1, 9)

PROPOSALS, GAPS, COINS = range(3)
"""The ways to sample a row: Poisson proposals by block and key, keys at random gaps, thinned, or one coin per key."""
PROPOSAL_COST, GAP_COST = 64.0, 11.0
"""How many coins one proposal of the other two ways is worth; decides row by row which way is taken."""


def philox(c0: Tensor | int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int, seed: int) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al., SC 2011): four random 32-bit words for each counter.

    Args:
        c0, c1, c2, c3: Counter words in ``0 .. 2**32-1``, int64 tensors that broadcast (at least one is a tensor).
        seed: Key, 64 bits.

    Returns:
        Four int64 tensors of words in ``0 .. 2**32-1``.
    """
    like = next(c for c in (c0, c1, c2, c3) if isinstance(c, Tensor))
    x = [c if isinstance(c, Tensor) else torch.tensor(c, device=like.device) for c in (c0, c1, c2, c3)]
    key = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(10):
        a, b = x[0] * _MULTIPLIER[0], x[2] * _MULTIPLIER[1]  # wraps in int64; the low 64 bits are right
        x = [((b >> 32) & _WORD) ^ x[1] ^ key[0], b & _WORD, ((a >> 32) & _WORD) ^ x[3] ^ key[1], a & _WORD]
        key = [(k + w) & _WORD for k, w in zip(key, _WEYL, strict=True)]
    return tuple(torch.broadcast_tensors(*x))


def dropout_mask_at(edge: Tensor, dropout: float, seed: int) -> Tensor:
    """Those of :func:`dropout_mask` for some edges alone."""
    block = edge >> 2
    words = torch.stack(philox(block & _WORD, block >> 32, 0, DROPOUT, seed), dim=-1)
    return words.gather(1, edge[:, None] & 3)[:, 0] >= round(dropout * 2**32)


def dropout_mask(num_edges: int, dropout: float, seed: int, device: torch.device) -> Tensor:
    """Edges that attention dropout keeps, ``[E]`` bool: edge e looks at word ``e % 4`` of counter ``e // 4``."""
    block = torch.arange((num_edges + 3) // 4, device=device)
    words = torch.stack(philox(block & _WORD, block >> 32, 0, DROPOUT, seed), dim=-1).flatten()
    return words[:num_edges] >= round(dropout * 2**32)


# ------------------------------------------------------------------ edges of a graph


def edge_row(rowptr: Tensor, num_edges: int) -> Tensor:
    """Row of each edge, ``[E]`` int64."""
    return torch.repeat_interleave(rowptr.diff(), output_size=num_edges)


def _ends(query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    """Row of the query and row of the key of each edge, in tensors flattened over heads."""
    row = edge_row(rowptr, col.numel())
    return row, torch.div(row, query.size(1), rounding_mode="floor") * key.size(1) + col


def _wide(x: Tensor) -> Tensor:
    """Statistics accumulate in float32 or better."""
    return x if x.dtype == torch.float64 else x.float()


def edge_dot(query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor) -> Tensor:
    row, end = _ends(query, key, rowptr, col)
    return (_wide(query).flatten(0, 1)[row] * _wide(key).flatten(0, 1)[end]).sum(-1).to(query.dtype)


def edge_dot_backward(
    grad: Tensor, query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor, need_query: bool, need_key: bool
) -> tuple[Tensor, Tensor]:
    row, end = _ends(query, key, rowptr, col)
    weight = _wide(grad)[:, None]
    grads = []
    for needed, mine, index, other, other_index in (
        (need_query, query, row, key, end),
        (need_key, key, end, query, row),
    ):
        total = torch.zeros_like(_wide(mine), memory_format=torch.contiguous_format).flatten(0, 1)
        if needed:
            total.index_add_(0, index, weight * _wide(other).flatten(0, 1)[other_index])
        grads.append(total.view(mine.shape).to(mine.dtype))
    return grads[0], grads[1]


def _segment_max(src: Tensor, row: Tensor, num_rows: int) -> Tensor:
    return src.new_full((num_rows,), -math.inf).scatter_reduce(0, row, src, "amax")


def _logits(
    query: Tensor,
    key: Tensor,
    row: Tensor,
    end: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    scale: float,
    gate_form: str,
) -> tuple[Tensor, Tensor]:
    """Scaled scores and the logits that enter the softmax, a "weight" gate as its logarithm."""
    score = (_wide(query).flatten(0, 1)[row] * _wide(key).flatten(0, 1)[end]).sum(-1) * scale
    return score, logits(score, gate, bias, gate_form)


def logits(score: Tensor, gate: Tensor | None, bias: Tensor | None, gate_form: str) -> Tensor:
    """Logits of scaled scores, in float32 or better."""
    logit = _wide(score)
    if gate is not None:
        logit = _wide(gate) * logit if gate_form == "score" else logit + _wide(gate).log()
    return logit if bias is None else logit + _wide(bias)


def edge_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rowptr: Tensor,
    col: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    scale: float,
    gate_form: str,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    heads, num_queries = query.shape[:2]
    rows = heads * num_queries
    row, end = _ends(query, key, rowptr, col)
    _, logit = _logits(query, key, row, end, gate, bias, scale, gate_form)
    top = _segment_max(logit, row, rows)
    top = torch.where(top == -math.inf, 0, top)  # a row whose edges are all forbidden has no edges
    weight = (logit - top[row]).exp()
    total = torch.zeros_like(top).index_add_(0, row, weight)
    alpha = weight / torch.where(total == 0, 1, total)[row]
    if dropout > 0:
        alpha = alpha * dropout_mask(col.numel(), dropout, seed, col.device) / (1 - dropout)
    values = _wide(value).flatten(0, 1)
    out = values.new_zeros(rows, value.size(-1)).index_add_(0, row, alpha[:, None] * values[end])
    lse = torch.where(total > 0, top + total.log(), torch.where(total.isnan(), total, -math.inf))
    return out.view(heads, num_queries, -1).to(value.dtype), lse.view(heads, num_queries)


def edge_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rowptr: Tensor,
    col: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    gate_form: str,
    dropout: float,
    seed: int,
    need_gate: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    row, end = _ends(query, key, rowptr, col)
    score, logit = _logits(query, key, row, end, gate, bias, scale, gate_form)
    alpha = torch.where(logit == -math.inf, 0, (logit - lse.flatten()[row]).exp())
    flat_grad, flat_query, flat_key, flat_value = (_wide(x).flatten(0, 1) for x in (grad_out, query, key, value))
    gain = (flat_grad[row] * flat_value[end]).sum(-1)
    kept = alpha
    if dropout > 0:
        keep = dropout_mask(col.numel(), dropout, seed, col.device).to(alpha.dtype) / (1 - dropout)
        gain, kept = gain * keep, alpha * keep
    mean_gain = (flat_grad * _wide(out).flatten(0, 1)).sum(-1)
    grad_logit = alpha * (gain - mean_gain[row])
    grad_score = grad_logit * scale if gate is None or gate_form == "weight" else grad_logit * scale * _wide(gate)
    grad_query = torch.zeros_like(flat_query).index_add_(0, row, grad_score[:, None] * flat_key[end])
    grad_key = torch.zeros_like(flat_key).index_add_(0, end, grad_score[:, None] * flat_query[row])
    grad_value = torch.zeros_like(flat_value).index_add_(0, end, kept[:, None] * flat_grad[row])
    empty = grad_logit.new_empty(0)
    grad_gate = grad_bias = empty
    if gate is not None and need_gate:
        grad_gate = (grad_logit * score if gate_form == "score" else grad_logit / _wide(gate)).to(gate.dtype)
    if bias is not None and need_bias:
        grad_bias = grad_logit.to(bias.dtype, copy=True)
    return (
        grad_query.view(query.shape).to(query.dtype),
        grad_key.view(key.shape).to(key.dtype),
        grad_value.view(value.shape).to(value.dtype),
        grad_gate,
        grad_bias if grad_bias is not grad_gate else empty.clone(),
    )


# ------------------------------------------------------------------ what an edge does to the loss

ROUNDED = 1 + 1e-5
"""Larger probabilities are not 1 by rounding: their edges are there whatever the model does."""


def effect_weight(p: Tensor, eta: Tensor, probing: bool = False) -> Tensor:
    """What the effect of an edge, or of a probe, counts for, given its probability and the chance of a probe there."""
    part = torch.where(eta > 0, 0.5, 1.0).to(p.dtype)  # without probes edges stand for both sides
    few = torch.minimum(p, part)
    seen = torch.maximum(eta + few - eta * few, few / part)
    weight = (seen - few) / (seen * (1 - few) * eta) if probing else 1 / seen
    nothing = (p > ROUNDED) | (eta == 0) if probing else p > ROUNDED  # a probe that cannot be counts nothing
    return torch.where(nothing, 0, weight)


def edge_effect(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rowptr: Tensor,
    col: Tensor,
    bias: Tensor | None,
    probe_rowptr: Tensor,
    probe_col: Tensor,
    probe_bias: Tensor | None,
    scale: float,
    rate: Tensor | None = None,
    member: Tensor | None = None,
    chance: Tensor | None = None,
    exploration: float = 0.0,
) -> tuple[Tensor, Tensor]:
    rows = query.size(0) * query.size(1)
    sides = []
    for pointer, tokens, extra in ((rowptr, col, bias), (probe_rowptr, probe_col, probe_bias)):
        row, end = _ends(query, key, pointer, tokens)
        _, logit = _logits(query, key, row, end, None, extra, scale, "score")
        gain = (_wide(grad_out).flatten(0, 1)[row] * _wide(value).flatten(0, 1)[end]).sum(-1)
        sides.append((row, end, logit, gain))
    (row, end, logit, gain), (probe_row, _, probe_logit, probe_gain) = sides

    # Weights and gains of each row without its heaviest edge, so that no other edge is ever subtracted from a sum that
    # it dominates.
    place = torch.arange(row.numel(), device=row.device)
    top = _segment_max(logit, row, rows)
    heaviest = torch.where(logit == top[row], place, row.numel())
    heaviest = place.new_full((rows,), row.numel()).scatter_reduce(0, row, heaviest, "amin")
    best = heaviest[row] == place
    second = _segment_max(torch.where(best, -math.inf, logit), row, rows)
    weight = torch.where(best | (second[row] == -math.inf), 0, (logit - second[row]).exp())
    rest = torch.zeros_like(top).index_add_(0, row, weight)
    rest_gain = torch.zeros_like(top).index_add_(0, row, weight * gain)
    ratio = torch.where(second == -math.inf, 0, (second - top).exp())
    best_gain = torch.zeros_like(top).index_add_(0, row, torch.where(best, gain, 0))
    some = top > -math.inf
    total = torch.where(top == -math.inf, 0, 1 + rest * ratio)
    total_gain = torch.where(top == -math.inf, 0, best_gain + rest_gain * ratio)

    share = weight * ratio[row]  # exp(logit - top), of all but the heaviest
    others = torch.where(
        best, (rest_gain / rest.where(rest != 0, 1))[row], (total_gain[row] - share * gain) / (total[row] - share)
    )
    effect = torch.where(best, 1, share) / total[row] * (gain - others)
    effect = torch.where(logit == -math.inf, 0, effect)
    # odds of being without the probe
    odds = torch.where(some[probe_row], total[probe_row] * (top[probe_row] - probe_logit).exp(), 0)
    mean = (total_gain / total.where(total != 0, 1))[probe_row]
    probe_effect = torch.where(probe_logit == -math.inf, 0, (probe_gain - mean) / (1 + odds))
    known = probe_row * key.size(1) + probe_col
    mine = row * key.size(1) + col
    found = torch.searchsorted(mine, known).clamp(max=max(mine.numel() - 1, 0))
    if mine.numel():
        probe_effect = torch.where(mine[found] == known, 0, probe_effect)
    if rate is not None and member is not None and chance is not None:
        eta = _wide(chance).repeat(query.size(0))
        p, probe_p = (
            edge_dot(_wide(rate), _wide(member), pointer, tokens) + exploration
            for pointer, tokens in ((rowptr, col), (probe_rowptr, probe_col))
        )
        effect = effect * effect_weight(p, eta[row])
        probe_effect = probe_effect * effect_weight(probe_p, eta[probe_row], probing=True)
    return effect.to(query.dtype), probe_effect.to(query.dtype)


# ------------------------------------------------------------------ alpha-entmax over rows


def check_ptr(rowptr: Tensor, num_values: int) -> None:
    """Refuse offsets that do not cut all values into segments: a kernel would leave its memory."""
    if not bool((rowptr[0] == 0) & (rowptr[-1] == num_values) & (rowptr.diff() >= 0).all()):
        raise ValueError(
            f"Expected 'ptr' to rise from 0 to E = {num_values} (got another order). "
            "Pass offsets, not lengths, of all segments."
        )


def _rows_of_columns(rowptr: Tensor, columns: int, num_values: int) -> Tensor:
    """Segment of each value of ``[G, E]``, flattened, those of later columns after those of earlier ones."""
    first = torch.arange(columns, device=rowptr.device)[:, None] * (rowptr.numel() - 1)
    return (edge_row(rowptr, num_values) + first).flatten()


def segment_entmax(src: Tensor, rowptr: Tensor, alpha: Tensor) -> Tensor:
    """Bracketed Newton on tau; see :func:`sbm_pyg.ops.segment_entmax` for the law.

    Values ``[G, E]``, and an alpha for each column and segment, ``[G, S]``.
    """
    check_ptr(rowptr, src.size(1))
    if src.numel() == 0:
        return torch.empty_like(src)
    row, num_rows = _rows_of_columns(rowptr, *src.shape), alpha.numel()
    values, alpha = _wide(src).flatten(), alpha.flatten().double()
    less, power = ((alpha - 1).to(values.dtype), (1 / (alpha - 1)).to(values.dtype)[row])
    z = less[row] * values
    top = _segment_max(z, row, num_rows)
    z = z - torch.where(top == -math.inf, 0, top)[row]  # a row whose values are all forbidden has none
    count = rowptr.diff().repeat(src.size(0)).to(z.dtype).clamp(min=1)
    low, high = -torch.ones_like(count), -(count**-less)  # mass >= 1 at low, <= 1 at high
    tau, done = low.clone(), torch.zeros_like(low, dtype=torch.bool)
    for _ in range(60):
        slack = (z - tau[row]).clamp(min=0)
        mass = torch.zeros_like(count).index_add_(0, row, slack**power) - 1
        steep = power * torch.where(slack > 0, slack, 1) ** (power - 1) * (slack > 0)
        slope = -torch.zeros_like(count).index_add_(0, row, steep)
        low, high = torch.where(mass > 0, tau, low), torch.where(mass <= 0, tau, high)
        step = tau - mass / slope
        step = torch.where((step > low) & (step < high), step, (low + high) / 2)
        done |= (step - tau).abs() <= torch.finfo(z.dtype).eps * tau.abs()
        if bool(done.all()):
            break
        tau = torch.where(done, tau, step)  # so that no row depends on how long others take
    out = (z - tau[row]).clamp(min=0) ** power
    total = torch.zeros_like(count).index_add_(0, row, out)
    return (out / torch.where(total == 0, 1, total)[row]).to(src.dtype).view(src.shape)


def segment_entmax_backward(
    grad: Tensor, out: Tensor, rowptr: Tensor, alpha: Tensor, need_alpha: bool
) -> tuple[Tensor, Tensor]:
    """``dx = u (dy - mean)`` with ``u = p^(2 - alpha)`` on the support, and ``mean = sum(u dy) / sum(u)``.

    With the entropies ``h = -p log p`` of a row, its ``dalpha = (sum(p dy) - mean) / (alpha - 1)^2 + (sum(h dy) - mean
    sum(h)) / (alpha - 1)``.
    """
    row = _rows_of_columns(rowptr, *out.shape)
    p, dy, a = _wide(out).flatten(), _wide(grad).flatten(), alpha.flatten().double()
    u = torch.where(p > 0, p, 1) ** (2 - a).to(p.dtype)[row] * (p > 0)
    sums = p.new_zeros(3, a.numel()).index_add_(1, row, torch.stack([u * dy, u, p]))
    mean = torch.where(sums[2] == 0, 0, sums[0] / sums[1])  # a row of zeros has no support, a row of NaN stays one
    dsrc = (u * dy - u * mean[row]).to(out.dtype).view(out.shape)
    if not need_alpha:
        return dsrc, alpha.new_empty(0)
    p, dy = p.double(), dy.double()
    h = -torch.xlogy(p, p)
    shared, mixed, entropy = p.new_zeros(3, a.numel()).index_add_(1, row, torch.stack([p * dy, h * dy, h]))
    dalpha = (shared - mean) / (a - 1) ** 2 + (mixed - mean * entropy) / (a - 1)
    return dsrc, dalpha.to(alpha.dtype).view(alpha.shape)


def entmax_support(src: Tensor, rowptr: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Which values have a share, or are NaN: the offsets of their rows, ``[S+1]``, and their places, rising.

    Values ``[E]``, and an alpha for each row, ``[S]``.
    """
    place = segment_entmax(_wide(src)[None], rowptr, alpha[None])[0].nonzero()[:, 0]
    return torch.searchsorted(place, rowptr), place


# ------------------------------------------------------------------ sampling a stochastic block model


def reach(query_ptr: Tensor, key_ptr: Tensor, num_queries: int, is_causal: bool) -> Tensor:
    """Number of keys that each query may attend to, ``[N]`` int64: the first so many of its sequence.

    All of them, or with ``is_causal`` those whose place is not later than the query's.
    """
    batch = torch.repeat_interleave(query_ptr.diff(), output_size=num_queries)
    keys = key_ptr.diff()[batch]
    if not is_causal:
        return keys
    return torch.minimum(torch.arange(1, num_queries + 1, device=keys.device) - query_ptr[batch], keys)


def sample_sbm(
    query: Tensor,
    key: Tensor,
    query_ptr: Tensor,
    key_ptr: Tensor,
    sequence_ids: Tensor,
    seed: int,
    method: str,
    exploration: float,
    clamp: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    num_queries = query.size(1)
    keys = reach(query_ptr, key_ptr, num_queries, is_causal)
    counts = torch.zeros(query.size(0), num_queries, dtype=torch.int64, device=query.device)
    found: list[Tensor] = []
    spans = [
        *zip(
            query_ptr.tolist(),
            query_ptr.tolist()[1:],
            key_ptr.tolist(),
            key_ptr.tolist()[1:],
            sequence_ids.tolist(),
            strict=False,
        )
    ]
    for head in range(query.size(0)):
        for start, end, first_key, end_key, stream in spans:
            counter = (stream & _WORD, head)
            row, col = _sample_block(
                query[head, start:end].double(),
                key[head, first_key:end_key].double(),
                keys[start:end],
                counter,
                seed,
                method,
                exploration,
                clamp,
            )
            counts[head, start:end] = torch.bincount(row, minlength=end - start)
            found.append(col + first_key)
    rowptr = torch.cat([counts.new_zeros(1), counts.flatten().cumsum(0)])
    dtype = torch.int32 if key.size(1) < 2**31 else torch.int64
    return rowptr, torch.cat(found).to(dtype)


def sample_systematic(
    chance: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, heads: int, seed: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    check_keys(int(key_ptr[-1]))
    chance = cut_chance(chance)
    queries = query_ptr.diff()
    batch = torch.repeat_interleave(queries, output_size=chance.numel())
    place = torch.arange(chance.numel(), device=chance.device) - query_ptr[batch]
    head = torch.arange(heads, device=chance.device)[:, None] | SYSTEMATIC << 24
    start = (philox(0, place, sequence_ids[batch] & _WORD, head, seed)[0].double() / 2**32).flatten()  # [H*N]
    allowed = reach(query_ptr, key_ptr, chance.numel(), is_causal)
    spacing, shift, keys = (x.repeat(heads) for x in (1 / chance, key_ptr[batch], allowed))
    counts = (keys * chance.repeat(heads) - start).ceil().clamp(min=0).long()
    rowptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    row = torch.repeat_interleave(counts)
    number = torch.arange(row.numel(), device=row.device) - rowptr[row]
    key = ((number + start[row]) * spacing[row]).long()
    return rowptr, (shift[row] + torch.minimum(key, keys[row] - 1)).int()


def _sample_block(
    rate: Tensor,
    key: Tensor,
    reach: Tensor,
    counter: tuple[int, int],
    seed: int,
    method: str,
    exploration: float,
    clamp: bool,
) -> tuple[Tensor, Tensor]:
    """Sorted edges of one head of one sequence, tokens counted from 0: rates [n, K], memberships [m, K].

    Whatever decides on a row comes from the keys that it may reach, ``[n]``.
    """
    num_keys = key.size(0)
    total = key.cumsum(0)  # [m, K]
    mass = torch.cat([rate * total[reach - 1], exploration * reach[:, None]], dim=1)  # [n, K+1]
    bound = (rate * key.cummax(0).values[reach - 1]).sum(1) + exploration
    expected = mass.sum(1)
    check_expected(expected)
    stretch, way = plan_rows(expected, bound, reach, method)
    rows = [(way == one).nonzero()[:, 0] for one in (PROPOSALS, GAPS, COINS)]
    parts = [
        _propose_rows(rate, key, total, reach, mass, stretch, rows[PROPOSALS], counter, seed, method, exploration),
        _skip_rows(rate, key, reach, bound, rows[GAPS], counter, seed, exploration),
        _flip_rows(rate, key, reach, rows[COINS], counter, seed, method, exploration, clamp),
    ]
    edge = torch.cat(parts).sort().values
    return torch.div(edge, num_keys, rounding_mode="floor"), edge % num_keys


def check_expected(expected: Tensor) -> None:
    """Refuse rates without a number of edges to expect."""
    if not bool(expected.isfinite().all()):
        raise ValueError(
            "Expected 'rate' and 'member' to be finite (got NaN or infinity as the expected number of edges of a row). "
            "Look for NaN in the queries and keys that they are made from."
        )


def plan_rows(expected: Tensor, bound: Tensor, num_keys: Tensor | int, method: str) -> tuple[Tensor, Tensor]:
    """How each row is sampled: the factor of its Poisson rates, and the cheapest of the three ways.

    With ``bound`` >= every probability of the row, rates ``c p`` with ``c = -log(1 - bound) / bound`` propose every
    pair often enough for thinning to reach p exactly. All in float64, so that every backend decides alike.

    Args:
        expected: Expected number of keys of each row, float64.
        bound: Bound on the probabilities of each row, float64.
        num_keys: Keys that the row may attend to.
        method: ``"bernoulli"`` or ``"fastrg"``.
    """
    if method == "fastrg":
        return torch.ones_like(bound), torch.where(expected * PROPOSAL_COST < num_keys, PROPOSALS, COINS)
    stretch = torch.where(bound > 0, -torch.log1p(-bound.clamp(max=1 - 1e-12)) / bound, 1.0)
    proposals, gaps = expected * stretch * PROPOSAL_COST, bound * num_keys * GAP_COST
    way = torch.where(gaps <= proposals, GAPS, PROPOSALS)
    return stretch, torch.where((bound > 1 - 1e-12) | ~(torch.minimum(gaps, proposals) < num_keys), COINS, way)


def toss(threshold: Tensor, place: Tensor, stream: Tensor | int, head: Tensor | int, seed: int) -> Tensor:
    """Whether the random word of each pair lies below a threshold, ``[..., m]`` bool.

    Key j looks at byte ``j % 4`` of word ``j // 64 % 4`` of counter ``16 (j // 256) + j // 4 % 16``, an order in which
    sixteen counters at a time are written in a row.

    The word's top byte and its other 24 bits come from different counters, so that a byte is drawn for every pair and
    the rest only for the one pair in 256 whose byte does not decide.

    Args:
        threshold: ``[..., m]`` int64 in ``0 .. 2**32``.
        place: Number of the query in its sequence, ``[...]``.
        stream, head: Of the query, ``[...]`` or a number for all.
        seed: 64 bits.
    """
    row = [torch.as_tensor(x, device=threshold.device).expand(threshold.shape[:-1]) for x in (place, stream, head)]
    num_keys = threshold.size(-1)
    block = torch.arange(16 * ((num_keys + 255) // 256), device=threshold.device)
    i, stream, head = (x[..., None] for x in row)
    words = torch.stack(philox(block, i, stream & _WORD, head | COIN_BYTE << 24, seed), dim=-2)  # [..., 4, blocks]
    words = words.unflatten(-1, (-1, 16)).transpose(-3, -2)[..., None]  # [..., m / 256, 4, 16, 1]
    byte = torch.cat([words & 255, *(words >> 8 * part & 255 for part in (1, 2, 3))], dim=-1).flatten(-4)
    byte = byte[..., :num_keys].to(torch.int16)
    first = (threshold >> 24).to(torch.int16)
    hit, close = byte < first, byte == first
    j = close.nonzero()[:, -1]
    i, stream, head = (x[..., None].expand_as(close)[close] for x in row)
    words = torch.stack(philox(j >> 2, i, stream & _WORD, head | COIN_REST << 24, seed), dim=-1)
    hit[close] = words[torch.arange(len(j), device=j.device), j % 4] >> 8 < threshold[close] & 0xFFFFFF
    return hit


def _flip_rows(
    rate: Tensor,
    key: Tensor,
    reach: Tensor,
    rows: Tensor,
    counter: tuple[int, int],
    seed: int,
    method: str,
    exploration: float,
    clamp: bool,
) -> Tensor:
    """One coin for each pair of these rows: edge iff its 32-bit word lies below p * 2**32, see :func:`toss`."""
    stream, head = counter
    num_keys = key.size(0)
    j = torch.arange(num_keys, device=key.device)
    edges = [rows.new_empty(0)]
    for part in rows.split(max(1, 2**22 // num_keys)):
        allowed = j < reach[part, None]
        p = (rate[part] @ key.T + exploration) * allowed  # [rows, m]
        if method == "fastrg":
            p = -torch.expm1(-p)
        elif not clamp and bool((p > 1 + 1e-5 + exploration).any()):
            raise ValueError(over_one(float(p.max()) - exploration))
        hit = toss((p.clamp(max=1) * 2.0**32).long(), part, stream, head, seed)
        local, col = hit.nonzero(as_tuple=True)
        edges.append(part[local] * num_keys + col)
    return torch.cat(edges)


def _skip_rows(
    rate: Tensor,
    key: Tensor,
    reach: Tensor,
    bound: Tensor,
    rows: Tensor,
    counter: tuple[int, int],
    seed: int,
    exploration: float,
) -> Tensor:
    """Keys at geometric distances, as if every p were the row's bound, each kept with probability p / bound."""
    stream, head = counter
    num_keys = key.size(0)
    place, edges, step = torch.full_like(rows, -1), [rows.new_empty(0)], 0
    while rows.numel():
        words = philox(torch.full_like(rows, step), rows, stream, head | GAP << 24, seed)
        u = ((words[0] << 21 | words[1] >> 11) + 1).double() * 2.0**-53
        gap = -u.log() * (-1 / torch.log1p(-bound[rows]))
        place = place + 1 + torch.where(gap < num_keys, gap, num_keys).long()
        inside = place < reach[rows]
        rows, place, word = rows[inside], place[inside], words[2][inside]
        keep = word.double() * bound[rows] < ((rate[rows] * key[place]).sum(1) + exploration) * 2.0**32
        edges.append((rows * num_keys + place)[keep])
        step += 1
    return torch.cat(edges)


def over_one(p: float) -> str:
    """Message for an SBM whose edge probability exceeds one."""
    return (
        f"Expected edge probabilities in [0, 1] (got {p:.4g}). "
        "Scale the memberships or the block matrix, or pass clamp=True to cut probabilities at 1."
    )


def cut_chance(chance: Tensor) -> Tensor:
    """Probabilities in float64, cut to [0, 1]; NaN counts as 0."""
    return chance.detach().double().nan_to_num(0.0).clamp(0, 1)


def check_keys(num_keys: int) -> None:
    """Raise ValueError where ``col`` in int32 cannot number the keys."""
    if num_keys > 2**31:
        raise ValueError(
            f"Expected at most 2^31 keys in a batch, whose numbers fit int32 (got {num_keys:,}). "
            "Sample fewer sequences at once."
        )


def _propose_rows(
    rate: Tensor,
    key: Tensor,
    total: Tensor,
    reach: Tensor,
    mass: Tensor,
    stretch: Tensor,
    rows: Tensor,
    counter: tuple[int, int],
    seed: int,
    method: str,
    exploration: float,
) -> Tensor:
    """Poisson proposals in each of these rows, without repeats, thinned to the exact probability."""
    stream, head = counter
    num_keys, blocks = key.shape
    mass, stretch = mass[rows], stretch[rows]
    count = _poisson(mass.sum(1) * stretch, rows, counter, seed)
    local = torch.repeat_interleave(count, output_size=int(count.sum()))
    if local.numel() == 0:
        return rows.new_empty(0)
    number = torch.arange(local.numel(), device=local.device) - (count.cumsum(0) - count)[local]
    words = philox(number, rows[local], stream, head | PROPOSAL << 24, seed)
    block = _invert(mass, words[0], local)
    keys = reach[rows[local]]
    member = _draw_key(total, words[1], block.clamp(max=blocks - 1), keys)
    col = torch.where(block < blocks, member, words[1] * keys >> 32)
    edge, order = torch.sort(rows[local] * num_keys + col, stable=True)
    first = torch.ones_like(edge, dtype=torch.bool)
    first[1:] = edge[1:] != edge[:-1]
    edge, order = edge[first], order[first]
    if method == "fastrg":
        return edge
    p = torch.cat([(rate[e // num_keys] * key[e % num_keys]).sum(1) for e in edge.split(2**16)]) + exploration
    keep = words[2][order].double() * -torch.expm1(-stretch[local[order]] * p) < p * 2.0**32
    return edge[keep]


def _draw_key(total: Tensor, word: Tensor, block: Tensor, reach: Tensor) -> Tensor:
    """Draw one of the first ``reach`` keys by their memberships in a block, whose sums over keys are ``total`` [m, K].

    The first key whose sum lies above the word's share of all of them: by halves, as every backend does. A sum holds
    no later key, so that no draw depends on one.
    """
    target = (word.double() + 0.5) * 2.0**-32 * total[reach - 1, block]
    first, last = torch.zeros_like(reach), reach - 1
    for _ in range(total.size(0).bit_length()):
        half = torch.div(first + last, 2, rounding_mode="floor")
        below = total[half, block] <= target
        first, last = torch.where(below & (first < last), half + 1, first), torch.where(below, last, half)
    return first


def _invert(mass: Tensor, word: Tensor, row: Tensor) -> Tensor:
    """Draw from row ``row[e]`` of unnormalised distributions ``[R, L]`` by the word of each draw.

    Inverse CDF in 32-bit fixed point.
    """
    cumulative = mass.cumsum(1)
    bounds = (cumulative * (2.0**32 / cumulative[:, -1:])).nan_to_num(2.0**32).long()
    bounds[:, -1] = 2**32
    offset = torch.arange(mass.size(0), device=mass.device) << 32
    return torch.searchsorted((bounds + offset[:, None]).flatten(), word + offset[row], right=True) - row * mass.size(1)


def _poisson(rate: Tensor, rows: Tensor, counter: tuple[int, int], seed: int) -> Tensor:
    """Poisson counts by inversion, in equal parts of at most 256, as many as the rate needs: exp(-256) is normal."""
    stream, head = counter
    parts = (rate / 256).ceil().clamp(min=1).long()
    total = torch.zeros_like(parts)
    for part in range(int(parts.max()) if parts.numel() else 0):
        lam = torch.where(part < parts, rate / parts, 0.0)
        words = philox(torch.full_like(rows, part), rows, stream, head | COUNT << 24, seed)
        u = ((words[0] << 21) | (words[1] >> 11)).double() * 2.0**-53
        count = torch.zeros_like(total)
        term = torch.exp(-lam)
        left = u - term
        while bool((left >= 0).any()):
            more = left >= 0
            count += more
            term = term * (lam * (1 / count.clamp(min=1).double()))
            left = torch.where(more, left - term, left)
            left = torch.where(term > 0, left, -1.0)  # the tail beyond double precision
        total += count
    return total


def invalid_row(rowptr: Tensor, col: Tensor, query_ptr: Tensor, key_ptr: Tensor, heads: int) -> Tensor:
    rows, num_edges = rowptr.numel() - 1, col.numel()
    number, starts, ends = torch.arange(rows, device=col.device), rowptr[:-1], rowptr[1:]
    wrong = (starts < 0) | (ends < starts) | (ends > num_edges)
    if num_edges:
        low, high = (
            torch.repeat_interleave(side, query_ptr.diff(), output_size=rows // heads).repeat(heads)
            for side in (key_ptr[:-1], key_ptr[1:])
        )
        first, last = starts.clamp(0, num_edges - 1), (ends - 1).clamp(0, num_edges - 1)
        # [E], among the edges up to this one
        descents = torch.cat([rowptr.new_zeros(1), (col[1:] <= col[:-1]).cumsum(0)])
        wrong |= (ends > starts) & ((col[first] < low) | (col[last] >= high) | (descents[last] > descents[first]))
    least = torch.where(wrong, number, rows).amin()
    return torch.where(least == rows, -1, least)
