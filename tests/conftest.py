"""Fixtures that several test files share, and the sample data that some of them need."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the kernels that most tests call once, before workers would each do so; and share the cores among workers."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if hasattr(session.config, "workerinput"):
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    elif session.config.getoption("numprocesses", None) and not session.config.option.collectonly:
        from sbm_pyg.info import self_test

        self_test()


SAMPLES = Path(os.environ.get("SBM_PYG_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture
def sample() -> Callable[..., Path]:
    """Finds a file or folder of the sample data, which hold the parts named; skips the test where one is missing."""

    def find(place: str, *parts: str) -> Path:
        missing = [path for path in (SAMPLES / place, *(SAMPLES / place / part for part in parts)) if not path.exists()]
        if missing:
            pytest.skip(
                f"no sample data in {missing[0]}; set SBM_PYG_DATA to a folder that holds {missing[0].relative_to(SAMPLES)}"
            )
        return SAMPLES / place

    return find


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Much small work: on a busy machine, threads would wait for each other most of the time. Leaves no trace in random numbers."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of short ListOps, 50 trees to train on, 20 to validate and 30 to test."""
    import lra_tasks  # which few test files need

    folder = tmp_path_factory.mktemp("data") / "listops"
    law = [
        "--preset",
        "laptop",
        "--train",
        "50",
        "--val",
        "20",
        "--test",
        "30",
        "--min-length",
        "8",
        "--max-length",
        "24",
    ]
    lra_tasks.main(["generate", "--out", str(folder), *law])
    return folder


@pytest.fixture(scope="session")
def untrained() -> Callable[..., Path]:
    """Makes what the trainer leaves of a model of ListOps that has learned nothing: a folder, its data, settings of the model."""
    import lra
    from lra_checkpoints import write_checkpoint
    from lra_tasks import TASKS

    def make(folder: Path, data: Path, **changes: Any) -> Path:
        folder.mkdir()
        small: dict[str, Any] = {"channels": 16, "head_channels": 8, "ffn_channels": 16, "num_blocks": 8}
        settings = dataclasses.replace(TASKS["listops"].presets["laptop"].settings, **small | changes)
        torch.manual_seed(0)
        write_checkpoint(folder / "best.ckpt", {"state_dict": lra.Classifier(TASKS["listops"], settings).state_dict()})
        plan = {"task": "listops", "preset": "laptop", "data": str(data), "settings": dataclasses.asdict(settings)}
        (folder / "settings.json").write_text(json.dumps(plan))
        return folder

    return make
