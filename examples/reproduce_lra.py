"""Runs tasks x methods x seeds of the Long Range Arena with one budget, and writes the tables of the paper from them.

In: what to run; data, where a task has no generator. Out: a folder with a run for each, ``report.md``, ``cells.csv`` (a row for
each method and task), ``runs.csv`` (a row for each run) and ``density.png``. Not here: training (``lra.py``), tables
(``lra_tables.py``), FLOPs (``cost_lra.py``)::

    python examples/reproduce_lra.py run --tasks listops --methods sbm full linear nystromformer --seeds 0 1 2 --output runs/table1
    python examples/reproduce_lra.py run --preset paper --methods sbm sbm:density-weight=0.1 full --minutes 60 --output runs/hour
    python examples/reproduce_lra.py report --output runs/table1

Call it again to go on: finished runs stay, stopped ones resume, failed ones are tried again. The budget is equal steps (those of the preset, or
``--steps``), or equal time (``--minutes``). A learning rate that warms up and decays must know where it ends, so that time
is turned into steps first, for each method by itself: a few steps and validations of several lengths are timed, and as
many are planned as fit. What a run took in the end is in the tables: a graph that grows denser makes later steps slower.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

import lra
import lra_tables as tables
from lra_checkpoints import LOCK, hold
from lra_folders import RESULTS, SETTINGS, file_above, not_writable, read_plan
from lra_report import read_curves, write_json, write_text
from lra_tasks import TASKS, Settings, data_folder, splits_digest

RUNS, LOGS, INDEX = "runs", "logs", "index.json"
FINGERPRINT = "fingerprint of the data"

# The trainer's arguments that each run gets from here, and what to do instead.
RESERVED = {
    "task": "Name it with --tasks.",
    "preset": "Give --preset.",
    "attention": "Name it with --methods.",
    "seed": "Name it with --seeds.",
    "output": "Give --output, which has a folder for each run.",
    "export": "Runs would overwrite each other's; export one with `lra.py --resume`.",
    "resume": "Give the same command again, which resumes.",
    "resume_from": "Resume that run with `lra.py`, then give the same command again.",
    "data": "Give --data TASK=DIR.",
}
TIMED = "Its steps are planned from --minutes, on one device: leave it out, or give --steps."
TWICE = "Give it once, before '--'."


def refuse_reserved(words: Sequence[str], where: str, more: Mapping[str, str] | None = None) -> None:
    """Refuses trainer's arguments that are decided here, however they are abbreviated.

    Args:
        words: The arguments.
        where: What to call them in the error.
        more: Names that are refused too, and what to do instead.

    Raises:
        ValueError: If one of them is.
    """
    found = vars(lra.parse(list(words)))
    for name, way_out in (RESERVED | dict(more or {})).items():
        if name in found and not (name == "devices" and found[name] == 1):
            raise ValueError(f"Expected no '{name.replace('_', '-')}' in {where} (got {found[name]}). {way_out}")


class Plan:
    """One run to be made: its name, and the trainer's arguments for it.

    Args:
        task: As the trainer names it.
        method: Kind of attention, and after a colon settings of its own: ``sbm:density-weight=0.1,num-blocks=64``.
        seed: Of the run.
        common: The trainer's arguments that all runs share.
        data: Folder of the task's data, or None.
    """

    def __init__(self, task: str, method: str, seed: int, common: Sequence[str], data: Path | None) -> None:
        self.task, self.method, self.seed = task, method, seed
        self.attention, _, own = method.partition(":")
        pairs = [pair.partition("=") for pair in own.split(",") if pair]
        if any(not value for _, _, value in pairs):
            raise ValueError(f"Expected 'methods' to be names like sbm or sbm:density-weight=0.1 (got {method!r}). See --help.")
        self.stem = re.sub(r"[^\w.=-]+", "_", f"{task}-{method}")
        self.name = f"{self.stem}-{seed}"
        self.kind = " ".join([task, method, *common])  # all that its time depends on
        self.arguments = ["--task", task, "--attention", self.attention, "--seed", str(seed), *common]
        own_words = [word for name, _, value in pairs for word in (f"--{name}", value)]
        refuse_reserved(own_words, f"the settings of {method!r}")
        self.arguments += own_words
        if data is not None:
            self.arguments += ["--data", str(data)]

    def settle(self) -> dict[str, Any]:
        """What the trainer would write to ``settings.json``, checked by the trainer."""
        given = lra.parse([*self.arguments, "--output", f"{self.name}.absent"])
        return lra.resolve(given)[1]


class Index:
    """What is known of the runs of a folder: what they are, how long they took, how they ended.

    Args:
        folder: Of all runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / INDEX
        self.content: dict[str, Any] = {"timing": {}, "runs": {}}
        if self.path.exists():
            way_out = "Remove it, and give the same `run` command again, which enters the finished runs; only their times are lost."
            self.content = read_json(self.path, way_out, tuple(self.content))
        planned = re.match(r"Budget: ([\d.e+]+) minutes", self.content.pop("budget", ""))
        for run in self.content["runs"].values():  # of a time when runs did not say it themselves
            run.setdefault("minutes", float(planned[1]) if planned else None)

    def save(self) -> None:
        """Writes it, whole or not at all; see :func:`writing`."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.content)

    def began(self, plan: Plan) -> bool:
        """Whether a run has been started, and so has its settings."""
        return (self.folder / RUNS / plan.name / SETTINGS).exists()

    def record(self, plan: Plan, minutes: float | None) -> dict[str, Any]:
        """The record of a run, made if there is none; of a run that began without one, nobody knows how long it took."""
        seconds = None if self.began(plan) else 0.0
        known = {"task": plan.task, "method": plan.method, "attention": plan.attention, "seed": plan.seed}
        found = self.content["runs"].setdefault(plan.name, {**known, "seconds": seconds, "minutes": minutes})
        if not self.began(plan):
            found["minutes"] = minutes  # those of a start that came to nothing bind nobody
        return found

    def finished(self) -> list[dict[str, Any]]:
        """Records of the finished runs, as ``lra_tables`` takes them."""
        found = []
        for name, run in self.content["runs"].items():
            folder = self.folder / RUNS / name
            if (folder / RESULTS).exists():
                results, known = read_results(folder), read_settings(folder)
                found.append({**run, "name": name, "steps": known["settings"]["steps"], "kind": kind(known, run), "results": results})
        return found


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Names the folder in which nothing can be written.

    Raises:
        ValueError: If so.
    """
    try:
        yield
    except OSError as error:
        raise not_writable("output", folder, error) from None


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keeps the folder of all runs for this process until it ends, however it ends.

    Raises:
        ValueError: If another one has it, or if nothing can be written there.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{INDEX}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise ValueError(
                f"Expected 'output' to be a folder in which no other `run` is at work (got {folder}). Wait for it or stop it, or choose "
                "another one."
            ) from None
    try:
        yield
    finally:
        lock.release()


def read_json(path: Path, way_out: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Reads a JSON file.

    Raises:
        ValueError: If it is not whole or lacks one of the names.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"Expected {path} to be whole JSON (got {error}). {way_out}") from None
    if not isinstance(content, dict) or not content.keys() >= set(names):
        raise ValueError(f"Expected {path} to hold {', '.join(names) or 'an object'} (got something else). {way_out}")
    return content


def read_results(folder: Path) -> dict[str, Any]:
    """What a run found; see :func:`read_json`."""
    way_out = "Remove it, and give the same `run` command again, which tests the best checkpoint again."
    return read_json(folder / RESULTS, way_out, ("test", "best", "density"))


def read_settings(folder: Path) -> dict[str, Any]:
    """What a run was started with, with the defaults of settings that its program did not have yet; see :func:`read_plan`."""
    plan = read_plan(folder / SETTINGS)
    return plan | {"settings": dataclasses.asdict(Settings(**plan["settings"]))}


def kind(known: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """All that runs must agree in whose results are averaged: everything but the seed.

    Args:
        known: Content of ``settings.json``.
        record: Of the run, with its "minutes".
    """
    settings = {name: value for name, value in known["settings"].items() if name != "seed"}
    data = {"data": place(known["data"]), FINGERPRINT: known.get("fingerprint")}
    return {**{name: known[name] for name in ("task", "preset")}, "minutes": record.get("minutes"), **settings, **data}


def place(folder: str | None) -> str | None:
    """A folder by the one name that all its names lead to."""
    return None if folder is None else str(Path(folder).resolve())


def data_fingerprint(wanted: dict[str, Any]) -> str:
    """The fingerprint that the trainer would save of the data of a run, which are generated if there are none."""
    task, settings = TASKS[wanted["task"]], Settings(**wanted["settings"])
    folder, prepared = (None if wanted[name] is None else Path(wanted[name]) for name in ("data", "prepared"))
    return splits_digest(task.load(settings, data_folder(task, wanted["preset"], settings, folder)[0], prepared=prepared))


def difference(old: dict[str, Any], new: dict[str, Any], *, exact: bool = False) -> tuple[str, Any, Any] | None:
    """The first setting in which two kinds differ, with both values.

    The folder of data is none where both have their fingerprint, nor, unless ``exact``, are steps that a time was turned into.
    """
    free = {"data"} if old[FINGERPRINT] and new[FINGERPRINT] else {FINGERPRINT}
    if old["minutes"] is not None and not exact:
        free |= {"steps", "warmup"}
    return next(((name.replace("_", "-"), old[name], new[name]) for name in old if name not in free and old[name] != new[name]), None)


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


def check(index: Index, plan: Plan, wanted: dict[str, Any], minutes: float | None) -> bool:
    """Whether a run has finished.

    Raises:
        ValueError: If it, or one that it would be averaged with, was started with other settings or data, or if its files are damaged.
    """
    folders = {path.parent.name: path.parent for path in sorted((index.folder / RUNS).glob(f"{plan.stem}-*/{SETTINGS}"))}
    alike = sorted((name for name in folders if re.fullmatch(r"-\d+", name.removeprefix(plan.stem))), key=lambda name: name != plan.name)
    saved = {name: read_settings(folders[name]) for name in alike}
    if any("fingerprint" in known for known in saved.values()):
        wanted = wanted | {"fingerprint": data_fingerprint(wanted)}
    for name, known in saved.items():
        record, own = index.content["runs"].get(name, {"minutes": minutes}), name == plan.name
        found = difference(kind(known, record), kind(wanted, {"minutes": minutes}), exact=own)
        if found:
            told = "it was started with" if own else f"{name} with which it is averaged"
            raise ValueError(
                f"Expected {plan.name} to have {found[0]} = {found[1]!r}, as {told} (got {found[2]!r}). Give the same arguments as then, or "
                "another --output."
            )
    return plan.name in saved and (folders[plan.name] / RESULTS).exists() and bool(read_results(folders[plan.name]))


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
        plan.settle()
    return plans


def run(given: argparse.Namespace, plans: list[Plan]) -> int:
    """Makes all runs that are not there yet, then the tables; returns the exit status."""
    index = Index(given.output)
    index.save()  # that nothing can be written, before any work
    for plan in plans:  # all mistakes before the first run
        if given.minutes and index.began(plan):
            plan.arguments += ["--steps", str(read_settings(index.folder / RUNS / plan.name)["settings"]["steps"])]
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


def budgets(kinds: Sequence[dict[str, Any]]) -> str:
    """What runs were given, each budget and preset once, and the settings of all that are not those of their presets."""

    def budget(kind: dict[str, Any]) -> str:
        minutes = kind["minutes"]
        return f"{kind['steps']:,} steps" if minutes is None else f"{minutes:g} minutes of training and validation, planned in steps"

    def own(kind: dict[str, Any]) -> dict[str, str]:
        preset = dataclasses.asdict(TASKS[kind["task"]].presets[kind["preset"]].settings)
        free = {"seed", "attention", "steps", "warmup"}
        return {f"--{name.replace('_', '-')}": str(kind[name]) for name in preset if name not in free and kind[name] != preset[name]}

    presets = " or ".join(dict.fromkeys(f"`{kind['preset']}`" for kind in kinds))
    shared = [" ".join(pair) for pair in own(kinds[0]).items() if all(pair in own(kind).items() for kind in kinds)]
    return f"Budget: {' or '.join(dict.fromkeys(map(budget, kinds)))}; preset {presets}{', ' * bool(shared)}{' '.join(shared)}."


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


def _pair(text: str) -> tuple[str, Path]:
    task, equals, folder = text.partition("=")
    if not equals or task not in TASKS:
        raise argparse.ArgumentTypeError(f"expected TASK=DIR with one of {', '.join(TASKS)} (got {text!r})")
    return task, Path(folder)


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
    runs.add_argument("--preset", choices=lra.PRESETS, default="laptop", help="(default: %(default)s)")
    budget = runs.add_mutually_exclusive_group()
    budget.add_argument("--steps", type=int, help="equal steps for all (default: the preset's)")
    budget.add_argument("--minutes", type=float, help="equal time for all: training and validation of one run, without its test")
    runs.add_argument("--data", nargs="+", type=_pair, default=[], metavar="TASK=DIR", help="folders of tasks that are not generated")
    runs.add_argument("--accelerator", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="(default: auto)")
    runs.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: as the preset says)")
    runs.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of all runs")
    again = commands.add_parser("report", help="make the tables again from what is there")
    again.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of all runs")
    clock = commands.add_parser("measure", help="time a few steps of the trainer's arguments that follow after --")
    clock.add_argument("--result", type=Path, metavar="FILE", help="where to write the seconds, as JSON (default: print them)")
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


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; ``--help`` explains it."""
    given, rest = parse(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    try:
        if given.command == "report":
            write_report(Index(given.output))
        elif given.command == "measure":
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
