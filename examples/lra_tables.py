"""Tables and the density plot of many runs on the Long Range Arena, beside the published numbers.

In: one record for each finished run. Out: Markdown, CSV files and a picture in a folder. Not here: running (``reproduce_lra.py``),
and what one run leaves behind (``lra_report.py``).
"""

from __future__ import annotations

import csv
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lra_report import COLOURS

TASKS = ("listops", "text", "retrieval", "image", "pathfinder")

# Cho et al., 2022, Table 8: accuracies in per cent and their deviations, in the order of TASKS. The methods are named as ours;
# theirs that go by these names are not all the same (docs of lra_baselines.py and examples/README.md).
PUBLISHED = {
    "full": ((37.22, 0.52), (64.93, 0.46), (79.55, 1.22), (40.38, 0.76), (74.26, 0.57)),
    "linear": ((37.46, 0.57), (64.90, 0.49), (81.10, 0.16), (38.48, 0.57), (74.61, 1.26)),
    "reformer": ((22.92, 0.41), (64.70, 0.12), (77.25, 0.15), (43.65, 0.16), (70.28, 1.45)),
    "performer": ((18.25, 0.12), (65.00, 0.50), (79.01, 1.66), (39.80, 0.46), (70.79, 1.26)),
    "linformer": ((38.44, 0.14), (56.28, 1.06), (78.09, 0.12), (39.53, 0.57), (67.62, 0.65)),
    "nystromformer": ((37.22, 0.51), (65.46, 0.40), (79.35, 0.40), (43.07, 0.42), (71.97, 1.30)),
    "sbm": ((37.45, 0.44), (65.79, 0.27), (80.00, 0.21), (41.31, 0.35), (75.12, 0.49)),
}
PUBLISHED_DENSITY = {"sbm": (20.09, 26.10, 29.46, 20.49, 18.56)}  # per cent, of the same runs

SPARSE = ("sbm", "window", "bigbird")  # attention over a graph, which has a density

Run = Mapping[str, Any]
"""A finished run: "task", "method" (with its options), "attention", "seed", "steps", "seconds", "results" as in ``results.json``.

Seconds of None or 0 are not known: whoever counted them was killed, or the count was lost.
"""


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows with a header, whole or not at all; columns in the order in which they first occur."""
    draft = path.with_name(path.name + ".partial")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(draft, path)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Writes a Markdown table, the first column to the left and the others to the right.

    >>> print(markdown(["a", "b"], [["x", "1"]]))
    | a | b |
    |---|--:|
    | x | 1 |
    """
    lines = ["| " + " | ".join(header) + " |", "|---|" + "--:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Writes mean ± sample deviation, or the value if there is one only.

    >>> spread([1.0, 2.0]), spread([1.0])
    ('1.50 ± 0.71', '1.00')
    """
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def _groups(runs: Sequence[Run]) -> tuple[list[str], list[str], dict[tuple[str, str], list[Run]]]:
    """Methods and tasks in the order to show them, and the runs of each pair."""
    methods = list(dict.fromkeys(run["method"] for run in runs))
    known = {run["task"] for run in runs}
    tasks = [task for task in TASKS if task in known] + sorted(known - {*TASKS})
    cells: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        cells.setdefault((run["method"], run["task"]), []).append(run)
    return methods, tasks, cells


def layer_densities(run: Run) -> list[float]:
    """Density of each layer on the test set, the mean of its heads; empty for attention without a graph."""
    return [statistics.fmean(heads) for heads in run["results"]["density"]["tested"]] if run["attention"] in SPARSE else []


def run_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One flat row for each run."""
    rows = []
    for run in runs:
        results = run["results"]
        test = results["test"]
        low, high = test["interval_95"]
        row = {name: run[name] for name in ("task", "method", "seed", "steps")}
        row |= {"test_accuracy": test["accuracy"], "low_95": low, "high_95": high, "majority": test["majority"]}
        row |= {"test_examples": test["examples"], "test_loss": test["loss"], "best_step": results["best"]["step"]}
        row |= {"parameters": results["parameters"], "tokens_per_second": results["tokens_per_second"]}
        row |= {"peak_memory_bytes": results["peak_memory_bytes"], "peak_memory_of": results["peak_memory_of"]}
        row |= {"wall_seconds": run["seconds"] or "", "device": results["device"]}
        row |= {f"density_layer{layer}": density for layer, density in enumerate(layer_densities(run))}
        rows.append(row)
    return rows


def cell_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row for each method and task: means, deviations, relative cost, published numbers. Accuracies and densities in per cent."""
    methods, tasks, cells = _groups(runs)
    rows = []
    for task in tasks:
        for method in methods:
            group = cells.get((method, task))
            if not group:
                continue
            accuracies = [100 * run["results"]["test"]["accuracy"] for run in group]
            row: dict[str, Any] = {"task": task, "method": method, "runs": len(group), "accuracy": statistics.fmean(accuracies)}
            row["accuracy_deviation"] = statistics.stdev(accuracies) if len(group) > 1 else ""
            published = PUBLISHED.get(method)
            if published and task in TASKS:
                row["published_accuracy"], row["published_deviation"] = published[TASKS.index(task)]
            for name in ("tokens_per_second", "peak_memory_bytes"):
                row[name] = mean_of(group, name)
                reference = cells.get(("full", task))
                row[name + "_relative_to_full"] = row[name] / mean_of(reference, name) if reference else ""
            row["wall_seconds"] = mean_seconds(group) or ""
            row["steps"] = statistics.fmean(run["steps"] for run in group)
            layers = [layer_densities(run) for run in group]
            row |= {f"density_layer{n}": 100 * statistics.fmean(column) for n, column in enumerate(zip(*layers, strict=True))}
            rows.append(row)
    return rows


def mean_seconds(group: Sequence[Run]) -> float | None:
    """Mean wall time of the runs of which it is known; None if there is none."""
    known = [run["seconds"] for run in group if run["seconds"]]
    return statistics.fmean(known) if known else None


def mean_of(group: Sequence[Run], name: str) -> float:
    """Mean of one of the results over some runs."""
    return statistics.fmean(run["results"][name] for run in group)


def report(runs: Sequence[Run], budget: str) -> str:
    """Writes the tables of all runs as Markdown.

    Args:
        runs: At least one.
        budget: In words, what every run was given.
    """
    methods, tasks, cells = _groups(runs)
    count = max(len(group) for group in cells.values())
    average = ["mean"] if len(tasks) > 1 else []

    def table(cell: Callable[[list[Run]], str], rows: Sequence[str]) -> str:
        return markdown(
            ["method", *tasks], [[method, *(cell(cells[method, t]) if (method, t) in cells else "–" for t in tasks)] for method in rows]
        )

    def accuracy_row(method: str) -> list[str]:
        groups = [[100 * run["results"]["test"]["accuracy"] for run in cells.get((method, task), ())] for task in tasks]
        row = [method, *(spread(group) if group else "–" for group in groups)]
        return [*row, f"{statistics.fmean(statistics.fmean(g) for g in groups):.2f}" if all(groups) else "–"] if average else row

    def published_row(method: str) -> list[str]:
        known = [PUBLISHED[method][TASKS.index(task)] if task in TASKS else None for task in tasks]
        row = [f"{method}, published", *("–" if pair is None else f"{pair[0]:.2f} ± {pair[1]:.2f}" for pair in known)]
        return [*row, f"{statistics.fmean(pair[0] for pair in known if pair):.2f}" if all(known) else "–"] if average else row

    chance = [next(f"{100 * run['results']['test']['majority']:.2f}" for run in runs if run["task"] == task) for task in tasks]
    bare = [method for method in PUBLISHED if method in {run["attention"] for run in runs}]
    parts = [
        "# Long Range Arena",
        f"{len(runs)} runs, at most {count} of a kind. {budget}",
        "## Test accuracy, per cent",
        "Mean ± deviation over seeds, of the checkpoint with the best validation accuracy. Rows marked *published* are Table 8 of "
        "Cho et al., 2022, at the settings of the `paper` preset: only runs with these settings and data compare with them.",
        markdown(
            ["method", *tasks, *average],
            [*map(accuracy_row, methods), ["majority class", *chance, *["" for _ in average]], *map(published_row, bare)],
        ),
    ]
    sparse = [method for method in methods if any(m == method and group[0]["attention"] in SPARSE for (m, _), group in cells.items())]
    if sparse:
        parts += [
            "## Density on the test set, per cent",
            "Layers from the lower to the upper, each the mean of its heads and of the seeds; other methods have no graph.",
            table(
                lambda group: " / ".join(f"{100 * statistics.fmean(c):.2f}" for c in zip(*map(layer_densities, group), strict=True)), sparse
            ),
        ]
        for method in sparse:
            if method in PUBLISHED_DENSITY:
                shares = [f"{task} {share:.2f}" for task, share in zip(TASKS, PUBLISHED_DENSITY[method], strict=True)]
                parts.append(f"Published, mean of both layers: {', '.join(shares)}.")

    def relative(group: list[Run], name: str, scale: float, digits: int = 0) -> str:
        mean = mean_of(group, name)
        full = cells.get(("full", group[0]["task"]))
        return f"{mean / scale:,.{digits}f}" + (f" ({mean / mean_of(full, name):.2f})" if full else "")

    def duration(group: list[Run]) -> str:
        seconds = mean_seconds(group)
        return f"{statistics.fmean(run['steps'] for run in group):,.0f} in {'–' if seconds is None else f'{seconds / 60:.1f}'}"

    parts += [
        "## Cost",
        "Tokens per second in training (relative to full attention in brackets):",
        table(lambda group: relative(group, "tokens_per_second", 1), methods),
        "Peak memory, MiB, of the whole process on the CPU, of the device's allocator on a GPU (relative to full attention):",
        table(lambda group: relative(group, "peak_memory_bytes", 2**20), methods),
        "Steps, and minutes of wall time for the whole run with validation and test, where known:",
        table(duration, methods),
    ]
    return "\n\n".join(parts) + "\n"


def plot_layer_densities(path: Path, runs: Sequence[Run]) -> bool:
    """Draws the density of each layer per task, as Figure 5 of the paper: means, and deviations over heads and seeds.

    The paper's bars are deviations over the test set, which ours are not.

    Returns:
        Whether there was anything to draw.
    """
    methods, tasks, cells = _groups([run for run in runs if run["attention"] in SPARSE])
    if not tasks:
        return False
    figure = Figure(figsize=(1.2 + 2.1 * len(tasks), 3.4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0], tasks, strict=True):
        here = [method for method in methods if (method, task) in cells]
        for number, method in enumerate(here):
            heads = np.array([run["results"]["density"]["tested"] for run in cells[method, task]])  # [seeds, layers, heads]
            places = np.arange(heads.shape[1]) + (number - (len(here) - 1) / 2) * 0.8 / len(here)
            flat = 100 * heads.swapaxes(0, 1).reshape(heads.shape[1], -1)
            colour = COLOURS[methods.index(method) % len(COLOURS)]
            axes.bar(places, flat.mean(1), 0.8 / len(here), yerr=flat.std(1), color=colour, capsize=2, label=method)
        axes.set_xticks(range(heads.shape[1]), [f"L{layer + 1}" for layer in range(heads.shape[1])])
        axes.set_title(task)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("density, per cent")
    figure.axes[0].set_ylim(bottom=0)
    handles = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), frameon=False, loc="outside upper center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=150)
    return True
