"""From dense attention to sparse: the schedule, auxiliary losses that join the backward pass, states, and a training."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from problems import refuses, same
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sbm_pyg import (
    AttentionConv,
    DCMMBias,
    SBMAttentionConv,
    SequenceEncoder,
    Sparsifier,
    Tokens,
    auxiliary_loss,
    make_attention,
    patterns,
    replace_attention,
)
from sbm_pyg.sources.dense import DenseChoice
from sbm_pyg.sources.indexer import Indexer, IndexerSource
from sbm_pyg.sources.selectors import TopKSource
from sbm_pyg.training.estimators import Distill, Local, Mask

ANNOTATIONS = "Failing to pass a value to the 'type_params' parameter"  # what torch-geometric warns of on Python 3.13


def layer(**options: Any) -> SBMAttentionConv:
    torch.manual_seed(0)
    return make_attention("sbm", 8, 4, 2, num_clusters=4, **options)


def densities(sparsifier: Sparsifier, dense: Callable[[int], float], sparse: Callable[[int], float], steps: int) -> str:
    """A letter for each step: dense, trial, or sparse, given the losses of dense and of sparse steps."""
    found = []
    for step in range(steps):
        is_dense = all(source.target_density == 1 for source in sparsifier.sources)
        found.append("d" if is_dense else "s" if sparsifier.is_sparse else "t")
        sparsifier.step((dense if is_dense else sparse)(step))
    return "".join(found)


# ------------------------------------------------------------------ the schedule


@pytest.mark.parametrize(
    ("options", "wanted"),
    [({}, "dddddddddt" * 7 + "s" * 30), ({"trial_interval": 5, "dense_part": 0.41}, "ddddt" * 8 + "d" + "s" * 59),
     ({"dense_part": 0.0}, "s" * 100), ({"dense_part": 1.0, "trial_interval": 2}, "dt" * 50)],
)  # fmt: skip
def test_training_is_dense_with_trial_steps_and_then_sparse(options: dict[str, Any], wanted: str) -> None:
    sparsifier = Sparsifier(layer(), 0.1, total_steps=100, **options)
    assert densities(sparsifier, lambda step: 4.0, lambda step: 1.0, 100) == wanted


def test_losses_of_both_kinds_of_steps_are_recorded() -> None:
    sparsifier = Sparsifier(layer(), 0.1, total_steps=50, trial_interval=5, dense_part=0.6)
    densities(sparsifier, lambda step: 4.0, lambda step: 5.0 if step < 30 else 2.0, 50)
    assert [(each.step, each.is_sparse) for each in sparsifier.history] == [(at, at > 30) for at in range(5, 51, 5)]
    assert {each.dense for each in sparsifier.history} == {4.0}
    assert [each.sparse for each in sparsifier.history[:6]] == [5.0] * 6
    assert sparsifier.history[-1].sparse == pytest.approx(2 + 3 * 0.95**20)
    assert sparsifier.losses == sparsifier.history[-1]
    assert str(sparsifier) == "dense 4, at 10 % 3.075, 50 steps, sparse"
    assert str(Sparsifier(layer(), 0.1, total_steps=5000)) == "no loss yet, 0 steps, dense until 3,500"
    assert repr(sparsifier) == f"Sparsifier(1 source, density=0.1, {sparsifier})"


def test_evaluation_has_the_target_density_in_each_phase() -> None:
    """And so do states. Training follows the schedule, also after an evaluation at another density."""
    conv = layer()
    source: Any = conv.source
    sparsifier = Sparsifier(conv, 0.2, total_steps=4, trial_interval=2, dense_part=0.5)
    for of_training in (1.0, 0.2, 0.2, 0.2):  # dense, trial, sparse, sparse
        for density in (None, 1.0, 0.5, None):
            sparsifier.set_density(density)
            assert conv.train().source.target_density == of_training
            assert conv.eval().source.target_density == (density or 0.2)
            assert conv.state_dict()["source.target_density"] == (density or 0.2)
        sparsifier.set_density(1.0)
        conv.train()
        sparsifier.step(1.0)  # which ends what was set
        assert conv.eval().source.target_density == 0.2
    assert source.schedule.density is None
    fresh = layer()
    fresh.load_state_dict(conv.state_dict())
    assert cast(Any, fresh.source).target_density == 0.2


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("steps", "x", TypeError), ("steps", -1, ValueError), ("is_sparse", 1, TypeError),
     ("since_trial", 1.5, TypeError), ("dense", "1", TypeError), ("passes", 0.5, ValueError),
     ("passes", ["x"], TypeError), ("history", "abcd", TypeError), ("history", [1.0], ValueError),
     ("history", [(1, 2.0, 3.0)], ValueError)],
)  # fmt: skip
def test_a_damaged_state_is_refused(name: str, value: Any, error: type[Exception]) -> None:
    sparsifier = Sparsifier(layer(), 0.2, total_steps=10)
    refuses(lambda: sparsifier.load_state_dict(sparsifier.state_dict() | {name: value}), f"Expected '{name}'", error)
    assert sparsifier.steps == 0


def test_sources_are_dense_and_detached_until_training_is_sparse() -> None:
    model = nn.ModuleList(
        [layer(), layer(detach=True), AttentionConv(8, 4, source=IndexerSource(Indexer(4), select="bernoulli"))]
    )
    sparsifier = Sparsifier(model, 0.2, total_steps=10, trial_interval=2, dense_part=0.2)
    for densities, detached in (([1.0] * 3, [True] * 3), ([0.2] * 3, [True] * 3), ([0.2] * 3, [False, True, False])):
        assert sparsifier.next_density == densities[0]
        assert [source.target_density for source in sparsifier.sources] == densities
        assert [cast(Any, source)._detaches for source in sparsifier.sources] == detached
        sparsifier.step(1.0)
    assert sparsifier.is_sparse


def test_a_later_sparsifier_restores_what_sources_send_to_queries_and_keys() -> None:
    """The first one is still dense when the second one is made, for the same model or for a copy."""
    for own in (False, True):
        model = layer(detach=own)
        Sparsifier(model, 0.2, total_steps=10)
        for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            sparsifier = Sparsifier(each, 0.2, total_steps=2, dense_part=0.5)
            assert cast(Any, sparsifier.sources[0])._detaches
            sparsifier.step(1.0)
            assert sparsifier.is_sparse
            assert cast(Any, sparsifier.sources[0])._detaches == own


def test_named_modules_stay_dense() -> None:
    model = nn.ModuleList([layer(), layer(), layer()])
    sparsifier = Sparsifier(model, 0.2, total_steps=2, trial_interval=2, dense_part=0.5, keep_dense=["1"])
    sparsifier.step(1.0)
    sparsifier.step(1.0)
    assert sparsifier.is_sparse
    assert [cast(Any, each).source.target_density for each in model] == [0.2, 1.0, 0.2]
    Sparsifier(model, 0.2, total_steps=2, dense_part=0.0, keep_dense=(name for name in "02"))
    assert [cast(Any, each).source.target_density for each in model] == [1.0, 0.2, 1.0]
    for wrong in (["3"], "1", "", None, 1):
        with pytest.raises(ValueError, match="Expected 'keep_dense' to be names of modules"):
            Sparsifier(model, 0.2, total_steps=2, keep_dense=cast(Any, wrong))
    with pytest.raises(ValueError, match="Expected 'model' to have a source with a target density"):
        Sparsifier(model, 0.2, 2, keep_dense=[""])


@pytest.mark.parametrize("make", [lambda k: TopKSource(k), lambda k: IndexerSource(Indexer(4, 2), k=k)])
def test_ranks_with_a_number_of_keys_begin_dense_and_keep_at_least_so_many(make: Callable[[int], Any]) -> None:
    torch.manual_seed(0)
    source, tokens = make(3), Tokens(torch.randn(2, 40, 4), is_causal=True)
    assert source(tokens).graph.degree[0].tolist() == [min(3, 1 + i) for i in range(40)]
    sparsifier = Sparsifier(source, 0.2, total_steps=2, dense_part=0.5)
    assert isinstance(source(tokens), DenseChoice)
    sparsifier.step(1.0)
    assert source(tokens).graph.degree[0].tolist() == [min(1 + i, max(3, math.ceil((1 + i) / 5))) for i in range(40)]
    Sparsifier(nn.ModuleList([source, make(2)]), 0.2, total_steps=2, dense_part=0.0, keep_dense=["0"])
    assert isinstance(source(tokens), DenseChoice)


def test_ranks_take_their_density_from_a_sparsifier() -> None:
    torch.manual_seed(0)
    conv = AttentionConv(8, 4, 2, IndexerSource(Indexer(4, 2), select="top_k"), is_causal=True)
    sparsifier, x = Sparsifier(conv, 0.25, total_steps=4), torch.randn(20, 8)
    optimizer = torch.optim.SGD(conv.parameters(), 0.1)
    learned = [*cast(nn.Module, conv.source).parameters()]
    before = [parameter.clone() for parameter in learned]
    for _ in range(4):
        optimizer.zero_grad()
        loss = conv(x).square().mean()
        loss.backward()
        optimizer.step()
        sparsifier.step(loss)
    assert not any(torch.equal(*pair) for pair in zip(before, learned, strict=True))
    _, graph = conv.eval()(x, return_graph=True)
    assert graph.degree.tolist() == 2 * [[math.ceil((i + 1) / 4) for i in range(20)]]


@pytest.mark.parametrize("part", [0.07, 0.28, 0.55, 0.56])
def test_the_dense_part_of_the_steps_is_exact(part: float) -> None:
    assert math.ceil(part * 100) > round(part * 100)  # by rounding of the product
    assert Sparsifier(layer(), 0.2, total_steps=100, dense_part=part).dense_steps == round(part * 100)
    assert Sparsifier(layer(), 0.2, total_steps=101, dense_part=part).dense_steps == round(part * 100) + 1


def test_layers_learn_by_distillation_unless_they_have_another_estimator() -> None:
    model = nn.ModuleList([layer(estimator=Local(5.0, 0.5)), layer(estimator="mask"), layer(estimator=Distill(0.2))])
    Sparsifier(model, 0.2, 10)
    first, second, third = (cast(SBMAttentionConv, each).estimator for each in model)
    assert type(first) is Distill
    assert first.rows == 0.5
    assert first.probes == 5
    assert type(second) is Mask
    assert cast(Distill, third).weight == 0.2


# ------------------------------------------------------------------ auxiliary losses


def gradients(conv: SBMAttentionConv, scale: float = 1.0, parts: int = 1, add: bool = False) -> list[Tensor]:
    conv.zero_grad()
    for _ in range(parts):
        loss = conv(torch.linspace(-1, 1, 240).view(30, 8), seed=3).square().mean()
        loss = loss + auxiliary_loss(conv) if add else loss
        (loss * scale / parts).backward()
    return [cast(Tensor, parameter.grad) / scale for parameter in conv.parameters() if parameter.grad is not None]


class Scaler:
    """As a GradScaler whose scale is fixed."""

    def scale(self, x: Tensor) -> Tensor:
        return 1024.0 * x


@pytest.mark.parametrize("density", [1.0, 0.3])
def test_auxiliary_losses_join_the_backward_pass_with_the_weight_of_the_loss(density: float) -> None:
    def make(scaler: Any = None) -> tuple[SBMAttentionConv, Sparsifier]:
        conv = layer(estimator="distill", exploration=0.01)
        sparsifier = Sparsifier(conv, 0.3, 10, scaler=scaler)
        sparsifier.steps = 0 if density == 1 else 10
        sparsifier.set_density()
        return conv, sparsifier

    plain = layer(estimator="distill", target_density=density, exploration=0.01, detach=density == 1)
    wanted = gradients(plain, add=True)
    conv, sparsifier = make()
    for got, right in zip(gradients(conv), wanted, strict=True):
        torch.testing.assert_close(got, right)
    assert float(auxiliary_loss(conv)) == 0
    conv, sparsifier = make(Scaler())
    for got, right in zip(gradients(conv, scale=1024.0), wanted, strict=True):
        torch.testing.assert_close(got, right)
    conv, sparsifier = make()
    gradients(conv, parts=4)
    sparsifier.step(1.0)  # now it knows that a step has four passes
    for got, right in zip(gradients(conv, parts=4), wanted, strict=True):
        torch.testing.assert_close(got, right)
    again, other = make()
    other.load_state_dict(sparsifier.state_dict())
    for got, right in zip(gradients(again, parts=4), wanted, strict=True):
        torch.testing.assert_close(got, right)  # as does one that was restored


@pytest.mark.parametrize("dense_part", [1.0, 0.0])
@pytest.mark.parametrize("how", ["checkpoint", "reentrant", "two losses", "unused call"])
def test_a_loss_counts_once_in_loops_of_any_kind(how: str, dense_part: float) -> None:
    """Its weight follows the backward passes of a step, not the calls."""
    conv = layer(exploration=0.01)
    sparsifier = Sparsifier(conv, 0.3, 10, dense_part=dense_part)
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def gradient(how: str) -> list[Tensor]:
        conv.zero_grad()
        for _ in range(2):  # parts of a batch
            run: Any = partial(cast(Any, conv), seed=3)
            known = {"checkpoint": False, "reentrant": True}
            out = checkpoint(run, x, use_reentrant=known[how]) if how in known else run(x)
            loss = out.square().mean() / 2
            if how == "two losses":
                (loss / 2).backward(retain_graph=True)
                loss = loss / 2
            loss.backward()
        if how == "unused call":
            conv(x, seed=3)
        return [each.grad.clone() for each in conv.parameters() if each.grad is not None]

    gradient("none")
    sparsifier.step(1.0)  # now it knows that a step has two parts
    wanted = gradient("none")
    sparsifier.step(1.0)
    for _ in range(2):
        found = gradient(how)
        sparsifier.step(1.0)
    assert len(found) == len(wanted) > 4
    torch.testing.assert_close(found, wanted)


def of_source(conv: Any, weigh: Callable[[SBMAttentionConv], None] | None = None, parts: int = 1) -> list[Tensor]:
    """Gradients of the source after so many parts of a step, and whatever else the loop does with each part's loss."""
    conv.zero_grad()
    for _ in range(parts):
        (conv(torch.linspace(-1, 1, 240).view(30, 8), seed=3).square().mean() / parts).backward()
        if weigh is not None:
            weigh(conv)
    return [parameter.grad.clone() for parameter in conv.source.parameters()]


def test_the_number_of_parts_may_change_from_step_to_step() -> None:
    """Where attention is dense, without being told; a part counts once, however many steps had other numbers."""
    conv = layer()
    sparsifier, wanted = Sparsifier(conv, 0.3, 100), of_source(layer_with_sparsifier())
    for parts in (4, 4, 2, 1, 3, 4):
        torch.testing.assert_close(of_source(conv, parts=parts), wanted)
        sparsifier.step(1.0)


def layer_with_sparsifier(**options: Any) -> SBMAttentionConv:
    conv = layer()
    Sparsifier(conv, 0.3, 100, **options)
    return conv


@pytest.mark.parametrize("dense_part", [1.0, 0.0])
def test_a_loop_may_tell_the_number_of_parts(dense_part: float) -> None:
    """Sparse steps cannot know it otherwise before the second one of the same number."""
    conv = layer(exploration=0.01)
    sparsifier = Sparsifier(conv, 0.3, 100, dense_part=dense_part)
    wanted = of_source(conv)
    sparsifier.step(1.0)
    for parts in (4, 2, 3):
        sparsifier.passes = parts
        torch.testing.assert_close(of_source(conv, parts=parts), wanted)
        sparsifier.step(1.0)
    sparsifier.passes = None  # as many as in the last step
    torch.testing.assert_close(of_source(conv, parts=3), wanted)
    with pytest.raises(ValueError, match="Expected 'passes' to be at least 1"):
        sparsifier.passes = 0


@pytest.mark.parametrize("dense_part", [1.0, 0.0])
@pytest.mark.parametrize("of", ["input", "source"])
def test_a_gradient_for_a_log_is_no_part(of: str, dense_part: float) -> None:
    """``torch.autograd.grad`` accumulates nothing."""

    def log(conv: Any) -> None:
        x = torch.randn(30, 8, requires_grad=True)
        inputs = [*conv.source.parameters()] if of == "source" else [x]
        torch.autograd.grad(conv(x, seed=3).square().mean(), inputs)

    conv = layer(exploration=0.01)
    sparsifier, wanted = Sparsifier(conv, 0.3, 100, dense_part=dense_part), of_source(conv)
    for _ in range(3):
        torch.testing.assert_close(of_source(conv, log), wanted)
        sparsifier.step(1.0)


@pytest.mark.parametrize("how", ["none", "checkpoint", "reentrant"])
def test_calls_of_one_pass_share_its_weight(how: str) -> None:
    """Two calls of a layer, or two layers of one source, whose losses are as if each layer had its own."""
    x = torch.linspace(-1, 1, 240).view(30, 8)

    def gradient(model: Any, calls: list[int], parts: int) -> list[Tensor]:
        model.zero_grad()
        for _ in range(parts):
            y = x.clone().requires_grad_()
            for number in calls:
                run = partial(model[number], seed=3)
                y = y + (run(y) if how == "none" else checkpoint(run, y, use_reentrant=how == "reentrant"))
            (y.square().mean() / parts).backward()
        return [parameter.grad.clone() for parameter in model[0].source.parameters()]

    torch.manual_seed(0)
    model: Any = nn.ModuleList([SBMAttentionConv(8, 4, heads=2, num_clusters=4) for _ in range(2)])
    model[1].source = model[0].source
    sparsifier = Sparsifier(model, 0.3, 100, trial_interval=50)
    for calls in ([0, 0], [0, 1]):
        sparsifier.passes = None
        wanted = gradient(model, calls, 1)
        sparsifier.step(1.0)
        for parts, is_known in ((3, False), (2, False), (3, True), (2, True)):
            sparsifier.passes = parts if is_known else None
            torch.testing.assert_close(gradient(model, calls, parts), wanted)
            sparsifier.step(1.0)
    sparsifier.passes = None
    first, second = gradient(model, [0], 1), gradient(model, [0, 0], 1)
    assert 0.5 < float(first[0].norm() / second[0].norm()) < 2  # a mean
    assert float(first[0].norm() / gradient(model, [0, 1], 1)[0].norm()) < 0.75  # a sum
    sparsifier = Sparsifier(model, 0.3, 100, dense_part=0.0)
    for number, parts in enumerate((1, 1, 3, 2)):
        sparsifier.passes = parts
        found = gradient(model, [0, 0], parts)
        sparsifier.step(1.0)
        wanted = found if number == 1 else wanted  # the first step does not know of two calls yet
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("sparsifier_first", [False, True])
def test_the_scale_is_read_when_a_backward_pass_runs(sparsifier_first: bool) -> None:
    """Whether ``step`` comes before ``update`` or after it, and in whichever order states are loaded."""
    conv, wanted = layer(), of_source(layer_with_sparsifier())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    sparsifier, optimizer = Sparsifier(conv, 0.3, 100, scaler=scaler), torch.optim.SGD(conv.parameters(), 0.0)

    def scaled(conv: Any, scaler: Any) -> list[Tensor]:
        conv.zero_grad()
        scaler.scale(conv(torch.linspace(-1, 1, 240).view(30, 8), seed=3).square().mean()).backward()
        return [parameter.grad / scaler.get_scale() for parameter in conv.source.parameters()]

    for _ in range(3):
        torch.testing.assert_close(scaled(conv, scaler), wanted)
        scaler.step(optimizer)
        for call in (lambda: sparsifier.step(1.0), scaler.update)[:: 1 if sparsifier_first else -1]:
            call()
    assert scaler.get_scale() == 8192.0
    again, other = layer(), torch.amp.GradScaler("cpu", init_scale=65536.0)
    parts: list[Any] = [(Sparsifier(again, 0.3, 100, scaler=other), sparsifier), (other, scaler)]
    for new, old in parts if sparsifier_first else reversed(parts):
        new.load_state_dict(old.state_dict())
    torch.testing.assert_close(scaled(again, other), wanted)
    torch.testing.assert_close(scaled(copy.deepcopy(again), other), wanted)
    assert pickle.loads(pickle.dumps(again)).auxiliary_losses.passes.scaler is None


def test_a_forgotten_step_is_noticed() -> None:
    """Gradients that are reset tell of steps of the optimizer."""
    conv, x = layer(), torch.randn(30, 8)
    sparsifier = Sparsifier(conv, 0.3, 1000)

    def train(steps: int, record: bool) -> None:
        for _ in range(steps):
            conv.zero_grad()
            conv(x).square().mean().backward()
            if record:
                sparsifier.step(1.0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ANNOTATIONS)
        train(70, record=True)
        train(60, record=False)
        for _ in range(70):
            conv(x).square().mean().backward()  # parts of one step
    with pytest.warns(UserWarning, match=r"reset 64 times without `sparsifier.step\(loss\)`, so training stays dense"):
        train(10, record=False)


def test_a_sparse_model_does_not_become_dense_in_silence() -> None:
    conv = layer()
    first = Sparsifier(conv, 0.2, 2, dense_part=0.5)
    first.step(1.0)
    assert first.is_sparse
    second = Sparsifier(conv, 0.1, 10)
    words = "The model was sparse, and a second Sparsifier trains it dense until step 7"
    with pytest.warns(UserWarning, match=words) as caught:
        second.step(1.0)
    assert {each.filename for each in caught if ANNOTATIONS not in str(each.message)} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.step(1.0)  # which has said so
        Sparsifier(conv, 0.1, 10).step(1.0)  # after one that was dense yet
        Sparsifier(conv, 0.1, 10, dense_part=0.0).step(1.0)
        third = Sparsifier(conv, 0.1, 10)
        third.load_state_dict(first.state_dict())
        third.step(1.0)
        assert third.is_sparse


def test_a_frozen_model_trains_its_source() -> None:
    conv = layer()
    for name, parameter in conv.named_parameters():
        parameter.requires_grad_(name.startswith("source."))
    Sparsifier(conv, 0.3, 10)
    gradients(conv)
    assert any(bool(cast(Tensor, parameter.grad).any()) for parameter in cast(Any, conv.source).parameters())


def test_the_entropy_of_a_bias_joins_too() -> None:
    bias = DCMMBias(4, 2, 3, entropy_weight=0.5)
    full = AttentionConv(8, 4, 2, patterns.PatternSource(patterns.full), score_bias=bias)
    model = nn.ModuleList([layer(), full])
    Sparsifier(model, 0.3, 10)
    full(torch.randn(12, 8)).sum().backward()
    assert float(auxiliary_loss(model)) == 0


def test_float16_needs_the_scaler() -> None:
    conv = layer()
    Sparsifier(conv, 0.3, 10)
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(ValueError, match="Expected 'scaler' with autocast to float16"),
    ):
        conv(torch.randn(12, 8))


# ------------------------------------------------------------------ compiled, and in several processes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own
def test_a_compiled_model_trains_alike() -> None:
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        encoder = SequenceEncoder(20, 16, num_layers=1, dropout=0.0, attention_options={"num_clusters": 4})
        sparsifier = Sparsifier(encoder, 0.2, total_steps=12, trial_interval=3)
        run: Any = torch.compile(encoder, backend="aot_eager") if compiled else encoder
        optimizer = torch.optim.SGD(encoder.parameters(), 0.1)
        for step in range(12):
            loss = run(torch.arange(60) % 20, torch.tensor([0, 13, 30, 60]), seed=step).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sparsifier.step(loss)
        assert sparsifier.is_sparse
        ends.append([parameter.detach() for parameter in encoder.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def check_processes_with_other_losses_train_one_model(rank: int, world: int) -> None:
    """Each over its own sequences; ``test_distributed.py`` starts the processes."""
    model = SequenceEncoder(20, 16, num_layers=1, dropout=0.0, attention_options={"num_clusters": 4})
    sparsifier, parallel = Sparsifier(model, 0.2, total_steps=12, trial_interval=3), DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(12):
        loss = (parallel(torch.arange(40) % (10 + 5 * rank), seed=step) - rank).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sparsifier.step(loss)
    ends: list[Any] = [None] * world
    distributed.all_gather_object(ends, (sparsifier.state_dict()["steps"], [x.detach() for x in model.parameters()]))
    assert ends[0][0] == 12
    assert same(*ends)


# ------------------------------------------------------------------ states


def test_a_restored_sparsifier_continues_alike() -> None:
    """Also while a trial step is next, and after training has become sparse."""

    def loss(step: int) -> float:
        return 3 / (1 + step) + 0.1 * math.sin(step)

    for stop in (9, 23, 40, 70):
        encoders = [SequenceEncoder(9, 8, num_layers=1, attention_options={"num_clusters": 4}) for _ in range(2)]
        one, other = (Sparsifier(encoder, 0.2, total_steps=80, trial_interval=5) for encoder in encoders)
        for step in range(stop):
            one.step(loss(step))
        encoders[1].load_state_dict(encoders[0].state_dict())
        other.load_state_dict(pickle.loads(pickle.dumps(one.state_dict())))
        for step in range(stop, 80):
            assert one.step(loss(step)) == other.step(loss(step))
            first, second = (x.sources[0].schedule for x in (one, other))
            assert first is not None
            assert second is not None
            assert first[1:] == second[1:]
        assert one.history == other.history
        assert one.state_dict() == other.state_dict()
    refuses(lambda: one.load_state_dict({}), "Expected 'state' of a Sparsifier (got none of ['steps'")
    refuses(lambda: one.load_state_dict(cast(Any, None)), "Expected 'state' to be a dict (got NoneType)", TypeError)


@pytest.mark.parametrize("model_first", [True, False])
def test_a_trial_step_comes_in_whichever_order_states_are_loaded(model_first: bool) -> None:
    conv, again = layer(), layer()
    sparsifier, other = (Sparsifier(each, 0.2, total_steps=80, trial_interval=5) for each in (conv, again))
    for _ in range(4):
        sparsifier.step(1.0)
    parts: list[Any] = [(again, conv.state_dict()), (other, sparsifier.state_dict())]
    for part, state in parts if model_first else reversed(parts):
        part.load_state_dict(state)
    assert [cast(Any, each).source.target_density for each in (conv, again)] == [0.2, 0.2]
    other.step(1.0)
    assert cast(Any, again).source.target_density == 1


@pytest.mark.parametrize("is_sparse", [False, True])
def test_copies_of_a_model_with_a_sparsifier_train_alike(is_sparse: bool) -> None:
    conv, x = layer(), torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    sparsifier = Sparsifier(conv, 0.2, 10, dense_part=0.0 if is_sparse else 0.7)
    pair = copy.deepcopy((conv, sparsifier))
    grads = []
    for each in (conv, copy.deepcopy(conv), pickle.loads(pickle.dumps(conv)), pair[0]):
        each.zero_grad()
        each(x, seed=1).square().mean().backward()
        grads.append([parameter.grad for parameter in each.parameters()])
        assert cast(Any, each).source.target_density == (0.2 if is_sparse else 1)
    assert all(torch.equal(*both) for other in grads[1:] for both in zip(other, grads[0], strict=True))
    pair[1].step(1.0)
    pair[1].set_density(0.5)
    assert [cast(Any, each).eval().source.target_density for each in (conv, pair[0])] == [0.2, 0.5]


def test_a_density_that_is_set_by_hand_is_that_of_both_modes() -> None:
    conv = layer()
    sparsifier = Sparsifier(conv, 0.2, total_steps=10, trial_interval=2)
    sparsifier.step(1.0)
    source: Any = conv.source
    assert source.target_density == 0.2  # a trial step
    source.target_density = 0.5
    assert [conv.train(mode).source.target_density for mode in (True, False)] == [0.5, 0.5]


def test_a_sparse_model_stays_sparse_in_a_longer_training() -> None:
    first, second, third = (Sparsifier(layer(), 0.2, total_steps=steps) for steps in (10, 1_000, 1_000))
    for _ in range(8):
        first.step(1.0)
    for old, new in ((first, second), (second, third)):
        new.load_state_dict(old.state_dict())
        assert new.is_sparse
    early, later = (Sparsifier(layer(), 0.2, total_steps=steps) for steps in (10, 1_000))
    early.step(1.0)
    later.load_state_dict(early.state_dict())
    assert (later.steps, later.dense_steps) == (1, 700)


@pytest.mark.parametrize("how", ["lazy", "inference", "meta"])
def test_parameters_of_any_kind_are_taken(how: str) -> None:
    with torch.inference_mode(how == "inference"), torch.device("meta" if how == "meta" else "cpu"):
        conv = SBMAttentionConv(-1 if how == "lazy" else 8, 4, heads=2, num_clusters=4)
    sparsifier = Sparsifier(conv, 0.2, total_steps=2, dense_part=0.5)
    if how == "lazy":
        conv(torch.randn(9, 8)).sum().backward()
    sparsifier.step(1.0)
    assert sparsifier.is_sparse


def test_an_optimizer_without_the_sources_is_noticed() -> None:
    """As one that was made before attention was replaced. Frozen sources, and those without a loss, are no mistake."""

    def train(parameters: Any, steps: int = 12, **options: Any) -> None:
        conv, x = layer(**options), torch.randn(30, 8)
        sparsifier = Sparsifier(conv, 0.2, total_steps=20, trial_interval=2)
        optimizer = torch.optim.AdamW(parameters(conv))
        for _ in range(steps):
            optimizer.zero_grad()
            loss = conv(x).square().mean()
            loss.backward()
            optimizer.step()
            sparsifier.step(loss)

    def others(conv: Any) -> list[nn.Parameter]:
        return [*conv.lin_query.parameters(), *conv.lin_key.parameters()]

    def freeze(conv: Any) -> list[nn.Parameter]:
        for parameter in conv.source.parameters():
            parameter.grad = None
            parameter.requires_grad_(False)
        return others(conv)

    words = "The optimizer has not changed the graph sources in 10 steps"
    with pytest.warns(UserWarning, match=words) as found:
        train(others)
    assert {each.filename for each in found if ANNOTATIONS not in str(each.message)} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ANNOTATIONS)
        train(others, steps=9)
        train(lambda conv: conv.parameters())
        train(lambda conv: conv.source.parameters())
        train(others, estimator="none")
        train(freeze)


def test_an_optimizer_from_before_the_replacement_is_noticed() -> None:
    """All layers of attention are new to it; only the feed-forward networks and norms learn."""
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replace_attention(model, num_clusters=4)
    sparsifier, x = Sparsifier(model, 0.2, total_steps=20), torch.randn(2, 12, 16)

    def step() -> None:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        sparsifier.step(loss)

    for _ in range(9):
        step()
    with pytest.warns(UserWarning, match="Make it of the parameters of the whole model, after `replace_attention`"):
        step()


def test_dense_attention_trains_without_a_sparsifier_and_warns() -> None:
    """The queries and keys train; the source does not, unless its loss is added."""
    conv, x = layer(target_density=1.0), torch.randn(30, 8)
    with pytest.warns(
        UserWarning, match=r"Attention is dense \(target_density=1\), and its graph source learns nothing"
    ) as caught:
        conv(x, seed=1).square().mean().backward()
    assert Path(caught[0].filename).name == "auxiliary.py"  # a backward pass has no caller of the library's
    assert conv.lin_query.weight.grad is not None
    assert all(parameter.grad is None for parameter in cast(Any, conv.source).parameters())
    loss = conv(x, seed=1).square().mean() + auxiliary_loss(conv)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ANNOTATIONS)
        loss.backward()
        layer(target_density=1.0, estimator="none")(x).square().mean().backward()
    assert any(parameter.grad is not None for parameter in cast(Any, conv.source).parameters())


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [((None, 0.1), TypeError, "Expected 'model' to be a module"),
     ((layer(), 0.0), ValueError, r"Expected 'density' in \(0, 1\)"),
     ((layer(), 0.1, {"total_steps": 0}), ValueError, "Expected 'total_steps'"),
     ((layer(), 0.1, {"total_steps": 1.5}), TypeError, "Expected 'total_steps'"),
     ((layer(), 0.1, {"scaler": 3}), TypeError, "Expected 'scaler' to be a GradScaler")],
)  # fmt: skip
def test_arguments(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    *positional, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(error, match=text):
        Sparsifier(*positional, **{"total_steps": 10, **options})


def test_an_earlier_sparsifier_of_the_same_sources_is_refused() -> None:
    conv = layer()
    first = Sparsifier(conv, 0.2, 10)
    first.step(1.0)
    second = Sparsifier(conv, 0.1, 10)
    refuses(lambda: first.step(1.0), "one Sparsifier for a source", RuntimeError)
    assert first.steps == 1
    for wrong in ({"trial_interval": 1}, {"dense_part": 2.0}, {"keep_dense": ["none"]}, {"keep_dense": [""]}):
        with pytest.raises(ValueError, match="Expected"):
            Sparsifier(conv, 0.1, 10, **wrong)  # which leaves the model to the second one
    second.step(1.0)


@pytest.mark.parametrize("loss", [math.nan, math.inf, torch.ones(2), "a", None])
def test_a_loss_is_one_finite_number(loss: Any) -> None:
    sparsifier = Sparsifier(layer(), 0.1, 10)
    refuses(lambda: sparsifier.step(loss), "Expected 'loss'", (TypeError, ValueError))
    assert sparsifier.steps == 0


# ------------------------------------------------------------------ a training


def test_the_block_model_finds_the_key_of_each_query() -> None:
    """Each query must read the one key with its mark among 32, and ends with three keys or fewer."""
    torch.manual_seed(0)
    conv, read = SBMAttentionConv((24, 16), 32, num_clusters=32), nn.Linear(32, 8)
    model = nn.ModuleList([conv, read])
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    sparsifier = Sparsifier(model, 0.08, total_steps=300)
    marks, values, ptr = nn.functional.one_hot, nn.functional.one_hot, 32 * torch.arange(9)
    random = torch.Generator().manual_seed(1)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        held = torch.stack([torch.randperm(16, generator=random).repeat(2)[:32] for _ in range(8)])
        held[:, 16:] = held[:, :16]  # each mark twice, with one value
        value = torch.randint(8, (8, 16), generator=random).repeat(1, 2)
        asked = torch.randint(32, (8, 32), generator=random)
        key = torch.cat([marks(held, 16), values(value, 8)], 2).float().flatten(0, 1)
        query = marks(held.gather(1, asked), 16).float().flatten(0, 1)
        return key, query, value.gather(1, asked).flatten()

    for step in range(300):
        key, query, answer = batch()
        loss = nn.functional.cross_entropy(read(conv((key, query), ptr=(ptr, ptr), seed=step)), answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sparsifier.step(loss)
    assert sparsifier.is_sparse
    key, query, answer = batch()
    out, graph = conv.eval()((key, query), ptr=(ptr, ptr), seed=0, return_graph=True)
    assert float((read(out).argmax(1) == answer).float().mean()) > 0.97
    assert float(graph.density.mean()) < 0.1
