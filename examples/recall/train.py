"""Trains models of recall, one for each task, method, density and seed, and keeps what was measured on the way.

In: what to run. Out: ``rows.csv``, a row for each size of the test at each evaluation of a run that ended, and checkpoints, with
which the same command goes on. Not here: tables and figures (``report.py``).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.benchmarks.tables import Row, add, read
from examples.common.runs import claim, read_state, settings_of, write_checkpoint
from examples.recall.model import DENSE, METHODS, OPTIONS, Recaller, make_attention
from examples.recall.tasks import TASKS, Examples
from sbm_pyg import AttentionGraph, ShareSchedule, auxiliary_loss
from sbm_pyg.info import tqdm
from sbm_pyg.ops.cpu.threads import flushed_subnormals

CONTROLS = ("schedule", "share", "none")
WARMUP, DECAY = 0.05, 0.3  # shares of the steps in which the learning rate rises, and falls to nothing


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
        """Of the run, without the seed."""
        return self.method if self.method.partition(":")[0] in DENSE else f"{self.method} {100 * self.density:g} %"

    @property
    def file(self) -> str:
        """Name of its checkpoint."""
        words = "-".join(str(part) for part in (self.task, self.method, self.density, self.seed))
        return words.replace(":", "+").replace("=", "_") + ".pt"


def read_method(
    method: str, methods: Sequence[str], usual: Mapping[str, Mapping[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """Kind and options of one of some methods, of which some have options, with what these usually are.

    >>> read_method("sbm:probes=8", ("full", "sbm"), {"sbm": {"probes": 16.0, "estimator": "local"}})
    ('sbm', {'probes': 8.0, 'estimator': 'local'})

    Raises:
        ValueError: There is no such method, or it has no such option.
    """
    kind, _, own = method.partition(":")
    if kind not in methods:
        raise ValueError(f"Expected 'methods' among {', '.join(methods)} (got {kind!r}). See --help.")
    options = dict(usual.get(kind, {}))
    for pair in filter(None, own.split(",")):
        name, _, value = pair.partition("=")
        if name not in options or not value:
            known = ", ".join(f"{name}={value}" for name, value in options.items()) or "none"
            raise ValueError(f"Expected options of {kind!r} in 'methods' among {known} (got {method!r}).")
        try:
            options[name] = type(options[name])(value)
        except ValueError:
            raise ValueError(
                f"Expected option {name!r} of 'methods' to be a number (got {value!r}). See --help."
            ) from None
    return kind, options


def options_of(method: str) -> tuple[str, dict[str, Any]]:
    """Kind and options of a method.

    >>> options_of("sbm:estimator=local,probes=8")[1]["probes"]
    8.0

    Raises:
        ValueError: There is no such method, or it has no such option.
    """
    kind, options = read_method(method, METHODS, OPTIONS)
    if options and options["control"] not in CONTROLS:
        raise ValueError(
            f"Expected option 'control' of 'methods' among {', '.join(CONTROLS)} (got {options['control']!r})."
        )
    return kind, options


def make_recaller(run: Any, num_tokens: int, window: int = 0, width: int = 3) -> tuple[Recaller, dict[str, Any] | None]:
    """The model of a run, and the options of its method if shares of the pairs are to be set; else None.

    ``window`` is that of the block models and indexers, ``width`` that of the convolution.
    """
    torch.manual_seed(run.seed)
    kind, options = options_of(run.method)

    def make() -> torch.nn.Module:
        return make_attention(kind, run.channels, run.heads, run.density, {**options, "window": window})

    model = Recaller(num_tokens, run.channels, run.layers, make, width=width)
    return model, options if options and options["control"] != "none" else None


def make_model(run: Run) -> tuple[Recaller, ShareSchedule | None]:
    """A model, and what sets its density."""
    task = TASKS[run.task]
    model, options = make_recaller(run, task.num_tokens, width=task.width)
    if options is None:
        return model, None
    schedule = ShareSchedule(model, run.density, threshold=options["threshold"], rate=options["rate"])
    if options["control"] == "share":
        schedule.load_state_dict({"share": run.density, "running": None})
    return model, schedule


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
                found += [
                    (size, part) for part in chosen.split(self.run.batch_size) if len(part) == self.run.batch_size
                ]
            self.epoch = number, [found[at] for at in torch.randperm(len(found), generator=random)]
        size, chosen = self.epoch[1][place]
        return self.sizes[size].take(chosen)


def beyond(graph: AttentionGraph) -> float:
    """Density of the pairs beyond self-loops, which all are in the graph."""
    loops = graph.heads * graph.num_queries
    return (graph.num_edges - loops) / (graph.heads * float(graph.pairs_per_sequence.sum()) - loops)


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


def trapezoid(time: float) -> float:
    """Factor of the learning rate, from the share of the steps that are over: it rises, stays, and falls."""
    return min(time / WARMUP, 1.0, (1 - time) / DECAY)


def fit(
    model: torch.nn.Module,
    schedule: ShareSchedule | None,
    run: Any,
    path: Path,
    losses: Callable[[int], Tensor],
    measure: Callable[[], list[Row]],
    rate_at: Callable[[float], float] = trapezoid,
) -> list[Row]:
    """Trains a model, or goes on from its checkpoint.

    Args:
        model: The model.
        schedule: What lowers the shares of its sources, or None.
        run: A dataclass: everything that decides the outcome; its ``steps``, ``learning_rate``, ``weight_decay`` and
            ``evaluations`` are read here.
        path: Of the checkpoint.
        losses: The loss of a step, counted from 0.
        measure: Rows of an evaluation.
        rate_at: Factor of the learning rate, from the share of the steps that are over.

    Returns:
        Rows of all evaluations, with "step", "loss" and "seconds".

    Raises:
        RunError: The checkpoint is damaged or that of other settings, or there is no room for it.
    """
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (run.weight_decay, 0.0)]
    for name, parameter in model.named_parameters():
        groups[".source." in name]["params"].append(parameter)
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], run.learning_rate)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at((step + 1) / (run.steps + 1)))
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "rate": rate}
    parts |= {"schedule": schedule} if schedule else {}
    rows: list[Row] = []
    step, seconds = 0, 0.0
    if state := read_state(path, dataclasses.asdict(run)):
        for name, part in parts.items():
            part.load_state_dict(state[name])
        rows, step, seconds = state["rows"], state["step"], state["seconds"]
        torch.set_rng_state(state["random"])  # of dropout
    began = time.perf_counter() - seconds
    every = max(1, run.steps // run.evaluations)
    with flushed_subnormals(), tqdm(total=run.steps, initial=step, desc=path.stem, unit="step") as bar:
        while step < run.steps:
            loss = losses(step)
            optimizer.zero_grad()
            (loss + auxiliary_loss(model)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
            if schedule:
                schedule.step(loss)
            step += 1
            bar.update()
            if step % every == 0 or step == run.steps:
                model.eval()
                with torch.no_grad():
                    found = measure()
                model.train()
                seconds = time.perf_counter() - began
                rows += [{**row, "step": step, "loss": loss.item(), "seconds": seconds} for row in found]
                share = f", share {schedule.share:.3f}" if schedule else ""
                bar.set_postfix_str(f"loss {loss.item():.3f}{share}")
                state = {name: part.state_dict() for name, part in parts.items()}
                state |= {"run": dataclasses.asdict(run), "rows": rows, "step": step, "seconds": seconds}
                write_checkpoint(path, state | {"random": torch.get_rng_state()})
    return rows


def train(run: Run, folder: Path) -> list[Row]:
    """Trains one model of a task, or goes on from its checkpoint; returns the rows of all evaluations."""
    model, schedule = make_model(run)
    batches, tests = Batches(run), TASKS[run.task].examples("test")

    def losses(step: int) -> Tensor:
        tokens, places, answers, _ = batches(step)
        logits = model(tokens, places, seed=run.steps * run.seed + step)[0]
        return cross_entropy(logits.flatten(0, 1), answers.flatten())

    def measure() -> list[Row]:
        known = {"task": run.task, "run": run.name, "seed": run.seed}
        return [
            {**known, "length": test.tokens.size(1), "size": " x ".join(map(str, size)), **evaluate(model, test)}
            for size, test in tests.items()
        ]

    return fit(model, schedule, run, folder / run.file, losses, measure)


def train_all(runs: list[Run], folder: Path) -> None:
    """Trains what ``rows.csv`` does not have yet.

    Raises:
        RunError: The folder is that of other settings, a file in it is damaged, or there is no room.
    """
    settings = {name: value for run in runs for name, value in settings_of(run, run.task, ["layers"]).items()}
    with claim(folder, "recall", settings):
        for run in runs:
            if not ended(folder, task=run.task, run=run.name, seed=run.seed):
                add(folder / "rows.csv", train(run, folder))


def ended(folder: Path, **name: Any) -> bool:
    """Says whether ``rows.csv`` has a run of that name."""
    return any(all(row[key] == value for key, value in name.items()) for row in read(folder / "rows.csv"))
