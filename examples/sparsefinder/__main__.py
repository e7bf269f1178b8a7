"""Sparsefinder: are graphs that are learnt from attention ahead of fixed patterns at equal sparsity?

python -m examples.sparsefinder --train train.txt --test test.txt            a quarter of an hour on one core
python -m examples.sparsefinder --train ... --test ... --every 1 --windows 0 1 3 9 --seeds 0 1 2
python -m examples.sparsefinder --report                                     tables and figures of what is there

Trains a masked language model whose heads normalise by 1.5-entmax, takes its queries, keys and ground-truth graphs, fits projections, clusters
and block models to them, and then, with the same weights, lets each chooser in turn say who attends to whom. Out: rows.csv, a row
for each head and setting; Pareto curves of sparsity against recall and against accuracy on hidden words; maps of single heads; and
words that clusters attract. The same command goes on after a kill, and skips what is in rows.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

CHOOSERS = (
    "window", "distance", "buckets", "clusters", "blocks-v1", "blocks-v2", "random-blocks", "bigbird", "longformer", "stride", "lsh",
    "routing", "sbm", "top-k",
)  # fmt: skip
SIZES = {  # usual value, least value and meaning of whole numbers
    "words": (4096, 3, "words of the vocabulary, the most frequent ones"),
    "length": (128, 8, "words of a sequence"),
    "steps": (1200, 1, "of the training"),
    "batch-size": (16, 1, "sequences of a step"),
    "channels": (128, 8, "of the model"),
    "layers": (2, 1, ""),
    "heads": (4, 1, "of a layer"),
    "fit-sequences": (64, 1, "training sequences that choosers are fitted to"),
    "test-sequences": (32, 1, "test sequences that choosers are measured on"),
    "dim": (4, 1, "dimensions of the projections"),
    "epochs": (8, 1, "passes over the sequences in fitting"),
    "every": (2, 1, "take every so many of each grid; 1: the grids of the slides"),
    "threads": (1, 1, "of the CPU"),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m examples.sparsefinder", description=__doc__, formatter_class=formatter)
    for name, words in (("train", "texts to learn from"), ("test", "texts to be tested on")):
        parser.add_argument(f"--{name}", type=Path, nargs="+", default=[], metavar="FILE", help=words)
    words = f"among {', '.join(CHOOSERS)} (default: all)"
    parser.add_argument("--choosers", nargs="+", default=[*CHOOSERS], choices=CHOOSERS, metavar="NAME", help=words)
    words = "words of the windows beside choosers, odd, or 0 for none (default: 0 3 9)"
    parser.add_argument("--windows", nargs="+", type=int, default=[0, 3, 9], metavar="W", help=words)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="S", help="(default: 0)")
    for name, (usual, _, words) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=usual, help=f"{words} (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of the model (default: %(default)s)")
    words = "share of the words that are hidden (default: %(default)s)"
    parser.add_argument("--hidden", type=float, default=0.2, help=words)
    words = "of rows.csv, checkpoints and figures (default: %(default)s)"
    parser.add_argument("--output", type=Path, default=Path("runs/sparsefinder"), metavar="DIR", help=words)
    parser.add_argument("--report", action="store_true", help="measure nothing; draw what is there")
    given = parser.parse_args(arguments)
    for name, (_, least, _) in SIZES.items():
        value = getattr(given, name.replace("-", "_"))
        if value < least:
            parser.error(f"Expected '{name}' to be at least {least} (got {value}). See --help.")
    if not 0 < given.hidden < 1 or not given.learning_rate > 0:
        parser.error("Expected 'hidden' in (0, 1) and 'learning-rate' above 0 (got others). See --help.")
    if wrong := [window for window in given.windows if window and (window < 0 or window % 2 == 0)]:
        parser.error(f"Expected 'windows' to be odd, or 0 (got {wrong}). A word stands in the middle of its window.")
    if min(given.seeds) < 0:
        parser.error(f"Expected 'seeds' of at least 0 (got {given.seeds}). Count them from 0.")
    if given.channels % (4 * given.heads):
        parser.error(f"Expected 'channels' to be a multiple of 4 x heads (got {given.channels}). Take 32 x heads.")
    missing = [str(path) for path in (*given.train, *given.test) if not path.is_file()]
    if missing or not (given.report or (given.train and given.test)):
        got = ", ".join(missing) or "none"
        parser.error(f"Expected 'train' and 'test' to be files of text (got {got}). Give their paths, as in --help.")
    given.fail = parser.error
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, extracts, fits and measures what is missing, then reports."""
    given = parse(arguments)
    import torch

    from examples.benchmarks.tables import read
    from examples.common.runs import claim, fingerprint, settings_of
    from examples.sparsefinder import model, report, sweep

    torch.set_num_threads(given.threads)
    paths = []
    try:
        if not given.report:
            names = ("words", "length", "steps", "batch_size", "channels", "layers", "heads", "hidden", "learning_rate")
            own = {name: getattr(given, name) for name in names}
            texts = model.read_texts(given.train, given.test, given.words, given.length)
            wanted = [*sweep.settings(given.choosers, given.windows, given.every)]
            runs = [model.Run(seed, **own) for seed in given.seeds]
            measured = (given.hidden, given.fit_sequences, given.test_sequences, given.dim, given.epochs)
            plans = [sweep.Sweep(seed, *measured) for seed in given.seeds]
            told = {
                f"checksum of {name}": fingerprint(map(Path.read_bytes, getattr(given, name)))
                for name in ("train", "test")
            }
            with claim(given.output, "sparsefinder", {**settings_of(runs[0]), **settings_of(plans[0]), **told}):
                for run, plan in zip(runs, plans, strict=True):
                    trained = model.train(run, texts, given.output / f"model-{run.seed}.pt")
                    learnt = sweep.run(trained, texts, plan, wanted, given.output)
                    paths += report.draw_heads(trained, learnt, texts, plan, given.output)
        rows = read(given.output / "rows.csv")
        if not rows:
            raise ValueError(f"Expected 'output' to hold rows (got none in {given.output}). Leave out --report.")
        print(report.tables(rows))
        paths += report.draw(rows, given.output)
    except ValueError as error:
        given.fail(str(error))
    for path in paths:
        print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
