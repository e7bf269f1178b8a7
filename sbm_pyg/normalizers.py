"""How scores of edges become weights: softmax, or alpha-entmax with an alpha that is fixed or learnt.

In: scores ``[E, H]`` and the query of each edge, or rows. Out: weights of the same shape. Not here: scores, and what
weights are for (``propagation``); how entmax is computed (``ops``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.utils import softmax

from . import ops
from .ops import checks

__all__ = ["Entmax"]

ALPHAS = {"softmax": 1.0, "entmax15": 1.5, "sparsemax": 2.0}
NAMES = (*ALPHAS, "entmax")
LEAST = 1.01  # where an alpha that learns stops, next to softmax, before 1 / (alpha - 1) loses its digits


class Entmax(nn.Module):
    r"""alpha-entmax over segments, with an alpha for each head that learns.

    Each head finds out how sparse its attention is. At :math:`\alpha = 1.5` and above, most weights are exactly 0; as
    :math:`\alpha \to 1`, entmax becomes softmax. An alpha that learns is :math:`\alpha = 1.01 + 0.99\,\sigma(a)` with a
    parameter :math:`a`, so that it stays between 1.01 and 2. Its gradient is exact. Cost as
    :func:`sbm_pyg.ops.segment_entmax`.

    Args:
        heads: Number of heads H.
        alpha: Where each alpha starts, or a list of H such numbers: above 1.01 and below 2 if it learns, else in (1,
            4].
        learnable: The parameter ``raw_alpha`` ``[H]`` learns. Otherwise ``fixed_alpha`` ``[H]`` is a buffer.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.

    Shapes:
        - scores ``[E, H]``, or ``[E]`` of one head; output alike.

    Example:
        >>> from sbm_pyg import AttentionConv, patterns
        >>> conv = AttentionConv(16, 8, heads=2, normalizer=Entmax(2, alpha=1.3))
        >>> out = conv(torch.randn(30, 16), patterns.full(30))
        >>> out.sum().backward()  # reaches `conv.normalizer.raw_alpha`
        >>> conv.normalizer.alpha
        tensor([1.3000, 1.3000], grad_fn=<AddBackward0>)

    Reference: Correia, Niculae and Martins, "Adaptively Sparse Transformers", EMNLP 2019. There :math:`\alpha = 1 +
    \sigma(a)`, which rounds to 1 where a is small enough.
    """

    raw_alpha: nn.Parameter
    fixed_alpha: Tensor

    def __init__(self, heads: int = 1, alpha: float | Sequence[float] = 1.5, learnable: bool = True) -> None:
        super().__init__()
        self.heads = checks.integer("heads", heads, 1, "It is the number of heads.")
        checks.flag("learnable", learnable, "It says whether alpha is a parameter.")
        alphas = [*alpha] if isinstance(alpha, list | tuple) else [alpha]
        if len(alphas) not in (1, self.heads):
            raise ValueError(
                f"Expected 'alpha' to be a number or {self.heads} (got {len(alphas)}). Heads have one each."
            )
        span = f"({LEAST}, 2)" if learnable else "(1, 4]"
        for each in alphas:
            checks.number("alpha", each, span, "With learnable=False it is in (1, 4].")
        self.start, self.learnable = alpha, learnable
        if learnable:
            self.raw_alpha = nn.Parameter(torch.empty(self.heads))
        else:
            self.register_buffer("fixed_alpha", torch.empty(self.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let each alpha start where it was asked to."""
        given: Any = self.start
        alphas = torch.tensor(given, dtype=torch.float64).expand(self.heads)
        with torch.no_grad():
            if self.learnable:
                share = (alphas - LEAST) / (2 - LEAST)
                self.raw_alpha.copy_(share.log() - (1 - share).log())
            else:
                self.fixed_alpha.copy_(alphas)

    @property
    def alpha(self) -> Tensor:
        """Alpha of each head, ``[H]``, float32 or better, with its gradient."""
        raw = self.raw_alpha if self.learnable else self.fixed_alpha
        raw = raw if raw.dtype == torch.float64 else raw.float()
        return LEAST + (2 - LEAST) * raw.sigmoid() if self.learnable else raw

    def forward(
        self, src: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, num_nodes: int | None = None
    ) -> Tensor:
        """Weights, as :func:`torch_geometric.utils.softmax` gives them.

        Args:
            src: Scores, ``[E, H]``, or ``[E]`` of one head.
            index: Segment of each score, ``[E]`` int64, in any order.
            ptr: Offsets of consecutive segments, ``[S+1]`` int64; used instead of ``index``.
            num_nodes: Number of segments with ``index``.

        Raises:
            TypeError, ValueError: As :func:`sbm_pyg.ops.segment_entmax`, or the scores are of another number of heads.
        """
        checks.tensors(src=src)
        if self.heads > 1 and src.shape[1:] != (self.heads,):
            raise ValueError(
                f"Expected 'src' to be [E, {self.heads}], one column for each head (got {list(src.shape)}). "
                "Make an Entmax of as many heads."
            )
        return ops.segment_entmax(src, index, ptr, num_nodes, self.alpha)

    def extra_repr(self) -> str:
        return f"{self.heads}, alpha={self.start}, learnable={self.learnable}"


def check_normalizer(normalizer: Any, heads: int | None = None) -> None:
    """Refuse what is neither a name nor an :class:`Entmax`, and one of other heads."""
    if isinstance(normalizer, str):
        checks.one_of("normalizer", normalizer, NAMES)
    elif not isinstance(normalizer, Entmax):
        raise TypeError(
            f"Expected 'normalizer' to be a name or an Entmax (got {type(normalizer).__name__}). Names are {[*NAMES]}."
        )
    elif heads not in (None, normalizer.heads):
        raise ValueError(
            f"Expected 'normalizer' of {heads} heads, as the layer has (got {normalizer.heads}). Make an Entmax of as "
            "many."
        )


def alpha_of(normalizer: str | Entmax) -> float | Tensor:
    """Alpha of all heads, or of each, ``[H]``; 1 for softmax."""
    return ALPHAS[normalizer] if isinstance(normalizer, str) else normalizer.alpha


def edge_softmax(
    logit: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, size: int | None = None
) -> Tensor:
    """PyG's softmax, except that a logit of minus infinity gives weight 0, even if no other edge is left in the row."""
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
    """Weights of edges, ``[E, H or 1]``. One column holds all heads, those of later heads being later nodes."""
    if normalizer == "softmax":
        return edge_softmax(logit, index, ptr, num_nodes)
    alpha = alpha_of(normalizer)
    if isinstance(alpha, Tensor) and logit.size(1) != alpha.numel():
        segments = num_nodes if ptr is None else ptr.numel() - 1
        alpha = alpha.repeat_interleave((segments or 0) // alpha.numel())[:, None]
    if index is not None:
        return ops.segment_entmax(logit, index, num_nodes=num_nodes, alpha=alpha)
    return ops.segment_entmax(logit, ptr=ptr, alpha=alpha)
