"""Compiles numba kernels and runs them on as many threads as torch uses.

In: python functions that numba can compile, and lists of argument tuples (one per piece of work). Out: their side
effects on the arrays they were given. Not here: any kernel.

numba's own ``parallel=True`` is avoided on purpose: its OpenMP layer kills a forked child at the first parallel kernel
and its workqueue layer aborts when two python threads enter it together. Kernels here release the GIL instead. The
threads are those of torch's OpenMP runtime where it can be found (on Linux): they spin for milliseconds after each
parallel torch op, and any other thread would have to share their cores. Elsewhere a pool of python threads takes their
place.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import logging
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import INSTALLED

if INSTALLED:
    from numba import njit
    from numba.core import event

__all__ = ["flushed_subnormals", "on_each"]

log = logging.getLogger("sbm_pyg")

MIN_STEPS_PER_TASK = 2**18
"""Products of two numbers that a task takes at least: about fifty microseconds."""

SUBNORMAL_NUMBER = 5e-324

_TeamMember = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_fork_team = getattr(ctypes.CDLL(None), "GOMP_parallel", None) if os.name == "posix" else None
if _fork_team is not None:
    _fork_team.argtypes = (_TeamMember, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_team_owner = -1  # the process that has used the team

_kernels: set = set()
_pool: ThreadPoolExecutor | None = None
_pool_owner = -1
_pool_lock = threading.Lock()


def numba_kernel(function: Callable, reorder: bool = False) -> Callable:
    """Compile ``function`` with numba for :func:`run`: no GIL, cached on disk, floating point that keeps NaN and inf.

    A sum keeps its order (:func:`.simd.exp` needs that) unless ``reorder`` lets the compiler take several terms at a
    time. If the cache folder cannot be written, each process compiles once. A kernel is compiled again after any file
    has changed that its code or its constants can come from; numba by itself compares the file of the kernel alone.
    Without numba the function is returned as it is.
    """
    if not INSTALLED:
        return function
    options: dict[str, Any] = {
        "nogil": True,
        "boundscheck": False,
        "error_model": "numpy",
        "fastmath": {"contract", "reassoc", "nsz"} if reorder else {"contract"},
    }
    try:
        compiled = njit(cache=True, **options)(function)
        if hasattr(compiled, "_cache"):  # not with NUMBA_DISABLE_JIT; numba has no public name for it
            index = compiled._cache._cache_file
            index._source_stamp = (index._source_stamp, _sources())
    except RuntimeError as error:  # numba found no folder that it may write to
        log.debug("%s; it is compiled again in every process", error)
        compiled = njit(**options)(function)
    _kernels.add(compiled)
    return compiled


@cache
def _sources() -> str:
    """Hash of all files of this folder, and of the files that define constants of kernels."""
    digest, shelf = hashlib.sha256(), Path(__file__).parent
    shared = (*(shelf.parent / "reference").glob("*.py"), shelf.parent / "random_words.py")
    for path in (*sorted(shelf.glob("*.py")), *sorted(shared)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def task_count(steps: int, per_thread: int = 1) -> int:
    """Number of tasks: ``per_thread`` for a thread, but no task of fewer than ``MIN_STEPS_PER_TASK`` steps.

    Args:
        steps: About how many products of two numbers the whole work takes.
        per_thread: Tasks for each thread.
    """
    return max(1, min(per_thread * torch.get_num_threads(), steps // MIN_STEPS_PER_TASK))


def run(function: Callable, tasks: Sequence[tuple], threads: int | None = None) -> None:
    """Call ``function(*task)`` for every task, on the caller's thread and others; by default as many as torch uses.

    A free thread takes the next task, so results must not depend on which thread runs it. Calls are safe in forked
    children and from several python threads at once. The first exception of a task is raised here. Meanwhile subnormal
    numbers count as zero, if the processor can: a trained model has many subnormal memberships, and products with them
    take up to a hundred times as long.
    """
    todo, failures = deque(tasks), []

    def work(_=None):
        # Subnormal numbers count as zero meanwhile.
        slow = SUBNORMAL_NUMBER * 1.0 != 0.0  # a setting of each thread, which is left as it was
        if slow:
            torch.set_flush_denormal(True)
        try:
            # Take tasks until none is left.
            while todo:
                try:
                    task = todo.popleft()
                except IndexError:  # another thread was faster
                    return
                function(*task)
        except BaseException as failure:
            todo.clear()
            failures.append(failure)
        finally:
            if slow:
                torch.set_flush_denormal(False)

    # Run on the threads of torch, or on a pool of Python threads where these are unknown.
    threads = min(threads or torch.get_num_threads(), len(todo))
    if not _on_team(work, threads):
        futures = [_threads().submit(work) for _ in range(threads - 1)]
        work()
        for future in futures:
            if not future.cancel():
                future.result()
    if failures:
        raise failures[0]


def on_each(function: Callable[[], Any]) -> None:
    """Call ``function()`` once on the caller's thread, and on each other that torch's operations and :func:`run` use.

    It changes settings of threads, as ``torch.set_flush_denormal`` does. If the threads of torch cannot be found, only
    the caller's calls it. The first exception is raised here, after all calls.
    """
    failures = []

    def work(_=None):
        try:
            function()
        except BaseException as failure:
            failures.append(failure)

    if not _on_team(work, torch.get_num_threads()):
        work()
    if failures:
        raise failures[0]


@contextlib.contextmanager
def flushed_subnormals() -> Iterator[None]:
    """Context in which torch, too, takes numbers below 1e-38 as zero, on every thread that it computes on.

    Processors take up to a hundred times as long for them, and gradients of a trained model with sparse graphs hold
    many. Kernels of this package always flush them. Afterwards the setting is as before.
    """
    before = SUBNORMAL_NUMBER * 1.0 == 0.0
    on_each(lambda: torch.set_flush_denormal(True))
    try:
        yield
    finally:
        on_each(lambda: torch.set_flush_denormal(before))


def _on_team(work: Callable, threads: int) -> bool:
    """Call ``work(_)`` once on each of several threads of torch.

    False, without a call, if that is one thread, or torch's threads cannot be found.
    """
    global _team_owner
    if threads < 2 or _fork_team is None or _team_owner not in (-1, os.getpid()):
        return False
    _team_owner = os.getpid()
    _fork_team(_TeamMember(work), None, threads, 0)
    return True


def split(rowptr: np.ndarray, pieces: int) -> list[tuple[int, int]]:
    """Cut rows into at most ``pieces`` ranges of about equal work.

    Edges, and a few edges' worth for each row itself.
    """
    rows = len(rowptr) - 1
    start, whole = int(rowptr[0]), int(rowptr[rows] - rowptr[0]) + 8 * rows
    goals = [start + whole * piece // pieces for piece in range(pieces)]
    cuts = [bisect_left(range(rows), goal, key=lambda row: int(rowptr[row]) + 8 * row) for goal in goals]
    return [(first, last) for first, last in itertools.pairwise([*cuts, rows]) if first < last]


def even_ranges(total: int, pieces: int) -> list[tuple[int, int]]:
    """At most ``pieces`` ranges of about equal length that cover ``range(total)``, none empty."""
    pieces = max(1, min(pieces, total))
    return [*itertools.pairwise([total * piece // pieces for piece in range(pieces + 1)])]


def empty_table(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Uninitialized memory for a table that is read at random.

    It lies in huge pages if numpy can get them, as it tries to from 4 MiB on. In pages of 4 KiB, a table that just fits
    the second-level cache would not stay there. A table of less than 1 MiB begins at a cache line.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    unit = 2**21 if size >= 2**20 else 64
    room = np.empty(size + unit, np.uint8)
    return room[-room.ctypes.data % unit :][:size].view(dtype).reshape(shape)


def _threads() -> ThreadPoolExecutor:
    """The pool of this process; a forked child starts its own, since threads do not survive a fork."""
    global _pool, _pool_owner
    with _pool_lock:
        if _pool is None or _pool_owner != os.getpid():
            _pool, _pool_owner = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="sbm_pyg"), os.getpid()
        return _pool


def _after_fork():
    global _pool_lock
    _pool_lock = threading.Lock()  # another thread may have held it
    # OpenMP threads do not survive a fork: the next parallel torch op would wait for them forever
    if _team_owner != -1:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def compilation() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds for which kernels have been compiled since the start."""
    if not INSTALLED:
        yield lambda: 0.0
        return
    listener = event.TimingListener()
    with event.install_listener("numba:compile", listener):
        yield lambda: listener.duration if listener.done else 0.0


if INSTALLED:

    class _Announcer(event.Listener):
        """Logs compilations: one warning in a process, and the name of each kernel."""

        announced = False

        def on_start(self, event):
            numba_kernel = event.data["dispatcher"]
            if numba_kernel not in _kernels:
                return
            if not self.announced:
                self.announced = True
                folder = getattr(numba_kernel._cache, "cache_path", None)
                anew = "in every process anew, as no folder can be written to"
                where = anew if folder is None else f"once, into {folder}"
                log.warning("sbm_pyg compiles the CPU kernels that a call needs, some seconds each; %s", where)
            log.info("compiling %s", numba_kernel.__name__)

        def on_end(self, event):
            pass

    _announcer = _Announcer()
    event.register("numba:compile", _announcer)
