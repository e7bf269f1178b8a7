"""Peers of sampling and of whole layers."""

import itertools
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from examples.benchmarks.kernels import Case, Peer, Work
from examples.common.gate import Rejected, compare
from sbm_pyg import (
    SBM,
    AttentionConv,
    BlockGraph,
    FullAttention,
    SBMSource,
    Tokens,
    auxiliary_loss,
    make_attention,
    ops,
    patterns,
    sample_edges,
)
from sbm_pyg.sources.indexer import Indexer, IndexerSource
from sbm_pyg.sources.selectors import TopKSource

IN_ALL = 8_192  # tokens of a batch of sequences
DEVIATIONS = 5  # standard deviations that a mean density may be off


def _model(case: Case) -> SBM:
    """Mixed memberships of all blocks, differing from token to token and from head to head, with the density of the case."""
    generator = torch.Generator().manual_seed(case.seed)
    query, key = (torch.randn(case.heads, case.tokens, case.blocks, generator=generator).sigmoid() for _ in range(2))
    block = torch.rand(case.heads, case.blocks, case.blocks, generator=generator) + 0.5
    factor = case.density / SBM(query, key, block).expected_density()  # [1, H]
    return SBM(query, key, block * factor[0, :, None, None]).validate()


def _sampler(
    make: Callable[[SBM], Callable[[int], int]], law: Callable[[Tensor], Tensor] = torch.clone
) -> Callable[[Case], Work]:
    """Builder of a sampler: ``make`` prepares ``draw(seed) -> number of edges``, whose ``law`` turns rates into probabilities."""

    def build(case: Case) -> Work:
        sbm, seeds, facts = _model(case), itertools.count(case.seed), dict[str, float]()
        draw = make(sbm)

        def check() -> float:
            mean = variance = 0.0
            for head in range(case.heads):
                for rate in sbm.rate[head].split(256):
                    prob = law(rate.double() @ sbm.key_membership[head].double().T)
                    mean, variance = mean + float(prob.sum()), variance + float((prob * (1 - prob)).sum())
            counts, end = [draw(next(seeds))], time.monotonic() + 1
            while time.monotonic() < end and len(counts) < 10:
                counts.append(draw(next(seeds)))
            pairs = case.heads * case.tokens**2
            return deviations(pairs, facts, sum(counts) / len(counts), mean, variance / len(counts))

        return Work(check, {"sample": lambda: draw(next(seeds))}, facts)

    return build


def deviations(pairs: int, facts: dict[str, float], count: float, mean: float, variance: float) -> float:
    """Reports the densities, and returns how many standard deviations the number of edges is off."""
    facts.update(sampled=count / pairs, expected=mean / pairs)
    error = abs(count - mean) / math.sqrt(variance)
    if not error <= DEVIATIONS:
        raise Rejected(f"its density is off by {error:.1f} standard deviations")
    return error


def _op(method: str, inflate: float = 1.0) -> Callable[[SBM], Callable[[int], int]]:
    def make(sbm: SBM) -> Callable[[int], int]:
        key, sequence_ids = sbm.key_membership * inflate, torch.arange(sbm.num_sequences)
        operands = (sbm.rate, key, sbm.query_ptr, sbm.key_ptr, sequence_ids)
        return lambda seed: ops.sample_sbm(*operands, seed, method)[1].numel()

    return make


def _sample_edges(sbm: SBM) -> Callable[[int], int]:
    parts = (sbm.query_membership, sbm.key_membership, sbm.block_matrix)
    return lambda seed: sample_edges(SBM(*parts), seed=seed).num_edges


def _dense_bernoulli(sbm: SBM) -> Callable[[int], int]:
    shape = (sbm.heads, *[sbm.key_membership.size(1)] * 2)
    return lambda seed: int((torch.rand(shape) < sbm.rate @ sbm.key_membership.mT).nonzero().size(0))


def _layers(
    case: Case, estimator: str | None, block_size: int = 1, index: tuple[int, ...] | None = None
) -> tuple[AttentionConv, FullAttention]:
    """The layer with the density of the case, and its dense twin, with the same projections.

    With an estimator, all pairs have the same probability; without, the layer has its defaults. With ``index``, small heads and
    their channels, an indexer chooses by rank; with an empty ``index``, exact scores do.
    """
    torch.manual_seed(case.seed)
    sizes = (case.heads * case.channels, case.channels, case.heads)
    options: dict[str, Any] = {"target_density": case.density}
    if estimator is not None:
        head = {"parameterization": "paper", "cluster_init": "kaiming", "initial_density": case.density}
        options = head | {"exploration": 0.0, "estimator": estimator}
    if index is not None:
        scorer = Indexer(case.channels, case.heads, *index)
        conv = AttentionConv(*sizes, IndexerSource(scorer, **options) if index else TopKSource(**options))
    else:
        conv = make_attention("sbm", *sizes, num_clusters=case.blocks, block_size=block_size, window=None, **options)
    return conv, dense_twin(conv)


def dense_twin(conv: AttentionConv) -> FullAttention:
    """Dense attention with the projections of a layer, on its device, and as causal as it is."""
    full = FullAttention(conv.lin_query.in_channels, conv.out_channels, conv.heads, is_causal=conv.is_causal)
    full.load_state_dict({name: value for name, value in conv.state_dict().items() if not name.startswith("source.")})
    return full.to(conv.lin_query.weight.device)


def agree(conv: AttentionConv, full: FullAttention, width: int, block_size: int = 1) -> float:
    """Compare the layer over the full graph of a few tokens with its dense twin: output and gradients."""
    count = max(96 // block_size, 2)
    x, grad = torch.randn(count * block_size, width), torch.randn(count * block_size, width)
    complete = BlockGraph(patterns.full(count), block_size) if block_size > 1 else patterns.full(count)
    result, true = conv(x, complete), full(x, ptr=torch.tensor([0, len(x)]))
    pairs = {"output": (result, true)}
    for name in ("lin_query.weight", "lin_key.weight", "lin_value.weight", "lin_value.bias"):
        leaves = ((result, conv.get_parameter(name)), (true, full.get_parameter(name)))
        actual, exact = (torch.autograd.grad(out, leaf, grad, retain_graph=True)[0] for out, leaf in leaves)
        pairs[f"gradient to {name}"] = (actual, exact)
    return compare(pairs)


def layer_calls(
    layer: torch.nn.Module, x: Tensor, grad: Tensor, run: Callable[[], tuple[Tensor, int]]
) -> dict[str, Callable[[], int]]:
    """An evaluation, and a training step with all gradients; ``run`` calls the layer and returns output and edges."""

    @torch.no_grad()
    def forward() -> int:
        layer.eval()
        return run()[1]

    def step() -> int:
        x.grad = None
        layer.train().zero_grad()
        out, edges = run()
        losses = [loss for loss in [auxiliary_loss(layer)] if loss.requires_grad]
        torch.autograd.backward([out, *losses], [grad, *(None for _ in losses)])
        return edges

    return {"forward": forward, "step": step}


def _layer(
    case: Case, sparse: bool = True, scale: float = 1.0, estimator: str | None = "mask", block_size: int = 1,
    in_all: int | None = None, index: tuple[int, ...] | None = None,
) -> Work:  # fmt: skip
    """A training step: projections, SBM, sampling, attention, gradients to all parameters and to the tokens; or the dense twin's.

    "forward" is an evaluation. The batch is one sequence, or as many as there are in so many tokens.
    """
    conv, full = _layers(case, estimator, block_size, index)
    conv.scale *= scale
    count = max((in_all or 0) // case.tokens, 1) * case.tokens
    width, ptr, facts = case.heads * case.channels, torch.arange(0, count + 1, case.tokens), dict[str, float]()
    x, grad = torch.randn(count, width, requires_grad=True), torch.randn(count, width)
    pairs = case.heads * case.tokens * count

    def run() -> tuple[Tensor, int]:
        out, graph = conv(x, ptr=ptr, return_graph=True) if sparse else (full(x, ptr=ptr), None)
        # the dense layer counts per edge of the sparse one
        return out, graph.blocks.num_edges * block_size**2 if graph else round(case.density * pairs)

    calls = layer_calls(conv if sparse else full, x, grad, run)

    def check() -> float:
        error = agree(conv, full, width, block_size)
        if not sparse:
            return error
        calls["step"]()  # the first batch has no running mean yet
        edges = calls["step"]()
        for name, parameter in conv.named_parameters():
            if parameter.grad is None or not parameter.grad.isfinite().all() or not parameter.grad.any():
                raise Rejected(f"the gradient to {name} is missing, zero or not finite")
        if index is not None:
            num_edges, facts["expected"] = conv.heads * count * math.ceil(case.density * case.tokens), edges / pairs
            if edges != num_edges:
                raise Rejected(f"it has {edges} edges instead of {num_edges}")
            return error
        with torch.no_grad():
            choice = conv(x, ptr=ptr, return_choice=True)[1]
        assert choice.probability is not None
        expected = (float(choice.probability.expected_density().mean()) + choice.exploration) * pairs // block_size**2
        # Drawn are pairs of blocks; the variance is below the mean, times the rows that share their draws.
        variance = expected * getattr(conv.source, "row_group", 1)
        deviations(pairs // block_size**2, facts, edges // block_size**2, expected, variance)
        target = case.density + choice.exploration
        if abs(facts["expected"] / target - 1) > 0.1:
            raise Rejected(f"it expects a density of {facts['expected']:.2%} instead of {target:.2%}")
        return error

    return Work(check, calls, facts)


def _layer_sampling(case: Case) -> Work:
    """The sampling of the layer alone, from memberships that are given."""
    conv, _ = _layers(case, "mask")
    assert isinstance(conv.source, SBMSource)
    with torch.no_grad():
        query, key = (torch.randn(case.heads, case.tokens, case.channels) for _ in range(2))
        sbm = conv.source.head(Tokens(query, key))
    expected, seeds, facts = float(sbm.expected_edges().sum()), itertools.count(case.seed), dict[str, float]()

    def draw() -> int:
        return sample_edges(sbm, seed=next(seeds)).num_edges

    pairs = case.heads * case.tokens**2
    return Work(lambda: deviations(pairs, facts, draw(), expected, expected), {"step": draw}, facts)


def _poisson(rate: Tensor) -> Tensor:
    return -torch.expm1(-rate)


BLOCK_SIZES = (8, 16, 32, 64, 128)
SAMPLERS = {
    "bernoulli": Peer("sbm_pyg sample_sbm", _sampler(_op("bernoulli"))),
    "edges": Peer("sbm_pyg sample_edges", _sampler(_sample_edges), "from Y, S, Z, all checks"),
    "fastrg": Peer("sbm_pyg sample_sbm, fastrg", _sampler(_op("fastrg"), _poisson), "law 1 - exp(-p)"),
    "dense": Peer("torch rand < p, dense", _sampler(_dense_bernoulli)),
    "wrong": Peer("wrong: 10 % too dense", _sampler(_op("bernoulli", inflate=1.1))),
}
LAYERS = {
    "sbm": Peer("SBMAttentionConv, estimator 'mask'", _layer),
    "default": Peer("SBMAttentionConv, default", partial(_layer, estimator="local")),
    **{
        f"blocks-{n}": Peer(f"the same, blocks of {n}", partial(_layer, estimator="local", block_size=n))
        for n in BLOCK_SIZES
    },
    "dense": Peer("dense SDPA layer", partial(_layer, sparse=False)),
    "wrong": Peer("wrong: twice the scale", partial(_layer, scale=2.0)),
}
LENGTHS = {
    "default": Peer("SBMAttentionConv, default", partial(_layer, estimator=None, in_all=IN_ALL)),
    "blocks-16": Peer("the same, blocks of 16", partial(_layer, estimator=None, in_all=IN_ALL, block_size=16)),
    **{
        f"indexer-{small}x{channels}": Peer(
            f"an indexer by rank, {small} small heads of {channels}",
            partial(_layer, estimator=None, in_all=IN_ALL, index=(small, channels)),
        )
        for small, channels in ((4, 16), (2, 8))
    },
    "top-k": Peer("exact top-k", partial(_layer, estimator=None, in_all=IN_ALL, index=())),
    "dense": Peer("dense SDPA layer", partial(_layer, sparse=False, in_all=IN_ALL)),
}
GROWTH = {"sampling": Peer("sampling alone", _layer_sampling), "layer": Peer("SBMAttentionConv, training step", _layer)}
