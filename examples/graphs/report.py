"""A table for each graph: means over splits, and paired differences."""

from __future__ import annotations

from statistics import fmean

from examples.common.tables import Row, Rows, by, deviation, interval, markdown

HEADER = ("arm", "splits", "test, %", "over its frozen twin", "over random", "density, %", "edges of one class, %",
          "ms a step")  # fmt: skip


def best(rows: Rows) -> dict[int, Row]:
    """For each split, the evaluation that is best on the validation part."""
    return {int(split): max(some, key=lambda row: row["val"]) for split, some in by(rows, "split").items()}


def chosen(rows: Rows) -> dict[str, dict[int, Row]]:
    """The best evaluations of each arm, at the learning rate with the best mean on the validation parts."""
    found = {}
    for arm, rates in by(rows, "arm", "learning_rate").items():
        tried = [best(some) for some in rates.values()]
        most = max(len(each) for each in tried)
        found[arm] = max((x for x in tried if len(x) == most), key=lambda x: fmean(row["val"] for row in x.values()))
    return found


def difference(mine: dict[int, Row], other: dict[int, Row]) -> str:
    """Mean of the paired differences of test scores, with its 95 % interval if there are several splits."""
    both = mine.keys() & other
    if not both or mine is other:
        return ""
    mean, half = interval([mine[split]["test"] - other[split]["test"] for split in both])
    return f"{mean:+.2f} (one split)" if len(both) < 2 else f"{mean:+.2f} ± {half:.2f}"


def tables(rows: Rows) -> str:
    """Tables in Markdown."""
    page = []
    for graph, some in by(rows, "graph").items():
        arms, lines = chosen(some), []
        for arm, found in arms.items():
            last = [row for row in some if row["arm"] == arm and row["step"] == max(x["step"] for x in some)]
            pace = fmean(1000 * row["seconds"] / row["step"] for row in last) if last else float("nan")
            shares = ["", ""]
            if any(row["density"] for row in found.values()):
                shares = [f"{100 * fmean(row[name] for row in found.values()):.1f}" for name in ("density", "alike")]
            test = deviation([row["test"] for row in found.values()])
            over = [difference(found, arms.get(other, {})) for other in (f"{arm}:frozen", "random")]
            lines.append((f"`{arm}`", len(found), test, *over, *shares, f"{pace:.0f}"))
        page += [f"## {graph}", markdown(HEADER, lines)]
    return "\n\n".join(page)
