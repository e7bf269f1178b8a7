"""Attention layers by the names of their graph sources, for models that plain options describe.

In: the name of a source, and options. Out: an attention layer. Not here: the sources (``sources``), and the models that
take names (``multihead``, ``models``, ``integrations.hugging_face``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
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
SIZES = {  # of sources that have usual ones
    "window": {"size": 64},
    "bigbird": {"size": 3, "num_global": 2, "num_random": 3},
    "block_top_k": {"k": 4, "block_size": 16},
    "lsh": {"num_buckets": 16, "chunk_size": 16, "rounds": 2},
    "routing": {"num_clusters": 8},
}
GIVEN = ("n", "tokens", "rule", "ptr", "generator", "sequence_ids", "is_causal", "device")
"""Arguments of rules that each call passes, and those that no config holds."""
SET = (
    "channels", "in_channels", "out_channels", "heads", "head", "source", "scorer", "concat", "edge_dim", "rows",
    "kwargs", "options",
)  # fmt: skip
"""Arguments that are no options, since the model sets them, or passes no features of edges."""


def _scored(scorer: type[nn.Module], channels: int, heads: int, **options: Any) -> GraphSource:
    sizes = {name: options.pop(name) for name in [*options] if name in _arguments(scorer)}
    return indexer.IndexerSource(scorer(channels, heads, **sizes), **options)


def _drawn(rule: Callable[..., Any], channels: int, heads: int, **options: Any) -> GraphSource:
    draws = {"heads": heads} if "seed" in _arguments(rule) else {}  # each head draws its own
    return patterns.PatternSource(rule, **draws | options)


def _selected(rule: Callable[..., Any], channels: int, heads: int, **options: Any) -> GraphSource:
    return selectors.SelectorSource(rule, **options)


def _make_ranks(channels: int, heads: int, **options: Any) -> GraphSource:
    return selectors.TopKSource(**options)


def _arguments(made: Callable[..., Any]) -> set[str]:
    return {*inspect.signature(made).parameters}


_SCORERS = {"indexer": indexer.Indexer, "key_selection": indexer.KeyScorer}
_PATTERNS = {name: getattr(patterns, name) for name in patterns.__all__ if name.islower()}
_RULES = {name: getattr(selectors, name) for name in ("block_top_k", "lsh")}
_MAKERS: dict[str, SourceFactory] = {
    "routing": selectors.RoutingSource,
    **{name: partial(_scored, scorer) for name, scorer in _SCORERS.items()},
    "top_k": _make_ranks,
    **{name: partial(_drawn, rule) for name, rule in _PATTERNS.items()},
    **{name: partial(_selected, rule) for name, rule in _RULES.items()},
}
_OWN: dict[str, SourceFactory] = {}
"""Sources of users."""


def source_names() -> list[str]:
    """The names of the sources of this library, and then those that were registered."""
    return ["sbm", *_MAKERS, *_OWN]


def register_source(name: str, make: SourceFactory) -> None:
    """Name a source of your own, which :class:`SequenceEncoder`, :func:`replace_attention` and configs of Hugging Face
    then know.

    Call it before a model with this source is made or loaded, as a module of yours does when it is imported. A second
    call with the same name replaces the source.

    Args:
        name: The name.
        make: ``make(channels, heads, **options)`` returns a :class:`~sbm_pyg.GraphSource` for queries and keys
            ``[H, N, C]``; a class with such a constructor will do. Options are those that the model is given.

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
    if name in ("sbm", "dcmm", *_MAKERS):
        raise ValueError(f"Expected 'name' to be new (got {name!r}, which the library has). Choose another.")
    _OWN[name] = make


def options_of(source: str) -> set[str] | None:
    """The options that :func:`make_attention` knows for a source; None for a user's, which may take any."""
    if source in _OWN:
        return None
    parts: dict[str, tuple[Any, ...]] = {
        "sbm": (SBMHead, SBMSource, Local),
        "routing": (selectors.RoutingSource,),
        "top_k": (selectors.TopKSource,),
        **{name: (scorer, indexer.IndexerSource) for name, scorer in _SCORERS.items()},
        **{name: (rule,) for name, rule in _PATTERNS.items()},
        **{name: (rule, selectors.SelectorSource) for name, rule in _RULES.items()},
    }
    names = set[str]().union(*map(_arguments, (*parts[source], AttentionConv, MessagePassing)))
    return names.difference(SET, GIVEN)


def check_known(what: str, options: Iterable[str], names: Collection[str], error: type[Exception] = TypeError) -> None:
    """Refuse options that a source or its layer does not have; ``what`` names them."""
    unknown = [name for name in options if name not in names]
    if unknown:
        hint = " Give the density to a Sparsifier." if {"density", "target_density"} <= {*unknown, *names} else ""
        hint += " An AttentionConv over a given graph has edge features." if "edge_dim" in unknown else ""
        raise error(f"Expected {what} to be known (got {unknown}).{hint} They are {sorted(names)}.")


def make_attention(
    source: str | None, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1, /, **options: Any
) -> AttentionConv:
    """An :class:`AttentionConv` with the source of a name, from options that a config may hold.

    Args:
        source: ``"sbm"``, a block model as in :class:`SBMAttentionConv`; ``"indexer"``; a pattern such as ``"window"``;
            a rule such as ``"top_k"``; or a name of yours, see :func:`register_source`. None: no source; each call then
            needs a graph.
        in_channels, out_channels, heads: As :class:`AttentionConv`.
        **options: Of the source and of the layer; each goes to the one that has it. Of ``"sbm"``: the options of
            :class:`~sbm_pyg.SBMHead` and of :class:`~sbm_pyg.SBMSource`. ``probes`` is that of the estimator
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
    if source == "sbm":
        method = options.get("method", "bernoulli")
        checks.one_of("method", method, METHODS)
        law = (of_layer.get("normalizer", "softmax"), method, options.pop("probes", 16.0))
        of_layer["estimator"] = resolve_estimator(of_layer.get("estimator"), *law)
        layer = AttentionConv(in_channels, out_channels, heads, **of_layer)
        layer.source = block_model(layer.out_channels, layer.heads, estimator=layer.estimator, **options)
        return layer
    sizes = {
        name: checks.integer(name, options.get(name, size), 0, "It counts tokens.")
        for name, size in SIZES.get(source, {}).items()
    }
    made = (_OWN.get(source) or _MAKERS[source])(out_channels, heads, **options | sizes)
    checks.kind("source", made, GraphSource, f"a GraphSource, made by {source!r}", "See `register_source`.")
    conv = AttentionConv(in_channels, out_channels, heads, made, **of_layer)
    if source in {*_PATTERNS, *_RULES}:  # whose options are checked by a call
        one = Tokens(torch.zeros(conv.heads, 1, conv.out_channels, device="cpu"), seed=0)
        if can_read(one.query):
            made(one)
    return conv
