"""The table of tasks: ListOps generated and read, ragged storage, length buckets."""

import collections
import csv
import dataclasses
import errno
import hashlib
import itertools
import random
import re
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
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
    "[MIN": min, "[MAX": max, "[MED": lambda values: int(statistics.median(values)), "[SM": lambda values: sum(values) % 10,
}  # fmt: skip


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


def lengths_of(law: Parameters, draws: int, seed: int) -> np.ndarray:
    """Of the trees that are kept, without round brackets."""
    trees = listops.draw_trees(law, draws, np.random.default_rng(seed))
    return np.array([len(source.replace("(", "").replace(")", "").split()) for source, _ in trees])


def test_law_of_lengths_is_that_of_the_recursive_generator() -> None:
    law = Parameters(max_depth=4, max_args=4, min_length=1, max_length=40, operator_probability=0.5)
    drawn = lengths_of(law, 40_000, 0)
    rng = random.Random(0)
    wanted = np.array([reference_length(1, law, rng) for _ in range(40_000)])
    wanted = wanted[(wanted > law.min_length) & (wanted < law.max_length)]
    assert abs(len(drawn) - len(wanted)) < 5 * np.sqrt(len(drawn))  # of as many draws, as many are kept
    counts = np.stack([np.bincount(lengths, minlength=40)[4:40] for lengths in (drawn, wanted)])
    counts = np.column_stack([counts[:, :25], counts[:, 25:].sum(1)])
    assert chi2_contingency(counts[:, counts.sum(0) > 20]).pvalue > 1e-6


def test_operators_and_digits_are_uniform() -> None:
    law = Parameters(max_depth=3, max_args=4, min_length=1, max_length=100, operator_probability=0.5)
    words = collections.Counter(
        word for source, _ in listops.draw_trees(law, 20_000, np.random.default_rng(1)) for word in source.split()
    )
    counts = [words.pop(word) for word in listops.VOCABULARY]
    assert {*words} == {"(", ")"}
    assert chisquare(counts[:10]).pvalue > 1e-6
    assert chisquare(counts[10:14]).pvalue > 1e-6
    assert counts[14] == sum(counts[10:14])


def test_about_one_tree_in_twelve_has_a_length_that_lra_allows() -> None:
    lengths = lengths_of(Parameters(), 6_000, 0)
    assert len(lengths) / 6_000 == pytest.approx(1 / 12, rel=0.15)
    assert lengths.mean() == pytest.approx(1_040, rel=0.05)


def test_files_are_those_of_every_version(folder: Path) -> None:
    """A data set that is generated again is the same, bit for bit."""
    content = b"".join((folder / f"basic_{split}.tsv").read_bytes() for split in listops.SPLITS)
    assert hashlib.sha256(content).hexdigest() == "5fd5c690539d70c78baefbd58e9e4310e93403089312989daea73443334b1296"
    first = itertools.islice(listops.draw_trees(Parameters(), 2048, np.random.default_rng(0)), 20)
    digest = hashlib.sha256(" ".join(source for source, _ in first).encode()).hexdigest()
    assert digest == "934e6a0706e2e6f472ae65c57ec14bd092475dde9ca4702d1d0359434b11c3d5"


def test_two_who_generate_at_once_and_one_who_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first, which is told here to stop once; what it leaves is removed."""
    draw, outcomes, calls = listops.draw_trees, list[bool](), list[int]()

    def slow(*arguments: Any) -> Iterator[tuple[str, int]]:
        calls.append(0)
        if len(calls) == 1:
            raise KeyboardInterrupt
        time.sleep(0.1)
        return draw(*arguments)

    def generate() -> None:
        outcomes.append(listops.generate(tmp_path / "listops", SMALL, seed=3, progress=False))

    monkeypatch.setattr(listops, "draw_trees", slow)
    with pytest.raises(KeyboardInterrupt):
        generate()
    assert [path.name for path in tmp_path.iterdir()] == [".listops.lock"]
    both = [threading.Thread(target=generate) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert sorted(outcomes) == [False, True]
    assert {path.name for path in tmp_path.iterdir()} == {"listops", ".listops.lock"}


def test_a_full_disk_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Iterator[tuple[str, int]]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(listops, "draw_trees", full)
    with pytest.raises(
        ValueError, match=r"listops' to be a place for generated data \(got: .*No space left on device\)"
    ):
        listops.generate(tmp_path / "listops", SMALL, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [".listops.lock"]


def test_generating_again_does_nothing_and_never_overwrites(folder: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert not listops.generate(folder, SMALL, seed=3, progress=False)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    with pytest.raises(ValueError, match=r"to be new, empty or the data set asked for \(got one made with .*'seed': 3"):
        listops.generate(folder, dataclasses.replace(SMALL, max_args=4), seed=3, progress=False)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(
        ValueError,
        match=r"to be the manifest of generated data \(got no such file\)\. Remove .* or choose another place",
    ):
        listops.generate(tmp_path, SMALL, progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": 0}, r"Expected 'train' to be at least 1 \(got 0\)"),
        ({"max_depth": 1}, r"Expected 'max_depth' to be at least 2 \(got 1\)"),
        ({"max_args": 1}, r"Expected 'max_args' to be at least 2 \(got 1\)"),
        ({"min_length": 0}, r"Expected 'min_length' to be at least 1 \(got 0\)"),
        ({"min_length": 50, "max_length": 51}, r"Expected 'max_length' to be at least 52 \(got 51\)"),
        ({"operator_probability": 0.0}, r"Expected 'operator_probability' to be in \(0, 1\] \(got 0\.0\)"),
        ({"operator_probability": float("nan")}, r"Expected 'operator_probability' to be in \(0, 1\] \(got nan\)"),
    ],
)
def test_parameters_out_of_range(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_more_trees_than_there_are() -> None:
    law = Parameters(train=500, max_depth=2, max_args=2, min_length=1, max_length=5, operator_probability=1.0)
    with pytest.raises(ValueError, match=r"at most the number of distinct trees \(got 4500, .* nothing beyond 400\)"):
        list(listops._distinct_rows(law, np.random.default_rng(0), patience=20))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["[MAX 4 7 ]\t7"], r"val\.tsv:1' to be the header 'Source\\tTarget' \(got b'\[MAX"),
        (["Source\tTarget", "[MAX 4 7 ]\t7", "( ( [MAX 4 ) 7"], r"val\.tsv:3' to have 2 columns \(got 6\)"),
        (["Source\tTarget", "[MAX 4 7 ]\t7\t7"], r"val\.tsv:2' to have 2 columns \(got 3\)"),
        (["Source\tTarget", "[MAX 4 7 ]\t10"], r"val\.tsv:2' to have a label from 0 to 9 in column 2 \(got b'10'\)"),
        (["Source\tTarget", "[MAX 4 12 ]\t4"], r"val\.tsv:2' to hold a tree of 0 1 .* \(got b'\[MAX 4 12 \]'\)"),
        (["Source\tTarget", "( )\t7"], r"val\.tsv:2' to hold a tree of 0 1 .* \(got b'\( \)'\)"),
        (["Source\tTarget"], r"Expected 'val' of listops to hold examples \(got none\)"),
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


def test_long_sequences_are_cut_and_counted(folder: Path) -> None:
    whole, cut = load(LISTOPS, folder, max_length=60)["train"], load(LISTOPS, folder, max_length=20)["train"]
    assert whole.truncated == 0
    assert cut.truncated == (whole.lengths > 20).sum() > 0
    assert (cut.lengths == np.minimum(whole.lengths, 20)).all()
    longest = int(whole.lengths.argmax())
    assert cut.__getitems__([longest]).tokens.tolist() == whole.__getitems__([longest]).tokens[:20].tolist()


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


def test_batches_follow_from_the_step_alone() -> None:
    buckets = LengthBuckets(np.arange(1, 31), seed=0, batch_size=8)
    whole = [buckets.batch(step).tolist() for step in range(20)]
    for step in (19, 3, 4, 0, 7):
        assert buckets.batch(step).tolist() == whole[step]
    assert whole[3:6] == [batch.tolist() for batch in buckets.epoch(1)]


def test_command_line_generates_and_describes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "deep" / "listops"
    show = ["prepare", "--data", str(out)]
    make = [
        *show, "--generate", "--preset", "laptop", "--train", "9", "--val", "3", "--test", "5", "--max-length", "30",
    ]  # fmt: skip
    main(make)
    assert capsys.readouterr().out.startswith(f"{out}: written\n{out / 'prepared' / 'listops-release'}: written\n")
    shutil.rmtree(out / "prepared")
    main(make)
    assert capsys.readouterr().out.startswith(f"{out}: already there, nothing to do\n")
    main(show)
    assert re.search(r"train: 9 examples, .* 0 truncated; labels .*, majority class", capsys.readouterr().out)
    with pytest.raises(SystemExit) as stop:
        main([*make, "--seed", "1"])
    assert stop.value.code == 2
    assert "to be new, empty or the data set asked for (got one made with" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*make, "--seed", "-1"])
    assert "Expected 'seed' to be at least 0 (got -1)" in capsys.readouterr().err
    (out / "basic_val.tsv").write_bytes(b"")
    with pytest.raises(SystemExit):
        main(show)
    assert re.search(r"Expected 'val' of listops to hold examples \(got none\)", capsys.readouterr().err)
    (out / "manifest.json").write_text("{")
    with pytest.raises(SystemExit):
        main(make)
    assert re.search(r"manifest\.json' to be the manifest of generated data .* Remove ", capsys.readouterr().err)
