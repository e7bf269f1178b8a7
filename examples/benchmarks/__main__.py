"""Measures sbm_pyg against named peers on the same work, in one run.

python -m examples.benchmarks kernels            attention over a given graph: ours, torch's SDPA, PyG
python -m examples.benchmarks samplers           sampling of a graph
python -m examples.benchmarks layers             training step of a whole layer, ours and dense
python -m examples.benchmarks growth             time and memory per edge as sequences grow
python -m examples.benchmarks report             tables and plots of all rows that are there
python -m examples.benchmarks learning --help    the study of docs/learning.md
python -m examples.benchmarks kernels --quick    tiny sizes: does it run?

Each peer runs in a process of its own, and must first show that its results are right. One that is wrong is not timed. Peers
of a table take turns, so that a drift of the machine hits all alike. A process that takes longer than its cap is stopped.
Raw numbers go to rows.jsonl in the output folder; the same command skips tables that are whole there. OMP_NUM_THREADS sets
the threads of every peer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PEERS = {  # by suite; what they do is in `kernels` and `samplers`, which bring torch with them
    "kernels": ("ours", "sdpa", "sdpa-masked", "pyg", "pyg-tuned", "pyg-compiled", "wrong"),
    "samplers": ("bernoulli", "edges", "fastrg", "dense", "hard", "wrong"),
    "layers": ("sbm", "dense", "wrong"),
    "growth": ("sampling", "layer"),
}
EXTRA = ("pyg-tuned", "pyg-compiled", "wrong")  # only if they are asked for; the gate must reject "wrong"
FULL: dict[str, Any] = {"tokens": [4096], "densities": [1.0, 5.0, 10.0, 25.0], "blocks": [128], "seconds": 15.0}
QUICK: dict[str, Any] = {"tokens": [192], "densities": [10.0], "blocks": [8], "seconds": 1.0}
OWN: dict[str, dict[str, Any]] = {
    "growth": {"tokens": [2**n for n in range(10, 18)], "densities": [1.0]},
    "samplers": {"blocks": [128, 16]},
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with the sizes of the full or the quick run filled in."""
    about: dict[str, Any] = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m examples.benchmarks", **about)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for suite, peers in PEERS.items():
        add = commands.add_parser(suite, **about).add_argument
        add(
            "--tokens",
            type=int,
            nargs="+",
            metavar="N",
            help="queries, and as many keys (default: 4096; growth: 2^10 .. 2^17)",
        )
        add(
            "--densities",
            type=float,
            nargs="+",
            metavar="PERCENT",
            help="(default: 1 5 10 25; growth: 64 edges per query)",
        )
        add("--blocks", type=int, nargs="+", metavar="K", help="blocks of the model (default: 128; samplers: 128 16)")
        usual = [name for name in peers if name not in EXTRA]
        add("--peers", nargs="+", choices=peers, default=usual, help=f"(default: {' '.join(usual)})")
        add(
            "--seconds",
            type=float,
            metavar="S",
            help="cap of a measurement; what takes longer for one call is not timed (default: 15)",
        )
        add("--seed", type=int, default=0, help="of tensors, masks and models (default: 0)")
        add("--quick", action="store_true", help="tiny sizes in place of these defaults")
        add(
            "--output",
            type=Path,
            default=Path("runs/benchmarks"),
            metavar="DIR",
            help="folder of rows.jsonl (default: %(default)s)",
        )
    add = commands.add_parser("report", **about).add_argument
    add(
        "rows",
        type=Path,
        nargs="*",
        default=[Path("runs/benchmarks/rows.jsonl")],
        help="(default: runs/benchmarks/rows.jsonl)",
    )
    add("--plots", type=Path, metavar="DIR", help="draw time and memory, wherever there are two points or more")
    commands.add_parser("learning", add_help=False)
    options, rest = parser.parse_known_args(arguments)
    options.rest = rest
    if options.rest and options.command != "learning":
        parser.error(f"unrecognized arguments: {' '.join(options.rest)}")
    for name, value in (
        QUICK if "quick" in options and options.quick else {**FULL, **OWN.get(options.command, {})}
    ).items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    if min(*options.tokens, *options.densities, *options.blocks, options.seconds) <= 0 or max(options.densities) > 60:
        parser.error(
            "Expected 'tokens', 'densities', 'blocks' and 'seconds' above 0, and densities of at most 60 percent (got others)."
        )
    if missing := [path for path in getattr(options, "rows", ()) if not path.is_file()]:
        parser.error(f"Expected 'rows' to be files of measurements (got {missing[0]}). Measure first.")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, or reports. Returns 1 where one of our own peers is wrong or broken (slow is neither), else 0."""
    options = parse(arguments)
    if options.command == "learning":
        from examples.benchmarks import learning

        learning.main(options.rest)
        return 0
    from examples.benchmarks.report import as_markdown, plot

    if options.command == "report":
        rows = [json.loads(line) for path in options.rows for line in path.read_text().splitlines()]
        for path in plot(rows, options.plots) if options.plots else ():
            print(f"wrote {path}", file=sys.stderr)
    else:
        from examples.benchmarks.measure import measure_all

        rows = measure_all(options)
    print(as_markdown(rows))
    return int(
        any(
            row["ours"] and row["status"] and not row["status"].startswith(("over the cap", "out of memory"))
            for row in rows
        )
    )


if __name__ == "__main__":
    sys.exit(main())
