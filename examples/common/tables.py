"""Tables of measurements: CSV to which rows are added whole or not at all, means over groups of rows, and Markdown."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from examples.common.runs import AGAIN, RunError, read_table, write_table, write_text

Row = dict[str, Any]
Rows = list[Row]
WORDS = ("run", "estimator", "peer", "stage", "remarks", "method", "arm", "kernel", "type", "source")


def read(path: Path) -> Rows:
    """The rows of a table, numbers as numbers and empty cells as NaN; an empty list if there is no table."""

    def value(text: str) -> float | str:
        try:
            return float(text or "nan")
        except ValueError:
            return text

    if not path.exists():
        return []
    text = read_table(path)
    try:
        names, *lines = csv.reader(io.StringIO(text)) if text.endswith("\n") else [[]]
    except csv.Error as error:
        raise RunError(f"Expected '{path}' to be a table (got: {error}). {AGAIN}") from None
    for number, line in enumerate(lines, 2):
        if len(line) != len(names):
            raise RunError(f"Expected line {number} of '{path}' to have {len(names)} cells (got {len(line)}). {AGAIN}")
    if not names:
        raise RunError(f"Expected '{path}' to be a table whose last line is whole (got another end). {AGAIN}")
    return [dict(zip(names, map(value, line), strict=True)) for line in lines]


def finished(folder: Path) -> Rows:
    """The rows of a program's folder, of which there is at least one."""
    if rows := read(folder / "rows.csv"):
        return rows
    raise ValueError(f"Expected 'output' to hold finished runs (got none in {folder}). Leave out --report.")


def _text(names: Sequence[str], rows: Iterable[Mapping[str, Any]], header: bool = True) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def add(path: Path, rows: Sequence[Row]) -> None:
    read(path)  # is whole
    old = read_table(path) if path.exists() else ""
    names = old.partition("\n")[0].split(",") if old else [*rows[0]]
    if {*names} != {*rows[0]}:
        other = ", ".join(sorted({*names} ^ {*rows[0]}))
        text = f"Expected '{path}' to have the columns of what is added (got other {other}). Take another file."
        raise RunError(text)
    short = [{key: f"{x:.6g}" if isinstance(x, float) else x for key, x in row.items()} for row in rows]
    write_table(path, old, old + _text(names, short, header=not old))


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows with all their digits, whole or not at all; columns in the order in which they first occur."""
    write_text(path, _text([*dict.fromkeys(name for row in rows for name in row)], rows))


def by(rows: Iterable[Row], *keys: str) -> dict[Any, Any]:
    """Rows by the value of a key, in the order in which values come first; of several keys, a dictionary within another."""
    rows_of: dict[Any, Any] = {}
    for row in rows:
        rows_of.setdefault(row[keys[0]], []).append(row)
    return {value: by(value_rows, *keys[1:]) for value, value_rows in rows_of.items()} if keys[1:] else rows_of


def groups(rows: Iterable[Row], *keys: str) -> Iterator[Any]:
    """The same as tuples, each of a value for every key and then the rows."""
    for value, value_rows in by(rows, keys[0]).items():
        if keys[1:]:
            yield from ((value, *group) for group in groups(value_rows, *keys[1:]))
        else:
            yield value, value_rows


def last(rows: Rows) -> Rows:
    """The rows of the step at which the rows of a run end."""
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean of paired differences, and half of its 95 % interval of Student's t; NaN if there is one pair.

    >>> mean, half = interval([1.0, 2.0, 3.0])
    >>> round(mean, 2), round(half, 2)
    (2.0, 2.48)
    """
    count = len(differences)
    if count < 2:
        return fmean(differences), math.nan
    from scipy.stats import t

    return fmean(differences), float(t.ppf(0.975, count - 1)) * stdev(differences) / math.sqrt(count)


def deviation(values: Sequence[float], digits: int = 2, sign: str = "") -> str:
    """Mean, and standard deviation if there are several values."""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):{sign}.{digits}f}{spread}"


def extent(values: Sequence[float], digits: int = 2) -> str:
    """Mean, and the least and the largest value if there are several."""
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def markdown(names: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown, numbers to the right."""
    first, *shown = ("| " + " | ".join(map(str, line)) + " |" for line in (names, *lines))
    return "\n".join([first, "|" + "|".join("---" if name in WORDS else "---:" for name in names) + "|", *shown])
