"""Trains one model for each task, method, start, density and seed; ``rows.csv`` gets a row for each size of the test at each evaluation."""

from __future__ import annotations

import dataclasses
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.arena import methods, tasks
from examples.common.fit import file_name, fit, train_missing
from examples.common.hybrid import Recaller, TaskRun, evaluate, is_dense, paired
from examples.common.runs import checksums, settings_of_all
from examples.common.tables import Row
from examples.common.tasks import Examples, Task
from sbm_pyg import AttentionConv, SBMSource, Sparsifier
from sbm_pyg.training.estimators import Concrete

LEAST_TEMPERATURE = 0.1
DENSE_PART = 0.7  # of the steps, where runs begin dense
TOKENS = 4096  # of a batch in an evaluation


@dataclasses.dataclass(frozen=True)
class Run(TaskRun):
    start: str = "dense"  # or "sparse"
    evaluations: int = 4

    @property
    def identity(self) -> Row:
        """The cells that name the run in rows."""
        return {name: getattr(self, name) for name in ("task", "method", "start", "density", "seed")}

    @property
    def file(self) -> str:
        return file_name(self.task, self.method, self.start, self.density, self.seed)


def make_model(run: Run) -> tuple[Recaller, Sparsifier | None]:
    """The paired model of a run, and what sets its target densities; full attention has none."""
    task = tasks.find(run.task)

    def make(run: Run) -> Recaller:
        torch.manual_seed(run.seed)
        sizes = (run.channels, run.heads, run.density, run.layers)
        attention = partial(methods.make_scheduled_attention, run.method, *sizes)
        model = Recaller(task.num_tokens, run.channels, run.layers, attention, width=task.width, slots=task.slots)
        methods.share(model)
        return model

    model = paired(run, make)
    if is_dense(run.method):
        return model, None
    part = DENSE_PART if run.start == "dense" else 0.0
    return model, Sparsifier(model, run.density, total_steps=run.steps, dense_part=part)


def batch_of(task: Task, seed: int, step: int, batch_size: int) -> Examples:
    """The training batch of a step, a function of the arguments alone, for up to 2,048 seeds of 2^20 steps.

    Generators keep 32 bits of a seed. Those of batches lie above 2^31, and those of tests are small.
    """
    sizes = [size for size, parts in task.train.items() for _ in range(parts)]
    random = torch.Generator().manual_seed(2**31 + 2**20 * (seed % 2**11) + step)
    return task.make(*sizes[step % len(sizes)], task.num_tokens, batch_size, random)


class Clock:
    """Processor time of training steps and of inference, in milliseconds, since the last evaluation."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.steps: list[float] = []
        self.passes = 0.0
        self.began = 0.0
        model.register_forward_pre_hook(self._start)
        model.register_forward_hook(self._stop)

    def step(self) -> None:
        self.steps.append(time.process_time())

    def _start(self, *_: Any) -> None:
        self.began = time.process_time()

    def _stop(self, model: torch.nn.Module, *_: Any) -> None:
        if not model.training:
            self.passes += 1000 * (time.process_time() - self.began)

    def take(self) -> float:
        """The median time of a training step, which ends where the next step or an evaluation begins."""
        self.step()
        milliseconds = [1000 * (after - before) for before, after in zip(self.steps, self.steps[1:], strict=False)]
        self.steps = []
        return statistics.median(milliseconds)


def train(run: Run, folder: Path) -> list[Row]:
    """Trains one model of a task, or goes on from its checkpoint; returns the rows of all evaluations."""
    model, sparsifier = make_model(run)
    task = tasks.find(run.task)
    tests = task.tests()
    soft = [m.estimator for m in model.modules() if isinstance(m, AttentionConv) and isinstance(m.estimator, Concrete)]
    follows = any(isinstance(m, SBMSource) for m in model.modules())  # pairs keep their probabilities of training
    clock, trained = Clock(model), max(batch_of(task, 0, step, 1).tokens.size(1) for step in range(len(task.train)))

    def losses(step: int) -> Tensor:
        clock.step()
        for estimator in soft:
            estimator.temperature = LEAST_TEMPERATURE ** (step / run.steps)
        tokens, places, answers, _ = batch_of(task, run.seed, step, run.batch_size)
        logits = model(tokens, places, seed=run.steps * run.seed + step)[0]
        return cross_entropy(logits.flatten(0, 1), answers.flatten())

    def measure() -> list[Row]:
        spent, rows = clock.take(), []
        for size, test in tests.items():
            length = test.tokens.size(1)
            if sparsifier and not follows:  # a query has as many edges as at the longest sequence of training
                sparsifier.set_density(run.density * min(1.0, (trained - 1) / (length - 1)))
            clock.passes = 0.0
            scores = evaluate(model, test, max(1, min(32, TOKENS // length)))
            columns = {"length": length, "size": " x ".join(map(str, size))}
            rows.append(
                run.identity | columns | scores | {"train_ms": spent, "infer_ms": clock.passes / len(test.tokens)}
            )
        if sparsifier:
            sparsifier.set_density()
        return rows

    return fit(model, sparsifier, run, folder / run.file, losses, measure)


def train_all(runs: list[Run], folder: Path) -> None:
    """Trains the runs whose rows are missing in a folder."""
    settings = settings_of_all(runs, "task", runs[0].identity) | methods.code_of([run.method for run in runs])
    texts = {run.task for run in runs if run.task not in tasks.TASKS}
    settings |= checksums(**{name: [Path(name)] for name in sorted(texts)})
    train_missing(folder, "arena", settings, runs, lambda run: train(run, folder))
