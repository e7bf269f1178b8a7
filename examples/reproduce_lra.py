"""Runs tasks x methods x seeds of the Long Range Arena with one budget, and writes the tables of the paper from them.

In: what to run; data, where a task has no generator. Out: a folder with a run for each, ``report.md``, ``cells.csv`` (a row for
each method and task), ``runs.csv`` (a row for each run) and ``density.png``. Not here: training (``lra.py``), what
a run is and whether runs agree (``lra_runs.py``), tables (``lra_tables.py``), FLOPs (``cost_lra.py``)::

    python examples/reproduce_lra.py run --tasks listops --methods sbm full linear nystromformer --seeds 0 1 2 --output runs/table1
    python examples/reproduce_lra.py run --preset paper --methods sbm sbm:density-weight=0.1 full --minutes 60 --output runs/hour
    python examples/reproduce_lra.py report --output runs/table1

Call it again to go on: finished runs stay, stopped ones resume, failed ones are tried again. The budget is equal steps (those of the preset, or
``--steps``), or equal time (``--minutes``). A learning rate that warms up and decays must know where it ends, so that time
is turned into steps first, for each method by itself: a few steps and validations of several lengths are timed, and as
many are planned as fit. What a run took in the end is in the tables: a graph that grows denser makes later steps slower.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from lra_files import check_place, check_writable, file_above, path_argument
from lra_settings import NAMES
from lra_tasks import TASKS


def _pair(text: str) -> tuple[str, Path]:
    task, equals, folder = text.partition("=")
    if not equals or task not in TASKS:
        raise argparse.ArgumentTypeError(f"expected TASK=DIR with one of {', '.join(TASKS)} (got {text!r})")
    return task, path_argument(folder)


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Reads the command line; what stands after ``--`` is for the trainer."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    words, rest = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(
        description="Runs tasks x methods x seeds of the Long Range Arena and writes the tables.",
        epilog="Settings for all runs follow after --, as `lra.py` takes them: reproduce_lra.py run ... -- --max-length 1024",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="make all runs that are not there yet, then the tables", epilog=parser.epilog)
    runs.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=["listops"], metavar="TASK", help=f"of {', '.join(TASKS)}")
    runs.add_argument(
        "--methods", nargs="+", default=["sbm", "full"], metavar="METHOD", help="attention, with settings of its own after a colon"
    )
    runs.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N", help="(default: 0)")
    runs.add_argument("--preset", choices=NAMES, default="laptop", help="(default: %(default)s)")
    budget = runs.add_mutually_exclusive_group()
    budget.add_argument("--steps", type=int, help="equal steps for all (default: the preset's)")
    budget.add_argument("--minutes", type=float, help="equal time for all: training and validation of one run, without its test")
    runs.add_argument("--data", nargs="+", type=_pair, default=[], metavar="TASK=DIR", help="folders of tasks that are not generated")
    runs.add_argument("--accelerator", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="(default: auto)")
    runs.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: as the preset says)")
    runs.add_argument("--output", type=path_argument, required=True, metavar="DIR", help="folder of all runs")
    again = commands.add_parser("report", help="make the tables again from what is there")
    again.add_argument("--output", type=path_argument, required=True, metavar="DIR", help="folder of all runs")
    clock = commands.add_parser("measure", help="time a few steps of the trainer's arguments that follow after --")
    clock.add_argument("--result", type=path_argument, metavar="FILE", help="where to write the seconds, as JSON (default: print them)")
    given = parser.parse_args(words)
    if rest and given.command == "report":
        parser.error(f"Expected nothing after '--' (got {rest}). Tables are made of runs as they are.")
    if getattr(given, "minutes", None) is not None and not 0 < given.minutes < math.inf:
        parser.error(f"Expected 'minutes' to be positive and finite (got {given.minutes}). Leave it out for a budget in steps.")
    file = file_above(given.output) if "output" in given else None
    if file is not None:
        parser.error(f"Expected 'output' to be a folder (got {given.output}, but {file} is a file). Choose another name.")
    given.fail = parser.error
    return given, rest


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

import lra
import lra_tables as tables
from lra_checkpoints import LOCK, hold
from lra_folders import RESULTS, SETTINGS, read_plan
from lra_report import read_curves, write_json, write_text
from lra_runs import LOGS, RUNS, Index, Plan, alone, budgets, check, difference, refuse_reserved, writing

TIMED = "Its steps are planned from --minutes, on one device: leave it out, or give --steps."
TWICE = "Give it once, before '--'."


def measure(arguments: list[str]) -> dict[str, float]:
    """Times steps and validations of one set of the trainer's arguments, on batches from short to long.

    Returns:
        Seconds per step, and per validation.
    """
    given = lra.parse(arguments)
    task, settings, splits, _ = lra.read(given, lra.resolve(given)[1])
    cuda = given.accelerator in ("auto", "cuda") and torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    data, module = lra.Data(splits, settings), lra.Classifier(task, settings).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)

    def classify(name: str, examples: np.ndarray) -> tuple[Any, Any, Any]:
        batch = module.transfer_batch_to_device(splits[name].__getitems__(examples.tolist()), device, 0)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16-mixed"):
            logits, trace = module.classify(batch, seed=settings.seed)
        return logits, trace, batch.labels

    def step(examples: np.ndarray) -> None:
        optimizer.zero_grad()
        for part in np.split(examples, settings.accumulate):
            logits, trace, labels = classify("train", part)
            loss = cross_entropy(logits.float(), labels)
            module.objective(loss, trace).backward()
        optimizer.step()

    @torch.no_grad()
    def validate(examples: np.ndarray) -> None:
        classify("val", examples)

    def seconds(action: Any, batches: list[np.ndarray], name: str, count: int) -> float:
        """Mean over batches at equal distances in the order of their numbers of tokens."""
        batches = sorted(batches, key=lambda batch: splits[name].lengths[batch].sum())
        places = ((np.arange(count) + 0.5) / count * len(batches)).astype(int)
        for place in places[[count // 2, -1, count // 2]]:  # what only happens once, memory for the longest included
            action(batches[place])
        total = 0.0
        for place in places:
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            action(batches[place])
            if cuda:
                torch.cuda.synchronize()
            total += time.perf_counter() - start
        return total / count

    module.train()
    per_step = seconds(step, [np.asarray(batch) for batch in data.buckets.epoch(0)], "train", 5)
    module.eval()
    batches = [np.asarray(batch) for batch in data.val_dataloader().batch_sampler]  # type: ignore[union-attr]
    return {"seconds_per_step": per_step, "seconds_per_validation": seconds(validate, batches, "val", 3) * len(batches)}


def plan_steps(timing: dict[str, float], minutes: float, validate_every: int) -> int:
    """The number of steps that fit into a time, with their validations: one before them, one after every so many, and one in the end.

    >>> plan_steps({"seconds_per_step": 1.0, "seconds_per_validation": 10.0}, minutes=1, validate_every=20)
    30
    >>> plan_steps({"seconds_per_step": 1.0, "seconds_per_validation": 10.0}, minutes=0.5, validate_every=100)
    10
    """
    step, validation, budget = timing["seconds_per_step"], timing["seconds_per_validation"], 60 * minutes
    rounds, rest = divmod(budget - validation, validate_every * step + validation)
    steps = int(rounds) * validate_every + max(0, int((rest - validation) / step))
    if steps < 2:
        least = 2 * step + (1 + math.ceil(2 / validate_every)) * validation
        raise ValueError(
            f"Expected 'minutes' to be enough for two steps and their validations, {least / 60:.1f} (got {minutes}). Give more, or take a "
            "smaller preset."
        )
    return steps


def refuse_busy(folder: Path) -> None:
    """Refuses the folder of a run in which a process is training; see :func:`lra_checkpoints.hold`."""
    if (folder / LOCK).exists():
        hold(folder).close()


class Stopped(Exception):
    """The user asked to stop."""


class Runner:
    """Runs the trainer in processes of its own, one after the other; as a context, hands on the signals that ask to stop.

    Args:
        index: Of all runs.
    """

    def __init__(self, index: Index) -> None:
        self.index, self.number = index, 0
        self.child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Runner:
        asked = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}  # the last: the terminal was closed
        heard = [wanted for wanted in asked if signal.getsignal(wanted) is not signal.SIG_IGN]  # not below nohup
        self.handlers = {wanted: signal.signal(wanted, self.stop) for wanted in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for wanted, handler in self.handlers.items():
            signal.signal(wanted, handler)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Asks the running trainer to save and to end."""
        self.number = number
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)

    def call(self, command: list[str], log: Path, bar: Any, progress: Path | None = None, total: int = 0) -> int:
        """Runs a command to its end, with its output in a file and its last step in the bar; returns its exit status."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            # In a session of its own, so that a key press reaches it once, through us.
            self.child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            if self.number:
                self.stop(self.number, None)
            while True:
                try:
                    code = self.child.wait(timeout=2)
                    break
                except subprocess.TimeoutExpired:
                    rows = read_curves(progress) if progress is not None and progress.exists() else []
                    if rows:
                        bar.set_postfix_str(f"step {rows[-1]['step']:,.0f} of {total:,}, loss {rows[-1]['loss']:.3f}")
        self.child = None
        if self.number:
            raise Stopped
        return code

    def time(self, plan: Plan, bar: Any) -> dict[str, float]:
        """The timing of a plan's task and method, measured unless it is known."""
        key = plan.kind
        known = self.index.content["timing"]
        if key not in known:
            bar.set_postfix_str("timing a few steps")
            log, result = self.index.folder / LOGS / f"{plan.name}.timing.txt", self.index.folder / f"{plan.name}.timing.json"
            command = [sys.executable, __file__, "measure", "--result", str(result), "--", *plan.arguments]
            if self.call(command, log, bar) or not result.exists():
                raise ValueError(f"Expected {plan.name} to run for a few steps (got an error). Read {log}.")
            known[key] = json.loads(result.read_text())
            result.unlink()
            self.index.save()
        return known[key]

    def train(self, plan: Plan, settings: dict[str, Any], bar: Any, minutes: float | None) -> bool:
        """Starts a run or goes on with it; returns whether it came to its end.

        Raises:
            ValueError: If another process is training it, as one does that a killed call left behind.
        """
        folder = self.index.folder / RUNS / plan.name
        refuse_busy(folder)
        record = self.index.record(plan, minutes)
        spent, record["seconds"] = record["seconds"], None  # nobody counts on when this process is killed
        self.index.save()
        command = [sys.executable, lra.__file__, "--output", str(folder), *plan.arguments]
        if self.index.began(plan):
            command.append("--resume")
        start = time.perf_counter()
        try:
            code = self.call(command, self.index.folder / LOGS / f"{plan.name}.txt", bar, folder / "train.csv", settings["steps"])
        finally:
            if spent is not None:
                record["seconds"] = spent + time.perf_counter() - start
            self.index.save()
        if code:
            refuse_busy(folder)  # by one that had not taken the folder yet
        return code == 0 and (folder / RESULTS).exists()


def plan_runs(given: argparse.Namespace, rest: list[str]) -> list[Plan]:
    """All runs that are asked for, checked as far as they can be without their folder.

    Raises:
        ValueError: If anything is wrong with them.
    """
    folders = dict(given.data)
    decided = {name: TWICE for name in ("steps", "threads") if vars(given)[name] is not None}
    refuse_reserved(rest, "the arguments after '--'", decided | ({"steps": TIMED, "devices": TIMED} if given.minutes else {}))
    common = ["--accelerator", given.accelerator, "--preset", given.preset]
    common += [word for name in ("threads", "steps") if vars(given)[name] is not None for word in (f"--{name}", str(vars(given)[name]))]
    common += rest
    plans = [Plan(t, m, s, common, folders.get(t)) for t in given.tasks for s in given.seeds for m in given.methods]
    if len({plan.name for plan in plans}) < len(plans):
        raise ValueError("Expected 'tasks', 'methods' and 'seeds' to be distinct (got repeats). Name each once.")
    for plan in plans:
        lra.check_start(lra.parse(plan.arguments), plan.settle())
    return plans


def run(given: argparse.Namespace, plans: list[Plan]) -> int:
    """Makes all runs that are not there yet, then the tables; returns the exit status."""
    index = Index(given.output)
    index.save()  # that nothing can be written, before any work
    for plan in plans:  # all mistakes before the first run
        if given.minutes and index.began(plan):
            plan.arguments += ["--steps", str(read_plan(index.folder / RUNS / plan.name / SETTINGS)["settings"]["steps"])]
        check(index, plan, plan.settle(), given.minutes)
    failed = []
    with Runner(index) as runner, tqdm(plans, desc="Runs", unit="run") as bar:
        try:
            for plan in bar:
                bar.set_description(plan.name)
                wanted = plan.settle()
                if given.minutes and not index.began(plan):
                    steps = plan_steps(runner.time(plan, bar), given.minutes, wanted["settings"]["validate_every"])
                    plan.arguments += ["--steps", str(steps)]
                    wanted = plan.settle()
                if check(index, plan, wanted, given.minutes):
                    if plan.name not in index.content["runs"]:  # index.json was lost
                        index.record(plan, given.minutes)
                        index.save()
                    continue
                if not runner.train(plan, wanted["settings"], bar, given.minutes):
                    failed.append(plan.name)
                    tqdm.write(f"{plan.name} failed; see {given.output / LOGS / plan.name}.txt", file=sys.stderr)
        except Stopped:
            print("\nStopped. Go on with the same command.", file=sys.stderr)
            return 128 + runner.number
    if index.finished():
        write_report(index)
    return 1 if failed else 0


def write_report(index: Index) -> None:
    """Writes all tables and the plot of a folder.

    Raises:
        ValueError: If no run has finished, or if some that would be averaged had different settings.
    """
    runs = index.finished()
    if not runs:
        if list((index.folder / RUNS).glob(f"*/{RESULTS}")):
            raise ValueError(
                f"Expected {index.path} to know the finished runs (got none of them). Give the command that made them again, which enters them."
            )
        raise ValueError(f"Expected 'output' to hold finished runs (got none in {index.folder}). Make some with `run` first.")
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for run in runs:
        one = first.setdefault((run["task"], run["method"]), run)
        found = difference(one["kind"], run["kind"])
        if found:
            raise ValueError(
                f"Expected runs of one task and method to have the same {found[0]}, {found[1]!r} as {one['name']} (got {found[2]!r} in "
                f"{run['name']}). Their mean would be of no model: move one of them out of {index.folder / RUNS}."
            )
    text = tables.report(runs, budgets([run["kind"] for run in runs]))
    with writing(index.folder):
        tables.write_csv(index.folder / "cells.csv", tables.cell_rows(runs))
        tables.write_csv(index.folder / "runs.csv", tables.run_rows(runs))
        if tables.plot_layer_densities(index.folder / "density.png", runs):
            text += "\n![Density of each layer](density.png)\n"
        write_text(index.folder / "report.md", text)
    print(text)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; ``--help`` explains it."""
    given, rest = parse(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    try:
        if given.command == "report":
            write_report(Index(given.output))
        elif given.command == "measure":
            if given.result is not None:
                check_place("result", given.result)
                check_writable("result", given.result.parent)
            seconds = measure([*rest, "--output", f"{os.getpid()}.absent"])
            if given.result is None:
                print(json.dumps(seconds))
            else:
                write_json(given.result, seconds)
        else:
            plans = plan_runs(given, rest)
            with alone(given.output):
                code = run(given, plans)
            if code:
                raise SystemExit(code)
    except ValueError as error:
        given.fail(str(error))


if __name__ == "__main__":
    main()
