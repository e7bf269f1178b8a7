"""A graph transformer where far edges matter: Tree-NeighborsMatch (Alon and Yahav, "On the Bottleneck of GNNs", 2021).

    python examples/graph_transformer.py

Each graph is a binary tree with edges towards its root. Leaves have keys that all differ, and random labels. The root has
the key of one leaf and must tell its label. Message passing squeezes all leaves into the vectors of two nodes. A layer of
attention may join root and leaf: along all pairs, random ones, or learned ones, which a Sparsifier makes few.
"""

import argparse

ARMS = ("gcn", "gat", "full", "random", "learned")
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, default in (("depth", 5), ("steps", 500), ("seed", 0), ("density", 0.05)):
    parser.add_argument(f"--{name}", type=type(default), default=default, help="(default: %(default)s)")
parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="what to train (default: all)")
if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parser.parse_args()

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GATConv, GCNConv

from sbm_pyg import AttentionConv, SBMAttentionConv, SparseGPSConv, Sparsifier, patterns
from sbm_pyg.progress import tqdm

CHANNELS, HEADS = 64, 4


def make_data(count: int, depth: int, random: torch.Generator) -> list[Tensor]:
    """Keys and labels of nodes (0: none), edges, the tree of each node, and roots; then the labels that roots must tell."""
    leaves, nodes = 2**depth, 2 ** (depth + 1) - 1
    key, label = torch.zeros(2, count, nodes, dtype=torch.int64)
    key[:, -leaves:] = 1 + torch.rand(count, leaves, generator=random).argsort(1)
    label[:, -leaves:] = torch.randint(1, leaves + 1, (count, leaves), generator=random)
    leaf = torch.randint(nodes - leaves, nodes, (count, 1), generator=random)
    key[:, :1] = key.gather(1, leaf)
    child, root = torch.arange(1, nodes), nodes * torch.arange(count)
    edge_index = torch.stack([child, (child - 1) // 2])[:, None] + root[:, None]
    batch = torch.arange(count).repeat_interleave(nodes)
    return [key.flatten(), label.flatten(), edge_index.flatten(1), batch, root, label.gather(1, leaf)[:, 0]]


class Model(nn.Module):
    def __init__(self, arm: str, depth: int, density: float) -> None:
        super().__init__()
        self.key, self.label = nn.Embedding(2**depth + 1, CHANNELS), nn.Embedding(2**depth + 1, CHANNELS)
        self.out, shape = nn.Linear(CHANNELS, 2**depth + 1), (CHANNELS, CHANNELS // HEADS, HEADS)
        layers = depth + 1 if arm in ("gcn", "gat") else 1  # as in the paper
        if arm == "learned":
            attn: AttentionConv = SBMAttentionConv(*shape, num_clusters=32, window=None)
        elif arm in ("full", "random"):
            degree = {"num_keys_per_query": round(density * 2 ** (depth + 1)), "heads": HEADS}
            random = patterns.PatternSource(patterns.random, **degree)
            attn = AttentionConv(*shape, random if arm == "random" else patterns.PatternSource(patterns.full))
        convs = [GATConv(*shape) if arm == "gat" else GCNConv(CHANNELS, CHANNELS) for _ in range(layers)]
        self.layers = nn.ModuleList(convs if layers > 1 else [SparseGPSConv(CHANNELS, convs[0], attn, norm=None)])

    def forward(self, key: Tensor, label: Tensor, edge_index: Tensor, batch: Tensor, root: Tensor) -> Tensor:
        x = self.key(key) + self.label(label)
        for layer in self.layers:
            x = layer(x, edge_index, batch) if isinstance(layer, SparseGPSConv) else x + layer(x, edge_index).relu()
        return self.out(x[root])


def main(arguments: list[str] | None = None) -> None:
    options = parser.parse_args(arguments)
    if wrong := [name for name in ("depth", "steps") if getattr(options, name) < 1]:
        parser.error(f"Expected '{wrong[0]}' to be at least 1 (got {getattr(options, wrong[0])}). See --help.")
    print(f"{2 ** (options.depth + 1) - 1} nodes, chance {0.5**options.depth:.1%}\narm      layers  accuracy  density")
    for arm in options.arms:
        torch.manual_seed(options.seed)
        random, held_out = (torch.Generator().manual_seed(seed) for seed in (options.seed, 2**32))
        model = Model(arm, options.depth, options.density)
        optimizer = torch.optim.Adam(model.parameters(), 4e-3)
        sparsifier = Sparsifier(model, options.density, options.steps) if arm == "learned" else None
        for _ in tqdm(range(options.steps), desc=arm, unit="step"):
            *inputs, answer = make_data(64, options.depth, random)
            loss = cross_entropy(model(*inputs), answer)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if sparsifier:
                sparsifier.step(loss)
        key, label, edge_index, batch, root, answer = make_data(1000, options.depth, held_out)
        with torch.no_grad():
            accuracy = (model.eval()(key, label, edge_index, batch, root).argmax(1) == answer).double().mean()
            if attention := isinstance(layer := model.layers[0], SparseGPSConv):
                graph = layer.attn(model.key(key) + model.label(label), batch=batch, return_graph=True)[1]
        words = f"{float(graph.density.mean()):8.1%}" if attention else "    none"
        print(f"{arm:<8} {len(model.layers):6} {float(accuracy):9.1%} {words}")


if __name__ == "__main__":
    main()
