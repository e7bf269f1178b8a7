"""Runs tasks x methods x seeds of the Long Range Arena with one budget, and writes the tables of the paper from them.

In: what to run; data, where a task has no generator. Out: a folder with a run for each, ``report.md``, ``cells.csv`` (a row for
each method and task), ``runs.csv`` (a row for each run) and ``density.png``. Not here: training (``train.py``), FLOPs (``cost.py``)::

    python -m examples.lra table --tasks listops --methods sbm full linear nystromformer --seeds 0 1 2 --output runs/table1
    python -m examples.lra table --preset paper --methods sbm sbm:density-weight=0.1 full --minutes 60 --output runs/hour

Call it again to go on: finished runs stay, stopped ones resume, failed ones are tried again. All that is known of a run is in its
folder, and the folder's name says which run it is. The budget is equal steps (those of the preset, or ``--steps``), or equal time
(``--minutes``), from which the trainer plans the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tqdm.auto import tqdm

from examples.lra import train
from examples.lra.checkpoints import LOCK, hold
from examples.lra.data.files import not_writable, write_text
from examples.lra.data.tasks import TASKS, open_data
from examples.lra.report import RESULTS, markdown, read_curves, write_csv
from examples.lra.settings import METHODS, PRESETS, SETTINGS, Plan, parse, resolve

RUNS, LOGS = "runs", "logs"
DOOR = Path(__file__).resolve().parents[1] / "lra.py"  # of the trainer, which is called from anywhere
SPARSE = ("sbm", "window", "bigbird")  # attention over a graph, which has a density

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

# The trainer's arguments that each run gets from here, and what to do instead.
ONCE = "Give it once, before '--'."
RESERVED = {
    "task": "Name it with --tasks.", "preset": "Give --preset.", "attention": "Name it with --methods.", "seed": "Name it with --seeds.",
    "output": "Give --output, which has a folder for each run.", "data": "Give --data TASK=DIR.", "minutes": ONCE,
    "export": "Runs would overwrite each other's; export one with `train --resume`.",
    "resume": "Give the same command again, which resumes.",
    "resume_from": "Resume that run with `train`, then give the same command again.",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    """One run that is asked for.

    Args:
        task, seed: As the trainer names them.
        method: Kind of attention, and after a colon settings of its own: ``sbm:density-weight=0.1,num-blocks=64``.
        arguments: Of the trainer.
    """

    task: str
    method: str
    seed: int
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, task: str, method: str, seed: int, common: Sequence[str], data: Path | None = None) -> Run:
        """Names a run; ``common`` are the trainer's arguments that all runs share.

        Raises:
            ValueError: If the method is no name with settings of its own.
        """
        attention, _, own = method.partition(":")
        pairs = [pair.partition("=") for pair in own.split(",") if pair]
        if any(not value for _, _, value in pairs):
            raise ValueError(
                f"Expected 'methods' to be names like sbm or sbm:density-weight=0.1 (got {method!r}). See --help."
            )
        words = [word for name, _, value in pairs for word in (f"--{name}", value)]
        _refuse_reserved(words, f"the settings of {method!r}")
        words += [] if data is None else ["--data", str(data)]
        return cls(task, method, seed, ("--task", task, "--attention", attention, "--seed", str(seed), *common, *words))

    @property
    def name(self) -> str:
        """Of its folder; :func:`finished` reads it again."""
        return f"{self.task}-{self.method.replace(':', '+', 1)}-{self.seed}"

    @functools.cached_property
    def plan(self) -> Plan:
        """What the trainer would plan, checked by the trainer, before data are read."""
        return resolve(parse([*self.arguments, "--output", str(Path(tempfile.gettempdir(), f"{self.name}.absent"))]))[1]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the data, which are generated if there are none."""
        return open_data(self.plan)[1]


def _refuse_reserved(words: Sequence[str], where: str, more: Mapping[str, str] | None = None) -> None:
    """Refuses trainer's arguments that are decided here, however they are abbreviated."""
    found = vars(parse(list(words)))
    for name, way_out in (RESERVED | dict(more or {})).items():
        if name in found:
            raise ValueError(f"Expected no '{name.replace('_', '-')}' in {where} (got {found[name]}). {way_out}")


def asked(given: argparse.Namespace) -> list[Run]:
    """All runs that are asked for, checked as far as they can be without their folders.

    Raises:
        ValueError: If anything is wrong with them.
    """
    budget = {name: vars(given)[name] for name in ("threads", "steps", "minutes") if vars(given)[name] is not None}
    _refuse_reserved(
        given.rest, "the arguments after '--'", dict.fromkeys(budget, ONCE) | ({"steps": ONCE} if given.minutes else {})
    )
    common = ["--accelerator", given.accelerator, "--preset", given.preset]
    common += [word for name, value in budget.items() for word in (f"--{name}", str(value))] + given.rest
    folders = dict(given.data)
    runs = [Run.of(t, m, s, common, folders.get(t)) for t in given.tasks for s in given.seeds for m in given.methods]
    if len({run.name for run in runs}) < len(runs):
        raise ValueError("Expected 'tasks', 'methods' and 'seeds' to be distinct (got repeats). Name each once.")
    for run in runs:
        train.check(parse(run.arguments), Path(f"{run.name}.absent"), run.plan)
    return runs


def kind(plan: Plan, fingerprint: str = "") -> dict[str, Any]:
    """All that runs must agree in whose results are averaged: not the seed, and not the steps that a time was turned into."""
    free = {"seed"} if plan.minutes is None else {"seed", "steps", "warmup"}
    settings = {name: value for name, value in dataclasses.asdict(plan.settings).items() if name not in free}
    data = plan.place("data")
    known = {
        "task": plan.task,
        "preset": plan.preset,
        "minutes": plan.minutes,
        **settings,
        "data": data and str(data.resolve()),
    }
    return known | {"fingerprint of the data": fingerprint or plan.fingerprint}


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first setting in which two kinds differ, with both values; where data have their fingerprint, their folder is free."""
    return next(
        ((name.replace("_", "-"), old[name], new[name]) for name in old if name != "data" and old[name] != new[name]),
        None,
    )


def is_finished(folder: Path, run: Run) -> bool:
    """Says whether a run has finished.

    Raises:
        ValueError: If it, or one that it would be averaged with, was started with other settings or data, or if its files are damaged.
    """
    stem = run.name.rpartition("-")[0]
    places = [
        path
        for path in sorted((folder / RUNS).glob(f"{stem}-*/{SETTINGS}"))
        if path.parent.name.rpartition("-")[0] == stem
    ]
    for path in sorted(places, key=lambda path: path.parent.name != run.name):
        name = path.parent.name
        found = difference(kind(Plan.read(path)), kind(run.plan, run.fingerprint))
        if found:
            told = "it was started with" if name == run.name else f"{name} with which it is averaged"
            raise ValueError(
                f"Expected {run.name} to have {found[0]} = {found[1]!r}, as {told} (got {found[2]!r}). Give the same arguments as then, or "
                "another --output."
            )
    results = folder / RUNS / run.name / RESULTS
    return results.exists() and bool(read_json(results))


def read_json(path: Path, names: Sequence[str] = ("test", "best", "density")) -> dict[str, Any]:
    """Reads a JSON file.

    Raises:
        ValueError: If it is not whole or lacks one of the names.
    """
    with contextlib.suppress(ValueError):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.keys() >= set(names):
            return content
    raise ValueError(
        f"Expected {path} to be whole JSON with {', '.join(names)} (got something else). Remove it, and give the same command again, which "
        "makes it again."
    )


def finished(folder: Path) -> list[dict[str, Any]]:
    """Records of all finished runs, in the order of the paper's tables: "task", "method", "attention", "seed", "plan", "results"."""
    found = []
    for path in (folder / RUNS).glob(f"*/{RESULTS}"):
        task, _, rest = path.parent.name.partition("-")
        method, _, seed = rest.rpartition("-")
        plan = Plan.read(path.with_name(SETTINGS))
        results = read_json(path)
        known = {"name": path.parent.name, "task": task, "method": method.replace("+", ":", 1), "seed": int(seed)}
        found.append(
            {
                **known,
                "attention": plan.settings.attention,
                "steps": plan.settings.steps,
                "plan": plan,
                "results": results,
            }
        )
    order = [*TASKS], [*METHODS]
    return sorted(
        found,
        key=lambda run: (order[0].index(run["task"]), order[1].index(run["attention"]), run["method"], run["seed"]),
    )


class Stopped(Exception):
    """The user asked to stop."""


class Runner:
    """Runs the trainer in processes of its own, one after the other; as a context, hands on the signals that ask to stop."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Runner:
        wanted = {
            signal.SIGINT,
            signal.SIGTERM,
            getattr(signal, "SIGHUP", signal.SIGTERM),
        }  # the last: the terminal was closed
        heard = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]  # not below nohup
        self.handlers = {number: signal.signal(number, self.stop) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Asks the running trainer to save and to end."""
        self.number = number
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)

    def train(self, run: Run, bar: Any) -> bool:
        """Starts a run or goes on with it, with its output in a file and its last step in the bar; returns whether it came to its end.

        Raises:
            ValueError: If another process is training it, as one does that a killed call left behind.
            Stopped: If a signal asked to stop.
        """
        folder, log = self.folder / RUNS / run.name, self.folder / LOGS / f"{run.name}.txt"
        refuse_busy(folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(DOOR), "--output", str(folder), *run.arguments]
        command += ["--resume"] if (folder / SETTINGS).exists() else []
        with log.open("ab") as file:
            # In a session of its own, so that a key press reaches it once, through us.
            self.child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        if self.number:
            self.stop(self.number, None)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.child.wait(timeout=2)
                break
            rows = read_curves(folder / "train.csv") if (folder / "train.csv").exists() else []
            if rows:
                bar.set_postfix_str(f"step {rows[-1]['step']:,.0f}, loss {rows[-1]['loss']:.3f}")
        self.child = None
        if self.number:
            raise Stopped
        if code:
            refuse_busy(folder)  # by one that had not taken the folder yet
        return code == 0 and (folder / RESULTS).exists()


def refuse_busy(folder: Path) -> None:
    """Refuses the folder of a run in which a process is training."""
    if (folder / LOCK).exists():
        with hold(folder):
            pass


def layer_densities(run: Mapping[str, Any]) -> list[float]:
    """Density of each layer on the test set, the mean of its heads; empty for attention without a graph."""
    return (
        [statistics.fmean(heads) for heads in run["results"]["density"]["tested"]] if run["attention"] in SPARSE else []
    )


def run_rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One flat row for each run."""
    rows = []
    for run in runs:
        results, test = run["results"], run["results"]["test"]
        low, high = test["interval_95"]
        row = {name: run[name] for name in ("task", "method", "seed", "steps")}
        row |= {"test_accuracy": test["accuracy"], "low_95": low, "high_95": high, "majority": test["majority"]}
        row |= {"test_examples": test["examples"], "test_loss": test["loss"], "best_step": results["best"]["step"]}
        row |= {
            name: results[name]
            for name in ("parameters", "tokens_per_second", "peak_memory_bytes", "peak_memory_of", "seconds", "device")
        }
        rows.append(row | {f"density_layer{layer}": density for layer, density in enumerate(layer_densities(run))})
    return rows


def cell_rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each method and task: means, deviations, relative cost, published numbers. Accuracies and densities in per cent."""
    rows: list[dict[str, Any]] = []
    pairs = dict.fromkeys((run["task"], run["method"]) for run in runs)
    full: dict[str, dict[str, Any]] = {}
    for task, method in sorted(pairs, key=lambda pair: [*TASKS].index(pair[0])):
        group = [run for run in runs if (run["task"], run["method"]) == (task, method)]
        accuracies = [100 * run["results"]["test"]["accuracy"] for run in group]
        row: dict[str, Any] = {
            "task": task,
            "method": method,
            "runs": len(group),
            "accuracy": statistics.fmean(accuracies),
        }
        row["accuracy_deviation"] = statistics.stdev(accuracies) if len(group) > 1 else ""
        if method in PUBLISHED:
            row["published_accuracy"], row["published_deviation"] = PUBLISHED[method][[*TASKS].index(task)]
        for name in ("tokens_per_second", "peak_memory_bytes", "seconds"):
            row[name] = statistics.fmean(run["results"][name] for run in group)
        row["steps"] = statistics.fmean(run["steps"] for run in group)
        layers = [layer_densities(run) for run in group]
        row |= {
            f"density_layer{layer}": 100 * statistics.fmean(column)
            for layer, column in enumerate(zip(*layers, strict=True))
        }
        full |= {task: row} if method == "full" else {}
        rows.append(row)
    for row in rows:
        for name in ("tokens_per_second", "peak_memory_bytes"):
            row[f"{name}_relative_to_full"] = row[name] / full[row["task"]][name] if row["task"] in full else ""
    return rows


def budget(runs: Sequence[Mapping[str, Any]]) -> str:
    """What runs were given, each budget and preset once, and the settings of all that are not those of their presets."""

    def words(plan: Plan) -> str:
        steps = f"{plan.settings.steps:,} steps"
        return (
            steps if plan.minutes is None else f"{plan.minutes:g} minutes of training and validation, planned in steps"
        )

    def own(plan: Plan) -> dict[str, str]:
        preset = dataclasses.asdict(PRESETS[plan.task][plan.preset].settings)
        changed = {name: value for name, value in dataclasses.asdict(plan.settings).items() if value != preset[name]}
        return {
            f"--{name.replace('_', '-')}": str(value)
            for name, value in changed.items()
            if name not in ("seed", "attention", "steps", "warmup")
        }

    plans = [run["plan"] for run in runs]
    presets = " or ".join(dict.fromkeys(f"`{plan.preset}`" for plan in plans))
    shared = [" ".join(pair) for pair in own(plans[0]).items() if all(pair in own(plan).items() for plan in plans)]
    return f"Budget: {' or '.join(dict.fromkeys(map(words, plans)))}; preset {presets}{', ' * bool(shared)}{' '.join(shared)}."


def report(runs: Sequence[Mapping[str, Any]], budget: str) -> str:
    """Writes the tables of all runs as Markdown; ``budget`` says what every run was given."""
    cells = {(row["method"], row["task"]): row for row in cell_rows(runs)}
    methods, tasks = list(dict.fromkeys(run["method"] for run in runs)), list(dict.fromkeys(task for _, task in cells))
    average = ["mean"] if len(tasks) > 1 else []

    def table(cell: Callable[[dict[str, Any]], str], rows: Sequence[str] = methods) -> str:
        found = ([cell(cells[method, task]) if (method, task) in cells else "–" for task in tasks] for method in rows)
        return markdown(["method", *tasks], ([method, *row] for method, row in zip(rows, found, strict=True)))

    def accuracies(title: str, pairs: Sequence[tuple[float, float | str] | None]) -> list[str]:
        texts = [
            "–" if pair is None else f"{pair[0]:.2f}" + (f" ± {pair[1]:.2f}" if pair[1] != "" else "") for pair in pairs
        ]
        known = [pair[0] for pair in pairs if pair is not None]
        return [
            title,
            *texts,
            *([f"{statistics.fmean(known):.2f}" if len(known) == len(tasks) else "–"] if average else []),
        ]

    def own(method: str) -> list[tuple[float, float | str] | None]:
        rows = [cells.get((method, task)) for task in tasks]
        return [(row["accuracy"], row["accuracy_deviation"]) if row else None for row in rows]

    chance = [
        next(f"{100 * run['results']['test']['majority']:.2f}" for run in runs if run["task"] == task) for task in tasks
    ]
    bare = [method for method in PUBLISHED if method in {run["attention"] for run in runs}]
    parts = [
        "# Long Range Arena",
        f"{len(runs)} runs, at most {max(row['runs'] for row in cells.values())} of a kind. {budget}",
        "## Test accuracy, per cent",
        "Mean ± deviation over seeds, of the checkpoint with the best validation accuracy. Rows marked *published* are Table 8 of "
        "Cho et al., 2022, at the settings of the `paper` preset: only runs with these settings and data compare with them.",
        markdown(
            ["method", *tasks, *average],
            [
                *(accuracies(method, own(method)) for method in methods),
                ["majority class", *chance, *["" for _ in average]],
                *(
                    accuracies(f"{method}, published", [PUBLISHED[method][[*TASKS].index(task)] for task in tasks])
                    for method in bare
                ),
            ],
        ),
    ]
    sparse = [method for method in methods if method.partition(":")[0] in SPARSE]
    if sparse:
        parts += [
            "## Density on the test set, per cent",
            "Layers from the lower to the upper, each the mean of its heads and of the seeds; other methods have no graph.",
            table(
                lambda row: " / ".join(f"{value:.2f}" for name, value in row.items() if name.startswith("density")),
                sparse,
            ),
        ]
        if "sbm" in sparse:
            shares = [f"{task} {share:.2f}" for task, share in zip(TASKS, PUBLISHED_DENSITY, strict=True)]
            parts.append(f"Published, mean of both layers: {', '.join(shares)}.")

    def relative(row: dict[str, Any], name: str, scale: float) -> str:
        share = row[f"{name}_relative_to_full"]
        return f"{row[name] / scale:,.0f}" + (f" ({share:.2f})" if share else "")

    parts += [
        "## Cost",
        "Tokens per second in training (relative to full attention in brackets):",
        table(lambda row: relative(row, "tokens_per_second", 1)),
        "Peak memory, MiB, of the whole process on the CPU, of the device's allocator on a GPU (relative to full attention):",
        table(lambda row: relative(row, "peak_memory_bytes", 2**20)),
        "Steps, and minutes for the whole run with validation and test, without what a kill lost:",
        table(lambda row: f"{row['steps']:,.0f} in {row['seconds'] / 60:.1f}"),
    ]
    return "\n\n".join(parts) + "\n"


def plot_densities(path: Path, runs: Sequence[Mapping[str, Any]]) -> bool:
    """Draws the density of each layer per task, as Figure 5 of the paper: means, and deviations over heads and seeds.

    The paper's bars are deviations over the test set, which ours are not. Returns whether there was anything to draw.
    """
    runs = [run for run in runs if run["attention"] in SPARSE]
    tasks = list(dict.fromkeys(run["task"] for run in runs))
    if not tasks:
        return False
    methods = list(dict.fromkeys(run["method"] for run in runs))
    figure = Figure(figsize=(1.2 + 2.1 * len(tasks), 3.4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0], tasks, strict=True):
        for number, method in enumerate(methods):
            heads = [
                run["results"]["density"]["tested"] for run in runs if (run["task"], run["method"]) == (task, method)
            ]
            if not heads:
                continue
            flat = 100 * np.array(heads).swapaxes(0, 1).reshape(len(heads[0]), -1)  # [layers, seeds * heads]
            places = np.arange(len(flat)) + (number - (len(methods) - 1) / 2) * 0.8 / len(methods)
            axes.bar(
                places, flat.mean(1), 0.8 / len(methods), yerr=flat.std(1), color=f"C{number}", capsize=2, label=method
            )
            axes.set_xticks(range(len(flat)), [f"L{layer + 1}" for layer in range(len(flat))])
        axes.set_title(task)
    figure.axes[0].set_ylabel("density, per cent")
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), frameon=False, loc="outside upper center", ncols=4, fontsize="small"
    )
    figure.savefig(path, dpi=150)
    return True


def write_report(folder: Path) -> None:
    """Writes all tables and the plot of a folder.

    Raises:
        ValueError: If no run has finished, if some that would be averaged had different settings, or if nothing can be written.
    """
    runs = finished(folder)
    if not runs:
        raise ValueError(
            f"Expected 'output' to hold finished runs (got none in {folder}). Leave out --report to make them first."
        )
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for run in runs:
        one = first.setdefault((run["task"], run["method"]), run)
        found = difference(kind(one["plan"]), kind(run["plan"]))
        if found:
            raise ValueError(
                f"Expected runs of one task and method to have the same {found[0]}, {found[1]!r} as {one['name']} (got {found[2]!r} in "
                f"{run['name']}). Their mean would be of no model: move one of them out of {folder / RUNS}."
            )
    text = report(runs, budget(runs))
    try:
        write_csv(folder / "cells.csv", cell_rows(runs))
        write_csv(folder / "runs.csv", run_rows(runs))
        if plot_densities(folder / "density.png", runs):
            text += "\n![Density of each layer](density.png)\n"
        write_text(folder / "report.md", text)
    except OSError as error:
        raise not_writable("output", folder, error) from None
    print(text)


def run(given: argparse.Namespace) -> None:
    """Makes all runs that are not there yet, then the tables, as the command line says."""
    failed = False
    try:
        if given.report:
            return write_report(given.output)
        runs = asked(given)
        given.output.mkdir(parents=True, exist_ok=True)
        with hold(given.output), Runner(given.output) as runner, tqdm(runs, desc="Runs", unit="run") as bar:
            for one in runs:  # all mistakes before the first run
                is_finished(given.output, one)
            for one in bar:
                bar.set_description(one.name)
                if not is_finished(given.output, one) and not runner.train(one, bar):
                    failed = True
                    tqdm.write(f"{one.name} failed; see {given.output / LOGS / one.name}.txt", file=sys.stderr)
        if finished(given.output):
            write_report(given.output)
    except ValueError as error:
        given.fail(str(error))
    except Stopped:
        print("\nStopped. Go on with the same command.", file=sys.stderr)
        raise SystemExit(128 + runner.number) from None
    if failed:
        raise SystemExit(1)
