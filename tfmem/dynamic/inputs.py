"""Real numbers of nodes that come with each batch: features, targets, and vectors of layers below.

inputs(75)          a table with rows of 75 numbers, other ones in each batch; a node reads a row by an argument
forward(batch, inputs=[pixels])
pixels [rows, 75]: arguments count all rows; [examples, rows, 75], padded or ragged: an
example's arguments count its own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from custom_ops.dynamic.node_code import OPEN_ROWS
from custom_ops.dynamic.spec import Spec
from custom_ops.errors import DynamicError
from tfmem.dynamic.batch import Batch


def inputs(width: int, name: str = "inputs", dtype: tf.DType = tf.float32) -> tf.Variable:
    """A parameter for `specialize` whose rows come with each batch.

    Args:
        width: numbers of a row.
        name: for messages.
        dtype: of the net's numbers.

    Returns:
        A variable without rows, `[None, width]`. The function of a node reads a row by `tf.gather(variable, number)` or
        `tfmem.dynamic.embedding_lookup`. A call gives the rows as `inputs=`.
    """
    return tf.Variable(tf.zeros([0, width], dtype), shape=[None, width], trainable=False, name=name)


def is_open(variable: Any) -> bool:
    """Whether the rows of a parameter come with each batch."""
    shape = variable.shape
    return shape.rank == 2 and shape[0] is None and shape[1] is not None


@tf.autograph.experimental.do_not_convert
def placed(
    spec: Spec, variables: Sequence[tf.Variable], batch: Batch, given: Sequence[Any] | None
) -> tuple[Batch, list[Any]]:
    """A batch whose arguments count all rows, and what the op gets as parameters.

    Args:
        spec: the kinds.
        variables: the parameters.
        batch: as the user gave it.
        given: the rows of each open parameter, in order; None: those that the variables hold.

    Raises:
        DynamicError: there are other numbers of them than parameters, or a shape does not fit.
    """
    if given is None:
        return batch, list(variables)
    numbers = [number for number, variable in enumerate(variables) if is_open(variable)]
    tensors = list(given) if isinstance(given, tuple | list) else [given]
    if len(tensors) != len(numbers):
        raise DynamicError(
            f"inputs has {len(tensors)} tensors; expected {len(numbers)}, one for each parameter that "
            "tfmem.dynamic.inputs made"
        )
    parameters: list[Any] = list(variables)
    for number, tensor in zip(numbers, tensors, strict=True):
        rows, starts = _rows(tensor, variables[number])
        parameters[number] = rows
        if starts is not None:
            batch = _moved(spec, batch, number, starts)
    return batch, parameters


def _rows(tensor: Any, variable: tf.Variable) -> tuple[tf.Tensor, Any]:
    """All rows of an input, and the first of each example (a tensor or an array); None where arguments count all."""
    width, starts = variable.shape[1], None
    if isinstance(tensor, tf.RaggedTensor):
        starts = tensor.row_splits.numpy()[:-1] if tf.executing_eagerly() else tensor.row_starts()
        tensor = tensor.values
    else:
        tensor = tf.convert_to_tensor(tensor, variable.dtype)
        if tensor.shape.rank == 3:
            starts = tf.range(tf.shape(tensor)[0]) * tf.shape(tensor)[1]
            tensor = tf.reshape(tensor, [-1, tensor.shape[2]])
    shape = tensor.shape
    if tensor.dtype != variable.dtype or shape.rank != 2 or shape[1] not in {None, width}:
        raise DynamicError(
            f"input '{variable.name}' is {tensor.dtype.name} of shape {shape}; expected {variable.dtype.name} "
            f"[rows, {width}], or [examples, rows, {width}]"
        )
    return tensor, starts


def _moved(spec: Spec, batch: Batch, number: int, starts: Any) -> Batch:
    """A batch whose arguments that read rows of a parameter count from the first row of all examples."""
    reads = spec.row_reads[number]
    if reads.shared:
        name, argument = reads.shared[0]
        raise DynamicError(
            f"kind '{name}' reads an input and something else by its argument {argument}; give each an argument, or "
            "give the rows of all examples together, [rows, width]"
        )
    if not any(map(any, reads.flags)):
        return batch
    kinds, arguments = batch.kinds, batch.arguments
    if tf.executing_eagerly():  # NumPy is faster than several single ops
        rows = np.repeat(np.asarray(starts, np.int32), np.diff(arguments.row_splits.numpy()))
        read = reads.of_nodes(kinds.values.numpy())
        if read is None or read.size != rows.size:
            return batch  # which the op refuses, with the example and the node
        moved = arguments.values.numpy() + read * rows
        return batch._replace(arguments=arguments.with_values(tf.constant(moved, tf.int32)))
    table = tf.RaggedTensor.from_row_lengths(
        tf.constant([int(flag) for flags in reads.flags for flag in flags], tf.int32), list(map(len, reads.flags))
    )
    first = tf.gather(tf.cast(starts, tf.int32), arguments.value_rowids())
    flags = tf.gather(table, kinds.values).values
    return batch._replace(arguments=arguments.with_values(arguments.values + flags * first))


def rows_of(shape: Sequence[int | None]) -> tuple[int, ...]:
    """A parameter's shape in a program; rows that come with each batch are `OPEN_ROWS`."""
    return tuple(OPEN_ROWS if size is None else size for size in shape)
