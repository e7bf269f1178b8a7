"""Tables of accuracy, density, and questions with an edge to their answer; and one figure for each task, with names in plain words."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from examples.common.pictures import bare, name_of, plain, plot_extent, save_figure, style
from examples.common.tables import Row, by, extent, groups, last, markdown

TICKS = (0.5, 1, 3, 10, 30, 100)
BACK = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.7}  # of words in a figure
HEADER = ("run", "seeds", "steps", "accuracy, %", "of each size, %", "densities of layers, %", "edge to the answer, %",
          "seconds a step")  # fmt: skip


def _ends(rows: Sequence[Row]) -> dict[str, dict[str, list[list[Row]]]]:
    """The last rows of each run, by task and name; one list a seed."""
    ends: dict[str, dict[str, list[list[Row]]]] = {}
    for task, name, _, run in groups(rows, "task", "run", "seed"):
        ends.setdefault(task, {}).setdefault(name, []).append(last(run))
    return ends


def _numbers(row: Row, prefix: str) -> list[float]:
    return [row[name] for name in sorted(row) if name.startswith(prefix) and name.rpartition("_")[2].isdigit()]


def densities(ends: Sequence[Row]) -> list[float]:
    """Mean density of each layer over the sizes of a test."""
    return [fmean(layer) for layer in zip(*(_numbers(row, "density_") for row in ends), strict=True)]


def tables(rows: Sequence[Row]) -> str:
    parts = []
    for task, runs in _ends(rows).items():
        lines = []
        for name, seeds in runs.items():
            sizes = zip(*([100 * row["accuracy"] for row in ends] for ends in seeds), strict=True)
            layers = zip(*([100 * x for x in densities(ends)] for ends in seeds), strict=True)
            hits = [fmean(row["answer_any"] for row in ends) for ends in seeds]
            lines.append([
                name, len(seeds), f"{seeds[0][0]['step']:,.0f}",
                extent([100 * fmean(row["accuracy"] for row in ends) for ends in seeds]),
                " / ".join(f"{fmean(size):.1f}" for size in sizes), " / ".join(map(extent, layers)),
                f"{100 * fmean(hits):.1f}", f"{fmean(ends[0]['seconds'] / ends[0]['step'] for ends in seeds):.2g}",
            ])  # fmt: skip
        parts.append(f"## {task}\n\n{markdown(HEADER, lines)}")
    return "\n\n".join(parts)


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """One figure for each task: accuracy over density where some method has several densities, else both over the steps."""
    paths = []
    for task, runs in _ends(rows).items():
        methods = [name.partition(" ")[0] for name in runs]
        several = len(methods) > len({*methods})
        task_rows = [row for row in rows if row["task"] == task]
        paths.append(folder / f"{task}.png")
        save_figure(paths[-1], _over_density(task, runs) if several else _over_steps(task, task_rows), dpi=110)
    return paths


def _over_density(task: str, runs: dict[str, list[list[Row]]]) -> Figure:
    """Accuracy over density; a bar from the worst seed to the best.

    Methods of several densities, or without options, are lines of a color and a name. What is left are hollow marks in the
    color of their kind, with their options next to them. Runs without the schedule (``control``) are in the tables alone.
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
        look = style(number) | {"ms": 8, "linestyle": "--" if options else "-"}
        look |= {"label": f"{kind} ({options})" if options else kind} if method in named else {"mfc": "white"}
        plot_extent(axes, points, alpha=0.8, **look)
        if method not in named:
            x, y = points[0][0], fmean(points[0][1])
            near = sum(abs(math.log(x / a)) < 0.7 and abs(y - b) < 6 for a, b in taken)
            taken.append((x, y))
            place: dict[str, Any] = {"xytext": (7, -3)}
            if y > 80:  # below what lies at the top
                place = {"xytext": (0, -8 - 12 * near), "ha": "center", "va": "top"}
            text = options if any(plain(name)[0] == kind for name in named) else f"{kind}: {options}"
            place |= {"textcoords": "offset points", "fontsize": 7, "color": look["color"], "bbox": BACK}
            axes.annotate(text, (x, y), **place)
    axes.set(xscale="log", xlabel="density beyond self-loops, mean of the layers (%)", ylabel="accuracy (%)")
    axes.set_xticks(TICKS, map(str, TICKS))
    least = min(TICKS[0], *(x for points in lines.values() for x, _ in points))
    axes.set(xlim=(least * 0.8, TICKS[-1] * 1.3), ylim=(-4, 104), title=task)
    bare(axes)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


def _over_steps(task: str, rows: Sequence[Row]) -> Figure:
    """Accuracy and density over the steps: means over sizes, layers and seeds; seeds are light."""
    figure = Figure(figsize=(9.5, 4), layout="constrained")
    accuracy_axes, density_axes = figure.subplots(1, 2)
    for number, (name, seeds) in enumerate(by(rows, "run", "seed", "step").items()):
        look = style(number) | {"ms": 4, "label": name_of(name)}
        steps = [*next(iter(seeds.values()))]
        for axes, value in (
            (accuracy_axes, lambda sizes: fmean(row["accuracy"] for row in sizes)),
            (density_axes, lambda sizes: fmean(densities(sizes))),
        ):
            curves = [[100 * value(sizes) for sizes in steps.values()] for steps in seeds.values()]
            for curve in curves if len(curves) > 1 else []:
                axes.plot(steps, curve, color=look["color"], alpha=0.25, lw=0.8)
            axes.plot(steps, [fmean(values) for values in zip(*curves, strict=True)], **look)
    accuracy_axes.set(xlabel="step", ylabel="accuracy (%)", ylim=(-4, 104))
    density_axes.set(xlabel="step", ylabel="density beyond self-loops (%)", yscale="log", ylim=(0.2, 130))
    density_axes.set_yticks(TICKS, map(str, TICKS))
    bare(accuracy_axes, density_axes)
    figure.suptitle(task)
    below: dict[str, Any] = {"loc": "outside lower center", "ncols": 3, "frameon": False, "fontsize": "small"}
    figure.legend(*accuracy_axes.get_legend_handles_labels(), **below)
    return figure
