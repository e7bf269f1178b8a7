"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


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
    law = ["--preset", "laptop", "--train", "50", "--val", "20", "--test", "30", "--min-length", "8", "--max-length", "24"]
    lra_tasks.main(["generate", "--out", str(folder), *law])
    return folder
