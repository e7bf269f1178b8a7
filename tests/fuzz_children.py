"""Forked children that judge numbered calls: one that crashes, or that a call keeps for too long, is replaced by another."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any

from numba.core import event

COMPILING = 300.0  # seconds of CPU that one compilation of a kernel may take
PATIENCE = 6  # times as long may a call take by the clock, since others use the machine too
LATE = (-signal.SIGPROF, -signal.SIGALRM)  # exit codes of a child that took too long


class Clock(event.Listener):
    """Has the system end this process, in a kernel too, after some seconds in one call or in one compilation."""

    def __init__(self, limit: float) -> None:
        self.limit, self.compilations = limit, 0
        event.register("numba:compile", self)

    def start(self) -> None:
        seconds = COMPILING if self.compilations else self.limit
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)

    def on_start(self, event: Any) -> None:
        self.compilations += 1
        self.start()

    def on_end(self, event: Any) -> None:
        self.compilations -= 1
        self.start()


def _work(pipe: Connection, numbers: list[int], judge: Callable[[int], Any], limit: float) -> None:
    faulthandler.disable()  # crashes are expected
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    for late in LATE:
        signal.signal(-late, signal.SIG_DFL)
    clock = Clock(limit)
    for number in numbers:
        clock.start()
        pipe.send(judge(number))


def run(
    numbers: Iterable[int], judge: Callable[[int], Any], jobs: int, limit: float, most: int = 10**9
) -> Iterator[tuple[int, Any]]:
    """Yields each number with its verdict, or with the exit code of the child that it ended; ``most`` calls in one child."""
    todo = iter(numbers)
    running: dict[Any, tuple[Any, deque[int]]] = {}

    def start(part: list[int]) -> None:
        if part:
            pipe, sender = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.get_context("fork").Process(target=_work, args=(sender, part, judge, limit))
            process.start()
            sender.close()
            running[pipe] = process, deque(part)

    for _ in range(jobs):
        start([*islice(todo, most)])
    try:
        while running:
            ready: list[Any] = wait([*running])
            for pipe in ready:
                process, part = running[pipe]
                try:
                    verdict = pipe.recv()
                    yield part.popleft(), verdict
                    continue
                except (EOFError, ConnectionResetError):
                    del running[pipe]
                    process.join()
                if part:
                    yield part.popleft(), process.exitcode
                start([*part] or [*islice(todo, most)])
    finally:
        for process, _ in running.values():
            process.kill()
