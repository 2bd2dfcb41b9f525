"""What an object keeps for later calls lies in fields that exist before any thread can see the object.

Two threads may each begin a `cached_property`: the one that ends last replaces the dictionary into which the other
wrote. So no `cached_property` gives an empty container for others to fill."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
EMPTY = ("{}", "[]", "dict()", "list()", "set()")


def filled_later(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Cached properties whose whole body, but for the docstring, returns an empty container."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and "cached_property" in map(ast.unparse, node.decorator_list):
            *before, last = node.body
            empty = isinstance(last, ast.Return) and last.value is not None and ast.unparse(last.value) in EMPTY
            if empty and all(isinstance(each, ast.Expr) for each in before):
                yield node


def test_no_cached_property_is_filled_later() -> None:
    files = [file for package in ("custom_ops", "graph_passes", "tfmem") for file in (ROOT / package).rglob("*.py")]
    assert files
    found = {
        f"{file.relative_to(ROOT)}: {node.name}" for file in files for node in filled_later(ast.parse(file.read_text()))
    }
    assert not found, f"make {', '.join(sorted(found))} a field with a default factory"


def test_a_filled_one_is_found() -> None:
    assert [
        node.name for node in filled_later(ast.parse("class A:\n @cached_property\n def b(self): 'x'; return {}"))
    ] == ["b"]
