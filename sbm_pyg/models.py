"""Sequence models out of attention layers: an encoder, and heads that classify sequences, pairs and tokens.

In: ragged token numbers ``[N]`` with offsets ``ptr`` [B+1]. Out: logits and, on request, a trace of every layer's graph and density.
Not here: training (``examples``), and attention itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import patterns
from .attention import SBMAttentionConv
from .graph import AttentionGraph
from .pretrained import Pretrained
from .ragged import memory, pad, readable, resolve_ptr
from .sampling import draw_seed, resolve_streams
from .sbm import SBM

__all__ = [
    "EncoderTrace",
    "FullAttention",
    "PairClassifier",
    "PatternAttention",
    "SequenceClassifier",
    "SequenceEncoder",
    "TokenClassifier",
]

ATTENTION = ("sbm", "full", "window", "bigbird")
MODULES = 2**13  # numbers whose bytes the modules of one block cost beside their weights
BIGBIRD = {"size": 3, "num_global": 2, "num_random": 3}

AttentionFactory = Callable[[int, int, int], nn.Module]
"""``(channels, head_channels, heads) -> module``; see :class:`SequenceEncoder` for how the module is called."""


@dataclass(frozen=True)
class EncoderTrace:
    """What the layers of an encoder attended to.

    Args:
        graphs: Graph of each layer, None for a layer without one (full attention).
        sbms: Model that each layer's graph was sampled from, None for a layer without one.
        shape: Numbers of sequences and heads, (B, H).
        device: Where the tokens were, for densities of layers without a graph; torch's default if None.
    """

    graphs: tuple[AttentionGraph | None, ...]
    sbms: tuple[SBM | None, ...]
    shape: tuple[int, int]
    device: torch.device | None = None

    @property
    def density(self) -> Tensor:
        """Density of each layer's graph, ``[L, B, H]`` float64; 1 for full attention."""
        return self._stack([None if graph is None else graph.density for graph in self.graphs], torch.float64)

    @property
    def expected_density(self) -> Tensor:
        """Mean edge probability of each layer, ``[L, B, H]``, differentiable; a given graph's own density, 1 for full attention."""
        known = [
            sbm.expected_density() if sbm is not None else graph.density if graph is not None else None
            for graph, sbm in zip(self.graphs, self.sbms, strict=True)
        ]
        return self._stack(known)

    def density_loss(self, floor: float = 0.0) -> Tensor:
        """Mean expected density over layers, sequences and heads: the regulariser of Cho et al., section 5.2, without its noise.

        A scalar in [0, 1], to be weighted and added to the loss. The paper penalises sampled edges; this is their expectation,
        differentiable in O(NK + K^2) without the straight-through estimator.

        Args:
            floor: Density in [0, 1] up to which a head costs nothing; above it, the excess counts. 0, as in the paper, pulls on every
                edge from the first step on, and may remove them all before the model has found out what they are good for.

        Raises:
            ValueError: ``floor`` is out of range.
        """
        if not 0 <= floor <= 1:
            raise ValueError(f"Expected 'floor' in [0, 1] (got {floor}). It is a density; 0 prices every edge.")
        return (self.expected_density - floor).relu().mean()

    def __add__(self, other: EncoderTrace) -> EncoderTrace:
        return replace(self, graphs=self.graphs + other.graphs, sbms=self.sbms + other.sbms)

    def _stack(self, rows: list[Tensor | None], dtype: torch.dtype | None = None) -> Tensor:
        device = next((row.device for row in rows if row is not None), self.device)
        return torch.stack([torch.ones(self.shape, device=device, dtype=dtype) if row is None else row for row in rows])


class FullAttention(nn.Module):
    """Dense multi-head attention within each sequence, by torch's scaled dot-product attention: the peer to compare with.

    Args:
        channels: Channels of the tokens.
        head_channels: Channels per head C.
        heads: Number of heads H.
        dropout: Probability that an attention weight is dropped in training.

    Shapes:
        - tokens ``[N, channels]``; output ``[N, H*C]``. Cost O(B L^2 H C) with L the longest sequence.
    """

    def __init__(self, channels: int, head_channels: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.lin_query = nn.Linear(channels, heads * head_channels)
        self.lin_key = nn.Linear(channels, heads * head_channels)
        self.lin_value = nn.Linear(channels, heads * head_channels)

    def forward(
        self,
        x: Tensor,
        *,
        ptr: Tensor,
        seed: int | None = None,
        streams: Tensor | None = None,
        return_graph: bool = False,
        return_sbm: bool = False,
    ) -> Any:
        """Attend; ``seed`` and ``streams`` are taken for the sake of a common call and not used. No graph is ever made: None."""
        padded, mask = pad(x, ptr)  # [B, L, channels], [B, L]
        query, key, value = (
            lin(padded).unflatten(2, (self.heads, -1)).transpose(1, 2) for lin in (self.lin_query, self.lin_key, self.lin_value)
        )  # [B, H, L, C]
        ragged = None if x.size(0) == mask.numel() else mask[:, None, None]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=ragged, dropout_p=self.dropout if self.training else 0.0)
        out = out.transpose(1, 2).flatten(2)[mask]
        asked = [None] * (return_graph + return_sbm)
        return (out, *asked) if asked else out


class PatternAttention(nn.Module):
    """:class:`SBMAttentionConv` on a fixed pattern that is made anew for the offsets of each batch.

    Args:
        channels: Channels of the tokens.
        head_channels: Channels per head C.
        heads: Number of heads H.
        pattern: ``(ptr, seed, streams) -> AttentionGraph`` with one head or H.
        dropout: Probability that an attention weight is dropped in training.
    """

    def __init__(
        self,
        channels: int,
        head_channels: int,
        heads: int,
        pattern: Callable[[Tensor, int, Tensor | None], AttentionGraph],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.conv = SBMAttentionConv(channels, head_channels, heads, num_blocks=None, estimator="none", dropout=dropout)
        self.pattern = pattern

    def forward(
        self,
        x: Tensor,
        *,
        ptr: Tensor,
        seed: int | None = None,
        streams: Tensor | None = None,
        return_graph: bool = False,
        return_sbm: bool = False,
    ) -> Any:
        """Attend over the pattern."""
        seed = draw_seed() if seed is None else seed
        graph = self.pattern(ptr, seed, streams).expand(self.conv.heads)
        return self.conv(x, graph, ptr=ptr, seed=seed, return_graph=return_graph, return_sbm=return_sbm)


def _window(size: int, ptr: Tensor, seed: int, streams: Tensor | None) -> AttentionGraph:
    return patterns.window(None, size, ptr=ptr)


def _bigbird(options: Mapping[str, int], heads: int, ptr: Tensor, seed: int, streams: Tensor | None) -> AttentionGraph:
    size, num_global, num_random = (options[key] for key in BIGBIRD)
    return patterns.bigbird(None, size, num_global, num_random, heads=heads, ptr=ptr, seed=seed, streams=streams)


def _named(name: str, channels: int, head_channels: int, heads: int, options: Mapping[str, Any]) -> nn.Module:
    """The attention layer of that name."""
    if name == "sbm":
        return SBMAttentionConv(channels, head_channels, heads, **options)
    if name == "full":
        return FullAttention(channels, head_channels, heads, **options)
    options = dict(options)
    dropout = options.pop("dropout", 0.0)
    if name == "window":
        pattern = partial(_window, options.pop("window", 64))
    else:
        pattern = partial(_bigbird, {key: options.pop(key, default) for key, default in BIGBIRD.items()}, heads)
    if options:
        raise ValueError(f"Expected 'attention_options' of {name!r} to be known (got {[*options]}). See the docstring of SequenceEncoder.")
    return PatternAttention(channels, head_channels, heads, pattern, dropout)


class SequenceEncoder(Pretrained):
    """Token and position embeddings, and pre-norm blocks of attention and a feed-forward network, over ragged batches.

    Args:
        num_tokens: Size of the vocabulary.
        channels: Width of the tokens between blocks.
        num_layers: Number of blocks L.
        heads: Attention heads per block H.
        head_channels: Channels per head C; ``channels // heads`` if None.
        ffn_channels: Width of the feed-forward network; ``2 * channels`` if None.
        max_length: Longest sequence, the number of position embeddings.
        dropout: Dropout on embeddings and on what each block adds.
        attention: ``"sbm"`` (:class:`SBMAttentionConv`), ``"full"`` (:class:`FullAttention`), ``"window"`` or ``"bigbird"``
            (:class:`PatternAttention`), or a factory ``(channels, head_channels, heads) -> module`` whose module is called as
            ``module(x, ptr=ptr, seed=seed, streams=streams, return_graph=True, return_sbm=True)`` and returns ``[N, H*C]``, graph or
            None, SBM or None.
        attention_options: Keyword arguments of the attention that is named, e.g. ``{"num_blocks": 16, "dropout": 0.1}``.

    Raises:
        ValueError: A size is below 1, or the attention has no such name.

    Shapes:
        - tokens ``[N]`` int64 in ``0 .. num_tokens-1``; output ``[N, channels]``.

    Example:
        >>> encoder = SequenceEncoder(num_tokens=15, channels=16, attention_options={"num_blocks": 4})
        >>> out, trace = encoder(torch.randint(15, (30,)), torch.tensor([0, 10, 30]), seed=0, return_trace=True)
        >>> out.shape, trace.density.shape  # [N, channels], [L, B, H]
        (torch.Size([30, 16]), torch.Size([2, 2, 2]))

    Embeddings start with standard deviation 1: with the customary 0.02, even full attention hardly learns to compare tokens.
    """

    def __init__(
        self,
        num_tokens: int,
        channels: int = 64,
        *,
        num_layers: int = 2,
        heads: int = 2,
        head_channels: int | None = None,
        ffn_channels: int | None = None,
        max_length: int = 2048,
        dropout: float = 0.1,
        attention: str | AttentionFactory = "sbm",
        attention_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._options = {
            "num_tokens": num_tokens,
            "channels": channels,
            "num_layers": num_layers,
            "heads": heads,
            "head_channels": head_channels,
            "ffn_channels": ffn_channels,
            "max_length": max_length,
            "dropout": dropout,
            "attention": attention,
            "attention_options": None if attention_options is None else dict(attention_options),
        }
        head_channels = channels // max(heads, 1) if head_channels is None else head_channels
        ffn_channels = 2 * channels if ffn_channels is None else ffn_channels
        sizes = {
            "num_tokens": num_tokens,
            "channels": channels,
            "num_layers": num_layers,
            "heads": heads,
            "head_channels": head_channels,
            "ffn_channels": ffn_channels,
            "max_length": max_length,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"Expected '{name}' to be at least 1 (got {size}). See the docstring of SequenceEncoder.")
        wide = heads * head_channels
        blocks = num_layers * (3 * channels * wide + 2 * channels * ffn_channels + MODULES)  # at least, whatever the attention
        numbers = (num_tokens + max_length) * channels + blocks
        if 4 * numbers > memory():
            asked = ", ".join(f"{name} = {short(size)}" for name, size in sizes.items())
            raise ValueError(
                f"Expected 'num_layers' and other sizes to fit in {memory():,} bytes of memory (got {asked}: "
                f"{min(4 * numbers, 10**300):.1e} bytes). Make the model smaller."
            )
        if isinstance(attention, str):
            if attention not in ATTENTION:
                raise ValueError(
                    f"Expected 'attention' to be one of {[*ATTENTION]} or a factory (got {attention!r}). A factory is called with (channels, head_channels, heads)."
                )
            layers = [_named(attention, channels, head_channels, heads, attention_options or {}) for _ in range(num_layers)]
        else:
            if attention_options is not None:
                raise ValueError("Expected no 'attention_options' with a factory (got some). Let the factory hold them.")
            layers = [attention(channels, head_channels, heads) for _ in range(num_layers)]
        self.num_tokens, self.channels, self.heads, self.max_length = num_tokens, channels, heads, max_length
        self.ffn_channels = ffn_channels
        self.token = nn.Embedding(num_tokens, channels)
        self.position = nn.Embedding(max_length, channels)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(channels, heads * head_channels, ffn_channels, dropout, layer) for layer in layers)
        self.norm = nn.LayerNorm(channels)

    def constructor_options(self) -> dict[str, Any]:
        """As :meth:`Pretrained.constructor_options`."""
        return dict(self._options)

    def forward(
        self,
        tokens: Tensor,
        ptr: Tensor | None = None,
        *,
        batch: Tensor | None = None,
        places: Tensor | None = None,
        seed: int | None = None,
        streams: Tensor | None = None,
        return_trace: bool = False,
    ) -> Any:
        """Encode.

        Args:
            tokens: Token numbers, ``[N]`` int64.
            ptr: Offsets of the sequences, ``[B+1]`` int64; one sequence if None.
            batch: The same as a sequence number per token, ``[N]``.
            places: Place of each token in its sequence, for the position embeddings, ``[N]`` int64 in ``0 .. max_length-1``; counted if
                None. For sequences of which tokens were left out.
            seed: Fixes the graphs that layers sample; from torch's default generator if None.
            streams: Number of each sequence's random stream, ``[B]``. With ``seed``, a sequence then gets the same graphs in any batch.
            return_trace: Also return an :class:`EncoderTrace`.

        Raises:
            TypeError: Token numbers or the seed are not integers.
            ValueError: A token is outside the vocabulary, a sequence longer than ``max_length``, or a place outside it.
        """
        ptr = resolve_ptr(_count(tokens), ptr, batch, device=tokens.device)
        if readable(tokens):
            low, high, longest = int(tokens.min()), int(tokens.max()), int(ptr.diff().max())
            if low < 0 or high >= self.num_tokens:
                raise ValueError(
                    f"Expected 'tokens' in 0..{self.num_tokens - 1}, the vocabulary (got {low} to {high}). Raise num_tokens or check the tokeniser."
                )
            if longest > self.max_length:
                raise ValueError(
                    f"Expected sequences of at most max_length = {self.max_length} tokens (got {longest}). Raise max_length or cut them."
                )
        if places is None:
            places = torch.arange(tokens.size(0), device=tokens.device) - torch.repeat_interleave(
                ptr[:-1], ptr.diff(), output_size=tokens.size(0)
            )
        elif places.shape != tokens.shape or places.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"Expected 'places' to be {list(tokens.shape)} int64, one for each token (got {list(places.shape)} {places.dtype}). Leave it out to count them."
            )
        elif places.numel() and readable(places) and (int(places.min()) < 0 or int(places.max()) >= self.max_length):
            raise ValueError(
                f"Expected 'places' in 0..{self.max_length - 1} (got {int(places.min())} to {int(places.max())}). Raise max_length or leave it out."
            )
        seed = None if seed is None else draw_seed(seed)
        x = self.dropout(self.token(tokens) + self.position(places))
        graphs, sbms = [], []
        for number, block in enumerate(self.blocks):
            layer_seed = None if seed is None else (seed + number * 0x9E3779B97F4A7C15) % 2**63  # layers sample independently
            x, graph, sbm = block(x, ptr, layer_seed, streams)
            graphs.append(graph)
            sbms.append(sbm)
        x = self.norm(x)
        return (x, EncoderTrace(tuple(graphs), tuple(sbms), (ptr.numel() - 1, self.heads), tokens.device)) if return_trace else x


class _Block(nn.Module):
    """Pre-norm residual block: attention with an output projection, then a GELU network."""

    def __init__(self, channels: int, attended: int, ffn_channels: int, dropout: float, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attention = attention
        self.lin_out = nn.Linear(attended, channels)
        self.ffn = nn.Sequential(
            nn.Linear(channels, ffn_channels), nn.GELU(), nn.Dropout(dropout), nn.Linear(ffn_channels, channels), nn.Dropout(dropout)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, ptr: Tensor, seed: int | None, streams: Tensor | None) -> tuple[Tensor, AttentionGraph | None, SBM | None]:
        attended, graph, sbm = self.attention(self.norm1(x), ptr=ptr, seed=seed, streams=streams, return_graph=True, return_sbm=True)
        x = x + self.dropout(self.lin_out(attended))
        return x + self.ffn(self.norm2(x)), graph, sbm


def _count(tokens: Tensor) -> int:
    """How many token numbers there are."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 1 or tokens.dtype not in (torch.int64, torch.int32):
        got = f"{list(tokens.shape)} {tokens.dtype}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"Expected 'tokens' to be [N] int64 (got {got}). Join sequences and pass `ptr`; `sbm_pyg.unpad` does it.")
    return tokens.numel()


def _mean_pool(x: Tensor, ptr: Tensor, length: int | None) -> Tensor:
    """Mean over the real tokens of each sequence, or their sum by a given length, ``[B, channels]``."""
    lengths = ptr.diff()
    batch = torch.repeat_interleave(lengths, output_size=x.size(0))
    return x.new_zeros(lengths.numel(), x.size(1)).index_add(0, batch, x) / (lengths[:, None] if length is None else length)


class _Classifier(Pretrained):
    """An encoder and a two-layer perceptron on features of ``inputs * channels``."""

    def __init__(self, encoder: SequenceEncoder, num_classes: int, inputs: int, pool_length: int | None) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"Expected 'num_classes' to be at least 1 (got {num_classes}). It is the number of logits.")
        if pool_length is not None and pool_length < 1:
            raise ValueError(
                f"Expected 'pool_length' to be at least 1 (got {pool_length}). Leave it out to average over the tokens there are."
            )
        self.encoder = encoder
        self.classifier = nn.Sequential(
            nn.Linear(inputs * encoder.channels, encoder.ffn_channels), nn.ReLU(), nn.Linear(encoder.ffn_channels, num_classes)
        )
        self.num_classes, self.pool_length = num_classes, pool_length

    def constructor_options(self) -> dict[str, Any]:
        """As :meth:`Pretrained.constructor_options`."""
        return {"encoder": self.encoder, "num_classes": self.num_classes, "pool_length": self.pool_length}


class SequenceClassifier(_Classifier):
    """One label per sequence: mean pooling over its tokens, then a two-layer perceptron.

    Args:
        encoder: The encoder.
        num_classes: Number of classes.
        pool_length: Divide the sum over the tokens by this number instead of theirs, as a mean over zeroed padding does.

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
        places: Tensor | None = None,
        seed: int | None = None,
        streams: Tensor | None = None,
        return_trace: bool = False,
    ) -> Any:
        """Logits, or logits and :class:`EncoderTrace`; arguments as :meth:`SequenceEncoder.forward`."""
        ptr = resolve_ptr(_count(tokens), ptr, batch, device=tokens.device)
        x, trace = self.encoder(tokens, ptr, places=places, seed=seed, streams=streams, return_trace=True)
        logits = self.classifier(_mean_pool(x, ptr, self.pool_length))
        return (logits, trace) if return_trace else logits


class PairClassifier(_Classifier):
    """One label per pair of sequences, from ``[x0, x1, x0 * x1, x0 - x1]`` of their mean-pooled encodings.

    Args:
        encoder: The encoder, shared by both.
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
        places: tuple[Tensor, Tensor] | None = None,
        seed: int | None = None,
        streams: Tensor | None = None,
        return_trace: bool = False,
    ) -> Any:
        """Logits, or logits and the :class:`EncoderTrace` of the first sequences' layers followed by the second's.

        Arguments as :meth:`SequenceEncoder.forward`, one for each side; but ``streams`` is shared, and in ``0 .. 2**31-1``, for the
        second sequences draw from streams of their own.

        Raises:
            ValueError: The two batches hold different numbers of sequences.
        """
        for name, pair in (("tokens", tokens), ("ptr", ptr), ("batch", batch), ("places", places)):
            if not (isinstance(pair, tuple | list) and len(pair) == 2) and (pair is not None or name == "tokens"):
                raise TypeError(f"Expected '{name}' to be a pair, of first and second sequences (got {type(pair).__name__}). Pass both.")
        ptrs, batches, sides = ptr or (None, None), batch or (None, None), places or (None, None)
        offsets = [
            resolve_ptr(_count(part), ptrs[side], batches[side], name=f"ptr[{side}]", device=part.device)
            for side, part in enumerate(tokens)
        ]
        if offsets[0].shape != offsets[1].shape:
            raise ValueError(
                f"Expected 'ptr' to hold as many second as first sequences (got {offsets[0].numel() - 1} and {offsets[1].numel() - 1}). Sequences pair up by position."
            )
        streams = 2 * resolve_streams(streams, offsets[0].numel() - 1, offsets[0].device, bits=31)
        pooled, traces = [], []
        for side in range(2):  # whose streams are apart
            x, trace = self.encoder(tokens[side], offsets[side], places=sides[side], seed=seed, streams=streams + side, return_trace=True)
            pooled.append(_mean_pool(x, offsets[side], self.pool_length))
            traces.append(trace)
        first, second = pooled
        logits = self.classifier(torch.cat([first, second, first * second, first - second], dim=-1))
        return (logits, traces[0] + traces[1]) if return_trace else logits


class TokenClassifier(Pretrained):
    """One label per token: a linear layer on the encoder.

    Args:
        encoder: The encoder.
        num_classes: Number of classes.

    Shapes:
        - tokens ``[N]`` int64, ptr ``[B+1]``; logits ``[N, num_classes]``.
    """

    def __init__(self, encoder: SequenceEncoder, num_classes: int) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"Expected 'num_classes' to be at least 1 (got {num_classes}). It is the number of logits.")
        self.encoder = encoder
        self.classifier = nn.Linear(encoder.channels, num_classes)
        self.num_classes = num_classes

    def constructor_options(self) -> dict[str, Any]:
        """As :meth:`Pretrained.constructor_options`."""
        return {"encoder": self.encoder, "num_classes": self.num_classes}

    def forward(
        self,
        tokens: Tensor,
        ptr: Tensor | None = None,
        *,
        batch: Tensor | None = None,
        places: Tensor | None = None,
        seed: int | None = None,
        streams: Tensor | None = None,
        return_trace: bool = False,
    ) -> Any:
        """Logits, or logits and :class:`EncoderTrace`; arguments as :meth:`SequenceEncoder.forward`."""
        x, trace = self.encoder(tokens, ptr, batch=batch, places=places, seed=seed, streams=streams, return_trace=True)
        logits = self.classifier(x)
        return (logits, trace) if return_trace else logits
