"""Watches the densities of a model in training, and says what to try when a head loses its edges.

In: the trace of a step now and then. Out: warnings, each once per head. Not here: any training.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

ADVICE = (
    "Lower --density-weight, raise --exploration or the density at the start, or take the estimator 'local' with more probes; "
    "see docs/learning.md."
)


class DensityGuard:
    """Warns when a head's density collapses, or when many of its queries are left without any edge.

    Args:
        density: Density of a head below which it has collapsed, in [0, 1].
        empty: Share of queries without edges above which a warning is due, in [0, 1].
    """

    def __init__(self, density: float = 1e-3, empty: float = 0.5) -> None:
        for name, value in (("density", density), ("empty", empty)):
            if not 0 <= value <= 1:
                raise ValueError(f"Expected '{name}' in [0, 1] (got {value}). It is a share.")
        self.density, self.empty = density, empty
        self.told: set[tuple[str, int, int]] = set()

    def check(self, trace: Any, step: int) -> list[str]:
        """Warns of what is new.

        Args:
            trace: :class:`sbm_pyg.EncoderTrace` of a step.
            step: Its number.

        Returns:
            The new warnings, also issued as ``UserWarning``.
        """
        found = []
        for layer, graph in enumerate(trace.graphs):
            if graph is None:
                continue
            pairs = float((graph.query_ptr.diff() * graph.key_ptr.diff()).sum())
            edges: Tensor = graph.degree.double().sum(1)  # [H]
            alone = (graph.degree == 0).double().mean(1)
            for head in range(graph.heads):
                density, empty = float(edges[head]) / max(pairs, 1.0), float(alone[head])
                if density < self.density:
                    found.append((("density", layer, head), f"has collapsed to a density of {density:.2%}"))
                elif empty > self.empty:
                    found.append((("empty", layer, head), f"leaves {empty:.0%} of its queries without any edge"))
        new = [f"Step {step}: layer {key[1]}, head {key[2]} {text}. {ADVICE}" for key, text in found if key not in self.told]
        self.told |= {key for key, _ in found}
        for text in new:
            warnings.warn(text, stacklevel=2)
        return new
