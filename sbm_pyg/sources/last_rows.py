"""Attention from a few new tokens to keys in a cache, for sources whose queries choose keys independently.

In: padded queries, keys and values, and how the source chooses. Out: the output. Not here: the scores (``selectors``,
``indexer``), and rows that are drawn or need a graph (:class:`~sbm_pyg.Tokens` with ``at_end``).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..graphs.rows import index_type
from ..ops import schemas
from ..ops.segments import upcast
from .pairs import number_of_keys

__all__ = ["LastRows", "RowRule", "scores_of_groups"]


class RowRule(NamedTuple):
    """Rule for the keys of a token: the keys of its largest scores, near tokens, and first tokens."""

    scores: Tensor | None
    """Scores ``[B, H, L, S]``, which may be overwritten; None if no key is chosen by its score."""
    k: int | None
    """Number of keys chosen by score, and their density, as in :class:`~sbm_pyg.sources.selectors.TopKSource`."""
    density: float | Tensor | None
    window: int | None
    num_sinks: int
    are_products: bool = False
    """Whether scores are dot products of queries and keys, so that attention need not compute them again."""


def scores_of_groups(query: Tensor, key: Tensor) -> Tensor:
    """Dot products of queries ``[B, H, L, C]`` with the keys of their groups ``[B, G, S, C]``, ``[B, H, L, S]``."""
    query, key = upcast(query), upcast(key)
    rows = query.reshape(*key.shape[:2], -1, key.size(3))  # [B, G, g*L, C]
    return (rows @ key.mT).view(*query.shape[:3], -1)


class LastRows:
    """Positions of new tokens among the keys of their sequences, for all layers of a model.

    Args:
        batch: Number of sequences B.
        length: Number of new tokens L of a sequence, which are the last of its keys.
        keys: Number of keys S.
        real: True at real keys, ``[B, S]`` bool; None: all of them.
        device: Device of the result.
    """

    def __init__(self, batch: int, length: int, keys: int, real: Tensor | None, device: torch.device) -> None:
        self.shape, self.keys = (batch, length), keys
        place = torch.arange(keys, device=device)
        self.position = place[None] if real is None else real.cumsum(1) - 1  # [B or 1, S]
        self.earlier = (place <= place[keys - length :, None])[None]  # [B or 1, L, S]
        if real is not None:
            self.earlier = self.earlier & real[:, None] & real[:, keys - length :, None]
        self.allowed = self.earlier.sum(2)  # [B or 1, L]
        self.are_all = real is None and length == 1
        self._cached: dict[tuple[Any, ...], Any] = {}

    def attend(
        self, rule: RowRule, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """The output ``[B, H, L, C']``, and the logarithm of the sum of exponentials ``[B, H, L]`` or None.

        The heads of a group become rows over the keys of the group, so that the keys are not copied.

        Args:
            rule: How keys are chosen.
            query: ``[B, H, L, C]``.
            key, value: Of groups of heads, ``[B, G, S', C]`` and ``[B, G, S', C']``, with S' at least S.
            scale: Factor of the scores.
        """
        groups, heads = key.size(0) * key.size(1), query.size(1)
        alike = not isinstance(rule.density, Tensor)  # each row has as many keys
        if rule.are_products and self.are_all and alike and not torch.is_grad_enabled():
            scores, keys = self._products_of_one(rule, heads)
            first = torch.arange(0, groups * value.size(2), value.size(2), device=keys.device)[:, None]
            places = (keys.view(groups, -1) + first).view_as(keys)  # [B*H, k]
            values = nn.functional.embedding(places, value.reshape(-1, value.size(3)))
            weights = (scores * scale).softmax(-1).to(value.dtype)  # [B*H, 1, k]
            return torch.bmm(weights, values).view(*query.shape[:3], -1), None
        return self.attend_over(*self.choose(rule, heads), query, key, value, scale)

    def attend_over(
        self, rowptr: Tensor, col: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`attend`, over compressed rows in the order of :meth:`choose`."""
        groups = key.size(0) * key.size(1)
        rows = query.reshape(groups, -1, query.size(3))  # [B*G, g*L, C]
        more = (rowptr, col, None, None, scale, "score", 0.0, 0)
        out, total = schemas.edge_attention(rows, key.flatten(0, 1), value.flatten(0, 1), *more)
        return out.view(*query.shape[:3], -1), total.view(query.shape[:3])

    def _products_of_one(self, rule: RowRule, heads: int) -> tuple[Tensor, Tensor]:
        """The products of one new token with its keys, ``[B*H, 1, k]``, and the keys, ``[B*H, k]``.

        A key that is chosen twice, as near and by score, gets a product of minus infinity once.
        """
        assert rule.scores is not None
        scores, near = rule.scores.flatten(0, 2), self.near(rule.window, rule.num_sinks)[0, 0]  # [B*H, S], [S]
        keys = self._best(rule, heads)[1].view(len(scores), -1) % self.keys
        products = scores.gather(1, keys).masked_fill_(near[keys], -torch.inf)
        place = ("forced", rule.window, rule.num_sinks)
        if place not in self._cached:
            self._cached[place] = near.nonzero()[:, 0]
        forced = self._cached[place]
        keys = torch.cat([keys, forced.expand(len(keys), -1)], 1)
        return torch.cat([products, scores[:, forced]], 1)[:, None], keys

    @cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray] | None:
        """First key of each sequence, ``[B]``, and each new token's place among the keys, ``[B, L]``; -1 for padding.

        None if there is padding between keys of a sequence.
        """
        batch, length = self.shape
        position = self.position.expand(batch, -1)
        place = torch.arange(self.keys, device=position.device)
        count, start = position[:, -1] + 1, (position < 0).sum(1)  # with padding at the left
        real = self.allowed.expand(batch, -1) > 0
        if not bool((position == (place - start[:, None]).clamp(min=-1).minimum(count[:, None] - 1)).all()):
            return None
        return start.numpy(), torch.where(real, place[-length:], -1).numpy()

    def near(self, window: int | None, num_sinks: int) -> Tensor:
        """True at the pairs of a window and at those with first tokens, ``[B or 1, L, S]``."""
        place = ("near", window, num_sinks)
        if place not in self._cached:
            key, query = self.position[:, None], self.position[:, -self.shape[1] :, None]
            pairs = key < num_sinks
            if window is not None:
                pairs = pairs | (key >= query - window)
            self._cached[place] = self.earlier & pairs
        pairs_of_tokens: Tensor = self._cached[place]
        return pairs_of_tokens

    def choose(self, rule: RowRule, heads: int) -> tuple[Tensor, Tensor]:
        """Compressed rows in the order of sequences, heads and tokens, ``[B*H*L+1]`` and ``[E]``.

        Cost O(B H L S), without an array of more than one number for each pair.
        """
        forced = (rule.window, rule.num_sinks)
        if rule.scores is None:
            place = ("rows", *forced, heads)
            if place not in self._cached:
                self._cached[place] = self._compress(self.by_head(self.near(*forced), heads).flatten())
            rows: tuple[Tensor, Tensor] = self._cached[place]
            return rows
        if not self.are_all:
            rule.scores.masked_fill_(~self.earlier[:, None], -torch.inf)
        rowptr, edge = self._best(rule, heads)
        if forced == (None, 0):
            return rowptr, (edge % self.keys).to(index_type(self.keys))
        chosen = self.by_head(self.near(*forced), heads).reshape(-1).clone()
        chosen[edge] = True
        return self._compress(chosen)

    def _best(self, rule: RowRule, heads: int) -> tuple[Tensor, Tensor]:
        """Compressed rows of the largest scores, as indices into all scores."""
        assert rule.scores is not None
        place = ("counts", rule.k, rule.density, heads)
        if isinstance(rule.density, Tensor):
            count = torch.as_tensor(number_of_keys(rule.k, rule.density[None], self.allowed[:, None]))  # [B or 1, H, L]
            count = torch.minimum(count, self.allowed[:, None]).expand(self.shape[0], -1, -1).flatten()
        elif place in self._cached:
            count = self._cached[place]
        else:
            count = torch.as_tensor(number_of_keys(rule.k, rule.density, self.allowed), device=rule.scores.device)
            count = self.by_head(torch.minimum(count, self.allowed), heads).flatten()
            self._cached[place] = count
        return schemas.segment_top_k(rule.scores.flatten(), self._ends(count.numel()), count)

    def by_head(self, pairs: Tensor, heads: int) -> Tensor:
        """Repeat values of new tokens, ``[B or 1, L, ...]``, for each head, ``[B, H, L, ...]``."""
        return pairs[:, None].expand(self.shape[0], heads, *pairs.shape[1:])

    def _ends(self, rows: int) -> Tensor:
        """Offsets of rows of all keys."""
        place = ("ends", rows)
        if place not in self._cached:
            self._cached[place] = torch.arange(0, (rows + 1) * self.keys, self.keys, device=self.position.device)
        ends: Tensor = self._cached[place]
        return ends

    def _compress(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Compressed rows of a mask, ``[B*H*L*S]`` bool."""
        edge = chosen.nonzero()[:, 0]
        rowptr = torch.searchsorted(edge, self._ends(chosen.numel() // self.keys))
        return rowptr, (edge % self.keys).to(index_type(self.keys))
