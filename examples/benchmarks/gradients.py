"""Bias and variance of the gradients of edge probabilities, by enumeration of all graphs of one query."""

from typing import Any

import torch
from torch import Tensor


def gradient_errors(
    p0: float, sharpness: float, chance: float = 0.25, cases: int = 200, keys: int = 8, channels: int = 8
) -> list[dict[str, Any]]:
    """Bias and standard deviation of each estimator, relative to the norm of the true gradient, and the share of signs that agree.

    One query attends to ``keys`` keys with scores of standard deviation ``sharpness`` and edge probabilities around ``p0``; a pair is a
    probe with probability ``chance``. The loss is a cross-entropy behind a tanh, so it is not linear. All S = 2^M graphs are enumerated;
    shapes are ``[cases, S, M]``.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((keys,), (keys, channels), (2, channels), (channels,), (keys,))
    drawn = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(cases)]
    score, value, readout, residual, spread = (torch.stack(parts) for parts in zip(*drawn, strict=True))
    p = (p0 + 0.2 * min(p0, 1 - p0) * spread[:, None]).clamp(0.01, 0.99)
    graphs, bit = torch.arange(2**keys)[:, None], 2 ** torch.arange(keys)
    present = graphs & bit > 0
    weight = torch.where(present, (sharpness * score[:, None]).exp(), 0)
    weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-300)  # nothing where a graph has no edge
    out = (weight @ value).requires_grad_()
    logits = torch.tanh(out + residual[:, None]) @ (2 * readout).mT
    loss = torch.logsumexp(logits, -1, keepdim=True) - logits[..., :1]
    (grad_out,) = torch.autograd.grad(loss.sum(), out)
    out, loss = out.detach(), loss.detach()
    effect = ((out[:, graphs | bit] - out[:, graphs & ~bit]) * grad_out[:, :, None]).sum(-1)
    gain = grad_out @ value.mT
    mask = weight * (gain - (weight * gain).sum(-1, keepdim=True))
    chances = torch.where(present, p, 1 - p).prod(-1, keepdim=True)
    score_function = torch.where(present, 1 / p, -1 / (1 - p)) * (loss - (chances * loss).sum(1, keepdim=True))
    true = (chances * score_function).sum(1)
    balance = p / (p + chance * (1 - p))  # share of the side with the edge by the balance heuristic
    probe = torch.where(present, 1.0, chance)  # probability that the pair is looked at, its state given

    def weighted(share: Any) -> tuple[Tensor, Any]:
        """The effect of a pair where it is looked at; edges count for this share."""
        return torch.where(present, effect * share / p, effect * (1 - share) / (chance * (1 - p))), probe

    looked: dict[str, tuple[Tensor, Any]] = {  # what a pair contributes where it is looked at, and how often it is
        "paper": (mask * sharpness * score[:, None], 1.0),
        "mask": (mask, 1.0),
        "local, all pairs": (effect, 1.0),
        "local, edges over p": weighted(1.0),
        "local, non-edges over their chance": weighted(p),
        "local, balance heuristic": weighted(balance),
        "local, half and half": weighted(0.5),
        "local": weighted(torch.maximum(balance.clamp(max=0.5), p)),
        "score function": (score_function, 1.0),
    }
    rows = []
    for name, (amount, often) in looked.items():
        mean, second = ((chances * power * often).sum(1) for power in (amount, amount**2))
        errors = {"bias": (mean - true) ** 2, "deviation": second - mean**2}
        row = {key: float(error.sum() / (true**2).sum()) ** 0.5 for key, error in errors.items()}
        row["signs"] = float((mean.sign() == true.sign()).double().mean())
        rows.append({"p": p0, "sharpness": sharpness, "estimator": name, **row})
    return rows
