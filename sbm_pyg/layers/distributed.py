"""Attention of one layer by several processes, each with some of its heads over all tokens.

In: an :class:`~sbm_pyg.AttentionConv`, and on each process its part of the tokens. Out: the tokens of this part. Not
here: the parallelism of data and of parameters, which are PyTorch's (``DistributedDataParallel``, ``fully_shard``).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, distributed

from ..graphs.ragged import draw_seed, resolve_ptr, resolve_sequence_ids
from ..ops import checks
from ..ops.values import in_backward
from ..sources.following import FollowingSource
from .attention import AttentionConv
from .propagation import Returns, check_tokens

__all__ = ["HeadParallel"]

_SHARD_ABOVE = "Apply `fully_shard` to the HeadParallel or to a module around it, not to parts of its layer."


class HeadParallel(torch.nn.Module):
    r"""Divides the tokens of a batch among processes, and the heads of its attention: sequence parallelism by heads.

    Each of P processes holds :math:`n_r` of the N tokens, and all parameters of the layer, which must be equal: make
    them after the same ``torch.manual_seed``. A process projects its tokens, sends the queries, keys and values of each
    head to the process with this head, attends with H / P heads over all N tokens, and gets the outputs of its own
    tokens back. Output, graph and gradients are those of one process, up to rounding: heads do not depend on each
    other, and random words are numbered by the heads of the whole layer.

    In a forward pass a process sends :math:`n_r H \frac{P-1}{P} 3 C + (N - n_r) \frac{H}{P} C` numbers to other
    processes. In a backward pass, as many gradients come back. Attention takes the memory and time of H / P heads, and
    the rest of the layer takes those of :math:`n_r` tokens.

    **Gradients.** The sum over processes of the gradients of a parameter is the gradient of the sum of all losses.
    :class:`~torch.nn.parallel.DistributedDataParallel` and ``fully_shard`` average gradients; so let each process take
    the mean over its own tokens, or scale its loss by P. :func:`~sbm_pyg.auxiliary_loss` is a mean over the heads of
    this process, so its mean over processes is the auxiliary loss of a single process. All processes must make the same
    calls, with gradients or all without.

    **Sources.** In a copy of the layer, tensors of all heads are replaced by views of the heads of this process.
    Modules declare these tensors by the attribute ``head_dims``, a dict from the name of a parameter or a buffer, or of
    a ``ParameterList``, to the dimension of the heads. Other tensors are shared by all heads. A module with an
    attribute ``heads``, and a score bias, need ``head_dims``, even if it is empty; in the copy, ``heads`` is H / P. A
    module that keeps the number of heads elsewhere defines ``take_heads(count, total)``, which is called on its copy.
    In training, persistent buffers of heads, such as running means, are gathered after each call. So each process holds
    the buffers of all heads, and any process can save a checkpoint.

    Dropout, the noise of the estimator "concrete", and draws of a source from torch's default generator follow the same
    distribution as on one process, with other values. Seed torch's default generator differently on each process.

    Args:
        conv: The layer, with a source. H is a multiple of P. Its ``state_dict`` is that of the layer on one process.
        process_group: The group of the P processes. None: all processes.

    Raises:
        TypeError: ``conv`` is not an :class:`~sbm_pyg.AttentionConv`.
        ValueError: There is no process group, H is not a multiple of P, the layer has no source or takes edge features,
            or a module with ``heads``, or a score bias, does not declare its tensors.

    Shapes:
        - tokens ``[n_r, C_in]``; output ``[n_r, H*C]``, or ``[n_r, C]`` with ``concat=False``.

    Example:
        >>> import tempfile
        >>> from torch import distributed
        >>> from sbm_pyg import SBMAttentionConv
        >>> meeting = f"file://{tempfile.mkdtemp()}/meeting"
        >>> distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        >>> layer = HeadParallel(SBMAttentionConv(16, 8, heads=4, num_clusters=4))
        >>> layer(torch.randn(30, 16), ptr=torch.tensor([0, 10, 30])).shape  # of all tokens of all processes
        torch.Size([30, 32])
        >>> distributed.destroy_process_group()

    Reference: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
    Transformer Models", 2023, for dense attention.
    """

    def __init__(self, conv: AttentionConv, process_group: Any = None) -> None:
        super().__init__()
        checks.kind("conv", conv, AttentionConv, "an AttentionConv", "Models are built from several; wrap each.")
        if not distributed.is_available() or not distributed.is_initialized():
            raise ValueError(
                "Expected a process group (got none). Start the program by `torchrun`, and call "
                "`torch.distributed.init_process_group` first."
            )
        self.process_group = process_group
        what = f"with heads that are a multiple of {self.processes}, the number of processes"
        way_out = "Take more heads, or a group of fewer processes."
        checks.require(not conv.heads % self.processes, "conv", what, conv.heads, way_out)
        way_out = "Give it one, such as `PatternSource(patterns.full)` for dense attention."
        checks.require(conv.source is not None, "conv", "with a source", "None", way_out)
        way_out = "Processes share tokens, and edge features belong to a given graph: attend to it on one process."
        checks.require(conv.lin_edge is None, "conv", "without 'edge_dim'", "one", way_out)
        bias = conv.score_bias
        if bias is not None and not (isinstance(bias, torch.nn.Module) and hasattr(bias, "head_dims")):
            raise ValueError(
                f"Expected 'conv.score_bias' to be a module with `head_dims` (got {type(bias).__name__}). It is called "
                "with the heads of a process, numbered from 0: declare its tensors of heads; see HeadParallel."
            )
        self.conv = conv
        self._local()  # raises an error if a module does not declare its tensors

    @property
    def processes(self) -> int:
        """Number of processes P."""
        return distributed.get_world_size(self.process_group)

    @property
    def own_heads(self) -> slice:
        """The heads of this process."""
        count = self.conv.heads // self.processes
        first = distributed.get_rank(self.process_group) * count
        return slice(first, first + count)

    @torch.compiler.disable  # it waits for other processes
    def forward(
        self,
        x: Tensor,
        *,
        ptr: Tensor | None = None,
        positions: Tensor | None = None,
        seed: int | None = None,
        sequence_ids: Tensor | None = None,
        return_graph: bool = False,
        return_choice: bool = False,
    ) -> Any:
        """Attend, together with all processes of the group.

        Args:
            x: The tokens of this process, ``[n_r, C_in]``. The batch is the tokens of all processes, in the order of
                ranks; processes may hold different numbers of tokens, and parts of a sequence.
            ptr: Offsets of the sequences in the batch, ``[B+1]`` int64, from 0 to N; the same on all processes. None:
                one sequence.
            positions: Position of each token of the batch for ``rotary``, ``[N]``. None: counted from 0 in each
                sequence.
            seed: As :meth:`AttentionConv.forward`, the same on all processes. None: in evaluation mode ``eval_seed`` of
                the layer, and in training a number that the first process draws.
            sequence_ids: Number of each sequence, ``[B]``; see :func:`~sbm_pyg.sample_edges`.
            return_graph: Also return the graph over the N tokens, of the heads of this process.
            return_choice: Also return the :class:`Choice` of these heads.

        Returns:
            The output of the tokens of this process, or a tuple of output, graph and choice, as requested.

        Raises:
            TypeError: The tokens are of another type than the layer.
            ValueError: Shapes do not fit, processes have different offsets or seeds, parameters are in shards, or the
                statistics of the source are summed over the processes of this group.
        """
        conv, group, head_range = self.conv, self.process_group, self.own_heads
        check_tokens(x, conv.lin_query)
        seed = conv.eval_seed if seed is None and not self.training else seed
        counts, seed = self._agree(x, ptr, sequence_ids, seed)
        ptr = resolve_ptr(sum(counts), ptr, device=x.device)
        ids = resolve_sequence_ids(sequence_ids, ptr.numel() - 1, x.device) + (head_range.start << 32)
        parts = self.processes
        sides = torch.stack([lin(x) for lin in (conv.lin_query, conv.lin_key, conv.lin_value)], 1)  # [n_r, 3, H*C]
        sides = sides.unflatten(2, (parts, -1)).permute(2, 0, 1, 3).flatten(0, 1)  # [P*n_r, 3, h*C]
        sides = _AllToAll.apply(sides, [x.size(0)] * parts, counts, group)
        query, key, value = sides.unflatten(2, (-1, conv.out_channels)).permute(1, 2, 0, 3).contiguous()  # [h, N, C]
        local, buffers = self._local()
        returns = Returns(return_graph, return_choice, False)
        result = local.attend(
            query, key, value, ptr=ptr, positions=positions, seed=seed, sequence_ids=ids, returns=returns
        )
        out, *extras = result if isinstance(result, tuple) else (result,)
        if self.training and not in_backward():
            for buffer, view, dim in buffers:
                self._gather(buffer, view, dim)
        out = _AllToAll.apply(out, counts, [x.size(0)] * parts, group)  # [P*n_r, h*C]
        out = out.unflatten(0, (parts, x.size(0))).transpose(0, 1).flatten(1)
        if not conv.concat:
            out = out.unflatten(1, (conv.heads, -1)).mean(1)
        return (out, *extras) if extras else out

    def _agree(
        self, x: Tensor, ptr: Tensor | None, sequence_ids: Tensor | None, seed: int | None
    ) -> tuple[list[int], int]:
        """Gather the number of tokens of each process and the common seed; check that arguments are equal."""
        drawn, batch = draw_seed(seed), (_digest(ptr), _digest(sequence_ids))
        row = torch.tensor([x.size(0), drawn, seed is None, *batch], device=x.device)
        table = [torch.empty_like(row) for _ in range(self.processes)]
        distributed.all_gather(table, row, group=self.process_group)
        counts, seeds, free, *others = torch.stack(table).T.tolist()
        for name, values in (("ptr", others[0]), ("sequence_ids", others[1])):
            way_out = "It describes the tokens of all."
            checks.require(len({*values}) <= 1, name, "to be the same on all processes", "others", way_out)
        if any(free) != all(free) or (not any(free) and len({*seeds}) > 1):
            passed = [None if is_free else number for number, is_free in zip(seeds, free, strict=True)]
            raise ValueError(
                f"Expected 'seed' to be the same on all processes (got {passed}). Leave it out to draw one for all."
            )
        return counts, seeds[0]

    def _local(self) -> tuple[AttentionConv, list[tuple[Tensor, Tensor, int]]]:
        """Copy the layer for the heads of this process; also return buffers of heads, views and dimensions."""
        memo: dict[int, torch.nn.Module] = {}
        buffers: list[tuple[Tensor, Tensor, int]] = []
        shared = {id(lin) for lin in (self.conv.lin_query, self.conv.lin_key, self.conv.lin_value)}
        local = cast(AttentionConv, self._copy(self.conv, "conv", memo, buffers, shared))
        local.concat, local.first_head = True, self.own_heads.start
        return local, buffers

    def _copy(
        self, module: torch.nn.Module, name: str, memo: dict[int, torch.nn.Module],
        buffers: list[tuple[Tensor, Tensor, int]], shared: set[int],
    ) -> torch.nn.Module:  # fmt: skip
        """Copy a module and its children, with views of the tensors of heads; ``shared`` modules are not copied."""
        if id(module) in shared:
            return module
        if id(module) in memo:
            return memo[id(module)]
        total, head_range = self.conv.heads, self.own_heads
        dims: dict[str, int] | None = getattr(module, "head_dims", None)
        if dims is None and getattr(module, "heads", None) == total:
            raise ValueError(
                f"Expected '{name}' to declare its tensors of heads (got {type(module).__name__} with `heads` and "
                "without `head_dims`). Set `head_dims`, a dict from names of tensors to dimensions; see HeadParallel."
            )
        self._check_sums(module, name)
        local = object.__new__(type(module))
        local.__dict__.update(module.__dict__)
        memo[id(module)] = local
        children = module._modules.items()
        local._modules = {
            key: child if child is None else self._copy(child, f"{name}.{key}", memo, buffers, shared)
            for key, child in children
        }
        local._parameters, local._buffers = dict(module._parameters), dict(module._buffers)
        for key, dim in {"head_budgets": 0, **(dims or {})}.items():
            owner = cast(torch.nn.Module, local._modules.get(key, local))
            names = [key] if owner is local else [*owner._parameters]
            for kind in (owner._parameters, owner._buffers):
                for tensor_name in names:
                    tensor = kind.get(tensor_name)
                    if tensor is not None and tensor.size(dim) == total:
                        _check_gathered(tensor, f"{name}.{tensor_name}")
                        view = tensor.narrow(dim, head_range.start, head_range.stop - head_range.start)
                        kind[tensor_name] = cast(Any, view)
                        if kind is owner._buffers and tensor_name not in owner._non_persistent_buffers_set:
                            buffers.append((tensor, view, dim))
        for key, tensor in local._parameters.items():
            _check_gathered(tensor, f"{name}.{key}")
        if getattr(module, "heads", None) == total and dims is not None:
            local.__dict__["heads"] = head_range.stop - head_range.start
        take_heads = getattr(local, "take_heads", None)
        if take_heads is not None:
            take_heads(head_range.stop - head_range.start, total)
        return local

    def _check_sums(self, module: torch.nn.Module, name: str) -> None:
        """Raise ValueError if statistics of different heads would be added up."""
        if not isinstance(module, FollowingSource) or not module.synced or self.processes == 1:
            return
        ranks = [{*distributed.get_process_group_ranks(_group(g))} for g in (module.process_group, self.process_group)]
        if len(ranks[0] & ranks[1]) > 1:
            raise ValueError(
                f"Expected '{name}' to sum its statistics over processes with the same heads (got some of this group). "
                "Pass `sync_statistics` the group of these, or leave it out: this process has all tokens of the group."
            )

    @torch.no_grad()
    def _gather(self, buffer: Tensor, view: Tensor, dim: int) -> None:
        """Fill a buffer with the heads of all processes. ``view`` holds the heads of this process, in any dtype."""
        view = view.contiguous()
        parts = [torch.empty_like(view) for _ in range(self.processes)]
        distributed.all_gather(parts, view, group=self.process_group)
        if buffer.dtype != view.dtype:
            buffer.data = buffer.to(view.dtype)
        buffer.copy_(torch.cat(parts, dim))

    def reset_parameters(self) -> None:
        """Reset the parameters of the layer, with random numbers of torch's default generator."""
        self.conv.reset_parameters()

    def extra_repr(self) -> str:
        return f"processes={self.processes}"


class _AllToAll(torch.autograd.Function):
    """All-to-all exchange: send rows to each process and receive rows from each; backward, gradients return."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.splits, ctx.group = (sent, received), group
        out = x.new_empty(sum(received), *x.shape[1:])
        distributed.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.splits
        return cast(Tensor, _AllToAll.apply(grad, received, sent, ctx.group)), None, None, None


def _digest(x: Tensor | None) -> int:
    """Hash a tensor of integers to one number; None gives -1."""
    if not isinstance(x, Tensor):
        return -1
    return int((x.long().flatten() * torch.arange(1, x.numel() + 1, device=x.device)).sum()) & 2**62 - 1


def _group(group: Any) -> Any:
    return distributed.group.WORLD if group is None else group


def _check_gathered(tensor: Tensor | None, name: str) -> None:
    """Raise ValueError if a parameter is sharded."""
    checks.require(not hasattr(tensor, "full_tensor"), name, "to be gathered", "a shard of it", _SHARD_ABOVE)
