"""The times at which the trainer saves ``last.ckpt``, to go on from, and ``best.ckpt``, to test; and the signals that ask a run to stop.

An *epoch* of the trainer is the part of a run between two checkpoints, never a pass over the data. So every checkpoint is one of a
finished epoch, of which nothing has to be restored but the number of the step; all else follows from that number.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import CheckpointIO

from examples.common import runs
from examples.common.tables import write_csv

LAST, BEST = "last.ckpt", "best.ckpt"
NEW = "It is damaged: take it from a backup, or start a new run."
DAMAGED = f"It is damaged: take it from a backup, copy {BEST} to {LAST} and resume from there, or start a new run."
WAY_OUTS = {LAST: DAMAGED}
NEVER = 2**31  # validate after so many epochs


def read_state(path: Path, settings: Any) -> dict[str, Any]:
    return runs.read_state(path, dataclasses.asdict(settings), WAY_OUTS.get(path.name, NEW), needed=True)


class SafeIO(CheckpointIO):
    """Lets Lightning write and read its checkpoints as all programs do."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        runs.write_checkpoint(Path(path), checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return runs.read_checkpoint(Path(path), WAY_OUTS.get(Path(path).name, NEW))

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


class Signals:
    """Turns the first SIGINT or SIGTERM into a request to stop at the end of a step; the second exits at once.

    Outside of training, the first one exits too, as ``SystemExit`` with the code of shells for a program that a signal ended (130 and 143).
    """

    def __init__(self) -> None:
        self.number, self.patient = 0, False

    def __enter__(self) -> Signals:
        self.before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.install()
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Makes this the handler of both signals; Lightning puts its own, which stop without saving, before each loop."""
        for number in self.before:
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: Any) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number
        if not self.patient:
            raise SystemExit(128 + number)
        os.write(2, b"\nStopping after this step. A second signal stops at once.\n")


class Checkpoints(Checkpoint):
    """Saves after every ``save_every`` steps, after validations, and when asked to stop; keeps the best state of settled graphs."""

    def __init__(self, folder: Path, settings: Any, signals: Signals) -> None:
        self.folder, self.settings, self.signals = folder, settings, signals
        self.best: dict[str, Any] = {"accuracy": -1.0, "step": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.best

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict

    @staticmethod
    def validates(settings: Any, step: int) -> bool:
        """Whether a validation follows a step."""
        return step % settings.validate_every == 0 or step == settings.steps

    @staticmethod
    def boundary(settings: Any, step: int) -> int:
        """Returns the first step after this one that a checkpoint follows."""
        every = (settings.save_every, settings.validate_every)
        return min(settings.steps, *((step // count + 1) * count for count in every))

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.signals.install()

    on_train_start = on_test_start = on_validation_start

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.signals.patient = True
        end = self.boundary(self.settings, trainer.global_step)
        trainer.check_val_every_n_epoch = 1 if self.validates(self.settings, end) else NEVER

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.settings.accumulate == 0 and self.asked(trainer):
            trainer.should_stop = True  # ends the epoch here
            if not self.validates(self.settings, trainer.global_step):
                trainer.check_val_every_n_epoch = NEVER

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        step = trainer.global_step
        if self.validates(self.settings, step):
            accuracy = pl_module.rows["val"][-1]["accuracy"]
            if accuracy > self.best["accuracy"] and pl_module.settled:
                self.best = {"accuracy": accuracy, "step": step}
                trainer.save_checkpoint(self.folder / BEST)
        trainer.save_checkpoint(self.folder / LAST)
        if trainer.is_global_zero:
            self.write_curves(pl_module.rows)
        if step == self.settings.steps:
            trainer.should_stop = True
        give_memory_back()

    def write_curves(self, rows: dict[str, Any]) -> None:
        """Writes the rows of both curves, which are in the checkpoint too."""
        for phase, own in rows.items():
            write_csv(self.folder / f"{phase}.csv", own)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.signals.patient = False

    def asked(self, trainer: Trainer) -> bool:
        """Whether any process was asked to stop; all processes call this together."""
        if trainer.world_size == 1:
            return self.signals.number > 0
        number = torch.tensor(self.signals.number, device=trainer.strategy.root_device)
        highest = int(trainer.strategy.reduce(number, reduce_op="max"))
        self.signals.number = self.signals.number or highest
        return highest > 0


def give_memory_back() -> None:
    """Gives freed memory back to the system (GNU's C library): without it, a process that needs 1 GiB may hold 12 after an hour."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
