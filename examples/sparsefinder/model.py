"""A masked language model whose heads normalize by 1.5-entmax, and the texts that it learns from."""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from entmax import entmax15
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.common.command import option, require
from examples.common.fit import fit
from examples.common.tables import Row
from sbm_pyg import AttentionConv, GraphSource, SequenceEncoder, TokenClassifier

SHOWN = 96  # test sequences that the progress bar tells of
UNKNOWN, HIDDEN = 0, 1  # word numbers: of rare words, and of what stands where a word is hidden
WORD = re.compile(r"<unk>|\w+|[^\w\s]+")


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides the weights of the model, apart from the texts."""

    seed: int
    words: int = option(4096, "words of the vocabulary, the most frequent ones", least=3)
    length: int = option(128, "words of a sequence", least=8)
    steps: int = option(1200, "of the training", least=1)
    batch_size: int = option(16, "sequences of a step", least=1)
    channels: int = option(128, "of the model", least=8)
    layers: int = option(2, least=1)
    heads: int = option(4, "of a layer", least=1)
    learning_rate: float = option(2e-3, "of the model", above=0)
    hidden: float = option(0.2, "share of the words that are hidden", above=0, below=1)
    weight_decay: float = 0.1
    evaluations: int = 8


class Entmax(AttentionConv):
    """Attention by 1.5-entmax. Without a source all tokens of a sequence see each other, by dense products, for training.

    Sequences have one length. Over the graph of a source it is :class:`AttentionConv`.
    """

    def __init__(self, channels: int, head_channels: int, heads: int) -> None:
        super().__init__(channels, head_channels, heads, normalizer="entmax15")

    def attend(self, query: Tensor, key: Tensor, value: Tensor, edge_index: Any = None, **options: Any) -> Any:
        """As :meth:`AttentionConv.attend`; the choice of the dense layer is None."""
        if edge_index is not None or self.source is not None:
            return super().attend(query, key, value, edge_index, **options)
        length = int(options["ptr"][1])
        q, k, v = (x.unflatten(1, (-1, length)) for x in (query, key, value))  # [H, B, L, C]
        out = entmax15(self.scale * q @ k.mT, dim=-1) @ v
        out = out.flatten(1, 2).transpose(0, 1).flatten(1)
        return (out, None) if options["returns"].choice else out


def make_model(run: Run) -> TokenClassifier:
    torch.manual_seed(run.seed)
    sizes: dict[str, Any] = {"num_layers": run.layers, "heads": run.heads, "max_length": run.length, "dropout": 0.1}
    encoder = SequenceEncoder(run.words, run.channels, **sizes, attention=Entmax)
    model = TokenClassifier(encoder, run.words)
    with torch.no_grad():
        aim(model, run.length)
    return model


def aim(model: TokenClassifier, length: int) -> None:
    """Lets every other head begin at its neighbors, at offsets -1, 1, -2, 2 and so on, which entmax heads had not found after 1,000 steps.

    Positions are sines and cosines in the second half of the channels, where tokens begin with zeros. Two such waves, one turned by the
    offset, suit each other best at it. All of it is trained.
    """
    encoder = model.encoder
    waves = encoder.channels // 4
    rate = 2 * (length / 4) ** -torch.linspace(0, 1, waves)
    angle = torch.arange(length)[:, None] * rate
    encoder.position.weight.zero_()[:, 2 * waves :] = torch.cat([angle.sin(), angle.cos()], 1)
    encoder.token.weight[:, 2 * waves :] = 0
    offsets = itertools.chain.from_iterable((-size, size) for size in itertools.count(1))
    for layer in layers(model):
        used = min(layer.out_channels // 2, waves)
        wave = torch.arange(used)
        for head in range(0, layer.heads, 2):
            turn = next(offsets) * rate[:used]
            rows = slice(head * layer.out_channels, (head + 1) * layer.out_channels)
            query, key = layer.lin_query.weight[rows].zero_(), layer.lin_key.weight[rows].zero_()
            sine, cosine = 2 * waves + wave, 3 * waves + wave
            query[wave, sine] = query[used + wave, cosine] = 0.9
            # sin(a + t) = sin a cos t + cos a sin t
            key[wave, sine] = key[used + wave, cosine] = 0.9 * turn.cos()
            key[wave, cosine], key[used + wave, sine] = -0.9 * turn.sin(), 0.9 * turn.sin()


def layers(model: TokenClassifier) -> list[Entmax]:
    return [module for module in model.modules() if isinstance(module, Entmax)]


def set_sources(model: TokenClassifier, sources: Sequence[GraphSource | None]) -> None:
    """Gives each layer the source of its graph; None: dense attention."""
    for layer, source in zip(layers(model), sources, strict=True):
        layer.source = source


def read_words(paths: Sequence[Path]) -> list[str]:
    return [word for path in paths for word in WORD.findall(path.read_text(errors="replace").lower())]


def make_vocabulary(words: Sequence[str], size: int) -> list[str]:
    """The most frequent words; the first two stand for rare words and for hidden ones."""
    counts = Counter(words)
    del counts["<unk>"]
    return ["<unk>", "<hidden>", *(word for word, _ in counts.most_common(size - 2))]


@dataclasses.dataclass(frozen=True)
class Texts:
    """Words to learn from ``[T]`` int64, sequences to be tested on ``[S, L]``, and the word of each number."""

    train: Tensor
    test: Tensor
    vocabulary: list[str]


def read_texts(train: Sequence[Path], test: Sequence[Path], size: int, length: int) -> Texts:
    """Texts in sequences of one length, over the words of the former."""
    words = [read_words(paths) for paths in (train, test)]
    for name, text in zip(("train", "test"), words, strict=True):
        require(len(text) >= length, f"'{name}' of at least {length} words", len(text), "Give a longer text.")
    vocabulary = make_vocabulary(words[0], size)
    return Texts(encode(words[0], vocabulary), cut(encode(words[1], vocabulary), length), vocabulary)


def encode(words: Sequence[str], vocabulary: Sequence[str]) -> Tensor:
    """The number of each word, ``[T]`` int64."""
    number = {word: at for at, word in enumerate(vocabulary)}
    return torch.tensor([number.get(word, UNKNOWN) for word in words])


def cut(words: Tensor, length: int) -> Tensor:
    """Sequences of one length, ``[S, L]``; what is left at the end is dropped."""
    return words[: len(words) // length * length].view(-1, length)


def hide(tokens: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Hides a share of the words, never a rare one: the tokens, and where they are hidden, ``[S, L]`` bool."""
    random = torch.Generator().manual_seed(seed)
    hidden = (torch.rand(tokens.shape, generator=random) < share) & (tokens != UNKNOWN)
    return tokens.masked_fill(hidden, HIDDEN), hidden


def predict(model: TokenClassifier, tokens: Tensor, hidden: Tensor, seed: int = 0) -> Tensor:
    """Logits of the hidden words, ``[sum(hidden), words]``."""
    ptr = tokens.size(1) * torch.arange(len(tokens) + 1)
    encoded = model.encoder(tokens.flatten(), ptr, seed=seed)
    return model.classifier(encoded[hidden.flatten()])


@torch.no_grad()
def test_model(model: TokenClassifier, tokens: Tensor, hidden: float, batch_size: int) -> Row:
    """Share of the hidden words that are the first guess, and bits of a hidden word."""
    nats, hits, count = 0.0, 0, 0
    for at, part in enumerate(tokens.split(batch_size)):
        seen, where = hide(part, hidden, at)
        logits, answers = predict(model, seen, where, seed=at), part[where]
        nats += float(cross_entropy(logits, answers, reduction="sum"))
        hits += int((logits.argmax(1) == answers).sum())
        count += len(answers)
    return {"accuracy": hits / max(1, count), "bits": nats / max(1, count) / math.log(2)}


def train(run: Run, texts: Texts, path: Path) -> TokenClassifier:
    """Trains a model to predict hidden words, or goes on from its checkpoint."""
    model, source = make_model(run), texts.train

    def losses(step: int) -> Tensor:
        random = torch.Generator().manual_seed(2**32 * (run.seed + 1) + step)
        starts = torch.randint(len(source) - run.length + 1, (run.batch_size,), generator=random)
        tokens = source[starts[:, None] + torch.arange(run.length)]
        seen, hidden = hide(tokens, run.hidden, 2**32 * (run.seed + 1) + step)
        logits = predict(model, seen, hidden)
        return cross_entropy(logits, tokens[hidden], reduction="sum") / max(1, len(logits))  # a mean over none is NaN

    fit(model, None, run, path, losses, lambda: [test_model(model, texts.test[:SHOWN], run.hidden, run.batch_size)])
    return model.eval()
