"""Samples graphs of three densities from a block model, and asks what they can do: networkx, paths, universality.

    pip install -e ".[analysis]"
    python examples/graph_analysis.py

Expect a Hamiltonian path at densities of 5 and 15 %, and at 2 % a proof that no path exists: two tokens have no incoming edge.
The paper's construction (lemma 2) is universal: after s = 5 steps every token has information from every other.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", type=int, default=128, help="tokens of the sequence (default: %(default)s)")
parser.add_argument("--blocks", type=int, default=4, help="blocks of the model (default: %(default)s)")
parser.add_argument("--seed", type=int, default=0, help="seed of the sampled graphs (default: %(default)s)")
parser.add_argument("--out", type=Path, default=Path("graph_analysis.png"), help="figure (default: %(default)s)")
if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parser.parse_args()

import networkx as nx
import torch

from sbm_pyg import SBM, AttentionGraph, analysis, sample_edges


def communities(tokens: int, blocks: int, density: float) -> SBM:
    """Each token in one block; an edge inside a block is twenty times as probable as one between blocks."""
    member = torch.nn.functional.one_hot(torch.arange(tokens) * blocks // tokens, blocks).float()[None]
    block = (torch.eye(blocks) * 0.95 + 0.05)[None]
    sbm = SBM(member, member, block)
    return SBM(member, member, block * density / sbm.expected_density())


def describe(graph: AttentionGraph, sbm: SBM) -> str:
    """What a graph of one head and one sequence can carry, each answer with its evidence."""
    network = analysis.to_networkx(graph, sbm=sbm)  # edges carry "probability", nodes "community"
    inside = sum(network.nodes[key]["community"] == network.nodes[query]["community"] for key, query in network.edges)
    return f"""{graph}
  edges inside a block   {inside / max(network.number_of_edges(), 1):.1%}
  strongly connected     {nx.is_strongly_connected(network)}
  Hamiltonian path       {analysis.hamiltonian_path(graph, time_limit=5)}
  universal (sample)     {analysis.universality(graph, self_loops=True, time_limit=5).holds}"""


def main(arguments: list[str] | None = None) -> None:
    from matplotlib.figure import Figure

    options = parser.parse_args(arguments)
    if wrong := [name for name in ("tokens", "blocks") if getattr(options, name) < 1]:
        parser.error(f"Expected '{wrong[0]}' to be at least 1 (got {getattr(options, wrong[0])}). See --help.")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    densities = (0.02, 0.05, 0.15)
    figure = Figure(figsize=(9.2, 3.4), layout="constrained")
    for axes, density in zip(figure.subplots(1, len(densities)), densities, strict=True):
        sbm = communities(options.tokens, options.blocks, density)
        graph = sample_edges(sbm, clamp=True, seed=options.seed)
        print(describe(graph, sbm))
        axes.imshow(graph.to_dense()[0].numpy(), cmap="magma_r", interpolation="nearest")
        axes.set(title=f"density {density:.0%}", xlabel="key (token)", ylabel="query (token)")
    figure.savefig(options.out, dpi=110)
    print(f"wrote {options.out}")
    print(analysis.universality(analysis.lemma2(options.tokens, options.blocks).graphs))  # the paper's construction


if __name__ == "__main__":
    main()
