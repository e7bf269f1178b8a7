"""A small causal language model: how much does it lose where tokens see a share of those before them?

    python examples/language_model.py --train train.txt --test test.txt --methods full sbm:estimator=local --densities 0.1

Texts are yours, or WikiText-2. Methods are full, window, random, bigbird, top-k, blocks, lsh, routing and sbm; all share the tokens,
the steps, and layers of a gated short convolution and then attention, as in examples/recall.
Out: bits per byte; and bits per token where a token completes a pair of tokens that stood before, but not within the last 16. What has
ended is in rows.csv and is not run again; what was killed goes on.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from statistics import fmean, stdev

if __package__ in (None, ""):  # run as a file: the root of the clone holds the package `examples`
    sys.path.insert(0, str(Path(__file__).parent.parent))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, nargs="+", required=True, metavar="FILE", help="texts to learn from")
    parser.add_argument("--test", type=Path, nargs="+", required=True, metavar="FILE", help="texts to be tested on")
    usual_methods = ["full", "sbm:estimator=local"]
    words = f"(default: {' '.join(usual_methods)})"
    parser.add_argument("--methods", nargs="+", default=usual_methods, metavar="M", help=words)
    words = "shares of the allowed pairs beyond self-loops (default: 0.1)"
    parser.add_argument("--densities", nargs="+", type=float, default=[0.1], metavar="D", help=words)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="S", help="(default: 0)")
    words = "tokens of a byte-pair encoding that is learnt from the training texts; 256: bytes (default: %(default)s)"
    parser.add_argument("--vocabulary", type=int, default=1024, help=words)
    sizes = {
        "length": 256,
        "steps": 1000,
        "batch-size": 8,
        "channels": 64,
        "layers": 2,
        "heads": 2,
        "window": 0,
        "threads": 1,
    }
    texts = {"length": "tokens of a sequence", "window": "tokens before it that sbm always attends to"}
    for name, usual in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=usual, help=f"{texts.get(name, '')} (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="(default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/language"), metavar="DIR", help="(default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    given.fail = parser.error
    for name in sizes:
        if getattr(given, name.replace("-", "_")) <= (-1 if name == "window" else 0):
            parser.error(f"Expected '{name}' to be above 0 (got {getattr(given, name.replace('-', '_'))}). See --help.")
    if missing := [str(path) for path in (*given.train, *given.test) if not path.is_file()]:
        parser.error(f"Expected 'train' and 'test' to be files of text (got {', '.join(missing)}). Give their paths.")
    if not 0 < min(given.densities) <= max(given.densities) <= 1:
        parser.error(f"Expected 'densities' in (0, 1] (got {given.densities}). They are shares of the pairs.")
    if given.vocabulary < 256 or given.channels % given.heads:
        parser.error("Expected a 'vocabulary' of at least 256, and 'heads' that divide 'channels' (got others).")
    return given


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.benchmarks.tables import Row, add, markdown, read
from examples.common.runs import claim, fingerprint, settings_of
from examples.recall.model import DENSE, Recaller
from examples.recall.train import beyond, ended, fit, make_recaller, options_of
from sbm_pyg import ShareSchedule

NEAR = 16  # tokens; what stood before, but not so near, must be looked for


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides the outcome of a run, apart from the texts."""

    method: str
    density: float
    seed: int
    vocabulary: int
    length: int
    steps: int
    batch_size: int
    channels: int
    layers: int
    heads: int
    window: int
    learning_rate: float
    weight_decay: float = 0.1
    evaluations: int = 4

    @property
    def name(self) -> str:
        return self.method if self.method.partition(":")[0] in DENSE else f"{self.method} {100 * self.density:g} %"


def read_texts(given: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of the training and of the test texts, and the bytes of each token of the vocabulary."""
    texts = ["\n".join(path.read_text(errors="replace") for path in paths) for paths in (given.train, given.test)]
    if given.vocabulary == 256:
        source, test = (torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long() for text in texts)
        return source, test, torch.ones(256)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=given.vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts[0].splitlines(keepends=True), trainer)
    # every character of a token stands for a byte
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    source, test = (torch.tensor(tokenizer.encode(text).ids) for text in texts)
    return source, test, torch.tensor([float(len(word)) for word, _ in words])


def recalled(tokens: Tensor) -> Tensor:
    """Where a pair of tokens ends that stood before in its sequence, but not within the last ``NEAR`` tokens, ``[B, L]`` bool."""
    pair = tokens[:, :-1] * 2**32 + tokens[:, 1:]
    far, near = torch.ones(2, pair.size(1), pair.size(1), dtype=torch.bool).tril(-1)
    near = near & ~far.tril(-NEAR - 1)
    same = pair[:, :, None] == pair[:, None]
    found = (same & far).any(2) & ~(same & near).any(2)
    return torch.cat([torch.zeros(len(tokens), 1, dtype=torch.bool), found], 1)


def make_model(run: Run, num_tokens: int) -> tuple[Recaller, ShareSchedule | None]:
    """The model, and what lowers the share of the pairs that it sees."""
    model, options = make_recaller(run, num_tokens, run.window)
    if options is None:
        return model, None
    final = run.density - 2 * run.window / (run.length - 1)
    if final <= 0:
        raise ValueError(
            f"Expected 'densities' beyond those of the window of {run.window} (got {run.density}). Give a smaller --window."
        )
    # full for a start, and down to the density by half of the steps, whatever the loss is
    schedule = ShareSchedule(model, final, threshold=math.inf, rate=1 - final ** (2 / run.steps))
    if options["control"] == "share":
        schedule.load_state_dict({"share": final, "running": None})
    return model, schedule


def train(run: Run, texts: tuple[Tensor, Tensor, Tensor], folder: Path) -> list[Row]:
    """Trains one model, or goes on from its checkpoint; returns the rows of all evaluations."""
    source, test, width = texts
    model, schedule = make_model(run, len(width))

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
            mask = recalled(torch.cat([inputs[part], targets[part, -1:]], 1))[:, 1:]
            bits.append(loss[mask.flatten()] / math.log(2))
            shares.append([1.0 if choice is None else beyond(choice.graph) for choice in choices])
        row = {"run": run.name, "seed": run.seed, "bits_per_byte": nats / math.log(2) / float(width[targets].sum())}
        row |= {
            "bits_recalled": float(torch.cat(bits).mean()),
            "share_recalled": len(torch.cat(bits)) / targets.numel(),
        }
        return [row | {f"density_{layer}": fmean(each) for layer, each in enumerate(zip(*shares, strict=True))}]

    name = f"{run.method}-{run.density}-{run.seed}.pt".replace(":", "+").replace("=", "_")
    return fit(model, schedule, run, folder / name, losses, measure)


def report(rows: list[Row]) -> str:
    """A table: means over seeds, and what is lost against full attention, seed by seed."""
    ends = {(row["run"], row["seed"]): row for row in rows}
    lines = []
    for name in dict.fromkeys(name for name, _ in ends):
        mine = {seed: row for (run, seed), row in ends.items() if run == name}
        lost = [
            row["bits_per_byte"] - ends["full", seed]["bits_per_byte"]
            for seed, row in mine.items()
            if ("full", seed) in ends
        ]
        spread = f" ± {stdev(lost):.4f}" if len(lost) > 1 else ""
        layers = [key for key in rows[0] if key.startswith("density_")]
        density = " / ".join(f"{100 * fmean(row[key] for row in mine.values()):.1f}" for key in layers)
        means = [f"{fmean(row[key] for row in mine.values()):.4f}" for key in ("bits_per_byte", "bits_recalled")]
        lines.append([name, len(mine), *means, f"{fmean(lost):+.4f}{spread}" if lost else "", density])
    header = ["run", "seeds", "bits per byte", "bits per recalled token", "lost, bits per byte", "densities, %"]
    return markdown(header, lines)


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    torch.set_num_threads(given.threads)
    own = {field.name: getattr(given, field.name) for field in dataclasses.fields(Run) if hasattr(given, field.name)}
    kinds = [(m, d) for m in given.methods for d in ([1.0] if m.partition(":")[0] in DENSE else given.densities)]
    try:
        for method in given.methods:
            options_of(method)  # mistakes before the first run
        texts = read_texts(given)
        for text, name in zip(texts, ("train", "test"), strict=False):
            if len(text) <= given.length:
                raise ValueError(
                    f"Expected '{name}' of more than {given.length} tokens (got {len(text)}). Give a longer text."
                )
        runs = [Run(*kind, seed, **own) for seed in given.seeds for kind in kinds]
        told = {
            f"checksum of {name}": fingerprint(map(Path.read_bytes, getattr(given, name))) for name in ("train", "test")
        }
        with claim(given.output, "language_model", {**settings_of(runs[0]), **told}):
            for run in runs:
                if not ended(given.output, run=run.name, seed=run.seed):
                    add(given.output / "rows.csv", train(run, texts, given.output))
        print(report(read(given.output / "rows.csv")))
    except ValueError as error:
        given.fail(str(error))


if __name__ == "__main__":
    main()
