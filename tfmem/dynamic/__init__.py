"""Train networks whose graph differs from example to example (VPPS): `specialize` once, one call for each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from custom_ops.errors import DynamicError
from tfmem.dynamic.batch import Batch, Node, as_batch
from tfmem.dynamic.datasets import dataset
from tfmem.dynamic.expressions import (
    ELEMENTWISE,
    add_n,
    affine,
    concat,
    constant,
    dropout,
    elementwise,
    embedding_lookup,
    matmul,
    matvec,
    reduce_max,
    reduce_sum,
    softmax,
    sparse_softmax_cross_entropy,
    split,
    vector,
)
from tfmem.dynamic.extension import Expression
from tfmem.dynamic.handle import Handle
from tfmem.dynamic.inputs import inputs
from tfmem.dynamic.kinds import NodeKind, Result, node, trace
from tfmem.dynamic.layer import Layer
from tfmem.dynamic.optimizers import SGD, Adam
from tfmem.dynamic.outcome import Outcome
from tfmem.dynamic.specialize import specialize

__all__ = [
    "SGD",
    "Adam",
    "Batch",
    "DynamicError",
    "Expression",
    "Handle",
    "Layer",
    "Node",
    "NodeKind",
    "Outcome",
    "Result",
    "add_n",
    "affine",
    "as_batch",
    "concat",
    "constant",
    "dataset",
    "dropout",
    "elementwise",
    "embedding_lookup",
    "inputs",
    "matmul",
    "matvec",
    "node",
    "reduce_max",
    "reduce_sum",
    "softmax",
    "sparse_softmax_cross_entropy",
    "specialize",
    "split",
    "trace",
    "vector",
]


# Every op of the table of elementwise ops is a function here: `tanh`, `multiply`, `select`. They are module attributes,
# since a lookup by `__getattr__` (PEP 562) would take longer than recording the op.
globals().update(ELEMENTWISE)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Expression]: ...
