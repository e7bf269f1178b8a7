"""Trains models of recall, one for each task, method, density and seed; ``rows.csv`` gets a row for each size of the test at each evaluation."""

import dataclasses
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.common.command import require
from examples.common.fit import file_name, fit, make_sparsifier, train_missing
from examples.common.hybrid import Recaller, TaskRun, control_of, evaluate, make_recaller, paired, run_name
from examples.common.runs import settings_of_all
from examples.common.tables import Row
from examples.common.tasks import TASKS, Examples
from sbm_pyg import Sparsifier


@dataclasses.dataclass(frozen=True)
class Run(TaskRun):
    evaluations: int = 10

    @property
    def name(self) -> str:
        return run_name(self.method, self.density)

    @property
    def identity(self) -> Row:
        """The cells that name the run in rows."""
        return {"task": self.task, "run": self.name, "seed": self.seed}

    @property
    def file(self) -> str:
        return file_name(self.task, self.method, self.density, self.seed)


def make_model(run: Run) -> tuple[Recaller, Sparsifier | None]:
    """A paired model, and what makes it sparse."""
    task = TASKS[run.task]
    model = paired(run, partial(make_recaller, num_tokens=task.num_tokens, width=task.width))
    return model, make_sparsifier(model, run.density, control_of(run.method), run.steps)


class Batches:
    """Batches of training examples, each of one size; which they are follows from seed and step alone."""

    def __init__(self, run: Run) -> None:
        self.run, self.sizes = run, [*TASKS[run.task].examples("train", run.seed).values()]
        most = max(len(examples.tokens) for examples in self.sizes)
        require(
            run.batch_size <= most,
            f"'batch-size' of at most {most:,}, the examples of a size",
            run.batch_size,
            "Take fewer.",
        )
        self.epoch: tuple[int, list[tuple[int, Tensor]]] = (-1, [])

    def __call__(self, step: int) -> Examples:
        """The batch of a step, counted from 0."""
        per_epoch = sum(len(examples.tokens) // self.run.batch_size for examples in self.sizes)
        number, place = divmod(step, per_epoch)
        if self.epoch[0] != number:
            random, batches = torch.Generator().manual_seed(self.run.seed + 2**32 * (number + 1)), []
            for size, examples in enumerate(self.sizes):
                chosen = torch.randperm(len(examples.tokens), generator=random)
                parts = chosen.split(self.run.batch_size)
                batches += [(size, part) for part in parts if len(part) == self.run.batch_size]
            self.epoch = number, [batches[at] for at in torch.randperm(len(batches), generator=random)]
        size, chosen = self.epoch[1][place]
        return self.sizes[size].take(chosen)


def train(run: Run, folder: Path) -> list[Row]:
    """Trains one model of a task, or goes on from its checkpoint; returns the rows of all evaluations."""
    model, sparsifier = make_model(run)
    batches, tests = Batches(run), TASKS[run.task].examples("test")

    def losses(step: int) -> Tensor:
        tokens, places, answers, _ = batches(step)
        logits = model(tokens, places, seed=run.steps * run.seed + step)[0]
        return cross_entropy(logits.flatten(0, 1), answers.flatten())

    def measure() -> list[Row]:
        rows = []
        for size, test in tests.items():
            columns = {"length": test.tokens.size(1), "size": " x ".join(map(str, size))}
            rows.append(run.identity | columns | evaluate(model, test))
        return rows

    return fit(model, sparsifier, run, folder / run.file, losses, measure)


def train_all(runs: list[Run], folder: Path) -> None:
    train_missing(folder, "recall", settings_of_all(runs, "task"), runs, lambda run: train(run, folder))
