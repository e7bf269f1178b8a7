"""The public interface as text: a change of a name, an argument or a default shows as a change of a file.

python -m tests.test_signatures     writes the file anew; users of a release read of the change in docs/changelog.md
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sbm_pyg
from sbm_pyg.layers.named import SOURCES

INTERFACE = Path(__file__).with_name("signatures.txt")
SOURCE_MODULES = sorted(
    {part.__module__ for source in SOURCES.values() for part in source.takes or () if ".sources." in part.__module__}
)
MODULES = (
    "analysis", "analysis.plots", "info", "ops", *(name.removeprefix("sbm_pyg.") for name in SOURCE_MODULES),
    "sparsefinder", "sparsefinder.ground_truth", "sparsefinder.predictors", "training.estimators", "training.gradients",
)  # fmt: skip


def arguments(call: Any) -> str:
    """Names and defaults of arguments; of a default that does not print alike everywhere, its type."""
    signature = inspect.signature(call)
    given = [
        each.replace(annotation=each.empty)
        if isinstance(each.default, int | float | str | tuple | type | None)
        else each.replace(annotation=each.empty, default=type(each.default).__name__)
        for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=given, return_annotation=signature.empty))


def interface() -> Iterator[str]:
    """A line for each public function, class and method, and for the sizes of sources by name."""
    for name in ("sbm_pyg", *(f"sbm_pyg.{each}" for each in MODULES)):
        module = importlib.import_module(name)
        for public in sorted(module.__all__):
            thing = getattr(module, public)
            elsewhere = module is not sbm_pyg and getattr(sbm_pyg, public, None) is thing
            if elsewhere or not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            yield f"{name}.{public}{arguments(thing)}"
            for method, member in vars(thing).items() if inspect.isclass(thing) else ():
                call = getattr(member, "__func__", member)  # of a class method
                written = inspect.isfunction(call) and call.__module__ == thing.__module__  # PyG adds others to layers
                if written and not method.startswith("_"):
                    yield f"{name}.{public}.{method}{arguments(call)}"
    yield from (f"source {name!r}: {dict(sizes)}" for name, (_, _, sizes) in SOURCES.items() if sizes)


def test_the_interface_is_as_written() -> None:
    lines, written = [*interface()], INTERFACE.read_text().splitlines()
    assert len(lines) > 300
    assert sorted({*lines} ^ {*written}) == []
    assert lines == written


if __name__ == "__main__":
    INTERFACE.write_text("\n".join(interface()) + "\n")
