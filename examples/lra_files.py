"""Paths of the command line, and folders of data: found under their several names, refused with the tree that is expected, written whole.

In: a path that a user names. Out: what lies there, an error that says what should, or a new folder that came into being in
one piece. Not here: what the files mean (``lra_listops.py`` and its siblings).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

MANIFEST = "manifest.json"
ARCHIVES = {  # the first that fits; LRA's release is a tar in spite of its name
    "lra_release.gz": "tar -xzf", ".tar.gz": "tar -xzf", ".tgz": "tar -xzf", ".tar": "tar -xf", ".gz": "gunzip -k", ".zip": "unzip"
}  # fmt: skip


def path_argument(text: str) -> Path:
    """Reads a path of the command line, and refuses one that no file or folder can have or that nobody may look at.

    Raises:
        argparse.ArgumentTypeError: If so; argparse adds the name of the option.
    """
    path = Path(text)
    try:
        above = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        for place in (path / "settings.json.partial", *(above / name for name in path.parts)):  # the length of all, and of each name
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(place)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"Expected a path that the file system can have (got {error.strerror!r} for {text}). Choose another one."
        ) from None
    return path


def file_above(folder: Path) -> Path | None:
    """Finds the file that keeps a folder from being made: itself, or one of its parents."""
    return next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)


def check_place(option: str, folder: Path) -> None:
    """Refuses a folder that cannot be made because it is to lie below a file.

    Raises:
        ValueError: If so.
    """
    file = file_above(folder.parent)
    if file is not None:
        raise ValueError(f"Expected '{option}' to be a folder that can be made (got {folder}, but {file} is a file). Choose another one.")


def check_writable(option: str, folder: Path) -> None:
    """Refuses a folder where nothing can be written, by writing in it, or in the first above it that there is; leaves nothing there.

    Raises:
        ValueError: If so.
    """
    place = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise not_writable(option, place, error) from None


def not_writable(option: str, folder: Path, error: OSError) -> ValueError:
    """Puts into words that a folder for output cannot be written."""
    return ValueError(
        f"Expected '{option}' to be a folder that can be written (got {error.strerror!r} for {folder}). Make room or get the right, or "
        "choose another one."
    )


def places(*names: str) -> tuple[str, ...]:
    """Lists where data may lie below the folder given: there, under one of its names, or where the LRA release has it.

    >>> places("listops-1000")
    ('.', 'listops-1000', 'lra_release/listops-1000', 'lra_release/lra_release/listops-1000')
    """
    return (".", *(above + name for above in ("", "lra_release/", "lra_release/lra_release/") for name in names))


def find_folder(
    root: Path,
    folders: Sequence[str],
    parts: Sequence[str],
    what: str,
    tree: str,
    *,
    source: str,
    part: str,
    way_out: str,
    is_there: Callable[[Path], bool] = Path.is_file,
) -> Path:
    """Finds the folder that holds all parts of a data set.

    Args:
        root: The folder that the user gave.
        folders: Where to look below it, see :func:`places`.
        parts: What has to be there, by name.
        what: Name of the data.
        tree: What is expected.
        source: A sentence on where the data comes from.
        part: What a part is called.
        way_out: What to do if some of them are missing.
        is_there: Tells whether a path is a part; files are by default.

    Returns:
        The first of the folders that holds them all.

    Raises:
        ValueError: If there is none, or if one that comes before holds only some.
    """
    for folder in (root / name for name in folders):
        missing = [name for name in parts if not is_there(folder / name)]
        if not missing:
            return folder
        if len(missing) < len(parts):
            raise ValueError(f"Expected '{folder}' to hold every {part} (got no {', '.join(missing)}). {way_out}")
    raise wrong_folder(root, what, tree, source=source)


def wrong_folder(root: Path, what: str, tree: str, *, source: str) -> ValueError:
    """Makes the error for a folder in which data was not found.

    Args:
        root: The folder.
        what: Name of the data.
        tree: What is expected.
        source: A sentence on where the data comes from.

    Returns:
        The error; if there is an archive, it says how to unpack it.
    """
    candidates = sorted(root.iterdir()) if root.is_dir() else [root] if root.is_file() else []
    for path in candidates:
        command = next((command for ending, command in ARCHIVES.items() if path.name.endswith(ending)), None)
        if command is not None:
            place = shlex.quote(str(path.parent))
            target = f" -C {place}" if command.startswith("tar") else f" -d {place}" if command == "unzip" else ""
            return ValueError(
                f"Expected '{root}' to hold {what} (got an archive, {path.name}). Unpack it with: {command} {shlex.quote(str(path))}{target}\n"
                f"to have a folder like this:\n{tree}"
            )
    got = "other files" if root.is_dir() else "a file" if root.is_file() else "no such folder"
    return ValueError(f"Expected '{root}' to hold {what} (got {got}). {source} The folder looks like this:\n{tree}")


def malformed(path: Path, line: int | None, expected: str, got: object, way_out: str) -> ValueError:
    """Makes the error for a file, or a line of it, that is not as it should be."""
    place = f"{path}" if line is None else f"{path}:{line}"
    return ValueError(f"Expected '{place}' to {expected} (got {got}). {way_out}")


def count_lines(path: Path) -> int:
    """Counts the lines of a file; a last line without an end counts too."""
    lines, last = 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            lines += block.count(b"\n")
            last = block[-1:]
    return lines + (last != b"\n")


def checksum(path: Path) -> str:
    """Returns the sha256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def new_data_set(folder: Path, wanted: dict[str, Any]) -> Iterator[Path | None]:
    """Gives a neighbouring folder to write a data set to, which takes its final name if all goes well and vanishes if not.

    Several processes may ask for one data set at the same time: one writes it, the others wait. What a killed process left is
    removed by the next one.

    Args:
        folder: Where the data set is to lie.
        wanted: What its manifest will say.

    Yields:
        The folder to write to, or None if the data set is there.

    Raises:
        ValueError: If the folder holds something else, or if nothing can be written there.
    """
    folder = folder.resolve()  # has a name and a neighbour on the same disk, even if it is given as "." or as a link
    try:
        if already_generated(folder, wanted):  # without a lock, which a disk for reading only has no room for
            yield None
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.parent).close()  # for a lock that cannot be made is waited for without end
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if already_generated(folder, wanted):
                yield None
                return
            draft = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(draft, ignore_errors=True)
            try:
                draft.mkdir()
                yield draft
                os.replace(draft, folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise ValueError(
            f"Expected '{folder}' to be a place for generated data (got: {error}). Make room there, change its rights, or generate "
            "elsewhere, with: python examples/lra_tasks.py generate --out DIR"
        ) from error


def already_generated(folder: Path, wanted: dict[str, Any]) -> bool:
    """Tells whether a folder holds a data set whose manifest says ``wanted``.

    Raises:
        ValueError: If the folder holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"Expected '{folder}' to be a folder (got a file). Choose another name.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    manifest = folder / MANIFEST
    try:
        found = json.loads(manifest.read_text()) if manifest.is_file() else {}
        found = found if isinstance(found, dict) else {}
    except ValueError as error:
        raise malformed(
            manifest, None, "be the manifest of a generated data set", error, "Remove its folder, to have it made again."
        ) from None
    if {name: found.get(name) for name in wanted} == wanted:
        return True
    got = f"one made with seed {found.get('seed')} and {found.get('parameters')}" if found else f"files without {MANIFEST}"
    raise ValueError(
        f"Expected '{folder}' to be new, empty or the data set asked for (got {got}). Choose another folder, or remove this one."
    )
