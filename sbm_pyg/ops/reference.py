"""Every op in plain torch: the meaning that each backend is tested against, and what devices without kernels run.

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`; any device, any floating dtype. Everything is done for
all rows at once: no loop over heads, sequences or rows, few operations, and few waits for the device (docs/kernels.md).
Not here: checks of what comes in (the public border does that).

Shapes: N queries, M keys, E edges, H heads, C channels, K blocks, B sequences; row ``r = h * N + i``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from .kept import Kept
from .words import dropout_keeps, dropout_words

ROWS = 2**20
"""Edges that are made at a time, where many are made in rows."""

# ------------------------------------------------------------------ edges of a graph


def edge_row(rowptr: Tensor, num_edges: int) -> Tensor:
    """Row of each edge, ``[E]`` int64."""
    return torch.repeat_interleave(rowptr.diff(), output_size=num_edges)


def cuts(before: Tensor, room: int) -> list[tuple[int, int, int, int]]:
    """Cuts rows where ``room`` things or more are together.

    Args:
        before: How many things come before each row, and before the end, ``[n+1]`` int64.

    Returns:
        Of each piece its rows, from and to, and its things.
    """
    steps = torch.arange(0, max(int(before[-1]), 1), room, device=before.device)[1:]
    inner = (torch.searchsorted(before, steps, right=True) - 1).unique()
    rows = torch.cat([inner.new_zeros(1), inner[inner > 0], inner.new_tensor([before.numel() - 1])])
    return [(*row, *thing) for row, thing in zip(*(pairwise(x.tolist()) for x in (rows, before[rows])), strict=True)]


def runs(first: Tensor, count: Tensor, total: int | None = None, dtype: torch.dtype = torch.int64) -> Tensor:
    """``first[i], first[i] + 1, ..., first[i] + count[i] - 1`` for each i, one after the other, ``[sum(count)]``.

    Where they are many, some at a time, so that memory beyond the result is little.
    """
    ends = count.cumsum(0)
    total = int(ends[-1]) if total is None else total
    shift = first - (ends - count)
    if torch.compiler.is_compiling() or total <= ROWS:
        many = torch.repeat_interleave(shift, count, output_size=total)
        return many.add_(torch.arange(total, device=first.device)).to(dtype)
    out, before = torch.empty(total, dtype=dtype, device=first.device), torch.cat([ends.new_zeros(1), ends])
    for low, high, begin, end in cuts(before, ROWS):
        many = torch.repeat_interleave(shift[low:high], count[low:high], output_size=end - begin)
        out[begin:end] = many.add_(torch.arange(begin, end, device=first.device))
    return out


def compress(parts: list[tuple[Tensor, ...]], rows: int) -> tuple[Tensor, ...]:
    """Compressed rows, from parts that hold some of them each.

    Args:
        parts: At least one. Which rows it holds, ``[r]``; how many values they have, ``[r]``; and their values, row by
            row, ``[e]``, of one kind or several. The list is emptied, for memory's sake.
        rows: How many rows there are. Those that no part holds are empty.

    Returns:
        The offsets, ``[rows+1]``, and the values of each kind, ``[E]``.
    """
    degree = parts[0][1].new_zeros(rows)
    for row, count, *_ in parts:
        degree[row] = count
    rowptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    out = [value.new_empty(int(rowptr[-1])) for value in parts[0][2:]]
    while parts:
        row, count, *values = parts.pop()
        at = runs(rowptr[row], count, values[0].numel())
        for into, value in zip(out, values, strict=True):
            into[at] = value
    return rowptr, *out


def dropout_mask(rowptr: Tensor, col: Tensor, heads: int, num_keys: int, dropout: float, seed: int) -> Tensor:
    """Edges that attention dropout keeps, ``[E]`` bool, by :func:`dropout_keeps`."""
    num_queries = (rowptr.numel() - 1) // max(heads, 1)
    query, key = dropout_words(heads, num_queries, num_keys, seed, col.device)
    row = edge_row(rowptr, col.numel())
    end = torch.div(row, max(num_queries, 1), rounding_mode="floor") * num_keys + col
    return dropout_keeps(query.flatten()[row], key.flatten()[end], dropout)


def _ends(query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    """Row of the query and row of the key of each edge, in tensors flattened over heads."""
    row = edge_row(rowptr, col.numel())
    return row, torch.div(row, query.size(1), rounding_mode="floor") * key.size(1) + col


def like_lengths(query_ptr: Tensor, key_ptr: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Sequences of like length together: the tokens of both sides, padded by -1, and which sequences they are."""
    size = torch.maximum(query_ptr.diff(), key_ptr.diff()).float().log2().ceil()
    for like in size.unique():
        (which,) = (size == like).nonzero(as_tuple=True)
        yield _padded(query_ptr, which), _padded(key_ptr, which), which


def _padded(ptr: Tensor, which: Tensor) -> Tensor:
    """The tokens of these sequences, ``[b, L]``; -1 is none."""
    start, length = ptr[which, None], ptr.diff()[which, None]
    place = torch.arange(int(length.max()), device=ptr.device)
    return torch.where(place < length, start + place, -1)


def wide(x: Tensor) -> Tensor:
    """Statistics accumulate in float32 or better."""
    return x if x.dtype == torch.float64 else x.float()


def segments(x: Tensor, ptr: Tensor, kind: str = "sum") -> Tensor:
    """Sum, or maximum, of each segment of ``[E, ...]``, one value after the other: the same bits in every call.

    Sums by index are not, on a GPU. Devices that know no segments take them nevertheless. A maximum is of numbers that
    are not negative.
    """
    if x.device.type in ("cpu", "cuda"):
        return torch.segment_reduce(x, kind, offsets=ptr, axis=0, unsafe=True, initial=0)
    out, of = x.new_zeros(ptr.numel() - 1, *x.shape[1:]), edge_row(ptr, x.size(0))
    if kind == "sum":
        return out.index_add_(0, of, x)
    return out.scatter_reduce_(0, of.view(-1, *[1] * (x.dim() - 1)).expand_as(x), x, "amax")


_ORDERS = Kept()


def by_key(rowptr: Tensor, col: Tensor, heads: int, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """The edges of a graph ordered by head and key.

    Returns:
        Their places, ``[E]``, the offsets of the keys among them, ``[H*M+1]``, and the row of each, ``[E]``. They are
        kept for as long as ``col`` lives, so that all backward passes over a graph share them.
    """
    return _ORDERS.get(_by_key, col, rowptr, heads, num_keys)


def _by_key(col: Tensor, rowptr: Tensor, heads: int, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    row = edge_row(rowptr, col.numel())
    head = torch.div(row, max((rowptr.numel() - 1) // max(heads, 1), 1), rounding_mode="floor")
    end = torch.add(col, head, alpha=num_keys)
    rising, order = end.sort(stable=True)
    return order, torch.searchsorted(rising, torch.arange(heads * num_keys + 1, device=col.device)), row[order]


def edge_dot(query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor) -> Tensor:
    row, end = _ends(query, key, rowptr, col)
    return (wide(query).flatten(0, 1)[row] * wide(key).flatten(0, 1)[end]).sum(-1).to(query.dtype)


def edge_dot_backward(
    grad: Tensor, query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor, need_query: bool, need_key: bool
) -> tuple[Tensor, Tensor]:
    _, end = _ends(query, key, rowptr, col)
    weight, flat_query, flat_key = wide(grad)[:, None], wide(query).flatten(0, 1), wide(key).flatten(0, 1)
    grad_query, grad_key = torch.zeros_like(query), torch.zeros_like(key)
    if need_query:
        grad_query = segments(weight * flat_key[end], rowptr).view(query.shape).to(query.dtype)
    if need_key:
        order, ptr, rows = by_key(rowptr, col, *key.shape[:2])
        grad_key = segments(weight[order] * flat_query[rows], ptr).view(key.shape).to(key.dtype)
    return grad_query, grad_key


def _segment_max(src: Tensor, row: Tensor, num_rows: int) -> Tensor:
    return src.new_full((num_rows, *src.shape[1:]), -math.inf).scatter_reduce(0, row, src, "amax")


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
    score = (wide(query).flatten(0, 1)[row] * wide(key).flatten(0, 1)[end]).sum(-1) * scale
    return score, logits(score, gate, bias, gate_form)


def logits(score: Tensor, gate: Tensor | None, bias: Tensor | None, gate_form: str) -> Tensor:
    """Logits of scaled scores, in float32 or better."""
    logit = wide(score)
    if gate is not None:
        logit = wide(gate) * logit if gate_form == "score" else logit + wide(gate).log()
    return logit if bias is None else logit + wide(bias)


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
    total = segments(weight, rowptr)
    alpha = weight / torch.where(total == 0, 1, total)[row]
    if dropout > 0:
        alpha = alpha * dropout_mask(rowptr, col, heads, key.size(1), dropout, seed) / (1 - dropout)
    values = wide(value).flatten(0, 1)
    out = segments(alpha[:, None] * values[end], rowptr)
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
    flat_grad, flat_query, flat_key, flat_value = (wide(x).flatten(0, 1) for x in (grad_out, query, key, value))
    gain = (flat_grad[row] * flat_value[end]).sum(-1)
    kept = alpha
    if dropout > 0:
        keep = dropout_mask(rowptr, col, query.size(0), key.size(1), dropout, seed).to(alpha.dtype) / (1 - dropout)
        gain, kept = gain * keep, alpha * keep
    mean_gain = (flat_grad * wide(out).flatten(0, 1)).sum(-1)
    grad_logit = alpha * (gain - mean_gain[row])
    grad_score = grad_logit * scale if gate is None or gate_form == "weight" else grad_logit * scale * wide(gate)
    grad_query = segments(grad_score[:, None] * flat_key[end], rowptr)
    order, ptr, rows = by_key(rowptr, col, *key.shape[:2])
    grad_key = segments(grad_score[order][:, None] * flat_query[rows], ptr)
    grad_value = segments(kept[order][:, None] * flat_grad[rows], ptr)
    empty = grad_logit.new_empty(0)
    grad_gate = grad_bias = empty
    if gate is not None and need_gate:
        grad_gate = (grad_logit * score if gate_form == "score" else grad_logit / wide(gate)).to(gate.dtype)
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


def weigh_effect(
    effect: Tensor, prob: Tensor, rowptr: Tensor, chance: Tensor, forced: Tensor | None, exploration: float,
    probing: bool,
) -> Tensor:  # fmt: skip
    """Gradients of the probabilities of edges ``[E]``, or of probes, from their effects ``[E]``.

    ``chance`` is that of a probe ``[N]``, the same in every head. Edges that are ``forced`` ``[E]`` send none.
    """
    eta = wide(chance)[edge_row(rowptr, prob.numel()) % chance.numel()]
    grad = (wide(effect) * effect_weight(wide(prob) + exploration, eta, probing)).to(prob.dtype)
    return grad if forced is None else grad.masked_fill_(forced, 0)


def find_edges(edges: Tensor, probes: Tensor) -> Tensor:
    """Which probes are edges, ``[E']`` bool, from ascending numbers of both among all pairs."""
    if not edges.numel():
        return torch.zeros_like(probes, dtype=torch.bool)
    return edges[torch.searchsorted(edges, probes).clamp(max=edges.numel() - 1)] == probes


def leave_one_out(
    rowptr: Tensor, edges: tuple[Tensor, Tensor, Tensor], probes: tuple[Tensor, Tensor, Tensor], known: Tensor
) -> tuple[Tensor, Tensor]:
    """The effect of each edge and of each probe, from the logarithms of their weights, and their gains.

    Args:
        rowptr: Offsets of the rows among the edges.
        edges: Row of each edge ``[E]``, logit and gain ``[E, ...]``; numbers behind the first are rows of their own.
        probes: The same of the probes.
        known: Which probes are edges, ``[E']`` bool; their effect is 0.
    """
    (row, logit, gain), (probe_row, probe_logit, probe_gain) = edges, probes
    rows, shape = rowptr.numel() - 1, logit.shape[1:]
    # Weights and gains of each row without its heaviest edge, so that no other edge is ever subtracted from a sum that
    # it dominates.
    index = row.view(-1, *[1] * len(shape)).expand_as(logit)
    place = torch.arange(row.numel(), device=row.device).view(-1, *[1] * len(shape)).expand_as(logit)
    top = _segment_max(logit, index, rows)
    heaviest = torch.where(logit == top[row], place, row.numel())
    heaviest = place.new_full((rows, *shape), row.numel()).scatter_reduce(0, index, heaviest, "amin")
    best = heaviest[row] == place
    second = _segment_max(torch.where(best, -math.inf, logit), index, rows)
    weight = torch.where(best | (second[row] == -math.inf), 0, (logit - second[row]).exp())
    rest, rest_gain = segments(weight, rowptr), segments(weight * gain, rowptr)
    ratio = torch.where(second == -math.inf, 0, (second - top).exp())
    best_gain = segments(torch.where(best, gain, 0), rowptr)
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
    return effect, torch.where(known.view(-1, *[1] * len(shape)), 0, probe_effect)


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
    sides = []
    for pointer, tokens, extra in ((rowptr, col, bias), (probe_rowptr, probe_col, probe_bias)):
        row, end = _ends(query, key, pointer, tokens)
        _, logit = _logits(query, key, row, end, None, extra, scale, "score")
        gain = (wide(grad_out).flatten(0, 1)[row] * wide(value).flatten(0, 1)[end]).sum(-1)
        sides.append((row, end, logit, gain))
    (row, end, logit, gain), (probe_row, _, probe_logit, probe_gain) = sides

    found = find_edges(row * key.size(1) + col, probe_row * key.size(1) + probe_col)
    effect, probe_effect = leave_one_out(rowptr, (row, logit, gain), (probe_row, probe_logit, probe_gain), found)
    if rate is not None and member is not None and chance is not None:
        eta = wide(chance).repeat(query.size(0))
        p, probe_p = (
            edge_dot(wide(rate), wide(member), pointer, tokens) + exploration
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


STEPS = 60
"""Of root finding: halving alone takes as many as a number has bits."""


def _columns(rowptr: Tensor, columns: int, num_values: int) -> tuple[Tensor, Tensor]:
    """Segment of each value of ``[G, E]``, flattened, later columns after earlier ones; and the offsets of segments."""
    first = torch.arange(columns, device=rowptr.device)[:, None]
    row = edge_row(rowptr, num_values) + first * (rowptr.numel() - 1)
    return row.flatten(), torch.cat([rowptr[:1], (rowptr[1:] + first * num_values).flatten()])


def segment_entmax(src: Tensor, rowptr: Tensor, alpha: Tensor) -> Tensor:
    """Bracketed Newton on tau; see :func:`sbm_pyg.ops.segment_entmax` for the law.

    Values ``[G, E]``, and an alpha for each column and segment, ``[G, S]``.
    """
    check_ptr(rowptr, src.size(1))
    if src.numel() == 0:
        return torch.empty_like(src)
    (row, ptr), num_rows = _columns(rowptr, *src.shape), alpha.numel()
    values, alpha = wide(src).flatten(), alpha.flatten().double()
    less, power = ((alpha - 1).to(values.dtype), (1 / (alpha - 1)).to(values.dtype)[row])
    z = less[row] * values
    top = _segment_max(z, row, num_rows)
    z = z - torch.where(top == -math.inf, 0, top)[row]  # a row whose values are all forbidden has none
    count = ptr.diff().to(z.dtype).clamp(min=1)
    low, high = -torch.ones_like(count), -(count**-less)  # mass >= 1 at low, <= 1 at high
    tau, done = low.clone(), torch.zeros_like(low, dtype=torch.bool)
    for _ in range(STEPS):
        slack = (z - tau[row]).clamp(min=0)
        part = slack.where(slack > 0, 1) ** (power - 1) * (slack > 0)
        steep, mass = segments(torch.stack([part, part * slack], 1), ptr).unbind(1)
        low, high = torch.where(mass > 1, tau, low), torch.where(mass <= 1, tau, high)
        step = tau + (mass - mass ** (1 - less)) / steep  # for the norm, which is nearly a straight line
        step = torch.where((step > low) & (step < high), step, (low + high) / 2)
        done |= (step - tau).abs() <= torch.finfo(z.dtype).eps * tau.abs()
        tau = torch.where(done, tau, step)  # so that no row depends on how long others take
    out = (z - tau[row]).clamp(min=0) ** power
    total = segments(out, ptr)
    return (out / torch.where(total == 0, 1, total)[row]).to(src.dtype).view(src.shape)


def segment_entmax_backward(
    grad: Tensor, out: Tensor, rowptr: Tensor, alpha: Tensor, need_alpha: bool
) -> tuple[Tensor, Tensor]:
    """``dx = u (dy - mean)`` with ``u = p^(2 - alpha)`` on the support, and ``mean = sum(u dy) / sum(u)``.

    With the entropies ``h = -p log p`` of a row, its ``dalpha = (sum(p dy) - mean) / (alpha - 1)^2 + (sum(h dy) - mean
    sum(h)) / (alpha - 1)``.
    """
    row, ptr = _columns(rowptr, *out.shape)
    p, dy, a = wide(out).flatten(), wide(grad).flatten(), alpha.flatten().double()
    u = torch.where(p > 0, p, 1) ** (2 - a).to(p.dtype)[row] * (p > 0)
    tilted, norm, whole = segments(torch.stack([u * dy, u, p], 1), ptr).unbind(1)
    mean = torch.where(whole == 0, 0, tilted / norm)  # a row of zeros has no support, a row of NaN stays one
    dsrc = (u * dy - u * mean[row]).to(out.dtype).view(out.shape)
    if not need_alpha:
        return dsrc, alpha.new_empty(0)
    p, dy = p.double(), dy.double()
    h = -torch.xlogy(p, p)
    shared, mixed, entropy = segments(torch.stack([p * dy, h * dy, h], 1), ptr).unbind(1)
    dalpha = (shared - mean) / (a - 1) ** 2 + (mixed - mean * entropy) / (a - 1)
    return dsrc, dalpha.to(alpha.dtype).view(alpha.shape)


def entmax_support(src: Tensor, rowptr: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Which values have a share, or are NaN: the offsets of their rows, ``[S+1]``, and their places, rising.

    Values ``[E]``, and an alpha for each row, ``[S]``.
    """
    place = segment_entmax(wide(src)[None], rowptr, alpha[None])[0].nonzero()[:, 0]
    return torch.searchsorted(place, rowptr), place


def reach(query_ptr: Tensor, key_ptr: Tensor, num_queries: int, is_causal: bool) -> Tensor:
    """Number of keys that each query may attend to, ``[N]`` int64: the first so many of its sequence.

    All of them, or with ``is_causal`` those whose place is not later than the query's.
    """
    batch = torch.repeat_interleave(query_ptr.diff(), output_size=num_queries)
    keys = key_ptr.diff()[batch]
    if not is_causal:
        return keys
    return torch.minimum(torch.arange(1, num_queries + 1, device=keys.device) - query_ptr[batch], keys)


def _reach_sums(x: Tensor, ptr: Tensor, other_ptr: Tensor, lag: int | None, end: int) -> Tensor:
    """For each token of the other side the sum of the tokens of its sequence, ``[H, end, K]`` in float32 or better.

    With a ``lag``, of those at places before its own plus ``lag`` alone, in float64.
    """
    batch = torch.repeat_interleave(other_ptr.diff(), output_size=end)
    if lag is None:
        return segments(wide(x).transpose(0, 1), ptr).transpose(0, 1)[:, batch]
    place = torch.arange(end, device=ptr.device) - other_ptr[batch] + lag
    before = torch.nn.functional.pad(x.double().cumsum(1), (0, 0, 1, 0))
    first = ptr[batch]
    return before[:, first + torch.minimum(place, ptr.diff()[batch])] - before[:, first]


def reach_dot(
    query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, is_causal: bool, is_strict: bool
) -> Tensor:
    total = _reach_sums(key, key_ptr, query_ptr, 1 - is_strict if is_causal else None, query.size(1))
    return (wide(query) * total.to(wide(query).dtype)).sum(-1)


def reach_dot_backward(
    grad: Tensor, query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, is_causal: bool, is_strict: bool,
    need_query: bool, need_key: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    d_query, d_key, weight = query.new_empty(0, 0, 0), key.new_empty(0, 0, 0), wide(grad)[..., None]
    if need_query:
        lag = 1 - is_strict if is_causal else None
        d_query = (weight * _reach_sums(key, key_ptr, query_ptr, lag, query.size(1))).to(query.dtype)
    if need_key:  # all queries of the sequence, less those before
        terms = weight.double() * query if is_causal else weight * query
        d_key = _reach_sums(terms, query_ptr, key_ptr, None, key.size(1))
        if is_causal:
            d_key = d_key - _reach_sums(terms, query_ptr, key_ptr, int(is_strict), key.size(1))
        d_key = d_key.to(key.dtype)
    return d_query, d_key


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
