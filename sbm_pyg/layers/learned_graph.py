r"""``LearnedGraph``: a graph source for any layer of PyG that takes ``edge_weight``, trained by the loss of the task.

In: node features, and optionally edges to keep or candidates. Out: ``edge_index`` and ``edge_weight``, whose gradient
goes on to the edge probabilities of the source. Not here: graph sources (``sources``), the convolutions, and the
attention layer (``attention``).
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..graphs.graph import Adjacency, AttentionGraph
from ..graphs.ragged import Tokens, draw_seed, resolve_ptr
from ..ops import checks
from ..ops.schemas import weigh_effect
from ..ops.segments import upcast
from ..sources.candidates import Candidates
from ..sources.interface import Choice, GraphSource
from ..sources.learned import LearnedSource
from ..sources.sampling import SBMSource
from ..sources.sbm import SBMHead
from ..training.gradients import draw_probes

__all__ = ["LearnedGraph", "edge_weights"]

PATIENCE = 16
"""Training calls in a row without a gradient after which a LearnedGraph warns."""


class LearnedGraph(nn.Module):
    r"""Learns ``edge_index`` for any graph convolution that takes ``edge_weight``.

    A source gives each pair of nodes a probability, and a graph is drawn: each pair is an edge independently with its
    probability. In training, a few pairs that are not edges, the *probes*, are added with weight 0, while edges get
    weight 1. A convolution that multiplies messages by their weights then computes the same output as without probes.
    The backward pass gives the gradient of each weight, and so, to first order,

    .. math:: \frac{\partial L}{\partial w_{ij}} \approx L(\text{with edge } ij) - L(\text{without}) ,

    for edges and probes at the cost of one backward pass, whatever layers lie in between. Divided by the probability
    to see the pair, this is the gradient of its probability: the weights are those of
    :func:`~sbm_pyg.training.gradients.attach_local_expectation`. In evaluation mode there are no probes and all weights
    are 1.

    The layer decides where this is exact; docs/guides/learned_graph.md lists the bias for each layer.

    * Sums of messages, as in ``GraphConv``, ``SimpleConv`` and ``TAGConv(normalize=False)``: the gradient is unbiased
      if the loss is linear in each edge, as a linear loss of one or two linear layers. Otherwise it is a first-order
      approximation.
    * Degrees normalized by the weights, as in ``GCNConv``, ``ChebConv``, ``TAGConv`` and ``ARMAConv``: it is a
      first-order approximation, since an edge also changes the weights of other edges. Without self-loops, a probe of a
      node without edges counts as 0.
    * Means, maxima and attention over messages: a probe of weight 0 changes the output of training. The guide shows
      other forms of means and attention.
    * Layers without ``edge_weight``, as ``GATConv``, ``GINEConv`` and ``SAGEConv``: nothing learns, and the module
      warns after 16 training calls in a row without a gradient. The guide shows a hook for layers that sum messages.
    * Layers that keep their first graph, as ``GCNConv(cached=True)``: leave out ``cached``, since a cached layer
      ignores all later graphs.

    Cost: the source, messages along E + E' pairs in place of E, and O((E + E') K) for the probabilities, where E' is
    the number of probes. A source of one head is needed, and edges are directed, from source to target.

    Args:
        source: A source with probabilities: :class:`~sbm_pyg.SBMSource`,
            :class:`~sbm_pyg.sources.indexer.IndexerSource` with ``select="bernoulli"``, or your own. The source gets
            the features of all nodes as one head. A source that selects edges by rank works only in evaluation mode or
            frozen. Self-loops of the source and of its window are left out, unless ``candidates`` or ``keep`` of the
            call contain them. An int C stands for ``SBMSource(SBMHead(C), target_density=0.1)``.
        heads: 1, as a convolution has one graph.
        probes: Mean number of probes per node in training, in [0, inf]. A node with fewer candidates probes all its
            candidates. With 0, pairs without an edge get no gradient.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The number of probes is out of range, or the source has several heads, blocks of tokens or the
            method ``"fastrg"``.

    Shapes:
        - features ``[N, C]``;
        - output ``edge_index`` ``[2, E + E']`` int64, the edges first, and ``edge_weight`` ``[E + E']`` in the dtype of
          the features.

    Example:
        >>> from sbm_pyg import SBMHead, SBMSource
        >>> from torch_geometric.nn import GraphConv
        >>> learned = LearnedGraph(SBMSource(SBMHead(16, num_clusters=8), target_density=0.1))
        >>> conv, x = GraphConv(16, 2), torch.randn(50, 16)
        >>> edge_index, edge_weight = learned(x)
        >>> conv(x, edge_index, edge_weight).square().mean().backward()
        >>> learned.source.head.clusters.grad is not None
        True

    Reference: Titsias and Lazaro-Gredilla, "Local Expectation Gradients for Black Box Variational Inference", NeurIPS
    2015; docs/concepts.md derives the weights. In that paper the expectation over one variable is exact; here it is
    computed to first order, from one pass for all pairs.
    """

    eval_seed: int | None = 0
    """Seed of calls without ``seed`` in evaluation mode. With None, torch's default generator draws a seed."""

    def __init__(self, source: GraphSource | int, heads: int = 1, *, probes: float = 8.0) -> None:
        super().__init__()
        heads = checks.integer("heads", heads, 1, "A convolution has one graph.")
        way_out = "Build an SBMSource, an IndexerSource, or a subclass of LearnedSource."
        checks.kind("source", source, GraphSource | int, "a GraphSource, or the number of channels", way_out)
        if not isinstance(source, GraphSource):
            source = SBMSource(SBMHead(source, heads), target_density=0.1)
        checks.number("probes", probes, "[0, inf]", "It is the mean number of probes per node.")
        parts = (source, *(getattr(source, name, None) for name in ("head", "scorer")))
        heads = max(heads, *(getattr(part, "heads", 1) for part in parts))
        checks.require(heads == 1, "source", "with one head, as a convolution has one graph", heads, "Use heads=1.")
        if getattr(source, "block_size", 1) != 1:
            raise ValueError(
                f"Expected 'source' with block_size=1 (got {source.block_size}). Nodes of a graph have no order."
            )
        way_out = "The gradient is derived for it."
        checks.require(source.method != "fastrg", "source", "with method='bernoulli'", "'fastrg'", way_out)
        self.source, self.probes = source, probes
        self._unanswered = 0

    def reset_parameters(self) -> None:
        """Reset the parameters of the source, with random numbers of torch's default generator."""
        self.source.reset_parameters()

    @overload
    def forward(self, x: Tensor, *, keep: Adjacency | None = None, candidates: Adjacency | None = None,
                ptr: Tensor | None = None, batch: Tensor | None = None, seed: int | None = None,
                sequence_ids: Tensor | None = None, return_graph: Literal[False] = False,
                return_choice: Literal[False] = False) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    @overload
    def forward(self, x: Tensor, *, keep: Adjacency | None = None, candidates: Adjacency | None = None,
                ptr: Tensor | None = None, batch: Tensor | None = None, seed: int | None = None,
                sequence_ids: Tensor | None = None, return_graph: bool = False,
                return_choice: bool = False) -> Any: ...  # fmt: skip
    def forward(
        self,
        x: Tensor,
        *,
        keep: Adjacency | None = None,
        candidates: Adjacency | None = None,
        ptr: Tensor | None = None,
        batch: Tensor | None = None,
        seed: int | None = None,
        sequence_ids: Tensor | None = None,
        return_graph: bool = False,
        return_choice: bool = False,
    ) -> Any:
        """Choose the edges.

        Args:
            x: Node features ``[N, C]``.
            keep: Edges that the graph always has, in addition to the drawn ones: an ``edge_index``, any other adjacency
                of PyG, or an :class:`AttentionGraph`. Kept edges send no gradient to the source. With the edges of a
                data set, the source adds edges to the data.
            candidates: Pairs that may be edges, in the same forms. None: all pairs of different nodes of a graph. With
                the edges of a data set, the source thins the data. All options of the source apply to these pairs: a
                target density is a fraction of the candidates, a budget counts candidates; a window is added. The
                source must be a :class:`~sbm_pyg.LearnedSource`. An :class:`~sbm_pyg.sources.indexer.IndexerSource`
                with a target density still scores all pairs.
            ptr: Offsets of the graphs of a batch, ``[B+1]`` int64, as ``batch.ptr`` of PyG. None: one graph.
            batch: Instead of ``ptr``, the graph of each node, ``[N]`` int64.
            seed: Fixes the edges and the probes. None: in training from torch's default generator, in evaluation mode
                :attr:`eval_seed`. In training, pass a different seed at each step: running means count calls with equal
                seeds as one step.
            sequence_ids: Number of each graph, ``[B]``; see :func:`~sbm_pyg.sample_edges`. With ``seed``, a graph gets
                the same edges in any batch.
            return_graph: Also return the chosen :class:`AttentionGraph`, without probes.
            return_choice: Also return the :class:`Choice`: the graph and its probabilities, e.g. for a price on edges,
                ``choice.probability.expected_density().mean()``.

        Returns:
            ``(edge_index, edge_weight)``, and the requested extras, in the order graph, choice. Without gradients, and
            in evaluation mode, the result is the edges of the graph with weights 1. At a target density of 1, as in the
            dense phase of a :class:`~sbm_pyg.Sparsifier`, all candidates are edges, O(N^2) without ``candidates``, and
            the source learns nothing.

        Raises:
            TypeError: An argument has the wrong type, or the source cannot score candidates.
            ValueError: Shapes or offsets do not fit, an edge joins two graphs, or the source has no probabilities, or
                selects edges by rank in training.
        """
        checks.tensors(x=x)
        checks.floating(x=x)
        checks.shape("x", x, (None, None), "[N, C]", "It holds the features of each node.")
        for name, value in (("return_graph", return_graph), ("return_choice", return_choice)):
            checks.flag(name, value, "It asks for an extra output.")
        seed = self.eval_seed if seed is None and not self.training else seed
        tokens = Tokens(
            x[None], query_ptr=resolve_ptr(x.size(0), ptr, batch, device=x.device), seed=draw_seed(seed),
            sequence_ids=sequence_ids,
        )  # fmt: skip
        keep_graph, candidate_graph = _over(keep, tokens, "keep"), _over(candidates, tokens, "candidates")
        among = None if candidate_graph is None else Candidates(candidate_graph, tokens)
        choice = self._choose(tokens) if among is None else self._choose_among(among, tokens)
        if keep_graph is not None:
            choice = choice.force(keep_graph)
        edge_index, edge_weight = self._weigh(choice, tokens, among)
        extras: list[Any] = [choice.graph] if return_graph else []
        extras += [choice] if return_choice else []
        return edge_index, edge_weight, *extras

    def _choose(self, tokens: Tokens) -> Choice:
        """The choice of the source among all pairs of different nodes."""
        choice = self.source(tokens)
        dense, choice = not choice.is_stored, choice.stored()
        if choice.probability is None and not dense:
            raise ValueError(
                f"Expected 'source' with probabilities (got {type(self.source).__name__}, which has none to learn). "
                "Use `SourceGraph`, or pass the edges of the source to the layer."
            )
        if choice.graph.heads != 1 or choice.graph.block_size != 1:
            raise ValueError(
                "Expected 'source' to choose one graph of nodes (got "
                f"{choice.graph.heads} heads and blocks of {choice.graph.block_size}). Use one head and no blocks."
            )
        return choice.select(choice.graph.lag != 0)

    def _choose_among(self, among: Candidates, tokens: Tokens) -> Choice:
        """The choice of the source among candidates, without self-loops that are not candidates."""
        source: Any = self.source
        way_out = "Its `predict` computes their probabilities."
        checks.kind("source", source, LearnedSource, "a LearnedSource with 'candidates'", way_out)
        choice: Choice = source.choose_among(tokens, among)
        if choice.forced is None:
            return choice
        return choice.select((choice.graph.lag != 0) | among.graph.contains(choice.graph.edge_index))

    def _weigh(self, choice: Choice, tokens: Tokens, among: Candidates | None) -> tuple[Tensor, Tensor]:
        """The edges and their weights. In training, probes with weight 0 follow the edges."""
        graph, probability, like = choice.graph, choice.probability, tokens.query
        fixed = graph.edge_index, like.new_ones(graph.num_edges)
        if not self.training or not torch.is_grad_enabled():
            return fixed
        p = None if probability is None else probability.on(graph)  # None: all pairs, before graphs are sparse
        ranks = self.source.method == "top_k" or not choice.independent
        if ranks and any(tensor.requires_grad for tensor in (*self.source.parameters(), p) if tensor is not None):
            raise ValueError(
                "Expected 'source' to draw edges independently in training (got edges selected by rank). "
                "Use select='bernoulli'."
            )
        parameters = [parameter for parameter in self.source.parameters() if parameter.requires_grad]
        # also without an effect, as while all candidates are edges: DistributedDataParallel waits for each gradient
        anchor = torch.stack([parameter.sum() for parameter in parameters]).sum() * 0 if parameters else 0
        if p is None or probability is None or not p.requires_grad:
            return fixed[0], fixed[1] + anchor
        probes, chance = _probes_of(tokens, self.probes, among)
        probes = probes.select(~graph.contains(probes.edge_index))
        both = (p, probability.on(probes))
        weight = edge_weights(graph, probes, both, chance, choice.forced, choice.exploration, like.dtype)
        self._expect_gradient(weight)
        return torch.cat([graph.edge_index, probes.edge_index], 1), weight + anchor

    def _expect_gradient(self, weight: Tensor) -> None:
        """Warn, once, after several training calls in a row whose weights got no gradient."""
        if self._unanswered == PATIENCE:
            warnings.warn(
                f"Expected a backward pass to reach 'edge_weight' (got none in {PATIENCE} training calls). Pass it to "
                "a layer that multiplies messages by it, or call `eval()` where nothing learns.",
                stacklevel=6,
            )
        self._unanswered += 1
        weight.register_hook(self._answer)

    def _answer(self, grad: Tensor) -> None:
        self._unanswered = 0

    def extra_repr(self) -> str:
        return f"probes={self.probes}"


def _over(edges: Adjacency | None, tokens: Tokens, name: str) -> AttentionGraph | None:
    """The argument as a graph over the nodes, or None."""
    if edges is None:
        return None
    try:
        return AttentionGraph.over(edges, tokens.num_queries, tokens.num_keys, ptr=tokens.query_ptr)
    except (TypeError, ValueError) as error:  # it calls the edges 'edge_index' or 'graph'
        raise type(error)(f"Expected '{name}' to be edges between the nodes of 'x'. {error}") from None


def edge_weights(
    graph: AttentionGraph, probes: AttentionGraph, prob: tuple[Tensor, Tensor], chance: Tensor,
    forced: Tensor | None = None, exploration: float = 0.0, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Weights 1 of edges and 0 of probes, ``[E + E']``, whose gradient goes on to the probabilities.

    The gradient of a probability is the gradient of the weight of its pair, multiplied by the weight that
    :func:`.attach_local_expectation` gives to its effect. Cost O(E + E').

    Args:
        graph: The graph, of one head.
        probes: Pairs that are not edges.
        prob: Probabilities of the edges ``[E]`` and of the probes ``[E']``.
        chance: Probability with which a pair becomes a probe, for each target, ``[N]``.
        forced: Edges that exist regardless of p, ``[E]`` bool. Forced edges send no gradient.
        exploration: Added to each probability when the graph was drawn.
        dtype: Type of the weights. None: that of the probabilities.
    """
    both = (graph.rowptr, probes.rowptr, chance, forced)
    weight: Tensor = _Weights.apply(*prob, *both, exploration, dtype or prob[0].dtype)
    return weight


class _Weights(torch.autograd.Function):
    """Makes weights 1 of edges and 0 of probes. Backward, gradients of weights become gradients of probabilities.

    Gradients that are not finite count as 0: degrees normalized without self-loops are not differentiable at a node
    without edges.
    """

    @staticmethod
    def forward(
        prob: Tensor, probe_prob: Tensor, rowptr: Tensor, probe_rowptr: Tensor, chance: Tensor, forced: Tensor | None,
        exploration: float, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        return torch.cat([torch.ones_like(prob, dtype=dtype), torch.zeros_like(probe_prob, dtype=dtype)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:6])
        ctx.exploration = inputs[6]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *probs, rowptr, probe_rowptr, chance, forced = ctx.saved_tensors
        wide = torch.promote_types(upcast(grad).dtype, upcast(probs[0]).dtype)
        effects = grad.to(wide).nan_to_num(0.0, 0.0, 0.0).split([p.numel() for p in probs])
        edges = weigh_effect(effects[0], probs[0], rowptr, chance, forced, ctx.exploration, False)
        probes = weigh_effect(effects[1], probs[1], probe_rowptr, chance, None, ctx.exploration, True)
        return edges, probes, *[None] * 6


def _probes_of(tokens: Tokens, per_node: float, among: Candidates | None) -> tuple[AttentionGraph, Tensor]:
    """Draw probes among all pairs of different nodes, or among candidates; also return the probability of a probe."""
    if among is None:
        ptr = tokens.query_ptr
        empty = tokens.query_position.new_zeros(tokens.num_queries + 1), tokens.query_position.new_zeros(0)
        nothing = AttentionGraph._trusted(*empty, tokens.num_queries, tokens.num_keys, 1, ptr, ptr)
        probes, chance = draw_probes(nothing, per_node, seed=tokens.seed, sequence_ids=tokens.sequence_ids)
        return probes.select(probes.lag != 0), chance
    chance = (per_node / among.graph.degree[0].clamp(min=1)).clamp(max=1).float()
    return among.draw(chance[among.graph.edge_row], 1), chance
