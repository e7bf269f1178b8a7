"""The study of docs/learning.md: which gradient and which block model learn, over seeds, with the raw numbers kept.

In: nothing but the folder of the tables. Out: one tidy table per study (repeated_tokens.csv, listops.csv, gradients.csv), and
from these and listops_hour*.csv the figures, and the tables of the page as Markdown. What a table holds is not run again, and
a run that was stopped goes on. Not here: the tasks and their training (``examples/repeated_tokens.py``, ``examples/lra/``).

python -m examples.benchmarks learning run        repeated tokens: 90 runs, half an hour on one core
python -m examples.benchmarks learning listops    short ListOps, through the trainer: 100 runs, two hours
python -m examples.benchmarks learning average    those runs tested over eight graphs per example
python -m examples.benchmarks learning gradients  bias and variance of each estimator by enumeration, a minute
python -m examples.benchmarks learning report     tables and figures of what is there
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from examples.benchmarks.tables import add, read

SHORT: dict[str, Any] = {"steps": 1000, "evaluate_every": 50}
LONG: dict[str, Any] = {"position_scale": 1.0}
SORTED: dict[str, Any] = {**LONG, "parameterization": "assortative", "cluster_init": "orthogonal", "temperature": 0.3}
SORTED["tied"] = 1
PAPER: dict[str, Any] = {"tokens": 256, "batch_size": 256, "num_blocks": 128, "learning_rate": 1e-3, "decay": 0}
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
    "local, longer, 64 blocks, 0.1": {**SORTED, "steps": 4000, "num_blocks": 64, "density_weight": 0.1},
    "local, longer, 64 blocks, 0.3": {**SORTED, "steps": 4000, "num_blocks": 64, "density_weight": 0.3},
    "literal, full": {**PAPER, "attention": "full"},
    "literal, local": PAPER,
    "256 tokens, local": {**PAPER, "batch_size": 32, "learning_rate": 3e-3, "decay": 1, "sbm_rate": 4.0},
}
HOURS = ("literal, full", "literal, local", "256 tokens, local")  # one seed each, and only if they are asked for
ASSORTATIVE = "--parameterization assortative --cluster-init orthogonal --temperature 0.3 --tied 1 --num-blocks 32"
PRICES = ("0.03", "0.035", "0.04", "0.05", "0.1", "0.3", "0.5")
LISTOPS = {  # by name, how a run differs from the laptop preset
    "full": "--attention full",
    "itself alone": "--attention window --window 0",
    "local": "",
    **{f"local, {price}": f"--density-weight {price}" for price in PRICES},
    "local, 32 blocks, 0.4": "--num-blocks 32 --density-weight 0.4",
    "mask": "--estimator mask --exploration 0.01",
    "paper": "--estimator paper --exploration 0.01",
    **{name: f"--estimator {name}" for name in ("none", "relaxed", "concrete")},
    "local, mixed, 0.1": "--parameterization mixed --density-weight 0.1",
    **{f"local, assortative, {price}": f"{ASSORTATIVE} --density-weight {price}" for price in ("0.1", "0.2")},
    "full, long": "--attention full --steps 1600",
    **{f"local, long, {price}": f"--steps 1600 --density-weight {price}" for price in ("0.05", "0.3")},
}


def lra(command: str, *words: str) -> None:
    """Calls a program of ``examples/lra`` in a process of its own."""
    subprocess.run([sys.executable, "-m", "examples.lra", command, *words], check=True, stdout=subprocess.DEVNULL)


def stem(name: str, seed: int) -> str:
    """Of a run's files."""
    return f"{name.replace(', ', '_').replace(' ', '-')}_{seed}"


def run(given: argparse.Namespace) -> None:
    """Trains what is missing on repeated tokens, seed by seed, so that a study that is stopped has something of everything."""
    from examples import repeated_tokens as task

    path = given.folder / "repeated_tokens.csv"
    done = {(row["run"], row["seed"]) for row in read(path)}
    for seed, name in itertools.product(range(given.seeds), given.only or [name for name in RUNS if name not in HOURS]):
        if (name, seed) not in done:
            rows = task.train(given.work / f"{stem(name, seed)}.ckpt", replace(task.QUICK, **RUNS[name], seed=seed))
            add(path, [{"run": name, "seed": seed, **row} for row in rows])


def listops(given: argparse.Namespace, graphs: int = 1) -> None:
    """Trains what is missing on short ListOps, or tests it over several graphs per example, through the trainer's command line."""
    path, data = given.folder / "listops.csv", str(given.work / "data")
    lra("prepare", "--generate", "--preset", "laptop", "--test", "10000", "--data", data)
    done = {(row["run"], row["seed"], row["graphs"]) for row in read(path) if row["split"] == "test"}
    for seed, name in itertools.product(range(given.seeds), given.only or LISTOPS):
        work = given.work / f"listops_{stem(name, seed)}"
        if (name, seed, graphs) in done or (graphs > 1 and not (work / "results.json").exists()):
            continue
        if graphs > 1:  # a finished run that is resumed tests again
            work = Path(shutil.copytree(work, work.with_name(f"{work.name}_{graphs}"), dirs_exist_ok=True))
            plan = json.loads((work / "settings.json").read_text())
            plan["settings"]["test_graphs"] = graphs
            (work / "settings.json").write_text(json.dumps(plan))
        words = ["--task", "listops", "--preset", "laptop", "--data", data, "--seed", str(seed), *LISTOPS[name].split()]
        lra("train", *(["--resume"] if (work / "settings.json").exists() else words), "--output", str(work))
        results = json.loads((work / "results.json").read_text())
        known = {"run": name, "seed": seed, "split": "val", "step": 0, "graphs": graphs, "examples": None}
        curve = [known | row | {"tokens_per_second": None} for row in read(work / "val.csv")]
        test = {**curve[-1], "split": "test", **{key: results["test"][key] for key in ("examples", "loss", "accuracy")}}
        densities = np.ndenumerate(np.array(results["density"]["tested"]))
        test |= {f"density_layer{i}_head{j}": density for (i, j), density in densities}
        test["tokens_per_second"] = results["tokens_per_second"]
        add(path, [*(curve if graphs == 1 else []), test])


def gradients(given: argparse.Namespace) -> None:
    """Adds what is missing of bias and variance."""
    from examples.benchmarks.gradients import gradient_errors

    path = given.folder / "gradients.csv"
    done = {(row["p"], row["sharpness"]) for row in read(path)}
    for p0, sharpness in itertools.product((0.05, 0.25, 0.8), (1.0, 3.0)):
        if (p0, sharpness) not in done:
            add(path, gradient_errors(p0, sharpness))


def report(given: argparse.Namespace) -> None:
    """Prints the tables and draws the figures of what is there."""
    from examples.benchmarks import learning_report

    print(learning_report.report(given.folder))
    learning_report.draw(given.folder)


ACTIONS = {
    "run": run,
    "listops": listops,
    "average": lambda given: listops(given, 8),
    "gradients": gradients,
    "report": report,
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    about: dict[str, Any] = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m examples.benchmarks learning", **about)
    parser.add_argument("action", choices=ACTIONS, help="what to do")
    parser.add_argument("--only", nargs="+", metavar="RUN", help="runs by name (default: all but those of 256 tokens)")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 (default: %(default)s)")
    folders = {
        "folder": ("docs/learning", "tables and figures"),
        "work": ("runs/learning", "data, checkpoints and whole runs"),
    }
    for name, (place, what) in folders.items():
        parser.add_argument(f"--{name}", type=Path, default=Path(place), help=f"of {what} (default: {place})")
    given = parser.parse_args(arguments)
    known = [*(RUNS if given.action == "run" else LISTOPS)]
    if unknown := [name for name in given.only or () if name not in known]:
        parser.error(
            f"Expected 'only' to name runs of '{given.action}' (got {unknown}). Choose from: {'; '.join(known)}."
        )
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    """Does what the command line asks for."""
    given = parse(arguments)
    for folder in (given.folder, given.work):
        folder.mkdir(parents=True, exist_ok=True)
    ACTIONS[given.action](given)
