"""What is kept of a tensor, and when it is made anew."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from sbm_pyg.ops import memo
from sbm_pyg.ops.memo import TensorMemo
from sbm_pyg.ops.reference.edges import edge_dot_backward


class Made:
    """Something that is made of tensors and numbers, and counted."""

    count = 0

    def __init__(self, x: Tensor, *given: Any) -> None:
        Made.count += 1


@pytest.fixture(autouse=True)
def uncounted() -> None:
    Made.count = 0


def test_it_is_made_once_for_the_same_arguments() -> None:
    kept, x, other = TensorMemo(), torch.arange(3), torch.arange(2)
    first = kept.get(Made, x, other, 4)
    assert kept.get(Made, x, other, 4) is first
    assert Made.count == 1
    for given in ((other.clone(), 4), (other, 5), (other, other), (0, 4), (other,)):
        assert kept.get(Made, x, *given) is not first
    assert Made.count == 6


@pytest.mark.parametrize("changed", [0, 1])
def test_it_is_made_anew_of_tensors_that_were_written_into(changed: int) -> None:
    kept, tensors = TensorMemo(), (torch.arange(3), torch.arange(2))
    first = kept.get(Made, *tensors)
    tensors[changed].add_(1)
    assert kept.get(Made, *tensors) is not first


@pytest.mark.parametrize("changed", [0, 1])
def test_it_is_made_anew_where_numpy_wrote(changed: int) -> None:
    """Of which no version tells."""
    kept, tensors = TensorMemo(), (torch.arange(3), torch.arange(2))
    first = kept.get(Made, *tensors)
    tensors[changed].numpy()[0] = 5
    again = kept.get(Made, *tensors)
    assert again is not first
    assert kept.get(Made, *tensors) is again


def test_on_a_device_its_version_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values would have to be waited for."""
    monkeypatch.setattr(memo, "_writable", lambda x: False)
    kept, x = TensorMemo(), torch.arange(3)
    first = kept.get(Made, x)
    assert kept.get(Made, x) is first
    x.add_(1)
    assert kept.get(Made, x) is not first


def test_it_goes_with_the_tensor() -> None:
    kept, x = TensorMemo(), torch.arange(3)
    gone = weakref.ref(kept.get(Made, x))
    assert gone() is not None
    del x
    gc.collect()
    assert gone() is None


def test_nothing_is_kept_in_inference_mode() -> None:
    """There tensors do not tell whether they were written into."""
    with torch.inference_mode():
        x, kept = torch.arange(3), TensorMemo()
        assert kept.get(Made, x) is not kept.get(Made, x)


def test_nothing_is_kept_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "is_capturing", lambda device: True)
    kept, x = TensorMemo(), torch.arange(3)
    captured = kept.get(Made, x)
    monkeypatch.undo()
    assert kept.get(Made, x) is not captured


def test_gradients_in_inference_mode() -> None:
    """By the reference, which orders edges by key."""
    with torch.inference_mode():
        x, rows = torch.ones(1, 2, 3), (torch.tensor([0, 1, 2]), torch.tensor([1, 0]))
        grads = edge_dot_backward(torch.ones(2), x, 2 * x, *rows, True, True)
    assert [grad.mean().item() for grad in grads] == [2, 1]


def test_edges_by_key_are_those_of_now() -> None:
    """Also where numpy wrote into the keys of a graph."""
    x, rowptr, col = torch.ones(1, 2, 3), torch.tensor([0, 1, 2]), torch.tensor([0, 1])
    for _ in range(2):
        grad = edge_dot_backward(torch.tensor([1.0, 2.0]), x, x, rowptr, col, False, True)[1]
        assert grad[0, :, 0].tolist() == ([1.0, 2.0] if col[0] == 0 else [2.0, 1.0])
        col.numpy()[:] = [1, 0]
