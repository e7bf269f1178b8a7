"""The pictures of docs/learning.md, each drawn from the raw rows of its runs.

python -m examples.findings                         all of them, into docs/learning/findings
python -m examples.findings code graphs             two of them
python -m examples.findings --output runs/pictures  into another folder

Rows are those in docs/learning and docs/benchmarks. Blue is what learns its edges, gray are controls and fixed rules, and black is
attention over all pairs. Dots are single runs.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from examples.common.command import Command, program
from examples.common.pictures import COLORS, WIDE, Bar, Curve, bare, draw_bars, draw_curves, save_figure
from examples.common.tables import Row, Rows, by, groups, last, read

DOCS = Path(__file__).parents[2] / "docs"


def _rows(name: str) -> Rows:
    return read(DOCS / name)


def _ends(name: str, *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """The last row of each run, at the first size of its test, by the values of keys."""
    ends: dict[tuple[Any, ...], list[Row]] = {}
    for group in groups(_rows(name), *keys, "seed"):
        rows = group[-1]
        ends.setdefault(group[: len(keys)], []).append((last(rows) if "step" in rows[0] else rows)[0])
    return ends


def _values(rows: Iterable[Row], name: str, factor: float = 1) -> list[float]:
    return [factor * row[name] for row in rows]


def draw_served() -> Any:
    """Recall over the number of tokens that hold the answer, next to the frozen twin."""
    runs = _ends("learning/arena/rows.csv", "task", "method")
    curves: list[Curve] = []
    for method, name, kind, look in (
        ("full", "all pairs", "dense", "s:"), ("sbm", "block model that learns", "learned", "o-"),
        ("sbm:frozen=1", "the same, not learning", "control", "o--"), ("random", "random edges", "control", "D:"),
    ):  # fmt: skip
        points = {
            float(task[7:]): _values(rows, "accuracy", 100)
            for (task, other), rows in runs.items()
            if other == method and task.startswith("served-")
        }
        curves.append((name, points, kind, look))
    label = "tokens that hold the answer, of 16 values"
    return draw_curves(curves, label, "questions answered, %", xscale="log", ylim=(0, 104))


SOURCES = {
    "full": ("all pairs", "dense"), "top-k": ("exact top-k", "control"), "sbm": ("block model", "learned"),
    "dsa": ("indexer by rank (DSA)", "learned"), "hsa": ("blocks (HSA)", "learned"), "blocks": ("blocks (MoBA)", "control"),
    "lsh": ("hashes (Reformer)", "control"), "routing": ("Routing Transformer", "learned"),
    "sbm:frozen=1": ("block model, frozen", "control"), "random": ("random edges", "control"), "window": ("window", "control"),
}  # fmt: skip


def draw_sources() -> Any:
    """Two tasks of the arena at 5 % of the pairs, by graph source."""
    panels: dict[str, list[Bar]] = {}
    for task, table, heading in (
        ("recall", "tasks", "Find one value (recall)"), ("compression", "mad", "Gather eight tokens (compression)"),
    ):  # fmt: skip
        runs = _ends(f"learning/arena/{table}.csv", "task", "method", "density")
        panels[heading] = [
            (name, _values(runs[task, method, 1.0 if method == "full" else 0.05], "accuracy", 100), kind)
            for method, (name, kind) in SOURCES.items()
        ]
    return draw_bars(panels, ["questions answered at 5 % of the pairs, %"] * 2, digits=0)


def draw_training() -> Any:
    """Recall by the start of training, and by the gradient of the edge probabilities."""
    sparse = _ends("learning/arena/rows.csv", "task", "method", "start")
    dense = _ends("learning/arena/tasks.csv", "task", "method", "density")
    start: list[Bar] = []
    for method, name, kind in (
        ("sbm", "block model", "learned"), ("indexer", "indexer, drawn", "learned"), ("dsa", "indexer by rank", "learned"),
        ("top-k", "exact top-k", "control"),
    ):  # fmt: skip
        start.append((f"{name}, dense first", _values(dense["recall", method, 0.05], "accuracy", 100), kind))
        start.append((f"{name}, sparse at once", _values(sparse["recall", method, "sparse"], "accuracy", 100), kind))
    start.append(("block model, frozen", _values(dense["recall", "sbm:frozen=1", 0.05], "accuracy", 100), "control"))
    runs = _ends("learning/dcmm/recall/rows.csv", "run")
    gradient: list[Bar] = [
        (name, _values(runs[(run,)], "accuracy", 100), kind)
        for run, name, kind in (
            ("sbm 5 %", "local + distillation", "learned"), ("sbm:estimator=local 5 %", "local", "learned"),
            ("sbm:estimator=mask 5 %", "of the released code", "learned"), ("sbm:estimator=paper 5 %", "of the paper, eq. 9", "learned"),
            ("dcmm:num_clusters=83", "DCMM bias, all pairs", "dense"), ("full", "all pairs", "dense"),
        )
    ]  # fmt: skip
    panels = {"Start of training": start, "Gradient of a block model": gradient}
    return draw_bars(panels, ["recall: questions answered, %"] * 2, digits=0)


def draw_length() -> Any:
    """Edges of a query over the length of the test, with the part of the questions that is answered at the largest."""
    runs = by(_rows("learning/arena/length.csv"), "method", "length", "seed")
    curves: list[Curve] = []
    for method, layer, name, kind, look in (
        ("full", 0, "all pairs", "dense", "s:"), ("sbm", 1, "block model, layer 2", "learned", "o--"),
        ("sbm", 0, "block model, layer 1, which looks up", "learned", "o-"), ("top-k", 0, "exact top-k", "control", "D:"),
        ("sbm:frozen=1", 0, "block model, frozen", "control", "o--"), ("window", 0, "window", "control", "^:"),
    ):  # fmt: skip
        longest = [*runs[method].values()][-1].values()
        name = f"{name}: {fmean(100 * rows[-1]['accuracy'] for rows in longest):.0f} % right"
        points = {
            length: [rows[-1][f"density_{layer}"] * (length - 1) / 2 for rows in seeds.values()]
            for length, seeds in runs[method].items()
        }
        curves.append((name, points, kind, look))
    label = "tokens of a test sequence (64 in training)"
    return draw_curves(curves, label, "edges of a query, in the mean", xscale="log", yscale="log")


CODE = (
    ("code_ranks", "top-k:control=sparsifier,k=18 5 %", "exact top-k, 18 keys or more", "control"),
    ("code_ranks", "top-k:control=sparsifier 7.5 %", "exact top-k", "control"),
    ("code_candidates", "sbm:candidates=4 7.5 %", "block model, candidates", "learned"),
    ("code_ranks", "indexer:select=top_k,index_heads=2,index_channels=8 7.5 %", "small indexer by rank", "learned"),
    ("code_long", "sbm 7.5 %", "block model", "learned"),
    ("code_long", "window 7.5 %", "window", "control"),
    ("code_long", "random 7.5 %", "random edges", "control"),
)


def draw_code() -> Any:
    """Bits per byte of source code more than full attention has with the same seed on the same machine."""
    bars: list[Bar] = []
    for table, run, name, kind in CODE:
        runs = _ends(f"learning/{table}.csv", "run")
        full = {row["seed"]: row["bits_per_byte"] for row in runs[("full",)]}
        bars.append((name, [row["bits_per_byte"] - full[row["seed"]] for row in runs[(run,)]], kind))
    return draw_bars({"Python code, 7.5 % of the pairs": bars}, ["bits per byte more than all pairs"], digits=2)


PRETRAINED = {
    "top-k": ("exact top-k", "control"), "candidates": ("block model, candidates", "learned"), "indexer": ("indexer", "learned"),
    "low-rank": ("low-rank scores", "control"), "block-model": ("block model", "learned"), "block-top-k": ("blocks by their means", "control"),
    "window": ("window, first tokens", "control"), "bigbird": ("BigBird", "control"),
    "frozen-block-model": ("block model, frozen", "control"),
}  # fmt: skip


def draw_pretrained() -> Any:
    """Loss of SmolLM2 more than with all pairs, where sources were asked for 5 %."""
    rows = {row["arm"]: row for row in _rows("learning/pretrained.csv") if row["asked"] in (0.05, 1)}
    bars: list[Bar] = [
        (f"{name}, {100 * rows[arm]['density']:.1f} %", [rows[arm]["loss"] - rows["full"]["loss"]], kind)
        for arm, (name, kind) in PRETRAINED.items()
    ]
    return draw_bars({"SmolLM2, percent of pairs": bars}, ["loss more than all pairs, nats"], digits=2)


def draw_prose() -> Any:
    """Masked film reviews and WikiText-2: bits more than full attention has on the same machine or seed."""
    ends = {(row["machine"], row["run"]): row for row in _rows("learning/glue.csv")}
    masked: list[Bar] = []
    for run, name, kind in (
        ("window", "window of 8 alone", "control"), ("sbm:num_clusters=32 10 %", "block model and window", "learned"),
        ("random 10 %", "the same, frozen", "control"),
    ):  # fmt: skip
        pairs = [(row, ends[machine, "full"]) for (machine, other), row in ends.items() if other == run]
        masked.append((name, [row["bits_per_token"] - full["bits_per_token"] for row, full in pairs], kind))
    runs = _ends("learning/language.csv", "run")
    plain: list[Bar] = []
    full = {row["seed"]: row["bits_per_byte"] for row in runs[("full",)]}
    for run, name, kind in (
        ("window 5 %", "window", "control"), ("sbm:estimator=local 5 %", "block model", "learned"),
        ("random 5 %", "random edges", "control"),
    ):  # fmt: skip
        plain.append((name, [row["bits_per_byte"] - full[row["seed"]] for row in runs[(run,)]], kind))
    panels = {"Masked film reviews": masked, "WikiText-2, 5 % of the pairs": plain}
    labels = ["bits per masked token more than all pairs", "bits per byte more than all pairs"]
    return draw_bars(panels, labels, digits=3)


def draw_lra() -> Any:
    """ListOps at full length after an hour, and short ListOps with rotary positions and pretraining."""
    rows = _rows("learning/listops_hour.csv")
    test = {row["run"]: 100 * row["accuracy"] for row in rows if row["split"] == "test"}
    alone = max(100 * row["accuracy"] for row in rows if row["run"] == "itself alone")
    hour: list[Bar] = [
        ("all pairs", [test["full"]], "dense"), ("block model, 0.8 %", [test["sbm, 0.5 above 2 %"]], "learned"),
        ("block model, 6.5 %", [test["sbm"]], "learned"), ("linear attention", [test["linear"]], "control"),
        ("Linformer", [test["linformer"]], "control"), ("each token by itself", [alone], "control"),
    ]  # fmt: skip
    runs = _ends("learning/lra_pretraining.csv", "arm")
    short: list[Bar] = [
        (name, _values(runs[(arm,)], "accuracy", 100), "dense")
        for arm, name in (
            ("laptop", "500 steps"), ("rotary", "500, rotary positions"), ("both", "500, after pretraining"),
            ("rotary-double", "1,000, rotary positions"),
        )
    ]  # fmt: skip
    panels = {"ListOps at full length, an hour": hour, "Short ListOps, full attention": short}
    return draw_bars(panels, ["accuracy, %"] * 2)


GRAPHS = {
    "chameleon_filtered": "chameleon", "squirrel_filtered": "squirrel", "minesweeper": "minesweeper", "tolokers": "tolokers",
    "molhiv": "molecules (HIV)", "cora": "Cora", "citeseer": "Citeseer", "cluster": "CLUSTER",
}  # fmt: skip
ARMS = (
    (("sbm:frozen", "learned:frozen"), "block model, frozen", "control", "s"),
    (("none", "gcn"), "no attention, no added edges", "dense", "|"),
    (("sbm", "learned"), "block model that learns", "learned", "o"),
)


def draw_graphs() -> Any:
    """Scores of graphs without edges of ours, with those of a block model, and with those of its frozen twin."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDE, 3.4), layout="constrained")
    axes, arms = figure.subplots(), by(_rows("learning/graphs.csv"), "graph", "arm")
    for names, label, kind, marker in ARMS:
        rows = [next(arms[graph][name] for name in names if name in arms[graph]) for graph in reversed(GRAPHS)]
        means = [fmean(_values(samples, "test")) for samples in rows]
        size = {"ms": 15, "mew": 2.5} if marker == "|" else {"ms": 7}
        axes.plot(means, range(len(means)), marker, color=COLORS[kind], label=label, **size)
    axes.set_yticks(range(len(GRAPHS)), [*reversed(GRAPHS.values())])
    axes.set_ylim(-0.6, len(GRAPHS) - 0.4)
    axes.set_xlabel("test accuracy, or area under the curve, %", fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(axis="y", alpha=0.3)
    bare(axes)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
    return figure


def draw_speed() -> Any:
    """Time of trained layers over that of dense ones, by the length of the sequence."""
    rows = [row for row in _rows("benchmarks/trained.csv") if row["median_ms"] > 0]
    dense = {(row["run"], row["group"], row["stage"]): row["median_ms"] for row in rows if row["peer"] == "dense"}
    curves: list[Curve] = [("dense layer", {1024: [1], 4096: [1], 16384: [1]}, "dense", ":")]
    for peer, stage, name, kind, look in (
        ("independent", "step", "training, independent draws", "control", "s-"), ("trained", "forward", "evaluation", "learned", "o--"),
        ("trained", "step", "training", "learned", "o-"),
    ):  # fmt: skip
        points: dict[float, list[float]] = {}
        for row in rows:
            if (row["peer"], row["stage"]) == (peer, stage):
                time = row["median_ms"] / dense[row["run"], row["group"], stage]
                points.setdefault(row["tokens"], []).append(time)
        curves.append((name, points, kind, look))
    label = "tokens of a sequence"
    return draw_curves(curves, label, "time over that of a dense layer", xscale="log", ylim=(0, None))


PICTURES: dict[str, Callable[[], Any]] = {
    "served": draw_served, "sources": draw_sources, "training": draw_training, "length": draw_length, "code": draw_code,
    "pretrained": draw_pretrained, "prose": draw_prose, "lra": draw_lra, "graphs": draw_graphs, "speed": draw_speed,
}  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = Command("python -m examples.findings", __doc__)
    command.add_argument("names", nargs="*", metavar="NAME", help=f"among {', '.join(PICTURES)} (default: all)")
    command.option("output", DOCS / "learning" / "findings", "folder of the pictures")
    args = command.read(arguments)
    other = sorted({*args.names} - {*PICTURES})
    command.require(not other, f"names among {', '.join(PICTURES)}", ", ".join(other))
    return args


def work(args: argparse.Namespace) -> Iterator[Path]:
    for name in args.names or PICTURES:
        path = args.output / f"finding-{name}.png"
        save_figure(path, PICTURES[name](), colors=32, dpi=160)
        yield path


main = program(parse, work)

if __name__ == "__main__":
    main()
