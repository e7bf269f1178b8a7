"""Graph transformers on real graphs: does attention next to message passing help, and does it matter which pairs attend?

python -m examples.graphs --data DIR                                     chameleon and squirrel, all arms, three splits
python -m examples.graphs --data DIR --graphs minesweeper --arms none random sbm sbm:frozen --dense-part 0
python -m examples.graphs --graphs pattern cluster --conv gin --dropout 0    generated graphs, which need no DIR
python -m examples.graphs --data DIR --graphs peptides_func --conv gin --steps 1000 --batch-size 64    molecules, with features of bonds
python -m examples.graphs --data DIR --graphs cora citeseer --arms gcn learned learned:frozen    edges that are learned, next to given ones
python -m examples.graphs --report                                       tables of what is there

DIR holds chameleon_filtered.npz and others of https://github.com/yandex-research/heterophilous-graphs, with ten splits each. PATTERN and
CLUSTER of Dwivedi et al. (2023) are generated. For peptides_func of the Long Range Graph Benchmark, and molhiv of OGB, DIR or a folder of
that name in it holds the published table; rdkit makes its graphs, once, in two minutes. There, and for generated graphs, a split is a seed
of the model. All arms have the same layers of message passing (--conv); next to them: none, attention over all pairs (full) or its
approximation (performer), both of PyG, random pairs, and pairs that a source chooses which learns (sbm, indexer) or stays as it began
(sbm:frozen, indexer:frozen), all at one density. gcn, for cora and citeseer of Planetoid, is PyG's GCN over the given edges, to which
LearnedGraph adds others in learned. The arm sgformer is the model of PyG; fingerprint are randomized trees on counts of the neighborhoods
of atoms. Scores are accuracy; of minesweeper, tolokers and molhiv the area under the ROC curve; of pattern and cluster the mean of the
accuracies of classes; of peptides_func that of average precisions; all at the step that is best on the validation part. Of several learning
rates, the best on the validation parts counts. The same command goes on after a kill, and skips what is in rows.csv. On a GPU scores differ
between runs: its sums over edges have no fixed order.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.common.command import Command, fields_of, program
from examples.common.tables import finished
from examples.graphs import report, train
from examples.graphs.data import CITATIONS, make_task
from examples.graphs.molecules import FILES

GENERATED = ("pattern", "cluster")
GRAPHS = ("chameleon_filtered", "squirrel_filtered", "minesweeper", "tolokers", *CITATIONS, *GENERATED, *FILES)
ARMS = (
    "none", "full", "performer", "sgformer", "random", "sbm", "sbm:frozen", "indexer", "indexer:frozen", "fingerprint", *train.OF_GCN,
)  # fmt: skip


def fits(arm: str, graph: str) -> bool:
    """Whether an arm is for the kind of a graph."""
    if arm in train.OF_GCN:
        return graph in CITATIONS
    return arm != ("sgformer" if graph in FILES else "fingerprint")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = Command("python -m examples.graphs", __doc__)
    command.add_argument("--data", type=Path, metavar="DIR", help="folder of the archives")
    command.option("graphs", [*GRAPHS[:2]], choices=GRAPHS, metavar="G")
    command.option("arms", [*ARMS], "(default: all)", choices=ARMS, metavar="A")
    command.option("splits", [0, 1, 2], "numbers of the splits, of 0 to 9", least=0, below=10)
    command.option("learning-rates", [3e-3], "tried with each arm", above=0)
    command.fields(train.Run)
    command.option("threads", 1, above=0)
    command.option("accelerator", "auto", choices=("auto", "cpu", "cuda", "mps"))
    command.option("output", Path("runs/graphs"), "of rows.csv and checkpoints")
    command.add_argument("--report", action="store_true", help="train nothing")
    args = command.read(arguments)
    words = "'data' to be the folder of the archives"
    needed = not args.report and not {*args.graphs} <= {*GENERATED}
    command.require(not needed or args.data is not None, words, "none", "Pass its path, as in --help.")
    fits_all = args.conv in train.CONVS or {*args.graphs} <= {*FILES}
    command.require(fits_all, f"'conv' among {', '.join(train.CONVS)} for graphs without features of edges", args.conv)
    return args


def work(args: argparse.Namespace) -> Iterator[Path]:
    """Trains what is missing, then reports."""
    if not args.report:
        device = train.find_device(args.accelerator)
        sizes = args.train_graphs, args.test_graphs, args.walk_length
        graphs = {name: make_task(name, args.data, *sizes, args.output.parent / "molecules") for name in args.graphs}
        options = fields_of(train.Run, args)
        kinds = itertools.product(graphs, args.splits, args.learning_rates, args.arms)
        runs = [
            train.Run(graph, arm, rate, split, **options) for graph, split, rate, arm in kinds
            if fits(arm, graph)
        ]  # fmt: skip
        train.train_all(runs, graphs, args.output, device)
    print(report.tables(finished(args.output)))
    yield args.output


main = program(parse, work)

if __name__ == "__main__":
    main()
