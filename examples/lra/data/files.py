"""Folders of data and of output: found where a release puts them, refused with the way out, made whole or not at all.

In: a path that a user names. Out: what lies there, or an error that says what should. Not here: what the files mean (``readers.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from examples.common.runs import read_record, record_text

MANIFEST = "manifest.json"


def path_argument(text: str) -> Path:
    """Reads a path of the command line, and refuses one that no file or folder can have or that nobody may look at."""
    try:
        for place in (f"{text}/settings.json.partial", *Path(text).parts):  # the length of all, and of each name
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(place)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"Expected a path that the file system can have (got {error.strerror!r} for {text}). Choose another one."
        ) from None
    return Path(text)


def malformed(path: Path, line: int | None, expected: str, got: object) -> ValueError:
    """Makes the error for a file, or a line of it, that is not as it should be.

    >>> malformed(Path("a.tsv"), 3, "have 2 columns", 5)
    ValueError("Expected 'a.tsv:3' to have 2 columns (got 5). Copy, unpack or generate it again.")
    """
    place = path if line is None else f"{path}:{line}"
    return ValueError(f"Expected '{place}' to {expected} (got {got}). Copy, unpack or generate it again.")


def checksum(path: Path) -> str:
    """Returns the sha256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclasses.dataclass(frozen=True)
class Release:
    """A data set as its authors lay it out."""

    name: str  # for messages
    folders: tuple[str, ...]  # what its folder may be called
    parts: tuple[str, ...]  # files and folders that have to be in it
    source: str  # a sentence on where the data come from

    @property
    def tree(self) -> str:
        """What the folder holds, and where it may lie, in words."""
        return f"Its folder, the one given or {' or '.join(self.folders)} in it, holds {', '.join(self.parts)}."

    def find(self, root: Path, level: str = "") -> Path:
        """Finds the first folder that holds all parts: ``root``, one of ``folders`` in it, or one where the release of LRA has them.

        Args:
            root: A folder that a user gives.
            level: Of a data set with levels, a folder each.
        """
        roots = (root, root / "lra_release", root / "lra_release" / "lra_release")
        places = [root, *(above / name for above in roots for name in self.folders)]
        for folder in (*(place / level for place in places), root):
            missing = [part for part in self.parts if not (folder / part).exists()]
            if not missing:
                return folder
            if len(missing) < len(self.parts):
                raise ValueError(
                    f"Expected '{folder}' to hold all of {self.name} (got no {', '.join(missing)}). {self.source}"
                )
        got = "other files" if root.is_dir() else "a file" if root.is_file() else "no such folder"
        name = f"{self.name}, level {level}" if level else self.name
        raise ValueError(f"Expected '{root}' to hold {name} (got {got}). {self.source} {self.tree}")


def read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """Reads what :func:`make_folder` wrote about a folder of ``kind``; empty if the folder is new or empty."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return {}
    way_out = f"Remove {folder}, if it is damaged, and it is made again, or choose another place."
    return read_record(folder / MANIFEST, way_out, f"the manifest of {kind}")


def make_folder(
    folder: Path, kind: str, wanted: dict[str, Any], write: Callable[[Path], dict[str, Any]], *, replace: bool
) -> bool:
    """Makes a folder of data, whole or not at all, unless it is there. Its manifest says what it was made of.

    One process writes to a neighbouring folder, which takes the final name at the end; others that ask meanwhile wait for it. What a
    killed process left is removed by the next one.

    Args:
        folder: Its final name.
        kind: What it holds, for messages.
        wanted: What decides the content. It comes first in the manifest.
        write: Writes the files into an empty folder, and returns what else the manifest shall have.
        replace: Whether a folder that was made of something else is replaced, or refused.

    Returns:
        Whether anything was written.
    """
    folder = folder.resolve()  # has a name and a neighbour on the same disk, even if it is given as "." or as a link
    draft, old = (folder.with_name(f".{folder.name}.{ending}") for ending in ("partial", "old"))

    def is_there() -> bool:
        found = read_manifest(folder, kind)
        same = all(found.get(name) == value for name, value in wanted.items())
        if found and not same and not replace:
            made = {name: found.get(name) for name in wanted}
            raise ValueError(
                f"Expected '{folder}' to be new, empty or the data set asked for (got one made with {made}). Choose another folder, or remove "
                "this one."
            )
        return same

    try:
        with contextlib.suppress(OSError, ValueError):  # errors count under the lock, for which some disks have no room
            if is_there():
                return False
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.parent).close()  # for a lock that cannot be made is waited for without end
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if is_there():
                return False
            try:
                for left in (draft, old):
                    shutil.rmtree(left, ignore_errors=True)
                draft.mkdir()
                content = wanted | write(draft)
                (draft / MANIFEST).write_text(record_text(content))
                if folder.exists():
                    os.replace(folder, old)
                os.replace(draft, folder)
            finally:
                for left in (draft, old):
                    shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        raise ValueError(
            f"Expected '{folder}' to be a place for {kind} (got: {error}). Mend what it names, or choose another place with --data or --prepared DIR."
        ) from error
    return True
