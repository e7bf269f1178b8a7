"""Sparsefinder: are graphs that are learned from attention ahead of fixed patterns at equal sparsity?

python -m examples.sparsefinder --train train.txt --test test.txt            a quarter of an hour on one core
python -m examples.sparsefinder --train ... --test ... --every 1 --windows 0 1 3 9 --seeds 0 1 2
python -m examples.sparsefinder --report                                     tables and figures of what is there

Trains a masked language model whose heads normalize by 1.5-entmax, takes its queries, keys and true graphs, fits projections, clusters
and block models to them, and then, with the same weights, attends over the graphs of each source in turn. Out: rows.csv, a row
for each head and setting; Pareto curves of sparsity against recall and against accuracy on hidden words; maps of single heads; and
words that clusters attract. The same command goes on after a kill, and skips what is in rows.csv.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.common.command import Command, fields_of, program
from examples.common.runs import checksums, claim, settings_of
from examples.common.tables import finished
from examples.sparsefinder import model, report, sweep
from examples.sparsefinder.sources import GRIDS


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = Command("python -m examples.sparsefinder", __doc__)
    for name, words in (("train", "texts to learn from"), ("test", "texts to be tested on")):
        command.add_argument(f"--{name}", type=Path, nargs="+", default=[], metavar="FILE", help=words)
    command.option(
        "sources", [*GRIDS], f"among {', '.join(GRIDS)} (default: all)", choices=tuple(GRIDS), metavar="NAME"
    )
    command.option("windows", [0, 3, 9], "words of the windows added to sources, odd, or 0 for none")
    command.option("every", 2, "take every so many of each grid; 1: the grids of the slides", least=1)
    command.fields(model.Run)
    command.fields(sweep.Sweep)
    command.folder("runs/sparsefinder", "of rows.csv, checkpoints and figures")
    args = command.read(arguments)
    wrong = [window for window in args.windows if window and (window < 0 or window % 2 == 0)]
    command.require(not wrong, "'windows' to be odd, or 0", wrong, "A word stands in the middle of its window.")
    words = "'channels' to be a multiple of 4 x heads"
    command.require(args.channels % (4 * args.heads) == 0, words, args.channels, "Take 32 x heads.")
    if not args.report:
        command.require_files(train=args.train, test=args.test)
    return args


def work(args: argparse.Namespace) -> Iterator[Path]:
    """Trains, extracts, fits and measures what is missing, then reports."""
    if not args.report:
        texts = model.read_texts(args.train, args.test, args.words, args.length)
        grid = [*sweep.settings(args.sources, args.windows, args.every)]
        runs = [model.Run(seed, **fields_of(model.Run, args)) for seed in args.seeds]
        plans = [sweep.Sweep(seed, **fields_of(sweep.Sweep, args)) for seed in args.seeds]
        inputs = checksums(train=args.train, test=args.test)
        with claim(args.output, "sparsefinder", {**settings_of(runs[0]), **settings_of(plans[0]), **inputs}):
            for run, plan in zip(runs, plans, strict=True):
                trained = model.train(run, texts, args.output / f"model-{run.seed}.pt")
                learned = sweep.run(trained, texts, plan, grid, args.output)
                yield from report.draw_heads(trained, learned, texts, plan, args.output)
    rows = finished(args.output)
    print(report.tables(rows))
    yield from report.draw(rows, args.output)


main = program(parse, work)

if __name__ == "__main__":
    main()
