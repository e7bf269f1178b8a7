"""Counts the operations of a training step of a small layer, forward and backward, and the reads of the host.

Each op of the library counts once, whatever its kernel does, and a view does not count. Checks of values are left out, as
they are on a GPU, so every device has the same counts. As in a training loop, gradients are None before each step.
"""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sbm_pyg import SBMAttentionConv, auxiliary_loss
from sbm_pyg.ops import values

READS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero"}
"""Operations whose result the host needs before it can go on."""


class Operations(TorchDispatchMode):
    """Counts operations and reads of the host while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.reads = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, out = op._opname, op(*args, **(kwargs or {}))
        inputs, outputs = (
            {x.untyped_storage()._cdata for x in tree_leaves(group) if isinstance(x, Tensor)}
            for group in ((args, kwargs), out)
        )
        self.operations += op._schema.is_mutable or not outputs <= inputs  # a view makes nothing
        self.reads += name in READS or (name == "repeat_interleave" and (kwargs or {}).get("output_size") is None)
        return out


def count_step(density: float, device: str = "cpu", is_causal: bool = True) -> dict[str, int]:
    """The counts of the third step of the default layer with two heads of 32 channels over 256 tokens.

    Args:
        density: Target density; 1 is dense attention, which teaches the source.
        device: Where the layer is.
        is_causal: Of the layer.
    """
    torch.manual_seed(0)
    layer = SBMAttentionConv(64, 32, 2, target_density=density, is_causal=is_causal).to(device)
    x, ptr = torch.randn(256, 64, device=device, requires_grad=True), torch.tensor([0, 256], device=device)
    with patch.object(values, "can_read_without_sync", lambda *_: False):
        for seed in range(3):  # the first steps also check offsets and start the running mean
            x.grad = None
            layer.zero_grad()  # as a training loop does, so that nothing is added to earlier gradients
            with Operations() as forward:
                out = layer(x, ptr=ptr, seed=seed)
            ones = torch.ones_like(out)
            losses = [loss for loss in (auxiliary_loss(layer),) if loss.requires_grad]
            with Operations() as backward:
                torch.autograd.backward([out, *losses], [ones, *(None for _ in losses)])
    return {"forward": forward.operations, "backward": backward.operations, "reads": forward.reads + backward.reads}
