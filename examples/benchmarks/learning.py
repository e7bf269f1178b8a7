"""The study of docs/learning_appendix.md: which gradient and which block model learn, over seeds, with the raw numbers kept.

Repeated tokens (``examples/repeated_tokens.py``) and the gradients of one query; with ``--report`` the tables of the page as Markdown
and its figures, from these and from the tables of ListOps next to them. A run that its table holds is not made again, and
one that was stopped goes on.

python -m examples.benchmarks.learning            90 runs, half an hour on one core
python -m examples.benchmarks.learning --report   tables and figures of what is there
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from examples.common.command import Command
from examples.common.pictures import save_figure
from examples.common.runs import check_folder, resumable
from examples.common.tables import Rows, add, by, extent, interval, markdown, read

SHORT: dict[str, Any] = {"steps": 1000, "evaluate_every": 50}
LONG: dict[str, Any] = {"position_scale": 1.0}
SORTED: dict[str, Any] = {**LONG, "parameterization": "assortative", "cluster_init": "orthogonal", "temperature": 0.3}
SORTED["tied"] = 1
PAPER: dict[str, Any] = {"tokens": 256, "batch_size": 256, "num_clusters": 128, "learning_rate": 1e-3, "decay": 0}
MASK: dict[str, Any] = {**SHORT, "estimator": "mask", "exploration": 0.01}
RUNS: dict[str, dict[str, Any]] = {  # by name, how a run differs from `repeated_tokens --quick`
    "full": {**SHORT, "attention": "full"},
    "local": SHORT,
    "mask": MASK,
    "paper": {**MASK, "estimator": "paper"},
    "none": {**SHORT, "estimator": "none"},
    "relaxed": {**SHORT, "estimator": "relaxed"},
    "concrete": {**SHORT, "estimator": "concrete"},
    "score function": {**MASK, "estimator": "score-function"},
    "local, all pairs": {**SHORT, "probes": float("inf")},
    "local, orthogonal": {**SHORT, "cluster_init": "orthogonal"},
    "local, mixed": {**SHORT, "parameterization": "mixed"},
    "mask, mixed": {**MASK, "parameterization": "mixed"},
    "full, long": {**LONG, "attention": "full"},
    "local, long, assortative, 0.1": {**SORTED, "density_weight": 0.1},
    "mask, long, assortative, 0.1": {**SORTED, "density_weight": 0.1, "estimator": "mask", "exploration": 0.01},
    "local, long, assortative": SORTED,
    "local, longer, 64 blocks, 0.1": {**SORTED, "steps": 4000, "num_clusters": 64, "density_weight": 0.1},
    "local, longer, 64 blocks, 0.3": {**SORTED, "steps": 4000, "num_clusters": 64, "density_weight": 0.3},
    "literal, full": {**PAPER, "attention": "full"},
    "literal, local": PAPER,
    "256 tokens, local": {**PAPER, "batch_size": 32, "learning_rate": 3e-3, "decay": 1, "sbm_rate": 4.0},
}
HOURS = ("literal, full", "literal, local", "256 tokens, local")  # one seed each, and only if they are asked for
GROUPS = {  # lines of a figure
    "estimators": ["full", "local", "mask", "paper", "relaxed", "concrete", "score function", "none"],
    "block models": [
        "full, long", "local, long, assortative", "local, long, assortative, 0.1", "mask, long, assortative, 0.1",
    ],
    "256 tokens, as in the paper": ["literal, full", "literal, local"],
}  # fmt: skip


def run(given: argparse.Namespace) -> None:
    """Makes what is missing, seed by seed, so that a study that is stopped has something of everything."""
    from examples import repeated_tokens as task
    from examples.benchmarks.gradients import gradient_errors

    path = given.folder / "gradients.csv"
    if not path.exists():
        pairs = itertools.product((0.05, 0.25, 0.8), (1.0, 3.0))
        add(path, [row for p, sharpness in pairs for row in gradient_errors(p, sharpness)])
    path = given.folder / "repeated_tokens.csv"
    done = {(row["run"], row["seed"]) for row in read(path)}
    for seed, name in itertools.product(range(given.seeds), given.only or [name for name in RUNS if name not in HOURS]):
        if (name, seed) not in done:
            checkpoint = given.work / f"{name.replace(', ', '_').replace(' ', '-')}_{seed}.ckpt"
            rows = task.train(checkpoint, replace(task.QUICK, **RUNS[name], seed=seed))
            add(path, [{"run": name, "seed": seed, **row} for row in rows])


def by_run(rows: Rows) -> dict[str, dict[float, Rows]]:
    """Rows of each run and seed, those of the study first."""
    runs = by(rows, "run", "seed")
    return {name: runs[name] for name in (*RUNS, *runs) if name in runs}


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
        ends = [curve[-1] for curve in curves.values()]
        shown = [extent([f * row[key] for row in ends], digits) for key, (f, digits) in columns.items()]
        reached = [next((row["step"] for row in curve if row["accuracy"] >= 0.99), None) for curve in curves.values()]
        hits = [step for step in reached if step is not None]
        when = f"{int(np.median(hits)):,} ({len(hits)} of {len(curves)})" if hits else "never"
        lines.append([name, len(curves), *shown, when])
    header = ["run", "seeds", "accuracy, %", "density, %", "p, equal tokens", "p, other tokens", "steps to 99 %"]
    return markdown(header, lines)


def report_listops(rows: Rows) -> str:
    """Test accuracies over the seeds, and their differences to full attention, paired by seed."""
    full = {row["seed"]: row["test_accuracy"] for row in rows if row["method"] == "full"}
    lines = []
    for method, runs in by([row for row in rows if row["seed"] in full], "method").items():
        if len(runs) < 2:
            continue
        gain, half = interval([100 * (row["test_accuracy"] - full[row["seed"]]) for row in runs])
        means = [100 * np.mean([row[key] for key in row if key.startswith("density_")]) for row in runs]
        density = "" if np.isnan(means).any() else extent(means, 1)
        accuracy = extent([100 * row["test_accuracy"] for row in runs])
        lines.append([method, len(runs), accuracy, f"{gain:+.2f} ± {half:.2f}", density])
    return markdown(["method", "seeds", "test accuracy, %", "less full attention, points (95 %)", "density, %"], lines)


def report(folder: Path) -> str:
    makers = {"gradients": report_gradients, "repeated_tokens": report_tokens, "listops": report_listops}
    return "\n\n".join(make(read(folder / f"{name}.csv")) for name, make in makers.items())


def draw(folder: Path) -> None:
    from matplotlib.figure import Figure  # here, for --help does not wait for it

    files = ("gradients", "repeated_tokens", "listops_hour")
    gradients, tokens, hour = (read(folder / f"{name}.csv") for name in files)
    aside: dict[str, Any] = {"frameon": False, "fontsize": "small"}

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, column in zip(figure.subplots(1, 2), ("bias", "deviation"), strict=True):
        for (name, rows), marker in zip(by(gradients, "estimator").items(), "osD^vP*X<", strict=False):
            mine = [row for row in rows if row["sharpness"] == 1]
            axes.plot([row["p"] for row in mine], [row[column] for row in mine], marker=marker, label=name)
        axes.set(xlabel="probability of an edge", ylabel=f"{column} / norm of the true gradient")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", **aside)
    save_figure(folder / "gradients.png", figure, dpi=110)

    figure = Figure(figsize=(9, 9), layout="constrained")
    runs = by_run(tokens)
    for panels, (group, names) in zip(figure.subplots(len(GROUPS), 2), GROUPS.items(), strict=True):
        for axes, column, top in zip(panels, ("loss", "density"), (0.75, 1.02), strict=True):
            for name in (name for name in names if name in runs):
                times = [*zip(*runs[name].values(), strict=False)]
                means = [np.mean([row[column] for row in at]) for at in times]
                axes.plot([at[0]["step"] for at in times], means, label=name)
            axes.set(xlabel="step", ylabel=f"{column}, mean over seeds", title=group, ylim=(0, top))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), **aside)
    save_figure(folder / "repeated_tokens.png", figure, dpi=110)

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, rows in by([row for row in hour if row["split"] == "val"], "run").items():
        axes.plot([row["step"] for row in rows], [100 * row["accuracy"] for row in rows], label=name)
    axes.set(xlabel="step", ylabel="validation accuracy (%)")
    axes.legend(**aside)
    save_figure(folder / "listops_hour.png", figure, dpi=110)


command = Command("python -m examples.benchmarks.learning", __doc__)
command.add_argument("--report", action="store_true", help="make the tables and figures of the page")
words = "runs by name (default: all but those of 256 tokens)"
command.add_argument("--only", nargs="+", choices=RUNS, metavar="RUN", help=words)
command.option("seeds", 5, "number of seeds, from 0", above=0)
command.option("folder", Path("docs/learning"), "of tables and figures")
command.option("work", Path("runs/learning"), "of checkpoints")


def main(arguments: Sequence[str] | None = None) -> None:
    given = command.read(arguments)
    if given.report:
        print(report(given.folder))
        draw(given.folder)
        return
    for name, folder in (("folder", given.folder), ("work", given.work)):
        command.attempt(check_folder, name, folder)
        folder.mkdir(parents=True, exist_ok=True)
    with resumable(given.folder):
        run(given)


if __name__ == "__main__":
    main()
