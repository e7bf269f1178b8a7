"""Measurements in turns, each in a process of its own, whose memory nothing else has used."""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.common.tables import Row, Rows, write_csv
from sbm_pyg.info import tqdm


def memory(field: str) -> float:
    """MiB of this process by /proc, "VmHWM" at its peak or "VmRSS" now; NaN where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return math.nan
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def measure_turns(program: str, words: Sequence[str], turns: Sequence[Row], names: Sequence[str], csv: Path) -> Rows:
    """The rows of turns, which ``csv`` gets too: for each, ``python -m program WORDS --only TURN`` prints its numbers.

    Turns and numbers are JSON. Where a process fails, the numbers of these names are NaN.
    """
    rows = []
    for turn in tqdm(turns, unit="turn"):
        command = [sys.executable, "-W", "ignore", "-m", program, *words, "--only", json.dumps(turn)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{turn} failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        numbers = dict.fromkeys(names, math.nan) if done.returncode else json.loads(done.stdout.splitlines()[-1])
        rows.append(turn | numbers)
        write_csv(csv, rows)
    return rows


def medians(rows: Rows, names: Sequence[str]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in names}
