"""Peers of trained layers, each over the tokens that it gets in its model, and of fresh layers with as many edges.

A layer has the name of a model of ``examples/weights`` and its number in it: "recall-1" is the first of ``recall``,
which answers 64 questions in a sequence of any length; "code-1" is that of ``code_sbm``, which reads source code. Clocks
are in ``measure``.
"""

import itertools
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from examples import associative_recall, language_model
from examples.benchmarks.kernels import Case, Peer, Work
from examples.benchmarks.report import TRAINED
from examples.benchmarks.samplers import agree, dense_twin, deviations, layer_calls
from examples.common.corpus import read_files, stdlib_files
from examples.common.gate import compare
from sbm_pyg import SBM, AttentionGraph, DensitySource, sample_edges

WEIGHTS = Path(__file__).parents[1] / "weights"
PAIRS = 64  # of key and value in a sequence of recall
DEGREE = 64  # edges of a query where only the length changes


@cache
def take(layer: str, tokens: int, degree: float | None = None, device: str = "cpu") -> tuple[Any, Tensor]:
    """A trained layer and the tokens ``[N, C]`` that it gets in its model, of one sequence.

    Args:
        layer: One of ``TRAINED``.
        tokens: Length N of the sequence.
        degree: Target number of edges of a query in the layers before it. None: their target density of training.
        device: Where the model runs.
    """
    name, _, number = layer.partition("-")
    model: Any
    inputs_of_model: tuple[Any, ...]
    if name == "recall":
        model = associative_recall.RecallModel.from_pretrained(WEIGHTS / "recall").to(device)
        pairs, random = min(PAIRS, tokens // 4), torch.Generator().manual_seed(0)
        words, ptr, *_ = associative_recall.make_data(1, tokens, pairs, random)
        blocks, inputs_of_model = (model.first, model.second), (words.to(device), ptr.to(device), 0)
    else:
        model = language_model.LanguageModel.from_pretrained(WEIGHTS / "code_sbm").float().to(device)
        blocks, inputs_of_model = model.model.layers, (_source_code()[None, :tokens].to(device),)
    conv = blocks[int(number) - 1].attention
    for module in model.modules():
        if degree is not None and isinstance(module, DensitySource):
            module.target_density = min(2 * degree / tokens, 0.5)
    inputs = list[Tensor]()
    hook = conv.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].clone()))
    with torch.no_grad():
        model(*inputs_of_model)
    hook.remove()
    return conv, inputs[0]


@cache
def _source_code() -> Tensor:
    """Tokens ``[N]`` of files that the model was not trained on, some 142,000."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(WEIGHTS / "code_sbm" / "tokenizer.json"))
    return torch.tensor(tokenizer.encode(read_files(stdlib_files()[1])).ids)


def _few_rows(tokens: int) -> Tensor:
    """Queries whose pairs are all looked at, ``[R]``, at equal distances."""
    count = max(min(512, tokens // 16, 2**24 // tokens), 1)
    return torch.arange(tokens // count - 1, tokens, tokens // count)


def _chances(sbm: SBM, rows: Tensor) -> Tensor:
    """Probabilities of all pairs of some queries, ``[H, R, N]``."""
    chance = (sbm.rate[:, rows].double() @ sbm.key_membership.double().mT).clamp(max=1)
    return chance.masked_fill(torch.arange(chance.size(2)) > rows[:, None], 0) if sbm.is_causal else chance


def _mask(graph: AttentionGraph, rows: Tensor, is_kept: Tensor | None = None) -> Tensor:
    """Which pairs of some queries are edges, ``[H, R, N]``; with ``kept``, ``[E]``, those edges alone."""
    head, query = graph.edge_row // graph.num_queries, graph.edge_row % graph.num_queries
    chosen = torch.isin(query, rows) if is_kept is None else torch.isin(query, rows) & is_kept
    mask = torch.zeros(graph.heads, len(rows), graph.num_keys, dtype=torch.bool)
    mask[head[chosen], torch.searchsorted(rows, query[chosen]), graph.col[chosen].long()] = True
    return mask


def _compare_counts(facts: dict[str, float], edges: Tensor, chance: Tensor, pairs: int) -> float:
    variance = float((chance * (1 - chance)).sum())
    return deviations(pairs, facts, int(edges.sum()), float(chance.sum()), variance)


@torch.no_grad()
def _check_rows(conv: Any, x: Tensor, facts: dict[str, float]) -> float:
    """Compares edges of some queries with their probabilities, and outputs with plain torch over the same edges."""
    choice, rows = conv(x, seed=0, return_choice=True)[1], _few_rows(len(x))
    edges, forced = (_mask(choice.graph, rows, is_kept) for is_kept in (None, choice.forced))
    chance = _chances(choice.probability, rows).masked_fill(forced, 1)
    pairs = conv.heads * (int((rows + 1).sum()) if conv.is_causal else len(rows) * len(x))
    _compare_counts(facts, edges, chance, pairs)
    facts["sampled"] = float(choice.graph.density.mean())
    query, key, value = (
        lin(x).double().unflatten(1, (conv.heads, -1)).transpose(0, 1)
        for lin in (conv.lin_query, conv.lin_key, conv.lin_value)
    )  # [H, N, C]
    score = (query[:, rows] @ key.mT * conv.scale).masked_fill(~edges, -torch.inf)
    true = (score.softmax(-1) @ value).transpose(0, 1).flatten(1)
    return compare({"output": (conv(x, choice.graph)[rows], true)})


def _layer(case: Case, kind: str, is_causal: bool = True) -> Work:
    """A layer that is "trained"; "independent", which draws all pairs independently; "fresh", with the size, options and
    number of edges of the trained one; or "dense".

    Steps repeat one seed, since running means move when the seed changes, and the number of edges with them.
    """
    trained, x = take(case.layer, case.tokens)
    conv, facts, seeds = deepcopy(trained), dict[str, float](), itertools.count(1)
    conv.is_causal = is_causal
    if kind == "independent":
        conv.source.row_group = 1
    if kind == "fresh":
        with torch.no_grad():
            choice = trained(x, seed=0, return_choice=True)[1]
        torch.manual_seed(case.seed)
        conv.reset_parameters()
        allowed = conv.heads * case.tokens * (case.tokens + 1) / 2
        conv.source.target_density = float((~choice.forced).sum()) / allowed
    full = dense_twin(conv)
    x = x.clone().requires_grad_()
    grad, ptr = torch.randn(case.tokens, conv.heads * conv.out_channels), torch.tensor([0, case.tokens])
    with torch.no_grad():
        query, key, value = (
            lin(x).unflatten(1, (conv.heads, -1)).transpose(0, 1).contiguous()
            for lin in (conv.lin_query, conv.lin_key, conv.lin_value)
        )
        choice = conv(x, seed=0, return_choice=True)[1]

    if kind == "dense":
        pairs = conv.heads * case.tokens * (case.tokens + 1) // 2 if is_causal else conv.heads * case.tokens**2
        options: Any = {"is_causal": is_causal, "scale": conv.scale}

        def attend() -> int:
            scaled_dot_product_attention(query[None], key[None], value[None], **options)
            return pairs

        calls = layer_calls(full, x, grad, lambda: (full(x, ptr=ptr), pairs))
        return Work(lambda: agree(conv, full, conv.in_channels), {"attend": attend, **calls}, facts)

    def run() -> tuple[Tensor, int]:
        out, graph = conv(x, ptr=ptr, seed=1 if conv.training else next(seeds), return_graph=True)
        return out, graph.num_edges

    @torch.no_grad()
    def attend_over_graph() -> int:
        conv.eval().attend(query, key, value, choice.graph)
        return choice.graph.num_edges

    calls = {
        "sample": lambda: (
            sample_edges(choice.probability, clamp=True, seed=next(seeds), row_group=conv.source.row_group).num_edges
        ),
        "attend": attend_over_graph,
        **layer_calls(conv, x, grad, run),
    }
    return Work(lambda: max(agree(conv, full, conv.in_channels), _check_rows(conv.eval(), x, facts)), calls, facts)


def _sampling(case: Case, layer: str) -> Work:
    """Sampling alone from the block model of a trained layer, scaled to a number of edges that no length changes."""
    degree = min(DEGREE, case.tokens / 8)
    conv, x = take(layer, case.tokens, degree)
    rows, facts, seeds = _few_rows(case.tokens), dict[str, float](), itertools.count(1)
    with torch.no_grad():
        sbm = conv(x, seed=0, return_choice=True)[1].probability
    low, high = 2.0**-10, 2.0**10
    for _ in range(20):
        middle = (low * high) ** 0.5
        scaled = SBM(sbm.query_membership * middle, sbm.key_membership, sbm.block_matrix, is_causal=True)
        chance = _chances(scaled, rows)
        low, high = (low, middle) if float(chance.sum(2).mean()) > degree else (middle, high)
    pairs = conv.heads * int((rows + 1).sum())
    draw = partial(sample_edges, scaled, clamp=True, row_group=conv.source.row_group)

    def check() -> float:
        return _compare_counts(facts, _mask(draw(seed=0), rows), chance, pairs)

    return Work(check, {"step": lambda: draw(seed=next(seeds)).num_edges}, facts)


PEERS = {
    "trained": Peer("trained, causal", partial(_layer, kind="trained")),
    "independent": Peer("trained, independent pairs, causal", partial(_layer, kind="independent")),
    "fresh": Peer("fresh, causal", partial(_layer, kind="fresh")),
    "dense": Peer("dense, causal", partial(_layer, kind="dense")),
    "fresh-all": Peer("fresh, not causal", partial(_layer, kind="fresh", is_causal=False)),
    "dense-all": Peer("dense, not causal", partial(_layer, kind="dense", is_causal=False)),
}
GROWTH = {name: Peer(f"sampling alone, {name}, trained", partial(_sampling, layer=name)) for name in TRAINED}
