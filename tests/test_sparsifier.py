"""From dense attention to sparse: the schedule, auxiliary losses that join the backward pass, states, and a training."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from sbm_pyg import AttentionConv, DCMMBias, SBMAttentionConv, SequenceEncoder, Sparsifier, auxiliary_loss, patterns
from sbm_pyg.estimators import Distill, Mask
from sbm_pyg.sources.indexer import Indexer, IndexerSource


def layer(**options: Any) -> SBMAttentionConv:
    torch.manual_seed(0)
    return SBMAttentionConv(8, 4, heads=2, num_blocks=4, **options)


def densities(sparsifier: Sparsifier, dense: Callable[[int], float], sparse: Callable[[int], float], steps: int) -> str:
    """A letter for each step: dense, trial, or sparse, given the losses of dense and of sparse steps."""
    found = []
    for step in range(steps):
        is_dense = all(source.target_density == 1 for source in sparsifier.sources)
        found.append("d" if is_dense else "s" if sparsifier.is_sparse else "t")
        sparsifier.step((dense if is_dense else sparse)(step))
    return "".join(found)


# ------------------------------------------------------------------ the schedule


def test_training_is_dense_with_trial_steps_and_then_sparse() -> None:
    sparsifier = Sparsifier(layer(), 0.1, total_steps=100, every=5, min_dense=0.4, max_dense=0.8)
    found = densities(sparsifier, lambda step: 4.0 if step < 20 else 1.0, lambda step: 4.0 if step < 20 else 1.01, 100)
    assert found == "ddddt" * 8 + "s" * 60  # close since step 20, but dense for two fifths of the steps
    assert sparsifier.history[-1].is_sparse
    assert [each.step for each in sparsifier.history] == [*range(5, 101, 5)]
    assert sparsifier.history[-1].sparse == pytest.approx(1.01, abs=0.05)
    assert str(sparsifier).startswith("dense 2.32, at 10 % 1.04")
    assert str(sparsifier).endswith("100 steps, sparse")


def test_a_large_gap_keeps_training_dense_until_the_largest_number_of_dense_steps() -> None:
    sparsifier = Sparsifier(layer(), 0.1, total_steps=100, every=5, max_dense=0.7)
    found = densities(sparsifier, lambda step: 1.0, lambda step: 3.0 - step / 100, 100)
    assert found == "ddddt" * 14 + "s" * 30
    assert sparsifier.is_final


def test_without_a_number_of_steps_it_waits_for_progress_to_end() -> None:
    sparsifier = Sparsifier(layer(), 0.1, every=2)
    found = densities(sparsifier, lambda step: 1.0, lambda step: max(3.0 - step / 50, 2.0), 400)
    assert 100 < found.index("s") < 200
    assert set(found[found.index("s") :]) == {"s"}  # for good, since the loss was no surprise


def test_a_loss_that_rises_makes_training_dense_again_for_a_while() -> None:
    sparsifier = Sparsifier(layer(), 0.1, total_steps=1000, every=2, min_dense=0.1, max_dense=0.9)
    found = densities(sparsifier, lambda step: 1.0, lambda step: 3.0 if 120 < step < 200 else 1.0, 1000)
    assert "".join(dict.fromkeys(found)) == "dts"
    first = found.index("s")
    assert first == 100
    back = first + found[first:].index("d")
    assert 120 <= back < 180
    again = back + found[back:].index("s")
    assert set(found[again:]) == {"s"}


def test_the_tolerance_is_relative_to_the_loss_of_the_first_steps() -> None:
    def run(scale: float) -> str:
        sparsifier = Sparsifier(layer(), 0.1, total_steps=100, every=5)
        return densities(
            sparsifier,
            lambda step: scale * (5 if step < 10 else 1),
            lambda step: scale * (5.5 if step < 55 else 1),
            100,
        )

    assert run(1.0) == run(1e-6) == run(1e6)
    assert 55 < run(1.0).index("s") <= 70


def test_sources_are_dense_and_detached_until_training_is_sparse() -> None:
    model = nn.ModuleList([layer(), layer(detach=True), AttentionConv(8, 4, source=IndexerSource(Indexer(4)))])
    sparsifier = Sparsifier(model, 0.2, total_steps=10, every=2, min_dense=0.2, max_dense=0.2)
    state = [(source.target_density, source.detach) for source in sparsifier.sources]
    assert state == [(1.0, True)] * 3
    with sparsifier.sparse():
        assert [source.target_density for source in sparsifier.sources] == [0.2] * 3
    assert [source.target_density for source in sparsifier.sources] == [1.0] * 3
    sparsifier.step(1.0)
    assert [source.target_density for source in sparsifier.sources] == [0.2] * 3  # a trial step
    sparsifier.step(1.0)
    assert sparsifier.is_sparse
    assert [(source.target_density, source.detach) for source in sparsifier.sources] == [
        (0.2, False), (0.2, True), (0.2, False)
    ]  # fmt: skip


def test_named_modules_stay_dense() -> None:
    model = nn.ModuleList([layer(), layer(), layer()])
    sparsifier = Sparsifier(model, 0.2, total_steps=2, every=2, min_dense=0.5, max_dense=0.5, keep_dense=["1"])
    sparsifier.step(1.0)
    sparsifier.step(1.0)
    assert sparsifier.is_sparse
    assert [cast(Any, each).source.target_density for each in model] == [0.2, 1.0, 0.2]
    for wrong in (["3"], "1"):
        with pytest.raises(ValueError, match="Expected 'keep_dense' to be names of modules"):
            Sparsifier(model, 0.2, keep_dense=wrong)
    with pytest.raises(ValueError, match="Expected 'model' to have a source with a target density"):
        Sparsifier(model, 0.2, keep_dense=[""])


def test_layers_learn_by_distillation_unless_they_have_another_estimator() -> None:
    model = nn.ModuleList([layer(probes=5.0), layer(estimator="mask"), layer(estimator=Distill(0.2))])
    Sparsifier(model, 0.2)
    first, second, third = (cast(SBMAttentionConv, each).estimator for each in model)
    assert type(first) is Distill
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

    def get_scale(self) -> float:
        return 1024.0


@pytest.mark.parametrize("density", [1.0, 0.3])
def test_auxiliary_losses_join_the_backward_pass_with_the_weight_of_the_loss(density: float) -> None:
    def make(scaler: Any = None) -> tuple[SBMAttentionConv, Sparsifier]:
        conv = layer(estimator="distill", exploration=0.01)
        sparsifier = Sparsifier(conv, 0.3, scaler=scaler)
        sparsifier.is_sparse = density < 1
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
    other.load_state_dict(sparsifier.state_dict() | {"is_sparse": sparsifier.is_sparse})
    for got, right in zip(gradients(again, parts=4), wanted, strict=True):
        torch.testing.assert_close(got, right)  # as does one that was restored


def test_a_frozen_model_trains_its_source() -> None:
    conv = layer()
    for name, parameter in conv.named_parameters():
        parameter.requires_grad_(name.startswith("source."))
    Sparsifier(conv, 0.3)
    gradients(conv)
    assert any(bool(cast(Tensor, parameter.grad).any()) for parameter in cast(Any, conv.source).parameters())


def test_the_entropy_of_a_bias_joins_too() -> None:
    bias = DCMMBias(4, 2, 3, entropy_weight=0.5)
    full = AttentionConv(8, 4, 2, patterns.PatternSource(patterns.full), score_bias=bias)
    model = nn.ModuleList([layer(), full])
    Sparsifier(model, 0.3)
    full(torch.randn(12, 8)).sum().backward()
    assert float(auxiliary_loss(model)) == 0


def test_float16_needs_the_scaler() -> None:
    conv = layer()
    Sparsifier(conv, 0.3)
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
        encoder = SequenceEncoder(20, 16, num_layers=1, dropout=0.0, attention_options={"num_blocks": 4})
        sparsifier = Sparsifier(encoder, 0.2, total_steps=12, every=3)
        run: Any = torch.compile(encoder) if compiled else encoder
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


def _train(rank: int, folder: str) -> None:
    """Two processes whose losses differ, each over its own sequences."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = SequenceEncoder(20, 16, num_layers=1, dropout=0.0, attention_options={"num_blocks": 4})
    sparsifier, parallel = Sparsifier(model, 0.2, total_steps=12, every=3), DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(12):
        loss = (parallel(torch.arange(40) % (10 + 5 * rank), seed=step) - rank).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sparsifier.step(loss)
    torch.save((sparsifier.state_dict(), [*model.parameters()]), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_processes_decide_alike_by_the_mean_of_their_losses(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_train, (str(tmp_path),), nprocs=2)
    (one, mine), (other, theirs) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one == other
    assert one["is_sparse"]
    for first, second in zip(mine, theirs, strict=True):
        assert torch.equal(first, second)


# ------------------------------------------------------------------ states


def test_a_restored_sparsifier_continues_alike() -> None:
    """Also while a trial step is next, and after training has become sparse."""

    def loss(step: int) -> float:
        return 3 / (1 + step) + 0.1 * math.sin(step)

    for stop in (9, 23, 40, 70):
        encoders = [SequenceEncoder(9, 8, num_layers=1, attention_options={"num_blocks": 4}) for _ in range(2)]
        one, other = (Sparsifier(encoder, 0.2, total_steps=80, every=5) for encoder in encoders)
        for step in range(stop):
            one.step(loss(step))
        encoders[1].load_state_dict(encoders[0].state_dict())
        other.load_state_dict(pickle.loads(pickle.dumps(one.state_dict())))
        for step in range(stop, 80):
            assert one.step(loss(step)) == other.step(loss(step))
            assert [s.detach for s in one.sources] == [s.detach for s in other.sources]
        assert one.history == other.history
        assert one.state_dict() == other.state_dict()
    with pytest.raises(ValueError, match=r"Expected 'state' of a Sparsifier \(got none of \['steps'"):
        one.load_state_dict({})


def test_a_model_with_a_sparsifier_copies_and_pickles_without_it() -> None:
    conv = layer()
    Sparsifier(conv, 0.2)
    for again in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert again.auxiliary_losses.weight is None
        assert cast(Any, again).source.target_density == 1


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((None, 0.1), TypeError, "Expected 'model' to be a module"),
        ((nn.Linear(2, 2), 0.1), ValueError, "Expected 'model' to have a source with a target density"),
        ((layer(), 0.0), ValueError, r"Expected 'density' in \(0, 1\)"),
        ((layer(), 1.0), ValueError, r"Expected 'density' in \(0, 1\)"),
        ((layer(), 0.1, {"total_steps": 0}), ValueError, "Expected 'total_steps'"),
        ((layer(), 0.1, {"total_steps": 1.5}), TypeError, "Expected 'total_steps'"),
        ((layer(), 0.1, {"every": 1}), ValueError, "Expected 'every'"),
        ((layer(), 0.1, {"min_dense": 0.8}), ValueError, "Expected 'min_dense' to be at most 'max_dense' = 0.7"),
        ((layer(), 0.1, {"tolerance": -1}), ValueError, "Expected 'tolerance'"),
        ((layer(), 0.1, {"scaler": 3}), TypeError, "Expected 'scaler' to be a GradScaler"),
    ],
)
def test_arguments(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    *positional, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(error, match=text):
        Sparsifier(*positional, **options)


@pytest.mark.parametrize("loss", [math.nan, math.inf, torch.ones(2), "a", None])
def test_a_loss_is_one_finite_number(loss: Any) -> None:
    sparsifier = Sparsifier(layer(), 0.1)
    with pytest.raises((TypeError, ValueError), match="Expected 'loss'"):
        sparsifier.step(loss)
    assert sparsifier.steps == 0


# ------------------------------------------------------------------ a training


def test_the_block_model_finds_the_key_of_each_query() -> None:
    """Each query must read the one key with its mark among 32, and ends with three keys or fewer."""
    torch.manual_seed(0)
    conv, read = SBMAttentionConv((24, 16), 32, num_blocks=32), nn.Linear(32, 8)
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
