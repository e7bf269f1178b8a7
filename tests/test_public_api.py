"""The public names, what importing costs, and that the modules import in one direction only."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sbm_pyg

ROOT = Path(sbm_pyg.__file__).parent
ORDER = [
    "version",
    "ops",
    "auxiliary",
    "following",
    "progress",
    "ragged",
    "rows",
    "graph",
    "blocks",
    "exchange",
    "choice",
    "patterns",
    "pairs",
    "selectors",
    "predictors",
    "sparsefinder",
    "sbm",
    "sampling",
    "indexer",
    "estimators",
    "dcmm",
    "normalizers",
    "propagation",
    "attention",
    "gold",
    "dense",
]
ORDER += ["multihead", "pretrained", "models", "walks", "hamiltonian", "universality", "analysis", "plots", "info"]
OPTIONAL = [
    "lightning",
    "matplotlib",
    "scipy",
    "sklearn",
    "ortools",
    "entmax",
    "torch_sparse",
    "torch_scatter",
    "torchmetrics",
    "tensorboard",
]
OPTIONAL += ["sphinx", "pytest", "hypothesis", "transformers", "triton"]


def test_public_names_are_listed_and_documented() -> None:
    assert sbm_pyg.__all__ == sorted(sbm_pyg.__all__, key=lambda name: (name.islower(), not name.isupper(), name))
    for name in sbm_pyg.__all__:
        thing = getattr(sbm_pyg, name)
        assert inspect.getdoc(thing), name
        if inspect.isclass(thing):
            ours = [base for base in thing.__mro__ if base.__module__.startswith("sbm_pyg")]
            for method, member in (item for base in ours for item in vars(base).items()):
                if (
                    not method.startswith("_")
                    and callable(member)
                    and method not in ("forward", "message", "propagate", "collect", "extra_repr")
                ):
                    assert inspect.getdoc(member), f"{name}.{method}"


@pytest.mark.parametrize("module", [path.stem for path in ROOT.glob("*.py") if path.stem != "__init__"])
def test_modules_import_upwards_only(module: str) -> None:
    tree = ast.parse((ROOT / f"{module}.py").read_text())
    allowed = ORDER[: ORDER.index(module)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
            assert all(name in allowed for name in names), f"{module} imports {names}"


def test_ops_import_none_of_ours() -> None:
    for path in (ROOT / "ops").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level < 2, path
                assert not (node.module or "").startswith("sbm_pyg"), path


@pytest.mark.slow
def test_import_needs_no_optional_package() -> None:
    code = f"import sys\nfor name in {OPTIONAL}: sys.modules[name] = None\nimport sbm_pyg"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_import_loads_no_optional_package_and_is_quick() -> None:
    """Even where they are installed. CPU time, since the clock also counts what other processes do."""
    code = """
import sys, time, torch, torch_geometric
before, start = set(sys.modules), time.process_time()
import sbm_pyg
print(time.process_time() - start)
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    seconds, loaded = done.stdout.splitlines()
    assert {"sbm_pyg", "numba"} <= {*loaded.split()}
    assert not {*OPTIONAL} & {*loaded.split()}
    assert float(seconds) < 2


def test_type_hints_are_for_others_too() -> None:
    assert (ROOT / "py.typed").is_file()
    assert tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"] == {
        "sbm_pyg": ["py.typed"]
    }
