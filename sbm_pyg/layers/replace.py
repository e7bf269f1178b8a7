"""Sparse attention in place of dense attention in a model, and back.

In: a model of torch, PyG or Hugging Face. Out: the same model with other attention layers, and their names. Not here:
the layers (``multihead``, ``gps``), and attention of Hugging Face's models (``integrations/hugging_face``).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch_geometric.nn
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch_geometric.nn import GPSConv

from ..ops import checks
from .gps import SparseGPSConv
from .multihead import SBMMultiheadAttention
from .transformer_conv import TransformerConv

__all__ = ["replace_attention", "restore_attention"]

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # of a module of torch


def replace_attention(model: nn.Module, *, source: str | None = "sbm", **options: Any) -> list[str]:
    """Give the attention of a model a graph source, in place. All trained weights stay.

    * A model of ``transformers``, or a model that contains such models: each self-attention gets a source, and
      ``attn_implementation="sbm"`` is selected. The config then contains the options, so ``save_pretrained`` and
      ``from_pretrained`` save and load weights and sources together. Attention in a window and cross attention stay
      dense. ``from_pretrained(folder, attn_implementation="sbm", sbm={"num_clusters": 16})``, after an import of
      ``sbm_pyg.integrations.hugging_face``, does the same when a model is loaded.
    * Any other model: each :class:`torch_geometric.nn.TransformerConv` becomes a :class:`~sbm_pyg.TransformerConv`,
      which computes the same faster, with the same parameters. Its edges come from the data, so it gets no source.
      Each :class:`torch.nn.MultiheadAttention` becomes an :class:`SBMMultiheadAttention`, and each
      :class:`~torch_geometric.nn.conv.GPSConv` of PyG, which would not call such a layer, a :class:`SparseGPSConv`,
      with copies of the projections. Make the optimizer after this call, unless all are ``TransformerConv``.

    The outputs stay those of the dense model: the target density of a new block model or indexer is 1, dense
    attention, unless you pass another. A :class:`~sbm_pyg.Sparsifier` then trains the sources and makes the model
    sparse. A second call replaces only the sources; :func:`restore_attention` makes attention dense again.

    Args:
        model: Module that contains the layers, such as a :class:`torch.nn.TransformerEncoder` or a
            ``PreTrainedModel``.
        source: The graph source, by name: ``"sbm"``, a block model of queries and keys; ``"indexer"``,
            an :class:`~sbm_pyg.sources.indexer.IndexerSource`, which scores all pairs with small heads and chooses by
            rank; a pattern of :mod:`~sbm_pyg.sources.patterns` such as ``"window"``, for self-attention alone; a rule
            of :mod:`~sbm_pyg.sources.selectors` such as ``"top_k"``; or your own, see :func:`register_source`.
            None: no source, so that attention stays dense unless a call of a layer passes a graph.
        **options: Of the source and of :class:`AttentionConv`, see :func:`~sbm_pyg.make_attention`. For
            ``transformers``: numbers, strings, lists and dicts; the model sets sizes, dropout and causality.

    Returns:
        The names of the attention layers that were replaced, as in ``model.named_modules()``.

    Raises:
        TypeError: ``model`` is not a module, or an option is unknown or one that the model sets.
        ValueError: ``model`` contains no attention that can be replaced, or is itself an attention layer; a layer
            shares weights with other modules, or has hooks, parametrizations or a ``forward`` of its own; ``source`` is
            unknown, or an option is out of range.

    Example:
        >>> from sbm_pyg import Sparsifier
        >>> layer = nn.TransformerEncoderLayer(32, nhead=4, batch_first=True)
        >>> replace_attention(layer, num_clusters=16)
        ['self_attn']
        >>> sparsifier = Sparsifier(layer, density=0.1, total_steps=1000)
    """
    checks.kind("model", model, nn.Module, "a module", "Pass a model of torch.")
    if of_transformers := _transformers_models(model):
        prepare = partial(_wing().prepare_sources, source="full" if source is None else source, options=options)
        calls = {name: prepare(part) for name, part in of_transformers.items()}  # before any of them is changed
        return [_joined(name, layer) for name, add_sources in calls.items() for layer in add_sources()]
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # a shared layer stays shared
        parent = name.rpartition(".")[0]
        if isinstance(module, nn.MultiheadAttention):
            of_gps = name and isinstance(model.get_submodule(parent), GPSConv)
            layers |= {parent: model.get_submodule(parent)} if of_gps else {name: module}
    over_edges = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) in (torch_geometric.nn.TransformerConv, TransformerConv)
    }
    layers = layers or _replaced(model)
    replaceable = layers | over_edges
    if not replaceable or "" in replaceable:
        got = "a layer itself" if replaceable else "none"
        way_out = "Other layers have no projections to copy: build an SBMMultiheadAttention in their place."
        if replaceable:
            way_out = "Use `SBMMultiheadAttention.from_torch`, `SparseGPSConv.from_gps` or `TransformerConv.from_pyg`."
        checks.refuse("model", "to contain torch.nn.MultiheadAttention or TransformerConv layers", got, way_out)
    if options and not layers:
        way_out = "Its TransformerConv layers attend over the edges of the data: leave them out."
        checks.refuse("options", "with layers that take a source", sorted(options), way_out, TypeError)
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    for name, layer in layers.items():
        if isinstance(layer, SBMMultiheadAttention | SparseGPSConv):
            _check_hooks(name, layer)
            continue
        attention = cast(nn.Module, layer.attn if isinstance(layer, GPSConv) else layer)
        shared = [part for part, parameter in attention.named_parameters() if owners[id(parameter)] > 1]
        way_out = "Copies would be trained apart: give each place its own weights first."
        checks.require(not shared, name, "to have weights of its own", f"{shared} in two places", way_out)
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
    if source == "sbm":
        options.setdefault("target_density", 1.0)
    made: dict[nn.Module, nn.Module] = {}
    for module in layers.values():
        make: Any = SparseGPSConv.from_gps if isinstance(module, GPSConv) else SBMMultiheadAttention.from_torch
        if module not in made:
            layer = make(_dense(module), source=source, **options)
            conv = layer.attn if isinstance(layer, SparseGPSConv) else layer.conv
            conv.eval_seed, made[module] = len(made), layer  # layers draw other words in evaluation
    names = _put(model, layers, made)
    fused: dict[nn.Module, nn.Module] = {}
    for conv in over_edges.values():
        fused[conv] = conv if isinstance(conv, TransformerConv) else TransformerConv.from_pyg(conv)
    # A GPS layer that was replaced has its message passing layer still, under the name that it had.
    return [*names, *_put(model, over_edges, fused)]


def restore_attention(model: nn.Module) -> list[str]:
    """Undo :func:`replace_attention`: make attention dense again, in place. Only weights of sources are lost.

    Each :class:`SBMMultiheadAttention` becomes a :class:`torch.nn.MultiheadAttention`, and each :class:`SparseGPSConv`
    a :class:`~torch_geometric.nn.conv.GPSConv`, with copies of the projections, and each
    :class:`~sbm_pyg.TransformerConv` that of PyG; the model then needs this library no
    longer. A model of ``transformers`` selects its previous attention again, or after loading its default attention.
    Sources and their trained parameters are dropped. Make the optimizer after this call.

    Args:
        model: Module that contains the layers.

    Returns:
        The names of the layers, as in ``model.named_modules()``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``model`` contains no such layer, or is itself such a layer; or a layer has hooks, or an option that
            torch and PyG do not support: causality, a score bias, rotary embeddings, another normalizer.

    Example:
        >>> layer = nn.TransformerEncoderLayer(32, nhead=4, batch_first=True)
        >>> names = replace_attention(layer, num_clusters=16)
        >>> restore_attention(layer), type(layer.self_attn).__name__
        (['self_attn'], 'MultiheadAttention')
    """
    checks.kind("model", model, nn.Module, "a module", "Pass a model of torch.")
    if of_transformers := _transformers_models(model):
        remove = _wing().remove_sources
        names = [_joined(name, layer) for name, part in of_transformers.items() for layer in remove(part)]
        kinds = ", ".join(type(part).__name__ for part in of_transformers.values())
        checks.require(names, "model", "to have graph sources", f"none in {kinds}", "It is dense already.")
        return names
    layers = _replaced(model)
    modules = model.named_modules(remove_duplicate=False)
    over_edges = {name: module for name, module in modules if isinstance(module, TransformerConv)}
    restorable = layers | over_edges
    if not restorable or "" in restorable:
        way_out = "Use its `to_torch`, `to_gps` or `to_pyg`." if restorable else "There is nothing to restore."
        raise ValueError(
            "Expected 'model' to contain SBMMultiheadAttention, SparseGPSConv or TransformerConv layers "
            f"(got {'a layer itself' if restorable else 'none'}). {way_out}"
        )
    for name, layer in layers.items():
        conv = layer.attn if isinstance(layer, SparseGPSConv) else cast(SBMMultiheadAttention, layer).conv
        _check_hooks(name, layer, *conv.modules())
        more = {
            option: getattr(conv, option) for option in ("is_causal", "score_bias", "rotary") if getattr(conv, option)
        }
        more |= {} if conv.normalizer == "softmax" else {"normalizer": conv.normalizer}
        way_out = "Dense attention would lose it: use `to_torch` or `to_gps` of the layer if your model brings it."
        checks.require(not more, name, "to compute what the dense layer does", more, way_out)
    names = _put(model, layers, {layer: _dense(layer) for layer in layers.values()})
    return [*names, *_put(model, over_edges, {conv: conv.to_pyg() for conv in over_edges.values()})]


def _transformers_models(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost models of ``transformers`` in a model, by name. That package is not imported."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    models = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
    return {
        name: module
        for name, module in models.items()
        if not any(name != outer and f"{name}.".startswith(_joined(outer, "")) for outer in models)
    }


def _wing() -> Any:
    return import_module("..integrations.hugging_face", __package__)


def _joined(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child


def _replaced(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that :func:`replace_attention` made, under all their names."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, SBMMultiheadAttention | SparseGPSConv)}


def _dense(layer: nn.Module) -> nn.Module:
    """Return the original layer of torch or PyG, or the layer itself if it was not replaced."""
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


def _put(model: nn.Module, layers: Mapping[str, nn.Module], made: Mapping[nn.Module, nn.Module]) -> list[str]:
    """Replace layers by new ones in all their parents, and return the names of the new layers."""
    for name, module in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made[module])
    return [name for name, _ in model.named_modules() if name in layers]
