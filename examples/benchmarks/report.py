"""What measurements become: tables as Markdown, and plots.

In: rows, one dictionary for each peer, case and stage, as ``measure`` writes them to rows.jsonl. Out: text and figures. Not
here: measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

REFERENCE = {"kernels": "ours", "samplers": "bernoulli", "layers": "dense"}
TITLES = {
    "kernels": "Attention over a given graph, one random mask per head",
    "samplers": "Sampling a graph",
    "layers": "Training step of a whole layer: projections, SBM, sampling, attention, gradients to all parameters and tokens",
    "growth": "Growth at a constant number of expected edges per query",
}


def ratio(row: Row, rows: Sequence[Row]) -> float | None:
    """Time over that of the reference peer of the same run and table; growth: time per edge over that of the smallest size.

    Samplers are compared by their time per edge, for their laws differ.
    """
    if row["median_ms"] is None:
        return None
    timed = [r for r in rows if r["median_ms"] is not None and (r["suite"], r["stage"]) == (row["suite"], row["stage"])]
    if row["suite"] == "growth":
        base = min(
            (r for r in timed if (r["peer"], r["blocks"]) == (row["peer"], row["blocks"])), key=lambda r: r["tokens"]
        )
    else:
        same = [
            r
            for r in timed
            if r["peer"] == REFERENCE[row["suite"]] and (r["group"], r["run"]) == (row["group"], row["run"])
        ]
        if not same:
            return None
        base = same[0]
    key = "ns_per_edge" if row["suite"] in ("samplers", "growth") else "median_ms"
    return row[key] / base[key]


# ------------------------------------------------------------------ tables


def _time(row: Row) -> str:
    return "–" if row["median_ms"] is None else f"{row['median_ms']:,.4g} ({row['q1_ms']:,.4g}–{row['q3_ms']:,.4g})"


def _plain(key: str, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else f"{row[key] * scale:,.4g}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "peer": lambda row: row["label"],
    "stage": lambda row: row["stage"],
    "N": lambda row: f"{row['tokens']:,}",
    "edges": lambda row: f"{row['edges'] or 0:,}",
    "time, ms": _time,
    "×": _plain("ratio"),
    "ns/edge": _plain("ns_per_edge"),
    "million edges/s": _plain("edges_per_s", 1e-6),
    "density, %": _plain("sampled_density", 100),
    "expected, %": _plain("expected_density", 100),
    "peak MiB": _plain("peak_mib"),
    "bytes/edge": _plain("bytes_per_edge"),
    "whole process, MiB": _plain("process_mib"),
    "error": _plain("error"),
    "remarks": lambda row: "; ".join(text for text in (row["status"], row["note"]) if text),
}


def as_markdown(rows: Sequence[Row]) -> str:
    """All tables, with the machines they come from; a peer that was measured twice shows both."""
    machines = [
        f"* {row['date'][:10]}, commit {row['commit']}: {row['cpu']}, {row['cores']} cores ({row['threads']} threads), {row['memory_gib']:.0f} GiB, "
        f"{row['system']}; Python {row['python']}, torch {row['torch']}, PyG {row['torch-geometric']}, numba {row['numba']}"
        for row in rows
    ]
    page = [*dict.fromkeys(machines)]
    for suite, title in TITLES.items():
        tables: dict[str, list[Row]] = {}
        for row in (row for row in rows if row["suite"] == suite):
            group = (
                row["group"].split(", ", 1)[1] if suite == "growth" else row["group"]
            )  # sizes of one peer side by side
            tables.setdefault(group, []).append({**row, "ratio": ratio(row, rows)})
        page += ["", f"## {title}"] if tables else []
        for group, mine in tables.items():
            page += [
                "",
                f"### {group}",
                "",
                f"| {' | '.join(COLUMNS)} |",
                "|---|---|" + "---:|" * (len(COLUMNS) - 3) + "---|",
            ]
            lines = sorted(mine, key=lambda row: row["peer"]) if suite == "growth" else mine  # stable
            page += [f"| {' | '.join(cell(row).replace('|', '/') for cell in COLUMNS.values())} |" for row in lines]
    return "\n".join(page)


# ------------------------------------------------------------------ plots

PANELS = {  # what is drawn of each stage
    "kernels": [("forward", "median_ms", "forward (ms)"), ("step", "median_ms", "forward + backward (ms)"), ("step", "peak_mib", "peak memory (MiB)")],
    "samplers": [("sample", "median_ms", "time (ms)"), ("sample", "peak_mib", "peak memory (MiB)")],
    "layers": [("step", "median_ms", "training step (ms)"), ("step", "peak_mib", "peak memory (MiB)")],
    "growth": [("step", "ns_per_edge", "time per edge (ns)"), ("step", "peak_mib", "peak memory (MiB)")],
}  # fmt: skip


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Time and memory over density (growth: over N), one line a peer, wherever at least two points were measured."""
    from matplotlib.figure import Figure  # here, since every process of a peer imports this module

    folder.mkdir(parents=True, exist_ok=True)
    paths, figures = [], dict[str, list[Row]]()
    for row in rows:
        if row["median_ms"] is not None:
            name = "growth" if row["suite"] == "growth" else f"{row['suite']}_n{row['tokens']}"
            figures.setdefault(f"{name}_k{row['blocks']}" if row["suite"] == "samplers" else name, []).append(row)
    for name, chosen in figures.items():
        suite, first = chosen[0]["suite"], chosen[0]
        over, times, axis = ("tokens", 1, "tokens N") if suite == "growth" else ("density", 100, "density (%)")
        places = sorted({times * row[over] for row in chosen})
        if len(places) < 2:
            continue
        figure = Figure(figsize=(5.2 * len(PANELS[suite]), 4.6), layout="constrained")
        labels = list(dict.fromkeys(row["label"] for row in chosen))
        for axes, (stage, value, title) in zip(figure.subplots(1, len(PANELS[suite])), PANELS[suite], strict=True):
            for number, label in enumerate(labels):
                line = sorted(
                    (r for r in chosen if (r["label"], r["stage"]) == (label, stage) and r[value]),
                    key=lambda row: row[over],
                )
                axes.plot(
                    [times * r[over] for r in line],
                    [r[value] for r in line],
                    color=f"C{number}",
                    marker="osD^vP*X"[number],
                    label=label,
                )
            axes.set(xscale="log", yscale="log", xlabel=axis, ylabel=title)
            axes.set_xticks(places, [f"{place:,g}" for place in places], minor=False)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small", frameon=False
        )
        figure.suptitle(
            f"{TITLES[suite].split(':')[0]}, {name.split('_', 1)[-1]}\n{first['cpu']}, {first['threads']} threads, commit {first['commit']}"
        )
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths
