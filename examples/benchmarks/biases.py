"""What a DCMM bias costs over the edges of a sampled graph, and what it costs as a dense array: time and peak memory of a training step.

    python -m examples.benchmarks.biases                                  seven minutes on one core; 16,384 tokens need 8 GiB
    python -m examples.benchmarks.biases --tokens 1024 4096 --density 0.05

One head of 32 channels, 100 blocks of the bias, 32 of the graph. First, on 256 tokens, edges and dense arrays must have the same outputs and
gradients. Each turn is a process of its own. Memory is the peak beyond what the process held before (Linux alone).
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

NAMES = ("sbm", "sbm, dcmm", "dense dcmm")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096, 16384], metavar="N")
    parser.add_argument("--density", type=float, default=0.01, help="of the sampled graph (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default: %(default)s)")
    parser.add_argument("--csv", type=Path, default=Path("biases.csv"), help="where to write (default: %(default)s)")
    parser.add_argument("--only", choices=NAMES, help=argparse.SUPPRESS)  # one turn, in a process of its own
    given = parser.parse_args(arguments)
    if not 0 < given.density <= 1 or min(*given.tokens, given.rounds) < 1:
        parser.error(
            f"Expected 'density' in (0, 1] and others above 0 (got {given.density}, {given.tokens}, {given.rounds})."
        )
    return given


if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parse(None)

import statistics
import time

import torch
from torch import Tensor

from examples.benchmarks.choosers import memory
from examples.benchmarks.tables import add, markdown
from sbm_pyg import AttentionGraph, DCMMBias, SBMAttentionConv
from sbm_pyg.info import tqdm

CHANNELS, TOLERANCE = 32, 1e-4


def layer(name: str, density: float) -> SBMAttentionConv:
    """The layer of a name, with the same parameters as its peers; the dense one takes them for itself."""
    torch.manual_seed(0)
    bias = DCMMBias(CHANNELS, 1, 100, degree="softplus")
    options = {"parameterization": "overlapping", "cluster_init": "orthogonal"}
    added = None if name == "sbm" else bias
    return SBMAttentionConv(64, CHANNELS, num_blocks=32, sbm_options=options, share=density, score_bias=added)


def dense(conv: SBMAttentionConv, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """What the layer does, over all pairs or those of a mask, with arrays of N x N as the authors of the bias have them."""
    query, key, value = (linear(x) for linear in (conv.lin_query, conv.lin_key, conv.lin_value))
    assert isinstance(conv.score_bias, DCMMBias)
    model = conv.score_bias.predict(query[None], key[None])
    strength = (model.query_membership[0] @ model.block_matrix[0] @ model.key_membership[0].mT).tanh()
    bias = conv.score_bias.scale * (model.query_degree[0][:, None] * model.key_degree[0][None]) * strength
    scores = query @ key.mT * CHANNELS**-0.5 + bias
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1).nan_to_num(0) @ value


def gate(density: float) -> None:
    """Refuse to go on unless edges and dense arrays say the same."""
    conv, x = layer("sbm, dcmm", max(density, 0.1)).eval(), torch.randn(256, 64)
    out, graph = conv(x, seed=0, return_graph=True)
    assert isinstance(graph, AttentionGraph)
    parameters = [*conv.score_bias.parameters()]
    both = [
        (each, *torch.autograd.grad(each.square().sum(), parameters))
        for each in (out, dense(conv, x, graph.to_dense()[0] > 0))
    ]
    for one, other in zip(*both, strict=True):
        if (one - other).abs().max() > TOLERANCE * other.abs().max().clamp(min=1):
            sys.exit("edges and dense arrays disagree")


def turn(name: str, n: int, density: float) -> dict[str, float]:
    """Seconds of the third training step, the first on few tokens; and MiB at the peak of the last two."""
    conv = layer(name, density)
    x = torch.randn(n, 64, generator=torch.Generator().manual_seed(n))
    grad, edges = torch.ones(n, CHANNELS), float(n * n)
    before = 0.0
    for number, tokens in enumerate((x[:512], x, x)):
        before = memory("VmRSS") if number == 1 else before
        start = time.perf_counter()
        if name == "dense dcmm":
            out = dense(conv, tokens)
        else:
            out, graph = conv(tokens, seed=0, return_graph=True)
            edges = graph.num_edges
        out.backward(grad[: len(tokens)])
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "MiB": memory("VmHWM") - before, "edges": edges}


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    torch.set_num_threads(1)
    if given.only:
        print(json.dumps(turn(given.only, given.tokens[0], given.density)))
        return
    gate(given.density)
    rows: list[dict[str, float | str]] = []
    turns = [(n, name) for n in given.tokens for _ in range(given.rounds) for name in NAMES]
    for n, name in tqdm(turns, unit="turn"):
        options = ["--tokens", str(n), "--density", str(given.density), "--only", name]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "examples.benchmarks.biases", *options],
            capture_output=True,
            text=True,
            check=False,
        )
        found = (
            json.loads(done.stdout)
            if done.returncode == 0
            else {"seconds": float("nan"), "MiB": float("nan"), "edges": float("nan")}
        )
        rows.append({"tokens": n, "arm": name, **found})
    given.csv.unlink(missing_ok=True)
    add(given.csv, rows)
    table = []
    for n in given.tokens:
        for name in NAMES:
            own = [row for row in rows if (row["tokens"], row["arm"]) == (n, name)]
            seconds, mib, edges = (
                statistics.median(float(row[key]) for row in own) for key in ("seconds", "MiB", "edges")
            )
            table.append([f"{n:,}", name, f"{edges:,.0f}", f"{seconds:.3g}", f"{mib:,.0f}"])
    print(markdown(["N", "arm", "pairs with a score", "seconds", "MiB"], table))


if __name__ == "__main__":
    main()
