"""Batches of ragged sequences: :class:`Tokens`, offsets, sequence numbers, seeds, and conversion to padded tensors.

In and out: the tokens of all sequences in one tensor, ``[N, ...]``, with offsets ``ptr`` [B+1]; or padded tokens,
``[B, L, ...]``, with a mask. Not here: graphs over these tokens (``graph``), and rules that choose them (``sources``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from numbers import Real
from operator import le
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.utils import to_dense_batch

from ..ops import checks, values
from ..ops.segments import allowed_keys
from ..ops.values import can_read, require_values

__all__ = [
    "Tokens", "check_tensor", "count_pairs", "draw_seed", "offsets", "pad", "resolve_ptr", "resolve_sequence_ids",
    "resolve_sides", "unpad",
]  # fmt: skip

HEAD_BITS = 24
"""Bits of the number of a head in the counters of random words."""
_VALID: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Offsets on a device that have been checked: the number of tokens, and the version of the tensor at that time."""


@dataclass(frozen=True, eq=False, repr=False)
class Tokens:
    """Queries and keys of a batch of ragged sequences: the argument of graph sources and rules.

    The constructor checks all arguments and fills in those that are None, except ``sequence_ids``; sources, rules and
    kernels do not check them again. ``dataclasses.replace`` makes a copy with other fields.

    Args:
        query: Queries of each head, ``[H, N, C]``.
        key: Keys of each head, ``[H, M, C]``. None: self-attention, the queries are the keys.
        query_ptr: Offsets of the sequences in the queries, ``[B+1]`` int64. None: one sequence.
        key_ptr: Offsets of the sequences in the keys, ``[B+1]`` int64. None: those of the queries.
        bipartite: If True, queries and keys are different tokens, even if N = M. False: each query is the token of the
            key at its position. None: True if ``key`` is another tensor than ``query``.
        is_causal: If True, no query attends to a later key, and its row does not depend on later tokens. The graph is
            causal (:attr:`AttentionGraph.is_causal`), so densities count only the pairs that are allowed.
        seed: Integer of 64 bits that determines all random choices.
        sequence_ids: Number of each sequence, ``[B]`` int64; see :func:`sbm_pyg.sample_edges`. None: the position in
            the batch.
        at_end: If True, queries are the last tokens of the sequences of keys, as with a cache of earlier keys: the last
            query of a sequence is at the position of its last key. Each row is then the same as for the whole sequence.
            The graph is not marked as causal, since its rows do not begin at the first token. False: positions count
            from the start of both sequences.

    Raises:
        TypeError: An argument has the wrong type, or queries and keys have different dtypes.
        ValueError: Shapes, devices or offsets do not fit each other, ``bipartite`` is False and sequences have
            different numbers of queries and keys, or the seed does not fit into 64 bits.

    Example:
        >>> tokens = Tokens(torch.randn(2, 10, 8), query_ptr=torch.tensor([0, 4, 10]), is_causal=True)
        >>> tokens.key is tokens.query, tokens.bipartite, tokens.allowed_keys.tolist()
        (True, False, [1, 2, 3, 4, 1, 2, 3, 4, 5, 6])
    """

    query: Tensor
    key: Tensor = None  # type: ignore[assignment]  # these are set after __post_init__
    query_ptr: Tensor = None  # type: ignore[assignment]
    key_ptr: Tensor = None  # type: ignore[assignment]
    bipartite: bool = None  # type: ignore[assignment]
    is_causal: bool = False
    seed: int = 0
    sequence_ids: Tensor | None = None
    at_end: bool = False

    def __post_init__(self) -> None:
        query, key = self.query, self.query if self.key is None else self.key
        checks.tensors(query=query, key=key)
        checks.floating(query=query, key=key)
        checks.shape("query", query, (None, None, None), "[H, N, C]", "Heads come first.")
        sizes = (query.size(0), None, query.size(2))
        checks.shape("key", key, sizes, "[H, M, C]", "It has the heads and channels of 'query'.")
        checks.same_device("query", query, key=key)
        if key.dtype != query.dtype:
            raise TypeError(f"Expected 'key' to be {query.dtype}, as 'query' is (got {key.dtype}). Convert it.")
        if not torch.compiler.is_compiling() and query.size(0) < 1:
            raise ValueError(f"Expected 'query' of at least one head (got {list(query.shape)}). It is [H, N, C].")
        ptr = (self.query_ptr if self.key_ptr is None else self.key_ptr, self.query_ptr)
        names = ("query_ptr", "key_ptr")
        ptrs = resolve_sides(query.size(1), key.size(1), ptr, None, query.device, names=names)
        checks.flag("at_end", self.at_end, "If True, queries are the last tokens of the sequences of keys.")
        bipartite = key is not query or self.at_end if self.bipartite is None else self.bipartite
        checks.flag("bipartite", bipartite, "If True, queries and keys are different tokens.")
        checks.flag("is_causal", self.is_causal, "If True, no query attends to a later key.")
        seed = checks.seed(self.seed)
        self.__dict__.update(key=key, query_ptr=ptrs[0], key_ptr=ptrs[1], bipartite=bipartite, seed=seed)
        self._check_sequences()

    def _check_sequences(self) -> None:
        """Raise ValueError for wrong `sequence_ids`, or if the sequences of queries differ from those of equal keys."""
        ptrs = (self.query_ptr, self.key_ptr)
        if not self.bipartite and ptrs[0] is not ptrs[1] and _differ(self.num_queries, self.num_keys, ptrs):
            raise ValueError(
                "Expected 'bipartite' to be True if sequences have different numbers of queries and keys (got False, "
                f"N = {self.num_queries}, M = {self.num_keys}). Pass bipartite=True, or a layer a pair (keys, queries)."
            )
        check_sequence_ids(self.sequence_ids, ptrs[0].numel() - 1)

    @classmethod
    def _trusted(
        cls, query: Tensor, key: Tensor, query_ptr: Tensor, key_ptr: Tensor, bipartite: bool, is_causal: bool,
        seed: int, sequence_ids: Tensor | None, at_end: bool = False,
    ) -> Tokens:  # fmt: skip
        """Make Tokens without checks, for a layer that has checked all arguments and resolved the offsets."""
        tokens = object.__new__(cls)
        sides = {"query": query, "key": key, "query_ptr": query_ptr, "key_ptr": key_ptr, "bipartite": bipartite}
        tokens.__dict__.update(sides, is_causal=is_causal, seed=seed, sequence_ids=sequence_ids, at_end=at_end)
        tokens._check_sequences()
        return tokens

    def with_vectors(self, query: Tensor, key: Tensor) -> Tokens:
        """Copy with other vectors, such as projections ``[H, N, r]`` and ``[H, M, r]``, without checks."""
        tokens = object.__new__(Tokens)
        tokens.__dict__.update(self.__dict__, query=query, key=key)
        return tokens

    def detached(self) -> Tokens:
        """Copy with vectors that send no gradient."""
        query = self.query.detach()
        return self.with_vectors(query, query if self.key is self.query else self.key.detach())

    def __repr__(self) -> str:
        sizes = f"{self.query_ptr.numel() - 1} sequences, {self.heads} heads, {self.num_queries} queries"
        return f"{type(self).__name__}({sizes}, {self.num_keys} keys)"

    @property
    def heads(self) -> int:
        """Number of heads H."""
        return self.query.size(0)

    @property
    def num_queries(self) -> int:
        """Number of queries N."""
        return self.query.size(1)

    @property
    def num_keys(self) -> int:
        """Number of keys M."""
        return self.key.size(1)

    @cached_property
    def query_sequence(self) -> Tensor:
        """The sequence of each query, ``[N]`` int64."""
        return torch.repeat_interleave(self.query_ptr.diff(), output_size=self.num_queries)

    @cached_property
    def key_sequence(self) -> Tensor:
        """The sequence of each key, ``[M]`` int64."""
        return torch.repeat_interleave(self.key_ptr.diff(), output_size=self.num_keys)

    @cached_property
    def query_position(self) -> Tensor:
        """Position of each query in its sequence, from 0, ``[N]`` int64; in the sequence of keys, if ``at_end``."""
        position = count_positions(self.query_ptr, self.num_queries)
        if not self.at_end:
            return position
        return position + (self.key_ptr.diff() - self.query_ptr.diff())[self.query_sequence]

    @cached_property
    def key_position(self) -> Tensor:
        """The position of each key in its sequence, from 0, ``[M]`` int64."""
        return count_positions(self.key_ptr, self.num_keys)

    @cached_property
    def allowed_keys(self) -> Tensor:
        """Number of keys that each query may attend to, ``[N]`` int64, counted from the first key of its sequence."""
        if self.at_end and self.is_causal:
            return self.query_position + 1
        return allowed_keys(self.query_ptr, self.key_ptr, self.num_queries, self.is_causal)

    @property
    def has_causal_graph(self) -> bool:
        """True if graphs over these tokens are causal, with positions that count from the start of both sequences."""
        return self.is_causal and not self.at_end

    @property
    def are_same(self) -> bool:
        """True if queries are the keys, or the last tokens of the keys, so that the distance of a pair is defined."""
        return not self.bipartite or self.at_end

    def _drop_later(self, graph: Any) -> Any:
        """Remove edges from later keys from a graph or a choice, if the tokens are causal."""
        if not self.is_causal or not self.at_end:
            return graph.causal() if self.is_causal else graph
        edges = getattr(graph, "graph", graph)
        earlier = self.key_position[edges.col] <= self.query_position[edges.edge_row % self.num_queries]
        return graph if bool(earlier.all()) else graph.select(earlier)

    @property
    def first_head(self) -> int:
        """Number of head 0 in the random words. It is 0, unless the heads of a layer are divided among processes."""
        ids = self.sequence_ids
        return 0 if ids is None or not ids.numel() else int(ids[0] >> 32)

    @property
    def first_key(self) -> Tensor:
        """First key of the sequence of each query, numbered through all heads, ``[H*N]`` int64."""
        head = self.num_keys * torch.arange(self.heads, device=self.key.device)
        return (head[:, None] + self.key_ptr[self.query_sequence]).flatten()


def _differ(num_queries: int, num_keys: int, ptrs: tuple[Tensor, Tensor]) -> bool:
    """True if sequences have different numbers of queries and keys; False if reading that would wait for a device."""
    if torch.compiler.is_compiling():
        return False
    return num_queries != num_keys or (values.can_read_without_sync(*ptrs) and not torch.equal(*ptrs))


def check_record(tokens: object) -> None:
    """Raise TypeError unless ``tokens`` is a :class:`Tokens`."""
    checks.kind("tokens", tokens, Tokens, "Tokens", "Build them with `Tokens(query, key)`.")


def check_tensor(x: object, name: str, optional: bool = True) -> None:
    """Raise TypeError unless ``x`` is a dense tensor or, if optional, None."""
    if not (optional and x is None):
        checks.dense(name, x)


def as_integers(x: Any) -> Any:
    """An int64 tensor of a list or a tuple of ints; any other object is returned unchanged."""
    is_list = isinstance(x, tuple | list) and all(isinstance(n, int) and not isinstance(n, bool) for n in x)
    return torch.tensor(x, dtype=torch.int64) if is_list and x else x


def unmerged(x: Tensor) -> Tensor:
    """Return the tensor; in compiled code a copy, for ops such as ``nonzero`` whose output size depends on values.

    The compiler merges equal calls in a program, for example those of two layers over one mask, and loses the size of
    the second, which later code refers to (``InductorError: u3 not in ...``). It does not merge calls that depend on
    newly allocated memory, such as calls over this copy.
    """
    if not torch.compiler.is_compiling():
        return x
    return torch.cat([x.flatten(), torch.empty(1, dtype=x.dtype, device=x.device)])[:-1].view(x.shape)


def offsets(counts: Tensor) -> Tensor:
    """Offsets ``[n+1]`` int64 of counts ``[n]``."""
    plain = isinstance(counts, Tensor) and counts.layout == torch.strided and counts.dim() == 1
    if not plain or counts.is_floating_point() or counts.is_complex():
        what = f"{counts.dtype} {list(counts.shape)}" if isinstance(counts, Tensor) else type(counts).__name__
        raise TypeError(f"Expected 'counts' to be [n] integers (got {what}). It holds the size of each group.")
    return torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0, dtype=torch.int64)])


def count_positions(ptr: Tensor, count: int) -> Tensor:
    """Position of each token in its sequence, from 0, ``[count]`` int64."""
    start = torch.repeat_interleave(ptr[:-1], ptr.diff(), output_size=count)
    return torch.arange(count, device=ptr.device) - start


def count_pairs(query_ptr: Tensor, key_ptr: Tensor, is_causal: bool = False) -> Tensor:
    """Number of pairs of a query and a key in each sequence, ``[B]`` int64. If causal, later keys do not count."""
    queries, keys = query_ptr.diff(), key_ptr.diff()
    if not is_causal:
        return queries * keys
    both = torch.minimum(queries, keys)
    return both * (both + 1) // 2 + (queries - both) * keys


def resolve_ptr(
    total: int,
    ptr: Tensor | None = None,
    batch: Tensor | None = None,
    *,
    name: str = "ptr",
    device: torch.device | None = None,
) -> Tensor:
    """Offsets of the sequences in a ragged batch, from ``ptr``, from ``batch``, or for one sequence.

    Args:
        total: Number of tokens N.
        ptr: Offsets, ``[B+1]`` int64, from 0 to N, ascending; or None. A sequence may have no token.
        batch: Sequence number of each token, ``[N]`` int64, sorted; or None. A number that does not occur belongs to an
            empty sequence.
        name: Name of ``ptr`` in error messages.
        device: Device of the result, usually that of the tokens. None: the device of the argument. (A PyG batch keeps
            offsets on the CPU unless its features are on CUDA.)

    Returns:
        Offsets, ``[B+1]`` int64. On the CPU they are a copy, so later writes into ``ptr`` have no effect.

    Raises:
        TypeError: Offsets or sequence numbers are not an integer tensor.
        ValueError: The offsets do not describe N tokens.
    """
    checks.require(ptr is None or batch is None, name, "or 'batch'", "both", "Leave one of them out.")
    ptr, batch = as_integers(ptr), as_integers(batch)
    check_tensor(ptr, name)
    check_tensor(batch, "batch")
    total = checks.integer("total", total, 0, "It is the number of tokens.")
    if ptr is None and batch is None and not torch.compiler.is_compiling() and total == checks.INT64:
        raise ValueError("Expected 'total' below 2**63 - 1 (got more). It is the number of tokens.")
    if device is not None and not isinstance(device, torch.device):
        device = checks.device(device)
    if batch is not None:
        require_values(batch, "batch")
        if batch.dim() != 1 or batch.numel() != total:
            raise ValueError(
                f"Expected 'batch' to be [{total}], one sequence number per token (got {list(batch.shape)}). "
                "Pass the `batch` vector of the same tokens."
            )
        if batch.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"Expected 'batch' to be int64 (got {batch.dtype}). Convert it with `.long()`.")
        ptr = _ptr_of_batch(batch, total)
    if ptr is None:
        return trust_offsets(torch.tensor([0, total], dtype=torch.int64, device=device), total)
    if ptr.dim() != 1 or ptr.numel() < 1:
        raise ValueError(
            f"Expected '{name}' to be [B+1] (got {list(ptr.shape)}). "
            f"Pass the offsets of the sequences, from 0 to {total}: `ptr` of a PyG batch, not `batch`."
        )
    if ptr.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"Expected '{name}' to be int64 (got {ptr.dtype}). Convert it with `.long()`.")
    if ptr.is_meta and device is not None and device.type != "meta":
        require_values(ptr, name)
    if can_read(ptr):
        if values.can_read_without_sync(ptr) or ptr.is_inference() or _VALID.get(ptr) != (total, ptr._version):
            _check_ptr_values(ptr, total, name)
    else:  # no branch on values, but kernels must never see one that is out of range
        fits = (ptr[0] == 0) & (ptr[-1] == total) & (ptr.diff() >= 0).all()
        torch._assert_async(fits, f"Expected '{name}' to run from 0 to the number of tokens, ascending.")
    # numpy may write into a tensor on the CPU without a new version, so the offsets that are kept are a copy
    return trust_offsets(ptr.to(device=device, dtype=torch.int64, copy=values.can_read_without_sync(ptr)), total)


def trust_offsets(ptr: Tensor, total: int) -> Tensor:
    """Mark offsets on a device as checked and return them. Later calls skip the check, which waits for the device."""
    if can_read(ptr) and not values.can_read_without_sync(ptr) and not ptr.is_inference():
        _VALID[ptr] = total, ptr._version
    return ptr


def resolve_sides(
    num_queries: int,
    num_keys: int,
    ptr: Any,
    batch: Any,
    device: torch.device | None = None,
    *,
    names: tuple[str, str] = ("ptr", "ptr"),
) -> tuple[Tensor, Tensor]:
    """Offsets of the sequences in queries and in keys; one tensor for both if offsets are given once and N = M.

    Args:
        num_queries, num_keys: N and M.
        ptr, batch, device: As in :func:`resolve_ptr`; offsets and numbers also as a pair (keys, queries), PyG's order.
        names: Names of the offsets of queries and of keys in error messages.

    Raises:
        TypeError, ValueError: As :func:`resolve_ptr`; or queries and keys have different numbers of sequences.
    """
    ptr, batch = as_integers(ptr), as_integers(batch)
    for name, value in (("ptr", ptr), ("batch", batch)):
        if isinstance(value, tuple | list) and len(value) != 2:
            raise ValueError(f"Expected '{name}' to be a tensor or a pair, keys and queries (got {len(value)}).")
    pairs = [value if isinstance(value, tuple | list) else (value, value) for value in (ptr, batch)]
    query_ptr = resolve_ptr(num_queries, pairs[0][1], pairs[1][1], name=names[0], device=device)
    # After a graph break both numbers are inputs of a graph. A guard on `num_keys == num_queries` would merge their
    # symbols, and torch 2.13 then generates code with an undefined one.
    if all(one is two for one, two in pairs) and statically_known_true(num_keys == num_queries):
        return query_ptr, query_ptr
    key_ptr = resolve_ptr(num_keys, pairs[0][0], pairs[1][0], name=names[1], device=device)
    if key_ptr.shape != query_ptr.shape:
        raise ValueError(
            f"Expected '{names[1] if batch is None else 'batch'}' to hold as many sequences of keys as of queries "
            f"(got {key_ptr.numel() - 1} and {query_ptr.numel() - 1}). Sequence b of the queries attends to sequence b "
            "of the keys."
        )
    return query_ptr, key_ptr


def stored_ptr(store: Any, *, device: torch.device | None = None) -> Tensor | None:
    """Offsets of the sequences of PyG ``Data``, or of one node type of ``HeteroData``, ``[B+1]`` int64.

    Offsets come from ``ptr``, else from ``batch``, and :func:`resolve_ptr` checks them; None without both attributes.
    """
    ptr, batch = store.get("ptr"), store.get("batch")
    if ptr is None and batch is None:
        return None
    return resolve_ptr(store.num_nodes, ptr, batch if ptr is None else None, device=device)


def _ptr_of_batch(batch: Tensor, total: int) -> Tensor:
    """Offsets of sequences from the sequence number of each of their tokens."""
    step = torch.cat([batch.new_full((1,), -1), batch]).long().diff()  # sequences that begin at each token
    fits = (step >= 0).all() & (step[:1] > 0).all()
    expected = "Expected 'batch' to be sorted, from 0"
    if not can_read(batch):  # no branch on values, but tokens must never be in a wrong sequence
        torch._assert_async(fits, f"{expected}.")
    elif not bool(fits):
        way_out = "`batch.unique_consecutive(return_inverse=True)[1]` numbers the sequences of tokens."
        raise ValueError(f"{expected} (got another order). {way_out}")
    else:
        sequences = int(step.sum())
        checks.memory("batch", sequences, 8, batch.device, "Number the sequences from 0.", "sequences")
    first = torch.repeat_interleave(unmerged(step))  # the first token of each sequence
    return torch.cat([first, step.new_full((1,), total)])


def _check_ptr_values(ptr: Tensor, total: int, name: str) -> None:
    ends = ptr.tolist()
    if ends[0] != 0 or ends[-1] != total:
        raise ValueError(
            f"Expected '{name}' to run from 0 to {total}, the number of tokens (got {ends[0]} to {ends[-1]}). "
            "Use offsets, not lengths or sequence numbers, of all sequences."
        )
    if not all(map(le, ends, ends[1:])):
        sequence = next(number for number, (start, end) in enumerate(pairwise(ends)) if start > end)
        raise ValueError(
            f"Expected '{name}' to be ascending (got a decrease at sequence {sequence}). Use offsets, not lengths."
        )


def draw_seed(seed: int | None = None, generator: torch.Generator | None = None) -> int:
    """The given seed, or a seed in ``0 .. 2**63-1`` drawn from a generator; None: from torch's default generator.

    Raises:
        TypeError: The seed is not an integer.
        ValueError: Both are given, or the seed does not fit into 64 bits.
    """
    if seed is not None:
        checks.require(generator is None, "seed", "or 'generator'", "both", "Leave one out.")
        return checks.seed(seed)
    checks.kind("generator", generator, torch.Generator | None, "a torch.Generator", "Pass a number as `seed`.")
    device = "cpu" if generator is None else generator.device
    drawn = torch.randint(2**63 - 1, (), generator=generator, device=device).item()
    return cast(int, drawn)  # `int(...)` would need the number, which `torch.export` does not have yet


def check_sequence_ids(sequence_ids: Tensor | None, sequences: int) -> None:
    """Raise TypeError or ValueError unless ``sequence_ids`` is ``[B]`` integers or None. Values are not checked."""
    check_tensor(sequence_ids, "sequence_ids")
    if sequence_ids is None:
        return
    if sequence_ids.shape != (sequences,) or sequence_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"Expected 'sequence_ids' to be [{sequences}] int64 (got {list(sequence_ids.shape)} {sequence_ids.dtype}). "
            "It holds one number per sequence."
        )


def resolve_sequence_ids(sequence_ids: Tensor | None, sequences: int, device: torch.device, bits: int = 32) -> Tensor:
    """Number of each sequence, ``[B]`` int64, on a device. Random words depend on these numbers.

    None: the position in the batch. On the CPU the result is a copy. With 32 bits, the upper half of a number may hold
    the first head; see :func:`~sbm_pyg.sample_edges`.

    Raises:
        ValueError: Shape or dtype do not fit, or a number is outside ``0 .. 2**bits-1``.
    """
    check_sequence_ids(sequence_ids, sequences)
    if sequence_ids is None:
        return torch.arange(sequences, device=device)
    if sequences and can_read(sequence_ids):
        low, high = (int(bound) for bound in torch.aminmax(sequence_ids))
        if low < 0 or high >= 2 ** (bits + HEAD_BITS if bits == 32 else bits):
            raise ValueError(
                f"Expected 'sequence_ids' in 0 .. 2**{bits}-1 (got {low} to {high}). "
                "Use the position of each sequence in the data set."
            )
    if device.type != "meta":
        require_values(sequence_ids, "sequence_ids")
    return sequence_ids.to(device=device, dtype=torch.int64, copy=values.can_read_without_sync(sequence_ids))


def pad(x: Tensor, ptr: Tensor, fill_value: float = 0.0) -> tuple[Tensor, Tensor]:
    """Padded form of ragged tokens.

    Args:
        x: Tokens, ``[N, ...]``.
        ptr: Offsets, ``[B+1]`` int64.
        fill_value: Value of the padding, representable in the dtype of ``x``.

    Returns:
        The tokens, ``[B, L, ...]`` for a longest sequence of L tokens; and a mask, ``[B, L]`` bool, False on padding.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``ptr`` does not describe N tokens, ``fill_value`` is not representable in the dtype of ``x``, or
            the result does not fit into memory.

    Example:
        >>> padded, mask = pad(torch.arange(3.0), torch.tensor([0, 1, 3]))
        >>> padded.tolist(), mask.tolist()
        ([[0.0, 0.0], [1.0, 2.0]], [[True, False], [True, True]])
    """
    _check_tokens(x, 1, "[N, ...]")
    require_values(x, "x")
    if not (isinstance(fill_value, Real) and fill_value != fill_value):  # NaN
        checks.number("fill_value", fill_value, "[-inf, inf]", "It fills the padding; NaN is allowed.")
    if not (x.is_floating_point() or x.is_complex()):
        low, high = (0, 1) if x.dtype == torch.bool else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
        if not low <= fill_value <= high or fill_value != int(fill_value):
            raise ValueError(
                f"Expected 'fill_value' to be a value of {x.dtype}, as 'x' is (got {fill_value}). Convert 'x', or pass "
                "an integer in range."
            )
    lengths = resolve_ptr(x.size(0), ptr, device=x.device).diff()
    if not torch.compiler.is_compiling():
        numbers = lengths.numel() * max(lengths.tolist(), default=0) * math.prod(x.shape[1:])
        way_out = "Pad sequences of similar length together, or leave them ragged."
        checks.memory("ptr", numbers, x.element_size(), x.device, way_out, "numbers")
    if not torch.compiler.is_compiling() and not lengths.numel():
        return x.new_zeros(0, 0, *x.shape[1:]), lengths.new_zeros(0, 0, dtype=torch.bool)
    batch = torch.repeat_interleave(lengths, output_size=x.size(0))
    return to_dense_batch(x, batch, fill_value=fill_value, batch_size=lengths.numel())


def unpad(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Ragged form of padded tokens, the inverse of :func:`pad`.

    Args:
        x: Tokens, ``[B, L, ...]``.
        mask: False on padding, ``[B, L]`` bool.

    Returns:
        The tokens, ``[N, ...]``, and their offsets, ``[B+1]`` int64.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: The shapes do not fit.
    """
    _check_tokens(x, 2, "[B, L, ...]")
    check_tensor(mask, "mask", optional=False)
    require_values(mask, "mask")
    if mask.dtype != torch.bool or mask.shape != x.shape[:2]:
        raise ValueError(
            f"Expected 'mask' to be bool {list(x.shape[:2])}, as 'x' is [B, L, ...] "
            f"(got {mask.dtype} {list(mask.shape)}). It is False on padding."
        )
    return x[mask], offsets(mask.sum(1))


def _check_tokens(x: Tensor, dims: int, symbols: str) -> None:
    check_tensor(x, "x", optional=False)
    if x.dim() < dims:
        raise ValueError(f"Expected 'x' to be {symbols} (got {list(x.shape)}). Tokens come first.")
