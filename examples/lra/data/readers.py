"""Readers of the five data sets as they were released, or as ``listops.py`` and ``pathfinder.py`` generate them.

A token is a byte or a gray value plus one; 0 is never used, so black is not padding.

* **ListOps** is trees and their values between a tab. The round brackets carry nothing and are dropped.
* **Text** is movie reviews (IMDb, Maas et al., 2011), labeled 1 if they are favorable. Nothing is removed, not even ``<br />``, as in
  the Long Range Arena (LRA).
* **Retrieval** is pairs of papers (ACL Anthology Network), labeled 1 if one cites the other. A line is ``label, id, id, text, text``
  between tabs, without header and quoting. LRA wrote the texts as Python literals, ``b'...'``, and reads them as they stand. So do we.
* **Image** is CIFAR-10 as rows of 1,024 gray pixels. Gray is ``floor(255.5 (0.2989 R + 0.587 G + 0.114 B) / 255)`` in float32: what
  ``tf.image.rgb_to_grayscale`` computes, by which LRA and those after it made their data.
* **Pathfinder** is images of 32 x 32 pixels, labeled 1 if two discs are joined by a dashed line. The files ``metadata/<b>.npy`` are plain
  text in spite of their name, one line an image: folder, file, number, label, and seven numbers on how it was drawn.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from examples.common.releases import IMAGE, REVIEWS, Release, malformed, read_batch
from examples.lra.data.batches import Row, Rows
from examples.lra.data.listops import HEADER, VOCABULARY
from examples.lra.data.pathfinder import SIDE

LRA = "part of lra_release.gz (8 GB), see https://github.com/google-research/long-range-arena; 'tar -xzf' unpacks it."
GENERATE = (
    f"Generate it with 'python -m examples.lra prepare --task {{}} --generate --data FOLDER'; the original is {LRA}"
)


def _table(
    path: Path, *, columns: int, label: int, classes: int, header: bytes = b""
) -> Iterator[tuple[int, list[bytes], int]]:
    """Yields number, columns and label of each line of a table; CRLF and LF both end a line, nothing else does.

    Columns are between tabs, or between spaces where there is no tab; the label is ``int(float(...))`` of one of them; a ``header`` is not yielded.
    """
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            line = text.rstrip(b"\r\n")
            if header and number == 1:
                if line != header:
                    raise malformed(path, 1, f"be the header {header.decode()!r}", line[:80])
                continue
            fields = line.split(b"\t") if b"\t" in line else line.split()
            if len(fields) != columns:
                raise malformed(path, number, f"have {columns} columns", len(fields))
            try:
                value = int(float(fields[label]))
            except (ValueError, OverflowError):
                value = -1
            if not 0 <= value < classes:
                rule = f"have a label from 0 to {classes - 1} in column {label + 1}"
                raise malformed(path, number, rule, fields[label][:80])
            yield number, fields, value


def _numbers(path: Path) -> list[int]:
    """Returns the numbers in the name of a file, which decide its place."""
    try:
        return [*map(int, path.stem.split("_"))]
    except ValueError:
        raise malformed(path, None, "have numbers alone in its name", path.name) from None


def _tokens(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8).astype(np.uint16) + 1


def open_files(release: Release, read: Callable[[Path], Iterator[Row]], root: Path, *, split: str) -> dict[str, Rows]:
    """Finds the rows of each split of a release whose parts are one file for each; ``split`` is only "release"."""
    paths = [release.find(root) / part for part in release.parts]
    return {name: Rows([path], partial(read, path)) for name, path in zip(("train", "val", "test"), paths, strict=True)}


LISTOPS = Release(
    name="ListOps",
    folders=("listops-1000", "listops"),
    parts=("basic_train.tsv", "basic_val.tsv", "basic_test.tsv"),
    source=GENERATE.format("listops"),
)
LISTOPS_SPLITS = {"release": "as released or generated"}
TOKEN_NUMBER = {word.encode(): number for number, word in enumerate(VOCABULARY, start=1)}


def read_trees(path: Path) -> Iterator[Row]:
    for line, (tree, _), label in _table(path, columns=2, label=1, classes=10, header=HEADER.encode()):
        words = tree.translate(None, b"()").split()
        if not words or not TOKEN_NUMBER.keys() >= set(words):
            raise malformed(path, line, f"hold a tree of {' '.join(VOCABULARY)}", tree[:80])
        yield np.array([TOKEN_NUMBER[word] for word in words], dtype=np.uint8), label


CLASSES = ("neg", "pos")  # labels 0 and 1
TEXT_SPLITS = {
    "held-out": "the tenth of each class with the highest numbers is taken from the training set for validation",
    "lra": "LRA's own: all of the training set, and the test set for validation too; its best step is chosen on the test set",
}


def open_text(root: Path, *, split: str) -> dict[str, Rows]:
    """Finds the reviews of each split, files named NUMBER_STARS.txt.

    Reviews of one film have neighboring numbers, so a block of numbers is held out, not a random tenth.
    """
    folder = REVIEWS.find(root)
    parts: dict[str, list[tuple[Path, int]]] = {"train": [], "val": [], "test": []}
    for label, name in enumerate(CLASSES):
        for part in ("train", "test"):
            paths = (folder / part / name).glob("[0-9]*_[0-9]*.txt")
            ordered = [(path, label) for path in sorted(paths, key=_numbers)]
            num_in_part = len(ordered) - len(ordered) // 10 if part == "train" and split == "held-out" else len(ordered)
            parts[part] += ordered[:num_in_part]
            parts["val"] += ordered if part == "test" and split == "lra" else ordered[num_in_part:]

    def read(files: list[tuple[Path, int]]) -> Iterator[Row]:
        for path, label in files:
            text = path.read_bytes()
            if not text:
                raise malformed(path, None, "hold a review", "an empty file")
            yield _tokens(text), label

    return {name: Rows([path for path, _ in files], partial(read, files)) for name, files in parts.items()}


RETRIEVAL_SPLITS = {"release": "as released"}
RETRIEVAL = Release(
    name="the pairs of Retrieval",
    folders=("tsv_data", "aan", "retrieval"),
    parts=("new_aan_pairs.train.tsv", "new_aan_pairs.eval.tsv", "new_aan_pairs.test.tsv"),
    source="It is " + LRA,
)


def read_pairs(path: Path) -> Iterator[Row]:
    for line, fields, label in _table(path, columns=5, label=0, classes=2):
        if not (fields[3] and fields[4]):
            raise malformed(path, line, "hold two texts", "an empty one")
        yield (_tokens(fields[3]), _tokens(fields[4])), label


IMAGE_SPLITS = {"held-out": "the second half of data_batch_5 is taken from the training set for validation"}


def open_image(root: Path, *, split: str) -> dict[str, Rows]:
    """Finds the images of each split; ``split`` is only "held-out"."""
    *whole, halved, test = (IMAGE.find(root) / part for part in IMAGE.parts)

    def rows(*parts: tuple[Path, int, int]) -> Rows:
        """Of files, from the first to the last half of each that are given."""

        def read() -> Iterator[Row]:
            for path, first, last in parts:
                images, labels = read_batch(path)
                part = slice(first * len(labels) // 2, last * len(labels) // 2)
                yield from zip(gray(images[part]).astype(np.uint16) + 1, labels[part].tolist(), strict=True)

        return Rows([path for path, *_ in parts], read)

    train = rows(*((path, 0, 2) for path in whole), (halved, 0, 1))
    return {"train": train, "val": rows((halved, 1, 2)), "test": rows((test, 0, 2))}


def gray(images: np.ndarray) -> np.ndarray:
    """Turns colors into gray values.

    >>> gray(np.array([[255] * 1024 + [0] * 2048, [255] * 3072], dtype=np.uint8))[:, 0]
    array([ 76, 255], dtype=uint8)
    """
    colors = images.reshape(len(images), 3, -1).astype(np.float32) / np.float32(255)
    shares = np.array([0.2989, 0.5870, 0.1140], dtype=np.float32)
    return np.minimum(np.einsum("ncp,c->np", colors, shares) * np.float32(255.5), 255).astype(np.uint8)


PATHFINDER = Release(
    name="Pathfinder32",
    folders=("pathfinder32", "pathfinder"),
    parts=("imgs", "metadata"),
    source=GENERATE.format("pathfinder"),
)
PATHFINDER_SPLITS = {
    "80-10-10": "of every ten images in the order of the files, eight are for training, the ninth for validation, the tenth for testing"
}


def open_pathfinder(root: Path, *, split: str, level: str) -> dict[str, Rows]:
    """Finds the images of each split; ``split`` is only "80-10-10", and ``level`` one of ``LEVELS``."""
    folder = PATHFINDER.find(root, level)
    metadata = sorted((folder / "metadata").glob("[0-9]*.npy"), key=_numbers)
    lines = itertools.chain(*(_table(path, columns=11, label=3, classes=2) for path in metadata))
    images = [(folder / os.fsdecode(fields[0]) / os.fsdecode(fields[1]), label) for _, fields, label in lines]
    # Folders change when an image comes, goes or is replaced; 200,000 images are too many to look at each of them every time.
    sources = [*metadata, *sorted({path.parent for path, _ in images})]

    def part(places: set[int]) -> Rows:
        chosen = [image for number, image in enumerate(images) if number % 10 in places]
        return Rows(sources, lambda: map(_read_image, chosen))

    return {"train": part(set(range(8))), "val": part({8}), "test": part({9})}


def _read_image(image: tuple[Path, int]) -> Row | None:
    """Reads one image; None if its file is empty, as one of the release is."""
    path, label = image
    try:
        if path.stat().st_size == 0:
            return None
        with Image.open(path, formats=["PNG"]) as picture:
            pixels = np.asarray(picture)
    except (OSError, SyntaxError, ValueError) as error:  # the last two of damaged chunks and impossible names
        raise malformed(path, None, "be an image in PNG", error) from None
    if pixels.shape != (SIDE, SIDE) or pixels.dtype != np.uint8:
        raise malformed(path, None, f"have {SIDE} x {SIDE} gray pixels, uint8", f"{list(pixels.shape)}, {pixels.dtype}")
    return pixels.reshape(-1).astype(np.uint16) + 1, label
