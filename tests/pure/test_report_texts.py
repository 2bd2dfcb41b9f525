"""State is data: no code compares or takes apart the words of a report."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = frozenset(
    {"decision", "fusion", "fusion_state", "jit_compile", "notes", "not_replaced", "not_stitched", "replaced"}
)
TAKE_APART = frozenset(
    {"startswith", "endswith", "find", "index", "partition", "removeprefix", "split", "search", "match"}
)


def is_words(node: ast.AST) -> bool:
    """Whether an expression is the text of a report, or a part of it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        return any(map(is_words, node.args))
    if isinstance(node, ast.Subscript):
        return is_words(node.value)
    return isinstance(node, ast.Attribute) and node.attr in WORDS and not isinstance(node.ctx, ast.Store)


def is_text(node: ast.AST) -> bool:
    """Whether an expression is a text that is written down."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def told_by_words(tree: ast.AST) -> Iterator[int]:
    """Lines that ask what a report says in words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TAKE_APART:
            if is_words(node.func.value) or any(map(is_words, node.args)):
                yield node.lineno
        elif isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            if any(map(is_words, sides)) and any(map(is_text, sides)):
                yield node.lineno
        elif (
            isinstance(node, ast.comprehension | ast.For) and is_words(node.iter) and isinstance(node.target, ast.Name)
        ):
            yield from _asked(tree, node.target.id)


def _asked(tree: ast.AST, name: str) -> Iterator[int]:
    """Lines that take the text `name`, a note of a report, apart or look something up in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TAKE_APART:
            if isinstance(node.func.value, ast.Name) and node.func.value.id == name:
                yield node.lineno
        elif isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            if any(map(is_text, sides)) and any(isinstance(each, ast.Name) and each.id == name for each in sides):
                yield node.lineno


@pytest.mark.parametrize("package", ["tfmem", "graph_passes"])
def test_nothing_is_told_by_the_words_of_a_report(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in files
        for line in told_by_words(ast.parse(file.read_text(), str(file)))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        'report.fusion.startswith("stitched")',
        'report.decision == "moved"',
        '"off" in str(report.jit_compile)',
        'any(note.startswith("OVER BUDGET") for note in report.notes)',
        '[note for note in report.notes if "oneDNN" in note]',
        're.match("left", report.fusion)',
    ],
)
def test_what_would_be_found(line: str) -> None:
    assert list(told_by_words(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    ["report.fusion_state is Fusion.LEFT", "report.decision.is_unchanged", 'f"{report.fusion}"', "report.fusion"],
)
def test_what_is_data(line: str) -> None:
    assert not list(told_by_words(ast.parse(line)))
