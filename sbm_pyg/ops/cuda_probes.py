"""Keys at equal distances from a random start, for CUDA devices, in Triton.

In and out: the tensors of ``sample_systematic`` in :mod:`sbm_pyg.ops`, on one device. Not here: graphs of a block
model, which plain torch samples (:mod:`.samplers`).

One kernel draws a word for each row and counts its keys; the counts are summed up; another kernel writes the keys.
Arithmetic is in float64 and keeps its order. Multiplications and additions are not fused, for that would round once
where the CPU rounds twice, so the keys are those of every other backend.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference, samplers, words
from .cuda_rows import kernel, launch, span

_SYSTEMATIC = tl.constexpr(words.SYSTEMATIC << 24)
ROWS, KEYS = 128, 64  # that a program takes at once

# ------------------------------------------------------------------ kernels


@kernel
def _start(
    chance, reach, batch, query_ptr, sequence_ids, start, counts, segments: tl.int64, queries: tl.int64, seed: tl.int64,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Where each row starts, as a part of its distance, and its number of keys."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there, query = row < segments, row % queries
    sequence = tl.load(batch + query, mask=there, other=0)
    place = query - tl.load(query_ptr + sequence, mask=there, other=0)
    stream = tl.load(sequence_ids + sequence, mask=there, other=0)
    head = (row // queries).to(tl.uint32) | _SYSTEMATIC
    word = tl.philox(seed, place.to(tl.uint32) * 0, place.to(tl.uint32), stream.to(tl.uint32), head)[0]
    part = word.to(tl.float64) / 4294967296.0
    wanted = tl.load(reach + query, mask=there, other=0).to(tl.float64) * tl.load(chance + query, mask=there, other=0)
    tl.store(start + row, part, mask=there)
    tl.store(counts + row, tl.maximum(tl.ceil(wanted - part), 0).to(tl.int64), mask=there)


@kernel
def _step(chance, reach, batch, key_ptr, start, rowptr, col, queries: tl.int64, KEYS: tl.constexpr):
    """The keys of each row."""
    row, _none, first, stop = span(rowptr, queries, 0)
    query = row % queries
    shift, most = tl.load(key_ptr + tl.load(batch + query)), tl.load(reach + query) - 1
    part, spacing = tl.load(start + row), 1.0 / tl.load(chance + query)
    for begin in range(first, stop, KEYS):
        edge = begin + tl.arange(0, KEYS)
        key = (((edge - first).to(tl.float64) + part) * spacing).to(tl.int64)
        tl.store(col + edge, (shift + tl.minimum(key, most)).to(tl.int32), mask=edge < stop)


# ------------------------------------------------------------------ the op


def sample_systematic(
    chance: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, heads: int, seed: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    chance = samplers.cut_chance(chance).contiguous()
    queries, device = chance.numel(), chance.device
    batch = torch.repeat_interleave(query_ptr.diff(), output_size=queries)
    reach = reference.reach(query_ptr, key_ptr, queries, is_causal)
    start = torch.empty(heads * queries, dtype=torch.float64, device=device)
    counts, exact = torch.empty_like(start, dtype=torch.int64), {"num_warps": 1, "enable_fp_fusion": False}
    given = (x.contiguous() for x in (query_ptr, sequence_ids))
    launch(
        _start, triton.cdiv(start.numel(), ROWS), chance, reach, batch, *given, start, counts, start.numel(), queries,
        seed, ROWS=ROWS, **exact,
    )  # fmt: skip
    rowptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    num_keys, num_edges = torch.stack([key_ptr[-1], rowptr[-1]]).tolist()
    samplers.check_keys(num_keys)
    col = torch.empty(num_edges, dtype=torch.int32, device=device)
    launch(
        _step,
        start.numel(),
        chance,
        reach,
        batch,
        key_ptr.contiguous(),
        start,
        rowptr,
        col,
        queries,
        KEYS=KEYS,
        **exact,
    )
    return rowptr, col
