"""The examples are users of the package: they import its public names and no others."""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import sbm_pyg

EXAMPLES = Path(sbm_pyg.__file__).parents[1] / "examples"
FILES = sorted(EXAMPLES.rglob("*.py"))


def private_names(source: str) -> Iterator[str]:
    """Yields what a program imports of the package that is neither a public module nor in a module's ``__all__``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found: list[tuple[str, list[str]]] = [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [(str(node.module), [alias.name for alias in node.names])]
        else:
            continue
        for module, names in found:
            if module.partition(".")[0] != "sbm_pyg":
                continue
            if any(part.startswith("_") for part in module.split(".")):
                yield module
                continue
            imported = importlib.import_module(module)
            modules = {
                known.name
                for known in pkgutil.iter_modules(getattr(imported, "__path__", []))
                if not known.name.startswith("_")
            }
            public = {*getattr(imported, "__all__", ()), *modules}
            yield from (f"{module}.{name}" for name in names if name not in public)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_programs_import_public_names_alone(path: Path) -> None:
    assert not [*private_names(path.read_text())]


def test_the_check_finds_private_names() -> None:
    source = """
import sbm_pyg._secret
from sbm_pyg import SBM, _secret, analysis, nonsense
from sbm_pyg.sources.sbm import SBM, CLUSTER_INITS
from sbm_pyg.ops import cpu, edge_dot
"""
    assert [*private_names(source)] == [
        "sbm_pyg._secret", "sbm_pyg._secret", "sbm_pyg.nonsense", "sbm_pyg.sources.sbm.CLUSTER_INITS",
    ]  # fmt: skip
    assert len(FILES) > 20
