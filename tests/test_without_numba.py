"""Plain torch on the CPU, where numba cannot be imported: the same graphs, outputs and analysis, and one warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

BLOCKED = """
import sys, warnings
sys.modules["numba"] = None
with warnings.catch_warnings(record=True) as given:
    warnings.simplefilter("always")
    import sbm_pyg
from test_without_numba import measure
import json
print(json.dumps(measure() | {"told": [str(each.message) for each in given if "numba" in str(each.message)]}))
"""


def measure() -> dict[str, Any]:
    """Graphs, outputs, gradients, analysis and the report of this machine, as plain data."""
    import torch

    from sbm_pyg import SBMAttentionConv, analysis, info, make_attention, patterns

    torch.manual_seed(0)
    conv, ptr = (
        SBMAttentionConv(8, 4, heads=2, num_clusters=4, target_density=0.3, dropout=0.1),
        torch.tensor([0, 10, 30]),
    )
    x = torch.randn(30, 8, requires_grad=True)
    out, graph = conv(x, ptr=ptr, seed=1, return_graph=True)
    (grad,) = torch.autograd.grad(out.sum(), x)
    blocks = make_attention("sbm", 8, 4, 2, num_clusters=4, target_density=0.3, block_size=4)
    ring = patterns.window(40, 1) | patterns.random(40, 2, seed=0)
    path = analysis.hamiltonian_path(ring, seed=0).path
    return {
        "graph": [graph.rowptr.tolist(), graph.col.tolist()], "out": out.tolist(), "grad": grad.tolist(),
        "blocks": blocks(x, ptr=ptr, seed=1).tolist(),
        "path": path is not None and analysis.is_hamiltonian_path(ring, path),
        "steps": analysis.spread_steps([patterns.window(40, 1)]), "kernels": info.collect(test=False)["kernels"]["cpu"],
        "self-test": info.self_test()["passed"],
    }  # fmt: skip


def differ(mine: Any, theirs: Any) -> float:
    if isinstance(mine, list):
        return max(differ(*pair) for pair in zip(mine, theirs, strict=True))
    return abs(mine - theirs)


@pytest.mark.slow
def test_everything_runs_without_numba() -> None:
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command, environment = [sys.executable, "-c", BLOCKED], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    without = json.loads(done.stdout)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = measure()
    assert (given["kernels"], without["kernels"]) == ("numba", "plain torch")
    (told,) = without["told"]
    assert told.startswith("numba cannot be imported (")
    assert "Install numba" in told
    for name in ("graph", "path", "steps", "self-test"):
        assert without[name] == given[name], name
    assert without["self-test"] is without["path"] is True
    for name in ("out", "grad", "blocks"):
        assert differ(without[name], given[name]) < 1e-5, name
