"""Tables of measurements: kept as CSV, to which rows are added whole or not at all, and shown as Markdown.

In: rows, dictionaries with the same keys. Out: the same rows, or text. Not here: what is measured.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Rows = list[Row]
WORDS = ("run", "estimator", "peer", "stage", "remarks", "method", "arm", "kernel", "type")


def read(path: Path) -> Rows:
    """The rows of a table, numbers as numbers and empty cells as NaN; none if there is no table."""

    def value(text: str) -> float | str:
        try:
            return float(text or "nan")
        except ValueError:
            return text

    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{key: value(text) for key, text in row.items()} for row in csv.DictReader(file)]


def add(path: Path, rows: Sequence[Row]) -> None:
    """Adds rows to a table, all or none."""
    draft = path.with_suffix(".partial")
    old = path.read_text() if path.exists() else ",".join(rows[0]) + "\n"
    with draft.open("w", newline="") as file:
        file.write(old)
        writer = csv.DictWriter(file, old.partition("\n")[0].split(","), lineterminator="\n")
        for row in rows:
            writer.writerow({key: f"{x:.6g}" if isinstance(x, float) else x for key, x in row.items()})
    os.replace(draft, path)


def markdown(names: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown, numbers to the right."""
    first, *shown = ("| " + " | ".join(map(str, line)) + " |" for line in (names, *lines))
    return "\n".join([first, "|" + "|".join("---" if name in WORDS else "---:" for name in names) + "|", *shown])
