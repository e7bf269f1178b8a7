"""The training loop that programs share: from a model and its losses to rows of evaluations, with checkpoints to go on from."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.common.pictures import save_figure
from examples.common.runs import RunError, claim, read_state, write_checkpoint
from examples.common.tables import Row, add, read
from sbm_pyg import DensitySource, Sparsifier, auxiliary_loss
from sbm_pyg.analysis import plots
from sbm_pyg.info import tqdm
from sbm_pyg.ops.cpu.threads import flushed_subnormals

WARMUP, DECAY = 0.05, 0.3  # parts of the steps in which the learning rate rises, and falls to 0
PAUSE = 120.0  # seconds after which a checkpoint is written even without an evaluation


def trapezoid(time: float) -> float:
    """Factor of the learning rate from the part of the steps that is over: it rises, stays, and falls."""
    return min(time / WARMUP, 1.0, (1 - time) / DECAY)


def fit(
    model: torch.nn.Module,
    sparsifier: Sparsifier | None,
    run: Any,
    path: Path,
    losses: Callable[[int], Tensor],
    measure: Callable[[], list[Row]],
    rate_at: Callable[[float], float] = trapezoid,
    source_rate: float = 1.0,
    best: str | None = None,
) -> list[Row]:
    """Trains a model, or goes on from its checkpoint; returns the rows of all evaluations, with "step", "loss" and "seconds".

    Checkpoints follow evaluations, and come every two minutes between them.
    With a sparsifier, a picture of its losses is saved next to the checkpoint.

    Args:
        sparsifier: Takes the model from dense attention to sparse, or None.
        run: A dataclass that decides the outcome, with ``steps``, ``learning_rate``, ``weight_decay`` and ``evaluations``.
        path: Of the checkpoint.
        losses: The loss of a step, counted from 0.
        measure: Rows of an evaluation.
        rate_at: Factor of the learning rate, from the part of the steps that is over.
        source_rate: Factor of the learning rate of graph sources.
        best: A column of rows, of which each evaluation then has one. The weights of its largest value, the first of equals, are saved
            next to the checkpoint, with the suffix ".best.pt".

    Raises:
        RunError: The loss is no longer finite at a checkpoint; no row of it is kept.
    """
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (run.weight_decay, 0.0)]
    groups[1]["lr"] = source_rate * run.learning_rate
    for name, parameter in model.named_parameters():
        groups[".source." in name]["params"].append(parameter)
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], run.learning_rate)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at((step + 1) / (run.steps + 1)))
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "rate": rate}
    parts |= {"sparsifier": sparsifier} if sparsifier else {}
    rows: list[Row] = []
    step, seconds = 0, 0.0
    if state := read_state(path, dataclasses.asdict(run)):
        for name, part in parts.items():
            part.load_state_dict(state[name])
        rows, step, seconds = state["rows"], state["step"], state["seconds"]
        torch.set_rng_state(state["random"][0])  # of dropout
        for number, random in enumerate(state["random"][1 : 1 + torch.cuda.device_count()]):
            torch.cuda.set_rng_state(random, number)
    saved = time.perf_counter()
    began = saved - seconds
    every = max(1, run.steps // run.evaluations)
    with flushed_subnormals(), tqdm(total=run.steps, initial=step, desc=path.stem, unit="step") as bar:
        while step < run.steps:
            loss = losses(step)
            optimizer.zero_grad()
            (loss + auxiliary_loss(model)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
            if sparsifier:
                sparsifier.step(loss)
            step += 1
            bar.update()
            if (evaluates := step % every == 0 or step == run.steps) or time.perf_counter() - saved > PAUSE:
                value = loss.item()
                if not math.isfinite(value):
                    words = f"Expected the loss to stay finite (got {value} at step {step:,} of {path.stem}): training has diverged."
                    raise RunError(f"{words} Take a lower --learning-rate, and another --output.")
                found = []
                if evaluates:
                    model.eval()
                    with torch.no_grad():
                        found = measure()
                        if best and all(found[0][best] > row[best] for row in rows):
                            kept = {"run": dataclasses.asdict(run), best: found[0][best], "model": model.state_dict()}
                            write_checkpoint(path.with_suffix(".best.pt"), kept)
                    model.train()
                    bar.set_postfix_str(str(sparsifier or f"loss {value:.3f}"))
                saved = time.perf_counter()
                rows += [{**row, "step": step, "loss": value, "seconds": saved - began} for row in found]
                state = {name: part.state_dict() for name, part in parts.items()}
                state |= {"run": dataclasses.asdict(run), "rows": rows, "step": step, "seconds": saved - began}
                write_checkpoint(path, state | {"random": [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]})
    if sparsifier and sparsifier.history:
        save_figure(path.with_suffix(".png"), plots.plot_losses(sparsifier.history))
    return rows


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
    """Adds the rows of runs to ``rows.csv`` in the folder of a program; runs whose ``known`` cells are there are left out."""
    path = folder / "rows.csv"
    with claim(folder, program, settings):
        for run in runs:
            if not any(all(row[name] == value for name, value in run.known.items()) for row in read(path)):
                known = {name: str(value) for name, value in run.known.items()}  # with all digits, to be found again
                add(path, [row | known for row in train(run)])


def file_name(*words: Any) -> str:
    """The name of a checkpoint, without characters that shells take for their own."""
    return "-".join(map(str, words)).translate(str.maketrans(":= /", "+_-_")) + ".pt"
