"""Tables and a figure of what was trained: accuracy, density, and how many questions had an edge to their answer.

In: the rows of ``rows.csv``. Out: Markdown, and one figure for each task, whose names are plain words. Not here: how the rows came about (``train.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from examples.benchmarks.tables import Row, markdown
from examples.common.runs import save_figure

TICKS = (0.5, 1, 3, 10, 30, 100)
KINDS = {"full": "full attention", "dcmm": "full attention + DCMM bias", "sbm": "block model", "top-k": "top-k of all scores",
         "bigbird": "BigBird", "lsh": "LSH (Reformer)", "blocks": "blocks (MoBA)", "routing": "routing", "key-selection": "key selection",
         "dcsbm": "block model with degrees", "dcmm-sbm": "block model + DCMM bias"}  # fmt: skip
BACK = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.7}  # of words in a figure
PACE = ("threshold", "rate")  # options that say how fast shares fall
SPEAK = ("estimator", "select", "control", "parameterization")  # whose values say enough
HEADER = ("run", "seeds", "steps", "accuracy, %", "of each size, %", "densities of layers, %", "edge to the answer, %",
          "seconds a step")  # fmt: skip


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[list[Row]]]:
    """The last rows of each run, by task and name; one list a seed."""
    ends: dict[tuple[str, str], dict[float, list[Row]]] = {}
    for row in rows:
        seeds = ends.setdefault((row["task"], row["run"]), {})
        known = seeds.get(row["seed"], [])
        seeds[row["seed"]] = [*(other for other in known if other["step"] == row["step"]), row]
    return {key: [*seeds.values()] for key, seeds in ends.items()}


def _spread(values: Sequence[float]) -> str:
    """Mean of values in per cent, and from the least to the largest."""
    low, high = min(values), max(values)
    mean = f"{100 * fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ({100 * low:.2f} to {100 * high:.2f})"


def _numbers(row: Row, prefix: str) -> list[float]:
    return [row[name] for name in sorted(row) if name.startswith(prefix) and name.rpartition("_")[2].isdigit()]


def densities(ends: Sequence[Row]) -> list[float]:
    """Mean density of each layer over the sizes of a test."""
    return [fmean(layer) for layer in zip(*(_numbers(row, "density_") for row in ends), strict=True)]


def tables(rows: Sequence[Row]) -> str:
    """One table for each task."""
    parts: dict[str, list[list[str]]] = {}
    for (task, name), seeds in _groups(rows).items():
        sizes = [fmean(column) for column in zip(*([row["accuracy"] for row in ends] for ends in seeds), strict=True)]
        layers = zip(*(densities(ends) for ends in seeds), strict=True)
        found = [fmean(row["answer_any"] for row in ends) for ends in seeds]
        line = [
            name,
            len(seeds),
            f"{seeds[0][0]['step']:,.0f}",
            _spread([fmean(row["accuracy"] for row in ends) for ends in seeds]),
        ]
        line += [
            " / ".join(f"{100 * size:.1f}" for size in sizes),
            " / ".join(map(_spread, layers)),
            f"{100 * fmean(found):.1f}",
            f"{fmean(ends[0]['seconds'] / ends[0]['step'] for ends in seeds):.2g}",
        ]
        parts.setdefault(task, []).append([*map(str, line)])
    return "\n\n".join(f"## {task}\n\n{markdown(HEADER, lines)}" for task, lines in parts.items())


def plain(method: str) -> tuple[str, str]:
    """Kind and options of a method in words; what only sets the pace of a schedule is left out.

    >>> plain("indexer:select=top_k,estimator=imitate,rate=0.004")
    ('indexer', 'top-k, imitate')
    """
    kind, _, own = method.partition(":")
    pairs = [pair.split("=") for pair in own.split(",") if pair and pair.split("=")[0] not in PACE]
    words = [value if name in SPEAK else f"{name} {value}" for name, value in pairs]
    return KINDS.get(kind, kind), ", ".join(words).replace("_", "-").replace("share", "share at once")


def name_of(run: str) -> str:
    """The name of a run in words.

    >>> name_of("sbm:estimator=local 5 %")
    'block model (local) 5 %'
    """
    method, _, rest = run.partition(" ")
    kind, options = plain(method)
    return " ".join([kind, *([f"({options})"] if options else []), *([rest] if rest else [])])


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """One figure for each task: accuracy over density where some method has several densities, else both over the steps."""
    tasks: dict[str, dict[str, list[list[Row]]]] = {}
    for (task, name), seeds in _groups(rows).items():
        tasks.setdefault(task, {})[name] = seeds
    paths = []
    for task, runs in tasks.items():
        methods = [name.partition(" ")[0] for name in runs]
        several = len(methods) > len({*methods})
        figure = (
            _over_density(task, runs) if several else _over_steps(task, [row for row in rows if row["task"] == task])
        )
        paths.append(folder / f"{task}.png")
        save_figure(paths[-1], figure, dpi=110)
    return paths


def _over_density(task: str, runs: dict[str, list[list[Row]]]) -> Figure:
    """Accuracy over density; a bar from the worst seed to the best.

    Methods of several densities, or without options, are lines of a colour and a name. What is left are hollow marks in the
    colour of their kind, with their options beside them. Runs without the schedule (``control``) are in the tables alone.
    """
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for name, seeds in ((name, seeds) for name, seeds in runs.items() if "control=" not in name):
        density = 100 * fmean(fmean(densities(ends)) for ends in seeds)
        accuracy = [100 * fmean(row["accuracy"] for row in ends) for ends in seeds]
        lines.setdefault(name.partition(" ")[0], []).append((density, accuracy))
    figure = Figure(figsize=(9.5, 4.8), layout="constrained")
    axes = figure.subplots()
    kinds = [*dict.fromkeys(plain(method)[0] for method in lines)]
    named = {method for method, points in lines.items() if len(points) > 1 or not plain(method)[1]}
    taken: list[tuple[float, float]] = []
    for method, points in sorted(lines.items(), key=lambda item: item[0] not in named):
        (kind, options), number = plain(method), kinds.index(plain(method)[0])
        points.sort()
        means = [fmean(accuracy) for _, accuracy in points]
        around = [[mean - min(each), max(each) - mean] for mean, (_, each) in zip(means, points, strict=True)]
        style: dict[str, Any] = {"color": colormaps["tab10"](number % 10), "marker": "osD^vXP*<>"[number % 10], "ms": 8}
        style |= {"label": f"{kind} ({options})" if options else kind} if method in named else {"mfc": "white"}
        style |= {"linestyle": "--"} if options else {}
        axes.errorbar([x for x, _ in points], means, yerr=[*zip(*around, strict=True)], alpha=0.8, capsize=3, **style)
        if method not in named:
            x, y = points[0][0], means[0]
            near = sum(abs(math.log(x / a)) < 0.7 and abs(y - b) < 6 for a, b in taken)
            taken.append((x, y))
            place: dict[str, Any] = {"xytext": (7, -3)}
            if y > 80:  # below what lies at the top
                place = {"xytext": (0, -8 - 12 * near), "ha": "center", "va": "top"}
            text = options if any(plain(each)[0] == kind for each in named) else f"{kind}: {options}"
            axes.annotate(
                text, (x, y), textcoords="offset points", fontsize=7, color=style["color"], bbox=BACK, **place
            )
    axes.set(
        xscale="log", xlabel="density beyond self-loops, mean of the layers (%)", ylabel="accuracy (%)", title=task
    )
    axes.set_xticks(TICKS, map(str, TICKS))
    axes.set(
        xlim=(min(TICKS[0], *(x for points in lines.values() for x, _ in points)) * 0.8, TICKS[-1] * 1.3),
        ylim=(-4, 104),
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


def _over_steps(task: str, rows: Sequence[Row]) -> Figure:
    """Accuracy and density over the steps: means over sizes, layers and seeds; seeds are light."""
    curves: dict[str, dict[float, dict[float, list[Row]]]] = {}
    for row in rows:
        curves.setdefault(row["run"], {}).setdefault(row["seed"], {}).setdefault(row["step"], []).append(row)
    figure = Figure(figsize=(9.5, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (name, seeds) in enumerate(curves.items()):
        style: dict[str, Any] = {"color": colormaps["tab10"](number % 10)}
        for axes, value in (
            (left, lambda sizes: fmean(row["accuracy"] for row in sizes)),
            (right, lambda sizes: fmean(densities(sizes))),
        ):
            each = [[100 * value(sizes) for sizes in steps.values()] for steps in seeds.values()]
            steps = [*next(iter(seeds.values()))]
            for curve in each if len(each) > 1 else []:
                axes.plot(steps, curve, **style, alpha=0.25, lw=0.8)
            means = [fmean(values) for values in zip(*each, strict=True)]
            axes.plot(steps, means, **style, marker="osD^vXP*"[number % 8], ms=4, label=name_of(name))
    left.set(xlabel="step", ylabel="accuracy (%)", ylim=(-4, 104))
    right.set(xlabel="step", ylabel="density beyond self-loops (%)", yscale="log", ylim=(0.2, 130))
    right.set_yticks(TICKS, map(str, TICKS))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(task)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize="small"
    )
    return figure
