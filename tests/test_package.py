"""The recipe of the conda package is the package of pyproject.toml, and the page on PyPI leads to files that there are."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import yaml

import sbm_pyg

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


def test_the_release_rewrites_the_readme_before_it_builds() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    commands = [step.get("run") for step in workflow["jobs"]["build"]["steps"]]
    assert commands.index("python .ci/readme.py") + 1 == commands.index("python -m build")
