"""Times every source of graphs on longer and longer sequences, and compares the growth of time and memory with its law.

    python -m examples.benchmarks.sources                                    about ten minutes on one core
    python -m examples.benchmarks.sources --sources lsh sbm --tokens 4096 65536

Each graph has some 32 edges a token. First, on 256 tokens, every source must make the same graph when it looks at few rows at a time.
Memory is the peak of the process beyond what it held before (Linux alone). Expect exponents near 1, and near 2 for sources that
score all pairs; no source makes an array of N x N.
"""

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch

from examples.benchmarks.turns import memory
from examples.common.command import Command
from examples.common.tables import markdown, write_csv
from sbm_pyg import AttentionGraph, GraphSource, SBMHead, SBMSource, Tokens, selectors, sparsefinder
from sbm_pyg.ops import tiles
from sbm_pyg.progress import tqdm
from sbm_pyg.sources.indexer import Indexer, IndexerSource
from sbm_pyg.sparsefinder import predictors

LAWS = {  # exponent of N in the time of each, with the options below
    "sbm": 1, "lsh": 1, "bucketing": 1, "routing": 1.5, "clustering": 1.5, "block_top_k": 2, "distance": 2, "top_k": 2,
    "indexer": 2, "indexer_top_k": 2,
}  # fmt: skip

command = Command("python -m examples.benchmarks.sources", __doc__)
command.option("sources", [*LAWS], f"of {', '.join(LAWS)} (default: all)", choices=LAWS, metavar="NAME")
command.option("tokens", [2**n for n in range(10, 17)], "lengths", metavar="N", least=64)
command.option("seconds", 60.0, "no longer sequence after one that took so long", above=0)
command.option("csv", Path("sources.csv"), "where to write")

Graph = Callable[[Tokens], AttentionGraph]
EDGES, CHANNELS, DIM = 32, 64, 4


def sources(n: int) -> dict[str, Graph]:
    """Each source with the options that give some 32 edges a token; queries and keys are ``[1, n, 64]``."""
    torch.manual_seed(0)
    share, groups = EDGES / n, max(2, n // EDGES)
    projection, centroids = sparsefinder.Projection(CHANNELS, dim=DIM), torch.randn(1, math.isqrt(n), CHANNELS)
    modules = {
        "sbm": SBMSource(SBMHead(CHANNELS, num_clusters=64), target_density=share, window=None),
        "indexer": IndexerSource(Indexer(CHANNELS), select="bernoulli", target_density=share),
        "indexer_top_k": IndexerSource(Indexer(CHANNELS), k=EDGES),
    }

    def small(rule: Callable[..., AttentionGraph], **options: object) -> Graph:
        return lambda tokens: rule(tokens.with_vectors(*projection(tokens.query, tokens.key)), **options)

    graphs: dict[str, Graph] = {
        "top_k": lambda tokens: selectors.top_k(tokens, EDGES),
        "block_top_k": lambda tokens: selectors.block_top_k(tokens, 2, EDGES // 2),
        "lsh": lambda tokens: selectors.lsh(tokens, 64, EDGES // 2),
        "routing": lambda tokens: selectors.routing(tokens, centroids, EDGES),
        "distance": small(predictors.distance, threshold=1.5, cap=EDGES),
        "bucketing": small(predictors.bucketing, num_buckets=groups * DIM),
        "clustering": small(predictors.clustering, centroids=centroids[..., :DIM] / 2, cap=EDGES),
    }

    def of(source: GraphSource) -> Graph:
        return lambda tokens: source(tokens).graph

    return graphs | {name: of(source.eval()) for name, source in modules.items()}


def measure(graph: Graph, n: int) -> dict[str, float]:
    """Seconds, peak memory and edges of one graph."""
    query, key = torch.randn(2, 1, n, CHANNELS, generator=torch.Generator().manual_seed(n)).unbind(0)
    if os.access("/proc/self/clear_refs", os.W_OK):
        ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before, start = memory("VmRSS"), time.perf_counter()
    edges = graph(Tokens(query, key, bipartite=False)).num_edges
    return {"seconds": time.perf_counter() - start, "MiB": memory("VmHWM") - before, "edges": edges / n}


def gate(name: str) -> None:
    """Refuses a source whose graph depends on how many rows it looks at."""
    query, key = torch.randn(2, 1, 256, CHANNELS).unbind(0)
    with patch.dict(tiles.SCORES_PER_TILE, cpu=2**10):
        few = sources(256)[name](Tokens(query, key, bipartite=False))
    if few != sources(256)[name](Tokens(query, key, bipartite=False)):
        sys.exit(f"{name}: other graphs with fewer rows at a time")


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    args = command.read(arguments)
    torch.set_num_threads(1)
    rows = []
    for name in tqdm(args.sources, unit="source"):
        gate(name)
        measure(sources(1024)[name], 1024)  # compiles kernels
        for n in sorted(args.tokens):
            rows.append({"source": name, "tokens": n, **measure(sources(n)[name], n)})
            if rows[-1]["seconds"] > args.seconds:
                break
    write_csv(args.csv, rows)
    lines = []
    for name in args.sources:
        source_rows = [row for row in rows if row["source"] == name]
        last, past = source_rows[-1], source_rows[max(0, len(source_rows) - 3)]
        ratio = math.log(last["tokens"] / past["tokens"]) or math.nan
        growth = [math.log(max(last[x], 1e-9) / max(past[x], 1e-9)) / ratio for x in ("MiB", "seconds")]
        numbers = [f"{last['edges']:.1f}", f"{last['tokens']:,}", f"{last['seconds']:.3g}", f"{last['MiB']:.0f}"]
        lines.append([name, *numbers, *(f"{exponent:.2f}" for exponent in growth), f"{LAWS[name]:g}"])
    header = ["source", "edges a token", "longest", "seconds", "MiB", "memory grows as N^", "time grows as N^", "law"]
    print(markdown(header, lines))


if __name__ == "__main__":
    main()
