"""What measurements become: tables for the terminal and for docs/benchmarks.md, and plots.

In: rows, one dictionary for each peer, case and stage, as ``benchmark.py`` writes them to JSON lines. Out: text and figures.
Not here: measuring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

REFERENCE = {"attention": "ours", "sampling": "bernoulli", "layer": "dense"}
TITLES = {
    "attention": "Attention over a given graph, one random mask per head",
    "sampling": "Sampling a graph",
    "layer": "Training step of a whole layer: projections, SBM, sampling, attention, gradients to all parameters and tokens",
    "growth": "Growth at a constant number of expected edges per query",
}
NOTES = {
    "attention": "Every peer has the graph in its own format before the clock starts. × ours: how many times our time it takes. "
    "Error: largest of output and gradients against masked SDPA in float64, relative to the largest value.",
    "sampling": "× ours: time per edge over that of `sample_sbm`. Error: standard deviations between sampled and expected density.",
    "layer": "× dense: time over that of the dense layer. Memberships are nearly equal, as at the paper's initialisation, and shifted to the density. "
    "Bytes of the dense layer count per edge of the sparse one.",
    "growth": "× first: time per edge over that of the same row at the smallest number of tokens. "
    "The dense layer counts per edge of the sparse one.",
}


def add_ratios(rows: Sequence[Row]) -> None:
    """Set ``ratio`` in the rows of whole groups: against the reference peer of the same table, or the smallest size for growth."""
    timed = [row for row in rows if row["median_ms"] is not None]
    for row in timed:
        key = "ns_per_edge" if row["suite"] in ("sampling", "growth") else "median_ms"
        if row["suite"] == "growth":
            base = min((r for r in timed if _is(r, row, "suite", "peer", "run")), key=lambda r: r["tokens"])
        else:
            same = [r for r in timed if r["peer"] == REFERENCE[row["suite"]] and _is(r, row, "suite", "group", "stage", "run")]
            if not same:
                continue
            base = same[0]
        row["ratio"] = row[key] / base[key]


def _is(one: Row, two: Row, *keys: str) -> bool:
    return all(one[key] == two[key] for key in keys)


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


def _ratio(row: Row) -> str:
    return _number(row["ratio"])


def _percent(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else f"{_number(100 * row[key])} %"


def _plain(key: str, scale: float = 1.0, digits: int = 3) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else _number(row[key] * scale, digits)


def _remark(row: Row) -> str:
    return "; ".join(text for text in (row["status"], row["note"]) if text)


Column = tuple[str, str, Callable[[Row], str]]  # header, stage, cell
NAME: Column = ("peer", "", lambda row: row["label"])
MEMORY: Callable[[str], list[Column]] = lambda stage: [  # noqa: E731
    ("peak MiB", stage, _plain("peak_mib")),
    ("bytes/edge", stage, _plain("bytes_per_edge")),
]
LAST: list[Column] = [("remarks", "", _remark)]
COLUMNS: dict[str, list[Column]] = {
    "attention": [
        NAME,
        ("forward, ms", "forward", _time),
        ("× ours", "forward", _ratio),
        ("forward + backward, ms", "step", _time),
        ("× ours", "step", _ratio),
        ("ns/edge", "step", _plain("ns_per_edge")),
        *MEMORY("step"),
        ("error", "step", _plain("error", digits=2)),
        *LAST,
    ],
    "sampling": [
        NAME,
        ("time, ms", "sample", _time),
        ("million edges/s", "sample", _plain("edges_per_s", 1e-6)),
        ("× ours", "sample", _ratio),
        ("density", "sample", _percent("sampled_density")),
        *MEMORY("sample"),
        ("error", "sample", _plain("error", digits=2)),
        *LAST,
    ],
    "layer": [
        NAME,
        ("step, ms", "step", _time),
        ("× dense", "step", _ratio),
        ("expected density", "step", _percent("expected_density")),
        ("sampled", "step", _percent("sampled_density")),
        *MEMORY("step"),
        ("error", "step", _plain("error", digits=2)),
        *LAST,
    ],
    "growth": [
        NAME,
        ("tokens", "", lambda row: f"{row['tokens']:,}"),
        ("edges", "step", lambda row: f"{row['edges']:,}" if row["edges"] else ""),
        ("time, ms", "step", _time),
        ("ns/edge", "step", _plain("ns_per_edge")),
        ("× first", "step", _ratio),
        *MEMORY("step"),
        ("whole process, MiB", "step", _plain("process_mib", digits=4)),
        *LAST,
    ],
}


def tables(rows: Sequence[Row]) -> Iterable[tuple[str, list[list[str]]]]:
    """Title and cells, header first, of one table for each group of peers that ran together."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["suite"], "" if row["suite"] == "growth" else row["group"]), []).append(row)
    for (suite, group), members in groups.items():
        if suite == "growth":
            order = list(dict.fromkeys(row["peer"] for row in members))
            members = sorted(members, key=lambda row: order.index(row["peer"]))  # stable: sizes stay in order
            group = f"{members[0]['edges_per_query']:g} edges, K = {members[0]['blocks']}, {_sizes(members[0])}"
        cells = [[header for header, _, _ in COLUMNS[suite]]]
        lines: dict[tuple[Any, ...], dict[str, Row]] = {}
        for row in members:
            lines.setdefault((row["peer"], row["blocks"], row["tokens"]), {})[row["stage"]] = row
        for stages in lines.values():
            some = next(iter(stages.values()))
            troubled = next((row for row in stages.values() if row["status"]), some)
            cells.append([cell(stages.get(stage, troubled)) for _, stage, cell in COLUMNS[suite]])
        yield f"{TITLES[suite]}: {group}", cells


def _sizes(row: Row) -> str:
    return f"H = {row['heads']}, C = {row['channels']}, {row['threads']} thread{'s' * (row['threads'] != 1)}"


def as_text(title: str, cells: Sequence[Sequence[str]]) -> str:
    """A table with columns of even width; all but the first and the last are flushed right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    edges = (0, len(widths) - 1)
    lines = ["  ".join(cell.ljust(width) if i in edges else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths, strict=True))) for line in cells]  # fmt: skip
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([title, *(line.rstrip() for line in lines)])


def as_markdown(rows: Sequence[Row], command: str) -> str:
    """All tables as one page, with the machines they come from."""
    machines = dict.fromkeys(
        f"* {row['date'][:10]}, commit {row['commit']}: {row['cpu']}, {row['cores']} cores ({row['threads']} threads), {row['memory_gib']:.0f} GiB, "
        f"{row['system']}; Python {row['python']}, torch {row['torch']}, PyG {row['torch_geometric']}, numba {row['numba']}"
        for row in rows
    )
    page = [
        "# Benchmarks\n",
        f"Measured by `{command}`. Medians over interleaved repeats, first and third quartiles in brackets, float32.\n",
        *machines,
        "",
    ]
    suite = None
    for title, cells in tables(rows):
        kind = next(key for key, text in TITLES.items() if title.startswith(text))
        if kind != suite:
            suite = kind
            page += [f"## {TITLES[kind]}\n", f"{NOTES[kind]}\n"]
        page.append(f"### {title[len(TITLES[kind]) + 2 :]}\n")
        page += [f"| {' | '.join(line)} |" for line in cells[:1]]
        page += [f"|{'|'.join('---' if i in (0, len(cells[0]) - 1) else '---:' for i in range(len(cells[0])))}|"]
        page += [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in cells[1:]] + [""]
    return "\n".join(page)


# ------------------------------------------------------------------ plots

AXES = {"density": "density (%)", "tokens": "tokens N"}
PANELS = {  # what is drawn of each stage
    "attention": [("forward", "median_ms", "forward (ms)"), ("step", "median_ms", "forward + backward (ms)"), ("step", "peak_mib", "peak memory, forward + backward (MiB)")],
    "sampling": [("sample", "median_ms", "time (ms)"), ("sample", "peak_mib", "peak memory (MiB)")],
    "layer": [("step", "median_ms", "training step (ms)"), ("step", "peak_mib", "peak memory (MiB)")],
    "growth": [("step", "ns_per_edge", "time per edge (ns)"), ("step", "peak_mib", "peak memory (MiB)")],
}  # fmt: skip


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Time and memory over density and over N, one line a peer, wherever at least two points of an axis were measured."""
    from matplotlib.figure import Figure  # here, since every process of a peer imports this module

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for suite in PANELS:
        mine = [row for row in rows if row["suite"] == suite and row["median_ms"] is not None]
        blocks = {row["blocks"] for row in mine} if suite == "sampling" else {0}
        for block, over in ((block, over) for block in sorted(blocks) for over in AXES):
            chosen = [row for row in mine if suite != "sampling" or row["blocks"] == block]
            rest = ""
            if suite != "growth":
                other = "tokens" if over == "density" else "density"
                values = sorted({row[other] for row in chosen})
                if not values:
                    continue
                fixed = values[-1] if other == "tokens" else min(values, key=lambda value: abs(math.log(value / 0.05)))
                chosen = [row for row in chosen if row[other] == fixed]
                rest = f", N = {fixed:,}" if other == "tokens" else f", density {100 * fixed:g} %"
            elif over == "density":
                continue
            if len({row[over] for row in chosen}) < 2:
                continue
            figure = Figure(figsize=(5.2 * len(PANELS[suite]), 4.6), layout="constrained")
            axes = figure.subplots(1, len(PANELS[suite]), squeeze=False)
            labels = list(dict.fromkeys(row["label"] for row in chosen))
            for axis, (stage, value, label) in zip(axes[0], PANELS[suite], strict=True):
                _lines(axis, labels, [row for row in chosen if row["stage"] == stage], over, value)
                axis.set(xscale="log", yscale="log", xlabel=AXES[over], ylabel=label)
                places = sorted({row[over] * (100 if over == "density" else 1) for row in chosen})
                axis.set_xticks(places, [f"{place:,g}" for place in places])
                axis.minorticks_off()
                axis.grid(alpha=0.3, which="both", linewidth=0.5)
            handles, names = axes[0][0].get_legend_handles_labels()
            figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 4), fontsize="small", frameon=False)
            some = chosen[0]
            title = TITLES[suite].split(":")[0] + (f", K = {block}" if block else "")
            figure.suptitle(f"{title}{rest}, {_sizes(some)}\n{some['cpu']}, commit {some['commit']}", fontsize="medium")
            paths.append(folder / f"{suite}{f'_k{block}' if block else ''}_over_{over}.png")
            figure.savefig(paths[-1], dpi=110)
    return paths


def _lines(axis: Axes, labels: Sequence[str], rows: Sequence[Row], over: str, value: str) -> None:
    """One line a label, of the same colour in every panel; the band is from the first to the third quartile."""
    for number, label in enumerate(labels):
        line = sorted((row for row in rows if row["label"] == label and row[value]), key=lambda row: row[over])
        places, colour = [row[over] * (100 if over == "density" else 1) for row in line], f"C{number % 10}"
        width = 2.4 if any(row["ours"] for row in line) else 1.2
        axis.plot(places, [row[value] for row in line], color=colour, marker="osD^vP*X<>"[number % 10], label=label, linewidth=width)
        if value != "peak_mib":
            low, high = ([row[value] * row[edge] / row["median_ms"] for row in line] for edge in ("q1_ms", "q3_ms"))
            axis.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
