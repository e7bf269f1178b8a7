"""Text that every machine has: the source code of Python's standard library."""

import random
import sysconfig
from pathlib import Path

LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages"}


def stdlib_files(train_bytes: int = 4_000_000, test_bytes: int = 300_000) -> tuple[list[Path], list[Path]]:
    """Files of the standard library of this interpreter to train on, and others to test on, in an order that is drawn once.

    Files that are not ASCII are left out, as are tests. Other versions of Python have other files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & {*path.relative_to(root).parts})
    random.Random(0).shuffle(found)
    test, train = _take(found, test_bytes), []
    train = _take([path for path in found if path not in {*test}], train_bytes)
    return train, test


def _take(paths: list[Path], size: int) -> list[Path]:
    """The first files that have so many bytes together."""
    taken: list[Path] = []
    for path in paths:
        if size <= 0:
            break
        content = path.read_bytes()
        if content and content.isascii():
            taken.append(path)
            size -= len(content)
    return taken
