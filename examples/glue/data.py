"""Texts to pretrain on, and the files of GLUE: token numbers in ragged batches.

In: text files, plain or gzip, or a folder of the library `datasets`; TSV files of GLUE in their official columns. Out: token numbers
``[N]`` with offsets. Not here: models and training.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.common.command import require
from examples.common.corpus import read_lines, train_tokenizer
from examples.common.runs import (
    check_folder,
    fingerprint,
    read_checkpoint,
    save_pretrained,
    write_checkpoint,
    write_text,
)
from sbm_pyg import Pretrained
from sbm_pyg.graphs.ragged import offsets
from sbm_pyg.progress import tqdm

HELD_OUT = 100  # one document of so many is tested on
PAD, UNKNOWN, START, SEPARATOR, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclasses.dataclass(frozen=True)
class Task:
    """One task of GLUE: its folder, columns and classes, as in the official release."""

    folder: str
    texts: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    dev: tuple[str, ...] = ("dev",)


TASKS = {
    "sst2": Task("SST-2", ("sentence",), "label", ("0", "1")),
    "qqp": Task("QQP", ("question1", "question2"), "is_duplicate", ("0", "1")),
    "qnli": Task("QNLI", ("question", "sentence"), "label", ("entailment", "not_entailment")),
    "mnli": Task(
        "MNLI", ("sentence1", "sentence2"), "gold_label", ("entailment", "neutral", "contradiction"),
        ("dev_matched", "dev_mismatched"),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Examples:
    """Texts with labels: tokens of all examples ``[N]``, their offsets ``[B+1]`` and classes ``[B]``."""

    tokens: Tensor
    ptr: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, which: Tensor) -> "Examples":
        """The examples of some numbers, ``[b]``."""
        return Examples(*take(self.tokens, self.ptr, which), self.labels[which])


def take(tokens: Tensor, ptr: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and offsets of some of the sequences."""
    parts = [tokens[ptr[i] : ptr[i + 1]] for i in which.tolist()]
    return torch.cat([tokens[:0], *parts]).long(), offsets(ptr.diff()[which])


def read_documents(paths: Sequence[Path]) -> Iterator[str]:
    """Documents of files of text, which empty lines separate; or of folders that `datasets` saved, with a column "text"."""
    for path in paths:
        if path.is_dir():
            yield from _read_datasets(path)
            continue
        lines: list[str] = []
        for line in read_lines(path):
            if line.strip():
                lines.append(line)
            elif lines:
                yield "\n".join(lines)
                lines = []
        if lines:
            yield "\n".join(lines)


def _read_datasets(folder: Path) -> Iterator[str]:
    try:
        from datasets import load_from_disk  # type: ignore[import-not-found]
    except ImportError:
        words = f"Expected 'texts' to be files where the library `datasets` is not installed (got the folder {folder})."
        raise ValueError(f"{words} Run `pip install datasets`.") from None
    try:
        data = load_from_disk(str(folder))
    except Exception as error:
        words = f"Expected '{folder}' to be a folder that `datasets` saved (got: {error})."
        raise ValueError(f"{words} Save it with `save_to_disk`.") from None
    parts = data.values() if isinstance(data, dict) else [data]
    for part in parts:
        columns = part.column_names
        require("text" in columns, f"'{folder}' to have a column 'text'", columns, "Rename it.")
        yield from (text for text in part["text"] if text.strip())


def read_glue(
    path: Path, task: Task, skip_damaged: bool = False, labels: bool = True
) -> tuple[list[tuple[str, ...]], list[int]]:
    """Texts and classes of a file of GLUE, whose columns are found by their names. Quotes are part of the texts.

    Without ``labels``, as in test sets, no label is read and all classes are 0.

    Raises:
        ValueError: A column or a file is missing; or, without ``skip_damaged``, a line has another number of cells, an empty text
            or an unknown label. The error names the line.
    """
    lines = read_lines(path)
    names = next(lines, "").lstrip("\ufeff").split("\t")
    columns = (*task.texts, *([task.label] if labels else []))
    missing = [name for name in columns if name not in names]
    has_none = "Files of GLUE's test sets have no labels: take train and dev." if missing == [task.label] else ""
    words, way_out = f"'{path}' to have the columns {', '.join(columns)}", has_none or "Take the official files."
    require(not missing, words, ", ".join(names)[:200], way_out)
    places = [names.index(name) for name in columns]
    texts: list[tuple[str, ...]] = []
    classes: list[int] = []
    for number, line in enumerate(lines, 2):
        cells = line.split("\t")
        fields = [cells[place].strip() for place in places] if len(cells) == len(names) else []
        wrong = (
            f"{len(cells)} cells, not {len(names)}" if not fields
            else f"the label {fields[-1]!r}" if labels and fields[-1] not in task.classes
            else "an empty text" if not all(fields) else ""
        )  # fmt: skip
        if wrong and not skip_damaged:
            words = f"Expected line {number} of '{path}' to be an example (got {wrong})."
            raise ValueError(f"{words} Mend it, or leave such lines out with --skip-damaged.")
        if not wrong:
            texts.append(tuple(fields[: len(task.texts)]))
            classes.append(task.classes.index(fields[-1]) if labels else 0)
    require(texts, f"'{path}' to have examples", "none", "Take the official files.")
    return texts, classes


def read_tokenizer(path: Path, way_out: str = "Give the tokenizer.json of a model, or leave it out.") -> Any:
    """A tokeniser from its file, or from a folder with a ``tokenizer.json``."""
    from tokenizers import Tokenizer

    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        words = f"Expected '{path}' to be a tokeniser (got {str(error)!r})."
        raise ValueError(f"{words} {way_out}") from None
    missing = [token for token in (START, SEPARATOR, MASK) if tokenizer.token_to_id(token) is None]
    words = f"'{path}' to know the tokens {START}, {SEPARATOR} and {MASK}"
    require(not missing, words, f"no {', '.join(missing)}", "Take a tokeniser of a masked model.")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode_documents(
    tokenizer: Any, documents: Iterator[str], length: int, name: str = "texts"
) -> tuple[Tensor, Tensor]:
    """Tokens of documents, each between a start and a separator and cut into pieces of at most ``length``; and offsets."""
    start, end = (tokenizer.token_to_id(token) for token in (START, SEPARATOR))
    pieces, sizes = [], []
    while batch := list(islice(documents, 1000)):
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            ids = [start, *encoding.ids, end]
            # pieces of nearly equal size, rather than a short last one
            count = -(-len(ids) // length)
            cuts = [len(ids) * number // count for number in range(count + 1)]
            pieces.append(torch.tensor(ids, dtype=torch.int32))
            sizes += [after - before for before, after in pairwise(cuts)]
    require(pieces, f"texts to hold documents for {name!r}", "none", "Empty lines separate them.")
    return torch.cat(pieces), offsets(torch.tensor(sizes))


def encode_examples(tokenizer: Any, texts: Sequence[tuple[str, ...]], classes: Sequence[int], length: int) -> Examples:
    """Tokens of examples: start, then each text and a separator. Longer pairs lose tokens at the end of their longest text."""
    start, end = (tokenizer.token_to_id(token) for token in (START, SEPARATOR))
    sides = [tokenizer.encode_batch([*side], add_special_tokens=False) for side in zip(*texts, strict=True)]
    sequences = []
    for example in zip(*sides, strict=True):
        parts = [[*encoding.ids] for encoding in example]
        while sum(map(len, parts)) + len(parts) + 1 > length:
            max(parts, key=len).pop()
        sequences.append([start, *(token for part in parts for token in (*part, end))])
    tokens = torch.tensor([token for ids in sequences for token in ids], dtype=torch.int32)
    return Examples(tokens, offsets(torch.tensor([*map(len, sequences)])), torch.tensor(classes))


def save_model(folder: Path, model: Pretrained, tokenizer: Any, **card: Any) -> Path:
    """Saves a classifier with its card and its tokenizer, which then encodes a text or a pair as :func:`encode_examples` does."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    special = [(token, tokenizer.token_to_id(token)) for token in (START, SEPARATOR)]
    copy = Tokenizer.from_str(tokenizer.to_str())
    single, pair = f"{START} $A {SEPARATOR}", f"{START} $A {SEPARATOR} $B {SEPARATOR}"
    copy.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=special)
    save_pretrained(folder, model, copy.to_str(), **card)
    return folder


class Stream:
    """Batches of about ``size`` tokens, from whole pieces of documents in a new random order in each epoch.

    Which pieces a batch has follows from its number and the seed alone, so training goes on after a kill as if there had been none.
    """

    def __init__(self, tokens: Tensor, ptr: Tensor, size: int, seed: int) -> None:
        self.tokens, self.ptr, self.size, self.seed = tokens, ptr, size, seed
        self.per_epoch = max(1, int(ptr[-1]) // size)  # the rest belongs to the last batch
        self.epoch, self.order, self.batch = -1, ptr, ptr

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Tokens and offsets of a batch."""
        epoch, batch = divmod(number, self.per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(2**32 * self.seed + epoch)
            self.order = torch.randperm(len(self.ptr) - 1, generator=generator)
            length = self.ptr.diff()[self.order]
            self.epoch = epoch
            self.batch = ((length.cumsum(0) - length) // self.size).clamp(max=self.per_epoch - 1)
        first, last = torch.searchsorted(self.batch, torch.tensor([batch, batch + 1])).tolist()
        return take(self.tokens, self.ptr, self.order[first:last])


def prepare(args: Any) -> tuple[Any, dict[str, tuple[Tensor, Tensor]]]:
    """The tokeniser of a folder of output, and the tokens of "train" and "test"; both are made once, and kept there."""
    files = [*args.texts, *(args.test or []), *([args.tokenizer] if args.tokenizer else [])]
    inner = [path for file in files for path in (file, *sorted(file.rglob("*"))) if path.is_file()]
    settings = f"{args.vocabulary} {args.length} {len(args.texts)}".encode()
    key = fingerprint(chain(map(Path.read_bytes, inner), [settings]))
    check_folder("output", args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    path, cache = args.output / "tokenizer.json", args.output / "tokens.pt"
    if cache.exists():
        cached = read_checkpoint(cache)
        words = f"the texts, vocabulary and length that {args.output} was prepared with"
        require(cached["key"] == key, words, "others", "Take another --output.")
        return read_tokenizer(path), {name: tuple(cached[name]) for name in ("train", "test")}

    def documents(train: bool) -> Iterator[str]:
        if args.test:
            yield from tqdm(read_documents(args.texts if train else args.test), desc="read", unit="document")
            return
        for number, text in enumerate(tqdm(read_documents(args.texts), desc="read", unit="document")):
            if (number % HELD_OUT == HELD_OUT - 1) != train:
                yield text

    if args.tokenizer:
        tokenizer = read_tokenizer(args.tokenizer)
    else:
        tokenizer = train_tokenizer(documents(True), args.vocabulary, SPECIAL, add_prefix_space=True)
    parts = (("train", True), ("test", False))
    texts = {name: encode_documents(tokenizer, documents(train), args.length, name) for name, train in parts}
    write_text(path, tokenizer.to_str())
    write_checkpoint(cache, {"key": key, **texts})
    return tokenizer, texts


def read_task(args: Any, task: Task, tokenizer: Any) -> dict[str, Examples]:
    """Examples of "train" and of the dev sets; a part of train is held out where there is no dev set."""
    folder = args.glue / task.folder
    dev_sets = {name: read_glue(path, task, args.skip_damaged) for name, path in _files(folder, ("train", *task.dev))}
    texts, classes = dev_sets.pop("train")
    words = f"'{folder}' to have {task.dev[0]}.tsv, by which models are chosen"
    require(not dev_sets or task.dev[0] in dev_sets, words, f"{', '.join(dev_sets)} alone", "Take the official files.")
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    parts = {"train": order[: args.limit]}
    if not dev_sets:
        held_out = math.ceil(args.hold_out * len(texts))
        print(f"{task.folder} has no dev file: {held_out:,} examples of train are held out to test on")
        parts = {"train": order[held_out:][: args.limit], task.dev[0]: order[:held_out]}
    require(
        parts["train"], f"'{folder / 'train.tsv'}' to have more examples", len(texts), "None are left to learn from."
    )
    chosen = {name: ([texts[at] for at in places], [classes[at] for at in places]) for name, places in parts.items()}
    return {name: encode_examples(tokenizer, *pair, args.length) for name, pair in (chosen | dev_sets).items()}


def _files(folder: Path, names: Sequence[str]) -> list[tuple[str, Path]]:
    """The files of the training set, and of other sets that are there."""
    files = [(name, folder / f"{name}.tsv") for name in names]
    return [(name, path) for name, path in files if name == "train" or path.exists()]


def read_tests(args: Any, task: Task, tokenizer: Any) -> dict[str, Examples]:
    """Examples of the test sets that are in the folder of a task, without their labels."""
    tests = {}
    for name, path in _files(args.glue / task.folder, [name.replace("dev", "test") for name in task.dev]):
        texts, classes = read_glue(path, task, args.skip_damaged, labels=False)
        tests[name] = encode_examples(tokenizer, texts, classes, args.length)
    return tests
