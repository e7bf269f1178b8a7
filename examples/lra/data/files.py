"""Folders of data and of output: found where a release puts them, refused with the way out, written whole or not at all.

In: a path that a user names. Out: what lies there, or an error that says what should. Not here: what the files mean (``listops.py`` and
its siblings).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
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
        for place in (
            path / "settings.json.partial",
            *(above / name for name in path.parts),
        ):  # the length of all, and of each name
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(place)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"Expected a path that the file system can have (got {error.strerror!r} for {text}). Choose another one."
        ) from None
    return path


def check_folder(option: str, folder: Path, write: bool = True) -> None:
    """Refuses a folder that cannot be made, or not be written: that is tried in the first folder above that there is, and leaves nothing.

    Raises:
        ValueError: If so.
    """
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if not place.is_dir():
        raise ValueError(
            f"Expected '{option}' to be a folder that can be made (got {folder}, but {place} is a file). Choose another one."
        )
    try:
        if write:
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


@dataclasses.dataclass(frozen=True)
class Release:
    """A data set as its authors lay it out.

    Args:
        name: For messages.
        folders: Where to look below the folder that a user gives, see :func:`places`.
        parts: Files and folders that have to be there.
        part: What a part is called.
        source: A sentence on where the data come from.
        picture: What the folder looks like.
        way_out: What to do if some parts are missing.
    """

    name: str
    folders: tuple[str, ...]
    parts: tuple[str, ...]
    part: str
    source: str
    picture: str
    way_out: str = "Unpack the archive again."

    @property
    def tree(self) -> str:
        """The picture, and the names that its folder may have."""
        return f"    <folder>/\n{self.picture}\nwhere <folder> is the one given or, below it, one of {', '.join(self.folders[1:])}"

    def find(self, root: Path, level: str = "") -> Path:
        """Finds the first folder below ``root`` that holds all parts; of a data set with levels, that of a level.

        Raises:
            ValueError: If there is none, or if one that comes before holds only some.
        """
        name = f"{self.name}, level {level}" if level else self.name
        for folder in (*(root / place / level for place in self.folders), root):
            missing = [part for part in self.parts if not (folder / part).exists()]
            if not missing:
                return folder
            if len(missing) < len(self.parts):
                raise ValueError(
                    f"Expected '{folder}' to hold every {self.part} (got no {', '.join(missing)}). {self.way_out}"
                )
        for path in sorted(root.iterdir()) if root.is_dir() else [root] if root.is_file() else []:
            command = next((command for ending, command in ARCHIVES.items() if path.name.endswith(ending)), None)
            if command is not None:
                above = shlex.quote(str(path.parent))
                target = f" -C {above}" if command.startswith("tar") else f" -d {above}" if command == "unzip" else ""
                raise ValueError(
                    f"Expected '{root}' to hold {name} (got an archive, {path.name}). Unpack it with: {command} "
                    f"{shlex.quote(str(path))}{target}\nto have a folder like this:\n{self.tree}"
                )
        got = "other files" if root.is_dir() else "a file" if root.is_file() else "no such folder"
        raise ValueError(
            f"Expected '{root}' to hold {name} (got {got}). {self.source} The folder looks like this:\n{self.tree}"
        )


def write_text(path: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    draft = path.with_name(path.name + ".partial")
    try:
        draft.write_text(text)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    os.replace(draft, path)


def malformed(path: Path, line: int | None, expected: str, got: object, way_out: str) -> ValueError:
    """Makes the error for a file, or a line of it, that is not as it should be."""
    place = f"{path}" if line is None else f"{path}:{line}"
    return ValueError(f"Expected '{place}' to {expected} (got {got}). {way_out}")


def checksum(path: Path) -> str:
    """Returns the sha256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def written_whole(folder: Path, is_there: Callable[[], bool]) -> Iterator[Path | None]:
    """Gives a neighbouring folder to write to, which takes the final name if all goes well and vanishes if not.

    One process writes, others that ask meanwhile wait for it. What a killed process left is removed by the next one.

    Args:
        folder: Its final name; what is there is replaced, unless ``is_there`` says that it is wanted or raises.
        is_there: Says whether the folder is there and as wanted. It is asked first without the lock, for which a disk for
            reading only has no room, and then with it; only then its errors count.

    Yields:
        The folder to write to, or None if nothing is to be written.
    """
    draft, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "old"))
    shutil.rmtree(old, ignore_errors=True)  # which a killed process had replaced; nobody goes back to it
    there = False
    with contextlib.suppress(OSError, ValueError):
        there = is_there()
    if there:
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder.parent).close()  # for a lock that cannot be made is waited for without end
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if is_there():
            yield None
            return
        for left in (draft, old):
            shutil.rmtree(left, ignore_errors=True)
        try:
            draft.mkdir()
            yield draft
            if folder.exists():
                os.replace(folder, old)
            os.replace(draft, folder)
        finally:
            for left in (draft, old):
                shutil.rmtree(left, ignore_errors=True)


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Writes the manifest of a folder, with its own sha256."""
    (folder / MANIFEST).write_text(json.dumps({**content, "sha256": _digest(content)}, indent=2) + "\n")


def read_manifest(folder: Path, what: str) -> dict[str, Any]:
    """Reads the manifest of a folder of ``what``; empty if the folder is new or empty.

    Raises:
        ValueError: If there is none, or if anything in it is not what was written: nobody may replace such a folder.
    """
    try:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return {}
        content = json.loads((folder / MANIFEST).read_text())
        if content.pop("sha256") == _digest(content):
            return content
        got = "a damaged one"
    except (FileNotFoundError, NotADirectoryError):
        got = "no such file"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"a damaged one: {error}"
    raise ValueError(
        f"Expected '{folder / MANIFEST}' to be the manifest of {what} (got {got}). Remove {folder}, if it is damaged, and it is made again, "
        "or choose another place."
    )


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def generate(folder: Path, task: str, parameters: Any, seed: int, write: Callable[[Path], dict[str, Any]]) -> bool:
    """Writes a generated data set, whole or not at all, with a manifest of parameters, seed and checksums.

    Args:
        folder: Where to write; it must not exist, be empty, or hold this very data set, which is left as it is.
        task: Its name.
        parameters: A data class: the law of the data.
        seed: Of the data.
        write: Writes the files into a folder; returns their entries in the manifest.

    Returns:
        Whether anything was written.

    Raises:
        ValueError: If the folder holds something else or cannot be written, or if the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"Expected 'seed' to be at least 0 (got {seed}). Give another one.")
    wanted = {"task": task, "seed": seed, "parameters": dataclasses.asdict(parameters)}
    folder = folder.resolve()  # has a name and a neighbour on the same disk, even if it is given as "." or as a link

    def is_there() -> bool:
        found = read_manifest(folder, "generated data")
        if found and {name: found.get(name) for name in wanted} != wanted:
            raise ValueError(
                f"Expected '{folder}' to be new, empty or the data set asked for (got one made with seed {found.get('seed')} and "
                f"{found.get('parameters')}). Choose another folder, or remove this one."
            )
        return bool(found)

    try:
        with written_whole(folder, is_there) as draft:
            if draft is not None:
                write_manifest(draft, {**wanted, "files": write(draft)})
    except OSError as error:
        raise ValueError(
            f"Expected '{folder}' to be a place for generated data (got: {error}). Make room there, change its rights, or generate "
            "elsewhere, with: python -m examples.lra prepare --generate --data DIR"
        ) from error
    return draft is not None
