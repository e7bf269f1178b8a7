"""Sequence models: an encoder with a head that classifies sequences, pairs or tokens, or predicts masked tokens.

In: ragged token numbers ``[N]`` or features ``[N, F]``, with offsets ``ptr`` [B+1]. Out: logits and, on request, a
trace of every layer's graph and density. Not here: the encoder (``encoder``), and training (``examples``).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..graphs.ragged import count_positions, draw_seed, resolve_ptr, resolve_sequence_ids
from ..ops import checks
from ..ops.random_words import TARGET, philox, split_ids
from ..ops.segments import upcast
from ..ops.values import require_values
from .encoder import EncoderTrace, SequenceEncoder
from .pretrained import Pretrained

__all__ = ["MaskedLM", "PairClassifier", "SequenceClassifier", "TokenClassifier", "mask_tokens"]


def _mean_pool(x: Tensor, ptr: Tensor, length: int | None) -> Tensor:
    """Sum the tokens of each sequence and divide by their number or ``length``: ``[B, channels]``, 0 without tokens."""
    lengths, wide = ptr.diff(), upcast(x)
    batch = torch.repeat_interleave(lengths, output_size=x.size(0))
    total = wide.new_zeros(lengths.numel(), x.size(1)).index_add(0, batch, wide)
    return (total / (lengths.clamp(min=1)[:, None] if length is None else length)).to(x.dtype)


class _Head(Pretrained):
    """An encoder, and a classifier on its output."""

    def __init__(self, encoder: SequenceEncoder, num_classes: int, width: str) -> None:
        super().__init__()
        checks.kind("encoder", encoder, SequenceEncoder, "a SequenceEncoder", "It turns tokens into vectors.")
        self.encoder = encoder
        self.num_classes = checks.integer("num_classes", num_classes, 1, "It is the number of logits.")
        checks.parameters("num_classes", self.num_classes * getattr(encoder, width))

    def _encode(self, *tokens: Any, return_trace: bool, **options: Any) -> tuple[Tensor, tuple[EncoderTrace, ...]]:
        """Encoded tokens, and the trace if requested."""
        result = self.encoder(*tokens, return_trace=return_trace, **options)
        return (result[0], result[1:]) if return_trace else (result, ())


class _PoolingHead(_Head):
    """A two-layer perceptron on ``inputs * channels`` features of pooled tokens."""

    def __init__(self, encoder: SequenceEncoder, num_classes: int, inputs: int, pool_length: int | None) -> None:
        super().__init__(encoder, num_classes, "ffn_channels")
        if pool_length is not None:
            pool_length = checks.integer("pool_length", pool_length, 1, "Leave it out to average over the tokens.")
            checks.number("pool_length", pool_length, "[1, 9e15]", "It is a number of tokens.")
        width, hidden = inputs * encoder.channels, encoder.ffn_channels
        self.classifier = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, self.num_classes))
        self.pool_length = pool_length


class SequenceClassifier(_PoolingHead):
    """One label per sequence: mean pooling over its tokens, then a two-layer perceptron.

    Args:
        encoder: The encoder.
        num_classes: Number of classes.
        pool_length: Divide the sum over the tokens by this number in place of theirs, as a mean over zeroed padding.

    Shapes:
        - tokens ``[N]`` int64, ptr ``[B+1]``; logits ``[B, num_classes]``.
    """

    def __init__(self, encoder: SequenceEncoder, num_classes: int, pool_length: int | None = None) -> None:
        super().__init__(encoder, num_classes, inputs=1, pool_length=pool_length)

    def forward(
        self,
        tokens: Tensor,
        ptr: Tensor | None = None,
        *,
        batch: Tensor | None = None,
        return_trace: bool = False,
        **options: Any,
    ) -> Any:
        """Logits, or logits and :class:`EncoderTrace`; arguments as :meth:`SequenceEncoder.forward`."""
        tokens = self.encoder.check_tokens(tokens)
        ptr = resolve_ptr(tokens.size(0), ptr, batch, device=tokens.device)
        x, trace = self._encode(tokens, ptr, return_trace=return_trace, **options)
        logits = self.classifier(_mean_pool(x, ptr, self.pool_length))
        return (logits, *trace) if return_trace else logits


class PairClassifier(_PoolingHead):
    """One label per pair of sequences, from ``[x0, x1, x0 * x1, x0 - x1]`` of the mean-pooled encodings.

    Args:
        encoder: The encoder, shared by both sequences.
        num_classes: Number of classes.
        pool_length: As for :class:`SequenceClassifier`.

    Shapes:
        - two times tokens ``[N]`` int64 and ptr ``[B+1]``, with the same B; logits ``[B, num_classes]``.
    """

    def __init__(self, encoder: SequenceEncoder, num_classes: int, pool_length: int | None = None) -> None:
        super().__init__(encoder, num_classes, inputs=4, pool_length=pool_length)

    def forward(
        self,
        tokens: tuple[Tensor, Tensor],
        ptr: tuple[Tensor, Tensor] | None = None,
        *,
        batch: tuple[Tensor, Tensor] | None = None,
        positions: tuple[Tensor, Tensor] | None = None,
        seed: int | None = None,
        sequence_ids: Tensor | None = None,
        return_trace: bool = False,
    ) -> Any:
        """Logits, or logits and one :class:`EncoderTrace`: the layers over the first sequences, then over the second.

        Each argument but ``seed`` and ``sequence_ids`` is a pair of arguments of :meth:`SequenceEncoder.forward`.
        ``sequence_ids`` lie in ``0 .. 2**31-1``; n becomes 2 n for the first sequences and 2 n + 1 for the second.

        Raises:
            ValueError: The two batches hold different numbers of sequences.
        """
        for name, pair in (("tokens", tokens), ("ptr", ptr), ("batch", batch), ("positions", positions)):
            is_valid = (isinstance(pair, tuple | list) and len(pair) == 2) or (pair is None and name != "tokens")
            what, way_out = "to be a pair, of first and second sequences", "Pass both."
            checks.require(is_valid, name, what, type(pair).__name__, way_out, TypeError)
        ptrs, batches, positions_of = ptr or (None, None), batch or (None, None), positions or (None, None)
        tokens = (self.encoder.check_tokens(tokens[0]), self.encoder.check_tokens(tokens[1]))
        offsets = [
            resolve_ptr(part.size(0), ptrs[side], batches[side], name=f"ptr[{side}]", device=part.device)
            for side, part in enumerate(tokens)
        ]
        if offsets[0].shape != offsets[1].shape:
            raise ValueError(
                "Expected 'ptr' to hold as many second as first sequences "
                f"(got {offsets[0].numel() - 1} and {offsets[1].numel() - 1}). Sequences pair up by position."
            )
        sequence_ids = 2 * resolve_sequence_ids(sequence_ids, offsets[0].numel() - 1, offsets[0].device, bits=31)
        pooled: list[Tensor] = []
        traces: list[EncoderTrace] = []
        for side in range(2):
            options = {"positions": positions_of[side], "seed": seed, "sequence_ids": sequence_ids + side}
            x, trace = self._encode(tokens[side], offsets[side], return_trace=return_trace, **options)
            pooled.append(_mean_pool(x, offsets[side], self.pool_length))
            traces += trace
        first, second = pooled
        logits = self.classifier(torch.cat([first, second, first * second, first - second], dim=-1))
        return (logits, traces[0] + traces[1]) if return_trace else logits


class TokenClassifier(_Head):
    """One label per token: a linear layer on the encoder.

    Args:
        encoder: The encoder.
        num_classes: Number of classes.

    Shapes:
        - tokens ``[N]`` int64, ptr ``[B+1]``; logits ``[N, num_classes]``.
    """

    def __init__(self, encoder: SequenceEncoder, num_classes: int) -> None:
        super().__init__(encoder, num_classes, "channels")
        self.classifier = nn.Linear(encoder.channels, self.num_classes)

    def forward(self, tokens: Tensor, ptr: Tensor | None = None, *, return_trace: bool = False, **options: Any) -> Any:
        """Logits, or logits and :class:`EncoderTrace`; arguments as :meth:`SequenceEncoder.forward`."""
        x, trace = self._encode(tokens, ptr, return_trace=return_trace, **options)
        logits = self.classifier(x)
        return (logits, *trace) if return_trace else logits


class MaskedLM(_Head):
    r"""A distribution over the vocabulary for each token, which trains an encoder to predict masked tokens.

    The head is a linear layer with GELU and a layer norm, as in BERT. Logits are the products with the token embeddings
    of the encoder, divided by :math:`\sqrt{channels}`, plus a bias of each token. Cost O(M channels num_tokens) for M
    tokens to predict, in addition to the encoder.

    Args:
        encoder: The encoder, with a vocabulary.

    Raises:
        TypeError, ValueError: ``encoder`` is not a :class:`SequenceEncoder`, or reads features.

    Shapes:
        - tokens ``[N]`` int64, ptr ``[B+1]``, target_mask ``[N]`` bool; logits ``[N, num_tokens]``, or
          ``[M, num_tokens]`` for the M tokens to predict.

    Example:
        >>> model = MaskedLM(SequenceEncoder(num_tokens=31, channels=16, attention_options={"num_clusters": 4}))
        >>> tokens, ptr = torch.randint(30, (50,)), torch.tensor([0, 20, 50])  # number 30 is the mask
        >>> inputs, target_mask = mask_tokens(tokens, mask_token=30, num_tokens=30, seed=0)
        >>> loss = torch.nn.functional.cross_entropy(model(inputs, ptr, target_mask=target_mask), tokens[target_mask])

    Reference: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", 2019.
    Unlike in BERT, logits are divided, since token embeddings start with standard deviation 1.
    """

    def __init__(self, encoder: SequenceEncoder) -> None:
        checks.kind("encoder", encoder, SequenceEncoder, "a SequenceEncoder", "It turns tokens into vectors.")
        if encoder.num_tokens is None:
            raise ValueError("Expected 'encoder' with 'num_tokens' (got one of features). There is nothing to predict.")
        super().__init__(encoder, encoder.num_tokens, "channels")
        self.dense, self.norm = nn.Linear(encoder.channels, encoder.channels), nn.LayerNorm(encoder.channels)
        self.bias = nn.Parameter(torch.zeros(encoder.num_tokens))

    def forward(
        self,
        tokens: Tensor,
        ptr: Tensor | None = None,
        *,
        target_mask: Tensor | None = None,
        return_trace: bool = False,
        **options: Any,
    ) -> Any:
        """Logits, or logits and :class:`EncoderTrace`; other arguments as :meth:`SequenceEncoder.forward`.

        Args:
            target_mask: Mask of the tokens to predict, ``[N]`` bool; None: all.
        """
        x, trace = self._encode(tokens, ptr, return_trace=return_trace, **options)
        if target_mask is not None:
            checks.tensors(target_mask=target_mask)
            if target_mask.shape != x.shape[:1] or target_mask.dtype != torch.bool:
                got = f"{list(target_mask.shape)} {target_mask.dtype}"
                raise ValueError(
                    f"Expected 'target_mask' to be {[*x.shape[:1]]} bool (got {got}). It is a mask of the tokens."
                )
            x = x[target_mask]
        hidden = self.norm(nn.functional.gelu(self.dense(x))) * self.encoder.channels**-0.5
        logits = nn.functional.linear(hidden, self.encoder.token.weight, self.bias)
        return (logits, *trace) if return_trace else logits


def mask_tokens(
    tokens: Tensor, mask_token: int, num_tokens: int, *, probability: float = 0.15, masked: float = 0.8,
    random: float = 0.1, special: Tensor | None = None, ptr: Tensor | None = None, sequence_ids: Tensor | None = None,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mask random tokens, for a :class:`MaskedLM` to predict them.

    Each token becomes a target independently with the same probability; at least one token becomes a target. The mask
    replaces a part of the targets, random tokens replace another part, and the remaining targets stay. Call this
    function again for each batch. Cost O(N).

    Args:
        tokens: Token numbers, ``[N]`` or any other shape, int64.
        mask_token: Number of the mask.
        num_tokens: Random tokens have numbers in ``0 .. num_tokens-1``.
        probability: Probability in (0, 1] that a token is a target.
        masked: Fraction of the targets that the mask replaces.
        random: Fraction of the targets that random tokens replace; ``masked + random`` is at most 1.
        special: Numbers of tokens that are never targets, such as separators, ``[S]`` int64.
        ptr: Offsets of the sequences of tokens ``[N]``, ``[B+1]`` int64: one token at least of each sequence is then a
            target, unless all are special.
        sequence_ids: Number of each sequence, ``[B]``, with ``ptr``. With ``seed``, a sequence gets the same targets in
            any batch. None: its position in the batch.
        seed: Fixes the choice; from torch's default generator if None.

    Returns:
        The tokens with masks, and the mask of the targets, bool; both shaped as ``tokens``.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range, or all tokens are special.

    Example:
        >>> inputs, target_mask = mask_tokens(torch.randint(30, (1000,)), mask_token=30, num_tokens=30, seed=0)
        >>> int(target_mask.sum()), int((inputs == 30).sum())
        (152, 123)

    Reference: Devlin et al., 2019. As in RoBERTa, tokens are chosen anew in each call.
    """
    checks.tensors(tokens=tokens)
    require_values(tokens, "tokens")
    checks.require(tokens.dtype == torch.int64, "tokens", "to be int64", tokens.dtype, "They are token numbers.")
    mask_token = checks.integer("mask_token", mask_token, 0, "It is the number of the mask in the vocabulary.")
    num_tokens = checks.integer(
        "num_tokens", num_tokens, 1, "It is the number of tokens that random ones are drawn from."
    )
    checks.number("probability", probability, "(0, 1]", "BERT has 0.15.")
    checks.number("masked", masked, "[0, 1]", "BERT has 0.8.")
    checks.number("random", random, "[0, 1]", "BERT has 0.1.")
    if masked + random > 1:
        raise ValueError(f"Expected 'masked' + 'random' of at most 1 (got {masked} + {random}). They are parts.")
    if not tokens.numel():
        return tokens.clone(), tokens.bool()
    if ptr is None:
        checks.require(sequence_ids is None, "ptr", "with 'sequence_ids'", "none", "They are numbers of sequences.")
        generator = torch.Generator(tokens.device).manual_seed(draw_seed(seed) % 2**63)
        chance, kind = torch.rand(2, *tokens.shape, generator=generator, device=tokens.device)
        other = torch.randint(num_tokens, tokens.shape, generator=generator, device=tokens.device)
    else:
        checks.require(tokens.dim() == 1, "tokens", "to be [N] with 'ptr'", [*tokens.shape], "Join the sequences.")
        ptr = resolve_ptr(tokens.numel(), ptr, device=tokens.device)
        number, head = split_ids(resolve_sequence_ids(sequence_ids, ptr.numel() - 1, tokens.device))
        sequence = torch.repeat_interleave(ptr.diff(), output_size=tokens.numel())
        places = count_positions(ptr, tokens.numel())
        words = philox(places, 0, number[sequence], head[sequence] | TARGET, draw_seed(seed))
        chance, kind = (word.to(checks.widest(word.device)) / 2**32 for word in words[:2])
        other = words[2] % num_tokens
    if special is not None:
        checks.tensors(special=special)
        chance = chance.masked_fill(torch.isin(tokens, special), 2.0)
    if ptr is None:
        lowest = chance.min()
    else:
        lowest = chance.new_full((ptr.numel() - 1,), 2.0).scatter_reduce(0, sequence, chance, "amin")[sequence]
    is_masked = ((chance < probability) | (chance == lowest)) & (chance <= 1)  # one at least
    if special is not None and not bool(is_masked.any()):
        raise ValueError("Expected 'tokens' that are not all in 'special' (got no other). There is nothing to predict.")
    shown = torch.where(kind < masked, mask_token, torch.where(kind < masked + random, other, tokens))
    return torch.where(is_masked, shown, tokens), is_masked


for _kind in (SequenceClassifier, TokenClassifier):
    _kind.forward.__signature__ = inspect.signature(SequenceEncoder.forward)  # type: ignore[union-attr]
