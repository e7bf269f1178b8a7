"""Trains models of recall, one for each task, method, density and seed; ``rows.csv`` gets a row for each size of the test at each evaluation."""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.common.fit import file_name, fit, make_sparsifier, train_missing
from examples.common.hybrid import Recaller, beyond, make_recaller, run_name
from examples.common.runs import settings_of
from examples.common.tables import Row
from examples.recall.tasks import TASKS, Examples
from sbm_pyg import Sparsifier


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides the outcome of a run."""

    task: str
    method: str  # and its options: "sbm:estimator=local"
    density: float
    seed: int
    steps: int
    batch_size: int
    learning_rate: float
    channels: int = 64
    layers: int = 2
    heads: int = 1
    weight_decay: float = 0.1
    evaluations: int = 10

    @property
    def name(self) -> str:
        return run_name(self.method, self.density)

    @property
    def known(self) -> Row:
        """The cells that name the run in rows."""
        return {"task": self.task, "run": self.name, "seed": self.seed}

    @property
    def file(self) -> str:
        return file_name(self.task, self.method, self.density, self.seed)


def make_model(run: Run) -> tuple[Recaller, Sparsifier | None]:
    """A model, and what makes it sparse."""
    task = TASKS[run.task]
    model, options = make_recaller(run, task.num_tokens, width=task.width)
    return model, make_sparsifier(model, run.density, options["control"] if options else "none", run.steps)


class Batches:
    """Batches of training examples, each of one size; which they are follows from seed and step alone."""

    def __init__(self, run: Run) -> None:
        self.run, self.sizes = run, [*TASKS[run.task].examples("train", run.seed).values()]
        self.epoch: tuple[int, list[tuple[int, Tensor]]] = (-1, [])

    def __call__(self, step: int) -> Examples:
        """The batch of a step, counted from 0."""
        per_epoch = sum(len(each.tokens) // self.run.batch_size for each in self.sizes)
        number, place = divmod(step, per_epoch)
        if self.epoch[0] != number:
            random, found = torch.Generator().manual_seed(self.run.seed + 2**32 * (number + 1)), []
            for size, each in enumerate(self.sizes):
                chosen = torch.randperm(len(each.tokens), generator=random)
                parts = chosen.split(self.run.batch_size)
                found += [(size, part) for part in parts if len(part) == self.run.batch_size]
            self.epoch = number, [found[at] for at in torch.randperm(len(found), generator=random)]
        size, chosen = self.epoch[1][place]
        return self.sizes[size].take(chosen)


def evaluate(model: Recaller, examples: Examples, batch_size: int = 32) -> Row:
    """Accuracy; for each layer its density beyond self-loops, and how many questions have an edge to the value that answers them.

    Full attention has every edge.
    """
    layers = len(model.layers)
    right, density, found = [], [], []
    for part in torch.arange(len(examples.tokens)).split(batch_size):
        tokens, places, answers, sources = examples.take(part)
        logits, choices = model(tokens, places, seed=int(part[0]))
        right.append((logits.argmax(2) == answers).double().mean())
        start = torch.arange(len(part))[:, None] * tokens.size(1)
        pairs = torch.stack([(sources + start).flatten(), (places + start).flatten()])
        shares, hits = [1.0] * layers, [torch.ones(pairs.size(1), dtype=torch.bool)] * layers
        for layer, choice in enumerate(choices):
            if choice is not None:
                graph, head = choice.graph, torch.arange(choice.graph.heads)[:, None]
                shares[layer] = beyond(graph)
                held = graph.contains(pairs.repeat(1, graph.heads), head.expand(-1, pairs.size(1)).flatten())
                hits[layer] = held.view(graph.heads, -1).any(0)
        density.append(shares)
        found.append([*(float(hit.double().mean()) for hit in hits), float(torch.stack(hits).any(0).double().mean())])
    row = {"accuracy": float(torch.stack(right).mean())}
    row |= {f"density_{layer}": value for layer, value in enumerate(torch.tensor(density).double().mean(0).tolist())}
    names = [*(f"answer_{layer}" for layer in range(layers)), "answer_any"]
    return row | dict(zip(names, torch.tensor(found).double().mean(0).tolist(), strict=True))


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
            known = {"length": test.tokens.size(1), "size": " x ".join(map(str, size))}
            rows.append(run.known | known | evaluate(model, test))
        return rows

    return fit(model, sparsifier, run, folder / run.file, losses, measure)


def train_all(runs: list[Run], folder: Path) -> None:
    settings = {name: value for run in runs for name, value in settings_of(run, run.task, ["layers"]).items()}
    train_missing(folder, "recall", settings, runs, lambda run: train(run, folder))
