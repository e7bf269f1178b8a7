"""What measurements become: tables as Markdown, and plots.

In: rows, one dictionary for each peer, case and stage, as ``measure`` writes them to rows.jsonl. Out: text and figures. Not
here: measuring.
"""

from __future__ import annotations

import math
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
NOTES = {
    "kernels": "Every peer has the graph in its own format before the clock starts. × ours: how many times our time it takes. "
    "Error: largest of output and gradients against masked SDPA in float64, relative to the largest value.",
    "samplers": "× ours: time per edge over that of `sample_sbm`. Error: standard deviations between sampled and expected density.",
    "layers": "× dense: time over that of the dense layer. Memberships are nearly equal, as at the paper's initialisation, and shifted "
    "to the density. Bytes of the dense layer count per edge of the sparse one.",
    "growth": "× first: time per edge over that of the same row at the smallest number of tokens.",
}


def ratio(row: Row, rows: Sequence[Row]) -> float | None:
    """Time over that of the reference peer of the same run and table, or per edge over that of the smallest size."""
    if row["median_ms"] is None:
        return None
    timed = [r for r in rows if r["median_ms"] is not None and (r["suite"], r["stage"]) == (row["suite"], row["stage"])]
    if row["suite"] == "growth":
        base = min((r for r in timed if r["peer"] == row["peer"]), key=lambda r: r["tokens"])
    else:
        same = [r for r in timed if r["peer"] == REFERENCE[row["suite"]] and (r["group"], r["run"]) == (row["group"], row["run"])]
        if not same:
            return None
        base = same[0]
    key = "ns_per_edge" if row["suite"] in ("samplers", "growth") else "median_ms"
    return row[key] / base[key]


# ------------------------------------------------------------------ tables


def _number(value: float | None, digits: int = 3) -> str:
    """Three digits that count, without an exponent where people read it easily."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(places, 0)}f}" if places < 6 else f"{value:.1e}"


def _time(row: Row) -> str:
    if row["median_ms"] is None:
        return "–"
    return f"{_number(row['median_ms'])} ({_number(row['q1_ms'])}–{_number(row['q3_ms'])})"


def _plain(key: str, scale: float = 1.0, digits: int = 3, unit: str = "") -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else _number(row[key] * scale, digits) + unit


Column = tuple[str, str, Callable[[Row], str]]  # header, stage, cell
NAME: list[Column] = [("peer", "", lambda row: row["label"])]
REMARKS: Column = ("remarks", "", lambda row: "; ".join(text for text in (row["status"], row["note"]) if text))
ERROR: list[Column] = [("error", "", _plain("error", digits=2)), REMARKS]


def _measured(stage: str) -> list[Column]:
    return [("peak MiB", stage, _plain("peak_mib")), ("bytes/edge", stage, _plain("bytes_per_edge"))]


COLUMNS: dict[str, list[Column]] = {
    "kernels": [
        *NAME, ("forward, ms", "forward", _time), ("× ours", "forward", _plain("ratio")), ("forward + backward, ms", "step", _time),
        ("× ours", "step", _plain("ratio")), ("ns/edge", "step", _plain("ns_per_edge")), *_measured("step"), *ERROR,
    ],
    "samplers": [
        *NAME, ("time, ms", "sample", _time), ("million edges/s", "sample", _plain("edges_per_s", 1e-6)),
        ("× ours", "sample", _plain("ratio")), ("density", "sample", _plain("sampled_density", 100, unit=" %")), *_measured("sample"), *ERROR,
    ],
    "layers": [
        *NAME, ("step, ms", "step", _time), ("× dense", "step", _plain("ratio")),
        ("expected density", "step", _plain("expected_density", 100, unit=" %")),
        ("sampled", "step", _plain("sampled_density", 100, unit=" %")), *_measured("step"), *ERROR,
    ],
    "growth": [
        *NAME, ("tokens", "", lambda row: f"{row['tokens']:,}"), ("edges", "step", lambda row: f"{row['edges'] or 0:,}"),
        ("time, ms", "step", _time), ("ns/edge", "step", _plain("ns_per_edge")), ("× first", "step", _plain("ratio")),
        *_measured("step"), ("whole process, MiB", "step", _plain("process_mib", digits=4)), REMARKS,
    ],
}  # fmt: skip


def as_markdown(rows: Sequence[Row]) -> str:
    """All tables, with the machines they come from; a peer that was measured twice shows both."""
    page = list(dict.fromkeys(
        f"* {row['date'][:10]}, commit {row['commit']}: {row['cpu']}, {row['cores']} cores ({row['threads']} threads), {row['memory_gib']:.0f} GiB, "
        f"{row['system']}; Python {row['python']}, torch {row['torch']}, PyG {row['torch-geometric']}, numba {row['numba']}"
        for row in rows
    ))  # fmt: skip
    for suite, columns in COLUMNS.items():
        mine = [{**row, "ratio": ratio(row, rows)} for row in rows if row["suite"] == suite]
        if mine:
            page += ["", f"## {TITLES[suite]}", "", NOTES[suite]]
        titles = dict.fromkeys(_title(row) for row in mine)
        for title in titles:
            lines: dict[tuple[Any, ...], dict[str, Row]] = {}
            for row in mine:
                if _title(row) == title:
                    lines.setdefault((row["peer"], row["blocks"], row["tokens"], row["run"]), {})[row["stage"]] = row
            keys = sorted(lines, key=lambda key: key[0]) if suite == "growth" else list(lines)  # stable: sizes stay in order
            page += ["", f"### {title}", "", f"| {' | '.join(header for header, _, _ in columns)} |"]
            page += ["|" + "|".join("---" if i in (0, len(columns) - 1) else "---:" for i in range(len(columns))) + "|"]
            for stages in (lines[key] for key in keys):
                first = next((row for row in stages.values() if row["status"]), next(iter(stages.values())))
                cells = [cell(stages.get(stage, first)) for _, stage, cell in columns]
                page.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(page)


def _title(row: Row) -> str:
    return row["group"].split(", ", 1)[1] if row["suite"] == "growth" else row["group"]


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
                line = sorted((r for r in chosen if (r["label"], r["stage"]) == (label, stage) and r[value]), key=lambda row: row[over])
                axes.plot(
                    [times * r[over] for r in line], [r[value] for r in line], color=f"C{number}", marker="osD^vP*X"[number], label=label
                )
            axes.set(xscale="log", yscale="log", xlabel=axis, ylabel=title)
            axes.set_xticks(places, [f"{place:,g}" for place in places], minor=False)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small", frameon=False)
        figure.suptitle(
            f"{TITLES[suite].split(':')[0]}, {name.split('_', 1)[-1]}\n{first['cpu']}, {first['threads']} threads, commit {first['commit']}"
        )
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths
