"""The table of elementwise ops: what an entry says holds, and all readers follow it."""

from __future__ import annotations

import ast
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from custom_ops.expr import activations, arithmetic, comparisons, cpp, transcendental
from custom_ops.expr.table import FLOAT_OPS, TABLE
from custom_ops.expr.table_entry import FLOATS
from custom_ops.recurrent.cell_builder import CellBuilder
from custom_ops.recurrent.codegen.cell_functions import cell_struct
from custom_ops.recurrent.codegen.schedule import schedule
from custom_ops.recurrent.search.elementwise_cost import _operations
from graph_passes.lower.elementwise import RULES
from graph_passes.passes.recurrent.lower.elementwise_ops import _WITHOUT_RULE, CELL_OPS, ELEMENTWISE_OPS

ROOT = Path(__file__).parents[2]
ENDS = [-np.inf, -30.0, -2.0, -1.0, -0.25, 0.0, 0.5, 1.0, 3.0, np.inf]


@pytest.mark.parametrize("op", TABLE)
def test_the_interval_contains_the_values(op: str) -> None:
    """The values of every argument in its own interval, ends and numbers between them."""
    entry = TABLE[op]
    intervals = [(low, high) for low, high in product(ENDS, ENDS) if low <= high]
    random = np.random.default_rng(0)
    chosen = random.permutation(len(intervals))[:40]
    for first, second in product(chosen, chosen[:20] if entry.arity > 1 else chosen[:1]):
        bounds = [intervals[first], intervals[second], intervals[(first + second) % len(intervals)]][: entry.arity]
        points = [[low, *np.clip(random.normal(size=3) * 2, low, high), high] for low, high in bounds]
        arguments = np.array(list(product(*points))).T
        with np.errstate(all="ignore"):
            values = np.asarray(entry.numpy(*arguments), float)
        low, high = entry.interval(*bounds)
        finite = np.isfinite(arguments).all(axis=0) & ~np.isnan(values)
        assert (values[finite] >= low).all()
        assert (values[finite] <= high).all()


def test_names_are_those_that_programs_can_write() -> None:
    entries = [op for module in (arithmetic, comparisons, transcendental, activations) for op in module.OPS]
    assert len({op.name for op in entries}) == len(entries) == len(TABLE)
    assert not TABLE.keys() & {"input", "constant", "position", "cast", "reduce", "output", "axes", "tensor"}
    assert not TABLE.keys() & {"sequence", "invariant", "vector", "state", "product", "row_sum", "states"}


def test_a_tensorflow_op_means_one_entry() -> None:
    names = [name for op in TABLE.values() for name in (*op.tf_ops, *op.reversed_tf_ops)]
    assert len(set(names)) == len(names)
    assert {name for op in FLOAT_OPS.values() for name in (*op.tf_ops, *op.reversed_tf_ops)} <= CELL_OPS


@pytest.mark.parametrize("op", FLOAT_OPS)
def test_every_reader_knows_every_op(op: str) -> None:
    """A cell of it has a derivative, a cost, CUDA code and text; C++ has its enumerator and its loop."""
    builder = CellBuilder()
    arguments = builder.sequence(FLOAT_OPS[op].arity)
    state = builder.state()
    cell = builder.build([state], [[builder.apply(op, *arguments)]])
    costly = FLOAT_OPS[op].cost == "activation"
    counted = _operations(cell, schedule(cell).live)
    assert (counted.activations, counted.others) == (costly, not costly)
    assert f"\n{op} " in cell.to_text()
    assert f"value_{cell.outputs[0][0]} = " in cell_struct(schedule(cell))
    header = cpp.header()
    assert f'X({cpp.enumerator(op)}, "{op}", {FLOAT_OPS[op].arity}, kFloats' in header
    assert header.count(f"S({cpp.enumerator(op)}, ") == 1  # of VECTORS, COMPARISONS or NUMBERS


def test_no_other_place_lists_ops() -> None:
    """Names of ops stand in formulas everywhere, but as keys or in a list of many in the table's modules alone."""

    def names(node: ast.AST) -> set[Any]:
        keys = node.keys if isinstance(node, ast.Dict) else node.elts if isinstance(node, ast.List | ast.Set) else []
        return {key.value for key in keys if isinstance(key, ast.Constant)} & TABLE.keys()

    lists = {
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for package in ("custom_ops", "graph_passes", "tfmem")
        for file in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Dict | ast.List | ast.Set) and len(names(node)) > 2 and "cells.py" not in file.name
    }
    assert lists == set()
    sources = (ROOT / "custom_ops" / "ops").rglob("*.[ch]*")
    listed = r"(?:case\s+|[{,]\s*)Elementwise::%s\b"  # a label of a switch, or an entry; not what a formula applies
    for file in sources:
        text = file.read_text()
        assert sum(bool(re.search(listed % cpp.enumerator(name), text)) for name in TABLE) <= 2, file


def test_cells_take_their_ops_from_the_vocabulary_of_all_passes() -> None:
    assert RULES.keys() | {"StopGradient"} >= CELL_OPS  # which fusion looks through
    assert RULES.keys() < ELEMENTWISE_OPS
    assert RULES.keys().isdisjoint(_WITHOUT_RULE.split()), "a rule says that these are elementwise"


def test_ops_for_cells_take_all_floats() -> None:
    assert all(set(FLOATS) <= set(op.dtypes) or not set(FLOATS) & set(op.dtypes) for op in TABLE.values())
