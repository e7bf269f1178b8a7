"""Mutation testing: puts one small fault at a time into a line of the library, and runs the tests of that line.

python -m tests.mutation                    tests 200 mutants; after a kill, the same command continues
python -m tests.mutation --report           shows the verdicts so far, and each mutant that survived

In: a number of mutants and a seed. Out: `mutants.csv`, one row per mutant, in a folder. Not here: the faults, which are the operators of cosmic-ray.

All fast tests of the library run once under coverage.py, which records the tests of each line and the seconds of each test. Then lines are drawn, each
with the same chance, among those that a test runs and an operator can change, and a place in the line and an operator in the same way. Each mutant gets
its own copy of the repository. Its tests are those that run the line, or, if the line runs at import, those that run any line of the file, and those of
the public interface. Tests of the module come first, then the quickest, until they sum to 60 seconds. A mutant is killed by the first test that fails, and by a run that takes longer than
five times these seconds and a minute.

Left out: annotations, `__all__`, `raise` statements, f-strings, files of CUDA kernels and of what numba compiles into kernels, and lines that no fast test
runs in its own process: bodies of kernels, and code that only `torch.compile` or a subprocess reaches. Kernels come from the repository's cache, whatever
the mutant is. So run `pytest` first, which compiles them.
"""

import ast
import contextlib
import difflib
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage import Coverage, CoverageData
from coverage.parser import PythonParser
from tqdm import tqdm

from examples.common.command import Command, require
from examples.common.tables import Row, add, markdown, read

ROOT = Path(__file__).parents[1]
NOT_COPIED = {".git", "data", "models", "runs"}
OPERATORS = {name: get_operator(name)() for name in operator_names() if not get_operator(name).arguments()}
SLOW_IMPORTS = ["torch_geometric.data", "torch._dynamo", "numba", "hypothesis", "scipy.stats", "matplotlib.pyplot"]
SERVER = multiprocessing.get_context("forkserver")  # forks a process that has these, and not the library
SERVER.set_forkserver_preload(SLOW_IMPORTS)
KERNELS = re.compile(r"ops/cuda/|ops/cpu/(channels|random_simd|simd)\.py")
SECONDS = 60  # of the tests of a mutant
INTERFACE = ("test_public_api.py", "test_signatures.py")  # they import what others run


def choices(source: str) -> dict[int, dict[Any, list[tuple[str, int]]]]:
    """The operators that can change a source, each with its occurrence: by line, then by position."""
    spared, nodes = [], [node for node in ast_nodes(get_ast(source)) if node.type not in ("name", "newline")]
    for node in ast.walk(ast.parse(source)):
        export = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        whole = node if export or isinstance(node, ast.Raise | ast.JoinedStr) else None
        parts: tuple[Any, ...] = (whole, getattr(node, "annotation", None), getattr(node, "returns", None))
        spared += [((x.lineno, x.col_offset), (x.end_lineno, x.end_col_offset)) for x in parts if x]
    found: dict[int, dict[Any, list[tuple[str, int]]]] = defaultdict(lambda: defaultdict(list))
    for name, operator in OPERATORS.items():
        if "_Is" in name and not name.endswith(("_Is_IsNot", "_IsNot_Is")):
            continue  # "is" only turns into "is not", and back: with "==", most of the code does the same
        for occurrence, (start, _) in enumerate(place for node in nodes for place in operator.mutation_positions(node)):
            if not any(first <= start < last for first, last in spared):
                found[start[0]][start].append((name, occurrence))
    return found


def run_by(source: str, line: int, traced: dict[int, list[str]], of_interface: Iterable[str] = ()) -> set[str]:
    """The tests that run a statement; if it runs at import, in the context without a name, those of any line of its file and of the interface."""
    parser = PythonParser(source)
    parser.parse_source()
    lines = [number for number in traced if parser.first_line(number) == parser.first_line(line)]
    imported = any("" in traced[number] for number in lines)
    found = {test for number in (traced if imported else lines) for test in traced[number]}
    return found.union(of_interface) if imported else found


def in_order(tests: set[str], file: str, seconds: dict[str, float]) -> list[str]:
    """Tests of the module, then the quickest, as many as fit the time; those of a file together."""
    own = {f"test_{part}.py" for part in Path(file).with_suffix("").parts} | {Path(file).name, *INTERFACE}
    spent, chosen = 0.0, dict[str, list[str]]()
    for test in sorted(tests, key=lambda test: (Path(test.split("::")[0]).name not in own, seconds[test], test)):
        if (spent := spent + seconds[test]) <= SECONDS or not chosen:
            chosen.setdefault(test.split("::")[0], []).append(test)
    return [test for of_file in chosen.values() for test in of_file]


class Plugin:
    """Runs the given tests in their order, or traces all of them."""

    def __init__(self, tests: Sequence[str], trace: Coverage | None) -> None:
        self.tests, self.trace = tests, trace
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if not self.trace:
            found = {item.nodeid: item for item in items}
            items[:] = [found[test] for test in self.tests if test in found]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.trace:
            self.trace.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)


def in_child(folder: Path, tests: Sequence[str], trace: Path | None, answer: Connection) -> None:
    """Runs tests of a copy of the repository; answers with pytest's exit code, the tests that failed, and the seconds of each."""
    from numba.core.caching import IndexDataCacheFile

    os.setsid()
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    os.environ.setdefault("SBM_PYG_DATA", str(ROOT.parent / "shared" / "data"))
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # its files know seconds, in which a second mutant may follow
    IndexDataCacheFile._source_stamp = property(lambda file: ANY, lambda file, stamp: None)  # kernels of any source
    coverage = Coverage(trace, source=["sbm_pyg"], config_file=False, messages=False) if trace else None
    plugin, files = Plugin(tests, coverage), dict.fromkeys(test.split("::")[0] for test in tests)
    options = "-p no:cacheprovider --hypothesis-seed=0" + " -x" * (not trace)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        if coverage:
            coverage.set_option("run:relative_files", True)
            coverage.start()
        code = pytest.main(["-Wignore:Module already imported", *options.split(), *files], [plugin])
        if coverage:
            coverage.stop()
            coverage.save()
    answer.send((int(code), plugin.failed, plugin.seconds))


def run(tests: Sequence[str], limit: float | None, trace: Path | None = None, file: str = "", source: str = "") -> Any:
    """The answer of a child in a copy of the repository, in which a file has another source."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "copy")
        shutil.copytree(ROOT, folder, ignore=lambda place, _: NOT_COPIED if Path(place) == ROOT else ())
        if file:
            (folder / file).write_text(source)
        ours, theirs = SERVER.Pipe(duplex=False)
        child: Any = SERVER.Process(target=in_child, args=(folder, tests, trace, theirs))
        child.start()
        theirs.close()
        try:
            return ours.recv() if ours.poll(limit) else (-1, ["time-out"], {})
        except EOFError:
            child.join()
            require(child.exitcode < 0, "pytest to run", "the error above", "Repair it.")
            return -1, ["crash"], {}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.join()


def traced(folder: Path) -> dict[str, float]:
    """Seconds of each test that passes; a file of coverage.py beside them holds the tests of each line."""
    record, sources = folder / "trace.json", sorted(ROOT.glob("sbm_pyg/**/*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    if not record.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _, failed, seconds = run((), None, folder / "trace.coverage")
        passed = {test: spent for test, spent in seconds.items() if test not in failed}
        record.write_text(json.dumps({"sources": digest, "seconds": passed}))
    known = json.loads(record.read_text())
    require(known["sources"] == digest, f"'{record}' to be of these sources", "others", "Give another --output.")
    return known["seconds"]


def drawn(seed: int, trace: CoverageData, seconds: dict[str, float]) -> Iterator[tuple[Row, str, list[str]]]:
    """Mutants in the order in which they are drawn: the beginning of a row, the mutated source, and the tests."""
    sources = {file: (ROOT / file).read_text() for file in sorted(trace.measured_files())}
    found = {file: choices(source) for file, source in tqdm(sources.items(), "Reading", unit="file")}
    lines = [(file, line) for file, of_file in found.items() for line in sorted(of_file)]
    random.Random(seed).shuffle(lines)
    of_interface = [test for test in seconds if Path(test.split("::")[0]).name in INTERFACE]
    for file, line in ((file, line) for file, line in lines if not KERNELS.search(file)):
        chance, source = random.Random(f"{seed} {file} {line}"), sources[file]
        operator, occurrence = chance.choice(found[file][line][chance.choice(sorted(found[file][line]))])
        mutated = mutate_code(source, OPERATORS[operator], occurrence)
        try:
            compile(mutated, file, "exec")
        except SyntaxError:  # it turned the star of a signature, say, into a plus
            continue
        if tests := run_by(source, line, trace.contexts_by_lineno(file), of_interface) & seconds.keys():
            edits = [*difflib.unified_diff(source.splitlines(), mutated.splitlines(), n=0)][3:]
            before, after = (" ".join(edit[1:].strip() for edit in edits if edit[0] == sign) for sign in "-+")
            row = {"file": file, "line": line, "operator": operator.removeprefix("core/")}
            yield row | {"before": before, "after": after}, mutated, in_order(tests, file, seconds)


def judged(row: Row, mutated: str, tests: Sequence[str], seconds: dict[str, float]) -> Row:
    """The whole row of a mutant."""
    start, limit = time.monotonic(), 60 + 5 * sum(seconds[test] for test in tests)
    code, failed, _ = run(tests, limit, file=row["file"], source=mutated)
    by = failed[0] if failed else "import" if code else ""
    end = {
        "tests": len(tests), "seconds": time.monotonic() - start, "verdict": "killed" if by else "survived", "by": by,
    }  # fmt: skip
    return row | end


def report(rows: Sequence[Row]) -> str:
    """How many mutants were killed, and those that survived."""
    alive = [row for row in rows if row["verdict"] == "survived"]
    lines = [(f"{row['file']}:{row['line']:.0f}", row["before"], row["after"]) for row in alive]
    killed = f"{len(rows) - len(alive)} of {len(rows)} mutants are killed. These survive:"
    return killed + "\n\n" + markdown(("source", "before", "after"), lines)


def main(arguments: Sequence[str] | None = None) -> None:
    command = Command("python -m tests.mutation", __doc__)
    command.option("mutants", 200, "how many to test", least=1)
    command.option("seed", 0, "of the draw")
    command.option("output", ROOT / "runs" / "mutation", "folder of the table and of the trace", type=Path)
    command.add_argument("--report", action="store_true", help="show what the folder holds, and test nothing")
    given = command.read(arguments)
    table = given.output / "mutants.csv"
    if not given.report:
        done, seconds = len(read(table)), traced(given.output)
        trace = CoverageData(str(given.output / "trace.coverage"))
        trace.read()
        mutants = islice(drawn(given.seed, trace, seconds), done, given.mutants)
        for row, mutated, tests in tqdm(mutants, "Testing", given.mutants, initial=done):
            add(table, [judged(row, mutated, tests, seconds)])
    print(report(read(table)))


if __name__ == "__main__":
    main()
