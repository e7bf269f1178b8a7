"""Auxiliary losses and states that follow batches: the same gradients however a batch is cut, scaled, or computed again."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from functools import partial
from typing import Any, cast

import pytest
import torch
from problems import draw, refuses
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from sbm_pyg import (
    AttentionConv,
    DCMMBias,
    SBMAttentionConv,
    SBMHead,
    SBMSource,
    SequenceEncoder,
    Sparsifier,
    Tokens,
    auxiliary_loss,
    make_attention,
    sync_statistics,
)
from sbm_pyg.sources import patterns
from sbm_pyg.sources.indexer import Indexer, IndexerSource
from sbm_pyg.sources.selectors import RoutingSource
from sbm_pyg.training.estimators import Imitate

PTR = torch.tensor([0, 9, 14, 30, 33])
PARTS = (slice(0, 2), slice(2, 4))
"""Sequences of each of two parts of a batch, of unlike lengths."""


def sbm(**options: Any) -> SBMAttentionConv:
    return make_attention("sbm", 8, 4, 2, num_clusters=3, **options)


LAYERS: dict[str, Any] = {
    "local": partial(sbm, estimator="local"), "imitate": partial(sbm, estimator="imitate"),
    "imitate over all keys": partial(sbm, estimator=Imitate(over="all")),
    "imitate over blocks": partial(sbm, estimator=Imitate(over="all"), block_size=3),
    "density": partial(sbm, target_density=0.4),
    "causal density, imitate": partial(sbm, target_density=0.4, estimator=Imitate(over="all"), is_causal=True),
    "density of blocks": partial(sbm, target_density=0.4, block_size=3),
    "ranks that imitate": lambda: AttentionConv(
        8, 4, 2, IndexerSource(Indexer(4, 2), select="top_k", k=3, detach=True), estimator="imitate",
    ),
    "coins that imitate": lambda: AttentionConv(
        8, 4, 2, IndexerSource(Indexer(4, 2), select="bernoulli", target_density=0.4), estimator="imitate",
    ),
    "mask": lambda: sbm(
        target_density=0.4, estimator="mask", window=1, detach=True, score_bias=DCMMBias(4, 2, 3, entropy_weight=0.3),
    ), "routing": lambda: AttentionConv(8, 4, 2, RoutingSource(4, 2, 3, decay=0.3)),
    "entropy": lambda: AttentionConv(
        8, 4, 2, patterns.PatternSource(patterns.full), score_bias=DCMMBias(4, 2, 3, entropy_weight=0.5),
    ),
    "entropy of both sides": lambda: AttentionConv(
        8, 4, 2, patterns.PatternSource(patterns.full), score_bias=DCMMBias(4, 2, 3, entropy_weight=0.5, tied=False),
    ),
}  # fmt: skip


def make(name: str) -> Any:
    torch.manual_seed(0)
    layer = nn.Sequential(LAYERS[name]()).double()
    layer[0].double()
    for warm in range(2):  # a running mean is known, and centroids have moved
        auxiliary_loss(layer)
        layer[0](draw(warm + 7, 33, 8), ptr=PTR, seed=100 + warm)
    auxiliary_loss(layer)
    return layer


def task_loss(layer: Any, x: Tensor, part: slice, seed: int) -> Tensor:
    """The mean over sequences of what their outputs cost."""
    ptr = PTR[part.start : part.stop + 1]
    rows = x[int(ptr[0]) : int(ptr[-1])]
    ids = torch.arange(part.start, part.stop)
    out = layer[0](rows, ptr=ptr - ptr[0], seed=seed, sequence_ids=ids)
    number = torch.repeat_interleave(ptr.diff())
    each = out.new_zeros(ptr.numel() - 1).index_add(0, number, out.tanh().square().sum(1))
    return each.mean()


def step(layer: Any, parts: tuple[slice, ...], seed: int, scale: float = 1.0, wrap: Any = None) -> list[Tensor]:
    """Gradients of a batch that goes through the layer in parts, with a scaled loss, as they are without the scale."""
    layer.zero_grad()
    for part in parts:
        run = partial(task_loss, layer, draw(1, 33, 8), part)
        loss = (run if wrap is None else partial(wrap, run))(seed)
        ((loss + auxiliary_loss(layer)) / len(parts) * scale).backward()
    return [parameter.grad / scale for parameter in layer.parameters() if parameter.grad is not None]


def same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) > 0
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("name", LAYERS)
def test_parts_of_a_batch_have_the_gradients_and_states_of_the_whole(name: str) -> None:
    whole = make(name)
    parts = copy.deepcopy(whole)
    for seed in (1, 2):
        same(step(parts, PARTS, seed), step(whole, (slice(0, 4),), seed))
    step(parts, PARTS, 3)
    step(whole, (slice(0, 4),), 3)
    for (key, one), other in zip(parts.named_buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=key)


@pytest.mark.parametrize("name", LAYERS)
def test_a_scaled_loss_has_scaled_gradients(name: str) -> None:
    """As under :class:`torch.amp.GradScaler`."""
    layer = make(name)
    scaled = copy.deepcopy(layer)
    same(step(scaled, PARTS, 1, scale=65536.0), step(layer, PARTS, 1))


@pytest.mark.parametrize("name", LAYERS)
def test_activation_checkpointing_changes_nothing(name: str) -> None:
    layer = make(name)
    again = copy.deepcopy(layer)
    for seed in (1, 2):
        wanted = step(layer, PARTS, seed)
        same(step(again, PARTS, seed, wrap=partial(checkpoint, use_reentrant=False)), wanted)
    for one, other in zip(again.buffers(), layer.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kept", ["addmm", "baddbmm", "bmm", "mm"])
@pytest.mark.parametrize("parameterization", ["mixed", "overlapping"])
def test_checkpointing_may_keep_products(parameterization: str, kept: str) -> None:
    """Nothing writes into them, so the second call finds them as they were."""
    torch.manual_seed(0)
    conv: Any = make_attention("sbm", 8, 4, 2, num_clusters=3, parameterization=parameterization)
    x, run = draw(1, 30, 8).float().requires_grad_(), partial(conv, seed=3)
    how = partial(create_selective_checkpoint_contexts, [getattr(torch.ops.aten, kept).default])
    found = torch.autograd.grad(
        checkpoint(run, x, use_reentrant=False, context_fn=how).sum(), [x, *conv.source.parameters()]
    )
    torch.testing.assert_close(found, torch.autograd.grad(run(x).sum(), [x, *conv.source.parameters()]), rtol=0, atol=0)


def test_a_repeated_call_with_another_seed_is_refused() -> None:
    """Checkpointing that does not preserve the state of the generator draws another one."""
    torch.manual_seed(0)
    conv, x = SBMAttentionConv(8, 4, 2, num_clusters=3, target_density=0.3), draw(1, 30, 8).float().requires_grad_()
    out = checkpoint(conv, x, use_reentrant=False, preserve_rng_state=False)
    refuses(lambda: out.sum().backward(), "leave `preserve_rng_state` True, or pass a seed", RuntimeError)


def test_centroids_move_once_though_calls_are_made_again() -> None:
    found = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        layer: Any = AttentionConv(8, 4, 2, RoutingSource(4, 2, 3, decay=0.3))
        for number in range(3):
            x = draw(number, 33, 8).float().requires_grad_()
            y = x
            for call in (2 * number, 2 * number + 1):  # twice the same layer
                run = partial(layer, ptr=PTR, seed=call)
                y = run(y) if reentrant is None else checkpoint(run, y, use_reentrant=reentrant)
            y.square().sum().backward()
            found.append([y.detach(), cast(Tensor, x.grad), *(each.clone() for each in layer.buffers())])
    for number in range(3):
        for again in (found[3 + number], found[6 + number]):
            torch.testing.assert_close(again, found[number], rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------ what keeps an auxiliary loss


@pytest.mark.parametrize("name", ["imitate over all keys", "imitate", "entropy"])
def test_a_backward_pass_without_the_auxiliary_loss_raises(name: str) -> None:
    layer = make(name)
    with pytest.raises(
        RuntimeError, match=r"Expected the loss to hold the auxiliary loss of .*auxiliary_loss\(model\)"
    ):
        task_loss(layer, draw(1, 33, 8), PARTS[0], 1).backward()
    auxiliary_loss(layer)
    x = draw(1, 33, 8).requires_grad_()
    loss = checkpoint(partial(layer[0], seed=1), x, use_reentrant=True).sum() + auxiliary_loss(layer)
    refuses(lambda: loss.backward(), "activation checkpointing needs `use_reentrant=False`", RuntimeError)
    layer.eval()
    task_loss(layer, x, PARTS[0], 1).backward()
    assert auxiliary_loss(layer).item() == 0


@pytest.mark.parametrize("options", [{"estimator": "distill", "target_density": 0.4}, {"target_density": 1.0}])
def test_frozen_sources_need_no_auxiliary_loss(options: dict[str, Any]) -> None:
    layer, x = sbm(**options), draw(1, 33, 8).float().requires_grad_()
    cast(Any, layer.source).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x).square().mean().backward()
    assert x.grad is not None
    assert layer.lin_query.weight.grad is not None


@pytest.mark.parametrize(
    "options", [{"target_density": 1.0}, {"target_density": 1.0, "estimator": "distill"}, {"estimator": "imitate"}]
)
def test_sources_learn_from_frozen_attention(options: dict[str, Any]) -> None:
    layer, x = sbm(**options), draw(1, 33, 8).float()
    gradients = []
    for frozen in (False, True):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not frozen or name.startswith("source."))
        layer.zero_grad()
        out = layer(x, seed=1)
        loss = auxiliary_loss(layer)
        assert loss.item() > 0
        (loss + 0 * out.sum()).backward()
        gradients.append([cast(Tensor, each.grad) for each in cast(Any, layer.source).parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert layer.lin_query.weight.grad is None


def test_an_auxiliary_loss_is_the_sum_over_calls_and_lives_as_long_as_their_outputs() -> None:
    layer = make("imitate over all keys")
    x = draw(1, 33, 8)
    apart = []
    for seed in (1, 2):
        out = layer[0](x, ptr=PTR, seed=seed)
        apart.append(auxiliary_loss(layer).detach())
    outs = [layer[0](x, ptr=PTR, seed=seed) for seed in (1, 2)]
    both = auxiliary_loss(layer)
    torch.testing.assert_close(both.detach(), apart[0] + apart[1], rtol=1e-12, atol=0)
    assert auxiliary_loss(layer).item() == 0
    (both + outs[0].sum() + outs[1].sum()).backward()
    for seed in range(3):
        layer[0](x, ptr=PTR, seed=seed)  # whose outputs nobody keeps
    gc.collect()
    assert len(layer[0].auxiliary_losses.calls) == 0
    out = layer[0](x, ptr=PTR, seed=1)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert auxiliary_loss(twin).item() == 0
    assert auxiliary_loss(layer).item() > 0
    assert out.requires_grad
    with torch.no_grad():
        layer[0](x, ptr=PTR, seed=1)
    assert auxiliary_loss(layer).item() == 0
    assert auxiliary_loss(nn.Linear(2, 2)).item() == 0
    assert auxiliary_loss(nn.ReLU()).item() == 0  # without a parameter that has a device
    refuses(lambda: auxiliary_loss(cast(Any, x)), "Expected 'model' to be a module (got Tensor)", TypeError)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo reads of every tensor
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_layer_keeps_its_auxiliary_loss() -> None:
    torch._dynamo.reset()
    layer = make("imitate over all keys").float()
    x, ptr = draw(1, 33, 8).float(), PTR
    grads = []
    for run in (layer, torch.compile(layer[0])):
        layer.zero_grad()
        for _ in range(2):
            out = (run[0] if run is layer else run)(x, ptr=ptr, seed=5)
            (out.square().mean() + auxiliary_loss(layer)).backward()
        grads.append([parameter.grad.clone() for parameter in layer.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    run(x, ptr=ptr, seed=5).square().mean().backward()  # without its loss, which the next call adds to its own
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        run(x, ptr=ptr, seed=5).square().mean().backward()
    torch._dynamo.reset()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_running_mean_of_dense_steps_under_activation_checkpointing(use_reentrant: bool) -> None:
    """The reentrant form predicts in the backward pass alone, so only trial and sparse steps count."""
    torch.manual_seed(0)
    conv = SBMAttentionConv(8, 4, 2, num_clusters=3)
    source: Any = conv.source
    sparsifier, x = Sparsifier(conv, 0.2, total_steps=10, trial_interval=3), draw(1, 30, 8).float().requires_grad_()
    for step in range(3):
        assert source.target_density == (0.2 if step == 2 else 1)
        checkpoint(conv, x, use_reentrant=use_reentrant).square().mean().backward()
        assert source.head.clusters.grad.any()
        assert bool(source.seen.any()) is (not use_reentrant or step == 2)
        sparsifier.step(1.0)


# ------------------------------------------------------------------ NaN


def test_a_sequence_of_nan_does_not_spoil_the_running_mean() -> None:
    torch.manual_seed(0)
    source = SBMSource(SBMHead(4, 2, 3), target_density=0.3)
    x, ptr = draw(1, 2, 20, 4).float(), torch.tensor([0, 8, 20])
    sick = x.clone()
    sick[:, 3] = torch.nan
    for seed in (1, 2):
        source(Tokens(x, query_ptr=ptr, seed=seed))
    clean = copy.deepcopy(source)
    wanted = cast(Any, clean(Tokens(x, query_ptr=ptr, seed=3)).probability).rate
    refuses(lambda: source(Tokens(sick, query_ptr=ptr, seed=3)), "Expected 'rate' and 'member' to be finite")
    assert torch.equal(cast(Any, source(Tokens(x, query_ptr=ptr, seed=3)).probability).rate, wanted)
    for each in (source, clean):
        each(Tokens(x, query_ptr=ptr, seed=4))
    assert source.running_mean.isfinite().all()
    assert torch.equal(source.running_mean, clean.running_mean)  # the call that raised has left nothing


def test_tokens_of_nan_leave_centroids_as_they_are() -> None:
    torch.manual_seed(0)
    source, ptr = RoutingSource(4, 2, 3, decay=0.3), torch.tensor([0, 20])
    x = draw(1, 2, 20, 4).float()
    x[:, ::2] = torch.nan
    for seed in (1, 2, 3):
        source(Tokens(x, query_ptr=ptr, seed=seed))
    assert source.centroids.isfinite().all()
    assert source.seen.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_a_model_in_16_bits(dtype: torch.dtype) -> None:
    """Pairs of a batch that float16 does not hold, and steps that are small beside the state."""
    states: dict[torch.dtype, list[Tensor]] = {}
    for each in (torch.float32, dtype):
        torch.manual_seed(0)
        model = nn.ModuleList([sbm(target_density=0.3), AttentionConv(8, 4, 2, RoutingSource(4, 2, 3))]).to(each)
        for seed in range(4):
            for layer in model:
                layer(draw(seed, 300, 8).to(each), seed=seed).square().mean().backward()
        assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
        copied = copy.deepcopy(model).to(each)  # as of a model that is loaded
        assert {buffer.dtype for buffer in copied.buffers() if buffer.is_floating_point()} == {each}
        for layer in copied.eval():
            layer(draw(9, 300, 8).to(each), seed=9)
        states[each] = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    for wide, mine in zip(states[torch.float32], states[dtype], strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine / wide.abs().max(), wide / wide.abs().max(), rtol=0, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_16_bits_goes_on_from_its_state(dtype: torch.dtype) -> None:
    def make() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList([sbm(target_density=0.3), AttentionConv(8, 4, 2, RoutingSource(4, 2, 3))]).to(dtype)

    model, again = make(), make()
    for seed in range(4):
        for layer in model:
            layer(draw(seed, 300, 8).to(dtype), seed=seed)
    again.load_state_dict(model.state_dict())
    for seed in (4, 5):
        for mine, theirs in zip(model, again, strict=True):
            x = draw(seed, 300, 8).to(dtype)
            assert torch.equal(mine(x, seed=seed), theirs(x, seed=seed))
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


# ------------------------------------------------------------------ processes


TOGETHER = "imitate", "causal density, imitate", "routing", "entropy"


def _three_steps(rank: int, name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the last step, and the states."""
    layer = sync_statistics(make(name))  # the mean and centroids of its warm calls are added up: same for both

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, part: int, seed: int) -> Tensor:
            return task_loss(self.layer, draw(1, 33, 8), PARTS[part], seed) + auxiliary_loss(self.layer)

    parallel = DistributedDataParallel(Loss())
    for seed in (1, 2, 3):
        layer.zero_grad()
        parallel(rank, seed).backward()
    return [parameter.grad for parameter in layer.parameters() if parameter.grad is not None], [*layer.buffers()]


def check_parts_have_the_gradients_and_states_of_the_whole(rank: int, world: int) -> None:
    """Each of two processes takes a part of each batch; ``test_distributed.py`` starts them."""
    for name in TOGETHER:
        gradients, states = _three_steps(rank, name)
        layer = make(name)
        for seed in (1, 2, 3):
            wanted = step(layer, (slice(0, 4),), seed)
        same(gradients, wanted)
        torch.testing.assert_close(states, [*layer.buffers()])


def test_sources_of_a_model_are_set_to_add_up_over_processes() -> None:
    model = SequenceEncoder(10, 8, attention_options={"num_clusters": 3, "target_density": 0.2})
    assert sync_statistics(model) is model
    assert all(each.synced for each in model.modules() if isinstance(each, SBMSource))
    refuses(lambda: sync_statistics(cast(Any, 3)), "Expected 'model' to be a module (got int)", TypeError)
