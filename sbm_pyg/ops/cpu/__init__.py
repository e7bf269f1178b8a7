"""numba kernels for the CPU, in files named as those of plain torch (:mod:`sbm_pyg.ops.reference`).

In and out: the tensors of the op schemas in :mod:`sbm_pyg.ops`, on the CPU. Each kernel is compiled by its first call.
Where numba cannot be imported, the CPU runs plain torch, as other devices do.
"""

from __future__ import annotations

import warnings

INSTALLED = True
"""Whether numba can be imported."""

try:
    import numba  # noqa: F401
except ImportError as error:  # it is not installed, or not for this version of Python or NumPy
    INSTALLED = False
    warnings.warn(
        f"numba cannot be imported ({error}), so sbm_pyg computes in plain torch on the CPU. Results are the same, but "
        "a step takes 25 to 200 times as long. Install numba 0.61 or newer.",
        RuntimeWarning,
        stacklevel=2,
    )
