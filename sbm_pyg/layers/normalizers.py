"""Normalization of edge scores to attention weights: softmax, or alpha-entmax with a fixed or learned alpha.

In: scores ``[E, H]`` and the query of each edge, or rows. Out: weights of the same shape. Not here: scores and weighted
sums (``propagation``); the computation of entmax (``ops``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch_geometric.utils import softmax

from .. import ops
from ..ops import checks, schemas
from ..ops.reference.edges import apply_gate_and_bias, dropout_mask

__all__ = ["Entmax"]

ALPHAS = {"softmax": 1.0, "entmax15": 1.5, "sparsemax": 2.0}
NAMES = (*ALPHAS, "entmax")
MIN_ALPHA = 1.01  # lower bound of a learned alpha: closer to 1, 1 / (alpha - 1) loses precision


class Entmax(nn.Module):
    r"""alpha-entmax over segments, with a learned alpha for each head.

    Alpha sets the sparsity of the attention of a head. At :math:`\alpha = 1.5` and above, most weights are exactly 0;
    as :math:`\alpha \to 1`, entmax becomes softmax. A learned alpha is :math:`\alpha = 1.01 + 0.99\,\sigma(a)` with a
    parameter :math:`a`, so it stays between 1.01 and 2. Its gradient is exact. Cost as
    :func:`sbm_pyg.ops.segment_entmax`.

    Args:
        heads: Number of heads H.
        alpha: Initial alpha of all heads, or a list of H values: in (1.01, 2) if learnable, else in (1, 4].
        learnable: Alpha is the parameter ``raw_alpha`` ``[H]``. Otherwise it is the buffer ``fixed_alpha`` ``[H]``.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.

    Shapes:
        - scores ``[E, H]``, or ``[E]`` of one head; output of the same shape.

    Example:
        >>> from sbm_pyg import AttentionConv, patterns
        >>> conv = AttentionConv(16, 8, heads=2, normalizer=Entmax(2, alpha=1.3))
        >>> out = conv(torch.randn(30, 16), patterns.full(30))
        >>> out.sum().backward()  # reaches `conv.normalizer.raw_alpha`
        >>> conv.normalizer.alpha
        tensor([1.3000, 1.3000], grad_fn=<AddBackward0>)

    Reference: Correia, Niculae and Martins, "Adaptively Sparse Transformers", EMNLP 2019. In that paper :math:`\alpha =
    1 + \sigma(a)`, which rounds to 1 for small a.
    """

    raw_alpha: nn.Parameter
    fixed_alpha: Tensor

    head_dims: ClassVar[dict[str, int]] = {"raw_alpha": 0, "fixed_alpha": 0}

    def __init__(self, heads: int = 1, alpha: float | Sequence[float] = 1.5, learnable: bool = True) -> None:
        super().__init__()
        self.heads = checks.integer("heads", heads, 1, "It is the number of heads.")
        checks.flag("learnable", learnable, "With True, alpha is a parameter.")
        checks.memory("heads", self.heads, 4, torch.device("cpu"), "Take fewer heads.", "parameters")
        alphas = [*alpha] if isinstance(alpha, list | tuple) else [alpha]
        if len(alphas) not in (1, self.heads):
            raise ValueError(f"Expected 'alpha' to be a number or {self.heads} (got {len(alphas)}). Each head has one.")
        span = f"({MIN_ALPHA}, 2)" if learnable else "(1, 4]"
        for value in alphas:
            checks.number("alpha", value, span, "With learnable=False it is in (1, 4].")
        self.start, self.learnable = alpha, learnable
        if learnable:
            self.raw_alpha = nn.Parameter(torch.empty(self.heads))
        else:
            self.register_buffer("fixed_alpha", torch.empty(self.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set each alpha to its initial value."""
        start: Any = self.start
        alphas = torch.tensor(start, dtype=torch.float64).expand(self.heads)
        with torch.no_grad():
            if self.learnable:
                fraction = (alphas - MIN_ALPHA) / (2 - MIN_ALPHA)
                self.raw_alpha.copy_(fraction.log() - (1 - fraction).log())
            else:
                self.fixed_alpha.copy_(alphas)

    @property
    def alpha(self) -> Tensor:
        """Alpha of each head, ``[H]``, float32 or better, differentiable."""
        raw = self.raw_alpha if self.learnable else self.fixed_alpha
        raw = raw if raw.dtype == torch.float64 else raw.float()
        return MIN_ALPHA + (2 - MIN_ALPHA) * raw.sigmoid() if self.learnable else raw

    def forward(
        self, src: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, num_nodes: int | None = None
    ) -> Tensor:
        """Compute the weights. Arguments are those of :func:`torch_geometric.utils.softmax`.

        Args:
            src: Scores, ``[E, H]``, or ``[E]`` of one head.
            index: Segment of each score, ``[E]`` int64, in any order.
            ptr: Offsets of consecutive segments, ``[S+1]`` int64; used instead of ``index``.
            num_nodes: Number of segments with ``index``.

        Raises:
            TypeError, ValueError: As :func:`sbm_pyg.ops.segment_entmax`, or the scores have another number of heads.
        """
        checks.tensors(src=src)
        if self.heads > 1 and src.shape[1:] != (self.heads,):
            raise ValueError(
                f"Expected 'src' to be [E, {self.heads}], one column for each head (got {list(src.shape)}). "
                "Make an Entmax with that many heads."
            )
        return ops.segment_entmax(src, index, ptr, num_nodes, self.alpha)

    def extra_repr(self) -> str:
        return f"{self.heads}, alpha={self.start}, learnable={self.learnable}"


def check_normalizer(normalizer: Any, heads: int | None = None) -> None:
    """Raise an error unless ``normalizer`` is a name or an :class:`Entmax` with this number of heads."""
    checks.kind("normalizer", normalizer, str | Entmax, "a name or an Entmax", f"Names are {[*NAMES]}.")
    if isinstance(normalizer, str):
        checks.one_of("normalizer", normalizer, NAMES)
    elif heads not in (None, normalizer.heads):
        raise ValueError(
            f"Expected 'normalizer' of {heads} heads, as the layer has (got {normalizer.heads}). Make an Entmax with "
            "that many."
        )


def alpha_of(normalizer: str | Entmax) -> float | Tensor:
    """The alpha of a normalizer: one number, or ``[H]`` with one alpha per head. Softmax is alpha 1."""
    return ALPHAS[normalizer] if isinstance(normalizer, str) else normalizer.alpha


def attend_by_entmax(
    query: Tensor, key: Tensor, value: Tensor, rows: ops.Rows, gate: Tensor | None, scale: float, gate_form: str,
    dropout: float, seed: int, alpha: float | Tensor,
) -> Tensor:  # fmt: skip
    """Attention over the edges of each query with alpha-entmax in place of softmax, ``[H, N, C']``.

    Logits are computed as in :func:`sbm_pyg.ops.edge_attention`, and weights as in :func:`sbm_pyg.ops.segment_entmax`.
    Most weights are 0. The edges with a positive weight, the support, are found first, without a gradient. The rest of
    the forward pass, and the whole backward pass, runs over the support only. Cost O(E C + E' C') forward and O(E' (C +
    C')) backward, with E' the edges of the support.

    Args:
        query, key, value, rows, gate, scale, gate_form, dropout, seed: As :func:`sbm_pyg.ops.edge_attention`.
        alpha: In (1, 4]: a number, or a tensor ``[H]``, which gets its gradient.
    """
    (rowptr, col, bias), (heads, num_queries) = rows, query.shape[:2]
    if not isinstance(alpha, Tensor):
        alpha = torch.full((), alpha, dtype=checks.widest(query.device), device=query.device)
    alphas = alpha.expand(heads).repeat_interleave(num_queries)
    with torch.no_grad():
        score = schemas.edge_dot(query, key, rowptr, col)
        logit = apply_gate_and_bias(scale * score, gate, bias, gate_form)
        rowptr, index = schemas.entmax_support(logit, rowptr, alphas)
        score, col = score[index], col[index]
    gate, bias = (x if x is None else x[index] for x in (gate, bias))
    score = score + (schemas.EdgeGate.apply(query, key, rowptr, col) - 1)  # the same values, with their gradient
    logit = apply_gate_and_bias(scale * score, gate, bias, gate_form)
    weight = schemas.segment_entmax(logit[None], rowptr, alphas[None])[0]
    if dropout > 0:
        keep_mask = dropout_mask(rowptr, col, heads, key.size(1), dropout, seed)
        weight = weight * keep_mask.to(weight.dtype) / (1 - dropout)
    return schemas.EdgeSum.apply(weight, value, rowptr, col)


def edge_softmax(
    logit: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, size: int | None = None
) -> Tensor:
    """PyG's softmax, except that a logit of minus infinity has weight 0 even if it is the only edge of its row."""
    forbidden = logit == -torch.inf
    alpha = softmax(logit.masked_fill(forbidden, torch.finfo(logit.dtype).min), index, ptr, size)
    return alpha.masked_fill(forbidden, 0)


def normalize(
    normalizer: str | Entmax,
    logit: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    num_nodes: int | None = None,
) -> Tensor:
    """Weights of edges, ``[E, H or 1]``. In one column, the edges of all heads follow each other."""
    if normalizer == "softmax":
        return edge_softmax(logit, index, ptr, num_nodes)
    alpha = alpha_of(normalizer)
    if isinstance(alpha, Tensor) and logit.size(1) != alpha.numel():
        segments = num_nodes if ptr is None else ptr.numel() - 1
        alpha = alpha.repeat_interleave((segments or 0) // alpha.numel())[:, None]
    if index is not None:
        return ops.segment_entmax(logit, index, num_nodes=num_nodes, alpha=alpha)
    return ops.segment_entmax(logit, ptr=ptr, alpha=alpha)
