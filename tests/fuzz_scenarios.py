"""What the fuzz driver does in several calls: batches in parts, buffers that are edited or shared, checkpointing, NaN, pairs of unlike batches.

Each scenario fills the table of ``fuzz_cases`` under a name that begins with "scenario". It draws a layer, and compares what must be equal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fuzz_cases import Case, Draw, case, expect, pointer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sbm_pyg import AttentionConv, DCMMBias, SBMAttentionConv, Tokens, auxiliary_loss
from sbm_pyg.sources import patterns, selectors
from sbm_pyg.sources.indexer import Indexer, IndexerSource, KeyScorer

WIDTH, CHANNELS, HEADS = 4, 3, 2


def any_layer(d: Draw, pairs: bool = False) -> Any:
    """A layer in float64 over a graph that something chooses, in training, after two batches; ``pairs``: for two sides of unlike tokens."""
    torch.manual_seed(d.getrandbits(32))
    is_causal = d.random() < 0.3
    estimator = d.choice(("local", "imitate", "mask", "none"))  # "distill" samples rows, others in parts of a batch
    kind = d.choice(("sbm", "sbm", "sbm", "coins", "ranks", "routing", "top_k", "block_top_k", "lsh", "full"))
    bias = None if pairs or d.random() < 0.7 else DCMMBias(CHANNELS, HEADS, 2, entropy_weight=d.choice((0.0, 0.3)))
    options: dict[str, Any] = {"is_causal": is_causal, "score_bias": bias}
    if kind == "sbm":
        block_size = 1 if pairs else d.choice((1, 1, 3))
        layer: Any = SBMAttentionConv(
            WIDTH, CHANNELS, HEADS, 3, estimator=estimator, target_density=d.maybe(d.choice((0.2, 0.6))), block_size=block_size,
            detach=d.random() < 0.3, window=None if pairs else d.maybe(1), **options,
        )  # fmt: skip
    else:
        scorer = d.choice((Indexer, KeyScorer))(CHANNELS, HEADS)
        source = {
            "coins": lambda: IndexerSource(scorer, target_density=d.maybe(0.4)),
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


@scenario("accumulation", 12)
def _accumulation(d: Draw) -> None:
    """Two halves of a batch, and a scaled loss, have the gradients and states of the whole."""
    layer = any_layer(d)
    lengths = [d.randint(1, 6) for _ in range(2 * d.randint(1, 2))]
    x, ptr, half = tokens(d, lengths), pointer(lengths), len(lengths) // 2
    scale, found, states = d.choice((1.0, 65536.0)), [], []
    for parts in ([slice(0, 2 * half)], [slice(0, half), slice(half, 2 * half)]):
        twin = copy.deepcopy(layer)
        for part in parts:
            own = ptr[part.start : part.stop + 1]
            rows = x[int(own[0]) : int(own[-1])]
            own, ids = own - own[0], torch.arange(part.start, part.stop)
            given = {"ptr": own, "seed": 5}
            out = twin(rows, **given, sequence_ids=ids)
            ((mean_loss(out, own) + auxiliary_loss(twin)) / len(parts) * scale).backward()
        found.append([grad / scale for grad in gradients(twin)])
        twin(x, ptr=ptr, seed=6)
        states.append([*twin.buffers()])
    equal(found, "parts of a batch have other gradients")
    equal(states, "parts of a batch have other states")


@scenario("checkpointing", 8)
def _checkpointing(d: Draw) -> None:
    layer, lengths = any_layer(d), d.lengths()
    x, ptr, times, found = tokens(d, lengths), pointer(lengths), d.randint(1, 3), []
    for again in (False, True):
        twin = copy.deepcopy(layer)
        total: Any = 0.0
        for seed in range(10, 10 + times):
            run = partial(twin, ptr=ptr, seed=seed)
            out = checkpoint(run, x, use_reentrant=False) if again else run(x)
            total = total + mean_loss(out, ptr) + auxiliary_loss(twin)
        total.backward()
        found.append([*gradients(twin), *twin.buffers()])
    equal(found, "activation checkpointing changes something", rtol=1e-6)


@scenario("edited buffers", 12)
def _edited(d: Draw) -> None:
    """Offsets and numbers of sequences that are written into after a call, through torch or through numpy."""
    layer = any_layer(d)
    one = d.randint(1, 5)
    lengths = [one, d.randint(2, 6), d.randint(1, 5)]
    moved = [one + 1, lengths[1] - 1, lengths[2]]
    x, ids = tokens(d, lengths), d.whole(9, 3)
    through = d.choice(("torch", "numpy"))

    def write(ptr: Tensor, numbers: Tensor) -> None:
        if through == "torch":
            ptr.copy_(pointer(moved))
            numbers.add_(7)
        else:
            ptr.numpy()[:] = pointer(moved).numpy()
            numbers.numpy()[:] += 7

    found = []
    for edited in (False, True):
        twin, ptr, numbers = copy.deepcopy(layer), pointer(lengths), ids.clone()
        out = twin(x, ptr=ptr, seed=3, sequence_ids=numbers)
        loss = mean_loss(out, pointer(lengths)) + auxiliary_loss(twin)
        if edited:
            write(ptr, numbers)
        loss.backward()
        found.append(gradients(twin))
        if edited:
            with torch.no_grad():
                mine = twin(x, ptr=ptr, seed=4, sequence_ids=numbers)
                wanted = copy.deepcopy(twin)(x, ptr=pointer(moved), seed=4, sequence_ids=ids + 7)
            equal([[mine], [wanted]], "a call after an edit sees old offsets", rtol=1e-9)
    equal(found, "an edit after a call changes its gradients", rtol=1e-9)


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


@scenario("unlike batches", 6)
def _unlike(d: Draw) -> None:
    """Queries and keys in other numbers of sequences are refused by name."""
    mine, theirs = ([d.randint(1, 5) for _ in range(count)] for count in d.sample((1, 2, 3), 2))
    ptr = (pointer(theirs), pointer(mine))
    name = d.choice(("tokens", "layer"))
    q, k = (torch.randn(HEADS, sum(side), CHANNELS, generator=d.torch, dtype=torch.float64) for side in (mine, theirs))
    call: Callable[[], Any] = partial(Tokens, q, k, query_ptr=ptr[1], key_ptr=ptr[0])
    if name == "layer":
        call = partial(any_layer(d, pairs=True), (tokens(d, theirs), tokens(d, mine)), ptr=ptr, seed=0)
    try:
        call()
    except ValueError as error:
        expect("ptr'" in str(error), f"{name} names something else: {error}")
    else:
        expect(False, f"{name} took queries in {len(mine)} sequences and keys in {len(theirs)}")
