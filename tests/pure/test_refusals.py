"""Reasons as values: their words, their page, and that a test names each of them."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

from graph_passes.graph.ir import Node, TensorId
from graph_passes.refusals import Reason, Refusal, fault
from tools.refusal_table import MARKS, main, table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "refusals.md"


def test_a_refusal_is_a_value_that_prints_as_a_sentence() -> None:
    found = Reason.STEP_FETCHED(node="lstm/step_3")
    assert found == Refusal(Reason.STEP_FETCHED, (("node", "lstm/step_3"),))
    assert str(found) == "'lstm/step_3' of a single step is fetched by name"
    assert Reason.CELL_OP.of(Node("a", "Cholesky")) == Reason.CELL_OP(node="a", op="Cholesky")
    assert str(Reason.UNROLLED_BECAUSE(because=found)).endswith("and 'lstm/step_3' of a single step is fetched by name")
    assert fault(KeyError("x")) == Reason.FAULT(error="KeyError: 'x'")


def test_nodes_get_the_names_of_an_equal_graph() -> None:
    inner = Reason.RANK(tensor=TensorId("a", 1))
    found = Reason.SIZED_BY_DATA(because=inner, op="a").renamed({"a": "b"})
    assert found == Reason.SIZED_BY_DATA(because=Reason.RANK(tensor=TensorId("b", 1)), op="a")
    assert Reason.LIST_INDEX(node="a").renamed({"a": "b"}) == Reason.LIST_INDEX(node="b")


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.name)
def test_each_sentence_says_something_and_its_fields_are_names(reason: Reason) -> None:
    parts = list(string.Formatter().parse(reason.sentence))
    assert any(words.strip() for words, *_ in parts)
    assert all(name is None or name.isidentifier() for _, name, _, _ in parts)
    assert "nobody" not in reason.sentence
    assert len(reason.sentence.split()) <= 30


@pytest.mark.skipif(not PAGE.is_file(), reason="the documentation is not installed; run from a checkout")
def test_the_page_holds_the_table() -> None:
    text = PAGE.read_text()
    assert text[text.index(MARKS[0]) : text.index(MARKS[1])] == f"{MARKS[0]}\n{table()}\n"


def test_the_command_writes_the_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nbehind\n")
    assert main(["--document", str(page)]) == 0
    assert page.read_text() == f"before\n{MARKS[0]}\n{table()}\n{MARKS[1]}\nbehind\n"


def test_a_test_produces_each_reason() -> None:
    """Each is named where a test compares what a pass said; this file says nothing of a pass."""
    tests = [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    named = {name for file in tests for name in re.findall(r"\bReason\.([A-Z_0-9]+)\b", file.read_text())}
    assert {reason.name for reason in Reason} - named == set()
