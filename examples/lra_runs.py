"""The runs of a table: what is asked for, what was started, the folder that holds them, and whether they may be averaged.

In: tasks, methods, seeds and trainer's arguments; a folder of runs. Out: settings of runs before they start, records of those that did, and
an error where two of one name differ. Not here: running and timing them (``reproduce_lra.py``), tables (``lra_tables.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import lra
from lra_files import not_writable
from lra_folders import RESULTS, SETTINGS, read_plan
from lra_report import write_json
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
                results, known = read_results(folder), read_plan(folder / SETTINGS)
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


def check(index: Index, plan: Plan, wanted: dict[str, Any], minutes: float | None) -> bool:
    """Whether a run has finished.

    Raises:
        ValueError: If it, or one that it would be averaged with, was started with other settings or data, or if its files are damaged.
    """
    folders = {path.parent.name: path.parent for path in sorted((index.folder / RUNS).glob(f"{plan.stem}-*/{SETTINGS}"))}
    alike = sorted((name for name in folders if re.fullmatch(r"-\d+", name.removeprefix(plan.stem))), key=lambda name: name != plan.name)
    saved = {name: read_plan(folders[name] / SETTINGS) for name in alike}
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
