"""Sequence models out of attention layers: an encoder, and heads that classify sequences, pairs and tokens.

In: ragged token numbers ``[N]`` with offsets ``ptr`` [B+1]. Out: logits and, on request, a trace of every layer's graph and density.
Not here: training (``examples``), and attention itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing

from . import patterns
from .attention import SBMAttentionConv
from .graph import AttentionGraph, check_graph
from .ops import checks
from .pretrained import Pretrained
from .ragged import check_present, check_tensor, pad, readable, resolve_ptr
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
BIGBIRD = {"size": 3, "num_global": 2, "num_random": 3}
BLOCK_BYTES = 2**15  # of the Python objects of a block, without its parameters

SIZES = "See the docstring of SequenceEncoder."

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

    def __post_init__(self) -> None:
        for name, kind, rows in (("graphs", AttentionGraph, self.graphs), ("sbms", SBM, self.sbms)):
            if (
                not isinstance(rows, tuple)
                or not all(row is None or isinstance(row, kind) for row in rows)
                or len(rows) != len(self.graphs)
            ):
                raise TypeError(f"Expected '{name}' to be a tuple of one {kind.__name__} or None per layer (got {repr(rows)[:80]}).")
        if not isinstance(self.shape, tuple) or len(self.shape) != 2:
            raise TypeError(f"Expected 'shape' to be the numbers of sequences and heads, (B, H) (got {self.shape!r}).")
        for row in (*self.graphs, *self.sbms):
            if row is not None and (row.num_sequences, row.heads) != self.shape:
                raise ValueError(
                    f"Expected 'graphs' and 'sbms' of 'shape' {self.shape} (got {(row.num_sequences, row.heads)}). It is (B, H)."
                )
        if self.device is not None:
            checks.device(self.device)

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
        checks.number("floor", floor, "[0, 1]", "It is a density; 0 prices every edge.")
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
        dropout: Probability in [0, 1) that an attention weight is dropped in training.

    Raises:
        TypeError, ValueError: A size or probability is out of range.

    Shapes:
        - tokens ``[N, channels]``; output ``[N, H*C]``. Cost O(B L^2 H C) with L the longest sequence.
    """

    def __init__(self, channels: int, head_channels: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        channels, head_channels, heads = _check_attention(channels, head_channels, heads, dropout)
        self.channels, self.heads, self.dropout = channels, heads, dropout
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
        checks.tensors(x=x, ptr=ptr)
        checks.floating(x=x)
        checks.shape("x", x, (None, self.channels), "[N, channels]", "It has the channels of the layer.")
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
        dropout: Probability in [0, 1) that an attention weight is dropped in training.

    Raises:
        TypeError, ValueError: A size or probability is out of range, or ``pattern`` cannot be called.
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
        channels, head_channels, heads = _check_attention(channels, head_channels, heads, dropout)
        if not callable(pattern):
            raise TypeError(f"Expected 'pattern' to be callable (got {type(pattern).__name__}). It makes a graph of (ptr, seed, streams).")
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
        seed = draw_seed(seed)
        graph = self.pattern(ptr, seed, streams)
        check_graph(graph)
        return self.conv(x, graph.expand(self.conv.heads), ptr=ptr, seed=seed, return_graph=return_graph, return_sbm=return_sbm)


def _check_attention(channels: int, head_channels: int, heads: int, dropout: float) -> tuple[int, int, int]:
    """The sizes of a layer of attention, whose three projections fit into memory."""
    sizes = {"channels": channels, "head_channels": head_channels, "heads": heads}
    channels, head_channels, heads = (checks.integer(name, size, 1, "Channels count per head.") for name, size in sizes.items())
    checks.number("dropout", dropout, "[0, 1)", "It is the probability that an attention weight is dropped.")
    _check_parameters("heads", 3 * channels * heads * head_channels)
    return channels, head_channels, heads


def _check_parameters(name: str, count: int) -> None:
    """Refuse so many parameters where memory does not hold them."""
    width, device = torch.get_default_dtype().itemsize, torch.get_default_device()
    checks.memory(name, count, width, device, "Build a smaller model.", "parameters")


def _window(size: int, ptr: Tensor, seed: int, streams: Tensor | None) -> AttentionGraph:
    return patterns.window(None, size, ptr=ptr)


def _bigbird(options: Mapping[str, int], heads: int, ptr: Tensor, seed: int, streams: Tensor | None) -> AttentionGraph:
    size, num_global, num_random = (options[key] for key in BIGBIRD)
    return patterns.bigbird(None, size, num_global, num_random, heads=heads, ptr=ptr, seed=seed, streams=streams)


def _named(name: str, channels: int, head_channels: int, heads: int, options: Mapping[str, Any]) -> nn.Module:
    """The attention layer of that name."""
    known = {"full": {"dropout"}, "window": {"dropout", "window"}, "bigbird": {"dropout", *BIGBIRD}}.get(name)
    if known is None:  # those of the layer, without what the encoder says itself
        known = {*inspect.signature(SBMAttentionConv).parameters, *inspect.signature(MessagePassing).parameters}
        known -= {"in_channels", "out_channels", "heads", "kwargs"}
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"Expected 'attention_options' of {name!r} to be known (got {unknown}). See the docstring of SequenceEncoder.")
    if name == "sbm":
        return SBMAttentionConv(channels, head_channels, heads, **options)
    if name == "full":
        return FullAttention(channels, head_channels, heads, **options)
    defaults = {"window": 64} if name == "window" else BIGBIRD
    sizes = {key: checks.integer(key, options.get(key, least), 0, "It counts tokens.") for key, least in defaults.items()}
    pattern = partial(_window, sizes["window"]) if name == "window" else partial(_bigbird, sizes, heads)
    return PatternAttention(channels, head_channels, heads, pattern, options.get("dropout", 0.0))


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
        dropout: Dropout on embeddings and on what each block adds, in [0, 1).
        attention: ``"sbm"`` (:class:`SBMAttentionConv`), ``"full"`` (:class:`FullAttention`), ``"window"`` or ``"bigbird"``
            (:class:`PatternAttention`), or a factory ``(channels, head_channels, heads) -> module`` whose module is called as
            ``module(x, ptr=ptr, seed=seed, streams=streams, return_graph=True, return_sbm=True)`` and returns ``[N, H*C]``, graph or
            None, SBM or None.
        attention_options: Keyword arguments of the attention that is named, e.g. ``{"num_blocks": 16, "dropout": 0.1}``.

    Raises:
        TypeError: A size is no int, or another argument is of the wrong type.
        ValueError: A size is below 1, the attention or one of its options has no such name, or memory does not hold the parameters.

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
            "attention_options": attention_options,
        }
        if attention_options is not None:
            if not isinstance(attention_options, Mapping):
                raise TypeError(f"Expected 'attention_options' to be a dict (got {type(attention_options).__name__}). Name each option.")
            self._options["attention_options"] = dict(attention_options)
        channels, heads = (checks.integer(name, size, 1, SIZES) for name, size in (("channels", channels), ("heads", heads)))
        head_channels = channels // heads if head_channels is None else head_channels
        ffn_channels = 2 * channels if ffn_channels is None else ffn_channels
        sizes = {
            "num_tokens": num_tokens,
            "num_layers": num_layers,
            "head_channels": head_channels,
            "ffn_channels": ffn_channels,
            "max_length": max_length,
        }
        num_tokens, num_layers, head_channels, ffn_channels, max_length = (
            checks.integer(name, size, 1, SIZES) for name, size in sizes.items()
        )
        checks.number("dropout", dropout, "[0, 1)", "It is the probability that a number is dropped in training.")
        attended, network = 4 * channels * heads * head_channels, 2 * channels * ffn_channels
        _check_parameters("num_tokens", num_tokens * channels)
        _check_parameters("max_length", max_length * channels)
        _check_parameters("heads", attended)
        _check_parameters("ffn_channels", network)
        _check_parameters("num_layers", num_layers * (attended + network))
        checks.memory("num_layers", num_layers, BLOCK_BYTES, torch.device("cpu"), "Build a smaller model.", "blocks")
        if not (isinstance(attention, str) or callable(attention)):
            raise TypeError(
                f"Expected 'attention' to be a name or a factory (got {type(attention).__name__}). The names are {[*ATTENTION]}."
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
            TypeError: Token numbers, places or the seed are not integers.
            ValueError: A token is outside the vocabulary, a sequence longer than ``max_length``, or a place outside it.
        """
        ptr = resolve_ptr(_count(tokens), ptr, batch, device=tokens.device)
        streams = None if streams is None else resolve_streams(streams, ptr.numel() - 1, ptr.device)
        if readable(tokens):
            low, high, longest = int(tokens.min()), int(tokens.max()), int(ptr.diff().max())
            if low < 0 or high >= self.num_tokens:
                raise ValueError(
                    f"Expected 'tokens' in 0..{self.num_tokens - 1}, the vocabulary (got {low} to {high}). Raise 'num_tokens' or check the tokeniser."
                )
            if longest > self.max_length:
                raise ValueError(
                    f"Expected sequences of at most max_length = {self.max_length} tokens (got {longest}). Raise max_length or cut them."
                )
        check_tensor(places, "places")
        if places is not None and not tokens.is_meta:
            check_present(places, "places")
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
    if (
        not isinstance(tokens, Tensor)
        or tokens.layout != torch.strided
        or tokens.dim() != 1
        or tokens.dtype not in (torch.int64, torch.int32)
    ):
        got = f"{list(tokens.shape)} {tokens.dtype}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"Expected 'tokens' to be [N] int64 (got {got}). Join sequences and pass `ptr`; `sbm_pyg.unpad` does it.")
    return tokens.numel()


def _mean_pool(x: Tensor, ptr: Tensor, length: int | None) -> Tensor:
    """Mean over the real tokens of each sequence, or their sum by a given length, ``[B, channels]``."""
    lengths = ptr.diff()
    batch = torch.repeat_interleave(lengths, output_size=x.size(0))
    return x.new_zeros(lengths.numel(), x.size(1)).index_add(0, batch, x) / (lengths[:, None] if length is None else length)


def _check_head(encoder: SequenceEncoder, num_classes: int, encoder_width: str) -> int:
    """The number of classes, whose last layer fits into memory."""
    if not isinstance(encoder, SequenceEncoder):
        raise TypeError(f"Expected 'encoder' to be a SequenceEncoder (got {type(encoder).__name__}). It turns tokens into vectors.")
    num_classes = checks.integer("num_classes", num_classes, 1, "It is the number of logits.")
    _check_parameters("num_classes", num_classes * getattr(encoder, encoder_width))
    return num_classes


class _Classifier(Pretrained):
    """An encoder and a two-layer perceptron on features of ``inputs * channels``."""

    def __init__(self, encoder: SequenceEncoder, num_classes: int, inputs: int, pool_length: int | None) -> None:
        super().__init__()
        num_classes = _check_head(encoder, num_classes, encoder_width="ffn_channels")
        if pool_length is not None:
            pool_length = checks.integer("pool_length", pool_length, 1, "Leave it out to average over the tokens there are.")
            checks.number("pool_length", pool_length, "[1, 9e15]", "It is a number of tokens.")
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
        num_classes = _check_head(encoder, num_classes, encoder_width="channels")
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
