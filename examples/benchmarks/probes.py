"""Where should probes look, and should tokens of a block share what they find? Bias and variance of two changes to the local gradient.

    python -m examples.benchmarks.probes --csv runs/probes.csv
    python -m examples.benchmarks.probes --csv runs/trained.csv --models runs/recall

1. Probes are drawn with equal chances, or with chances in proportion to p^t, a flatter model of the same head, mixed with a
   quarter of equal chances. Their expected number is the same, and their chances are in the weights, so that what is linear stays
   unbiased. One query attends to 8 keys, all graphs enumerated, or to 64, over sampled graphs; probabilities have nothing to do
   with scores, or follow them. The loss bends. ``known effects`` has the best chances, which nobody knows.
2. 64 tokens lie in 8 hard blocks, and their queries, keys, values and gains are alike in a block, more or less. Effects are left to
   each pair (``each pair``), replaced by their mean over the block pair (``block means``), or that mean is taken off before an effect
   is weighted, and added to all pairs after it (``baseline``), which stays unbiased. The loss is linear.

Bias and standard deviation are relative to the norm of the true gradient: to probabilities, to their logits, or to memberships.
Plain torch, nothing of the library; a minute. A table that is there is shown, and not made again.

With --models instead: how much of the variance of real gradients hangs on probes? Block models of `python -m examples.recall`, as they
began but with the share of the keys that they were to reach, and as they ended; 16 batches with two graphs each, half a minute a model.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
from pathlib import Path


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path("probes.csv"), help="where to write (default: %(default)s)")
    words = "with checkpoints (*.pt) of block models of recall"
    parser.add_argument("--models", nargs="+", type=Path, metavar="DIR", help=words)
    for name, usual, words in (
        ("cases", 40, "random problems of each kind"),
        ("graphs", 500, "sampled where they cannot be enumerated"),
        ("seed", 0, "of the problems"),
    ):
        parser.add_argument(f"--{name}", type=int, default=usual, help=f"{words} (default: %(default)s)")
    given = parser.parse_args(arguments)
    for name, least in (("cases", 1), ("graphs", 64), ("seed", 0)):
        if getattr(given, name) < least:
            parser.error(f"Expected '{name}' to be at least {least} (got {getattr(given, name)}). See --help.")
    given.files = sorted(path for folder in given.models or () for path in folder.glob("*sbm*.pt"))
    if given.models and not given.files and not given.csv.exists():
        parser.error(f"Expected 'models' with checkpoints (got {', '.join(map(str, given.models))}). Train first.")
    return given


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from examples.benchmarks.tables import Row, Rows, add, markdown, read
from sbm_pyg.info import tqdm

Errors = dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]]
"""Squares of bias, of deviation and of the true gradient: by keys, probes, kind, what the gradient is to, and way."""
FLOOR = 0.25  # part of the probes that is drawn with equal chances
POWERS = {"equal chances": 0.0, "p^0.25": 0.25, "p^0.5": 0.5, "p": 1.0}
ONE_QUERY = ((8, 0.25, (1, 2, 4)), (64, 0.05, (4, 16, 64)))  # keys, usual p, probes
BLOCKS, TOKENS, CHANNELS = 8, 64, 8
EARLIER = 32  # graphs that a baseline is made from


class Random:
    """Numbers in float64."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Of variance 1."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """In [0, 1)."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)


def chances(share: Tensor, probes: float, floor: float = FLOOR) -> Tensor:
    """Chance of each key to be a probe, ``[..., M]``: in proportion to a share mixed with equal ones, at most 1, in sum ``probes``."""
    share = (1 - floor) * share / share.sum(-1, keepdim=True) + floor / share.size(-1)
    low, high = torch.zeros_like(share[..., :1]), 1 / share.amin(-1, keepdim=True)
    for _ in range(80):  # what is cut at 1 goes to the others
        middle = (low + high) / 2
        enough = (middle * share).clamp(max=1).sum(-1, keepdim=True) >= probes
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return (high * share).clamp(max=1)


def shares(p: Tensor, chance: Tensor) -> Tensor:
    """Share of the side with the edge in the gradient of its probability, as in the library, but with a chance for each pair."""
    return torch.maximum((p / (p + chance * (1 - p))).clamp(max=0.5), p)


def estimate(effect: Tensor, present: Tensor, probed: Tensor, p: Tensor, chance: Tensor) -> Tensor:
    """The gradient of each probability from one graph and its probes: effects of edges, and of probes that are none, weighted."""
    share = shares(p, chance)
    seen = torch.where(present, share / p, torch.where(probed, (1 - share) / ((1 - p) * chance), 0))
    return effect * seen


def moments(p: Tensor, chance: Tensor, law: Tensor, there: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of :func:`estimate`, ``[M]``, its coins and probes summed out.

    Args:
        p, chance: Of each pair, ``[M]``.
        law: Probability of each graph, ``[S]``.
        there, missing: Effect of each pair at the output with it and at that without, ``[S, M]``, the rest of the graph given.
    """
    share = shares(p, chance)
    mean = law @ (share * there + (1 - share) * missing)
    second = law @ (share**2 / p * there**2 + (1 - share) ** 2 / ((1 - p) * chance) * missing**2)
    return mean, second - mean**2


def effects(
    weight: Tensor, value: Tensor, present: Tensor, loss: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """What each pair does to the loss of a query, the rest of its graph given: in truth, and by the slope with it and without it.

    Args:
        weight, value: Exponentials of scores ``[M]``, and values ``[M, C]``.
        present: Graphs, ``[S, M]``.
        loss: Of outputs ``[..., C]``.

    Returns:
        Three times ``[S, M]``.
    """
    kept = torch.where(present, weight, 0)
    rest = kept.sum(-1, keepdim=True) - kept
    total = (kept @ value)[:, None] - kept[..., None] * value
    others = present.sum(-1, keepdim=True) > present
    without = torch.where(others[..., None], total / rest.where(others, 1)[..., None], 0).requires_grad_()
    beside = torch.where(others, rest, 0)[..., None] * without.detach()
    having = ((beside + weight[:, None] * value) / (torch.where(others, rest, 0) + weight)[..., None]).requires_grad_()
    losses = loss(having), loss(without)
    slopes = (torch.autograd.grad(each.sum(), out)[0] for each, out in zip(losses, (having, without), strict=True))
    step = (having - without).detach()
    there, missing = ((step * slope).sum(-1) for slope in slopes)
    return (losses[0] - losses[1]).detach(), there, missing


def one_query(keys: int, usual: float, follows: bool, numbers: tuple[int, ...], graphs: int, random: Random) -> Errors:
    """Errors of one random query, for each number of probes."""
    score, noise, value, readout, residual = map(
        random.normal, ((keys,), (keys,), (keys, CHANNELS), (2, CHANNELS), (CHANNELS,))
    )
    spread = 0.9 * score + math.sqrt(1 - 0.9**2) * noise if follows else noise
    p = (math.log(usual / (1 - usual)) + 1.5 * spread).sigmoid().clamp(0.002, 0.98)
    if keys <= 10:
        present = torch.arange(2**keys)[:, None] & 2 ** torch.arange(keys) > 0
        law = torch.where(present, p, 1 - p).prod(-1)
    else:
        present, law = random.uniform((graphs, keys)) < p, p.new_full((graphs,), 1 / graphs)

    def loss(out: Tensor) -> Tensor:
        logits = torch.tanh(out + residual) @ (2 * readout).mT
        return logits.logsumexp(-1) - logits[..., 0]

    exact, there, missing = effects((2 * score).exp(), value, present, loss)
    true, size = law @ exact, (law @ missing**2).sqrt()
    errors: Errors = {}
    for probes in numbers:
        best = size * (1 - shares(p, chances(torch.ones_like(p), probes))) / (1 - p).sqrt()
        for to, slope in (("probabilities", torch.ones_like(p)), ("logits", p * (1 - p))):
            ways = {name: chances(p**power, probes) for name, power in POWERS.items()}
            ways["known effects"] = chances(best * slope, probes, floor=1e-3)
            for way, chance in ways.items():
                mean, variance = moments(p, chance, law, there, missing)
                squares = (slope * (mean - true)) ** 2, slope**2 * variance, (slope * true) ** 2
                errors[keys, probes, "follow scores" if follows else "by chance", to, way] = squares
    return errors


def block_pairs(alike: float, probes: float, graphs: int, random: Random) -> Errors:
    """Errors of the gradient to the memberships of hard blocks; ``alike`` is the part of a token's variance that its block has."""
    block = torch.arange(TOKENS) % BLOCKS
    member = torch.nn.functional.one_hot(block, BLOCKS).double()
    query, key, value, slope = (
        alike**0.5 * random.normal((BLOCKS, CHANNELS))[block] + (1 - alike) ** 0.5 * random.normal((TOKENS, CHANNELS))
        for _ in range(4)
    )
    matrix = 0.02 + 0.08 * random.uniform((BLOCKS, BLOCKS))
    matrix.diagonal().fill_(0.4)
    p, weight, gain = member @ matrix @ member.T, (query @ key.T / CHANNELS**0.5).exp(), slope @ value.T
    chance = torch.full_like(p, probes / TOKENS)
    present, probed = (random.uniform((graphs, TOKENS, TOKENS)) < each for each in (p, chance))
    kept = torch.where(present, weight, 0)
    others = present.sum(-1, keepdim=True) > present
    rest, total = (torch.where(others, each.sum(-1, keepdim=True) - each, 0) for each in (kept, kept * gain))
    effect = weight / (weight + rest) * (gain - total / rest.where(others, 1))

    def memberships(grad: Tensor) -> Tensor:
        """Gradients to memberships of queries and of keys, from those to probabilities."""
        return torch.cat([grad @ (member @ matrix.T), grad.mT @ (member @ matrix)], dim=-1)

    def baseline(base: Tensor) -> Tensor:
        return base + estimate(effect - base, present, probed, p, chance)

    expected, each = effect.mean(0), estimate(effect, present, probed, p, chance)
    true = memberships(expected)
    ways = {
        "each pair": (each, expected),
        "block means": (block_means(each, member), block_means(expected, member)),
        "baseline, known": (baseline(block_means(expected, member)), expected),
        f"baseline of {EARLIER} graphs": (
            baseline(block_means(each[:EARLIER].mean(0), member))[EARLIER:], expected,
        ),
    }  # fmt: skip
    return {
        (TOKENS, probes, f"in blocks, {100 * alike:.0f} % alike", "memberships", way): (
            (memberships(mean) - true) ** 2, memberships(sampled).var(0), true**2,
        )
        for way, (sampled, mean) in ways.items()
    }  # fmt: skip


def block_means(grad: Tensor, member: Tensor) -> Tensor:
    """Each pair gets the mean of its block pair; ``member`` is one-hot."""
    equal = member / member.sum(0)
    return member @ (equal.T @ grad @ equal) @ member.T


def measure(cases: int, make: Callable[[], Errors]) -> Rows:
    """Rows over random cases."""
    sums: dict[tuple[Any, ...], Tensor] = {}
    for _ in range(cases):
        for name, squares in make().items():
            sums[name] = sums.get(name, 0) + torch.stack([square.sum() for square in squares])
    names = ("keys", "probes", "p", "gradient to", "method")
    rows = []
    for name, found in sums.items():
        bias, deviation = (found[:2] / found[2]).sqrt().tolist()
        rows.append(dict(zip(names, name, strict=True)) | {"bias": bias, "deviation": deviation})
    return rows


def trained(path: Path, known: Rows, draws: int = 16) -> Rows:
    """Variances of the gradient to the block models of a checkpoint: what graphs and probes make, and in all, batches included.

    There are none of a run that the table knows.
    """
    from examples.benchmarks.spread import models, noise, twice
    from examples.recall.train import Batches
    from sbm_pyg.estimators import Local

    run, both = models(path)
    if any((row["run"], row["seed"]) == (run.name, run.seed) for row in known):
        return []
    batches, rows = Batches(run), []
    for when, model in both:
        for probes in (1, 4, 16, 64):
            for layer in model.modules():
                if isinstance(estimator := getattr(layer, "estimator", None), Local):
                    estimator.probes = probes
            one, other = (found["block model"] for found in twice(model, batches, draws)[0])
            name: Row = {"run": run.name, "seed": run.seed, "when": when, "probes": probes}
            rows.append(name | noise(one, other))
    return rows


def report_trained(rows: Rows) -> str:
    """Variances relative to those at 16 probes, from the least seed to the largest; and the part of graphs and probes in these."""
    found: dict[tuple[str, str], dict[float, dict[float, Row]]] = {}
    for row in rows:
        found.setdefault((row["run"], row["when"]), {}).setdefault(row["seed"], {})[row["probes"]] = row
    lines = []
    for name, seeds in found.items():
        part = [100 * each[16]["graphs"] / each[16]["total"] for each in seeds.values()]
        line = [*name, str(len(seeds)), f"{min(part):.0f} to {max(part):.0f}"]
        for probes in (1, 4, 64):
            ratio = [each[probes]["total"] / each[16]["total"] for each in seeds.values()]
            line.append(f"{min(ratio):.2f} to {max(ratio):.2f}")
        lines.append(line)
    names = ["run", "when", "seeds", "of graphs and 16 probes, %", "variance, 1 probe", "4 probes", "all pairs"]
    return markdown(names, lines)


def report(rows: Rows) -> str:
    """Errors of what is done today, and the variances of the other ways relative to it; a table for each of the two questions."""
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["keys"], row["probes"], row["p"], row["gradient to"]), {})[row["method"]] = row
    for (keys, probes, kind, to), ways in found.items():
        usual, *others = ways.values()
        header = ["keys", "probes", "p", "gradient to", f"{usual['method']}: bias", "standard deviation"]
        line = [f"{keys:g}", f"{probes:g}", kind, to, f"{usual['bias']:.2f}", f"{usual['deviation']:.2f}"]
        for other in others:
            line.append(f"{other['deviation'] ** 2 / usual['deviation'] ** 2:.2f}")
            header.append(f"variance, {other['method']}")
            if abs(other["bias"] - usual["bias"]) > 0.1 and "known" not in other["method"]:
                line[-1] += f" (bias {other['bias']:.2f})"
        tables.setdefault(tuple(header), []).append(line)
    return "\n\n".join(markdown(header, lines) for header, lines in tables.items())


def main(arguments: list[str] | None = None) -> None:
    """Measures what the table does not hold, and shows it."""
    given = parse(arguments)
    given.csv.parent.mkdir(parents=True, exist_ok=True)
    rows: Rows = []
    if given.models:
        for path in tqdm(given.files, unit="model"):
            if rows := trained(path, read(given.csv)):
                add(given.csv, rows)
        print(report_trained(read(given.csv)))
        return
    if not given.csv.exists():
        random, graphs = Random(given.seed), given.graphs
        parts = [
            partial(one_query, keys, usual, follows, numbers, graphs, random)
            for keys, usual, numbers in ONE_QUERY
            for follows in (False, True)
        ]
        parts += [partial(block_pairs, alike, 16, 2 * graphs, random) for alike in (0.1, 0.5, 0.9)]
        for part in tqdm(parts, unit="part"):
            rows += measure(given.cases if part.func is one_query else math.ceil(given.cases / 10), part)
        add(given.csv, rows)
    print(report(read(given.csv)))


if __name__ == "__main__":
    main()
