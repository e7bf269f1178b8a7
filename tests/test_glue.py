"""The program for GLUE: files, and pretraining, fine-tuning and tables on a small job."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import f1_score

from examples.common.tables import read
from examples.glue import __main__ as program

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
WORDS = ["the", "film", "was", "a", "quiet", "and", "moving", "story", "of", "two", "friends", "on", "a", "long", "travel", "by", "train"]  # fmt: skip
SIZES = ["--vocabulary", "300", "--length", "48", "--batch-size", "8", "--channels", "16", "--layers", "1", "--heads", "2", "--window", "2"]  # fmt: skip


def sentence(length: int, random: torch.Generator) -> str:
    return " ".join(WORDS[word] for word in torch.randint(len(WORDS), (length,), generator=random).tolist())


def write_glue(folder: Path, count: int = 60) -> Path:
    """A task of one text, whose label is whether a word is in it."""
    random = torch.Generator().manual_seed(1)
    (folder / "SST-2").mkdir(parents=True)
    for name, size in (("train", count), ("dev", 20)):
        texts = [sentence(6, random) for _ in range(size)]
        rows = ["sentence\tlabel", *(f"{text}\t{int('film' in text)}" for text in texts)]
        (folder / "SST-2" / f"{name}.tsv").write_text("\n".join(rows) + "\n")
    (folder / "SST-2" / "test.tsv").write_text("index\tsentence\n0\ta film\n1\ta train\n2\ta story\n")
    return folder


def test_documents_are_what_empty_lines_separate(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\none\r\ntwo \n \n\nthree\nfour")
    packed = tmp_path / "b.txt.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    expected = ["one\ntwo ", "three\nfour"]
    assert [*program.read_documents([path, packed])] == expected * 2


def test_damaged_texts_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"some words\n" * 5000)
    damages = {
        "cut.gz": whole[: len(whole) // 2],
        "other.gz": b"none",
        "broken.gz": whole[:20] + bytes(20) + whole[40:],
    }
    for name, content in damages.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"Expected '{tmp_path / name}' to be a whole gzip file"):
            [*program.read_documents([tmp_path / name])]
    (tmp_path / "latin.txt").write_bytes("good\nfaçade".encode("latin-1"))
    with pytest.raises(ValueError, match=r"to be text in UTF-8 \(got .* in line 2\)"):
        [*program.read_documents([tmp_path / "latin.txt"])]
    with pytest.raises(ValueError, match=r"to be a file of text \(got 'No such file or directory'\)"):
        [*program.read_documents([tmp_path / "absent"])]


def test_quotes_are_part_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text('\ufeffindex\tsentence\tlabel\n7\t"so it \'s said\t1\n8\ta "b" c\t0\n', encoding="utf-8")
    assert program.read_glue(path, program.TASKS["sst2"]) == ([["\"so it 's said"], ['a "b" c']], [1, 0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sentence\tlabel\ngood\t1\na\tb\t1\n", "line 3 of .* to have 2 cells and a label of the task .got a\tb\t1"),
        ("sentence\tlabel\na\n", "line 2 of .* to have 2 cells"),
        ("sentence\tlabel\na\t2\n", "line 2 of .* to have 2 cells and a label of the task"),
        ("text,label\nx,1\n", "to have the columns sentence, label .got .'text,label'.*Take the official files"),
        ("index\tsentence\n0\tx\n", "to have the columns sentence, label"),
        ("", "to have the columns sentence, label"),
        ("sentence\tlabel\n", "to have examples .got none"),
    ],
)
def test_damaged_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text(text)
    with pytest.raises(ValueError, match=message):
        program.read_glue(tmp_path / "train.tsv", program.TASKS["sst2"])


@pytest.mark.needs_data
@pytest.mark.parametrize("name", program.TASKS)
def test_official_files_are_read(name: str, sample: Callable[..., Path]) -> None:
    task = program.TASKS[name]
    texts, classes = program.read_glue(sample("glue") / task.folder / "train.tsv", task)
    assert len(texts) == len(classes) > 1000
    assert {*classes} == {*range(len(task.classes))}
    assert {len(text) for text in texts} == {len(task.texts)}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    random = torch.Generator().manual_seed(0)
    return program.make_tokenizer((sentence(20, random) for _ in range(100)), 300, 16)


def test_pairs_lose_the_end_of_their_longest_text(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "QNLI").mkdir()
    long = "a quiet film and a long story of two friends on a train"
    (tmp_path / "QNLI" / "train.tsv").write_text(
        "question\tsentence\tlabel\n" + f"two friends\t{long}\tentailment\n" * 20
    )
    sets = program.read_task(tmp_path, program.TASKS["qnli"], tokenizer)
    assert (len(sets["train"]), len(sets["dev"])) == (18, 2)  # a tenth is held out where there is no dev set
    ids = sets["train"][0]["input_ids"]
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    assert (len(ids), ids[0], ids[-1], ids.count(sep)) == (16, cls, sep, 2)
    assert tokenizer.decode(ids[1 : ids.index(sep)]).strip() == "two friends"


def test_scores_are_those_of_glue() -> None:
    labels = np.array([0, 1, 1, 2, 0])
    for classes in (2, 3):
        expected = np.minimum(labels, classes - 1)
        logits = np.eye(classes)[[0, 1, 0, 1, 1]]
        row = program.score(SimpleNamespace(predictions=logits, label_ids=expected))
        f1 = f1_score(expected, logits.argmax(1), average=None)
        assert row["accuracy"] == np.mean(logits.argmax(1) == expected)
        assert row["f1"] == pytest.approx(f1[1] if classes == 2 else f1.mean())


@pytest.mark.slow
@pytest.mark.examples
def test_a_small_job_from_texts_to_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random, out = torch.Generator().manual_seed(0), tmp_path / "out"
    (tmp_path / "texts.txt").write_text("\n\n".join(sentence(20, random) for _ in range(200)))
    shared = [*SIZES, "--output", str(out)]
    words = ["pretrain", "--texts", str(tmp_path / "texts.txt"), "--steps", "10", *shared]
    program.main([*words, "--methods", "full", "sbm", "window"])
    rows = read(out / "pretrain" / "rows.csv")
    assert [row["run"] for row in rows] == ["full", "sbm 10 %", "window"]
    assert all(6 < row["bits_per_token"] < 10 for row in rows)
    assert rows[0]["density"] == 1 > rows[1]["density"] > rows[2]["density"]
    before = (out / "pretrain" / "rows.csv").read_text()
    program.main([*words, "--methods", "full", "sbm"])
    assert (out / "pretrain" / "rows.csv").read_text() == before
    tune = ["finetune", "--glue", str(write_glue(tmp_path / "GLUE")), *shared]
    program.main([*tune, "--methods", "sbm"])
    program.main([*tune, "--methods", "sbm", "--scratch"])
    rows = read(out / "sst2" / "rows.csv")
    assert [(row["start"], row["run"]) for row in rows] == [("pretrained", "sbm 10 %"), ("scratch", "sbm 10 %")]
    (folder,), (start,) = (out / "sst2").glob("sst2-pretrained-*"), (out / "pretrain").glob("sbm*")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    encoder = transformers.AutoModelForMaskedLM.from_pretrained(start)
    sources = [{name for name, _ in one.named_parameters() if ".sbm." in name} for one in (model, encoder)]
    assert sources[0] == sources[1] != set()
    assert len((folder / "test.tsv").read_text().splitlines()) == 4
    assert "| sbm 10 % pretrained | 1 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        program.main([*tune, "--methods", "lsh"])
    assert "Pretrain it, or pass --scratch." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pretrain --texts absent", "Expected 'texts' to be files of text (got absent)"),
        ("finetune --glue absent", "Expected 'glue' to be a folder (got absent)"),
        ("pretrain --texts README.md --heads 3", "Expected 'heads' to divide 'channels'"),
        ("pretrain --texts README.md --methods dense", "invalid choice: 'dense'"),
        ("pretrain --texts README.md --vocabulary 100", "Expected 'vocabulary' to be at least 300 (got 100)"),
        ("table --output absent", "Expected 'output' to hold finished runs (got none in absent)"),
    ],
)
def test_wrong_command_lines_are_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(words.split())
    assert message in capsys.readouterr().err
