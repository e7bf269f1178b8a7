"""Associative recall: which graphs hold the one edge that tells the answer?

python -m examples.recall                                               full attention and sampled graphs, five minutes
python -m examples.recall --methods window sbm --densities 0.03 0.1 --seeds 0 1 2
python -m examples.recall --report                                      tables and figures of what is there

Methods are full and dcmm, which attend to all pairs; window, random, bigbird, top-k, blocks, lsh and routing; and those that learn
whom to attend to, sbm, indexer and key-selection. Options follow a colon, as in sbm:estimator=local or
indexer:select=top_k,estimator=imitate. All have two layers, each a gated short convolution and attention with self-loops; densities
are those of the pairs beyond. The same command goes on after a kill, and skips what is in rows.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

TASKS = ("mqar-small", "mqar-laptop", "mqar-zoology", "joint-laptop", "joint-paper")  # as tasks.py, which brings torch


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m examples.recall", description=__doc__, formatter_class=formatter)
    parser.add_argument("--task", choices=TASKS, default=TASKS[0], help="(default: %(default)s)")
    parser.add_argument("--methods", nargs="+", default=["full", "sbm"], metavar="M", help="(default: full sbm)")
    words = "shares of the pairs beyond self-loops (default: 0.05)"
    parser.add_argument("--densities", nargs="+", type=float, default=[0.05], metavar="D", help=words)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="S", help="(default: 0)")
    for name, kind in (("steps", int), ("batch-size", int), ("learning-rate", float)):
        parser.add_argument(f"--{name}", type=kind, help="(default: that of the task)")
    for name, usual in (("channels", 64), ("layers", 2), ("heads", 1)):
        parser.add_argument(f"--{name}", type=int, default=usual, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: %(default)s)")
    words = "of rows.csv, checkpoints and figures (default: %(default)s)"
    parser.add_argument("--output", type=Path, default=Path("runs/recall"), metavar="DIR", help=words)
    parser.add_argument("--report", action="store_true", help="train nothing")
    given = parser.parse_args(arguments)
    for name in ("steps", "batch_size", "learning_rate", "channels", "layers", "heads", "threads"):
        value = getattr(given, name)
        if value is not None and value <= 0:
            parser.error(f"Expected '{name.replace('_', '-')}' to be above 0 (got {value}). See --help.")
    if not 0 < min(given.densities) <= max(given.densities) <= 1:
        parser.error(f"Expected 'densities' in (0, 1] (got {given.densities}). They are shares of the pairs.")
    if min(given.seeds) < 0:
        parser.error(f"Expected 'seeds' of at least 0 (got {given.seeds}). Count them from 0.")
    if given.channels % given.heads:
        parser.error(f"Expected 'heads' to divide 'channels' = {given.channels} (got {given.heads}). Take 1, 2 or 4.")
    given.fail = parser.error
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains what is missing, then reports."""
    given = parse(arguments)
    import torch

    from examples.benchmarks.tables import read
    from examples.recall import report, tasks, train
    from examples.recall.model import DENSE

    torch.set_num_threads(given.threads)
    task = tasks.TASKS[given.task]
    own = {name: getattr(given, name) or getattr(task, name) for name in ("steps", "batch_size", "learning_rate")}
    own |= {name: getattr(given, name) for name in ("channels", "layers", "heads")}
    try:
        for method in given.methods:
            train.options_of(method)  # mistakes before the first run
        if not given.report:
            kinds = [
                (m, d) for m in given.methods for d in ([1.0] if m.partition(":")[0] in DENSE else given.densities)
            ]
            train.train_all(
                [train.Run(given.task, *kind, seed, **own) for seed in given.seeds for kind in kinds], given.output
            )
        rows = read(given.output / "rows.csv")
        if not rows:
            raise ValueError(
                f"Expected 'output' to hold finished runs (got none in {given.output}). Leave out --report."
            )
        print(report.tables(rows))
        paths = report.draw(rows, given.output)
    except ValueError as error:
        given.fail(str(error))
    for path in paths:
        print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
