"""A small causal language model: how much does it lose where tokens see a share of those before them?

    python examples/language_model.py --corpus stdlib --methods full window sbm random
    python examples/language_model.py --train train.txt --test test.txt --methods full sbm:estimator=local --densities 0.1

Texts are yours, or the source code of Python's standard library. Methods are full, window, random, bigbird, top-k, blocks, lsh, routing
and sbm; all share tokens, steps, initial weights, and layers of a gated short convolution and then attention, as in the arena. With
--window, sbm and random attend to the last tokens and to others; both count in the density. sbm:estimator=none does not learn its graphs.
top-k:control=sparsifier is dense first, as sbm is; other rules likewise.
--corpus has other usual values: 1,500 steps of 8 sequences of 512 tokens, 128 channels, a density of 7.5 %, and a window of 6.
Out: bits per byte; and bits per token where a token completes a pair of tokens that stood before, but not within the last 16. What has
ended is in rows.csv and is not run again; what was killed goes on. --save writes the model of the first run, which LanguageModel loads.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

if __package__ in (None, ""):  # run as a file: the root of the clone holds the package `examples`
    sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.common import hybrid
from examples.common.command import Command, fields_of, option, program, require
from examples.common.corpus import Texts, encode, read_files, stdlib_files
from examples.common.fit import file_name, fit, make_sparsifier, train_missing
from examples.common.runs import check_model_folder, checksums, read_state, save_pretrained, settings_of
from examples.common.tables import Row, by, deviation, finished, markdown
from examples.common.tasks import recalled
from sbm_pyg import Pretrained, Sparsifier

CODE = {"length": 512, "steps": 1500, "channels": 128, "learning_rate": 6e-3, "densities": [0.075], "window": 6}
"""Usual values for source code: a size at which tokens of long ago help."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    command = Command(None, __doc__)
    command.add_argument("--corpus", choices=["stdlib"], help="take source code of Python for both texts")
    command.add_argument("--train", type=Path, nargs="+", metavar="FILE", help="texts to learn from")
    command.add_argument("--test", type=Path, nargs="+", metavar="FILE", help="texts to be tested on")
    command.option("methods", ["full", "sbm:estimator=local"])
    command.option("densities", [0.1], "shares of the allowed pairs beyond self-loops", above=0, below=1)
    command.option("seeds", [0], least=0)
    command.fields(Run)
    command.option("threads", 1, above=0)
    command.option("output", Path("runs/language"))
    command.add_argument(
        "--save", type=Path, metavar="DIR", help="save the model of the first run, with its tokenizer and a card"
    )
    if any(word.startswith("--corpus") for word in (sys.argv[1:] if arguments is None else arguments)):
        command.set_defaults(**CODE)
    args = command.read(arguments)
    if args.corpus:
        command.require(not (args.train or args.test), "no files with 'corpus'", "both", "Leave one of them out.")
        args.train, args.test = stdlib_files()
    command.require_files(train=args.train or [], test=args.test or [])
    if args.save:
        command.attempt(check_model_folder, "save", args.save)
    args.usual = {name: command.get_default(name) for name in vars(args)}
    return args


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides the outcome of a run, apart from the texts."""

    method: str
    density: float
    seed: int
    vocabulary: int = option(
        1024, "tokens of a byte-pair encoding that is learned from the training texts; 256: bytes", least=256
    )
    length: int = option(256, "tokens of a sequence", above=0)
    steps: int = option(1000, above=0)
    batch_size: int = option(8, above=0)
    channels: int = option(64, above=0)
    layers: int = option(2, above=0)
    heads: int = option(2, above=0)
    window: int = option(0, "tokens before it that sbm and random always attend to", least=0)
    learning_rate: float = option(2e-3, above=0)
    weight_decay: float = 0.1
    evaluations: int = 4

    @property
    def identity(self) -> Row:
        return {"run": hybrid.run_name(self.method, self.density), "seed": self.seed}


def make_model(run: Run, num_tokens: int) -> tuple[hybrid.Recaller, Sparsifier | None]:
    """The paired model, and what makes it sparse."""
    model = hybrid.paired(run, partial(hybrid.make_recaller, num_tokens=num_tokens, window=run.window))
    control = hybrid.control_of(run.method)
    if control == "none":
        return model, None
    rule = run.method.partition(":")[0] in hybrid.RULES  # their density has no window in it
    final = run.density if rule else hybrid.beyond_window(run.density, run.window, run.length)
    return model, make_sparsifier(model, final, control, run.steps)


class LanguageModel(Pretrained):
    """A trained model, whose attention is as sparse as at its last step.

    Args:
        num_tokens: Size of the vocabulary.
        **run: Fields of a :class:`Run`.
    """

    def __init__(self, num_tokens: int, **run: Any) -> None:
        super().__init__()
        self.num_tokens, self.run = num_tokens, Run(**run)
        self.model = hybrid.make_recaller(self.run, num_tokens, self.run.window)

    def forward(self, tokens: Tensor, seed: int = 0) -> Tensor:
        """Logits of the token after each of ``[B, L]``, ``[B, L, num_tokens]``."""
        return self.model(tokens, seed=seed)[0]

    @torch.no_grad()
    def complete(self, tokens: list[int], count: int) -> list[int]:
        """Those of ``count`` more tokens that the model takes for the most probable ones."""
        require(len(tokens), "'tokens' to have one at least", 0, "Begin with a word.")
        continued = [*tokens]
        for _ in range(count):
            logits = self(torch.tensor([continued[-self.run.length :]]))
            continued.append(int(logits[0, -1].argmax()))
        return continued[len(tokens) :]


def save(run: Run, texts: Texts, args: argparse.Namespace) -> None:
    """Saves the model of a run that has ended with 16 bits a weight, its tokenizer and a card."""
    path = checkpoint(run, args.output)
    state = read_state(path, dataclasses.asdict(run))
    if not state:
        raise ValueError(f"Expected the checkpoint of a run to save (got no {path}). Remove its rows from rows.csv.")
    model = LanguageModel(len(texts.width), **dataclasses.asdict(run))
    model.model.load_state_dict(state["model"])
    row, loops = state["rows"][-1], 2 / (run.length + 1)  # the share of self-loops, beyond which densities are measured
    words = "source code of Python's standard library" if args.corpus else "texts"
    results = {"test, bits per byte": row["bits_per_byte"]}
    for layer in range(run.layers):
        share = row[f"density_{layer}"]
        results[f"density of layer {layer}"] = share + (1 - share) * loops
    task = f"{words}: `python examples/language_model.py {options_to_repeat(run, args)}`"
    tokenizer = None if texts.tokenizer is None else texts.tokenizer.to_str(pretty=True)
    save_pretrained(args.save, model.half(), tokenizer, task=task, results=results)


def options_to_repeat(run: Run, args: argparse.Namespace) -> str:
    """The options of a command line that trains this run: its texts, its choices, and what is not usual."""
    files = ((name, " ".join(path.name for path in getattr(args, name))) for name in ("train", "test"))
    options = {"corpus": args.corpus} if args.corpus else dict(files)
    options |= {"methods": run.method, "densities": f"{run.density:g}", "steps": run.steps, "seeds": run.seed}
    options |= {name: value for name, value in fields_of(Run, args).items() if value != args.usual[name]}
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())


def checkpoint(run: Run, folder: Path) -> Path:
    """The file of a run's checkpoint."""
    return folder / file_name(run.method, run.density, run.seed)


def train(run: Run, texts: Texts, folder: Path) -> list[Row]:
    """Trains one model, or goes on from its checkpoint; returns the rows of all evaluations."""
    source, test, width, _ = texts
    model, sparsifier = make_model(run, len(width))

    def losses(step: int) -> Tensor:
        random = torch.Generator().manual_seed(2**32 * (run.seed + 1) + step)
        starts = torch.randint(len(source) - run.length, (run.batch_size,), generator=random)
        tokens = source[starts[:, None] + torch.arange(run.length + 1)]
        logits = model(tokens[:, :-1], seed=run.steps * run.seed + step)[0]
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def measure() -> list[Row]:
        whole = test[: 1 + (len(test) - 1) // run.length * run.length]
        inputs, targets = (part.unflatten(0, (-1, run.length)) for part in (whole[:-1], whole[1:]))
        nats, bits, shares = 0.0, [], []
        for part in torch.arange(len(inputs)).split(run.batch_size):
            logits, choices = model(inputs[part], seed=int(part[0]))
            loss = cross_entropy(logits.flatten(0, 1), targets[part].flatten(), reduction="none")
            nats += float(loss.double().sum())
            mask = recalled(torch.cat([inputs[part], targets[part, -1:]], 1))[:, 1:] >= 0
            bits.append(loss[mask.flatten()] / math.log(2))
            shares.append([1.0 if choice is None else hybrid.beyond(choice.graph) for choice in choices])
        recall = torch.cat(bits)
        row = run.identity | {"bits_per_byte": nats / math.log(2) / float(width[targets].sum())}
        row |= {"bits_recalled": float(recall.mean()), "share_recalled": len(recall) / targets.numel()}
        return [row | {f"density_{layer}": fmean(column) for layer, column in enumerate(zip(*shares, strict=True))}]

    return fit(model, sparsifier, run, checkpoint(run, folder), losses, measure)


def report(rows: list[Row]) -> str:
    """A table: means over seeds, and what is lost against full attention, seed by seed."""
    ends = {name: {seed: rows[-1] for seed, rows in seeds.items()} for name, seeds in by(rows, "run", "seed").items()}
    full, lines = ends.get("full", {}), []
    for name, seed_ends in ends.items():
        lost = [row["bits_per_byte"] - full[seed]["bits_per_byte"] for seed, row in seed_ends.items() if seed in full]
        layers = [key for key in rows[0] if key.startswith("density_")]
        density = " / ".join(f"{100 * fmean(row[key] for row in seed_ends.values()):.1f}" for key in layers)
        means = [f"{fmean(row[key] for row in seed_ends.values()):.4f}" for key in ("bits_per_byte", "bits_recalled")]
        lines.append([name, len(seed_ends), *means, deviation(lost, 4, "+") if lost else "", density])
    header = ["run", "seeds", "bits per byte", "bits per recalled token", "lost, bits per byte", "densities, %"]
    return markdown(header, lines)


def work(args: argparse.Namespace) -> Iterator[Path]:
    options = fields_of(Run, args)
    kinds = [(m, d) for m in args.methods for d in ([1.0] if hybrid.is_dense(m) else args.densities)]
    for method in args.methods:
        hybrid.options_of(method)  # mistakes before the first run
    texts = encode(read_files(args.train), read_files(args.test), args.vocabulary)
    for text, name in zip(texts[:2], ("train", "test"), strict=True):
        words = f"'{name}' of more than {args.length} tokens"
        require(len(text) > args.length, words, len(text), "Give a longer text.")
    runs = [Run(*kind, seed, **options) for seed in args.seeds for kind in kinds]
    settings = {**settings_of(runs[0]), **checksums(train=args.train, test=args.test)}
    train_missing(args.output, "language_model", settings, runs, lambda run: train(run, texts, args.output))
    print(report(finished(args.output)))
    if args.save:
        save(runs[0], texts, args)
        yield args.save


main = program(parse, work)

if __name__ == "__main__":
    main()
