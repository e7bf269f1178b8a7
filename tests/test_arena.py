"""The tasks of the arena are exact, each method runs on them, and a source in a user's file enters with one command."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from entmax import entmax15
from test_recall import generator
from torch import Tensor
from torch_geometric.utils import softmax

from examples.arena import __main__ as program
from examples.arena import methods, report, rivals, tasks, train
from examples.common import tables
from examples.common.hybrid import Decoder, beyond
from examples.common.tasks import Examples
from sbm_pyg import Sparsifier, Tokens, auxiliary_loss

pytestmark = pytest.mark.usefixtures("one_thread")

OWN = """
from sbm_pyg import Choice, GraphSource, selectors


class Nearest(GraphSource):
    def __init__(self, density):
        super().__init__()
        self.density = density

    def forward(self, tokens):
        return Choice(selectors.top_k(tokens, max(1, round(self.density * int(tokens.query_ptr[1]) / 2))))
"""
LEARNED = """
import torch
from sbm_pyg import SBM, Choice, LearnedSource, sample_edges


class Linear(LearnedSource):
    def __init__(self, channels):
        super().__init__()
        self.query, self.key = (torch.nn.Linear(channels, 4) for _ in range(2))

    def predict(self, tokens):
        sides = self.query(tokens.query).softmax(-1), self.key(tokens.key).sigmoid()
        return SBM(*sides, query_ptr=tokens.query_ptr, key_ptr=tokens.key_ptr, is_causal=tokens.is_causal)

    def choose(self, tokens):
        sbm = self.predict(tokens).with_density(self.target_density)
        return Choice(sample_edges(sbm, clamp=True, seed=tokens.seed), sbm)
"""


# ------------------------------------------------------------------------------------------------ tasks


def solve(examples: Examples, rule: Any) -> None:
    """Each answer follows from the tokens up to its question, by a rule in plain Python, and from no later token."""
    for tokens, places, answers in zip(*(part.tolist() for part in examples[:3]), strict=True):
        for place, answer in zip(places, answers, strict=True):
            assert rule(tokens[: place + 1]) == answer


def check_sources(examples: Examples) -> None:
    """All sources hold the answer, before the question."""
    rows = torch.arange(len(examples.tokens))[:, None]
    sources = examples.sources.reshape(*examples.places.shape, -1)
    for served in sources.unbind(2):
        assert torch.equal(examples.tokens[rows, served], examples.answers)
        assert bool((served < examples.places).all())


def variables(seen: list[int]) -> int:
    known: dict[int, int] = {}
    facts = seen[:39] if len(seen) > 39 else seen[:-3]
    for name, sign, value in zip(facts[::3], facts[1::3], facts[2::3], strict=True):
        assert sign == 1
        known[name] = known.get(value, value)  # set before it is used
    return known[seen[-1]]


@pytest.mark.parametrize("helped", [0, 1])
def test_two_hop_recall_is_exact(helped: int) -> None:
    examples = tasks.two_hop(5, 3, helped, 64, 200, generator())
    assert examples.tokens.shape == (200, 49)
    assert examples.places.shape == (200, 5 + 5 * helped)
    check_sources(examples)
    solve(examples, variables)
    for tokens, places in zip(examples.tokens.tolist(), examples.places[:, :5].tolist(), strict=True):
        asked, lines = [tokens[place] for place in places], dict(zip(tokens[:39:3], tokens[2:39:3], strict=True))
        assert len({*asked}) == 5
        assert all(lines[name] < 32 <= lines[lines[name]] for name in asked)  # two hops
        assert sum(value >= 32 for value in lines.values()) == 8
    assert uniform(examples.answers, 32, 64)
    assert torch.equal(examples.tokens, tasks.two_hop(5, 3, 1 - helped, 64, 200, generator()).tokens)


def uniform(answers: torch.Tensor, first: int, last: int) -> bool:
    """Whether answers have a uniform law over the tokens from first to last - 1: a blind guess is right with 1 / (last - first)."""
    count = torch.bincount(answers.flatten(), minlength=last).double()
    expected = answers.numel() / (last - first)
    assert float(count[:first].sum()) == 0
    spread = float((count[first:last] - expected).square().sum() / expected)
    return spread < (last - first - 1) + 6 * (2 * (last - first - 1)) ** 0.5  # chi-square


def test_copying_is_exact() -> None:
    examples = tasks.copying(30, 6, 32, 300, generator())
    assert examples.tokens.shape == (300, 36)
    check_sources(examples)
    solve(examples, lambda seen: [token for token in seen[:30] if token][seen[-1] - 1])
    assert bool((examples.tokens[:, 0] == 0).all())
    assert uniform(examples.answers, 7, 32)


def test_compression_is_exact() -> None:
    examples = tasks.compression(30, 6, 65, 300, generator())
    assert examples.tokens.shape == (300, 31)
    check_sources(examples)
    assert bool((examples.places == 30).all())  # one state tells all
    assert bool((examples.tokens[:, 30] == 0).all())
    for tokens, answers in zip(examples.tokens[:, :30].tolist(), examples.answers.tolist(), strict=True):
        assert sorted(token for token in tokens if token < 49) == answers  # one of eight for each slot, in order
    assert torch.equal((examples.answers - 1) // 8, torch.arange(6).expand(300, -1))
    assert uniform(examples.answers, 1, 49)


def test_the_decoder_of_compression_knows_one_state_and_the_slot() -> None:
    run = train.Run("compression", "full", 1.0, 0, 10, 2, 1e-3, channels=16)
    model, _ = train.make_model(run)
    examples = tasks.compression(48, 8, 81, 2, generator())
    states: list[Tensor] = []
    assert isinstance(model.decode, Decoder)
    model.decode.register_forward_pre_hook(lambda _, given: states.append(given[0]))
    logits = model.eval()(examples.tokens, examples.places)[0]
    (state,) = states
    assert state.shape == (2, 8, 16)
    assert torch.equal(state, state[:, :1].expand_as(state))
    assert bool((logits[:, 1:] != logits[:, :-1]).any(2).all())
    swapped = model.decode(state).flip(1)
    model.decode.slot.weight.data = model.decode.slot.weight.data.flip(0)
    torch.testing.assert_close(model.decode(state), swapped)


def test_noisy_recall_is_exact() -> None:
    examples = tasks.noisy(16, 8, 80, 300, generator())
    assert examples.tokens.shape == (300, 64)
    check_sources(examples)
    solve(examples, lambda seen: seen[seen.index(seen[-1]) + 1])
    noise = (examples.tokens >= 64).sum(1)
    assert bool((noise == 64 - 3 * 8).all())
    assert uniform(examples.answers, 32, 64)


def test_fuzzy_recall_is_exact() -> None:
    examples = tasks.fuzzy(12, 64, 300, generator())
    assert examples.tokens.shape == (300, 60)
    check_sources(examples)

    def rule(seen: list[int]) -> int:
        facts = seen[:36]
        return {(a, b): value for a, b, value in zip(facts[::3], facts[1::3], facts[2::3], strict=True)}[
            (seen[-2], seen[-1])
        ]

    solve(examples, rule)
    assert uniform(examples.answers, 16, 64)
    first = examples.tokens[:, :36:3]
    assert float((first.sort(1).values.diff(dim=1) == 0).any(1).double().mean()) > 0.9  # keys share their parts


def test_known_recall_needs_no_edge() -> None:
    examples = tasks.known(20, 64, 200, generator())
    assert examples.tokens.shape == (200, 40)
    asked = examples.tokens.gather(1, examples.places)
    pairs = {*zip(asked.flatten().tolist(), examples.answers.flatten().tolist(), strict=True)}
    assert len(pairs) == len({key for key, _ in pairs}) == len({value for _, value in pairs}) == 31
    assert torch.equal(examples.sources, examples.places)
    assert int(examples.answers.min()) >= 32


@pytest.mark.parametrize("serving", [1, 2, 8, 16])
def test_served_recall_has_as_many_answers_as_it_says(serving: int) -> None:
    examples = tasks.served(16, serving, 64, 200, generator())
    assert examples.tokens.shape == (200, 64)
    assert examples.sources.shape == (200, 16, serving)
    check_sources(examples)
    solve(examples, lambda seen: seen[seen.index(seen[-1]) + 1])
    for tokens, answers, sources in zip(
        *(part.tolist() for part in (examples.tokens, examples.answers, examples.sources)), strict=True
    ):
        for answer, places in zip(answers, sources, strict=True):
            assert sorted(places) == [at for at in range(1, 32, 2) if tokens[at] == answer]
    assert uniform(examples.answers[:, :1], 32, 64)
    with pytest.raises(ValueError, match="Expected 'serving' to divide slots=16"):
        tasks.served(16, 3, 64, 2, generator())


@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_task_is_a_function_of_its_seed(name: str) -> None:
    """The same seed gives the same batch; training batches differ among steps and seeds, and hold no example of the test."""
    task = tasks.TASKS[name]
    tests = dataclasses.replace(task, test=dict.fromkeys([*task.test][:1], 20)).tests()
    batches = [train.batch_of(task, seed, step, 20).tokens for seed, step in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert torch.equal(*batches[:2])
    seen = {tuple(row) for batch in batches for row in batch.tolist()}
    assert len(seen) == 60 or name == "served-16"  # which has one pair of a key and a value
    assert name == "served-16" or not seen & {tuple(row) for row in next(iter(tests.values())).tokens.tolist()}
    assert int(batches[0].max()) < task.num_tokens


# ------------------------------------------------------------------------------------------------ methods


@pytest.mark.parametrize("method", [name for name in methods.METHODS if name != "full"])
def test_each_method_and_its_twin_train_at_their_density(method: str) -> None:
    for name in filter(None, (method, methods.twin_of(method))):
        run = train.Run("recall", name, 0.2, 0, 2, 4, 1e-2, channels=16, start="sparse", evaluations=1)
        model, sparsifier = train.make_model(run)
        assert sparsifier is not None
        assert sparsifier.is_sparse
        batch = train.batch_of(tasks.TASKS["recall"], 0, 0, 4)
        moves = name.startswith("dash") or name == "spartan:frozen=1"  # its graphs go to their density in training
        for _ in range(80 if moves else 0):
            model(batch.tokens, batch.places, seed=0)
        _, choices = model.eval()(batch.tokens, batch.places, seed=0)
        for choice in choices:
            assert choice is not None
            assert choice.graph.is_causal
            assert bool(choice.graph.contains(torch.arange(256).expand(2, -1)).all())
            assert 0.05 < beyond(choice.graph) < 0.4 or name == "spartan"  # whose queries and keys have to learn to


def dash_oracle(q: Tensor, k: Tensor, v: Tensor, source: Any, head: int) -> Tensor:
    """DashAttention of one head and one sequence, by its formulas and token by token."""
    size, scale = rivals.SIZE, q.size(1) ** -0.5
    rows = []
    for i in range(len(q)):
        own = i // size
        prior = torch.ones(own + 1).to(q)
        if own:
            blocks = [k[b * size : (b + 1) * size] for b in range(own)]
            means = torch.stack([(each @ source.summary[head] * scale).softmax(0) @ each for each in blocks])
            share = entmax15(means @ q[i] * scale * source.log_factor.exp(), dim=0)
            log = share.clamp(min=1e-3).log()
            prior[:own] = torch.where(share > 0, (log - log[share > 0].mean()).exp(), 0)
        weight = prior[torch.arange(i + 1) // size] * (k[: i + 1] @ q[i] * scale).exp()
        rows.append(weight @ v[: i + 1] / weight.sum())
    return torch.stack(rows)


def hsa_oracle(q: Tensor, k: Tensor, v: Tensor, source: Any, head: int) -> Tensor:
    """HSA of one head and one sequence: attention within each block, then a mean over the chosen blocks."""
    size, scale = rivals.SIZE, q.size(1) ** -0.5
    rows = []
    for i in range(len(q)):
        own = i // size
        begins = [b * size for b in range(own + 1)]
        parts = [slice(begin, min(begin + size, i + 1)) for begin in begins]
        read = torch.stack([(k[part] @ q[i] * scale).softmax(0) @ v[part] for part in parts])
        landmarks = [k[part].mean(0) @ source.key[head] for part in parts[:-1]]
        score = torch.stack(
            [(q[i] @ source.query[head]) @ each * scale for each in landmarks] + [source.own_score[head]]
        )
        best = sorted(range(own), key=lambda b: -float(score[b].detach()))[:3]
        chosen = [*best, own]
        rows.append(score[chosen].softmax(0) @ read[chosen])
    return torch.stack(rows)


def nsa_oracle(q: Tensor, k: Tensor, v: Tensor, source: Any, head: int) -> Tensor:
    """Attention of one head and one sequence over the blocks that the compressed attention of NSA selects, by its equations."""
    scale, rows = q.size(1) ** -0.5, []
    pooled = torch.stack([k[0], *((k[t - 1] + k[t]) / 2 for t in range(1, len(k)))])
    for i in range(len(q)):
        own = i // 2
        p = (pooled[: i + 1] @ q[i] * scale).softmax(0).tolist()
        # l' = l = 2d: the pooled keys that begin half a block before a block, with it, and half a block after it
        importance = [p[2 * b] + 2 * p[2 * b + 1] + p[2 * b + 2] for b in range(own)]
        best = sorted(range(own), key=lambda b: -importance[b])[:3]
        kept = [j for j in range(i + 1) if j // 2 in (*best, own)]
        rows.append((k[kept] @ q[i] * scale).softmax(0) @ v[kept])
    return torch.stack(rows)


def sas_oracle(q: Tensor, k: Tensor, v: Tensor, source: Any, head: int) -> Tensor:
    """SAS of one head and one sequence in training: gates are a softmax over all earlier blocks, of which three are read."""
    size, scale, rows = rivals.SIZE, q.size(1) ** -0.5, []

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean() + 1e-6).rsqrt() * weight

    for i in range(len(q)):
        own = i // size
        gate = {own: q.new_ones(())}
        if own:
            parts = [k[b * size : (b + 1) * size].detach() for b in range(own)]
            pooled = [torch.cat([part.amax(0), part.amin(0), part.mean(0)]) for part in parts]
            query = norm(q[i].detach() @ source.query[head], source.query_norm.weight)
            keys = torch.stack([norm(x @ source.key[head], source.key_norm.weight) for x in pooled])
            shares = (keys @ query * scale).softmax(0)
            gate |= {b: shares[b] for b in shares.argsort(descending=True)[:3].tolist()}
        kept = [j for j in range(i + 1) if j // size in gate]
        weight = torch.stack([gate[j // size] * (k[j] @ q[i] * scale).exp() for j in kept])
        rows.append(weight @ v[kept] / weight.sum())
    return torch.stack(rows)


def test_sas_has_no_gates_in_evaluation() -> None:
    torch.manual_seed(0)
    conv: Any = methods.make_scheduled_attention("sas", 16, 2, 0.3)
    conv.source.target_density = 0.3
    x, ptr = torch.randn(60, 16), torch.tensor([0, 20, 60])
    gated, graph = conv(x, ptr=ptr, seed=0, return_graph=True)
    out, same = conv.eval()(x, ptr=ptr, return_graph=True)
    assert torch.equal(graph.col, same.col)
    assert torch.allclose(out, conv(x, graph), atol=1e-6)
    assert not torch.allclose(out, gated, atol=1e-2)


@pytest.mark.parametrize("is_training", [False, True])
def test_spartan_is_a_gate_after_the_softmax_over_all_pairs(is_training: bool) -> None:
    """Outputs, gradients through the gates, and the penalty are those of plain formulas, one pair after the other."""
    torch.manual_seed(0)
    conv: Any = methods.make_scheduled_attention("spartan", 12, 2, 0.3).double().train(is_training)
    conv.source.target_density = 0.3
    conv.shift.fill_(0.2)
    ptr = torch.tensor([0, 11, 18])
    x = torch.randn(18, 12, dtype=torch.float64, requires_grad=True)
    out, graph = conv(x, ptr=ptr, seed=5, return_graph=True)
    penalty = auxiliary_loss(conv)
    q, k, v = (lin(x).view(18, 2, 6).transpose(0, 1) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
    uniform = torch.rand(2 * (66 + 28), generator=torch.Generator().manual_seed(5)).double().clamp(1e-6, 1 - 1e-6)
    noise, number, shares = (uniform / (1 - uniform)).log(), 0, []
    heads = []
    for h in range(2):
        rows = []
        for i in range(18):
            first = 0 if i < 11 else 11
            scores = torch.stack([q[h, i] @ k[h, j] * 6**-0.5 for j in range(first, i + 1)])
            total = torch.zeros_like(v[h, 0])
            for j, weight in zip(range(first, i + 1), scores.softmax(0), strict=True):
                logit = scores[j - first] + 0.2
                noisy = logit + (noise[number] if is_training else 0)
                soft, number = noisy.sigmoid(), number + 1
                gate = 1.0 if i == j else (noisy > 0).double() + soft - soft.detach()
                total = total + weight * gate * v[h, j]
                assert bool(graph.contains(torch.tensor([[j], [i]]), torch.tensor([h]))) == (i == j or bool(noisy > 0))
                shares += [] if i == j else [logit]
            rows.append(total)
        heads.append(torch.stack(rows))
    expected = torch.cat(heads, 1)
    assert torch.allclose(out, expected, rtol=1e-9, atol=1e-9)
    push = torch.randn_like(out)
    wanted = [x, *conv.lin_query.parameters(), *conv.lin_key.parameters()]
    found, exact = (torch.autograd.grad((part * push).sum(), wanted, retain_graph=True) for part in (out, expected))
    for one, other in zip(found, exact, strict=True):
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-9)
    logits = torch.stack(shares)
    if is_training:
        surplus = float((logits > 0).double().mean()) / 0.3 - 1
        assert surplus > 0
        assert float(conv.log_factor) == pytest.approx(rivals.RATE * min(surplus, 1.0))
        assert torch.allclose(penalty, conv.log_factor.exp() * logits.sigmoid().mean())


def test_one_indexer_imitates_the_mean_attention_of_all_layers() -> None:
    run = train.Run("recall", "index-share", 0.2, 0, 2, 4, 1e-2, channels=16, start="sparse", evaluations=1)
    model, sparsifier = train.make_model(run)
    assert sparsifier is not None
    layers: list[Any] = [layer.attention for layer in model.layers]
    indexer = [*layers[0].source.scorer.parameters()]
    assert all(one is other for one, other in zip(indexer, layers[1].source.scorer.parameters(), strict=True))
    inputs: list[Tensor] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        layer.auxiliary_losses.passes = None  # the test takes the loss, not the backward pass of the output
    batch = train.batch_of(tasks.TASKS["recall"], 0, 0, 4)
    logits, choices = model(batch.tokens, batch.places, seed=0)  # losses live as long as it
    loss, graph = auxiliary_loss(model), choices[0].graph
    assert choices[1].graph is graph
    attention = []
    for layer, x in zip(layers, inputs, strict=True):
        q, k = (lin(x)[None].detach() for lin in (layer.lin_query, layer.lin_key))
        key, query = graph.edge_index
        attention.append(softmax((q[0, query] * k[0, key]).sum(1) * 0.25, graph.edge_row))
    log_p = choices[0].probability.log_on(graph)
    log_p = log_p - softmax_log_total(log_p, graph.edge_row, graph.num_queries)[graph.edge_row]
    mean = (attention[0] + attention[1]) / 2
    exact = torch.autograd.grad(-(mean * log_p).sum() / graph.num_queries, indexer, retain_graph=True)
    found = torch.autograd.grad(loss, indexer)
    assert logits.requires_grad
    for one, other in zip(found, exact, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)
        assert float(other.abs().max()) > 1e-5


def softmax_log_total(x: Tensor, row: Tensor, rows: int) -> Tensor:
    """Logarithm of the sum of exponentials of each row."""
    return torch.zeros(rows).index_add(0, row, x.exp()).log()


@pytest.mark.parametrize("name", rivals.RIVALS)
def test_rivals_are_what_their_papers_define(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients are those of plain formulas, over ragged sequences and two heads, and no later token matters."""
    torch.manual_seed(0)
    oracle = {"dash": dash_oracle, "hsa": hsa_oracle, "nsa": nsa_oracle, "sas": sas_oracle}[name]
    conv: Any = methods.make_scheduled_attention(name, 12, 2, 0.6).double().eval()
    conv.source.target_density = 0.6
    conv.train(name == "sas")  # which has no gates in evaluation
    source = conv.source.source
    if name == "dash":
        source.log_factor.fill_(2.5)
    else:
        monkeypatch.setattr(rivals, "room", lambda *_: 3.0)
        if name == "hsa":
            source.own_score.data.normal_()
    ptr = torch.tensor([0, 11, 18])
    x = torch.randn(18, 12, dtype=torch.float64, requires_grad=True)
    out, graph = conv(x, ptr=ptr, return_graph=True)
    q, k, v = (lin(x).view(18, 2, 6).transpose(0, 1) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
    expected = torch.cat([
        torch.cat([oracle(q[h, a:b], k[h, a:b], v[h, a:b], source, h) for h in range(2)], 1)
        for a, b in ((0, 11), (11, 18))
    ])  # fmt: skip
    assert torch.allclose(out, expected, rtol=1e-9, atol=1e-9)
    assert 0.3 < float(graph.density.mean()) < 0.95  # some blocks are left out
    wanted = [x, *source.parameters()]
    push = torch.randn_like(out)
    found, exact = (torch.autograd.grad((each * push).sum(), wanted, retain_graph=True) for each in (out, expected))
    for mine, theirs in zip(found, exact, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-7, atol=1e-9)
        assert float(theirs.abs().max()) > 1e-4
    changed = x.detach().clone()
    changed[9:11] += 1
    assert torch.equal(conv(changed, ptr=ptr)[:9], out[:9])


@pytest.mark.parametrize(("asked", "found"), [(0.2, 0.2), (0.01, 0.093)])
def test_dash_moves_to_its_density(asked: float, found: float) -> None:
    """Or to 1.25 earlier blocks a query, since one alone would give the loss nothing to compare."""
    torch.manual_seed(0)
    conv: Any = methods.make_scheduled_attention("dash", 16, 1, asked)
    conv.source.target_density = asked
    x, ptr = torch.randn(320, 16), torch.arange(6) * 64
    for _ in range(60):
        graph = conv(x, ptr=ptr, return_graph=True)[1]
    assert abs(beyond(graph) / found - 1) < 0.15
    factor = conv.source.source.log_factor.clone()
    conv.eval()(x, ptr=ptr)
    assert torch.equal(conv.source.source.log_factor, factor)


def test_random_edges_are_drawn_once_or_anew() -> None:
    graphs = {}
    for name in ("random", "random-fixed"):
        torch.manual_seed(0)
        source: Any = methods.make_scheduled_attention(name, 8, 1, 0.2)
        source.source.target_density = 0.2
        ptr = torch.arange(4) * 20
        x = torch.randn(1, 60, 8, generator=generator())
        graphs[name] = [
            source.source(Tokens(x, x, ptr, bipartite=False, is_causal=True, seed=seed)).graph for seed in (0, 1)
        ]
    assert not torch.equal(*(graph.to_dense(0) for graph in graphs["random"]))
    dense = [graph.to_dense(number) for graph in graphs["random-fixed"] for number in range(3)]
    assert all(torch.equal(dense[0], each) for each in dense)


PROSE = "The same name came again, and a door was closed.\nNobody saw who had opened it, or when.\n" * 300


def test_passages_ask_for_the_next_token(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(PROSE)
    texts = tasks.own_text(tmp_path / "mine.txt")
    task = tasks.find(str(tmp_path / "mine.txt"))
    assert len(texts.train) > 15 * len(texts.test) > 0
    for test, text in enumerate((texts.train, texts.test)):
        examples = task.make(40, test, task.num_tokens, 30, generator())
        assert torch.equal(examples.places, torch.arange(40).expand(30, -1))
        joined = torch.cat([examples.tokens, examples.answers[:, -1:]], 1)
        assert torch.equal(joined[:, 1:], examples.answers)
        assert all((text.unfold(0, 41, 1) == row).all(1).any() for row in joined)
    rows, there = torch.arange(30)[:, None].expand(-1, 40), examples.sources >= 0
    assert 0 < int(there.sum()) < there.numel()
    sources = examples.sources[there]
    assert torch.equal(joined[rows[there], sources], examples.answers[there])  # the same token after the same token
    assert torch.equal(joined[rows[there], sources - 1], examples.tokens[there])
    assert int((examples.places[there] + 1 - sources).min()) > 16
    with pytest.raises(ValueError, match=r"Expected a text of more than 9999 tokens to test on \(got \d+\)"):
        task.make(9999, 1, task.num_tokens, 1, generator())


def run_of(method: str, **changes: Any) -> train.Run:
    return dataclasses.replace(train.Run("recall", method, 0.2, 0, 6, 8, 1e-2, channels=16, evaluations=1), **changes)


@pytest.mark.parametrize("method", [*dict.fromkeys(filter(None, map(methods.twin_of, methods.METHODS)))])
def test_what_chooses_stays_as_it_began_in_a_twin(method: str, few: None, tmp_path: Path) -> None:
    run = run_of(method)
    before = train.make_model(run)[0].state_dict()
    train.train(run, tmp_path)
    after = torch.load(tmp_path / run.file, weights_only=True)["model"]
    learned = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert {name.rpartition(".")[2] for name in learned if ".source." in name} <= {
        "target_density",
        "seen",
        "last_seed",
        "log_factor",  # by which DashAttention takes its graphs to their density
    }
    assert any("lin_query" in name for name in learned)


def test_methods_of_one_seed_begin_with_the_same_weights() -> None:
    full = train.make_model(run_of("full"))[0].state_dict()
    for method in ("sbm", "indexer", "key-selection", "dcmm", "dash", "window"):
        mine = train.make_model(run_of(method))[0].state_dict()
        assert all(torch.equal(mine[name], value) for name, value in full.items())
        assert len(mine) > len(full)
        other = train.make_model(run_of(method, seed=1))[0].state_dict()
        assert not torch.equal(
            mine["layers.0.attention.lin_query.weight"], other["layers.0.attention.lin_query.weight"]
        )


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of two examples."""
    for name, task in tasks.TASKS.items():
        monkeypatch.setitem(tasks.TASKS, name, dataclasses.replace(task, test=dict.fromkeys([*task.test][:2], 2)))


SMALL = ["--steps", "2", "--channels", "16", "--batch-size", "2"]


@pytest.mark.slow
def test_the_arena_runs_resumes_and_reports(few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--output", str(tmp_path), "--densities", "0.2"]
    program.main([*words, "--choosers", "full", "dsa"])
    first = (tmp_path / "rows.csv").read_text()
    assert [row["method"] for row in tables.read(tmp_path / "rows.csv")] == 2 * ["full"] + 2 * ["dsa"] + 2 * [
        "dsa:frozen=1"
    ]
    program.main(words)
    assert (tmp_path / "rows.csv").read_text().startswith(first)
    found = {row["method"] for row in tables.read(tmp_path / "rows.csv")}
    assert found == {*methods.METHODS, *filter(None, map(methods.twin_of, methods.METHODS))}
    table = capsys.readouterr().out
    assert all(f"| {name} | " in table for name in found)
    assert "(one seed)" in table
    assert (tmp_path / "recall.png").stat().st_size > 5000
    assert all(row["train_ms"] > 0 for row in tables.read(tmp_path / "rows.csv"))


@pytest.mark.slow
def test_text_enters_by_its_file_and_is_measured_in_bits(
    few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks, "VOCABULARY", 300)
    Path("text").mkdir()
    Path("text/mine.txt").write_text(20 * PROSE)
    words = [*SMALL, "--choosers", "full", "sbm", "--tasks", "code", "text/mine.txt"]
    program.main(words)
    rows = tables.read(Path("runs/arena/rows.csv"))
    assert {row["task"] for row in rows} == {"code", "text/mine.txt"}
    printed = capsys.readouterr().out
    full = next(row for row in rows[::-1] if row["task"] == "code" and row["method"] == "full")
    assert f"| full |  | 100 | 1 | {full['bits']:.3f} |" in printed
    assert "bits per recalled token" in printed
    assert 4 < full["bits"] < 14
    score = {row["method"]: row["bits"] for row in rows if row["task"] == "code"}
    assert f"{score['sbm:frozen=1'] - score['sbm']:+.3f} (one seed)" in printed
    assert all((Path("runs/arena") / name).stat().st_size > 5000 for name in ("code.png", "mine.txt.png"))
    Path("text/mine.txt").write_text(PROSE)
    with pytest.raises(SystemExit):
        program.main(words)
    assert "Expected 'checksum of text/mine.txt' to be" in capsys.readouterr().err


def test_a_density_of_many_digits_is_found_again(few: None, tmp_path: Path) -> None:
    words = [*SMALL, "--output", str(tmp_path), "--choosers", "window", "--densities", str(1 / 48)]
    program.main(words)
    saved = (tmp_path / "rows.csv").read_text()
    program.main(words)
    assert (tmp_path / "rows.csv").read_text() == saved
    program.main([*words, "--report"])


@pytest.mark.slow
def test_each_task_and_experiment_is_drawn(few: None, tmp_path: Path) -> None:
    words = [*SMALL, "--output", str(tmp_path), "--choosers", "random", "sbm", "--seeds", "0", "1"]
    program.main([*words, "--tasks", "two-hop", "length"])
    program.main([*words, "--experiment", "served"])
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("two-hop", "length", "served"))
    length = [row for row in tables.read(tmp_path / "rows.csv") if row["task"] == "length"]
    edges = [row["density_0"] * (row["length"] - 1) for row in length if row["method"] == "random"]
    assert max(edges) < 1.6 * min(edges)  # a query has as many at each length
    kept = [row["density_0"] for row in length if row["method"] == "sbm"]
    assert max(kept) < 1.6 * min(kept)  # of a block model, pairs keep their probabilities


def test_a_run_that_was_killed_ends_with_the_same_rows(
    few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, drawn = run_of("sbm", steps=8, evaluations=4), train.batch_of
    (tmp_path / "whole").mkdir()
    whole = train.train(run, tmp_path / "whole")

    def killed(task: Any, seed: int, step: int, size: int) -> Examples:
        if step == 5:
            raise KeyboardInterrupt
        return drawn(task, seed, step, size)

    monkeypatch.setattr(train, "batch_of", killed)
    with pytest.raises(KeyboardInterrupt):
        train.train(run, tmp_path)
    monkeypatch.setattr(train, "batch_of", drawn)
    resumed = train.train(run, tmp_path)
    for one, other in zip(whole, resumed, strict=True):
        assert all(
            value == other[name] for name, value in one.items() if name not in ("seconds", "train_ms", "infer_ms")
        )


# ------------------------------------------------------------------------------------------------ a source of one's own


def test_a_source_of_eight_lines_enters_with_one_command(
    few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN)
    program.main([*SMALL, "--chooser", "mine.py:Nearest"])
    assert {row["method"] for row in tables.read(Path("runs/arena/rows.csv"))} == {"full", "random", "mine.py:Nearest"}
    assert "| mine.py:Nearest | dense | 5 | 1 |" in capsys.readouterr().out
    Path("mine.py").write_text(OWN + "\n# another one\n")
    with pytest.raises(SystemExit):
        program.main([*SMALL, "--chooser", "mine.py:Nearest"])
    assert "Expected 'code-of mine.py' to be" in capsys.readouterr().err


@pytest.mark.parametrize("start", ["dense", "sparse"])
def test_a_source_of_ones_own_learns_and_has_a_twin(start: str, few: None, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(LEARNED)
    method = f"{file}:Linear"
    assert methods.twin_of(method) == f"{method}:frozen=1"
    for name, learns in ((method, True), (f"{method}:frozen=1", False)):
        run = run_of(name, start=start)
        before = train.make_model(run)[0].state_dict()
        train.train(run, tmp_path)
        after = torch.load(tmp_path / run.file, weights_only=True)["model"]
        moved = [key for key in after if "source.source.query" in key and not torch.equal(after[key], before[key])]
        assert bool(moved) == learns


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--chooser", "mine.py:Nearest"],
            "Expected '--chooser' to name a file that exists (got 'mine.py'). Name it as in",
        ),
        (
            ["--chooser", "other.py:Nothing"],
            "Expected 'Nothing' to be a GraphSource in other.py (got None; there are ['Hungry'])",
        ),
        (
            ["--chooser", "other.py:Hungry"],
            "Expected Hungry to take no arguments but channels, heads, density (got food). Give",
        ),
    ],
)
def test_mistakes_are_named(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.py").write_text(OWN.replace("Nearest", "Hungry").replace("density):", "density, food):"))
    with pytest.raises(SystemExit):
        program.main(words)
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ reports


def row(task: str, method: str, density: float, seed: int, accuracy: float) -> dict[str, Any]:
    """The last row of a run that begins dense."""
    known = {"task": task, "method": method, "start": "dense", "density": density, "seed": float(seed)}
    return known | {"step": 2.0, "length": 64.0, "accuracy": accuracy}


def test_gains_are_paired_over_seeds() -> None:
    rows = [row("recall", "sbm", 0.1, seed, 0.5 + 0.1 * seed) for seed in range(3)]
    rows += [row("recall", "sbm:frozen=1", 0.1, seed, 0.4) for seed in (2, 0, 1)]
    ends = report.ends_of(rows)
    mean, half, count = report.gain(ends, ("sbm", "dense", 0.1)) or (0, 0, 0)
    assert (round(mean, 6), round(half, 3), count) == (20.0, 24.841, 3)  # 4.3027 * 10 / sqrt(3)
    assert report.gain(ends, ("sbm:frozen=1", "dense", 0.1)) is None


def test_an_overview_has_a_column_for_each_task_and_accuracies_at_each_density() -> None:
    rows = [row(task, "full", 1.0, 0, 1.0) for task in ("recall", "two-hop")]
    rows += [row("recall", "sbm", density, seed, 0.5 + density) for density in (0.1, 0.05) for seed in (0, 1)]
    rows += [row("recall", "sbm:frozen=1", 0.1, seed, 0.1 + 0.1 * seed) for seed in (0, 1)]
    rows += [row("two-hop", "window", 0.05, 0, 0.25)]
    lines = report.overview(rows).splitlines()
    assert lines[0] == "## recall, two-hop: accuracy in percent, 5 / 10 % of the pairs asked, dense at first"
    assert lines[4:7] == ["| full | 100.0 | 100.0 |", "| sbm | 55.0 / 60.0 |  |", "| window |  | 25.0 /  |"]
    assert lines[-1] == "| sbm | +45.0 ± 63.5 |  |"  # 12.7062 * 7.0711 / sqrt(2), at 10 %
    assert report.overview([row for row in rows if row["task"] == "recall"]) == ""


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ([], ["full", "sbm", "sbm:frozen=1", "window", "full at length"]), (["--tasks", "length"], ["full at length"]),
        (["--tasks", "recall", "--choosers", "sbm"], ["sbm", "sbm:frozen=1"]),
        (["--choosers", "sbm", "window", "--no-twins", "--seeds", "0"], ["sbm"]),
        (["--densities", "0.05", "--starts", "dense"], ["full", "sbm", "sbm:frozen=1", "full at length"]),
        (["--seeds", "3"], []), (["--experiment", "served"], []),
    ],
)  # fmt: skip
def test_a_report_is_of_what_is_asked_for(
    words: list[str], kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    runs = [("recall", "full", 1.0, 0), ("recall", "sbm", 0.05, 0), ("recall", "sbm:frozen=1", 0.05, 0)]
    runs += [("recall", "window", 0.1, 1), ("length", "full", 1.0, 0)]
    known = [dict(zip(("task", "method", "density", "seed"), run, strict=True)) for run in runs]
    tables.write_csv(tmp_path / "rows.csv", [row | {"start": "dense"} for row in known])
    found: list[str] = []

    def shown(rows: tables.Rows) -> str:
        found.extend(row["method"] + " at length" * (row["task"] == "length") for row in rows)
        return ""

    monkeypatch.setattr(report, "tables", shown)
    monkeypatch.setattr(report, "draw", lambda rows, folder: [])
    if kept:
        program.main(["--report", *words, "--output", str(tmp_path)])
    else:
        with pytest.raises(SystemExit):
            program.main(["--report", *words, "--output", str(tmp_path)])
        message = "Expected 'output' to hold finished runs of what --report is asked for (got none with "
        assert message in capsys.readouterr().err
    assert found == kept


def test_a_sparsifier_sets_the_density_of_any_source() -> None:
    model, sparsifier = train.make_model(run_of("window"))
    assert isinstance(sparsifier, Sparsifier)
    assert [source.target_density for source in sparsifier.sources] == [1.0, 1.0]
    model.eval()
    assert [source.target_density for source in sparsifier.sources] == [0.2, 0.2]
