"""PATTERN and CLUSTER of Dwivedi et al., "Benchmarking Graph Neural Networks" (JMLR 2023): many graphs of stochastic block models.

The generators follow https://github.com/graphdeeplearning/benchmarking-gnns, folder ``data/SBMs``, with other random numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import stochastic_blockmodel_graph, to_undirected

from sbm_pyg.progress import tqdm

KINDS = ("pattern", "cluster")
SIZES = (5, 35)  # of communities: from 5 to 34 nodes, as in the original
NUM_PATTERNS = 100
WORDS = 3  # features of PATTERN


def generate(kind: str, count: int, seed: int) -> list[Data]:
    """Graphs with one-hot features ``x`` and labels ``y`` of nodes, and undirected edges; the same for the same seed.

    Args:
        kind: "pattern": which nodes belong to a pattern, one of 100, that was joined to five communities? Edges have a probability of
            0.5 within a community, 0.35 between two, and 0.5 between pattern and others; features are one of three, at random.
            "cluster": which of six communities does a node belong to? Edges have probabilities of 0.55 and 0.25; one node of each
            community has its label as a feature, all others have none.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # patterns are those of all parts
        patterns = [_make_pattern() for _ in range(NUM_PATTERNS if kind == "pattern" else 0)]
        torch.manual_seed(seed)
        numbers = tqdm(range(count), desc=f"generate {kind}", unit="graph")
        return [_pattern(patterns[n % NUM_PATTERNS]) if patterns else _cluster() for n in numbers]


def _make_pattern() -> tuple[Tensor, Tensor]:
    """Features, and edges ``[2, E]`` from lower to higher nodes."""
    size = int(torch.randint(*SIZES, ()))
    edge_index = stochastic_blockmodel_graph([size], [[0.5]])
    return torch.randint(WORDS, (size,)), edge_index[:, edge_index[0] < edge_index[1]]


def _pattern(pattern: tuple[Tensor, Tensor]) -> Data:
    word, inner = pattern
    sizes = torch.cat([torch.randint(*SIZES, (5,)), torch.tensor([len(word)])])
    probabilities = torch.full((6, 6), 0.35)
    probabilities.diagonal().fill_(0.5)
    probabilities[5] = probabilities[:, 5] = 0.5
    probabilities[5, 5] = 0  # its own edges are given
    begin = int(sizes[:5].sum())
    word = torch.cat([torch.randint(WORDS, (begin,)), word])
    edge_index = torch.cat([stochastic_blockmodel_graph(sizes, probabilities), begin + inner], 1)
    return _shuffled(word, WORDS, (torch.arange(len(word)) >= begin).long(), edge_index)


def _cluster() -> Data:
    sizes = torch.randint(*SIZES, (6,))
    probabilities = torch.full((6, 6), 0.25)
    probabilities.diagonal().fill_(0.55)
    label = torch.arange(6).repeat_interleave(sizes)
    labeled = sizes.cumsum(0) - sizes + (torch.rand(6) * sizes).long()
    word = torch.zeros_like(label).index_put((labeled,), 1 + torch.arange(6))
    return _shuffled(word, 7, label, stochastic_blockmodel_graph(sizes, probabilities))


def _shuffled(word: Tensor, words: int, label: Tensor, edge_index: Tensor) -> Data:
    """A graph whose nodes are in a random order."""
    order = torch.randperm(len(word))
    x = torch.nn.functional.one_hot(word[order], words).float()
    return Data(x=x, y=label[order], edge_index=to_undirected(order.argsort()[edge_index], num_nodes=len(word)))
