"""Tables as Markdown of the rows that ``measure`` writes."""

import math
import statistics
from collections.abc import Callable
from typing import Any

from examples.common.tables import Row, Rows, by, markdown

TRAINED = ("recall-1", "recall-2", "code-1", "code-2")  # layers of models of examples/weights
REFERENCE = {
    "kernels": "ours", "blocks": "blocks", "samplers": "bernoulli", "layers": "dense",
    "lengths": "dense", "trained": "dense", "steps": "full", "graph": "learned", "graphs": "gps-multihead", "features": "ours",
}  # fmt: skip
TITLES = {
    "kernels": "Attention over a given graph, one random mask per head",
    "blocks": "Attention over a given graph of blocks of 64 tokens",
    "samplers": "Sampling a graph",
    "layers": "Training step of a whole layer: projections, SBM, sampling, attention, gradients to all parameters and tokens",
    "lengths": "The default layer in training and in evaluation, by the length of sequences",
    "trained": "Trained layers over the tokens of their models, and fresh layers with as many edges",
    "growth": "Growth at a constant number of expected edges per query",
    "steps": "Training step of a whole causal model, in the dense and in the sparse phase of a Sparsifier",
    "sources": "Growth of graph sources: time and memory of a graph, without attention over it",
    "graph": "Global attention of a graph transformer over one graph",
    "graphs": "Global attention of a graph transformer over a batch of graphs, N nodes in the largest",
    "features": "Messages with features of edges, 16 edges a node",
}
GROWN = {"growth": "64 edges per query", "sources": "some 32 edges per query, one head of 64 channels"}
"""Suites of one table, whose peers are compared with themselves at the smallest size."""


def ratio(row: Row, rows: Rows) -> float:
    """Time over that of the reference peer of the same run and table; of a growth, time per edge over that of the smallest size.

    Samplers are compared by their time per edge, for their laws differ. NaN if either was not timed.
    """
    same = [r for r in rows if r["median_ms"] > 0 and all(r[key] == row[key] for key in ("suite", "group", "stage"))]
    if row["suite"] in GROWN:
        same = sorted((r for r in same if r["peer"] == row["peer"]), key=lambda r: r["tokens"])
    else:
        reference = REFERENCE[row["suite"]] + "-all" * row["peer"].endswith("-all")  # not causal
        same = [r for r in same if r["peer"] == reference and r["run"] == row["run"]]
    key = "ns_per_edge" if row["suite"] in ("samplers", *GROWN) else "median_ms"
    return row[key] / same[0][key] if same else float("nan")


def _number(key: str, scale: float = 1.0, form: str = ",.4g") -> Callable[[Row], str]:
    return lambda row: f"{row[key] * scale:{form}}" if row[key] == row[key] else ""


WHOLE = ("sampling, ns an edge", "evaluation over dense", "training over dense")
COLUMNS: dict[str, Callable[[Row], str]] = {
    "peer": lambda row: row["label"],
    "stage": lambda row: row["stage"],
    "N": _number("tokens", form=",.0f"),
    "edges": _number("edges", form=",.0f"),
    "time, ms": lambda row: "{median_ms:,.4g} ({q1_ms:,.4g}–{q3_ms:,.4g})".format(**row).replace("nan (nan–nan)", "–"),
    "×": _number("ratio"),
    "ns/edge": _number("ns_per_edge"),
    "million edges/s": lambda row: f"{1e3 / row['ns_per_edge']:,.4g}".replace("nan", ""),
    "MiB": lambda row: _number("MiB", form=",.0f")({"MiB": math.nan, **row}),
    "density, %": _number("sampled", 100),
    "expected, %": _number("expected", 100),
    "error": _number("error"),
    "remarks": lambda row: "; ".join(text for text in (row["status"], row["remarks"]) if text == text),
}


def _exponents(rows: Rows) -> list[str]:
    """For each peer the power of the tokens by which its time grows, a line through the logarithms of all sizes."""
    lines = []
    for label, peers in by(rows, "label").items():
        timed = [(math.log(row["tokens"]), math.log(row["median_ms"])) for row in peers if row["median_ms"] > 0]
        if len(timed) > 1:
            slope = statistics.linear_regression(*zip(*timed, strict=True)).slope
            lines.append(f"* {label}: its time grows as N^{slope:.2f}.")
    return lines


def _summary(rows: Rows) -> str:
    """Trained layers, a line for each layer and length: sampling, attention, and whole layers over dense ones."""
    lines = []
    for group, peers in by(rows, "group", "peer", "stage").items():

        def value(peer: str, stage: str, key: str = "median_ms", peers: Any = peers) -> float:
            return peers[peer][stage][-1][key] if stage in peers.get(peer, {}) else math.nan

        cells = [value("trained", "sample", "sampled") * (value("trained", "sample", "tokens") + 1) / 2]
        cells += [value("trained", "sample"), value("trained", "attend"), value("dense", "attend")]
        for peer, dense in (("trained", "dense"), ("fresh", "dense"), ("fresh-all", "dense-all")):
            cells.append(value(peer, "sample", "ns_per_edge"))
            cells += [value(peer, stage) / value(dense, stage) for stage in ("forward", "step")]
        lines.append([group, *("" if cell != cell else f"{cell:.3g}" for cell in cells)])
    kinds = [f"{kind}: {name}" for kind in ("trained", "fresh", "fresh, not causal") for name in WHOLE]
    return markdown(["layer", "edges a query", "sampling, ms", "attention, ms", "dense attention, ms", *kinds], lines)


def as_markdown(rows: Rows) -> str:
    """All tables, with the machines they come from; a peer that was measured twice shows both."""
    page = [f"* {machine}" for machine in dict.fromkeys(row["machine"] for row in rows)]
    for suite, title in TITLES.items():
        chosen = [row for row in rows if row["suite"] == suite]
        page += ["", f"## {title}"] if chosen else []
        for group in dict.fromkeys(row["group"] for row in chosen):
            group_rows = [{**row, "ratio": ratio(row, rows)} for row in chosen if row["group"] == group]
            if suite in GROWN:  # sizes of a peer side by side
                group_rows.sort(key=lambda row: row["peer"])
            page += ["", f"### {group}", ""]
            page += [markdown([*COLUMNS], [[cell(row) for cell in COLUMNS.values()] for row in group_rows])]
            page += ["", *_exponents(group_rows)] if suite in GROWN else []
        page += ["", _summary(chosen)] if suite == "trained" and chosen else []
    return "\n".join(page)
