"""DCMM-Transformer: a block model that adds to the scores of a vision transformer, beside one that samples whom tokens attend to.

python -m examples.dcmm                                          full attention, the DCMM bias and sampled graphs, on 8 x 8 digits
python -m examples.dcmm --methods full dcmm dcmm:degree=softplus sbm:estimator=mask dcsbm dcmm-sbm --seeds 0 1 2 3 4
python -m examples.dcmm --data cifar-10-batches-py --patch 4     CIFAR-10 as released, or any folder train/CLASS/*.png, CLASS/*.png
python -m examples.dcmm --data scans --weights vit_small_patch16_224 --learning-rate 5e-5
python -m examples.dcmm --pictures 3                             what the models see in images of a class, as HTML
python -m examples.dcmm --report                                 tables and a figure of what is there

Methods are full; dcmm, the bias of the DCMM-Transformer over all pairs; sbm, a graph that an SBM samples; dcsbm, the same with
corrected degrees; and dcmm-sbm, the bias over the edges that are sampled. Options follow a colon, as in dcmm:degree=sigmoid,squash=0
or sbm:estimator=paper,share=0.1. The method is in the last block, as published, or in all; other blocks attend to all pairs. All methods have
equally many parameters, by a narrower feed-forward network, but for weights that are given. Images of the training set are held out; the model
that is best on them is tested, once. The same command goes on after a kill, and skips what is in rows.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIZES = {  # usual value, and meaning of whole numbers
    "patch": (2, "side of a patch, in pixels"),
    "channels": (64, "of a token"),
    "layers": (4, "blocks"),
    "heads": (4, "of a block"),
    "ffn": (128, "width of the feed-forward network of full attention"),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m examples.dcmm", description=__doc__, formatter_class=formatter)
    words = "digits, or a folder of images (default: digits)"
    parser.add_argument("--data", default="digits", metavar="NAME_OR_FOLDER", help=words)
    words = "side to which images are resized (default: none; of folders 64; of weights theirs)"
    parser.add_argument("--size", type=int, help=words)
    usual = ["full", "dcmm", "sbm"]
    parser.add_argument("--methods", nargs="+", default=usual, metavar="M", help=f"(default: {' '.join(usual)})")
    parser.add_argument("--bias", choices=("last", "all"), default="last", help="blocks of the method (default: last)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="S", help="(default: 0)")
    for name, (value, words) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=f"{words} (default: {value}; of weights theirs)")
    for name, value in (("steps", 400), ("batch-size", 64)):
        parser.add_argument(f"--{name}", type=int, default=value, help="(default: %(default)s)")
    words = "at its peak (default: %(default)s; published for weights: 5e-5)"
    parser.add_argument("--learning-rate", type=float, default=1e-3, help=words)
    words = "share of the training images that is held out (default: %(default)s)"
    parser.add_argument("--validation", type=float, default=0.15, help=words)
    words = "of a vision transformer of timm: a file, or a name if timm is installed"
    parser.add_argument("--weights", metavar="NAME_OR_FILE", help=words)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: %(default)s)")
    words = "of rows.csv, checkpoints, figures and pages (default: %(default)s)"
    parser.add_argument("--output", type=Path, default=Path("runs/dcmm"), metavar="DIR", help=words)
    words = "train nothing; draw images of this class under each method and seed"
    parser.add_argument("--pictures", metavar="CLASS", help=words)
    parser.add_argument("--images", type=int, default=3, help="of a page of pictures (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="train nothing")
    given = parser.parse_args(arguments)
    for name in ("size", *SIZES, "steps", "batch_size", "learning_rate", "threads", "images"):
        value = getattr(given, name)
        if value is not None and value <= 0:
            parser.error(f"Expected '{name.replace('_', '-')}' to be above 0 (got {value}). See --help.")
    if not 0 < given.validation < 1:
        parser.error(f"Expected 'validation' in (0, 1) (got {given.validation}). It is a share of the training images.")
    if min(given.seeds) < 0:
        parser.error(f"Expected 'seeds' of at least 0 (got {given.seeds}). Count them from 0.")
    given.fail = parser.error
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains what is missing, then reports; or draws pictures."""
    given = parse(arguments)
    import torch

    from examples.benchmarks.tables import read
    from examples.dcmm import data, model, pictures, report, train

    torch.set_num_threads(given.threads)
    try:
        paths: list[Path] = []
        if not given.report:
            theirs = model.sizes_of(model.read_weights(given.weights)) if given.weights else {}
            own: dict[str, Any] = {
                name: getattr(given, name) or theirs.get(name, usual) for name, (usual, _) in SIZES.items()
            }
            own |= {name: getattr(given, name) for name in ("steps", "batch_size", "learning_rate", "validation")}
            own |= {"size": given.size or theirs.get("size"), "bias": given.bias, "weights": given.weights}
            if own["channels"] % own["heads"]:
                raise ValueError(f"Expected 'heads' to divide 'channels' = {own['channels']} (got {own['heads']}).")
            images = data.load(given.data, own["size"])
            runs = [train.Run(given.data, method, seed, **own) for seed in given.seeds for method in given.methods]
            if given.pictures is None:
                train.train_all(runs, images, given.output)
            else:
                paths = pictures.draw_all(runs, images, given.pictures, given.images, given.output)
        if given.pictures is None:
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
