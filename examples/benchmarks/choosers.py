"""Times every chooser of graphs on longer and longer sequences: does its cost grow as its law says, and its memory with it?

    python -m examples.benchmarks.choosers                                    about ten minutes on one core
    python -m examples.benchmarks.choosers --choosers lsh sbm --tokens 4096 65536

Each graph has some 32 edges a token. First, on 256 tokens, every chooser must agree with itself when it looks at few rows at a time.
Memory is the peak of the process beyond what it held before (Linux alone). Expect exponents near 1, and near 2 for what
scores all pairs; no chooser makes an array of N x N.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
from pathlib import Path

LAWS = {  # exponent of N in the time of each, with the options below
    "sbm": 1, "lsh": 1, "bucketing": 1, "routing": 1.5, "clustering": 1.5, "block_top_k": 2, "distance": 2, "top_k": 2,
    "indexer": 2, "indexer_top_k": 2,
}  # fmt: skip
NAMES = (*LAWS,)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--choosers", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=f"of {', '.join(NAMES)}"
    )
    sizes = [2**n for n in range(10, 17)]
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=sizes, metavar="N", help="lengths (default: 1024 to 65536)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="no longer sequence after one that took so long (default: 60)"
    )
    parser.add_argument("--csv", type=Path, default=Path("choosers.csv"), help="where to write (default: %(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import csv
import ctypes
import math
import os
import sys
import time
from collections.abc import Callable

import torch

from sbm_pyg import AttentionGraph, GraphSource, SBMHead, SBMSource, Tokens, selectors, sparsefinder
from sbm_pyg.info import tqdm
from sbm_pyg.sources import pairs
from sbm_pyg.sources.indexer import Indexer, IndexerSource
from sbm_pyg.sparsefinder import predictors

Graph = Callable[[Tokens], AttentionGraph]
EDGES, CHANNELS, DIM = 32, 64, 4


def choosers(n: int) -> dict[str, Graph]:
    """Each chooser with the options that give some 32 edges a token; queries and keys are ``[1, n, 64]``."""
    torch.manual_seed(0)
    share, groups = EDGES / n, max(2, n // EDGES)
    projection, centroids = sparsefinder.Projection(CHANNELS, dim=DIM), torch.randn(1, math.isqrt(n), CHANNELS)
    sources = {
        "sbm": SBMSource(SBMHead(CHANNELS, num_blocks=64), share=share),
        "indexer": IndexerSource(Indexer(CHANNELS), share=share),
        "indexer_top_k": IndexerSource(Indexer(CHANNELS), select="top_k", k=EDGES),
    }

    def small(rule: Callable[..., AttentionGraph], **options: object) -> Graph:
        return lambda tokens: rule(tokens.with_vectors(*projection(tokens.query, tokens.key)), **options)

    found: dict[str, Graph] = {
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

    return found | {name: of(source.eval()) for name, source in sources.items()}


def memory(field: str) -> float:
    """MiB of this process by /proc, "VmHWM" at its peak or "VmRSS" now; NaN where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return math.nan
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def measure(graph: Graph, n: int) -> dict[str, float]:
    """Seconds, peak memory and edges of one graph."""
    query, key = torch.randn(2, 1, n, CHANNELS, generator=torch.Generator().manual_seed(n)).unbind(0)
    if os.access("/proc/self/clear_refs", os.W_OK):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = memory("VmRSS"), time.perf_counter()
    edges = graph(Tokens(query, key, bipartite=False)).num_edges
    return {"seconds": time.perf_counter() - start, "MiB": memory("VmHWM") - before, "edges": edges / n}


def gate(name: str) -> None:
    """Refuse a chooser whose graph depends on how many rows it looks at."""
    whole, pairs.CHUNK = pairs.CHUNK, 2**10
    try:
        query, key = torch.randn(2, 1, 256, CHANNELS).unbind(0)
        tokens = Tokens(query, key, bipartite=False)
        few = choosers(256)[name](tokens)
    finally:
        pairs.CHUNK = whole
    if few != choosers(256)[name](tokens):
        sys.exit(f"{name}: other graphs with fewer rows at a time")


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    torch.set_num_threads(1)
    rows = []
    for name in tqdm(given.choosers, unit="chooser"):
        gate(name)
        measure(choosers(1024)[name], 1024)  # compiles kernels
        for n in sorted(given.tokens):
            rows.append({"chooser": name, "tokens": n, **measure(choosers(n)[name], n)})
            if rows[-1]["seconds"] > given.seconds:
                break
    with given.csv.open("w", newline="") as file:
        table = csv.DictWriter(file, [*rows[0]])
        table.writeheader()
        table.writerows(rows)
    print("| chooser | edges a token | longest | seconds | MiB | memory grows as N^ | time grows as N^ | law |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name in given.choosers:
        own = [row for row in rows if row["chooser"] == name]
        last, past = own[-1], own[max(0, len(own) - 3)]
        ratio = math.log(last["tokens"] / past["tokens"]) or math.nan
        growth = [math.log(max(last[x], 1e-9) / max(past[x], 1e-9)) / ratio for x in ("MiB", "seconds")]
        numbers = [f"{last['edges']:.1f}", f"{last['tokens']:,}", f"{last['seconds']:.3g}", f"{last['MiB']:.0f}"]
        print("| " + " | ".join([name, *numbers, *(f"{each:.2f}" for each in growth), f"{LAWS[name]:g}"]) + " |")


if __name__ == "__main__":
    main()
