"""Tables as Markdown of the rows that ``measure`` writes."""

from collections.abc import Callable

from examples.common.tables import Row, Rows, markdown

REFERENCE = {
    "kernels": "ours", "blocks": "blocks", "shares": "softmax", "normalizers": "softmax", "samplers": "bernoulli", "layers": "dense",
    "lengths": "dense",
}  # fmt: skip
TITLES = {
    "kernels": "Attention over a given graph, one random mask per head",
    "blocks": "Attention over a given graph of blocks of 64 tokens",
    "shares": "Softmax and entmax of ragged rows",
    "normalizers": "A layer over a given graph, one random set of keys per query and head",
    "samplers": "Sampling a graph",
    "layers": "Training step of a whole layer: projections, SBM, sampling, attention, gradients to all parameters and tokens",
    "lengths": "The default layer in training and in evaluation, by the length of sequences",
    "growth": "Growth at a constant number of expected edges per query",
}


def ratio(row: Row, rows: Rows) -> float:
    """Time over that of the reference peer of the same run and table; growth: time per edge over that of the smallest size.

    Samplers are compared by their time per edge, for their laws differ. NaN if either was not timed.
    """
    same = [r for r in rows if r["median_ms"] > 0 and all(r[key] == row[key] for key in ("suite", "group", "stage"))]
    if row["suite"] == "growth":
        same = sorted((r for r in same if r["peer"] == row["peer"]), key=lambda r: r["tokens"])
    else:
        same = [r for r in same if r["peer"] == REFERENCE[row["suite"]] and r["run"] == row["run"]]
    key = "ns_per_edge" if row["suite"] in ("samplers", "growth") else "median_ms"
    return row[key] / same[0][key] if same else float("nan")


def _number(key: str, scale: float = 1.0, form: str = ",.4g") -> Callable[[Row], str]:
    return lambda row: f"{row[key] * scale:{form}}" if row[key] == row[key] else ""


COLUMNS: dict[str, Callable[[Row], str]] = {
    "peer": lambda row: row["label"],
    "stage": lambda row: row["stage"],
    "N": _number("tokens", form=",.0f"),
    "edges": _number("edges", form=",.0f"),
    "time, ms": lambda row: "{median_ms:,.4g} ({q1_ms:,.4g}–{q3_ms:,.4g})".format(**row).replace("nan (nan–nan)", "–"),
    "×": _number("ratio"),
    "ns/edge": _number("ns_per_edge"),
    "million edges/s": lambda row: f"{1e3 / row['ns_per_edge']:,.4g}".replace("nan", ""),
    "density, %": _number("sampled", 100),
    "expected, %": _number("expected", 100),
    "error": _number("error"),
    "remarks": lambda row: "; ".join(text for text in (row["status"], row["remarks"]) if text == text),
}


def as_markdown(rows: Rows) -> str:
    """All tables, with the machines they come from; a peer that was measured twice shows both."""
    page = [f"* {machine}" for machine in dict.fromkeys(row["machine"] for row in rows)]
    for suite, title in TITLES.items():
        chosen = [row for row in rows if row["suite"] == suite]
        page += ["", f"## {title}"] if chosen else []
        for group in dict.fromkeys(row["group"] for row in chosen):
            mine = [{**row, "ratio": ratio(row, rows)} for row in chosen if row["group"] == group]
            if suite == "growth":  # sizes of a peer side by side
                mine.sort(key=lambda row: row["peer"])
            page += ["", f"### {group}", ""]
            page += [markdown([*COLUMNS], [[cell(row) for cell in COLUMNS.values()] for row in mine])]
    return "\n".join(page)
