"""Long documents on a CPU: classifiers that must find one film review among passages without an opinion.

    python -m examples.long_documents --reviews DIR --fillers wikitext-2/train.txt
    python -m examples.long_documents --reviews DIR --sentences SST-2/train.tsv --fillers F --methods full sbm window --seeds 0 1 2
    python -m examples.long_documents --report                  the table of what is there

DIR holds aclImdb, the reviews of Maas et al. (2011). A document has up to --parts parts of --part-length tokens (16 of 255: 4,097 tokens),
one of them the end of a review. Its first token tells the label. Methods are full; sbm, indexer and random (a block model that does not
learn), at --density, with a window of 8; window, of the same density in the longest documents; and global, that window next to a first
token that attends to all and is seen by all, as in Longformer. Models first see single reviews, for --short-part of the steps. The same
command goes on after a kill, and skips what is in rows.csv.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.common.command import Command, fields_of, program, read_method


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = Command("python -m examples.long_documents", __doc__)
    command.add_argument("--reviews", type=Path, metavar="DIR", help="folder of aclImdb")
    words = "texts whose long lines have no opinion"
    command.add_argument("--fillers", type=Path, nargs="+", metavar="FILE", help=words)
    command.add_argument("--sentences", type=Path, metavar="FILE", help="SST-2's train.tsv, more to learn from")
    command.option("methods", ["full", "sbm", "random", "window"], "as listed above", metavar="M")
    command.option("density", 0.05, "of graphs", above=0, below=1)
    command.option("seeds", [0], least=0)
    command.option("parts", 16, "of the longest documents, a power of two", above=0)
    command.option("part-length", 255, "in tokens", least=15)
    command.option("tests", 500, "reviews of the test set", above=0)
    sizes = {"vocabulary": 4000, "batch-tokens": 8192, "steps": 1500, "channels": 64, "layers": 2}
    for name, usual in {**sizes, "heads": 2, "threads": 1}.items():
        command.option(name, usual, above=0)
    command.option("learning-rate", 2e-3, above=0)
    command.option("short-part", 0.3, "of the steps, on single reviews", least=0)
    command.option("dense-part", 0.7, "of the steps of sources that learn", least=0, below=1)
    command.option("output", Path("runs/long_documents"), "of rows.csv and checkpoints")
    command.add_argument("--report", action="store_true", help="train nothing")
    given = command.read(arguments)
    command.require(given.parts.bit_count() == 1, "'parts' to be a power of two", given.parts)
    command.require(given.channels % given.heads == 0, "'heads' to divide 'channels'", given.heads)
    command.require(given.vocabulary >= 300, "'vocabulary' of at least 300, for all bytes", given.vocabulary)
    missing = [name for name in ("reviews", "fillers") if not getattr(given, name)]
    words = "the paths 'reviews' and 'fillers'"
    command.require(given.report or not missing, words, f"no {' and no '.join(missing)}", "Pass them, as in --help.")
    return given


def work(given: argparse.Namespace) -> Iterator[Path]:
    """Trains what is missing, then reports."""
    from examples.common.tables import finished
    from examples.long_documents import report, train
    from examples.long_documents.data import prepare

    if not given.report:
        own = fields_of(train.Run, given)
        runs = [train.Run(method=method, seed=seed, **own) for seed in given.seeds for method in given.methods]
        for run in runs:
            read_method(run.method, train.METHODS, train.OPTIONS)  # mistakes before the texts are read
        texts, num_tokens = prepare(given)
        train.train_all(runs, texts, num_tokens, given.tests, given.output)
    print(report.table(finished(given.output)))
    yield given.output


main = program(parse, work)

if __name__ == "__main__":
    main()
