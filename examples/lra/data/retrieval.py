"""Retrieval: pairs of papers as bytes, labelled 1 if one cites the other (ACL Anthology Network).

In: the TSV files of the Long Range Arena (LRA). Out: rows of pairs of token numbers. Not here: batches and the table of
tasks (``tasks.py``).

A line is ``label, id, id, text, text`` between tabs, without header, without quoting: quotation marks are part of the text. LRA
wrote the texts as Python literals, ``b'...'`` with its prefix, quotation marks and escapes, and reads them as they stand. So
do we: a token is a byte of that plus one; 0 is never used.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from examples.lra.data.batches import Row, Rows
from examples.lra.data.files import Release, malformed, places

SPLITS = {"release": "as released (147,086/18,090/17,437 of the whole release)"}
FILES = {"train": "new_aan_pairs.train.tsv", "val": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
RELEASE = Release(
    name="the pairs of Retrieval",
    folders=places("tsv_data", "aan", "retrieval"),
    parts=tuple(FILES.values()),
    part="split",
    source="It is part of lra_release.gz (8 GB), see https://github.com/google-research/long-range-arena; 'tar -xzf' unpacks it.",
    picture="""\
        new_aan_pairs.train.tsv    one pair a line: label, id, id, text, text, between tabs
        new_aan_pairs.eval.tsv
        new_aan_pairs.test.tsv""",
)


def open_splits(root: Path, *, split: str = "release") -> dict[str, Rows]:
    """Finds the pairs of each split; ``root`` is a folder like ``RELEASE``, and ``split`` only "release".

    Raises:
        ValueError: If files are missing.
    """
    folder = RELEASE.find(root)
    return {name: Rows([folder / file], partial(read_rows, folder / file)) for name, file in FILES.items()}


def read_rows(path: Path) -> Iterator[Row]:
    """Yields both texts and the label of each line of a file.

    Args:
        path: The file. CRLF and LF both end a line; nothing else does.

    Yields:
        Two arrays of token numbers, uint16, and the label, 0 or 1, which is ``int(float(...))`` of what is written.

    Raises:
        ValueError: If a line is malformed; the message names file and line.
    """
    with path.open("rb") as file:
        for line, text in enumerate(file, start=1):
            columns = text.rstrip(b"\r\n").split(b"\t")
            if len(columns) != 5:
                raise malformed(
                    path, line, "have five columns, label, two ids and two texts", len(columns), "Look for a cut, merged or quoted line."
                )
            try:
                label = int(float(columns[0]))
            except (ValueError, OverflowError):
                label = -1
            if label not in (0, 1):
                got = repr(columns[0][:80].decode(errors="replace"))
                raise malformed(path, line, "start with the label 0.0 or 1.0", got, "Look for swapped or damaged columns.")
            if not (columns[3] and columns[4]):
                raise malformed(path, line, "hold two texts", "an empty one", "Look for a cut line.")
            first, second = (np.frombuffer(column, dtype=np.uint8).astype(np.uint16) + 1 for column in columns[3:])
            yield (first, second), label
