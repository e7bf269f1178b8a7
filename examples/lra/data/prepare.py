"""Prepared data: a task's files parsed once into arrays that are mapped from then on.

In: the rows of a task, as its reader finds them. Out: a folder of arrays with a manifest, and splits that map them. Not here:
the formats (``listops.py`` and its siblings), batches (``batches.py``).

For each split there are ``<split>_tokens.npy``, ``<split>_ptr.npy`` and ``<split>_labels.npy``. Sequences are whole, whatever
length a run cuts them to. The manifest says what they were made from and with which options, counts examples and labels, and has the
sha256 of each file. Only a folder that was written to its end gets its name, so it is whole or not there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from tqdm.auto import tqdm

from examples.lra.data.batches import Rows, Split
from examples.lra.data.files import checksum, read_manifest, write_manifest, written_whole

if TYPE_CHECKING:
    from examples.lra.data.tasks import Task

FORMAT = 1
KIND = "prepared data"
SPLITS = ("train", "val", "test")
ARRAYS = ("tokens", "ptr", "labels")
FOLDER = "prepared"


def prepare(
    task: Task,
    root: Path,
    *,
    options: Mapping[str, str] | None = None,
    prepared: Path | None = None,
    progress: bool = False,
) -> tuple[Path, bool]:
    """Parses a task's files into arrays, unless that was done before.

    Several processes may call this at the same time: one works, the others wait. Files count as changed when their sizes or times
    of modification do; then they are parsed again.

    Args:
        task: What to read.
        root: Where it lies; see the task's release.
        options: Of the reader, such as {"split": "held-out"}; the task's defaults for those not given.
        prepared: Where folders of prepared data are made; by default "prepared" in ``root``.
        progress: Whether to show a progress bar.

    Returns:
        The folder of the arrays, and whether anything was written.

    Raises:
        ValueError: If files are missing or malformed, if an option is not known, or if there is no place to write.
    """
    options = task.complete(options or {})
    folder = (prepared or root / FOLDER) / "-".join([task.name, *(value for value in options.values() if value)])
    try:
        rows = task.open(root, **options)
        wanted = {
            "format": FORMAT,
            "task": task.name,
            "tokeniser": task.tokeniser,
            "options": options,
            "source": fingerprint(root, rows),
        }

        def is_there() -> bool:
            found = read_manifest(folder, KIND)
            return {name: found.get(name) for name in wanted} == wanted

        with written_whole(folder, is_there) as draft:
            if draft is not None:
                splits = {name: _write_split(draft, name, rows[name], task, root, progress) for name in SPLITS}
                write_manifest(draft, {**wanted, "root": str(root), "splits": splits})
    except OSError as error:
        failed = Path(error.filename or folder)
        if failed == root or not (failed.is_relative_to(folder.parent) or folder.is_relative_to(failed)):
            raise ValueError(
                f"Expected '{error.filename}' to be readable (got: {error}). Copy it again, or change its rights."
            ) from error
        raise ValueError(
            f"Expected '{folder}' to be a place for prepared data (got: {error}). Free it, or give another with --prepared DIR."
        ) from error
    return folder, draft is not None


def fingerprint(root: Path, splits: Mapping[str, Rows]) -> str:
    """Returns the sha256 of names, sizes and times of modification of all files that rows are read from."""
    lines = set()
    for path in {path for rows in splits.values() for path in rows.files}:
        state = path.stat()
        lines.add(f"{os.path.relpath(path, root)} {0 if path.is_dir() else state.st_size} {state.st_mtime_ns}\n")
    return hashlib.sha256("".join(sorted(lines)).encode(errors="surrogateescape")).hexdigest()


class _Array:
    """An array in numpy's format that grows on the disk, in pieces."""

    def __init__(self, path: Path, dtype: Any) -> None:
        self.path, self.dtype, self.size = path, np.dtype(dtype), 0
        self.file: BinaryIO = path.open("wb")
        self._head()

    def _head(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.size,)}
        np.lib.format.write_array_header_1_0(self.file, header)  # leaves room for any number of digits

    def append(self, piece: Any) -> None:
        array = np.ascontiguousarray(piece, dtype=self.dtype)
        self.file.write(array.tobytes())
        self.size += array.size

    def close(self) -> dict[str, Any]:
        """Completes the file; returns its entry in the manifest."""
        self.file.seek(0)
        self._head()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {"dtype": self.dtype.name, "size": self.size, "sha256": checksum(self.path)}


def _write_split(folder: Path, name: str, rows: Rows, task: Task, root: Path, progress: bool) -> dict[str, Any]:
    """Parses one split; returns its entry in the manifest."""
    dtypes = (np.min_scalar_type(task.num_tokens), np.int64, np.int64)
    tokens, ptr, labels = arrays = [
        _Array(folder / f"{name}_{array}.npy", dtype) for array, dtype in zip(ARRAYS, dtypes, strict=True)
    ]
    counts = np.zeros(task.num_classes, dtype=np.int64)
    skipped = longest = 0
    try:
        ptr.append([0])
        for row in tqdm(rows.read(), f"Preparing {task.name}, {name}", unit=" rows", disable=not progress):
            if row is None:
                skipped += 1
                continue
            example, label = row
            for sequence in example if task.arity > 1 else (example,):
                tokens.append(sequence)
                ptr.append([tokens.size])
                longest = max(longest, len(sequence))
            labels.append([label])
            counts[label] += 1
        if not labels.size:
            raise ValueError(f"Expected '{name}' of {root} to hold examples (got none). Generate or copy it again.")
        entries = {array: part.close() for array, part in zip(ARRAYS, arrays, strict=True)}
    finally:
        for part in arrays:
            part.file.close()
    shares = {str(label): int(count) for label, count in enumerate(counts)}
    return {
        "examples": labels.size,
        "tokens": tokens.size,
        "longest": longest,
        "skipped": skipped,
        "labels": shares,
        "arrays": entries,
    }


def load(
    task: Task,
    root: Path,
    *,
    max_length: int,
    options: Mapping[str, str] | None = None,
    prepared: Path | None = None,
    masked: int | None = None,
    progress: bool = False,
) -> dict[str, Split]:
    """Maps all splits of a task, prepared now if they were not before, after a check of every byte.

    Args:
        task: What to read.
        root: Where it lies; see the task's format.
        max_length: Longest sequence; longer ones follow the task's ``overflow``.
        options: As for :func:`prepare`.
        prepared: As for :func:`prepare`.
        masked: Leave out tokens up to this number, the others in their places; see ``Task.masked``. None leaves out nothing.
        progress: Whether to show a progress bar.

    Returns:
        The splits "train", "val" and "test".

    Raises:
        ValueError: If files are missing, malformed or damaged, or if a sequence is too long for a task that does not truncate.
    """
    folder, _ = prepare(task, root, options=options, prepared=prepared, progress=progress)
    entries = read_manifest(folder, KIND)["splits"]
    splits = {}
    for name in SPLITS:
        digests = []
        for array, entry in entries[name]["arrays"].items():
            path = folder / f"{name}_{array}.npy"
            found = checksum(path) if path.is_file() else "no such file"
            if found != entry["sha256"]:
                raise ValueError(
                    f"Expected '{path}' to be as it was prepared, with the sha256 {entry['sha256'][:12]}... (got {found[:12]}). It is "
                    f"damaged: remove {folder}, and it is prepared anew."
                )
            digests.append(found)
        tokens, ptr, labels = (np.load(folder / f"{name}_{array}.npy", mmap_mode="r") for array in ARRAYS)
        digest = hashlib.sha256("".join(digests).encode()).hexdigest()
        splits[name] = Split(tokens, np.array(ptr), np.array(labels), task.arity, max_length, digest, masked)
        if task.overflow == "error" and splits[name].truncated:
            sizes = np.diff(splits[name].ptr)
            first = int(np.argmax(sizes > max_length))
            raise ValueError(
                f"Expected '{name}' example {first // task.arity} to have at most {max_length} tokens (got {sizes[first]}). "
                "Raise --max-length."
            )
    return splits


def splits_digest(splits: Mapping[str, Split]) -> str:
    """Returns one sha256 for all examples, as they are after cutting."""
    words = [f"{name} {split.digest} {split.max_length} {split.masked}" for name, split in sorted(splits.items())]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()
