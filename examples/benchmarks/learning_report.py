"""The tables and figures of docs/learning.md, from the tidy tables beside them.

In: the folder of the tables. Out: Markdown, and one figure per study. Not here: what made the tables (``learning``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from examples.benchmarks.learning import RUNS
from examples.benchmarks.tables import Rows, markdown, read

GROUPS = {  # lines of a figure
    "estimators": ["full", "local", "mask", "paper", "relaxed", "concrete", "score function", "none"],
    "block models": [
        "full, long",
        "local, long, assortative",
        "local, long, assortative, 0.1",
        "mask, long, assortative, 0.1",
    ],
    "256 tokens, as in the paper": ["literal, full", "literal, local"],
}


def spread(values: Any, digits: int) -> str:
    """Mean, smallest and largest."""
    values = np.array(values)
    return f"{values.mean():.{digits}f} ({values.min():.{digits}f} to {values.max():.{digits}f})"


def interval(differences: Any) -> str:
    """Mean and half the width of its 95 % interval, by Student's t."""
    from scipy.stats import t

    half = float(t.ppf(0.975, len(differences) - 1)) * np.std(differences, ddof=1) / len(differences) ** 0.5
    return f"{np.mean(differences):+.2f} ± {half:.2f}"


def by_key(rows: Rows, key: str) -> dict[Any, Rows]:
    """Rows of each value, in the order in which values come first."""
    found: dict[Any, Rows] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


def by_run(rows: Rows) -> dict[str, dict[float, Rows]]:
    """Rows of each run and seed, those of the study first."""
    runs = by_key(rows, "run")
    return {name: by_key(runs[name], "seed") for name in (*RUNS, *runs) if name in runs}


def report_gradients(rows: Rows) -> str:
    """How far each estimator is from the true gradient."""
    form = "{p:g}|{sharpness:g}|{estimator}|{bias:.2f}|{deviation:.2f}|{signs:.1%}"
    names = ("p", "scores", "estimator", "bias", "standard deviation", "signs that agree")
    return markdown(names, [form.format(**row).split("|") for row in rows])


def report_tokens(rows: Rows) -> str:
    """The last row of each curve over the seeds, and when it passed 99 %."""
    columns = {"accuracy": (100, 2), "density": (100, 1), "p_equal": (1, 3), "p_other": (1, 3)}  # factor and digits
    lines = []
    for name, curves in by_run(rows).items():
        if len(curves) < 2:
            continue
        shown = [
            spread([factor * curve[-1][key] for curve in curves.values()], digits)
            for key, (factor, digits) in columns.items()
        ]
        reached = [next((row["step"] for row in curve if row["accuracy"] >= 0.99), None) for curve in curves.values()]
        hits = [step for step in reached if step is not None]
        when = f"{int(np.median(hits)):,} ({len(hits)} of {len(curves)})" if hits else "never"
        lines.append([name, len(curves), *shown, when])
    return markdown(
        ["run", "seeds", "accuracy, %", "density, %", "p, equal tokens", "p, other tokens", "steps to 99 %"], lines
    )


def report_listops(rows: Rows) -> str:
    """Test accuracies over the seeds, and their differences to full attention, paired by seed."""
    full = {row["seed"]: row["test_accuracy"] for row in rows if row["method"] == "full"}
    lines = []
    for method, runs in by_key([row for row in rows if row["seed"] in full], "method").items():
        if len(runs) < 2:
            continue
        gain = interval([100 * (row["test_accuracy"] - full[row["seed"]]) for row in runs])
        means = [100 * np.mean([row[key] for key in row if key.startswith("density_")]) for row in runs]
        density = "" if np.isnan(means).any() else spread(means, 1)
        lines.append([method, len(runs), spread([100 * row["test_accuracy"] for row in runs], 2), gain, density])
    return markdown(["method", "seeds", "test accuracy, %", "less full attention, points (95 %)", "density, %"], lines)


def report(folder: Path) -> str:
    """All tables."""
    makers = {"gradients": report_gradients, "repeated_tokens": report_tokens, "listops": report_listops}
    return "\n\n".join(make(read(folder / f"{name}.csv")) for name, make in makers.items())


def draw(folder: Path) -> None:
    """One figure per study."""
    gradients, tokens, hour = (
        read(folder / f"{name}.csv") for name in ("gradients", "repeated_tokens", "listops_hour")
    )
    aside: dict[str, Any] = {"frameon": False, "fontsize": "small"}

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, column in zip(figure.subplots(1, 2), ("bias", "deviation"), strict=True):
        for (name, rows), marker in zip(by_key(gradients, "estimator").items(), "osD^vP*X<", strict=False):
            mine = [row for row in rows if row["sharpness"] == 1]
            axes.plot([row["p"] for row in mine], [row[column] for row in mine], marker=marker, label=name)
        axes.set(xlabel="probability of an edge", ylabel=f"{column} / norm of the true gradient")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", **aside)
    figure.savefig(folder / "gradients.png", dpi=110)

    figure = Figure(figsize=(9, 9), layout="constrained")
    runs = by_run(tokens)
    for panels, (group, names) in zip(figure.subplots(len(GROUPS), 2), GROUPS.items(), strict=True):
        for axes, column, top in zip(panels, ("loss", "density"), (0.75, 1.02), strict=True):
            for name in (name for name in names if name in runs):
                means = [
                    (at[0]["step"], np.mean([row[column] for row in at]))
                    for at in zip(*runs[name].values(), strict=False)
                ]
                axes.plot(*zip(*means, strict=True), label=name)
            axes.set(xlabel="step", ylabel=f"{column}, mean over seeds", title=group, ylim=(0, top))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), **aside)
    figure.savefig(folder / "repeated_tokens.png", dpi=110)

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, rows in by_key([row for row in hour if row["split"] == "val"], "run").items():
        axes.plot([row["step"] for row in rows], [100 * row["accuracy"] for row in rows], label=name)
    axes.set(xlabel="step", ylabel="validation accuracy (%)")
    axes.legend(**aside)
    figure.savefig(folder / "listops_hour.png", dpi=110)
