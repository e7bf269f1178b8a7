"""Keeps a training process on the CPU small and quick: freed memory goes back to the system, and numbers next to zero are zero.

In: the hooks of a Lightning trainer, or a ``with`` statement. Out: effects on this process alone; no result changes but by numbers below
1e-38. Not here: memory of accelerators, which torch keeps in order by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from sbm_pyg.ops import threads


@contextlib.contextmanager
def flushed_subnormals() -> Iterator[None]:
    """Takes numbers below 1e-38 as zero, on every thread that computes.

    They cost processors up to a hundred times as long as others, and gradients of a trained model with sparse graphs are full of them.
    """
    threads.on_each(lambda: torch.set_flush_denormal(True))
    try:
        yield
    finally:
        threads.on_each(lambda: torch.set_flush_denormal(False))


class Memory(Callback):
    """Gives freed memory back to the system after a step that leaves the process with several times what a step needs.

    Batches of all sizes leave holes in the heap of the C library, and few tensors of the next batch fit into them: a process that
    needs 1 GiB for a step may hold 12 after an hour. What a step needs is taken to be the most that the process held after its
    first step and after the steps that followed such a return. Only on Linux with the GNU C library; elsewhere it does nothing.

    Args:
        slack: How many times what a step needs a process may hold.
    """

    def __init__(self, slack: float = 3.0) -> None:
        self.slack, self.needed, self.fresh = slack, 0, True
        self.give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.give_back is None:
            return
        held = held_bytes()
        if self.fresh:
            self.needed = max(self.needed, held)
        self.fresh = held > self.slack * self.needed
        if self.fresh:
            self.give_back(0)


def held_bytes() -> int:
    """Returns how much memory this process holds, on Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
