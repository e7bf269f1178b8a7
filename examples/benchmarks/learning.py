"""The study of docs/learning.md: which gradient and which block model learn, over seeds, with the raw numbers kept.

In: nothing but the folder of the tables. Out: a tidy table of repeated tokens and one of gradients, and from these and the tables of
ListOps beside them the figures, and the tables of the page as Markdown. A run that the table holds is not made again, and one
that was stopped goes on. Not here: the task and its training (``examples/repeated_tokens.py``), and ListOps (``examples/lra/table.py``).

python -m examples.benchmarks learning run        repeated tokens: 90 runs, half an hour on one core
python -m examples.benchmarks learning gradients  bias and variance of each estimator by enumeration, a second
python -m examples.benchmarks learning report     tables and figures of what is there
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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


def run(given: argparse.Namespace) -> None:
    """Trains what is missing on repeated tokens, seed by seed, so that a study that is stopped has something of everything."""
    from examples import repeated_tokens as task

    path = given.folder / "repeated_tokens.csv"
    done = {(row["run"], row["seed"]) for row in read(path)}
    for seed, name in itertools.product(range(given.seeds), given.only or [name for name in RUNS if name not in HOURS]):
        if (name, seed) not in done:
            checkpoint = given.work / f"{name.replace(', ', '_').replace(' ', '-')}_{seed}.ckpt"
            rows = task.train(checkpoint, replace(task.QUICK, **RUNS[name], seed=seed))
            add(path, [{"run": name, "seed": seed, **row} for row in rows])


def gradients(given: argparse.Namespace) -> None:
    """Makes the table of bias and variance anew."""
    from examples.benchmarks.gradients import gradient_errors

    path = given.folder / "gradients.csv"
    path.unlink(missing_ok=True)
    for p0, sharpness in itertools.product((0.05, 0.25, 0.8), (1.0, 3.0)):
        add(path, gradient_errors(p0, sharpness))


def report(given: argparse.Namespace) -> None:
    """Prints the tables and draws the figures of what is there."""
    from examples.benchmarks import learning_report

    print(learning_report.report(given.folder))
    learning_report.draw(given.folder)


ACTIONS = {"run": run, "gradients": gradients, "report": report}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    about: dict[str, Any] = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m examples.benchmarks learning", **about)
    parser.add_argument("action", choices=ACTIONS, help="what to do")
    words = "runs by name (default: all but those of 256 tokens)"
    parser.add_argument("--only", nargs="+", choices=RUNS, metavar="RUN", help=words)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 (default: %(default)s)")
    folders = {"folder": ("docs/learning", "tables and figures"), "work": ("runs/learning", "checkpoints")}
    for name, (place, what) in folders.items():
        parser.add_argument(f"--{name}", type=Path, default=Path(place), help=f"of {what} (default: {place})")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Does what the command line asks for."""
    given = parse(arguments)
    for folder in (given.folder, given.work):
        folder.mkdir(parents=True, exist_ok=True)
    ACTIONS[given.action](given)
