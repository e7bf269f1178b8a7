"""What measurements become: tables as Markdown, and figures.

In: rows, one for each peer, case and stage, as ``measure`` writes them to rows.csv. Out: text and figures. Not here: measuring.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from examples.benchmarks.tables import Row, Rows, markdown

REFERENCE = {
    "kernels": "ours",
    "shares": "softmax",
    "normalizers": "softmax",
    "samplers": "bernoulli",
    "layers": "dense",
}
TITLES = {
    "kernels": "Attention over a given graph, one random mask per head",
    "shares": "Softmax and entmax of ragged rows",
    "normalizers": "A layer over a given graph, one random set of keys per query and head",
    "samplers": "Sampling a graph",
    "layers": "Training step of a whole layer: projections, SBM, sampling, attention, gradients to all parameters and tokens",
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
    "time, ms": lambda row: f"{row['median_ms']:,.4g} ({row['q1_ms']:,.4g}–{row['q3_ms']:,.4g})".replace(
        "nan (nan–nan)", "–"
    ),
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


def plot(rows: Rows, folder: Path) -> list[Path]:
    """Time over density (growth: per edge over N), one line a peer, wherever at least two points were measured."""
    from matplotlib.figure import Figure  # here, for --help does not wait for it

    paths, figures = [], dict[str, Rows]()
    for row in (row for row in rows if row["median_ms"] > 0):
        size = "" if row["suite"] == "growth" else f"_n{row['tokens']:.0f}"
        name = row["suite"] + size + (f"_k{row['blocks']:.0f}" if row["blocks"] else "")
        figures.setdefault(name, []).append(row)
    for name, chosen in figures.items():
        growth, stages = chosen[0]["suite"] == "growth", [*dict.fromkeys(row["stage"] for row in chosen)]
        over, times, value = ("tokens", 1, "ns_per_edge") if growth else ("density", 100, "median_ms")
        if len(places := sorted({times * row[over] for row in chosen})) < 2:
            continue
        figure = Figure(figsize=(5.2 * max(len(stages), 1.5), 4.6), layout="constrained")
        for axes, stage in zip(figure.subplots(1, len(stages), squeeze=False)[0], stages, strict=True):
            for number, label in enumerate(dict.fromkeys(row["label"] for row in chosen)):
                line = sorted((times * r[over], r[value]) for r in chosen if (r["label"], r["stage"]) == (label, stage))
                axes.plot(*zip(*line, strict=True), color=f"C{number}", marker="osD^vP*X"[number], label=label)
            axes.set(xscale="log", yscale="log", xlabel="tokens N" if growth else "density (%)")
            axes.set_ylabel(f"{stage}, time per edge (ns)" if growth else f"{stage}, time (ms)")
            axes.set_xticks(places, [f"{place:,g}" for place in places], minor=False)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        legend = {"loc": "outside lower center", "ncols": 3, "fontsize": "small", "frameon": False}
        figure.legend(*axes.get_legend_handles_labels(), **legend)
        title = TITLES[chosen[0]["suite"]].partition(":")[0]
        figure.suptitle(f"{title}\n{chosen[0]['machine'].partition(';')[0]}", fontsize="small")
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths
