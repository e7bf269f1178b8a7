"""Models in folders and on the Hugging Face Hub.

In: a model. Out: a folder with its options (``config.json``), its weights (``model.safetensors``) and its card
(``README.md``), and from the folder or its copy on the Hub an equal model. Not here: graphs in files (``exchange``),
and what a training run needs to resume (``examples/common/runs.py``).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..ops import checks

__all__ = ["Pretrained"]

WEIGHTS = "model.safetensors"
CLASS = "_class_name"  # key of a model among the options of another one
CLASSES: dict[str, type[Any]] = {}  # by name
WRAPPERS = {"_orig_mod", "parametrizations"}  # parts of names that no constructor makes again
DOWNLOAD = ("revision", "cache_dir", "force_download", "local_files_only", "token")
CARD = """---
{{ card_data }}
---

# {{ class_name }}

{% if task %}Trained on {{ task }}.

{% endif %}{% for name, value in (results or {}).items() %}* {{ name }}: {{ "%.6g" % value }}
{% endfor %}
Load it by the path of this folder, or by its name on the Hub:

```python
model = {{ class_name }}.from_pretrained("path/of/this/folder")
```
"""


class Pretrained(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="sbm_pyg",
    tags=["sparse-attention", "stochastic-block-model"],
    model_card_template=CARD,
):
    """Base class of the models of this library, which are saved to and loaded from a folder or the Hugging Face Hub.

    It is a :class:`huggingface_hub.PyTorchModelHubMixin`: the arguments of the constructor are recorded when a model is
    constructed, so subclasses need no code. Arguments are saved if they are numbers, strings, lists, dicts or other
    :class:`Pretrained` modules; ``*args`` are not recorded. ``model.push_to_hub("owner/name")`` uploads a model, and
    ``from_pretrained("owner/name")`` downloads it.

    Example:
        >>> import tempfile
        >>> from sbm_pyg import SequenceClassifier, SequenceEncoder
        >>> model = SequenceClassifier(SequenceEncoder(15, 16, attention_options={"num_clusters": 4}), num_classes=10)
        >>> card = {"task": "ListOps", "results": {"test accuracy": 0.41, "density": 0.2}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder, model_card_kwargs=card)
        ...     again = SequenceClassifier.from_pretrained(folder)
        >>> again.encoder.channels, again.training
        (16, False)
    """

    def __init_subclass__(cls, **options: Any) -> None:
        # A coder of `object` makes the mixin record every argument; it leaves out those that JSON cannot hold.
        options["coders"] = options.get("coders", {}) | {object: (_encode, lambda value: value)}
        super().__init_subclass__(**options)
        CLASSES[cls.__name__] = cls

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> str | None:
        """Save the model to a folder: its options, its weights in their dtypes, and a model card.

        Args:
            save_directory: The folder. Files of a model in the folder are replaced, except the card ``README.md``,
                which you may edit.
            **options: Options of :meth:`huggingface_hub.ModelHubMixin.save_pretrained`. ``model_card_kwargs`` is a dict
                with the content of the card: ``task``, a text, and ``results``, a dict of numbers.

        Raises:
            TypeError: An argument of the constructor is not plain data, such as an attention factory.
            ValueError: A part of the state has no values (a lazy parameter, a tensor on the device ``meta``, a shard)
                or is not a tensor, or its module is compiled or parametrized.
        """
        options["config"] = _config(self)
        _check_plain(type(self).__name__, options["config"])
        _weights_to_save(self)  # errors come before a file changes
        options["model_card_kwargs"] = {"class_name": type(self).__name__, **(options.get("model_card_kwargs") or {})}
        address = super().save_pretrained(save_directory, **options)
        folder = Path(save_directory)
        shutil.copymode(folder / "config.json", folder / WEIGHTS)  # safetensors lets the owner alone read it
        return address

    def _save_pretrained(self, save_directory: Path) -> None:
        save_file(_weights_to_save(self), save_directory / WEIGHTS)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Self:
        """Load a model from a folder or from the Hub, in evaluation mode and in the dtypes of the saved weights.

        Nothing is unpickled or executed. The state of torch's random generators does not change. Weights are copied
        into memory that torch allocates, whose alignment decides how matrix products are rounded, so outputs equal the
        outputs of the saved model to the bit. Memory: the model, and the largest of its weights.

        Args:
            pretrained_model_name_or_path: A folder that :meth:`save_pretrained` wrote, which is read without network,
                or the name of a repository on the Hub.
            **options: Options of :meth:`huggingface_hub.ModelHubMixin.from_pretrained`, such as ``revision``;
                ``map_location``, the device of the weights; ``strict=False`` to load weights of which only a part fits;
                and arguments of the constructor, which replace saved arguments.

        Raises:
            ValueError: A file of the folder is missing or damaged, or options or weights do not fit the class.
        """
        name = pretrained_model_name_or_path
        try:
            return super().from_pretrained(name, **options)
        except Exception as error:  # constructors and readers of files may raise anything
            if not isinstance(name, os.PathLike) and not os.path.exists(name):  # errors of the Hub
                raise
            raise ValueError(
                f"Expected '{name}' to be the folder of a {cls.__name__} (got {type(error).__name__}: {error}). "
                "Load it by the class and the version that saved it, or copy the folder again."
            ) from error

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, map_location: str | torch.device = "cpu", strict: bool = True, **options: Any
    ) -> Self:
        """Load weights from safetensors, strictly and in their dtypes. The mixin of the Hub would be more lenient."""
        download = {name: options.pop(name) for name in DOWNLOAD if name in options}
        is_folder = os.path.isdir(model_id)
        path = os.path.join(model_id, WEIGHTS) if is_folder else hf_hub_download(model_id, WEIGHTS, **download)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model = cls(**{name: _decode(value) for name, value in options.items() if name != CLASS})
        saved = load_file(path)
        model.load_state_dict(saved, strict=strict)
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in saved and tensor.dtype != saved[name].dtype:
                tensor.data = saved[name].clone()
        return model.to(map_location).eval()


def _encode(value: Any) -> Any:
    """An argument as plain data, copied since the caller may change it; other objects are returned unchanged."""
    if isinstance(value, Pretrained):
        return {CLASS: type(value).__name__, **_config(value)}
    if isinstance(value, Mapping):
        return {key: _encode(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(entry) for entry in value]
    return value.item() if isinstance(value, np.generic) else value


def _decode(value: Any) -> Any:
    """The inverse of :func:`_encode`."""
    if isinstance(value, list):
        return [_decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    value = {key: _decode(entry) for key, entry in value.items()}
    if CLASS not in value:
        return value
    name = value.pop(CLASS)
    way_out = "Import the module that defines it."
    checks.require(name in CLASSES, CLASS, f"to be one of {sorted(CLASSES)}", repr(name), way_out)
    return CLASSES[name](**value)


def _config(model: Pretrained) -> dict[str, Any]:
    """Return the recorded arguments, except functions that are defaults of the constructor."""
    config: Any = model._hub_mixin_config or {}
    defaults = {name: parameter.default for name, parameter in model._hub_mixin_init_parameters.items()}
    return {name: value for name, value in config.items() if not callable(value) or defaults.get(name) is not value}


def _check_plain(name: str, value: Any) -> None:
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        for key, entry in value.items():
            _check_plain(f"{name}.{key}", entry)
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            _check_plain(f"{name}[{number}]", entry)
    elif value is not None and (not isinstance(value, bool | int | float | str) or value != value):
        raise TypeError(
            f"Expected '{name}' to be plain data (got {value!r}). A config holds no code: pass the name of an "
            "attention, or save `model.state_dict()` and keep the code that makes the model."
        )


def _weights_to_save(model: nn.Module) -> dict[str, Tensor]:
    """The state dict in contiguous tensors that share no memory, as safetensors needs them."""
    weights: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if type(value) not in (Tensor, nn.Parameter) or value.is_meta or WRAPPERS & {*name.split(".")}:
            raise ValueError(
                f"Expected '{name}' to be a dense tensor with values, of a module that is not wrapped "
                f"(got {type(value).__name__}). Call a lazy model once, gather shards, remove parametrizations, "
                "compile in place by `module.compile()`, or save `model.state_dict()`."
            )
        tensor = value.detach().contiguous()
        address = tensor.untyped_storage().data_ptr()
        weights[name] = tensor.clone() if address in addresses else tensor
        addresses.add(address)
    return weights
