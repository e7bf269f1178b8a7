"""Data sets as their authors release them: where their files are, and the reader of CIFAR-10, which programs share."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np


def malformed(path: Path, line: int | None, expected: str, got: object) -> ValueError:
    """Makes the error for a file, or a line of it, that is not as it should be.

    >>> malformed(Path("a.tsv"), 3, "have 2 columns", 5)
    ValueError("Expected 'a.tsv:3' to have 2 columns (got 5). Copy, unpack or generate it again.")
    """
    place = path if line is None else f"{path}:{line}"
    return ValueError(f"Expected '{place}' to {expected} (got {got}). Copy, unpack or generate it again.")


@dataclasses.dataclass(frozen=True)
class Release:
    """A data set as its authors lay it out."""

    name: str  # for messages
    folders: tuple[str, ...]  # usual names of its folder
    parts: tuple[str, ...]  # files and folders that have to be in it
    source: str  # a sentence on where the data come from

    @property
    def tree(self) -> str:
        """The content of the folder and its place, in words."""
        return f"Its folder, the one given or {' or '.join(self.folders)} in it, holds {', '.join(self.parts)}."

    def find(self, root: Path, level: str = "") -> Path:
        """Finds the first folder that holds all parts: ``root``, one of ``folders`` in it, or one where the release of LRA has them.

        A ``level`` is that of a data set with a folder for each. It is an error if a folder that comes before holds only some of the parts.
        """
        roots = (root, root / "lra_release", root / "lra_release" / "lra_release")
        places = [root, *(above / name for above in roots for name in self.folders)]
        for folder in (*(place / level for place in places), root):
            missing = [part for part in self.parts if not (folder / part).exists()]
            if not missing:
                return folder
            if len(missing) < len(self.parts):
                got = f"got no {', '.join(missing)}"
                raise ValueError(f"Expected '{folder}' to hold all of {self.name} ({got}). {self.source}")
        got = "other files" if root.is_dir() else "a file" if root.is_file() else "no such folder"
        name = f"{self.name}, level {level}" if level else self.name
        raise ValueError(f"Expected '{root}' to hold {name} (got {got}). {self.source} {self.tree}")


REVIEWS = Release(
    name="the IMDb reviews",
    folders=("aclImdb",),
    parts=("train/neg", "train/pos", "test/neg", "test/pos"),
    source="It is aclImdb_v1.tar.gz (80 MB) of https://ai.stanford.edu/~amaas/data/sentiment/, unpacked with 'tar -xzf'.",
)
IMAGE = Release(
    name="CIFAR-10",
    folders=("cifar-10-batches-py", "cifar10"),
    parts=(*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
    source="It is cifar-10-python.tar.gz (163 MB) of https://www.cs.toronto.edu/~kriz/cifar.html, unpacked with 'tar -xzf'.",
)
#: All that a pickle of a dictionary of arrays needs; numpy 2 renamed its core.
ALLOWED = {"numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}


class ArraysOnly(pickle._Unpickler):
    """Reads pickles of dictionaries, lists, numbers, bytes and arrays; anything else, which could run a program, is refused.

    The reader in Python, since that in C takes gigabytes where damage makes a number of its memo large.
    """

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads one file: colors, first all red ones of an image, then green, then blue, [n, 3072] uint8, and labels [n], 0 to 9."""
    try:
        with path.open("rb") as file:
            content = ArraysOnly(file, encoding="bytes").load()
        images, labels = content[b"data"].reshape(-1, 3072), np.array(content[b"labels"], dtype=np.int64)
        if images.dtype != np.uint8 or len(images) != len(labels) or not 0 <= labels.min() <= labels.max() < 10:
            raise ValueError(f"{images.dtype} {list(images.shape)}, and {len(labels)} labels")
    except Exception as error:  # a damaged pickle can fail in any way
        expected = 'be a pickle of arrays and nothing else, b"data" [n, 3072] uint8 and b"labels" [n] below 10'
        got = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise malformed(path, None, expected, got) from None
    return images, labels
