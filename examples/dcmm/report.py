"""Tables and a figure of what was trained: accuracy in validation and in the test, over seeds.

In: the rows of ``rows.csv``. Out: Markdown, and one figure for each data set. Not here: how the rows came about (``train.py``), and pictures
of single images (``pictures.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from examples.benchmarks.tables import Row, markdown
from examples.common.runs import save_figure
from examples.recall.report import name_of

HEADER = (
    "run", "seeds", "parameters", "test, %", "best of validation, %", "at step", "density, %", "degrees of 0, %",
    "seconds a step",
)  # fmt: skip
Runs = dict[str, list[list[Row]]]  # by name, the rows of each seed


def groups(rows: Sequence[Row]) -> dict[str, Runs]:
    """Rows of each run and seed, by data set."""
    found: dict[str, dict[str, dict[float, list[Row]]]] = {}
    for row in rows:
        found.setdefault(row["data"], {}).setdefault(row["run"], {}).setdefault(row["seed"], []).append(row)
    return {data: {name: [*seeds.values()] for name, seeds in runs.items()} for data, runs in found.items()}


def tested(rows: Sequence[Row]) -> Row:
    """The row of a run that has a test."""
    return next(row for row in rows if row["test"] == row["test"])


def spread(values: Sequence[float]) -> str:
    """Mean in per cent, and standard deviation over seeds."""
    mean = f"{100 * fmean(values):.2f}"
    return f"{mean} ± {100 * stdev(values):.2f}" if len(values) > 1 else mean


def tables(rows: Sequence[Row]) -> str:
    """One table for each data set."""
    parts = []
    for data, runs in groups(rows).items():
        lines = []
        for name, seeds in runs.items():
            best = [tested(each) for each in seeds]
            numbers = [spread([row[key] for row in best]) for key in ("test", "validation")]
            step, density = (fmean(row[key] for row in best) for key in ("step", "density"))
            time = fmean(each[-1]["seconds"] / each[-1]["step"] for each in seeds)
            of = (len(seeds), f"{best[0]['parameters']:,.0f}")
            idle = fmean(row["idle"] for row in best)
            dead = f"{100 * idle:.0f}" if idle == idle else ""
            lines.append([name, *of, *numbers, f"{step:,.0f}", f"{100 * density:.1f}", dead, f"{time:.2g}"])
        parts.append(f"## {data}\n\n{markdown(HEADER, lines)}")
    return "\n\n".join(parts)


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Accuracy in validation over steps, means with all seeds in light; beside it the test of each seed, over ten points or more."""
    paths = []
    for data, runs in groups(rows).items():
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(2, 1))
        for number, (name, seeds) in enumerate(runs.items()):
            style: dict[str, Any] = {"color": colormaps["tab10"](number % 10)}
            curves = [[100 * row["validation"] for row in each] for each in seeds]
            for curve in curves:
                left.plot([row["step"] for row in seeds[0]], curve, **style, alpha=0.25, lw=0.8)
            means = [fmean(values) for values in zip(*curves, strict=True)]
            left.plot([row["step"] for row in seeds[0]], means, **style, label=name_of(name))
            tests = [100 * tested(each)["test"] for each in seeds]
            right.plot([number] * len(tests), tests, "o", **style, alpha=0.6)
            right.plot([number - 0.25, number + 0.25], [fmean(tests)] * 2, **style)
        left.set(xlabel="step", ylabel="accuracy in validation (%)", ylim=(None, 100.5), title=data)
        lowest = min(100 * tested(each)["test"] for seeds in runs.values() for each in seeds)
        # never so close that a few images look like a difference
        right.set(ylabel="accuracy in the test (%)", ylim=(min(90.0, lowest - 1), 100.5), xticks=[])
        right.set_title("a point a seed, a line the mean", fontsize="medium")
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
        paths.append(folder / f"{Path(data).name}.png")
        save_figure(paths[-1], figure, dpi=110)
    return paths
