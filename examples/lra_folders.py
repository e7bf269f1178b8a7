"""The folder of a run: which one it is, what has to lie in it, and whose it is.

In: paths and settled options. Out: the plan that lies in a folder, a lock on it, or an error that names what is wrong. Not here: the command
line and training (``lra.py``), what checkpoints hold (``lra_checkpoints.py``), curves (``lra_report.py``).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lra_checkpoints as checkpoints
import lra_report as report
from lra_checkpoints import BEST
from lra_files import check_place, check_writable, not_writable
from lra_settings import BASELINES
from lra_tasks import TASKS, Settings

SETTINGS, RESULTS = "settings.json", "results.json"


def read_plan(path: Path) -> dict[str, Any]:
    """Reads the ``settings.json`` of a run: relative places start where it was started, and settings that its program did not have yet are
    at their defaults.

    Raises:
        ValueError: If it is not what the trainer wrote.
    """
    try:
        plan = json.loads(path.read_text())
        plan["settings"] = dataclasses.asdict(Settings(**plan["settings"]))
        if plan["task"] not in TASKS or plan["preset"] not in TASKS[plan["task"]].presets or not isinstance(plan["data"], str | None):
            raise ValueError(f"no task, preset or data of ours: {plan['task']!r}, {plan['preset']!r}, {plan['data']!r}")
    except (ValueError, TypeError, KeyError) as error:
        words = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"Expected {path} to be as it was written (got: {words}). Take it from a backup, or start a new run.") from None
    began = Path(plan.get("directory", ""))  # runs of before do not say; then here
    return plan | {name: str(began / plan[name]) for name in ("data", "prepared") if plan.get(name) is not None}


def check_export(export: Path | None, folder: Path, settings: Settings) -> None:
    """Looks whether the tested model can be saved where it is to be, before anything is trained.

    Raises:
        ValueError: If not.
    """
    if export is None:
        return
    if settings.attention in BASELINES:
        raise ValueError(
            f"Expected no 'export' with {settings.attention!r} attention (got {export}). Baselines are of the examples alone; copy the "
            "folder of the run."
        )
    if folder.resolve().is_relative_to(export.resolve()):
        raise ValueError(f"Expected 'export' to be a folder without that of the run, {folder} (got {export}). Choose another one.")
    check_place("export", export)
    if export.exists() and (not export.is_dir() or any(export.iterdir())):
        raise ValueError(f"Expected 'export' to be a new or empty folder (got {export}, which has content). Choose another one.")
    check_writable("export", export.parent)


def check_files(folder: Path, settings: Settings, start: Path | None) -> None:
    """Looks at what a run needs beside the checkpoint that it goes on from.

    Raises:
        ValueError: If anything is missing or damaged.
    """
    if start is None:
        return
    saved = checkpoints.read_checkpoint(start)
    first = min(settings.log_every, settings.validate_every, settings.steps)  # step of the first row
    report.check_curves(folder, ["val"] + ["train"] * (saved["global_step"] >= first), saved["global_step"])
    if saved["callbacks"]["Checkpoints"]["step"] and not (folder / BEST).is_file():
        raise ValueError(
            f"Expected {folder / BEST} to be there, which is what is tested (got no such file). Take it from a backup, or start a new run."
        )


def next_folder(task: str, preset: str) -> Path:
    """Returns the first folder in runs/ that there is not."""
    names = (Path("runs") / f"{task}-{preset}-{number}" for number in itertools.count(1))
    return next(path for path in names if not path.exists())


def claim(given: argparse.Namespace, folder: Path, plan: Mapping[str, Any]) -> tuple[Path, Any]:
    """Makes the folder of a run if it is new, and takes it for this process; see :func:`lra_checkpoints.hold`.

    Another process may have taken the folder since it was settled. Then a run without --output takes the next one.

    Returns:
        The folder, and the open file that holds the lock.

    Raises:
        ValueError: If the folder was taken.
    """
    options = vars(given)
    resumed = "resume" in options or "resume_from" in options
    while True:
        try:
            return folder, _take(folder, plan, resumed)
        except checkpoints.CheckpointError:
            if "output" in options:
                raise
            folder = next_folder(plan["task"], plan["preset"])


def _take(folder: Path, plan: Mapping[str, Any], resumed: bool) -> Any:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = checkpoints.hold(folder)
    except OSError as error:
        raise not_writable("output", folder, error) from None
    if not resumed and (folder / SETTINGS).exists():
        lock.close()
        raise checkpoints.CheckpointError(
            f"Expected 'output' to be a new or empty folder (got {folder}, in which a run has begun meanwhile). Choose another one, or add "
            "--resume."
        )
    if not resumed:
        try:
            report.write_json(folder / SETTINGS, plan)
        except OSError as error:
            lock.close()
            raise not_writable("output", folder, error) from None
    return lock
