"""No test waits for a child process without a limit."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
WAITS = ("run", "call", "check_call", "check_output", "communicate", "wait")


def without_limit(source: str) -> list[int]:
    """The lines that wait for a child process and name no limit."""
    tree = ast.parse(source)
    processes = {name.asname or name.name for name in _subprocess_imports(tree)} | {"subprocess", "process"}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        owner = function.value if isinstance(function, ast.Attribute) else None
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        last = owner.attr.strip("_") if isinstance(owner, ast.Attribute) else getattr(owner, "id", name)
        if name not in WAITS or last not in processes:
            continue
        limited = any(keyword.arg == "timeout" for keyword in node.keywords) or (name == "wait" and node.args)
        if not limited:
            found.append(node.lineno)
    return found


def _subprocess_imports(tree: ast.Module) -> list[ast.alias]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "subprocess"]
    return [name for node in nodes for name in node.names]


@pytest.mark.parametrize("folder", sorted(entry.name for entry in TESTS.iterdir() if entry.is_dir()))
def test_every_wait_for_a_child_process_has_a_limit(folder: str) -> None:
    places = [
        f"{file.relative_to(TESTS)}:{line}"
        for file in sorted((TESTS / folder).rglob("*.py"))
        for line in without_limit(file.read_text())
    ]
    assert not places, f"pass timeout= here: {', '.join(places)}"


@pytest.mark.parametrize(
    "text",
    [
        "subprocess.run(['true'], check=True)",
        "from subprocess import check_output\ncheck_output(['true'])",
        "process.wait()",
        "self._process.communicate()",
    ],
)
def test_a_wait_without_a_limit_is_found(text: str) -> None:
    assert without_limit(text) == [text.count("\n") + 1]


@pytest.mark.parametrize(
    "text", ["subprocess.run(['true'], timeout=3)", "process.wait(20)", "event.wait()", "subprocess.Popen(['true'])"]
)
def test_what_has_a_limit_or_needs_none_is_not(text: str) -> None:
    assert without_limit(text) == []
