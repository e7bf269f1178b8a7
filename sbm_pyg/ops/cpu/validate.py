"""The check of compressed rows on the CPU: one pass over the keys.

In and out: the tensors of ``invalid_row`` in :mod:`sbm_pyg.ops`. Not here: the error for a row that is not
valid (:mod:`sbm_pyg.graphs.graph`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .threads import numba_kernel, run, split, task_count


@numba_kernel
def _first_invalid_row(first, last, rowptr, col, low, high, invalid, piece):
    """Write the first row in ``first .. last-1`` that is not valid, or nothing."""
    for row in range(first, last):
        start, end = rowptr[row], rowptr[row + 1]
        # Offsets must be in range, and keys must ascend within the query's sequence.
        wrong = start < 0 or end < start or end > col.size
        if not wrong and end > start:
            query = row % low.size
            wrong = col[start] < low[query] or col[end - 1] >= high[query]
            for edge in range(start, end - 1):
                wrong |= col[edge] >= col[edge + 1]
        if wrong:
            invalid[piece] = row
            return


def invalid_row(rowptr: Tensor, col: Tensor, query_ptr: Tensor, key_ptr: Tensor, heads: int) -> Tensor:
    low, high = (np.repeat(side.numpy(), np.diff(query_ptr.numpy())) for side in (key_ptr[:-1], key_ptr[1:]))
    rows, keys = rowptr.numpy(), col.contiguous().numpy()
    rises = rows[0] >= 0 and rows[-1] <= keys.size and bool((rows[1:] >= rows[:-1]).all())
    # Edges can be shared out by rows that rise alone.
    pieces = split(rows, task_count(4 * keys.size, 3)) if rises else [(0, rows.size - 1)]
    invalid = np.full(len(pieces), rows.size, np.int64)
    run(_first_invalid_row, [(*piece, rows, keys, low, high, invalid, number) for number, piece in enumerate(pieces)])
    first = int(invalid.min(initial=rows.size))
    return torch.tensor(first if first < rows.size else -1)
