"""Operations of a training step of the default layer; later work may lower these numbers, and nothing may raise them."""

import pytest
import torch

from examples.benchmarks.operations import Operations, count_step


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
