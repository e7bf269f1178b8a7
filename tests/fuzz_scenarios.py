"""What the fuzz driver does in several calls: buffers that are shared, and NaN.

Each scenario fills the table of ``fuzz_cases`` under a name that begins with "scenario". It draws a layer, and compares what must be equal. Not
here: batches in parts and checkpointing (``test_auxiliary.py``), buffers that are edited (``test_attention.py``),
pairs of unlike batches (``test_choice.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fuzz_cases import Case, Draw, case, expect, pointer
from torch import Tensor

from sbm_pyg import AttentionConv, DCMMBias, auxiliary_loss, make_attention
from sbm_pyg.sources import patterns, selectors
from sbm_pyg.sources.indexer import Indexer, IndexerSource, KeyScorer

WIDTH, CHANNELS, HEADS = 4, 3, 2


def any_layer(d: Draw) -> Any:
    """A layer in float64 over a graph that something chooses, in training, after two batches."""
    torch.manual_seed(d.getrandbits(32))
    is_causal = d.random() < 0.3
    estimator = d.choice(("local", "imitate", "mask", "none"))  # "distill" samples rows, others in parts of a batch
    kind = d.choice(("sbm", "sbm", "sbm", "coins", "ranks", "routing", "top_k", "block_top_k", "lsh", "full"))
    bias = None if d.random() < 0.7 else DCMMBias(CHANNELS, HEADS, 2, entropy_weight=d.choice((0.0, 0.3)))
    options: dict[str, Any] = {"is_causal": is_causal, "score_bias": bias}
    if kind == "sbm":
        block_size = d.choice((1, 1, 3))
        layer: Any = make_attention("sbm", WIDTH, CHANNELS, HEADS, num_clusters=3, estimator=estimator, target_density=d.maybe(d.choice((0.2, 0.6))), block_size=block_size, detach=d.random() < 0.3, window=d.maybe(1), **options)  # fmt: skip
    else:
        scorer = d.choice((Indexer, KeyScorer))(CHANNELS, HEADS)
        source = {
            "coins": lambda: IndexerSource(scorer, select="bernoulli", target_density=d.maybe(0.4)),
            "ranks": lambda: IndexerSource(scorer, select="top_k", k=2),
            "routing": lambda: selectors.RoutingSource(CHANNELS, HEADS, 3, decay=d.choice((0.3, 0.9))),
            "top_k": lambda: selectors.SelectorSource(selectors.top_k, k=2),
            "block_top_k": lambda: selectors.SelectorSource(selectors.block_top_k, k=1, block_size=2),
            "lsh": lambda: selectors.SelectorSource(selectors.lsh, num_buckets=4, chunk_size=2),
            "full": lambda: patterns.PatternSource(patterns.full),
        }[kind]()  # fmt: skip
        learns = kind == "coins" or (kind == "ranks" and estimator != "local")
        layer = AttentionConv(WIDTH, CHANNELS, HEADS, source, estimator=estimator if learns else "none", **options)
    layer = layer.double()
    lengths = d.lengths()
    for seed in (1, 2):
        layer(tokens(d, lengths), ptr=pointer(lengths), seed=seed)
    auxiliary_loss(layer)
    return layer


def tokens(d: Draw, lengths: list[int]) -> Tensor:
    return torch.randn(sum(lengths), WIDTH, generator=d.torch, dtype=torch.float64)


def mean_loss(out: Tensor, ptr: Tensor) -> Tensor:
    """The mean over sequences of what their outputs cost."""
    each = out.new_zeros(ptr.numel() - 1).index_add(0, torch.repeat_interleave(ptr.diff()), out.tanh().square().sum(1))
    return each.mean()


def gradients(layer: Any) -> list[Tensor]:
    return [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]


def equal(pair: list[list[Tensor]], what: str, rtol: float = 1e-4) -> None:
    one, other = pair
    expect(len(one) == len(other), f"{what}: not of the same parameters")
    for first, second in zip(one, other, strict=True):
        close = torch.allclose(first.double(), second.double(), rtol=rtol, atol=1e-7, equal_nan=True)
        expect(close, f"{what}: {float((first - second).abs().max()):.2e} apart")


def scenario(name: str, weight: int) -> Callable[[Callable[[Draw], None]], Callable[[Draw], None]]:
    """A scenario takes a draw, and raises where something is wrong."""

    def add(run: Callable[[Draw], None]) -> Callable[[Draw], None]:
        case(f"scenario: {name}", weight)(lambda d: Case(partial(run, d), {}))
        return run

    return add


@scenario("shared buffers", 6)
def _shared(d: Draw) -> None:
    """Tokens that are views of one buffer, expanded or strided, are as copies of them are; writing into the output afterwards changes no gradient."""
    layer, lengths = any_layer(d), d.lengths()
    buffer, ptr = torch.randn(2 * sum(lengths), 2 * WIDTH, generator=d.torch, dtype=torch.float64), pointer(lengths)
    views = {
        "strided": buffer[::2, ::2],
        "expanded": buffer[:1, :WIDTH].expand(sum(lengths), WIDTH),
        "transposed": buffer.flatten()[: WIDTH * sum(lengths)].view(WIDTH, -1).T,
        "overlapping": buffer.as_strided((sum(lengths), WIDTH), (1, 1)),
    }
    x = views[d.choice(sorted(views))]
    found = []
    for given in (x.clone(memory_format=torch.contiguous_format), x):
        twin = copy.deepcopy(layer)
        out = twin(given, ptr=ptr, seed=3)
        (mean_loss(out, ptr) + auxiliary_loss(twin)).backward()
        found.append([out.detach(), *gradients(twin)])
    equal(found, "a view is not its copy", rtol=1e-9)


@scenario("NaN", 8)
def _nan(d: Draw) -> None:
    """A sequence of NaN is refused by name, or leaves the others alone; states stay finite, and a good batch is then as before."""
    layer = any_layer(d)
    lengths = [d.randint(1, 5) for _ in range(3)]
    x, ptr, which = tokens(d, lengths), pointer(lengths), d.randrange(3)
    sick = x.clone()
    sick[int(ptr[which]) + d.randrange(lengths[which])] = d.choice((torch.nan, torch.inf))
    others = torch.ones(sum(lengths), dtype=torch.bool)
    others[int(ptr[which]) : int(ptr[which + 1])] = False
    wanted = copy.deepcopy(layer)(x, ptr=ptr, seed=5)
    training = d.random() < 0.7
    try:
        out = layer.train(training)(sick, ptr=ptr, seed=5)
    except ValueError as error:
        expect("finite" in str(error) or "NaN" in str(error), f"an unclear refusal: {error}")
    else:
        if training:
            equal([[out[others]], [wanted[others]]], "a sequence of NaN changes others", rtol=1e-6)
        expect(bool(out[others].isfinite().all()), "a sequence of NaN makes others NaN")
    auxiliary_loss(layer)
    layer.train()
    for buffer in layer.buffers():
        expect(not buffer.is_floating_point() or bool(buffer.isfinite().all()), "a state is NaN")
    again = layer(x, ptr=ptr, seed=7)
    expect(bool(again.isfinite().all()), "a good batch after one of NaN is not finite")
