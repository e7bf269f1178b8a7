"""Analysis of attention graphs: statistics, losses by head, Hamiltonian paths, universality, networkx, plots.

In: an :class:`~sbm_pyg.AttentionGraph`, sampled or given, or a running model. Out: numbers per sequence and head, a
networkx graph, or a figure. The rest of the library does not import this package; scipy, from the ``[analysis]`` extra,
is imported when a function needs it.
"""

from . import plots
from .conditions import Lemma2, Universality, expected_graph, lemma2, spread_steps, universality
from .hamiltonian import Certificate, HamiltonianPath, hamiltonian_path, is_hamiltonian_path
from .heads import Attention, Head, HeadTable, compare_heads, record_attention
from .statistics import GraphStatistics, communities_of, graph_statistics, to_networkx

__all__ = [
    "Attention", "Certificate", "GraphStatistics", "HamiltonianPath", "Head", "HeadTable", "Lemma2",
    "Universality", "communities_of", "compare_heads", "expected_graph", "graph_statistics", "hamiltonian_path",
    "is_hamiltonian_path", "lemma2", "plots",
    "record_attention", "spread_steps", "to_networkx", "universality",
]  # fmt: skip
