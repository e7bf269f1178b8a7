"""Text: movie reviews as bytes, labelled 1 if they are favourable (IMDb, Maas et al., 2011).

In: the folder ``aclImdb`` as released. Out: rows of token numbers. Not here: batches and the table of tasks
(``tasks.py``).

A token is a byte plus one; 0 is never used. Nothing is removed, not even ``<br />``, as in the Long Range Arena (LRA).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from examples.lra.data.batches import Row, Rows
from examples.lra.data.files import Release, malformed, places

CLASSES = ("neg", "pos")  # labels 0 and 1
SPLITS = {
    "held-out": "the tenth of each class with the highest numbers is taken from the training set for validation "
    "(22,500/2,500/25,000 of the whole release)",
    "lra": "LRA's own: all of the training set, and the test set for validation too (25,000/25,000/25,000 of the whole release); "
    "its best step is chosen on the test set",
}
RELEASE = Release(
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


def open_splits(root: Path, *, split: str = "held-out") -> dict[str, Rows]:
    """Finds the reviews of each split.

    Neighbouring numbers may be reviews of one film. So the reviews that are held out are a block of numbers, not a random
    tenth, which would share most of its films with the rest.

    Args:
        root: The folder, see ``RELEASE``.
        split: One of ``SPLITS``.

    Raises:
        ValueError: If files are missing or have names that are not those of the release, or if there are reviews that no split would read.
    """
    folder = RELEASE.find(root)
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
        return {"train": _rows(whole["train"]), "val": _rows(whole["test"]), "test": _rows(whole["test"])}
    kept = [len(paths) - len(paths) // 10 for paths in whole["train"]]
    return {
        "train": _rows([paths[:count] for paths, count in zip(whole["train"], kept, strict=True)]),
        "val": _rows([paths[count:] for paths, count in zip(whole["train"], kept, strict=True)]),
        "test": _rows(whole["test"]),
    }


def _reviews(folder: Path) -> list[Path]:
    """Lists the reviews of a folder in the order of their numbers."""
    numbered = []
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        match = re.fullmatch(r"(\d+)_(\d+)\.txt", path.name)
        if match is None:
            raise malformed(path, None, "be named NUMBER_STARS.txt", "another name", "Remove what is not of the release.")
        numbered.append((int(match[1]), int(match[2]), path))
    return [path for *_, path in sorted(numbered)]


def _rows(classes: list[list[Path]]) -> Rows:
    files = [(path, label) for label, paths in enumerate(classes) for path in paths]

    def read() -> Iterator[Row]:
        for path, label in files:
            text = path.read_bytes()
            if not text:
                raise malformed(path, None, "hold a review", "an empty file", "Unpack the archive again.")
            yield np.frombuffer(text, dtype=np.uint8).astype(np.uint16) + 1, label

    return Rows([path for path, _ in files], read)
