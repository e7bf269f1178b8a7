"""Lines of files of text; text that every machine has, the source code of Python's standard library; and tokenisers that are learned from text."""

import gzip
import random
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages"}


def stdlib_files(train_bytes: int = 4_000_000, test_bytes: int = 300_000) -> tuple[list[Path], list[Path]]:
    """Files of the standard library of this interpreter to train on, and others to test on, in an order that is drawn once.

    Files that are not ASCII are left out, as are tests. Other versions of Python have other files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & {*path.relative_to(root).parts})
    random.Random(0).shuffle(found)
    test, train = _take(found, test_bytes), []
    train = _take([path for path in found if path not in {*test}], train_bytes)
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
