"""Attention weights of a running model, and the difference between its sparse attention and dense attention.

In: a running model with :class:`~sbm_pyg.AttentionConv` layers. Out: the graph and weights of each call; for each head
the attention that its graphs keep, and the error of its output. Not here: the loss of the task, and training
(``sparsifier``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..graphs.graph import AttentionGraph
from ..graphs.ragged import Tokens, draw_seed
from ..layers.attention import AttentionConv
from ..layers.normalizers import normalize
from ..layers.propagation import OUTPUT_ONLY, Returns
from ..ops import checks, schemas
from ..sources.dense import DenseChoice, sample_rows
from ..sources.interface import Choice

__all__ = ["Attention", "Head", "HeadTable", "compare_heads", "record_attention"]

_Inputs = tuple[Tensor, Tensor, Tensor]
_Filter = Callable[[AttentionGraph], Tensor] | None


class Attention(NamedTuple):
    """Attention of one call of a layer."""

    layer: str
    """Name of the layer, as in ``model.named_modules()``."""
    graph: AttentionGraph
    """The graph, with the heads of the layer."""
    weight: Tensor
    """Attention weight of each edge of the graph before dropout, ``[E]``. They sum to 1 for each query."""


class Head(NamedTuple):
    """Losses of one head: means over the sampled queries of all calls, dense ones included."""

    layer: str
    """Name of the layer, as in ``model.named_modules()``."""
    head: int
    """Number of the head."""
    density: float
    """Fraction of the allowed pairs that are edges, a mean over sequences and calls."""
    kept: float
    """Fraction of the dense attention weights that lie on edges."""
    possible: float
    """Largest possible :attr:`kept` with as many edges in each row, which are then those of the largest weights."""
    error: float
    """Norm of the difference between sparse and dense output, divided by the norm of the dense output."""


class HeadTable:
    """Means of each :class:`Head` over all calls of a model in the context. ``print`` shows one line per head."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], list[float]] = {}

    @property
    def heads(self) -> list[Head]:
        """All heads, in the order of the first call."""
        table = []
        for (layer, head), (calls, density, rows, kept_weight, possible, difference, norm) in self._sums.items():
            rows = max(rows, 1.0)
            error = (difference / norm) ** 0.5 if norm else 0.0
            table.append(Head(layer, head, density / calls, kept_weight / rows, possible / rows, error))
        return table

    def diffuse(self, least: float = 0.5) -> list[Head]:
        """Heads for which no graph of their density keeps this fraction of the attention weights.

        Args:
            least: The fraction, in [0, 1].

        Raises:
            TypeError, ValueError: ``least`` is not a number in [0, 1].
        """
        checks.number("least", least, "[0, 1]", "It is a part of the attention weights.")
        return [head for head in self.heads if head.possible < least]

    def __str__(self) -> str:
        header = ("layer", "head", "density, %", "kept, %", "possible, %", "error")
        lines = [
            (head.layer, str(head.head), *(f"{100 * part:.1f}" for part in head[2:5]), f"{head.error:.3f}")
            for head in self.heads
        ]
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        table = [
            "  ".join(cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in enumerate(cells))
            for cells in (zip(line, widths, strict=True) for line in (header, *lines))
        ]
        return "\n".join(line.rstrip() for line in table)

    def _add(self, layer: str, numbers: Tensor) -> None:
        """Add the sums of one call, ``[H, 7]``."""
        for head, row in enumerate(numbers.tolist()):
            old = self._sums.setdefault((layer, head), [0.0] * len(row))
            old[:] = (total + more for total, more in zip(old, row, strict=True))


@contextmanager
def compare_heads(model: nn.Module, *, rows: float = 4.0) -> Iterator[HeadTable]:
    r"""Compare the sparse attention of a running model with dense attention over the same queries and keys.

    Each call of a layer is compared on a sample of its queries. The attention of a head with low ``possible`` is too
    diffuse for its density, and a :class:`~sbm_pyg.Sparsifier` can keep its layer dense. If ``kept`` is far below
    ``possible``, the head has not learned its graph. Cost for a sequence of N tokens: O(H N^{3/2} C).

    Args:
        model: A module with :class:`~sbm_pyg.AttentionConv` layers.
        rows: Queries of each sequence, as a multiple of the square root of its length; infinity: all.

    Returns:
        A context manager that returns a :class:`HeadTable`, which calls of the model in the context fill.

    Raises:
        TypeError, ValueError: ``model`` is not a module or has no such layer, or ``rows`` is not positive.

    Example:
        >>> from sbm_pyg import SBMAttentionConv
        >>> conv = SBMAttentionConv(16, 8, heads=2, num_clusters=4, target_density=0.25)
        >>> with compare_heads(conv) as table:
        ...     out = conv(torch.randn(40, 16), seed=0)
        >>> head = table.heads[1]
        >>> head.layer, head.head, 0 < head.kept <= head.possible <= 1
        ('', 1, True)
    """
    checks.number("rows", rows, "(0, inf]", "It is a number of rows over the square root of the length.")
    table = HeadTable()

    def measure(name: str, layer: AttentionConv, choice: Choice, inputs: _Inputs, edge_filter: _Filter) -> None:
        table._add(name, _measure(layer, choice, *inputs, rows, edge_filter))

    with _watch(model, measure):
        yield table


@contextmanager
def record_attention(model: nn.Module) -> Iterator[list[Attention]]:
    r"""Record the graph and the attention weights of each call of a layer.

    Weights are recorded before dropout, and without gates. A call with dense attention stores all its pairs. Cost of a
    call: O(E C), with E its edges.

    Args:
        model: A module with :class:`~sbm_pyg.AttentionConv` layers: a model of this library, or a model after
            ``replace_attention``.

    Returns:
        A context manager that returns a list, to which calls of the model in the context add an :class:`Attention`.

    Raises:
        TypeError, ValueError: ``model`` is not a module or has no such layer.

    Example:
        >>> from sbm_pyg import SBMAttentionConv
        >>> conv = SBMAttentionConv(16, 8, heads=2, num_clusters=4, target_density=0.25).eval()
        >>> with record_attention(conv) as calls:
        ...     out = conv(torch.randn(40, 16), seed=0)
        >>> graph, weight = calls[0].graph, calls[0].weight
        >>> of_query_3 = (graph.edge_index[1] == 3) & (graph.edge_head == 0)
        >>> float(weight[of_query_3].sum().round(decimals=4))
        1.0
    """
    calls: list[Attention] = []

    @torch.no_grad()
    def record(name: str, layer: AttentionConv, choice: Choice, inputs: _Inputs, edge_filter: _Filter) -> None:
        graph = choice.graph.expand_tokens().expand(layer.heads)
        calls.append(Attention(name, graph, _edge_weights(layer, *inputs[:2], graph)))

    with _watch(model, record):
        yield calls


@contextmanager
def _watch(model: nn.Module, see: Callable[[str, AttentionConv, Choice, _Inputs, _Filter], None]) -> Iterator[None]:
    """Call a function with the graph and the rotated queries, keys and values of each call of an attention layer."""
    checks.kind("model", model, nn.Module, "a module", "It has attention layers.")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, AttentionConv)}
    way_out = "Replace its attention first, e.g. by `replace_attention`."
    checks.require(layers, "model", "to have AttentionConv layers", f"{type(model).__name__}, which has none", way_out)
    before = {name: {"attend": layer.attend} if "attend" in layer.__dict__ else {} for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.attend = partial(_attend, layer, layer.attend, partial(see, name))  # type: ignore[method-assign]
        yield
    finally:
        for name, layer in layers.items():
            del layer.attend
            layer.__dict__.update(before[name])  # that of a context around this one


def _attend(
    layer: AttentionConv, attend: Callable[..., Any], see: Callable[..., None], query: Tensor, key: Tensor,
    value: Tensor, *graph: Any, returns: Returns = OUTPUT_ONLY, **options: Any,
) -> Any:  # fmt: skip
    """Call ``attend`` of a layer, and pass its choice and inputs to ``see``."""
    way_out = "Weights with edge features come from the layer itself: pass `return_attention_weights=True` to it."
    checks.require(options.get("edge_attr") is None, "model", "to call its layers without 'edge_attr'", "some", way_out)
    with_choice = Returns(returns.graph, True, returns.attention_weights)
    out, *more = attend(query, key, value, *graph, returns=with_choice, **options)
    choice = more[1] if returns.graph else more[0]
    if not returns.choice:
        del more[1 if returns.graph else 0]
    over = choice.graph if choice.is_stored else choice.tokens
    ptrs = over.query_ptr, over.key_ptr
    rotated = layer._rotate(query.detach(), key.detach(), *ptrs, options.get("positions"))
    see(layer, choice, (*rotated, value.detach()), options.get("edge_filter"))
    return (out, *more) if more else out


@torch.no_grad()
def _measure(
    layer: AttentionConv, choice: Choice, query: Tensor, key: Tensor, value: Tensor, rows: float, edge_filter: _Filter
) -> Tensor:  # fmt: skip
    """Sums of one call, ``[H, 7]``: 1, density, rows, kept, possible, squared difference and squared norm."""
    over = choice.tokens if isinstance(choice, DenseChoice) else choice.graph
    tokens = Tokens(query, key, over.query_ptr, over.key_ptr, True, over.is_causal, draw_seed(None))
    all_pairs = sample_rows(tokens, rows)
    if edge_filter is not None:
        all_pairs = all_pairs.select(edge_filter(all_pairs))
    weight = _edge_weights(layer, query, key, all_pairs)
    taken = (all_pairs.rowptr.diff() > 0).view(layer.heads, -1)
    count, ones = taken.double().sum(1), torch.ones(layer.heads, dtype=torch.float64, device=query.device)

    def squares(out: Tensor) -> Tensor:
        return out.double().square().sum(2).mul(taken).sum(1)

    def attend(graph: AttentionGraph, weight: Tensor) -> Tensor:
        return graph._attend(query, key, value, None, _log(weight), 0.0, "score", 0.0, 0)

    dense = attend(all_pairs, weight)
    if not choice.is_stored:  # dense attention loses nothing
        return torch.stack((ones, ones, count, count, count, torch.zeros_like(ones), squares(dense)), 1)
    graph = choice.graph
    edge = graph.expand(layer.heads).contains(all_pairs.edge_index, all_pairs.edge_head)
    few = all_pairs.select(edge)
    best = schemas.segment_top_k(weight, all_pairs.rowptr, few.rowptr.diff())[1]
    sparse = attend(few, _edge_weights(layer, query, key, few))
    density = graph.expand(layer.heads).density.double().mean(0)
    parts = (_sum_by(all_pairs.edge_head[at], layer.heads, weight[at]) for at in (edge, best))
    sums = (ones, density, count, *parts, squares(sparse - dense), squares(dense))
    return torch.stack(sums, 1)


def _edge_weights(layer: AttentionConv, query: Tensor, key: Tensor, graph: AttentionGraph) -> Tensor:
    """Attention weight of each edge, ``[E]``."""
    scores = graph._logits(query, key, layer._score_bias(query, key, graph), layer.scale)
    return normalize(layer.normalizer, scores[:, None], ptr=graph.rowptr)[:, 0]


def _log(weight: Tensor) -> Tensor:
    """Logarithms of attention weights, used as scores: the softmax over a row returns the weights."""
    return weight.clamp(min=torch.finfo(weight.dtype).tiny).log()


def _sum_by(head: Tensor, heads: int, values: Tensor) -> Tensor:
    """Sums over the edges of each head, ``[H]`` float64."""
    return torch.zeros(heads, dtype=torch.float64, device=values.device).index_add_(0, head, values.double())
