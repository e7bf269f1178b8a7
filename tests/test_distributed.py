"""Several processes: the outputs, graphs, gradients and states of one, and the bytes that they send."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from problems import draw
from test_auxiliary import check_parts_have_the_gradients_and_states_of_the_whole
from test_sparsifier import check_processes_with_other_losses_train_one_model
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphConv

import sbm_pyg
from sbm_pyg import (
    ALiBi,
    AttentionConv,
    DCMMBias,
    DensitySource,
    GraphSource,
    HeadParallel,
    LearnedGraph,
    Rotary,
    SBMAttentionConv,
    SBMHead,
    SBMSource,
    SequenceClassifier,
    SequenceEncoder,
    Sparsifier,
    auxiliary_loss,
    make_attention,
    patterns,
    selectors,
    sync_statistics,
)
from sbm_pyg.sources.indexer import Indexer, IndexerSource, KeyScorer
from sbm_pyg.sparsefinder import Projection, SparsefinderSource, predictors
from sbm_pyg.training.estimators import Imitate

ROOT = Path(sbm_pyg.__file__).parents[1]
HEADS, CHANNELS = 4, 4
PTR = torch.tensor([0, 9, 14, 30, 33])
IDS = torch.tensor([5, 0, 2**32 - 1, 7])
COUNTS = {2: [20, 13], 4: [20, 0, 5, 8]}
"""Tokens of each process. Sequences begin in one process and end in another."""


def sbm(**options: Any) -> AttentionConv:
    return make_attention("sbm", 8, CHANNELS, HEADS, num_clusters=3, **options)


def conv(source: Any, **options: Any) -> AttentionConv:
    return AttentionConv(8, CHANNELS, HEADS, source, **options)


LAYERS: dict[str, Callable[[], AttentionConv]] = {
    "block model": sbm, "block model, causal": partial(sbm, target_density=0.4, window=1, is_causal=True),
    "block model, rotary and linear bias": lambda: sbm(score_bias=ALiBi(HEADS), rotary=Rotary(), concat=False),
    "degrees and mixed memberships": partial(sbm, parameterization="mixed", degree_corrected=True, budget=4.0),
    "candidates": partial(sbm, target_density=0.2, candidates=3, is_causal=True),
    "blocks of tokens": partial(sbm, target_density=0.4, block_size=3, pool="learned"),
    "blocks of tokens, causal": partial(sbm, target_density=0.4, block_size=2, is_causal=True),
    "dense, distilled": partial(sbm, target_density=1.0, estimator="distill"),
    "sparse, distilled": partial(sbm, target_density=0.4, estimator="distill"),
    "imitation": partial(sbm, estimator=Imitate(over="all")), "relaxed": partial(sbm, estimator="relaxed"),
    "entmax, and a block model as bias": lambda: sbm(
        normalizer="entmax", score_bias=DCMMBias(CHANNELS, HEADS, 3, entropy_weight=0.3)
    ),
    "indexer": lambda: conv(IndexerSource(Indexer(CHANNELS, HEADS), select="bernoulli")),
    "indexer by rank": lambda: conv(
        IndexerSource(Indexer(CHANNELS, HEADS), select="top_k", k=3), estimator="imitate", is_causal=True
    ),
    "scores of keys": lambda: conv(IndexerSource(KeyScorer(CHANNELS, HEADS), select="bernoulli", target_density=0.3)),
    "window": lambda: conv(patterns.PatternSource(patterns.window, size=2)),
    "random keys of each head": lambda: conv(
        patterns.PatternSource(patterns.random, num_keys_per_query=3, heads=HEADS), is_causal=True
    ),
    "random keys of all heads": lambda: conv(patterns.PatternSource(patterns.random, num_keys_per_query=3)),
    "hashes": lambda: conv(selectors.SelectorSource(selectors.lsh, num_buckets=4, chunk_size=3, rounds=2)),
    "centroids that follow": lambda: conv(selectors.RoutingSource(CHANNELS, HEADS, 3, decay=0.3, window=1)),
    "centroids that are given": lambda: conv(
        selectors.SelectorSource(selectors.routing, centroids=draw(4, HEADS, 3, CHANNELS))
    ),
    "projections": lambda: conv(
        SparsefinderSource(Projection(CHANNELS, HEADS), predictors.bucketing, num_buckets=4, window=1)
    ),
}  # fmt: skip


OF_FOUR = ["block model, causal", "blocks of tokens", "indexer", "random keys of each head", "random keys of all heads"]


def make(name: str) -> AttentionConv:
    torch.manual_seed(0)
    return LAYERS[name]().double()


def loss_of(out: Tensor, processes: int = 1) -> Tensor:
    """A loss whose mean over processes is that of one process with all tokens."""
    return out.tanh().square().sum() * processes / int(PTR[-1])


def near(found: Any, wanted: Any, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9, msg=lambda text: f"{what}: {text}")


def averaged(x: Tensor | None) -> Tensor:
    assert x is not None
    x = x.clone()
    distributed.all_reduce(x)
    return x / distributed.get_world_size()


# ------------------------------------------------------------------ what a process does


def check_heads(rank: int, world: int, name: str) -> None:
    """Two training steps, so that running means and centroids move, and one call without gradients."""
    if rank == 0:  # which compiles the kernels; the others then find them on disk
        first = make(name)
        (loss_of(first(draw(1, int(PTR[-1]), 8), ptr=PTR, seed=1)) + auxiliary_loss(first)).backward()
    distributed.barrier()
    whole, parts = make(name), HeadParallel(make(name))
    counts = COUNTS[world]
    for seed in (1, 2):
        x = draw(seed, int(PTR[-1]), 8).requires_grad_()
        mine = x.detach().split(counts)[rank].clone().requires_grad_()
        wanted, graph = whole(x, ptr=PTR, seed=seed, sequence_ids=IDS, return_graph=True)
        found, some = parts(mine, ptr=PTR, seed=seed, sequence_ids=IDS, return_graph=True)
        near(found, wanted.split(counts)[rank], name)
        for number, head in enumerate(range(HEADS)[parts.own_heads]):
            assert some.head(number) == graph.head(head), name
        whole.zero_grad()
        parts.zero_grad()
        (loss_of(wanted) + auxiliary_loss(whole)).backward()
        (loss_of(found, world) + auxiliary_loss(parts)).backward()
        assert x.grad is not None
        assert mine.grad is not None
        near(mine.grad / world, x.grad.split(counts)[rank], name)
        for (key, one), other in zip(parts.conv.named_parameters(), whole.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), key
            if one.grad is not None:
                near(averaged(one.grad), other.grad, f"{name}, {key}")
        for (key, one), other in zip(parts.conv.named_buffers(), whole.buffers(), strict=True):
            near(one, other, f"{name}, {key}")
    whole.eval()
    parts.eval()
    with torch.no_grad():
        near(parts(mine, ptr=PTR, seed=3), whole(x, ptr=PTR, seed=3).split(counts)[rank], name)


def check_heads_in_16_bits(rank: int, world: int) -> None:
    """Running means and centroids, which training keeps in 32 bits, move as those of one process."""
    for name in ("block model, causal", "centroids that follow"):
        whole, parts = make(name).bfloat16(), HeadParallel(make(name).bfloat16())
        for seed in (1, 2, 3):
            x = draw(seed, int(PTR[-1]), 8).bfloat16()
            whole(x, ptr=PTR, seed=seed)
            parts(x.split(COUNTS[world])[rank], ptr=PTR, seed=seed)
        for (key, one), other in zip(parts.conv.named_buffers(), whole.buffers(), strict=True):
            assert one.dtype == other.dtype, key
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def check_bytes(rank: int, world: int) -> None:
    """What is sent to other processes, counted, and by the formula of the docstring."""
    layer, counts = HeadParallel(make("block model")), COUNTS[world]
    sent, exchange = [], distributed.all_to_all_single

    def counted(out: Tensor, x: Tensor, received: list[int], given: list[int], **options: Any) -> Any:
        sent.append((sum(given) - given[rank]) * x[:1].numel() * x.element_size())
        return exchange(out, x, received, given, **options)

    distributed.all_to_all_single = cast(Any, counted)
    try:
        n, total, heads = counts[rank], sum(counts), HEADS // world
        x = draw(1, n, 8) if n else torch.zeros(0, 8, dtype=torch.float64)
        out = layer(x, ptr=PTR, seed=1)
        to_heads, to_tokens = n * (HEADS - heads) * 3 * CHANNELS * 8, (total - n) * heads * CHANNELS * 8
        assert sent == [to_heads, to_tokens] or n == 0
        out.sum().backward()
        back = [n * (HEADS - heads) * CHANNELS * 8, (total - n) * heads * 3 * CHANNELS * 8]
        assert sent[2:] == back or n == 0
    finally:
        distributed.all_to_all_single = exchange
    everything = torch.tensor(sum(sent))
    distributed.all_reduce(everything)
    assert everything == 8 * total * (HEADS - heads) * CHANNELS * 8  # 4 numbers forward and 4 backward


class Net(nn.Module):
    """Attention between layers of each token."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(8, 8), attention
        self.last = nn.Linear(HEADS * CHANNELS, 3)

    def forward(self, x: Tensor, seed: int) -> Tensor:
        return cast(Tensor, self.last(self.attention(self.first(x), ptr=PTR, seed=seed)))


def net(wrap: Callable[[AttentionConv], nn.Module]) -> Net:
    torch.manual_seed(0)
    return Net(wrap(sbm(target_density=0.4, estimator="distill"))).double()


def check_heads_in_wrappers(rank: int, world: int, wrapper: str) -> None:
    """Three steps of Adam of HeadParallel in DDP, or in FSDP2, are those of one process."""
    whole, parts = net(lambda layer: layer), net(HeadParallel)
    run: nn.Module = parts
    if wrapper == "DDP":
        run = DistributedDataParallel(parts)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(parts.attention)
        fully_shard(parts)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (whole, parts)]
    for seed in (1, 2, 3):
        x = draw(seed, int(PTR[-1]), 8)
        for model, optimizer, mine in zip((whole, run), optimizers, (x, x.split(COUNTS[world])[rank]), strict=True):
            optimizer.zero_grad()
            out = model(mine, seed=seed)
            (loss_of(out, 1 if model is whole else world) + auxiliary_loss(model)).backward()
            optimizer.step()
    for (name, one), other in zip(parts.named_parameters(), whole.parameters(), strict=True):
        near(cast(Any, one).full_tensor() if wrapper == "FSDP2" else one, other, f"{wrapper}, {name}")


TEXT = torch.arange(33) * 7 % 20


def classifier() -> SequenceClassifier:
    torch.manual_seed(0)
    options = {"num_clusters": 3, "target_density": 0.4}
    encoder = SequenceEncoder(20, 8, heads=2, num_layers=1, attention_options=options, dropout=0.0)
    return SequenceClassifier(encoder, num_classes=3).double()


def check_data_parallel(rank: int, world: int, wrapper: str) -> None:
    """Three steps of Adam of a model whose batch is divided by sequences are those of one process."""
    whole, parts = classifier(), sync_statistics(classifier())
    run: nn.Module = parts
    if wrapper == "DDP":
        run = DistributedDataParallel(parts)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in cast(Any, parts).encoder.layers:
            fully_shard(layer)
        fully_shard(parts)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (whole, parts)]
    target, each = torch.tensor([0, 2, 1, 1]), 4 // world
    for seed in (1, 2, 3):
        first, last = rank * each, (rank + 1) * each
        for model, optimizer, (begin, end) in zip((whole, run), optimizers, ((0, 4), (first, last)), strict=True):
            ptr = PTR[begin : end + 1]
            optimizer.zero_grad()
            logits = model(TEXT[ptr[0] : ptr[-1]], ptr - ptr[0], seed=seed, sequence_ids=torch.arange(begin, end))
            nn.functional.cross_entropy(logits, target[begin:end]).backward()
            optimizer.step()
    for (name, one), other in zip(parts.named_parameters(), whole.parameters(), strict=True):
        near(cast(Any, one).full_tensor() if wrapper == "FSDP2" else one, other, f"{wrapper}, {name}")
    for (name, buffer), wanted in zip(parts.named_buffers(), whole.buffers(), strict=True):
        near(buffer, wanted, f"{wrapper}, {name}")


class OfMine(GraphSource):
    """A source with parameters of each head, which it does not declare."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.weight = nn.Parameter(torch.ones(HEADS, 1, CHANNELS))

    def forward(self, tokens: Any) -> Any:
        return selectors.SelectorSource(selectors.top_k, k=2)(
            tokens.with_vectors(tokens.query * self.weight, tokens.key)
        )


class Graphs(nn.Module):
    """A convolution over learned edges."""

    def __init__(self, source: GraphSource, candidates: Any = None) -> None:
        super().__init__()
        self.learned, self.candidates = LearnedGraph(source), candidates
        self.conv = GraphConv(8, 3)

    def forward(self, x: Tensor, seed: int) -> Tensor:
        return cast(Tensor, self.conv(x, *self.learned(x, seed=seed, candidates=self.candidates)))


class Attends(nn.Module):
    """Attention over two sequences."""

    def __init__(self, attention: AttentionConv) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, seed: int) -> Tensor:
        return cast(Tensor, self.attention(x, ptr=torch.tensor([0, 9, 20]), seed=seed))


def scored(select: str, scorer: Any = Indexer, **options: Any) -> IndexerSource:
    return IndexerSource(scorer(CHANNELS, HEADS), select=select, **options)


def pairs(select: str = "bernoulli", **options: Any) -> IndexerSource:
    return IndexerSource(Indexer(8), select=select, **options)


AMONG = patterns.window(20, 4)
TRAINED: dict[str, Callable[[], nn.Module]] = {
    "block model": sbm,
    "mixed memberships with degrees": partial(sbm, parameterization="mixed", degree_corrected=True),
    "candidates": partial(sbm, candidates=3, window=1), "blocks of tokens": partial(sbm, block_size=3, pool="learned"),
    "entmax": partial(sbm, normalizer="entmax"),
    **{
        f"estimator {name}": partial(sbm, estimator=name) for name in ("distill", "imitate", "mask", "paper", "relaxed")
    },
    "concrete": partial(sbm, estimator="concrete"), "fastrg": partial(sbm, method="fastrg"),
    "indexer, drawn": lambda: conv(scored("bernoulli")),
    "indexer, drawn, distilled": lambda: conv(scored("bernoulli", detach=True), estimator="distill"),
    "indexer by rank": lambda: conv(scored("top_k", k=2)),
    "scores of keys, drawn": lambda: conv(scored("bernoulli", KeyScorer)),
    "scores of keys by rank": lambda: conv(scored("top_k", KeyScorer, k=2)),
    "ranks of dot products": lambda: conv(selectors.TopKSource()),
    "centroids": lambda: conv(selectors.RoutingSource(CHANNELS, HEADS, 3)),
    "learned graph": lambda: Graphs(SBMSource(SBMHead(8, num_clusters=3))),
    "learned graph among candidates": lambda: Graphs(SBMSource(SBMHead(8, num_clusters=3), candidates=2), AMONG),
    "learned graph of an indexer": lambda: Graphs(pairs()),
    "learned graph of an indexer among candidates": lambda: Graphs(pairs(), AMONG),
}  # fmt: skip


def check_phases(rank: int, world: int, name: str) -> None:
    """Steps in all phases of training, in DistributedDataParallel, which stops if a parameter has no gradient."""
    torch.manual_seed(0)
    made = TRAINED[name]()
    run = DistributedDataParallel(Attends(made) if isinstance(made, AttentionConv) else made)
    has_density = any(isinstance(module, DensitySource) for module in run.modules())
    sparsifier = Sparsifier(run, 0.3, 12, dense_part=0.5, trial_interval=3) if has_density else None
    optimizer = torch.optim.Adam(run.parameters(), 0.01)
    for step in range(12):
        loss = run(draw(world * step + rank, 20, 8).float(), step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        missing = [key for key, parameter in run.named_parameters() if parameter.grad is None]
        assert not missing, (name, step, missing)
        optimizer.step()
        if sparsifier is not None:
            sparsifier.step(loss)


def check_errors(rank: int, world: int) -> None:
    def refused(message: str, call: Callable[[], Any], kind: type[Exception] = ValueError) -> None:
        with pytest.raises(kind, match=message):
            call()

    x = draw(1, COUNTS[world][rank], 8)
    refused(
        r"Expected 'conv' to be an AttentionConv \(got Linear\)",
        lambda: HeadParallel(cast(Any, nn.Linear(2, 2))),
        TypeError,
    )
    refused(
        r"Expected 'conv' with heads that are a multiple of 2, the number of processes \(got 3\)",
        lambda: HeadParallel(SBMAttentionConv(8, 4, 3, num_clusters=2)),
    )
    refused(r"Expected 'conv' with a source \(got None\)", lambda: HeadParallel(AttentionConv(8, 4, 4)))
    refused(r"Expected 'conv' without 'edge_dim' \(got one\)", lambda: HeadParallel(conv(sbm().source, edge_dim=3)))
    message = r"Expected 'conv.source' to declare its tensors of heads \(got OfMine with `heads`"
    refused(message, lambda: HeadParallel(conv(OfMine())))
    slopes = torch.arange(HEADS)
    message = r"Expected 'conv.score_bias' to be a module with `head_dims` \(got function\)"
    refused(message, lambda: HeadParallel(sbm(score_bias=lambda query, key, graph: slopes[graph.edge_head])))
    layer = HeadParallel(sbm(target_density=0.4).double())
    refused(r"Expected 'x' to be \[N, C_in\]", lambda: layer(x[None], ptr=PTR))
    refused(r"Expected 'ptr' to be the same on all processes", lambda: layer(x, ptr=PTR + rank * (PTR == 9)))
    refused(r"Expected 'seed' to be the same on all processes \(got \[0, 1\]\)", lambda: layer(x, ptr=PTR, seed=rank))
    refused(r"got \[None, 1\]", lambda: layer(x, ptr=PTR, seed=rank or None))
    refused(r"Expected 'ptr' to run from 0 to 33", lambda: layer(x, ptr=PTR[:-1]))
    refused(r"Expected 'ptr' to be \[B\+1\]", lambda: layer(x, ptr=torch.stack([PTR, PTR])))
    sync_statistics(layer)
    refused(
        "Expected 'conv.source' to sum its statistics over processes with the same heads", lambda: layer(x, ptr=PTR)
    )
    own = [distributed.new_group([each]) for each in range(world)]
    sync_statistics(layer, own[rank])
    layer(x, ptr=PTR)
    out = [layer(x, ptr=PTR) for _ in range(2)]  # the first process draws the seeds
    assert not torch.equal(*out)
    assert torch.equal(*(layer.eval()(x, ptr=PTR) for _ in range(2)))  # by the seed of evaluation
    torch.manual_seed(0)
    source: Any = OfMine()
    source.head_dims = {"weight": 0}
    whole = conv(source).double()
    again = HeadParallel(copy.deepcopy(whole))
    near(
        again(x, ptr=PTR),
        whole(torch.cat([draw(1, n, 8) for n in COUNTS[world]]), ptr=PTR).split(COUNTS[world])[rank],
        "",
    )
    from torch.distributed.fsdp import fully_shard

    fully_shard(cast(Any, again.conv.source))
    refused("Expected 'conv.source.weight' to be gathered", lambda: again(x, ptr=PTR))
    sharded = fully_shard(classifier())
    message = r"Expected 'encoder.token.weight' to be a dense tensor with values.*\(got DTensor\). .*gather shards"
    refused(message, lambda: cast(Any, sharded).save_pretrained("never"))


def _process(rank: int, world: int, folder: str, checks: list[Callable[[int, int], None]]) -> None:
    os.environ.update(USE_LIBUV="0")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    for check in checks:
        check(rank, world)
    distributed.barrier()
    distributed.destroy_process_group()


def run(world: int, folder: Path, *checks: Callable[[int, int], None]) -> None:
    torch.multiprocessing.spawn(_process, (world, str(folder), [*checks]), nprocs=world)


# ------------------------------------------------------------------ tests


@pytest.mark.slow
def test_two_processes_compute_and_train_what_one_does(tmp_path: Path) -> None:
    """In processes that are started once: heads, steps within wrappers of torch, and gradients in each phase."""
    wrapped = [
        partial(check, wrapper=wrapper)
        for check in (check_data_parallel, check_heads_in_wrappers)
        for wrapper in ("DDP", "FSDP2")
    ]
    heads = [partial(check_heads, name=name) for name in LAYERS]
    phases = [partial(check_phases, name=name) for name in TRAINED]
    shared = check_parts_have_the_gradients_and_states_of_the_whole, check_processes_with_other_losses_train_one_model
    run(2, tmp_path, *heads, check_bytes, check_heads_in_16_bits, *wrapped, check_errors, *phases, *shared)


@pytest.mark.slow
@pytest.mark.long
def test_heads_of_four_processes_are_those_of_one(tmp_path: Path) -> None:
    """One head each, and a process without tokens."""
    run(4, tmp_path, *(partial(check_heads, name=name) for name in OF_FOUR), check_bytes)


def test_a_process_group_is_needed() -> None:
    with pytest.raises(ValueError, match=r"Expected a process group \(got none\). Start the program by `torchrun`"):
        HeadParallel(sbm())


@pytest.mark.slow
def test_the_program_of_the_guide_runs_on_two_processes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides" / "distributed.md").read_text()
    program = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "train.py").write_text(program)
    losses = []
    for count in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "USE_LIBUV": "0"}
        done = subprocess.run(
            [*command, str(tmp_path / "train.py")], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        losses.append([float(word) for word in re.findall(r"loss ([\d.]+)", done.stdout)])
    assert len(losses[0]) > 1
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
