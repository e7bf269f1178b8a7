"""Fixtures that several test files share, and the sample data that some of them need."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tqdm import tqdm

# CI sets HYPOTHESIS_PROFILE=ci.
settings.register_profile("quick", max_examples=30, deadline=None)
settings.register_profile("ci", max_examples=100, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# No thread of a progress bar wakes up, and collects garbage, while another is inside torch: a run hung in an export once.
tqdm.monitor_interval = 0


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the kernels that most tests call once, before workers would each do so; and share the cores among workers."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if hasattr(session.config, "workerinput"):
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    elif session.config.getoption("numprocesses", None) and not session.config.option.collectonly:
        from sbm_pyg.info import self_test

        self_test()
        session.config.option.loadscopereorder = False  # files begin in the order below


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what tests the programs; and begins with the longest files, after which no worker has to wait for another.

    Triton's interpreter takes minutes for a single test, other files the longer the more tests they have.
    """
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (not item.path.name.startswith("test_triton"), -sizes[item.path]))
    if part := os.environ.get("SBM_PYG_PART"):  # of `test_triton.interpret`
        number, parts = map(int, part.split("/"))
        items[:] = items[number::parts]
    for item in items:
        if tests_a_program(item.path):
            item.add_marker(pytest.mark.examples)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not import the tests of programs if none of them will run."""
    return True if "not examples" in config.option.markexpr and tests_a_program(collection_path) else None


def tests_a_program(path: Path) -> bool:
    folders = {Path(__file__).parent / name for name in ("lra", "benchmarks")}
    return path in folders or bool(folders & {*path.parents}) or path.name in PROGRAMS


PROGRAMS = [
    f"test_{name}.py"
    for name in (
        "arena", "dcmm_program", "glue", "graphs_program", "molecules", "pictures", "recall", "recipes", "runs",
        "sparsefinder_program",
    )
]  # fmt: skip
SAMPLES = Path(os.environ.get("SBM_PYG_DATA", Path(__file__).parents[2] / "shared" / "data"))


@pytest.fixture(scope="session", autouse=True)
def _small_work_is_shared_out() -> None:
    """Test cases are small, and threads are tested by them."""
    from sbm_pyg.ops.cpu import threads

    threads.MIN_STEPS_PER_TASK = 1


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


@pytest.fixture
def quiet_transformers() -> Iterator[None]:
    """Without the library's own remarks, and with equal random numbers in each test."""
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    transformers.logging.set_verbosity(before)
