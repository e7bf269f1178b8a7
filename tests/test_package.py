"""The recipe of the conda package is the package of pyproject.toml."""

from __future__ import annotations

import re
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
