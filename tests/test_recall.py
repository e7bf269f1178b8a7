"""The tasks of recall, what their methods see, and the programs that train on them."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from problems import same
from tokenizers import Tokenizer
from torch.testing import assert_close

from examples import language_model, recall
from examples.arena import tasks as arena
from examples.arena import train
from examples.common import fit, hybrid, tasks
from examples.common.corpus import encode, read_files, stdlib_files
from examples.common.tasks import NEAR, recalled
from sbm_pyg import AttentionGraph, Choice, Sparsifier, Tokens
from sbm_pyg.layers.dense import FullAttention
from sbm_pyg.sources import patterns

pytestmark = pytest.mark.usefixtures("one_thread")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check_answers(examples: tasks.Examples) -> None:
    """Before each source stands the key that is asked for, and it is told before it is asked."""
    rows = torch.arange(len(examples.tokens))[:, None]
    assert torch.equal(examples.tokens[rows, examples.sources], examples.answers)
    assert torch.equal(examples.tokens[rows, examples.sources - 1], examples.tokens[rows, examples.places])
    assert bool((examples.sources < examples.places).all())


@pytest.mark.parametrize("fillers", [0, 10])
def test_mqar(fillers: int) -> None:
    examples = tasks.mqar(40, 6, 50, 300, generator(), fillers)
    check_answers(examples)
    keys, values = examples.tokens[:, :12:2], examples.tokens[:, 1:12:2]
    known = 50 - fillers
    assert int(keys.min()) == 1
    assert int(keys.max()) == int(values.min()) - 1 == known // 2 - 1
    assert int(values.max()) == known - 1
    assert bool((keys.sort(1).values.diff(dim=1) > 0).all())
    assert bool((values.sort(1).values.diff(dim=1) > 0).all())
    assert bool((examples.places.sort(1).values.diff(dim=1) > 0).all())
    assert bool((examples.places >= 12).all())
    rest = (
        torch.ones(300, 40, dtype=torch.bool)
        .index_fill_(1, torch.arange(12), False)
        .scatter_(1, examples.places, False)
    )
    assert set(examples.tokens[rest].tolist()) == set(range(known if fillers else 0, 50))


def test_pairs_of_mqar_are_drawn_alike_and_without_replacement() -> None:
    """As "Zoology" draws them: each order of different values is equally likely, whatever the keys are."""
    examples = tasks.mqar(40, 2, 9, 60_000, generator())  # keys 1 to 3, values 4 to 8
    keys, values = examples.tokens[:, :4:2] - 1, examples.tokens[:, 1:4:2] - 4
    found = torch.zeros(3, 3, 5, 5).index_put_((*keys.T, *values.T), torch.ones(()), accumulate=True)
    possible = (~torch.eye(3, dtype=torch.bool))[:, :, None, None] & ~torch.eye(5, dtype=torch.bool)
    assert not bool(found[~possible].any())
    expected = 60_000 / int(possible.sum())  # of 120 cells
    assert float((found[possible] - expected).square().sum() / expected) < 217  # chi-square of 119 degrees: 1e-7


def test_questions_of_mqar_come_soon_by_a_power_law() -> None:
    places = tasks.mqar(64, 1, 100, 20_000, generator()).places[:, 0]
    law = torch.arange(1, 32, dtype=torch.float64) ** (tasks.POWER - 1)
    found = torch.bincount((places - 2) // 2, minlength=31) / 20_000
    assert float((found - law / law.sum()).abs().max()) < 0.012


def test_joint_recall() -> None:
    examples = tasks.joint_recall(5, 7, 50, 200, generator())
    assert examples.tokens.shape == (200, 2 * 5 * (1 + 2 * 7) + 2)
    check_answers(examples)
    half, rows = 5 * 15, torch.arange(200)[:, None]
    assert torch.equal(examples.tokens[rows, examples.places + 1], examples.answers)
    context = torch.arange(half) // 15 * 15
    asked = examples.tokens[:, half + 2 :].gather(1, context[examples.places - half - 2])
    told = examples.tokens[:, 1 : half + 1].gather(1, context[examples.sources - 1])
    assert torch.equal(asked, told)
    assert all(len(set(row)) == 5 for row in told.tolist())
    assert all(
        len(set(zip(*pair, strict=True))) == 35 for pair in zip(asked.tolist(), examples.places.tolist(), strict=True)
    )
    assert set(examples.answers.unique().tolist()) == set(range(2, 18))
    # the order is another one each time
    assert len({tuple(row) for row in (examples.places - half - examples.sources).tolist()}) == 200


@pytest.mark.parametrize("rule", ["window", "random", "bigbird"])
@pytest.mark.parametrize("density", [0.03, 0.1, 0.3])
def test_fixed_densities_are_met(rule: str, density: float) -> None:
    ptr = torch.arange(5) * 128
    query, key = torch.randn(2, 2, 512, 4, generator=generator())
    source = hybrid.FixedDensity(rule, density, 4, 2)
    graph = source(Tokens(query, key, ptr, bipartite=False, is_causal=True, seed=1)).graph.validate()
    assert graph.is_causal
    assert graph.heads == 2 or rule == "window"
    half_a_token = 0.5 / 63.5
    lost = 0.1 * density if rule == "bigbird" else 0.0  # edges that two of its parts have in common
    assert hybrid.beyond(graph) == pytest.approx(density, abs=2 * half_a_token + lost)
    loops = torch.arange(512).expand(2, -1)
    assert bool(graph.contains(loops).all())


@pytest.mark.parametrize("rule", ["blocks", "lsh", "routing"])
@pytest.mark.parametrize("density", [0.06, 0.25])
def test_densities_that_follow_the_tokens_are_near(rule: str, density: float) -> None:
    torch.manual_seed(0)
    ptr = torch.arange(5) * 128
    query, key = torch.randn(2, 2, 512, 16, generator=generator())
    graph = hybrid.FixedDensity(rule, density, 16, 2)(
        Tokens(query, key, ptr, bipartite=False, is_causal=True, seed=1)
    ).graph.validate()
    assert graph.is_causal
    assert 0.5 * density < hybrid.beyond(graph) < 1.5 * density


def test_methods_of_block_models_that_add_to_scores() -> None:
    """The published layer looks at all pairs; over sampled edges, and with degrees, as their options say."""

    def made(method: str) -> Any:
        return train.make_model(train.Run("recall", method, 0.05, 0, 10, 4, 1e-3))

    dense, schedule = made("dcmm:num_clusters=7,degree=softplus,squash=0,tied=0,entropy_weight=0.2")
    bias = dense.layers[0].attention.score_bias
    assert schedule is None
    named = (bias.num_clusters, bias.degree, bias.squash, bias.tied, bias.entropy_weight)
    assert named == (7, "softplus", False, False, 0.2)
    _, choices = dense(torch.randint(8, (2, 10)))
    assert choices[1].graph.num_edges == 2 * 55
    sampled, schedule = made("sbm:bias=5,degree_corrected=1")
    assert schedule is not None
    assert sampled.layers[1].attention.score_bias.num_clusters == 5
    assert sampled.layers[1].attention.source.head.degree_corrected
    plain = made("sbm")[0].layers[0].attention
    assert plain.score_bias is None
    assert plain.source.head.groups == 1
    assert made("sbm:groups=3")[0].layers[1].attention.source.head.clusters.shape == (1, 12, 64)
    assert not plain.source.head.degree_corrected


class Chosen(torch.nn.Module):
    """Attends over the same edges always, and gives the tokens back."""

    def __init__(self, graph: AttentionGraph) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Choice]:
        return x, Choice(self.graph)


def test_evaluation_counts_the_edges_to_answers() -> None:
    examples = tasks.mqar(16, 2, 30, 4, generator())
    start = 16 * torch.arange(4)[:, None]
    pairs = torch.stack([(examples.sources + start).flatten(), (examples.places + start).flatten()])
    ptr = torch.arange(5) * 16
    some = AttentionGraph.from_edge_index(
        pairs[:, [0, 3, 4, 5, 6]], query_ptr=ptr, key_ptr=ptr, num_queries=64
    ).causal()
    loops = patterns.window(None, 0, is_causal=True, ptr=ptr)
    layers = iter([Chosen(some | loops), Chosen(loops)])
    recaller = hybrid.Recaller(30, 8, 2, lambda: next(layers)).eval()
    row = hybrid.evaluate(recaller, examples)
    assert row["answer_0"] == row["answer_any"] == 5 / 8
    assert row["answer_1"] == row["density_1"] == 0
    assert row["density_0"] == pytest.approx(5 / (4 * 16 * 15 / 2))
    full = hybrid.evaluate(hybrid.Recaller(30, 8, 2, lambda: FullAttention(8, 8, 1, is_causal=True)).eval(), examples)
    assert full["answer_0"] == full["density_1"] == 1
    few = examples._replace(sources=torch.where(torch.arange(2) > 0, examples.sources, -1))
    partly = hybrid.evaluate(recaller, few, 3)  # in parts of three sequences and of one
    logits = recaller(few.tokens, few.places)[0].detach()
    bits = torch.nn.functional.cross_entropy(logits.mT, few.answers, reduction="none") / math.log(2)
    assert partly["answer_any"] == 1 / 2  # of the questions 1, 3, 5 and 7, 3 and 5 have their edge
    assert partly["accuracy"] == float((logits.argmax(2) == few.answers).double().mean())
    assert partly["bits"] == pytest.approx(float(bits.mean()))
    assert partly["bits_recalled"] == pytest.approx(float(bits[:, 1].mean()))
    none = hybrid.evaluate(recaller, examples._replace(sources=torch.full_like(examples.sources, -1)))
    assert math.isnan(none["answer_any"])
    assert math.isnan(none["bits_recalled"])


def test_a_wide_convolution_starts_as_decaying_means() -> None:
    wide = hybrid.Layer(8, torch.nn.Identity(), width=24).conv.weight.detach()[:, 0]
    assert float(wide[:, -1].min()) == 1
    ratio = wide[:, 1:] / wide[:, :-1]  # from one token to the next
    assert_close(ratio, ratio[:, :1].expand(-1, 23))
    assert_close((1 / ratio.log())[[0, -1], 0], torch.tensor([1.0, 16.0]))


@pytest.mark.parametrize(("task", "width"), [("recall", 3), ("joint", 24), ("joint-paper", 48)])
def test_the_convolution_is_as_wide_as_a_task_needs(task: str, width: int) -> None:
    made, _ = train.make_model(train.Run(task, "full", 1.0, 0, 6, 4, 1e-3, channels=8))
    assert [len(layer.get_parameter("conv.weight")[0, 0]) for layer in made.layers] == 2 * [width]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that is made in no time."""
    task = tasks.Task(tasks.mqar, 40, {(16, 2): 1, (24, 3): 1}, {(16, 2): 3, (24, 3): 3}, 4, 6, 1e-3)
    monkeypatch.setitem(arena.TASKS, "recall", task)


class Killed(Exception):
    pass


def test_checkpoints_between_evaluations_change_no_bit(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_clocks(rows: list[Any]) -> list[Any]:
        return [{**row, "seconds": 0, "train_ms": 0, "infer_ms": 0} for row in rows]

    run = train.Run("recall", "sbm", 0.2, 1, 6, 4, 1e-3, channels=8, evaluations=1)
    rows = train.train(run, tmp_path)
    whole = torch.load(tmp_path / run.file)
    (tmp_path / run.file).unlink()
    taken = train.batch_of

    def until_the_fourth(task: tasks.Task, seed: int, step: int, batch_size: int) -> tasks.Examples:
        if step == 3 and batch_size > 1:
            raise Killed
        return taken(task, seed, step, batch_size)

    with monkeypatch.context() as patched:
        patched.setattr(fit, "PAUSE", -1.0)  # after every step
        patched.setattr(train, "batch_of", until_the_fourth)
        with pytest.raises(Killed):
            train.train(run, tmp_path)
    state = torch.load(tmp_path / run.file)
    assert (state["step"], state["rows"]) == (3, [])
    assert without_clocks(train.train(run, tmp_path)) == without_clocks(rows)
    assert same(whole["model"], torch.load(tmp_path / run.file)["model"])
    with pytest.raises(ValueError, match=r"to be of the settings of this run \(got other channels\)"):
        train.train(dataclasses.replace(run, channels=16), tmp_path)


@pytest.mark.parametrize("method", ["full", "window"])
def test_a_run_that_diverges_is_no_result(
    method: str, small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--steps", "4", "--channels", "8", "--learning-rate", "1e30", "--densities", "0.2"]
    with pytest.raises(SystemExit):
        recall.main(["--choosers", method, *words, "--output", str(tmp_path)])
    said = capsys.readouterr().err
    assert re.search(r"Expected the (loss|weights|activations) to stay finite \(got NaN or inf at step ", said)
    assert not (tmp_path / "rows.csv").exists()


def test_recall_is_the_arena_without_twins(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recall.main(["--steps", "3", "--channels", "8", "--densities", "0.2", "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ")] == ["| method", "| full", "| sbm"]
    assert (tmp_path / "recall.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("sparse", "Expected 'methods' among full, dcmm, window"),
        ("sbm:blocks=3", "Expected options of 'sbm' in 'methods'"),
        ("full:probes=3", "Expected options of 'full' in 'methods'"),
        ("sbm:probes=few", "Expected option 'probes' of 'methods' to be a number (got 'few')"),
        ("sbm:control=price", "Expected option 'control' of 'methods' among sparsifier, fixed, none"),
    ],
)
def test_mistakes_of_methods_are_named(method: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        hybrid.options_of(method)


# ------------------------------------------------------------------------------------------------ language


def test_recalled_tokens_complete_a_pair_that_is_far() -> None:
    tokens = torch.randint(4, (3, 60), generator=generator())
    found = recalled(tokens)
    for row, sequence in enumerate(tokens.tolist()):
        for end in range(60):
            earlier = (
                [at for at in range(1, end) if sequence[at - 1 : at + 1] == sequence[end - 1 : end + 1]] if end else []
            )
            far = bool(earlier) and end - max(earlier) > NEAR
            assert int(found[row, end]) == (max(earlier) if far else -1)


@pytest.mark.parametrize("vocabulary", [256, 300])
def test_bytes_of_all_tokens_are_those_of_the_text(vocabulary: int, tmp_path: Path) -> None:
    text = "Ein Wörterbuch, ein Wörterbuch: ein \u2713 für \n jedes Wort.\n" * 20
    (tmp_path / "text").write_text(text)
    read = read_files([tmp_path / "text"])
    source, test, width, _ = encode(read, read, vocabulary)
    assert torch.equal(source, test)
    assert len(width) == 256 if vocabulary == 256 else 256 < len(width) <= 300
    assert float(width[source].sum()) == len(text.encode())
    assert vocabulary == 256 or len(source) < 0.6 * len(text)


@pytest.mark.parametrize(
    ("method", "first"),
    [("sbm:control=sparsifier", 1.0), ("sbm:control=fixed", 0.25), ("top-k:control=sparsifier", 1.0), ("top-k", 0.25)],
)
def test_the_density_of_a_language_model_begins_as_its_control_says(method: str, first: float) -> None:
    run = language_model.Run(
        method, 0.25, 0, vocabulary=300, length=33, steps=40, batch_size=4, channels=8, layers=2, heads=2,
        window=3 if "top-k" in method else 0, learning_rate=1e-3,
    )  # fmt: skip
    model, sparsifier = language_model.make_model(run, 300)
    sources = [cast(Any, layer).attention.source for layer in model.layers]
    assert [source.target_density for source in sources] == [first] * 2
    for _ in range(40 if sparsifier else 0):
        cast(Sparsifier, sparsifier).step(9.0)
    assert [source.target_density for source in sources] == [0.25] * 2


def language_options(folder: Path, vocabulary: int, length: int) -> list[str]:
    """Options of a language model of one small text, which is written to a folder."""
    (folder / "text").write_text("a few words, and a few words more: " * 60)
    text = str(folder / "text")
    return ["--train", text, "--test", text, "--vocabulary", str(vocabulary), "--length", str(length)]


def test_a_language_model_is_saved_with_its_tokenizer(tmp_path: Path) -> None:
    words = language_options(tmp_path, vocabulary=300, length=32)
    words += [
        "--steps", "4", "--batch-size", "2", "--channels", "16", "--methods", "top-k:control=sparsifier,k=3", "sbm",
    ]  # fmt: skip
    words += ["--densities", "0.1", "--output", str(tmp_path / "run"), "--save", str(tmp_path / "model")]
    language_model.main(words)
    model = language_model.LanguageModel.from_pretrained(tmp_path / "model").float()
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    ids = tokenizer.encode("a few words, and a few words").ids
    assert [layer.attention.source.target_density for layer in cast(Any, model.model.layers)] == [0.1, 0.1]
    _, choices = model.model(torch.tensor([ids]))
    assert int(choices[0].graph.degree.max()) == 4  # and itself
    assert model.complete(ids, 3)[0] == int(model(torch.tensor([ids]))[0, -1].argmax())
    assert model.complete(ids, 0) == []
    with pytest.raises(ValueError, match=r"Expected 'tokens' to have one at least \(got 0\)"):
        model.complete([], 3)
    card = (tmp_path / "model" / "README.md").read_text()
    text = (tmp_path / "text").read_text()
    tested = torch.tensor(tokenizer.encode(text).ids)
    checkpoint = next((tmp_path / "run").glob("top-k*.pt"))
    model.model.load_state_dict(torch.load(checkpoint)["model"])  # 32 bits, where ranks can differ from those of 16
    _, choices = model.model(tested[: (len(tested) - 1) // 32 * 32].view(-1, 32))
    for layer, choice in enumerate(choices):
        (share,) = re.findall(rf"^\* density of layer {layer}: (.*)$", card, re.MULTILINE)
        assert float(share) == pytest.approx(float(choice.graph.density.mean()), rel=1e-5)
    assert (
        "Trained on texts: `python examples/language_model.py --train text --test text --methods top-k:control=sparsifier,k=3 "
        "--densities 0.1 --steps 4 --seeds 0 --vocabulary 300 --length 32 --batch-size 2 --channels 16`.\n"
    ) in card
    language_model.main(words)  # which replaces the model and its tokenizer
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "notes"):
        (other / name).write_text("mine")
    with pytest.raises(SystemExit):
        language_model.main([*words[:-1], str(other)])
    assert sorted(path.read_text() for path in other.iterdir()) == ["mine", "mine"]
    (tmp_path / "run" / "top-k+control_sparsifier,k_3-0.1-0.pt").unlink()
    with pytest.raises(SystemExit):
        language_model.main(words)


def test_a_language_model_is_trained_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = language_options(tmp_path, vocabulary=256, length=48)
    words += ["--steps", "8", "--batch-size", "2", "--channels", "16", "--heads", "2", "--window", "1"]
    words += ["--methods", "full", "sbm", "random", "--densities", "0.2", "--output", str(tmp_path)]
    language_model.main(words)
    table = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| full", "| sbm 20 %", "| random 20 %"]
    assert all(2 < float(line.split(" | ")[2]) < math.log2(256) + 1 for line in table[2:])
    assert table[2].split(" | ")[4].startswith("+0.0000")
    saved = (tmp_path / "rows.csv").read_text()
    language_model.main(words)
    assert (tmp_path / "rows.csv").read_text() == saved
    for density, message in (("0.02", "beyond those of the window of 1"), ("1", "to be below 1 (got [1.0])")):
        with pytest.raises(SystemExit):
            language_model.main([*words[:-4], "--densities", density, "--output", str(tmp_path / "other")])
        assert f"Expected 'densities' {message}" in capsys.readouterr().err


def test_the_corpus_of_code_is_ascii_and_its_test_is_of_other_files() -> None:
    train, test = stdlib_files(train_bytes=100_000, test_bytes=20_000)
    for paths, size in ((train, 100_000), (test, 20_000)):
        sizes = [len(path.read_bytes()) for path in paths]
        assert size <= sum(sizes) < size + max(sizes)
        assert all(path.read_bytes().isascii() for path in paths)
        assert not {"test", "tests"} & {part for path in paths for part in path.parts}
    assert not {*train} & {*test}
    assert stdlib_files(train_bytes=100_000, test_bytes=20_000) == (train, test)
    given = language_model.parse(["--corpus", "stdlib", "--channels", "16"])
    assert (given.length, given.channels, given.window, given.densities) == (512, 16, 6, [0.075])


def test_texts_are_files_or_a_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--corpus", "stdlib", "--train", "README.md"], []):
        with pytest.raises(SystemExit):
            language_model.parse(words)
    shown = capsys.readouterr().err
    assert "Expected no files with 'corpus' (got both)" in shown
    assert "Expected 'train' and 'test' to be files of text (got no train, no test)" in shown


def test_random_edges_next_to_a_window_have_the_density_of_both() -> None:
    ptr = torch.tensor([0, 200, 400])
    x = torch.randn(2, 400, 4, generator=generator())
    source = hybrid.FixedDensity("random", 0.1, 4, 2, window=5)
    graph = source(Tokens(x, x, ptr, ptr, is_causal=True, seed=1)).graph
    assert hybrid.beyond(graph) == pytest.approx(0.1, rel=0.05)
    near = patterns.window(None, 5, is_causal=True, ptr=ptr)
    assert bool(graph.contains(near.edge_index.repeat(1, 2), torch.arange(2).repeat_interleave(near.num_edges)).all())
    with pytest.raises(ValueError, match="Expected 'densities' beyond those of the window of 30"):
        hybrid.beyond_window(0.1, 30, 200)
