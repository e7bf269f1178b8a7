"""Peers of attention over a given graph; each must agree with plain torch in float64.

A peer prepares its graph or a compiled function before it is timed. Samplers and whole layers are in ``samplers``, clocks in ``measure``.
"""

from __future__ import annotations  # PyG reads annotations of messages as text

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from examples.common.gate import compare
from sbm_pyg import AttentionGraph, ops


@dataclass(frozen=True)
class Case:
    """The work that all peers of a table share: N tokens, K blocks (0: no model), mean probability of an edge, H heads, C channels.

    With the name of a trained layer, that layer decides all but the tokens.
    """

    tokens: int
    blocks: int
    density: float
    seed: int = 0
    heads: int = 2
    channels: int = 32
    layer: str = ""


@dataclass
class Work:
    """A check, which returns the error or raises :class:`Rejected`; for each stage a call, which returns its edges; facts to report."""

    check: Callable[[], float]
    calls: dict[str, Callable[[], int]]
    facts: dict[str, float] = field(default_factory=dict)


def calls(
    forward: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor, edges: int
) -> dict[str, Callable[[], int]]:
    """A forward pass without gradients, and one with all of them; both return the number of edges."""

    def infer() -> int:
        with torch.no_grad():
            forward()
        return edges

    def step() -> int:
        torch.autograd.grad(forward(), leaves, grad)
        return edges

    return {"forward": infer, "step": step}


@dataclass(frozen=True)
class Peer:
    """A row of a table. A note says what a reader must know to compare fairly."""

    label: str
    build: Callable[[Case], Work]
    note: str = ""


class Inputs:
    """Tensors ``[H, N, C]``, an independent random mask per head without empty rows, and its graph in the formats that peers want.

    With a block size, blocks of so many tokens are drawn.
    """

    def __init__(self, case: Case, block_size: int = 1) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        self.shape = (case.heads, case.tokens, case.channels)
        self.query, self.key, self.value, self.grad = (torch.randn(self.shape, generator=generator) for _ in range(4))
        count = case.tokens // block_size
        mask = torch.rand(case.heads, count, count, generator=generator) < case.density
        empty = ~mask.any(-1, keepdim=True)  # for which masked SDPA has no answer
        mask |= torch.eye(count, dtype=torch.bool) & empty
        self.blocks = AttentionGraph.from_dense(mask)
        self.mask = mask.repeat_interleave(block_size, 1).repeat_interleave(block_size, 2)
        graph = AttentionGraph.from_dense(self.mask)
        self.rowptr, self.col, self.num_edges = graph.rowptr, graph.col, graph.num_edges
        row = torch.repeat_interleave(self.rowptr.diff())
        self.edge_index = torch.stack([self.col + row // case.tokens * case.tokens, row])  # one graph of H*N nodes

    def exact(self, masked: bool) -> list[Tensor]:
        """Output and gradients to q, k, v and, with the mask, to the gate of each edge: SDPA in float64, head by head."""
        parts = []
        for head, mask in enumerate(self.mask if masked else torch.ones_like(self.mask)):
            # log of the gate, which is 1
            gate = torch.zeros(mask.shape, dtype=torch.float64).masked_fill_(~mask, -torch.inf)
            leaves = [*(x[head].double() for x in (self.query, self.key, self.value)), gate]
            query, key, value = (x.requires_grad_()[None, None] for x in leaves[:3])
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=gate.requires_grad_())[0, 0]
            *grads, gate_grad = torch.autograd.grad(out, leaves, self.grad[head].double())
            parts.append([out.detach(), *grads, gate_grad[mask]])
        *dense, gates = zip(*parts, strict=True)
        return [*(torch.stack(part).float() for part in dense), torch.cat(gates).float()]


Forward = Callable[..., Tensor]


def _attention(
    make: Callable[[Inputs], Forward], gate: bool = True, masked: bool = True, block_size: int = 1
) -> Callable[[Case], Work]:
    """Builder of a peer: ``make`` prepares ``forward(query, key, value[, gate]) -> out``, all ``[H, N, C]``."""

    def build(case: Case) -> Work:
        inputs = Inputs(case, block_size)
        leaves = [inputs.query, inputs.key, inputs.value, *([torch.ones(inputs.num_edges)] if gate else [])]
        leaves = [x.requires_grad_() for x in leaves]
        forward = make(inputs)

        def check() -> float:
            with torch.no_grad():
                results = [forward(*leaves)]
            out = forward(*leaves)
            results += [out, *torch.autograd.grad(out, leaves, inputs.grad)]
            exact = inputs.exact(masked)
            names = ("output", "output of a step", "query gradient", "key gradient", "value gradient", "gate gradient")
            return compare({name: (x, y) for name, x, y in zip(names, results, [exact[0], *exact], strict=False)})

        return Work(check, calls(lambda: forward(*leaves), leaves, inputs.grad, inputs.num_edges))

    return build


def _ours(inputs: Inputs, scale: float | None = None) -> Forward:
    rows, scale = ops.Rows(inputs.rowptr, inputs.col), inputs.shape[2] ** -0.5 if scale is None else scale
    return lambda query, key, value, gate: ops.edge_attention(query, key, value, rows, gate, scale, "weight")[0]


def _blocks(inputs: Inputs, block_size: int, scale: float | None = None) -> Forward:
    ptr, blocks = torch.tensor([0, inputs.shape[1]]), inputs.blocks
    scale = inputs.shape[2] ** -0.5 if scale is None else scale
    options = (blocks.rows, (ptr, ptr), block_size, False, scale)
    return lambda query, key, value: ops.block_attention(query, key, value, *options)[0]


def _sdpa(inputs: Inputs, masked: bool = False) -> Forward:
    mask = inputs.mask[None] if masked else None
    attend: Any = F.scaled_dot_product_attention
    return lambda *leaves: attend(*(x[None] for x in leaves), attn_mask=mask)[0]


class Propagate(MessagePassing):
    """The message passing of PyG's ``TransformerConv``, line by line, with a gate."""

    def __init__(self, channels: int) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.channels = channels

    def forward(self, edge_index: Tensor, query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        """Tokens ``[H*N, C]`` and gate ``[E]`` to ``[H*N, C]``."""
        return self.propagate(edge_index, query=query, key=key, value=value, gate=gate, size=None)

    def message(self, query_i: Tensor, key_j: Tensor, value_j: Tensor, gate: Tensor, index: Tensor,
                ptr: Tensor | None, size_i: int | None) -> Tensor:  # fmt: skip
        alpha = (query_i * key_j).sum(dim=-1) / math.sqrt(self.channels) + gate  # gates are 1: the softmax cancels them
        return value_j * softmax(alpha, index, ptr, size_i).view(-1, 1)


def _pyg(inputs: Inputs, compiled: bool = False) -> Forward:
    eager = Propagate(inputs.shape[2])
    module, index = torch.compile(eager) if compiled else eager, inputs.edge_index
    return lambda *leaves: module(index, *(x.flatten(0, 1) for x in leaves[:3]), leaves[3]).view_as(leaves[0])


NO_GATE = "no gradient to the gate"
BLOCK_SIZE = 64  # of the graphs of blocks that are given
KERNELS = {
    "ours": Peer("sbm_pyg edge_attention", _attention(_ours)),
    "sdpa": Peer("torch SDPA, no mask", _attention(_sdpa, gate=False, masked=False), f"full attention; {NO_GATE}"),
    "sdpa-masked": Peer("torch SDPA, boolean mask", _attention(partial(_sdpa, masked=True), gate=False), NO_GATE),
    "pyg": Peer("PyG propagate, as installed", _attention(_pyg)),
    "pyg-compiled": Peer("PyG propagate, torch.compile", _attention(partial(_pyg, compiled=True))),
    "wrong": Peer("wrong: forgets the scale", _attention(partial(_ours, scale=1.0))),
}
_over_blocks = partial(_attention, gate=False, block_size=BLOCK_SIZE)
BLOCKS = {
    "blocks": Peer("sbm_pyg block_attention", _over_blocks(partial(_blocks, block_size=BLOCK_SIZE))),
    "tokens": Peer("sbm_pyg edge_attention", _attention(_ours, block_size=BLOCK_SIZE), "over the tokens, with a gate"),
    "sdpa": Peer("torch SDPA, no mask", _over_blocks(_sdpa, masked=False), "full attention"),
    "sdpa-masked": Peer("torch SDPA, boolean mask", _over_blocks(partial(_sdpa, masked=True))),
    "wrong": Peer("wrong: forgets the scale", _over_blocks(partial(_blocks, block_size=BLOCK_SIZE, scale=1.0))),
}
