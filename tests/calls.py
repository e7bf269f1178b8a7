"""Valid calls of public names: those in the examples of docstrings, and in ``LINES`` what no example calls.

In: nothing. Out: for each name some calls, with copies of all of their arguments, defaults too. A call counts wherever it comes from, an example or
what an example calls. Not here: random arguments (``fuzz_cases.py``, ``fuzz_layers.py``) and what the right results are.
"""

from __future__ import annotations

import copy
import doctest
import inspect
import sys
from collections import defaultdict
from functools import cache, cached_property, partial
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
from test_signatures import SOURCE_MODULES
from torch import Tensor

import sbm_pyg
from sbm_pyg import analysis, estimators, gradients, info, models, sparsefinder
from sbm_pyg.analysis import plots
from sbm_pyg.graphs import ragged
from sbm_pyg.graphs.rows import CompressedRows
from sbm_pyg.sparsefinder import ground_truth, predictors

MODULES: dict[str, Any] = {
    "": sbm_pyg, "ops": sbm_pyg.ops, **{name.rpartition(".")[2]: sys.modules[name] for name in SOURCE_MODULES},
    "ground_truth": ground_truth, "predictors": predictors, "sparsefinder": sparsefinder, "analysis": analysis, "plots": plots, "estimators": estimators, "gradients": gradients,
    "models": models, "ragged": ragged, "info": info,
}  # fmt: skip
MOST = 6  # calls of each name
LINES = """
import torch
from sbm_pyg import *
from sbm_pyg import analysis, gradients, info, patterns
from sbm_pyg.analysis import plots
from sbm_pyg.sources import indexer, selectors
from sbm_pyg.sparsefinder import Projection, predictors, projection_loss
x, vectors, ptr = torch.randn(5, 4), torch.randn(2, 5, 3), torch.tensor([0, 2, 5])
sbm, tokens = SBMHead(3, 2, 4)(Tokens(vectors)), Tokens(vectors, query_ptr=ptr)
graph, square = sample_edges(sbm, seed=0), patterns.window(4, 1)
encoder = SequenceEncoder(9, 4, heads=1, attention="window")
ALiBi(2).dense_bias(3, 4), AttentionGraph.concatenate([graph, graph]), graph.to_edge_index(0)
ops.edge_dot(vectors, vectors, graph.rows)
DCMMBias(3, 2, 4).factors(vectors, vectors, ptr, ptr), DCMMBias(3).is_product
graph.find(graph.edge_index, graph.edge_head), sbm.limit(2.0), sbm.with_density(0.5)
choice = indexer.IndexerSource(indexer.Indexer(3, 2), select="bernoulli", target_density=0.5)(tokens)
choice.probability.on(choice.graph)
conv = AttentionConv(4, 2, 3, patterns.PatternSource(patterns.window, size=1), is_causal=True)
graph.later, graph.lag, graph.pairs_per_sequence, conv.reset_parameters()
blocks = BlockGraph(patterns.window(3, 1), 2, query_ptr=torch.tensor([0, 5]))
blocks.expand_tokens()
BlockPool(4, 2)(torch.randn(2, 3, 2, 4), torch.ones(3, 2, dtype=torch.bool))
one = vectors[:1]
ops.block_attention(one, one, one, blocks.blocks.rows, (blocks.query_ptr, blocks.key_ptr), 2)
Entmax(2)(torch.randn(5, 2), ptr=ptr), FullAttention(4, 3, 2)(x, ptr=ptr)
words = torch.tensor([0, 1, 2, 0, 1])
PairClassifier(encoder, 3, pool_length=4)((words, words), (ptr, ptr))
SequenceClassifier(encoder, 3)(words, ptr), TokenClassifier(encoder, 3)(words, ptr)
SBMHead(3, 2, 4, degree_corrected=True).degrees(vectors, vectors)
Choice(graph, sbm).select(graph.col % 2 == 0)
analysis.communities_of(sbm)
gradients.concrete_bias(sbm, graph, temperature=0.5, seed=1), gradients.relaxed_bias(sbm, graph)
gradients.score_function(sbm, graph, torch.ones(1)), gradients.straight_through(sbm, graph)
indexer.KeyScorer(3, 2, hidden=5)(vectors, vectors), indexer.KeyScorer(3, 2).reset_parameters()
info.collect(test=False), info.self_test()
plots.plot_communities(graph, sbm), plots.plot_density(torch.rand(2, 3, 2))
predictors.clustering(tokens, torch.randn(2, 2, 3), top=1), selectors.lsh(tokens, num_buckets=4, chunk_size=2)
projection_loss(vectors, vectors, graph), unpad(torch.randn(3, 4, 2), torch.arange(4) < torch.tensor([[1], [4], [2]]))
EncoderTrace((Choice(graph, sbm), None), (1, 2)).density_loss(0.2)
"""


ESTIMATOR_NAMES = [
    f"estimators.{name}" + (f".{method}" if method else "") for name in estimators.__all__ if isinstance(getattr(estimators, name), type)
    for method in ("", *(key for key, value in vars(getattr(estimators, name)).items() if callable(value) and not key.startswith("_")))
]  # fmt: skip
EXEMPT: dict[str, str] = {  # public names that are not called, and why
    "estimators.ESTIMATORS": "a constant",
    "info.main": "a command, see test_info.py",
    "sparsefinder.Sample": "a type",
    **dict.fromkeys(("Sparsifier", *(f"Sparsifier.{name}" for name in ("step", "state_dict", "load_state_dict", "losses", "next_density", "passes", "scaler"))),
                    "a schedule of a model, see test_sparsifier.py"),
    **dict.fromkeys(("LearnedSource.predict", "LearnedSource.choose_among", "SBMSource.choose", "SBMSource.predict", "indexer.IndexerSource.predict",
                     "DensitySource.choose", "selectors.TopKSource.choose"),
                    "called by LearnedSource.forward, by LearnedGraph and by losses"),
    **dict.fromkeys(("Sparsifier.is_sparse", "Sparsifier.set_density", "plots.plot_heads", "plots.plot_losses"), "see test_sparsifier.py and test_plots.py"),
    **dict.fromkeys(("LearnedGraph", *(f"LearnedGraph.{name}" for name in ("extra_repr", "forward", "reset_parameters"))), "a source for layers of PyG, see test_learned_graph.py"),
    "AttentionGraph.to_sparse_tensor": "it needs torch-sparse, see test_torch_sparse.py",
    "register_source": "it changes what later calls know, see test_named.py",
    "make_attention": "it makes a layer of any source from names, see test_named.py",
    **dict.fromkeys(("replace_attention", "restore_attention"), "they change a model in place, see test_multihead.py and test_gps.py"),
    **dict.fromkeys(("SBMMultiheadAttention.from_torch", "SBMMultiheadAttention.to_torch", "SparseGPSConv.to_gps"), "see test_multihead.py"),
    **dict.fromkeys(("TransformerConv.from_pyg", "TransformerConv.to_pyg", "TransformerConv.propagate"), "layers of PyG, see test_transformer_conv.py"),
    **dict.fromkeys(("SparseGPSConv.from_gps", "SparseGPSConv.reset_parameters"), "it takes a layer of PyG, and draws anew, see test_gps.py"),
    **dict.fromkeys(("analysis.Attention", "analysis.Head", "analysis.HeadTable", "analysis.HeadTable.diffuse", "analysis.HeadTable.heads", "analysis.compare_heads", "analysis.record_attention"), "it listens to a model, see test_heads.py"),
    **dict.fromkeys(("Tokens.detached", "Tokens.first_head"), "for sources"),
    "patterns.PatternSource.take_heads": "for HeadParallel, see test_distributed.py",
    **dict.fromkeys(("Choice.attend", "Choice.check_tokens", "Choice.is_stored", "Choice.stored"), "for layers, see test_choice.py and test_learned.py"),
    **dict.fromkeys(("DCMM", "DCMM.entropy"), "a record that the library makes and users read"),
    **dict.fromkeys(("AttentionGraph.rows", "AttentionGraph.with_blocks", "AttentionGraph.spread", "AttentionGraph.over_tokens", "SBM.strict", "ops.Rows"), "for sources and layers, see test_blocks.py"),
    **{f"BlockGraph.{name}": "what an AttentionGraph has, compared with that of its tokens in test_blocks.py" for name in (
        "causal", "contains", "expand", "head", "over_tokens", "sequence", "spread", "edge_bias_to_blocks", "to", "to_block_mask", "union", "validate", "with_blocks")},
    **dict.fromkeys(("ops.Rows", "AttentionGraph.rows"), "a record of tensors, which ops check"),
    "ground_truth.Match": "a record that the library makes and users read",
    "ground_truth.record": "it listens to a model, see test_ground_truth.py",
    **dict.fromkeys(("sparsefinder.fit_projection", "sparsefinder.fit_centroids"), "they train, see test_sparsefinder.py"),
    **dict.fromkeys(("gradients.distillation", "gradients.kept_attention", "gradients.row_distillation"), "losses over what a layer computes, compared with their definitions in test_learned.py and test_linear_sbm.py"),
    "calibrate": "it trains, see test_calibration.py",
    **dict.fromkeys(("LearnedSource.settle", "LearnedSource.start_from", "SBMSource.settle", "SBMSource.start_from", "indexer.Indexer.start_from", "indexer.IndexerSource.start_from"), "for calibrate, see test_linear_sbm.py"),
    "auxiliary_loss": "it takes what layers keep, whose cases and scenarios call it",
    "sync_statistics": "it needs processes, see test_auxiliary.py",
    **dict.fromkeys(("HeadParallel", *(f"HeadParallel.{name}" for name in ("extra_repr", "forward", "own_heads", "processes", "reset_parameters"))), "it needs processes, see test_distributed.py"),
    "Pretrained": "a base class, called through its models",
    **{f"Pretrained.{name}": "of huggingface_hub, see test_pretrained.py" for name in ("save_pretrained", "from_pretrained")},
    **dict.fromkeys(
        ("EdgeProbability", "EdgeProbability.check", "EdgeProbability.expected_degree", "EdgeProbability.expected_density", "EdgeProbability.factors", "EdgeProbability.gate",
         "EdgeProbability.on", "GraphSource", "GraphSource.forward", "GraphSource.reset_parameters", "EdgeProbability.log_on", "DensitySource", "LearnedSource"), "an abstract class, called through SBM and SBMSource"),
    **dict.fromkeys(("ragged.count_pairs", "ragged.draw_seed", "ragged.resolve_sequence_ids", "ragged.resolve_sides"), "called by layers and samplers"),
    **dict.fromkeys(ESTIMATOR_NAMES, "called by the layer, whose cases draw every estimator"),
    **{f"analysis.{name}": "a record that the library makes and users read" for name in
       ("Certificate", "GraphStatistics", "HamiltonianPath", "Lemma2", "Universality")},
}  # fmt: skip


class Call(NamedTuple):
    function: Any
    arguments: dict[str, Any]


def public_names() -> list[str]:
    """Every public name, with the public methods and properties of the classes; by the first module that lists it."""
    listed: set[int] = set()
    names: list[str] = []
    for prefix, module in MODULES.items():
        for name in module.__all__:
            thing = getattr(module, name)
            full = f"{prefix}.{name}" if prefix else name
            if id(thing) in listed or isinstance(thing, type(sbm_pyg)):
                continue
            listed.add(id(thing))
            names.append(full)
            if isinstance(thing, type):
                members = vars(CompressedRows) | vars(thing) if full == "AttentionGraph" else vars(thing)
                public = sorted(key for key in members if not key.startswith("_") and key != "pattern")
                names += [f"{full}.{key}" for key in public if _is_call(members[key])]
    return names


def _is_call(member: Any) -> bool:
    """Not what MessagePassing writes into the class of its first instance: `propagate` and `collect` of its own making."""
    if getattr(member, "__module__", "").endswith("_propagate"):
        return False
    return callable(member) or isinstance(member, classmethod | staticmethod | property | cached_property)


def owner_of(name: str) -> Any:
    """The class or module that a public name is in."""
    owner: Any = MODULES.get(name.partition(".")[0], sbm_pyg) if "." in name else sbm_pyg
    for part in name.split(".")[int(owner is not sbm_pyg) : -1]:
        owner = getattr(owner, part)
    return owner


def static(name: str) -> Any:
    """What a public name stands for; of a class, the member as it is written."""
    owner, member = owner_of(name), name.rpartition(".")[2]
    return inspect.getattr_static(owner, member) if isinstance(owner, type) else getattr(owner, member)


def code_of(thing: Any) -> CodeType | None:
    """The code that a call of it runs first."""
    if isinstance(thing, type):
        thing = thing.__init__  # type: ignore[misc]
    for wrapper in ("fget", "func", "__func__"):
        thing = getattr(thing, wrapper, thing)
    return getattr(inspect.unwrap(thing), "__code__", None) if callable(thing) else None


def takes_nothing(name: str) -> bool:
    """Whether it is a property, or a method without arguments."""
    thing = static(name)
    if isinstance(thing, property | cached_property):
        return True
    return (
        inspect.isfunction(thing) and isinstance(owner_of(name), type) and len(inspect.signature(thing).parameters) == 1
    )


@cache
def recorded() -> dict[str, list[Call]]:
    """Calls by public name; of properties and methods without arguments, of the instances that were made."""
    names = {name: static(name) for name in public_names() if name not in EXEMPT}
    codes: dict[CodeType, list[str]] = defaultdict(list)
    for name, thing in names.items():
        if (code := code_of(thing)) is not None:
            codes[code].append(name)
    calls: dict[str, list[Call]] = defaultdict(list)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code not in codes:
            return
        for name in codes[frame.f_code]:
            thing = names[name]
            if len(calls[name]) < MOST and (not isinstance(thing, type) or type(frame.f_locals["self"]) is thing):
                calls[name].append(call_of(name, thing, frame))

    with torch.random.fork_rng(devices=[]), mock.patch.object(Tensor, "__deepcopy__", _copied):
        torch.manual_seed(0)
        sys.setprofile(profile)
        try:
            exec(LINES, {})
            modules = {thing.__module__ for thing in names.values() if hasattr(thing, "__module__")}
            for module in sorted(modules & sys.modules.keys()):
                for test in doctest.DocTestFinder().find(sys.modules[module]):
                    doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None)
        finally:
            sys.setprofile(None)
    for name in names:
        if not calls[name] and takes_nothing(name):
            owner, _, member = name.rpartition(".")
            calls[name] = [Call(partial(member_of, call, member), {}) for call in calls[owner]]
    return {name: made for name, made in calls.items() if made}


def _copied(x: Tensor, memo: dict[int, Any]) -> Tensor:
    """A leaf of the values and kind: tensors of a graph of autograd cannot be copied."""
    return memo.setdefault(id(x), x.detach().clone().requires_grad_(x.requires_grad))


def member_of(call: Call, member: str) -> Any:
    """A property of an instance that the call makes, or what its method without arguments returns."""
    value = getattr(call.function(**call.arguments), member)
    return value() if inspect.ismethod(value) else value


def call_of(name: str, thing: Any, frame: FrameType) -> Call:
    """The call that a frame has just begun, with copies of its arguments."""
    arguments = inspect.getargvalues(frame)
    taken = arguments.args[isinstance(thing, type) :]  # not what a constructor has yet to fill
    values = {key: frame.f_locals[key] for key in taken} | frame.f_locals.get(arguments.keywords or "", {})
    values, member = copy.deepcopy(values), name.rpartition(".")[2]
    if isinstance(thing, type):
        return Call(thing, values)
    if not isinstance(owner_of(name), type) or isinstance(thing, staticmethod):
        return Call(getattr(owner_of(name), member), values)
    owner = values.pop(arguments.args[0])
    if isinstance(thing, property | cached_property):
        return Call(partial(getattr, owner, member), {})
    return Call(getattr(owner, member), values)
