"""Image: CIFAR-10 as rows of 1,024 grey pixels, labelled with what they show.

In: the folder ``cifar-10-batches-py`` as released. Out: rows of token numbers. Not here: batches and the table of tasks
(``tasks.py``).

Grey is ``floor(255.5 (0.2989 R + 0.587 G + 0.114 B) / 255)`` in float32: what ``tf.image.rgb_to_grayscale`` computes, by which
the Long Range Arena (LRA) and those after it made their data. A token is a grey value plus one; 0 is never used, so black is
not padding. The release's files are pickles, which can run any program when they are read. Ours can not: the reader knows
the three names that arrays are made of, and refuses all others.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from examples.lra.data.batches import Row, Rows
from examples.lra.data.files import Release, malformed, places

SPLITS = {
    "held-out": "the second half of data_batch_5 is taken from the training set for validation (45,000/5,000/10,000 of the whole release)"
}
TRAIN, TEST = tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch"
RELEASE = Release(
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
ALLOWED = {("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}


class ArraysOnly(pickle.Unpickler):
    """Reads pickles of dictionaries, lists, numbers, bytes and arrays; anything else is refused before it does anything.

    Raises:
        pickle.UnpicklingError: If the file names anything else.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def open_splits(root: Path, *, split: str = "held-out") -> dict[str, Rows]:
    """Finds the images of each split; ``root`` is a folder like ``RELEASE``, and ``split`` only "held-out".

    Raises:
        ValueError: If files are missing.
    """
    folder = RELEASE.find(root)
    whole, halved = [(folder / name, 0, 2) for name in TRAIN[:-1]], folder / TRAIN[-1]
    return {"train": _rows([*whole, (halved, 0, 1)]), "val": _rows([(halved, 1, 2)]), "test": _rows([(folder / TEST, 0, 2)])}


def _rows(parts: list[tuple[Path, int, int]]) -> Rows:
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
    if not (isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.ndim == 2 and images.shape[1] == 3072):
        got = f"{images.dtype} {list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
        raise malformed(path, None, 'hold b"data" [n, 3072] uint8', got, "Is this CIFAR-10, in its version for Python?")
    if not (isinstance(labels, list) and len(labels) == len(images)):
        got = f"{len(labels)}" if isinstance(labels, list) else type(labels).__name__
        raise malformed(path, None, f'hold b"labels", a list of {len(images)}', got, "Is this CIFAR-10, in its version for Python?")
    for row, label in enumerate(labels):
        if not (type(label) is int and 0 <= label < 10):
            raise malformed(path, None, f"have a label from 0 to 9 in row {row}", repr(label)[:80], "Is this CIFAR-10, and not CIFAR-100?")
    return images, np.array(labels, dtype=np.int64)


def grey(images: np.ndarray) -> np.ndarray:
    """Turns colours into grey values.

    >>> grey(np.array([[255] * 1024 + [0] * 2048, [255] * 3072], dtype=np.uint8))[:, 0]
    array([ 76, 255], dtype=uint8)
    """
    colours = images.reshape(len(images), 3, -1).astype(np.float32) / np.float32(255)
    shares = np.array([0.2989, 0.5870, 0.1140], dtype=np.float32)
    return np.minimum(np.einsum("ncp,c->np", colours, shares) * np.float32(255.5), 255).astype(np.uint8)
