"""Where should probes look, and should tokens of a block share what they find? Bias and variance of two changes to the local gradient.

    python -m examples.benchmarks.probes --csv runs/probes.csv

1. Probes are drawn with equal chances, or with chances in proportion to p^t, a flatter model of the same head, mixed with a
   quarter of equal chances. Their expected number is the same, and their chances are in the weights, so that a linear loss stays
   unbiased. One query attends to 8 keys, all graphs enumerated, or to 64, over sampled graphs; probabilities are independent of
   scores, or follow them. The loss bends. ``known effects`` has the best chances, which no method can know.
2. 64 tokens lie in 8 hard blocks, and their queries, keys, values and gains are alike in a block, more or less. Effects are left to
   each pair (``each pair``), replaced by their mean over the block pair (``block means``), or that mean is taken off before an effect
   is weighted, and added to all pairs after it (``baseline``), which stays unbiased. The loss is linear.

Bias and standard deviation are relative to the norm of the true gradient: to probabilities, to their logits, or to memberships.
Plain torch, nothing of the library; a minute. A table that is there is shown, and not made again. The same question over trained models:
python -m examples.recall.spread DIR --probes
"""

import sys
from pathlib import Path

from examples.common.command import Command

command = Command("python -m examples.benchmarks.probes", __doc__)
command.option("csv", Path("probes.csv"), "where to write")
command.option("cases", 40, "random problems of each kind", least=1)
command.option("graphs", 500, "sampled where they cannot be enumerated", least=64)
command.option("seed", 0, "of the problems", least=0)
if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    command.read(None)

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from examples.common.tables import Rows, add, by, markdown, read
from sbm_pyg.info import tqdm

Errors = dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]]
"""Squares of bias, of deviation and of the true gradient: by keys, probes, kind, what the gradient is to, and way."""
FLOOR = 0.25  # part of the probes that is drawn with equal chances
POWERS = {"equal chances": 0.0, "p^0.25": 0.25, "p^0.5": 0.5, "p": 1.0}
ONE_QUERY = ((8, 0.25, (1, 2, 4)), (64, 0.05, (4, 16, 64)))  # keys, usual p, probes
BLOCKS, TOKENS, CHANNELS = 8, 64, 8
EARLIER = 32  # graphs that a baseline is made from


class Random:
    def __init__(self, seed: int) -> None:
        self.options: Any = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, **self.options)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, **self.options)


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
    """The gradient of each probability from one graph and its probes: weighted effects of edges, and of probes that are not edges."""
    share = shares(p, chance)
    seen = torch.where(present, share / p, torch.where(probed, (1 - share) / ((1 - p) * chance), 0))
    return effect * seen


def moments(p: Tensor, chance: Tensor, law: Tensor, there: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of :func:`estimate`, ``[M]``, over the draws of an edge and of a probe.

    ``law`` is the probability of each graph, ``[S]``; ``there`` and ``missing`` are the effect of each pair at the output with it and at that
    without it, ``[S, M]``, given the rest of the graph.
    """
    share = shares(p, chance)
    mean = law @ (share * there + (1 - share) * missing)
    second = law @ (share**2 / p * there**2 + (1 - share) ** 2 / ((1 - p) * chance) * missing**2)
    return mean, second - mean**2


def effects(
    weight: Tensor, value: Tensor, present: Tensor, loss: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Effects of pairs on the loss of a query, given the rest of the graph: exact, and by the slope with the pair and without it, ``[S, M]``.

    ``weight`` and ``value`` are exponentials of scores ``[M]``, and values ``[M, C]``; ``present`` are graphs, ``[S, M]``.
    """
    kept = torch.where(present, weight, 0)
    rest = kept.sum(-1, keepdim=True) - kept
    total = (kept @ value)[:, None] - kept[..., None] * value
    others = present.sum(-1, keepdim=True) > present
    without = torch.where(others[..., None], total / rest.where(others, 1)[..., None], 0).requires_grad_()
    around = torch.where(others, rest, 0)[..., None] * without.detach()
    having = ((around + weight[:, None] * value) / (torch.where(others, rest, 0) + weight)[..., None]).requires_grad_()
    losses = loss(having), loss(without)
    slopes = (torch.autograd.grad(each.sum(), out)[0] for each, out in zip(losses, (having, without), strict=True))
    step = (having - without).detach()
    there, missing = ((step * slope).sum(-1) for slope in slopes)
    return (losses[0] - losses[1]).detach(), there, missing


def one_query(keys: int, usual: float, follows: bool, numbers: tuple[int, ...], graphs: int, random: Random) -> Errors:
    """Errors of one random query, for each number of probes."""
    shapes = ((keys,), (keys,), (keys, CHANNELS), (2, CHANNELS), (CHANNELS,))
    score, noise, value, readout, residual = (random.normal(*shape) for shape in shapes)
    spread = 0.9 * score + math.sqrt(1 - 0.9**2) * noise if follows else noise
    p = (math.log(usual / (1 - usual)) + 1.5 * spread).sigmoid().clamp(0.002, 0.98)
    if keys <= 10:
        present = torch.arange(2**keys)[:, None] & 2 ** torch.arange(keys) > 0
        law = torch.where(present, p, 1 - p).prod(-1)
    else:
        present, law = random.uniform(graphs, keys) < p, p.new_full((graphs,), 1 / graphs)

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
        alike**0.5 * random.normal(BLOCKS, CHANNELS)[block] + (1 - alike) ** 0.5 * random.normal(TOKENS, CHANNELS)
        for _ in range(4)
    )
    matrix = 0.02 + 0.08 * random.uniform(BLOCKS, BLOCKS)
    matrix.diagonal().fill_(0.4)
    p, weight, gain = member @ matrix @ member.T, (query @ key.T / CHANNELS**0.5).exp(), slope @ value.T
    chance = torch.full_like(p, probes / TOKENS)
    present, probed = (random.uniform(graphs, TOKENS, TOKENS) < each for each in (p, chance))
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


def report(rows: Rows) -> str:
    """Errors of what is done today, and the variances of the other ways relative to it; a table for each of the two questions."""
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    for row in rows:
        row["case"] = (f"{row['keys']:g}", f"{row['probes']:g}", row["p"], row["gradient to"])
    for case, ways in by(rows, "case").items():
        usual, *others = ways
        header = ["keys", "probes", "p", "gradient to", f"{usual['method']}: bias", "standard deviation"]
        line = [*case, f"{usual['bias']:.2f}", f"{usual['deviation']:.2f}"]
        for other in others:
            line.append(f"{other['deviation'] ** 2 / usual['deviation'] ** 2:.2f}")
            header.append(f"variance, {other['method']}")
            if abs(other["bias"] - usual["bias"]) > 0.1 and "known" not in other["method"]:
                line[-1] += f" (bias {other['bias']:.2f})"
        tables.setdefault(tuple(header), []).append(line)
    return "\n\n".join(markdown(header, lines) for header, lines in tables.items())


def main(arguments: list[str] | None = None) -> None:
    """Measures what the table does not hold, and shows it."""
    given = command.read(arguments)
    if not given.csv.exists():
        random, graphs = Random(given.seed), given.graphs
        kinds = [(keys, usual, follows, numbers) for keys, usual, numbers in ONE_QUERY for follows in (False, True)]
        parts = [partial(one_query, *kind, graphs, random) for kind in kinds]
        parts += [partial(block_pairs, alike, 16, 2 * graphs, random) for alike in (0.1, 0.5, 0.9)]
        rows: Rows = []
        for part in tqdm(parts, unit="part"):
            rows += measure(given.cases if part.func is one_query else math.ceil(given.cases / 10), part)
        add(given.csv, rows)
    else:
        print(f"{given.csv} is there: nothing was measured. Take another --csv for other problems.", file=sys.stderr)
    print(report(read(given.csv)))


if __name__ == "__main__":
    main()
