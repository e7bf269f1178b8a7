"""Sparse, data-adaptive attention as message passing on PyTorch Geometric."""

from . import analysis, ops, patterns, plots
from .attention import SBMAttentionConv
from .graph import AttentionGraph
from .models import EncoderTrace, PairClassifier, SequenceClassifier, SequenceEncoder, TokenClassifier
from .multihead import SBMMultiheadAttention
from .pretrained import Pretrained
from .ragged import pad, unpad
from .sampling import SBMGraph, sample_edges
from .sbm import SBM, SBMHead
from .version import __version__ as __version__

__all__ = [
    "SBM",
    "AttentionGraph",
    "EncoderTrace",
    "PairClassifier",
    "Pretrained",
    "SBMAttentionConv",
    "SBMGraph",
    "SBMHead",
    "SBMMultiheadAttention",
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
