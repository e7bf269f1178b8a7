"""Long documents whose label needs one part of them: a film review among passages without an opinion.

In: the reviews of Maas et al. (2011), sentences of SST-2, and any text that has no opinions. Out: token numbers in ragged batches, and labels
for the first token of each document. Not here: models and training.
"""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.common.command import require
from examples.common.corpus import read_lines, train_tokenizer
from examples.common.releases import REVIEWS, malformed
from sbm_pyg.graphs.ragged import offsets

START, SEPARATOR = SPECIAL = ("[CLS]", "[SEP]")
CLASSES = ("neg", "pos")  # labels 0 and 1
Labeled = list[tuple[Tensor, int]]


@dataclasses.dataclass(frozen=True)
class Texts:
    """Token numbers of what documents are made of, for training or for the test."""

    reviews: Labeled
    fillers: list[Tensor]
    sentences: dict[int, list[Tensor]] = dataclasses.field(default_factory=dict)
    """Of each label; several of them make a review. Empty without SST-2."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Documents: tokens ``[N]``, their offsets ``[B+1]``, and labels ``[B]`` of their first tokens."""

    tokens: Tensor
    ptr: Tensor
    labels: Tensor


def read_reviews(folder: Path, part: str) -> Iterator[tuple[str, int]]:
    """Texts and labels of the reviews of "train" or "test", in the order of their files."""
    root = REVIEWS.find(folder)
    for label, name in enumerate(CLASSES):
        for path in sorted((root / part / name).glob("[0-9]*_[0-9]*.txt")):
            text = path.read_bytes().decode(errors="replace").replace("<br />", "\n").strip()
            if not text:
                raise malformed(path, None, "hold a review", "an empty file")
            yield text.lower(), label


def read_sentences(path: Path) -> Iterator[tuple[str, int]]:
    """Texts and labels of SST-2's ``train.tsv``."""
    lines = read_lines(path)
    header = next(lines, "")
    if header.split("\t") != ["sentence", "label"]:
        raise malformed(path, 1, "be the header 'sentence', tab, 'label'", header[:80])
    for number, line in enumerate(lines, 2):
        text, _, label = line.rpartition("\t")
        if label not in ("0", "1") or not text.strip():
            raise malformed(path, number, "hold a sentence, a tab and 0 or 1", line[:80])
        yield text.lower(), int(label)


def prepare(given: Any) -> tuple[dict[str, Texts], int]:
    """The texts of "train" and "test" as tokens of a tokeniser that is learned from those of "train", and the number of its tokens.

    A tenth of the fillers, the last, is for the test.
    """
    reviews = {part: [*read_reviews(given.reviews, part)] for part in ("train", "test")}
    for part, pairs in reviews.items():
        missing = [name for label, name in enumerate(CLASSES) if label not in {each for _, each in pairs}]
        words = f"'reviews' to have files NUMBER_STARS.txt of both labels in {part}"
        require(not missing, words, f"none in {' and '.join(missing)}", "Copy or unpack them again.")
    sentences = [*read_sentences(given.sentences)] if given.sentences else []
    labels = {label for _, label in sentences}
    require(
        not given.sentences or len(labels) == 2, "'sentences' of both labels", labels or "none", "Take the whole file."
    )
    fillers = [line.lower() for path in given.fillers for line in read_lines(path) if len(line) >= 400]
    held_out = len(fillers) // 10
    words = "'fillers' to have 100 passages, lines of at least 400 letters"
    require(held_out >= 10, words, len(fillers), "Give more texts.")
    learned = [text for text, _ in (*reviews["train"], *sentences[:20_000])] + fillers[:-held_out]
    tokenizer = train_tokenizer(learned, given.vocabulary, SPECIAL)

    def encode(texts: Sequence[str]) -> list[Tensor]:
        return [torch.tensor(code.ids) for code in tokenizer.encode_batch(texts)]

    def labeled(pairs: list[tuple[str, int]]) -> Labeled:
        return [*zip(encode([text for text, _ in pairs]), [label for _, label in pairs], strict=True)]

    by_label: dict[int, list[Tensor]] = {}
    for tokens, label in labeled(sentences):
        by_label.setdefault(label, []).append(tokens)
    parts = {
        "train": Texts(labeled(reviews["train"]), encode(fillers[:-held_out]), by_label),
        "test": Texts(labeled(reviews["test"]), encode(fillers[-held_out:])),
    }
    return parts, tokenizer.get_vocab_size()


class Documents:
    """Documents of several parts with a separator after each: a review at a random place among fillers, after a first token."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts

    def draw(self, parts: int, part_length: int, count: int, seed: str) -> Batch:
        """So many documents of so many parts; half of the reviews are sentences of one label, if there are any.

        A part has at most ``part_length`` tokens; of a review, its end counts.
        """
        drawn = random.Random(seed)
        documents = []
        for _ in range(count):
            review = self._review(part_length, drawn)
            documents.append(self._document(review, parts, part_length, drawn))
        return _join(documents)

    def of_reviews(self, parts: int, part_length: int, numbers: Sequence[int]) -> Batch:
        """A document for each of some reviews; the fillers and the place are those that belong to the number."""
        reviews = ((number, *self.texts.reviews[number]) for number in numbers)
        cut = [(number, (tokens[-part_length:], label)) for number, tokens, label in reviews]
        return _join([self._document(review, parts, part_length, random.Random(number)) for number, review in cut])

    def _review(self, length: int, drawn: random.Random) -> tuple[Tensor, int]:
        if not self.texts.sentences or drawn.random() < 0.5:
            tokens, label = drawn.choice(self.texts.reviews)
            return tokens[-length:], label
        label, found = drawn.randrange(2), list[Tensor]()
        while sum(map(len, found)) < length:
            found.append(drawn.choice(self.texts.sentences[label]))
        return torch.cat(found)[:length], label

    def _filler(self, length: int, drawn: random.Random) -> Tensor:
        tokens = drawn.choice(self.texts.fillers)
        start = drawn.randrange(max(1, len(tokens) - length))
        return tokens[start : start + length]

    def _document(
        self, review: tuple[Tensor, int], parts: int, length: int, drawn: random.Random
    ) -> tuple[Tensor, int]:
        found = [self._filler(length, drawn) for _ in range(parts)]
        found[drawn.randrange(parts)] = review[0]
        separator = torch.tensor([1])
        return torch.cat([torch.tensor([0]), *(piece for part in found for piece in (part, separator))]), review[1]


def _join(documents: Labeled) -> Batch:
    """The batch of some documents."""
    tokens, labels = zip(*documents, strict=True)
    return Batch(torch.cat(tokens), offsets(torch.tensor([*map(len, tokens)])), torch.tensor(labels))
