"""The program for GLUE: files, tokens and batches; pretraining, fine-tuning and tables on a small job."""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from examples.common.corpus import train_tokenizer
from examples.glue import __main__ as program
from examples.glue import data, report, train
from sbm_pyg import SequenceClassifier, SequenceEncoder

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = ["the", "film", "was", "a", "quiet", "and", "moving", "story", "of", "two", "friends", "on", "a", "long", "travel", "by", "train"]  # fmt: skip
SIZES = ["--vocabulary", "300", "--length", "48", "--batch-tokens", "256", "--channels", "16", "--layers", "1", "--heads", "2", "--window", "2"]  # fmt: skip


def write_texts(path: Path, count: int = 300) -> Path:
    """Documents of random words, some of several lines."""
    random = torch.Generator().manual_seed(0)
    lines = []
    for number in range(count):
        length = int(torch.randint(3, 40, (), generator=random))
        words = [WORDS[int(w)] for w in torch.randint(len(WORDS), (length,), generator=random)]
        lines += [" ".join(words), *(["and more"] if number % 3 == 0 else []), ""]
    path.write_text("\n".join(lines))
    return path


def write_glue(folder: Path, count: int = 60) -> Path:
    """A task of one text, whose label is whether a word is in it."""
    random = torch.Generator().manual_seed(1)
    (folder / "SST-2").mkdir(parents=True)
    for name, size in (("train", count), ("dev", 20)):
        rows = ["sentence\tlabel"]
        for _ in range(size):
            words = [WORDS[int(w)] for w in torch.randint(len(WORDS), (6,), generator=random)]
            rows.append(f"{' '.join(words)}\t{int('film' in words)}")
        (folder / "SST-2" / f"{name}.tsv").write_text("\n".join(rows) + "\n")
    (folder / "SST-2" / "test.tsv").write_text("index\tsentence\n0\ta film\n1\ta train\n2\ta story\n")
    return folder


# ------------------------------------------------------------------ files


def test_documents_are_what_empty_lines_separate(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\none\r\ntwo \n \n\nthree\nfour")
    packed = tmp_path / "b.txt.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    wanted = ["one\ntwo ", "three\nfour"]
    assert [*data.read_documents([path])] == wanted
    assert [*data.read_documents([path, packed])] == wanted * 2


def test_damaged_texts_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"some words\n" * 5000)
    cut, other = tmp_path / "cut.gz", tmp_path / "other.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    other.write_bytes(b"no gzip at all")
    broken = tmp_path / "broken.gz"
    broken.write_bytes(whole[:20] + bytes(20) + whole[40:])
    latin = tmp_path / "latin.txt"
    latin.write_bytes("good\nfaçade".encode("latin-1"))
    for path in (cut, other, broken):
        with pytest.raises(ValueError, match=rf"Expected '{path}' to be a whole gzip file"):
            [*data.read_documents([path])]
    with pytest.raises(ValueError, match=r"to be text in UTF-8 \(got .* in line 2\)"):
        [*data.read_documents([latin])]
    with pytest.raises(ValueError, match=r"to be a file of text \(got 'No such file or directory'\)"):
        [*data.read_documents([tmp_path / "absent"])]
    with pytest.raises(ValueError, match="folder"):
        [*data.read_documents([tmp_path])]


def test_quotes_are_part_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text('\ufeffindex\tsentence\tlabel\n7\t"so it \'s said\t1\n8\ta "b" c\t0\n', encoding="utf-8")
    assert data.read_glue(path, data.TASKS["sst2"]) == ([("\"so it 's said",), ('a "b" c',)], [1, 0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a\tb\t1", "line 3 of .* to be an example (got 3 cells, not 2)"),  # a tab inside of the sentence
        ("a", "line 3 of .* to be an example (got 1 cells, not 2)"),
        ("a\t2", "line 3 of .* to be an example (got the label '2')"),
        ("a\t", "line 3 of .* to be an example (got the label '')"),
        ("  \t1", "line 3 of .* to be an example (got an empty text)"),
    ],
)
def test_damaged_lines_are_refused_or_left_out(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text(f"sentence\tlabel\ngood\t1\n{line}\nbad\t0\n")
    pattern = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=pattern + r"\. Mend it, or leave such lines out with --skip-damaged"):
        data.read_glue(path, data.TASKS["sst2"])
    assert data.read_glue(path, data.TASKS["sst2"], skip_damaged=True) == ([("good",), ("bad",)], [1, 0])


def test_foreign_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    for text, message in (
        ("text,label\nx,1\n", r"to have the columns sentence, label \(got text,label\). Take the official files"),
        ("index\tsentence\n0\tx\n", r"\(got index, sentence\). Files of GLUE's test sets have no labels"),
        ("", r"to have the columns sentence, label \(got \)"),
        ("sentence\tlabel\n", r"to have examples \(got none\)"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            data.read_glue(path, data.TASKS["sst2"])


@pytest.mark.needs_data
@pytest.mark.parametrize("name", data.TASKS)
def test_official_files_are_read(name: str, sample: Callable[..., Path]) -> None:
    task = data.TASKS[name]
    path = sample(f"glue/{task.folder}") / "train.tsv"
    texts, classes = data.read_glue(path, task)
    assert len(texts) == (67_349 if name == "sst2" else 8_999)
    assert len(texts[0]) == len(task.texts)
    assert {*classes} == {*range(len(task.classes))}
    if name != "sst2":
        official = sample(f"glue/kshot_official_columns/{task.folder}") / "train.tsv"
        assert len(data.read_glue(official, task)[0]) in (32, 48)


# ------------------------------------------------------------------ tokens and batches


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = write_texts(tmp_path_factory.mktemp("texts") / "texts.txt")
    return train_tokenizer(data.read_documents([path]), 300, data.SPECIAL, add_prefix_space=True)


def test_documents_are_cut_into_pieces_of_nearly_equal_size(tokenizer: Any) -> None:
    texts = ["the film", " ".join(WORDS * 3)]
    tokens, ptr = data.encode_documents(tokenizer, iter(texts), 20)
    start, end = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    wanted = [[start, *tokenizer.encode(text).ids, end] for text in texts]
    assert tokens.tolist() == [token for ids in wanted for token in ids]
    sizes = ptr.diff()[1:]
    assert int(sizes.max() - sizes.min()) <= 1
    assert int(sizes.max()) <= 20
    assert len(sizes) == -(-len(wanted[1]) // 20)
    assert tokenizer.decode(wanted[0][1:-1]).strip() == "the film"
    with pytest.raises(ValueError, match="Expected texts to hold documents for 'train'"):
        data.encode_documents(tokenizer, iter([]), 20, "train")


def test_models_are_chosen_by_the_first_of_the_dev_sets(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "MNLI").mkdir()
    for name in ("train", "dev_mismatched"):
        text = "sentence1\tsentence2\tgold_label\na film\ta story\tneutral\n"
        (tmp_path / "MNLI" / f"{name}.tsv").write_text(text)
    given = argparse.Namespace(glue=tmp_path, length=32, limit=None, hold_out=0.1, skip_damaged=False)
    with pytest.raises(ValueError, match=r"to have dev_matched\.tsv, .* \(got dev_mismatched alone\)"):
        data.read_task(given, data.TASKS["mnli"], tokenizer)


def test_pairs_lose_the_end_of_their_longest_text(tokenizer: Any) -> None:
    long, short = " ".join(WORDS * 4), "the film"
    few = data.encode_examples(tokenizer, [(long, short), (short, short)], [1, 0], 30)
    start, end = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    first, second = (tokenizer.encode(text).ids for text in (long, short))
    kept = 30 - 3 - len(second)
    assert few.tokens[: few.ptr[1]].tolist() == [start, *first[:kept], end, *second, end]
    assert few.tokens[few.ptr[1] :].tolist() == [start, *second, end, *second, end]
    one = few.select(torch.tensor([1]))
    assert one.tokens.tolist() == few.tokens[few.ptr[1] :].tolist()
    assert one.labels.tolist() == [0]


@pytest.mark.parametrize("size", [30, 64, 10_000])
def test_each_piece_is_in_one_batch_of_an_epoch(size: int) -> None:
    length = torch.randint(1, 31, (40,), generator=torch.Generator().manual_seed(0))
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), length.cumsum(0)])
    tokens = torch.arange(int(ptr[-1]), dtype=torch.int32)
    stream = data.Stream(tokens, ptr, size, seed=3)
    orders = []
    for epoch in range(2):
        batches = [stream[number] for number in range(epoch * stream.per_epoch, (epoch + 1) * stream.per_epoch)]
        assert all(len(part) for part, _ in batches)
        assert all(len(part) <= 2 * size + 30 for part, _ in batches)
        joined = torch.cat([part for part, _ in batches])
        assert torch.equal(joined.sort().values, tokens.long())
        starts = {int(part[first]) for part, offsets in batches for first in offsets[:-1].tolist()}
        assert starts == {*ptr[:-1].tolist()}  # pieces stay whole
        orders.append(joined)
    assert not torch.equal(*orders)
    again = data.Stream(tokens, ptr, size, seed=3)
    last = 2 * stream.per_epoch - 1
    assert torch.equal(again[last][0], stream[last][0])


# ------------------------------------------------------------------ training


def test_scores_are_those_of_glue() -> None:
    """F1 of the second class of two, and accuracy, by hand."""
    torch.manual_seed(0)
    model = SequenceClassifier(SequenceEncoder(9, 8, attention="full"), 2)
    ptr = torch.arange(0, 101 * 3, 3)
    examples = data.Examples(torch.randint(9, (300,)), ptr, torch.randint(2, (100,)))
    found = train.evaluate(model, examples, batch_size=7)
    guessed = model.eval()(examples.tokens, ptr).argmax(1)
    hits = int(((guessed == 1) & (examples.labels == 1)).sum())
    wanted = 2 * hits / max(1, int((guessed == 1).sum() + (examples.labels == 1).sum()))
    assert found["f1"] == pytest.approx(wanted)
    assert found["accuracy"] == pytest.approx(float((guessed == examples.labels).float().mean()))
    assert (found["examples"], found["density"], found["sampled_density"]) == (100, 1.0, 1.0)


def test_words_by_frequency_need_their_entropy() -> None:
    assert train.unigram_bits(torch.tensor([0, 1, 2, 3]), 9) == pytest.approx(2)
    assert train.unigram_bits(torch.tensor([5, 5, 5]), 9) == 0


@pytest.mark.slow
@pytest.mark.examples
def test_a_small_job_from_texts_to_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, glue = write_texts(tmp_path / "texts.txt"), write_glue(tmp_path / "GLUE")
    out = ["--output", str(tmp_path / "out")]
    methods = ["--methods", "full", "sbm:num_clusters=4", "random", "window", "--density", "0.3"]
    tuned = [word for word in SIZES if word not in ("--batch-tokens", "256")]
    program.main(["pretrain", "--texts", str(texts), "--steps", "20", *methods, *SIZES, *out])
    program.main(["finetune", "--glue", str(glue), *methods, *tuned, *out])
    program.main(["finetune", "--glue", str(glue), "--scratch", "--epochs", "2", "--methods", "full", *tuned, *out])
    capsys.readouterr()
    program.main(["table", *out])
    shown = capsys.readouterr().out
    rows = [line.split("|")[1].strip() for line in shown.splitlines() if line.startswith("| ")]
    assert rows.count("sbm:num_clusters=4 30 %") == 2
    assert rows.count("full") == 3
    pretrained = report.read(tmp_path / "out" / "pretrain" / "rows.csv")
    for row in pretrained:
        assert 0 < row["bits_per_token"] < 12
        assert row["perplexity"] == pytest.approx(2 ** row["bits_per_token"], rel=1e-4)
    parts = {row["run"]: row for row in pretrained}
    assert parts["full"]["density"] == 1
    assert 0 < parts["random 30 %"]["sampled_density"] < parts["random 30 %"]["density"] < 1
    before = (tmp_path / "out" / "finetune" / "sst2" / "rows.csv").read_text()
    program.main(["finetune", "--glue", str(glue), *methods, *tuned, *out])  # there is nothing left to do
    assert shown in capsys.readouterr().out  # the tables again
    assert (tmp_path / "out" / "finetune" / "sst2" / "rows.csv").read_text() == before
    best = torch.load(next((tmp_path / "out" / "finetune" / "sst2").glob("*scratch*.best.pt")), weights_only=True)
    assert best["run"]["scratch"]
    program.main(["evaluate", "--glue", str(glue), *out])
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| sst2")]
    best_rows: dict[Any, float] = {}
    for row in report.read(tmp_path / "out" / "finetune" / "sst2" / "rows.csv"):
        key = row["run"], row["start"]
        best_rows[key] = max(best_rows.get(key, 0.0), row["accuracy"])
    found = {}
    for line in table:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[cells[2], cells[3]] = float(cells[6])
        assert cells[1] == "dev"
        assert cells[5] == "20"
    assert found == {key: pytest.approx(100 * value, abs=0.06) for key, value in best_rows.items()}
    written = sorted((tmp_path / "out" / "finetune" / "sst2" / "predictions").glob("*.tsv"))
    assert len(written) == 2 * len(best_rows)  # of the dev and of the test set
    for file in written:
        first, *guesses = file.read_text().splitlines()
        assert first == "index\tprediction"
        assert len(guesses) == (3 if "-test" in file.name else 20)
        assert all(guess in (f"{at}\t0", f"{at}\t1") for at, guess in enumerate(guesses))
    saved = tmp_path / "saved"
    for _ in range(2):  # the second replaces the first
        program.main(["evaluate", "--glue", str(glue), "--save", str(saved), *out])
    assert len(list(saved.iterdir())) == len(best_rows)
    model = SequenceClassifier.from_pretrained(next(saved.glob("*pretrained-sbm*"))).float()
    tokenizer = Tokenizer.from_file(str(next(saved.glob("*pretrained-sbm*")) / "tokenizer.json"))
    given = argparse.Namespace(glue=glue, length=32, limit=1, hold_out=0.1, skip_damaged=False)
    dev = data.read_task(given, data.TASKS["sst2"], tokenizer)["dev"]
    sentences = [line.split("\t")[0] for line in (glue / "SST-2" / "dev.tsv").read_text().splitlines()[1:]]
    encoded = [tokenizer.encode(sentence).ids for sentence in sentences]
    assert [dev.tokens[a:b].tolist() for a, b in pairwise(dev.ptr.tolist())] == encoded
    predictions = next(file for file in written if "pretrained-sbm" in file.name and "-dev" in file.name).read_text()
    answers = model(dev.tokens.long(), dev.ptr, seed=0).argmax(1).tolist()
    assert predictions.splitlines()[1:] == [f"{number}\t{answer}" for number, answer in enumerate(answers)]
    # other sizes, other texts, and models that are not there
    for words, message in (
        (["pretrain", "--texts", str(glue / "SST-2" / "dev.tsv"), *SIZES, *out], "was prepared with (got others)"),
        (["finetune", "--glue", str(glue), "--methods", "dcmm", *tuned, *out], "to be a checkpoint (got no such file)"),
        (["finetune", "--glue", str(glue), *tuned[:-2], "--window", "3", *out], "Take another --output"),
        (
            ["finetune", "--glue", str(glue), "--pretrained-seed", "1", *tuned, *out],
            "'pretrained-seed of sst2' to be 0",
        ),
        (["finetune", "--glue", str(glue), "--tasks", "qqp", *tuned, *out], "QQP/train.tsv' to be a file of text"),
    ):
        with pytest.raises(SystemExit):
            program.main(words)
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.examples
def test_a_pretrained_encoder_is_loaded_with_its_graphs(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts.txt")
    out = ["--output", str(tmp_path / "out")]
    program.main(["pretrain", "--texts", str(texts), "--steps", "10", "--methods", "sbm", *SIZES, *out])
    path = next((tmp_path / "out" / "pretrain").glob("*.pt"))
    state = torch.load(path, weights_only=True)
    run = train.Run(**state["run"])
    encoder = train.make_encoder(run, 300)
    train.load_encoder(encoder, path, run)
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, state["model"][f"encoder.{name}"]), name
    assert any(".source." in name for name in encoder.state_dict())
    other = train.FineTune(**state["run"] | {"window": 5})
    with pytest.raises(ValueError, match=r"pretrained model of this run \(got window 2, not 5\)"):
        train.load_encoder(encoder, path, other)
