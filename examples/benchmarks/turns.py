"""Measurements in turns, each in a process of its own, whose memory nothing else has used."""

import math
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from examples.common.tables import Row, Rows, write_csv
from sbm_pyg.progress import tqdm


def memory(field: str) -> float:
    """MiB of this process by /proc, "VmHWM" at its peak or "VmRSS" now; NaN where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return math.nan
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def measure_turns(turn: Callable[..., Row], turns: Sequence[Row], names: Sequence[str], csv: Path) -> Rows:
    """The rows of turns, which ``csv`` gets too: each with its numbers, by a function of it, which are NaN where that fails."""
    rows = []
    for turn_options in tqdm(turns, unit="turn"):
        try:
            with ProcessPoolExecutor(1, get_context("spawn"), warnings.simplefilter, ("ignore",)) as pool:
                numbers = pool.submit(turn, **turn_options).result()
        except Exception as error:  # of the process, too, if it was killed
            print(f"{turn_options} failed: {error!r}", file=sys.stderr)
            numbers = dict.fromkeys(names, math.nan)
        rows.append(turn_options | numbers)
        write_csv(csv, rows)
    return rows


def medians(rows: Rows, names: Sequence[str]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in names}
