"""Does learning to choose pay? Graph sources at equal densities on generated tasks and on text, each next to its frozen twin.

python -m examples.arena                                        all methods on recall, at 5 % of the pairs
python -m examples.arena --tasks two-hop noisy --densities 0.05 0.1 --seeds 0 1 2 --starts dense sparse
python -m examples.arena --chooser mine.py:MySource             a source of your own, next to full attention and random edges
python -m examples.arena --tasks code mine.txt                  predict source code of Python, and a text of your own
python -m examples.arena --experiment served                    where learning begins to pay: 1 to 16 of 16 values can answer
python -m examples.arena --report                               tables and pictures of what is there

Methods are full attention; rules without parameters: window, random (drawn anew at each step), random-fixed (drawn once), bigbird, top-k
(of all scores), blocks (MoBA), nsa (blocks by attention over pooled keys), lsh and routing; and methods that learn: indexer (by the effect
of its edges), dsa (dense warm-up over all keys, then over the selected keys), gates (straight through), concrete (relaxed edges), sbm, and
dash, hsa and sas (blocks that learn through attention itself), spartan (a gate for each pair) and index-share (dsa with one indexer for
all layers). Two more are not run unless named: dcmm, a bias over all pairs, and key-selection. Options follow a colon, as in
sbm:num_clusters=16. Methods that learn bring their frozen twin: the same parameters, and those that choose stay as they began.

A source of your own is a GraphSource in a file. It is made with those of channels, heads and density that its __init__ takes, and its
attribute ``density`` is set before each call. With --starts dense, all methods attend to all pairs for 70 % of the steps. Densities are
those of the pairs beyond self-loops, which all graphs have. The task `length` is tested on longer sequences: there block models keep the
probabilities of training, and queries of other methods keep their number of edges. A task may be a file of text, plain or gzip, whose
last twentieth is the test. The measure of text is bits per token, and bits per recalled token: one that ends a pair of tokens which
stood earlier in its sequence, but not within the last 16. The same command goes on after a kill, and skips what is in rows.csv.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.arena import methods, report, tasks, train
from examples.common.command import Command, fields_of, program
from examples.common.hybrid import is_dense
from examples.common.tables import finished

SERVED = tuple(name for name in tasks.TASKS if name.startswith("served-"))
TASKS = (*tasks.TASKS, "code")

CELLS = {"task": "tasks", "method": "methods", "start": "starts", "density": "densities", "seed": "seeds"}
"""Cells of rows, and the options that choose them."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = Command("python -m examples.arena", __doc__)
    command.add_argument("--experiment", choices=["served"], help="the tasks and methods of an experiment")
    words = f"among {', '.join(TASKS)}, or files of text (default: recall)"
    command.add_argument("--tasks", nargs="+", metavar="T", help=words)
    words = "methods, or FILE.py:CLASS (default: all; of an own source, also full and random)"
    command.add_argument("--choosers", "--chooser", nargs="+", metavar="C", dest="methods", help=words)
    command.option("densities", [0.05], "shares of the pairs beyond self-loops")
    command.option("starts", ["dense"], "of training", choices=["dense", "sparse"])
    command.fields(train.Run)
    command.add_argument("--no-twins", action="store_true", help="leave frozen twins out")
    command.folder(
        "runs/arena", "of rows.csv, checkpoints and pictures; --report takes --tasks, --choosers, --starts ..."
    )
    args = command.read(arguments)
    is_valid = 0 < min(args.densities) <= max(args.densities) < 1
    command.require(is_valid, "'densities' in (0, 1)", args.densities, "Full attention is 'full'.")
    other = [task for task in args.tasks or () if not (task in TASKS or Path(task).is_file())]
    words = f"'tasks' among {', '.join(TASKS)}, or files of text"
    command.require(not other, words, ", ".join(other), "See --help.")
    served = args.experiment == "served"
    args.named = {cell for cell, name in CELLS.items() if getattr(args, name) is not command.get_default(name)}
    args.named |= {"task", "method"} if served else set()
    args.tasks = args.tasks or (list(SERVED) if served else ["recall"])
    args.methods = args.methods or (["full", "random", "sbm"] if served else list(methods.METHODS))
    if all(method.partition(":")[0].endswith(".py") for method in args.methods):
        args.methods = ["full", "random", *args.methods]
    return args


def work(args: argparse.Namespace) -> Iterator[Path]:
    """Trains what is missing, then reports."""
    names: list[str] = []
    for method in args.methods:
        methods.check(method)  # mistakes before the first run
        twin = None if args.no_twins else methods.twin_of(method)
        names += [name for name in (method, twin) if name and name not in names]
    runs = []
    for seed in args.seeds if not args.report else ():
        for task in args.tasks:
            usual = tasks.find(task)
            options = {name: value or getattr(usual, name) for name, value in fields_of(train.Run, args).items()}
            for name in names:
                kinds = [("dense", 1.0)] if is_dense(name) else [(s, d) for s in args.starts for d in args.densities]
                runs += [train.Run(task, name, density, seed, start=start, **options) for start, density in kinds]
    if runs:
        train.train_all(runs, args.output)
    rows = finished(args.output)
    if args.report:
        cells = {cell: getattr(args, name) for cell, name in CELLS.items()} | {"method": names}
        rows = report.select(rows, {cell: cells[cell] for cell in cells if cell in args.named})
    print(report.tables(rows))
    yield from report.draw(rows, args.output)


main = program(parse, work)

if __name__ == "__main__":
    main()
