"""Peers of sampling and of whole layers."""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from examples.benchmarks.kernels import Case, Peer, Work
from examples.common.gate import Rejected, compare
from sbm_pyg import SBM, BlockGraph, FullAttention, SBMAttentionConv, Tokens, ops, patterns, sample_edges

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
            return _deviations(case, facts, sum(counts) / len(counts), mean, variance / len(counts))

        return Work(check, {"sample": lambda: draw(next(seeds))}, facts)

    return build


def _deviations(case: Case, facts: dict[str, float], count: float, mean: float, variance: float) -> float:
    """Reports the densities, and returns how many standard deviations the number of edges is off."""
    pairs = case.heads * case.tokens**2
    facts.update(sampled=count / pairs, expected=mean / pairs)
    error = abs(count - mean) / math.sqrt(variance)
    if not error <= DEVIATIONS:
        raise Rejected(f"its density is off by {error:.1f} standard deviations")
    return error


def _op(method: str, inflate: float = 1.0) -> Callable[[SBM], Callable[[int], int]]:
    def make(sbm: SBM) -> Callable[[int], int]:
        key, sequence_ids = sbm.key_membership * inflate, torch.arange(sbm.num_sequences)
        known = (sbm.rate, key, sbm.query_ptr, sbm.key_ptr, sequence_ids)
        return lambda seed: ops.sample_sbm(*known, seed, method)[1].numel()

    return make


def _sample_edges(sbm: SBM) -> Callable[[int], int]:
    parts = (sbm.query_membership, sbm.key_membership, sbm.block_matrix)
    return lambda seed: sample_edges(SBM(*parts), seed=seed).num_edges


def _dense_bernoulli(sbm: SBM) -> Callable[[int], int]:
    shape = (sbm.heads, *[sbm.key_membership.size(1)] * 2)
    return lambda seed: int((torch.rand(shape) < sbm.rate @ sbm.key_membership.mT).nonzero().size(0))


def _layers(case: Case, estimator: str = "mask", block_size: int = 1) -> tuple[SBMAttentionConv, FullAttention]:
    """The layer, whose edges have the probability of the case, and its dense twin, with the same projections."""
    torch.manual_seed(case.seed)
    sizes = (case.heads * case.channels, case.channels, case.heads)
    head = {"parameterization": "paper", "cluster_init": "kaiming", "initial_density": case.density}
    options: dict[str, Any] = {"sbm_options": head, "exploration": 0.0, "block_size": block_size}
    conv = SBMAttentionConv(*sizes, case.blocks, estimator=estimator, **options)
    full = FullAttention(*sizes)
    full.load_state_dict({name: value for name, value in conv.state_dict().items() if not name.startswith("source.")})
    return conv, full


def _agree(conv: SBMAttentionConv, full: FullAttention, width: int, block_size: int) -> float:
    """Compare the layer over the full graph of a few tokens with its dense twin: output and gradients."""
    count = max(96 // block_size, 2)
    x, grad = torch.randn(count * block_size, width), torch.randn(count * block_size, width)
    every = BlockGraph(patterns.full(count), block_size) if block_size > 1 else patterns.full(count)
    found, true = conv(x, every), full(x, ptr=torch.tensor([0, len(x)]))
    pairs = {"output": (found, true)}
    for name in ("lin_query.weight", "lin_key.weight", "lin_value.weight", "lin_value.bias"):
        leaves = ((found, conv.get_parameter(name)), (true, full.get_parameter(name)))
        mine, its = (torch.autograd.grad(out, leaf, grad, retain_graph=True)[0] for out, leaf in leaves)
        pairs[f"gradient to {name}"] = (mine, its)
    return compare(pairs)


def _layer(case: Case, sparse: bool = True, scale: float = 1.0, estimator: str = "mask", block_size: int = 1) -> Work:
    """A training step: projections, SBM, sampling, attention, gradients to all parameters and to the tokens; or the dense twin's."""
    conv, full = _layers(case, estimator, block_size)
    conv.scale *= scale
    width, ptr, facts = case.heads * case.channels, torch.tensor([0, case.tokens]), dict[str, float]()
    x, grad = torch.randn(case.tokens, width, requires_grad=True), torch.randn(case.tokens, width)

    def step() -> int:
        x.grad = None
        (conv if sparse else full).zero_grad()
        out, graph = conv(x, return_graph=True) if sparse else (full(x, ptr=ptr), None)
        out.backward(grad)  # the dense layer counts per edge of the sparse one
        return graph.blocks.num_edges * block_size**2 if graph else round(case.density * case.heads * case.tokens**2)

    def check() -> float:
        error, edges = _agree(conv, full, width, block_size), step()
        if not sparse:
            return error
        for name, parameter in conv.named_parameters():
            if parameter.grad is None or not parameter.grad.isfinite().all() or not parameter.grad.any():
                raise Rejected(f"the gradient to {name} is missing, zero or not finite")
        with torch.no_grad():
            sbm = cast(SBM, conv(x, return_choice=True)[1].probability)
        expected = float(sbm.expected_edges().sum())
        over = replace(case, tokens=case.tokens // block_size)  # drawn are pairs of blocks
        _deviations(over, facts, edges // block_size**2, expected, expected)  # the variance is below the mean
        if abs(facts["expected"] / case.density - 1) > 0.1:
            raise Rejected(f"it expects a density of {facts['expected']:.2%} instead of {case.density:.2%}")
        return error

    return Work(check, {"step": step}, facts)


def _layer_sampling(case: Case) -> Work:
    """The sampling of the layer alone, from memberships that are given."""
    conv, _ = _layers(case)
    assert conv.sbm is not None
    with torch.no_grad():
        query, key = (torch.randn(case.heads, case.tokens, case.channels) for _ in range(2))
        sbm = conv.sbm(Tokens(query, key))
    expected, seeds, facts = float(sbm.expected_edges().sum()), itertools.count(case.seed), dict[str, float]()

    def draw() -> int:
        return sample_edges(sbm, seed=next(seeds)).num_edges

    return Work(lambda: _deviations(case, facts, draw(), expected, expected), {"step": draw}, facts)


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
GROWTH = {"sampling": Peer("sampling alone", _layer_sampling), "layer": Peer("SBMAttentionConv, training step", _layer)}
