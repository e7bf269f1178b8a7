"""Sparsefinder: predict which edges an alpha-entmax head will use, before any score is computed.

``predictors`` are rules from projected queries and keys to a graph, ``ground_truth`` records the edges that heads use
and measures predictions against them, and the names here fit the projections and make a graph source of both. The rest
of the library does not import this package.

Reference: Treviso, Góis, Fernandes, Fonseca, Martins: "Predicting Attention Sparsity in Transformers", 2022.
"""

from . import ground_truth, predictors
from .projection import Projection, Sample, SparsefinderSource, fit_centroids, fit_projection, projection_loss

__all__ = [
    "Projection", "Sample", "SparsefinderSource", "fit_centroids", "fit_projection", "ground_truth", "predictors",
    "projection_loss",
]  # fmt: skip
