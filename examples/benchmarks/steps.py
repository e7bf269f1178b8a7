"""Peers of a whole training step of a causal model, in the dense and in the sparse phase of a Sparsifier.

The model is that of recall and of the arena: two layers, each a gated short convolution and attention with self-loops, one head, 512
words. A step is the model, its loss, the backward pass, clipping and AdamW. At a target density of 1, each must have the loss of full attention.
"""

import itertools
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.benchmarks.kernels import Case, Peer, Work
from examples.common import hybrid
from examples.common.gate import compare
from sbm_pyg import DensitySource, auxiliary_loss
from sbm_pyg.ops.cpu.threads import flushed_subnormals

METHODS = {
    "block model": "sbm", "indexer, 2 x 8": "indexer:select=top_k,index_heads=2,index_channels=8",
    "exact top-k": "top-k:control=sparsifier",
}  # fmt: skip
WORDS, LAYERS = 512, 2
BATCH = 4_096  # tokens of a step, or one sequence


def _make(case: Case, method: str) -> hybrid.Recaller:
    torch.manual_seed(case.seed)
    channels, (kind, options) = case.heads * case.channels, hybrid.options_of(method)
    layers = partial(hybrid.make_causal_attention, kind, channels, 1, case.density, options)
    return hybrid.Recaller(WORDS, channels, LAYERS, layers)


def _step(case: Case, method: str, is_dense: bool = False) -> Work:
    model, full, seeds = _make(case, method), _make(case, "full"), itertools.count()
    model.load_state_dict(full.state_dict(), strict=False)
    count = max(BATCH // case.tokens, 1)
    tokens = torch.randint(WORDS, (count, case.tokens + 1), generator=torch.Generator().manual_seed(case.tokens))
    sources = [module for module in model.modules() if isinstance(module, DensitySource)]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    density = 1.0 if is_dense or method == "full" else case.density

    def loss(model: hybrid.Recaller, density: float, seed: int) -> Tensor:
        for source in sources:
            source.target_density = density
        logits, _ = model(tokens[:, :-1], seed=seed)
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def step() -> int:
        with flushed_subnormals():
            optimizer.zero_grad()
            (loss(model, density, next(seeds)) + auxiliary_loss(model)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return round(LAYERS * count * density * case.tokens * (case.tokens + 1) / 2)

    def check() -> float:
        with torch.no_grad():
            pair = (loss(model, 1.0, 0), loss(full, 1.0, 0))
        step()  # compiles kernels
        return compare({"loss with dense attention": pair})

    return Work(check, {"step": step})


STEPS = {"full": Peer("full attention", partial(_step, method="full"))}
for name, method in METHODS.items():
    key = method.partition(":")[0]
    STEPS[f"{key}-dense"] = Peer(f"{name}, dense phase", partial(_step, method=method, is_dense=True))
    STEPS[key] = Peer(f"{name}, sparse phase", partial(_step, method=method))
