"""Attention layers by the names of their graph sources, for models that plain options describe.

In: the name of a source, and options. Out: an attention layer. Not here: the sources (``sources``), and the models that
take names (``multihead``, ``models``, ``integrations.hugging_face``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch_geometric.nn import MessagePassing

from ..graphs.ragged import Tokens
from ..ops import METHODS, checks
from ..ops.values import can_read
from ..sources import indexer, patterns, selectors
from ..sources.interface import GraphSource
from ..sources.sampling import SBMSource
from ..sources.sbm import SBMHead
from ..training.estimators import Local, resolve_estimator
from .attention import AttentionConv, block_model

__all__ = ["make_attention", "options_of", "register_source", "source_names"]

SourceFactory = Callable[..., GraphSource]
"""``(channels, heads, **options) -> GraphSource`` for queries and keys ``[H, N, channels]``."""
GIVEN = ("n", "tokens", "rule", "ptr", "query_ptr", "generator", "sequence_ids", "is_causal", "device")
"""Arguments of rules that each call passes, and those that no config holds."""
SET = (
    "channels", "in_channels", "out_channels", "heads", "head", "source", "scorer", "concat", "edge_dim", "rows",
    "kwargs", "options",
)  # fmt: skip
"""Arguments that are no options, since the model sets them, or passes no features of edges."""


class NamedSource(NamedTuple):
    """The functions that make a source from plain options.

    ``make(channels, heads, **options)`` returns the source; an argument ``estimator`` of ``make`` gets the estimator of
    the layer. Options are the arguments of the callables in ``takes``; None: any. ``sizes`` are defaults of this name.
    """

    make: SourceFactory
    takes: tuple[Callable[..., Any], ...] | None
    sizes: Mapping[str, int] = MappingProxyType({})


def _with(kind: Callable[..., GraphSource], part: Callable[..., Any], **sizes: int) -> NamedSource:
    """Return a function that makes a source around a scorer or a rule, and gives each callable its own options."""

    def make(channels: int, heads: int, **options: Any) -> GraphSource:
        if isinstance(part, type):
            of_scorer = {name: options.pop(name) for name in [*options] if name in _arguments(part)}
            return kind(part(channels, heads, **of_scorer), **options)
        draws = {"heads": heads} if "seed" in _arguments(part) else {}  # each head draws its own
        return kind(part, **draws | options)

    return NamedSource(make, (part, kind), sizes)


def _arguments(made: Callable[..., Any]) -> set[str]:
    return {*inspect.signature(made).parameters}


SOURCES: dict[str, NamedSource] = {
    "sbm": NamedSource(block_model, (SBMHead, SBMSource, Local)),
    "routing": NamedSource(selectors.RoutingSource, (selectors.RoutingSource,), {"num_clusters": 8}),
    "indexer": _with(indexer.IndexerSource, indexer.Indexer),
    "key_selection": _with(indexer.IndexerSource, indexer.KeyScorer),
    "top_k": NamedSource(lambda _, __, **options: selectors.TopKSource(**options), (selectors.TopKSource,)),
    **{name: _with(patterns.PatternSource, getattr(patterns, name)) for name in patterns.__all__ if name.islower()},
    "window": _with(patterns.PatternSource, patterns.window, size=64),
    "bigbird": _with(patterns.PatternSource, patterns.bigbird, size=3, num_global=2, num_random=3),
    "block_top_k": _with(selectors.SelectorSource, selectors.block_top_k, k=4, block_size=16),
    "lsh": _with(selectors.SelectorSource, selectors.lsh, num_buckets=16, chunk_size=16, rounds=2),
}
"""The sources of this library by name."""
_OWN: dict[str, NamedSource] = {}
"""Sources of users."""


def source_names() -> list[str]:
    """The names of the sources of this library, followed by the registered names."""
    return [*SOURCES, *_OWN]


def register_source(name: str, make: SourceFactory) -> None:
    """Name a source of your own for :class:`SequenceEncoder`, :func:`replace_attention` and configs of Hugging Face.

    Call it before a model with this source is made or loaded. A second call with the same name replaces the source.

    Args:
        name: The name.
        make: ``make(channels, heads, **options)`` returns a :class:`~sbm_pyg.GraphSource` for queries and keys
            ``[H, N, C]``; a class with such a constructor works too. Options are the options of the model. An argument
            ``estimator`` gets the estimator of the layer.

    Raises:
        TypeError: ``name`` is not a str, or ``make`` cannot be called.
        ValueError: The name is that of a source of this library, or of another attention of an encoder.

    Example:
        >>> from sbm_pyg import SBMHead, SBMSource, SequenceEncoder
        >>> register_source("tied", lambda channels, heads, **options: SBMSource(SBMHead(channels, heads), **options))
        >>> encoder = SequenceEncoder(15, 16, attention="tied", attention_options={"window": 1})
    """
    checks.kind("name", name, str, "a str", "Models are given it.")
    checks.kind("make", make, Callable, "a function", "It returns a GraphSource.")
    if name in ("dcmm", *SOURCES):
        raise ValueError(f"Expected 'name' to be new (got {name!r}, which the library has). Choose another.")
    _OWN[name] = NamedSource(make, None)


def options_of(source: str) -> set[str] | None:
    """The options that :func:`make_attention` accepts for a source; None for a registered source (any options)."""
    takes = (SOURCES | _OWN)[source].takes
    if takes is None:
        return None
    return set[str]().union(*map(_arguments, (*takes, AttentionConv, MessagePassing))).difference(SET, GIVEN)


def required_options(source: str) -> set[str]:
    """The options of a source that need a value."""
    _, takes, sizes = (SOURCES | _OWN)[source]
    parameters = [option for part in takes or () for option in inspect.signature(part).parameters.values()]
    required = {option.name for option in parameters if option.default is option.empty}
    return required.difference(sizes, SET, GIVEN)


def check_known(what: str, options: Iterable[str], names: Collection[str], error: type[Exception] = TypeError) -> None:
    """Raise ``error`` for options that a source or its layer does not accept; ``what`` names the options."""
    unknown = [name for name in options if name not in names]
    if unknown:
        hint = " Give the density to a Sparsifier." if {"density", "target_density"} <= {*unknown, *names} else ""
        hint += " An AttentionConv over a given graph has edge features." if "edge_dim" in unknown else ""
        raise error(f"Expected {what} to be known (got {unknown}).{hint} They are {sorted(names)}.")


def make_attention(
    source: str | None, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1, /, **options: Any
) -> AttentionConv:
    """Make an :class:`AttentionConv` whose source is given by name, from options that a config can hold.

    Args:
        source: ``"sbm"``, a block model as in :class:`SBMAttentionConv`; ``"indexer"``; a pattern such as ``"window"``;
            a rule such as ``"top_k"``; or a name of yours, see :func:`register_source`. None: no source; each call then
            needs a graph.
        in_channels, out_channels, heads: As :class:`AttentionConv`.
        **options: Options of the source and of the layer, passed on by name. ``"sbm"`` takes the options of
            :class:`~sbm_pyg.SBMHead` and of :class:`~sbm_pyg.SBMSource`. ``probes`` sets the probes of the estimator
            ``"local"`` or ``"distill"``.

    Raises:
        TypeError: An option is unknown or of the wrong type, or a registered function did not return a source.
        ValueError: The name is unknown, or an option is out of range.

    Example:
        >>> make_attention("sbm", 32, 16, 2, num_clusters=8, block_size=16)
        AttentionConv(32, 16, heads=2, source=SBMSource)
        >>> make_attention("top_k", 32, 16, 2, target_density=0.1)
        AttentionConv(32, 16, heads=2, source=TopKSource)
    """
    if source is not None and source not in source_names():
        raise ValueError(
            f"Expected 'source' to be one of {source_names()} (got {source!r}). Call `sbm_pyg.register_source` for one "
            "of your own, before the model is made or loaded."
        )
    of_any = {*_arguments(AttentionConv), *_arguments(MessagePassing)}.difference(SET) | {"concat"}
    names = of_any | {"edge_dim"} if source is None else options_of(source)
    if names is not None:
        check_known(f"options of source={source!r}", options, names | {"is_causal", "concat"})
    if source is None:
        return AttentionConv(in_channels, out_channels, heads, **options)
    of_layer = {name: options.pop(name) for name in [*options] if name in of_any}
    make, _, defaults = (SOURCES | _OWN)[source]
    for name, size in defaults.items():
        options[name] = checks.integer(name, options.get(name, size), 0, "It counts tokens.")
    layer = None
    if "estimator" in _arguments(make):  # then the layer, which has it, comes first
        method = options.get("method", GraphSource.method)
        checks.one_of("method", method, METHODS)
        law = (of_layer.get("normalizer", "softmax"), method, options.pop("probes", 16.0))
        of_layer["estimator"] = options["estimator"] = resolve_estimator(of_layer.get("estimator"), *law)
        layer = AttentionConv(in_channels, out_channels, heads, **of_layer)
    made = make(out_channels, heads, **options)
    checks.kind("source", made, GraphSource, f"a GraphSource, made by {source!r}", "See `register_source`.")
    if layer is None:
        layer = AttentionConv(in_channels, out_channels, heads, made, **of_layer)
    layer.source = made
    if isinstance(made, patterns.PatternSource | selectors.SelectorSource):  # whose options are checked by a call
        one = Tokens(torch.zeros(layer.heads, 1, layer.out_channels, device="cpu"), seed=0)
        if can_read(one.query):
            made(one)
    return layer
