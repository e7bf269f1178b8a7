"""The tables and figures of docs/learning.md, from the tidy tables beside them.

In: the folder of the tables. Out: Markdown, and one figure per study. Not here: what made the tables (``learning``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from examples.benchmarks.learning import LISTOPS, RUNS, Rows, read

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


def table(header: str, lines: Iterable[Sequence[Any]]) -> str:
    """Markdown."""
    names = header.split("|")
    rule = ["---" if name in ("run", "estimator") else "---:" for name in names]
    return "\n".join(
        "| " + " | ".join(map(str, line)) + " |" if line is not rule else "|" + "|".join(rule) + "|"
        for line in (names, rule, *lines)
    )


def spread(values: Any, digits: int) -> str:
    """Mean, smallest and largest."""
    values = np.array(values)
    return f"{values.mean():.{digits}f} ({values.min():.{digits}f} to {values.max():.{digits}f})"


def interval(differences: Any) -> str:
    """Mean and half the width of its 95 % interval, by Student's t."""
    from scipy.stats import t

    half = float(t.ppf(0.975, len(differences) - 1)) * np.std(differences, ddof=1) / len(differences) ** 0.5
    return f"{np.mean(differences):+.2f} ± {half:.2f}"


def by_run(rows: Rows, names: Iterable[str]) -> dict[str, dict[float, Rows]]:
    """Rows of each run and seed."""
    found: dict[str, dict[float, Rows]] = {name: {} for name in names}
    for row in rows:
        found.setdefault(row["run"], {}).setdefault(row["seed"], []).append(row)
    return {name: seeds for name, seeds in found.items() if seeds}


def report_gradients(rows: Rows) -> str:
    """How far each estimator is from the true gradient."""
    lines = [
        [
            f"{r['p']:g}",
            f"{r['sharpness']:g}",
            r["estimator"],
            f"{r['bias']:.2f}",
            f"{r['deviation']:.2f}",
            f"{r['signs']:.1%}",
        ]
        for r in rows
    ]
    return table("p|scores|estimator|bias|standard deviation|signs that agree", lines)


def report_tokens(rows: Rows) -> str:
    """The last row of each curve over the seeds, and when it passed 99 %."""
    lines = []
    for name, curves in by_run(rows, RUNS).items():
        if len(curves) < 2:
            continue
        last = {key: [100 * curve[-1][key] for curve in curves.values()] for key in ("accuracy", "density")}
        last |= {key: [curve[-1][key] for curve in curves.values()] for key in ("p_equal", "p_other")}
        reached = [next((row["step"] for row in curve if row["accuracy"] >= 0.99), None) for curve in curves.values()]
        hits = [step for step in reached if step is not None]
        when = f"{int(np.median(hits)):,} ({len(hits)} of {len(curves)})" if hits else "never"
        shown = [
            spread(last[key], digits)
            for key, digits in (("accuracy", 2), ("density", 1), ("p_equal", 3), ("p_other", 3))
        ]
        lines.append([name, len(curves), *shown, when])
    return table("run|seeds|accuracy, %|density, %|p, equal tokens|p, other tokens|steps to 99 %", lines)


def report_listops(rows: Rows) -> str:
    """Test accuracies, and their differences to full attention, paired by seed; then those of averages over graphs."""
    tests = [
        {row["graphs"]: row for row in rows}
        for name, seeds in by_run([r for r in rows if r["split"] == "test"], LISTOPS).items()
        for rows in seeds.values()
    ]
    full = {found[1]["seed"]: found[1]["accuracy"] for found in tests if found[1]["run"] == "full"}
    lines, averaged = list[list[Any]](), list[list[Any]]()
    for name in dict.fromkeys(found[1]["run"] for found in tests):
        mine = [found for found in tests if found[1]["run"] == name and found[1]["seed"] in full]
        for graphs, result in ((1, lines), (8, averaged)):
            chosen = [found for found in mine if graphs in found]
            if len(chosen) < 2:
                continue
            gain = interval([100 * (found[graphs]["accuracy"] - full[found[1]["seed"]]) for found in chosen])
            accuracy = [
                spread([100 * found[number]["accuracy"] for found in chosen], 2) for number in sorted({1, graphs})
            ]
            heads = [[100 * value for key, value in found[1].items() if key.startswith("density_")] for found in chosen]
            density = [spread(np.mean(heads, 1), 1), spread(np.max(heads, 1), 1)]
            result.append(
                [name, len(chosen), *accuracy, gain, *density]
                if graphs == 1
                else [name, len(chosen), graphs, *accuracy, gain]
            )
    first = table("run|seeds|test accuracy, %|less full attention, points (95 %)|density, %|densest head, %", lines)
    return (
        first
        + "\n\n"
        + table("run|seeds|graphs|one graph, %|averaged, %|averaged less full attention, points (95 %)", averaged)
    )


def report(folder: Path) -> str:
    """All tables."""
    makers = {"gradients": report_gradients, "repeated_tokens": report_tokens, "listops": report_listops}
    return "\n\n".join(make(read(folder, name)) for name, make in makers.items())


def draw(folder: Path) -> None:
    """One figure per study."""
    gradients, tokens, listops, hour = (
        read(folder, name) for name in ("gradients", "repeated_tokens", "listops", "listops_hour")
    )
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, column in zip(figure.subplots(1, 2), ("bias", "deviation"), strict=True):
        for number, name in enumerate(dict.fromkeys(row["estimator"] for row in gradients)):
            mine = [row for row in gradients if row["estimator"] == name and row["sharpness"] == 1]
            axes.plot([row["p"] for row in mine], [row[column] for row in mine], marker="osD^vP*X<"[number], label=name)
        axes.set(xlabel="probability of an edge", ylabel=f"{column} / norm of the true gradient")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small")
    figure.savefig(folder / "gradients.png", dpi=110)

    figure = Figure(figsize=(9, 9), layout="constrained")
    runs = by_run(tokens, RUNS)
    for row, (group, names) in zip(figure.subplots(len(GROUPS), 2), GROUPS.items(), strict=True):
        for axes, column in zip(row, ("loss", "density"), strict=True):
            for name in (name for name in names if name in runs):
                curves = [*zip(*runs[name].values(), strict=False)]
                axes.plot(
                    [at[0]["step"] for at in curves],
                    [np.mean([one[column] for one in at]) for at in curves],
                    label=name,
                )
            axes.set(
                xlabel="step",
                ylabel=f"{column}, mean over seeds",
                title=group,
                ylim=(0, 1.02 if column == "density" else 0.75),
            )
        row[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
    figure.savefig(folder / "repeated_tokens.png", dpi=110)

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for number, (name, seeds) in enumerate(
        by_run([row for row in listops if row["split"] == "test" and row["graphs"] == 1], LISTOPS).items()
    ):
        found = [row for rows in seeds.values() for row in rows]
        density = [100 * np.mean([value for key, value in row.items() if key.startswith("density_")]) for row in found]
        axes.plot(
            density,
            [100 * row["accuracy"] for row in found],
            linestyle="",
            color=f"C{number % 10}",
            marker="o^X"[number // 10],
            label=name,
        )
    axes.set(xscale="log", xlabel="density (%), one point a seed", ylabel="test accuracy (%)")
    figure.legend(loc="outside right center", frameon=False, fontsize="small")
    figure.savefig(folder / "listops.png", dpi=110)

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, seeds in by_run([row for row in hour if row["split"] == "val"], ()).items():
        axes.plot([row["step"] for row in seeds[0]], [100 * row["accuracy"] for row in seeds[0]], label=name)
    axes.set(xlabel="step", ylabel="validation accuracy (%)")
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(folder / "listops_hour.png", dpi=110)
