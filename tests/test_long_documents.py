"""Tests of ``examples.long_documents``, and of the benchmark of long documents: texts, documents, training and tables."""

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.benchmarks import documents as benchmark
from examples.common.tables import read
from examples.long_documents import __main__ as program
from examples.long_documents import data, train

pytestmark = pytest.mark.usefixtures("one_thread")
GOOD, BAD = "a fine warm film that i love", "a dull cold film that i hate"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Reviews and texts without opinions, as options of the program."""
    for part in ("train", "test"):
        for label, text in (("pos", GOOD), ("neg", BAD)):
            folder = tmp_path / "aclImdb" / part / label
            folder.mkdir(parents=True)
            for number in range(10):
                (folder / f"{number}_{9 if label == 'pos' else 2}.txt").write_text(f"{text}<br />{number}")
    lines = [" ".join(f"fact {line} of {word}" for word in range(60)) for line in range(100)]
    (tmp_path / "facts.txt").write_text("\n".join(["= a title =", *lines]))
    return ["--reviews", str(tmp_path), "--fillers", str(tmp_path / "facts.txt")]


def test_documents_have_one_review_among_fillers(files: list[str]) -> None:
    texts, num_tokens = data.prepare(program.parse([*files, "--vocabulary", "400"]))
    assert (len(texts["train"].fillers), len(texts["test"].fillers)) == (90, 10)
    assert 300 < num_tokens <= 400
    reviews = {tuple(tokens.tolist()): label for tokens, label in texts["train"].reviews}
    batch = data.Documents(texts["train"]).draw(4, 15, 6, "0")
    again = data.Documents(texts["train"]).draw(4, 15, 6, "0")
    assert torch.equal(batch.tokens, again.tokens)
    assert not torch.equal(batch.tokens, data.Documents(texts["train"]).draw(4, 15, 6, "1").tokens)
    places = set()
    for number, label in enumerate(batch.labels.tolist()):
        document = batch.tokens[batch.ptr[number] : batch.ptr[number + 1]]
        assert document[0] == 0
        ends = (document == 1).nonzero()[:, 0].tolist()
        parts = [tuple(document[start + 1 : end].tolist()) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        assert [len(part) <= 15 for part in parts] == [True] * 4
        (place,) = [index for index, part in enumerate(parts) if any(part == known[-15:] for known in reviews)]
        assert next(reviews[known] for known in reviews if known[-15:] == parts[place]) == label
        places.add(place)
    assert len(places) > 1


def test_a_review_has_the_same_document_in_any_batch(files: list[str]) -> None:
    texts, _ = data.prepare(program.parse([*files, "--vocabulary", "400"]))
    documents = data.Documents(texts["test"])
    both, one = documents.of_reviews(4, 15, [3, 12]), documents.of_reviews(4, 15, [12])
    assert torch.equal(both.tokens[both.ptr[1] :], one.tokens)
    assert both.labels.tolist() == [0, 1]


def test_sentences_of_one_label_make_reviews(files: list[str], tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("sentence\tlabel\nso good\t1\nso bad\t0\n")
    texts, _ = data.prepare(program.parse([*files, "--sentences", str(path)]))
    assert {label: len(found) for label, found in texts["train"].sentences.items()} == {0: 1, 1: 1}
    assert not texts["test"].sentences
    batch = data.Documents(texts["train"]).draw(1, 12, 40, "0")
    made = [texts["train"].sentences[label][0].repeat(12)[:12] for label in (0, 1)]
    found = [
        (label, torch.equal(batch.tokens[start + 1 : end - 1], made[label]))
        for label, start, end in zip(batch.labels.tolist(), batch.ptr[:-1], batch.ptr[1:], strict=True)
    ]
    assert {label for label, is_made in found if is_made} == {0, 1}


def test_damaged_texts_are_named(files: list[str], tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a" * 500)
    given = program.parse([*files[:2], "--fillers", str(short)])
    with pytest.raises(ValueError, match=r"at least 400 letters \(got 1\)"):
        data.prepare(given)
    sentences = tmp_path / "train.tsv"
    for text, words in (
        ("label\tsentence\n", "the header 'sentence'"),
        ("sentence\tlabel\nfine\t2\n", "a tab and 0 or 1"),
    ):
        sentences.write_text(text)
        with pytest.raises(ValueError, match=words):
            [*data.read_sentences(sentences)]
    cut = tmp_path / "facts.gz"
    cut.write_bytes(gzip.compress(b"facts " * 1000)[:-10])
    with pytest.raises(ValueError, match=r"facts\.gz' to be a whole gzip file"):
        [*data.read_lines(cut)]
    (tmp_path / "aclImdb" / "test" / "pos" / "3_9.txt").write_text(" ")
    with pytest.raises(ValueError, match="hold a review"):
        [*data.read_reviews(tmp_path, "test")]
    sentences.write_text("sentence\tlabel\nfine\t1\n")
    (tmp_path / "aclImdb" / "test" / "pos" / "3_9.txt").write_text(GOOD)
    with pytest.raises(ValueError, match=r"'sentences' of both labels \(got \{1\}\)"):
        data.prepare(program.parse([*files, "--sentences", str(sentences)]))
    for path in (tmp_path / "aclImdb" / "train" / "neg").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"of both labels in train \(got none in neg\)"):
        data.prepare(program.parse(files))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "'reviews' and 'fillers'"),
        (["--parts", "3"], "a power of two"),
        (["--density", "1"], "below 1"),
        (["--part-length", "14"], "at least 15"),  # of which the shortest parts have as many
        (["--methods", "dense"], "'methods' among"),
    ],
)
def test_wrong_options_are_named(
    options: list[str], words: str, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*files, *options, "--output", str(tmp_path / "runs")] if options else []
    with pytest.raises(SystemExit):
        program.main(given)
    assert words in capsys.readouterr().err


def test_the_program_trains_every_method_and_resumes(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*files, "--methods", *train.METHODS, "--parts", "4", "--part-length", "31", "--tests", "6"]
    words += ["--steps", "4", "--channels", "8", "--density", "0.2", "--vocabulary", "400", "--batch-tokens", "200"]
    words += ["--output", str(tmp_path / "runs")]
    program.main(words)
    shown = capsys.readouterr().out
    rows = read(tmp_path / "runs" / "rows.csv")
    names = ["full", "global"] + [f"{name} 20 %" for name in ("sbm", "random", "indexer", "window")]
    assert sorted(row["run"] for row in rows) == sorted(names)
    assert all(f"| {name} | 1 |" in shown for name in names)
    assert all(0 <= row["accuracy_4"] <= 1 for row in rows)
    assert {row["density_4"] for row in rows if row["run"] == "full"} == {1}
    assert all(row["density_4"] < 0.6 for row in rows if row["run"] != "full")
    saved = (tmp_path / "runs" / "rows.csv").read_text()
    program.main(words)
    assert (tmp_path / "runs" / "rows.csv").read_text() == saved


def test_block_models_of_random_do_not_learn() -> None:
    options: dict[str, Any] = {
        "density": 0.2,
        "seed": 0,
        "parts": 4,
        "part_length": 15,
        "steps": 9,
        "batch_tokens": 200,
        "channels": 8,
    }
    options |= {"layers": 1, "heads": 2, "learning_rate": 1e-3, "short_part": 0.0, "dense_part": 0.5}
    tokens, learned = torch.arange(60) % 20, {}
    for method in ("sbm", "random"):
        model = train.make_model(train.Run(method=method, **options), 20)
        model(tokens).sum().backward()
        gradients = [x.grad for name, x in model.named_parameters() if ".source." in name]
        learned[method] = any(x is not None and bool(x.any()) for x in gradients)
    assert learned == {"sbm": True, "random": False}


def test_encoders_of_the_benchmark_agree_over_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark.gate()
    build = benchmark.build

    def other(arm: str, *rest: Any) -> torch.nn.Module:
        model: Any = build(arm, *rest)
        if arm == "full":
            model.encoder.layers[0].attention.lin_value.weight.data.neg_()
        return model

    monkeypatch.setattr(benchmark, "build", other)
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", lambda *_, **__: None)
    with pytest.raises(AssertionError):
        benchmark.gate()


def test_the_table_of_the_benchmark_has_ratios_of_medians() -> None:
    rows = [
        {"arm": arm, "tokens": tokens, "step": step * tokens, "inference": 1.0, "step MiB": 7.0, "inference MiB": 1.0}
        for arm, steps in (("full", (1, 2, 9)), ("sbm", (1, 1, 5)), ("longformer", (3, 3, 3)))
        for tokens in (1024, 4096)
        for step in steps
    ]
    shown = benchmark.table([row for row in rows if (row["arm"], row["tokens"]) != ("longformer", 4096)])
    assert "| full attention | step, ms | 2,048,000 | 8,192,000 |" in shown
    assert "| block model | step, ms | 1,024,000 (0.50) | 4,096,000 (0.50) |" in shown
    assert "| Longformer | step, ms | 3,072,000 |  |" in shown
    assert "| block model | step, MiB | 7 | 7 |" in shown


@pytest.mark.slow
@pytest.mark.parametrize("arm", [*benchmark.ARMS])
def test_the_benchmark_measures_every_encoder(arm: str) -> None:
    found = benchmark.turn(arm, 96, benchmark.parse(["--channels", "16", "--vocabulary", "64"]))
    assert min(found["step"], found["inference"]) > 0
    assert min(found["step MiB"], found["inference MiB"]) >= 0
