"""Trains vision transformers, one for each method and seed; the weights that are best in validation are tested, once.

The authors of the DCMM-Transformer report the best accuracy on the test set over all epochs. We hold images of the training set out, by seed and
with equal parts of all classes; the test set has no influence on when to stop.
"""

import dataclasses
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from operator import itemgetter
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.common.command import read_method
from examples.common.fit import file_name, fit, make_optimizer, make_sparsifier, train_missing
from examples.common.runs import RunError, fingerprint, read_state, settings_of
from examples.common.tables import Row
from examples.dcmm.data import Images, split
from examples.dcmm.model import METHODS, OPTIONS, Vision, load_weights, read_weights
from sbm_pyg import DCMMBias
from sbm_pyg.layers.dcmm import DCMM

WARMUP = 0.04  # share of the steps, 4 of 100 epochs as published
EVALUATED = 256  # images at once


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides the outcome of a run, apart from the images."""

    data: str
    method: str  # and its options: "dcmm:degree=softplus"
    seed: int
    bias: str  # "last" or "all": the blocks that have the method
    size: int | None
    patch: int
    channels: int
    layers: int
    heads: int
    ffn: int
    steps: int
    batch_size: int
    learning_rate: float
    validation: float
    weights: str | None = None
    smoothing: float = 0.1
    weight_decay: float = 1e-2
    evaluations: int = 20

    @property
    def name(self) -> str:
        return self.method + (" in all" if self.bias == "all" and self.method != "full" else "")

    @property
    def identity(self) -> Row:
        """The cells that name the run in rows."""
        return {"data": self.data, "run": self.name, "seed": self.seed}

    @property
    def file(self) -> str:
        return file_name(Path(self.data).name, self.name, self.seed)

    @property
    def best(self) -> str:
        """Name of the weights that are best in validation."""
        return str(Path(self.file).with_suffix(".best.pt"))


def make_model(run: Run, data: Images) -> Vision:
    torch.manual_seed(run.seed)
    sizes = {name: getattr(run, name) for name in ("patch", "channels", "layers", "heads", "ffn")}
    of = (run.method, (data.train.size(1), data.train.size(2)), len(data.classes))
    model = Vision(*of, **sizes, everywhere=run.bias == "all", equal=run.weights is None)
    pixels = data.train[split(data.train_labels, run.validation, run.seed)[0]].float() / 255
    model.mean.copy_(pixels.mean((0, 2, 3))[:, None, None])
    model.deviation.copy_(pixels.std((0, 2, 3))[:, None, None].clamp(min=1e-3))
    if run.weights:
        load_weights(model, read_weights(run.weights))
    return model


def cosine(time: float) -> float:
    """Factor of the learning rate from the part of the steps that is over: it rises, and falls as a cosine."""
    return min(time / WARMUP, 0.5 + 0.5 * math.cos(math.pi * max(0.0, time - WARMUP) / (1 - WARMUP)))


@torch.no_grad()
def evaluate(model: Vision, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy, and the mean density of the graphs."""
    hits, density = 0.0, 0.0
    for at, part in enumerate(torch.arange(len(images)).split(EVALUATED)):
        logits, graph_density = model(images[part], seed=at)
        hits += float((logits.argmax(1) == labels[part]).sum())
        density += len(part) * float(graph_density)
    return hits / len(images), density / len(images)


@torch.no_grad()
def idle(model: Vision, images: Tensor) -> float:
    """Share of the tokens, in all heads, whose degree in the bias is 0, so that it adds nothing; NaN without a bias."""
    shares: list[Tensor] = []

    def look(predict: Callable[[Tensor, Tensor], DCMM], query: Tensor, key: Tensor) -> DCMM:
        communities = predict(query, key)
        shares.append((communities.query_degree == 0).double().mean())
        return communities

    with ExitStack() as after:
        for bias in (module for module in model.modules() if isinstance(module, DCMMBias)):
            after.enter_context(patch.object(bias, "predict", partial(look, bias.predict)))
        for part in images.split(EVALUATED):
            model(part)
    return float(torch.stack(shares).mean()) if shares else math.nan


def train(run: Run, data: Images, folder: Path) -> list[Row]:
    """Trains a model, or goes on from its checkpoint; tests the best, and returns the rows of all evaluations."""
    model, options = make_model(run, data), read_method(run.method, METHODS, OPTIONS)[1]
    density = options.get("density")
    sparsifier = make_sparsifier(model, density or 1.0, options["control"] if density else "none", run.steps)
    trained, held_out = split(data.train_labels, run.validation, run.seed)
    batch = min(run.batch_size, len(trained))
    columns = run.identity | {"parameters": model.count()}

    def losses(step: int) -> Tensor:
        epoch, place = divmod(step, len(trained) // batch)
        order = torch.randperm(len(trained), generator=torch.Generator().manual_seed(run.seed + 2**32 * (epoch + 1)))
        chosen = trained[order[place * batch :][:batch]]
        logits = model(data.train[chosen], seed=run.steps * (run.seed + 1) + step)[0]
        return cross_entropy(logits, data.train_labels[chosen], label_smoothing=run.smoothing)

    def measure() -> list[Row]:
        accuracy, density = evaluate(model, data.train[held_out], data.train_labels[held_out])
        return [{**columns, "validation": accuracy, "density": density, "test": math.nan, "idle": math.nan}]

    optimizer = make_optimizer(model, run, cosine)
    rows = fit(
        model, sparsifier, run, folder / run.file, losses, measure, optimizer=optimizer, score=itemgetter("validation")
    )
    best = max(rows, key=lambda row: row["validation"])  # the first of equals, as is kept
    if load_best(run, model, folder) != best["validation"]:
        way_out = f"Delete {run.file} and run the same command again."
        raise RunError(f"Expected '{folder / run.best}' to hold the best weights of the run (got others). {way_out}")
    best["test"], best["density"] = evaluate(model, data.test, data.test_labels)
    best["idle"] = idle(model, data.test)
    return rows


def load_best(run: Run, model: Vision, folder: Path) -> float:
    """Gives a model the weights that are best in validation, and sets it to evaluation; returns their accuracy."""
    both = f"{run.best} and {run.file}"  # the first holds what was best before the step of the second
    way_out = f"It is damaged: take it from a backup, or delete {both} and run the same command again."
    if not (best := read_state(folder / run.best, dataclasses.asdict(run), way_out)):
        raise ValueError(f"Expected a run of these settings in {folder / run.best} (got none). Train it.")
    model.load_state_dict(best["model"])
    model.eval()
    return best["best"]


def train_all(runs: list[Run], data: Images, folder: Path) -> None:
    for run in runs:
        model = make_model(run, data)  # mistakes before the first run
        print(f"{run.name}, seed {run.seed}: {model.count():,} parameters")
    parts = (data.train, data.train_labels, data.test, data.test_labels)
    settings = {f"checksum of {runs[0].data}": fingerprint(part.numpy().tobytes() for part in parts)}
    for run in runs:
        settings |= settings_of(run, run.data)
    train_missing(folder, "dcmm", settings, runs, lambda run: train(run, data, folder))
