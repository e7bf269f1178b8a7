"""Checkpoints that survive kills and full disks, the lock of a run's folder, and the signals that ask a run to stop.

In: a trainer at the end of a step. Out: ``last.ckpt``, to go on from, and ``best.ckpt``, to test, each written whole or not at all and
ending in its own checksum; the curves beside them. Not here: what model and data put into their state (``model.py``).

An *epoch* of the trainer is what lies between two checkpoints, never a pass over the data. So every checkpoint is one of a
finished epoch, of which nothing has to be restored but the number of the step; all else follows from that number.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import CheckpointIO

from examples.lra import report

LAST, BEST, LOCK = "last.ckpt", "best.ckpt", ".lock"
PREFIX = b"sha256:"
SEAL = len(PREFIX) + 64  # bytes
NEVER = 2**31  # validate after so many epochs


class RunError(ValueError):
    """What ends a run though it is no bug, in words for the user."""


def write_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """Writes a checkpoint that is complete under its name at any moment, even if the power fails.

    The file is what ``torch.save`` writes, and ``torch.load`` reads it. Its checksum is the comment that every zip archive
    may end with; it covers every byte before it.

    Raises:
        RunError: If it cannot be written, as on a full disk; the checkpoint of this name that was there still is.
    """
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    content = buffer.getbuffer()
    assert content[-22:-18] == b"PK\5\6"  # the last record of an archive without comment
    content[-2:] = SEAL.to_bytes(2, "little")  # the length of the comment
    draft = path.with_name(path.name + ".partial")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.write(PREFIX + hashlib.sha256(content).hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise RunError(
            f"Expected 'output' to have room for {path.name}, {len(content) + SEAL:,} bytes (got {error.strerror!r} in {path.parent}). "
            "The checkpoints before it are whole: make room and resume."
        ) from error


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint onto the CPU after comparing it with its checksum.

    Raises:
        RunError: If a single bit is not what was written, or if there is no checksum.
    """
    content = path.read_bytes()
    if PREFIX + hashlib.sha256(memoryview(content)[:-SEAL]).hexdigest().encode() != content[-SEAL:]:
        raise RunError(
            f"Expected {path} to be as it was written (got other bytes than its checksum says). It is damaged: take it from a backup, "
            f"copy {BEST} to {LAST} and resume from there, or start a new run."
        )
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def hold(folder: Path) -> contextlib.AbstractContextManager[Any]:
    """Takes a folder of output for this process until it ends, however it ends, or until the context does.

    Raises:
        RunError: If another process that is still running has it.
    """
    try:
        return FileLock(folder / LOCK).acquire(blocking=False)
    except Timeout:
        raise RunError(
            f"Expected 'output' to be a folder in which no other process is at work (got {folder}). Wait for it or stop it, or choose "
            "another one."
        ) from None


class SafeIO(CheckpointIO):
    """Lets Lightning write and read its checkpoints with the functions above."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_checkpoint(Path(path), checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


class Signals:
    """Turns the first SIGINT or SIGTERM into a wish to stop, which is granted at the end of a step; the second exits at once.

    While nothing would be lost, outside of training, the first one exits too: as ``SystemExit``, with the code that shells
    give to a program that a signal ended (130 and 143).
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
    """Saves after every ``save_every`` steps, after validations, and when asked to stop; keeps the best state.

    Args:
        folder: Of the files.
        settings: ``save_every``, ``validate_every``, ``accumulate``, ``steps``, and from which step on graphs are ``settled``.
        signals: Which may ask to stop.
    """

    def __init__(self, folder: Path, settings: Any, signals: Signals) -> None:
        self.folder, self.settings, self.signals = folder, settings, signals
        self.best: dict[str, Any] = {"accuracy": -1.0, "step": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.best

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict

    @staticmethod
    def validates(settings: Any, step: int) -> bool:
        """Says whether a validation follows a step."""
        return step % settings.validate_every == 0 or step == settings.steps

    @staticmethod
    def boundary(settings: Any, step: int) -> int:
        """Returns the first step after this one that a checkpoint follows."""
        rhythms = (settings.save_every, settings.validate_every)
        return min(settings.steps, *((step // every + 1) * every for every in rhythms))

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
            if accuracy > self.best["accuracy"] and self.settings.settled(step):
                self.best = {"accuracy": accuracy, "step": step}
                trainer.save_checkpoint(self.folder / BEST)
        trainer.save_checkpoint(self.folder / LAST)
        if trainer.is_global_zero:
            for phase, rows in pl_module.rows.items():
                report.write_csv(self.folder / f"{phase}.csv", rows)
        if step == self.settings.steps:
            trainer.should_stop = True
        give_memory_back()

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.signals.patient = False

    def asked(self, trainer: Trainer) -> bool:
        """Says whether any process was asked to stop; all of them ask together."""
        if trainer.world_size == 1:
            return self.signals.number > 0
        number = torch.tensor(self.signals.number, device=trainer.strategy.root_device)
        highest = int(trainer.strategy.reduce(number, reduce_op="max"))
        self.signals.number = self.signals.number or highest
        return highest > 0


def give_memory_back() -> None:
    """Gives freed memory back to the system, where the C library is GNU's.

    Batches of all sizes leave holes in its heap: a process that needs 1 GiB for a step may hold 12 after an hour.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
