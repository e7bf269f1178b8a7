"""Compiles numba kernels and runs them on as many threads as torch uses.

In: python functions that numba can compile, and lists of argument tuples (one per piece of work). Out: their side
effects on the arrays they were given. Not here: any kernel.

numba's own ``parallel=True`` is avoided on purpose: its OpenMP layer kills a forked child at the first parallel kernel
and its workqueue layer aborts when two python threads enter it together. Kernels here release the GIL instead, and
plain python threads share the pieces of work.
"""

import itertools
import logging
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from numba import njit
from numba.core import event

log = logging.getLogger("sbm_pyg")

_kernels: set = set()
_pool: ThreadPoolExecutor | None = None
_pool_owner = -1
_pool_lock = threading.Lock()


def kernel(function: Callable) -> Callable:
    """Compile ``function`` with numba for :func:`run`: no GIL, cached on disk, floating point that keeps NaN and inf.

    A cache folder that cannot be written costs one compilation per process, and is no error.
    """
    options = {
        "nogil": True,
        "boundscheck": False,
        "error_model": "numpy",
        "fastmath": {"contract"},  # a sum keeps its order (simd.exp needs that), and checks for NaN stay
    }
    try:
        compiled = njit(cache=True, **options)(function)
    except RuntimeError as error:  # numba found no folder that it may write to
        log.debug("%s; it is compiled again in every process", error)
        compiled = njit(**options)(function)
    _kernels.add(compiled)
    return compiled


def run(function: Callable, tasks: Sequence[tuple]) -> None:
    """Call ``function(*task)`` for every task, on ``torch.get_num_threads()`` threads of which the caller is one.

    Tasks are taken in order by whichever thread is free, so results must not depend on who runs which. Safe in forked
    children (they get their own threads) and from several python threads at once (a caller finishes the work itself
    when all helpers are busy). The first exception of a task is raised here.
    """
    todo = deque(tasks)

    def work():
        while todo:
            try:
                task = todo.popleft()
            except IndexError:  # another thread was faster
                return
            function(*task)

    helpers = min(torch.get_num_threads(), len(todo)) - 1
    futures = [_threads().submit(work) for _ in range(helpers)]
    try:
        work()
    finally:
        todo.clear()
        for future in futures:
            if not future.cancel():
                future.result()


def split(rowptr: torch.Tensor, pieces: int) -> list[tuple[int, int]]:
    """Cut rows into at most ``pieces`` ranges of about equal work: edges, and a few edges' worth for each row itself."""
    rows = rowptr.numel() - 1
    work = [int(rowptr[0]), int(rowptr[rows]) + 8 * rows]
    cuts = [0]
    for piece in range(1, pieces):
        target = work[0] + (work[1] - work[0]) * piece // pieces
        cuts.append(bisect_left(range(rows), target, lo=cuts[-1], key=lambda row: int(rowptr[row]) + 8 * row))
    cuts.append(rows)
    return [(first, last) for first, last in itertools.pairwise(cuts) if first < last]


def _threads() -> ThreadPoolExecutor:
    """The pool of this process; a forked child starts its own, since threads do not survive a fork."""
    global _pool, _pool_owner
    with _pool_lock:
        if _pool is None or _pool_owner != os.getpid():
            _pool, _pool_owner = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="sbm_pyg"), os.getpid()
        return _pool


def _renew_lock():
    global _pool_lock
    _pool_lock = threading.Lock()  # another thread may have held it when the process forked


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class _Announcer(event.Listener):
    """Tells the log about compilations of our kernels that take longer than a second."""

    def __init__(self):
        self.timers = {}

    def on_start(self, event):
        name = event.data["dispatcher"]
        if name in _kernels:
            text = "compiling %s for the first time; the result is cached on disk"
            self.timers[name] = threading.Timer(1.0, log.info, (text, name.__name__))
            self.timers[name].daemon = True
            self.timers[name].start()

    def on_end(self, event):
        timer = self.timers.pop(event.data["dispatcher"], None)
        if timer is not None:
            timer.cancel()


event.register("numba:compile", _Announcer())
