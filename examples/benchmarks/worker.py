"""The process of a peer, and the other end of the line to it.

In: a suite, the name of a peer and a case. Out: its check, times and memory, or why there are none. Not here: what peers do
(``benchmark_peers.py``, ``benchmark_samplers.py``), and who is measured when (``benchmark.py``).
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import benchmark_peers
import benchmark_samplers
from benchmark_peers import Case, Peer, Rejected, Work

SUITES = {
    "attention": benchmark_peers.ATTENTION,
    "sampling": benchmark_samplers.SAMPLING,
    "layer": benchmark_samplers.LAYER,
    "growth": benchmark_samplers.GROWTH,
}
WRONG = {
    "attention": benchmark_peers.WRONG_ATTENTION,
    "sampling": benchmark_samplers.WRONG_SAMPLER,
    "layer": benchmark_samplers.WRONG_LAYER,
    "growth": benchmark_samplers.WRONG_LAYER,
}
STAGES = {"attention": ("forward", "step"), "sampling": ("sample",), "layer": ("step",), "growth": ("step",)}


def find_peer(suite: str, name: str) -> Peer:
    """The peer of that name; ``"wrong"`` is one that the check must reject."""
    return WRONG[suite] if name == "wrong" else SUITES[suite][name]


# ------------------------------------------------------------------ inside the process of a peer


def _serve(connection: Connection, suite: str, name: str, case: Case, threads: int, memory: float) -> None:
    """Answers ``(what, *arguments)`` with ``(True, value)`` or ``(False, reason)`` until the other end closes."""
    with suppress(OSError):
        os.setsid()  # so that a compiler it starts ends with it
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (int(memory * 2**30),) * 2)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    work: Work | None = None
    while True:
        try:
            what, *arguments = connection.recv()
        except EOFError:
            return
        try:
            value: Any = None
            if what == "prepare":
                benchmark_peers.prepare_attention(case)
            elif what == "check":
                work = find_peer(suite, name).build(case)
                value = (work.check(), work.facts)
            else:
                assert work is not None
                call = work.calls[arguments[0]]
                value = _memory(call, *arguments[1:]) if what == "memory" else _time(call, *arguments[1:])
            if _status("VmRSS") > 2**31:
                _trim()  # the others need it while they have their turn
            connection.send((True, value))
        except ImportError as error:
            connection.send((False, f"not installed ({error.name})"))
        except Rejected as error:
            connection.send((False, f"REJECTED: {error}"))
        except Exception as error:  # a peer may fail in any way it likes; its row says how
            text = (str(error).strip() or "no message").splitlines()[0]
            out = isinstance(error, MemoryError) or "not enough memory" in str(error) or "Cannot allocate" in str(error)
            connection.send((False, f"out of memory (limit {memory:.1f} GiB)" if out else f"failed: {type(error).__name__}: {text[:120]}"))


def _memory(call: Callable[[], int], limit: float) -> tuple[float, int, int, int]:
    """Seconds, edges, peak of the resident memory above its state before, and peak of the whole process, in bytes, of a second call.

    The first call settles what stays: compiled code, threads, caches. Where it takes longer than ``limit``, it is the only one, and
    the memory is unknown (0). The peak is the kernel's high-water mark, set back before the call: ``ru_maxrss`` cannot be set back, and
    a child starts with its parent's.
    """
    start = time.perf_counter()
    edges = call()
    seconds = time.perf_counter() - start
    if seconds > limit:
        return seconds, edges, 0, 0
    earlier = _status("VmHWM")
    _trim()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before, start = _status("VmRSS"), time.perf_counter()
    edges = call()
    seconds = time.perf_counter() - start
    peak = _status("VmHWM")
    return seconds, edges, peak - before, max(peak, earlier)


def _status(name: str) -> int:
    """Resident memory of this process (``VmRSS``) or its peak (``VmHWM``), in bytes; the peak alone where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _trim() -> None:
    """Give freed memory back to the system, where the C library knows how."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _time(call: Callable[[], int], repeats: int, warm: bool) -> list[tuple[float, int]]:
    """Seconds and edges of each repeat; ``warm`` makes one call before that is not counted."""
    if warm:
        call()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        edges = call()
        found.append((time.perf_counter() - start, edges))
    return found


# ------------------------------------------------------------------ the process that measures


class Failed(Exception):
    """A peer that could not be measured; the message is for the table."""


class Worker:
    """A process with one peer in it.

    Args:
        suite: Suite of the peer.
        name: Name of the peer in its suite.
        case: What to work on.
        environment: Variables that the process must start with.
        threads: Of torch, and so of our kernels.
        memory: Largest size of its data, in GiB.
    """

    def __init__(self, suite: str, name: str, case: Case, environment: Mapping[str, str], threads: int, memory: float) -> None:
        forks = "forkserver" in multiprocessing.get_all_start_methods() and not environment  # malloc reads its variables only at a start
        context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            context.set_forkserver_preload(["torch", "torch_geometric", "sbm_pyg"])
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, suite, name, case, threads, memory), daemon=True)
        with _variables(environment):
            self.process.start()
        there.close()
        self.busy, self.alive = False, True

    def ask(self, cap: float, what: str, *arguments: Any) -> Any:
        """The answer, waited for ``cap`` seconds; the process is stopped where none comes.

        Raises:
            Failed: There is no answer, or it says why not.
        """
        self.busy = True
        try:
            self.connection.send((what, *arguments))
            if not self.connection.poll(cap):
                raise Failed(f"over the cap ({cap:.0f} s)")
            good, value = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            raise Failed(f"died (exit code {self.process.exitcode})") from None
        self.busy = False
        if not good:
            raise Failed(value)
        return value

    def stop(self) -> None:
        """End the process, and by force, with what it started, if it is at work."""
        self.alive = False
        self.connection.close()  # it ends by itself while it waits
        self.process.join(0 if self.busy else 2)
        with suppress(OSError):
            if self.process.is_alive() and os.getpgid(self.process.pid) == self.process.pid:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(5)


@contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in environment:
            os.environ.pop(name)
        os.environ.update(before)
