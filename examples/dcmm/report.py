"""Tables and a figure of what was trained: accuracy in validation and in the test, over seeds, for each data set."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from examples.common.pictures import name_of, save_figure, style
from examples.common.tables import Row, by, deviation, markdown

HEADER = (
    "run", "seeds", "parameters", "test, %", "best of validation, %", "at step", "density, %", "degrees of 0, %",
    "seconds a step",
)  # fmt: skip


def tested(rows: Sequence[Row]) -> Row:
    """The row of a run that has a test."""
    return next(row for row in rows if row["test"] == row["test"])


def tables(rows: Sequence[Row]) -> str:
    parts = []
    for data, runs in by(rows, "data", "run", "seed").items():
        lines = []
        for name, seeds in runs.items():
            best = [tested(seed_rows) for seed_rows in seeds.values()]
            numbers = [deviation([100 * row[key] for row in best]) for key in ("test", "validation")]
            step, density, idle = (fmean(row[key] for row in best) for key in ("step", "density", "idle"))
            time = fmean(seed_rows[-1]["seconds"] / seed_rows[-1]["step"] for seed_rows in seeds.values())
            dead = f"{100 * idle:.0f}" if idle == idle else ""
            cells = (f"{step:,.0f}", f"{100 * density:.1f}", dead, f"{time:.2g}")
            lines.append([name, len(seeds), f"{best[0]['parameters']:,.0f}", *numbers, *cells])
        parts.append(f"## {data}\n\n{markdown(HEADER, lines)}")
    return "\n\n".join(parts)


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Accuracy in validation over steps, means and all seeds; to the right the test of each seed, over ten points or more."""
    paths = []
    for data, runs in by(rows, "data", "run", "seed").items():
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        curve_ax, test_ax = figure.subplots(1, 2, width_ratios=(2, 1))
        lowest = 91.0  # never so close that a few images look like a difference
        for number, (name, seeds) in enumerate(runs.items()):
            color = {"color": style(number)["color"]}
            steps = [row["step"] for row in next(iter(seeds.values()))]
            curves = [[100 * row["validation"] for row in seed_rows] for seed_rows in seeds.values()]
            for curve in curves:
                curve_ax.plot(steps, curve, **color, alpha=0.25, lw=0.8)
            curve_ax.plot(steps, [fmean(values) for values in zip(*curves, strict=True)], **color, label=name_of(name))
            tests = [100 * tested(seed_rows)["test"] for seed_rows in seeds.values()]
            lowest = min(lowest, *tests)
            test_ax.plot([number] * len(tests), tests, "o", **color, alpha=0.6)
            test_ax.plot([number - 0.25, number + 0.25], [fmean(tests)] * 2, **color)
        curve_ax.set(xlabel="step", ylabel="accuracy in validation (%)", ylim=(None, 100.5), title=data)
        test_ax.set(ylabel="accuracy in the test (%)", ylim=(lowest - 1, 100.5), xticks=[])
        test_ax.set_title("points are seeds, lines their means", fontsize="medium")
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
        paths.append(folder / f"{Path(data).name}.png")
        save_figure(paths[-1], figure, dpi=110)
    return paths
