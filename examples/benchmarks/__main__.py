"""Measures sbm_pyg against its peers: attention over a given graph, sampling, whole layers, and growth.

python examples/benchmark.py                                  everything, some minutes per suite
python examples/benchmark.py attention --densities 5          one suite, one density
python examples/benchmark.py --quick                          tiny sizes: does it run?
python examples/benchmark.py --replay rows.jsonl --plots .    tables and plots from earlier rows

Each peer runs in a process of its own and must first show that its results are right: one that is wrong is reported and not timed.
Peers of a table stay alive together and take turns, so that a drift of the machine hits all alike. Nothing runs without a cap: a
process that takes longer is stopped. Peak memory is what a call adds to the resident memory of its process.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

FULL = {"tokens": [4096], "densities": [1.0, 5.0, 10.0, 25.0], "blocks": [128, 16], "channels": 32, "repeats": 15, "seconds": 15.0, "setup_seconds": 300.0, "edges_per_query": 64.0, "growth_tokens": [2**n for n in range(10, 18)]}  # fmt: skip
QUICK = {"tokens": [192], "densities": [10.0], "blocks": [8], "channels": 16, "repeats": 3, "seconds": 2.0, "setup_seconds": 60.0, "edges_per_query": 16.0, "growth_tokens": [128, 256], "no_compile": True}  # fmt: skip
PEERS = {  # by suite, as ``benchmark_worker`` has them, which would bring torch with it
    "attention": ("ours", "ours-ungated", "sdpa", "sdpa-masked", "pyg", "pyg-tuned", "pyg-compiled", "scatter", "csr", "dgl"),
    "sampling": ("bernoulli", "edges", "fastrg", "dense", "hard", "networkx", "pyg", "igraph"),
    "layer": ("sbm", "dense"),
    "growth": ("sampling", "layer", "dense"),
}


def _available() -> float:
    """Memory that processes can still get, in GiB."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 2**20
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with the defaults of the full or the quick run filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help=f"what to measure: {', '.join(PEERS)} (default: all)")
    add("--tokens", type=int, nargs="+", metavar="N", help="queries, and as many keys; each with every density (default: 4096)")
    add("--heads", type=int, default=2, metavar="H", help="attention heads (default: 2)")
    add("--channels", type=int, metavar="C", help="channels per head (default: 32)")
    add("--densities", type=float, nargs="+", metavar="PERCENT", help="mean densities in percent (default: 1 5 10 25)")
    add("--blocks", type=int, nargs="+", metavar="K", help="blocks of the SBM; growth takes the first (default: 128 16)")
    add("--growth-tokens", type=int, nargs="+", metavar="N", help="sizes of the growth suite (default: 2^10 .. 2^17)")
    add("--edges-per-query", type=float, metavar="E", help="expected, in the growth suite (default: 64)")
    add("--threads", type=int, help="threads of every peer (default: as torch chooses)")
    add("--repeats", type=int, metavar="R", help="most timed repeats of a measurement, spread over five turns (default: 15)")
    add("--seconds", type=float, metavar="S", help="cap for the timed repeats of a measurement; slow peers get fewer repeats, and none if one call takes longer (default: 15)")  # fmt: skip
    add("--setup-seconds", type=float, metavar="S", help="cap for compiling and checking a peer (default: 300)")
    add("--memory", type=float, default=0.8 * _available(), metavar="GIB", help="limit for the data of each process, so that a peer fails instead of the machine (default: 80 %% of what is available, here %(default).1f)")  # fmt: skip
    add("--peers", nargs="+", metavar="PEER", help=f"only these peers; {'; '.join(f'{suite}: ' + ' '.join(peers) for suite, peers in PEERS.items())}")  # fmt: skip
    add("--no-compile", action="store_true", default=None, help="leave out peers that torch.compile makes")
    add("--wrong", action="store_true", help="also run a peer that is wrong on purpose, to see that it is rejected")
    add("--seed", type=int, default=0, help="of tensors, masks and models (default: 0)")
    add("--quick", action="store_true", help="tiny sizes and few repeats instead of the defaults above")
    add("--json", type=Path, metavar="FILE", help="append one JSON line for each measurement")
    add("--plots", type=Path, metavar="DIR", help="draw time and memory over density and over N, wherever there are two points or more")
    add("--markdown", type=Path, metavar="FILE", help="write all tables as a page")
    add("--replay", type=Path, metavar="FILE", help="measure nothing; take the rows of this JSON file")
    options = parser.parse_args(arguments)
    for name, value in {**FULL, "no_compile": False, **(QUICK if options.quick else {})}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.suites = options.suites or [*PEERS]
    unknown = [suite for suite in options.suites if suite not in PEERS]
    if unknown:
        parser.error(f"expected SUITE to be one of {', '.join(PEERS)} (got {unknown[0]})")
    known = {name for peers in PEERS.values() for name in peers}
    if not known.issuperset(options.peers or ()):
        parser.error(f"expected --peers among {', '.join(sorted(known))} (got {' '.join(options.peers)})")
    for name in ("tokens", "densities", "blocks", "growth_tokens", "heads", "channels", "repeats", "seconds", "edges_per_query"):
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) <= 0:
            parser.error(f"expected --{name.replace('_', '-')} to be positive (got {value})")
    if options.threads is not None and options.threads < 1:
        parser.error(f"expected --threads to be positive (got {options.threads})")
    if max(options.densities) > 60:
        parser.error(
            f"expected --densities of at most 60 percent (got {max(options.densities):g}): block probabilities of samplers would exceed 1"
        )
    return options


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)


import torch

from benchmark_peers import Case, Peer
from benchmark_report import Row, add_ratios, as_markdown, as_text, plot, tables
from benchmark_worker import STAGES, SUITES, Failed, Worker, find_peer

ROUNDS = 5  # turns that each peer gets
SLOW = ("over the cap", "skipped", "out of memory")  # what a larger case would end in too
MIB = 2**20


# ------------------------------------------------------------------ measuring


@dataclass
class Entry:
    """One peer at work on one case: a line of a table."""

    suite: str
    name: str
    case: Case
    group: str

    @property
    def peer(self) -> Peer:
        return find_peer(self.suite, self.name)

    @property
    def label(self) -> str:
        return f"{self.peer.label}, K = {self.case.blocks}" if self.suite == "layer" and self.case.blocks else self.peer.label


class Bench:
    """Measures groups of entries, and remembers who was over the cap.

    Args:
        options: Of the command line.
        facts: Of the machine, for every row.
    """

    def __init__(self, options: argparse.Namespace, facts: Row) -> None:
        self.options, self.facts, self.rows = options, facts, list[Row]()

    def run(self, entries: Sequence[Entry]) -> None:
        """Check all, then let them take turns; appends one row for each entry and stage."""
        say(f"{entries[0].suite}: {entries[0].group}")
        started: list[tuple[Entry, Worker, list[Row]]] = []
        rows: list[Row] = []
        missing = self._prepare(entries[0])
        try:
            for entry in entries:
                mine = [self._row(entry, stage, missing) for stage in STAGES[entry.suite]]
                rows += mine
                worker = self._start(entry, mine)
                if worker is not None:
                    started.append((entry, worker, mine))
            turns = [
                (entry, worker, row, list[tuple[float, int]]()) for entry, worker, mine in started for row in mine if not row["status"]
            ]
            for number in range(ROUNDS):
                say(f"  round {number + 1} of {ROUNDS}: {len(turns)} measurements", end="\r")
                for _, worker, row, found in turns[number:] + turns[:number]:
                    self._turn(worker, row, found)
            for _, _, row, found in turns:
                _summarise(row, found)
        finally:
            for _, worker, _ in started:
                worker.stop()
        for row in rows:
            row.pop("estimate", None)
            row["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        self.rows += rows
        add_ratios(self.rows)
        if self.options.json:
            with self.options.json.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    def _prepare(self, entry: Entry) -> str:
        """Make the inputs that peers of a table share; why there are none."""
        if entry.suite != "attention":
            return ""
        worker = Worker(entry.suite, entry.name, entry.case, {}, self.options.threads, self.options.memory)
        try:
            worker.ask(self.options.setup_seconds, "prepare")
        except Failed as failure:
            return f"no inputs: {failure}"
        finally:
            worker.stop()
        return ""

    def _row(self, entry: Entry, stage: str, status: str) -> Row:
        case = entry.case
        empty = dict.fromkeys(("edges", "median_ms", "q1_ms", "q3_ms", "ratio", "ns_per_edge", "edges_per_s", "peak_mib", "bytes_per_edge", "process_mib", "error", "sampled_density", "expected_density"))  # fmt: skip
        return {
            "suite": entry.suite, "group": entry.group, "peer": entry.name, "label": entry.label, "ours": entry.peer.ours, "stage": stage,
            "tokens": case.tokens, "heads": case.heads, "channels": case.channels, "blocks": case.blocks, "density": case.density,
            "edges_per_query": case.density * case.tokens, "seed": case.seed, "repeats": 0, "status": status, "note": entry.peer.note, **empty, **self.facts,
        }  # fmt: skip

    def _start(self, entry: Entry, rows: list[Row]) -> Worker | None:
        """A worker whose peer is right and fits the cap, with its memory measured; None if it has nothing to time."""
        options = self.options
        label = f"  {entry.label:<34}"
        for row in rows:
            smaller = (r for r in self.rows if r["status"].startswith(SLOW) and all(r[key] == row[key] for key in ("suite", "peer", "stage", "blocks")))  # fmt: skip
            if any(r["tokens"] <= row["tokens"] and r["density"] * r["tokens"] <= row["density"] * row["tokens"] * 1.001 for r in smaller):
                row["status"] = "skipped: too much at a smaller size"
        if all(row["status"] for row in rows):
            say(f"{label} {rows[0]['status']}")
            return None
        try:
            worker = self._checked(entry, rows)
            for row in (row for row in rows if not row["status"]):
                try:
                    asked = worker.ask(2 * options.seconds + 5, "memory", row["stage"], options.seconds)
                except Failed as failure:
                    row["status"] = str(failure)
                    worker.stop()
                    worker = self._checked(entry, rows)  # for the other stages
                    continue
                row["estimate"], row["edges"], peak, whole = asked
                if row["estimate"] > options.seconds:
                    row["status"] = f"over the cap ({options.seconds:g} s): one call took {row['estimate']:.3g} s"
                else:
                    row.update(peak_mib=peak / MIB, bytes_per_edge=peak / max(row["edges"], 1), process_mib=whole / MIB)
            found = "; ".join(row["stage"] + " " + (row["status"] or f"about {1e3 * row['estimate']:.3g} ms") for row in rows)
            say(f"{label} right (error {rows[0]['error']:.1e}); {found}")
        except Failed as failure:
            for row in rows:
                row["status"] = row["status"] or str(failure)
            say(f"{label} {rows[0]['status']}")
            return None
        return worker

    def _checked(self, entry: Entry, rows: list[Row]) -> Worker:
        """A worker whose peer has shown that it is right."""
        worker = Worker(entry.suite, entry.name, entry.case, entry.peer.environment, self.options.threads, self.options.memory)
        try:
            error, facts = worker.ask(self.options.setup_seconds, "check")
        except Failed:
            worker.stop()
            raise
        for row in rows:
            row.update(error=error, expected_density=facts.get("expected_density"), sampled_density=facts.get("density"))
        return worker

    def _turn(self, worker: Worker, row: Row, found: list[tuple[float, int]]) -> None:
        """A few repeats, as many as fit into the cap of the measurement and spread them over all turns."""
        if row["status"] or not worker.alive:
            return
        seconds = self.options.seconds
        total = min(max(int(seconds / max(row["estimate"], 1e-9)), 1), self.options.repeats)
        repeats = min(-(-total // ROUNDS), total - len(found))
        if repeats <= 0:
            return
        try:
            found += worker.ask(3 * seconds + 5, "time", row["stage"], repeats, row["estimate"] < seconds / 4)
        except Failed as failure:
            row["status"] = str(failure)
            worker.stop()


def _summarise(row: Row, found: list[tuple[float, int]]) -> None:
    """Fill in a row; a measurement that was stopped keeps the repeats that it has."""
    if not found:
        row["status"] = row["status"] or "stopped with another stage"
        return
    times = [1e3 * seconds for seconds, _ in found]
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    edges = statistics.mean(count for _, count in found)
    row.update(median_ms=quartiles[1], q1_ms=quartiles[0], q3_ms=quartiles[2], repeats=len(times), edges=round(edges))
    row.update(ns_per_edge=1e6 * row["median_ms"] / max(edges, 1), edges_per_s=1e3 * edges / row["median_ms"])


def say(text: str, end: str = "\n") -> None:
    """Progress, for people; a line that the next one overwrites only on a terminal."""
    if end == "\n" or sys.stderr.isatty():
        print(f"\033[K{text}" if sys.stderr.isatty() else text, end=end, file=sys.stderr, flush=True)


# ------------------------------------------------------------------ suites


def groups(suite: str, options: argparse.Namespace, folder: Path) -> Iterator[list[Entry]]:
    """The tables of a suite: entries that run side by side."""
    names = [name for name, peer in SUITES[suite].items() if not (peer.compiled and options.no_compile)]
    if options.peers:
        names = [name for name in names if name in options.peers]
    names += ["wrong"] * options.wrong
    sizes = f"H = {options.heads}, C = {options.channels}"
    empty = Case(0, options.heads, options.channels, 0, 0.0, options.seed)
    if suite == "growth":
        for tokens in sorted(options.growth_tokens):
            case = replace(empty, tokens=tokens, blocks=options.blocks[0], density=min(options.edges_per_query / tokens, 1.0))
            group = f"N = {tokens:,}, {options.edges_per_query:g} edges per query, K = {case.blocks}, {sizes}"
            yield [Entry(suite, name, case, group) for name in names]
        return
    for tokens in sorted(options.tokens):
        for percent in sorted(options.densities):
            case = replace(empty, tokens=tokens, density=percent / 100)
            group = f"N = {tokens:,}, density {percent:g} %"
            if suite == "attention":
                case = replace(case, file=folder / f"{tokens}-{percent}.pt")
                yield [Entry(suite, name, case, f"{group}, {sizes}") for name in names]
                case.file.unlink(missing_ok=True)
            elif suite == "sampling":
                for blocks in options.blocks:
                    text = f"{group}, K = {blocks}, H = {options.heads}"
                    yield [Entry(suite, name, replace(case, blocks=blocks), text) for name in names]
            else:
                cases = {name: [case] if name == "dense" else [replace(case, blocks=k) for k in options.blocks] for name in names}
                yield [Entry(suite, name, one, f"{group}, {sizes}") for name in names for one in cases[name]]


def machine(threads: int) -> Row:
    """What a number means nothing without."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = "unknown"
    with suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "--", "../sbm_pyg"], capture_output=True, text=True, check=True).stdout
        commit += "+changes" * bool(changed.strip())
    return {
        "run": f"{os.getpid()}-{int(time.time())}", "host": platform.node(), "cpu": cpu, "cores": os.cpu_count(), "threads": threads,
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(), **{name.replace("-", "_"): version(name) for name in ("torch", "torch-geometric", "numba", "networkx")},
        "commit": commit, "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write. Returns 1 where one of our own peers is wrong or broken (slow is neither), else 0."""
    options = parse(arguments)
    if options.replay:
        rows = [json.loads(line) for line in options.replay.read_text().splitlines() if line.strip()]
        for title, cells in tables(rows):
            print(f"\n{as_text(title, cells)}")
    else:
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
        rows = measure(options)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        given = sys.argv[1:] if arguments is None else arguments
        options.markdown.write_text(as_markdown(rows, " ".join(["python examples/benchmark.py", *given])) + "\n")
        say(f"wrote {options.markdown}")
    if options.plots:
        for path in plot(rows, options.plots):
            say(f"wrote {path}")
    return int(any(row["ours"] and row["status"] and not row["status"].startswith(SLOW) for row in rows))


def measure(options: argparse.Namespace) -> list[Row]:
    """All rows of all suites; each table is printed as soon as it is whole."""
    options.threads = options.threads or torch.get_num_threads()
    bench = Bench(options, machine(options.threads))
    facts = bench.facts
    print(f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads; torch {facts['torch']}, PyG {facts['torch_geometric']}, numba {facts['numba']}; commit {facts['commit']}")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="sbm_pyg_benchmark_") as folder:
        for suite in options.suites:
            for entries in groups(suite, options, Path(folder)):
                if not entries:
                    continue
                before = len(bench.rows)
                bench.run(entries)
                if suite != "growth":
                    for title, cells in tables(bench.rows[before:]):
                        print(f"\n{as_text(title, cells)}\n", flush=True)
            if suite == "growth":
                for title, cells in tables([row for row in bench.rows if row["suite"] == suite]):
                    print(f"\n{as_text(title, cells)}\n", flush=True)
    return bench.rows


if __name__ == "__main__":
    sys.exit(main())
