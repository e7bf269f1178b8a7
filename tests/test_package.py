"""The package installs what it imports and is found, the conda recipe is that of pyproject.toml, and the page on PyPI leads to files that there are."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import sbm_pyg
from examples.arena import report
from examples.common.tables import Row

ROOT = Path(sbm_pyg.__file__).parents[1]
CONDA = {"torch": "pytorch", "torch-geometric": "pytorch_geometric"}  # names that differ on conda-forge


def conda(requirement: str) -> str:
    """A requirement of pip, as conda writes it."""
    match = re.fullmatch(r"([\w-]+)([<>=].*)", requirement)
    assert match, requirement
    return f"{CONDA.get(match[1], match[1])} {match[2]}"


def test_the_conda_recipe_states_what_pyproject_states() -> None:
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, python = stated["project"], f"python {stated['project']['requires-python']}"
    assert recipe["package"]["name"] == project["name"]
    assert recipe["context"]["version"] == sbm_pyg.__version__
    assert sorted(recipe["requirements"]["run"]) == sorted([python, *map(conda, project["dependencies"])])
    assert sorted(recipe["requirements"]["host"]) == sorted(
        [python, "pip", *map(conda, stated["build-system"]["requires"])]
    )
    about = recipe["about"]
    assert (about["summary"], about["license"]) == (project["description"], project["license"])
    assert (ROOT / about["license_file"]).is_file()


def test_the_docs_extra_brings_all_that_modules_import() -> None:
    """Pages show docstrings, for which Sphinx imports the modules."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    versions = {line for line in extras["docs"] if line.partition(">")[0] in ("lightning", "transformers")}
    assert versions <= {*extras["examples"]}
    stated = {re.split(r"[<>=]", line)[0].replace("-", "_") for line in project["dependencies"] + extras["docs"]}
    stated |= {"llvmlite", *sys.stdlib_module_names}  # llvmlite: a part of numba
    imported = set()
    for path in Path(sbm_pyg.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    assert {"torch_geometric", "lightning", "transformers", "triton"} <= imported
    assert imported - stated == {"triton"}  # comes with torch, and is imported only where it is there


def test_python_finds_the_package_from_the_folder_that_holds_a_clone(tmp_path: Path) -> None:
    """A folder of the package's name, without modules, is a namespace package to Python where nothing better is on its path."""
    (tmp_path / "sbm_pyg").mkdir()
    program = "import importlib.util, json; print(json.dumps(importlib.util.find_spec('sbm_pyg').origin))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    origin = json.loads(done.stdout)
    assert origin is not None, "sbm_pyg is a namespace package here: install it again by `pip install -e .`"
    assert Path(origin).name == "__init__.py"


def test_links_of_the_readme_lead_to_files_on_pypi_too() -> None:
    script = runpy.run_path(str(ROOT / ".ci" / "readme.py"))
    page, code = (ROOT / "README.md").read_text(), script["CODE"]
    rewritten = script["with_addresses"](page, "owner/name", "v0.1.0")
    assert code.findall(rewritten) == code.findall(page)
    targets = re.findall(r'\]\(([^)]+)\)|<img src="([^"]+)"', code.sub("", rewritten))
    pages, pictures = ([target for target in kind if target] for kind in zip(*targets, strict=True))
    assert len(pages) > 20
    assert len(pictures) > 1
    assert all(target.startswith("https://") for target in pages + pictures)
    for target in pages:
        if target.startswith("https://github.com/"):
            path = target.removeprefix("https://github.com/owner/name/blob/v0.1.0/").partition("#")[0]
            assert (ROOT / path).is_file(), path
    for target in pictures:
        assert (ROOT / target.removeprefix("https://raw.githubusercontent.com/owner/name/v0.1.0/")).is_file(), target
    assert script["with_addresses"](rewritten, "owner/name", "v0.1.0") == rewritten


def test_pages_show_every_figure_and_the_pictures_are_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = set()
    for page in pages:
        for names in re.findall(r'!\[[^]]*\]\(([^)]+\.png)\)|<img src="([^"]+)"', page.read_text()):
            shown |= {(page.parent / name).resolve() for name in names if name}
    assert {*(ROOT / "docs" / "figures").resolve().iterdir()} <= shown
    assert all(path.is_file() for path in shown)


def test_the_release_rewrites_the_readme_before_it_builds() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    commands = [step.get("run") for step in workflow["jobs"]["build"]["steps"]]
    assert commands.index("python .ci/readme.py") + 1 == commands.index("python -m build")


def test_the_check_of_the_main_job_reads_its_table() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert "main" in workflow["jobs"]["steps"]["strategy"]["matrix"]["step"]
    blocks = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks[0].splitlines() == ['pip install -e ".[examples]"', "python -m examples.recall"]

    def rows(method: str, density: float, accuracy: float) -> list[Row]:
        names = {"task": "recall", "method": method, "start": "dense", "density": density, "seed": 0.0, "step": 400.0}
        numbers = ("density_0", "density_1", "answer_any", "train_ms", "infer_ms")
        return [names | {"accuracy": accuracy} | dict.fromkeys(numbers, 0.1)]

    full, sbm, sparse = rows("full", 1.0, 1.0), rows("sbm", 0.05, 0.9978), rows("sbm", 0.015, 0.96)
    script = runpy.run_path(str(ROOT / ".ci" / "accuracy.py"))
    good = f"wrote a.png\n{report.tables(full + sbm)}\n"
    assert script["accuracies"](good) == {"full 100 %": 100.0, "sbm 5 %": 99.8}
    script["check"](good)
    wrong = {
        "a table of methods": "## recall\n\nTraceback\n",
        r"runs of 'sbm' .* \(got \{\}\)": report.tables(full),
        r"runs of 'full' .* \(got \{\}\)": report.tables(sbm),
        r"at least 99 % \(got \{'sbm 1.5 %': 96.0\}\)": report.tables(full + sparse),
        r"\{'sbm 5 %': 99.8, 'sbm 1.5 %': 96.0\}": report.tables(full + sbm + sparse),
        r"\{'full 100 %': nan\}": good.replace("100.0", "nan", 1),
    }
    for message, printed in wrong.items():
        with pytest.raises(ValueError, match=message):
            script["check"](printed)
