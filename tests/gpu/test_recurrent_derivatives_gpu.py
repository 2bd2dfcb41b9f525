"""The derivative of every elementwise op of a cell where it is not finite, on a GPU. Needs a GPU and NVRTC.

`tests/tf/test_recurrent_derivatives.py` compares the definition with TensorFlow; this compares the kernels with the
definition. Values agree roughly only, since derivatives such as 1 - tanh(x)^2 cancel; what is NaN or infinite agrees.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from custom_ops.expr.table import FLOAT_OPS, TABLE
from custom_ops.jit.device import DeviceContext
from custom_ops.recurrent import reference
from custom_ops.recurrent.cell import Cell
from custom_ops.recurrent.cell_builder import CellBuilder
from custom_ops.recurrent.differentiate import Request, differentiate
from custom_ops.recurrent.spec import Configuration
from graph_passes.passes.recurrent.lower.elementwise_ops import CELL_OPS, lower
from tests.elementwise_edges import different, tame_points
from tests.gpu_kernels import run

pytest_plugins = ("tests.gpu_device",)

UNITS = 16
COUNTS = {name: op.arity for op in FLOAT_OPS.values() for name in op.tf_ops} | {"AddN": 2, "ClipByValue": 3}
BOOLEAN = {name for op in TABLE.values() if op.comparison for name in (*op.tf_ops, *op.reversed_tf_ops)}
BOOLEAN |= {"NotEqual", "LogicalAnd", "LogicalOr", "LogicalNot", "LogicalXor"}


def cell_of(op: str) -> Cell:
    builder = CellBuilder()
    columns = builder.sequence(COUNTS.get(op, 1))
    state = builder.state()
    new = builder.product(state, builder.matrix(1, 1))
    return builder.build([new], [[lower(builder, op, {"alpha": 0.3}, columns)]])


def rows(array: Any) -> Any:
    """`[1, batch, UNITS]`, the first numbers again at the end."""
    return np.resize(array, (1, -(-len(array) // UNITS), UNITS))


@pytest.mark.parametrize("op", sorted(CELL_OPS - BOOLEAN))
def test_values_and_derivatives(device: DeviceContext, op: str) -> None:
    arguments, upstream = tame_points(op, COUNTS.get(op, 1))
    columns, upstream = np.concatenate([rows(array) for array in arguments], -1), rows(upstream)
    cell = cell_of(op)
    gradient = differentiate(cell, Request(matrices=()))
    fixed = {
        "invariants": [],
        "vectors": [],
        "matrices": [np.eye(UNITS, dtype="float32")],
    }

    def both(cell: Cell, sequences: list[Any], reverse: bool) -> tuple[list[Any], list[Any]]:
        state = np.zeros([sequences[0].shape[1], UNITS], "float32")
        given = {"sequences": sequences, **fixed, "states": [state] * len(cell.states)}
        (found,), status = run(device, cell, UNITS, Configuration(rows=2, lanes=8), [given], reverse=(reverse,))
        assert status == 0
        outputs, finals = reference.run(cell, UNITS, *given.values(), reverse=reverse)
        return found, [*outputs, *finals]

    kept, expected = both(gradient.forward, [columns], reverse=False)
    assert not len(different(kept[0], expected[0], rtol=1e-4)), op
    tensors = {"sequence": [columns], "output": expected, "gradient": [upstream]}  # both start from the same
    read = [tensors[source.kind][source.tensor] for source in gradient.sequences]
    found, expected = both(gradient.backward, read, reverse=True)
    for ours, theirs in zip(found, expected, strict=True):
        wrong = different(ours.reshape(-1), theirs.reshape(-1), rtol=0.1)
        assert not len(wrong), (op, ours.reshape(-1)[wrong[:5]], theirs.reshape(-1)[wrong[:5]])
