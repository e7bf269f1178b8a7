"""Measures sbm_pyg against named peers on the same work, in one run.

python -m examples.benchmarks kernels            attention over a given graph: ours, torch's SDPA, PyG
python -m examples.benchmarks blocks             the same over blocks of 64 tokens
python -m examples.benchmarks samplers           sampling of a graph
python -m examples.benchmarks layers             training step of a whole layer, ours and dense
python -m examples.benchmarks lengths            the default layer and the dense one, by the length of sequences
python -m examples.benchmarks trained            sampling, attention and whole layers: trained ones, fresh ones and dense ones
python -m examples.benchmarks growth             time per edge as sequences grow, with fresh and with trained layers
python -m examples.benchmarks steps              training step of a whole causal model, in both phases of a Sparsifier
python -m examples.benchmarks sources            time and memory of every graph source as sequences grow
python -m examples.benchmarks graph              global attention of graph transformers, ours and PyG's, over one graph
python -m examples.benchmarks graphs             the same over a batch of 32 graphs
python -m examples.benchmarks features           messages with features of edges, ours and PyG's
python -m examples.benchmarks all                the tables of docs/benchmarks.md, an hour
python -m examples.benchmarks report             tables of all rows that are there

Each peer must first show that its results are right. One that is wrong is not timed. Peers of a table take turns, so that a drift of
the machine hits all alike. Raw numbers go to rows.csv in the output folder; the same command skips tables that are whole there. Memory is the peak of the first call
beyond what the process held before it (Linux alone).
OMP_NUM_THREADS sets the threads of every peer.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.benchmarks.measure import SUITES, measure_all
from examples.benchmarks.report import TITLES, TRAINED, as_markdown
from examples.common.command import Command
from examples.common.runs import check_folder, resumable
from examples.common.tables import read

PAGE: dict[str, list[str]] = {  # suites of "all", and their options
    "trained": [],
    "lengths": ["--densities", "5", "1", "--blocks", "64", "32"], "kernels": [], "blocks": [],
    "layers": ["--peers", "default", "blocks-64", "dense", "--densities", "1.6", "5", "10", "--blocks", "64"],
    "samplers": ["--blocks", "64", "32"], "growth": ["--blocks", "64"],
}  # fmt: skip
EXTRA = ("pyg-compiled", "wrong")  # only if they are asked for; the gate must reject "wrong"
DEFAULTS: dict[str, dict[str, Any]] = {
    "kernels": {"blocks": [0]},  # no model
    "blocks": {"blocks": [0], "densities": [1.6, 5.0, 10.0, 25.0]},
    "samplers": {"blocks": [128, 16]},
    "lengths": {"tokens": [256, 512, 1024, 4096], "densities": [5.0]},
    "trained": {"tokens": [1024, 4096, 16384]},
    "growth": {"tokens": [2**n for n in range(10, 17)], "densities": [0.0]},  # 64 edges per query
    "steps": {"tokens": [64, 256], "densities": [5.0], "blocks": [0]},
    "sources": {"tokens": [2**n for n in range(10, 17)], "densities": [0.0], "blocks": [0]},
    "graph": {"tokens": [169_343], "densities": [0.0], "blocks": [0]},  # nodes of ogbn-arxiv
    "graphs": {"tokens": [10_000], "densities": [0.0], "blocks": [0]},
    "features": {"tokens": [63, 1000, 4000, 6250], "densities": [0.0], "blocks": [0]},
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with the defaults of the suite filled in."""
    command = Command("python -m examples.benchmarks", __doc__)
    command.add_argument("suite", choices=(*TITLES, "all", "report"), help="what to measure")
    command.add_argument("--tokens", type=int, nargs="+", metavar="N", help="(default: 4096; growth: 2^10 .. 2^16)")
    command.add_argument("--densities", type=float, nargs="+", metavar="PERCENT", help="(default: 1 5 10 25)")
    command.add_argument("--blocks", type=int, nargs="+", metavar="K", help="(default: 128; samplers: 128 16)")
    command.add_argument("--peers", nargs="+", metavar="PEER", help=f"(default: all but {' and '.join(EXTRA)})")
    command.option("layers", [*TRAINED], "of the suite trained (default: all)", choices=TRAINED, metavar=None)
    command.option("channels", 32, "channels of each of the two heads", above=0)
    command.option("seconds", 15.0, "limit of one call, above which a peer is not timed", metavar="S", above=0)
    command.option("output", Path("runs/benchmarks"), "of rows.csv")
    args = command.read(arguments)
    if args.suite != "report":
        command.attempt(check_folder, "output", args.output)
    peers: Sequence[str] = ()
    if args.suite in TITLES:
        peers = [*SUITES[args.suite]]
    usual = {"tokens": [4096], "densities": [1.0, 5.0, 10.0, 25.0], "blocks": [128]} | DEFAULTS.get(args.suite, {})
    for name, value in (usual | {"peers": [name for name in peers if name not in EXTRA]}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    unknown = [name for name in args.peers if name not in peers]
    command.require(not unknown, f"'peers' of {args.suite}", unknown, f"Choose from: {', '.join(peers)}.")
    is_valid = min(args.tokens) > 0 and 0 <= min(args.densities) <= max(args.densities) <= 60
    words = "'tokens' above 0, and 'densities' of at most 60 percent"
    command.require(is_valid, words, f"{args.tokens}, {args.densities}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, or reports. Returns 1 where a peer is wrong or broken (slow is neither), else 0."""
    options = parse(arguments)
    if options.suite == "report":
        rows = read(options.output / "rows.csv")
        if not rows:
            options.fail(f"Expected 'output' to hold results (got none in {options.output}). Measure a suite first.")
    else:
        names = ("channels", "seconds", "output")
        shared = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
        page = [parse([suite, *words, *shared]) for suite, words in PAGE.items()]
        with resumable(options.output):
            rows = [row for one in (page if options.suite == "all" else [options]) for row in measure_all(one)]
    print(as_markdown(rows))
    return int(any(str(row["status"]).startswith(("REJECTED", "failed")) and row["peer"] != "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
