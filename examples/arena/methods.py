"""Graph sources by name, each with its frozen twin, and sources from a user's file.

A name is one of ``METHODS``, a method of ``examples/common/hybrid.py`` with its options, or ``FILE.py:CLASS``. The twin of a method that
learns to choose has the same parameters, and those that choose stay as they began; all else learns.
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from examples.arena.rivals import LAYERS, RIVALS, SharedIndex, Spartan
from examples.common import hybrid
from examples.common.attention import freeze
from examples.common.command import require
from examples.common.runs import fingerprint
from sbm_pyg import AttentionConv, GraphSource, LearnedSource
from sbm_pyg.training.estimators import AttentionCall, Local, NoEstimator

FROZEN = "frozen=1"
BLOCK = 2  # keys of a block of MoBA, so that a query takes another block than its own at 5 % of 64 tokens
METHODS = {  # name: as hybrid.py reads it
    **{name: name for name in ("full", *hybrid.RULES)},
    "indexer": "indexer",  # trained by the effect of its edges
    "dsa": "indexer:select=top_k,estimator=imitate,detach=1",  # dense warm-up over all keys, then over the selected keys
    "gates": "indexer:estimator=mask",  # straight through
    "concrete": "indexer:estimator=concrete",  # relaxed edges, at a temperature that falls from 1 to 0.1
    "sbm": "sbm",
    **{name: name for name in RIVALS},  # blocks, of which dash, hsa and sas learn through attention itself
    "spartan": "spartan",  # a gate for each pair, straight through
    "index-share": "index-share",  # dsa with one indexer for all layers
}
WITHOUT_OPTIONS = ("routing", *RIVALS, *LAYERS)
TWINS = {name: f"{name}:{FROZEN}" for name in ("routing", "dash", "hsa", "sas", *LAYERS)}  # of others by options
TWINS |= dict.fromkeys(("gates", "concrete"), f"indexer:{FROZEN}")


class SparseOnly(Local):
    """The local gradient for a source that cannot predict all pairs, and so learns nothing while attention is dense."""

    def dense_loss(self, call: AttentionCall) -> Tensor | None:
        """No loss."""
        return None


def load(method: str) -> type[GraphSource]:
    """The class of ``FILE.py:CLASS``, a :class:`~sbm_pyg.GraphSource`."""
    file, _, class_and_options = method.partition(":")
    path, name = Path(file), class_and_options.partition(":")[0]
    way_out = "Name it as in mine.py:MySource."
    require(path.is_file(), "'--chooser' to name a file that exists", repr(file), way_out)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cls = getattr(module, name, None)
    if not (isinstance(cls, type) and issubclass(cls, GraphSource)):
        names = [key for key, value in inspect.getmembers(module, inspect.isclass) if value.__module__ == path.stem]
        raise ValueError(f"Expected {name!r} to be a GraphSource in {file} (got {cls}; there are {names}). {way_out}")
    return cls


def _own(method: str, channels: int, heads: int, density: float) -> tuple[GraphSource, Any]:
    """A user's source, made with those of these arguments that it takes, and its estimator."""
    kind: Any = RIVALS.get(method) or load(method)
    offered: dict[str, Any] = {"channels": channels, "heads": heads, "density": density}
    takes = inspect.signature(kind).parameters
    other = [name for name, value in takes.items() if name not in offered and value.default is value.empty]
    words = f"{kind.__name__} to take no arguments but {', '.join(offered)}"
    require(not other, words, ", ".join(other), "Give the others default values.")
    source = kind(**{name: value for name, value in offered.items() if name in takes})
    learns = any(True for _ in source.parameters())
    usual = (Local() if isinstance(source, LearnedSource) else SparseOnly()) if learns else NoEstimator()
    return source, getattr(kind, "estimator", usual)


def is_own(method: str) -> bool:
    """Whether a name is that of a class in a user's file."""
    return method.partition(":")[0].endswith(".py")


def code_of(methods: list[str]) -> dict[str, str]:
    """A checksum of each user's file, by its name."""
    files = {method.partition(":")[0] for method in methods if is_own(method)}
    return {f"code-of {file}": fingerprint([Path(file).read_bytes()]) for file in sorted(files)}


def twin_of(method: str) -> str | None:
    """The frozen twin of a method that learns to choose, else None.

    >>> twin_of("dsa"), twin_of("gates"), twin_of("window")
    ('dsa:frozen=1', 'indexer:frozen=1', None)
    """
    if method.endswith(FROZEN):
        return None
    if method in TWINS or method in WITHOUT_OPTIONS:
        return TWINS.get(method)
    if is_own(method):
        source, _ = _own(method, 8, 1, 0.5)
        return f"{method}:{FROZEN}" if any(True for _ in source.parameters()) else None
    _, options = hybrid.options_of(METHODS.get(method, method))
    learns = "frozen" in options and not options["frozen"]
    return f"{method}{',' if ':' in method else ':'}{FROZEN}" if learns else None


def make_scheduled_attention(method: str, channels: int, heads: int, density: float, layers: int = 1) -> nn.Module:
    """The causal attention of a method with a source whose target density a :class:`~sbm_pyg.Sparsifier` sets; "full" has no source.

    The model has so many ``layers``; see :func:`share`.
    """
    width, name = channels // heads, method.removesuffix(f":{FROZEN}")
    frozen = name != method
    if is_own(method) or name in RIVALS:
        source, estimator = _own(name, width, heads, density)
        conv = AttentionConv(channels, width, heads, hybrid.Scheduled(source), estimator=estimator, is_causal=True)
        return freeze(conv) if frozen else conv
    if name == "spartan":
        return Spartan(channels, width, heads, learns=not frozen)
    if name == "index-share":
        conv = SharedIndex(channels, width, heads, density, layers)
        return freeze(conv) if frozen else conv
    if name in hybrid.FIXED:
        rule = hybrid.FixedDensity(name, density, width, heads, block=BLOCK)
        if frozen:
            rule.clusters.decay = 1.0  # centroids stay where they began
        return AttentionConv(channels, width, heads, hybrid.Scheduled(rule), estimator="none", is_causal=True)
    kind, options = hybrid.options_of(METHODS.get(name, name))
    made = hybrid.make_causal_attention(kind, channels, heads, density, {**options, "window": 0})
    return freeze(made) if frozen and isinstance(made, AttentionConv) else made


def share(model: nn.Module) -> None:
    """Let the first layer choose for all layers of "index-share"."""
    layers = [part for part in model.modules() if isinstance(part, SharedIndex)]
    for layer in layers[1:]:
        layer.follow(layers[0])


def check(method: str) -> None:
    """Raises a ValueError for a name that is not a method."""
    if is_own(method):
        _own(method, 8, 1, 0.5)
        return
    name = method.removesuffix(f":{FROZEN}")
    names = ", ".join(METHODS)
    require(
        name.partition(":")[0] in {*METHODS, *hybrid.METHODS},
        f"'--choosers' among {names}, or FILE.py:CLASS",
        repr(method),
        "See --help.",
    )
    if name not in WITHOUT_OPTIONS:
        hybrid.options_of(METHODS.get(name, name))
