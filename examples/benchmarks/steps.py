"""A whole training step of a causal model, in the dense and in the sparse phase of a Sparsifier, relative to full attention.

    python -m examples.benchmarks.steps                                             sequences of 64 and 256 tokens, as in recall
    python -m examples.benchmarks.steps --channels 128 --heads 2 --vocabulary 1024 --batch-tokens 4096 --lengths 512 2048 8192   source code

The model is that of the recall and language programs: two layers, each a gated short convolution and attention with self-loops. A step is
the model, its loss, the backward pass, clipping and AdamW, on one thread. Methods take turns, step by step, and the median counts. First,
each model must have the loss of full attention at a target density of 1.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from examples.common import hybrid
from examples.common.command import Command, program
from examples.common.tables import Row, by, markdown, write_csv
from sbm_pyg import DensitySource, auxiliary_loss
from sbm_pyg.ops.cpu.threads import flushed_subnormals
from sbm_pyg.progress import tqdm

METHODS = ["sbm", "indexer:select=top_k,index_heads=2,index_channels=8", "top-k:control=sparsifier"]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    command = Command("python -m examples.benchmarks.steps", __doc__)
    command.option("methods", METHODS)
    command.option("lengths", [64, 256], "of the sequences", least=2)
    command.option("density", 0.05, "of the sparse phase, a share of the pairs beyond self-loops", above=0, below=1)
    command.option("batch-tokens", 4096, "of a step", least=2)
    for name, usual in {"vocabulary": 512, "channels": 64, "heads": 1, "layers": 2, "rounds": 8, "threads": 1}.items():
        command.option(name, usual, above=0)
    command.option("csv", Path("steps.csv"), "where to write")
    args = command.read(arguments)
    command.require(args.channels % args.heads == 0, "'heads' to divide 'channels'", args.heads)
    command.require(max(args.lengths) <= args.batch_tokens, "'batch-tokens' of a sequence or more", args.batch_tokens)
    return args


WARM_UP = 3  # steps of each before time counts


class Step:
    """Training steps of the model of a method on random tokens."""

    def __init__(self, method: str, length: int, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        kind, options = hybrid.options_of(method)
        options_of_layers = (kind, args.channels, args.heads, args.density, options)
        layers = partial(hybrid.make_causal_attention, *options_of_layers)
        self.model = hybrid.Recaller(args.vocabulary, args.channels, args.layers, layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        size, random = (args.batch_tokens // length, length + 1), torch.Generator().manual_seed(length)
        self.tokens = torch.randint(args.vocabulary, size, generator=random)
        self.sources = [module for module in self.model.modules() if isinstance(module, DensitySource)]

    def loss(self, density: float, seed: int) -> torch.Tensor:
        """The loss at a target density, whose auxiliary losses remain to be added."""
        for source in self.sources:
            source.target_density = density
        logits, _ = self.model(self.tokens[:, :-1], seed=seed)
        return cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())

    def __call__(self, density: float, seed: int) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        (self.loss(density, seed) + auxiliary_loss(self.model)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return time.perf_counter() - began


def measure(length: int, args: argparse.Namespace) -> list[Row]:
    """A row for each method and phase."""
    steps = {method: Step(method, length, args) for method in ("full", *args.methods)}
    full = dict(steps["full"].model.named_parameters())
    for method in args.methods:  # the same model, whose sources are the only difference
        for name, parameter in steps[method].model.named_parameters():
            if name in full:
                parameter.data.copy_(full[name])
        with torch.no_grad():
            losses = [float(steps[name].loss(1.0, 0)) for name in ("full", method)]
        if abs(losses[0] - losses[1]) > 1e-4 * losses[0]:
            raise ValueError(
                f"Expected {method} at a target density of 1 to have the loss {losses[0]} (got {losses[1]})."
            )
    phases = [("full", 1.0), *((method, density) for method in args.methods for density in (1.0, args.density))]
    seconds: dict[tuple[str, float], list[float]] = {phase: [] for phase in phases}
    with flushed_subnormals():
        for seed in tqdm(range(WARM_UP + args.rounds), desc=f"{length} tokens", unit="round"):
            for phase in phases:
                seconds[phase].append(steps[phase[0]](phase[1], seed))
    middle = {phase: statistics.median(times[WARM_UP:]) for phase, times in seconds.items()}
    return [
        {
            "length": length,
            "method": method,
            "density": density,
            "ms": 1e3 * median,
            "over full": median / middle["full", 1.0],
        }
        for (method, density), median in middle.items()
    ]


def work(args: argparse.Namespace) -> Iterator[Path]:
    rows: list[Row] = []
    for length in args.lengths:
        rows += measure(length, args)
        write_csv(args.csv, rows)
        yield args.csv
    table = []
    for method, lengths in by(rows, "method", "length").items():
        parts = [
            [row for row in length_rows if (row["density"] == 1) == dense]
            for length_rows in lengths.values()
            for dense in (True, False)
        ]
        table.append([method, *(f"{part[0]['ms']:.0f} ({part[0]['over full']:.2f})" if part else "" for part in parts)])
    names = [
        f"{length:,} tokens, {phase}" for length in args.lengths for phase in ("dense", f"{100 * args.density:g} %")
    ]
    print("Milliseconds of a step, and the part of that of full attention:")
    print(markdown(["method", *names], table))


main = program(parse, work)

if __name__ == "__main__":
    main()
