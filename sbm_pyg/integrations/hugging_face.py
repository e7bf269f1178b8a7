"""Learned sparse attention in models of Hugging Face's ``transformers``, and its training by their ``Trainer``.

In: a model that selects its attention by ``attn_implementation``, or a model of ``hugging_face_inline``. Out: the same
model with a graph source in each self-attention; its weights and the sources are saved and loaded together. Not here:
what a layer computes (``hugging_face_attention``).

Importing this module registers ``"sbm"`` as an attention implementation, and extends two methods of
``PreTrainedModel``: ``post_init`` adds the sources that a config describes, before weights are loaded, and
``initialize_weights`` resets sources that no file contained. ``CallbackHandler.add_callback`` puts a
:class:`SparsifierCallback` first, so that other callbacks report its losses. Needs the packages ``transformers`` and
``accelerate``.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, TrainerCallback
from transformers.configuration_utils import PreTrainedConfig
from transformers.trainer_callback import CallbackHandler, ExportableState
from transformers.trainer_utils import has_length

from ..layers import named
from ..layers.attention import AttentionConv
from ..ops import checks
from ..training.sparsifier import Sparsifier
from .hugging_face_attention import HARMLESS, NAME, READ, GraphAttention, attend, note_cache
from .hugging_face_inline import is_inline, take_back, take_over
from .hugging_face_masks import make_mask

__all__ = ["SparsifierCallback", "prepare_sources", "remove_sources"]

SET_BY_MODEL = {"in_channels", "out_channels", "heads", "concat", "bias", "dropout", "is_causal"}
"""Options that the model sets."""
HEADS = ("num_attention_heads", "num_heads", "n_heads")
CHANNELS = ("qk_head_dim", "head_dim", "attention_head_size")
WIDTHS = ("dim_out", "all_head_size", "embed_dim")
BEFORE = "_attention_before_sbm"
"""Name of the attribute of a model with the attention implementations that were selected before, by module."""
CROSS = re.compile(r"cross|encoder_?attn|enc_?dec", re.IGNORECASE)


def prepare_sources(model: PreTrainedModel, source: str, options: Mapping[str, Any]) -> Callable[[], list[str]]:
    """Make a graph source for each self-attention of a model, see :func:`sbm_pyg.replace_attention`.

    Returns:
        A function that puts the sources into the model and returns the names of its layers. Until then, the model is
        unchanged.
    """
    options = {"source": source, **{name: _as_json(value) for name, value in options.items()}}
    before = {name: part.config._attn_implementation for name, part in _models(model).items()}
    attach = _prepare(model, options, replaced=True)

    def add_sources() -> list[str]:
        names = attach()
        model.__dict__.setdefault(BEFORE, before)
        if model._can_set_attn_implementation():
            model.set_attn_implementation(NAME)
        return names

    return add_sources


def remove_sources(model: PreTrainedModel) -> list[str]:
    """Remove the sources of a model, if it has any, see :func:`sbm_pyg.restore_attention`."""
    modules = model.named_modules()
    parts = {name: module for name, module in modules if NAME in module._modules or NAME in vars(module)}
    if not parts:
        return []
    names = [name for name, module in parts.items() if getattr(module, NAME) is not None]
    for module in parts.values():
        delattr(module, NAME)
        take_back(module)
        _remove_hook(module)
    before = model.__dict__.pop(BEFORE, {})
    for config in _configs(model, parts.values()):
        for entry in (NAME, "attn_implementation"):
            config.__dict__.pop(entry, None)
    for name, part in _models(model).items():
        part.config._attn_implementation_internal = before.get(name) or part.get_correct_attn_implementation(None)
    return names


def _remove_hook(module: nn.Module) -> None:
    """Remove the hook that :func:`_attach` adds to an attention module."""
    for number in [number for number, hook in module._forward_pre_hooks.items() if hook is note_cache]:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)


# ------------------------------------------------------------------ sources in models


def _prepare(model: PreTrainedModel, options: Mapping[str, Any], replaced: bool = False) -> Callable[[], list[str]]:
    """Make parts with sources for the self-attention modules of a model. The result adds them and returns names."""
    modules = {
        name: module
        for name, module in model.named_modules()
        if is_inline(module) or _calls_interface(type(module).forward)
    }
    stays = {
        name for name, module in modules.items() if CROSS.search(f"{name} {type(module).__name__}") or _is_local(module)
    }
    if len(stays) == len(modules) and (modules or replaced):
        got = f"{len(modules)} of them in windows or between encoder and decoder" if modules else "none"
        raise ValueError(
            f"Expected 'model' to have self-attention over all tokens that 'attn_implementation' selects (got {got} in "
            f"{type(model).__name__}). Choose another model, or set 'sliding_window' of its config to None."
        )
    for inner in _models(model).values() if replaced else ():
        if not _can_select(inner):
            _refuse_own_attention(inner)
    for module in modules.values():
        _check_arguments(module)
    made = {}
    for name, module in modules.items():
        if replaced or not hasattr(module, NAME):
            made[name] = None if name in stays else _make_part(module, options)

    def attach() -> list[str]:
        for name, part in made.items():
            setattr(modules[name], NAME, part)
            if replaced or model.config._attn_implementation == NAME:
                take_over(modules[name])
            _remove_hook(modules[name])
            if part is not None and part.keeps_memberships:
                modules[name].register_forward_pre_hook(note_cache, with_kwargs=True)
        # layers draw other words in evaluation, the same after loading
        for number, module in enumerate(modules.values()):
            if getattr(module, NAME) is not None:
                getattr(module, NAME).conv.eval_seed = number
        for config in _configs(model, modules.values()) if made else ():
            config.sbm, config.attn_implementation = dict(options), NAME
            if replaced:
                config._attn_implementation_internal = NAME
        return [name for name, module in modules.items() if getattr(module, NAME) is not None]

    return attach


def _models(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The model and the models in it, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}


def _configs(model: PreTrainedModel, modules: Iterable[Any]) -> list[Any]:
    """The configs of a model and of its modules, without repeats."""
    configs = (getattr(module, "config", None) for module in (model, *modules))
    return [*{id(config): config for config in configs if config is not None}.values()]


def _can_select(model: PreTrainedModel) -> bool:
    """Whether the attention of a model can be replaced by attention over its sources."""
    return model._can_set_attn_implementation() or any(is_inline(module) for module in model.modules())


def _refuse_own_attention(model: PreTrainedModel) -> None:
    """Raise ValueError for a model whose attention cannot be selected."""
    raise ValueError(
        f"Expected a model whose attention 'attn_implementation' selects (got {type(model).__name__}, which has its "
        "own). Choose another model, or write its attention with `AttentionConv.attend`."
    )


def _check_arguments(module: nn.Module) -> None:
    """Raise ValueError if an attention module passes its attention an argument that :func:`attend` does not support."""
    for name, expression in _other_arguments(type(module).forward):
        try:  # of attributes of the module, which may switch it off
            is_used = eval(expression, {}, {"self": module}) is not None
        except Exception:  # of other names, whose values only a call has
            is_used = True
        what, way_out = "with attention that queries, keys, values and a mask define", "Choose another model."
        got = f"'{name}' of {type(module).__name__}, which changes its scores or its pairs"
        checks.require(not is_used, "model", what, got, way_out)


def _as_json(value: Any) -> Any:
    """Convert a NumPy number to Python's, and names to a list, for JSON; other values are returned unchanged."""
    if isinstance(value, Real) and not isinstance(value, bool | int | float):
        return int(value) if isinstance(value, Integral) else float(value)
    return [*value] if isinstance(value, Collection) and not isinstance(value, str | Mapping) else value


@cache
def _calls_interface(forward: Callable[..., Any]) -> bool:
    """Whether a forward pass selects its attention by the config; ``transformers`` reads code likewise."""
    return _interface_name(forward) is not None


@cache
def _tree(forward: Callable[..., Any]) -> ast.AST:
    """The syntax tree of a function; an empty one where there is no source code."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def _interface_name(forward: Callable[..., Any]) -> str | None:
    """The name of the selected attention in the code of a forward pass, or None."""
    for node in ast.walk(_tree(forward)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(node.value.func).endswith("ATTENTION_FUNCTIONS.get_interface"):
                return ast.unparse(target)
    return None


@cache
def _other_arguments(forward: Callable[..., Any]) -> list[tuple[str, str]]:
    """Name and expression of each argument of the selected attention that :func:`attend` neither reads nor ignores."""
    name = _interface_name(forward)
    calls = (x for x in ast.walk(_tree(forward)) if isinstance(x, ast.Call) and ast.unparse(x.func) == name)
    words = (word for call in calls for word in call.keywords)
    return [(x.arg, ast.unparse(x.value)) for x in words if x.arg is not None and x.arg not in READ | HARMLESS]


def _is_local(module: Any) -> bool:
    """Whether a module attends in a window, so that its model passes a different mask to it."""
    if hasattr(module, "sliding_window"):
        return module.sliding_window is not None
    config, number = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and number is not None:  # full attention may stand next to a state space model in a "hybrid" layer
        return any(word in kinds[number] for word in ("sliding", "chunked", "window"))
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)


def _size(module: Any, names: tuple[str, ...]) -> int | None:
    """The first of the attributes of a module, or of its config, that is a number."""
    owners = (module, getattr(module, "config", None))
    sizes = (getattr(owner, name, None) for owner in owners for name in names)
    return next((size for size in sizes if isinstance(size, int)), None)


def _make_part(module: nn.Module, options: Mapping[str, Any]) -> GraphAttention:
    """The :class:`GraphAttention` of one attention module, in its dtype and on its device."""
    heads, channels = _size(module, HEADS), _size(module, CHANNELS)
    widths = (getattr(module, name, None) for name in WIDTHS)  # of stages, where that of the config is of the first
    width = next((size for size in widths if isinstance(size, int)), None) or _size(module, ("hidden_size",))
    channels = width // heads if channels is None and width and heads else channels
    if heads is None or channels is None:
        raise ValueError(
            f"Expected 'model' with attention modules that have one of {[*HEADS]}, and one of {[*CHANNELS]} (got "
            f"{type(module).__name__}, which does not). Set these attributes."
        )
    try:
        json.dumps(dict(options))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Expected 'options' to be what a config can save (got {error}). Take numbers, strings, lists and dicts, "
            "and make the rest in a source of your own, see `register_source`."
        ) from None
    like = next((p for p in module.parameters() if p.is_floating_point()), None)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # that of a loaded model may be one in which torch cannot initialize
    try:
        with torch.device("cpu"):  # models are made on no device before weights are loaded
            part = GraphAttention(_make_layer(channels, heads, dict(options)))
    finally:
        torch.set_default_dtype(usual)
    if like is not None:
        part.to(dtype=like.dtype, device=None if like.device.type == "meta" else like.device)
    for tensor in part.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # one that is missing in the files gives way to one without this mark
    for submodule in part.modules():
        submodule._is_hf_initialized = True  # type: ignore[assignment]
    return part.train(module.training)


def _make_layer(channels: int, heads: int, options: dict[str, Any]) -> AttentionConv:
    """An attention layer without projections, and with the source that the options describe."""
    source = options.pop("source", "sbm")
    fixed = sorted(SET_BY_MODEL & {*options})
    checks.require(not fixed, "options", f"without {fixed}", "them", "The model sets them.", TypeError)
    if source == "sbm":
        density = options.pop("target_density", 1.0)
        layer = named.make_attention(source, -1, channels, heads, target_density=1.0, **options)
        cast(Any, layer.source).target_density = density  # after 1, so that the running mean is there to be loaded
    else:
        layer = named.make_attention(source, -1, channels, heads, **options)
    layer.lin_query = layer.lin_key = layer.lin_value = None
    return layer


def _post_init(self: PreTrainedModel, *args: Any, original: Any, **kwargs: Any) -> None:
    """Add the sources that the config describes, before the weights of the model are initialized or loaded."""
    options, selected = getattr(self.config, NAME, None), self.config._attn_implementation == NAME
    if selected and not _can_select(self):
        _refuse_own_attention(self)
    if selected or options is not None:
        _prepare(self, {"source": "sbm", **(options or {})})()
    original(self, *args, **kwargs)


def _initialize_weights(self: PreTrainedModel, *args: Any, original: Any, **kwargs: Any) -> None:
    """Reset the parts without weights in the files that have just been loaded."""
    for module in self.modules():
        if isinstance(module, GraphAttention):
            module.reset_if_missing()
    original(self, *args, **kwargs)


def _extend(owner: type, name: str, extension: Any) -> None:
    """Replace a method of a class, once, by an extension that gets the method as ``original``."""
    method = getattr(owner, name)
    original = getattr(method, "_sbm_original", method)

    @wraps(original)
    def extended(self: Any, *args: Any, **kwargs: Any) -> None:
        extension(self, *args, original=original, **kwargs)

    extended._sbm_original = original  # type: ignore[attr-defined]
    setattr(owner, name, extended)


# ------------------------------------------------------------------ registration


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
setattr(PreTrainedConfig, NAME, None)  # an attribute of each config, so that `from_pretrained(folder, sbm=...)` sets it
_extend(PreTrainedModel, "post_init", _post_init)
_extend(PreTrainedModel, "initialize_weights", _initialize_weights)


# ------------------------------------------------------------------ training


class SparsifierCallback(TrainerCallback, ExportableState):
    """Trains a model with dense attention first and with sparse graphs later, by a :class:`~sbm_pyg.Sparsifier`.

    The callback takes the number of steps, the current step and the scaler of float16 from the trainer. Evaluation runs
    at the target density. The logs contain ``loss_dense``, ``loss_sparse`` and ``target_density``. Checkpoints contain
    the state of the callback, and resumed training loads it. A warning is raised if training ends before the model is
    sparse.

    Args:
        density: Target density in (0, 1).
        **options: Options of :class:`~sbm_pyg.Sparsifier`, other than ``scaler``.

    Example:
        >>> from transformers import Trainer
        >>> trainer = Trainer(model, arguments, callbacks=[SparsifierCallback(0.05)])  # doctest: +SKIP
    """

    def __init__(self, density: float = 0.05, **options: Any) -> None:
        self.density, self.options = density, options
        self.sparsifier: Sparsifier | None = None
        """Made when training starts."""
        self._losses: list[Tensor] = []
        self._are_parts = False
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Make the sparsifier, and continue from the state of the checkpoint from which training is resumed."""
        self._forget()  # what a training that was interrupted has left
        usual = {"total_steps": state.max_steps, "scaler": getattr(others.get("optimizer"), "scaler", None)}
        previous, self.sparsifier = self.sparsifier, Sparsifier(model, self.density, **usual | self.options)
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        if saved:
            self.sparsifier.load_state_dict((saved[0] if isinstance(saved, list) else saved)["sparsifier"])
        else:
            self.sparsifier._follow(previous, has_begun=False)
        self._hook = model.register_forward_hook(self._note_loss, with_kwargs=True)

    def _forget(self) -> None:
        """Remove the hook from the model, and the losses."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None
        self._losses.clear()

    def _note_loss(self, model: torch.nn.Module, inputs: Any, options: Any, output: Any) -> None:
        """Note the loss of a forward pass in training."""
        if model.training and getattr(output, "loss", None) is not None:
            self._losses.append(output.loss.detach())
            self._are_parts = options.get("num_items_in_batch") is not None

    def on_step_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **others: Any) -> None:
        """Set the density of the step, and the number of its backward passes."""
        assert self.sparsifier is not None
        turns = args.gradient_accumulation_steps
        passes = turns if turns == 1 else None
        if turns > 1 and has_length(train_dataloader):
            batches = len(train_dataloader)
            passes = min(turns, batches - state.global_step % -(-batches // turns) * turns)
        self.sparsifier._move_to(state.global_step, passes)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Call :meth:`Sparsifier.step <sbm_pyg.Sparsifier.step>`."""
        assert self.sparsifier is not None
        way_out = "Pass labels, and no function that computes another loss."
        checks.require(self._losses, "model", "to return its loss in training", "none", way_out)
        losses = torch.stack(self._losses)
        if self._are_parts:  # of a mean over the tokens of all passes, and of all processes
            loss = losses.sum() * (args.world_size if args.average_tokens_across_devices else 1)
        else:
            loss = losses.mean()
        self.sparsifier.step(loss)
        self._losses.clear()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """Add the running losses to the logs of training, but not of evaluation."""
        if self.sparsifier is not None and logs is not None and not {"loss", "train_loss"}.isdisjoint(logs):
            values = self.sparsifier._logs()
            logs |= values
            state.log_history[-1] |= values

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Remove the hook from the model, and warn if training has not become sparse."""
        assert self.sparsifier is not None
        self._forget()
        self.sparsifier._warn_if_dense()

    def state(self) -> dict[str, Any]:
        """Arguments of the constructor and the state of the sparsifier, for checkpoints."""
        options = {name: _as_json(value) for name, value in {"density": self.density, **self.options}.items()}
        saved = {} if self.sparsifier is None else self.sparsifier.state_dict()
        return {"args": options, "attributes": {}, "sparsifier": saved}


def _add_callback(self: CallbackHandler, *args: Any, original: Any, **kwargs: Any) -> None:
    """Add a callback; a SparsifierCallback is put before the callbacks that report its losses."""
    original(self, *args, **kwargs)
    self.callbacks.sort(key=lambda callback: not isinstance(callback, SparsifierCallback))


_extend(CallbackHandler, "add_callback", _add_callback)
