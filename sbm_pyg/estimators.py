r"""Gradients of a loss to the probabilities of sampled edges: every estimator in one place.

In: the model of a graph, the graph that was sampled from it, and the attention over it. Out: gates, biases or an output whose backward pass
reaches :math:`p`. Not here: sampling, attention, and which estimator a layer uses by default (:class:`~sbm_pyg.SBMAttentionConv`).

With weights :math:`P_{ij}`, gains :math:`g_{ij} = (\partial L / \partial o_i) \cdot v_j`, scores :math:`s_{ij}` and the mean gain
:math:`\bar g_i = \sum_j P_{ij} g_{ij}` of a row:

==================  =======================================================================================  ==================
estimator           :math:`\partial L / \partial p_{ij}`                                                     over
==================  =======================================================================================  ==================
``"local"``         :math:`\Delta_{ij}`, the loss with the edge less that without, times a weight              edges and probes
``"mask"``          :math:`P_{ij} (g_{ij} - \bar g_i)`                                                       edges
``"paper"``         :math:`P_{ij} (g_{ij} - \bar g_i) \, s_{ij}` (eq. 9)                                     edges
``"relaxed"``       that of softmax(s + log p), no graph being sampled in training                           all pairs
``"concrete"``      that of softmax(s + log m), m a relaxed coin with probability p                          all pairs
``"none"``          0                                                                                        nothing
score function      :math:`(L - b) \, \partial \log \Pr(A) / \partial p_{ij}`, added to the loss             all pairs
==================  =======================================================================================  ==================

``"local"`` knows the law of method ``"bernoulli"`` alone. docs/learning.md derives them and compares them by experiment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .graph import AttentionGraph
from .ragged import readable
from .sampling import draw_seed, resolve_streams
from .sbm import SBM, check_model

__all__ = ["ESTIMATORS", "concrete_bias", "draw_probes", "local_expectation", "relaxed_bias", "score_function", "straight_through"]

GATE_FORM = {"paper": "score", "mask": "weight"}
RELAXATIONS = ("relaxed", "concrete")
ESTIMATORS = ("local", *GATE_FORM, *RELAXATIONS, "none")

_LEAST = 1e-9  # probability below which a logarithm is cut
_FEWER = "Take fewer heads or shorter sequences, or an estimator that does not look at all pairs."


def straight_through(sbm: SBM, graph: AttentionGraph, forced: Tensor | None = None) -> Tensor:
    """Gate of each edge, ``[E]``: exactly 1, with the gradient of its probability. O(E) forward, O(E K) backward.

    Args:
        sbm: Model of the graph.
        graph: The graph.
        forced: Edges that are there whatever p is, ``[E]`` bool; they send no gradient to it.

    Raises:
        TypeError, ValueError: The graph is not over the tokens of the model, or ``forced`` is no mask of its edges.
    """
    check_model(sbm)
    gate = sbm.edge_gate(graph)
    ops.check_forced(forced, graph.col)
    return gate if forced is None else torch.where(forced, gate.detach(), gate)


def draw_probes(sbm: SBM, per_query: float, *, seed: int, streams: Tensor | None = None) -> tuple[AttentionGraph, Tensor]:
    """Pairs drawn independently of the graph, where :func:`local_expectation` looks beside the edges. O(N per_query).

    Each query takes keys at equal distances from a random start (:func:`sbm_pyg.ops.sample_systematic`), so each key with the same
    probability.

    Args:
        sbm: Model whose tokens, heads and sequences they are over.
        per_query: Number of probes of each query and head, on average; a query with fewer keys gets all of them, so that
            ``math.inf`` means all pairs.
        seed: Seed of the graph; other random words are drawn from it.
        streams: As :func:`~sbm_pyg.sample_edges`.

    Returns:
        The probes, and the probability with which each key of a query is one, ``[N]``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``per_query`` is negative or NaN, ``seed`` or ``streams`` do not fit, or memory does not hold the probes and a number for each.
    """
    check_model(sbm)
    ops.checks.number("per_query", per_query, "[0, inf]", "It is an average number of probes.")
    _check_memory(sbm, per_query)
    chance = (per_query / sbm.key_ptr.diff().clamp(min=1)).clamp(max=1).to(sbm.query.dtype)
    chance = torch.repeat_interleave(chance, sbm.query_ptr.diff(), output_size=sbm.num_queries)
    streams = resolve_streams(streams, sbm.num_sequences, sbm.query_ptr.device)
    rowptr, col = ops.sample_systematic(chance, sbm.query_ptr, sbm.key_ptr, streams, sbm.heads, draw_seed(seed))
    return AttentionGraph._trusted(rowptr, col, sbm.num_queries, sbm.num_keys, sbm.heads, sbm.query_ptr, sbm.key_ptr), chance


def local_expectation(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sbm: SBM,
    graph: AttentionGraph,
    probes: AttentionGraph,
    chance: Tensor,
    *,
    bias: Tensor | None = None,
    probe_bias: Tensor | None = None,
    forced: Tensor | None = None,
    scale: float = 1.0,
    exploration: float = 0.0,
) -> Tensor:
    r"""The local expectation gradient: what each edge does to the loss, the others given.

    The exact gradient of an expected loss is :math:`\partial E[L] / \partial p_{ij} = E[L(A, A_{ij} = 1) - L(A, A_{ij} = 0)]`. The difference of a
    single pair is taken to first order in the attention's output (:func:`sbm_pyg.ops.edge_effect`), where it is a closed form of O(C). It is seen
    from the graph with the edge, with probability p, or from one without it by a probe, with probability :math:`(1 - p) \eta`. If the first
    counts :math:`\alpha / p` and the second :math:`(1 - \alpha) / ((1 - p) \eta)`, any :math:`\alpha` is unbiased where the loss is linear in the
    output; where it bends, the true difference lies half-way. So :math:`\alpha` is 1/2, but no more than the balance heuristic
    :math:`p / (p + \eta - p \eta)` where p is small, and no less than p, for the sake of variance; and 1 without probes
    (:math:`\eta = 0`). Where p and exploration exceed 1, the edge is certain and gets no gradient. O((E + E')(C + K)).

    All this is for graphs of method ``"bernoulli"``; under ``"fastrg"``, whose edges are fewer than p says, it is biased.

    Args:
        out: Output of the attention, ``[H, N, C']``.
        query, key, value: Of the attention.
        sbm: Model of the graph.
        graph: The graph.
        probes, chance: Of :func:`draw_probes`.
        bias, probe_bias: Score biases of edges ``[E]`` and probes ``[E']``.
        forced: Edges that are there whatever p is, ``[E]`` bool.
        scale: Factor of the scores.
        exploration: What was added to each probability when the graph was sampled.

    Returns:
        ``out``, whose backward pass also reaches the memberships and the block matrix.

    Raises:
        TypeError, ValueError: A shape, type or number does not fit, or a graph is not over the tokens of the model.

    Reference: Titsias and Lazaro-Gredilla, "Local Expectation Gradients for Black Box Variational Inference", NeurIPS 2015, for the idea of
    taking the expectation over one variable exactly; Veach and Guibas, SIGGRAPH 1995, for weighting samples of two sources by their sum
    (the balance heuristic).
    """
    check_model(sbm)
    sbm.check(graph)
    sbm.check(probes, "probes")
    ops.checks.tensors(chance=chance)
    if chance.device.type == "cpu" and readable(chance) and not bool(((chance >= 0) & (chance <= 1)).all()):
        raise ValueError("Expected 'chance' in [0, 1] (got a number outside). It is the second result of `draw_probes`.")
    pairs = (graph.rowptr, graph.col, bias), (probes.rowptr, probes.col, probe_bias)
    return ops.local_expectation(out, sbm.rate, sbm.key, query, key, value, *pairs, chance, forced, scale, exploration)


def _explored(sbm: SBM, graph: AttentionGraph, exploration: float, numbers: int) -> Tensor:
    """Probability of each edge with what was added to it, ``[E]``, where memory holds so many numbers for each."""
    check_model(sbm)
    ops.checks.number("exploration", exploration, "[0, 1]", "It is what was added to each probability.")
    sbm.check(graph)
    ops.checks.memory("graph", graph.num_edges, numbers * sbm.query.element_size(), graph.device, _FEWER)
    return sbm.edge_prob(graph) + exploration


def _check_memory(sbm: SBM, per_query: float) -> None:
    """Refuse more probes than fit into memory, each with a number in the precision of the model, without which it is no use."""
    device, bytes_each = sbm.query.device, (4 if sbm.query.device.type == "cpu" else 20) + sbm.query.element_size()
    if ops.checks.fits(sbm.heads * sbm.num_queries * sbm.num_keys, bytes_each, device) or not readable(sbm.query_ptr):
        return
    keys = sbm.key_ptr.diff().double().clamp(max=per_query + 1)  # a row takes up to one more
    count = sbm.heads * int((sbm.query_ptr.diff() * keys).sum())
    ops.checks.memory("per_query", count, bytes_each, device, f"Take fewer probes. {_FEWER}", "probes")


def relaxed_bias(sbm: SBM, graph: AttentionGraph, exploration: float = 0.0) -> Tensor:
    """Log-probability of each pair, ``[E]``: as a score bias over all pairs it replaces the mask by its expectation. O(E K).

    Args:
        sbm: Model of the pairs.
        graph: Usually all pairs.
        exploration: Added to each probability, in [0, 1].

    Raises:
        TypeError, ValueError: The graph is not over the tokens of the model, or memory does not hold a few numbers for each pair.
    """
    return _explored(sbm, graph, exploration, numbers=4).clamp(_LEAST, 1).log()


def concrete_bias(sbm: SBM, graph: AttentionGraph, temperature: float, *, seed: int, exploration: float = 0.0) -> Tensor:
    r"""Logarithm of a relaxed coin for each pair, ``[E]``: :math:`\log \sigma((\operatorname{logit} p + \operatorname{logit} u) / \tau)`. O(E K).

    Args:
        sbm: Model of the graph.
        graph: Usually all pairs.
        temperature: :math:`\tau > 0`; the coin hardens as it goes to 0.
        seed: Seed of the uniform words u.
        exploration: Added to each probability, in [0, 1].

    Raises:
        TypeError, ValueError: The graph is not over the tokens of the model, a number is out of range, or memory does not hold a few numbers for
            each pair.

    Reference: Maddison et al. and Jang et al., ICLR 2017.
    """
    ops.checks.number("temperature", temperature, "(0, inf)", "The coin hardens as it goes to 0.")
    p = _explored(sbm, graph, exploration, numbers=8).clamp(_LEAST, 1 - 1e-6)
    noise = torch.rand(p.shape, generator=torch.Generator(p.device).manual_seed(draw_seed(seed)), device=p.device, dtype=p.dtype).clamp(
        1e-6, 1 - 1e-6
    )
    return torch.nn.functional.logsigmoid((p.logit() + noise.logit()) / temperature)


def score_function(sbm: SBM, graph: AttentionGraph, loss: Tensor, exploration: float = 0.0) -> Tensor:
    r"""A scalar to add to the loss, whose gradient to the model is :math:`\sum_b (L_b - \bar L) \, \nabla \log \Pr(A_b)`.

    Unbiased for any loss (REINFORCE; Williams 1992), with the mean of the other sequences as baseline. Its variance grows with the number
    of pairs, and it costs O(N M K): a reference point, not a way to train.

    Args:
        sbm: Model of the graph.
        graph: Sampled from it, with nothing forced.
        loss: Loss of each sequence, ``[B]``.
        exploration: What was added to each probability when the graph was sampled, in [0, 1].

    Raises:
        TypeError, ValueError: The graph is not over the tokens of the model, the loss is not ``[B]``, or memory does not hold all pairs.
    """
    check_model(sbm)
    ops.checks.tensors(loss=loss)
    ops.checks.floating(loss=loss)
    ops.checks.shape("loss", loss, (sbm.num_sequences,), "[B]", "It holds one number per sequence, not their mean.")
    sbm.check(graph)
    if not ops.checks.fits(sbm.heads * sbm.num_queries * sbm.num_keys, 3 * sbm.query.element_size(), sbm.query.device):
        pairs = sbm.heads * int((sbm.query_ptr.diff() * sbm.key_ptr.diff()).sum())
        ops.checks.memory("sbm", pairs, 3 * sbm.query.element_size(), sbm.query.device, _FEWER, "pairs")
    batch = loss.numel()
    others = (loss.sum() - loss) / (batch - 1) if batch > 1 else torch.zeros_like(loss)
    advantage = (loss - others).detach()
    p = _explored(sbm, graph, exploration, numbers=4).clamp(1e-6, 1 - 1e-6)
    sequence = torch.repeat_interleave(sbm.query_ptr.diff(), output_size=sbm.num_queries).repeat(sbm.heads)[graph.edge_row]
    log_prob = p.new_zeros(batch).index_add(0, sequence, p.logit())
    absent = torch.stack([(-(sbm.edge_prob_dense(b) + exploration).clamp(0, 1 - 1e-6)).log1p().sum() for b in range(sbm.num_sequences)])
    total = advantage * (log_prob + absent)
    return total.sum() - total.sum().detach()
