"""Models in folders: weights that are checked, a config that rebuilds the model, and a card that says what it is.

In: a model. Out: a folder of three files, and the same model again. Not here: optimisers, steps and anything else that
a training run needs to go on (``examples/lra.py`` has checkpoints for that).

The folder holds ``model.safetensors`` (the state dict), ``config.json`` (library version, class, constructor options,
hashes, what was measured) and ``README.md`` (the card). Nothing in it is code and nothing is pickled, so a folder of
unknown origin can be opened.
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
from collections.abc import Iterator, Mapping, Sequence
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
SPARE = 1000  # parameters, and numbers in them, that a constructor may make beyond those that stay
RESTORE = "Restore the file as it was saved."


class Pretrained(nn.Module):
    """A module that goes into a folder and comes back; the base of the models of this library.

    A subclass says how it was made, in :meth:`constructor_options`; all else is done here.

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
        """Keyword arguments that make a module of this shape.

        Numbers, strings, lists, dicts and other :class:`Pretrained` modules.
        """
        raise NotImplementedError(f"{type(self).__name__} must say how it was made. Define `constructor_options`.")

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        task: str | None = None,
        metric: Mapping[str, float | Tensor] | None = None,
        density: float | Sequence[Sequence[float]] | Tensor | None = None,
    ) -> None:
        """Write the model into a folder, whole or not at all.

        The files are written beside the folder and then take its place; if that fails, what was there stays. Saving
        again into the folder of a saved model replaces it, the card included. Cost: one pass over the weights to write
        and one to hash them.

        Args:
            folder: A new or empty folder, or one that holds a saved model and nothing else.
            task: What the model was trained on, and how its inputs were made.
            metric: What it reached, by name: finite numbers, of Python, numpy or torch.
            density: Share of the pairs that its graphs hold: one number, or one per layer and head ``[L, H]``, in [0,
                1].

        Raises:
            TypeError: A constructor option is not plain data, such as an attention factory, or a metric is not a
                number.
            ValueError: The folder holds something else, a density is out of range, a metric is not finite, an option is
                NaN, weights are NaN, infinite, of less than 16 bits or not there yet (lazy or on the device ``meta``),
                or a file cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        target = _path(folder).resolve()
        if not isinstance(task, str | None):
            raise TypeError(
                f"Expected 'task' to be a text or None (got {type(task).__name__}). It goes into the model card."
            )
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
            for path in draft.iterdir():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
            _publish(draft, target)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"Expected 'folder' to be a place that can be written (got '{target}': {error}). "
                "Make room or get the right, or choose another one; what was there stays."
            ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Self:
        """Read a model from a folder, in evaluation mode, with the dtypes that it was saved with.

        ``Pretrained.from_pretrained`` reads a model of any known class; a class reads itself and its subclasses. The
        state of torch's random generators is left as it is. Weights are copied into torch's own memory. On the CPU they
        start at a multiple of 64 bytes there, as those of the saved model did, so that products of matrices are rounded
        alike. Memory: the model, and one of its weights.

        Args:
            folder: What :meth:`save_pretrained` wrote.
            device: Where the weights go.

        Raises:
            ValueError: A file is missing or has changed, the library is too old for it, the class is unknown or another
                one, options or weights do not fit the class, or weights are NaN, infinite or of less than 16 bits. A
                config that asks for more than the weights is refused before more is made.
        """

        source, device = _path(folder), checks.device(device)
        config = _read_config(source)
        weights = source / WEIGHTS
        if not weights.is_file():
            raise ValueError(
                f"Expected '{weights}' to be a file (got none). Copy the whole folder that `save_pretrained` wrote."
            )
        wanted, found = config["sha256"].get(WEIGHTS), _sha256(weights)
        if wanted != found:
            raise ValueError(
                f"Expected '{weights}' to have the SHA-256 {short(wanted)} of {CONFIG} (got {short(found)}). "
                "The file has changed: copy it again."
            )
        with torch.random.fork_rng(devices=[]), _no_more_than(weights):
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
                "They tell a model: rename the key."
            )
        return {key: _plain(entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, f"{where}[{number}]") for number, entry in enumerate(value)]
    if isinstance(value, Real) and not isinstance(value, bool | int | float):  # of numpy
        value = int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"Expected '{where}' to be a number (got nan). Make the model with one that it can work with.")
    if isinstance(value, float) and math.isinf(value):
        return str(value)  # JSON has no infinity; no option is a word like this
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"Expected '{where}' to be plain data (got {value!r}). A config holds no code: "
        "name the attention, or save `model.state_dict()` and keep the code that made the model."
    )


def _build(description: Mapping[str, Any], base: type[Any], path: Path, where: str = "") -> Any:
    """The module that a description asks for, a ``base`` or a subclass of it.

    ``where`` is the way to it in the file.
    """
    known = {cls.__name__: cls for cls in _subclasses(base)}
    name, options = description.get("class"), description.get("options")
    if not isinstance(name, str) or name not in known:
        every = {cls.__name__ for cls in _subclasses(Pretrained)}
        way_out = (
            f"Load it with `{name}.from_pretrained`"
            if isinstance(name, str) and name in every
            else "Import the module that defines it first"
        )
        raise ValueError(
            f"Expected '{where}class' in '{path}' to be one of {sorted(known)} (got {short(name)}). {way_out}."
        )
    where = f"{where}options"
    if not isinstance(options, dict):
        raise ValueError(f"Expected '{where}' in '{path}' to be an object (got {short(options)}). {RESTORE}")
    parts = {key: _revive(value, path, f"{where}.{key}") for key, value in options.items()}
    try:
        return known[name](**parts)
    except Exception as error:  # a class may say in any way that it was not made for these
        raise ValueError(
            f"Expected '{where}' in '{path}' to fit {name} (got {type(error).__name__}: {error}). "
            "Restore the options it was saved with."
        ) from error


def _revive(value: Any, path: Path, where: str) -> Any:
    """What :func:`_plain` made plain."""
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
    if isinstance(value, float) and not math.isfinite(value):  # infinity is written as a word
        raise ValueError(f"Expected '{where}' in '{path}' to be a finite number (got {value}). {RESTORE}")
    return float(value) if value in ("inf", "-inf") else value


def _subclasses(base: type[Any]) -> Iterator[type[Any]]:
    if base is not Pretrained and not base.__name__.startswith("_"):
        yield base
    for cls in base.__subclasses__():
        yield from _subclasses(cls)


# ------------------------------------------------------------------ weights


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as safetensors takes it: numbers, each in memory of its own."""
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if is_lazy(tensor) or tensor.is_meta:
            kind, way_out = (
                ("a size that no input has set", "Call the model once")
                if is_lazy(tensor)
                else ("a meta tensor", "Load weights")
            )
            raise ValueError(f"Expected '{name}' to hold numbers (got {kind}). {way_out} before it is saved.")
        _check_type(tensor, f"'{name}'")
        _check_numbers(
            tensor, f"'{name}'", "The training diverged: save an earlier state, or keep `model.state_dict()`."
        )
        tensor = tensor.detach().contiguous()
        place = tensor.untyped_storage().data_ptr()
        weights[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return weights


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open file of weights; a damaged one is named."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ValueError(f"Expected '{path}' to be a file of safetensors (got {error}). {RESTORE}") from error


@contextmanager
def _no_more_than(path: Path) -> Iterator[None]:
    """Let this thread make no more parameters than a file of weights has; twice as many, for some are replaced."""
    with _opened(path) as file:
        sizes = [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118, it is no dict
    thread, made, numbers = threading.get_ident(), 0, 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal made, numbers
        if threading.get_ident() != thread or parameter is None:
            return
        made, numbers = made + 1, numbers + (0 if is_lazy(parameter) else parameter.numel())
        if made > 2 * len(sizes) + SPARE or numbers > 2 * sum(sizes) + SPARE:
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
    """Put weights in the place of those that a model was made with, one after the other.

    What is one parameter stays one.
    """
    mine, state = model.state_dict(keep_vars=True), {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118, it is no dict
            saved = file.get_tensor(name)
            _check_type(saved, f"'{name}' in '{path}'")
            tensor = torch.empty_like(saved, device=device, memory_format=torch.contiguous_format).copy_(saved)
            own = mine.get(name)
            if own is not None and not is_lazy(own) and not own.is_meta and own.shape == tensor.shape:
                if (own.is_floating_point(), own.is_complex()) != (tensor.is_floating_point(), tensor.is_complex()):
                    raise ValueError(
                        f"Expected '{name}' in '{path}' to be as {own.dtype} (got {tensor.dtype}). {RESTORE}"
                    )
                own.data = tensor  # which frees what was there
                tensor = own
            state[name] = tensor
    try:
        model.load_state_dict(state, assign=True)
    except (RuntimeError, TypeError, ValueError) as error:  # the last two by a share that is none
        raise ValueError(
            f"Expected '{path.with_name(CONFIG)}' to fit the weights beside it (got {error}). "
            "Restore the options it was saved with."
        ) from error
    for name, tensor in model.state_dict(keep_vars=True).items():
        _check_numbers(
            tensor, f"'{name}' in '{path}'", "The training diverged before the model was saved: load an earlier one."
        )


def _check_type(tensor: Tensor, name: str) -> None:
    """Refuse floats of less than 16 bits, with which nothing of this library computes."""
    if tensor.is_floating_point() and tensor.element_size() < 2:
        raise ValueError(
            f"Expected {name} to be of at least 16 bits (got {tensor.dtype}). "
            "Save the model in bfloat16 or wider: `model.bfloat16()`."
        )


def _check_numbers(tensor: Tensor, name: str, way_out: str) -> None:
    """Refuse NaN, and infinite parameters; a buffer may hold infinity, as masks do."""
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    low, high = real.aminmax()  # of which one is NaN if any number is
    if low.isnan() or (isinstance(tensor, nn.Parameter) and (low.isinf() or high.isinf())):
        raise ValueError(f"Expected {name} to be finite (got values from {low:g} to {high:g}). {way_out}")


# ------------------------------------------------------------------ files


def _path(folder: Any) -> Path:
    """The folder, if the file system can have one of that name."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(
            f"Expected 'folder' to be a path (got {type(folder).__name__}). Give it as a text or a pathlib.Path."
        )
    path = Path(folder)
    try:
        path.stat() if "\0" in str(path) else path.exists()  # `exists` takes a name with a null for one that is free
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
    """Parse an integer of JSON; infinite beyond what a float can hold, where Python is slow or refuses."""
    return int(digits) if len(digits) < 300 else float(digits)


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d{1,9}(\.\d{1,9})*(?!\.?\d)", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _beside(folder: Path, purpose: str) -> Path:
    """A name on the same file system that nothing has yet."""
    return folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.{purpose}")


def _check_target(folder: Path) -> None:
    """Refuse to replace what is not a saved model."""
    if not folder.exists():
        return
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
    """Put the finished draft in the folder's place; what was there comes back if that fails."""
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
    try:
        table = torch.as_tensor(density, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"Expected 'density' to be a number or [L, H] (got {density!r}). Average over sequences: "
            "`trace.density.mean(1)`."
        ) from None
    if table.dim() not in (0, 2) or table.numel() == 0 or not bool(((table >= 0) & (table <= 1)).all()):
        raise ValueError(
            f"Expected 'density' to be a number or [L, H] in [0, 1] (got {density}). Average over sequences: "
            "`trace.density.mean(1)`."
        )
    return table.tolist()


def _check_metric(metric: Mapping[str, Any] | None) -> dict[str, float] | None:
    if metric is None:
        return None
    if not isinstance(metric, Mapping):
        raise TypeError(
            f"Expected 'metric' to be numbers by name (got {metric!r}). Say what it is: {{'test accuracy': 0.5}}."
        )
    numbers = {}
    for name, value in metric.items():
        try:
            if isinstance(value, Tensor) and value.is_complex():
                raise TypeError
            number = float(torch.as_tensor(value, dtype=torch.float64).detach())
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise TypeError(
                f"Expected 'metric' to hold a number for {name!r} (got {value!r}). Give one for each name."
            ) from None
        if not math.isfinite(number):
            raise ValueError(f"Expected 'metric' to hold a finite number for {name!r} (got {number}). Leave it out.")
        numbers[name] = number
    return numbers


def _card(model: nn.Module, config: Mapping[str, Any]) -> str:
    """What a person should know about the folder, in Markdown."""
    trained = config["trained"]
    density, metric = trained["density"], trained["metric"] or {}
    name = config["class"]
    mean = None if density is None else float(torch.as_tensor(density).mean())
    rows = [
        ("trained on", trained["task"] or "not stated"),
        *([(key, f"{value:.6g}") for key, value in metric.items()] or [("metric", "not stated")]),
        ("density", "not stated" if mean is None else f"{100 * mean:.2f} % of the pairs of tokens"),
        ("parameters", f"{sum(parameter.numel() for parameter in model.parameters()):,}"),
        ("written by", f"{LIBRARY} {config['version']}, torch {torch.__version__}"),
        (f"SHA-256 of `{WEIGHTS}`", f"`{config['sha256'][WEIGHTS]}`"),
    ]
    lines = ["---", f"library_name: {LIBRARY}", "tags: [sparse-attention, stochastic-block-model]", "---", ""]
    lines += [f"# {name}", "", "| | |", "|---|---|"]
    lines += [f"| {_cell(key)} | {_cell(value)} |" for key, value in rows]
    if isinstance(density, list):
        heads = len(density[0])
        lines += [
            "",
            "Density of the graphs:",
            "",
            "| layer |" + "".join(f" head {head} |" for head in range(heads)),
            "|---|" + "---:|" * heads,
        ]
        lines += [
            f"| {layer} |" + "".join(f" {100 * share:.2f} % |" for share in row) for layer, row in enumerate(density)
        ]
    lines += [
        "",
        "## Use",
        "",
        "```python",
        f"from {LIBRARY} import {name}",
        "",
        f'model = {name}.from_pretrained("path/of/this/folder")',
        "```",
        "",
    ]
    lines += ["It is in evaluation mode; pass `seed=` to fix the graphs that it samples.", ""]
    lines += ["## Constructor options", "", "```json", json.dumps(config["options"], indent=2), "```", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
