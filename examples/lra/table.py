"""Runs tasks x methods x seeds of the Long Range Arena with one budget, and writes the tables of the paper from them.

Out: a folder with a run for each, ``report.md``, ``cells.csv`` (a row for each method and task), ``runs.csv`` and ``density.png``::

    python -m examples.lra table --tasks listops --methods sbm full linear nystromformer --seeds 0 1 2 --output runs/table1
    python -m examples.lra table --preset paper --methods sbm sbm:density-weight=0.1 full --minutes 60 --output runs/hour
    python -m examples.lra table --preset modern-laptop --pretrain --methods sbm full --output runs/modern

Call it again to go on: finished runs stay, stopped ones resume, failed ones are tried again. The budget is equal steps (those of the
preset, or ``--steps``), or equal time (``--minutes``), from which the trainer plans the steps.
"""

import argparse
import dataclasses
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from examples.common.command import require
from examples.common.pictures import save_figure
from examples.common.runs import hold, read_record, write_text
from examples.common.tables import Row, groups, markdown, write_csv
from examples.lra import train as trainer
from examples.lra.data.tasks import TASKS
from examples.lra.report import RESULTS
from examples.lra.settings import METHODS, PRESETS, SETTINGS, SOURCES, Plan, flags, method_words, parse, resolve
from sbm_pyg.analysis import plots

RUNS, PRETRAINING = "runs", "pretraining"
# Arguments that each run gets from here.
OWN = ("task", "preset", "attention", "seed", "output", "data", "pretrained", "export", "resume")

# Cho et al., 2022, Table 8: accuracies in per cent and their deviations, in the order of TASKS. The methods are named as ours;
# theirs that go by these names are not all the same (baselines.py and docs/lra.md).
PUBLISHED = {
    "full": ((37.22, 0.52), (64.93, 0.46), (79.55, 1.22), (40.38, 0.76), (74.26, 0.57)),
    "linear": ((37.46, 0.57), (64.90, 0.49), (81.10, 0.16), (38.48, 0.57), (74.61, 1.26)),
    "reformer": ((22.92, 0.41), (64.70, 0.12), (77.25, 0.15), (43.65, 0.16), (70.28, 1.45)),
    "performer": ((18.25, 0.12), (65.00, 0.50), (79.01, 1.66), (39.80, 0.46), (70.79, 1.26)),
    "linformer": ((38.44, 0.14), (56.28, 1.06), (78.09, 0.12), (39.53, 0.57), (67.62, 0.65)),
    "nystromformer": ((37.22, 0.51), (65.46, 0.40), (79.35, 0.40), (43.07, 0.42), (71.97, 1.30)),
    "sbm": ((37.45, 0.44), (65.79, 0.27), (80.00, 0.21), (41.31, 0.35), (75.12, 0.49)),
}
PUBLISHED_DENSITY = (20.09, 26.10, 29.46, 20.49, 18.56)  # per cent, of the same runs of sbm


def words_of_runs(args: argparse.Namespace) -> dict[Path, list[str]]:
    """The trainer's arguments for each run, by its folder in that of the table; ``--resume`` for those that were begun.

    The runs of `pretrain` come first.
    """
    once = [name for name in ("steps", "minutes", "threads") if getattr(args, name) is not None]
    words_of_methods = [(f"the settings of {method!r}", method_words(method)[2:], OWN) for method in args.methods]
    for place, words, names in (("the arguments after '--'", args.train_words, (*OWN, *once)), *words_of_methods):
        named = vars(parse(words))
        for name in names:
            require(named.get(name) is None, f"no '{name}' in {place}", named.get(name), "`table` has it: see --help.")
    common = ["--accelerator", args.accelerator, "--preset", args.preset, *args.train_words]
    of_labels = flags({name: getattr(args, name) for name in once})
    of_tokens = flags({"steps": args.pretrain} if args.pretrain else {})
    runs: dict[Path, list[str]] = {}
    pretraining: dict[Path, list[str]] = {}
    for task in args.tasks:
        data = [word for name, folder in args.data if name == task for word in ("--data", str(folder))]
        for seed in args.seeds:
            shared, encoder = ["--task", task, "--seed", str(seed), *data, *common], Path(PRETRAINING, f"{task}-{seed}")
            if args.pretrain is not None:
                pretraining[encoder] = [*shared, *of_tokens]
            begin = [] if args.pretrain is None else ["--pretrained", str(args.output / encoder)]
            for method in args.methods:
                name = f"{task}-{method.replace(':', '+', 1)}-{seed}"
                runs[Path(RUNS, name)] = [*shared, *of_labels, *begin, *method_words(method)]
    runs = pretraining | runs
    for run, words in runs.items():
        folder = args.output / run
        words += ["--output", str(folder), *(["--resume"] if (folder / SETTINGS).exists() else [])]
    return runs


def parse_run(name: Path, words: Sequence[str]) -> argparse.Namespace:
    """Reads the trainer's arguments for a run."""
    return parse(words, is_pretraining=name.parts[0] == PRETRAINING)


def agree(plans: Mapping[Path, Plan]) -> None:
    """Refuses runs that would be averaged, and differ in more than the seed and the steps that a time was turned into."""
    first: dict[str, Path] = {}
    for name, plan in plans.items():
        other = first.setdefault(str(name).rpartition("-")[0], name)
        free = {"seed"} if plan.minutes is None else {"seed", "steps", "warmup"}
        kinds = []
        for one in (plans[other], plan):
            values = {"preset": one.preset, "minutes": one.minutes, "pretrained": one.pretrained is not None}
            values |= dataclasses.asdict(one.settings)
            values["data"] = one.fingerprint if plan.fingerprint and plans[other].fingerprint else ""
            kinds.append(values)
        for setting in [name for name in kinds[0] if name not in free]:  # in the same order every time
            old, new = (kind[setting] for kind in kinds)
            words = (
                f"{name.name} to have {setting.replace('_', '-')} = {old!r} as {other.name}, with which it is averaged"
            )
            require(old == new, words, repr(new), "Give the same arguments, or another --output.")


def train(name: Path, words: Sequence[str]) -> bool:
    """Trains a run, and returns whether it came to its end; a signal to stop ends the program."""
    try:
        trainer.run(parse_run(name, words))
        return True
    except SystemExit as stop:
        if isinstance(stop.code, int) and stop.code > 128:
            print("\nStopped. Go on with the same command.", file=sys.stderr)
            raise
        print(stop.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    return False


def finished(folder: Path) -> list[Row]:
    """Records of all finished runs, in the order of the paper's tables: "name", "task", "method", "seed", "plan", "results"."""
    records = []
    for path in (folder / RUNS).glob(f"*/{RESULTS}"):
        task, _, method_and_seed = path.parent.name.partition("-")
        method, _, seed = method_and_seed.rpartition("-")
        columns = {"name": path.parent.name, "task": task, "method": method.replace("+", ":", 1), "seed": int(seed)}
        records.append({**columns, "plan": Plan.read(path.with_name(SETTINGS)), "results": read_record(path)})

    def place(run: Row) -> tuple[Any, ...]:
        return [*TASKS].index(run["task"]), METHODS.index(_attention(run)), run["method"], run["seed"]

    return sorted(records, key=place)


def _attention(run: Row) -> str:
    return run["method"].partition(":")[0]


def run_rows(runs: Sequence[Row]) -> list[Row]:
    """One flat row for each run; the density of a layer is the mean of its heads on the test set."""
    rows = []
    for run in runs:
        results, test = run["results"], run["results"]["test"]
        row = {name: run[name] for name in ("task", "method", "seed")} | {"steps": run["plan"].settings.steps}
        low, high = test["interval_95"]
        row |= {"test_accuracy": test["accuracy"], "low_95": low, "high_95": high, "majority": test["majority"]}
        row |= {"test_examples": test["examples"], "test_loss": test["loss"], "best_step": results["best"]["step"]}
        names = ("parameters", "tokens_per_second", "peak_memory_bytes", "peak_memory_of", "seconds", "device")
        row |= {name: results[name] for name in names}
        if _attention(run) in SOURCES:
            layers = enumerate(results["density"]["tested"])
            row |= {f"density_layer{layer}": statistics.fmean(heads) for layer, heads in layers}
        rows.append(row)
    return rows


def cell_rows(runs: Sequence[Row]) -> list[Row]:
    """One row for each task and method: means, relative cost, published numbers. Accuracies and densities in per cent."""
    cells: dict[tuple[str, str], Row] = {}
    for task, method, group in groups(run_rows(runs), "task", "method"):
        accuracies = [100 * row["test_accuracy"] for row in group]
        cell = {"task": task, "method": method, "runs": len(group), "accuracy": statistics.fmean(accuracies)}
        cell["accuracy_deviation"] = statistics.stdev(accuracies) if len(group) > 1 else ""
        if method in PUBLISHED:
            cell["published_accuracy"], cell["published_deviation"] = PUBLISHED[method][[*TASKS].index(task)]
        for name in ("tokens_per_second", "peak_memory_bytes", "seconds", "steps"):
            cell[name] = statistics.fmean(row[name] for row in group)
        densities = [name for name in group[0] if name.startswith("density_layer")]
        cell |= {name: 100 * statistics.fmean(row[name] for row in group) for name in densities}
        cells[task, method] = cell
    for (task, _), cell in cells.items():
        for name in ("tokens_per_second", "peak_memory_bytes"):
            full = cells.get((task, "full"))
            cell[f"{name}_relative_to_full"] = cell[name] / full[name] if full else ""
    return list(cells.values())


def budget(plans: Sequence[Plan]) -> str:
    """The budgets and presets of runs, and the settings that all changed."""

    def words(plan: Plan) -> str:
        if plan.minutes is not None:
            return f"{plan.minutes:g} minutes of training and validation, planned in steps"
        return f"{plan.settings.steps:,} steps"

    def changes(plan: Plan) -> set[str]:
        preset = dataclasses.asdict(PRESETS[plan.task][plan.preset].settings)
        free = ("seed", "attention", "steps", "warmup")
        chosen = {name: value for name, value in dataclasses.asdict(plan.settings).items() if name not in free}
        return {" ".join(flags({name: value})) for name, value in chosen.items() if value != preset[name]}

    presets = " or ".join(dict.fromkeys(f"`{plan.preset}`" for plan in plans))
    shared = sorted(set.intersection(*map(changes, plans)))
    return f"Budget: {' or '.join(dict.fromkeys(map(words, plans)))}; preset {', '.join([presets, *shared])}."


def report(runs: Sequence[Row]) -> str:
    cells = {(row["method"], row["task"]): row for row in cell_rows(runs)}
    methods, tasks = list(dict.fromkeys(run["method"] for run in runs)), list(dict.fromkeys(task for _, task in cells))
    places = [[*TASKS].index(task) for task in tasks]
    average = ["mean"] * (len(tasks) > 1)

    def accuracies(title: str, pairs: Sequence[tuple[float, float | str] | None]) -> list[str]:
        scores = [pair for pair in pairs if pair is not None]
        mean = f"{statistics.fmean(pair[0] for pair in scores):.2f}" if len(scores) == len(pairs) else "–"
        texts = ["–" if pair is None else " ± ".join(f"{x:.2f}" for x in pair if x != "") for pair in pairs]
        return [title, *texts, *(mean for _ in average)]

    def scores_of(method: str) -> list[tuple[float, float | str] | None]:
        task_cells = [cells.get((method, task)) for task in tasks]
        return [(cell["accuracy"], cell["accuracy_deviation"]) if cell else None for cell in task_cells]

    def table(cell: Callable[[Row], str], rows: Sequence[str] = methods) -> str:
        lines = {method: [cells.get((method, task)) for task in tasks] for method in rows}
        body = [[method, *(cell(one) if one else "–" for one in line)] for method, line in lines.items()]
        return markdown(["method", *tasks], body)

    def relative(cell: Row, name: str, scale: float = 1) -> str:
        share = cell[f"{name}_relative_to_full"]
        return f"{cell[name] / scale:,.0f}" + (f" ({share:.2f})" if share else "")

    majority = {run["task"]: f"{100 * run['results']['test']['majority']:.2f}" for run in runs}
    rows = [accuracies(method, scores_of(method)) for method in methods]
    rows.append(["majority class", *(majority[task] for task in tasks), *("" for _ in average)])
    bare = [method for method in PUBLISHED if any(_attention(run) == method for run in runs)]
    rows += [accuracies(f"{method}, published", [PUBLISHED[method][place] for place in places]) for method in bare]
    sparse = [method for method in methods if method.partition(":")[0] in SOURCES]
    shares = ", ".join(f"{task} {PUBLISHED_DENSITY[place]:.2f}" for task, place in zip(tasks, places, strict=True))
    parts = [
        "# Long Range Arena",
        f"{len(runs)} runs, at most {max(row['runs'] for row in cells.values())} of a kind. {budget([run['plan'] for run in runs])}",
        "## Test accuracy, per cent",
        "Mean ± deviation over seeds, of the checkpoint with the best validation accuracy. Rows marked *published* are Table 8 of "
        "Cho et al., 2022, at the settings of the `paper` preset: only runs with these settings and data compare with them.",
        markdown(["method", *tasks, *average], rows),
        "## Density on the test set, per cent",
        "Layers from the lower to the upper, each the mean of its heads and of the seeds; other methods have no graph. "
        f"Published of sbm, mean of both layers: {shares}.",
        table(lambda row: " / ".join(f"{row[name]:.2f}" for name in row if name.startswith("density")), sparse),
        "## Cost",
        "Tokens per second in training (relative to full attention in brackets):",
        table(lambda row: relative(row, "tokens_per_second")),
        "Peak memory during the run, MiB, of the whole process on the CPU, of the device's allocator on a GPU (relative to full attention):",
        table(lambda row: relative(row, "peak_memory_bytes", 2**20)),
        "Steps, and minutes for the whole run with validation and test, without what a kill lost:",
        table(lambda row: f"{row['steps']:,.0f} in {row['seconds'] / 60:.1f}"),
    ]
    return "\n\n".join(parts) + "\n"


def write_report(folder: Path) -> None:
    """Writes all tables and the plot of a folder."""
    runs = finished(folder)
    require(runs, "'output' to hold finished runs", f"none in {folder}", "Leave out --report to make them.")
    agree({Path(run["name"]): run["plan"] for run in runs})
    text = report(runs)
    write_csv(folder / "cells.csv", cell_rows(runs))
    write_csv(folder / "runs.csv", run_rows(runs))
    heads: dict[str, list[Any]] = {}
    for run in runs:
        if _attention(run) in SOURCES:
            heads.setdefault(f"{run['task']}, {run['method']}", []).append(run["results"]["density"]["tested"])
    if heads:
        densities = {name: torch.tensor(values).transpose(0, 1) for name, values in heads.items()}  # [L, seeds, H]
        figure = Figure(figsize=(2 + 2 * len(densities), 4.2), layout="constrained")
        figure.suptitle("Means over heads and seeds, deviations over seeds", fontsize="medium")
        plots.plot_density(densities, ax=figure.subplots())
        save_figure(folder / "density.png", figure, dpi=150)
        text += "\n![Density of each layer](density.png)\n"
    write_text(folder / "report.md", text)
    print(text)


def run(args: argparse.Namespace) -> None:
    """Makes all runs that are not there yet, then the tables, as the command line says."""
    failed = []
    try:
        if not args.report:
            runs = words_of_runs(args)
            paths = [*args.output.glob(f"{RUNS}/*/{SETTINGS}"), *args.output.glob(f"{PRETRAINING}/*/{SETTINGS}")]
            begun = {path.parent.relative_to(args.output): Plan.read(path) for path in sorted(paths)}
            agree(begun | {name: resolve(parse_run(name, words))[1] for name, words in runs.items()})
            args.output.mkdir(parents=True, exist_ok=True)
            with hold(args.output):
                for number, (name, words) in enumerate(runs.items(), start=1):
                    if (args.output / name / RESULTS).exists():
                        continue
                    print(f"\nRun {number} of {len(runs)}: {name.name}", flush=True)
                    failed += [] if train(name, words) else [name.name]
        if finished(args.output) or not failed:
            write_report(args.output)
    except ValueError as error:
        args.fail(str(error))
    if failed:
        raise SystemExit(f"These runs failed: {', '.join(failed)}. The same command tries them again.")
