"""Embeddings of texts by a sparse encoder, next to those by dense attention.

In: an encoder of `transformers`, and texts. Out: how far sparse embeddings are from dense ones. Not here: arms.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from sbm_pyg.analysis import compare_heads
from sbm_pyg.progress import tqdm

NEIGHBORS = 10


def tokens_of(tokenizer: Any, texts: Sequence[str], length: int) -> list[Tensor]:
    """Tokens ``[1, L]`` of each text, at most ``length``."""
    return [
        tokenizer(text, truncation=True, max_length=length, return_tensors="pt", verbose=False).input_ids
        for text in texts
    ]


@torch.no_grad()
def embed(model: Any, tokens: Sequence[Tensor], name: str) -> Tensor:
    """The means of the last layer over the tokens of each text, as unit vectors ``[N, C]``, with a bar of this name."""
    bar = tqdm(tokens, desc=f"{name}, embed", unit="text")
    means = [model(input_ids=text).last_hidden_state.mean(1) for text in bar]
    return torch.nn.functional.normalize(torch.cat(means), dim=1)


def neighbors(vectors: Tensor) -> Tensor:
    """True at the ten nearest other texts of each, ``[N, N]``."""
    near = (vectors @ vectors.T).fill_diagonal_(-torch.inf).topk(min(NEIGHBORS, len(vectors) - 1)).indices
    return torch.zeros(len(vectors), len(vectors), dtype=torch.bool).scatter_(1, near, True)


def compare(dense: Tensor, sparse: Tensor) -> dict[str, float]:
    """The mean cosine of dense and sparse embeddings, and the part of the ten nearest texts that both share."""
    first, second = neighbors(dense), neighbors(sparse)
    shared = float((first & second).sum()) / max(1, int(first.sum()))
    return {"cosine": float((dense * sparse).sum(1).mean()), "neighbors": shared}


@torch.no_grad()
def density(model: Any, tokens: Sequence[Tensor]) -> float:
    """The mean density of the graphs of the longest text."""
    with compare_heads(model) as table:
        model(input_ids=max(tokens, key=lambda text: text.size(1)))
    return fmean(head.density for head in table.heads)
