r"""Gradients of edge probabilities: the functions of which gradient estimators are built.

In: probabilities, a graph and the inputs of attention. Out: gates, biases, losses, or an output with a backward pass
that sends a gradient to the probabilities. Not here: the choice of functions by a layer (``estimators``).
docs/concepts.md derives the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import softmax

from ..graphs.graph import AttentionGraph, check_graph
from ..graphs.ragged import Tokens, check_record, draw_seed, resolve_sequence_ids
from ..ops import checks, schemas, values
from ..ops.segments import allowed_keys, segments, upcast
from ..ops.values import can_read, require_values
from ..sources.dense import sample_rows
from ..sources.interface import EdgeProbability, GraphSource, check_probability, log_probability, min_probability
from ..sources.learned import LearnedSource, factor_for_density, sample_sequences
from .auxiliary import mean_weights

__all__ = [
    "attach_local_expectation", "concrete_bias", "distillation", "draw_probes", "kept_attention", "relaxed_bias",
    "row_distillation", "score_function", "straight_through",
]  # fmt: skip

OVER = ("selected", "all")
_TAKE_FEWER = "Take fewer heads or shorter sequences, or an estimator that does not need all pairs."


def straight_through(probability: EdgeProbability, graph: AttentionGraph, forced: Tensor | None = None) -> Tensor:
    """Straight-through gate of each edge, ``[E]``: exactly 1, with the gradient of its probability.

    Cost O(E) forward, O(E K) backward for an SBM.

    Args:
        probability: Probabilities of the graph.
        graph: The graph.
        forced: Edges that exist regardless of p, ``[E]`` bool. Forced edges send no gradient to p.

    Raises:
        TypeError, ValueError: The graph is not over the tokens of the model, or ``forced`` is not a mask of its edges.
    """
    check_probability(probability)
    gate = probability.gate(graph)
    checks.forced(forced, graph.col)
    return gate if forced is None else torch.where(forced, gate.detach(), gate)


def draw_probes(
    graph: AttentionGraph, per_query: float, *, seed: int, sequence_ids: Tensor | None = None,
    queries: Tensor | None = None,
) -> tuple[AttentionGraph, Tensor]:  # fmt: skip
    """Probes: pairs drawn independently of the edges, for :func:`attach_local_expectation`. Cost O(H N per_query).

    Each query takes keys at equal distances from a random start (systematic sampling), so each key is taken with the
    same probability.

    Args:
        graph: Graph with the tokens, heads and sequences of the probes; its edges are ignored. Probes of a causal graph
            are pairs that it allows. Probes of a :class:`~sbm_pyg.BlockGraph` are pairs of blocks.
        per_query: Mean number of probes per query and head, in tokens. A query with fewer keys takes all its keys, so
            ``math.inf`` takes all pairs.
        seed: Seed of the graph. Probes and edges use different random words of this seed.
        sequence_ids: As :func:`~sbm_pyg.sample_edges`.
        queries: Mask of the queries, or query blocks, that get probes, ``[N]`` bool. None: all queries.

    Returns:
        The probes; and the probability of each key of a query, or of a query block, to be a probe, ``[N]`` float32.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``per_query`` is negative or NaN, ``seed`` or ``sequence_ids`` do not fit, or the probes do not fit
            into memory.
    """
    check_graph(graph)
    require_values(graph.query_ptr, "graph")
    checks.number("per_query", per_query, "[0, inf]", "It is the mean number of probes per query.")
    blocks = graph.blocks
    if queries is not None:
        checks.shape("queries", queries, (blocks.num_queries,), "[N]", "It says whether a query gets probes.")
    sequence_ids = resolve_sequence_ids(sequence_ids, blocks.num_sequences, blocks.query_ptr.device)
    return probes_of(graph, per_query, draw_seed(seed), sequence_ids, queries)


def probes_of(
    graph: AttentionGraph, per_query: float, seed: int, sequence_ids: Tensor, queries: Tensor | None
) -> tuple[AttentionGraph, Tensor]:
    """:func:`draw_probes` without checks of its arguments."""
    blocks, per_query = graph.blocks, float(per_query) / graph.block_size
    _check_probe_memory(blocks, per_query)
    checks.not_captured(blocks.device)
    more = (blocks.num_queries, blocks.heads, per_query, seed, blocks.is_causal)
    rowptr, col, chance = schemas.sample_probes(blocks.query_ptr, blocks.key_ptr, sequence_ids, queries, *more)
    return graph.with_blocks(blocks._with(rowptr, col, blocks.heads)), chance


def attach_local_expectation(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    probability: EdgeProbability,
    graph: AttentionGraph,
    probes: AttentionGraph,
    chance: Tensor,
    *,
    bias: Tensor | None = None,
    probe_bias: Tensor | None = None,
    forced: Tensor | None = None,
    scale: float = 1.0,
    exploration: float = 0.0,
    prob: Tensor | None = None,
    weight: float = 1.0,
) -> Tensor:
    r"""Attach the local expectation gradient to an output of attention. Cost O((E + E')(C + K)).

    The gradient of an expected loss is an expected difference of two losses,

    .. math:: \partial E[L] / \partial p_{ij} = E[L(A, A_{ij} = 1) - L(A, A_{ij} = 0)] .

    The difference is computed for one pair at a time, with all other pairs fixed, to first order in the output of
    attention. Then it has a closed form that costs O(C) (docs/concepts.md).

    A pair contributes in two cases. First, the pair is an edge, with probability :math:`p`; then its difference is
    weighted by :math:`\alpha / p`. Second, the pair is a probe but not an edge, with probability :math:`(1 - p) \eta`;
    then its weight is :math:`(1 - \alpha) / ((1 - p) \eta)`. The sum is unbiased for any :math:`\alpha` if the loss is
    linear in the output.

    If the loss is curved, the true difference lies half-way between both cases, so :math:`\alpha` is 1/2, within two
    limits that bound the variance: for small :math:`p` it is at most the balance heuristic
    :math:`p / (p + \eta - p \eta)`, and for large :math:`p` at least :math:`p`. Without probes, :math:`\eta = 0` and
    :math:`\alpha` is 1. If :math:`p` plus exploration exceeds 1, the edge is certain and gets no gradient.

    Edges must be drawn independently with these probabilities, as by the method ``"bernoulli"``. The gradient is biased
    under ``"fastrg"``, which draws fewer edges than p.

    Args:
        out: Output of the attention, ``[H, N, C']``.
        query, key, value: Inputs of the attention, ``[H, N, C]``, ``[H, M, C]`` and ``[H, M, C']``.
        probability: Probabilities of the graph. For an SBM, the kernels take its factors.
        graph: The graph. For a :class:`~sbm_pyg.BlockGraph`, the effects of a block are summed over its queries, and
            probabilities and ``forced`` are those of ``graph.blocks``.
        probes, chance: The results of :func:`draw_probes`.
        bias, probe_bias: Score biases of edges, ``[E]``, and of probes, ``[E']``.
        forced: Edges that the graph has for any p, ``[E]`` bool.
        scale: Factor of the scores.
        exploration: Added to each probability when the graph was sampled.
        prob: ``probability.on(graph.blocks)``, ``[E]``, if already computed.
        weight: Factor of the gradient to the probabilities.

    Returns:
        ``out``; its backward pass also sends a gradient to the probabilities.

    Raises:
        TypeError, ValueError: A shape, type or number does not fit, or a graph is not over the tokens of the model.

    Reference: Titsias and Lazaro-Gredilla, "Local Expectation Gradients for Black Box Variational Inference", NeurIPS
    2015, for the exact expectation over one variable; Veach and Guibas, SIGGRAPH 1995, for the balance heuristic.
    """
    check_probability(probability)
    for pairs, name in ((graph, "graph"), (probes, "probes")):
        check_graph(pairs, name)
        probability.check(pairs.blocks, name)
    if (probes.heads, probes.num_queries, probes.num_keys) != (graph.heads, graph.num_queries, graph.num_keys):
        raise ValueError(
            f"Expected 'probes' over the tokens of 'graph' (got {probes} for {graph}). Draw them with `draw_probes`."
        )
    checks.tensors(out=out, value=value, chance=chance)
    _check_attention(graph, query, key, value, bias=bias)
    checks.per_edge(probes.col, "[E']", probe_bias=probe_bias)
    checks.shape("out", out, (*query.shape[:2], value.size(2)), "[H, N, C']", "It is the output of the attention.")
    checks.shape("chance", chance, (graph.blocks.num_queries,), "[N]", "It holds one probability per query.")
    checks.floating(out=out, chance=chance)
    checks.same_device("query", query, out=out, chance=chance)
    checks.forced(forced, graph.blocks.col)
    checks.number("scale", scale, "(-inf, inf)", "It is a factor of the scores, usually C ** -0.5.")
    checks.number("exploration", exploration, "[0, 1]", "It is what was added to each probability.")
    checks.number("weight", weight, "(-inf, inf)", "It is a factor of the gradient, 1 for all queries.")
    readable = values.can_read_without_sync(chance) and can_read(chance)
    got, way_out = "a number outside", "It is the second result of `draw_probes`."
    checks.require(not readable or bool(((chance >= 0) & (chance <= 1)).all()), "chance", "in [0, 1]", got, way_out)
    if type(probes) is not type(graph) or probes.block_size != graph.block_size:
        raise ValueError(
            f"Expected 'probes' to be pairs of blocks of {graph.block_size} tokens, as 'graph' is (got {probes}). "
            "Draw them with `draw_probes`."
        )
    biases, sampled = (bias, probe_bias), (chance, forced, scale, exploration, weight)
    return attach_expectation((out, query, key, value), probability, graph, probes, biases, sampled, prob)


def attach_expectation(
    attention: tuple[Tensor, ...], probability: EdgeProbability, graph: AttentionGraph, probes: AttentionGraph,
    biases: tuple[Tensor | None, Tensor | None], sampled: tuple[Tensor, Tensor | None, float, float, float],
    prob: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """:func:`attach_local_expectation` without checks of its arguments.

    Args:
        attention: Output, queries, keys and values.
        biases: Score biases of edges and of probes.
        sampled: Chance, forced edges, scale, exploration and weight.
    """
    out, *tokens = attention
    blocks, pairs, layout = graph.blocks, probes.blocks, graph._layout
    factors = probability.factors if prob is None and layout[2] is None else None
    probabilities: tuple[Tensor | None, ...]
    if factors is not None:
        _check_factors(probability, factors, blocks)
        probabilities = (*factors, None, None)
    else:
        of_edges = _edge_probability(prob, probability, blocks)
        probabilities = (None, None, of_edges, _edge_probability(None, probability, pairs))
    chance, forced, *numbers = sampled
    query, key, value, chance = (x.detach() for x in (*tokens, chance))
    sides = zip((graph, probes), biases, strict=True)
    bias, probe_bias = (None if x is None else side._bias_of_blocks(x.detach()) for side, x in sides)
    rows = (blocks.rowptr, blocks.col, bias, pairs.rowptr, pairs.col, probe_bias)
    return schemas.Expectation.apply(out, *probabilities, query, key, value, *rows, chance, forced, *layout, *numbers)


def _check_factors(probability: EdgeProbability, factors: tuple[Tensor, Tensor], graph: AttentionGraph) -> None:
    """Raise ValueError unless the factors of probabilities are over the tokens of a graph."""
    rate, member = factors
    sizes = (graph.heads, graph.num_queries), (graph.heads, graph.num_keys)
    fits = (rate.shape[:2], member.shape[:2]) == sizes and rate.shape[2:] == member.shape[2:] and rate.dim() == 3
    if torch.compiler.is_compiling() or (fits and rate.device == member.device == graph.device):
        return
    raise ValueError(
        f"Expected 'factors' of {type(probability).__name__} to be [H, N, K] and [H, M, K] over {graph} (got "
        f"{list(rate.shape)} and {list(member.shape)}). Their dot products are the probabilities."
    )


def _check_attention(
    graph: AttentionGraph, query: Tensor, key: Tensor, value: Tensor | None = None, **per_edge: Tensor | None
) -> None:
    """Raise an error unless queries, keys and values fit the tokens of a graph, and values per edge fit its edges."""
    checks.attention_tokens(query, key, value)
    sides = (("query", query, graph.num_queries, "[H, N, C]"), ("key", key, graph.num_keys, "[H, M, C]"))
    for name, x, tokens, symbols in sides:
        checks.shape(name, x, (graph.heads, tokens, None), symbols, "It has the heads and tokens of 'graph'.")
    checks.same_device("query", query, graph=graph.query_ptr)
    checks.per_edge(graph.col, "[E]", **per_edge)


def distillation(
    query: Tensor,
    key: Tensor,
    probability: EdgeProbability,
    graph: AttentionGraph,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    over: str = "all",
) -> Tensor:
    r"""Distillation loss: the cross-entropy between attention weights and normalized probabilities, a scalar.

    With the attention weights :math:`P_{ij}` as constants, the loss is

    .. math:: - \frac{1}{H B} \sum_b \frac{1}{N_b} \sum_{h, i} \sum_j P_{ij} \log \frac{p_{ij}}{\sum_{j'} p_{ij'}} ,

    a mean over sequences b of the mean over their :math:`N_b` queries i. The loss of a batch is therefore the mean of
    the losses of equal parts of it.

    With ``over="all"``, the sum in the denominator runs over all keys that a query may attend to, edges or not: a
    contrastive loss against every key. A block model computes this sum exactly from its expected degrees, so the loss
    costs O(N K + E (C + K)). With ``over="selected"``, the sum runs over the edges of the query only, and other keys
    get no gradient.

    The loss is smallest if probabilities are proportional to the weights. Queries without edges, and edges of
    probability 0, add nothing. For a :class:`~sbm_pyg.BlockGraph`, :math:`P` holds the weights of blocks of keys,
    summed over the queries of a block.

    Args:
        query, key: Inputs of the attention, ``[H, N, C]`` and ``[H, M, C]``.
        probability: Probabilities of the graph. ``over="all"`` requires an ``expected_degree``.
        graph: The graph.
        bias: Score biases of the edges, ``[E]``.
        scale: Factor of the scores.
        over: Keys of the sum in the denominator, ``"all"`` or ``"selected"``.

    Raises:
        TypeError, ValueError: A shape or type does not fit, or the graph is not over the tokens of the model.
        NotImplementedError: The probabilities have no ``expected_degree``.

    Reference: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025, equations 3 and 4. Its indexer minimizes the divergence over all
    keys while attention is dense, then over the selected keys. That indexer learns the mean attention of all heads;
    here each head learns separate probabilities. The exact sum over all keys of a sparse graph is possible because the
    block model has low rank.
    """
    checks.one_of("over", over, OVER)
    check_probability(probability)
    check_graph(graph)
    blocks = graph.blocks
    probability.check(blocks)
    _check_attention(graph, query, key, bias=bias)
    checks.number("scale", scale, "(-inf, inf)", "It is a factor of the scores, usually C ** -0.5.")
    dtype = torch.promote_types(query.dtype, torch.float32)
    mean = mean_weights(graph.query_ptr, blocks.num_queries, dtype, blocks.query_ptr)
    if over == "selected":
        log_p = probability.log_on(blocks)
        checks.per_edge(blocks.col, "[E]", log_p=log_p)
        loss = graph._cross_entropy(query, key, log_p, bias, scale)
        return (loss * mean).sum() / graph.heads
    p, degree = probability.on(blocks), probability.expected_degree()
    with torch.no_grad():
        weight = graph._attention_weight(query, key, bias, scale)
        weight = weight * mean.repeat(blocks.heads)[blocks.edge_row]
        weight = weight.masked_fill(p == 0, 0)
        whole = segments(weight, blocks.rowptr).view_as(degree)  # [H, n], the summed weights of each row
    log_degree = log_probability(degree, min_probability(p))  # whose type may be wider than that of the factors
    return ((whole * log_degree).sum() - (weight * log_probability(p)).sum()) / graph.heads


@torch.compiler.disable  # which rows it samples decides sizes
def row_distillation(
    source: LearnedSource, tokens: Tokens, *, scale: float = 1.0, rows: float = 1.0, part: float = 0.25,
    scored: Tokens | None = None, score_bias: Callable[[Tensor, Tensor, AttentionGraph], Tensor | None] | None = None,
) -> Tensor:  # fmt: skip
    r"""Distillation from dense attention on a sample of query rows, a scalar.

    For a sampled query the weights :math:`P_{ij}` of its attention over all keys are constants, and the loss is the
    cross-entropy

    .. math:: - \frac{1}{R} \sum_{h, i} \sum_j P_{ij} \log \frac{p_{ij}}{\sum_{j'} p_{ij'}}

    over R sampled rows of all heads. Pairs that are edges for any p, by a window or to sinks, are left out, so p learns
    the attention outside of these pairs. Queries and keys are constants too: only the parameters of the source are
    trained. So the loss works with any :class:`~sbm_pyg.EdgeProbability` and needs no graph: sources learn from this
    loss while attention is dense.

    Rows are taken from a part of the sequences, since the source also predicts for all keys of these sequences.
    Sequences of one token, or block, are used only if there are too few longer sequences. Cost for one sequence of N
    tokens: the prediction, and O(H N^{3/2} (C + K)).

    Args:
        source: The source.
        tokens: Queries and keys.
        scale: Factor of the scores.
        rows: Rows per sequence of length N, in units of :math:`\sqrt{N}`, as a mean over all sequences.
        part: Fraction of the sequences that rows are taken from, in (0, 1]; at least one sequence is used.
        scored: The same tokens with the queries and keys of the scores, if these differ from what the source sees.
        score_bias: Function ``(query, key, graph)`` that computes the score bias of each edge, ``[E]`` or None.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range.
    """
    tokens, scored, graph, bias = _rows_to_learn_from(source, tokens, rows, part, scored, score_bias)
    blocks = graph.blocks
    sampled = blocks.rowptr.diff().count_nonzero().clamp(min=1)
    log_p = source.predict(tokens).log_on(blocks)
    checks.per_edge(blocks.col, "[E]", log_p=log_p)
    log_p = without_forced(log_p, -torch.inf, source, tokens, blocks, source.block_size)
    return graph._cross_entropy(scored.query, scored.key, log_p, bias, scale).sum() / sampled


def kept_attention(
    source: LearnedSource,
    tokens: Tokens,
    density: float | Tensor,
    *,
    scale: float = 1.0,
    rows: float = 1.0,
    part: float = 1.0,
    scored: Tokens | None = None,
    score_bias: Callable[[Tensor, Tensor, AttentionGraph], Tensor | None] | None = None,
) -> Tensor:
    r"""Expected part of the dense attention that graphs of a source keep at a given density, a scalar in [0, 1].

    .. math:: \frac{\sum_{h, i} \sum_j P_{ij} \min(1, \lambda_h p_{ij})}{\sum_{h, i} \sum_j P_{ij}}

    over R sampled rows of all heads, and over pairs that are not edges for any p. :math:`P` are the attention weights,
    and the factor :math:`\lambda_h` sets the mean of the probabilities of each head, after the cut at 1, to
    ``density``. The gradient flows through this factor too, so the keys of a head compete for its edges. Unlike
    :func:`row_distillation`, it does not raise probabilities that are already 1. Cost O(E K) for the E sampled pairs.

    Args:
        source: A source that draws pairs independently, without blocks of tokens.
        tokens, scale, rows, part, scored, score_bias: As in :func:`row_distillation`.
        density: Mean probability of a pair, in (0, 1), one number or ``[H]`` for the heads.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range.
    """
    if not isinstance(density, Tensor):
        checks.number("density", density, "(0, 1)", "It is the mean probability of a pair.")
    tokens, scored, graph, bias = _rows_to_learn_from(source, tokens, rows, part, scored, score_bias)
    checks.require(graph.block_size == 1, "source", "without blocks", f"{graph.block_size}", "Use row_distillation.")
    p = source.predict(tokens).on(graph)
    weight = softmax(graph._logits(scored.query, scored.key, bias, scale).detach(), ptr=graph.rowptr)
    p, weight = without_forced(torch.stack([p, weight]), 0, source, tokens, graph)
    head = graph.edge_head
    factor = factor_for_density(p, head, tokens.heads, density)
    is_cut = p.detach() * factor[head] >= 1
    total = torch.zeros_like(factor).index_add(0, head, p.masked_fill(is_cut, 0))
    factor = factor * total.detach() / total.clamp(min=torch.finfo(p.dtype).tiny)
    chance = torch.where(is_cut, torch.ones_like(p), p * factor[head])
    return (weight * chance).sum() / weight.sum().clamp(min=torch.finfo(p.dtype).tiny)


def _rows_to_learn_from(
    source: LearnedSource, tokens: Tokens, rows: float, part: float, scored: Tokens | None, score_bias: Any
) -> tuple[Tokens, Tokens, AttentionGraph, Tensor | None]:
    """Sample rows to learn from: tokens of the source and of the scores, and the pairs of the rows with biases."""
    if not isinstance(source, LearnedSource):
        raise TypeError(f"Expected 'source' to be a LearnedSource (got {type(source).__name__}). It has probabilities.")
    check_record(tokens)
    checks.number("rows", rows, "(0, inf]", "It is a number of rows over the square root of the length.")
    checks.number("part", part, "(0, 1]", "It is a part of the sequences.")
    if scored is not None:
        check_record(scored)
        sizes, scored_sizes = ((x.heads, x.num_queries, x.num_keys) for x in (tokens, scored))
        if sizes != scored_sizes or scored.query.device != tokens.query.device:
            raise ValueError(
                f"Expected 'scored' of {tokens.heads} heads over the tokens of 'tokens' (got {scored} for {tokens}). "
                "Make it by `tokens.with_vectors`."
            )
        scored = sample_sequences(scored.detached(), part, source.block_size)
    sequences = tokens.query_ptr.numel()
    tokens = sample_sequences(tokens.detached(), part, source.block_size)
    scored = tokens if scored is None else scored
    graph = sample_rows(tokens, rows * (sequences - 1) / (tokens.query_ptr.numel() - 1), source.block_size)
    with torch.no_grad():
        bias = None if score_bias is None else score_bias(scored.query, scored.key, graph)
    checks.per_edge(graph.col, "[E]", score_bias=bias)
    return tokens, scored, graph, bias


def without_forced(
    x: Tensor, filler: float, source: GraphSource, tokens: Tokens, blocks: AttentionGraph, block_size: int = 1
) -> Tensor:
    """Replace values of pairs of tokens or blocks, ``[..., E]``, by a filler at pairs that are edges for any p."""
    if tokens.are_same and source.window is not None:
        x = x.masked_fill(blocks.lag.abs() <= -(-source.window // block_size), filler)
    if tokens.are_same and source.num_sinks:
        x = x.masked_fill(blocks.key_position < -(-source.num_sinks // block_size), filler)
    return x


def relaxed_bias(probability: EdgeProbability, graph: AttentionGraph, exploration: float = 0.0) -> Tensor:
    """Log-probability of each pair, ``[E]``, as a score bias: over all pairs, the expectation of the mask.

    Args:
        probability: Probabilities of the pairs.
        graph: The pairs, usually all.
        exploration: Added to each probability, in [0, 1].

    Raises:
        TypeError, ValueError: The graph is not over the tokens of the model, or four numbers per pair do not fit into
            memory.
    """
    p = _probability_with_exploration(probability, graph, exploration, numbers=4)
    return p.clamp(min_probability(p), 1).log()


def concrete_bias(
    probability: EdgeProbability, graph: AttentionGraph, temperature: float, *, seed: int, exploration: float = 0.0
) -> Tensor:
    r"""Logarithm of a relaxed Bernoulli variable for each pair, ``[E]``, as a score bias.

    The bias is :math:`\log \sigma((\operatorname{logit} p + \operatorname{logit} u) / \tau)` with a uniform random u.

    Args:
        probability: Probabilities of the pairs.
        graph: The pairs, usually all.
        temperature: :math:`\tau > 0`. Variables approach 0 or 1 as it goes to 0.
        seed: Seed of the uniform numbers u, which differ between kinds of devices.
        exploration: Added to each probability, in [0, 1].

    Raises:
        TypeError, ValueError: The graph is not over the tokens of the model, a number is out of range, or eight numbers
            per pair do not fit into memory.

    Reference: Maddison et al. and Jang et al., ICLR 2017.
    """
    checks.number("temperature", temperature, "(0, inf)", "Lower temperatures are closer to 0 or 1.")
    edge_p = _probability_with_exploration(probability, graph, exploration, numbers=8)
    p = upcast(edge_p).clamp(min_probability(edge_p), 1 - 1e-6)
    generator = torch.Generator(p.device).manual_seed(draw_seed(seed))
    noise = torch.rand(p.shape, generator=generator, device=p.device, dtype=p.dtype).clamp(1e-6, 1 - 1e-6)
    return torch.nn.functional.logsigmoid((p.logit() + noise.logit()) / temperature).to(edge_p.dtype)


def score_function(
    probability: EdgeProbability, graph: AttentionGraph, loss: Tensor, exploration: float = 0.0
) -> Tensor:
    r"""A scalar to add to the loss for the score-function gradient (REINFORCE; Williams, 1992).

    Its gradient to the model is :math:`\sum_b (L_b - \bar L) \, \nabla \log \Pr(A_b)`, with the mean loss of the other
    sequences as baseline :math:`\bar L`. The gradient is unbiased for any loss. Its cost and variance grow with the
    number of pairs, so use this function for comparison rather than for training.

    Args:
        probability: Probabilities of the graph.
        graph: A graph sampled from ``probability``, without forced edges, all pairs independently (``row_group=1``).
        loss: Loss of each sequence, ``[B]``.
        exploration: Added to each probability when the graph was sampled, in [0, 1].

    Raises:
        TypeError, ValueError: The graph is not over the tokens of the model, the loss is not ``[B]``, or all pairs do
            not fit into memory.
    """
    check_probability(probability)
    probability.check(graph)
    require_values(graph.query_ptr, "graph")
    checks.tensors(loss=loss)
    checks.floating(loss=loss)
    checks.shape("loss", loss, (graph.num_sequences,), "[B]", "It holds one loss per sequence, not their mean.")
    checks.same_device("graph", graph.col, loss=loss)
    check_pairs(graph, 5, 12)
    pairs, _ = draw_probes(graph, math.inf, seed=0)
    batch = loss.numel()
    others = (loss.sum() - loss) / (batch - 1) if batch > 1 else torch.zeros_like(loss)
    advantage = (loss - others).detach()
    sequence = torch.repeat_interleave(graph.query_ptr.diff(), output_size=graph.num_queries).repeat(graph.heads)
    edge_p = _probability_with_exploration(probability, graph, exploration, numbers=4)
    p = upcast(edge_p).clamp(max(1e-6, min_probability(edge_p)), 1 - 1e-6)
    log_absent = (
        -upcast(_probability_with_exploration(probability, pairs, exploration, numbers=3)).clamp(max=1 - 1e-6)
    ).log1p()
    log_prob = p.new_zeros(batch).index_add(0, sequence[graph.edge_row], p.logit())
    total = advantage * log_prob.index_add(0, sequence[pairs.edge_row], log_absent)
    return total.sum() - total.sum().detach()


def _edge_probability(prob: Tensor | None, probability: EdgeProbability, graph: AttentionGraph) -> Tensor:
    """Probability of each edge, ``[E]``: ``prob`` if given, else computed."""
    prob = probability.on(graph) if prob is None else prob
    checks.tensors(prob=prob)
    checks.per_edge(graph.col, "[E]", prob=prob)
    return prob


def _probability_with_exploration(
    probability: EdgeProbability, graph: AttentionGraph, exploration: float, numbers: int
) -> Tensor:
    """Probability of each edge plus exploration, ``[E]``; memory must hold ``numbers`` values per edge."""
    check_probability(probability)
    checks.number("exploration", exploration, "[0, 1]", "It is added to each probability.")
    probability.check(graph)
    width = torch.get_default_dtype().itemsize
    checks.memory("graph", graph.num_edges, numbers * width, graph.device, _TAKE_FEWER)
    return probability.on(graph) + exploration


def check_pairs(graph: AttentionGraph, numbers: int, more_bytes: int) -> None:
    """Raise ValueError unless memory holds so many numbers and bytes for each pair, the backward pass included."""
    count, width = graph.heads * int(graph.pairs_per_sequence.sum()), torch.get_default_dtype().itemsize
    checks.memory("graph", count, numbers * width + more_bytes, graph.device, _TAKE_FEWER, "pairs")


def _check_probe_memory(graph: AttentionGraph, per_query: float) -> None:
    """Raise ValueError unless the probes, with one number each, fit into memory."""
    width = (4 if graph.device.type == "cpu" else 20) + torch.get_default_dtype().itemsize
    pairs = graph.heads * graph.num_queries * graph.num_keys
    if checks.fits(pairs, width, graph.device) or not can_read(graph.query_ptr):
        return
    allowed = allowed_keys(graph.query_ptr, graph.key_ptr, graph.num_queries, graph.is_causal)
    allowed = allowed.to(checks.widest(allowed.device))
    count = graph.heads * int(allowed.clamp(max=per_query + 1).sum())  # a row takes up to one more
    checks.memory("per_query", count, width, graph.device, f"Take fewer probes. {_TAKE_FEWER}", "probes")
