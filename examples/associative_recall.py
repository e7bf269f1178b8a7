"""Multi-query associative recall with few edges: which value came with this key, somewhere before?

A sequence tells pairs of key and value, then asks for the keys again, at random places among fillers. Each asks for the
token behind its first occurrence: a graph with few edges must find the one that matters. Graphs begin full; what the
attention over them learns to look at teaches the block model, and each query's share of keys falls while the loss is low::

    python examples/associative_recall.py                    # about 4 minutes on a core
    python examples/associative_recall.py --attention full   # or window, random: the peers

Reference: Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", 2023, for the task.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbm_pyg
from sbm_pyg import AttentionConv, SBMAttentionConv, patterns

KEYS = VALUES = 64
FILLERS = 32


def recall(count: int, length: int, pairs: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens ``[count, length]``, the places of the questions and the values to answer, ``[count, pairs]`` each."""
    keys = torch.rand(count, KEYS, generator=random).argsort(1)[:, :pairs]
    values = KEYS + torch.randint(VALUES, (count, pairs), generator=random)
    tokens = KEYS + VALUES + torch.randint(FILLERS, (count, length), generator=random)
    tokens[:, : 2 * pairs] = torch.stack([keys, values], 2).flatten(1)
    places = 2 * pairs + torch.rand(count, length - 2 * pairs, generator=random).argsort(1)[:, :pairs]
    return tokens.scatter(1, places, keys), places, values


class Block(nn.Module):
    """A gated short convolution, which binds neighbours, and then attention."""

    def __init__(self, channels: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(channels), nn.LayerNorm(channels), attention
        self.conv = nn.Conv1d(channels, channels, 3, groups=channels)
        self.gate, self.mix, self.out = (nn.Linear(channels, channels) for _ in range(3))

    def forward(self, x: Tensor, ptr: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        h = self.norm1(x)
        near = self.conv(F.pad(h.unflatten(0, (ptr.numel() - 1, -1)).mT, (2, 0))).mT.flatten(0, 1)
        x = x + self.mix(near * self.gate(h))
        attended, choice = self.attention(self.norm2(x), ptr=ptr, seed=seed, return_choice=True)
        return x + self.out(attended), torch.ones(()) if choice is None else choice.graph.density.mean()


class Model(nn.Module):
    def __init__(self, attention: str, channels: int = 64, layers: int = 2) -> None:
        super().__init__()
        sources = {"window": (patterns.window, {"size": 3}), "random": (patterns.random, {"num_keys_per_query": 3})}
        if attention == "sbm":  # 64 blocks; a key may be in none of them
            options = {"sbm_options": {"parameterization": "overlapping", "cluster_init": "orthogonal"}}
            layer = lambda: SBMAttentionConv(channels, channels, 1, 64, estimator="distill", self_loops=True,
                                             is_causal=True, share=1.0, **options)  # fmt: skip # noqa: E731
        elif attention == "full":
            layer = lambda: sbm_pyg.FullAttention(channels, channels, 1, is_causal=True)  # noqa: E731
        else:
            pattern, sizes = sources[attention]
            layer = lambda: AttentionConv(
                channels, channels, 1, patterns.PatternSource(pattern, **sizes), is_causal=True
            )  # noqa: E731
        self.embed = nn.Embedding(KEYS + VALUES + FILLERS, channels)
        self.blocks = nn.ModuleList(Block(channels, layer()) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(channels), nn.Linear(channels, KEYS + VALUES)

    def forward(self, tokens: Tensor, places: Tensor, seed: int) -> tuple[Tensor, list[Tensor]]:
        ptr, densities = torch.arange(len(tokens) + 1) * tokens.size(1), []
        x = self.embed(tokens.flatten())
        for number, block in enumerate(self.blocks):
            x, density = block(x, ptr, seed * 16 + number)
            densities.append(density)
        return self.head(self.norm(x)[(places + ptr[:-1, None]).flatten()]), densities


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--attention", choices=("sbm", "full", "window", "random"), default="sbm", help="(default: sbm)"
    )
    for name, default in (("steps", 1500), ("seed", 0), ("length", 64), ("pairs", 8)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument(
        "--share", type=float, default=0.11, help="of keys that a query ends with (default: %(default)s)"
    )
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    random, model = torch.Generator().manual_seed(given.seed), Model(given.attention)
    schedule = sbm_pyg.ShareSchedule(model, given.share, threshold=0.1) if given.attention == "sbm" else None
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    warmed = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, given.steps, pct_start=0.07, final_div_factor=2)
    test = recall(200, given.length, given.pairs, torch.Generator().manual_seed(2**32))
    for step in range(1, given.steps + 1):
        tokens, places, values = recall(32, given.length, given.pairs, random)
        loss = F.cross_entropy(model.train()(tokens, places, step)[0], values.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmed.step()
        share = schedule.step(loss) if schedule else 1.0
        if step % 250 == 0 or step == given.steps:
            with torch.no_grad():
                logits, densities = model.eval()(*test[:2], 0)
            right, told = (
                (logits.argmax(1) == test[2].flatten()).float().mean(),
                " ".join(f"{d:6.1%}" for d in densities),
            )
            print(
                f"step {step:5}  loss {loss:.3f}  accuracy {right:7.2%}  share {share:6.1%}  density of layers {told}",
                flush=True,
            )


if __name__ == "__main__":
    main()
