"""The sequence encoder: embeddings and a stack of attention layers over ragged batches.

In: ragged token numbers ``[N]`` or features ``[N, F]``, with offsets ``ptr`` [B+1]. Out: a vector per token and, on
request, a trace of every layer's graph and density. Not here: classifiers on top (``models``), and attention itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..graphs.graph import Adjacency, AttentionGraph
from ..graphs.ragged import check_tensor, count_positions, draw_seed, resolve_ptr, resolve_sequence_ids
from ..layers import named
from ..layers.attention import AttentionConv
from ..layers.dcmm import DCMMBias
from ..layers.dense import FullAttention
from ..layers.positions import ALiBi, Rotary
from ..ops import checks
from ..ops.random_words import GOLDEN
from ..ops.values import can_read, require_values
from ..sources import patterns
from ..sources.interface import Choice
from .pretrained import Pretrained

__all__ = ["EncoderTrace", "SequenceEncoder"]

POSITIONS = ("learned", "rotary", "alibi", "none")
LAYER_BYTES = 2**15  # of the Python objects of a layer, without its parameters
SEE_DOCSTRING = "See the docstring of SequenceEncoder."

AttentionFactory = Callable[[int, int, int], nn.Module]
"""``(channels, head_channels, heads) -> module``; see :class:`SequenceEncoder` for how the module is called."""


@dataclass(frozen=True)
class EncoderTrace:
    """The graph of each layer of an encoder in one forward pass.

    Args:
        choices: The graph of each layer and its probabilities; None for a layer of full attention, which has no graph.
        shape: Numbers of sequences and heads, (B, H).
        device: Device of the densities if no layer has a graph; torch's default if None.

    Raises:
        TypeError, ValueError: An argument has the wrong type, or a graph has another shape.
    """

    choices: tuple[Choice | None, ...]
    shape: tuple[int, int]
    device: torch.device | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.choices, tuple) or not all(isinstance(choice, Choice | None) for choice in self.choices):
            raise TypeError(f"Expected 'choices' to be a tuple of Choice or None (got {repr(self.choices)[:80]}).")
        checks.require(self.choices, "choices", "to hold one Choice or None per layer", "none", "A model has layers.")
        if not isinstance(self.shape, tuple) or len(self.shape) != 2:
            raise TypeError(f"Expected 'shape' to be the numbers of sequences and heads, (B, H) (got {self.shape!r}).")
        for choice in self.choices:
            if choice is not None and choice.shape != self.shape:
                raise ValueError(f"Expected 'choices' of 'shape' {self.shape} (got {choice.shape}). It is (B, H).")
        if self.device is not None:
            checks.device(self.device)

    @property
    def graphs(self) -> tuple[AttentionGraph | None, ...]:
        """Graph of each layer, None for full attention."""
        return tuple(None if choice is None else choice.graph for choice in self.choices)

    @property
    def density(self) -> Tensor:
        """Density of each layer's graph, ``[L, B, H]``, in the dtype of its graphs; 1 for full attention."""
        return self._stack([None if choice is None else choice.density for choice in self.choices], wide=True)

    @property
    def expected_density(self) -> Tensor:
        """Mean edge probability of each layer, ``[L, B, H]``, differentiable, before probabilities are cut at 1.

        A graph without probabilities counts with its density, and full attention with 1. For a source with a target
        density the value is close to that target; :attr:`density` is the density of the graphs that were drawn.
        """

        def density(choice: Choice) -> Tensor:
            return choice.density if choice.probability is None else choice.probability.expected_density()

        return self._stack([None if choice is None else density(choice) for choice in self.choices])

    def density_loss(self, floor: float = 0.0) -> Tensor:
        """Mean expected density over layers, sequences and heads, a scalar to weight and add to the loss.

        This is the regulariser of Cho et al., section 5.2, without its noise: the paper penalizes sampled edges, and
        this loss penalizes their expectation, which is differentiable in O(NK + K^2) without the straight-through
        estimator. Use it for sources without a target density. A target density fixes the number of edges, which this
        loss cannot lower: lower the target instead.

        Args:
            floor: Density in [0, 1] up to which a head adds no loss; only the excess counts. With 0, as in the paper,
                all edges are penalized from the first step, and training may remove edges before the model has learned
                to use them.

        Raises:
            ValueError: ``floor`` is out of range.
        """
        checks.number("floor", floor, "[0, 1]", "It is a density; with 0 every edge counts.")
        return (self.expected_density - floor).relu().mean()

    def __add__(self, other: EncoderTrace) -> EncoderTrace:
        return replace(self, choices=self.choices + other.choices)

    def _stack(self, rows: list[Tensor | None], wide: bool = False) -> Tensor:
        device = next((row.device for row in rows if row is not None), self.device)
        dtype = checks.widest(device or torch.get_default_device()) if wide else None
        return torch.stack([torch.ones(self.shape, device=device, dtype=dtype) if row is None else row for row in rows])


def attention_names() -> list[str]:
    """The names for ``attention`` of an encoder: those of all sources, and ``"full"`` and ``"dcmm"``."""
    return [*named.source_names(), "dcmm"]


def _make_attention(
    name: str, channels: int, head_channels: int, heads: int, is_causal: bool, options: Mapping[str, Any]
) -> nn.Module:
    """Construct an attention layer by name, and pass each option to the layer, source or bias that takes it."""
    of_bias = {*inspect.signature(DCMMBias).parameters}
    if name == "full":
        names: set[str] | None = {*inspect.signature(FullAttention).parameters}.difference(named.SET, named.GIVEN)
    elif name == "dcmm":
        names = (named.options_of("full") or set()) | of_bias.difference(named.SET)
        names.discard("score_bias")
    else:
        names = named.options_of(name)
    if names is not None:
        named.check_known(f"'attention_options' of {name!r}", options, names, ValueError)
    if name == "full":
        return FullAttention(channels, head_channels, heads, is_causal=is_causal, **options)
    if name == "dcmm":
        bias_options = {option: value for option, value in options.items() if option in of_bias}
        layer_options = {option: value for option, value in options.items() if option not in of_bias}
        full, bias = patterns.PatternSource(patterns.full), DCMMBias(head_channels, heads, **bias_options)
        layer_options |= {"score_bias": bias, "is_causal": is_causal}
        return AttentionConv(channels, head_channels, heads, full, **layer_options)
    return named.make_attention(name, channels, head_channels, heads, is_causal=is_causal, **options)


class SequenceEncoder(Pretrained):
    """Token and position embeddings, and pre-norm transformer layers, over ragged batches.

    Args:
        num_tokens: Size of the vocabulary. None if tokens are features.
        channels: Width of the tokens between layers.
        num_layers: Number of layers L.
        heads: Attention heads per layer H.
        head_channels: Channels per head C; ``channels // heads`` if None; ``heads`` must then divide ``channels``.
        ffn_channels: Width of the feed-forward network; ``2 * channels`` if None.
        max_length: Length of the longest sequence, the number of learned position embeddings.
        dropout: Dropout on embeddings and on the two residual branches of each layer, in [0, 1).
        attention: ``"sbm"`` (:class:`SBMAttentionConv`), ``"full"`` (:class:`~sbm_pyg.layers.dense.FullAttention`),
            ``"dcmm"`` (over all pairs, with a :class:`DCMMBias`), or an :class:`AttentionConv` over another source:
            ``"indexer"`` or ``"key_selection"`` (an :class:`~sbm_pyg.sources.indexer.IndexerSource`), a pattern of
            :mod:`~sbm_pyg.sources.patterns` such as ``"window"``, a rule of :mod:`~sbm_pyg.sources.selectors` such as
            ``"top_k"``, or your own (:func:`~sbm_pyg.register_source`). Or a factory ``(channels, head_channels, heads)
            -> module``. The module is called as ``module(x, ptr=ptr, seed=seed, sequence_ids=sequence_ids,
            return_choice=True)``, with a given graph as second argument, and returns ``[N, H*C]`` and a
            :class:`Choice` or None.
        attention_options: Keyword arguments of the named attention, of its source and of its bias, e.g.
            ``{"num_clusters": 16, "dropout": 0.1}`` or ``{"k": 8, "window": 2}``. ``concat`` is not allowed, since
            heads are always concatenated.
        in_channels: Channels of the features that replace token numbers; None for token numbers.
        is_causal: No token attends to a later token. A factory must make causal layers itself.
        position_encoding: ``"learned"`` adds an embedding of the position to each token; ``"rotary"`` rotates queries
            and keys (:class:`Rotary`), and ``"alibi"`` subtracts the distance from scores (:class:`ALiBi`), in named
            attention only; ``"none"``. Without learned embeddings, sequences may have any length.

    Raises:
        TypeError: A size is not an int, or another argument has the wrong type.
        ValueError: A size is below 1, the attention or one of its options is unknown, or memory does not hold the
            parameters.

    Shapes:
        - tokens ``[N]`` int64 in ``0 .. num_tokens-1``, or features ``[N, in_channels]``; output ``[N, channels]``.

    Example:
        >>> encoder = SequenceEncoder(num_tokens=15, channels=16, attention_options={"num_clusters": 4})
        >>> out, trace = encoder(torch.randint(15, (30,)), torch.tensor([0, 10, 30]), seed=0, return_trace=True)
        >>> out.shape, trace.density.shape  # [N, channels], [L, B, H]
        (torch.Size([30, 16]), torch.Size([2, 2, 2]))

    Embeddings have standard deviation 1 at the start: with the usual 0.02, even full attention hardly learns to compare
    tokens.
    """

    def __init__(
        self,
        num_tokens: int | None,
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
        in_channels: int | None = None,
        is_causal: bool = False,
        position_encoding: str = "learned",
    ) -> None:
        super().__init__()
        if attention_options is not None:
            checks.kind("attention_options", attention_options, Mapping, "a dict", "Name each option.")
        channels = checks.integer("channels", channels, 1, SEE_DOCSTRING)
        heads = checks.integer("heads", heads, 1, SEE_DOCSTRING)
        if head_channels is None:
            way_out = "Or pass 'head_channels'."
            checks.require(not channels % heads, "heads", "to divide 'channels'", f"{heads} and {channels}", way_out)
            head_channels = channels // heads
        ffn_channels = 2 * channels if ffn_channels is None else ffn_channels
        if (num_tokens is None) == (in_channels is None):
            raise ValueError(
                f"Expected one of 'num_tokens' and 'in_channels' (got {'neither' if num_tokens is None else 'both'}). "
                "Tokens are numbers of a vocabulary, or features."
            )
        source = "num_tokens" if in_channels is None else "in_channels"
        sizes = {source: num_tokens if in_channels is None else in_channels, "num_layers": num_layers}
        sizes |= {"head_channels": head_channels, "ffn_channels": ffn_channels, "max_length": max_length}
        width, num_layers, head_channels, ffn_channels, max_length = (
            checks.integer(name, size, 1, SEE_DOCSTRING) for name, size in sizes.items()
        )
        checks.number("dropout", dropout, "[0, 1)", "It is the probability that a number is dropped in training.")
        checks.flag("is_causal", is_causal, "With True, no token attends to a later one.")
        checks.one_of("position_encoding", position_encoding, POSITIONS)
        attended, network = 4 * channels * heads * head_channels, 2 * channels * ffn_channels
        counts = {source: width * channels, "max_length": max_length * channels, "heads": attended}
        counts |= {"ffn_channels": network, "num_layers": num_layers * (attended + network)}
        for name, count in counts.items():
            checks.parameters(name, count)
        checks.memory("num_layers", num_layers, LAYER_BYTES, torch.device("cpu"), "Build a smaller model.", "layers")
        names = attention_names()
        checks.kind("attention", attention, str | Callable, "a name or a factory", f"The names are {names}.")
        if isinstance(attention, str):
            what = f"to be one of {names} or a factory"
            way_out = "A factory is called with (channels, head_channels, heads). See also `sbm_pyg.register_source`."
            checks.require(attention in names, "attention", what, repr(attention), way_out)
            options = dict(attention_options or {})
            if position_encoding == "alibi" and (attention == "dcmm" or "score_bias" in options):
                raise ValueError(
                    "Expected 'position_encoding' other than 'alibi' with another score bias (got it with "
                    f"{'dcmm' if attention == 'dcmm' else 'one in attention_options'}). Layers have one bias."
                )
            options |= {"score_bias": ALiBi(heads)} if position_encoding == "alibi" else {}
            if position_encoding == "rotary":
                options.setdefault("rotary", Rotary())
            make: AttentionFactory = partial(_make_attention, attention, is_causal=is_causal, options=options)
        else:
            if is_causal:
                raise ValueError("Expected no 'is_causal' with a factory (got True). Make its layers causal.")
            if attention_options is not None:
                raise ValueError("Expected no 'attention_options' with a factory (got some). Pass them to the factory.")
            is_outside, got = position_encoding in ("learned", "none"), repr(position_encoding)
            what, way_out = "to be 'learned' or 'none' with a factory", "Give its layers a Rotary or an ALiBi."
            checks.require(is_outside, "position_encoding", what, got, way_out)
            make = attention
        attentions = [make(channels, head_channels, heads) for _ in range(num_layers)]
        self.num_tokens: int | None = width if in_channels is None else None
        self.in_channels: int | None = None if in_channels is None else width
        self.channels, self.heads, self.max_length, self.ffn_channels = channels, heads, max_length, ffn_channels
        self.token = nn.Embedding(width, channels) if in_channels is None else nn.Linear(width, channels)
        self.position_encoding = position_encoding
        learned = position_encoding == "learned"
        self.position: nn.Embedding = nn.Embedding(max_length, channels) if learned else None  # type: ignore[assignment]
        self.dropout = nn.Dropout(dropout)
        widths = (channels, heads * head_channels, ffn_channels)
        self.layers = nn.ModuleList(_Layer(*widths, dropout, module) for module in attentions)
        self.norm = nn.LayerNorm(channels)

    eval_seed: int | None = 0
    """Seed of calls without ``seed`` in evaluation mode; see :attr:`AttentionConv.eval_seed`."""

    def forward(
        self,
        tokens: Tensor,
        ptr: Tensor | None = None,
        *,
        batch: Tensor | None = None,
        edge_index: Adjacency | None = None,
        positions: Tensor | None = None,
        seed: int | None = None,
        sequence_ids: Tensor | None = None,
        return_trace: bool = False,
    ) -> Any:
        """Encode tokens.

        Args:
            tokens: Token numbers, ``[N]`` or ``[N, 1]`` int64, or features ``[N, in_channels]``: the ``x`` of PyG's
                data.
            ptr: Offsets of the sequences, ``[B+1]`` int64; one sequence if None.
            batch: Instead of ``ptr``, the sequence number of each token, ``[N]``.
            edge_index: Graph that every layer attends over, as :class:`AttentionConv` takes it; if None, the source of
                each layer chooses a graph.
            positions: Position of each token in its sequence, ``[N]`` int64, at least 0 and, if embeddings are learned,
                below ``max_length``; counted from 0 if None. Pass them if tokens were removed from a sequence.
            seed: Fixes the graphs that layers sample; layers use different random words. None: in evaluation mode
                :attr:`eval_seed`, so that calls repeat, and in training numbers of torch's default generator.
            sequence_ids: Number of each sequence, ``[B]``. With ``seed``, a sequence gets the same graphs in any batch.
            return_trace: Also return an :class:`EncoderTrace`.

        Raises:
            TypeError: Token numbers, positions or the seed are not integers.
            ValueError: A token is outside the vocabulary, a sequence longer than ``max_length``, a position is out of
                range or not needed, or a graph does not fit the tokens or the layers.
        """
        tokens = self.check_tokens(tokens)
        ptr = resolve_ptr(tokens.size(0), ptr, batch, device=tokens.device)
        sequence_ids = None if sequence_ids is None else resolve_sequence_ids(sequence_ids, ptr.numel() - 1, ptr.device)
        if seed is not None or not self.training:
            seed = draw_seed(self.eval_seed if seed is None else seed)
        graph = () if edge_index is None else (edge_index,)
        x = self._embed(tokens)
        rotated: list[nn.Module] = []
        if positions is not None:
            rotated = [layer for layer in self.layers if any(isinstance(part, Rotary) for part in layer.modules())]
            self._check_positions(tokens, positions, bool(rotated))
        if self.position is not None:
            x = x + self.position(self._positions(tokens, ptr) if positions is None else positions)
        x = self.dropout(x)
        choices = []
        for number, layer in enumerate(self.layers):
            # Layers draw independently.
            layer_seed = None if seed is None else (seed + number * GOLDEN) % 2**63
            named: dict[str, Any] = {"ptr": ptr, "seed": layer_seed, "sequence_ids": sequence_ids}
            named |= {"positions": positions} if layer in rotated else {}
            x, choice = layer(x, graph, named, return_trace)
            choices.append(choice)
        x = self.norm(x)
        return (x, EncoderTrace(tuple(choices), (ptr.numel() - 1, self.heads), tokens.device)) if return_trace else x

    def check_tokens(self, tokens: Tensor) -> Tensor:
        """Check type and shape of the tokens; return ``[N]`` integers, or features ``[N, in_channels]``.

        The forward pass checks that the vocabulary contains the tokens.

        Raises:
            TypeError, ValueError: The type or shape is wrong.
        """
        if self.num_tokens is None:
            checks.tensors(tokens=tokens)
            checks.floating(tokens=tokens)
            checks.shape("tokens", tokens, (None, self.in_channels), "[N, in_channels]", "They are features.")
            return tokens
        if isinstance(tokens, Tensor) and tokens.is_floating_point() and tokens.shape == (0,):
            tokens = tokens.long()  # `torch.tensor([])` of an empty text; the check of offsets names the sequence
        plain = isinstance(tokens, Tensor) and tokens.layout == torch.strided and tokens.dtype in checks.INTEGERS
        if plain and tokens.dim() == 2 and tokens.size(1) == 1:
            tokens = tokens[:, 0]
        if not plain or tokens.dim() != 1:
            got = f"{list(tokens.shape)} {tokens.dtype}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TypeError(
                f"Expected 'tokens' to be [N] int64 (got {got}). Join sequences and pass `ptr`, as `sbm_pyg.unpad` "
                "does. Features need `in_channels`."
            )
        return tokens

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of the tokens, ``[N, channels]``."""
        if self.num_tokens is not None and tokens.numel() and can_read(tokens):
            low, high = (int(bound) for bound in torch.aminmax(tokens))
            if low < 0 or high >= self.num_tokens:
                raise ValueError(
                    f"Expected 'tokens' in 0..{self.num_tokens - 1}, the vocabulary (got {low} to {high}). "
                    "Raise 'num_tokens' or check the tokeniser."
                )
        return self.token(tokens)

    def _positions(self, tokens: Tensor, ptr: Tensor) -> Tensor:
        """Position of each token in its sequence, ``[N]``."""
        if can_read(ptr) and ptr.numel() > 1 and (longest := int(ptr.diff().max())) > self.max_length:
            raise ValueError(
                f"Expected sequences of at most max_length = {self.max_length} tokens (got {longest}). "
                "Raise max_length or cut them."
            )
        return count_positions(ptr, tokens.size(0))

    def _check_positions(self, tokens: Tensor, positions: Tensor, rotates: bool) -> None:
        """Check positions that were passed."""
        count = tokens.size(0)
        if self.position is None and not rotates:
            raise ValueError(
                f"Expected no 'positions' with position_encoding={self.position_encoding!r} (got some). Leave them out."
            )
        check_tensor(positions, "positions", optional=False)
        if not tokens.is_meta:
            require_values(positions, "positions")
        if positions.shape != (count,) or positions.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"Expected 'positions' to be {[count]} int64, one for each token (got {list(positions.shape)} "
                f"{positions.dtype}). Leave it out to count them."
            )
        if count and can_read(positions):
            low, high = (int(bound) for bound in torch.aminmax(positions))
            if low < 0 or (high >= self.max_length and self.position is not None):
                raise ValueError(
                    f"Expected 'positions' in 0..{self.max_length - 1} (got {low} to {high}). Raise max_length or "
                    "leave it out."
                )


class _Layer(nn.Module):
    """Pre-norm transformer layer: attention with an output projection, then a feed-forward network with GELU."""

    def __init__(self, channels: int, attended: int, ffn_channels: int, dropout: float, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attention = attention
        self.lin_out = nn.Linear(attended, channels)
        widen, narrow = nn.Linear(channels, ffn_channels), nn.Linear(ffn_channels, channels)
        self.ffn = nn.Sequential(widen, nn.GELU(), nn.Dropout(dropout), narrow, nn.Dropout(dropout))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, edge_index: tuple[Any, ...], named: dict[str, Any], return_choice: bool
    ) -> tuple[Tensor, Choice | None]:
        attended, choice = self.attention(self.norm1(x), *edge_index, **named, return_choice=True)
        x = x + self.dropout(self.lin_out(attended))
        # FSDP inspects all outputs of a layer, and warns about the views in a choice.
        return x + self.ffn(self.norm2(x)), choice if return_choice else None
