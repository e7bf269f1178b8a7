"""Multi-query associative recall with few edges: which value came with this key, somewhere before?

    python examples/associative_recall.py --pictures docs/figures --save examples/weights/recall   the first page, and the saved model

A sequence tells pairs of key and value, then asks for the keys again among fillers. Attention is dense first, and teaches the block
model of each layer; then each head attends to a twentieth of the pairs. (Arora et al., "Zoology"; more: python -m examples.recall.)"""

import argparse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, default in (("steps", 1000), ("seed", 0), ("length", 64), ("pairs", 8), ("density", 0.05)):
    parser.add_argument(f"--{name}", type=type(default), default=default, help="(default: %(default)s)")
parser.add_argument("--pictures", metavar="DIR", help="draw the losses, and a graph of the second layer")
parser.add_argument("--save", metavar="DIR", help="save the model, with a card if the folder has none")
if __name__ == "__main__":  # --help and mistakes do not wait for the imports below
    parser.parse_args()

import torch
from torch import Tensor, nn

from sbm_pyg import AttentionGraph, Pretrained, SBMAttentionConv, Sparsifier, analysis

KEYS, VALUES, TOKENS, CHANNELS = 64, 64, 160, 64  # what is neither key nor value is a filler


def make_data(count: int, length: int, pairs: int, random: torch.Generator) -> list[Tensor]:
    """Tokens of all sequences and their offsets; the places of the questions among them, and the answers."""
    keys, ptr = torch.rand(count, KEYS, generator=random).argsort(1)[:, :pairs], torch.arange(count + 1) * length
    values = torch.randint(KEYS, KEYS + VALUES, (count, pairs), generator=random)
    tokens = torch.randint(KEYS + VALUES, TOKENS, (count, length), generator=random)
    tokens[:, : 2 * pairs] = torch.stack([keys, values], 2).flatten(1)
    places = 2 * pairs + torch.rand(count, length - 2 * pairs, generator=random).argsort(1)[:, :pairs]
    return [tokens.scatter(1, places, keys).flatten(), ptr, (places + ptr[:-1, None]).flatten(), values.flatten()]


class Block(nn.Module):  # a gated short convolution, which binds neighbors, and then attention
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(CHANNELS, CHANNELS, 3, groups=CHANNELS)
        self.gate, self.mix, self.out = (nn.Linear(CHANNELS, CHANNELS) for _ in range(3))
        self.norm1, self.norm2 = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.attention = SBMAttentionConv(CHANNELS, CHANNELS, is_causal=True)

    def forward(self, x: Tensor, ptr: Tensor, seed: int) -> tuple[Tensor, AttentionGraph]:
        h = self.norm1(x)
        near = self.conv(nn.functional.pad(h.unflatten(0, (ptr.numel() - 1, -1)).mT, (2, 0))).mT.flatten(0, 1)
        x = x + self.mix(near * self.gate(h))
        out, graph = self.attention(self.norm2(x), ptr=ptr, seed=seed, return_graph=True)
        return x + self.out(out), graph


class RecallModel(Pretrained):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(TOKENS, CHANNELS), Block(), Block()
        self.head = nn.Sequential(nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, TOKENS))

    def forward(self, tokens: Tensor, ptr: Tensor, seed: int) -> tuple[Tensor, AttentionGraph, AttentionGraph]:
        x, first = self.first(self.embed(tokens), ptr, 2 * seed)
        x, second = self.second(x, ptr, 2 * seed + 1)
        return self.head(x), first, second


def main(arguments: list[str] | None = None) -> None:
    options = parser.parse_args(arguments)
    if not 0 < options.pairs <= min(KEYS, options.length // 3):
        parser.error(f"Expected 'pairs' in 1 to {KEYS} and 3 x 'pairs' <= 'length' (got {options.pairs}). See --help.")
    torch.manual_seed(options.seed)
    model, random, size = RecallModel(), torch.Generator().manual_seed(options.seed), (options.length, options.pairs)
    sparsifier = Sparsifier(model, options.density, total_steps=options.steps)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for step in range(1, options.steps + 1):
        tokens, ptr, places, values = make_data(32, *size, random)
        loss = nn.functional.cross_entropy(model.train()(tokens, ptr, step)[0][places], values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sparsifier.step(loss)
        if step % 100 == 0 or step == options.steps:
            tokens, ptr, places, values = make_data(200, *size, torch.Generator().manual_seed(2**32))
            with torch.no_grad():
                logits, *graphs = model.eval()(tokens, ptr, seed=0)
            accuracy = float((logits[places].argmax(1) == values).double().mean())
            density = torch.stack([graph.density.mean(0) for graph in graphs])
            print(f"{sparsifier}: accuracy {accuracy:.2%}, densities {density.mean(1).numpy().round(3)}")
    if options.save:
        words = [f"--{name} {value}" for name, value in vars(options).items() if value != parser.get_default(name)]
        task = f"associative recall: `python examples/associative_recall.py {' '.join(words)}`"
        results = {"test accuracy": accuracy, "density": density.mean()}
        model.save_pretrained(options.save, model_card_kwargs={"task": task, "results": results})
    if options.pictures:
        analysis.plots.plot_losses(sparsifier.history).savefig(f"{options.pictures}/losses.png")
        analysis.plots.plot_mask(graphs[1], title="Second layer").savefig(f"{options.pictures}/mask.png")


if __name__ == "__main__":
    main()
