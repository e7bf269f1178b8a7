"""A table for each graph: means over splits, and paired differences."""

from __future__ import annotations

from statistics import fmean

from examples.common.tables import Row, Rows, by, deviation, interval, markdown

HEADER = ("arm", "splits", "test, %", "over its frozen twin", "over random", "density, %", "edges of one class, %",
          "ms a step")  # fmt: skip


def best(rows: Rows) -> dict[int, Row]:
    """For each split, the evaluation that is best on the validation part."""
    return {int(split): max(split_rows, key=lambda row: row["val"]) for split, split_rows in by(rows, "split").items()}


def chosen(rows: Rows) -> dict[str, dict[int, Row]]:
    """The best evaluations of each arm, at the learning rate with the best mean on the validation parts."""
    arms = {}
    for arm, rates in by(rows, "arm", "learning_rate").items():
        tried = [best(rate_rows) for rate_rows in rates.values()]
        most = max(len(splits) for splits in tried)
        arms[arm] = max((x for x in tried if len(x) == most), key=lambda x: fmean(row["val"] for row in x.values()))
    return arms


def difference(results: dict[int, Row], reference: dict[int, Row]) -> str:
    """Mean of the paired differences of test scores, with its 95 % interval if there are several splits."""
    both = results.keys() & reference
    if not both or results is reference:
        return ""
    mean, half = interval([results[split]["test"] - reference[split]["test"] for split in both])
    return f"{mean:+.2f} (one split)" if len(both) < 2 else f"{mean:+.2f} ± {half:.2f}"


def tables(rows: Rows) -> str:
    """Tables in Markdown."""
    page = []
    for graph, subset in by(rows, "graph").items():
        arms, lines = chosen(subset), []
        for arm, results in arms.items():
            last = [row for row in subset if row["arm"] == arm and row["step"] == max(x["step"] for x in subset)]
            pace = fmean(1000 * row["seconds"] / row["step"] for row in last) if last else float("nan")
            shares = ["", ""]
            if any(row["density"] for row in results.values()):
                shares = [f"{100 * fmean(row[name] for row in results.values()):.1f}" for name in ("density", "alike")]
            test = deviation([row["test"] for row in results.values()])
            over = [difference(results, arms.get(other, {})) for other in (f"{arm}:frozen", "random")]
            lines.append((f"`{arm}`", len(results), test, *over, *shares, f"{pace:.0f}"))
        page += [f"## {graph}", markdown(HEADER, lines)]
    return "\n\n".join(page)
