"""Checks the peers of a table, then times them in turns, all in one run; adds a row to rows.csv for each peer, size and stage."""

import argparse
import ctypes
import itertools
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from examples.benchmarks import trained
from examples.benchmarks.graphs import BATCHES, EDGE_FEATURES, GRAPH, HEADS
from examples.benchmarks.kernels import BLOCKS, KERNELS, Case
from examples.benchmarks.report import GROWN
from examples.benchmarks.samplers import GROWTH, IN_ALL, LAYERS, LENGTHS, SAMPLERS
from examples.benchmarks.sources import SOURCES
from examples.benchmarks.steps import STEPS
from examples.common.gate import Rejected
from examples.common.tables import Row, Rows, add, read
from sbm_pyg.progress import tqdm

SUITES = {
    "kernels": KERNELS, "blocks": BLOCKS, "samplers": SAMPLERS, "layers": LAYERS,
    "lengths": LENGTHS, "trained": trained.PEERS, "growth": GROWTH | trained.GROWTH,
    "steps": STEPS, "sources": SOURCES, "graph": GRAPH, "graphs": BATCHES, "features": EDGE_FEATURES,
}  # fmt: skip
STAGES: dict[str, tuple[str, ...]] = dict.fromkeys(SUITES, ("forward", "step"))
STAGES |= {
    "samplers": ("sample",),
    "layers": ("step",),
    "growth": ("step",),
    "steps": ("step",),
    "sources": ("choose",),
}
STAGES |= {"trained": ("sample", "attend", "forward", "step")}
ROUNDS, REPEATS = 5, 15  # turns that each peer gets, and repeats in all of them
FOUND = ("error", "sampled", "expected", "edges", "median_ms", "q1_ms", "q3_ms", "ns_per_edge", "MiB")
FIXED = ("sources", "graph", "graphs")  # suites with heads and channels of their own
Times = list[tuple[float, int]]  # seconds and edges of calls


def measure(suite: str, group: str, peers: Sequence[str], case: Case, cap: float) -> Rows:
    """The rows of one table: all peers are checked, then take turns; what takes longer than ``cap`` seconds for a call is not timed."""
    rows, turns = Rows(), list[tuple[Row, Callable[[], int], float, Times]]()
    shared: Row = {"run": f"{os.getpid()}-{time.time():.0f}", "threads": torch.get_num_threads(), "machine": machine()}
    shared |= {"suite": suite, "group": group, "tokens": case.tokens, "density": case.density, "blocks": case.blocks}
    for name in peers:
        peer = SUITES[suite][name]
        labels = shared | {"peer": name, "label": peer.label, "remarks": peer.note, "status": ""}
        stage_rows = [labels | {"stage": stage} | dict.fromkeys(FOUND, "") for stage in STAGES[suite]]
        try:
            work = peer.build(case)
            stage_rows = [row for row in stage_rows if row["stage"] in work.calls]
            facts = {"error": work.check(), **work.facts}
            for row in stage_rows:
                row |= facts
                with peak_memory(row):
                    ((seconds, _),) = _time(work.calls[row["stage"]], 1)
                if seconds > cap:
                    row["status"] = f"over the cap ({cap:g} s): one call took {seconds:.3g} s"
                else:
                    turns.append((row, work.calls[row["stage"]], seconds, []))
        except Exception as failure:  # a peer may fail in any way; its row holds the error
            word = "REJECTED" if isinstance(failure, Rejected) else f"failed: {type(failure).__name__}"
            for row in stage_rows:
                row["status"] = f"{word}: {str(failure).strip()[:120]}".splitlines()[0]
        rows += stage_rows
    for number in range(ROUNDS):
        for _, call, seconds, times in turns[number:] + turns[:number]:
            total = min(max(int(cap / seconds), 1), REPEATS)
            repeats = min(-(-total // ROUNDS), total - len(times))
            if repeats and seconds < cap / 4:
                call()  # the others had the caches
            times += _time(call, repeats)
    for row, _, _, times in turns:
        milliseconds, edges = [1e3 * seconds for seconds, _ in times], statistics.mean(count for _, count in times)
        samples = milliseconds * 2 if len(times) == 1 else milliseconds
        row["q1_ms"], row["median_ms"], row["q3_ms"] = statistics.quantiles(samples, n=4, method="inclusive")
        row |= {"edges": round(edges), "ns_per_edge": 1e6 * row["median_ms"] / max(round(edges), 1)}
    return rows


def _time(call: Callable[[], int], repeats: int) -> Times:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter  # a busy machine takes turns
    times = []
    for _ in range(repeats):
        start = clock()
        edges = call()
        times.append((clock() - start, edges))
    return times


@contextmanager
def peak_memory(row: Row) -> Iterator[None]:
    """Notes the peak memory of this process, in MiB beyond what it held before; NaN where there is no /proc that can be written."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        row["MiB"] = math.nan
        yield
        return

    def memory(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))

    ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = memory("VmRSS")
    yield
    row["MiB"] = memory("VmHWM") - before


def groups(options: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """The tables of a suite: a title, and what all peers do. Those of growth have the title in common, and a size each."""
    suite, width = options.suite, options.channels
    shapes = {"steps": f"H = 1, C = {Case.heads * width}", "features": f"H = {HEADS}, C = {width}"}
    shape = shapes.get(suite, f"H = {Case.heads}, C = {width}")
    if suite == "trained":
        for layer, tokens in itertools.product(options.layers, options.tokens):
            yield f"{layer}, N = {tokens:,}", Case(tokens, 0, 0.0, layer=layer)
        return
    for tokens, percent, blocks in itertools.product(options.tokens, options.densities, options.blocks):
        title = GROWN[suite] if suite in GROWN else f"N = {tokens:,}" + f", density {percent:g} %" * (percent > 0)
        title += f", {IN_ALL:,} tokens in all" * (suite == "lengths")
        density = min(64 / tokens, 0.6) if suite == "growth" else percent / 100
        title += f", {shape}" * (suite not in FIXED) + f", K = {blocks}" * (blocks > 0)
        yield title, Case(tokens, blocks, density, channels=width)


def measure_all(options: argparse.Namespace) -> Rows:
    """The rows of all tables of a suite; tables that are whole in rows.csv are taken from there."""
    path, result = options.output / "rows.csv", Rows()
    options.output.mkdir(parents=True, exist_ok=True)
    for title, case in tqdm([*groups(options)], desc=options.suite, unit="table"):

        def stored_rows(key: tuple[object, ...] = (options.suite, title, case.tokens, torch.get_num_threads())) -> Rows:
            rows = [row for row in read(path) if (row["suite"], row["group"], row["tokens"], row["threads"]) == key]
            return [row for row in rows if row["peer"] in options.peers]

        if {row["peer"] for row in stored_rows()} < {*options.peers}:
            add(path, measure(options.suite, title, options.peers, case, options.seconds))
        result += stored_rows()
    return result


def machine() -> str:
    """The date, the version and the hardware of a measurement."""
    cpu, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+changes"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}: {cpu}, {os.cpu_count()} cores ({torch.get_num_threads()} threads), "
        f"{memory:.0f} GiB, {platform.platform()}; Python {platform.python_version()}, torch {version('torch')}, "
        f"PyG {version('torch-geometric')}, numba {version('numba')}"
    )
