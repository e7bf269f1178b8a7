"""The table: accuracy by the number of parts of a document, in means over seeds, and densities of the longest."""

from statistics import fmean

from examples.common.tables import Rows, by, deviation, markdown


def table(rows: Rows) -> str:
    """A line for each run, in Markdown."""
    parts = sorted(int(name.removeprefix("accuracy_")) for name in rows[0] if name.startswith("accuracy_"))
    lines = []
    for run, some in by(rows, "run").items():
        last = max(row["step"] for row in some)
        ended = [row for row in some if row["step"] == last]
        cells = [deviation([100 * row[f"accuracy_{count}"] for row in ended]) for count in parts]
        density = 100 * fmean(row[f"density_{parts[-1]}"] for row in ended)
        minutes = fmean(row["seconds"] for row in ended) / 60
        lines.append([run, len(ended), *cells, f"{density:.1f}", f"{minutes:.0f}"])
    names = [f"{count} parts, %" if count > 1 else "the review alone, %" for count in parts]
    return markdown(["run", "seeds", *names, "density of the longest, %", "minutes"], lines)
