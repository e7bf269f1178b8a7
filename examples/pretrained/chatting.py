"""Answers to questions about a text, which a model reads once.

In: a model, its tokenizer, a text, and questions. Out: answers on the terminal. Not here: how the model attends
(``arms``).
"""

import contextlib
import time
from typing import Any

import torch

from examples.common.command import require

HERE = "QUESTION-GOES-HERE"
AT_ONCE = 1024
"""Tokens of the text that are read at once."""


def ask() -> str:
    """A question that the user types; empty at the end."""
    with contextlib.suppress(EOFError):
        return input("\n> ").strip()
    return ""


class Reader:
    """A model, and the cache of a text.

    Args:
        model: The model.
        tokenizer: Its tokenizer. Its chat template is used if it has one.
        text: The text.
    """

    def __init__(self, model: Any, tokenizer: Any, text: str) -> None:
        self.model, self.tokenizer, self.cache = model, tokenizer, None
        whole = f"{text}\n\nQuestion: {HERE}\nAnswer:"
        if tokenizer.chat_template is not None:
            words = [{"role": "user", "content": f"{text}\n\n{HERE}"}]
            whole = tokenizer.apply_chat_template(words, tokenize=False, add_generation_prompt=True)
        before, self.after = whole.rsplit(HERE, 1)
        self.prefix = tokenizer(before, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids
        self.length = self.prefix.size(1)
        most = model.config.max_position_embeddings
        require(self.length < most, f"'file' of less than {most:,} tokens", f"{self.length:,}", "Take a shorter text.")

    @torch.no_grad()
    def read(self) -> None:
        """Fill the cache."""
        start = time.perf_counter()
        for part in self.prefix.split(AT_ONCE, 1):
            self.cache = self.model(part, cache=self.cache, use_cache=True, logits_to_keep=1).cache
        print(f"read {self.length:,} tokens in {time.perf_counter() - start:.1f} s", flush=True)

    @torch.no_grad()
    def answer(self, question: str, most: int) -> str:
        """Write the answer to a question as it comes, and forget both."""
        from transformers import TextStreamer

        words = self.tokenizer(question + self.after, return_tensors="pt", add_special_tokens=False, verbose=False)
        tokens, start = torch.cat([self.prefix, words.input_ids], 1), time.perf_counter()
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        out = self.model.generate(
            tokens, cache=self.cache, max_new_tokens=most, do_sample=False, streamer=streamer,
            pad_token_id=self.tokenizer.eos_token_id, attention_mask=torch.ones_like(tokens),
        )[0, tokens.size(1) :]  # fmt: skip
        seconds = (time.perf_counter() - start) / len(out)
        print(f"({len(out)} tokens, {1000 * seconds:.0f} ms each)", flush=True)
        assert self.cache is not None
        self.cache.crop(self.length - self.cache.get_seq_length())
        text: str = self.tokenizer.decode(out, skip_special_tokens=True)
        return text
