"""Sparse, data-adaptive attention as message passing on PyTorch Geometric."""

__version__ = "0.2.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import ops
from .graphs import exchange as exchange  # registers graphs with pickle and torch.export
from .graphs.blocks import BlockGraph, BlockPool
from .graphs.graph import AttentionGraph
from .graphs.ragged import Tokens, pad, unpad
from .layers.attention import AttentionConv, SBMAttentionConv
from .layers.calibration import calibrate
from .layers.dcmm import DCMM, DCMMBias
from .layers.dense import FullAttention
from .layers.distributed import HeadParallel
from .layers.gps import SparseGPSConv
from .layers.learned_graph import LearnedGraph
from .layers.multihead import SBMMultiheadAttention
from .layers.named import make_attention, register_source
from .layers.normalizers import Entmax
from .layers.positions import ALiBi, Rotary
from .layers.replace import replace_attention, restore_attention
from .layers.transformer_conv import TransformerConv
from .sources import indexer, patterns, selectors
from .sources.following import sync_statistics
from .sources.interface import Choice, EdgeProbability, GraphSource, SourceGraph
from .sources.learned import DensitySource, LearnedSource
from .sources.sampling import SBMGraph, SBMSource, sample_edges
from .sources.sbm import SBM, SBMHead
from .training import estimators, gradients
from .training.auxiliary import auxiliary_loss
from .training.sparsifier import Sparsifier

if TYPE_CHECKING:
    from . import analysis, sparsefinder
    from .models import (
        EncoderTrace,
        MaskedLM,
        PairClassifier,
        Pretrained,
        SequenceClassifier,
        SequenceEncoder,
        TokenClassifier,
        mask_tokens,
    )

__all__ = [
    "DCMM", "SBM", "ALiBi", "AttentionConv", "AttentionGraph", "BlockGraph", "BlockPool", "Choice", "DCMMBias",
    "DensitySource", "EdgeProbability", "EncoderTrace", "Entmax", "FullAttention", "GraphSource", "HeadParallel",
    "LearnedGraph", "LearnedSource", "MaskedLM", "PairClassifier", "Pretrained", "Rotary", "SBMAttentionConv",
    "SBMGraph", "SBMHead", "SBMMultiheadAttention", "SBMSource", "SequenceClassifier", "SequenceEncoder",
    "SourceGraph", "SparseGPSConv", "Sparsifier", "TokenClassifier", "Tokens", "TransformerConv", "analysis",
    "auxiliary_loss", "calibrate", "estimators", "gradients", "indexer", "make_attention", "mask_tokens", "ops",
    "pad", "patterns", "register_source", "replace_attention", "restore_attention", "sample_edges", "selectors",
    "sparsefinder", "sync_statistics", "unpad",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Imported when they are first used; the models import huggingface_hub.
    if name in ("analysis", "sparsefinder", "models"):
        return import_module(f".{name}", __name__)
    if name in __all__:
        return getattr(import_module(".models", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
