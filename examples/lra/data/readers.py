"""Readers of the releases that nobody can generate: Text, Retrieval and Image.

In: folders as released. Out: rows of token numbers. Not here: tasks with a generator (``listops.py``, ``pathfinder.py``), batches and the
table of tasks (``tasks.py``). A token is a byte or a grey value plus one; 0 is never used, so black is not padding.

* **Text** is movie reviews (IMDb, Maas et al., 2011), labelled 1 if they are favourable. Nothing is removed, not even ``<br />``, as in
  the Long Range Arena (LRA).
* **Retrieval** is pairs of papers (ACL Anthology Network), labelled 1 if one cites the other. A line is ``label, id, id, text, text``
  between tabs, without header and quoting. LRA wrote the texts as Python literals, ``b'...'``, and reads them as they stand. So do we.
* **Image** is CIFAR-10 as rows of 1,024 grey pixels. Grey is ``floor(255.5 (0.2989 R + 0.587 G + 0.114 B) / 255)`` in float32: what
  ``tf.image.rgb_to_grayscale`` computes, by which LRA and those after it made their data. The files are pickles, which can run any
  program when they are read. Ours can not: the reader knows the three names that arrays are made of, and refuses all others.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from examples.lra.data.batches import Row, Rows
from examples.lra.data.files import Release, malformed, places

CLASSES = ("neg", "pos")  # labels 0 and 1
TEXT_SPLITS = {
    "held-out": "the tenth of each class with the highest numbers is taken from the training set for validation "
    "(22,500/2,500/25,000 of the whole release)",
    "lra": "LRA's own: all of the training set, and the test set for validation too (25,000/25,000/25,000 of the whole release); "
    "its best step is chosen on the test set",
}
TEXT = Release(
    name="the IMDb reviews",
    folders=places("aclImdb"),
    parts=("train/neg", "train/pos", "test/neg", "test/pos"),
    part="part",
    source="It is aclImdb_v1.tar.gz (80 MB) of https://ai.stanford.edu/~amaas/data/sentiment/, unpacked with 'tar -xzf'.",
    picture="""\
        train/neg/0_3.txt    one review each, named NUMBER_STARS.txt
        train/pos/0_9.txt
        test/neg/0_2.txt
        test/pos/0_10.txt""",
)


def open_text(root: Path, *, split: str = "held-out") -> dict[str, Rows]:
    """Finds the reviews of each split.

    Neighbouring numbers may be reviews of one film. So the reviews that are held out are a block of numbers, not a random
    tenth, which would share most of its films with the rest.

    Args:
        root: The folder, see ``TEXT``.
        split: One of ``TEXT_SPLITS``.

    Raises:
        ValueError: If files are missing or have names that are not those of the release, or if there are reviews that no split would read.
    """
    folder = TEXT.find(root)
    for path in sorted(folder.iterdir()):
        if path.name not in ("train", "test") and any((path / name).is_dir() for name in CLASSES):
            raise malformed(
                folder,
                None,
                "hold reviews in train and test alone",
                f"more in {path.name}",
                f"Move those of {path.name} back, or unpack the archive again.",
            )
    whole = {part: [_reviews(folder / part / name) for name in CLASSES] for part in ("train", "test")}
    if split == "lra":
        return {"train": _texts(whole["train"]), "val": _texts(whole["test"]), "test": _texts(whole["test"])}
    kept = [len(paths) - len(paths) // 10 for paths in whole["train"]]
    return {
        "train": _texts([paths[:count] for paths, count in zip(whole["train"], kept, strict=True)]),
        "val": _texts([paths[count:] for paths, count in zip(whole["train"], kept, strict=True)]),
        "test": _texts(whole["test"]),
    }


def _reviews(folder: Path) -> list[Path]:
    """Lists the reviews of a folder in the order of their numbers."""
    numbered = []
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        match = re.fullmatch(r"(\d+)_(\d+)\.txt", path.name)
        if match is None:
            raise malformed(
                path, None, "be named NUMBER_STARS.txt", "another name", "Remove what is not of the release."
            )
        numbered.append((int(match[1]), int(match[2]), path))
    return [path for *_, path in sorted(numbered)]


def _texts(classes: list[list[Path]]) -> Rows:
    files = [(path, label) for label, paths in enumerate(classes) for path in paths]

    def read() -> Iterator[Row]:
        for path, label in files:
            text = path.read_bytes()
            if not text:
                raise malformed(path, None, "hold a review", "an empty file", "Unpack the archive again.")
            yield np.frombuffer(text, dtype=np.uint8).astype(np.uint16) + 1, label

    return Rows([path for path, _ in files], read)


RETRIEVAL_SPLITS = {"release": "as released (147,086/18,090/17,437 of the whole release)"}
PAIRS = {"train": "new_aan_pairs.train.tsv", "val": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
RETRIEVAL = Release(
    name="the pairs of Retrieval",
    folders=places("tsv_data", "aan", "retrieval"),
    parts=tuple(PAIRS.values()),
    part="split",
    source="It is part of lra_release.gz (8 GB), see https://github.com/google-research/long-range-arena; 'tar -xzf' unpacks it.",
    picture="""\
        new_aan_pairs.train.tsv    one pair a line: label, id, id, text, text, between tabs
        new_aan_pairs.eval.tsv
        new_aan_pairs.test.tsv""",
)


def open_retrieval(root: Path, *, split: str = "release") -> dict[str, Rows]:
    """Finds the pairs of each split; ``root`` is a folder like ``RETRIEVAL``, and ``split`` only "release".

    Raises:
        ValueError: If files are missing.
    """
    folder = RETRIEVAL.find(root)
    return {name: Rows([folder / file], partial(read_pairs, folder / file)) for name, file in PAIRS.items()}


def read_pairs(path: Path) -> Iterator[Row]:
    """Yields both texts and the label of each line of a file.

    Args:
        path: The file. CRLF and LF both end a line; nothing else does.

    Yields:
        Two arrays of token numbers, uint16, and the label, 0 or 1, which is ``int(float(...))`` of what is written.

    Raises:
        ValueError: If a line is malformed; the message names file and line.
    """
    with path.open("rb") as file:
        for line, text in enumerate(file, start=1):
            columns = text.rstrip(b"\r\n").split(b"\t")
            if len(columns) != 5:
                raise malformed(
                    path,
                    line,
                    "have five columns, label, two ids and two texts",
                    len(columns),
                    "Look for a cut, merged or quoted line.",
                )
            try:
                label = int(float(columns[0]))
            except (ValueError, OverflowError):
                label = -1
            if label not in (0, 1):
                got = repr(columns[0][:80].decode(errors="replace"))
                raise malformed(
                    path, line, "start with the label 0.0 or 1.0", got, "Look for swapped or damaged columns."
                )
            if not (columns[3] and columns[4]):
                raise malformed(path, line, "hold two texts", "an empty one", "Look for a cut line.")
            first, second = (np.frombuffer(column, dtype=np.uint8).astype(np.uint16) + 1 for column in columns[3:])
            yield (first, second), label


IMAGE_SPLITS = {
    "held-out": "the second half of data_batch_5 is taken from the training set for validation (45,000/5,000/10,000 of the whole release)"
}
TRAIN, TEST = tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch"
IMAGE = Release(
    name="CIFAR-10",
    folders=places("cifar-10-batches-py", "cifar10"),
    parts=(*TRAIN, TEST),
    part="batch",
    source="It is cifar-10-python.tar.gz (163 MB) of https://www.cs.toronto.edu/~kriz/cifar.html, unpacked with 'tar -xzf'.",
    picture="""\
        data_batch_1    pickles of a dictionary with b"data" [n, 3072] uint8 and b"labels"
        ...
        data_batch_5
        test_batch""",
)

#: All that a pickle of a dictionary of arrays needs; numpy 2 renamed its core.
ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}


class ArraysOnly(pickle.Unpickler):
    """Reads pickles of dictionaries, lists, numbers, bytes and arrays; anything else is refused before it does anything.

    Raises:
        pickle.UnpicklingError: If the file names anything else.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def open_image(root: Path, *, split: str = "held-out") -> dict[str, Rows]:
    """Finds the images of each split; ``root`` is a folder like ``IMAGE``, and ``split`` only "held-out".

    Raises:
        ValueError: If files are missing.
    """
    folder = IMAGE.find(root)
    whole, halved = [(folder / name, 0, 2) for name in TRAIN[:-1]], folder / TRAIN[-1]
    return {
        "train": _images([*whole, (halved, 0, 1)]),
        "val": _images([(halved, 1, 2)]),
        "test": _images([(folder / TEST, 0, 2)]),
    }


def _images(parts: list[tuple[Path, int, int]]) -> Rows:
    """Rows of files, from the first to the last half of each that are given."""

    def read() -> Iterator[Row]:
        for path, first, last in parts:
            images, labels = read_batch(path)
            part = slice(first * len(labels) // 2, last * len(labels) // 2)
            yield from zip(grey(images[part]).astype(np.uint16) + 1, labels[part].tolist(), strict=True)

    return Rows([path for path, *_ in parts], read)


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads one file of the release.

    Returns:
        Colours, first all red ones of an image, then green, then blue, [n, 3072] uint8, and labels [n], 0 to 9.

    Raises:
        ValueError: If the file holds anything else than such arrays.
    """
    try:
        data = path.read_bytes()
        # A damaged length would have the reader ask for gigabytes: those of contents are checked by genops, places in its memo here.
        for code, argument, _ in pickletools.genops(data):
            if code.name.endswith("PUT") and isinstance(argument, int) and argument > len(data):
                raise pickle.UnpicklingError(f"it counts to {argument:,} in {len(data):,} bytes")
        content = ArraysOnly(io.BytesIO(data), encoding="bytes").load()
    except (
        pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, ImportError, MemoryError, OverflowError,
        SyntaxError,
    ) as error:  # fmt: skip
        raise malformed(
            path,
            None,
            "be a pickle of arrays and nothing else",
            str(error) or type(error).__name__,
            "Copy it anew, from a source you trust.",
        ) from None
    content = content if isinstance(content, dict) else {}
    images, labels = content.get(b"data"), content.get(b"labels")
    if not (
        isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.ndim == 2 and images.shape[1] == 3072
    ):
        got = f"{images.dtype} {list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
        raise malformed(path, None, 'hold b"data" [n, 3072] uint8', got, "Is this CIFAR-10, in its version for Python?")
    if not (isinstance(labels, list) and len(labels) == len(images)):
        got = f"{len(labels)}" if isinstance(labels, list) else type(labels).__name__
        raise malformed(
            path, None, f'hold b"labels", a list of {len(images)}', got, "Is this CIFAR-10, in its version for Python?"
        )
    for row, label in enumerate(labels):
        if not (type(label) is int and 0 <= label < 10):
            raise malformed(
                path,
                None,
                f"have a label from 0 to 9 in row {row}",
                repr(label)[:80],
                "Is this CIFAR-10, and not CIFAR-100?",
            )
    return images, np.array(labels, dtype=np.int64)


def grey(images: np.ndarray) -> np.ndarray:
    """Turns colours into grey values.

    >>> grey(np.array([[255] * 1024 + [0] * 2048, [255] * 3072], dtype=np.uint8))[:, 0]
    array([ 76, 255], dtype=uint8)
    """
    colours = images.reshape(len(images), 3, -1).astype(np.float32) / np.float32(255)
    shares = np.array([0.2989, 0.5870, 0.1140], dtype=np.float32)
    return np.minimum(np.einsum("ncp,c->np", colours, shares) * np.float32(255.5), 255).astype(np.uint8)
