"""What a sparse language model is asked: the next token of a text, and questions whose answers lie far back.

In: a model, its tokenizer and a text. Out: a loss, or the part of the answers that are right. Questions are generated
after the description of RULER (Hsieh et al., COLM 2024), as plain text to go on with, for base models. Not here: arms.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from examples.common.command import require
from examples.common.corpus import read_files, stdlib_files
from examples.common.pictures import save_figure
from sbm_pyg.analysis import compare_heads, plots

ADJECTIVES = [
    "brave", "calm", "eager", "fancy", "gentle", "happy", "jolly", "kind", "lively",
    "proud", "silly", "witty",
]  # fmt: skip
NOUNS = [
    "apple", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island",
    "jacket", "ladder", "river",
]  # fmt: skip
CONSONANTS = "bcdfghjklmnpqrstvwz"
KEYS, HOPS, DRAWN_WORDS, TIMED_TOKENS = 4, 4, 60, 16


class Question(NamedTuple):
    """A text to go on with, and the words that must come."""

    prompt: str
    answers: list[str]
    new_tokens: int


def cut(tokenizer: Any, text: str, count: int, length: int) -> list[Tensor]:
    """Equally long parts of a text at equal distances, ``[1, length]`` each."""
    tokens = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    count = min(count, len(tokens) // length)
    require(count, f"texts of {length:,} tokens", f"{len(tokens):,}", "Take a longer text, or shorter 'lengths'.")
    return [tokens[None, at : at + length] for at in range(0, len(tokens) - length + 1, len(tokens) // count)][:count]


def hide(sentences: Sequence[str], words: Sequence[str], draw: random.Random) -> str:
    """Words with sentences at random places between them, in their order."""
    places = sorted(draw.randrange(len(words) + 1) for _ in sentences)
    parts, last = [], 0
    for place, sentence in zip(places, sentences, strict=True):
        parts += [*words[last:place], sentence]
        last = place
    return " ".join([*parts, *words[last:]])


def needle(words: Sequence[str], draw: random.Random, keys: int = 1) -> Question:
    """A number of a key that the text states once, among those of other keys."""
    names = [f"{draw.choice(ADJECTIVES)}-{noun}" for noun in draw.sample(NOUNS, keys)]
    numbers = [str(draw.randrange(10**6, 10**7)) for _ in names]
    text = hide(
        [f"One of the special magic numbers for {n} is: {x}." for n, x in zip(names, numbers, strict=True)], words, draw
    )
    chosen = draw.randrange(keys)
    prompt = (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        f"the number afterwards.\n{text}\nWhat is the special magic number for {names[chosen]} mentioned in the provided "
        f"text? The special magic number for {names[chosen]} mentioned in the provided text is"
    )
    return Question(prompt, [numbers[chosen]], 16)


def several_keys(words: Sequence[str], draw: random.Random) -> Question:
    return needle(words, draw, KEYS)


def tracking(words: Sequence[str], draw: random.Random) -> Question:
    """The other variables of a chain of assignments that begins with a number; the answer begins with the first one."""
    names = ["".join(draw.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=5)) for _ in range(HOPS + 1)]
    number = str(draw.randrange(10**4, 10**5))
    links = [f"VAR {names[0]} = {number}."] + [f"VAR {b} = VAR {a}." for a, b in pairwise(names)]
    prompt = (
        "Memorize and track the chain of variable assignment hidden in the following text.\n\n"
        f"{hide(links, words, draw)}\nQuestion: Find all variables that are assigned the value {number} in the text "
        "above. Answer: According to the chain of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {number}, they are: VAR {names[0]}, VAR"
    )
    return Question(prompt, names[1:], 48)


def frequent_words(words: Sequence[str], draw: random.Random) -> Question:
    """The three most frequent of coded words, whose counts fall as 1 / rank^2; as long as the text."""
    coded = ["".join(draw.choice(CONSONANTS) + draw.choice("aeiou") for _ in range(3)) for _ in range(DRAWN_WORDS)]
    coded = [*dict.fromkeys(coded)]
    weights = [1 / rank**2 for rank in range(1, len(coded) + 1)]
    text = draw.choices(coded, weights, k=len(words) // 3)  # a coded word has about three tokens
    best = [word for word, _ in Counter(text).most_common(3)]
    prompt = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(text)}\nQuestion: What are the three most frequently appeared words in the "
        "above coded text? Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    return Question(prompt, best, 24)


QUESTIONS: dict[str, Callable[[Sequence[str], random.Random], Question]] = {
    "needle": needle, "keys": several_keys, "tracking": tracking, "words": frequent_words,
}  # fmt: skip
TASKS = ["text", "code", *QUESTIONS, "heads", "speed"]


def make_question(task: str, tokenizer: Any, text: str, length: int, number: int) -> Question:
    """A question with some ``length`` tokens, its answer included; the same for all models of a tokenizer."""
    make, words, total = QUESTIONS[task], text.split(), length
    draw = random.Random(f"{task} {length} {number}")
    start = draw.randrange(max(1, len(words) - length))
    for _ in range(8):  # until it is short enough
        question = make(words[start : start + total], random.Random(number))
        tokens = len(tokenizer(question.prompt, verbose=False).input_ids) + question.new_tokens
        if tokens <= length:
            return question
        total = int(total * min(0.99, length / tokens))
    raise ValueError(f"Expected 'lengths' that hold a question (got {length}). Take longer ones.")


@torch.no_grad()
def answer(model: Any, tokenizer: Any, question: Question) -> float:
    """The part of the right words in what the model writes, greedily and with its cache."""
    tokens = tokenizer(question.prompt, return_tensors="pt", verbose=False)
    end = tokenizer.eos_token_id
    how: dict[str, Any] = {"do_sample": False, "pad_token_id": 0 if end is None else end}
    out = model.generate(**tokens, max_new_tokens=question.new_tokens, **how)[0, tokens.input_ids.size(1) :]
    written = tokenizer.decode(out, skip_special_tokens=True)
    return sum(word in written for word in question.answers) / len(question.answers)


@torch.no_grad()
def measure(
    task: str, model: Any, tokenizer: Any, text: str, length: int, count: int, picture: Path
) -> dict[str, float]:
    """The numbers of a task, from ``count`` texts or questions of some tokens.

    The loss of the next token in texts, or the accuracy of answers, and seconds of each; the density of graphs, and the
    part of the attention that they keep, with a picture of all heads; or seconds of a text that fills the cache, and of a token after it.
    """
    start = time.perf_counter()
    if task in QUESTIONS:
        questions = [make_question(task, tokenizer, text, length, number) for number in range(count)]
        accuracy = sum(answer(model, tokenizer, question) for question in questions) / count
        return {"accuracy": accuracy, "seconds": (time.perf_counter() - start) / count}
    texts = cut(tokenizer, read_files(stdlib_files(0)[1]) if task == "code" else text, count, length)
    if task == "heads":
        with compare_heads(model) as table:
            model(input_ids=texts[0], use_cache=False, logits_to_keep=1)
        picture.parent.mkdir(exist_ok=True)
        save_figure(picture, plots.plot_heads(table), dpi=100)
        return {name: fmean(getattr(head, name) for head in table.heads) for name in ("density", "kept")}
    start = time.perf_counter()
    if task == "speed":
        out = model(input_ids=texts[0][:, :-TIMED_TOKENS], use_cache=True, logits_to_keep=1)
        filled, times = time.perf_counter(), []
        for token in texts[0][:, -TIMED_TOKENS:].split(1, 1):
            before = time.perf_counter()
            model(input_ids=token, cache=out.cache)
            times.append(time.perf_counter() - before)
        return {"prefill": filled - start, "token": median(times)}
    losses = [float(model(input_ids=part, labels=part, use_cache=False).loss) for part in texts]
    return {"loss": fmean(losses), "seconds": (time.perf_counter() - start) / len(texts)}
