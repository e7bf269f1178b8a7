"""Models in folders.

In: a model. Out: a folder without code in it, and the same model again, checked. Not here: graphs in files
(``exchange``); optimisers, steps and what else a training run needs to resume (``examples/lra.py`` has checkpoints).

The folder of a model holds ``model.safetensors`` (the state dict), ``config.json`` (library version, class, constructor
options, hash, results) and ``README.md`` (the model card). Nothing is pickled, so a folder of unknown origin can be
opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from reprlib import repr as short
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from . import __version__
from .ops import checks

__all__ = ["Pretrained"]

LIBRARY = "sbm_pyg"
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
EXTRA_PARAMETERS = 1000  # parameters, and numbers in them, that a constructor may make and replace
RESTORE = "Restore the file as it was saved."
WRAPPERS = {  # parts of names that no constructor makes again
    "_orig_mod": "Save the model that `torch.compile` was given, or compile in place by `module.compile()`.",
    "parametrizations": "Call `torch.nn.utils.parametrize.remove_parametrizations` on the module first.",
}


class Pretrained(nn.Module):
    """A module that can be saved to a folder and loaded from it; the base class of the models of this library.

    A subclass defines :meth:`constructor_options`.

    Example:
        >>> import tempfile
        >>> from sbm_pyg import SequenceClassifier, SequenceEncoder
        >>> model = SequenceClassifier(SequenceEncoder(15, 16, attention_options={"num_blocks": 4}), num_classes=10)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(f"{folder}/listops", task="ListOps", metric={"test accuracy": 0.41}, density=0.2)
        ...     again = SequenceClassifier.from_pretrained(f"{folder}/listops")
        >>> again.encoder.channels, again.training
        (16, False)
    """

    def constructor_options(self) -> dict[str, Any]:
        """Keyword arguments that construct this module again.

        They are numbers, strings, lists, dicts and other :class:`Pretrained` modules.
        """
        raise NotImplementedError(f"{type(self).__name__} has no constructor options. Define `constructor_options`.")

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        task: str | None = None,
        metric: Mapping[str, float | Tensor] | None = None,
        density: float | Sequence[Sequence[float]] | Tensor | None = None,
    ) -> None:
        """Save the model to a folder, with a model card.

        The files are written next to the folder and then replace it as a whole; if writing fails, the folder stays as
        it was. Cost: one pass over the weights to write them and one to hash them.

        Args:
            folder: A new or empty folder, or one that holds nothing but a saved model, which is replaced.
            task: The task that the model was trained on, and how its inputs were made.
            metric: Results by name: finite numbers, of Python, numpy or torch.
            density: Density of its graphs in [0, 1]: one number, or one per layer and head ``[L, H]``.

        Raises:
            TypeError: A constructor option is not plain data, such as an attention factory, or a metric is not a
                number.
            ValueError: The folder holds other files or is the current one, a density is out of range, a metric is not
                finite, an option is NaN, weights are NaN, infinite, of less than 16 bits, sharded, of a parametrized or
                compiled part, or not there yet (lazy or on the device ``meta``), or a file cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        target = _path(folder).resolve()
        checks.kind("task", task, str | None, "a text or None", "It goes into the model card.")
        _check_target(target)
        record = {"task": task, "metric": _check_metric(metric), "density": _check_density(density)}
        weights = _weights(self)
        config: dict[str, Any] = {"library": LIBRARY, "version": __version__, **_describe(self)}
        draft = _beside(target, "partial")
        try:
            draft.mkdir(parents=True)
            save_file(weights, draft / WEIGHTS)
            config |= {"sha256": {WEIGHTS: _sha256(draft / WEIGHTS)}, "trained": record}
            (draft / CONFIG).write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")
            (draft / CARD).write_text(_card(self, config), encoding="utf-8")
            shutil.copymode(draft / CONFIG, draft / WEIGHTS)  # safetensors lets the owner alone read it
            for path in draft.iterdir():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
            _publish(draft, target)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"Expected 'folder' to be writable (got '{target}': {error}). "
                "Free some space, or choose another folder; nothing was replaced."
            ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Self:
        """Load a model from a folder, in evaluation mode and in the dtypes of the saved weights.

        ``Pretrained.from_pretrained`` loads a model of any known class; another class loads itself and its subclasses.
        The state of torch's random generators does not change. Weights are copied into memory that torch allocates,
        whose alignment decides how matrix products are rounded, so outputs equal those of the saved model to the bit.
        Memory: the model, and one of its weights.

        Args:
            folder: A folder that :meth:`save_pretrained` wrote.
            device: Device of the weights.

        Raises:
            ValueError: The device is ``meta``, a file is missing or has changed, a newer version of the library wrote
                it, the class is unknown or another one, options or weights do not fit the class, or weights are NaN,
                infinite or of less than 16 bits. Construction stops as soon as it makes more parameters than the file
                has.
        """
        source, device = _path(folder), checks.device(device)
        if device.type == "meta":
            raise ValueError("Expected 'device' to be one that holds weights (got 'meta'). Load the model on 'cpu'.")
        config = _read_config(source)
        weights = source / WEIGHTS
        if not weights.is_file():
            raise ValueError(
                f"Expected '{weights}' to be a file (got none). Copy the folder that `save_pretrained` wrote."
            )
        wanted, found = config["sha256"].get(WEIGHTS), _sha256(weights)
        if wanted != found:
            raise ValueError(
                f"Expected '{weights}' to have the SHA-256 {short(wanted)} of {CONFIG} (got {short(found)}). "
                "The file has changed: copy it again."
            )
        with torch.random.fork_rng(devices=[]), _limit_parameters(weights):
            try:
                model = _build(config, cls, source / CONFIG)
            except RecursionError:
                raise ValueError(
                    f"Expected 'options' in '{source / CONFIG}' to be nested less deeply "
                    f"(got too many levels). {RESTORE}"
                ) from None
        _load(model, weights, device)
        return model.to(device).eval()


# ------------------------------------------------------------------ options


def _describe(model: Pretrained) -> dict[str, Any]:
    """Class and options as plain data."""
    return {"class": type(model).__name__, "options": _plain(model.constructor_options(), type(model).__name__)}


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Pretrained):
        return _describe(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        if value.keys() & {"class", "options"}:
            raise ValueError(
                f"Expected '{where}' to have no key 'class' or 'options' (got {[*value]}). "
                "These keys mark a model: rename the key."
            )
        return {key: _plain(entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, f"{where}[{number}]") for number, entry in enumerate(value)]
    if isinstance(value, Real) and not isinstance(value, bool | int | float):  # of numpy
        value = int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"Expected '{where}' to be a number (got nan). Construct the model with a number.")
    if isinstance(value, float) and math.isinf(value):
        return str(value)  # JSON has no infinity
    if isinstance(value, str) and value in ("inf", "-inf"):
        raise ValueError(
            f"Expected '{where}' not to be the text {value!r} (got it). It marks an infinite number: pass "
            f"float({value!r}), or another text."
        )
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"Expected '{where}' to be plain data (got {value!r}). A config holds no code: "
        "pass the name of an attention, or save `model.state_dict()` and keep the code that makes the model."
    )


def _build(description: Mapping[str, Any], base: type[Any], path: Path, where: str = "") -> Any:
    """Construct the module of a description: a ``base`` or a subclass of it. ``where`` is its path in the file."""
    known = {cls.__name__: cls for cls in _subclasses(base)}
    name, options = description.get("class"), description.get("options")
    if not isinstance(name, str) or name not in known:
        every = {cls.__name__ for cls in _subclasses(Pretrained)}
        ours = isinstance(name, str) and name in every
        way_out = f"Load it with `{name}.from_pretrained`" if ours else "Import the module that defines it first"
        raise ValueError(
            f"Expected '{where}class' in '{path}' to be one of {sorted(known)} (got {short(name)}). {way_out}."
        )
    where = f"{where}options"
    if not isinstance(options, dict):
        raise ValueError(f"Expected '{where}' in '{path}' to be an object (got {short(options)}). {RESTORE}")
    arguments = {key: _revive(value, path, f"{where}.{key}") for key, value in options.items()}
    try:
        return known[name](**arguments)
    except Exception as error:  # constructors of users may raise anything
        raise ValueError(
            f"Expected '{where}' in '{path}' to fit {name} (got {type(error).__name__}: {error}). "
            "Restore the options that it was saved with."
        ) from error


def _revive(value: Any, path: Path, where: str) -> Any:
    """The inverse of :func:`_plain`."""
    if isinstance(value, dict) and value.keys() & {"class", "options"}:
        if value.keys() != {"class", "options"}:
            raise ValueError(
                f"Expected '{where}' in '{path}' to have the keys 'class' and 'options' "
                f"(got {short([*value])}). {RESTORE}"
            )
        return _build(value, Pretrained, path, f"{where}.")
    if isinstance(value, dict):
        return {key: _revive(entry, path, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list):
        return [_revive(entry, path, f"{where}[{number}]") for number, entry in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):  # infinity is written as a string
        raise ValueError(f"Expected '{where}' in '{path}' to be a finite number (got {value}). {RESTORE}")
    return float(value) if value in ("inf", "-inf") else value


def _subclasses(base: type[Any]) -> Iterator[type[Any]]:
    if base is not Pretrained and not base.__name__.startswith("_"):
        yield base
    for cls in base.__subclasses__():
        yield from _subclasses(cls)


# ------------------------------------------------------------------ weights


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, checked, in contiguous tensors that share no memory, as safetensors needs them."""
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        way_out = "No file of weights holds anything else: keep it in a buffer, or save `model.state_dict()`."
        checks.kind(name, tensor, Tensor, "a tensor", way_out)
        wrapped = {*name.split(".")} & WRAPPERS.keys()
        if wrapped:
            raise ValueError(
                f"Expected '{name}' to have the name that the constructor gives it (got one of a wrapped module). "
                f"{WRAPPERS[wrapped.pop()]}"
            )
        if is_lazy(tensor) or tensor.is_meta:
            kind = "a lazy parameter" if is_lazy(tensor) else "a meta tensor"
            way_out = "Call the model once" if is_lazy(tensor) else "Load weights"
            raise ValueError(f"Expected '{name}' to hold numbers (got {kind}). {way_out} before it is saved.")
        if hasattr(tensor, "full_tensor"):  # of FSDP2
            raise ValueError(
                f"Expected '{name}' to hold numbers (got a shard of them). Gather them by "
                "`torch.distributed.checkpoint.state_dict.get_model_state_dict`, load them into a model that is not "
                "sharded, and save that."
            )
        _check_type(tensor, f"'{name}'")
        _check_finite(tensor, f"'{name}'", "Training diverged: save an earlier state, or use `model.state_dict()`.")
        tensor = tensor.detach().contiguous()
        address = tensor.untyped_storage().data_ptr()
        weights[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return weights


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of weights; an error names a damaged one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ValueError(f"Expected '{path}' to be a file of safetensors (got {error}). {RESTORE}") from error


@contextmanager
def _limit_parameters(path: Path) -> Iterator[None]:
    """Stop this thread if it makes more than twice the parameters of a file; a constructor may replace some."""
    with _opened(path) as file:
        sizes = [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118, not a dict
    thread, made, numbers = threading.get_ident(), 0, 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal made, numbers
        if threading.get_ident() != thread or parameter is None:
            return
        made, numbers = made + 1, numbers + (0 if is_lazy(parameter) else parameter.numel())
        if made > 2 * len(sizes) + EXTRA_PARAMETERS or numbers > 2 * sum(sizes) + EXTRA_PARAMETERS:
            raise ValueError(
                f"it makes {made:,} parameters or more, of {numbers:,} numbers, "
                f"and '{path}' has {len(sizes):,}, of {sum(sizes):,}"
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _load(model: nn.Module, path: Path, device: torch.device) -> None:
    """Replace the weights of a model one after the other. Tied parameters stay tied."""
    mine, state = model.state_dict(keep_vars=True), {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118, not a dict
            saved = file.get_tensor(name)
            _check_type(saved, f"'{name}' in '{path}'")
            tensor = torch.empty_like(saved, device=device, memory_format=torch.contiguous_format).copy_(saved)
            own = mine.get(name)
            if own is not None and not is_lazy(own) and not own.is_meta and own.shape == tensor.shape:
                if (own.is_floating_point(), own.is_complex()) != (tensor.is_floating_point(), tensor.is_complex()):
                    raise ValueError(
                        f"Expected '{name}' in '{path}' to be as {own.dtype} (got {tensor.dtype}). {RESTORE}"
                    )
                own.data = tensor  # frees the old weight
                tensor = own
            state[name] = tensor
    try:
        model.load_state_dict(state, assign=True)
    except (RuntimeError, TypeError, ValueError) as error:  # a `share` raises the last two
        raise ValueError(
            f"Expected '{path.with_name(CONFIG)}' to fit '{path.name}' (got {error}). "
            "Restore the options that it was saved with."
        ) from error
    for name, tensor in model.state_dict(keep_vars=True).items():
        _check_finite(tensor, f"'{name}' in '{path}'", "Training diverged: load a model that was saved earlier.")


def _check_type(tensor: Tensor, name: str) -> None:
    """Refuse floats of less than 16 bits; no op of this library takes them."""
    if tensor.is_floating_point() and tensor.element_size() < 2:
        raise ValueError(
            f"Expected {name} to be of at least 16 bits (got {tensor.dtype}). "
            "Save the model in bfloat16 or wider: `model.bfloat16()`."
        )


def _check_finite(tensor: Tensor, name: str, way_out: str) -> None:
    """Refuse NaN, and infinite parameters; buffers such as masks may be infinite."""
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    low, high = real.aminmax()  # `low` is NaN if any number is
    if low.isnan() or (isinstance(tensor, nn.Parameter) and (low.isinf() or high.isinf())):
        raise ValueError(f"Expected {name} to be finite (got values from {low:g} to {high:g}). {way_out}")


# ------------------------------------------------------------------ files


def _path(folder: Any) -> Path:
    """The folder as a path that the file system accepts."""
    checks.kind("folder", folder, str | os.PathLike, "a path", "Give it as a text or a pathlib.Path.")
    path = Path(folder)
    try:
        path.stat() if "\0" in str(path) else path.exists()  # `exists` is False for a name with a null byte
    except (OSError, ValueError) as error:
        raise ValueError(
            f"Expected 'folder' to be a path of this file system (got {str(folder)[:80]!r}: {error}). Choose another."
        ) from None
    return path


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"Expected '{path}' to be a file (got none). Give the folder that `save_pretrained` wrote.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"), parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Expected '{path}' to be JSON (got {error}). {RESTORE}") from error
    if not isinstance(config, dict) or config.get("library") != LIBRARY or not isinstance(config.get("sha256"), dict):
        raise ValueError(
            f"Expected '{path}' to be the config of a model of {LIBRARY} (got another one). "
            "Give the folder that `save_pretrained` wrote."
        )
    version = config.get("version")
    if not isinstance(version, str) or not _release(version):
        raise ValueError(
            f"Expected 'version' in '{path}' to be one such as {__version__!r} (got {short(version)}). {RESTORE}"
        )
    if _release(version) > _release(__version__):
        raise ValueError(
            f"Expected 'version' in '{path}' to be at most {__version__} (got {version}). Update your clone."
        )
    return config


def _integer(digits: str) -> int | float:
    """Parse an integer of JSON; infinite if it has more digits than a float can hold."""
    return int(digits) if len(digits) < 300 else float(digits)


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d{1,9}(\.\d{1,9})*(?!\.?\d)", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _beside(folder: Path, purpose: str) -> Path:
    """An unused name on the same file system."""
    return folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.{purpose}")


def _check_target(folder: Path) -> None:
    """Refuse to replace anything but a saved model."""
    if not folder.exists():
        return
    if folder.samefile(os.curdir):
        raise ValueError(
            f"Expected 'folder' to be another one than the current folder (got '{folder}'). Saving replaces the whole "
            "folder: choose one in it."
        )
    content = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [folder.name]
    ours = not content
    if content and {*content} <= {CONFIG, WEIGHTS, CARD} and CONFIG in content and folder.is_dir():
        try:
            ours = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["library"] == LIBRARY
        except (ValueError, TypeError, LookupError, RecursionError):
            ours = False
    if not ours:
        raise ValueError(
            "Expected 'folder' to be new, empty or a saved model "
            f"(got '{folder}', which holds {', '.join(content[:3])}{' and more' if len(content) > 3 else ''}). "
            "Saving replaces the whole folder: choose another one."
        )


def _publish(draft: Path, folder: Path) -> None:
    """Replace the folder by the finished draft; if that fails, restore the folder."""
    if not folder.exists():
        os.rename(draft, folder)
        return
    old = _beside(folder, "old")
    os.rename(folder, old)
    try:
        os.rename(draft, folder)
    except BaseException:
        os.rename(old, folder)
        raise
    shutil.rmtree(old)


# ------------------------------------------------------------------ the card


def _check_density(density: float | Sequence[Sequence[float]] | Tensor | None) -> float | list[list[float]] | None:
    if density is None:
        return None
    way_out = "Average over sequences: `trace.density.mean(1)`."
    try:
        table = torch.as_tensor(density, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"Expected 'density' to be a number or [L, H] (got {density!r}). {way_out}") from None
    if table.dim() not in (0, 2) or table.numel() == 0 or not bool(((table >= 0) & (table <= 1)).all()):
        raise ValueError(f"Expected 'density' to be a number or [L, H] in [0, 1] (got {density}). {way_out}")
    return table.tolist()


def _check_metric(metric: Mapping[str, Any] | None) -> dict[str, float] | None:
    if metric is None:
        return None
    if not isinstance(metric, Mapping):
        raise TypeError(
            f"Expected 'metric' to be a dict of numbers (got {metric!r}). Name each: {{'test accuracy': 0.5}}."
        )
    numbers = {}
    for name, value in metric.items():
        try:
            if isinstance(value, Tensor) and value.is_complex():
                raise TypeError
            number = float(torch.as_tensor(value, dtype=torch.float64).detach())
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise TypeError(
                f"Expected 'metric' to hold a number for {name!r} (got {value!r}). Pass one number for each name."
            ) from None
        if not math.isfinite(number):
            raise ValueError(f"Expected 'metric' to hold a finite number for {name!r} (got {number}). Leave it out.")
        numbers[name] = number
    return numbers


def _card(model: nn.Module, config: Mapping[str, Any]) -> str:
    """The model card, in Markdown."""
    trained, name = config["trained"], config["class"]
    density, metric = trained["density"], trained["metric"] or {}
    mean = None if density is None else float(torch.as_tensor(density).mean())
    ours = type(model).__module__.partition(".")[0] == LIBRARY
    loading = f"from {LIBRARY} import {name}" if ours else f"# first import {name} from the module that defines it"
    rows = [
        ("trained on", trained["task"] or "not stated"),
        *([(key, f"{value:.6g}") for key, value in metric.items()] or [("metric", "not stated")]),
        ("density", "not stated" if mean is None else f"{100 * mean:.2f} % of the pairs of tokens"),
        ("parameters", f"{sum(parameter.numel() for parameter in model.parameters()):,}"),
        ("written by", f"{LIBRARY} {config['version']}, torch {torch.__version__}"),
        (f"SHA-256 of `{WEIGHTS}`", f"`{config['sha256'][WEIGHTS]}`"),
    ]
    text = f"---\nlibrary_name: {LIBRARY}\ntags: [sparse-attention, stochastic-block-model]\n---\n\n# {name}\n\n"
    text += _table(["", ""], rows)
    if isinstance(density, list):
        layers = [[str(layer), *(f"{100 * each:.2f} %" for each in row)] for layer, row in enumerate(density)]
        heads = [f"head {head}" for head in range(len(density[0]))]
        text += f"\nDensity of the graphs:\n\n{_table(['layer', *heads], layers)}"
    return (
        text
        + f"""
## Use

```python
{loading}

model = {name}.from_pretrained("path/of/this/folder")
```

The model is in evaluation mode, in which it samples the same graphs in each call; pass `seed=` for others.

## Constructor options

```json
{json.dumps(config["options"], indent=2)}
```
"""
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [[" ".join(str(cell).split()).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    lines.insert(1, ["---"] * len(head))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
