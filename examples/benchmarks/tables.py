"""Tables of measurements: kept as CSV, to which rows are added whole or not at all, and shown as Markdown.

In: rows, dictionaries with the same keys. Out: the same rows, or text. Not here: what is measured.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from examples.common.runs import AGAIN, RunError, read_table, write_table

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
    text = read_table(path)
    names, *lines = csv.reader(io.StringIO(text)) if text.endswith("\n") else [[]]
    for number, line in enumerate(lines, 2):
        if len(line) != len(names):
            raise RunError(f"Expected line {number} of '{path}' to have {len(names)} cells (got {len(line)}). {AGAIN}")
    if not names:
        raise RunError(f"Expected '{path}' to be a table whose last line is whole (got another end). {AGAIN}")
    return [dict(zip(names, map(value, line), strict=True)) for line in lines]


def add(path: Path, rows: Sequence[Row]) -> None:
    """Adds rows to a table, all or none."""
    read(path)  # is whole
    old = read_table(path) if path.exists() else ""
    names = old.partition("\n")[0].split(",") if old else [*rows[0]]
    if {*names} != {*rows[0]}:
        other = ", ".join(sorted({*names} ^ {*rows[0]}))
        raise RunError(
            f"Expected '{path}' to have the columns of what is added (got other {other}). Take another file."
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    if not old:
        writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{x:.6g}" if isinstance(x, float) else x for key, x in row.items()})
    write_table(path, old, old + text.getvalue())


def markdown(names: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown, numbers to the right."""
    first, *shown = ("| " + " | ".join(map(str, line)) + " |" for line in (names, *lines))
    return "\n".join([first, "|" + "|".join("---" if name in WORDS else "---:" for name in names) + "|", *shown])
