"""The gate that results must pass before they are timed."""

from collections.abc import Mapping

from torch import Tensor

TOLERANCE = 2e-5  # of float32 results, relative to the largest value in float64


class Rejected(Exception):
    """Wrong results, which are not timed."""


def compare(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> float:
    """Largest relative error of (found, true) pairs; above the tolerance, or NaN, :class:`Rejected`."""
    worst = 0.0
    for name, (out, true) in pairs.items():
        largest = float(true.detach().abs().max())  # 0 where no graph has an edge
        error = float((out - true).detach().abs().max()) / (largest or 1.0)
        if not error <= TOLERANCE:
            raise Rejected(f"its {name} is off by {error:.1e} of the largest value")
        worst = max(worst, error)
    return worst
