"""The attention of a method, from its kind and its plain options, as command lines have them, to a layer of the library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from sbm_pyg import AttentionConv, DCMMBias, FullAttention
from sbm_pyg.layers import named
from sbm_pyg.training.estimators import NoEstimator

BIAS = ("num_clusters", "degree", "squash", "symmetric", "tied", "entropy_weight")
"""Options of the bias of ``dcmm``."""
FLAGS = ("squash", "symmetric", "tied", "degree_corrected", "detach")
"""Options that are 0 or 1."""
UNSET = ("k", "row_group", "target_density")
"""Options of which 0 is the default of the library."""


def layer_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Plain options in the form that :func:`sbm_pyg.make_attention` and encoders take.

    >>> layer_options({"num_clusters": 8, "tied": 1, "row_group": 0})
    {'num_clusters': 8, 'tied': True, 'row_group': None}
    """
    values = _with_flags(options)
    return values | {name: values[name] or None for name in UNSET if name in values}


def _with_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: bool(value) if name in FLAGS else value for name, value in options.items()}


def make_attention(
    kind: str, channels: int, width: int, heads: int, options: Mapping[str, Any], *, is_causal: bool = False
) -> nn.Module:
    """The attention of ``heads`` heads of ``width`` channels.

    Args:
        kind: "full", "dcmm" for a bias over all pairs, or the name of a source. "dcmm-" in front of a name adds a bias to its edges.
        options: Of the source, of the bias, and of the layer. With "frozen", what chooses the graphs does not learn.
    """
    if kind == "full":
        return FullAttention(channels, width, heads, is_causal=is_causal)
    values, biased = dict(options), kind.startswith("dcmm")
    frozen, name = values.pop("frozen", 0), kind.removeprefix("dcmm").removeprefix("-") or "full"
    layer: dict[str, Any] = {"is_causal": is_causal}
    if biased:
        bias_options: dict[str, Any] = {option: values[option] for option in BIAS if option in values}
        layer["score_bias"] = DCMMBias(width, heads, **_with_flags(bias_options))
        shared = ("num_clusters",) if name == "sbm" else ()
        values = {option: value for option, value in values.items() if option not in BIAS or option in shared}
    conv = named.make_attention(name, channels, width, heads, **layer, **layer_options(values))
    return freeze(conv) if frozen else conv


def freeze(conv: AttentionConv) -> AttentionConv:
    """The layer, whose source does not learn; queries and keys still learn what the graphs make of them."""
    assert conv.source is not None
    conv.source.requires_grad_(False)
    conv.estimator = NoEstimator()
    return conv
