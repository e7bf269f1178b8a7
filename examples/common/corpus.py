"""Lines of files of text; text that every machine has, the source code of Python's standard library; tokenisers that are learned from text."""

from __future__ import annotations

import gzip
import random
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages"}


def stdlib_files(train_bytes: int = 4_000_000, test_bytes: int = 300_000) -> tuple[list[Path], list[Path]]:
    """Files of the standard library of this interpreter to train on, and others to test on, in an order that is drawn once.

    Files that are not ASCII are left out, as are tests. Other versions of Python have other files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & {*path.relative_to(root).parts})
    random.Random(0).shuffle(paths)
    test, train = _take(paths, test_bytes), []
    train = _take([path for path in paths if path not in {*test}], train_bytes)
    return train, test


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a file of text, plain or gzip, without their ends."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield line.decode().rstrip("\r\n")
                except UnicodeDecodeError as error:
                    words = f"Expected '{path}' to be text in UTF-8 (got {error.reason} in line {number})."
                    raise ValueError(f"{words} Convert the file.") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"Expected '{path}' to be a whole gzip file (got: {error}). Download it again.") from None
    except OSError as error:
        raise ValueError(f"Expected '{path}' to be a file of text (got {error.strerror!r}). See --help.") from None


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, special: Sequence[str] = (), add_prefix_space: bool = False
) -> Any:
    """A byte-level tokeniser by byte pairs, learned from texts; special tokens come first in its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, special_tokens=[*special], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_files(paths: Iterable[Path]) -> str:
    """The text of all files, in lines."""
    return "\n".join(path.read_text(errors="replace") for path in paths)


class Texts(NamedTuple):
    """Tokens of the training and of the test text, the bytes of each token of the vocabulary, and the tokenizer; none of bytes."""

    train: Tensor  # [N] int64
    test: Tensor
    width: Tensor  # [num_tokens]
    tokenizer: Any = None


def encode(train: str, test: str, vocabulary: int) -> Texts:
    """Two texts in byte pairs that are learned from the first, or in bytes if ``vocabulary`` is 256."""
    import torch

    if vocabulary == 256:
        source, other = (torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long() for text in (train, test))
        return Texts(source, other, torch.ones(256))
    tokenizer = train_tokenizer(train.splitlines(keepends=True), vocabulary)
    # every character of a token stands for a byte
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    source, other = (torch.tensor(tokenizer.encode(text).ids) for text in (train, test))
    return Texts(source, other, torch.tensor([float(len(word)) for word, _ in words]), tokenizer)


def _take(paths: list[Path], size: int) -> list[Path]:
    """The first files that have so many bytes together."""
    taken: list[Path] = []
    for path in paths:
        if size <= 0:
            break
        content = path.read_bytes()
        if content and content.isascii():
            taken.append(path)
            size -= len(content)
    return taken
