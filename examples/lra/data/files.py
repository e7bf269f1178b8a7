"""Folders of data and of output: refused with the way out, made whole or not at all."""

import argparse
import contextlib
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
    """Reads a path of the command line, and refuses one that no file or folder can have or that may not be read."""
    try:
        for place in (f"{text}/settings.json.partial", *Path(text).parts):  # the length of all, and of each name
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(place)
    except OSError as error:
        got = f"got {error.strerror!r} for {text}"
        words = f"Expected a path that the file system can have ({got}). Choose another one."
        raise argparse.ArgumentTypeError(words) from None
    return Path(text)


def checksum(path: Path) -> str:
    """Returns the sha256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """Reads what :func:`make_folder` wrote about a folder of ``kind``; empty if the folder is new or empty."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return {}
    way_out = f"Remove {folder}, if it is damaged, and it is made again, or choose another place."
    return read_record(folder / MANIFEST, way_out, f"the manifest of {kind}")


def make_folder(
    folder: Path, kind: str, recipe: dict[str, Any], write: Callable[[Path], dict[str, Any]], *, replace: bool
) -> bool:
    """Makes a folder of data, whole or not at all, unless it is there; returns whether anything was written.

    One process writes to a neighboring folder, which takes the final name at the end; others that ask meanwhile wait for it. What a
    killed process left is removed by the next one.

    Args:
        folder: Its final name.
        kind: Its content, for messages.
        recipe: Everything that decides the content, which comes first in the manifest.
        write: Writes the files into an empty folder, and returns what else the manifest shall have.
        replace: Whether a folder that was made of something else is replaced, or refused.
    """
    folder = folder.resolve()  # has a name and a neighbor on the same disk, even if it is given as "." or as a link
    draft, old = (folder.with_name(f".{folder.name}.{ending}") for ending in ("partial", "old"))

    def is_there() -> bool:
        manifest = read_manifest(folder, kind)
        same = all(manifest.get(name) == value for name, value in recipe.items())
        if manifest and not same and not replace:
            made = {name: manifest.get(name) for name in recipe}
            words = f"Expected '{folder}' to be new, empty or the data set asked for (got one made with {made})."
            raise ValueError(f"{words} Choose another folder, or remove this one.")
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
                content = recipe | write(draft)
                (draft / MANIFEST).write_text(record_text(content))
                if folder.exists():
                    os.replace(folder, old)
                os.replace(draft, folder)
            finally:
                for left in (draft, old):
                    shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        words = f"Expected '{folder}' to be a place for {kind} (got: {error}). Mend what it names,"
        raise ValueError(f"{words} or choose another place with --data or --prepared DIR.") from error
    return True
