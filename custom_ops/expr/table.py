"""The table of elementwise ops: everything that reads or writes an op looks here."""

from __future__ import annotations

from custom_ops.expr import activations, arithmetic, comparisons, transcendental
from custom_ops.expr.table_entry import FLOATS, Op

TABLE: dict[str, Op] = {
    op.name: op for module in (arithmetic, comparisons, transcendental, activations) for op in module.OPS
}

# Ops that a recurrent cell can hold, whose values are all floating point.
FLOAT_OPS = {name: op for name, op in TABLE.items() if set(FLOATS) <= set(op.dtypes)}
