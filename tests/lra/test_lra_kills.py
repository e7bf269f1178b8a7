"""Breaks training runs on purpose, resumes them, and compares what they end with to a run that nothing happened to.

In: the number of kills. Out: a table, and exit code 1 if anything differs. Not here: what makes runs survive
(``lra_checkpoints.py``)::

    python examples/fault_trials.py --kills 25

The run is tiny (one layer on short ListOps, with dropout, accumulation and clipping), saves after every second step and
writes down which examples each step consumed. Compared are all bits of weights, optimiser and schedule, in the last and in
the best checkpoint, the rows of both curves, the test result, and the examples of those steps that were not done again.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lra_files import path_argument


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Breaks training runs on purpose and resumes them.")
    parser.add_argument("--kills", type=int, default=25, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of every run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of moments and positions (default: %(default)s)")
    parser.add_argument("--only", choices=("kills", "signals", "disk", "bits"), help="one kind of trial")
    parser.add_argument(
        "--folder", type=path_argument, help="of all runs, new or empty, to be looked at afterwards (default: one that is removed)"
    )
    parser.add_argument("--inside", type=path_argument, help=argparse.SUPPRESS)  # the folder of a bench, in a name space of its own
    return parser.parse_args(arguments)


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import lra_checkpoints as checkpoints
import lra_listops
import lra_report as report
import torch
from lra_folders import RESULTS, SETTINGS

import lra

DATA = lra_listops.Parameters(train=90, val=20, test=20, max_depth=2, max_args=12, min_length=8, max_length=24, operator_probability=1.0)
RUN = {
    "layers": 1, "heads": 2, "channels": 16, "head-channels": 8, "ffn-channels": 16, "num-blocks": 8, "batch-size": 8,
    "accumulate": 2, "validate-every": 25, "save-every": 2, "log-every": 4, "dropout": 0.1, "attention-dropout": 0.1,
    "clip-norm": 1.0, "learning-rate": 0.01, "accelerator": "cpu", "threads": 1,
}  # fmt: skip
CONSUMED = "consumed.jsonl"


def train(arguments: list[str], notes: Path, limit_after: int | None = None) -> None:
    """Runs the trainer in this process, and notes (process, step, part, examples) of every training step.

    Args:
        arguments: Of ``lra.py``.
        notes: A folder; the output goes there too.
        limit_after: From this step on, no file may have more than 50,000 bytes.
    """
    with (notes / "output.txt").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    handle = os.open(notes / CONSUMED, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    step = lra.Classifier.training_step

    def noting(self: lra.Classifier, batch: Any, batch_idx: int) -> Any:
        if limit_after is not None and self.global_step >= limit_after:
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        part = batch_idx % self.settings.accumulate
        os.write(handle, (json.dumps([os.getpid(), self.global_step, part, batch.examples.tolist()]) + "\n").encode())
        return step(self, batch, batch_idx)

    lra.Classifier.training_step = noting  # type: ignore[method-assign]
    lra.main(arguments)


def consumed(notes: Path) -> list[tuple[int, int, tuple[int, ...]]]:
    """Returns (step, part, examples) of the steps that count: a process that resumed at a step does it and all later ones anew."""
    kept: list[tuple[int, int, tuple[int, ...]]] = []
    current = None
    path = notes / CONSUMED
    for line in path.read_text().splitlines() if path.exists() else []:
        process, step, part, examples = json.loads(line)
        if process != current:
            current = process
            kept = [row for row in kept if row[0] < step]
        kept.append((step, part, tuple(examples)))
    return kept


@dataclasses.dataclass
class Bench:
    """A place for trials: data, a run that went through, and processes that have imported everything before they start.

    Args:
        folder: New or empty.
        steps: Of every run.
        random: Of moments and positions.
    """

    folder: Path
    steps: int
    random: random.Random

    def __post_init__(self) -> None:
        folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ |= {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
        os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"  # what the killed have left to it
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["fault_trials"])
        lra_listops.generate(self.folder / "data", DATA, seed=1, progress=False)

    def undisturbed(self) -> None:
        """Trains without any fault, and measures how long start and training take."""
        began = time.monotonic()
        process = self.start("whole")
        self.wait_for("whole", 0, process)
        self.starting = time.monotonic() - began
        self.end(process)
        self.training = time.monotonic() - began - self.starting

    def start(self, name: str, *options: str, limit_after: int | None = None) -> BaseProcess:
        """Starts a run in its folder, or resumes it if there is one."""
        folder = self.folder / name
        notes = self.folder / (name + "-notes")
        notes.mkdir(exist_ok=True)
        given = ["--output", str(folder), "--data", str(self.folder / "data"), "--accelerator", "cpu", "--threads", "1"]
        if not (folder / SETTINGS).exists():
            given += [word for option, value in RUN.items() for word in (f"--{option}", str(value))] + ["--steps", str(self.steps)]
        elif not options:
            given += ["--resume"]
        process = self.context.Process(target=train, args=([*given, *options], notes, limit_after))
        process.start()
        return process

    def end(self, process: BaseProcess, code: int = 0) -> None:
        """Waits for the end of a process, and for the code that it should end with."""
        process.join()
        if process.exitcode != code:
            raise AssertionError(f"exit code {process.exitcode} instead of {code}")

    def wait_for(self, name: str, count: int, process: BaseProcess) -> None:
        """Waits until the run has noted more than so many steps, or has ended."""
        path = self.folder / (name + "-notes") / CONSUMED
        while process.is_alive() and (not path.exists() or path.read_bytes().count(b"\n") <= count):
            time.sleep(0.005)

    def noted(self, name: str) -> int:
        """Returns the number of steps that all processes of a run have noted."""
        path = self.folder / (name + "-notes") / CONSUMED
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def said(self, name: str) -> str:
        """Returns what all processes of a run have printed."""
        return (self.folder / (name + "-notes") / "output.txt").read_text()

    def differences(self, name: str) -> list[str]:
        """Compares a run with the undisturbed one, bit by bit."""
        found = []
        runs = [self.folder / "whole", self.folder / name]
        for file in (checkpoints.LAST, checkpoints.BEST):
            one, other = (checkpoints.read_checkpoint(run / file) for run in runs)
            parts = ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "global_step")
            found += [f"{part} of {file}" for part in parts if not same(one[part], other[part])]
        for file in ("train.csv", "val.csv"):
            curves = [[{**row, "tokens_per_second": ""} for row in report.read_rows(run / file)] for run in runs]
            found += [file] if curves[0] != curves[1] else []
        one, other = (json.loads((run / RESULTS).read_text())["test"] for run in runs)
        found += ["test result"] if one != other else []
        rows, expected = consumed(self.folder / (name + "-notes")), consumed(self.folder / "whole-notes")
        if [row[:2] for row in expected] != [(step, part) for step in range(self.steps) for part in range(2)]:
            found.append("steps of the undisturbed run")
        lost, repeated = len(set(expected) - set(rows)), len(rows) - len(set(rows))
        if rows != expected or lost or repeated:
            found.append(f"examples of steps ({lost} lost, {repeated} repeated)")
        return found


def same(one: Any, other: Any) -> bool:
    """Says whether two nests of dictionaries, lists, tensors and numbers are equal in every bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return one == other


def kill_often(bench: Bench, kills: int) -> str:
    """Kills runs (SIGKILL) at random moments, one in five while they start, and resumes them each time."""
    done = runs = writing = starting = renaming = 0
    again: list[int] = []
    while done < kills:
        name, noted = f"killed-{runs}", 0
        runs += 1
        process = bench.start(name)
        while True:
            begin = bench.noted(name)
            early = done < kills and bench.random.random() < 0.2
            if done < kills:
                if not early:
                    began = time.monotonic()
                    bench.wait_for(name, begin, process)
                    bench.starting = time.monotonic() - began  # the first start of all takes longer
                time.sleep(bench.random.uniform(0, bench.starting if early else 2 * bench.training / min(kills, 12)))
                if process.is_alive():
                    process.kill()
            process.join()
            if process.exitcode == 0:
                break
            if process.exitcode != -signal.SIGKILL:
                raise AssertionError(f"exit code {process.exitcode}: {bench.said(name)[-600:]}")
            done += 1
            folder = bench.folder / name
            writing += any(folder.glob("*.partial"))
            renaming += (folder / checkpoints.PREVIOUS).exists() and not (folder / checkpoints.LAST).exists()
            starting += bench.noted(name) == begin
            kept = consumed(bench.folder / (name + "-notes"))
            path = checkpoints.newest(folder)
            noted = checkpoints.read_checkpoint(path)["global_step"] if path else 0
            again.append(kept[-1][0] + 1 - noted if kept else 0)
            process = bench.start(name)
        check(bench.differences(name))
    return (
        f"{done} kills in {runs} runs of {bench.steps} steps ({starting} before a first step, {writing} while a file was being "
        f"written, {renaming} between two renames); at most {max(again)} steps done again, {sum(again) / len(again):.1f} on average; "
        "no example lost or repeated, all bits equal"
    )


def ask_to_stop(bench: Bench, number: int, code: int) -> str:
    """Sends a signal in the middle of training; the run has to save that very step and end with the signal's code."""
    name = f"signal-{number}"
    process = bench.start(name)
    bench.wait_for(name, bench.steps // 3, process)
    time.sleep(bench.random.uniform(0, bench.training / 4))
    assert process.pid is not None
    os.kill(process.pid, number)
    bench.end(process, code)
    last = consumed(bench.folder / (name + "-notes"))[-1][0] + 1
    saved = checkpoints.read_checkpoint(bench.folder / name / checkpoints.LAST)["global_step"]
    if saved != last or "Go on with: " not in bench.said(name):
        raise AssertionError(f"saved step {saved} after {last} steps; {bench.said(name)[-300:]}")
    bench.end(bench.start(name))
    check(bench.differences(name))
    return f"exit code {code}, saved at step {saved}, the last one that was done; resumed, all bits equal"


def fill_disk(bench: Bench, mounted: bool) -> str:
    """Leaves too little room for a checkpoint during a run."""
    name = "small/run" if mounted else "small"
    (bench.folder / "small").mkdir(exist_ok=True)
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(bench.folder / "small")], check=True)
    half = bench.steps // 2
    process = bench.start(name, limit_after=None if mounted else half)
    ballast = bench.folder / "small" / "ballast"
    if mounted:
        bench.wait_for(name, half, process)
        free = shutil.disk_usage(ballast.parent).free
        ballast.write_bytes(bytes(max(0, free - 50_000)))
    bench.end(process, 1)
    said, folder = bench.said(name), bench.folder / name
    words = [line for line in said.splitlines() if line.startswith("Expected 'output' to have room")]
    if len(words) != 1 or "Traceback" in said or str(folder) not in words[0] or " bytes " not in words[0]:
        raise AssertionError(said[-900:])
    if left := [path.name for path in folder.iterdir() if path.suffix == ".partial"]:
        raise AssertionError(f"left {left}")
    path = checkpoints.newest(folder)
    assert path is not None
    saved = checkpoints.read_checkpoint(path)["global_step"]
    ballast.unlink(missing_ok=True)
    bench.end(bench.start(name))
    check(bench.differences(name))
    how = "a file system of 16 MB, filled during the run" if mounted else "a limit on the size of files (RLIMIT_FSIZE)"
    return f"{how}: exit code 1, one message, checkpoint of step {saved} whole, no partial file; resumed with room, all bits equal"


def fill_small_disk(bench: Bench) -> str:
    """Runs ``fill_disk`` in a name space of its own, where a small file system may be mounted; else with a limit on files."""
    program = [sys.executable, __file__, "--inside", str(bench.folder), "--steps", str(bench.steps)]
    able = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*able, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode:
        return fill_disk(bench, mounted=False)
    done = subprocess.run([*able, *program], capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stderr[-900:])
    return done.stdout.strip().splitlines()[-1]


def flip_bits(bench: Bench, flips: int = 200) -> str:
    """Flips one bit at a time in a checkpoint, then goes on from the previous one."""
    name = "flipped"
    process = bench.start(name)
    bench.wait_for(name, bench.steps, process)
    os.kill(process.pid or 0, signal.SIGTERM)
    bench.end(process, 128 + signal.SIGTERM)
    path = bench.folder / name / checkpoints.LAST
    whole = path.read_bytes()
    for turn in range(flips):
        damaged = bytearray(whole)
        place = [0, len(whole) - 1, len(whole) - checkpoints.SEAL][turn] if turn < 3 else bench.random.randrange(len(whole))
        damaged[place] ^= 1 << bench.random.randrange(8)
        path.write_bytes(damaged if turn < flips - 20 else whole[:place])
        try:
            checkpoints.newest(path.parent)
        except checkpoints.CheckpointError as error:
            if str(path) not in str(error) or "--resume-from previous" not in str(error):
                raise AssertionError(str(error)) from error
        else:
            raise AssertionError(f"byte {place} of {len(whole)} changed unnoticed")
    bench.end(bench.start(name), 2)
    if f"Expected {path} to be as it was written" not in bench.said(name):
        raise AssertionError(bench.said(name)[-600:])
    bench.end(bench.start(name, "--resume-from", "previous"))
    check(bench.differences(name))
    return (
        f"{flips - 20} flipped bits and 20 shorter files, all refused with the name of the file; resumed from the previous, all bits equal"
    )


def check(differences: list[str]) -> None:
    """Raises if there are differences."""
    if differences:
        raise AssertionError("differs in " + ", ".join(differences))


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; ``--help`` explains it."""
    given = parse(arguments)
    if given.inside is not None:
        print(fill_disk(Bench(given.inside, given.steps, random.Random(given.seed)), mounted=True))
        return
    with tempfile.TemporaryDirectory() as spare:
        bench = Bench(given.folder or Path(spare), given.steps, random.Random(given.seed))
        bench.undisturbed()
        trials: list[tuple[str, str, Callable[[], str]]] = [
            ("kills", f"SIGKILL, {given.kills} times", lambda: kill_often(bench, given.kills)),
            ("signals", "SIGINT", lambda: ask_to_stop(bench, signal.SIGINT, 130)),
            ("signals", "SIGTERM", lambda: ask_to_stop(bench, signal.SIGTERM, 143)),
            ("disk", "full disk", lambda: fill_small_disk(bench)),
            ("bits", "damaged checkpoint", lambda: flip_bits(bench)),
        ]
        print("| fault | outcome | what happened |\n|---|---|---|")
        failed = False
        for kind, title, trial in trials:
            if given.only in (None, kind):
                try:
                    print(f"| {title} | passed | {trial()} |", flush=True)
                except AssertionError as error:
                    failed = True
                    print(f"| {title} | FAILED | {error} |", flush=True)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
