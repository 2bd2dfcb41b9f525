"""Imports point down only: tfmem -> graph_passes -> custom_ops. Read from the syntax tree."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("custom_ops", "graph_passes", "tfmem")  # bottom first
OF_GRAPH_PASSES = ("graph", "lower", "analysis", "passes", "pipeline")  # bottom first
OF_TFMEM = ("capture", "timing", "kernels", "runtime", "steps", "frontends", "dynamic")  # bottom first


def sources(*packages: str) -> list[Path]:
    return [file for package in packages for file in sorted((ROOT / package).rglob("*.py"))]


def imports(nodes: Iterator[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and full module name of every import among `nodes`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or "."


def at_module_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the module is imported; `if TYPE_CHECKING:` blocks do not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from at_module_level(node)


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


@cache
def imported(file: Path, module_level_only: bool) -> list[tuple[int, str]]:
    tree = tree_of(file)
    return list(imports(at_module_level(tree) if module_level_only else ast.walk(tree)))


def found(files: list[Path], package: str, module_level_only: bool = False) -> list[str]:
    """Where `files` import `package` or something in it, as "path:line: module"."""
    return [
        f"{file.relative_to(ROOT)}:{line}: {module}"
        for file in files
        for line, module in imported(file, module_level_only)
        if module == package or module.startswith(f"{package}.")
    ]


@pytest.mark.parametrize(
    ("lower", "upper"),
    [(lower, upper) for i, lower in enumerate(LAYERS) for upper in LAYERS[i + 1 :]],
)
def test_no_layer_imports_one_above_it(lower: str, upper: str) -> None:
    assert sources(lower), f"{lower} has no modules: is the test reading the right folder?"
    assert found(sources(lower), upper) == []


@pytest.mark.parametrize(
    ("lower", "upper"),
    [(lower, upper) for i, lower in enumerate(OF_TFMEM) for upper in OF_TFMEM[i + 1 :]],
)
def test_no_folder_of_tfmem_imports_one_above_it(lower: str, upper: str) -> None:
    assert sources(f"tfmem/{lower}"), f"tfmem/{lower} has no modules: is the test reading the right folder?"
    assert found(sources(f"tfmem/{lower}"), f"tfmem.{upper}") == []


@pytest.mark.parametrize(
    ("lower", "upper"),
    [(lower, upper) for i, lower in enumerate(OF_GRAPH_PASSES) for upper in OF_GRAPH_PASSES[i + 1 :]],
)
def test_no_folder_of_graph_passes_imports_one_above_it(lower: str, upper: str) -> None:
    assert sources(f"graph_passes/{lower}"), (
        f"graph_passes/{lower} has no modules: does the test read the right folder?"
    )
    assert found(sources(f"graph_passes/{lower}"), f"graph_passes.{upper}") == []


PASS_FOLDERS = sorted(path for path in (ROOT / "graph_passes" / "passes").iterdir() if (path / "__init__.py").exists())
EDITS = {"insert", "rewire", "add_control", "remove_control"}  # of `Editor`


@pytest.mark.parametrize("folder", PASS_FOLDERS, ids=lambda folder: folder.name)
def test_a_pass_is_a_folder_with_a_plan_and_what_carries_it_out(folder: Path) -> None:
    assert {"plan.py", "apply.py"} <= {file.name for file in folder.iterdir()}
    assert ast.get_docstring(tree_of(folder / "plan.py")), "plan.py opens with the hard case and the steps"


def test_there_is_one_kind_of_pass_and_each_folder_is_one() -> None:
    from graph_passes.pass_infra import Pass
    from graph_passes.pipeline import PASSES

    assert sorted(each.name for each in PASSES) == [folder.name for folder in PASS_FOLDERS]
    assert all(type(each) is Pass for each in PASSES)
    for each in PASSES:
        modules = each.plan.__module__, each.rewrites.__module__  # type: ignore[attr-defined]
        assert modules == tuple(f"graph_passes.passes.{each.name}.{name}" for name in ("plan", "apply"))


@pytest.mark.parametrize("folder", PASS_FOLDERS, ids=lambda folder: folder.name)
def test_passes_do_not_import_each_other(folder: Path) -> None:
    others = [other.name for other in PASS_FOLDERS if other != folder]
    files = sources(f"graph_passes/passes/{folder.name}")
    assert [line for other in others for line in found(files, f"graph_passes.passes.{other}")] == []


@pytest.mark.parametrize("folder", PASS_FOLDERS, ids=lambda folder: folder.name)
def test_what_plans_imports_nothing_that_edits(folder: Path) -> None:
    files = [file for file in sources(f"graph_passes/passes/{folder.name}") if file != folder / "apply.py"]
    assert found(files, f"graph_passes.passes.{folder.name}.apply") == []
    names = {"Editor", "apply_rewrites", "applied", "Rewrite"}
    for file in files:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ImportFrom):
                assert names.isdisjoint(alias.name for alias in node.names), f"{file}:{node.lineno}"


def test_only_a_working_copy_is_edited_outside_of_the_graph_itself() -> None:
    """In a function that makes the copy; `with_waits` gives a new graph, and a step's source is what is edited."""
    allowed = {"with_waits", "edit"}
    edits = []
    for file in [
        *sources("graph_passes/analysis"),
        *sources("graph_passes/passes"),
        ROOT / "graph_passes" / "pipeline.py",
    ]:
        for function in ast.walk(tree_of(file)):
            if not isinstance(function, ast.FunctionDef) or function.name in allowed:
                continue
            attributes = {
                node.func.attr
                for node in ast.walk(function)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            }
            text = ast.unparse(function)
            called = {
                name
                for name in EDITS & attributes
                if any(f"{owner}.{name}(" in text for owner in ("graph", "copy", "region"))
            }
            if called and "working_copy" not in attributes:
                edits.append(f"{file.relative_to(ROOT)}:{function.lineno}: {function.name}")
    assert edits == []


def test_graph_passes_import_tensorflow_in_serde_alone() -> None:
    files = [file for file in sources("graph_passes") if file.name != "serde.py"]
    assert found(files, "tensorflow") + found(files, "keras") + found(files, "tf_keras") == []


def test_custom_ops_import_without_tensorflow() -> None:
    allowed = {ROOT / "custom_ops" / "load.py"}
    files = [file for file in sources("custom_ops") if file not in allowed]
    assert found(files, "tensorflow", module_level_only=True) == []


def test_planning_loads_no_tensorflow() -> None:
    """The rules above, seen from outside: what plans and prints needs no TensorFlow."""
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in sources("graph_passes", "custom_ops")
        if file.name not in {"serde.py", "load.py"}
    ]
    script = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        "sys.exit('tensorflow' in sys.modules and 'tensorflow was imported')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr


def test_pure_tests_import_no_tensorflow() -> None:
    assert found(sources("tests/pure"), "tensorflow") == []


def test_matplotlib_is_imported_in_plot_alone_and_only_to_draw() -> None:
    files = sources(*LAYERS)
    assert found([file for file in files if file.name != "plot.py"], "matplotlib") == []
    assert found(files, "matplotlib", module_level_only=True) == []


def reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in {"environ", "getenv", "putenv"} for alias in node.names)
    return (
        isinstance(node, ast.Attribute)
        and node.attr in {"environ", "getenv", "putenv"}
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    )


def test_the_environment_is_read_in_config_alone() -> None:
    """But for the compiler's name, $CXX, which the build reads and nothing that runs."""
    allowed = {ROOT / "tfmem" / "options.py", ROOT / "custom_ops" / "build_flags.py"}
    readers = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sources(*LAYERS)
        if file not in allowed
        for node in ast.walk(tree_of(file))
        if reads_environment(node)
    ]
    assert readers == []
