"""The training loop that programs share: from a model and its losses to rows of evaluations, with checkpoints to resume from.

A batch may be computed in parts, which saves memory, and by several processes, each of which takes its share of the parts.
"""

import ctypes
import dataclasses
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from examples.common.pictures import save_figure
from examples.common.runs import AGAIN, RunError, claim, read_state, write_checkpoint
from examples.common.tables import Row, add, read
from sbm_pyg import DensitySource, Sparsifier, auxiliary_loss, sync_statistics
from sbm_pyg.analysis import plots
from sbm_pyg.ops.cpu.threads import flushed_subnormals
from sbm_pyg.progress import tqdm

WARMUP, DECAY = 0.05, 0.3  # parts of the steps in which the learning rate rises, and falls to 0
PAUSE = 120.0  # seconds after which a checkpoint is written even without an evaluation

Parts = Sequence[Callable[[], Tensor]]
"""Functions that compute the losses of the equal parts of a batch."""


def trapezoid(time: float) -> float:
    """Factor of the learning rate from the part of the steps that is over: it rises, stays, and falls."""
    return min(time / WARMUP, 1.0, (1 - time) / DECAY)


def make_optimizer(
    model: torch.nn.Module, run: Any, rate_at: Callable[[float], float] = trapezoid, source_rate: float = 1.0
) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW and its schedule, for a run with ``steps``, ``learning_rate`` and ``weight_decay``. Graph sources do not decay.

    Args:
        rate_at: Factor of the learning rate, from the part of the steps that is over.
        source_rate: Factor of the learning rate of graph sources.
    """
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (run.weight_decay, 0.0)]
    groups[1]["lr"] = source_rate * run.learning_rate
    for name, parameter in model.named_parameters():
        groups[".source." in name]["params"].append(parameter)
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], run.learning_rate)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at((step + 1) / (run.steps + 1)))


def make_fabric(accelerator: str, precision: Any = "32-true") -> Fabric:
    """The device and the arithmetic of a run, and the processes of torchrun or this one alone."""
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    devices, nodes = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    return Fabric(accelerator=accelerator, devices=devices, num_nodes=nodes, precision=precision)


class Recorder:
    """What a program notes while :func:`fit` trains; its state is part of the checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state of a checkpoint."""

    def after_step(self, step: int) -> str:
        """Notes a step, counted from 1; returns words for the progress bar, if there are new ones."""
        return ""

    def after_save(self) -> None:
        """Writes what belongs to a checkpoint that was just written; the first process calls it."""


class Signals:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request to stop after a step; the second exits at once."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> "Signals":
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        self.before = {number: signal.getsignal(number) for number in numbers}
        for number, handler in self.before.items():
            if handler != signal.SIG_IGN:  # as below nohup
                signal.signal(number, self.receive)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, frame: Any) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number
        os.write(2, b"\nStopping after this step. A second signal stops at once.\n")


def fit(
    model: torch.nn.Module,
    sparsifier: Sparsifier | None,
    run: Any,
    path: Path,
    losses: Callable[[int], Tensor | Parts],
    measure: Callable[[], list[Row]],
    *,
    optimizer: tuple[torch.optim.Optimizer, Any] | None = None,
    score: Callable[[Row], float] | None = None,
    best_path: Path | None = None,
    evaluate_every: int = 0,
    measure_first: bool = False,
    save_every: int = 0,
    clip_norm: float = 1.0,
    recorder: Recorder | None = None,
    fabric: Fabric | None = None,
    title: str = "",
    way_out: str = AGAIN,
) -> list[Row]:
    """Trains a model, or resumes from its checkpoint; returns the rows of all evaluations, with "step", "loss" and "seconds".

    Checkpoints follow evaluations, and come every two minutes between them. A signal to stop ends the run after its step, with a checkpoint.
    With a sparsifier, a picture of its losses is saved next to the checkpoint.

    Args:
        sparsifier: Takes the model from dense attention to sparse, or None.
        run: A dataclass that decides the outcome, with ``steps``, and what :func:`make_optimizer` and ``evaluations`` need.
        path: Of the checkpoint.
        losses: The loss of a step, counted from 0; or functions of its equal parts, of which one is in memory at a time.
        measure: Rows of an evaluation.
        optimizer: With its schedule; by default that of :func:`make_optimizer`.
        score: Of the first row of an evaluation. The state with the largest score, the first of equals, is saved, too.
        best_path: Of that state; by default next to the checkpoint, with the suffix ".best.pt".
        evaluate_every: Steps between evaluations; 0: there are ``run.evaluations``.
        measure_first: Whether an evaluation comes before the first step. It has no score.
        save_every: Steps between checkpoints, in the place of two minutes.
        clip_norm: Largest norm of the gradient; 0: any.
        fabric: Device, precision and processes; by default those that the model and this process have.
        title: Of the progress bar.
        way_out: What to do about a damaged checkpoint.

    Raises:
        RunError: The loss, the weights or the activations are no longer finite; no row or checkpoint holds them.
        SystemExit: A signal has stopped the run; the code is 128 and the number of the signal.
    """
    alone = fabric is None
    fabric = fabric or Fabric(accelerator="cpu", devices=1)
    if not alone:
        fabric.to_device(model)
    rank, count = fabric.global_rank, fabric.world_size
    if count > 1:
        sync_statistics(model)
    recorder = recorder or Recorder()
    adam, rate = optimizer or make_optimizer(model, run)
    parts: dict[str, Any] = {"model": model, "optimizer": adam, "rate": rate, "recorder": recorder}
    parts |= {"sparsifier": sparsifier} if sparsifier else {}
    rows: list[Row] = []
    step, seconds, best = 0, 0.0, -math.inf
    title, best_path = title or path.stem, best_path or path.with_suffix(".best.pt")
    if state := read_state(path, dataclasses.asdict(run), way_out):
        for name, part in parts.items():
            part.load_state_dict(state[name])
        rows, step, seconds, best = state["rows"], state["step"], state["seconds"], state["best"]
        torch.set_rng_state(state["random"][0])  # of dropout
        for number, random in enumerate(state["random"][1 : 1 + torch.cuda.device_count()]):
            torch.cuda.set_rng_state(random, number)
    saved = time.perf_counter()
    began = saved - seconds
    evaluation_period = evaluate_every or max(1, run.steps // run.evaluations)

    def diverged(what: str) -> RunError:
        words = (
            f"Expected the {what} to stay finite (got NaN or inf at step {step:,} of {title}): training has diverged."
        )
        return RunError(f"{words} Take a lower --learning-rate, and another --output.")

    def is_finite() -> bool:
        return bool(torch.stack([parameter.detach().sum().isfinite() for parameter in model.parameters()]).all())

    def evaluate(loss: float) -> list[Row]:
        model.eval()
        with torch.no_grad(), fabric.autocast():
            measured = measure()
        model.train()
        return [{**row, "step": step, "loss": loss, "seconds": time.perf_counter() - began} for row in measured]

    def differentiate() -> Tensor:
        """Adds the gradient of the parts of this process; returns their mean loss."""
        with fabric.autocast():
            loss = losses(step)
        adam.zero_grad()
        computed = []
        functions = [lambda: loss] if isinstance(loss, Tensor) else loss[rank::count]
        for function in functions:
            with fabric.autocast():
                part = function()
                total = part + auxiliary_loss(model)
            (total / len(functions)).backward()
            computed.append(part.detach())
        if count > 1:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            joined: Any = fabric.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]))
            for gradient, shared in zip(
                gradients, joined.split([gradient.numel() for gradient in gradients]), strict=True
            ):
                gradient.copy_(shared.view_as(gradient))
        return torch.stack(computed).mean()

    model.train()
    bar = tqdm(total=run.steps, initial=step, desc=title, unit="step", disable=rank > 0)
    with flushed_subnormals(), Signals() as signals, bar:
        if measure_first and not state:
            rows += evaluate(math.nan)
        while step < run.steps:
            try:
                loss = differentiate()
            except ValueError as error:
                if isinstance(error, RunError) or ("to be finite" not in str(error) and is_finite()):
                    raise
                raise diverged("activations") from error
            if clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            adam.step()
            rate.step()
            stop, late = signals.number, time.perf_counter() - saved > PAUSE
            if count > 1:
                loss = fabric.all_reduce(loss)  # type: ignore[assignment]
                highest: Any = fabric.all_reduce(torch.tensor([stop, late], device=fabric.device), reduce_op="max")
                stop, late = highest.tolist()
            if sparsifier:
                try:
                    sparsifier.step(loss)
                except ValueError as error:
                    raise diverged("loss") from error
            step += 1
            bar.update()
            if words := recorder.after_step(step):
                bar.set_postfix_str(words)
            evaluates = step % evaluation_period == 0 or step == run.steps
            if evaluates or stop or (step % save_every == 0 if save_every else late):
                value = loss.item()
                if not (math.isfinite(value) and is_finite()):
                    raise diverged("weights" if math.isfinite(value) else "loss")
                is_best = False
                if evaluates:
                    measured = evaluate(value)
                    rows += measured
                    if is_best := score is not None and score(measured[0]) > best:
                        best = score(measured[0])
                    bar.set_postfix_str(words or str(sparsifier or f"loss {value:.3f}"))
                saved = time.perf_counter()
                state = {name: part.state_dict() for name, part in parts.items()}
                state |= {"run": dataclasses.asdict(run), "rows": rows, "step": step, "seconds": saved - began}
                state |= {"best": best, "random": [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]}
                if rank == 0:
                    if is_best:
                        write_checkpoint(best_path, state)
                    write_checkpoint(path, state)
                    recorder.after_save()
                if count > 1:
                    fabric.barrier()  # torchrun ends all when the first ends
                give_memory_back()
                if stop and step < run.steps:
                    raise SystemExit(128 + stop)
    if sparsifier and sparsifier.history and rank == 0:
        save_figure(path.with_suffix(".png"), plots.plot_losses(sparsifier.history))
    return rows


def give_memory_back() -> None:
    """Gives freed memory back to the system (GNU's C library): without it, a process that needs 1 GiB may hold 12 after an hour."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def make_sparsifier(model: torch.nn.Module, density: float, control: str, steps: int) -> Sparsifier | None:
    """What takes a model to a target density: a Sparsifier; or None, if it is there from the start ("fixed") or has none ("none")."""
    if control == "sparsifier":
        return Sparsifier(model, density, total_steps=steps)
    for source in model.modules():
        if control == "fixed" and isinstance(source, DensitySource):
            source.target_density = density
    return None


def train_missing(
    folder: Path, program: str, settings: Mapping[str, Any], runs: Sequence[Any], train: Callable[[Any], list[Row]]
) -> None:
    """Adds the rows of runs to ``rows.csv`` in the folder of a program; runs whose ``identity`` is there are left out."""
    path = folder / "rows.csv"
    with claim(folder, program, settings):
        for run in runs:
            if not any(all(row[name] == value for name, value in run.identity.items()) for row in read(path)):
                columns = {
                    name: str(value) for name, value in run.identity.items()
                }  # with all digits, to be found again
                add(path, [row | columns for row in train(run)])


def file_name(*words: Any) -> str:
    """The name of a checkpoint, without characters that shells take for their own."""
    return "-".join(map(str, words)).translate(str.maketrans(":= /", "+_-_")) + ".pt"
