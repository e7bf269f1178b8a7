"""``python -m sbm_pyg.info``: what it says is so, and its self-test notices broken kernels."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric

import sbm_pyg
from sbm_pyg import info, ops

pytestmark = pytest.mark.slow  # they start Python anew, and compile


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "sbm_pyg.info", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    done = run("--json", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_versions_are_those_in_use(told: dict[str, Any]) -> None:
    versions = told["versions"]
    assert versions["sbm_pyg"] == sbm_pyg.__version__ == importlib.metadata.version("sbm_pyg")
    assert versions["torch"] == torch.__version__
    assert versions["torch-geometric"] == torch_geometric.__version__
    assert versions["python"] == sys.version.split()[0]
    assert None not in versions.values()


def test_threads_and_devices(told: dict[str, Any]) -> None:
    assert told["threads"]["torch"] == 1
    assert told["threads"]["environment"]["OMP_NUM_THREADS"] == "1"
    assert told["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert told["machine"]["load"] >= 0
    assert told["threads"]["advice"] is None  # one thread waits for none
    assert told["cuda"]["available"] == torch.cuda.is_available()
    assert len(told["cuda"]["devices"]) == torch.cuda.device_count()


def test_optional_packages(told: dict[str, Any]) -> None:
    assert told["optional"]["matplotlib"] == importlib.metadata.version("matplotlib")
    assert (told["optional"]["torch-sparse"] is not None) == torch_geometric.typing.WITH_TORCH_SPARSE
    assert info._version("no-such-package-anywhere") is None


def test_caches_hold_compiled_kernels(told: dict[str, Any]) -> None:
    assert told["caches"]
    for path, cache in told["caches"].items():
        assert cache["writable"] == os.access(path, os.W_OK)
        assert cache["files"] > 0
        assert 0 < cache["bytes"] <= sum(file.stat().st_size for file in Path(path).iterdir())


def test_self_test_passes_again_and_again(told: dict[str, Any]) -> None:
    assert told["self_test"]["passed"]
    assert told["self_test"]["cpu"]["same_edges"]
    assert 0 < told["self_test"]["cpu"]["gradients"] < 1e-5
    again = info.self_test()
    assert {**again, "seconds": 0} == {**told["self_test"], "seconds": 0}


def test_instructions_without_vectors_are_told() -> None:
    done = run("--json", "--no-test", NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["kernels"]["processor"] == "generic"
    assert told["kernels"]["instructions"] == "scalar"
    assert told["self_test"] is None


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("sample_sbm", lambda result: (result[0], result[1].flip(0))),
        ("edge_attention", lambda result: (result[0] * 1.001, result[1])),
        ("edge_attention", lambda result: (result[0] * float("nan"), result[1])),
        (
            "edge_attention",
            lambda result: (result[0] + 0.001 * (result[0].detach() - result[0]), result[1]),
        ),  # gradients alone
    ],
)
def test_self_test_notices_broken_kernels(
    name: str, broken: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = getattr(ops, name)
    monkeypatch.setattr(ops, name, lambda *args: broken(whole(*args)))
    assert info.main([]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("load", "threads", "policy", "busy"),
    [(2.0, 2, None, True), (0.6, 2, None, True), (0.4, 2, None, False), (3.0, 1, None, False),
     (3.0, 2, "PASSIVE", False), (3.0, 2, "active", True), (None, 2, None, False), (None, 3, None, True)],
)  # fmt: skip
def test_a_busy_machine_is_told(
    load: float | None, threads: int, policy: str | None, busy: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if policy is None:
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    if load is None:
        monkeypatch.delattr(os, "getloadavg")
    else:
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 9.0, 9.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert info.main(["--no-test"]) == 0
    text = capsys.readouterr().out
    assert ("`export OMP_WAIT_POLICY=passive`" in text) == busy
    assert f"{threads} threads and a load of {load or 0:.1f} share 2 cores" in text or not busy
    assert re.search(rf"^  load +{load or 'none'}$", text, re.MULTILINE)


def test_a_missing_cache_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(info.threads, "_kernels", [])
    info.main(["--no-test"])
    assert "set NUMBA_CACHE_DIR" in capsys.readouterr().out
