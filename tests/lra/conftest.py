"""Fixtures of the tests of ``examples/lra``."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of short ListOps, 50 trees to train on, 20 to validate and 30 to test."""
    from examples.lra.data import listops

    folder = tmp_path_factory.mktemp("data") / "listops"
    law = {"max_depth": 2, "max_args": 30, "min_length": 8, "max_length": 24, "operator_probability": 1.0}
    listops.generate(folder, listops.Parameters(train=50, val=20, test=30, **law), progress=False)  # type: ignore[arg-type]
    return folder


@pytest.fixture(scope="session")
def untrained() -> Callable[..., Path]:
    """Makes what the trainer leaves of a model of ListOps that has learned nothing: a folder, its data, settings of the model."""
    from examples.common.runs import write_checkpoint
    from examples.lra.data.tasks import TASKS
    from examples.lra.model import Classifier
    from examples.lra.settings import PRESETS, Plan

    def make(folder: Path, data: Path, **changes: Any) -> Path:
        folder.mkdir()
        small: dict[str, Any] = {"channels": 16, "head_channels": 8, "ffn_channels": 16, "num_clusters": 8}
        settings = dataclasses.replace(PRESETS["listops"]["laptop"].settings, **small | changes)
        torch.manual_seed(0)
        weights = Classifier(TASKS["listops"], settings).state_dict()
        state = {"model": weights, "run": dataclasses.asdict(settings)}
        write_checkpoint(folder / "best.ckpt", state)
        Plan(task="listops", preset="laptop", data=str(data), settings=settings, directory="").write(
            folder / "settings.json"
        )
        return folder

    return make
