"""The CPU kernels, under the names of the ops they implement."""

from .cpu_blocks import block_attention, block_attention_backward, block_effect, block_weight
from .cpu_edges import edge_attention, edge_attention_backward, edge_dot, edge_dot_backward
from .cpu_effects import edge_effect, weigh_effect
from .cpu_entmax import entmax_support, segment_entmax, segment_entmax_backward
from .cpu_probes import sample_systematic
from .cpu_rows import invalid_row
from .cpu_sampling import sample_sbm
from .cpu_sums import reach_dot, reach_dot_backward

__all__ = [
    "block_attention", "block_attention_backward", "block_effect", "block_weight", "edge_attention",
    "edge_attention_backward", "edge_dot", "edge_dot_backward", "edge_effect", "entmax_support", "invalid_row",
    "reach_dot", "reach_dot_backward", "sample_sbm", "sample_systematic", "segment_entmax", "segment_entmax_backward",
    "weigh_effect",
]  # fmt: skip
