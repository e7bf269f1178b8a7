"""Lemma 1 of Cho et al. as an experiment: expected Hamiltonian cycles of random graphs, and graphs with a Hamiltonian path.

    pip install -e ".[analysis]"
    python examples/lemma1.py

The lemma shows that for some p of order 1/n at least one Hamiltonian cycle is expected in a random graph G(n, p). Expect 10^4.7 cycles
at p = 0.051 and 64 tokens, and a path in 5.5 % of 200 graphs: the expectation comes from rare graphs with very many cycles.
"""

import argparse
import math
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", type=int, default=64, help="tokens n of a graph (default: %(default)s)")
parser.add_argument("--graphs", type=int, default=200, help="graphs for each probability (default: %(default)s)")
parser.add_argument("--seed", type=int, default=0, help="seed of the graphs and of the searches (default: %(default)s)")
parser.add_argument("--out", type=Path, default=Path("lemma1.png"), help="figure (default: %(default)s)")
if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parser.parse_args()

import torch
from torch import Tensor

from sbm_pyg import AttentionGraph, analysis


def log10_cycles(n: int, p: Tensor) -> Tensor:
    """Decimal logarithm of the expected number of Hamiltonian cycles in G(n, p), p^n (n-1)!."""
    return (n * p.log() + math.lgamma(n)) / math.log(10)


def path_probability(n: int, p: Tensor) -> Tensor:
    """Probability of a Hamiltonian path in G(n, p) for large n: at most one token without incoming edges, and one without outgoing ones.

    Both numbers are Poisson with mean n (1-p)^(n-1), by the directed form of the theorem of Komlós and Szemerédi (1983).
    """
    mean = n * (1 - p) ** (n - 1)
    return ((1 + mean) * (-mean).exp()) ** 2


def interval(paths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """95 % interval of a probability (Wilson, 1927) of which so many of ``count`` cases were true."""
    share, widening = paths / count, 1.959964**2 / count
    half = 1.959964 * (share * (1 - share) / count + widening / (4 * count)).sqrt()
    return (share + widening / 2 - half) / (1 + widening), (share + widening / 2 + half) / (1 + widening)


def count_paths(n: int, p: float, graphs: int, random: torch.Generator) -> int:
    """Number of random graphs with a Hamiltonian path, each decided exactly."""
    masks = torch.rand(graphs, n, n, generator=random) < p
    return sum(bool(analysis.hamiltonian_path(AttentionGraph.from_dense(mask), time_limit=60)) for mask in masks)


def main(arguments: list[str] | None = None) -> None:
    from matplotlib.figure import Figure

    options = parser.parse_args(arguments)
    n, graphs = options.tokens, options.graphs
    if wrong := [name for name, least in (("tokens", 3), ("graphs", 1)) if getattr(options, name) < least]:
        parser.error(f"Expected '{wrong[0]}' to be larger (got {getattr(options, wrong[0])}). See --help.")
    of_lemma = math.e * n ** (1 / n) / n
    p = torch.linspace(0.5 * of_lemma, (math.log(n) + 4) / n, 12).clamp(max=1)
    random = torch.Generator().manual_seed(options.seed)
    paths = torch.tensor([float(count_paths(n, float(x), graphs, random)) for x in p])
    (low, high), limit, cycles = interval(paths, graphs), path_probability(n, p), log10_cycles(n, p)
    print(f"{n} tokens, {graphs} graphs for each p; the lemma has p = {of_lemma:.4g}\n")
    print("       p   expected cycles   P(path)   95 % interval       limit")
    for row in zip(p, cycles, paths / graphs, low, high, limit, strict=True):
        print("{:8.4f}          10^{:<5.1f} {:9.3f}   {:.3f} to {:.3f} {:11.3f}".format(*map(float, row)))
    figure = Figure(figsize=(7.6, 4.8), layout="constrained")
    axes = figure.subplots()
    bars = torch.stack([paths / graphs - low, high - paths / graphs]).clamp(min=0)
    axes.plot(p, limit, label="path, limit for large n")
    axes.errorbar(p, paths / graphs, bars, fmt="o", capsize=3, label=f"path, fraction of {graphs} graphs")
    axes.axvline(of_lemma, ls=":", color="gray", label="p of the lemma")
    axes.set(xlabel=f"edge probability p of G({n}, p)", ylabel="probability of a Hamiltonian path")
    expected = axes.twinx()
    expected.plot(p, cycles, "s--", color="C3", label="cycles, expected number")
    expected.set_ylabel("expected number of cycles\n(decimal logarithm)", color="C3")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(options.out, dpi=110)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
