"""Whether the values of a tensor may be read now.

In: a tensor or a device. Out: a flag. Not here: checks of the values (``checks``).
"""

from __future__ import annotations

import torch


def captured(where: torch.device) -> bool:
    """Whether a CUDA graph is being captured, which computes nothing before it is replayed."""
    return where.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()
