"""Declarations of the ops: schema, shapes without values, gradient, and kernels by device.

In and out: tensors that the caller has checked, or that are valid by construction. What each op computes is said in
:mod:`sbm_pyg.ops.reference`. Not here: any computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet, _after_autograd_keyset, _any_requires_grad, _AutoDispatchBelowAutograd
from torch._library.utils import fill_defaults
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from . import cpu, cuda, flops, values

DISPATCHER = torch.library.Library("sbm_pyg", "DEF")
"""The ops as the dispatcher of PyTorch knows them."""
KERNELS: dict[str, tuple[str, tuple[str, ...]]] = {}
"""For each op, the file that computes it, by its name on each shelf, and the shelves that have a kernel."""
REFERENCES: dict[str, Callable[..., Any]] = {}
"""For each op, the function that devices without a kernel run."""
GRADIENTS: dict[OpOverload, tuple[Callable[..., None], Callable[..., Any]]] = {}
"""For each differentiable op, what saves inputs and outputs for the backward pass, and the backward pass."""


def _device(arguments: tuple[Any, ...]) -> torch.device:
    return next(x.device for x in arguments if isinstance(x, Tensor))


def _without_autocast(call: Callable[..., Any], device_type: str | None = None) -> Callable[..., Any]:
    """Disable autocast inside of an op, whose inputs autocast has converted already."""

    def computed(*arguments: Any) -> Any:
        used = device_type or _device(arguments).type
        if not torch.is_autocast_enabled(used):
            return call(*arguments)
        with torch.autocast(used, enabled=False):
            return call(*arguments)

    return computed


def _carried(call: Callable[..., Any]) -> Callable[..., Any]:
    """Compute on the CPU for tensors of another device, and copy the result back."""

    def computed(*arguments: Any) -> Any:
        device = _device(arguments)
        out = call(*(x.cpu() if isinstance(x, Tensor) else x for x in arguments))
        return out.to(device) if isinstance(out, Tensor) else tuple(x.to(device) for x in out)

    return computed


def _on_cuda(name: str, file: str, elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """The Triton kernel of an op, imported by the first call; ``elsewhere`` where Triton does not compile."""

    def call(*arguments: Any) -> Any:
        if not cuda.compiles(_device(arguments)):
            return elsewhere(*arguments)
        return getattr(import_module(f".cuda.{file}", __package__), name)(*arguments)

    return call


def _declare(
    name: str,
    fake: Callable[..., Any],
    file: str,
    kernels: tuple[str, ...] = ("cpu", "cuda"),
    carry_to_cpu: bool = False,
    sized_by_values: bool = False,
) -> OpOverload:
    """Declare ``sbm_pyg::name``: its reference, its kernels in ``cpu/`` and ``cuda/``, and its cost.

    All are in files of one name. The schema is the signature of the reference, without what goes in by keyword alone.
    Apple's devices run the CPU kernel. Other devices without a kernel run the reference, or the CPU kernel with
    ``carry_to_cpu``, which is for references that are too slow for use. An op that is ``sized_by_values`` of its inputs
    takes none of :func:`torch.vmap`.
    """
    KERNELS[name] = file, kernels
    reference = getattr(import_module(f".reference.{file}", __package__), name)
    kernel = getattr(import_module(f".{'cpu' if cpu.INSTALLED else 'reference'}.{file}", __package__), name)
    positional = [x for x in signature(reference).parameters.values() if x.kind is not Parameter.KEYWORD_ONLY]
    elsewhere: Any = _without_autocast(_carried(kernel) if carry_to_cpu else reference)
    elsewhere.__signature__ = signature(reference).replace(parameters=positional)
    elsewhere.__annotations__ = reference.__annotations__
    REFERENCES[name] = elsewhere
    tags = torch.Tag.pt2_compliant_tag
    DISPATCHER.define(name + torch.library.infer_schema(elsewhere, mutates_args=()), tags=tags)
    op = getattr(torch.ops.sbm_pyg, name).default

    def register(key: str, call: Callable[..., Any], **options: Any) -> None:
        # Between compiled parts of a model, Dynamo would trace what the dispatcher calls.
        DISPATCHER.impl(name, torch.compiler.disable(call), key, **options)

    register("CompositeExplicitAutograd", elsewhere)
    register("CPU", _without_autocast(kernel, "cpu"))
    register("MPS", _without_autocast(_carried(kernel), "mps"))  # which has no float64
    if "cuda" in kernels:
        register("CUDA", _without_autocast(_on_cuda(name, file, elsewhere), "cuda"))
    register("Autograd", _autograd_kernel(op), with_keyset=True)
    torch.library.register_fake(f"sbm_pyg::{name}", fake, lib=DISPATCHER)
    if sized_by_values:
        torch.library.register_vmap(f"sbm_pyg::{name}", _refuse_batches(op), lib=DISPATCHER)
    if name in flops.FORMULAS:
        formula = flops.formula_of(name, signature(elsewhere))
        register_flop_formula(getattr(torch.ops.sbm_pyg, name), get_raw=True)(formula)
    return op


def _refuse_tangents(arguments: Sequence[Any]) -> None:
    """Raise an error for forward-mode differentiation, which no op implements: derivatives would be zero."""
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):
        raise NotImplementedError(
            "Expected reverse-mode differentiation (got a tangent, from torch.func.jvp, jacfwd, "
            "hessian or forward_ad). Use `backward` or `torch.autograd.grad`."
        )


def _refuse_batches(op: OpOverload) -> Callable[..., Any]:
    """Return a rule of :func:`torch.vmap` that raises an error, for ops whose output sizes depend on values."""

    def refuse(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        batched = (x.name for x, dim in zip(op._schema.arguments, in_dims, strict=False) if dim is not None)
        raise ValueError(values.OUTSIDE_OF_VMAP.format(next(batched)))

    return refuse


def _autograd_kernel(op: OpOverload) -> Callable[..., Any]:
    """Return the autograd kernel of an op. It calls the op below autograd, and records it if an input needs a gradient.

    It does what :func:`torch.library.custom_op` generates, in half the time of a call.
    """

    count = len(op._schema.arguments)

    def below(keys: DispatchKeySet, arguments: Sequence[Any]) -> Any:
        with _AutoDispatchBelowAutograd():
            return op.redispatch(keys & _after_autograd_keyset, *arguments)

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments_and_keys: Any) -> Any:
            *arguments, keys = arguments_and_keys
            out = below(keys, arguments)
            if op in GRADIENTS:
                if len(arguments) < count:  # the dispatcher leaves out arguments that equal their defaults
                    arguments, _ = fill_defaults(op._schema, arguments, {})
                GRADIENTS[op][0](ctx, arguments, out)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if op not in GRADIENTS:
                raise RuntimeError(f"Trying to backward through {op}, which has no gradient.")
            return *GRADIENTS[op][1](ctx, *grads), None

    def call(keys: DispatchKeySet, *arguments: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(arguments)
        if torch.is_grad_enabled() and _any_requires_grad(*arguments):
            return Recorded.apply(*arguments, keys)
        return below(keys, arguments)

    Recorded.__name__ = f"{op._opname}_autograd"
    return call


# ------------------------------------------------------------------ shapes


def _fake_dot(query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor) -> Tensor:
    return query.new_empty(col.size(0))


def _fake_pair(grad: Tensor, query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _fake_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    heads, num_queries = query.shape[:2]
    lse = query.new_empty(heads, num_queries, dtype=torch.promote_types(query.dtype, torch.float32))
    return value.new_empty(heads, num_queries, value.size(2)), lse


def _fake_attention_backward(grad_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    query, key, value, _, col, gate, bias, _, lse, *_, need_gate, need_bias = inputs
    edge = [
        x.new_empty(col.size(0)) if x is not None and need else lse.new_empty(0)
        for x, need in ((gate, need_gate), (bias, need_bias))
    ]
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), *edge


def _fake_block_backward(grad_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    query, key, value, _, col, _, _, bias, _, lse, block_size, *_, need_bias = inputs
    size = (0,) if bias is None or not need_bias else (col.size(0), block_size, block_size)
    grad_bias = (lse if bias is None or not need_bias else bias).new_empty(size)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), grad_bias


def _fake_effect(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None,
    probe_rowptr: Tensor, probe_col: Tensor, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return query.new_empty(col.size(0)), query.new_empty(probe_col.size(0))


def _fake_rows(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    num_edges = torch.library.get_ctx().new_dynamic_size()
    rowptr = query.new_empty(query.size(0) * query.size(1) + 1, dtype=torch.int64)
    return rowptr, query.new_empty(num_edges, dtype=torch.int32)


def _fake_chosen(src: Tensor, ptr: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ptr), ptr.new_empty(torch.library.get_ctx().new_dynamic_size())


def _fake_union(
    rowptr: Tensor, col: Tensor, other_rowptr: Tensor, other_col: Tensor, num_keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_edges = torch.library.get_ctx().new_dynamic_size()
    union = col.new_empty(num_edges, dtype=torch.promote_types(col.dtype, other_col.dtype))
    return torch.empty_like(rowptr), union, union.new_empty(num_edges, dtype=torch.bool)


def _fake_loops(rowptr: Tensor, col: Tensor, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_union(rowptr, col, rowptr, col, num_keys)


def _fake_selected(rowptr: Tensor, col: Tensor, is_selected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_edges = torch.library.get_ctx().new_dynamic_size()
    return torch.empty_like(rowptr), col.new_empty(num_edges), rowptr.new_empty(num_edges)


def _fake_queries(query_ptr: Tensor, sequence_ids: Tensor, num_queries: int, part: float, seed: int) -> Tensor:
    return query_ptr.new_empty(num_queries, dtype=torch.bool)


def _fake_systematic(
    chance: Tensor, query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, heads: int, seed: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    num_edges = torch.library.get_ctx().new_dynamic_size()
    return query_ptr.new_empty(heads * chance.size(0) + 1), query_ptr.new_empty(num_edges, dtype=torch.int32)


def _fake_probes(
    query_ptr: Tensor, key_ptr: Tensor, sequence_ids: Tensor, queries: Tensor | None, num_queries: int, heads: int,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    num_edges, rowptr = torch.library.get_ctx().new_dynamic_size(), query_ptr.new_empty(heads * num_queries + 1)
    chance = query_ptr.new_empty(num_queries, dtype=torch.float32)
    return rowptr, query_ptr.new_empty(num_edges, dtype=torch.int32), chance


def _fake_entmax_backward(
    grad: Tensor, out: Tensor, rowptr: Tensor, alpha: Tensor, need_alpha: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out), torch.empty_like(alpha) if need_alpha else alpha.new_empty(0)


def _fake_score_backward(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:3])


def _fake_cross_entropy(query: Tensor, key: Tensor, log_p: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(log_p.dtype, torch.float32)
    return log_p.new_empty(query.shape[:2], dtype=dtype), log_p.new_empty(log_p.shape, dtype=dtype)


def _fake_reach(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))


def _fake_scaled(rate: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    factor = _fake_reach(rate)
    return rate.new_empty(rate.shape), factor, torch.empty_like(factor), factor.new_empty(2, rate.size(0))


def _fake_sorted(index: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return index.new_empty(num_rows + 1, dtype=torch.int64), index.new_empty(index.size(0), dtype=torch.int64)


def _fake_graph_attention(
    query: Tensor, key: Tensor, value: Tensor, edge_query: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    mean = query.new_empty((*query.shape[:2], 0) if edge_query is None else edge_query.shape)
    out = value.new_empty(*query.shape[:2], value.size(2))
    dtype = torch.promote_types(query.dtype, torch.float32)
    return out, mean, query.new_empty(rest[4].size(0), query.size(1), dtype=dtype)


def _fake_graph_backward(grad_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    _, _, query, key, value, edge_query, feature, _, _, col, *_, need_feature = inputs
    dedge_query, dfeature = query.new_empty((*query.shape[:2], 0)), query.new_empty(0, 0)
    if edge_query is not None:
        dedge_query = edge_query.new_empty(edge_query.shape)
        dfeature = feature.new_empty(feature.size(0) * need_feature, feature.size(1))
    grads = [x.new_empty(x.shape) for x in (query, key, value)]
    return *grads, dedge_query, dfeature, query.new_empty(col.size(0), query.size(1))


def _fake_needed(sides: tuple[Any, ...], needs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape if need else (0, 0, 0)) for x, need in zip(sides, needs, strict=True))


edge_dot = _declare("edge_dot", _fake_dot, "edges")
edge_dot_backward = _declare("edge_dot_backward", _fake_pair, "edges")
edge_attention = _declare("edge_attention", _fake_attention, "edges")
edge_attention_backward = _declare("edge_attention_backward", _fake_attention_backward, "edges")
edge_effect = _declare("edge_effect", _fake_effect, "effects")
effect_gradients = _declare(
    "effect_gradients", lambda *arguments: _fake_pair(arguments[0], *arguments[11:13]), "effects"
)
weigh_effect = _declare("weigh_effect", lambda effect, prob, *_: prob.new_empty(prob.shape), "effects")
segment_entmax = _declare("segment_entmax", lambda src, rowptr, alpha: torch.empty_like(src), "entmax")
segment_entmax_backward = _declare("segment_entmax_backward", _fake_entmax_backward, "entmax")
entmax_support = _declare("entmax_support", _fake_chosen, "entmax", sized_by_values=True)
sample_sbm = _declare("sample_sbm", _fake_rows, "sampling", carry_to_cpu=True, sized_by_values=True)
sample_queries = _declare("sample_queries", _fake_queries, "systematic")
sample_systematic = _declare("sample_systematic", _fake_systematic, "systematic", sized_by_values=True)
sample_probes = _declare("sample_probes", _fake_probes, "systematic", sized_by_values=True)
index_top_k = _declare("index_top_k", _fake_rows, "pairs", ("cpu",), sized_by_values=True)
segment_top_k = _declare("segment_top_k", _fake_chosen, "pairs", ("cpu",), sized_by_values=True)
union_rows = _declare("union_rows", _fake_union, "union", ("cpu",), sized_by_values=True)
add_loops = _declare("add_loops", _fake_loops, "union", ("cpu",), sized_by_values=True)
select_rows = _declare("select_rows", _fake_selected, "union", ("cpu",), sized_by_values=True)
index_score = _declare("index_score", lambda query, weight, key, rowptr, col: query.new_empty(col.size(0)), "imitation")
index_score_backward = _declare("index_score_backward", _fake_score_backward, "imitation")
edge_cross_entropy = _declare("edge_cross_entropy", _fake_cross_entropy, "imitation")
edge_cross_entropy_backward = _declare(
    "edge_cross_entropy_backward", lambda grad, slope, rowptr: slope.new_empty(slope.shape), "imitation"
)
reach_dot = _declare("reach_dot", _fake_reach, "reach", ("cpu",))
reach_dot_backward = _declare(
    "reach_dot_backward", lambda *arguments: _fake_needed(arguments[1:3], arguments[-2:]), "reach", ("cpu",)
)
scale_to_density = _declare("scale_to_density", _fake_scaled, "density", ("cpu",))
scale_to_density_backward = _declare(
    "scale_to_density_backward", lambda *arguments: _fake_needed(arguments[2:4], arguments[-2:]), "density", ("cpu",)
)
invalid_row = _declare("invalid_row", lambda rowptr, *_: rowptr.new_empty(()), "validate", ("cpu",))
block_attention = _declare("block_attention", _fake_attention, "blocks")
block_attention_backward = _declare("block_attention_backward", _fake_block_backward, "blocks")
block_effect = _declare("block_effect", _fake_effect, "blocks")
graph_attention = _declare("graph_attention", _fake_graph_attention, "graph_attention")
graph_attention_backward = _declare("graph_attention_backward", _fake_graph_backward, "graph_attention")
sort_edges = _declare("sort_edges", _fake_sorted, "graph_attention", ("cpu",))
block_weight = _declare("block_weight", lambda query, key, rowptr, col, *_: query.new_empty(col.size(0)), "blocks")


# ------------------------------------------------------------------ gradients


def _saver(
    inputs: Sequence[int], options: Sequence[int] = (), outputs: Sequence[int] = (), constants: Sequence[int] = ()
) -> Callable[..., None]:
    """Return a function that saves inputs, options and outputs of an op, by their positions, for the backward pass.

    Outputs at ``constants`` have no gradient.
    """

    def save(ctx: Any, arguments: Sequence[Any], output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        if constants:
            ctx.mark_non_differentiable(*(results[number] for number in constants))
        ctx.set_materialize_grads(len(results) == 1)  # no zeros for unused outputs
        ctx.save_for_backward(*(arguments[number] for number in inputs), *(results[number] for number in outputs))
        ctx.options = [arguments[number] for number in options]

    return save


def _needed(ctx: Any, grads: Sequence[Tensor], count: int) -> tuple[Tensor | None, ...]:
    """The gradients of the first inputs, None where an input needs none, and None for all other inputs."""
    first = [grad if need else None for grad, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *first, *[None] * (count - len(first))


def _dot_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _needed(ctx, edge_dot_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.needs_input_grad[:2]), 4)


def _score_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _needed(ctx, index_score_backward(grad.contiguous(), *ctx.saved_tensors), 5)


def _cross_entropy_backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    rowptr, slope = ctx.saved_tensors
    return None, None, edge_cross_entropy_backward(grad.contiguous(), slope, rowptr), None, None, None, None


def _reach_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = reach_dot_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options, *ctx.needs_input_grad[:2])
    return _needed(ctx, grads, 6)


def _scaled_backward(ctx: Any, grad: Tensor | None, grad_factor: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None and grad_factor is None:
        return (None,) * 9
    grad = torch.zeros_like(ctx.saved_tensors[0]) if grad is None else grad.contiguous()
    arguments = (grad, grad_factor, *ctx.saved_tensors, *ctx.options, *ctx.needs_input_grad[:2])
    return _needed(ctx, scale_to_density_backward(*arguments), 9)


def _attention_backward(ctx: Any, grad_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 11
    need_gate, need_bias = ctx.needs_input_grad[5:7]
    grads = edge_attention_backward(grad_out.contiguous(), *ctx.saved_tensors, *ctx.options, need_gate, need_bias)
    of_edges = grads[3] if need_gate else None, grads[4] if need_bias else None
    return *grads[:3], None, None, *of_edges, *[None] * 4


def _graph_backward(ctx: Any, grad_out: Tensor, grad_mean: Tensor, grad_weight: Tensor) -> tuple[Tensor | None, ...]:
    grads = [None if grad is None else grad.contiguous() for grad in (grad_out, grad_mean, grad_weight)]
    *sides, feature, keep, rowptr, col, weight = ctx.saved_tensors
    if grads[0] is None:
        grads[0] = sides[2].new_zeros(*sides[0].shape[:2], sides[2].size(2))
    if feature is not None and grads[1] is None:
        grads[1] = torch.zeros_like(sides[3])
    arguments = (*grads, *sides, feature, keep, rowptr, col, weight, *ctx.options, ctx.needs_input_grad[4])
    return _needed(ctx, graph_attention_backward(*arguments), 10)


def _block_backward(ctx: Any, grad_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 13
    need_bias = ctx.needs_input_grad[9]
    grads = block_attention_backward(grad_out.contiguous(), *ctx.saved_tensors, *ctx.options, need_bias)
    return *grads[:3], *[None] * 6, grads[3] if need_bias else None, None, None, None


def _entmax_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rowptr, alpha, out = ctx.saved_tensors
    need_alpha = ctx.needs_input_grad[2]
    dsrc, dalpha = segment_entmax_backward(grad.contiguous(), out, rowptr, alpha, need_alpha)
    return dsrc, None, dalpha if need_alpha else None


GRADIENTS[edge_dot] = _saver(range(4)), _dot_backward
GRADIENTS[index_score] = _saver(range(5)), _score_backward
GRADIENTS[edge_cross_entropy] = _saver((3,), outputs=(1,), constants=(1,)), _cross_entropy_backward
GRADIENTS[reach_dot] = _saver(range(4), (4, 5)), _reach_backward
GRADIENTS[scale_to_density] = _saver(range(5), (7, 8), outputs=(1, 2), constants=(2, 3)), _scaled_backward
GRADIENTS[edge_attention] = _saver(range(7), range(7, 11), outputs=(0, 1), constants=(1,)), _attention_backward
GRADIENTS[graph_attention] = _saver((*range(5), *range(6, 9)), (9,), outputs=(2,)), _graph_backward
GRADIENTS[block_attention] = (
    _saver((*range(7), 9), (7, 8, 10, 11, 12), outputs=(0, 1), constants=(1,)), _block_backward
)  # fmt: skip
GRADIENTS[segment_entmax] = _saver((1, 2), outputs=(0,)), _entmax_backward


class EdgeGate(torch.autograd.Function):
    """The straight-through gate of each edge: ones, with the gradient of ``edge_dot(rate, member)``, the probabilities.

    It is ``1 + (p - p.detach())`` without p. Cost O(E) forward, O(E K) backward.
    """

    @staticmethod
    def forward(query: Tensor, key: Tensor, rowptr: Tensor, col: Tensor) -> Tensor:
        return query.new_ones(col.size(0))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = staticmethod(_dot_backward)


class EdgeSum(torch.autograd.Function):
    """Sum of the values of each row's edges by their weights, ``[H, N, C']``: the transpose of ``edge_dot``."""

    @staticmethod
    def forward(weight: Tensor, value: Tensor, rowptr: Tensor, col: Tensor) -> Tensor:
        rows = value.new_empty(value.size(0), (rowptr.size(0) - 1) // value.size(0), value.size(2))
        return edge_dot_backward(weight, rows, value, rowptr, col, True, False)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, value, *rows = ctx.saved_tensors
        grad = grad.contiguous()
        dweight = edge_dot(grad, value, *rows).to(weight.dtype) if ctx.needs_input_grad[0] else None
        dvalue = edge_dot_backward(weight, grad, value, *rows, False, True)[1] if ctx.needs_input_grad[1] else None
        return dweight, dvalue, None, None


class Expectation(torch.autograd.Function):
    """The local expectation gradient: the output of attention unchanged, with a gradient to edge probabilities.

    In the backward pass the probability of each edge, and of each probe, receives its ``edge_effect`` times its weight,
    ``weigh_effect``, and ``factor``. A probe that is an edge counts once, as an edge; edges that are ``forced`` send no
    gradient, and inputs of the attention get none from here. Probabilities are the dot products of ``rate`` and
    ``member``, or given for each edge and each probe. With a ``block_size`` edges join blocks, whose probabilities are
    given. Forward costs nothing. Backward costs O((E + E') (C + K)), without the K where probabilities are given.
    """

    @staticmethod
    def forward(
        out: Tensor, rate: Tensor | None, member: Tensor | None, prob: Tensor | None, probe_prob: Tensor | None,
        query: Tensor, key: Tensor, value: Tensor, rowptr: Tensor, col: Tensor, bias: Tensor | None,
        probe_rowptr: Tensor, probe_col: Tensor, probe_bias: Tensor | None, chance: Tensor, forced: Tensor | None,
        query_ptr: Tensor | None, key_ptr: Tensor | None, block_size: int | None, is_causal: bool, scale: float,
        exploration: float, factor: float,
    ) -> Tensor:  # fmt: skip
        # A compiled graph that begins with `out` would return a view of its input, and leave the derivative out.
        return out.clone() if torch.compiler.is_compiling() else out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:-5])
        ctx.options = inputs[-5:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rate, member, prob, probe_prob, *attention, chance, forced, query_ptr, key_ptr = ctx.saved_tensors
        block_size, is_causal, scale, exploration, factor = ctx.options
        grad = grad.contiguous()  # which attention below needs as well
        need = ctx.needs_input_grad[1:5]
        grads: list[Tensor | None] = [None] * 4
        if rate is None:
            scaled = grad if factor == 1 else grad * factor  # effects are linear in it
            if block_size is None:
                effects = edge_effect(scaled, *attention, scale, None, None, None, 0.0)
            else:
                effects = block_effect(scaled, *attention, query_ptr, key_ptr, block_size, is_causal, scale)
            grads[2] = weigh_effect(effects[0], prob, attention[3], chance, forced, exploration, False)
            grads[3] = weigh_effect(effects[1], probe_prob, attention[6], chance, None, exploration, True)
        else:
            model = (rate, member, chance, exploration, forced, factor, *need[:2])
            grads[:2] = effect_gradients(grad, *attention, scale, *model)
        return (grad, *(x if needed else None for x, needed in zip(grads, need, strict=True)), *[None] * 18)


_FUNCTIONS: Any = (EdgeGate, EdgeSum, Expectation)
for _function in _FUNCTIONS:  # torch asks for the signature at each call of `apply`, and would parse it anew
    _function.forward.__signature__ = signature(_function.forward)
