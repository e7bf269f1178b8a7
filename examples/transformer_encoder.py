"""Puts sampled attention in the place of that of `torch.nn.TransformerEncoder`, and trains the result for some seconds.

    python examples/transformer_encoder.py

Expect logits that agree to 1e-6 over the full graph, and an accuracy of 100 % after 100 steps over sampled ones.
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=100, help="training steps of 32 sequences (default: 100)")
parser.add_argument("--num-clusters", type=int, default=8, help="communities of each head's model (default: 8)")
parser.add_argument("--length", type=int, default=24, help="longest sequence (default: 24)")
parser.add_argument("--seed", type=int, default=0, help="seed of weights, data and graphs (default: 0)")
if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parser.parse_args()

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sbm_pyg import replace_attention


class Classifier(nn.Module):
    """An ordinary torch model: embeddings, `torch.nn.TransformerEncoder`, mean over the real tokens."""

    def __init__(self, num_tokens: int, channels: int, heads: int, num_layers: int, max_length: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(channels, heads, 2 * channels, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers)
        self.token, self.position = nn.Embedding(num_tokens, channels), nn.Embedding(max_length, channels)
        self.out = nn.Linear(channels, 2)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.size(1)]
        x = self.encoder(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0)
        return self.out(x.sum(1) / (~padding).sum(1, keepdim=True))


def batch(size: int, length: int, num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Token numbers, padding and labels: does token 0 stand in a sequence of random length? Half of them say yes."""
    lengths = torch.randint(length // 2, length + 1, (size, 1), generator=generator)
    tokens = torch.randint(1, num_tokens, (size, length), generator=generator)
    label = torch.randint(2, (size,), generator=generator)
    place = (torch.rand(size, 1, generator=generator) * lengths).long()
    tokens = torch.where(label[:, None].bool(), tokens.scatter(1, place, 0), tokens)
    return tokens, torch.arange(length) >= lengths, label


def main(arguments: list[str] | None = None) -> None:
    options = parser.parse_args(arguments)
    if wrong := [name for name in ("steps", "length") if getattr(options, name) < 1]:
        parser.error(f"Expected '{wrong[0]}' to be at least 1 (got {getattr(options, wrong[0])}). See --help.")
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    model = Classifier(16, 32, heads=2, num_layers=2, max_length=options.length)
    tokens, padding, label = batch(200, options.length, 16, generator)
    with torch.no_grad():
        before = model(tokens, padding)
        replaced = replace_attention(model, source=None)  # over the full graph
        difference = (model(tokens, padding) - before).abs().max()
    print(f"replaced {len(replaced)} layers; over the full graph, logits differ by {difference:.1e} at most")

    model = Classifier(16, 32, heads=2, num_layers=2, max_length=options.length)
    replace_attention(
        model, num_clusters=options.num_clusters, target_density=None, window=None
    )  # sampled from the start
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(options.steps):
        *inputs, answer = batch(32, options.length, 16, generator)
        loss = F.cross_entropy(model(*inputs), answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (model.eval()(tokens, padding).argmax(1) == label).float().mean()
    print(f"after {options.steps} steps over sampled graphs: accuracy {100 * accuracy:.1f} % (chance: 50 %)")


if __name__ == "__main__":
    main()
