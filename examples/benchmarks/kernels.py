"""What ``benchmark.py`` measures, first part: the records, and attention over a given graph by ours and by others.

Each peer runs in a process of its own. In: a :class:`Case`. Out: a :class:`Work`, that is a check against the truth and the calls to be
timed; whatever a peer may prepare (the graph in its own format, a compiled function) is made before. Not here: samplers and whole
layers (``benchmark_samplers.py``), clocks, processes, tables.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from sbm_pyg import ops

TOLERANCE = 2e-5  # of float32 results, relative to the largest value of the float64 truth
TUNED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**35), "MALLOC_TRIM_THRESHOLD_": str(2**36), "MALLOC_ARENA_MAX": "1"}


class Rejected(Exception):
    """A peer whose results are wrong; it is not timed."""


@dataclass(frozen=True)
class Case:
    """The work that all peers of a table share.

    Args:
        tokens: Queries, and as many keys, N.
        heads: Heads H.
        channels: Channels per head C.
        blocks: Blocks K; 0 where there is no SBM.
        density: Mean probability of an edge.
        seed: Of everything random.
        file: Where :func:`prepare_attention` puts the inputs and the truth.
    """

    tokens: int
    heads: int
    channels: int
    blocks: int
    density: float
    seed: int
    file: Path = Path()


@dataclass
class Work:
    """What a builder returns.

    Args:
        check: Returns the error of the results, or raises :class:`Rejected`. Also fills ``facts``.
        calls: One repeat of each stage; returns the number of edges it worked on.
        facts: Numbers to report.
    """

    check: Callable[[], float]
    calls: dict[str, Callable[[], int]]
    facts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A row of a table.

    Args:
        label: For people.
        build: Makes the work.
        note: What a reader must know to compare fairly.
        ours: Whether a failure is a failure of this library.
        compiled: Whether it takes a compiler and its minute.
        environment: Variables that its process must start with.
    """

    label: str
    build: Callable[[Case], Work]
    note: str = ""
    ours: bool = False
    compiled: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


# ------------------------------------------------------------------ attention over a given graph


def prepare_attention(case: Case) -> None:
    """Write tensors, an independent random mask per head, and the truth by masked SDPA in float64, for all peers of a case."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.heads, case.tokens, case.channels)
    query, key, value, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    mask = torch.rand(case.heads, case.tokens, case.tokens, generator=generator) < case.density
    mask |= torch.eye(case.tokens, dtype=torch.bool) & ~mask.any(-1, keepdim=True)  # masked SDPA has no answer for an empty row
    rows = mask.flatten(0, 1)
    data = {"query": query, "key": key, "value": value, "grad": grad}
    data["rowptr"] = F.pad(rows.sum(1).cumsum(0), (1, 0))
    data["col"] = rows.nonzero()[:, 1].int()
    torch.save({**data, "masked": _truth(query, key, value, grad, mask), "full": _truth(query, key, value, grad, None)}, case.file)


def _truth(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Output and gradients to q, k, v and, with a mask, to the gate of each edge: SDPA in float64, in stretches of queries."""
    parts: list[list[Tensor]] = [[], [], [], [], []]
    for head in range(query.size(0)):
        totals = [torch.zeros_like(key[head], dtype=torch.float64), torch.zeros_like(value[head], dtype=torch.float64)]
        for rows in torch.arange(query.size(1)).split(512):
            leaves = [x.double().requires_grad_() for x in (query[head, rows], key[head], value[head])]
            bias = None  # log of the gate, which is 1
            if mask is not None:
                bias = torch.zeros(mask[head, rows].shape, dtype=torch.float64).masked_fill_(~mask[head, rows], -torch.inf)
                leaves.append(bias.requires_grad_())
            q, k, v = (leaf[None, None] for leaf in leaves[:3])
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)[0, 0]
            grads = torch.autograd.grad(out, leaves, grad[head, rows].double())
            parts[0].append(out.detach())
            parts[1].append(grads[0])
            totals[0] += grads[1]
            totals[1] += grads[2]
            if mask is not None:
                parts[4].append(grads[3][mask[head, rows]])
        parts[2].append(totals[0])
        parts[3].append(totals[1])
    tokens = [torch.cat(part).view_as(query).float() for part in parts[:4]]
    return tokens if mask is None else [*tokens, torch.cat(parts[4]).float()]


class Inputs:
    """The tensors of a case, and its graph in the formats that peers want."""

    def __init__(self, case: Case) -> None:
        data = torch.load(case.file, weights_only=True)
        self.query, self.key, self.value, self.grad = (data[name] for name in ("query", "key", "value", "grad"))
        self.rowptr, self.col, self.truth = data["rowptr"], data["col"], {name: data[name] for name in ("masked", "full")}
        self.heads, self.tokens, self.channels = self.query.shape
        self.scale = self.channels**-0.5
        self.num_edges = self.col.numel()

    def ends(self) -> tuple[Tensor, Tensor]:
        """Row ``h * N + i`` and column ``h * N + j`` of each edge, int64: one graph of H*N nodes."""
        row = torch.repeat_interleave(self.rowptr.diff())
        return row, self.col + row // self.tokens * self.tokens

    def flat(self, *tokens: Tensor) -> list[Tensor]:
        """Tokens as H*N rows, without a copy."""
        return [x.view(-1, self.channels) for x in tokens]


Forward = Callable[..., Tensor]


def _attention(make: Callable[[Inputs], Forward], gate: bool = True, truth: str = "masked") -> Callable[[Case], Work]:
    """Builder of a peer: ``make`` prepares ``forward(query, key, value[, gate]) -> out``, all ``[H, N, C]``."""

    def build(case: Case) -> Work:
        inputs = Inputs(case)
        leaves = [inputs.query, inputs.key, inputs.value, *([torch.ones(inputs.num_edges)] if gate else [])]
        for leaf in leaves:
            leaf.requires_grad_()
        forward = make(inputs)

        def infer() -> int:
            with torch.no_grad():
                forward(*leaves)
            return inputs.num_edges

        def step() -> int:
            torch.autograd.grad(forward(*leaves), leaves, inputs.grad)
            return inputs.num_edges

        def check() -> float:
            with torch.no_grad():
                found = [forward(*leaves)]
            out = forward(*leaves)
            found += [out, *torch.autograd.grad(out, leaves, inputs.grad)]
            names = ("output", "output", "query gradient", "key gradient", "value gradient", "gate gradient")
            true = [inputs.truth[truth][0], *inputs.truth[truth]]
            return compare({name: (x, y) for name, x, y in zip(names, found, true, strict=False)})

        return Work(check, {"forward": infer, "step": step})

    return build


def compare(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> float:
    """Largest relative error of (found, true) pairs; above the tolerance, or NaN, :class:`Rejected`."""
    worst = 0.0
    for name, (found, true) in pairs.items():
        error = float((found - true).detach().abs().max() / true.detach().abs().max())
        if not error <= TOLERANCE:
            raise Rejected(f"its {name} is off by {error:.1e} of the largest value")
        worst = max(worst, error)
    return worst


def _ours(inputs: Inputs) -> Forward:
    def forward(query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None = None) -> Tensor:
        return ops.edge_attention(query, key, value, inputs.rowptr, inputs.col, gate, None, inputs.scale, "weight")[0]

    return forward


def _wrong(inputs: Inputs) -> Forward:
    """Forgets the scale: what the gate must catch."""
    inputs.scale = 1.0
    return _ours(inputs)


def _sdpa(inputs: Inputs) -> Forward:
    return lambda query, key, value: F.scaled_dot_product_attention(query[None], key[None], value[None])[0]


def _masked_sdpa(inputs: Inputs) -> Forward:
    mask = torch.zeros(inputs.heads * inputs.tokens, inputs.tokens, dtype=torch.bool)
    mask[inputs.ends()[0], inputs.col] = True
    mask = mask.view(1, inputs.heads, inputs.tokens, inputs.tokens)
    return lambda query, key, value: F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask)[0]


class Propagate(MessagePassing):
    """The message passing of PyG's ``TransformerConv``, line by line, with a gate."""

    def __init__(self, channels: int) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.channels = channels

    def forward(self, edge_index: Tensor, query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        """Tokens ``[H*N, C]`` and gate ``[E]`` to ``[H*N, C]``."""
        return self.propagate(edge_index, query=query, key=key, value=value, gate=gate, size=None)

    def message(
        self, query_i: Tensor, key_j: Tensor, value_j: Tensor, gate: Tensor, index: Tensor, ptr: Tensor | None, size_i: int | None
    ) -> Tensor:
        alpha = (query_i * key_j).sum(dim=-1) / math.sqrt(self.channels) + gate  # gates are 1: the softmax cancels them
        alpha = softmax(alpha, index, ptr, size_i)
        return value_j * alpha.view(-1, 1)


def _pyg(inputs: Inputs, compiled: bool = False) -> Forward:
    module = Propagate(inputs.channels)
    propagate = torch.compile(module) if compiled else module
    row, col = inputs.ends()
    edge_index = torch.stack([col, row])
    return lambda query, key, value, gate: propagate(edge_index, *inputs.flat(query, key, value), gate).view_as(query)


def _compiled_pyg(inputs: Inputs) -> Forward:
    return _pyg(inputs, compiled=True)


def _scatter(inputs: Inputs) -> Forward:
    row, col = inputs.ends()

    def forward(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        q, k, v = inputs.flat(query, key, value)
        logit = (q[row] * k[col]).sum(-1) * inputs.scale + gate
        top = logit.new_full((len(q),), -torch.inf).scatter_reduce(0, row, logit.detach(), "amax")
        weight = (logit - top[row]).exp()
        weight = weight / weight.new_zeros(len(q)).index_add(0, row, weight)[row]
        return torch.zeros_like(v).index_add(0, row, weight[:, None] * v[col]).view_as(value)

    return forward


class _CSRAttention(torch.autograd.Function):
    """Attention by torch's sparse products over compressed rows, gradients by hand; the gate is 1 and only receives one."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, graph: _CSRGraph) -> Tensor:
        logit = torch.sparse.sampled_addmm(graph.pattern, query, key.t(), beta=0.0, alpha=graph.scale).values()
        top = torch.segment_reduce(logit, "max", offsets=graph.rowptr, unsafe=True)
        weight = (logit - top[graph.row]).exp_()
        weight /= torch.segment_reduce(weight, "sum", offsets=graph.rowptr, unsafe=True)[graph.row]
        out = graph.rows(weight) @ value
        ctx.save_for_backward(query, key, value, weight, out)
        ctx.graph = graph
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        graph, (query, key, value, weight, out) = ctx.graph, ctx.saved_tensors
        grad = grads[0].contiguous()
        gain = torch.sparse.sampled_addmm(graph.pattern, grad, value.t(), beta=0.0).values()
        grad_gate = weight * (gain - (grad * out).sum(-1)[graph.row])
        grad_logit = grad_gate * graph.scale
        return graph.rows(grad_logit) @ key, graph.columns(grad_logit) @ query, graph.columns(weight) @ grad, grad_gate, None


class _CSRGraph:
    """Compressed rows of one H*N x H*N matrix, and its transpose, made beforehand, with int32 numbers where they fit (MKL's own)."""

    def __init__(self, inputs: Inputs) -> None:
        self.scale, self.rowptr = inputs.scale, inputs.rowptr
        self.row, col = inputs.ends()
        self.size = (inputs.heads * inputs.tokens,) * 2
        self.order = torch.argsort(col, stable=True)
        colptr = F.pad(torch.bincount(col, minlength=self.size[0]).cumsum(0), (1, 0))
        kind = torch.int32 if max(inputs.num_edges, *self.size) < 2**31 else torch.int64
        self.by_row, self.by_column = (self.rowptr.to(kind), col.to(kind)), (colptr.to(kind), self.row[self.order].to(kind))
        self.pattern = self.rows(torch.zeros(inputs.num_edges))

    def rows(self, values: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(*self.by_row, values, self.size, check_invariants=False)

    def columns(self, values: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(*self.by_column, values[self.order], self.size, check_invariants=False)


def _csr(inputs: Inputs) -> Forward:
    graph = _CSRGraph(inputs)
    return lambda query, key, value, gate: _CSRAttention.apply(*inputs.flat(query, key, value), gate, graph).view_as(query)


def _dgl(inputs: Inputs) -> Forward:
    dgl = importlib.import_module("dgl")
    row, col = inputs.ends()
    graph = dgl.graph((col, row), num_nodes=inputs.heads * inputs.tokens)

    def forward(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        q, k, v = inputs.flat(query, key, value)
        weight = dgl.ops.edge_softmax(graph, dgl.ops.u_dot_v(graph, k, q) * inputs.scale + gate[:, None])
        return dgl.ops.u_mul_e_sum(graph, v, weight).view_as(value)

    return forward


NO_GATE = "no gradient to the gate"
ATTENTION = {
    "ours": Peer("sbm_pyg edge_attention", _attention(_ours), ours=True),
    "ours-ungated": Peer("sbm_pyg, no gate", _attention(_ours, gate=False), NO_GATE, ours=True),
    "sdpa": Peer("torch SDPA, no mask", _attention(_sdpa, gate=False, truth="full"), f"full attention; {NO_GATE}"),
    "sdpa-masked": Peer("torch SDPA, boolean mask", _attention(_masked_sdpa, gate=False), NO_GATE),
    "pyg": Peer("PyG propagate, as installed", _attention(_pyg)),
    "pyg-tuned": Peer(
        "PyG propagate, tuned malloc", _attention(_pyg), "mmap and trim thresholds 32 GiB, one arena", environment=TUNED_MALLOC
    ),
    "pyg-compiled": Peer("PyG propagate, torch.compile", _attention(_compiled_pyg), compiled=True),
    "scatter": Peer("torch gather-scatter", _attention(_scatter)),
    "csr": Peer("torch CSR, own backward", _attention(_csr), "transposed index given"),
    "dgl": Peer("DGL ops", _attention(_dgl)),
}
WRONG_ATTENTION = Peer("wrong: forgets the scale", _attention(_wrong))
