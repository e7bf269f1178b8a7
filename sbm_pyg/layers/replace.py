"""Sparse attention in place of dense attention in a model, and back.

In: a model of torch or PyG. Out: the same model with other attention layers, and their names. Not here: the layers
(``multihead``, ``gps``), and models of Hugging Face (``integrations/hugging_face``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch_geometric.nn import GPSConv

from ..ops import checks
from .gps import SparseGPSConv
from .multihead import SBMMultiheadAttention

__all__ = ["replace_attention", "restore_attention"]

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # of a module of torch


def replace_attention(model: nn.Module, *, source: str = "sbm", **options: Any) -> list[str]:
    """Replace each :class:`torch.nn.MultiheadAttention` of a model, in place, by one with copies of its projections.

    A :class:`~torch_geometric.nn.conv.GPSConv` of PyG, which would not call such a layer, becomes a
    :class:`SparseGPSConv`. The outputs stay those of the dense model: the target density of a new block model or
    indexer is 1 unless you pass another. A :class:`~sbm_pyg.Sparsifier` then trains the sources and makes the model
    sparse. Make the optimizer after this call, because parameters are copied. If the layers have been replaced already,
    a second call replaces their sources, and keeps the projections; :func:`restore_attention` makes them dense again.

    Args:
        model: Module that contains the layers, such as a :class:`torch.nn.TransformerEncoder`.
        source: The graph source, by name: ``"sbm"``, a block model of queries and keys; ``"indexer"``,
            an :class:`~sbm_pyg.sources.indexer.IndexerSource`, which scores all pairs with small heads and chooses by
            rank; a pattern of :mod:`~sbm_pyg.sources.patterns` such as ``"window"``, for self-attention alone; a rule
            of :mod:`~sbm_pyg.sources.selectors` such as ``"top_k"``; or your own, see :func:`register_source`.
        **options: Of the source and of :class:`AttentionConv`, such as ``num_clusters``, the communities of a block
            model.

    Returns:
        The names of the replaced layers, as in ``model.named_modules()``.

    Raises:
        TypeError: ``model`` is not a module, or an option is unknown or one that the replaced layer sets.
        ValueError: It contains no such layer, or is one itself, or one that shares weights with other modules, or
            ``source`` is unknown, or a layer has hooks, parametrizations or a ``forward`` of its own.

    Example:
        >>> from sbm_pyg import Sparsifier
        >>> layer = nn.TransformerEncoderLayer(32, nhead=4, batch_first=True)
        >>> replace_attention(layer, num_clusters=16)
        ['self_attn']
        >>> sparsifier = Sparsifier(layer, density=0.1, total_steps=1000)
    """
    checks.kind("model", model, nn.Module, "a module", "Pass a model of torch.")
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # a shared layer stays shared
        parent = name.rpartition(".")[0]
        if isinstance(module, nn.MultiheadAttention):
            of_gps = name and isinstance(model.get_submodule(parent), GPSConv)
            found |= {parent: model.get_submodule(parent)} if of_gps else {name: module}
    found = found or _replaced(model)
    if not found or "" in found:
        ways_out = [
            "Use `SBMMultiheadAttention.from_torch` or `SparseGPSConv.from_gps` of the layer.",
            "Other layers have no projections to copy: build an SBMMultiheadAttention in their place.",
            "Models of transformers take `sbm_pyg.integrations.hugging_face.replace_attention`.",
        ]
        of_transformers = any(type(part).__module__.startswith("transformers.") for part in model.modules())
        raise ValueError(
            "Expected 'model' to contain torch.nn.MultiheadAttention layers "
            f"(got {'a layer itself' if found else 'none'}). {ways_out[0 if found else 1 + of_transformers]}"
        )
    owners = Counter(
        id(each)
        for module in model.modules()
        for _, each in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    for name, layer in found.items():
        if isinstance(layer, SBMMultiheadAttention | SparseGPSConv):
            _check_hooks(name, layer)
            continue
        attention = cast(nn.Module, layer.attn if isinstance(layer, GPSConv) else layer)
        shared = [part for part, each in attention.named_parameters() if owners[id(each)] > 1]
        if shared:
            raise ValueError(
                f"Expected '{name}' to have weights of its own (got {shared} in two places). Copies would be trained "
                "apart: give each place its own weights first."
            )
        base = GPSConv if isinstance(layer, GPSConv) else nn.MultiheadAttention
        if type(layer).forward is not base.forward:
            raise ValueError(
                f"Expected '{name}' to call the forward method of {base.__name__} (got a {type(layer).__name__} with "
                "its own). It would be lost: set a layer of `SBMMultiheadAttention.from_torch` or "
                "`SparseGPSConv.from_gps`, which copy weights alone, in its place."
            )
        if any(is_parametrized(part) for part in attention.modules()):
            raise ValueError(
                f"Expected '{name}' to have no parametrizations (got some). They would be lost: remove them by "
                "`torch.nn.utils.parametrize.remove_parametrizations`, and register them on the new layer."
            )
        _check_hooks(name, layer, *attention.modules())
    if source == "sbm" and options.get("num_clusters", 1) is not None:
        options.setdefault("target_density", 1.0)
    made: dict[nn.Module, nn.Module] = {}
    for module in found.values():
        make: Any = SparseGPSConv.from_gps if isinstance(module, GPSConv) else SBMMultiheadAttention.from_torch
        if module not in made:
            layer = make(_dense(module), source=source, **options)
            conv = layer.attn if isinstance(layer, SparseGPSConv) else layer.conv
            conv.eval_seed, made[module] = len(made), layer  # layers draw other words in evaluation
    return _put(model, found, made)


def restore_attention(model: nn.Module) -> list[str]:
    """Undo :func:`replace_attention`: make attention dense again, in place, with copies of the trained projections.

    Each :class:`SBMMultiheadAttention` becomes a :class:`torch.nn.MultiheadAttention`, and each :class:`SparseGPSConv`
    a :class:`~torch_geometric.nn.conv.GPSConv`. Sources, and what they have learned, are dropped. The model then needs
    this library no longer. Make the optimizer after this call, because parameters are copied.

    Args:
        model: Module that contains the layers.

    Returns:
        The names of the layers, as in ``model.named_modules()``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: It contains no such layer, or is one itself, or a layer has hooks, or computes what the layers of
            torch and PyG do not: it is causal, or has a score bias, rotary embeddings or another normalizer.

    Example:
        >>> layer = nn.TransformerEncoderLayer(32, nhead=4, batch_first=True)
        >>> names = replace_attention(layer, num_clusters=16)
        >>> restore_attention(layer), type(layer.self_attn).__name__
        (['self_attn'], 'MultiheadAttention')
    """
    checks.kind("model", model, nn.Module, "a module", "Pass a model of torch.")
    found = _replaced(model)
    if not found or "" in found:
        way_out = "Use its `to_torch` or `to_gps`." if found else "There is nothing to restore."
        raise ValueError(
            "Expected 'model' to contain SBMMultiheadAttention or SparseGPSConv layers "
            f"(got {'a layer itself' if found else 'none'}). {way_out}"
        )
    for name, layer in found.items():
        conv = layer.attn if isinstance(layer, SparseGPSConv) else cast(SBMMultiheadAttention, layer).conv
        _check_hooks(name, layer, *conv.modules())
        more = {
            option: getattr(conv, option) for option in ("is_causal", "score_bias", "rotary") if getattr(conv, option)
        }
        more |= {} if conv.normalizer == "softmax" else {"normalizer": conv.normalizer}
        if more:
            raise ValueError(
                f"Expected '{name}' to compute what the dense layer does (got {more}). Dense attention would lose it: "
                "use `to_torch` or `to_gps` of the layer if your model brings it."
            )
    return _put(model, found, {layer: _dense(layer) for layer in found.values()})


def _replaced(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that :func:`replace_attention` makes, by all their names."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, SBMMultiheadAttention | SparseGPSConv)}


def _dense(layer: nn.Module) -> nn.Module:
    """The layer of torch or PyG for a layer that may have been replaced."""
    if isinstance(layer, SparseGPSConv):
        return layer.to_gps()
    return layer.to_torch() if isinstance(layer, SBMMultiheadAttention) else layer


def _check_hooks(name: str, *modules: nn.Module) -> None:
    """Raise ValueError if a module has hooks."""
    hooks = [kind for module in modules for kind in HOOKS if getattr(module, kind)]
    if hooks:
        raise ValueError(
            f"Expected '{name}' to have no hooks (got some in {hooks[0]}). They would be lost: register them on "
            "the new layer."
        )


def _put(model: nn.Module, found: Mapping[str, nn.Module], made: Mapping[nn.Module, nn.Module]) -> list[str]:
    """Put the new layers in the places of the old ones, and return their names."""
    for name, module in found.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made[module])
    return [name for name, _ in model.named_modules() if name in found]
