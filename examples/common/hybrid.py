"""Causal models of sequences that differ in nothing but their attention, and the methods of attention by name.

Each layer is a gated short convolution, which binds neighbors, and then attention, as in the hybrids of "Zoology" (Arora et al.,
2023). Every method has the convolution, and every graph the self-loops; densities are those of the pairs beyond.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, pad

from examples.common import attention
from examples.common.command import option, read_method, require
from examples.common.tables import Row
from examples.common.tasks import Examples
from sbm_pyg import (
    SBM,
    AttentionConv,
    AttentionGraph,
    Choice,
    DCMMBias,
    GraphSource,
    LearnedSource,
    Tokens,
    sample_edges,
)
from sbm_pyg.sources import patterns, selectors

# Small densities are what these programs compare, and their tables state them.
warnings.filterwarnings("ignore", "A target density of .* leaves a query", UserWarning)

FIXED = ("window", "random", "random-fixed", "bigbird", "blocks", "lsh", "routing")
RULES = (*FIXED, "top-k")  # do not learn
METHODS = ("full", "dcmm", *RULES, "indexer", "key-selection", "sbm")
DENSE = ("full", "dcmm")  # attend to all pairs
CONTROLS = ("sparsifier", "fixed", "none")
BLOCK = 4  # keys of a block
SBM_OPTIONS: dict[str, Any] = {
    "estimator": "distill", "parameterization": "overlapping", "cluster_init": "orthogonal", "num_clusters": 64,
    "groups": 1,  # of blocks, whose product they are
    "probes": 16.0,
    "degree_corrected": 0,
    "bias": 0,  # blocks of a DCMM bias over the sampled edges
    "block_size": 1,  # tokens of a block
    "candidates": 1.0,  # edges that are drawn for each that is kept
    "row_group": 0,  # queries that share their draws; 0: the default of the layer
    "detach": 0,  # 1: the block model sends no gradient to queries and keys
    "control": "sparsifier",  # dense first; "fixed": sparse from the start; "none": no target density
    "frozen": 0,  # 1: what chooses stays as it began, so that learning to choose is all that differs from a run without
}  # fmt: skip
DCMM_OPTIONS: dict[str, Any] = {
    "num_clusters": 100, "degree": "relu", "squash": 1, "tied": 1, "entropy_weight": 0.1, "control": "none",
}  # fmt: skip
INDEX_OPTIONS: dict[str, Any] = {
    "select": "bernoulli",  # or "top_k"
    "estimator": "distill",  # top_k: "imitate", which takes its place, or "none"
    "k": 0,  # of top_k, the least number of keys of a query
    "index_heads": 4, "index_channels": 16,
    "detach": 0, "control": "sparsifier", "frozen": 0,
}  # fmt: skip
FIXED_OPTIONS: dict[str, Any] = {"control": "fixed"}
KEY_OPTIONS = {name: value for name, value in INDEX_OPTIONS.items() if not name.startswith("index_")}
OPTIONS = dict.fromkeys(RULES, FIXED_OPTIONS) | {
    "top-k": FIXED_OPTIONS | {"k": 0},
    "sbm": SBM_OPTIONS,
    "dcmm": DCMM_OPTIONS,
    "indexer": INDEX_OPTIONS,
    "key-selection": KEY_OPTIONS,
}


@dataclasses.dataclass(frozen=True)
class TaskRun:
    """What decides the outcome of a run on a task, which has other numbers of steps and batches."""

    task: str
    method: str  # and its options: "sbm:estimator=local"
    density: float
    seed: int
    steps: int = option(int, "(default: that of the task)", above=0)
    batch_size: int = option(int, "(default: that of the task)", above=0)
    learning_rate: float = option(float, "(default: that of the task)", above=0)
    channels: int = option(64, above=0)
    layers: int = option(2, above=0)
    heads: int = option(1, above=0)
    weight_decay: float = 0.1


def options_of(method: str) -> tuple[str, dict[str, Any]]:
    """Kind and options of a method.

    >>> options_of("sbm:estimator=local,probes=8")[1]["probes"]
    8.0
    """
    kind, options = read_method(method, METHODS, OPTIONS)
    control = options.get("control", "none")
    words = f"option 'control' of 'methods' among {', '.join(CONTROLS)}"
    require(control in CONTROLS, words, repr(control), "See --help.")
    return kind, options


def is_dense(method: str) -> bool:
    """Whether a method attends to all pairs."""
    return method.partition(":")[0] in DENSE


def run_name(method: str, density: float) -> str:
    """The name of a run in tables; a method that attends to all pairs has no density."""
    return method if is_dense(method) else f"{method} {100 * density:g} %"


class FixedDensity(GraphSource):
    """Chooses a share of the pairs beyond self-loops by a rule that does not learn.

    Args:
        rule: "window", the last tokens; "random", each pair by itself, drawn anew at each step; "random-fixed", the same, drawn
            once for all sequences; "bigbird", half of them a window and a quarter each random and global, which may coincide;
            "blocks" of keys with the best mean (MoBA), "lsh" in two rounds (Reformer) and "routing" by centroids (Routing
            Transformer), whose densities follow the tokens and are near to what is asked.
        density: Share of the pairs.
        channels, heads: Of the attention.
        window: Of "random", tokens before each that it attends to in any case; they count in the density.
        block: Of "blocks", keys of a block.
    """

    def __init__(
        self, rule: str, density: float, channels: int, heads: int, window: int = 0, block: int = BLOCK
    ) -> None:
        super().__init__()
        self.rule, self.density, self.recent, self.block = rule, density, window, block
        if rule == "routing":  # clusters of equal size hold as many pairs
            self.clusters = selectors.RoutingSource(channels, heads, max(2, round(1 / density)))
        if rule == "random-fixed":
            self.drawn: torch.Tensor
            self.register_buffer("drawn", torch.randint(2**31, ()))  # its seed at all steps

    def forward(self, tokens: Tokens) -> Choice:
        """As any source of a causal layer; sequences have one length."""
        query, ptr, seed = tokens.query, tokens.query_ptr, tokens.seed
        length = int(ptr[1])
        degree = self.density * (length - 1) / 2  # beyond the self-loop, in the mean
        loops = patterns.window(None, 0, is_causal=True, ptr=ptr)
        if self.rule == "window":
            graph = patterns.window(None, _window(degree, length), is_causal=True, ptr=ptr)
        elif self.rule == "bigbird":
            size, few = _window(degree / 2, length), round(degree / 4)
            graph = patterns.bigbird(None, size, few, few, seed=seed, is_causal=True, heads=len(query), ptr=ptr)
        elif self.rule == "blocks":
            few = max(1, round((degree + 1) / self.block + 0.5))  # its own block is half a block in the mean
            graph = selectors.block_top_k(tokens, few, self.block)
        elif self.rule == "lsh":  # buckets of two rounds hold as many pairs; chunks cut those that are twice too large
            buckets, chunk = 2 * max(1, round(1 / self.density)), max(1, round(self.density * length))
            graph = selectors.lsh(tokens, buckets, chunk, rounds=2)
        elif self.rule == "routing":
            graph = self.clusters(tokens).graph
        else:
            loops = patterns.window(None, self.recent, is_causal=True, ptr=ptr)
            rate = query.new_full((len(query), query.size(1), 1), beyond_window(self.density, self.recent, length))
            sbm = SBM(rate, torch.ones_like(rate), rate.new_ones(len(query), 1, 1), ptr, ptr, is_causal=True)
            fixed = self.rule == "random-fixed"
            same = torch.zeros(len(ptr) - 1, dtype=torch.int64) if fixed else None  # all sequences have one pattern
            graph = sample_edges(sbm, seed=int(self.drawn) if fixed else seed, sequence_ids=same)
        return Choice(graph).force(loops)


class Scheduled(LearnedSource):
    """Any source behind a target density: dense attention at 1, else the graph that the source chooses, and self-loops.

    So rules without parameters, and sources of users, begin dense for as many steps as those that learn. The source reads its density from
    its attribute ``density``, a share of the pairs beyond self-loops, or ``target_density`` if it is a :class:`~sbm_pyg.LearnedSource`.
    """

    window = 0  # self-loops are forced

    def __init__(self, source: GraphSource) -> None:
        super().__init__()
        self.source = source

    def predict(self, tokens: Tokens) -> Any:
        """The probabilities of the source."""
        if isinstance(self.source, LearnedSource):
            return self.source.predict(tokens)
        return self.source(tokens).probability

    def choose(self, tokens: Tokens) -> Choice:
        """The choice of the source at the density of now, with self-loops."""
        name = "target_density" if isinstance(self.source, LearnedSource) else "density"
        setattr(self.source, name, self.target_density)
        return self.source(tokens).force(patterns.window(None, 0, is_causal=True, ptr=tokens.query_ptr))


def beyond_window(density: float, window: int, length: int) -> float:
    """What a window leaves of a density, of which each of its tokens takes two parts in the length."""
    share = density - 2 * window / (length - 1)
    require(share > 0, f"'densities' beyond those of the window of {window}", density, "Give a smaller --window.")
    return share


def _window(degree: float, length: int) -> int:
    """The smallest window of one token or more in which a token has so many before it, in the mean over a sequence."""
    size = 1
    while size - size * (size + 1) / (2 * length) < degree - 0.5:
        size += 1
    return size


def make_causal_attention(method: str, channels: int, heads: int, density: float, options: dict[str, Any]) -> nn.Module:
    """The causal attention of a method; its window is 0 unless ``options`` have one."""
    width, window = channels // heads, options.get("window", 0)
    values = {name: value for name, value in options.items() if name not in ("control", "window", "bias")}
    if method in FIXED:
        rule = FixedDensity(method, density, width, heads, window)
        source = Scheduled(rule) if options["control"] == "sparsifier" else rule
        return AttentionConv(channels, width, heads, source, estimator="none", is_causal=True)
    if method == "top-k":
        values |= {"target_density": density, "window": 0, "estimator": "none"}
    elif method == "sbm":
        bias = DCMMBias(width, heads, options["bias"], entropy_weight=0.1) if options["bias"] else None
        values |= {"window": window, "score_bias": bias}
    elif method not in DENSE:
        values |= {"window": window, "target_density": 0.0 if options["control"] == "none" else density}
        if options["select"] == "top_k" and options["estimator"] == "distill":
            values["estimator"] = "imitate"
    return attention.make_attention(method.replace("-", "_"), channels, width, heads, values, is_causal=True)


class Layer(nn.Module):
    """A gated short convolution, then attention, each added to what came in.

    A convolution that is wider than 3 starts as decaying means, whose times lie between one token and two thirds of the width.
    So a token of long ago looks the same from wherever it is seen, as in state-space models.
    """

    def __init__(self, channels: int, attention: nn.Module, width: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, width, groups=channels)
        if width > 3:
            time = (2 / 3 * width) ** torch.linspace(0, 1, channels)[:, None]
            self.conv.weight.data = torch.exp(torch.arange(1 - width, 1) / time)[:, None]
        self.gate, self.mix, self.out = (nn.Linear(channels, channels) for _ in range(3))
        self.norm1, self.norm2, self.attention = nn.LayerNorm(channels), nn.LayerNorm(channels), attention

    def forward(self, x: Tensor, ptr: Tensor, seed: int) -> tuple[Tensor, Choice | None]:
        """Tokens ``[B * L, C]``."""
        h = self.norm1(x)
        near = self.conv(pad(h.unflatten(0, (ptr.numel() - 1, -1)).mT, (self.conv.kernel_size[0] - 1, 0)))
        x = x + self.mix(near.mT.flatten(0, 1) * self.gate(h))
        out, choice = self.attention(self.norm2(x), ptr=ptr, seed=seed, return_choice=True)
        return x + self.out(out), choice


class Decoder(nn.Module):
    """Q different states of one that is given Q times: an embedding of 0 to Q - 1 is added, then two linear layers."""

    def __init__(self, channels: int, slots: int) -> None:
        super().__init__()
        self.slot = nn.Embedding(slots, channels)
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(channels),
            nn.Linear(channels, 4 * channels),
            nn.Linear(4 * channels, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """States ``[B, Q, C]`` of ``[B, Q, C]``."""
        return self.outer(gelu(self.inner(self.norm(x + self.slot.weight))))


class Recaller(nn.Module):
    """Two layers or more between an embedding of tokens and a distribution over them, which share their weights.

    With ``slots`` = Q > 0, the Q questions of a sequence stand at one token, and a :class:`Decoder` tells them apart.
    """

    def __init__(
        self,
        num_tokens: int,
        channels: int,
        layers: int,
        make: Callable[[], nn.Module],
        *,
        width: int = 3,
        slots: int = 0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_tokens, channels)
        self.layers = nn.ModuleList(Layer(channels, make(), width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(channels), nn.Linear(channels, num_tokens)
        nn.init.normal_(self.embed.weight, std=channels**-0.5)
        self.head.weight = self.embed.weight
        self.decode = Decoder(channels, slots) if slots else nn.Identity()

    def forward(
        self, tokens: Tensor, places: Tensor | None = None, seed: int = 0
    ) -> tuple[Tensor, list[Choice | None]]:
        """Logits ``[B, Q, num_tokens]`` at positions ``[B, Q]`` of tokens ``[B, L]``, or at all; and the choice of each layer, if any."""
        batch, length = tokens.shape
        ptr = torch.arange(batch + 1, device=tokens.device) * length
        x, choices = self.embed(tokens.flatten()), []
        for number, layer in enumerate(self.layers):
            x, choice = layer(x, ptr, len(self.layers) * seed + number)
            choices.append(choice)
        if places is not None:
            x = self.decode(x[places + ptr[:-1, None]]).flatten(0, 1)
        return self.head(self.norm(x)).unflatten(0, (batch, -1)), choices


def make_recaller(run: Any, num_tokens: int, window: int = 0, width: int = 3) -> Recaller:
    """The model of a run. ``window`` is that of the block models and indexers, ``width`` that of the convolution."""
    torch.manual_seed(run.seed)
    kind, options = options_of(run.method)

    def make() -> nn.Module:
        return make_causal_attention(kind, run.channels, run.heads, run.density, {**options, "window": window})

    return Recaller(num_tokens, run.channels, run.layers, make, width=width)


def paired(run: Any, make: Callable[[Any], Recaller]) -> Recaller:
    """The model of a run. All but its graph sources begin with the weights that full attention has with this seed.

    So methods of one seed differ by what they choose, and not by how they begin, which moves results as much.
    """
    model = make(run)
    if run.method != "full":
        model.load_state_dict(make(dataclasses.replace(run, method="full")).state_dict(), strict=False)
    return model


def control_of(method: str) -> str:
    """What sets the target densities of a method during training: one of ``CONTROLS``."""
    return str(options_of(method)[1].get("control", "none"))


def beyond(graph: AttentionGraph) -> float:
    """Density of the pairs beyond self-loops, which all are in the graph."""
    loops = graph.heads * graph.num_queries
    return (graph.num_edges - loops) / (graph.heads * float(graph.pairs_per_sequence.sum()) - loops)


def evaluate(model: Recaller, examples: Examples, batch_size: int = 32) -> Row:
    """Accuracy and bits per question; for each layer its density beyond self-loops, and how many questions have an edge to an answer.

    Full attention has every edge. Where several tokens serve, an edge to any of them counts. Questions without a source count in
    accuracy and bits alone, and those with one have bits of their own, ``bits_recalled``.
    """
    layers = len(model.layers)
    parts, density = [], []
    for part in torch.arange(len(examples.tokens)).split(batch_size):
        tokens, places, answers, sources = examples.take(part)
        logits, choices = model(tokens, places, seed=int(part[0]))
        start = torch.arange(len(part))[:, None, None] * tokens.size(1)
        served = sources.reshape(*places.shape, -1)  # [S, Q, serving tokens]
        is_asked = (served >= 0).any(2).flatten()
        pairs = torch.stack(torch.broadcast_tensors(served.clamp(min=0) + start, places[..., None] + start)).flatten(1)
        shares, hits = [1.0] * layers, [is_asked] * layers
        for layer, choice in enumerate(choices):
            if choice is not None:
                graph, head = choice.graph, torch.arange(choice.graph.heads)[:, None]
                shares[layer] = beyond(graph)
                held = graph.contains(pairs.repeat(1, graph.heads), head.expand(-1, pairs.size(1)).flatten())
                hits[layer] = held.view(graph.heads, *served.shape).any(0).any(2).flatten() & is_asked
        is_right = (logits.argmax(2) == answers).flatten()
        bits = cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none") / math.log(2)
        parts.append(torch.stack([is_right, bits, bits * is_asked, is_asked, *hits, torch.stack(hits).any(0)]).double())
        density.append(len(part) * torch.tensor(shares, dtype=torch.float64))
    accuracy, bits, recalled, share, *hits = torch.cat(parts, 1).mean(1).tolist()
    row = {"accuracy": accuracy, "bits": bits, "bits_recalled": recalled / share if share else math.nan}
    shares = (torch.stack(density).sum(0) / len(examples.tokens)).tolist()
    row |= {f"density_{layer}": value for layer, value in enumerate(shares)}
    names = [*(f"answer_{layer}" for layer in range(layers)), "answer_any"]
    return row | {name: value / share if share else math.nan for name, value in zip(names, hits, strict=True)}
