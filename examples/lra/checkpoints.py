"""Checkpoints that survive kills, full disks and flipped bytes, the lock of a run's folder, and the signals that ask a run to stop.

In: a trainer at the end of a step. Out: ``last.ckpt``, ``previous.ckpt`` (the one before) and ``best.ckpt``, each written whole
or not at all and ending in its own checksum. Not here: what model and data put into their state (``model.py``).

An *epoch* of the trainer is what lies between two checkpoints, never a pass over the data. So every checkpoint is one of a
finished epoch, of which nothing has to be restored but the number of the step; all else follows from that number.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from filelock import FileLock, Timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import CheckpointIO
from tqdm.auto import tqdm

from examples.lra import processes
from examples.lra.data.files import not_writable
from examples.lra.settings import SETTINGS, Plan, next_folder

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
LOCK = ".lock"  # never replaced: a lock is on a file, not on its name
PREFIX = b"sha256:"
SEAL = len(PREFIX) + 64  # bytes
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's share of it, or what one file may have
NEVER = 2**31  # validate after so many epochs


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written, in words for the user."""


class DivergenceError(ValueError):
    """A run whose loss or weights are no longer finite numbers, in words for the user."""

    def __init__(self, what: str, step: int) -> None:
        super().__init__(
            f"Expected the {what} to stay finite (got NaN or inf at step {step:,}): training has diverged. Start a new run with a lower "
            "--learning-rate, or with --clip-norm 1. The checkpoints before it are whole, but going on from them ends here again."
        )


def write_checkpoint(path: Path, checkpoint: dict[str, Any], keep: Path | None = None) -> None:
    """Writes a checkpoint that is complete under its name at any moment, even if the power fails.

    The file is what ``torch.save`` writes, and ``torch.load`` reads it. Its checksum is the comment that every zip archive
    may end with; it covers every byte before it. A file of this name, if there is one, is called ``keep`` from now on, or replaced.

    Raises:
        CheckpointError: If the disk is full; whatever was in the folder before is still there.
    """
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    content = buffer.getbuffer()
    assert content[-22:-18] == b"PK\5\6"  # the last record of an archive without comment
    content[-2:] = SEAL.to_bytes(2, "little")  # the length of the comment
    seal = PREFIX + hashlib.sha256(content).hexdigest().encode()
    draft = path.with_name(path.name + ".partial")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.write(seal)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if not isinstance(error, OSError) or error.errno not in FULL:
            raise
        raise CheckpointError(
            f"Expected 'output' to have room for {path.name}, {len(content) + SEAL:,} bytes (got {os.strerror(error.errno)!r} in "
            f"{path.parent}, where {shutil.disk_usage(path.parent).free:,} bytes are free). The checkpoints before it are whole: "
            "make room and resume."
        ) from error
    if keep is not None and path.exists():
        os.replace(path, keep)  # a kill between these two lines leaves `keep` as the newest; see `newest`
    os.replace(draft, path)
    _sync_names(path.parent)


def _sync_names(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_checkpoint(path: Path, way_out: str = "Take it from a backup, or start a new run.") -> dict[str, Any]:
    """Reads a checkpoint onto the CPU after comparing it with its checksum.

    Args:
        path: Of the file.
        way_out: What to tell the user to do if it is damaged.

    Raises:
        CheckpointError: If a single bit is not what was written, or if there is no checksum.
    """
    content = path.read_bytes()
    body, seal = memoryview(content)[:-SEAL], content[-SEAL:]
    if not seal.startswith(PREFIX):
        found = "a file without a checksum at its end, so cut short, damaged there or not written by this trainer"
    elif PREFIX + hashlib.sha256(body).hexdigest().encode() != seal:
        found = "other bytes than its checksum says, so damaged"
    else:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    raise CheckpointError(f"Expected {path} to be as it was written (got {found}). {way_out}")


def newest(folder: Path, choice: str = "last") -> Path | None:
    """Finds the checkpoint to go on from, and proves it whole. A damaged one is never passed over in silence.

    Args:
        folder: Of the run.
        choice: "last", or "previous" for the one before; then a last one, most likely damaged, is put aside.

    Returns:
        Its path; None if the run was stopped before its first.

    Raises:
        CheckpointError: If it is damaged, or if there is no previous one.
    """
    last, previous = folder / LAST, folder / PREVIOUS
    if choice == "previous":
        if not previous.exists():
            raise CheckpointError(
                f"Expected 'resume-from' to be 'last' (got 'previous', but {previous} does not exist). Resume from last."
            )
        read_checkpoint(previous)
        if last.exists():  # or the next checkpoint would take its place among the kept ones
            os.replace(last, folder / ("damaged-" + LAST))
        return previous
    path = last if last.exists() else previous  # a kill between two renames leaves the newest as the previous one
    if not path.exists():
        return None
    fresh = f"Go on from the one before with --resume-from previous: {previous} was not touched."
    read_checkpoint(path, fresh if path == last and previous.exists() else "There is none before it: start a new run.")
    return path


def failure(error: BaseException | None) -> str | None:
    """Finds the words for the user in an error or in what led to it; None if there are none, and it is a bug."""
    while error is not None:
        if isinstance(error, (CheckpointError, DivergenceError)):
            return str(error)
        if isinstance(error, OSError) and error.errno in FULL:
            return f"Expected 'output' to have room (got {os.strerror(error.errno)!r} at {error.filename or 'a file'}). Make room and resume."
        error = error.__cause__ or error.__context__
    return None


def hold(folder: Path) -> contextlib.AbstractContextManager[Any]:
    """Takes a folder of output for this process until it ends, however it ends, or until the context does.

    Raises:
        CheckpointError: If another process that is still running has it.
    """
    try:
        return FileLock(folder / LOCK).acquire(blocking=False)
    except Timeout:
        raise CheckpointError(
            f"Expected 'output' to be a folder in which no other process is at work (got {folder}). Wait for it or stop it, or choose "
            "another one."
        ) from None


def claim(folder: Path, plan: Plan, *, new: bool, move: bool) -> tuple[Path, contextlib.ExitStack]:
    """Makes the folder of a run if it is new, and takes it for this process.

    Another process may have taken the folder since it was settled.

    Args:
        folder: Of the run.
        plan: Of the run, which is written if the run is new.
        new: Whether the run begins.
        move: Whether to take the next folder in runs/ if this one was taken.

    Returns:
        The folder, and a context that holds its lock.

    Raises:
        ValueError: If the folder was taken or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(hold(folder))
            if new and (folder / SETTINGS).exists():
                raise CheckpointError(
                    f"Expected 'output' to be a new or empty folder (got {folder}, in which a run has begun meanwhile). Choose "
                    "another one, or add --resume."
                )
            if new:
                plan.write(folder / SETTINGS)
            return folder, stack.pop_all()
    except OSError as error:
        raise not_writable("output", folder, error) from None
    except CheckpointError:
        if not move:
            raise
    return claim(next_folder(plan.task, plan.preset), plan, new=new, move=move)


class SafeIO(CheckpointIO):
    """Lets Lightning write and read its checkpoints with the functions above; keeps the last checkpoint as the previous one.

    A full disk is noted in ``failure`` rather than raised: all processes of a run have to hear of it, and one of them writes.
    """

    def __init__(self) -> None:
        self.failure: str | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        try:
            write_checkpoint(path, checkpoint, keep=path.with_name(PREVIOUS) if path.name == LAST else None)
        except CheckpointError as error:
            self.failure = str(error)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


class Signals:
    """Turns the first SIGINT or SIGTERM into a wish to stop, which is granted at the end of a step; the second exits at once.

    While nothing would be lost, outside of training, the first one exits too: as ``SystemExit``, with the code that shells
    give to a program that a signal ended (130 and 143). Does nothing in threads other than the main one.
    """

    def __init__(self) -> None:
        self.number = 0
        self.patient = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.install()
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Makes this the handler of both signals, inside of its context only."""
        for number in self._before:
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number
        if not self.patient:
            raise SystemExit(128 + number)
        os.write(
            sys.__stderr__.fileno() if sys.__stderr__ else 2,
            b"\nStopping after this step. A second signal stops at once.\n",
        )

    def agreed(self) -> bool:
        """Says whether any process of the run was asked to stop; a collective call."""
        self.number = processes.highest(self.number)
        return self.number > 0


class Checkpoints(Checkpoint):
    """Saves after every ``save_every`` steps, after validations, and when asked to stop; keeps the best state; stops early.

    Args:
        folder: Of the files.
        settings: ``save_every``, ``validate_every``, ``accumulate``, ``patience`` and ``steps``.
        signals: Who may ask to stop.
        accuracy: Returns the accuracy of the latest validation.
        io: Of the trainer.
    """

    def __init__(
        self, folder: Path, settings: Any, signals: Signals, accuracy: Callable[[], float], io: SafeIO
    ) -> None:
        self.folder, self.settings, self.signals, self.accuracy, self.io = folder, settings, signals, accuracy, io
        self.state: dict[str, Any] = {"accuracy": -1.0, "step": 0, "stale": 0, "finished": False}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = dict(state_dict)

    @staticmethod
    def validates(settings: Any, step: int) -> bool:
        """Says whether a validation follows a step."""
        return step % settings.validate_every == 0 or step == settings.steps

    @staticmethod
    def boundary(settings: Any, step: int) -> int:
        """Returns the first step after this one that a checkpoint follows."""
        return min(
            settings.steps, *((step // every + 1) * every for every in (settings.save_every, settings.validate_every))
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.signals.install()  # in place of Lightning's, which stops without saving
        self.signals.patient = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.signals.install()

    on_test_start = on_validation_start

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        end = self.boundary(self.settings, trainer.global_step)
        trainer.check_val_every_n_epoch = 1 if self.validates(self.settings, end) else NEVER

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.settings.accumulate == 0 and self.signals.agreed():
            trainer.should_stop = True  # ends the epoch here
            if not self.validates(self.settings, trainer.global_step):
                trainer.check_val_every_n_epoch = NEVER

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        self.state["finished"] = step == self.settings.steps
        if self.validates(self.settings, step):
            accuracy = self.accuracy()
            if accuracy > self.state["accuracy"]:
                self.state |= {"accuracy": accuracy, "step": step, "stale": 0}
                self.save(trainer, BEST)
            else:
                self.state["stale"] += 1
                if self.state["stale"] == self.settings.patience:
                    self.state["finished"] = True
                    if trainer.is_global_zero:
                        best = f"the best one was at step {self.state['step']:,}"
                        tqdm.write(
                            f"Stopped early at step {step:,}: {self.state['stale']} validations were no better, {best}.",
                            file=sys.stderr,
                        )
        if self.state["finished"]:
            trainer.should_stop = True
        self.save(trainer, LAST)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.signals.patient = False

    def save(self, trainer: Trainer, name: str) -> None:
        """Saves under a name; all processes take part.

        Raises:
            CheckpointError: If the disk is full.
        """
        trainer.save_checkpoint(self.folder / name)
        words = trainer.strategy.broadcast(self.io.failure)
        if words:
            raise CheckpointError(words)
