"""Training with and without padding: the same model on the same documents, the same losses, and the time of a step of each.

In: tokens of documents. Out: rows of times. Not here: the command line.
"""

import time
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from examples.common.tables import Row, by, markdown
from examples.glue.data import MASK, SEPARATOR, START, take
from sbm_pyg import MaskedLM, SequenceEncoder, mask_tokens
from sbm_pyg.layers.dense import FullAttention
from sbm_pyg.progress import tqdm

WAYS = RAGGED, *_ = ("ragged", "padded to the longest of a batch", "padded to the limit")
TOLERANCE = 1e-4  # of losses, in nats


class PaddedAttention(FullAttention):
    """Full attention over sequences that are padded to one length, with a mask over keys; ``real`` ``[B, L]`` marks the tokens."""

    real: Tensor

    def forward(self, x: Tensor, edge_index: None = None, *, return_choice: bool = False, **_: Any) -> Any:
        padded = x.unflatten(0, self.real.shape)
        projected = (linear(padded) for linear in (self.lin_query, self.lin_key, self.lin_value))
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in projected)
        out = scaled_dot_product_attention(query, key, value, attn_mask=self.real[:, None, None])
        out = out.transpose(1, 2).flatten(2).flatten(0, 1)
        return (out, None) if return_choice else out


def make_model(run: Any, num_tokens: int, attention: Any) -> MaskedLM:
    """The model of a run, without dropout; any attention begins with the same weights."""
    torch.manual_seed(run.seed)
    encoder = SequenceEncoder(
        num_tokens, run.channels, num_layers=run.layers, heads=run.heads, ffn_channels=4 * run.channels,
        max_length=run.length, dropout=0.0, attention=attention,
    )  # fmt: skip
    return MaskedLM(encoder)


def measure(run: Any, texts: tuple[Tensor, Tensor], tokenizer: Any, batches: int, batch_size: int) -> list[Row]:
    """Mean times of training steps of each way, after one batch that is not counted.

    Raises:
        ValueError: Losses of a batch differ by more than rounding.
    """
    num_tokens, mask = tokenizer.get_vocab_size(), tokenizer.token_to_id(MASK)
    special = torch.tensor([tokenizer.token_to_id(token) for token in (START, SEPARATOR)])
    models = {way: make_model(run, num_tokens, "full" if way == RAGGED else PaddedAttention) for way in WAYS}
    # whose steps keep rounding small
    optimizers = {way: torch.optim.SGD(model.parameters(), 0.01) for way, model in models.items()}
    generator, rows = torch.Generator().manual_seed(run.seed), list[Row]()
    for number in tqdm(range(batches + 1), desc="padding", unit="batch"):
        which = torch.randperm(len(texts[1]) - 1, generator=generator)[:batch_size]
        tokens, ptr = take(*texts, which)
        inputs, is_masked = mask_tokens(tokens, mask, num_tokens, special=special, seed=number)
        losses = {}
        for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):  # in turns
            began = time.perf_counter()
            batch = (inputs, ptr, is_masked)
            if way != RAGGED:
                batch = pad_batch(models[way], *batch, run.length if way == WAYS[2] else int(ptr.diff().max()))
            loss = cross_entropy(models[way](*batch[:2], target_mask=batch[2]), tokens[is_masked])
            optimizers[way].zero_grad()
            loss.backward()
            optimizers[way].step()
            losses[way] = loss.item()
            row = {"way": way, "batch": number, "seconds": time.perf_counter() - began, "loss": losses[way]}
            rows += [row | {"padding": 1 - len(inputs) / len(batch[0])}] if number else []
        if max(losses.values()) - min(losses.values()) > TOLERANCE:
            raise ValueError(f"Expected equal losses with and without padding (got {losses}). Report it as a fault.")
    return rows


def pad_batch(
    model: MaskedLM, tokens: Tensor, ptr: Tensor, is_masked: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A ragged batch with all sequences padded to a length; tells the layers of the model which tokens are real."""
    sequences = len(ptr) - 1
    real = torch.arange(length) < ptr.diff()[:, None]
    for module in model.modules():
        if isinstance(module, PaddedAttention):
            module.real = real
    padded = tokens.new_zeros(sequences, length).masked_scatter(real, tokens)
    is_masked = torch.zeros_like(real).masked_scatter(real, is_masked)
    return padded.flatten(), length * torch.arange(sequences + 1), is_masked.flatten()


def table(rows: list[Row]) -> str:
    """Times of each way in Markdown, as ratios to ragged batches."""
    ways = by(rows, "way")
    rows_of_way = {way: ways[way] for way in WAYS}
    mean = {way: fmean(row["seconds"] for row in way_rows) for way, way_rows in rows_of_way.items()}
    lines = [
        [way, len(way_rows), f"{100 * fmean(row['padding'] for row in way_rows):.0f}", f"{1e3 * mean[way]:.0f}", f"{mean[way] / mean[RAGGED]:.2f}"]
        for way, way_rows in rows_of_way.items()
    ]  # fmt: skip
    return markdown(["batches", "number", "padding, %", "ms a step", "over ragged"], lines)
