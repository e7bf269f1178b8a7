"""Sparse, data-adaptive attention as message passing on PyTorch Geometric."""

from . import analysis, estimators, gold, indexer, ops, patterns, plots, predictors, selectors, sparsefinder
from . import exchange as exchange
from .attention import AttentionConv, SBMAttentionConv
from .auxiliary import auxiliary_loss
from .blocks import BlockGraph, BlockPool
from .choice import Choice, EdgeProbability, GraphSource, SharingSource, SourceGraph, TiledChoice
from .dcmm import DCMM, DCMMBias
from .dense import FullAttention
from .following import sync_statistics
from .graph import AttentionGraph
from .models import EncoderTrace, PairClassifier, SequenceClassifier, SequenceEncoder, TokenClassifier
from .multihead import SBMMultiheadAttention
from .normalizers import Entmax
from .pretrained import Pretrained
from .ragged import pad, unpad
from .sampling import SBMGraph, SBMSource, ShareSchedule, sample_edges
from .sbm import SBM, SBMHead
from .version import __version__ as __version__

__all__ = [
    "DCMM",
    "SBM",
    "AttentionConv",
    "AttentionGraph",
    "BlockGraph",
    "BlockPool",
    "Choice",
    "DCMMBias",
    "EdgeProbability",
    "EncoderTrace",
    "Entmax",
    "FullAttention",
    "GraphSource",
    "PairClassifier",
    "Pretrained",
    "SBMAttentionConv",
    "SBMGraph",
    "SBMHead",
    "SBMMultiheadAttention",
    "SBMSource",
    "SequenceClassifier",
    "SequenceEncoder",
    "ShareSchedule",
    "SharingSource",
    "SourceGraph",
    "TiledChoice",
    "TokenClassifier",
    "analysis",
    "auxiliary_loss",
    "estimators",
    "gold",
    "indexer",
    "ops",
    "pad",
    "patterns",
    "plots",
    "predictors",
    "sample_edges",
    "selectors",
    "sparsefinder",
    "sync_statistics",
    "unpad",
]
