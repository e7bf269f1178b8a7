"""The effect of each edge on the loss in plain torch: ``edge_effect``, ``weigh_effect`` and ``effect_gradients``.

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`. Not here: which pairs are probed (``systematic``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..segments import edge_row, segment_max, segments, upcast
from .edges import apply_gate_and_bias, edge_dot, edge_dot_backward, edge_ends, row_dots
from .sampling import MAX_PROB


def effect_weight(p: Tensor, eta: Tensor, probing: bool = False) -> Tensor:
    """Weight of the effect of an edge, or of a probe, from its probability p and the probability eta of a probe."""
    part = torch.where(eta > 0, 0.5, 1.0).to(p.dtype)  # without probes the edges stand for absent pairs, too
    few = torch.minimum(p, part)
    seen = torch.maximum(eta + few - eta * few, few / part)
    weight = (seen - few) / (seen * (1 - few) * eta) if probing else 1 / seen
    nothing = (p > MAX_PROB) | (eta == 0) if probing else p > MAX_PROB  # a probe of probability 0 has weight 0
    return torch.where(nothing, 0, weight)


def weigh_effect(
    effect: Tensor, prob: Tensor, rowptr: Tensor, chance: Tensor, forced: Tensor | None, exploration: float,
    probing: bool,
) -> Tensor:  # fmt: skip
    """Gradients of the probabilities of edges ``[E]``, or of probes, from their effects ``[E]``.

    ``chance`` is that of a probe ``[N]``, the same in every head. Edges that are ``forced`` ``[E]`` send none.
    """
    eta = upcast(chance)[edge_row(rowptr, prob.numel()) % chance.numel()]
    grad = (upcast(effect) * effect_weight(upcast(prob) + exploration, eta, probing)).to(prob.dtype)
    return grad if forced is None else grad.masked_fill_(forced, 0)


def find_edges(edges: Tensor, probes: Tensor) -> Tensor:
    """Mask of the probes that are edges, ``[E']`` bool; both are given as ascending indices of pairs."""
    if not edges.numel():
        return torch.zeros_like(probes, dtype=torch.bool)
    return edges[torch.searchsorted(edges, probes).clamp(max=edges.numel() - 1)] == probes


def leave_one_out(
    rowptr: Tensor, edges: tuple[Tensor, Tensor, Tensor], probes: tuple[Tensor, Tensor, Tensor], is_edge: Tensor
) -> tuple[Tensor, Tensor]:
    """The effect of each edge and of each probe, from the logarithms of their weights and from their gains.

    Args:
        rowptr: Offsets of the rows among the edges.
        edges: Row of each edge ``[E]``, logit and gain ``[E, ...]``; numbers behind the first are rows of their own.
        probes: The same of the probes.
        is_edge: Which probes are edges, ``[E']`` bool; their effect is 0.
    """
    (row, logit, gain), (probe_row, probe_logit, probe_gain) = edges, probes
    rows, shape = rowptr.numel() - 1, logit.shape[1:]
    # Weights and gains of each row without its heaviest edge, so that no other edge is ever subtracted from a sum that
    # it dominates.
    index = row.view(-1, *[1] * len(shape)).expand_as(logit)
    number = torch.arange(row.numel(), device=row.device).view(-1, *[1] * len(shape)).expand_as(logit)
    top = segment_max(logit, index, rows)
    heaviest = torch.where(logit == top[row], number, row.numel())
    heaviest = number.new_full((rows, *shape), row.numel()).scatter_reduce(0, index, heaviest, "amin")
    best = heaviest[row] == number
    second = segment_max(torch.where(best, -math.inf, logit), index, rows)
    weight = torch.where(best | (second[row] == -math.inf), 0, (logit - second[row]).exp())
    other_weights, other_gains = segments(weight, rowptr), segments(weight * gain, rowptr)
    ratio = torch.where(second == -math.inf, 0, (second - top).exp())
    best_gain = segments(torch.where(best, gain, 0), rowptr)
    has_edges = top > -math.inf
    total = torch.where(top == -math.inf, 0, 1 + other_weights * ratio)
    total_gain = torch.where(top == -math.inf, 0, best_gain + other_gains * ratio)

    share = weight * ratio[row]  # exp(logit - top), of all but the heaviest
    without = (other_gains / other_weights.where(other_weights != 0, 1))[row]  # the heaviest
    others = torch.where(best, without, (total_gain[row] - share * gain) / (total[row] - share))
    effect = torch.where(best, 1, share) / total[row] * (gain - others)
    effect = torch.where(logit == -math.inf, 0, effect)
    # odds of being without the probe
    odds = torch.where(has_edges[probe_row], total[probe_row] * (top[probe_row] - probe_logit).exp(), 0)
    mean = (total_gain / total.where(total != 0, 1))[probe_row]
    probe_effect = torch.where(probe_logit == -math.inf, 0, (probe_gain - mean) / (1 + odds))
    return effect, torch.where(is_edge.view(-1, *[1] * len(shape)), 0, probe_effect)


def edge_effect(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None,
    probe_rowptr: Tensor, probe_col: Tensor, probe_bias: Tensor | None, scale: float, rate: Tensor | None,
    member: Tensor | None, chance: Tensor | None, exploration: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""The effect of each edge ``[E]``, and of each probe ``[E']``, on the loss. Cost O((E + E') (C + K)).

    It is the loss with the edge less the loss without it, given the other edges of the row: exactly so for a loss that
    is linear in the output, to first order for any other. With :math:`w_{ij} = \exp(\text{scale} \cdot \langle q_i, k_j
    \rangle + b_{ij})`, gains :math:`g_{ij} = (\partial L / \partial o_i) \cdot v_j` and sums over the edges of row i
    other than j itself,

    .. math::
        \Delta_{ij} = \frac{w_{ij}}{w_{ij} + \sum w_{il}} \Big( g_{ij} - \frac{\sum w_{il} g_{il}}{\sum w_{il}} \Big) ,

    where the last fraction is 0 if there is no other edge. The effect of a probe that is an edge is 0. No sum is ever
    subtracted from one that it dominates.

    With rates, memberships and the ``chance`` :math:`\eta_i` of a probe, effects are multiplied by their weights in an
    estimate of :math:`\partial L / \partial p`, for :math:`p_{ij} = \langle \text{rate}_i, \text{member}_j \rangle +
    \text{exploration}`: with p cut at 1/2 and :math:`d = \max(p + \eta - p \eta, 2 p)`, :math:`1 / d` for an edge and
    :math:`(d - p) / (d \, (1 - p) \, \eta)` for a probe; :math:`1 / p` where :math:`\eta = 0`, and 0 where
    :math:`p > 1`. docs/concepts.md derives it.
    """
    measured = []
    for pointer, tokens, extra in ((rowptr, col, bias), (probe_rowptr, probe_col, probe_bias)):
        row, end = edge_ends(query, key, pointer, tokens)
        logit = apply_gate_and_bias(row_dots(query, key, row, end) * scale, None, extra, "score")
        measured.append((row, logit, row_dots(grad_out, value, row, end)))
    (row, logit, gain), (probe_row, probe_logit, probe_gain) = measured

    is_edge = find_edges(row * key.size(1) + col, probe_row * key.size(1) + probe_col)
    effect, probe_effect = leave_one_out(rowptr, (row, logit, gain), (probe_row, probe_logit, probe_gain), is_edge)
    if rate is not None and member is not None and chance is not None:
        eta = upcast(chance).repeat(query.size(0))
        p, probe_p = (
            edge_dot(upcast(rate), upcast(member), pointer, tokens) + exploration
            for pointer, tokens in ((rowptr, col), (probe_rowptr, probe_col))
        )
        effect = effect * effect_weight(p, eta[row])
        probe_effect = probe_effect * effect_weight(probe_p, eta[probe_row], probing=True)
    return effect.to(query.dtype), probe_effect.to(query.dtype)


def effect_gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None,
    probe_rowptr: Tensor, probe_col: Tensor, probe_bias: Tensor | None, scale: float, rate: Tensor, member: Tensor,
    chance: Tensor, exploration: float, forced: Tensor | None, factor: float, need_rate: bool, need_member: bool, *,
    effects: Callable[..., Any] = edge_effect, dot_backward: Callable[..., Any] = edge_dot_backward,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of rates and memberships from the effects of edges and probes, which are linear in ``grad_out``."""
    edges, probes = (rowptr, col), (probe_rowptr, probe_col)
    arguments = (query, key, value, *edges, bias, *probes, probe_bias, scale, rate, member, chance, exploration)
    effect, probe_effect = effects(grad_out if factor == 1 else grad_out * factor, *arguments)
    effect = effect if forced is None else effect.masked_fill(forced, 0)
    of_rate, of_member = dot_backward(effect.to(rate.dtype), rate, member, *edges, need_rate, need_member)
    more = dot_backward(probe_effect.to(rate.dtype), rate, member, *probes, need_rate, need_member)
    return of_rate.add_(more[0]), of_member.add_(more[1])
