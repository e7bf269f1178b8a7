"""Tasks of the arena: a batch follows from its sizes and a random generator alone, and nothing is downloaded.

Recall and joint recall are those of ``examples/common/tasks.py``. The code is our own. Two-hop recall is the variable tracking that users
of block selection report losses on (MoonshotAI/MoBA#29). Copying, compression, noisy, fuzzy and known recall follow the descriptions of
selective copying, compression, noisy and fuzzy in-context recall, and memorization in MAD (Poli et al., "Mechanistic Design and Scaling of
Hybrid Architectures", 2024), with the differences that their docstrings name. In ``served`` several tokens can answer a question. These
are generated and exact. ``code`` and files of a user are text, whose next token is to be predicted.

A task draws ``count`` = S sequences of L tokens with Q questions each by the generator ``random``, and returns
:class:`~examples.common.tasks.Examples`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from examples.common.command import require
from examples.common.corpus import Texts, encode, read_files, read_lines, stdlib_files
from examples.common.tasks import Examples, Task, distinct, joint_recall, mqar, recalled

NOISE = 16  # tokens of the noise


def _order(count: int, size: int, random: torch.Generator) -> Tensor:
    """Random orders of so many things, ``[count, size]``."""
    return torch.rand(count, size, generator=random).argsort(1)


def two_hop(chains: int, spare: int, helped: int, num_tokens: int, count: int, random: torch.Generator) -> Examples:
    """Two-hop recall, or variable tracking: "y = 7", "x = y", what is x?

    Each chain has two lines of three tokens, (y, =, 7) and later (x, =, y). Spare lines (z, =, 5) set variables that no other line
    uses; without them, what one look-up finds says no more than a value at random, and full attention does not learn the second. All
    lines are mixed at random. Then each x is asked once, in random order, with token 0 after it. Its answer is two hops away.

    Args:
        chains: Chains P of a sequence, each with two variables of its own.
        spare: Spare lines D; L = 3 (2 P + D) + 2 P.
        helped: 1: each y on the right of a line is a question too, whose answer is one hop away, so that a model learns to look up
            before it learns to look up twice; Q = 2 P. 0: x alone is asked, as in the test; Q = P.
        num_tokens: Token 0, then "=", then variables, which are the lower half, then values, all different within a sequence. A
            uniform guess is right with probability 1 / (num_tokens - num_tokens // 2), a guess among the values of the sequence with
            1 / (P + D), among those of chains with 1 / P.
    """
    names = 2 + distinct(count, 2 * chains + spare, num_tokens // 2 - 2, random)
    values = num_tokens // 2 + distinct(count, chains + spare, num_tokens - num_tokens // 2, random)
    right_sides = torch.cat([names[:, chains : 2 * chains], values], 1)
    lines = torch.stack([names, torch.ones_like(names), right_sides], 2)  # [S, 2P + D, 3], of x, of y, and spare
    order = _order(count, 2 * chains + spare, random)
    linked = order[:, : 2 * chains].view(count, 2, chains).sort(1, descending=True).values
    line = torch.cat([linked.flatten(1), order[:, 2 * chains :]], 1)  # where each stands
    facts = torch.zeros_like(lines).scatter(1, line[..., None].expand_as(lines), lines).flatten(1)
    chain = _order(count, chains, random)  # of each question
    questions = torch.stack([names.gather(1, chain), torch.zeros_like(chain)], 2).flatten(1)
    places = (facts.size(1) + 2 * torch.arange(chains)).expand(count, -1)
    end = 3 * linked + 2  # of the lines of x and of y
    examples = Examples(torch.cat([facts, questions], 1), places, values.gather(1, chain), end[:, 1].gather(1, chain))
    if not helped:
        return examples
    parts = ((places, end[:, 0]), (examples.answers, values[:, :chains]), (examples.sources, end[:, 1]))
    return Examples(examples.tokens, *(torch.cat(part, 1) for part in parts))


def copying(length: int, copied: int, num_tokens: int, count: int, random: torch.Generator) -> Examples:
    """Selective copying: tokens stand among blanks, and are asked in the order in which they stand.

    The n-th mark asks for the n-th token that is no blank. MAD has one mark for all; ours are numbered, since these models have no
    positions: a layer need not count the marks as well.

    Args:
        length: Tokens before the marks; L = length + copied.
        copied: Tokens to be copied, Q.
        num_tokens: Token 0, a blank, then ``copied`` marks, then what is copied, with repeats. A uniform guess is right with probability
            1 / (num_tokens - copied - 1).
    """
    sources = _order(count, length - 1, random)[:, :copied].sort(1).values + 1  # the first is a blank
    answers = torch.randint(1 + copied, num_tokens, (count, copied), generator=random)
    data = torch.zeros(count, length, dtype=torch.int64).scatter(1, sources, answers)
    marks = torch.arange(1, copied + 1).expand(count, -1)
    places = (length + torch.arange(copied)).expand(count, -1)
    return Examples(torch.cat([data, marks], 1), places, answers, sources)


def compression(length: int, slots: int, num_tokens: int, count: int, random: torch.Generator) -> Examples:
    """Compression: the last token gathers the values of all slots, and a decoder tells them from its state alone.

    Each slot has a value, and one token names both. These tokens stand anywhere among noise. MAD has no noise, and its tokens have
    positions in place of slots, which these models lack.

    Args:
        length: Tokens before the last; L = length + 1.
        slots: Slots of a sequence, Q. Their questions all stand at the last token.
        num_tokens: Token 0, which stands last, then as many values for each slot, then 16 of the noise. A uniform guess among the values
            of a slot is right with probability slots / (num_tokens - 17).
    """
    num_symbols = num_tokens - NOISE
    choices = (num_symbols - 1) // slots  # values of a slot
    answers = 1 + choices * torch.arange(slots) + torch.randint(choices, (count, slots), generator=random)
    sources = _order(count, length, random)[:, :slots]
    data = torch.randint(num_symbols, num_tokens, (count, length), generator=random).scatter(1, sources, answers)
    tokens = torch.cat([data, torch.zeros(count, 1, dtype=torch.int64)], 1)
    return Examples(tokens, torch.full((count, slots), length), answers, sources)


def noisy(slots: int, pairs: int, num_tokens: int, count: int, random: torch.Generator) -> Examples:
    """Recall among noise: pairs of a key and its value stand anywhere in the first half, their questions anywhere in the second.

    All other slots of two tokens are noise, from tokens of its own. MAD asks while it goes on to show pairs; here halves keep them apart.

    Args:
        slots: Slots of a half, each of two tokens; L = 4 slots.
        pairs: Pairs of a sequence with different keys and different values, Q.
        num_tokens: Keys, then values, then 16 of the noise. A uniform guess is right with probability 2 / (num_tokens - 16), a guess
            among the values of the sequence with 1 / pairs.
    """
    num_symbols = num_tokens - NOISE
    keys = distinct(count, pairs, num_symbols // 2, random)
    values = num_symbols // 2 + distinct(count, pairs, num_symbols - num_symbols // 2, random)
    shown, questions = (2 * _order(count, slots, random)[:, :pairs] for _ in range(2))
    tokens = torch.randint(num_symbols, num_tokens, (count, 4 * slots), generator=random)
    tokens = tokens.scatter(1, shown, keys).scatter(1, shown + 1, values).scatter(1, questions + 2 * slots, keys)
    return Examples(tokens, questions + 2 * slots, values, shown + 1)


def fuzzy(pairs: int, num_tokens: int, count: int, random: torch.Generator) -> Examples:
    """Recall by keys of two tokens: (a, b, value), and many keys share an a or a b.

    All keys are shown with their values, then asked in random order. MAD has keys and values of one to three tokens; ours have two and one.

    Args:
        pairs: Keys of a sequence, all different, with different values; L = 5 pairs and Q = pairs. The question stands at b.
        num_tokens: The first quarter are parts of keys, the others values. A uniform guess is right with probability
            1 / (num_tokens - num_tokens // 4), a guess among the values of the sequence with 1 / pairs.
    """
    parts = num_tokens // 4
    key = distinct(count, pairs, parts * parts, random)
    values = parts + distinct(count, pairs, num_tokens - parts, random)
    halves = torch.stack([key // parts, key % parts], 2)  # [S, P, 2]
    order = _order(count, pairs, random)
    facts = torch.cat([halves, values[..., None]], 2).flatten(1)
    questions = halves.gather(1, order[..., None].expand_as(halves)).flatten(1)
    places = (3 * pairs + 1 + 2 * torch.arange(pairs)).expand(count, -1)
    return Examples(torch.cat([facts, questions], 1), places, values.gather(1, order), 3 * order + 2)


def known(pairs: int, num_tokens: int, count: int, random: torch.Generator) -> Examples:
    """Recall of what never stands in the sequence: each key has one value, the same in all sequences. The control that needs no edge.

    Args:
        pairs: Keys of a sequence, each with token 0 after it; L = 2 pairs and Q = pairs.
        num_tokens: Token 0, then keys, which are the lower half, then values; the key n has the value of a permutation that is drawn
            once for all. A uniform guess is right with probability 1 / (num_tokens - num_tokens // 2).
    """
    half = num_tokens // 2
    value = half + torch.randperm(num_tokens - half, generator=torch.Generator().manual_seed(half))
    keys = distinct(count, pairs, half - 1, random)
    places = (2 * torch.arange(pairs)).expand(count, -1)
    tokens = torch.stack([keys + 1, torch.zeros_like(keys)], 2).flatten(1)
    return Examples(tokens, places, value[keys], places)


def served(slots: int, serving: int, num_tokens: int, count: int, random: torch.Generator) -> Examples:
    """Recall where each pair of a key and its value is stored several times, so that several tokens can answer a question.

    The pairs stand in random order. Then all slots are asked in random order, with token 0 after each question. So the length and the
    number of questions are the same for any ``serving``; with ``serving = slots`` each stored value is the answer. Where a pair is asked
    again, the second layer may also read what the first found at the earlier question. With one pair, few sequences are possible, and
    a test repeats those of training.

    Args:
        slots: Stored pairs N; L = 4 N and Q = N.
        serving: Copies R of each pair, a divisor of ``slots``.
        num_tokens: Token 0, then keys, which are the lower half, then values, both different for N / R pairs. A uniform guess is right
            with probability 1 / (num_tokens - num_tokens // 2), a guess among the values of the sequence with R / N.
    """
    require(slots % serving == 0, f"'serving' to divide slots={slots}", serving, "Take a power of 2.")
    few = slots // serving
    keys = 1 + distinct(count, few, num_tokens // 2 - 1, random)
    values = num_tokens // 2 + distinct(count, few, num_tokens - num_tokens // 2, random)
    stored, pairs = (_order(count, slots, random) % few for _ in range(2))  # number of the pair in each slot
    facts = torch.stack([keys.gather(1, stored), values.gather(1, stored)], 2).flatten(1)
    questions = torch.stack([keys.gather(1, pairs), torch.zeros_like(pairs)], 2).flatten(1)
    places = (2 * slots + 2 * torch.arange(slots)).expand(count, -1)
    slots_of = stored.argsort(dim=1, stable=True).view(count, few, serving)  # of each pair
    sources = 2 * slots_of.gather(1, pairs[..., None].expand(-1, -1, serving)) + 1
    return Examples(torch.cat([facts, questions], 1), places, values.gather(1, pairs), sources)


def passages(
    texts: Callable[[], Texts], length: int, test: int, num_tokens: int, count: int, random: torch.Generator
) -> Examples:
    """Passages of a text, in which each token is asked for the next one.

    In the test, the source of an answer is the last place where it followed the same token, if none of the last 16 places is one.

    Args:
        texts: Returns the text.
        length: Tokens of a passage, L = Q.
        test: 1: passages of the test text; 0: of the training text, whose sources are left out.
        num_tokens: Of the vocabulary of the text, at most.
    """
    tokens = texts().test if test else texts().train
    words = f"a text of more than {length} tokens to {'test on' if test else 'learn from'}"
    require(len(tokens) > length, words, len(tokens), "Give a longer text.")
    starts = torch.randint(len(tokens) - length, (count,), generator=random)
    windows = tokens[starts[:, None] + torch.arange(length + 1)]
    places = torch.arange(length).expand(count, -1)
    sources = recalled(windows)[:, 1:] if test else torch.full((count, length), -1)
    return Examples(windows[:, :-1], places, windows[:, 1:], sources)


@cache
def source_code() -> Texts:
    """Source code of Python's standard library, in 512 byte pairs."""
    train, test = stdlib_files()
    return encode(read_files(train), read_files(test), VOCABULARY)


@cache
def own_text(path: Path) -> Texts:
    """The text of a file, of which the last twentieth of the lines is the test, in 512 byte pairs."""
    lines = [*read_lines(path)]
    cut = len(lines) - len(lines) // 20
    return encode("\n".join(lines[:cut]), "\n".join(lines[cut:]), VOCABULARY)


VOCABULARY = 512
LENGTHS = (64, 256, 1024, 4096, 16384)
TESTS = (200, 64, 32, 16, 8)  # sequences of each length
SERVING = (1, 2, 4, 8, 16)
ZOOLOGY: tuple[tuple[int, ...], ...] = ((64, 4), (128, 8), (256, 16), (256, 32), (256, 64))  # tokens and pairs
ZOOLOGY_TEST = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))


def _task(
    make: Callable[..., Examples],
    num_tokens: int,
    size: tuple[int, ...],
    steps: int = 600,
    width: int = 3,
    slots: int = 0,
) -> Task:
    """A task that is trained and tested at one size."""
    return Task(make, num_tokens, {size: 1}, {size: 200}, 32, steps, 3e-3, width, slots)


def _text(texts: Callable[[], Texts]) -> Task:
    make = partial(passages, texts)
    return Task(make, VOCABULARY, {(256, 0): 1}, {(256, 1): 200}, 16, 2000, 6e-3)


TASKS: dict[str, Task] = {
    "recall": _task(partial(mqar, fillers=32), 160, (64, 8), 400),
    # a token must know its context, whose name may stand 16 or 32 tokens before it: as far as the convolution reaches
    "joint": _task(joint_recall, 50, (8, 8), 1500, width=24),
    "two-hop": Task(two_hop, 64, {(4, 8, 1): 1}, {(4, 8, 0): 200}, 32, 700, 3e-3),
    "copying": _task(copying, 32, (48, 8), 1200, width=24),
    "compression": _task(compression, 81, (48, 8), 1500, slots=8),
    "noisy": _task(noisy, 80, (16, 8), 400),
    "fuzzy": _task(fuzzy, 64, (12,), 400),
    "known": _task(known, 128, (32,), 200),
    # trained at 64 tokens, tested to 16,384; but for block models, a query has as many edges at each length
    "length": Task(partial(mqar, fillers=32), 160, {(64, 8): 1}, dict(zip(product(LENGTHS, [8]), TESTS, strict=True)), 32, 400, 3e-3),
    "code": _text(source_code),
    # at the published sizes, or some of them
    "mqar-laptop": Task(mqar, 8192, dict.fromkeys(ZOOLOGY[:3], 1), dict.fromkeys(ZOOLOGY[:3], 500), 64, 1500, 3e-3),
    "mqar-zoology": Task(mqar, 8192, dict.fromkeys(ZOOLOGY[:5], 1) | {ZOOLOGY[0]: 5}, dict.fromkeys(ZOOLOGY_TEST, 1000), 256, 45_000, 1e-2),
    "joint-paper": Task(joint_recall, 50, dict.fromkeys(product(range(5, 17), repeat=2), 1), {(16, 16): 500}, 64, 20_000, 1e-3, width=48),
} | {f"served-{n}": _task(served, 64, (16, n), 400) for n in SERVING}  # fmt: skip


def find(name: str) -> Task:
    """A task of ``TASKS``, or that of a file of text."""
    return TASKS[name] if name in TASKS else _text(partial(own_text, Path(name)))


def is_text(name: str) -> bool:
    """Whether a task is text, whose measure is bits per token and not accuracy."""
    return name == "code" or name not in TASKS
