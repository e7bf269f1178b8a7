"""The public names, what importing costs, and that the modules import in one direction only."""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest

import sbm_pyg
from sbm_pyg.ops import schemas

ROOT = Path(sbm_pyg.__file__).parent
ROOMS = ("progress", "ops", "graphs", "sources", "training", "layers", "models", "info")  # each imports those before it
WINGS = "analysis", "integrations", "sparsefinder"  # imported when asked, by nothing else in the library
OPTIONAL = [
    "lightning", "matplotlib", "scipy", "sklearn", "ortools", "entmax", "torch_sparse", "torch_scatter", "torchmetrics",
]  # fmt: skip
OPTIONAL += ["sphinx", "pytest", "hypothesis", "transformers", "accelerate", "triton"]
OPTIONAL += ["huggingface_hub"]  # which models need, and takes a tenth of a second to import


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


def test_options_that_are_passed_on_are_described() -> None:
    layer: Any = sbm_pyg.SBMAttentionConv
    for name in inspect.signature(layer).parameters:
        assert re.search(rf"^ {{8}}(\*\*|\w+, )*{name}(, \w+)*: \w", layer.__doc__, re.MULTILINE), name


def imported(path: Path) -> set[str]:
    """The modules of the library that a file imports, as dotted names below ``sbm_pyg``; names count as their module."""
    package, found = [*path.relative_to(ROOT).parent.parts], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            for name in [alias.name for alias in node.names]:
                parts = [part for part in (*base, name) if part]
                while parts and not any(ROOT.joinpath(*parts).with_suffix(end).exists() for end in (".py", "")):
                    parts.pop()
                found.add(".".join(parts))
    return found - {""}


def files(*folders: str) -> list[str]:
    return [
        path.relative_to(ROOT).with_suffix("").as_posix()
        for folder in folders
        for path in sorted(ROOT.glob(f"{folder}/*.py"))
        if path.stem != "__init__"
    ]


@pytest.mark.parametrize("name", files(".", "graphs", "sources", "training", "layers", "models", *WINGS))
def test_rooms_import_upwards_only(name: str) -> None:
    room = name.split("/")[0]
    allowed = {room, *(ROOMS if room in WINGS else ROOMS[: ROOMS.index(room)])}
    assert {module.split(".")[0] for module in imported(ROOT / f"{name}.py")} <= allowed


def test_modules_import_without_circles() -> None:
    modules = {name.replace("/", "."): imported(ROOT / f"{name}.py") for name in files(".", *ROOMS[1:], *WINGS)}
    graphlib.TopologicalSorter(modules).prepare()


@pytest.mark.parametrize("name", files("ops", "ops/*"))
def test_ops_import_none_of_ours_and_shelves_only_the_reference(name: str) -> None:
    """Kernels of one device know nothing of another's."""
    shelf = name.split("/")[1] if name.count("/") == 2 else None
    for each in imported(ROOT / f"{name}.py"):
        assert each.startswith("ops"), f"{name} imports {each}"
        other = each.split(".")[1] if each.count(".") == 2 else None
        assert shelf is None or other in (None, "reference", shelf), f"{name} imports {each}"


def test_shelves_have_equal_titles() -> None:
    """What computes an op is in the file of the same name on each shelf."""
    for op, (file, kernels) in schemas.KERNELS.items():
        for shelf in ("reference", *kernels):
            assert f"def {op}(" in (text := (ROOT / "ops" / shelf / f"{file}.py").read_text()) or f"\n{op} = " in text
        for shelf in {"cpu", "cuda"} - {*kernels}:
            path = ROOT / "ops" / shelf / f"{file}.py"
            assert not path.exists() or f"def {op}(" not in path.read_text(), f"{op} has a kernel that nothing calls"


@pytest.mark.slow
def test_attention_on_the_cpu_needs_no_optional_package() -> None:
    """Triton neither, nor the kernels for GPUs."""
    code = f"""
import sys
for name in {OPTIONAL}: sys.modules[name] = None  # any import of it is an error
import torch
from sbm_pyg import ops, patterns
graph, x = patterns.full(3), torch.ones(1, 3, 2, requires_grad=True)
ops.edge_attention(x, x, x, graph.rows)[0].sum().backward()
print(sum(name.startswith("sbm_pyg.ops.cuda.") for name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "0", done.stderr


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


def test_a_name_is_defined_in_one_module_but_for_ops_and_what_serves_another_library() -> None:
    where: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            for target in targets:
                name = getattr(target, "id", getattr(target, "name", "__"))
                if not name.startswith("__"):
                    where.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    ours = {
        "replace_attention",
        "restore_attention",
        "SparsifierCallback",
    }  # the same for models and trainers of other libraries
    for name, modules in where.items():
        if len(modules) > 1 and name not in ours:
            assert name in schemas.__dict__, f"{name} is defined in {sorted(modules)}"
            assert all(module.startswith("ops/") for module in modules), f"{name} is defined in {sorted(modules)}"


def test_records_do_not_change() -> None:
    """Classes that are made of fields alone are frozen, so that what was checked stays true."""
    found = {
        each
        for name in files(".", "sources", "layers", "analysis", "sparsefinder")
        for each in vars(importlib.import_module(f"sbm_pyg.{name.replace('/', '.')}")).values()
        if dataclasses.is_dataclass(each) and isinstance(each, type) and each.__module__.startswith("sbm_pyg")
    }
    assert len(found) > 10
    changing = [each for each in found if not cast(Any, each).__dataclass_params__.frozen]
    assert not changing
