"""Tables and a figure of what was trained: accuracy, density, and how many questions had an edge to their answer.

In: the rows of ``rows.csv``. Out: Markdown, and one figure for each task. Not here: how the rows came about (``train.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from examples.benchmarks.tables import Row, markdown
from examples.common.runs import save_figure

TICKS = (0.5, 1, 3, 10, 30, 100)
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


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Accuracy over density, one line a method and one point a density; a bar from the worst seed to the best."""
    lines: dict[str, dict[str, list[tuple[float, list[float]]]]] = {}
    for (task, name), seeds in _groups(rows).items():
        density = 100 * fmean(fmean(densities(ends)) for ends in seeds)
        accuracy = [100 * fmean(row["accuracy"] for row in ends) for ends in seeds]
        method = name.rpartition(" ")[0].rpartition(" ")[0] or name
        lines.setdefault(task, {}).setdefault(method, []).append((density, accuracy))
    paths = []
    for task, methods in lines.items():
        figure = Figure(figsize=(10, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.set_prop_cycle(color=[*colormaps["tab20"](range(20))])
        for number, (method, points) in enumerate(methods.items()):
            points.sort()
            means = [fmean(accuracy) for _, accuracy in points]
            around = [[mean - min(each), max(each) - mean] for mean, (_, each) in zip(means, points, strict=True)]
            style: dict[str, Any] = {
                "marker": "osD^vXP"[number % 7],
                "ms": 10,
                "alpha": 0.8,
                "capsize": 3,
                "label": method,
            }
            axes.errorbar([x for x, _ in points], means, yerr=[*zip(*around, strict=True)], **style)
        axes.set(
            xscale="log", xlabel="density beyond self-loops, mean of the layers (%)", ylabel="accuracy (%)", title=task
        )
        axes.set_xticks(TICKS, map(str, TICKS))
        axes.set(xlim=(TICKS[0] * 0.8, TICKS[-1] * 1.2), ylim=(-4, 104))
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False, fontsize="small")
        paths.append(folder / f"{task}.png")
        save_figure(paths[-1], figure, dpi=110)
    return paths
