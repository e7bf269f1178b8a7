"""Models of sequences: an encoder whose attention takes any source, heads for common tasks, and saving."""

from .encoder import EncoderTrace, SequenceEncoder
from .heads import MaskedLM, PairClassifier, SequenceClassifier, TokenClassifier, mask_tokens
from .pretrained import Pretrained

__all__ = [
    "EncoderTrace", "MaskedLM", "PairClassifier", "Pretrained", "SequenceClassifier", "SequenceEncoder",
    "TokenClassifier", "mask_tokens",
]  # fmt: skip
