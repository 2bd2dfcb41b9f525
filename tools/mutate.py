"""A sample of mutants, and which of them the tests do not find.

    python tools/mutate.py sample mutants.json --seed 1 --count 300      (needs cosmic-ray and coverage)
    python tools/mutate.py run mutants.json results.json --workers 16    (needs neither)

Each mutant changes one line that tests run, all lines alike. It runs against the tests that run this line, the short
ones first, in a copy of the tree. A survivor is a mutant that no test finds: a test is missing, or the
mutant computes the same.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import json
import os
import queue
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MUTATED = ("graph_passes/passes/offload", "graph_passes/passes/fuse", "custom_ops/fusion")
TESTS = ("tests/pure", *(f"tests/jit/test_fusion_{name}.py" for name in ("random", "rows", "programs", "templates")))
COPIED = ("custom_ops", "graph_passes", "tests", "tfmem", "benchmarks", "examples", "docs", "tools")
MEMORY = 8 << 30  # bytes that the tests of a mutant may take: some mutants never stop
SKIPPED = ("core/RemoveDecorator", "core/VariableInserter", "core/VariableReplacer")
LEFT_OUT = "statement left out"
SURVIVED, SLOW = "survived", "killed: too slow"

Place = tuple[str, int]  # an operator, and which of its occurrences; or a line that is left out


class Recorder:
    """Records each test's seconds and whether it passed; with coverage, also the lines that it runs.

    Tests that are not `wanted` are left out after they were collected: an id that pytest does not know ends its run.
    """

    def __init__(self, coverage: Any = None, wanted: Sequence[str] = ()) -> None:
        self._coverage = coverage
        self._wanted = frozenset(wanted)
        self.seconds: Counter[str] = Counter()
        self.failed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._wanted:
            items[:] = [item for item in items if item.nodeid in self._wanted]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self._coverage:
            self._coverage.switch_context(item.nodeid)
        result = yield
        if self._coverage:
            self._coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)


def run_tests(tests: Sequence[str], recorder: Recorder, *options: str) -> int:
    """Run pytest in this process; failing examples of hypothesis are not shrunk."""
    from hypothesis import Phase, settings

    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None)
    settings.load_profile("mutants")
    given = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=no", *options, *tests]
    return int(pytest.main(given, plugins=[recorder]))


def sample(output: Path, seed: int, count: int, folders: Sequence[str], tests: Sequence[str]) -> None:
    """Write mutants of lines that the tests run, and for each the tests that do."""
    from coverage import Coverage

    coverage = Coverage(data_file=None, config_file=False, source=[str(ROOT / folder) for folder in folders])
    recorder = Recorder(coverage)
    coverage.start()
    run_tests(tests, recorder)
    coverage.stop()
    data = coverage.get_data()
    passed = [name for name in sorted(recorder.seconds) if name not in recorder.failed]
    number = {name: place for place, name in enumerate(passed)}
    lines: list[tuple[Path, list[Place], list[int]]] = []
    for path in sorted(map(Path, data.measured_files())):
        by_line = {line: set(names) & number.keys() for line, names in data.contexts_by_lineno(str(path)).items()}
        anywhere = set().union(*by_line.values())
        for line, places in places_of(path.read_text()).items():
            runs = by_line.get(line, set[str]())
            if line in by_line and anywhere:  # what runs at import is run by every test of the module
                lines.append((path, places, sorted(number[name] for name in runs or anywhere)))
    draw, chosen = random.Random(seed), list[dict[str, Any]]()
    for path, places, runs in draw.sample(lines, len(lines)):
        changes = (change for place in draw.sample(places, len(places)) if (change := changed(path.read_text(), place)))
        if len(chosen) < count and (first := next(changes, None)):
            chosen.append({"file": str(path.relative_to(ROOT)), **first, "tests": runs})
    output.write_text(json.dumps({"seed": seed, "lines": len(lines), "tests": passed, "mutants": chosen}, indent=1))
    print(f"{len(chosen)} mutants of {len(lines)} lines, {len(passed)} tests")


def places_of(source: str) -> dict[int, list[Place]]:
    """The mutations of each line: changes by operators of Cosmic Ray, and statements that can be left out."""
    from cosmic_ray.ast import Visitor, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    class Nodes(Visitor):
        def __init__(self) -> None:
            self.found: list[Any] = []

        def visit(self, node: Any) -> Any:
            self.found.append(node)
            return node

    nodes, found = Nodes(), dict[int, list[Place]]()
    nodes.walk(get_ast(source))
    for name in operator_names():
        if name not in SKIPPED:
            operator = get_operator(name)()
            positions = (position for node in nodes.found for position in operator.mutation_positions(node))
            for occurrence, ((line, _), _) in enumerate(positions):
                found.setdefault(line, []).append((name, occurrence))
    for node in ast.walk(ast.parse(source)):
        called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Yield | ast.YieldFrom)
        if (called or isinstance(node, ast.AugAssign)) and node.lineno == node.end_lineno:
            found.setdefault(node.lineno, []).append((LEFT_OUT, node.lineno))
    return found


def changed(source: str, place: Place) -> dict[str, Any] | None:
    """A mutant; None if it would differ only in an annotation."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    name, which = place
    lines = source.splitlines()
    if name == LEFT_OUT:
        text = lines[which - 1]
        mutated = [*lines[: which - 1], text[: len(text) - len(text.lstrip())] + "pass", *lines[which:]]
    else:
        mutated = mutate_code(source, get_operator(name)(), which).splitlines()
    with suppress(SyntaxError):
        if _meaning("\n".join(mutated)) != _meaning(source):
            first = next(at for at, (a, b) in enumerate(zip(lines, mutated, strict=False)) if a != b)
            rest = len(lines) - first
            same = next(at for at in range(rest) if lines[-1 - at] != mutated[-1 - at])
            before, after = lines[first : len(lines) - same], mutated[first : len(mutated) - same]
            return {"line": first + 1, "operator": name, "before": before, "after": after}
    return None


def _meaning(source: str) -> str:
    """The syntax tree without annotations."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def run(given: Path, output: Path, workers: int, seconds: float, minutes: float) -> None:
    """Run the mutants, and write the result of each; the survivors come first.

    Args:
        given: what `sample` wrote.
        output: a JSON file.
        workers: that run at once.
        seconds: of tests that a mutant is run against at most; the longest are left out.
        minutes: after these all ends; mutants that were not run to the end are in no result.
    """
    end = time.monotonic() + 60 * minutes
    read = json.loads(given.read_text())
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        trees = _trees(Path(folder), workers)

        def in_a_tree(mutant: dict[str, Any], tests: Sequence[str], limit: float) -> dict[str, Any]:
            tree = trees.get()
            try:
                return _outcome(tree, mutant, tests, limit)
            finally:
                trees.put(tree)

        used = sorted({test for mutant in read["mutants"] for test in mutant["tests"]})
        parts = [[read["tests"][test] for test in used[start :: 4 * workers]] for start in range(4 * workers)]
        plain = list(pool.map(lambda tests: in_a_tree({}, tests, 60 * minutes), filter(None, parts)))
        failed = {test for result in plain for test in result["failed"]}
        took = {test: each for result in plain for test, each in result["took"].items() if test not in failed}
        print(f"{len(took)} tests take {sum(took.values()):.0f} s; these fail, and are left out: {sorted(failed)}")
        if lost := sorted({read["tests"][test] for test in used} - took.keys() - failed):
            print(f"{len(lost)} tests do not run here, and are left out: {lost}")

        def one(mutant: dict[str, Any]) -> dict[str, Any] | None:
            names = (read["tests"][test] for test in mutant.pop("tests"))
            tests = sorted((test for test in names if test in took), key=took.__getitem__)
            sums = list(accumulate(took[test] for test in tests))
            kept = bisect_right(sums, seconds)
            if not kept:
                return {**mutant, "outcome": "no tests"}
            limit, left = 20 + 3 * sums[kept - 1], end - time.monotonic()
            found = in_a_tree(mutant, tests[:kept], min(limit, left)) if left > 0 else {"outcome": SLOW}
            if found["outcome"] == SLOW and left < limit:
                return None
            found.pop("took")
            return {**mutant, **found, "tests": kept, "left out": tests[kept:]}

        for done in as_completed([pool.submit(one, mutant) for mutant in read["mutants"]]):
            if result := done.result():
                results.append(result)
                results.sort(key=lambda each: (each["outcome"] != SURVIVED, each["file"], each["line"]))
                output.write_text(json.dumps(results, indent=1))
                print(f"{len(results)}: {result['outcome']} {result['file']}:{result['line']}", flush=True)
    print(Counter(each["outcome"] for each in results), f"of {len(read['mutants'])}")


def _trees(folder: Path, count: int) -> queue.Queue[Path]:
    """Copies of this tree, compiled."""
    first, trees = folder / "0", queue.Queue[Path]()
    for each in COPIED:
        shutil.copytree(ROOT / each, first / each, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for each in filter(Path.is_file, ROOT.glob("*.*")):
        shutil.copy2(each, first)
    compileall.compile_dir(first, quiet=2)
    for number in range(count):
        trees.put(shutil.copytree(first, folder / str(1 + number)))
    return trees


def _outcome(tree: Path, mutant: dict[str, Any], tests: Sequence[str], limit: float) -> dict[str, Any]:
    """The result of the tests in a tree with a mutant, or without one."""
    report = tree / "report.json"
    report.write_text(json.dumps({"tests": tests, "stop": bool(mutant)}))
    began = time.monotonic()
    with _mutated(tree, mutant) if mutant else nullcontext():
        code = _called(tree, limit, sys.executable, "tools/mutate.py", "test", str(report))
    found = json.loads(report.read_text())
    return {
        "outcome": {0: SURVIVED, 5: "no tests", None: SLOW}.get(code, "killed"),
        "failed": found.get("failed", []),
        "seconds": round(time.monotonic() - began, 1),
        "took": found.get("took", {}) if not mutant else {},
    }


@contextmanager
def _mutated(tree: Path, mutant: dict[str, Any]) -> Iterator[None]:
    """A tree with the mutant; afterwards the file has its old time, so that its compiled form counts as up to date."""
    path = tree / mutant["file"]
    source, times = path.read_text(), path.stat()
    lines, first = source.splitlines(), mutant["line"] - 1
    place = slice(first, first + len(mutant["before"]))
    if lines[place] != mutant["before"]:
        raise SystemExit(f"{mutant['file']} has changed since the mutants were sampled: sample them again")
    lines[place] = mutant["after"]
    path.write_text("\n".join([*lines, ""]))
    try:
        yield
    finally:
        path.write_text(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _called(tree: Path, limit: float, *command: str) -> int | None:
    """The status of a command, or None if it took longer."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True, **quiet)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it has called
        process.wait()


def test(report: Path) -> int:
    """Run the tests that a file names, and write their results there."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    given = json.loads(report.read_text())
    recorder = Recorder(wanted=given["tests"])
    files = sorted({name.partition("::")[0] for name in given["tests"]})
    code = run_tests(files, recorder, "--continue-on-collection-errors", *(["-x"] if given["stop"] else []))
    report.write_text(json.dumps({"took": recorder.seconds, "failed": sorted(recorder.failed)}))
    return code


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sampling = commands.add_parser("sample")
    sampling.add_argument("output", type=Path)
    sampling.add_argument("--seed", type=int, default=1)
    sampling.add_argument("--count", type=int, default=300)
    sampling.add_argument("--folders", nargs="+", default=MUTATED)
    sampling.add_argument("--tests", nargs="+", default=TESTS)
    running = commands.add_parser("run")
    running.add_argument("given", type=Path)
    running.add_argument("output", type=Path)
    running.add_argument("--workers", type=int, default=2)
    running.add_argument("--seconds", type=float, default=60.0)
    running.add_argument("--minutes", type=float, default=60.0)
    testing = commands.add_parser("test")
    testing.add_argument("report", type=Path)
    arguments = vars(parser.parse_args())
    command = arguments.pop("command")
    return {"sample": sample, "run": run, "test": test}[command](**arguments) or 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    sys.exit(main())
