"""Operations of a training step of the default layer; later work may lower these numbers, and nothing may raise them."""

import sys
from types import FrameType
from typing import Any

import pytest
import torch

from examples.benchmarks.operations import Operations, count_step
from sbm_pyg import SBMAttentionConv
from sbm_pyg.ops import checks, values


@pytest.mark.parametrize(
    ("density", "is_causal", "forward", "backward", "reads"),
    [(0.05, False, 41, 37, 0), (0.05, True, 41, 37, 0), (1.0, False, 94, 39, 1), (1.0, True, 98, 39, 1)],
)
def test_a_step_takes_few_operations(density: float, is_causal: bool, forward: int, backward: int, reads: int) -> None:
    """Outside of the ops of the library the host reads one number in the dense phase: that of pairs to learn from."""
    counts = count_step(density, is_causal=is_causal)
    assert counts["forward"] <= forward
    assert counts["backward"] <= backward
    assert counts["reads"] <= reads


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_step_checks_what_comes_in_and_not_what_the_library_made(is_causal: bool) -> None:
    """Calls of functions of the modules of checks and of values, in a training step of a layer over 64 tokens."""
    layer = SBMAttentionConv(32, 32, 4, 8, is_causal=is_causal)
    x, ptr, files, count = torch.randn(64, 32), torch.tensor([0, 20, 64]), (checks.__file__, values.__file__), 0

    def listen(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename in files

    layer(x, ptr=ptr).sum().backward()
    before = sys.getprofile()
    sys.setprofile(listen)
    try:
        layer(x, ptr=ptr).sum().backward()
    finally:
        sys.setprofile(before)
    assert 0 < count <= 83


def test_what_counts() -> None:
    x, ptr, count = torch.arange(6.0), torch.tensor([0, 6]), torch.tensor([2])
    for call, operations, reads in (
        (lambda: x.view(2, 3).T[0], 0, 0),
        (lambda: x.add_(1), 1, 0),
        (lambda: (x * 2).relu(), 2, 0),
        (lambda: float(x.sum()), 1, 1),
        (lambda: torch.repeat_interleave(count), 1, 1),
        (lambda: torch.ops.sbm_pyg.segment_top_k(x, ptr, count), 1, 0),
    ):
        with Operations() as counted:
            call()
        assert (counted.operations, counted.reads) == (operations, reads)
