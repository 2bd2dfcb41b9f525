"""Errors that users meet say what to do (CONTRIBUTING.md, "Writing", rule 7): read from the code that raises them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import graph_passes.errors
from custom_ops.errors import TfmemError

ROOT = Path(__file__).resolve().parents[2]
ERRORS = {
    name
    for name, value in vars(graph_passes.errors).items()
    if isinstance(value, type) and issubclass(value, TfmemError)
} | {"DynamicError", "PlotError", "AddonsError"}
# An action behind a semicolon, what was expected, the names that there are, or a command.
CURE = re.compile(r"; |expected|there (?:is|are)\b|: (?:call|give|set|pip) ")
# What raises there is an error of tfmem's, which becomes a warning that asks for a report (tfmem/runtime/faults.py).
INTERNAL = {
    "tfmem/capture/body_source.py",
    "tfmem/capture/concrete_function.py",
    "tfmem/capture/inserted_gradients.py",
    "tfmem/capture/live_editor.py",
    "tfmem/steps/known_plans.py",
    "tfmem/steps/trials.py",
}
WHOLE = "the rewritten graph lacks op"  # another of tfmem's


def message(node: ast.expr) -> str:
    """The text of a literal, with what is formatted left out; nothing if it is made elsewhere."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
    return ""


def raised(source: str) -> Iterator[str]:
    """The messages with which code raises errors of users."""
    for node in ast.walk(ast.parse(source)):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and call.args and isinstance(call.func, ast.Name) and call.func.id in ERRORS:
            yield message(call.args[0])


def lacking(source: str) -> list[str]:
    """The messages of `source` that say no cure; those that hold another error's text alone count as having one."""
    return [
        text
        for text in raised(source)
        if re.search(r"\w", text.replace("...", "")) and not CURE.search(text) and not text.startswith(WHOLE)
    ]


def test_errors_say_what_to_do() -> None:
    found = {
        name: texts
        for file in sorted((ROOT / "tfmem").rglob("*.py"))
        if (name := file.relative_to(ROOT).as_posix()) not in INTERNAL and (texts := lacking(file.read_text()))
    }
    assert found == {}


def test_an_error_without_a_cure_is_found() -> None:
    assert lacking("raise DynamicError('no such kind')") == ["no such kind"]
    assert lacking("raise DynamicError(f'{x} is no kind; pass one')") == []
    assert lacking("raise ValueError('no such kind')") == []
