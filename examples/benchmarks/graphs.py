"""Global attention of graph transformers, ours and PyG's: time and peak memory of a forward and backward pass.

    python -m examples.benchmarks.graphs                      one graph of 169,343 nodes, and a batch of 32 graphs of 100 to 10,000
    python -m examples.benchmarks.graphs --suites one --rounds 3

"one" is the attention of a single graph, with 64 channels, 4 heads and 16 edges per node and head. "batch" is a whole layer of GPS without
message passing. First, both layers must have the same outputs and gradients over full graphs. Each turn is a process of its own, on one thread
unless OMP_NUM_THREADS says otherwise; it is warmed up on small graphs. Memory is the peak beyond what the process held before (Linux alone).
"""

import argparse
import math
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch_geometric.nn import GPSConv
from torch_geometric.nn.attention import PerformerAttention, SGFormerAttention

from examples.benchmarks.turns import measure_turns, medians, memory
from examples.common.command import Command
from examples.common.tables import by, markdown
from sbm_pyg import AttentionConv, SparseGPSConv, make_attention, patterns

ARMS = {
    "one": ("learned, 16 edges", "random, 16 edges", "Performer", "SGFormer"),
    "batch": ("learned, 16 edges", "all pairs", "GPSConv, multihead", "GPSConv, performer"),
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    command = Command("python -m examples.benchmarks.graphs", __doc__)
    command.add_argument(
        "--suites", nargs="+", choices=[*ARMS], default=[*ARMS], help="what to measure (default: both)"
    )
    command.option("nodes", 169_343, "of the one graph", least=64)
    command.option("largest", 10_000, "nodes of the largest graph of the batch", least=100)
    command.option("graphs", 32, "in the batch", least=2)
    command.option("rounds", 1, "turns of each", least=1)
    command.option("csv", Path("graphs.csv"), "where to write")
    return command.read(arguments)


CHANNELS, HEADS, EDGES = 64, 4, 16
SHAPE = (CHANNELS, CHANNELS // HEADS, HEADS)
MEASURED = ("seconds", "MiB", "edges")


def layer(name: str) -> nn.Module:
    """The module of an arm."""
    torch.manual_seed(0)
    if name == "Performer":
        return PerformerAttention(CHANNELS, HEADS, CHANNELS // HEADS)
    if name == "SGFormer":
        return SGFormerAttention(CHANNELS, HEADS, CHANNELS // HEADS)
    if name.startswith("GPSConv"):
        return GPSConv(CHANNELS, None, HEADS, attn_type=name.split(", ")[1])
    if name.startswith("learned"):
        attn = make_attention("sbm", *SHAPE, num_clusters=32, budget=float(EDGES), window=None)
    elif name.startswith("random"):
        attn = AttentionConv(*SHAPE, patterns.PatternSource(patterns.random, num_keys_per_query=EDGES, heads=HEADS))
    else:
        attn = AttentionConv(*SHAPE, patterns.PatternSource(patterns.full))
    return SparseGPSConv(CHANNELS, None, attn)


def call(module: nn.Module, suite: str, x: Tensor, batch: Tensor) -> Tensor:
    """The output of a module over nodes."""
    if isinstance(module, GPSConv) and suite == "batch":
        return module(x, None, batch)
    return module.lin_out(module.attn(x)) if isinstance(module, SparseGPSConv) else module(x[None])[0]


def sizes_of(args: argparse.Namespace, suite: str) -> list[int]:
    """Nodes of each graph; those of a batch grow by equal factors."""
    steps = range(args.graphs)
    many = [round(100 * (args.largest / 100) ** (step / (args.graphs - 1))) for step in steps]
    return many if suite == "batch" else [args.nodes]


def turn(arm: str, suite: str, sizes: dict[str, list[int]]) -> dict[str, float]:
    """Seconds and MiB of a pass over graphs, after one over small graphs; and the edges per node and head."""
    module, before, start = layer(arm), 0.0, 0.0
    for lengths in ([64, 100], sizes[suite]):
        x = torch.randn(sum(lengths), CHANNELS, requires_grad=True)
        batch = torch.repeat_interleave(torch.tensor(lengths))
        before, start = memory("VmRSS"), time.perf_counter()
        call(module, suite, x, batch).sum().backward()
    measures = {"seconds": time.perf_counter() - start, "MiB": memory("VmHWM") - before, "edges": math.nan}
    if "edges" in arm and isinstance(module, SparseGPSConv):
        with torch.no_grad():
            measures["edges"] = module.attn(x, batch=batch, return_graph=True)[1].num_edges / (HEADS * len(x))
    return measures


def gate() -> None:
    """Refuses to go on unless the layer of PyG and ours over full graphs agree."""
    gps = layer("GPSConv, multihead")
    assert isinstance(gps, GPSConv)
    sparse_gps = SparseGPSConv.from_gps(gps, source=None)
    batch = torch.repeat_interleave(torch.tensor([9, 40, 21]))
    results = []
    for module in (gps, sparse_gps):
        x = torch.randn(70, CHANNELS, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = module(x, None, batch)
        results.append([out, *torch.autograd.grad(out.sin().sum(), x)])
    for result, reference in zip(*results, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-5)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    gate()
    sizes = {suite: sizes_of(args, suite) for suite in args.suites}
    turns = [{"suite": x, "arm": arm} for x in args.suites for _ in range(args.rounds) for arm in ARMS[x]]
    rows = measure_turns(partial(turn, sizes=sizes), turns, MEASURED, args.csv)
    for suite, arms in by(rows, "suite", "arm").items():
        table = []
        for name, rounds in arms.items():
            seconds, mib, edges = medians(rounds, MEASURED).values()
            table.append([name, f"{seconds:.3g}", f"{mib:,.0f}", "" if math.isnan(edges) else f"{edges:.1f}"])
        print(f"{suite}: {len(sizes[suite])} graphs, {sum(sizes[suite]):,} nodes, the largest {max(sizes[suite]):,}")
        print(markdown(["arm", "seconds", "MiB", "edges per node and head"], table))


if __name__ == "__main__":
    main()
