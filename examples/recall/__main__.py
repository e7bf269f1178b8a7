"""Associative recall: which graphs hold the one edge that leads to the answer?

python -m examples.recall                                               full attention and sampled graphs, two minutes
python -m examples.recall --methods window sbm --densities 0.03 0.1 --seeds 0 1 2
python -m examples.recall --report                                      tables and figures of what is there

Methods are full and dcmm, which attend to all pairs; window, random, random-fixed, bigbird, top-k, blocks, lsh and routing; and those
that learn their graphs, sbm, indexer and key-selection. Options follow a colon, as in sbm:estimator=local or
indexer:select=top_k,estimator=imitate; with frozen=1, what chooses does not learn. All have two layers, each a gated short convolution
and attention with self-loops; densities are those of the pairs beyond. The same command goes on after a kill, and skips what is in
rows.csv.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.common import tasks
from examples.common.command import Command, fields_of, program
from examples.common.hybrid import DENSE, options_of
from examples.common.tables import finished
from examples.recall import report, train


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = Command("python -m examples.recall", __doc__)
    command.option("task", "mqar-small", choices=tuple(tasks.TASKS))
    command.option("methods", ["full", "sbm"])
    command.option("densities", [0.05], "shares of the pairs beyond self-loops")
    command.fields(train.Run)
    command.folder("runs/recall", "of rows.csv, checkpoints and figures")
    args = command.read(arguments)
    is_valid = 0 < min(args.densities) <= max(args.densities) < 1
    command.require(is_valid, "'densities' in (0, 1)", args.densities, "Full attention is 'full'.")
    return args


def work(args: argparse.Namespace) -> Iterator[Path]:
    """Trains what is missing, then reports."""
    task = tasks.TASKS[args.task]
    options = {name: value or getattr(task, name) for name, value in fields_of(train.Run, args).items()}
    for method in args.methods:
        options_of(method)  # mistakes before the first run
    if not args.report:
        kinds = [(m, d) for m in args.methods for d in ([1.0] if m.partition(":")[0] in DENSE else args.densities)]
        runs = [train.Run(**options, method=m, density=d, seed=seed) for seed in args.seeds for m, d in kinds]
        train.train_all(runs, args.output)
    rows = finished(args.output)
    print(report.tables(rows))
    yield from report.draw(rows, args.output)


main = program(parse, work)

if __name__ == "__main__":
    main()
