"""Bias and variance of the gradients of edge probabilities, by enumeration of all graphs of one query.

In: the probability of an edge and the spread of scores. Out: rows for gradients.csv. Not here: what each estimator learns
(``learning``).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sbm_pyg import AttentionGraph, ops


def gradient_errors(
    p0: float, sharpness: float, chance: float = 0.25, cases: int = 200, keys: int = 8, channels: int = 8
) -> list[dict[str, Any]]:
    """Bias and standard deviation of each estimator, relative to the norm of the true gradient, and the share of signs that agree.

    One query attends to ``keys`` keys with scores of standard deviation ``sharpness`` and edge probabilities around ``p0``; a pair is a
    probe with probability ``chance``. The loss is a cross-entropy behind a tanh, so it is not linear. All graphs are enumerated, one row each.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    bits = torch.tensor(list(itertools.product([0.0, 1.0], repeat=keys)), dtype=torch.float64)  # [S, M]
    rows, present = len(bits), bits > 0
    graph, everything = AttentionGraph.from_dense(bits), AttentionGraph.from_dense(torch.ones(rows, keys))
    sums: dict[str, np.ndarray] = {}
    for _ in range(cases):
        score, value = sharpness * draw(keys), draw(1, keys, channels)
        readout, residual = 2 * draw(2, channels), draw(channels)
        p = (p0 + 0.2 * min(p0, 1 - p0) * draw(keys)).clamp(0.01, 0.99)
        query, key = torch.ones(1, rows, 1, dtype=torch.float64), score[None, :, None]
        out = ops.edge_attention(query, key, value, graph.rowptr, graph.col)[0].requires_grad_()
        logits = torch.tanh(out[0] + residual) @ readout.T
        loss = torch.logsumexp(logits, 1) - logits[:, 0]
        (grad_out,) = torch.autograd.grad(loss.sum(), out)
        loss = loss.detach()
        pairs = (graph.rowptr, graph.col, None, everything.rowptr, everything.col)
        here, there = ops.edge_effect(grad_out, query, key, value, *pairs)
        effect = there.view(rows, keys).masked_scatter(present, here)
        weight = torch.where(present, score.exp(), 0)
        weight = weight / weight.sum(1, keepdim=True).clamp(min=1e-300)
        gain = grad_out[0] @ value[0].T
        mask = weight * (gain - (weight * gain).sum(1, keepdim=True))
        chances = (bits * p + (1 - bits) * (1 - p)).prod(1)[:, None]  # [S, 1]
        score_function = torch.where(present, 1 / p, -1 / (1 - p)) * (loss - (chances[:, 0] * loss).sum())[:, None]
        true = (chances * score_function).sum(0)
        balance = p / (p + chance * (1 - p))  # share of the side with the edge by the balance heuristic
        probe = torch.where(present, 1.0, chance)  # probability that the pair is looked at, its state given

        def weighted(share: Any, effect: Tensor = effect, p: Tensor = p, probe: Tensor = probe) -> tuple[Tensor, Any]:
            """The effect of a pair where it is looked at; edges count for this share."""
            return torch.where(present, effect * share / p, effect * (1 - share) / (chance * (1 - p))), probe

        looked: dict[str, tuple[Tensor, Any]] = {  # what a pair contributes where it is looked at, and how often it is
            "paper": (mask * score, 1.0),
            "mask": (mask, 1.0),
            "local, all pairs": (effect, 1.0),
            "local, edges over p": weighted(1.0),
            "local, non-edges over their chance": weighted(p),
            "local, balance heuristic": weighted(balance),
            "local, half and half": weighted(0.5),
            "local": weighted(torch.maximum(balance.clamp(max=0.5), p)),
            "score function": (score_function, 1.0),
        }
        for name, (amount, often) in looked.items():
            mean, second = ((chances * power * often).sum(0) for power in (amount, amount**2))
            squares = [((mean - true) ** 2).sum(), (second - mean**2).sum(), (true**2).sum()]
            new = [*squares, (mean.sign() == true.sign()).double().mean() / cases]
            sums[name] = sums.get(name, np.zeros(4)) + np.array([float(number) for number in new])
    return [
        {"p": p0, "sharpness": sharpness, "estimator": name}
        | {"bias": float(bias / norm) ** 0.5, "deviation": float(variance / norm) ** 0.5, "signs": float(signs)}
        for name, (bias, variance, norm, signs) in sums.items()
    ]
