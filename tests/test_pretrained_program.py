"""The program that makes a trained decoder sparse and compares sources, on a tiny model of random weights."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from examples.pretrained import arms, chatting, embedding, tasks
from examples.pretrained.__main__ import main

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread", "quiet_transformers")]
SMALL = ["--window", "1", "--sinks", "1", "--batches", "2", "--steps", "8", "--texts", "2", "--questions", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of characters, with the files of its texts."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("pretrained")
    letters = {chr(number): number - 31 for number in range(32, 127)}
    rule = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, **letters}, "?"))
    rule.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    rule.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=rule, unk_token="?").save_pretrained(path / "model")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=1.0, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path / "model")
    draw = random.Random(0)
    for name in ("train", "test"):
        words = ("".join(draw.choices("abcdefg", k=draw.randrange(2, 6))) for _ in range(1500))
        (path / f"{name}.txt").write_text(" ".join(words))
    return path


def evaluate(folder: Path, output: Path, *words: str) -> None:
    files = ["--train", str(folder / "train.txt"), "--test", str(folder / "test.txt"), "--output", str(output)]
    main(["evaluate", str(folder / "model"), *files, *SMALL, *words])


def test_arms_are_evaluated_once_and_shown(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--lengths", "128", "--densities", "0.1", "--tasks", "text", "heads"]
    evaluate(folder, tmp_path, *sizes)
    rows = {path.stem: json.loads(path.read_text())["results"] for path in tmp_path.glob("*.json")}
    assert {*rows} == {"full-128-1", *(f"{arm}-128-0.1" for arm in arms.ARMS[1:])}
    pictures = {path.stem for path in (tmp_path / "heads").iterdir()}
    assert pictures == {*rows} - {"full-128-1"}
    kept = {name.split("-128")[0]: row["heads"]["kept"] for name, row in rows.items() if "heads" in row}
    assert kept["top-k"] > kept["candidates"] > kept["frozen-candidates"]
    assert kept["block-model"] > kept["frozen-block-model"]
    assert kept["low-rank"] > kept["frozen-indexer"]
    density = [row["heads"]["density"] for row in rows.values() if "heads" in row]
    assert 0.08 < min(density) < max(density) < 0.25
    capsys.readouterr()
    evaluate(folder, tmp_path, *sizes)
    assert capsys.readouterr().out == ""  # all is there
    evaluate(folder, tmp_path, *sizes, "speed", "--arms", "full", "candidates")  # from the sources that are there
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["full-128-1", "candidates-128-0.1"]
    main(["table", str(tmp_path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines] == ["| arm", *(f"| {arm}" for arm in arms.ARMS)]
    with pytest.raises(SystemExit):
        evaluate(folder, tmp_path, *sizes, "--seed", "1")  # other sources than the results are of
    with pytest.raises(SystemExit):
        evaluate(folder, tmp_path / "long", "--lengths", "20000")


def test_sources_that_were_saved_give_the_same_loss(folder: Path, tmp_path: Path) -> None:
    words = ["--lengths", "128", "--densities", "0.1", "--tasks", "text", "--arms", "candidates", "indexer"]
    evaluate(folder, tmp_path, *words)
    paths = [*tmp_path.glob("*.json")]
    before = [json.loads(path.read_text())["results"]["text"]["loss"] for path in paths]
    for path in paths:
        path.unlink()
    evaluate(folder, tmp_path, *words)
    assert [json.loads(path.read_text())["results"]["text"]["loss"] for path in paths] == before


@pytest.mark.parametrize("task", tasks.QUESTIONS)
def test_questions_fit_and_hold_their_answers(task: str, folder: Path) -> None:
    """Once each where there is one answer, and the prompt is no longer than asked; the same words for any model."""
    tokenizer = arms.load(folder / "model")[1]
    text = (folder / "test.txt").read_text()
    for number in range(4):
        question = tasks.make_question(task, tokenizer, text, 1500, number)
        assert question == tasks.make_question(task, tokenizer, text, 1500, number)
        size = len(tokenizer(question.prompt).input_ids) + question.new_tokens
        assert 1000 < size <= 1500
        context, asked = question.prompt.rsplit("\n", 1)
        for word in question.answers:
            assert word in context
            assert word not in asked
    assert question != tasks.make_question(task, tokenizer, text, 1500, 5)
    with pytest.raises(ValueError, match="Expected 'lengths'"):
        tasks.make_question(task, tokenizer, text, 30, 0)


def test_the_most_frequent_words_and_chains_are_the_answers() -> None:
    words = [f"w{n}" for n in range(900)]
    question = tasks.frequent_words(words, random.Random(0))
    text = question.prompt.split("coded words. ")[1].split("\n")[0].split()
    counts = sorted(-text.count(word) for word in {*text})[:3]
    assert [-text.count(word) for word in question.answers] == counts
    chain = tasks.tracking(words, random.Random(0))
    places = [chain.prompt.index(f"VAR {name} =") for name in chain.answers]
    assert places == sorted(places)
    keys = tasks.several_keys(words, random.Random(0))
    assert keys.prompt.count("One of the special magic numbers") == tasks.KEYS


def test_an_answer_counts_the_words_that_are_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = arms.load(folder / "model")
    question = tasks.Question("where is it", ["abc", "de"], 3)
    written = {"abc": 0.5, "abcde": 1.0, "xyz": 0.0}
    for text, share in written.items():
        tokens = tokenizer(question.prompt + text, return_tensors="pt").input_ids
        monkeypatch.setattr(model, "generate", lambda tokens=tokens, **_: tokens)
        assert tasks.answer(model, tokenizer, question) == share


def test_a_chat_answers_from_the_cache(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A calibrated model is loaded with its sources, and a second question is answered as if it were the first."""
    main([
        "calibrate", str(folder / "model"), "--train", str(folder / "train.txt"), "--output", str(tmp_path / "sparse"),
        "--length", "128", "--batches", "2", "--steps", "4", "--density", "0.2",
    ])  # fmt: skip
    text = (folder / "test.txt").read_text()[:700]
    (tmp_path / "text.txt").write_text(text)
    capsys.readouterr()
    words = ["--file", str(tmp_path / "text.txt"), "--question", "what is it", "--tokens", "6"]
    main(["chat", str(tmp_path / "sparse"), *words])
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("read ")
    assert out[-1].startswith("(6 tokens")
    main(["chat", str(folder / "model"), "--arm", "low-rank", *words])
    model, tokenizer = arms.load(tmp_path / "sparse")
    reader = chatting.Reader(model, tokenizer, text)
    reader.read()
    first = reader.answer("what is it", 6)
    other = reader.answer("who", 6)
    assert reader.answer("what is it", 6) == first
    assert out[1].strip() == first.strip()
    whole = tokenizer(f"{text}\n\nQuestion: who\nAnswer:", return_tensors="pt").input_ids
    expected = model.generate(whole, max_new_tokens=6, do_sample=False, use_cache=False)[0, whole.size(1) :]
    assert tokenizer.decode(expected) == other


def test_embeddings_of_an_encoder_are_compared(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.5, max_position_embeddings=256,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path / "encoder")
    arms.load(folder / "model")[1].save_pretrained(tmp_path / "encoder")
    text = (folder / "test.txt").read_text()
    (tmp_path / "texts.tsv").write_text("\n".join(f"{text[at : at + 100]}\t1" for at in range(0, 2000, 100)))
    (tmp_path / "one.tsv").write_text(text[:100])
    files = ["--train", str(tmp_path / "texts.tsv"), "--test", str(tmp_path / "texts.tsv")]
    output = tmp_path / "out"
    more = ["--density", "0.2", "--steps", "5", "--batches", "3", "--output", str(output)]
    main(["embed", str(tmp_path / "encoder"), *files, *more, "--arms", "window", "top-k"])
    before = {path: path.stat().st_mtime_ns for path in output.glob("*.json")}
    assert {path.name for path in before} == {"window-100-0.2.json", "top-k-100-0.2.json"}
    assert capsys.readouterr().out.startswith("window-100-0.2: cosine 0.")
    main(["embed", str(tmp_path / "encoder"), *files, *more, "--arms", "window", "top-k", "candidates"])  # goes on
    assert {path: path.stat().st_mtime_ns for path in before} == before
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("candidates-100-0.2: cosine 0.")
    assert "20 texts of 100 tokens in the mean" in lines
    rows = ([float(cell) for cell in line.strip("| ").split(" | ")[1:]] for line in lines[-3:])
    density, cosine, shared = zip(*rows, strict=True)
    assert 20 < min(density) < max(density) < 32
    assert 0.5 < min(cosine) < max(cosine) <= 1
    assert 0 < min(shared) < max(shared) <= 100
    vectors = torch.nn.functional.normalize(torch.randn(30, 8), dim=1)
    assert embedding.compare(vectors, vectors)["neighbors"] == 1
    assert embedding.compare(vectors, vectors)["cosine"] == pytest.approx(1)
    assert embedding.neighbors(vectors).sum(1).eq(10).all()
    with pytest.raises(SystemExit):
        main(["embed", str(tmp_path / "encoder"), *files[:2], "--test", str(tmp_path / "one.tsv"), *more])
    (tmp_path / "other.tsv").write_text((tmp_path / "texts.tsv").read_text().swapcase())
    with pytest.raises(SystemExit):  # other texts of the same size
        main(["embed", str(tmp_path / "encoder"), *files[:2], "--test", str(tmp_path / "other.tsv"), *more])
    with pytest.raises(SystemExit):  # other settings than those of the files
        main(["embed", str(tmp_path / "encoder"), *files, *more, "--seed", "1", "--arms", "window"])


def test_a_folder_is_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["prepare", str(folder / "model")])
    assert "1 attention layers of 2 heads that can be sparse, 2,048 positions" in capsys.readouterr().out
    for wrong in ("no_such_package", str(folder / "train.txt")):
        with pytest.raises(SystemExit):
            main(["prepare", wrong])
        assert "Expected 'source' to be a folder of transformers" in capsys.readouterr().err
