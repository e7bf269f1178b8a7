"""Ops that train indexers by imitation of attention, on CUDA devices: plain torch around the edge kernels.

In and out: the tensors of ``index_score`` and ``edge_cross_entropy`` in :mod:`sbm_pyg.ops`. Not here: the computation
(:mod:`sbm_pyg.ops.reference.imitation`), and the kernels (:mod:`.edges`).
"""

from __future__ import annotations

from functools import partial

from ..reference import imitation
from . import edges

index_score = partial(imitation.index_score, edges=edges)
index_score_backward = partial(imitation.index_score_backward, edges=edges)
edge_cross_entropy = partial(imitation.edge_cross_entropy, edges=edges)
edge_cross_entropy_backward = imitation.edge_cross_entropy_backward
