"""Learns the graph of a PyG layer: 128 nodes in 16 hidden groups; is the sum of the values of a node's group positive?

    python examples/learned_graph.py                              # one minute: 73 % with learned edges, 61 % with random ones
    python examples/learned_graph.py --source block --steps 2000  # three minutes: 87 %

The features hold a noisy code of the group in 8 channels, a value, and noise. A `GraphConv`, or two in a row (`GraphSAGE`), sums over
learned edges; as many random ones; those between nodes of the same nearest code, if the codes are known; and those of the true groups.
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, default in (("steps", 500), ("seed", 0), ("density", 0.1), ("probes", 32.0)):
    parser.add_argument(f"--{name}", type=type(default), default=default, help="(default: %(default)s)")
for name, names in (("source", ("indexer", "block")), ("layer", ("GraphConv", "GCNConv", "GraphSAGE"))):
    parser.add_argument(f"--{name}", choices=names, default=names[0], help="(default: %(default)s)")
if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parser.parse_args()

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric.nn import GCNConv, GraphConv, Sequential

from sbm_pyg import LearnedGraph, SBMHead, SBMSource, patterns
from sbm_pyg.progress import tqdm
from sbm_pyg.sources.indexer import Indexer, IndexerSource

NODES, GROUPS, CODE, CHANNELS, BATCH, CALL = 128, 16, 8, 32, 16, "x, e, w -> x"
LAYERS: dict[str, Callable] = {"GraphConv": lambda: GraphConv(CHANNELS, 1), "GCNConv": lambda: GCNConv(CHANNELS, 1)}
LAYERS["GraphSAGE"] = lambda: Sequential(
    "x, e, w", [(GraphConv(CHANNELS, CHANNELS), CALL), torch.nn.ReLU(), (GraphConv(CHANNELS, 1), CALL)]
)


def make_data(count: int, codes: Tensor, random: torch.Generator) -> list[Tensor]:
    """Features of the nodes of all graphs, offsets, the group of each node among those of all graphs, and labels."""
    group = torch.randint(GROUPS, (count * NODES,), generator=random)
    x = torch.randn(count * NODES, CHANNELS, generator=random)
    x[:, :CODE] = codes[group] + 0.5 * x[:, :CODE]
    group += torch.arange(count).repeat_interleave(NODES) * GROUPS
    total = torch.zeros(count * GROUPS).index_add(0, group, x[:, CODE])
    return [x, torch.arange(count + 1) * NODES, group, (total[group] > 0).float()]


def train(edges: Callable, learned: LearnedGraph, options: argparse.Namespace, name: str) -> tuple[float, float, str]:
    """Accuracy and edges per node on new graphs, and mean probabilities if there are any."""
    random = torch.Generator().manual_seed(options.seed)
    conv, codes = LAYERS[options.layer](), torch.randn(GROUPS, CODE, generator=random).sign()
    optimizer = torch.optim.Adam([*conv.parameters(), *learned.parameters()], 1e-2)
    for step in tqdm(range(options.steps), desc=name, unit="step"):
        x, ptr, group, label = make_data(BATCH, codes, random)
        edge_index, edge_weight, _ = edges(x, ptr, group, options.seed * 10**6 + step)
        loss = binary_cross_entropy_with_logits(conv(x, edge_index, edge_weight)[:, 0], label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    learned.eval()
    x, ptr, group, label = make_data(64, codes, torch.Generator().manual_seed(2**32))
    with torch.no_grad():
        edge_index, edge_weight, choice = edges(x, ptr, group, 0)
        is_correct, words = (conv(x, edge_index, edge_weight)[:, 0] > 0) == (label > 0), ""
        if choice is not None and choice.probability is not None:
            pairs = (full := patterns.full(None, ptr=ptr)).select(full.lag != 0)
            p, same = choice.probability.on(pairs).clamp(max=1), group[pairs.edge_index].diff(dim=0)[0] == 0
            words = f", p {float(p[same].mean()):.3f} in a group and {float(p[~same].mean()):.3f} between groups"
    return float(is_correct.double().mean()), edge_index.size(1) / len(x), words


def main(arguments: list[str] | None = None) -> None:
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"Expected 'steps' to be at least 1 (got {options.steps}). See --help.")
    torch.manual_seed(options.seed)
    block, at = options.source == "block", {"target_density": options.density}
    scorer = SBMHead(CHANNELS, num_clusters=32) if block else Indexer(CHANNELS, index_heads=4, index_channels=16)
    source = SBMSource(scorer, **at) if block else IndexerSource(scorer, select="bernoulli", **at)
    learned, degree = LearnedGraph(source, probes=options.probes), 0.0
    codes = torch.randn(GROUPS, CODE, generator=torch.Generator().manual_seed(options.seed)).sign()

    def of_groups(group: Tensor) -> tuple[Tensor, None, None]:
        return (group[:, None] == group).fill_diagonal_(False).nonzero().T, None, None

    arms: dict[str, Callable] = {
        "learned": lambda x, ptr, group, seed: learned(x, ptr=ptr, seed=seed, return_choice=True),
        "random": lambda x, ptr, group, seed: (patterns.random(None, round(degree), ptr=ptr, seed=seed).edge_index, None, None),
        "decoded": lambda x, ptr, group, seed: of_groups(group // GROUPS * GROUPS + torch.cdist(x[:, :CODE], codes).argmin(1)),
        "true": lambda x, ptr, group, seed: of_groups(group),
    }  # fmt: skip
    for name, edges in arms.items():
        accuracy, edges_per_node, words = train(edges, learned, options, name)
        degree = degree or edges_per_node
        print(f"{name:<8} accuracy {accuracy:.1%}, {edges_per_node:.1f} edges per node{words}")


if __name__ == "__main__":
    main()
