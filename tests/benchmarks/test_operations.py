"""Operations of a training step of the default layer; later work may lower these numbers, and nothing may raise them."""

import pytest
import torch

from examples.benchmarks.operations import Operations, count_step


@pytest.mark.parametrize(
    ("density", "is_causal", "forward", "backward"),
    [(0.05, False, 130, 104), (0.05, True, 142, 104), (1.0, False, 152, 68), (1.0, True, 160, 68)],
)
def test_a_step_takes_few_operations(density: float, is_causal: bool, forward: int, backward: int) -> None:
    """The host reads one number outside of the ops of the library: whether offsets end at the number of tokens."""
    counts = count_step(density, is_causal=is_causal)
    assert counts["forward"] <= forward
    assert counts["backward"] <= backward
    assert counts["reads"] <= 1


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
