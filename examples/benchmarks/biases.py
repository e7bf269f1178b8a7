"""The cost of a DCMM bias over the edges of a sampled graph, and as a dense array: time and peak memory of a training step.

    python -m examples.benchmarks.biases                                  seven minutes on one core; 16,384 tokens need 8 GiB
    python -m examples.benchmarks.biases --tokens 1024 4096 --density 0.05

One head of 32 channels, 100 blocks of the bias, 32 of the graph. First, on 256 tokens, edges and dense arrays must have the same outputs and
gradients. Each turn is a process of its own. Memory is the peak beyond what the process held before (Linux alone).
"""

import argparse
import sys
from pathlib import Path

from examples.common.command import Command

NAMES = ("sbm", "sbm, dcmm", "dense dcmm")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    command = Command("python -m examples.benchmarks.biases", __doc__)
    command.option("tokens", [1024, 4096, 16384], metavar="N", least=1)
    command.option("density", 0.01, "of the sampled graph", above=0)
    command.option("rounds", 3, "turns of each", least=1)
    command.option("csv", Path("biases.csv"), "where to write")
    given = command.read(arguments)
    command.require(given.density <= 1, "'density' in (0, 1]", given.density)
    return given


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import time
from functools import partial

import torch
from torch import Tensor

from examples.benchmarks.turns import measure_turns, medians, memory
from examples.common.tables import groups, markdown
from sbm_pyg import AttentionGraph, DCMMBias, SBMAttentionConv, make_attention

CHANNELS, TOLERANCE = 32, 1e-4
MEASURED = ("edges", "seconds", "MiB")


def layer(name: str, density: float) -> SBMAttentionConv:
    """The layer of a name, with the same parameters as its peers; the dense one uses them, too."""
    torch.manual_seed(0)
    bias = DCMMBias(CHANNELS, 1, 100, degree="softplus")
    options = {"parameterization": "overlapping", "cluster_init": "orthogonal"}
    added = None if name == "sbm" else bias
    return make_attention(
        "sbm", 64, CHANNELS, num_clusters=32, **options, target_density=density, score_bias=added, window=None
    )


def dense(conv: SBMAttentionConv, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The layer over all pairs or those of a mask, with arrays of N x N as the authors of the bias have them."""
    query, key, value = (linear(x) for linear in (conv.lin_query, conv.lin_key, conv.lin_value))
    assert isinstance(conv.score_bias, DCMMBias)
    model = conv.score_bias.predict(query[None], key[None])
    strength = (model.query_membership[0] @ model.block_matrix[0] @ model.key_membership[0].mT).tanh()
    bias = conv.score_bias.scale * (model.query_degree[0][:, None] * model.key_degree[0][None]) * strength
    scores = query @ key.mT * CHANNELS**-0.5 + bias
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1).nan_to_num(0) @ value


def gate(density: float) -> None:
    """Refuses to go on unless edges and dense arrays agree."""
    conv, x = layer("sbm, dcmm", max(density, 0.1)).eval(), torch.randn(256, 64)
    out, graph = conv(x, seed=0, return_graph=True)
    assert isinstance(graph, AttentionGraph)
    parameters = [*conv.score_bias.parameters()]
    outs = (out, dense(conv, x, graph.to_dense()[0] > 0))
    both = [(each, *torch.autograd.grad(each.square().sum(), parameters)) for each in outs]
    for one, other in zip(*both, strict=True):
        if (one - other).abs().max() > TOLERANCE * other.abs().max().clamp(min=1):
            sys.exit("edges and dense arrays disagree")


def turn(arm: str, tokens: int, density: float) -> dict[str, float]:
    """Seconds of the third training step, the first on few tokens; and MiB at the peak of the last two."""
    torch.set_num_threads(1)
    conv = layer(arm, density)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens))
    grad, edges = torch.ones(tokens, CHANNELS), float(tokens**2)
    before = 0.0
    for number, part in enumerate((x[:512], x, x)):
        before = memory("VmRSS") if number == 1 else before
        start = time.perf_counter()
        if arm == "dense dcmm":
            out = dense(conv, part)
        else:
            out, graph = conv(part, seed=0, return_graph=True)
            edges = graph.num_edges
        out.backward(grad[: len(part)])
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "MiB": memory("VmHWM") - before, "edges": edges}


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    gate(given.density)
    turns = [{"tokens": n, "arm": name} for n in given.tokens for _ in range(given.rounds) for name in NAMES]
    rows = measure_turns(partial(turn, density=given.density), turns, MEASURED, given.csv)
    table = []
    for n, name, some in groups(rows, "tokens", "arm"):
        edges, seconds, mib = medians(some, MEASURED).values()
        table.append([f"{n:,}", name, f"{edges:,.0f}", f"{seconds:.3g}", f"{mib:,.0f}"])
    print(markdown(["N", "arm", "pairs with a score", "seconds", "MiB"], table))


if __name__ == "__main__":
    main()
