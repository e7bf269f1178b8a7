"""A run that is killed at random moments and resumed each time ends with the bits of a run that nothing happened to.

The run is tiny (one layer on short ListOps, with dropout, accumulation and clipping), saves after every second step and writes down
which examples each step consumed. Compared are all bits of weights, optimiser and schedule, in the last and in the best checkpoint, the
rows of both curves, the test result, and the examples of those steps that were not done again.
"""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from problems import same

from examples.common import runs
from examples.lra import report

ROOT = Path(report.__file__).parents[2]
STEPS, KILLS = 40, 3
RUN = (
    f"--steps {STEPS} --layers 1 --heads 2 --channels 16 --head-channels 8 --ffn-channels 16 --num-blocks 8 --batch-size 8 --accumulate 2 "
    "--validate-every 25 --save-every 2 --log-every 4 --dropout 0.1 --attention-dropout 0.1 --clip-norm 1 --learning-rate 0.01"
)
NOTING = """
import json, os, sys
from examples.lra.__main__ import main
from examples.lra.model import Classifier
notes = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
step = Classifier.training_step
def noting(self, batch, batch_idx):
    note = [os.getpid(), self.global_step, batch_idx % self.settings.accumulate, batch.examples.tolist()]
    os.write(notes, (json.dumps(note) + "\\n").encode())
    return step(self, batch, batch_idx)
Classifier.training_step = noting
main(["train", *sys.argv[2:]])
"""

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def start(folder: Path, data: Path) -> subprocess.Popen[bytes]:
    """Starts a run in its folder, or resumes it if there is one."""
    words = ["--resume"] if (folder / "settings.json").exists() else RUN.split()
    words += ["--output", str(folder), "--data", str(data), "--accelerator", "cpu"]
    command = [sys.executable, "-c", NOTING, str(notes(folder)), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with folder.with_suffix(".txt").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def notes(folder: Path) -> Path:
    return folder.with_suffix(".jsonl")


def noted(folder: Path) -> int:
    """Returns the number of parts of steps that all processes of a run have begun."""
    return notes(folder).read_bytes().count(b"\n") if notes(folder).exists() else 0


def consumed(folder: Path) -> list[tuple[int, int, tuple[int, ...]]]:
    """Returns (step, part, examples) of the steps that count: a process that resumed at a step does it and all later ones anew."""
    kept: list[tuple[int, int, tuple[int, ...]]] = []
    current = None
    for line in notes(folder).read_text().splitlines():
        process, step, part, examples = json.loads(line)
        if process != current:
            current, kept = process, [row for row in kept if row[0] < step]
        kept.append((step, part, tuple(examples)))
    return kept


def test_kills_at_random_moments_change_no_bit(data: Path, tmp_path: Path) -> None:
    whole, killed, moments = tmp_path / "whole", tmp_path / "killed", random.Random(0)
    began = time.monotonic()
    process = start(whole, data)
    while process.poll() is None and not noted(whole):
        time.sleep(0.01)
    starting = time.monotonic() - began
    assert process.wait() == 0, whole.with_suffix(".txt").read_text()
    done = 0
    while True:
        process, before = start(killed, data), noted(killed)
        if done < KILLS:
            if done == 0:  # one before the first step, which comes sooner than in the run that compiled kernels
                end = time.monotonic() + moments.uniform(0, starting)
                while time.monotonic() < end and not noted(killed):
                    time.sleep(0.01)
            else:
                more = moments.randrange(
                    2 * STEPS // (KILLS + 1)
                )  # parts of steps; so there is no end before the last kill
                while process.poll() is None and noted(killed) <= before + more:
                    time.sleep(0.005)
                time.sleep(moments.uniform(0, 0.1))
            process.kill()
        code = process.wait()
        if code == 0:
            break
        assert code == -signal.SIGKILL, killed.with_suffix(".txt").read_text()
        done += 1
        path = killed / "last.ckpt"
        saved = runs.read_checkpoint(path)["global_step"] if path.exists() else 0
        assert (
            not noted(killed) or consumed(killed)[-1][0] + 1 - saved <= 3
        )  # it saves every second step; the one begun counts
    assert done == KILLS

    for name in ("last.ckpt", "best.ckpt"):
        one, other = (runs.read_checkpoint(run / name) for run in (whole, killed))
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "global_step"):
            assert same(one[part], other[part]), (name, part)
    for name in ("train.csv", "val.csv"):
        with (whole / name).open() as first, (killed / name).open() as second:
            curves = [[{**row, "tokens_per_second": ""} for row in csv.DictReader(file)] for file in (first, second)]
        assert curves[0] == curves[1]
    one, other = (json.loads((run / "results.json").read_text())["test"] for run in (whole, killed))
    assert one == other
    expected = consumed(whole)
    assert [row[:2] for row in expected] == [(step, part) for step in range(STEPS) for part in range(2)]
    assert consumed(killed) == expected  # no example lost or repeated
