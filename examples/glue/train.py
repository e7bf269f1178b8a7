"""Pretraining of masked language models, and fine-tuning on tasks of GLUE: a row of ``rows.csv`` for each evaluation.

In: tokens of :mod:`examples.glue.data`, and runs. Out: rows, checkpoints and the best models. Not here: files and the command line.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.common.attention import layer_options
from examples.common.command import read_method, require
from examples.common.fit import file_name, fit, make_optimizer
from examples.common.runs import read_checkpoint
from examples.common.tables import Row
from examples.glue.data import MASK, SEPARATOR, START, Examples, Stream, Task
from sbm_pyg import MaskedLM, SequenceClassifier, SequenceEncoder, Sparsifier, mask_tokens
from sbm_pyg.sources.interface import Choice

METHODS = ("full", "sbm", "random", "window", "dcmm", "bigbird", "lsh", "routing")
LEARNED: dict[str, Any] = {
    "num_clusters": 128, "parameterization": "overlapping", "degree_corrected": 0, "window": -1, "estimator": "local",
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "sbm": LEARNED, "random": {"window": -1}, "window": {"size": -1}, "dcmm": {"num_clusters": 100},
    "bigbird": {"size": -1, "num_global": 2, "num_random": 3}, "lsh": {"num_buckets": 16, "chunk_size": 16},
    "routing": {"num_clusters": 8},
}  # fmt: skip
"""Options of methods and their usual values; a window or size of -1 is the window of the run."""
SPARSE = ("sbm", "random")  # have a target density
RATE_OF_SOURCES = 3.0  # of block models, relative to the learning rate


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides the outcome of pretraining, apart from the texts."""

    method: str
    density: float
    seed: int
    vocabulary: int
    length: int
    steps: int
    batch_tokens: int
    channels: int
    layers: int
    heads: int
    window: int
    learning_rate: float
    masking: float = 0.15
    """Part of the tokens to predict in training."""
    position_encoding: str = "learned"
    dropout: float = 0.1
    weight_decay: float = 0.01
    evaluations: int = 10

    @property
    def name(self) -> str:
        return f"{self.method} {100 * self.density:g} %" if self.method.partition(":")[0] in SPARSE else self.method

    @property
    def identity(self) -> Row:
        return {"run": self.name, "seed": self.seed}

    @property
    def file(self) -> str:
        return file_name(self.method, self.density, self.seed)


@dataclasses.dataclass(frozen=True)
class FineTune(Run):
    """Everything that decides the outcome of fine-tuning, apart from the files."""

    task: str = ""
    batch_size: int = 32
    scratch: bool = False
    """Whether the model starts without pretraining."""

    @property
    def identity(self) -> Row:
        start = "scratch" if self.scratch else "pretrained"
        return {"task": self.task, "run": self.name, "start": start, "seed": self.seed}

    @property
    def file(self) -> str:
        return file_name(self.task, self.identity["start"], self.method, self.density, self.seed)


def make_encoder(run: Run, num_tokens: int) -> SequenceEncoder:
    """The encoder of a run."""
    kind, options = read_method(run.method, METHODS, OPTIONS)
    sizes = {name: run.window for name in ("window", "size") if options.get(name) == -1}
    options = {**options, **sizes}
    if kind in SPARSE:
        options = LEARNED | {"estimator": "none"} | options  # block models of "random" have no options but the window
    options |= {} if kind in ("lsh", "routing") else {"dropout": run.dropout}
    torch.manual_seed(run.seed)
    return SequenceEncoder(
        num_tokens, run.channels, num_layers=run.layers, heads=run.heads, ffn_channels=4 * run.channels,
        max_length=run.length, dropout=run.dropout, attention="sbm" if kind == "random" else kind,
        attention_options=layer_options(options), position_encoding=run.position_encoding,
    )  # fmt: skip


def make_sparsifier(run: Run, model: torch.nn.Module, dense_part: float) -> Sparsifier | None:
    """What makes a model sparse, if its method has a target density."""
    if run.method.partition(":")[0] not in SPARSE:
        return None
    return Sparsifier(model, run.density, run.steps, dense_part=dense_part)


def unigram_bits(tokens: Tensor, num_tokens: int) -> float:
    """Entropy of single tokens, in bits: what a model that sees nothing would need."""
    share = torch.bincount(tokens.long(), minlength=num_tokens).double()
    share = share[share > 0] / share.sum()
    return float(-(share * share.log2()).sum())


def pretrain(run: Run, texts: Mapping[str, tuple[Tensor, Tensor]], tokenizer: Any, folder: Path) -> list[Row]:
    """Pretrains a model on masked tokens, or goes on from its checkpoint; returns the rows of all evaluations."""
    num_tokens, mask = tokenizer.get_vocab_size(), tokenizer.token_to_id(MASK)
    special = torch.tensor([tokenizer.token_to_id(token) for token in (START, SEPARATOR)])
    model = MaskedLM(make_encoder(run, num_tokens))
    sparsifier = make_sparsifier(run, model, dense_part=0.4)
    stream = Stream(*texts["train"], run.batch_tokens, run.seed)
    tests = Stream(*texts["test"], run.batch_tokens, 0)

    def losses(step: int) -> Tensor:
        tokens, ptr = stream[step]
        seed = 2**32 * run.seed + step
        inputs, is_masked = mask_tokens(tokens, mask, num_tokens, probability=run.masking, special=special, seed=seed)
        return cross_entropy(model(inputs, ptr, target_mask=is_masked, seed=seed), tokens[is_masked])

    def measure() -> list[Row]:
        nats, count, hits, densities = 0.0, 0, 0, []
        for number in range(tests.per_epoch):
            tokens, ptr = tests[number]
            inputs, is_masked = mask_tokens(tokens, mask, num_tokens, special=special, seed=number)
            logits, trace = model(inputs, ptr, target_mask=is_masked, seed=number, return_trace=True)
            nats += float(cross_entropy(logits, tokens[is_masked], reduction="sum").double())
            hits += int((logits.argmax(1) == tokens[is_masked]).sum())
            count += int(is_masked.sum())
            densities.append([edges(choice) for choice in trace.choices])
        bits = nats / count / math.log(2)
        row = run.identity | {"bits_per_token": bits, "perplexity": 2**bits, "accuracy": hits / count}
        return [row | _parts(densities)]

    return fit(
        model,
        sparsifier,
        run,
        folder / run.file,
        losses,
        measure,
        optimizer=make_optimizer(model, run, source_rate=RATE_OF_SOURCES),
    )


def edges(choice: Choice | None) -> tuple[float, float, float]:
    """Numbers of edges, of those that a window forces, and of pairs."""
    if choice is None or not choice.is_stored:
        return 1.0, 0.0, 1.0
    graph = choice.graph
    forced = 0 if choice.forced is None else int(choice.forced.sum())
    return graph.num_edges, forced, graph.heads * int(graph.pairs_per_sequence.sum())


def _parts(densities: list[list[tuple[float, float, float]]]) -> Row:
    """Densities of graphs, and of their sampled edges alone, in a mean over layers."""
    layers = [[sum(column) for column in zip(*layer, strict=True)] for layer in zip(*densities, strict=True)]
    whole = fmean(total / pairs for total, _, pairs in layers)
    return {"density": whole, "sampled_density": fmean((total - forced) / pairs for total, forced, pairs in layers)}


def finetune(
    run: FineTune, *, task: Task, data: Mapping[str, Examples], num_tokens: int, folder: Path, pretrained: Path,
    pretrained_seed: int = 0,
) -> list[Row]:  # fmt: skip
    """Trains a classifier on "train", or goes on from its checkpoint in a folder; returns the rows of all evaluations on dev sets.

    The model with the best accuracy on the first of the dev sets is saved next to the checkpoint, with "best" in its name.
    """
    encoder = make_encoder(run, num_tokens)
    if not run.scratch:
        load_encoder(encoder, pretrained / file_name(run.method, run.density, pretrained_seed), run)
    model = _make_classifier(run, task, encoder)
    sparsifier = make_sparsifier(run, model, dense_part=0.4 if run.scratch else 0.0)
    train = data["train"]
    per_epoch = -(-len(train) // run.batch_size)

    @lru_cache(maxsize=1)
    def order(epoch: int) -> Tensor:
        return torch.randperm(len(train), generator=torch.Generator().manual_seed(2**32 * run.seed + epoch))

    def losses(step: int) -> Tensor:
        epoch, batch = divmod(step, per_epoch)
        part = train.select(order(epoch)[batch * run.batch_size : (batch + 1) * run.batch_size])
        return cross_entropy(model(part.tokens, part.ptr, seed=2**32 * run.seed + step), part.labels)

    def measure() -> list[Row]:
        row = run.identity
        for name, examples in data.items():
            if name != "train":
                which = "" if name == task.dev[0] else f"_{name}"
                row |= {f"{key}{which}": value for key, value in evaluate(model, examples).items()}
        return [row]

    optimizer = make_optimizer(model, run, source_rate=RATE_OF_SOURCES)
    return fit(
        model, sparsifier, run, folder / run.file, losses, measure, optimizer=optimizer, score=itemgetter("accuracy")
    )


def _make_classifier(run: FineTune, task: Task, encoder: SequenceEncoder) -> SequenceClassifier:
    torch.manual_seed(run.seed)
    return SequenceClassifier(encoder, len(task.classes))


def load_best(path: Path, task: Task, num_tokens: int) -> tuple[FineTune, SequenceClassifier]:
    """The best model of a run that :func:`finetune` has saved, and the run."""
    state = read_checkpoint(path, "Fine-tune it again.")
    run = FineTune(**state["run"])
    model = _make_classifier(run, task, make_encoder(run, num_tokens))
    model.load_state_dict(state["model"])
    return run, model


def load_encoder(encoder: SequenceEncoder, path: Path, run: Run) -> None:
    """Loads the encoder of a pretrained model, with its graph sources.

    Raises:
        ValueError: The model is missing, damaged, has other sizes, or its training has not ended.
    """
    way_out = "Pretrain it to the end with the same settings, or pass --scratch."
    state = read_checkpoint(path, way_out)
    stored = state.get("run", {})
    sizes = ("method", "vocabulary", "length", "channels", "layers", "heads", "window", "position_encoding")
    pairs = [(name, stored.get(name), getattr(run, name)) for name in sizes]
    other = [f"{name} {old!r}, not {new!r}" for name, old, new in pairs if old != new]
    if not other and state["step"] != stored["steps"]:
        other = [f"{state['step']:,} of {stored['steps']:,} steps"]
    require(not other, f"'{path}' to be the pretrained model of this run", ", ".join(other), way_out)
    begin = "encoder."
    encoder.load_state_dict({name[len(begin) :]: x for name, x in state["model"].items() if name.startswith(begin)})


def evaluate(model: SequenceClassifier, examples: Examples, batch_size: int = 64) -> Row:
    """Accuracy and F1 as GLUE defines them, of the second class of two; of more classes, the mean over them."""
    return score(*predict(model, examples, batch_size), examples, model.num_classes)


@torch.no_grad()
def predict(model: SequenceClassifier, examples: Examples, batch_size: int = 64) -> tuple[Tensor, Row]:
    """The class of each example, ``[B]``, and the densities of the graphs."""
    model.eval()
    guesses, densities = [], []
    for which in torch.arange(len(examples)).split(batch_size):
        part = examples.select(which)
        logits, trace = model(part.tokens, part.ptr, seed=int(which[0]), return_trace=True)
        guesses.append(logits.argmax(1))
        densities.append([edges(choice) for choice in trace.choices])
    return torch.cat(guesses), _parts(densities)


def score(guessed: Tensor, densities: Row, examples: Examples, classes: int) -> Row:
    """Accuracy and F1 of guessed classes, see :func:`evaluate`."""
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_f1_score

    scores = multiclass_f1_score(guessed, examples.labels, classes, average=None)
    f1 = float(scores[1] if classes == 2 else scores.mean())
    accuracy = float(multiclass_accuracy(guessed, examples.labels, classes, average="micro"))
    return {"accuracy": accuracy, "f1": f1, "examples": len(examples), **densities}
