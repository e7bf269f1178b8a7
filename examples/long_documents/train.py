"""Trains one classifier of long documents for each method and seed.

In: the documents of :mod:`examples.long_documents.data`, and runs. Out: rows of accuracy by the number of parts. Not here: the command line.
"""

import dataclasses
import random
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.common.command import read_method
from examples.common.fit import file_name, fit, make_optimizer, train_missing
from examples.common.runs import fingerprint, settings_of
from examples.common.tables import Row
from examples.long_documents.data import Batch, Documents, Texts
from sbm_pyg import SequenceEncoder, Sparsifier, TokenClassifier

METHODS = ("full", "sbm", "random", "indexer", "window", "global")
OPTIONS: dict[str, dict[str, Any]] = {"sbm": {"num_clusters": 64}, "random": {"num_clusters": 64}}
SAMPLED = ("sbm", "random", "indexer")
WINDOW = 8  # tokens on each side that sampled graphs have too
SHORTEST, LARGEST_BATCH = 15, 48  # tokens of a part, documents of a step
RATE_OF_SOURCES = 3.0  # of block models, relative to the learning rate


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides the outcome of a run, apart from the texts."""

    method: str
    density: float
    seed: int
    parts: int
    part_length: int
    steps: int
    batch_tokens: int
    channels: int
    layers: int
    heads: int
    learning_rate: float
    short_part: float
    dense_part: float
    dropout: float = 0.1
    weight_decay: float = 0.01
    evaluations: int = 1

    @property
    def name(self) -> str:
        return self.method if self.method in ("full", "global") else f"{self.method} {100 * self.density:g} %"

    @property
    def known(self) -> Row:
        return {"run": self.name, "seed": self.seed}

    @property
    def length(self) -> int:
        """Tokens of the longest document."""
        return self.parts * (self.part_length + 1) + 1


def make_model(run: Run, num_tokens: int) -> TokenClassifier:
    """The classifier of a run; it reads the first token of a document, as BERT does."""
    kind, options = read_method(run.method, METHODS, OPTIONS)
    half = round(run.density * run.length / 2)
    if kind in SAMPLED:
        options |= {"window": WINDOW} | ({"estimator": "none"} if kind == "random" else {})
    elif kind == "window":
        options = {"size": half}
    elif kind == "global":  # Longformer's way: it is known which token must read all
        options = {"size": half, "num_global": 1, "num_random": 0}
    names = {"random": "sbm", "global": "bigbird"}
    torch.manual_seed(run.seed)
    encoder = SequenceEncoder(
        num_tokens, run.channels, num_layers=run.layers, heads=run.heads, ffn_channels=4 * run.channels, dropout=run.dropout,
        attention=names.get(kind, kind), attention_options=options, position_encoding="rotary",
    )  # fmt: skip
    return TokenClassifier(encoder, 2)


def train(run: Run, texts: dict[str, Texts], num_tokens: int, tests: int, folder: Path) -> list[Row]:
    """Trains one model, or goes on from its checkpoint; returns its row of accuracy by the number of parts."""
    model = make_model(run, num_tokens)
    learns = run.method.partition(":")[0] in SAMPLED
    sparsifier = Sparsifier(model, run.density, run.steps, dense_part=run.dense_part) if learns else None
    documents = {part: Documents(own) for part, own in texts.items()}
    sizes = [2**power for power in range(run.parts.bit_length())]
    lengths = [run.part_length // 2**power for power in range(5) if run.part_length // 2**power >= SHORTEST]

    def logits(batch: Batch, seed: int, **options: Any) -> Any:
        return model(batch.tokens, batch.ptr, seed=seed, **options)

    def losses(step: int) -> Tensor:
        drawn = random.Random(f"{step} of {run.seed}")
        alone = step < run.short_part * run.steps  # single reviews at first: what an opinion is
        parts, length = (1, run.part_length) if alone else (drawn.choice(sizes), drawn.choice(lengths))
        count = min(LARGEST_BATCH, max(1, run.batch_tokens // (parts * (length + 1))))
        batch = documents["train"].draw(parts, length, count, f"{run.seed}-{step}")
        return cross_entropy(logits(batch, 2**32 * run.seed + step)[batch.ptr[:-1]], batch.labels)

    def measure() -> list[Row]:
        row: Row = dict(run.known)
        order = torch.randperm(len(texts["test"].reviews), generator=torch.Generator().manual_seed(0))[:tests]
        for parts in sizes:
            right, densities = 0, []
            for number, some in enumerate(order.split(run.parts // parts)):
                batch = documents["test"].of_reviews(parts, run.part_length, some.tolist())
                found, trace = logits(batch, number * (run.parts // parts), return_trace=True)
                right += int((found[batch.ptr[:-1]].argmax(1) == batch.labels).sum())
                densities.append(float(trace.density.mean()))
            row |= {f"accuracy_{parts}": right / len(order), f"density_{parts}": fmean(densities)}
        return [row]

    path = folder / file_name(run.method, run.density, run.seed)
    return fit(
        model, sparsifier, run, path, losses, measure, optimizer=make_optimizer(model, run, source_rate=RATE_OF_SOURCES)
    )


def train_all(runs: list[Run], texts: dict[str, Texts], num_tokens: int, tests: int, folder: Path) -> None:
    """Trains the runs whose rows are missing in a folder."""
    settings = settings_of(runs[0]) | {"tests": tests, "tokens": num_tokens}
    known: list[Tensor] = []
    for part in texts.values():
        known += [*(review for review, _ in part.reviews), *part.fillers, *chain(*part.sentences.values())]
    settings |= {"checksum of texts": fingerprint(tokens.numpy().tobytes() for tokens in known)}
    train_missing(folder, "long_documents", settings, runs, lambda run: train(run, texts, num_tokens, tests, folder))
