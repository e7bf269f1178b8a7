"""What a call asks memory for, before it takes any, is what it takes; and it takes no more than it needs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sbm_pyg import SBM, AttentionGraph, SBMAttentionConv, SBMMultiheadAttention, Tokens, gradients
from sbm_pyg.analysis import conditions
from sbm_pyg.graphs import rows
from sbm_pyg.ops import checks, segments, tiles
from sbm_pyg.sources import indexer, pairs, patterns, selectors
from sbm_pyg.sparsefinder import ground_truth, predictors

N = 1500
LITTLE = 3 * 2**20  # bytes of what grows with tokens alone, and of parts


class Live(TorchDispatchMode):
    """Adds up the bytes of the tensors that are alive, of those that are made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.identity: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not x.is_sparse
        }
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not x.is_sparse:
                self._add(x.untyped_storage(), given)
        return out

    def _add(self, storage: Any, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.identity or key in given:
            return

        def gone(_: Any) -> None:
            self.identity.pop(key, None)
            self.now -= size

        self.identity[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def taken(call: Callable[[], Any]) -> int:
    """Bytes of the tensors that are alive at once while it is called."""
    with Live() as live:
        kept = call()
    del kept
    return live.peak


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (segments, rows, pairs, conditions):
        monkeypatch.setattr(module, "EDGES_PER_CHUNK", 2**14, raising=False)
    monkeypatch.setitem(tiles.SCORES_PER_TILE, "cpu", 2**14)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was asked for, in bytes, and answered with yes."""
    found = [0]

    def fits(count: int, bytes_each: int, device: torch.device) -> bool:
        found.append(count * bytes_each)
        return True

    monkeypatch.setattr(checks, "fits", fits)
    return found


RANDOM = torch.Generator().manual_seed(0)
TOKENS = torch.randn(1, N, 4, generator=RANDOM)
ONE, EIGHT = torch.zeros(1, 1, 4), torch.randn(1, 8, 4, generator=RANDOM)
LIKELY = SBM(torch.ones(1, N, 1), torch.ones(1, N, 1), 0.9 * torch.ones(1, 1, 1))
DENSE = SBMMultiheadAttention(4, 1, source=None, batch_first=True)


def dense(**options: Any) -> Any:
    with torch.no_grad():
        return DENSE(TOKENS, TOKENS, TOKENS, **options)


def soft(estimator: str) -> None:
    torch.manual_seed(0)
    SBMAttentionConv(4, 4, num_clusters=2, estimator=estimator)(TOKENS[0], seed=0).sum().backward()


BUILDERS: dict[str, Callable[[], Any]] = {
    "full": lambda: patterns.full(N), "full, causal": lambda: patterns.full(N, is_causal=True),
    "full, heads": lambda: patterns.full(N // 4, heads=16), "window": lambda: patterns.window(N, N // 4),
    "random": lambda: patterns.random(N, N // 8, seed=0), "multihead": lambda: dense(need_weights=False),
    "multihead, causal": lambda: dense(need_weights=False, is_causal=True), "multihead, weights": lambda: dense(need_weights=True),
    "from_dense": lambda: AttentionGraph.from_dense(torch.ones(N, N, dtype=torch.bool)),
    "union": lambda: patterns.window(N, N // 4) | patterns.relay_keys(N, N // 4),
    "clustering": lambda: predictors.clustering(Tokens(TOKENS), ONE),
    "clustering, eight": lambda: predictors.clustering(Tokens(TOKENS), EIGHT),
    "bucketing": lambda: predictors.bucketing(Tokens(TOKENS), 4),
    "block_bigbird": lambda: predictors.block_bigbird(Tokens(TOKENS), EIGHT, 4, 64),
    "distance, at most": lambda: predictors.distance(Tokens(TOKENS), 100.0, N // 2),
    "distance": lambda: predictors.distance(Tokens(TOKENS), 100.0), "top_k": lambda: selectors.top_k(Tokens(TOKENS), N),
    "block_top_k": lambda: selectors.block_top_k(Tokens(TOKENS), 4, 64), "lsh": lambda: selectors.lsh(Tokens(TOKENS, seed=0), 2, N // 4),
    "lsh, buckets": lambda: selectors.lsh(Tokens(TOKENS, seed=0), 2**12, 1),
    "routing": lambda: selectors.routing(Tokens(TOKENS), EIGHT),
    "routing, causal": lambda: selectors.routing(Tokens(TOKENS, is_causal=True), EIGHT),
    "ground_truth": lambda: ground_truth.ground_truth_graph(Tokens(TOKENS), scale=1e-3),
    "indexer": lambda: indexer.IndexProbability(Tokens(TOKENS), *indexer.Indexer(4, 1)(TOKENS, TOKENS)).sample(seed=0),
    "expected_graph": lambda: conditions.expected_graph(LIKELY),
    "expected_graph, causal": lambda: conditions.expected_graph(LIKELY.causal()), "lemma2": lambda: conditions.lemma2(N, 1),
    "relaxed": lambda: soft("relaxed"), "concrete": lambda: soft("concrete"),
    "score_function": lambda: gradients.score_function(LIKELY, patterns.window(N, 1), torch.ones(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", BUILDERS)
def test_what_is_asked_for_is_what_is_taken(name: str, asked: list[int]) -> None:
    peak = taken(BUILDERS[name])
    assert peak > 2**20, "this shows nothing"
    assert peak <= max(asked) + LITTLE
    assert max(asked) <= 4 * peak + LITTLE


@pytest.mark.parametrize("name", [name for name in BUILDERS if name not in ("distance", "ground_truth", "indexer")])
def test_it_is_refused_before_it_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MIN_CHECKED_BYTES", 2**18)
    monkeypatch.setattr(checks, "available", lambda device: 2**19)
    with Live() as live, pytest.raises(ValueError, match="to ask for no more than memory holds"):
        BUILDERS[name]()
    assert live.peak < LITTLE
