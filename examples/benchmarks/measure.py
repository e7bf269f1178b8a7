"""The process of each peer, and who is measured when.

In: the options of the command line. Out: rows, one for each peer, size and stage, also as lines of rows.jsonl. Not here:
what peers do (``kernels``, ``samplers``), and what becomes of rows (``report``).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import math
import multiprocessing
import os
import platform
import resource
import signal
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tqdm.auto import tqdm

from examples.benchmarks.kernels import KERNELS, Case, Rejected
from examples.benchmarks.samplers import GROWTH, LAYERS, SAMPLERS

SUITES = {"kernels": KERNELS, "samplers": SAMPLERS, "layers": LAYERS, "growth": GROWTH}
STAGES = {"kernels": ("forward", "step"), "samplers": ("sample",), "layers": ("step",), "growth": ("step",)}
ROUNDS, REPEATS = 5, 15  # turns that each peer gets, and repeats in all of them
SETUP = 300.0  # seconds for compiling and checking a peer
MIB = 2**20

Row = dict[str, Any]

# ------------------------------------------------------------------ inside the process of a peer

WORK: dict[str, Any] = {}


def _begin(suite: str, name: str, case: Case, threads: int, memory: int) -> int:
    os.setsid()  # so that a compiler it starts ends with it
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))  # a peer fails, not the machine
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    WORK["peer"] = SUITES[suite][name], case
    return os.getpid()


def _check() -> tuple[float, dict[str, float]]:
    peer, case = WORK["peer"]
    WORK["work"] = work = peer.build(case)
    return work.check(), work.facts


def _memory(stage: str, limit: float) -> tuple[float, int, int, int]:
    """Seconds, edges, peak of the resident memory above its state before, and peak of the whole process, of a second call.

    The first call settles what stays: compiled code, threads, caches. Where it takes longer than ``limit``, it is the only one,
    and the memory is unknown (0). The peak is the kernel's high-water mark, set back before the call.
    """
    ((seconds, edges),) = _time(stage, 1, warm=False)
    if seconds > limit:
        return seconds, edges, 0, 0
    earlier = _status("VmHWM")
    _trim()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    ((seconds, edges),) = _time(stage, 1, warm=False)
    return seconds, edges, _status("VmHWM") - before, max(_status("VmHWM"), earlier)


def _status(name: str) -> int:
    """Resident memory of this process (``VmRSS``) or its peak (``VmHWM``), in bytes; 0 where there is no /proc."""
    lines = Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def _trim() -> None:
    """Give freed memory back to the system, where the C library knows how."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _time(stage: str, repeats: int, warm: bool) -> list[tuple[float, int]]:
    """Seconds and edges of each repeat; ``warm`` makes one call before that is not counted."""
    found = []
    for number in range(-warm, repeats):
        start = time.perf_counter()
        edges = WORK["work"].calls[stage]()
        if number >= 0:
            found.append((time.perf_counter() - start, edges))
    if _status("VmRSS") > 2**31:
        _trim()  # the others need it while they have their turn
    return found


# ------------------------------------------------------------------ the process that measures


class Failed(Exception):
    """A peer that could not be measured; the message is for the table."""


class Worker:
    """A process with one peer in it, of so many threads, whose data may take so many bytes."""

    def __init__(self, suite: str, name: str, case: Case, threads: int, memory: int) -> None:
        environment = SUITES[suite][name].environment  # malloc reads its variables only at a start
        context: Any = multiprocessing.get_context("spawn" if environment else "forkserver")
        if not environment:
            context.set_forkserver_preload(["torch", "torch_geometric", "sbm_pyg"])
        self.pool, self.alive = ProcessPoolExecutor(1, context), True
        with patch.dict(os.environ, environment):
            self.process = self.ask(SETUP, _begin, suite, name, case, threads, memory)

    def ask(self, cap: float, what: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, waited for ``cap`` seconds. :class:`Failed` where there is none, or where it says why not."""
        if not self.alive:
            raise Failed("stopped with another stage")
        try:
            return self.pool.submit(what, *arguments).result(cap)
        except TimeoutError:
            self.stop()
            raise Failed(f"over the cap ({cap:.0f} s)") from None
        except Rejected as error:
            raise Failed(f"REJECTED: {error}") from None
        except BrokenExecutor:
            raise Failed("died") from None
        except Exception as error:  # a peer may fail in any way it likes; its row says how
            text = f"failed: {type(error).__name__}: {str(error).strip()[:120]}"
            full = isinstance(error, MemoryError) or "not enough memory" in text or "Cannot allocate" in text
            raise Failed("out of memory" if full else text.splitlines()[0]) from None

    def stop(self) -> None:
        """End the process, with what it started."""
        with suppress(ProcessLookupError):
            if self.alive:
                os.killpg(self.process, signal.SIGKILL)
        self.alive = False
        self.pool.shutdown(wait=True, cancel_futures=True)


def measure(suite: str, group: str, entries: list[tuple[str, Case]], cap: float, facts: Row) -> list[Row]:
    """The rows of one table: all peers are checked, then take turns, each measurement within ``cap`` seconds."""
    rows, workers = list[Row](), list[Worker]()
    turns: list[tuple[Worker, Row, float, list[tuple[float, int]]]] = []
    memory = int(0.8 * 2**30 * facts["memory_gib"])
    try:
        for name, case in entries:
            mine = [_row(suite, group, name, case, stage, facts) for stage in STAGES[suite]]
            rows += mine
            worker = Worker(suite, name, case, facts["threads"], memory)
            workers.append(worker)
            try:
                error, known = worker.ask(SETUP, _check)
                for row in mine:
                    row.update(
                        error=error,
                        expected_density=known.get("expected_density"),
                        sampled_density=known.get("density"),
                    )
                    seconds, row["edges"], peak, whole = worker.ask(2 * cap + 5, _memory, row["stage"], cap)
                    if seconds > cap:
                        row["status"] = f"over the cap ({cap:g} s): one call took {seconds:.3g} s"
                        continue
                    row.update(peak_mib=peak / MIB, bytes_per_edge=peak / max(row["edges"], 1), process_mib=whole / MIB)
                    turns.append((worker, row, seconds, []))
            except Failed as failure:
                for row in mine:
                    row["status"] = row["status"] or str(failure)
        for number in range(ROUNDS):
            for worker, row, seconds, found in turns[number:] + turns[:number]:
                total = min(max(int(cap / seconds), 1), REPEATS)
                repeats = min(math.ceil(total / ROUNDS), total - len(found))
                if repeats > 0 and not row["status"]:
                    try:
                        found += worker.ask(3 * cap + 5, _time, row["stage"], repeats, seconds < cap / 4)
                    except Failed as failure:
                        row["status"] = str(failure)
    finally:
        for worker in workers:
            worker.stop()
    for _, row, _, found in turns:
        if found:  # a measurement that was stopped keeps the repeats that it has
            times, edges = [1e3 * seconds for seconds, _ in found], statistics.mean(count for _, count in found)
            low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
            row.update(q1_ms=low, median_ms=middle, q3_ms=high, repeats=len(times), edges=round(edges))
            row.update(ns_per_edge=1e6 * middle / max(edges, 1), edges_per_s=1e3 * edges / middle)
    return rows


def _row(suite: str, group: str, name: str, case: Case, stage: str, facts: Row) -> Row:
    peer = SUITES[suite][name]
    label = f"{peer.label}, K = {case.blocks}" if suite == "layers" and case.blocks else peer.label
    row = {
        "suite": suite,
        "group": group,
        "peer": name,
        "label": label,
        "ours": peer.ours,
        "note": peer.note,
        "stage": stage,
        "status": "",
    }
    return {
        **row,
        **asdict(case),
        "median_ms": None,
        "edges": None,
        **facts,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def groups(options: argparse.Namespace) -> Iterator[tuple[str, list[tuple[str, Case]]]]:
    """The tables of a suite: a title, and peers with their sizes that run side by side."""
    suite, peers = options.command, options.peers
    for tokens, percent in itertools.product(sorted(options.tokens), sorted(options.densities)):
        density, what = (
            (min(64 / tokens, 0.6), "64 edges per query")
            if suite == "growth"
            else (percent / 100, f"density {percent:g} %")
        )
        cases = {blocks: Case(tokens, blocks, density, options.seed) for blocks in (0, *options.blocks)}
        title = f"N = {tokens:,}, {what}, H = {cases[0].heads}, C = {cases[0].channels}"
        if suite in ("samplers", "growth"):
            yield from (
                (f"{title}, K = {blocks}", [(name, cases[blocks]) for name in peers]) for blocks in options.blocks
            )
        elif suite == "kernels":
            yield title, [(name, cases[0]) for name in peers]
        else:
            yield (
                title,
                [(name, cases[blocks]) for name in peers for blocks in ([0] if name == "dense" else options.blocks)],
            )


def measure_all(options: argparse.Namespace) -> list[Row]:
    """The rows of all tables of a suite; tables that are whole in rows.jsonl are taken from there."""
    options.output.mkdir(parents=True, exist_ok=True)
    file, facts, result = options.output / "rows.jsonl", machine(), []
    old = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for title, entries in tqdm([*dict(groups(options)).items()], desc=options.command, unit="table"):
        wanted = {(options.command, title, name, case.blocks, case.seed, facts["threads"]) for name, case in entries}
        keys = [tuple(row[key] for key in ("suite", "group", "peer", "blocks", "seed", "threads")) for row in old]
        same = [row for row, key in zip(old, keys, strict=True) if key in wanted]
        if not wanted.issubset(keys):
            same = measure(options.command, title, entries, options.seconds, facts)
            with file.open("a") as lines:
                lines.writelines(json.dumps(row) + "\n" for row in same)
        result += same
    return result


def machine() -> Row:
    """What a number means nothing without."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+changes"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts: Row = {
        "run": f"{os.getpid()}-{int(time.time())}",
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    facts |= {"commit": commit, "memory_gib": pages / 2**30, "system": platform.platform()}
    return {
        **facts,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "torch-geometric", "numba")},
    }
