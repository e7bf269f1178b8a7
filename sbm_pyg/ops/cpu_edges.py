"""Edge kernels for the CPU: scores of edges, attention over edges, and their gradients (first version)."""

import math

import numpy as np
import torch
from torch import Tensor

from .threads import kernel, run, split


@kernel
def _keep(edge, threshold, seed):
    """1 if this edge survives dropout, else 0."""
    count = np.uint64(edge) >> np.uint64(2)
    low = np.uint64(0xFFFFFFFF)
    c0 = count & low
    c1 = count >> np.uint64(32)
    c2 = np.uint64(0)
    c3 = np.uint64(5)
    k0 = np.uint64(seed) & low
    k1 = np.uint64(seed) >> np.uint64(32)
    for _ in range(10):
        a = c0 * np.uint64(0xD2511F53)
        b = c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> np.uint64(32)) ^ c1 ^ k0, b & low, (a >> np.uint64(32)) ^ c3 ^ k1, a & low
        k0 = (k0 + np.uint64(0x9E3779B9)) & low
        k1 = (k1 + np.uint64(0xBB67AE85)) & low
    part = edge & 3
    word = c0
    if part == 1:
        word = c1
    elif part == 2:
        word = c2
    elif part == 3:
        word = c3
    return word >= threshold


@kernel
def _dot(first, last, queries, query, key, rowptr, col, out):
    for row in range(first, last):
        head = row // queries
        for edge in range(rowptr[row], rowptr[row + 1]):
            j = col[edge]
            total = query.dtype.type(0)
            for c in range(query.shape[1]):
                total += query[row, c] * key[head, j, c]
            out[edge] = total


@kernel
def _dot_backward(first, last, queries, grad, query, key, rowptr, col, dquery, dkey):
    for row in range(first, last):
        head = row // queries
        for edge in range(rowptr[row], rowptr[row + 1]):
            j = col[edge]
            g = grad[edge]
            for c in range(query.shape[1]):
                dquery[row, c] += g * key[head, j, c]
                dkey[head, j, c] += g * query[row, c]


@kernel
def _attention(
    first, last, queries, query, key, value, rowptr, col, gate, bias, scale, weight_form, threshold, keep, seed, buffer, out, lse
):
    for row in range(first, last):
        head = row // queries
        start, stop = rowptr[row], rowptr[row + 1]
        top = -np.inf
        for edge in range(start, stop):
            j = col[edge]
            total = query.dtype.type(0)
            for c in range(query.shape[1]):
                total += query[row, c] * key[head, j, c]
            total *= scale
            if gate.size and not weight_form:
                total *= gate[edge]
            if bias.size:
                total += bias[edge]
            buffer[edge - start] = total
            if not total <= top:
                top = total
        total = query.dtype.type(0)
        for c in range(value.shape[2]):
            out[row, c] = 0
        if top != -np.inf:
            for edge in range(start, stop):
                p = math.exp(buffer[edge - start] - top)
                if gate.size and weight_form:
                    p *= gate[edge]
                total += p
                if threshold:
                    p *= keep if _keep(edge, threshold, seed) else 0
                j = col[edge]
                for c in range(value.shape[2]):
                    out[row, c] += p * value[head, j, c]
            for c in range(value.shape[2]):
                out[row, c] /= total
        lse[row] = top + math.log(total) if top != -np.inf else top


@kernel
def _attention_backward(
    first,
    last,
    queries,
    grad_out,
    query,
    key,
    value,
    rowptr,
    col,
    gate,
    bias,
    out,
    lse,
    scale,
    weight_form,
    threshold,
    keep,
    seed,
    dquery,
    dkey,
    dvalue,
    dgate,
    dbias,
):
    for row in range(first, last):
        head = row // queries
        gbar = query.dtype.type(0)
        for c in range(value.shape[2]):
            gbar += grad_out[row, c] * out[row, c]
        for edge in range(rowptr[row], rowptr[row + 1]):
            j = col[edge]
            dot = query.dtype.type(0)
            for c in range(query.shape[1]):
                dot += query[row, c] * key[head, j, c]
            dot *= scale
            logit = dot
            factor = query.dtype.type(scale)
            if gate.size and not weight_form:
                logit *= gate[edge]
                factor *= gate[edge]
            if bias.size:
                logit += bias[edge]
            weight = math.exp(logit - lse[row]) if lse[row] != -np.inf else 0
            p = weight * gate[edge] if gate.size and weight_form else weight
            drop = query.dtype.type(1)
            if threshold:
                drop = keep if _keep(edge, threshold, seed) else 0
            g = query.dtype.type(0)
            for c in range(value.shape[2]):
                g += grad_out[row, c] * value[head, j, c]
            g = drop * g - gbar
            dlogit = p * g
            if dgate.size:
                dgate[edge] = weight * g if weight_form else dlogit * dot
            if dbias.size:
                dbias[edge] = dlogit
            for c in range(query.shape[1]):
                dquery[row, c] += dlogit * factor * key[head, j, c]
                dkey[head, j, c] += dlogit * factor * query[row, c]
            for c in range(value.shape[2]):
                dvalue[head, j, c] += p * drop * grad_out[row, c]


def _working(tensor: Tensor | None, like: Tensor) -> np.ndarray:
    """A contiguous array in the precision that the kernels compute in; empty for None."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.empty(0, dtype=dtype).numpy() if tensor is None else tensor.detach().to(dtype).contiguous().numpy()


def _rows(tensor: Tensor) -> np.ndarray:
    return _working(tensor, tensor).reshape(-1, tensor.shape[-1])


def _drop(dropout: float, seed: int):
    keep = 1 / (1 - dropout) if dropout < 1 else 0.0
    return np.uint64(round(dropout * 2**32)), keep, np.uint64(seed % 2**64)


def edge_dot(query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor) -> Tensor:
    q, k = _rows(query), _working(key, key)
    out = np.empty(col.numel(), q.dtype)
    args = (query.shape[1], q, k, rowptr.contiguous().numpy(), col.contiguous().numpy(), out)
    run(_dot, [(first, last, *args) for first, last in split(rowptr, 8)])
    return torch.from_numpy(out).to(query.dtype)


def edge_dot_backward(grad, query, key, rowptr, col, need_query, need_key):
    q, k = _rows(query), _working(key, key)
    dquery, dkey = np.zeros_like(q), np.zeros_like(k)
    args = (query.shape[1], _working(grad, query), q, k, rowptr.contiguous().numpy(), col.contiguous().numpy(), dquery, dkey)
    rows = query.shape[1]
    run(_dot_backward, [(head * rows, head * rows + rows, *args) for head in range(query.shape[0])])
    return (
        torch.from_numpy(dquery).view(query.shape).to(query.dtype) if need_query else None,
        torch.from_numpy(dkey).view(key.shape).to(query.dtype) if need_key else None,
    )


def edge_attention(query, key, value, rowptr, col, gate, bias, scale, gate_form, dropout, seed):
    q, k, v = _rows(query), _working(key, key), _working(value, value)
    out = np.empty((q.shape[0], value.shape[2]), q.dtype)
    lse = np.empty(q.shape[0], q.dtype)
    degree = int(rowptr.diff().max()) if rowptr.numel() > 1 else 0
    args = (
        query.shape[1],
        q,
        k,
        v,
        rowptr.contiguous().numpy(),
        col.contiguous().numpy(),
        _working(gate, query),
        _working(bias, query),
        scale,
        gate_form == "weight",
        *_drop(dropout, seed),
    )
    run(_attention, [(*cut, *args, np.empty(degree, q.dtype), out, lse) for cut in split(rowptr, 8)])
    shape = (*query.shape[:2], value.shape[2])
    return torch.from_numpy(out).view(shape).to(query.dtype), torch.from_numpy(lse).view(query.shape[:2])


def edge_attention_backward(
    grad_out, query, key, value, rowptr, col, gate, bias, out, lse, scale, gate_form, dropout, seed, need_gate, need_bias
):
    q, k, v = _rows(query), _working(key, key), _working(value, value)
    dquery, dkey, dvalue = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dgate, dbias = np.empty(col.numel() * need_gate, q.dtype), np.empty(col.numel() * need_bias, q.dtype)
    args = (
        query.shape[1],
        _rows(grad_out),
        q,
        k,
        v,
        rowptr.contiguous().numpy(),
        col.contiguous().numpy(),
        _working(gate, query),
        _working(bias, query),
        _rows(out),
        _working(lse, query).reshape(-1),
        scale,
        gate_form == "weight",
        *_drop(dropout, seed),
        dquery,
        dkey,
        dvalue,
        dgate,
        dbias,
    )
    rows = query.shape[1]
    run(_attention_backward, [(head * rows, head * rows + rows, *args) for head in range(query.shape[0])])
    return (
        torch.from_numpy(dquery).view(query.shape).to(query.dtype),
        torch.from_numpy(dkey).view(key.shape).to(key.dtype),
        torch.from_numpy(dvalue).view(value.shape).to(value.dtype),
        torch.from_numpy(dgate).to(gate.dtype) if need_gate else None,
        torch.from_numpy(dbias).to(bias.dtype) if need_bias else None,
    )
