"""Every program of the examples is killed and resumed, meets damaged files and a full disk, and answers for its own settings.

A *moment* is a step of an optimizer, or the time right before or after a file is brought to the disk or takes its name. The fast tests end a
run at a moment by an exception; the long ones kill processes.
"""

import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from problems import same
from torch.optim.optimizer import register_optimizer_step_post_hook

from examples.common import runs, tables

ROOT = Path(runs.__file__).parents[2]
KILLS = 10
WORDS = "the cat saw a dog ; it seems the dog , who saw a cat , heard no cat at all . "

pytestmark = [pytest.mark.examples, pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

PROGRAMS: dict[str, tuple[str, str]] = {  # module, and words of its command line
    "recall": (
        "examples.recall",
        "--choosers full sbm:estimator=local --densities 0.2 --steps 30 --channels 8 --batch-size 4",
    ),
    "language": (
        "examples.language_model",
        "--train TEXT --test TEXT --vocabulary 256 --length 32 --steps 24 --batch-size 2 --channels 16 --window 1 "
        "--methods full sbm --densities 0.2 --seeds 0 1",
    ),
    "sparsefinder": (
        "examples.sparsefinder.__main__",
        "--train TEXT --test TEXT --words 30 --length 16 --steps 24 --batch-size 2 --channels 16 --heads 2 --fit-sequences 8 "
        "--test-sequences 4 --epochs 1 --every 9 --windows 3 --sources window clusters sbm",
    ),
    "dcmm": (
        "examples.dcmm.__main__",
        "--methods full dcmm:num_clusters=3 sbm:num_clusters=3 --steps 20 --channels 8 --layers 2 --heads 2 --batch-size 8 --patch 4",
    ),
    "repeated": ("examples.repeated_tokens", "--quick --sparse --steps 30"),
    "lra": (
        "examples.lra.__main__",
        "--steps 30 --validate-every 10 --log-every 5 --save-every 3 --layers 1 --batch-size 8 --accumulate 2 --num-clusters 8 --channels 16 "
        "--head-channels 8 --ffn-channels 16 --dropout 0.1 --attention-dropout 0.1 --clip-norm 1 --accelerator cpu --data DATA",
    ),
}
QUICK = ("recall", "language", "sparsefinder", "dcmm")  # to the end within seconds


def make_inputs(folder: Path) -> dict[str, str]:
    """A text, and short ListOps; by the words that stand for them."""
    from examples.lra.data import listops

    (folder / "text").write_text(WORDS * 30)
    law: dict[str, Any] = {"max_depth": 2, "max_args": 30, "min_length": 8, "max_length": 24}
    parameters = listops.Parameters(train=50, val=20, test=30, operator_probability=1.0, **law)
    listops.generate(folder / "listops", parameters, progress=False)
    return {"TEXT": str(folder / "text"), "DATA": str(folder / "listops")}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def command(name: str, folder: Path, inputs: dict[str, str]) -> list[str]:
    """Words of the command that begins a run in its folder, and that goes on with it."""
    words = [inputs.get(word, word) for word in PROGRAMS[name][1].split()]
    if name != "lra":
        return [*words, "--output", str(folder)]
    if (folder / "settings.json").exists():
        return ["train", "--output", str(folder), "--accelerator", "cpu", "--resume"]
    return ["train", *words, "--output", str(folder)]


def make_small() -> dict[tuple[Any, str], Any]:
    """Makes tasks and images so small that they are there in no time; returns what was there before."""
    from examples import repeated_tokens
    from examples.arena import tasks as arena
    from examples.common import tasks
    from examples.dcmm import data

    whole, few = data.load("digits"), torch.arange(0, 400, 2)
    images = data.Images(
        whole.train[few], whole.train_labels[few], whole.test[:60], whole.test_labels[:60], whole.classes
    )
    task = tasks.Task(tasks.mqar, 40, {(16, 2): 1}, {(16, 2): 6}, 4, 30, 1e-3)
    small: dict[tuple[Any, str], Any] = {
        (arena, "TASKS"): {**arena.TASKS, "recall": task},
        (data, "load"): lambda *given: images,
        (repeated_tokens, "QUICK"): repeated_tokens.Settings(tokens=12, batch_size=4, num_clusters=4, evaluate_every=5),
    }
    before = {(place, name): getattr(place, name) for place, name in small}
    for (place, name), value in small.items():
        setattr(place, name, value)
    return before


@pytest.fixture
def small() -> Iterator[None]:
    before = make_small()
    yield
    for (place, name), value in before.items():
        setattr(place, name, value)


def run(name: str, folder: Path, inputs: dict[str, str], *more: str) -> None:
    import_module(PROGRAMS[name][0]).main([*command(name, folder, inputs), *more])


@contextmanager
def counting(act: Callable[[], None]) -> Iterator[None]:
    """Calls a function at every moment."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            act()
            found = function(*given)
            act()
            return found

        return counted

    handle = register_optimizer_step_post_hook(lambda *given: act())
    try:
        with patch.object(os, "replace", around(os.replace)), patch.object(os, "fsync", around(os.fsync)):
            yield
    finally:
        handle.remove()


# ------------------------------------------------------------------ what a run ends with

MEASURED = ("seconds", "train_ms", "infer_ms", "tokens_per_second", "peak_memory_bytes")  # differ from run to run


def without(content: Any) -> Any:
    """Nests without what was measured by a clock."""
    if isinstance(content, dict):
        return {key: without(value) for key, value in content.items() if key not in MEASURED}
    return [without(value) for value in content] if isinstance(content, list | tuple) else content


def ends(folder: Path) -> dict[str, Any]:
    """What lies in a folder: rows, states, and results; figures by their names."""
    found: dict[str, Any] = {}
    for path in sorted([*folder.iterdir(), *folder.glob("pretrain/*")]):
        if path.suffix == ".csv":
            with path.open(newline="") as file:
                found[path.name] = without(list(csv.DictReader(file)))
        elif path.suffix in (".pt", ".ckpt"):
            found[path.name] = without(runs.read_checkpoint(path))
        elif path.suffix == ".json":
            content = json.loads(path.read_text())
            found[path.name] = without(content if isinstance(content, list) or path.name == "curves.json" else {
                key: value for key, value in content.items() if key not in ("tables", "sha256")
            })  # fmt: skip
        else:
            found[path.name] = None
    return found


def check_same_ends(one: Path, other: Path) -> None:
    first, second = ends(one), ends(other)
    assert first.keys() == second.keys()
    for name in first:
        assert same(first[name], second[name]) or str(first[name]) == str(second[name]), name  # NaN too
    assert not list(other.glob("*.partial"))


# ------------------------------------------------------------------ kills


class Killed(BaseException):
    """Ends a run as abruptly as can be done within a process."""


def kill_at(moment: int) -> Callable[[], None]:
    left = [moment]

    def act() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    return act


@pytest.fixture(scope="module")
def wholes() -> dict[str, Path]:
    return {}


@pytest.fixture
def whole(
    request: pytest.FixtureRequest, wholes: dict[str, Path], inputs: dict[str, str], small: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:  # fmt: skip
    """Runs that went through, each made once."""

    def get(name: str) -> Path:
        if name not in wholes:
            wholes[name] = tmp_path_factory.mktemp("runs") / name
            run(name, wholes[name], inputs)
        return wholes[name]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_run_that_was_stopped_ends_with_the_same_bits(
    name: str, whole: Callable[[str], Path], inputs: dict[str, str], tmp_path: Path
) -> None:
    there = whole(name)
    for moment in (9, 23, 2):  # of a run each; the last while something is written
        with counting(kill_at(moment)), pytest.raises(Killed):
            run(name, tmp_path / "broken", inputs)
        torch.rand(moment)  # other random numbers than those that the run would have gone on with
    run(name, tmp_path / "broken", inputs)
    check_same_ends(there, tmp_path / "broken")


DRIVER = """
import json, os, signal, sys, traceback
sys.path[:0] = [{tests!r}, {root!r}]
from test_runs import PROGRAMS, counting, import_module, make_small
make_small()
program = import_module(PROGRAMS[{name!r}][0])
for line in sys.stdin:  # each in a process of its own, which has all modules already
    moment, words = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)  # what programs print
        seen = 0
        def act():
            global seen
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            with counting(act):
                program.main(words)
            with open({seen!r}, "w") as file:
                file.write(str(seen))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked")
@pytest.mark.parametrize("name", PROGRAMS)
def test_ten_kills_change_no_bit(name: str, inputs: dict[str, str], tmp_path: Path) -> None:
    whole, killed, seen, log = (tmp_path / part for part in ("whole", "killed", "seen", "log"))
    code = DRIVER.format(tests=str(ROOT / "tests"), root=str(ROOT), name=name, seen=str(seen))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with log.open("w") as errors, subprocess.Popen([sys.executable, "-c", code], stderr=errors, **pipes) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None

        def ends_by_itself(folder: Path, moment: int = 0) -> bool:
            driver.stdin.write(json.dumps([moment, command(name, folder, inputs)]) + "\n")  # type: ignore[union-attr]
            driver.stdin.flush()  # type: ignore[union-attr]
            status = int(driver.stdout.readline())  # type: ignore[union-attr]
            assert status in (0, signal.SIGKILL), log.read_text()[-3000:]
            return status == 0

        assert ends_by_itself(whole)
        most, kills, number = int(seen.read_text()) // 5, 0, random.Random(name)
        assert most > 4
        while kills < KILLS:
            if not ends_by_itself(killed, number.randint(1, most)):
                kills += 1
            else:  # it came to its end before; the next one begins anew
                check_same_ends(whole, killed)
                shutil.rmtree(killed)
        assert ends_by_itself(killed)
        driver.stdin.close()
    check_same_ends(whole, killed)


INTERRUPTED = """
import sys
from pathlib import Path
from examples.common.command import Command
from examples.common.runs import claim

given = Command("arena", None).read([])
with claim(Path(sys.argv[1]), "arena", {{}}):
    {act}
"""


def test_ctrl_c_ends_a_program_with_one_line_and_errors_as_ever(tmp_path: Path) -> None:
    def end(act: str) -> tuple[int, str]:
        words = [sys.executable, "-c", INTERRUPTED.format(act=act), str(tmp_path)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    line = f"\nStopped. The same command goes on from what is in {tmp_path}.\n"
    assert end("raise KeyboardInterrupt") == (130, line)
    assert end("1 / 0")[0] == 1
    assert "ZeroDivisionError: division by zero" in end("1 / 0")[1]


# ------------------------------------------------------------------ damage

READ = {  # a file that a program reads, and what stands in its way
    ("recall", "recall-full-dense-1.0-0.pt"): ["rows.csv"],
    ("recall", "rows.csv"): [],
    ("recall", "settings.json"): [],
    ("sparsefinder", "model-0.pt"): [],
    ("dcmm", "digits-full-0.best.pt"): ["rows.csv"],
    ("repeated", "sbm.ckpt"): [],
    ("lra", "last.ckpt"): ["results.json"],
    ("lra", "best.ckpt"): ["results.json"],
    ("lra", "results.json"): [],
    ("lra", "settings.json"): [],
}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: 2 * len(content) // 3],
    "cut by a line": lambda content: content.rstrip(b"\n").rpartition(b"\n")[0] + b"\n",
    "a bit": lambda content: (
        content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 4]) + content[len(content) // 2 + 1 :]
    ),
    "emptied": lambda content: b"",
    "something else": lambda content: b"\x80\x02 neither text nor an archive",
}
WAYS_OUT = r"(?i)(take it from a backup|take another --output|delete|restore|start a new run)"


def refusal(name: str, folder: Path, inputs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a program says when it ends by a mistake."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(name, folder, inputs)
    return f"{stop.value.code} {capsys.readouterr().err}"


def check_told(said: str, path: Path) -> None:
    assert str(path) in said
    assert re.search(r"Expected '.*' to .*\(got .*\)\.", said)
    assert re.search(WAYS_OUT, said.partition("(got ")[2])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file"), READ)
def test_damaged_files_are_named(
    name: str, file: str, whole: Callable[[str], Path], inputs: dict[str, str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = tmp_path / "run"
    shutil.copytree(whole(name), folder)
    for other in READ[name, file]:
        (folder / other).unlink()
    path = folder / file
    content = path.read_bytes()
    for kind, damage in DAMAGES.items():
        if kind == "cut by a line" and path.suffix != ".csv":
            continue
        path.write_bytes(damage(content))
        check_told(refusal(name, folder, inputs, capsys), path)
    path.unlink()
    path.mkdir()
    check_told(refusal(name, folder, inputs, capsys), path)
    path.rmdir()
    if path.suffix in (".pt", ".ckpt"):  # a whole one, of a run with other settings
        path.write_bytes(content)
        state = runs.read_checkpoint(path)
        known = state["run"]
        known["seed"] += 1
        runs.write_checkpoint(path, state)
        check_told(refusal(name, folder, inputs, capsys), path)
    path.write_bytes(content)
    run(name, folder, inputs)


def test_damaged_prepared_data_are_named(inputs: dict[str, str], tmp_path: Path) -> None:
    from examples.lra.data.prepare import load
    from examples.lra.data.tasks import TASKS

    def read_data() -> Any:
        return load(TASKS["listops"], Path(inputs["DATA"]), max_length=100, prepared=tmp_path / "prepared")

    read_data()
    (path,) = (tmp_path / "prepared").glob("*/manifest.json")
    content = path.read_bytes()
    for kind in ("cut", "a bit", "emptied", "something else"):
        path.write_bytes(DAMAGES[kind](content))
        with pytest.raises(ValueError, match=re.escape(f"'{path}'")) as told:
            read_data()
        assert re.search(r"(Remove|Restore)", str(told.value)), kind
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=re.escape(f"'{path}'")):
        read_data()
    path.rmdir()
    path.write_bytes(content)
    read_data()


@pytest.mark.parametrize("kind", ["cut", "cut by a line", "a bit", "emptied", "a carriage return"])
def test_a_damaged_table_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with runs.claim(tmp_path, "recall", {"channels": 8}):
        tables.add(path, [{"run": "full", "seed": 0, "loss": 0.123456}, {"run": "full", "seed": 1, "loss": 0.7}])
    content = path.read_bytes()
    path.write_bytes(DAMAGES[kind](content) if kind in DAMAGES else content[:20] + b"\r" + content[21:])
    message = re.escape(
        f"Expected '{path}' to be as it was written (got other bytes than settings.json says). It is damaged"
    )
    for act in (lambda: tables.read(path), lambda: tables.add(path, [{"run": "full", "seed": 2, "loss": 0.5}])):
        with pytest.raises(runs.RunError, match=message):
            act()
    (tmp_path / "settings.json").unlink()  # without it, as in docs/: what has lost its form is told
    if kind in ("cut", "emptied", "a carriage return"):
        with pytest.raises(runs.RunError, match=re.escape(f"{path}' to ")):
            tables.read(path)


def test_a_kill_between_a_table_and_its_checksum_does_no_harm(tmp_path: Path) -> None:
    row: dict[str, Any] = {"run": "full", "loss": 1.0}
    with runs.claim(tmp_path, "recall", {"channels": 8}):
        tables.add(tmp_path / "rows.csv", [row])
        for moment in range(1, 9):
            with counting(kill_at(moment)), pytest.raises(Killed):
                tables.add(tmp_path / "rows.csv", [{**row, "loss": moment}])
            found = [each["loss"] for each in tables.read(tmp_path / "rows.csv")]
            assert found == [1.0] + [8.0] * (moment == 8)


# ------------------------------------------------------------------ other settings, and a full disk


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("recall", ["--channels", "16"], "Expected 'channels of recall' to be 8"),
        ("recall", ["--layers", "3", "--choosers", "window"], "Expected 'layers' to be 2"),
        ("language", ["--channels", "8"], "Expected 'channels' to be 16"),
        ("language", ["--test", "OTHER"], "Expected 'checksum of test' to be '"),
        ("sparsefinder", ["--epochs", "2"], "Expected 'epochs' to be 1"),
        ("sparsefinder", ["--train", "OTHER"], "Expected 'checksum of train' to be '"),
        ("dcmm", ["--channels", "16"], "Expected 'channels of digits' to be 8"),
        ("repeated", ["--steps", "40"], "Expected 'steps' to be 30"),
    ],
)
def test_a_finished_run_does_not_answer_for_other_settings(
    name: str, more: list[str], message: str, inputs: dict[str, str], small: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The folder holds what a run says of itself first, and nothing is computed."""
    folder, module = tmp_path / "run", import_module(PROGRAMS[name][0])
    with counting(kill_at(9)), pytest.raises(Killed):
        run(name, folder, inputs)
    (tmp_path / "other").write_text(WORDS * 31)
    more = [str(tmp_path / "other") if word == "OTHER" else word for word in more]
    with pytest.raises(SystemExit), counting(lambda: pytest.fail("something was computed or written")):
        module.main([*command(name, folder, inputs), *more])
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert f"as in {folder / 'settings.json'} (got " in said
    assert "Take another --output for other settings." in said


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        ("language_model", "--corpus stdlib --save FILE", "Expected 'save' to be a folder that can be made (got FILE, but FILE is a file)"),
        ("language_model", "--corpus stdlib --save DIR", "Expected 'save' to be a new or empty folder, or that of a saved model (got DIR, with file)"),
        ("glue.__main__", "pretrain --texts FILE --output FILE/a", "Expected 'output' to be a folder that can be made (got FILE/a, but FILE is a file)"),
        ("lra.__main__", "train --data DATA --output DIR/run --export FILE/a", "Expected 'export' to be a folder that can be made"),
        ("benchmarks.__main__", "kernels --output FILE", "Expected 'output' to be a folder that can be made"),
        ("benchmarks.gpu", "--device cpu --output FILE", "Expected 'output' to be a folder that can be made"),
        ("benchmarks.__main__", "report --output DIR/a", "Expected 'output' to hold results (got none in DIR/a). Measure a suite first."),
        ("language_model", "--corpus stdlib --seeds -1", "Expected 'seeds' to be at least 0 (got [-1])"),
        ("language_model", "--train FILE", "Expected 'train' and 'test' to be files of text (got no test). Give their paths"),
        ("repeated_tokens", "--steps 0 --output DIR/a", "Expected 'steps' to be above 0 (got 0)"),
        ("graphs.__main__", "", "Expected 'data' to be the folder of the archives (got none). Pass its path"),
        ("graphs.__main__", "--graphs cluster minesweeper", "Expected 'data'"),
        ("graphs.__main__", "--data DIR --heads 3", "'heads' to divide 'channels'"),
        ("graphs.__main__", "--data nowhere", "folder that holds chameleon_filtered.npz"),
        ("graphs.__main__", "--graphs pattern --conv transformer", "'conv' among sage, gcn, gin, gated for graphs without features of edges"),
        ("glue.__main__", "finetune --glue . --output absent", "Pretrain a model into this --output first"),
        ("sparsefinder.__main__", "", "Expected 'train' and 'test' to be files of text (got no train, no test)"),
        ("sparsefinder.__main__", "--report --windows 2", "Expected 'windows' to be odd"),
        ("sparsefinder.__main__", "--report --channels 20", "Expected 'channels' to be a multiple of 4 x heads"),
        ("recall", "--choosers full:probes=3", "Expected options of 'full' in 'methods'"),
        ("recall", "--densities 1", "Expected 'densities' in (0, 1) (got [1.0]). Full attention is 'full'."),
        ("dcmm.__main__", "--methods dcmm:degree=tanh", "Expected 'degree'"),
        ("dcmm.__main__", "--methods full sbm:estimator=magic", "Expected 'estimator'"),
        ("dcmm.__main__", "--methods dcmm --ffn 8", "Expected 'ffn' above"),
        ("dcmm.__main__", "--patch 3", "Expected 'patch' to divide the side of the images, 8 (got 3)"),
        ("dcmm.__main__", "--validation 0.001", "Expected 'validation' to hold out an image or more of each of 10 classes"),
        ("dcmm.__main__", "--data nowhere", "Expected 'data' to be 'digits' or a folder of images (got 'nowhere')"),
        ("dcmm.__main__", "--pictures cat", "Expected 'pictures' to be a class of the images, among 0, 1"),
        ("dcmm.__main__", "--pictures 3 --methods full", "Expected 'methods' with a block model"),
        ("arena.__main__", "--choosers sparse", "Expected '--choosers' among full, window, random"),
        ("arena.__main__", "--tasks recall mine.txt", "Expected 'tasks' among recall, joint, two-hop"),
        ("recall", f"--output DIR/{256 * 'n'}", "Expected 'output' to be a folder that can be written (got 'File name too long'"),
    ],
)  # fmt: skip
def test_places_and_options_are_checked_before_anything_is_computed(
    module: str, words: str, message: str, inputs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    known = {"FILE": str(tmp_path / "file"), "DIR": str(tmp_path), "DATA": inputs["DATA"]}

    def filled(text: str) -> str:
        return re.sub("|".join(known), lambda match: known[match[0]], text)

    with pytest.raises(SystemExit), counting(lambda: pytest.fail("something was computed or written")):
        import_module(f"examples.{module}").main([filled(word) for word in words.split()])
    assert filled(message) in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_table_without_settings_is_not_added_to(
    inputs: dict[str, str], small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables.add(tmp_path / "rows.csv", [{"task": "recall", "method": "full", "seed": 0}])
    said = refusal("recall", tmp_path, inputs, capsys)
    assert (
        f"Expected '{tmp_path / 'settings.json'}' to be what rows.csv was made with (got no such file). Restore it"
        in said
    )


def test_a_folder_has_one_process_at_a_time(
    inputs: dict[str, str], small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with runs.hold(tmp_path):
        assert "no other process is at work" in refusal("recall", tmp_path, inputs, capsys)


@pytest.mark.parametrize("place", ["common", "arena", "dcmm", "glue", "graphs", "sparsefinder"])
def test_all_files_are_written_in_one_place(place: str) -> None:
    """So that a full disk and a kill are handled alike at each file; two programs show it below."""
    raw = re.compile(r"\.(write_text|write_bytes)\(|open\([^)]*[\"'][wax]b?[\"']|\.savefig\((?!data)|to_csv\(")
    for path in (ROOT / "examples" / place).glob("*.py"):
        assert path.name == "runs.py" or not raw.search(path.read_text()), path


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("name", ["recall", "repeated"])
def test_a_full_disk_is_named_at_each_file(
    name: str, whole: Callable[[str], Path], inputs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [path for path in whole(name).rglob("*") if path.is_file() and path.name != ".lock"]
    assert len(files) > 3
    folder = tmp_path / "run"
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns):  # in the order in which they are written
        path = folder / file.relative_to(whole(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}.partial").symlink_to("/dev/full")
        said = refusal(name, folder, inputs, capsys)
        assert f"Expected 'output' to have room for {path.name}, " in said
        place = f"(got 'No space left on device' in {path.parent})"
        assert f"bytes {place}. What was written before is whole: make room" in said
        assert not list(folder.rglob("*.partial"))
    run(name, folder, inputs)
    check_same_ends(whole(name), folder)
