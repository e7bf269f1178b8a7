"""Peers of graph transformers with 4 heads: global attention of one graph and of a batch of graphs, and messages with features of edges.

First, layers of PyG and ours must have the same outputs and gradients: attention over full graphs, and messages over the same edges.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch_geometric.nn import GPSConv, TransformerConv
from torch_geometric.nn.attention import PerformerAttention, SGFormerAttention

import sbm_pyg
from examples.benchmarks.kernels import Case, Peer, Work, calls
from examples.common.gate import compare
from sbm_pyg import AttentionConv, SparseGPSConv, make_attention, patterns

CHANNELS, HEADS = 64, 4
SHAPE = (CHANNELS, CHANNELS // HEADS, HEADS)
EDGES = 16  # of a node and head that is learned or random, and of a node with features
FEATURES = 16  # of an edge
GRAPHS, LEAST = 32, 100  # graphs of a batch, and nodes of its smallest


def _make(name: str) -> nn.Module:
    """A layer without message passing, or the attention of PyG alone."""
    if name in ("performer", "sgformer"):
        kind = PerformerAttention if name == "performer" else SGFormerAttention
        return kind(CHANNELS, HEADS, CHANNELS // HEADS)
    if name.startswith("gps-"):
        return GPSConv(CHANNELS, None, HEADS, attn_type=name.removeprefix("gps-"))
    if name == "learned":
        attn = make_attention("sbm", *SHAPE, num_clusters=32, budget=float(EDGES), window=None)
    elif name == "random":
        attn = AttentionConv(*SHAPE, patterns.PatternSource(patterns.random, num_keys_per_query=EDGES, heads=HEADS))
    else:
        attn = AttentionConv(*SHAPE, patterns.PatternSource(patterns.full))
    return SparseGPSConv(CHANNELS, None, attn)


def _difference(pyg: Callable[[], Tensor], ours: Callable[[], Tensor], leaves: Sequence[Tensor]) -> float:
    """Largest relative difference of two outputs and their gradients."""
    results = [[out, *torch.autograd.grad(out.sin().sum(), leaves)] for out in (ours(), pyg())]
    return compare({f"result {number}": (*pair,) for number, pair in enumerate(zip(*results, strict=True))})


@cache
def check_attention() -> float:
    """Compares a layer of PyG with ours over full graphs."""
    torch.manual_seed(0)
    gps, x = GPSConv(CHANNELS, None, HEADS, attn_type="multihead"), torch.randn(70, CHANNELS, requires_grad=True)
    sparse, batch = SparseGPSConv.from_gps(gps, source=None), torch.repeat_interleave(torch.tensor([9, 40, 21]))
    return _difference(lambda: gps(x, None, batch), lambda: sparse(x, None, batch), [x])


def sizes_of(largest: int) -> list[int]:
    """Nodes of each graph of a batch, which grow by equal factors."""
    return [round(LEAST * (largest / LEAST) ** (number / (GRAPHS - 1))) for number in range(GRAPHS)]


def _attention(case: Case, name: str, is_batch: bool) -> Work:
    """The attention of one graph, or a whole layer over a batch whose largest graph has so many nodes."""
    torch.manual_seed(case.seed)
    module = _make(name)

    def passes(sizes: list[int]) -> dict[str, Callable[[], int]]:
        x, batch = torch.randn(sum(sizes), CHANNELS, requires_grad=True), torch.repeat_interleave(torch.tensor(sizes))
        is_few = name in ("learned", "random")
        edges = HEADS * (EDGES * len(x) if is_few else sum(size**2 for size in sizes))

        def forward() -> Tensor:
            if is_batch:
                return module(x, None, batch).sum()
            out = module.lin_out(module.attn(x)) if isinstance(module, SparseGPSConv) else module(x[None])
            return out.sum()

        return calls(forward, [x], torch.ones(()), edges)

    def check() -> float:
        for call in passes([LEAST]).values():  # compiles kernels
            call()
        return check_attention() if name in EXACT else 0.0

    return Work(check, passes(sizes_of(case.tokens) if is_batch else [case.tokens]))


@cache
def check_features() -> float:
    """Compares messages with features of edges in float64."""
    torch.manual_seed(0)
    pyg = TransformerConv(16, 8, HEADS, edge_dim=5).double()
    ours, edge_index = sbm_pyg.TransformerConv.from_pyg(pyg), torch.randint(40, (2, 300))
    x, edge_attr = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((40, 16), (300, 5)))
    inputs = (x, edge_index, edge_attr)
    return _difference(lambda: pyg(*inputs), lambda: ours(*inputs), [x, edge_attr])


def _features(case: Case, name: str) -> Work:
    """A TransformerConv over a random graph with 16 edges a node."""
    torch.manual_seed(case.seed)
    width, count = HEADS * case.channels, EDGES * case.tokens
    conv: nn.Module = TransformerConv(width, case.channels, HEADS, edge_dim=FEATURES)
    if name == "ours":
        assert isinstance(conv, TransformerConv)
        conv = sbm_pyg.TransformerConv.from_pyg(conv)
    module = torch.compile(conv) if name == "pyg-compiled" else conv
    x, edge_attr = torch.randn(case.tokens, width, requires_grad=True), torch.randn(count, FEATURES, requires_grad=True)
    edge_index, leaves = torch.randint(case.tokens, (2, count)), [x, edge_attr, *conv.parameters()]
    work = calls(lambda: module(x, edge_index, edge_attr), leaves, torch.randn(case.tokens, width), count)
    return Work(check_features, work)


LABELS = {
    "learned": "learned, 16 edges", "random": "random, 16 edges", "all": "all pairs", "performer": "PyG PerformerAttention",
    "sgformer": "PyG SGFormerAttention", "gps-multihead": "PyG GPSConv, multihead", "gps-performer": "PyG GPSConv, performer",
}  # fmt: skip
EXACT = ("learned", "random", "all", "gps-multihead")
NOTES = dict.fromkeys(LABELS.keys() - EXACT, "linear attention, which has another law")
ONE, BATCH = ("learned", "random", "performer", "sgformer"), ("learned", "all", "gps-multihead", "gps-performer")
GRAPH, BATCHES = (
    {name: Peer(LABELS[name], partial(_attention, name=name, is_batch=is_batch), NOTES.get(name, "")) for name in names}
    for names, is_batch in ((ONE, False), (BATCH, True))
)
EDGE_FEATURES = {
    "ours": Peer("sbm_pyg TransformerConv", partial(_features, name="ours")),
    "pyg": Peer("PyG TransformerConv", partial(_features, name="pyg")),
    "pyg-compiled": Peer("PyG TransformerConv, torch.compile", partial(_features, name="pyg-compiled")),
}
