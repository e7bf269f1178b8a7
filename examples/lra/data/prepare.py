"""Prepared data: a task's files parsed once into arrays that are mapped from then on.

For each split there are the token numbers of all sequences (``<split>_tokens.bin``, in the smallest type that holds them), where each
sequence begins (``<split>_ptr.npy``) and the labels (``<split>_labels.npy``). Sequences are whole, whatever length a run cuts them to.
The manifest has the sources and options that they were made from, and the sha256 of each file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from examples.common.command import require
from examples.lra.data.batches import Rows, Split
from examples.lra.data.files import checksum, make_folder, read_manifest
from examples.lra.data.listops import SPLITS
from sbm_pyg.progress import tqdm

if TYPE_CHECKING:
    from examples.lra.data.tasks import Task

FORMAT = 2
KIND = "prepared data"


def prepare(
    task: Task, root: Path, *, options: Mapping[str, str] | None = None, prepared: Path | None = None
) -> tuple[Path, bool]:
    """Parses a task's files into arrays, unless that was done before; returns their folder, and whether anything was written.

    Several processes may call this at the same time: one works, the others wait. Files count as changed when their sizes or times
    of modification do; then they are parsed again.

    Args:
        task: What to read.
        root: Folder of its release.
        options: Of the reader, such as {"split": "held-out"}; the task's defaults for those not given.
        prepared: Where folders of prepared data are made; by default "prepared" in ``root``.
    """
    options = task.complete(options or {})
    folder = (prepared or root / "prepared") / "-".join([task.name, *options.values()])
    try:
        rows = task.open(root, **options)
        recipe = {"format": FORMAT, "tokeniser": task.tokeniser, "options": options, "source": _fingerprint(root, rows)}
    except OSError as error:
        words = f"Expected '{root}' to be readable (got: {error}). Copy it again, or change its rights."
        raise ValueError(words) from error

    def write(draft: Path) -> dict[str, Any]:
        return {"splits": {name: _write_split(draft, name, rows[name], task) for name in SPLITS}}

    return folder, make_folder(folder, KIND, recipe, write, replace=True)


def _fingerprint(root: Path, splits: Mapping[str, Rows]) -> str:
    """Returns the sha256 of names, sizes and times of modification of all files that rows are read from."""
    lines = set()
    for path in {path for rows in splits.values() for path in rows.files}:
        state = path.stat()
        lines.add(f"{os.path.relpath(path, root)} {0 if path.is_dir() else state.st_size} {state.st_mtime_ns}\n")
    return hashlib.sha256("".join(sorted(lines)).encode(errors="surrogateescape")).hexdigest()


def _token_type(task: Task) -> np.dtype:
    return np.min_scalar_type(task.num_tokens)


def _write_split(folder: Path, name: str, rows: Rows, task: Task) -> dict[str, Any]:
    """Parses one split; returns its entry in the manifest."""
    ptr, labels, skipped = [0], [], 0
    with (folder / f"{name}_tokens.bin").open("wb") as file:
        for row in tqdm(rows.read(), f"Preparing {task.name}, {name}", unit=" rows"):
            if row is None:
                skipped += 1
                continue
            example, label = row
            for sequence in example if task.arity > 1 else (example,):
                file.write(np.asarray(sequence, dtype=_token_type(task)).tobytes())
                ptr.append(ptr[-1] + len(sequence))
            labels.append(label)
    require(labels, f"'{name}' of {task.name} to hold examples", "none", "Generate or copy it again.")
    np.save(folder / f"{name}_ptr.npy", np.array(ptr, dtype=np.int64))
    np.save(folder / f"{name}_labels.npy", np.array(labels, dtype=np.int64))
    return {"skipped": skipped, "sha256": {path.name: checksum(path) for path in sorted(folder.glob(f"{name}_*"))}}


def load(
    task: Task, root: Path, *, max_length: int, options: Mapping[str, str] | None = None, prepared: Path | None = None,
    masked: int | None = None,
) -> dict[str, Split]:  # fmt: skip
    """Maps the splits "train", "val" and "test" of a task, prepared now if they were not before, after a check of every byte.

    ``max_length`` and ``masked`` are those of :class:`Split`, all else is as for :func:`prepare`.
    """
    folder, _ = prepare(task, root, options=options, prepared=prepared)
    splits = {}
    for name, entry in read_manifest(folder, KIND)["splits"].items():
        for file, expected in entry["sha256"].items():
            actual = checksum(folder / file) if (folder / file).is_file() else "no such file"
            words = f"'{folder / file}' to be as it was prepared, with the sha256 {expected[:12]}..."
            way_out = f"It is damaged: remove {folder}, and it is prepared anew."
            require(actual == expected, words, actual[:12], way_out)
        digest = hashlib.sha256("".join(entry["sha256"].values()).encode()).hexdigest()
        tokens = np.memmap(folder / f"{name}_tokens.bin", dtype=_token_type(task), mode="r")
        ptr, labels = (np.load(folder / f"{name}_{array}.npy") for array in ("ptr", "labels"))
        splits[name] = Split(tokens, ptr, labels, task.arity, max_length, digest, masked)
    return splits


def splits_digest(splits: Mapping[str, Split]) -> str:
    """Returns one sha256 for all examples, as they are after cutting."""
    words = [f"{name} {split.digest} {split.max_length} {split.masked}" for name, split in sorted(splits.items())]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()
