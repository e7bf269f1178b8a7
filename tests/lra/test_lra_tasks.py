"""The table of tasks: ListOps generated and read, ragged storage, length buckets."""

from __future__ import annotations

import csv
import dataclasses
import errno
import json
import random
import re
import shutil
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare

from examples.lra.__main__ import main
from examples.lra.data import listops
from examples.lra.data.batches import LengthBuckets, Rows, Split, by_length
from examples.lra.data.listops import Parameters
from examples.lra.data.prepare import load
from examples.lra.data.tasks import TASKS

LISTOPS = TASKS["listops"]
SMALL = Parameters(train=60, val=10, test=20, max_depth=4, max_args=5, min_length=5, max_length=60)


OPERATIONS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def evaluate(source: str) -> int:
    """Computes the value of a tree from its text, by a stack and plain Python: nothing of the generator is used."""
    pending: list[tuple[str, list[int]]] = []
    for word in source.split():
        if word in "()":
            continue
        if word in OPERATIONS:
            pending.append((word, []))
            continue
        if word == "]":
            name, values = pending.pop()
            value = OPERATIONS[name](values)
        else:
            value = int(word)
        if not pending:
            return value
        pending[-1][1].append(value)
    raise AssertionError(f"unfinished tree: {source[:100]}")


def rows_of(path: Path) -> list[tuple[str, int]]:
    with path.open(newline="") as file:
        header, *rows = csv.reader(file, delimiter="\t")
    assert header == ["Source", "Target"]
    return [(source, int(target)) for source, target in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "listops"
    assert listops.generate(path, SMALL, seed=3, progress=False)
    return path


def nested(words: list[str]) -> list:
    """Parses round brackets into nested lists."""
    stack: list[list] = [[]]
    for word in words:
        if word == "(":
            stack.append([])
        elif word == ")":
            inner = stack.pop()
            stack[-1].append(inner)
        else:
            stack[-1].append(word)
    assert len(stack) == 1
    return stack[0]


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_generated_labels_agree_with_an_independent_evaluator(folder: Path, split: str) -> None:
    rows = rows_of(folder / f"basic_{split}.tsv")
    assert len(rows) == getattr(SMALL, split)
    assert [evaluate(source) for source, _ in rows] == [label for _, label in rows]


@pytest.mark.needs_data
@pytest.mark.parametrize("name", ["d20s_as_lra", "generated_lra_parameters"])
def test_real_data_is_read_and_agrees_with_the_evaluator(
    name: str, tmp_path: Path, sample: Callable[..., Path]
) -> None:
    real = sample(f"listops/{name}", *(f"basic_{split}.tsv" for split in listops.SPLITS))
    splits = load(LISTOPS, real, max_length=2048, prepared=tmp_path)
    for split, examples in splits.items():
        rows = rows_of(real / f"basic_{split}.tsv")
        assert examples.labels.tolist() == [label for _, label in rows]
        assert [evaluate(source) for source, _ in rows] == [label for _, label in rows]
        source = rows[-1][0].replace("(", "").replace(")", "").split()
        tokens = examples.tokens[examples.ptr[-2] : examples.ptr[-1]]
        assert [listops.VOCABULARY[token - 1] for token in tokens] == source
    sizes = [len(splits[split]) for split in ("train", "val", "test")]
    assert sizes == ([8000, 1000, 1000] if name == "d20s_as_lra" else [300, 50, 50])


def test_files_have_the_layout_of_the_release(folder: Path) -> None:
    for split in listops.SPLITS:
        lines = (folder / f"basic_{split}.tsv").read_bytes().split(b"\r\n")
        assert lines[0] == b"Source\tTarget"
        assert lines[-1] == b""
        for line in lines[1:-1]:
            assert re.fullmatch(rb"(?:(?:[()\d\]]|\[MIN|\[MAX|\[MED|\[SM) ?)+\t\d", line)
            root, _ = nested(line.decode().replace("\t", " ").split())  # one tree, one label
            assert len(root) == 2  # a binary tree throughout
            assert root[1] == "]"


def test_lengths_are_within_the_bounds_and_all_trees_are_distinct(folder: Path) -> None:
    sources = [source for split in listops.SPLITS for source, _ in rows_of(folder / f"basic_{split}.tsv")]
    lengths = [len(source.replace("(", "").replace(")", "").split()) for source in sources]
    assert SMALL.min_length < min(lengths)
    assert max(lengths) < SMALL.max_length
    assert len(set(sources)) == len(sources) == 90


def reference_length(depth: int, law: Parameters, rng: random.Random) -> int:
    """Draws a tree as the recursive generator does, and returns its length."""
    if depth >= law.max_depth or rng.random() >= law.operator_probability:
        return 1
    return 2 + sum(reference_length(depth + 1, law, rng) for _ in range(rng.randint(2, law.max_args)))


def test_law_of_lengths_is_that_of_the_recursive_generator() -> None:
    law = Parameters(max_depth=4, max_args=4, min_length=1, max_length=40, operator_probability=0.5)
    drawn = np.diff(listops.draw_trees(law, 40_000, np.random.default_rng(0)).ptr)
    rng = random.Random(0)
    wanted = np.array([reference_length(1, law, rng) for _ in range(40_000)])
    wanted = wanted[(wanted > law.min_length) & (wanted < law.max_length)]
    assert abs(len(drawn) - len(wanted)) < 5 * np.sqrt(len(drawn))  # of as many draws, as many are kept
    counts = np.stack([np.bincount(lengths, minlength=40)[4:40] for lengths in (drawn, wanted)])
    counts = np.column_stack([counts[:, :25], counts[:, 25:].sum(1)])
    assert chi2_contingency(counts[:, counts.sum(0) > 20]).pvalue > 1e-6


def test_operators_and_digits_are_uniform() -> None:
    law = Parameters(max_depth=3, max_args=4, min_length=1, max_length=100, operator_probability=0.5)
    tokens = listops.draw_trees(law, 20_000, np.random.default_rng(1)).tokens
    counts = np.bincount(tokens, minlength=16)
    assert counts[0] == 0
    assert chisquare(counts[1:11]).pvalue > 1e-6
    assert chisquare(counts[11:15]).pvalue > 1e-6
    assert counts[15] == counts[11:15].sum()


def test_about_one_tree_in_twelve_has_a_length_that_lra_allows() -> None:
    trees = listops.draw_trees(Parameters(), 6_000, np.random.default_rng(0))
    assert len(trees.labels) / 6_000 == pytest.approx(1 / 12, rel=0.15)
    assert np.diff(trees.ptr).mean() == pytest.approx(1_040, rel=0.05)


def test_same_seed_same_files_other_seed_other_files(folder: Path, tmp_path: Path) -> None:
    for name, seed in (("same", 3), ("other", 4)):
        listops.generate(tmp_path / name, SMALL, seed=seed, progress=False)
    for split in listops.SPLITS:
        name = f"basic_{split}.tsv"
        assert (tmp_path / "same" / name).read_bytes() == (folder / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (folder / name).read_bytes()


def test_generating_again_does_nothing_and_never_overwrites(folder: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert not listops.generate(folder, SMALL, seed=3, progress=False)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    with pytest.raises(ValueError, match=r"to be new, empty or the data set asked for \(got one made with seed 3"):
        listops.generate(folder, dataclasses.replace(SMALL, max_args=4), seed=3, progress=False)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(
        ValueError,
        match=r"to be the manifest of generated data \(got no such file\)\. Remove .* or choose another place",
    ):
        listops.generate(tmp_path, SMALL, progress=False)


def test_who_generates_what_another_is_writing_waits_for_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, outcomes = listops._write_splits, []
    seconds: list[threading.Thread] = []

    def generate() -> None:
        outcomes.append(listops.generate(tmp_path / "listops", SMALL, seed=3, progress=False))

    def slow(*arguments: Any) -> dict:
        if not seconds:  # the first writer starts the second in its midst
            seconds.append(threading.Thread(target=generate))
            seconds[0].start()
        files = write(*arguments)
        seconds[0].join(0.3)
        return files

    monkeypatch.setattr(listops, "_write_splits", slow)
    generate()
    seconds[0].join()
    assert outcomes == [True, False]
    assert (tmp_path / "listops" / "basic_val.tsv").read_bytes() == (folder / "basic_val.tsv").read_bytes()


def test_generation_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as a kill does, it leaves what is written

    def killed(folder: Path, *_: Any) -> dict:
        (folder / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(listops, "_write_splits", killed)
    with pytest.raises(KeyboardInterrupt):
        listops.generate(tmp_path / "listops", SMALL, progress=False)
    monkeypatch.undo()
    assert len(list(tmp_path.rglob("half"))) == 1
    assert listops.generate(tmp_path / "listops", SMALL, progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"listops", ".listops.lock"}
    assert not (tmp_path / "listops" / "half").exists()


def test_a_full_disk_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> dict:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(listops, "_write_splits", full)
    with pytest.raises(
        ValueError,
        match=r"listops' to be a place for generated data \(got: .*No space left on device\)\. Make room there",
    ):
        listops.generate(tmp_path / "listops", SMALL, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [".listops.lock"]


def test_manifest_tells_how_the_files_were_made(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["parameters"] == dataclasses.asdict(SMALL)
    assert manifest["seed"] == 3
    assert manifest["files"]["basic_val.tsv"]["rows"] == 10
    assert len(manifest["files"]["basic_train.tsv"]["sha256"]) == 64


def test_interrupted_generation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(listops.tqdm):
        def update(self, n: float = 1) -> None:
            if self.n > 30:
                raise KeyboardInterrupt
            self.n += n

    monkeypatch.setattr(listops, "tqdm", Impatient)
    with pytest.raises(KeyboardInterrupt):
        listops.generate(tmp_path / "listops", SMALL, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [".listops.lock"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": 0}, r"Expected 'train' to be at least 1 \(got 0\)"),
        ({"max_depth": 1}, r"Expected 'max_depth' to be at least 2 \(got 1\)"),
        ({"max_args": 1}, r"Expected 'max_args' to be at least 2 \(got 1\)"),
        ({"min_length": 0}, r"Expected 'min_length' to be at least 1 \(got 0\)"),
        (
            {"min_length": 50, "max_length": 51},
            r"Expected 'max_length' to leave room above 'min_length' = 50 .*\(got 51\)",
        ),
        ({"operator_probability": 0.0}, r"Expected 'operator_probability' to be in \(0, 1\] \(got 0\.0\)"),
        ({"operator_probability": float("nan")}, r"Expected 'operator_probability' to be in \(0, 1\] \(got nan\)"),
    ],
)
def test_parameters_out_of_range(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_more_trees_than_there_are(tmp_path: Path) -> None:
    law = Parameters(
        train=500, val=1, test=1, max_depth=2, max_args=2, min_length=1, max_length=5, operator_probability=1.0
    )
    with pytest.raises(
        ValueError, match=r"at most the number of distinct trees \(got 502, but .* nothing beyond 400\)"
    ):
        listops.generate(tmp_path / "listops", law, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [".listops.lock"]


@pytest.mark.parametrize(
    "place", [".", "listops-1000", "listops", "lra_release/listops-1000", "lra_release/lra_release/listops-1000"]
)
def test_folder_is_found_as_released_or_renamed(folder: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.tsv"):
        (tmp_path / place / path.name).write_bytes(path.read_bytes())
    assert {split: len(examples) for split, examples in load(LISTOPS, tmp_path, max_length=60).items()} == {
        "train": 60,
        "val": 10,
        "test": 20,
    }


def test_wrong_folder_shows_the_tree_that_is_expected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"to hold ListOps \(got other files\)[\s\S]*basic_train\.tsv[\s\S]*lra_release/listops-1000"
    ):
        load(LISTOPS, tmp_path, max_length=60)
    with pytest.raises(ValueError, match=r"to hold ListOps \(got no such folder\)"):
        load(LISTOPS, tmp_path / "nowhere", max_length=60)
    for split in ("train", "test"):
        (tmp_path / f"basic_{split}.tsv").write_bytes((folder / f"basic_{split}.tsv").read_bytes())
    with pytest.raises(ValueError, match=r"to hold every split \(got no basic_val\.tsv\)"):
        load(LISTOPS, tmp_path, max_length=60)


GOOD = "( ( ( [MAX 4 ) 7 ) ] )\t7"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD], r"val\.tsv:1' to be the header 'Source\\tTarget' \(got '\( \( \( \[MAX"),
        (
            ["Source\tTarget", GOOD, "( ( [MAX 4 ) 7"],
            r"val\.tsv:3' to have two columns, a tree and its value \(got 1\)\. Look for",
        ),
        (["Source\tTarget", GOOD, ""], r"val\.tsv:3' to have two columns"),
        (["Source\tTarget", f"{GOOD}\t7"], r"val\.tsv:2' to have two columns, a tree and its value \(got 3\)"),
        (["Source\tTarget", GOOD, GOOD, "[MAX 4 7 ]\t10"], r"val\.tsv:4' to end in a label from 0 to 9 \(got '10'\)"),
        (["Source\tTarget", "[MAX 4 7 ]\tx"], r"val\.tsv:2' to end in a label from 0 to 9 \(got 'x'\)"),
        (["Source\tTarget", "[MAX 4 12 ]\t4"], r"val\.tsv:2' to hold the tokens 0 1 .* \(got '12'\)"),
        (["Source\tTarget", "[AVG 4 7 ]\t4"], r"val\.tsv:2' to hold the tokens .* \(got '\[AVG'\)"),
        (["Source\tTarget", GOOD, "[MAX 4 7 ]\t07"], r"val\.tsv:3' to end in a label from 0 to 9 \(got '07'\)"),
        (["Source\tTarget", "[MAX 4 7 ]\t٣"], r"val\.tsv:2' to end in a label from 0 to 9 \(got '٣'\)"),
        (["Source\tTarget", "[MAX 4 7 ]\t"], r"val\.tsv:2' to end in a label from 0 to 9 \(got ''\)"),
        (
            ["Source\tTarget", "[MAX 4 [MIN 7 ]\t7"],
            r"val\.tsv:2' to be one whole tree \(got 1 operators without their '\]'\)",
        ),
        (["Source\tTarget", "( )\t7"], r"val\.tsv:2' to be one whole tree \(got 0 trees\)"),
        (
            ["Source\tTarget", "] [MAX 1\t1"],
            r"val\.tsv:2' to be one whole tree \(got a '\]' that ends nothing, token 1 of 3\)",
        ),
        (
            ["Source\tTarget", "[MAX ]\t0"],
            r"val\.tsv:2' to be one whole tree \(got \[MAX without arguments, which ends at token 2 of 2\)",
        ),
        (
            ["Source\tTarget", GOOD, "[MAX 1 [SM ] ]\t1"],
            r"val\.tsv:3' to be one whole tree \(got \[SM without arguments, .* 4 of 5\)",
        ),
        (["Source\tTarget", "[MAX 1 2 ] [MIN 2 3 ]\t2"], r"val\.tsv:2' to be one whole tree \(got 2 trees\)"),
        (["Source\tTarget", "[MAX 1 2 ] 2\t2"], r"val\.tsv:2' to be one whole tree \(got 2 trees\)"),
        (
            ["Source\tTarget", GOOD, "[MAX 4 7 ]\t6"],
            r"val\.tsv:3' to end in 7, the value of its tree \(got '6'\)\. Look for",
        ),
        (
            ["Source\tTarget", "[MED 1 [SM 9 9 ] 4 6 ]\t4"],
            r"val\.tsv:2' to end in 5, the value of its tree \(got '4'\)",
        ),
        (["Source\tTarget"], r"Expected 'val' of .* to hold examples \(got none\)"),
    ],
)
@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_malformed_rows_name_file_and_line(
    folder: Path, tmp_path: Path, lines: list[str], message: str, end: str
) -> None:
    for split in ("train", "test"):
        (tmp_path / f"basic_{split}.tsv").write_bytes((folder / f"basic_{split}.tsv").read_bytes())
    (tmp_path / "basic_val.tsv").write_text("".join(line + end for line in lines), newline="")
    with pytest.raises(ValueError, match=message):
        load(LISTOPS, tmp_path, max_length=60)


def test_bytes_that_are_no_text_are_unknown_tokens(folder: Path, tmp_path: Path) -> None:
    for split in listops.SPLITS:
        (tmp_path / f"basic_{split}.tsv").write_bytes((folder / f"basic_{split}.tsv").read_bytes())
    (tmp_path / "basic_val.tsv").write_bytes(b"Source\tTarget\r\n[MAX 4 \xff ]\t4\r\n")
    with pytest.raises(ValueError, match=r"val\.tsv:2' to hold the tokens"):
        load(LISTOPS, tmp_path, max_length=60)


def test_long_sequences_are_cut_and_counted_or_refused(folder: Path) -> None:
    whole, cut = load(LISTOPS, folder, max_length=60)["train"], load(LISTOPS, folder, max_length=20)["train"]
    assert whole.truncated == 0
    assert cut.truncated == (whole.lengths > 20).sum() > 0
    assert (cut.lengths == np.minimum(whole.lengths, 20)).all()
    longest = int(whole.lengths.argmax())
    assert cut.__getitems__([longest]).tokens.tolist() == whole.__getitems__([longest]).tokens[:20].tolist()
    strict = dataclasses.replace(LISTOPS, overflow="error")
    with pytest.raises(
        ValueError, match=r"Expected 'train' example \d+ to have at most 20 tokens \(got \d+\)\. Raise --max-length"
    ):
        load(strict, folder, max_length=20)


def ragged(lengths: list[int], arity: int = 1) -> Split:
    ptr = np.concatenate([[0], np.cumsum(lengths)])
    count = len(lengths) // arity
    return Split(np.arange(ptr[-1]).astype(np.uint16), ptr, np.arange(count) % 3, arity)


def test_batches_are_ragged_and_keep_the_numbers_of_their_examples() -> None:
    split = ragged([3, 1, 4, 2])
    batch = split.__getitems__([2, 0])
    assert batch.tokens.tolist() == [4, 5, 6, 7, 0, 1, 2]
    assert batch.ptr.tolist() == [0, 4, 7]
    assert batch.labels.tolist() == [2, 0]
    assert batch.examples.tolist() == [2, 0]


def test_pairs_come_as_two_ragged_sides() -> None:
    split = ragged([3, 1, 4, 2], arity=2)
    assert len(split) == 2
    assert split.lengths.tolist() == [4, 6]
    batch = split.__getitems__([1, 0])
    assert [side.tolist() for side in batch.tokens] == [[4, 5, 6, 7, 0, 1, 2], [8, 9, 3]]
    assert [side.tolist() for side in batch.ptr] == [[0, 4, 7], [0, 2, 3]]
    assert batch.examples.tolist() == [1, 0]


def test_a_task_of_pairs_is_read_into_sides(tmp_path: Path) -> None:
    rows = Rows([], lambda: iter([((np.array([1, 2]), np.array([3])), 1), ((np.array([4]), np.array([5, 6, 7])), 0)]))
    pairs = dataclasses.replace(LISTOPS, arity=2, open=lambda root, split: {"train": rows, "val": rows, "test": rows})
    train = load(pairs, tmp_path, max_length=2)["train"]
    batch = train.__getitems__([0, 1])
    assert [side.tolist() for side in batch.tokens] == [[1, 2, 4], [3, 5, 6]]
    assert [side.tolist() for side in batch.ptr] == [[0, 2, 3], [0, 1, 3]]
    assert train.lengths.tolist() == [3, 3]
    assert train.truncated == 1


def test_majority_is_the_share_of_the_most_frequent_label() -> None:
    assert ragged([1] * 4).majority() == 0.5
    assert ragged([1] * 4).majority(np.array([0, 3, 1])) == 2 / 3  # labels 0, 0 and 1


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=80), budget=st.integers(1, 120))
def test_token_budget_covers_every_example_once(lengths: list[int], budget: int) -> None:
    batches = by_length(np.array(lengths), budget)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[example] for example in batch) <= budget for batch in batches)


def test_shuffled_batches_are_full_similar_and_a_function_of_seed_and_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 1003)
    buckets = LengthBuckets(lengths, batch_size=10, seed=5, pool=500)
    epoch = buckets.epoch(3)
    assert {len(batch) for batch in epoch} == {10}
    assert len(np.unique(np.concatenate(epoch))) == 1000
    assert np.mean([np.ptp(lengths[batch]) for batch in epoch]) < 50  # unsorted batches span about 800
    assert [batch.tolist() for batch in epoch] == [
        batch.tolist() for batch in LengthBuckets(lengths, batch_size=10, seed=5, pool=500).epoch(3)
    ]
    assert [batch.tolist() for batch in epoch] != [batch.tolist() for batch in buckets.epoch(4)]
    left_out = [set(range(1003)) - set(np.concatenate(buckets.epoch(number)).tolist()) for number in range(4)]
    assert len(set.union(*left_out)) > 3  # not always the same, nor the longest


def test_stream_goes_on_where_it_was_left() -> None:
    buckets = LengthBuckets(np.arange(1, 31), seed=0, batch_size=8)
    whole = list(buckets.stream(0, 20))
    for cut in (1, 3, 7, 19):
        assert list(buckets.stream(0, cut)) + list(buckets.stream(cut, 20 - cut)) == whole


def test_parts_of_the_stream_make_up_its_batches() -> None:
    buckets = LengthBuckets(np.arange(1, 31), seed=0, batch_size=8)
    parts = list(buckets.stream(2, 5, parts=4))
    assert {len(part) for part in parts} == {2}
    assert np.array(parts).reshape(5, 8).tolist() == list(buckets.stream(2, 5))


def test_sizes_of_batches_are_checked() -> None:
    with pytest.raises(ValueError, match=r"'batch-size' to be at most the number of examples, 3 \(got 4\)"):
        LengthBuckets(np.arange(3), batch_size=4, seed=0)


def test_command_line_generates_and_describes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "deep" / "listops"
    show = ["prepare", "--data", str(out)]
    make = [
        *show,
        "--generate",
        "--preset",
        "laptop",
        "--train",
        "9",
        "--val",
        "3",
        "--test",
        "5",
        "--max-length",
        "30",
    ]
    main(make)
    assert capsys.readouterr().out.startswith(f"{out}: written\n{out / 'prepared' / 'listops-release'}: written\n")
    (out / "manifest.json").touch()
    shutil.rmtree(out / "prepared")
    main(make)
    assert capsys.readouterr().out.startswith(f"{out}: already there, nothing to do\n")
    main(show)
    assert re.search(r"train: 9 examples, .* 0 truncated; labels .*, majority class", capsys.readouterr().out)
    with pytest.raises(SystemExit) as stop:
        main([*make, "--seed", "1"])
    assert stop.value.code == 2
    assert "to be new, empty or the data set asked for (got one made with seed 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*make, "--seed", "-1"])
    assert "Expected 'seed' to be at least 0 (got -1)" in capsys.readouterr().err
    (out / "basic_val.tsv").write_bytes(b"")
    with pytest.raises(SystemExit):
        main(show)
    assert re.search(r"basic_val\.tsv:1' to be the header .* \(got ''\)", capsys.readouterr().err)
    (out / "manifest.json").write_text("{")
    with pytest.raises(SystemExit):
        main(make)
    assert re.search(r"manifest\.json' to be the manifest of generated data .* Remove ", capsys.readouterr().err)
