"""DCMM-Transformer: a block model that adds to the scores of a vision transformer, next to one that samples its attention.

python -m examples.dcmm                                          full attention, the DCMM bias and sampled graphs, on 8 x 8 digits
python -m examples.dcmm --methods full dcmm dcmm:degree=softplus sbm:estimator=mask dcsbm dcmm-sbm --seeds 0 1 2 3 4
python -m examples.dcmm --data cifar-10-batches-py --patch 4     CIFAR-10 as released, or any folder train/CLASS/*.png, CLASS/*.png
python -m examples.dcmm --data scans --weights vit_small_patch16_224 --learning-rate 5e-5
python -m examples.dcmm --pictures 3                             what the models see in images of a class
python -m examples.dcmm --report                                 tables and a figure of what is there

Methods are full; dcmm, the bias of the DCMM-Transformer over all pairs; sbm, a graph that an SBM samples; dcsbm, the same with
corrected degrees; and dcmm-sbm, the bias over the edges that are sampled. Options follow a colon, as in dcmm:degree=sigmoid,squash=0
or sbm:estimator=paper,density=0.1. The method is in the last block, as published, or in all; other blocks attend to all pairs. All methods have
equally many parameters, by a narrower feed-forward network, but for weights that are given. Images of the training set are held out; the model
that is best on them is tested, once. The same command goes on after a kill, and skips what is in rows.csv.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.common.command import Command, fields_of, program, require
from examples.common.tables import finished
from examples.dcmm import data, model, pictures, report, train

SIZES = {  # usual value, and meaning of whole numbers
    "patch": (2, "side of a patch, in pixels"),
    "channels": (64, "of a token"),
    "layers": (4, "blocks"),
    "heads": (4, "of a block"),
    "ffn": (128, "width of the feed-forward network of full attention"),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = Command("python -m examples.dcmm", __doc__)
    command.option("data", "digits", "digits, or a folder of images", metavar="NAME_OR_FOLDER")
    words = "side to which images are resized (default: none; of folders 64; of weights theirs)"
    command.option("size", int, words, above=0)
    command.option("methods", ["full", "dcmm", "sbm"])
    command.option("bias", "last", "blocks of the method", choices=("last", "all"))
    for name, (value, words) in SIZES.items():
        command.option(name, int, f"{words} (default: {value}; of weights theirs)", above=0)
    for name, value in (("steps", 400), ("batch-size", 64)):
        command.option(name, value, above=0)
    words = "at its peak (default: %(default)s; published for weights: 5e-5)"
    command.option("learning-rate", 1e-3, words, above=0)
    command.option("validation", 0.15, "share of the training images that is held out", above=0, below=1)
    words = "of a vision transformer of timm: a file, or a name if timm is installed"
    command.add_argument("--weights", metavar="NAME_OR_FILE", help=words)
    words = "train nothing; draw images of this class under each method and seed"
    command.add_argument("--pictures", metavar="CLASS", help=words)
    command.option("images", 3, "that are drawn", above=0)
    command.folder("runs/dcmm", "of rows.csv, checkpoints and pictures")
    args = command.read(arguments)
    words = "Pictures need the images and the runs that a report does not."
    command.require(not (args.report and args.pictures is not None), "'pictures' without 'report'", "both", words)
    return args


def work(args: argparse.Namespace) -> Iterator[Path]:
    """Trains what is missing, then reports; or draws pictures."""
    if not args.report:
        loaded = model.sizes_of(model.read_weights(args.weights)) if args.weights else {}
        sizes = {name: loaded.get(name, usual) for name, (usual, _) in SIZES.items()}
        setup = fields_of(train.Run, args) | {name: getattr(args, name) or size for name, size in sizes.items()}
        setup["size"] = args.size or loaded.get("size")
        divides, words = setup["channels"] % setup["heads"] == 0, f"'heads' to divide 'channels' = {setup['channels']}"
        require(divides, words, setup["heads"], "See --help.")
        images = data.load(args.data, setup["size"])
        runs = [train.Run(method=method, seed=seed, **setup) for seed in args.seeds for method in args.methods]
        if args.pictures is not None:
            yield from pictures.draw_all(runs, images, args.pictures, args.images, args.output)
            return
        train.train_all(runs, images, args.output)
    if args.pictures is None:
        rows = finished(args.output)
        print(report.tables(rows))
        yield from report.draw(rows, args.output)


main = program(parse, work)

if __name__ == "__main__":
    main()
