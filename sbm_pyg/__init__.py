"""Sparse, data-adaptive attention as message passing on PyTorch Geometric."""

from . import analysis, ops, patterns, plots
from .attention import SBMAttentionConv
from .graph import AttentionGraph
from .models import EncoderTrace, PairClassifier, SequenceClassifier, SequenceEncoder, TokenClassifier
from .ragged import pad, unpad
from .sampling import SBMGraph, sample_edges
from .sbm import SBM, SBMHead

__version__ = "0.1.0"

__all__ = [
    "SBM",
    "AttentionGraph",
    "EncoderTrace",
    "PairClassifier",
    "SBMAttentionConv",
    "SBMGraph",
    "SBMHead",
    "SequenceClassifier",
    "SequenceEncoder",
    "TokenClassifier",
    "analysis",
    "ops",
    "pad",
    "patterns",
    "plots",
    "sample_edges",
    "unpad",
]
